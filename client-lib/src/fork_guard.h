// What a forked child must not have. fork() copies the library's objects into the child, where
// their threads, their place in the job and their slots do not exist; so every object remembers in
// which process it was made, and the sockets are closed in the child at once (a child that kept one
// would look like a living rank).
//
//   class Connection { … ForkOwner owner_; ForkClosedFd fd_; };
//   if (owner_.forked()) return ForkedError();
//
// Thread-safe. An object that is destroyed in a child must leave alone what it cannot have: it
// leaks on purpose.
#pragma once

#include <cstdint>

#include "base/unique_fd.h"

namespace holdfast::client {

class ForkOwner {
 public:
  ForkOwner();
  bool forked() const;

 private:
  uint64_t generation_;
};

// Owns a descriptor; closes it in this process when destroyed, and in every child as it is forked.
class ForkClosedFd {
 public:
  explicit ForkClosedFd(UniqueFd fd);
  ~ForkClosedFd();
  ForkClosedFd(const ForkClosedFd&) = delete;
  ForkClosedFd& operator=(const ForkClosedFd&) = delete;
  int get() const { return fd_.get(); }

 private:
  UniqueFd fd_;
};

}  // namespace holdfast::client
