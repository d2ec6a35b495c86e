// Fixtures of every released format version are read by every later one. The expected values are
// written by hand.
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>

#include "base/status.h"
#include "tests/tiers/image/sample_image.h"
#include "tiers/image/kept.h"
#include "tiers/image/safetensors.h"

namespace holdfast {
namespace {

std::string ReadFixture(const std::string& name, const std::string& version = "v1") {
  std::ifstream in(std::string(HOLDFAST_SOURCE_DIR) + "/tests/fixtures/" + version + "/" + name,
                   std::ios::binary);
  EXPECT_TRUE(in.good()) << name;
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

struct Fixture {
  std::string image;
  std::string record_file;
  ShardRecord record;
  Layout layout;
};

void Read(const std::string& stem, Fixture& fixture) {
  fixture.image = ReadFixture(stem + ".safetensors");
  fixture.record_file = ReadFixture(stem + ".record");
  const auto record = DecodeRecord(fixture.record_file);
  ASSERT_TRUE(record.ok()) << ToString(record.status());
  fixture.record = *record;
  const auto layout = DecodeLayout(record->layout_bytes, record->header_bytes, record->image_bytes);
  ASSERT_TRUE(layout.ok()) << ToString(layout.status());
  fixture.layout = *layout;
}

// The image matches its digests, its header parses, and today's code would write the same bytes.
void ExpectIntact(const Fixture& fixture) {
  ASSERT_EQ(fixture.image.size(), fixture.record.image_bytes);
  const auto bad = VerifyImage(
      fixture.record, fixture.layout,
      [&](uint64_t offset, std::span<std::byte> out) {
        fixture.image.copy(reinterpret_cast<char*>(out.data()), out.size(), offset);
        return absl::OkStatus();
      },
      100, nullptr);
  ASSERT_TRUE(bad.ok()) << ToString(bad.status());
  EXPECT_TRUE(bad->empty());
  const auto header = ParseSafetensors(fixture.image, fixture.image.size());
  ASSERT_TRUE(header.ok()) << ToString(header.status());
  EXPECT_EQ(header->entries.size(), fixture.layout.slices.size());

  const auto plan = PlanImage(fixture.layout.slices, fixture.record.id.rank);
  ASSERT_TRUE(plan.ok()) << ToString(plan.status());
  EXPECT_EQ(plan->header, fixture.image.substr(0, fixture.record.header_bytes));
  EXPECT_EQ(plan->layout_bytes, fixture.record.layout_bytes);
  EXPECT_EQ(EncodeRecord(fixture.record), fixture.record_file);
}

TEST(ImageFixtureTest, ExampleOfVersion1) {
  Fixture fixture;
  ASSERT_NO_FATAL_FAILURE(Read("example", fixture));
  const ShardRecord& record = fixture.record;
  EXPECT_EQ(record.id.ToString(), "00112233-4455-4677-8899-aabbccddeeff attempt 1 step 7 rank 1");
  EXPECT_EQ(record.job_name, "demo");
  EXPECT_EQ(record.world_size, 2u);
  EXPECT_EQ(record.generation, 1u);
  EXPECT_EQ(record.header_bytes, 4096u);
  EXPECT_EQ(record.image_bytes, 4122u);
  EXPECT_EQ(record.sealed_unix_ms, 1'700'000'000'000);
  EXPECT_EQ(record.descent, (std::vector<Descent>{{1, {0, 0}}}));
  ASSERT_EQ(record.digests.size(), 3u);

  ASSERT_EQ(fixture.layout.slices.size(), 2u);
  Slice w = Part("w", DType::kF32, {4, 2}, {{2, 0}, {2, 2}});
  w.image_offset = 4096;
  w.bytes = 16;
  EXPECT_EQ(fixture.layout.slices[0], w);
  Slice progress = Json("progress", 10);
  progress.key = "json";
  progress.image_offset = 4112;
  progress.bytes = 10;
  EXPECT_EQ(fixture.layout.slices[1], progress);
  EXPECT_EQ(fixture.image.substr(4096, 16),
            std::string("\0\0\x80\x3f\0\0\0\x40\0\0\x40\x40\0\0\x80\x40", 16));
  EXPECT_EQ(fixture.image.substr(4112), "{\"step\":7}");
  ExpectIntact(fixture);
}

TEST(ImageFixtureTest, VariedOfVersion1) {
  Fixture fixture;
  ASSERT_NO_FATAL_FAILURE(Read("varied", fixture));
  EXPECT_EQ(fixture.record.id.ToString(),
            "00112233-4455-4677-8899-aabbccddeeff attempt 3 step 900 rank 1");
  EXPECT_EQ(fixture.record.world_size, 4u);
  EXPECT_EQ(fixture.record.generation, 5u);
  EXPECT_EQ(fixture.record.descent, (std::vector<Descent>{{3, {1, 40}}, {1, {0, 0}}}));

  struct Expected {
    std::string name;
    DType dtype;
    std::string key;
    uint64_t offset;  // in the data
    uint64_t bytes;
  };
  const std::vector<Expected> expected = {
      {"dtype C64", DType::kC64, "", 0, 16},
      {"dtype F64", DType::kF64, "", 16, 16},
      {"dtype I64", DType::kI64, "", 32, 16},
      {"dtype U64", DType::kU64, "", 48, 16},
      {"scalar", DType::kF64, "", 64, 8},
      {"dtype F32", DType::kF32, "", 72, 8},
      {"dtype I32", DType::kI32, "", 80, 8},
      {"dtype U32", DType::kU32, "", 88, 8},
      {"empty", DType::kF32, "", 96, 0},
      {"sharded", DType::kF32, "", 96, 32},
      {"sharded", DType::kF32, "box:6,1:1,3", 128, 12},
      {"bf16", DType::kBF16, "", 140, 30},
      {"dtype BF16", DType::kBF16, "", 170, 4},
      {"dtype F16", DType::kF16, "", 174, 4},
      {"dtype I16", DType::kI16, "", 178, 4},
      {"dtype U16", DType::kU16, "", 182, 4},
      {"flat", DType::kF16, "flat:37:21", 186, 42},
      {"dtype BOOL", DType::kBool, "", 228, 2},
      {"dtype F8_E4M3", DType::kF8E4M3, "", 230, 2},
      {"dtype F8_E5M2", DType::kF8E5M2, "", 232, 2},
      {"dtype F8_E8M0", DType::kF8E8M0, "", 234, 2},
      {"dtype I8", DType::kI8, "", 236, 2},
      {"dtype U8", DType::kU8, "", 238, 2},
      {"progress", DType::kU8, "json", 240, 11},
      {"quote\" back\\slash\nnew line \x01 \xc3\xbc", DType::kI8, "", 251, 3},
      {"rng", DType::kU8, "opaque:pickle.v4", 254, 9},
  };
  ASSERT_EQ(fixture.layout.slices.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    const Slice& slice = fixture.layout.slices[i];
    EXPECT_EQ(slice.name, expected[i].name);
    EXPECT_EQ(slice.dtype, expected[i].dtype) << slice.name;
    EXPECT_EQ(slice.key, expected[i].key) << slice.name;
    EXPECT_EQ(slice.image_offset, fixture.layout.header_bytes + expected[i].offset) << slice.name;
    EXPECT_EQ(slice.bytes, expected[i].bytes) << slice.name;
    for (uint64_t at = 0; at < slice.bytes; ++at) {
      ASSERT_EQ(fixture.image[slice.image_offset + at], static_cast<char>((i + 1) * 37 + at))
          << slice.name;
    }
  }
  EXPECT_EQ(fixture.layout.slices[9].place, (decltype(Slice::place)(BoxPlace{{2, 0}, {2, 4}})));
  EXPECT_EQ(fixture.layout.slices[10].place, (decltype(Slice::place)(BoxPlace{{6, 1}, {1, 3}})));
  EXPECT_EQ(fixture.layout.slices[16].place, (decltype(Slice::place)(FlatPlace{37, 21})));
  EXPECT_EQ(fixture.layout.slices[25].codec, "pickle.v4");
  EXPECT_EQ(fixture.layout.slices[8].global_shape, (std::vector<uint64_t>{0, 7}));
  EXPECT_TRUE(fixture.layout.slices[4].global_shape.empty());
  ExpectIntact(fixture);
}

// Two replicas that share their slices: what each file has, and each whole image.
TEST(ImageFixtureTest, SharedOfVersion2) {
  const std::string embedding("\0\0\x80\x3f\0\0\0\x40\0\0\x40\x40\0\0\x80\x40", 16);
  const std::string object[] = {"{\"step\":7}", "rng"};
  const std::string files[] = {ReadFixture("shared-0.safetensors", "v2"),
                               ReadFixture("shared-1.safetensors", "v2")};
  EXPECT_EQ(files[0].substr(4096), embedding + object[0] + "scale");
  EXPECT_EQ(files[1].substr(4096), "bbiiaa11223344" + object[1]);
  std::vector<RecordAndLayout> images;
  for (const Rank rank : {0, 1}) {
    const std::string record = ReadFixture("shared-" + std::to_string(rank) + ".record", "v2");
    const auto read = DecodeRecordAndLayout(record);
    ASSERT_TRUE(read.ok()) << ToString(read.status());
    EXPECT_EQ(read->record.id.ToString(),
              "00112233-4455-4677-8899-aabbccddeeff attempt 1 step 7 rank " + std::to_string(rank));
    EXPECT_EQ(FileBytes(read->record), files[rank].size());
    EXPECT_EQ(read->record.sealed_unix_ms, 1'700'000'000'000 + rank);
    ASSERT_TRUE(read->record.kept.has_value());
    EXPECT_EQ(read->record.kept->runs,
              rank == 0 ? (std::vector<uint64_t>{1, 2, 2}) : (std::vector<uint64_t>{0, 1, 3, 1}));
    EXPECT_EQ(read->record.kept->owners,
              rank == 0 ? (std::vector<Rank>{1, 1}) : (std::vector<Rank>{0, 0}));
    EXPECT_EQ(EncodeRecord(read->record), record);
    images.push_back(*read);
  }
  EXPECT_EQ(images[0].record.likeness, images[1].record.likeness);
  for (const Rank rank : {0, 1}) {
    const auto map = WholeMap(images[rank], {{&images[1 - rank], "the other"}});
    ASSERT_TRUE(map.ok()) << ToString(map.status());
    std::string whole;
    map->ForEach(0, map->image_bytes,
                 [&](uint64_t, uint64_t bytes, std::optional<uint32_t> source, uint64_t from) {
                   const std::string& of = !source        ? map->header
                                           : *source == 0 ? files[rank]
                                                          : files[1 - rank];
                   whole += of.substr(from, bytes);
                   return true;
                 });
    EXPECT_EQ(whole.substr(4096), embedding + "bbiiaa11223344" +
                                      (rank == 0 ? object[0] + "scale" : object[1] + "scale"));
    Fixture fixture{whole, "", images[rank].record, images[rank].layout};
    fixture.record.kept.reset();
    fixture.record_file = EncodeRecord(fixture.record);
    ExpectIntact(fixture);
  }
}

}  // namespace
}  // namespace holdfast
