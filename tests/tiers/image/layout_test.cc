#include "tiers/image/layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <nlohmann/json.hpp>
#include <random>
#include <set>

#include "base/status.h"
#include "tests/tiers/image/sample_image.h"
#include "tiers/image/layout_rules.h"

namespace holdfast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

nlohmann::json HeaderJson(const ImagePlan& plan) {
  return nlohmann::json::parse(plan.header.substr(8));
}

std::vector<std::string> Names(const ImagePlan& plan) {
  std::vector<std::string> names;
  for (const Slice& slice : plan.layout.slices) {
    names.push_back(slice.name);
  }
  return names;
}

ImagePlan Plan(std::vector<Slice> slices, Rank rank = 0) {
  absl::StatusOr<ImagePlan> plan = PlanImage(std::move(slices), rank);
  EXPECT_TRUE(plan.ok()) << ToString(plan.status());
  return plan.ok() ? *std::move(plan) : ImagePlan{};
}

void ExpectRefused(std::vector<Slice> slices, const std::string& why) {
  const auto plan = PlanImage(std::move(slices), 0);
  EXPECT_EQ(plan.status().code(), absl::StatusCode::kInvalidArgument) << why;
  EXPECT_THAT(Message(plan.status()), HasSubstr(why));
}

TEST(DTypeTest, NamesAndSizesAreSafetensors) {
  const std::vector<std::pair<std::string, uint32_t>> expected = {
      {"BOOL", 1}, {"U8", 1},      {"I8", 1},          {"F8_E4M3", 1},    {"F8_E5M2", 1},
      {"U16", 2},  {"I16", 2},     {"F16", 2},         {"BF16", 2},       {"U32", 4},
      {"I32", 4},  {"F32", 4},     {"U64", 8},         {"I64", 8},        {"F64", 8},
      {"C64", 8},  {"F8_E8M0", 1}, {"F8_E4M3FNUZ", 1}, {"F8_E5M2FNUZ", 1}};
  for (size_t i = 0; i < expected.size(); ++i) {
    const auto dtype = static_cast<DType>(i + 1);
    EXPECT_EQ(DTypeName(dtype), expected[i].first);
    EXPECT_EQ(DTypeBytes(dtype), expected[i].second);
    ASSERT_TRUE(ParseDType(expected[i].first).ok());
    EXPECT_EQ(*ParseDType(expected[i].first), dtype);
  }
  EXPECT_EQ(DTypeName(static_cast<DType>(0)), "?");
  EXPECT_EQ(DTypeName(static_cast<DType>(20)), "?");
  EXPECT_EQ(DTypeBytes(static_cast<DType>(255)), 0u);
  EXPECT_FALSE(ParseDType("?").ok());
  EXPECT_FALSE(ParseDType("f32").ok());
}

TEST(PlanImageTest, OrdersByElementSizeThenNameBytewiseThenPlace) {
  const ImagePlan plan = Plan({
      Whole("b", DType::kU8, {1}),
      Whole("\xc3\xbc", DType::kF32, {1}),
      Part("p", DType::kF32, {4}, {{2}, {1}}),
      Part("p", DType::kF32, {4}, {{0}, {1}}),
      Range("p", DType::kF32, {4}, {0, 1}),
      Whole("p", DType::kF32, {4}),
      Whole("Z", DType::kF32, {1}),
      Whole("late", DType::kC64, {1}),
      Whole("half", DType::kBF16, {1}),
  });
  EXPECT_THAT(Names(plan), ElementsAre("late", "Z", "p", "p", "p", "p", "\xc3\xbc", "half", "b"));
  EXPECT_THAT(plan.from_input, ElementsAre(7, 6, 5, 3, 2, 4, 1, 8, 0));
}

TEST(PlanImageTest, LaysBytesOutContiguouslyAfterAnAlignedHeader) {
  const ImagePlan plan = Plan(VariedSlices(), 1);
  EXPECT_EQ(plan.layout.header_bytes % kImageAlignment, 0u);
  EXPECT_EQ(plan.header.size(), plan.layout.header_bytes);
  uint64_t offset = plan.layout.header_bytes;
  const nlohmann::json json = HeaderJson(plan);
  for (const Slice& slice : plan.layout.slices) {
    EXPECT_EQ(slice.image_offset, offset);
    EXPECT_EQ(slice.image_offset % DTypeBytes(slice.dtype), 0u);
    const auto& entry = json.at(HeaderKey(slice, 1));
    EXPECT_EQ(entry.at("dtype"), DTypeName(slice.dtype));
    EXPECT_EQ(entry.at("shape").get<std::vector<uint64_t>>(), LocalShape(slice));
    EXPECT_EQ(entry.at("data_offsets").at(0), offset - plan.layout.header_bytes);
    offset += slice.bytes;
    EXPECT_EQ(entry.at("data_offsets").at(1), offset - plan.layout.header_bytes);
  }
  EXPECT_EQ(offset, plan.layout.image_bytes);
  EXPECT_EQ(json.size(), plan.layout.slices.size() + 1);
}

TEST(PlanImageTest, HeaderIsItsLengthThenJsonThenSpaces) {
  const ImagePlan plan = Plan({Whole("w", DType::kF32, {2})});
  const std::string expected =
      "{\"__metadata__\":{\"DCP_SHARDING_INFO\":\"{\\\"w\\\":{\\\"saved_offsets\\\":[0]}}\","
      "\"DCP_VERSION\":\"1.0\",\"format\":\"pt\"},"
      "\"w\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}";
  ASSERT_EQ(plan.header.size(), 4096u);
  EXPECT_EQ(plan.header.substr(0, 8), std::string("\xf8\x0f\0\0\0\0\0\0", 8));
  EXPECT_EQ(plan.header.substr(8, expected.size()), expected);
  EXPECT_EQ(plan.header.substr(8 + expected.size()), std::string(4096 - 8 - expected.size(), ' '));
}

TEST(PlanImageTest, AHeaderThatJustFitsGetsNoPaddingAndOneByteMoreGetsAPage) {
  int even = 0;
  for (const DType dtype :
       {DType::kU8, DType::kF32}) {  // "U8" and "F32": one of them leaves an even number
    const size_t bare = HeaderJson(Plan({Whole("w", dtype, {1})})).dump().size();
    if ((4096 - 8 - bare) % 2 != 0) {
      continue;
    }
    ++even;
    const std::string name =
        "w" + std::string((4096 - 8 - bare) / 2, 'x');  // it is in the header twice
    const ImagePlan fits = Plan({Whole(name, dtype, {1})});
    EXPECT_EQ(fits.header.size(), 4096u);
    EXPECT_EQ(fits.header.back(), '}');
    EXPECT_EQ(Plan({Whole(name + "x", dtype, {1})}).header.size(), 8192u);
  }
  EXPECT_EQ(even, 1);
}

TEST(PlanImageTest, ShardingInfoIsWhatPyTorchReads) {
  const ImagePlan plan = Plan(VariedSlices(), 1);
  const nlohmann::json json = HeaderJson(plan);
  const auto& metadata = json.at("__metadata__");
  EXPECT_EQ(metadata.at("format"), "pt");
  EXPECT_EQ(metadata.at("DCP_VERSION"), "1.0");
  const auto info = nlohmann::json::parse(metadata.at("DCP_SHARDING_INFO").get<std::string>());
  // The reader looks up every key but __metadata__, and zips its offsets with its shape.
  ASSERT_EQ(info.size(), json.size() - 1);
  for (const auto& [key, entry] : json.items()) {
    if (key != "__metadata__") {
      EXPECT_EQ(info.at(key).at("saved_offsets").size(), entry.at("shape").size()) << key;
    }
  }
  EXPECT_EQ(info.at("sharded").at("saved_offsets"), nlohmann::json::array({2, 0}));
  EXPECT_EQ(info.at("bf16").at("saved_offsets"), nlohmann::json::array({0, 0}));
  EXPECT_EQ(info.at("scalar").at("saved_offsets"), nlohmann::json::array());
  EXPECT_EQ(info.at("holdfast:0000001:flat:37:21:flat").at("saved_offsets"),
            nlohmann::json::array({0}));
}

TEST(PlanImageTest, KeysOfTheirOwnNameRankAndPlace) {
  const ImagePlan plan = Plan(VariedSlices(), 1);
  std::set<std::string> keys;
  for (const Slice& slice : plan.layout.slices) {
    keys.insert(HeaderKey(slice, 1));
  }
  EXPECT_THAT(keys,
              ElementsAre("bf16", "empty", "holdfast:0000001:box:6,1:1,3:sharded",
                          "holdfast:0000001:flat:37:21:flat", "holdfast:0000001:json:progress",
                          "holdfast:0000001:opaque:pickle.v4:rng",
                          "quote\" back\\slash\nnew line \x01 \xc3\xbc", "scalar", "sharded"));
}

TEST(PlanImageTest, RankShowsInTheHeaderOnly) {
  const ImagePlan a = Plan(VariedSlices(), 1);
  const ImagePlan b = Plan(VariedSlices(), kWorldSizeMax - 1);
  EXPECT_EQ(a.layout, b.layout);
  EXPECT_EQ(a.layout_hash, b.layout_hash);
  EXPECT_NE(a.header, b.header);
  const ImagePlan plain = Plan({Whole("w", DType::kF32, {2})}, 3);
  EXPECT_EQ(plain.header, Plan({Whole("w", DType::kF32, {2})}, 4).header);
}

TEST(PlanImageTest, TheCallersOrderDoesNotMatter) {
  std::vector<Slice> slices = VariedSlices();
  const ImagePlan expected = Plan(slices);
  std::mt19937 random(7);
  for (int round = 0; round < 20; ++round) {
    std::shuffle(slices.begin(), slices.end(), random);
    const ImagePlan plan = Plan(slices);
    EXPECT_EQ(plan.layout_bytes, expected.layout_bytes);
    EXPECT_EQ(plan.header, expected.header);
    for (size_t i = 0; i < slices.size(); ++i) {
      EXPECT_EQ(plan.layout.slices[i].name, slices[plan.from_input[i]].name);
      EXPECT_EQ(plan.layout.slices[i].place, slices[plan.from_input[i]].place);
    }
  }
}

TEST(PlanImageTest, EveryDTypeAndOddShapesAreValid) {
  std::vector<Slice> slices;
  for (int i = 1; i <= 19; ++i) {
    slices.push_back(Whole("t" + std::to_string(i), static_cast<DType>(i), {2, 3}));
  }
  slices.push_back(Whole("zero", DType::kF32, {4, 0, 2}));
  slices.push_back(Whole("scalar", DType::kF8E8M0, {}));
  slices.push_back(Part("no rows", DType::kF32, {4, 2}, {{4, 0}, {0, 2}}));
  slices.push_back(Part("scalar box", DType::kF32, {}, {{}, {}}));
  slices.push_back(Range("empty range", DType::kF32, {4}, {4, 0}));
  const ImagePlan plan = Plan(slices);
  EXPECT_EQ(plan.layout.image_bytes - plan.layout.header_bytes,
            6u * (8 * 1 + 4 * 2 + 3 * 4 + 4 * 8) + 1 + 4);
}

TEST(PlanImageTest, NamesMayBeAlmostAnything) {
  std::string controls;
  for (char c = 0; c < 0x20; ++c) {
    controls.push_back(c);
  }
  for (const std::string& name :
       {controls, std::string("\"\\\n\r\t\b\f\x7f"), std::string("\xe2\x80\xa8 \xf0\x9f\x92\xbe"),
        std::string(10'000, 'n'), std::string(kNameBytesMax, '"'), std::string("{}[],:"),
        std::string(" ")}) {
    const ImagePlan plan = Plan({Whole(name, DType::kF32, {2})});
    const nlohmann::json json = HeaderJson(plan);
    EXPECT_TRUE(json.contains(name));
    const auto info =
        nlohmann::json::parse(json["__metadata__"]["DCP_SHARDING_INFO"].get<std::string>());
    EXPECT_TRUE(info.contains(name));
  }
}

TEST(PlanImageTest, RefusesBadNames) {
  ExpectRefused({}, "the shard is empty");
  ExpectRefused({Whole("", DType::kF32, {1})}, "empty name");
  ExpectRefused({Whole("__metadata__", DType::kF32, {1})}, "reserved");
  ExpectRefused({Whole("holdfast:0000000:json:x", DType::kF32, {1})}, "reserved");
  ExpectRefused({Whole(std::string(kNameBytesMax + 1, 'n'), DType::kF32, {1})}, "16385 bytes");
  for (const char* bad : {"\xff", "a\xc3", "\xc0\x80", "\xe0\x80\x80", "\xed\xa0\x80",
                          "\xf4\x90\x80\x80", "\x80", "\xf0\x9f\x92", "\xf8\x88\x80\x80\x80"}) {
    ExpectRefused({Whole(bad, DType::kF32, {1})}, "not valid UTF-8");
  }
}

TEST(PlanImageTest, RefusesShapesAndPlacesThatContradict) {
  constexpr uint64_t kHuge = uint64_t{1} << 32;
  ExpectRefused({Whole("t", static_cast<DType>(0), {1})}, "unknown dtype number 0");
  ExpectRefused({Whole("t", static_cast<DType>(20), {1})}, "unknown dtype number 20");
  ExpectRefused({Whole("t", DType::kF32, std::vector<uint64_t>(33, 1))}, "33 dimensions");
  ExpectRefused({Whole("t", DType::kF32, {kHuge, kHuge})}, "more than 2^63 - 1 elements");
  ExpectRefused({Whole("t", DType::kF32, {kHuge, 0, kHuge})}, "more than 2^63 - 1 elements");
  ExpectRefused({Whole("t", DType::kF32, {kHuge * 1024 * 1024})}, "exceed the limit");
  ExpectRefused({Part("t", DType::kF32, {4, 4}, {{0}, {4}})}, "1 offsets and 1 lengths");
  ExpectRefused({Part("t", DType::kF32, {4, 4}, {{0, 0}, {4}})}, "2 offsets and 1 lengths");
  ExpectRefused({Part("t", DType::kF32, {4, 4}, {{1, 0}, {4, 4}})},
                "leaves the global shape [4, 4]");
  ExpectRefused({Part("t", DType::kF32, {4}, {{~uint64_t{0}}, {2}})}, "leaves the global shape");
  ExpectRefused({Part("t", DType::kF32, {4}, {{5}, {0}})}, "leaves the global shape");
  ExpectRefused({Range("t", DType::kF32, {4, 4}, {1, 16})}, "leaves the tensor's 16 elements");
  ExpectRefused({Range("t", DType::kF32, {4}, {~uint64_t{0}, 2})},
                "leaves the tensor's 4 elements");
}

TEST(PlanImageTest, RefusesSlicesOfOneNameThatContradict) {
  const Slice a = Part("t", DType::kF32, {4}, {{0}, {2}});
  ExpectRefused({a, a}, "given twice");
  ExpectRefused({a, Part("t", DType::kI32, {4}, {{2}, {2}})}, "different dtypes, F32 and I32");
  ExpectRefused({a, Part("t", DType::kF64, {4}, {{2}, {2}})}, "different dtypes, F64 and F32");
  ExpectRefused({a, Part("t", DType::kF32, {5}, {{2}, {2}})},
                "different global shapes, [4] and [5]");
  ExpectRefused({Json("o", 3), Json("o", 4)}, "different global shapes");
  ExpectRefused({Json("o", 3), Json("o", 3)}, "given twice");
  ExpectRefused({Json("o", 3), Opaque("o", "c", 3)}, "objects of different kinds");
  ExpectRefused({Json("o", 3), Whole("o", DType::kU8, {3})}, "to a tensor and to an object");
  EXPECT_TRUE(PlanImage({a, Part("t", DType::kF32, {4}, {{1}, {2}})}, 0).ok())
      << "overlapping is allowed here";
}

TEST(PlanImageTest, RefusesObjectsThatAreNotWholeBytes) {
  Slice slice = Json("o", 4);
  slice.dtype = DType::kI8;
  ExpectRefused({slice}, "of dtype U8");
  slice = Json("o", 4);
  slice.place = FlatPlace{0, 4};
  ExpectRefused({slice}, "are whole");
  slice = Opaque("o", "", 4);
  ExpectRefused({slice}, "need a codec");
  slice.codec = "a:b";
  ExpectRefused({slice}, "need a codec");
  slice.codec = std::string(65, 'c');
  ExpectRefused({slice}, "need a codec");
  slice = Whole("t", DType::kU8, {1});
  slice.codec = "c";
  ExpectRefused({slice}, "only opaque bytes have a codec");
  slice = Whole("t", DType::kU8, {1});
  slice.kind = static_cast<SliceKind>(3);
  ExpectRefused({slice}, "unknown kind 3");
}

TEST(PlanImageTest, RefusesAnImageOrHeaderOverItsLimit) {
  ExpectRefused(
      {Whole("a", DType::kU8, {kImageBytesMax / 2}), Whole("b", DType::kU8, {kImageBytesMax / 2})},
      "exceed the limit");
  // 7,000 names of 16 KiB are 229 MB of header; the names themselves are cheap.
  std::vector<Slice> slices;
  for (int i = 0; i < 7'000; ++i) {
    slices.push_back(
        Whole(std::to_string(10'000 + i) + std::string(kNameBytesMax - 5, 'n'), DType::kU8, {1}));
  }
  ExpectRefused(std::move(slices), "safetensors' limit of 100000000 bytes");
  EXPECT_EQ(PlanImage({Whole("t", DType::kU8, {1})}, kWorldSizeMax).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(PlanImageTest, AHundredThousandTensors) {
  std::vector<Slice> slices;
  for (int i = 0; i < 100'000; ++i) {
    slices.push_back(Part("model.layers." + std::to_string(i) + ".self_attn.q_proj.weight",
                          i % 2 == 0 ? DType::kBF16 : DType::kF32, {64, 64},
                          {{static_cast<uint64_t>(i % 64), 0}, {1, 64}}));
  }
  const auto start = std::chrono::steady_clock::now();
  const ImagePlan plan = Plan(std::move(slices));
  const auto took = std::chrono::steady_clock::now() - start;
  RecordProperty("plan_ms", std::chrono::duration_cast<std::chrono::milliseconds>(took).count());
  EXPECT_EQ(plan.layout.slices.size(), 100'000u);
  EXPECT_TRUE(
      DecodeLayout(plan.layout_bytes, plan.layout.header_bytes, plan.layout.image_bytes).ok());
}

TEST(QuoteNameTest, EscapesAndCutsAtACharacter) {
  EXPECT_EQ(image_internal::QuoteName("a\n\"b"), "'a\\n\\\"b'");
  EXPECT_EQ(image_internal::QuoteName("\xff"), "'\\xff'");
  std::string name;
  for (int i = 0; i < 60; ++i) {
    name += "\xe2\x82\xac";
  }
  const std::string quoted = image_internal::QuoteName(name);
  EXPECT_TRUE(image_internal::IsValidUtf8(quoted));
  EXPECT_THAT(quoted, HasSubstr("…'"));
}

}  // namespace
}  // namespace holdfast
