// One rank of a training job.
//
//   auto job = holdfast::Job::Open({.job = "llama-70b", .rank = 0, .world_size = 2});
//   holdfast::State state{.tensors = {{"w", holdfast::Type::kF32, {4096, 4096}, w.data()}}};
//   auto last = (*job)->Restore(state);                   // newest step that every rank can load
//   if (!last.ok() && last.status().code() != holdfast::Code::kNothingToRestore) {
//     return 1;  // something is there and could not be read: never "start from scratch"
//   }
//   for (uint64_t step = last.ok() ? last->step + 1 : 0; step < n; ++step) {
//     Train(w);
//     holdfast::Status saved = (*job)->Save(step, state);  // one memory copy; a failure never
//     stops the loop
//   }
//
// Threads: one at a time per Job, except that a SaveHandle may be waited on from any thread. The
// library makes no thread of its own but those that JobOptions::copy_threads and SaveAsync ask for.
// Nothing throws; nothing waits longer than its deadline. A child made by fork() has no part in the
// job: every call answers kForked, and no slot is mapped in it.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "holdfast/state.h"
#include "holdfast/status.h"

namespace holdfast {

using Milliseconds = std::chrono::milliseconds;

// Which steps of the job go to a tier, and how long they stay there. What is left out holds as
// ckptd's configuration says; the rank that opens an attempt says it for all, and `ckptctl set`
// changes it while the job runs.
struct TierPolicy {
  std::optional<uint64_t> every_steps;       // the first of each so many steps; 0: never by count
  std::optional<Milliseconds> every;         // one when so much time has passed; 0: never by time
  std::optional<uint32_t> keep_last;         // committed steps that stay, at least 1
  std::optional<uint64_t> keep_every_steps;  // steps that it divides stay for ever; 0: none
  std::optional<uint64_t> bytes_max;         // of the job in this tier; 0: no limit of its own
};
struct Policy {
  TierPolicy nvme;
  TierPolicy remote;
};

struct JobOptions {
  std::string job;  // [A-Za-z0-9._-], at most 128
  uint32_t rank = 0;
  uint32_t world_size = 1;
  std::string launch;  // the launcher's id of this start, the same for all ranks, new at every
                       // restart; "" if unknown
  std::string socket;  // of ckptd; "": $HOLDFAST_SOCKET, then $XDG_RUNTIME_DIR/holdfast/ckptd.sock,
                       // then /run/holdfast/ckptd.sock
  uint32_t copy_threads =
      0;  // for copying and verifying; 0: up to 4, as the CPUs allowed to this process permit
  Policy policy;
  Milliseconds open_deadline{60'000};
  Milliseconds call_deadline{
      30'000};  // for one exchange with the daemon in Save and Reserve's bookkeeping
};

// How far a save has come. Each stage includes those before it.
enum class Stage : uint8_t { kSnapshot = 1, kSealed, kCommitted, kNvme, kRemote };
const char* StageName(Stage stage);

struct StageTimes {  // since the call of Save or SaveAsync; negative: not reached
  std::chrono::nanoseconds snapshot{-1};
  std::chrono::nanoseconds sealed{-1};
  uint64_t bytes = 0;  // of the image
};

// A save under way. Destroying the handle waits for the snapshot (the tensors may be freed
// afterwards), not for more.
class SaveHandle {
 public:
  virtual ~SaveHandle() = default;
  // Until then the tensors must not change.
  virtual Status WaitSnapshot(Milliseconds deadline) = 0;
  // kShed, kAbandoned: the step is lost, for all ranks; kDeadlineExceeded: not yet.
  virtual Status Wait(Stage stage, Milliseconds deadline) = 0;
  virtual StageTimes times() const = 0;
};

struct SaveOptions {
  Milliseconds wait_for_room{0};  // by default a save never waits for a slot: it fails with kNoRoom
};

struct RestoreOptions {
  bool newest = true;              // on the line of descent; or what `ckptctl restore` has set
  uint64_t step = 0;               // with newest == false
  uint64_t attempt = 0;            // with newest == false: 0 means on the line of descent
  Milliseconds deadline{600'000};  // for all ranks to come, choose and load
};
struct Restored {
  uint64_t attempt = 0;  // that the step was saved by
  uint64_t step = 0;
  uint64_t bytes = 0;
  std::string source;                  // where the bytes came from: memory, nvme, remote
  std::string why;                     // not from memory: what became of the nearer copies
  std::chrono::nanoseconds waited{0};  // for other ranks and the choice
  std::chrono::nanoseconds copied{0};
  std::vector<std::string> notes;  // newer steps that were passed over, and why
};

// Read-only tensors straight in the slot, without a copy. Unverified until Verify says OK. The
// memory stays as long as the object lives.
class View {
 public:
  virtual ~View() = default;
  virtual uint64_t attempt() const = 0;
  virtual uint64_t step() const = 0;
  virtual const std::vector<Tensor>& tensors()
      const = 0;  // `data` is read-only memory: writing to it faults
  virtual const std::vector<Object>& objects() const = 0;
  virtual Status Verify() = 0;  // reads and digests everything; kCorrupt names the slice
  virtual bool verified() const = 0;
};
struct AttachOptions {
  std::string job;
  uint32_t rank = 0;
  bool newest = true;
  uint64_t step = 0;
  uint64_t attempt = 0;
  std::string socket;
  Milliseconds deadline{30'000};
};
// Looks at a committed checkpoint's shard; takes no part in the job (for evaluation, export).
Result<std::unique_ptr<View>> Attach(const AttachOptions& options);

struct ReserveReport {
  uint32_t slots_ready = 0;
  uint32_t slots_wanted = 0;
  uint64_t slot_bytes = 0;
};

class Job {
 public:
  static Result<std::unique_ptr<Job>> Open(const JobOptions& options);
  virtual ~Job() = default;  // leaves in good order: waits for a snapshot under way, unmaps, says
                             // so to the daemon

  virtual uint64_t attempt() const = 0;

  // Makes and populates slots for states like this one and maps them, so that the first save is as
  // fast as the next; on huge pages where the kernel has them, so that a process that restores
  // after a crash is as fast as this one would be. Returns at the deadline with what is ready by
  // then.
  virtual Result<ReserveReport> Reserve(const State& state, Milliseconds deadline) = 0;

  // Copies the state and seals it. `step` must grow within an attempt.
  virtual Status Save(uint64_t step, const State& state, const SaveOptions& options = {}) = 0;
  // Returns as soon as the copy has begun; a background thread copies and seals. Tensors must stay
  // alive and unchanged until WaitSnapshot; objects are copied before it returns. A save that is
  // begun while another is copying waits for that copy.
  virtual std::unique_ptr<SaveHandle> SaveAsync(uint64_t step, const State& state,
                                                const SaveOptions& options = {}) = 0;
  // Saves that failed since Open, and why the last one did.
  virtual uint64_t failed_saves() const = 0;
  virtual Status last_failure() const = 0;

  // Fills the state from the newest step that every rank can load. kNothingToRestore: a first
  // start. kUnreadable, kCorrupt: there is something that cannot be read. Tensors are matched by
  // name, type, global shape and place; what was saved and is not named here is left out. A failed
  // restore may have written into the tensors. In a running attempt it begins the next one: all
  // ranks must call it.
  virtual Result<Restored> Restore(State& state, const RestoreOptions& options = {}) = 0;
};

}  // namespace holdfast
