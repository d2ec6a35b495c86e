// The records of all shards of a step, for ranks that read of all (docs/protocol.md §6,
// "Resharding"): brought to the node once for all who ask at the time.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "server/agent.h"

namespace holdfast {
namespace {

Failure RecordsFailure(absl::StatusCode code, std::string message) {
  return {code, v1::Failure::REASON_UNSPECIFIED, std::move(message)};
}

// Who has the records of which ranks, in the runs of all ranks that its host told.
std::vector<GatherRecords::Holder> HoldersOf(const RecordsLocated& located) {
  std::vector<GatherRecords::Holder> holders;
  for (const RecordsLocated::Holder& holder : located.holders) {
    holders.push_back({holder.node, holder.remote, {}});
  }
  Rank first = 0;
  for (const RecordsLocated::Run& run : located.runs) {
    if (run.holder < holders.size()) {
      holders[run.holder].ranks.emplace_back(first, run.count);
    }
    first += run.count;
  }
  return holders;
}

}  // namespace

void Agent::OnReadRecords(ConnectionId id, const v1::ClientFrame& frame) {
  const v1::ReadRecords& read = frame.read_records();
  const KnownJob* job = FindJob(read.job());
  if (job == nullptr || !Visible(connections_.at(id).caller, *job)) {
    return RefuseNow(
        id, frame.id(),
        RecordsFailure(absl::StatusCode::kNotFound,
                       "read records: there is no such job here, or not one of this user"));
  }
  // (Who does not get them in time attaches the shards one by one, and needs time for that.)
  const MonotonicTime latest = time_.now + kRecordsLongest;
  const MonotonicTime asked =
      read.deadline_ms() == 0 ? time_.now + kSettle : Deadline(read.deadline_ms());
  const RequestToken token = NewPending(id, frame, std::min(asked, latest));
  pending_.at(token).job = job->uuid;
  Send(job->uuid, RecordsAsked{token, {read.attempt(), read.step()}});
}

void Agent::TakeMessage(const JobUuid& job, const RecordsLocated& m) {
  Pending* pending = FindPending(m.token);
  if (pending == nullptr || pending->kind != v1::ClientFrame::kReadRecords ||
      pending->where != Where::kCoordinator) {
    return;
  }
  pending->where = Where::kRecords;
  const auto under_way =
      std::find_if(gatherings_.begin(), gatherings_.end(), [&](const auto& gathering) {
        return gathering.second.job == job && gathering.second.checkpoint == m.checkpoint;
      });
  if (under_way != gatherings_.end()) {
    under_way->second.waiting.insert(m.token);
    return;
  }
  const uint64_t gather = next_drain_++;
  gatherings_[gather] = {job, m.checkpoint, m.world_size, {m.token}};
  Act(GatherRecords{gather, job, JobName(job), m.checkpoint, m.world_size, HoldersOf(m)});
}

void Agent::OnRecordsGathered(const RecordsGathered& e) {
  const auto found = gatherings_.find(e.gather);
  if (found == gatherings_.end()) {
    return;
  }
  const Gathering gathering = std::move(found->second);
  gatherings_.erase(found);
  for (const RequestToken token : gathering.waiting) {
    const Pending* pending = FindPending(token);
    if (pending == nullptr) {
      continue;
    }
    if (!e.status.ok()) {
      Refuse(token, RecordsFailure(absl::StatusCode::kUnavailable,
                                   absl::StrCat("read records: ", Message(e.status))));
      continue;
    }
    v1::DaemonFrame frame;
    frame.set_id(pending->frame_id);
    v1::StepRecords& records = *frame.mutable_read_records();
    records.set_job_uuid(gathering.job.ToBytes());
    records.set_world_size(gathering.world_size);
    records.set_bytes(e.bytes);
    SendReply reply{pending->connection, std::move(frame), Descriptors::kOpenedCopy};
    reply.files = e.files;
    Act(std::move(reply));
    ErasePending(token);
  }
}

void Agent::GiveUpRecords(RequestToken token) {
  for (auto& [gather, gathering] : gatherings_) {
    gathering.waiting.erase(token);
  }
  Refuse(token, RecordsFailure(absl::StatusCode::kDeadlineExceeded,
                               "read records: they could not be gathered in time; try again"));
}

}  // namespace holdfast
