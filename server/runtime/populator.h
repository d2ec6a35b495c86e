// Populates slots ahead of their first save: chunk by chunk, with a bounded share of one core,
// until cancelled.
//
//   Populator populator(store, config.memory());
//   const absl::Status status = populator.Populate(slot, bytes);   // on the low-priority worker;
//   minutes for large slots
//
// Owner: the Daemon. Populate is called from one thread, the rest from any.
#pragma once

#include <atomic>
#include <cstdint>
#include <set>

#include "absl/status/status.h"
#include "base/clock.h"
#include "base/ids.h"
#include "base/mutex.h"
#include "holdfast/v1/config.pb.h"
#include "tiers/memory/slot_store.h"

namespace holdfast {

class Populator {
 public:
  Populator(SlotStore& store, const v1::MemoryConfig& config);
  // From its next chunk on.
  void Change(const v1::MemoryConfig& config);
  // Cancelled when Cancel or Stop came before its last chunk.
  absl::Status Populate(SlotId slot, uint64_t bytes) EXCLUDES(mutex_);
  // Somebody waits to delete this slot: its pages are of no use any more. Until Populate of it
  // returns, or Forget.
  void Cancel(SlotId slot) EXCLUDES(mutex_);
  void Forget(SlotId slot) EXCLUDES(mutex_);
  void Stop() EXCLUDES(mutex_);

 private:
  // Waits as long as the share asks for after `cpu` of work; false when cancelled.
  bool Rest(SlotId slot, Duration cpu) EXCLUDES(mutex_);

  SlotStore& store_;
  std::atomic<uint64_t> chunk_bytes_{0};
  std::atomic<int64_t> percent_{100};
  Mutex mutex_;
  CondVar changed_;
  std::set<SlotId> cancelled_ GUARDED_BY(mutex_);
  bool stopped_ GUARDED_BY(mutex_) = false;
};

}  // namespace holdfast
