#include "server/runtime/unread_sockets.h"

#include <linux/sockios.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <utility>
#include <vector>

namespace holdfast {
namespace {

// The kernel counts some hundred bytes for anything that is unread. Of what is being read just now
// it counts one byte a moment longer, and tells us before that.
constexpr int kUnreadBytesMin = 64;

bool IsRead(int fd) {
  int unread = 0;
  return ::ioctl(fd, SIOCOUTQ, &unread) != 0 || unread < kUnreadBytesMin;
}

}  // namespace

UnreadSockets::UnreadSockets(Reactor& reactor, std::function<void(uint32_t uid)> ended)
    : reactor_(reactor), ended_(std::move(ended)) {}

UnreadSockets::~UnreadSockets() {
  for (const auto& [fd, socket] : sockets_) {
    reactor_.Unwatch(fd);
  }
}

void UnreadSockets::Keep(uint32_t uid, UniqueFd fd) {
  const int socket = fd.get();
  ::shutdown(socket, SHUT_RDWR);
  // Edge-triggered: a socket that was shut down is always ready, but the kernel tells us again
  // whenever the client has read something.
  if (IsRead(socket) ||
      !reactor_.Watch(socket, EPOLLOUT | EPOLLET, [this, socket](uint32_t) { Look(socket); })
           .ok()) {
    fd.reset();
    return ended_(uid);
  }
  sockets_.emplace(socket, Socket{uid, std::move(fd)});
}

void UnreadSockets::LookAt(uint32_t uid) {
  std::vector<int> of_user;
  for (const auto& [fd, socket] : sockets_) {
    if (socket.uid == uid) {
      of_user.push_back(fd);
    }
  }
  for (const int fd : of_user) {
    Look(fd);
  }
}

void UnreadSockets::Look(int fd) {
  const auto found = sockets_.find(fd);
  if (found == sockets_.end() || !IsRead(fd)) {
    return;
  }
  const Socket socket = std::move(found->second);
  sockets_.erase(found);
  reactor_.Unwatch(fd);
  ended_(socket.uid);
}

}  // namespace holdfast
