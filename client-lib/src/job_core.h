// What a job does: the slots, the copy engine and the place in the job that its calls share. One
// call at a time has the turn (background.h); an overlapped save keeps it until it is sealed, on
// the background thread.
//
//   auto core = std::make_shared<JobCore>(identity, options);
//   HF_TRY(core->Open(options.open_deadline));
//   HF_TRY(core->Save(step, state, {}));
//   core->Leave();
//
// Thread-safe. May throw what memory that ran out throws; job.cc sees to it, and to forked
// children, which must not touch any of this.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "client-lib/src/async_save.h"
#include "client-lib/src/background.h"
#include "client-lib/src/copy_engine.h"
#include "client-lib/src/daemon_link.h"
#include "client-lib/src/device_fence.h"
#include "client-lib/src/devices.h"
#include "client-lib/src/restore.h"
#include "client-lib/src/save.h"
#include "client-lib/src/slot_mapping.h"
#include "client-lib/src/state_plan.h"
#include "client-lib/src/stop_notice.h"
#include "client-lib/src/wait_notice.h"
#include "holdfast/job.h"

namespace holdfast::client {

class JobCore : public HeldSaves, public std::enable_shared_from_this<JobCore> {
 public:
  JobCore(RankIdentity identity, const JobOptions& options);

  Status Open(Milliseconds wait);
  uint64_t attempt() const { return link_->attempt(); }
  Result<ReserveReport> Reserve(const State& state, Milliseconds wait);
  Status Save(uint64_t step, const State& state, const SaveOptions& options);
  std::unique_ptr<SaveHandle> SaveAsync(uint64_t step, const State& state,
                                        const SaveOptions& options);
  // `known`: what will be wanted, if that is known before a copy has been seen; or null.
  Result<Restored> Restore(const RestoreOptions& options, const RestoreRun::Wants& wants,
                           const State* known, std::vector<Object>& objects);
  // What a restore wants must be well formed before it is looked for. With the turn.
  Status CheckWanted(const State& state);
  // Without the turn: a save that goes on holds nobody up.
  bool Preempted(uint64_t step);
  StopNotice& stop_notice() { return stop_notice_; }
  // Nothing can be asked of it afterwards.
  Status Leave();

  uint64_t failed_saves() const { return failed_saves_.load(std::memory_order_relaxed); }
  Status last_failure() const;
  std::shared_ptr<DaemonLink> link() const { return link_; }

  Status SealHeld(SaveProgress& progress, Deadline deadline) override;
  void DiscardHeld(SaveProgress& progress) override;
  Result<std::shared_ptr<const StagedTensors>> StagedOf(SaveProgress& progress) override;

 private:
  bool AskWhetherLast(uint64_t step);
  bool MayAsk();
  Result<wire::StepReached> AskDaemon(uint64_t step, bool told, Deadline until);
  Result<wire::StepReached> AskDaemonOnce(uint64_t step, bool told, Deadline until);
  // One save with all that it works with, for as long as it goes on.
  struct RunningSave;

  // Null if no tensor is on a device: then nothing of a driver is touched. Without the turn, so
  // that what comes on the streams while it is waited for is none of this call's.
  Result<std::shared_ptr<DeviceFence>> FenceFor(const std::vector<Tensor>& tensors,
                                                const std::vector<DeviceStream>& streams,
                                                std::optional<Deadline> until);
  Result<SaveRequest> Prepare(uint64_t step, const State& state, const SaveOptions& options,
                              Deadline waited_for, std::shared_ptr<DeviceFence> fence);
  Status SetAside(const State& state, const std::vector<size_t>& tensors, SaveRequest& request);
  // Ends as soon as the save is not held any more.
  Result<Background::Turn> TakeHeld(SaveProgress& progress);
  Result<Background::Turn> TakeLast(Interrupt& interrupt);
  // For an Interrupt of one call: asks the program, and says what keeps the call.
  std::function<bool()> Asks(std::function<Waiting()> waiting);
  Waiting ForTurn(const std::string& what, const std::string& why);
  Status RunSave(RunningSave& save);
  void KeepHeld(std::shared_ptr<RunningSave> save, const Status& copied);
  // With the turn. Whatever else begins a save, or lets slots go, ends one that is held.
  void GiveUpHeld(const Status& why);
  Status Noted(uint64_t step, const Status& status);
  Result<ReserveReport> ReserveSlots(const State& state, DeviceFence* fence, Deadline deadline);

  const Milliseconds call_deadline_;
  const Milliseconds silence_deadline_;
  const Milliseconds device_deadline_;
  const std::function<bool()> interrupted_;
  const Warn warn_;
  std::atomic<bool> closing_{false};  // and nobody waits for what is under way
  Mutex devices_mutex_;
  std::shared_ptr<Devices> devices_ GUARDED_BY(devices_mutex_);  // made when first needed
  PlanCache plans_;
  SlotMappings mappings_;
  const std::unique_ptr<CopyEngine> engine_;
  const std::shared_ptr<DaemonLink> link_;
  std::vector<std::byte> set_aside_;    // bytes that were copied before SaveAsync returned
  std::shared_ptr<RunningSave> held_;   // touched by whoever has the turn
  std::atomic<bool> took_part_{false};  // in the link's attempt: it restored, or was granted a save
  std::atomic<uint64_t> failed_saves_{0};
  StopNotice stop_notice_;
  std::atomic<uint64_t> stopped_attempt_{0};  // whose last step has come
  std::atomic<bool> last_step_{false};        // what Preempted has answered last
  std::atomic<bool> told_daemon_{false};      // that this process was told
  std::atomic<int64_t> ask_again_{0};         // Preempted does not ask the daemon before …
  std::atomic<bool> or_heard_{false};         // … or before anything has come from it
  mutable Mutex failure_mutex_;
  Status last_failure_ GUARDED_BY(failure_mutex_);
  Background background_;  // last: its thread uses the rest
};

}  // namespace holdfast::client
