// What the daemons of a cluster say to each other about a job's host, beside what its agents and
// coordinator say (server/messages.h; docs/protocol.md §16). All name the job, by name, and an
// epoch of its host.
#pragma once

#include <cstdint>
#include <optional>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "base/ids.h"
#include "base/one_of.h"
#include "holdfast/v1/admin.pb.h"
#include "holdfast/v1/state.pb.h"

namespace holdfast {

using Epoch = uint64_t;  // of a job's host; the first is 1, 0 means none or not known
inline constexpr Epoch kEpochMax = Epoch{1} << 62;

// From a node that was elected under this epoch: what is kept of the job? Whoever has heard it
// takes no command of an older epoch any more.
struct StateAsked {};
struct StateTold {
  Epoch highest_epoch = 0;            // that the node had noted before
  std::optional<v1::JobState> state;  // that it keeps
};
// The coordinator of the job works here; it believes these ranks to run at the receiver's. Answered
// with NodeArrived.
struct JobHosted {
  struct LocalRank {
    Rank rank = 0;
    int32_t pid = 0;
    uint64_t start_ticks = 0;
  };
  uint32_t uid = 0;
  uint32_t gid = 0;
  Attempt attempt = 0;  // 0: there was none yet
  uint32_t world_size = 0;
  std::vector<LocalRank> ranks;
};
// A client of that user asks for the job, which the sender does not know, and waits that much
// longer (0: not said). One that only reads opens none: if there is none, that is told by
// JobAbsent.
struct JobSought {
  uint32_t uid = 0;
  uint32_t gid = 0;
  bool reads = false;
  uint64_t wait_ms = 0;
};
// By the host: no node keeps anything of such a job, and no tier that it reaches knows it.
struct JobAbsent {};
// By the host: these jobs had the name and were removed. The receiver lets go of all that it keeps
// of them, and says of each when that is done, or what is in its way. (At most kRemovedBeforeMax of
// server/messages.h.)
struct JobsRemoved {
  std::vector<JobUuid> jobs;
};
struct JobLetGo {
  JobUuid job;
  uint64_t bytes = 0;
  absl::Status status;  // not OK: it is tried again
};
// What was agreed on; for the receiver to keep, too.
struct StateKept {
  v1::JobState state;
};

// What ckptctl asked on another node: of a job that this one hosts, or of this node, where no job
// or a node is named.
using AnyForwardedRequest =
    std::variant<v1::GetStatusRequest, v1::ListCheckpointsRequest, v1::SetRestorePointRequest,
                 v1::RemoveJobRequest, v1::WhereRequest, v1::ExplainRequest, v1::TimelineRequest,
                 v1::CollectGarbageRequest, v1::PinRequest, v1::RemoveCheckpointRequest,
                 v1::SetOptionsRequest, v1::FindShardRequest, v1::PlanVerifyRequest,
                 v1::ReadShardRequest, v1::VerifyPartRequest, v1::VerifyMoreRequest,
                 v1::ReplaceRequest, v1::DrainRequest, v1::RepairRequest, v1::PlanScrubRequest>;
extern template class OneOf<AnyForwardedRequest>;
struct ForwardedRequest : OneOf<AnyForwardedRequest> {
  using OneOf::OneOf;
};
using AnyReturnedReply =
    std::variant<std::monostate, v1::GetStatusReply, v1::ListCheckpointsReply,
                 v1::SetRestorePointReply, v1::RemoveJobReply, v1::WhereReply, v1::ExplainReply,
                 v1::TimelineReply, v1::CollectGarbageReply, v1::PinReply,
                 v1::RemoveCheckpointReply, v1::SetOptionsReply, v1::FindShardReply,
                 v1::PlanVerifyReply, v1::ReadShardReply, v1::VerifyPartReply, v1::VerifyMoreReply,
                 v1::ReplaceReply, v1::DrainReply, v1::RepairReply, v1::PlanScrubReply>;
extern template class OneOf<AnyReturnedReply>;
struct ReturnedReply : OneOf<AnyReturnedReply> {
  using OneOf::OneOf;
};
struct AdminForwarded {
  uint64_t token = 0;
  uint32_t uid = 0;
  uint32_t gid = 0;
  ForwardedRequest request;
};
struct AdminReturned {
  uint64_t token = 0;
  absl::Status status;
  ReturnedReply reply;  // when OK
};

using AnyNodeMessage =
    std::variant<StateAsked, StateTold, JobHosted, JobSought, JobAbsent, JobsRemoved, JobLetGo,
                 StateKept, AdminForwarded, AdminReturned>;
extern template class OneOf<AnyNodeMessage>;
struct NodeMessage : OneOf<AnyNodeMessage> {
  using OneOf::OneOf;
};

}  // namespace holdfast
