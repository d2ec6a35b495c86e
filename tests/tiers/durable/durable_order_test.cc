// The order of changes, call by call, as docs/formats.md has it. What FaultEnv's power loss cannot
// tell apart (two changes of one directory, synced once or twice) is told apart here.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_replace.h"
#include "base/status.h"
#include "tests/tiers/durable/durable_harness.h"

namespace holdfast {
namespace {

using ::testing::ElementsAre;

class DurableOrderTest : public testing::Test {
 protected:
  void Start(DurableKind kind) {
    harness_ = std::make_unique<DurableHarness>(DurablePlace{.kind = kind, .direct = true});
    ASSERT_TRUE(harness_->Start().ok());
  }
  CopyStore& store() { return harness_->store(); }
  FaultEnv& env() { return *harness_->faults(); }

  // The calls that change something, with short names: unique parts are "U".
  std::vector<std::string> Changes() {
    std::vector<std::string> changes;
    for (std::string call : env().TakeCalls()) {
      if (call.starts_with("stat") || call.starts_with("list") || call.starts_with("read") ||
          call.starts_with("open") || call.starts_with("lease")) {
        continue;
      }
      call = absl::StrReplaceAll(call, {{harness_->dir() + "/.holdfast/nodes/node-1", "HOME"},
                                        {harness_->dir() + "/.holdfast", "HOME"},
                                        {harness_->dir() + "/demo/1-a3", "STEP"},
                                        {harness_->dir() + "/demo", "JOB"},
                                        {"sync directory", "syncdir"}});
      size_t run = 0;
      for (size_t at = 0; at < call.size(); ++at) {
        run = std::string_view("0123456789abcdef").find(call[at]) == std::string_view::npos
                  ? 0
                  : run + 1;
        if (run == 32) {
          call.replace(at - 31, 32, "U");
          at -= 31;
          run = 0;
        }
      }
      changes.push_back(call);
    }
    return changes;
  }

  std::unique_ptr<DurableHarness> harness_;
};

TEST_F(DurableOrderTest, Publication) {
  Start(DurableKind::kNvme);
  ASSERT_TRUE(PublishShard(store(), SampleShard(2, 0, 2)).ok());
  env().RecordCalls();
  ASSERT_TRUE(PublishShard(store(), SampleShard(1, 0, 2)).ok());
  EXPECT_THAT(
      Changes(),
      ElementsAre("create HOME/intents/.U.intent.U.tmp", "write HOME/intents/.U.intent.U.tmp",
                  "fsync HOME/intents/.U.intent.U.tmp",
                  "rename HOME/intents/.U.intent.U.tmp HOME/intents/U.intent",
                  "syncdir HOME/intents",  // the intent, before anything that it names
                  "create directory STEP", "syncdir JOB", "create STEP/.0.safetensors.U.tmp",
                  "allocate STEP/.0.safetensors.U.tmp", "write STEP/.0.safetensors.U.tmp",
                  "truncate STEP/.0.safetensors.U.tmp", "set mode STEP/.0.safetensors.U.tmp",
                  "fdatasync STEP/.0.safetensors.U.tmp", "create STEP/.0.record.U.tmp",
                  "write STEP/.0.record.U.tmp", "set mode STEP/.0.record.U.tmp",
                  "fsync STEP/.0.record.U.tmp",
                  "rename STEP/.0.safetensors.U.tmp STEP/0.safetensors", "syncdir STEP",
                  "rename STEP/.0.record.U.tmp STEP/0.record", "syncdir STEP",
                  "unlink HOME/intents/U.intent"));
}

TEST_F(DurableOrderTest, RemovalIntoThePoolAndOutOfIt) {
  Start(DurableKind::kNvme);
  ASSERT_TRUE(PublishShard(store(), SampleShard(1, 0, 2)).ok());
  env().RecordCalls();
  ASSERT_TRUE(store().RemoveCopy(NameOf(SampleShard(1, 0, 2))).ok());
  EXPECT_THAT(
      Changes(),
      ElementsAre("create HOME/intents/.U.intent.U.tmp", "write HOME/intents/.U.intent.U.tmp",
                  "fsync HOME/intents/.U.intent.U.tmp",
                  "rename HOME/intents/.U.intent.U.tmp HOME/intents/U.intent",
                  "syncdir HOME/intents", "unlink STEP/0.record",
                  "syncdir STEP",  // no record comes back; then its bytes may go
                  "rename STEP/0.safetensors HOME/pool/U", "syncdir HOME/pool", "syncdir STEP",
                  "remove directory STEP", "syncdir JOB", "unlink HOME/intents/U.intent"));
  env().RecordCalls();
  ASSERT_TRUE(PublishShard(store(), SampleShard(1, 0, 2)).ok());
  std::vector<std::string> taken = Changes();
  taken.erase(taken.begin(), taken.begin() + 7);
  taken.resize(5);
  EXPECT_THAT(
      taken, ElementsAre("rename HOME/pool/U STEP/.0.safetensors.U.tmp", "syncdir HOME/pool",
                         "set mode STEP/.0.safetensors.U.tmp", "allocate STEP/.0.safetensors.U.tmp",
                         "write STEP/.0.safetensors.U.tmp"));
}

TEST_F(DurableOrderTest, TakingBackAPublicationWhoseLastSyncFailed) {
  Start(DurableKind::kNvme);
  ASSERT_TRUE(PublishShard(store(), SampleShard(2, 0, 2)).ok());
  auto writing = store().Begin(NewCopyOfShard(SampleShard(1, 0, 2)));
  ASSERT_TRUE(writing.ok());
  ASSERT_TRUE(WriteShard(**writing, SampleShard(1, 0, 2)).ok());
  // Between the record's rename and its sync there is nothing else: find that call, and fail it.
  env().RecordCalls();
  int until_failure = 0;
  {
    DurableHarness probe({.kind = DurableKind::kNvme, .direct = true});
    ASSERT_TRUE(probe.Start().ok());
    auto same = probe.store().Begin(NewCopyOfShard(SampleShard(1, 0, 2)));
    ASSERT_TRUE(WriteShard(**same, SampleShard(1, 0, 2)).ok());
    probe.faults()->RecordCalls();
    ASSERT_TRUE((*same)->Publish(SampleShard(1, 0, 2).record_file).ok());
    const std::vector<std::string> calls = probe.faults()->TakeCalls();
    for (size_t i = 0; i < calls.size(); ++i) {
      until_failure =
          calls[i].starts_with("sync directory") ? static_cast<int>(i) + 1 : until_failure;
    }
  }
  env().FailCall(until_failure, EIO);
  ASSERT_FALSE((*writing)->Publish(SampleShard(1, 0, 2).record_file).ok());
  std::vector<std::string> undone = Changes();
  const auto failed =
      std::find(undone.begin(), undone.end(), "rename STEP/.0.record.U.tmp STEP/0.record");
  ASSERT_NE(failed, undone.end());
  undone.erase(undone.begin(), failed + 1);
  EXPECT_THAT(
      undone,
      ElementsAre("syncdir STEP",  // that fails
                  "rename STEP/0.record STEP/.0.record.U.tmp", "syncdir STEP",
                  "rename STEP/0.safetensors STEP/.0.safetensors.U.tmp", "syncdir STEP",
                  "unlink STEP/.0.record.U.tmp", "unlink STEP/.0.safetensors.U.tmp", "syncdir STEP",
                  "remove directory STEP", "syncdir JOB", "unlink HOME/intents/U.intent"));
}

TEST_F(DurableOrderTest, ACommitAndTheRemovalOfACommittedStep) {
  Start(DurableKind::kRemote);
  std::vector<SampleImage> samples = {SampleShard(1, 0, 1)};
  const PublishedCopy copy = PublishShard(store(), samples[0]).value();
  env().RecordCalls();
  ASSERT_TRUE(store().PublishManifest(ManifestOf(samples, {copy})).ok());
  std::vector<std::string> commit = Changes();
  commit.erase(commit.begin(), commit.begin() + 5);  // the intent
  EXPECT_THAT(commit,
              ElementsAre("create STEP/.MANIFEST.U.tmp", "write STEP/.MANIFEST.U.tmp",
                          "set mode STEP/.MANIFEST.U.tmp", "fsync STEP/.MANIFEST.U.tmp",
                          "link STEP/.MANIFEST.U.tmp STEP/MANIFEST", "unlink STEP/.MANIFEST.U.tmp",
                          "syncdir STEP", "create STEP/.manifest.json.U.tmp",
                          "write STEP/.manifest.json.U.tmp", "set mode STEP/.manifest.json.U.tmp",
                          "fsync STEP/.manifest.json.U.tmp",
                          "rename STEP/.manifest.json.U.tmp STEP/manifest.json",
                          "unlink STEP/.MANIFEST.U.tmp", "unlink STEP/.manifest.json.U.tmp",
                          "syncdir STEP", "unlink STEP/writing", "syncdir STEP",
                          "remove directory STEP",  // which is not empty
                          "unlink HOME/intents/U.intent"));
  env().RecordCalls();
  ASSERT_TRUE(store().RemoveCheckpoint(CheckpointOf(samples[0])).ok());
  std::vector<std::string> removal = Changes();
  removal.erase(removal.begin(), removal.begin() + 5);
  removal.resize(9);
  EXPECT_THAT(removal, ElementsAre("unlink STEP/MANIFEST", "syncdir STEP",
                                   "unlink STEP/shard-00000-of-00001.record", "syncdir STEP",
                                   "unlink STEP/shard-00000-of-00001.safetensors",
                                   "unlink STEP/manifest.json", "syncdir STEP",
                                   "remove directory STEP", "syncdir JOB"));
}

TEST_F(DurableOrderTest, TheMarkOfAStepIsThereBeforeItsFirstShardAndGoesWithTheLast) {
  Start(DurableKind::kRemote);
  ASSERT_TRUE(PublishShard(store(), SampleShard(2, 0, 2)).ok());
  env().RecordCalls();
  ASSERT_TRUE(PublishShard(store(), SampleShard(1, 0, 2)).ok());
  std::vector<std::string> publication = Changes();
  publication.erase(publication.begin(), publication.begin() + 5);  // the intent
  const auto image = std::find(publication.begin(), publication.end(),
                               "rename STEP/.shard-00000-of-00002.safetensors.U.tmp "
                               "STEP/shard-00000-of-00002.safetensors");
  ASSERT_GT(image - publication.begin(), 6);
  EXPECT_EQ(*std::prev(image), "syncdir STEP") << "a sweep tells by the record whose image it is";
  EXPECT_EQ(*std::prev(image, 2), "fsync STEP/.shard-00000-of-00002.record.U.tmp");
  publication.resize(6);
  EXPECT_THAT(publication,
              ElementsAre("create directory STEP", "syncdir JOB", "create STEP/writing",
                          "set mode STEP/writing", "syncdir STEP",
                          "create STEP/.shard-00000-of-00002.safetensors.U.tmp"));
  env().RecordCalls();
  ASSERT_TRUE(store().RemoveCopy(NameOf(SampleShard(1, 0, 2))).ok());
  std::vector<std::string> removal = Changes();
  removal.erase(removal.begin(), removal.begin() + 5);
  EXPECT_THAT(removal, ElementsAre("unlink STEP/shard-00000-of-00002.record", "syncdir STEP",
                                   "unlink STEP/shard-00000-of-00002.safetensors", "syncdir STEP",
                                   "unlink STEP/writing", "remove directory STEP", "syncdir JOB",
                                   "unlink HOME/intents/U.intent"));
}

}  // namespace
}  // namespace holdfast
