#include "tiers/memory/slot_reserve.h"

#include <algorithm>
#include <utility>

#include "tiers/memory/slot_files.h"

namespace holdfast {

SlotReserve::SlotReserve(Env& env, std::string dir)
    : env_(env), path_(JoinPath(std::move(dir), kReserveName)) {}

absl::Status SlotReserve::Write(uint64_t bytes, const std::function<absl::Status()>& write) {
  absl::Status status = write();
  if (absl::IsResourceExhausted(status) && GiveUp(bytes)) {
    status = write();
  }
  if (status.ok()) {
    Refill();
  }
  return status;
}

bool SlotReserve::GiveUp(uint64_t bytes) {
  MutexLock lock(mutex_);
  // Twice: a page that is begun counts whole, and so does a directory's entry somewhere.
  const uint64_t given = std::min(bytes_, std::max(kStepBytes, 2 * bytes));
  if (given == 0 || !file_->Truncate(bytes_ - given).ok()) {
    return false;
  }
  bytes_ -= given;
  return true;
}

void SlotReserve::Refill() {
  MutexLock lock(mutex_);
  if (bytes_ == kBytes) {
    return;
  }
  if (file_ == nullptr) {
    absl::StatusOr<std::unique_ptr<File>> file = env_.Open(path_, OpenMode::kCreateExclusive);
    if (absl::IsAlreadyExists(file.status())) {
      file = env_.Open(path_, OpenMode::kReadWrite);
    }
    if (!file.ok()) {
      return;  // then there is none
    }
    file_ = *std::move(file);
    if (const absl::StatusOr<FileInfo> info = file_->Info(); info.ok()) {
      bytes_ = std::min(info->bytes, kBytes);
    }
  }
  // All of it, or what may have been given up last: that is free again when it was for a file that
  // took another's place.
  for (const uint64_t wanted : {kBytes, std::min(bytes_ + kStepBytes, kBytes)}) {
    if (file_->Allocate(0, wanted).ok()) {
      bytes_ = wanted;
      return;
    }
  }
}

}  // namespace holdfast
