// What a node reads from the remote tier, for others: as it comes, and never other bytes.
#include "server/runtime/passed_on.h"

#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <numeric>

#include "base/clock.h"
#include "base/process.h"
#include "tests/tiers/memory/memory_harness.h"

namespace holdfast {
namespace {

constexpr uint64_t kPart = uint64_t{1} << 20;
constexpr SlotId kIn = 3;

MonotonicTime Soon() {
  return Clock::System()->Now() + std::chrono::seconds(30);
}
MonotonicTime Past() {
  return Clock::System()->Now();
}
bool Stays() {
  return false;
}

// A file of two parts and a bit, whose bytes lie in memory behind 4096 others.
class PassedOnTest : public ::testing::Test {
 protected:
  static constexpr uint64_t kBytes = 2 * kPart + 100;
  static constexpr uint64_t kBefore = 4096;

  PassedOnTest() : bytes_(kBefore + kBytes) {
    for (size_t i = 0; i < bytes_.size(); ++i) {
      bytes_[i] = std::byte(i * 7 % 251);
    }
    auto places = std::make_shared<ImageMap>();
    places->image_bytes = kBytes;
    places->runs = {{0, kBytes, 0, kBefore}};
    memory_ = std::make_shared<RevocableMemory>(bytes_.data(), bytes_.size());
    file_ = std::make_shared<PassedOnFile>(nullptr, kIn, 1, places, memory_);
  }
  // What is read; empty: it could not be.
  absl::StatusOr<std::vector<std::byte>> Read(uint64_t offset, uint64_t bytes,
                                              MonotonicTime until) {
    std::vector<std::byte> out(bytes);
    const absl::Status read = file_->Read(offset, out, until, Stays);
    return read.ok() ? absl::StatusOr<std::vector<std::byte>>(out) : read;
  }
  std::vector<std::byte> Expected(uint64_t offset, uint64_t bytes) const {
    const auto at = bytes_.begin() + static_cast<std::ptrdiff_t>(kBefore + offset);
    return {at, at + static_cast<std::ptrdiff_t>(bytes)};
  }

  std::vector<std::byte> bytes_;
  std::shared_ptr<RevocableMemory> memory_;
  std::shared_ptr<PassedOnFile> file_;
  PassedOn passed_on_;
  const ShardId shard_{JobUuid(), 1, 5, 2};
};

TEST_F(PassedOnTest, WhatHasArrivedIsReadAndNothingElse) {
  file_->Arrived(kPart, kPart);
  const auto second = Read(kPart + 10, kPart - 10, Past());
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_EQ(*second, Expected(kPart + 10, kPart - 10));
  EXPECT_TRUE(absl::IsUnavailable(Read(kPart - 1, 2, Past()).status()));
  // A part that has come in half is none.
  file_->Arrived(0, kPart / 2);
  EXPECT_TRUE(absl::IsUnavailable(Read(0, 1, Past()).status()));
  file_->Arrived(kPart / 2, kPart / 2);
  EXPECT_TRUE(Read(0, 2 * kPart, Past()).ok());
  // The last one is shorter.
  EXPECT_TRUE(absl::IsUnavailable(Read(2 * kPart, 100, Past()).status()));
  file_->Arrived(2 * kPart, 100);
  EXPECT_EQ(Read(0, kBytes, Past()).value(), Expected(0, kBytes));
}

TEST_F(PassedOnTest, MoreThanThereIsIsRefused) {
  file_->Arrived(0, kBytes);
  EXPECT_TRUE(absl::IsInvalidArgument(Read(kBytes, 1, Past()).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(Read(UINT64_MAX, 2, Past()).status()));
  EXPECT_TRUE(Read(kBytes, 0, Past()).ok());
}

TEST_F(PassedOnTest, WhoWaitsHearsOfWhatArrivesAndOfTheEnd) {
  auto first = std::async(std::launch::async, [&] { return Read(0, kPart, Soon()).status(); });
  auto last = std::async(std::launch::async, [&] { return Read(kPart, kPart, Soon()).status(); });
  file_->Arrived(0, kPart);
  EXPECT_TRUE(first.get().ok());
  file_->End(false);
  EXPECT_TRUE(absl::IsUnavailable(last.get()));
}

TEST_F(PassedOnTest, WhoIsGoneWaitsNoLonger) {
  std::vector<std::byte> out(1);
  EXPECT_TRUE(absl::IsCancelled(file_->Read(0, out, Soon(), [] { return true; })));
  EXPECT_TRUE(absl::IsCancelled(passed_on_.Await(shard_, Soon(), [] { return true; }).status()));
}

TEST_F(PassedOnTest, OfASlotThatWasTakenBackNothingIsRead) {
  file_->Arrived(0, kBytes);
  memory_->Revoke();
  EXPECT_TRUE(absl::IsUnavailable(Read(0, 1, Soon()).status()));
}

TEST_F(PassedOnTest, OneThatEndedForNothingIsNotTheOneThatIsWaitedFor) {
  passed_on_.Begin(shard_, file_);
  EXPECT_EQ(passed_on_.Await(shard_, Past(), Stays).value(), file_);
  file_->End(false);
  EXPECT_TRUE(absl::IsUnavailable(passed_on_.Await(shard_, Past(), Stays).status()));
  auto waits =
      std::async(std::launch::async, [&] { return passed_on_.Await(shard_, Soon(), Stays); });
  auto places = std::make_shared<ImageMap>();
  const auto next = std::make_shared<PassedOnFile>(nullptr, kIn, 2, places, memory_);
  passed_on_.Begin(shard_, next);
  EXPECT_EQ(waits.get().value(), next);
}

TEST_F(PassedOnTest, WhatIsSealedIsReadFromItsSlotUntilThatIsRefilled) {
  const SharedMemoryDirectory dir;
  auto opened = SlotStore::Open(StoreOptions(*Env::System(), dir.path()));
  ASSERT_TRUE(opened.ok()) << opened.status();
  const std::shared_ptr<SlotStore> slots = *std::move(opened);
  ASSERT_TRUE(slots->Scan().ok());
  const SlotContent content = MakeSlotContent(5, 1);
  ASSERT_TRUE(SealSlot(*slots, kIn, content).ok());
  const std::string& image = content.sample.image;
  auto places = std::make_shared<ImageMap>();
  places->image_bytes = image.size() - 4096;
  places->runs = {{0, image.size() - 4096, 0, 4096}};
  file_ = std::make_shared<PassedOnFile>(slots, kIn, 1, places, memory_);
  passed_on_.Begin(content.expected.id, file_);
  file_->End(true);
  const auto read = Read(10, 50, Past());
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(std::memcmp(read->data(), image.data() + 4106, 50), 0);
  EXPECT_TRUE(passed_on_.Await(content.expected.id, Past(), Stays).ok());
  // The same shard again, by another filling: that may have come from anywhere.
  ASSERT_TRUE(slots->RemoveRecord(kIn).ok());
  EXPECT_TRUE(absl::IsUnavailable(Read(10, 50, Past()).status()));
  EXPECT_FALSE(passed_on_.Await(content.expected.id, Past(), Stays).ok());
}

}  // namespace
}  // namespace holdfast
