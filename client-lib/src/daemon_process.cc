#include "client-lib/src/daemon_process.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <fstream>
#include <iterator>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "base/private_place.h"
#include "client-lib/src/socket.h"

namespace holdfast::client {
namespace {

// A private daemon is started by programs alone (docs/install.md).
constexpr char kNextProgramStartsOne[] =
    "The next program that opens a holdfast.Checkpointer starts another one: "
    "python3 -c 'import holdfast; holdfast.Checkpointer(\"again\").close()'";

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

// Pid 0: unknown.
struct ucred Peer(int fd) {
  struct ucred peer = {};
  socklen_t length = sizeof(peer);
  return ::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 ? peer : ucred{};
}

bool IsPrivate(const std::string& path) {
  return path == absl::StrCat(PrivatePlace(), "/ckptd.sock");
}

// As client-lib/python/holdfast/_daemon.py reads it.
bool IsNo(const char* value) {
  const std::string word = absl::AsciiStrToLower(absl::StripAsciiWhitespace(value));
  return word == "0" || word == "false" || word == "no" || word == "off";
}

}  // namespace

pid_t PeerProcess(int fd) {
  return Peer(fd).pid;
}

std::string HangText(const DaemonProcess& daemon) {
  const std::string sudo = daemon.is_own ? "" : "sudo ";
  const std::string pid = std::to_string(daemon.process);
  const std::string who = absl::StrCat(
      "ckptd hangs: ", daemon.process == 0 ? "the process" : absl::StrCat("process ", pid),
      daemon.path.empty() ? "" : absl::StrCat(" at '", daemon.path, "'"));
  switch (daemon.state) {
    case 'T':
    case 't':
      return absl::StrCat(who, " is stopped. To let it continue: ", sudo, "kill -CONT ", pid);
    case 'D':
      return absl::StrCat(who,
                          " waits for a disk or a mount that does not answer, and continues when "
                          "that does. Its log, and `dmesg`, may name it");
    case 'Z':
      return absl::StrCat(who, " has ended, and its last system call has not. ",
                          daemon.is_private ? kNextProgramStartsOne
                          : daemon.user == 0
                              ? absl::StrCat("To start another: ", sudo, "systemctl restart ckptd")
                              : "Start ckptd again, as it was started before");
    default:
      break;
  }
  const std::string what = absl::StrCat(who, " does not answer. See its log. If that goes on: ");
  if (daemon.process == 0) {
    return absl::StrCat(what, "restart ckptd on its node (systemctl restart ckptd, or its pod)");
  }
  if (daemon.is_private) {
    return absl::StrCat(what, "kill -KILL ", pid, ". ", kNextProgramStartsOne);
  }
  return daemon.user == 0 ? absl::StrCat(what, sudo, "systemctl restart ckptd")
                          : absl::StrCat(what, sudo, "kill -KILL ", pid, ", and start ckptd again");
}

std::string HangText(int fd) {
  const struct ucred peer = Peer(fd);
  DaemonProcess daemon;
  daemon.path = PeerPath(fd);
  daemon.process = peer.pid;
  daemon.user = peer.uid;
  daemon.state = peer.pid == 0 ? ' ' : StateOf(peer.pid);
  daemon.is_own = ::geteuid() == 0 || peer.uid == ::geteuid();
  daemon.is_private = IsPrivate(daemon.path);
  return HangText(daemon);
}

std::string AbsentText(const std::string& path, bool missing) {
  const bool is_private = IsPrivate(path);
  const char* const start = std::getenv("HOLDFAST_START_DAEMON");
  const bool could_start = is_private || (missing && path == kSystemSocket);
  if (could_start && start != nullptr && IsNo(start)) {
    return absl::StrCat(
        "is ckptd running? Start it, or name its socket in HOLDFAST_SOCKET. Or unset "
        "HOLDFAST_START_DAEMON (it is '",
        start, "'): then the Python package starts a private one");
  }
  if (is_private) {
    return absl::StrCat("the private ckptd has ended, see '", PrivatePlace(), "/ckptd.log'. ",
                        kNextProgramStartsOne, ", and this one continues with that");
  }
  return "is ckptd running? Start it, or name its socket in JobOptions::socket or HOLDFAST_SOCKET";
}

}  // namespace holdfast::client
