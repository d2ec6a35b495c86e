// The door for other daemons: a gRPC server that hands each call on, once it is known to be within
// the limits, and answers it when it is told what.
//
//   PeerService service(limits, [&](PeerCalling calling) { loop.Post(…); },
//                       [&](uint64_t id) { … });   // the caller waits no longer: answer it too
//   HF_RETURN_IF_ERROR(service.Listen("10.0.0.1:7071", credentials));
//   calling.answer(absl::OkStatus(), v1::PEER_ANSWER_TAKEN, 0);   // exactly once, from any thread
//
// Owner: PeerNetwork. The callbacks come from gRPC's own threads, several at a time, and none after
// Stop has returned, which waits until every call has been answered.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "holdfast/v1/peer.pb.h"
#include "server/peers/peer_calls.h"

namespace grpc {
class ServerCredentials;
class Service;
}  // namespace grpc

namespace holdfast {

struct PeerCalling {
  uint64_t id = 0;
  bool opens = false;  // Open; else Deliver
  std::string from;
  uint64_t incarnation = 0;
  std::string to;
  uint64_t to_incarnation = 0;  // and what follows: of Open
  std::string cluster;
  std::string membership;
  uint64_t channel = 0;  // and what follows: of Deliver
  uint64_t first = 0;
  std::vector<std::string> messages;
  // An error refuses the call.
  std::function<void(const absl::Status& status, v1::PeerAnswer answer, uint64_t channel)> answer;
};

class PeerService {
 public:
  struct Limits {
    size_t request_bytes_max = 0;
    size_t messages_max = 0;
    size_t message_bytes_max = 0;
  };
  using Callback = std::function<void(PeerCalling calling)>;
  using Cancelled = std::function<void(uint64_t id)>;

  PeerService(const Limits& limits, Callback callback, Cancelled cancelled);
  ~PeerService();
  PeerService(const PeerService&) = delete;
  PeerService& operator=(const PeerService&) = delete;

  absl::Status Listen(const std::string& address,
                      const std::shared_ptr<grpc::ServerCredentials>& credentials,
                      const std::vector<grpc::Service*>& others = {});
  const std::string& address() const { return address_; }
  void Stop();

 private:
  class Service;
  struct Server;
  std::unique_ptr<Server> server_;
  std::string address_;
};

}  // namespace holdfast
