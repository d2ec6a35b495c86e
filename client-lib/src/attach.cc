// Attach: a committed shard as read-only tensors, straight in its slot or in its file in a durable
// tier. Nothing is copied, populated or digested before Read or Verify, so that it takes the same
// time for any size. A slot is held at the daemon; an open file keeps its bytes by itself.
#include <algorithm>
#include <atomic>
#include <functional>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "client-lib/src/background.h"
#include "client-lib/src/connection.h"
#include "client-lib/src/copy_engine.h"
#include "client-lib/src/fork_guard.h"
#include "client-lib/src/read_ticket.h"
#include "client-lib/src/sealed_shard.h"
#include "client-lib/src/socket.h"
#include "client-lib/src/state_match.h"
#include "client-lib/src/worker_pool.h"
#include "holdfast/view.h"

namespace holdfast {
namespace client {
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

class ShardView : public View {
 public:
  // `ticket` null: nothing is held for it.
  ShardView(std::string socket, std::shared_ptr<Connection> connection, wire::Source source,
            std::unique_ptr<ReadTicket> ticket, std::function<bool()> interrupted)
      : socket_(std::move(socket)),
        interrupted_(std::move(interrupted)),
        connection_(ticket != nullptr ? std::move(connection) : nullptr),
        source_(std::move(source)),
        tier_(TierOf(source_)),
        ticket_(std::move(ticket)) {}

  ~ShardView() override {
    if (owner_.forked()) {
      // The copy is not mapped here, and the hold is the parent's; so are threads and locks.
      static_cast<void>(shard_.release());
      static_cast<void>(engine_.release());
      static_cast<void>(turns_.release());
      new std::shared_ptr<Connection>(std::move(connection_));
      return;
    }
    shard_.reset();
    if (ticket_ != nullptr) {
      Release();
    }
  }

  // Tensors where they lie, and objects, which are copied and verified; the caller has the copy
  // open.
  Status Fill(std::unique_ptr<SealedShard> shard) {
    shard_ = std::move(shard);
    const Layout& layout = shard_->layout();
    std::vector<size_t> objects;
    tensors_.reserve(layout.slices.size());
    for (size_t i = 0; i < layout.slices.size(); ++i) {
      const Slice& slice = layout.slices[i];
      const std::byte* const bytes = shard_->SliceBytes(i);
      if (slice.kind == SliceKind::kTensor) {
        slices_.push_back(i);
        tensors_.push_back(ToTensor(slice));
        tensors_.back().data =
            const_cast<std::byte*>(bytes);  // read-only memory, as the header says
      } else {
        objects.push_back(i);
      }
    }
    std::vector<CopyOutRange> ranges = {shard_->HeaderRange()};
    std::vector<std::optional<size_t>> slices = {std::nullopt};
    objects_.reserve(objects.size());  // ranges point into the objects
    for (const size_t i : objects) {
      objects_.push_back(ToObject(layout.slices[i]));
      objects_.back().bytes.resize(layout.slices[i].bytes);
      ranges.push_back(shard_->SliceRange(i, objects_.back().bytes.data()));
      slices.emplace_back(i);
    }
    return Compare(ranges, slices, "its objects");
  }

  void SetWhy(std::string why) { why_ = std::move(why); }

  uint64_t attempt() const override { return source_.attempt; }
  uint64_t step() const override { return source_.step; }
  uint32_t world_size() const override { return source_.world_size; }
  const std::string& tier() const override { return tier_; }
  const std::string& why() const override { return why_; }
  const std::vector<Tensor>& tensors() const override { return tensors_; }
  const std::vector<Object>& objects() const override { return objects_; }
  bool verified() const override { return verified_.load(); }

  Status Read(size_t tensor, void* to) override {
    if (owner_.forked()) {
      return ForkedError();
    }
    return NoThrow([&]() -> Status {
      if (tensor >= slices_.size()) {
        return Status(Code::kInvalidArgument, absl::StrCat("read: there is no tensor ", tensor,
                                                           ", the shard has ", slices_.size()));
      }
      const size_t slice = slices_[tensor];
      return Compare({shard_->SliceRange(slice, to)}, {slice}, "read");
    });
  }

  Status Verify() override {
    if (owner_.forked()) {
      return ForkedError();
    }
    return NoThrow([this]() -> Status {
      std::vector<CopyOutRange> ranges = {shard_->HeaderRange()};
      std::vector<std::optional<size_t>> slices = {std::nullopt};
      for (size_t i = 0; i < shard_->layout().slices.size(); ++i) {
        ranges.push_back(shard_->SliceRange(i, nullptr));
        slices.emplace_back(i);
      }
      HF_TRY(Compare(ranges, slices, "verify"));
      verified_ = true;
      return Status();
    });
  }

 private:
  // Each range is a slice, or (none) the header.
  Status Compare(const std::vector<CopyOutRange>& ranges,
                 const std::vector<std::optional<size_t>>& slices, std::string_view operation) {
    Interrupt interrupt(interrupted_);
    const Result<Background::Turn> turn = turns_->Take(Deadline::Never().Or(interrupt));
    HF_TRY(WithContext(turn.status(), operation));
    if (engine_ == nullptr) {
      engine_ = MakeHostCopyEngine(CopyThreads(0));
    }
    CopyOptions options;
    options.populate = !shard_->populated();
    options.interrupt = &interrupt;
    const Result<std::optional<CopyMismatch>> compared = engine_->CopyOut(ranges, options);
    HF_TRY(WithContext(compared.status(), operation));
    const std::optional<CopyMismatch>& mismatch = *compared;
    if (!mismatch.has_value()) {
      return Status();  // what was cut short elsewhere is not what was read
    }
    Status status = shard_->MismatchError(*mismatch, slices[mismatch->range]);
    if (shard_->faulted()) {
      status = Status(status.code(),
                      absl::StrCat(status.message(), " (its file in ", tier_,
                                   " was cut short, or cannot be read any more: from there on it "
                                   "reads as zeros)"));
    }
    return WithContext(status, operation);
  }

  // A daemon that was restarted in between still has the hold in its notes. If there is none now,
  // the next connection of this process lets it go.
  void Release() {
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

  const ForkOwner owner_;
  const std::string socket_;
  const std::function<bool()> interrupted_;
  std::shared_ptr<Connection> connection_;
  const wire::Source source_;
  const std::string tier_;
  std::string why_;
  const std::unique_ptr<ReadTicket> ticket_;
  std::unique_ptr<SealedShard> shard_;
  std::vector<Tensor> tensors_;
  std::vector<size_t> slices_;  // of the tensors
  std::vector<Object> objects_;
  std::unique_ptr<Background> turns_ = std::make_unique<Background>();
  std::unique_ptr<CopyEngine> engine_;  // used by whoever has the turn
  std::atomic<bool> verified_{false};
};

// What a file in the remote tier leaves out lies in other ranks' files there: those are asked for
// one by one, and read as it is itself. (None of them is held: they are files.)
Status AddOwners(const std::string& socket, const std::shared_ptr<Connection>& connection,
                 const wire::Attach& request, const wire::Source& source, Deadline deadline,
                 SealedShard& shard) {
  for (const Rank rank : shard.Owners()) {
    wire::Attach attach = request;
    attach.rank = rank;
    attach.choice = wire::Choice::kStep;
    attach.step = source.step;
    attach.attempt = source.attempt;
    attach.without = {kMemory, kNvme};
    ReadTicket ticket(socket);
    attach.hold = ticket.id();
    attach.deadline_ms = deadline.DaemonMillis();
    const std::string context =
        absl::StrCat("the file of rank ", rank, ", which has slices of rank ", request.rank);
    Result<Answer<wire::Source>> answer = connection->Call<wire::Source>(attach, deadline);
    if (answer.ok() ? answer->message.hold == 0
                    : connection->alive() && answer.status().code() != Code::kDeadlineExceeded) {
      ticket.Settle();
    }
    HF_TRY(WithContext(answer.status(), context));
    HF_TRY(WithContext(shard.AddOwner(answer->message, answer->descriptors, {request.job, rank}),
                       context));
  }
  return Status();
}

// The copy that the daemon offers, opened. `tier`: in which tier it lies, if one was offered.
Result<std::unique_ptr<ShardView>> OpenOffered(const std::string& socket,
                                               const std::shared_ptr<Connection>& connection,
                                               wire::Attach request, Deadline deadline,
                                               const std::function<bool()>& interrupted,
                                               std::optional<wire::Source>& offered) {
  auto ticket = std::make_unique<ReadTicket>(socket);
  request.hold = ticket->id();
  request.deadline_ms = deadline.DaemonMillis();
  Result<Answer<wire::Source>> source = connection->Call<wire::Source>(request, deadline);
  if (source.ok() ? source->message.hold == 0
                  : connection->alive() && source.status().code() != Code::kDeadlineExceeded) {
    ticket->Settle();  // refused, or nothing is held
    ticket.reset();
  }
  HF_TRY(source.status());
  offered = source->message;
  // From here on the view lets go of the copy, whatever happens.
  const bool held = ticket != nullptr;
  auto view = std::make_unique<ShardView>(socket, connection, source->message, std::move(ticket),
                                          interrupted);
  HF_TRY_ASSIGN(std::unique_ptr<SealedShard> shard,
                SealedShard::Open(source->message, source->descriptors, {request.job, request.rank},
                                  /*mine=*/nullptr));
  HF_TRY(AddOwners(socket, connection, request, source->message, deadline, *shard));
  HF_TRY(view->Fill(std::move(shard)));
  if (held) {
    HF_TRY(connection
               ->Call<wire::Done>(
                   wire::ConfirmRead{source->message.slot, source->message.generation}, deadline)
               .status());
  }
  return view;
}

Result<std::unique_ptr<View>> AttachShard(const AttachOptions& options) {
  HF_TRY(FromAbslStatus(CheckJobName(options.job), "attach"));
  Interrupt interrupt(options.interrupted);
  const Deadline deadline = Deadline::In(options.deadline).Or(interrupt);
  const std::string socket = SocketPath(options.socket);
  const std::string context = absl::StrCat("attach job '", options.job, "' rank ", options.rank);
  Result<std::shared_ptr<Connection>> connection = Connection::Dial(socket, deadline);
  HF_TRY(WithContext(connection.status(), context));
  wire::Attach attach;
  attach.job = options.job;
  attach.rank = options.rank;
  attach.choice = options.newest ? wire::Choice::kNewest : wire::Choice::kStep;
  attach.step = options.newest ? 0 : options.step;
  attach.attempt = options.newest ? 0 : options.attempt;
  attach.any_tier = true;
  attach.without = options.without;
  Status bad;       // of the last copy that was offered
  std::string why;  // what became of all of them
  for (size_t tries = 0; tries < kTriesMax; ++tries) {
    std::optional<wire::Source> offered;
    Result<std::unique_ptr<ShardView>> view =
        OpenOffered(socket, *connection, attach, deadline, options.interrupted, offered);
    if (view.ok()) {
      if (!offered->why.empty()) {
        absl::StrAppend(&why, why.empty() ? "" : ", ", ForWire(offered->why, kWhyBytesMax));
      }
      (*view)->SetWhy(std::move(why));
      return std::unique_ptr<View>(*std::move(view));
    }
    // A copy that is of no use: the same step from the next tier. (A daemon that knows memory only
    // offers it again.)
    const bool again = offered.has_value() && CopyIsBad(view.status()) &&
                       std::find(attach.without.begin(), attach.without.end(), TierOf(*offered)) ==
                           attach.without.end();
    if (!again) {
      const Status last = view.status();
      if (bad.ok() || offered.has_value()) {
        return WithContext(last, context);
      }
      const bool later =  // another one may be had then
          last.code() == Code::kUnavailable || last.code() == Code::kDeadlineExceeded;
      return WithContext(
          Status(later ? last.code() : bad.code(), absl::StrCat(why, "; ", last.message())),
          context);
    }
    bad = view.status();
    absl::StrAppend(&why, why.empty() ? "" : ", ",
                    offered->why.empty() ? "" : ForWire(offered->why, kWhyBytesMax) + ", ",
                    TierOf(*offered), " copy bad: ", bad.message());
    attach.choice = wire::Choice::kStep;
    attach.step = offered->step;
    attach.attempt = offered->attempt;
    attach.without.push_back(TierOf(*offered));
  }
  return WithContext(Status(bad.code(), why), context);
}

Result<std::vector<CheckpointInfo>> List(const ListOptions& options) {
  HF_TRY(FromAbslStatus(CheckJobName(options.job), "list"));
  Interrupt interrupt(options.interrupted);
  const Deadline deadline = Deadline::In(options.deadline).Or(interrupt);
  const std::string context = absl::StrCat("list the checkpoints of job '", options.job, "'");
  const Result<std::shared_ptr<Connection>> connection =
      Connection::Dial(SocketPath(options.socket), deadline);
  HF_TRY(WithContext(connection.status(), context));
  std::vector<CheckpointInfo> all;
  wire::List list;
  list.job = options.job;
  for (bool more = true; more;) {
    list.deadline_ms = deadline.DaemonMillis();
    Result<Answer<wire::Listing>> page = (*connection)->Call<wire::Listing>(list, deadline);
    if (page.status().code() == Code::kUnavailable && !(*connection)->alive()) {
      return WithContext(
          Status(page.status().code(),
                 absl::StrCat(page.status().message(),
                              "; is it older than this library? then it cannot list")),
          context);
    }
    HF_TRY(WithContext(page.status(), context));
    more = page->message.more;
    for (wire::ListedCheckpoint& listed : page->message.checkpoints) {
      const CheckpointId id{listed.attempt, listed.step};
      if (list.before && !(id < CheckpointId{list.before_attempt, list.before_step})) {
        return Status(
            Code::kInternal,
            absl::StrCat(context, ": ckptd lists attempt ", id.attempt, " step ", id.step,
                         " after attempt ", list.before_attempt, " step ", list.before_step));
      }
      list.before = true;
      list.before_attempt = id.attempt;
      list.before_step = id.step;
      CheckpointInfo& info = all.emplace_back();
      info.attempt = listed.attempt;
      info.step = listed.step;
      info.world_size = listed.world_size;
      info.on_line = listed.on_line;
      info.tiers = std::move(listed.tiers);
      info.bytes = listed.bytes;
      info.saved_unix_ms = listed.unix_ms;
    }
    if (more && page->message.checkpoints.empty()) {
      return Status(Code::kInternal,
                    absl::StrCat(context, ": ckptd sent an empty page, and says that more come"));
    }
  }
  return all;
}

}  // namespace
}  // namespace client

Result<std::unique_ptr<View>> Attach(const AttachOptions& options) {
  return client::NoThrow(
      [&]() -> Result<std::unique_ptr<View>> { return client::AttachShard(options); });
}

Result<std::vector<CheckpointInfo>> ListCheckpoints(const ListOptions& options) {
  return client::NoThrow(
      [&]() -> Result<std::vector<CheckpointInfo>> { return client::List(options); });
}

}  // namespace holdfast
