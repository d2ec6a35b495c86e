// Manifests that somebody damaged, swapped or published twice; attempts that are not who they say;
// what a remote file system can and cannot do.
#include <thread>

#include "tests/tiers/durable/hostile_fixture.h"
#include "tiers/durable/small_files.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;
using ::testing::SizeIs;

class HostileRemoteTest : public HostileTest {
 protected:
  HostileRemoteTest() : HostileTest(DurablePlace{.kind = DurableKind::kRemote}) {}

  std::vector<SampleImage> samples_ = {SampleShard(900, 0, 2), SampleShard(900, 1, 2)};
  Manifest Commit() {
    std::vector<PublishedCopy> copies;
    for (const SampleImage& sample : samples_) {
      copies.push_back(Publish(sample));
    }
    Manifest manifest = ManifestOf(samples_, copies);
    const absl::Status status = store().PublishManifest(manifest);
    EXPECT_TRUE(status.ok()) << ToString(status);
    return manifest;
  }
  std::string ManifestPath() { return Path("demo/900-a3/MANIFEST"); }
};

TEST_F(HostileRemoteTest, ACommittedStepIsListedByItsManifest) {
  const Manifest manifest = Commit();
  const auto scan = store().ScanJob("demo");
  ASSERT_TRUE(scan.ok());
  const CheckpointScan& step = scan->jobs.at(0).checkpoints.at(0);
  EXPECT_TRUE(step.has_manifest);
  EXPECT_EQ(step.committed_unix_ms, manifest.committed_unix_ms);
  EXPECT_EQ(step.descent, manifest.descent);
  ASSERT_THAT(step.copies, SizeIs(2));
  EXPECT_EQ(step.copies[1].record_crc, manifest.shards[1].record_crc);
  EXPECT_EQ(scan->unreadable_count + scan->unknown_count, 0u);
  EXPECT_THAT(scan->jobs[0].claims, testing::ElementsAre(3));
  EXPECT_TRUE(absl::IsFailedPrecondition(store().RemoveCopy(NameOf(samples_[0])).status()));
  EXPECT_THAT(Read(Path("demo/900-a3/manifest.json")), HasSubstr("\"step\": 900"));
  // Files that it names and that are not as it says are missing; the others are there.
  const std::string record = Read(RecordOf(samples_[1]));
  Write(RecordOf(samples_[1]), record + "x");
  EXPECT_THAT(store().ScanJob("demo")->jobs.at(0).checkpoints.at(0).copies, SizeIs(1));
  Write(RecordOf(samples_[1]), record);
  ASSERT_TRUE(env().Unlink(ImageOf(samples_[0])).ok());
  const auto damaged = store().ScanJob("demo");
  EXPECT_THAT(damaged->jobs.at(0).checkpoints.at(0).copies, SizeIs(1));
  EXPECT_EQ(damaged->unreadable_count, 1u);
  EXPECT_TRUE(damaged->jobs[0].checkpoints[0].has_manifest);
}

TEST_F(HostileRemoteTest, ARecordThatTheManifestDoesNotNameIsRefused) {
  Commit();
  ShardRecord other = samples_[1].record;  // valid, of the right shard, and not the one
  other.generation = 0;
  other.sealed_unix_ms += 1;
  Write(RecordOf(samples_[1]), EncodeRecord(other));
  EXPECT_TRUE(absl::IsDataLoss(Opens(samples_[1]))) << ToString(Opens(samples_[1]));
  EXPECT_TRUE(CheckShard(store(), samples_[0]).ok());
}

TEST_F(HostileRemoteTest, ManifestsOfOthersAreRefused) {
  const Manifest manifest = Commit();
  Manifest other_job = manifest;
  other_job.job = OtherUuid();
  Manifest other_name = manifest;
  other_name.job_name = "other";
  Manifest other_step = manifest;
  other_step.checkpoint.step = 901;
  Manifest other_attempt = manifest;
  other_attempt.checkpoint.attempt = 4;
  other_attempt.descent.clear();
  for (const Manifest& bad : {other_job, other_name, other_step, other_attempt}) {
    Write(ManifestPath(), EncodeManifest(bad));
    EXPECT_TRUE(absl::IsDataLoss(store().ReadManifest(CheckpointOf(samples_[0])).status()));
    EXPECT_TRUE(absl::IsDataLoss(Opens(samples_[0])));
    EXPECT_FALSE(store().PublishManifest(manifest).ok()) << "damage is not adopted";
    const auto scan = store().ScanAll();
    ASSERT_THAT(scan->unreadable, SizeIs(1));
    EXPECT_EQ(scan->unreadable[0].location, ManifestPath());
    EXPECT_FALSE(scan->jobs.at(0).checkpoints.at(0).has_manifest);
    EXPECT_TRUE(scan->jobs.at(0).checkpoints.at(0).manifest_unreadable);
  }
}

TEST_F(HostileRemoteTest, EveryByteOfTheManifestCounts) {
  const std::string good = EncodeManifest(Commit());
  for (size_t at = 0; at < good.size(); ++at) {
    std::string bad = good;
    bad[at] = static_cast<char>(bad[at] ^ 0x10);
    Write(ManifestPath(), bad);
    const absl::StatusCode code = store().ReadManifest(CheckpointOf(samples_[0])).status().code();
    const bool version = at >= 8 && at < 12;
    EXPECT_EQ(code, version ? absl::StatusCode::kFailedPrecondition : absl::StatusCode::kDataLoss)
        << "byte " << at;
  }
  std::string newer = good;
  newer[8] = 2;
  Write(ManifestPath(), newer);
  const auto scan = store().ScanAll();
  EXPECT_THAT(scan->jobs.at(0).checkpoints, SizeIs(0)) << "nothing there is judged";
  EXPECT_EQ(scan->unreadable_count, 1u);
  EXPECT_TRUE(absl::IsFailedPrecondition(Opens(samples_[0])));
}

TEST_F(HostileRemoteTest, AManifestNamesOnlyWhatIsThere) {
  std::vector<PublishedCopy> copies = {Publish(samples_[0])};
  copies.push_back(copies[0]);
  const Manifest manifest = ManifestOf(samples_, copies);
  const absl::Status status = store().PublishManifest(manifest);
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << ToString(status);
  EXPECT_THAT(Message(status), HasSubstr("shard-00001-of-00002"));
  Manifest short_one = manifest;
  short_one.shards.pop_back();
  EXPECT_TRUE(absl::IsInvalidArgument(store().PublishManifest(short_one)));
}

// Two nodes that commit the same step at once: one does, the other adopts; what differs is told.
TEST_F(HostileRemoteTest, TwoNodesPublishTheSameManifest) {
  for (int round = 0; round < 20; ++round) {
    const Step step = 1000 + static_cast<Step>(round);
    const std::vector<SampleImage> samples = {SampleShard(step, 0, 2), SampleShard(step, 1, 2)};
    std::vector<PublishedCopy> copies = {Publish(samples[0]), Publish(samples[1])};
    CopyStore::Options options = harness_.options();
    options.node_name = "node-2";
    auto second = CopyStore::Open(options).value();
    ASSERT_TRUE(second->ClaimAttempt(SampleJob(), 3, "opening 1").ok());
    Manifest mine = ManifestOf(samples, copies);
    Manifest theirs = mine;
    theirs.committed_unix_ms += 5;  // the moment is not part of the promise
    const bool differ = round % 2 == 1;
    if (differ) {
      theirs.shards[1].record_crc ^= 1;
    }
    bool adopted[2] = {};
    absl::Status status[2];
    std::thread other([&] { status[1] = second->PublishManifest(theirs, &adopted[1]); });
    status[0] = store().PublishManifest(mine, &adopted[0]);
    other.join();
    EXPECT_EQ(adopted[0] + adopted[1], 1);
    const int winner = adopted[0] ? 1 : 0;
    EXPECT_TRUE(status[winner].ok()) << ToString(status[winner]);
    if (differ) {
      EXPECT_TRUE(absl::IsAlreadyExists(status[1 - winner])) << ToString(status[1 - winner]);
      EXPECT_THAT(Message(status[1 - winner]), HasSubstr("rank 1"));
    } else {
      EXPECT_TRUE(status[1 - winner].ok()) << ToString(status[1 - winner]);
    }
    EXPECT_EQ(*store().ReadManifest(CheckpointOf(samples[0])), winner == 0 ? mine : theirs);
  }
  EXPECT_THAT(harness_.Leftovers(), SizeIs(0));
}

TEST_F(HostileRemoteTest, AnAttemptBelongsToItsFirstOpening) {
  const SampleImage sample = SampleShard(900, 0, 2, 7);
  EXPECT_TRUE(absl::IsFailedPrecondition(PublishShard(store(), sample).status()))
      << "nothing is written without a claim";
  CopyStore::Options options = harness_.options();
  options.node_name = "node-2";
  auto second = CopyStore::Open(options).value();
  ASSERT_TRUE(store().ClaimAttempt(SampleJob(), 7, "ours").ok());
  ASSERT_TRUE(store().ClaimAttempt(SampleJob(), 7, "ours").ok()) << "again";
  const absl::Status theirs = second->ClaimAttempt(SampleJob(), 7, "theirs");
  EXPECT_TRUE(absl::IsFailedPrecondition(theirs)) << ToString(theirs);
  EXPECT_TRUE(absl::IsFailedPrecondition(store().ClaimAttempt(SampleJob(), 7, "theirs")));
  EXPECT_TRUE(absl::IsFailedPrecondition(PublishShard(*second, sample).status()));
  EXPECT_TRUE(PublishShard(store(), sample).ok());
  EXPECT_TRUE(second->ClaimAttempt(SampleJob(), 7, "ours").ok())
      << "another node of the same opening";
  EXPECT_TRUE(absl::IsInvalidArgument(store().ClaimAttempt(SampleJob(), 8, "")));
  EXPECT_TRUE(absl::IsInvalidArgument(store().ClaimAttempt(SampleJob(), 8, std::string(257, 'x'))));
  Write(Path("demo/attempt-9"), "garbage");
  EXPECT_TRUE(absl::IsDataLoss(store().ClaimAttempt(SampleJob(), 9, "ours")));
  Write(Path("demo/attempt-9"), EncodeClaim({OtherUuid(), 9, "ours"}));
  EXPECT_TRUE(absl::IsFailedPrecondition(store().ClaimAttempt(SampleJob(), 9, "ours")));
}

TEST_F(HostileRemoteTest, StripingIsAskedForOnLustre) {
  harness_.Stop();
  FaultEnv& faults = *harness_.faults();
  faults.SetFilesystemType("lustre");
  harness_.options().striping = {8, 1u << 20};
  ASSERT_TRUE(harness_.Start().ok());
  Publish(samples_[0]);
  Publish(samples_[1]);
  ASSERT_THAT(faults.stripings(), SizeIs(1)) << "once per step, for the directory";
  EXPECT_EQ(faults.stripings()[0].first, Path("demo/900-a3"));
  EXPECT_EQ(faults.stripings()[0].second.count, 8);
  EXPECT_EQ(faults.stripings()[0].second.bytes, 1u << 20);
  faults.FailMatching("set striping", EPERM);
  Publish(SampleShard(901, 0, 2));
  EXPECT_THAT(store().capabilities().notes, testing::Contains(HasSubstr("set striping")));
}

TEST_F(HostileRemoteTest, AFileSystemWithoutExclusiveNamesSaysSo) {
  EXPECT_FALSE(store().capabilities().one_node_only());
  harness_.Stop();
  harness_.faults()->SetHardLinks(false);
  harness_.faults()->SetRenameNoReplace(false);
  ASSERT_TRUE(harness_.Start().ok());
  EXPECT_TRUE(store().capabilities().one_node_only());
  EXPECT_GE(store().capabilities().notes.size(), 2u);
}

}  // namespace
}  // namespace holdfast
