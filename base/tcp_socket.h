// TCP sockets that do not block, by addresses as settings have them: HOST:PORT, [::1]:PORT.
//
//   HF_ASSIGN_OR_RETURN(const UniqueFd listening, ListenTcp("127.0.0.1:0", 16));
//   HF_ASSIGN_OR_RETURN(const UniqueFd fd, ConnectTcp("node-1:9466", until));
//
// Plain functions. Both ask the resolver, which may take its time; ConnectTcp waits until then.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/unique_fd.h"

namespace holdfast {

struct HostAndPort {
  std::string host;  // without brackets
  std::string port;
};
// Of an address of that form; InvalidArgument otherwise.
absl::StatusOr<HostAndPort> SplitAddress(const std::string& address);

absl::StatusOr<UniqueFd> ListenTcp(const std::string& address, int backlog);
// Tries what the name stands for in turn. DeadlineExceeded: nobody answered in time; NotFound:
// there is no such host; Unavailable: nobody listens, or no way leads there. `until` is of the
// system's clock.
absl::StatusOr<UniqueFd> ConnectTcp(const std::string& address, MonotonicTime until);

// The socket's own port; 0 if it has none.
int LocalPort(int fd);
// "10.0.0.1:4711": the other end; "?" if there is none.
std::string RemoteAddress(int fd);

// Ready for poll()'s `events` (true), or not until then.
bool AwaitReady(int fd, int16_t events, MonotonicTime until);

}  // namespace holdfast
