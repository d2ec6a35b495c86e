// What the parts of one FaultEnv share: the tree, and the rules by which calls fail. FaultEnv's
// files, locks and mappings hold it too, so that they outlive the FaultEnv safely.
#pragma once

#include <map>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "base/fault_env.h"
#include "base/fault_tree.h"
#include "base/mutex.h"

namespace holdfast {

inline constexpr uint64_t kFaultFileBytesMax = uint64_t{1} << 32;  // contents are held in memory

struct FaultState {
  explicit FaultState(FaultEnv::Durability d) : durability(d) {}

  const FaultEnv::Durability durability;
  Mutex mutex;
  FaultTree tree GUARDED_BY(mutex);
  uint64_t bytes_total GUARDED_BY(mutex) = uint64_t{1} << 40;
  uint64_t epoch GUARDED_BY(mutex) =
      1;  // grows when the process "dies": what was opened before is stale
  int calls GUARDED_BY(mutex) = 0;
  int crash_at GUARDED_BY(mutex) = 0;                      // 0: never
  std::map<int, int> fail_at GUARDED_BY(mutex);            // call number → errno
  std::map<std::string, int> fail_text GUARDED_BY(mutex);  // text in "operation path" → errno

  // Count the call; the error with which it is to fail, if any.
  absl::Status Begin(std::string_view operation, const std::string& path) REQUIRES(mutex);
  absl::Status BeginTwo(std::string_view operation, const std::string& from, const std::string& to)
      REQUIRES(mutex);

  // 0, or why a file cannot grow to `bytes`.
  int CheckRoom(FaultContent& content, uint64_t bytes) REQUIRES(mutex);

  // The process is gone: its files are stale, its locks are free, and the faults have done their
  // work.
  void EndProcess() REQUIRES(mutex);

 private:
  int Count(const std::string& call) REQUIRES(mutex);
};

}  // namespace holdfast
