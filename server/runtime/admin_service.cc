#include "server/runtime/admin_service.h"

#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "base/admin_mark.h"
#include "base/status.h"
#include "base/utf8.h"
#include "holdfast/v1/admin.grpc.pb.h"
#include "server/message_texts.h"
#include "server/runtime/copy_reading.h"
#include "server/runtime/event_journal.h"
#include "server/runtime/verify_parts.h"

namespace holdfast {
namespace {

constexpr Duration kProgressEvery = std::chrono::milliseconds(200);
// Of somebody who follows events: between two looks at whether it is still there, and two words.
constexpr Duration kFollowerLook = std::chrono::seconds(1);
constexpr Duration kFollowerWord = std::chrono::seconds(3);
// (chown takes the number after it for "as it is".)
constexpr uint32_t kOwnerMax = std::numeric_limits<uint32_t>::max() - 1;
// A directory that hangs longer is named in the answer.
constexpr Duration kJobFilesMax = std::chrono::seconds(10);
constexpr Duration kRebuildMax = std::chrono::hours(1);  // it reads all drives and mounts

// Marked as the daemon's answer if it is one. What was cancelled is nobody's: the daemon stops.
grpc::Status ToGrpc(grpc::ServerContext* call, const absl::Status& status) {
  if (status.ok()) {
    return grpc::Status::OK;
  }
  if (!IsUnanswered(status) && !absl::IsCancelled(status)) {
    call->AddTrailingMetadata(kAnswerMark, kAnswerMarkValue);
  }
  return {static_cast<grpc::StatusCode>(status.code()),  // numbered alike
          Utf8Text(Message(status))};
}

// They quote settings, and what the operator's programs print.
void CountProblems(v1::GetStatusReply& reply) {
  v1::DaemonStatus& daemon = *reply.mutable_daemon();
  const int count = daemon.problems_size() - reply.not_shown_size();
  *daemon.mutable_problems() = reply.not_shown();
  if (count > 0) {
    daemon.add_problems(absl::StrCat(count, count == 1 ? " problem" : " problems",
                                     " of this node: root and ckptd's own user see what they are"));
  }
}

// What earlier scans found wrong with a file that has been written since.
void DropSolved(const std::string& file, v1::RebuildReply& reply) {
  google::protobuf::RepeatedPtrField<std::string> left;
  for (const std::string& problem : reply.problems()) {
    if (problem.find(file) == std::string::npos) {
      left.Add(std::string(problem));
    }
  }
  reply.mutable_problems()->Swap(&left);
}

class AdminService final : public v1::Admin::Service {
 public:
  AdminService(AdminContext& context, const Caller& caller, std::string who)
      : context_(context), caller_(caller), who_(std::move(who)) {}

  grpc::Status GetStatus(grpc::ServerContext* call, const v1::GetStatusRequest* request,
                         v1::GetStatusReply* reply) override {
    const grpc::Status asked = AskFor(call, *request, reply);
    if (asked.ok()) {
      context_.fill_daemon_status(*reply->mutable_daemon());
      if (!IsOperator(caller_.uid)) {
        CountProblems(*reply);
      }
      MakeUtf8(*reply);
    }
    return asked;
  }

  grpc::Status GetNodes(grpc::ServerContext* call, const v1::GetNodesRequest* request,
                        v1::GetNodesReply* reply) override {
    return AskFor(call, *request, reply);
  }

  grpc::Status ListCheckpoints(grpc::ServerContext* call, const v1::ListCheckpointsRequest* request,
                               v1::ListCheckpointsReply* reply) override {
    return AskFor(call, *request, reply);
  }

  grpc::Status SetRestorePoint(grpc::ServerContext* call, const v1::SetRestorePointRequest* request,
                               v1::SetRestorePointReply* reply) override {
    return Change(*request, AskFor(call, *request, reply));
  }

  grpc::Status RemoveJob(grpc::ServerContext* call, const v1::RemoveJobRequest* request,
                         v1::RemoveJobReply* reply) override {
    return Change(*request, AskFor(call, *request, reply));
  }

  grpc::Status Where(grpc::ServerContext* call, const v1::WhereRequest* request,
                     v1::WhereReply* reply) override {
    return AskFor(call, *request, reply);
  }

  grpc::Status Explain(grpc::ServerContext* call, const v1::ExplainRequest* request,
                       v1::ExplainReply* reply) override {
    return AskFor(call, *request, reply);
  }

  grpc::Status Timeline(grpc::ServerContext* call, const v1::TimelineRequest* request,
                        v1::TimelineReply* reply) override {
    return AskFor(call, *request, reply);
  }

  grpc::Status CollectGarbage(grpc::ServerContext* call, const v1::CollectGarbageRequest* request,
                              v1::CollectGarbageReply* reply) override {
    const grpc::Status asked = AskFor(call, *request, reply);
    return request->dry_run() ? asked : Change(*request, asked);
  }

  grpc::Status Pin(grpc::ServerContext* call, const v1::PinRequest* request,
                   v1::PinReply* reply) override {
    return Change(*request, AskFor(call, *request, reply));
  }

  grpc::Status Repair(grpc::ServerContext* call, const v1::RepairRequest* request,
                      v1::RepairReply* reply) override {
    const grpc::Status asked = AskFor(call, *request, reply);
    return request->look() ? asked : Change(*request, asked);
  }

  grpc::Status Replace(grpc::ServerContext* call, const v1::ReplaceRequest* request,
                       v1::ReplaceReply* reply) override {
    return Change(*request, AskFor(call, *request, reply));
  }

  grpc::Status Drain(grpc::ServerContext* call, const v1::DrainRequest* request,
                     v1::DrainReply* reply) override {
    const grpc::Status asked = AskFor(call, *request, reply);
    return request->look() ? asked : Change(*request, asked);
  }

  grpc::Status RemoveCheckpoint(grpc::ServerContext* call,
                                const v1::RemoveCheckpointRequest* request,
                                v1::RemoveCheckpointReply* reply) override {
    return Change(*request, AskFor(call, *request, reply));
  }

  grpc::Status Rebuild(grpc::ServerContext* call, const v1::RebuildRequest* request,
                       v1::RebuildReply* reply) override {
    std::vector<std::string> written;
    if (request->has_owner()) {
      absl::StatusOr<std::vector<std::string>> lines = WriteJobFiles(call, request->owner());
      if (!lines.ok()) {
        return Change(*request, ToGrpc(call, lines.status()));
      }
      written = *std::move(lines);
    }
    absl::StatusOr<AdminAnswer> answer = Ask(call, *request, kRebuildMax);
    const grpc::Status given = Give(call, answer, reply);
    for (const std::string& line : written) {
      reply->add_written(Utf8Text(line));
    }
    if (!written.empty()) {
      DropSolved(absl::StrCat("/", request->owner().job(), "/JOB': "), *reply);
    }
    return Change(*request, given);
  }

  grpc::Status ForgetDrive(grpc::ServerContext* call, const v1::ForgetDriveRequest* request,
                           v1::ForgetDriveReply* reply) override {
    absl::StatusOr<std::string> text =
        !IsOperator(caller_.uid)
            ? absl::PermissionDeniedError("forget-drive: root's and the daemon's own user's to do")
        : context_.forget_drive == nullptr ? absl::UnavailableError("forget-drive: not ready yet")
                                           : context_.forget_drive(request->id());
    if (text.ok()) {
      reply->set_text(*std::move(text));
      MakeUtf8(*reply);
    }
    return Change(*request, ToGrpc(call, text.status()));
  }

  grpc::Status AdoptRemote(grpc::ServerContext* call, const v1::AdoptRemoteRequest* request,
                           v1::AdoptRemoteReply* reply) override {
    return Change(*request, AdoptRemoteDirectory(call, *request, reply));
  }

  grpc::Status SetOptions(grpc::ServerContext* call, const v1::SetOptionsRequest* request,
                          v1::SetOptionsReply* reply) override {
    return Change(*request, AskFor(call, *request, reply));
  }

  grpc::Status InspectShard(grpc::ServerContext* call, const v1::InspectShardRequest* request,
                            v1::InspectShardReply* reply) override {
    // 1. Which shard is meant, and where it lies.
    v1::FindShardRequest find;
    find.set_job(request->job());
    find.set_step(request->step());
    find.set_attempt(request->attempt());
    find.set_rank(request->rank());
    find.set_newest(request->newest());
    v1::FindShardReply found;
    if (const grpc::Status asked = AskFor(call, find, &found); !asked.ok()) {
      return asked;
    }
    // 2. Its record.
    v1::ReadShardReply read;
    if (!found.node().empty() && found.node() != context_.node_name) {
      v1::ReadShardRequest there;
      there.set_node(found.node());
      there.set_job(request->job());
      there.set_attempt(found.attempt());
      there.set_step(found.step());
      there.set_rank(request->rank());
      absl::StatusOr<AdminAnswer> answer = Ask(call, there);
      if (const grpc::Status took = Take(call, answer, &read); !took.ok()) {
        return took;
      }
      reply->set_location(absl::StrCat(found.node(), ": ", read.location()));
    } else {
      v1::InspectShardRequest here;
      here.set_job(request->job());
      here.set_attempt(found.attempt());
      here.set_step(found.step());
      here.set_rank(request->rank());
      absl::StatusOr<v1::ReadShardReply> record =
          ReadRecordHere(context_, caller_, here, TimeFor(call, context_.request_timeout));
      if (!record.ok()) {
        return ToGrpc(call, record.status());
      }
      read = *std::move(record);
      reply->set_location(read.location());
    }
    reply->set_record(std::move(*read.mutable_record()));
    return grpc::Status::OK;
  }

  // (What is told may be no UTF-8 only where it came from: the journal has seen to that.)
  grpc::Status WatchEvents(grpc::ServerContext* call, const v1::WatchEventsRequest* request,
                           grpc::ServerWriter<v1::EventBatch>* writer) override {
    if (!v1::Severity_IsValid(request->least())) {
      return {grpc::StatusCode::INVALID_ARGUMENT,
              absl::StrCat("events: severity ", request->least(), " is unknown")};
    }
    if (request->follow()) {
      if (const absl::Status seat = context_.follower_seats.Take(caller_.uid); !seat.ok()) {
        return ToGrpc(call, seat);
      }
    }
    const absl::Cleanup leave = [this, request] {
      if (request->follow()) {
        context_.follower_seats.Leave(caller_.uid);
      }
    };
    v1::WatchEventsRequest wish = *request;
    EventJournal& events = *context_.events;
    MonotonicTime said;
    for (;;) {
      v1::EventBatch batch = events.Read(wish, caller_.uid);
      batch.set_node(Utf8Text(context_.node_name));
      const bool more = batch.next_after() < events.last();
      const MonotonicTime now = Clock::System()->Now();
      const bool worth_a_word = batch.events_size() > 0 || batch.lost() > 0 ||
                                wish.journal() != batch.journal() || now - said >= kFollowerWord;
      if (worth_a_word) {
        said = now;
      }
      if (call->IsCancelled() || (worth_a_word && !writer->Write(batch))) {
        return {grpc::StatusCode::CANCELLED, "events: the caller has gone"};
      }
      wish.set_journal(batch.journal());
      wish.set_after(batch.next_after());
      if (!more && !request->follow()) {
        return grpc::Status::OK;
      }
      if (!more && !events.AwaitAfter(wish.after(), kFollowerLook) && events.stopped()) {
        return {grpc::StatusCode::UNAVAILABLE, "events: ckptd is stopping"};
      }
    }
  }

  grpc::Status Verify(grpc::ServerContext* call, const v1::VerifyRequest* request,
                      grpc::ServerWriter<v1::VerifyProgress>* writer) override {
    if (const absl::Status seat = context_.verify_seats.Take(caller_.uid); !seat.ok()) {
      return ToGrpc(call, seat);
    }
    const absl::Cleanup leave = [this] { context_.verify_seats.Leave(caller_.uid); };
    // 1. What is meant, and who has it.
    v1::PlanVerifyRequest wanted;
    wanted.set_job(request->job());
    wanted.set_step(request->step());
    wanted.set_attempt(request->attempt());
    wanted.set_newest(request->newest());
    wanted.set_all_steps(request->all_steps());
    wanted.set_tier(request->tier());
    v1::PlanVerifyReply plan;
    if (const grpc::Status asked = AskFor(call, wanted, &plan); !asked.ok()) {
      return asked;
    }
    v1::VerifyRequest exact = *request;
    exact.set_newest(false);
    exact.set_attempt(plan.attempt());
    exact.set_step(plan.step());
    // 2. Each reads what it has.
    VerifyParts parts(context_, caller_, exact, plan);
    for (;;) {
      v1::VerifyProgress progress = parts.Next(kProgressEvery);
      const bool done = progress.done();
      const absl::Status result = done ? parts.result() : absl::OkStatus();
      MakeUtf8(progress);
      progress.set_done(done && result.ok());  // to the caller, done means that all was read
      if (call->IsCancelled() || !writer->Write(progress)) {
        return {grpc::StatusCode::CANCELLED, "verify: the caller has gone"};
      }
      if (done) {
        return ToGrpc(call, result);
      }
    }
  }

 private:
  absl::StatusOr<std::vector<std::string>> WriteJobFiles(grpc::ServerContext* call,
                                                         const v1::RebuildRequest::Owner& owner) {
    if (!IsOperator(caller_.uid)) {
      return absl::PermissionDeniedError(absl::StrCat(
          "rebuild --owner: only root and ckptd's own user say whose a job is; they run: "
          "ckptctl rebuild JOB --owner UID:GID"));
    }
    HF_RETURN_IF_ERROR(CheckJobName(owner.job()));
    if (owner.uid() > kOwnerMax || owner.gid() > kOwnerMax) {
      return absl::InvalidArgumentError(
          absl::StrCat("rebuild --owner: UID and GID are numbers of at most ", kOwnerMax));
    }
    const MonotonicTime until = Clock::System()->Now() + TimeFor(call, kJobFilesMax);
    return context_.write_job_files(owner, [until] { return Clock::System()->Now() >= until; });
  }

  // What changes something leaves a trace: who asked for what, and what came of it.
  template <typename Request>
  grpc::Status Change(const Request& request, const grpc::Status& outcome) {
    std::string job;
    if constexpr (requires { request.job(); }) {
      job = request.job();
    }
    context_.audit(
        caller_.uid, job,
        absl::StrCat(
            who_, ": ", Request::descriptor()->name(), " {", request.ShortDebugString(),
            "}: ", outcome.ok() ? "done" : absl::StrCat("not done: ", outcome.error_message())),
        outcome.ok());
    return outcome;
  }

  template <typename Request>
  absl::StatusOr<AdminAnswer> Ask(grpc::ServerContext* call, const Request& request) {
    return Ask(call, request, context_.request_timeout);
  }

  // As long as the caller says, and no longer than `at_most`.
  template <typename Request>
  absl::StatusOr<AdminAnswer> Ask(grpc::ServerContext* call, const Request& request,
                                  Duration at_most) {
    return context_.gateway->Ask(request, caller_, TimeFor(call, at_most));
  }

  static Duration TimeFor(grpc::ServerContext* call, Duration at_most) {
    // Without a deadline gRPC's is the end of time.
    const std::chrono::system_clock::time_point until = call->deadline();
    const auto now = std::chrono::system_clock::now();
    if (until < now + at_most) {
      at_most = std::max(Duration(0), std::chrono::duration_cast<Duration>(until - now));
    }
    return at_most;
  }

  template <typename Reply>
  static grpc::Status Take(grpc::ServerContext* call, absl::StatusOr<AdminAnswer>& answer,
                           Reply* reply) {
    if (!answer.ok()) {
      return ToGrpc(call, answer.status());
    }
    Reply* const got = std::get_if<Reply>(&answer->reply);
    if (got == nullptr) {
      return {grpc::StatusCode::INTERNAL, "the daemon answered another question"};
    }
    *reply = std::move(*got);
    return grpc::Status::OK;
  }

  // Takes it over, and has it read.
  grpc::Status AdoptRemoteDirectory(grpc::ServerContext* call,
                                    const v1::AdoptRemoteRequest& request,
                                    v1::AdoptRemoteReply* reply) {
    if (!IsOperator(caller_.uid)) {
      return ToGrpc(call, absl::PermissionDeniedError(
                              "adopt-remote: only root and ckptd's own user may order it"));
    }
    const auto gone = [call] { return call->IsCancelled(); };
    if (const absl::Status adopted = context_.adopt_remote(request.from(), gone); !adopted.ok()) {
      return ToGrpc(call, adopted);
    }
    v1::RebuildRequest read;
    read.set_tier("remote");
    absl::StatusOr<AdminAnswer> answer = Ask(call, read, kRebuildMax);
    v1::RebuildReply found;
    const grpc::Status took = Take(call, answer, &found);
    reply->set_text(
        took.ok() ? absl::StrCat("the remote directory is this cluster's now; copies found there: ",
                                 found.shards())
                  : absl::StrCat("the remote directory is this cluster's now; it is still to be "
                                 "read: ",
                                 took.error_message()));
    return grpc::Status::OK;
  }

  // As Take, for the caller.
  template <typename Reply>
  static grpc::Status Give(grpc::ServerContext* call, absl::StatusOr<AdminAnswer>& answer,
                           Reply* reply) {
    const grpc::Status took = Take(call, answer, reply);
    MakeUtf8(*reply);
    return took;
  }

  template <typename Request, typename Reply>
  grpc::Status AskFor(grpc::ServerContext* call, const Request& request, Reply* reply) {
    absl::StatusOr<AdminAnswer> answer = Ask(call, request);
    return Give(call, answer, reply);
  }

  AdminContext& context_;
  const Caller caller_;
  const std::string who_;
};

}  // namespace

absl::Status VerifySeats::Take(uint32_t uid) {
  MutexLock lock(mutex_);
  if (taken_.contains(uid)) {
    return absl::ResourceExhaustedError(
        absl::StrCat("verify: uid ", uid, " has one running already; try again when it has ended"));
  }
  if (taken_.size() >= kMax && !IsOperator(uid)) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "verify: those of ", kMax, " users are running already; try again when one has ended"));
  }
  taken_.insert(uid);
  return absl::OkStatus();
}

absl::Status FollowerSeats::Take(uint32_t uid) {
  MutexLock lock(mutex_);
  // (Users keep no operator out: of those there are two uids.)
  const bool full = taken_.size() >= kMax && !IsOperator(uid);
  if (taken_.count(uid) >= kPerUidMax || full) {
    return absl::ResourceExhaustedError(
        absl::StrCat("events: ", taken_.count(uid), " of uid ", uid, " and ", taken_.size(),
                     " in all are followed already, of at most ", kPerUidMax, " and ", kMax,
                     "; end one of them, or ask without --follow"));
  }
  taken_.insert(uid);
  return absl::OkStatus();
}

void FollowerSeats::Leave(uint32_t uid) {
  MutexLock lock(mutex_);
  taken_.erase(taken_.find(uid));
}

void VerifySeats::Leave(uint32_t uid) {
  MutexLock lock(mutex_);
  taken_.erase(uid);
}

bool IsOperator(uint32_t uid) {
  return uid == 0 || uid == ::geteuid();
}

std::unique_ptr<grpc::Service> MakeAdminService(AdminContext& context, const Caller& caller,
                                                const std::string& who) {
  return std::make_unique<AdminService>(context, caller, who);
}

}  // namespace holdfast
