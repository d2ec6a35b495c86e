// Durable tiers of the simulated node: what is published outlives the daemon, and what is synced a
// power loss; what is on its way outlives nothing. They are slow, full, failing, hung for minutes;
// copies rot, drives are wiped.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/sim/sim_model.h"

namespace holdfast::sim {

struct TierCopy {
  DurableCopy copy;
  uint64_t token = 0;  // what its record says
  uint64_t bytes = 0;  // what its bytes are: another token once they have rotted
  ShardId content;     // whose bytes they were
  // What a look at the tier sees, too: its image is cut; so is its record, and nothing but its
  // names tells of it. (The bytes of such are others.)
  enum class Torn { kNo, kImage, kRecord };
  Torn torn = Torn::kNo;
};

struct SimTier {
  struct Job {
    std::string name;
    uint32_t uid = 0;
    uint32_t gid = 0;
  };
  std::map<ShardId, TierCopy> copies;
  std::set<std::pair<JobUuid, CheckpointId>> manifests;
  std::map<JobUuid, Job> jobs;
  // Published, and not synced yet: a power loss takes it. By the life of the daemon that wrote it.
  // The next one finishes what it finds; until then nobody may count on it.
  std::map<ShardId, uint64_t> unsynced;
  std::map<std::pair<JobUuid, CheckpointId>, uint64_t> unsynced_manifests;
  // Whose removal this daemon has begun: it counts as gone, whenever it ends.
  std::set<std::pair<JobUuid, CheckpointId>> going;
  // Steps of which a daemon has said that they are whole here.
  std::set<std::pair<JobUuid, CheckpointId>> told_whole;
  // What is wrong with it now.
  double fails = 0;
  bool full = false;
  bool unreadable = false;
  bool away = false;
  MonotonicTime hung_until{};
  uint64_t committed = 0;  // reported since the calm began

  uint64_t BytesUsed() const {
    uint64_t bytes = 0;
    for (const auto& [id, copy] : copies) {
      bytes += copy.copy.copy.image_bytes;
    }
    return bytes;
  }
  bool Has(TierKind kind, const ShardId& id, bool rotten_too) const {
    const auto it = copies.find(id);
    return it != copies.end() && unsynced.count(id) == 0 &&
           going.count({id.job, id.checkpoint()}) == 0 &&
           (rotten_too || it->second.token == it->second.bytes) &&
           (kind != TierKind::kRemote ||
            (manifests.count({id.job, id.checkpoint()}) > 0 &&
             unsynced_manifests.count({id.job, id.checkpoint()}) == 0));
  }
  // While it cannot be read a step that got here, and of which nobody has heard, is not known.
  bool MayBeUnheardOf(const JobUuid& job, CheckpointId checkpoint) const {
    return (away || unreadable || fails > 0) && told_whole.count({job, checkpoint}) == 0;
  }
  // As a sweep does for what the lives before this one have begun.
  void FinishOlder(const JobUuid& job, uint64_t life) {
    std::erase_if(unsynced,
                  [&](const auto& one) { return one.first.job == job && one.second != life; });
    std::erase_if(unsynced_manifests,
                  [&](const auto& one) { return one.first.first == job && one.second != life; });
  }
};

// A flush or a fetch that is under way.
struct SimDrain {
  TierKind tier = TierKind::kNvme;  // that it writes, or a fetch reads
  std::optional<TierKind> reads;    // a flush: where from
  ShardId id;
  uint64_t bytes = 0;
  bool cancelled = false;
  bool stalled = false;
  std::function<void(bool cancelled)> end;  // performs it, and says so
  // Of a cluster: which host wants it, since when, and whether it is a repair.
  std::string commander{};
  int64_t begun = 0;
  bool mends = false;
};

}  // namespace holdfast::sim
