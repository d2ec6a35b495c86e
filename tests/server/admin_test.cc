// What ckptctl asks, and who may ask.
#include "tests/server/core_harness.h"

namespace holdfast::testing {
namespace {

struct TwoJobs {
  CoreHarness h;
  TestClient a = h.Connect(100, 1000);
  TestClient b = h.Connect(101, 2000);
  TwoJobs() {
    EXPECT_TRUE(a.Join("mine", 0, 1));
    EXPECT_TRUE(b.Join("theirs", 0, 1));
    EXPECT_TRUE(a.Save(1));
    EXPECT_TRUE(a.Save(2));
    EXPECT_TRUE(b.Save(1));
  }
  template <typename Request>
  static Request Of(const std::string& job) {
    Request request;
    request.set_job(job);
    return request;
  }
};

TEST(AdminRequests, ACallerSeesItsOwnJobsRootAndTheDaemonsUserAll) {
  TwoJobs t;
  EXPECT_EQ(t.h.Admin<v1::GetStatusReply>(v1::GetStatusRequest(), 1000)->jobs_size(), 1);
  EXPECT_EQ(t.h.Admin<v1::GetStatusReply>(v1::GetStatusRequest(), 1000)->jobs(0).name(), "mine");
  EXPECT_EQ(t.h.Admin<v1::GetStatusReply>(v1::GetStatusRequest(), 0)->jobs_size(), 2);
  EXPECT_EQ(t.h.Admin<v1::GetStatusReply>(v1::GetStatusRequest(), 3000)->jobs_size(), 0);
  EXPECT_FALSE(
      t.h.Admin<v1::GetStatusReply>(TwoJobs::Of<v1::GetStatusRequest>("theirs"), 1000).ok());
  EXPECT_FALSE(
      t.h.Admin<v1::ListCheckpointsReply>(TwoJobs::Of<v1::ListCheckpointsRequest>("theirs"), 1000)
          .ok());
  EXPECT_FALSE(
      t.h.Admin<ReadableShards>(TwoJobs::Of<v1::InspectShardRequest>("theirs"), 1000).ok());
  EXPECT_FALSE(t.h.Admin<ListedShards>(TwoJobs::Of<v1::VerifyRequest>("theirs"), 1000).ok());
  EXPECT_FALSE(
      t.h.Admin<v1::SetRestorePointReply>(TwoJobs::Of<v1::SetRestorePointRequest>("theirs"), 1000)
          .ok());
  EXPECT_FALSE(
      t.h.Admin<v1::RemoveJobReply>(TwoJobs::Of<v1::RemoveJobRequest>("theirs"), 1000).ok());
  // What is refused looks the same whether the job exists or not.
  EXPECT_EQ(
      t.h.Admin<v1::ListCheckpointsReply>(TwoJobs::Of<v1::ListCheckpointsRequest>("theirs"), 1000)
          .status()
          .code(),
      t.h.Admin<v1::ListCheckpointsReply>(TwoJobs::Of<v1::ListCheckpointsRequest>("nobodys"), 1000)
          .status()
          .code());
}

TEST(AdminRequests, StatusTellsPhaseProtectionAndMemory) {
  TwoJobs t;
  const v1::JobStatus status = t.h.Status("mine");
  EXPECT_EQ(status.phase(), v1::JobStatus::ATTEMPT_PHASE_RUNNING);
  EXPECT_EQ(status.ranks_alive(), 1u);
  EXPECT_EQ(status.bytes_held(), 2 * kSlot);
  ASSERT_EQ(status.protection_size(), 5);
  EXPECT_TRUE(status.protection(0).any());
  EXPECT_EQ(status.protection(0).step(), 2u);
  EXPECT_EQ(status.protection(0).from(), "memory");
  EXPECT_EQ(status.protection(1).kind(), v1::Protection::FAILURE_KIND_REBOOT);
  EXPECT_FALSE(status.protection(1).any());
  EXPECT_FALSE(status.protection(4).any());
  EXPECT_GT(status.events_size(), 0);
  const v1::DaemonStatus daemon = t.h.Daemon();
  EXPECT_EQ(daemon.memory_bytes_used(), 3 * kSlot);
  EXPECT_EQ(daemon.slots(), 3u);
  EXPECT_EQ(daemon.connections(), 2u);
  t.h.Kill(t.a);
  EXPECT_EQ(t.h.Status("mine").phase(), v1::JobStatus::ATTEMPT_PHASE_ENDED);
  TestClient next = t.h.Connect(300);
  ASSERT_TRUE(next.Join("mine", 0, 1));
  EXPECT_EQ(t.h.Status("mine").phase(), v1::JobStatus::ATTEMPT_PHASE_GATHERING);
  next.Call(TestClient::EnterFrame());
  EXPECT_EQ(t.h.Status("mine").phase(), v1::JobStatus::ATTEMPT_PHASE_RESTORING);
}

TEST(AdminRequests, EventsAndLossesAreBounded) {
  CoreHarness h;
  TestClient a = h.Connect(100);
  ASSERT_TRUE(a.Join("job", 0, 1));
  for (Step step = 1; step < 600; ++step) {
    ASSERT_TRUE(a.Begin(step));  // and gives it up by beginning the next one
    v1::ClientFrame abort;
    abort.mutable_abort_save()->set_slot(a.grant().slot());
    abort.mutable_abort_save()->set_generation(a.grant().generation());
    abort.mutable_abort_save()->set_step(step);
    a.Call(abort);
  }
  EXPECT_EQ(h.Status("job").events_size(), 64);
  EXPECT_EQ(h.Status("job").losses_size(), 32);
  const auto overview = h.Admin<v1::GetStatusReply>(v1::GetStatusRequest(), 0);
  ASSERT_TRUE(overview.ok());
  EXPECT_EQ(overview->jobs(0).events_size(), 8);
  EXPECT_EQ(overview->jobs(0).losses_size(), 4);
  EXPECT_EQ(overview->jobs(0).losses(0).step(), 599u) << "the newest";
}

HoldShard Hold(const std::string& job, const ReadableShard& shard) {
  return {job, shard.copy.id, shard.copy.generation};
}

TEST(AdminRequests, VerifyListsShardsAndHoldsTheOneItReads) {
  TwoJobs t;
  v1::VerifyRequest verify = TwoJobs::Of<v1::VerifyRequest>("mine");
  verify.set_all_steps(true);
  const auto listed = t.h.Admin<ListedShards>(verify);
  ASSERT_TRUE(listed.ok());
  ASSERT_EQ(listed->shards.size(), 2u);
  // Another user's, another job's, another filling's: as if it were not there.
  EXPECT_FALSE(t.h.Admin<ReadableShards>(Hold("mine", listed->shards[0]), 2000).ok());
  EXPECT_FALSE(t.h.Admin<ReadableShards>(Hold("theirs", listed->shards[0]), 0).ok());
  HoldShard another = Hold("mine", listed->shards[0]);
  ++another.generation;
  EXPECT_FALSE(t.h.Admin<ReadableShards>(another).ok());
  const auto held = t.h.Admin<ReadableShards>(Hold("mine", listed->shards[0]));
  ASSERT_TRUE(held.ok()) << held.status();
  ASSERT_EQ(held->shards.size(), 1u);
  EXPECT_EQ(held->shards[0].slot, listed->shards[0].slot);
  const AdminToken token = t.h.last_token;
  for (Step step = 3; step < 9; ++step) {
    ASSERT_TRUE(t.a.Save(step));
    EXPECT_NE(t.a.grant().slot(), held->shards[0].slot);
  }
  // The other one made room.
  EXPECT_EQ(t.h.Admin<ReadableShards>(Hold("mine", listed->shards[1])).status().code(),
            absl::StatusCode::kNotFound);
  t.h.Feed(AdminReadDone{token});
  t.h.Feed(AdminReadDone{token});
  std::set<SlotId> used;
  for (Step step = 9; step < 16; ++step) {
    ASSERT_TRUE(t.a.Save(step));
    used.insert(t.a.grant().slot());
  }
  EXPECT_EQ(used.count(held->shards[0].slot), 1u) << "let go of, it is used again";
  v1::InspectShardRequest inspect = TwoJobs::Of<v1::InspectShardRequest>("mine");
  inspect.set_newest(true);
  EXPECT_EQ(t.h.Admin<ReadableShards>(inspect)->shards[0].copy.id.step, 15u);
  t.h.Feed(AdminReadDone{t.h.last_token});
  inspect.set_rank(4);
  EXPECT_FALSE(t.h.Admin<ReadableShards>(inspect).ok());
  inspect.set_rank(0);
  inspect.set_newest(false);
  inspect.set_step(1);
  EXPECT_EQ(t.h.Admin<ReadableShards>(inspect).status().code(), absl::StatusCode::kNotFound);
}

TEST(AdminRequests, SavesGoOnWhileAllIsVerifiedAndARefusalNamesWhoReads) {
  CoreHarness h;
  h.config.mutable_memory()->set_slots_per_rank(3);
  h.bytes_max = 3 * kSlot;
  h.Restart();
  TestClient a = h.Connect(100, 1000);
  ASSERT_TRUE(a.Join("job", 0, 1));
  ASSERT_TRUE(a.Save(1));
  ASSERT_TRUE(a.Save(2));
  Step step = 2;
  for (int run = 0; run < 3; ++run) {
    v1::VerifyRequest verify = TwoJobs::Of<v1::VerifyRequest>("job");
    verify.set_all_steps(true);
    const auto listed = h.Admin<ListedShards>(verify);
    ASSERT_TRUE(listed.ok());
    for (const ReadableShard& shard : listed->shards) {
      const bool held = h.Admin<ReadableShards>(Hold("job", shard)).ok();
      const AdminToken token = h.last_token;
      for (int i = 0; i < 3; ++i) {
        EXPECT_TRUE(a.Save(++step)) << "step " << step;
      }
      if (held) {
        h.Feed(AdminReadDone{token});
      }
    }
  }
  // Held at once, all of it: then there is no room, and the answer says why.
  TestClient reader = h.Connect(200);
  v1::ClientFrame attach;
  attach.mutable_attach()->set_job("job");
  ASSERT_TRUE(reader.Call(attach).has_attach());
  v1::VerifyRequest verify = TwoJobs::Of<v1::VerifyRequest>("job");
  verify.set_all_steps(true);
  do {
    const auto listed = h.Admin<ListedShards>(verify);
    ASSERT_TRUE(listed.ok());
    for (const ReadableShard& shard : listed->shards) {
      EXPECT_TRUE(h.Admin<ReadableShards>(Hold("job", shard)).ok());
    }
  } while (a.Save(++step));
  const std::string refused = a.Call(TestClient::BeginFrame(++step)).failure().message();
  EXPECT_NE(refused.find("being read by a verification or another node, pid 200"),
            std::string::npos)
      << refused;
}

TEST(AdminRequests, ARestorePointMustBeThere) {
  TwoJobs t;
  v1::SetRestorePointRequest request = TwoJobs::Of<v1::SetRestorePointRequest>("mine");
  request.set_step(7);
  const auto missing = t.h.Admin<v1::SetRestorePointReply>(request);
  EXPECT_EQ(missing.status().code(), absl::StatusCode::kNotFound);
  EXPECT_NE(std::string(missing.status().message()).find("2, 1"), std::string::npos);
  request.set_step(1);
  EXPECT_TRUE(t.h.Admin<v1::SetRestorePointReply>(request).ok());
  EXPECT_EQ(t.h.states.begin()->second.name() == "mine"
                ? t.h.states.begin()->second.restore_point().step()
                : t.h.states.rbegin()->second.restore_point().step(),
            1u);
  request.set_clear(true);
  EXPECT_TRUE(t.h.Admin<v1::SetRestorePointReply>(request).ok());
  EXPECT_EQ(t.h.Status("mine").restore_point(), "");
  request.set_from_scratch(true);
  EXPECT_FALSE(t.h.Admin<v1::SetRestorePointReply>(request).ok());
}

TEST(AdminRequests, ARestorePointThatCannotBeWrittenIsAnsweredInTime) {
  TwoJobs t;
  t.h.fail = [](const Action& x) {
    return std::holds_alternative<WriteJobState>(x) ? absl::ResourceExhaustedError("full")
                                                    : absl::OkStatus();
  };
  v1::SetRestorePointRequest request = TwoJobs::Of<v1::SetRestorePointRequest>("mine");
  request.set_step(1);
  EXPECT_FALSE(t.h.Admin<v1::SetRestorePointReply>(request).ok());
  EXPECT_TRUE(t.h.admin_replies.empty());
  t.h.Advance(std::chrono::seconds(31));
  ASSERT_EQ(t.h.admin_replies.size(), 1u);
  EXPECT_EQ(t.h.admin_replies.begin()->second.status.code(), absl::StatusCode::kUnavailable);
}

TEST(AdminRequests, WhatWasPinnedIsAnsweredThoughANewAttemptBegan) {
  TwoJobs t;
  t.h.delay = [](const Action& x) { return std::holds_alternative<WriteJobState>(x); };
  v1::PinRequest pin = TwoJobs::Of<v1::PinRequest>("mine");
  pin.set_step(1);
  EXPECT_FALSE(t.h.Admin<v1::PinReply>(pin).ok());
  ASSERT_TRUE(t.h.admin_replies.empty()) << "it is not durable yet";
  TestClient next = t.h.Connect(900);
  next.Send(TestClient::JoinFrame("mine", 0, 1, 0, "another launch"));
  t.h.delay = nullptr;
  t.h.PerformDelayed();
  ASSERT_EQ(t.h.admin_replies.size(), 1u);
  const AdminReply& reply = t.h.admin_replies.begin()->second;
  EXPECT_TRUE(reply.status.ok()) << reply.status;
  EXPECT_TRUE(std::holds_alternative<v1::PinReply>(reply.reply));
}

TEST(AdminRequests, RemovingAJobFreesEverythingItHad) {
  TwoJobs t;
  const auto in_use = t.h.Admin<v1::RemoveJobReply>(TwoJobs::Of<v1::RemoveJobRequest>("mine"));
  EXPECT_EQ(in_use.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(std::string(in_use.status().message()).find("pid 100"), std::string::npos);
  t.h.Kill(t.a);
  const auto removed = t.h.Admin<v1::RemoveJobReply>(TwoJobs::Of<v1::RemoveJobRequest>("mine"));
  ASSERT_TRUE(removed.ok()) << removed.status();
  EXPECT_EQ(removed->bytes_freed(), 2 * kSlot);
  EXPECT_EQ(t.h.files.size(), 1u);
  EXPECT_EQ(t.h.states.size(), 1u);
  EXPECT_EQ(t.h.Daemon().memory_bytes_used(), kSlot);
  TestClient other = t.h.Connect(400, 3000);
  ASSERT_TRUE(other.Join("mine", 0, 1)) << "the name is free";
}

TEST(AdminRequests, AJobThatIsReadIsNotRemoved) {
  TwoJobs t;
  TestClient reader = t.h.Connect(200);
  v1::ClientFrame attach;
  attach.mutable_attach()->set_job("mine");
  const v1::Source source = reader.Call(attach).attach();
  t.h.Kill(t.a);
  EXPECT_FALSE(t.h.Admin<v1::RemoveJobReply>(TwoJobs::Of<v1::RemoveJobRequest>("mine")).ok());
  reader.Release(source);
  EXPECT_TRUE(t.h.Admin<v1::RemoveJobReply>(TwoJobs::Of<v1::RemoveJobRequest>("mine")).ok());
}

TEST(AdminRequests, ARemovalThatFailsSaysSoAndCanBeRepeated) {
  TwoJobs t;
  t.h.Kill(t.a);
  t.h.fail = [](const Action& x) {
    return std::holds_alternative<RemoveJobState>(x) ? absl::DataLossError("EIO")
                                                     : absl::OkStatus();
  };
  EXPECT_EQ(
      t.h.Admin<v1::RemoveJobReply>(TwoJobs::Of<v1::RemoveJobRequest>("mine")).status().code(),
      absl::StatusCode::kDataLoss);
  t.h.fail = nullptr;
  EXPECT_TRUE(t.h.Admin<v1::RemoveJobReply>(TwoJobs::Of<v1::RemoveJobRequest>("mine")).ok());
}

TEST(AdminRequests, DeletingIsRepeatedWhenItFails) {
  TwoJobs t;
  t.h.Kill(t.a);
  t.h.fail = [](const Action& x) {
    return std::holds_alternative<DeleteSlot>(x) ? absl::UnavailableError("EINTR")
                                                 : absl::OkStatus();
  };
  const auto removed = t.h.Admin<v1::RemoveJobReply>(TwoJobs::Of<v1::RemoveJobRequest>("mine"));
  EXPECT_FALSE(removed.ok());
  EXPECT_EQ(t.h.Daemon().memory_bytes_used(), 3 * kSlot) << "memory counts until it is back";
  t.h.fail = nullptr;
  t.h.Advance(std::chrono::seconds(11));
  EXPECT_EQ(t.h.Daemon().memory_bytes_used(), kSlot);
  EXPECT_EQ(t.h.states.size(), 1u);
}

}  // namespace
}  // namespace holdfast::testing
