#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <vector>

#include "base/ids.h"
#include "base/mutex.h"

namespace holdfast {

// Which drives have which copy: one, or two where a flush was tried again on another although the
// first had published it. Thread-safe.
class DriveIndex {
 public:
  void Put(const ShardId& id, size_t drive) EXCLUDES(mutex_);
  // The one that was told last.
  std::optional<size_t> Find(const ShardId& id) EXCLUDES(mutex_);
  // Whose copies of the checkpoint a drive has; all drives together, if none is named.
  std::vector<Rank> RanksOf(const JobUuid& job, CheckpointId checkpoint,
                            std::optional<size_t> drive) EXCLUDES(mutex_);
  void Erase(const JobUuid& job, CheckpointId checkpoint, size_t drive) EXCLUDES(mutex_);
  void EraseJob(const JobUuid& job, size_t drive) EXCLUDES(mutex_);

 private:
  Mutex mutex_;
  std::map<ShardId, std::vector<size_t>> drives_ GUARDED_BY(mutex_);
};

}  // namespace holdfast
