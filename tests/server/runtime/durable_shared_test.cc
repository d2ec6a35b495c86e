// Replicas in the remote tier: each of their tensors is written once, and read again by all, from
// whichever file has it.
#include <map>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "tests/server/runtime/durable_tiers_fixture.h"
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
  FetchEnded Fetch(Rank rank, std::string& bytes) {
    const ShardRecord& record = contents_[rank].sample.record;
    FetchShard fetch;
    fetch.drain = ++drain_;
    fetch.from = TierKind::kRemote;
    fetch.key = {record.id, record.job_name, record.world_size};
    fetch.slot = static_cast<SlotId>(100 + fetch.drain);
    fetch.generation = 1;
    fetch.slot_bytes = 2 * kSlot;
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
    EXPECT_THAT(VerifiedCopy(1), HasSubstr(path));
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

}  // namespace
}  // namespace holdfast
