// Ranges on devices are cut into pieces of some MiB: a big tensor into several at block boundaries,
// many small ones into one. A piece is a few copies on the device's stream with one event behind
// them. What has landed is digested by the host engine's threads while the next pieces are under
// way.
//
// Saving: straight into a slot that is pinned, else through pinned buffers. Restoring: always
// through them. What is verified there is what the device gets, even if somebody writes into the
// slot meanwhile, and pinning a mapping for one use costs as much as copying it.
#include <algorithm>
#include <deque>
#include <iterator>
#include <map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/digest.h"
#include "base/units.h"
#include "client-lib/src/copy_engine.h"
#include "client-lib/src/device_fence.h"
#include "client-lib/src/devices.h"
#include "client-lib/src/errors.h"

namespace holdfast::client {
namespace {

constexpr uint64_t kPieceBytesMin = 4 << 20;
constexpr uint64_t kPiecesWanted = 256;  // of one device, into a pinned slot: as many events
constexpr size_t kPieceCopiesMax = 256;
// More on one stream, and a driver may block in the call that enqueues the next: nobody could be
// told then how long.
constexpr size_t kCopiesUnderWayMax = 512;
constexpr uint64_t kBounceAlignment = 256;

// A run of whole blocks of one range, or its end.
template <typename Range>
struct Part {
  Range range;
  size_t index = 0;           // of the caller's range
  size_t first_block = 0;     // of that range
  uint64_t piece_offset = 0;  // where it lies in a buffer that holds the piece
};

template <typename Range>
struct Piece {
  int32_t device = kHostMemory;
  uint64_t bytes = 0;  // of such a buffer
  std::vector<Part<Range>> parts;
  std::byte* buffer = nullptr;
  std::shared_ptr<DeviceEvent> event;  // behind its last copy
};

CopyInRange Cut(const CopyInRange& range, uint64_t offset, uint64_t bytes) {
  return {static_cast<std::byte*>(range.to) + offset,
          static_cast<const std::byte*>(range.from) + offset, bytes,
          range.digests + offset / kDigestBlockBytes, range.device};
}
CopyOutRange Cut(const CopyOutRange& range, uint64_t offset, uint64_t bytes) {
  return {static_cast<std::byte*>(range.to) + offset,
          static_cast<const std::byte*>(range.from) + offset, bytes,
          range.digests + offset / kDigestBlockBytes, range.device};
}

// What of `ranges` lies on `device`; `piece_bytes` is a multiple of a block.
template <typename Range>
std::deque<Piece<Range>> CutIntoPieces(std::span<const Range> ranges, int32_t device,
                                       uint64_t piece_bytes) {
  std::deque<Piece<Range>> pieces;
  const auto fresh = [&]() -> Piece<Range>& {
    pieces.emplace_back();
    pieces.back().device = device;
    return pieces.back();
  };
  for (size_t i = 0; i < ranges.size(); ++i) {
    const Range& range = ranges[i];
    for (uint64_t offset = 0; range.device == device && offset < range.bytes;) {
      const uint64_t left = range.bytes - offset;
      Piece<Range>* piece = pieces.empty() ? &fresh() : &pieces.back();
      const uint64_t room = piece_bytes - std::min(piece_bytes, piece->bytes);
      uint64_t take = std::min(left, room);
      if (take < left) {
        take = take / kDigestBlockBytes * kDigestBlockBytes;
      }
      if (take == 0 || piece->parts.size() == kPieceCopiesMax) {
        fresh();
        continue;
      }
      piece->parts.push_back(
          {Cut(range, offset, take), i, offset / kDigestBlockBytes, piece->bytes});
      piece->bytes += RoundUp(take, kBounceAlignment);
      offset += take;
    }
  }
  return pieces;
}

template <typename Range>
std::vector<Range> OnHost(std::span<const Range> ranges, std::vector<size_t>& indices) {
  std::vector<Range> host;
  for (size_t i = 0; i < ranges.size(); ++i) {
    if (ranges[i].device == kHostMemory) {
      host.push_back(ranges[i]);
      indices.push_back(i);
    }
  }
  return host;
}

template <typename Range>
bool AnyOnDevice(std::span<const Range> ranges) {
  return std::any_of(ranges.begin(), ranges.end(),
                     [](const Range& range) { return range.device != kHostMemory; });
}

// The first of the pieces under way has landed, or not yet; otherwise what went wrong.
template <typename Range>
Result<bool> Landed(const Devices& devices, const Piece<Range>& piece) {
  const DriverError error = piece.event->Query();
  if (error == kDriverOk || error == kDriverNotReady) {
    return error == kDriverOk;
  }
  return devices.Check(error, "wait for a copy", piece.device);
}

Status CheckStall(const DeviceFence& fence, const BackOff& back_off, int32_t device) {
  const Milliseconds stall = fence.devices()->stall();
  if (fence.until().has_value()) {
    fence.until()->Look();
  }
  const bool given_up = fence.until().has_value() && fence.until()->passed();
  if (!given_up && !back_off.stalled(stall)) {
    return Status();
  }
  return Status(
      Code::kDeadlineExceeded,
      absl::StrCat("device ", device, ": no copy has ended for ",
                   given_up ? "as long as the call may take" : absl::StrCat(stall.count(), " ms"),
                   ": does the work before it on the streams that were given hang?"));
}

// Whatever happened: nothing of ours is under way afterwards, unless the device is stuck.
void DrainAll(const DeviceFence& fence, const Status& why) {
  // Who has waited in vain already waits no longer.
  Deadline deadline = Deadline::In(
      why.code() == Code::kDeadlineExceeded ? Milliseconds(0) : fence.devices()->stall());
  if (fence.until().has_value()) {
    deadline = deadline.Earlier(*fence.until());
  }
  for (const int32_t device : fence.used()) {
    static_cast<void>(fence.devices()->Drain(device, deadline).ok());  // stuck: Devices knows
  }
}

// Enqueues a piece's copies and its event; copy(part, stream) is one of them.
template <typename Range, typename Copy>
Status Enqueue(const std::shared_ptr<Devices>& devices, Piece<Range>& piece, const Copy& copy) {
  HF_TRY_ASSIGN(void* const context, devices->Context(piece.device));
  HF_TRY_ASSIGN(void* const stream, devices->Stream(piece.device));
  const ContextScope scope(devices->driver(), context);
  HF_TRY(devices->Check(scope.error(), "make its context current", piece.device));
  for (const Part<Range>& part : piece.parts) {
    HF_TRY(devices->Check(copy(part, stream), "enqueue a copy", piece.device));
  }
  HF_TRY_ASSIGN(piece.event, DeviceEvent::Record(devices, piece.device, stream));
  return Status();
}

// One CopyIn of ranges of which some are on devices.
class DeviceCopyIn {
 public:
  DeviceCopyIn(CopyEngine& host, const CopyOptions& options)
      : host_(host), options_(options), fence_(*options.fence), devices_(fence_.devices()) {}

  Status Run(std::span<const CopyInRange> ranges) {
    const std::span<const CopyInRange> first = ranges.first(options_.first);
    const std::span<const CopyInRange> others = ranges.subspan(options_.first);
    HF_TRY(Begin(first, others));
    bool first_done = first.empty();
    bool host_done = false;
    BackOff back_off;
    while (true) {
      // 1. As many copies as may be under way.
      HF_TRY_ASSIGN(bool moved, EnqueueMore());
      // 2. While they are: what the host copies itself.
      if (!first_done && first_waiting_ == 0) {
        HF_TRY(CopyOnHost(first, nullptr));
        fence_.FirstEnqueued(first_last_);
        options_.first_read();
        first_done = moved = true;
      }
      const bool all_enqueued = std::all_of(queues_.begin(), queues_.end(), [](const auto& queue) {
        return queue.second.waiting.empty();
      });
      if (all_enqueued && !host_done) {
        fence_.Enqueued(last_);
        HF_TRY(CopyOnHost(others, options_.half_point));
        host_done = moved = true;
      }
      // 3. What has landed.
      HF_TRY_ASSIGN(const bool landed, DigestLanded());
      const int32_t busy = FirstBusy();
      if (busy == kHostMemory && host_done) {
        return Status();
      }
      if (moved || landed) {
        back_off.Moved();
      } else {
        HF_TRY(CheckStall(fence_, back_off, busy));
        back_off.Sleep();
      }
    }
  }

 private:
  struct Queue {
    std::deque<Piece<CopyInRange>> waiting;
    std::deque<Piece<CopyInRange>> under_way;
    size_t copies_under_way = 0;
    size_t first = 0;  // of those that wait: of the ranges that come first
  };

  Status Begin(std::span<const CopyInRange> first, std::span<const CopyInRange> others) {
    HF_TRY(fence_.Order());
    if (!options_.pinned) {
      HF_TRY_ASSIGN(std::byte* const* const buffers, devices_->BounceBuffers());
      free_.assign(buffers, buffers + Devices::kBounceBuffers);
    }
    for (const int32_t device : fence_.used()) {
      uint64_t bytes = 0;
      for (const std::span<const CopyInRange> ranges : {first, others}) {
        for (const CopyInRange& range : ranges) {
          bytes += range.device == device ? range.bytes : 0;
        }
      }
      const uint64_t piece_bytes =
          options_.pinned
              ? RoundUp(std::max(kPieceBytesMin, bytes / kPiecesWanted), kDigestBlockBytes)
              : Devices::kBounceBytes;
      Queue& queue = queues_[device];
      queue.waiting = CutIntoPieces(first, device, piece_bytes);
      queue.first = queue.waiting.size();
      first_waiting_ += queue.first;
      std::deque<Piece<CopyInRange>> then = CutIntoPieces(others, device, piece_bytes);
      queue.waiting.insert(queue.waiting.end(), std::make_move_iterator(then.begin()),
                           std::make_move_iterator(then.end()));
    }
    return Status();
  }

  Status CopyOnHost(std::span<const CopyInRange> ranges, const char* half_point) {
    std::vector<size_t> indices;
    CopyOptions options;
    options.populate = options_.populate;
    options.half_point = half_point;
    return host_.CopyIn(OnHost(ranges, indices), options);
  }

  // Of each device in turn, so that all of them copy at once. True: something was enqueued.
  Result<bool> EnqueueMore() {
    bool any = false;
    for (bool more = true; more;) {
      more = false;
      for (auto& [device, queue] : queues_) {
        const bool room = options_.pinned || !free_.empty();
        if (queue.waiting.empty() || !room ||
            queue.copies_under_way + queue.waiting.front().parts.size() > kCopiesUnderWayMax) {
          continue;
        }
        HF_TRY(EnqueueNext(queue));
        any = more = true;
      }
    }
    return any;
  }

  Status EnqueueNext(Queue& queue) {
    Piece<CopyInRange>& piece = queue.waiting.front();
    if (!options_.pinned) {
      piece.buffer = free_.back();
      free_.pop_back();
    }
    HF_TRY(Enqueue(devices_, piece, [&](const Part<CopyInRange>& part, void* stream) {
      void* const to = piece.buffer != nullptr ? piece.buffer + part.piece_offset : part.range.to;
      return devices_->driver().CopyToHost(to, part.range.from, part.range.bytes, stream);
    }));
    if (queue.first > 0) {
      --first_waiting_;
      if (--queue.first == 0) {
        first_last_.push_back(piece.event);
      }
    }
    if (queue.waiting.size() == 1) {
      last_.push_back(piece.event);
    }
    queue.copies_under_way += piece.parts.size();
    queue.under_way.push_back(std::move(piece));
    queue.waiting.pop_front();
    return Status();
  }

  // True: something had landed.
  Result<bool> DigestLanded() {
    std::vector<CopyInRange> parts;
    std::vector<std::byte*> buffers;
    for (auto& [device, queue] : queues_) {
      while (!queue.under_way.empty()) {
        const Piece<CopyInRange>& piece = queue.under_way.front();
        HF_TRY_ASSIGN(const bool landed, Landed(*devices_, piece));
        if (!landed) {
          break;
        }
        for (const Part<CopyInRange>& part : piece.parts) {
          parts.push_back(part.range);
          parts.back().from =
              piece.buffer != nullptr ? piece.buffer + part.piece_offset : part.range.to;
          parts.back().device = kHostMemory;
        }
        if (piece.buffer != nullptr) {
          buffers.push_back(piece.buffer);
        }
        queue.copies_under_way -= piece.parts.size();
        queue.under_way.pop_front();
      }
    }
    if (parts.empty()) {
      return false;
    }
    CopyOptions digest_options;
    digest_options.populate = options_.populate;
    HF_TRY(host_.CopyIn(parts, digest_options));
    free_.insert(free_.end(), buffers.begin(), buffers.end());
    return true;
  }

  // A device with work left; kHostMemory: none.
  int32_t FirstBusy() const {
    for (const auto& [device, queue] : queues_) {
      if (!queue.waiting.empty() || !queue.under_way.empty()) {
        return device;
      }
    }
    return kHostMemory;
  }

  CopyEngine& host_;
  const CopyOptions& options_;
  DeviceFence& fence_;
  const std::shared_ptr<Devices> devices_;
  std::map<int32_t, Queue> queues_;
  std::vector<std::byte*> free_;
  size_t first_waiting_ = 0;                              // pieces, of all devices
  std::vector<std::shared_ptr<DeviceEvent>> first_last_;  // each device's last piece's of the first
  std::vector<std::shared_ptr<DeviceEvent>> last_;        // of all
};

// One CopyOut of ranges of which some are on devices.
class DeviceCopyOut {
 public:
  DeviceCopyOut(CopyEngine& host, const CopyOptions& options)
      : host_(host), options_(options), fence_(*options.fence), devices_(fence_.devices()) {}

  Result<std::optional<CopyMismatch>> Run(std::span<const CopyOutRange> ranges) {
    HF_TRY(fence_.Order());
    HF_TRY_ASSIGN(std::byte* const* const buffers, devices_->BounceBuffers());
    free_.assign(buffers, buffers + Devices::kBounceBuffers);
    // 1. Devices, one piece of each in turn.
    std::map<int32_t, std::deque<Piece<CopyOutRange>>> waiting;
    for (const int32_t device : fence_.used()) {
      waiting[device] = CutIntoPieces(ranges, device, Devices::kBounceBytes);
    }
    for (bool more = true; more;) {
      more = false;
      for (auto& [device, pieces] : waiting) {
        if (!pieces.empty()) {
          HF_TRY(CopyPiece(std::move(pieces.front())));
          pieces.pop_front();
          more = true;
        }
      }
    }
    // 2. The host's, while the last ones are under way.
    std::vector<size_t> indices;
    const std::vector<CopyOutRange> host = OnHost(ranges, indices);
    HF_TRY_ASSIGN(const std::optional<CopyMismatch> mismatch, host_.CopyOut(host, options_));
    if (mismatch.has_value()) {
      Note({indices[mismatch->range], mismatch->block, mismatch->actual});
    }
    // 3. Everything has arrived.
    while (!under_way_.empty()) {
      HF_TRY(WaitForFirst());
    }
    return first_;
  }

 private:
  Status CopyPiece(Piece<CopyOutRange> piece) {
    while (free_.empty()) {
      HF_TRY(WaitForFirst());
    }
    piece.buffer = free_.back();
    // After a mismatch the rest is only checked.
    std::vector<CopyOutRange> parts;
    parts.reserve(piece.parts.size());
    for (const Part<CopyOutRange>& part : piece.parts) {
      parts.push_back(part.range);
      parts.back().to = first_.has_value() ? nullptr : piece.buffer + part.piece_offset;
      parts.back().device = kHostMemory;
    }
    CopyOptions verify_options;
    verify_options.populate = options_.populate;
    verify_options.interrupt = options_.interrupt;
    verify_options.read = options_.read;
    HF_TRY_ASSIGN(const std::optional<CopyMismatch> mismatch, host_.CopyOut(parts, verify_options));
    if (mismatch.has_value()) {
      const Part<CopyOutRange>& part = piece.parts[mismatch->range];
      Note({part.index, part.first_block + mismatch->block, mismatch->actual});
    }
    if (first_.has_value()) {
      return Status();
    }
    free_.pop_back();
    HF_TRY(Enqueue(devices_, piece, [&](const Part<CopyOutRange>& part, void* stream) {
      return devices_->driver().CopyToDevice(part.range.to, piece.buffer + part.piece_offset,
                                             part.range.bytes, stream);
    }));
    under_way_.push_back(std::move(piece));
    return Status();
  }

  // Also when it is another device's that ends first: buffers are few and pieces of one size.
  Status WaitForFirst() {
    for (BackOff back_off;; back_off.Sleep()) {
      HF_TRY_ASSIGN(const bool landed, Landed(*devices_, under_way_.front()));
      if (landed) {
        free_.push_back(under_way_.front().buffer);
        under_way_.pop_front();
        return Status();
      }
      HF_TRY(CheckStall(fence_, back_off, under_way_.front().device));
    }
  }

  void Note(const CopyMismatch& mismatch) {
    if (!first_.has_value() || mismatch.range < first_->range ||
        (mismatch.range == first_->range && mismatch.block < first_->block)) {
      first_ = mismatch;
    }
  }

  CopyEngine& host_;
  const CopyOptions& options_;
  DeviceFence& fence_;
  const std::shared_ptr<Devices> devices_;
  std::deque<Piece<CopyOutRange>> under_way_;
  std::vector<std::byte*> free_;
  std::optional<CopyMismatch> first_;
};

class DeviceCopyEngine : public CopyEngine {
 public:
  explicit DeviceCopyEngine(uint32_t threads) : host_(MakeHostCopyEngine(threads)) {}

  Status CopyIn(std::span<const CopyInRange> ranges, const CopyOptions& options) override {
    if (!AnyOnDevice(ranges)) {
      return host_->CopyIn(ranges, options);
    }
    const Status status = NoThrow([&] { return DeviceCopyIn(*host_, options).Run(ranges); });
    if (!status.ok()) {
      DrainAll(*options.fence, status);
    }
    return status;
  }

  Result<std::optional<CopyMismatch>> CopyOut(std::span<const CopyOutRange> ranges,
                                              const CopyOptions& options) override {
    if (!AnyOnDevice(ranges)) {
      return host_->CopyOut(ranges, options);
    }
    Result<std::optional<CopyMismatch>> result =
        NoThrow([&]() -> Result<std::optional<CopyMismatch>> {
          return DeviceCopyOut(*host_, options).Run(ranges);
        });
    if (!result.ok()) {
      DrainAll(*options.fence, result.status());
    }
    return result;
  }

 private:
  const std::unique_ptr<CopyEngine> host_;
};

}  // namespace

std::unique_ptr<CopyEngine> MakeCopyEngine(uint32_t threads) {
  return std::make_unique<DeviceCopyEngine>(threads);
}

}  // namespace holdfast::client
