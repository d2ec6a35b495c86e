// A directory of backups on a file system that misbehaves: the process or the machine dies, or a
// call fails, at every call there is; what is believed there is whole, and the next run goes on.
// And restore-backup from one directory to another, in this process.
#include "ckptctl/backup_directory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/fault_env.h"
#include "base/status.h"
#include "tests/base/temporary_directory.h"
#include "tests/ckptctl/console.h"
#include "tests/tiers/durable/durable_harness.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;

constexpr char kPlace[] = "/backup";
constexpr uint32_t kRanks = 2;

class BackupDirectoryTest : public ::testing::Test {
 protected:
  BackupDirectoryTest() {
    for (const Step step : {20, 10}) {
      for (Rank rank = 0; rank < kRanks; ++rank) {
        shards_.push_back(SampleShard(step, rank, kRanks));
      }
    }
  }

  static absl::StatusOr<ManifestShard> Copy(BackupDirectory& to, const SampleImage& shard,
                                            size_t* written) {
    HF_ASSIGN_OR_RETURN(const std::optional<ManifestShard> there, to.Find(shard.record));
    if (there.has_value()) {
      return *there;
    }
    HF_RETURN_IF_ERROR(to.Claim(shard.record.id.attempt));
    HF_ASSIGN_OR_RETURN(const auto writing, to.Begin(WholeRecord(shard.record)));
    const auto bytes = std::as_bytes(std::span<const char>(shard.image));
    const size_t half = bytes.size() / 2;
    HF_RETURN_IF_ERROR(to.Write(*writing, 0, bytes.first(half)));
    HF_RETURN_IF_ERROR(to.Write(*writing, half, bytes.subspan(half)));
    ++*written;
    return to.Publish(*writing, WholeRecord(shard.record));
  }

  // As a backup has it; `written`: how many files.
  absl::Status Run(Env& env, const std::string& path, size_t* written) {
    HF_ASSIGN_OR_RETURN(const auto to, BackupDirectory::OpenToWrite(env, path, SampleJob()));
    for (size_t first = 0; first < shards_.size(); first += kRanks) {
      Manifest manifest;
      const ShardRecord& record = shards_[first].record;
      manifest.job = record.id.job;
      manifest.job_name = record.job_name;
      manifest.checkpoint = record.id.checkpoint();
      manifest.world_size = record.world_size;
      manifest.descent = record.descent;
      for (Rank rank = 0; rank < kRanks; ++rank) {
        HF_ASSIGN_OR_RETURN(const ManifestShard shard, Copy(*to, shards_[first + rank], written));
        manifest.shards.push_back(shard);
      }
      HF_RETURN_IF_ERROR(to->Claim(record.id.attempt));
      HF_RETURN_IF_ERROR(to->Commit(manifest));
    }
    return absl::OkStatus();
  }
  absl::Status Run(Env& env) {
    size_t written = 0;
    return Run(env, kPlace, &written);
  }

  // A step that has a manifest is whole, whoever reads it.
  void CheckWhatIsThere(Env& env, const std::string& path, bool all) {
    const auto store = CopyStore::Open(
        {.env = &env, .kind = DurableKind::kRemote, .dir = path, .node_name = "reader"});
    ASSERT_TRUE(store.ok()) << store.status();
    for (const SampleImage& shard : shards_) {
      const absl::Status committed = (*store)->ReadManifest(CheckpointOf(shard)).status();
      EXPECT_TRUE(committed.ok() || (absl::IsNotFound(committed) && !all)) << committed;
      if (committed.ok()) {
        const absl::Status right = CheckShard(**store, shard);
        EXPECT_TRUE(right.ok()) << right;
      }
    }
  }

  void CheckTidy(Env& env, const std::string& path) {
    const auto names = env.List(JoinPath(path, "demo"));
    ASSERT_TRUE(names.ok());
    EXPECT_THAT(*names, testing::ElementsAre("10-a3", "20-a3", "JOB", "attempt-3"));
    for (const char* step : {"10-a3", "20-a3"}) {
      auto files = env.List(JoinPath(JoinPath(path, "demo"), step));
      ASSERT_TRUE(files.ok());
      std::erase(*files, "manifest.json");  // a crash may leave a step without it
      EXPECT_EQ(files->size(), 2 * kRanks + 1) << ::testing::PrintToString(*files);
    }
  }

  std::vector<SampleImage> shards_;  // newest step first
};

void MakePlace(FaultEnv& env) {
  ASSERT_TRUE(env.CreateDirectories(kPlace, 0755).ok());
}

TEST_F(BackupDirectoryTest, ACrashAtEveryCall) {
  int crashes = 0;
  for (const bool power : {true, false}) {
    bool reached = true;
    for (int n = 1; reached; ++n) {
      SCOPED_TRACE(absl::StrCat(power ? "power is lost" : "the process dies", " at call ", n));
      FaultEnv env;
      MakePlace(env);
      const int before = env.calls();
      env.CrashAtCall(n);
      const bool acknowledged = Run(env).ok();
      reached = env.calls() - before >= n;
      power ? env.Crash() : env.KillProcess();
      CheckWhatIsThere(env, kPlace, acknowledged);
      const absl::Status again = Run(env);
      ASSERT_TRUE(again.ok()) << ToString(again);
      CheckWhatIsThere(env, kPlace, /*all=*/true);
      CheckTidy(env, kPlace);
      if (HasFailure()) {
        return;
      }
      ++crashes;
    }
  }
  EXPECT_GT(crashes, 200) << "a story of no calls";
}

TEST_F(BackupDirectoryTest, AFailureOfEveryCall) {
  for (const int error : {EIO, ENOSPC}) {
    bool reached = true;
    for (int n = 1; reached; ++n) {
      SCOPED_TRACE(absl::StrCat("call ", n, " fails with ", ::strerrorname_np(error)));
      FaultEnv env;
      MakePlace(env);
      const int before = env.calls();
      env.FailCall(n, error);
      const absl::Status failed = Run(env);
      reached = env.calls() - before >= n;
      env.KillProcess();
      EXPECT_FALSE(absl::IsUnavailable(failed)) << "that is said of a ckptd: " << failed;
      CheckWhatIsThere(env, kPlace, failed.ok());
      const absl::Status again = Run(env);
      ASSERT_TRUE(again.ok()) << ToString(again);
      CheckWhatIsThere(env, kPlace, /*all=*/true);
      CheckTidy(env, kPlace);
      if (HasFailure()) {
        return;
      }
    }
  }
}

TEST_F(BackupDirectoryTest, WhatIsThereIsComparedAndStays) {
  FaultEnv env;
  MakePlace(env);
  size_t written = 0;
  ASSERT_TRUE(Run(env, kPlace, &written).ok());
  EXPECT_EQ(written, shards_.size());
  written = 0;
  ASSERT_TRUE(Run(env, kPlace, &written).ok());
  EXPECT_EQ(written, 0U);
  shards_[1].record.sealed_unix_ms += 1;  // saved at another time: another save
  const absl::Status other = Run(env);
  EXPECT_TRUE(absl::IsAlreadyExists(other)) << other;
  EXPECT_THAT(Message(other), HasSubstr("is another save of that step"));
}

TEST_F(BackupDirectoryTest, AnotherRunsDirectoryIsLeftAlone) {
  FaultEnv env;
  MakePlace(env);
  ASSERT_TRUE(Run(env).ok());
  JobIdentity another = SampleJob();
  another.job.bytes[3] ^= 1;
  env.RecordCalls();
  const auto refused = BackupDirectory::OpenToWrite(env, kPlace, another);
  EXPECT_TRUE(absl::IsFailedPrecondition(refused.status())) << refused.status();
  EXPECT_THAT(Message(refused.status()), HasSubstr("has another run of job 'demo'"));
  for (const std::string& call : env.TakeCalls()) {
    EXPECT_THAT(call, testing::Not(testing::ContainsRegex("^(write|rename|unlink|create)")));
  }
}

TEST_F(BackupDirectoryTest, OnlyWhatIsOursAndUnfinishedIsDiscarded) {
  FaultEnv env;
  MakePlace(env);
  ASSERT_TRUE(Run(env).ok());
  const CheckpointId newest = shards_.front().record.id.checkpoint();
  {
    const auto to = BackupDirectory::OpenToWrite(env, kPlace, SampleJob());
    ASSERT_TRUE(to.ok());
    ASSERT_TRUE((*to)->Discard(newest).ok());
    CheckWhatIsThere(env, kPlace, /*all=*/true);
  }
  const std::string step = JoinPath(JoinPath(kPlace, "demo"), "20-a3");
  ASSERT_TRUE(env.Unlink(JoinPath(step, "MANIFEST")).ok());
  const auto to = BackupDirectory::OpenToWrite(env, kPlace, SampleJob());
  ASSERT_TRUE(to.ok());
  ASSERT_TRUE(env.Unlink(JoinPath(JoinPath(kPlace, "demo"), "attempt-3")).ok());
  // The claim is made anew, so it is ours again.
  ASSERT_TRUE((*to)->Discard(newest).ok());
  EXPECT_TRUE(absl::IsNotFound(env.Info(JoinPath(step, "shard-00000-of-00002.record")).status()));
}

class RestoreBackupTest : public BackupDirectoryTest {
 protected:
  RestoreBackupTest() {
    EXPECT_TRUE(Env::System()->CreateDirectories(from(), 0755).ok());
    EXPECT_TRUE(Env::System()->CreateDirectories(to(), 0755).ok());
    size_t written = 0;
    EXPECT_TRUE(Run(*Env::System(), from(), &written).ok());
  }
  std::string from() const { return JoinPath(place_.path(), "from"); }
  std::string to() const { return JoinPath(place_.path(), "to"); }
  RestoreBackupArguments Arguments() const { return {from(), "demo", to(), {}, {}}; }

  TemporaryDirectory place_;
};

TEST_F(RestoreBackupTest, BringsEveryStep) {
  Console console("");
  EXPECT_EQ(RunRestoreBackup(console.context(), Arguments()), ExitCode::kOk) << console.err();
  CheckWhatIsThere(*Env::System(), to(), /*all=*/true);
  CheckTidy(*Env::System(), to());
  Console again("");
  EXPECT_EQ(RunRestoreBackup(again.Json(), Arguments()), ExitCode::kOk) << again.err();
  const nlohmann::json said = again.Parsed();
  ASSERT_FALSE(said["steps"].empty());
  for (const auto& step : said["steps"]) {
    EXPECT_EQ(step["state"], "was_there");
  }
}

TEST_F(RestoreBackupTest, EndsWhenItIsInterrupted) {
  const std::atomic<bool> interrupted{true};
  Console console("");
  console.context().interrupted = &interrupted;
  EXPECT_EQ(RunRestoreBackup(console.context(), Arguments()), ExitCode::kInterrupted);
  EXPECT_THAT(console.err(), HasSubstr("the same command goes on"));
  CheckWhatIsThere(*Env::System(), to(), /*all=*/false);
  console.context().interrupted = nullptr;
  EXPECT_EQ(RunRestoreBackup(console.context(), Arguments()), ExitCode::kOk) << console.err();
  CheckTidy(*Env::System(), to());
}

TEST_F(RestoreBackupTest, ABadFileIsNamedAndTheOtherStepComes) {
  const std::string bad =
      JoinPath(JoinPath(JoinPath(from(), "demo"), "20-a3"), "shard-00001-of-00002.safetensors");
  const auto file = Env::System()->Open(bad, OpenMode::kReadWrite);
  ASSERT_TRUE(file.ok());
  const std::byte other{static_cast<unsigned char>(shards_[1].image.back() ^ 1)};
  ASSERT_TRUE((*file)->WriteAt(shards_[1].image.size() - 1, std::span(&other, 1)).ok());
  Console console("");
  EXPECT_EQ(RunRestoreBackup(console.context(), Arguments()), ExitCode::kDamaged);
  EXPECT_THAT(console.out(), HasSubstr("step 20 (attempt 3): BAD: "));
  EXPECT_THAT(console.out(), HasSubstr(bad));
  EXPECT_THAT(console.out(), HasSubstr("step 10 (attempt 3): 2 ranks"));
  EXPECT_TRUE(
      absl::IsNotFound(Env::System()->Info(JoinPath(JoinPath(to(), "demo"), "20-a3")).status()));
}

}  // namespace
}  // namespace holdfast
