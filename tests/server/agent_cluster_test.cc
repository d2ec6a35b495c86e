// The agent of a node of a cluster: it works without the coordinators of its jobs, by messages
// alone (docs/protocol.md §16).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <variant>
#include <vector>

#include "absl/strings/match.h"
#include "server/agent.h"
#include "tests/server/agent_world.h"

namespace holdfast {
namespace {

using std::chrono::milliseconds;

TEST_F(AgentClusterTest, WhatIsFoundAtStartIsNoticedAndHostedByNobody) {
  started_.jobs.push_back(State(x_, "job", 3));
  AddSlot(Copy(y_, 10, 0, "other"));
  Start();
  EXPECT_EQ(Hosted(x_), nullptr);
  EXPECT_EQ(agent_->jobs().size(), 2u);
  EXPECT_EQ(Notices<JobNoticed>().size(), 2u);
  EXPECT_TRUE(Take<ScanRemote>().empty());
  EXPECT_EQ(agent_->KeptState("job")->version(), 3u);
  // Of a job that only copies tell of there is a state that says so.
  ASSERT_TRUE(agent_->KeptState("other").has_value());
  EXPECT_EQ(agent_->KeptState("other")->job_uuid(), y_.ToBytes());
  EXPECT_TRUE(agent_->KeptState("other")->history_unknown());
  DriveScanned({Found(Uuid(3), {})});
  EXPECT_TRUE(Said(x_).empty()) << "nobody who could hear it is known";
}

TEST_F(AgentClusterTest, StatesThatContradictThemselvesAreLeftAlone) {
  v1::JobState bad = State(x_, "job", 3);
  bad.add_attempts()->set_attempt(1);  // of no ranks
  started_.jobs.push_back(bad);
  Start();
  EXPECT_TRUE(agent_->jobs().empty());
  EXPECT_EQ(Problems().size(), 1u);
  agent_->KeepState(bad, Time());
  Settle();
  EXPECT_TRUE(Take<WriteJobState>().empty());
}

TEST_F(AgentClusterTest, AHostIsToldAllThatIsHereInOrder) {
  started_.jobs.push_back(State(x_, "job", 3));
  AddSlot(Copy(x_, 10, 0));
  AddSlot(Copy(x_, 10, 1));
  Start();
  DriveScanned({Found(x_, {OnDrive(x_, 9, 0)})});
  MeetJob host = Host(x_);
  host.ranks = {{0, {100, 1}}, {1, {101, 1}}};
  Meet(host);
  const std::vector<ToCoordinator> said = Said(x_);
  ASSERT_EQ(said.size(), 3u);
  const auto& arrived = std::get<NodeArrived>(said[0]);
  EXPECT_EQ(arrived.shards.size(), 2u);
  ASSERT_EQ(arrived.seats.size(), 2u);
  EXPECT_EQ(arrived.seats[1].process, (ProcessId{101, 1}));
  EXPECT_EQ(std::get<CopiesFound>(said[1]).copies.size(), 1u);
  EXPECT_EQ(std::get<CopiesFound>(said[1]).copies[0].record_crc, 9u);
  EXPECT_EQ(std::get<InventoryState>(said[2]).kind, InventoryState::Kind::kKnown);
  EXPECT_EQ(Take<WatchProcess>().size(), 2u);
  // It is told again, and no rank is there twice.
  Meet(host);
  EXPECT_EQ(Only<NodeArrived>(Said(x_)).at(0).seats.size(), 2u);
  // A rank that ended meanwhile is told at once.
  Feed(ProcessEnded{{101, 1}});
  EXPECT_EQ(Only<SeatLost>(Said(x_)).size(), 1u);
}

// The host and this daemon were started anew: neither knows the ranks of this node but by what they
// wrote.
TEST_F(AgentClusterTest, WhoWroteWhatIsFoundLivesHere) {
  started_.jobs.push_back(State(x_, "job", 3));
  for (const auto& [step, rank, pid] : {std::tuple{10, 0, 90}, {11, 0, 100}, {11, 1, 101}}) {
    AddSlot(Copy(x_, step, rank));
    v1::Process& writer = *started_.slots.back().note.mutable_writer();
    writer.set_pid(pid);
    writer.set_start_ticks(1);
  }
  Start();
  DriveScanned({});
  Meet(Host(x_));
  const auto arrived = Only<NodeArrived>(Said(x_)).at(0);
  ASSERT_EQ(arrived.seats.size(), 2u);
  EXPECT_EQ(arrived.seats[0].process, (ProcessId{100, 1}));
  EXPECT_EQ(arrived.seats[0].attempt, 1u);
  EXPECT_EQ(arrived.seats[1].process, (ProcessId{101, 1}));
  // One that has ended since is not taken for there by what it wrote.
  Feed(ProcessEnded{{101, 1}});
  EXPECT_EQ(Only<SeatLost>(Said(x_)).size(), 1u);
  Meet(Host(x_));
  EXPECT_EQ(Only<NodeArrived>(Said(x_)).at(0).seats.size(), 1u);
}

// This daemon was started anew while nobody can be found who hosts the job.
TEST_F(AgentClusterTest, ARankGoesOnWithoutAHostByWhatItHasSealed) {
  started_.jobs.push_back(State(x_, "job", 3));
  SealedCopy copy = Copy(x_, 10, 0);
  copy.descent = {{1, {0, 0}}};
  AddSlot(copy);
  v1::Process& writer = *started_.slots.back().note.mutable_writer();
  writer.set_pid(100);
  writer.set_start_ticks(1);
  Start();
  DriveScanned({});
  const auto join = [&](int32_t pid, Rank rank, Attempt attempt, uint32_t world_size) {
    const ConnectionId connection = Connect(pid);
    v1::ClientFrame frame;
    frame.mutable_join()->set_job("job");
    frame.mutable_join()->set_rank(rank);
    frame.mutable_join()->set_world_size(world_size);
    frame.mutable_join()->set_attempt(attempt);
    frame.mutable_join()->set_deadline_ms(60'000);
    Ask(connection, frame);
    return connection;
  };
  join(101, 0, 1, 4);  // another process
  join(100, 1, 1, 4);  // another rank
  join(100, 0, 2, 4);  // an attempt of which nothing is known here
  join(100, 0, 1, 8);
  EXPECT_TRUE(Take<SendReply>().empty()) << "they wait for the host";
  const ConnectionId rank = join(100, 0, 1, 4);
  const auto replies = Take<SendReply>();
  ASSERT_EQ(replies.size(), 1u);
  EXPECT_EQ(replies[0].frame.join().attempt(), 1u);
  EXPECT_EQ(replies[0].frame.join().last_step(), 10u);
  EXPECT_EQ(replies[0].frame.join().descent_size(), 1);
  Begin(rank, 11);
  EXPECT_EQ(Take<SendReply>().back().frame.begin_save().generation(), 1u);
  // Its host hears of it with all else.
  Meet(Host(x_));
  const auto arrived = Only<NodeArrived>(Said(x_)).at(0);
  ASSERT_EQ(arrived.seats.size(), 1u);
  EXPECT_EQ(arrived.seats[0].connection, rank);
  EXPECT_EQ(arrived.seats[0].writing, (std::set<Step>{11}));
}

TEST_F(AgentClusterTest, NobodyGoesOnInAnAttemptThatIsOver) {
  v1::JobState state = State(x_, "job", 3);
  state.set_highest_attempt(2);
  started_.jobs.push_back(state);
  AddSlot(Copy(x_, 10, 0));
  v1::Process& writer = *started_.slots.back().note.mutable_writer();
  writer.set_pid(100);
  writer.set_start_ticks(1);
  Start();
  DriveScanned({});
  const ConnectionId connection = Connect(100);
  v1::ClientFrame frame;
  frame.mutable_join()->set_job("job");
  frame.mutable_join()->set_world_size(4);
  frame.mutable_join()->set_attempt(1);
  frame.mutable_join()->set_deadline_ms(60'000);
  Ask(connection, frame);
  EXPECT_TRUE(Take<SendReply>().empty());
}

TEST_F(AgentClusterTest, DrivesThatAreStillBeingReadAreNotCalledKnown) {
  started_.jobs.push_back(State(x_, "job", 3));
  Start();
  Meet(Host(x_));
  EXPECT_TRUE(Only<InventoryState>(Said(x_)).empty());
  DriveScanned({Found(x_, {OnDrive(x_, 9, 0)})});
  const std::vector<ToCoordinator> said = Said(x_);
  ASSERT_EQ(said.size(), 2u);
  EXPECT_EQ(std::get<CopiesFound>(said[0]).copies.size(), 1u);
  EXPECT_EQ(std::get<InventoryState>(said[1]).kind, InventoryState::Kind::kKnown);
}

TEST_F(AgentClusterTest, ASeatTellsWhatItBeganAndWhatItIsWriting) {
  Start();
  DriveScanned({});
  Meet(Host(x_));
  Said(x_);
  const ConnectionId a = Seated(x_, 0, 100);
  Begin(a, 7);
  Permit(x_);
  ASSERT_EQ(Take<SendReply>().back().frame.begin_save().generation(), 1u);
  Meet(Host(x_));
  const auto arrived = Only<NodeArrived>(Said(x_)).at(0);
  ASSERT_EQ(arrived.seats.size(), 1u);
  EXPECT_EQ(arrived.seats[0].connection, a);
  EXPECT_EQ(arrived.seats[0].writing, (std::set<Step>{7}));
  EXPECT_EQ(arrived.seats[0].last_begun, std::optional<Step>(7));
  // What it was told before changes nothing.
  EXPECT_TRUE(Only<SaveAsked>(Said(x_)).empty());
}

TEST_F(AgentClusterTest, AJobThatIsNotKnownIsWantedOnceAndAskedForByAll) {
  Start();
  DriveScanned({});
  Join(Connect(100), 0);
  Join(Connect(101), 1);
  const auto wanted = Notices<JobWanted>();
  ASSERT_EQ(wanted.size(), 1u);
  EXPECT_EQ(wanted[0].name, "job");
  EXPECT_EQ(wanted[0].uid, kUser);
  EXPECT_TRUE(agent_->messages().empty());
  Meet(Host(x_));
  const std::vector<ToCoordinator> said = Said(x_);
  EXPECT_TRUE(std::holds_alternative<NodeArrived>(said.at(0)));
  EXPECT_EQ(Only<JoinAsked>(said).size(), 2u);
  EXPECT_TRUE(std::holds_alternative<JoinAsked>(said.back()));
  EXPECT_TRUE(Failures().empty());
}

TEST_F(AgentClusterTest, NobodyWaitsForAHostLongerThanItSaid) {
  Start();
  Join(Connect(100), 0);
  now_ = now_ + std::chrono::minutes(2);
  Feed(TimerFired{});
  const auto failures = Failures();
  ASSERT_EQ(failures.size(), 1u);
  EXPECT_EQ(failures[0].code(), static_cast<int>(absl::StatusCode::kUnavailable));
  // Whoever comes after that wants it anew.
  Notices<JobWanted>();
  Join(Connect(101), 1);
  EXPECT_EQ(Notices<JobWanted>().size(), 1u);
}

TEST_F(AgentClusterTest, NobodyWaitsLongerThanItSaidWhereverItWaits) {
  Start();
  Join(Connect(100), 0);  // for a minute
  now_ = now_ + std::chrono::seconds(50);
  Meet(Host(x_));
  EXPECT_EQ(Only<JoinAsked>(Said(x_)).size(), 1u);
  now_ = now_ + std::chrono::seconds(10);
  Feed(TimerFired{});
  EXPECT_EQ(Only<RequestExpired>(Said(x_)).size(), 1u);
}

// The client gives up a tenth of a second later, however soon that is.
TEST_F(AgentClusterTest, NobodyWaitsLongerForItsHostThanAShortDeadline) {
  Start();
  Join(Connect(100), 0, "job", 4750);
  now_ = now_ + milliseconds(200);
  Meet(Host(x_));
  EXPECT_EQ(Only<JoinAsked>(Said(x_)).size(), 1u);
  now_ = now_ + milliseconds(4550);
  Feed(TimerFired{});
  EXPECT_EQ(Only<RequestExpired>(Said(x_)).size(), 1u);
}

TEST_F(AgentClusterTest, NorDoReadersWaitLonger) {
  Start();
  List(Connect(100), 4750);
  List(Connect(101), 0);  // as long as a daemon needs
  now_ = now_ + milliseconds(4750);
  Feed(TimerFired{});
  EXPECT_EQ(Failures().size(), 1u);
  Meet(Host(x_));
  EXPECT_EQ(Only<ListAsked>(Said(x_)).size(), 1u);
}

TEST_F(AgentClusterTest, NorDoesAnybodyWaitLongerForTheTiersOfANodeThatIsAlone) {
  config_.clear_cluster();
  Start();
  Join(Connect(100), 0, "job", 4750);
  List(Connect(101), 4750);
  Join(Connect(102), 1, "job", 0);  // as long as a daemon needs
  now_ = now_ + milliseconds(4750);
  Feed(TimerFired{});
  EXPECT_EQ(Failures().size(), 2u) << "the drives have not been read";
  now_ = now_ + kSettle;
  Feed(TimerFired{});
  EXPECT_EQ(Failures().size(), 1u);
}

TEST_F(AgentClusterTest, AHostThatDoesNotAnswerIsNotWaitedForForEver) {
  Start();
  Meet(Host(x_));
  Said(x_);
  Join(Connect(100), 0);
  EXPECT_EQ(Only<JoinAsked>(Said(x_)).size(), 1u);
  now_ = now_ + std::chrono::minutes(1);
  Feed(TimerFired{});
  EXPECT_EQ(Only<RequestExpired>(Said(x_)).size(), 1u);
  EXPECT_TRUE(Failures().empty()) << "its host knows better what was missing";
  now_ = now_ + kHostGrace;
  Feed(TimerFired{});
  EXPECT_EQ(Only<RequestCancelled>(Said(x_)).size(), 1u);
  EXPECT_EQ(Failures().size(), 1u);
}

// It would have the rank for ever: nobody else knows that its process has ended.
TEST_F(AgentClusterTest, WhoEndedBeforeItHeardOfItsAdmissionIsToldToItsHost) {
  Start();
  Meet(Host(x_));
  Said(x_);
  const ConnectionId connection = Connect(100);
  Join(connection, 0);
  const auto asked = Only<JoinAsked>(Said(x_));
  ASSERT_EQ(asked.size(), 1u);
  Feed(ProcessEnded{{100, 1}});
  EXPECT_EQ(Only<RequestCancelled>(Said(x_)).size(), 1u);
  Take<WatchProcess>();
  JoinAccepted accepted;
  accepted.token = asked[0].token;
  accepted.attempt = 1;
  accepted.world_size = 4;
  Tell(x_, accepted);  // said before the host heard of the cancelling
  EXPECT_EQ(Only<SeatLost>(Said(x_)).size(), 1u);
  const auto watched = Take<WatchProcess>();
  ASSERT_EQ(watched.size(), 1u);
  Feed(ProcessEnded{watched[0].process});
  const auto lost = Only<SeatLost>(Said(x_));
  ASSERT_EQ(lost.size(), 1u);
  EXPECT_EQ(lost[0].how, SeatLost::How::kProcessEnded);
  EXPECT_EQ(lost[0].process.pid, 100);
}

// Its seat of the attempt that it was leaving says nothing of the one that it was let into.
TEST_F(AgentClusterTest, WhoLeftAnAttemptAndEndedBeforeItHeardOfTheNextOneIsToldToItsHost) {
  Start();
  Meet(Host(x_));
  Said(x_);
  const ConnectionId connection = Seated(x_, 0, 100);
  v1::ClientFrame leave;
  leave.mutable_join()->set_job("job");
  leave.mutable_join()->set_world_size(4);
  leave.mutable_join()->set_leave_attempt(1);
  leave.mutable_join()->set_deadline_ms(1000);
  Ask(connection, leave);
  const auto asked = Only<JoinAsked>(Said(x_));
  ASSERT_EQ(asked.size(), 1u);
  now_ = now_ + std::chrono::seconds(1) + kHostGrace;
  Feed(TimerFired{});
  now_ = now_ + kHostGrace;
  Feed(TimerFired{});
  ASSERT_EQ(Failures().size(), 1u);
  JoinAccepted accepted;
  accepted.token = asked[0].token;
  accepted.attempt = 2;
  accepted.world_size = 4;
  Tell(x_, accepted);  // said before the host heard that nobody waits for it any more
  Said(x_);
  Feed(ProcessEnded{{100, 1}});
  const auto lost = Only<SeatLost>(Said(x_));
  EXPECT_TRUE(std::any_of(lost.begin(), lost.end(), [](const SeatLost& seat) {
    return seat.attempt == 2 && seat.how == SeatLost::How::kProcessEnded;
  }));
}

// The client waits a tenth of a second longer than it says, and takes a daemon that leaves it
// without an answer for one that hangs.
TEST_F(AgentClusterTest, WhoDoesNotWaitIsAnsweredHoweverFarTheHostIs) {
  Start();
  Meet(Host(x_));
  const ConnectionId connection = Seated(x_, 0, 100);
  Failures();
  v1::ClientFrame frame;
  frame.mutable_await_save()->set_step(1);
  frame.mutable_await_save()->set_stage(v1::AwaitSave::STAGE_COMMITTED);
  frame.mutable_await_save()->set_deadline_ms(1);  // the least that a client says
  Ask(connection, frame);
  now_ = now_ + std::chrono::milliseconds(60);
  Feed(TimerFired{});
  EXPECT_EQ(Failures().size(), 1u);
  frame.mutable_await_save()->set_deadline_ms(1000);
  Ask(connection, frame);
  now_ = now_ + std::chrono::milliseconds(1000);
  Feed(TimerFired{});
  EXPECT_TRUE(Failures().empty());
  now_ = now_ + std::chrono::milliseconds(60);
  Feed(TimerFired{});
  EXPECT_EQ(Failures().size(), 1u);
}

TEST_F(AgentClusterTest, ReadersOfJobsThatOthersHostAskTheirHosts) {
  Start();
  Meet(Host(x_));
  Said(x_);
  v1::ClientFrame list;
  list.mutable_list()->set_job("job");
  list.mutable_list()->set_deadline_ms(1000);
  list.mutable_list()->set_before(true);
  list.mutable_list()->set_before_attempt(1);
  list.mutable_list()->set_before_step(7);
  Ask(Connect(100), list);
  const auto asked = Only<ListAsked>(Said(x_));
  ASSERT_EQ(asked.size(), 1u);
  EXPECT_EQ(asked[0].before, std::optional(CheckpointId{1, 7}));
  EXPECT_TRUE(asked[0].may_wait);
  EXPECT_TRUE(Failures().empty());
  Listed listed{asked[0].token, {}};
  listed.listing.add_checkpoints()->set_step(5);
  Tell(x_, listed);
  const auto replies = Take<SendReply>();
  ASSERT_EQ(replies.size(), 1u);
  EXPECT_EQ(replies[0].frame.list().checkpoints(0).step(), 5u);
}

// What its host tells is where the reader's own daemon looks, in that order; what fails is asked
// about again.
TEST_F(AgentClusterTest, AReaderGetsWhatItsHostSaysThatItsNodeHas) {
  Start();
  DriveScanned({});
  Meet(Host(x_));
  Said(x_);
  v1::ClientFrame attach;
  attach.mutable_attach()->set_job("job");
  attach.mutable_attach()->set_rank(3);
  attach.mutable_attach()->set_any_tier(true);
  attach.mutable_attach()->set_deadline_ms(10'000);
  attach.mutable_attach()->set_hold(1);
  Ask(Connect(100), attach);
  auto asked = Only<AttachAsked>(Said(x_));
  ASSERT_EQ(asked.size(), 1u);
  EXPECT_EQ(asked[0].rank, 3u);
  EXPECT_FALSE(asked[0].wanted || asked[0].again);
  // 1. Memory, as the host believes; it has just gone from there. Then nvme.
  const ShardLocated located{
      asked[0].token,
      {1, 9},
      4,
      {{TierKind::kMemory, ""}, {TierKind::kNvme, ""}, {TierKind::kRemote, ""}},
      ""};
  Tell(x_, located);
  auto opened = Take<OpenDurable>();
  ASSERT_EQ(opened.size(), 1u);
  EXPECT_EQ(opened[0].tier, TierKind::kNvme);
  EXPECT_EQ(opened[0].key.id, (ShardId{x_, 1, 9, 3}));
  EXPECT_EQ(opened[0].key.job_name, "job");
  EXPECT_EQ(opened[0].key.world_size, 4u);
  Feed(DurableOpened{opened[0].drain, absl::UnavailableError("EIO"), false, {}, nullptr});
  // 2. The host is asked for that very checkpoint again.
  asked = Only<AttachAsked>(Said(x_));
  ASSERT_EQ(asked.size(), 1u);
  EXPECT_EQ(asked[0].wanted, std::optional(CheckpointId{1, 9}));
  EXPECT_TRUE(asked[0].again);
  Tell(x_, located);
  opened = Take<OpenDurable>();
  ASSERT_EQ(opened.size(), 1u);
  EXPECT_EQ(opened[0].tier, TierKind::kRemote);
  DurableOpened done{opened[0].drain, absl::OkStatus(), false, Copy(x_, 9, 3), nullptr};
  Feed(done);
  const auto replies = Take<SendReply>();
  ASSERT_EQ(replies.size(), 1u);
  EXPECT_EQ(replies[0].frame.attach().tier(), "remote");
  EXPECT_EQ(replies[0].frame.attach().why(),
            "memory copy not readable now: it is being given up, nvme copy not readable now: EIO");
}

TEST_F(AgentClusterTest, AReaderThatGoesAwayIsNotWaitedForByItsHost) {
  Start();
  Meet(Host(x_));
  Said(x_);
  v1::ClientFrame list;
  list.mutable_list()->set_job("job");
  const ConnectionId reader = Connect(100);
  Ask(reader, list);
  const auto asked = Only<ListAsked>(Said(x_));
  ASSERT_EQ(asked.size(), 1u);
  Feed(ConnectionClosed{reader});
  const auto cancelled = Only<RequestCancelled>(Said(x_));
  ASSERT_EQ(cancelled.size(), 1u);
  EXPECT_EQ(cancelled[0].token, asked[0].token);
}

TEST_F(AgentClusterTest, ReadersHearThatThereIsNoSuchJobAndJoinsGoOnWaiting) {
  Start();
  v1::ClientFrame list;
  list.mutable_list()->set_job("job");
  Ask(Connect(100), list);
  EXPECT_EQ(Notices<JobRead>().size(), 1u);
  Join(Connect(101), 0);
  EXPECT_TRUE(Failures().empty());
  agent_->SayAbsent("job", Time());
  Settle();
  const auto failures = Failures();
  ASSERT_EQ(failures.size(), 1u);
  EXPECT_EQ(failures[0].reason(), v1::Failure::REASON_NOTHING_TO_RESTORE);
  Meet(Host(x_));
  EXPECT_EQ(Only<JoinAsked>(Said(x_)).size(), 1u);
}

// Whoever else waits, and for how long.
TEST_F(AgentClusterTest, JoinsAreSoughtAlsoWhereReadersWait) {
  Start();
  Join(Connect(100), 0, "job", 1000);
  List(Connect(101));
  EXPECT_EQ(Notices<JobWanted>().size(), 1u);
  now_ = now_ + milliseconds(1000);
  Feed(TimerFired{});
  EXPECT_EQ(Failures().size(), 1u);
  Join(Connect(102), 1);
  EXPECT_EQ(Notices<JobWanted>().size(), 1u) << "nobody seeks it any more";
}

TEST_F(AgentClusterTest, ReadersAreSoughtAlsoWhereJoinsWait) {
  Start();
  Join(Connect(100), 0);
  EXPECT_EQ(Notices<JobWanted>().size(), 1u);
  List(Connect(101));
  List(Connect(102));
  EXPECT_EQ(Notices<JobRead>().size(), 1u);
}

// Its host may believe that it has told who it is: this node has forgotten the job since, and what
// it agrees on with the others made it known again.
TEST_F(AgentClusterTest, ReadersOfAJobThatIsKnownAndNotMetAreSought) {
  Start();
  agent_->KeepState(State(x_, "job", 5), Time());
  Settle();
  Notices<JobNoticed>();
  List(Connect(100));
  EXPECT_EQ(Notices<JobRead>().size(), 1u);
  Meet(Host(x_));
  EXPECT_EQ(Only<ListAsked>(Said(x_)).size(), 1u);
}

TEST_F(AgentClusterTest, AHostThatFindsNoSuchJobSaysSo) {
  Start();
  DriveScanned({});
  agent_->BeginHosting("job", nullptr, Time());
  Settle();
  EXPECT_FALSE(agent_->IsAbsent("job")) << "the remote tier has not been read";
  RemoteScanned({});
  EXPECT_TRUE(agent_->IsAbsent("job"));
  EXPECT_EQ(Notices<JobMissed>().size(), 1u);
  v1::ClientFrame list;
  list.mutable_list()->set_job("job");
  Ask(Connect(100), list);
  const auto failures = Failures();
  ASSERT_EQ(failures.size(), 1u);
  EXPECT_EQ(failures[0].reason(), v1::Failure::REASON_NOTHING_TO_RESTORE);
}

TEST_F(AgentClusterTest, AHostWithAStateHasItsCoordinatorAtOnce) {
  AddSlot(Copy(x_, 10, 0));
  Start();
  DriveScanned({});
  Notices<JobNoticed>();
  const v1::JobState state = State(x_, "job", 5);
  agent_->BeginHosting("job", &state, Time());
  Settle();
  ASSERT_NE(Hosted(x_), nullptr);
  EXPECT_TRUE(Hosted(x_)->AllCheckpoints().empty()) << "it hears of this node as of any other";
  const auto opened = Notices<JobOpened>();
  ASSERT_EQ(opened.size(), 1u);
  EXPECT_EQ(opened[0].uuid, x_);
  RemoteScanned({});
  EXPECT_EQ(Only<InventoryState>(Said(x_)).size(), 1u);
  Meet(Host(x_));
  EXPECT_EQ(Only<NodeArrived>(Said(x_)).at(0).shards.size(), 1u);
}

TEST_F(AgentClusterTest, WhatNoTierKnowsIsOpenedWhenSomebodyWantsIt) {
  Start();
  agent_->BeginHosting("job", nullptr, Time());
  agent_->Want("job", {kUser, kUser, now_ + kRescan * 2}, Time());
  Settle();
  EXPECT_TRUE(Notices<JobOpened>().empty()) << "the tiers have not been read";
  RemoteScanned({});
  EXPECT_TRUE(Notices<JobOpened>().empty()) << "the drives have not been read";
  DriveScanned({});
  const auto opened = Notices<JobOpened>();
  ASSERT_EQ(opened.size(), 1u);
  ASSERT_NE(Hosted(opened[0].uuid), nullptr);
  EXPECT_EQ(Hosted(opened[0].uuid)->uid(), kUser);
  agent_->Want("job", {7, 7, now_ + kRescan * 2}, Time());
  EXPECT_TRUE(Notices<JobOpened>().empty());
}

TEST_F(AgentClusterTest, WhatIsStillBeingLookedForIsNotCalledUnknown) {
  Start();
  DriveScanned({});
  agent_->BeginHosting("job", nullptr, Time());
  Settle();
  const auto list = [&] {
    v1::ListCheckpointsRequest request;
    request.set_job("job");
    Feed(AdminRequest{++admin_, {{1, 1}, 0, 0}, request});
    return Take<AdminReply>().back().status.code();
  };
  EXPECT_EQ(list(), absl::StatusCode::kUnavailable);
  RemoteScanned({});
  EXPECT_EQ(list(), absl::StatusCode::kNotFound);
}

TEST_F(AgentClusterTest, WhatCannotBeHostedIsNotHosted) {
  Start();
  v1::JobState bad = State(x_, "job", 3);
  bad.add_attempts()->set_attempt(1);  // of no ranks
  EXPECT_FALSE(agent_->BeginHosting("job", &bad, Time()));
  Settle();
  EXPECT_EQ(Problems().size(), 1u);
  EXPECT_EQ(Hosted(x_), nullptr);
  v1::JobState good = State(x_, "job", 2);
  EXPECT_TRUE(agent_->BeginHosting("job", &good, Time()));
  EXPECT_NE(Hosted(x_), nullptr);
}

TEST_F(AgentClusterTest, WhatNobodyWantsIsNotOpened) {
  Start();
  DriveScanned({});
  agent_->BeginHosting("job", nullptr, Time());
  Settle();
  RemoteScanned({});
  EXPECT_TRUE(Notices<JobOpened>().empty());
  agent_->Want("job", {kUser, kUser, now_ + kRescan * 2}, Time());
  EXPECT_EQ(Notices<JobOpened>().size(), 1u);
}

TEST_F(AgentClusterTest, AHostWithoutAStateGoesByWhatTheDrivesHave) {
  Start();
  agent_->BeginHosting("job", nullptr, Time());
  agent_->Want("job", {kUser, kUser, now_ + kRescan * 2}, Time());
  DriveScanned({Found(x_, {OnDrive(x_, 9, 0)})});
  ASSERT_NE(Hosted(x_), nullptr);
  EXPECT_EQ(Notices<JobOpened>().size(), 1u);
  RemoteScanned({});
  EXPECT_TRUE(Notices<JobOpened>().empty());
}

TEST_F(AgentClusterTest, AHostWithoutAStateGoesByWhatTheRemoteTierHas) {
  Start();
  DriveScanned({});
  agent_->BeginHosting("job", nullptr, Time());
  agent_->Want("job", {kUser, kUser, now_ + kRescan * 2}, Time());
  Settle();
  RemoteScanned({Found(x_, {OnDrive(x_, 9, 0, "/remote")})});
  ASSERT_NE(Hosted(x_), nullptr);
  EXPECT_EQ(Only<CopiesFound>(Said(x_)).size(), 1u);
}

TEST_F(AgentClusterTest, RequestsOutliveTheirHost) {
  Start();
  DriveScanned({});
  const v1::JobState state = State(x_, "job", 5);
  agent_->BeginHosting("job", &state, Time());
  Meet(Host(x_));
  Said(x_);
  Join(Connect(100), 0);
  const auto asked = Only<JoinAsked>(Said(x_));
  ASSERT_EQ(asked.size(), 1u);
  agent_->EndHosting("job");
  Settle();
  EXPECT_EQ(Hosted(x_), nullptr);
  EXPECT_TRUE(Failures().empty());
  RemoteScanned({Found(x_, {})});  // asked for when it was the host
  EXPECT_TRUE(Said(x_).empty());
  Meet(Host(x_));
  Tell(x_, JoinAccepted{asked[0].token, 1, 0, 4, false, {}, std::nullopt});
  EXPECT_TRUE(Take<SendReply>().at(0).frame.has_join());
}

TEST_F(AgentClusterTest, OnlyNewerStatesAreKept) {
  Start();
  agent_->KeepState(State(x_, "job", 5, 2), Time());
  Settle();
  EXPECT_EQ(Take<WriteJobState>().size(), 1u);
  agent_->KeepState(State(x_, "job", 5, 2), Time());
  agent_->KeepState(State(x_, "job", 9, 1), Time());
  Settle();
  EXPECT_TRUE(Take<WriteJobState>().empty());
  EXPECT_EQ(agent_->KeptState("job")->version(), 5u);
  agent_->KeepState(State(x_, "job", 1, 3), Time());
  Settle();
  EXPECT_EQ(Take<WriteJobState>().size(), 1u);
  // One that could not be written is written again.
  Feed(JobStateWritten{x_, 1, absl::UnavailableError("full")});
  now_ = now_ + kStateRetry;
  Feed(TimerFired{});
  EXPECT_EQ(Take<WriteJobState>().size(), 1u);
  EXPECT_TRUE(Said(x_).empty());
}

TEST_F(AgentClusterTest, AFlushThatIsAskedForAgainIsDoneOnceAndAnsweredOnce) {
  AddSlot(Copy(x_, 10, 0));
  Start();
  DriveScanned({});
  Meet(Host(x_));
  Said(x_);
  FlushWanted wanted;
  wanted.checkpoint = {1, 10};
  wanted.world_size = 4;
  wanted.shards = {{0, TierKind::kMemory, 4096}};
  for (const TierKind to : {TierKind::kNvme, TierKind::kRemote}) {
    wanted.to = to;
    Tell(x_, wanted);
    Tell(x_, wanted);
    const auto flushes = Take<FlushShard>();
    ASSERT_EQ(flushes.size(), 1u);
    Feed(FlushEnded{flushes[0].drain, absl::OkStatus(), false,
                    OnDrive(x_, 10, 0, to == TierKind::kNvme ? "/nvme" : "/remote")});
    EXPECT_EQ(Only<ShardDrained>(Said(x_)).size(), 1u);
    // And when it is done: the copy is the answer.
    Tell(x_, wanted);
    EXPECT_TRUE(Take<FlushShard>().empty());
    const auto drained = Only<ShardDrained>(Said(x_));
    ASSERT_EQ(drained.size(), 1u);
    EXPECT_TRUE(drained[0].status.ok());
    EXPECT_EQ(drained[0].copy.record_crc, 10u);
  }
  // But for what is not there any more.
  Tell(x_, FlushUnwanted{{1, 10}, TierKind::kRemote});
  Tell(x_, wanted);
  EXPECT_EQ(Take<FlushShard>().size(), 1u);
  // One of a job that is not known (any more) is answered, too.
  Tell(y_, wanted);
  EXPECT_EQ(Only<ShardDrained>(Said(y_)).size(), 1u);
}

TEST_F(AgentClusterTest, ARemovalThatIsAskedForAgainIsDoneOnceAndAnsweredOnce) {
  Start();
  DriveScanned({Found(x_, {OnDrive(x_, 9, 0)})});
  Meet(Host(x_));
  Said(x_);
  const RemovalWanted wanted{{1, 9}, TierKind::kNvme, 4};
  Tell(x_, wanted);
  Tell(x_, wanted);
  const auto removals = Take<RemoveCopies>();
  ASSERT_EQ(removals.size(), 1u);
  // What goes is not told of.
  Meet(Host(x_));
  EXPECT_TRUE(Only<CopiesFound>(Said(x_)).at(0).copies.empty());
  Feed(CopiesRemoved{removals[0].drain, absl::OkStatus(), std::nullopt});
  EXPECT_EQ(Only<RemovalDone>(Said(x_)).size(), 1u);
  Tell(x_, GiveUp{{1, 9}, {}});  // of what is not there
  Tell(x_, FlushUnwanted{{1, 9}, TierKind::kNvme});
  EXPECT_TRUE(Said(x_).empty());
}

// Its host may not have heard that it is gone: the node was out of reach.
TEST_F(AgentClusterTest, WhatIsRemovedWhileDrivesAreReadIsNotToldAsFound) {
  Start();
  const FoundJob both = Found(x_, {OnDrive(x_, 9, 0), OnDrive(x_, 10, 0)});
  DriveScanned({both});
  Meet(Host(x_));
  Tell(x_, RemovalWanted{{1, 9}, TierKind::kNvme, 4});
  const DrainId removal = Take<RemoveCopies>().at(0).drain;
  for (const bool done : {false, true}) {
    SCOPED_TRACE(done);
    if (done) {
      Feed(CopiesRemoved{removal, absl::OkStatus(), std::nullopt});
    }
    Said(x_);
    FoundJob found = both;
    found.bad.push_back({OnDrive(x_, 9, 1), "cut"});
    DriveScanned({found});  // it began when the daemon did
    const auto told = Only<CopiesFound>(Said(x_));
    ASSERT_EQ(told.size(), 1u);
    ASSERT_EQ(told[0].copies.size(), 1u);
    EXPECT_EQ(told[0].copies[0].copy.id.step, 10u);
    EXPECT_EQ(told[0].bad.size(), done ? 0u : 1u) << "nobody knew of rank 1's when the other went";
  }
}

// Its host takes what was there before the rebuild and is not in the list for gone, and times are a
// little off between nodes.
TEST_F(AgentClusterTest, ARebuildTellsOfWhatWasWrittenSinceItBegan) {
  AddSlot(Copy(x_, 10, 0));
  Start();
  DriveScanned({Found(x_, {OnDrive(x_, 9, 0)})});
  Meet(Host(x_));
  v1::RebuildRequest rebuild;
  rebuild.set_tier("nvme");
  Feed(AdminRequest{++admin_, {{1, 1}, 0, 0}, rebuild});
  const auto scans = Take<ScanNvme>();
  ASSERT_FALSE(scans.empty());
  now_ = now_ + std::chrono::seconds(1);
  FlushWanted wanted;
  wanted.checkpoint = {1, 10};
  wanted.world_size = 4;
  wanted.to = TierKind::kNvme;
  wanted.shards = {{0, TierKind::kMemory, 4096}};
  Tell(x_, wanted);
  Feed(FlushEnded{Take<FlushShard>().at(0).drain, absl::OkStatus(), false, OnDrive(x_, 10, 0)});
  Said(x_);
  TierScanned scanned;
  scanned.dir = "/nvme";
  scanned.drain = scans.back().drain;
  scanned.jobs = {Found(x_, {OnDrive(x_, 9, 0), OnDrive(x_, 10, 0)})};
  Feed(scanned);
  const auto told = Only<CopiesFound>(Said(x_));
  ASSERT_FALSE(told.empty());
  EXPECT_NE(told.back().as_of, MonotonicTime{}) << "all that there is";
  ASSERT_EQ(told.back().copies.size(), 2u);
  EXPECT_EQ(told.back().copies[1].copy.id.step, 10u);
}

// Each node that has a part of it is told: what it does then must not grow with the job's ranks.
TEST_F(AgentClusterTest, ARemovalCostsANodeWhatItHasAndNotWhatTheJobHas) {
  Start();
  DriveScanned({Found(x_, {OnDrive(x_, 9, 0)})});
  Meet(Host(x_));
  actions_.clear();
  Tell(x_, RemovalWanted{{1, 9}, TierKind::kNvme, 12'288});
  EXPECT_LT(actions_.size(), 5u);
  const auto unindexed = Take<UnindexCopies>();
  ASSERT_EQ(unindexed.size(), 1u);
  EXPECT_EQ(unindexed[0].tier, TierKind::kNvme);
  EXPECT_EQ(unindexed[0].job, x_);
  EXPECT_EQ(unindexed[0].checkpoint, (CheckpointId{1, 9}));
}

// The files in remote its host has removed, and tells all nodes.
TEST_F(AgentClusterTest, WhatLeavesRemoteLeavesTheIndexOfEachNode) {
  Start();
  DriveScanned({Found(x_, {OnDrive(x_, 9, 0)})});
  Meet(Host(x_));
  actions_.clear();
  Tell(x_, FlushUnwanted{{1, 9}, TierKind::kNvme});
  EXPECT_TRUE(Take<UnindexCopies>().empty()) << "of its drive it is told to remove it";
  Tell(x_, FlushUnwanted{{1, 9}, TierKind::kRemote});
  const auto unindexed = Take<UnindexCopies>();
  ASSERT_EQ(unindexed.size(), 1u);
  EXPECT_EQ(unindexed[0].tier, TierKind::kRemote);
  EXPECT_EQ(unindexed[0].job, x_);
  EXPECT_EQ(unindexed[0].checkpoint, (CheckpointId{1, 9}));
}

// Of a job that another node hosts: what the index has of it would bring it back after a restart.
TEST_F(AgentClusterTest, AJobThatIsLetGoOfLeavesTheIndexBeforeItsState) {
  Start();
  DriveScanned({Found(x_, {OnDrive(x_, 9, 0)})});
  Meet(Host(x_));
  actions_.clear();
  agent_->LetGo(agent_->JobName(x_), {x_}, Time());
  Settle();
  for (const RemoveJobCopies& remove : Take<RemoveJobCopies>()) {
    Feed(CopiesRemoved{remove.drain, absl::OkStatus(), std::nullopt});
  }
  Settle();
  std::set<TierKind> unindexed;
  bool state_removed = false;
  for (const Action& action : actions_) {
    if (const auto* range = std::get_if<UnindexCopies>(&action)) {
      EXPECT_FALSE(state_removed) << "what is left of it has no state any more";
      EXPECT_EQ(range->job, x_);
      EXPECT_FALSE(range->checkpoint);
      unindexed.insert(range->tier);
    }
    state_removed = state_removed || std::holds_alternative<RemoveJobState>(action);
  }
  EXPECT_TRUE(state_removed);
  EXPECT_EQ(unindexed, (std::set<TierKind>{TierKind::kNvme, TierKind::kRemote}));
}

TEST_F(AgentClusterTest, WhatCouldNotBeRemovedIsToldToTheNextHost) {
  Start();
  DriveScanned({Found(x_, {OnDrive(x_, 9, 0)})});
  Meet(Host(x_));
  Tell(x_, RemovalWanted{{1, 9}, TierKind::kNvme, 4});
  Feed(
      CopiesRemoved{Take<RemoveCopies>().at(0).drain, absl::UnavailableError("EIO"), std::nullopt});
  Said(x_);
  Meet(Host(x_));
  EXPECT_EQ(Only<CopiesFound>(Said(x_)).at(0).copies.size(), 1u);
}

TEST_F(AgentClusterTest, WhoseAJobIsItsHostTells) {
  AddSlot(Copy(x_, 10, 0));  // names no owner
  Start();
  DriveScanned({Found(x_, {OnDrive(x_, 9, 0)})});  // of a user who could be anybody
  Meet(Host(x_));
  const std::vector<ToCoordinator> said = Said(x_);
  EXPECT_EQ(Only<NodeArrived>(said).at(0).shards.size(), 1u);
  EXPECT_TRUE(Only<InventoryState>(said).empty()) << "what was left alone may be its own";
  TierScanned scanned;
  scanned.dir = "/nvme";
  scanned.drain = Take<ScanNvme>().at(0).drain;
  scanned.jobs = {Found(x_, {OnDrive(x_, 9, 0)})};
  Feed(scanned);
  const std::vector<ToCoordinator> then = Said(x_);
  EXPECT_EQ(Only<CopiesFound>(then).at(0).copies.size(), 1u);
  EXPECT_EQ(Only<InventoryState>(then).size(), 1u);
  EXPECT_EQ(agent_->jobs().at(x_).uid, kUser);
}

TEST_F(AgentClusterTest, WhatWasFoundBadIsToldToTheNextHost) {
  started_.jobs.push_back(State(x_, "job", 3));
  AddSlot(Copy(x_, 10, 0));
  Start();
  DriveScanned({Found(x_, {OnDrive(x_, 9, 0), OnDrive(x_, 9, 1)})});
  Meet(Host(x_));
  Feed(CopyFoundBad{0, 1, "digests differ"});
  Feed(DurableCopyJudged{TierKind::kNvme, {x_, 1, 9, 1}, "digests differ"});
  Said(x_);
  Meet(Host(x_));
  const auto bad = Only<ShardBad>(Said(x_));
  ASSERT_EQ(bad.size(), 2u);
  EXPECT_EQ(bad[0].tier, TierKind::kMemory);
  EXPECT_EQ(bad[1].tier, TierKind::kNvme);
  EXPECT_EQ(bad[1].rank, 1u);
}

TEST_F(AgentClusterTest, TiersThatCannotBeReadAreAskedAgainBeforeAJobIsOpened) {
  Start();
  DriveScanned({});
  agent_->BeginHosting("job", nullptr, Time());
  agent_->Want("job", {kUser, kUser, now_ + kRescan * 2}, Time());
  Settle();
  TierScanned failed;
  failed.tier = TierKind::kRemote;
  failed.drain = Take<ScanRemote>().at(0).drain;
  failed.job_name = "job";
  failed.status = absl::UnavailableError("EIO");
  Feed(failed);
  EXPECT_TRUE(Notices<JobOpened>().empty());
  now_ = now_ + kRescan;
  Feed(TimerFired{});
  RemoteScanned({});
  EXPECT_EQ(Notices<JobOpened>().size(), 1u);
}

// A rank that gives up waiting for it hears why, and a problem is told until it is over.
TEST_F(AgentClusterTest, WhoWaitsForATierThatCannotBeReadHearsWhy) {
  Start();
  DriveScanned({});
  Join(Connect(100), 0, "job", 4750);
  agent_->BeginHosting("job", nullptr, Time());
  Settle();
  TierScanned failed;
  failed.tier = TierKind::kRemote;
  failed.drain = Take<ScanRemote>().at(0).drain;
  failed.job_name = "job";
  failed.status = absl::UnavailableError("its mount went away");
  Feed(failed);
  EXPECT_EQ(Problems().size(), 1u);
  EXPECT_TRUE(Take<SendReply>().empty());
  now_ = now_ + milliseconds(4750);
  Feed(TimerFired{});
  const auto failures = Failures();
  ASSERT_EQ(failures.size(), 1u);
  EXPECT_THAT(failures[0].message(), ::testing::HasSubstr("its mount went away"));
  now_ = now_ + kRescan;
  Feed(TimerFired{});
  RemoteScanned({});
  EXPECT_TRUE(Problems().empty());
}

// It may hang there, and go on when the next host has chosen what to keep.
TEST_F(AgentClusterTest, WhoHostsNoLongerRemovesNothingFromTheRemoteTier) {
  const auto opened = OpenAndRemove();
  ASSERT_EQ(opened.size(), 1u);
  agent_->OthersLetGo(opened[0].uuid, 0, Time());
  ExpectTheEndCancelsRemovalsInRemote();
}

// Also where it only goes on with what an earlier host began, and has no coordinator.
TEST_F(AgentClusterTest, NorWhoGoesOnWithARemoval) {
  Start();
  DriveScanned({});
  v1::JobState removed = State(x_, "job", 7);
  removed.set_removed(true);
  ASSERT_TRUE(agent_->BeginHosting("job", &removed, Time()));
  ExpectTheEndCancelsRemovalsInRemote();
}

// A copy that this node gave up while the host was told of it.
TEST_F(AgentClusterTest, WhoIsOfferedWhatIsNotInMemorySaysSo) {
  Start();
  DriveScanned({});
  Meet(Host(x_));
  Said(x_);
  const ConnectionId a = Seated(x_, 0, 100);
  v1::ClientFrame enter;
  enter.mutable_enter_session()->set_deadline_ms(60'000);
  enter.mutable_enter_session()->set_hold(1);
  Ask(a, enter);
  const auto asked = Only<SessionAsked>(Said(x_));
  ASSERT_EQ(asked.size(), 1u);
  SourceOffered offer;
  offer.token = asked[0].token;
  offer.attempt = 1;
  offer.session = 4;
  offer.round = 2;
  offer.checkpoint = {1, 9};
  Tell(x_, offer);
  const auto failed = Only<FetchFailed>(Said(x_));
  ASSERT_EQ(failed.size(), 1u);
  EXPECT_EQ(failed[0].token, offer.token);
  EXPECT_EQ(failed[0].session, 4u);
  EXPECT_EQ(failed[0].round, 2u);
  EXPECT_EQ(failed[0].checkpoint, (CheckpointId{1, 9}));
  EXPECT_EQ(failed[0].from, TierKind::kMemory);
  EXPECT_TRUE(absl::IsNotFound(failed[0].status));
}

// Likewise while it is noted who reads it: nobody is told to ask again.
TEST_F(AgentClusterTest, ACopyThatGoesWhileItsReaderIsNotedIsToldToTheHost) {
  AddSlot(Copy(x_, 9, 0));
  Start();
  DriveScanned({});
  Meet(Host(x_));
  Said(x_);
  const ConnectionId a = Seated(x_, 0, 100);
  v1::ClientFrame enter;
  enter.mutable_enter_session()->set_deadline_ms(60'000);
  enter.mutable_enter_session()->set_hold(1);
  Ask(a, enter);
  const auto asked = Only<SessionAsked>(Said(x_));
  ASSERT_EQ(asked.size(), 1u);
  Take<SendReply>();
  keep_notes_ = true;
  SourceOffered offer;
  offer.token = asked[0].token;
  offer.attempt = 1;
  offer.session = 4;
  offer.round = 2;
  offer.checkpoint = {1, 9};
  Tell(x_, offer);
  const auto notes = Take<WriteNote>();
  ASSERT_EQ(notes.size(), 1u);
  Tell(x_, GiveUp{{1, 9}, {absl::StatusCode::kAborted, v1::Failure::REASON_SHED, "given up"}});
  Feed(NoteWritten{notes[0].slot, notes[0].note_version, absl::OkStatus()});
  EXPECT_TRUE(Take<SendReply>().empty());
  const auto failed = Only<FetchFailed>(Said(x_));
  ASSERT_EQ(failed.size(), 1u);
  EXPECT_EQ(failed[0].token, offer.token);
  EXPECT_EQ(failed[0].session, 4u);
  EXPECT_EQ(failed[0].round, 2u);
  EXPECT_EQ(failed[0].checkpoint, (CheckpointId{1, 9}));
  EXPECT_TRUE(absl::IsNotFound(failed[0].status));
}

TEST_F(AgentClusterTest, AJobThatWasRemovedCanBeOpenedAgain) {
  const auto first = OpenAndRemove();
  ASSERT_EQ(first.size(), 1u);
  const auto remove_here = [&] {
    Settle();
    for (const RemoveJobCopies& remove : Take<RemoveJobCopies>()) {
      Feed(CopiesRemoved{remove.drain, absl::OkStatus(), std::nullopt});
    }
    ASSERT_EQ(Take<RemoveJobState>().size(), 1u);
    Feed(JobStateRemoved{first[0].uuid, absl::OkStatus()});
    EXPECT_EQ(agent_->jobs().count(first[0].uuid), 0u);
  };
  EXPECT_TRUE(Take<RemoveJobCopies>().empty());  // the other nodes first
  agent_->OthersLetGo(first[0].uuid, 0, Time());
  remove_here();
  EXPECT_EQ(Notices<JobGone>().size(), 1u);
  agent_->EndHosting("job");
  // The next host of the name has what was agreed on.
  v1::JobState removed;
  removed.set_job_uuid(first[0].uuid.ToBytes());
  removed.set_name("job");
  removed.set_uid(kUser);
  removed.set_gid(kUser);
  removed.set_version(7);
  removed.set_removed(true);
  ASSERT_TRUE(agent_->BeginHosting("job", &removed, Time()));
  agent_->Want("job", {kUser, kUser, now_ + kRescan * 2}, Time());
  EXPECT_TRUE(Notices<JobOpened>().empty());
  remove_here();
  const auto second = Notices<JobOpened>();
  ASSERT_EQ(second.size(), 1u);
  EXPECT_NE(second[0].uuid, first[0].uuid);
  EXPECT_EQ(agent_->Hosted(second[0].uuid)->removed_before(), std::vector<JobUuid>{first[0].uuid});
}

TEST_F(AgentClusterTest, RanksOnOtherNodesWantNoneOfThisMemory) {
  started_.memory_bytes_max = 3 * kSlot;
  Start();
  DriveScanned({});
  Meet(Host(x_));
  Said(x_);
  const ConnectionId a = Seated(x_, 0, 100);
  for (const Step step : {1, 2, 3}) {
    Save(x_, a, step);
  }
}

// The room that was made for a rank of another node is here, too: the host has nothing more to give
// up for this one.
TEST_F(AgentClusterTest, WhatWasFreedWhileARankAskedForRoomIsTaken) {
  Start();
  DriveScanned({});
  Meet(Host(x_));
  Said(x_);
  const ConnectionId a = Seated(x_, 0, 100);
  for (const Step step : {1, 2, 3}) {
    Save(x_, a, step);
  }
  Begin(a, 4);
  const auto asked = Only<RoomAsked>(Said(x_));
  ASSERT_EQ(asked.size(), 1u) << "it has three slots";
  Tell(x_, GiveUp{{1, 1}, {absl::StatusCode::kAborted, v1::Failure::REASON_SHED, "for another"}});
  for (const RemoveRecord& removal : Take<RemoveRecord>()) {
    Feed(RecordRemoved{removal.slot, removal.generation, absl::OkStatus()});
  }
  Tell(x_, RoomAnswered{asked[0].token, false});
  const auto replies = Take<SendReply>();
  ASSERT_EQ(replies.size(), 1u);
  EXPECT_TRUE(replies[0].frame.has_begin_save()) << replies[0].frame.ShortDebugString();
}

// Its host may not even have heard of the save yet.
TEST_F(AgentClusterTest, NobodyIsLetIntoASlotForAnAttemptThatIsOver) {
  Start();
  DriveScanned({});
  Meet(Host(x_));
  const ConnectionId a = Seated(x_, 0, 100);
  Save(x_, a, 1);
  Take<SendReply>();
  keep_notes_ = true;
  Begin(a, 2);
  Permit(x_);
  const auto notes = Take<WriteNote>();
  ASSERT_EQ(notes.size(), 1u);
  EXPECT_TRUE(Take<SendReply>().empty());
  Tell(x_, Superseded{2});
  auto replies = Take<SendReply>();
  ASSERT_EQ(replies.size(), 1u);
  EXPECT_EQ(replies[0].frame.failure().reason(), v1::Failure::REASON_SUPERSEDED)
      << replies[0].frame.ShortDebugString();
  Feed(NoteWritten{notes[0].slot, notes[0].note_version, absl::OkStatus()});
  EXPECT_TRUE(Take<SendReply>().empty());
}

TEST_F(AgentClusterTest, WhatHasLeftNothingHereIsForgottenWhenTheNumberOfJobsIsShort) {
  Start();
  DriveScanned({});
  for (size_t i = 0; i < kJobsPerUidMax; ++i) {
    JobUuid uuid = Uuid(static_cast<uint8_t>(i % 251 + 1));
    uuid.bytes[1] = static_cast<uint8_t>(i / 251 + 1);
    agent_->KeepState(State(uuid, "job-" + std::to_string(i), 1), Time());
  }
  Settle();
  ASSERT_EQ(agent_->jobs().size(), kJobsPerUidMax);
  Join(Connect(100), 0, "another");
  EXPECT_EQ(agent_->jobs().size(), kJobsPerUidMax - 1);
  EXPECT_EQ(Take<RemoveJobState>().size(), 1u);
  EXPECT_TRUE(Take<RemoveJobCopies>().empty());
  EXPECT_EQ(Notices<JobWanted>().size(), 1u);
}

TEST_F(AgentClusterTest, JobsOfOtherUsersShutNobodyOut) {
  Start();
  DriveScanned({});
  for (size_t i = 0; i < kJobsMax; ++i) {
    JobUuid uuid = Uuid(static_cast<uint8_t>(i % 251 + 1));
    uuid.bytes[1] = static_cast<uint8_t>(i / 251 + 1);
    v1::JobState state = State(uuid, "job-" + std::to_string(i), 1);
    state.set_uid(static_cast<uint32_t>(5000 + i / kJobsPerUidMax));
    agent_->KeepState(state, Time());
  }
  Settle();
  ASSERT_EQ(agent_->jobs().size(), kJobsMax);
  Join(Connect(100), 0);
  EXPECT_EQ(Notices<JobWanted>().size(), 1u);
  Meet(Host(x_));
  EXPECT_EQ(Only<JoinAsked>(Said(x_)).size(), 1u);
  EXPECT_TRUE(Failures().empty());
}

TEST_F(AgentClusterTest, OfTwoJobsOfOneNameTheHostsIsRight) {
  started_.jobs.push_back(State(x_, "job", 3));
  AddSlot(Copy(x_, 10, 0));
  Start();
  Meet(Host(y_));
  EXPECT_EQ(agent_->jobs().size(), 2u);
  const auto problems = Problems();
  EXPECT_TRUE(std::any_of(problems.begin(), problems.end(), [&](const std::string& problem) {
    return absl::StrContains(problem, x_.ToString()) && absl::StrContains(problem, "left alone");
  }));
  EXPECT_TRUE(Only<NodeArrived>(Said(y_)).at(0).shards.empty());
  EXPECT_TRUE(Take<RemoveRecord>().empty());
  Join(Connect(100), 0);
  EXPECT_EQ(Only<JoinAsked>(Said(y_)).size(), 1u);
}

// A shard that is in memory for another node's reader goes with that; unless the host has it kept.
TEST_F(AgentClusterTest, WhatIsLoadedForAReaderStaysWhenItIsToBeKept) {
  for (const bool keep : {false, true}) {
    actions_.clear();
    started_.jobs = {State(x_, "job", 3)};
    Start();
    const DurableCopy on_drive = OnDrive(x_, 10, 0);
    DriveScanned({Found(x_, {on_drive})});
    Meet(Host(x_));
    Said(x_);
    Feed(AdminRequest{5, {{1, 1}, 0, 0}, HoldShard{"job", on_drive.copy.id, 0, true}});
    const std::vector<FetchShard> fetches = Take<FetchShard>();
    ASSERT_EQ(fetches.size(), 1u);
    FetchEnded fetched;
    fetched.drain = fetches[0].drain;
    fetched.slot = fetches[0].slot;
    fetched.generation = fetched.copy.generation = fetches[0].generation;
    fetched.copy = on_drive.copy;
    fetched.copy.generation = fetches[0].generation;
    Feed(fetched);
    const std::vector<AdminReply> held = Take<AdminReply>();
    ASSERT_EQ(held.size(), 1u);
    ASSERT_TRUE(held[0].status.ok()) << held[0].status;
    if (keep) {
      FlushWanted wanted;
      wanted.checkpoint = {1, 10};
      wanted.to = TierKind::kPeer;
      wanted.world_size = 4;
      wanted.shards = {{0, TierKind::kMemory, on_drive.copy.image_bytes, 0, "node-b"}};
      Tell(x_, wanted);
      const auto kept = Only<ShardDrained>(Said(x_));
      ASSERT_EQ(kept.size(), 1u);
      EXPECT_TRUE(kept[0].status.ok()) << kept[0].status;
    }
    Feed(AdminReadDone{5});
    Feed(AdminRequest{6, {{1, 1}, 0, 0}, HoldShard{"job", on_drive.copy.id, 0, false}});
    const std::vector<AdminReply> again = Take<AdminReply>();
    ASSERT_EQ(again.size(), 1u);
    EXPECT_EQ(again[0].status.ok(), keep) << again[0].status;
  }
}

// Else a job that saves all the time would keep another's replicas from ever beginning: whose
// shards come first by their names says nothing.
TEST_F(AgentClusterTest, ReplicasBeginInTheOrderInWhichTheyWereAskedFor) {
  started_.jobs = {State(x_, "first", 3), State(y_, "second", 3)};
  Start();
  DriveScanned({});
  Meet(Host(x_));
  Meet(Host(y_));
  const auto ask = [&](const JobUuid& job) {
    FlushWanted wanted;
    wanted.checkpoint = {1, 10};
    wanted.to = TierKind::kPeer;
    wanted.world_size = 8;
    for (Rank rank = 0; rank <= kReplicasAtOnce; ++rank) {
      wanted.shards.push_back({rank, TierKind::kMemory, 4096, 0, "node-b"});
    }
    Tell(job, wanted);
  };
  ask(y_);
  ask(x_);
  const auto populate = [&] {
    for (const PopulateSlot& slot : Take<PopulateSlot>()) {
      Feed(SlotPopulated{slot.slot, absl::OkStatus()});
    }
    return Take<FetchShard>();
  };
  const std::vector<FetchShard> fetches = populate();
  ASSERT_EQ(fetches.size(), kReplicasAtOnce);
  for (const FetchShard& fetch : fetches) {
    EXPECT_EQ(fetch.key.id.job, y_);
  }
  FetchEnded ended;
  ended.drain = fetches[0].drain;
  ended.slot = fetches[0].slot;
  ended.generation = ended.copy.generation = fetches[0].generation;
  ended.copy = Copy(y_, 10, fetches[0].key.id.rank);
  ended.copy.generation = fetches[0].generation;
  Feed(ended);
  const std::vector<FetchShard> next = populate();
  ASSERT_EQ(next.size(), 1u);
  EXPECT_EQ(next[0].key.id.job, y_) << "it was asked for before the other job's";
}

}  // namespace
}  // namespace holdfast
