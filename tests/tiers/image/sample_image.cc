#include "tests/tiers/image/sample_image.h"

#include <cstdio>
#include <cstdlib>
#include <utility>

#include "base/digest.h"
#include "base/status.h"

namespace holdfast {
namespace {

void AppendLittleEndian(uint64_t value, size_t bytes, std::string& out) {
  for (size_t i = 0; i < bytes; ++i) {
    out.push_back(static_cast<char>(value >> (8 * i)));
  }
}

template <class T>
T OrDie(absl::StatusOr<T> value) {
  if (!value.ok()) {
    std::fprintf(stderr, "sample image: %s\n", ToString(value.status()).c_str());
    std::abort();
  }
  return *std::move(value);
}

void AppendDigests(std::string_view data, std::vector<uint64_t>& out) {
  AppendBlockDigests({reinterpret_cast<const std::byte*>(data.data()), data.size()}, out);
}

SampleImage Finish(ImagePlan plan, ShardRecord identity, const std::vector<std::string>& data) {
  SampleImage sample;
  sample.image = plan.header;
  sample.record = std::move(identity);
  AppendDigests(plan.header, sample.record.digests);
  for (const std::string& bytes : data) {
    sample.image += bytes;
    AppendDigests(bytes, sample.record.digests);
  }
  sample.record.image_bytes = plan.layout.image_bytes;
  sample.record.header_bytes = plan.layout.header_bytes;
  sample.record.layout_hash = plan.layout_hash;
  sample.record.layout_bytes = plan.layout_bytes;
  sample.record_file = EncodeRecord(sample.record);
  sample.layout = std::move(plan.layout);
  return sample;
}

}  // namespace

Slice Whole(std::string name, DType dtype, std::vector<uint64_t> shape) {
  Slice slice;
  slice.name = std::move(name);
  slice.dtype = dtype;
  slice.global_shape = std::move(shape);
  return slice;
}

Slice Part(std::string name, DType dtype, std::vector<uint64_t> shape, BoxPlace box) {
  Slice slice = Whole(std::move(name), dtype, std::move(shape));
  slice.place = std::move(box);
  return slice;
}

Slice Range(std::string name, DType dtype, std::vector<uint64_t> shape, FlatPlace range) {
  Slice slice = Whole(std::move(name), dtype, std::move(shape));
  slice.place = range;
  return slice;
}

Slice Json(std::string name, uint64_t bytes) {
  Slice slice = Whole(std::move(name), DType::kU8, {bytes});
  slice.kind = SliceKind::kJson;
  return slice;
}

Slice Opaque(std::string name, std::string codec, uint64_t bytes) {
  Slice slice = Whole(std::move(name), DType::kU8, {bytes});
  slice.kind = SliceKind::kOpaque;
  slice.codec = std::move(codec);
  return slice;
}

char SampleByte(size_t index, uint64_t at) {
  return static_cast<char>((index + 1) * 37 + at);
}

ShardRecord SampleRecord() {
  ShardRecord record;
  record.id = {OrDie(JobUuid::FromString("00112233-4455-4677-8899-aabbccddeeff")), 3, 900, 1};
  record.job_name = "demo";
  record.world_size = 4;
  record.generation = 5;
  record.descent = {{3, {1, 40}}, {1, {0, 0}}};
  record.sealed_unix_ms = 1'700'000'000'123;
  return record;
}

SampleImage MakeSampleImage(std::vector<Slice> slices, ShardRecord identity) {
  ImagePlan plan = OrDie(PlanImage(std::move(slices), identity.id.rank));
  std::vector<std::string> data;
  for (size_t i = 0; i < plan.layout.slices.size(); ++i) {
    std::string& bytes = data.emplace_back(plan.layout.slices[i].bytes, '\0');
    for (uint64_t at = 0; at < bytes.size(); ++at) {
      bytes[at] = SampleByte(i, at);
    }
  }
  return Finish(std::move(plan), std::move(identity), data);
}

SampleImage MakeImageOf(std::vector<Slice> slices, ShardRecord identity,
                        const std::vector<std::string>& data) {
  ImagePlan plan = OrDie(PlanImage(std::move(slices), identity.id.rank));
  return Finish(std::move(plan), std::move(identity), data);
}

std::vector<Slice> VariedSlices() {
  return {
      Whole("scalar", DType::kF64, {}),
      Whole("bf16", DType::kBF16, {3, 5}),
      Whole("empty", DType::kF32, {0, 7}),
      Whole("quote\" back\\slash\nnew line \x01 \xc3\xbc", DType::kI8, {3}),
      Part("sharded", DType::kF32, {8, 4}, {{2, 0}, {2, 4}}),
      Part("sharded", DType::kF32, {8, 4}, {{6, 1}, {1, 3}}),
      Range("flat", DType::kF16, {10, 10}, {37, 21}),
      Json("progress", 11),
      Opaque("rng", "pickle.v4", 9),
  };
}

absl::StatusOr<ImageMap> WholeMap(const RecordAndLayout& image,
                                  const std::vector<OwnerImage>& owners) {
  HF_ASSIGN_OR_RETURN(WholeImage whole, WholeImage::Of(image));
  for (const OwnerImage& owner : owners) {
    HF_RETURN_IF_ERROR(whole.Add(owner));
  }
  return std::move(whole).Finish();
}

std::string FrameRecordBody(std::string_view body, uint32_t version) {
  std::string file = "HFRECORD";
  AppendLittleEndian(version, 4, file);
  AppendLittleEndian(0, 4, file);
  AppendLittleEndian(body.size(), 8, file);
  file.append(body);
  AppendLittleEndian(Crc64(file), 8, file);
  return file;
}

}  // namespace holdfast
