#include "server/runtime/copy_reading.h"

#include <algorithm>
#include <utility>

#include "base/status.h"
#include "server/runtime/found_state.h"

namespace holdfast {
namespace {

absl::Status AnotherQuestion() {
  return absl::InternalError("the daemon answered another question");
}

absl::StatusOr<std::unique_ptr<ReadLease>> Hold(AdminContext& context, const Caller& caller,
                                                const std::string& job,
                                                const ReadableShard& shard) {
  HF_ASSIGN_OR_RETURN(AdminAnswer answer,
                      context.gateway->Ask(HoldShard{job, shard.copy.id, shard.copy.generation},
                                           caller, context.request_timeout));
  if (answer.lease == nullptr) {
    return AnotherQuestion();
  }
  return std::move(answer.lease);
}

// Whether there still is such a copy in remote, as far as the host knows.
absl::StatusOr<bool> StillInRemote(AdminContext& context, const Caller& caller,
                                   const std::string& job, const ReadableShard& shard) {
  v1::PlanScrubRequest request;
  request.set_job(job);
  request.set_reader(context.node_name);
  request.mutable_only()->set_attempt(shard.copy.id.attempt);
  request.mutable_only()->set_step(shard.copy.id.step);
  request.mutable_only()->set_rank(shard.copy.id.rank);
  const absl::StatusOr<v1::PlanScrubReply> reply = PlanScrub(context, caller, request);
  if (absl::IsNotFound(reply.status())) {
    return false;
  }
  HF_RETURN_IF_ERROR(reply.status());
  return reply->copies_size() > 0 && reply->job_uuid() == shard.copy.id.job.ToBytes();
}

// Whether the copy is still among those that there are to verify.
absl::StatusOr<bool> StillListed(AdminContext& context, const Caller& caller,
                                 const std::string& job, const ReadableShard& shard) {
  if (shard.tier == TierKind::kRemote) {
    return StillInRemote(context, caller, job, shard);
  }
  v1::VerifyRequest request;
  request.set_job(job);
  request.set_attempt(shard.copy.id.attempt);
  request.set_step(shard.copy.id.step);
  request.set_tier(std::string(TierName(shard.tier)));
  const absl::StatusOr<ListedShards> listed = ListHere(context, caller, request);
  if (absl::IsNotFound(listed.status())) {
    return false;
  }
  HF_RETURN_IF_ERROR(listed.status());
  return std::any_of(listed->shards.begin(), listed->shards.end(), [&](const ReadableShard& one) {
    return one.copy.id == shard.copy.id && one.tier == shard.tier;
  });
}

}  // namespace

absl::StatusOr<v1::ReadShardReply> ReadRecordHere(AdminContext& context, const Caller& caller,
                                                  const v1::InspectShardRequest& request,
                                                  Duration at_most) {
  HF_ASSIGN_OR_RETURN(const AdminAnswer answer, context.gateway->Ask(request, caller, at_most));
  const auto* held = std::get_if<ReadableShards>(&answer.reply);
  if (held == nullptr || held->shards.size() != 1) {
    return AnotherQuestion();
  }
  absl::StatusOr<std::string> record = context.store->ReadRecord(held->shards[0].slot);
  if (!record.ok()) {
    if (IsBadCopy(record.status())) {
      context.gateway->ReportBadCopy(held->shards[0], Message(record.status()));
    }
    return record.status();
  }
  v1::ReadShardReply reply;
  reply.set_record(*std::move(record));
  reply.set_location(SlotLocation(held->shards[0].slot));
  return reply;
}

absl::StatusOr<ListedShards> ListHere(AdminContext& context, const Caller& caller,
                                      const v1::VerifyRequest& request) {
  HF_ASSIGN_OR_RETURN(AdminAnswer answer,
                      context.gateway->Ask(request, caller, context.request_timeout));
  auto* listed = std::get_if<ListedShards>(&answer.reply);
  if (listed == nullptr) {
    return AnotherQuestion();
  }
  return std::move(*listed);
}

absl::StatusOr<v1::PlanScrubReply> PlanScrub(AdminContext& context, const Caller& caller,
                                             const v1::PlanScrubRequest& request) {
  HF_ASSIGN_OR_RETURN(AdminAnswer answer,
                      context.gateway->Ask(request, caller, context.request_timeout));
  auto* reply = std::get_if<v1::PlanScrubReply>(&answer.reply);
  if (reply == nullptr) {
    return AnotherQuestion();
  }
  return std::move(*reply);
}

VerifyHow HowOf(const v1::VerifyRequest& request) {
  const uint64_t bandwidth = request.bandwidth_bytes_per_s_max();
  return {request.job(), request.no_repair(),
          bandwidth > 0 ? std::make_shared<Pacer>(bandwidth) : nullptr};
}

std::unique_ptr<VerifyRun> BeginVerify(AdminContext& context, const Caller& caller,
                                       const VerifyHow& how, std::vector<ReadableShard> shards) {
  const std::string& job = how.job;
  VerifyRun::Callbacks callbacks;
  callbacks.hold = [&context, caller, job](const ReadableShard& shard) {
    return Hold(context, caller, job, shard);
  };
  callbacks.bad = [&context, leave = how.leave](const ReadableShard& shard,
                                                const std::string& why) {
    context.gateway->ReportBadCopy(shard, why, leave);
    context.verified(shard);
  };
  callbacks.good = [&context](const ReadableShard& shard) {
    context.gateway->ReportGoodCopy(shard);
    context.verified(shard);
  };
  callbacks.durable = context.verify_durable;
  callbacks.listed = [&context, caller, job](const ReadableShard& shard) {
    return StillListed(context, caller, job, shard);
  };
  return std::make_unique<VerifyRun>(*context.store, std::move(shards), std::move(callbacks),
                                     how.pacer);
}

}  // namespace holdfast
