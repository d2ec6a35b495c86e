// OpenCheckpoint: a step as whole tensors and objects, for whoever reads it piece by piece. A
// stream is planned some GiB at a time (a plan looks at all layouts), and each window opens the
// shards that it needs and lets go of them: a slot that is held cannot be given to the next save.
#include "holdfast/checkpoint_reader.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/digest.h"
#include "base/status.h"
#include "client-lib/src/copy_engine.h"
#include "client-lib/src/element_windows.h"
#include "client-lib/src/errors.h"
#include "client-lib/src/open_step.h"
#include "client-lib/src/reshard.h"

namespace holdfast {
namespace client {
namespace {

// What one plan has of a stream.
constexpr uint64_t kPlanBytes = uint64_t{4} << 30;
constexpr size_t kPlanWants = 4096;
constexpr uint32_t kThreadsMax = 64;

class Stream : public ElementStream {
 public:
  Stream(const OpenStep& open, std::vector<ElementWindow> windows)
      : open_(open),
        windows_(std::move(windows)),
        interrupt_(open.options.interrupted),
        engine_(MakeHostCopyEngine(std::clamp(open.options.threads, 1U, kThreadsMax))) {}

  Result<uint64_t> Next(void* to) override {
    return NoThrow([&]() -> Result<uint64_t> {
      if (next_ == windows_.size()) {
        return uint64_t{0};
      }
      const Deadline deadline = Deadline::In(open_.options.window_deadline).Or(interrupt_);
      const ElementWindow& window = windows_[next_];
      HF_TRY(WithContext(Read(window, static_cast<std::byte*>(to), deadline), open_.Name()));
      ++next_;
      return window.bytes;
    });
  }

 private:
  // Which ranges can be of one plan: what all ranks have together, or what one has of its own.
  std::optional<Rank> OnlyOf(const ElementRange& range) const {
    const SavedItem& item = Item(range);
    return item.ranks.empty() ? std::nullopt : std::optional<Rank>(item.ranks.front());
  }
  const SavedItem& Item(const ElementRange& range) const { return open_.items.items()[range.item]; }
  bool IsObject(const ElementRange& range) const {
    return Item(range).kind != SavedItem::Kind::kTensor;
  }
  uint64_t Bytes(const ElementRange& range) const {
    return range.count * TypeBytes(Item(range).type);
  }

  Status Read(const ElementWindow& window, std::byte* to, Deadline deadline) {
    for (size_t i = 0; i < window.ranges.size();) {
      if (IsObject(window.ranges[i])) {
        HF_TRY(ReadObject(window.ranges[i], to, deadline));
        to += Bytes(window.ranges[i++]);
        continue;
      }
      if (wants_left_ == 0) {
        HF_TRY(PlanFrom(next_, i, deadline));
      }
      // As many as the plan has of this window, together.
      std::vector<void*> memory(planned_.tensors.size());
      size_t want = planned_.tensors.size() - wants_left_;
      for (; i < window.ranges.size() && wants_left_ > 0 && !IsObject(window.ranges[i]); ++i) {
        memory[want++] = to;
        to += Bytes(window.ranges[i]);
        --wants_left_;
      }
      HF_TRY(resharding_->CopySome(memory, deadline));
    }
    return Status();
  }

  // The object begins where a digest block does, and so does each part of it but for windows that
  // begin elsewhere: those read from the block's beginning on.
  Status ReadObject(const ElementRange& range, std::byte* to, Deadline deadline) {
    const uint64_t skipped = range.first % kDigestBlockBytes;
    const size_t object = open_.items.object(range.item);
    if (skipped == 0 &&
        (range.count % kDigestBlockBytes == 0 || range.first + range.count == Item(range).bytes)) {
      return open_.shards.ReadObjectPart(object, range.first, range.count, to, *engine_, deadline);
    }
    std::vector<std::byte> block(kDigestBlockBytes);
    for (uint64_t done = 0; done < range.count;) {
      const uint64_t at = range.first + done;
      const uint64_t begin = at / kDigestBlockBytes * kDigestBlockBytes;
      const uint64_t bytes = std::min<uint64_t>(kDigestBlockBytes, Item(range).bytes - begin);
      HF_TRY(open_.shards.ReadObjectPart(object, begin, bytes, block.data(), *engine_, deadline));
      const uint64_t some = std::min(begin + bytes - at, range.count - done);
      std::copy_n(block.data() + (at - begin), some, to + done);
      done += some;
    }
    return Status();
  }

  // What comes from that range on, as far as one plan goes.
  Status PlanFrom(size_t window, size_t range, Deadline deadline) {
    const std::optional<Rank> only = OnlyOf(windows_[window].ranges[range]);
    planned_.tensors.clear();
    planned_up_to_.clear();
    resharding_.reset();
    uint64_t bytes = 0;
    for (; window < windows_.size(); ++window, range = 0) {
      const std::vector<ElementRange>& ranges = windows_[window].ranges;
      for (; range < ranges.size(); ++range) {
        if (IsObject(ranges[range]) || OnlyOf(ranges[range]) != only || bytes >= kPlanBytes ||
            planned_.tensors.size() >= kPlanWants || !AddWant(ranges[range])) {
          window = windows_.size();
          break;
        }
        bytes += Bytes(ranges[range]);
      }
    }
    Resharding::Options options;
    options.only = only;
    resharding_ = std::make_unique<Resharding>(open_.shards, *engine_, options, meter_);
    HF_TRY(resharding_->Plan(planned_));
    HF_TRY(resharding_->Compare(deadline));
    wants_left_ = planned_.tensors.size();
    return Status();
  }

  // False: one plan does not take it beside what it has of the same item.
  bool AddWant(const ElementRange& range) {
    uint64_t& behind = planned_up_to_[range.item];
    if (range.first < behind) {
      return false;
    }
    behind = range.first + range.count;
    const SavedItem& item = Item(range);
    planned_.tensors.push_back(
        range.count == item.elements
            ? Tensor(item.name, item.type, item.shape, nullptr)
            : Tensor::Flat(item.name, item.type, item.shape, range.first, range.count, nullptr));
    return true;
  }

  const OpenStep& open_;
  const std::vector<ElementWindow> windows_;
  Interrupt interrupt_;
  const std::unique_ptr<CopyEngine> engine_;
  RestoreMeter meter_;
  size_t next_ = 0;  // of the windows
  State planned_;
  std::map<size_t, uint64_t> planned_up_to_;  // by item: behind its last element
  size_t wants_left_ = 0;                     // of what is planned: not read yet
  std::unique_ptr<Resharding> resharding_;
};

class Reader : public CheckpointReader {
 public:
  explicit Reader(std::shared_ptr<const OpenStep> open) : open_(std::move(open)) {}
  uint64_t attempt() const override { return open_->info.attempt; }
  uint64_t step() const override { return open_->info.step; }
  uint32_t world_size() const override { return open_->info.world_size; }
  uint64_t content() const override { return open_->shards.content(); }
  const std::vector<SavedItem>& items() const override { return open_->items.items(); }
  Result<std::unique_ptr<ElementStream>> Stream(std::vector<ElementRange> ranges,
                                                uint64_t window_bytes) const override {
    return NoThrow([&]() -> Result<std::unique_ptr<ElementStream>> {
      Result<std::vector<ElementWindow>> windows = CutIntoWindows(items(), ranges, window_bytes);
      HF_TRY(WithContext(windows.status(), open_->Name()));
      return std::unique_ptr<ElementStream>(
          std::make_unique<client::Stream>(*open_, *std::move(windows)));
    });
  }

 private:
  const std::shared_ptr<const OpenStep> open_;
};

// Of those that there are, newest first.
Result<CheckpointInfo> Choose(const CheckpointOptions& options,
                              const std::vector<CheckpointInfo>& all) {
  std::string others;
  for (const CheckpointInfo& info : all) {
    if (options.step && info.step != *options.step) {
      continue;
    }
    if (options.attempt == 0 ? info.on_line : info.attempt == options.attempt) {
      return info;
    }
    absl::StrAppend(&others, others.empty() ? "" : ", ", info.attempt);
  }
  const std::string job = absl::StrCat("job '", options.job, "'");
  if (!options.step) {
    return Status(Code::kNotFound,
                  absl::StrCat(job,
                               " has no committed step that can be read now on its line of "
                               "descent"));
  }
  return Status(
      Code::kNotFound,
      absl::StrCat(job, " has no step ", *options.step,
                   options.attempt == 0 ? " on its line of descent"
                                        : absl::StrCat(" of attempt ", options.attempt),
                   " that can be read now",
                   others.empty() ? "" : absl::StrCat("; there is one of attempt ", others)));
}

Result<std::unique_ptr<CheckpointReader>> Open(const CheckpointOptions& options) {
  if (options.attempt != 0 && !options.step) {
    return Status(Code::kInvalidArgument, "an attempt, but of which step?");
  }
  ListOptions list;
  list.job = options.job;
  list.socket = options.socket;
  list.deadline = options.deadline;
  list.interrupted = options.interrupted;
  HF_TRY_ASSIGN(const std::vector<CheckpointInfo> all, ListCheckpoints(list));
  HF_TRY_ASSIGN(const CheckpointInfo info, Choose(options, all));
  HF_TRY_ASSIGN(std::shared_ptr<const OpenStep> open, OpenStep::Of(options, info));
  return std::unique_ptr<CheckpointReader>(std::make_unique<Reader>(std::move(open)));
}

}  // namespace
}  // namespace client

Result<std::unique_ptr<CheckpointReader>> OpenCheckpoint(const CheckpointOptions& options) {
  return client::NoThrow(
      [&]() -> Result<std::unique_ptr<CheckpointReader>> { return client::Open(options); });
}

}  // namespace holdfast
