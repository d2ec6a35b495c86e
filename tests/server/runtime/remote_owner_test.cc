// Which cluster a daemon is of, from one start to the next, and what becomes of the remote
// directory.
#include "server/runtime/tiers/remote_owner.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "base/fault_env.h"
#include "base/status.h"
#include "holdfast/v1/config.pb.h"
#include "server/runtime/tiers/tier_place.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;

const std::string kIdA(32, 'a');
const std::string kIdB(32, 'b');

v1::ClusterConfig Etcd(const std::string& name = "test") {
  v1::ClusterConfig cluster;
  cluster.set_name(name);
  cluster.mutable_etcd()->add_endpoints("e1:2379");
  cluster.mutable_etcd()->set_prefix("/holdfast/");
  return cluster;
}
v1::ClusterConfig List(const std::vector<std::string>& names) {
  v1::ClusterConfig cluster;
  cluster.set_name("default");
  for (const std::string& name : names) {
    v1::ClusterMember& member = *cluster.add_members();
    member.set_name(name);
    member.set_address(name + ":9465");
  }
  return cluster;
}

class RemoteOwnerTest : public ::testing::Test {
 protected:
  // A daemon, from one start to its end.
  struct Life {
    std::shared_ptr<RemoteOwner> owner;
    std::unique_ptr<TierPlace> place;
  };
  RemoteOwnerTest() {
    for (const char* dir : {"/remote", "/state-n1", "/state-n2"}) {
      EXPECT_TRUE(env_.CreateDirectories(dir, 0755).ok());
    }
  }
  // Etcd: `noted_`, which answers at once, or not at all.
  Life Start(const v1::ClusterConfig& cluster, const std::string& node = "n1") {
    Life life;
    auto weak = std::make_shared<std::weak_ptr<RemoteOwner>>();
    life.owner = std::make_shared<RemoteOwner>(
        RemoteOwner::Options{&env_, "/state-" + node, "/remote", DescribeSelf(cluster, node),
                             [this, weak](const std::string& id, const std::string& instead_of) {
                               if (answers_ && noted_.remote == instead_of) {
                                 noted_.remote = id;
                               }
                               if (const auto owner = weak->lock(); answers_ && owner != nullptr) {
                                 owner->Agreed(noted_);
                               }
                             }});
    *weak = life.owner;
    CopyStore::Options options;
    options.env = &env_;
    options.kind = DurableKind::kRemote;
    options.dir = "/remote";
    options.node_name = node;
    life.place = std::make_unique<TierPlace>(options, "", nullptr, std::nullopt, life.owner);
    return life;
  }
  void Replace(const std::string& old) {
    EXPECT_TRUE(env_.Rename("/remote", old).ok());
    EXPECT_TRUE(env_.CreateDirectories("/remote", 0755).ok());
  }
  static absl::Status Writes(TierPlace& place) {
    HF_ASSIGN_OR_RETURN(const std::shared_ptr<CopyStore> store, place.Store(nullptr));
    return store->OpenJob({JobUuid{{1}}, "job", 1, 1});
  }

  FaultEnv env_;
  bool answers_ = true;
  ClusterNote noted_{kIdA, ""};
};

TEST_F(RemoteOwnerTest, TheDirectoryIsNotUsedBeforeEtcdHasSaidWhichClusterThisIs) {
  Life life = Start(Etcd());
  absl::Status early = life.place->Store(nullptr).status();
  EXPECT_TRUE(absl::IsUnavailable(early)) << ToString(early);
  EXPECT_THAT(Message(early), HasSubstr("until etcd has said"));
  EXPECT_FALSE(env_.Info("/remote/.holdfast").ok());
  EXPECT_TRUE(life.owner->Agreed(noted_));
  EXPECT_FALSE(life.owner->Agreed(noted_)) << "nothing new";
  EXPECT_TRUE(Writes(*life.place).ok());
  EXPECT_EQ(noted_.remote, life.place->OpenStore()->place().id);
}

TEST_F(RemoteOwnerTest, JustAfterTheStartEtcdIsWaitedFor) {
  Life life = Start(Etcd());
  std::thread etcd([&] { life.owner->Agreed(noted_); });
  EXPECT_TRUE(life.place->Store(nullptr).ok());
  etcd.join();
}

TEST_F(RemoteOwnerTest, NorBeforeEtcdHasNotedIt) {
  Life life = Start(Etcd());
  life.owner->Agreed(noted_);
  answers_ = false;
  EXPECT_THAT(Message(life.place->Store(nullptr).status()), HasSubstr("until etcd has noted"));
  answers_ = true;
  EXPECT_TRUE(life.place->Store(nullptr).ok());
  EXPECT_NE(noted_.remote, "");
}

TEST_F(RemoteOwnerTest, AnotherDirectoryInItsPlaceIsUnreadAlsoWhenTheStateIsLost) {
  Life first = Start(Etcd());
  first.owner->Agreed(noted_);
  ASSERT_TRUE(Writes(*first.place).ok());
  Replace("/was");
  Life next = Start(Etcd(), "n2");  // knows nothing
  next.owner->Agreed(noted_);
  const absl::Status status = next.place->Store(nullptr).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << ToString(status);
  EXPECT_THAT(Message(status), HasSubstr("ckptctl adopt-remote " + noted_.remote));
  EXPECT_FALSE(env_.Info("/remote/.holdfast").ok());
  // It is for good: a person says so, and it is used at once.
  const std::string before = noted_.remote;
  EXPECT_TRUE(absl::IsFailedPrecondition(next.place->Adopt(kIdB)));
  const absl::Status adopted = next.place->Adopt(before);
  EXPECT_TRUE(adopted.ok()) << ToString(adopted);
  EXPECT_NE(noted_.remote, before);
  EXPECT_TRUE(Writes(*next.place).ok());
  // The first one, which has the old one mounted still, gives it up when it hears of it.
  ASSERT_TRUE(env_.Rename("/remote", "/new").ok());
  ASSERT_TRUE(env_.Rename("/was", "/remote").ok());
  first.owner->Agreed(noted_);
  EXPECT_TRUE(absl::IsUnavailable(Writes(*first.place)));
  EXPECT_TRUE(first.place->Note(absl::OkStatus()).went_away);
}

TEST_F(RemoteOwnerTest, AnotherClustersIsRefusedUntilItIsAdopted) {
  Life prod = Start(Etcd("prod"));
  prod.owner->Agreed(noted_);
  ASSERT_TRUE(Writes(*prod.place).ok());
  const ClusterNote prods = noted_;
  noted_ = {kIdB, ""};
  Life test = Start(Etcd("test"), "n2");
  test.owner->Agreed(noted_);
  EXPECT_THAT(Message(Writes(*test.place)), HasSubstr("belongs to cluster 'prod' (id " + kIdA));
  EXPECT_EQ(noted_.remote, "") << "nor is it noted as its own";
  ASSERT_TRUE(test.place->Adopt(kIdA).ok());
  EXPECT_TRUE(Writes(*test.place).ok());
  EXPECT_EQ(noted_.remote, prods.remote);
  // The other, if it lives, notices with its next operation, whatever that is.
  const absl::Status late = Writes(*prod.place);
  EXPECT_THAT(Message(late), HasSubstr("belongs to cluster 'test'"));
  EXPECT_TRUE(prod.place->Note(late).went_away);
  EXPECT_EQ(prod.place->OpenStore(), nullptr);
}

TEST_F(RemoteOwnerTest, AnErasedEtcdGetsBackWhatTheNodesRemember) {
  Life life = Start(Etcd());
  life.owner->Agreed(noted_);
  ASSERT_TRUE(Writes(*life.place).ok());
  const std::string directory = noted_.remote;
  Life next = Start(Etcd());
  EXPECT_EQ(next.owner->remembered(), kIdA);
  EXPECT_EQ(Start(Etcd("another")).owner->remembered(), "") << "not to another cluster";
  // While it runs.
  noted_ = {kIdA, ""};
  life.owner->Agreed(noted_);
  EXPECT_EQ(noted_.remote, directory);
  EXPECT_TRUE(Writes(*life.place).ok());
  // One that was set up anew, and nobody remembered.
  noted_ = {kIdB, ""};
  life.owner->Agreed(noted_);
  const absl::Status status = Writes(*life.place);
  EXPECT_THAT(Message(status), HasSubstr("set up anew"));
  life.place->Note(status);
  EXPECT_THAT(Message(Writes(*life.place)), HasSubstr("ckptctl adopt-remote " + kIdA));
}

TEST_F(RemoteOwnerTest, MembersOfAListHaveOneIdAndRememberIt) {
  Life first = Start(List({"n1", "n2"}));
  ASSERT_TRUE(Writes(*first.place).ok());
  const std::string id = first.place->OpenStore()->cluster_id();
  Life second = Start(List({"n1", "n2"}), "n2");
  ASSERT_TRUE(Writes(*second.place).ok());
  EXPECT_EQ(second.place->OpenStore()->cluster_id(), id);
  EXPECT_EQ(Start(List({"n1", "n2", "n3"}), "n2").owner->remembered(), id);
  EXPECT_NE(Start(List({"n2", "x", "y"}), "n2").owner->Us()->mark.id, id);
  EXPECT_THAT(Message(Writes(*Start(List({"n2", "x", "y"}), "n2").place)),
              HasSubstr("belongs to cluster 'default'"));
}

}  // namespace
}  // namespace holdfast
