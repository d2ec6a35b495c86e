#include "client-lib/src/held_shard.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client-lib/src/errors.h"

namespace holdfast::client {
namespace {

constexpr Milliseconds kReleaseTime{1000};
constexpr size_t kTriesMax = 4;  // more than there are tiers
constexpr char kMemory[] = "memory";
constexpr char kNvme[] = "nvme";
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
  if (connection_->Call<wire::Done>(wire::ReleaseRead{ticket_->id()}, deadline).ok()) {
    ticket_->Settle();
  }
}

Status HeldShard::Confirm(Deadline deadline) {
  if (ticket_ == nullptr) {
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
    // A copy that is of no use: the same step from the next tier. (A daemon that knows memory only
    // offers it again.)
    const bool again = offered.has_value() && CopyIsBad(held.status()) &&
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
    Append(why, absl::StrCat(TierOf(*offered), " copy bad: ", bad.message()));
    wanted.choice = wire::Choice::kStep;
    wanted.step = offered->step;
    wanted.attempt = offered->attempt;
    wanted.without.push_back(TierOf(*offered));
  }
  return Status(bad.code(), why);
}

}  // namespace holdfast::client
