// How ranges of a shard that lies on another node are brought here: a memory-full at a time, each
// as few runs of the image (docs/protocol.md §10, "Readers").
//
//   PartBatches batches(ranges, image, memory);
//   while (std::optional<PartBatch> batch = batches.Next()) {
//     … have the daemon read batch->runs into the memory …
//     HF_TRY(engine.CopyOut(batch->ranges, …));
//   }
//
// Pure: nothing is read. Ranges are cut between digest blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "client-lib/src/copy_engine.h"

namespace holdfast::client {

struct PartRun {
  uint64_t offset = 0;  // in the image
  uint64_t bytes = 0;
  uint64_t place = 0;  // in the memory
};

struct PartBatch {
  std::vector<PartRun> runs;
  std::vector<CopyOutRange> ranges;  // from the memory
  std::vector<size_t> range_of;      // which of the ranges that were given each one is of
};

class PartBatches {
 public:
  // A request holds so many with room to spare.
  static constexpr size_t kRunsMax = 1024;
  // Less than this between two ranges is read over.
  static constexpr uint64_t kGapBytes = uint64_t{32} << 10;

  // `ranges` are from the image as it would lie at `image`; they outlive the object. `memory` holds
  // two digest blocks at least.
  PartBatches(std::span<const CopyOutRange> ranges, const std::byte* image,
              std::span<const std::byte> memory)
      : ranges_(ranges), image_(image), memory_(memory) {}

  std::optional<PartBatch> Next();
  // False after the last one: the memory is too small for what is left.
  bool done() const;

 private:
  // False: it is full.
  bool Add(PartBatch& batch, uint64_t offset, uint64_t bytes);

  const std::span<const CopyOutRange> ranges_;
  const std::byte* const image_;
  const std::span<const std::byte> memory_;
  size_t next_ = 0;    // of the ranges
  uint64_t done_ = 0;  // bytes of that one
};

}  // namespace holdfast::client
