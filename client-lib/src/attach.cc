// Attach: a committed shard as read-only tensors, straight in its slot. Nothing is copied,
// populated or digested before Verify, so that it takes the same time for any size.
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "client-lib/src/connection.h"
#include "client-lib/src/copy_engine.h"
#include "client-lib/src/fork_guard.h"
#include "client-lib/src/read_ticket.h"
#include "client-lib/src/sealed_shard.h"
#include "client-lib/src/socket.h"
#include "client-lib/src/state_match.h"
#include "holdfast/job.h"

namespace holdfast {
namespace client {
namespace {

constexpr Milliseconds kReleaseTime{1000};

class SlotView : public View {
 public:
  SlotView(std::string socket, std::shared_ptr<Connection> connection, const wire::Source& source,
           std::unique_ptr<ReadTicket> ticket)
      : socket_(std::move(socket)),
        connection_(std::move(connection)),
        source_(source),
        ticket_(std::move(ticket)) {}

  ~SlotView() override {
    if (owner_.forked()) {
      // The slot is not mapped here, and the hold is the parent's.
      static_cast<void>(shard_.release());
      new std::shared_ptr<Connection>(std::move(connection_));
      return;
    }
    shard_.reset();
    Release();
  }

  // Tensors and small objects; the caller has the copy open.
  void Fill(std::unique_ptr<SealedShard> shard) {
    shard_ = std::move(shard);
    const Layout& layout = shard_->layout();
    tensors_.reserve(layout.slices.size());
    for (size_t i = 0; i < layout.slices.size(); ++i) {
      const Slice& slice = layout.slices[i];
      const std::byte* const bytes = shard_->image() + slice.image_offset;
      if (slice.kind == SliceKind::kTensor) {
        tensors_.push_back(ToTensor(slice));
        tensors_.back().data =
            const_cast<std::byte*>(bytes);  // read-only memory, as the header says
      } else {
        objects_.push_back(ToObject(slice));
        objects_.back().bytes.assign(reinterpret_cast<const char*>(bytes), slice.bytes);
      }
    }
  }

  uint64_t attempt() const override { return source_.attempt; }
  uint64_t step() const override { return source_.step; }
  const std::vector<Tensor>& tensors() const override { return tensors_; }
  const std::vector<Object>& objects() const override { return objects_; }
  bool verified() const override { return verified_; }

  Status Verify() override {
    if (owner_.forked()) {
      return ForkedError();
    }
    return NoThrow([this]() -> Status {
      std::vector<CopyOutRange> ranges = {shard_->HeaderRange()};
      for (size_t i = 0; i < shard_->layout().slices.size(); ++i) {
        ranges.push_back(shard_->SliceRange(i, nullptr));
      }
      HF_TRY_ASSIGN(const std::optional<CopyMismatch> mismatch,
                    MakeHostCopyEngine(1)->CopyOut(ranges, {}));
      if (shard_->faulted()) {
        return Status(
            Code::kCorrupt,
            absl::StrCat("verify: the slot of attempt ", source_.attempt, " step ", source_.step,
                         " was cut short; its tensors read as zeros from there on"));
      }
      if (mismatch.has_value()) {
        return WithContext(
            shard_->MismatchError(*mismatch, mismatch->range == 0
                                                 ? std::nullopt
                                                 : std::optional<size_t>(mismatch->range - 1)),
            "verify");
      }
      HF_TRY(CheckObjectCopies());
      verified_ = true;
      return Status();
    });
  }

 private:
  // Objects were copied at Attach, before anybody had looked at a digest.
  Status CheckObjectCopies() const {
    size_t next = 0;
    for (const Slice& slice : shard_->layout().slices) {
      if (slice.kind != SliceKind::kTensor) {
        const std::string& copy = objects_[next++].bytes;
        if (copy !=
            std::string_view(reinterpret_cast<const char*>(shard_->image() + slice.image_offset),
                             slice.bytes)) {
          return Status(Code::kCorrupt, absl::StrCat("verify: object ", slice.name,
                                                     " changed in the slot after it was attached"));
        }
      }
    }
    return Status();
  }

  // A daemon that was restarted in between still has the hold in its notes. If there is none now,
  // the next connection of this process lets it go.
  void Release() {
    const Deadline deadline = Deadline::In(kReleaseTime);
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
  std::shared_ptr<Connection> connection_;
  const wire::Source source_;
  const std::unique_ptr<ReadTicket> ticket_;
  std::unique_ptr<SealedShard> shard_;
  std::vector<Tensor> tensors_;
  std::vector<Object> objects_;
  bool verified_ = false;
};

Result<std::unique_ptr<View>> AttachShard(const AttachOptions& options) {
  HF_TRY(FromAbslStatus(CheckJobName(options.job), "attach"));
  const Deadline deadline = Deadline::In(options.deadline);
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
  auto ticket = std::make_unique<ReadTicket>(socket);
  attach.hold = ticket->id();
  Result<Answer<wire::Source>> source = (*connection)->Call<wire::Source>(attach, deadline);
  if (!source.ok() && (*connection)->alive() && source.status().code() != Code::kDeadlineExceeded) {
    ticket->Settle();  // refused
  }
  HF_TRY(WithContext(source.status(), context));

  // From here on the view lets go of the copy, whatever happens.
  auto view = std::make_unique<SlotView>(socket, *connection, source->message, std::move(ticket));
  Result<std::unique_ptr<SealedShard>> shard = SealedShard::Open(
      source->message, source->descriptors, {options.job, options.rank}, /*mine=*/nullptr);
  HF_TRY(WithContext(shard.status(), context));
  view->Fill(*std::move(shard));
  Result<Answer<wire::Done>> confirmed =
      (*connection)
          ->Call<wire::Done>(wire::ConfirmRead{source->message.slot, source->message.generation},
                             deadline);
  HF_TRY(WithContext(confirmed.status(), context));
  return std::unique_ptr<View>(std::move(view));
}

}  // namespace
}  // namespace client

Result<std::unique_ptr<View>> Attach(const AttachOptions& options) {
  return client::NoThrow(
      [&]() -> Result<std::unique_ptr<View>> { return client::AttachShard(options); });
}

}  // namespace holdfast
