// Unix-domain sockets of the daemon: listening at a path that a dead daemon may have left behind,
// and who the peer is.
//
//   HF_ASSIGN_OR_RETURN(ListeningSocket socket, ListeningSocket::Open("/run/holdfast/ckptd.sock",
//   0666)); HF_ASSIGN_OR_RETURN(const Peer peer, IdentifyPeer(fd));
//
// Plain values and functions; each socket has one owner.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/daemon_lock.h"
#include "base/ids.h"
#include "base/unique_fd.h"

namespace holdfast {

class ListeningSocket {
 public:
  // Non-blocking, O_CLOEXEC. A socket file where nobody listens, or a dying daemon does, is
  // replaced; where somebody else does: Unavailable; where something else lies: FailedPrecondition.
  // Makes the parent directory.
  static absl::StatusOr<ListeningSocket> Open(const std::string& path, uint32_t mode);
  ListeningSocket() = default;
  ~ListeningSocket();  // removes the file, if it is still this socket's
  ListeningSocket(ListeningSocket&& other) noexcept;
  ListeningSocket& operator=(ListeningSocket&& other) noexcept;

  int fd() const { return fd_.get(); }
  const std::string& path() const { return path_; }
  void Close();

 private:
  // `<path>.lock`: so that two daemons that start at once do not remove each other's.
  DaemonLock lock_;
  UniqueFd fd_;
  std::string path_;
  uint64_t inode_ = 0;
};

struct Peer {
  ProcessId process;
  uint32_t uid = 0;
  uint32_t gid = 0;
};
// The process at the other end of a connected socket, from the kernel alone. NotFound when it has
// ended.
absl::StatusOr<Peer> IdentifyPeer(int fd);

// Longest path that a socket may have (sun_path less its end).
inline constexpr size_t kSocketPathBytesMax = 107;

// Until connections are accepted again when there was no descriptor for one.
inline constexpr Duration kAcceptPause = std::chrono::milliseconds(100);

}  // namespace holdfast
