#include "ckptctl/sockets.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/env.h"
#include "base/private_place.h"
#include "base/status.h"
#include "base/tcp_socket.h"
#include "holdfast/v1/client.pb.h"

namespace holdfast {
namespace {

std::string Variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

}  // namespace

absl::StatusOr<AdminPlace> FindAdminPlace(const std::string& socket, const std::string& address,
                                          const std::string& tls) {
  if (!socket.empty() && !address.empty()) {
    return absl::InvalidArgumentError("--socket and --address name two places: say one of them");
  }
  AdminPlace place;
  place.address =
      !address.empty() || !socket.empty() ? address : Variable("HOLDFAST_ADMIN_ADDRESS");
  if (place.address.empty()) {
    if (!tls.empty()) {
      return absl::InvalidArgumentError(
          "--tls is for --address HOST:PORT: at a socket nobody shows a certificate");
    }
    place.socket = FindAdminSocket(socket);
    return place;
  }
  const std::string said_by = address.empty() ? "HOLDFAST_ADMIN_ADDRESS" : "--address";
  if (const absl::Status split = SplitAddress(place.address).status(); !split.ok()) {
    return Annotate(split, said_by);
  }
  place.tls = tls.empty() ? Variable("HOLDFAST_ADMIN_TLS") : tls;
  if (place.tls.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        said_by, " ", place.address,
        " is reached by TLS: say with --tls DIR (or HOLDFAST_ADMIN_TLS) where ca.crt, tls.crt and "
        "tls.key are"));
  }
  return place;
}

std::string FindAdminSocket(const std::string& flag) {
  if (!flag.empty()) {
    return flag;
  }
  if (const char* set = std::getenv("HOLDFAST_ADMIN_SOCKET"); set != nullptr && *set != '\0') {
    return set;
  }
  if (const char* runtime = std::getenv("XDG_RUNTIME_DIR"); runtime != nullptr && *runtime == '/') {
    std::string path = absl::StrCat(runtime, "/holdfast/admin.sock");
    struct stat info;
    if (::stat(path.c_str(), &info) == 0) {
      return path;
    }
  }
  const std::string system = "/run/holdfast/admin.sock";
  struct stat info;
  const std::string own = ::stat(system.c_str(), &info) == 0 ? "" : PrivateSocket("admin.sock");
  return own.empty() ? system : own;
}

std::string FindClientSocket(const std::string& client, const std::string& admin) {
  if (!client.empty()) {
    return client;
  }
  if (const std::string set = Variable("HOLDFAST_SOCKET"); admin.empty() && !set.empty()) {
    return set;
  }
  return JoinPath(ParentDirectory(FindAdminSocket(admin)), "ckptd.sock");
}

absl::StatusOr<UniqueFd> ConnectSocket(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof(address.sun_path)) {
    return absl::InvalidArgumentError(absl::StrCat("socket path of ", path.size(), " bytes: 1 to ",
                                                   sizeof(address.sun_path) - 1,
                                                   " are possible: ", path));
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  // Not blocking: a daemon whose backlog is full must not hold us.
  UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) {
    return absl::UnavailableError(Message(ErrnoStatus(errno, "socket", path)));
  }
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) {
    return fd;
  }
  const int error = errno;
  struct stat info;
  if (error == ECONNREFUSED && ::stat(path.c_str(), &info) == 0 && !S_ISSOCK(info.st_mode)) {
    return absl::UnavailableError(
        absl::StrCat(path, " is not a socket: is it the right --socket?"));
  }
  switch (error) {
    case ENOENT:
      return absl::UnavailableError(absl::StrCat(
          "no socket at ", path,
          ": ckptd is not running, or listens elsewhere (--socket PATH). Start it: ckptd"));
    case ECONNREFUSED:
      return absl::UnavailableError(
          absl::StrCat("nobody listens at ", path,
                       ": ckptd has ended. Start it again: ckptd (what was sealed is kept)"));
    case EACCES:
      return absl::UnavailableError(
          absl::StrCat("no permission to connect to ", path, ". Grant it: sudo chmod 0666 ", path));
    case EAGAIN:
      return absl::UnavailableError(
          absl::StrCat("ckptd at ", path, " accepts no connections: it is stuck. Restart it"));
    default:
      return absl::UnavailableError(Message(ErrnoStatus(error, "connect", path)));
  }
}

bool IsClientSocket(const std::string& path, Duration at_most) {
  const absl::StatusOr<UniqueFd> fd = ConnectSocket(path);
  if (!fd.ok()) {
    return false;
  }
  // A frame: the length, little-endian, then the message. Whatever the daemon thinks of this Hello,
  // the answer is a frame with its id.
  v1::ClientFrame hello;
  hello.set_id(1);
  hello.mutable_hello()->set_protocol(1);
  hello.mutable_hello()->set_client("ckptctl");
  const std::string message = hello.SerializeAsString();
  std::string frame = {static_cast<char>(message.size()), 0, 0, 0};
  frame += message;
  if (::send(fd->get(), frame.data(), frame.size(), MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
    return false;
  }
  pollfd answered = {fd->get(), POLLIN, 0};
  std::array<char, 4096> bytes = {};
  constexpr ssize_t kHeader = 4;
  if (::poll(&answered, 1,
             static_cast<int>(
                 std::chrono::duration_cast<std::chrono::milliseconds>(at_most).count())) != 1) {
    return false;
  }
  const ssize_t size = ::recv(fd->get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
  v1::DaemonFrame reply;
  return size > kHeader &&
         reply.ParseFromArray(bytes.data() + kHeader, static_cast<int>(size - kHeader)) &&
         reply.id() == hello.id();
}

}  // namespace holdfast
