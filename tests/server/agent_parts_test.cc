// A shard that lies on another node, which a reader gets in parts (server/agent_parts.cc).
#include <gmock/gmock.h>

#include "tests/server/agent_world.h"

namespace holdfast {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr uint64_t kMemory = 16 << 20;

class AgentPartsTest : public AgentClusterTest {
 protected:
  void Ready() {
    started_.jobs.push_back(State(x_, "job", 1));
    Start();
    Meet(Host(x_));
    Said(x_);
  }
  void Attach(ConnectionId connection, uint64_t hold, uint64_t deadline_ms = 10'000,
              bool of_files = true) {
    v1::ClientFrame frame;
    v1::Attach& attach = *frame.mutable_attach();
    attach.set_job("job");
    attach.set_rank(3);
    attach.set_any_tier(true);
    attach.set_parts(true);
    attach.set_parts_of_files(of_files);
    attach.set_hold(hold);
    attach.set_deadline_ms(deadline_ms);
    Ask(connection, frame);
  }
  // The host names the nodes that have it; empty: nothing was asked.
  std::vector<OpenDurable> Locate(const std::vector<ShardLocated::Place>& places =
                                      {{TierKind::kMemory, "memory copy on n2, not on n1"},
                                       {TierKind::kPeer, ""}},
                                  const std::string& remote_reader = "") {
    for (const AttachAsked& asked : Only<AttachAsked>(Said(x_))) {
      EXPECT_TRUE(asked.parts);
      ShardLocated located{asked.token, {1, 9}, 4, places, ""};
      located.peers = {"n2", "n3"};
      located.remote_reader = remote_reader;
      Tell(x_, located);
    }
    return Take<OpenDurable>();
  }
  void Opened(const OpenDurable& open, absl::Status status = absl::OkStatus()) {
    DurableOpened opened{open.drain, std::move(status), false, {}, nullptr};
    opened.copy = Copy(x_, 9, 3);
    opened.parts_bytes = kMemory;
    Feed(opened);
  }
  // Attached and open; what opened it.
  DrainId Open(ConnectionId connection, uint64_t hold) {
    Attach(connection, hold);
    const auto opens = Locate();
    EXPECT_EQ(opens.size(), 1u);
    if (opens.size() != 1) {
      return 0;
    }
    Opened(opens[0]);
    Take<SendReply>();
    return opens[0].drain;
  }
  void Read(ConnectionId connection, uint64_t hold, const std::vector<PartRun>& parts,
            uint64_t deadline_ms = 10'000) {
    v1::ClientFrame frame;
    v1::ReadParts& read = *frame.mutable_read_parts();
    read.set_hold(hold);
    for (const PartRun& part : parts) {
      read.add_offset(part.offset);
      read.add_bytes(part.bytes);
      read.add_place(part.place);
    }
    read.set_deadline_ms(deadline_ms);
    Ask(connection, frame);
  }
  void Release(ConnectionId connection, uint64_t hold) {
    v1::ClientFrame frame;
    frame.mutable_release_read()->set_hold(hold);
    Ask(connection, frame);
  }
  v1::Failure Failed() {
    const auto replies = Take<SendReply>();
    EXPECT_EQ(replies.size(), 1u);
    return replies.empty() ? v1::Failure() : replies[0].frame.failure();
  }
  static int Code(absl::StatusCode code) { return static_cast<int>(code); }
  void Pass(std::chrono::milliseconds time) {
    now_.ns += std::chrono::nanoseconds(time).count();
    Feed(TimerFired{});
  }
};

TEST_F(AgentPartsTest, WhatAnotherNodeHasIsReadAsItIsAskedFor) {
  Ready();
  const ConnectionId reader = Connect(100);
  Attach(reader, 7);
  const auto opens = Locate();
  ASSERT_EQ(opens.size(), 1u);
  EXPECT_EQ(opens[0].tier, TierKind::kPeer);
  EXPECT_EQ(opens[0].peers, (std::vector<std::string>{"n2", "n3"}));
  EXPECT_EQ(opens[0].key.id, (ShardId{x_, 1, 9, 3}));
  Opened(opens[0]);
  auto replies = Take<SendReply>();
  ASSERT_EQ(replies.size(), 1u);
  EXPECT_EQ(replies[0].frame.attach().tier(), "peer");
  EXPECT_EQ(replies[0].frame.attach().hold(), 7u);
  EXPECT_EQ(replies[0].frame.attach().parts_bytes(), kMemory);
  EXPECT_EQ(replies[0].frame.attach().why(), "memory copy on n2, not on n1");
  for (int i = 0; i < 2; ++i) {
    Read(reader, 7, {{4096, 100, 0}, {0, 50, kMemory - 50}});
    const auto reads = Take<ReadParts>();
    ASSERT_EQ(reads.size(), 1u);
    EXPECT_EQ(reads[0].opened, opens[0].drain);
    ASSERT_EQ(reads[0].parts.size(), 2u);
    EXPECT_EQ(reads[0].parts[1].place, kMemory - 50);
    EXPECT_TRUE(Take<SendReply>().empty()) << "not before it is there";
    Feed(PartsRead{reads[0].opened, reads[0].token, absl::OkStatus()});
    replies = Take<SendReply>();
    ASSERT_EQ(replies.size(), 1u);
    EXPECT_TRUE(replies[0].frame.has_read_parts());
  }
  Release(reader, 7);
  const auto ended = Take<EndParts>();
  ASSERT_EQ(ended.size(), 1u);
  EXPECT_EQ(ended[0].opened, opens[0].drain);
  Take<SendReply>();
  Read(reader, 7, {{0, 1, 0}});
  EXPECT_EQ(Failed().code(), Code(absl::StatusCode::kUnavailable));
}

TEST_F(AgentPartsTest, WhoMayBePassedNoMoreMemoryHearsSoAndStays) {
  Ready();
  const ConnectionId reader = Connect(100);
  Attach(reader, 7);
  const auto opens = Locate();
  ASSERT_EQ(opens.size(), 1u);
  Opened(opens[0]);
  const auto replies = Take<SendReply>();
  ASSERT_EQ(replies.size(), 1u);
  Feed(HandOverFailed{replies[0], absl::ResourceExhaustedError("user 1000 keeps 4 GiB")});
  EXPECT_THAT(Failed().message(), HasSubstr("user 1000 keeps 4 GiB"));
  EXPECT_EQ(Take<EndParts>().size(), 1u);
  EXPECT_TRUE(Take<CloseConnection>().empty());
  Open(reader, 7);  // under the same name
}

TEST_F(AgentPartsTest, AskingForWhatCannotBeIsRefused) {
  Ready();
  const ConnectionId reader = Connect(100);
  Open(reader, 7);
  const auto refused = [&](const std::vector<PartRun>& parts) {
    Read(reader, 7, parts);
    EXPECT_TRUE(Take<ReadParts>().empty());
    EXPECT_EQ(Failed().code(), Code(absl::StatusCode::kInvalidArgument));
  };
  refused({});
  refused({{0, 0, 0}});
  refused({{0, 1, kMemory}});
  refused({{0, kMemory + 1, 0}});
  refused({{0, 2, kMemory - 1}});
  refused({{0, 2, UINT64_MAX}});
  refused({{UINT64_MAX, 2, 0}});
  refused({{0, kMemory / 2, 0}, {0, kMemory / 2 + 1, 0}});  // more than there is memory, together
  refused(std::vector<PartRun>(kPartRunsMax + 1, PartRun{0, 1, 0}));
  v1::ClientFrame uneven;
  uneven.mutable_read_parts()->set_hold(7);
  uneven.mutable_read_parts()->add_offset(0);
  uneven.mutable_read_parts()->add_bytes(1);
  Ask(reader, uneven);
  EXPECT_EQ(Failed().code(), Code(absl::StatusCode::kInvalidArgument));
  // Of another's hold, and of one that there is not.
  Read(Connect(101), 7, {{0, 1, 0}});
  EXPECT_EQ(Failed().code(), Code(absl::StatusCode::kUnavailable));
  Read(reader, 8, {{0, 1, 0}});
  EXPECT_EQ(Failed().code(), Code(absl::StatusCode::kUnavailable));
  // One at a time.
  Read(reader, 7, {{0, 1, 0}});
  EXPECT_EQ(Take<ReadParts>().size(), 1u);
  Read(reader, 7, {{0, 1, 0}});
  EXPECT_EQ(Failed().code(), Code(absl::StatusCode::kFailedPrecondition));
}

TEST_F(AgentPartsTest, AHoldHasOneNameAndThereIsALimit) {
  Ready();
  const ConnectionId reader = Connect(100);
  Attach(reader, 0);
  EXPECT_TRUE(Locate().empty());
  EXPECT_EQ(Failed().code(), Code(absl::StatusCode::kInvalidArgument));
  for (uint64_t hold = 1; hold <= kPartsPerReaderMax; ++hold) {
    Open(reader, hold);
  }
  Attach(reader, 1);
  EXPECT_TRUE(Locate().empty());
  EXPECT_THAT(Failed().message(), HasSubstr("is taken"));
  Attach(reader, 99);
  EXPECT_TRUE(Locate().empty());
  EXPECT_THAT(Failed().message(), HasSubstr("release some"));
  // Of all readers of a user together: the next tier is asked for.
  for (size_t open = kPartsPerReaderMax; open < kPartsPerUserMax; ++open) {
    Open(Connect(static_cast<int32_t>(200 + open)), 1);
  }
  Attach(Connect(150), 1);
  EXPECT_TRUE(Locate({{TierKind::kPeer, ""}, {TierKind::kRemote, ""}}).empty());
  const auto opens = Locate({{TierKind::kPeer, ""}, {TierKind::kRemote, ""}}, "n2");
  ASSERT_EQ(opens.size(), 1u);
  EXPECT_EQ(opens[0].tier, TierKind::kRemote);
  EXPECT_TRUE(opens[0].peers.empty()) << "as a whole, where there is no room for parts";
}

TEST_F(AgentPartsTest, AllGoesWithItsConnection) {
  Ready();
  const ConnectionId reader = Connect(100);
  const DrainId open = Open(reader, 1);
  const DrainId read = Open(reader, 2);
  Read(reader, 2, {{0, 1, 0}});
  const auto reads = Take<ReadParts>();
  ASSERT_EQ(reads.size(), 1u);
  Attach(reader, 3);
  const auto opening = Locate();
  ASSERT_EQ(opening.size(), 1u);
  Feed(ConnectionClosed{reader});
  std::vector<DrainId> ended;
  for (const EndParts& each : Take<EndParts>()) {
    ended.push_back(each.opened);
  }
  EXPECT_EQ(ended, (std::vector{open, read}));
  const auto cancelled = Take<CancelDrain>();
  ASSERT_EQ(cancelled.size(), 1u);
  EXPECT_EQ(cancelled[0].drain, opening[0].drain);
  // It was open before it heard of that.
  Opened(opening[0]);
  EXPECT_EQ(Take<EndParts>().size(), 1u);
  Feed(PartsRead{reads[0].opened, reads[0].token, absl::OkStatus()});
  EXPECT_TRUE(Take<SendReply>().empty());
}

TEST_F(AgentPartsTest, WhatCannotBeReadAnyMoreIsLetGo) {
  Ready();
  const ConnectionId reader = Connect(100);
  const DrainId open = Open(reader, 7);
  Read(reader, 7, {{0, 1, 0}});
  auto reads = Take<ReadParts>();
  ASSERT_EQ(reads.size(), 1u);
  Feed(PartsRead{open, reads[0].token, absl::ResourceExhaustedError("n2 is gone")});
  const v1::Failure failed = Failed();
  EXPECT_EQ(failed.code(), Code(absl::StatusCode::kUnavailable));
  EXPECT_THAT(failed.message(), HasSubstr("n2 is gone"));
  EXPECT_EQ(Take<EndParts>().size(), 1u);
  // It takes too long.
  Open(reader, 8);
  Read(reader, 8, {{0, 1, 0}}, 500);
  reads = Take<ReadParts>();
  ASSERT_EQ(reads.size(), 1u);
  Pass(std::chrono::milliseconds(501));
  EXPECT_EQ(Failed().code(), Code(absl::StatusCode::kDeadlineExceeded));
  EXPECT_EQ(Take<EndParts>().size(), 1u);
  Feed(PartsRead{reads[0].opened, reads[0].token, absl::OkStatus()});
  EXPECT_TRUE(Take<SendReply>().empty());
}

TEST_F(AgentPartsTest, NodesThatCannotBeReadAreNoVerdictOnTheCopy) {
  Ready();
  Attach(Connect(100), 7);
  const auto opens = Locate({{TierKind::kPeer, ""}, {TierKind::kRemote, "remote copy absent"}});
  ASSERT_EQ(opens.size(), 1u);
  Opened(opens[0], absl::NotFoundError("node 'n2': it has no such shard"));
  EXPECT_EQ(Take<EndParts>().size(), 1u);
  const auto said = Said(x_);
  EXPECT_TRUE(Only<ShardBad>(said).empty());
  const auto again = Only<AttachAsked>(said);
  ASSERT_EQ(again.size(), 1u);
  EXPECT_TRUE(again[0].again && again[0].parts);
  ShardLocated located{again[0].token, {1, 9}, 4, {{TierKind::kPeer, ""}}, ""};
  located.peers = {"n2"};
  Tell(x_, located);
  const v1::Failure failed = Failed();
  EXPECT_EQ(failed.code(), Code(absl::StatusCode::kUnavailable));
  EXPECT_THAT(failed.message(), HasSubstr("peer copy not readable now: node 'n2': it has no such"));
}

// The next tier's copy goes by the name that the reader gave, though what was begun has not ended
// yet.
TEST_F(AgentPartsTest, WhatIsOpenedForTooLongIsReadFromTheNextTier) {
  Ready();
  const std::vector<ShardLocated::Place> places = {{TierKind::kPeer, ""}, {TierKind::kRemote, ""}};
  const ConnectionId reader = Connect(100);
  Attach(reader, 7);
  const auto slow = Locate(places, "n2");
  ASSERT_EQ(slow.size(), 1u);
  ASSERT_EQ(slow[0].tier, TierKind::kPeer);
  Pass(std::chrono::milliseconds(5001));
  EXPECT_EQ(Take<CancelDrain>().size(), 1u);
  const auto opens = Locate(places, "n2");
  ASSERT_EQ(opens.size(), 1u);
  EXPECT_EQ(opens[0].tier, TierKind::kRemote);
  Feed(DurableOpened{slow[0].drain, absl::CancelledError("as asked"), false, {}, nullptr});
  const auto ended = Take<EndParts>();
  ASSERT_EQ(ended.size(), 1u);
  EXPECT_EQ(ended[0].opened, slow[0].drain);
  Opened(opens[0]);
  const auto replies = Take<SendReply>();
  ASSERT_EQ(replies.size(), 1u);
  EXPECT_EQ(replies[0].frame.attach().tier(), "remote");
  EXPECT_EQ(replies[0].frame.attach().hold(), 7u);
  Read(reader, 7, {{0, 1, 0}});
  const auto reads = Take<ReadParts>();
  ASSERT_EQ(reads.size(), 1u);
  EXPECT_EQ(reads[0].opened, opens[0].drain);
}

// What this node keeps for others is at hand, as what its own ranks have.
TEST_F(AgentPartsTest, AReplicaOfThisNodeIsReadWhereItLies) {
  AddSlot(Copy(x_, 9, 3));
  Ready();
  const ConnectionId reader = Connect(100);
  Attach(reader, 7);
  EXPECT_TRUE(Locate({{TierKind::kMemory, "memory copy absent"}, {TierKind::kPeer, ""}}).empty());
  const auto replies = Take<SendReply>();
  ASSERT_EQ(replies.size(), 1u);
  EXPECT_EQ(replies[0].frame.attach().tier(), "memory");
  EXPECT_EQ(replies[0].frame.attach().parts_bytes(), 0u);
  EXPECT_EQ(replies[0].descriptors, Descriptors::kReadOnlyImageAndRecord);
}

// Where that is bad, and nobody else has it, there is none: it is not to be asked for again.
TEST_F(AgentPartsTest, ABadReplicaOfThisNodeThatNobodyElseHasIsNoCopy) {
  AddSlot(Copy(x_, 9, 3));
  Ready();
  v1::ClientFrame frame;
  v1::Attach& attach = *frame.mutable_attach();
  attach.set_job("job");
  attach.set_rank(3);
  attach.set_any_tier(true);
  attach.set_parts(true);
  attach.set_hold(7);
  attach.add_without("memory");
  attach.set_deadline_ms(10'000);
  Ask(Connect(100), frame);
  for (int i = 0; i < 2; ++i) {
    const auto asked = Only<AttachAsked>(Said(x_));
    ASSERT_EQ(asked.size(), 1u);
    ShardLocated located{asked[0].token, {1, 9}, 4, {{TierKind::kPeer, ""}}, ""};
    located.peers = {"node-a"};
    Tell(x_, located);
  }
  EXPECT_TRUE(Take<OpenDurable>().empty());
  EXPECT_EQ(Failed().code(), Code(absl::StatusCode::kNotFound));
}

// Of what lies in the remote tier each node reads a part for all.
TEST_F(AgentPartsTest, WhatAnotherNodeReadsInRemoteComesFromThere) {
  Ready();
  const ConnectionId reader = Connect(100);
  Attach(reader, 7);
  auto opens = Locate({{TierKind::kRemote, ""}}, "n2");
  ASSERT_EQ(opens.size(), 1u);
  EXPECT_EQ(opens[0].tier, TierKind::kRemote);
  EXPECT_EQ(opens[0].peers, std::vector<std::string>{"n2"});
  Opened(opens[0]);
  const auto replies = Take<SendReply>();
  ASSERT_EQ(replies.size(), 1u);
  EXPECT_EQ(replies[0].frame.attach().tier(), "remote");
  EXPECT_EQ(replies[0].frame.attach().parts_bytes(), kMemory);
  // Its file is damaged, as whoever read it at the end says.
  Attach(reader, 8);
  opens = Locate({{TierKind::kRemote, ""}}, "n2");
  ASSERT_EQ(opens.size(), 1u);
  Said(x_);
  Feed(DurableOpened{opens[0].drain, absl::DataLossError("the record is torn"), true, {}, nullptr});
  const auto bad = Only<ShardBad>(Said(x_));
  ASSERT_EQ(bad.size(), 1u);
  EXPECT_EQ(bad[0].tier, TierKind::kRemote);
  // Who wants files as a whole opens them here, and so does all where nobody is named.
  Attach(reader, 10, 10'000, /*of_files=*/false);
  opens = Locate({{TierKind::kRemote, ""}}, "n2");
  ASSERT_EQ(opens.size(), 1u);
  EXPECT_TRUE(opens[0].peers.empty());
  Attach(reader, 9);
  opens = Locate({{TierKind::kRemote, ""}});
  ASSERT_EQ(opens.size(), 1u);
  EXPECT_TRUE(opens[0].peers.empty());
}

// ---- Images that are compressed: no descriptor shows them ----

class CompressedForReadersTest : public AgentPartsTest {
 protected:
  // The remote copy as it is opened for a reader.
  OpenDurable OpenRemote() {
    const auto opens = Locate({{TierKind::kRemote, ""}});
    EXPECT_EQ(opens.size(), 1u);
    return opens.empty() ? OpenDurable() : opens[0];
  }
  // It turns out to be had in parts only; what is done then.
  std::vector<OpenDurable> InPartsOnly(const OpenDurable& open) {
    DurableOpened opened{open.drain, absl::OkStatus(), false, Copy(x_, 9, 3), nullptr};
    opened.parts_only = true;
    Feed(opened);
    return Take<OpenDurable>();
  }
};

TEST_F(CompressedForReadersTest, TheyAreReadInParts) {
  Ready();
  const ConnectionId reader = Connect(100);
  for (const bool of_files : {true, false}) {
    Attach(reader, of_files ? 7 : 8, 10'000, of_files);
    const OpenDurable first = OpenRemote();
    EXPECT_FALSE(first.in_parts);
    const auto again = InPartsOnly(first);
    ASSERT_EQ(again.size(), 1u);
    EXPECT_NE(again[0].drain, first.drain);
    EXPECT_TRUE(again[0].in_parts);
    EXPECT_EQ(again[0].tier, TierKind::kRemote);
    EXPECT_EQ(again[0].key.id, (ShardId{x_, 1, 9, 3}));
    EXPECT_EQ(again[0].key.world_size, 4u);
    EXPECT_TRUE(again[0].peers.empty());
    EXPECT_EQ(again[0].whole, !of_files) << "with what it leaves out, for who wants all of it";
    Opened(again[0]);
    const auto replies = Take<SendReply>();
    ASSERT_EQ(replies.size(), 1u);
    EXPECT_EQ(replies[0].frame.attach().tier(), "remote");
    EXPECT_EQ(replies[0].frame.attach().parts_bytes(), kMemory);
    Read(reader, of_files ? 7 : 8, {{5, 6, 0}});
    EXPECT_EQ(Take<ReadParts>().size(), 1u);
  }
}

TEST_F(CompressedForReadersTest, WhoTakesNoPartsIsToldWhatIsNeeded) {
  Ready();
  v1::ClientFrame frame;
  v1::Attach& attach = *frame.mutable_attach();
  attach.set_job("job");
  attach.set_rank(3);
  attach.set_any_tier(true);
  attach.set_hold(7);
  attach.set_deadline_ms(10'000);
  Ask(Connect(100), frame);
  const auto locate = [&] {
    for (const AttachAsked& asked : Only<AttachAsked>(Said(x_))) {
      Tell(x_, ShardLocated{asked.token, {1, 9}, 4, {{TierKind::kRemote, ""}}, ""});
    }
    return Take<OpenDurable>();
  };
  const auto opens = locate();
  ASSERT_EQ(opens.size(), 1u);
  EXPECT_TRUE(InPartsOnly(opens[0]).empty());
  EXPECT_TRUE(locate().empty()) << "there is no other tier";
  const v1::Failure failure = Failed();
  EXPECT_EQ(failure.reason(), v1::Failure::REASON_UNREADABLE);
  EXPECT_THAT(failure.message(), HasSubstr("compressed"));
  EXPECT_TRUE(Only<ShardBad>(Said(x_)).empty()) << "nothing is wrong with the copy";
}

TEST_F(CompressedForReadersTest, LimitsOfPartsHoldForThem) {
  Ready();
  const ConnectionId reader = Connect(100);
  for (uint64_t hold = 1; hold <= kPartsPerReaderMax; ++hold) {
    Open(reader, hold);
  }
  Attach(reader, 99);
  EXPECT_TRUE(InPartsOnly(OpenRemote()).empty());
  EXPECT_THAT(Failed().message(), HasSubstr("release some"));
}

TEST_F(CompressedForReadersTest, WhoHasGoneMeanwhileGetsNone) {
  Ready();
  const ConnectionId reader = Connect(100);
  Attach(reader, 7);
  const OpenDurable first = OpenRemote();
  Feed(ConnectionClosed{reader});
  EXPECT_TRUE(InPartsOnly(first).empty());
  EXPECT_TRUE(Take<SendReply>().empty());
}

}  // namespace
}  // namespace holdfast
