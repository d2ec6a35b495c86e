// A real ckptd of the benchmark's own: private directories on tmpfs and in /tmp, gone with the
// object.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

namespace holdfast::bench {

class Daemon {
 public:
  // Starts `<directory of this program>/ckptd` and waits until it says that it is ready. Ends the
  // program with a message if it can't.
  Daemon(uint64_t memory_bytes, int slots_per_rank);
  ~Daemon();
  Daemon(const Daemon&) = delete;
  Daemon& operator=(const Daemon&) = delete;

  const std::string& socket() const { return socket_; }
  pid_t pid() const { return pid_; }

 private:
  std::string memory_dir_;
  std::string work_dir_;
  std::string socket_;
  pid_t pid_ = -1;
};

}  // namespace holdfast::bench
