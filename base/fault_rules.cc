// By which rules the calls of FaultEnv fail, stall or crash, and what its file system can do.
#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/env_checks.h"
#include "base/fault_env.h"
#include "base/fault_state.h"
#include "base/status.h"

namespace holdfast {

bool FaultState::Stalls(const std::string& call) const {
  return std::any_of(stall_text.begin(), stall_text.end(),
                     [&](const std::string& text) { return call.find(text) != std::string::npos; });
}

int FaultState::Count(const std::string& call) {
  ++calls;
  if (recording) {
    recorded.push_back(call);
  }
  const uint64_t begun_in = epoch;
  if (Stalls(call)) {
    ++stalled;
    stall_changed.NotifyAll();
    while (epoch == begun_in && Stalls(call)) {
      stall_changed.Wait(mutex);
    }
    --stalled;
    stall_changed.NotifyAll();
  }
  if (epoch != begun_in) {
    return EIO;  // of a process that is gone: nobody hears the answer, and nothing is done
  }
  if (crash_at != 0 && calls >= crash_at) {
    return EIO;
  }
  if (const auto found = fail_at.find(calls); found != fail_at.end()) {
    return found->second;
  }
  for (const auto& [text, error] : fail_text) {
    if (call.find(text) != std::string::npos) {
      return error;
    }
  }
  return 0;
}

absl::Status FaultState::Begin(std::string_view operation, const std::string& path) {
  const int error = Count(absl::StrCat(ToAbsl(operation), " ", path));
  return error != 0 ? ErrnoStatus(error, operation, path) : CheckPath(operation, path);
}

absl::Status FaultState::BeginTwo(std::string_view operation, const std::string& from,
                                  const std::string& to) {
  const int error = Count(absl::StrCat(ToAbsl(operation), " ", from, " ", to));
  if (error != 0) {
    return ErrnoStatus(error, operation, TwoPaths(from, to));
  }
  HF_RETURN_IF_ERROR(CheckPath(operation, from));
  return CheckPath(operation, to);
}

int FaultState::CheckRoom(FaultContent& content, uint64_t bytes) {
  const uint64_t now = content.Size();
  if (bytes <= now) {
    return 0;
  }
  if (bytes > kFaultFileBytesMax) {
    return EFBIG;
  }
  const uint64_t used = tree.usage().bytes;
  return used > bytes_total || bytes - now > bytes_total - used ? ENOSPC : 0;
}

void FaultState::EndProcess() {
  ++epoch;
  crash_at = 0;
  fail_at.clear();
  fail_text.clear();
  stall_text.clear();
  stall_changed.NotifyAll();
}

FaultEnv::FaultEnv(Durability durability) : state_(std::make_shared<FaultState>(durability)) {}
FaultEnv::~FaultEnv() = default;

int FaultEnv::TakeMostOpenFiles() {
  MutexLock lock(state_->mutex);
  return std::exchange(state_->most_open_files, state_->open_files);
}

int FaultEnv::open_files() const {
  MutexLock lock(state_->mutex);
  return state_->open_files;
}

int FaultEnv::calls() const {
  MutexLock lock(state_->mutex);
  return state_->calls;
}

void FaultEnv::RecordCalls() {
  MutexLock lock(state_->mutex);
  state_->recording = true;
  state_->recorded.clear();
}

std::vector<std::string> FaultEnv::TakeCalls() {
  MutexLock lock(state_->mutex);
  state_->recording = false;
  return std::move(state_->recorded);
}

void FaultEnv::FailCall(int nth_from_now, int error) {
  MutexLock lock(state_->mutex);
  state_->fail_at[state_->calls + nth_from_now] = error;
}

void FaultEnv::FailMatching(const std::string& text, int error) {
  MutexLock lock(state_->mutex);
  if (error == 0) {
    state_->fail_text.erase(text);
  } else {
    state_->fail_text[text] = error;
  }
}

void FaultEnv::StallMatching(const std::string& text) {
  MutexLock lock(state_->mutex);
  state_->stall_text.insert(text);
}

void FaultEnv::ReleaseStalled(const std::string& text) {
  MutexLock lock(state_->mutex);
  state_->stall_text.erase(text);
  state_->stall_changed.NotifyAll();
}

bool FaultEnv::WaitForStalled(int calls, std::chrono::milliseconds at_most) {
  const auto until = std::chrono::steady_clock::now() + at_most;
  MutexLock lock(state_->mutex);
  while (state_->stalled < calls) {
    if (!state_->stall_changed.WaitUntil(state_->mutex, until)) {
      return state_->stalled >= calls;
    }
  }
  return true;
}

void FaultEnv::CrashAtCall(int nth_from_now) {
  MutexLock lock(state_->mutex);
  state_->crash_at = state_->calls + nth_from_now;
}

void FaultEnv::Crash() {
  MutexLock lock(state_->mutex);
  state_->EndProcess();
  if (state_->durability == Durability::kNone) {
    state_->tree.LoseAll();
  } else {
    state_->tree.LosePower();
  }
}

void FaultEnv::KillProcess() {
  MutexLock lock(state_->mutex);
  state_->EndProcess();
}

absl::Status FaultEnv::FlipBit(const std::string& path, uint64_t byte_offset, int bit) {
  MutexLock lock(state_->mutex);
  std::shared_ptr<FaultInode> inode;
  int error = state_->tree.Find(path, inode);
  if (error == 0 && inode->is_directory()) {
    error = EISDIR;
  }
  if (error != 0) {
    return ErrnoStatus(error, "flip bit", path);
  }
  if (bit < 0 || bit > 7 || byte_offset >= inode->content->Size()) {
    return absl::OutOfRangeError(absl::StrCat("flip bit '", path, "': bit ", bit, " of byte ",
                                              byte_offset, " of ", inode->content->Size()));
  }
  std::byte byte{};
  inode->content->Read(byte_offset, {&byte, 1});
  byte ^= static_cast<std::byte>(1 << bit);
  inode->content->Write(byte_offset, {&byte, 1});
  if (byte_offset < inode->durable.size()) {
    inode->durable[byte_offset] = static_cast<char>(inode->durable[byte_offset] ^ (1 << bit));
  }
  return absl::OkStatus();
}

void FaultEnv::SetBytesTotal(uint64_t bytes) {
  MutexLock lock(state_->mutex);
  state_->bytes_total = bytes;
}

void FaultEnv::SetHardLinks(bool has) {
  MutexLock lock(state_->mutex);
  state_->hard_links = has;
}

void FaultEnv::SetRenameNoReplace(bool has) {
  MutexLock lock(state_->mutex);
  state_->rename_no_replace = has;
}

void FaultEnv::ReuseDirectoryNumbers(bool has_birth_times) {
  MutexLock lock(state_->mutex);
  state_->tree.reuses_numbers = true;
  state_->tree.has_birth_times = has_birth_times;
}

void FaultEnv::SetLeases(bool has) {
  MutexLock lock(state_->mutex);
  state_->leases = has;
}

void FaultEnv::SetAllocate(bool has) {
  MutexLock lock(state_->mutex);
  state_->allocate = has;
}

void FaultEnv::SetDirectAlignment(uint32_t bytes) {
  MutexLock lock(state_->mutex);
  state_->direct_alignment = bytes;
}

void FaultEnv::SetFilesystemType(const std::string& type) {
  MutexLock lock(state_->mutex);
  state_->type = type;
}

void FaultEnv::SetDevice(uint64_t device, const std::string& below) {
  MutexLock lock(state_->mutex);
  state_->device = device;
  state_->device_below = below;
}

std::vector<std::pair<std::string, Striping>> FaultEnv::stripings() const {
  MutexLock lock(state_->mutex);
  return state_->stripings;
}

}  // namespace holdfast
