// An admin service on a unix socket of its own, in this process, that answers as a test wants:
// errors, silence and nonsense included. What a test does not set is answered UNIMPLEMENTED.
//
//   FakeAdmin admin({.get_status = [](const auto&, auto& reply) { … return absl::OkStatus(); }});
//   context.socket = admin.socket();
//
// The functions are called on gRPC's threads. Destroyed: the socket and its directory are gone.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "base/mutex.h"
#include "holdfast/v1/admin.pb.h"
#include "holdfast/v1/fabric.pb.h"

namespace holdfast {

// What an answer saw, kept for the test: the two run on different threads.
template <typename T>
class Kept {
 public:
  void Set(const T& value) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    value_ = value;
  }
  T Get() EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    return value_;
  }

 private:
  Mutex mutex_;
  T value_ GUARDED_BY(mutex_){};
};

class FakeAdmin {
 public:
  using SendProgress =
      std::function<bool(const v1::VerifyProgress&)>;  // false: the caller has gone
  struct Answers {
    std::function<absl::Status(const v1::GetStatusRequest&, v1::GetStatusReply&)> get_status;
    std::function<absl::Status(const v1::ListCheckpointsRequest&, v1::ListCheckpointsReply&)> list;
    std::function<absl::Status(const v1::InspectShardRequest&, v1::InspectShardReply&)> inspect;
    std::function<absl::Status(const v1::VerifyRequest&, const SendProgress&)> verify;
    std::function<absl::Status(const v1::SetRestorePointRequest&, v1::SetRestorePointReply&)>
        restore;
    std::function<absl::Status(const v1::RemoveJobRequest&, v1::RemoveJobReply&)> remove;
    std::function<absl::Status(const v1::WhereRequest&, v1::WhereReply&)> where;
    std::function<absl::Status(const v1::ExplainRequest&, v1::ExplainReply&)> explain;
    std::function<absl::Status(const v1::TimelineRequest&, v1::TimelineReply&)> timeline;
    std::function<absl::Status(const v1::CollectGarbageRequest&, v1::CollectGarbageReply&)>
        collect_garbage;
    std::function<absl::Status(const v1::PinRequest&, v1::PinReply&)> pin;
    std::function<v1::EventBatch(const v1::WatchEventsRequest&)> events;
    std::function<absl::Status(const v1::ReplaceRequest&, v1::ReplaceReply&)> replace;
    std::function<absl::Status(const v1::RepairRequest&, v1::RepairReply&)> repair = {};
    std::function<absl::Status(const v1::DrainRequest&, v1::DrainReply&)> drain;
    std::function<absl::Status(const v1::ForgetDriveRequest&, v1::ForgetDriveReply&)> forget_drive;
    std::function<absl::Status(const v1::ShowFabricRequest&, v1::ShowFabricReply&)> show_fabric;
    std::function<absl::Status(const v1::MeasureFabricRequest&, v1::MeasureFabricReply&)>
        measure_fabric;
    std::function<absl::Status(const v1::RemoveCheckpointRequest&, v1::RemoveCheckpointReply&)>
        remove_checkpoint;
    std::function<absl::Status(const v1::AdoptRemoteRequest&, v1::AdoptRemoteReply&)> adopt_remote;
    std::function<absl::Status(const v1::RebuildRequest&, v1::RebuildReply&)> rebuild;
    std::function<absl::Status(const v1::SetOptionsRequest&, v1::SetOptionsReply&)> set_options;
    std::function<absl::Status(const v1::GetNodesRequest&, v1::GetNodesReply&)> nodes;
    bool marks_errors = true;  // false: as daemons of before did, whose errors may be gRPC's
  };
  explicit FakeAdmin(Answers answers);
  ~FakeAdmin();
  const std::string& socket() const;
  const std::string& directory() const;
  void SetServing(bool serving);  // what the health service says

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace holdfast
