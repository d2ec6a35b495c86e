// Images through compression and back: in any order, from several threads, in whole and in parts.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <atomic>
#include <cstdlib>
#include <numeric>
#include <random>
#include <set>
#include <thread>

#include "absl/strings/str_cat.h"
#include "base/errno_status.h"
#include "tests/tiers/compressed/compressed_harness.h"

namespace holdfast {
namespace {

constexpr uint64_t kSizes[] = {
    1, 4095, kFrameBytes - 1, kFrameBytes, kFrameBytes + 1, 5 * kFrameBytes + 13};

class CompressedFileTest : public testing::Test {
 protected:
  CompressedPlace place_;
};

TEST_F(CompressedFileTest, WhatGoesInComesOut) {
  for (const uint64_t bytes : kSizes) {
    for (const int level : {1, 3, 19}) {
      const std::string name = absl::StrCat(bytes, "-", level);
      const std::string image = HalfNoise(bytes, bytes);
      place_.Compress(name, image, level);
      const auto read = place_.Read(name, bytes);
      ASSERT_TRUE(read.ok()) << ToString(read.status());
      EXPECT_TRUE(*read == image) << name;
      EXPECT_TRUE(bytes < 4096 || place_.Content(name).size() < bytes * 3 / 4) << name;
    }
  }
}

// What cannot be compressed is a little longer, and no less readable.
TEST_F(CompressedFileTest, NoiseStaysNoise) {
  std::mt19937_64 random(7);
  std::string image(2 * kFrameBytes + 100, '\0');
  std::generate(image.begin(), image.end(), [&] { return static_cast<char>(random()); });
  place_.Compress("noise", image);
  EXPECT_GT(place_.Content("noise").size(), image.size());
  EXPECT_TRUE(place_.Read("noise", image.size()).value() == image);
}

// For whoever has nothing of ours: the image is what zstd makes of the file.
TEST_F(CompressedFileTest, ZstdGivesBackTheVeryFile) {
  const std::string image = HalfNoise(3 * kFrameBytes + 5);
  place_.Compress("image.zst", image);
  for (const char* command : {"zstd -q -t ", "zstd -q -d "}) {
    const int status = std::system((command + place_.PathOf("image.zst")).c_str());
    ASSERT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << command;
  }
  EXPECT_TRUE(place_.Content("image") == image);
}

TEST_F(CompressedFileTest, FramesMayComeInAnyOrderFromSeveralThreads) {
  const std::string image = HalfNoise(40 * kFrameBytes + 99);
  const uint64_t frames = FramesOf(image.size());
  std::vector<uint64_t> order(frames);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937_64(3));
  CompressingFile file(place_.Create("any"), image.size(), 1);
  std::atomic<size_t> next{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (size_t at = next++; at < frames; at = next++) {
        const uint64_t offset = order[at] * kFrameBytes;
        const absl::Status written = file.WriteAt(
            offset, BytesOf(image, offset, std::min(kFrameBytes, image.size() - offset)));
        EXPECT_TRUE(written.ok()) << ToString(written);
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  ASSERT_TRUE(file.Finish().ok());
  EXPECT_EQ(file.stored_bytes(), place_.Content("any").size());
  std::string read(image.size(), '\0');
  ASSERT_TRUE(file.ReadAt(0, std::as_writable_bytes(std::span(read))).ok()) << "read back";
  EXPECT_TRUE(read == image);
  EXPECT_TRUE(place_.Read("any", image.size()).value() == image);
}

// In the file they lie in the image's order: one that is ahead waits for those in front of it.
TEST_F(CompressedFileTest, WhatIsAheadWaits) {
  const std::string image = HalfNoise(3 * kFrameBytes);
  CompressingFile file(place_.Create("ahead"), image.size(), 1);
  for (const uint64_t frame : {2, 1}) {
    ASSERT_TRUE(
        file.WriteAt(frame * kFrameBytes, BytesOf(image, frame * kFrameBytes, kFrameBytes)).ok());
    EXPECT_EQ(place_.Content("ahead").size(), 0u);
  }
  EXPECT_TRUE(absl::IsFailedPrecondition(file.Finish())) << "one is missing";
  ASSERT_TRUE(file.WriteAt(0, BytesOf(image, 0, kFrameBytes)).ok());
  EXPECT_GT(place_.Content("ahead").size(), kFrameBytes);
  ASSERT_TRUE(file.Finish().ok());
  ASSERT_TRUE(file.Finish().ok()) << "again: nothing";
  EXPECT_EQ(place_.Content("ahead").size(), file.stored_bytes());
  EXPECT_TRUE(place_.Read("ahead", image.size()).value() == image);
}

TEST_F(CompressedFileTest, FramesAreWrittenWholeAndOnce) {
  const std::string image = HalfNoise(2 * kFrameBytes + 10);
  CompressingFile file(place_.Create("frames"), image.size(), 1);
  const auto write = [&](uint64_t offset, uint64_t bytes) {
    return file.WriteAt(offset, BytesOf(image, offset, bytes));
  };
  EXPECT_TRUE(absl::IsInvalidArgument(write(0, kFrameBytes - 1)));
  EXPECT_TRUE(absl::IsInvalidArgument(write(1, kFrameBytes)));
  EXPECT_TRUE(absl::IsInvalidArgument(write(2 * kFrameBytes, 9)));
  EXPECT_TRUE(absl::IsInvalidArgument(file.WriteAt(3 * kFrameBytes, BytesOf(image, 0, 10))));
  ASSERT_TRUE(write(0, kFrameBytes).ok());
  EXPECT_TRUE(absl::IsInvalidArgument(write(0, kFrameBytes))) << "it has its place";
  ASSERT_TRUE(write(2 * kFrameBytes, 10).ok());
  EXPECT_TRUE(absl::IsInvalidArgument(write(2 * kFrameBytes, 10))) << "it waits for its place";
  EXPECT_TRUE(absl::IsFailedPrecondition(file.ReadAt(0, {})));
}

TEST_F(CompressedFileTest, WhatTheFileRefusesIsTold) {
  const std::string image = HalfNoise(2 * kFrameBytes);
  for (const int refused : {1, 2, 3}) {
    auto watched = std::make_unique<WatchedFile>(
        place_.Create(absl::StrCat("refusing-", refused)), [refused](int call) {
          return call == refused ? absl::ResourceExhaustedError("no space") : absl::OkStatus();
        });
    CompressingFile file(std::move(watched), image.size(), 1);
    absl::Status status;
    for (uint64_t at = 0; at < image.size() && status.ok(); at += kFrameBytes) {
      status = file.WriteAt(at, BytesOf(image, at, kFrameBytes));
    }
    status = status.ok() ? file.Finish() : status;
    EXPECT_TRUE(absl::IsResourceExhausted(status)) << refused << ": " << ToString(status);
  }
}

// ---- In parts ----

class CompressedPartsTest : public CompressedFileTest {
 protected:
  void SetUp() override { place_.Compress("parts", image_); }
  // Open, and counting what is read of it.
  std::unique_ptr<CompressedFile> OpenCounted() {
    auto counted = std::make_unique<WatchedFile>(place_.OpenPlain("parts"), [this](int) {
      ++reads_;
      return absl::OkStatus();
    });
    auto file = ValueOf(CompressedFile::Open(std::move(counted), image_.size()));
    reads_ = 0;
    return file;
  }
  void ExpectRead(File& file, uint64_t offset, uint64_t bytes) {
    std::string read(bytes, '\0');
    const absl::Status status = file.ReadAt(offset, std::as_writable_bytes(std::span(read)));
    ASSERT_TRUE(status.ok()) << ToString(status);
    EXPECT_TRUE(read == image_.substr(offset, bytes)) << offset << "+" << bytes;
  }

  const std::string image_ = HalfNoise(9 * kFrameBytes + 777);
  std::atomic<int> reads_{0};
};

TEST_F(CompressedPartsTest, OnlyTheFramesThatAreTouchedAreRead) {
  const auto file = OpenCounted();
  ExpectRead(*file, 4 * kFrameBytes + 5, 100);
  EXPECT_EQ(reads_, 1);
  ExpectRead(*file, 4 * kFrameBytes + 5000, 70'000);
  EXPECT_EQ(reads_, 1) << "it was at hand";
  ExpectRead(*file, 2 * kFrameBytes, 2 * kFrameBytes);
  EXPECT_EQ(reads_, 3) << "two whole ones";
  ExpectRead(*file, 5 * kFrameBytes - 10, 20);
  EXPECT_EQ(reads_, 4) << "the end of the one at hand, and the next one";
  ExpectRead(*file, 9 * kFrameBytes + 770, 7);
  EXPECT_EQ(reads_, 5);
  ExpectRead(*file, image_.size(), 0);
  EXPECT_EQ(reads_, 5);
}

// Pieces that begin amid frames, of as many threads as read one file.
TEST_F(CompressedPartsTest, AFewFramesStayAtHand) {
  const auto file = OpenCounted();
  for (int round = 0; round < 3; ++round) {
    for (uint64_t frame = 0; frame < kFramesAtHand; ++frame) {
      ExpectRead(*file, frame * kFrameBytes + 100, 1000);
    }
  }
  EXPECT_EQ(reads_, static_cast<int>(kFramesAtHand));
  ExpectRead(*file, kFramesAtHand * kFrameBytes + 1, 10);
  ExpectRead(*file, kFrameBytes + 1, 10);
  EXPECT_EQ(reads_, static_cast<int>(kFramesAtHand) + 1);
  ExpectRead(*file, 1, 10);
  EXPECT_EQ(reads_, static_cast<int>(kFramesAtHand) + 2) << "it was the one that nobody had wanted";
}

TEST_F(CompressedPartsTest, AnyPartsFromSeveralThreads) {
  const auto file = OpenCounted();
  std::vector<std::thread> threads;
  for (uint64_t seed = 0; seed < 4; ++seed) {
    threads.emplace_back([&, seed] {
      std::mt19937_64 random(seed);
      for (int i = 0; i < 60; ++i) {
        const uint64_t offset = random() % image_.size();
        const uint64_t longest = std::min<uint64_t>(image_.size() - offset, 3 * kFrameBytes);
        ExpectRead(*file, offset, random() % (longest + 1));
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

// However often it is wanted: somebody who asks for a page at a time would have it unpacked for
// each of them.
TEST_F(CompressedPartsTest, AFrameThatIsBadIsUnpackedOnce) {
  const uint64_t stored = place_.Content("parts").size();
  FlipBitIn(*place_.OpenPlain("parts"), stored / 2);
  const auto file = OpenCounted();
  constexpr uint64_t kPage = uint64_t{64} << 10;
  std::string page(kPage, '\0');
  std::set<uint64_t> bad;
  std::string said;
  for (int round = 0; round < 2; ++round) {
    for (uint64_t at = 0; at + kPage <= image_.size(); at += kPage) {
      const absl::Status read = file->ReadAt(at, std::as_writable_bytes(std::span(page)));
      if (!read.ok()) {
        EXPECT_TRUE(absl::IsDataLoss(read)) << ToString(read);
        said = said.empty() ? std::string(read.message()) : said;
        EXPECT_EQ(read.message(), said) << "the same each time";
        bad.insert(at / kFrameBytes);
      }
    }
  }
  ASSERT_EQ(bad.size(), 1u);
  const auto frames = static_cast<int>(FramesOf(image_.size()));
  // The others are at hand for as long as pages of one are wanted; the last one has no whole page.
  EXPECT_EQ(reads_, 2 * (frames - 2) + 1);
  std::string whole(kFrameBytes, '\0');
  EXPECT_TRUE(absl::IsDataLoss(
      file->ReadAt(*bad.begin() * kFrameBytes, std::as_writable_bytes(std::span(whole)))));
  EXPECT_EQ(reads_, 2 * (frames - 2) + 1) << "nor as a whole";
}

// What a mount could not read just now says nothing of the frame.
TEST_F(CompressedPartsTest, WhatFailedToBeReadIsReadAgain) {
  int fails = 0;
  auto failing = std::make_unique<WatchedFile>(place_.OpenPlain("parts"), [&](int) {
    return fails-- > 0 ? ErrnoStatus(EIO, "read", "parts") : absl::OkStatus();
  });
  const auto file = ValueOf(CompressedFile::Open(std::move(failing), image_.size()));
  std::string some(100, '\0');
  fails = 1;
  EXPECT_FALSE(file->ReadAt(kFrameBytes, std::as_writable_bytes(std::span(some))).ok());
  ExpectRead(*file, kFrameBytes, 100);
}

TEST_F(CompressedPartsTest, BeyondTheImageThereIsNothing) {
  const auto file = OpenCounted();
  std::string some(10, '\0');
  const std::span<std::byte> into = std::as_writable_bytes(std::span(some));
  EXPECT_TRUE(absl::IsOutOfRange(file->ReadAt(image_.size() - 9, into)));
  EXPECT_TRUE(absl::IsOutOfRange(file->ReadAt(~uint64_t{0} - 3, into)));
  EXPECT_EQ(reads_, 0);
}

TEST_F(CompressedPartsTest, ItIsAsLongAsTheImageUntilSomebodyCutsIt) {
  const auto file = ValueOf(place_.Open("parts", image_.size()));
  EXPECT_EQ(ValueOf(file->Info()).bytes, image_.size());
  EXPECT_EQ(file->stored_bytes(), place_.Content("parts").size());
  EXPECT_FALSE(file->WriteAt(0, BytesOf(image_, 0, kFrameBytes)).ok()) << "it is read only";
  const auto plain = place_.OpenPlain("parts");
  ASSERT_TRUE(plain->Truncate(file->stored_bytes() - 1).ok());
  EXPECT_TRUE(absl::IsDataLoss(file->Info().status()));
  ASSERT_TRUE(plain->Truncate(file->stored_bytes() + 1).ok());
  EXPECT_TRUE(absl::IsDataLoss(file->Info().status()));
  ASSERT_TRUE(plain->Truncate(kFrameBytes).ok());
  std::string all(image_.size(), '\0');
  EXPECT_TRUE(absl::IsDataLoss(file->ReadAt(0, std::as_writable_bytes(std::span(all)))));
}

}  // namespace
}  // namespace holdfast
