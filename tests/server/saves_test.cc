// Saves (docs/protocol.md §4).
#include "tests/server/core_harness.h"

namespace holdfast::testing {
namespace {

using v1::Failure;

struct TwoRanks {
  CoreHarness h;
  TestClient a = h.Connect(100);
  TestClient b = h.Connect(101);
  TwoRanks() {
    EXPECT_TRUE(a.Join("job", 0, 2));
    EXPECT_TRUE(b.Join("job", 1, 2));
  }
};

TEST(Saves, AStepIsCommittedWhenEveryRankHasSealedIt) {
  TwoRanks t;
  ASSERT_TRUE(t.a.Save(1));
  EXPECT_FALSE(t.a.Committed(1));
  EXPECT_EQ(t.a.Call(TestClient::AwaitFrame(1, v1::AwaitSave::STAGE_SEALED)).await_save().stage(),
            v1::AwaitSave::STAGE_SEALED);
  const uint64_t waiting =
      t.a.Send(TestClient::AwaitFrame(1, v1::AwaitSave::STAGE_COMMITTED, 5000));
  EXPECT_FALSE(t.a.Take(waiting));
  ASSERT_TRUE(t.b.Save(1));
  EXPECT_EQ(t.a.Take(waiting)->frame.await_save().stage(), v1::AwaitSave::STAGE_COMMITTED);
  EXPECT_EQ(t.h.Committed("job"), std::vector<std::string>{"1:1"});
  EXPECT_EQ(t.h.Status("job").protection(0).step(), 1u);
  EXPECT_FALSE(t.h.Status("job").protection(1).any());
}

TEST(Saves, TheDescriptorComesAfterTheNoteThatNamesTheWriter) {
  TwoRanks t;
  t.h.delay = [](const Action& action) { return std::holds_alternative<WriteNote>(action); };
  const uint64_t id = t.a.Send(TestClient::BeginFrame(1));
  EXPECT_FALSE(t.a.Take(id));
  t.h.PerformDelayed();
  const auto answer = t.a.Take(id);
  ASSERT_TRUE(answer);
  EXPECT_EQ(answer->descriptors, Descriptors::kWritableImage);
  EXPECT_TRUE(answer->frame.begin_save().with_descriptor());
  const v1::SlotNote& note = t.h.files.at(answer->slot).note;
  EXPECT_EQ(note.writer().pid(), 100);
  EXPECT_EQ(note.generation(), answer->frame.begin_save().generation());
}

TEST(Saves, AStepThatAnotherRankHasGoneBeyondIsRefusedAtOnce) {
  TwoRanks t;
  ASSERT_TRUE(t.b.Save(10));
  const v1::DaemonFrame refused = t.a.Call(TestClient::BeginFrame(5, kSlot, 5000));
  EXPECT_EQ(refused.failure().reason(), Failure::REASON_ABANDONED) << refused.DebugString();
  EXPECT_NE(refused.failure().message().find("rank 1 went on to step 10"), std::string::npos)
      << refused.failure().message();
  ASSERT_TRUE(t.a.Save(10));
  EXPECT_TRUE(t.a.Committed(10));
}

// Whether the word that it may begin has come, or not yet.
TEST(Saves, ASaveWhoseStepIsGivenUpMeanwhileWaitsNoLonger) {
  TwoRanks t;
  t.h.delay = [](const Action& action) { return std::holds_alternative<WriteJobState>(action); };
  const uint64_t first = t.a.Send(TestClient::BeginFrame(1, kSlot, 5000));
  EXPECT_FALSE(t.a.Take(first));
  const uint64_t other = t.b.Send(TestClient::BeginFrame(3, kSlot, 5000));
  const auto over = t.a.Take(first);
  ASSERT_TRUE(over);
  EXPECT_EQ(over->frame.failure().reason(), Failure::REASON_ABANDONED)
      << over->frame.ShortDebugString();
  t.h.PerformDelayed();
  EXPECT_TRUE(t.b.Take(other)->frame.has_begin_save());
  EXPECT_FALSE(t.a.Take(first)) << "it is answered once";
}

TEST(Saves, AStartFromScratchIsDurableBeforeTheFirstGrant) {
  TwoRanks t;
  t.h.delay = [](const Action& action) { return std::holds_alternative<WriteJobState>(action); };
  const uint64_t id = t.a.Send(TestClient::BeginFrame(1));
  EXPECT_FALSE(t.a.Take(id));
  t.h.PerformDelayed();
  EXPECT_TRUE(t.a.Take(id)->frame.has_begin_save());
  EXPECT_TRUE(t.h.states.begin()->second.attempts(0).decided());
}

TEST(Saves, AMappingIsKeptFromFillingToFilling) {
  CoreHarness h;
  TestClient a = h.Connect(100);
  ASSERT_TRUE(a.Join("job", 0, 1));
  std::map<uint32_t, uint64_t> generations;
  size_t descriptors = 0;
  for (Step step = 1; step <= 10; ++step) {
    ASSERT_TRUE(a.Save(step));
    descriptors += a.grant().with_descriptor() ? 1 : 0;
    EXPECT_EQ(a.grant().generation(), generations[a.grant().slot()] + 1);
    generations[a.grant().slot()] = a.grant().generation();
    EXPECT_EQ(a.grant().descent(0).attempt(), 1u);
  }
  EXPECT_EQ(descriptors, generations.size());
  EXPECT_LE(generations.size(), 3u);
}

TEST(Saves, StepsMustGrow) {
  TwoRanks t;
  ASSERT_TRUE(t.a.Save(5));
  for (const Step step : {5, 4, 0}) {
    const v1::DaemonFrame refused = t.a.Call(TestClient::BeginFrame(step));
    EXPECT_EQ(refused.failure().code(), static_cast<int>(absl::StatusCode::kInvalidArgument));
    EXPECT_NE(refused.failure().message().find("5"), std::string::npos);
  }
  EXPECT_TRUE(t.b.Save(5));
  EXPECT_TRUE(t.b.Committed(5));
}

// The disk under the job's state may hang: a running job's loop does not notice.
TEST(Saves, ARunningJobNeverWaitsForItsState) {
  CoreHarness h;
  TestClient a = h.Connect(100);
  ASSERT_TRUE(a.Join("job", 0, 1));
  ASSERT_TRUE(a.Begin(1));
  h.delay = [](const Action& x) { return std::holds_alternative<WriteJobState>(x); };
  ASSERT_TRUE(a.Seal(1));  // the first commit is to be written at once, and is not
  for (Step step = 2; step <= 5; ++step) {
    ASSERT_TRUE(a.Save(step));
    EXPECT_TRUE(a.Committed(step));
  }
  v1::SetRestorePointRequest request;
  request.set_job("job");
  request.set_step(4);
  EXPECT_FALSE(h.Admin<v1::SetRestorePointReply>(request).ok());  // waits for its own write
  ASSERT_TRUE(a.Save(6));
  EXPECT_FALSE(h.delayed.empty());
  h.PerformDelayed();
}

TEST(Saves, ASkippedStepIsAbandonedForAll) {
  TwoRanks t;
  ASSERT_TRUE(t.a.Save(1));
  const uint64_t waiting =
      t.a.Send(TestClient::AwaitFrame(1, v1::AwaitSave::STAGE_COMMITTED, 5000));
  ASSERT_TRUE(t.b.Save(2));
  EXPECT_EQ(t.a.Take(waiting)->frame.failure().reason(), Failure::REASON_ABANDONED);
  ASSERT_TRUE(t.a.Save(2));
  EXPECT_TRUE(t.a.Committed(2));
  EXPECT_EQ(t.h.Status("job").losses(0).step(), 1u);
}

TEST(Saves, AnAbortedStepIsAbandonedForAll) {
  TwoRanks t;
  ASSERT_TRUE(t.a.Begin(1));
  ASSERT_TRUE(t.b.Save(1));
  v1::ClientFrame abort;
  abort.mutable_abort_save()->set_step(1);
  abort.mutable_abort_save()->set_slot(t.a.grant().slot());
  abort.mutable_abort_save()->set_generation(t.a.grant().generation());
  abort.mutable_abort_save()->set_why("out of patience");
  EXPECT_FALSE(t.a.Call(abort).has_failure());
  EXPECT_EQ(t.b.Reason(TestClient::AwaitFrame(1, v1::AwaitSave::STAGE_COMMITTED, 100)),
            Failure::REASON_ABANDONED);
  EXPECT_EQ(t.a.Reason(TestClient::SealFrame(1, t.a.grant())), Failure::REASON_ABANDONED);
  for (const auto& [id, file] : t.h.files) {
    EXPECT_FALSE(file.record) << "a shard of an abandoned step stayed";
  }
}

TEST(Saves, SealingIsIdempotentAndKnowsItsGeneration) {
  TwoRanks t;
  ASSERT_TRUE(t.a.Begin(1));
  v1::Grant wrong = t.a.grant();
  wrong.set_generation(wrong.generation() + 1);
  EXPECT_TRUE(t.a.Call(TestClient::SealFrame(1, wrong)).has_failure());
  wrong = t.a.grant();
  wrong.set_slot(77);
  EXPECT_TRUE(t.a.Call(TestClient::SealFrame(1, wrong)).has_failure());
  EXPECT_TRUE(t.a.Call(TestClient::SealFrame(2, t.a.grant())).has_failure());
  EXPECT_TRUE(t.b.Call(TestClient::SealFrame(1, t.a.grant())).has_failure())
      << "another process's slot";
  EXPECT_TRUE(t.a.Seal(1));
  EXPECT_TRUE(t.a.Seal(1));
  const v1::Grant old = t.a.grant();
  ASSERT_TRUE(t.b.Save(1));
  for (Step step = 2; step < 6; ++step) {
    ASSERT_TRUE(t.a.Save(step));
    ASSERT_TRUE(t.b.Save(step));
  }
  EXPECT_TRUE(t.a.Call(TestClient::SealFrame(1, old)).has_failure());
}

TEST(Saves, ARecordOutsideTheSlotIsRefused) {
  for (const auto& [offset, bytes] : std::vector<std::pair<uint64_t, uint64_t>>{
           {0, 0}, {kSlot, 1}, {UINT64_MAX, 8}, {8, UINT64_MAX}, {0, kSlot + 1}}) {
    TwoRanks t;
    ASSERT_TRUE(t.a.Begin(1));
    v1::ClientFrame seal = TestClient::SealFrame(1, t.a.grant());
    seal.mutable_seal()->set_record_offset(offset);
    seal.mutable_seal()->set_record_bytes(bytes);
    EXPECT_EQ(t.a.Call(seal).failure().code(),
              static_cast<int>(absl::StatusCode::kInvalidArgument));
    EXPECT_EQ(t.b.Reason(TestClient::BeginFrame(1)), Failure::REASON_ABANDONED);
    EXPECT_TRUE(t.a.Save(2));
  }
}

TEST(Saves, ATornRecordLosesTheStepForAll) {
  TwoRanks t;
  t.h.fail = [](const Action& a) {
    return std::holds_alternative<PublishRecord>(a) ? absl::InvalidArgumentError("torn")
                                                    : absl::OkStatus();
  };
  ASSERT_TRUE(t.a.Begin(1));
  const v1::DaemonFrame refused = t.a.Call(TestClient::SealFrame(1, t.a.grant()));
  EXPECT_EQ(refused.failure().code(), static_cast<int>(absl::StatusCode::kInvalidArgument));
  t.h.fail = nullptr;
  EXPECT_EQ(t.b.Reason(TestClient::BeginFrame(1)), Failure::REASON_ABANDONED);
  EXPECT_TRUE(t.a.Save(2));
  EXPECT_TRUE(t.b.Save(2));
  EXPECT_TRUE(t.a.Committed(2));
}

TEST(Saves, AStepLostWhileItsRecordIsPublishedDoesNotStay) {
  TwoRanks t;
  ASSERT_TRUE(t.a.Begin(1));
  t.h.delay = [](const Action& action) { return std::holds_alternative<PublishRecord>(action); };
  const uint64_t sealing = t.a.Send(TestClient::SealFrame(1, t.a.grant()));
  const uint64_t other = t.b.Send(TestClient::BeginFrame(2));
  EXPECT_TRUE(t.b.Take(other));
  // Rank 0 is still sealing step 1, so rank 1's going on to step 2 ends it.
  t.h.PerformDelayed();
  EXPECT_EQ(t.a.Take(sealing)->frame.failure().reason(), Failure::REASON_ABANDONED);
  for (const auto& [id, file] : t.h.files) {
    EXPECT_FALSE(file.record);
  }
}

TEST(Saves, ASlotWhoseFileIsGoneIsLostAndReplaced) {
  TwoRanks t;
  ASSERT_TRUE(t.a.Begin(1));
  t.h.fail = [](const Action& a) {
    return std::holds_alternative<PublishRecord>(a) ? absl::DataLossError("truncated")
                                                    : absl::OkStatus();
  };
  EXPECT_TRUE(t.a.Call(TestClient::SealFrame(1, t.a.grant())).has_failure());
  t.h.fail = nullptr;
  const uint32_t bad = t.a.grant().slot();
  for (Step step = 2; step < 8; ++step) {
    ASSERT_TRUE(t.a.Save(step));
    EXPECT_NE(t.a.grant().slot(), bad) << "filled again while its process may have it mapped";
    ASSERT_TRUE(t.b.Save(step));
  }
  t.h.Kill(t.a);
  EXPECT_EQ(t.h.files.count(bad), 0u);
}

TEST(Saves, ADeadProcessEndsTheStepAtOnce) {
  TwoRanks t;
  ASSERT_TRUE(t.a.Begin(1));
  ASSERT_TRUE(t.b.Save(1));
  const uint64_t waiting =
      t.b.Send(TestClient::AwaitFrame(1, v1::AwaitSave::STAGE_COMMITTED, 5000));
  t.h.Kill(t.a);
  const auto answer = t.b.Take(waiting);
  EXPECT_EQ(answer->frame.failure().reason(), Failure::REASON_ABANDONED);
  EXPECT_NE(answer->frame.failure().message().find("pid 100"), std::string::npos);
}

TEST(Saves, ASealedShardOutlivesItsProcess) {
  TwoRanks t;
  ASSERT_TRUE(t.a.Save(1));
  t.h.Kill(t.a);
  ASSERT_TRUE(t.b.Save(1));
  EXPECT_TRUE(t.b.Committed(1));
}

TEST(Saves, AClosedSocketQuarantinesTheSlotUntilTheProcessIsGone) {
  TwoRanks t;
  ASSERT_TRUE(t.a.Begin(1));
  const uint32_t slot = t.a.grant().slot();
  t.h.Close(t.a);
  EXPECT_EQ(t.h.Daemon().slots_quarantined(), 1u);
  // Another process of the same user gets another slot.
  TestClient c = t.h.Connect(300);
  ASSERT_TRUE(c.Join("other", 0, 1));
  for (Step step = 1; step < 8; ++step) {
    ASSERT_TRUE(c.Save(step));
    EXPECT_NE(c.grant().slot(), slot);
  }
  t.h.living.erase(t.a.process());
  t.h.Feed(ProcessEnded{t.a.process()});
  EXPECT_EQ(t.h.Daemon().slots_quarantined(), 0u);
}

TEST(Saves, AReleaseEndsTheQuarantine) {
  TwoRanks t;
  ASSERT_TRUE(t.a.Begin(1));
  t.h.Close(t.a);
  EXPECT_EQ(t.h.Daemon().slots_quarantined(), 1u);
  v1::ClientFrame release;
  release.mutable_release_slots()->add_slots(t.a.grant().slot());
  release.mutable_release_slots()->add_slots(999);
  TestClient stranger = t.h.Connect(300);
  EXPECT_FALSE(stranger.Call(release).has_failure());
  EXPECT_EQ(t.h.Daemon().slots_quarantined(), 1u) << "only its writer can release a slot";
  TestClient back = t.h.Connect(100);
  EXPECT_FALSE(back.Call(release).has_failure());
  EXPECT_EQ(t.h.Daemon().slots_quarantined(), 0u);
  EXPECT_FALSE(t.h.files.at(t.a.grant().slot()).note.has_writer());
}

TEST(Saves, ARejoiningProcessGetsItsSlotsBackWithFreshDescriptors) {
  TwoRanks t;
  ASSERT_TRUE(t.a.Begin(1));
  t.h.Close(t.a);
  TestClient back = t.h.Connect(100);
  EXPECT_FALSE(back.Call(TestClient::JoinFrame("job", 0, 2, 0, "", 1)).has_failure());
  ASSERT_TRUE(back.Begin(2));
  EXPECT_EQ(back.grant().slot(), t.a.grant().slot());
  EXPECT_GT(back.grant().generation(), t.a.grant().generation());
  EXPECT_TRUE(back.grant().with_descriptor());
}

TEST(Saves, TheCommitDeadlineEndsAStep) {
  TwoRanks t;
  ASSERT_TRUE(t.a.Save(1));
  const uint64_t waiting =
      t.a.Send(TestClient::AwaitFrame(1, v1::AwaitSave::STAGE_COMMITTED, 3'000'000));
  t.h.Advance(std::chrono::minutes(9));
  EXPECT_FALSE(t.a.Take(waiting));
  t.h.Advance(std::chrono::minutes(2));
  EXPECT_EQ(t.a.Take(waiting)->frame.failure().reason(), Failure::REASON_ABANDONED);
  EXPECT_EQ(t.b.Reason(TestClient::BeginFrame(1)), Failure::REASON_ABANDONED);
}

TEST(Saves, AwaitingHasADeadlineAndStagesThatAreNotThere) {
  TwoRanks t;
  ASSERT_TRUE(t.a.Save(1));
  const v1::DaemonFrame late = t.a.Call(TestClient::AwaitFrame(9, v1::AwaitSave::STAGE_COMMITTED));
  EXPECT_EQ(late.failure().code(), static_cast<int>(absl::StatusCode::kInvalidArgument));
  const uint64_t waiting = t.a.Send(TestClient::AwaitFrame(1, v1::AwaitSave::STAGE_COMMITTED, 100));
  t.h.Advance(std::chrono::milliseconds(200));
  const auto answer = t.a.Take(waiting);
  EXPECT_EQ(answer->frame.failure().code(), static_cast<int>(absl::StatusCode::kDeadlineExceeded));
  EXPECT_NE(answer->frame.failure().message().find("1 of 2"), std::string::npos);
  for (const auto stage : {v1::AwaitSave::STAGE_NVME, v1::AwaitSave::STAGE_REMOTE}) {
    EXPECT_EQ(t.a.Call(TestClient::AwaitFrame(1, stage)).failure().code(),
              static_cast<int>(absl::StatusCode::kFailedPrecondition));
  }
}

TEST(Saves, ASupersededRankCanNeitherBeginNorSealNorWait) {
  TwoRanks t;
  ASSERT_TRUE(t.a.Save(1));
  ASSERT_TRUE(t.b.Begin(1));
  const uint64_t waiting =
      t.a.Send(TestClient::AwaitFrame(1, v1::AwaitSave::STAGE_COMMITTED, 5000));
  TestClient next = t.h.Connect(200);
  EXPECT_EQ(next.Call(TestClient::JoinFrame("job", 0, 2, 0, "new launch")).join().attempt(), 2u);
  EXPECT_EQ(t.a.Take(waiting)->frame.failure().reason(), Failure::REASON_SUPERSEDED);
  EXPECT_EQ(t.b.Reason(TestClient::SealFrame(1, t.b.grant())), Failure::REASON_SUPERSEDED);
  EXPECT_EQ(t.b.Reason(TestClient::BeginFrame(2)), Failure::REASON_SUPERSEDED);
  EXPECT_EQ(t.b.Reason(TestClient::EnterFrame()), Failure::REASON_SUPERSEDED);
  for (const auto& [id, file] : t.h.files) {
    EXPECT_FALSE(file.record) << "an incomplete step of a superseded attempt stayed";
  }
}

TEST(Saves, ASealOnItsWayWhenItsAttemptIsSupersededIsTakenBack) {
  CoreHarness h;
  TestClient a = h.Connect(100);
  ASSERT_TRUE(a.Join("job", 0, 1));
  ASSERT_TRUE(a.Begin(1));
  h.delay = [](const Action& action) { return std::holds_alternative<PublishRecord>(action); };
  const uint64_t sealing = a.Send(TestClient::SealFrame(1, a.grant()));
  TestClient next = h.Connect(200);
  next.Call(TestClient::JoinFrame("job", 0, 1, 0, "new launch"));
  h.PerformDelayed();
  EXPECT_EQ(a.Take(sealing)->frame.failure().reason(), Failure::REASON_SUPERSEDED);
  EXPECT_TRUE(h.Committed("job").empty());
  for (const auto& [id, file] : h.files) {
    EXPECT_FALSE(file.record);
  }
}

TEST(Saves, AnUnjoinedConnectionIsToldToJoin) {
  CoreHarness h;
  TestClient a = h.Connect(100);
  EXPECT_EQ(a.Reason(TestClient::BeginFrame(1)), Failure::REASON_UNKNOWN_SESSION);
  EXPECT_EQ(a.Reason(TestClient::EnterFrame()), Failure::REASON_UNKNOWN_SESSION);
  EXPECT_EQ(a.Call(v1::ClientFrame()).failure().code(),
            static_cast<int>(absl::StatusCode::kInvalidArgument));
}

}  // namespace
}  // namespace holdfast::testing
