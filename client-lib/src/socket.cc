#include "client-lib/src/socket.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "absl/strings/str_cat.h"
#include "base/private_place.h"
#include "base/status.h"
#include "client-lib/src/daemon_process.h"
#include "client-lib/src/errors.h"

namespace holdfast::client {
namespace {

constexpr size_t kDescriptorsMax = 16;  // in one read; a frame has at most two

Status Gone(std::string_view doing) {
  return Status(Code::kUnavailable,
                absl::StrCat(ToAbsl(doing),
                             ": ckptd closed the connection (it was stopped or restarted, or "
                             "refused what it got; see its log)"));
}

Status WaitFor(int fd, short events, Deadline deadline, std::string_view doing) {
  while (true) {
    struct pollfd poll_fd = {fd, events, 0};
    const int ready = ::poll(&poll_fd, 1, deadline.PollMillis());
    const int error = errno;
    if (ready > 0) {
      return Status();
    }
    deadline.Look();
    if (deadline.passed()) {
      return Status(Code::kDeadlineExceeded,
                    absl::StrCat(ToAbsl(doing), ": no answer from ckptd in time"));
    }
    if (ready < 0 && error != EINTR) {
      return SystemError(Code::kInternal, error, doing);
    }
  }
}

Status ConnectError(int error, const std::string& path) {
  const bool denied = error == EACCES || error == EPERM;
  const std::string what = absl::StrCat("connect to ckptd at '", path, "'");
  const Status status = SystemError(denied ? Code::kRefused : Code::kUnavailable, error, what);
  return Status(status.code(), absl::StrCat(status.message(), ": ",
                                            denied ? "this user may not use that daemon's socket"
                                                   : AbsentText(path, error == ENOENT)));
}

// Takes the descriptors out of a received message; false when some were cut off.
bool TakeDescriptors(struct msghdr& message, std::vector<ForkClosedFd>& out) {
  for (struct cmsghdr* control = CMSG_FIRSTHDR(&message); control != nullptr;
       control = CMSG_NXTHDR(&message, control)) {
    if (control->cmsg_level != SOL_SOCKET || control->cmsg_type != SCM_RIGHTS) {
      continue;
    }
    const size_t count = (control->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(control) + i * sizeof(int), sizeof(int));
      out.emplace_back(UniqueFd(fd));
    }
  }
  return (message.msg_flags & MSG_CTRUNC) == 0;
}

ForkClosedFd MakeSocket() {
  const NoFork no_fork;
  return ForkClosedFd(UniqueFd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)));
}

}  // namespace

std::string SocketPath(const std::string& wanted) {
  if (!wanted.empty()) {
    return wanted;
  }
  if (const char* path = std::getenv("HOLDFAST_SOCKET"); path != nullptr && *path != '\0') {
    return path;
  }
  if (const char* runtime = std::getenv("XDG_RUNTIME_DIR");
      runtime != nullptr && *runtime != '\0') {
    std::string path = absl::StrCat(runtime, "/holdfast/ckptd.sock");
    if (::access(path.c_str(), F_OK) == 0) {
      return path;
    }
  }
  const std::string own = ::access(kSystemSocket, F_OK) == 0 ? "" : PrivateSocket("ckptd.sock");
  return own.empty() ? kSystemSocket : own;
}

Result<ForkClosedFd> ConnectUnix(const std::string& path, Deadline deadline) {
  struct sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path) || path.find('\0') != std::string::npos) {
    return Status(Code::kInvalidArgument,
                  absl::StrCat("connect to ckptd at '", path.substr(0, 256),
                               "': a socket's path has at most ", sizeof(address.sun_path) - 1,
                               " bytes and no zero byte"));
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  ForkClosedFd fd = MakeSocket();
  if (!fd.valid()) {
    return SystemError(Code::kInternal, errno, "create a socket");
  }
  while (::connect(fd.get(), reinterpret_cast<const struct sockaddr*>(&address), sizeof(address)) !=
         0) {
    if (errno != EAGAIN && errno != EINTR) {
      return ConnectError(errno, path);
    }
    // The daemon's queue of new connections is full; there is nothing to poll for.
    deadline.Look();
    if (deadline.passed()) {
      return Status(Code::kDeadlineExceeded, absl::StrCat("connect to ckptd at '", path,
                                                          "': it does not accept connections"));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return fd;
}

Status SendAll(int fd, std::string_view bytes, Deadline deadline) {
  while (!bytes.empty()) {
    const ssize_t sent = ::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent > 0) {
      bytes.remove_prefix(static_cast<size_t>(sent));
    } else if (errno == EAGAIN) {
      HF_TRY(WaitFor(fd, POLLOUT, deadline, "send a request"));
    } else if (errno == EPIPE || errno == ECONNRESET || errno == ENOTCONN) {
      return Gone("send a request");
    } else if (errno != EINTR) {
      return SystemError(Code::kUnavailable, errno, "send a request to ckptd");
    }
  }
  return Status();
}

Result<bool> TrySend(int fd, std::string_view bytes) {
  const ssize_t sent = ::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent < 0 && (errno == EAGAIN || errno == EINTR)) {
    return false;
  }
  if (sent != static_cast<ssize_t>(bytes.size())) {
    return Gone("send a request");
  }
  return true;
}

Result<size_t> ReceiveSome(int fd, std::span<char> buffer, std::vector<ForkClosedFd>& descriptors,
                           Deadline deadline) {
  while (true) {
    struct iovec piece = {buffer.data(), buffer.size()};
    alignas(struct cmsghdr) char control[CMSG_SPACE(kDescriptorsMax * sizeof(int))];
    struct msghdr message = {};
    message.msg_iov = &piece;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    ssize_t got = 0;
    int error = 0;
    bool whole = true;
    {
      const NoFork no_fork;  // a child would have the descriptors that come
      got = ::recvmsg(fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
      error = errno;
      whole = got <= 0 || TakeDescriptors(message, descriptors);
    }
    if (got > 0) {
      if (!whole) {
        return Status(
            Code::kInternal,
            absl::StrCat(
                "ckptd sent more than ", kDescriptorsMax,
                " descriptors at once, or this process may open no more files (ulimit -n)"));
      }
      return static_cast<size_t>(got);
    }
    if (got == 0 || error == ECONNRESET || error == ENOTCONN) {
      return Gone("wait for an answer");
    }
    if (error == EAGAIN) {
      HF_TRY(WaitFor(fd, POLLIN, deadline, "wait for an answer"));
    } else if (error != EINTR) {
      return SystemError(Code::kUnavailable, error, "receive from ckptd");
    }
  }
}

bool HungUp(int fd) {
  struct pollfd poll_fd = {fd, POLLRDHUP, 0};
  return ::poll(&poll_fd, 1, 0) > 0 && (poll_fd.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
}

}  // namespace holdfast::client
