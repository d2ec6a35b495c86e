// Reads this node's copies for whoever asks, here or on another node of the cluster: the record of
// one in memory, or all bytes of many.
//
//   HF_ASSIGN_OR_RETURN(v1::ReadShardReply record, ReadRecordHere(context, caller, request, 5s));
//   std::unique_ptr<VerifyRun> run = BeginVerify(context, caller, HowOf(request),
//   std::move(shards));
//
// Any thread but the reactor's: they ask the core.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/clock.h"
#include "holdfast/v1/admin.pb.h"
#include "server/events.h"
#include "server/runtime/admin_service.h"
#include "server/runtime/verify.h"

namespace holdfast {

absl::StatusOr<v1::ReadShardReply> ReadRecordHere(AdminContext& context, const Caller& caller,
                                                  const v1::InspectShardRequest& request,
                                                  Duration at_most);
// NotFound: nothing of it lies here.
absl::StatusOr<ListedShards> ListHere(AdminContext& context, const Caller& caller,
                                      const v1::VerifyRequest& request);
// Asks the job's host, be that this node or another one.
absl::StatusOr<v1::PlanScrubReply> PlanScrub(AdminContext& context, const Caller& caller,
                                             const v1::PlanScrubRequest& request);
struct VerifyHow {
  std::string job;
  bool leave = false;  // what is bad is not written anew by itself
  std::shared_ptr<Pacer> pacer = nullptr;
};
VerifyHow HowOf(const v1::VerifyRequest& request);
// The context outlives the run.
std::unique_ptr<VerifyRun> BeginVerify(AdminContext& context, const Caller& caller,
                                       const VerifyHow& how, std::vector<ReadableShard> shards);

}  // namespace holdfast
