#include "client-lib/src/successor.h"

#include <sys/stat.h>

#include "client-lib/src/daemon_process.h"
#include "client-lib/src/socket.h"

namespace holdfast::client {

void Successor::Connecting(const std::string& path) {
  const std::optional<File> file = FileAt(path);
  const MutexLock lock(mutex_);
  file_ = file;
}

bool Successor::Serves(const std::string& path, pid_t predecessor) {
  const std::optional<File> file = NewFileAt(path);
  if (!file) {
    return false;
  }
  const Result<ForkClosedFd> probe = ConnectUnix(path, Deadline::In(Milliseconds(0)));
  if (!probe.ok()) {
    return false;  // it does not listen yet, or its queue is full
  }
  const pid_t process = PeerProcess(probe->get());
  if (process == 0 || process != predecessor) {
    return true;
  }
  const MutexLock lock(mutex_);
  file_ = file;
  return false;
}

std::optional<Successor::File> Successor::FileAt(const std::string& path) {
  struct stat info = {};
  if (::stat(path.c_str(), &info) != 0) {
    return std::nullopt;
  }
  return File{info.st_dev, info.st_ino};
}

std::optional<Successor::File> Successor::NewFileAt(const std::string& path) {
  const MutexLock lock(mutex_);
  if (!next_look_.passed()) {
    return std::nullopt;
  }
  next_look_ = Deadline::In(between_looks_);
  const std::optional<File> file = FileAt(path);
  return file == file_ ? std::nullopt : file;
}

}  // namespace holdfast::client
