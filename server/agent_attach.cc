// What readers that take no part in an attempt ask for (docs/protocol.md §10, "Readers"): a shard
// of a committed checkpoint from the nearest tier that has it, and which checkpoints there are. A
// copy in memory is held as any reader's; one in a durable tier is opened where that tier's
// operations run, and an open file keeps its bytes, whatever is removed.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "server/agent.h"

namespace holdfast {
namespace {

// Bounds a Listing: a frame holds 65,536 bytes, an entry takes at most some 90 of them.
constexpr size_t kListedMax = 256;

}  // namespace

Agent::Attaching::Attaching(CheckpointId of, const v1::Attach& request, MonotonicTime at_most)
    : checkpoint(of), rank(request.rank()), until(at_most) {
  for (const TierKind tier : kAllTiers) {
    if (std::find(request.without().begin(), request.without().end(), TierName(tier)) !=
        request.without().end()) {
      without.insert(tier);
    }
  }
}

// Who asks, and until when it waits.
void Agent::OnAttach(ConnectionId id, const v1::ClientFrame& frame) {
  const v1::Attach& attach = frame.attach();
  if (!v1::Attach::Choice_IsValid(attach.choice())) {
    return RefuseNow(
        id, frame.id(),
        {absl::StatusCode::kInvalidArgument, v1::Failure::REASON_UNSPECIFIED,
         absl::StrCat("attach: choice ", static_cast<int>(attach.choice()),
                      " is unknown; a newer client library may be talking to an older ckptd")});
  }
  const MonotonicTime until =
      attach.deadline_ms() == 0 ? time_.now + kSettle : Deadline(attach.deadline_ms());
  StartAttach(id, frame, until, false);
}

void Agent::StartAttach(ConnectionId id, const v1::ClientFrame& frame, MonotonicTime until,
                        bool looked_up) {
  const v1::Attach& attach = frame.attach();
  const auto refuse = [&](absl::StatusCode code, v1::Failure::Reason reason, std::string why) {
    RefuseNow(id, frame.id(), {code, reason, std::move(why)});
  };
  const Coordinator* job = FindReadable(id, frame, attach.job(), looked_up || !attach.any_tier());
  if (job == nullptr) {
    return;
  }
  // 1. Which checkpoint. What is still being read may have it, or a newer one.
  std::optional<CheckpointId> wanted;
  if (attach.choice() == v1::Attach::CHOICE_STEP) {
    wanted = CheckpointId{attach.attempt(), attach.step()};
  }
  const absl::StatusOr<CheckpointId> found = job->FindCommitted(wanted);
  if (attach.any_tier() &&
      job->MayBeRead(wanted, found.ok() ? std::optional(*found) : std::nullopt)) {
    return WaitForTiers(id, frame, until);
  }
  if (!found.ok()) {
    if (!wanted) {
      return RefuseNow(id, frame.id(), job->NothingCommitted());
    }
    return refuse(absl::StatusCode::kNotFound, v1::Failure::REASON_UNSPECIFIED,
                  Message(found.status()));
  }
  // 2. Of its shards, which.
  if (!attach.any_tier()) {
    Slot* slot = FindSealed({job->uuid(), found->attempt, found->step, attach.rank()});
    if (slot == nullptr) {
      return refuse(
          absl::StatusCode::kNotFound, v1::Failure::REASON_TOPOLOGY,
          absl::StrCat("attach: step ", found->step, " of attempt ", found->attempt,
                       " has no rank ", attach.rank(), " in memory; ckptctl where ", attach.job(),
                       " shows where its copies lie, and a restore brings ", "them back"));
    }
    const RequestToken token = NewPending(id, frame, until);
    pending_.at(token).job = job->uuid();
    pending_.at(token).hold = attach.hold();
    return Offer(token, *slot, {});
  }
  const uint32_t world_size = job->WorldSizeOf(*found);
  if (attach.rank() >= world_size) {
    return refuse(
        absl::StatusCode::kNotFound, v1::Failure::REASON_TOPOLOGY,
        absl::StrCat("attach: step ", found->step, " of attempt ", found->attempt, " was saved by ",
                     world_size, " ranks; it has no rank ", attach.rank()));
  }
  const RequestToken token = NewPending(id, frame, until);
  Pending& pending = pending_.at(token);
  pending.job = job->uuid();
  pending.hold = attach.hold();
  pending.attach = Attaching(*found, attach, until);
  pending.request = std::make_shared<const v1::ClientFrame>(frame);
  TryAttach(token);
}

// The job that a reader names; null: it has been answered, or is looked for.
const Coordinator* Agent::FindReadable(ConnectionId id, const v1::ClientFrame& frame,
                                       const std::string& name, bool looked_up) {
  const char* const operation = frame.has_list() ? "list" : "attach";
  const Coordinator* job = FindJob(name);
  if (job == nullptr && !looked_up && CheckJobName(name).ok()) {
    LookUp(id, frame);
    return nullptr;
  }
  if (job == nullptr) {
    RefuseNow(id, frame.id(),
              {absl::StatusCode::kNotFound, v1::Failure::REASON_NOTHING_TO_RESTORE,
               absl::StrCat(operation, ": there is no such job here")});
    return nullptr;
  }
  if (!Visible(connections_.at(id).caller, *job)) {
    RefuseNow(id, frame.id(),
              {absl::StatusCode::kPermissionDenied, v1::Failure::REASON_OTHER_OWNER,
               absl::StrCat(operation, ": the job belongs to another user")});
    return nullptr;
  }
  return job;
}

// Asked again when a tier has told what it has.
void Agent::WaitForTiers(ConnectionId id, const v1::ClientFrame& frame, MonotonicTime until) {
  const RequestToken token = NewPending(id, frame, until);
  Pending& pending = pending_.at(token);
  pending.where = Where::kTiers;
  pending.request = std::make_shared<const v1::ClientFrame>(frame);
  tier_waits_.insert(token);
}

// The coordinators have heard what was told.
void Agent::AskTiersAgain() {
  for (const RequestToken token : std::exchange(tier_waits_, {})) {
    const Pending* pending = FindPending(token);
    if (pending == nullptr) {
      continue;
    }
    const std::shared_ptr<const v1::ClientFrame> frame = pending->request;
    const ConnectionId connection = pending->connection;
    const MonotonicTime until = *pending->deadline;
    ErasePending(token);
    if (frame->has_list()) {
      StartList(connection, *frame, until, true);
    } else {
      StartAttach(connection, *frame, until, true);
    }
  }
}

// From the nearest tier that has not failed it; each but the last may take half of the time left.
void Agent::TryAttach(RequestToken token) {
  Pending& pending = pending_.at(token);
  Attaching& attach = *pending.attach;
  attach.opening = 0;
  SetDeadline(token, attach.until);
  const auto job = jobs_.find(pending.job);
  if (job == jobs_.end() || removals_.count(pending.job) > 0 ||
      !job->second->IsCommitted(attach.checkpoint)) {
    return Refuse(token, {absl::StatusCode::kAborted, v1::Failure::REASON_UNSPECIFIED,
                          "attach: the checkpoint was given up just now; ask again"});
  }
  const ShardId id{pending.job, attach.checkpoint.attempt, attach.checkpoint.step, attach.rank};
  const auto source = [&] {
    return job->second->FindSource(attach.checkpoint, attach.rank, attach.without, attach.failed);
  };
  Coordinator::ReadSource from = source();
  if (from.tier == TierKind::kMemory) {
    Slot* slot = FindSealed(id);
    if (slot != nullptr && !slot->bad) {
      pending.source_tier = TierKind::kMemory;
      pending.source_why = from.why;
      return Offer(token, *slot, {});
    }
    attach.failed[TierKind::kMemory] = absl::AbortedError("it is being given up");
    from = source();
  }
  if (!from.tier) {
    return Refuse(token, NoSource(attach, from.why));
  }
  DrainOp op;
  op.kind = DrainOp::Kind::kOpen;
  op.job = pending.job;
  op.checkpoint = attach.checkpoint;
  op.rank = attach.rank;
  op.tier = *from.tier;
  op.reader = token;
  attach.opening = BeginDrain(std::move(op));
  pending.where = Where::kOpening;
  pending.source_tier = *from.tier;
  pending.source_why = from.why;
  std::set<TierKind> others = attach.without;
  others.insert(*from.tier);
  if (job->second->FindSource(attach.checkpoint, attach.rank, others, attach.failed).tier) {
    SetDeadline(token, time_.now + (attach.until - time_.now) / 2);
  }
  Act(OpenDurable{attach.opening, *from.tier, {id, job->second->name(), from.world_size}});
}

Failure Agent::NoSource(const Attaching& attach, const std::string& why) const {
  Failure failure{
      absl::StatusCode::kNotFound, v1::Failure::REASON_UNSPECIFIED,
      absl::StrCat("attach: no copy of step ", attach.checkpoint.step, " of attempt ",
                   attach.checkpoint.attempt, ", rank ", attach.rank, ", can be read: ", why)};
  for (const auto& [tier, status] : attach.failed) {
    if (absl::IsFailedPrecondition(status)) {  // a newer format
      failure.code = absl::StatusCode::kDataLoss;
      failure.reason = v1::Failure::REASON_UNREADABLE;
    } else if (absl::IsDataLoss(status) && failure.code == absl::StatusCode::kNotFound) {
      failure.code = absl::StatusCode::kDataLoss;
    }
  }
  for (const auto& [tier, status] : attach.failed) {
    if (absl::IsUnavailable(status) || absl::IsAborted(status)) {
      failure.code = absl::StatusCode::kUnavailable;
      failure.reason = v1::Failure::REASON_UNSPECIFIED;
    }
  }
  return failure;
}

// This tier's copy is of no use to the reader: the next one.
void Agent::AttachFailed(RequestToken token, TierKind tier, absl::Status status) {
  pending_.at(token).attach->failed[tier] = std::move(status);
  TryAttach(token);
}

void Agent::OnDurableOpened(const DurableOpened& e) {
  const std::optional<DrainOp> op = EndDrain(e.drain);
  Pending* pending = op ? FindPending(op->reader) : nullptr;
  absl::Status status = e.status;
  const ShardId id =
      op ? ShardId{op->job, op->checkpoint.attempt, op->checkpoint.step, op->rank} : ShardId{};
  if (op && status.ok() && e.copy.id != id) {
    status = absl::InternalError("another copy was opened than was asked for");
  }
  if (op && (e.bad || absl::IsNotFound(status)) && jobs_.count(op->job) > 0) {
    Send(op->job, ShardBad{op->checkpoint, op->rank, Message(status), op->tier});
  }
  if (pending == nullptr || pending->where != Where::kOpening ||
      pending->attach->opening != e.drain) {
    return;  // nobody waits for it any more
  }
  if (!status.ok()) {
    // What may go well later is not what is wrong with the copy.
    const bool of_copy = e.bad || absl::IsNotFound(status) || absl::IsFailedPrecondition(status);
    return AttachFailed(op->reader, op->tier,
                        e.bad     ? absl::DataLossError(status.message())
                        : of_copy ? status
                                  : absl::UnavailableError(status.message()));
  }
  v1::DaemonFrame frame;
  frame.set_id(pending->frame_id);
  v1::Source& source = *frame.mutable_attach();
  source.set_image_bytes(e.copy.image_bytes);
  source.set_attempt(id.attempt);
  source.set_step(id.step);
  source.set_job_uuid(id.job.ToBytes());
  source.set_rank(id.rank);
  source.set_world_size(e.copy.world_size);
  source.set_tier(std::string(TierName(op->tier)));
  source.set_why(pending->source_why);
  SendReply reply{pending->connection, std::move(frame), Descriptors::kOpenedCopy};
  reply.files = e.files;
  Act(std::move(reply));
  ErasePending(op->reader);
}

// It takes too long, or hangs.
void Agent::GiveUpOpening(RequestToken token, const std::string& why) {
  Pending& pending = pending_.at(token);
  Act(CancelDrain{std::exchange(pending.attach->opening, 0)});
  if (time_.now >= pending.attach->until) {
    return Refuse(token,
                  {absl::StatusCode::kDeadlineExceeded, v1::Failure::REASON_UNSPECIFIED,
                   absl::StrCat("attach: the copy in ", ToAbsl(TierName(pending.source_tier)),
                                " could not be opened in time: ", why, "; try again")});
  }
  AttachFailed(token, pending.source_tier, absl::UnavailableError(why));
}

void Agent::OnList(ConnectionId id, const v1::ClientFrame& frame) {
  const uint64_t deadline_ms = frame.list().deadline_ms();
  StartList(id, frame, deadline_ms == 0 ? time_.now : Deadline(deadline_ms), false);
}

void Agent::StartList(ConnectionId id, const v1::ClientFrame& frame, MonotonicTime until,
                      bool looked_up) {
  const v1::List& list = frame.list();
  const Coordinator* job = FindReadable(id, frame, list.job(), looked_up);
  if (job == nullptr) {
    return;
  }
  if (until > time_.now && job->InventoryPending()) {
    return WaitForTiers(id, frame, until);
  }
  v1::DaemonFrame reply;
  reply.set_id(frame.id());
  job->FillListing(list.before()
                       ? std::optional(CheckpointId{list.before_attempt(), list.before_step()})
                       : std::nullopt,
                   kListedMax, *reply.mutable_list());
  Act(SendReply{id, std::move(reply)});
}

}  // namespace holdfast
