#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/digest.h"
#include "base/status.h"
#include "tiers/image/record.h"

namespace holdfast {
namespace {

absl::Status CheckBelongsTogether(const ShardRecord& record, const Layout& layout) {
  const size_t digests = DigestCount(layout);
  if (record.header_bytes != layout.header_bytes || record.image_bytes != layout.image_bytes ||
      record.digests.size() != digests) {
    return absl::InvalidArgumentError(absl::StrCat(
        "verify image of ", record.id.ToString(), ": the layout (header ", layout.header_bytes,
        ", image ", layout.image_bytes, " bytes, ", digests, " digests) is not the record's (",
        record.header_bytes, ", ", record.image_bytes, ", ", record.digests.size(), ")"));
  }
  return absl::OkStatus();
}

}  // namespace

std::vector<DigestedRange> DigestedRanges(const Layout& layout) {
  std::vector<DigestedRange> ranges;
  ranges.reserve(layout.slices.size() + 1);
  ranges.push_back({0, layout.header_bytes, 0});
  for (const Slice& slice : layout.slices) {
    const DigestedRange& before = ranges.back();
    ranges.push_back(
        {slice.image_offset, slice.bytes, before.first_digest + DigestBlockCount(before.bytes)});
  }
  return ranges;
}

size_t DigestCount(const Layout& layout) {
  size_t count = DigestBlockCount(layout.header_bytes);
  for (const Slice& slice : layout.slices) {
    count += DigestBlockCount(slice.bytes);
  }
  return count;
}

absl::StatusOr<std::vector<BadBlock>> VerifyImage(const ShardRecord& record, const Layout& layout,
                                                  const ReadAtFunction& read, size_t bad_max,
                                                  const std::function<bool(uint64_t)>& progress) {
  const std::vector<DigestedRange> ranges = DigestedRanges(layout);
  HF_RETURN_IF_ERROR(CheckBelongsTogether(record, layout));
  if (bad_max == 0) {
    // Otherwise the empty answer could not be told from "intact".
    return absl::InvalidArgumentError("verify image: at least one bad block must be asked for");
  }
  std::vector<BadBlock> bad;
  std::vector<std::byte> buffer(std::min<uint64_t>(kDigestBlockBytes, layout.image_bytes));
  uint64_t done = 0;
  for (size_t i = 0; i < ranges.size(); ++i) {
    const DigestedRange& range = ranges[i];
    size_t digest = range.first_digest;
    for (uint64_t at = 0; at < range.bytes; at += kDigestBlockBytes, ++digest) {
      const std::span<std::byte> block(buffer.data(),
                                       std::min<uint64_t>(kDigestBlockBytes, range.bytes - at));
      HF_RETURN_IF_ERROR(read(range.image_offset + at, block));
      const uint64_t actual = Crc64(block.data(), block.size());
      if (actual != record.digests[digest]) {
        const std::string name = i == 0 ? "(header)" : layout.slices[i - 1].name;
        bad.push_back(
            {name, range.image_offset + at, block.size(), record.digests[digest], actual});
        if (bad.size() == bad_max) {
          return bad;
        }
      }
      done += block.size();
      if (progress && !progress(done)) {
        return absl::CancelledError(absl::StrCat("verify image of ", record.id.ToString(),
                                                 ": cancelled after ", done, " of ",
                                                 layout.image_bytes, " bytes"));
      }
    }
  }
  return bad;
}

}  // namespace holdfast
