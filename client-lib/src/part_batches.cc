#include "client-lib/src/part_batches.h"

#include <algorithm>

#include "base/digest.h"

namespace holdfast::client {
namespace {

// So that elements lie in the memory as they do in the image, and digests are as fast.
constexpr uint64_t kAlignment = 64;

}  // namespace

bool PartBatches::Add(PartBatch& batch, uint64_t offset, uint64_t bytes) {
  if (!batch.runs.empty()) {
    PartRun& last = batch.runs.back();
    const uint64_t end = last.offset + last.bytes;
    if (offset >= last.offset && offset <= end + kGapBytes) {
      const uint64_t longer = std::max(end, offset + bytes) - last.offset;
      if (last.place + longer > memory_.size()) {
        return false;
      }
      last.bytes = longer;
      return true;
    }
  }
  const uint64_t used = batch.runs.empty() ? 0 : batch.runs.back().place + batch.runs.back().bytes;
  const uint64_t place = (used + kAlignment - 1) / kAlignment * kAlignment + offset % kAlignment;
  if (place + bytes > memory_.size() || batch.runs.size() == kRunsMax) {
    return false;
  }
  batch.runs.push_back({offset, bytes, place});
  return true;
}

bool PartBatches::done() const {
  return next_ == ranges_.size();
}

std::optional<PartBatch> PartBatches::Next() {
  PartBatch batch;
  while (next_ < ranges_.size()) {
    const CopyOutRange& range = ranges_[next_];
    if (done_ == range.bytes) {  // the last of it is there, or it has no bytes
      ++next_;
      done_ = 0;
      continue;
    }
    const auto begin = static_cast<uint64_t>(static_cast<const std::byte*>(range.from) - image_);
    const uint64_t bytes = std::min<uint64_t>(kDigestBlockBytes, range.bytes - done_);
    if (!Add(batch, begin + done_, bytes)) {
      break;
    }
    const PartRun& run = batch.runs.back();
    const std::byte* const from = memory_.data() + run.place + (begin + done_ - run.offset);
    if (!batch.ranges.empty() && batch.range_of.back() == next_) {
      batch.ranges.back().bytes += bytes;
    } else {
      CopyOutRange& part = batch.ranges.emplace_back(range);
      batch.range_of.push_back(next_);
      part.from = from;
      part.to = range.to == nullptr ? nullptr : static_cast<std::byte*>(range.to) + done_;
      part.bytes = bytes;
      part.digests += done_ / kDigestBlockBytes;
      part.in_slice += done_;
    }
    done_ += bytes;
  }
  if (batch.ranges.empty()) {
    return std::nullopt;
  }
  return batch;
}

}  // namespace holdfast::client
