// Images between slots, local files and a mount that may hang: pieces are copied by a bounded pool
// of threads through buffers of their own, so that a call that never returns holds neither a slot
// nor anybody else's transfer.
//
//   HF_ASSIGN_OR_RETURN(auto pool, CopyPool::Start({.threads = 4}));
//   BufferedCopySpec spec;
//   spec.from_memory = memory;              // or from_file
//   spec.to_file = file;                    // or to_memory
//   spec.image = shard;                     // record and layout
//   spec.control = control;
//   TransferResult result = pool->Copy(spec);    // blocks, in an operation's own thread
//
// Every block is compared with the record on its way: while it is copied from memory to memory, or
// in the buffer between two files. A bad one ends the copy; what was written until then is of no
// use.
//
// Cancel (spec.control) and Revoke (spec.from_memory, to_memory): pieces that have not begun never
// begin, and after Revoke returned nobody touches the slot. Copy itself returns when no thread is
// in a call for it any more, which may be never: only then may the file be closed, renamed or
// removed.
//
// Ownership: threads that hang are left behind. The pool's destructor cancels every copy, ends the
// threads that are in no call, and never waits for one that is: such a thread keeps what it needs
// (files, record, buffer, by shared_ptr) until its call returns, then ends by itself. Copy may be
// running meanwhile, in a thread that was left behind too: it returns CancelledError when its calls
// have returned, and touches the pool's own state only. What a spec names is held by it alone: a
// File that points into an Env keeps that alive, or the Env outlives the process' threads
// (Env::System does).
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/env.h"
#include "tiers/image/kept.h"
#include "tiers/image/record.h"
#include "tiers/transfer/pacer.h"
#include "tiers/transfer/revocable_memory.h"
#include "tiers/transfer/thread_cores.h"
#include "tiers/transfer/thread_priority.h"
#include "tiers/transfer/transfer_control.h"
#include "tiers/transfer/transfer_result.h"

namespace holdfast {

struct BufferedCopySpec {
  // One of each pair.
  std::shared_ptr<RevocableMemory> from_memory;
  std::shared_ptr<File> from_file;
  std::shared_ptr<RevocableMemory> to_memory;
  std::shared_ptr<File> to_file;
  // Of from_file and to_file, if open for direct I/O; else 1. to_file is then written up to the
  // next multiple, with zeros behind the image.
  uint32_t from_alignment = 1;
  uint32_t to_alignment = 1;
  // Files that are compressed are written and read in whole frames: pieces are so long, or a
  // multiple of it. 1: any.
  uint32_t piece_unit = 1;
  // to_file keeps in memory what comes before what is in front of it: pieces begin no further ahead
  // of the first that is under way. 0: anywhere.
  uint64_t ahead_max = 0;
  // So many threads at most are at work for it at once, those that are stuck among them; 0: all.
  size_t threads_max = 0;
  // Where its pieces are copied, if that can be had; empty: on those of whoever made the pool.
  Cores cores;
  std::shared_ptr<const RecordAndLayout> image;
  // From memory that has another image, of which `image` is a part: what lies where in it.
  std::shared_ptr<const ImageMap> gather;
  // Into memory that has another image, of which `image` is a part: what lies where in it. What its
  // header has lies nowhere.
  std::shared_ptr<const ImageMap> scatter;
  // Told, by the thread that copied them, of bytes that are in to_memory, whether or not their
  // digests turn out to be right.
  std::function<void(uint64_t offset, uint64_t bytes)> arrived;
  // What errors call the place of a bad block; else it is from_file's path, or "memory".
  std::function<std::string(uint64_t offset)> source_name;
  std::shared_ptr<Pacer> pacer;              // may be null
  std::shared_ptr<TransferControl> control;  // may be null
};

struct CopyPoolOptions {
  size_t threads = 4;                    // 1 to 64
  size_t piece_bytes = size_t{4} << 20;  // a page's multiple
  ThreadPriority priority;
  // A thread that is in one call for so long is stuck: another takes its place, up to threads_max
  // in all, and its copy begins no further pieces until the call returns.
  Duration stuck_after = std::chrono::seconds(10);
  size_t threads_max = 16;
};

class CopyPool {
 public:
  static absl::StatusOr<std::unique_ptr<CopyPool>> Start(const CopyPoolOptions& options);
  ~CopyPool();
  CopyPool(const CopyPool&) = delete;
  CopyPool& operator=(const CopyPool&) = delete;

  // Several at a time from several threads: their pieces take turns.
  TransferResult Copy(BufferedCopySpec spec);

  // The call that has been under way longest, if any: "write '/mnt/…'", and since when.
  struct OldestCall {
    std::string what;
    MonotonicTime since;
  };
  std::vector<OldestCall> CallsUnderWay() const;  // oldest first
  size_t threads_stuck() const;

  // For all of its threads, now and later ones. The first error, if any.
  absl::Status SetPriority(const ThreadPriority& priority);

 private:
  struct State;
  explicit CopyPool(std::shared_ptr<State> state);
  const std::shared_ptr<State> state_;
};

}  // namespace holdfast
