// What goes from the durable tiers, and what people say of it: pins, removals, policies
// (docs/protocol.md §11). One removal at a time in each tier; a removal that has begun counts as
// done wherever another one is judged.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/units.h"
#include "server/coordinator.h"
#include "server/tier_lists.h"

namespace holdfast {
namespace {

Failure Removed(CheckpointId id) {
  return {absl::StatusCode::kAborted, v1::Failure::REASON_SHED,
          absl::StrCat("step ", id.step, " of attempt ", id.attempt, " was removed")};
}

// Whether a flush into another tier reads the checkpoint there.
bool ReadFrom(const Checkpoint& checkpoint, TierKind tier) {
  return std::any_of(checkpoint.drains.begin(), checkpoint.drains.end(),
                     [&](const Drain& drain) { return drain.waiting.ReadFrom(tier); });
}

}  // namespace

bool Coordinator::Pinned(CheckpointId id) const {
  const bool restore_point = restore_point_.set() && !restore_point_.from_scratch() &&
                             restore_point_.attempt() == id.attempt &&
                             restore_point_.step() == id.step;
  return restore_point || pins_.count(id) > 0 || unpinned_.count(id) > 0;
}

std::vector<CheckpointView> Coordinator::Views() const {
  std::vector<CheckpointView> views;
  views.reserve(checkpoints_.size());
  for (const auto& [id, checkpoint] : checkpoints_) {
    CheckpointView view = checkpoint.View(id);
    view.held = Held(id);
    view.pinned = Pinned(id);
    view.left_unix_ms = LeftUnixMs(id);
    for (const TierKind tier : kDurable) {
      view.at(tier).source = view.at(tier).source || ToBeMended(id, tier);
    }
    view.apart = checkpoint.GoodAt(TierKind::kPeer) > 0 &&
                 checkpoint.PeersApart([this](NodeId node) { return DomainOf(node); });
    for (const TierKind tier : kDrained) {
      if (IsGoing(id, tier)) {
        view = view.Without(tier);
      }
    }
    views.push_back(std::move(view));
  }
  return views;
}

// When the line of descent left the branch of this step; 0: it is on the line, or nobody knows.
int64_t Coordinator::LeftUnixMs(CheckpointId id) const {
  if (OnLine(line_, id)) {
    return 0;
  }
  // (The line is the youngest attempt first.)
  const auto younger = std::find_if(line_.rbegin(), line_.rend(),
                                    [id](const Descent& d) { return d.attempt > id.attempt; });
  const auto info = younger == line_.rend() ? attempts_.end() : attempts_.find(younger->attempt);
  return info == attempts_.end() ? 0 : info->second.opened_unix_ms;
}

std::vector<DeletionVerdict> Coordinator::Verdicts(TierKind tier,
                                                   const std::vector<CheckpointView>& views,
                                                   int64_t now_unix_ms,
                                                   uint64_t bytes_wanted) const {
  const v1::Policy policy = EffectivePolicy();
  const v1::TierPolicy& rules = TierPolicyOf(policy, tier);
  return PlanDeletion(
      tier, views, line_,
      {rules.keep_last(), rules.keep_every_steps(), rules.bytes_max(),
       !AllInventoriesKnown() || !missing_.empty(), now_unix_ms, settings_.retention_grace_ms,
       RemovalsOf(tier).stage, RanksAlive() == 0, settings_.keep_ended_ms},
      bytes_wanted);
}

std::vector<const Coordinator::Going*> Coordinator::AllGoing(TierKind tier) const {
  const Removals& removals = RemovalsOf(tier);
  std::vector<const Going*> all;
  if (removals.current) {
    all.push_back(&*removals.current);
  }
  for (const Going& going : removals.waiting) {
    all.push_back(&going);
  }
  for (const Going& going : removals.stuck) {
    all.push_back(&going);
  }
  return all;
}

bool Coordinator::IsGoing(CheckpointId id, TierKind tier) const {
  const std::vector<const Going*> all = AllGoing(tier);
  return std::any_of(all.begin(), all.end(), [id](const Going* going) { return going->id == id; });
}

bool Coordinator::Removing(CheckpointId id) const {
  return std::any_of(std::begin(kDrained), std::end(kDrained),
                     [&](TierKind tier) { return IsGoing(id, tier); });
}

uint64_t Coordinator::BytesGoing(TierKind tier) const {
  uint64_t bytes = 0;
  for (const Going* going : AllGoing(tier)) {
    bytes += going->bytes;
  }
  return bytes;
}

// Also what is being removed: it takes its room until it is gone.
uint64_t Coordinator::BytesAt(TierKind tier) const {
  uint64_t bytes = BytesGoing(tier);
  for (const auto& [id, checkpoint] : checkpoints_) {
    bytes += checkpoint.BytesAt(tier);
  }
  return bytes;
}

bool Coordinator::AnyDurable() const {
  return std::any_of(checkpoints_.begin(), checkpoints_.end(),
                     [](const auto& c) { return c.second.AnythingDurable(); });
}

bool Coordinator::AllInventoriesKnown() const {
  return std::all_of(std::begin(kDurable), std::end(kDurable), [&](TierKind tier) {
    return !Configured(tier) || Inventory(tier).kind == InventoryState::Kind::kKnown;
  });
}

// Why retention removes nothing at all now; empty: it may. What is whole can be judged although a
// directory cannot be read: that would only add to what protects. But not before the line of
// descent is sure, nor while something is about to be known.
std::string Coordinator::WhyNothingGoes(TierKind tier) const {
  if (!AllInventoriesKnown() && (!history_known_ || InventoryPending())) {
    return "not all tiers have been read yet: nothing goes before that";
  }
  // The newest step may turn out to be bad when it is read, and an older one is what is left.
  if (RanksAlive() > 0 && !attempts_.rbegin()->second.decided) {
    return "the job has still to restore: nothing goes before that";
  }
  const std::deque<Going>& waiting = RemovalsOf(tier).waiting;
  if (std::count_if(waiting.begin(), waiting.end(), [](const Going& going) {
        return !going.problem.empty();
      }) >= kRemovalsFailedMax) {
    return absl::StrCat(kRemovalsFailedMax, " removals have failed and are tried again: no more ",
                        "begin before one of them has ended");
  }
  return "";
}

void Coordinator::RetainDurable(Turn& t) {
  for (const TierKind tier : kDrained) {
    Removals& removals = RemovalsOf(tier);
    if (!Configured(tier) || removed_ || removals.current ||
        Inventory(tier).kind == InventoryState::Kind::kPending) {
      continue;
    }
    if (Remove(NextWaiting(tier, false, t.time.now), tier, t)) {
      continue;
    }
    if (removals.collect && WhyNothingGoes(tier).empty()) {
      const std::vector<CheckpointView> views = Views();
      const std::vector<DeletionVerdict> verdicts =
          Verdicts(tier, views, t.time.unix_ms, removals.pressure);
      if (!verdicts.empty() && verdicts.front().goes) {
        const DeletionVerdict& first = verdicts.front();
        removals.pressure -= std::min(removals.pressure, first.bytes);
        BeginRemoval(first.id, tier, first.why, t);
        continue;
      }
      removals.collect = false;
      removals.pressure = 0;
      removals.stage = RoomStage::kUsual;
      NoteGrace(tier, views, t.time);
    }
    Remove(NextWaiting(tier, true, t.time.now), tier, t);  // what fails waits for all others
  }
}

// When the grace time of something there ends, it may go, though nothing else happens.
void Coordinator::NoteGrace(TierKind tier, const std::vector<CheckpointView>& views,
                            EventTime time) {
  constexpr int64_t kLookAgainMs = int64_t{60} * 60 * 1000;  // (the wall clock may be set)
  for (const CheckpointView& view : views) {
    const int64_t since = std::max(view.unix_ms, view.left_unix_ms);
    const int64_t left = since + settings_.retention_grace_ms - time.unix_ms;
    const bool in_grace = tier != TierKind::kPeer && view.at(tier).bytes > 0 && since > 0 &&
                          left > 0 && (!view.CommittedAt(tier) || !OnLine(line_, view.id));
    if (in_grace) {
      const MonotonicTime due = time.now + std::chrono::milliseconds(std::min(left, kLookAgainMs));
      grace_ends_ = std::min(grace_ends_.value_or(due), due);
    }
  }
}

void Coordinator::EndGrace(MonotonicTime now) {
  if (grace_ends_ && *grace_ends_ <= now) {
    grace_ends_.reset();
    for (const TierKind tier : kDurable) {
      RemovalsOf(tier).collect = true;
    }
  }
}

// Taken out of those that wait. What is being written there, or read from there, still goes when
// that has ended.
std::optional<Coordinator::Going> Coordinator::NextWaiting(TierKind tier, bool failed,
                                                           MonotonicTime now) {
  std::deque<Going>& waiting = RemovalsOf(tier).waiting;
  for (auto it = waiting.begin(); it != waiting.end(); ++it) {
    if (it->not_before > now || it->problem.empty() == failed) {
      continue;
    }
    it->not_before = {};  // from now on it waits for others, not for the time
    const Checkpoint& checkpoint = checkpoints_.at(it->id);
    if (!checkpoint.drain(tier).Busy() && !ReadFrom(checkpoint, tier) &&
        !BeingMended(it->id, tier)) {
      Going next = std::move(*it);
      waiting.erase(it);
      return next;
    }
  }
  return std::nullopt;
}

bool Coordinator::Remove(std::optional<Going> next, TierKind tier, Turn& t) {
  if (next && next->nodes.empty()) {  // those that had it are gone
    EndRemoval(*std::move(next), tier, t);
    return true;
  }
  if (next) {
    next->asked = next->nodes;
    for (const NodeId node : next->nodes) {
      t.Say(RemovalWanted{next->id, tier, checkpoints_.at(next->id).world_size}, node);
    }
    RemovalsOf(tier).current = std::move(next);
  }
  return RemovalsOf(tier).current.has_value();
}

void Coordinator::BeginRemoval(CheckpointId id, TierKind tier, const std::string& why, Turn& t) {
  Tell(Report::Kind::kTierRemoved,
       absl::StrCat("step ", id.step, " of attempt ", id.attempt, " goes from ",
                    ToAbsl(TierName(tier)), ": ", why),
       checkpoints_.at(id).BytesAt(tier), t, tier);
  checkpoints_.at(id).drain(tier).shed = absl::StrCat("it was there and went: ", why);
  Remove(TakeFrom(id, tier, t), tier, t);
}

// From now on nobody is sent there, and nothing is judged by what lies there. (At the remote tier
// the manifest goes first in any case.) Returns what lay there.
Coordinator::Going Coordinator::TakeFrom(CheckpointId id, TierKind tier, Turn& t) {
  Checkpoint& checkpoint = checkpoints_.at(id);
  Going going{id, checkpoint.BytesAt(tier)};
  going.nodes = checkpoint.NodesWith(tier);
  for (const NodeId node : missing_) {
    going.nodes.erase(node);  // it would never answer
  }
  if (going.nodes.empty()) {
    going.nodes.insert(kHere);
  }
  for (const auto& [rank, shard] : checkpoint.shards) {
    if (shard.at(tier).kind != CopyState::Kind::kNone) {
      going.counted.insert(rank);
    }
  }
  checkpoint.removing = true;
  ForgetNamedBad([&](const RepairKey& key, const std::string&) {
    return key.id == id && key.place.tier == tier;
  });
  checkpoint.Clear(tier);
  if (tier == TierKind::kRemote) {
    t.Say(FlushUnwanted{id, tier}, kEveryNode);  // what was written there is remembered by nobody
  }
  Recheck(id, t);
  return going;
}

void Coordinator::On(const RemovalDone& m, Turn& t) {
  Removals& removals = RemovalsOf(m.tier);
  const auto it = checkpoints_.find(m.checkpoint);
  const auto stuck = std::find_if(removals.stuck.begin(), removals.stuck.end(),
                                  [&](const auto& going) { return going.id == m.checkpoint; });
  const bool hung = stuck != removals.stuck.end();
  const bool current = removals.current && removals.current->id == m.checkpoint;
  if ((!hung && !current) || it == checkpoints_.end()) {
    return;
  }
  Going& asked = hung ? *stuck : *removals.current;
  if (asked.asked.erase(t.from) == 0) {
    return;
  }
  if (m.status.ok() || absl::IsNotFound(m.status)) {
    asked.nodes.erase(t.from);
  } else {
    NoteLeft(asked, m, t);
  }
  if (!asked.asked.empty()) {
    return;
  }
  Going going = std::move(asked);
  if (hung) {
    removals.stuck.erase(stuck);
    if (removals.current && !removals.current->stalled.empty()) {
      LeaveStuck(removals);  // it hung when there was no room for one more
    }
  } else {
    removals.current.reset();
  }
  EndRemoval(std::move(going), m.tier, t);
  GoOnWithSession(t);  // (as when a flush ends: what waited for this may not get there)
}

// All that were asked have answered.
void Coordinator::EndRemoval(Going going, TierKind tier, Turn& t) {
  if (!going.nodes.empty()) {
    // What is left of it is removed by a later try; others go meanwhile.
    going.stalled.clear();
    going.not_before = t.time.now + kRemovalRetry;
    RemovalsOf(tier).waiting.push_back(std::move(going));
    RetainDurable(t);
    return PumpDrains(t);
  }
  Removals& removals = RemovalsOf(tier);
  removals.collect = true;
  if (removals.ended.size() >= kRemovedMax && removals.ended.count(going.id) == 0) {
    removals.ended.erase(
        std::min_element(removals.ended.begin(), removals.ended.end(),
                         [](const auto& a, const auto& b) { return a.second < b.second; }));
  }
  removals.ended[going.id] = t.time.now;
  checkpoints_.at(going.id).removing = Removing(going.id);
  EraseIfGone(going.id, Removed(going.id), t);
  RetryFlushes(tier);
  RetainDurable(t);
  PumpDrains(t);
}

// Those that found no room.
void Coordinator::RetryFlushes(TierKind tier) {
  for (auto& [id, checkpoint] : checkpoints_) {
    if (checkpoint.drain(tier).phase == Drain::Phase::kWanted) {
      checkpoint.drain(tier).retry_at = {};
    }
  }
}

// A node could not remove all of it.
void Coordinator::NoteLeft(Going& going, const RemovalDone& m, Turn& t) {
  const std::string problem = absl::StrCat(
      settings_.nodes->Several() ? settings_.nodes->Name(t.from) + ": " : "", Message(m.status));
  std::string& told = going.problems[t.from];
  if (told != problem) {
    Tell(Report::Kind::kTierTrouble,
         absl::StrCat("step ", m.checkpoint.step, " could not be removed from ",
                      ToAbsl(TierName(m.tier)), " yet, trying again: ", problem),
         0, t, m.tier);
  }
  going.problem = told = problem;
  if (m.ranks_left && going.nodes.size() == 1) {
    const Checkpoint& checkpoint = checkpoints_.at(m.checkpoint);
    uint64_t left = 0;
    for (const Rank rank : *m.ranks_left) {
      const auto shard = checkpoint.shards.find(rank);
      const bool counts = going.counted.count(rank) > 0;  // what was out of reach counts elsewhere
      left += counts && shard != checkpoint.shards.end() ? shard->second.bytes : 0;
    }
    if (left < going.bytes) {
      going.bytes = left;
      RetryFlushes(m.tier);
    }
  }
}

// It ends some day; the others do not wait for that. What it frees does not count before.
void Coordinator::On(const RemovalStalled& m, Turn& t) {
  Removals& removals = RemovalsOf(m.tier);
  if (!removals.current || removals.current->id != m.checkpoint) {
    return;
  }
  Tell(Report::Kind::kTierTrouble,
       absl::StrCat("the removal of step ", m.checkpoint.step, " from ", ToAbsl(TierName(m.tier)),
                    " is stalled: ", m.what),
       removals.current->bytes, t, m.tier);
  removals.current->stalled = m.what;
  if (removals.stuck.size() < kRemovalsStuckMax) {
    LeaveStuck(removals);
    RetainDurable(t);
  }
}

void Coordinator::LeaveStuck(Removals& removals) {
  removals.stuck.push_back(*std::exchange(removals.current, std::nullopt));
  removals.collect = true;
}

void Coordinator::On(const DurableRoomAsked& m, Turn& t) {
  Removals& removals = RemovalsOf(m.tier);
  uint64_t coming = 0;  // is on its way out already
  for (const Going* going : AllGoing(m.tier)) {
    coming += going->problem.empty() && going->stalled.empty() ? going->bytes : 0;
  }
  const auto stage = static_cast<RoomStage>(m.stage);
  const bool of_ended = stage == RoomStage::kEndedInRemote || stage == RoomStage::kEndedJobs;
  if (RanksAlive() > 0 && (of_ended || m.for_another)) {
    return;  // it runs (again), wherever
  }
  removals.pressure = std::max(removals.pressure, m.bytes - std::min(m.bytes, coming));
  removals.stage = stage;
  removals.collect = true;
  RetainDurable(t);
}

void Coordinator::On(const CollectGarbageAsked&, Turn& t) {
  for (Removals& removals : removals_) {
    removals.collect = true;
    for (Going& going : removals.waiting) {
      going.not_before = {};  // what failed is tried again at once
    }
  }
  RetainDurable(t);
}

// A restore needs memory: of no use, or whole without its copies in memory; then what a save could
// have, too; last, for it gets nowhere otherwise, the older ones of what it could fall back to.
void Coordinator::On(const FetchRoomAsked& m, Turn& t) {
  if (ComesAnyway(m.useful, t.from)) {
    t.Say(RoomAnswered{m.token, true});
    return;
  }
  const auto newer = [&](CheckpointId id, const auto& counts) {
    return std::any_of(checkpoints_.upper_bound(id), checkpoints_.end(), [&](const auto& c) {
      return c.second.committed && OnLine(line_, c.first) && counts(c.first);
    });
  };
  const auto any = [](CheckpointId) { return true; };
  const auto fetched = checkpoints_.find(m.fetched);
  // What there is of it, and is bad, goes for it before that.
  const bool replaces = fetched != checkpoints_.end() && fetched->second.BadInMemoryOf(t.from);
  const auto fallback = [&](CheckpointId id) {
    return id != m.fetched && session_ && session_->Holds(id);
  };
  // How little is lost with it; 0: too much.
  const auto rule = [&](CheckpointId id, const Checkpoint& checkpoint) {
    if (checkpoint.dead) {
      return 1;
    }
    if (checkpoint.committed && checkpoint.View(id).Without(TierKind::kMemory).Restorable()) {
      return 2;
    }
    if (HeldUntilDurable(id) || Pinned(id) || checkpoint.Open()) {
      return 0;
    }
    if (fallback(id)) {
      return !replaces && newer(id, fallback) ? 6 : 0;  // the newest one stays
    }
    if (!OnLine(line_, id)) {
      return 3;
    }
    if (newer(id, any)) {
      return 4;
    }
    // It was passed over, since what it lacks is gone for good: the decision will discard it.
    return checkpoint.cut_off && m.fetched < id && unreachable_.empty() ? 5 : 0;
  };
  std::optional<CheckpointId> victim;
  int least = 0;
  for (const CheckpointId& id : m.useful) {
    const auto it = checkpoints_.find(id);
    const int spared = it == checkpoints_.end() || id == m.fetched ? 0 : rule(id, it->second);
    if (spared != 0 && (!victim || spared < least)) {
      victim = id;
      least = spared;
    }
  }
  if (!victim) {
    t.Say(RoomAnswered{m.token, false});
    return;
  }
  const Failure failure{absl::StatusCode::kAborted, v1::Failure::REASON_SHED,
                        absl::StrCat("step ", victim->step, " of attempt ", victim->attempt,
                                     " left memory: step ", m.fetched.step, " is being restored")};
  Tell(Report::Kind::kStepRetired, failure.message, checkpoints_.at(*victim).bytes, t);
  Retire(*victim, failure, t);
  t.Say(RoomAnswered{m.token, true});
}

// ---- What people say ----

absl::StatusOr<CheckpointId> Coordinator::FindKnown(Attempt attempt, Step step) const {
  for (auto it = checkpoints_.rbegin(); it != checkpoints_.rend(); ++it) {
    const CheckpointId& id = it->first;
    if (id.step == step && (attempt == 0 ? OnLine(line_, id) : id.attempt == attempt)) {
      return id;
    }
  }
  std::string unread;
  for (const TierKind tier : kDurable) {
    if (const std::string why = WhyUnread(tier); !why.empty()) {
      absl::StrAppend(&unread, "; ", why, ", and may have it");
    }
  }
  return absl::NotFoundError(absl::StrCat(
      "job '", name_, "' has no step ", step,
      attempt == 0 ? std::string(" on its line of descent; other branches: name the attempt, too "
                                 "(ckptctl list shows them)")
                   : absl::StrCat(" of attempt ", attempt),
      unread));
}

void Coordinator::On(const PinAsked& m, Turn& t) {
  const auto refuse = [&](const absl::Status& status) {
    Refuse(m.token, {status.code(), v1::Failure::REASON_UNSPECIFIED, Message(status)}, t);
  };
  CheckpointId id{m.request.attempt(), m.request.step()};
  const auto pinned = std::find_if(pins_.begin(), pins_.end(), [&](const CheckpointId& pin) {
    return pin.step == id.step && (id.attempt == 0 || pin.attempt == id.attempt);
  });
  if (m.request.unpin() && pinned != pins_.end()) {
    id = *pinned;  // also one whose copies are gone
  } else {
    const absl::StatusOr<CheckpointId> found = FindKnown(id.attempt, id.step);
    if (!found.ok()) {
      return refuse(found.status());
    }
    id = *found;
    if (!m.request.unpin() && !IsCommitted(id)) {
      return refuse(absl::FailedPreconditionError(
          absl::StrCat("step ", id.step, " of attempt ", id.attempt,
                       " cannot be restored (any more, or not yet): there is nothing to pin")));
    }
  }
  if (!m.request.unpin() && pins_.size() >= kPinsMax && pins_.count(id) == 0) {
    return refuse(absl::ResourceExhaustedError(
        absl::StrCat("job '", name_, "' has ", kPinsMax, " pins; unpin some of them")));
  }
  const bool changed = m.request.unpin() ? pins_.erase(id) > 0 : pins_.insert(id).second;
  AdminAnswered answer{m.token, v1::PinReply()};
  std::get<v1::PinReply>(answer.reply)
      .set_text(absl::StrCat(
          "step ", id.step, " of attempt ", id.attempt,
          m.request.unpin()
              ? (changed ? " is pinned no more" : " was not pinned")
              : (changed ? " is pinned: retention leaves its copies alone" : " was pinned already"),
          !m.request.unpin() && Removing(id)
              ? "; those in one tier were being removed already, and go"
              : ""));
  if (changed) {
    Persist(t);
    if (m.request.unpin()) {
      unpinned_[id] = version_;
    } else {
      unpinned_.erase(id);
    }
  }
  AnswerWhenDurable(m.token, std::move(answer), t);
}

void Coordinator::On(const RemoveCheckpointAsked& m, Turn& t) {
  const auto refuse = [&](const absl::Status& status) {
    Refuse(m.token, {status.code(), v1::Failure::REASON_UNSPECIFIED, Message(status)}, t);
  };
  const v1::RemoveCheckpointRequest& request = m.request;
  std::vector<TierKind> tiers;
  for (const TierKind tier : kAllTiers) {
    if (request.tier().empty() || request.tier() == TierName(tier)) {
      tiers.push_back(tier);
    }
  }
  if (tiers.empty()) {
    return refuse(absl::InvalidArgumentError(absl::StrCat("there is no tier '", request.tier(),
                                                          "'; there are memory, nvme and remote")));
  }
  const absl::StatusOr<CheckpointId> found = FindKnown(request.attempt(), request.step());
  if (!found.ok()) {
    return refuse(found.status());
  }
  const CheckpointId id = *found;
  const std::string what = absl::StrCat("step ", id.step, " of attempt ", id.attempt);
  const Checkpoint& checkpoint = checkpoints_.at(id);
  if (checkpoint.Open()) {
    return refuse(absl::FailedPreconditionError(absl::StrCat(what, " is still being saved")));
  }
  const auto any_there = [&](TierKind tier) {
    const Drain& drain = checkpoint.drain(tier);
    return checkpoint.AnyAt(tier) || drain.Busy() || drain.phase == Drain::Phase::kWanted;
  };
  if (!request.tier().empty() && !any_there(tiers.front()) && !WhyUnread(tiers.front()).empty()) {
    return refuse(absl::UnavailableError(
        absl::StrCat("whether ", what, " has copies in ", request.tier(),
                     " cannot be told: ", WhyUnread(tiers.front()), "; try again when it can be")));
  }
  if (!request.tier().empty() && !any_there(tiers.front())) {
    return refuse(absl::NotFoundError(absl::StrCat(what, " has no copies in ", request.tier(),
                                                   "; ckptctl where ", name_, " --step ", id.step,
                                                   " shows where they lie")));
  }
  if (Held(id) || checkpoint.removing) {
    return refuse(absl::FailedPreconditionError(absl::StrCat(
        what, checkpoint.removing ? " is being removed already" : " is being restored just now")));
  }
  if (Pinned(id)) {
    return refuse(absl::FailedPreconditionError(
        absl::StrCat(what, " is pinned, or the restore point; first: ckptctl unpin ", name_,
                     " --step ", id.step, ", or ckptctl restore ", name_, " --clear")));
  }
  for (const TierKind tier : tiers) {
    if (!WhyUnread(tier).empty() && !request.force()) {
      return refuse(absl::UnavailableError(absl::StrCat(
          "whether ", what, " is what the job is protected by cannot be told: ", WhyUnread(tier),
          "; try again later, or remove it all the same: --force")));
    }
  }
  TierSet configured = 0;
  for (const TierKind tier : kAllTiers) {
    configured |= Configured(tier) ? SetOf(tier) : TierSet{0};
  }
  std::vector<CheckpointView> views = Views();
  const std::vector<ProtectionLine> before = ProtectionTable(views, line_, configured);
  for (CheckpointView& view : views) {
    for (const TierKind tier : tiers) {
      view = view.id == id ? view.Without(tier) : view;
    }
  }
  const std::vector<ProtectionLine> after = ProtectionTable(views, line_, configured);
  for (size_t i = 0; i < before.size() && !request.force(); ++i) {
    if (before[i].survives != after[i].survives) {
      return refuse(absl::FailedPreconditionError(
          absl::StrCat(what, " is what the job is protected by (ckptctl status ", name_,
                       " shows the table); to remove it all the same: --force")));
    }
  }
  AdminAnswered answer{m.token, v1::RemoveCheckpointReply()};
  v1::RemoveCheckpointReply& reply = std::get<v1::RemoveCheckpointReply>(answer.reply);
  uint64_t bytes = 0;
  for (const TierKind tier : tiers) {
    bytes += checkpoint.BytesAt(tier);
  }
  reply.set_bytes_freed(bytes);
  reply.set_text(absl::StrCat(what, " goes: ", FormatBytes(bytes)));
  for (const TierKind tier : tiers) {
    if (tier == TierKind::kMemory) {
      continue;
    }
    Drain& drain = checkpoints_.at(id).drain(tier);
    Unwant(id, tier, "it was removed (ckptctl rm)", t);
    drain.decided = true;
    drain.shed = "it was removed (ckptctl rm)";
    if (checkpoint.AnyAt(tier) || drain.Busy()) {
      Tell(Report::Kind::kTierRemoved,
           absl::StrCat(what, " goes from ", ToAbsl(TierName(tier)), ": as asked (ckptctl rm)"),
           checkpoint.BytesAt(tier), t, tier);
      RemovalsOf(tier).waiting.push_back(TakeFrom(id, tier, t));
    }
  }
  if (tiers.front() == TierKind::kMemory && checkpoints_.count(id) > 0) {
    Retire(id, Removed(id), t);
  }
  t.Say(std::move(answer));
  RetainDurable(t);
}

void Coordinator::ChangeSettings(const CoordinatorSettings& settings, EventTime time,
                                 std::vector<ForAgent>& out) {
  const v1::Policy before = EffectivePolicy();
  settings_ = settings;
  const v1::Policy now = EffectivePolicy();
  Turn t{time, out, kHere};
  if (now.replicas() != before.replicas()) {
    now.replicas() == 0 ? DropReplicas("the settings ask for none any more (policy.replicas: 0)", t)
                        : ReplicateAgain(t);
  }
  CollectGarbageAsked again;
  On(again, t);
}

void Coordinator::On(const SetPolicyAsked& m, Turn& t) {
  policy_set_ = m.policy;
  Persist(t);
  AdminAnswered answer{m.token, v1::SetOptionsReply()};
  std::get<v1::SetOptionsReply>(answer.reply)
      .set_text(absl::StrCat(m.text, m.policy.has_replicas() ? WhyFewerReplicas() : ""));
  AnswerWhenDurable(m.token, std::move(answer), t);
  ReplicasWanted() == 0 ? DropReplicas("the job keeps none any more (replicas: 0)", t)
                        : ReplicateAgain(t);
  CollectGarbageAsked again;
  On(again, t);
}

}  // namespace holdfast
