#include "ckptctl/plan_time.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/status.h"

namespace holdfast {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Tier = PlanSource::Tier;

constexpr uint64_t kGB = 1'000'000'000;

// Unlike each other, so that a wrong one shows.
PlanRates SomeRates() {
  PlanRates rates;
  rates.memory = 10 * kGB;
  rates.nvme = 5 * kGB;
  rates.network = 2 * kGB;
  rates.remote = 1 * kGB;
  rates.remote_all = 3 * kGB;
  return rates;
}

PlanNodeTime Near(const PlanReads& reads) {
  return EstimateSlowest(reads, SomeRates(), PlanPlacement::kNear);
}
PlanNodeTime Far(const PlanReads& reads) {
  return EstimateSlowest(reads, SomeRates(), PlanPlacement::kFar);
}

TEST(EstimateSlowest, OneNodeReadsItsOwnMemoryOrThatOfAnother) {
  PlanReads reads{.ranks = 2, .ranks_per_node = 2, .sources = {{Tier::kMemory, "a"}}};
  reads.reads = {{0, 0, 20 * kGB}, {1, 0, 10 * kGB}};
  // 30 GB at 10 GB/s; over the network at 2 GB/s.
  EXPECT_THAT(Near(reads).part_s, ElementsAre(3, 0, 0, 0));
  EXPECT_THAT(Far(reads).part_s, ElementsAre(0, 0, 15, 0));
  EXPECT_EQ(Far(reads).longest(), PlanPart::kNetwork);
}

TEST(EstimateSlowest, ANodesDrivesServeAllWhoReadOfThem) {
  // Two nodes of one rank read of one node's drives, 10 GB each.
  PlanReads reads{
      .ranks = 2, .ranks_per_node = 1, .sources = {{Tier::kNvme, "a"}, {Tier::kNvme, "a"}}};
  reads.reads = {{0, 0, 10 * kGB}, {1, 1, 10 * kGB}};
  // The drives are done with 20 GB after 4 s. One rank runs there; the other's 10 GB take 5 s more.
  EXPECT_THAT(Near(reads).part_s, ElementsAre(0, 4, 5, 0));
  EXPECT_EQ(Near(reads).first_rank, 1u);
  // Both elsewhere: that node sends 20 GB.
  EXPECT_THAT(Far(reads).part_s, ElementsAre(0, 4, 10, 0));
  EXPECT_EQ(Far(reads).total_s(), 14);
}

TEST(EstimateSlowest, WhoReadsMostOfANodeRunsThereAndNobodyElse) {
  PlanReads reads{
      .ranks = 2, .ranks_per_node = 1, .sources = {{Tier::kMemory, "a"}, {Tier::kMemory, "b"}}};
  reads.reads = {{0, 0, 4 * kGB}, {0, 1, 10 * kGB}, {1, 0, 6 * kGB}, {1, 1, 20 * kGB}};
  // Rank 1 runs on b, so rank 0 on a: of its 14 GB it has 4 there, 0.4 s, and gets 10 in 5 s. Rank
  // 1: 20 GB there, 2 s, and gets 6 in 3 s, from a node that sends these 6.
  EXPECT_THAT(Near(reads).part_s, ElementsAre(0.4, 0, 5, 0));
  EXPECT_EQ(Near(reads).first_rank, 0u);
  // b sends 30 GB.
  EXPECT_THAT(Far(reads).part_s, ElementsAre(0, 0, 15, 0));
}

TEST(EstimateSlowest, RemoteFilesAreReadOnceAndPassedOn) {
  // Four files; ranks 0 and 1 are on one node, 2 and 3 on the other; all want 6 GB of all files.
  PlanReads reads{.ranks = 4, .ranks_per_node = 2};
  for (Rank of = 0; of < 4; ++of) {
    reads.sources.push_back({Tier::kRemote, "", 6 * kGB});
    for (Rank reader = 0; reader < 4; ++reader) {
      reads.reads.push_back({reader, of, 6 * kGB});
    }
  }
  // 24 GB at 3 GB/s, but 12 GB by each node at 1 GB/s; each gets 2 files for 2 ranks, 24 GB, and
  // sends as much.
  EXPECT_THAT(Near(reads).part_s, ElementsAre(0, 0, 12, 12));
  EXPECT_THAT(Far(reads).part_s, ElementsAre(0, 0, 12, 12));
  // On one node nothing is passed on.
  reads.ranks_per_node = 8;
  EXPECT_THAT(Far(reads).part_s, ElementsAre(0, 0, 0, 24));
  EXPECT_EQ(Far(reads).last_rank, 3u);
  // On four nodes the file system is what all wait for; each gets 3 files, and sends its own
  // thrice.
  reads.ranks_per_node = 1;
  EXPECT_THAT(Far(reads).part_s, ElementsAre(0, 0, 9, 8));
}

TEST(EstimateSlowest, OnlyWhoWantsSomethingOfRemoteWaitsForIt) {
  PlanReads reads{.ranks = 3,
                  .ranks_per_node = 1,
                  .sources = {{Tier::kRemote, "", 3 * kGB}, {Tier::kMemory, "a"}}};
  reads.reads = {{1, 0, 3 * kGB}, {2, 1, 50 * kGB}};
  // The file is read by the first node, where nothing is wanted: 3 s, and 1.5 s to rank 1. Rank 2
  // copies 5 s, or gets 50 GB in 25 s.
  EXPECT_THAT(Near(reads).part_s, ElementsAre(5, 0, 0, 0));
  EXPECT_EQ(Near(reads).first_rank, 2u);
  EXPECT_THAT(Far(reads).part_s, ElementsAre(0, 0, 25, 0));
  reads.reads[1].bytes = kGB;
  EXPECT_THAT(Near(reads).part_s, ElementsAre(0, 0, 1.5, 3));
  EXPECT_EQ(Near(reads).first_rank, 1u);
  EXPECT_EQ(Near(reads).longest(), PlanPart::kRemote);
}

TEST(EstimateSlowest, TheLastNodeMayHaveFewerRanks) {
  PlanReads reads{.ranks = 5, .ranks_per_node = 2, .sources = {{Tier::kMemory, "a"}}};
  EXPECT_EQ(NodesOf(reads), 3u);
  EXPECT_EQ(Near(reads).total_s(), 0);
  EXPECT_EQ(Near(reads).last_rank, 1u);
  reads.reads = {{4, 0, kGB}};
  EXPECT_EQ(Near(reads).first_rank, 4u);
  EXPECT_EQ(Near(reads).last_rank, 4u);
  reads.ranks_per_node = UINT32_MAX;
  EXPECT_EQ(NodesOf(reads), 1u);
  EXPECT_EQ(Near(reads).last_rank, 4u);
}

TEST(SetRate, TakesWhatPeopleWrite) {
  PlanRates rates;
  ASSERT_TRUE(SetRate("nvme=3GB/s", rates).ok());
  ASSERT_TRUE(SetRate("remote-all=1.5GiB", rates).ok());
  EXPECT_EQ(rates.nvme, 3 * kGB);
  EXPECT_EQ(rates.remote_all, 3u * 512 * 1024 * 1024);
  EXPECT_EQ(rates.memory, PlanRates().memory);
  EXPECT_THAT(rates.told, ElementsAre("nvme", "remote-all"));
}

TEST(SetRate, NamesWhatIsWrong) {
  PlanRates rates;
  const auto error = [&](std::string_view text) { return Message(SetRate(text, rates)); };
  for (const char* unknown : {"", "=3GB/s", "disk=3GB/s", "nvme", "nvme:3GB/s", " nvme=1GB"}) {
    EXPECT_THAT(error(unknown),
                AllOf(HasSubstr("memory, nvme, network, remote, remote-all"), HasSubstr(unknown)));
  }
  for (const char* wrong :
       {"", "/s", "0", "0GB/s", "-3GB/s", "fast", "3GB/min", "100Gbit/s", "1e99"}) {
    EXPECT_THAT(error("nvme=" + std::string(wrong)),
                AllOf(HasSubstr("'nvme'"), HasSubstr("bytes a second")))
        << wrong;
  }
  EXPECT_EQ(rates.nvme, PlanRates().nvme);
  ASSERT_TRUE(SetRate("nvme=1GB/s", rates).ok());
  EXPECT_THAT(error("nvme=2GB/s"), HasSubstr("'nvme' is told twice"));
  EXPECT_EQ(rates.nvme, kGB);
}

TEST(JoinRuns, EachByteOnce) {
  std::vector<ByteRun> runs;
  JoinRuns(std::vector<ByteRun>{{10, 10}, {40, 10}}, runs);
  EXPECT_THAT(runs, ElementsAre(ByteRun{10, 10}, ByteRun{40, 10}));
  JoinRuns(runs, runs);  // the same again
  EXPECT_THAT(runs, ElementsAre(ByteRun{10, 10}, ByteRun{40, 10}));
  // Before all, in one of them, next to one, over a gap.
  JoinRuns(std::vector<ByteRun>{{0, 5}, {12, 2}, {20, 5}, {45, 10}}, runs);
  EXPECT_THAT(runs, ElementsAre(ByteRun{0, 5}, ByteRun{10, 15}, ByteRun{40, 15}));
  JoinRuns(std::vector<ByteRun>{{4, 40}}, runs);
  EXPECT_THAT(runs, ElementsAre(ByteRun{0, 55}));
}

}  // namespace
}  // namespace holdfast
