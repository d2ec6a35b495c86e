// Fills tensors with parts of what several ranks have saved (docs/elastic.md): plans what comes
// from whom (recovery/reshard.h), opens one shard after the other, verifies whole blocks, and
// copies what is wanted of them to where it belongs.
//
//   Resharding resharding(shards, engine, options, meter);
//   HF_TRY(resharding.Plan(wanted));                  // kInvalidArgument: not what was saved
//   HF_TRY(resharding.Copy(fence, deadline));
//
// A shard whose copy turns out to be bad is read from its next one, or what it has from another
// rank that has the same; kCorrupt: there is none. Used by one thread.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "client-lib/src/copy_engine.h"
#include "client-lib/src/deadline.h"
#include "client-lib/src/device_fence.h"
#include "client-lib/src/restore_meter.h"
#include "client-lib/src/step_shards.h"
#include "holdfast/state.h"
#include "recovery/reshard.h"

namespace holdfast::client {

class Resharding {
 public:
  struct Options {
    Rank reader = 0;
    bool own = false;  // as many ranks read as saved: what the reader saved itself is right for it
    bool convert_types = false;
    std::optional<Rank> only = std::nullopt;  // from that rank's shard alone
  };
  // All of them must outlive it.
  Resharding(const StepShards& shards, CopyEngine& engine, const Options& options,
             RestoreMeter& meter)
      : shards_(shards), engine_(engine), options_(options), meter_(meter) {}

  // `wanted` must stay as it is until the copy is done.
  Status Plan(const State& wanted);
  // `fence`: of what lies on devices; null if nothing does. Looks at the deadline's interrupt.
  Status Copy(DeviceFence* fence, Deadline deadline);
  // For who has no room for all at once: first what Copy compares of different ranks, then some of
  // the wanted tensors at a time, each to `to[i]` (of those that are not meant: null) in memory.
  Status Compare(Deadline deadline);
  // Opens the planned shards that lie on this node, and holds them from here on: a run that saves
  // meanwhile does not give their slots to newer steps. One that does not open is read from
  // elsewhere when its turn comes.
  void Hold(Deadline deadline);
  Status CopySome(const std::vector<void*>& to, Deadline deadline);

  uint64_t bytes() const { return plan_.bytes; }
  // From which tiers how many shards were read: "3 shards from memory, 1 from nvme (…)"; and the
  // farthest of them.
  std::string Told() const;
  std::string farthest() const;

 private:
  // Wants that are copied together: those in host memory, or some on one device, which are put
  // together in memory first.
  struct Group {
    std::vector<bool> wants;  // which of the wanted tensors
    bool staged = false;
  };
  // What of one shard.
  struct FromRank {
    std::vector<Scatter> scatters;  // by slice
    std::vector<uint32_t> slices;
    std::vector<std::vector<ByteRun>> runs;
  };

  Status Replan();
  std::vector<Group> Groups() const;
  Status CopyGroup(const Group& group, DeviceFence* fence, Deadline deadline);
  Status CopyPlanned(const Group& group, const std::vector<void*>& to, Deadline deadline);
  uint64_t HashOfWants() const;
  std::map<Rank, FromRank> Divide(const Group& group, const std::vector<void*>& to) const;
  Status CopyFrom(Rank rank, const FromRank& part, Deadline deadline);
  // From the nearest tier whose copy is good, verified.
  Result<std::shared_ptr<HeldShard>> ReadGood(Rank rank, const FromRank& part, Deadline deadline);
  // The one that is held, unless its copy was found bad; else from the nearest tier.
  Result<std::shared_ptr<HeldShard>> Opened(Rank rank, Deadline deadline);
  bool PassesOver(Rank rank, HeldShard& held, const Status& read);
  Status ReadFrom(Rank rank, HeldShard& held, const FromRank& part, Deadline deadline);
  Status CompareOverlaps(Deadline deadline);
  Status CompareShards(Rank one, Rank other, const std::vector<ReshardPlan::Overlap>& overlaps,
                       Deadline deadline);
  // `failed`: of which of the two something could not be had.
  Result<bool> Same(const ReshardPlan::Overlap& overlap, HeldShard& first, HeldShard& second,
                    Deadline deadline, const HeldShard*& failed);
  Status CompareOpened(const std::vector<ReshardPlan::Overlap>& overlaps, HeldShard& first,
                       HeldShard& second, Deadline deadline, const HeldShard*& failed);
  Status ToDevices(const Group& group, const std::vector<void*>& from, DeviceFence* fence,
                   Deadline deadline);

  const StepShards& shards_;
  CopyEngine& engine_;
  const Options options_;
  RestoreMeter& meter_;
  const State* wanted_ = nullptr;
  std::optional<ReshardPlanner> planner_;
  ReshardPlan plan_;
  std::map<Rank, std::shared_ptr<HeldShard>> held_;
  std::map<Rank, std::vector<std::string>> bad_tiers_;
  std::set<Rank> unreadable_;
  std::set<Rank> compared_without_;                  // what was unreadable when Compare ended well
  std::map<std::string, std::set<Rank>> read_from_;  // by tier
  std::string found_bad_;                            // the first copy that was, and why
  std::string why_;  // of the first shard that did not come from memory
};

}  // namespace holdfast::client
