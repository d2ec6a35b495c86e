// ckptd as one node of several.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/integration/etcd_server.h"
#include "tests/integration/harness.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;

std::string WithEtcd(const std::string& name, const EtcdServer& etcd) {
  return "node_name: " + name +
         "\ncluster:\n  listen_address: \"127.0.0.1:0\"\n  advertise_address: \"127.0.0.1:0\"\n"
         "  etcd: {endpoints: [\"" +
         etcd.endpoint() + "\"], lease_ttl_ms: 1h}\n";
}

bool HasProblem(const v1::GetStatusReply& status, const std::string& begins) {
  const auto& problems = status.daemon().problems();
  return std::any_of(problems.begin(), problems.end(),
                     [&](const std::string& problem) { return problem.rfind(begins, 0) == 0; });
}

TEST(Cluster, AnEtcdThatIsAwayKeepsNobodyFromStartingAndSaving) {
  EtcdServer etcd;
  Node node({.config = WithEtcd("n1", etcd)});
  ASSERT_TRUE(node.Start()) << node.Log();
  EXPECT_TRUE(node.Until(
      [](const v1::GetStatusReply& status) { return HasProblem(status, "cluster: etcd at "); }));
  ASSERT_TRUE(etcd.Start());
  EXPECT_TRUE(node.Until(
      [](const v1::GetStatusReply& status) { return !HasProblem(status, "cluster: "); }));
  EXPECT_TRUE(node.Until([&](const v1::GetStatusReply&) {
    return node.Log().find("cluster: this node is a member") != std::string::npos;
  }));
  // Its key is there, and with a clean stop it goes at once: its lease would last for an hour.
  const std::string key = "/holdfast/default/nodes/n1";
  EXPECT_THAT(etcd.Ctl({"get", key, "--keys-only"}).text, HasSubstr(key));
  EXPECT_EQ(node.Stop(), 0) << node.Log();
  // (Unless an etcd that is too slow to be waited for has not taken that.)
  const std::string left = etcd.Ctl({"get", key, "--keys-only"}).text;
  EXPECT_TRUE(left.empty() ||
              node.Log().find("did not take this node's leave") != std::string::npos)
      << left << node.Log();
}

TEST(Cluster, StopsWithoutEtcd) {
  EtcdServer etcd;
  ASSERT_TRUE(etcd.Start());
  Node node({.config = WithEtcd("n1", etcd)});
  ASSERT_TRUE(node.Start()) << node.Log();
  ASSERT_TRUE(node.Until([&](const v1::GetStatusReply&) {
    return node.Log().find("this node is a member") != std::string::npos;
  }));
  etcd.Kill();
  EXPECT_EQ(node.Stop(), 0) << node.Log();
  EXPECT_THAT(node.Log(), HasSubstr("others can have its jobs when its lease has ended"));
}

TEST(Cluster, APortThatIsTakenIsSaidAtTheStart) {
  EtcdServer etcd;
  ASSERT_TRUE(etcd.Start());
  Node node({.config = "node_name: n1\ncluster: {listen_address: \"" + etcd.endpoint() + "\"}\n"});
  EXPECT_FALSE(node.Start());
  EXPECT_EQ(node.WaitExit(), 1);
  EXPECT_THAT(node.Log(), HasSubstr("cannot start: cluster: listen for other nodes on '" +
                                    etcd.endpoint() + "'"));
}

}  // namespace
}  // namespace holdfast
