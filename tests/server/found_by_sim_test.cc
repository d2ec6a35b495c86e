// What tests/sim found, in small.
#include "tests/server/core_harness.h"

namespace holdfast::testing {
namespace {

constexpr uint64_t kLong = 60'000;

// A rank that was told that it belongs to the attempt joins again over the same connection, and its
// deadline passes before the job's state is durable. It keeps its place: its seat is still there.
TEST(FoundBySim, JoinThatExpiresDoesNotFreeTheRanksPlace) {
  CoreHarness h;
  TestClient a = h.Connect(100);
  TestClient b = h.Connect(101);
  ASSERT_TRUE(a.Join("job", 0, 2));
  ASSERT_TRUE(b.Join("job", 1, 2));
  h.delay = [](const Action& action) { return std::holds_alternative<WriteJobState>(action); };
  v1::SetRestorePointRequest scratch;
  scratch.set_job("job");
  scratch.set_from_scratch(true);
  EXPECT_FALSE(h.Admin<v1::SetRestorePointReply>(scratch).ok());  // not durable yet
  const uint64_t again = a.Send(TestClient::JoinFrame("job", 0, 2, 5));
  h.Advance(std::chrono::milliseconds(20));
  const std::optional<Answer> late = a.Take(again);
  ASSERT_TRUE(late && late->frame.has_failure());
  h.PerformDelayed();
  TestClient second = h.Connect(102);
  EXPECT_EQ(second.Reason(TestClient::JoinFrame("job", 0, 2)), v1::Failure::REASON_RANK_TAKEN)
      << "pid 100 lives, and was told that it is rank 0";
}

// It asks twice, and the first question's deadline passes before the job's state is durable: it
// hears of its place by the second.
TEST(FoundBySim, OfTwoJoinsTheOneThatIsAnsweredCounts) {
  CoreHarness h;
  TestClient other = h.Connect(100);
  ASSERT_TRUE(other.Join("job", 1, 2));
  TestClient a = h.Connect(101);
  h.delay = [](const Action& action) { return std::holds_alternative<WriteJobState>(action); };
  const uint64_t first = a.Send(TestClient::JoinFrame("job", 0, 2, 5));
  const uint64_t second = a.Send(TestClient::JoinFrame("job", 0, 2, kLong));
  h.Advance(std::chrono::milliseconds(20));
  ASSERT_TRUE(a.Take(first) && !a.Take(second));
  h.PerformDelayed();
  const std::optional<Answer> answer = a.Take(second);
  ASSERT_TRUE(answer && answer->frame.has_join());
  TestClient late = h.Connect(102);
  EXPECT_EQ(late.Reason(TestClient::JoinFrame("job", 0, 2)), v1::Failure::REASON_RANK_TAKEN);
}

// The descriptor that a Reserve brings cannot be opened, because the file is gone: the client hears
// a failure and has nothing mapped, the core hears CopyFoundBad. It must not grant that slot as if
// the client had it.
TEST(FoundBySim, ReservedSlotWhoseFileIsGoneIsNotGrantedAsMapped) {
  CoreHarness h;
  TestClient a = h.Connect(100);
  ASSERT_TRUE(a.Join("job", 0, 1));
  v1::ClientFrame reserve;
  reserve.mutable_reserve()->set_slot_bytes(kSlot);
  reserve.mutable_reserve()->set_slots(1);
  reserve.mutable_reserve()->set_deadline_ms(kLong);
  const v1::DaemonFrame reserved = a.Call(reserve);
  ASSERT_TRUE(reserved.reserve().with_descriptor());
  h.Feed(CopyFoundBad{reserved.reserve().slot(), 0, "the file is gone"});
  const v1::DaemonFrame granted = a.Call(TestClient::BeginFrame(1));
  ASSERT_FALSE(granted.has_failure()) << granted.failure().message();
  EXPECT_TRUE(granted.begin_save().with_descriptor())
      << "slot " << granted.begin_save().slot() << " was never mapped by this client";
}

// One file of three fails for good, the others are healthy: the job must commit again within a
// bounded number of saves (design.md §6, 13).
void OneSlotFails(const std::function<bool(const Action&, SlotId)>& concerns) {
  CoreHarness h;
  TestClient a = h.Connect(100);
  ASSERT_TRUE(a.Join("job", 0, 1));
  Step step = 0;
  for (int i = 0; i < 3; ++i) {  // all three slots are in use now and then
    ASSERT_TRUE(a.Save(++step));
  }
  const SlotId bad = a.grant().slot();
  h.fail = [&](const Action& action) {
    return concerns(action, bad) ? absl::UnavailableError("EIO") : absl::OkStatus();
  };
  int sealed = 0;
  for (int i = 0; i < 20; ++i) {
    sealed += a.Save(++step) ? 1 : 0;
  }
  EXPECT_GT(sealed, 5) << "slot " << bad << " is picked again and again";
  EXPECT_TRUE(a.Save(++step) || a.Save(++step) || a.Save(++step));
}

TEST(FoundBySim, SlotThatCannotBeNotedDoesNotStopTheJob) {
  OneSlotFails([](const Action& action, SlotId bad) {
    const auto* note = std::get_if<WriteNote>(&action);
    return note != nullptr && note->slot == bad;
  });
}

TEST(FoundBySim, SlotWhoseRecordCannotBeWrittenDoesNotStopTheJob) {
  OneSlotFails([](const Action& action, SlotId bad) {
    const auto* publish = std::get_if<PublishRecord>(&action);
    return publish != nullptr && publish->slot == bad;
  });
}

// A copy of the rank's own was found bad, and the budget is all used: that copy is what must go.
TEST(FoundBySim, BadCopyMakesRoomInATightBudget) {
  CoreHarness h([](v1::DaemonConfig& config) { config.mutable_memory()->set_slots_per_rank(2); });
  h.bytes_max = 2 * kSlot;
  h.Restart();
  TestClient a = h.Connect(100);
  ASSERT_TRUE(a.Join("job", 0, 1));
  ASSERT_TRUE(a.Save(1));
  const SlotId first = a.grant().slot();
  const Generation generation = a.grant().generation();
  ASSERT_TRUE(a.Save(2));
  h.Kill(a);
  h.Feed(CopyFoundBad{first, generation, "digests differ"});
  TestClient b = h.Connect(101);
  ASSERT_TRUE(b.Join("job", 0, 1));
  const Answer offered = *b.Take(b.Send(TestClient::EnterFrame()));
  const v1::SessionOutcome& outcome = offered.frame.enter_session();
  ASSERT_TRUE(outcome.has_source());
  ASSERT_FALSE(b.Call(TestClient::ReportFrame(outcome, true)).has_failure());
  b.Release(outcome.source());
  EXPECT_TRUE(b.Save(3) || b.Save(4) || b.Save(5)) << "the bad copy keeps its slot for ever";
}

}  // namespace
}  // namespace holdfast::testing
