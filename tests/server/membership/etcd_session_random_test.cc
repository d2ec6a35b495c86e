// EtcdSessions under random orders of everything: what they believe is never more than etcd
// granted.
#include <gtest/gtest.h>

#include <cstdlib>

#include "tests/server/membership/session_world.h"

namespace holdfast {
namespace {

using std::chrono::seconds;

uint64_t Seeds() {
  const char* seeds = std::getenv("HOLDFAST_MEMBERSHIP_SEEDS");
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  constexpr uint64_t kSeeds = 12;  // a model of one thread, many times slower here
#else
  constexpr uint64_t kSeeds = 60;
#endif
  return seeds == nullptr ? kSeeds : std::strtoull(seeds, nullptr, 10);
}

// Campaigns, stores, resigns, crashes, restarts, and compacts, now and then.
void Stir(SessionWorld& world, const WorldOptions& options) {
  const std::vector<std::string> jobs = {"x", "y"};
  const size_t n = world.Random() % world.nodes.size();
  SessionWorld::Node& node = world.nodes[n];
  const std::string& job = jobs[world.Random() % jobs.size()];
  const double what = world.Chance();
  if (what < 0.3) {
    world.Deliver(n, EtcdSession::AskCampaign{job, options.wipes ? world.highest_epoch : 0});
  } else if (what < 0.7) {
    if (node.hosts.contains(job)) {
      const uint64_t version = ++node.version[job];
      world.Deliver(n, EtcdSession::AskStoreState{
                           job, {node.hosts[job], version, "s" + std::to_string(version)}});
    }
  } else if (what < 0.75) {
    node.hosts.erase(job);
    world.Deliver(n, EtcdSession::AskResign{job});
  } else if (what < 0.78) {
    world.Deliver(n, EtcdSession::AskWatchHost{job});
  } else if (what < 0.80) {
    world.Crash(n);
  } else if (what < 0.90) {
    if (node.session == nullptr) {
      world.StartNode(n);
    }
  } else if (what < 0.93) {
    world.etcd.Compact();
  } else if (what < 0.95) {
    world.etcd_away = !world.etcd_away;
  } else if (what < 0.96 && options.wipes) {
    world.WipeEtcd();
  } else if (what < 0.97) {
    world.etcd.Put("/t/nodes/strange", "\xff\xff no node");
  } else {
    world.Deliver(n, EtcdSession::AskReadState{job});
  }
}

uint64_t all_stored = 0;
uint64_t all_elected = 0;

void RunSeed(uint64_t seed, WorldOptions options) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  SessionWorld world(seed, options);
  world.Add("a");
  world.Add("b");
  world.Add("c");
  world.Add("a");  // a second machine with a name that is taken
  for (int i = 0; i < 600 && !::testing::Test::HasFatalFailure(); ++i) {
    world.Run(std::chrono::milliseconds(world.Random() % 800));
    Stir(world, options);
  }
  // Faults stop: everything comes right by itself.
  world.faults = false;
  world.etcd_away = false;
  for (size_t n = 0; n < world.nodes.size(); ++n) {
    if (world.nodes[n].session == nullptr) {
      world.StartNode(n);
    }
  }
  world.Run(seconds(20));
  for (size_t n = 0; n < world.nodes.size(); ++n) {
    world.Deliver(n, EtcdSession::AskWatchHost{"x"});
    world.Deliver(n, EtcdSession::AskCampaign{"x", options.wipes ? world.highest_epoch : 0});
  }
  world.Run(seconds(60));
  if (::testing::Test::HasFatalFailure()) {
    return;
  }
  EXPECT_NE(world.IsMember(0), world.IsMember(3));
  EXPECT_TRUE(world.IsMember(1));
  EXPECT_TRUE(world.IsMember(2));
  size_t hosts = 0;
  for (size_t n = 0; n < world.nodes.size(); ++n) {
    SCOPED_TRACE("node " + std::to_string(n));
    const SessionWorld::Node& node = world.nodes[n];
    EXPECT_EQ(node.members.size(), 3u);
    EXPECT_EQ(node.members.count("a"), 1u);
    if (world.IsMember(n)) {
      EXPECT_EQ(node.members.at(node.name).incarnation, node.incarnation);
    } else {
      EXPECT_NE(node.problem.find("the node name 'a' is used by a daemon at 127.0.0.1:"),
                std::string::npos)
          << node.problem;
    }
    hosts += node.hosts.count("x");
    const auto seen = node.seen_hosts.find("x");
    ASSERT_TRUE(seen != node.seen_hosts.end() && seen->second);
    EXPECT_TRUE(world.elected.contains({"x", seen->second->epoch}));
  }
  EXPECT_EQ(hosts, 1u);
  all_stored += world.stored;
  all_elected += world.elected.size();
}

TEST(EtcdSessionRandom, NeverMoreThanEtcdGranted) {
  for (uint64_t seed = 1; seed <= Seeds() && !HasFailure(); ++seed) {
    RunSeed(seed, {.lossy = true, .drift = true});
  }
}

TEST(EtcdSessionRandom, DataIsErasedNowAndThen) {
  for (uint64_t seed = 1001; seed <= 1000 + Seeds() && !HasFailure(); ++seed) {
    RunSeed(seed, {.lossy = true, .drift = true, .wipes = true});
  }
}

// The runs above were about something.
TEST(EtcdSessionRandom, SomethingHappened) {
  all_stored = all_elected = 0;
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    RunSeed(seed, {.lossy = true, .drift = true});
  }
  EXPECT_GT(all_stored, 20u);
  EXPECT_GT(all_elected, 10u);
}

TEST(EtcdSessionRandom, ShortLeases) {
  for (uint64_t seed = 2001; seed <= 2000 + Seeds() && !HasFailure(); ++seed) {
    RunSeed(seed, {.lossy = true, .drift = true, .ttl_s = 5});
  }
}

}  // namespace
}  // namespace holdfast
