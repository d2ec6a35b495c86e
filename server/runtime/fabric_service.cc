#include "server/runtime/fabric_service.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "base/admin_mark.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "base/status.h"
#include "base/utf8.h"
#include "holdfast/v1/fabric.grpc.pb.h"
#include "server/runtime/fabric_port.h"
#include "server/runtime/fabric_probe.h"

namespace holdfast {
namespace {

constexpr Duration kLongest = std::chrono::seconds(30);
constexpr Duration kAnswerTakes = std::chrono::seconds(1);
constexpr auto kMeasureLook = std::chrono::milliseconds(100);

// Well before the caller gives up: it is to hear from us what kept us.
MonotonicTime UntilBefore(std::chrono::system_clock::time_point deadline) {
  const Duration left = std::min<Duration>(
      std::chrono::duration_cast<Duration>(deadline - std::chrono::system_clock::now()), kLongest);
  return Clock::System()->Now() + (left - std::min(kAnswerTakes, left / 4));
}

// Cancels what is done for a caller that has gone; whoever waits in it looks at nothing else.
class CancelWatch {
 public:
  CancelWatch(const grpc::ServerContext& call, std::shared_ptr<TransferControl> control)
      : thread_([this, &call, control = std::move(control)] {
          MutexLock lock(mutex_);
          while (!done_) {
            if (call.IsCancelled()) {
              return control->Cancel();
            }
            changed_.WaitUntil(mutex_, std::chrono::steady_clock::now() + kMeasureLook);
          }
        }) {}
  ~CancelWatch() {
    {
      MutexLock lock(mutex_);
      done_ = true;
    }
    changed_.NotifyAll();
    thread_.join();
  }
  CancelWatch(const CancelWatch&) = delete;
  CancelWatch& operator=(const CancelWatch&) = delete;

 private:
  Mutex mutex_;
  CondVar changed_;
  bool done_ GUARDED_BY(mutex_) = false;
  std::thread thread_;  // last: it uses the others
};

class FabricService final : public v1::FabricAdmin::Service {
 public:
  FabricService(AdminContext& context, const Caller& caller) : context_(context), caller_(caller) {}

  grpc::Status ShowFabric(grpc::ServerContext* /*call*/, const v1::ShowFabricRequest* /*request*/,
                          v1::ShowFabricReply* reply) override {
    reply->set_node(context_.node_name);
    reply->set_bandwidth_bytes_per_s_max(context_.fabric_bandwidth_bytes_per_s_max);
    if (context_.fabric == nullptr) {
      reply->set_problem(Utf8Text(context_.no_fabric));
      return grpc::Status::OK;
    }
    const FabricInfo& info = context_.fabric->fabric().info();
    reply->set_provider(Utf8Text(info.provider));
    reply->set_library_version(
        absl::StrCat(info.library_version >> 16, ".", info.library_version & 0xffff));
    reply->set_problem(Utf8Text(context_.fabric->problem()));
    for (const FabricDeviceInfo& device : info.devices) {
      v1::FabricDevice& shown = *reply->add_devices();
      shown.set_name(Utf8Text(device.name));
      shown.set_address(Utf8Text(device.address));
      shown.set_numa_node(device.numa_node);
      shown.set_dscp(device.traffic_class);
      shown.set_message_bytes_max(device.message_bytes_max);
      shown.set_reads_max(device.reads_max);
      for (std::string& name : NamesOfMrMode(device.mr_mode)) {
        shown.add_registration(std::move(name));
      }
    }
    return grpc::Status::OK;
  }

  grpc::Status MeasureFabric(grpc::ServerContext* call, const v1::MeasureFabricRequest* request,
                             v1::MeasureFabricReply* reply) override {
    const auto control = std::make_shared<TransferControl>();
    const CancelWatch watch(*call, control);
    return Answer(call, Measure(request->node(), control, UntilBefore(call->deadline()), *reply));
  }

 private:
  absl::Status Measure(const std::string& node, const std::shared_ptr<TransferControl>& control,
                       MonotonicTime until, v1::MeasureFabricReply& reply) {
    if (caller_.uid != 0 && caller_.uid != ::geteuid()) {
      return absl::PermissionDeniedError(
          "fabric: measuring takes the network for a second: only root and the daemon's user may");
    }
    if (context_.measuring.exchange(true)) {
      return absl::ResourceExhaustedError(
          "fabric: somebody is measuring from here already; try again in a few seconds");
    }
    const absl::Cleanup done = [this] { context_.measuring = false; };
    return Annotate(holdfast::MeasureFabric({context_.pulls, context_.fabric, context_.node_name},
                                            node, control, until, reply),
                    absl::StrCat("fabric: measuring from ", node));
  }

  static grpc::Status Answer(grpc::ServerContext* call, const absl::Status& status) {
    if (status.ok()) {
      return grpc::Status::OK;
    }
    call->AddTrailingMetadata(kAnswerMark, kAnswerMarkValue);
    return {static_cast<grpc::StatusCode>(status.code()), Utf8Text(Message(status))};
  }

  AdminContext& context_;
  const Caller caller_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakeFabricService(AdminContext& context, const Caller& caller) {
  return std::make_unique<FabricService>(context, caller);
}

}  // namespace holdfast
