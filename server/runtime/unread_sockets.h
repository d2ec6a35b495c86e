// Sockets of connections that ended before their client had read everything. The kernel counts
// descriptors in an unread socket as in flight, for as long as the client keeps its end, and passes
// no more of them for the daemon's user than RLIMIT_NOFILE. So the connection counts as its user's
// until then: who connects again and again without reading runs into the limit of connections.
//
//   UnreadSockets unread(reactor, [&](uint32_t uid) { … });   // one of that user's has ended
//   unread.Keep(uid, std::move(fd));
//
// Owner: the ClientServer; the reactor's thread only.
#pragma once

#include <cstdint>
#include <functional>
#include <unordered_map>

#include "base/unique_fd.h"
#include "server/runtime/reactor.h"

namespace holdfast {

class UnreadSockets {
 public:
  UnreadSockets(Reactor& reactor, std::function<void(uint32_t uid)> ended);
  ~UnreadSockets();
  UnreadSockets(const UnreadSockets&) = delete;
  UnreadSockets& operator=(const UnreadSockets&) = delete;

  // Ends the connection for its client. Keeps the socket, which nobody watches, until the client
  // has read everything or has closed its end; then `ended`, which may be at once.
  void Keep(uint32_t uid, UniqueFd fd);
  // `ended` now for those of the user of which the loop has not heard yet.
  void LookAt(uint32_t uid);

  size_t size() const { return sockets_.size(); }

 private:
  struct Socket {
    uint32_t uid = 0;
    UniqueFd fd;
  };
  void Look(int fd);

  Reactor& reactor_;
  const std::function<void(uint32_t uid)> ended_;
  std::unordered_map<int, Socket> sockets_;  // by descriptor
};

}  // namespace holdfast
