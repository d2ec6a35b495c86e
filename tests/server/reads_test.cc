// Attach, holds, and copies that turn out bad (docs/protocol.md §3).
#include "tests/server/core_harness.h"

namespace holdfast::testing {
namespace {

using v1::Failure;

struct OneRank {
  CoreHarness h;
  TestClient a = h.Connect(100);
  OneRank() {
    EXPECT_TRUE(a.Join("job", 0, 1));
    EXPECT_TRUE(a.Save(1));
    EXPECT_TRUE(a.Save(2));
  }
  static v1::ClientFrame AttachFrame(std::optional<CheckpointId> wanted = std::nullopt,
                                     const std::string& job = "job", Rank rank = 0) {
    v1::ClientFrame frame;
    frame.mutable_attach()->set_job(job);
    frame.mutable_attach()->set_rank(rank);
    if (wanted) {
      frame.mutable_attach()->set_choice(v1::Attach::CHOICE_STEP);
      frame.mutable_attach()->set_step(wanted->step);
      frame.mutable_attach()->set_attempt(wanted->attempt);
    }
    return frame;
  }
};

TEST(Reads, AttachGivesACommittedShardAndNotesTheReaderFirst) {
  OneRank t;
  TestClient reader = t.h.Connect(200);
  t.h.delay = [](const Action& action) { return std::holds_alternative<WriteNote>(action); };
  const uint64_t id = reader.Send(OneRank::AttachFrame());
  EXPECT_FALSE(reader.Take(id));
  t.h.PerformDelayed();
  const auto answer = reader.Take(id);
  ASSERT_TRUE(answer);
  EXPECT_EQ(answer->frame.attach().step(), 2u);
  EXPECT_EQ(answer->descriptors, Descriptors::kReadOnlyImageAndRecord);
  EXPECT_EQ(t.h.files.at(answer->slot).note.readers(0).pid(), 200);
  EXPECT_EQ(reader.Call(OneRank::AttachFrame(CheckpointId{0, 1})).attach().step(), 1u);
  EXPECT_EQ(reader.Call(OneRank::AttachFrame(CheckpointId{1, 1})).attach().step(), 1u);
  EXPECT_TRUE(reader.Call(OneRank::AttachFrame(CheckpointId{0, 7})).has_failure());
  EXPECT_EQ(reader.Reason(OneRank::AttachFrame(std::nullopt, "job", 5)), Failure::REASON_TOPOLOGY);
  EXPECT_TRUE(reader.Call(OneRank::AttachFrame(std::nullopt, "none")).has_failure());
  TestClient stranger = t.h.Connect(201, 2000);
  EXPECT_EQ(stranger.Reason(OneRank::AttachFrame()), Failure::REASON_OTHER_OWNER);
  TestClient root = t.h.Connect(202, 0);
  EXPECT_EQ(root.Call(OneRank::AttachFrame()).attach().step(), 2u);
}

absl::Status FailReading(const Action& action, const absl::Status& with) {
  const auto* reply = std::get_if<SendReply>(&action);
  return reply != nullptr && reply->descriptors == Descriptors::kReadOnlyImageAndRecord
             ? with
             : absl::OkStatus();
}

TEST(Reads, DescriptorsThatCannotBeHadLeaveNoHold) {
  OneRank t;
  TestClient reader = t.h.Connect(200);
  t.h.fail = [](const Action& x) { return FailReading(x, absl::ResourceExhaustedError("fds")); };
  v1::DaemonFrame refused = reader.Call(OneRank::AttachFrame());
  EXPECT_EQ(refused.failure().code(), static_cast<int>(absl::StatusCode::kUnavailable));
  EXPECT_EQ(t.h.Committed("job").front(), "1:2") << "the copy is as good as before";
  t.h.fail = [](const Action& x) { return FailReading(x, absl::CancelledError("gone")); };
  reader.Send(OneRank::AttachFrame());
  for (const auto& [id, file] : t.h.files) {
    EXPECT_EQ(file.note.readers_size(), 0);
  }
  t.h.fail = [](const Action& x) { return FailReading(x, absl::DataLossError("cut short")); };
  refused = reader.Call(OneRank::AttachFrame());
  EXPECT_EQ(refused.failure().reason(), Failure::REASON_UNREADABLE);
  t.h.fail = nullptr;
  EXPECT_EQ(reader.Call(OneRank::AttachFrame()).attach().step(), 1u) << "step 2 is known to be bad";
}

// The daemon died before the descriptors were passed, or the client never heard that they were: it
// names the hold that it may have.
TEST(Reads, AHoldIsLetGoByItsNameAlsoAfterARestart) {
  OneRank t;
  TestClient reader = t.h.Connect(200);
  const v1::Source source = reader.Call(OneRank::AttachFrame()).attach();
  ASSERT_EQ(t.h.files.at(source.slot()).note.readers(0).hold(), source.hold());
  t.h.Restart();
  TestClient again = t.h.Connect(200);
  v1::Source other = source;
  other.set_hold(source.hold() + 1000);
  again.Release(other);
  EXPECT_EQ(t.h.files.at(source.slot()).note.readers_size(), 1) << "that is another one";
  TestClient stranger = t.h.Connect(201);
  stranger.Release(source);
  EXPECT_EQ(t.h.files.at(source.slot()).note.readers_size(), 1) << "of another process";
  again.Release(source);
  EXPECT_EQ(t.h.files.at(source.slot()).note.readers_size(), 0);
}

TEST(Reads, NobodyForgetsAHoldThatTheNoteStillNames) {
  OneRank t;
  TestClient reader = t.h.Connect(200);
  const v1::Source source = reader.Call(OneRank::AttachFrame()).attach();
  t.h.delay = [](const Action& action) { return std::holds_alternative<WriteNote>(action); };
  v1::ClientFrame release;
  release.mutable_release_read()->set_hold(source.hold());
  const uint64_t id = reader.Send(release);
  EXPECT_FALSE(reader.Take(id));
  t.h.PerformDelayed();
  EXPECT_FALSE(reader.Take(id)->frame.has_failure());
  EXPECT_EQ(t.h.files.at(source.slot()).note.readers_size(), 0);
}

TEST(Reads, ACopyWhoseFileIsGoneIsNotPromised) {
  OneRank t;
  const SlotId slot = t.a.grant().slot();
  t.h.Feed(SlotFileGone{slot + 100});
  EXPECT_EQ(t.h.Committed("job").front(), "1:2");
  t.h.Feed(SlotFileGone{slot});
  EXPECT_EQ(t.h.Committed("job"), std::vector<std::string>{"1:1"});
  for (Step step = 3; step < 8; ++step) {
    ASSERT_TRUE(t.a.Save(step));
    EXPECT_NE(t.a.grant().slot(), slot) << "it is not filled again";
  }
}

TEST(Reads, AHoldNeedsANameOfItsOwn) {
  OneRank t;
  TestClient reader = t.h.Connect(200);
  v1::ClientFrame nameless = OneRank::AttachFrame();
  nameless.set_id(900);
  t.h.Feed(ClientRequest{reader.connection(), nameless});
  EXPECT_EQ(reader.Take(900)->frame.failure().code(),
            static_cast<int>(absl::StatusCode::kInvalidArgument));
  v1::ClientFrame taken = OneRank::AttachFrame();
  taken.set_id(901);
  taken.mutable_attach()->set_hold(reader.Call(OneRank::AttachFrame()).attach().hold());
  t.h.Feed(ClientRequest{reader.connection(), taken});
  EXPECT_EQ(reader.Take(901)->frame.failure().code(),
            static_cast<int>(absl::StatusCode::kInvalidArgument));
}

// Whoever called a copy bad may be the one that is wrong: a verification tells.
TEST(Reads, ACopyThatProvesRightIsUsedAgain) {
  OneRank t;
  t.h.Kill(t.a);
  TestClient a = t.h.Connect(110);
  ASSERT_TRUE(a.Join("job", 0, 1));
  v1::DaemonFrame offered = a.Call(TestClient::EnterFrame());
  const v1::Source newest = offered.enter_session().source();
  ASSERT_EQ(newest.step(), 2u);
  offered = a.Call(TestClient::ReportFrame(offered.enter_session(), false, true));
  const v1::Source older = offered.enter_session().source();
  ASSERT_EQ(older.step(), 1u);
  const v1::DaemonFrame last =
      a.Call(TestClient::ReportFrame(offered.enter_session(), false, true));
  EXPECT_EQ(last.failure().reason(), Failure::REASON_UNREADABLE);
  EXPECT_NE(last.failure().message().find("ckptctl verify job --all"), std::string::npos);
  t.h.Feed(CopyFoundGood{newest.slot(), newest.generation() + 1});  // of another filling
  EXPECT_TRUE(t.h.Committed("job").empty());
  t.h.Feed(CopyFoundGood{newest.slot(), newest.generation()});
  EXPECT_EQ(t.h.Committed("job"), std::vector<std::string>{"1:2"});
  EXPECT_EQ(a.Call(TestClient::EnterFrame()).enter_session().step(), 2u);
}

TEST(Reads, ASessionFallsBackAtOnceWhenAFileCannotBeOpened) {
  OneRank t;
  t.h.Kill(t.a);
  TestClient a = t.h.Connect(110);
  ASSERT_TRUE(a.Join("job", 0, 1));
  std::optional<SlotId> gone;
  t.h.fail = [&](const Action& x) {
    const auto* reply = std::get_if<SendReply>(&x);
    if (reply == nullptr || reply->descriptors != Descriptors::kReadOnlyImageAndRecord) {
      return absl::OkStatus();
    }
    gone = gone.value_or(reply->slot);
    return reply->slot == *gone ? absl::NotFoundError("no such file") : absl::OkStatus();
  };
  const v1::DaemonFrame offered = a.Call(TestClient::EnterFrame());
  EXPECT_EQ(offered.enter_session().step(), 1u);
  EXPECT_TRUE(
      a.Call(TestClient::ReportFrame(offered.enter_session(), true)).enter_session().done());
  EXPECT_EQ(t.h.files.at(*gone).note.readers_size(), 0);
}

TEST(Reads, ASessionEndsAtOnceWhenDescriptorsRunOutAndTheNextOneHasTheStep) {
  OneRank t;
  t.h.Kill(t.a);
  TestClient a = t.h.Connect(110);
  ASSERT_TRUE(a.Join("job", 0, 1));
  t.h.fail = [](const Action& x) { return FailReading(x, absl::ResourceExhaustedError("fds")); };
  EXPECT_EQ(a.Call(TestClient::EnterFrame()).failure().code(),
            static_cast<int>(absl::StatusCode::kUnavailable));
  t.h.fail = nullptr;
  EXPECT_EQ(a.Call(TestClient::EnterFrame()).enter_session().step(), 2u);
}

TEST(Reads, ANoteThatCannotBeWrittenGivesNoDescriptors) {
  OneRank t;
  TestClient reader = t.h.Connect(200);
  t.h.fail = [](const Action& x) {
    return std::holds_alternative<WriteNote>(x) ? absl::ResourceExhaustedError("full")
                                                : absl::OkStatus();
  };
  EXPECT_EQ(reader.Call(OneRank::AttachFrame()).failure().code(),
            static_cast<int>(absl::StatusCode::kUnavailable));
  EXPECT_EQ(t.a.Call(TestClient::BeginFrame(3)).failure().code(),
            static_cast<int>(absl::StatusCode::kUnavailable));
  t.h.fail = nullptr;
  EXPECT_EQ(reader.Call(OneRank::AttachFrame()).attach().step(), 2u);
  EXPECT_TRUE(t.a.Save(4));
}

TEST(Reads, HoldsAreCountedPerProcess) {
  OneRank t;
  TestClient reader = t.h.Connect(200);
  const v1::Source source = reader.Call(OneRank::AttachFrame()).attach();
  const v1::Source again = reader.Call(OneRank::AttachFrame()).attach();
  v1::ClientFrame confirm;
  confirm.mutable_confirm_read()->set_slot(source.slot());
  confirm.mutable_confirm_read()->set_generation(source.generation());
  reader.Release(source);
  reader.Release(source);  // once is enough, and twice no more
  EXPECT_FALSE(reader.Call(confirm).has_failure());
  reader.Release(again);
  EXPECT_TRUE(reader.Call(confirm).has_failure());
  TestClient other = t.h.Connect(201);
  EXPECT_TRUE(other.Call(confirm).has_failure());
}

TEST(Reads, HoldsOutliveTheConnectionAndEndWithTheProcess) {
  OneRank t;
  TestClient reader = t.h.Connect(200);
  const v1::Source source = reader.Call(OneRank::AttachFrame()).attach();
  t.h.Close(reader);
  for (Step step = 3; step < 9; ++step) {
    ASSERT_TRUE(t.a.Save(step));
    EXPECT_NE(t.a.grant().slot(), source.slot());
  }
  t.h.living.erase(reader.process());
  t.h.Feed(ProcessEnded{reader.process()});
  std::set<uint32_t> used;
  for (Step step = 9; step < 15; ++step) {
    ASSERT_TRUE(t.a.Save(step));
    used.insert(t.a.grant().slot());
  }
  EXPECT_EQ(used.count(source.slot()), 1u);
}

TEST(Reads, ReadersOfASlotAreLimited) {
  CoreHarness h([](v1::DaemonConfig& config) {
    config.mutable_socket()->set_requests_per_connection_max(0);
  });
  TestClient a = h.Connect(100);
  ASSERT_TRUE(a.Join("job", 0, 1));
  ASSERT_TRUE(a.Save(1));
  TestClient reader = h.Connect(200);
  for (int i = 0; i < 256; ++i) {
    ASSERT_FALSE(reader.Call(OneRank::AttachFrame()).has_failure());
  }
  EXPECT_EQ(reader.Call(OneRank::AttachFrame()).failure().code(),
            static_cast<int>(absl::StatusCode::kResourceExhausted));
}

TEST(Reads, ACopyThatAScrubFoundBadIsNotOfferedAndGoesFirst) {
  OneRank t;
  const uint32_t newest = t.a.grant().slot();
  t.h.Feed(CopyFoundBad{newest, t.a.grant().generation() + 1, "of another filling"});
  EXPECT_EQ(t.h.Committed("job").front(), "1:2");
  t.h.Feed(CopyFoundBad{newest, t.a.grant().generation(), "block 3 differs"});
  EXPECT_EQ(t.h.Committed("job").front(), "1:1");
  TestClient reader = t.h.Connect(200);
  EXPECT_EQ(reader.Call(OneRank::AttachFrame()).attach().step(), 1u);
  ASSERT_TRUE(t.a.Save(3));
  ASSERT_TRUE(t.a.Save(4));
  EXPECT_EQ(t.h.Committed("job"), (std::vector<std::string>{"1:4", "1:3", "1:1"}));
}

TEST(Reads, AProcessThatEndsWithItsSocketInheritedIsGone) {
  OneRank t;
  t.h.living.erase(t.a.process());
  t.h.Feed(ProcessEnded{t.a.process()});  // a child keeps the socket open
  ASSERT_EQ(t.h.closed.size(), 1u);
  EXPECT_EQ(t.h.closed[0], t.a.connection());
  t.h.Feed(ClientRequest{t.a.connection(), TestClient::BeginFrame(3)});
  t.h.Feed(ConnectionClosed{t.a.connection()});
  TestClient b = t.h.Connect(101);
  ASSERT_TRUE(b.Join("job", 0, 1));
}

}  // namespace
}  // namespace holdfast::testing
