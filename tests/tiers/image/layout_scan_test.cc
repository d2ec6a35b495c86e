#include "tiers/image/layout_scan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <protozero/pbf_writer.hpp>

#include "base/status.h"
#include "tests/tiers/image/sample_image.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;

Slice Named(std::string name) {
  Slice slice;
  slice.name = std::move(name);
  slice.dtype = DType::kF32;
  slice.global_shape = {4, 4};
  return slice;
}

std::string Encoded(std::vector<Slice> slices) {
  const auto plan = PlanImage(std::move(slices), 0);
  EXPECT_TRUE(plan.ok()) << ToString(plan.status());
  return plan->layout_bytes;
}

absl::Status Scan(std::string_view bytes) {
  return ScanLayout(
      bytes, [](const ScannedSlice& scanned) { return DecodeSlice(scanned.bytes).status(); });
}

TEST(LayoutScanTest, FindsEachSliceUnderItsNumber) {
  const ImagePlan plan = *PlanImage(VariedSlices(), 0);
  uint32_t next = 0;
  const absl::Status scanned = ScanLayout(plan.layout_bytes, [&](const ScannedSlice& slice) {
    EXPECT_EQ(slice.number, next);
    EXPECT_EQ(slice.name, plan.layout.slices[next].name);
    EXPECT_EQ(slice.name_hash, NameHash(slice.name));
    EXPECT_EQ(*DecodeSlice(slice.bytes), plan.layout.slices[next]);
    ++next;
    return absl::OkStatus();
  });
  EXPECT_TRUE(scanned.ok()) << ToString(scanned);
  EXPECT_EQ(next, plan.layout.slices.size());
}

TEST(LayoutScanTest, NamesOfAnyLengthAreFound) {
  std::vector<Slice> slices;
  for (const size_t length : {1, 100, 126, 127, 128, 129, 200, 16'000}) {
    slices.push_back(Named(std::string(length, 'n')));
  }
  size_t found = 0;
  const absl::Status scanned = ScanLayout(Encoded(slices), [&](const ScannedSlice& slice) {
    EXPECT_EQ(slice.name, slices[found++].name);
    return absl::OkStatus();
  });
  EXPECT_TRUE(scanned.ok());
  EXPECT_EQ(found, slices.size());
}

TEST(LayoutScanTest, FieldsOfLaterVersionsAndInOtherOrdersAreRead) {
  std::string slice;
  protozero::pbf_writer fields(slice);
  fields.add_uint64(99, 7);
  fields.add_uint64(7, 64);
  fields.add_uint64(2, static_cast<uint64_t>(DType::kF32));
  const std::vector<uint64_t> shape{4, 4};
  fields.add_packed_uint64(3, shape.begin(), shape.end());
  fields.add_string(1, "w");
  std::string layout;
  protozero::pbf_writer writer(layout);
  writer.add_uint64(77, 1);
  writer.add_message(1, slice);
  uint32_t found = 0;
  const absl::Status scanned = ScanLayout(layout, [&](const ScannedSlice& each) {
    EXPECT_EQ(each.name, "w");
    EXPECT_EQ(PartBytes(each.bytes), "");
    EXPECT_EQ(DecodeSlice(each.bytes)->bytes, 64u);
    ++found;
    return absl::OkStatus();
  });
  EXPECT_TRUE(scanned.ok()) << ToString(scanned);
  EXPECT_EQ(found, 1u);
}

TEST(LayoutScanTest, PartsAreToldApartByNameShapeTypeAndPlaceAlone) {
  const auto part_of = [](const std::string& layout, std::string_view name) {
    std::string part;
    const absl::Status scanned = ScanLayout(layout, [&](const ScannedSlice& slice) {
      part = slice.name == name ? PartBytes(slice.bytes) : part;
      return absl::OkStatus();
    });
    EXPECT_TRUE(scanned.ok());
    EXPECT_NE(part, "");
    return part;
  };
  const std::string alone = part_of(Encoded({Named("w")}), "w");
  EXPECT_EQ(part_of(Encoded({Named("a"), Named("w")}), "w"), alone);  // at another offset
  Slice other = Named("w");
  other.place = FlatPlace{0, 16};
  EXPECT_NE(part_of(Encoded({other}), "w"), alone);
  other = Named("w");
  other.dtype = DType::kI32;
  EXPECT_NE(part_of(Encoded({other}), "w"), alone);
  other = Named("w");
  other.global_shape = {16};
  EXPECT_NE(part_of(Encoded({other}), "w"), alone);
}

TEST(LayoutScanTest, CutAnywhereItFailsOrIsShorter) {
  const std::string whole = Encoded({Named("a"), Named("b"), Named(std::string(300, 'c'))});
  for (size_t length = 0; length < whole.size(); ++length) {
    uint32_t slices = 0;
    const absl::Status scanned =
        ScanLayout(whole.substr(0, length), [&](const ScannedSlice& slice) {
          ++slices;
          return DecodeSlice(slice.bytes).status();
        });
    EXPECT_TRUE(!scanned.ok() || slices < 3) << length;
  }
}

TEST(LayoutScanTest, EachByteChangedIsReadOrRefused) {
  const std::string whole = Encoded({Named("a"), Named(std::string(200, 'b'))});
  for (size_t i = 0; i < whole.size(); ++i) {
    for (const int flip : {0x01, 0x80, 0xFF}) {
      std::string changed = whole;
      changed[i] = static_cast<char>(changed[i] ^ flip);
      const absl::Status scanned = Scan(changed);
      EXPECT_TRUE(scanned.ok() || scanned.code() == absl::StatusCode::kInvalidArgument);
    }
  }
}

TEST(LayoutScanTest, WhatTheCallerFailsWithEndsIt) {
  uint32_t asked = 0;
  const absl::Status scanned =
      ScanLayout(Encoded({Named("a"), Named("b")}), [&](const ScannedSlice&) {
        ++asked;
        return absl::ResourceExhaustedError("enough");
      });
  EXPECT_THAT(Message(scanned), HasSubstr("enough"));
  EXPECT_EQ(asked, 1u);
}

}  // namespace
}  // namespace holdfast
