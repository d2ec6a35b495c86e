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

// A connected stream socket, not blocking; the status says why not, and what to do about it.
absl::StatusOr<UniqueFd> ConnectSocket(const std::string& path);

// Whether the training processes' protocol is spoken there (docs/protocol.md). Waits for the answer
// at most so long.
bool IsClientSocket(const std::string& path, Duration at_most);

}  // namespace holdfast
