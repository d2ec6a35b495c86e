#include "server/runtime/admin_service.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "holdfast/v1/admin.grpc.pb.h"
#include "server/runtime/found_state.h"
#include "server/runtime/verify.h"

namespace holdfast {
namespace {

constexpr Duration kProgressEvery = std::chrono::milliseconds(200);
constexpr Duration kRebuildMax = std::chrono::hours(1);  // it reads all drives and mounts

grpc::Status ToGrpc(const absl::Status& status) {
  // The numbers are the same.
  return status.ok() ? grpc::Status::OK
                     : grpc::Status(static_cast<grpc::StatusCode>(status.code()), Message(status));
}

class AdminService final : public v1::Admin::Service {
 public:
  AdminService(AdminContext& context, const Caller& caller) : context_(context), caller_(caller) {}

  grpc::Status GetStatus(grpc::ServerContext* call, const v1::GetStatusRequest* request,
                         v1::GetStatusReply* reply) override {
    const grpc::Status asked = AskFor(call, *request, reply);
    if (asked.ok()) {
      context_.fill_daemon_status(*reply->mutable_daemon());
    }
    return asked;
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
    return Take(answer, reply);
  }

  grpc::Status SetOptions(grpc::ServerContext* call, const v1::SetOptionsRequest* request,
                          v1::SetOptionsReply* reply) override {
    return AskFor(call, *request, reply);
  }

  grpc::Status InspectShard(grpc::ServerContext* call, const v1::InspectShardRequest* request,
                            v1::InspectShardReply* reply) override {
    ReadableShards shards;
    absl::StatusOr<AdminAnswer> answer = Ask(call, *request);
    if (const grpc::Status took = Take(answer, &shards); !took.ok()) {
      return took;
    }
    if (shards.shards.size() != 1) {
      return ToGrpc(absl::NotFoundError(
          "inspect: there is no such shard; `ckptctl list` shows what there is"));
    }
    absl::StatusOr<std::string> record = context_.store->ReadRecord(shards.shards[0].slot);
    if (!record.ok()) {
      if (IsBadCopy(record.status())) {
        context_.gateway->ReportBadCopy(shards.shards[0], Message(record.status()));
      }
      return ToGrpc(record.status());
    }
    reply->set_record(*std::move(record));
    reply->set_location(SlotLocation(shards.shards[0].slot));
    return grpc::Status::OK;
  }

  grpc::Status Verify(grpc::ServerContext* call, const v1::VerifyRequest* request,
                      grpc::ServerWriter<v1::VerifyProgress>* writer) override {
    if (const absl::Status seat = context_.verify_seats.Take(caller_.uid); !seat.ok()) {
      return ToGrpc(seat);
    }
    const absl::Cleanup leave = [this] { context_.verify_seats.Leave(caller_.uid); };
    ListedShards listed;
    absl::StatusOr<AdminAnswer> answer = Ask(call, *request);
    if (const grpc::Status took = Take(answer, &listed); !took.ok()) {
      return took;
    }
    VerifyRun run(
        *context_.store, std::move(listed.shards),
        {.hold = [this,
                  request](const ReadableShard& shard) { return Hold(request->job(), shard); },
         .bad = [this](const ReadableShard& shard,
                       const std::string& what) { context_.gateway->ReportBadCopy(shard, what); },
         .good = [this](const ReadableShard& shard) { context_.gateway->ReportGoodCopy(shard); },
         .durable = context_.verify_durable});
    for (;;) {
      v1::VerifyProgress progress;
      const bool done = run.WaitFor(kProgressEvery, &progress);
      const absl::Status result = done ? run.result() : absl::OkStatus();
      progress.set_done(done && result.ok());  // to the caller, done means that all was read
      if (call->IsCancelled() || !writer->Write(progress)) {
        return {grpc::StatusCode::CANCELLED, "verify: the caller has gone"};
      }
      if (done) {
        return ToGrpc(result);
      }
    }
  }

 private:
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
  static grpc::Status Take(absl::StatusOr<AdminAnswer>& answer, Reply* reply) {
    if (!answer.ok()) {
      return ToGrpc(answer.status());
    }
    Reply* const got = std::get_if<Reply>(&answer->reply);
    if (got == nullptr) {
      return {grpc::StatusCode::INTERNAL, "the daemon answered another question"};
    }
    *reply = std::move(*got);
    return grpc::Status::OK;
  }

  template <typename Request, typename Reply>
  grpc::Status AskFor(grpc::ServerContext* call, const Request& request, Reply* reply) {
    absl::StatusOr<AdminAnswer> answer = Ask(call, request);
    return Take(answer, reply);
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
