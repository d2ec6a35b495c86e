// One restore (docs/protocol.md §6): enters the attempt's session, loads what it offers, verifying
// every block, reports, and goes on with what the session offers next, until all ranks have the
// same step.
//
//   Result<Restored> restored = RestoreRun(link, mappings, engine, options, state).Run(deadline);
//
// Runs on the caller's thread. Survives a restart of the daemon in between: it joins and enters
// again.
//
// A state that is not what was saved (another name, type, shape or place) is the caller's mistake,
// and no older step would mend it. It is found before a byte is copied and reported as
// wants_mismatch, which ends the session for all ranks with kInvalidArgument, instead of making
// them fall back. Which other failures are the copy's, and make all ranks fall back: CopyIsBad.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "client-lib/src/copy_engine.h"
#include "client-lib/src/daemon_link.h"
#include "client-lib/src/read_ticket.h"
#include "client-lib/src/sealed_shard.h"
#include "holdfast/job.h"

namespace holdfast::client {

class RestoreRun {
 public:
  RestoreRun(DaemonLink& link, SlotMappings& mappings, CopyEngine& engine,
             const RestoreOptions& options, State& state)
      : link_(link), mappings_(mappings), engine_(engine), options_(options), state_(state) {}

  Result<Restored> Run(Deadline deadline);

 private:
  // What came of one source.
  struct Load {
    Load(Status what, bool is_mismatch = false, std::unique_ptr<SealedShard> opened = nullptr)
        : status(std::move(what)), mismatch(is_mismatch), shard(std::move(opened)) {}
    Status status;
    bool mismatch;
    std::unique_ptr<SealedShard> shard;  // to be unmapped when nobody waits for it
  };

  Result<Answer<wire::SessionOutcome>> Enter(Deadline deadline);
  // What the answer to the ticket's request makes of it.
  void Keep(std::unique_ptr<ReadTicket> ticket, const Result<Answer<wire::SessionOutcome>>& answer);
  // An explicit step is never answered with another one.
  Status CheckChoice(const wire::SessionOutcome& outcome) const;
  void Decline(const wire::SessionOutcome& offer, const Status& why, Deadline deadline);
  Result<Answer<wire::SessionOutcome>> ReportAndRelease(wire::ReportLoad report,
                                                        const wire::Source& source,
                                                        std::unique_ptr<SealedShard> shard,
                                                        Deadline deadline);
  Result<Answer<wire::SessionOutcome>> LoadAndReport(const Answer<wire::SessionOutcome>& offer,
                                                     Deadline deadline);
  Load LoadSource(const wire::Source& source, const std::vector<UniqueFd>& descriptors,
                  Deadline deadline);
  Status Copy(const SealedShard& shard, const std::vector<size_t>& slices);

  DaemonLink& link_;
  SlotMappings& mappings_;  // a slot that this process filled itself is read where it lies
  CopyEngine& engine_;
  const RestoreOptions& options_;
  State& state_;
  std::shared_ptr<Connection> connection_;
  std::unique_ptr<ReadTicket> held_;  // of the source on offer
  Restored restored_;
  std::vector<Object> objects_;  // as they will be in the state when all is well
  CheckpointId loaded_;          // what is in the tensors now; attempt 0: nothing whole
  Status problem_;               // what was wrong with the last source
  Status mismatch_;              // the caller's mistake, once one was found
};

}  // namespace holdfast::client
