// One restore (docs/protocol.md §6): enters the attempt's session, loads what it offers, verifying
// every block, reports, and goes on with what the session offers next, until all ranks have the
// same step.
//
//   RestoreRun run(link, mappings, engine, options, wants, fences, meter);
//   HF_TRY_ASSIGN(Restored restored, run.Run(deadline));
//   state.objects = run.TakeObjects();
// Runs on the caller's thread. Survives a restart of the daemon in between: it joins and enters
// again.
//
// A state that is not what was saved (another name, type, shape or place) is the caller's mistake,
// and no older step would mend it. It is found before a byte is copied and reported as
// wants_mismatch, which ends the session for all ranks with kInvalidArgument, instead of making
// them fall back. Which other failures are the copy's, and make all ranks fall back: CopyIsBad.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "client-lib/src/copy_engine.h"
#include "client-lib/src/daemon_link.h"
#include "client-lib/src/device_fence.h"
#include "client-lib/src/read_ticket.h"
#include "client-lib/src/restore_meter.h"
#include "client-lib/src/sealed_shard.h"
#include "client-lib/src/step_shards.h"
#include "holdfast/job.h"
#include "tiers/image/layout.h"

namespace holdfast::client {

class RestoreRun {
 public:
  // What is wanted of a step; `saved` says what it has, with objects that have been read and
  // verified. What it returns must stay until the next call or the end of Run. A failure counts as
  // the caller's mistake.
  struct Wanted {
    const State* state = nullptr;
    bool objects = false;  // its objects, too: else whoever said what is wanted has seen them
  };
  using WhatIsSaved = std::function<Result<Saved>()>;
  using Wants = std::function<Result<Wanted>(const WhatIsSaved& saved)>;
  // The fence of what is wanted; null if no tensor of it is on a device.
  using Fences = std::function<Result<std::shared_ptr<DeviceFence>>(const State& wanted)>;

  RestoreRun(DaemonLink& link, SlotMappings& mappings, CopyEngine& engine,
             const RestoreOptions& options, const Wants& wants, const Fences& fences,
             RestoreMeter& meter)
      : link_(link),
        mappings_(mappings),
        engine_(engine),
        options_(options),
        wants_(wants),
        fences_(fences),
        meter_(meter) {}

  Result<Restored> Run(Deadline deadline);
  // Those that were wanted, after a Run that was OK.
  std::vector<Object> TakeObjects() { return std::move(objects_); }

 private:
  // What came of one source, or of a step's shards.
  struct Load {
    Load(Status what, bool is_mismatch = false, std::unique_ptr<SealedShard> opened = nullptr)
        : status(std::move(what)), mismatch(is_mismatch), shard(std::move(opened)) {}
    Status status;
    bool mismatch;
    bool elsewhere = false;              // the mismatch: others' shards may have it
    bool of_another_run = false;         // the mismatch: the step has another label
    bool resharded = false;              // out of several shards
    std::unique_ptr<SealedShard> shard;  // to be unmapped when nobody waits for it
  };

  Result<Restored> Adopt(Deadline deadline);
  void NotePassedOver(const wire::SessionOutcome& outcome);
  Result<Answer<wire::SessionOutcome>> Enter(Deadline deadline);
  // What the answer to the ticket's request makes of it.
  void Keep(std::unique_ptr<ReadTicket> ticket, const Result<Answer<wire::SessionOutcome>>& answer);
  // An explicit step is never answered with another one.
  Status CheckChoice(const wire::SessionOutcome& outcome) const;
  void Decline(const wire::SessionOutcome& offer, const Status& why, Deadline deadline);
  // `slot`: where the shard lies, if there is one.
  Result<Answer<wire::SessionOutcome>> ReportAndRelease(wire::ReportLoad report,
                                                        std::optional<uint32_t> slot,
                                                        std::unique_ptr<SealedShard> shard,
                                                        Deadline deadline);
  Result<Answer<wire::SessionOutcome>> LoadAndReport(const Answer<wire::SessionOutcome>& offer,
                                                     Deadline deadline);
  Load LoadSource(const wire::Source& source, const std::vector<ForkClosedFd>& descriptors,
                  Deadline deadline);
  // Out of all shards of the step.
  Result<Answer<wire::SessionOutcome>> ReshardAndReport(const wire::SessionOutcome& offer,
                                                        Deadline deadline);
  Load Reshard(CheckpointId checkpoint, uint32_t saved_by, Deadline deadline);
  Result<Saved> SavedByAll(const StepShards& shards, Deadline deadline);
  Result<std::vector<Object>> ObjectsOf(const State& wanted, const StepShards& shards,
                                        Deadline deadline);
  Result<Object> Merged(const Object& wanted, const std::vector<size_t>& contents,
                        const StepShards& shards, Deadline deadline);
  bool IsOfAnotherRun(const Status& wanted) const;
  // What this rank made of what was offered.
  wire::ReportLoad ReportOf(const wire::SessionOutcome& offer, const Load& load, Deadline deadline);
  Status CopyTensors(const SealedShard& shard, const State& wanted,
                     const std::vector<size_t>& slices, Interrupt* interrupt);

  DaemonLink& link_;
  SlotMappings& mappings_;  // a slot that this process filled itself is read where it lies
  CopyEngine& engine_;
  const RestoreOptions& options_;
  const Wants& wants_;
  const Fences& fences_;
  RestoreMeter& meter_;
  std::shared_ptr<Connection> connection_;
  std::unique_ptr<ReadTicket> held_;  // of the source on offer
  Restored restored_;
  std::vector<Object> objects_;  // of the last copy that was loaded
  CheckpointId loaded_;          // what is in the tensors now; attempt 0: nothing whole
  Status problem_;               // what was wrong with the last source
  bool saw_itself_ = false;      // why a step was passed over
  Status mismatch_;              // the caller's mistake, once one was found
};

}  // namespace holdfast::client
