// Names that somebody removed or replaced while the store has them open: the tier's directory, what
// it keeps beside copies, a job's directory, files that are to be overwritten.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "tests/tiers/durable/hostile_fixture.h"
#include "tiers/durable/names.h"
#include "tiers/durable/small_files.h"

namespace holdfast {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;

class MeddledTest : public HostileTest, public testing::WithParamInterface<DurableKind> {
 protected:
  MeddledTest() : HostileTest(DurablePlace{.kind = GetParam()}) {}
  explicit MeddledTest(const DurablePlace& place) : HostileTest(place) {}

  bool remote() const { return GetParam() == DurableKind::kRemote; }
  std::string Home() { return Path(remote() ? ".holdfast/nodes/node-1" : ".holdfast"); }

  void RemoveTree(const std::string& path) {
    const std::vector<std::string> names = env().List(path).value();
    for (const std::string& name : names) {
      const std::string inner = JoinPath(path, name);
      if (S_ISDIR(env().Info(inner).value().mode)) {
        RemoveTree(inner);
      } else {
        ASSERT_TRUE(env().Unlink(inner).ok()) << inner;
      }
    }
    ASSERT_TRUE(env().RemoveDirectory(path).ok()) << path;
  }
  // As an operation of the daemon does it.
  absl::Status ClaimAndPublish(const SampleImage& sample) {
    HF_RETURN_IF_ERROR(store().ClaimAttempt(SampleJob(), sample.record.id.attempt, "opening 1"));
    return PublishShard(store(), sample).status();
  }
  void ExpectPublishes(const SampleImage& sample) {
    const absl::Status status = ClaimAndPublish(sample);
    EXPECT_TRUE(status.ok()) << ToString(status);
    EXPECT_TRUE(CheckShard(store(), sample).ok());
  }
  DurableScan Scan() {
    auto scan = store().ScanAll();
    EXPECT_TRUE(scan.ok()) << ToString(scan.status());
    return scan.ok() ? *std::move(scan) : DurableScan();
  }
};

INSTANTIATE_TEST_SUITE_P(Kinds, MeddledTest,
                         testing::Values(DurableKind::kNvme, DurableKind::kRemote),
                         [](const testing::TestParamInfo<DurableKind>& kind) {
                           return kind.param == DurableKind::kNvme ? "Nvme" : "Remote";
                         });

// ---- Reads that fail once ----

// Nothing is condemned on one reading: not the record, nor, with the other ranks' shards, the step.
TEST_P(MeddledTest, ARecordThatCannotBeReadIsReadOnceMore) {
  Publish(SampleShard(900, 1, 4));
  FaultEnv& faults = *harness_.faults();
  Scan();
  faults.RecordCalls();
  ASSERT_THAT(Scan().jobs.at(0).checkpoints.at(0).copies, SizeIs(1));
  const std::vector<std::string> calls = faults.TakeCalls();
  const auto read = std::find_if(calls.begin(), calls.end(), [](const std::string& call) {
    return call.rfind("read ", 0) == 0 && call.ends_with(".record");
  });
  ASSERT_NE(read, calls.end());
  faults.FailCall(static_cast<int>(read - calls.begin()) + 1, EIO);
  const DurableScan scan = Scan();
  EXPECT_THAT(scan.jobs.at(0).checkpoints.at(0).copies, SizeIs(1));
  EXPECT_THAT(scan.jobs.at(0).checkpoints.at(0).damaged, IsEmpty());
}

// ---- The tier's directory ----

TEST_P(MeddledTest, AnotherDirectoryInItsPlaceIsNotTakenForIt) {
  const SampleImage sample = SampleShard(900, 1, 4);
  Publish(sample);
  const SampleImage half = SampleShard(901, 1, 4);
  auto begun = store().Begin(NewCopyOfShard(half));
  ASSERT_TRUE(begun.ok());
  ASSERT_TRUE(WriteShard(**begun, half).ok());
  const std::string dir = harness_.dir();
  ASSERT_TRUE(env().Rename(dir, dir + "-old").ok());
  ASSERT_TRUE(env().CreateDirectory(dir, 0700).ok());

  const auto expect_noticed = [](const absl::Status& status) {
    EXPECT_TRUE(absl::IsUnavailable(status)) << ToString(status);
    EXPECT_THAT(Message(status), HasSubstr("is not the directory that it was"));
  };
  expect_noticed(PublishShard(store(), SampleShard(902, 1, 4)).status());
  expect_noticed((*begun)->Publish(half.record_file).status());
  expect_noticed(store().OpenCopy(NameOf(sample), {}).status());
  expect_noticed(store().FindJob("demo").status());
  expect_noticed(store().OpenJob(SampleJob()));
  expect_noticed(store().RemoveCopy(NameOf(sample)).status());
  expect_noticed(store().RemoveJob(SampleJob().job, "demo").status());
  expect_noticed(store().ScanAll().status());
  expect_noticed(store().Space().status());
  EXPECT_THAT(env().List(dir).value(), IsEmpty()) << "nothing is made there";

  // Opened anew it is a directory like any other.
  CopyStore::Options options = harness_.options();
  options.same_as = store().place();
  {
    const auto anew = CopyStore::Open(options);
    ASSERT_TRUE(anew.ok()) << ToString(anew.status());
    ASSERT_TRUE((*anew)->Sweep().ok());
    EXPECT_THAT((*anew)->ScanAll()->jobs, IsEmpty());
    ASSERT_TRUE((*anew)->ClaimAttempt(SampleJob(), 3, "opening 1").ok());
    EXPECT_TRUE(PublishShard(**anew, SampleShard(902, 1, 4)).ok());
    EXPECT_NE((*anew)->place().id, store().place().id);
  }
  expect_noticed(store().Space().status());
  // Back in its place, it is what it was.
  RemoveTree(dir);
  ASSERT_TRUE(env().Rename(dir + "-old", dir).ok());
  EXPECT_TRUE(CheckShard(store(), sample).ok());
  begun->reset();
  Publish(SampleShard(903, 1, 4));
  EXPECT_THAT(harness_.Leftovers(), IsEmpty());
}

// As after `rm -r` and `mkdir` on ext4, or a mkfs of what is mounted there.
TEST_P(MeddledTest, AnotherDirectoryOfTheSameNumberIsNotTakenForIt) {
  for (const bool has_birth_times : {true, false}) {
    SCOPED_TRACE(has_birth_times);
    harness_.faults()->ReuseDirectoryNumbers(has_birth_times);
    const std::string dir = harness_.dir();
    harness_.Stop();
    RemoveTree(dir);
    ASSERT_TRUE(env().CreateDirectory(dir, 0700).ok());
    ASSERT_TRUE(harness_.Start().ok());
    const SampleImage sample = SampleShard(900, 1, 4);
    Publish(sample);
    const uint64_t number = env().Info(dir).value().inode;
    RemoveTree(dir);
    ASSERT_TRUE(env().CreateDirectory(dir, 0700).ok());
    ASSERT_EQ(env().Info(dir).value().inode, number);
    for (const absl::Status& status :
         {store().Space().status(), PublishShard(store(), SampleShard(902, 1, 4)).status(),
          store().ScanAll().status(), store().OpenCopy(NameOf(sample), {}).status()}) {
      EXPECT_TRUE(absl::IsUnavailable(status)) << ToString(status);
      EXPECT_THAT(Message(status), HasSubstr("is not the directory that it was"));
    }
    EXPECT_THAT(env().List(dir).value(), IsEmpty()) << "nothing is made there";
    const std::string old_id = store().place().id;
    CopyStore::Options options = harness_.options();
    options.same_as = store().place();
    harness_.Stop();
    const auto anew = CopyStore::Open(options);
    ASSERT_TRUE(anew.ok()) << ToString(anew.status());
    ASSERT_TRUE((*anew)->Sweep().ok());
    ASSERT_TRUE((*anew)->ClaimAttempt(SampleJob(), 3, "opening 1").ok());
    EXPECT_TRUE(PublishShard(**anew, SampleShard(902, 1, 4)).ok());
    EXPECT_NE((*anew)->place().id, old_id);
  }
}

// The id cannot be read just now: that says nothing of another directory. (Where nothing tells when
// a directory was made, the id is looked at each time.)
TEST_P(MeddledTest, AnIdThatCannotBeReadIsNotTakenForAnothers) {
  harness_.faults()->ReuseDirectoryNumbers(false);
  const std::string dir = harness_.dir();
  harness_.Stop();
  RemoveTree(dir);
  ASSERT_TRUE(env().CreateDirectory(dir, 0700).ok());
  ASSERT_TRUE(harness_.Start().ok());
  Publish(SampleShard(900, 1, 4));
  const std::string id = Path(".holdfast/id");
  for (const auto& [error, way_out] :
       {std::pair(ESTALE, std::string("mount the directory again")),
        {EIO, "mount the directory again"},
        {EACCES, "let ckptd read that file (ls -ln '" + id + "')"}}) {
    harness_.faults()->FailMatching(id, error);
    for (const absl::Status& status :
         {store().Space().status(), PublishShard(store(), SampleShard(901, 1, 4)).status()}) {
      EXPECT_TRUE(absl::IsUnavailable(status)) << ToString(status);
      EXPECT_THAT(Message(status), HasSubstr("'" + dir + "': its id cannot be read"));
      EXPECT_THAT(Message(status), HasSubstr(::strerrorname_np(error)));
      EXPECT_THAT(Message(status), HasSubstr(way_out));
      EXPECT_THAT(Message(status), Not(HasSubstr("another one lies in its place")));
    }
    harness_.faults()->FailMatching(id, 0);
    EXPECT_TRUE(store().Space().ok());
  }
  const KnownDirectory known = store().place();
  Publish(SampleShard(901, 1, 4));
  // Nor at a start that expects this very directory, whatever its device is called.
  harness_.Stop();
  CopyStore::Options options = harness_.options();
  for (const bool by_id : {false, true}) {
    options.same_as = known;
    options.same_as->device = known.device + 1;
    options.same_as->by_id = by_id;
    harness_.faults()->FailMatching(id, ESTALE);
    const absl::Status opened = CopyStore::Open(options).status();
    EXPECT_TRUE(absl::IsUnavailable(opened)) << ToString(opened);
    EXPECT_THAT(Message(opened), HasSubstr("its id cannot be read"));
    harness_.faults()->FailMatching(id, 0);
    EXPECT_TRUE(CopyStore::Open(options).ok());
  }
}

// Some network file systems number their files anew.
TEST_P(MeddledTest, TheSameDirectoryUnderAnotherNumberIsKnownByItsId) {
  const SampleImage sample = SampleShard(900, 1, 4);
  Publish(sample);
  const std::string dir = harness_.dir();
  const auto renumber = [&] {
    ASSERT_TRUE(env().Rename(dir, dir + "-old").ok());
    ASSERT_TRUE(env().CreateDirectory(dir, 0700).ok());
    const std::vector<std::string> names = env().List(dir + "-old").value();
    for (const std::string& name : names) {
      ASSERT_TRUE(env().Rename(JoinPath(dir + "-old", name), JoinPath(dir, name)).ok());
    }
    ASSERT_TRUE(env().RemoveDirectory(dir + "-old").ok());
  };
  for (Step step = 901; step < 903; ++step) {
    renumber();
    EXPECT_TRUE(store().Space().ok());
    EXPECT_TRUE(CheckShard(store(), sample).ok());
    ExpectPublishes(SampleShard(step, 1, 4));
  }
  // It is remembered: its id is not asked for as long as the number stays.
  renumber();
  EXPECT_TRUE(store().Space().ok());
  Write(Path(".holdfast/id"), "nonsense");
  EXPECT_TRUE(store().Space().ok());
  renumber();
  EXPECT_TRUE(absl::IsUnavailable(store().Space().status())) << "nobody knows what it is";
}

// ---- What it keeps beside copies ----

TEST_P(MeddledTest, WhatWasRemovedBesideTheCopiesIsMadeAgain) {
  const std::string id = Read(Path(".holdfast/id"));
  Step step = 900;
  for (const std::string& gone : {Home() + "/intents", Home(), Path(".holdfast")}) {
    const SampleImage kept = SampleShard(step++, 1, 4);
    const SampleImage removed = SampleShard(step++, 1, 4);
    Publish(kept);
    Publish(removed);
    ASSERT_TRUE(store().RemoveCopy(NameOf(removed)).ok());
    EXPECT_EQ(store().pool_bytes(), remote() ? 0 : removed.image.size());
    RemoveTree(gone);
    // The next write; what writes first may as well be a removal.
    if (gone == Home()) {
      const auto report = store().RemoveCopy(NameOf(kept));
      EXPECT_TRUE(report.ok()) << ToString(report.status());
      ExpectPublishes(kept);
    }
    ExpectPublishes(SampleShard(step++, 1, 4));
    EXPECT_EQ(Read(Path(".holdfast/id")), id) << gone << ": it is the same directory";
    EXPECT_TRUE(env().Info(Home() + "/reserve").ok()) << gone;
    EXPECT_TRUE(CheckShard(store(), kept).ok()) << gone;
    EXPECT_THAT(harness_.Leftovers(), IsEmpty()) << gone;
    EXPECT_EQ(env().Info(Home() + "/intents")->mode & 0777, 0700u);
    if (!remote()) {
      EXPECT_EQ(store().pool_bytes(), 0u) << gone;
      const auto report = store().RemoveCopy(NameOf(kept));
      ASSERT_TRUE(report.ok()) << ToString(report.status());
      EXPECT_EQ(report->bytes_recycled, kept.image.size()) << gone;
      ASSERT_TRUE(store().TrimPool(0).ok());
    }
  }
  harness_.Stop();
  ASSERT_TRUE(harness_.Start().ok());
  EXPECT_THAT(Scan().unknown, IsEmpty());
}

// It says no more that the directory is this daemon's.
TEST_P(MeddledTest, ALockThatWasRemovedIsTakenAgain) {
  harness_.Stop();
  harness_.options().owner = {"s1", "m1", "b1"};
  ASSERT_TRUE(harness_.Start().ok());
  CopyStore::Options second = harness_.options();
  if (remote()) {
    second.owner = {"s2", "m1", "b1"};
  }
  const auto others_status = [&] {
    const auto other = CopyStore::Open(second);
    return other.ok() ? (*other)->Sweep().status() : other.status();
  };
  ASSERT_TRUE(absl::IsUnavailable(others_status()));
  RemoveTree(Home());
  ExpectPublishes(SampleShard(900, 1, 4));
  const absl::Status others = others_status();
  EXPECT_TRUE(absl::IsUnavailable(others)) << ToString(others);
  EXPECT_THAT(Message(others), HasSubstr("lock"));
  ExpectPublishes(SampleShard(901, 1, 4));
  // Somebody else was faster.
  RemoveTree(Home());
  ASSERT_TRUE(env().CreateDirectories(Home(), 0700).ok());
  auto lock = env().Lock(Home() + "/lock");
  ASSERT_TRUE(lock.ok());
  for (int round = 0; round < 2; ++round) {
    const absl::Status refused = PublishShard(store(), SampleShard(902, 1, 4)).status();
    EXPECT_TRUE(absl::IsUnavailable(refused)) << ToString(refused);
    EXPECT_THAT(Message(refused), HasSubstr("lock"));
  }
  EXPECT_TRUE(CheckShard(store(), SampleShard(901, 1, 4)).ok());
  lock->reset();
  ExpectPublishes(SampleShard(902, 1, 4));
  EXPECT_EQ(store().refusal(), "");
}

class MeddledRemoteTest : public MeddledTest {};
INSTANTIATE_TEST_SUITE_P(Kinds, MeddledRemoteTest, testing::Values(DurableKind::kRemote),
                         [](const auto&) { return "Remote"; });

TEST_P(MeddledRemoteTest, WhoseNameItIsIsAskedAgain) {
  harness_.Stop();
  harness_.options().owner = {"s1", "m1", "b1"};
  ASSERT_TRUE(harness_.Start().ok());
  const std::string owner = Read(Home() + "/owner");
  RemoveTree(Home());
  ExpectPublishes(SampleShard(900, 1, 4));
  EXPECT_EQ(Read(Home() + "/owner"), owner);
  // Another daemon took the name meanwhile.
  RemoveTree(Home());
  ASSERT_TRUE(env().CreateDirectories(Home(), 0700).ok());
  Write(Home() + "/owner", "state s2\nmachine m2\nboot b2\n");
  for (int round = 0; round < 2; ++round) {
    const absl::Status refused = PublishShard(store(), SampleShard(901, 1, 4)).status();
    EXPECT_TRUE(absl::IsUnavailable(refused)) << ToString(refused);
    EXPECT_THAT(store().refusal(), HasSubstr("belongs to another daemon"));
  }
  ASSERT_TRUE(env().Unlink(Home() + "/owner").ok());
  ExpectPublishes(SampleShard(901, 1, 4));
  EXPECT_EQ(store().refusal(), "");
}

class MeddledNvmeTest : public MeddledTest {
 protected:
  MeddledNvmeTest() : MeddledTest({.kind = DurableKind::kNvme, .real = true}) {}
  std::string Pool() { return Path(".holdfast/pool"); }
  void PublishAndRemove(const SampleImage& sample) {
    Publish(sample);
    const auto report = store().RemoveCopy(NameOf(sample));
    ASSERT_TRUE(report.ok()) << ToString(report.status());
    EXPECT_EQ(report->bytes_recycled, sample.image.size());
  }
};
INSTANTIATE_TEST_SUITE_P(Kinds, MeddledNvmeTest, testing::Values(DurableKind::kNvme),
                         [](const auto&) { return "Nvme"; });

TEST_P(MeddledNvmeTest, RecycledFilesThatAreGoneHoldUpNothing) {
  constexpr int kFiles = 8;
  const auto fill = [&] {
    for (Rank rank = 0; rank < kFiles; ++rank) {
      Publish(SampleShard(700, rank, kFiles));
    }
    ASSERT_EQ(store().RemoveCheckpoint(CheckpointOf(SampleShard(700, 0, kFiles)))->copies, kFiles);
    ASSERT_THAT(env().List(Pool()).value(), SizeIs(kFiles));
  };
  // All but the one that fits least: it is tried last.
  fill();
  std::vector<std::string> names = env().List(Pool()).value();
  const auto bytes_of = [&](const std::string& name) {
    return env().Info(JoinPath(Pool(), name)).value().bytes;
  };
  std::sort(names.begin(), names.end(), [&](const std::string& one, const std::string& other) {
    return bytes_of(one) < bytes_of(other);
  });
  names.pop_back();
  for (const std::string& name : names) {
    ASSERT_TRUE(env().Unlink(JoinPath(Pool(), name)).ok());
  }
  ExpectPublishes(SampleShard(800, 0, 2));
  EXPECT_THAT(env().List(Pool()).value(), IsEmpty()) << "the one that was left was taken";
  EXPECT_EQ(store().pool_bytes(), 0u) << "the others are not claimed";
  // All, with their directory: noticed by who takes one, and by who brings one.
  for (const bool take : {true, false}) {
    fill();
    RemoveTree(Pool());
    if (take) {
      ExpectPublishes(SampleShard(801, 0, 2));
      EXPECT_EQ(store().pool_bytes(), 0u);
    }
    const auto report = store().RemoveCopy(NameOf(SampleShard(take ? 801 : 800, 0, 2)));
    ASSERT_TRUE(report.ok()) << ToString(report.status());
    EXPECT_GT(report->bytes_recycled, 0u);
    EXPECT_EQ(store().pool_bytes(), report->bytes_recycled);
    EXPECT_THAT(env().List(Pool()).value(), SizeIs(1));
    ASSERT_TRUE(store().TrimPool(0).ok());
  }
  fill();
  RemoveTree(Pool());
  EXPECT_TRUE(store().TrimPool(0).ok());
  EXPECT_EQ(store().pool_bytes(), 0u);
}

// ---- A job's directory ----

TEST_P(MeddledTest, AJobsDirectoryThatIsGoneIsMadeAgain) {
  Step step = 900;
  const auto expect_whole = [&](const char* what) {
    ExpectPublishes(SampleShard(step++, 1, 4));
    const auto job = store().FindJob("demo");
    EXPECT_TRUE(job.ok()) << what << ": " << ToString(job.status());
    const DurableScan scan = Scan();
    EXPECT_THAT(scan.unknown, IsEmpty()) << what << ": " << scan.unknown[0].path;
    EXPECT_THAT(scan.unreadable, IsEmpty()) << what;
    ASSERT_THAT(scan.jobs, SizeIs(1)) << what;
    EXPECT_EQ(scan.jobs[0].job, SampleJob()) << what;
    EXPECT_THAT(scan.jobs[0].claims, SizeIs(remote() ? 1 : 0)) << what;
    EXPECT_THAT(harness_.Leftovers(), IsEmpty()) << what;
  };
  expect_whole("at first");
  RemoveTree(Path("demo"));
  expect_whole("removed");
  RemoveTree(Path("demo"));
  ASSERT_TRUE(env().CreateDirectory(Path("demo"), 0750).ok());
  expect_whole("an empty one");
  ASSERT_TRUE(env().Unlink(Path("demo/JOB")).ok());
  expect_whole("JOB alone removed");
  EXPECT_THAT(Scan().jobs.at(0).checkpoints, SizeIs(2)) << "what lay there is seen again";
  CopyFile(Path("demo/JOB"), Path("demo/JOB"));
  expect_whole("JOB replaced by its like");
}

// The claim went with the directory.
TEST_P(MeddledTest, NobodyWritesWithoutAClaimThatIsThere) {
  Publish(SampleShard(900, 1, 4));
  RemoveTree(Path("demo"));
  const absl::Status status = PublishShard(store(), SampleShard(901, 1, 4)).status();
  EXPECT_EQ(absl::IsFailedPrecondition(status), remote()) << ToString(status);
  if (remote()) {
    EXPECT_THAT(Message(status), HasSubstr("has not claimed"));
    const AttemptClaim theirs{SampleJob().job, 3, "another opening"};
    Write(Path("demo/attempt-3"), EncodeClaim(theirs));
    const absl::Status claimed = store().ClaimAttempt(SampleJob(), 3, "opening 1");
    EXPECT_TRUE(absl::IsFailedPrecondition(claimed)) << ToString(claimed);
    EXPECT_THAT(Message(claimed), HasSubstr("another opening"));
  }
}

TEST_P(MeddledTest, AnotherRunsDirectoryInItsPlaceIsNeverWritten) {
  Publish(SampleShard(900, 1, 4));
  RemoveTree(Path("demo"));
  ASSERT_TRUE(env().CreateDirectory(Path("demo"), 0750).ok());
  JobIdentity other = SampleJob();
  other.job = OtherUuid();
  Write(Path("demo/JOB"), EncodeJobFile(other));
  const absl::Status opened = store().OpenJob(SampleJob());
  EXPECT_TRUE(absl::IsFailedPrecondition(opened)) << ToString(opened);
  EXPECT_THAT(Message(opened), HasSubstr(OtherUuid().ToString()));
  EXPECT_TRUE(absl::IsFailedPrecondition(ClaimAndPublish(SampleShard(901, 1, 4))));
  EXPECT_TRUE(absl::IsFailedPrecondition(PublishShard(store(), SampleShard(901, 1, 4)).status()));
  EXPECT_THAT(env().List(Path("demo")).value(), testing::ElementsAre("JOB"));
  EXPECT_THAT(harness_.Leftovers(), IsEmpty());
  EXPECT_TRUE(store().OpenJob(other).ok()) << "it is theirs";
}

// ---- Names among ours that are no files ----

TEST_P(MeddledNvmeTest, LinksAndPipesBesideTheCopiesAreReportedAndLeftAlone) {
  TemporaryDirectory outside;
  ASSERT_TRUE(Overwrite(env(), outside.Path("theirs"), "mine").ok());
  const std::string a(32, 'a');
  const std::string b(32, 'b');
  const std::string c(32, 'c');
  const std::string intents = Path(".holdfast/intents");
  harness_.Stop();
  std::vector<std::string> paths;
  const auto put = [&](const std::string& directory, const std::vector<std::string>& names) {
    const std::string link = JoinPath(directory, names.at(0));
    const std::string pipe = JoinPath(directory, names.at(1));
    const std::string inner = JoinPath(directory, names.at(2));
    ASSERT_EQ(::symlink(outside.Path("theirs").c_str(), link.c_str()), 0);
    ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
    ASSERT_EQ(::mkdir(inner.c_str(), 0700), 0);
    paths.insert(paths.end(), {link, pipe, inner});
  };
  put(Pool(), {a, b, c});
  put(intents, {a + ".intent", b + ".intent", c + ".intent"});
  put(intents, {TemporaryName(a + ".intent", a), TemporaryName(b + ".intent", b),
                TemporaryName(c + ".intent", c)});
  ASSERT_TRUE(harness_.Start().ok());
  EXPECT_EQ(store().pool_bytes(), 0u);
  const auto reported = [&] {
    const DurableScan scan = Scan();
    EXPECT_EQ(scan.unknown_count, paths.size());
    for (const std::string& path : paths) {
      EXPECT_THAT(scan.unknown, Contains(testing::Field(&UnknownFile::path, path)));
      struct stat st = {};
      EXPECT_EQ(::lstat(path.c_str(), &st), 0) << path << " was left alone";
    }
    EXPECT_EQ(Read(outside.Path("theirs")), "mine");
  };
  reported();
  const auto swept = store().Sweep();
  ASSERT_TRUE(swept.ok());
  EXPECT_THAT(swept->left_alone, SizeIs(6));
  PublishAndRemove(SampleShard(900, 0, 2));
  ExpectPublishes(SampleShard(907, 0, 2));
  ASSERT_TRUE(store().TrimPool(0).ok());
  reported();
}

// Put in the place of a file that is known.
TEST_P(MeddledNvmeTest, WhatReplacedARecycledFileIsNotOverwritten) {
  TemporaryDirectory outside;
  for (const bool trim : {false, true}) {
    PublishAndRemove(SampleShard(900, 0, 2));
    const std::string path = JoinPath(Pool(), env().List(Pool())->at(0));
    ASSERT_TRUE(env().Rename(path, outside.Path("theirs")).ok());
    ASSERT_EQ(::symlink(outside.Path("theirs").c_str(), path.c_str()), 0);
    const std::string before = Read(outside.Path("theirs"));
    if (trim) {
      EXPECT_TRUE(store().TrimPool(0).ok());
    } else {
      ExpectPublishes(SampleShard(907, 0, 2));
    }
    EXPECT_EQ(store().pool_bytes(), 0u);
    EXPECT_EQ(Read(outside.Path("theirs")), before);
    EXPECT_TRUE(env().Info(path).ok()) << "left alone";
    EXPECT_THAT(Scan().unknown, SizeIs(1));
    ASSERT_EQ(::unlink(path.c_str()), 0);
  }
}

}  // namespace
}  // namespace holdfast
