#include "server/runtime/unix_socket.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/daemon_lock.h"
#include "base/env.h"
#include "base/process.h"
#include "base/status.h"

// Since Linux 6.5; the number is that of asm-generic, which all but a few old architectures use.
#if !defined(SO_PEERPIDFD) && \
    (defined(__x86_64__) || defined(__aarch64__) || defined(__riscv) || defined(__powerpc64__))
#define SO_PEERPIDFD 77
#endif

namespace holdfast {
namespace {

constexpr int kBacklog = 512;
constexpr char kLockSuffix[] = ".lock";

sockaddr_un Address(const std::string& path) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

UniqueFd NewSocket() {
  return UniqueFd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
}

// Whose listening socket it is connected to; 0: unknown.
int32_t ListenerOf(int fd) {
  ucred credentials = {};
  socklen_t size = sizeof(credentials);
  return ::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &size) == 0 ? credentials.pid : 0;
}

// Nobody but those: the kernel takes connections for a dying process until that is gone.
absl::Status CheckNobodyListens(const std::string& path, const std::vector<ProcessId>& dying) {
  const UniqueFd probe = NewSocket();
  if (!probe.valid()) {
    return ErrnoStatus(errno, "socket", path);
  }
  const sockaddr_un address = Address(path);
  const bool connected =
      ::connect(probe.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
  const int error = connected ? 0 : errno;
  // (So many wait there that one more may not: then nothing says whose socket it is.)
  const bool full = error == EAGAIN;
  const bool of_dying =
      (full && !dying.empty()) ||
      (connected && std::any_of(dying.begin(), dying.end(), [&](const ProcessId& process) {
         return process.pid == ListenerOf(probe.get());
       }));
  if (of_dying || error == ECONNREFUSED) {
    return absl::OkStatus();
  }
  if (connected || full) {
    return absl::UnavailableError(absl::StrCat(
        "listen on '", path,
        "': another process already listens there; stop it first, or choose another path"));
  }
  return ErrnoStatus(error, "probe who listens on", path);
}

// OK when nothing is at `path`, or was and is gone now.
absl::Status RemoveStale(const std::string& path, const std::vector<ProcessId>& dying) {
  Env& env = *Env::System();
  const absl::StatusOr<FileInfo> info = env.Info(path);
  if (absl::IsNotFound(info.status())) {
    return absl::OkStatus();
  }
  HF_RETURN_IF_ERROR(info.status());
  if (!S_ISSOCK(info->mode)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "listen on '", path,
        "': something that is not a socket lies there; remove it or choose another path"));
  }
  HF_RETURN_IF_ERROR(CheckNobodyListens(path, dying));
  const absl::Status removed = env.Unlink(path);
  return absl::IsNotFound(removed) ? absl::OkStatus() : removed;
}

bool EndedAlready(int pidfd) {
  pollfd ended = {pidfd, POLLIN, 0};
  return ::poll(&ended, 1, 0) != 0;
}

// A descriptor of the very process that connected, where the kernel keeps one for us; else of
// whoever has its number now, which is somebody else only if the peer is gone: then the socket has
// hung up too.
absl::StatusOr<UniqueFd> OpenPeer(int fd, int32_t pid) {
#ifdef SO_PEERPIDFD
  int pidfd = -1;
  socklen_t size = sizeof(pidfd);
  if (::getsockopt(fd, SOL_SOCKET, SO_PEERPIDFD, &pidfd, &size) == 0) {
    return UniqueFd(pidfd);
  }
  if (errno != ENOPROTOOPT) {
    return absl::NotFoundError(absl::StrCat("pid ", pid, " has ended"));
  }
#endif
  UniqueFd opened(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  if (!opened.valid()) {
    return ErrnoStatus(errno == ESRCH ? ENOENT : errno, "pidfd_open", absl::StrCat("pid ", pid));
  }
  pollfd hung_up = {fd, 0, 0};
  if (::poll(&hung_up, 1, 0) != 0) {
    return absl::NotFoundError(absl::StrCat("pid ", pid, " has closed the connection"));
  }
  return opened;
}

}  // namespace

absl::StatusOr<ListeningSocket> ListeningSocket::Open(const std::string& path, uint32_t mode) {
  if (path.empty() || path[0] != '/' || path.size() > kSocketPathBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat("listen on '", path,
                                                   "': the path must be absolute and at most ",
                                                   kSocketPathBytesMax, " bytes long"));
  }
  HF_RETURN_IF_ERROR(Env::System()->CreateDirectories(ParentDirectory(path), 0755));
  ListeningSocket socket;
  HF_ASSIGN_OR_RETURN(socket.lock_, DaemonLock::Take(*Env::System(), path + kLockSuffix));
  HF_RETURN_IF_ERROR(RemoveStale(path, socket.lock_.dying()));
  socket.fd_ = NewSocket();
  if (!socket.fd_.valid()) {
    return ErrnoStatus(errno, "socket", path);
  }
  // Nobody can connect before listen(), so the mode is right before the first does.
  const sockaddr_un address = Address(path);
  if (::bind(socket.fd_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return ErrnoStatus(errno, "bind", path);
  }
  socket.path_ = path;
  struct stat st = {};
  if (::chmod(path.c_str(), mode) != 0 || ::lstat(path.c_str(), &st) != 0) {
    return ErrnoStatus(errno, "chmod", path);
  }
  socket.inode_ = st.st_ino;
  if (::listen(socket.fd_.get(), kBacklog) != 0) {
    return ErrnoStatus(errno, "listen", path);
  }
  return socket;
}

ListeningSocket::ListeningSocket(ListeningSocket&& other) noexcept
    : lock_(std::move(other.lock_)),
      fd_(std::move(other.fd_)),
      path_(std::exchange(other.path_, {})),
      inode_(other.inode_) {}

ListeningSocket& ListeningSocket::operator=(ListeningSocket&& other) noexcept {
  if (this != &other) {
    Close();
    lock_ = std::move(other.lock_);
    fd_ = std::move(other.fd_);
    path_ = std::exchange(other.path_, {});
    inode_ = other.inode_;
  }
  return *this;
}

ListeningSocket::~ListeningSocket() {
  Close();
}

void ListeningSocket::Close() {
  if (!fd_.valid()) {
    return;
  }
  struct stat st = {};
  if (::lstat(path_.c_str(), &st) == 0 && st.st_ino == inode_) {
    Env::System()->Unlink(path_).IgnoreError();
  }
  fd_.reset();
  lock_.Remove(*Env::System());
}

absl::StatusOr<Peer> IdentifyPeer(int fd) {
  ucred credentials = {};
  socklen_t size = sizeof(credentials);
  if (::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0) {
    return ErrnoStatus(errno, "SO_PEERCRED", "client connection");
  }
  HF_ASSIGN_OR_RETURN(const UniqueFd pidfd, OpenPeer(fd, credentials.pid));
  HF_ASSIGN_OR_RETURN(const ProcessId process, IdentifyProcess(credentials.pid));
  if (EndedAlready(pidfd.get())) {  // so that the start time was not that of a later process
    return absl::NotFoundError(absl::StrCat("pid ", credentials.pid, " has ended"));
  }
  return Peer{process, credentials.uid, credentials.gid};
}

}  // namespace holdfast
