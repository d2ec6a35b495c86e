// Slots that misbehave or run out: a slot at a time is lost, never the daemon, and a healthy job
// commits again.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>

#include "tests/integration/harness.h"

namespace holdfast {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::Each;
using ::testing::HasSubstr;

std::vector<std::string> SlotFiles(const Node& node) {
  std::vector<std::string> images;
  for (const std::string& name : FilesIn(node.memory_dir(), "slot-")) {
    if (name.find('.') == std::string::npos) {
      images.push_back(node.memory_dir() + "/" + name);
    }
  }
  return images;
}

class SlotsTest : public ::testing::Test {
 protected:
  void StartNode(const NodeOptions& options = {}) {
    node_ = std::make_unique<Node>(options);
    ASSERT_TRUE(node_->Start());
  }
  std::unique_ptr<Rank> Begin(const RankOptions& options) {
    auto rank = std::make_unique<Rank>(*node_, options);
    EXPECT_THAT(rank->Do("open"), HasSubstr("ok attempt="));
    EXPECT_THAT(rank->Do("restore"), AnyOf(HasSubstr("NOTHING_TO_RESTORE"), HasSubstr("ok ")));
    return rank;
  }
  void Commit(Rank& rank, uint64_t step) {
    ASSERT_EQ(rank.Do("save " + std::to_string(step)), "ok sealed");
    ASSERT_EQ(rank.Do("committed"), "ok committed");
  }
  // Saves until one commits: how many it took.
  int SavesUntilCommit(Rank& rank, uint64_t* step) {
    for (int saves = 1; saves <= 10; ++saves) {
      if (rank.Do("save " + std::to_string(++*step)) == "ok sealed" &&
          rank.Do("committed") == "ok committed") {
        return saves;
      }
    }
    return 11;
  }

  std::unique_ptr<Node> node_;
};

TEST_F(SlotsTest, BitsThatFlipAreFoundByVerifyAndAnOlderStepIsRestored) {
  StartNode();
  auto rank = Begin({});
  Commit(*rank, 1);
  const std::vector<std::string> first = SlotFiles(*node_);
  Commit(*rank, 2);
  std::vector<std::string> second = SlotFiles(*node_);
  std::erase_if(second, [&](const std::string& name) {
    return std::find(first.begin(), first.end(), name) != first.end();
  });
  ASSERT_EQ(second.size(), 1u);
  EXPECT_EQ(node_->Verify("job").bad.size(), 0u);
  {
    std::fstream image(second[0], std::ios::in | std::ios::out | std::ios::binary);
    image.seekg(300'000);
    const char byte = static_cast<char>(image.get());
    image.seekp(300'000);
    image.put(static_cast<char>(byte ^ 1));
  }
  const Node::Verified verified = node_->Verify("job");
  ASSERT_TRUE(verified.ok) << verified.error;
  ASSERT_EQ(verified.bad.size(), 1u);
  EXPECT_EQ(verified.bad[0].step(), 2u);
  EXPECT_EQ(verified.shards, 2u);
  EXPECT_THAT(verified.bad[0].what(), HasSubstr("digest"));
  const auto list = node_->List("job");
  EXPECT_TRUE(std::any_of(list.begin(), list.end(), [](const v1::Checkpoint& c) {
    return c.step() == 2 && c.state() == v1::Checkpoint::STATE_BAD;
  }));
  EXPECT_EQ(rank->Do("restore"), "ok attempt=1 step=1");
}

TEST_F(SlotsTest, BitsThatFlipUnnoticedAreFoundByTheRestoreItself) {
  StartNode();
  auto ranks = StartRanks(*node_, {}, 2);
  ASSERT_THAT(DoAll(ranks, "open"), Each("ok attempt=1"));
  ASSERT_THAT(DoAll(ranks, "restore"), Each(HasSubstr("NOTHING_TO_RESTORE")));
  ASSERT_THAT(DoAll(ranks, "save 1"), Each("ok sealed"));
  ASSERT_THAT(DoAll(ranks, "committed"), Each("ok committed"));
  const std::vector<std::string> first = SlotFiles(*node_);
  ASSERT_THAT(DoAll(ranks, "save 2"), Each("ok sealed"));
  ASSERT_THAT(DoAll(ranks, "committed"), Each("ok committed"));
  for (const std::string& path : SlotFiles(*node_)) {
    if (std::find(first.begin(), first.end(), path) == first.end()) {
      std::fstream image(path, std::ios::in | std::ios::out | std::ios::binary);
      image.seekp(500'000);
      image.write("flip", 4);
      break;  // one rank's copy: the whole step is of no use
    }
  }
  EXPECT_THAT(DoAll(ranks, "restore"), Each("ok attempt=1 step=1"));
}

enum class Damage { kCutShort, kEmptied, kDeleted };

class SlotDamageTest : public SlotsTest, public ::testing::WithParamInterface<Damage> {
 protected:
  void Harm(const std::string& path) {
    if (GetParam() == Damage::kDeleted) {
      std::filesystem::remove(path);
    } else {
      ASSERT_EQ(::truncate(path.c_str(), GetParam() == Damage::kCutShort ? 4096 : 0), 0);
    }
  }
};

TEST_P(SlotDamageTest, FreeSlotsOfTheJobAreReplacedAndOthersNoticeNothing) {
  StartNode();
  auto other = Begin({.job = "bystander"});
  Commit(*other, 1);
  const std::vector<std::string> others = SlotFiles(*node_);
  auto rank = Begin({.job = "victim"});
  ASSERT_EQ(rank->Do("reserve"), "ok ready=3 wanted=3");
  uint64_t step = 0;
  Commit(*rank, ++step);
  for (const std::string& path : SlotFiles(*node_)) {
    if (std::find(others.begin(), others.end(), path) == others.end()) {
      Harm(path);
    }
  }
  EXPECT_LE(SavesUntilCommit(*rank, &step), 5) << "it gets new slots";
  Commit(*rank, ++step);
  Commit(*other, 2);
  EXPECT_EQ(other->Do("restore"), "ok attempt=1 step=2");
  EXPECT_EQ(rank->Do("restore"), "ok attempt=1 step=" + std::to_string(step));
  rank->Kill();
  EXPECT_TRUE(node_->Until(
      [](const v1::GetStatusReply& status) { return status.daemon().slots_quarantined() == 0; }));
}

TEST_P(SlotDamageTest, ARestoreFallsBackToAnOlderStepForAllRanks) {
  StartNode();
  auto ranks = StartRanks(*node_, {}, 2);
  ASSERT_THAT(DoAll(ranks, "open"), Each("ok attempt=1"));
  ASSERT_THAT(DoAll(ranks, "restore"), Each(HasSubstr("NOTHING_TO_RESTORE")));
  ASSERT_THAT(DoAll(ranks, "save 1"), Each("ok sealed"));
  ASSERT_THAT(DoAll(ranks, "committed"), Each("ok committed"));
  const std::vector<std::string> first = SlotFiles(*node_);
  ASSERT_THAT(DoAll(ranks, "save 2"), Each("ok sealed"));
  ASSERT_THAT(DoAll(ranks, "committed"), Each("ok committed"));
  for (const std::string& path : SlotFiles(*node_)) {
    if (std::find(first.begin(), first.end(), path) == first.end()) {
      Harm(path);
      break;
    }
  }
  EXPECT_THAT(DoAll(ranks, "restore"), Each("ok attempt=1 step=1"));
  EXPECT_THAT(DoAll(ranks, "save 3"), Each("ok sealed"));
  EXPECT_THAT(DoAll(ranks, "committed"), Each("ok committed"));
}

INSTANTIATE_TEST_SUITE_P(All, SlotDamageTest,
                         ::testing::Values(Damage::kCutShort, Damage::kEmptied, Damage::kDeleted),
                         [](const auto& damage) {
                           return std::string(damage.param == Damage::kCutShort  ? "CutShort"
                                              : damage.param == Damage::kEmptied ? "Emptied"
                                                                                 : "Deleted");
                         });

TEST_F(SlotsTest, ASaveLargerThanTheBudgetIsRefusedWithTheNumbers) {
  StartNode({.memory_bytes = "16MiB"});
  auto rank = Begin({.bytes = 40 << 20});
  const std::string refused = rank->Do("save 1");
  EXPECT_THAT(refused, HasSubstr("error NO_ROOM"));
  EXPECT_THAT(refused, HasSubstr("16"));
  EXPECT_TRUE(SlotFiles(*node_).empty());
}

TEST_F(SlotsTest, AFullBudgetIsAStatusAndPassesWhenTheOtherJobIsRemoved) {
  StartNode({.memory_bytes = "24MiB"});
  auto hog = Begin({.job = "hog", .bytes = 5 << 20});
  Commit(*hog, 1);
  Commit(*hog, 2);
  Commit(*hog, 3);
  auto small = Begin({.job = "small", .bytes = 9 << 20});
  const std::string refused = small->Do("save 1");
  EXPECT_THAT(refused, HasSubstr("error NO_ROOM"));
  EXPECT_THAT(refused, HasSubstr("hog")) << "who holds it";
  Commit(*hog, 4);
  hog->Kill();
  ASSERT_TRUE(node_->Until([](const v1::GetStatusReply& status) {
    return std::any_of(status.jobs().begin(), status.jobs().end(), [](const v1::JobStatus& job) {
      return job.name() == "hog" && job.ranks_alive() == 0;
    });
  }));
  EXPECT_EQ(node_->Remove("hog"), "");
  Commit(*small, 2);
}

TEST_F(SlotsTest, AFullFileSystemIsAStatusAndPasses) {
  NodeOptions options{.memory_bytes = "32MiB"};
  options.own_tmpfs_bytes = 33 << 20;
  node_ = std::make_unique<Node>(options);
  if (!node_->has_own_tmpfs()) {
    GTEST_SKIP() << "needs root to mount a tmpfs";
  }
  ASSERT_TRUE(node_->Start());
  auto rank = Begin({.bytes = 5 << 20});
  Commit(*rank, 1);
  // Somebody else fills the file system.
  const std::string filler = node_->memory_dir() + "/../filler";
  {
    std::ofstream file(filler, std::ios::binary);
    const std::string chunk(1 << 20, 'x');
    while (file.write(chunk.data(), static_cast<std::streamsize>(chunk.size())).flush()) {
    }
  }
  const std::string refused = rank->Do("save 2");
  EXPECT_THAT(refused, AllOf(HasSubstr("error NO_ROOM"), HasSubstr("tmpfs")))
      << "there is no second slot";
  EXPECT_THAT(rank->Do("attach"), AnyOf("ok step=1", HasSubstr("ENOSPC")))
      << "who reads must be noted, on the same file system";
  std::filesystem::remove(filler);
  uint64_t step = 2;
  EXPECT_LE(SavesUntilCommit(*rank, &step), 2);
  EXPECT_EQ(rank->Do("restore"), "ok attempt=1 step=" + std::to_string(step));
}

TEST_F(SlotsTest, WhenOlderStepsAreHeldByReadersTheJobCommitsAgain) {
  StartNode();
  auto rank = Begin({});
  uint64_t step = 0;
  Commit(*rank, ++step);
  // Views hold copies; each in a process of its own.
  std::vector<std::unique_ptr<Rank>> readers;
  for (int i = 0; i < 2; ++i) {
    readers.push_back(std::make_unique<Rank>(*node_, RankOptions{}));
    ASSERT_EQ(readers.back()->Do("attach"), "ok step=" + std::to_string(step));
    Commit(*rank, ++step);
  }
  EXPECT_LE(SavesUntilCommit(*rank, &step), 3);
  EXPECT_LE(SavesUntilCommit(*rank, &step), 3);
  for (auto& reader : readers) {
    EXPECT_EQ(reader->Do("detach"), "ok");
  }
  EXPECT_LE(SavesUntilCommit(*rank, &step), 1);
  EXPECT_EQ(rank->Do("restore"), "ok attempt=1 step=" + std::to_string(step));
}

TEST_F(SlotsTest, ASlowRankShedsStepsButTheJobCommitsAgain) {
  StartNode();
  auto ranks = StartRanks(*node_, {}, 2);
  ASSERT_THAT(DoAll(ranks, "open"), Each("ok attempt=1"));
  ASSERT_THAT(DoAll(ranks, "restore"), Each(HasSubstr("NOTHING_TO_RESTORE")));
  ASSERT_THAT(DoAll(ranks, "save 1"), Each("ok sealed"));
  ASSERT_THAT(DoAll(ranks, "committed"), Each("ok committed"));
  // Rank 0 runs ahead of rank 1 by more steps than there are slots.
  for (uint64_t step = 2; step <= 8; ++step) {
    EXPECT_THAT(ranks[0]->Do("save " + std::to_string(step)),
                AnyOf("ok sealed", HasSubstr("error")))
        << step;
  }
  int committed = 0;
  for (uint64_t step = 9; step <= 12; ++step) {
    const auto sealed = DoAll(ranks, "save " + std::to_string(step));
    if (sealed[0] == "ok sealed" && sealed[1] == "ok sealed") {
      const auto told = DoAll(ranks, "committed 5000");
      committed += told[0] == "ok committed" && told[1] == "ok committed" ? 1 : 0;
    }
  }
  EXPECT_GE(committed, 2);
  EXPECT_THAT(DoAll(ranks, "restore"), Each("ok attempt=1 step=12"));
}

TEST_F(SlotsTest, ADiscardedBranchDoesNotComeBack) {
  StartNode({.memory_bytes = "256MiB", .config = "memory: {slots_per_rank: 8}\n"});
  auto ranks = StartRanks(*node_, {}, 2);
  ASSERT_THAT(DoAll(ranks, "open"), Each("ok attempt=1"));
  ASSERT_THAT(DoAll(ranks, "restore"), Each(HasSubstr("NOTHING_TO_RESTORE")));
  for (const std::string step : {"1", "2", "3", "4"}) {
    ASSERT_THAT(DoAll(ranks, "save " + step), Each("ok sealed"));
    ASSERT_THAT(DoAll(ranks, "committed"), Each("ok committed"));
  }
  ranks.clear();
  v1::SetRestorePointRequest point;
  point.set_job("job");
  point.set_step(2);
  ASSERT_EQ(node_->SetRestorePoint(point), "");
  ranks = StartRanks(*node_, {}, 2);
  ASSERT_THAT(DoAll(ranks, "open"), Each("ok attempt=2"));
  ASSERT_THAT(DoAll(ranks, "restore"), Each("ok attempt=1 step=2"));
  // It crashes before it has saved anything: the branch stays discarded all the same.
  ranks.clear();
  node_->Kill();
  ASSERT_TRUE(node_->Start());
  ranks = StartRanks(*node_, {}, 2);
  ASSERT_THAT(DoAll(ranks, "open"), Each("ok attempt=3"));
  EXPECT_THAT(DoAll(ranks, "restore"), Each("ok attempt=1 step=2"));
  ASSERT_THAT(DoAll(ranks, "save 3"), Each("ok sealed"));
  ASSERT_THAT(DoAll(ranks, "committed"), Each("ok committed"));
  ranks.clear();
  ranks = StartRanks(*node_, {}, 2);
  ASSERT_THAT(DoAll(ranks, "open"), Each("ok attempt=4"));
  EXPECT_THAT(DoAll(ranks, "restore"), Each("ok attempt=3 step=3"));
  // By name it can still be had.
  ranks.clear();
  ranks = StartRanks(*node_, {}, 2);
  ASSERT_THAT(DoAll(ranks, "open"), Each("ok attempt=5"));
  EXPECT_THAT(DoAll(ranks, "restore 4 1"), Each("ok attempt=1 step=4"));
}

}  // namespace
}  // namespace holdfast
