#include "tiers/image/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/status.h"
#include "tests/tiers/image/sample_image.h"

namespace holdfast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string File(const std::string& json, size_t data_bytes) {
  std::string file;
  for (size_t i = 0; i < 8; ++i) {
    file.push_back(static_cast<char>(json.size() >> (8 * i)));
  }
  return file + json + std::string(data_bytes, 'd');
}

absl::StatusOr<SafetensorsHeader> Parse(const std::string& json, size_t data_bytes) {
  const std::string file = File(json, data_bytes);
  return ParseSafetensors(file, file.size());
}

void ExpectRefused(const std::string& json, size_t data_bytes, const std::string& why) {
  const auto header = Parse(json, data_bytes);
  EXPECT_EQ(header.status().code(), absl::StatusCode::kInvalidArgument) << json;
  EXPECT_THAT(Message(header.status()), HasSubstr(why)) << json;
}

constexpr char kEntry[] = R"({"dtype":"F32","shape":[2],"data_offsets":[0,8]})";

TEST(SafetensorsTest, ReadsWhatPlanImageWrites) {
  const SampleImage sample = MakeSampleImage(VariedSlices(), SampleRecord());
  const auto header = ParseSafetensors(sample.image, sample.image.size());
  ASSERT_TRUE(header.ok()) << ToString(header.status());
  EXPECT_EQ(header->header_bytes, sample.layout.header_bytes);
  EXPECT_EQ(header->metadata.at("format"), "pt");
  ASSERT_EQ(header->entries.size(), sample.layout.slices.size());
  for (const Slice& slice : sample.layout.slices) {
    const auto entry =
        std::find_if(header->entries.begin(), header->entries.end(),
                     [&](const SafetensorsEntry& e) { return e.key == HeaderKey(slice, 1); });
    ASSERT_NE(entry, header->entries.end());
    EXPECT_EQ(entry->dtype, slice.dtype);
    EXPECT_EQ(entry->shape, LocalShape(slice));
    EXPECT_EQ(entry->begin + header->header_bytes, slice.image_offset);
    EXPECT_EQ(entry->end - entry->begin, slice.bytes);
  }
}

TEST(SafetensorsTest, ThePrefixNeedsTheHeaderOnly) {
  const SampleImage sample = MakeSampleImage(VariedSlices(), SampleRecord());
  EXPECT_TRUE(
      ParseSafetensors(sample.image.substr(0, sample.layout.header_bytes), sample.image.size())
          .ok());
  EXPECT_FALSE(
      ParseSafetensors(sample.image.substr(0, sample.layout.header_bytes - 1), sample.image.size())
          .ok());
}

TEST(SafetensorsTest, ForeignFilesThatAreValid) {
  EXPECT_TRUE(Parse("{}", 0).ok());
  EXPECT_TRUE(Parse("{} \n\t", 0).ok());
  EXPECT_TRUE(Parse(R"({"__metadata__":{}})", 0).ok());
  const auto header = Parse(R"({"b":{"shape":[],"data_offsets":[1,2],"dtype":"U8"},
                                "z":{"dtype":"U8","shape":[0,3],"data_offsets":[1,1]},
                                "a":{"dtype":"F8_E8M0","shape":[1],"data_offsets":[0,1]},
                                "__metadata__":{"k":"v"}})",
                            2);
  ASSERT_TRUE(header.ok()) << ToString(header.status());
  ASSERT_EQ(header->entries.size(), 3u);
  EXPECT_EQ(header->entries[0].key, "a");
  EXPECT_EQ(header->entries[1].key, "z");
  EXPECT_EQ(header->entries[2].key, "b");
  EXPECT_THAT(header->metadata, ElementsAre(std::pair<const std::string, std::string>("k", "v")));
}

TEST(SafetensorsTest, RefusesLengthsThatLeaveTheFile) {
  EXPECT_FALSE(ParseSafetensors("", 0).ok());
  EXPECT_FALSE(ParseSafetensors("1234567", 7).ok());
  EXPECT_FALSE(ParseSafetensors(std::string("\x02\0\0\0\0\0\0\0{}", 10), 9).ok());
  EXPECT_FALSE(ParseSafetensors(std::string("\x03\0\0\0\0\0\0\0{}", 10), 10).ok());
  EXPECT_FALSE(ParseSafetensors(std::string(8, '\xff'), 100).ok());
  // One byte over the limit, in a file that would be large enough.
  const auto header = ParseSafetensors(std::string("\x01\xe1\xf5\x05\0\0\0\0{", 9), 1'000'000'000);
  EXPECT_THAT(Message(header.status()), HasSubstr("exceeds the limit of 100000000"));
}

TEST(SafetensorsTest, RefusesWhatIsNotTheFormat) {
  ExpectRefused("", 0, "begin with '{'");
  ExpectRefused(" {}", 0, "begin with '{'");
  ExpectRefused("[]", 0, "begin with '{'");
  ExpectRefused("\xef\xbb\xbf{}", 0, "begin with '{'");
  ExpectRefused("{", 0, "not valid JSON");
  ExpectRefused("{}{}", 0, "not valid JSON");
  ExpectRefused("{}x", 0, "not valid JSON");
  ExpectRefused("{\"a\xff\":1}", 0, "not valid JSON");
  ExpectRefused(R"({"a":1})", 0, "a number where none");
  ExpectRefused(R"({"a":null})", 0, "null has no place");
  ExpectRefused(R"({"a":true})", 0, "a boolean has no place");
  ExpectRefused(R"({"a":"x"})", 0, "a string where none");
  ExpectRefused(R"({"a":[]})", 0, "an array where none");
  ExpectRefused(R"({"a":{}})", 0, "it needs dtype, shape and two data_offsets");
  ExpectRefused(R"({"a":{"x":1}})", 0, "unknown field 'x'");
  ExpectRefused(R"({"a":{"dtype":{}}})", 0, "an object where none");
  ExpectRefused(R"({"a":{"shape":[[]]}})", 0, "an array where none");
  ExpectRefused(R"({"a":{"shape":["x"]}})", 0, "a string where none");
  ExpectRefused(R"({"a":{"shape":3}})", 0, "a number where none");
  ExpectRefused(R"({"a":{"dtype":"X9"}})", 0, "unknown dtype 'X9'");
  ExpectRefused(R"({"__metadata__":{"k":1}})", 0, "a number where none");
  ExpectRefused(R"({"__metadata__":{"k":{}}})", 0, "an object where none");
  ExpectRefused(R"({"__metadata__":"k"})", 0, "a string where none");
}

TEST(SafetensorsTest, RefusesNumbersThatAreNone) {
  for (const char* number : {"-1", "1.5", "1e3", "18446744073709551616"}) {
    ExpectRefused(
        std::string(R"({"a":{"dtype":"F32","shape":[)") + number + R"(],"data_offsets":[0,8]}})", 8,
        "number");
  }
  ExpectRefused(R"({"a":{"dtype":"F32","shape":[1e999],"data_offsets":[0,8]}})", 8,
                "not valid JSON");
  ExpectRefused(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8,8]}})", 8,
                "a number where none");
  ExpectRefused(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0]}})", 8, "two data_offsets");
  std::string shape;
  for (int i = 0; i < 33; ++i) {
    shape += i == 0 ? "1" : ",1";
  }
  ExpectRefused(R"({"a":{"dtype":"U8","shape":[)" + shape + R"(],"data_offsets":[0,1]}})", 1,
                "more than 32");
}

TEST(SafetensorsTest, RefusesTheSameKeyTwice) {
  ExpectRefused(std::string("{\"a\":") + kEntry + ",\"a\":" + kEntry + "}", 8,
                "'a': it is there twice");
  ExpectRefused(
      R"({"z":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"z":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})",
      0, "'z': it is there twice");
  ExpectRefused(R"({"__metadata__":{},"__metadata__":{}})", 0, "'__metadata__': it is there twice");
  ExpectRefused(R"({"__metadata__":{"k":"v","k":"w"}})", 0, "'k': it is there twice");
  ExpectRefused(R"({"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 8,
                "'dtype' is there twice");
}

TEST(SafetensorsTest, RefusesHolesOverlapsAndWrongLengths) {
  const std::string one = std::string("{\"a\":") + kEntry + "}";
  EXPECT_TRUE(Parse(one, 8).ok());
  ExpectRefused(one, 7, "leave the data");
  ExpectRefused(one, 9, "end at byte 8 of the data's 9");
  ExpectRefused(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[1,9]}})", 9, "leave a hole");
  ExpectRefused(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", 8, "leave a hole");
  ExpectRefused(R"({"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}})", 8,
                "contradict 3 elements");
  ExpectRefused(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,9]}})", 9,
                "contradict 2 elements");
  ExpectRefused(std::string("{\"a\":") + kEntry + ",\"b\":" + kEntry + "}", 8,
                "leave a hole, overlap");
  ExpectRefused(R"({"a":{"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0]}})", 0,
                "2^63 - 1");
  ExpectRefused(R"({"a":{"dtype":"F64","shape":[2305843009213693952],"data_offsets":[0,0]}})", 0,
                "contradict");
}

TEST(SafetensorsTest, DepthIsBounded) {
  ExpectRefused("{\"a\":" + std::string(100'000, '{'), 0, "not valid JSON");
  ExpectRefused("{\"a\":" + std::string(100'000, '['), 0, "an array where none");
}

}  // namespace
}  // namespace holdfast
