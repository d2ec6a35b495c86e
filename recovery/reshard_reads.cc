// What is read for a plan: whole digest blocks of each slice, since nothing less can be verified.
#include <algorithm>

#include "base/digest.h"
#include "recovery/reshard.h"

namespace holdfast {
namespace {

// Marks blocks as runs of them; sorted and merged when all are known.
class BlockRuns {
 public:
  // Bytes from `begin` to just before `end`.
  void Add(uint64_t begin, uint64_t end) {
    const uint64_t first = begin / kDigestBlockBytes;
    const uint64_t behind = (end + kDigestBlockBytes - 1) / kDigestBlockBytes;
    if (!runs_.empty() && first >= runs_.back().first && first <= runs_.back().second) {
      runs_.back().second = std::max(runs_.back().second, behind);
      return;
    }
    runs_.emplace_back(first, behind);
  }
  std::vector<ByteRun> Take(uint64_t slice_bytes, uint64_t gap_bytes) {
    std::sort(runs_.begin(), runs_.end());
    std::vector<ByteRun> reads;
    for (const auto& [first, behind] : runs_) {
      const uint64_t begin = first * kDigestBlockBytes;
      const uint64_t end = std::min(behind * kDigestBlockBytes, slice_bytes);
      if (!reads.empty() && begin <= reads.back().begin + reads.back().bytes + gap_bytes) {
        reads.back().bytes = std::max(reads.back().bytes, end - reads.back().begin);
      } else {
        reads.push_back({begin, end - begin});
      }
    }
    return reads;
  }

 private:
  std::vector<std::pair<uint64_t, uint64_t>> runs_;
};

// The bytes of one side of a copy, block by block: loops whose runs leave no whole block out are
// not gone through.
class SideOf {
 public:
  SideOf(const StridedCopy& copy, bool from, uint64_t element_bytes, BlockRuns& blocks)
      : copy_(copy), from_(from), element_bytes_(element_bytes), blocks_(blocks) {}

  void Mark() { Mark(0, from_ ? copy_.from : copy_.to); }

 private:
  uint64_t Stride(size_t loop) const {
    return from_ ? copy_.loops[loop].from_stride : copy_.loops[loop].to_stride;
  }
  // Bytes from the first element of the loops from `loop` on to just behind the last one.
  uint64_t Extent(size_t loop) const {
    uint64_t elements = copy_.run;
    for (size_t i = loop; i < copy_.loops.size(); ++i) {
      elements += (copy_.loops[i].count - 1) * Stride(i);
    }
    return elements * element_bytes_;
  }
  // Between two rounds of any loop from `loop` on there is less than a block.
  bool Dense(size_t loop) const {
    for (size_t i = loop; i < copy_.loops.size(); ++i) {
      const uint64_t stride = Stride(i) * element_bytes_;
      const uint64_t inner = Extent(i + 1);
      if (stride > inner && stride - inner >= kDigestBlockBytes) {
        return false;
      }
    }
    return true;
  }
  void Mark(size_t loop, uint64_t at) {
    if (Dense(loop)) {
      const uint64_t begin = at * element_bytes_;
      blocks_.Add(begin, begin + Extent(loop));
      return;
    }
    for (uint64_t i = 0; i < copy_.loops[loop].count; ++i) {
      Mark(loop + 1, at + i * Stride(loop));
    }
  }

  const StridedCopy& copy_;
  const bool from_;
  const uint64_t element_bytes_;
  BlockRuns& blocks_;
};

}  // namespace

std::vector<std::vector<ByteRun>> ReadsOf(const ReshardPlan& plan, uint64_t gap_bytes) {
  std::vector<BlockRuns> blocks(plan.sources.size());
  const auto mark = [&](uint32_t source, const StridedCopy& copy, bool from) {
    SideOf(copy, from, DTypeBytes(plan.sources[source].dtype), blocks[source]).Mark();
  };
  for (const ReshardPlan::Piece& piece : plan.pieces) {
    mark(piece.source, piece.copy, true);
  }
  for (const ReshardPlan::Overlap& overlap : plan.overlaps) {
    mark(overlap.source, overlap.copy, true);
    mark(overlap.other, overlap.copy, false);
  }
  std::vector<std::vector<ByteRun>> reads;
  reads.reserve(plan.sources.size());
  for (size_t i = 0; i < plan.sources.size(); ++i) {
    reads.push_back(blocks[i].Take(plan.sources[i].slice_bytes, gap_bytes));
  }
  return reads;
}

}  // namespace holdfast
