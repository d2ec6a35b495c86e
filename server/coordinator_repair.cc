// Bad copies in the durable tiers, written anew from good ones (docs/protocol.md §11). Which copy
// is taken, and who writes, is decided here, where it is known what is good; the node that is asked
// puts the new one in place only when all of it has been read back (FlushShard::replace). The good
// copy is only read. What cannot be mended stays as it is.
#include <algorithm>
#include <functional>
#include <map>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "server/coordinator.h"
#include "server/tier_lists.h"

namespace holdfast {
namespace {

bool MayBeMended(TierKind tier) {
  return tier == TierKind::kNvme || tier == TierKind::kRemote;
}

// Which is the least trouble: what is in memory is read without a drive or a network.
int SourceCost(const CopyPlace& from) {
  switch (from.tier) {
    case TierKind::kMemory:
      return 0;
    case TierKind::kPeer:
      return 1;
    case TierKind::kNvme:
      return 2;
    default:
      return 3;
  }
}

// (NotFound: somebody else removed all of it, and it does not come back in parts.)
bool IsRefusal(const absl::Status& why) {
  return absl::IsNotFound(why) || absl::IsFailedPrecondition(why) ||
         absl::IsPermissionDenied(why) || absl::IsInvalidArgument(why) ||
         absl::IsUnimplemented(why) || absl::IsDataLoss(why);
}

}  // namespace

void Coordinator::WantRepair(const RepairKey& key, bool leave) {
  Repair& repair = repairs_[key];
  if (!repair.from) {
    repair = Repair();
    repair.left = leave;
  }
  touched_.insert(key.id);
}

// Only what may have changed something: the others come by the thousand. Of a large job so do bad
// copies without a good one, which all of those others do nothing for.
void Coordinator::LookForRepairs(const ToCoordinator& message) {
  if (repairs_.empty()) {
    return;
  }
  const auto look = [&]<typename M>(const M& m) {
    if constexpr (std::is_same_v<M, CopiesFound> || std::is_same_v<M, NodeArrived> ||
                  std::is_same_v<M, RepairAsked>) {
      look_for_repairs_ = look_for_sources_ = true;
    } else if constexpr (std::is_same_v<M, NodeLeft> || std::is_same_v<M, WakeUp>) {
      look_for_repairs_ = true;
    } else if constexpr (std::is_same_v<M, ShardBad> || std::is_same_v<M, ShardGood> ||
                         std::is_same_v<M, ShardDrained> || std::is_same_v<M, MemoryCopyGained> ||
                         std::is_same_v<M, ManifestDone> || std::is_same_v<M, RemovalDone>) {
      const auto first = repairs_.lower_bound({m.checkpoint, 0, {}});
      if (first != repairs_.end() && first->first.id == m.checkpoint) {
        touched_.insert(m.checkpoint);
      }
      // (What ends one flush may end the wait of another step's.)
      look_for_repairs_ = look_for_repairs_ || repairs_wait_for_drains_;
    }
  };
  std::visit(look, message);
}

void Coordinator::AdvanceRepairs(Turn& t) {
  if (removed_ || (!look_for_repairs_ && touched_.empty())) {
    return;
  }
  const bool all = std::exchange(look_for_repairs_, false);
  const bool look_for_sources = std::exchange(look_for_sources_, false);
  const std::set<CheckpointId> touched = std::exchange(touched_, {});
  // 1. What is bad no more, or has gone.
  std::erase_if(repairs_, [&](const auto& entry) {
    const auto& [key, repair] = entry;
    const auto it = checkpoints_.find(key.id);
    const bool there = it != checkpoints_.end() && it->second.shards.count(key.rank) > 0;
    return !repair.from &&
           (!there || it->second.shards.at(key.rank).at(key.place).kind != CopyState::Kind::kBad);
  });
  // 2. A few at a time, the newest first: retention takes the oldest next.
  repair_wake_.reset();
  repairs_wait_for_drains_ = repairs_wait_for_drains_ && !all;
  for (auto it = repairs_.rbegin(); it != repairs_.rend(); ++it) {
    auto& [key, repair] = *it;
    const bool touches = touched.count(key.id) > 0;
    const bool is_looked_at = (all || touches) && !repair.from && !repair.left &&
                              (!repair.no_source || look_for_sources || touches) &&
                              !(repair.not_before > t.time.now);
    if (is_looked_at) {
      repair.not_before = {};  // from now on it waits for others, not for the time
      StartRepair(key, repair, t);
    }
    const bool waits = !repair.from && !repair.left && !repair.no_source;
    if (waits && repair.not_before != MonotonicTime{}) {
      repair_wake_ = std::min(repair_wake_.value_or(repair.not_before), repair.not_before);
    }
  }
}

bool Coordinator::HasItsTurn(TierKind tier, NodeId by) const {
  const auto same = [&](const RepairKey& key) {
    return key.place.tier == tier && repairs_.at(key).asked == by;
  };
  return mending_.size() < kRepairsOfJobAtOnce &&
         static_cast<size_t>(std::count_if(mending_.begin(), mending_.end(), same)) <
             kRepairsAtOnce;
}

CopyPlace Coordinator::StopMending(const RepairKey& key, Repair& repair) {
  const CopyPlace from = repair.from.value_or(CopyPlace());
  repair.from.reset();
  mending_.erase(key);
  look_for_repairs_ = true;  // another one has its turn
  return from;
}

void Coordinator::StartRepair(const RepairKey& key, Repair& repair, Turn& t) {
  Checkpoint& checkpoint = checkpoints_.at(key.id);
  if (checkpoint.removing) {
    repair.problem = "its step is being removed";
    return;
  }
  if (checkpoint.drain(key.place.tier).phase != Drain::Phase::kNone) {
    repairs_wait_for_drains_ = true;
    repair.problem = absl::StrCat("its step is being written to ", Name(key.place.tier),
                                  ", and the copy with it");
    return;
  }
  if (missing_.count(key.place.node) > 0) {
    repair.problem = absl::StrCat(settings_.nodes->Name(key.place.node), " is out of reach");
    return;
  }
  std::optional<CopyPlace> from = RepairSource(key, repair);
  if (!from && !repair.failed.empty()) {
    repair.failed.clear();  // those that failed once may do so no more
    from = RepairSource(key, repair);
  }
  if (!from) {
    repair.problem = WhyNoSource(key);
    if (!std::exchange(repair.no_source, true)) {
      Tell(Report::Kind::kCopyUnmended,
           absl::StrCat("step ", key.id.step, " of attempt ", key.id.attempt, " rank ", key.rank,
                        ": its ", Name(key.place.tier),
                        " copy is bad and stays as it is: ", repair.problem),
           checkpoint.shards.at(key.rank).bytes, t, key.place.tier);
    }
    return;  // until something changes
  }
  repair.no_source = false;
  // (What is in the remote tier is read by whoever has the drive.)
  const NodeId by = key.place.tier == TierKind::kNvme ? key.place.node : from->node;
  if (!HasItsTurn(key.place.tier, by)) {
    repair.problem.clear();  // it has its turn soon
    return;
  }
  repair.from = from;
  repair.asked = by;
  repair.asked_at = t.time.now;
  mending_.insert(key);
  FlushWanted flush;
  flush.checkpoint = key.id;
  flush.to = key.place.tier;
  flush.world_size = checkpoint.world_size;
  flush.verify = v1::TierPolicy::VERIFY_ALL;
  flush.replace = true;
  if (const auto info = attempts_.find(key.id.attempt); info != attempts_.end()) {
    flush.opening = info->second.opening;
  }
  flush.shards.push_back({key.rank, from->tier, checkpoint.shards.at(key.rank).bytes, 0});
  if (key.place.tier == TierKind::kRemote &&
      checkpoint.shards.at(key.rank).at(key.place).detail.file_bytes != 0) {
    Sharing(checkpoint).AddGroup(flush);
  }
  t.Say(std::move(flush), repair.asked);
}

// A good copy that whoever writes can read: on a drive, that node itself, in its memory or in the
// remote tier; in the remote tier, any node that has one.
std::optional<CopyPlace> Coordinator::RepairSource(const RepairKey& key,
                                                   const Repair& repair) const {
  const Checkpoint& checkpoint = checkpoints_.at(key.id);
  std::optional<CopyPlace> best;
  for (const ShardState::Copy& copy : checkpoint.shards.at(key.rank).copies) {
    const bool good = copy.state.kind == CopyState::Kind::kGood && copy.place != key.place &&
                      repair.failed.count(copy.place) == 0;
    const bool remote = copy.place.tier == TierKind::kRemote;
    const bool in_reach = key.place.tier == TierKind::kRemote || remote ||
                          (copy.place.node == key.place.node && copy.place.tier != TierKind::kNvme);
    if (good && in_reach && (!remote || checkpoint.Readable(key.rank, TierKind::kRemote)) &&
        (!best || SourceCost(copy.place) < SourceCost(*best))) {
      best = copy.place;
    }
  }
  return best;
}

std::string Coordinator::WhyNoSource(const RepairKey& key) const {
  const ShardState& shard = checkpoints_.at(key.id).shards.at(key.rank);
  std::string elsewhere;
  for (const ShardState::Copy& copy : shard.copies) {
    if (copy.state.kind == CopyState::Kind::kGood || copy.state.kind == CopyState::Kind::kAway) {
      absl::StrAppend(&elsewhere, elsewhere.empty() ? "" : ", ", SourceText(copy.place),
                      copy.state.kind == CopyState::Kind::kAway ? " (out of reach)" : "");
    }
  }
  return elsewhere.empty()
             ? "there is no good copy of it anywhere"
             : absl::StrCat("of the good ones (", elsewhere, ") none can be read from there");
}

std::string Coordinator::SourceText(const CopyPlace& from) const {
  const std::string node =
      settings_.nodes->Several() ? absl::StrCat(" of ", settings_.nodes->Name(from.node)) : "";
  switch (from.tier) {
    case TierKind::kRemote:
      return "the remote tier";
    case TierKind::kNvme:
      return absl::StrCat("nvme", node);
    default:
      return absl::StrCat("the memory", node);
  }
}

void Coordinator::EndRepair(const ShardDrained& m, Turn& t) {
  const RepairKey key{m.checkpoint, m.rank, PlaceOf(m.to, t.from)};
  const auto found = repairs_.find(key);
  const bool ours = found != repairs_.end() && found->second.from && found->second.asked == t.from;
  const auto it = checkpoints_.find(m.checkpoint);
  if (it == checkpoints_.end() || it->second.shards.count(m.rank) == 0) {
    if (ours) {
      StopMending(key, found->second);
      repairs_.erase(found);
    }
    return;
  }
  if (m.source_bad) {  // that one is bad, too, and the next one is taken
    if (ours) {
      StopMending(key, found->second);
      found->second.not_before = {};
    }
    On(ShardBad{m.checkpoint, m.rank, Message(m.status), m.from}, t);
    return RetainDurable(t);
  }
  if (ours && !(m.replaced && m.status.ok())) {
    // (One that knows of no replacement finds a copy there, and says that all is well.)
    RepairFailed(key,
                 m.status.ok() ? absl::UnimplementedError(
                                     "the ckptd there is of a version that mends no copies")
                               : m.status,
                 t);
    return RetainDurable(t);
  }
  if (!m.replaced || !m.status.ok()) {
    return;
  }
  // (Also when an earlier host had asked for it.)
  Checkpoint& checkpoint = it->second;
  const CopyState before = checkpoint.shards.at(m.rank).at(key.place);
  if (before.kind == CopyState::Kind::kBad) {
    CopyDetail detail = DetailOf(m.copy);
    detail.since = t.time.now;
    checkpoint.SetGood(m.rank, key.place, std::move(detail));
    const std::string from = SourceText(ours ? *found->second.from : PlaceOf(m.from, t.from));
    v1::BadCopy& mended = mended_.emplace_back();
    FillBadCopy(key, before, mended);
    mended.set_state(v1::BadCopy::STATE_MENDED);
    mended.set_source(from);
    if (mended_.size() > kMendedMax) {
      mended_.pop_front();
    }
    Tell(Report::Kind::kCopyMended,
         absl::StrCat("step ", m.checkpoint.step, " of attempt ", m.checkpoint.attempt, " rank ",
                      m.rank, ": its ", Name(m.to), " copy '", m.copy.location,
                      "' was written anew from ", from, " and verified; it was bad: ", before.why),
         checkpoint.shards.at(m.rank).bytes, t, m.to);
  }
  if (ours) {
    StopMending(key, found->second);
    repairs_.erase(found);
  }
  Recheck(m.checkpoint, t);
  if (checkpoints_.count(m.checkpoint) > 0) {
    RetainDurable(t);
    PumpDrains(t);
    GoOnWithSession(t);
  }
}

void Coordinator::RepairFailed(const RepairKey& key, const absl::Status& why, Turn& t) {
  Repair& repair = repairs_.at(key);
  const CopyPlace from = StopMending(key, repair);
  // What was called off, or waits for something else there, is tried again as it was.
  // (Nor is the good one to blame where all of the bad one is gone.)
  if (!absl::IsCancelled(why) && !absl::IsAborted(why) && !absl::IsResourceExhausted(why) &&
      !absl::IsNotFound(why)) {
    repair.failed.insert(from);
  }
  repair.backoff = std::clamp(repair.backoff * 2, kRepairRetryMin,
                              IsRefusal(why) ? kRefusedRepairRetryMax : kRepairRetryMax);
  repair.not_before = t.time.now + repair.backoff;
  const std::string problem = absl::StrCat("from ", SourceText(from), ": ", Message(why));
  if (repair.problem != problem && !absl::IsCancelled(why)) {
    Tell(Report::Kind::kTierTrouble,
         absl::StrCat("step ", key.id.step, " of attempt ", key.id.attempt, " rank ", key.rank,
                      ": its bad ", Name(key.place.tier),
                      " copy could not be written anew yet, trying again: ", problem),
         0, t, key.place.tier);
  }
  repair.problem = problem;
  repair.no_room = absl::IsResourceExhausted(why);
  for (Removals& removals : removals_) {
    removals.collect = true;  // what it held may go
  }
}

bool Coordinator::BeingMended(CheckpointId id, TierKind tier) const {
  for (auto it = repairs_.lower_bound({id, 0, {}}); it != repairs_.end() && it->first.id == id;
       ++it) {
    const std::optional<CopyPlace>& from = it->second.from;
    if (from && (it->first.place.tier == tier || from->tier == tier)) {
      return true;
    }
  }
  return false;
}

void Coordinator::LoseRepairs(NodeId node, const std::string& why, Turn& t) {
  std::vector<RepairKey> lost;
  for (const RepairKey& key : mending_) {
    // (A node may say twice at once that it is here. What it was asked in between it will hear.)
    if (repairs_.at(key).asked == node &&
        (missing_.count(node) > 0 || repairs_.at(key).asked_at != t.time.now)) {
      lost.push_back(key);
    }
  }
  for (const RepairKey& key : lost) {
    RepairFailed(key, absl::CancelledError(why), t);
  }
}

bool Coordinator::ToBeMended(CheckpointId id, TierKind tier) const {
  for (auto it = repairs_.lower_bound({id, 0, {}}); it != repairs_.end() && it->first.id == id;
       ++it) {
    const Repair& repair = it->second;
    // (Where there is no room for it, and where it fails for long, it holds nothing up.)
    const bool soon = !repair.left && !repair.no_source && !repair.no_room &&
                      repair.backoff < kRepairRetryMax &&
                      missing_.count(it->first.place.node) == 0 && RemovalsOf(tier).pressure == 0;
    if (it->first.place.tier == tier && soon) {
      return true;
    }
  }
  return BeingMended(id, tier);
}

std::optional<MonotonicTime> Coordinator::RepairWake() const {
  return removed_ ? std::nullopt : repair_wake_;
}

// ---- ckptctl repair ----

void Coordinator::On(const RepairAsked& m, Turn& t) {
  const v1::RepairRequest& request = m.request;
  std::optional<CheckpointId> only;
  if (!request.all_steps()) {
    const absl::StatusOr<CheckpointId> found = FindKnown(request.attempt(), request.step());
    if (!found.ok()) {
      return Refuse(
          m.token,
          {found.status().code(), v1::Failure::REASON_UNSPECIFIED, Message(found.status())}, t);
    }
    only = *found;
  }
  AdminAnswered answer{m.token, v1::RepairReply()};
  v1::RepairReply& reply = std::get<v1::RepairReply>(answer.reply);
  FillRepair(only, request, reply);
  if (!request.look()) {
    // (All of them, also those that the answer has no room for.)
    ForEachBad(only, request,
               [&](const RepairKey& key, const CopyState&) { WantRepair(key, false); });
    AdvanceRepairs(t);
    reply.Clear();
    FillRepair(only, request, reply);
  }
  t.Say(std::move(answer), t.from);
}

void Coordinator::FillBadCopy(const RepairKey& key, const CopyState& copy, v1::BadCopy& out) const {
  out.set_attempt(key.id.attempt);
  out.set_step(key.id.step);
  out.set_rank(key.rank);
  out.set_tier(std::string(TierName(key.place.tier)));
  if (key.place.tier != TierKind::kRemote) {
    out.set_node(settings_.nodes->Name(key.place.node));
  }
  out.set_location(copy.detail.location);
  out.set_what(copy.why);
  const auto found = repairs_.find(key);
  if (found == repairs_.end()) {
    return out.set_state(v1::BadCopy::STATE_WAITS);
  }
  const Repair& repair = found->second;
  out.set_state(repair.from        ? v1::BadCopy::STATE_UNDER_WAY
                : repair.left      ? v1::BadCopy::STATE_LEFT
                : repair.no_source ? v1::BadCopy::STATE_NO_SOURCE
                                   : v1::BadCopy::STATE_WAITS);
  out.set_problem(repair.problem);
  if (repair.from) {
    out.set_source(SourceText(*repair.from));
  }
}

void Coordinator::ForEachBad(
    std::optional<CheckpointId> only, const v1::RepairRequest& request,
    const std::function<void(const RepairKey&, const CopyState&)>& visit) const {
  const auto asked = [&](const CheckpointId& id, Rank rank, std::string_view tier) {
    return (!only || id == *only) && (!request.has_rank() || rank == request.rank()) &&
           (request.tier().empty() || request.tier() == tier);
  };
  for (const auto& [id, checkpoint] : checkpoints_) {
    for (const Rank rank : checkpoint.Bad()) {
      for (const ShardState::Copy& copy : checkpoint.shards.at(rank).copies) {
        if (copy.state.kind == CopyState::Kind::kBad && MayBeMended(copy.place.tier) &&
            asked(id, rank, TierName(copy.place.tier))) {
          visit({id, rank, copy.place}, copy.state);
        }
      }
    }
  }
}

void Coordinator::FillRepair(std::optional<CheckpointId> only, const v1::RepairRequest& request,
                             v1::RepairReply& reply) const {
  uint64_t count = 0;
  ForEachBad(only, request, [&](const RepairKey& key, const CopyState& state) {
    if (++count <= kBadToldMax) {
      FillBadCopy(key, state, *reply.add_copies());
    }
  });
  reply.set_copies_bad(count);
  for (const v1::BadCopy& mended : mended_) {
    const bool asked = (!only || CheckpointId{mended.attempt(), mended.step()} == *only) &&
                       (!request.has_rank() || mended.rank() == request.rank()) &&
                       (request.tier().empty() || request.tier() == mended.tier());
    if (asked) {
      *reply.add_mended() = mended;
    }
  }
}

}  // namespace holdfast
