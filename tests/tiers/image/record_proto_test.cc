// The codec in tiers/image against protobuf's own: what one writes, the other reads, byte for byte.
#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <gtest/gtest.h>

#include "base/status.h"
#include "holdfast/v1/record.pb.h"
#include "tests/tiers/image/sample_image.h"
#include "tiers/image/kept.h"

namespace holdfast {
namespace {

std::string Deterministic(const google::protobuf::Message& message) {
  std::string bytes;
  google::protobuf::io::StringOutputStream stream(&bytes);
  google::protobuf::io::CodedOutputStream coded(&stream);
  coded.SetSerializationDeterministic(true);
  EXPECT_TRUE(message.SerializeToCodedStream(&coded));
  coded.Trim();
  return bytes;
}

v1::Layout ToProto(const Layout& layout) {
  v1::Layout out;
  for (const Slice& slice : layout.slices) {
    v1::Slice& to = *out.add_slices();
    to.set_name(slice.name);
    to.set_dtype(static_cast<v1::DType>(slice.dtype));
    to.mutable_global_shape()->Add(slice.global_shape.begin(), slice.global_shape.end());
    if (const auto* box = std::get_if<BoxPlace>(&slice.place)) {
      to.mutable_box()->mutable_offset()->Add(box->offset.begin(), box->offset.end());
      to.mutable_box()->mutable_shape()->Add(box->shape.begin(), box->shape.end());
    } else if (const auto* flat = std::get_if<FlatPlace>(&slice.place)) {
      to.mutable_flat()->set_start(flat->start);
      to.mutable_flat()->set_length(flat->length);
    }
    to.set_image_offset(slice.image_offset);
    to.set_bytes(slice.bytes);
    to.set_key(slice.key);
    to.set_kind(static_cast<v1::Slice::Kind>(slice.kind));
    to.set_codec(slice.codec);
  }
  return out;
}

v1::ShardRecord ToProto(const ShardRecord& record) {
  v1::ShardRecord out;
  out.set_job_uuid(record.id.job.ToBytes());
  out.set_job_name(record.job_name);
  out.set_attempt(record.id.attempt);
  out.set_step(record.id.step);
  out.set_rank(record.id.rank);
  out.set_world_size(record.world_size);
  out.set_generation(record.generation);
  out.set_image_bytes(record.image_bytes);
  out.set_header_bytes(record.header_bytes);
  out.set_layout_hash(record.layout_hash.data(), record.layout_hash.size());
  out.set_layout(record.layout_bytes);
  out.mutable_digests()->Add(record.digests.begin(), record.digests.end());
  for (const Descent& descent : record.descent) {
    v1::Descent& to = *out.add_descent();
    to.set_attempt(descent.attempt);
    to.set_parent_attempt(descent.parent.attempt);
    to.set_parent_step(descent.parent.step);
  }
  out.set_sealed_unix_ms(record.sealed_unix_ms);
  if (record.kept) {
    v1::KeptSlices& kept = *out.mutable_kept();
    kept.set_image_bytes(record.kept->image_bytes);
    kept.set_header_bytes(record.kept->header_bytes);
    kept.mutable_header_digests()->Add(record.kept->header_digests.begin(),
                                       record.kept->header_digests.end());
    kept.mutable_runs()->Add(record.kept->runs.begin(), record.kept->runs.end());
    kept.mutable_owners()->Add(record.kept->owners.begin(), record.kept->owners.end());
    kept.set_plan(record.kept->plan.data(), record.kept->plan.size());
  }
  return out;
}

std::string Body(const std::string& record_file) {
  return record_file.substr(24, record_file.size() - 32);
}

std::vector<SampleImage> Samples() {
  ShardRecord bare = SampleRecord();
  bare.id.step = 0;
  bare.id.rank = 0;
  bare.generation = 0;
  bare.descent.clear();
  bare.sealed_unix_ms = 0;
  ShardRecord negative = SampleRecord();
  negative.sealed_unix_ms = -5;
  negative.descent.push_back({0, {0, 0}});
  std::vector<SampleImage> samples = {
      MakeSampleImage(VariedSlices(), SampleRecord()),
      MakeSampleImage({Part("s", DType::kU8, {}, {{}, {}}), Range("t", DType::kU8, {0}, {0, 0})},
                      bare),
      MakeSampleImage({Whole("w", DType::kC64, {uint64_t{1} << 8, 3})}, negative),
  };
  // One that leaves out all but one tensor and its objects.
  const SampleImage& varied = samples.front();
  std::vector<Rank> owners(TensorsOf(varied.layout).slices.size(), 3);
  owners[2] = varied.record.id.rank;
  SampleImage part = varied;
  part.record =
      (*PlanPart({varied.record, varied.layout}, owners, varied.record.layout_hash))->record;
  part.record_file = EncodeRecord(part.record);
  samples.push_back(part);
  return samples;
}

TEST(RecordProtoTest, WeWriteWhatProtobufWrites) {
  for (const SampleImage& sample : Samples()) {
    EXPECT_EQ(EncodeLayout(sample.layout), Deterministic(ToProto(sample.layout)));
    EXPECT_EQ(Body(sample.record_file), Deterministic(ToProto(sample.record)));
  }
}

TEST(RecordProtoTest, ProtobufReadsWhatWeWrite) {
  for (const SampleImage& sample : Samples()) {
    v1::ShardRecord record;
    ASSERT_TRUE(record.ParseFromString(Body(sample.record_file)));
    EXPECT_EQ(record.DebugString(), ToProto(sample.record).DebugString());
    v1::Layout layout;
    ASSERT_TRUE(layout.ParseFromString(record.layout()));
    EXPECT_EQ(layout.DebugString(), ToProto(sample.layout).DebugString());
    EXPECT_TRUE(record.GetReflection()->GetUnknownFields(record).empty());
  }
}

TEST(RecordProtoTest, WeReadWhatProtobufWrites) {
  const SampleImage sample = MakeSampleImage(VariedSlices(), SampleRecord());
  const auto record = DecodeRecord(FrameRecordBody(Deterministic(ToProto(sample.record)), 1));
  ASSERT_TRUE(record.ok()) << ToString(record.status());
  EXPECT_EQ(*record, sample.record);
  const auto layout = DecodeLayout(Deterministic(ToProto(sample.layout)),
                                   sample.layout.header_bytes, sample.layout.image_bytes);
  ASSERT_TRUE(layout.ok()) << ToString(layout.status());
  EXPECT_EQ(*layout, sample.layout);
}

TEST(RecordProtoTest, DTypeNumbersAgree) {
  for (int number = 1; number <= 19; ++number) {
    ASSERT_TRUE(v1::DType_IsValid(number));
    EXPECT_EQ(v1::DType_Name(number),
              "DTYPE_" + std::string(DTypeName(static_cast<DType>(number))));
  }
  EXPECT_FALSE(v1::DType_IsValid(20)) << "a new dtype needs its place in tiers/image/layout.h";
}

}  // namespace
}  // namespace holdfast
