#include "server/runtime/tiers/drive_index.h"

#include <algorithm>

namespace holdfast {

void DriveIndex::Put(const ShardId& id, size_t drive) {
  MutexLock lock(mutex_);
  std::vector<size_t>& drives = drives_[id];
  std::erase(drives, drive);
  drives.push_back(drive);
}

std::optional<size_t> DriveIndex::Find(const ShardId& id) {
  MutexLock lock(mutex_);
  const auto it = drives_.find(id);
  return it == drives_.end() ? std::nullopt : std::optional(it->second.back());
}

std::vector<Rank> DriveIndex::RanksOf(const JobUuid& job, CheckpointId checkpoint,
                                      std::optional<size_t> drive) {
  MutexLock lock(mutex_);
  std::vector<Rank> ranks;
  for (auto it = drives_.lower_bound({job, checkpoint.attempt, checkpoint.step, 0});
       it != drives_.end() && it->first.job == job && it->first.checkpoint() == checkpoint; ++it) {
    const std::vector<size_t>& there = it->second;
    if (!drive || std::find(there.begin(), there.end(), *drive) != there.end()) {
      ranks.push_back(it->first.rank);
    }
  }
  return ranks;
}

void DriveIndex::Erase(const JobUuid& job, CheckpointId checkpoint, size_t drive) {
  for (const Rank rank : RanksOf(job, checkpoint, drive)) {
    MutexLock lock(mutex_);
    const auto it = drives_.find({job, checkpoint.attempt, checkpoint.step, rank});
    if (it != drives_.end() && std::erase(it->second, drive) > 0 && it->second.empty()) {
      drives_.erase(it);
    }
  }
}

void DriveIndex::EraseJob(const JobUuid& job, size_t drive) {
  MutexLock lock(mutex_);
  for (auto it = drives_.lower_bound({job, 0, 0, 0});
       it != drives_.end() && it->first.job == job;) {
    std::erase(it->second, drive);
    it = it->second.empty() ? drives_.erase(it) : std::next(it);
  }
}

}  // namespace holdfast
