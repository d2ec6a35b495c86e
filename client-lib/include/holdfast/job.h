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
//     // One copy in memory. If a save fails, train on: the next one may succeed.
//     holdfast::Status saved = (*job)->Save(step, state);
//   }
//
// Threads: a Job may be called from any thread, and serves one call after the other; a SaveHandle
// may be waited on at the same time. A call from a signal's handler in the middle of another one on
// the same thread is refused. The library makes no thread of its own but those that
// JobOptions::copy_threads and SaveAsync ask for. Nothing throws; nothing waits longer than its
// deadline. A child made by fork() has no part in the job: every call answers kForked, and no slot
// is mapped in it.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
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
  // In the memory of how many other nodes each shard of the newest step is kept, too; 0: none.
  std::optional<uint32_t> replicas;
};

struct JobOptions {
  std::string job;  // [A-Za-z0-9._-], at most 128
  uint32_t rank = 0;
  uint32_t world_size = 1;
  std::string launch;  // the launcher's id of this start, the same for all ranks, new at every
                       // restart; "" if unknown
  std::string socket;  // of ckptd; "": $HOLDFAST_SOCKET, then $XDG_RUNTIME_DIR/holdfast/ckptd.sock,
                       // then /run/holdfast/ckptd.sock, then the private daemon's
                       // (docs/install.md)
  uint32_t copy_threads =
      0;  // for copying and verifying; 0: up to 4, as the CPUs allowed to this process permit
  Policy policy;
  Milliseconds open_deadline{60'000};
  Milliseconds call_deadline{
      30'000};  // for one exchange with the daemon in Save and Reserve's bookkeeping
  // A save that nobody waits for (no wait_for_room, not held, not the job's last step) fails when
  // the daemon says nothing at all for so long. The next ones fail at once until it says something.
  Milliseconds silence_deadline{1'000};
  // Gets a line about whatever keeps a caller for a second, then every 10 s: what it waits for, and
  // what to do. By the thread that waits. Null: the line goes to the standard error.
  std::function<void(const std::string& line)> warn;
  // Asked about twenty times a second by the thread that waits in Open, Reserve or Restore, or in
  // Save and SaveAsync for an earlier call: true ends the call as if its deadline had passed
  // (kDeadlineExceeded), and leaves its session. A restore that copies is asked between pieces of
  // some MiB. In the destructors of a Job and of a SaveHandle true gives up what they wait for,
  // unless it is being copied: that ends first. Must be there as long as they are.
  std::function<bool()> interrupted;
  // A save or restore of device memory fails when no copy has ended for so long, because what was
  // enqueued on the device before it does not end.
  Milliseconds device_deadline{300'000};
};

// A CUDA stream (CUstream, cudaStream_t; null: the legacy default stream) of a device.
struct DeviceStream {
  int32_t device = 0;
  void* stream = nullptr;
};

// How far a save has come. Each stage includes those before it, but that none of the tiers includes
// another. kPeer: every rank's shard lies in the memory of another node, too.
enum class Stage : uint8_t { kSnapshot = 1, kSealed, kCommitted, kNvme, kRemote, kPeer };
const char* StageName(Stage stage);

struct StageTimes {  // since the call of Save or SaveAsync; negative: not reached
  std::chrono::nanoseconds snapshot{-1};
  std::chrono::nanoseconds sealed{-1};
  // As the daemon told it to a Wait for that stage or a later one: when all ranks had sealed the
  // step, and when the tier had it whole, by the node's clock. Negative also when nobody knows: a
  // daemon that was started since finds the step in its tiers, not when it got there.
  std::chrono::nanoseconds committed{-1};
  std::chrono::nanoseconds nvme{-1};
  std::chrono::nanoseconds remote{-1};
  std::chrono::nanoseconds peer{-1};
  uint64_t bytes = 0;  // of the image
};

// The copies of a held save's tensors in its slot, in the order of State::tensors; read-only
// memory, which stays mapped as long as the object lives. What lies there is that save's until it
// is sealed or given up, and nobody's afterwards. A forked child does not have the memory.
class StagedTensors {
 public:
  virtual ~StagedTensors() = default;
  virtual const std::vector<std::span<const std::byte>>& bytes() const = 0;
};

// A save under way. Destroying the handle waits for the snapshot (the tensors may be freed
// afterwards), not for more; one that was held and not sealed is given up.
class SaveHandle {
 public:
  virtual ~SaveHandle() = default;
  // With SaveOptions::return_at_once: until then those of SaveOptions::copy_first must not change.
  // Makes SaveOptions::streams wait for those on devices. OK also when the save has failed.
  virtual Status WaitFirst(Milliseconds deadline) = 0;
  // Until then the tensors must not change.
  virtual Status WaitSnapshot(Milliseconds deadline) = 0;
  // kShed, kAbandoned: the step is lost, for all ranks; kDeadlineExceeded: not yet. (A save that
  // has failed because the daemon, or a device, took too long is kUnavailable.)
  virtual Status Wait(Stage stage, Milliseconds deadline) = 0;
  virtual StageTimes times() const = 0;
  // What is enqueued on these streams afterwards runs after the copy has read the tensors that are
  // on devices: they may be changed and freed in stream order then, without WaitSnapshot. Waits on
  // the host until the copies are enqueued, not until they are done. OK at once when there is
  // nothing on a device, or nothing is read any more. kRefused: a CUDA graph is being captured on
  // one of them. After another failure the streams are not fenced: WaitSnapshot instead.
  virtual Status FenceStreams(const std::vector<DeviceStream>& streams, Milliseconds deadline) = 0;

  // Of a save with SaveOptions::hold. Once only; what is done on the same Job in between and begins
  // a save, a restore or a reserve gives the held one up. kDeadlineExceeded: not yet, and it goes
  // on, beside the caller: Seal and Wait wait for it.
  virtual Status Seal(Milliseconds deadline) = 0;
  // Nothing after Seal. Returns within seconds, whatever the daemon does.
  virtual void Discard() = 0;
  virtual Result<std::shared_ptr<const StagedTensors>> Staged() = 0;  // after the snapshot
};

struct SaveOptions {
  // By default a save never waits for a slot: it fails with kNoRoom. (That of the last step, once
  // Preempted has said so, waits as long as the grace lets it.) One that waits for a slot also
  // waits for a daemon that hangs, or is away, as while it is being restarted.
  Milliseconds wait_for_room{0};
  // Tensors on devices are read after what is enqueued on these streams when Save or SaveAsync is
  // called. Without any, what they hold must be there already. A save while a CUDA graph is being
  // captured on one of them is refused, and does the capture no harm.
  std::vector<DeviceStream> streams;
  // SaveAsync: indices into State::tensors of what may change as soon as it returns, and so is
  // copied before. Up to 16 MiB in all are set aside without asking anybody; for more it waits
  // until they are in the slot. What lies on devices may be changed by what is enqueued on
  // `streams` afterwards: it waits until the copies are enqueued, and makes those streams wait for
  // them. (If a device has none there, or one is being captured, it waits for the whole snapshot.)
  std::vector<size_t> copy_first;
  // SaveAsync: does not wait for those of copy_first: SaveHandle::WaitFirst does.
  bool return_at_once = false;
  // SaveAsync: copies, and waits for SaveHandle::Seal before it says that the step is there.
  bool hold = false;
};

// One of the contents that an object has among the ranks that saved it, and which of them had it.
struct SavedObject {
  Object object;
  std::vector<uint32_t> ranks;
};
// Makes one content, for this rank, out of those that an object has. Its failure ends the session
// for all ranks, and is what Restore returns.
using MergeObjects = std::function<Result<std::string>(const std::string& name,
                                                       const std::vector<SavedObject>& saved)>;

// How far a restore is, on this rank.
struct RestoreProgress {
  bool loading = false;   // else it waits: for the other ranks to come, or to have loaded
  uint64_t step = 0;      // that is loaded, or was last; meaningful if attempt is not 0
  uint64_t attempt = 0;   // 0: none has been chosen yet
  uint64_t bytes = 0;     // read and verified of it
  uint64_t bytes_of = 0;  // to be read, as far as is known; grows where a copy is read in vain
};

struct RestoreOptions {
  bool newest = true;              // on the line of descent; or what `ckptctl restore` has set
  uint64_t step = 0;               // with newest == false
  uint64_t attempt = 0;            // with newest == false: 0 means on the line of descent
  Milliseconds deadline{600'000};  // for all ranks to come, choose and load
  // Tensors on devices are written after what is enqueued on these streams when Restore is called,
  // and before it returns.
  std::vector<DeviceStream> streams;
  // Decides the step with all ranks, and loads nothing: the caller reads it with Attach. The step
  // may have been saved by another world size. All ranks say the same.
  bool adopt_only = false;
  // Tensors that were saved with another floating-point type (of two bytes an element or more) are
  // converted: rounded to the nearest. Otherwise they are refused.
  bool convert_types = false;
  // When another number of ranks had saved the step: for objects that were not the same in all of
  // them (random states, a data loader's position). Without it those that are wanted are refused,
  // by name.
  MergeObjects merge = {};
  // Called by the thread that restores, about twenty times a second, while it waits and between
  // pieces of what it reads. False ends the restore, as JobOptions::interrupted does.
  std::function<bool(const RestoreProgress&)> progress = {};
  // Names this run of the job, at most 256 bytes; all ranks say the same. With one, `choose` may
  // answer kNothingToRestore: the step is of another run. If all ranks say so, the job starts over
  // (kNothingToRestore), as after `ckptctl restore --from-scratch`; kUnavailable as long as a tier
  // that may have steps of this run cannot be read.
  std::string label = {};
};
struct Restored {
  uint64_t attempt = 0;  // that the step was saved by
  uint64_t step = 0;
  uint64_t bytes = 0;
  std::string source;  // where the bytes came from: memory, nvme, peer, remote; adopt_only: ""
  std::string why;     // not from memory: what became of the nearer copies
  std::chrono::nanoseconds waited{0};  // for other ranks and the choice
  std::chrono::nanoseconds copied{0};
  std::vector<std::string> notes;  // newer steps that were passed over, and why
  // Not 0: so many ranks saved the step, and what is wanted was put together out of their shards.
  // `source` is the farthest tier then that any of them was read from.
  uint32_t resharded_from = 0;
};

// What was saved, as a restore finds it: tensors without memory (`data` is null), objects with
// their bytes.
struct Saved {
  uint64_t attempt = 0;
  uint64_t step = 0;
  std::vector<Tensor> tensors;
  std::vector<Object> objects;
  // Not 0: so many ranks saved the step, and all their shards are looked at, since they are another
  // number than now, or this rank's own does not have what it wanted. `tensors` are whole then,
  // whatever parts of them were saved, and `of_all` is what there is of objects; `objects` are
  // those of this rank's own shard, if as many ranks saved the step as restore it.
  uint32_t saved_by = 0;
  std::vector<SavedObject> of_all;
  std::vector<uint32_t> tensor_ranks;  // of each tensor: how many of them have some of it
};
// Says what of it is wanted, and where to: the tensors of the state that it returns (its objects
// are not looked at). Its failure ends the session for all ranks, and is what Restore returns; but
// if it is kNotFound, and was about this rank's own shard, it is asked once more, about all of
// them.
using Choose = std::function<Result<State>(const Saved& saved)>;

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
  // Says that the training itself needs the network: until the window is left, its node's daemon
  // lets what nobody waits for stand still (replicas, flushes to the remote tier; what is under way
  // of them, some MiB, still arrives). Restores, and what a
  // process of the node waits for, go on. A few instructions, in any thread: nothing is sent,
  // nothing is waited for, nothing fails; with a daemon that does not know of it, or none, in a
  // forked child, it has no effect. Windows are counted, so they may be nested and overlap. Copying
  // never stops for good: what is not left counts for 10 s, until a window begins again after none
  // was open, and all windows of a node hold it up for at most 9 s of any 10 s. Use NetworkBusy.
  virtual void EnterNetworkBusy() noexcept = 0;
  virtual void LeaveNetworkBusy() noexcept = 0;

  // Whether the job is to end, and this step is its last one. Called by every rank when it is done
  // with a step, before it saves that:
  //
  //   const bool last = job->Preempted(step);
  //   if (last || step % 100 == 0) { job->Save(step, state); }
  //   if (last) { break; }
  //
  // Once a process of any rank was told to end (NoticeStop), all ranks hear `true` after the same
  // step: their nodes agree on the first one that no rank is beyond. That step goes into every
  // tier that the job uses, ahead of all others. In between a rank may stand here for 2 s (and a
  // moment, should its daemon not answer), but for no more than half of a short grace; else it asks
  // its node's daemon, which takes some 20 microseconds. A daemon that did not answer is not waited
  // for again for 10 s, or until it says something: twice in that time at most. Never fails:
  // without a daemon it is `true` where this process itself was told to end; one that is just being
  // restarted is waited for as long. So it is by the save of the last step, for
  // JobOptions::call_deadline, as far as the grace goes: it is begun again, or sealed again, where
  // the daemon went away. When the grace is over saves are as any other.
  virtual bool Preempted(uint64_t step) = 0;
  // This process was told to end (SIGTERM, a notice of the cloud), and is killed in so long. From
  // any thread, and from a signal's handler. The first one counts.
  virtual void NoticeStop(Milliseconds grace) noexcept = 0;
  // Once the job is to end, as far as Preempted has heard: what is left until it is killed.
  virtual std::optional<Milliseconds> stop_left() const = 0;

  // Saves that failed since Open, and why the last one did.
  virtual uint64_t failed_saves() const = 0;
  virtual Status last_failure() const = 0;

  // Fills the state from the newest step that every rank can load. kNothingToRestore: a first
  // start. kUnreadable, kCorrupt: there is something that cannot be read. Tensors are matched by
  // name, type and global shape, in whatever parts, by however many ranks, they were saved
  // (docs/elastic.md); what was saved and is not named here is left out. A failed
  // restore may have written into the tensors, and says so if it has. In a running attempt it
  // begins the next one: all ranks must call it. With adopt_only the state is left as it is.
  virtual Result<Restored> Restore(State& state, const RestoreOptions& options = {}) = 0;
  // The same for a caller who has to see what was saved before it can name what it wants. `choose`
  // is called on this thread, again for every copy that is tried.
  virtual Result<Restored> Restore(const Choose& choose, const RestoreOptions& options = {}) = 0;
};

// A quiet window, for as long as it lives:
//
//   {
//     holdfast::NetworkBusy busy(*job);
//     AllReduce(gradients);
//   }
class NetworkBusy {
 public:
  explicit NetworkBusy(Job& job) noexcept : job_(job) { job_.EnterNetworkBusy(); }
  ~NetworkBusy() { job_.LeaveNetworkBusy(); }
  NetworkBusy(const NetworkBusy&) = delete;
  NetworkBusy& operator=(const NetworkBusy&) = delete;

 private:
  Job& job_;
};

}  // namespace holdfast
