// The threads of one drive or one mount, and what they have to do, in order. A call that hangs
// keeps its thread, and nobody else: what waits behind it is told, can be cancelled, and the
// daemon's end leaves the thread behind with all that it uses.
//
//   HF_ASSIGN_OR_RETURN(auto group, WorkerGroup::Create({.name = "nvme-0", …}, outlet));
//   group->Submit(std::make_shared<Operation>(drain, work, cancelled), false);
//   group->Cancel(drain);
//   group->CheckStalls(now);          // every second or so, from the reactor
//
// Thread-safe.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "server/runtime/tiers/operation.h"
#include "tiers/transfer/thread_priority.h"

namespace holdfast {

class WorkerGroup {
 public:
  struct Options {
    std::string name;  // of the threads, for people
    size_t threads = 1;
    Duration stall_timeout = std::chrono::seconds(60);
    ThreadPriority priority;
  };
  // ResourceExhausted when there can be no more threads.
  static absl::StatusOr<std::unique_ptr<WorkerGroup>> Create(Options options,
                                                             std::shared_ptr<EventOutlet> outlet);
  // Cancels everything; waits a moment for what ends, leaves behind what does not.
  ~WorkerGroup();
  WorkerGroup(const WorkerGroup&) = delete;
  WorkerGroup& operator=(const WorkerGroup&) = delete;

  // First of those that wait, if it is `urgent` (somebody restores).
  void Submit(std::shared_ptr<Operation> operation, bool urgent);
  // False if it is not known here (any more).
  bool Cancel(DrainId drain);
  // Somebody waits for it: the next one to run, and held back no longer.
  void Hurry(DrainId drain);
  void CancelAll();
  // Tells of operations that have got nowhere for the timeout, and of those that do again. One that
  // only waits, and whose stall is an answer of its own, is answered and forgotten.
  void CheckStalls(MonotonicTime now);
  // The first error, if any: the kernel may refuse.
  absl::Status SetPriority(const ThreadPriority& priority);
  // Nothing waits or runs, and nothing of what ran is still to be let go of.
  bool idle() const;
  size_t stalled() const;
  // What one of those says: "no progress for 60 s: look at '/mnt/x'". Empty: none is stalled.
  std::string stall() const;

 private:
  struct State;
  explicit WorkerGroup(std::shared_ptr<State> state);
  static void Run(const std::shared_ptr<State>& state);
  static void RunOne(const std::shared_ptr<State>& state, std::shared_ptr<Operation> operation);
  const std::shared_ptr<State> state_;
};

}  // namespace holdfast
