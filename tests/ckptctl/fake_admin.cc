#include "tests/ckptctl/fake_admin.h"

#include <grpc/grpc.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>
#include <stdlib.h>
#include <unistd.h>

#include <cstdio>

#include "base/admin_mark.h"
#include "base/status.h"
#include "holdfast/v1/admin.grpc.pb.h"
#include "holdfast/v1/fabric.grpc.pb.h"

namespace holdfast {
namespace {

grpc::Status ToGrpc(const absl::Status& status) {
  return {static_cast<grpc::StatusCode>(status.code()), Message(status)};
}

class Service final : public v1::Admin::Service {
 public:
  explicit Service(FakeAdmin::Answers answers) : answers_(std::move(answers)) {}

  grpc::Status GetStatus(grpc::ServerContext* call, const v1::GetStatusRequest* request,
                         v1::GetStatusReply* reply) override {
    return Answer(call, answers_.get_status, request, reply);
  }
  grpc::Status ListCheckpoints(grpc::ServerContext* call, const v1::ListCheckpointsRequest* request,
                               v1::ListCheckpointsReply* reply) override {
    return Answer(call, answers_.list, request, reply);
  }
  grpc::Status GetNodes(grpc::ServerContext* call, const v1::GetNodesRequest* request,
                        v1::GetNodesReply* reply) override {
    return Answer(call, answers_.nodes, request, reply);
  }
  grpc::Status InspectShard(grpc::ServerContext* call, const v1::InspectShardRequest* request,
                            v1::InspectShardReply* reply) override {
    return Answer(call, answers_.inspect, request, reply);
  }
  grpc::Status Verify(grpc::ServerContext* call, const v1::VerifyRequest* request,
                      grpc::ServerWriter<v1::VerifyProgress>* writer) override {
    if (!answers_.verify) {
      return {grpc::StatusCode::UNIMPLEMENTED, "not set"};
    }
    return Marked(call, answers_.verify(*request, [&](const v1::VerifyProgress& p) {
      return writer->Write(p);
    }));
  }
  grpc::Status SetRestorePoint(grpc::ServerContext* call, const v1::SetRestorePointRequest* request,
                               v1::SetRestorePointReply* reply) override {
    return Answer(call, answers_.restore, request, reply);
  }
  grpc::Status RemoveJob(grpc::ServerContext* call, const v1::RemoveJobRequest* request,
                         v1::RemoveJobReply* reply) override {
    return Answer(call, answers_.remove, request, reply);
  }
  grpc::Status Where(grpc::ServerContext* call, const v1::WhereRequest* request,
                     v1::WhereReply* reply) override {
    return Answer(call, answers_.where, request, reply);
  }
  grpc::Status Explain(grpc::ServerContext* call, const v1::ExplainRequest* request,
                       v1::ExplainReply* reply) override {
    return Answer(call, answers_.explain, request, reply);
  }
  grpc::Status Timeline(grpc::ServerContext* call, const v1::TimelineRequest* request,
                        v1::TimelineReply* reply) override {
    return Answer(call, answers_.timeline, request, reply);
  }
  grpc::Status CollectGarbage(grpc::ServerContext* call, const v1::CollectGarbageRequest* request,
                              v1::CollectGarbageReply* reply) override {
    return Answer(call, answers_.collect_garbage, request, reply);
  }
  grpc::Status WatchEvents(grpc::ServerContext*, const v1::WatchEventsRequest* request,
                           grpc::ServerWriter<v1::EventBatch>* writer) override {
    if (!answers_.events) {
      return {grpc::StatusCode::UNIMPLEMENTED, "not set"};
    }
    writer->Write(answers_.events(*request));
    return grpc::Status::OK;
  }
  grpc::Status Pin(grpc::ServerContext* call, const v1::PinRequest* request,
                   v1::PinReply* reply) override {
    return Answer(call, answers_.pin, request, reply);
  }
  grpc::Status Repair(grpc::ServerContext* call, const v1::RepairRequest* request,
                      v1::RepairReply* reply) override {
    return Answer(call, answers_.repair, request, reply);
  }
  grpc::Status Replace(grpc::ServerContext* call, const v1::ReplaceRequest* request,
                       v1::ReplaceReply* reply) override {
    return Answer(call, answers_.replace, request, reply);
  }
  grpc::Status ForgetDrive(grpc::ServerContext* call, const v1::ForgetDriveRequest* request,
                           v1::ForgetDriveReply* reply) override {
    return Answer(call, answers_.forget_drive, request, reply);
  }
  grpc::Status Drain(grpc::ServerContext* call, const v1::DrainRequest* request,
                     v1::DrainReply* reply) override {
    return Answer(call, answers_.drain, request, reply);
  }
  grpc::Status RemoveCheckpoint(grpc::ServerContext* call,
                                const v1::RemoveCheckpointRequest* request,
                                v1::RemoveCheckpointReply* reply) override {
    return Answer(call, answers_.remove_checkpoint, request, reply);
  }
  grpc::Status AdoptRemote(grpc::ServerContext* call, const v1::AdoptRemoteRequest* request,
                           v1::AdoptRemoteReply* reply) override {
    return Answer(call, answers_.adopt_remote, request, reply);
  }
  grpc::Status Rebuild(grpc::ServerContext* call, const v1::RebuildRequest* request,
                       v1::RebuildReply* reply) override {
    return Answer(call, answers_.rebuild, request, reply);
  }
  grpc::Status SetOptions(grpc::ServerContext* call, const v1::SetOptionsRequest* request,
                          v1::SetOptionsReply* reply) override {
    return Answer(call, answers_.set_options, request, reply);
  }

  grpc::Status Marked(grpc::ServerContext* call, const absl::Status& status) const {
    if (!status.ok() && answers_.marks_errors) {
      call->AddTrailingMetadata(kAnswerMark, kAnswerMarkValue);
    }
    return ToGrpc(status);
  }
  template <typename Function, typename Request, typename Reply>
  grpc::Status Answer(grpc::ServerContext* call, const Function& function, const Request* request,
                      Reply* reply) const {
    return function ? Marked(call, function(*request, *reply))
                    : grpc::Status(grpc::StatusCode::UNIMPLEMENTED, "not set");
  }

  const FakeAdmin::Answers& answers() const { return answers_; }

 private:
  const FakeAdmin::Answers answers_;
};

using AdminService = Service;  // (in the class below that name is its base's)

class FabricService final : public v1::FabricAdmin::Service {
 public:
  explicit FabricService(const AdminService& service) : service_(service) {}

  grpc::Status ShowFabric(grpc::ServerContext* call, const v1::ShowFabricRequest* request,
                          v1::ShowFabricReply* reply) override {
    return service_.Answer(call, service_.answers().show_fabric, request, reply);
  }
  grpc::Status MeasureFabric(grpc::ServerContext* call, const v1::MeasureFabricRequest* request,
                             v1::MeasureFabricReply* reply) override {
    return service_.Answer(call, service_.answers().measure_fabric, request, reply);
  }

 private:
  const AdminService& service_;
};

std::string MakeDirectory() {
  char path[] = "/tmp/holdfast-fake-admin-XXXXXX";
  if (::mkdtemp(path) == nullptr) {
    std::perror("mkdtemp");
    std::abort();
  }
  return path;
}

}  // namespace

struct FakeAdmin::Impl {
  explicit Impl(Answers answers) : service(std::move(answers)) {
    // One reference for good: else the last server's end takes gRPC's polling thread down too,
    // which waits for up to ten seconds if a write has ever found the socket full.
    static const bool kept = (grpc_init(), true);
    static_cast<void>(kept);
    grpc::EnableDefaultHealthCheckService(true);
    grpc::ServerBuilder builder;
    builder.AddListeningPort("unix:" + socket, grpc::InsecureServerCredentials());
    builder.RegisterService(&service);
    builder.RegisterService(&fabric);
    server = builder.BuildAndStart();
  }

  std::string directory = MakeDirectory();
  std::string socket = directory + "/admin.sock";
  Service service;
  FabricService fabric{service};
  std::unique_ptr<grpc::Server> server;
};

FakeAdmin::FakeAdmin(Answers answers) : impl_(std::make_unique<Impl>(std::move(answers))) {}

FakeAdmin::~FakeAdmin() {
  impl_->server->Shutdown();
  impl_->server->Wait();
  ::unlink(impl_->socket.c_str());
  ::rmdir(impl_->directory.c_str());
}

const std::string& FakeAdmin::socket() const {
  return impl_->socket;
}
const std::string& FakeAdmin::directory() const {
  return impl_->directory;
}
void FakeAdmin::SetServing(bool serving) {
  impl_->server->GetHealthCheckService()->SetServingStatus(serving);
}

}  // namespace holdfast
