// Several jobs, users and ranks on one daemon, and those who get in each other's way.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "holdfast/v1/admin.grpc.pb.h"
#include "tests/integration/harness.h"

namespace holdfast {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr uid_t kNobody = 65534;
constexpr uid_t kSomebody = 12345;

class IsolationTest : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_TRUE(node_.Start()); }
  Node node_;
};

// What another user sees of the admin service: the number of jobs, or -1.
int JobsSeenBy(uid_t uid, const std::string& socket) {
  const pid_t child = ::fork();  // before gRPC has run in this process: it does not survive a fork
  if (child == 0) {
    if (::setresuid(uid, uid, uid) != 0) {
      ::_exit(100);
    }
    const auto stub = v1::Admin::NewStub(
        grpc::CreateChannel("unix:" + socket, grpc::InsecureChannelCredentials()));
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + kPatience);
    v1::GetStatusReply reply;
    ::_exit(stub->GetStatus(&context, v1::GetStatusRequest(), &reply).ok() ? reply.jobs_size()
                                                                           : 101);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) < 100 ? WEXITSTATUS(status) : -1;
}

TEST_F(IsolationTest, SeveralJobsOfSeveralUsersSaveAndRestoreAtOnce) {
  if (::geteuid() != 0) {
    GTEST_SKIP() << "needs root to become other users";
  }
  std::vector<std::unique_ptr<Rank>> ranks;
  for (const uid_t uid : {uid_t{0}, kNobody, kSomebody}) {
    for (const std::string name : {"x", "y"}) {
      for (auto& rank : StartRanks(
               node_, {.job = name + std::to_string(uid), .bytes = 100'000 + 7 * uid, .uid = uid},
               2)) {
        ranks.push_back(std::move(rank));
      }
    }
  }
  EXPECT_THAT(DoAll(ranks, "open"), Each("ok attempt=1"));
  EXPECT_THAT(DoAll(ranks, "restore"), Each(HasSubstr("NOTHING_TO_RESTORE")));
  for (const std::string step : {"1", "2", "3", "4", "5"}) {
    EXPECT_THAT(DoAll(ranks, "save " + step), Each("ok sealed"));
    EXPECT_THAT(DoAll(ranks, "committed"), Each("ok committed"));
  }
  EXPECT_THAT(DoAll(ranks, "restore"), Each("ok attempt=1 step=5"));
  EXPECT_EQ(JobsSeenBy(kNobody, node_.admin_socket()), 2);
  EXPECT_EQ(JobsSeenBy(kSomebody, node_.admin_socket()), 2);
  EXPECT_EQ(JobsSeenBy(777, node_.admin_socket()), 0);
  EXPECT_EQ(JobsSeenBy(0, node_.admin_socket()), 6);
  EXPECT_THAT(node_.Remove("x0"), HasSubstr("is in use by")) << "while its ranks live";
}

TEST_F(IsolationTest, AnotherUsersJobIsRefusedByName) {
  if (::geteuid() != 0) {
    GTEST_SKIP() << "needs root to become other users";
  }
  Rank owner(node_, {.job = "mine", .uid = kSomebody});
  ASSERT_EQ(owner.Do("open"), "ok attempt=1");
  ASSERT_THAT(owner.Do("restore"), HasSubstr("NOTHING_TO_RESTORE"));
  ASSERT_EQ(owner.Do("save 1"), "ok sealed");
  Rank thief(node_, {.job = "mine", .uid = kNobody});
  EXPECT_THAT(thief.Do("open"), HasSubstr("error REFUSED"));
  EXPECT_THAT(thief.Do("attach"), HasSubstr("error REFUSED"));
  EXPECT_EQ(owner.Do("attach"), "ok step=1");
}

TEST_F(IsolationTest, ARankThatIsAliveIsNotTakenOver) {
  Rank first(node_, {.job = "twice", .world_size = 1});
  ASSERT_EQ(first.Do("open"), "ok attempt=1");
  auto second = RawClient::Greet(node_.socket());
  const auto refused = second->Join("twice", 0, 1, /*deadline_ms=*/50);
  ASSERT_TRUE(refused.has_value());
  EXPECT_EQ(refused->frame.failure().reason(), v1::Failure::REASON_RANK_TAKEN);
  EXPECT_THAT(refused->frame.failure().message(), HasSubstr(std::to_string(first.child().pid())));
  // One that waits gets the rank when its holder ends.
  Rank third(node_, {.job = "twice"});
  third.Send("open");
  first.Kill();
  EXPECT_THAT(third.Answer(), HasSubstr("ok attempt="));
}

TEST_F(IsolationTest, RanksThatDisagreeAboutTheWorldSizeAreTold) {
  Rank first(node_, {.job = "world", .rank = 0, .world_size = 2});
  ASSERT_EQ(first.Do("open"), "ok attempt=1");
  auto second = RawClient::Greet(node_.socket());
  const auto refused = second->Join("world", 1, 3, /*deadline_ms=*/50);
  ASSERT_TRUE(refused.has_value());
  EXPECT_EQ(refused->frame.failure().reason(), v1::Failure::REASON_TOPOLOGY);
  EXPECT_THAT(refused->frame.failure().message(), ::testing::AllOf(HasSubstr("2"), HasSubstr("3")));
  const auto outside = RawClient::Greet(node_.socket())->Join("world", 2, 2, 50);
  ASSERT_TRUE(outside.has_value());
  EXPECT_EQ(outside->frame.failure().reason(), v1::Failure::REASON_TOPOLOGY);
}

TEST_F(IsolationTest, AnOldAttemptIsRefusedOnceThereIsANewerOne) {
  std::vector<std::unique_ptr<Rank>> old =
      StartRanks(node_, {.job = "zombie", .launch = "first"}, 2);
  ASSERT_THAT(DoAll(old, "open"), Each("ok attempt=1"));
  ASSERT_THAT(DoAll(old, "restore"), Each(HasSubstr("NOTHING_TO_RESTORE")));
  ASSERT_THAT(DoAll(old, "save 1"), Each("ok sealed"));
  ASSERT_THAT(DoAll(old, "committed"), Each("ok committed"));
  std::vector<std::unique_ptr<Rank>> fresh =
      StartRanks(node_, {.job = "zombie", .launch = "second"}, 2);
  // The launcher's id wins at once, though the old ranks live.
  ASSERT_THAT(DoAll(fresh, "open"), Each("ok attempt=2"));
  EXPECT_THAT(DoAll(old, "save 2"), Each(HasSubstr("error SUPERSEDED")));
  EXPECT_THAT(DoAll(fresh, "restore"), Each(HasSubstr("ok attempt=1 step=1")));
}

TEST_F(IsolationTest, AWriterThatClosedItsSocketKeepsItsSlotUntilItEnds) {
  Rank writer(node_, {.job = "scribbler"});
  ASSERT_THAT(writer.Do("grab 1"), HasSubstr("ok slot="));
  ASSERT_EQ(writer.Do("hangup"), "ok");
  ASSERT_TRUE(node_.Until(
      [](const v1::GetStatusReply& status) { return status.daemon().slots_quarantined() == 1; }));
  // Another job fills slots while it scribbles on.
  Rank other(node_, {.job = "other"});
  ASSERT_EQ(other.Do("open"), "ok attempt=1");
  ASSERT_THAT(other.Do("restore"), HasSubstr("NOTHING_TO_RESTORE"));
  for (const std::string step : {"1", "2", "3"}) {
    ASSERT_EQ(other.Do("save " + step), "ok sealed");
    ASSERT_EQ(other.Do("committed"), "ok committed");
    ASSERT_EQ(writer.Do("scribble"), "ok");
  }
  const Node::Verified verified = node_.Verify("other");
  EXPECT_TRUE(verified.ok) << verified.error;
  EXPECT_EQ(verified.bad.size(), 0u);
  // A daemon that was restarted knows it still.
  node_.Kill();
  ASSERT_TRUE(node_.Start());
  EXPECT_TRUE(node_.Until(
      [](const v1::GetStatusReply& status) { return status.daemon().slots_quarantined() >= 1; }));
  ASSERT_EQ(writer.Do("scribble"), "ok");
  writer.Kill();
  EXPECT_TRUE(node_.Until(
      [](const v1::GetStatusReply& status) { return status.daemon().slots_quarantined() == 0; }));
  EXPECT_EQ(other.Do("restore"), "ok attempt=1 step=3");
}

}  // namespace
}  // namespace holdfast
