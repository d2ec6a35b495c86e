// Asks the standard health service, as a supervisor does.
//
//   HealthProbe probe(port);
//   EXPECT_EQ(probe.Ask("ready"), kServing);
#pragma once

#include <google/protobuf/wrappers.pb.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/impl/codegen/proto_utils.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

namespace holdfast {

inline constexpr uint32_t kServing = 1;
inline constexpr uint32_t kNotServing = 2;

class HealthProbe {
 public:
  explicit HealthProbe(int port)
      : channel_(grpc::CreateChannel("127.0.0.1:" + std::to_string(port),
                                     grpc::InsecureChannelCredentials())) {}

  // What it says, or 1000 and the error's code.
  uint32_t Ask(const std::string& service) { return Call("/grpc.health.v1.Health/Check", service); }
  uint32_t Call(const std::string& method, const std::string& text) {
    using google::protobuf::StringValue;  // as HealthCheckRequest: field 1, a string
    using google::protobuf::UInt32Value;  // as HealthCheckResponse: field 1, an enum
    grpc::TemplatedGenericStub<StringValue, UInt32Value> stub(channel_);
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    grpc::CompletionQueue queue;
    StringValue request;
    request.set_value(text);
    UInt32Value reply;
    grpc::Status status;
    const auto call = stub.PrepareUnaryCall(&context, method, request, &queue);
    call->StartCall();
    call->Finish(&reply, &status, nullptr);
    void* tag = nullptr;
    bool ok = false;
    queue.Next(&tag, &ok);
    return status.ok() ? reply.value() : 1000 + status.error_code();
  }
  bool Becomes(const std::string& service, uint32_t wanted) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (Ask(service) != wanted) {
      if (std::chrono::steady_clock::now() > until) {
        return false;
      }
    }
    return true;
  }

 private:
  const std::shared_ptr<grpc::Channel> channel_;
};

}  // namespace holdfast
