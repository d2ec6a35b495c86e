// What it takes to put an image together of which many other ranks' files have slices: few files
// are open at a time, and nothing is kept of the owners' records.
#include "server/runtime/tiers/shared_slices.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <malloc.h>

#include <atomic>
#include <cstdlib>
#include <new>
#include <thread>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "tests/tiers/durable/durable_harness.h"

#ifndef __SANITIZE_THREAD__  // which has its own, and lets no program replace them
namespace {

std::atomic<size_t> g_live{0};
std::atomic<size_t> g_most{0};

}  // namespace

// Counts what lives on the heap, and the most that ever did.
void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  void* const at = std::malloc(bytes);
  if (at == nullptr) {
    return nullptr;
  }
  const size_t live = g_live += ::malloc_usable_size(at);
  size_t most = g_most;
  while (most < live && !g_most.compare_exchange_weak(most, live)) {
  }
  return at;
}
void* operator new(size_t bytes) {
  void* const at = operator new(bytes, std::nothrow);
  if (at == nullptr) {
    std::abort();
  }
  return at;
}
void operator delete(void* at) noexcept {
  g_live -= at != nullptr ? ::malloc_usable_size(at) : 0;
  std::free(at);
}
void operator delete(void* at, size_t) noexcept {
  operator delete(at);
}
#endif

namespace holdfast {
namespace {

using ::testing::HasSubstr;

constexpr size_t kTensors = 400;
constexpr size_t kThreads = 4;

SampleImage Replica(Rank rank, uint32_t world_size) {
  ShardRecord identity = SampleRecord();
  identity.id.rank = rank;
  identity.world_size = world_size;
  identity.generation = 0;
  std::vector<Slice> slices;
  for (size_t i = 0; i < kTensors; ++i) {
    slices.push_back(
        Whole(absl::StrCat("model.layers.", i, ".attention.weight"), DType::kBF16, {8 + i % 5}));
  }
  slices.push_back(Json("progress", 20 + rank));
  return MakeSampleImage(std::move(slices), identity);
}

class SharedSlicesTest : public ::testing::Test {
 protected:
  // The step of so many replicas, each with its part.
  void Write(uint32_t ranks) {
    harness_.emplace(DurablePlace{.kind = DurableKind::kRemote});
    ASSERT_EQ(harness_->Start(), absl::OkStatus());
    CopyStore& store = harness_->store();
    std::vector<Rank> all;
    for (Rank rank = 0; rank < ranks; ++rank) {
      all.push_back(rank);
    }
    SliceOwners owners;
    for (const Rank rank : all) {
      const SampleImage sample = Replica(rank, ranks);
      const auto image = DecodeRecordAndLayout(sample.record_file);
      ASSERT_TRUE(image.ok()) << ToString(image.status());
      FlushShard flush;
      flush.key = KeyOf(rank, ranks);
      flush.replicas = std::make_shared<const Replicas::Group>(
          Replicas::Group{image->record.likeness.content, all});
      const std::optional<PartImage> part = PartOf(owners, flush, *image);
      ASSERT_TRUE(part.has_value());
      std::string bytes = part->from_whole.header;
      for (const ImageRun& run : part->from_whole.runs) {
        bytes += sample.image.substr(run.source_offset, run.bytes);
      }
      auto writing = store.Begin({flush.key.id, flush.key.job_name, ranks, bytes.size(),
                                  SampleJob().uid, SampleJob().gid});
      ASSERT_TRUE(writing.ok()) << ToString(writing.status());
      ASSERT_EQ((*writing)->image().WriteAt(0, std::as_bytes(std::span(bytes))), absl::OkStatus());
      const auto published = (*writing)->Publish(EncodeRecord(part->record));
      ASSERT_TRUE(published.ok()) << ToString(published.status());
    }
    // Who opens it has nothing open and remembers nothing.
    harness_->Stop();
    auto reader = CopyStore::Open(harness_->options());
    ASSERT_TRUE(reader.ok()) << ToString(reader.status());
    store_ = *std::move(reader);
  }

  static CopyKey KeyOf(Rank rank, uint32_t ranks) {
    ShardRecord record = SampleRecord();
    record.id.rank = rank;
    return {record.id, record.job_name, ranks};
  }

  absl::StatusOr<WholeCopy> OpenRank0(uint32_t ranks) {
    const CopyKey key = KeyOf(0, ranks);
    HF_ASSIGN_OR_RETURN(std::shared_ptr<CopyStore::Reading> reading,
                        store_->OpenCopy({key.id, key.job_name, key.world_size}, {}));
    HF_ASSIGN_OR_RETURN(const RecordAndLayout image, DecodeRecordAndLayout(reading->record_file()));
    return OpenWhole(store_, key, reading, image, control_);
  }

  // All of it, by several threads, in pieces that end amid slices.
  static absl::Status ReadAll(File& file, std::string& bytes) {
    constexpr size_t kPiece = 777;
    std::vector<absl::Status> ends(kThreads);
    std::vector<std::thread> threads;
    for (size_t t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        for (size_t at = t * kPiece; at < bytes.size() && ends[t].ok(); at += kThreads * kPiece) {
          const size_t n = std::min(kPiece, bytes.size() - at);
          ends[t] = file.ReadAt(at, std::as_writable_bytes(std::span(bytes)).subspan(at, n));
        }
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    for (const absl::Status& end : ends) {
      HF_RETURN_IF_ERROR(end);
    }
    return absl::OkStatus();
  }

  std::string PathOf(Rank rank, uint32_t ranks) {
    const CopyKey key = KeyOf(rank, ranks);
    return store_->ImagePath({key.id, key.job_name, ranks});
  }

  std::optional<DurableHarness> harness_;
  std::shared_ptr<CopyStore> store_;
  TransferControl control_;
};

TEST_F(SharedSlicesTest, FewFilesAreOpenHoweverManyOwnersThereAre) {
  constexpr uint32_t kRanks = 150;
  Write(kRanks);
  FaultEnv& env = *harness_->faults();
  const size_t before = static_cast<size_t>(env.open_files());
  env.TakeMostOpenFiles();
  auto whole = OpenRank0(kRanks);
  ASSERT_TRUE(whole.ok()) << ToString(whole.status());
  const std::string expected = Replica(0, kRanks).image;
  std::string bytes(expected.size(), '\0');
  ASSERT_EQ(ReadAll(*whole->file, bytes), absl::OkStatus());
  EXPECT_TRUE(bytes == expected);
  EXPECT_EQ(whole->Confirm(), absl::OkStatus());
  // Its own file, those of the owners that are kept open, and each thread's two.
  EXPECT_LE(static_cast<size_t>(env.TakeMostOpenFiles()),
            before + 1 + kOwnersOpenMax + 2 * kThreads);
  *whole = WholeCopy();
  EXPECT_EQ(static_cast<size_t>(env.open_files()), before);
}

#ifndef __SANITIZE_THREAD__
TEST_F(SharedSlicesTest, NothingIsKeptOfTheOwnersRecords) {
  size_t kept[2] = {};
  size_t most[2] = {};
  const uint32_t ranks[2] = {40, 160};
  uint64_t record_bytes = 0;
  for (const int i : {0, 1}) {
    Write(ranks[i]);
    const size_t before = g_live;
    g_most = before;
    const auto whole = OpenRank0(ranks[i]);
    ASSERT_TRUE(whole.ok()) << ToString(whole.status());
    kept[i] = g_live - before;
    most[i] = g_most - before;
    record_bytes = Replica(1, ranks[i]).record_file.size();
  }
  EXPECT_LT((kept[1] - kept[0]) / (ranks[1] - ranks[0]), record_bytes / 10)
      << "of each owner, of whose record that are " << record_bytes << " bytes";
  EXPECT_LT(most[1], 2 * most[0]);
}
#endif

TEST_F(SharedSlicesTest, AFileThatIsOpenedAgainIsJudgedAgain) {
  constexpr uint32_t kRanks = kOwnersOpenMax + 10;
  for (const bool cut : {false, true}) {
    Write(kRanks);
    const auto whole = OpenRank0(kRanks);
    ASSERT_TRUE(whole.ok()) << ToString(whole.status());
    const std::string path = PathOf(1, kRanks);  // it was opened first, so it is not open now
    Env& env = harness_->env();
    if (cut) {
      auto file = env.Open(path, OpenMode::kReadWrite);
      ASSERT_TRUE(file.ok() && (*file)->Truncate(5000).ok());
    } else {
      ASSERT_EQ(env.Unlink(path), absl::OkStatus());
    }
    std::string bytes(Replica(0, kRanks).image.size(), '\0');
    const absl::Status read = ReadAll(*whole->file, bytes);
    EXPECT_TRUE(absl::IsDataLoss(read)) << ToString(read);
    EXPECT_THAT(Message(read), HasSubstr(path));
  }
}

// There may be thousands, on a mount that answers slowly.
TEST_F(SharedSlicesTest, WhoIsCancelledOpensNoMore) {
  Write(3);
  control_.Cancel();
  harness_->faults()->RecordCalls();
  EXPECT_TRUE(absl::IsCancelled(OpenRank0(3).status()));
  for (const std::string& call : harness_->faults()->TakeCalls()) {
    EXPECT_THAT(call, ::testing::Not(HasSubstr("shard-00001"))) << call;
  }
}

}  // namespace
}  // namespace holdfast
