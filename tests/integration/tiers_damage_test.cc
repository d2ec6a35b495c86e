// Whatever becomes of the files in durable tiers: what is not exactly what was written is found,
// named and passed over, the next copy or the next step is used, and nothing of it ends the daemon.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <functional>

#include "base/digest.h"
#include "tests/integration/tier_fixture.h"

namespace holdfast {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

void FlipBit(const std::string& path, uint64_t offset) {
  std::string bytes = ReadText(path);
  ASSERT_LT(offset, bytes.size()) << path;
  bytes[offset] = static_cast<char>(bytes[offset] ^ 1);
  WriteText(path, bytes);
}

void Exchange(const std::string& a, const std::string& b) {
  const std::string bytes = ReadText(a);
  ASSERT_FALSE(bytes.empty()) << a;
  WriteText(a, ReadText(b));
  WriteText(b, bytes);
}

// A file of a format version that is yet to come, as good as that version would have written it.
void MakeNewer(const std::string& path) {
  std::string bytes = ReadText(path);
  ASSERT_GT(bytes.size(), 24u) << path;
  bytes[8] = 99;
  const uint64_t crc = Crc64(bytes.data(), bytes.size() - 8);
  for (size_t i = 0; i < 8; ++i) {
    bytes[bytes.size() - 8 + i] = static_cast<char>(crc >> (8 * i));
  }
  WriteText(path, bytes);
}

// A restore that waits is refused soon.
NodeOptions Impatient() {
  NodeOptions options = TierNode();
  options.config += "session: {deadline_max_ms: 5s}\n";
  return options;
}

::testing::Matcher<const std::string&> NotRestored() {
  return ::testing::AnyOf(HasSubstr("error UNAVAILABLE"), HasSubstr("error DEADLINE_EXCEEDED"));
}

class DamageTest : public TierTest {
 public:
  DamageTest() : TierTest(Impatient()) {}
  using TierTest::Image;
  using TierTest::Record;

 protected:
  // Steps 1 and 2 of attempt 1 and 2 of attempt 2, in both tiers; job "other" likewise has step 2.
  void SetUp() override {
    ASSERT_TRUE(node_.Start());
    Begin("other");
    SaveEverywhere(2);
    KillRanks();
    Begin();
    SaveEverywhere(1);
    SaveEverywhere(2);
    KillRanks();
    ASSERT_EQ(Ctl(node_, {"restore", "job", "--step", "1"}).exit_code, 0);
    Launch();
    ASSERT_THAT(Restored(), Each(HasSubstr("attempt=1 step=1")));
    SaveEverywhere(2);
    PowerCut();
  }
  std::string Manifest(const std::string& job, const std::string& step) const {
    return node_.remote_dir() + "/" + job + "/" + step + "/MANIFEST";
  }
  std::vector<std::string> RestoreAnew() {
    EXPECT_TRUE(node_.Start());
    // A restore that falls back while a tier is still being read ends with UNAVAILABLE: ask later.
    EXPECT_TRUE(node_.Until([](const v1::GetStatusReply& status) {
      return status.daemon().tiers_size() == 2 &&
             status.ShortDebugString().find("still being read") == std::string::npos;
    }));
    Launch();
    return Restored();
  }
};

struct Damage {
  std::string name;
  std::function<void(const DamageTest&, const std::string& tier)> make;  // to step 2 of attempt 2
};

std::vector<Damage> Damages() {
  const auto image = [](const DamageTest& test, const std::string& tier) {
    return test.Image(tier, 2, 1, 2);
  };
  const auto record = [](const DamageTest& test, const std::string& tier) {
    return test.Record(tier, 2, 1, 2);
  };
  return {
      {"ImageTruncated",
       [=](auto& test, auto& tier) { std::filesystem::resize_file(image(test, tier), 5000); }},
      {"ImageEmpty",
       [=](auto& test, auto& tier) { std::filesystem::resize_file(image(test, tier), 0); }},
      {"ImageExtended",
       [=](auto& test, auto& tier) {
         const std::string path = image(test, tier);
         std::filesystem::resize_file(path, std::filesystem::file_size(path) + 4096);
       }},
      {"ImageGone", [=](auto& test, auto& tier) { std::filesystem::remove(image(test, tier)); }},
      {"ImageADirectory",
       [=](auto& test, auto& tier) {
         const std::string path = image(test, tier);
         std::filesystem::remove(path);
         std::filesystem::create_directory(path);
       }},
      {"ImageALink",
       [=](auto& test, auto& tier) {
         const std::string path = image(test, tier);
         std::filesystem::rename(path, path + ".other");
         std::filesystem::create_symlink(path + ".other", path);
       }},
      {"BitInTheHeader", [=](auto& test, auto& tier) { FlipBit(image(test, tier), 30); }},
      {"BitInTheData", [=](auto& test, auto& tier) { FlipBit(image(test, tier), 123'456); }},
      {"BitInTheRecord", [=](auto& test, auto& tier) { FlipBit(record(test, tier), 40); }},
      {"RecordTruncated",
       [=](auto& test, auto& tier) { std::filesystem::resize_file(record(test, tier), 60); }},
      {"RecordExtended",
       [=](auto& test, auto& tier) {
         WriteText(record(test, tier), ReadText(record(test, tier)) + "x");
       }},
      {"RecordMagic", [=](auto& test, auto& tier) { FlipBit(record(test, tier), 0); }},
      {"RecordNewer", [=](auto& test, auto& tier) { MakeNewer(record(test, tier)); }},
      {"ImagesOfRanksSwapped",
       [=](auto& test, auto& tier) { Exchange(image(test, tier), test.Image(tier, 2, 0, 2)); }},
      {"CopyOfAnotherRank",
       [=](auto& test, auto& tier) {
         WriteText(image(test, tier), ReadText(test.Image(tier, 2, 0, 2)));
         WriteText(record(test, tier), ReadText(test.Record(tier, 2, 0, 2)));
       }},
      {"CopyOfAnotherStep",
       [=](auto& test, auto& tier) {
         WriteText(image(test, tier), ReadText(test.Image(tier, 1, 1)));
         WriteText(record(test, tier), ReadText(test.Record(tier, 1, 1)));
       }},
      {"CopyOfAnotherAttempt",
       [=](auto& test, auto& tier) {
         WriteText(image(test, tier), ReadText(test.Image(tier, 2, 1, 1)));
         WriteText(record(test, tier), ReadText(test.Record(tier, 2, 1, 1)));
       }},
      {"CopyOfAnotherJob",
       [=](auto& test, auto& tier) {
         const std::string theirs = test.Image(tier, 2, 1, 1, "other");
         WriteText(image(test, tier), ReadText(theirs));
         WriteText(record(test, tier),
                   ReadText(std::filesystem::path(theirs).replace_extension("record")));
       }},
  };
}

class DamagedCopy : public DamageTest, public ::testing::WithParamInterface<size_t> {
 protected:
  const Damage& damage() const {
    static const std::vector<Damage> damages = Damages();
    return damages[GetParam()];
  }
};

// Rank 1's copy on a drive: the remote one is used, by the restore or to write that one anew before
// it, and the step is the same.
TEST_P(DamagedCopy, OnADriveTheNextCopyIsUsed) {
  damage().make(*this, "nvme");
  const std::vector<std::string> restored = RestoreAnew();
  EXPECT_THAT(restored, Each(HasSubstr("attempt=2 step=2 source=")));
  const bool mended =
      Ctl(node_, {"events", "job", "--json"}).text.find("\"copy_mended\"") != std::string::npos;
  if (!mended || restored[1].find("source=nvme") == std::string::npos) {
    EXPECT_THAT(restored[1], AllOf(HasSubstr("source=remote"), HasSubstr("nvme copy")));
  }
  const std::string told = Told() + Ctl(node_, {"where", "job", "--json"}).text;
  EXPECT_THAT(told, HasSubstr("job/2-a2/1.")) << "named";
  SaveEverywhere(3);  // and on it goes
}

// Once an operator asked for step 1: from the tier, or from memory, if it was brought there ahead.
auto RestoredStepOne(const std::string& tier) {
  return Each(
      ::testing::AnyOf("ok attempt=1 step=1", HasSubstr("ok attempt=1 step=1 source=" + tier)));
}

// In the remote directory, and the drives are lost: the step before is used, by all ranks. A record
// that a newer Holdfast could read is no loss: nobody goes back behind it unasked.
TEST_P(DamagedCopy, InTheRemoteDirectoryTheNextStepIsUsed) {
  damage().make(*this, "remote");
  EmptyDrives();
  const std::vector<std::string> restored = RestoreAnew();
  if (damage().name == "RecordNewer") {
    EXPECT_THAT(restored, Each(AllOf(NotRestored(), HasSubstr("2-a2/shard-00001"),
                                     HasSubstr("use a newer Holdfast"))));
    EXPECT_EQ(Ctl(node_, {"restore", "job", "--step", "1"}).exit_code, 0);
    EXPECT_THAT(Restored(), RestoredStepOne("remote"));
  } else {
    EXPECT_THAT(restored, Each(HasSubstr("attempt=1 step=1 source=remote")));
  }
  EXPECT_THAT(Told(), HasSubstr("step 2")) << "named";
  SaveEverywhere(3);
}

INSTANTIATE_TEST_SUITE_P(All, DamagedCopy, ::testing::Range(size_t{0}, Damages().size()),
                         [](const auto& index) { return Damages()[index.param].name; });

// On a drive, and there is no other copy.
TEST_F(DamageTest, ANewerRecordOnADriveIsNobodysToGoBackBehind) {
  MakeNewer(Record("nvme", 2, 1, 2));
  EmptyDirectory(node_.remote_dir());
  EXPECT_THAT(RestoreAnew(),
              Each(AllOf(NotRestored(), HasSubstr("2-a2/1.record"),
                         HasSubstr("use a newer Holdfast"), HasSubstr("ckptctl restore job"))));
  EXPECT_EQ(Ctl(node_, {"restore", "job", "--step", "1"}).exit_code, 0);
  EXPECT_THAT(Restored(), RestoredStepOne("nvme"));
}

// ---- Manifests ----

class DamagedManifest : public DamageTest {
 protected:
  // Records and images say themselves what they are: the step is all there.
  void ExpectStepTwo() {
    EmptyDrives();
    EXPECT_THAT(RestoreAnew(), Each(HasSubstr("attempt=2 step=2 source=remote")));
    EXPECT_THAT(Told(), HasSubstr("2-a2/MANIFEST"));
    EXPECT_EQ(Ctl(node_, {"verify", "job", "--all", "--tier", "remote"}).exit_code, 0);
    SaveEverywhere(3);
  }
  std::vector<std::string> StepFiles() const {
    std::vector<std::string> files = DurableFiles("/job/2-a2/");
    std::erase_if(files,
                  [this](const auto& path) { return path.rfind(node_.remote_dir(), 0) != 0; });
    return files;
  }
  // Nobody goes back behind it unasked, and asked nobody throws it away.
  void ExpectRefusal(const std::string& why, bool records_read = true) {
    const std::vector<std::string> before = StepFiles();
    EmptyDrives();
    EXPECT_THAT(RestoreAnew(), Each(AllOf(NotRestored(), HasSubstr("2-a2/MANIFEST"), HasSubstr(why),
                                          HasSubstr("ckptctl restore job"))));
    EXPECT_THAT(Told(), HasSubstr("2-a2/MANIFEST"));
    EXPECT_EQ(Ctl(node_, {"restore", "job", "--step", "1"}).exit_code, 0);
    EXPECT_THAT(Restored(), RestoredStepOne("remote"));
    for (uint64_t step = 3; step <= 8; ++step) {
      SaveEverywhere(step);  // more than is kept
    }
    // (Where even records say nothing, it is not known what else is kept for what.)
    EXPECT_TRUE(node_.Until([&](const v1::GetStatusReply&) {
      return !records_read || DurableFiles("/3-a3/").empty();  // retention has been here
    }));
    EXPECT_THAT(StepFiles(), ::testing::UnorderedElementsAreArray(before));
  }
};

TEST_F(DamagedManifest, BitFlipped) {
  FlipBit(Manifest("job", "2-a2"), 30);
  ExpectStepTwo();
}

TEST_F(DamagedManifest, Truncated) {
  std::filesystem::resize_file(Manifest("job", "2-a2"), 20);
  ExpectStepTwo();
}

TEST_F(DamagedManifest, OfANewerVersion) {
  MakeNewer(Manifest("job", "2-a2"));
  ExpectRefusal("use the newer program that wrote it");
}

TEST_F(DamagedManifest, OfANewerVersionAsItsRecords) {
  MakeNewer(Manifest("job", "2-a2"));
  MakeNewer(Record("remote", 2, 0, 2));
  MakeNewer(Record("remote", 2, 1, 2));
  EmptyDirectory(node_.state_dir());
  ExpectRefusal("use the newer program that wrote it", false);
}

TEST_F(DamagedManifest, ThatIsNoFile) {
  const std::string path = Manifest("job", "2-a2");
  std::filesystem::remove(path);
  std::filesystem::create_directory(path);
  ExpectRefusal("not a regular file");
}

TEST_F(DamagedManifest, AndARecordToo) {
  FlipBit(Manifest("job", "2-a2"), 30);
  FlipBit(Record("remote", 2, 1, 2), 40);
  EmptyDrives();
  EXPECT_THAT(RestoreAnew(), Each(HasSubstr("attempt=1 step=1 source=remote")));
  EXPECT_THAT(Told(), HasSubstr("2-a2/MANIFEST"));
  SaveEverywhere(3);
}

TEST_F(DamagedManifest, OfAnotherJob) {
  WriteText(Manifest("job", "2-a2"), ReadText(Manifest("other", "2-a1")));
  ExpectStepTwo();
}

TEST_F(DamagedManifest, OfAnotherAttempt) {
  WriteText(Manifest("job", "2-a2"), ReadText(Manifest("job", "2-a1")));
  ExpectStepTwo();
}

TEST_F(DamagedManifest, WithoutItTheStepWasNeverWholeThere) {
  std::filesystem::remove(Manifest("job", "2-a2"));
  EmptyDrives();
  EmptyDirectory(node_.state_dir());
  EXPECT_THAT(RestoreAnew(), Each(HasSubstr("attempt=1 step=1 source=remote")));
}

// With an empty node nobody knows what there would be to restore: that is not "nothing".
TEST_F(DamagedManifest, JobFileOfANewerVersion) {
  MakeNewer(node_.remote_dir() + "/job/JOB");
  EmptyDrives();
  EmptyDirectory(node_.state_dir());
  ASSERT_TRUE(node_.Start());
  ranks_ = StartRanks(node_, {.job = "job", .bytes = 300'000}, 2);
  EXPECT_THAT(DoAll(ranks_, "open"),
              Each(AllOf(HasSubstr("error "), HasSubstr("cannot be told now"),
                         HasSubstr("/job/JOB"), HasSubstr("use the newer program"))));
}

// A damaged JOB says nothing about whose directory it is: nobody writes there, nobody removes.
TEST_F(DamagedManifest, JobFileOfAnother) {
  WriteText(node_.remote_dir() + "/job/JOB", ReadText(node_.remote_dir() + "/other/JOB"));
  const std::vector<std::string> before = DurableFiles("remote/job/");
  EXPECT_THAT(RestoreAnew(), Each(HasSubstr("attempt=2 step=2 source=nvme")));
  Save(3, "nvme");
  EXPECT_TRUE(node_.Until([this](const v1::GetStatusReply&) {
    return Told().find("/job/JOB") != std::string::npos;
  })) << Told();
  EXPECT_TRUE(std::filesystem::exists(Manifest("job", "2-a2")));
}

}  // namespace
}  // namespace holdfast
