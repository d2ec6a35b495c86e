// What goes from the durable tiers, and what people say of it: pins, removals, policies
// (docs/protocol.md §11). One removal at a time in each tier; a removal that has begun counts as
// done wherever another one is judged.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/units.h"
#include "server/coordinator.h"

namespace holdfast {
namespace {

constexpr TierKind kDurable[] = {TierKind::kNvme, TierKind::kRemote};

Failure Removed(CheckpointId id) {
  return {absl::StatusCode::kAborted, v1::Failure::REASON_SHED,
          absl::StrCat("step ", id.step, " of attempt ", id.attempt, " was removed")};
}

// Whether a flush into another tier reads the checkpoint there.
bool ReadFrom(const Checkpoint& checkpoint, TierKind tier) {
  return std::any_of(checkpoint.drains.begin(), checkpoint.drains.end(), [&](const Drain& drain) {
    return std::any_of(drain.waiting.begin(), drain.waiting.end(),
                       [&](const auto& flush) { return flush.second == tier; });
  });
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
    for (const TierKind tier : kDurable) {
      if (IsGoing(id, tier)) {
        view = view.Without(tier);
      }
    }
    views.push_back(std::move(view));
  }
  return views;
}

std::vector<RetentionVerdict> Coordinator::Verdicts(TierKind tier,
                                                    const std::vector<CheckpointView>& views,
                                                    uint64_t bytes_wanted) const {
  const v1::Policy policy = EffectivePolicy();
  const v1::TierPolicy& rules = TierPolicyOf(policy, tier);
  return PlanRetention(tier, views, line_,
                       {rules.keep_last(), rules.keep_every_steps(), rules.bytes_max()},
                       bytes_wanted);
}

bool Coordinator::IsGoing(CheckpointId id, TierKind tier) const {
  const Removals& removals = RemovalsOf(tier);
  const auto is_it = [id](const auto& going) { return going.id == id; };
  return (removals.current && is_it(*removals.current)) ||
         std::any_of(removals.asked.begin(), removals.asked.end(), is_it) ||
         std::any_of(removals.stuck.begin(), removals.stuck.end(), is_it);
}

bool Coordinator::Removing(CheckpointId id) const {
  return IsGoing(id, TierKind::kNvme) || IsGoing(id, TierKind::kRemote);
}

uint64_t Coordinator::BytesGoing(TierKind tier) const {
  const Removals& removals = RemovalsOf(tier);
  uint64_t bytes = removals.current ? removals.current->bytes : 0;
  for (const auto& going : removals.asked) {
    bytes += going.bytes;
  }
  for (const auto& going : removals.stuck) {
    bytes += going.bytes;
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

// While a tier has still to be read nothing is removed: what it has does not count yet.
void Coordinator::RetainDurable(Turn& t) {
  for (const TierKind tier : kDurable) {
    Removals& removals = RemovalsOf(tier);
    const bool again = removals.not_before != MonotonicTime{};
    if (!Configured(tier) || removed_ || Inventory(tier).kind != InventoryState::Kind::kKnown ||
        removals.not_before > t.time.now || (removals.current && !again)) {
      continue;
    }
    removals.not_before = {};
    if (!removals.current) {
      // What is being written there, or read from there, still goes when that has ended.
      const auto next =
          std::find_if(removals.asked.begin(), removals.asked.end(), [&](const auto& going) {
            const Checkpoint& checkpoint = checkpoints_.at(going.id);
            return !checkpoint.drain(tier).Busy() && !ReadFrom(checkpoint, tier);
          });
      if (next != removals.asked.end()) {
        removals.current = *next;
        removals.asked.erase(next);
      }
    }
    if (removals.current) {
      const CheckpointId id = removals.current->id;
      t.out.push_back(RemovalWanted{id, tier, checkpoints_.at(id).world_size});
      continue;
    }
    if (!removals.collect || !AllInventoriesKnown()) {
      continue;
    }
    const std::vector<RetentionVerdict> verdicts = Verdicts(tier, Views(), removals.pressure);
    const auto first = std::find_if(verdicts.begin(), verdicts.end(),
                                    [](const RetentionVerdict& v) { return v.goes; });
    if (first == verdicts.end()) {
      removals.collect = false;
      removals.pressure = 0;
      continue;
    }
    removals.pressure -= std::min(removals.pressure, first->bytes);
    BeginRemoval(first->id, tier, first->why, t);
  }
}

void Coordinator::BeginRemoval(CheckpointId id, TierKind tier, const std::string& why, Turn& t) {
  Removals& removals = RemovalsOf(tier);
  removals.not_before = {};
  removals.current = {id, 0, ""};
  const uint32_t world_size = checkpoints_.at(id).world_size;
  Tell(Report::Kind::kTierRemoved,
       absl::StrCat("step ", id.step, " of attempt ", id.attempt, " goes from ",
                    ToAbsl(TierName(tier)), ": ", why),
       checkpoints_.at(id).BytesAt(tier), t, tier);
  checkpoints_.at(id).drain(tier).shed = absl::StrCat("it was there and went: ", why);
  removals.current->bytes = TakeFrom(id, tier, t);
  t.out.push_back(RemovalWanted{id, tier, world_size});
}

// From now on nobody is sent there, and nothing is judged by what lies there. (At the remote tier
// the manifest goes first in any case.) Returns what lay there.
uint64_t Coordinator::TakeFrom(CheckpointId id, TierKind tier, Turn& t) {
  Checkpoint& checkpoint = checkpoints_.at(id);
  const uint64_t bytes = checkpoint.BytesAt(tier);
  checkpoint.removing = true;
  checkpoint.Clear(tier);
  Recheck(id, t);
  return bytes;
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
  if (!m.status.ok() && !absl::IsNotFound(m.status)) {
    // What is left of it is removed by the next try: its intent says what that is.
    if (removals.problem != Message(m.status)) {
      removals.problem = Message(m.status);
      Tell(Report::Kind::kTierTrouble,
           absl::StrCat("step ", m.checkpoint.step, " could not be removed from ",
                        ToAbsl(TierName(m.tier)), " yet, trying again: ", removals.problem),
           0, t, m.tier);
    }
    if (!hung) {
      removals.not_before = t.time.now + kRemovalRetry;
      return;
    }
    removals.asked.push_back({m.checkpoint, stuck->bytes, ""});
    removals.stuck.erase(stuck);
    return RetainDurable(t);
  }
  if (hung) {
    removals.stuck.erase(stuck);
  } else {
    removals.problem.clear();
    removals.current.reset();
  }
  removals.collect = true;
  removals.ended[m.checkpoint] = t.time.now;
  if (removals.ended.size() > kRemovedMax) {
    removals.ended.erase(removals.ended.begin());
  }
  it->second.removing = Removing(m.checkpoint);
  EraseIfGone(m.checkpoint, Removed(m.checkpoint), t);
  // Flushes that found no room try again now.
  for (auto& [id, checkpoint] : checkpoints_) {
    if (checkpoint.drain(m.tier).phase == Drain::Phase::kWanted) {
      checkpoint.drain(m.tier).retry_at = {};
    }
  }
  RetainDurable(t);
  PumpDrains(t);
}

// It ends some day; the others do not wait for that. What it frees does not count before.
void Coordinator::On(const RemovalStalled& m, Turn& t) {
  Removals& removals = RemovalsOf(m.tier);
  if (!removals.current || removals.current->id != m.checkpoint ||
      removals.stuck.size() >= kRemovalsStuckMax) {
    return;
  }
  Tell(Report::Kind::kTierTrouble,
       absl::StrCat("the removal of step ", m.checkpoint.step, " from ", ToAbsl(TierName(m.tier)),
                    " is stalled: ", m.what),
       removals.current->bytes, t, m.tier);
  removals.current->stalled = m.what;
  removals.stuck.push_back(*std::exchange(removals.current, std::nullopt));
  removals.collect = true;
  RetainDurable(t);
}

void Coordinator::On(const DurableRoomAsked& m, Turn& t) {
  Removals& removals = RemovalsOf(m.tier);
  const uint64_t coming = BytesGoing(m.tier);  // is on its way out already
  removals.pressure = std::max(removals.pressure, m.bytes - std::min(m.bytes, coming));
  removals.collect = true;
  RetainDurable(t);
}

void Coordinator::On(const CollectGarbageAsked&, Turn& t) {
  for (Removals& removals : removals_) {
    removals.collect = true;
    if (removals.not_before != MonotonicTime{}) {
      removals.not_before = t.time.now;  // the one that failed is tried again at once
    }
  }
  RetainDurable(t);
}

// A restore needs memory: of no use, or whole without its copies in memory.
void Coordinator::On(const FetchRoomAsked& m, Turn& t) {
  std::optional<CheckpointId> victim;
  for (const bool dead : {true, false}) {
    for (const CheckpointId& id : m.useful) {
      const auto it = checkpoints_.find(id);
      if (victim || it == checkpoints_.end() || id == m.fetched) {
        continue;
      }
      const bool elsewhere = it->second.View(id).Without(TierKind::kMemory).Restorable();
      if (dead ? it->second.dead : it->second.committed && elsewhere) {
        victim = id;
      }
    }
  }
  if (!victim) {
    t.out.push_back(RoomAnswered{m.token, false});
    return;
  }
  const Failure failure{absl::StatusCode::kAborted, v1::Failure::REASON_SHED,
                        absl::StrCat("step ", victim->step, " of attempt ", victim->attempt,
                                     " left memory: step ", m.fetched.step, " is being restored")};
  Tell(Report::Kind::kStepRetired, failure.message, checkpoints_.at(*victim).bytes, t);
  Retire(*victim, failure, t);
  t.out.push_back(RoomAnswered{m.token, true});
}

// ---- What people say ----

absl::StatusOr<CheckpointId> Coordinator::FindKnown(Attempt attempt, Step step) const {
  for (auto it = checkpoints_.rbegin(); it != checkpoints_.rend(); ++it) {
    const CheckpointId& id = it->first;
    if (id.step == step && (attempt == 0 ? OnLine(line_, id) : id.attempt == attempt)) {
      return id;
    }
  }
  return absl::NotFoundError(absl::StrCat(
      "job '", name_, "' has no step ", step,
      attempt == 0 ? std::string(" on its line of descent; other branches: name the attempt, too "
                                 "(ckptctl list shows them)")
                   : absl::StrCat(" of attempt ", attempt)));
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
  if (!checkpoint.committed && !checkpoint.dead) {
    return refuse(absl::FailedPreconditionError(absl::StrCat(what, " is still being saved")));
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
      RemovalsOf(tier).asked.push_back({id, 0, ""});
      RemovalsOf(tier).asked.back().bytes = TakeFrom(id, tier, t);
    }
  }
  if (tiers.front() == TierKind::kMemory && checkpoints_.count(id) > 0) {
    Retire(id, Removed(id), t);
  }
  t.out.push_back(std::move(answer));
  RetainDurable(t);
}

void Coordinator::On(const SetPolicyAsked& m, Turn& t) {
  policy_set_ = m.policy;
  Persist(t);
  AdminAnswered answer{m.token, v1::SetOptionsReply()};
  std::get<v1::SetOptionsReply>(answer.reply).set_text(m.text);
  AnswerWhenDurable(m.token, std::move(answer), t);
  CollectGarbageAsked again;
  On(again, t);
}

}  // namespace holdfast
