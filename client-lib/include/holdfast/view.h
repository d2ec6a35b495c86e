// Committed checkpoints to look at, for evaluation, export, or a reader that reshards: which there
// are, and one rank's shard of one as read-only tensors, from the nearest tier that has it. Takes
// no part in the job.
//
//   auto list = holdfast::ListCheckpoints({.job = "llama-70b"});     // newest first
//   for (uint32_t rank = 0; rank < list->front().world_size; ++rank) {
//     auto view = holdfast::Attach({.job = "llama-70b", .rank = rank, .newest = false,
//                                   .step = list->front().step, .attempt = list->front().attempt});
//     if (!view.ok()) …                            // kUnavailable: perhaps later; kCorrupt:
//     damaged
//     (*view)->Read(0, memory);                    // the first tensor, verified
//   }
//
// Threads: a View's Read and Verify may be called from any thread, and take turns; everything else
// is constant. Nothing throws. Attach and ListCheckpoints wait no longer than their deadline; to
// read what lies in nvme or remote takes as long as the drive or the mount does, unless
// AttachOptions::interrupted ends it; of another node each 16 MiB may take the deadline. A View
// that goes waits a second at most for ckptd to hear so. Where ckptd keeps a caller for a second, a
// line on the standard error says why.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "holdfast/state.h"
#include "holdfast/status.h"

namespace holdfast {

using Milliseconds = std::chrono::milliseconds;

// Read-only tensors straight in the slot, or in the file in nvme or remote, without a copy.
// Unverified until Read or Verify says OK; objects are verified by Attach. They stay as long as the
// object lives, also when the step is removed meanwhile. A forked child does not have their memory:
// it attaches for itself.
// Of what lies on another node ("peer") there is nothing here to point to: `data` of its tensors is
// null, and each Read or Verify brings what it needs, from whoever has it then. Who needs pointers
// attaches with AttachOptions::without = {"peer"}: then it is the file in remote, if there is one.
class View {
 public:
  virtual ~View() = default;
  virtual uint64_t attempt() const = 0;
  virtual uint64_t step() const = 0;
  virtual uint32_t world_size() const = 0;      // that saved the step
  virtual const std::string& tier() const = 0;  // memory, nvme, peer or remote
  virtual const std::string& why() const = 0;   // not memory: what became of the nearer copies
  virtual const std::vector<Tensor>& tensors()
      const = 0;  // `data` is read-only memory: writing to it faults
  virtual const std::vector<Object>& objects() const = 0;
  // Copies tensor i of tensors() to `to` (its `bytes`), or only reads it (null), with several
  // threads, and compares every block with its digest. kCorrupt names the tensor: it is damaged, or
  // its file was cut short or cannot be read any more; AttachOptions::without finds another copy.
  // kUnavailable, of another node's: no node has it any more, or none can be reached.
  // kDeadlineExceeded: interrupted; `to` may have been written in part.
  virtual Status Read(size_t tensor, void* to) = 0;
  virtual Status Verify() = 0;        // the same of everything, objects too
  virtual bool verified() const = 0;  // Verify said OK
  // Of all bytes of tensor i of tensors(), as they were saved: the same for the same bytes. Nothing
  // is read.
  virtual uint64_t digest(size_t tensor) const = 0;
};

struct AttachOptions {
  std::string job;
  uint32_t rank = 0;
  bool newest = true;                     // on the line of descent
  uint64_t step = 0;                      // with newest == false
  uint64_t attempt = 0;                   // with newest == false: 0 means on the line of descent
  std::string socket;                     // as in JobOptions
  Milliseconds deadline{30'000};          // of another node's also for each 16 MiB that Read brings
  std::vector<std::string> without = {};  // tiers whose copy is not wanted
  // Asked about twenty times a second by the thread that waits in Attach, in the View's Read and
  // Verify, between pieces of some MiB (one piece takes as long as the drive or the mount does),
  // and in its destructor: true ends the call as if its deadline had passed (kDeadlineExceeded).
  std::function<bool()> interrupted = {};
};
// A copy that is damaged, of a newer format, or cannot be opened is passed over for the one in the
// next tier. kCorrupt, kUnreadable, kUnavailable: none of them will do; the message names all.
Result<std::unique_ptr<View>> Attach(const AttachOptions& options);

struct CheckpointInfo {
  uint64_t attempt = 0;
  uint64_t step = 0;
  uint32_t world_size = 0;
  bool on_line = false;            // of descent: a restore may choose it
  std::vector<std::string> tiers;  // that have all of it; none: only together they do
  uint64_t bytes = 0;
  int64_t saved_unix_ms = 0;
};
struct ListOptions {
  std::string job;
  std::string socket;
  Milliseconds deadline{30'000};           // tiers that are still being read are waited for
  std::function<bool()> interrupted = {};  // as in AttachOptions
};
// All checkpoints of the job that can be read, newest first: by attempt, then by step.
Result<std::vector<CheckpointInfo>> ListCheckpoints(const ListOptions& options);

}  // namespace holdfast
