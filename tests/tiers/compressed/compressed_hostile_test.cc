// Files that are damaged, cut, or made by somebody who means harm: what is read is the image or an
// error, whatever it takes.
#include <gtest/gtest.h>
#include <zstd.h>

#include <random>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/tiers/compressed/compressed_harness.h"
#include "tiers/compressed/frame_codec.h"

namespace holdfast {
namespace {

class CompressedHostileTest : public testing::Test {
 protected:
  void SetUp() override {
    // Small frames in the file, so that every bit of it can be flipped: long runs of a few values.
    for (uint64_t i = 0; i < image_.size(); ++i) {
      image_[i] = static_cast<char>(i / 60'000);
    }
    place_.Compress("good", image_, 1);
    good_ = place_.Content("good");
    table_at_ = good_.size() - SeekTableBytes(FramesOf(image_.size()));
    ASSERT_LT(good_.size(), 4096u);
  }
  // DataLoss, or the image.
  void Expect(const std::string& content, const std::string& what, bool must_fail) {
    place_.Write("bad", content);
    const auto read = place_.Read("bad", image_.size());
    if (read.ok()) {
      EXPECT_FALSE(must_fail) << what;
      EXPECT_TRUE(*read == image_) << what << ": other bytes, and nobody says so";
      return;
    }
    EXPECT_TRUE(absl::IsDataLoss(read.status())) << what << ": " << ToString(read.status());
    EXPECT_TRUE(absl::StrContains(read.status().message(), place_.PathOf("bad")))
        << ToString(read.status());
  }
  // The file with another frame in place of the first one, and a table that fits.
  std::string WithFirstFrame(const std::string& frame) {
    std::vector<uint32_t> sizes;
    const auto file = ValueOf(place_.Open("good", image_.size()));
    const SeekTable table =
        ValueOf(DecodeSeekTable(good_.substr(table_at_), good_.size(), image_.size()));
    for (uint64_t i = 0; i < table.frames(); ++i) {
      sizes.push_back(static_cast<uint32_t>(table.frame(i).stored_bytes));
    }
    const std::string rest = good_.substr(sizes[0], table_at_ - sizes[0]);
    sizes[0] = static_cast<uint32_t>(frame.size());
    return frame + rest + EncodeSeekTable(image_.size(), sizes);
  }
  static std::string Compressed(const std::string& content) {
    std::string out(ZSTD_compressBound(content.size()), '\0');
    out.resize(ZSTD_compress(out.data(), out.size(), content.data(), content.size(), 1));
    return out;
  }

  CompressedPlace place_;
  std::string image_ = std::string(2 * kFrameBytes + 500, '\0');
  std::string good_;
  uint64_t table_at_ = 0;
};

TEST_F(CompressedHostileTest, EveryFlippedBitIsNoticedOrHarmless) {
  for (size_t at = 0; at < good_.size(); ++at) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string bad = good_;
      bad[at] = static_cast<char>(bad[at] ^ (1 << bit));
      Expect(bad, absl::StrCat("bit ", bit, " of byte ", at), at >= table_at_);
      if (HasFailure()) {
        return;
      }
    }
  }
}

TEST_F(CompressedHostileTest, EveryCutIsNoticed) {
  for (size_t bytes = 0; bytes < good_.size(); ++bytes) {
    Expect(good_.substr(0, bytes), absl::StrCat("cut to ", bytes), true);
  }
  for (const size_t more : {1, 9, 4096}) {
    Expect(good_ + std::string(more, '\0'), absl::StrCat("extended by ", more), true);
  }
}

// The table is looked for where that length has it.
TEST_F(CompressedHostileTest, OfAnotherLengthThanTheRecordSays) {
  for (const uint64_t bytes : {uint64_t{1}, kFrameBytes, image_.size() - 1, image_.size() + 1,
                               3 * kFrameBytes, uint64_t{1} << 50}) {
    const auto opened = place_.Open("good", bytes);
    EXPECT_TRUE(absl::IsDataLoss(opened.status())) << bytes << ": " << ToString(opened.status());
  }
}

TEST_F(CompressedHostileTest, TablesThatLie) {
  const std::string table = good_.substr(table_at_);
  const auto decode = [&](std::string bytes) {
    return DecodeSeekTable(bytes, good_.size(), image_.size()).status();
  };
  ASSERT_TRUE(decode(table).ok());
  EXPECT_TRUE(absl::IsDataLoss(decode("")));
  EXPECT_TRUE(absl::IsDataLoss(decode(table + "x")));
  // Two frames' lengths that make the same sum.
  std::string swapped = table;
  std::swap_ranges(swapped.begin() + 8, swapped.begin() + 12, swapped.begin() + 24);
  place_.Write("swapped", good_.substr(0, table_at_) + swapped);
  const auto read = place_.Read("swapped", image_.size());
  EXPECT_TRUE(absl::IsDataLoss(read.status())) << ToString(read.status());
  // Lengths of nothing, and longer than any frame is.
  for (const uint32_t bytes : {uint32_t{0}, static_cast<uint32_t>(kStoredFrameBytesMax + 1)}) {
    const std::vector<uint32_t> sizes = {bytes, 5, 6};
    const std::string lie = EncodeSeekTable(image_.size(), sizes);
    EXPECT_TRUE(
        absl::IsDataLoss(DecodeSeekTable(lie, bytes + 11 + lie.size(), image_.size()).status()));
  }
}

// Of the longest image there may be, in a file that is mostly holes: nothing is read, and no memory
// taken, beyond what has shown to be a table so far.
class HugeTableTest : public CompressedHostileTest {
 protected:
  static constexpr uint64_t kHuge = uint64_t{1} << 46;

  class Counted : public ForwardingFile {
   public:
    Counted(std::unique_ptr<File> file, uint64_t& bytes)
        : ForwardingFile(std::move(file)), bytes_(bytes) {}
    absl::Status ReadAt(uint64_t offset, std::span<std::byte> out) override {
      bytes_ += out.size();
      return ForwardingFile::ReadAt(offset, out);
    }

   private:
    uint64_t& bytes_;
  };

  // A hole of `bytes`, then a table of that image with only those parts of it written.
  void Make(uint64_t bytes) {
    Env::System()->Unlink(place_.PathOf("huge")).IgnoreError();
    file_ = place_.Create("huge");
    table_at_ = bytes;
    file_bytes_ = bytes + SeekTableBytes(FramesOf(kHuge));
    ASSERT_TRUE(file_->Truncate(file_bytes_).ok());
  }
  void Put(uint64_t offset, const std::string& text) {
    ASSERT_TRUE(file_->WriteAt(offset, std::as_bytes(std::span(text))).ok());
  }
  static std::string Number(uint64_t number) {
    std::string text;
    for (int shift = 0; shift < 32; shift += 8) {
      text.push_back(static_cast<char>(number >> shift));
    }
    return text;
  }
  void PutFooter(uint64_t frames) {
    Put(file_bytes_ - 9, Number(frames) + '\0' + Number(0x8F92EAB1));
  }
  void PutHeader() { Put(table_at_, Number(0x184D2A5E) + Number(file_bytes_ - table_at_ - 8)); }
  // How much of it was read until it was refused.
  uint64_t ReadUntilRefused() {
    uint64_t read = 0;
    Counted counted(place_.OpenPlain("huge"), read);
    const absl::Status status = ReadSeekTable(counted, file_bytes_, kHuge).status();
    EXPECT_TRUE(absl::IsDataLoss(status)) << ToString(status);
    EXPECT_TRUE(absl::StrContains(status.message(), place_.PathOf("huge"))) << ToString(status);
    return read;
  }

  std::unique_ptr<File> file_;
  uint64_t file_bytes_ = 0;
};

TEST_F(HugeTableTest, TheEndIsLookedAtFirst) {
  Make(uint64_t{1} << 40);
  EXPECT_LE(ReadUntilRefused(), 9u) << "nothing but a hole";
  PutFooter(5);
  EXPECT_LE(ReadUntilRefused(), 9u) << "of another image";
  PutFooter(FramesOf(kHuge));
  EXPECT_LE(ReadUntilRefused(), 17u) << "it has no beginning";
}

TEST_F(HugeTableTest, NothingIsTakenForEntriesThatAreNotThere) {
  constexpr uint64_t kALittle = uint64_t{1} << 18;
  Make(uint64_t{1} << 40);
  PutFooter(FramesOf(kHuge));
  PutHeader();
  EXPECT_LE(ReadUntilRefused(), kALittle);
  std::string entries;
  for (uint64_t i = 0; i < kALittle / 8; ++i) {
    entries += Number(1000) + Number(kFrameBytes);
  }
  Put(table_at_ + 8, entries);
  EXPECT_LE(ReadUntilRefused(), 2 * kALittle + 17);
  // Of frames that would not fit in front of it.
  Make(kALittle);
  PutFooter(FramesOf(kHuge));
  PutHeader();
  Put(table_at_ + 8, entries);
  EXPECT_LE(ReadUntilRefused(), kALittle);
}

// A few bytes that are a gigabyte when they are unpacked.
TEST_F(CompressedHostileTest, BombsDoNotGoOff) {
  const std::string zeros(64 * kFrameBytes, '\0');
  const std::string bomb = Compressed(zeros);
  ASSERT_LT(bomb.size(), 16'384u);
  Expect(WithFirstFrame(bomb), "it says what it holds", true);

  // The same, saying that it holds what it should.
  std::string liar = bomb;
  const std::string truth("\x00\x00\x00\x04", 4);
  const size_t at = liar.find(truth, 4);
  ASSERT_LT(at, 14u) << "where the frame's header has its content's length";
  liar.replace(at, 4, std::string("\x00\x00\x10\x00", 4));
  ASSERT_EQ(ZSTD_getFrameContentSize(liar.data(), liar.size()), kFrameBytes);
  Expect(WithFirstFrame(liar), "it lies about what it holds", true);

  // And one that says nothing.
  ZSTD_CCtx* const context = ZSTD_createCCtx();
  std::string silent(ZSTD_compressBound(zeros.size()), '\0');
  ZSTD_CCtx_setParameter(context, ZSTD_c_contentSizeFlag, 0);
  silent.resize(ZSTD_compress2(context, silent.data(), silent.size(), zeros.data(), zeros.size()));
  ZSTD_freeCCtx(context);
  Expect(WithFirstFrame(silent), "it says nothing", true);
}

TEST_F(CompressedHostileTest, OtherCodecsAreNotGuessedAt) {
  // Frames of LZ4, gzip, xz, a skippable frame, nothing known.
  for (const std::string& magic :
       {std::string("\x04\x22\x4d\x18", 4), std::string("\x1f\x8b\x08\x00", 4),
        std::string("\xfd\x37\x7a\x58", 4), std::string("\x50\x2a\x4d\x18", 4),
        std::string("abcd")}) {
    Expect(WithFirstFrame(magic + std::string(40, 'x')), "another codec", true);
  }
  // A frame that wants a dictionary that nobody has.
  const std::string frame = Compressed(image_.substr(0, kFrameBytes));
  std::string wants =
      frame.substr(0, 4) + static_cast<char>(frame[4] | 1) + '\x07' + frame.substr(5);
  Expect(WithFirstFrame(wants), "a dictionary", true);
}

TEST_F(CompressedHostileTest, FramesOfOtherLengthsThanTheImageNeeds) {
  const std::string part = image_.substr(0, kFrameBytes);
  Expect(WithFirstFrame(Compressed(part.substr(1))), "a byte too few", true);
  Expect(WithFirstFrame(Compressed(part + "x")), "a byte too many", true);
  Expect(WithFirstFrame(Compressed(part) + Compressed("more")), "two frames in one's place", true);
  Expect(WithFirstFrame(""), "none", true);
  std::string stray = Compressed(part);
  stray.pop_back();
  Expect(WithFirstFrame(stray), "a frame that is cut", true);
}

TEST_F(CompressedHostileTest, MutatedFilesNeverGiveOtherBytes) {
  std::mt19937_64 random(11);
  for (int i = 0; i < 3000; ++i) {
    std::string bad = good_;
    const int changes = 1 + static_cast<int>(random() % 8);
    for (int change = 0; change < changes; ++change) {
      const size_t at = random() % bad.size();
      switch (random() % 3) {
        case 0:
          bad[at] = static_cast<char>(random());
          break;
        case 1:
          bad.erase(at, 1 + random() % 8);
          break;
        default:
          bad.insert(at, std::string(1 + random() % 8, static_cast<char>(random())));
      }
      if (bad.empty()) {
        bad = "x";
      }
    }
    Expect(bad, absl::StrCat("mutation ", i), false);
  }
}

}  // namespace
}  // namespace holdfast
