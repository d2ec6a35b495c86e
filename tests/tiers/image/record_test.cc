#include "tiers/image/record.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <protozero/pbf_writer.hpp>

#include "base/digest.h"
#include "base/status.h"
#include "tests/tiers/image/sample_image.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;

SampleImage Sample() {
  return MakeSampleImage(VariedSlices(), SampleRecord());
}

// A whole record, with one thing changed.
void ExpectRefused(const std::function<void(ShardRecord&)>& change, const std::string& why) {
  ShardRecord record = Sample().record;
  change(record);
  const auto decoded = DecodeRecord(EncodeRecord(record));
  EXPECT_EQ(decoded.status().code(), absl::StatusCode::kInvalidArgument) << why;
  EXPECT_THAT(Message(decoded.status()), HasSubstr(why));
}

TEST(RecordTest, RoundTrips) {
  const SampleImage sample = Sample();
  ASSERT_TRUE(CheckRecordFraming(sample.record_file).ok());
  const auto decoded = DecodeRecord(sample.record_file);
  ASSERT_TRUE(decoded.ok()) << ToString(decoded.status());
  EXPECT_EQ(*decoded, sample.record);
  EXPECT_EQ(EncodeRecord(*decoded), sample.record_file);
}

TEST(RecordTest, ExtremesRoundTrip) {
  ShardRecord identity = SampleRecord();
  identity.id.step = ~uint64_t{0};
  identity.id.attempt = ~uint64_t{0};
  identity.id.rank = kWorldSizeMax - 1;
  identity.world_size = kWorldSizeMax;
  identity.generation = 0;
  identity.sealed_unix_ms = -1;
  identity.descent.clear();
  for (size_t i = 0; i < kDescentMax; ++i) {
    identity.descent.push_back({~uint64_t{0} - i, {~uint64_t{0} - i - 1, i}});
  }
  const SampleImage sample = MakeSampleImage({Whole("z", DType::kF32, {0})}, identity);
  const auto decoded = DecodeRecord(sample.record_file);
  ASSERT_TRUE(decoded.ok()) << ToString(decoded.status());
  EXPECT_EQ(*decoded, sample.record);
}

TEST(RecordTest, TornAtAnyLengthIsDataLoss) {
  const std::string file = Sample().record_file;
  for (size_t bytes = 0; bytes < file.size(); ++bytes) {
    EXPECT_EQ(DecodeRecord(file.substr(0, bytes)).status().code(), absl::StatusCode::kDataLoss)
        << bytes;
  }
  EXPECT_EQ(DecodeRecord(file + '\0').status().code(), absl::StatusCode::kDataLoss);
}

TEST(RecordTest, AnyFlippedBitIsFound) {
  const std::string file = Sample().record_file;
  for (size_t bit = 0; bit < file.size() * 8; ++bit) {
    std::string flipped = file;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << (bit % 8)));
    const absl::StatusCode code = DecodeRecord(flipped).status().code();
    const bool in_version = bit / 8 >= 8 && bit / 8 < 12;
    EXPECT_TRUE(code == absl::StatusCode::kDataLoss ||
                (in_version && code == absl::StatusCode::kFailedPrecondition))
        << "bit " << bit;
  }
}

TEST(RecordTest, NewerVersionIsRefusedByName) {
  for (const std::string& file : {FrameRecordBody("what a later version writes", 3), [] {
                                    std::string patched = Sample().record_file;
                                    patched[8] = 3;
                                    return patched;
                                  }()}) {
    const auto decoded = DecodeRecord(file);
    EXPECT_EQ(decoded.status().code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(Message(decoded.status()), HasSubstr("version 3"));
    EXPECT_THAT(Message(decoded.status()), HasSubstr("up to version 2"));
    EXPECT_EQ(CheckRecordFraming(file).code(), absl::StatusCode::kFailedPrecondition);
  }
}

TEST(RecordTest, WholeButOfNoWriter) {
  EXPECT_EQ(CheckRecordFraming(FrameRecordBody("", 0)).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(CheckRecordFraming(FrameRecordBody("", 1)).ok());
  EXPECT_EQ(DecodeRecord(FrameRecordBody("", 1)).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(DecodeRecord(FrameRecordBody("\xff\xff\xff", 1)).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(RecordTest, ContradictionsAreRefused) {
  ExpectRefused([](ShardRecord& r) { r.layout_hash[0] ^= 1; }, "its layout's hash is");
  ExpectRefused([](ShardRecord& r) { r.layout_bytes += '\x08'; }, "its layout's hash is");
  ExpectRefused(
      [](ShardRecord& r) {
        r.layout_bytes += '\x08';
        r.layout_hash = HashLayout(r.layout_bytes);
      },
      "decode layout");
  ExpectRefused([](ShardRecord& r) { r.digests.pop_back(); }, "digests, its layout needs");
  ExpectRefused([](ShardRecord& r) { r.digests.push_back(0); }, "digests, its layout needs");
  ExpectRefused([](ShardRecord& r) { r.digests.clear(); }, "it has 0 digests");
  ExpectRefused([](ShardRecord& r) { r.image_bytes += 1; }, "the slices end at");
  ExpectRefused([](ShardRecord& r) { r.header_bytes += 4096; }, "less than its header's");
  ExpectRefused([](ShardRecord& r) { r.job_name = "../etc"; }, "job name");
  ExpectRefused([](ShardRecord& r) { r.id.job = {}; }, "names no job uuid");
  ExpectRefused([](ShardRecord& r) { r.id.attempt = 0; }, "or no attempt");
  ExpectRefused([](ShardRecord& r) { r.world_size = 1; },
                "rank 1 is not below its world size of 1");
  ExpectRefused([](ShardRecord& r) { r.world_size = kWorldSizeMax + 1; }, "field 6");
  ExpectRefused([](ShardRecord& r) { r.id.rank = kWorldSizeMax; }, "field 5");
}

TEST(RecordTest, LineOfDescentMustHangTogether) {
  ExpectRefused([](ShardRecord& r) { r.descent[0].attempt = 2; }, "line of descent");
  ExpectRefused([](ShardRecord& r) { r.descent[1].attempt = 2; }, "line of descent");
  ExpectRefused([](ShardRecord& r) { r.descent[0].parent.attempt = 3; }, "line of descent");
  ExpectRefused([](ShardRecord& r) { r.descent.push_back({0, {0, 0}}); }, "line of descent");
  ExpectRefused([](ShardRecord& r) { r.descent.assign(kDescentMax + 1, r.descent[0]); },
                "more than 4096 attempts");
}

TEST(RecordTest, FieldsOfLaterVersionsAreSkippedAndMalformedOnesRefused) {
  const SampleImage sample = Sample();
  const std::string body = sample.record_file.substr(24, sample.record_file.size() - 32);
  std::string longer = body;
  protozero::pbf_writer(longer).add_string(99, "later");
  const auto decoded = DecodeRecord(FrameRecordBody(longer, 1));
  ASSERT_TRUE(decoded.ok()) << ToString(decoded.status());
  EXPECT_EQ(*decoded, sample.record);

  const std::vector<std::pair<std::function<void(protozero::pbf_writer&)>, std::string>> cases = {
      {[](auto& w) { w.add_uint64(4, 901); }, "field 4: it is given twice"},
      {[](auto& w) { w.add_fixed64(12, 1); }, "field 12: it has the wrong wire type"},
      {[](auto& w) { w.add_uint64(13, 1); }, "field 13: it has the wrong wire type"},
      {[](auto& w) { w.add_message(13, std::string("\x0a")); }, "read Descent"},
      {[](auto& w) { w.add_message(1, std::string("short")); }, "field 1: it is given twice"},
  };
  for (const auto& [add, why] : cases) {
    std::string bad = body;
    protozero::pbf_writer writer(bad);
    add(writer);
    EXPECT_THAT(Message(DecodeRecord(FrameRecordBody(bad, 1)).status()), HasSubstr(why));
  }
  for (const auto& [add, why] :
       std::vector<std::pair<std::function<void(protozero::pbf_writer&)>, std::string>>{
           {[](auto& w) { w.add_bytes(1, "short"); }, "uuid"},
           {[](auto& w) { w.add_bytes(10, "short"); }, "has 5 bytes, not 16"},
           {[](auto& w) { w.add_bytes(12, "1234567"); }, "not a multiple of 8"},
       }) {
    std::string bad;
    protozero::pbf_writer writer(bad);
    add(writer);
    EXPECT_THAT(Message(DecodeRecord(FrameRecordBody(bad, 1)).status()), HasSubstr(why));
  }
}

TEST(RecordTest, DigestedRangesCoverTheImage) {
  const SampleImage sample =
      MakeSampleImage({Whole("big", DType::kU8, {2 * kDigestBlockBytes + 1}),
                       Whole("none", DType::kU8, {0}), Whole("one", DType::kU8, {1})},
                      SampleRecord());
  const std::vector<DigestedRange> ranges = DigestedRanges(sample.layout);
  ASSERT_EQ(ranges.size(), 4u);
  const std::vector<size_t> first = {0, 1, 4, 4};
  uint64_t offset = 0;
  for (size_t i = 0; i < ranges.size(); ++i) {
    EXPECT_EQ(ranges[i].first_digest, first[i]);
    EXPECT_EQ(ranges[i].image_offset, offset);
    offset += ranges[i].bytes;
  }
  EXPECT_EQ(offset, sample.layout.image_bytes);
  EXPECT_EQ(sample.record.digests.size(), 5u);
  EXPECT_TRUE(DecodeRecord(sample.record_file).ok());
}

}  // namespace
}  // namespace holdfast
