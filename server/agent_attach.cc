// What readers that take no part in an attempt ask for (docs/protocol.md §10, "Readers"): a shard
// of a committed checkpoint from the nearest tier that has it, and which checkpoints there are. A
// copy in memory is held as any reader's; one in a durable tier is opened where that tier's
// operations run, and an open file keeps its bytes, whatever is removed.
#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "server/agent.h"

namespace holdfast {

Agent::Attaching::Attaching(const v1::Attach& request, MonotonicTime at_most)
    : rank(request.rank()), until(at_most) {
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
  const KnownJob* job = FindReadable(id, frame, attach.job(), until, looked_up);
  if (job == nullptr) {
    return;
  }
  const RequestToken token = NewPending(id, frame, until);
  Pending& pending = pending_.at(token);
  pending.job = job->uuid;
  pending.hold = attach.hold();
  pending.request = std::make_shared<const v1::ClientFrame>(frame);
  AttachAsked asked{token, attach.rank(), std::nullopt, attach.any_tier()};
  asked.parts = attach.any_tier() && attach.parts();
  if (attach.choice() == v1::Attach::CHOICE_STEP) {
    asked.wanted = CheckpointId{attach.attempt(), attach.step()};
  }
  if (attach.any_tier()) {
    pending.attach = Attaching(attach, until);
  }
  Send(job->uuid, asked);
}

// The job that a reader names; null: it has been answered, or is looked for.
const KnownJob* Agent::FindReadable(ConnectionId id, const v1::ClientFrame& frame,
                                    const std::string& name, MonotonicTime until, bool looked_up) {
  const char* const operation = frame.has_list() ? "list" : "attach";
  const KnownJob* job = FindJob(name);
  const bool named = CheckJobName(name).ok();
  if (clustered() && (job == nullptr || !Told(*job)) && !looked_up && !IsAbsent(name) && named) {
    WaitForHost(id, frame, until);
    return nullptr;
  }
  const bool memory_only = frame.has_attach() && !frame.attach().any_tier();
  if (job == nullptr && !clustered() && !looked_up && !memory_only && named) {
    LookUp(id, frame, until);
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

// The tiers have been looked through for its job, or the host was heard.
void Agent::GoOnReading(RequestToken token) {
  const Pending& pending = pending_.at(token);
  const std::shared_ptr<const v1::ClientFrame> frame = pending.request;
  const ConnectionId connection = pending.connection;
  const MonotonicTime until = *pending.deadline;
  ErasePending(token);
  if (frame->has_list()) {
    StartList(connection, *frame, until, true);
  } else {
    StartAttach(connection, *frame, until, true);
  }
}

// From the nearest tier that has not failed it; each but the last may take half of the time left.
void Agent::TakeMessage(const JobUuid& job, const ShardLocated& m) {
  Pending* pending = FindPending(m.token);
  if (pending == nullptr || pending->kind != v1::ClientFrame::kAttach ||
      pending->where != Where::kCoordinator) {
    return;
  }
  if (!pending->attach) {
    return OfferFromMemory(m.token, m);
  }
  Attaching& attach = *pending->attach;
  attach.checkpoint = m.checkpoint;
  SourceChoice choice = ChooseSource(m, attach);
  if (!choice.tier) {
    return Refuse(m.token, NoSource(m, attach, choice.why));
  }
  const ShardId id{job, m.checkpoint.attempt, m.checkpoint.step, attach.rank};
  pending->source_tier = *choice.tier;
  pending->source_why = std::move(choice.why);
  if (*choice.tier == TierKind::kMemory) {
    return Offer(m.token, *FindSealed(id), {});
  }
  if (*choice.tier == TierKind::kPeer) {
    // What this node keeps for others is at hand.
    Slot* const kept = FindSealed(id);
    if (kept != nullptr && !kept->bad && attach.without.count(TierKind::kMemory) == 0) {
      pending->source_tier = TierKind::kMemory;
      return Offer(m.token, *kept, {});
    }
  }
  const auto is_other = [this](const std::string& node) { return node != nodes_.Name(kHere); };
  if (*choice.tier == TierKind::kPeer && std::none_of(m.peers.begin(), m.peers.end(), is_other)) {
    // What this node keeps is of no use to the reader, or goes just now.
    return AttachFailed(m.token, *choice.tier, absl::NotFoundError("no other node has it"));
  }
  bool in_parts = *choice.tier == TierKind::kPeer ||
                  (*choice.tier == TierKind::kRemote && !m.remote_reader.empty() &&
                   pending->request->attach().parts_of_files());
  if (in_parts) {
    if (absl::Status may = MayOpenParts(*pending); absl::IsInvalidArgument(may)) {
      return Refuse(m.token, {absl::StatusCode::kInvalidArgument, v1::Failure::REASON_UNSPECIFIED,
                              Message(may)});
    } else if (!may.ok() && *choice.tier == TierKind::kRemote) {
      in_parts = false;  // as a whole, then
    } else if (!may.ok()) {
      return AttachFailed(m.token, *choice.tier, std::move(may));
    }
  }
  pending->where = Where::kOpening;
  SetDeadline(m.token, choice.last ? attach.until : time_.now + (attach.until - time_.now) / 2);
  OpenDurable open;
  open.tier = *choice.tier;
  open.key = {id, JobName(job), m.world_size};
  open.in_parts = in_parts;
  if (*choice.tier == TierKind::kPeer) {
    std::copy_if(m.peers.begin(), m.peers.end(), std::back_inserter(open.peers), is_other);
  } else if (in_parts) {
    open.peers = {m.remote_reader};
  }
  BeginOpening(m.token, std::move(open));
}

void Agent::BeginOpening(RequestToken token, OpenDurable open) {
  Pending& pending = pending_.at(token);
  DrainOp op;
  op.kind = DrainOp::Kind::kOpen;
  op.job = open.key.id.job;
  op.checkpoint = open.key.id.checkpoint();
  op.rank = open.key.id.rank;
  op.tier = open.tier;
  op.reader = token;
  op.in_parts = open.in_parts;
  open.drain = pending.attach->opening = BeginDrain(std::move(op));
  if (open.in_parts) {
    parts_.emplace(open.drain, Parts{pending.connection, pending.hold});
  }
  Act(std::move(open));
}

// What was to be opened as a file is compressed: there is no descriptor that shows the image.
void Agent::OpenInParts(RequestToken token, TierKind tier, const SealedCopy& copy) {
  const Pending& pending = pending_.at(token);
  const v1::Attach& attach = pending.request->attach();
  if (!attach.parts()) {
    return AttachFailed(token, tier,
                        absl::FailedPreconditionError(
                            "it is compressed, which this program's library cannot read: use a "
                            "newer one"));
  }
  if (absl::Status may = MayOpenParts(pending); absl::IsInvalidArgument(may)) {
    return Refuse(
        token, {absl::StatusCode::kInvalidArgument, v1::Failure::REASON_UNSPECIFIED, Message(may)});
  } else if (!may.ok()) {
    return AttachFailed(token, tier, std::move(may));
  }
  OpenDurable open;
  open.tier = tier;
  open.key = {copy.id, copy.job_name, copy.world_size};
  open.in_parts = true;
  open.whole = !attach.parts_of_files();
  BeginOpening(token, std::move(open));
}

// A client that knows of no other tier.
void Agent::OfferFromMemory(RequestToken token, const ShardLocated& m) {
  const Pending& pending = pending_.at(token);
  const v1::Attach& attach = pending.request->attach();
  Slot* slot =
      FindSealed({pending.job, m.checkpoint.attempt, m.checkpoint.step, Rank{attach.rank()}});
  if (slot == nullptr) {
    return Refuse(
        token,
        {absl::StatusCode::kNotFound, v1::Failure::REASON_TOPOLOGY,
         absl::StrCat("attach: step ", m.checkpoint.step, " of attempt ", m.checkpoint.attempt,
                      " has no rank ", attach.rank(), " in memory; ckptctl where ", attach.job(),
                      " shows where its copies lie, and a restore brings them back")});
  }
  Offer(token, *slot, {});
}

Agent::SourceChoice Agent::ChooseSource(const ShardLocated& m, Attaching& attach) {
  SourceChoice choice;
  for (const ShardLocated::Place& place : m.places) {
    if (attach.without.count(place.tier) > 0) {
      continue;
    }
    if (place.tier == TierKind::kMemory && place.why_not.empty()) {
      const Slot* slot = FindSealed(
          {pending_.at(m.token).job, m.checkpoint.attempt, m.checkpoint.step, attach.rank});
      if (slot == nullptr || slot->bad) {
        attach.failed.emplace(place.tier, absl::AbortedError("it is being given up"));
      }
    }
    const auto tried = attach.failed.find(place.tier);
    if (tried == attach.failed.end() && place.why_not.empty()) {
      choice.last = choice.tier.has_value() ? false : choice.last;
      choice.tier = choice.tier.value_or(place.tier);
    }
    if (choice.tier) {
      continue;
    }
    absl::StrAppend(&choice.why, choice.why.empty() ? "" : ", ");
    const auto add = [&](std::string_view how, const absl::Status& status) {
      absl::StrAppend(&choice.why, ToAbsl(TierName(place.tier)), " copy ", ToAbsl(how), ": ",
                      status.message());
    };
    if (tried == attach.failed.end()) {
      absl::StrAppend(&choice.why, place.why_not);
    } else if (absl::IsDataLoss(tried->second) || absl::IsNotFound(tried->second)) {
      add("bad", tried->second);
    } else if (absl::IsFailedPrecondition(tried->second)) {  // of a newer format
      add("unreadable here", tried->second);
    } else {
      add("not readable now", tried->second);
    }
  }
  return choice;
}

Failure Agent::NoSource(const ShardLocated& m, const Attaching& attach,
                        const std::string& why) const {
  Failure failure{
      absl::StatusCode::kNotFound, v1::Failure::REASON_UNSPECIFIED,
      absl::StrCat("attach: no copy of step ", m.checkpoint.step, " of attempt ",
                   m.checkpoint.attempt, ", rank ", attach.rank, ", can be read",
                   m.elsewhere.empty() ? "" : absl::StrCat(" on ", nodes_.Name(kHere)), ": ", why)};
  for (const auto& [tier, status] : attach.failed) {
    if (absl::IsFailedPrecondition(status)) {  // a newer format
      failure.code = absl::StatusCode::kDataLoss;
      failure.reason = v1::Failure::REASON_UNREADABLE;
    } else if (absl::IsDataLoss(status) && failure.code == absl::StatusCode::kNotFound) {
      failure.code = absl::StatusCode::kDataLoss;
    }
  }
  const bool later = std::any_of(attach.failed.begin(), attach.failed.end(), [](const auto& f) {
    return absl::IsUnavailable(f.second) || absl::IsAborted(f.second);
  });
  if (later || !m.elsewhere.empty()) {
    failure.code = absl::StatusCode::kUnavailable;
    failure.reason = v1::Failure::REASON_UNSPECIFIED;
  }
  if (!m.elsewhere.empty()) {
    absl::StrAppend(&failure.message, "; it lies in ", m.elsewhere,
                    ": read it on that node, or here when it is in the remote tier");
  }
  return failure;
}

// This tier's copy is of no use to the reader. Which one is next its coordinator says.
void Agent::AttachFailed(RequestToken token, TierKind tier, absl::Status status) {
  Pending& pending = pending_.at(token);
  Attaching& attach = *pending.attach;
  attach.failed[tier] = std::move(status);
  attach.opening = 0;
  if (jobs_.count(pending.job) == 0) {
    return Refuse(token, {absl::StatusCode::kAborted, v1::Failure::REASON_UNSPECIFIED,
                          "attach: the job was removed just now"});
  }
  pending.where = Where::kCoordinator;
  SetDeadline(token, attach.until);
  Send(pending.job, AttachAsked{token, attach.rank, attach.checkpoint, true, true,
                                pending.request->attach().parts()});
}

void Agent::OnDurableOpened(const DurableOpened& e) {
  const std::optional<DrainOp> op = EndDrain(e.drain);
  Pending* pending = op ? FindPending(op->reader) : nullptr;
  const bool in_parts = op && op->in_parts;
  const bool of_peer = op && op->tier == TierKind::kPeer;
  absl::Status status = e.status;
  const ShardId id =
      op ? ShardId{op->job, op->checkpoint.attempt, op->checkpoint.step, op->rank} : ShardId{};
  if (op && status.ok() && e.copy.id != id) {
    status = absl::InternalError("another copy was opened than was asked for");
  }
  if (op && !of_peer && (e.bad || absl::IsNotFound(status)) && jobs_.count(op->job) > 0) {
    NoteBad(id, op->tier, true);
    Send(op->job, ShardBad{op->checkpoint, op->rank, Message(status), op->tier});
  }
  if (pending == nullptr || pending->where != Where::kOpening ||
      pending->attach->opening != e.drain) {
    if (in_parts) {
      EndParts(e.drain);
    }
    return;  // nobody waits for it any more
  }
  if (in_parts && !status.ok()) {
    EndParts(e.drain);
  }
  if (!status.ok()) {
    // What may go well later is not what is wrong with the copy.
    // (Nodes that do not serve it say nothing of it: their host hears from them what they have.)
    const bool of_copy =
        !of_peer && (e.bad || absl::IsNotFound(status) || absl::IsFailedPrecondition(status));
    return AttachFailed(op->reader, op->tier,
                        e.bad     ? absl::DataLossError(status.message())
                        : of_copy ? status
                                  : absl::UnavailableError(status.message()));
  }
  if (e.parts_only) {
    return OpenInParts(op->reader, op->tier, e.copy);
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
  if (in_parts) {
    Parts& parts = parts_.at(e.drain);
    parts.open = true;
    source.set_generation(e.copy.generation);
    source.set_hold(parts.hold);
    source.set_parts_bytes(parts.bytes = e.parts_bytes);
  }
  SendReply reply{pending->connection, std::move(frame), Descriptors::kOpenedCopy};
  reply.files = e.files;
  Act(std::move(reply));
  ErasePending(op->reader);
}

// It takes too long, or hangs.
void Agent::GiveUpOpening(RequestToken token, const std::string& why) {
  Pending& pending = pending_.at(token);
  const DrainId opening = std::exchange(pending.attach->opening, 0);
  Act(CancelDrain{opening});
  if (const auto parts = parts_.find(opening); parts != parts_.end()) {
    parts->second.hold = 0;  // the next tier's copy may need the name before this one has ended
  }
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
  StartList(id, frame, deadline_ms == 0 ? time_.now + kSettle : Deadline(deadline_ms), false);
}

void Agent::StartList(ConnectionId id, const v1::ClientFrame& frame, MonotonicTime until,
                      bool looked_up) {
  const v1::List& list = frame.list();
  const KnownJob* job = FindReadable(id, frame, list.job(), until, looked_up);
  if (job == nullptr) {
    return;
  }
  const RequestToken token = NewPending(id, frame, until);
  pending_.at(token).job = job->uuid;
  ListAsked asked{token, std::nullopt, list.deadline_ms() > 0};
  if (list.before()) {
    asked.before = CheckpointId{list.before_attempt(), list.before_step()};
  }
  Send(job->uuid, asked);
}

void Agent::TakeMessage(const JobUuid&, const Listed& m) {
  v1::DaemonFrame reply;
  *reply.mutable_list() = m.listing;
  Reply(m.token, std::move(reply));
}

}  // namespace holdfast
