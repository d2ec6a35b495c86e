// One rank's shard of a committed checkpoint, opened from the nearest tier whose copy is good, for
// whoever takes no part in the attempt or reads other ranks' shards beside its own (docs/
// protocol.md §10, "Readers").
//
//   ShardSource source{socket, connection, interrupted};
//   auto held = HeldShard::Open(source, attach, HeldShard::Parts::kWhole, deadline, accept);
//   Use((*held)->shard().SliceBytes(i));
//   HF_TRY((*held)->Confirm(deadline));   // of a slot: it was of this filling to the last
//
// A slot is held at the daemon as long as the object lives; an open file keeps its bytes by itself.
// In a forked child everything is the parent's, and stays. Not thread-safe.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "client-lib/src/connection.h"
#include "client-lib/src/deadline.h"
#include "client-lib/src/fork_guard.h"
#include "client-lib/src/part_batches.h"
#include "client-lib/src/read_ticket.h"
#include "client-lib/src/sealed_shard.h"
#include "client-lib/src/shard_read.h"
#include "client-lib/src/wire.h"

namespace holdfast::client {

// Whom to ask for shards.
struct ShardSource {
  std::string socket;
  std::shared_ptr<Connection> connection;
  std::function<bool()> interrupted;  // asked before the daemon is waited for at the end; or null
};

class HeldShard {
 public:
  // Passes over copies that are of no use, for that in the next tier (`wanted.without` names more).
  // `accept` looks at each copy that was opened: what it fails with is what is wrong with it.
  enum class Parts : uint8_t {
    kWhole,      // of a remote file that leaves slices out the others' files are opened, too
    kFileAlone,  // slices that it leaves out are not to be had
  };
  using Accept = std::function<Status(HeldShard& held)>;
  static constexpr Milliseconds kAnyTime = Milliseconds::max();
  static Result<std::unique_ptr<HeldShard>> Open(const ShardSource& source, wire::Attach wanted,
                                                 Parts parts, Deadline deadline,
                                                 const Accept& accept);
  ~HeldShard();
  HeldShard(const HeldShard&) = delete;
  HeldShard& operator=(const HeldShard&) = delete;

  SealedShard& shard() { return *shard_; }
  const wire::Source& source() const { return source_; }
  const std::string& tier() const { return tier_; }
  // What became of the nearer copies.
  const std::string& why() const { return why_; }
  // Copies and verifies, as CopyOutOf; what lies on another node is brought here for it.
  // kUnavailable: it cannot be (any more). `each`: how long each batch of parts may take.
  Status CopyOut(CopyEngine& engine, const ShardRanges& ranges, const ShardSlices& slices,
                 const CopyOptions& options, Deadline deadline, Milliseconds each = kAnyTime);
  // Of a shard in parts: all of them, which one batch holds, are brought and verified; the pointers
  // are good until the next call.
  Result<std::vector<const std::byte*>> Show(CopyEngine& engine, const ShardRanges& ranges,
                                             const ShardSlices& slices, Deadline deadline);
  // Whoever asked to be asked may be gone when it is let go of.
  void ForgetInterrupt() { interrupted_ = nullptr; }
  // That a slot was of this filling until now; nothing to ask for of what lies in no slot.
  Status Confirm(Deadline deadline);

 private:
  // `ticket` null: nothing is held for it.
  HeldShard(const ShardSource& from, wire::Source source, std::unique_ptr<ReadTicket> ticket);
  static Result<std::unique_ptr<HeldShard>> OpenOffered(const ShardSource& from,
                                                        wire::Attach request, Parts parts,
                                                        Deadline deadline, const Accept& accept,
                                                        std::optional<wire::Source>& offered);
  void Release();
  Status Bring(const PartBatch& batch, bool contradicted, Deadline deadline);
  Status CopyBatch(CopyEngine& engine, const PartBatch& batch, const ShardSlices& slices,
                   const CopyOptions& options, Deadline deadline);

  const ForkOwner owner_;
  const std::string socket_;
  std::function<bool()> interrupted_;
  std::shared_ptr<Connection> connection_;
  const wire::Source source_;
  const std::string tier_;
  std::string why_;
  const std::unique_ptr<ReadTicket> ticket_;
  std::unique_ptr<SealedShard> shard_;
};

}  // namespace holdfast::client
