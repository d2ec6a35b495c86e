// The system calls under a connection: a unix-domain stream socket that never raises SIGPIPE and
// never waits past a deadline. Plain functions over a descriptor that the caller owns; one thread
// may send while another receives.
//
//   HF_TRY_ASSIGN(ForkClosedFd fd, ConnectUnix("/run/holdfast/ckptd.sock", deadline));
//   HF_TRY(SendAll(fd.get(), frame, deadline));
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "client-lib/src/deadline.h"
#include "client-lib/src/fork_guard.h"
#include "holdfast/status.h"

namespace holdfast::client {

inline constexpr char kSystemSocket[] = "/run/holdfast/ckptd.sock";

// JobOptions::socket, or where ckptd is to be found when that is empty: $HOLDFAST_SOCKET, else
// $XDG_RUNTIME_DIR/holdfast/ckptd.sock or /run/holdfast/ckptd.sock, whichever is there first, else
// the private daemon's (base/private_place.h); when there is none, /run/holdfast/ckptd.sock.
std::string SocketPath(const std::string& wanted);

// One attempt. kUnavailable: nobody listens there.
Result<ForkClosedFd> ConnectUnix(const std::string& path, Deadline deadline);

// kUnavailable when the peer is gone; kDeadlineExceeded when it does not read, and then part of it
// may have been sent.
Status SendAll(int fd, std::string_view bytes, Deadline deadline);

// Without waiting: all of it, or nothing (false) when the peer has too much to read already. A few
// bytes only, which the kernel does not divide.
Result<bool> TrySend(int fd, std::string_view bytes);

// At least one byte, waiting for it until the deadline; descriptors that came along are appended.
// kUnavailable at the end of the stream, kInternal when more descriptors came than any frame has.
Result<size_t> ReceiveSome(int fd, std::span<char> buffer, std::vector<ForkClosedFd>& descriptors,
                           Deadline deadline);

// Whether the peer has closed its end.
bool HungUp(int fd);

}  // namespace holdfast::client
