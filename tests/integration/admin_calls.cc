// Node's questions to the daemon's admin service.
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include "holdfast/v1/admin.grpc.pb.h"
#include "tests/integration/harness.h"

namespace holdfast {
namespace {

std::unique_ptr<v1::Admin::Stub> StubOf(const std::string& socket) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL,
                   1);  // a daemon that was restarted is a new one
  return v1::Admin::NewStub(
      grpc::CreateCustomChannel("unix:" + socket, grpc::InsecureChannelCredentials(), arguments));
}

void SetDeadline(grpc::ClientContext& context) {
  context.set_deadline(std::chrono::system_clock::now() + kPatience);
}

}  // namespace

std::optional<v1::GetStatusReply> Node::Status(std::string* error) {
  grpc::ClientContext context;
  SetDeadline(context);
  v1::GetStatusReply reply;
  const grpc::Status status =
      StubOf(admin_socket())->GetStatus(&context, v1::GetStatusRequest(), &reply);
  if (!status.ok()) {
    if (error != nullptr) {
      *error = status.error_message();
    }
    return std::nullopt;
  }
  return reply;
}

std::optional<v1::JobStatus> Node::Job(const std::string& name) {
  const std::optional<v1::GetStatusReply> reply = Status();
  if (reply.has_value()) {
    for (const v1::JobStatus& job : reply->jobs()) {
      if (job.name() == name) {
        return job;
      }
    }
  }
  return std::nullopt;
}

std::vector<v1::Checkpoint> Node::List(const std::string& job) {
  grpc::ClientContext context;
  SetDeadline(context);
  v1::ListCheckpointsRequest request;
  request.set_job(job);
  v1::ListCheckpointsReply reply;
  const grpc::Status status = StubOf(admin_socket())->ListCheckpoints(&context, request, &reply);
  if (!status.ok()) {
    ADD_FAILURE() << "list " << job << ": " << status.error_message();
  }
  return {reply.checkpoints().begin(), reply.checkpoints().end()};
}

Node::Verified Node::Verify(const std::string& job) {
  grpc::ClientContext context;
  SetDeadline(context);
  v1::VerifyRequest request;
  request.set_job(job);
  request.set_all_steps(true);
  const std::unique_ptr<v1::Admin::Stub> stub = StubOf(admin_socket());
  const std::unique_ptr<grpc::ClientReader<v1::VerifyProgress>> reader =
      stub->Verify(&context, request);
  Verified verified;
  v1::VerifyProgress progress;
  while (reader->Read(&progress)) {
    verified.shards = progress.shards_checked();
    verified.skipped = progress.shards_skipped();
    verified.bytes = progress.bytes_done();
    verified.bad.insert(verified.bad.end(), progress.bad().begin(), progress.bad().end());
  }
  const grpc::Status status = reader->Finish();
  verified.ok = status.ok();
  verified.error = status.error_message();
  return verified;
}

std::string Node::Remove(const std::string& job) {
  grpc::ClientContext context;
  SetDeadline(context);
  v1::RemoveJobRequest request;
  request.set_job(job);
  v1::RemoveJobReply reply;
  const grpc::Status status = StubOf(admin_socket())->RemoveJob(&context, request, &reply);
  return status.ok() ? "" : status.error_message() + " ";
}

std::string Node::SetRestorePoint(const v1::SetRestorePointRequest& request) {
  grpc::ClientContext context;
  SetDeadline(context);
  v1::SetRestorePointReply reply;
  const grpc::Status status = StubOf(admin_socket())->SetRestorePoint(&context, request, &reply);
  return status.ok() ? "" : status.error_message() + " ";
}

bool Node::Until(const std::function<bool(const v1::GetStatusReply&)>& so,
                 std::chrono::milliseconds at_most) {
  const auto until = std::chrono::steady_clock::now() + at_most;
  const std::unique_ptr<v1::Admin::Stub> stub = StubOf(admin_socket());
  while (std::chrono::steady_clock::now() < until) {
    grpc::ClientContext context;
    SetDeadline(context);
    v1::GetStatusReply reply;
    if (stub->GetStatus(&context, v1::GetStatusRequest(), &reply).ok() && so(reply)) {
      return true;
    }
  }
  return false;
}

}  // namespace holdfast
