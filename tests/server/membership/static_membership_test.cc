// The embedded and the static membership.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/fault_env.h"
#include "tests/integration/member_probe.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;

void ThreeMembers(v1::ClusterConfig* config) {
  config->clear_etcd();
  for (const char* name : {"m2", "m1", "m3"}) {
    v1::ClusterMember* member = config->add_members();
    member->set_name(name);
    member->set_address(std::string(name) + ":9465");
  }
  config->clear_advertise_address();
}

TEST(StaticMembership, TheFirstOneHostsEveryJob) {
  const TemporaryDirectory state;
  const MemberOptions options{.name = "m2", .state_dir = state.path(), .configure = ThreeMembers};
  Epoch first = 0;
  {
    Member m2(options);
    ASSERT_TRUE(m2.Await<LeaseHolds>());
    ASSERT_TRUE(m2.AwaitMembers({"m1", "m2", "m3"}));
    EXPECT_EQ(m2.Members()["m1"].address, "m1:9465");
    m2->WatchHost("x");
    EXPECT_TRUE(m2.Await<NoHost>());
    m2->Campaign("x", 0);
    const auto elected = m2.Await<Elected>();
    ASSERT_TRUE(elected);
    first = elected->epoch;
    EXPECT_EQ(m2.Await<HostIs>()->host.epoch, first);
    m2->StoreState("x", first, 1, "s");
    EXPECT_TRUE(m2.Await<StateStored>());
    m2->StoreState("x", first + 1, 2, "s");
    EXPECT_TRUE(m2.Await<StateFenced>());
    m2->StoreState("x", first, 3, std::string(kAgreedStateBytesMax + 1, 'x'));
    EXPECT_TRUE(m2.Await<StateFailed>());
    m2->Campaign("y", 100);
    EXPECT_EQ(m2.Await<Elected>()->epoch, 101u);
    m2->ForgetJob("x", first);
    EXPECT_TRUE(m2.Await<JobForgotten>()->forgotten);
    EXPECT_TRUE(m2.Await<NoHost>());
    m2->Campaign("a/b", 0);
    EXPECT_THAT(m2.Await<CampaignLost>()->why, HasSubstr("job name"));
    m2->Leave();
    EXPECT_TRUE(m2.Await<Left>());
  }
  // With each start the epochs are above all that were given before.
  Member again(options);
  again->Campaign("x", 0);
  EXPECT_GT(again.Await<Elected>()->epoch, 101u);
}

TEST(StaticMembership, TheOthersDoNot) {
  Member m1({.name = "m1", .configure = ThreeMembers});
  m1->WatchHost("x");
  EXPECT_EQ(m1.Await<HostIs>()->host.node, "m2");
  m1->Campaign("x", 0);
  EXPECT_EQ(m1.Await<CampaignLost>()->winner.node, "m2");
  m1->StoreState("x", 1, 1, "s");
  EXPECT_TRUE(m1.Await<StateFenced>());
}

TEST(StaticMembership, AloneEveryJobIsHere) {
  Member alone({.name = "n", .configure = [](v1::ClusterConfig* config) { config->clear_etcd(); }});
  ASSERT_TRUE(alone.AwaitMembers({"n"}));
  EXPECT_EQ(alone.Members()["n"].labels.size(), 2u);
  alone->Campaign("x", 5);
  EXPECT_EQ(alone.Await<Elected>()->epoch, 6u);
}

// What it said is as good as lost: the cluster does not wait for it.
TEST(StaticMembership, ADamagedNoteIsPassedOverAndSaid) {
  for (const char* damaged : {"", "torn", "\xff\x01\x02 and two hundred bytes more"}) {
    const TemporaryDirectory state;
    ASSERT_TRUE(WriteFileAtomically(*Env::System(), state.Path("membership"), damaged).ok());
    Member m2({.name = "m2", .state_dir = state.path(), .configure = ThreeMembers});
    const auto problem = m2.Await<MembershipProblem>();
    ASSERT_TRUE(problem);
    EXPECT_THAT(problem->text, HasSubstr("passed over"));
    EXPECT_THAT(problem->text, HasSubstr(state.Path("membership")));
    m2->Campaign("x", 41);
    EXPECT_EQ(m2.Await<Elected>()->epoch, 42u);
  }
}

// Epochs are durable before they are told: a power cut takes none back.
TEST(StaticMembership, NoEpochIsGivenThatCouldBeForgotten) {
  FaultEnv env;
  ASSERT_TRUE(env.CreateDirectories("/s", 0755).ok());
  v1::ClusterConfig config;
  config.set_plaintext(true);
  CompleteClusterConfig("n", &config);
  Epoch last = 0;
  for (int life = 0; life < 4; ++life) {
    std::mutex mutex;
    std::condition_variable told;
    std::optional<Epoch> epoch;
    auto membership = CreateMembership({config, {"n", "n:1", {}, 0, "v"}, "/s", &env, nullptr});
    ASSERT_TRUE(membership.ok());
    (*membership)->Start([&](const MembershipEvent& event) {
      if (const auto* elected = std::get_if<Elected>(&event)) {
        const std::lock_guard<std::mutex> lock(mutex);
        epoch = elected->epoch;
        told.notify_all();
      }
    });
    (*membership)->Campaign("x", 0);
    {
      std::unique_lock<std::mutex> lock(mutex);
      ASSERT_TRUE(told.wait_for(lock, kPatience, [&] { return epoch.has_value(); }));
    }
    EXPECT_GT(*epoch, last);
    last = *epoch;
    membership->reset();
    env.Crash();
  }
}

}  // namespace
}  // namespace holdfast
