// What can be said of a daemon that does not answer, or is not there, without asking it.
//
//   Status(Code::kUnavailable, HangText(fd));   // "ckptd hangs: process 12 at '/run/…' is stopped
//   …"
//
// Looks into /proc. Plain functions, thread-safe.
#pragma once

#include <sys/types.h>

#include <string>

namespace holdfast::client {

// As it is seen from this process.
struct DaemonProcess {
  std::string path;   // of its socket; "": unknown
  pid_t process = 0;  // 0: unknown, as it is in another pid namespace
  uid_t user = 0;
  char state = ' ';         // as proc(5) has it; ' ': unknown
  bool is_own = false;      // a process of this user's may be signalled without sudo
  bool is_private = false;  // the package holdfast started it (base/private_place.h)
};
// Ends with what to do.
std::string HangText(const DaemonProcess& daemon);
// `fd`: of a connection to its socket.
std::string HangText(int fd);

// What to do where nobody listens at that path. `missing`: nor is there a socket.
std::string AbsentText(const std::string& path, bool missing);

// The process that listens at the other end; 0: unknown, as it is in another pid namespace.
pid_t PeerProcess(int fd);

}  // namespace holdfast::client
