// The daemon's admin service as ckptctl sees it: gRPC on a unix socket, or by TLS, behind a class
// that shows none of it.
//
//   HF_ASSIGN_OR_RETURN(auto client, AdminClient::Connect("/run/holdfast/admin.sock", timeout));
//   v1::GetStatusReply reply;
//   HF_RETURN_IF_ERROR(client->GetStatus(request, reply));
//
// Every wait is bounded. Unavailable: nobody answers there, the message says what was found and how
// to start the daemon. DeadlineExceeded: somebody is there and stays silent. Either may be the
// daemon's own answer, too (a tier that is away, an operation that hangs): IsDaemonsAnswer tells
// them apart. Anything else is the daemon's. One thread at a time uses a client.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "base/clock.h"

namespace holdfast {

namespace v1 {
class GetStatusRequest;
class GetStatusReply;
class GetNodesReply;
class GetNodesRequest;
class ListCheckpointsRequest;
class ListCheckpointsReply;
class InspectShardRequest;
class InspectShardReply;
class VerifyRequest;
class VerifyProgress;
class SetRestorePointRequest;
class SetRestorePointReply;
class RemoveJobRequest;
class RemoveJobReply;
class WhereRequest;
class WhereReply;
class ExplainRequest;
class ExplainReply;
class TimelineRequest;
class TimelineReply;
class CollectGarbageRequest;
class CollectGarbageReply;
class PinRequest;
class PinReply;
class RepairRequest;
class RepairReply;
class ReplaceRequest;
class DrainRequest;
class DrainReply;
class ReplaceReply;
class RemoveCheckpointRequest;
class RemoveCheckpointReply;
class ForgetDriveRequest;
class ForgetDriveReply;
class AdoptRemoteRequest;
class AdoptRemoteReply;
class RebuildRequest;
class RebuildReply;
class SetOptionsRequest;
class SetOptionsReply;
class ShowFabricRequest;
class ShowFabricReply;
class MeasureFabricRequest;
class MeasureFabricReply;
class WatchEventsRequest;
class EventBatch;
}  // namespace v1

// Whether the daemon itself answered with this error. Of daemons that do not mark their answers:
// false.
bool IsDaemonsAnswer(const absl::Status& status);
// Whether somebody is there (or our own files are wrong), and lets us not in: to wait is of no use.
bool IsNotLetIn(const absl::Status& status);

struct AdminPlace;

class AdminClient {
 public:
  // Connects by itself, so that the reason is known exactly when nobody answers.
  static absl::StatusOr<std::unique_ptr<AdminClient>> Connect(const AdminPlace& place,
                                                              Duration timeout);
  static absl::StatusOr<std::unique_ptr<AdminClient>> Connect(const std::string& socket,
                                                              Duration timeout);
  ~AdminClient();

  // Calls end as Cancelled at most a tenth of a second after it turned true. It outlives the
  // client; null: nothing cancels them.
  void CancelWhen(const std::atomic<bool>* cancel);

  AdminClient(const AdminClient&) = delete;
  AdminClient& operator=(const AdminClient&) = delete;

  absl::Status GetStatus(const v1::GetStatusRequest& request, v1::GetStatusReply& reply);
  absl::Status GetNodes(const v1::GetNodesRequest& request, v1::GetNodesReply& reply);
  absl::Status ListCheckpoints(const v1::ListCheckpointsRequest& request,
                               v1::ListCheckpointsReply& reply);
  absl::Status InspectShard(const v1::InspectShardRequest& request, v1::InspectShardReply& reply);
  absl::Status SetRestorePoint(const v1::SetRestorePointRequest& request,
                               v1::SetRestorePointReply& reply);
  absl::Status RemoveJob(const v1::RemoveJobRequest& request, v1::RemoveJobReply& reply);
  absl::Status Where(const v1::WhereRequest& request, v1::WhereReply& reply);
  absl::Status Explain(const v1::ExplainRequest& request, v1::ExplainReply& reply);
  absl::Status Timeline(const v1::TimelineRequest& request, v1::TimelineReply& reply);
  absl::Status CollectGarbage(const v1::CollectGarbageRequest& request,
                              v1::CollectGarbageReply& reply);
  absl::Status Pin(const v1::PinRequest& request, v1::PinReply& reply);
  absl::Status ShowFabric(const v1::ShowFabricRequest& request, v1::ShowFabricReply& reply);
  absl::Status MeasureFabric(const v1::MeasureFabricRequest& request,
                             v1::MeasureFabricReply& reply);
  absl::Status Repair(const v1::RepairRequest& request, v1::RepairReply& reply);
  absl::Status Replace(const v1::ReplaceRequest& request, v1::ReplaceReply& reply);
  absl::Status Drain(const v1::DrainRequest& request, v1::DrainReply& reply);
  absl::Status RemoveCheckpoint(const v1::RemoveCheckpointRequest& request,
                                v1::RemoveCheckpointReply& reply);
  absl::Status ForgetDrive(const v1::ForgetDriveRequest& request, v1::ForgetDriveReply& reply);
  absl::Status AdoptRemote(const v1::AdoptRemoteRequest& request, v1::AdoptRemoteReply& reply);
  absl::Status Rebuild(const v1::RebuildRequest& request, v1::RebuildReply& reply);
  absl::Status SetOptions(const v1::SetOptionsRequest& request, v1::SetOptionsReply& reply);

  // Streams until the daemon is done. The timeout bounds each silence, not the whole. Cancelled, at
  // most a tenth of a second after `cancel` turned true: the daemon is told and stops reading.
  absl::Status Verify(const v1::VerifyRequest& request, const std::atomic<bool>& cancel,
                      const std::function<void(const v1::VerifyProgress&)>& on_progress);

  // Likewise; with `follow` the daemon says something every few seconds, and is never done.
  absl::Status WatchEvents(const v1::WatchEventsRequest& request, const std::atomic<bool>& cancel,
                           const std::function<void(const v1::EventBatch&)>& on_batch);

  // What the standard gRPC health service says of the whole server: OK if it is serving.
  absl::Status CheckHealth();

 private:
  struct Impl;
  explicit AdminClient(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace holdfast
