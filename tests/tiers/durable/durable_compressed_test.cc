// Compressed images in the remote tier: named, listed, opened and removed as others are; damaged
// ones are told; the two forms of one image stand in nobody's way.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/tiers/durable/hostile_fixture.h"
#include "tiers/compressed/seek_table.h"
#include "tiers/durable/names.h"

namespace holdfast {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::SizeIs;

class CompressedCopyTest : public HostileTest {
 protected:
  CompressedCopyTest() : HostileTest(DurablePlace{.kind = DurableKind::kRemote}) {}

  PublishedCopy PublishCompressed(const SampleImage& sample) {
    const auto copy = PublishShard(store(), sample, 3);
    EXPECT_TRUE(copy.ok()) << ToString(copy.status());
    return copy.ok() ? *copy : PublishedCopy();
  }
  std::string CompressedOf(const SampleImage& sample) {
    return store().ImagePath(NameOf(sample), ImageForm::kCompressed);
  }
  bool IsThere(const std::string& path) { return env().Info(path).ok(); }
  DurableScan Scan() { return store().ScanAll().value(); }
  // A committed step of four ranks, of which every other one is compressed.
  Manifest Commit(Step step) {
    std::vector<SampleImage> samples;
    std::vector<PublishedCopy> copies;
    for (Rank rank = 0; rank < 4; ++rank) {
      samples.push_back(SampleShard(step, rank, 4));
      copies.push_back(rank % 2 == 0 ? PublishCompressed(samples.back()) : Publish(samples.back()));
    }
    Manifest manifest = ManifestOf(samples, copies);
    const absl::Status published = store().PublishManifest(manifest);
    EXPECT_TRUE(published.ok()) << ToString(published);
    return manifest;
  }
};

TEST_F(CompressedCopyTest, ItsNameSaysSo) {
  const SampleImage sample = SampleShard(900, 1, 4);
  const PublishedCopy copy = PublishCompressed(sample);
  EXPECT_THAT(copy.location, EndsWith("/900-a3/shard-00001-of-00004.safetensors.zst"));
  EXPECT_EQ(copy.image_bytes, sample.image.size());
  EXPECT_EQ(copy.stored_bytes, env().Info(copy.location)->bytes);
  EXPECT_TRUE(IsThere(RecordOf(sample)));
  EXPECT_FALSE(IsThere(ImageOf(sample)));
  const StepFile file =
      ParseStepFileName(DurableKind::kRemote, "shard-00001-of-00004.safetensors.zst");
  EXPECT_EQ(file.role, StepFileRole::kImage);
  EXPECT_EQ(file.form, ImageForm::kCompressed);
  EXPECT_EQ(file.rank, 1u);
  for (const char* none : {"shard-00001-of-00004.safetensors.zst.zst", "shard-00001-of-00004.zst",
                           "shard-1-of-4.safetensors.zst", "shard-00001-of-00004.record.zst"}) {
    EXPECT_EQ(ParseStepFileName(DurableKind::kRemote, none).role, StepFileRole::kUnknown) << none;
  }
  EXPECT_EQ(ParseStepFileName(DurableKind::kNvme, "1.safetensors.zst").role,
            StepFileRole::kUnknown);
}

TEST_F(CompressedCopyTest, ItIsReadAsIfItWereNot) {
  const SampleImage sample = SampleShard(900, 1, 4);
  PublishCompressed(sample);
  const absl::Status whole = CheckShard(store(), sample);
  EXPECT_TRUE(whole.ok()) << ToString(whole);
  const auto reading = store().OpenCopy(NameOf(sample), {.direct = true, .manifest = nullptr});
  ASSERT_TRUE(reading.ok()) << ToString(reading.status());
  EXPECT_TRUE((*reading)->compressed());
  EXPECT_FALSE((*reading)->direct());
  EXPECT_EQ((*reading)->image().Info()->bytes, sample.image.size());
  const auto image = store().OpenImage(NameOf(sample), sample.image.size());
  ASSERT_TRUE(image.ok()) << ToString(image.status());
  std::string part(20, '\0');
  ASSERT_TRUE((*image)->ReadAt(7, std::as_writable_bytes(std::span(part))).ok());
  EXPECT_EQ(part, sample.image.substr(7, 20));
  EXPECT_TRUE(absl::IsDataLoss(store().OpenImage(NameOf(sample), 1).status()));
  EXPECT_FALSE((*store().OpenCopy(NameOf(sample), {}))->record().kept.has_value());
}

TEST_F(CompressedCopyTest, AStepHasBothForms) {
  Commit(900);
  for (Rank rank = 0; rank < 4; ++rank) {
    const absl::Status read = CheckShard(store(), SampleShard(900, rank, 4));
    EXPECT_TRUE(read.ok()) << ToString(read);
  }
  const DurableScan scan = Scan();
  EXPECT_EQ(scan.unreadable_count, 0u);
  EXPECT_EQ(scan.unknown_count, 0u);
  ASSERT_THAT(scan.jobs, SizeIs(1));
  ASSERT_THAT(scan.jobs[0].checkpoints, SizeIs(1));
  const CheckpointScan& step = scan.jobs[0].checkpoints[0];
  EXPECT_TRUE(step.has_manifest);
  ASSERT_THAT(step.copies, SizeIs(4));
  for (const CopyEntry& copy : step.copies) {
    EXPECT_EQ(copy.form, copy.rank % 2 == 0 ? ImageForm::kCompressed : ImageForm::kPlain);
    EXPECT_EQ(copy.image_bytes, SampleShard(900, copy.rank, 4).image.size());
  }
  EXPECT_TRUE(store().HasCompressed(CheckpointOf(SampleShard(900, 0, 4))).value());
  Publish(SampleShard(901, 0, 4));
  EXPECT_FALSE(store().HasCompressed(CheckpointOf(SampleShard(901, 0, 4))).value());
}

TEST_F(CompressedCopyTest, BeforeTheCommitItsRecordTellsOfIt) {
  PublishCompressed(SampleShard(900, 1, 4));
  const DurableScan scan = Scan();
  EXPECT_EQ(scan.unreadable_count + scan.unknown_count, 0u);
  ASSERT_THAT(scan.jobs.at(0).checkpoints.at(0).copies, SizeIs(1));
  EXPECT_EQ(scan.jobs[0].checkpoints[0].copies[0].form, ImageForm::kCompressed);
}

TEST_F(CompressedCopyTest, RemovalTakesEitherForm) {
  const SampleImage sample = SampleShard(900, 1, 4);
  const PublishedCopy copy = PublishCompressed(sample);
  const auto removed = store().RemoveCopy(NameOf(sample));
  ASSERT_TRUE(removed.ok()) << ToString(removed.status());
  EXPECT_EQ(removed->copies, 1u);
  EXPECT_EQ(removed->bytes_freed, copy.stored_bytes);
  EXPECT_FALSE(IsThere(Path("demo/900-a3")));
  Commit(901);
  const auto step = store().RemoveCheckpoint(CheckpointOf(SampleShard(901, 0, 4)));
  ASSERT_TRUE(step.ok()) << ToString(step.status());
  EXPECT_EQ(step->copies, 4u);
  EXPECT_FALSE(IsThere(Path("demo/901-a3")));
  EXPECT_THAT(harness_.Leftovers(), SizeIs(0));
}

TEST_F(CompressedCopyTest, OneOfTheFormsIsEnough) {
  const SampleImage sample = SampleShard(900, 1, 4);
  PublishCompressed(sample);
  EXPECT_TRUE(absl::IsAlreadyExists(store().Begin(NewCopyOfShard(sample)).status()));
  EXPECT_TRUE(absl::IsAlreadyExists(store().Begin(NewCopyOfShard(sample), 3).status()));
  const SampleImage plain = SampleShard(900, 2, 4);
  Publish(plain);
  EXPECT_TRUE(absl::IsAlreadyExists(store().Begin(NewCopyOfShard(plain), 3).status()));
  // Likewise while another node is about to publish it: its record is still to come.
  for (const SampleImage& each : {sample, plain}) {
    ASSERT_TRUE(env().Unlink(RecordOf(each)).ok());
    EXPECT_TRUE(absl::IsAlreadyExists(store().Begin(NewCopyOfShard(each)).status()));
    EXPECT_TRUE(absl::IsAlreadyExists(store().Begin(NewCopyOfShard(each), 3).status()));
  }
}

// Two nodes that write one shard at the same time, each in its form: whoever is second takes away
// what is its own, and nothing else.
TEST_F(CompressedCopyTest, WhoComesSecondTakesAwayItsOwnForm) {
  for (const bool compressed_first : {true, false}) {
    const SampleImage sample = SampleShard(compressed_first ? 900 : 901, 1, 4);
    const std::optional<int> level = 3;
    auto first = store().Begin(NewCopyOfShard(sample), compressed_first ? level : std::nullopt);
    auto second = store().Begin(NewCopyOfShard(sample), compressed_first ? std::nullopt : level);
    ASSERT_TRUE(first.ok() && second.ok());
    ASSERT_TRUE(WriteShard(**first, sample).ok());
    ASSERT_TRUE(WriteShard(**second, sample).ok());
    ASSERT_TRUE((*first)->Publish(sample.record_file).ok());
    const absl::Status late = (*second)->Publish(sample.record_file).status();
    EXPECT_TRUE(absl::IsAlreadyExists(late)) << ToString(late);
    const absl::Status read = CheckShard(store(), sample);
    EXPECT_TRUE(read.ok()) << ToString(read);
    EXPECT_EQ(IsThere(ImageOf(sample)), !compressed_first);
    EXPECT_EQ(IsThere(CompressedOf(sample)), compressed_first);
  }
  EXPECT_THAT(harness_.Leftovers(), SizeIs(0));
}

TEST_F(CompressedCopyTest, BothFormsOfOneImageAreOneCopyAndGoTogether) {
  const SampleImage sample = SampleShard(900, 1, 4);
  PublishCompressed(sample);
  Write(ImageOf(sample), sample.image);
  EXPECT_TRUE(CheckShard(store(), sample).ok());
  const DurableScan scan = Scan();
  EXPECT_EQ(scan.unreadable_count + scan.unknown_count, 0u);
  ASSERT_THAT(scan.jobs.at(0).checkpoints.at(0).copies, SizeIs(1));
  EXPECT_EQ(scan.jobs[0].checkpoints[0].copies[0].form, ImageForm::kPlain) << "as it is read";
  EXPECT_EQ(store().RemoveCopy(NameOf(sample))->copies, 1u);
  EXPECT_FALSE(IsThere(Path("demo/900-a3")));
}

// Of two forms, which people or a crash have left, the one that fits is the copy.
TEST_F(CompressedCopyTest, APlainOneThatDoesNotFitStandsInNobodysWay) {
  Commit(900);
  const SampleImage sample = SampleShard(900, 2, 4);
  for (const std::string& bytes : {std::string(), sample.image.substr(1), sample.image + "x"}) {
    Write(ImageOf(sample), bytes);  // somebody unpacks it just now
    const absl::Status read = CheckShard(store(), sample);
    EXPECT_TRUE(read.ok()) << bytes.size() << ": " << ToString(read);
    const DurableScan scan = Scan();
    EXPECT_EQ(scan.unreadable_count, 0u) << bytes.size();
    ASSERT_THAT(scan.jobs.at(0).checkpoints.at(0).copies, SizeIs(4));
    EXPECT_EQ(scan.jobs[0].checkpoints[0].copies[2].form, ImageForm::kCompressed);
    const auto image = store().OpenImage(NameOf(sample), sample.image.size());
    EXPECT_TRUE(image.ok()) << ToString(image.status());
  }
}

// Another node has put its image there, in the other form, and has not published the record yet.
TEST_F(CompressedCopyTest, WhoFindsTheOtherFormTakesItsOwnBack) {
  for (const bool compressed : {true, false}) {
    const SampleImage sample = SampleShard(compressed ? 900 : 901, 1, 4);
    auto writing =
        store().Begin(NewCopyOfShard(sample), compressed ? std::optional(3) : std::nullopt);
    ASSERT_TRUE(writing.ok()) << ToString(writing.status());
    ASSERT_TRUE(WriteShard(**writing, sample).ok());
    const std::string others = compressed ? ImageOf(sample) : CompressedOf(sample);
    Write(others, "another's");
    const absl::Status published = (*writing)->Publish(sample.record_file).status();
    EXPECT_TRUE(absl::IsAlreadyExists(published)) << ToString(published);
    EXPECT_FALSE(IsThere(compressed ? CompressedOf(sample) : ImageOf(sample)));
    EXPECT_FALSE(IsThere(RecordOf(sample)));
    EXPECT_EQ(Read(others), "another's");
  }
}

TEST_F(CompressedCopyTest, DamagedOnesAreToldAndHarmNobody) {
  const SampleImage good = SampleShard(900, 0, 4);
  const SampleImage bad = SampleShard(900, 1, 4);
  PublishCompressed(good);
  PublishCompressed(bad);
  const std::string stored = Read(CompressedOf(bad));
  std::string flipped = stored;
  flipped[stored.size() - 1] = static_cast<char>(flipped.back() ^ 4);
  const std::pair<const char*, std::string> kinds[] = {
      {"cut", stored.substr(0, stored.size() - 1)},
      {"empty", ""},
      {"extended", stored + "x"},
      {"the image as it is, under this name", bad.image},
      {"of another image", Read(CompressedOf(good)).substr(0, stored.size())},
      {"its table's end flipped", flipped}};
  for (const auto& [what, bytes] : kinds) {
    Write(CompressedOf(bad), bytes);
    ExpectRefused(bad, absl::StatusCode::kDataLoss, what);
    const absl::Status read = CheckShard(store(), good);
    EXPECT_TRUE(read.ok()) << what << ": " << ToString(read);
  }
  ASSERT_TRUE(env().Unlink(CompressedOf(bad)).ok());
  ExpectRefused(bad, absl::StatusCode::kDataLoss, "gone");
}

TEST_F(CompressedCopyTest, DamageOfACommittedOneIsToldByAScan) {
  Commit(900);
  const SampleImage bad = SampleShard(900, 2, 4);
  const std::string stored = Read(CompressedOf(bad));
  Write(CompressedOf(bad), stored.substr(1));
  ExpectRefused(bad, absl::StatusCode::kDataLoss, "cut");
}

// What takes the place of a damaged one is not compressed, and is read from the moment that it is
// there.
TEST_F(CompressedCopyTest, AMendedOneIsAsItIs) {
  Commit(900);
  const SampleImage bad = SampleShard(900, 2, 4);
  for (const bool gone : {false, true}) {
    ASSERT_TRUE(gone ? env().Unlink(ImageOf(bad)).ok() : IsThere(CompressedOf(bad)));
    if (!gone) {
      const std::string stored = Read(CompressedOf(bad));
      Write(CompressedOf(bad), stored.substr(1));
    }
    ASSERT_TRUE(absl::IsDataLoss(Opens(bad)));
    auto writing = store().BeginReplacement(NewCopyOfShard(bad));
    ASSERT_TRUE(writing.ok()) << ToString(writing.status());
    ASSERT_TRUE(WriteShard(**writing, bad).ok());
    const auto mended = (*writing)->Publish(bad.record_file);
    ASSERT_TRUE(mended.ok()) << ToString(mended.status());
    EXPECT_EQ(mended->location, ImageOf(bad));
    EXPECT_EQ(mended->stored_bytes, bad.image.size());
    EXPECT_FALSE(IsThere(CompressedOf(bad)));
    const absl::Status read = CheckShard(store(), bad);
    EXPECT_TRUE(read.ok()) << ToString(read);
    EXPECT_EQ(Scan().unreadable_count + Scan().unknown_count, 0u);
  }
  EXPECT_THAT(harness_.Leftovers(), SizeIs(0));
}

// Nothing is there of it before all of it is.
TEST_F(CompressedCopyTest, WhatIsNotWholeIsNotPublished) {
  const SampleImage sample = SampleShard(900, 1, 4);
  auto writing = store().Begin(NewCopyOfShard(sample), 3);
  ASSERT_TRUE(writing.ok());
  const absl::Status published = (*writing)->Publish(sample.record_file).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(published)) << ToString(published);
  EXPECT_FALSE(IsThere(Path("demo/900-a3")));
  EXPECT_THAT(harness_.Leftovers(), SizeIs(0));
}

TEST_F(CompressedCopyTest, AManifestWantsOneOfTheForms) {
  std::vector<SampleImage> samples = {SampleShard(900, 0, 2), SampleShard(900, 1, 2)};
  const std::vector<PublishedCopy> copies = {PublishCompressed(samples[0]), Publish(samples[1])};
  ASSERT_TRUE(env().Unlink(CompressedOf(samples[0])).ok());
  std::vector<Rank> missing;
  const absl::Status status =
      store().PublishManifest(ManifestOf(samples, copies), nullptr, &missing);
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << ToString(status);
  EXPECT_EQ(missing, std::vector<Rank>{0});
}

TEST(CompressedNvme, ThereIsNoSuchThing) {
  DurableHarness harness(DurablePlace{.kind = DurableKind::kNvme});
  ASSERT_TRUE(harness.Start().ok());
  const absl::Status begun =
      harness.store().Begin(NewCopyOfShard(SampleShard(900, 1, 4)), 3).status();
  EXPECT_TRUE(absl::IsInvalidArgument(begun)) << ToString(begun);
  EXPECT_THAT(std::string(begun.message()), HasSubstr("only the remote tier"));
}

}  // namespace
}  // namespace holdfast
