// What `ckptctl drain` takes for safe: only what the node and the hosts of its jobs have said.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/mutex.h"
#include "ckptctl/commands.h"
#include "holdfast/v1/admin.pb.h"
#include "tests/ckptctl/console.h"

namespace holdfast {
namespace {

using testing::HasSubstr;

// A node that is being drained; what the test changes, the next look finds.
struct Cluster {
  Mutex mutex;  // gRPC's threads ask, one after the other
  bool draining = true;
  absl::Status there;                         // what the node answers
  std::vector<std::string> jobs = {"llama"};  // that have something there
  std::vector<v1::Leaving> counted;           // what llama's host says of it
  std::vector<std::string> not_shown;
  int looks = 0;
  bool older = false;  // it knows nothing of looks
  std::function<void(Cluster&)> at_look = [](Cluster&) {};

  FakeAdmin::Answers Answers() {
    FakeAdmin::Answers answers;
    answers.marks_errors = true;
    answers.drain = [this](const v1::DrainRequest& request, v1::DrainReply& reply) {
      const MutexLock lock(mutex);
      if (request.look()) {
        ++looks;
        at_look(*this);
        if (!there.ok()) {
          return there;
        }
      }
      reply.set_node("n3");
      if (older) {
        return absl::OkStatus();
      }
      reply.set_draining(draining || !request.look());
      for (const std::string& job : jobs) {
        v1::DrainReply::Job& added = *reply.add_jobs();
        added.set_name(job);
        added.set_uuid("uuid of " + job);
      }
      return absl::OkStatus();
    };
    answers.get_status = [this](const v1::GetStatusRequest&, v1::GetStatusReply& reply) {
      const MutexLock lock(mutex);
      v1::JobStatus& job = *reply.add_jobs();
      job.set_name("llama");
      job.set_uuid("uuid of llama");
      for (const v1::Leaving& each : counted) {
        *job.add_leaving() = each;
      }
      for (const std::string& each : not_shown) {
        reply.add_not_shown(each);
      }
      return absl::OkStatus();
    };
    return answers;
  }
};

v1::Leaving Of(const std::string& node, uint32_t shards) {
  v1::Leaving leaving;
  leaving.set_node(node);
  leaving.set_step(900);
  leaving.set_shards_left(shards);
  return leaving;
}

struct Drained {
  ExitCode code;
  std::string out;
};

Drained Drain(Cluster& cluster, Duration wait = Duration::zero()) {
  FakeAdmin admin(cluster.Answers());
  Console console(admin.socket());
  const ExitCode code = RunDrain(console.context(), {.node = "n3", .wait = wait});
  return {code, console.out() + console.err()};
}

TEST(Drain, ItIsSafeWhenTheHostSaysSo) {
  Cluster cluster;
  cluster.counted = {Of("n3", 0)};
  const Drained drained = Drain(cluster);
  EXPECT_EQ(drained.code, ExitCode::kOk);
  EXPECT_THAT(drained.out, HasSubstr("n3: no job's newest step"));
}

TEST(Drain, ItWaitsForWhatLiesThereAlone) {
  Cluster cluster;
  cluster.counted = {Of("n3", 3)};
  cluster.at_look = [](Cluster& c) {
    if (c.looks == 2) {
      c.counted = {Of("n3", 0)};
    }
  };
  EXPECT_EQ(Drain(cluster, std::chrono::minutes(1)).code, ExitCode::kOk);
  EXPECT_EQ(cluster.looks, 2);
}

TEST(Drain, WhatIsPinnedAndWhatIsNotKnownIsNotSafe) {
  Cluster cluster;
  cluster.counted = {Of("n3", 0)};
  cluster.counted[0].add_pinned(8);
  Drained drained = Drain(cluster);
  EXPECT_EQ(drained.code, ExitCode::kDamaged);
  EXPECT_THAT(drained.out, HasSubstr("pinned step 8 (some shards, or all) lies there alone"));
  cluster.counted = {Of("n3", 0)};
  cluster.counted[0].set_not_known("step 12 has copies there");
  drained = Drain(cluster);
  EXPECT_EQ(drained.code, ExitCode::kDamaged);
  EXPECT_THAT(drained.out, HasSubstr("job 'llama': step 12 has copies there"));
}

// The host has not heard of it yet, or has lost the node: it says nothing of it, which is no yes.
TEST(Drain, WhatNobodyHasCountedIsNotSafe) {
  Cluster cluster;
  cluster.counted = {Of("n4", 0)};
  const Drained drained = Drain(cluster);
  EXPECT_EQ(drained.code, ExitCode::kDamaged);
  EXPECT_THAT(drained.out, HasSubstr("job 'llama' has something there, and its host has not said"));
  EXPECT_THAT(drained.out, HasSubstr("not everything is safe without it yet"));
}

TEST(Drain, JobsThatHaveNothingThereNeedNoWord) {
  Cluster cluster;
  cluster.jobs = {};
  EXPECT_EQ(Drain(cluster).code, ExitCode::kOk);
}

TEST(Drain, NodesThatDoNotSayWhatTheyHostAreNamed) {
  Cluster cluster;
  cluster.counted = {Of("n3", 0)};
  cluster.not_shown = {"the jobs of n5 are not shown: it did not answer in time"};
  const Drained drained = Drain(cluster);
  EXPECT_EQ(drained.code, ExitCode::kDamaged);
  EXPECT_THAT(drained.out, HasSubstr("the jobs of n5 are not shown"));
}

TEST(Drain, ANodeThatWasStartedAnewIsNotWaitedFor) {
  Cluster cluster;
  cluster.counted = {Of("n3", 3)};
  cluster.at_look = [](Cluster& c) {
    if (c.looks == 2) {
      c.draining = false;
      c.counted = {};
    }
  };
  const Drained drained = Drain(cluster, std::chrono::minutes(1));
  EXPECT_EQ(drained.code, ExitCode::kDamaged);
  EXPECT_THAT(drained.out, HasSubstr("its ckptd was started anew"));
  EXPECT_THAT(drained.out, HasSubstr("`ckptctl drain n3` again"));
}

TEST(Drain, AnOlderDaemonIsNotTakenForSafe) {
  Cluster cluster;
  cluster.older = true;
  cluster.counted = {Of("n3", 0)};
  const Drained drained = Drain(cluster, std::chrono::minutes(1));
  EXPECT_EQ(drained.code, ExitCode::kDamaged);
  EXPECT_THAT(drained.out, HasSubstr("ckptd on n3 is of an older version"));
}

TEST(Drain, ANodeThatLeavesTheClusterTakesWhatIsThereWithIt) {
  Cluster cluster;
  cluster.there = absl::NotFoundError("drain: no node is called 'n3'");
  const Drained drained = Drain(cluster, std::chrono::minutes(1));
  EXPECT_EQ(drained.code, ExitCode::kDamaged);
  EXPECT_THAT(drained.out, HasSubstr("n3 is no node of the cluster any more"));
}

TEST(Drain, ANodeThatDoesNotAnswerIsAskedAgain) {
  Cluster cluster;
  cluster.counted = {Of("n3", 0)};
  cluster.there = absl::UnavailableError("n3 cannot be reached");
  cluster.at_look = [](Cluster& c) {
    if (c.looks == 2) {
      c.there = absl::OkStatus();
    }
  };
  EXPECT_EQ(Drain(cluster, std::chrono::minutes(1)).code, ExitCode::kOk);
  EXPECT_EQ(cluster.looks, 2);
  cluster.there = absl::UnavailableError("n3 cannot be reached");
  const Drained drained = Drain(cluster);
  EXPECT_EQ(drained.code, ExitCode::kDamaged);
  EXPECT_THAT(drained.out, HasSubstr("what is on n3 is not known: n3 cannot be reached"));
}

}  // namespace
}  // namespace holdfast
