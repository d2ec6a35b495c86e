#include "server/runtime/populator.h"

#include <algorithm>
#include <chrono>
#include <ctime>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace holdfast {
namespace {

Duration ThreadCpu() {
  timespec t = {};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return std::chrono::seconds(t.tv_sec) + std::chrono::nanoseconds(t.tv_nsec);
}

}  // namespace

Populator::Populator(SlotStore& store, const v1::MemoryConfig& config) : store_(store) {
  Change(config);
}

void Populator::Change(const v1::MemoryConfig& config) {
  chunk_bytes_ = config.populate_chunk_bytes() / kSlotBytesMultiple * kSlotBytesMultiple;
  percent_ = config.populate_cpu_percent();
}

absl::Status Populator::Populate(SlotId slot, uint64_t bytes) {
  uint64_t chunk = 0;
  for (uint64_t offset = 0; offset < bytes; offset += chunk) {
    const Duration before = ThreadCpu();
    chunk = std::min<uint64_t>(chunk_bytes_, bytes - offset);
    HF_RETURN_IF_ERROR(store_.Populate(slot, offset, chunk));
    if (!Rest(slot, ThreadCpu() - before)) {
      return absl::CancelledError(
          absl::StrCat("populate slot ", slot, ": cancelled at ", offset, " of ", bytes, " bytes"));
    }
  }
  return absl::OkStatus();
}

bool Populator::Rest(SlotId slot, Duration cpu) {
  const int64_t percent = percent_;
  const auto until = std::chrono::steady_clock::now() + cpu * (100 - percent) / percent;
  MutexLock lock(mutex_);
  while (!stopped_ && !cancelled_.contains(slot)) {
    if (percent == 100 || !changed_.WaitUntil(mutex_, until)) {
      break;
    }
  }
  return !stopped_ && !cancelled_.contains(slot);
}

void Populator::Cancel(SlotId slot) {
  MutexLock lock(mutex_);
  cancelled_.insert(slot);
  changed_.NotifyAll();
}

void Populator::Forget(SlotId slot) {
  MutexLock lock(mutex_);
  cancelled_.erase(slot);
}

void Populator::Stop() {
  MutexLock lock(mutex_);
  stopped_ = true;
  changed_.NotifyAll();
}

}  // namespace holdfast
