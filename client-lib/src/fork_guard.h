// What a forked child must not have. fork() copies the library's objects into the child, where
// their threads, their place in the job and their slots do not exist; so every object remembers in
// which process it was made. Sockets, and descriptors of slots and copies, are closed in the child
// at once: a child that kept a socket would look like a living rank, and one that kept a slot would
// keep its memory. What is mapped is the parent's alone.
//
//   class Connection { … ForkOwner owner_; ForkClosedFd fd_; };
//   if (owner_.forked()) return ForkedError();
//
// Other threads of the program may fork at any moment, also between two calls here: so a descriptor
// is made under a NoFork, and a file is mapped by MapNotInherited.
//
// Thread-safe. An object that is destroyed in a child must leave alone what it cannot have: it
// leaks on purpose.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "base/unique_fd.h"

namespace holdfast::client {

class ForkOwner {
 public:
  ForkOwner();
  bool forked() const;

 private:
  uint64_t generation_;
};

// While it lives, no thread forks. Only around calls that wait for nothing: whoever forks waits.
//
//   const NoFork no_fork;
//   return ForkClosedFd(UniqueFd(::socket(…)));
class NoFork {
 public:
  NoFork();
  ~NoFork();
  NoFork(const NoFork&) = delete;
  NoFork& operator=(const NoFork&) = delete;
};

// Owns a descriptor; closes it in this process when destroyed, and in every child as it is forked.
class ForkClosedFd {
 public:
  explicit ForkClosedFd(UniqueFd fd);
  ~ForkClosedFd() { Close(); }
  ForkClosedFd(ForkClosedFd&&) noexcept = default;
  ForkClosedFd& operator=(ForkClosedFd&& other) noexcept;
  bool valid() const { return fd_.valid(); }
  int get() const { return fd_.get(); }

 private:
  void Close();

  ForkOwner owner_;
  UniqueFd fd_;
};

// As ::mmap with MAP_FIXED over a reservation of the caller's, of a mapping that no child has
// (MADV_DONTFORK), not even one that another thread forks meanwhile. MAP_FAILED and errno: then the
// caller unmaps the reservation.
void* MapNotInherited(void* at, size_t bytes, int protection, int flags, int fd);

}  // namespace holdfast::client
