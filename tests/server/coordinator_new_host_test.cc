// A host that takes a job over, with what the one before it had written: what it may not give away,
// and whom it names to the next.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "base/attempts.h"
#include "server/node_ranges.h"
#include "tests/server/nodes_fixture.h"

namespace holdfast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsSupersetOf;

// The state names the members of the node that wrote it. Which ranks the others have they tell.
TEST_F(NodesTest, ANewCoordinatorGivesNoRankAwayThatASilentNodeMayHave) {
  TwoRanks();
  NodeNames nodes("c");
  TakeOver(nodes, false);
  const NodeId a = nodes.Number("a");
  const NodeId b = nodes.Number("b");
  NodeArrived first;
  first.seats = {Seat(a, 0, std::nullopt)};
  Say(a, first);
  Join(a, 1, 2);
  ASSERT_NE(Answer<Refused>(token_), nullptr) << "b has not been heard of";
  EXPECT_THAT(Answer<Refused>(token_)->failure.message, HasSubstr(" on b, "));
  JoinAsked patient;
  patient.token = ++token_;
  patient.connection = token_;
  patient.caller = {Process(a, 1, 1), 1000, 1000};
  patient.rank = 1;
  patient.world_size = 2;
  patient.launch = "one";
  patient.may_wait = true;
  Say(a, patient);
  EXPECT_EQ(Answer<JoinAccepted>(token_), nullptr);
  Say(b, NodeLeft{true, "its lease has ended"});
  EXPECT_NE(Answer<JoinAccepted>(patient.token), nullptr);
}

// The node that had the rank is gone and cannot tell what it saved: another process that took its
// place in the same attempt would save other bytes under the same names.
class ReplacedUnheardTest : public NodesTest {
 protected:
  // b had rank 1, and a new host never hears of it.
  void LoseTheHostAndB(const std::string& launch, bool committed) {
    Join(kHere, 0, 2, launch);
    Join(b_, 1, 2, launch);
    if (committed) {
      SaveBoth(1);
      ASSERT_TRUE(Committed(1));
    } else {
      Save(b_, 1, 1);
    }
    TakeOver(elsewhere_, false);
    Say(old_host_, NodeArrived{{}, {Seat(old_host_, 0, 1)}});
    Say(lost_, NodeLeft{true, "it is not a member of the cluster"});
    out_.clear();
  }

  NodeNames elsewhere_{"c"};
  const NodeId old_host_ = elsewhere_.Number("a");
  const NodeId lost_ = elsewhere_.Number("b");
};

TEST_F(ReplacedUnheardTest, OpensTheNextAttempt) {
  for (const bool committed : {true, false}) {
    SCOPED_TRACE(committed);
    settings_.nodes = &nodes_;
    MakeCoordinator();
    job_->SetOpenedHere();
    LoseTheHostAndB("", committed);
    const RequestToken asked = Join(kHere, 1, 2, "");
    const JoinAccepted* accepted = Answer<JoinAccepted>(asked);
    ASSERT_NE(accepted, nullptr);
    EXPECT_EQ(accepted->attempt, 2u);
  }
}

TEST_F(ReplacedUnheardTest, OfTheSameLaunchIsRefused) {
  LoseTheHostAndB("one", true);
  const Refused* refused = Answer<Refused>(Join(kHere, 1, 2, "one"));
  ASSERT_NE(refused, nullptr);
  EXPECT_THAT(refused->failure.message, HasSubstr("start all ranks again"));
}

TEST_F(NodesTest, ANewCoordinatorLetsANewLaunchInWhoeverIsSilent) {
  TwoRanks();
  NodeNames nodes("c");
  TakeOver(nodes, false);
  const NodeId a = nodes.Number("a");
  EXPECT_NE(Answer<JoinAccepted>(Join(a, 0, 3, "two", 1)), nullptr);
  EXPECT_NE(Answer<JoinAccepted>(Join(a, 1, 3, "two", 1)), nullptr)
      << "of an attempt that the silent node cannot know of";
  EXPECT_NE(Answer<JoinAccepted>(Join(a, 2, 3, "two", 1)), nullptr);
}

// Of an attempt that has committed nothing not all ranks need have been there. Those that were are
// named to the next host: who ended before it came nobody else tells it of.
class ReplacedBeforeTest : public NodesTest {
 protected:
  // Rank 1, on b, has saved a step; nothing is committed.
  void StartWithoutRankTwo(const std::string& launch) {
    Join(kHere, 0, 3, launch);
    Join(b_, 1, 3, launch);
    Save(b_, 1, 1);
  }
  // Rank 1's process has ended; rank 2 never came. A new host has heard both nodes.
  void EndRankOneThenLoseTheHost(const std::string& launch) {
    StartWithoutRankTwo(launch);
    Say(b_, SeatLost{1, 1, Process(b_, 1), 0, SeatLost::How::kProcessEnded});
    LoseTheHost();
  }
  void LoseTheHost() {
    TakeOver(elsewhere_, false);
    Say(old_host_, NodeArrived{{}, {Seat(old_host_, 0, 1)}});
    Say(new_b_, NodeArrived{});
    out_.clear();
  }

  // Rank 2, on b, is let in: that is written, and its host lost before it heard so.
  void LoseTheHostBeforeRankTwoHears(const std::string& launch) {
    StartWithoutRankTwo(launch);
    agrees_ = false;
    EXPECT_EQ(Answer<JoinAccepted>(Join(b_, 2, 3, launch)), nullptr);
    const v1::JobState agreed = written_;
    LoseTheHost();
    agrees_ = true;
    MakeCoordinator();
    ASSERT_TRUE(job_->Load(agreed).ok());
    Say(old_host_, NodeArrived{{}, {Seat(old_host_, 0, 1)}});
    Say(new_b_, NodeArrived{{}, {Seat(new_b_, 1, 1)}});
  }

  NodeNames elsewhere_{"c"};
  const NodeId old_host_ = elsewhere_.Number("a");
  const NodeId new_b_ = elsewhere_.Number("b");
};

TEST_F(ReplacedBeforeTest, OfTheSameLaunchIsRefused) {
  EndRankOneThenLoseTheHost("one");
  const Refused* refused = Answer<Refused>(Join(kHere, 1, 3, "one", 1));
  ASSERT_NE(refused, nullptr);
  EXPECT_THAT(refused->failure.message, HasSubstr("start all ranks again"));
  EXPECT_NE(Answer<JoinAccepted>(Join(kHere, 2, 3, "one")), nullptr) << "it never was in it";
}

TEST_F(ReplacedBeforeTest, OpensTheNextAttempt) {
  EndRankOneThenLoseTheHost("");
  const JoinAccepted* accepted = Answer<JoinAccepted>(Join(kHere, 1, 3, "", 1));
  ASSERT_NE(accepted, nullptr);
  EXPECT_EQ(accepted->attempt, 2u);
}

// Its node has a rank already: nothing else would have the state written.
TEST_F(ReplacedBeforeTest, WhoComesWhenOthersSaveIsNamedBeforeItHearsThatItIsIn) {
  Join(kHere, 0, 4, "one");
  Join(b_, 1, 4, "one");
  Save(b_, 1, 1);
  agrees_ = false;
  const RequestToken late = Join(b_, 2, 4, "one");
  EXPECT_EQ(Answer<JoinAccepted>(late), nullptr);
  agrees_ = true;
  Say(kHere, StateWritten{written_.version(), absl::OkStatus()});
  EXPECT_NE(Answer<JoinAccepted>(late), nullptr);
  Say(b_, SeatLost{1, 2, Process(b_, 2), 0, SeatLost::How::kProcessEnded});
  LoseTheHost();
  EXPECT_NE(Answer<Refused>(Join(kHere, 2, 4, "one", 1)), nullptr);
  // The next host but one knows it, too.
  LoseTheHost();
  EXPECT_NE(Answer<Refused>(Join(kHere, 2, 4, "one", 1)), nullptr);
}

// It was let in, and its host was lost before it heard so: it has begun nothing, and asks the next.
TEST_F(ReplacedBeforeTest, WhoWasNotToldYetMayAskTheNextHost) {
  for (const std::string launch : {"one", ""}) {
    SCOPED_TRACE(launch);
    settings_.nodes = &nodes_;
    MakeCoordinator();
    job_->SetOpenedHere();
    LoseTheHostBeforeRankTwoHears(launch);
    const JoinAccepted* accepted = Answer<JoinAccepted>(Join(new_b_, 2, 3, launch));
    ASSERT_NE(accepted, nullptr);
    EXPECT_EQ(accepted->attempt, 1u);
  }
}

// Nor does the next one forget it that hears nothing of it.
TEST_F(ReplacedBeforeTest, WhoWasNotToldYetMayAskTheHostAfterThatOne) {
  LoseTheHostBeforeRankTwoHears("one");
  Say(kHere, SetPolicyAsked{});  // which is written
  const v1::JobState agreed = written_;
  for (const bool itself : {true, false}) {
    SCOPED_TRACE(itself);
    MakeCoordinator();
    ASSERT_TRUE(job_->Load(agreed).ok());
    Say(old_host_, NodeArrived{{}, {Seat(old_host_, 0, 1)}});
    Say(new_b_, NodeArrived{{}, {Seat(new_b_, 1, 1)}});
    const RequestToken asked = Join(new_b_, 2, 3, "one", itself ? 0 : 1);
    EXPECT_EQ(Answer<JoinAccepted>(asked) != nullptr, itself);
    EXPECT_EQ(Answer<Refused>(asked) != nullptr, !itself);
  }
}

TEST_F(ReplacedBeforeTest, AnotherProcessDoesNotGetTheRankOfWhoWasNotTold) {
  LoseTheHostBeforeRankTwoHears("one");
  EXPECT_NE(Answer<Refused>(Join(new_b_, 2, 3, "one", 1)), nullptr);
}

// Then it may have begun something: who was told is known by its process no more.
TEST_F(ReplacedBeforeTest, WhoWasToldIsWrittenAsToldSoonAfter) {
  StartWithoutRankTwo("one");
  agrees_ = false;
  Join(b_, 2, 3, "one");
  ASSERT_EQ(written_.attempts(0).untold_size(), 1);
  EXPECT_EQ(written_.attempts(0).untold(0).rank(), 2u);
  EXPECT_EQ(written_.attempts(0).untold(0).node(), "b");
  agrees_ = true;
  Say(kHere, StateWritten{written_.version(), absl::OkStatus()});
  now_ = now_ + kStateLaziness;
  Say(kHere, WakeUp{});
  EXPECT_EQ(written_.attempts(0).untold_size(), 0);
  EXPECT_EQ(written_.attempts(0).joined(), "\x07");
}

// Who had joined before the attempt decided under this host, which had not heard of it then.
TEST_F(ReplacedBeforeTest, WhoIsHeardOfLaterIsNamed) {
  Join(kHere, 0, 2, "one");
  Join(b_, 1, 2, "one");
  TakeOver(elsewhere_, false);
  Say(old_host_, NodeArrived{{}, {Seat(old_host_, 0, std::nullopt)}});
  Begin(old_host_, 0, 1);
  ASSERT_EQ(written_.attempts(0).joined(), "\x01");
  Say(new_b_, NodeArrived{{}, {Seat(new_b_, 1, std::nullopt)}});
  EXPECT_EQ(written_.attempts(0).joined(), "\x03");
}

// Who joined is not written for ever: an attempt that has committed something had all its ranks.
TEST_F(ReplacedBeforeTest, NobodyIsNamedWhenAStepIsCommitted) {
  TwoRanks();
  Begin(kHere, 0, 1);
  EXPECT_EQ(written_.attempts(0).joined(), "\x03");
  Begin(b_, 1, 1);
  Seal(kHere, 0, 1);
  Seal(b_, 1, 1);
  ASSERT_TRUE(Committed(1));
  EXPECT_EQ(written_.attempts(0).joined(), "");
}

// That they are told again is nothing to be written.
TEST_F(ReplacedBeforeTest, WhoWasToldBeforeIsNotWrittenAgain) {
  Join(kHere, 0, 2, "one");
  JoinAsked again = Joining(b_, 1, 2, "one", 0);
  Ask(b_, again);
  Save(b_, 1, 1);
  now_ = now_ + kStateLaziness;
  Say(kHere, WakeUp{});
  const uint64_t version = written_.version();
  Say(b_, SeatLost{1, 1, Process(b_, 1), again.connection, SeatLost::How::kDisconnected});
  again.attempt = 1;
  again.connection = ++token_;
  ASSERT_NE(Answer<JoinAccepted>(Ask(b_, again)), nullptr);
  now_ = now_ + kStateLaziness;
  Say(kHere, WakeUp{});
  EXPECT_EQ(written_.version(), version);
}

// Where the states were lost, an attempt of the same number may have had more ranks once.
TEST_F(ReplacedBeforeTest, AFoundShardOfARankBeyondTheWorldLeavesAStateThatCanBeLoaded) {
  TwoRanks();
  Begin(kHere, 0, 1);
  FoundShard found = Found(6, 1);
  found.copy.world_size = 8;
  found.writer = Process(c_, 6);
  NodeArrived arrived;
  arrived.shards = {found};
  Say(c_, arrived);
  Say(kHere, SetPolicyAsked{});  // which is written
  EXPECT_EQ(written_.attempts(0).joined(), "\x03");
  const v1::JobState last = written_;
  MakeCoordinator();
  EXPECT_TRUE(job_->Load(last).ok());
}

TEST_F(ReplacedBeforeTest, RanksBeyondTheWorldAreNoState) {
  TwoRanks();
  Begin(kHere, 0, 1);
  const v1::JobState good = written_;
  const auto loads = [&](const std::string& joined, const std::vector<uint32_t>& untold,
                         const std::string& node) {
    v1::JobState state = good;
    state.mutable_attempts(0)->set_joined(joined);
    for (const uint32_t rank : untold) {
      v1::Newcomer& newcomer = *state.mutable_attempts(0)->add_untold();
      newcomer.set_rank(rank);
      newcomer.set_node(node);
    }
    MakeCoordinator();
    return job_->Load(state);
  };
  EXPECT_TRUE(loads("\x01", {0}, "b").ok());
  EXPECT_TRUE(loads(std::string("\x03\x00\x00", 3), {}, "").ok());
  EXPECT_TRUE(absl::IsDataLoss(loads("\x04", {}, "")));
  EXPECT_TRUE(absl::IsDataLoss(loads(std::string("\x03\x01", 2), {}, "")));
  EXPECT_TRUE(absl::IsDataLoss(loads("\x01", {1}, "b")));
  EXPECT_TRUE(absl::IsDataLoss(loads("\x01", {0}, "../b")));
  std::vector<uint32_t> many(kUntoldMax + 1);
  EXPECT_TRUE(absl::IsDataLoss(loads("\x01", many, "b"))) << "one rank that is named often";
}

// Whoever may write into the job's directory can make a file of any name.
TEST_F(NodesTest, WhereTheNumbersOfAttemptsEndNoneIsOpened) {
  TwoRanks();
  SaveBoth(1);
  CopiesFound found;
  found.tier = TierKind::kRemote;
  found.began = now_;
  found.highest_claim = kAttemptMax;
  Say(kHere, found);
  const Refused* refused = Answer<Refused>(Join(kHere, 0, 2, "two", 1));
  ASSERT_NE(refused, nullptr);
  EXPECT_THAT(refused->failure.message, HasSubstr("said to have had 1000000000000 attempts"));
  EXPECT_EQ(job_->attempt(), 1u);
}

// Whom the state before named, and who has not told yet what it has, the new host's own node among
// them: should this host be lost now, the next one must know for whom to wait.
TEST_F(NodesTest, ANewHostNamesWhoHasStillToTellItsOwnNodeAsWell) {
  TwoRanks();
  SaveBoth(1);
  Say(c_, FoundOnNvme({{0, 1}}));
  const auto named = [&] {
    Say(kHere, SetPolicyAsked{});  // which is written
    return NodesIn(written_.nodes());
  };
  ASSERT_THAT(named(), ElementsAre("a", "b", "c"));
  NodeNames of_b("b");
  const NodeId c = of_b.Number("c");
  settings_.nodes = &of_b;
  MakeCoordinator();
  ASSERT_TRUE(job_->Load(written_).ok());
  EXPECT_THAT(named(), IsSupersetOf({"a", "b", "c"}));
  Say(kHere, NodeArrived{});
  Say(c, NodeArrived{});
  EXPECT_THAT(named(), IsSupersetOf({"b", "c"})) << "their drives have still to be read";
  for (const NodeId node : {kHere, c}) {
    Say(node, InventoryState{TierKind::kNvme, InventoryState::Kind::kKnown, ""});
  }
  EXPECT_THAT(named(), ElementsAre("a")) << "there is nothing on the others";
}

}  // namespace
}  // namespace holdfast
