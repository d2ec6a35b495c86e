// The daemon dies, is stopped, started twice, finds its files changed: what was sealed is there,
// what is wrong is said.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rocksdb/db.h>
#include <signal.h>
#include <sys/wait.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>

#include "tests/integration/harness.h"

namespace holdfast {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

class RestartTest : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_TRUE(node_.Start()); }
  void Train(std::vector<std::unique_ptr<Rank>>& ranks, uint64_t from, uint64_t to) {
    for (uint64_t step = from; step <= to; ++step) {
      ASSERT_THAT(DoAll(ranks, "save " + std::to_string(step)), Each("ok sealed"));
      ASSERT_THAT(DoAll(ranks, "committed"), Each("ok committed"));
    }
  }
  std::vector<std::unique_ptr<Rank>> Begin(uint64_t steps) {
    auto ranks = StartRanks(node_, {}, 2);
    EXPECT_THAT(DoAll(ranks, "open"), Each("ok attempt=1"));
    EXPECT_THAT(DoAll(ranks, "restore"), Each(HasSubstr("NOTHING_TO_RESTORE")));
    Train(ranks, 1, steps);
    return ranks;
  }
  // New processes get back step `step`.
  void ExpectRestored(uint64_t step) {
    auto ranks = StartRanks(node_, {}, 2);
    ASSERT_THAT(DoAll(ranks, "open"), Each(HasSubstr("ok attempt=")));
    EXPECT_THAT(DoAll(ranks, "restore"), Each(HasSubstr("step=" + std::to_string(step))));
  }
  // What the records of memory.dir hold, by their paths.
  std::map<std::string, std::string> Records() {
    std::map<std::string, std::string> records;
    for (const std::string& name : FilesIn(node_.memory_dir(), "slot-")) {
      if (name.ends_with(".record")) {
        const std::string path = node_.memory_dir() + "/" + name;
        records[path] = ReadText(path);
      }
    }
    return records;
  }
  std::string Problems() {
    const auto status = node_.Status();
    std::string all;
    if (status.has_value()) {
      for (const std::string& problem : status->daemon().problems()) {
        all += problem + "\n";
      }
    }
    return all;
  }

  Node node_;
};

TEST_F(RestartTest, KilledWhileIdleItFindsAllAndClientsGoOnByThemselves) {
  auto ranks = Begin(3);
  node_.Kill();
  ASSERT_TRUE(node_.Start());
  // One failed save at most, and that is reported.
  EXPECT_THAT(DoAll(ranks, "save 4"),
              Each(::testing::AnyOf("ok sealed", HasSubstr("error UNAVAILABLE"))));
  Train(ranks, 5, 7);
  ranks.clear();
  ExpectRestored(7);
}

TEST_F(RestartTest, KilledWhileRanksSaveTheyLoseOneSaveAtMost) {
  auto ranks = Begin(2);
  uint64_t step = 2;
  for (int round = 0; round < 3; ++round) {
    ++step;
    for (auto& rank : ranks) {
      rank->Send("save " + std::to_string(step));
    }
    node_.Kill();
    ASSERT_TRUE(node_.Start());
    for (auto& rank : ranks) {
      EXPECT_THAT(rank->Answer(), ::testing::AnyOf("ok sealed", HasSubstr("error UNAVAILABLE"),
                                                   HasSubstr("error ABANDONED")));
    }
    ++step;
    Train(ranks, step, step);
  }
  ranks.clear();
  ExpectRestored(step);
}

TEST_F(RestartTest, StoppedCleanlyItKeepsTheSlots) {
  auto ranks = Begin(2);
  EXPECT_EQ(node_.Stop(), 0);
  EXPECT_THAT(node_.Log(), HasSubstr("stopped"));
  EXPECT_TRUE(FilesIn(node_.state_dir() + "/..", "ckptd.sock").empty())
      << "the socket files are removed";
  ranks.clear();
  ASSERT_TRUE(node_.Start());
  EXPECT_EQ(Problems(), "");
  ExpectRestored(2);
}

TEST_F(RestartTest, StoppedWhilePopulatingItEndsInTime) {
  Rank rank(node_, {.job = "large", .bytes = 60 << 20});
  ASSERT_EQ(rank.Do("open"), "ok attempt=1");
  rank.Send("reserve");
  EXPECT_EQ(node_.Stop(), 0);
}

// A rank stands still in the middle of its save.
class StoppedInASaveTest : public RestartTest {
 protected:
  void SetUp() override {
    RestartTest::SetUp();
    rank_ =
        std::make_unique<Rank>(node_, RankOptions{.sync_point = "client.save.half_copied:stop@2"});
    ASSERT_EQ(rank_->Do("open"), "ok attempt=1");
    ASSERT_EQ(rank_->Do("save 1"), "ok sealed");
    ASSERT_EQ(rank_->Do("committed"), "ok committed");
    rank_->Send("save 2");
    siginfo_t info = {};
    ASSERT_EQ(::waitid(P_PID, static_cast<id_t>(rank_->child().pid()), &info, WSTOPPED | WNOWAIT),
              0);
  }
  void AskToStop() {
    node_.Terminate();
    ASSERT_TRUE(node_.Until([this](const v1::GetStatusReply&) {
      return node_.Log().find("will stop (Terminated) when 1 saves") != std::string::npos;
    })) << node_.Log();
  }
  void GoOn() { rank_->child().Signal(SIGCONT); }

  std::unique_ptr<Rank> rank_;
};

TEST_F(StoppedInASaveTest, TheSaveIsSealedBeforeItStops) {
  AskToStop();
  GoOn();
  EXPECT_EQ(rank_->Answer(), "ok sealed");
  EXPECT_EQ(node_.WaitExit(), 0);
  ASSERT_TRUE(node_.Start());
  EXPECT_EQ(rank_->Do("committed"), "ok committed");
  rank_->Kill();
  Rank next(node_, {});
  ASSERT_EQ(next.Do("open"), "ok attempt=2");
  EXPECT_THAT(next.Do("restore"), HasSubstr("step=2"));
}

TEST_F(StoppedInASaveTest, ASecondSignalStopsItAtOnce) {
  AskToStop();
  node_.Terminate();
  EXPECT_EQ(node_.WaitExit(), 0);
  EXPECT_THAT(node_.Log(), ::testing::Not(HasSubstr("were not sealed within")));
  GoOn();
  EXPECT_THAT(rank_->Answer(), HasSubstr("error UNAVAILABLE"));
}

TEST_F(StoppedInASaveTest, ARankThatHangsDoesNotHoldItUpForLong) {
  EXPECT_EQ(node_.Stop(), 0);
  EXPECT_THAT(node_.Log(), HasSubstr("1 saves were not sealed within 10 s"));
  GoOn();
  EXPECT_THAT(rank_->Answer(), HasSubstr("error UNAVAILABLE"));
  ASSERT_TRUE(node_.Start());
  EXPECT_EQ(rank_->Do("save 3"), "ok sealed");
}

TEST_F(RestartTest, TheCatalogIsOnlyAnIndex) {
  auto ranks = Begin(3);
  ranks.clear();
  const std::string catalog = node_.state_dir() + "/catalog";

  node_.Kill();
  std::filesystem::remove_all(catalog);
  ASSERT_TRUE(node_.Start());
  EXPECT_THAT(Problems(), HasSubstr("made anew with 1 job(s)"));
  ExpectRestored(3);

  node_.Kill();
  for (const auto& entry : std::filesystem::directory_iterator(catalog)) {
    std::ofstream(entry.path(), std::ios::trunc) << "damage";
  }
  ASSERT_TRUE(node_.Start());
  EXPECT_THAT(Problems(), HasSubstr("catalog.bad-1"));
  ExpectRestored(3);

  node_.Kill();
  {
    rocksdb::DB* db = nullptr;
    ASSERT_TRUE(rocksdb::DB::Open(rocksdb::Options(), catalog, &db).ok());
    ASSERT_TRUE(db->Put(rocksdb::WriteOptions(), "version", "999").ok());
    delete db;
  }
  ASSERT_TRUE(node_.Start());
  EXPECT_THAT(Problems(), HasSubstr("version 999"));
  EXPECT_TRUE(std::filesystem::exists(node_.state_dir() + "/catalog.newer-1"));
  ExpectRestored(3);
}

TEST_F(RestartTest, TwoDaemonsNeverShareADirectory) {
  const std::vector<std::string> arguments = node_.Arguments();
  const auto refused = [&](std::vector<std::string> changed) {
    TemporaryDirectory scratch;
    Child second({.arguments = std::move(changed), .error_file = scratch.Path("log")});
    EXPECT_EQ(second.Wait(), 1);
    return ReadText(scratch.Path("log"));
  };
  EXPECT_THAT(refused(arguments), HasSubstr("held by pid " + std::to_string(node_.pid())));
  TemporaryDirectory other;
  std::vector<std::string> own_state = arguments;
  own_state[6] = other.Path("state");
  EXPECT_THAT(refused(own_state), HasSubstr("held by pid " + std::to_string(node_.pid())))
      << "memory.dir has a lock of its own";
  TemporaryDirectory memory("/dev/shm");
  std::vector<std::string> own_memory = own_state;
  own_memory[4] = memory.Path("m");
  EXPECT_THAT(refused(own_memory), HasSubstr(node_.socket())) << "nor a socket";
  Rank rank(node_, {});
  EXPECT_EQ(rank.Do("open"), "ok attempt=1") << "the first goes on";
}

TEST_F(RestartTest, TheNextDaemonTakesAStaleSocketsPlace) {
  node_.Kill();
  EXPECT_TRUE(std::filesystem::exists(node_.socket()));
  ASSERT_TRUE(node_.Start());
  EXPECT_NE(RawClient::Greet(node_.socket()), nullptr);
}

TEST_F(RestartTest, RecordsThatAreTornOrNewerAreNotUsed) {
  auto ranks = Begin(2);
  const std::map<std::string, std::string> before = Records();
  Train(ranks, 3, 3);
  ranks.clear();
  node_.Kill();
  // Step 3's record of one rank is torn, in whatever slot it lies.
  const std::map<std::string, std::string> after = Records();
  const auto newest = std::find_if(after.begin(), after.end(), [&](const auto& record) {
    const auto old = before.find(record.first);
    return old == before.end() || old->second != record.second;
  });
  ASSERT_NE(newest, after.end());
  std::filesystem::resize_file(newest->first, newest->second.size() / 2);
  ASSERT_TRUE(node_.Start());
  ExpectRestored(2);
}

// A cleaner of /dev/shm, a logout: what it took is not promised any more, and the job goes on.
TEST_F(RestartTest, FilesThatOthersRemoveAreNotPromisedAnyMore) {
  auto ranks = Begin(2);
  for (const std::string& name : FilesIn(node_.memory_dir(), "slot-")) {
    if (name.find('.') == std::string::npos) {
      ASSERT_TRUE(std::filesystem::remove(node_.memory_dir() + "/" + name)) << name;
    }
  }
  EXPECT_TRUE(node_.Until([](const v1::GetStatusReply& status) {
    return status.jobs_size() == 1 && status.jobs(0).protection_size() > 0 &&
           !status.jobs(0).protection(0).any();
  }));
  bool committed = false;
  for (uint64_t step = 3; step < 9 && !committed; ++step) {
    const std::vector<std::string> saved = DoAll(ranks, "save " + std::to_string(step));
    committed = saved == std::vector<std::string>(2, "ok sealed") &&
                DoAll(ranks, "committed") == std::vector<std::string>(2, "ok committed");
  }
  EXPECT_TRUE(committed);
}

TEST_F(RestartTest, WithoutItsDirectoryTheDaemonEndsAndSaysWhy) {
  auto ranks = Begin(1);
  std::filesystem::remove_all(node_.memory_dir());
  EXPECT_EQ(node_.WaitExit(), 1);
  EXPECT_THAT(node_.Log(), HasSubstr("memory.dir: "));
  ASSERT_TRUE(node_.Start());
  const std::vector<std::string> saved = DoAll(ranks, "save 2");
  EXPECT_THAT(DoAll(ranks, "save 3"), Each("ok sealed")) << saved[0];
}

}  // namespace
}  // namespace holdfast
