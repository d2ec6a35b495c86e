#include "server/runtime/admin_service.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <chrono>
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
#include "server/runtime/found_state.h"
#include "server/runtime/verify.h"

namespace holdfast {
namespace {

constexpr Duration kProgressEvery = std::chrono::milliseconds(200);
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

class AdminService final : public v1::Admin::Service {
 public:
  AdminService(AdminContext& context, const Caller& caller) : context_(context), caller_(caller) {}

  grpc::Status GetStatus(grpc::ServerContext* call, const v1::GetStatusRequest* request,
                         v1::GetStatusReply* reply) override {
    const grpc::Status asked = AskFor(call, *request, reply);
    if (asked.ok()) {
      context_.fill_daemon_status(*reply->mutable_daemon());
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
    return AskFor(call, *request, reply);
  }

  grpc::Status RemoveJob(grpc::ServerContext* call, const v1::RemoveJobRequest* request,
                         v1::RemoveJobReply* reply) override {
    return AskFor(call, *request, reply);
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
    return AskFor(call, *request, reply);
  }

  grpc::Status Pin(grpc::ServerContext* call, const v1::PinRequest* request,
                   v1::PinReply* reply) override {
    return AskFor(call, *request, reply);
  }

  grpc::Status RemoveCheckpoint(grpc::ServerContext* call,
                                const v1::RemoveCheckpointRequest* request,
                                v1::RemoveCheckpointReply* reply) override {
    return AskFor(call, *request, reply);
  }

  grpc::Status Rebuild(grpc::ServerContext* call, const v1::RebuildRequest* request,
                       v1::RebuildReply* reply) override {
    absl::StatusOr<AdminAnswer> answer = Ask(call, *request, kRebuildMax);
    return Give(call, answer, reply);
  }

  grpc::Status SetOptions(grpc::ServerContext* call, const v1::SetOptionsRequest* request,
                          v1::SetOptionsReply* reply) override {
    return AskFor(call, *request, reply);
  }

  grpc::Status InspectShard(grpc::ServerContext* call, const v1::InspectShardRequest* request,
                            v1::InspectShardReply* reply) override {
    ReadableShards shards;
    absl::StatusOr<AdminAnswer> answer = Ask(call, *request);
    if (const grpc::Status took = Take(call, answer, &shards); !took.ok()) {
      return took;
    }
    if (shards.shards.size() != 1) {
      return ToGrpc(call,
                    absl::NotFoundError(
                        "inspect: there is no such shard; `ckptctl list` shows what there is"));
    }
    absl::StatusOr<std::string> record = context_.store->ReadRecord(shards.shards[0].slot);
    if (!record.ok()) {
      if (IsBadCopy(record.status())) {
        context_.gateway->ReportBadCopy(shards.shards[0], Message(record.status()));
      }
      return ToGrpc(call, record.status());
    }
    reply->set_record(*std::move(record));
    reply->set_location(SlotLocation(shards.shards[0].slot));
    return grpc::Status::OK;
  }

  grpc::Status Verify(grpc::ServerContext* call, const v1::VerifyRequest* request,
                      grpc::ServerWriter<v1::VerifyProgress>* writer) override {
    if (const absl::Status seat = context_.verify_seats.Take(caller_.uid); !seat.ok()) {
      return ToGrpc(call, seat);
    }
    const absl::Cleanup leave = [this] { context_.verify_seats.Leave(caller_.uid); };
    ListedShards listed;
    absl::StatusOr<AdminAnswer> answer = Ask(call, *request);
    if (const grpc::Status took = Take(call, answer, &listed); !took.ok()) {
      return took;
    }
    const std::string unread = std::move(listed.unread);
    VerifyRun run(
        *context_.store, std::move(listed.shards),
        {.hold = [this,
                  request](const ReadableShard& shard) { return Hold(request->job(), shard); },
         .bad = [this](const ReadableShard& shard,
                       const std::string& what) { context_.gateway->ReportBadCopy(shard, what); },
         .good = [this](const ReadableShard& shard) { context_.gateway->ReportGoodCopy(shard); },
         .durable = context_.verify_durable,
         .listed = [this, request](
                       const ReadableShard& shard) { return Listed(request->job(), shard); }});
    for (;;) {
      v1::VerifyProgress progress;
      const bool done = run.WaitFor(kProgressEvery, &progress);
      const absl::Status result = done ? run.result() : absl::OkStatus();
      MakeUtf8(progress);
      progress.set_done(done && result.ok() &&
                        unread.empty());  // to the caller, done means that all was read
      if (call->IsCancelled() || !writer->Write(progress)) {
        return {grpc::StatusCode::CANCELLED, "verify: the caller has gone"};
      }
      if (done) {
        return ToGrpc(call, result.ok() ? WhatWasOutOfReach(progress, unread) : result);
      }
    }
  }

 private:
  // Said at the end: what could be read has been.
  static absl::Status WhatWasOutOfReach(const v1::VerifyProgress& read, const std::string& why) {
    return why.empty() ? absl::OkStatus()
                       : absl::UnavailableError(absl::StrCat(
                             read.shards_checked(), " copies that are within reach were read; ",
                             "not all are: ", why));
  }
  absl::StatusOr<std::unique_ptr<ReadLease>> Hold(const std::string& job,
                                                  const ReadableShard& shard) {
    HF_ASSIGN_OR_RETURN(AdminAnswer answer,
                        context_.gateway->Ask(HoldShard{job, shard.copy.id, shard.copy.generation},
                                              caller_, context_.request_timeout));
    if (answer.lease == nullptr) {
      return absl::InternalError("the daemon answered another question");
    }
    return std::move(answer.lease);
  }

  // Whether the copy is still among those that there are to verify.
  absl::StatusOr<bool> Listed(const std::string& job, const ReadableShard& shard) {
    v1::VerifyRequest request;
    request.set_job(job);
    request.set_attempt(shard.copy.id.attempt);
    request.set_step(shard.copy.id.step);
    request.set_tier(std::string(TierName(shard.tier)));
    const absl::StatusOr<AdminAnswer> answer =
        context_.gateway->Ask(request, caller_, context_.request_timeout);
    if (absl::IsNotFound(answer.status())) {
      return false;
    }
    HF_RETURN_IF_ERROR(answer.status());
    const auto* listed = std::get_if<ListedShards>(&answer->reply);
    if (listed == nullptr) {
      return absl::InternalError("the daemon answered another question");
    }
    return std::any_of(listed->shards.begin(), listed->shards.end(), [&](const ReadableShard& one) {
      return one.copy.id == shard.copy.id && one.tier == shard.tier;
    });
  }

  template <typename Request>
  absl::StatusOr<AdminAnswer> Ask(grpc::ServerContext* call, const Request& request) {
    return Ask(call, request, context_.request_timeout);
  }

  // As long as the caller says, and no longer than `at_most`.
  template <typename Request>
  absl::StatusOr<AdminAnswer> Ask(grpc::ServerContext* call, const Request& request,
                                  Duration at_most) {
    // Without a deadline gRPC's is the end of time.
    const std::chrono::system_clock::time_point until = call->deadline();
    const auto now = std::chrono::system_clock::now();
    if (until < now + at_most) {
      at_most = std::max(Duration(0), std::chrono::duration_cast<Duration>(until - now));
    }
    return context_.gateway->Ask(request, caller_, at_most);
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
};

}  // namespace

absl::Status VerifySeats::Take(uint32_t uid) {
  MutexLock lock(mutex_);
  if (taken_.contains(uid)) {
    return absl::ResourceExhaustedError(
        absl::StrCat("verify: uid ", uid, " has one running already; try again when it has ended"));
  }
  if (taken_.size() >= kMax) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "verify: those of ", kMax, " users are running already; try again when one has ended"));
  }
  taken_.insert(uid);
  return absl::OkStatus();
}

void VerifySeats::Leave(uint32_t uid) {
  MutexLock lock(mutex_);
  taken_.erase(uid);
}

std::unique_ptr<grpc::Service> MakeAdminService(AdminContext& context, const Caller& caller) {
  return std::make_unique<AdminService>(context, caller);
}

}  // namespace holdfast
