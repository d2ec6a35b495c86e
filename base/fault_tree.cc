#include "base/fault_tree.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <utility>

#include "absl/strings/str_split.h"
#include "base/env.h"

namespace holdfast {
namespace {

constexpr uint32_t kRootMode = 0755;

std::shared_ptr<FaultInode> NewDirectory(uint64_t number, uint32_t mode) {
  auto inode = std::make_shared<FaultInode>();
  inode->number = number;
  inode->mode = S_IFDIR | (mode & 07777);
  inode->links = 2;
  inode->uid = ::getuid();
  inode->gid = ::getgid();
  return inode;
}

// Components of an absolute path; false for "..", which a test has no reason to need.
bool Split(const std::string& path, std::vector<std::string>& components) {
  for (std::string& component : std::vector<std::string>(absl::StrSplit(path, '/'))) {
    if (component == "..") {
      return false;
    }
    if (!component.empty() && component != ".") {
      components.push_back(std::move(component));
    }
  }
  return true;
}

bool IsOrHolds(const FaultInode& directory, const FaultInode& wanted) {
  if (&directory == &wanted) {
    return true;
  }
  return std::any_of(directory.entries.begin(), directory.entries.end(), [&](const auto& entry) {
    return entry.second->is_directory() && IsOrHolds(*entry.second, wanted);
  });
}

}  // namespace

FaultContent::FaultContent(std::shared_ptr<FaultUsage> usage, std::string bytes)
    : usage_(std::move(usage)), bytes_(std::move(bytes)) {
  Account();
}

FaultContent::~FaultContent() {
  usage_->bytes -= accounted_;
}

uint64_t FaultContent::Size() {
  if (!fd_.valid()) {
    return bytes_.size();
  }
  // Asked each time: whoever got the descriptor can cut the file short, as a client can cut its
  // slot.
  struct stat st = {};
  return ::fstat(fd_.get(), &st) == 0 ? static_cast<uint64_t>(st.st_size) : 0;
}

void FaultContent::Account() {
  const uint64_t now = Size();
  usage_->bytes += now - accounted_;  // unsigned: a shrinking file wraps around to what is meant
  accounted_ = now;
}

void FaultContent::Read(uint64_t offset, std::span<std::byte> out) {
  if (out.empty()) {
    return;
  }
  if (!fd_.valid()) {
    std::memcpy(out.data(), bytes_.data() + offset, out.size());
    return;
  }
  for (size_t done = 0; done < out.size();) {
    const ssize_t got =
        ::pread(fd_.get(), out.data() + done, out.size() - done, static_cast<off_t>(offset + done));
    if (got <= 0) {
      std::memset(out.data() + done, 0, out.size() - done);  // cut short since the size was asked
      return;
    }
    done += static_cast<size_t>(got);
  }
}

void FaultContent::Write(uint64_t offset, std::span<const std::byte> data) {
  if (data.empty()) {
    return;
  }
  if (Size() < offset + data.size()) {
    Resize(offset + data.size());
  }
  if (!fd_.valid()) {
    std::memcpy(bytes_.data() + offset, data.data(), data.size());
    return;
  }
  for (size_t done = 0; done < data.size();) {
    const ssize_t put = ::pwrite(fd_.get(), data.data() + done, data.size() - done,
                                 static_cast<off_t>(offset + done));
    if (put <= 0) {
      return;
    }
    done += static_cast<size_t>(put);
  }
}

void FaultContent::Resize(uint64_t bytes) {
  if (!fd_.valid()) {
    bytes_.resize(static_cast<size_t>(bytes));
  } else if (::ftruncate(fd_.get(), static_cast<off_t>(bytes)) != 0) {
    return;
  }
  Account();
}

std::string FaultContent::Snapshot() {
  std::string copy(static_cast<size_t>(Size()), '\0');
  Read(0, std::as_writable_bytes(std::span<char>(copy)));
  return copy;
}

int FaultContent::Fd() {
  if (fd_.valid()) {
    return fd_.get();
  }
  UniqueFd fd(::memfd_create("holdfast-fault-env", MFD_CLOEXEC));
  if (!fd.valid()) {
    return -1;
  }
  const std::string bytes = std::move(bytes_);
  bytes_.clear();
  fd_ = std::move(fd);
  Write(0, std::as_bytes(std::span<const char>(bytes)));
  return fd_.get();
}

bool FaultInode::is_directory() const {
  return S_ISDIR(mode);
}

void FaultInode::SetAccess(uint32_t new_uid, uint32_t new_gid, uint32_t new_mode) {
  uid = new_uid == kKeepOwner ? uid : new_uid;
  gid = new_gid == kKeepOwner ? gid : new_gid;
  mode = (mode & S_IFMT) | (new_mode & 07777);
}

FaultTree::FaultTree() {
  LoseAll();
}

int FaultTree::Find(const std::string& path, std::shared_ptr<FaultInode>& inode) const {
  std::vector<std::string> components;
  if (!Split(path, components)) {
    return EINVAL;
  }
  std::shared_ptr<FaultInode> at = root_;
  for (const std::string& component : components) {
    if (!at->is_directory()) {
      return ENOTDIR;
    }
    const auto found = at->entries.find(component);
    if (found == at->entries.end()) {
      return ENOENT;
    }
    at = found->second;
  }
  inode = std::move(at);
  return 0;
}

int FaultTree::FindPlace(const std::string& path, Place& place) const {
  std::vector<std::string> components;
  if (!Split(path, components)) {
    return EINVAL;
  }
  if (components.empty()) {
    return EBUSY;
  }
  std::string parent = "/";
  for (size_t i = 0; i + 1 < components.size(); ++i) {
    parent += components[i] + "/";
  }
  if (const int error = Find(parent, place.directory); error != 0) {
    return error;
  }
  if (!place.directory->is_directory()) {
    return ENOTDIR;
  }
  place.name = components.back();
  if (place.name.size() > NAME_MAX) {
    return ENAMETOOLONG;
  }
  const auto found = place.directory->entries.find(place.name);
  place.inode = found == place.directory->entries.end() ? nullptr : found->second;
  return 0;
}

void FaultTree::CreateFile(Place& place) {
  auto inode = std::make_shared<FaultInode>();
  inode->number = next_number_++;
  inode->born_ns = has_birth_times ? ++born_ : 0;
  inode->mode = S_IFREG | 0600;
  inode->links = 1;
  inode->uid = ::getuid();
  inode->gid = ::getgid();
  inode->content = std::make_shared<FaultContent>(usage_, "");
  place.inode = inode;
  place.directory->entries[place.name] = std::move(inode);
}

void FaultTree::CreateDirectory(Place& place, uint32_t mode) {
  const uint64_t freed = reuses_numbers ? std::exchange(freed_number_, 0) : 0;
  place.inode = NewDirectory(freed != 0 ? freed : next_number_++, mode);
  place.inode->born_ns = has_birth_times ? ++born_ : 0;
  place.directory->entries[place.name] = place.inode;
}

void FaultTree::RemoveDirectory(const Place& place) {
  freed_number_ = place.inode->number;
  place.directory->entries.erase(place.name);
}

int FaultTree::Rename(const Place& from, const Place& to) {
  if (from.inode == nullptr) {
    return ENOENT;
  }
  if (from.inode == to.inode) {
    return 0;  // two names of one file: POSIX says that nothing happens, both stay
  }
  if (from.inode->is_directory()) {
    if (IsOrHolds(*from.inode, *to.directory)) {
      return EINVAL;
    }
    if (to.inode != nullptr && !to.inode->is_directory()) {
      return ENOTDIR;
    }
    if (to.inode != nullptr && !to.inode->entries.empty()) {
      return ENOTEMPTY;
    }
  } else if (to.inode != nullptr && to.inode->is_directory()) {
    return EISDIR;
  }
  if (to.inode != nullptr) {
    --to.inode->links;
  }
  to.directory->entries[to.name] = from.inode;
  from.directory->entries.erase(from.name);
  return 0;
}

void FaultTree::LosePower() {
  usage_ = std::make_shared<FaultUsage>();  // stale files and mappings keep their old contents,
                                            // uncounted
  std::map<const FaultInode*, bool> visited;
  Restore(*root_, visited);
}

void FaultTree::Restore(FaultInode& inode, std::map<const FaultInode*, bool>& visited) {
  visited[&inode] = true;
  inode.sync_failed = false;
  if (!inode.is_directory()) {
    inode.links = 0;
    inode.mappings = 0;
    inode.content = std::make_shared<FaultContent>(usage_, inode.durable);
    return;
  }
  inode.entries = inode.durable_entries;
  for (auto entry = inode.entries.begin(); entry != inode.entries.end();) {
    FaultInode& child = *entry->second;
    const bool seen = visited.contains(&child);
    if (seen && child.is_directory()) {
      // Moved, with one of the two directories synced: it can be in one of them only.
      inode.durable_entries.erase(entry->first);
      entry = inode.entries.erase(entry);
      continue;
    }
    if (!seen) {
      Restore(child, visited);
    }
    child.links += child.is_directory() ? 0 : 1;
    ++entry;
  }
}

void FaultTree::LoseAll() {
  usage_ = std::make_shared<FaultUsage>();
  root_ = NewDirectory(1, kRootMode);
}

}  // namespace holdfast
