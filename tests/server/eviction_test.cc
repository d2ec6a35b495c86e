// Copies of other jobs that give way when a save or a restore finds no slot (docs/protocol.md §5).
#include "recovery/eviction.h"
#include "server/agent.h"
#include "tests/server/core_harness.h"

namespace holdfast::testing {
namespace {

using v1::Failure;

// Room for two ranks with two slots each.
std::function<void(v1::DaemonConfig&)> Memory(Duration keep_ended = std::chrono::hours(24)) {
  return [=](v1::DaemonConfig& config) {
    config.mutable_memory()->set_slots_per_rank(3);
    config.mutable_memory()->set_keep_ended_ms(static_cast<uint64_t>(
        std::chrono::duration_cast<std::chrono::milliseconds>(keep_ended).count()));
  };
}

struct Node : CoreHarness {
  explicit Node(uint64_t slots, std::function<void(v1::DaemonConfig&)> adjust = Memory(),
                bool on_drive = false)
      : CoreHarness([=](v1::DaemonConfig& c) {
          adjust(c);
          if (on_drive) {
            c.mutable_nvme()->add_dirs("/d0");
          }
        }) {
    bytes_max = slots * kSlot;
    nvme_bytes_max = on_drive ? 1000 * kSlot : 0;
    Restart();
  }

  // A job of one rank saves once, and ends.
  void Run(const std::string& name, uint32_t uid, bool in_order) {
    TestClient rank = Connect(++pid, uid);
    ASSERT_TRUE(rank.Join(name, 0, 1));
    ASSERT_TRUE(rank.Save(1)) << name;
    ASSERT_TRUE(rank.Committed(1)) << name;
    End(rank, in_order);
    Advance(std::chrono::seconds(1));
  }
  void End(TestClient& rank, bool in_order) {
    if (in_order) {
      v1::ClientFrame leave;
      leave.mutable_leave();
      rank.Call(leave);
    }
    Kill(rank);
  }
  bool Has(const std::string& name) { return !Committed(name).empty(); }
  std::string LastShed() const {
    std::string text;
    for (const Report& report : reports) {
      text = report.kind == Report::Kind::kStepShed ? report.text : text;
    }
    return text;
  }

  int32_t pid = 100;
};

TEST(Evictions, TheTenthRunSavesWithoutACleaningUpAfterTheNineBefore) {
  Node node(4);
  for (int run = 0; run < 10; ++run) {
    // Two users; some end in order, some are killed. Each run has two slots at most: its own half.
    TestClient rank = node.Connect(++node.pid, 1000 + run % 2);
    const std::string name = absl::StrCat("run", run);
    ASSERT_TRUE(rank.Join(name, 0, 1));
    for (Step step = 1; step <= 4; ++step) {
      ASSERT_TRUE(rank.Save(step)) << name << ", step " << step;
      ASSERT_TRUE(rank.Committed(step)) << name << ", step " << step;
    }
    node.End(rank, run % 3 == 0);
  }
  EXPECT_TRUE(node.Has("run9"));
  EXPECT_TRUE(node.Has("run8")) << "of the other user, which has no more than its share";
}

TEST(Evictions, ALastCopyThatGoesIsAnEventWithTheCommandThatWouldHaveKeptIt) {
  Node node(2);
  node.Run("mine", 1000, true);
  TestClient next = node.Connect(200);
  ASSERT_TRUE(next.Join("next", 0, 1));
  ASSERT_TRUE(next.Save(1));
  EXPECT_TRUE(node.Has("mine")) << "there was room";
  ASSERT_TRUE(next.Save(2));
  EXPECT_FALSE(node.Has("mine"));
  EXPECT_NE(node.LastShed().find("'ckptctl pin mine --step 1' would have kept it"),
            std::string::npos)
      << node.LastShed();
  EXPECT_TRUE(next.Save(3)) << "from now on its own older steps go";
  EXPECT_EQ(node.Committed("next").front(), "1:3");
}

TEST(Evictions, APinnedLastCopyStays) {
  Node node(2);
  node.Run("mine", 1000, true);
  v1::PinRequest pin;
  pin.set_job("mine");
  pin.set_step(1);
  ASSERT_TRUE(node.Admin<v1::PinReply>(pin).ok());
  TestClient next = node.Connect(200);
  ASSERT_TRUE(next.Join("next", 0, 1));
  ASSERT_TRUE(next.Save(1));
  next.Save(2);
  EXPECT_TRUE(node.Has("mine"));
}

TEST(Evictions, WhatADurableTierHasGivesWayFirstAndIsNoLoss) {
  Node node(3, Memory(), true);
  node.Run("there-too", 2000, true);
  ASSERT_FALSE(node.nvme.copies.empty());
  TestClient next = node.Connect(200, 1000);
  ASSERT_TRUE(next.Join("next", 0, 1));
  for (Step step = 1; step <= 3; ++step) {
    ASSERT_TRUE(next.Save(step));
  }
  EXPECT_EQ(node.Committed("next"), (std::vector<std::string>{"1:3", "1:2", "1:1"}))
      << "nothing of its own went";
  EXPECT_TRUE(node.Has("there-too")) << "on the drive";
  EXPECT_EQ(node.CountReports(Report::Kind::kStepShed), 0u);
  EXPECT_EQ(node.Status("there-too").losses_size(), 0);
}

// Its newest step is on the drive: the older one, which is not, is nobody's only copy.
TEST(Evictions, WhatIsOlderThanAStepOnTheDriveIsSuperseded) {
  Node node(
      3,
      [](v1::DaemonConfig& c) {
        Memory()(c);
        c.mutable_policy()->mutable_nvme()->set_keep_last(2);
      },
      true);
  TestClient ended = node.Connect(100, 1000);
  ASSERT_TRUE(ended.Join("ended", 0, 1));
  for (Step step = 1; step <= 3; ++step) {
    ASSERT_TRUE(ended.Save(step));
  }
  ASSERT_EQ(node.nvme.copies.size(), 2u) << "steps 2 and 3";
  node.End(ended, true);
  // (Of another user, and one by one, so that nothing of their own is superseded.)
  for (const char* const name : {"next-1", "next-2", "next-3"}) {
    TestClient next = node.Connect(++node.pid, 2000);
    ASSERT_TRUE(next.Join(name, 0, 1));
    ASSERT_TRUE(next.Save(1)) << name;
  }
  EXPECT_EQ(node.Committed("ended"), (std::vector<std::string>{"1:3", "1:2"})) << "on the drive";
  EXPECT_NE(node.LastShed().find("this was not the newest committed step"), std::string::npos)
      << node.LastShed();
}

TEST(Evictions, AnotherUsersLastCopyIsSafeForTheTimeThatIsSet) {
  Node node(2, Memory(std::chrono::hours(1)));
  node.Run("theirs", 2000, true);
  TestClient mine = node.Connect(200, 1000);
  ASSERT_TRUE(mine.Join("mine", 0, 1));
  ASSERT_TRUE(mine.Save(1));
  const v1::DaemonFrame refused = mine.Call(TestClient::BeginFrame(2));
  EXPECT_EQ(refused.failure().reason(), Failure::REASON_NO_ROOM);
  EXPECT_EQ(refused.failure().message().find("ckptctl rm"), std::string::npos)
      << "nobody may remove another user's job: " << refused.failure().message();
  node.Advance(std::chrono::hours(2));
  EXPECT_TRUE(mine.Save(3));
  EXPECT_FALSE(node.Has("theirs"));
}

TEST(Evictions, AUserBeyondItsShareMakesRoomForOthers) {
  Node node(4);
  for (const char* name : {"a", "b", "c", "d"}) {
    node.Run(name, 2000, true);
  }
  TestClient mine = node.Connect(200, 1000);
  ASSERT_TRUE(mine.Join("mine", 0, 1));
  for (Step step = 1; step <= 4; ++step) {
    ASSERT_TRUE(mine.Save(step)) << step;
  }
  EXPECT_FALSE(node.Has("a"));
  EXPECT_FALSE(node.Has("b"));
  EXPECT_EQ(node.LastShed().find("'mine'"), std::string::npos) << node.LastShed();
  EXPECT_NE(node.LastShed().find("a job of another user needed the memory"), std::string::npos)
      << node.LastShed();
  EXPECT_TRUE(node.Has("c")) << "half is the share of two users";
  EXPECT_TRUE(node.Has("d"));
}

TEST(Evictions, AJobThatDiedAMomentAgoIsNotTakenFromByOtherUsers) {
  Node node(2);
  TestClient theirs = node.Connect(150, 2000);
  ASSERT_TRUE(theirs.Join("theirs", 0, 1));
  ASSERT_TRUE(theirs.Save(1));
  ASSERT_TRUE(theirs.Save(2));
  node.Kill(theirs);
  TestClient mine = node.Connect(200, 1000);
  ASSERT_TRUE(mine.Join("mine", 0, 1));
  ASSERT_TRUE(mine.Save(1)) << "its older step gives way";
  EXPECT_EQ(mine.Reason(TestClient::BeginFrame(2)), Failure::REASON_NO_ROOM);
  EXPECT_EQ(node.Committed("theirs").front(), "1:2");
}

TEST(Evictions, ARestoreFromADriveTakesTheRoomOfEndedJobs) {
  Node node(2, Memory(), true);
  node.Run("wanted", 1000, false);
  node.Restart(true);
  node.config.mutable_policy()->mutable_nvme()->set_every_steps(0);
  node.Restart();
  node.Run("memory-only-1", 1000, true);
  node.Run("memory-only-2", 1000, true);
  TestClient again = node.Connect(200, 1000);
  ASSERT_TRUE(again.Join("wanted", 0, 1));
  const v1::DaemonFrame entered = again.Call(TestClient::EnterFrame());
  ASSERT_TRUE(entered.has_enter_session()) << entered.DebugString();
  EXPECT_EQ(entered.enter_session().source().step(), 1u) << entered.DebugString();
}

// The last steps of ended jobs are on their way to the drive: what waits gets their room after
// that.
struct DrainingNode : Node {
  DrainingNode() : Node(2, Memory(), true) {
    Run("wanted", 1000, false);
    Restart(true);
    delay = [](const Action& action) { return std::holds_alternative<FlushShard>(action); };
    Run("ended-1", 2000, true);
    Run("ended-2", 2000, true);
    EXPECT_FALSE(delayed.empty());
  }
};

TEST(Evictions, ARestoreWaitsForTheFlushOfWhatGivesWay) {
  DrainingNode node;
  TestClient again = node.Connect(200, 1000);
  ASSERT_TRUE(again.Join("wanted", 0, 1));
  const uint64_t entering = again.Send(TestClient::EnterFrame(60'000));
  EXPECT_FALSE(again.Take(entering).has_value());
  node.PerformDelayed();
  const std::optional<Answer> entered = again.Take(entering);
  ASSERT_TRUE(entered.has_value());
  EXPECT_EQ(entered->frame.enter_session().source().step(), 1u) << entered->frame.DebugString();
  EXPECT_TRUE(node.Has("ended-1") && node.Has("ended-2")) << "on the drive";
}

TEST(Evictions, ARestoreWhoseRoomStaysInAFlushHearsWhoHasIt) {
  DrainingNode node;
  TestClient again = node.Connect(200, 1000);
  ASSERT_TRUE(again.Join("wanted", 0, 1));
  const uint64_t entering = again.Send(TestClient::EnterFrame(60'000));
  node.Advance(std::chrono::seconds(61));
  const std::optional<Answer> late = again.Take(entering);
  ASSERT_TRUE(late.has_value());
  EXPECT_NE(late->frame.failure().message().find("(memory.bytes_max)"), std::string::npos)
      << late->frame.DebugString();
}

TEST(Evictions, ASaveThatMayWaitGetsTheRoomAfterTheFlush) {
  DrainingNode node;
  TestClient next = node.Connect(200, 1000);
  ASSERT_TRUE(next.Join("next", 0, 1));
  const uint64_t saving = next.Send(TestClient::BeginFrame(1, kSlot, 60'000));
  EXPECT_FALSE(next.Take(saving).has_value());
  node.PerformDelayed();
  const std::optional<Answer> granted = next.Take(saving);
  ASSERT_TRUE(granted.has_value());
  EXPECT_TRUE(granted->frame.has_begin_save()) << granted->frame.DebugString();
}

TEST(Evictions, ALastStepThatIsLongOnItsWayGivesWayInTheEnd) {
  DrainingNode node;
  TestClient next = node.Connect(200, 2000);
  ASSERT_TRUE(next.Join("next", 0, 1));
  EXPECT_EQ(next.Reason(TestClient::BeginFrame(1)), Failure::REASON_NO_ROOM)
      << "it may be there in a moment";
  const uint64_t saving = next.Send(TestClient::BeginFrame(2, kSlot, 60'000));
  EXPECT_FALSE(next.Take(saving).has_value());
  node.Advance(kDrainIsAwaited + kRoomLook);
  const std::optional<Answer> granted = next.Take(saving);
  ASSERT_TRUE(granted.has_value());
  EXPECT_TRUE(granted->frame.has_begin_save()) << granted->frame.DebugString();
  EXPECT_NE(node.LastShed().find("'ckptctl pin ended-1 --step 1' would have kept it"),
            std::string::npos)
      << node.LastShed();
}

TEST(Evictions, NobodysLastCopyGoesInVain) {
  Node node(4);
  node.Run("mine-1", 1000, true);
  node.Run("mine-2", 1000, true);
  TestClient theirs = node.Connect(150, 2000);
  ASSERT_TRUE(theirs.Join("theirs", 0, 1));
  ASSERT_TRUE(theirs.Save(1));
  ASSERT_TRUE(theirs.Save(2));
  TestClient next = node.Connect(200, 1000);
  ASSERT_TRUE(next.Join("next", 0, 1));
  EXPECT_EQ(next.Reason(TestClient::BeginFrame(1, 4 * kSlot)), Failure::REASON_NO_ROOM);
  EXPECT_TRUE(node.Has("mine-1") && node.Has("mine-2"));
  EXPECT_TRUE(next.Save(2, 2 * kSlot)) << "for this both are enough";
}

// That one is within its share: its last copy does not go, and so none of mine goes for nothing.
TEST(Evictions, WhatOthersKeepIsNotCountedOn) {
  Node node(6);
  node.Run("mine", 1000, true);
  TestClient theirs = node.Connect(150, 2000);
  ASSERT_TRUE(theirs.Join("theirs", 0, 1));
  ASSERT_TRUE(theirs.Save(1, 3 * kSlot));
  node.End(theirs, true);
  TestClient next = node.Connect(200, 1000);
  ASSERT_TRUE(next.Join("next", 0, 1));
  EXPECT_EQ(next.Reason(TestClient::BeginFrame(1, 4 * kSlot)), Failure::REASON_NO_ROOM);
  EXPECT_TRUE(node.Has("mine") && node.Has("theirs"));
  EXPECT_TRUE(next.Save(2, 3 * kSlot)) << "for this mine is enough";
  EXPECT_TRUE(node.Has("theirs") && !node.Has("mine"));
}

TEST(Evictions, ARestoreHearsThatOthersJobsThatDiedGiveWayLater) {
  Node node(2, Memory(), true);
  node.Run("wanted", 1000, false);
  node.Restart(true);
  node.Run("theirs-1", 2000, false);
  node.Run("theirs-2", 2000, false);
  TestClient again = node.Connect(200, 1000);
  ASSERT_TRUE(again.Join("wanted", 0, 1));
  const std::string refused = again.Call(TestClient::EnterFrame(60'000)).failure().message();
  EXPECT_NE(refused.find("gives way ten minutes after that"), std::string::npos) << refused;
  node.Advance(kDiedLately);
  const v1::DaemonFrame entered = again.Call(TestClient::EnterFrame(60'000));
  EXPECT_EQ(entered.enter_session().source().step(), 1u) << entered.DebugString();
  EXPECT_TRUE(node.Has("theirs-1") && node.Has("theirs-2")) << "on the drive";
}

// With a record as large as a slot: a sixteenth of that is not counted.
v1::DaemonFrame SaveWithLargeRecord(TestClient& rank, Step step) {
  EXPECT_TRUE(rank.Begin(step));
  v1::ClientFrame seal = TestClient::SealFrame(step, rank.grant());
  seal.mutable_seal()->set_record_offset(0);
  seal.mutable_seal()->set_record_bytes(kSlot);
  return rank.Call(seal);
}

TEST(Evictions, WhatLargeRecordsTakeCountsAsMemoryUntilTheyAreGone) {
  Node node(4);
  TestClient rank = node.Connect(200);
  ASSERT_TRUE(rank.Join("job", 0, 1));
  const uint64_t each = 2 * kSlot - kSlot / 16;
  ASSERT_TRUE(SaveWithLargeRecord(rank, 1).has_seal());
  EXPECT_EQ(node.Daemon().memory_bytes_used(), each);
  ASSERT_TRUE(SaveWithLargeRecord(rank, 2).has_seal());
  EXPECT_EQ(node.Daemon().memory_bytes_used(), 2 * each);
  ASSERT_TRUE(SaveWithLargeRecord(rank, 3).has_seal()) << "in the place of the first";
  EXPECT_EQ(node.Daemon().memory_bytes_used(), 2 * each);
  EXPECT_EQ(node.Committed("job"), (std::vector<std::string>{"1:3", "1:2"}));
}

TEST(Evictions, ARecordForWhichThereIsNoMemoryIsRefused) {
  Node node(1);
  TestClient rank = node.Connect(200);
  ASSERT_TRUE(rank.Join("job", 0, 1));
  EXPECT_EQ(SaveWithLargeRecord(rank, 1).failure().reason(), Failure::REASON_NO_ROOM);
  EXPECT_EQ(node.Daemon().memory_bytes_used(), kSlot);
  EXPECT_TRUE(rank.Save(2)) << "with a small one";
}

// Nobody's copy would help: the memory is there, and the file system says no.
TEST(Evictions, ASlotThatCannotBeMadeCostsNobodyItsLastCopy) {
  Node node(4);
  node.Run("mine", 1000, true);
  node.fail = [](const Action& action) {
    return std::holds_alternative<CreateSlot>(action) ? absl::UnavailableError("EIO")
                                                      : absl::OkStatus();
  };
  TestClient next = node.Connect(200);
  ASSERT_TRUE(next.Join("next", 0, 1));
  EXPECT_EQ(next.Reason(TestClient::BeginFrame(1)), Failure::REASON_NO_ROOM);
  EXPECT_TRUE(node.Has("mine"));
}

TEST(Evictions, AUserHasNoMoreThanItsLimit) {
  Node node(10, [](v1::DaemonConfig& c) {
    Memory()(c);
    c.mutable_memory()->set_bytes_per_uid_max(3 * kSlot);
  });
  node.Run("ended", 1000, true);
  TestClient rank = node.Connect(200, 1000);
  ASSERT_TRUE(rank.Join("job", 0, 2));
  TestClient second = node.Connect(201, 1000);
  ASSERT_TRUE(second.Join("job", 1, 2));
  for (Step step = 1; step <= 3; ++step) {
    ASSERT_TRUE(rank.Save(step)) << step;
  }
  EXPECT_FALSE(node.Has("ended")) << "its user's own new run takes its place";
  const v1::DaemonFrame refused = second.Call(TestClient::BeginFrame(3));
  EXPECT_EQ(refused.failure().reason(), Failure::REASON_NO_ROOM) << refused.DebugString();
  EXPECT_NE(refused.failure().message().find("memory.bytes_per_uid_max"), std::string::npos)
      << refused.failure().message();
  TestClient other = node.Connect(202, 2000);
  ASSERT_TRUE(other.Join("others", 0, 1));
  EXPECT_TRUE(other.Save(1)) << "the node has room for others";
  EXPECT_EQ(rank.Reason(TestClient::BeginFrame(9, 4 * kSlot)), Failure::REASON_TOO_LARGE);
}

}  // namespace
}  // namespace holdfast::testing
