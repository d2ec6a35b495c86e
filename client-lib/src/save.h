// One save, from the checked request to the sealed copy (docs/protocol.md §4).
//
//   SaveRequest request = …;   // plan and addresses, made by the caller of Save or SaveAsync
//   SaveRun run(context, request, observer);
//   HF_TRY(run.Copy());        // fails: the step is given up
//   Status sealed = run.Seal();
//
// Runs on the caller's thread (Save) or on the job's background thread (SaveAsync); never two at a
// time. What was copied and not sealed lies in the slot until Seal or GiveUp.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "client-lib/src/copy_engine.h"
#include "client-lib/src/daemon_link.h"
#include "client-lib/src/device_fence.h"
#include "client-lib/src/slot_mapping.h"
#include "client-lib/src/state_plan.h"
#include "holdfast/job.h"

namespace holdfast::client {

struct SaveRequest {
  uint64_t step = 0;
  SaveOptions options;
  // Its caller waits until then, for a slot and for a daemon that hangs or is away.
  Deadline waited_for = Deadline::In(Milliseconds(0));
  // Of a job's last step there is no next one: a daemon that is being restarted is waited for, for
  // as long as one exchange may take, and no longer than until then. One that is there has its time
  // for each exchange, whenever that is: the grace is what was assumed.
  std::optional<Deadline> until;
  std::shared_ptr<const StatePlan> plan;  // may be of other objects: FitsObjects decides
  std::vector<const void*> tensors;       // in the caller's order
  std::vector<int32_t> devices;           // that they lie on; empty: host memory, all of them
  std::shared_ptr<DeviceFence> fence;     // where some lie on a device
  std::vector<bool> first;                // of the tensors: copied before the others; or empty
  const std::vector<Object>* objects = nullptr;
  std::vector<Object>
      own_objects;  // what `objects` points at when the caller's will not live long enough
};

// What a save works with; the job owns it all.
struct SaveContext {
  DaemonLink& link;
  SlotMappings& mappings;
  CopyEngine& engine;
  Milliseconds call_deadline;
  Milliseconds silence_deadline;  // of a daemon, for a save that nobody waits for (any more)
  Interrupt& ended;  // nobody wants the save any more: what waits for the daemon need not
};

struct SaveObserver {
  std::function<void(std::shared_ptr<const StatePlan>)>
      planned;  // the plan in use, if the request's did not fit
  // What may change soon has been read, where it lies in this process's memory; on devices its
  // reads are enqueued.
  std::function<void()> first_read;
  std::function<void(uint64_t attempt)> granted;
  std::function<void(uint64_t image_bytes)> copied;  // the tensors may change from now on
};

// Everything that was unmapped since the last time may go to another process.
void ReleaseDropped(Connection& connection, SlotMappings& mappings, Deadline deadline);

class SaveRun {
 public:
  SaveRun(const SaveContext& context, const SaveRequest& request, const SaveObserver& observer)
      : context_(context), request_(request), observer_(observer) {}

  Status Copy();
  Status Seal();
  // After Copy, instead of Seal.
  void GiveUp(const Status& why);
  // The slot, and the copies in it in the caller's order; between Copy and Seal or GiveUp.
  const SlotMapping& slot() const { return *slot_; }
  std::vector<std::span<const std::byte>> Copies() const;

 private:
  Status Plan();
  Status Begin();
  Status AskForSlot(std::vector<ForkClosedFd>& descriptors);
  Status Fill();
  Status WriteRecordAndSeal();
  Status SealWithNextDaemon(const Status& why);
  Deadline CallDeadline(Milliseconds longer = Milliseconds(0)) const;
  Deadline MindsSilence(Deadline deadline) const;
  Milliseconds LeftToWait() const;
  Status WithADaemon(const std::function<Status()>& doing) const;
  Status CompareInSlot() const;
  const void* Source(size_t input) const;
  int32_t DeviceOf(size_t input) const;

  const SaveContext& context_;
  const SaveRequest& request_;
  const SaveObserver& observer_;
  std::shared_ptr<const StatePlan> plan_;
  std::shared_ptr<Connection> connection_;
  std::optional<wire::Grant> grant_;
  SlotMapping* slot_ = nullptr;
  std::vector<uint64_t> digests_;
};

}  // namespace holdfast::client
