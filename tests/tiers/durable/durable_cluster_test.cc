// Remote directories and the clusters that have them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "base/fault_env.h"
#include "base/status.h"
#include "tests/tiers/durable/durable_harness.h"
#include "tiers/durable/copy_store.h"
#include "tiers/durable/names.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;

const std::string kIdA(32, 'a');
const std::string kIdB(32, 'b');
constexpr char kMark[] = "/remote/.holdfast/cluster";

class DurableClusterTest : public ::testing::Test {
 protected:
  DurableClusterTest() { EXPECT_TRUE(env_.CreateDirectories("/remote", 0755).ok()); }

  CopyStore::Options As(const ClusterMark& mark, const std::string& remote_id = "") {
    CopyStore::Options options;
    options.env = &env_;
    options.kind = DurableKind::kRemote;
    options.dir = "/remote";
    options.node_name = mark.node;
    options.cluster = ClusterIdentity{mark, remote_id};
    return options;
  }
  static ClusterMark Etcd(const std::string& id, const std::string& name,
                          const std::string& node = "n1") {
    return {id, name, ClusterKind::kEtcd, node, "", {name + ":2379"}};
  }
  static ClusterMark Alone(const std::string& node) {
    return {NewUnique(), "", ClusterKind::kAlone, node, "", {}};
  }
  static ClusterMark List(const std::string& id, const std::vector<std::string>& members) {
    return {id, "default", ClusterKind::kList, "n1", "", members};
  }
  std::unique_ptr<CopyStore> Opened(const CopyStore::Options& options) {
    absl::StatusOr<std::unique_ptr<CopyStore>> store = CopyStore::Open(options);
    EXPECT_TRUE(store.ok()) << ToString(store.status());
    return store.ok() ? *std::move(store) : nullptr;
  }
  void ExpectRefused(const CopyStore::Options& options, const std::string& why) {
    const absl::Status status = CopyStore::Open(options).status();
    EXPECT_TRUE(absl::IsUnavailable(status)) << ToString(status);
    EXPECT_THAT(Message(status), HasSubstr(why));
  }
  std::string Mark() { return ReadFile(env_, kMark, kClusterMarkBytesMax).value_or(""); }

  FaultEnv env_;
  const SampleImage shard_ = SampleShard(7, 0, 1);
};

TEST_F(DurableClusterTest, TheFirstClusterHasItAndAnotherReadsAndWritesNothing) {
  auto ours = Opened(As(Etcd(kIdA, "prod")));
  ASSERT_TRUE(ours->OpenJob(SampleJob()).ok());
  ASSERT_TRUE(ours->ClaimAttempt(SampleJob(), 3, "opening").ok());
  ASSERT_TRUE(PublishShard(*ours, shard_).ok());
  const std::string mark = Mark();
  EXPECT_THAT(mark, HasSubstr(kIdA));

  ExpectRefused(As(Etcd(kIdB, "test", "n2")), "ckptctl adopt-remote " + kIdA);
  EXPECT_FALSE(env_.Info("/remote/.holdfast/nodes/n2").ok()) << "nothing of it was made there";
  EXPECT_EQ(Mark(), mark);
  // Nor does a cluster of the same name with another etcd, or a daemon that has none.
  ExpectRefused(As(Etcd(kIdB, "prod", "n2")), "cluster 'prod' (id " + kIdB);
  ExpectRefused(As(Alone("n2")), "daemons without a cluster");
  EXPECT_TRUE(Opened(As(Etcd(kIdA, "prod", "n2"))) != nullptr) << "its own nodes do";
}

TEST_F(DurableClusterTest, DaemonsWithoutAClusterShareOneAndMarkItWhenTheyWrite) {
  auto one = Opened(As(Alone("n1")));
  EXPECT_EQ(Mark(), "") << "an empty mount point stays as it is";
  ASSERT_TRUE(one->OpenJob(SampleJob()).ok());
  EXPECT_THAT(Mark(), HasSubstr("kind alone"));
  auto two = Opened(As(Alone("n2")));
  EXPECT_TRUE(two->OpenJob(SampleJob()).ok());
  EXPECT_EQ(two->cluster_id(), one->cluster_id());
  ExpectRefused(As(Etcd(kIdA, "prod")), "belongs to daemons without a cluster");
}

TEST_F(DurableClusterTest, MembersOfAListTakeOnTheIdThatTheFirstMade) {
  auto first = Opened(As(List(kIdA, {"a@h:1", "b@h:1"})));
  auto second = Opened(As(List(kIdB, {"a@h:1", "b@h:1"})));
  EXPECT_EQ(second->cluster_id(), kIdA);
  // The list has grown: the mark follows, and who has the old list goes on.
  auto grown = Opened(As(List(kIdB, {"a@h:1", "b@h:1", "c@h:1"})));
  EXPECT_EQ(grown->cluster_id(), kIdA);
  EXPECT_THAT(Mark(), HasSubstr("peer c@h:1"));
  EXPECT_TRUE(first->Space().ok());
  EXPECT_THAT(Mark(), HasSubstr("peer c@h:1")) << "not written in turn";
  ExpectRefused(As(List(kIdB, {"x@h:1", "y@h:1"})), "cluster 'default'");
}

TEST_F(DurableClusterTest, OneThatRunsNoticesThatAnotherHasTakenItOver) {
  auto old = Opened(As(Etcd(kIdA, "prod")));
  ASSERT_TRUE(old->OpenJob(SampleJob()).ok());
  const absl::Status wrong = CopyStore::Adopt(As(Etcd(kIdB, "test", "n2")), kIdB);
  EXPECT_TRUE(absl::IsFailedPrecondition(wrong)) << ToString(wrong);
  EXPECT_THAT(Message(wrong), HasSubstr("ckptctl adopt-remote " + kIdA));
  EXPECT_THAT(Mark(), HasSubstr(kIdA));

  ASSERT_TRUE(CopyStore::Adopt(As(Etcd(kIdB, "test", "n2")), kIdA).ok());
  EXPECT_TRUE(absl::IsUnavailable(old->CheckCluster()));
  EXPECT_TRUE(absl::IsUnavailable(old->Space().status()));
  ExpectRefused(As(Etcd(kIdA, "prod")), "ckptctl adopt-remote " + kIdB);
  auto now = Opened(As(Etcd(kIdB, "test", "n2")));
  EXPECT_TRUE(now->FindJob(SampleJob().name).ok()) << "what lies there is its own now";
  EXPECT_TRUE(absl::IsFailedPrecondition(CopyStore::Adopt(As(Etcd(kIdB, "test")), kIdA)));
}

TEST_F(DurableClusterTest, AnEmptyMountPointIsNotTheDirectoryThatWasNoted) {
  auto ours = Opened(As(Etcd(kIdA, "prod")));
  const std::string id = ours->place().id;
  ASSERT_TRUE(IsUnique(id)) << "made as it was opened, to be noted";
  EXPECT_TRUE(Opened(As(Etcd(kIdA, "prod"), id)) != nullptr);
  ASSERT_TRUE(env_.Rename("/remote", "/elsewhere").ok());
  ASSERT_TRUE(env_.CreateDirectories("/remote", 0755).ok());
  ExpectRefused(As(Etcd(kIdA, "prod"), id), "ckptctl adopt-remote " + id);
  EXPECT_FALSE(env_.Info("/remote/.holdfast").ok()) << "nothing is made there";
  // Replaced for good: a person says which one is given up.
  EXPECT_TRUE(absl::IsFailedPrecondition(CopyStore::Adopt(As(Etcd(kIdA, "prod"), id), kIdB)));
  EXPECT_TRUE(CopyStore::Adopt(As(Etcd(kIdA, "prod"), id), id).ok());
  auto replaced = Opened(As(Etcd(kIdA, "prod")));
  EXPECT_NE(replaced->place().id, id);
}

TEST_F(DurableClusterTest, AMarkThatSaysNothingIsNotTakenForNone) {
  ASSERT_TRUE(Opened(As(Etcd(kIdA, "prod"))) != nullptr);
  for (const std::string& text :
       {std::string(), std::string("x"), std::string(2 * kClusterMarkBytesMax, 'x')}) {
    ASSERT_TRUE(env_.Unlink(kMark).ok());
    ASSERT_TRUE(WriteFileAtomically(env_, kMark, text).ok());
    ExpectRefused(As(Etcd(kIdA, "prod")), absl::StrCat("rm '", kMark, "'"));
    ExpectRefused(As(Etcd(kIdB, "test")), absl::StrCat("rm '", kMark, "'"));
  }
  ASSERT_TRUE(env_.Unlink(kMark).ok());
  EXPECT_TRUE(Opened(As(Etcd(kIdA, "prod"))) != nullptr);
  EXPECT_THAT(Mark(), HasSubstr(kIdA));
}

TEST_F(DurableClusterTest, OneThatSomebodyRemovedIsWrittenAgain) {
  auto ours = Opened(As(Etcd(kIdA, "prod")));
  const std::string mark = Mark();
  ASSERT_TRUE(env_.Unlink(kMark).ok());
  EXPECT_TRUE(ours->Space().ok());
  EXPECT_THAT(Mark(), HasSubstr(kIdA));
}

TEST_F(DurableClusterTest, WhatCannotBeMarkedIsReadAndNotWritten) {
  // An earlier version has saved there.
  CopyStore::Options before = As(Etcd(kIdA, "prod"));
  before.cluster.reset();
  auto earlier = Opened(before);
  ASSERT_TRUE(earlier->OpenJob(SampleJob()).ok());
  env_.FailMatching("/remote/.holdfast/nodes/n2", EROFS);
  auto ours = Opened(As(Etcd(kIdB, "test", "n2")));
  EXPECT_TRUE(ours->FindJob(SampleJob().name).ok());
  EXPECT_FALSE(ours->OpenJob({JobUuid{{1}}, "other", 1, 1}).ok());
  EXPECT_EQ(Mark(), "");
  env_.FailMatching("/remote/.holdfast/nodes/n2", 0);
  EXPECT_TRUE(ours->OpenJob({JobUuid{{1}}, "other", 1, 1}).ok());
  EXPECT_THAT(Mark(), HasSubstr(kIdB));
}

}  // namespace
}  // namespace holdfast
