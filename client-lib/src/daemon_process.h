// What can be said of a daemon that does not answer, without asking it.
//
//   Status(Code::kUnavailable, HangText(fd));   // "ckptd hangs: process 12 at '/run/…' is stopped
//   …"
//
// Looks into /proc. Plain functions, thread-safe.
#pragma once

#include <sys/types.h>

#include <string>

namespace holdfast::client {

// `fd`: of a connection to its socket. Ends with what to do.
std::string HangText(int fd);

// The process that listens at the other end; 0: unknown, as it is in another pid namespace.
pid_t PeerProcess(int fd);

}  // namespace holdfast::client
