#include "client-lib/src/shard_read.h"

#include "base/digest.h"
#include "client-lib/src/errors.h"
#include "client-lib/src/state_match.h"

namespace holdfast::client {

Status CopyOutOf(const SealedShard& shard, CopyEngine& engine, const ShardRanges& ranges,
                 const ShardSlices& slices, CopyOptions options) {
  options.populate = !shard.populated();
  HF_TRY_ASSIGN(const std::optional<CopyMismatch> mismatch, engine.CopyOut(ranges, options));
  if (shard.faulted()) {
    return Status(Code::kCorrupt, "the slot was cut short while it was being read");
  }
  if (mismatch.has_value()) {
    CopyMismatch in_slice = *mismatch;
    in_slice.block += ranges[mismatch->range].in_slice / kDigestBlockBytes;
    return shard.MismatchError(in_slice, slices[mismatch->range]);
  }
  return Status();
}

Result<std::vector<Object>> ReadObjects(
    const SealedShard& shard,
    const std::function<Status(const ShardRanges&, const ShardSlices&)>& compare) {
  ShardRanges ranges = {shard.HeaderRange()};
  ShardSlices slices = {std::nullopt};
  const std::vector<Slice>& all = shard.layout().slices;
  for (size_t i = 0; i < all.size(); ++i) {
    if (all[i].kind != SliceKind::kTensor) {
      slices.emplace_back(i);
    }
  }
  std::vector<Object> objects;
  objects.reserve(slices.size());  // ranges point into the objects
  for (size_t i = 1; i < slices.size(); ++i) {
    const Slice& slice = all[*slices[i]];
    Object& object = objects.emplace_back(ToObject(slice));
    object.bytes.resize(slice.bytes);
    ranges.push_back(shard.SliceRange(*slices[i], object.bytes.data()));
  }
  HF_TRY(compare(ranges, slices));
  return objects;
}

}  // namespace holdfast::client
