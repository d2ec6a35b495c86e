// The daemon's sockets, without gRPC: which one is meant, who listens there, and what to do when
// nobody does.
//
//   HF_ASSIGN_OR_RETURN(UniqueFd fd, ConnectSocket(FindAdminSocket(flag)));
//
// Plain functions; nothing waits.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/unique_fd.h"

namespace holdfast {

// Where the admin socket is: `flag`, else $HOLDFAST_ADMIN_SOCKET, else
// $XDG_RUNTIME_DIR/holdfast/admin.sock if there is one, else /run/holdfast/admin.sock if there is
// one, else the private daemon's (base/private_place.h) if there is one.
std::string FindAdminSocket(const std::string& flag);

// Where the daemon is asked: at a socket of this machine, or at a TCP address by TLS.
struct AdminPlace {
  std::string socket;   // empty: by TLS
  std::string address;  // HOST:PORT
  std::string tls;      // directory with ca.crt, tls.crt and tls.key
  const std::string& text() const { return address.empty() ? socket : address; }
};
// What was said on the command line, each maybe empty: --socket, or --address with --tls. Else
// $HOLDFAST_ADMIN_ADDRESS, else the socket that FindAdminSocket finds; $HOLDFAST_ADMIN_TLS where
// --tls is not said. InvalidArgument: they contradict each other, or lack something.
absl::StatusOr<AdminPlace> FindAdminPlace(const std::string& socket, const std::string& address,
                                          const std::string& tls);

// Where training processes and readers connect, for commands that read what was saved: `client` if
// it was said; else ckptd.sock beside the admin socket that was said; else $HOLDFAST_SOCKET; else
// beside the admin socket that FindAdminSocket finds.
std::string FindClientSocket(const std::string& client, const std::string& admin);

// A connected stream socket, not blocking; the status says why not, and what to do about it.
absl::StatusOr<UniqueFd> ConnectSocket(const std::string& path);

// Whether the training processes' protocol is spoken there (docs/protocol.md). Waits for the answer
// at most so long.
bool IsClientSocket(const std::string& path, Duration at_most);

}  // namespace holdfast
