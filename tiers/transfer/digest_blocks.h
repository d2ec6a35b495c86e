// An image's digest blocks, and comparing them with its record. Internal to tiers/transfer/.
//
//   for (DigestBlocks at(layout); !at.done(); at.Next()) {
//     if (Crc64(image + at.offset(), at.bytes()) != record.digests[at.digest()]) …
//   }
//
// Values and plain functions; layout and record outlive them. Walks the layout as it is, so that an
// image of millions of slices costs no memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/mutex.h"
#include "tiers/image/record.h"
#include "tiers/transfer/transfer_result.h"

namespace holdfast {

// In image order; empty slices have none.
class DigestBlocks {
 public:
  explicit DigestBlocks(const Layout& layout);

  bool done() const { return range_ > layout_->slices.size(); }
  void Next();

  uint64_t offset() const { return offset_; }  // in the image
  uint64_t end() const { return offset_ + bytes_; }
  size_t bytes() const { return bytes_; }
  size_t digest() const { return digest_; }
  const std::string& name() const;  // the slice's, or "(header)"

 private:
  void Cut();

  const Layout* layout_;
  size_t range_ = 0;  // 0: the header; i + 1: slice i
  uint64_t offset_ = 0;
  uint64_t range_end_ = 0;
  size_t bytes_ = 0;
  size_t digest_ = 0;
};

// InvalidArgument unless the layout is the record's.
absl::Status CheckIsLayoutOf(const ShardRecord& record, const Layout& layout);

// Absent when `actual` is what the record says.
std::optional<BadBlock> CompareBlock(const ShardRecord& record, const DigestBlocks& block,
                                     uint64_t actual);
// "step … rank 1: block of 1 MiB at offset … of slice 'w' …"; `what`: "memory", or a path.
absl::Status BadBlockError(const ShardRecord& record, const BadBlock& bad, const std::string& what);

// Blocks that are cut by the edges of pieces which are copied side by side: their parts' digests
// come in any order, from any thread.
class SplitBlocks {
 public:
  // [part_offset, +part_bytes) of `block` has this digest. The whole block's, once it is complete.
  std::optional<uint64_t> Add(const DigestBlocks& block, uint64_t part_offset, size_t part_bytes,
                              uint64_t crc) EXCLUDES(mutex_);

 private:
  struct Part {
    size_t bytes;
    uint64_t crc;
  };
  Mutex mutex_;
  std::map<size_t, std::map<uint64_t, Part>> parts_ GUARDED_BY(mutex_);  // by digest, by offset
};

}  // namespace holdfast
