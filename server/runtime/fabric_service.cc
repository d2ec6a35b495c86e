#include "server/runtime/fabric_service.h"

#include <unistd.h>

#include <string>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "base/admin_mark.h"
#include "base/status.h"
#include "base/utf8.h"
#include "holdfast/v1/fabric.grpc.pb.h"
#include "server/runtime/fabric_port.h"
#include "server/runtime/fabric_probe.h"

namespace holdfast {
namespace {

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
    return Answer(call, Measure(request->node(), *reply));
  }

 private:
  absl::Status Measure(const std::string& node, v1::MeasureFabricReply& reply) {
    if (caller_.uid != 0 && caller_.uid != ::geteuid()) {
      return absl::PermissionDeniedError(
          "fabric: measuring takes the network for a second: only root and the daemon's user may");
    }
    if (context_.measuring.exchange(true)) {
      return absl::ResourceExhaustedError("fabric: somebody is measuring already; try again");
    }
    const absl::Cleanup done = [this] { context_.measuring = false; };
    return Annotate(
        holdfast::MeasureFabric({context_.pulls, context_.fabric, context_.node_name}, node, reply),
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
