// One rule of docs/protocol.md, "Membership", a test.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <string>

#include "tests/server/membership/session_world.h"

namespace holdfast {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Key;

constexpr int64_t kSomeLease = 99;  // of a node that is not played here

TEST(EtcdSession, ALeaseHoldsFromWhenItWasAskedForLessAMargin) {
  SessionWorld world(1, {});
  world.Add("a");
  world.Run(milliseconds(100));
  ASSERT_TRUE(world.IsMember(0));
  const MonotonicTime until = world.Told<LeaseHolds>(0).back().until;
  EXPECT_LE(until - world.Local(0), seconds(9));
  EXPECT_GT(until - world.Local(0), milliseconds(8800));
  // etcd is away: nothing is told, until the lease is over by this node's own clock, before etcd
  // ends it.
  world.etcd_away = true;
  world.Run(milliseconds(8950));
  EXPECT_FALSE(world.IsMember(0));
  EXPECT_EQ(world.Told<LeaseLost>(0).size(), 1u);
  EXPECT_TRUE(world.etcd.kv.contains("/t/nodes/a"));
  EXPECT_THAT(world.nodes[0].problem, HasSubstr("etcd at "));
  world.etcd_away = false;
  world.Run(seconds(5));
  EXPECT_TRUE(world.IsMember(0));
  EXPECT_EQ(world.nodes[0].problem, "");
}

TEST(EtcdSession, AMachineThatWasSuspendedIsNoMemberAnyMore) {
  SessionWorld world(1, {});
  world.Add("a");
  world.Run(milliseconds(100));
  // As long as what is left of the margin, it makes no difference.
  for (int i = 0; i < 5; ++i) {
    world.Deliver(0, EtcdSession::Slept{milliseconds(400)});
    world.Run(milliseconds(100));  // and the lease is renewed, before anything else
  }
  EXPECT_TRUE(world.Told<LeaseLost>(0).empty());
  // Twice that is longer than the margin, also if it was told in two parts.
  world.etcd_away = true;
  world.Deliver(0, EtcdSession::Slept{milliseconds(400)});
  EXPECT_TRUE(world.Told<LeaseLost>(0).empty());
  world.Deliver(0, EtcdSession::Slept{milliseconds(400)});
  EXPECT_EQ(world.Told<LeaseLost>(0).size(), 1u);
  EXPECT_FALSE(world.IsMember(0));
}

// What the answer to a renewal that was under way counts from was before that.
TEST(EtcdSession, AMachineThatWasSuspendedDuringARenewalRenewsAgain) {
  SessionWorld world(1, {});
  world.Add("a");
  world.Run(milliseconds(100));
  world.Deliver(0, EtcdSession::Slept{milliseconds(1)});  // it is renewed: the answer is to come
  world.Deliver(0, EtcdSession::Slept{milliseconds(400)});
  world.Run(milliseconds(100));
  EXPECT_TRUE(world.Told<LeaseLost>(0).empty());
  world.etcd_away = true;
  world.Deliver(0, EtcdSession::Slept{milliseconds(200)});
  EXPECT_TRUE(world.Told<LeaseLost>(0).empty());
}

TEST(EtcdSession, ARestartTakesItsPlaceAtOnce) {
  SessionWorld world(1, {});
  world.Add("a");
  world.Run(milliseconds(100));
  world.Deliver(0, EtcdSession::AskCampaign{"x", 0});
  world.Run(milliseconds(100));
  ASSERT_EQ(world.Told<Elected>(0).size(), 1u);
  world.Crash(0);
  world.StartNode(0);
  world.Run(milliseconds(100));
  EXPECT_TRUE(world.IsMember(0));
  // And nothing of its earlier life is in the way.
  world.Deliver(0, EtcdSession::AskCampaign{"x", 0});
  world.Run(milliseconds(100));
  ASSERT_EQ(world.Told<Elected>(0).size(), 2u);
  EXPECT_EQ(world.Told<Elected>(0).back().epoch, 2u);
}

TEST(EtcdSession, ANameIsRefusedWhileAnotherHasIt) {
  SessionWorld world(1, {});
  world.Add("a");
  world.Run(milliseconds(100));
  world.Add("a");
  world.Run(seconds(30));
  EXPECT_TRUE(world.IsMember(0));
  EXPECT_FALSE(world.IsMember(1));
  EXPECT_TRUE(world.Told<LeaseHolds>(1).empty());
  EXPECT_THAT(world.nodes[1].problem,
              HasSubstr("the node name 'a' is used by a daemon at 127.0.0.1:1 (version v)"));
  // A campaign of it waits: it is nobody.
  world.Deliver(1, EtcdSession::AskCampaign{"x", 0});
  world.Run(seconds(5));
  EXPECT_TRUE(world.Told<Elected>(1).empty());
  world.Crash(0);
  world.Run(seconds(11));
  EXPECT_TRUE(world.IsMember(1));
  EXPECT_EQ(world.nodes[1].problem, "");
  EXPECT_EQ(world.Told<Elected>(1).size(), 1u);
}

TEST(EtcdSession, AStateIsFencedByAnotherElection) {
  SessionWorld world(1, {});
  world.Add("a");
  world.Run(milliseconds(100));
  world.Deliver(0, EtcdSession::AskCampaign{"x", 41});
  world.Run(milliseconds(100));
  ASSERT_EQ(world.Told<Elected>(0).size(), 1u);
  EXPECT_EQ(world.Told<Elected>(0)[0].epoch, 42u);
  // Somebody else is the host, and this node does not know it yet: its watch is slow.
  world.etcd.CloseStream((world.nodes[0].stream << 8) | 0);
  world.etcd.Delete("/t/jobs/x/host");
  world.etcd.Put("/t/jobs/x/host", EncodeHost({"b", 1, 43}));
  world.Deliver(0, EtcdSession::AskStoreState{"x", {42, 1, "old"}});
  world.Run(milliseconds(100));
  ASSERT_EQ(world.Told<StateFenced>(0).size(), 1u);
  EXPECT_EQ(world.Told<Deposed>(0).size(), 1u);
  EXPECT_TRUE(world.Told<StateStored>(0).empty());
  EXPECT_FALSE(world.etcd.kv.contains("/t/jobs/x/state"));
}

TEST(EtcdSession, AStateIsReadByTheNextHostAndForgotten) {
  SessionWorld world(1, {});
  world.Add("a");
  world.Add("b");
  world.Run(milliseconds(100));
  world.Deliver(0, EtcdSession::AskCampaign{"x", 0});
  world.Run(milliseconds(100));
  for (uint64_t version = 1; version <= 5; ++version) {
    world.Deliver(0, EtcdSession::AskStoreState{"x", {1, version, "v" + std::to_string(version)}});
  }
  world.Run(milliseconds(100));
  EXPECT_EQ(world.Told<StateStored>(0).size(), 5u);
  world.Deliver(1, EtcdSession::AskReadState{"x"});
  world.Deliver(1, EtcdSession::AskCampaign{"x", 0});
  world.Run(milliseconds(100));
  ASSERT_EQ(world.Told<StateIs>(1).size(), 1u);
  EXPECT_EQ(world.Told<StateIs>(1)[0].state, "v5");
  ASSERT_EQ(world.Told<CampaignLost>(1).size(), 1u);
  EXPECT_EQ(world.Told<CampaignLost>(1)[0].winner.node, "a");
  world.nodes[0].hosts.erase("x");
  world.Deliver(0, EtcdSession::AskResign{"x"});
  world.Run(milliseconds(100));
  world.Deliver(1, EtcdSession::AskCampaign{"x", 0});
  world.Run(milliseconds(100));
  ASSERT_EQ(world.Told<Elected>(1).size(), 1u);
  const Elected elected = world.Told<Elected>(1)[0];
  EXPECT_EQ(elected.epoch, 2u);
  EXPECT_EQ(elected.state_epoch, 1u);
  EXPECT_EQ(elected.state_version, 5u);
  EXPECT_EQ(elected.state, "v5");
  world.Deliver(1, EtcdSession::AskForgetJob{"x", 1});
  world.nodes[1].hosts.erase("x");
  world.Deliver(1, EtcdSession::AskForgetJob{"x", 2});
  world.Run(milliseconds(100));
  ASSERT_EQ(world.Told<JobForgotten>(1).size(), 2u);
  EXPECT_FALSE(world.Told<JobForgotten>(1)[0].forgotten);
  EXPECT_TRUE(world.Told<JobForgotten>(1)[1].forgotten);
  EXPECT_FALSE(world.etcd.kv.contains("/t/jobs/x/state"));
  EXPECT_TRUE(world.etcd.kv.contains("/t/jobs/x/epoch"));
}

TEST(EtcdSession, WhatIsTooLargeOrNoNameIsAnsweredAtOnce) {
  SessionWorld world(1, {});
  world.Add("a");
  world.Deliver(
      0, EtcdSession::AskStoreState{"x", {1, 1, std::string(kAgreedStateBytesMax + 1, 'x')}});
  ASSERT_EQ(world.Told<StateFailed>(0).size(), 1u);
  EXPECT_THAT(world.Told<StateFailed>(0)[0].why, HasSubstr("1048577 bytes; at most 1048576"));
  world.Deliver(0, EtcdSession::AskStoreState{"x", {1, 1, "y"}});
  EXPECT_EQ(world.Told<StateFenced>(0).size(), 1u);
  world.Deliver(0, EtcdSession::AskCampaign{"../x", 0});
  world.Deliver(0, EtcdSession::AskReadState{"a/b"});
  world.Deliver(0, EtcdSession::AskWatchHost{std::string("\0", 1)});
  ASSERT_EQ(world.Told<CampaignLost>(0).size(), 1u);
  EXPECT_THAT(world.Told<CampaignLost>(0)[0].why, HasSubstr("job name"));
  ASSERT_EQ(world.Told<StateIs>(0).size(), 1u);
  EXPECT_THAT(world.nodes[0].problem, HasSubstr("job name"));
}

TEST(EtcdSession, ValuesThatAreNoneOfOursAreReportedAndPassedOver) {
  SessionWorld world(1, {});
  world.etcd.Put("/t/nodes/bad", "\xff\x01");
  world.etcd.Put("/t/nodes/huge", std::string(2 << 20, 'x'));
  world.etcd.Put("/t/nodes/liar", EncodeNode({"other", "127.0.0.1:1", {}, 0, "v", 1}));
  world.etcd.Put("/t/jobs/x/host", "nonsense");
  world.etcd.Put("/t/jobs/y/epoch", EncodeEpoch(kEpochMax));
  world.etcd.on_put = nullptr;
  world.etcd.Put("/t/jobs/z/state", "nonsense");
  world.Add("a");
  for (const char* job : {"x", "y", "z"}) {
    world.Deliver(0, EtcdSession::AskWatchHost{job});
    world.Deliver(0, EtcdSession::AskCampaign{job, 0});
    world.Deliver(0, EtcdSession::AskReadState{job});
  }
  world.Run(seconds(1));
  EXPECT_EQ(world.nodes[0].members.size(), 1u);
  EXPECT_THAT(world.nodes[0].problem, HasSubstr("3 keys under /t/nodes/ are passed over: '"));
  EXPECT_THAT(world.nodes[0].problem, HasSubstr("job 'x': the key of its host cannot be read"));
  ASSERT_EQ(world.Told<Elected>(0).size(), 1u);
  EXPECT_EQ(world.Told<Elected>(0)[0].job, "z");
  EXPECT_EQ(world.Told<Elected>(0)[0].state_version, 0u);
  ASSERT_EQ(world.Told<CampaignLost>(0).size(), 1u);
  EXPECT_EQ(world.Told<CampaignLost>(0)[0].job, "y");
  world.etcd.Delete("/t/nodes/bad");
  world.etcd.Delete("/t/nodes/huge");
  world.Run(seconds(1));
  EXPECT_THAT(world.nodes[0].problem, HasSubstr("1 key under /t/nodes/ is passed over: 'liar'"));
  world.etcd.Delete("/t/nodes/liar");
  world.etcd.Delete("/t/jobs/x/host");
  world.Run(seconds(5));
  EXPECT_EQ(world.nodes[0].hosts.count("x"), 1u);
  EXPECT_THAT(world.nodes[0].problem, ::testing::Not(HasSubstr("nodes/")));
}

TEST(EtcdSession, ErasedDataIsToldAndEverythingIsThereAgain) {
  SessionWorld world(1, {.wipes = true});
  world.Add("a");
  world.Add("b");
  world.Run(milliseconds(100));
  world.Deliver(0, EtcdSession::AskCampaign{"x", 0});
  world.Run(seconds(5));
  world.WipeEtcd();
  world.Run(seconds(10));
  EXPECT_EQ(world.Told<ClusterWiped>(0).size(), 1u);
  EXPECT_EQ(world.Told<LeaseLost>(0).size(), 1u);
  EXPECT_EQ(world.Told<Deposed>(0).size(), 1u);
  EXPECT_TRUE(world.IsMember(0));
  EXPECT_EQ(world.nodes[0].members.size(), 2u);
  EXPECT_EQ(world.nodes[1].members.size(), 2u);
}

// As from a dump of the keys: with the values of before, and without leases, which no dump has.
TEST(EtcdSession, WhatIsPutBackWhileAllAreDownGivesWayToThosePresent) {
  SessionWorld world(1, {});
  world.Add("a");
  world.Add("b");
  world.Run(milliseconds(100));
  world.Deliver(0, EtcdSession::AskCampaign{"x", 0});
  world.Run(milliseconds(100));
  ASSERT_EQ(world.Told<Elected>(0).size(), 1u);
  const std::map<std::string, etcd::KeyValue> dump = world.etcd.kv;
  ASSERT_TRUE(dump.contains("/t/nodes/a") && dump.contains("/t/jobs/x/host"));
  world.Crash(0);
  world.Crash(1);
  world.Run(seconds(20));
  for (const auto& [key, value] : dump) {
    world.etcd.Put(key, value.value());
  }
  world.StartNode(0);
  world.StartNode(1);
  world.Run(seconds(1));
  for (const size_t n : {0, 1}) {
    EXPECT_TRUE(world.IsMember(n));
    EXPECT_EQ(world.nodes[n].problem, "");
    EXPECT_THAT(world.nodes[n].members, ElementsAre(Key("a"), Key("b")));
    for (const SessionWorld::Node& node : world.nodes) {
      EXPECT_EQ(world.nodes[n].members[node.name].incarnation, node.incarnation);
    }
  }
  // The host of before is none, and another node can be it.
  world.Deliver(1, EtcdSession::AskWatchHost{"x"});
  world.Run(milliseconds(100));
  EXPECT_EQ(world.Told<NoHost>(1).size(), 1u);
  EXPECT_TRUE(world.Told<HostIs>(1).empty());
  world.Deliver(1, EtcdSession::AskCampaign{"x", world.highest_epoch});
  world.Run(seconds(1));
  ASSERT_EQ(world.Told<Elected>(1).size(), 1u);
  EXPECT_EQ(world.Told<Elected>(1)[0].epoch, 2u);
  ASSERT_EQ(world.Told<HostIs>(1).size(), 1u);
  EXPECT_EQ(world.Told<HostIs>(1)[0].host.incarnation, world.nodes[1].incarnation);
  EXPECT_TRUE(world.Told<CampaignLost>(1).empty());
}

TEST(EtcdSession, ANameWithoutALeaseIsOfNoNode) {
  SessionWorld world(1, {});
  world.etcd.Put("/t/nodes/gone", EncodeNode({"gone", "127.0.0.1:9", {}, 0, "v", 1}));
  world.Add("a");
  world.Run(seconds(1));
  EXPECT_THAT(world.nodes[0].members, ElementsAre(Key("a")));
  EXPECT_THAT(world.nodes[0].problem, HasSubstr("etcdctl del /t/nodes/gone"));
  EXPECT_TRUE(world.etcd.kv.contains("/t/nodes/gone"));  // that is for people to judge
  world.etcd.Delete("/t/nodes/gone");
  world.Run(seconds(5));
  EXPECT_EQ(world.nodes[0].problem, "");
}

// Its key would outlive it.
TEST(EtcdSession, AHostWhoseKeyWasTakenOffItsLeaseIsHostNoMore) {
  SessionWorld world(1, {});
  world.Add("a");
  world.Run(milliseconds(100));
  world.Deliver(0, EtcdSession::AskWatchHost{"x"});
  world.Deliver(0, EtcdSession::AskCampaign{"x", 0});
  world.Run(milliseconds(100));
  ASSERT_EQ(world.nodes[0].hosts.count("x"), 1u);
  world.etcd.Put("/t/jobs/x/host", world.etcd.kv.at("/t/jobs/x/host").value());
  world.Run(seconds(5));
  ASSERT_EQ(world.Told<Deposed>(0).size(), 1u);
  world.Deliver(0, EtcdSession::AskCampaign{"x", 1});
  world.Run(seconds(1));
  EXPECT_EQ(world.nodes[0].hosts.count("x"), 1u);
  EXPECT_TRUE(world.etcd.HasLease(world.etcd.kv.at("/t/jobs/x/host").lease()));
}

TEST(EtcdSession, CompactedWhileItWasAwayItListsAnew) {
  SessionWorld world(1, {});
  world.Add("a");
  world.Run(seconds(1));
  ASSERT_EQ(world.Told<MembersAre>(0).size(), 1u);
  world.etcd.CloseStream((world.nodes[0].stream << 8) | 0);
  world.etcd.Put("/t/nodes/late", EncodeNode({"late", "127.0.0.1:9", {}, 0, "v", 1}), kSomeLease);
  world.etcd.Compact();
  world.Deliver(0, EtcdSession::WatchEnded{world.nodes[0].stream, absl::UnavailableError("gone")});
  world.Run(seconds(2));
  EXPECT_EQ(world.Told<MembersAre>(0).size(), 2u);
  EXPECT_EQ(world.nodes[0].members.count("late"), 1u);
  EXPECT_TRUE(world.Told<LeaseLost>(0).empty());
}

// That there was a host in between nobody has told: whoever was elected knew it by itself.
TEST(EtcdSession, WhoResignsIsToldThatThereIsNoHostThoughItsOwnPlaceWasNeverSeen) {
  SessionWorld world(1, {});
  world.Add("a");
  world.Run(seconds(1));
  world.Deliver(0, EtcdSession::AskWatchHost{"x"});
  world.Run(seconds(1));
  ASSERT_EQ(world.Told<NoHost>(0).size(), 1u);
  world.etcd.CloseStream((world.nodes[0].stream << 8) | 0);
  world.Deliver(0, EtcdSession::AskCampaign{"x", 0});
  world.Run(milliseconds(100));
  ASSERT_EQ(world.Told<Elected>(0).size(), 1u);
  EXPECT_TRUE(world.Told<HostIs>(0).empty());
  world.nodes[0].hosts.erase("x");
  world.Deliver(0, EtcdSession::AskResign{"x"});
  world.Run(milliseconds(100));
  ASSERT_FALSE(world.etcd.kv.contains("/t/jobs/x/host"));
  world.etcd.Compact();
  world.Deliver(0, EtcdSession::WatchEnded{world.nodes[0].stream, absl::UnavailableError("gone")});
  world.Run(seconds(2));
  EXPECT_EQ(world.Told<NoHost>(0).size(), 2u);
  EXPECT_TRUE(world.Told<Deposed>(0).empty());
}

TEST(EtcdSession, ATokenThatEndedIsAskedForAgain) {
  SessionWorld world(1, {});
  world.etcd.token = "t1";
  world.etcd.password = "wrong";
  world.Add("a", "user");
  world.Run(seconds(1));
  EXPECT_FALSE(world.IsMember(0));
  EXPECT_THAT(world.nodes[0].problem, HasSubstr("user 'user': etcdserver: authentication failed"));
  world.etcd.password = "secret";
  world.Run(seconds(5));
  EXPECT_TRUE(world.IsMember(0));
  world.etcd.token = "t2";
  world.Run(seconds(30));
  EXPECT_TRUE(world.IsMember(0));
  EXPECT_TRUE(world.Told<LeaseLost>(0).empty());
}

TEST(EtcdSession, SomebodyRemovesTheNodesKey) {
  SessionWorld world(1, {});
  world.Add("a");
  world.Run(seconds(1));
  const std::string value = world.etcd.kv.at("/t/nodes/a").value();
  {
    // Between the removal and the new key nobody is asked what he believes.
    world.etcd.Delete("/t/nodes/a");
    for (auto& [key, message] : world.etcd.TakeMessages()) {
      world.Deliver(0, EtcdSession::WatchMessage{key >> 8, message});
    }
  }
  world.After(Duration(0), [] {});
  world.nodes[0].until = {};
  world.Run(seconds(5));
  EXPECT_EQ(world.etcd.kv.at("/t/nodes/a").value(), value);
  EXPECT_TRUE(world.Told<LeaseLost>(0).empty());
}

TEST(EtcdSession, AnElectionThatWasGivenUpAndTakesPlaceIsUndone) {
  SessionWorld world(1, {});
  world.Add("a");
  world.Run(seconds(1));
  world.Deliver(0, EtcdSession::AskCampaign{"x", 0});
  world.Run(std::chrono::microseconds(500));  // the election is on its way
  world.Deliver(0, EtcdSession::AskResign{"x"});
  world.Run(seconds(2));
  EXPECT_TRUE(world.Told<Elected>(0).empty());
  EXPECT_EQ(world.etcd.kv.at("/t/jobs/x/epoch").version(), 1);
  EXPECT_FALSE(world.etcd.kv.contains("/t/jobs/x/host"));
}

TEST(EtcdSession, ManyNodesAreListedInPages) {
  SessionWorld world(1, {});
  for (int i = 0; i < 1536; ++i) {
    const std::string name = "n" + std::to_string(i);
    world.etcd.Put("/t/nodes/" + name, EncodeNode({name, "127.0.0.1:9", {}, 0, "v", 1}),
                   kSomeLease);
  }
  world.Add("a");
  world.Run(seconds(1));
  EXPECT_EQ(world.nodes[0].members.size(), 1537u);
  EXPECT_EQ(world.Told<MembersAre>(0).size(), 1u);
}

// ---- The cluster's note ----

const std::string kDirectory(32, 'd');
const std::string kOtherDirectory(32, 'e');

TEST(EtcdSession, TheFirstToAskSaysWhatTheClustersIdIs) {
  SessionWorld world(1, {});
  world.Add("a");
  world.Add("b");
  world.Deliver(0, EtcdSession::AskNote{std::string(32, 'a')});
  world.Run(milliseconds(100));
  world.Deliver(1, EtcdSession::AskNote{std::string(32, 'b')});
  world.Run(milliseconds(100));
  for (size_t n : {size_t{0}, size_t{1}}) {
    ASSERT_EQ(world.nodes[n].notes.size(), 1u);
    EXPECT_EQ(world.nodes[n].notes[0].id, std::string(32, 'a'));
    EXPECT_EQ(world.nodes[n].notes[0].remote, "");
  }
  EXPECT_EQ(world.etcd.kv.at("/t/cluster").value(), std::string(32, 'a'));
}

TEST(EtcdSession, OneRemoteDirectoryIsNotedAndReplacedOnlyKnowingly) {
  SessionWorld world(1, {});
  world.Add("a");
  world.Add("b");
  world.Deliver(0, EtcdSession::AskNoteRemote{kDirectory, ""});
  world.Deliver(1, EtcdSession::AskNoteRemote{kOtherDirectory, ""});
  world.Run(milliseconds(100));
  const std::string noted = world.etcd.kv.at("/t/remote").value();
  EXPECT_EQ(world.nodes[0].notes.back().remote, noted);
  EXPECT_EQ(world.nodes[1].notes.back().remote, noted);
  world.Deliver(0, EtcdSession::AskNoteRemote{kOtherDirectory, std::string(32, 'x')});
  world.Run(milliseconds(100));
  EXPECT_EQ(world.nodes[0].notes.back().remote, noted);
  const std::string other = noted == kDirectory ? kOtherDirectory : kDirectory;
  world.Deliver(0, EtcdSession::AskNoteRemote{other, noted});
  world.Run(milliseconds(100));
  EXPECT_EQ(world.nodes[0].notes.back().remote, other);
  EXPECT_EQ(world.etcd.kv.at("/t/remote").value(), other);
}

TEST(EtcdSession, AClusterKeepsItsIdWhenEtcdIsErasedUnderIt) {
  SessionWorld world(1, {.wipes = true});
  world.Add("a");
  world.Deliver(0, EtcdSession::AskNote{});
  world.Run(milliseconds(100));
  ASSERT_EQ(world.nodes[0].notes.size(), 1u);
  const std::string id = world.nodes[0].notes[0].id;
  EXPECT_EQ(id.size(), 32u);
  world.WipeEtcd();
  world.Run(seconds(10));
  EXPECT_EQ(world.nodes[0].notes.size(), 2u) << "and it is told without being asked for";
  EXPECT_EQ(world.nodes[0].notes.back().id, id);
  EXPECT_EQ(world.etcd.kv.at("/t/cluster").value(), id);
}

TEST(EtcdSession, NothingIsToldOfANoteThatIsNone) {
  SessionWorld world(1, {});
  world.etcd.Put("/t/cluster", "what is this");
  world.Add("a");
  world.Deliver(0, EtcdSession::AskNote{});
  world.Run(seconds(1));
  EXPECT_TRUE(world.nodes[0].notes.empty());
  EXPECT_THAT(world.nodes[0].problem, HasSubstr("/t/cluster"));
  EXPECT_TRUE(world.IsMember(0)) << "all else goes on";
  world.etcd.Delete("/t/cluster");
  world.Run(seconds(5));
  EXPECT_EQ(world.nodes[0].notes.size(), 1u);
  EXPECT_EQ(world.nodes[0].problem, "");
}

}  // namespace
}  // namespace holdfast
