// Copies that went bad, against the real daemon: found by the scrub, written anew from good ones,
// and left alone where there is none.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <thread>

#include "tests/integration/hanging_fs.h"
#include "tests/integration/slot_damage.h"
#include "tests/integration/tier_fixture.h"

namespace holdfast {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

void FlipBit(const std::string& path, uint64_t offset) {
  std::string bytes = ReadText(path);
  ASSERT_LT(offset, bytes.size()) << path;
  bytes[offset] = static_cast<char>(bytes[offset] ^ 1);
  WriteText(path, bytes);
}

class RepairTest : public TierTest {
 public:
  using TierTest::Image;
  using TierTest::Record;

 protected:
  explicit RepairTest(const NodeOptions& options = TierNode()) : TierTest(options) {}
  void SetUp() override {
    ASSERT_TRUE(node_.Start());
    Begin();
    SaveEverywhere(10);
    SaveEverywhere(20);
  }
  CtlAnswer Scrub(std::vector<std::string> more = {}) {
    more.insert(more.begin(), {"scrub", "job"});
    return Ctl(node_, std::move(more));
  }
  void ExpectAllGood() {
    const CtlAnswer answer = Ctl(node_, {"verify", "job", "--all"});
    EXPECT_EQ(answer.exit_code, 0) << answer.text << answer.errors;
  }
  std::string Events() { return Ctl(node_, {"events", "job", "--json"}).text; }
  // Nothing of the step is in memory any more.
  void LeaveMemory() {
    PowerCut();
    StartAndRead();
  }
  // Until it knows what lies in the tiers: before that nothing of it is read again.
  void StartAndRead(const std::string& sync_points = "") {
    ASSERT_TRUE(node_.Start(sync_points));
    ASSERT_TRUE(node_.Until([](const v1::GetStatusReply& status) {
      return status.jobs_size() == 1 && status.daemon().tiers_size() == 2 &&
             status.ShortDebugString().find("still being read") == std::string::npos;
    }));
  }
};

struct Damage {
  std::string name;
  std::function<void(const RepairTest&, const std::string& tier)> make;  // to step 20, rank 1
};

std::vector<Damage> Damages() {
  const auto image = [](const RepairTest& test, const std::string& tier) {
    return test.Image(tier, 20, 1);
  };
  return {
      {"BitInTheImage", [=](auto& test, auto& tier) { FlipBit(image(test, tier), 123'456); }},
      {"BitInTheRecord", [](auto& test, auto& tier) { FlipBit(test.Record(tier, 20, 1), 40); }},
      {"ImageTruncated",
       [=](auto& test, auto& tier) { std::filesystem::resize_file(image(test, tier), 5000); }},
      {"RecordGone",
       [](auto& test, auto& tier) { std::filesystem::remove(test.Record(tier, 20, 1)); }},
      {"AnotherRanksImage",
       [=](auto& test, auto& tier) {
         WriteText(image(test, tier), ReadText(test.Image(tier, 20, 0)));
       }},
  };
}

class EveryDamageTest : public RepairTest,
                        public ::testing::WithParamInterface<std::tuple<std::string, size_t>> {};

INSTANTIATE_TEST_SUITE_P(All, EveryDamageTest,
                         ::testing::Combine(::testing::Values("nvme", "remote"),
                                            ::testing::Range(size_t{0}, Damages().size())),
                         [](const auto& at) {
                           return std::get<0>(at.param) + Damages()[std::get<1>(at.param)].name;
                         });

// From memory, and, when that has nothing of it any more, from the other durable tier.
TEST_P(EveryDamageTest, IsFoundAndMended) {
  const auto& [tier, which] = GetParam();
  const Damage damage = Damages()[which];
  const std::string record = ReadText(Record(tier, 20, 1));
  for (const bool from_memory : {true, false}) {
    SCOPED_TRACE(from_memory ? "from memory" : "from the other tier");
    if (!from_memory) {
      LeaveMemory();
    }
    damage.make(*this, tier);
    const CtlAnswer answer = Scrub();
    EXPECT_EQ(answer.exit_code, 0) << answer.text << answer.errors;
    EXPECT_THAT(answer.text, AllOf(HasSubstr("BAD: job step 20 (attempt 1) rank 1"),
                                   HasSubstr("MENDED: job step 20 (attempt 1) rank 1, " + tier),
                                   HasSubstr(from_memory      ? "written anew from the memory"
                                             : tier == "nvme" ? "written anew from the remote tier"
                                                              : "written anew from nvme"),
                                   HasSubstr("1 copy mended, 0 are bad still")));
    EXPECT_THAT(Events(), AllOf(HasSubstr("\"copy_bad\""), HasSubstr("\"copy_mended\"")));
    EXPECT_TRUE(ReadText(Record(tier, 20, 1)) == record) << "the manifest names this one";
    ExpectAllGood();
    EXPECT_THAT(DurableFiles(".tmp"), ::testing::IsEmpty());
    EXPECT_THAT(DurableFiles(".intent"), ::testing::IsEmpty());
  }
  Launch();
  EXPECT_THAT(Restored(), Each(HasSubstr("attempt=1 step=20")));
}

// Damage that is there when the tiers are read, which nobody reads bytes for: the daemon knows of
// it at once and mends it by itself.
std::vector<Damage> FoundByAScan() {
  std::vector<Damage> damages = Damages();
  std::erase_if(damages, [](const Damage& damage) { return damage.name != "ImageTruncated"; });
  damages.push_back({"ImageGone", [](auto& test, auto& tier) {
                       std::filesystem::remove(test.Image(tier, 20, 1));
                     }});
  damages.push_back({"RecordGone", [](auto& test, auto& tier) {
                       std::filesystem::remove(test.Record(tier, 20, 1));
                     }});
  damages.push_back({"RecordCut", [](auto& test, auto& tier) {
                       std::filesystem::resize_file(test.Record(tier, 20, 1), 100);
                     }});
  return damages;
}

class DamagedWhileDownTest : public RepairTest,
                             public ::testing::WithParamInterface<std::tuple<std::string, size_t>> {
 protected:
  bool Told(const std::string& event) {
    return Events().find("\"" + event + "\"") != std::string::npos;
  }
};

INSTANTIATE_TEST_SUITE_P(All, DamagedWhileDownTest,
                         ::testing::Combine(::testing::Values("nvme", "remote"),
                                            ::testing::Range(size_t{0}, FoundByAScan().size())),
                         [](const auto& at) {
                           return std::get<0>(at.param) +
                                  FoundByAScan()[std::get<1>(at.param)].name;
                         });

// From memory, which outlives the daemon, and, when that has nothing of it any more, from the other
// durable tier.
TEST_P(DamagedWhileDownTest, IsMendedWhenTheTiersHaveBeenRead) {
  const auto& [tier, which] = GetParam();
  const Damage damage = FoundByAScan()[which];
  const std::string image = ReadText(Image(tier, 20, 1));
  const std::string record = ReadText(Record(tier, 20, 1));
  const std::string image_path = Image(tier, 20, 1);  // (found by its name, which may go)
  const std::string record_path = Record(tier, 20, 1);
  for (const bool from_memory : {true, false}) {
    SCOPED_TRACE(from_memory ? "from memory" : "from the other tier");
    from_memory ? node_.Kill() : PowerCut();
    damage.make(*this, tier);
    StartAndRead();
    EXPECT_TRUE(node_.Until([&](const v1::GetStatusReply&) { return Told("copy_mended"); }))
        << Events();
    EXPECT_TRUE(Told("copy_bad")) << Events();
    EXPECT_FALSE(Told("copy_unmended")) << Events();
    EXPECT_TRUE(ReadText(image_path) == image);
    EXPECT_TRUE(ReadText(record_path) == record) << "the manifest names this one";
    const CtlAnswer scrub = Scrub();
    EXPECT_EQ(scrub.exit_code, 0) << scrub.text << scrub.errors;
    ExpectAllGood();
    EXPECT_THAT(DurableFiles(".tmp"), ::testing::IsEmpty());
  }
  KillRanks();
  Launch();
  EXPECT_THAT(Restored(), Each(HasSubstr("attempt=1 step=20")));
}

// One that is known as good, found by a look at all that lies there.
TEST_P(DamagedWhileDownTest, IsMendedWhenARebuildFindsIt) {
  const auto& [tier, which] = GetParam();
  FoundByAScan()[which].make(*this, tier);
  EXPECT_EQ(Ctl(node_, {"rebuild"}).exit_code, 1) << "it names what it could not read";
  EXPECT_TRUE(node_.Until([&](const v1::GetStatusReply&) { return Told("copy_mended"); }))
      << Events();
  EXPECT_TRUE(Told("copy_bad")) << Events();
  ExpectAllGood();
}

TEST_F(RepairTest, WithoutAGoodCopyDamageFoundAtTheStartIsToldAndLeft) {
  ASSERT_EQ(Ctl(node_, {"pin", "job", "--step", "20"}).exit_code, 0);  // or retention takes it
  PowerCut();
  std::vector<std::string> files;
  for (const std::string tier : {"nvme", "remote"}) {
    files.push_back(Image(tier, 20, 1));
    std::filesystem::resize_file(files.back(), 5000);
  }
  StartAndRead();
  EXPECT_TRUE(node_.Until([&](const v1::GetStatusReply&) {
    return Events().find("\"copy_unmended\"") != std::string::npos;
  })) << Events();
  const CtlAnswer where = Ctl(node_, {"where", "job", "--step", "20"});
  EXPECT_THAT(where.text, HasSubstr("bad: ")) << where.errors;
  for (const std::string& file : files) {
    EXPECT_EQ(std::filesystem::file_size(file), 5000u) << file;
  }
  EXPECT_EQ(Ctl(node_, {"repair", "job"}).exit_code, 1);
  Launch();
  EXPECT_THAT(Restored(), Each(HasSubstr("attempt=1 step=10"))) << "the next older one";
}

TEST_F(RepairTest, HowManyBlocksAreBadIsTold) {
  bytes_ = 5'000'000;
  KillRanks();
  Begin("large");
  SaveEverywhere(1);
  const std::string image = Image("nvme", 1, 0, 1, "large");
  for (const uint64_t block : {0, 2, 3}) {
    FlipBit(image, 100'000 + block * (1 << 20));
  }
  const CtlAnswer answer = Ctl(node_, {"scrub", "large"});
  EXPECT_EQ(answer.exit_code, 0) << answer.text << answer.errors;
  EXPECT_THAT(answer.text, HasSubstr("2 more such blocks"));
}

TEST_F(RepairTest, WithoutAGoodCopyNothingIsTouched) {
  ASSERT_EQ(Ctl(node_, {"pin", "job", "--step", "20"}).exit_code, 0);  // or retention takes it
  LeaveMemory();
  std::vector<std::string> files;
  std::vector<std::string> before;
  for (const std::string tier : {"nvme", "remote"}) {
    files.push_back(Image(tier, 20, 1));
    FlipBit(files.back(), 123'456);
    before.push_back(ReadText(files.back()));
  }
  const CtlAnswer answer = Scrub({"--json"});
  EXPECT_EQ(answer.exit_code, 1);
  const json copies = answer.parsed["jobs"][0]["copies"];
  ASSERT_EQ(copies.size(), 2u) << answer.text;
  for (const json& copy : copies) {
    EXPECT_EQ(copy["state"], "no_source") << copy;
    EXPECT_THAT(copy["problem"].get<std::string>(), HasSubstr("no good copy")) << copy;
  }
  for (size_t i = 0; i < files.size(); ++i) {
    EXPECT_TRUE(ReadText(files[i]) == before[i]) << files[i];
  }
  EXPECT_THAT(Events(), HasSubstr("\"copy_unmended\""));
  EXPECT_EQ(Ctl(node_, {"repair", "job"}).exit_code, 1);
  Launch();
  EXPECT_THAT(Restored(), Each(HasSubstr("attempt=1 step=10"))) << "the next older one";
}

// What is bad in memory is not what anything is mended from.
TEST_F(RepairTest, ASourceThatIsBadIsPassedOver) {
  ASSERT_EQ(DamageSlot(node_.memory_dir(), 1, 20), "");
  FlipBit(Image("nvme", 20, 1), 99'999);
  const CtlAnswer answer = Scrub({"--tier", "nvme"});
  EXPECT_EQ(answer.exit_code, 0) << answer.text << answer.errors;
  EXPECT_THAT(answer.text, HasSubstr("written anew from the remote tier"));
  EXPECT_EQ(Ctl(node_, {"verify", "job", "--all", "--tier", "nvme"}).exit_code, 0);
}

TEST_F(RepairTest, WhatIsToBeLeftIsLeftUntilRepairNamesIt) {
  FlipBit(Image("nvme", 20, 1), 123'456);
  const std::string bad = ReadText(Image("nvme", 20, 1));
  const CtlAnswer left = Scrub({"--no-repair"});
  EXPECT_EQ(left.exit_code, 1);
  EXPECT_TRUE(ReadText(Image("nvme", 20, 1)) == bad);
  EXPECT_EQ(Ctl(node_, {"repair", "job", "--tier", "remote"}).exit_code, 0) << "nothing there";
  EXPECT_TRUE(ReadText(Image("nvme", 20, 1)) == bad);
  const CtlAnswer mended = Ctl(node_, {"repair", "job", "--step", "20", "--rank", "1", "--json"});
  EXPECT_EQ(mended.exit_code, 0) << mended.text << mended.errors;
  EXPECT_EQ(mended.parsed["jobs"][0]["copies"][0]["state"], "mended") << mended.text;
  ExpectAllGood();
}

// Saves, retention and a restore go on under a scrub that is held back.
TEST_F(RepairTest, AScrubGivesWay) {
  FlipBit(Image("nvme", 10, 0), 123'456);
  std::thread scrub([&] {
    const CtlAnswer answer = Ctl(node_, {"scrub", "job", "--bandwidth", "300KiB", "--json"});
    EXPECT_EQ(answer.exit_code, 0) << answer.text << answer.errors;
  });
  for (const uint64_t step : {30, 40, 50, 60}) {  // what was there is removed meanwhile
    SaveEverywhere(step);
  }
  KillRanks();
  Launch();
  EXPECT_THAT(Restored(), Each(HasSubstr("attempt=1 step=60")));
  scrub.join();
  ExpectAllGood();
}

// A mount that hangs: what lies on drives is read and mended all the same.
NodeOptions ScrubOnMount(const HangingMount& mount) {
  NodeOptions options = TierNode();
  options.remote = false;
  options.remote_dir = mount.path();
  options.remote_options = "stall_timeout_ms: 2000, ";
  options.nvme = "stall_timeout_ms: 2000, ";
  options.config += "scrub: {period_ms: 4s}\n";
  return options;
}

class ScrubsMount {
 protected:
  HangingMount mount_;
};

class ScrubHungMountTest : private ScrubsMount, public RepairTest {
 protected:
  ScrubHungMountTest() : RepairTest(ScrubOnMount(mount_)) {}
  void SetUp() override {
    if (!mount_.mounted()) {
      GTEST_SKIP() << "needs root, /dev/fuse and mounting in a namespace of its own";
    }
    RepairTest::SetUp();
  }
  HangingMount& mount() { return mount_; }
};

TEST_F(ScrubHungMountTest, AMountThatHangsHoldsNoOtherTierUp) {
  mount().HangAtWrite();
  Save(30, "nvme");
  ASSERT_TRUE(mount().AwaitHanging());
  FlipBit(Image("nvme", 20, 1), 123'456);
  EXPECT_TRUE(node_.Until(
      [&](const v1::GetStatusReply& status) { return status.daemon().scrub().copies_bad() >= 1; }));
  EXPECT_TRUE(node_.Until([&](const v1::GetStatusReply&) {
    return Ctl(node_, {"verify", "job", "--all", "--tier", "nvme"}).exit_code == 0;
  }));
  mount().Release();
}

// Killed amid a replacement, in each of its phases: nothing worse, and the next one mends it.
TEST_F(RepairTest, KilledAmidAReplacement) {
  for (const std::string point : {"daemon.replace.data_written", "daemon.replace.placed"}) {
    SCOPED_TRACE(point);
    node_.Kill();
    StartAndRead(point + ":kill");
    FlipBit(Image("nvme", 20, 1), 123'456);
    static_cast<void>(Scrub());
    ASSERT_TRUE(node_.WaitExit().has_value());
    StartAndRead();
    const CtlAnswer answer = Scrub();
    EXPECT_EQ(answer.exit_code, 0) << answer.text << answer.errors;
    ExpectAllGood();
    EXPECT_THAT(DurableFiles(".tmp"), ::testing::IsEmpty());
  }
}

// The daemon's own scrub, with a period of seconds.
class OwnScrubTest : public RepairTest {
 protected:
  static NodeOptions Options() {
    NodeOptions options = TierNode();
    options.config += "scrub: {period_ms: 4s}\n";
    return options;
  }
  OwnScrubTest() : RepairTest(Options()) {}
};

TEST_F(OwnScrubTest, FindsAndMendsByItself) {
  FlipBit(Image("nvme", 20, 1), 123'456);
  FlipBit(Image("remote", 10, 0), 123'456);
  EXPECT_TRUE(node_.Until(
      [&](const v1::GetStatusReply& status) { return status.daemon().scrub().copies_bad() >= 2; }));
  EXPECT_TRUE(node_.Until([&](const v1::GetStatusReply&) {
    return Ctl(node_, {"verify", "job", "--all", "--tier", "nvme"}).exit_code == 0 &&
           Ctl(node_, {"verify", "job", "--all", "--tier", "remote"}).exit_code == 0;
  }));
  const json status = Ctl(node_, {"scrub", "--status", "--json"}).parsed;
  EXPECT_EQ(status["period_ms"], 4000) << status;
  EXPECT_GE(status["copies_read"], 2) << status;
  EXPECT_EQ(status["copies"], 12) << status;
}

}  // namespace
}  // namespace holdfast
