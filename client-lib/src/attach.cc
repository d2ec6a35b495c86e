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
#include "client-lib/src/held_shard.h"
#include "client-lib/src/sealed_shard.h"
#include "client-lib/src/shard_read.h"
#include "client-lib/src/socket.h"
#include "client-lib/src/state_match.h"
#include "client-lib/src/worker_pool.h"
#include "holdfast/view.h"

namespace holdfast {
namespace client {
namespace {

// `operation`: for messages.
Status Compare(HeldShard& held, CopyEngine& engine, const ShardRanges& ranges,
               const ShardSlices& slices, Interrupt& interrupt, std::string_view operation) {
  const SealedShard& shard = held.shard();
  CopyOptions options;
  options.populate = !shard.populated();
  options.interrupt = &interrupt;
  const Result<std::optional<CopyMismatch>> compared = engine.CopyOut(ranges, options);
  HF_TRY(WithContext(compared.status(), operation));
  const std::optional<CopyMismatch>& mismatch = *compared;
  if (!mismatch.has_value()) {
    return Status();  // what was cut short elsewhere is not what was read
  }
  Status status = shard.MismatchError(*mismatch, slices[mismatch->range]);
  if (shard.faulted()) {
    status = Status(status.code(),
                    absl::StrCat(status.message(), " (its file in ", held.tier(),
                                 " was cut short, or cannot be read any more: from there on it "
                                 "reads as zeros)"));
  }
  return WithContext(status, operation);
}

class ShardView : public View {
 public:
  // The objects have been verified, with that engine.
  ShardView(std::unique_ptr<HeldShard> held, std::vector<Object> objects,
            std::unique_ptr<CopyEngine> engine, std::function<bool()> interrupted)
      : interrupted_(std::move(interrupted)),
        held_(std::move(held)),
        objects_(std::move(objects)),
        engine_(std::move(engine)) {
    const Layout& layout = shard().layout();
    tensors_.reserve(layout.slices.size());
    for (size_t i = 0; i < layout.slices.size(); ++i) {
      if (layout.slices[i].kind == SliceKind::kTensor) {
        slices_.push_back(i);
        tensors_.push_back(ToTensor(layout.slices[i]));
        tensors_.back().data =
            const_cast<std::byte*>(shard().SliceBytes(i));  // read-only, as the header says
      }
    }
  }

  ~ShardView() override {
    if (owner_.forked()) {  // threads and locks are the parent's
      static_cast<void>(engine_.release());
      static_cast<void>(turns_.release());
    }
  }

  uint64_t attempt() const override { return held_->source().attempt; }
  uint64_t step() const override { return held_->source().step; }
  uint32_t world_size() const override { return held_->source().world_size; }
  const std::string& tier() const override { return held_->tier(); }
  const std::string& why() const override { return held_->why(); }
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
      return CompareInTurn({shard().SliceRange(slice, to)}, {slice}, "read");
    });
  }

  Status Verify() override {
    if (owner_.forked()) {
      return ForkedError();
    }
    return NoThrow([this]() -> Status {
      ShardRanges ranges = {shard().HeaderRange()};
      ShardSlices slices = {std::nullopt};
      for (size_t i = 0; i < shard().layout().slices.size(); ++i) {
        ranges.push_back(shard().SliceRange(i, nullptr));
        slices.emplace_back(i);
      }
      HF_TRY(CompareInTurn(ranges, slices, "verify"));
      verified_ = true;
      return Status();
    });
  }

 private:
  Status CompareInTurn(const ShardRanges& ranges, const ShardSlices& slices,
                       std::string_view operation) {
    Interrupt interrupt(interrupted_);
    const Result<Background::Turn> turn = turns_->Take(Deadline::Never().Or(interrupt));
    HF_TRY(WithContext(turn.status(), operation));
    return Compare(*held_, *engine_, ranges, slices, interrupt, operation);
  }

  SealedShard& shard() const { return held_->shard(); }

  const ForkOwner owner_;
  const std::function<bool()> interrupted_;
  const std::unique_ptr<HeldShard> held_;
  std::vector<Tensor> tensors_;
  std::vector<size_t> slices_;  // of the tensors
  std::vector<Object> objects_;
  std::unique_ptr<Background> turns_ = std::make_unique<Background>();
  std::unique_ptr<CopyEngine> engine_;  // used by whoever has the turn
  std::atomic<bool> verified_{false};
};

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
  const ShardSource source{socket, *connection, options.interrupted};
  std::unique_ptr<CopyEngine> engine = MakeHostCopyEngine(CopyThreads(0));
  std::vector<Object> objects;
  // Damaged objects make a copy as useless as a damaged record.
  const auto accept = [&](HeldShard& held) -> Status {
    HF_TRY_ASSIGN(objects, ReadObjects(held.shard(), [&](const ShardRanges& ranges,
                                                         const ShardSlices& slices) {
                    return Compare(held, *engine, ranges, slices, interrupt, "its objects");
                  }));
    return held.Confirm(deadline);
  };
  Result<std::unique_ptr<HeldShard>> held =
      HeldShard::Open(source, attach, HeldShard::Parts::kWhole, deadline, accept);
  HF_TRY(WithContext(held.status(), context));
  return std::unique_ptr<View>(std::make_unique<ShardView>(*std::move(held), std::move(objects),
                                                           std::move(engine), options.interrupted));
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
