#include "base/tcp_socket.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace holdfast {
namespace {

struct FreeAddresses {
  void operator()(addrinfo* of) const { ::freeaddrinfo(of); }
};
using Addresses = std::unique_ptr<addrinfo, FreeAddresses>;

absl::StatusOr<Addresses> Resolve(const std::string& address, int flags) {
  HF_ASSIGN_OR_RETURN(const HostAndPort parts, SplitAddress(address));
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  if (const int error = ::getaddrinfo(parts.host.c_str(), parts.port.c_str(), &hints, &found);
      error != 0) {
    return absl::NotFoundError(
        absl::StrCat("look up the host '", parts.host, "': ", ::gai_strerror(error)));
  }
  return Addresses(found);
}

UniqueFd Socket(const addrinfo& of) {
  return UniqueFd(::socket(of.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
}

std::string AddressText(const sockaddr_storage& address) {
  std::array<char, INET6_ADDRSTRLEN> text = {};
  if (address.ss_family == AF_INET) {
    const auto* v4 = reinterpret_cast<const sockaddr_in*>(&address);
    ::inet_ntop(AF_INET, &v4->sin_addr, text.data(), text.size());
    return absl::StrCat(text.data(), ":", ntohs(v4->sin_port));
  }
  if (address.ss_family == AF_INET6) {
    const auto* v6 = reinterpret_cast<const sockaddr_in6*>(&address);
    ::inet_ntop(AF_INET6, &v6->sin6_addr, text.data(), text.size());
    return absl::StrCat("[", text.data(), "]:", ntohs(v6->sin6_port));
  }
  return "?";
}

absl::Status ConnectTo(const addrinfo& where, const std::string& address, MonotonicTime until,
                       UniqueFd& connected) {
  UniqueFd fd = Socket(where);
  if (!fd.valid()) {
    return ErrnoStatus(errno, "socket", address);
  }
  int error = ::connect(fd.get(), where.ai_addr, where.ai_addrlen) == 0 ? 0 : errno;
  if (error == EINPROGRESS) {
    if (!AwaitReady(fd.get(), POLLOUT, until)) {
      return absl::DeadlineExceededError(absl::StrCat("connect to '", address, "': no answer"));
    }
    socklen_t size = sizeof(error);
    if (::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &size) != 0) {
      error = errno;
    }
  }
  if (error != 0) {
    const absl::Status status = ErrnoStatus(error, "connect to", address);
    return error == ETIMEDOUT ? status : absl::UnavailableError(Message(status));
  }
  const int yes = 1;
  ::setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));
  connected = std::move(fd);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<HostAndPort> SplitAddress(const std::string& address) {
  const size_t colon = address.rfind(':');
  HostAndPort parts;
  if (colon != std::string::npos) {
    parts = {address.substr(0, colon), address.substr(colon + 1)};
  }
  std::string& host = parts.host;
  const bool brackets = host.size() > 2 && host.front() == '[' && host.back() == ']';
  if (brackets) {
    host = host.substr(1, host.size() - 2);
  }
  const bool number = !parts.port.empty() && parts.port.size() <= 5 &&
                      parts.port.find_first_not_of("0123456789") == std::string::npos &&
                      std::stoi(parts.port) <= 65'535;
  if (host.empty() || !number || (!brackets && host.find(':') != std::string::npos) ||
      host.find_first_of(std::string("[]/ \t\r\n\0", 9)) != std::string::npos) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", address.substr(0, 128), "' is not HOST:PORT, nor [ADDRESS]:PORT"));
  }
  return parts;
}

absl::StatusOr<UniqueFd> ListenTcp(const std::string& address, int backlog) {
  HF_ASSIGN_OR_RETURN(const Addresses found, Resolve(address, AI_PASSIVE));
  UniqueFd fd = Socket(*found);
  const int yes = 1;
  if (!fd.valid() || ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes)) != 0 ||
      ::bind(fd.get(), found->ai_addr, found->ai_addrlen) != 0 ||
      ::listen(fd.get(), backlog) != 0) {
    return ErrnoStatus(errno, "listen", address);
  }
  return fd;
}

absl::StatusOr<UniqueFd> ConnectTcp(const std::string& address, MonotonicTime until) {
  HF_ASSIGN_OR_RETURN(const Addresses found, Resolve(address, 0));
  absl::Status last = absl::NotFoundError(absl::StrCat("'", address, "' stands for no address"));
  for (const addrinfo* one = found.get(); one != nullptr; one = one->ai_next) {
    UniqueFd connected;
    last = ConnectTo(*one, address, until, connected);
    if (last.ok()) {
      return connected;
    }
  }
  return last;
}

int LocalPort(int fd) {
  sockaddr_storage address = {};
  socklen_t size = sizeof(address);
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    return 0;
  }
  return ntohs(address.ss_family == AF_INET6
                   ? reinterpret_cast<const sockaddr_in6*>(&address)->sin6_port
                   : reinterpret_cast<const sockaddr_in*>(&address)->sin_port);
}

std::string RemoteAddress(int fd) {
  sockaddr_storage address = {};
  socklen_t size = sizeof(address);
  return ::getpeername(fd, reinterpret_cast<sockaddr*>(&address), &size) == 0 ? AddressText(address)
                                                                              : "?";
}

bool AwaitReady(int fd, int16_t events, MonotonicTime until) {
  for (;;) {
    const Duration left = until - Clock::System()->Now();
    if (left <= Duration(0)) {
      return false;
    }
    pollfd one = {fd, events, 0};
    // Rounded up: not to turn round and round in the last millisecond.
    const auto ms = std::chrono::ceil<std::chrono::milliseconds>(left).count();
    const int ready = ::poll(&one, 1, static_cast<int>(std::min<int64_t>(ms, INT_MAX)));
    if (ready > 0 || (ready < 0 && errno != EINTR)) {
      return true;  // an error shows in the next call
    }
  }
}

}  // namespace holdfast
