// What a job shows of its copies: where they lie, why a step can be restored, how long each save
// took, what retention does (ckptctl where, explain, timeline, gc; the tiers in the status).
#include <algorithm>
#include <array>

#include "absl/strings/str_cat.h"
#include "base/units.h"
#include "recovery/explain.h"
#include "server/coordinator.h"
#include "server/tier_lists.h"

namespace holdfast {
namespace {

constexpr int64_t kMicros = 1000;  // of a millisecond

}  // namespace

void Coordinator::FillTiers(v1::JobStatus& status, EventTime time) const {
  *status.mutable_policy() = EffectivePolicy();
  for (const TierKind tier : kDrained) {
    if (!Configured(tier) || (tier == TierKind::kPeer && ReplicasWanted() == 0)) {
      continue;
    }
    v1::TierProgress& progress = *status.add_tiers();
    progress.set_tier(std::string(TierName(tier)));
    for (const auto& [id, checkpoint] : checkpoints_) {
      progress.set_bytes(progress.bytes() + checkpoint.BytesAt(tier));
      if (checkpoint.CommittedAt(tier)) {
        progress.set_checkpoints(progress.checkpoints() + 1);
        if (OnLine(line_, id)) {
          progress.set_any(true);
          progress.set_attempt(id.attempt);
          progress.set_step(id.step);
          progress.set_age_ms(std::max<int64_t>(0, time.unix_ms - checkpoint.unix_ms));
        }
      }
      const Drain& drain = checkpoint.drain(tier);
      if (drain.Busy()) {
        v1::FlushInFlight& flush = *progress.add_flushing();
        flush.set_attempt(id.attempt);
        flush.set_step(id.step);
        flush.set_ranks_done(checkpoint.GoodAt(tier));
        flush.set_world_size(checkpoint.world_size);
        flush.set_stalled(!drain.stalled.empty());
        flush.set_since_unix_ms(drain.begun_unix_ms);
        if (!drain.stalled.empty()) {
          progress.set_problem(drain.stalled);
        }
      } else if (drain.phase == Drain::Phase::kWanted) {
        progress.set_waiting(true);
        progress.set_waiting_attempt(id.attempt);
        progress.set_waiting_step(id.step);
        if (!drain.problem.empty()) {
          progress.set_problem(absl::StrCat(drain.problem, "; tried again by itself"));
        }
      }
    }
    const InventoryState& inventory = Inventory(tier);
    if (inventory.kind == InventoryState::Kind::kFailed) {
      progress.set_problem(inventory.why);
    } else if (inventory.kind == InventoryState::Kind::kPending) {
      progress.set_problem("what lies there is still being read");
    }
    const Removals& removals = RemovalsOf(tier);
    const auto failed = std::find_if(removals.waiting.begin(), removals.waiting.end(),
                                     [](const Going& going) { return !going.problem.empty(); });
    if (progress.problem().empty() && !removals.stuck.empty()) {
      progress.set_problem(absl::StrCat("removal of step ", removals.stuck.front().id.step, ": ",
                                        removals.stuck.front().stalled));
    } else if (progress.problem().empty() && failed != removals.waiting.end()) {
      progress.set_problem(
          absl::StrCat("removal of step ", failed->id.step, ": ", failed->problem));
    }
  }
}

void Coordinator::FillWhere(std::optional<CheckpointId> only, v1::WhereReply& reply,
                            EventTime time) const {
  for (const auto& [id, checkpoint] : checkpoints_) {
    if (only && id != *only) {
      continue;
    }
    std::optional<Sharing> sharing;
    std::map<uint32_t, Rank> doubted_for;  // by who holds the same
    for (const auto& [rank, shard] : checkpoint.shards) {
      if (checkpoint.Doubted(rank) && doubted_for.count(shard.sharers) == 0) {
        doubted_for[shard.sharers] = *checkpoint.DoubtedFor(rank);
      }
      std::vector<ShardState::Copy> copies = shard.copies;
      for (const TierKind tier : kDrained) {
        const CopyPlace* writing = checkpoint.drain(tier).waiting.Find(rank);
        if (writing != nullptr &&
            shard.at(PlaceOf(tier, writing->node)).kind == CopyState::Kind::kNone) {
          copies.push_back({PlaceOf(tier, writing->node), {}});
        }
      }
      std::sort(copies.begin(), copies.end(),
                [](const auto& a, const auto& b) { return a.place < b.place; });
      for (const auto& [place, copy] : copies) {
        const TierKind tier = place.tier;
        const bool writing = copy.kind == CopyState::Kind::kNone;
        v1::ShardCopy& out = *reply.add_copies();
        out.set_attempt(id.attempt);
        out.set_step(id.step);
        out.set_rank(rank);
        out.set_world_size(checkpoint.world_size);
        out.set_node(tier == TierKind::kRemote ? "" : settings_.nodes->Name(place.node));
        out.set_tier(std::string(TierName(tier)));
        out.set_location(copy.detail.location);
        out.set_bytes(shard.bytes);
        if (copy.detail.file_bytes != 0) {
          if (!sharing) {
            sharing.emplace(checkpoint);
          }
          const std::string others = sharing->OthersOf(rank);
          out.set_bytes(copy.detail.file_bytes);
          out.set_shard_bytes(shard.bytes);
          out.set_rest_in(others.empty() ? "other ranks" : others);
        }
        out.set_unix_ms(shard.unix_ms);
        const bool unlisted = tier == TierKind::kRemote && !checkpoint.manifest;
        const bool doubted = tier == TierKind::kRemote && checkpoint.Doubted(rank);
        out.set_state(writing                              ? "writing"
                      : copy.kind == CopyState::Kind::kBad ? absl::StrCat("bad: ", copy.why)
                      : copy.kind == CopyState::Kind::kAway
                          ? absl::StrCat("out of reach: the node ", WhyAway(place.node, time))
                      : unlisted ? "good, not in a manifest yet"
                      : doubted  ? absl::StrCat("incomplete: what it leaves out may be in rank ",
                                                doubted_for.at(shard.sharers),
                                                "'s copy, which is bad or gone")
                                 : "good");
      }
    }
  }
}

// "is gone since 10 s"
std::string Coordinator::WhyAway(NodeId node, EventTime time) const {
  const auto absent = absent_.find(node);
  if (absent == absent_.end()) {
    return unheard_.count(node) > 0 ? "has not been heard of yet" : "is out of reach";
  }
  return absl::StrCat(absent->second.ended ? "is gone since " : "is out of reach since ",
                      FormatDuration(std::max(Duration(0), time.now - absent->second.since)));
}

// "in the memory of node-2, which is gone since 10 s"
std::string Coordinator::WhereCopyLies(const ShardState::Copy& copy, EventTime time) const {
  if (copy.place.tier == TierKind::kRemote) {
    return "in remote";
  }
  return absl::StrCat(copy.place.tier == TierKind::kNvme ? "in nvme of " : "in the memory of ",
                      settings_.nodes->Name(copy.place.node),
                      copy.state.kind == CopyState::Kind::kAway
                          ? absl::StrCat(", which ", WhyAway(copy.place.node, time))
                          : "");
}

// Of a rank's copy in remote that others need: what is wrong with it.
std::string Coordinator::BadOrGone(const Checkpoint& checkpoint, Rank rank) {
  const CopyState& copy = checkpoint.shards.at(rank).at(TierKind::kRemote);
  return copy.kind == CopyState::Kind::kBad ? absl::StrCat("bad: ", copy.why) : "not there";
}

// What there is of a shard that its rank cannot get, and where.
std::string Coordinator::ExplainShard(const Checkpoint& checkpoint, Rank rank,
                                      EventTime time) const {
  const auto shard = checkpoint.shards.find(rank);
  if (shard == checkpoint.shards.end()) {
    std::string nodes;
    for (const NodeId node : missing_) {
      absl::StrAppend(&nodes, nodes.empty() ? "" : "; ", settings_.nodes->Name(node), " ",
                      WhyAway(node, time));
    }
    return absl::StrCat("rank ", rank, ": no copy of its shard is known",
                        nodes.empty() ? "" : absl::StrCat(", and not all nodes can tell: ", nodes));
  }
  std::string there;
  std::string bad;
  bool elsewhere = false;
  const NodeId seat = SeatOf(rank);
  for (const ShardState::Copy& copy : shard->second.copies) {
    if (copy.state.kind == CopyState::Kind::kBad) {
      absl::StrAppend(&bad, bad.empty() ? "its copy " : ", that ", WhereCopyLies(copy, time),
                      " is bad: ", copy.state.why);
      continue;
    }
    absl::StrAppend(&there, there.empty() ? "" : " and ", WhereCopyLies(copy, time));
    if (copy.place.tier == TierKind::kRemote) {
      const std::optional<Rank> other =
          checkpoint.manifest ? checkpoint.DoubtedFor(rank) : std::nullopt;
      absl::StrAppend(&there,
                      other ? absl::StrCat(", in a file that leaves out what rank ", *other,
                                           "'s may have, which is ", BadOrGone(checkpoint, *other))
                            : ", where no manifest names it");
    }
    elsewhere = elsewhere || (copy.place.tier != TierKind::kRemote && copy.place.node != seat);
  }
  std::string text = absl::StrCat("rank ", rank, ": ",
                                  there.empty() ? "" : absl::StrCat("its shard is only ", there));
  if (!bad.empty()) {
    absl::StrAppend(&text, there.empty() ? "" : "; ", bad);
  } else if (there.empty()) {
    absl::StrAppend(&text, "no copy of its shard is left");
  }
  const Member* member = members_.Find(rank);
  if (elsewhere && member != nullptr) {
    absl::StrAppend(&text, "; the rank ", member->alive ? "runs on " : "ran last on ",
                    settings_.nodes->Name(seat), member->alive ? " now" : "");
  }
  return text;
}

// Of a rank that is not there any copy will do: nobody knows where it will be.
bool Coordinator::ReadableWhereItRuns(const Checkpoint& checkpoint, Rank rank,
                                      TierKind tier) const {
  if (tier == TierKind::kPeer && !Configured(tier)) {
    return false;
  }
  return members_.Find(rank) == nullptr || !members_.Find(rank)->alive
             ? checkpoint.Readable(rank, tier)
             : checkpoint.ReadableOn(SeatOf(rank), rank, tier);
}

// As the ranks see it from where they run.
CheckpointView Coordinator::SeatView(CheckpointId id) const {
  const Checkpoint& checkpoint = checkpoints_.at(id);
  CheckpointView view;
  for (const auto& [rank, shard] : checkpoint.shards) {
    TierSet in = 0;
    for (const TierKind tier : kAllTiers) {
      const bool readable = !IsGoing(id, tier) && ReadableWhereItRuns(checkpoint, rank, tier);
      in |= readable ? SetOf(tier) : TierSet{0};
    }
    view.AddRank(in);
  }
  return view;
}

Unreadables Coordinator::WhatIsMissing(const std::vector<CheckpointView>& views,
                                       EventTime time) const {
  Unreadables unreadable;
  for (const CheckpointView& view : views) {
    const Checkpoint& checkpoint = checkpoints_.at(view.id);
    if (view.Restorable() || !checkpoint.writing.empty() || !view.consistent) {
      continue;
    }
    holdfast::Unreadable& why = unreadable[view.id];
    uint32_t nowhere = 0;
    uint32_t elsewhere = 0;
    for (Rank rank = 0; rank < checkpoint.world_size; ++rank) {
      bool readable = false;
      bool good = false;
      for (const TierKind tier : kAllTiers) {
        readable = readable || ReadableWhereItRuns(checkpoint, rank, tier);
        good = good || checkpoint.Readable(rank, tier);
      }
      if (readable) {
        continue;
      }
      ++(good ? elsewhere : nowhere);
      if (nowhere + elsewhere <= kShardsExplained) {
        why.shards.push_back(ExplainShard(checkpoint, rank, time));
      }
    }
    if (nowhere + elsewhere > kShardsExplained) {
      why.shards.push_back(
          absl::StrCat("and ", nowhere + elsewhere - kShardsExplained, " more ranks"));
    }
    if (nowhere > 0) {
      why.what = absl::StrCat("no tier has a good copy of ", nowhere, " of ", checkpoint.world_size,
                              checkpoint.world_size == 1 ? " shard" : " shards");
    }
    if (elsewhere > 0) {
      absl::StrAppend(&why.what, why.what.empty() ? "" : ", and ", elsewhere, " of ",
                      checkpoint.world_size, " ranks cannot reach the copy of ",
                      elsewhere == 1 ? "its shard" : "their shards", " from where ",
                      elsewhere == 1 ? "it runs" : "they run");
    }
  }
  return unreadable;
}

void Coordinator::FillExplain(const v1::ExplainRequest& request, EventTime time,
                              v1::ExplainReply& reply) const {
  TierSet configured = 0;
  for (const TierKind tier : kAllTiers) {
    configured |= Configured(tier) ? SetOf(tier) : TierSet{0};
  }
  RestoreContext context;
  context.line = line_;
  context.world_size = world_size();
  context.configured = configured;
  if (restore_point_.set() && restore_point_.from_scratch()) {
    context.from_scratch = true;
  } else if (restore_point_.set()) {
    context.restore_point = CheckpointId{restore_point_.attempt(), restore_point_.step()};
  }
  std::vector<CheckpointView> views = Views();
  for (CheckpointView& view : views) {
    const CheckpointView seen = SeatView(view.id);
    view.ranks_in = seen.ranks_in;
    view.restorable = seen.restorable;
  }
  const Unreadables unreadable = WhatIsMissing(views, time);
  context.unreadable = &unreadable;
  std::string choice = ExplainChoice(views, context);
  for (const TierKind tier : kDurable) {
    if (Configured(tier) && Inventory(tier).kind != InventoryState::Kind::kKnown) {
      absl::StrAppend(&choice, "; ", TierName(tier) == "nvme" ? "nvme" : "remote",
                      Inventory(tier).why.empty()
                          ? " is still being read"
                          : absl::StrCat(" cannot be read: ", Inventory(tier).why));
    }
  }
  reply.set_next_restore(choice);
  if (prefetch_) {
    *reply.mutable_prefetch() = PrefetchState();
  }
  for (auto view = views.rbegin(); view != views.rend(); ++view) {
    const bool named =
        request.all_steps() || (view->id.step == request.step() &&
                                (request.attempt() == 0 || view->id.attempt == request.attempt()));
    if (!named) {
      continue;
    }
    const StepReasons reasons = ExplainStep(*view, context);
    v1::StepExplanation& out = *reply.add_steps();
    out.set_attempt(view->id.attempt);
    out.set_step(view->id.step);
    out.set_restorable(reasons.restorable);
    out.set_on_line(reasons.on_line);
    for (const std::string& reason : reasons.reasons) {
      out.add_reasons(reason);
    }
    if (const std::string& divergence = checkpoints_.at(view->id).divergence; !divergence.empty()) {
      out.add_reasons(absl::StrCat("replicas have diverged: ", divergence));
    }
  }
  // A step whose copies are all gone: what became of it.
  if (!request.all_steps() && reply.steps().empty()) {
    for (const auto& [id, times] : times_) {
      if (id.step == request.step() && !times.fate.empty() &&
          (request.attempt() == 0 || id.attempt == request.attempt())) {
        v1::StepExplanation& out = *reply.add_steps();
        out.set_attempt(id.attempt);
        out.set_step(id.step);
        out.set_on_line(OnLine(line_, id));
        out.add_reasons(absl::StrCat("none of its copies is left: ", times.fate));
      }
    }
  }
}

void Coordinator::FillTimeline(uint32_t steps_max, v1::TimelineReply& reply) const {
  size_t skip = steps_max == 0 || times_.size() <= steps_max ? 0 : times_.size() - steps_max;
  for (const auto& [id, times] : times_) {
    if (skip > 0) {
      --skip;
      continue;
    }
    const auto found = checkpoints_.find(id);
    v1::StepTimeline& out = *reply.add_steps();
    out.set_attempt(id.attempt);
    out.set_step(id.step);
    out.set_bytes(times.bytes);
    out.set_world_size(times.world_size);
    out.set_fate(found == checkpoints_.end() ? times.fate
                 : found->second.committed   ? "committed"
                 : found->second.dead        ? "bad"
                                             : "in flight");
    const auto add = [&](const std::string& name, int64_t begin, int64_t end,
                         const std::string& outcome, uint64_t bytes) {
      v1::StageTime& stage = *out.add_stages();
      stage.set_stage(name);
      stage.set_begin_unix_us(begin * kMicros);
      stage.set_end_unix_us(end * kMicros);
      stage.set_outcome(outcome);
      stage.set_bytes(bytes);
      stage.set_rank(-1);
    };
    for (const Stage& stage : times.stages) {
      add(stage.name, stage.begin_unix_ms, stage.end_unix_ms, stage.outcome, stage.bytes);
    }
    if (found == checkpoints_.end()) {
      continue;
    }
    for (const TierKind tier : kDrained) {
      const Drain& drain = found->second.drain(tier);
      if (drain.Busy()) {
        add(std::string(TierName(tier)), drain.begun_unix_ms, 0,
            drain.stalled.empty() ? "under way" : absl::StrCat("stalled: ", drain.stalled),
            found->second.BytesAt(tier));
      }
    }
  }
}

// What goes, as retention goes about it: one at a time, in each tier in turn, each judged by what
// is left; then what stays.
void Coordinator::FillGarbage(int64_t now_unix_ms, v1::CollectGarbageReply& reply) const {
  std::vector<CheckpointView> views = Views();
  std::array<std::vector<DeletionVerdict>, kTierKinds> going;
  const auto add = [&](TierKind tier, const DeletionVerdict& verdict, bool goes,
                       std::string_view why) {
    v1::RetentionVerdict& out = *reply.add_verdicts();
    out.set_job(name_);
    out.set_tier(std::string(TierName(tier)));
    out.set_attempt(verdict.id.attempt);
    out.set_step(verdict.id.step);
    out.set_goes(goes);
    out.set_why(std::string(why));
    out.set_bytes(verdict.bytes);
    reply.set_bytes_to_free(reply.bytes_to_free() + (goes ? verdict.bytes : 0));
  };
  std::array<uint64_t, kTierKinds> pressure{};
  for (const TierKind tier : kDrained) {
    pressure[static_cast<size_t>(tier)] = RemovalsOf(tier).pressure;
  }
  std::array<std::string, kTierKinds> not_now;
  for (const TierKind tier : kDrained) {
    not_now[static_cast<size_t>(tier)] = WhyNothingGoes(tier);
  }
  for (bool more = true; more;) {
    more = false;
    for (const TierKind tier : kDrained) {
      if (!not_now[static_cast<size_t>(tier)].empty()) {
        continue;
      }
      uint64_t& wanted = pressure[static_cast<size_t>(tier)];
      const std::vector<DeletionVerdict> verdicts = Verdicts(tier, views, now_unix_ms, wanted);
      if (!Configured(tier) || verdicts.empty() || !verdicts.front().goes) {
        continue;
      }
      const DeletionVerdict& first = verdicts.front();
      going[static_cast<size_t>(tier)].push_back(first);
      wanted -= std::min(wanted, first.bytes);
      for (CheckpointView& view : views) {
        view = view.id == first.id ? view.Without(tier) : view;
      }
      more = true;
    }
  }
  for (const TierKind tier : kDrained) {
    for (const Going* begun : AllGoing(tier)) {
      const std::string& why = begun->stalled.empty() ? begun->problem : begun->stalled;
      add(tier, {begun->id, true, "", begun->bytes}, true,
          absl::StrCat("is being removed", why.empty() ? "" : ", and tried again: ", why));
    }
    for (const DeletionVerdict& verdict : going[static_cast<size_t>(tier)]) {
      add(tier, verdict, true, verdict.why);
    }
    for (const DeletionVerdict& verdict : Verdicts(tier, views, now_unix_ms, 0)) {
      if (Configured(tier)) {
        add(tier, verdict, false,
            verdict.goes ? std::string_view(not_now[static_cast<size_t>(tier)])
                         : std::string_view(verdict.why));
      }
    }
  }
}

}  // namespace holdfast
