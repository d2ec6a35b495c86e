#include "server/runtime/remote_parts.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace holdfast {
namespace {

constexpr auto kLookStillWanted = std::chrono::milliseconds(50);

MonotonicTime Now() {
  return Clock::System()->Now();
}

}  // namespace

absl::StatusOr<std::shared_ptr<RemotePartFile>> RemoteParts::Open(const CopyKey& key, bool whole,
                                                                  MonotonicTime until,
                                                                  const Gone& gone) {
  std::shared_ptr<RemotePartFile> file;
  bool first = false;
  Unused unused;  // let go of without the lock
  {
    MutexLock lock(mutex_);
    if (files_.size() > kFilesMax) {
      DropUnused(Now(), Duration(0), unused);
    }
    std::shared_ptr<RemotePartFile>& known = files_[{key.id, whole}];
    first = known == nullptr;
    if (first) {
      known = std::make_shared<RemotePartFile>();
      known->number_ = next_number_++;
    }
    file = known;
    file->used_ = Now();
  }
  if (first) {
    Begin(key, whole, file);
  }
  MutexLock lock(mutex_);
  while (file->opening_) {
    HF_RETURN_IF_ERROR(WaitABit(until, gone));
  }
  if (file->copy_ == nullptr) {
    return file->failed_;
  }
  return file;
}

void RemoteParts::Begin(const CopyKey& key, bool whole,
                        const std::shared_ptr<RemotePartFile>& file) {
  options_.run([self = shared_from_this(), key, whole, file](bool may) {
    absl::StatusOr<std::shared_ptr<const Copy>> copy =
        may ? self->options_.open(key, whole) : absl::CancelledError("the daemon stops");
    MutexLock lock(self->mutex_);
    file->opening_ = false;
    if (copy.ok()) {
      file->copy_ = *std::move(copy);
    } else {
      file->failed_ = copy.status();
      const auto known = self->files_.find({key.id, whole});
      if (known != self->files_.end() && known->second == file) {
        self->files_.erase(known);  // whoever asks again has it tried again
      }
    }
    self->changed_.NotifyAll();
  });
}

std::vector<RemoteParts::Run> RemoteParts::Claim(const RemotePartFile& file, uint64_t offset,
                                                 uint64_t bytes) {
  std::vector<Run> runs;
  const uint64_t end = std::min(file.bytes(), offset + std::min(bytes, file.bytes()));
  for (uint64_t index = offset / kPageBytes; index * kPageBytes < end; ++index) {
    const auto [page, fresh] = pages_.try_emplace({file.number_, index});
    if (!fresh && page->second.failed.ok()) {
      continue;
    }
    page->second.failed = absl::OkStatus();
    page->second.turn = turns_.end();
    if (runs.empty() || runs.back().first + runs.back().pages != index ||
        runs.back().pages * kPageBytes >= kReadBytesMax) {
      runs.push_back({index, 0});
    }
    ++runs.back().pages;
  }
  return runs;
}

void RemoteParts::Start(const std::shared_ptr<RemotePartFile>& file, const std::vector<Run>& runs) {
  for (const Run& run : runs) {
    options_.run(
        [self = shared_from_this(), file, run](bool may) { self->ReadRun(*file, run, may); });
  }
}

void RemoteParts::ReadRun(RemotePartFile& file, const Run& run, bool may) {
  const uint64_t begin = run.first * kPageBytes;
  std::string bytes(std::min(run.pages * kPageBytes, file.bytes() - begin), '\0');
  const absl::Status read = may ? file.copy_->read(begin, std::as_writable_bytes(std::span(bytes)))
                                : absl::CancelledError("the daemon stops");
  std::vector<Page> pages;
  for (uint64_t i = 0; i < run.pages && read.ok(); ++i) {
    pages.push_back(std::make_shared<const std::string>(bytes.substr(i * kPageBytes, kPageBytes)));
  }
  MutexLock lock(mutex_);
  bytes_read_ += read.ok() ? bytes.size() : 0;
  for (uint64_t i = 0; i < run.pages; ++i) {
    const PageId id{file.number_, run.first + i};
    const auto page = pages_.find(id);
    if (page == pages_.end()) {
      continue;  // forgotten meanwhile
    }
    if (!read.ok()) {
      page->second.failed = read;
      continue;
    }
    page->second.page = pages[i];
    page->second.turn = turns_.insert(turns_.end(), id);
    bytes_ += pages[i]->size();
  }
  MakeRoom();
  changed_.NotifyAll();
}

void RemoteParts::Drop(const PageId& id) {
  const auto page = pages_.find(id);
  if (page != pages_.end() && !page->second.failed.ok()) {
    pages_.erase(page);
  } else if (page != pages_.end() && page->second.page != nullptr) {
    bytes_ -= page->second.page->size();
    turns_.erase(page->second.turn);
    pages_.erase(page);
  }
}

void RemoteParts::MakeRoom() {
  while (bytes_ > options_.bytes_max && !turns_.empty()) {
    Drop(PageId(turns_.front()));
  }
}

void RemoteParts::Want(const std::shared_ptr<RemotePartFile>& file, uint64_t offset,
                       uint64_t bytes) {
  std::vector<Run> runs;
  {
    MutexLock lock(mutex_);
    runs = Claim(*file, offset, bytes);
  }
  Start(file, runs);
}

absl::Status RemoteParts::Read(const std::shared_ptr<RemotePartFile>& file, uint64_t offset,
                               std::span<std::byte> into, MonotonicTime until, const Gone& gone) {
  if (offset > file->bytes() || into.size() > file->bytes() - offset) {
    return absl::OutOfRangeError(absl::StrCat("the file has ", file->bytes(), " bytes, wanted are ",
                                              into.size(), " from ", offset, " on"));
  }
  Want(file, offset, into.size());
  for (uint64_t done = 0; done < into.size();) {
    const uint64_t at = offset + done;
    HF_ASSIGN_OR_RETURN(const Page page, Await(file, at / kPageBytes, until, gone));
    const uint64_t inside = at % kPageBytes;
    const uint64_t bytes = std::min<uint64_t>(page->size() - inside, into.size() - done);
    std::memcpy(into.data() + done, page->data() + inside, bytes);
    done += bytes;
  }
  return absl::OkStatus();
}

absl::StatusOr<RemoteParts::Page> RemoteParts::Await(const std::shared_ptr<RemotePartFile>& file,
                                                     uint64_t index, MonotonicTime until,
                                                     const Gone& gone) {
  while (true) {
    std::vector<Run> runs;
    {
      MutexLock lock(mutex_);
      file->used_ = Now();
      const auto found = pages_.find({file->number_, index});
      if (found != pages_.end() && found->second.page != nullptr) {
        turns_.splice(turns_.end(), turns_, found->second.turn);
        return found->second.page;
      }
      if (found != pages_.end() && !found->second.failed.ok()) {
        return found->second.failed;
      }
      if (found != pages_.end()) {
        HF_RETURN_IF_ERROR(WaitABit(until, gone));
        continue;
      }
      runs = Claim(*file, index * kPageBytes, kPageBytes);  // it had to make room
    }
    Start(file, runs);
  }
}

absl::Status RemoteParts::WaitABit(MonotonicTime until, const Gone& gone) {
  if (gone()) {
    return absl::CancelledError("nobody waits for it any more");
  }
  const MonotonicTime now = Now();
  if (now >= until) {
    return absl::DeadlineExceededError("the remote tier does not answer in time");
  }
  const auto left = std::min<Duration>(until - now, kLookStillWanted);
  changed_.WaitUntil(mutex_, std::chrono::steady_clock::now() + left);
  return absl::OkStatus();
}

void RemoteParts::Forget(const RemotePartFile& file, uint64_t offset, uint64_t bytes) {
  MutexLock lock(mutex_);
  for (uint64_t index = offset / kPageBytes; index * kPageBytes < offset + bytes; ++index) {
    Drop({file.number_, index});
  }
}

void RemoteParts::Trim(MonotonicTime now) {
  Unused unused;  // let go of without the lock
  MutexLock lock(mutex_);
  DropUnused(now, kLinger, unused);
}

void RemoteParts::DropUnused(MonotonicTime now, Duration linger, Unused& unused) {
  for (auto it = files_.begin(); it != files_.end();) {
    const std::shared_ptr<RemotePartFile>& file = it->second;
    if (file.use_count() > 1 || file->opening_ || now - file->used_ < linger) {
      ++it;
      continue;
    }
    std::vector<PageId> ids;
    for (auto page = pages_.lower_bound({file->number_, 0});
         page != pages_.end() && page->first.first == file->number_; ++page) {
      ids.push_back(page->first);
    }
    for (const PageId& id : ids) {
      Drop(id);
    }
    unused.push_back(file);
    it = files_.erase(it);
  }
}

size_t RemoteParts::files() const {
  MutexLock lock(mutex_);
  return files_.size();
}

uint64_t RemoteParts::bytes() const {
  MutexLock lock(mutex_);
  return bytes_;
}

uint64_t RemoteParts::bytes_read() const {
  MutexLock lock(mutex_);
  return bytes_read_;
}

}  // namespace holdfast
