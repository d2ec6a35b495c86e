// Slots, room and the shedding rule (docs/protocol.md §3, §5).
#include "tests/server/core_harness.h"

#include <random>

namespace holdfast::testing {
namespace {

using v1::Failure;

std::function<void(v1::DaemonConfig&)> Slots(uint32_t per_rank, uint32_t keep = 0) {
  return [=](v1::DaemonConfig& config) {
    config.mutable_memory()->set_slots_per_rank(per_rank);
    config.mutable_memory()->set_keep_committed(keep);
  };
}

v1::ClientFrame ReserveFrame(uint64_t bytes, uint32_t slots, uint64_t deadline_ms) {
  v1::ClientFrame frame;
  frame.mutable_reserve()->set_slot_bytes(bytes);
  frame.mutable_reserve()->set_slots(slots);
  frame.mutable_reserve()->set_deadline_ms(deadline_ms);
  return frame;
}

TEST(Room, ReserveMakesAndPopulatesTheRanksSlots) {
  CoreHarness h;
  TestClient a = h.Connect(100);
  ASSERT_TRUE(a.Join("job", 0, 1));
  h.delay = [](const Action& action) { return std::holds_alternative<PopulateSlot>(action); };
  const uint64_t id = a.Send(ReserveFrame(kSlot - 5, 0, 5000));
  EXPECT_FALSE(a.Take(id));
  EXPECT_EQ(h.files.size(), 3u);
  EXPECT_EQ(h.delayed.size(), 1u) << "one after the other, so that an early save finds a slot";
  ASSERT_TRUE(a.Save(1));
  h.PerformDelayed();
  const auto answer = a.Take(id);
  ASSERT_TRUE(answer);
  EXPECT_EQ(answer->frame.reserve().ready(), 3u);
  EXPECT_EQ(answer->frame.reserve().slot_bytes(), kSlot);
  EXPECT_EQ(h.files.size(), 3u);
}

TEST(Room, ReserveHandsOutOneDescriptorAnAnswerUntilAllAreMapped) {
  CoreHarness h;
  TestClient a = h.Connect(100);
  ASSERT_TRUE(a.Join("job", 0, 1));
  std::set<SlotId> handed;
  for (int i = 0; i < 3; ++i) {
    const uint64_t id = a.Send(ReserveFrame(kSlot, 0, 5000));
    const auto answer = a.Take(id);
    ASSERT_TRUE(answer);
    EXPECT_EQ(answer->frame.reserve().ready(), 3u);
    EXPECT_TRUE(answer->frame.reserve().with_descriptor());
    EXPECT_EQ(answer->descriptors, Descriptors::kWritableImage);
    EXPECT_EQ(h.files.at(answer->frame.reserve().slot()).note.writer().pid(), 100) << "noted first";
    handed.insert(answer->frame.reserve().slot());
  }
  EXPECT_EQ(handed.size(), 3u);
  EXPECT_FALSE(a.Call(ReserveFrame(kSlot, 0, 5000)).reserve().with_descriptor());
  for (Step step = 1; step <= 5; ++step) {
    ASSERT_TRUE(a.Save(step));
    EXPECT_FALSE(a.grant().with_descriptor()) << "it has them all mapped";
  }
}

TEST(Room, ASlotWhoseNoteFailsIsNotHandedOut) {
  CoreHarness h;
  TestClient a = h.Connect(100);
  ASSERT_TRUE(a.Join("job", 0, 1));
  h.fail = [](const Action& x) {
    return std::holds_alternative<WriteNote>(x) ? absl::ResourceExhaustedError("full")
                                                : absl::OkStatus();
  };
  const v1::DaemonFrame answer = a.Call(ReserveFrame(kSlot, 0, 5000));
  EXPECT_EQ(answer.reserve().ready(), 3u);
  EXPECT_FALSE(answer.reserve().with_descriptor());
  h.fail = nullptr;
  ASSERT_TRUE(a.Save(1));
  EXPECT_TRUE(a.grant().with_descriptor());
}

TEST(Room, AProcessThatDiesWhileItsSlotIsHandedOutLeavesItFree) {
  CoreHarness h;
  TestClient a = h.Connect(100);
  ASSERT_TRUE(a.Join("job", 0, 1));
  h.delay = [](const Action& action) { return std::holds_alternative<WriteNote>(action); };
  a.Send(ReserveFrame(kSlot, 0, 5000));
  h.Kill(a);
  h.PerformDelayed();
  EXPECT_EQ(h.Daemon().slots_free(), 3u);
  TestClient b = h.Connect(101);
  ASSERT_TRUE(b.Join("job", 0, 1));
  EXPECT_TRUE(b.Call(ReserveFrame(kSlot, 0, 5000)).reserve().with_descriptor());
}

TEST(Room, ReserveAnswersAtItsDeadlineWithWhatIsReady) {
  CoreHarness h;
  TestClient a = h.Connect(100);
  ASSERT_TRUE(a.Join("job", 0, 1));
  h.delay = [](const Action& action) { return std::holds_alternative<PopulateSlot>(action); };
  const uint64_t id = a.Send(ReserveFrame(kSlot, 2, 100));
  h.Advance(std::chrono::milliseconds(200));
  const auto answer = a.Take(id);
  ASSERT_TRUE(answer);
  EXPECT_EQ(answer->frame.reserve().ready(), 0u);
  EXPECT_EQ(answer->frame.reserve().wanted(), 2u);
}

TEST(Room, ReserveBeyondTheBudgetSaysSoAtOnce) {
  CoreHarness h;
  TestClient a = h.Connect(100);
  ASSERT_TRUE(a.Join("job", 0, 1));
  EXPECT_EQ(a.Reason(ReserveFrame(1001 * kSlot, 1, 5000)), Failure::REASON_TOO_LARGE);
  EXPECT_EQ(a.Reason(ReserveFrame(UINT64_MAX, 1, 5000)), Failure::REASON_TOO_LARGE);
  EXPECT_EQ(a.Call(ReserveFrame(0, 1, 5000)).failure().code(),
            static_cast<int>(absl::StatusCode::kInvalidArgument));
  EXPECT_EQ(a.Call(ReserveFrame(400 * kSlot, 3, 5000)).reserve().ready(), 2u);
}

TEST(Room, ReserveReportsWhenTheFileSystemIsFull) {
  CoreHarness h;
  TestClient a = h.Connect(100);
  ASSERT_TRUE(a.Join("job", 0, 1));
  h.fail = [](const Action& x) {
    return std::holds_alternative<CreateSlot>(x) ? absl::ResourceExhaustedError("ENOSPC")
                                                 : absl::OkStatus();
  };
  EXPECT_EQ(a.Call(ReserveFrame(kSlot, 3, 5000)).reserve().ready(), 0u);
  const v1::DaemonFrame refused = a.Call(TestClient::BeginFrame(1));
  EXPECT_EQ(refused.failure().reason(), Failure::REASON_NO_ROOM);
  EXPECT_NE(refused.failure().message().find("ENOSPC"), std::string::npos);
  EXPECT_EQ(h.Daemon().memory_bytes_used(), 0u);
  h.fail = nullptr;
  EXPECT_TRUE(a.Save(2));
}

TEST(Room, ASaveLargerThanTheBudgetIsRefusedWithTheNumbers) {
  CoreHarness h;
  TestClient a = h.Connect(100);
  ASSERT_TRUE(a.Join("job", 0, 1));
  const v1::DaemonFrame refused = a.Call(TestClient::BeginFrame(1, 1001 * kSlot));
  EXPECT_EQ(refused.failure().reason(), Failure::REASON_TOO_LARGE);
  EXPECT_NE(refused.failure().message().find("2 GiB"), std::string::npos)
      << refused.failure().message();
  EXPECT_TRUE(h.files.empty());
}

TEST(Room, OlderCommittedStepsGoFirst) {
  CoreHarness h(Slots(3));
  TestClient a = h.Connect(100);
  ASSERT_TRUE(a.Join("job", 0, 1));
  for (Step step = 1; step <= 20; ++step) {
    ASSERT_TRUE(a.Save(step));
    EXPECT_TRUE(a.Committed(step));
  }
  EXPECT_EQ(h.Committed("job"), (std::vector<std::string>{"1:20", "1:19", "1:18"}));
  ASSERT_TRUE(a.Begin(21));
  EXPECT_EQ(h.Committed("job"), (std::vector<std::string>{"1:20", "1:19"}));
  EXPECT_EQ(h.files.size(), 3u);
  const v1::JobStatus status = h.Status("job");
  const std::string last = status.events(status.events_size() - 1).text();
  EXPECT_EQ(last,
            "step 18 of attempt 1 retired: rank 0 needed a slot for step 21, and a newer "
            "step is committed");
}

TEST(Room, KeepCommittedCapsEvenWhenThereIsRoom) {
  CoreHarness h(Slots(5, 2));
  TestClient a = h.Connect(100);
  ASSERT_TRUE(a.Join("job", 0, 1));
  for (Step step = 1; step <= 4; ++step) {
    ASSERT_TRUE(a.Save(step));
    EXPECT_TRUE(a.Committed(step));
  }
  EXPECT_EQ(h.Committed("job"), (std::vector<std::string>{"1:4", "1:3"}));
  EXPECT_TRUE(a.Committed(1)) << "it was committed; that it was removed later does not change that";
}

TEST(Room, AFastRankShedsAndTheSlowOneCommitsTheProtectedStep) {
  CoreHarness h(Slots(3));
  TestClient fast = h.Connect(100);
  TestClient slow = h.Connect(101);
  ASSERT_TRUE(fast.Join("job", 0, 2));
  ASSERT_TRUE(slow.Join("job", 1, 2));
  ASSERT_TRUE(fast.Save(1));
  ASSERT_TRUE(slow.Save(1));
  for (Step step = 2; step <= 9; ++step) {
    ASSERT_TRUE(fast.Save(step)) << step;
  }
  // Step 2 was shed for step 4; from then on step 3 is protected.
  EXPECT_EQ(slow.Reason(TestClient::BeginFrame(2)), Failure::REASON_SHED);
  ASSERT_TRUE(slow.Save(3));
  EXPECT_TRUE(slow.Committed(3));
  EXPECT_EQ(h.Committed("job").front(), "1:3");
}

// Whatever the skew and the number of slots, a healthy job commits within a bounded number of
// saves.
TEST(Room, SkewedRanksCommitWithinABound) {
  for (const uint32_t slots : {2u, 3u}) {
    for (const Step lag : {1u, 4u, 9u}) {
      CoreHarness h(Slots(slots));
      std::vector<TestClient> ranks;
      for (Rank rank = 0; rank < 3; ++rank) {
        ranks.push_back(h.Connect(static_cast<int32_t>(100 + rank)));
        ASSERT_TRUE(ranks.back().Join("job", rank, 3));
      }
      std::mt19937_64 random(slots * 100 + lag);
      std::vector<Step> next(3, 1);
      Step committed = 0;
      for (int turn = 0; turn < 600; ++turn) {
        const size_t rank = random() % 3;
        if (next[rank] > *std::min_element(next.begin(), next.end()) + lag) {
          continue;
        }
        const bool saved = static_cast<bool>(ranks[rank].Save(next[rank]));
        if (saved && ranks[rank].Committed(next[rank])) {
          committed = next[rank];
        }
        ++next[rank];
        ASSERT_LT(next[0], committed + 4 * (lag + 4)) << slots << " slots, lag " << lag;
      }
    }
  }
}

TEST(Room, WithTwoSlotsTheProtectedStepIsNotShedAndTheNextIsRefused) {
  CoreHarness h(Slots(2));
  TestClient fast = h.Connect(100);
  TestClient slow = h.Connect(101);
  ASSERT_TRUE(fast.Join("job", 0, 2));
  ASSERT_TRUE(slow.Join("job", 1, 2));
  ASSERT_TRUE(fast.Save(1));
  ASSERT_TRUE(slow.Save(1));
  ASSERT_TRUE(fast.Save(2));
  ASSERT_TRUE(fast.Save(3));  // sheds 2, protects 3
  EXPECT_EQ(fast.Reason(TestClient::BeginFrame(4)), Failure::REASON_NO_ROOM);
  EXPECT_EQ(slow.Reason(TestClient::BeginFrame(2)), Failure::REASON_SHED);
  ASSERT_TRUE(slow.Save(3));
  EXPECT_TRUE(fast.Committed(3));
  EXPECT_EQ(slow.Reason(TestClient::BeginFrame(4)), Failure::REASON_ABANDONED);
  ASSERT_TRUE(fast.Save(5));
  ASSERT_TRUE(slow.Save(5));
  EXPECT_TRUE(fast.Committed(5));
}

TEST(Room, ASaveThatMayWaitGetsTheSlotThatComesFree) {
  CoreHarness h(Slots(2));
  TestClient fast = h.Connect(100);
  TestClient slow = h.Connect(101);
  ASSERT_TRUE(fast.Join("job", 0, 2));
  ASSERT_TRUE(slow.Join("job", 1, 2));
  ASSERT_TRUE(fast.Save(1));
  ASSERT_TRUE(slow.Save(1));
  ASSERT_TRUE(fast.Save(2));
  ASSERT_TRUE(fast.Save(3));
  const uint64_t waiting = fast.Send(TestClient::BeginFrame(4, kSlot, 5000));
  EXPECT_FALSE(fast.Take(waiting));
  ASSERT_TRUE(slow.Save(3));
  EXPECT_TRUE(fast.Take(waiting)->frame.has_begin_save());
  const uint64_t late = slow.Send(TestClient::BeginFrame(4, 900 * kSlot, 300));
  h.Advance(std::chrono::milliseconds(400));
  EXPECT_TRUE(slow.Take(late));
}

TEST(Room, OtherBranchesAreShedBeforeTheLine) {
  CoreHarness h(Slots(4));
  TestClient a = h.Connect(100);
  ASSERT_TRUE(a.Join("job", 0, 1));
  for (Step step = 1; step <= 3; ++step) {
    ASSERT_TRUE(a.Save(step));
  }
  h.Kill(a);
  TestClient b = h.Connect(101);
  ASSERT_TRUE(b.Join("job", 0, 1));
  const auto source = b.Call(TestClient::EnterFrame(1000, CheckpointId{0, 2})).enter_session();
  ASSERT_TRUE(b.Call(TestClient::ReportFrame(source, true)).enter_session().done());
  b.Release(source.source());
  ASSERT_TRUE(b.Save(3));
  ASSERT_TRUE(b.Save(4));
  EXPECT_EQ(h.Committed("job"), (std::vector<std::string>{"2:4", "2:3", "1:2", "1:1"}));
}

TEST(Room, ARestorePointIsKeptWhileTheJobGoesOn) {
  CoreHarness h(Slots(3));
  TestClient a = h.Connect(100);
  ASSERT_TRUE(a.Join("job", 0, 1));
  ASSERT_TRUE(a.Save(1));
  ASSERT_TRUE(a.Save(2));
  v1::SetRestorePointRequest request;
  request.set_job("job");
  request.set_step(1);
  ASSERT_TRUE(h.Admin<v1::SetRestorePointReply>(request).ok());
  for (Step step = 3; step <= 10; ++step) {
    ASSERT_TRUE(a.Save(step));
  }
  EXPECT_EQ(h.Committed("job"), (std::vector<std::string>{"1:10", "1:9", "1:1"}));
}

TEST(Room, AStepThatIsReadKeepsItsBytesAndTheJobCommitsAgain) {
  CoreHarness h(Slots(2));
  TestClient a = h.Connect(100);
  ASSERT_TRUE(a.Join("job", 0, 1));
  ASSERT_TRUE(a.Save(1));
  TestClient reader = h.Connect(200);
  v1::ClientFrame attach;
  attach.mutable_attach()->set_job("job");
  const uint64_t id = reader.Send(attach);
  const auto source = reader.Take(id);
  ASSERT_TRUE(source);
  const SlotId read = source->frame.attach().slot();
  for (Step step = 2; step <= 8; ++step) {
    ASSERT_TRUE(a.Save(step));
    EXPECT_NE(a.grant().slot(), read) << "filled while somebody reads it";
    EXPECT_TRUE(a.Committed(step));
  }
  EXPECT_FALSE(h.files.at(read).record) << "its record goes at once";
  reader.Release(source->frame.attach());
  EXPECT_EQ(h.Daemon().slots_quarantined(), 0u);
}

TEST(Room, TheBudgetIsNeverExceeded) {
  CoreHarness h(Slots(3));
  h.bytes_max = 5 * kSlot;
  h.Restart();
  TestClient a = h.Connect(100);
  TestClient b = h.Connect(101);
  ASSERT_TRUE(a.Join("job", 0, 2));
  ASSERT_TRUE(b.Join("job", 1, 2));
  for (Step step = 1; step <= 10; ++step) {
    ASSERT_TRUE(a.Save(step));
    ASSERT_TRUE(b.Save(step));
    EXPECT_TRUE(a.Committed(step));
    EXPECT_LE(h.files.size(), 5u);
  }
}

TEST(Room, AThirdSlotIsMadeOnlyWhileTheOthersCanHaveTwo) {
  CoreHarness h(Slots(3));
  h.bytes_max = 4 * kSlot;
  h.Restart();
  TestClient a = h.Connect(100);
  TestClient b = h.Connect(101);
  ASSERT_TRUE(a.Join("job", 0, 2));
  ASSERT_TRUE(b.Join("job", 1, 2));
  EXPECT_EQ(a.Call(ReserveFrame(kSlot, 3, 1000)).reserve().ready(), 2u);
  EXPECT_EQ(b.Call(ReserveFrame(kSlot, 3, 1000)).reserve().ready(), 2u);
  for (Step step = 1; step <= 10; ++step) {
    ASSERT_TRUE(a.Save(step));
    ASSERT_TRUE(b.Save(step));
    EXPECT_TRUE(b.Committed(step));
  }
}

TEST(Room, AnotherJobsOlderStepsMakeRoomItsNewestNever) {
  CoreHarness h(Slots(3));
  h.bytes_max = 4 * kSlot;
  h.Restart();
  TestClient a = h.Connect(100);
  ASSERT_TRUE(a.Join("old", 0, 1));
  for (Step step = 1; step <= 3; ++step) {
    ASSERT_TRUE(a.Save(step));
  }
  h.Kill(a);
  TestClient b = h.Connect(101, 2000);  // of another user, but the first job has ended
  ASSERT_TRUE(b.Join("new", 0, 1));
  for (Step step = 1; step <= 6; ++step) {
    ASSERT_TRUE(b.Save(step)) << step;
  }
  EXPECT_EQ(h.Committed("old"), (std::vector<std::string>{"1:3", "1:2"}))
      << "two slots are enough for the new job";
  TestClient c = h.Connect(102, 2000);
  ASSERT_TRUE(c.Join("third", 0, 1));
  ASSERT_TRUE(c.Save(1));  // of "new", which is alive: the same user's older steps
  EXPECT_EQ(c.Reason(TestClient::BeginFrame(2, 3 * kSlot)), Failure::REASON_NO_ROOM);
  EXPECT_EQ(h.Committed("old").front(), "1:3");
  EXPECT_EQ(h.Committed("new").front(), "1:6");
}

// What a living rank has let go of for a moment it will fill again: nobody gets it, so nothing in
// it may be given up for the sake of another job.
TEST(Room, ALivingJobKeepsItsStepsAlsoInSlotsThatItReleased) {
  CoreHarness h(Slots(3));
  h.bytes_max = 3 * kSlot;
  h.Restart();
  TestClient a = h.Connect(100);
  ASSERT_TRUE(a.Join("living", 0, 1));
  v1::ClientFrame release;
  for (Step step = 1; step <= 3; ++step) {
    ASSERT_TRUE(a.Save(step));
    release.mutable_release_slots()->add_slots(a.grant().slot());
  }
  a.Call(release);
  TestClient b = h.Connect(101);  // the same user's
  ASSERT_TRUE(b.Join("hungry", 0, 1));
  EXPECT_EQ(b.Reason(TestClient::BeginFrame(1)), Failure::REASON_NO_ROOM);
  EXPECT_EQ(h.Committed("living"), (std::vector<std::string>{"1:3", "1:2", "1:1"}));
  h.Kill(a);  // now its slots are of use to others
  EXPECT_TRUE(b.Save(2));
  EXPECT_EQ(h.Committed("living").front(), "1:3");
}

TEST(Room, WhatANewerStepReplacedIsNoLoss) {
  CoreHarness h(Slots(3));
  TestClient a = h.Connect(100);
  ASSERT_TRUE(a.Join("job", 0, 1));
  for (Step step = 1; step <= 5; ++step) {
    ASSERT_TRUE(a.Save(step));
  }
  EXPECT_EQ(h.CountReports(Report::Kind::kStepRetired), 2u);
  EXPECT_EQ(h.CountReports(Report::Kind::kStepShed), 0u);
  EXPECT_EQ(h.Status("job").losses_size(), 0);
}

TEST(Room, ALivingJobOfAnotherUserIsNotTouched) {
  CoreHarness h(Slots(3));
  h.bytes_max = 3 * kSlot;
  h.Restart();
  TestClient a = h.Connect(100);
  ASSERT_TRUE(a.Join("theirs", 0, 1));
  for (Step step = 1; step <= 3; ++step) {
    ASSERT_TRUE(a.Save(step));
  }
  TestClient b = h.Connect(101, 2000);
  ASSERT_TRUE(b.Join("mine", 0, 1));
  const v1::DaemonFrame refused = b.Call(TestClient::BeginFrame(1));
  EXPECT_EQ(refused.failure().reason(), Failure::REASON_NO_ROOM);
  EXPECT_EQ(refused.failure().message().find("theirs"), std::string::npos)
      << "another user's job is named";
  EXPECT_EQ(h.Committed("theirs").size(), 3u);
}

TEST(Room, AnotherUsersBytesAreNeverHandedOn) {
  CoreHarness h(Slots(3));
  h.bytes_max = 3 * kSlot;
  h.Restart();
  TestClient a = h.Connect(100, 1000);
  ASSERT_TRUE(a.Join("theirs", 0, 1));
  EXPECT_EQ(a.Call(ReserveFrame(kSlot, 3, 1000)).reserve().ready(), 3u);
  h.Kill(a);
  size_t deleted = 0;
  h.fail = [&](const Action& action) {
    deleted += std::holds_alternative<DeleteSlot>(action) ? 1 : 0;
    return absl::OkStatus();
  };
  TestClient b = h.Connect(101, 2000);
  ASSERT_TRUE(b.Join("mine", 0, 1));
  ASSERT_TRUE(b.Save(1));
  EXPECT_GE(deleted, 1u);
}

TEST(Room, AModelThatGrowsGetsLargerSlots) {
  CoreHarness h(Slots(3));
  h.bytes_max = 12 * kSlot;
  h.Restart();
  TestClient a = h.Connect(100);
  ASSERT_TRUE(a.Join("job", 0, 1));
  for (Step step = 1; step <= 4; ++step) {
    ASSERT_TRUE(a.Save(step));
  }
  v1::ClientFrame release;
  for (uint32_t slot = 0; slot < 3; ++slot) {
    release.mutable_release_slots()->add_slots(slot);
  }
  EXPECT_FALSE(a.Call(release).has_failure());
  for (Step step = 5; step <= 9; ++step) {
    ASSERT_TRUE(a.Save(step, 3 * kSlot)) << step;
    EXPECT_TRUE(a.Committed(step));
  }
}

// Found in review: the slot came for a seat that was no more.
TEST(Room, ASlotThatComesAfterTheRankJoinedAgainIsNobodys) {
  CoreHarness h;
  TestClient a = h.Connect(100);
  ASSERT_TRUE(a.Join("job", 0, 1));
  h.delay = [](const Action& action) { return std::holds_alternative<CreateSlot>(action); };
  v1::ClientFrame begin;
  begin.mutable_begin_save()->set_step(1);
  begin.mutable_begin_save()->set_slot_bytes(kSlot);
  const uint64_t save = a.Send(begin);
  EXPECT_FALSE(a.Take(save));
  v1::ClientFrame again;
  again.mutable_join()->set_job("job");
  again.mutable_join()->set_rank(0);
  again.mutable_join()->set_world_size(1);
  again.mutable_join()->set_attempt(1);
  EXPECT_FALSE(a.Call(again).has_failure());
  const auto refused = a.Take(save);
  ASSERT_TRUE(refused);
  EXPECT_TRUE(refused->frame.has_failure());
  h.delay = nullptr;
  h.PerformDelayed();
  EXPECT_TRUE(a.Save(2));
}

// Found in review: slot 0 was asked for again and again, and nobody could save.
TEST(Room, ANumberThatALeftAloneSlotHasIsNotUsed) {
  CoreHarness h;
  h.left_alone = {{0, kSlot}};
  h.Restart();
  TestClient a = h.Connect(100);
  ASSERT_TRUE(a.Join("job", 0, 1));
  EXPECT_TRUE(a.Save(1));
  EXPECT_EQ(h.files.count(0), 0u);
  EXPECT_EQ(h.Daemon().slots_quarantined(), 1u);
}

// Found in review: a slot that could not be populated was tried again at once, for ever.
TEST(Room, PopulatingThatFailsIsNotRepeated) {
  CoreHarness h;
  TestClient a = h.Connect(100);
  ASSERT_TRUE(a.Join("job", 0, 1));
  int tries = 0;
  h.fail = [&tries](const Action& action) {
    if (!std::holds_alternative<PopulateSlot>(action)) {
      return absl::OkStatus();
    }
    EXPECT_LT(++tries, 100);
    return tries < 100 ? absl::ResourceExhaustedError("no memory") : absl::OkStatus();
  };
  v1::ClientFrame reserve;
  reserve.mutable_reserve()->set_slot_bytes(kSlot);
  reserve.mutable_reserve()->set_deadline_ms(60'000);
  EXPECT_FALSE(a.Call(reserve).has_failure());
  EXPECT_LE(tries, 3);
}

}  // namespace
}  // namespace holdfast::testing
