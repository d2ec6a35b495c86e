// A mount whose calls never return: nobody but the transfer itself waits for it.
#include <gmock/gmock.h>

#include <cstring>
#include <filesystem>
#include <set>
#include <string>
#include <thread>

#include "base/fault_env.h"
#include "base/units.h"
#include "tests/tiers/transfer/transfer_harness.h"
#include "tiers/transfer/buffered_copy.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;

// The ids of this process's threads: of one that has been joined, too, for a moment.
std::set<std::string> Threads() {
  std::set<std::string> ids;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    ids.insert(task.path().filename());
  }
  return ids;
}

bool EventuallyThreadsSince(const std::set<std::string>& before, size_t count) {
  return Eventually([&] {
    std::set<std::string> ids = Threads();
    for (const std::string& id : before) {
      ids.erase(id);
    }
    return ids.size() == count;
  });
}

class HangingMountTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(env_.CreateDirectory("/r", 0750).ok());
    auto image = std::make_shared<RecordAndLayout>();
    image->record = sample_.record;
    image->layout = sample_.layout;
    image_ = std::move(image);
  }

  void StartPool(CopyPoolOptions options) { pool_ = ValueOf(CopyPool::Start(options)); }

  BufferedCopySpec SpecTo(std::shared_ptr<File> file) {
    BufferedCopySpec spec;
    spec.image = image_;
    spec.control = std::make_shared<TransferControl>();
    spec.from_memory = std::make_shared<RevocableMemory>(slot_.data(), sample_.image.size());
    spec.to_file = std::move(file);
    return spec;
  }
  std::shared_ptr<File> Hanging(const std::string& path, uint64_t from = 0) {
    return std::make_shared<HangingFile>(ValueOf(env_.Open(path, OpenMode::kCreateExclusive)),
                                         gate_, from);
  }
  std::shared_ptr<File> Good(const std::string& path) {
    return ValueOf(env_.Open(path, OpenMode::kCreateExclusive));
  }

  FaultEnv env_;
  const SampleImage sample_ = MakeTransferImage(9 * kMiB);
  TestSlot slot_{sample_.image.size(), sample_.image};
  std::shared_ptr<const RecordAndLayout> image_;
  const std::shared_ptr<Gate> gate_ = std::make_shared<Gate>();
  std::unique_ptr<CopyPool> pool_;
};

TEST_F(HangingMountTest, SlotIsTakenBackWhileAWriteHangs) {
  StartPool({.threads = 2, .piece_bytes = kMiB});
  const BufferedCopySpec spec = SpecTo(Hanging("/r/image", 2 * kMiB));
  TransferResult result;
  std::thread operation([&] { result = pool_->Copy(spec); });
  gate_->WaitForWaiting(2);

  // Nobody holds the slot, though two writes of its bytes are under way: it can be refilled, or
  // unmapped.
  spec.control->Cancel();
  spec.from_memory->Revoke();
  EXPECT_TRUE(spec.from_memory->revoked());
  std::memset(slot_.data(), 0x55, sample_.image.size());
  slot_.TakeMapping().reset();

  gate_->Open();
  operation.join();
  EXPECT_TRUE(absl::IsCancelled(result.status)) << ToString(result.status);
  EXPECT_EQ(result.faulty, FaultySide::kNone);
  // What was written are the image's bytes: none came from the slot after it was taken back.
  const std::string written = ValueOf(ReadFile(env_, "/r/image", kGiB));
  for (size_t at = 0; at < written.size(); ++at) {
    ASSERT_TRUE(written[at] == sample_.image[at] || written[at] == 0) << at;
  }
}

TEST_F(HangingMountTest, SlotIsTakenBackWhileAReadHangs) {
  StartPool({.threads = 2, .piece_bytes = kMiB});
  ASSERT_TRUE(WriteFileAtomically(env_, "/r/source", sample_.image).ok());
  TestSlot target(sample_.image.size());
  BufferedCopySpec spec;
  spec.image = image_;
  spec.to_memory = std::make_shared<RevocableMemory>(target.TakeMapping(), sample_.image.size());
  spec.from_file =
      std::make_shared<HangingFile>(ValueOf(env_.Open("/r/source", OpenMode::kRead)), gate_, kMiB);
  TransferResult result;
  std::thread operation([&] { result = pool_->Copy(spec); });
  gate_->WaitForWaiting(2);
  spec.to_memory->Revoke();  // unmapped: who touched it now would die
  gate_->Open();
  operation.join();
  EXPECT_TRUE(absl::IsCancelled(result.status)) << ToString(result.status);
}

TEST_F(HangingMountTest, OthersGoOn) {
  StartPool({.threads = 1, .piece_bytes = kMiB, .stuck_after = Duration(0), .threads_max = 6});
  const BufferedCopySpec stuck = SpecTo(Hanging("/r/stuck"));
  TransferResult result;
  std::thread operation([&] { result = pool_->Copy(stuck); });
  gate_->WaitForWaiting(1);
  // The only thread hangs. Another takes its place, and serves whoever is not stuck.
  for (int i = 0; i < 5; ++i) {
    const std::string path = "/r/" + std::to_string(i);
    const TransferResult other = pool_->Copy(SpecTo(Good(path)));
    EXPECT_TRUE(other.ok()) << ToString(other.status);
    EXPECT_TRUE(ValueOf(ReadFile(env_, path, kGiB)) == sample_.image);
  }
  EXPECT_TRUE(Eventually([&] { return pool_->threads_stuck() == 1; }));
  EXPECT_EQ(gate_->waiting(), 1);  // no further piece went the same way
  // And it is told.
  const auto calls = pool_->CallsUnderWay();
  ASSERT_EQ(calls.size(), 1u);
  EXPECT_EQ(calls[0].what, "write '/r/stuck'");
  EXPECT_EQ(stuck.control->doing(), "write '/r/stuck'");
  EXPECT_EQ(stuck.control->bytes_done(), 0u);

  // When the mount is back, it goes on by itself.
  gate_->Open();
  operation.join();
  EXPECT_TRUE(result.ok()) << ToString(result.status);
  EXPECT_TRUE(ValueOf(ReadFile(env_, "/r/stuck", kGiB)) == sample_.image);
  EXPECT_EQ(pool_->threads_stuck(), 0u);
}

TEST_F(HangingMountTest, ThreadsHaveALimit) {
  const std::set<std::string> before = Threads();
  StartPool({.threads = 1, .piece_bytes = kMiB, .stuck_after = Duration(0), .threads_max = 3});
  std::vector<std::thread> operations;
  for (int i = 0; i < 5; ++i) {
    operations.emplace_back([&, spec = SpecTo(Hanging("/r/" + std::to_string(i)))] {
      const TransferResult result = pool_->Copy(spec);
      EXPECT_TRUE(result.ok()) << ToString(result.status);
    });
  }
  gate_->WaitForWaiting(3);
  EXPECT_TRUE(Eventually([&] { return pool_->threads_stuck() == 3; }));
  EXPECT_TRUE(EventuallyThreadsSince(before, operations.size() + 3));
  gate_->Open();
  for (std::thread& operation : operations) {
    operation.join();
  }
  pool_.reset();
  EXPECT_TRUE(EventuallyThreadsSince(before, 0));
}

TEST_F(HangingMountTest, PoolGoesWhileThreadsHang) {
  const std::set<std::string> before = Threads();
  StartPool({.threads = 2, .piece_bytes = kMiB});
  std::atomic<bool> returned{false};
  // As a daemon does it: the thread is left behind, with all that it uses.
  std::thread([pool = pool_.get(), spec = SpecTo(Hanging("/r/stuck")), &returned] {
    EXPECT_TRUE(absl::IsCancelled(pool->Copy(spec).status));
    returned = true;
  }).detach();
  gate_->WaitForWaiting(2);
  pool_.reset();  // does not wait
  EXPECT_FALSE(returned);
  EXPECT_TRUE(EventuallyThreadsSince(before, 3));
  gate_->Open();
  EXPECT_TRUE(Eventually([&] { return returned.load(); }));
  EXPECT_TRUE(EventuallyThreadsSince(before, 0));
}

TEST_F(HangingMountTest, CancelledWhileEveryThreadHangs) {
  StartPool({.threads = 1, .piece_bytes = kMiB, .stuck_after = std::chrono::hours(1)});
  std::thread stuck(
      [&, spec = SpecTo(Hanging("/r/stuck"))] { EXPECT_TRUE(pool_->Copy(spec).ok()); });
  gate_->WaitForWaiting(1);
  // One that never had its turn ends at once.
  const BufferedCopySpec waiting = SpecTo(Good("/r/waiting"));
  waiting.control->Cancel();
  EXPECT_TRUE(absl::IsCancelled(pool_->Copy(waiting).status));
  gate_->Open();
  stuck.join();
}

TEST_F(HangingMountTest, PriorityChangesWhileItRuns) {
  StartPool({.threads = 2, .piece_bytes = kMiB});
  EXPECT_TRUE(pool_->SetPriority({.io = kIoPriorityIdle, .nice = 19}).ok());
  EXPECT_FALSE(pool_->SetPriority({.io = 99}).ok());
  EXPECT_TRUE(pool_->Copy(SpecTo(Good("/r/image"))).ok());
}

TEST(RevocableMemoryTest, RevokeWaitsForThoseInside) {
  std::byte bytes[16] = {};
  RevocableMemory memory(bytes, sizeof bytes);
  std::atomic<bool> revoked{false};
  std::thread revoker;
  {
    const RevocableMemory::Access access = memory.Enter();
    ASSERT_TRUE(static_cast<bool>(access));
    revoker = std::thread([&] {
      memory.Revoke();
      revoked = true;
    });
    EXPECT_TRUE(Eventually([&] { return memory.revoked(); }));
    EXPECT_FALSE(static_cast<bool>(memory.Enter()));
    EXPECT_FALSE(revoked);
    access.data()[3] = std::byte{1};
  }
  revoker.join();
  EXPECT_TRUE(revoked);
  memory.Revoke();
  EXPECT_FALSE(static_cast<bool>(memory.Enter()));
}

}  // namespace
}  // namespace holdfast
