// Images and records to test with, built in memory. The caller owns what it gets; no state.
//
//   const SampleImage sample = MakeSampleImage({Whole("w", DType::kF32, {2, 3})}, SampleRecord());
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tiers/image/kept.h"
#include "tiers/image/record.h"

namespace holdfast {

Slice Whole(std::string name, DType dtype, std::vector<uint64_t> shape);
Slice Part(std::string name, DType dtype, std::vector<uint64_t> shape, BoxPlace box);
Slice Range(std::string name, DType dtype, std::vector<uint64_t> shape, FlatPlace range);
Slice Json(std::string name, uint64_t bytes);
Slice Opaque(std::string name, std::string codec, uint64_t bytes);

// Byte `at` of slice `index` (in image order) of a sample: ((index + 1) * 37 + at) mod 256.
char SampleByte(size_t index, uint64_t at);

struct SampleImage {
  Layout layout;
  std::string image;        // the whole file
  ShardRecord record;       // of it
  std::string record_file;  // encoded
};

// A record's identity: job "demo", attempt 3 (from attempt 1's step 40), step 900, rank 1 of 4.
ShardRecord SampleRecord();

// Plans the slices for identity.id.rank, fills the data by SampleByte, and completes the record.
// The slices must be valid: aborts otherwise.
SampleImage MakeSampleImage(std::vector<Slice> slices, ShardRecord identity);
// With the data given, slice after slice in image order.
SampleImage MakeImageOf(std::vector<Slice> slices, ShardRecord identity,
                        const std::vector<std::string>& data);

// Two slices of a tensor, a flat range, every kind of object, zero-size, 0-dim, several dtypes and
// a name to escape.
std::vector<Slice> VariedSlices();

// What the images of a shard and of its owners, in order, say together.
absl::StatusOr<ImageMap> WholeMap(const RecordAndLayout& image,
                                  const std::vector<OwnerImage>& owners);

// Bytes of a record body in its frame, with a CRC that fits: for bodies that no writer makes.
std::string FrameRecordBody(std::string_view body, uint32_t version);

}  // namespace holdfast
