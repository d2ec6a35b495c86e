// On which step a job that is told to end saves for the last time (docs/protocol.md, "The last
// step"). All its ranks must save the same one, and none knows how far the others are. So they are
// asked to go on to no further step; each node says the highest that any rank of it is beyond; the
// one after the highest of all is the last one: nobody has passed it.
//
//   for (NodeId node : agreement.BeginRound(nodes, now)) …   // → HoldSteps
//   agreement.Held(node, round, passed);                     // its StepsHeld
//   if (agreement.Complete(now)) { agreement.Choose(begun); }  // → LastStepChosen
//
// Of one attempt, at its host. Owned by a Coordinator; not thread-safe; no I/O, no clock.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <set>

#include "base/clock.h"
#include "base/ids.h"

namespace holdfast {

class StopAgreement {
 public:
  // Ranks stand still for kHoldSteps (agent.h) at most: who has not answered before that is not
  // waited for. A node that is lost has ranks without which nothing is committed anyway.
  static constexpr Duration kRoundMax = std::chrono::milliseconds(1500);

  // The job is told to end: its processes live until `by` at most.
  void Notice(Rank rank, MonotonicTime by);
  bool noticed() const { return noticed_; }
  Rank rank() const { return rank_; }
  MonotonicTime by() const { return by_; }

  // The number of the round; nothing is asked while it goes on. Not once the step is chosen.
  uint64_t BeginRound(std::set<NodeId> nodes, MonotonicTime now);
  bool asking() const { return until_.has_value(); }
  uint64_t round() const { return round_; }
  // A node that comes during the round is asked, too. False: it was.
  bool AlsoAsks(NodeId node) { return waiting_.insert(node).second; }
  void Held(NodeId node, uint64_t round, std::optional<Step> passed);
  void Gone(NodeId node) { waiting_.erase(node); }
  // All have answered, or the time is over.
  bool Complete(MonotonicTime now) const { return until_ && (waiting_.empty() || now >= *until_); }
  // `begun`: the highest step that a rank has begun to save. Ends the round.
  void Choose(std::optional<Step> begun);
  // An earlier host has chosen it. True: that was not known.
  bool Adopt(Step last);

  std::optional<Step> last() const { return last_; }
  std::optional<MonotonicTime> NextWake() const { return until_; }

 private:
  bool noticed_ = false;
  Rank rank_ = 0;
  MonotonicTime by_{};
  uint64_t round_ = 0;
  std::optional<MonotonicTime> until_;  // a round is under way
  std::set<NodeId> waiting_;            // who has not answered
  std::optional<Step> passed_;
  std::optional<Step> last_;
};

}  // namespace holdfast
