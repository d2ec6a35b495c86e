#include "server/runtime/catalog.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rocksdb/db.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <set>
#include <utility>

#include "base/status.h"
#include "tests/base/temporary_directory.h"

namespace holdfast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

JobUuid Uuid(uint8_t n) {
  JobUuid uuid;
  uuid.bytes[15] = n;
  return uuid;
}

v1::JobState State(uint8_t n, uint64_t version) {
  v1::JobState state;
  state.set_job_uuid(Uuid(n).ToBytes());
  state.set_name("job-" + std::to_string(n));
  state.set_version(version);
  return state;
}

v1::CatalogShard Shard(uint64_t step, uint32_t rank, const std::string& location = "slot-000001") {
  v1::CatalogShard shard;
  shard.set_job_uuid(Uuid(1).ToBytes());
  shard.set_attempt(1);
  shard.set_step(step);
  shard.set_rank(rank);
  shard.set_tier("memory");
  shard.set_location(location);
  return shard;
}

class CatalogTest : public ::testing::Test {
 protected:
  std::unique_ptr<Catalog> Open() {
    std::unique_ptr<Catalog> catalog = Catalog::Open(Env::System(), dir_.path()).value();
    EXPECT_TRUE(catalog->open_status().ok()) << catalog->open_status();
    return catalog;
  }
  std::vector<std::string> Names(Catalog& catalog) {
    std::vector<std::string> problems;
    std::vector<std::string> names;
    const std::vector<v1::JobState> states = catalog.JobStates(&problems).value();
    for (const v1::JobState& state : states) {
      names.push_back(state.name() + "@" + std::to_string(state.version()));
    }
    EXPECT_THAT(problems, IsEmpty());
    return names;
  }
  std::vector<uint64_t> Steps(Catalog& catalog) {
    std::vector<uint64_t> steps;
    const std::vector<v1::CatalogShard> shards = catalog.Shards().value();
    for (const v1::CatalogShard& shard : shards) {
      steps.push_back(shard.step());
    }
    return steps;
  }
  // What a program that is not this one did to it.
  void Put(const std::string& key, const std::string& value) {
    rocksdb::DB* db = nullptr;
    ASSERT_TRUE(rocksdb::DB::Open(rocksdb::Options(), dir_.Path("catalog"), &db).ok());
    ASSERT_TRUE(db->Put(rocksdb::WriteOptions(), key, value).ok());
    delete db;
  }

  TemporaryDirectory dir_;
};

// Whoever made state_dir may have let everybody look into it.
TEST_F(CatalogTest, NobodyElseReadsWhichJobsThereAre) {
  ASSERT_EQ(::chmod(dir_.path().c_str(), 0755), 0);
  const auto catalog = Open();
  const auto info = Env::System()->Info(dir_.Path("catalog"));
  ASSERT_TRUE(info.ok());
  EXPECT_EQ(info->mode & 0777, 0700u);
}

TEST_F(CatalogTest, RemembersJobStatesAndShards) {
  {
    auto catalog = Open();
    EXPECT_TRUE(catalog->created());
    ASSERT_TRUE(catalog->WriteJobState(State(1, 1)).ok());
    ASSERT_TRUE(catalog->WriteJobState(State(2, 1)).ok());
    ASSERT_TRUE(catalog->WriteJobState(State(1, 5)).ok());
    ASSERT_TRUE(
        catalog->UpdateShards("memory", {Shard(256, 0), Shard(7, 0), Shard(8, 0)}, {}).ok());
    ASSERT_TRUE(catalog->UpdateShards("memory", {}, {{Uuid(1), 1, 8, 0}}).ok());
  }
  auto catalog = Open();
  EXPECT_FALSE(catalog->created());
  EXPECT_THAT(catalog->TakeProblems(), IsEmpty());
  EXPECT_THAT(Names(*catalog), ElementsAre("job-1@5", "job-2@1"));
  EXPECT_THAT(Steps(*catalog), ElementsAre(7, 256));
  ASSERT_TRUE(catalog->RemoveJobState(Uuid(2)).ok());
  EXPECT_THAT(Names(*catalog), ElementsAre("job-1@5"));
}

TEST_F(CatalogTest, ReplaceShardsLeavesOtherTiersAlone) {
  auto catalog = Open();
  v1::CatalogShard remote = Shard(1, 0);
  remote.set_tier("remote");
  ASSERT_TRUE(catalog->UpdateShards("remote", {remote}, {}).ok());
  ASSERT_TRUE(catalog->UpdateShards("memory", {Shard(1, 0), Shard(2, 0, "old place")}, {}).ok());
  ASSERT_TRUE(catalog->ReplaceShards("memory", {Shard(2, 0, "new place"), Shard(3, 0)}).ok());
  std::vector<std::string> found;
  const std::vector<v1::CatalogShard> shards = catalog->Shards().value();
  for (const v1::CatalogShard& shard : shards) {
    found.push_back(shard.tier() + " " + std::to_string(shard.step()) + " " + shard.location());
  }
  EXPECT_THAT(found,
              ElementsAre("memory 2 new place", "memory 3 slot-000001", "remote 1 slot-000001"));
}

TEST_F(CatalogTest, ANewerVersionIsKeptAsideAndNeverRemoved) {
  ASSERT_TRUE(Open()->WriteJobState(State(1, 1)).ok());
  for (int i = 1; i <= 5; ++i) {
    Put("version", "2");
    auto catalog = Open();
    const std::vector<std::string> problems = catalog->TakeProblems();
    ASSERT_EQ(problems.size(), 1u);
    EXPECT_THAT(problems[0], HasSubstr("version 2, this program knows versions up to 1"));
    EXPECT_THAT(problems[0], HasSubstr("catalog.newer-" + std::to_string(i)));
    EXPECT_THAT(Names(*catalog), IsEmpty());
  }
  EXPECT_TRUE(std::filesystem::exists(dir_.Path("catalog.newer-1")));
  // The newer program finds all that was in it.
  std::filesystem::remove_all(dir_.Path("catalog"));
  std::filesystem::rename(dir_.Path("catalog.newer-1"), dir_.Path("catalog"));
  Put("version", "1");
  EXPECT_THAT(Names(*Open()), ElementsAre("job-1@1"));
}

TEST_F(CatalogTest, DamageOfEveryKindIsMovedAsideAndAFewAreKept) {
  const std::string path = dir_.Path("catalog");
  int damaged = 0;
  const auto expect_replaced = [&](const std::string& what) {
    ++damaged;
    auto catalog = Open();
    EXPECT_EQ(catalog->TakeProblems().size(), 1u) << what;
    EXPECT_THAT(Names(*catalog), IsEmpty()) << what;
    EXPECT_TRUE(catalog->WriteJobState(State(1, 1)).ok()) << what;
  };
  Open();
  std::filesystem::remove(path + "/CURRENT");
  expect_replaced("CURRENT gone");
  std::ofstream(path + "/CURRENT", std::ios::trunc) << "garbage\n";
  expect_replaced("CURRENT is garbage");
  for (const auto& entry : std::filesystem::directory_iterator(path)) {
    if (entry.path().filename().string().starts_with("MANIFEST")) {
      std::ofstream(entry.path(), std::ios::trunc) << std::string(500, 'x');
    }
  }
  expect_replaced("MANIFEST is garbage");
  std::filesystem::remove_all(path);
  std::ofstream(path) << "a file where a directory should be";
  expect_replaced("no directory");
  Put("version", "what");
  expect_replaced("the version is no number");
  size_t kept = 0;
  for (const auto& entry : std::filesystem::directory_iterator(dir_.path())) {
    kept += entry.path().filename().string().starts_with("catalog.bad-") ? 1 : 0;
  }
  EXPECT_EQ(kept, kBadCatalogsKept);
  EXPECT_TRUE(std::filesystem::exists(dir_.Path("catalog.bad-" + std::to_string(damaged))));
}

TEST_F(CatalogTest, OneThatCannotBeOpenedForAnotherReasonStaysAndIsOpenedByALaterWrite) {
  ASSERT_TRUE(Open()->WriteJobState(State(1, 1)).ok());
  rocksdb::DB* db = nullptr;  // holds the catalog's LOCK: an I/O error for everybody else
  ASSERT_TRUE(rocksdb::DB::Open(rocksdb::Options(), dir_.Path("catalog"), &db).ok());
  const std::unique_ptr<rocksdb::DB> holder(db);
  const std::unique_ptr<Catalog> catalog = Catalog::Open(Env::System(), dir_.path()).value();
  EXPECT_EQ(catalog->open_status().code(), absl::StatusCode::kUnavailable);
  EXPECT_FALSE(catalog->created());
  EXPECT_THAT(catalog->TakeProblems(), IsEmpty());
  std::vector<std::string> problems;
  EXPECT_EQ(catalog->JobStates(&problems).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(catalog->Shards().status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(catalog->WriteJobState(State(2, 1)).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(catalog->ReplaceShards("memory", {Shard(1, 0)}).code(), absl::StatusCode::kUnavailable);
  EXPECT_FALSE(std::filesystem::exists(dir_.Path("catalog.bad-1")));
  ASSERT_TRUE(holder->Close().ok());
  ASSERT_TRUE(catalog->WriteJobState(State(2, 1)).ok());
  EXPECT_TRUE(catalog->open_status().ok());
  EXPECT_THAT(Names(*catalog), ElementsAre("job-1@1", "job-2@1"));
}

TEST_F(CatalogTest, OneThatIsFirstMadeByALaterWriteHasItsVersion) {
  std::ofstream(dir_.Path("state")) << "a file where a directory should be";
  {
    const std::unique_ptr<Catalog> catalog =
        Catalog::Open(Env::System(), dir_.Path("state")).value();
    EXPECT_FALSE(catalog->open_status().ok());
    EXPECT_FALSE(catalog->WriteJobState(State(1, 1)).ok());
    std::filesystem::remove(dir_.Path("state"));
    ASSERT_TRUE(catalog->WriteJobState(State(1, 1)).ok());
    EXPECT_TRUE(absl::IsUnavailable(Catalog::Open(Env::System(), dir_.Path("state")).status()))
        << "from then on it is ours";
  }
  const std::unique_ptr<Catalog> again = Catalog::Open(Env::System(), dir_.Path("state")).value();
  EXPECT_THAT(again->TakeProblems(), IsEmpty());
  EXPECT_THAT(Names(*again), ElementsAre("job-1@1"));
}

TEST_F(CatalogTest, NobodyElseWorksThere) {
  const auto catalog = Open();
  const auto second = Catalog::Open(Env::System(), dir_.path());
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(Message(second.status()), HasSubstr("held by"));
}

TEST_F(CatalogTest, DamageThatIsFoundLaterIsMovedAsideAsWell) {
  rocksdb::DB* db = nullptr;
  ASSERT_TRUE(Open()->WriteJobState(State(1, 1)).ok());
  ASSERT_TRUE(rocksdb::DB::Open(rocksdb::Options(), dir_.Path("catalog"), &db).ok());
  std::unique_ptr<rocksdb::DB> holder(db);
  const std::unique_ptr<Catalog> catalog = Catalog::Open(Env::System(), dir_.path()).value();
  EXPECT_FALSE(catalog->WriteJobState(State(2, 1)).ok());
  holder.reset();
  std::ofstream(dir_.Path("catalog/CURRENT"), std::ios::trunc) << "garbage\n";
  ASSERT_TRUE(catalog->WriteJobState(State(2, 1)).ok());
  EXPECT_THAT(catalog->TakeProblems(), ElementsAre(HasSubstr("catalog.bad-1")));
  EXPECT_THAT(Names(*catalog), ElementsAre("job-2@1"));
}

TEST_F(CatalogTest, RocksDbKeepsNoLogFile) {
  ASSERT_TRUE(Open()->WriteJobState(State(1, 1)).ok());
  for (const auto& entry : std::filesystem::directory_iterator(dir_.Path("catalog"))) {
    EXPECT_FALSE(entry.path().filename().string().starts_with("LOG")) << entry.path();
  }
}

TEST_F(CatalogTest, DamagedBlocksAreFoundWhenItIsOpened) {
  {
    auto catalog = Open();
    for (uint8_t n = 1; n < 100; ++n) {
      ASSERT_TRUE(catalog->WriteJobState(State(n, 1)).ok());
    }
  }
  Open();  // recovery of the log writes a table file
  bool damaged = false;
  for (const auto& entry : std::filesystem::directory_iterator(dir_.Path("catalog"))) {
    if (entry.path().extension() == ".sst") {
      std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
      file.seekp(200);
      file.write("damage damage damage", 20);
      damaged = true;
    }
  }
  ASSERT_TRUE(damaged);
  auto catalog = Open();
  EXPECT_EQ(catalog->TakeProblems().size(), 1u);
  EXPECT_THAT(Names(*catalog), IsEmpty());
}

TEST_F(CatalogTest, AnEntryThatCannotBeUnderstoodIsAProblemAndNotTheEnd) {
  ASSERT_TRUE(Open()->WriteJobState(State(1, 1)).ok());
  Put("job/not-a-uuid", "\xff\xff");
  auto catalog = Open();
  std::vector<std::string> problems;
  EXPECT_EQ(catalog->JobStates(&problems)->size(), 1u);
  EXPECT_THAT(problems, ElementsAre(HasSubstr("job/not-a-uuid")));
}

TEST_F(CatalogTest, AfterCloseWritesAreRefused) {
  auto catalog = Open();
  ASSERT_TRUE(catalog->Close().ok());
  EXPECT_EQ(catalog->WriteJobState(State(1, 1)).code(), absl::StatusCode::kFailedPrecondition);
}

// Shards of tiers, jobs, attempts, steps and ranks that are next to each other, as numbers or as
// keys: every range is to take its own out of the midst of them.
std::vector<v1::CatalogShard> Neighbours() {
  std::vector<JobUuid> jobs;
  for (const auto& [first, last] : std::vector<std::pair<uint8_t, uint8_t>>{
           {0x00, 0x00}, {0x00, 0x01}, {0x00, 0x02}, {0xff, 0xfe}, {0xff, 0xff}}) {
    JobUuid job;
    job.bytes.fill(first);
    job.bytes[15] = last;
    jobs.push_back(job);
  }
  const std::vector<CheckpointId> checkpoints = {
      {0, UINT64_MAX}, {1, 0}, {1, 15}, {1, 16}, {1, 17}, {2, 16}, {UINT64_MAX, UINT64_MAX}};
  std::vector<v1::CatalogShard> shards;
  // '.' and '0' are what comes before and after a slash.
  for (const std::string tier : {"memor", "memory", "memory.", "memory0"}) {
    for (const JobUuid& job : jobs) {
      for (const CheckpointId& checkpoint : checkpoints) {
        for (const Rank rank : {Rank{0}, Rank{UINT32_MAX}}) {
          v1::CatalogShard shard = Shard(checkpoint.step, rank);
          shard.set_tier(tier);
          shard.set_job_uuid(job.ToBytes());
          shard.set_attempt(checkpoint.attempt);
          shards.push_back(std::move(shard));
        }
      }
    }
  }
  return shards;
}

// In an order of their own: keys are the catalog's business.
std::vector<std::string> Told(const std::vector<v1::CatalogShard>& shards) {
  std::vector<std::string> told;
  for (const v1::CatalogShard& shard : shards) {
    const JobUuid job = JobUuid::FromBytes(shard.job_uuid()).value();
    told.push_back(shard.tier() + " " +
                   ShardId{job, shard.attempt(), shard.step(), shard.rank()}.ToString());
  }
  std::sort(told.begin(), told.end());
  return told;
}

// Of a catalog that holds them all: takes the range out, looks at what is left, and puts it back.
void ExpectTaken(Catalog& catalog, const std::vector<v1::CatalogShard>& all,
                 const CatalogRange& range,
                 const std::function<bool(const v1::CatalogShard&)>& is_taken) {
  std::vector<v1::CatalogShard> taken;
  std::vector<v1::CatalogShard> left;
  for (const v1::CatalogShard& shard : all) {
    (is_taken(shard) ? taken : left).push_back(shard);
  }
  ASSERT_FALSE(taken.empty());
  ASSERT_EQ(catalog.RemoveShards(range), absl::OkStatus());
  const std::vector<std::string> found = Told(catalog.Shards().value());
  ASSERT_TRUE(found == Told(left)) << found.size() << " are left of " << all.size() << " for "
                                   << Told(taken).front() << " to " << Told(taken).back();
  ASSERT_EQ(catalog.UpdateShards(range.tier, taken, {}), absl::OkStatus());
}

TEST_F(CatalogTest, ARangeTakesItsOwnAndNoneOfItsNeighbours) {
  auto catalog = Open();
  ASSERT_TRUE(catalog->WriteJobState(State(1, 1)).ok());
  const std::vector<v1::CatalogShard> all = Neighbours();
  ASSERT_TRUE(catalog->UpdateShards("memory", all, {}).ok());
  ASSERT_EQ(Told(catalog->Shards().value()), Told(all));
  std::set<std::string> tiers;
  std::set<std::pair<std::string, std::string>> jobs;
  for (const v1::CatalogShard& one : all) {
    const auto same_tier = [&](const v1::CatalogShard& shard) {
      return shard.tier() == one.tier();
    };
    const auto same_job = [&](const v1::CatalogShard& shard) {
      return same_tier(shard) && shard.job_uuid() == one.job_uuid();
    };
    const auto same_checkpoint = [&](const v1::CatalogShard& shard) {
      return same_job(shard) && shard.attempt() == one.attempt() && shard.step() == one.step();
    };
    const JobUuid job = JobUuid::FromBytes(one.job_uuid()).value();
    if (tiers.insert(one.tier()).second) {
      ExpectTaken(*catalog, all, {one.tier(), {}, {}}, same_tier);
    }
    if (jobs.emplace(one.tier(), one.job_uuid()).second) {
      ExpectTaken(*catalog, all, {one.tier(), job, {}}, same_job);
    }
    if (one.rank() == 0) {
      ExpectTaken(*catalog, all, {one.tier(), job, CheckpointId{one.attempt(), one.step()}},
                  same_checkpoint);
    }
    if (HasFatalFailure()) {
      return;
    }
  }
  EXPECT_THAT(Names(*catalog), ElementsAre("job-1@1"));
}

TEST_F(CatalogTest, ARangeThatHoldsNothingTakesNothing) {
  auto catalog = Open();
  const std::vector<v1::CatalogShard> all = Neighbours();
  ASSERT_TRUE(catalog->UpdateShards("memory", all, {}).ok());
  const JobUuid job = JobUuid::FromBytes(all[0].job_uuid()).value();
  JobUuid unknown = job;
  unknown.bytes[15] = 3;
  for (const CatalogRange& range : std::vector<CatalogRange>{
           {"remote", {}, {}},
           {"memo", {}, {}},
           {"memory", unknown, {}},
           {"memory", unknown, CheckpointId{1, 16}},
           {"memory", job, CheckpointId{1, 18}},
           {"memory", job, CheckpointId{3, 16}},
           {"memory", {}, CheckpointId{1, 16}},  // not to be asked for: of no job
       }) {
    EXPECT_EQ(catalog->RemoveShards(range), absl::OkStatus());
    EXPECT_EQ(catalog->Shards()->size(), all.size());
  }
}

TEST_F(CatalogTest, WhatARangeTookStaysAway) {
  {
    auto catalog = Open();
    ASSERT_TRUE(catalog->UpdateShards("memory", {Shard(7, 0), Shard(8, 0), Shard(8, 1)}, {}).ok());
    ASSERT_TRUE(catalog->RemoveShards({"memory", Uuid(1), CheckpointId{1, 8}}).ok());
    ASSERT_TRUE(catalog->RemoveShards({"memory", Uuid(1), CheckpointId{1, 8}}).ok());
    ASSERT_TRUE(catalog->Close().ok());
  }
  EXPECT_THAT(Steps(*Open()), ElementsAre(7));
}

TEST_F(CatalogTest, ARangeIsRefusedWhereWritesAre) {
  ASSERT_TRUE(Open()->UpdateShards("memory", {Shard(7, 0), Shard(8, 0)}, {}).ok());
  const CatalogRange range = {"memory", Uuid(1), CheckpointId{1, 8}};
  rocksdb::DB* db = nullptr;  // holds the catalog's LOCK
  ASSERT_TRUE(rocksdb::DB::Open(rocksdb::Options(), dir_.Path("catalog"), &db).ok());
  std::unique_ptr<rocksdb::DB> holder(db);
  const std::unique_ptr<Catalog> catalog = Catalog::Open(Env::System(), dir_.path()).value();
  const absl::Status refused = catalog->RemoveShards(range);
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(Message(refused), HasSubstr("open catalog '" + dir_.Path("catalog") + "'"));
  EXPECT_FALSE(std::filesystem::exists(dir_.Path("catalog.bad-1")));
  // It opens the catalog itself as soon as that can be.
  holder.reset();
  ASSERT_EQ(catalog->RemoveShards(range), absl::OkStatus());
  EXPECT_THAT(Steps(*catalog), ElementsAre(7));
  ASSERT_TRUE(catalog->Close().ok());
  for (const CatalogRange& closed : {range, CatalogRange{"nothing is there", {}, {}}}) {
    const absl::Status status = catalog->RemoveShards(closed);
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(Message(status),
                HasSubstr("write catalog '" + dir_.Path("catalog") + "': it is closed"));
  }
}

TEST_F(CatalogTest, ARangeThatCannotBeReadIsAnError) {
  constexpr size_t kShards = 1000;
  {
    auto catalog = Open();
    std::vector<v1::CatalogShard> shards;
    for (size_t step = 0; step < kShards; ++step) {
      // More than the catalog keeps of its blocks in memory (1 MiB): the first are read again.
      shards.push_back(Shard(step, 0, std::string(8 << 10, 'x')));
    }
    ASSERT_TRUE(catalog->UpdateShards("memory", shards, {}).ok());
  }
  auto catalog = Open();  // makes table files of the log
  for (const auto& entry : std::filesystem::directory_iterator(dir_.Path("catalog"))) {
    if (entry.path().extension() == ".sst") {
      std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
      file.seekp(200);
      file.write("damage damage damage", 20);
    }
  }
  const absl::Status status = catalog->RemoveShards({"memory", {}, {}});
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(Message(status), HasSubstr("read catalog '" + dir_.Path("catalog") + "'"));
  // Which is in nobody else's way.
  ASSERT_EQ(catalog->RemoveShards({"memory", Uuid(1), CheckpointId{1, kShards - 2}}),
            absl::OkStatus());
  EXPECT_EQ(catalog->Shards().status().code(), absl::StatusCode::kDataLoss);
}

}  // namespace
}  // namespace holdfast
