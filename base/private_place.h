// Where the daemon lies that the Python package starts for one user, when the machine has none
// (client-lib/python/holdfast/_daemon.py has the other half): found by user alone, so that the next
// program finds it again, from whatever login.
//
//   const std::string socket = PrivateSocket("ckptd.sock");
//   if (!socket.empty()) { … }
//
// Plain functions; any thread.
#pragma once

#include <string>
#include <string_view>

namespace holdfast {

// $HOLDFAST_PRIVATE_DIR, or /dev/shm/holdfast-private-<uid>; whether there is one or not.
std::string PrivatePlace();

// The path of a socket there; empty when there is none, or when the directory is not this user's
// own alone: anybody can make a directory of that name, and would be given the training's state.
std::string PrivateSocket(std::string_view name);

}  // namespace holdfast
