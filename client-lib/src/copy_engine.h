// How a tensor's bytes get into a slot and out of it, digested on the way. The host's engine serves
// memory that this process can read; the other one devices' memory as well, through their copy
// queues.
//
//   std::unique_ptr<CopyEngine> engine = MakeCopyEngine(4);
//   HF_TRY(engine->CopyIn(ranges, {.half_point = "client.save.half_copied"}));
//   HF_TRY_ASSIGN(std::optional<CopyMismatch> bad, engine->CopyOut(ranges, {}));
//
// Called by one thread at a time. The caller guards slot memory with a FaultGuard and asks it
// afterwards.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "holdfast/status.h"
#include "tiers/image/layout.h"
#include "tiers/image/region.h"

namespace holdfast::client {

class DeviceFence;
class Interrupt;

// One run of bytes; digests of its 1 MiB blocks (base/digest.h) are written by CopyIn. May be
// empty. `from` may be `to`: then the bytes are only digested.
struct CopyInRange {
  void* to = nullptr;  // in the slot
  const void* from = nullptr;
  uint64_t bytes = 0;
  uint64_t* digests = nullptr;
  int32_t device = -1;  // that `from` lies on; -1: host memory
};

// What of one slice goes where, when parts of it are wanted in other places than it was saved in.
// Into host memory only.
struct Scatter {
  struct Part {
    StridedCopy copy;    // in elements: of the slice, into `to`
    void* to = nullptr;  // of elements of that type
    DType dtype = DType::kU8;
  };
  DType dtype = DType::kU8;  // of the slice
  std::vector<Part> parts;
};

// Digests are compared by CopyOut. `to` may be null: then the bytes are only checked, and what
// `scatter` says is copied.
struct CopyOutRange {
  void* to = nullptr;
  const void* from = nullptr;  // in the slot
  uint64_t bytes = 0;
  const uint64_t* digests = nullptr;
  int32_t device = -1;  // that `to` lies on; -1: host memory
  const Scatter* scatter = nullptr;
  uint64_t in_slice = 0;  // of `from`, in bytes, where there is a scatter: whole blocks
};

struct CopyOptions {
  const char* half_point = nullptr;  // sync point to pass when half is done
  bool populate = false;             // the slot's pages are not in the page tables yet
  DeviceFence* fence = nullptr;      // required where a range is on a device
  bool pinned = false;               // the slot is pinned: devices may write it directly
  // CopyOut: looked at between pieces, by the caller's thread; or null. When it is hit the rest is
  // left out: kDeadlineExceeded.
  Interrupt* interrupt = nullptr;
  // CopyOut: what has been read and compared is added, block by block; or null.
  std::atomic<uint64_t>* read = nullptr;
  // CopyIn: so many of the ranges come before all others. `first_read` is called, once, when the
  // host has read those in its memory and the copies of those on devices are enqueued
  // (DeviceFence::FirstEnqueued).
  size_t first = 0;
  std::function<void()> first_read = {};
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
  // Returns when every byte has been read, whatever comes of it; only a device that is stuck may
  // still read and write then (Devices::Stuck).
  virtual Status CopyIn(std::span<const CopyInRange> ranges, const CopyOptions& options) = 0;
  // Goes through everything, also after a mismatch, but copies nothing that does not match to a
  // device. Returns when everything has arrived, or nothing more will.
  virtual Result<std::optional<CopyMismatch>> CopyOut(std::span<const CopyOutRange> ranges,
                                                      const CopyOptions& options) = 0;
};

// Uses up to `threads` threads, the caller's among them; the others are made when first needed.
std::unique_ptr<CopyEngine> MakeHostCopyEngine(uint32_t threads);
// Devices' memory too. The devices are those of CopyOptions::fence; as long as no range is on one,
// nothing of them is touched.
std::unique_ptr<CopyEngine> MakeCopyEngine(uint32_t threads);

}  // namespace holdfast::client
