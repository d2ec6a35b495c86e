// Membership against a real etcd.
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/integration/etcd_server.h"
#include "tests/integration/member_probe.h"

namespace holdfast {
namespace {

TEST(Etcd, NodesSeeEachOtherComeAndGo) {
  EtcdServer etcd;
  ASSERT_TRUE(etcd.Start());
  Member a({.name = "a",
            .etcd = {etcd.endpoint()},
            .lease_ttl_ms = 20'000,
            .address = "127.0.0.1:1001"});
  ASSERT_TRUE(a.Await<LeaseHolds>());
  ASSERT_TRUE(a.AwaitMembers({"a"}));
  auto b = std::make_unique<Member>(MemberOptions{
      .name = "b", .etcd = {etcd.endpoint()}, .lease_ttl_ms = 5000, .address = "127.0.0.1:1002"});
  ASSERT_TRUE(b->Await<LeaseHolds>());
  ASSERT_TRUE(a.AwaitMembers({"a", "b"}));
  ASSERT_TRUE(b->AwaitMembers({"a", "b"}));
  const NodeInfo seen = a.Members()["b"];
  EXPECT_EQ(seen.address, "127.0.0.1:1002");
  EXPECT_EQ(seen.labels, (std::vector<NodeLabel>{{"rack", "r1"}, {"zone", "z"}}));
  EXPECT_EQ(seen.capacity_bytes, 42u);
  EXPECT_EQ(seen.version, "test");
  EXPECT_NE(seen.incarnation, 0u);
  // It dies: its lease ends, and it is gone.
  b = nullptr;
  EXPECT_TRUE(a.AwaitMembers({"a"}));
  // Its own lease is renewed all the time, always further.
  EXPECT_TRUE(a.Await<LeaseHolds>());
  MonotonicTime last;
  for (const LeaseHolds& holds : a.All<LeaseHolds>()) {
    EXPECT_GT(holds.until, last);
    last = holds.until;
  }
  EXPECT_GE(a.All<LeaseHolds>().size(), 2u);
  EXPECT_TRUE(a.All<LeaseLost>().empty());
  // A clean end is seen at once: no lease has to end (this one would last for an hour).
  Member c({.name = "c", .etcd = {etcd.endpoint()}, .lease_ttl_ms = 3'600'000});
  ASSERT_TRUE(a.AwaitMembers({"a", "c"}));
  c->Leave();
  EXPECT_TRUE(c.Await<Left>());
  EXPECT_TRUE(a.AwaitMembers({"a"}));
}

TEST(Etcd, AwayAtFirstAndForAWhile) {
  EtcdServer etcd;
  Member a({.name = "a", .etcd = {etcd.endpoint()}, .lease_ttl_ms = 6000});
  EXPECT_TRUE(a.AwaitProblem("etcd at " + etcd.endpoint()));
  ASSERT_TRUE(etcd.Start());
  ASSERT_TRUE(a.Await<LeaseHolds>());
  a->Campaign("x", 0);
  const auto elected = a.Await<Elected>();
  ASSERT_TRUE(elected);
  // It goes away: the lease is over by this node's own clock, and comes back with etcd.
  etcd.Kill();
  ASSERT_TRUE(a.Await<LeaseLost>());
  EXPECT_EQ(a.Await<Deposed>()->epoch, elected->epoch);
  const MonotonicTime until = a.All<LeaseHolds>().back().until;
  EXPECT_GE(Clock::System()->Now(), until);
  a->Campaign("x", 0);
  ASSERT_TRUE(etcd.Start());
  const auto again = a.Await<Elected>();
  ASSERT_TRUE(again);
  EXPECT_GT(again->epoch, elected->epoch);
  EXPECT_TRUE(a.AwaitMembers({"a"}));
  EXPECT_TRUE(a.All<ClusterWiped>().empty());
  EXPECT_TRUE(a.AwaitNoProblem()) << a.Problem();
}

TEST(Etcd, ItsDataIsErased) {
  EtcdServer etcd;
  ASSERT_TRUE(etcd.Start());
  Member a({.name = "a", .etcd = {etcd.endpoint()}, .lease_ttl_ms = 60'000});
  Member b({.name = "b", .etcd = {etcd.endpoint()}, .lease_ttl_ms = 60'000});
  ASSERT_TRUE(a.AwaitMembers({"a", "b"}));
  a->Campaign("x", 0);
  const auto first = a.Await<Elected>();
  ASSERT_TRUE(first);
  a->StoreState("x", first->epoch, 1, "kept");
  ASSERT_TRUE(a.Await<StateStored>());
  etcd.Kill();
  etcd.Wipe();
  ASSERT_TRUE(etcd.Start());
  EXPECT_TRUE(a.Await<ClusterWiped>());
  EXPECT_TRUE(b.Await<ClusterWiped>());
  ASSERT_TRUE(a.AwaitMembers({"a", "b"}));
  // etcd has forgotten the epochs. Those who remember start above them.
  b->Campaign("x", first->epoch);
  const auto second = b.Await<Elected>();
  ASSERT_TRUE(second);
  EXPECT_GT(second->epoch, first->epoch);
  EXPECT_EQ(second->state_version, 0u);
  a->StoreState("x", first->epoch, 2, "from before");
  EXPECT_TRUE(a.Await<StateFenced>());
}

TEST(Etcd, CompactedWhileItsClientIsAway) {
  EtcdServer etcd;
  ASSERT_TRUE(etcd.Start());
  Member a({.name = "a", .etcd = {etcd.endpoint()}, .lease_ttl_ms = 60'000});
  ASSERT_TRUE(a.AwaitMembers({"a"}));
  ASSERT_TRUE(a.Await<MembersAre>());
  // A client that does not read: its watch falls behind what etcd keeps.
  etcd.Kill();
  ASSERT_TRUE(a.AwaitProblem("etcd at"));
  ASSERT_TRUE(etcd.Start());
  // Whether the client or the compaction comes first is left to chance; both ends are right.
  ASSERT_EQ(etcd.Ctl({"put", "/holdfast/default/nodes/other", "no node"}).exit_code, 0);
  ASSERT_EQ(etcd.Ctl({"put", "/elsewhere", "1"}).exit_code, 0);
  const CommandAnswer got = etcd.Ctl({"get", "/elsewhere", "--write-out=fields"});
  const size_t at = got.text.find("\"Revision\" : ");
  ASSERT_NE(at, std::string::npos) << got.text;
  const std::string revision = std::to_string(std::stoll(got.text.substr(at + 13)));
  const CommandAnswer compacted = etcd.Ctl({"compact", revision});
  ASSERT_EQ(compacted.exit_code, 0) << compacted.text;
  EXPECT_TRUE(a.AwaitProblem("1 key under /holdfast/default/nodes/"));
  EXPECT_TRUE(a.AwaitMembers({"a"}));
  EXPECT_TRUE(a.All<LeaseLost>().empty());
}

TEST(Etcd, ItsLeaderIsKilled) {
  std::vector<std::unique_ptr<EtcdServer>> servers = EtcdServer::Cluster(3);
  std::vector<std::string> endpoints;
  for (const auto& server : servers) {
    server->Launch();
    endpoints.push_back(server->endpoint());
  }
  for (const auto& server : servers) {
    ASSERT_TRUE(server->AwaitReady());
  }
  Member a({.name = "a", .etcd = endpoints, .lease_ttl_ms = 60'000});
  Member b(
      {.name = "b", .etcd = {endpoints[1], endpoints[2], endpoints[0]}, .lease_ttl_ms = 60'000});
  ASSERT_TRUE(a.AwaitMembers({"a", "b"}));
  ASSERT_TRUE(b.AwaitMembers({"a", "b"}));
  a->Campaign("x", 0);
  const auto elected = a.Await<Elected>();
  ASSERT_TRUE(elected);
  auto leader = servers.end();  // between two elections there is none
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (leader == servers.end() && std::chrono::steady_clock::now() < deadline) {
    leader = std::find_if(servers.begin(), servers.end(),
                          [](const auto& server) { return server->IsLeader(); });
  }
  ASSERT_NE(leader, servers.end());
  (*leader)->Kill();
  // Stored through another server, under the same lease: nobody lost anything.
  a->StoreState("x", elected->epoch, 1, "after");
  EXPECT_TRUE(a.Await<StateStored>());
  b->ReadState("x");
  EXPECT_EQ(b.Await<StateIs>()->state, "after");
  Member c({.name = "c", .etcd = endpoints, .lease_ttl_ms = 60'000});
  EXPECT_TRUE(a.AwaitMembers({"a", "b", "c"}));
  EXPECT_TRUE(b.AwaitMembers({"a", "b", "c"}));
  EXPECT_TRUE(a.All<LeaseLost>().empty());
  EXPECT_TRUE(b.All<LeaseLost>().empty());
  EXPECT_TRUE(a.All<ClusterWiped>().empty());
  // A server that answers nobody (stopped, its connections open) is left, too.
  const auto paused =
      std::find_if(servers.begin(), servers.end(), [&](const auto& s) { return s != *leader; });
  (*leader)->Start();
  (*paused)->Pause();
  a->StoreState("x", elected->epoch, 2, "again");
  EXPECT_TRUE(a.Await<StateStored>());
  b->ReadState("x");
  EXPECT_EQ(b.Await<StateIs>()->state, "again");
  EXPECT_TRUE(a.All<LeaseLost>().empty());
  (*paused)->Continue();
}

TEST(Etcd, OneOfManyWinsEachEpoch) {
  EtcdServer etcd;
  ASSERT_TRUE(etcd.Start());
  std::vector<std::unique_ptr<Member>> members;
  for (int i = 0; i < 6; ++i) {
    members.push_back(std::make_unique<Member>(MemberOptions{
        .name = "n" + std::to_string(i), .etcd = {etcd.endpoint()}, .lease_ttl_ms = 60'000}));
  }
  for (auto& member : members) {
    ASSERT_TRUE(member->Await<LeaseHolds>());
    (*member)->WatchHost("x");
    ASSERT_TRUE(member->Await<NoHost>());
  }
  Epoch last = 0;
  for (int round = 0; round < 8; ++round) {
    for (auto& member : members) {
      (*member)->Campaign("x", 0);
    }
    Member* winner = nullptr;
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    while (winner == nullptr && std::chrono::steady_clock::now() < deadline) {
      for (auto& member : members) {
        if (const auto all = member->All<Elected>(); !all.empty() && all.back().epoch > last) {
          winner = member.get();
        }
      }
    }
    ASSERT_NE(winner, nullptr);
    const Epoch epoch = winner->All<Elected>().back().epoch;
    EXPECT_EQ(epoch, last + 1);
    for (auto& member : members) {
      if (member.get() != winner) {
        const auto lost = member->Await<CampaignLost>();
        ASSERT_TRUE(lost);
        EXPECT_EQ(lost->winner.epoch, epoch);
      }
      EXPECT_TRUE(
          member->Await<HostIs>([&](const HostIs& host) { return host.host.epoch == epoch; }));
    }
    last = epoch;
    (*winner)->Resign("x");
    for (auto& member : members) {
      EXPECT_TRUE(member->Await<NoHost>());
    }
  }
  size_t elected = 0;
  for (auto& member : members) {
    elected += member->All<Elected>().size();
  }
  EXPECT_EQ(elected, 8u);
}

TEST(Etcd, AStateIsFenced) {
  EtcdServer etcd;
  ASSERT_TRUE(etcd.Start());
  Member a({.name = "a", .etcd = {etcd.endpoint()}, .lease_ttl_ms = 60'000});
  a->Campaign("x", 7);
  const auto elected = a.Await<Elected>();
  ASSERT_TRUE(elected);
  EXPECT_EQ(elected->epoch, 8u);
  const std::string large(kAgreedStateBytesMax, 'x');
  a->StoreState("x", 8, 1, large);
  ASSERT_TRUE(a.Await<StateStored>());
  a->ReadState("x");
  EXPECT_EQ(a.Await<StateIs>()->state, large);
  // Somebody took the job away while its host looks elsewhere.
  ASSERT_EQ(etcd.Ctl({"del", "/holdfast/default/jobs/x/host"}).exit_code, 0);
  a->StoreState("x", 8, 2, "late");
  EXPECT_TRUE(a.Await<Deposed>());
  a->ReadState("x");
  EXPECT_EQ(a.Await<StateIs>()->version, 1u);
  // Whichever came first: etcd's answer to the store, or that this node hosts it no more.
  EXPECT_EQ(a.All<StateFenced>().size() + a.All<StateFailed>().size(), 1u);
}

TEST(Etcd, ARestartTakesItsPlaceAtOnceAndASecondMachineDoesNot) {
  EtcdServer etcd;
  ASSERT_TRUE(etcd.Start());
  const TemporaryDirectory state;
  // Leases of an hour: whoever waits for their end fails here.
  const MemberOptions options{.name = "a",
                              .etcd = {etcd.endpoint()},
                              .lease_ttl_ms = 3'600'000,
                              .address = "127.0.0.1:1001",
                              .state_dir = state.path()};
  auto first = std::make_unique<Member>(options);
  ASSERT_TRUE(first->AwaitMembers({"a"}));
  const uint64_t incarnation = first->Members()["a"].incarnation;
  Member watcher({.name = "w", .etcd = {etcd.endpoint()}});
  ASSERT_TRUE(watcher.AwaitMembers({"a", "w"}));
  Member impostor({.name = "a", .etcd = {etcd.endpoint()}, .address = "127.0.0.1:1002"});
  EXPECT_TRUE(impostor.AwaitProblem("the node name 'a' is used by a daemon at 127.0.0.1:1001"));
  EXPECT_TRUE(impostor.All<LeaseHolds>().empty());
  impostor->Leave();
  ASSERT_TRUE(impostor.Await<Left>());
  impostor.End();
  first = nullptr;  // dies
  Member again(options);
  ASSERT_TRUE(again.Await<LeaseHolds>());
  EXPECT_TRUE(watcher.AwaitAnotherLife("a", incarnation));
}

TEST(Etcd, WithCertificatesAndPasswords) {
  EtcdServer etcd({.tls = true});
  ASSERT_TRUE(etcd.Start());
  const TemporaryDirectory secrets;
  const std::string password_file = secrets.Path("password");
  ASSERT_TRUE(WriteFileAtomically(*Env::System(), password_file, "wrong\n").ok());
  for (const std::vector<std::string>& command : std::vector<std::vector<std::string>>{
           {"user", "add", "root:r"},
           {"user", "add", "hf:secret"},
           {"role", "add", "hf"},
           {"role", "grant-permission", "hf", "readwrite", "--prefix=true", "/holdfast/"},
           {"user", "grant-role", "hf", "hf"},
           {"user", "grant-role", "root", "root"},
           {"auth", "enable"}}) {
    const CommandAnswer done = etcd.Ctl(command);
    ASSERT_EQ(done.exit_code, 0) << done.text;
  }
  etcd.ctl_options = {"--user=root:r"};
  const auto with_files = [&](v1::ClusterConfig* config) {
    v1::EtcdConfig* settings = config->mutable_etcd();
    settings->set_ca_file(etcd.certificates().ca);
    settings->set_cert_file(etcd.certificates().client_cert);
    settings->set_key_file(etcd.certificates().client_key);
    settings->set_user("hf");
    settings->set_password_file(password_file);
  };
  Member a(
      {.name = "a", .etcd = {etcd.endpoint()}, .lease_ttl_ms = 60'000, .configure = with_files});
  EXPECT_TRUE(a.AwaitProblem("user 'hf'"));
  // The file is read anew at the next try.
  ASSERT_TRUE(WriteFileAtomically(*Env::System(), password_file, "secret\n").ok());
  ASSERT_TRUE(a.Await<LeaseHolds>());
  ASSERT_TRUE(a.AwaitMembers({"a"}));
  a->Campaign("x", 0);
  const auto elected = a.Await<Elected>();
  ASSERT_TRUE(elected);
  // Users and roles change: the token is of an earlier state of them, another one is asked for.
  const CommandAnswer added = etcd.Ctl({"user", "add", "third:t"});
  ASSERT_EQ(added.exit_code, 0) << added.text;
  a->StoreState("x", elected->epoch, 1, "s");
  EXPECT_TRUE(a.Await<StateStored>());
  EXPECT_TRUE(a.All<LeaseLost>().empty());
  // Another authority's certificate is none, and neither is no certificate.
  const TemporaryDirectory other;
  const TestCertificates others(other.path());
  Member stranger(
      {.name = "s", .etcd = {etcd.endpoint()}, .configure = [&](v1::ClusterConfig* config) {
         with_files(config);
         config->mutable_etcd()->set_ca_file(others.ca);
       }});
  EXPECT_TRUE(stranger.AwaitProblem("etcd at "));
  Member nobody(
      {.name = "o", .etcd = {etcd.endpoint()}, .configure = [&](v1::ClusterConfig* config) {
         with_files(config);
         config->mutable_etcd()->clear_cert_file();
         config->mutable_etcd()->clear_key_file();
       }});
  EXPECT_TRUE(nobody.AwaitProblem("etcd at "));
  EXPECT_TRUE(stranger.All<LeaseHolds>().empty());
  EXPECT_TRUE(nobody.All<LeaseHolds>().empty());
}

TEST(Etcd, HostileValuesArePassedOver) {
  EtcdServer etcd;
  ASSERT_TRUE(etcd.Start());
  ASSERT_EQ(
      etcd.Ctl({"put", "/holdfast/default/nodes/evil"}, std::string(1 << 20, '\xff')).exit_code, 0);
  for (int i = 0; i < 20; ++i) {  // together more than a message may be
    ASSERT_EQ(etcd.Ctl({"put", "/holdfast/default/nodes/e" + std::to_string(i)},
                       std::string(1 << 20, 'x'))
                  .exit_code,
              0);
  }
  Member a({.name = "a", .etcd = {etcd.endpoint()}, .lease_ttl_ms = 60'000});
  ASSERT_TRUE(a.Await<LeaseHolds>());
  ASSERT_TRUE(a.AwaitMembers({"a"}));
  EXPECT_TRUE(a.AwaitProblem("21 keys under /holdfast/default/nodes/"));
  ASSERT_EQ(etcd.Ctl({"del", "--prefix", "/holdfast/default/nodes/e"}).exit_code, 0);
  EXPECT_TRUE(a.AwaitProblem(""));
  EXPECT_TRUE(a.All<LeaseLost>().empty());
}

}  // namespace
}  // namespace holdfast
