// Which ranks of one checkpoint share what they write to the remote tier, and which should and
// cannot, since their bytes differ (docs/protocol.md §10, "Replicas"). Made of what their shards
// are known to hold, when it is wanted.
//
//   const Sharing sharing(checkpoint);
//   sharing.AddGroup(flush);   // of the flush's last shard
//
// A value; what it says holds for as long as the checkpoint's shards are the same. Not thread-safe.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "recovery/replicas.h"
#include "server/checkpoint.h"
#include "server/messages.h"

namespace holdfast {

class Sharing {
 public:
  Sharing() = default;  // nobody shares anything
  // Nobody does either while it is not known of every rank what it holds: so all that ever share
  // something in a checkpoint share it by the same plan.
  explicit Sharing(const Checkpoint& checkpoint);

  // The group of the flush's last shard, if its rank has one.
  void AddGroup(FlushWanted& flush) const;
  // By which the rank's file leaves slices out; 0: it has no group.
  LayoutHash PlanOf(Rank rank) const;
  // "ranks 0, 2 and 5 more", but for that one; empty: it has no group.
  std::string OthersOf(Rank rank) const;
  // "rank 3 holds the same tensors as ranks 0 to 2 with other bytes"; empty: no replica differs.
  std::string DivergenceText() const;

 private:
  struct Group {
    FlushWanted::Group told;
    std::vector<Rank> ranks;
  };
  const Group* GroupOf(Rank rank) const;

  std::vector<Group> groups_;
  std::map<Rank, size_t> group_of_;
  std::vector<Divergence> divergence_;
};

// "rank 3", "ranks 0, 2 and 5 more".
std::string RanksText(const std::vector<Rank>& ranks);

// Why the copies in the remote tier are not, together, what their ranks sealed; empty: they are.
std::string WhyNotTogether(const Checkpoint& checkpoint);

}  // namespace holdfast
