// What CopyStore does when all is well, and when somebody else was there first.
#include "tiers/durable/copy_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <unistd.h>

#include <cerrno>
#include <functional>
#include <span>
#include <thread>

#include "absl/strings/str_cat.h"
#include "base/errno_status.h"
#include "base/status.h"
#include "tests/tiers/durable/durable_harness.h"
#include "tiers/durable/names.h"
#include "tiers/durable/small_files.h"
#include "tiers/image/kept.h"

namespace holdfast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using ::testing::UnorderedElementsAre;
using ::testing::UnorderedElementsAreArray;

JobUuid OtherUuid() {
  return JobUuid::FromString("99999999-4455-4677-8899-aabbccddeeff").value();
}

class CopyStoreTest : public testing::TestWithParam<DurableKind> {
 protected:
  CopyStoreTest() : CopyStoreTest(DurablePlace{.kind = GetParam()}) {}
  explicit CopyStoreTest(const DurablePlace& place) : harness_(place) { Start(); }

  void Start() {
    const absl::Status status = harness_.Start();
    ASSERT_TRUE(status.ok()) << ToString(status);
  }
  void Restart() {
    harness_.Stop();
    Start();
  }
  bool remote() const { return GetParam() == DurableKind::kRemote; }
  CopyStore& store() { return harness_.store(); }
  FaultEnv& env() { return *harness_.faults(); }

  void Publish(const SampleImage& sample) {
    const auto copy = PublishShard(store(), sample);
    ASSERT_TRUE(copy.ok()) << ToString(copy.status());
  }
  DurableScan Scan() {
    auto scan = store().ScanAll();
    EXPECT_TRUE(scan.ok()) << ToString(scan.status());
    return scan.ok() ? *std::move(scan) : DurableScan();
  }

  DurableHarness harness_;
};

INSTANTIATE_TEST_SUITE_P(Kinds, CopyStoreTest,
                         testing::Values(DurableKind::kNvme, DurableKind::kRemote),
                         [](const testing::TestParamInfo<DurableKind>& kind) {
                           return kind.param == DurableKind::kNvme ? "Nvme" : "Remote";
                         });

TEST_P(CopyStoreTest, NamesAreThoseOfTheFormat) {
  Publish(SampleShard(900, 1, 4));
  const std::string stem = remote() ? "demo/900-a3/shard-00001-of-00004" : "demo/900-a3/1";
  EXPECT_THAT(harness_.Files(), testing::IsSupersetOf({std::string("demo/JOB"),
                                                       stem + ".safetensors", stem + ".record"}));
  EXPECT_THAT(harness_.Leftovers(), IsEmpty());
  EXPECT_EQ(env().Info(harness_.dir() + "/" + stem + ".record")->mode & 0777, 0640u);
  EXPECT_EQ(env().Info(harness_.dir() + "/demo/900-a3")->mode & 0777, 0750u);
  EXPECT_EQ(env().Info(harness_.dir() + "/.holdfast")->mode & 0777, 0700u);
}

TEST_P(CopyStoreTest, PublishTellsWhatTheManifestWillSay) {
  const SampleImage sample = SampleShard(900, 1, 4);
  const absl::StatusOr<PublishedCopy> copy = PublishShard(store(), sample);
  ASSERT_TRUE(copy.ok()) << ToString(copy.status());
  const auto reading = store().OpenCopy(NameOf(sample), {});
  ASSERT_TRUE(reading.ok());
  EXPECT_EQ(copy->record_bytes, (*reading)->record_file().size());
  EXPECT_EQ(copy->image_bytes, sample.image.size());
  EXPECT_EQ(copy->layout_hash, sample.record.layout_hash);
  EXPECT_EQ((*reading)->record().generation, 0u) << "that of the slot stays in memory";
  const DurableScan scan = Scan();
  ASSERT_THAT(scan.jobs, SizeIs(1));
  ASSERT_THAT(scan.jobs[0].checkpoints, SizeIs(1));
  const CheckpointScan& step = scan.jobs[0].checkpoints[0];
  EXPECT_EQ(step.id, (CheckpointId{3, 900}));
  EXPECT_EQ(step.world_size, 4u);
  EXPECT_EQ(step.descent, sample.record.descent);
  EXPECT_FALSE(step.has_manifest);
  ASSERT_THAT(step.copies, SizeIs(1));
  EXPECT_EQ(step.copies[0],
            (CopyEntry{1, copy->image_bytes, copy->record_bytes, copy->record_crc,
                       sample.record.sealed_unix_ms, copy->layout_hash, copy->image_bytes,
                       LayoutHash{}, LikenessOf(sample.record, sample.layout)}));
}

TEST_P(CopyStoreTest, TheRecordOfAnOpenCopyIsTheOneThatWasRead) {
  const SampleImage sample = SampleShard(40, 0, 1);
  Publish(sample);
  auto reading = store().OpenCopy(NameOf(sample), {});
  ASSERT_TRUE(reading.ok()) << ToString(reading.status());
  auto record = (*reading)->OpenRecord();
  ASSERT_TRUE(record.ok()) << ToString(record.status());
  std::string bytes((*reading)->record_file().size(), '\0');
  ASSERT_TRUE((*record)->ReadAt(0, std::as_writable_bytes(std::span(bytes))).ok());
  EXPECT_EQ(bytes, (*reading)->record_file());
  // Another one lies there by now.
  std::string path = (*record)->path();
  for (const std::string& other :
       {bytes.substr(1), std::string(bytes.size(), 'x'), std::string()}) {
    ASSERT_TRUE(WriteFileAtomically(env(), path, other).ok());
    EXPECT_TRUE(absl::IsAborted((*reading)->OpenRecord().status())) << other.size();
  }
}

TEST_P(CopyStoreTest, ADirectoryOfAnotherRunIsNeverWritten) {
  Publish(SampleShard(900, 1, 4));
  JobIdentity other = SampleJob();
  other.job = OtherUuid();
  for (int round = 0; round < 2; ++round) {
    const absl::Status status = store().OpenJob(other);
    EXPECT_TRUE(absl::IsFailedPrecondition(status));
    EXPECT_THAT(Message(status), HasSubstr(other.job.ToString()));
    EXPECT_THAT(Message(status), HasSubstr(SampleJob().job.ToString()));
    Restart();
  }
  SampleImage foreign = SampleShard(901, 1, 4);
  foreign.record.id.job = OtherUuid();
  EXPECT_FALSE(PublishShard(store(), foreign).ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(store().RemoveJob(OtherUuid(), "demo").status()));
  EXPECT_TRUE(absl::IsFailedPrecondition(
      store().RemoveCheckpoint({OtherUuid(), "demo", {3, 900}}).status()));
  EXPECT_TRUE(CheckShard(store(), SampleShard(900, 1, 4)).ok());
  EXPECT_EQ(store().FindJob("demo")->job, SampleJob().job);
  EXPECT_TRUE(absl::IsNotFound(store().FindJob("other").status()));
  EXPECT_TRUE(absl::IsInvalidArgument(store().FindJob("../demo").status()));
}

TEST_P(CopyStoreTest, RefusesWhatCannotBeAShard) {
  const NewCopy good = NewCopyOfShard(SampleShard(1, 0, 2));
  std::vector<NewCopy> bad(6, good);
  bad[0].job_name = "../x";
  bad[1].world_size = 0;
  bad[2].id.rank = 2;
  bad[3].image_bytes = 0;
  bad[4].id.attempt = 0;
  bad[5].id.job = {};
  for (const NewCopy& copy : bad) {
    EXPECT_TRUE(absl::IsInvalidArgument(store().Begin(copy).status()));
  }
  EXPECT_THAT(harness_.Leftovers(), IsEmpty());
}

TEST_P(CopyStoreTest, OwnersAreSetBeforeAnybodySeesTheFile) {
  harness_.Stop();
  harness_.options().set_owner = true;
  Start();
  const SampleImage sample = SampleShard(900, 1, 4);
  NewCopy copy = NewCopyOfShard(sample);
  copy.id.job = OtherUuid();
  copy.job_name = "theirs";
  copy.uid = 1234;
  copy.gid = 567;
  if (remote()) {
    ASSERT_TRUE(store().ClaimAttempt({copy.id.job, "theirs", 1234, 567}, 3, "o").ok());
  }
  auto writing = store().Begin(copy);
  ASSERT_TRUE(writing.ok()) << ToString(writing.status());
  const std::string directory = harness_.dir() + "/theirs/900-a3";
  EXPECT_EQ(env().Info(directory)->gid, 567u);
  EXPECT_NE(env().Info(directory)->uid, 1234u) << "nobody puts names into it but the daemon";
  ASSERT_TRUE(WriteShard(**writing, sample).ok());
  ShardRecord theirs = sample.record;
  theirs.id.job = copy.id.job;
  theirs.job_name = copy.job_name;
  ASSERT_TRUE((*writing)->Publish(EncodeRecord(theirs)).ok());
  const std::string image = store().ImagePath({copy.id, "theirs", 4});
  const std::string record = image.substr(0, image.rfind('.')) + ".record";
  for (const std::string& path : {image, record}) {
    EXPECT_EQ(env().Info(path)->uid, 1234u) << path;
    EXPECT_EQ(env().Info(path)->gid, 567u) << path;
  }
  std::vector<std::string> kept = {harness_.dir() + "/theirs/JOB"};
  if (remote()) {
    kept.push_back(harness_.dir() + "/theirs/attempt-3");
  }
  for (const std::string& path : kept) {
    const FileInfo info = env().Info(path).value();
    EXPECT_EQ(info.uid, ::getuid()) << path << ": nobody hides the copies by damaging it";
    EXPECT_EQ(info.gid, 567u) << path;
    EXPECT_EQ(info.mode & 07777, 0640u) << path;
  }
  // Earlier versions gave them away, too.
  for (const std::string& path : kept) {
    ASSERT_TRUE((*env().Open(path, OpenMode::kReadWrite))->SetOwner(1234, 567).ok());
  }
  writing->reset();
  Restart();
  EXPECT_EQ(store().FindJob("theirs")->job, copy.id.job);
  EXPECT_TRUE(store().ClaimAttempt({copy.id.job, "theirs", 1234, 567}, 3, "o").ok());
  // Where owners cannot be set, that is told, and nothing fails.
  harness_.Stop();
  env().FailMatching("set owner", EPERM);
  env().FailMatching("set access", EPERM);
  Start();
  EXPECT_TRUE(PublishShard(store(), SampleShard(901, 1, 4)).ok());
  EXPECT_THAT(store().capabilities().notes, testing::Contains(HasSubstr("cannot be given")));
}

TEST_P(CopyStoreTest, RemovalTakesRecordAndImageAndReportsBytes) {
  const SampleImage kept = SampleShard(900, 0, 2);
  const SampleImage gone = SampleShard(900, 1, 2);
  Publish(kept);
  Publish(gone);
  const auto report = store().RemoveCopy(NameOf(gone));
  ASSERT_TRUE(report.ok()) << ToString(report.status());
  EXPECT_EQ(report->copies, 1u);
  EXPECT_EQ(report->bytes_freed + report->bytes_recycled, gone.image.size());
  EXPECT_EQ(store().pool_bytes(), remote() ? 0 : gone.image.size());
  EXPECT_TRUE(absl::IsNotFound(store().RemoveCopy(NameOf(gone)).status()));
  EXPECT_TRUE(CheckShard(store(), kept).ok());
  ASSERT_TRUE(store().RemoveCheckpoint(CheckpointOf(kept)).ok());
  EXPECT_TRUE(absl::IsNotFound(store().RemoveCheckpoint(CheckpointOf(kept)).status()));
  EXPECT_TRUE(absl::IsNotFound(env().Info(harness_.dir() + "/demo/900-a3").status()));
  EXPECT_TRUE(env().Info(harness_.dir() + "/demo/JOB").ok()) << "the job is still there";
  EXPECT_THAT(harness_.Leftovers(), IsEmpty());
}

TEST_P(CopyStoreTest, RemovingAJobLeavesNothingOfIt) {
  for (const Step step : {1, 2, 3}) {
    Publish(SampleShard(step, 0, 2));
    Publish(SampleShard(step, 1, 2));
  }
  const auto report = store().RemoveJob(SampleJob().job, "demo");
  ASSERT_TRUE(report.ok()) << ToString(report.status());
  EXPECT_EQ(report->copies, 6u);
  EXPECT_THAT(report->left_alone, IsEmpty());
  EXPECT_TRUE(absl::IsNotFound(env().Info(harness_.dir() + "/demo").status()));
  EXPECT_TRUE(absl::IsNotFound(store().ScanJob("demo").status()));
  // The name is free for another run.
  JobIdentity other = SampleJob();
  other.job = OtherUuid();
  EXPECT_TRUE(store().OpenJob(other).ok());
}

TEST_P(CopyStoreTest, UnknownFilesSurviveEverythingAndAreReported) {
  Publish(SampleShard(900, 0, 2));
  const std::string home = remote() ? "/.holdfast/nodes/node-1" : "/.holdfast";
  // What is ours, and what is not, side by side.
  std::vector<std::string> files = {
      "/notes.txt~",          "/demo/notes.txt",   "/demo/900-a3/notes",  "/demo/900-a3/01.record",
      "/demo/900-a3/.x.tmp",  "/demo/0900-a3",     "/demo/attempt-03",    "/.holdfast/something",
      "/.holdfast/probe",     "/.holdfast/id~",    home + "/reserve.old", home + "/intents/x",
      home + "/intents.copy", home + "/.owner.swp"};
  std::vector<std::string> directories = {"/no-job-of-ours", "/.holdfast/mine"};
  if (remote()) {
    // What a drive's tier has there is none of a remote one's.
    files.insert(files.end(), {"/.holdfast/lock", "/.holdfast/nodes/a file", home + "/pool"});
    directories.insert(directories.end(), {"/.holdfast/nodes/no name of a node", home + "/more"});
  } else {
    files.insert(files.end(), {home + "/pool/x", "/.holdfast/owner"});
    directories.push_back("/.holdfast/nodes");
  }
  std::vector<std::string> paths;
  for (const std::string& directory : directories) {
    paths.push_back(harness_.dir() + directory);
    ASSERT_TRUE(env().CreateDirectories(paths.back(), 0700).ok());
  }
  for (const std::string& file : files) {
    paths.push_back(harness_.dir() + file);
    ASSERT_TRUE(Overwrite(env(), paths.back(), "mine").ok());
  }
  ASSERT_TRUE(Overwrite(env(), harness_.dir() + "/no-job-of-ours/JOB~", "mine").ok());
  Restart();
  std::vector<std::string> reported;
  const DurableScan scan = Scan();
  for (const UnknownFile& file : scan.unknown) {
    reported.push_back(file.path);
    EXPECT_FALSE(file.why.empty()) << file.path;
  }
  EXPECT_THAT(reported, UnorderedElementsAreArray(paths));
  EXPECT_EQ(scan.unknown_count, paths.size());
  const auto report = store().RemoveCheckpoint(CheckpointOf(SampleShard(900, 0, 2)));
  ASSERT_TRUE(report.ok());
  EXPECT_THAT(report->left_alone, SizeIs(3));
  ASSERT_TRUE(store().RemoveJob(SampleJob().job, "demo").ok());
  ASSERT_TRUE(store().TrimPool(0).ok());
  Restart();
  for (const std::string& file : files) {
    EXPECT_EQ(ReadFile(env(), harness_.dir() + file, 100).value_or(""), "mine") << file;
  }
  for (const std::string& directory : directories) {
    EXPECT_TRUE(env().Info(harness_.dir() + directory).ok()) << directory;
  }
  EXPECT_TRUE(env().Info(harness_.dir() + "/no-job-of-ours/JOB~").ok());
}

CopyStore::MayGoOn SoManyTimes(int times) {
  return [left = times]() mutable { return left-- > 0; };
}

// Of a host that was deposed: the next one decides what goes.
TEST_P(CopyStoreTest, ARemovalThatIsGivenUpLeavesWhatItHasNotBegun) {
  const std::vector<SampleImage> samples = {SampleShard(900, 0, 2), SampleShard(900, 1, 2)};
  std::vector<PublishedCopy> copies;
  for (const SampleImage& sample : samples) {
    const auto copy = PublishShard(store(), sample);
    ASSERT_TRUE(copy.ok()) << ToString(copy.status());
    copies.push_back(*copy);
  }
  const CheckpointName name = CheckpointOf(samples[0]);
  if (remote()) {
    ASSERT_TRUE(store().PublishManifest(ManifestOf(samples, copies)).ok());
  }
  EXPECT_TRUE(absl::IsCancelled(store().RemoveCheckpoint(name, SoManyTimes(0)).status()));
  EXPECT_TRUE(
      absl::IsCancelled(store().RemoveJob(SampleJob().job, "demo", SoManyTimes(0)).status()));
  EXPECT_TRUE(CheckShard(store(), samples[0]).ok());
  EXPECT_TRUE(CheckShard(store(), samples[1]).ok());
  EXPECT_EQ(store().ReadManifest(name).ok(), remote());

  EXPECT_TRUE(absl::IsCancelled(store().RemoveCheckpoint(name, SoManyTimes(1)).status()));
  EXPECT_EQ(CheckShard(store(), samples[0]).ok(), remote()) << "nvme's first is gone";
  EXPECT_TRUE(CheckShard(store(), samples[1]).ok());
  if (remote()) {  // it was the manifest: what is whole but for that is committed anew
    EXPECT_TRUE(absl::IsNotFound(store().ReadManifest(name).status()));
    ASSERT_TRUE(store().ClaimAttempt(SampleJob(), 3, "opening 1").ok());
    const absl::Status again = store().PublishManifest(ManifestOf(samples, copies));
    EXPECT_TRUE(again.ok()) << ToString(again);
  }
  EXPECT_THAT(harness_.Leftovers(), IsEmpty());
  Restart();
  EXPECT_TRUE(CheckShard(store(), samples[1]).ok());
  EXPECT_TRUE(store().RemoveJob(SampleJob().job, "demo", SoManyTimes(100)).ok());
  EXPECT_TRUE(absl::IsNotFound(store().FindJob("demo").status()));
}

// All that a store makes beside copies, at work and half way, is known to its scan.
TEST_P(CopyStoreTest, WhatIsOursBesideCopiesIsNotReported) {
  harness_.Stop();
  if (remote()) {
    harness_.options().owner = {"a state", "a machine", "a boot"};
  }
  Start();
  Publish(SampleShard(900, 0, 2));
  ASSERT_TRUE(store().RemoveCopy(NameOf(SampleShard(900, 0, 2))).ok());
  const std::string home = harness_.dir() + (remote() ? "/.holdfast/nodes/node-1" : "/.holdfast");
  std::vector<std::string> ours = {"lock", "intents", "reserve"};
  ours.insert(ours.end(), remote() ? std::initializer_list<std::string>{"owner"}
                                   : std::initializer_list<std::string>{"id", "pool"});
  const std::vector<std::string> names = env().List(home).value();
  EXPECT_THAT(names, UnorderedElementsAreArray(ours));
  ASSERT_TRUE(Overwrite(env(), home + "/probe-0123", "of a start that was cut off").ok());
  ASSERT_TRUE(env().CreateDirectory(harness_.dir() + "/.holdfast-doctor-1", 0700).ok());
  if (remote()) {
    ASSERT_TRUE(Overwrite(env(), home + "/owner.tmp", "likewise").ok());
    // Another node tells of what lies in its part.
    const std::string other = harness_.dir() + "/.holdfast/nodes/node-2";
    ASSERT_TRUE(env().CreateDirectory(other, 0700).ok());
    ASSERT_TRUE(Overwrite(env(), other + "/something", "mine").ok());
  }
  const auto writing = store().Begin(NewCopyOfShard(SampleShard(901, 0, 2)));
  ASSERT_TRUE(writing.ok());
  const DurableScan scan = Scan();
  EXPECT_EQ(scan.unknown_count, 0u) << scan.unknown.at(0).path;
  EXPECT_EQ(scan.unreadable_count, 0u);
}

// A name of ours on what it cannot be.
TEST_P(CopyStoreTest, NamesOfOursThatAreOfAnotherKindAreReported) {
  Publish(SampleShard(900, 0, 2));
  const std::string home = harness_.dir() + (remote() ? "/.holdfast/nodes/node-1" : "/.holdfast");
  ASSERT_TRUE(env().Unlink(home + "/reserve").ok());
  ASSERT_TRUE(env().CreateDirectory(home + "/reserve", 0700).ok());
  const DurableScan scan = Scan();
  ASSERT_THAT(scan.unknown, SizeIs(1));
  EXPECT_EQ(scan.unknown[0].path, home + "/reserve");
  EXPECT_EQ(scan.unknown[0].why, "not a regular file");
}

TEST_P(CopyStoreTest, TemporariesWithoutAnIntentAreReportedAndLeft) {
  Publish(SampleShard(900, 0, 2));
  const std::string path =
      harness_.dir() + "/demo/900-a3/.7.safetensors.00112233445566778899aabbccddeeff.tmp";
  ASSERT_TRUE(Overwrite(env(), path, "whose?").ok());
  const auto writing = store().Begin(NewCopyOfShard(SampleShard(901, 0, 2)));
  ASSERT_TRUE(writing.ok());
  const DurableScan scan = Scan();
  ASSERT_THAT(scan.unknown, SizeIs(1)) << "the one that is being written is not unknown";
  EXPECT_EQ(scan.unknown[0].path, path);
  ASSERT_TRUE(store().Sweep().ok());
  EXPECT_TRUE(env().Info(path).ok());
}

TEST_P(CopyStoreTest, ASweepLeavesWhatIsBeingWritten) {
  const SampleImage sample = SampleShard(900, 1, 4);
  const auto writing = store().Begin(NewCopyOfShard(sample));
  ASSERT_TRUE(writing.ok());
  const auto swept = store().Sweep();
  ASSERT_TRUE(swept.ok());
  EXPECT_THAT(swept->done, IsEmpty());
  EXPECT_THAT(swept->left_alone, IsEmpty());
  ASSERT_TRUE(WriteShard(**writing, sample).ok());
  const auto copy = (*writing)->Publish(sample.record_file);
  ASSERT_TRUE(copy.ok()) << ToString(copy.status());
  EXPECT_TRUE(CheckShard(store(), sample).ok());
}

TEST_P(CopyStoreTest, ARecordOfAnythingElseIsRefusedAndSpoilsNothing) {
  const SampleImage sample = SampleShard(900, 1, 4);
  const auto writing = store().Begin(NewCopyOfShard(sample));
  ASSERT_TRUE(writing.ok());
  ASSERT_TRUE(WriteShard(**writing, sample).ok());
  std::vector<ShardRecord> others(4, sample.record);
  others[0].id.step = 901;
  others[1].id.rank = 2;
  others[2].job_name = "other";
  others[3].world_size = 8;
  for (const ShardRecord& other : others) {
    EXPECT_TRUE(absl::IsInvalidArgument((*writing)->Publish(EncodeRecord(other)).status()));
  }
  EXPECT_TRUE((*writing)->Publish(sample.record_file).ok());
}

TEST_P(CopyStoreTest, AnImageThatIsReplacedWhileItIsPublishedIsNoCopy) {
  const SampleImage sample = SampleShard(900, 1, 4);
  const auto writing = store().Begin(NewCopyOfShard(sample));
  ASSERT_TRUE(writing.ok());
  ASSERT_TRUE(WriteShard(**writing, sample).ok());
  const std::string call =
      "rename " + harness_.dir() + "/demo/900-a3/." + RecordFileName(GetParam(), 1, 4);
  env().StallMatching(call);
  absl::Status published;
  std::thread publisher([&] { published = (*writing)->Publish(sample.record_file).status(); });
  ASSERT_TRUE(env().WaitForStalled(1, std::chrono::seconds(60)));
  ASSERT_TRUE(Overwrite(env(), store().ImagePath(NameOf(sample)), sample.image).ok());
  env().ReleaseStalled(call);
  publisher.join();
  EXPECT_TRUE(absl::IsDataLoss(published)) << ToString(published);
  EXPECT_FALSE(store().OpenCopy(NameOf(sample), {}).ok());
}

TEST_P(CopyStoreTest, DirectImagesAreWrittenInWholeUnitsAndCutToLength) {
  harness_.Stop();
  harness_.options().direct = true;
  Start();
  const SampleImage sample = SampleShard(900, 1, 4);
  ASSERT_NE(sample.image.size() % 512, 0u);
  auto writing = store().Begin(NewCopyOfShard(sample));
  ASSERT_TRUE(writing.ok()) << ToString(writing.status());
  EXPECT_TRUE((*writing)->direct());
  EXPECT_EQ((*writing)->alignment(), 512u);
  EXPECT_EQ((*writing)->image().Info()->bytes, (sample.image.size() + 511) / 512 * 512);
  ASSERT_TRUE(WriteShard(**writing, sample).ok());
  ASSERT_TRUE((*writing)->Publish(sample.record_file).ok());
  EXPECT_EQ(env().Info(store().ImagePath(NameOf(sample)))->bytes, sample.image.size());
  EXPECT_TRUE(CheckShard(store(), sample).ok());
  auto reading = store().OpenCopy(NameOf(sample), {.direct = true, .manifest = nullptr});
  ASSERT_TRUE(reading.ok());
  EXPECT_TRUE((*reading)->direct());
  reading->reset();
  writing->reset();
  // A file system that has no such thing is found out, and done without.
  harness_.Stop();
  env().SetDirectAlignment(0);
  Start();
  EXPECT_TRUE(PublishShard(store(), SampleShard(901, 1, 4)).ok());
  EXPECT_FALSE(store().capabilities().direct);
  EXPECT_FALSE(
      (*store().OpenCopy(NameOf(sample), {.direct = true, .manifest = nullptr}))->direct());
}

// Who judges what lies there is not to be shown what the page cache still has of it.
TEST_P(CopyStoreTest, ReadPastTheCacheWhateverIsWrittenHow) {
  harness_.options().direct = false;
  const SampleImage sample = SampleShard(900, 1, 4);
  Publish(sample);
  const auto is_direct = [&](const CopyStore::ReadOptions& options) {
    const auto reading = store().OpenCopy(NameOf(sample), options);
    EXPECT_TRUE(reading.ok()) << ToString(reading.status());
    return reading.ok() && (*reading)->direct();
  };
  CopyStore::ReadOptions past_cache;
  past_cache.past_cache = true;
  EXPECT_TRUE(is_direct(past_cache));
  EXPECT_FALSE(is_direct({.direct = true, .manifest = nullptr}));
  // File systems that open a file so, and then refuse to read it; those that have no such thing.
  env().FailMatching("read " + store().ImagePath(NameOf(sample)), EINVAL);
  EXPECT_FALSE(is_direct(past_cache));
  // What lies there cannot be read, which the page cache would hide.
  env().FailMatching("read " + store().ImagePath(NameOf(sample)), EIO);
  const absl::Status unreadable = store().OpenCopy(NameOf(sample), past_cache).status();
  EXPECT_TRUE(IsErrno(unreadable)) << ToString(unreadable);
  EXPECT_THAT(Message(unreadable), HasSubstr(store().ImagePath(NameOf(sample))));
  env().FailMatching("read " + store().ImagePath(NameOf(sample)), 0);
  for (const uint32_t alignment : {0U, 4U << 20}) {
    env().SetDirectAlignment(alignment);
    EXPECT_FALSE(is_direct(past_cache)) << alignment;
  }
}

TEST_P(CopyStoreTest, NothingIsWrittenWhenTheMountIsAnotherThanAtTheStart) {
  const SampleImage sample = SampleShard(900, 1, 4);
  const auto begun = store().Begin(NewCopyOfShard(SampleShard(901, 1, 4)));
  ASSERT_TRUE(begun.ok());
  Publish(sample);
  env().SetDevice(7);
  EXPECT_TRUE(absl::IsUnavailable(PublishShard(store(), SampleShard(902, 1, 4)).status()));
  EXPECT_TRUE(absl::IsUnavailable((*begun)->Publish(SampleShard(901, 1, 4).record_file).status()));
  EXPECT_TRUE(absl::IsUnavailable(store().RemoveCopy(NameOf(sample)).status()));
  EXPECT_TRUE(absl::IsUnavailable(store().Space().status()));
  env().SetDevice(1);
  EXPECT_TRUE(PublishShard(store(), SampleShard(902, 1, 4)).ok());
  EXPECT_TRUE(store().Space().ok());
}

// A step that cannot be listed just now may be the newest there is.
TEST_P(CopyStoreTest, AScanSaysThatNotAllOfItCouldBeRead) {
  Publish(SampleShard(900, 1, 4));
  Publish(SampleShard(901, 1, 4));
  EXPECT_THAT(store().ScanAll()->hidden, IsEmpty());
  const std::string step = harness_.dir() + "/demo/901-a3";
  for (const std::string& what : {step, harness_.dir() + "/demo/JOB"}) {
    for (const int error : {EIO, ESTALE, EACCES}) {
      env().FailMatching(what, error);
      const auto scan = store().ScanAll();
      ASSERT_TRUE(scan.ok()) << ToString(scan.status());
      ASSERT_EQ(scan->hidden.count("demo"), 1u) << what;
      EXPECT_THAT(Message(scan->hidden.at("demo")), HasSubstr(what));
      EXPECT_THAT(scan->jobs, SizeIs(what == step ? 1 : 0));
      env().FailMatching(what, 0);
    }
  }
  // Damage hides nothing: nobody will ever read it. Nor do names that others may put there.
  env().FailMatching(step, ELOOP);
  EXPECT_THAT(store().ScanAll()->hidden, IsEmpty());
  env().FailMatching(step, 0);
  EXPECT_THAT(store().ScanAll()->hidden, IsEmpty());
}

// Of a directory that is not there nobody knows what is in it.
TEST_P(CopyStoreTest, AMissingDirectorySaysNothingAboutItsCopies) {
  const SampleImage sample = SampleShard(900, 1, 4);
  Publish(sample);
  env().FailMatching(harness_.dir(), ENOENT);
  EXPECT_TRUE(absl::IsUnavailable(store().OpenCopy(NameOf(sample), {}).status()));
  EXPECT_TRUE(absl::IsUnavailable(store().FindJob("demo").status()));
  EXPECT_TRUE(absl::IsUnavailable(store().RemoveCopy(NameOf(sample)).status()));
  EXPECT_TRUE(absl::IsUnavailable(store().RemoveCheckpoint(CheckpointOf(sample)).status()));
  EXPECT_TRUE(absl::IsUnavailable(store().RemoveJob(SampleJob().job, "demo").status()));
  EXPECT_TRUE(absl::IsUnavailable(store().ScanAll().status()));
  EXPECT_TRUE(absl::IsUnavailable(store().ScanJob("demo").status()));
  EXPECT_TRUE(absl::IsUnavailable(store().Space().status()));
  EXPECT_TRUE(absl::IsUnavailable(CopyStore::Open(harness_.options()).status()));
  env().FailMatching(harness_.dir(), 0);
  EXPECT_TRUE(CheckShard(store(), sample).ok());
}

// Something else lies there, and has no such copy.
TEST_P(CopyStoreTest, AMountThatWentAwaySaysNothingAboutItsCopies) {
  const SampleImage sample = SampleShard(900, 1, 4);
  Publish(sample);
  env().SetDevice(7);
  env().FailMatching(harness_.dir() + "/demo", ENOENT);
  EXPECT_TRUE(absl::IsUnavailable(store().OpenCopy(NameOf(sample), {}).status()));
  EXPECT_TRUE(absl::IsUnavailable(store().FindJob("demo").status()));
  EXPECT_TRUE(absl::IsUnavailable(store().ScanAll().status()));
  EXPECT_TRUE(absl::IsUnavailable(store().ScanJob("demo").status()));
  env().SetDevice(1);
  EXPECT_TRUE(absl::IsNotFound(store().OpenCopy(NameOf(sample), {}).status()));
}

// An intent that is not found because its mount went away is not settled.
TEST_P(CopyStoreTest, WhatAVanishedMountHoldsIsPutRightWhenItIsBack) {
  const SampleImage sample = SampleShard(900, 1, 4);
  auto writing = store().Begin(NewCopyOfShard(sample));
  ASSERT_TRUE(writing.ok());
  env().SetDevice(7);
  env().FailMatching(harness_.dir() + "/.holdfast", ENOENT);
  EXPECT_TRUE(absl::IsUnavailable((*writing)->Publish(sample.record_file).status()));
  writing->reset();
  env().SetDevice(1);
  env().FailMatching(harness_.dir() + "/.holdfast", 0);
  Publish(SampleShard(901, 1, 4));  // whatever is written next tidies up
  EXPECT_THAT(harness_.Leftovers(), IsEmpty());
}

// As long as something is being written there, JOB says whose it is.
TEST_P(CopyStoreTest, AJobsDirectoryKeepsItsNameWhileSomethingOfItIsLeft) {
  if (remote()) {
    return;  // there nobody waits for a node that may never come back (below)
  }
  Publish(SampleShard(900, 0, 2));
  const SampleImage sample = SampleShard(900, 1, 2);
  auto writing = store().Begin(NewCopyOfShard(sample));
  ASSERT_TRUE(writing.ok()) << ToString(writing.status());
  ASSERT_TRUE(WriteShard(**writing, sample).ok());
  const absl::Status removed = store().RemoveJob(SampleJob().job, "demo").status();
  EXPECT_TRUE(absl::IsAborted(removed)) << ToString(removed);
  EXPECT_THAT(Message(removed), HasSubstr("/demo/900-a3/."));
  ASSERT_TRUE(store().FindJob("demo").ok());
  EXPECT_EQ(store().FindJob("demo")->job, SampleJob().job);
  ASSERT_TRUE((*writing)->Publish(sample.record_file).ok());
  EXPECT_TRUE(CheckShard(store(), sample).ok());
  EXPECT_TRUE(store().RemoveJob(SampleJob().job, "demo").ok());
  EXPECT_TRUE(absl::IsNotFound(store().FindJob("demo").status()));
}

// A temporary that no intent names will never be anything: it holds up nobody.
TEST_P(CopyStoreTest, ATemporaryWithoutAnIntentHoldsUpNoRemoval) {
  Publish(SampleShard(900, 0, 2));
  ASSERT_TRUE(
      Overwrite(env(),
                harness_.dir() + "/demo/900-a3/.7.safetensors.00112233445566778899aabbccddeeff.tmp",
                "whose?")
          .ok());
  EXPECT_TRUE(store().RemoveJob(SampleJob().job, "demo").ok());
}

// A drive that loses a bit of a record that was just synced.
TEST_P(CopyStoreTest, ARecordThatReadsBackOtherwiseIsNotPublished) {
  const SampleImage sample = SampleShard(900, 1, 4);
  const std::string step = harness_.dir() + "/demo/900-a3";
  const std::string record = "." + RecordFileName(GetParam(), 1, 4) + ".";
  const std::string reading = "read " + step + "/" + record;
  env().StallMatching(reading);
  absl::Status published;
  std::thread writer([&] { published = PublishShard(store(), sample).status(); });
  EXPECT_TRUE(env().WaitForStalled(1, std::chrono::seconds(60)));
  const std::vector<std::string> names = env().List(step).value();
  for (const std::string& name : names) {
    if (name.starts_with(record)) {
      EXPECT_TRUE(env().FlipBit(JoinPath(step, name), 20, 3).ok());
    }
  }
  env().ReleaseStalled(reading);
  writer.join();
  EXPECT_TRUE(absl::IsDataLoss(published)) << ToString(published);
  EXPECT_THAT(Message(published), HasSubstr("the record reads back otherwise"));
  EXPECT_TRUE(Scan().jobs.at(0).checkpoints.empty());
  EXPECT_THAT(harness_.Leftovers(), IsEmpty());
  Publish(sample);
  EXPECT_TRUE(CheckShard(store(), sample).ok());
}

// Nodes that share a remote directory.
class SharedDirectoryTest : public CopyStoreTest {
 protected:
  std::unique_ptr<CopyStore> OtherNode(const std::string& name = "node-2") {
    CopyStore::Options options = harness_.options();
    options.node_name = name;
    auto opened = CopyStore::Open(options);
    EXPECT_TRUE(opened.ok()) << ToString(opened.status());
    return *std::move(opened);
  }
  std::string JobDir() const { return harness_.dir() + "/demo"; }
  // What `meanwhile` does while the removal of the job has stopped before a call.
  absl::Status RemovedWhile(const std::string& call, const std::function<void()>& meanwhile) {
    absl::Status removed;
    env().StallMatching(call);
    std::thread remover([&] { removed = store().RemoveJob(SampleJob().job, "demo").status(); });
    EXPECT_TRUE(env().WaitForStalled(1, std::chrono::seconds(60))) << call;
    meanwhile();
    env().ReleaseStalled(call);
    remover.join();
    return removed;
  }
  static JobIdentity NextJob() {
    JobIdentity next = SampleJob();
    next.job = OtherUuid();
    return next;
  }
  static SampleImage ShardOfNext(Step step, Rank rank, uint32_t world_size) {
    const SampleImage sample = SampleShard(step, rank, world_size);
    ShardRecord identity = SampleRecord();
    identity.id = sample.record.id;
    identity.id.job = OtherUuid();
    identity.world_size = world_size;
    return MakeSampleImage({Whole("other", DType::kU8, {100})}, identity);
  }
  void WriteIntent(const std::string& node, const Intent& intent) {
    const std::string path =
        harness_.dir() + "/.holdfast/nodes/" + node + "/intents/" + IntentFileName(intent.unique);
    ASSERT_TRUE(Overwrite(env(), path, EncodeIntent(intent)).ok());
  }
};

INSTANTIATE_TEST_SUITE_P(Remote, SharedDirectoryTest, testing::Values(DurableKind::kRemote),
                         [](const auto&) { return "Remote"; });

// A flush that was asked for before, on a node that nobody could tell: whatever it is about to make
// when the steps were looked through, nothing of it stays.
TEST_P(SharedDirectoryTest, WhatBeginsWhileTheJobIsRemovedComesToNothing) {
  const auto other = OtherNode();
  ASSERT_TRUE(other->ClaimAttempt(SampleJob(), 3, "opening 1").ok());
  const std::vector<SampleImage> samples = {SampleShard(900, 0, 1)};
  for (const std::string& call :
       {"unlink " + JobDir() + "/attempt-3", "unlink " + JobDir() + "/JOB"}) {
    Publish(samples[0]);
    const absl::Status removed = RemovedWhile(call, [&] {
      const absl::Status begun = other->Begin(NewCopyOfShard(SampleShard(901, 0, 1))).status();
      EXPECT_TRUE(absl::IsFailedPrecondition(begun)) << call << ToString(begun);
      EXPECT_THAT(Message(begun), HasSubstr("REMOVED-"));
      const absl::Status claimed = other->ClaimAttempt(SampleJob(), 4, "opening 2");
      EXPECT_TRUE(absl::IsFailedPrecondition(claimed)) << call << ToString(claimed);
    });
    EXPECT_TRUE(removed.ok()) << call << ToString(removed);
    EXPECT_TRUE(absl::IsNotFound(env().Info(JobDir()).status())) << call;
    EXPECT_THAT(harness_.Leftovers(), IsEmpty());
    ASSERT_TRUE(store().ClaimAttempt(SampleJob(), 3, "opening 1").ok());
    ASSERT_TRUE(other->ClaimAttempt(SampleJob(), 3, "opening 1").ok());
  }
}

TEST_P(SharedDirectoryTest, AManifestOfAJobThatIsRemovedIsNone) {
  const auto other = OtherNode();
  ASSERT_TRUE(other->ClaimAttempt(SampleJob(), 3, "opening 1").ok());
  const SampleImage sample = SampleShard(900, 0, 1);
  const auto copy = PublishShard(store(), sample);
  ASSERT_TRUE(copy.ok());
  absl::Status committed;
  const absl::Status removed = RemovedWhile("unlink " + JobDir() + "/900-a3/shard", [&] {
    committed = other->PublishManifest(ManifestOf({sample}, {*copy}));
  });
  EXPECT_TRUE(absl::IsFailedPrecondition(committed)) << ToString(committed);
  EXPECT_TRUE(removed.ok()) << ToString(removed);
  EXPECT_TRUE(absl::IsNotFound(env().Info(JobDir()).status()));
}

// What was made amid the removal is looked for again.
TEST_P(SharedDirectoryTest, AStepThatWasPassedAlreadyIsLookedAtAgain) {
  const auto other = OtherNode();
  ASSERT_TRUE(other->ClaimAttempt(SampleJob(), 3, "opening 1").ok());
  Publish(SampleShard(900, 0, 1));
  Publish(SampleShard(901, 0, 1));
  const SampleImage late = SampleShard(899, 0, 1);
  const absl::Status removed = RemovedWhile("unlink " + JobDir() + "/901-a3/shard", [&] {
    // (As one would have made it who looked for the mark just before it was there.)
    ASSERT_TRUE(env().CreateDirectory(JobDir() + "/899-a3", 0750).ok());
    ASSERT_TRUE(
        Overwrite(env(), JobDir() + "/899-a3/shard-00000-of-00001.safetensors", late.image).ok());
  });
  EXPECT_TRUE(removed.ok()) << ToString(removed);
  EXPECT_TRUE(absl::IsNotFound(env().Info(JobDir()).status()));
}

// A node died in the middle of a flush, and is never seen again.
TEST_P(SharedDirectoryTest, WhatADeadNodeLeftHoldsUpNoRemovalOfTheJob) {
  const auto dead = OtherNode();
  ASSERT_TRUE(dead->ClaimAttempt(SampleJob(), 3, "opening 1").ok());
  Publish(SampleShard(900, 0, 2));
  const SampleImage sample = SampleShard(900, 1, 2);
  auto writing = dead->Begin(NewCopyOfShard(sample));
  ASSERT_TRUE(writing.ok()) << ToString(writing.status());
  ASSERT_TRUE(WriteShard(**writing, sample).ok());
  const auto removed = store().RemoveJob(SampleJob().job, "demo");
  ASSERT_TRUE(removed.ok()) << ToString(removed.status());
  EXPECT_THAT(removed->left_alone, IsEmpty());
  EXPECT_TRUE(absl::IsNotFound(env().Info(JobDir()).status()));
  // And is seen again all the same, a slow machine: what it had begun comes to nothing, and what
  // another run has there by now is not touched.
  ASSERT_TRUE(store().ClaimAttempt(NextJob(), 3, "opening 1").ok());
  const SampleImage theirs = ShardOfNext(900, 1, 2);
  Publish(theirs);
  EXPECT_FALSE((*writing)->Publish(sample.record_file).ok());
  writing->reset();
  EXPECT_THAT(harness_.Leftovers(), IsEmpty());
  EXPECT_TRUE(CheckShard(store(), theirs).ok());
}

// It goes on in the middle of its publication, whichever call it had come to.
TEST_P(SharedDirectoryTest, WhoComesBackAmidAPublicationFindsNothingToGiveANameTo) {
  const std::string stem = JobDir() + "/900-a3/";
  const std::string image = stem + ".shard-00001-of-00002.safetensors";
  const std::string record = stem + ".shard-00001-of-00002.record";
  const std::string calls[] = {"fdatasync " + image, "rename " + image, "create " + record,
                               "fsync " + record, "rename " + record};
  for (const std::string& call : calls) {
    const auto slow = OtherNode();
    ASSERT_TRUE(store().ClaimAttempt(SampleJob(), 3, "opening 1").ok());
    ASSERT_TRUE(slow->ClaimAttempt(SampleJob(), 3, "opening 1").ok());
    Publish(SampleShard(900, 0, 2));
    const SampleImage sample = SampleShard(900, 1, 2);
    auto writing = slow->Begin(NewCopyOfShard(sample));
    ASSERT_TRUE(writing.ok()) << call << ToString(writing.status());
    ASSERT_TRUE(WriteShard(**writing, sample).ok());
    env().StallMatching(call);
    absl::Status published;
    std::thread publisher([&] { published = (*writing)->Publish(sample.record_file).status(); });
    ASSERT_TRUE(env().WaitForStalled(1, std::chrono::seconds(60))) << call;
    const absl::Status removed = store().RemoveJob(SampleJob().job, "demo").status();
    env().ReleaseStalled(call);
    publisher.join();
    EXPECT_TRUE(removed.ok()) << call << ": " << ToString(removed);
    EXPECT_FALSE(published.ok()) << call;
    EXPECT_TRUE(absl::IsNotFound(env().Info(JobDir()).status())) << call;
    EXPECT_THAT(harness_.Leftovers(), IsEmpty()) << call;
  }
}

// What it takes back is its own, not what another run has put there since.
TEST_P(SharedDirectoryTest, WhoComesBackTakesNothingBackOfTheNextRun) {
  const auto slow = OtherNode();
  ASSERT_TRUE(slow->ClaimAttempt(SampleJob(), 3, "opening 1").ok());
  const SampleImage sample = SampleShard(900, 1, 2);
  const SampleImage theirs = ShardOfNext(900, 1, 2);
  auto writing = slow->Begin(NewCopyOfShard(sample));
  ASSERT_TRUE(writing.ok()) << ToString(writing.status());
  ASSERT_TRUE(WriteShard(**writing, sample).ok());
  // (The image has its name, and the record is about to get its own.)
  std::string unique;
  const auto names = env().List(JobDir() + "/900-a3");
  ASSERT_TRUE(names.ok());
  for (const std::string& name : *names) {
    unique = name.size() > 36 ? name.substr(name.size() - 36, 32) : unique;
  }
  const std::string call =
      "rename " + JobDir() + "/900-a3/" + TemporaryName("shard-00001-of-00002.record", unique);
  env().StallMatching(call);
  absl::Status published;
  std::thread publisher([&] { published = (*writing)->Publish(sample.record_file).status(); });
  ASSERT_TRUE(env().WaitForStalled(1, std::chrono::seconds(60)));
  const absl::Status removed = store().RemoveJob(SampleJob().job, "demo").status();
  const absl::Status claimed = store().ClaimAttempt(NextJob(), 3, "opening 1");
  const absl::Status next = PublishShard(store(), theirs).status();
  env().ReleaseStalled(call);
  publisher.join();
  EXPECT_TRUE(removed.ok() && claimed.ok() && next.ok()) << ToString(removed) << ToString(next);
  EXPECT_FALSE(published.ok());
  EXPECT_TRUE(CheckShard(store(), theirs).ok());
  EXPECT_THAT(harness_.Leftovers(), IsEmpty());
}

TEST_P(SharedDirectoryTest, ARemovalThatWasBrokenOffStandsInNobodysWay) {
  Publish(SampleShard(900, 0, 1));
  env().FailMatching("unlink " + JobDir() + "/900-a3/shard", EIO);
  EXPECT_FALSE(store().RemoveJob(SampleJob().job, "demo").ok());
  env().FailMatching("unlink " + JobDir() + "/900-a3/shard", 0);
  ASSERT_TRUE(store().ClaimAttempt(SampleJob(), 3, "opening 1").ok());
  Publish(SampleShard(901, 0, 1));
  EXPECT_THAT(Scan().unknown, IsEmpty());
  // By a crash: until this node is back, whoever removes it goes on.
  env().FailMatching("unlink " + JobDir(), EIO);
  EXPECT_FALSE(store().RemoveJob(SampleJob().job, "demo").ok());
  env().FailMatching("unlink " + JobDir(), 0);
  const auto other = OtherNode();
  ASSERT_TRUE(other->OpenJob(SampleJob()).ok());
  EXPECT_TRUE(other->RemoveJob(SampleJob().job, "demo").ok());
  EXPECT_TRUE(absl::IsNotFound(env().Info(JobDir()).status()));
}

// What a node was about when it died says nothing about what another run has under these names.
TEST_P(SharedDirectoryTest, IntentsOfARunThatWasRemovedTouchNothingOfTheNext) {
  const auto other = OtherNode();
  Publish(SampleShard(900, 0, 2));
  Intent publish;
  publish.kind = IntentKind::kPublish;
  publish.unique = NewUnique();
  publish.job = SampleJob().job;
  publish.job_name = "demo";
  publish.checkpoint = {3, 900};
  publish.world_size = 2;
  publish.ranks = {1};
  Intent remove = publish;
  remove.kind = IntentKind::kRemove;
  remove.unique = NewUnique();
  remove.ranks = {0};
  remove.manifest_first = true;
  ASSERT_TRUE(other->OpenJob(SampleJob()).ok());  // makes its home
  ASSERT_TRUE(store().RemoveJob(SampleJob().job, "demo").ok());
  ASSERT_TRUE(store().ClaimAttempt(NextJob(), 3, "opening 1").ok());
  const SampleImage first = ShardOfNext(900, 0, 2);
  const SampleImage second = ShardOfNext(900, 1, 2);
  Publish(first);
  auto writing = store().Begin(NewCopyOfShard(second));
  ASSERT_TRUE(writing.ok()) << ToString(writing.status());
  ASSERT_TRUE(WriteShard(**writing, second).ok());
  const std::string call = "rename " + JobDir() + "/900-a3/.shard-00001-of-00002.record";
  env().StallMatching(call);
  absl::Status published;
  std::thread publisher([&] { published = (*writing)->Publish(second.record_file).status(); });
  ASSERT_TRUE(env().WaitForStalled(1, std::chrono::seconds(60)));
  WriteIntent("node-2", publish);
  WriteIntent("node-2", remove);
  const auto swept = other->Sweep();
  env().ReleaseStalled(call);
  publisher.join();
  ASSERT_TRUE(swept.ok()) << ToString(swept.status());
  EXPECT_THAT(swept->done, SizeIs(2));
  EXPECT_TRUE(published.ok()) << ToString(published);
  EXPECT_TRUE(CheckShard(store(), first).ok());
  EXPECT_TRUE(CheckShard(store(), second).ok());
}

// A node was killed between the end of its work on a shard and the end of the intent. It comes back
// while another node publishes that shard, whose image has its name and whose record has not: the
// image is not its own, although nothing of its own is left to compare with.
TEST_P(SharedDirectoryTest, WhoComesBackTakesNoImageOfANodeThatPublishes) {
  const std::string call = "rename " + JobDir() + "/900-a3/.shard-00001-of-00002.record";
  const std::string intents = "unlink " + harness_.dir() + "/.holdfast/nodes/node-2/intents/";
  const SampleImage sample = SampleShard(900, 1, 2);
  // It had given its copy up before it had a name, or after.
  for (const bool named : {false, true}) {
    const auto other = OtherNode();
    ASSERT_TRUE(other->ClaimAttempt(SampleJob(), 3, "opening 1").ok());
    auto theirs = other->Begin(NewCopyOfShard(sample));
    ASSERT_TRUE(theirs.ok()) << ToString(theirs.status());
    ASSERT_TRUE(WriteShard(**theirs, sample).ok());
    env().FailMatching(intents, EIO);
    if (named) {
      env().FailMatching(call, EIO);
      EXPECT_FALSE((*theirs)->Publish(sample.record_file).ok());
      env().FailMatching(call, 0);
    }
    theirs->reset();
    env().FailMatching(intents, 0);
    ASSERT_THAT(harness_.Leftovers(), ElementsAre(HasSubstr("/node-2/intents/"))) << named;

    auto writing = store().Begin(NewCopyOfShard(sample));
    ASSERT_TRUE(writing.ok()) << ToString(writing.status());
    ASSERT_TRUE(WriteShard(**writing, sample).ok());
    env().StallMatching(call);
    absl::Status published;
    std::thread publisher([&] { published = (*writing)->Publish(sample.record_file).status(); });
    EXPECT_TRUE(env().WaitForStalled(1, std::chrono::seconds(60)));
    const auto swept = other->Sweep();
    env().ReleaseStalled(call);
    publisher.join();
    ASSERT_TRUE(swept.ok()) << ToString(swept.status());
    EXPECT_THAT(swept->done, SizeIs(1)) << named;
    EXPECT_TRUE(published.ok()) << named << ": " << ToString(published);
    EXPECT_TRUE(CheckShard(store(), sample).ok()) << named;
    EXPECT_THAT(harness_.Leftovers(), IsEmpty()) << named;
    ASSERT_TRUE(store().RemoveCopy(NameOf(sample)).ok());
  }
}

TEST_P(CopyStoreTest, WhatADoctorLeftIsNothingUnknown) {
  Publish(SampleShard(900, 1, 4));
  ASSERT_TRUE(Overwrite(env(), harness_.dir() + "/.holdfast-doctor-17-0", "x").ok());
  EXPECT_THAT(Scan().unknown, IsEmpty());
  ASSERT_TRUE(Overwrite(env(), harness_.dir() + "/.holdfast-doctors", "x").ok());
  EXPECT_THAT(Scan().unknown, SizeIs(1));
}

// ---- The same directory as before ----

TEST_P(CopyStoreTest, WhatLiesUnderTheMountPointIsNotTakenForTheMount) {
  const SampleImage sample = SampleShard(900, 1, 4);
  Publish(sample);
  const KnownDirectory known = store().place();
  EXPECT_TRUE(known.id.size() == 32 && known.device == 1) << known.id;
  harness_.Stop();
  harness_.options().same_as = known;
  Start();  // as it is
  harness_.Stop();
  // The mount is gone; its mount point is an empty directory of the disk below.
  env().SetDevice(7);
  env().FailMatching(harness_.dir() + "/.holdfast/id", ENOENT);
  env().RecordCalls();
  const auto opened = CopyStore::Open(harness_.options());
  EXPECT_TRUE(absl::IsUnavailable(opened.status())) << ToString(opened.status());
  EXPECT_THAT(Message(opened.status()), HasSubstr("mount it again"));
  EXPECT_THAT(env().TakeCalls(), testing::Not(testing::Contains(testing::AnyOf(
                                     HasSubstr("create"), HasSubstr("lock"), HasSubstr("write")))))
      << "nothing is made there";
  // Mounted again, with another number; and again as it was.
  env().FailMatching(harness_.dir() + "/.holdfast/id", 0);
  Start();
  EXPECT_TRUE(CheckShard(store(), sample).ok());
  EXPECT_EQ(store().place().id, known.id);
  EXPECT_EQ(store().place().device, 7u);
}

// Another process knew the directory: device numbers say nothing any more, but that a mount is
// none.
TEST_P(CopyStoreTest, AfterARestartAMountThatIsMissingIsNoticed) {
  harness_.Stop();
  env().SetDevice(7, harness_.dir());
  Start();
  KnownDirectory known = store().place();
  EXPECT_TRUE(known.own_mount);
  known.device = 0;
  harness_.Stop();
  harness_.options().same_as = known;
  env().SetDevice(8, harness_.dir());
  env().FailMatching(harness_.dir() + "/.holdfast/id", ENOENT);
  EXPECT_TRUE(CopyStore::Open(harness_.options()).ok()) << "a drive that was put in its place";
  env().SetDevice(1);
  EXPECT_TRUE(absl::IsUnavailable(CopyStore::Open(harness_.options()).status()));
  harness_.options().same_as->own_mount = false;
  EXPECT_TRUE(CopyStore::Open(harness_.options()).ok());
}

TEST_P(CopyStoreTest, ADirectoryWithoutIdGetsOne) {
  const std::string path = harness_.dir() + "/.holdfast/id";
  harness_.Stop();
  ASSERT_TRUE(env().Unlink(path).ok());  // made by an earlier version
  Start();
  EXPECT_EQ(store().place().id + "\n", ReadFile(env(), path, 100).value());
  harness_.Stop();
  ASSERT_TRUE(Overwrite(env(), path, "nonsense").ok());
  Start();
  EXPECT_EQ(store().place().id, "");
  EXPECT_THAT(store().capabilities().notes, testing::Contains(HasSubstr("not an id")));
  Publish(SampleShard(900, 1, 4));
}

TEST_P(CopyStoreTest, AReadOnlyDirectoryCanBeRead) {
  const SampleImage sample = SampleShard(900, 1, 4);
  Publish(sample);
  harness_.Stop();
  for (const char* call : {"create", "lock", "rename", "link", "unlink", "write"}) {
    env().FailMatching(call, EROFS);
  }
  auto opened = CopyStore::Open(harness_.options());
  ASSERT_TRUE(opened.ok()) << ToString(opened.status());
  EXPECT_TRUE(CheckShard(**opened, sample).ok());
  EXPECT_THAT((*opened)->ScanAll()->jobs, SizeIs(1));
  EXPECT_FALSE(PublishShard(**opened, SampleShard(901, 1, 4)).ok());
  EXPECT_FALSE((*opened)->RemoveCopy(NameOf(sample)).ok());
  for (const char* call : {"create", "lock", "rename", "link", "unlink", "write"}) {
    env().FailMatching(call, 0);
  }
  if (remote()) {
    ASSERT_TRUE((*opened)->ClaimAttempt(SampleJob(), 3, "opening 1").ok());
  }
  EXPECT_TRUE(PublishShard(**opened, SampleShard(901, 1, 4)).ok()) << "it heals by itself";
}

// ---- Whose name it is ----

class NodeNameTest : public CopyStoreTest {
 protected:
  static NodeOwner Owner(const std::string& state, const std::string& machine) {
    return {state, machine, "boot of " + machine};
  }
  void StartAs(const NodeOwner& owner) {
    harness_.Stop();
    harness_.options().owner = owner;
    Start();
  }
  // Opens, reads what is there, and writes nothing.
  void ExpectRefused(const NodeOwner& owner, const std::string& why) {
    CopyStore::Options options = harness_.options();
    options.owner = owner;
    const auto opened = CopyStore::Open(options);
    ASSERT_TRUE(opened.ok()) << ToString(opened.status());
    EXPECT_TRUE((*opened)->ScanAll().ok());
    EXPECT_EQ((*opened)->refusal(), "");
    const absl::Status swept = (*opened)->Sweep().status();
    EXPECT_TRUE(absl::IsUnavailable(swept)) << ToString(swept);
    EXPECT_THAT(Message(swept), HasSubstr(why));
    EXPECT_EQ((*opened)->refusal(), Message(swept));
    EXPECT_TRUE(absl::IsUnavailable(PublishShard(**opened, SampleShard(901, 1, 4)).status()));
    EXPECT_TRUE(absl::IsUnavailable((*opened)->RemoveJob(SampleJob().job, "demo").status()));
  }
};

INSTANTIATE_TEST_SUITE_P(Kinds, NodeNameTest, testing::Values(DurableKind::kRemote),
                         [](const auto&) { return "Remote"; });

TEST_P(NodeNameTest, TwoDaemonsOfOneNameDoNotUndoEachOthersWork) {
  StartAs(Owner("s1", "m1"));
  auto begun = store().Begin(NewCopyOfShard(SampleShard(900, 1, 4)));  // under way, with an intent
  ASSERT_TRUE(begun.ok());
  ASSERT_TRUE(WriteShard(**begun, SampleShard(900, 1, 4)).ok());
  ExpectRefused(Owner("s2", "m2"), "two daemons called 'node-1' would undo each other's work");
  ExpectRefused(Owner("s2", "m1"), "two daemons called 'node-1' would undo each other's work");
  ExpectRefused(Owner("s1", "m1"), "two daemons called 'node-1' would undo each other's work");
  // Where locks are not to be had, or do not reach the other node, the file says it.
  env().FailMatching("lock ", ENOSYS);
  ExpectRefused(Owner("s2", "m2"), "rm '");
  ExpectRefused(Owner("s2", "m1"), "rm '");
  ExpectRefused(Owner("s1", "m2"), "rm '");
  env().FailMatching("lock ", 0);
  ASSERT_TRUE((*begun)->Publish(SampleShard(900, 1, 4).record_file).ok());
  EXPECT_TRUE(CheckShard(store(), SampleShard(900, 1, 4)).ok());
}

TEST_P(NodeNameTest, ANodeThatWasInstalledAnewTakesItsNameWithOneCommand) {
  StartAs(Owner("s1", "m1"));
  Publish(SampleShard(900, 1, 4));
  harness_.Stop();
  ExpectRefused(Owner("s2", "m2"), harness_.dir() + "/.holdfast/nodes/node-1/owner");
  ASSERT_TRUE(env().Unlink(harness_.dir() + "/.holdfast/nodes/node-1/owner").ok());
  StartAs(Owner("s2", "m2"));
  EXPECT_EQ(store().refusal(), "");
  Publish(SampleShard(901, 1, 4));
}

TEST_P(NodeNameTest, TheSameNodeGoesOnAfterARebootOrWithoutItsState) {
  StartAs(Owner("s1", "m1"));
  StartAs({"s1", "m1", "another boot"});
  StartAs({"s2", "m1", "a third boot"});  // its state_dir was lost
  StartAs({"s3", "", "a third boot"});    // a container without a machine-id, likewise
  StartAs({"s3", "", "a fourth boot"});
  StartAs({"s3", "m1", "a fifth boot"});
  Publish(SampleShard(900, 1, 4));
}

TEST_P(NodeNameTest, AMachineOfWhichNothingIsKnownIsNotTheSame) {
  StartAs({"s1", "", ""});
  harness_.Stop();
  ExpectRefused({"s2", "", ""}, "rm '");
  ExpectRefused({"s2", "", "a boot"}, "rm '");
  ExpectRefused({"s2", "m1", ""}, "rm '");
  StartAs({"s1", "", "a boot"});
  Publish(SampleShard(900, 1, 4));
}

TEST_P(NodeNameTest, AnOwnerFileOfNobodyIsRefused) {
  StartAs(Owner("s1", "m1"));
  harness_.Stop();
  ASSERT_TRUE(Overwrite(env(), harness_.dir() + "/.holdfast/nodes/node-1/owner", "nonsense").ok());
  ExpectRefused(Owner("s1", "m1"), "rm '");
}

// A full file system can be emptied, and goes on by itself.
TEST_P(CopyStoreTest, AFullDirectoryIsAStatusAndCanBeEmptied) {
  Publish(SampleShard(1, 0, 2));
  env().SetBytesTotal(0);
  EXPECT_TRUE(absl::IsResourceExhausted(PublishShard(store(), SampleShard(2, 0, 2)).status()));
  EXPECT_THAT(harness_.Leftovers(), IsEmpty());
  // As full as can be: the last byte is taken, by what is there and the reserve.
  uint64_t used = 0;
  for (const std::string& file : harness_.Files()) {
    used += env().Info(harness_.dir() + "/" + file)->bytes;
  }
  env().SetBytesTotal(used);
  EXPECT_TRUE(absl::IsResourceExhausted(PublishShard(store(), SampleShard(2, 0, 2)).status()));
  const auto removed = store().RemoveCheckpoint(CheckpointOf(SampleShard(1, 0, 2)));
  EXPECT_TRUE(removed.ok()) << ToString(removed.status());
  env().SetBytesTotal(uint64_t{1} << 30);
  EXPECT_TRUE(PublishShard(store(), SampleShard(2, 0, 2)).ok());
}

// NFS before 4.2, many a FUSE: no fallocate. Files get their length all the same; that there is no
// room shows while they are written, and nothing is set aside for emptying a full one.
TEST_P(CopyStoreTest, WhereNoRoomCanBeReservedThatItIsFullShowsLater) {
  DurableHarness place({.kind = GetParam(), .allocate = false});
  const absl::Status started = place.Start();
  ASSERT_TRUE(started.ok()) << ToString(started);
  CopyStore& bare = place.store();
  FaultEnv& faults = *place.faults();
  const std::string home = place.dir() + (remote() ? "/.holdfast/nodes/node-1" : "/.holdfast");
  EXPECT_EQ(faults.Info(home + "/reserve")->bytes, 0u);
  // 1. Fresh files; then recycled ones that are a little too long, and too short.
  const SampleImage longer = SampleShard(6, 0, 2);
  const SampleImage shorter = SampleShard(7, 0, 2);
  ASSERT_GT(longer.image.size(), shorter.image.size());
  for (const SampleImage& sample : {longer, shorter, longer}) {
    {
      const auto writing = bare.Begin(NewCopyOfShard(sample));
      ASSERT_TRUE(writing.ok()) << ToString(writing.status());
      EXPECT_GE((*writing)->image().Info()->bytes, sample.image.size());
      ASSERT_TRUE(WriteShard(**writing, sample).ok());
      ASSERT_TRUE((*writing)->Publish(sample.record_file).ok());
    }
    EXPECT_TRUE(CheckShard(bare, sample).ok());
    ASSERT_TRUE(bare.RemoveCopy(NameOf(sample)).ok());
  }
  // 2. Full amid a copy: it is given up, and goes through when there is room.
  ASSERT_TRUE(PublishShard(bare, longer).ok());
  const std::string write_step = "write " + place.dir() + "/demo/13-a3/";
  const SampleImage next = SampleShard(13, 0, 2);
  faults.FailMatching(write_step, ENOSPC);
  EXPECT_TRUE(absl::IsResourceExhausted(PublishShard(bare, next).status()));
  EXPECT_THAT(place.Leftovers(), IsEmpty());
  faults.FailMatching(write_step, 0);
  EXPECT_TRUE(PublishShard(bare, next).ok());
  EXPECT_TRUE(CheckShard(bare, next).ok());
  // 3. Full to the last byte: not even a removal can be written down. It is refused as a whole.
  faults.FailMatching("write " + home + "/intents/", ENOSPC);
  EXPECT_TRUE(absl::IsResourceExhausted(bare.RemoveCheckpoint(CheckpointOf(next)).status()));
  EXPECT_TRUE(CheckShard(bare, next).ok());
  EXPECT_THAT(place.Leftovers(), IsEmpty());
  faults.FailMatching("write " + home + "/intents/", 0);
  EXPECT_TRUE(bare.RemoveCheckpoint(CheckpointOf(next)).ok());
}

TEST_P(CopyStoreTest, AFailedSyncKillsThatCopy) {
  for (const char* sync : {"fdatasync", "fsync", "sync directory"}) {
    const SampleImage sample = SampleShard(900, 1, 4);
    auto writing = store().Begin(NewCopyOfShard(sample));
    ASSERT_TRUE(writing.ok());
    ASSERT_TRUE(WriteShard(**writing, sample).ok());
    env().FailMatching(sync, EIO);
    EXPECT_FALSE((*writing)->Publish(sample.record_file).ok()) << sync;
    env().FailMatching(sync, 0);
    EXPECT_FALSE((*writing)->Publish(sample.record_file).ok()) << "never the same file again";
    writing->reset();
    ASSERT_TRUE(store().Sweep().ok());
    EXPECT_TRUE(absl::IsNotFound(store().OpenCopy(NameOf(sample), {}).status())) << sync;
    EXPECT_THAT(harness_.Leftovers(), IsEmpty()) << sync;
    Publish(sample);
    EXPECT_TRUE(CheckShard(store(), sample).ok());
    ASSERT_TRUE(store().RemoveCopy(NameOf(sample)).ok());
  }
}

// A mount that hangs holds up the calls that are in it, and no others.
TEST_P(CopyStoreTest, ACallThatHangsHoldsUpNoOther) {
  const SampleImage stuck = SampleShard(900, 1, 4);
  auto writing = store().Begin(NewCopyOfShard(stuck));
  ASSERT_TRUE(writing.ok());
  ASSERT_TRUE(WriteShard(**writing, stuck).ok());
  env().StallMatching("fdatasync");
  absl::Status published = absl::UnknownError("");
  std::thread publisher([&] { published = (*writing)->Publish(stuck.record_file).status(); });
  ASSERT_TRUE(env().WaitForStalled(1, std::chrono::seconds(60)));
  EXPECT_EQ(store().pool_bytes(), 0u);
  EXPECT_TRUE(store().capabilities().known);
  EXPECT_TRUE(store().ScanAll().ok());
  EXPECT_TRUE(store().Sweep().ok());
  EXPECT_TRUE(absl::IsNotFound(store().OpenCopy(NameOf(stuck), {}).status()));
  EXPECT_TRUE(store().Begin(NewCopyOfShard(SampleShard(901, 1, 4))).ok());
  env().ReleaseStalled("fdatasync");
  publisher.join();
  EXPECT_TRUE(published.ok()) << ToString(published);
  EXPECT_TRUE(CheckShard(store(), stuck).ok());
}

}  // namespace
}  // namespace holdfast
