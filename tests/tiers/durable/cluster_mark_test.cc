// Whether a daemon may use a remote directory, by what that notes and what the daemon is.
#include "tiers/durable/cluster_mark.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tiers/durable/names.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

const std::string kIdA(32, 'a');
const std::string kIdB(32, 'b');

ClusterIdentity Etcd(const std::string& id, const std::string& name = "test",
                     const std::vector<std::string>& endpoints = {"e1:2379/holdfast/test/"}) {
  return {{id, name, ClusterKind::kEtcd, "n1", "2026-11-30 01:02 UTC", endpoints}, ""};
}
ClusterIdentity List(const std::string& id, const std::vector<std::string>& members,
                     const std::string& name = "default") {
  return {{id, name, ClusterKind::kList, "n1", "", members}, ""};
}
ClusterIdentity Alone(const std::string& id) {
  return {{id, "", ClusterKind::kAlone, "n1", "", {}}, ""};
}

TEST(JudgeCluster, WhatNobodyHasIsTaken) {
  for (const ClusterIdentity& us : {Etcd(kIdA), List(kIdA, {"a@h:1"}), Alone(kIdA)}) {
    EXPECT_EQ(JudgeCluster(std::nullopt, us), ClusterVerdict::kTake);
  }
}

TEST(JudgeCluster, TheIdSaysThatItIsOurs) {
  EXPECT_EQ(JudgeCluster(Etcd(kIdA).mark, Etcd(kIdA)), ClusterVerdict::kOurs);
  EXPECT_EQ(JudgeCluster(Etcd(kIdA, "test", {"old:1"}).mark, Etcd(kIdA)), ClusterVerdict::kRenew);
  EXPECT_EQ(JudgeCluster(List(kIdA, {"a@h:1"}).mark, List(kIdA, {"a@h:1", "b@h:1"})),
            ClusterVerdict::kRenew);
}

TEST(JudgeCluster, AnotherEtcdOfTheSameNameIsAnotherCluster) {
  EXPECT_EQ(JudgeCluster(Etcd(kIdB).mark, Etcd(kIdA)), ClusterVerdict::kRefuse);
}

TEST(JudgeCluster, AListIsKnownByItsNameAndItsMembers) {
  const ClusterIdentity us = List(kIdA, {"a@h:1", "b@h:1", "c@h:1"});
  EXPECT_EQ(JudgeCluster(List(kIdB, {"a@h:1", "b@h:1", "c@h:1"}).mark, us), ClusterVerdict::kAdopt);
  // Some members have come and gone since.
  EXPECT_EQ(JudgeCluster(List(kIdB, {"a@h:1", "b@h:1", "x@h:1"}).mark, us), ClusterVerdict::kAdopt);
  EXPECT_EQ(JudgeCluster(List(kIdB, {"a@h:1", "x@h:1"}).mark, us), ClusterVerdict::kRefuse)
      << "another cluster may have the other half";
  // The same names at other places.
  EXPECT_EQ(JudgeCluster(List(kIdB, {"a@g:1", "b@g:1", "c@g:1"}).mark, us),
            ClusterVerdict::kRefuse);
  EXPECT_EQ(JudgeCluster(List(kIdB, {"a@h:1", "b@h:1", "c@h:1"}, "other").mark, us),
            ClusterVerdict::kRefuse);
  EXPECT_EQ(JudgeCluster(List(kIdB, {}).mark, us), ClusterVerdict::kRefuse);
}

TEST(JudgeCluster, DaemonsWithoutAClusterShareADirectoryAndNoClustersOne) {
  EXPECT_EQ(JudgeCluster(Alone(kIdB).mark, Alone(kIdA)), ClusterVerdict::kAdopt);
  EXPECT_EQ(JudgeCluster(Etcd(kIdB).mark, Alone(kIdA)), ClusterVerdict::kRefuse);
  EXPECT_EQ(JudgeCluster(Alone(kIdB).mark, Etcd(kIdA)), ClusterVerdict::kRefuse);
  EXPECT_EQ(JudgeCluster(Alone(kIdB).mark, List(kIdA, {"a@h:1"})), ClusterVerdict::kRefuse);
}

TEST(ClusterMark, ComesBackAsItWasWritten) {
  for (const ClusterIdentity& us : {Etcd(kIdA), List(kIdA, {"a@h:1", "b@h:1"}), Alone(kIdA)}) {
    const absl::StatusOr<ClusterMark> read = DecodeClusterMark(EncodeClusterMark(us.mark));
    ASSERT_TRUE(read.ok());
    EXPECT_EQ(JudgeCluster(*read, us), ClusterVerdict::kOurs);
    EXPECT_EQ(read->node, us.mark.node);
    EXPECT_EQ(read->time, us.mark.time);
  }
}

TEST(ClusterMark, WhatIsNoneIsDamaged) {
  const std::string whole = EncodeClusterMark(Etcd(kIdA).mark);
  for (const std::string& text :
       {std::string(), std::string("\n"), std::string("cluster x\nkind etcd\n"),
        "cluster " + kIdA + "\n", "cluster " + kIdA + "\nkind other\n",
        whole.substr(0, whole.size() - 1), std::string(1000, '\0')}) {
    EXPECT_TRUE(absl::IsDataLoss(DecodeClusterMark(text).status())) << text;
  }
}

TEST(ClusterMark, IsBoundedWhateverTheClusterIsCalled) {
  ClusterMark mark = Etcd(kIdA).mark;
  mark.name = std::string(100'000, 'n') + "\nkind alone\n";
  mark.peers.assign(10'000, std::string(10'000, 'p'));
  const std::string text = EncodeClusterMark(mark);
  EXPECT_LE(text.size(), kClusterMarkBytesMax);
  const absl::StatusOr<ClusterMark> read = DecodeClusterMark(text);
  ASSERT_TRUE(read.ok());
  EXPECT_EQ(read->kind, ClusterKind::kEtcd);
  EXPECT_EQ(read->peers.size(), kClusterMarkPeersMax);
}

TEST(ClusterRefusal, NamesBothAndWhatToType) {
  ClusterMark other = Etcd(kIdB, "prod\x1b[2J").mark;
  const std::string text = ClusterRefusal("/remote", other, Etcd(kIdA));
  for (const std::string& part : {std::string("'/remote'"), std::string("'prod?[2J'"), kIdB,
                                  std::string("'n1'"), std::string("2026-11-30 01:02 UTC"),
                                  std::string("'test'"), kIdA, "ckptctl adopt-remote " + kIdB}) {
    EXPECT_THAT(text, HasSubstr(part));
  }
  EXPECT_THAT(text, Not(HasSubstr("\x1b")));
}

}  // namespace
}  // namespace holdfast
