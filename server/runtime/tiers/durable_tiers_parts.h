// What DurableTiers is made of; for its own files.
#pragma once

#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "server/runtime/tiers/drain_operations.h"
#include "server/runtime/tiers/durable_tiers.h"

namespace holdfast {

struct DurableTiers::Drive {
  Drive(size_t i, std::shared_ptr<TierPlace> p, std::unique_ptr<WorkerGroup> g)
      : index(i), place(std::move(p)), group(std::move(g)) {}
  const size_t index;
  const std::shared_ptr<TierPlace> place;
  const std::unique_ptr<WorkerGroup> group;
  // What goes from here to the remote tier; null where there is none. Not in that one's threads: a
  // drive that hangs holds nobody up who writes or reads something else there.
  std::unique_ptr<WorkerGroup> relay;
  // Reads whole images, however long that takes, while the drive's thread goes on writing.
  std::unique_ptr<WorkerGroup> verifier;
  // Opens images for clients. Shared with the files that it opened, which are closed there.
  std::shared_ptr<WorkerGroup> opener;
  int passed_over = 0;  // flushes that went to another one since it failed
};

// The scans that have not really ended, also those that were answered because they hang.
class LiveScans : public std::enable_shared_from_this<LiveScans> {
 public:
  // Null: there is one of that already, or there are too many. Else it counts as long as what is
  // returned lives.
  std::shared_ptr<void> Enter(const std::string& what) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    if (live_.size() >= kScansMax || !live_.insert(what).second) {
      return nullptr;
    }
    return std::shared_ptr<void>(static_cast<void*>(this),
                                 [self = shared_from_this(), what](void*) {
                                   MutexLock end(self->mutex_);
                                   self->live_.erase(what);
                                 });
  }

 private:
  static constexpr size_t kScansMax = 1024;
  Mutex mutex_;
  std::set<std::string> live_ GUARDED_BY(mutex_);
};

// By witness, whose threads write its file.
struct WitnessWriters {
  std::vector<std::weak_ptr<WorkerGroup>> drives;
  std::weak_ptr<WorkerGroup> state;
};

struct DurableTiers::Shared {
  explicit Shared(std::shared_ptr<EventOutlet> outlet)
      : context(std::make_shared<DrainContext>(std::move(outlet))) {}
  const Context context;
  std::shared_ptr<LiveOperations> live = std::make_shared<LiveOperations>();
  // One of a drive or a job at a time: what hangs is not to be asked again and again.
  std::shared_ptr<LiveScans> scans = std::make_shared<LiveScans>();
  std::shared_ptr<WitnessWriters> witness_writers = std::make_shared<WitnessWriters>();
};

}  // namespace holdfast
