// Flushes, manifests and removals in the durable tiers (docs/protocol.md §10 and §11). The
// coordinators say what is to happen to which checkpoint; here it becomes operations, each with an
// end, and a slot that one of them reads is held by it.
#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/errno_status.h"
#include "base/status.h"
#include "base/units.h"
#include "server/agent.h"
#include "server/holders.h"

namespace holdfast {
namespace {

using ReplicaGroups = std::vector<std::shared_ptr<const Replicas::Group>>;

// Null: runs that no host of ours tells; who is said to be of such a group writes everything.
ReplicaGroups GroupsOf(const FlushWanted& m) {
  ReplicaGroups groups;
  for (const FlushWanted::Group& group : m.groups) {
    std::optional<std::vector<Rank>> ranks = RanksOf(group.ranks, m.world_size);
    groups.push_back(ranks ? std::make_shared<const Replicas::Group>(
                                 Replicas::Group{group.content, *std::move(ranks)})
                           : nullptr);
  }
  return groups;
}

std::shared_ptr<const Replicas::Group> GroupOf(const ReplicaGroups& groups,
                                               const FlushWanted::Shard& shard) {
  if (shard.group == 0 || shard.group > groups.size()) {
    return nullptr;
  }
  const std::shared_ptr<const Replicas::Group>& group = groups[shard.group - 1];
  const bool member =
      group != nullptr && std::binary_search(group->ranks.begin(), group->ranks.end(), shard.rank);
  return member ? group : nullptr;
}

}  // namespace

bool Agent::HasTier(TierKind tier) const {
  switch (tier) {
    case TierKind::kMemory:
      return true;
    case TierKind::kNvme:
      return config_.nvme().dirs_size() > 0;
    case TierKind::kPeer:
      return clustered();
    case TierKind::kRemote:
      return !config_.remote().dir().empty();
  }
  return false;
}

CoordinatorSettings Agent::Settings() {
  CoordinatorSettings settings;
  settings.commit_deadline = std::chrono::milliseconds(config_.save().commit_deadline_ms());
  settings.retention_grace_ms = static_cast<int64_t>(config_.retention().grace_ms());
  settings.keep_ended_ms = static_cast<int64_t>(config_.nvme().keep_ended_ms());
  settings.wait_for_copies = std::chrono::milliseconds(config_.restore().wait_for_copies_ms());
  settings.fall_back = !config_.restore().has_fall_back() || config_.restore().fall_back();
  settings.keep_committed = config_.memory().keep_committed();
  settings.slots_per_rank = config_.memory().slots_per_rank();
  settings.nvme = HasTier(TierKind::kNvme);
  settings.remote = HasTier(TierKind::kRemote);
  settings.peers = HasTier(TierKind::kPeer);
  if (const uint32_t writes = config_.remote().job_writes_max(); writes > 0) {
    settings.remote_writes_max = writes;
  }
  settings.policy = config_.policy();
  settings.nodes = &nodes_;
  return settings;
}

DrainId Agent::BeginDrain(DrainOp op) {
  const DrainId id = next_drain_++;
  op.begun = time_.now;
  if (op.slot) {
    slots_.at(*op.slot).drains.insert(id);
  }
  drains_.emplace(id, std::move(op));
  return id;
}

std::optional<Agent::DrainOp> Agent::EndDrain(DrainId id) {
  const auto it = drains_.find(id);
  if (it == drains_.end()) {
    return std::nullopt;
  }
  const DrainOp op = std::move(it->second);
  drains_.erase(it);
  for (const std::optional<SlotId>& held : {op.slot, op.replaces}) {
    if (Slot* slot = held ? FindSlot(*held) : nullptr) {
      slot->drains.erase(id);
      AfterHold(*slot);
    }
  }
  return op;
}

// They end soon, and the slot with them.
void Agent::CancelDrainsOf(Slot& slot) {
  for (const DrainId id : slot.drains) {
    Act(CancelDrain{id});
  }
}

// Copies, also those out of reach, and what is on its way there.
uint64_t Agent::TierBytesUsed(TierKind tier) const {
  uint64_t bytes = tier == TierKind::kNvme ? drive_copies_.Bytes() : 0;
  for (const auto& [uuid, job] : jobs_) {  // (in a cluster: of the jobs that are hosted here)
    bytes += tier == TierKind::kRemote && job.coordinator != nullptr
                 ? job.coordinator->BytesAt(tier)
                 : 0;
  }
  for (const auto& [uuid, away] : remote_away_bytes_) {
    bytes += tier == TierKind::kRemote ? away : 0;
  }
  for (const auto& [id, op] : drains_) {
    bytes += op.kind == DrainOp::Kind::kFlush && op.tier == tier ? op.bytes : 0;
  }
  return bytes;
}

// A flush found none.
void Agent::AskDurableRoom(const JobUuid& job, TierKind tier, uint64_t bytes) {
  const bool nvme = tier == TierKind::kNvme;
  const bool going = std::any_of(drains_.begin(), drains_.end(), [&](const auto& drain) {
    const DrainOp& op = drain.second;
    return op.kind == DrainOp::Kind::kRemove && op.tier == tier && op.stalled.empty();
  });
  std::vector<DurableRoom::Ended> ended;
  for (const auto& [other, known] : jobs_) {
    if (other != job && Told(known) && !AnyRankAlive(known)) {
      ended.push_back(
          {other, known.uid == jobs_.at(job).uid, nvme ? drive_copies_.Bytes(other) : uint64_t{1}});
    }
  }
  if (const auto ask = durable_room_.Next(tier, job, ended, going, time_.now)) {
    Send(ask->job,
         DurableRoomAsked{tier, bytes, static_cast<uint32_t>(ask->stage), ask->job != job});
  }
}

std::string Agent::HoldersIn(TierKind tier, uint32_t uid) const {
  std::vector<Holder> all;
  for (const auto& [uuid, job] : jobs_) {
    const uint64_t bytes = tier == TierKind::kNvme      ? drive_copies_.Bytes(uuid)
                           : job.coordinator != nullptr ? job.coordinator->BytesAt(tier)
                                                        : 0;
    all.push_back({job.name, bytes, job.uid == uid});
  }
  return HoldersText(std::move(all));
}

void Agent::CheckWatermark(const JobUuid& job) {
  const uint64_t used = TierBytesUsed(TierKind::kNvme);
  const uint64_t high = nvme_bytes_max_ / 100 * config_.nvme().high_watermark_percent();
  const uint64_t low = nvme_bytes_max_ / 100 * config_.nvme().low_watermark_percent();
  if (nvme_bytes_max_ > 0 && used > high) {
    Send(job, DurableRoomAsked{TierKind::kNvme, used - low});  // nobody is short of room yet
  }
}

void Agent::TakeMessage(const JobUuid& job, const FlushWanted& m) {
  if (m.to == TierKind::kPeer) {
    return TakeReplicas(job, m);
  }
  const auto answer = [&](const FlushWanted::Shard& shard, absl::Status status,
                          const DurableCopy& copy) {
    ShardDrained ended;
    ended.checkpoint = m.checkpoint;
    ended.rank = shard.rank;
    ended.to = m.to;
    ended.from = shard.from;
    ended.status = std::move(status);
    ended.copy = copy;
    ended.replaced = m.replace;
    Send(job, std::move(ended));
  };
  const auto refuse = [&](const FlushWanted::Shard& shard, absl::Status status) {
    answer(shard, std::move(status), {});
  };
  const auto found = jobs_.find(job);
  if (found == jobs_.end()) {
    for (const FlushWanted::Shard& shard : m.shards) {
      refuse(shard, absl::NotFoundError("the job is not known here (any more)"));
    }
    return;
  }
  const KnownJob& known = found->second;
  // What a host asks for again, since it has not heard how it went: of what is under way the end
  // answers, of what is done the copy.
  std::vector<FlushWanted::Shard> shards;
  for (const FlushWanted::Shard& shard : m.shards) {
    const ShardId id{job, m.checkpoint.attempt, m.checkpoint.step, shard.rank};
    if (OnTheWay(DrainOp::Kind::kFlush, job, m.checkpoint, m.to, shard.rank)) {
      continue;
    }
    const DurableCopy* const done = FlushedBefore(id, m.to, shard.bytes);
    if (done != nullptr && !m.replace) {
      answer(shard, absl::OkStatus(), *done);
    } else {
      shards.push_back(shard);
    }
  }
  if (shards.empty()) {
    return;
  }
  // Reserved before the first byte is written.
  uint64_t bytes = 0;
  for (const FlushWanted::Shard& shard : shards) {
    bytes += shard.bytes;
  }
  const uint64_t max = m.to == TierKind::kNvme ? nvme_bytes_max_ : config_.remote().bytes_max();
  const uint64_t used = TierBytesUsed(m.to);
  if (max > 0 && used + bytes > max) {
    const bool can_fit = bytes <= max;
    const absl::string_view tier = ToAbsl(TierName(m.to));
    // (Of nvme's budget the files that are kept to be overwritten have their part.)
    const bool shared = m.to == TierKind::kNvme;
    if (can_fit) {  // (else nothing that goes would help)
      AskDurableRoom(job, m.to, used + bytes - max);
    }
    const absl::Status full = absl::ResourceExhaustedError(
        !can_fit ? absl::StrCat("the step takes ", FormatBytes(bytes), ", more than ",
                                shared ? absl::StrCat("the ", FormatBytes(max), " that ", tier,
                                                      ".bytes_max leaves for copies")
                                       : absl::StrCat("all of ", tier, ".bytes_max (",
                                                      FormatBytes(max), ")"),
                                "; raise it")
                 : absl::StrCat(tier, " holds ", FormatBytes(used), " of ", FormatBytes(max), " (",
                                shared ? "what " : "", tier, ".bytes_max",
                                shared ? " leaves for copies" : "", "), and the step takes ",
                                FormatBytes(bytes),
                                "; raise it, or let the job keep less there: ckptctl set ",
                                known.name, " ", tier, ".keep_last=1", HoldersIn(m.to, known.uid),
                                "; ckptctl gc --dry-run shows what may go"));
    for (const FlushWanted::Shard& shard : shards) {
      refuse(shard, full);
    }
    return;
  }
  const ReplicaGroups groups = GroupsOf(m);
  for (const FlushWanted::Shard& shard : shards) {
    const ShardId id{job, m.checkpoint.attempt, m.checkpoint.step, shard.rank};
    const bool from_slot = shard.from == TierKind::kMemory || shard.from == TierKind::kPeer;
    Slot* slot = from_slot ? FindSealed(id) : nullptr;
    if (from_slot && (slot == nullptr || slot->bad)) {
      // (NotFound, of a replacement, is said of the copy that was to be replaced.)
      constexpr char kGone[] = "its copy in memory is gone, or bad";
      refuse(shard, m.replace ? absl::UnavailableError(kGone) : absl::NotFoundError(kGone));
      continue;
    }
    DrainOp op;
    op.kind = DrainOp::Kind::kFlush;
    op.job = job;
    op.checkpoint = m.checkpoint;
    op.rank = shard.rank;
    op.tier = m.to;
    op.from = shard.from;
    op.bytes = shard.bytes;
    op.replace = m.replace;
    if (slot != nullptr) {
      op.slot = slot->id;
    }
    FlushShard flush;
    flush.replace = m.replace;
    flush.drain = BeginDrain(std::move(op));
    flush.to = m.to;
    flush.key = {id, known.name, m.world_size};
    flush.uid = known.uid;
    flush.gid = known.gid;
    flush.image_bytes = shard.bytes;
    flush.from = from_slot ? TierKind::kMemory : shard.from;
    if (slot != nullptr) {
      flush.slot = slot->id;
      flush.generation = slot->generation;
    }
    flush.opening = m.opening;
    flush.verify = m.verify;
    flush.zstd_level = m.zstd_level;
    flush.zstd_threads = m.zstd_threads;
    flush.replicas = GroupOf(groups, shard);
    Act(std::move(flush));
  }
}

// The directory went away after it was begun: what was published may lie below another one.
bool Agent::WroteBelowWhatWent(DrainId drain, TierKind tier, const std::string& location) const {
  if (tier == TierKind::kRemote) {
    return drain < remote_first_scan_;
  }
  return std::any_of(drives_.begin(), drives_.end(), [&](const auto& drive) {
    return drain < drive.second.first_flush && absl::StartsWith(location, drive.first + "/");
  });
}

void Agent::OnFlushEnded(const FlushEnded& told) {
  const std::optional<DrainOp> op = EndDrain(told.drain);
  FlushEnded e = told;
  if (e.status.ok() &&
      WroteBelowWhatWent(e.drain, op ? op->tier : TierKind::kRemote, e.copy.location)) {
    e.status = absl::UnavailableError("the directory went away while it was being written");
  }
  if (!op && e.status.ok() && jobs_.count(e.copy.copy.id.job) > 0) {
    // Answered as cancelled while it hung in remote, and published all the same (what is written to
    // nvme is pinned before it is published, and never answered before its end).
    CopiesFound late;
    late.tier = TierKind::kRemote;
    late.copies.push_back(e.copy);
    ChangeIndex(IndexShard{e.copy.copy, TierKind::kRemote, 0, e.copy.location});
    NoteFlushed(e.copy);
    Send(e.copy.copy.id.job, std::move(late));
    return;
  }
  if (!op || jobs_.count(op->job) == 0) {
    return;
  }
  ShardDrained ended;
  ended.checkpoint = op->checkpoint;
  ended.rank = op->rank;
  ended.to = op->tier;
  ended.from = op->from;
  // (Cancelled because it hung where it read from: that is why it goes another way now.)
  ended.status = op->source_hangs && absl::IsCancelled(e.status)
                     ? absl::UnavailableError(op->stalled)
                     : e.status;
  if (IsNoSpace(e.status)) {
    const KnownJob& known = jobs_.at(op->job);
    const absl::string_view tier = ToAbsl(TierName(op->tier));
    ended.status = Annotate(
        ended.status,
        absl::StrCat("the file system of ", tier, " is full, or its quota is: make room there, or ",
                     "let the job keep less: ckptctl set ", known.name, " ", tier, ".keep_last=1",
                     HoldersIn(op->tier, known.uid),
                     " (ckptctl gc --dry-run shows what Holdfast may delete there)"));
  }
  ended.source_bad = e.source_bad;
  ended.copy = e.copy;
  ended.replaced = op->replace;
  if (e.source_bad && op->slot) {
    if (Slot* slot = FindSealed({op->job, op->checkpoint.attempt, op->checkpoint.step, op->rank});
        slot != nullptr && op->slot == slot->id) {
      slot->bad = true;
    }
  }
  if (e.source_bad) {
    NoteBad({op->job, op->checkpoint.attempt, op->checkpoint.step, op->rank}, op->from, true);
  }
  if (e.status.ok()) {
    ChangeIndex(IndexShard{e.copy.copy, op->tier, 0, e.copy.location});
    if (op->tier == TierKind::kRemote) {
      NoteFlushed(e.copy);
    }
  }
  if (!op->stalled.empty()) {
    TellStalled(*op);
  }
  Send(op->job, std::move(ended));
  if (e.status.ok()) {
    durable_room_.Found(op->tier, op->job);
  }
  if (e.status.ok() && op->tier == TierKind::kNvme) {
    CheckWatermark(op->job);
    drive_copies_.Written(e.copy, time_.now);  // (it counts for the next one)
  } else if (IsNoSpace(e.status) &&
             (op->tier == TierKind::kNvme || config_.remote().bytes_max() == 0)) {
    // The file system is full, or its quota is, before a budget is. (A remote tier with a budget
    // has its share: what others fill is not emptied at the cost of this job's older steps.)
    AskDurableRoom(op->job, op->tier, op->bytes);
  }
}

void Agent::TakeMessage(const JobUuid& job, const FlushUnwanted& m) {
  if (m.to == TierKind::kPeer) {
    static const Failure kUnwanted{absl::StatusCode::kCancelled, v1::Failure::REASON_UNSPECIFIED,
                                   "it is not wanted any more"};
    return StopReplicas(job, m.checkpoint, kUnwanted);
  }
  if (m.to == TierKind::kRemote) {
    ForgetFlushed(job, m.checkpoint);
    ChangeIndex(UnindexCopies{m.to, job, m.checkpoint});  // (its host has the files removed)
  }
  for (const auto& [id, op] : drains_) {
    const bool on_the_way = op.kind == DrainOp::Kind::kFlush || op.kind == DrainOp::Kind::kManifest;
    if (on_the_way && op.job == job && op.checkpoint == m.checkpoint && op.tier == m.to) {
      Act(CancelDrain{id});
    }
  }
}

void Agent::TakeMessage(const JobUuid& job, const ManifestWanted& m) {
  if (jobs_.count(job) == 0) {
    return Send(job, ManifestDone{m.checkpoint,
                                  absl::NotFoundError("the job is not known here (any more)")});
  }
  if (OnTheWay(DrainOp::Kind::kManifest, job, m.checkpoint, TierKind::kRemote)) {
    return;  // its end answers
  }
  const KnownJob& known = jobs_.at(job);
  DrainOp op;
  op.kind = DrainOp::Kind::kManifest;
  op.job = job;
  op.checkpoint = m.checkpoint;
  op.tier = TierKind::kRemote;
  PublishManifest publish;
  publish.drain = BeginDrain(std::move(op));
  publish.job = job;
  publish.job_name = known.name;
  publish.uid = known.uid;
  publish.gid = known.gid;
  publish.checkpoint = m.checkpoint;
  publish.world_size = m.world_size;
  publish.opening = m.opening;
  publish.descent = m.descent;
  publish.shards = m.shards;
  Act(std::move(publish));
}

void Agent::OnManifestPublished(const ManifestPublished& e) {
  const std::optional<DrainOp> op = EndDrain(e.drain);
  if (op && jobs_.count(op->job) > 0) {
    Send(op->job, ManifestDone{op->checkpoint, e.status, e.missing});
  }
}

void Agent::TakeMessage(const JobUuid& job, const RemovalWanted& m) {
  if (m.tier == TierKind::kPeer) {
    return RemoveReplicas(job, m);
  }
  if (jobs_.count(job) == 0) {
    return Send(job, RemovalDone{m.checkpoint, m.tier,
                                 absl::NotFoundError("the job is not known here (any more)")});
  }
  if (OnTheWay(DrainOp::Kind::kRemove, job, m.checkpoint, m.tier)) {
    return;  // its end answers
  }
  if (m.tier == TierKind::kNvme) {
    drive_copies_.Remove(job, m.checkpoint);
  } else {
    ForgetFlushed(job, m.checkpoint);
  }
  DrainOp op;
  op.kind = DrainOp::Kind::kRemove;
  op.job = job;
  op.checkpoint = m.checkpoint;
  op.tier = m.tier;
  ChangeIndex(UnindexCopies{m.tier, job, m.checkpoint});
  const DrainId id = BeginDrain(std::move(op));
  Act(RemoveCopies{id, m.tier, job, JobName(job), m.checkpoint, m.world_size});
}

void Agent::OnCopiesRemoved(const CopiesRemoved& e) {
  const std::optional<DrainOp> op = EndDrain(e.drain);
  if (!op) {
    return;
  }
  if (op->kind == DrainOp::Kind::kRemoveJob) {
    // (A removal that was cancelled is the next host's.)
    const bool failed =
        !e.status.ok() && !absl::IsNotFound(e.status) && !absl::IsCancelled(e.status);
    if (const auto removal = removals_.find(op->job); removal != removals_.end()) {
      if (op->tier == TierKind::kNvme && (e.status.ok() || absl::IsNotFound(e.status))) {
        drive_copies_.Forget(op->job);
      }
      if (absl::IsAborted(e.status) && AwaitEnding(removal->second, op->tier)) {
        return;
      }
      if (failed) {
        removal->second.failure = e.status;
      }
      AdvanceRemoval(op->job);
    } else if (failed) {
      AddProblem(absl::StrCat("what was written late of job '", op->job_name,
                              "', which had been removed, is still there: ", Message(e.status)));
    }
    return;
  }
  if (op->tier == TierKind::kNvme && (e.status.ok() || absl::IsNotFound(e.status))) {
    drive_copies_.Removed(op->job, op->checkpoint, std::nullopt, time_.now);
  } else if (op->tier == TierKind::kNvme && e.ranks_left) {
    drive_copies_.Removed(op->job, op->checkpoint, e.ranks_left, time_.now);
  }
  if (jobs_.count(op->job) > 0) {
    Send(op->job, RemovalDone{op->checkpoint, op->tier, e.status, e.ranks_left});
  }
}

// A checkpoint is stalled on its way as long as the flush of one of its shards is.
void Agent::TellStalled(const DrainOp& of) {
  FlushStalled stalled;
  stalled.checkpoint = of.checkpoint;
  stalled.to = of.tier;
  for (const auto& [id, op] : drains_) {
    const bool on_the_way = op.kind == DrainOp::Kind::kFlush || op.kind == DrainOp::Kind::kManifest;
    if (on_the_way && op.job == of.job && op.checkpoint == of.checkpoint && op.tier == of.tier &&
        !op.stalled.empty()) {
      stalled.stalled = true;
      stalled.what = op.stalled;
    }
  }
  Send(of.job, std::move(stalled));
}

void Agent::OnDrainStalled(const DrainStalled& e) {
  const auto it = drains_.find(e.drain);
  if (it == drains_.end() || jobs_.count(it->second.job) == 0) {
    return;
  }
  DrainOp& op = it->second;
  op.stalled = e.stalled ? e.what : "";
  if (op.kind == DrainOp::Kind::kFlush && e.stalled && e.source && op.from == TierKind::kNvme) {
    const Slot* slot = FindSealed({op.job, op.checkpoint.attempt, op.checkpoint.step, op.rank});
    if (slot != nullptr && !slot->bad) {
      op.source_hangs = true;  // tried again from memory
      Act(CancelDrain{e.drain});
    }
  }
  if (op.kind == DrainOp::Kind::kFlush && e.stalled && op.replace) {
    op.source_hangs = true;  // another good copy is tried; and it holds the step up no longer
    Act(CancelDrain{e.drain});
  }
  if (op.kind == DrainOp::Kind::kRemoveJob && e.stalled) {
    // Nobody waits for calls that hang. The removal goes on, and ends when they return.
    const auto removal = removals_.find(op.job);
    if (removal != removals_.end() && removal->second.token != 0) {
      RefuseAdmin(std::exchange(removal->second.token, 0),
                  absl::UnavailableError(absl::StrCat(
                      "job '", JobName(op.job), "' is being removed, and that hangs in ",
                      ToAbsl(TierName(op.tier)), ": ", e.what,
                      "; it goes on by itself when that answers again")));
    }
  }
  if (op.kind == DrainOp::Kind::kFlush || op.kind == DrainOp::Kind::kManifest) {
    TellStalled(op);
  }
  if (op.kind == DrainOp::Kind::kRemove && e.stalled) {
    Send(op.job, RemovalStalled{op.checkpoint, op.tier, e.what});
  }
  if (op.kind == DrainOp::Kind::kFetch && e.stalled) {
    slots_changed_ = true;  // what it fills does not come back soon
    GiveUpFetch(op, e.drain, e.what);
  }
  if (op.kind == DrainOp::Kind::kOpen && e.stalled) {
    const Pending* pending = FindPending(op.reader);
    if (pending != nullptr && pending->attach && pending->attach->opening == e.drain) {
      GiveUpOpening(op.reader, e.what);
    }
  }
}

}  // namespace holdfast
