#include "client-lib/src/daemon_process.h"

#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cstddef>
#include <fstream>
#include <iterator>

#include "absl/strings/str_cat.h"

namespace holdfast::client {
namespace {

std::string PeerPath(int fd) {
  struct sockaddr_un address = {};
  socklen_t length = sizeof(address);
  constexpr size_t kBefore = offsetof(struct sockaddr_un, sun_path);
  if (::getpeername(fd, reinterpret_cast<struct sockaddr*>(&address), &length) != 0 ||
      length <= kBefore || address.sun_path[0] == '\0') {
    return "";
  }
  std::string path(address.sun_path, std::min<size_t>(length, sizeof(address)) - kBefore);
  return path.substr(0, path.find('\0'));
}

// As proc(5) has it; ' ' where that cannot be read.
char StateOf(pid_t process) {
  std::ifstream file(absl::StrCat("/proc/", process, "/stat"));
  const std::string stat((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const size_t name_end = stat.rfind(')');  // the name may have any character
  return name_end == std::string::npos || name_end + 2 >= stat.size() ? ' ' : stat[name_end + 2];
}

}  // namespace

pid_t PeerProcess(int fd) {
  struct ucred peer = {};
  socklen_t length = sizeof(peer);
  return ::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 ? peer.pid : 0;
}

std::string HangText(int fd) {
  const std::string path = PeerPath(fd);
  const pid_t process = PeerProcess(fd);
  const std::string who = absl::StrCat("ckptd hangs: ", process == 0 ? "the process" : "process ",
                                       process == 0 ? "" : std::to_string(process),
                                       path.empty() ? "" : absl::StrCat(" at '", path, "'"));
  switch (process == 0 ? ' ' : StateOf(process)) {
    case 'T':
    case 't':
      return absl::StrCat(who, " is stopped. To let it continue: kill -CONT ", process);
    case 'D':
      return absl::StrCat(who,
                          " waits for a disk or a mount that does not answer, and continues when "
                          "that does. Its log, and `dmesg`, may name it");
    case 'Z':
      return absl::StrCat(who, " has ended, and its last system call has not. Start another ckptd");
    default:
      return absl::StrCat(who,
                          " says nothing. See its log; restart it if it stays so (systemctl "
                          "restart ckptd)");
  }
}

}  // namespace holdfast::client
