// Replicas in the remote tier: each of their tensors is written once, and read again by all, from
// whichever file has it.
#include <signal.h>
#include <sys/wait.h>

#include <map>
#include <numeric>
#include <random>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/peers/pull_client.h"
#include "server/runtime/remote_parts.h"
#include "server/runtime/tiers/training_cores.h"
#include "tests/server/runtime/durable_tiers_fixture.h"
#include "tiers/compressed/seek_table.h"
#include "tiers/image/kept.h"
#include "tiers/image/safetensors.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;
using ::testing::SizeIs;

constexpr Step kStep = 7;
constexpr uint32_t kWorld = 3;

class SharedTiersTest : public DurableTiersTest {
 protected:
  // Ranks 0 and 1 are replicas but for their objects; rank 2 has other bytes.
  void SetUp() override {
    DurableTiersTest::SetUp();
    for (Rank rank = 0; rank < kWorld; ++rank) {
      contents_.push_back(Content(rank));
      ASSERT_EQ(SealSlot(*slots_, SlotOf(rank), contents_.back(), 2 * kSlot), absl::OkStatus());
    }
  }

  static SlotId SlotOf(Rank rank) { return rank + 1; }

  static SlotContent Content(Rank rank) {
    ShardRecord identity = SampleRecord();
    identity.id.step = kStep;
    identity.id.rank = rank;
    identity.world_size = kWorld;
    identity.generation = 1;
    std::vector<Slice> slices = {Whole("big", DType::kF32, {300'000}),
                                 Whole("bytes", DType::kU8, {100}),
                                 Json("apple", rank == 0 ? 5000 : 20)};
    for (int i = 0; i < 20; ++i) {
      slices.push_back(
          Whole(absl::StrCat("layer.", i), DType::kBF16, {static_cast<uint64_t>(100 + 37 * i)}));
    }
    if (rank == 1) {
      slices.push_back(Opaque("rng", "raw", 33));
    }
    const ImagePlan plan = *PlanImage(slices, rank);
    std::vector<std::string> data;
    for (const Slice& slice : plan.layout.slices) {
      const bool tensor = slice.kind == SliceKind::kTensor;
      std::string& bytes = data.emplace_back(slice.bytes, '\0');
      for (size_t at = 0; at < bytes.size(); ++at) {
        bytes[at] = static_cast<char>(slice.name.back() * 31 + at * 7 + (at >> 8) +
                                      (rank == 2 || !tensor ? rank + 1 : 0));
      }
    }
    SlotContent content;
    content.sample = MakeImageOf(std::move(slices), identity, data);
    content.record_offset = (content.sample.image.size() + 4095) / 4096 * 4096;
    const ShardRecord& record = content.sample.record;
    content.expected = {record.id, record.job_name, record.world_size, record.generation,
                        record.descent};
    return content;
  }

  std::shared_ptr<const Replicas::Group> GroupOf(std::vector<Rank> ranks) const {
    const SampleImage& sample = contents_[ranks.front()].sample;
    return std::make_shared<const Replicas::Group>(
        Replicas::Group{LikenessOf(sample.record, sample.layout).content, std::move(ranks)});
  }

  FlushShard ToRemote(Rank rank, TierKind from, bool shared = true) {
    const ShardRecord& record = contents_[rank].sample.record;
    FlushShard flush;
    flush.drain = ++drain_;
    flush.to = TierKind::kRemote;
    flush.key = {record.id, record.job_name, record.world_size};
    flush.uid = ::geteuid();
    flush.gid = ::getegid();
    flush.image_bytes = record.image_bytes;
    flush.from = from;
    flush.slot = SlotOf(rank);
    flush.generation = 1;
    flush.opening = 7;
    flush.replicas = shared && rank < 2 ? GroupOf({0, 1}) : nullptr;
    flush.zstd_level = zstd_levels_[rank];
    return flush;
  }
  DurableCopy Written(Rank rank, TierKind from = TierKind::kMemory, bool shared = true) {
    const FlushEnded ended = Do(ToRemote(rank, from, shared));
    EXPECT_EQ(ended.status, absl::OkStatus());
    return ended.copy;
  }
  absl::Status Commit(const std::vector<DurableCopy>& copies) {
    const FlushShard first = ToRemote(0, TierKind::kMemory);
    PublishManifest publish;
    publish.drain = ++drain_;
    publish.job = first.key.id.job;
    publish.job_name = first.key.job_name;
    publish.uid = first.uid;
    publish.gid = first.gid;
    publish.checkpoint = first.key.id.checkpoint();
    publish.world_size = kWorld;
    publish.opening = 7;
    publish.descent = contents_[0].sample.record.descent;
    publish.shards = copies;
    tiers_->Perform(publish);
    return Await<ManifestPublished>().status;
  }
  void WriteAll() {
    copies_ = {Written(0), Written(1), Written(2)};
    ASSERT_EQ(Commit(copies_), absl::OkStatus());
  }

  // Into a slot of its own; its bytes.
  FetchEnded Fetch(Rank rank, std::string& bytes, std::vector<RemoteReader> readers = {}) {
    const ShardRecord& record = contents_[rank].sample.record;
    FetchShard fetch;
    fetch.drain = ++drain_;
    fetch.from = TierKind::kRemote;
    fetch.key = {record.id, record.job_name, record.world_size};
    fetch.slot = static_cast<SlotId>(100 + fetch.drain);
    fetch.generation = 1;
    fetch.slot_bytes = 2 * kSlot;
    fetch.readers = std::move(readers);
    EXPECT_EQ(slots_->RemoveRecord(SlotOf(rank)), absl::OkStatus());
    EXPECT_EQ(slots_->Create(fetch.slot, fetch.slot_bytes), absl::OkStatus());
    EXPECT_EQ(slots_->WriteNote(fetch.slot, NoteOf(1, fetch.slot_bytes)), absl::OkStatus());
    tiers_->Perform(fetch);
    const auto ended =
        Await<FetchEnded>([&](const FetchEnded& e) { return e.drain == fetch.drain; });
    bytes.resize(record.image_bytes);
    EXPECT_EQ(slots_->ReadAt(fetch.slot, 0, std::as_writable_bytes(std::span(bytes))),
              absl::OkStatus());
    EXPECT_EQ(slots_->RemoveRecord(fetch.slot).ok(), ended.status.ok());
    EXPECT_EQ(PublishSlot(*slots_, SlotOf(rank), contents_[rank]).status(), absl::OkStatus());
    return ended;
  }
  std::string VerifiedCopy(Rank rank) {
    return Verified(ToRemote(rank, TierKind::kMemory), {0, {}, false, copies_[rank]});
  }
  void Flip(Rank rank, uint64_t from_end) {
    const std::string& path = copies_[rank].location;
    const auto bytes = std::filesystem::file_size(path);
    EXPECT_EQ(FlipBitOf(*Env::System(), path, bytes - from_end), absl::OkStatus());
  }

  std::vector<SlotContent> contents_;
  std::vector<DurableCopy> copies_;
  std::map<Rank, uint32_t> zstd_levels_;  // 0: as they are
  DrainId drain_ = 0;
};

TEST_F(SharedTiersTest, EachTensorIsWrittenOnce) {
  WriteAll();
  // 1. Lengths: the tensors of two replicas once, those of the third as they are.
  uint64_t tensors = 0;
  std::map<Rank, uint64_t> objects;
  for (Rank rank = 0; rank < 2; ++rank) {
    for (const Slice& slice : contents_[rank].sample.layout.slices) {
      (slice.kind != SliceKind::kTensor ? objects[rank] : tensors) +=
          slice.kind != SliceKind::kTensor || rank == 0 ? slice.bytes : 0;
    }
  }
  uint64_t files = 0;
  for (Rank rank = 0; rank < 2; ++rank) {
    const uint64_t bytes = std::filesystem::file_size(copies_[rank].location);
    EXPECT_EQ(copies_[rank].file_bytes, bytes);
    EXPECT_EQ(copies_[rank].copy.image_bytes, contents_[rank].sample.image.size());
    EXPECT_NE(copies_[rank].plan, LayoutHash{});
    files += bytes - 4096 - objects[rank];
  }
  EXPECT_EQ(files, tensors);
  EXPECT_EQ(copies_[0].plan, copies_[1].plan);
  EXPECT_EQ(copies_[2].file_bytes, 0u);
  EXPECT_EQ(std::filesystem::file_size(copies_[2].location), contents_[2].sample.image.size());
  EXPECT_EQ(Tier(TierKind::kRemote).bytes_shared(),
            contents_[0].sample.image.size() + contents_[1].sample.image.size() -
                copies_[0].file_bytes - copies_[1].file_bytes);
  // 2. Names: no tensor of rank 0's file is in rank 1's.
  std::map<std::string, int> keys;
  for (Rank rank = 0; rank < 2; ++rank) {
    std::ifstream in(copies_[rank].location, std::ios::binary);
    const std::string file{std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
    const auto parsed = ParseSafetensors(file, file.size());
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    for (const auto& entry : parsed->entries) {
      EXPECT_EQ(++keys[entry.key], 1) << entry.key;
    }
  }
  EXPECT_THAT(keys, SizeIs(22 + 3));
}

TEST_F(SharedTiersTest, AScanTellsWholeLengthsAndThoseOfTheFiles) {
  copies_ = {Written(0), Written(1), Written(2)};
  for (const bool committed : {false, true}) {
    if (committed) {
      ASSERT_EQ(Commit(copies_), absl::OkStatus());
    }
    tiers_->Perform(ScanRemote{++drain_, "demo"});
    const auto scanned = Await<TierScanned>();
    ASSERT_EQ(scanned.status, absl::OkStatus());
    EXPECT_THAT(scanned.problems, SizeIs(0));
    ASSERT_THAT(scanned.jobs, SizeIs(1));
    ASSERT_THAT(scanned.jobs[0].copies, SizeIs(kWorld));
    for (const DurableCopy& found : scanned.jobs[0].copies) {
      const Rank rank = found.copy.id.rank;
      EXPECT_EQ(found.copy.image_bytes, copies_[rank].copy.image_bytes);
      EXPECT_EQ(found.file_bytes, copies_[rank].file_bytes);
      EXPECT_EQ(found.record_crc, copies_[rank].record_crc);
      EXPECT_EQ(found.plan, committed ? LayoutHash{} : copies_[rank].plan);
      EXPECT_EQ(found.copy.likeness, copies_[rank].copy.likeness);
    }
  }
}

TEST_F(SharedTiersTest, EveryRankGetsItsOwnBytesBack) {
  WriteAll();
  for (Rank rank = 0; rank < kWorld; ++rank) {
    std::string bytes;
    const FetchEnded ended = Fetch(rank, bytes);
    ASSERT_EQ(ended.status, absl::OkStatus());
    EXPECT_TRUE(bytes == contents_[rank].sample.image) << rank;
    EXPECT_EQ(ended.copy.likeness, copies_[rank].copy.likeness);
    EXPECT_EQ(VerifiedCopy(rank), "");
  }
}

TEST_F(SharedTiersTest, FromADriveTheSameIsWritten) {
  FlushShard to_nvme = ToRemote(1, TierKind::kMemory);
  to_nvme.to = TierKind::kNvme;
  ASSERT_EQ(Do(to_nvme).status, absl::OkStatus());
  EXPECT_EQ(std::filesystem::file_size(dir_.Path("nvme/demo/7-a3/1.safetensors")),
            contents_[1].sample.image.size())
      << "what lies on a node's drive is whole";
  copies_ = {Written(0), Written(1, TierKind::kNvme), Written(2)};
  EXPECT_GT(copies_[1].file_bytes, 0u);
  ASSERT_EQ(Commit(copies_), absl::OkStatus());
  std::string bytes;
  ASSERT_EQ(Fetch(1, bytes).status, absl::OkStatus());
  EXPECT_TRUE(bytes == contents_[1].sample.image);
}

// Any mix of whole files and files of the one plan will do.
TEST_F(SharedTiersTest, WhatWasWrittenWholeServesThoseWhoLeaveItOut) {
  copies_ = {Written(0, TierKind::kMemory, false), Written(1), Written(2)};
  EXPECT_EQ(copies_[0].file_bytes, 0u);
  EXPECT_GT(copies_[1].file_bytes, 0u);
  ASSERT_EQ(Commit(copies_), absl::OkStatus());
  for (Rank rank = 0; rank < kWorld; ++rank) {
    std::string bytes;
    ASSERT_EQ(Fetch(rank, bytes).status, absl::OkStatus());
    EXPECT_TRUE(bytes == contents_[rank].sample.image) << rank;
  }
}

// It was published, and nobody heard so: what is there is taken as it is.
TEST_F(SharedTiersTest, ACopyThatIsThereIsAdoptedWhateverItLeavesOut) {
  const DurableCopy part = Written(1);
  const DurableCopy again = Written(1);
  EXPECT_EQ(again.file_bytes, part.file_bytes);
  EXPECT_EQ(again.plan, part.plan);
  EXPECT_EQ(again.record_crc, part.record_crc);
  const DurableCopy whole = Written(1, TierKind::kMemory, false);
  EXPECT_EQ(whole.file_bytes, part.file_bytes) << "it is not written anew";
  EXPECT_EQ(whole.plan, part.plan);
}

// The host may be mistaken, never to the cost of bytes.
TEST_F(SharedTiersTest, WhoHoldsOtherBytesWritesItsOwn) {
  FlushShard flush = ToRemote(2, TierKind::kMemory);
  flush.replicas = GroupOf({0, 1, 2});
  const FlushEnded ended = Do(flush);
  ASSERT_EQ(ended.status, absl::OkStatus());
  EXPECT_EQ(ended.copy.file_bytes, 0u);
  EXPECT_EQ(std::filesystem::file_size(ended.copy.location), contents_[2].sample.image.size());
}

TEST_F(SharedTiersTest, ABadByteInAnOwnersFileIsFoundByWhoNeedsItAndTheFileIsNamed) {
  WriteAll();
  // The last bytes are the tensor `bytes`, whoever has it; before it in rank 0's file its object.
  for (Rank owner = 0; owner < 2; ++owner) {
    const Rank other = 1 - owner;
    Flip(owner, 4096 + 8192);  // amid its tensors
    std::string bytes;
    const FetchEnded ended = Fetch(other, bytes);
    const bool has_big = copies_[owner].file_bytes > 1'000'000;
    if (has_big) {
      EXPECT_TRUE(absl::IsDataLoss(ended.status)) << ended.status;
      EXPECT_TRUE(ended.source_bad);
      EXPECT_THAT(Message(ended.status), HasSubstr(copies_[owner].location));
      EXPECT_NE(VerifiedCopy(owner), "");
      EXPECT_EQ(VerifiedCopy(other), "") << "its own file, and what the others' records say";
    }
    Flip(owner, 4096 + 8192);
    EXPECT_EQ(Fetch(other, bytes).status, absl::OkStatus());
  }
}

// A good one was put in its place while the bad one was read.
TEST_F(SharedTiersTest, AnOwnersFileThatIsMendedMeanwhileMakesNobodysBad) {
  WriteAll();
  const Rank owner = copies_[0].file_bytes > 1'000'000 ? 0 : 1;
  const std::string& path = copies_[owner].location;
  std::filesystem::copy_file(path, dir_.Path("good"));
  Flip(owner, 4096 + 8192);
  env_.Meddle(
      {.dir = path, .at_read = [&, first = std::make_shared<std::atomic<bool>>(true)](uint64_t) {
         if (first->exchange(false)) {
           std::filesystem::rename(dir_.Path("good"), path);
         }
       }});
  std::string bytes;
  const FetchEnded ended = Fetch(1 - owner, bytes);
  EXPECT_TRUE(absl::IsUnavailable(ended.status)) << ended.status;
  EXPECT_THAT(Message(ended.status), HasSubstr(path));
  EXPECT_FALSE(ended.source_bad);
  EXPECT_EQ(Fetch(1 - owner, bytes).status, absl::OkStatus());
}

TEST_F(SharedTiersTest, AnOwnersFileThatIsGoneIsNamed) {
  WriteAll();
  for (const std::string suffix : {".safetensors", ".record"}) {
    const std::string path = std::filesystem::path(copies_[0].location).replace_extension(suffix);
    std::filesystem::rename(path, path + "-away");
    std::string bytes;
    const FetchEnded ended = Fetch(1, bytes);
    EXPECT_TRUE(absl::IsDataLoss(ended.status) || absl::IsNotFound(ended.status)) << ended.status;
    EXPECT_TRUE(ended.source_bad);
    EXPECT_THAT(Message(ended.status), HasSubstr(path));
    EXPECT_THAT(Message(ended.status), HasSubstr("rank 0"));
    EXPECT_NE(VerifiedCopy(0), "");
    EXPECT_EQ(VerifiedCopy(1), "") << "its own file is as it should be";
    // Nor is it called bad where it is what another copy would be mended from.
    FlushShard to_drive = ToRemote(1, TierKind::kRemote);
    to_drive.to = TierKind::kNvme;
    to_drive.replace = true;
    const FlushEnded mended = Do(to_drive);
    EXPECT_FALSE(mended.status.ok());
    EXPECT_FALSE(mended.source_bad) << mended.status;
    std::filesystem::rename(path + "-away", path);
  }
  EXPECT_EQ(VerifiedCopy(1), "");
}

// A record from elsewhere, put where an owner's should be, is not the one that the manifest names.
TEST_F(SharedTiersTest, AnOwnersRecordThatWasReplacedIsNotBelieved) {
  WriteAll();
  const std::string path = std::filesystem::path(copies_[0].location).replace_extension(".record");
  ShardRecord record = contents_[0].sample.record;
  record.generation = 0;
  ASSERT_EQ(OverwriteFile(*Env::System(), path, EncodeRecord(record)), absl::OkStatus());
  std::string bytes;
  const FetchEnded ended = Fetch(1, bytes);
  EXPECT_TRUE(absl::IsDataLoss(ended.status)) << ended.status;
  EXPECT_THAT(Message(ended.status), HasSubstr(path));
}

// ---- Compressed ----

class CompressedTiersTest : public SharedTiersTest {
 protected:
  // Rank 1's file has what it has as it is; the others' are compressed.
  void SetUp() override {
    SharedTiersTest::SetUp();
    zstd_levels_ = {{0, 3}, {2, 1}};
  }
  DurableOpened OpenedForClient(Rank rank) {
    const FlushShard of = ToRemote(rank, TierKind::kMemory);
    OpenDurable open;
    open.drain = ++drain_;
    open.tier = TierKind::kRemote;
    open.key = of.key;
    tiers_->Perform(open);
    return Await<DurableOpened>([&](const DurableOpened& e) { return e.drain == open.drain; });
  }
  // What a reader gets in parts, and how long that is.
  std::string ReadInParts(Rank rank, bool whole) {
    const auto never = [] { return false; };
    const auto until = [] { return Clock::System()->Now() + std::chrono::seconds(60); };
    const FlushShard of = ToRemote(rank, TierKind::kMemory);
    const auto parts = tiers_->remote_parts();
    const auto file = parts->Open(of.key, whole, until(), never);
    EXPECT_TRUE(file.ok()) << file.status();
    if (!file.ok()) {
      return "";
    }
    std::string bytes((*file)->bytes(), '\0');
    const absl::Status read =
        parts->Read(*file, 0, std::as_writable_bytes(std::span(bytes)), until(), never);
    EXPECT_TRUE(read.ok()) << read;
    return bytes;
  }
};

TEST_F(CompressedTiersTest, EveryRankGetsItsOwnBytesBack) {
  WriteAll();
  uint64_t stored = 0;
  uint64_t logical = 0;
  for (Rank rank = 0; rank < kWorld; ++rank) {
    EXPECT_EQ(absl::EndsWith(copies_[rank].location, ".safetensors.zst"), rank != 1)
        << copies_[rank].location;
    const uint64_t of_file =
        copies_[rank].file_bytes != 0 ? copies_[rank].file_bytes : copies_[rank].copy.image_bytes;
    stored += std::filesystem::file_size(copies_[rank].location);
    logical += of_file;
  }
  EXPECT_LT(stored, logical);
  EXPECT_EQ(Tier(TierKind::kRemote).bytes_compressed_away(), logical - stored);
  for (Rank rank = 0; rank < kWorld; ++rank) {
    std::string bytes;
    const FetchEnded ended = Fetch(rank, bytes);
    ASSERT_EQ(ended.status, absl::OkStatus());
    EXPECT_TRUE(bytes == contents_[rank].sample.image) << rank;
    EXPECT_EQ(VerifiedCopy(rank), "");
  }
}

// The very same record, and so the same manifest, whatever form the files have.
TEST_F(CompressedTiersTest, RecordsAndScansSayNothingOfIt) {
  WriteAll();
  tiers_->Perform(ScanRemote{++drain_, "demo"});
  const auto scanned = Await<TierScanned>();
  ASSERT_EQ(scanned.status, absl::OkStatus());
  EXPECT_THAT(scanned.problems, SizeIs(0));
  ASSERT_THAT(scanned.jobs, SizeIs(1));
  ASSERT_THAT(scanned.jobs[0].copies, SizeIs(kWorld));
  for (const DurableCopy& found : scanned.jobs[0].copies) {
    const DurableCopy& copy = copies_[found.copy.id.rank];
    EXPECT_EQ(found.copy.image_bytes, copy.copy.image_bytes);
    EXPECT_EQ(found.file_bytes, copy.file_bytes);
    EXPECT_EQ(found.record_crc, copy.record_crc);
    EXPECT_EQ(found.location, copy.location);
  }
}

TEST_F(CompressedTiersTest, FromADriveItIsCompressedAsWell) {
  zstd_levels_ = {{1, 3}};
  FlushShard to_nvme = ToRemote(1, TierKind::kMemory);
  to_nvme.to = TierKind::kNvme;
  ASSERT_EQ(Do(to_nvme).status, absl::OkStatus());
  EXPECT_EQ(std::filesystem::file_size(dir_.Path("nvme/demo/7-a3/1.safetensors")),
            contents_[1].sample.image.size())
      << "what lies on a node's drive is as it is";
  copies_ = {Written(0), Written(1, TierKind::kNvme), Written(2)};
  EXPECT_TRUE(absl::EndsWith(copies_[1].location, ".zst")) << copies_[1].location;
  ASSERT_EQ(Commit(copies_), absl::OkStatus());
  std::string bytes;
  ASSERT_EQ(Fetch(1, bytes).status, absl::OkStatus());
  EXPECT_TRUE(bytes == contents_[1].sample.image);
}

TEST_F(CompressedTiersTest, WhatIsReadBackIsWhatWillBeRead) {
  for (const auto verify : {v1::TierPolicy::VERIFY_ALL, v1::TierPolicy::VERIFY_SAMPLE}) {
    FlushShard flush = ToRemote(verify == v1::TierPolicy::VERIFY_ALL ? 0 : 2, TierKind::kMemory);
    flush.verify = verify;
    flush.replicas = nullptr;
    const FlushEnded ended = Do(flush);
    ASSERT_EQ(ended.status, absl::OkStatus());
    EXPECT_TRUE(absl::EndsWith(ended.copy.location, ".zst"));
  }
}

// No descriptor shows what is compressed: neither of the file itself, nor of one that has what it
// leaves out.
TEST_F(CompressedTiersTest, ReadersGetThemInParts) {
  WriteAll();
  for (Rank rank = 0; rank < kWorld; ++rank) {
    const DurableOpened opened = OpenedForClient(rank);
    ASSERT_EQ(opened.status, absl::OkStatus());
    EXPECT_TRUE(opened.parts_only) << rank;
    EXPECT_EQ(opened.files, nullptr);
    EXPECT_EQ(opened.copy.id, contents_[rank].sample.record.id);
    EXPECT_EQ(opened.copy.world_size, kWorld);
    EXPECT_TRUE(ReadInParts(rank, /*whole=*/true) == contents_[rank].sample.image) << rank;
    const std::string alone = ReadInParts(rank, /*whole=*/false);
    EXPECT_EQ(alone.size(),
              rank == 2 ? contents_[rank].sample.image.size() : copies_[rank].file_bytes);
  }
}

TEST_F(CompressedTiersTest, ReadersGetDescriptorsWhereNothingIsCompressed) {
  zstd_levels_.clear();
  WriteAll();
  for (Rank rank = 0; rank < kWorld; ++rank) {
    const DurableOpened opened = OpenedForClient(rank);
    ASSERT_EQ(opened.status, absl::OkStatus());
    EXPECT_FALSE(opened.parts_only);
    ASSERT_NE(opened.files, nullptr);
  }
}

TEST_F(CompressedTiersTest, ABadByteIsFoundAndTheFileIsNamed) {
  WriteAll();
  const std::string& path = copies_[0].location;
  const uint64_t bytes = std::filesystem::file_size(path);
  for (const uint64_t at : {bytes - 1, bytes - 12, bytes / 2, uint64_t{0}}) {
    ASSERT_EQ(FlipBitOf(*Env::System(), path, at), absl::OkStatus());
    std::string read;
    const FetchEnded ended = Fetch(0, read);
    EXPECT_TRUE(absl::IsDataLoss(ended.status)) << at << ": " << ended.status;
    EXPECT_TRUE(ended.source_bad);
    EXPECT_THAT(Message(ended.status), HasSubstr(path));
    EXPECT_NE(VerifiedCopy(0), "");
    EXPECT_EQ(Verified(ToRemote(2, TierKind::kMemory), {0, {}, false, copies_[2]}), "");
    ASSERT_EQ(FlipBitOf(*Env::System(), path, at), absl::OkStatus());
  }
  EXPECT_EQ(VerifiedCopy(0), "");
}

// What cannot be read is told by the reader's digests, as any other damage: parts are handed out.
TEST_F(CompressedTiersTest, ADamagedFrameIsHandedOutForTheDigestsToTell) {
  WriteAll();
  const std::string& path = copies_[2].location;
  const uint64_t bytes = std::filesystem::file_size(path);
  ASSERT_EQ(FlipBitOf(*Env::System(), path, bytes / 3), absl::OkStatus());
  const std::string read = ReadInParts(2, /*whole=*/true);
  const std::string& image = contents_[2].sample.image;
  ASSERT_EQ(read.size(), image.size());
  EXPECT_FALSE(read == image);
  for (size_t at = 0; at < read.size(); ++at) {
    ASSERT_TRUE(read[at] == image[at] || read[at] == 0) << at;
  }
}

// The log is not the reader's to fill: one line for each time that the file is opened.
TEST_F(CompressedTiersTest, ADamagedFileIsToldOnceHoweverOftenItIsRead) {
  WriteAll();
  const std::string& path = copies_[2].location;
  ASSERT_EQ(FlipBitOf(*Env::System(), path, std::filesystem::file_size(path) / 3),
            absl::OkStatus());
  const auto never = [] { return false; };
  const auto until = [] { return Clock::System()->Now() + std::chrono::seconds(60); };
  const auto parts = tiers_->remote_parts();
  const auto file =
      parts->Open(ToRemote(2, TierKind::kMemory).key, /*whole=*/true, until(), never).value();
  testing::internal::CaptureStderr();
  std::string page(RemoteParts::kPageBytes, '\0');
  for (int round = 0; round < 3; ++round) {
    for (uint64_t at = 0; at + page.size() <= file->bytes(); at += page.size()) {
      EXPECT_EQ(parts->Read(file, at, std::as_writable_bytes(std::span(page)), until(), never),
                absl::OkStatus());
      parts->Forget(*file, at, page.size());
    }
  }
  const std::string log = testing::internal::GetCapturedStderr();
  const size_t first = log.find(path);
  EXPECT_NE(first, std::string::npos) << log;
  EXPECT_EQ(log.find("read parts", first), std::string::npos) << log;
}

// Each is whole, and the seek table fits: the digests alone tell that they are in each other's
// place.
TEST_F(CompressedTiersTest, FramesThatChangedPlacesAreTold) {
  ShardRecord identity = contents_[2].sample.record;
  identity.digests.clear();
  identity.id.step = 8;
  const std::vector<Slice> slices = {Whole("big", DType::kU8, {3'600'000})};
  std::mt19937_64 random(3);
  std::string data(3'600'000, 'x');
  for (size_t at = 0; at < data.size(); at += 2) {
    data[at] = static_cast<char>(random());
  }
  SlotContent content;
  content.sample = MakeImageOf(slices, identity, {data});
  content.record_offset = (content.sample.image.size() + 4095) / 4096 * 4096;
  content.expected = contents_[2].expected;
  content.expected.id.step = 8;
  ASSERT_EQ(SealSlot(*slots_, 50, content, 2 * kSlot), absl::OkStatus());
  FlushShard flush = ToRemote(2, TierKind::kMemory);
  flush.slot = 50;
  flush.key.id.step = 8;
  flush.image_bytes = content.sample.image.size();
  const FlushEnded ended = Do(flush);
  ASSERT_EQ(ended.status, absl::OkStatus());
  const std::string& path = ended.copy.location;
  ASSERT_TRUE(absl::EndsWith(path, ".zst")) << path;
  const std::string good = ReadFile(*Env::System(), path, uint64_t{1} << 30).value();
  const uint64_t table_at = good.size() - SeekTableBytes(FramesOf(content.sample.image.size()));
  const SeekTable table =
      DecodeSeekTable(good.substr(table_at), good.size(), content.sample.image.size()).value();
  ASSERT_EQ(table.frames(), 4u);
  // Frames in this order; in their own one all is well.
  const auto lies = [&](const std::vector<uint64_t>& order) {
    std::string frames;
    std::vector<uint32_t> sizes;
    for (const uint64_t i : order) {
      frames += good.substr(table.frame(i).offset, table.frame(i).stored_bytes);
      sizes.push_back(static_cast<uint32_t>(table.frame(i).stored_bytes));
    }
    EXPECT_EQ(OverwriteFile(*Env::System(), path,
                            frames + EncodeSeekTable(content.sample.image.size(), sizes)),
              absl::OkStatus());
  };
  const auto fetch = [&] {
    FetchShard action;
    action.drain = ++drain_;
    action.from = TierKind::kRemote;
    action.key = flush.key;
    action.slot = static_cast<SlotId>(100 + action.drain);
    action.generation = 1;
    action.slot_bytes = 2 * kSlot;
    EXPECT_EQ(slots_->Create(action.slot, action.slot_bytes), absl::OkStatus());
    EXPECT_EQ(slots_->WriteNote(action.slot, NoteOf(1, action.slot_bytes)), absl::OkStatus());
    tiers_->Perform(action);
    const auto fetched =
        Await<FetchEnded>([&](const FetchEnded& e) { return e.drain == action.drain; });
    EXPECT_EQ(slots_->RemoveRecord(action.slot).ok(), fetched.status.ok());
    return fetched;
  };
  EXPECT_EQ(slots_->RemoveRecord(50), absl::OkStatus());
  lies({0, 1, 2, 3});
  EXPECT_EQ(Verified(flush, ended), "");
  EXPECT_EQ(fetch().status, absl::OkStatus());
  for (const std::vector<uint64_t>& order :
       {std::vector<uint64_t>{0, 2, 1, 3}, std::vector<uint64_t>{0, 1, 1, 3}}) {
    lies(order);
    EXPECT_THAT(Verified(flush, ended), HasSubstr(path));
    const FetchEnded fetched = fetch();
    EXPECT_TRUE(absl::IsDataLoss(fetched.status)) << fetched.status;
    EXPECT_TRUE(fetched.source_bad);
    EXPECT_THAT(Message(fetched.status), HasSubstr(path));
  }
}

// Pieces that end amid frames, and two threads that read them.
class OddPiecesTest : public CompressedTiersTest {
 protected:
  OddPiecesTest() {
    writers_ = 2;
    remote_piece_bytes_ = kFrameBytes + (kFrameBytes >> 4);
  }
  void SetUp() override {
    CompressedTiersTest::SetUp();
    zstd_levels_ = {{0, 1}, {1, 1}, {2, 1}};
    PullClient::Options options;
    options.self = "node";
    options.env = &env_;
    ASSERT_EQ(tiers_->SetPeers(std::make_shared<PullClient>(std::move(options)), nullptr),
              absl::OkStatus());
  }
  // How often the second frame of the rank's file is read while it is fetched. Whoever reads it as
  // the first waits a moment: others come meanwhile, if any do.
  int ReadsOfTheSecondFrame(Rank rank, std::vector<RemoteReader> readers) {
    const std::string& path = copies_[rank].location;
    const uint64_t image_bytes =
        copies_[rank].file_bytes != 0 ? copies_[rank].file_bytes : copies_[rank].copy.image_bytes;
    const auto file = Env::System()->Open(path, OpenMode::kRead, {});
    EXPECT_TRUE(file.ok()) << file.status();
    const absl::StatusOr<SeekTable> table =
        ReadSeekTable(**file, std::filesystem::file_size(path), image_bytes);
    EXPECT_TRUE(table.ok()) << table.status();
    EXPECT_EQ(table->frames(), 2u);
    const uint64_t second = table->frame(1).offset;
    auto reads = std::make_shared<std::atomic<int>>(0);
    env_.Meddle({.dir = std::filesystem::path(path).parent_path(),
                 .at_read = [reads, second](uint64_t offset) {
                   if (offset == second && ++*reads == 1) {
                     for (int i = 0; i < 100 && *reads == 1; ++i) {
                       std::this_thread::sleep_for(std::chrono::milliseconds(5));
                     }
                   }
                 }});
    std::string bytes;
    EXPECT_EQ(Fetch(rank, bytes, std::move(readers)).status, absl::OkStatus());
    env_.Meddle({});
    EXPECT_TRUE(bytes == contents_[rank].sample.image) << rank;
    return *reads;
  }
};

TEST_F(OddPiecesTest, EachFrameIsUnpackedOnce) {
  WriteAll();
  EXPECT_EQ(ReadsOfTheSecondFrame(2, {}), 1) << "a file that has all of its image";
  // Of those that share their tensors, the one that has the large one.
  const Rank owner = copies_[0].file_bytes > kFrameBytes ? 0 : 1;
  ASSERT_GT(copies_[owner].file_bytes, remote_piece_bytes_);
  EXPECT_EQ(ReadsOfTheSecondFrame(owner, {RemoteReader{"another", {}}}), 1)
      << "one that is passed on while it is read";
}

// ---- Beside training ----

// A process that trains on one core, and where images are read and written meanwhile.
class BesideTrainingTest : public CompressedTiersTest {
 protected:
  void SetUp() override {
    CompressedTiersTest::SetUp();
    if (all_.size() < 2) {
      GTEST_SKIP() << "there is one core only";
    }
    trainer_ = ::fork();
    if (trainer_ == 0) {
      for (;;) {
        ::pause();
      }
    }
    ASSERT_TRUE(SetThreadCores(trainer_, {*all_.begin()}).ok());
    beside_.erase(beside_.begin());
    tiers_->training_cores()->Add(trainer_);
  }
  void TearDown() override {
    CompressedTiersTest::TearDown();
    if (trainer_ > 0) {
      ::kill(trainer_, SIGKILL);
      ::waitpid(trainer_, nullptr, 0);
    }
  }
  // Of the calls on images since the last look: the cores of who made them.
  std::pair<std::set<Cores>, std::set<Cores>> ReadAndWrittenOn(const std::function<void()>& what) {
    auto seen = std::make_shared<Seen>();
    Meddling watched;
    watched.dir = DirOf(TierKind::kRemote);
    watched.at_read = [seen](uint64_t offset) {
      if (offset == 0) {  // (the seek table is read by whoever opens the file)
        const MutexLock lock(seen->mutex);
        seen->read.insert(CoresOf(0).value());
      }
    };
    watched.at_write = [seen] {
      const MutexLock lock(seen->mutex);
      seen->written.insert(CoresOf(0).value());
    };
    env_.Meddle(watched);
    what();
    env_.Meddle({});
    const MutexLock lock(seen->mutex);
    return {seen->read, seen->written};
  }

  struct Seen {
    Mutex mutex;
    std::set<Cores> read GUARDED_BY(mutex);
    std::set<Cores> written GUARDED_BY(mutex);
  };
  using On = std::pair<std::set<Cores>, std::set<Cores>>;
  const Cores all_ = CoresOf(0).value();
  Cores beside_ = all_;
  pid_t trainer_ = 0;
};

TEST_F(BesideTrainingTest, WhatIsCompressedIsFlushedAndReadBackThere) {
  const auto flush = [&](Rank rank) {
    FlushShard action = ToRemote(rank, TierKind::kMemory);
    action.verify = v1::TierPolicy::VERIFY_ALL;
    const FlushEnded ended = Do(action);
    EXPECT_EQ(ended.status, absl::OkStatus());
    EXPECT_EQ(absl::EndsWith(ended.copy.location, ".zst"), zstd_levels_[rank] > 0);
  };
  EXPECT_EQ(ReadAndWrittenOn([&] { flush(0); }), (On{{beside_}, {beside_}}));
  EXPECT_EQ(ReadAndWrittenOn([&] { flush(1); }), (On{{all_}, {all_}})) << "it is plain";
  EXPECT_EQ(ReadAndWrittenOn([&] { flush(2); }), (On{{beside_}, {beside_}}));
}

TEST_F(BesideTrainingTest, WhatIsCompressedIsVerifiedThere) {
  WriteAll();
  for (int round = 0; round < 2; ++round) {
    for (Rank rank = 0; rank < kWorld; ++rank) {
      std::string bad = "not yet";
      EXPECT_EQ(ReadAndWrittenOn([&] { bad = VerifiedCopy(rank); }),
                (On{{zstd_levels_[rank] > 0 ? beside_ : all_}, {}}))
          << rank;
      EXPECT_EQ(bad, "");
    }
  }
}

// Somebody waits for it.
TEST_F(BesideTrainingTest, WhatIsFetchedIsUnpackedAnywhere) {
  WriteAll();
  for (Rank rank = 0; rank < kWorld; ++rank) {
    std::string bytes;
    absl::Status fetched = absl::UnknownError("not yet");
    EXPECT_EQ(ReadAndWrittenOn([&] { fetched = Fetch(rank, bytes).status; }), (On{{all_}, {}}))
        << rank;
    EXPECT_EQ(fetched, absl::OkStatus());
  }
}

// The whole compresses, what this rank's file has of it does not.
TEST_F(CompressedTiersTest, WhatIsSampledIsWhatIsWritten) {
  std::mt19937_64 random(2);
  SlotContent contents[2];
  for (Rank rank = 0; rank < 2; ++rank) {
    ShardRecord identity = SampleRecord();
    identity.id.step = 9;
    identity.id.rank = rank;
    identity.world_size = kWorld;
    identity.generation = 1;
    const std::vector<Slice> slices = {Whole("calm", DType::kF32, {200'000}),
                                       Whole("noise", DType::kF32, {200'000})};
    const ImagePlan plan = *PlanImage(slices, rank);
    std::vector<std::string> data;
    random.seed(2);
    for (const Slice& slice : plan.layout.slices) {
      std::string& bytes = data.emplace_back(slice.bytes, 'x');
      for (size_t at = 0; slice.name == "noise" && at < bytes.size(); ++at) {
        bytes[at] = static_cast<char>(random());
      }
    }
    contents[rank].sample = MakeImageOf(slices, identity, data);
    contents[rank].record_offset = (contents[rank].sample.image.size() + 4095) / 4096 * 4096;
    const ShardRecord& record = contents[rank].sample.record;
    contents[rank].expected = {record.id, record.job_name, record.world_size, record.generation,
                               record.descent};
    ASSERT_EQ(SealSlot(*slots_, 60 + rank, contents[rank], 2 * kSlot), absl::OkStatus());
  }
  int compressed = 0;
  for (Rank rank = 0; rank < 2; ++rank) {
    const SampleImage& sample = contents[rank].sample;
    FlushShard flush = ToRemote(rank, TierKind::kMemory);
    flush.key.id.step = 9;
    flush.slot = 60 + rank;
    flush.image_bytes = sample.image.size();
    flush.zstd_level = 3;
    flush.replicas = std::make_shared<const Replicas::Group>(
        Replicas::Group{LikenessOf(sample.record, sample.layout).content, {0, 1}});
    const FlushEnded ended = Do(flush);
    ASSERT_EQ(ended.status, absl::OkStatus());
    EXPECT_GT(ended.copy.file_bytes, 0u);
    compressed += absl::EndsWith(ended.copy.location, ".zst") ? 1 : 0;
  }
  EXPECT_EQ(compressed, 1) << "the one that has the calm tensor";
  EXPECT_LT(Tier(TierKind::kRemote).bytes_compressed_away(), 1'000'000u);
}

TEST_F(CompressedTiersTest, ADamagedOneIsMended) {
  WriteAll();
  for (const Rank rank : {0u, 2u}) {
    std::filesystem::resize_file(copies_[rank].location, 100);
    EXPECT_NE(VerifiedCopy(rank), "");
    FlushShard mend = ToRemote(rank, TierKind::kMemory);
    mend.replace = true;
    const FlushEnded ended = Do(mend);
    ASSERT_EQ(ended.status, absl::OkStatus());
    EXPECT_EQ(ended.copy.record_crc, copies_[rank].record_crc);
    EXPECT_EQ(ended.copy.file_bytes, copies_[rank].file_bytes);
    EXPECT_TRUE(absl::EndsWith(ended.copy.location, ".safetensors")) << ended.copy.location;
    EXPECT_FALSE(std::filesystem::exists(copies_[rank].location));
    copies_[rank] = ended.copy;
    EXPECT_EQ(VerifiedCopy(rank), "");
  }
  for (Rank rank = 0; rank < kWorld; ++rank) {
    std::string bytes;
    ASSERT_EQ(Fetch(rank, bytes).status, absl::OkStatus());
    EXPECT_TRUE(bytes == contents_[rank].sample.image) << rank;
  }
}

TEST_F(CompressedTiersTest, WhatSavesNothingIsWrittenAsItIs) {
  SlotContent noise = Content(2);
  std::mt19937_64 random(1);
  std::vector<std::string> data;
  for (const Slice& slice : noise.sample.layout.slices) {
    std::string& bytes = data.emplace_back(slice.bytes, '\0');
    for (char& byte : bytes) {
      byte = static_cast<char>(random());
    }
  }
  ShardRecord identity = noise.sample.record;
  identity.digests.clear();
  identity.id.step = 8;
  noise.sample = MakeImageOf(noise.sample.layout.slices, identity, data);
  noise.record_offset = (noise.sample.image.size() + 4095) / 4096 * 4096;
  noise.expected.id.step = 8;
  ASSERT_EQ(SealSlot(*slots_, 50, noise, 2 * kSlot), absl::OkStatus());
  FlushShard flush = ToRemote(2, TierKind::kMemory);
  flush.slot = 50;
  flush.key.id.step = 8;
  flush.image_bytes = noise.sample.image.size();
  const FlushEnded ended = Do(flush);
  ASSERT_EQ(ended.status, absl::OkStatus());
  EXPECT_TRUE(absl::EndsWith(ended.copy.location, ".safetensors")) << ended.copy.location;
  EXPECT_EQ(Tier(TierKind::kRemote).bytes_compressed_away(), 0u);
}

TEST_F(CompressedTiersTest, ItIsAdoptedInWhateverFormItIsThere) {
  const DurableCopy compressed = Written(2);
  zstd_levels_.clear();
  const DurableCopy again = Written(2);
  EXPECT_EQ(again.location, compressed.location);
  EXPECT_EQ(again.record_crc, compressed.record_crc);
}

// A file that leaves slices out is written anew with exactly those left out: as the record beside
// it says, or, where that is damaged, too, as its group has it.
TEST_F(SharedTiersTest, ABadFileThatLeavesSlicesOutIsMendedAsItWas) {
  WriteAll();
  for (const Rank rank : {Rank{0}, Rank{1}}) {
    const std::string image = copies_[rank].location;
    const std::string record = image.substr(0, image.rfind('.')) + ".record";
    const auto read = [](const std::string& path) {
      return ReadFile(*Env::System(), path, uint64_t{1} << 30).value();
    };
    const std::string before = read(image) + read(record);
    for (const bool record_too : {false, true}) {
      SCOPED_TRACE(absl::StrCat("rank ", rank, record_too ? ", its record too" : ""));
      std::filesystem::resize_file(image, 4096);
      if (record_too) {
        std::filesystem::resize_file(record, 20);
      }
      FlushShard mend = ToRemote(rank, TierKind::kMemory);
      mend.replace = true;
      const FlushEnded ended = Do(mend);
      ASSERT_EQ(ended.status, absl::OkStatus());
      EXPECT_EQ(ended.copy.record_crc, copies_[rank].record_crc);
      EXPECT_EQ(ended.copy.file_bytes, copies_[rank].file_bytes);
      EXPECT_TRUE(read(image) + read(record) == before);
      EXPECT_EQ(Verified(mend, ended), "");
    }
    // Of a group that it does not have, the manifest's record cannot be made: nothing is touched.
    std::filesystem::resize_file(record, 20);
    FlushShard alone = ToRemote(rank, TierKind::kMemory, false);
    alone.replace = true;
    EXPECT_TRUE(absl::IsFailedPrecondition(Do(alone).status));
    EXPECT_EQ(std::filesystem::file_size(record), 20u);
    FlushShard mend = ToRemote(rank, TierKind::kMemory);
    mend.replace = true;
    ASSERT_EQ(Do(mend).status, absl::OkStatus());
  }
  EXPECT_THAT(Leftovers(TierKind::kRemote), SizeIs(0));
}

}  // namespace
}  // namespace holdfast
