// Nothing is copied, populated or digested before Read or Verify, so that it takes the same time
// for any size. A slot is held at the daemon; an open file keeps its bytes by itself.
#include "client-lib/src/shard_view.h"

#include <atomic>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/digest.h"
#include "client-lib/src/background.h"
#include "client-lib/src/connection.h"
#include "client-lib/src/copy_engine.h"
#include "client-lib/src/errors.h"
#include "client-lib/src/fork_guard.h"
#include "client-lib/src/held_shard.h"
#include "client-lib/src/sealed_shard.h"
#include "client-lib/src/shard_read.h"
#include "client-lib/src/state_match.h"
#include "client-lib/src/worker_pool.h"

namespace holdfast::client {
namespace {

constexpr char kPeerTier[] = "peer";

// The shard of another node that was read last in this process, between calls. No lock, which a
// forked child might find taken for ever.
class Parked {
 public:
  static uint64_t NewView() { return next_view_.fetch_add(1) + 1; }
  static void Put(uint64_t view, std::unique_ptr<HeldShard> held) {
    held->ForgetInterrupt();  // it is let go of in other views' calls
    Replace(new Parked(view, std::move(held)));
  }
  // That of the view, if it was the last one; another's is let go of.
  static std::unique_ptr<HeldShard> Take(uint64_t view) {
    const std::unique_ptr<Parked> parked(place_.exchange(nullptr));
    return parked != nullptr && parked->view_ == view ? std::move(parked->held_) : nullptr;
  }

 private:
  Parked(uint64_t view, std::unique_ptr<HeldShard> held) : view_(view), held_(std::move(held)) {}
  static void Replace(Parked* parked) { delete place_.exchange(parked); }

  static std::atomic<uint64_t> next_view_;
  static std::atomic<Parked*> place_;
  const uint64_t view_;
  std::unique_ptr<HeldShard> held_;
};
std::atomic<uint64_t> Parked::next_view_{0};
std::atomic<Parked*> Parked::place_{nullptr};

// What is to be read of the shard as it was opened: ranges of slices.
using Reads =
    std::function<void(const SealedShard& shard, ShardRanges& ranges, ShardSlices& slices)>;

// `operation`: for messages.
Status CompareInPlace(HeldShard& held, CopyEngine& engine, const ShardRanges& ranges,
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

Status Compare(HeldShard& held, CopyEngine& engine, const ShardRanges& ranges,
               const ShardSlices& slices, Milliseconds patience, Interrupt& interrupt,
               std::string_view operation) {
  if (!held.shard().in_parts()) {
    return CompareInPlace(held, engine, ranges, slices, interrupt, operation);
  }
  CopyOptions options;
  options.interrupt = &interrupt;
  return WithContext(
      held.CopyOut(engine, ranges, slices, options, Deadline::Never().Or(interrupt), patience),
      operation);
}

class ShardView : public View {
 public:
  // The objects have been verified, with that engine.
  ShardView(WantedView wanted, std::unique_ptr<HeldShard> held, std::vector<Object> objects,
            std::unique_ptr<CopyEngine> engine)
      : wanted_(std::move(wanted)),
        source_(held->source()),
        tier_(held->tier()),
        why_(held->why()),
        in_parts_(held->shard().in_parts()),
        objects_(std::move(objects)),
        held_(std::move(held)),
        engine_(std::move(engine)) {
    const SealedShard& shard = held_->shard();
    const Layout& layout = shard.layout();
    tensors_.reserve(layout.slices.size());
    for (size_t i = 0; i < layout.slices.size(); ++i) {
      if (layout.slices[i].kind == SliceKind::kTensor) {
        slices_.push_back(i);
        tensors_.push_back(ToTensor(layout.slices[i]));
        const CopyOutRange range = shard.SliceRange(i, nullptr);
        const uint64_t blocks = (range.bytes + kDigestBlockBytes - 1) / kDigestBlockBytes;
        tensor_digests_.push_back(Crc64(range.digests, blocks * sizeof(uint64_t)));
        // Read-only, as the header says.
        tensors_.back().data = in_parts_ ? nullptr : const_cast<std::byte*>(shard.SliceBytes(i));
      }
    }
    if (in_parts_) {
      layout_bytes_ = shard.record().layout_bytes;
      digests_ = shard.record().digests;
      wanted_.attach.choice = wire::Choice::kStep;  // and no other, when it is opened again
      wanted_.attach.step = source_.step;
      wanted_.attach.attempt = source_.attempt;
    }
    if (in_parts_) {
      Parked::Put(id_, std::move(held_));
    }
  }

  ~ShardView() override {
    if (owner_.forked()) {  // threads and locks are the parent's
      static_cast<void>(engine_.release());
      static_cast<void>(turns_.release());
      return;
    }
    if (in_parts_) {
      Parked::Take(id_).reset();
    }
  }

  uint64_t attempt() const override { return source_.attempt; }
  uint64_t step() const override { return source_.step; }
  uint32_t world_size() const override { return source_.world_size; }
  const std::string& tier() const override { return tier_; }
  const std::string& why() const override { return why_; }
  const std::vector<Tensor>& tensors() const override { return tensors_; }
  const std::vector<Object>& objects() const override { return objects_; }
  bool verified() const override { return verified_.load(); }
  uint64_t digest(size_t tensor) const override { return tensor_digests_[tensor]; }

  Status Read(size_t tensor, void* to) override {
    if (owner_.forked()) {
      return ForkedError();
    }
    return NoThrow([&]() -> Status {
      if (tensor >= slices_.size()) {
        return Status(Code::kInvalidArgument, absl::StrCat("read: there is no tensor ", tensor,
                                                           ", the shard has ", slices_.size()));
      }
      const auto reads = [slice = slices_[tensor], to](const SealedShard& shard,
                                                       ShardRanges& ranges, ShardSlices& slices) {
        ranges = {shard.SliceRange(slice, to)};
        slices = {slice};
      };
      return CompareInTurn(reads, "read");
    });
  }

  Status Verify() override {
    if (owner_.forked()) {
      return ForkedError();
    }
    return NoThrow([this]() -> Status {
      const auto reads = [](const SealedShard& shard, ShardRanges& ranges, ShardSlices& slices) {
        ranges = {shard.HeaderRange()};
        slices = {std::nullopt};
        for (size_t i = 0; i < shard.layout().slices.size(); ++i) {
          ranges.push_back(shard.SliceRange(i, nullptr));
          slices.emplace_back(i);
        }
      };
      HF_TRY(CompareInTurn(reads, "verify"));
      verified_ = true;
      return Status();
    });
  }

 private:
  Status CompareInTurn(const Reads& reads, std::string_view operation) {
    Interrupt interrupt(wanted_.interrupted);
    const Result<Background::Turn> turn =
        turns_->Take("a read of this view", Deadline::Never().Or(interrupt));
    HF_TRY(WithContext(turn.status(), operation));
    return in_parts_ ? CompareInParts(reads, interrupt, operation)
                     : CompareNow(*held_, reads, interrupt, operation);
  }

  // Its daemon may have been started anew, or the node that it came from be gone: then again, from
  // whoever has it, and at last not from other nodes.
  Status CompareInParts(const Reads& reads, Interrupt& interrupt, std::string_view operation) {
    std::unique_ptr<HeldShard> held = Parked::Take(id_);
    Status compared;
    for (int left = 2; left >= 0; --left) {
      if (held == nullptr) {
        Result<std::unique_ptr<HeldShard>> opened = OpenAgain(left > 0, interrupt);
        HF_TRY(WithContext(opened.status(), operation));
        held = *std::move(opened);
      }
      compared = CompareNow(*held, reads, interrupt, operation);
      if (compared.code() != Code::kUnavailable) {
        break;
      }
      held.reset();
    }
    if (held != nullptr && held->shard().in_parts()) {
      Parked::Put(id_, std::move(held));
    }
    return compared;
  }

  Status CompareNow(HeldShard& held, const Reads& reads, Interrupt& interrupt,
                    std::string_view operation) {
    ShardRanges ranges;
    ShardSlices slices;
    reads(held.shard(), ranges, slices);
    return Compare(held, *engine_, ranges, slices, wanted_.patience, interrupt, operation);
  }

  Result<std::unique_ptr<HeldShard>> OpenAgain(bool from_peers, Interrupt& interrupt) {
    const Deadline deadline = Deadline::In(wanted_.patience).Or(interrupt);
    HF_TRY_ASSIGN(const std::shared_ptr<Connection> connection,
                  Connection::Dial(wanted_.socket, deadline));
    wire::Attach attach = wanted_.attach;
    if (!from_peers) {
      attach.without.emplace_back(kPeerTier);
    }
    const auto is_the_same = [this](HeldShard& held) {
      const ShardRecord& record = held.shard().record();
      return record.layout_bytes == layout_bytes_ && record.digests == digests_
                 ? Status()
                 : Status(Code::kCorrupt, "it has another record than the copy that was attached");
    };
    return HeldShard::Open({wanted_.socket, connection, wanted_.interrupted}, attach,
                           HeldShard::Parts::kWhole, deadline, is_the_same);
  }

  const ForkOwner owner_;
  WantedView wanted_;
  const wire::Source source_;
  const std::string tier_;
  const std::string why_;
  const bool in_parts_;
  const uint64_t id_ = Parked::NewView();
  std::vector<Tensor> tensors_;
  std::vector<size_t> slices_;  // of the tensors
  std::vector<uint64_t> tensor_digests_;
  std::vector<Object> objects_;
  // In parts: by which another copy is known to be of the same bytes.
  std::string layout_bytes_;
  std::vector<uint64_t> digests_;
  std::unique_ptr<Background> turns_ = std::make_unique<Background>();
  std::unique_ptr<HeldShard> held_;  // these two are used by whoever has the turn
  std::unique_ptr<CopyEngine> engine_;
  std::atomic<bool> verified_{false};
};

}  // namespace

Result<std::unique_ptr<View>> OpenView(WantedView wanted, Deadline deadline) {
  HF_TRY_ASSIGN(const std::shared_ptr<Connection> connection,
                Connection::Dial(wanted.socket, deadline));
  Interrupt interrupt(wanted.interrupted);
  std::unique_ptr<CopyEngine> engine = MakeHostCopyEngine(CopyThreads(0));
  std::vector<Object> objects;
  // Damaged objects make a copy as useless as a damaged record.
  const auto accept = [&](HeldShard& held) -> Status {
    const auto compare = [&](const ShardRanges& ranges, const ShardSlices& slices) {
      return Compare(held, *engine, ranges, slices, wanted.patience, interrupt, "its objects");
    };
    HF_TRY_ASSIGN(objects, ReadObjects(held.shard(), compare));
    return held.Confirm(deadline);
  };
  HF_TRY_ASSIGN(std::unique_ptr<HeldShard> held,
                HeldShard::Open({wanted.socket, connection, wanted.interrupted}, wanted.attach,
                                HeldShard::Parts::kWhole, deadline, accept));
  return std::unique_ptr<View>(std::make_unique<ShardView>(std::move(wanted), std::move(held),
                                                           std::move(objects), std::move(engine)));
}

}  // namespace holdfast::client
