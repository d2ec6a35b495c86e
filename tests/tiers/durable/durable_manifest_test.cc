// Manifests that somebody damaged, swapped or published twice; attempts that are not who they say;
// what a remote file system can and cannot do.
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <barrier>
#include <cerrno>
#include <functional>
#include <thread>

#include "absl/strings/str_cat.h"
#include "tests/tiers/durable/hostile_fixture.h"
#include "tiers/durable/small_files.h"

// In place of libc's, for this program: real files on a file system without hard links.
namespace {
std::atomic<bool> no_hard_links{false};
}  // namespace

extern "C" int link(const char* from, const char* to) noexcept {
  if (no_hard_links.load()) {
    errno = EPERM;
    return -1;
  }
  return static_cast<int>(::syscall(SYS_linkat, AT_FDCWD, from, AT_FDCWD, to, 0));
}

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

// ---- The mark of a step whose writing has only begun ----

TEST_F(HostileRemoteTest, AStepIsABeginningWhileItHasTheMarkAndNoManifest) {
  const auto begun = [&] {
    const auto scan = store().ScanJob("demo");
    return scan.ok() && scan->jobs.size() == 1 && scan->jobs[0].checkpoints.size() == 1 &&
           scan->jobs[0].checkpoints[0].begun;
  };
  const std::string mark = Path("demo/900-a3/writing");
  const Manifest manifest = ManifestOf(samples_, {Publish(samples_[0]), Publish(samples_[1])});
  EXPECT_TRUE(env().Info(mark).ok());
  EXPECT_TRUE(begun());
  ASSERT_TRUE(store().PublishManifest(manifest).ok());
  EXPECT_FALSE(env().Info(mark).ok());
  EXPECT_FALSE(begun());
  // Beside a manifest it means nothing, be that one damaged or not.
  Write(mark, "");
  EXPECT_FALSE(begun());
  EXPECT_TRUE(store().ScanJob("demo")->jobs[0].checkpoints[0].has_manifest);
  const std::string good = Read(ManifestPath());
  Write(ManifestPath(), "damaged");
  EXPECT_FALSE(begun());
  // Without it a step has lost its manifest.
  ASSERT_TRUE(env().Unlink(ManifestPath()).ok());
  EXPECT_TRUE(begun());
  ASSERT_TRUE(env().Unlink(mark).ok());
  EXPECT_FALSE(begun());
  // What is no file is none of ours.
  ASSERT_TRUE(env().CreateDirectory(mark, 0750).ok());
  EXPECT_FALSE(begun());
  EXPECT_EQ(store().ScanJob("demo")->unknown_count, 1u);
  Write(ManifestPath(), good);
  EXPECT_TRUE(CheckShard(store(), samples_[0]).ok());
}

// With a mark it would be a beginning, and nobody would miss it.
TEST_F(HostileRemoteTest, AStepThatHasLostItsManifestGetsNoMarkAgain) {
  Commit();
  ASSERT_TRUE(env().Unlink(ManifestPath()).ok());
  ASSERT_TRUE(env().Unlink(RecordOf(samples_[0])).ok());
  ASSERT_TRUE(env().Unlink(ImageOf(samples_[0])).ok());
  Publish(samples_[0]);
  EXPECT_FALSE(env().Info(Path("demo/900-a3/writing")).ok());
}

TEST_F(HostileRemoteTest, NamesThatAreNotOursAreReportedAndKeepNoMark) {
  Publish(samples_[0]);
  ASSERT_TRUE(env().CreateDirectory(Path("lost+found"), 0700).ok());
  Write(Path("demo/900-a3/.nfs0000000000000001"), "open somewhere");
  const auto scan = store().ScanAll();
  ASSERT_TRUE(scan.ok());
  EXPECT_THAT(scan->jobs, SizeIs(1));
  EXPECT_THAT(scan->hidden, testing::IsEmpty());
  EXPECT_EQ(scan->unknown_count, 2u);
  const auto removed = store().RemoveJob(SampleJob().job, "demo");
  ASSERT_TRUE(removed.ok()) << ToString(removed.status());
  EXPECT_THAT(env().List(Path("demo/900-a3")).value(),
              testing::ElementsAre(".nfs0000000000000001"));
}

// Another node writes as this one commits, or removes.
TEST_F(HostileRemoteTest, AMarkThatComesTooLateGoesAgain) {
  CopyStore::Options options = harness_.options();
  options.node_name = "node-2";
  const auto other = CopyStore::Open(options).value();
  ASSERT_TRUE(other->ClaimAttempt(SampleJob(), 3, "opening 1").ok());
  const std::string mark = Path("demo/900-a3/writing");
  const Manifest manifest = ManifestOf(samples_, {Publish(samples_[0]), Publish(samples_[1])});
  harness_.faults()->StallMatching("create " + mark);
  std::unique_ptr<CopyStore::Writing> late;
  std::thread writer([&] {
    auto begun = other->Begin(NewCopyOfShard(SampleShard(900, 1, 3)));
    EXPECT_TRUE(begun.ok()) << ToString(begun.status());
    late = begun.ok() ? *std::move(begun) : nullptr;
  });
  EXPECT_TRUE(harness_.faults()->WaitForStalled(1, std::chrono::seconds(60)));
  EXPECT_TRUE(store().PublishManifest(manifest).ok());
  harness_.faults()->ReleaseStalled("create " + mark);
  writer.join();
  EXPECT_FALSE(env().Info(mark).ok());
}

TEST_F(HostileRemoteTest, AStepThatIsRemovedWhileItIsWrittenKeepsItsMark) {
  CopyStore::Options options = harness_.options();
  options.node_name = "node-2";
  const auto other = CopyStore::Open(options).value();
  const std::string mark = Path("demo/900-a3/writing");
  auto writing = store().Begin(NewCopyOfShard(samples_[0]));
  ASSERT_TRUE(writing.ok());
  ASSERT_TRUE(WriteShard(**writing, samples_[0]).ok());
  const auto removed = other->RemoveCheckpoint(CheckpointOf(samples_[0]));
  ASSERT_TRUE(removed.ok()) << ToString(removed.status());
  EXPECT_THAT(removed->left_alone, SizeIs(1)) << "what is being written";
  EXPECT_TRUE(env().Info(mark).ok());
  // Nor does it lack one whose mark was taken just before its first file was there.
  ASSERT_TRUE(env().Unlink(mark).ok());
  ASSERT_TRUE((*writing)->Publish(samples_[0].record_file).ok());
  EXPECT_TRUE(env().Info(mark).ok());
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
    EXPECT_EQ(Opens(samples_[0]), absl::OkStatus()) << "the record says what it is of";
    EXPECT_FALSE(store().PublishManifest(manifest).ok()) << "damage is not adopted";
    const auto scan = store().ScanAll();
    ASSERT_THAT(scan->unreadable, SizeIs(1));
    EXPECT_EQ(scan->unreadable[0].location, ManifestPath());
    EXPECT_FALSE(scan->jobs.at(0).checkpoints.at(0).has_manifest);
    EXPECT_TRUE(scan->jobs.at(0).checkpoints.at(0).manifest_unreadable);
    EXPECT_TRUE(absl::IsDataLoss(scan->jobs[0].checkpoints[0].manifest_why));
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
  const CheckpointScan& step = scan->jobs.at(0).checkpoints.at(0);
  EXPECT_TRUE(step.manifest_unreadable);
  EXPECT_FALSE(step.has_manifest);
  EXPECT_TRUE(absl::IsFailedPrecondition(step.manifest_why));
  EXPECT_THAT(step.copies, SizeIs(2)) << "as their records say";
  EXPECT_EQ(scan->unreadable_count, 1u);
  EXPECT_TRUE(absl::IsFailedPrecondition(Opens(samples_[0])));
}

TEST_F(HostileRemoteTest, AManifestNamesOnlyWhatIsThere) {
  std::vector<PublishedCopy> copies = {Publish(samples_[0])};
  copies.push_back(copies[0]);
  const Manifest manifest = ManifestOf(samples_, copies);
  std::vector<Rank> missing;
  const absl::Status status = store().PublishManifest(manifest, nullptr, &missing);
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << ToString(status);
  EXPECT_THAT(Message(status), HasSubstr("shard-00001-of-00002"));
  EXPECT_THAT(missing, testing::ElementsAre(1));
  Manifest short_one = manifest;
  short_one.shards.pop_back();
  EXPECT_TRUE(absl::IsInvalidArgument(store().PublishManifest(short_one)));
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

// ---- Two nodes that commit the same step at once: one does, the other adopts; what differs is
// told.

struct RacePlace {
  const char* name;
  DurablePlace place;
  bool links_on_real_files = true;
};
void PrintTo(const RacePlace& place, std::ostream* out) {
  *out << place.name;
}

class ManifestRaceTest : public testing::TestWithParam<RacePlace> {
 protected:
  void SetUp() override {
    no_hard_links = !GetParam().links_on_real_files;
    harness_ = std::make_unique<DurableHarness>(GetParam().place);
    const absl::Status started = harness_->Start();
    ASSERT_TRUE(started.ok()) << ToString(started);
    CopyStore::Options options = harness_->options();
    options.node_name = "node-2";
    second_ = CopyStore::Open(options).value();
    ASSERT_TRUE(second_->ClaimAttempt(SampleJob(), 3, "opening 1").ok());
    std::vector<PublishedCopy> copies;
    for (const SampleImage& sample : samples_) {
      copies.push_back(PublishShard(harness_->store(), sample).value());
    }
    manifest_ = ManifestOf(samples_, copies);
    const bool links = GetParam().place.hard_links && GetParam().links_on_real_files;
    ASSERT_EQ(harness_->store().capabilities().hard_links, links);
    ASSERT_FALSE(harness_->store().capabilities().one_node_only());
  }
  void TearDown() override { no_hard_links = false; }

  CopyStore& store(int node) { return node == 0 ? harness_->store() : *second_; }
  CheckpointName Name() const { return CheckpointOf(samples_[0]); }

  // Both at once, and what came of it; then the step is uncommitted again.
  void Race(bool differ, const std::function<void()>& meanwhile) {
    Manifest manifests[2] = {manifest_, manifest_};
    manifests[1].committed_unix_ms += 5;  // the moment is not part of the promise
    if (differ) {
      manifests[1].shards[1].record_crc ^= 1;
    }
    bool adopted[2] = {};
    absl::Status status[2];
    std::barrier both(2);
    std::vector<std::thread> threads;
    for (const int node : {0, 1}) {
      threads.emplace_back([&, node] {
        both.arrive_and_wait();
        status[node] = store(node).PublishManifest(manifests[node], &adopted[node]);
      });
    }
    meanwhile();
    for (std::thread& thread : threads) {
      thread.join();
    }
    ASSERT_EQ(adopted[0] + adopted[1], 1) << "exactly one of them made it";
    const int winner = adopted[0] ? 1 : 0;
    EXPECT_TRUE(status[winner].ok()) << ToString(status[winner]);
    const absl::Status& other = status[1 - winner];
    if (differ) {
      EXPECT_TRUE(absl::IsAlreadyExists(other)) << ToString(other);
      EXPECT_THAT(Message(other), HasSubstr("rank 1"));
    } else {
      EXPECT_TRUE(other.ok()) << ToString(other);
    }
    for (const int node : {0, 1}) {
      const auto there = store(node).ReadManifest(Name());
      ASSERT_TRUE(there.ok()) << ToString(there.status());
      EXPECT_EQ(*there, manifests[winner]);
    }
    EXPECT_THAT(harness_->Leftovers(), SizeIs(0));
    const std::string step = harness_->dir() + "/demo/900-a3/";
    ASSERT_TRUE(harness_->env().Unlink(step + "MANIFEST").ok());
    ASSERT_TRUE(harness_->env().Unlink(step + "manifest.json").ok());
  }

  const std::vector<SampleImage> samples_ = {SampleShard(900, 0, 2), SampleShard(900, 1, 2)};
  std::unique_ptr<DurableHarness> harness_;
  std::unique_ptr<CopyStore> second_;
  Manifest manifest_;
};

constexpr DurablePlace kBoth = {.kind = DurableKind::kRemote};
constexpr DurablePlace kLinksOnly = {.kind = DurableKind::kRemote, .rename_no_replace = false};
constexpr DurablePlace kRenameOnly = {.kind = DurableKind::kRemote, .hard_links = false};
constexpr DurablePlace kRealFiles = {.kind = DurableKind::kRemote, .real = true};

INSTANTIATE_TEST_SUITE_P(
    Places, ManifestRaceTest,
    testing::Values(RacePlace{"LinksAndRenames", kBoth}, RacePlace{"LinksOnly", kLinksOnly},
                    RacePlace{"RenamesOnly", kRenameOnly}, RacePlace{"RealFiles", kRealFiles},
                    RacePlace{"RealFilesRenamesOnly", kRealFiles, false}),
    [](const testing::TestParamInfo<RacePlace>& place) { return place.param.name; });

TEST_P(ManifestRaceTest, OneOfTwoNodesPublishesAndBothAgree) {
  constexpr int kRounds = 100;
  for (int round = 0; round < kRounds; ++round) {
    SCOPED_TRACE(absl::StrCat("round ", round));
    ASSERT_NO_FATAL_FAILURE(Race(round % 2 == 1, [] {}));
    if (HasFailure()) {
      return;
    }
  }
}

// Both have seen that there is none, and are about to give theirs the name.
TEST_P(ManifestRaceTest, BothComeToTheLastCallBeforeEitherMakesIt) {
  FaultEnv* const faults = harness_->faults();
  if (faults == nullptr) {
    GTEST_SKIP() << "real files hold nobody up";
  }
  const std::string call = absl::StrCat(GetParam().place.hard_links ? "link " : "rename ",
                                        harness_->dir(), "/demo/900-a3/.MANIFEST.");
  for (const bool differ : {false, true}) {
    faults->StallMatching(call);
    ASSERT_NO_FATAL_FAILURE(Race(differ, [&] {
      EXPECT_TRUE(faults->WaitForStalled(2, std::chrono::seconds(60)));
      faults->ReleaseStalled(call);
    }));
  }
}

}  // namespace
}  // namespace holdfast
