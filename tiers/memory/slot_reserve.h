// A little of the tmpfs kept back: <dir>/reserve, preallocated. Notes, records and job states are
// small, but without them nothing more is saved; so when somebody else has filled the file system,
// as much of the reserve as is needed is given up for them, and taken back when there is room.
//
//   SlotReserve reserve(env, dir);
//   HF_RETURN_IF_ERROR(reserve.Write(bytes.size(), [&] { return PrepareFile(env, path, bytes); }));
//
// Owner: SlotStore. Thread-safe. Internal to tiers/memory.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "base/env.h"
#include "base/mutex.h"

namespace holdfast {

class SlotReserve {
 public:
  static constexpr uint64_t kBytes = 1 << 20;
  static constexpr uint64_t kStepBytes = 64 << 10;  // given up at least, so that others fit as well

  SlotReserve(Env& env, std::string dir);

  // Runs `write`, which needs `bytes` of the file system; when that is full, once more with room
  // from the reserve.
  absl::Status Write(uint64_t bytes, const std::function<absl::Status()>& write) EXCLUDES(mutex_);
  // Makes it whole again, as far as there is room.
  void Refill() EXCLUDES(mutex_);

 private:
  bool GiveUp(uint64_t bytes) EXCLUDES(mutex_);

  Env& env_;
  const std::string path_;
  Mutex mutex_;
  std::unique_ptr<File> file_ GUARDED_BY(mutex_);
  uint64_t bytes_ GUARDED_BY(mutex_) = 0;
};

}  // namespace holdfast
