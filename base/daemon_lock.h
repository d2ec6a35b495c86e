// The lock of a place that one daemon works in, which a dying predecessor (dying.h) keeps nobody
// from.
//
//   HF_ASSIGN_OR_RETURN(DaemonLock lock, DaemonLock::Take(env, "/dev/shm/holdfast/lock"));
//   for (const ProcessId& process : lock.dying()) …   // its calls may still touch what is there
//
// The lock is one file, `<path>`, as a rule. The kernel takes no flock(2) from a process that
// hangs, so the next daemon then locks `<path>.1`, the one after that `<path>.2`, and so on: the
// first of these files that it can get. All others are free or held by dying processes. Two daemons
// that live never both hold the place: each looks at the other files after its own has its pid, so
// that at least one of them sees the other and leaves.
//
// Values; one thread each.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/dying.h"
#include "base/env.h"
#include "base/ids.h"

namespace holdfast {

class DaemonLock {
 public:
  // FindDyingHolder, but in tests.
  using Judge = std::function<std::optional<ProcessId>(int32_t pid, uint64_t inode)>;

  // Unavailable, naming the holder, when a process has it that may run again.
  static absl::StatusOr<DaemonLock> Take(Env& env, const std::string& path,
                                         const Judge& judge = FindDyingHolder);
  DaemonLock() = default;

  bool held() const { return lock_ != nullptr; }
  // Who had the place before, and may not be gone yet. Sorted, each once.
  const std::vector<ProcessId>& dying() const { return dying_; }
  // Lets go of it, its file removed.
  void Remove(Env& env);

 private:
  std::string path_;  // with its number
  std::unique_ptr<FileLock> lock_;
  std::vector<ProcessId> dying_;
};

// So many daemons may hang one after the other until the machine has to be restarted.
inline constexpr int kDaemonLocksMax = 16;

// A process that was killed is gone within milliseconds, as a rule: waits until those are that
// hold one of these locks and are dying, so long at most. Returns those that are left.
std::vector<ProcessId> AwaitDying(Env& env, const std::vector<std::string>& locks, Duration at_most,
                                  const DaemonLock::Judge& judge = FindDyingHolder);

}  // namespace holdfast
