// What the parts of one FaultEnv share: the tree, and the rules by which calls fail. FaultEnv's
// files, locks and mappings hold it too, so that they outlive the FaultEnv safely.
#pragma once

#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "base/fault_env.h"
#include "base/fault_tree.h"
#include "base/mutex.h"

namespace holdfast {

inline constexpr uint64_t kFaultFileBytesMax = uint64_t{1} << 32;  // contents are held in memory

struct FaultState {
  explicit FaultState(FaultEnv::Durability d)
      : durability(d), type(d == FaultEnv::Durability::kNone ? "tmpfs" : "ext4") {}

  const FaultEnv::Durability durability;
  Mutex mutex;
  FaultTree tree GUARDED_BY(mutex);
  uint64_t bytes_total GUARDED_BY(mutex) = uint64_t{1} << 40;
  uint64_t epoch GUARDED_BY(mutex) =
      1;  // grows when the process "dies": what was opened before is stale
  int calls GUARDED_BY(mutex) = 0;
  bool recording GUARDED_BY(mutex) = false;
  std::vector<std::string> recorded GUARDED_BY(mutex);
  int open_files GUARDED_BY(mutex) = 0;
  int most_open_files GUARDED_BY(mutex) = 0;
  int crash_at GUARDED_BY(mutex) = 0;                      // 0: never
  std::map<int, int> fail_at GUARDED_BY(mutex);            // call number → errno
  std::map<std::string, int> fail_text GUARDED_BY(mutex);  // text in "operation path" → errno
  std::set<std::string> stall_text GUARDED_BY(mutex);
  int stalled GUARDED_BY(mutex) = 0;
  CondVar stall_changed;

  // What the file system can do.
  bool hard_links GUARDED_BY(mutex) = true;
  bool rename_no_replace GUARDED_BY(mutex) = true;
  bool leases GUARDED_BY(mutex) = true;
  bool allocate GUARDED_BY(mutex) = true;
  uint32_t direct_alignment GUARDED_BY(mutex) = 512;
  uint64_t device GUARDED_BY(mutex) = 1;
  std::string device_below GUARDED_BY(mutex);  // what is elsewhere is on device 1
  uint64_t DeviceOf(const std::string& path) const REQUIRES(mutex) {
    return path.starts_with(device_below) ? device : 1;
  }
  std::string type GUARDED_BY(mutex);
  std::vector<std::pair<std::string, Striping>> stripings GUARDED_BY(mutex);

  // Count the call, hold it up if it is to stall; the error with which it is to fail, if any.
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
  bool Stalls(const std::string& call) const REQUIRES(mutex);
};

}  // namespace holdfast
