// Ranges are cut into tasks of some MiB at block boundaries; threads take them in order, so that
// all end at about the same time whatever the tensors' sizes.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "base/copy.h"
#include "base/digest.h"
#include "base/mutex.h"
#include "base/populate.h"
#include "base/sync_point.h"
#include "client-lib/src/convert.h"
#include "client-lib/src/copy_engine.h"
#include "client-lib/src/deadline.h"
#include "client-lib/src/errors.h"
#include "client-lib/src/worker_pool.h"

namespace holdfast::client {
namespace {

constexpr uint64_t kTaskBytes = 4 << 20;
// What a range costs beside its bytes: the work on 10,000 small tensors is shared as well.
constexpr uint64_t kRangeCostBytes = 512;
constexpr uint64_t kBytesPerThreadMin =
    1 << 20;  // waking a thread for less costs more than it brings

struct Position {
  size_t range = 0;
  uint64_t offset = 0;  // multiple of a block
};

// Task i goes from cuts[i] to cuts[i + 1].
template <typename Range>
std::vector<Position> CutIntoTasks(std::span<const Range> ranges, uint64_t& cost_out) {
  std::vector<Position> cuts = {Position{}};
  uint64_t cost = 0;
  cost_out = 0;
  for (size_t i = 0; i < ranges.size(); ++i) {
    cost += kRangeCostBytes;
    cost_out += kRangeCostBytes + ranges[i].bytes;
    for (uint64_t offset = 0; offset < ranges[i].bytes; offset += kDigestBlockBytes) {
      if (cost >= kTaskBytes) {
        cuts.push_back({i, offset});
        cost = 0;
      }
      cost += std::min<uint64_t>(kDigestBlockBytes, ranges[i].bytes - offset);
    }
  }
  cuts.push_back({ranges.size(), 0});
  return cuts;
}

// Calls on(range, offset, bytes) for every block from one position to the next.
template <typename Range, typename OnBlock>
void ForEachBlock(std::span<const Range> ranges, Position from, Position to, const OnBlock& on) {
  for (size_t i = from.range; i <= to.range && i < ranges.size(); ++i) {
    const uint64_t end = i == to.range ? to.offset : ranges[i].bytes;
    for (uint64_t offset = i == from.range ? from.offset : 0; offset < end;
         offset += kDigestBlockBytes) {
      on(i, offset, std::min<uint64_t>(kDigestBlockBytes, ranges[i].bytes - offset));
    }
  }
}

std::byte* InSlot(const CopyInRange& range) {
  return static_cast<std::byte*>(range.to);
}
std::byte* InSlot(const CopyOutRange& range) {
  return const_cast<std::byte*>(
      static_cast<const std::byte*>(range.from));  // for madvise, which does not write
}

// Runs of neighbouring ranges are populated at once. By reading, as SlotMapping::Populate.
template <typename Range>
void PopulateTask(std::span<const Range> ranges, Position from, Position to) {
  std::byte* begin = nullptr;
  std::byte* end = nullptr;
  const auto populate = [&] {
    if (begin != end) {
      // What fails here (a file cut short) shows in the copy, under its guard.
      PopulatePages(begin, static_cast<size_t>(end - begin), /*writable=*/false,
                    PopulateMethod::kBest);
    }
  };
  ForEachBlock(ranges, from, to, [&](size_t i, uint64_t offset, uint64_t bytes) {
    std::byte* const at = InSlot(ranges[i]) + offset;
    if (at != end) {
      populate();
      begin = at;
    }
    end = at + bytes;
  });
  populate();
}

// Asks the program by the thread that called, and seldom: that may cost more than a task.
class Looks {
 public:
  explicit Looks(Interrupt* interrupt) : interrupt_(interrupt) {}
  bool Hit() {
    if (interrupt_ != nullptr && std::this_thread::get_id() == caller_ &&
        std::chrono::steady_clock::now() >= next_) {
      interrupt_->Look();
      next_ = std::chrono::steady_clock::now() + Deadline::kBetweenLooks;
    }
    return interrupt_ != nullptr && interrupt_->hit();
  }

 private:
  Interrupt* const interrupt_;
  const std::thread::id caller_ = std::this_thread::get_id();
  std::chrono::steady_clock::time_point next_;  // the caller's own
};

// Where all elements from `begin` to just before `end` go in one piece, as they are; null: not so.
std::byte* InOnePiece(const Scatter& scatter, uint64_t begin, uint64_t end) {
  if (scatter.parts.size() != 1) {
    return nullptr;
  }
  const Scatter::Part& part = scatter.parts[0];
  const uint64_t behind = part.copy.from + part.copy.run;
  if (part.dtype != scatter.dtype || !part.copy.loops.empty() || begin < part.copy.from ||
      behind < end) {
    return nullptr;
  }
  const uint64_t at = part.copy.to + (begin - part.copy.from);
  return static_cast<std::byte*>(part.to) + at * DTypeBytes(part.dtype);
}

// Runs from which on each is digested while it is copied, and the digests are put together.
constexpr uint64_t kFusedRunBytesMin = 16 << 10;

// Of one part, whose runs come one behind the other: each byte is read once.
uint64_t CopyRunsAndDigest(const Scatter::Part& part, const std::byte* source, uint64_t begin,
                           uint64_t end) {
  const uint64_t size = DTypeBytes(part.dtype);
  uint64_t digest = 0;  // of what lies before `at`
  uint64_t at = begin;
  part.copy.ForEachRunWithin(begin, end, [&](uint64_t from, uint64_t to, uint64_t elements) {
    digest = Crc64(source + (at - begin) * size, (from - at) * size, digest);
    const uint64_t bytes = elements * size;
    const uint64_t of_run = CopyAndDigest(static_cast<std::byte*>(part.to) + to * size,
                                          source + (from - begin) * size, bytes);
    digest = Crc64Combine(digest, of_run, bytes);
    at = from + elements;
  });
  return Crc64(source + (at - begin) * size, (end - at) * size, digest);
}

// A block of the slice, `at` so many bytes: its digest, and what it has for each of the parts.
uint64_t ScatterAndDigest(const Scatter& scatter, const std::byte* source, uint64_t at,
                          uint64_t bytes) {
  const uint64_t size = DTypeBytes(scatter.dtype);
  const uint64_t begin = at / size;
  const uint64_t end = (at + bytes) / size;
  if (std::byte* const to = InOnePiece(scatter, begin, end)) {
    return CopyAndDigest(to, source, bytes);
  }
  if (scatter.parts.size() == 1 && scatter.parts[0].dtype == scatter.dtype &&
      scatter.parts[0].copy.run * size >= kFusedRunBytesMin) {
    return CopyRunsAndDigest(scatter.parts[0], source, begin, end);
  }
  // From a copy of the block, which nobody can change between the digest and the reading.
  thread_local const auto block = std::make_unique_for_overwrite<std::byte[]>(kDigestBlockBytes);
  std::memcpy(block.get(), source, bytes);
  for (const Scatter::Part& part : scatter.parts) {
    const uint64_t to_size = DTypeBytes(part.dtype);
    part.copy.ForEachRunWithin(begin, end, [&](uint64_t from, uint64_t to, uint64_t elements) {
      ConvertElements(scatter.dtype, block.get() + (from - begin) * size, part.dtype,
                      static_cast<std::byte*>(part.to) + to * to_size, elements);
    });
  }
  return Crc64(block.get(), bytes);
}

class HostCopyEngine : public CopyEngine {
 public:
  explicit HostCopyEngine(uint32_t threads) : pool_(threads) {}

  Status CopyIn(std::span<const CopyInRange> ranges, const CopyOptions& options) override {
    if (options.first > 0) {
      CopyOptions for_first;
      for_first.populate = options.populate;
      HF_TRY(CopyAll(ranges.first(options.first), for_first));
      options.first_read();
    }
    return CopyAll(ranges.subspan(options.first), options);
  }

  Result<std::optional<CopyMismatch>> CopyOut(std::span<const CopyOutRange> ranges,
                                              const CopyOptions& options) override {
    Mutex mutex;
    std::optional<CopyMismatch> first;
    HF_TRY(RunTasks(ranges, options, [&](Position from, Position to) {
      if (options.populate) {
        PopulateTask(ranges, from, to);
      }
      ForEachBlock(ranges, from, to, [&](size_t i, uint64_t offset, uint64_t bytes) {
        const CopyOutRange& range = ranges[i];
        const std::byte* const source = static_cast<const std::byte*>(range.from) + offset;
        const uint64_t actual =
            range.scatter != nullptr
                ? ScatterAndDigest(*range.scatter, source, range.in_slice + offset, bytes)
            : range.to == nullptr
                ? Crc64(source, bytes)
                : CopyAndDigest(static_cast<std::byte*>(range.to) + offset, source, bytes);
        const size_t block = offset / kDigestBlockBytes;
        if (actual != range.digests[block]) {
          const MutexLock lock(mutex);
          if (!first.has_value() || i < first->range ||
              (i == first->range && block < first->block)) {
            first = CopyMismatch{i, block, actual};
          }
        }
        if (options.read != nullptr) {
          options.read->fetch_add(bytes, std::memory_order_relaxed);
        }
      });
    }));
    return first;
  }

 private:
  Status CopyAll(std::span<const CopyInRange> ranges, const CopyOptions& options) {
    return RunTasks(ranges, options, [&](Position from, Position to) {
      if (options.populate) {
        PopulateTask(ranges, from, to);
      }
      ForEachBlock(ranges, from, to, [&](size_t i, uint64_t offset, uint64_t bytes) {
        const CopyInRange& range = ranges[i];
        std::byte* const in_slot = static_cast<std::byte*>(range.to) + offset;
        range.digests[offset / kDigestBlockBytes] =
            range.from == range.to
                ? Crc64(in_slot, bytes)
                : CopyAndDigest(in_slot, static_cast<const std::byte*>(range.from) + offset, bytes);
      });
    });
  }

  template <typename Range, typename OnTask>
  Status RunTasks(std::span<const Range> ranges, const CopyOptions& options,
                  const OnTask& on_task) {
    uint64_t cost = 0;
    const std::vector<Position> cuts = CutIntoTasks(ranges, cost);
    const size_t tasks = cuts.size() - 1;
    std::atomic<size_t> next{0};
    std::atomic<size_t> left_out{0};
    Looks looks(options.interrupt);
    static_cast<void>(looks.Hit());  // before the helpers may have done it all
    const std::function<void()> work = [&] {
      for (size_t i = next.fetch_add(1); i < tasks; i = next.fetch_add(1)) {
        if (looks.Hit()) {
          ++left_out;
          return;
        }
        on_task(cuts[i], cuts[i + 1]);
        if (options.half_point != nullptr && i == tasks / 2) {
          HF_SYNC_POINT(options.half_point);
        }
      }
    };
    pool_.Run(static_cast<uint32_t>(std::clamp<uint64_t>(
                  std::min<uint64_t>(cost / kBytesPerThreadMin, tasks), 1, pool_.threads_max())),
              work);
    return left_out.load() == 0
               ? Status()
               : Status(Code::kDeadlineExceeded, "interrupted before everything was read");
  }

  WorkerPool pool_;
};

}  // namespace

std::unique_ptr<CopyEngine> MakeHostCopyEngine(uint32_t threads) {
  return std::make_unique<HostCopyEngine>(threads);
}

}  // namespace holdfast::client
