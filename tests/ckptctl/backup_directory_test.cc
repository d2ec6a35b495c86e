// A directory of backups on a file system that misbehaves: the process or the machine dies, or a
// call fails, at every call there is; what is believed there is whole, and the next run goes on.
// And restore-backup from one directory to another, in this process.
#include "ckptctl/backup_directory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <string>
#include <utility>
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

// ---- Somebody's hand was there ----

namespace fs = std::filesystem;

void Put(const fs::path& path, const std::string& bytes) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << bytes;
  ASSERT_TRUE(file.flush().good()) << path;
}

// What becomes of a step by hand; `what` is then not what it should be.
struct Damage {
  const char* name;
  const char* what;  // within the step's directory; empty: that itself
  std::function<void(const fs::path& step)> make;
};

constexpr char kImage[] = "shard-00001-of-00002.safetensors";
constexpr char kRecord[] = "shard-00001-of-00002.record";

void PutElsewhere(const fs::path& path) {
  fs::rename(path, path.parent_path().parent_path() / "elsewhere");
}

std::vector<Damage> Damages() {
  return {
      {"garbage_manifest", "MANIFEST", [](const fs::path& s) { Put(s / "MANIFEST", "bla\n"); }},
      {"manifest_is_a_directory", "MANIFEST",
       [](const fs::path& s) {
         fs::remove(s / "MANIFEST");
         fs::create_directory(s / "MANIFEST");
       }},
      {"step_is_a_link", "",
       [](const fs::path& s) {
         const fs::path other = s.parent_path().parent_path() / "elsewhere";
         fs::rename(s, other);
         fs::create_directory_symlink(other, s);
       }},
      {"step_is_a_file", "",
       [](const fs::path& s) {
         fs::remove_all(s);
         Put(s, "bla");
       }},
      {"record_gone", kImage, [](const fs::path& s) { fs::remove(s / kRecord); }},
      {"record_of_as_many_bytes", kRecord,
       [](const fs::path& s) { Put(s / kRecord, std::string(fs::file_size(s / kRecord), '?')); }},
      {"image_gone", kImage, [](const fs::path& s) { fs::remove(s / kImage); }},
      {"image_is_a_link", kImage,
       [](const fs::path& s) {
         PutElsewhere(s / kImage);
         fs::create_symlink(s.parent_path() / "elsewhere", s / kImage);
       }},
      {"image_is_a_directory", kImage,
       [](const fs::path& s) {
         fs::remove(s / kImage);
         fs::create_directory(s / kImage);
       }},
  };
}

class DamagedStepTest : public RestoreBackupTest, public ::testing::WithParamInterface<Damage> {
 protected:
  static std::string Bad(const fs::path& step) {
    const std::string what = GetParam().what;
    return (what.empty() ? step : step / what).string();
  }
};

TEST_P(DamagedStepTest, OfTheTargetIsNamedAndTheOtherStepComes) {
  Console first("");
  ASSERT_EQ(RunRestoreBackup(first.context(), Arguments()), ExitCode::kOk) << first.err();
  const fs::path job = fs::path(to()) / "demo";
  fs::remove_all(job / "10-a3");
  GetParam().make(job / "20-a3");
  Console console("");
  EXPECT_EQ(RunRestoreBackup(console.context(), Arguments()), ExitCode::kDamaged) << console.err();
  EXPECT_THAT(console.out(), HasSubstr("step 20 (attempt 3): BAD: "));
  EXPECT_THAT(console.out(), HasSubstr(Bad(job / "20-a3")));
  EXPECT_THAT(console.out(), HasSubstr("; move '" + (job / "20-a3").string() +
                                       "' elsewhere, and "
                                       "the same command writes the step anew"));
  EXPECT_THAT(console.out(), HasSubstr("step 10 (attempt 3): 2 ranks"));
  EXPECT_THAT(console.out(), HasSubstr("1 step of job demo is in " + to() + ", 1 not"));
  // Nothing of it was touched; and that is the way out.
  fs::rename(job / "20-a3", fs::path(to()).parent_path() / "aside");
  Console again("");
  EXPECT_EQ(RunRestoreBackup(again.context(), Arguments()), ExitCode::kOk) << again.err();
  EXPECT_THAT(again.out(), HasSubstr("step 20 (attempt 3): 2 ranks"));
  CheckWhatIsThere(*Env::System(), to(), /*all=*/true);
}

TEST_P(DamagedStepTest, OfTheBackupIsNamedAndTheOtherStepComes) {
  const fs::path job = fs::path(from()) / "demo";
  GetParam().make(job / "20-a3");
  Console console("");
  EXPECT_EQ(RunRestoreBackup(console.context(), Arguments()), ExitCode::kDamaged) << console.err();
  EXPECT_THAT(console.out(), HasSubstr("step 20 (attempt 3): BAD: "));
  const std::string bad = Bad(job / "20-a3");
  EXPECT_THAT(console.out(), HasSubstr(bad.substr(0, bad.find(".safetensors"))));
  EXPECT_THAT(console.out(), HasSubstr("step 10 (attempt 3): 2 ranks"));
  EXPECT_THAT(console.out(), HasSubstr("1 step of job demo is in " + to() + ", 1 not"));
  EXPECT_FALSE(fs::exists(fs::path(to()) / "demo" / "20-a3"));
}

INSTANTIATE_TEST_SUITE_P(All, DamagedStepTest, ::testing::ValuesIn(Damages()),
                         [](const auto& each) { return std::string(each.param.name); });

// What could not be read of one step just now says nothing of the others.
TEST_F(BackupDirectoryTest, AStepThatCannotBeReadIsThatStepsTroubleAlone) {
  FaultEnv env;
  MakePlace(env);
  ASSERT_TRUE(Run(env).ok());
  const int before = env.calls();
  ASSERT_TRUE(BackupDirectory::OpenToRead(env, kPlace, "demo").ok());
  const int calls = env.calls() - before;
  int opened = 0;
  for (int n = 1; n <= calls; ++n) {
    env.FailCall(n, EIO);
    const auto from = BackupDirectory::OpenToRead(env, kPlace, "demo");
    if (!from.ok()) {
      continue;  // of the directory, or of all of the job
    }
    ++opened;
    for (const Step step : {10, 20}) {
      const CheckpointId id{3, step};
      const auto stray = std::find_if((*from)->strays().begin(), (*from)->strays().end(),
                                      [&](const StrayStep& each) { return each.id == id; });
      EXPECT_TRUE((*from)->Scanned(id) != nullptr || stray != (*from)->strays().end())
          << "step " << step << " is left out without a word, call " << n;
    }
  }
  EXPECT_GT(opened, 4);
}

TEST_F(RestoreBackupTest, WhatIsNoStepButLooksLikeOneIsNamed) {
  const fs::path job = fs::path(from()) / "demo";
  fs::create_directory(job / "05-a1");
  fs::create_directory(job / "5-a0");
  fs::create_directory(job / "7-a3");
  Put(job / "notes-about", "it");
  Console console("");
  EXPECT_EQ(RunRestoreBackup(console.Json(), Arguments()), ExitCode::kDamaged) << console.err();
  std::vector<std::string> left_out;
  const nlohmann::json said = console.Parsed();
  for (const auto& step : said["steps"]) {
    if (step["state"] != "written") {
      left_out.push_back(absl::StrCat(step["step"].get<uint64_t>(), " ",
                                      step["state"].get<std::string>(), ": ",
                                      step["why"].get<std::string>()));
    }
  }
  EXPECT_THAT(left_out, testing::UnorderedElementsAre(
                            HasSubstr("5 failed: '" + (job / "05-a1").string() + "'"),
                            HasSubstr("5 failed: '" + (job / "5-a0").string() + "'"),
                            HasSubstr("7 incomplete: the backup was ended before it was whole")));
  RestoreBackupArguments one = Arguments();
  one.steps = {10};
  Console chosen("");
  EXPECT_EQ(RunRestoreBackup(chosen.context(), one), ExitCode::kOk) << "the others are not wanted";
}

TEST_F(RestoreBackupTest, AJobWithoutItsFileIsNotNone) {
  fs::remove(fs::path(from()) / "demo" / "JOB");
  Console console("");
  EXPECT_EQ(RunRestoreBackup(console.context(), Arguments()), ExitCode::kRefused);
  EXPECT_THAT(console.err(), HasSubstr("'" + from() + "/demo' is there, but its file JOB is not"));
  EXPECT_FALSE(fs::exists(fs::path(to()) / "demo"));
}

TEST_F(RestoreBackupTest, OnlyAttemptsThatComeAreClaimed) {
  const fs::path job = fs::path(from()) / "demo";
  // Of attempts that there never were; and one of which no step is whole.
  const std::string most = absl::StrCat("10-a", std::numeric_limits<uint64_t>::max());
  for (const std::string& name : {std::string("10-a77"), most}) {
    fs::copy(job / "10-a3", job / name, fs::copy_options::recursive);
  }
  Console console("");
  EXPECT_EQ(RunRestoreBackup(console.context(), Arguments()), ExitCode::kDamaged) << console.err();
  EXPECT_THAT(console.out(), HasSubstr("BAD: '" + (job / "10-a77" / "MANIFEST").string() + "'"));
  EXPECT_THAT(console.out(), HasSubstr("BAD: '" + (job / most).string()));
  CheckTidy(*Env::System(), to());
  fs::remove_all(fs::path(to()) / "demo");
  const fs::path image = job / "20-a3" / kImage;
  std::fstream(image, std::ios::in | std::ios::out | std::ios::binary)
      .seekp(static_cast<std::streamoff>(fs::file_size(image) - 1))
      .put(static_cast<char>(shards_[1].image.back() ^ 1));
  RestoreBackupArguments one = Arguments();
  one.steps = {20};
  Console bad("");
  EXPECT_EQ(RunRestoreBackup(bad.context(), one), ExitCode::kDamaged) << bad.err();
  const auto names = Env::System()->List(JoinPath(to(), "demo"));
  ASSERT_TRUE(names.ok());
  EXPECT_THAT(*names, testing::ElementsAre("JOB"));
}

TEST_F(RestoreBackupTest, AClaimThatIsDamagedIsNamedForEachStepOfItsAttempt) {
  const fs::path job = fs::path(to()) / "demo";
  Console first("");
  ASSERT_EQ(RunRestoreBackup(first.context(), Arguments()), ExitCode::kOk) << first.err();
  fs::remove_all(job / "20-a3");
  for (const bool link : {false, true}) {
    fs::remove(job / "attempt-3");
    link ? fs::create_symlink("JOB", job / "attempt-3") : Put(job / "attempt-3", "bla");
    Console console("");
    EXPECT_EQ(RunRestoreBackup(console.context(), Arguments()), ExitCode::kDamaged);
    EXPECT_THAT(console.out(),
                HasSubstr("step 20 (attempt 3): BAD: '" + (job / "attempt-3").string() + "'"));
    EXPECT_THAT(console.out(), HasSubstr("; move it elsewhere, and the same command goes on\n"));
    EXPECT_THAT(console.out(), HasSubstr("step 10 (attempt 3): was there already\n"));
  }
}

TEST_F(RestoreBackupTest, IntoTheBackupItselfIsRefused) {
  fs::create_directory_symlink(fs::path(from()) / "demo", fs::path(to()) / "link");
  for (const std::string& inside :
       {from() + "/demo", from() + "/demo/20-a3", to() + "/link", from() + "/demo/../demo/"}) {
    RestoreBackupArguments arguments = Arguments();
    arguments.to = inside;
    Console console("");
    EXPECT_EQ(RunRestoreBackup(console.context(), arguments), ExitCode::kRefused) << inside;
    EXPECT_THAT(console.err(), HasSubstr("lies in the backup itself")) << inside;
  }
  CheckTidy(*Env::System(), from());
}

}  // namespace
}  // namespace holdfast
