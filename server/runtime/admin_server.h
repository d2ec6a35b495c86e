// The admin socket. gRPC does not tell who is at the other end of a unix socket, so this accepts
// the connections itself, asks the kernel for the peer's uid, and hands the descriptor to a gRPC
// server that serves this uid alone: who calls is a property of the server that a call arrives at,
// and cannot be mistaken.
//
//   HF_ASSIGN_OR_RETURN(auto admin, AdminServer::Start(config.admin(), context));
//   admin.reset();   // ends all calls
//
// A thread of its own accepts and counts; gRPC's threads run the calls. Limits: kUidsMax servers
// (the one without connections that was used least recently makes room), kConnectionsMax
// connections, kConnectionsPerUidMax for one uid.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "holdfast/v1/config.pb.h"
#include "server/runtime/admin_service.h"

namespace holdfast {

class AdminServer {
 public:
  static constexpr size_t kUidsMax = 16;
  static constexpr size_t kConnectionsMax = 256;
  static constexpr size_t kConnectionsPerUidMax = 64;

  static absl::StatusOr<std::unique_ptr<AdminServer>> Start(const v1::AdminConfig& config,
                                                            AdminContext& context);
  ~AdminServer();
  AdminServer(const AdminServer&) = delete;
  AdminServer& operator=(const AdminServer&) = delete;

 private:
  struct Impl;
  explicit AdminServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace holdfast
