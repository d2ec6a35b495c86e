#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <protozero/pbf_writer.hpp>

#include "base/status.h"
#include "tests/tiers/image/sample_image.h"
#include "tiers/image/layout.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;

ImagePlan VariedPlan() {
  return *PlanImage(VariedSlices(), 0);
}

void ExpectRefused(const Layout& layout, const std::string& why) {
  const auto decoded = DecodeLayout(EncodeLayout(layout), layout.header_bytes, layout.image_bytes);
  EXPECT_EQ(decoded.status().code(), absl::StatusCode::kInvalidArgument) << why;
  EXPECT_THAT(Message(decoded.status()), HasSubstr(why));
}

void ExpectBytesRefused(const std::string& bytes, const std::string& why) {
  const auto decoded = DecodeLayout(bytes, 4096, 8192);
  EXPECT_EQ(decoded.status().code(), absl::StatusCode::kInvalidArgument) << why;
  EXPECT_THAT(Message(decoded.status()), HasSubstr(why));
}

// Wraps a slice's fields into a layout of one.
std::string LayoutOf(const std::string& slice) {
  std::string bytes;
  protozero::pbf_writer(bytes).add_message(1, slice);
  return bytes;
}

TEST(LayoutCodecTest, RoundTrips) {
  const ImagePlan plan = VariedPlan();
  const auto decoded =
      DecodeLayout(plan.layout_bytes, plan.layout.header_bytes, plan.layout.image_bytes);
  ASSERT_TRUE(decoded.ok()) << ToString(decoded.status());
  EXPECT_EQ(*decoded, plan.layout);
  EXPECT_EQ(EncodeLayout(*decoded), plan.layout_bytes);
}

TEST(LayoutCodecTest, HashIsXxh3InCanonicalForm) {
  // XXH3-128 of nothing, as xxHash's own tests have it.
  EXPECT_EQ(ToHex(HashLayout("")), "99aa06d3014798d86001c324468d497f");
  EXPECT_EQ(VariedPlan().layout_hash, HashLayout(VariedPlan().layout_bytes));
  EXPECT_NE(HashLayout("a"), HashLayout("b"));
}

TEST(LayoutCodecTest, RefusesOtherOrderOffsetsOrLengths) {
  const Layout good = VariedPlan().layout;
  Layout layout = good;
  std::swap(layout.slices[0], layout.slices[1]);
  std::swap(layout.slices[0].image_offset, layout.slices[1].image_offset);
  layout.slices[1].image_offset = layout.slices[0].image_offset + layout.slices[0].bytes;
  ExpectRefused(layout, "out of order or there twice");
  layout = good;
  layout.slices[2].image_offset += 1;
  ExpectRefused(layout, "leave a gap, overlap");
  layout = good;
  layout.slices[0].image_offset = 0;
  ExpectRefused(layout, "leave a gap, overlap");
  layout = good;
  layout.slices[0].bytes += 1;
  ExpectRefused(layout, "contradicts its shape and dtype");
  layout = good;
  layout.image_bytes += 1;
  ExpectRefused(layout, "the slices end at");
  layout = good;
  layout.image_bytes -= 1;
  ExpectRefused(layout, "leave the image");
  layout = good;
  layout.slices.pop_back();
  ExpectRefused(layout, "the slices end at");
  layout = good;
  layout.slices.clear();
  ExpectRefused(layout, "it has no slices");
}

TEST(LayoutCodecTest, RefusesOtherKeys) {
  const Layout good = VariedPlan().layout;
  for (size_t i = 0; i < good.slices.size(); ++i) {
    Layout layout = good;
    layout.slices[i].key = layout.slices[i].key.empty() ? "json" : "";
    ExpectRefused(layout, "its key");
  }
}

TEST(LayoutCodecTest, AppliesTheRulesOfPlanImage) {
  const Layout good = VariedPlan().layout;
  Layout layout = good;
  layout.slices[0].name = "__metadata__";
  ExpectRefused(layout, "reserved");
  layout = good;
  layout.slices[0].name = "\xff";
  ExpectRefused(layout, "not valid UTF-8");
  layout = good;
  layout.slices.back().codec = "";
  layout.slices.back().kind = SliceKind::kOpaque;
  ExpectRefused(layout, "need a codec");
  // The same name under two element sizes is not a neighbour of itself.
  layout = *absl::StatusOr<Layout>(
      PlanImage({Whole("a", DType::kF64, {1}), Whole("b", DType::kF32, {1})}, 0)->layout);
  layout.slices[1].name = "a";
  ExpectRefused(layout, "different dtypes");
}

TEST(LayoutCodecTest, RefusesLengthsThatNoImageHas) {
  const ImagePlan plan = VariedPlan();
  const uint64_t header = plan.layout.header_bytes;
  const uint64_t image = plan.layout.image_bytes;
  for (const auto& [header_bytes, image_bytes] :
       std::vector<std::pair<uint64_t, uint64_t>>{{0, image},
                                                  {header + 1, image},
                                                  {header + 4096, image},
                                                  {header, header - 1},
                                                  {header, kImageBytesMax + 1},
                                                  {~uint64_t{0}, image},
                                                  {~uint64_t{4095}, ~uint64_t{0}},
                                                  {100'003'840, 200'000'000}}) {
    EXPECT_EQ(DecodeLayout(plan.layout_bytes, header_bytes, image_bytes).status().code(),
              absl::StatusCode::kInvalidArgument)
        << header_bytes << " " << image_bytes;
  }
}

TEST(LayoutCodecTest, RefusesMoreSlicesThanTheHeaderHolds) {
  std::string bytes;
  protozero::pbf_writer writer(bytes);
  const std::vector<uint64_t> empty_shape = {0};
  for (int i = 0; i < 65; ++i) {
    protozero::pbf_writer slice(writer, 1);
    slice.add_string(1, std::string(1, static_cast<char>('0' + i)));
    slice.add_uint64(2, 2);
    slice.add_packed_uint64(3, empty_shape.begin(), empty_shape.end());
    slice.add_uint64(6, 4096);
  }
  const auto decoded = DecodeLayout(bytes, 4096, 4096);
  EXPECT_THAT(Message(decoded.status()), HasSubstr("more slices than its header"));
}

TEST(LayoutCodecTest, RefusesMalformedFields) {
  ExpectBytesRefused("\x0a", "cut short");                          // no length
  ExpectBytesRefused(std::string("\x0a\x05\x0a", 3), "cut short");  // length beyond the end
  ExpectBytesRefused("\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "cut short");
  // A length of 2^32 + 1 is not taken for 1.
  ExpectBytesRefused("\x0a\x81\x80\x80\x80\x10x", "read Layout: field 1 is damaged");
  ExpectBytesRefused("\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", "field key is damaged");
  ExpectBytesRefused(std::string("\x00\x00", 2), "field key is damaged");  // number 0
  ExpectBytesRefused("\x0b\x0c", "cut short");                             // a group
  ExpectBytesRefused("\x08\x01", "wrong wire type");                       // slices as a number
  ExpectBytesRefused("\x8a\x80\x80\x80\x80\x01\x00", "field key is damaged");
}

TEST(LayoutCodecTest, RefusesFieldsTwiceAndOfTheWrongKind) {
  std::string slice;
  protozero::pbf_writer writer(slice);
  writer.add_string(1, "a");
  writer.add_string(1, "b");
  ExpectBytesRefused(LayoutOf(slice), "given twice");
  slice.clear();
  writer = protozero::pbf_writer(slice);
  writer.add_string(1, "a");
  writer.add_message(4, std::string());
  writer.add_message(5, std::string());
  ExpectBytesRefused(LayoutOf(slice), "both a box and a flat range");
  slice.clear();
  writer = protozero::pbf_writer(slice);
  writer.add_uint64(3, 5);  // not packed
  ExpectBytesRefused(LayoutOf(slice), "wrong wire type");
  slice.clear();
  writer = protozero::pbf_writer(slice);
  const std::vector<uint64_t> dimensions(kDimensionsMax + 1, 1);
  writer.add_packed_uint64(3, dimensions.begin(), dimensions.end());
  ExpectBytesRefused(LayoutOf(slice), "more than 32 numbers");
  slice.clear();
  writer = protozero::pbf_writer(slice);
  writer.add_uint64(2, 258);  // would be U8, cut to 8 bits
  ExpectBytesRefused(LayoutOf(slice), "above 255");
  slice.clear();
  writer = protozero::pbf_writer(slice);
  writer.add_bytes(3, "\x80", 1);
  ExpectBytesRefused(LayoutOf(slice), "a number in it is damaged");
}

TEST(LayoutCodecTest, SkipsFieldsOfLaterVersions) {
  const ImagePlan plan = VariedPlan();
  std::string bytes = plan.layout_bytes;
  protozero::pbf_writer writer(bytes);
  writer.add_string(77, "later");
  writer.add_fixed32(78, 5);
  writer.add_fixed64(79, 5);
  writer.add_uint64(80, 5);
  const auto decoded = DecodeLayout(bytes, plan.layout.header_bytes, plan.layout.image_bytes);
  ASSERT_TRUE(decoded.ok()) << ToString(decoded.status());
  EXPECT_EQ(*decoded, plan.layout);
}

TEST(LayoutCodecTest, EveryTruncationIsRefused) {
  const ImagePlan plan = VariedPlan();
  for (size_t bytes = 0; bytes < plan.layout_bytes.size(); ++bytes) {
    EXPECT_FALSE(DecodeLayout(plan.layout_bytes.substr(0, bytes), plan.layout.header_bytes,
                              plan.layout.image_bytes)
                     .ok())
        << bytes;
  }
}

}  // namespace
}  // namespace holdfast
