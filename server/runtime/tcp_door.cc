#include "server/runtime/tcp_door.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/status.h"
#include "base/tcp_socket.h"

namespace holdfast {
namespace {

constexpr int kDoorBacklog = 128;
constexpr Duration kDoorPause = std::chrono::milliseconds(100);

}  // namespace

absl::StatusOr<std::unique_ptr<TcpDoor>> TcpDoor::Open(Reactor& reactor, Options options) {
  HF_ASSIGN_OR_RETURN(UniqueFd listening, ListenTcp(options.address, kDoorBacklog));
  std::unique_ptr<TcpDoor> door(new TcpDoor(reactor, std::move(options), std::move(listening)));
  HF_RETURN_IF_ERROR(reactor.Watch(door->listening_.get(), EPOLLIN,
                                   [raw = door.get()](uint32_t) { raw->Accept(); }));
  return door;
}

TcpDoor::TcpDoor(Reactor& reactor, Options options, UniqueFd listening)
    : reactor_(reactor),
      options_(std::move(options)),
      listening_(std::move(listening)),
      accept_timer_(reactor.AddTimer([this] { reactor_.Change(listening_.get(), EPOLLIN); })),
      silence_timer_(reactor.AddTimer([this] { CloseTheSilent(); })) {}

TcpDoor::~TcpDoor() {
  reactor_.Disarm(accept_timer_);
  reactor_.Disarm(silence_timer_);
  reactor_.Unwatch(listening_.get());
  while (!visitors_.empty()) {
    Leave(visitors_.begin());
  }
}

int TcpDoor::port() const {
  return LocalPort(listening_.get());
}

void TcpDoor::Accept() {
  UniqueFd fd(::accept4(listening_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (!fd.valid()) {
    if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
      reactor_.Change(listening_.get(), 0);
      reactor_.Arm(accept_timer_, reactor_.clock().Now() + kDoorPause);
    }
    return;
  }
  const Visit visit = next_++;
  // Edge-triggered: what lies there unread must not wake us again and again.
  if (!reactor_
           .Watch(fd.get(), EPOLLIN | EPOLLRDHUP | EPOLLET,
                  [this, visit](uint32_t events) { Listen(visit, events); })
           .ok()) {
    return;
  }
  visitors_.emplace(visit, Visitor{std::move(fd), reactor_.clock().Now() + options_.silence_max});
  if (visitors_.size() == 1) {
    reactor_.Arm(silence_timer_, visitors_.begin()->second.until);
  }
  if (visitors_.size() > options_.silent_max) {
    Leave(visitors_.begin());
  }
}

void TcpDoor::Listen(Visit visit, uint32_t events) {
  const auto found = visitors_.find(visit);
  if (found == visitors_.end()) {
    return;
  }
  std::string said(options_.looked_at_max, '\0');
  const ssize_t size =
      ::recv(found->second.fd.get(), said.data(), said.size(), MSG_PEEK | MSG_DONTWAIT);
  if (size < 0 && (errno == EAGAIN || errno == EINTR)) {
    return;
  }
  said.resize(static_cast<size_t>(std::max<ssize_t>(size, 0)));
  const Heard heard = size <= 0 ? Heard::kNonsense : options_.heard(said);
  // (Whoever says nothing more has said it all.)
  if (heard == Heard::kMore && (events & (EPOLLRDHUP | EPOLLHUP)) == 0) {
    return;
  }
  UniqueFd fd = Leave(found);
  if (heard == Heard::kAll) {
    options_.enter(std::move(fd));
  }
}

UniqueFd TcpDoor::Leave(std::map<Visit, Visitor>::iterator visitor) {
  UniqueFd fd = std::move(visitor->second.fd);
  visitors_.erase(visitor);
  reactor_.Unwatch(fd.get());
  return fd;
}

void TcpDoor::CloseTheSilent() {
  const MonotonicTime now = reactor_.clock().Now();
  while (!visitors_.empty() && visitors_.begin()->second.until <= now) {
    Leave(visitors_.begin());
  }
  if (!visitors_.empty()) {
    reactor_.Arm(silence_timer_, visitors_.begin()->second.until);
  }
}

}  // namespace holdfast
