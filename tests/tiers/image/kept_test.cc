// Images that leave slices out: planned, described by their records, put together again; and
// records that say what cannot be.
#include "tiers/image/kept.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "base/digest.h"
#include "base/status.h"
#include "tests/tiers/image/sample_image.h"
#include "tiers/image/safetensors.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;

// A tensor of each kind of place, one without bytes, one of more than a block.
std::vector<Slice> Tensors() {
  return {Whole("a", DType::kF64, {3}),
          Whole("b", DType::kBF16, {3, 5}),
          Whole("big", DType::kF32, {300'000}),
          Whole("bytes", DType::kU8, {5}),
          Whole("empty", DType::kF32, {0, 7}),
          Part("box", DType::kF32, {8, 4}, {{2, 0}, {2, 4}}),
          Part("box", DType::kF32, {8, 4}, {{6, 1}, {1, 3}}),
          Range("flat", DType::kF16, {10, 10}, {37, 21})};
}

// The same bytes for a tensor, whatever its rank's objects are.
std::string BytesOf(const Slice& slice, Rank rank) {
  std::string bytes(slice.bytes, '\0');
  const uint64_t seed = Crc64(slice.name) + slice.place.index() * 7 + LocalShape(slice).size() +
                        (slice.kind == SliceKind::kTensor ? 0 : rank + 1);
  for (size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<char>((seed + i * (i >> 8 | 1)) >> (i % 7));
  }
  return bytes;
}

SampleImage Replica(Rank rank, std::vector<Slice> objects, const std::string& without = "") {
  ShardRecord identity = SampleRecord();
  identity.id.rank = rank;
  identity.generation = 0;
  std::vector<Slice> slices = Tensors();
  std::erase_if(slices, [&](const Slice& slice) { return slice.name == without; });
  slices.insert(slices.end(), objects.begin(), objects.end());
  const ImagePlan plan = *PlanImage(slices, rank);
  std::vector<std::string> data;
  for (const Slice& slice : plan.layout.slices) {
    data.push_back(BytesOf(slice, rank));
  }
  return MakeImageOf(std::move(slices), identity, data);
}

RecordAndLayout ImageOf(const SampleImage& sample) {
  return {sample.record, sample.layout};
}

// Reads through a map.
std::string Assemble(const ImageMap& map, const std::vector<std::string>& sources,
                     uint64_t offset = 0, uint64_t bytes = UINT64_MAX) {
  std::string out;
  map.ForEach(offset, std::min(bytes, map.image_bytes - offset),
              [&](uint64_t at, uint64_t n, std::optional<uint32_t> source, uint64_t from) {
                EXPECT_EQ(at, offset + out.size());
                out += source ? sources[*source].substr(from, n) : map.header.substr(from, n);
                return true;
              });
  return out;
}

constexpr LayoutHash kPlan = {1, 2, 3};

class KeptTest : public ::testing::Test {
 protected:
  // Rank 1 keeps every third tensor, rank 0 has the others; rank 0 has an object more, before and
  // behind the tensor of bytes.
  KeptTest() {
    for (size_t i = 0; i < Tensors().size(); ++i) {
      owners_.push_back(i % 3 == 0 ? 1 : 0);
    }
    part0_ = Make(rank0_);
    part1_ = Make(rank1_);
  }

  PartImage Make(const SampleImage& sample) {
    auto part = PlanPart(ImageOf(sample), owners_, kPlan);
    EXPECT_TRUE(part.ok()) << ToString(part.status());
    EXPECT_TRUE(part->has_value());
    return **std::move(part);
  }
  std::string FileOf(const SampleImage& sample, const PartImage& part) {
    return Assemble(part.from_whole, {sample.image});
  }
  // As a reader gets it.
  RecordAndLayout Decoded(const ShardRecord& record) {
    auto read = DecodeRecordAndLayout(EncodeRecord(record));
    EXPECT_TRUE(read.ok()) << ToString(read.status());
    return *std::move(read);
  }
  absl::StatusOr<ImageMap> Whole(const RecordAndLayout& image, const RecordAndLayout& owner) {
    return WholeMap(image, {{&owner, "/remote/owner"}});
  }
  void ExpectBadOwner(const std::function<void(RecordAndLayout&)>& change, const std::string& why) {
    RecordAndLayout owner = Decoded(part1_.record);
    change(owner);
    const auto whole = Whole(Decoded(part0_.record), owner);
    EXPECT_TRUE(absl::IsDataLoss(whole.status())) << ToString(whole.status());
    EXPECT_THAT(Message(whole.status()), HasSubstr(why));
    EXPECT_THAT(Message(whole.status()), HasSubstr("/remote/owner"));
  }
  void ExpectRefused(const std::function<void(KeptSlices&)>& change, const std::string& why) {
    ShardRecord record = part0_.record;
    change(*record.kept);
    const auto read = DecodeRecord(EncodeRecord(record));
    EXPECT_TRUE(absl::IsInvalidArgument(read.status())) << why << ToString(read.status());
    EXPECT_THAT(Message(read.status()), HasSubstr(why));
  }

  const SampleImage rank0_ = Replica(0, {Json("apple", 11), Opaque("rng", "c", 9)});
  const SampleImage rank1_ = Replica(1, {Json("progress", 300)});
  std::vector<Rank> owners_;
  PartImage part0_;
  PartImage part1_;
};

TEST_F(KeptTest, EachTensorLiesInOneFileAndWholeImagesComeBack) {
  const std::string file0 = FileOf(rank0_, part0_);
  const std::string file1 = FileOf(rank1_, part1_);
  ASSERT_EQ(file0.size(), FileBytes(part0_.record));
  ASSERT_EQ(file1.size(), FileBytes(part1_.record));
  const uint64_t tensors = 24 + 30 + 1'200'000 + 5 + 32 + 12 + 42;
  EXPECT_EQ(file0.size() + file1.size(), 4096 + 4096 + tensors + 20 + 300);
  // Each is a safetensors file of its own.
  size_t entries = 0;
  for (const std::string* file : {&file0, &file1}) {
    const auto parsed = ParseSafetensors(*file, file->size());
    ASSERT_TRUE(parsed.ok()) << ToString(parsed.status());
    entries += parsed->entries.size();
  }
  EXPECT_EQ(entries, Tensors().size() + 3 + 1);  // what has no bytes is in both
  const RecordAndLayout image0 = Decoded(part0_.record);
  const RecordAndLayout image1 = Decoded(part1_.record);
  EXPECT_EQ(OwnersOf(image0.record), std::vector<Rank>{1});
  const auto whole0 = Whole(image0, image1);
  const auto whole1 = Whole(image1, image0);
  ASSERT_TRUE(whole0.ok()) << ToString(whole0.status());
  ASSERT_TRUE(whole1.ok()) << ToString(whole1.status());
  EXPECT_TRUE(Assemble(*whole0, {file0, file1}) == rank0_.image);
  EXPECT_TRUE(Assemble(*whole1, {file1, file0}) == rank1_.image);
  // From any byte on, in any length.
  for (const uint64_t offset : {0ull, 1ull, 4095ull, 4096ull, 4119ull, 4120ull, 1'204'200ull}) {
    for (const uint64_t bytes : {0ull, 1ull, 50ull, 5000ull}) {
      EXPECT_TRUE(Assemble(*whole0, {file0, file1}, offset, bytes) ==
                  rank0_.image.substr(offset, bytes))
          << offset << " " << bytes;
    }
  }
}

TEST_F(KeptTest, TheFileAloneIsVerifiedByItsOwnView) {
  const std::string file = FileOf(rank0_, part0_);
  for (const RecordAndLayout& view : {part0_.file, FileImage(Decoded(part0_.record))}) {
    ASSERT_EQ(view.record.image_bytes, file.size());
    for (const size_t flip : {size_t{8}, file.size() - 1, file.size()}) {
      std::string bytes = file;
      if (flip < bytes.size()) {
        bytes[flip] ^= 1;
      }
      const auto bad = VerifyImage(
          view.record, view.layout,
          [&](uint64_t offset, std::span<std::byte> out) {
            bytes.copy(reinterpret_cast<char*>(out.data()), out.size(), offset);
            return absl::OkStatus();
          },
          10, nullptr);
      ASSERT_TRUE(bad.ok()) << ToString(bad.status());
      EXPECT_EQ(bad->size(), flip < file.size() ? 1u : 0u) << flip;
    }
  }
}

TEST_F(KeptTest, AnOwnerMayHaveItsWholeImage) {
  const RecordAndLayout image0 = Decoded(part0_.record);
  const auto whole = Whole(image0, Decoded(rank1_.record));
  ASSERT_TRUE(whole.ok()) << ToString(whole.status());
  EXPECT_TRUE(Assemble(*whole, {FileOf(rank0_, part0_), rank1_.image}) == rank0_.image);
}

TEST_F(KeptTest, WhatOwnsAllIsWholeAndWhatOwnsNothingIsAHeader) {
  std::vector<Rank> all(Tensors().size(), 0);
  const auto owner = PlanPart(ImageOf(rank0_), all, kPlan);
  ASSERT_TRUE(owner.ok());
  EXPECT_FALSE(owner->has_value());
  all.pop_back();
  const SampleImage bare = Replica(1, {}, "empty");
  const auto part = PlanPart(ImageOf(bare), all, kPlan);
  ASSERT_TRUE(part.ok() && part->has_value()) << ToString(part.status());
  const std::string file = FileOf(bare, **part);
  EXPECT_EQ(file.size(), kImageAlignment);
  EXPECT_EQ(file.substr(8, 77),
            R"({"__metadata__":{"DCP_SHARDING_INFO":"{}","DCP_VERSION":"1.0","format":"pt"}})");
  const SampleImage other = Replica(0, {}, "empty");
  const auto whole = Whole(Decoded((*part)->record), Decoded(other.record));
  ASSERT_TRUE(whole.ok()) << ToString(whole.status());
  EXPECT_TRUE(Assemble(*whole, {file, other.image}) == bare.image);
}

// Each owner costs a reader a file, so there is an end to them; what is left out then is the same
// whoever plans it.
TEST(KeptLimitTest, OfMoreOwnersThanAReaderTakesTheRestIsKept) {
  constexpr size_t kMore = 7;
  std::vector<Slice> slices;
  std::vector<Rank> owners;
  for (size_t i = 0; i < kOwnersMax + kMore; ++i) {
    slices.push_back(Whole(std::to_string(1'000'000 + i), DType::kU8, {1}));
    owners.push_back(static_cast<Rank>(i + 1));
  }
  slices.push_back(Whole("2", DType::kU8, {1}));  // of one that is an owner already
  owners.push_back(1);
  ShardRecord identity = SampleRecord();
  identity.id.rank = 0;
  identity.world_size = kOwnersMax + kMore + 1;
  const SampleImage sample = MakeSampleImage(slices, identity);
  const auto part = PlanPart(ImageOf(sample), owners, kPlan);
  ASSERT_TRUE(part.ok() && part->has_value()) << ToString(part.status());
  EXPECT_EQ((*part)->record.kept->runs, (std::vector<uint64_t>{0, kOwnersMax, kMore, 1}));
  EXPECT_EQ(OwnersOf((*part)->record).size(), kOwnersMax);
  RecordAndLayout image{(*part)->record, sample.layout};
  EXPECT_EQ(WholeImage::Of(image).status(), absl::OkStatus());
  // Of who did not keep to it the reader says what is wrong, and the copy is not called damaged.
  image.record.kept->owners.back() = kOwnersMax + 1;
  const absl::Status refused = WholeImage::Of(image).status();
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << ToString(refused);
  EXPECT_THAT(Message(refused), HasSubstr(std::to_string(kOwnersMax + 1)));
}

TEST_F(KeptTest, RecordsAreOfTheOldestVersionThatWillDo) {
  EXPECT_EQ(EncodeRecord(part0_.record)[8], 2);
  EXPECT_EQ(EncodeRecord(rank0_.record)[8], 1);
  EXPECT_EQ(Decoded(part0_.record).record, part0_.record);
  // The same body under the other version's number says something that no writer says.
  const auto body = [](const ShardRecord& record) {
    const std::string file = EncodeRecord(record);
    return file.substr(24, file.size() - 32);
  };
  for (const auto& [record, version] : {std::pair(part0_.record, 1u), {rank0_.record, 2u}}) {
    EXPECT_TRUE(
        absl::IsInvalidArgument(DecodeRecord(FrameRecordBody(body(record), version)).status()));
  }
}

TEST_F(KeptTest, RecordsThatContradictThemselvesAreRefused) {
  ExpectRefused([](KeptSlices& k) { k.image_bytes += 1; }, "its slices make");
  ExpectRefused([](KeptSlices& k) { k.header_bytes += 4096; }, "its slices make");
  ExpectRefused([](KeptSlices& k) { k.header_digests.push_back(0); }, "2 digests of the header");
  ExpectRefused([](KeptSlices& k) { k.runs.pop_back(); }, "its runs are of");
  ExpectRefused([](KeptSlices& k) { k.runs.back() += 1; }, "run ");
  ExpectRefused([](KeptSlices& k) { k.runs.back() = UINT64_MAX; }, "run ");
  ExpectRefused([](KeptSlices& k) { k.runs.insert(k.runs.begin() + 1, {0, 0}); }, "run 1 of 0");
  ExpectRefused([](KeptSlices& k) { k.owners.pop_back(); }, "with an owner");
  ExpectRefused([](KeptSlices& k) { k.owners.push_back(1); }, "with an owner");
  ExpectRefused([](KeptSlices& k) { k.owners[0] = 0; }, "rank 0 of 4 is to have");
  ExpectRefused([](KeptSlices& k) { k.owners[0] = 4; }, "rank 4 of 4 is to have");
  ExpectRefused([](KeptSlices& k) { k.owners[0] = kWorldSizeMax; }, "there is no such rank");
  ExpectRefused(  // everything is kept
      [](KeptSlices& k) {
        k.runs = {Tensors().size() + 2};
        k.owners.clear();
      },
      "its runs are of");
  ExpectRefused(  // the first five in image order, the fifth has no bytes
      [](KeptSlices& k) {
        k.runs = {0, 5, 5};
        k.owners.assign(5, 1);
      },
      "'empty', which has no bytes");
  ExpectRefused(  // the objects, too, are left out
      [](KeptSlices& k) {
        k.runs = {0, Tensors().size() + 2};
        k.owners.assign(Tensors().size() + 2, 1);
      },
      "an object");
}

TEST_F(KeptTest, OwnersThatDoNotHaveItAreNamed) {
  ExpectBadOwner([](RecordAndLayout& r) { r.record.id.rank = 2; }, "rank 2");
  ExpectBadOwner([](RecordAndLayout& r) { r.record.id.step = 8; }, "step 8");
  ExpectBadOwner([](RecordAndLayout& r) { r.record.id.attempt = 1; }, "attempt 1");
  ExpectBadOwner([](RecordAndLayout& r) { r.record.world_size = 8; }, "of 8");
  ExpectBadOwner([](RecordAndLayout& r) { r.layout.slices[0].name = "c"; }, "another slice");
  ExpectBadOwner(
      [](RecordAndLayout& r) {
        r.layout.slices[0].global_shape = {3, 1};
      },
      "another slice");
  ExpectBadOwner([](RecordAndLayout& r) { ++r.record.digests[1]; }, "other digests");
  // One that leaves out what it should have: a circle.
  ExpectBadOwner(
      [this](RecordAndLayout& r) {
        std::vector<Rank> others(Tensors().size(), 0);
        r = Decoded((*PlanPart(ImageOf(rank1_), others, kPlan))->record);
      },
      "leaves it out, too");
  // One that has fewer tensors.
  ExpectBadOwner(
      [](RecordAndLayout& r) {
        ShardRecord identity = SampleRecord();
        identity.id.rank = 1;
        const SampleImage other = MakeSampleImage({Json("progress", 3)}, identity);
        r = {other.record, other.layout};
      },
      "fewer tensors");
}

TEST_F(KeptTest, LikenessIsOfTensorsAndTheirBytes) {
  const Likeness same = Decoded(rank0_.record).record.likeness;
  EXPECT_TRUE(same.any());
  EXPECT_EQ(Decoded(rank1_.record).record.likeness, same);  // other objects
  EXPECT_EQ(Decoded(part1_.record).record.likeness, same);
  SampleImage other = Replica(0, {});
  ++other.record.digests.back();  // of the last tensor
  const Likeness diverged = Decoded(other.record).record.likeness;
  EXPECT_EQ(diverged.tensors, same.tensors);
  EXPECT_NE(diverged.content, same.content);
  std::vector<Slice> fewer = Tensors();
  fewer.pop_back();
  EXPECT_NE(MakeSampleImage(fewer, SampleRecord()).layout, rank0_.layout);
  EXPECT_NE(Decoded(MakeSampleImage(fewer, SampleRecord()).record).record.likeness.tensors,
            same.tensors);
  // One without tensors is like all others without.
  const Likeness none =
      Decoded(MakeSampleImage({Json("o", 3)}, SampleRecord()).record).record.likeness;
  EXPECT_TRUE(none.any());
  EXPECT_EQ(Decoded(MakeSampleImage({Json("p", 4)}, SampleRecord()).record).record.likeness, none);
}

TEST_F(KeptTest, PlansAreRefusedForOtherSlices) {
  const std::vector<Rank> few(Tensors().size() - 1, 1);
  const std::vector<Rank> many(Tensors().size() + 1, 1);
  EXPECT_TRUE(absl::IsInvalidArgument(PlanPart(ImageOf(rank0_), few, kPlan).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(PlanPart(ImageOf(rank0_), many, kPlan).status()));
  const std::vector<Rank> nobody(Tensors().size(), 4);  // of a world of 4
  EXPECT_TRUE(absl::IsInvalidArgument(PlanPart(ImageOf(rank0_), nobody, kPlan).status()));
  EXPECT_NE(PlanHash(kPlan, std::vector<Rank>{0, 1}), PlanHash(kPlan, std::vector<Rank>{0, 2}));
  EXPECT_NE(PlanHash(kPlan, std::vector<Rank>{0}), PlanHash({}, std::vector<Rank>{0}));
}

}  // namespace
}  // namespace holdfast
