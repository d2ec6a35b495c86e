// How a tensor's bytes get into a slot and out of it, digested on the way. The interface behind
// which memory that is not the host's comes (a device's copy queues, slots registered as pinned
// memory once); HostCopyEngine serves memory that this process can read.
//
//   std::unique_ptr<CopyEngine> engine = MakeHostCopyEngine(4);
//   HF_TRY(engine->CopyIn(ranges, {.half_point = "client.save.half_copied"}));
//   HF_TRY_ASSIGN(std::optional<CopyMismatch> bad, engine->CopyOut(ranges, {}));
//
// Called by one thread at a time. The caller guards slot memory with a FaultGuard and asks it
// afterwards.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "holdfast/status.h"

namespace holdfast::client {

// One run of bytes; digests of its 1 MiB blocks (base/digest.h) are written by CopyIn. May be
// empty.
struct CopyInRange {
  void* to = nullptr;  // in the slot
  const void* from = nullptr;
  uint64_t bytes = 0;
  uint64_t* digests = nullptr;
};

// Digests are compared by CopyOut. `to` may be null: then the bytes are only checked.
struct CopyOutRange {
  void* to = nullptr;
  const void* from = nullptr;  // in the slot
  uint64_t bytes = 0;
  const uint64_t* digests = nullptr;
};

struct CopyOptions {
  const char* half_point = nullptr;  // sync point to pass when half is done
  bool populate = false;             // the slot's pages are not in the page tables yet
};

// The first block, in the order of the ranges, whose bytes contradict their digest.
struct CopyMismatch {
  size_t range = 0;
  size_t block = 0;
  uint64_t actual = 0;
};

class CopyEngine {
 public:
  virtual ~CopyEngine() = default;
  virtual Status CopyIn(std::span<const CopyInRange> ranges, const CopyOptions& options) = 0;
  // Goes through everything, also after a mismatch.
  virtual Result<std::optional<CopyMismatch>> CopyOut(std::span<const CopyOutRange> ranges,
                                                      const CopyOptions& options) = 0;
};

// Uses up to `threads` threads, the caller's among them; the others are made when first needed.
std::unique_ptr<CopyEngine> MakeHostCopyEngine(uint32_t threads);

}  // namespace holdfast::client
