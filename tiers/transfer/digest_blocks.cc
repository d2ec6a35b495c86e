#include "tiers/transfer/digest_blocks.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/digest.h"

namespace holdfast {

DigestBlocks::DigestBlocks(const Layout& layout)
    : layout_(&layout), range_end_(layout.header_bytes) {
  Cut();
}

void DigestBlocks::Next() {
  offset_ += bytes_;
  ++digest_;
  Cut();
}

// The block at offset_; enters the next range that is not empty when this one is through.
void DigestBlocks::Cut() {
  while (offset_ == range_end_ && !done()) {
    ++range_;
    if (!done()) {
      const Slice& slice = layout_->slices[range_ - 1];
      offset_ = slice.image_offset;
      range_end_ = slice.image_offset + slice.bytes;
    }
  }
  bytes_ = done() ? 0 : std::min<uint64_t>(kDigestBlockBytes, range_end_ - offset_);
}

const std::string& DigestBlocks::name() const {
  static const std::string header = "(header)";
  return range_ == 0 || done() ? header : layout_->slices[range_ - 1].name;
}

absl::Status CheckIsLayoutOf(const ShardRecord& record, const Layout& layout) {
  if (record.header_bytes != layout.header_bytes || record.image_bytes != layout.image_bytes ||
      record.digests.size() != DigestCount(layout) || record.image_bytes == 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "transfer of ", record.id.ToString(), ": the layout (header ", layout.header_bytes,
        ", image ", layout.image_bytes, " bytes) is not the record's (", record.header_bytes, ", ",
        record.image_bytes, ", ", record.digests.size(), " digests)"));
  }
  return absl::OkStatus();
}

std::optional<BadBlock> CompareBlock(const ShardRecord& record, const DigestBlocks& block,
                                     uint64_t actual) {
  const uint64_t expected = record.digests[block.digest()];
  if (actual == expected) {
    return std::nullopt;
  }
  return BadBlock{block.name(), block.offset(), block.bytes(), expected, actual};
}

absl::Status BadBlockError(const ShardRecord& record, const BadBlock& bad,
                           const std::string& what) {
  return absl::DataLossError(absl::StrFormat(
      "%s of %s: %d bytes at offset %d (of '%s') have the digest %016x, the record says %016x",
      what, record.id.ToString(), bad.bytes, bad.image_offset, bad.slice, bad.actual,
      bad.expected));
}

std::optional<uint64_t> SplitBlocks::Add(const DigestBlocks& block, uint64_t part_offset,
                                         size_t part_bytes, uint64_t crc) {
  MutexLock lock(mutex_);
  std::map<uint64_t, Part>& parts = parts_[block.digest()];
  parts[part_offset] = {part_bytes, crc};
  size_t bytes = 0;
  for (const auto& [offset, part] : parts) {
    bytes += part.bytes;
  }
  if (bytes != block.bytes()) {
    return std::nullopt;
  }
  uint64_t whole = 0;
  for (const auto& [offset, part] : parts) {
    whole = Crc64Combine(whole, part.crc, part.bytes);
  }
  parts_.erase(block.digest());
  return whole;
}

}  // namespace holdfast
