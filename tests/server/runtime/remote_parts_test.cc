// Parts of files in the remote tier, read once for all who want them.
#include "server/runtime/remote_parts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <deque>
#include <random>
#include <thread>
#include <vector>

namespace holdfast {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kPage = RemoteParts::kPageBytes;

MonotonicTime Soon(int seconds = 30) {
  return Clock::System()->Now() + std::chrono::seconds(seconds);
}
bool Never() {
  return false;
}

// A remote tier with one file of so many bytes. What is asked of it is done when the test says so,
// or at once.
class RemotePartsTest : public ::testing::Test {
 protected:
  void Make(uint64_t bytes, uint64_t bytes_max = uint64_t{1} << 30) {
    std::mt19937_64 random(bytes);
    content_.resize(bytes);
    for (char& each : content_) {
      each = static_cast<char>(random());
    }
    RemoteParts::Options options;
    options.run = [this](RemoteParts::Work work) {
      if (hold_) {
        held_.push_back(std::move(work));
      } else {
        work(true);
      }
    };
    options.open = [this](
                       const CopyKey&,
                       bool /*whole*/) -> absl::StatusOr<std::shared_ptr<const RemoteParts::Copy>> {
      ++opened_;
      if (!refusal_.ok()) {
        return refusal_;
      }
      auto copy = std::make_shared<RemoteParts::Copy>();
      copy->record = "record";
      copy->bytes = content_.size();
      copy->read = [this](uint64_t offset, std::span<std::byte> into) {
        ++reads_;
        longest_ = std::max<uint64_t>(longest_, into.size());
        if (!trouble_.ok()) {
          return std::exchange(trouble_, absl::OkStatus());
        }
        std::memcpy(into.data(), content_.data() + offset, into.size());
        return absl::OkStatus();
      };
      return std::shared_ptr<const RemoteParts::Copy>(copy.get(),
                                                      [this, copy](const auto*) mutable {
                                                        ++closed_;
                                                        copy.reset();
                                                      });
    };
    options.bytes_max = bytes_max;
    parts_ = std::make_shared<RemoteParts>(std::move(options));
  }
  std::shared_ptr<RemotePartFile> Open(Rank rank = 0) {
    CopyKey key;
    key.id.rank = rank;
    auto file = parts_->Open(key, false, Soon(), Never);
    EXPECT_TRUE(file.ok()) << file.status();
    return file.ok() ? *file : nullptr;
  }
  absl::Status Read(const std::shared_ptr<RemotePartFile>& file, uint64_t offset, uint64_t bytes) {
    std::string into(bytes, '\0');
    const absl::Status read =
        parts_->Read(file, offset, std::as_writable_bytes(std::span(into)), Soon(), Never);
    EXPECT_TRUE(!read.ok() || into == content_.substr(offset, bytes))
        << bytes << " from " << offset << " on";
    return read;
  }
  void RunHeld() {
    std::deque<RemoteParts::Work> held = std::exchange(held_, {});
    for (const RemoteParts::Work& work : held) {
      work(true);
    }
  }

  std::string content_;
  absl::Status refusal_;
  absl::Status trouble_;  // of the next read
  bool hold_ = false;
  std::deque<RemoteParts::Work> held_;
  int opened_ = 0;
  int closed_ = 0;
  int reads_ = 0;
  uint64_t longest_ = 0;
  std::shared_ptr<RemoteParts> parts_;
};

TEST_F(RemotePartsTest, EachByteIsReadOnceAndNothingThatNobodyWants) {
  Make(100 * kPage + 7);
  const auto file = Open();
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(Read(file, 10 * kPage, 5 * kPage).ok());
    ASSERT_TRUE(Read(file, 12 * kPage + 1, 10).ok());
    ASSERT_TRUE(Read(file, 14 * kPage, 2 * kPage).ok());
    ASSERT_TRUE(Read(file, 100 * kPage + 6, 1).ok());
  }
  EXPECT_EQ(parts_->bytes_read(), 6 * kPage + 7);
  EXPECT_EQ(parts_->bytes(), 6 * kPage + 7);
  EXPECT_EQ(Open(), file) << "it is one for all";
  EXPECT_EQ(opened_, 1);
}

TEST_F(RemotePartsTest, LongOnesAreReadInPiecesAtATime) {
  Make(256 * kPage);
  const auto file = Open();
  hold_ = true;
  parts_->Want(file, 0, 256 * kPage);
  EXPECT_EQ(held_.size(), 256 * kPage / RemoteParts::kReadBytesMax);
  parts_->Want(file, 0, 256 * kPage);
  EXPECT_EQ(held_.size(), 256 * kPage / RemoteParts::kReadBytesMax) << "they are on their way";
  RunHeld();
  ASSERT_TRUE(Read(file, 0, 256 * kPage).ok());
  EXPECT_LE(longest_, RemoteParts::kReadBytesMax);
  EXPECT_EQ(parts_->bytes_read(), 256 * kPage);
}

TEST_F(RemotePartsTest, WhoeverWantsTheSameWaitsForTheOneReading) {
  Make(4 * kPage);
  const auto file = Open();
  hold_ = true;
  std::vector<std::thread> readers;
  std::atomic<int> begun{0};
  parts_->Want(file, 0, 4 * kPage);
  ASSERT_EQ(held_.size(), 1u);
  for (int i = 0; i < 4; ++i) {
    readers.emplace_back([&] {
      ++begun;
      EXPECT_TRUE(Read(file, 0, 4 * kPage).ok());
    });
  }
  while (begun < 4) {
    std::this_thread::yield();
  }
  RunHeld();
  for (std::thread& reader : readers) {
    reader.join();
  }
  EXPECT_EQ(parts_->bytes_read(), 4 * kPage);
}

TEST_F(RemotePartsTest, WhatHasNoRoomAnyMoreIsReadAgain) {
  Make(64 * kPage, 8 * kPage);
  const auto file = Open();
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(Read(file, 0, 64 * kPage).ok()) << "more than is kept, at once";
    EXPECT_LE(parts_->bytes(), 8 * kPage);
  }
  EXPECT_GE(parts_->bytes_read(), 2 * 56 * kPage);
  // The last that was used stays longest.
  ASSERT_TRUE(Read(file, 0, kPage).ok());
  ASSERT_TRUE(Read(file, 10 * kPage, 7 * kPage).ok());
  ASSERT_TRUE(Read(file, 0, kPage).ok());
  ASSERT_TRUE(Read(file, 20 * kPage, 7 * kPage).ok());
  const int reads = reads_;
  ASSERT_TRUE(Read(file, 0, kPage).ok());
  EXPECT_EQ(reads_, reads);
}

TEST_F(RemotePartsTest, AnErrorIsToldAndTheNextTryReadsAnew) {
  Make(4 * kPage);
  const auto file = Open();
  trouble_ = absl::UnavailableError("input/output error");
  const absl::Status read = Read(file, 0, kPage);
  EXPECT_TRUE(absl::IsUnavailable(read));
  EXPECT_THAT(std::string(read.message()), HasSubstr("input/output error"));
  EXPECT_TRUE(Read(file, 0, kPage).ok());
  EXPECT_TRUE(absl::IsOutOfRange(Read(file, 4 * kPage, 1)));
  EXPECT_TRUE(absl::IsOutOfRange(Read(file, 4 * kPage + 1, 0)));
  EXPECT_TRUE(absl::IsOutOfRange(Read(file, 1, 4 * kPage)));
}

TEST_F(RemotePartsTest, AFileThatCannotBeOpenedIsTriedAgainWhenAskedAgain) {
  Make(kPage);
  refusal_ = absl::DataLossError("the record is torn");
  for (int i = 1; i <= 2; ++i) {
    EXPECT_TRUE(absl::IsDataLoss(parts_->Open(CopyKey{}, false, Soon(), Never).status()));
    EXPECT_EQ(opened_, i);
  }
  refusal_ = absl::OkStatus();
  EXPECT_NE(Open(), nullptr);
}

TEST_F(RemotePartsTest, NobodyWaitsForAMountThatHangs) {
  Make(4 * kPage);
  hold_ = true;
  const auto in_a_moment = [] { return Clock::System()->Now() + std::chrono::milliseconds(20); };
  EXPECT_TRUE(
      absl::IsDeadlineExceeded(parts_->Open(CopyKey{}, false, in_a_moment(), Never).status()));
  EXPECT_TRUE(
      absl::IsCancelled(parts_->Open(CopyKey{}, false, Soon(), [] { return true; }).status()));
  EXPECT_EQ(held_.size(), 1u) << "it is asked once";
  RunHeld();
  const auto file = Open();
  std::string into(10, '\0');
  const auto bytes = std::as_writable_bytes(std::span(into));
  EXPECT_TRUE(absl::IsDeadlineExceeded(parts_->Read(file, 0, bytes, in_a_moment(), Never)));
  EXPECT_TRUE(absl::IsCancelled(parts_->Read(file, 0, bytes, Soon(), [] { return true; })));
  EXPECT_EQ(held_.size(), 1u);
  RunHeld();
  EXPECT_TRUE(Read(file, 0, 10).ok()) << "it answers again";
}

TEST_F(RemotePartsTest, WhatIsWrongIsReadAnew) {
  Make(4 * kPage);
  const std::string good = content_;
  const auto file = Open();
  content_[100] = static_cast<char>(content_[100] ^ 1);
  ASSERT_TRUE(Read(file, 0, kPage).ok());
  content_ = good;
  parts_->Forget(*file, 90, 20);
  EXPECT_TRUE(Read(file, 0, 2 * kPage).ok());
}

TEST_F(RemotePartsTest, WhatNobodyUsesIsLetGoOf) {
  Make(4 * kPage);
  const MonotonicTime later = Clock::System()->Now() + RemoteParts::kLinger * 2;
  {
    const auto file = Open();
    ASSERT_TRUE(Read(file, 0, kPage).ok());
    parts_->Trim(later);
    EXPECT_EQ(parts_->bytes(), kPage) << "somebody has it";
  }
  parts_->Trim(Clock::System()->Now());
  EXPECT_EQ(parts_->bytes(), kPage) << "somebody may come for it";
  parts_->Trim(later);
  EXPECT_EQ(parts_->bytes(), 0u);
  EXPECT_EQ(closed_, 1);
}

TEST_F(RemotePartsTest, OneFailureIsNotThatOfOthers) {
  Make(200 * kPage);
  const auto file = Open();
  trouble_ = absl::UnavailableError("input/output error");
  parts_->Want(file, 0, kPage);
  EXPECT_TRUE(Read(file, 100 * kPage, kPage).ok());
  EXPECT_TRUE(Read(file, 0, kPage).ok()) << "it is tried again";
}

TEST_F(RemotePartsTest, SoManyFilesAreOpenBesideThoseInUse) {
  Make(kPage);
  const auto used = Open(0);
  for (Rank rank = 1; rank < 2 * RemoteParts::kFilesMax; ++rank) {
    ASSERT_NE(Open(rank), nullptr);
  }
  EXPECT_LE(parts_->files(), RemoteParts::kFilesMax + 2);
  EXPECT_EQ(Open(0), used);
}

TEST_F(RemotePartsTest, AnEndThatComesTooEarlyIsAnError) {
  Make(4 * kPage);
  const auto file = Open();
  hold_ = true;
  parts_->Want(file, 0, kPage);
  for (const RemoteParts::Work& work : std::exchange(held_, {})) {
    work(false);  // the daemon stops
  }
  hold_ = false;
  EXPECT_TRUE(Read(file, 0, kPage).ok()) << "nothing is left of it";
}

}  // namespace
}  // namespace holdfast
