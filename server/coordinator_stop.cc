// A job that is told to end: on which step it saves for the last time, and that this one goes ahead
// of all others (docs/protocol.md, "The last step").
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/units.h"
#include "server/coordinator.h"

namespace holdfast {

void Coordinator::On(const StopNoticed& m, Turn& t) {
  if (m.attempt != attempt() || removed_) {
    return;  // it has heard, or hears, that it is superseded
  }
  const bool news = !stop_.noticed();
  stop_.Notice(m.rank, t.time.now + std::chrono::milliseconds(m.left_ms));
  if (news) {
    Tell(Report::Kind::kJobStopping,
         absl::StrCat("rank ", m.rank, " on ", settings_.nodes->Name(t.from),
                      " was told to end, within ",
                      FormatDuration(std::chrono::milliseconds(m.left_ms)),
                      ": all ranks of attempt ", m.attempt, " agree on a last step"),
         0, t);
  }
  if (m.last && stop_.Adopt(*m.last)) {
    return TellLastStep(t);
  }
  if (stop_.last()) {
    return t.Say(LastStep(t), t.from);
  }
  if (!stop_.asking()) {
    std::set<NodeId> nodes = NodesAlive();
    nodes.insert(t.from);
    const uint64_t round = stop_.BeginRound(nodes, t.time.now);
    for (const NodeId node : nodes) {
      t.Say(HoldSteps{attempt(), round}, node);
    }
  }
}

void Coordinator::On(const StepsHeld& m, Turn& t) {
  if (m.attempt == attempt()) {
    stop_.Held(t.from, m.round, m.passed);
    ChooseLastStep(t);
  }
}

// Where ranks of the attempt live.
std::set<NodeId> Coordinator::NodesAlive() const {
  std::set<NodeId> nodes;
  for (const auto& [node, ranks] : members_.by_node()) {
    const bool any = std::any_of(ranks.begin(), ranks.end(),
                                 [&](Rank rank) { return members_.Find(rank)->alive; });
    if (any && absent_.count(node) == 0) {
      nodes.insert(node);
    }
  }
  return nodes;
}

void Coordinator::ChooseLastStep(Turn& t) {
  if (!stop_.Complete(t.time.now)) {
    return;
  }
  std::optional<Step> begun;
  for (const auto& [rank, step] : last_begun_) {
    begun = std::max(begun, std::optional<Step>(step));
  }
  stop_.Choose(begun);
  TellLastStep(t);
}

LastStepChosen Coordinator::LastStep(const Turn& t) const {
  const auto left = std::max(stop_.by() - t.time.now, Duration::zero());
  return {attempt(), *stop_.last(), static_cast<uint32_t>(left / std::chrono::milliseconds(1))};
}

void Coordinator::TellLastStep(Turn& t) {
  for (const NodeId node : NodesAlive()) {
    t.Say(LastStep(t), node);
  }
  Tell(Report::Kind::kJobStopping,
       absl::StrCat("attempt ", attempt(), " ends with step ", *stop_.last(),
                    ", or the first one after it that is saved"),
       0, t);
  // (After another host has chosen it, it may be committed already.)
  for (const CheckpointId& id : AllCheckpoints()) {
    if (IsLastStep(id, t.time.now)) {
      ChooseTiers(id, t);
    }
  }
}

void Coordinator::TellOfStop(NodeId node, Turn& t) {
  if (stop_.last()) {
    t.Say(LastStep(t), node);
  } else if (stop_.asking() && stop_.AlsoAsks(node)) {
    t.Say(HoldSteps{attempt(), stop_.round()}, node);
  }
}

bool Coordinator::EndsAttempt(CheckpointId id) const {
  return id.attempt == attempt() && stop_.last() && id.step >= *stop_.last();
}

// Whether a loop ends with it nobody knows before its ranks have: of those that it may be, the
// newest. Long after all should have ended there is none: they go on.
bool Coordinator::IsLastStep(CheckpointId id, MonotonicTime now) const {
  if (!EndsAttempt(id) || now >= stop_.by() + kStopCounts) {
    return false;
  }
  const auto* newest = NewestCommitted();
  return newest != nullptr && newest->first == id;
}

// The last rank has left: the newest step goes to nvme also if the policy has a later one go there.
void Coordinator::SendEndOfRun(Turn& t) {
  const auto* newest = NewestCommitted();
  if (RanksAlive() > 0 || newest == nullptr || newest->first.attempt != attempt()) {
    return;
  }
  const v1::Policy policy = EffectivePolicy();
  const CheckpointId id = newest->first;
  Drain& drain = checkpoints_.at(id).drain(TierKind::kNvme);
  if (!Configured(TierKind::kNvme) || newest->second.CommittedAt(TierKind::kNvme) ||
      drain.phase != Drain::Phase::kNone ||
      Inventory(TierKind::kNvme).kind != InventoryState::Kind::kKnown ||
      (policy.nvme().every_steps() == 0 && policy.nvme().every_ms() == 0)) {
    return;
  }
  drain.decided = true;
  Want(id, TierKind::kNvme, t);
  PumpDrains(t);
}

}  // namespace holdfast
