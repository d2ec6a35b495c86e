// Files that somebody cut, extended, swapped, replaced, or that a newer program wrote: told apart,
// reported, left alone, and of no harm to what lies beside them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <functional>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "tests/tiers/durable/hostile_fixture.h"
#include "tiers/durable/names.h"
#include "tiers/durable/small_files.h"
#include "tiers/image/frame.h"
#include "tiers/image/record.h"

namespace holdfast {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;

class HostileCopyTest : public HostileTest, public testing::WithParamInterface<DurableKind> {
 protected:
  HostileCopyTest() : HostileTest(DurablePlace{.kind = GetParam()}) {}
  // The sample's job, owned as that file is.
  JobIdentity OwnedAs(const std::string& path) {
    JobIdentity job = SampleJob();
    const FileInfo info = env().Info(path).value();
    job.uid = info.uid;
    job.gid = info.gid;
    return job;
  }
};
INSTANTIATE_TEST_SUITE_P(Kinds, HostileCopyTest,
                         testing::Values(DurableKind::kNvme, DurableKind::kRemote),
                         [](const testing::TestParamInfo<DurableKind>& kind) {
                           return kind.param == DurableKind::kNvme ? "Nvme" : "Remote";
                         });

class SymlinkTest : public HostileTest, public testing::WithParamInterface<DurableKind> {
 protected:
  SymlinkTest() : HostileTest(DurablePlace{.kind = GetParam(), .real = true}) {}
};
INSTANTIATE_TEST_SUITE_P(Kinds, SymlinkTest,
                         testing::Values(DurableKind::kNvme, DurableKind::kRemote));

TEST_P(HostileCopyTest, CutAndExtendedFiles) {
  const SampleImage good = SampleShard(900, 0, 4);
  const SampleImage bad = SampleShard(900, 1, 4);
  Publish(good);
  Publish(bad);
  const std::string image = Read(ImageOf(bad));
  const std::string record = Read(RecordOf(bad));
  const struct {
    const char* what;
    std::string path;
    std::string bytes;
  } kinds[] = {
      {"image cut", ImageOf(bad), image.substr(0, image.size() - 1)},
      {"image empty", ImageOf(bad), ""},
      {"image extended", ImageOf(bad), image + "x"},
      {"record cut", RecordOf(bad), record.substr(0, record.size() - 1)},
      {"record empty", RecordOf(bad), ""},
      {"record extended", RecordOf(bad), record + "x"},
  };
  for (const auto& kind : kinds) {
    const std::string before = Read(kind.path);
    Write(kind.path, kind.bytes);
    ExpectRefused(bad, absl::StatusCode::kDataLoss, kind.what);
    EXPECT_TRUE(CheckShard(store(), good).ok());
    EXPECT_EQ(Read(kind.path), kind.bytes) << "left alone";
    Write(kind.path, before);
    EXPECT_TRUE(CheckShard(store(), bad).ok()) << kind.what;
  }
  ASSERT_TRUE(env().Unlink(ImageOf(bad)).ok());
  ExpectRefused(bad, absl::StatusCode::kDataLoss, "image gone");
}

TEST_P(HostileCopyTest, EveryByteOfTheRecordCounts) {
  const SampleImage sample = SampleShard(900, 1, 4);
  Publish(sample);
  const std::string record = Read(RecordOf(sample));
  for (size_t at = 0; at < record.size(); ++at) {
    std::string bad = record;
    bad[at] = static_cast<char>(bad[at] ^ 0x10);
    Write(RecordOf(sample), bad);
    const absl::StatusCode code = Opens(sample).code();
    const bool version = at >= 8 && at < 12;
    EXPECT_EQ(code, version ? absl::StatusCode::kFailedPrecondition : absl::StatusCode::kDataLoss)
        << "byte " << at << ": " << ToString(Opens(sample));
  }
}

TEST_P(HostileCopyTest, RecordsOfANewerVersionAreLeftAlone) {
  const SampleImage newer = SampleShard(900, 1, 4);
  Publish(newer);
  Write(RecordOf(newer), FrameRecordBody("of the future", kRecordFormatVersion + 1));
  ExpectRefused(newer, absl::StatusCode::kFailedPrecondition, "newer");
  EXPECT_TRUE(absl::IsAlreadyExists(PublishShard(store(), newer).status()));
  harness_.Stop();
  ASSERT_TRUE(harness_.Start().ok());
  EXPECT_TRUE(env().Info(RecordOf(newer)).ok());
  EXPECT_TRUE(env().Info(ImageOf(newer)).ok());
}

// Whole and valid, but of another rank, step, attempt, job or world.
TEST_P(HostileCopyTest, SwappedCopies) {
  const SampleImage here = SampleShard(900, 1, 4);
  Publish(here);
  if (GetParam() == DurableKind::kRemote) {
    ASSERT_TRUE(store().ClaimAttempt(SampleJob(), 5, "o").ok());
  }
  SampleImage other_job = here;
  other_job.record.id.job = OtherUuid();
  SampleImage other_name = here;
  other_name.record.job_name = "demo2";
  SampleImage other_world = here;
  other_world.record.world_size = 8;
  SampleImage in_memory = here;  // the generation is that of a slot: never published here
  const SampleImage others[] = {SampleShard(900, 2, 4),
                                SampleShard(901, 1, 4),
                                SampleShard(900, 1, 4, 5),
                                other_job,
                                other_name,
                                other_world,
                                in_memory};
  const std::string image = Read(ImageOf(here));
  const std::string record = Read(RecordOf(here));
  for (const SampleImage& other : others) {
    ShardRecord theirs = other.record;
    theirs.generation = &other == &others[6] ? 5 : 0;
    Write(ImageOf(here), other.image);
    Write(RecordOf(here), EncodeRecord(theirs));
    const std::string what =
        absl::StrCat("swapped with ", theirs.id.ToString(), " of ", theirs.world_size);
    if (GetParam() == DurableKind::kNvme && theirs.world_size != 4) {
      // Names on NVMe have no world size: whoever opens it says what it is to be.
      EXPECT_TRUE(absl::IsDataLoss(Opens(here))) << what;
      continue;
    }
    ExpectRefused(here, absl::StatusCode::kDataLoss, what);
  }
  Write(ImageOf(here), image);
  Write(RecordOf(here), record);
  EXPECT_TRUE(CheckShard(store(), here).ok());
}

TEST_P(HostileCopyTest, CopiesThatContradictTheirNeighbours) {
  const SampleImage first = SampleShard(900, 0, 4);
  SampleImage second = SampleShard(900, 1, 4);
  Publish(first);
  Publish(second);
  second.record.generation = 0;
  second.record.descent = {{3, {2, 7}}, {2, {0, 0}}};
  Write(RecordOf(second), EncodeRecord(second.record));
  const auto scan = store().ScanAll();
  ASSERT_TRUE(scan.ok());
  EXPECT_THAT(scan->jobs.at(0).checkpoints.at(0).copies, SizeIs(1));
  ASSERT_THAT(scan->unreadable, SizeIs(1));
  EXPECT_THAT(Message(scan->unreadable[0].why), HasSubstr("line of descent"));
}

// What belongs there is told, so that it can be written anew: by its names, or the step's manifest.
// A step of the remote tier that is marked as being written promises nothing.
TEST_P(HostileCopyTest, DamagedCopiesThatBelongThereAreTold) {
  const bool remote = GetParam() == DurableKind::kRemote;
  const std::vector<SampleImage> samples = {SampleShard(900, 0, 2), SampleShard(900, 1, 2)};
  const std::vector<PublishedCopy> copies = {Publish(samples[0]), Publish(samples[1])};
  const std::string image = ImageOf(samples[1]);
  const std::string record = RecordOf(samples[1]);
  const std::string image_bytes = Read(image);
  const std::string record_bytes = Read(record);
  const auto restore = [&] {
    Write(image, image_bytes);
    Write(record, record_bytes);
  };
  const auto step = [&] { return store().ScanAll()->jobs.at(0).checkpoints.at(0); };
  const struct {
    const char* what;
    std::function<void()> make;
    bool by_record;  // that tells of it on a drive, too
  } kinds[] = {
      {"image cut", [&] { Write(image, image_bytes.substr(1)); }, true},
      {"image gone", [&] { ASSERT_TRUE(env().Unlink(image).ok()); }, true},
      {"record cut", [&] { Write(record, record_bytes.substr(1)); }, false},
      {"record gone", [&] { ASSERT_TRUE(env().Unlink(record).ok()); }, false},
  };
  for (const auto& kind : kinds) {
    SCOPED_TRACE(kind.what);
    if (remote) {
      const std::string mark = Path("demo/900-a3/writing");
      Write(mark, "");
      kind.make();
      EXPECT_THAT(step().damaged, SizeIs(0));
      ASSERT_TRUE(env().Unlink(mark).ok());
      EXPECT_THAT(step().damaged, SizeIs(1)) << "it has lost its manifest, and more";
      restore();
      ASSERT_TRUE(store().PublishManifest(ManifestOf(samples, copies)).ok());
    }
    EXPECT_THAT(step().damaged, SizeIs(0));
    kind.make();
    const CheckpointScan found = step();
    EXPECT_THAT(found.copies, SizeIs(1));
    ASSERT_THAT(found.damaged, SizeIs(1));
    const DamagedEntry& damaged = found.damaged[0];
    EXPECT_EQ(damaged.entry.rank, 1u);
    EXPECT_NE(damaged.why, "");
    if (remote || kind.by_record) {
      EXPECT_EQ(damaged.world_size, 2u);
      EXPECT_EQ(damaged.descent, samples[1].record.descent);
      EXPECT_EQ(damaged.entry.record_crc, copies[1].record_crc);
    } else {
      EXPECT_EQ(damaged.world_size, 0u);
    }
    EXPECT_EQ(damaged.entry.shard_bytes, image_bytes.size());
    EXPECT_GE(store().ScanAll()->unreadable_count, 1u);
    restore();
    if (remote) {
      ASSERT_TRUE(env().Unlink(Path("demo/900-a3/MANIFEST")).ok());
      static_cast<void>(env().Unlink(Path("demo/900-a3/manifest.json")));
    }
  }
}

TEST_P(HostileCopyTest, WhatIsNoCopysFaultIsNotDamaged) {
  const std::vector<SampleImage> samples = {SampleShard(900, 0, 2), SampleShard(900, 1, 2)};
  const std::vector<PublishedCopy> copies = {Publish(samples[0]), Publish(samples[1])};
  const auto damaged = [&] {
    size_t count = 0;
    const absl::StatusOr<DurableScan> scan = store().ScanAll();
    for (const JobScan& job : scan->jobs) {
      for (const CheckpointScan& step : job.checkpoints) {
        count += step.damaged.size();
      }
    }
    return count;
  };
  if (GetParam() == DurableKind::kRemote) {
    ASSERT_TRUE(store().PublishManifest(ManifestOf(samples, copies)).ok());
  }
  for (const std::string& path :
       {RecordOf(samples[1]), ImageOf(samples[1]), Path("demo/900-a3"), Path("demo")}) {
    for (const int error : {EIO, ESTALE, EACCES, ETIMEDOUT}) {
      harness_.faults()->FailMatching(path, error);
      EXPECT_EQ(damaged(), 0u) << path << " " << error;
      harness_.faults()->FailMatching(path, 0);
    }
  }
  if (GetParam() == DurableKind::kNvme) {
    const std::string record = Read(RecordOf(samples[1]));
    Write(RecordOf(samples[1]), FrameRecordBody("of the future", kRecordFormatVersion + 1));
    EXPECT_EQ(damaged(), 0u) << "of a newer version";
    ShardRecord other = samples[1].record;
    other.generation = 0;
    other.descent = {{3, {2, 7}}, {2, {0, 0}}};
    Write(RecordOf(samples[1]), EncodeRecord(other));
    EXPECT_EQ(damaged(), 0u) << "one of the two contradicts the other";
    Write(RecordOf(samples[1]), record);
  }
}

// What is being written or removed, on this node or in the remote tier on any, is no damage.
TEST_P(HostileCopyTest, AnImageWithoutARecordIsDamageUnlessAnIntentNamesIt) {
  const SampleImage sample = SampleShard(900, 1, 2);
  Publish(SampleShard(900, 0, 2));
  Publish(sample);
  ASSERT_TRUE(env().Unlink(RecordOf(sample)).ok());
  std::string intents = Path(".holdfast/intents/");
  if (GetParam() == DurableKind::kRemote) {
    ASSERT_TRUE(env().Unlink(Path("demo/900-a3/writing")).ok());
    intents = Path(".holdfast/nodes/another/intents/");
    ASSERT_TRUE(env().CreateDirectories(intents.substr(0, intents.size() - 1), 0750).ok());
  }
  const auto damaged = [&] {
    return store().ScanAll()->jobs.at(0).checkpoints.at(0).damaged.size();
  };
  EXPECT_EQ(damaged(), 1u);
  Intent intent;
  intent.unique = std::string(32, 'a');
  intent.job = SampleJob().job;
  intent.job_name = "demo";
  intent.checkpoint = {3, 900};
  intent.world_size = 2;
  intent.ranks = {1};
  const std::string path = intents + IntentFileName(intent.unique);
  for (const IntentKind kind : {IntentKind::kPublish, IntentKind::kRemove}) {
    intent.kind = kind;
    Write(path, EncodeIntent(intent));
    EXPECT_EQ(damaged(), 0u);
  }
  harness_.faults()->FailMatching(path, EIO);
  EXPECT_EQ(damaged(), 0u) << "who knows what it names";
  EXPECT_THAT(store().ScanAll()->hidden, SizeIs(1));
  harness_.faults()->FailMatching(path, 0);
  Intent other = intent;
  other.ranks = {0};
  Write(path, EncodeIntent(other));
  EXPECT_EQ(damaged(), 1u) << "it is of another rank";
  other = intent;
  other.checkpoint.attempt = 4;
  Write(path, EncodeIntent(other));
  EXPECT_EQ(damaged(), 1u) << "it is of another attempt";
  Write(path, EncodeIntent(intent).substr(1));
  EXPECT_EQ(damaged(), 1u) << "it says nothing";
}

// A call that failed once as an intent was put right: before anything is judged, it is tried again.
TEST_P(HostileCopyTest, WhatASweepCouldNotPutRightIsNoDamage) {
  const SampleImage sample = SampleShard(900, 1, 2);
  Publish(SampleShard(900, 0, 2));
  Publish(sample);
  Intent intent;
  intent.unique = std::string(32, 'a');
  // As a crash leaves it before the record has its name.
  const std::string step = Path("demo/900-a3");
  const std::string record = RecordOf(sample).substr(step.size() + 1);
  ASSERT_TRUE(
      env().Rename(RecordOf(sample), JoinPath(step, TemporaryName(record, intent.unique))).ok());
  intent.job = SampleJob().job;
  intent.job_name = "demo";
  intent.checkpoint = {3, 900};
  intent.world_size = 2;
  intent.ranks = {1};
  const std::string home = GetParam() == DurableKind::kRemote
                               ? Path(".holdfast/nodes/") + harness_.options().node_name
                               : Path(".holdfast");
  Write(home + "/intents/" + IntentFileName(intent.unique), EncodeIntent(intent));
  const std::string call = "sync directory " + step;
  harness_.faults()->FailMatching(call, EIO);
  ASSERT_THAT(store().Sweep()->left_alone, SizeIs(1));
  const auto damaged = [&] {
    return store().ScanAll()->jobs.at(0).checkpoints.at(0).damaged.size();
  };
  EXPECT_EQ(damaged(), 0u);
  EXPECT_TRUE(env().Info(ImageOf(sample)).ok());
  harness_.faults()->FailMatching(call, 0);
  EXPECT_EQ(damaged(), 0u);
  EXPECT_FALSE(env().Info(ImageOf(sample)).ok());
  EXPECT_THAT(harness_.Leftovers(), SizeIs(0));
}

// No more than so many are told.
TEST_P(HostileCopyTest, DamagedCopiesHaveALimit) {
  if (GetParam() == DurableKind::kRemote) {
    GTEST_SKIP() << "there they are no more than a manifest names";
  }
  Publish(SampleShard(900, 0, 2));
  for (size_t i = 1; i <= kScanDamagedMax + 3; ++i) {
    Write(Path(absl::StrCat("demo/900-a3/", i, ".record")), "x");
  }
  const auto scan = store().ScanAll();
  ASSERT_TRUE(scan.ok());
  EXPECT_THAT(scan->jobs.at(0).checkpoints.at(0).damaged, SizeIs(kScanDamagedMax));
  EXPECT_EQ(scan->unreadable_count, kScanDamagedMax + 3);
}

// A directory that has lost its JOB is no new job's while anything of a step may lie there.
TEST_P(HostileCopyTest, NoJobIsMadeWhereCopiesLieOrMayLie) {
  const SampleImage sample = SampleShard(900, 1, 4);
  Publish(sample);
  const std::string job_file = Path("demo/JOB");
  const std::string good = Read(job_file);
  JobIdentity other = SampleJob();
  other.job = OtherUuid();
  const auto open_anew = [&](const JobIdentity& job) { return store().OpenJob(job); };
  ASSERT_TRUE(env().Unlink(job_file).ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(open_anew(other))) << "the records are of another";
  EXPECT_FALSE(env().Info(job_file).ok());
  harness_.faults()->FailMatching("list " + Path("demo/900-a3"), EIO);
  EXPECT_FALSE(open_anew(other).ok());
  EXPECT_THAT(store().ScanAll()->hidden, SizeIs(1)) << "something may lie there";
  harness_.faults()->FailMatching("list " + Path("demo/900-a3"), 0);
  EXPECT_TRUE(open_anew(SampleJob()).ok()) << "they are its own";
  EXPECT_EQ(Read(job_file), good);
  // Damaged, and nothing else is left.
  ASSERT_TRUE(store().RemoveCheckpoint(CheckpointOf(sample)).ok());
  Write(job_file, good.substr(1));
  EXPECT_THAT(store().ScanAll()->hidden, SizeIs(1));
  EXPECT_FALSE(open_anew(other).ok());
}

TEST_P(HostileCopyTest, JobFiles) {
  const SampleImage sample = SampleShard(900, 1, 4);
  Publish(sample);
  const std::string good = Read(Path("demo/JOB"));
  std::string newer = good;
  newer[8] = 2;
  JobIdentity renamed = SampleJob();
  renamed.name = "other";
  const struct {
    const char* what;
    std::string bytes;
    absl::StatusCode code;
  } kinds[] = {
      {"empty", "", absl::StatusCode::kDataLoss},
      {"torn", good.substr(0, good.size() - 3), absl::StatusCode::kDataLoss},
      {"newer", newer, absl::StatusCode::kFailedPrecondition},
      {"of another name", EncodeJobFile(renamed), absl::StatusCode::kDataLoss},
      {"another kind of file", EncodeFrame(FrameKind::kIntent, "x"), absl::StatusCode::kDataLoss},
      {"huge", std::string(10'000, 'x'), absl::StatusCode::kDataLoss},
  };
  for (const auto& kind : kinds) {
    Write(Path("demo/JOB"), kind.bytes);
    EXPECT_EQ(store().FindJob("demo").status().code(), kind.code) << kind.what;
    EXPECT_FALSE(store().RemoveJob(SampleJob().job, "demo").ok()) << kind.what;
    const auto scan = store().ScanAll();
    ASSERT_TRUE(scan.ok());
    if (kind.code == absl::StatusCode::kDataLoss) {  // the record says whose it is
      EXPECT_THAT(scan->unreadable, IsEmpty()) << kind.what;
      ASSERT_THAT(scan->jobs, SizeIs(1)) << kind.what;
      EXPECT_EQ(scan->jobs[0].job, OwnedAs(RecordOf(sample))) << kind.what;
      EXPECT_EQ(Read(Path("demo/JOB")), EncodeJobFile(scan->jobs[0].job)) << kind.what;
    } else {
      EXPECT_THAT(scan->unreadable, SizeIs(1)) << kind.what;
      EXPECT_EQ(scan->hidden.count("demo"), 1u) << kind.what;
      EXPECT_EQ(Read(Path("demo/JOB")), kind.bytes) << kind.what;
    }
  }
  Write(Path("demo/JOB"), good);
  EXPECT_TRUE(CheckShard(store(), sample).ok());
}

TEST_P(HostileCopyTest, AJobFileThatIsGoneIsRebuiltFromRecords) {
  const SampleImage sample = SampleShard(900, 1, 4);
  const SampleImage other = SampleShard(901, 0, 4);
  Publish(sample);
  Publish(other);
  ASSERT_TRUE(env().Unlink(Path("demo/JOB")).ok());
  const std::string good = Read(RecordOf(other));
  Write(RecordOf(other), "damaged");
  auto scan = store().ScanAll();
  ASSERT_TRUE(scan.ok());
  ASSERT_THAT(scan->jobs, SizeIs(1));
  EXPECT_EQ(scan->jobs[0].job, OwnedAs(RecordOf(sample))) << "one record is enough";
  EXPECT_EQ(Read(Path("demo/JOB")), EncodeJobFile(scan->jobs[0].job));
  EXPECT_THAT(scan->hidden, IsEmpty());
  EXPECT_TRUE(CheckShard(store(), sample).ok());
  // Nobody's word: of no record.
  ASSERT_TRUE(env().Unlink(Path("demo/JOB")).ok());
  const std::string first = Read(RecordOf(sample));
  Write(RecordOf(sample), "damaged, too");
  scan = store().ScanAll();
  ASSERT_TRUE(scan.ok());
  EXPECT_THAT(scan->jobs, IsEmpty());
  ASSERT_EQ(scan->hidden.count("demo"), 1u) << "something was saved there";
  EXPECT_THAT(Message(scan->hidden.at("demo")), HasSubstr("no record in it can be read"));
  EXPECT_FALSE(env().Info(Path("demo/JOB")).ok());
  // Nor of records that contradict each other.
  absl::StatusOr<ShardRecord> record = DecodeRecord(good);
  ASSERT_TRUE(record.ok());
  record->id.job = OtherUuid();
  Write(RecordOf(other), EncodeRecord(*record));
  Write(RecordOf(sample), first);
  scan = store().ScanAll();
  ASSERT_TRUE(scan.ok());
  ASSERT_EQ(scan->hidden.count("demo"), 1u);
  EXPECT_THAT(Message(scan->hidden.at("demo")), HasSubstr("more than one job"));
  // What was only begun has nothing to lose.
  ASSERT_TRUE(env().CreateDirectory(Path("begun"), 0750).ok());
  ASSERT_TRUE(env().CreateDirectory(Path("begun/900-a3"), 0750).ok());
  scan = store().ScanAll();
  ASSERT_TRUE(scan.ok());
  EXPECT_EQ(scan->hidden.count("begun"), 0u);
}

TEST_P(HostileCopyTest, AnOwnerThatAPersonNamesGoesIntoAJobFileThatIsLost) {
  const SampleImage sample = SampleShard(900, 1, 4);
  Publish(sample);
  const uint32_t uid = ::geteuid();
  const JobIdentity named{SampleJob().job, "demo", uid + 7, ::getegid()};
  const auto write = [&] { return store().WriteJobFile("demo", {named.uid, named.gid}); };
  // One that is there is nobody's to change.
  auto written = write();
  ASSERT_TRUE(written.ok()) << ToString(written.status());
  EXPECT_FALSE(written->written);
  EXPECT_EQ(written->job, SampleJob());
  // Gone, then damaged.
  for (const bool gone : {true, false}) {
    if (gone) {
      ASSERT_TRUE(env().Unlink(Path("demo/JOB")).ok());
    } else {
      Write(Path("demo/JOB"), "damaged");
    }
    written = write();
    ASSERT_TRUE(written.ok()) << ToString(written.status());
    EXPECT_TRUE(written->written);
    EXPECT_EQ(written->job, named);
    EXPECT_EQ(Read(Path("demo/JOB")), EncodeJobFile(named));
  }
  EXPECT_TRUE(CheckShard(store(), sample).ok());
  // Of whom nothing lies here; and what no record tells of.
  EXPECT_EQ(store().WriteJobFile("nobody", {1, 1}).status().code(), absl::StatusCode::kNotFound);
  ASSERT_TRUE(env().Unlink(Path("demo/JOB")).ok());
  const std::string record = Read(RecordOf(sample));
  Write(RecordOf(sample), "damaged, too");
  written = write();
  EXPECT_EQ(written.status().code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(Message(written.status()), HasSubstr("put JOB or one of the records back"));
  EXPECT_FALSE(env().Info(Path("demo/JOB")).ok());
  // Nor are records of two jobs anybody's.
  Write(RecordOf(sample), record);
  const SampleImage other = SampleShard(901, 0, 4);
  absl::StatusOr<ShardRecord> theirs = DecodeRecord(record);
  ASSERT_TRUE(theirs.ok());
  theirs->id = other.record.id;
  theirs->id.job = OtherUuid();
  ASSERT_TRUE(env().CreateDirectory(Path("demo/901-a3"), 0750).ok());
  Write(RecordOf(other), EncodeRecord(*theirs));
  written = write();
  EXPECT_EQ(written.status().code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(Message(written.status()), HasSubstr("more than one job"));
}

// Where records do not agree on the owner only a person knows; the refusal says what to type.
TEST_P(HostileCopyTest, RecordsOfTwoOwnersNeedAPersonsWord) {
  const SampleImage sample = SampleShard(900, 1, 4);
  Publish(sample);
  Publish(SampleShard(901, 0, 4));
  const auto record = env().Open(RecordOf(sample), OpenMode::kReadWrite);
  ASSERT_TRUE(record.ok());
  ASSERT_TRUE((*record)->SetOwner(4711, 4711).ok());
  ASSERT_TRUE(env().Unlink(Path("demo/JOB")).ok());
  const auto scan = store().ScanAll();
  ASSERT_TRUE(scan.ok());
  ASSERT_EQ(scan->hidden.count("demo"), 1u);
  EXPECT_THAT(Message(scan->hidden.at("demo")),
              HasSubstr("more than one owner; put the file back, or say whose the job is: "
                        "ckptctl rebuild demo --owner UID:GID"));
  const auto written = store().WriteJobFile("demo", {4711, 4711});
  ASSERT_TRUE(written.ok()) << ToString(written.status());
  EXPECT_EQ(written->job.uid, 4711u);
}

TEST_P(HostileCopyTest, AJobThatIsBeingRemovedIsNotRebuilt) {
  if (GetParam() == DurableKind::kNvme) {
    return;  // there nobody else removes
  }
  Publish(SampleShard(900, 1, 4));
  Write(Path("demo/" + RemovedName(SampleJob().job)), "");
  ASSERT_TRUE(env().Unlink(Path("demo/JOB")).ok());
  const auto scan = store().ScanAll();
  ASSERT_TRUE(scan.ok());
  EXPECT_THAT(scan->jobs, IsEmpty());
  EXPECT_FALSE(env().Info(Path("demo/JOB")).ok());
}

TEST_P(HostileCopyTest, IntentsThatCannotBeBelievedAreLeftAlone) {
  const SampleImage sample = SampleShard(900, 1, 4);
  Publish(sample);
  const std::string intents = GetParam() == DurableKind::kNvme
                                  ? Path(".holdfast/intents/")
                                  : Path(".holdfast/nodes/node-1/intents/");
  const std::string unique(32, 'a');
  Intent intent;
  intent.kind = IntentKind::kRemove;
  intent.unique = unique;
  intent.job = SampleJob().job;
  intent.job_name = "demo";
  intent.checkpoint = {3, 900};
  intent.world_size = 4;
  intent.ranks = {1};
  const std::string good = EncodeIntent(intent);
  std::string newer = good;
  newer[8] = 7;
  const std::vector<std::pair<std::string, std::string>> files = {
      {unique + ".intent", good.substr(0, 20)},
      {unique + ".intent", newer},
      {std::string(32, 'b') + ".intent", good},  // under another name
      {"x.intent", good},
      {unique, good},
      {std::string(32, 'A') + ".intent", good},
  };
  for (const auto& [name, bytes] : files) {
    Write(intents + name, bytes);
    const auto swept = store().Sweep();
    ASSERT_TRUE(swept.ok());
    EXPECT_THAT(swept->left_alone, SizeIs(1)) << name;
    EXPECT_TRUE(CheckShard(store(), sample).ok());
    EXPECT_EQ(Read(intents + name), bytes);
    ASSERT_TRUE(env().Unlink(intents + name).ok());
  }
  // A true one, of a removal that was not begun: the copy stays.
  Write(intents + unique + ".intent", good);
  EXPECT_THAT(store().Sweep()->done, SizeIs(1));
  EXPECT_TRUE(CheckShard(store(), sample).ok());
  // The removal of a step that is not there does no harm.
  intent.checkpoint.step = 17;
  Write(intents + unique + ".intent", EncodeIntent(intent));
  EXPECT_THAT(store().Sweep()->done, SizeIs(1));
  EXPECT_THAT(harness_.Leftovers(), SizeIs(0));
}

// ---- Names that lead elsewhere ----

TEST_P(SymlinkTest, AreNeverFollowed) {
  const SampleImage sample = SampleShard(900, 1, 4);
  Publish(sample);
  TemporaryDirectory outside;
  const auto link = [](const std::string& to, const std::string& at) {
    ASSERT_EQ(::symlink(to.c_str(), at.c_str()), 0) << at;
  };
  // A record, an image, JOB.
  for (const std::string& path : {RecordOf(sample), ImageOf(sample), Path("demo/JOB")}) {
    ASSERT_TRUE(env().Rename(path, outside.Path("there")).ok());
    link(outside.Path("there"), path);
    harness_.Stop();
    harness_.Start().IgnoreError();
    if (path == Path("demo/JOB")) {
      EXPECT_TRUE(absl::IsFailedPrecondition(store().FindJob("demo").status()));
    } else {
      EXPECT_TRUE(absl::IsDataLoss(Opens(sample))) << ToString(Opens(sample));
    }
    EXPECT_GE(store().ScanAll()->unreadable_count, 1u) << path;
    ASSERT_TRUE(env().Unlink(path).ok());
    ASSERT_TRUE(env().Rename(outside.Path("there"), path).ok());
  }
  harness_.Stop();
  ASSERT_TRUE(harness_.Start().ok());
  EXPECT_TRUE(CheckShard(store(), sample).ok());
  // A step's directory, a job's.
  link(outside.path(), Path("demo/901-a3"));
  EXPECT_TRUE(absl::IsFailedPrecondition(PublishShard(store(), SampleShard(901, 1, 4)).status()));
  link(outside.path(), Path("other"));
  JobIdentity other = SampleJob();
  other.name = "other";
  EXPECT_FALSE(store().OpenJob(other).ok());
  EXPECT_EQ(store().ScanAll()->unknown_count, 2u);
  ASSERT_TRUE(store().RemoveJob(SampleJob().job, "demo").ok());
  EXPECT_EQ(env().List(outside.path())->size(), 0u) << "nothing was written there";
  EXPECT_TRUE(env().Info(Path("demo/901-a3")).ok()) << "left alone";
}

// Whoever may make names in the directory, as in a shared scratch, and was there first, does not
// say where the daemon's files go.
TEST_P(SymlinkTest, NobodyElseMakesTheDaemonsOwnDirectory) {
  TemporaryDirectory outside;
  const std::string home = Path(".holdfast");
  const bool remote = GetParam() == DurableKind::kRemote;
  harness_.Stop();
  // 1. Each directory on the way, as a link.
  const std::vector<std::string> below =
      remote ? std::vector<std::string>{"", "/nodes", "/nodes/" + harness_.options().node_name,
                                        "/nodes/" + harness_.options().node_name + "/intents"}
             : std::vector<std::string>{"", "/intents", "/pool"};
  for (const std::string& at : below) {
    std::filesystem::remove_all(home);
    std::filesystem::create_directories(ParentDirectory(home + at));
    ASSERT_EQ(::symlink(outside.path().c_str(), (home + at).c_str()), 0) << at;
    harness_.Start().IgnoreError();
    const absl::Status status = PublishShard(store(), SampleShard(900, 1, 4)).status();
    EXPECT_FALSE(status.ok()) << at;
    EXPECT_THAT(Message(status),
                HasSubstr("is a symbolic link: ckptd has this directory for itself"));
    EXPECT_EQ(env().List(outside.path())->size(), 0u) << at << ": nothing was made there";
    harness_.Stop();
  }
  // 2. One that all may write in, and one of another user's.
  std::filesystem::remove_all(home);
  ASSERT_EQ(::mkdir(home.c_str(), 0700), 0);
  ASSERT_EQ(::chmod(home.c_str(), 0777), 0);
  harness_.Start().IgnoreError();
  EXPECT_THAT(Message(PublishShard(store(), SampleShard(900, 1, 4)).status()),
              HasSubstr("may be written by everybody"));
  harness_.Stop();
  ASSERT_EQ(::chmod(home.c_str(), 0700), 0);
  if (::geteuid() == 0) {
    ASSERT_EQ(::chown(home.c_str(), 12345, 12345), 0);
    harness_.Start().IgnoreError();
    EXPECT_THAT(Message(PublishShard(store(), SampleShard(900, 1, 4)).status()),
                HasSubstr("belongs to uid 12345"));
    harness_.Stop();
    ASSERT_EQ(::chown(home.c_str(), 0, 0), 0);
  }
  // 3. As it is meant.
  ASSERT_TRUE(harness_.Start().ok());
  Publish(SampleShard(900, 1, 4));
}

TEST_P(SymlinkTest, ADirectoryThatAllMayWriteInIsNoted) {
  EXPECT_THAT(store().capabilities().notes,
              Not(Contains(HasSubstr("may be written by everybody"))));
  harness_.Stop();
  ASSERT_EQ(::chmod(harness_.dir().c_str(), 01777), 0);
  ASSERT_TRUE(harness_.Start().ok());
  Publish(SampleShard(900, 1, 4));
  EXPECT_THAT(store().capabilities().notes, Contains(HasSubstr("may be written by everybody")));
}

}  // namespace
}  // namespace holdfast
