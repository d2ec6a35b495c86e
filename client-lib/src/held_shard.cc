#include "client-lib/src/held_shard.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client-lib/src/errors.h"

namespace holdfast::client {
namespace {

constexpr Milliseconds kReleaseTime{1000};
constexpr size_t kTriesMax = 5;  // more than there are tiers
// Ways to a shard's bytes on other nodes that are tried when what comes contradicts the digests: by
// two means each, of up to eight nodes. (The daemon ends it when all that it reaches have done so.)
constexpr size_t kWaysMax = 17;
constexpr size_t kRemoteWaysMax = 6;  // it is one file, whoever reads it
constexpr char kMemory[] = "memory";
constexpr char kNvme[] = "nvme";
constexpr char kRemote[] = "remote";
constexpr size_t kWhyBytesMax = 4096;

// A daemon that knows memory only does not say so.
std::string TierOf(const wire::Source& source) {
  return source.tier.empty() ? kMemory : source.tier;
}

void Append(std::string& why, const std::string& more) {
  if (!more.empty()) {
    absl::StrAppend(&why, why.empty() ? "" : ", ", more);
  }
}

// What a file in the remote tier leaves out lies in other ranks' files there: those are asked for
// one by one, and read as it is itself. (None of them is held: they are files.)
Status AddOwners(const ShardSource& from, const wire::Attach& request, const wire::Source& source,
                 Deadline deadline, SealedShard& shard) {
  for (const Rank rank : shard.Owners()) {
    wire::Attach attach = request;
    attach.rank = rank;
    attach.choice = wire::Choice::kStep;
    attach.step = source.step;
    attach.attempt = source.attempt;
    attach.without = {kMemory, kNvme};
    attach.parts = false;
    ReadTicket ticket(from.socket);
    attach.hold = ticket.id();
    attach.deadline_ms = deadline.DaemonMillis();
    const std::string context =
        absl::StrCat("the file of rank ", rank, ", which has slices of rank ", request.rank);
    Result<Answer<wire::Source>> answer = from.connection->Call<wire::Source>(attach, deadline);
    if (answer.ok()
            ? answer->message.hold == 0
            : from.connection->alive() && answer.status().code() != Code::kDeadlineExceeded) {
      ticket.Settle();
    }
    HF_TRY(WithContext(answer.status(), context));
    HF_TRY(WithContext(shard.AddOwner(answer->message, answer->descriptors, {request.job, rank}),
                       context));
  }
  return Status();
}

}  // namespace

HeldShard::HeldShard(const ShardSource& from, wire::Source source,
                     std::unique_ptr<ReadTicket> ticket)
    : socket_(from.socket),
      interrupted_(from.interrupted),
      connection_(ticket != nullptr ? from.connection : nullptr),
      source_(std::move(source)),
      tier_(TierOf(source_)),
      ticket_(std::move(ticket)) {}

HeldShard::~HeldShard() {
  if (owner_.forked()) {
    // The copy is not mapped here, and the hold is the parent's; so are locks.
    static_cast<void>(shard_.release());
    new std::shared_ptr<Connection>(std::move(connection_));
    return;
  }
  shard_.reset();
  if (ticket_ != nullptr) {
    Release();
  }
}

// A daemon that was restarted in between still has the hold in its notes. If there is none now,
// the next connection of this process lets it go.
void HeldShard::Release() {
  Interrupt interrupt(interrupted_);
  const Deadline deadline = Deadline::In(kReleaseTime).Or(interrupt);
  deadline.Look();
  if (deadline.passed()) {
    return;  // one of many that go at once
  }
  if (!connection_->alive()) {
    Result<std::shared_ptr<Connection>> fresh = Connection::Dial(socket_, deadline);
    if (!fresh.ok()) {
      return;
    }
    connection_ = *fresh;
  }
  const Result<uint64_t> id = connection_->Send(wire::ReleaseRead{ticket_->id()}, deadline);
  if (!id.ok()) {
    return;
  }
  const Status released = connection_->Receive<wire::Done>(*id, deadline).status();
  if (released.ok()) {
    ticket_->Settle();
  } else if (released.code() == Code::kDeadlineExceeded) {
    connection_->Forget(*id);  // it is only slow: what is asked for next waits as long as it may
  }
}

Status HeldShard::Bring(const PartBatch& batch, bool contradicted, Deadline deadline) {
  wire::ReadParts read;
  read.hold = source_.hold;
  read.contradicted = contradicted;
  for (const PartRun& run : batch.runs) {
    read.offset.push_back(run.offset);
    read.bytes.push_back(run.bytes);
    read.place.push_back(run.place);
  }
  read.deadline_ms = deadline.DaemonMillis();
  return connection_->Call<wire::Done>(read, deadline).status();
}

Status HeldShard::CopyBatch(CopyEngine& engine, const PartBatch& batch, const ShardSlices& slices,
                            const CopyOptions& options, Deadline deadline) {
  ShardSlices of_batch;
  for (const size_t range : batch.range_of) {
    of_batch.push_back(slices[range]);
  }
  Status copied;
  const size_t ways = tier_ == kRemote ? kRemoteWaysMax : kWaysMax;
  for (size_t way = 0; way < ways; ++way) {
    HF_TRY(Bring(batch, /*contradicted=*/way > 0, deadline));
    copied = CopyOutOf(*shard_, engine, batch.ranges, of_batch, options);
    if (copied.code() != Code::kCorrupt) {
      break;
    }
  }
  return copied;
}

Status HeldShard::CopyOut(CopyEngine& engine, const ShardRanges& ranges, const ShardSlices& slices,
                          const CopyOptions& options, Deadline deadline, Milliseconds each) {
  if (!shard_->in_parts()) {
    return CopyOutOf(*shard_, engine, ranges, slices, options);
  }
  PartBatches batches(ranges, shard_->image(), shard_->parts_memory());
  while (const std::optional<PartBatch> batch = batches.Next()) {
    const Deadline until = each == kAnyTime ? deadline : deadline.Earlier(Deadline::In(each));
    HF_TRY(CopyBatch(engine, *batch, slices, options, until));
  }
  return batches.done() ? Status()
                        : Status(Code::kInternal, "the memory for parts of a shard is too small");
}

Result<std::vector<const std::byte*>> HeldShard::Show(CopyEngine& engine, const ShardRanges& ranges,
                                                      const ShardSlices& slices,
                                                      Deadline deadline) {
  PartBatches batches(ranges, shard_->image(), shard_->parts_memory());
  const std::optional<PartBatch> batch = batches.Next();
  if (!batch || batch->ranges.size() != ranges.size() || batches.Next()) {
    return Status(Code::kInternal, "more than fits into the memory for parts was to be shown");
  }
  CopyOptions options;
  options.interrupt = deadline.interrupt();
  HF_TRY(CopyBatch(engine, *batch, slices, options, deadline));
  std::vector<const std::byte*> shown;
  for (const CopyOutRange& range : batch->ranges) {
    shown.push_back(static_cast<const std::byte*>(range.from));
  }
  return shown;
}

Status HeldShard::Confirm(Deadline deadline) {
  if (ticket_ == nullptr || shard_->in_parts()) {  // (its daemon asked the other node each time)
    return Status();
  }
  return connection_
      ->Call<wire::Done>(wire::ConfirmRead{source_.slot, source_.generation}, deadline)
      .status();
}

// The copy that the daemon offers, opened. `offered`: what that was, if it offered one.
Result<std::unique_ptr<HeldShard>> HeldShard::OpenOffered(const ShardSource& from,
                                                          wire::Attach request, Parts parts,
                                                          Deadline deadline, const Accept& accept,
                                                          std::optional<wire::Source>& offered) {
  auto ticket = std::make_unique<ReadTicket>(from.socket);
  request.hold = ticket->id();
  request.deadline_ms = deadline.DaemonMillis();
  Result<Answer<wire::Source>> answer = from.connection->Call<wire::Source>(request, deadline);
  if (answer.ok() ? answer->message.hold == 0
                  : from.connection->alive() && answer.status().code() != Code::kDeadlineExceeded) {
    ticket->Settle();  // refused, or nothing is held
    ticket.reset();
  }
  HF_TRY(answer.status());
  offered = answer->message;
  // From here on the copy is let go, whatever happens.
  std::unique_ptr<HeldShard> held(new HeldShard(from, answer->message, std::move(ticket)));
  HF_TRY_ASSIGN(held->shard_,
                SealedShard::Open(answer->message, answer->descriptors, {request.job, request.rank},
                                  /*mine=*/nullptr));
  if (parts == Parts::kWhole) {
    HF_TRY(AddOwners(from, request, answer->message, deadline, *held->shard_));
  }
  HF_TRY(accept(*held));
  return held;
}

Result<std::unique_ptr<HeldShard>> HeldShard::Open(const ShardSource& source, wire::Attach wanted,
                                                   Parts parts, Deadline deadline,
                                                   const Accept& accept) {
  Status bad;       // of the last copy that was offered
  std::string why;  // what became of all of them
  for (size_t tries = 0; tries < kTriesMax; ++tries) {
    std::optional<wire::Source> offered;
    Result<std::unique_ptr<HeldShard>> held =
        OpenOffered(source, wanted, parts, deadline, accept, offered);
    if (held.ok()) {
      Append(why, ForWire(offered->why, kWhyBytesMax));
      (*held)->why_ = std::move(why);
      return held;
    }
    // A copy that is of no use, or on nodes that cannot be read: the same step from the next tier.
    // (A daemon that knows memory only offers it again.)
    const bool unreached = offered.has_value() && offered->parts_bytes > 0 &&
                           held.status().code() == Code::kUnavailable;
    const bool again = offered.has_value() && (unreached || CopyIsBad(held.status())) &&
                       std::find(wanted.without.begin(), wanted.without.end(), TierOf(*offered)) ==
                           wanted.without.end();
    if (!again) {
      const Status last = held.status();
      if (bad.ok() || offered.has_value()) {
        return last;
      }
      const bool later =  // another one may be had then
          last.code() == Code::kUnavailable || last.code() == Code::kDeadlineExceeded;
      return Status(later ? last.code() : bad.code(), absl::StrCat(why, "; ", last.message()));
    }
    bad = held.status();
    Append(why, ForWire(offered->why, kWhyBytesMax));
    Append(why,
           absl::StrCat(TierOf(*offered),
                        unreached ? " copy not readable now: " : " copy bad: ", bad.message()));
    wanted.choice = wire::Choice::kStep;
    wanted.step = offered->step;
    wanted.attempt = offered->attempt;
    wanted.without.push_back(TierOf(*offered));
  }
  return Status(bad.code(), why);
}

}  // namespace holdfast::client
