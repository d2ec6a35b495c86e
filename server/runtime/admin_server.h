// The admin socket. gRPC does not tell who is at the other end of a unix socket, so this accepts
// the connections itself, asks the kernel for the peer's uid, and hands the descriptor to a gRPC
// server that serves this uid alone: who calls is a property of the server that a call arrives at,
// and cannot be mistaken.
//
//   HF_ASSIGN_OR_RETURN(auto admin, AdminServer::Start(config.admin(), context));
//   admin.reset();   // ends all calls
//
// A connection waits at the door until it has sent what every HTTP/2 client sends first, and is
// closed when it does not soon: who is silent costs a descriptor, and no place. Limits then:
// servers for kUidsMax users, kConnectionsPerUidMax connections of each. Where all servers are
// taken, that of a user who asks nothing makes room. Root and the daemon's own user have servers
// from the start and always get in. Whoever is turned away is told why (GOAWAY), and so is the log.
//
// Those who come by TLS (admin_tls.h) are brought in by Welcome, and treated likewise: by uid and
// certificate, with as many places of their own. Operators among them have kOperatorsByTlsMax
// others, which no user takes.
//
// A thread of its own accepts and counts; gRPC's threads run the calls.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/unique_fd.h"
#include "holdfast/v1/config.pb.h"
#include "server/runtime/admin_service.h"

namespace holdfast {

class AdminServer {
 public:
  static constexpr size_t kUidsMax = 16;
  static constexpr size_t kOperatorsByTlsMax = 8;
  static constexpr size_t kConnectionsPerUidMax = 16;
  static constexpr size_t kAtTheDoorMax = 256;

  struct Times {
    Duration greeting = std::chrono::seconds(5);  // until the client's first bytes are there
    Duration idle = std::chrono::seconds(60);     // a connection without calls is closed
    Duration quiet = std::chrono::seconds(5);     // a user without calls has to make room
  };
  static absl::StatusOr<std::unique_ptr<AdminServer>> Start(const v1::AdminConfig& config,
                                                            AdminContext& context,
                                                            const Times& times);
  static absl::StatusOr<std::unique_ptr<AdminServer>> Start(const v1::AdminConfig& config,
                                                            AdminContext& context) {
    return Start(config, context, Times());
  }
  ~AdminServer();
  // Any thread: somebody whose certificate stands for that uid, at the other end of a socket that
  // does not block.
  void Welcome(UniqueFd fd, uint32_t uid, const std::string& certificate);
  AdminServer(const AdminServer&) = delete;
  AdminServer& operator=(const AdminServer&) = delete;

 private:
  struct Impl;
  explicit AdminServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace holdfast
