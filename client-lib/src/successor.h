// Whether another ckptd serves at the socket in place of one that does not answer. A ckptd that was
// killed may hang in a call that no signal ends. The kernel then closes none of its connections,
// and a new ckptd takes over the path of the socket.
//
//   successor.Connecting(path);                       // before each connect
//   …
//   if (successor.Serves(path, connection.Process())) connection.Break(…);   // nothing has come
//
// A daemon makes the socket's file when it starts. So nothing is looked at any closer while the
// file is the one that the connection was made through: connections that a stopped daemon does not
// accept would fill its queue. The number of the process decides then, where it is known: a process
// that has connections open keeps its number. Where it is not known (a pod sees no process of the
// node), the new file decides.
//
// Waits for nothing. Thread-safe.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>

#include "base/mutex.h"
#include "client-lib/src/deadline.h"

namespace holdfast::client {

class Successor {
 public:
  explicit Successor(Milliseconds between_looks = Milliseconds(1000))
      : between_looks_(between_looks) {}

  // The newest connection is the one that Serves is asked about.
  void Connecting(const std::string& path);
  // `predecessor`: the process at the other end of the connection; 0: unknown. Looks now and then
  // only; false where nothing can be said yet.
  bool Serves(const std::string& path, pid_t predecessor);

 private:
  struct File {
    dev_t device = 0;
    ino_t number = 0;  // of no other file, as long as the daemon that made it has its socket
    bool operator==(const File&) const = default;
  };
  static std::optional<File> FileAt(const std::string& path);
  std::optional<File> NewFileAt(const std::string& path) EXCLUDES(mutex_);

  const Milliseconds between_looks_;
  Mutex mutex_;
  Deadline next_look_ GUARDED_BY(mutex_) = Deadline::In(Milliseconds(0));
  std::optional<File> file_ GUARDED_BY(mutex_);  // the one that belongs to the predecessor
};

}  // namespace holdfast::client
