// What the library says of a process that was told to end, and how little it waits for a daemon.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <memory>

#include "tests/client-lib/fake_daemon.h"

namespace holdfast {
namespace {

using std::chrono::hours;
using std::chrono::seconds;

class PreemptedTest : public testing::Test {
 protected:
  void SetUp() override { OpenJob(); }
  void OpenJob() {
    Result<std::unique_ptr<Job>> job = Job::Open(daemon_.Options());
    ASSERT_TRUE(job.ok()) << job.status().ToString();
    job_ = *std::move(job);
  }
  v1::ReachStep Last() {
    const std::vector<v1::ClientFrame> frames = daemon_.Frames("reach_step");
    return frames.empty() ? v1::ReachStep() : frames.back().reach_step();
  }

  FakeDaemon daemon_;
  std::unique_ptr<Job> job_;
};

TEST_F(PreemptedTest, NobodyWasTold) {
  EXPECT_FALSE(job_->Preempted(7));
  EXPECT_EQ(Last().step(), 7u);
  EXPECT_FALSE(Last().told_to_stop());
  EXPECT_FALSE(job_->stop_left());
}

TEST_F(PreemptedTest, ThisProcessWasTold) {
  job_->NoticeStop(seconds(30));
  EXPECT_TRUE(job_->Preempted(8));
  EXPECT_TRUE(Last().told_to_stop());
  EXPECT_LE(Last().grace_ms(), 30'000u);
  EXPECT_GT(Last().grace_ms(), 0u);
  ASSERT_TRUE(job_->stop_left());
  EXPECT_LE(*job_->stop_left(), seconds(30));
}

TEST_F(PreemptedTest, TheFirstNoticeCounts) {
  job_->NoticeStop(hours(1));
  job_->NoticeStop(seconds(1));
  EXPECT_GT(*job_->stop_left(), seconds(60));
}

TEST_F(PreemptedTest, TimesThatMakeNoSenseAreCut) {
  job_->NoticeStop(Milliseconds(INT64_MIN));
  EXPECT_EQ(*job_->stop_left(), Milliseconds(0));
  EXPECT_TRUE(job_->Preempted(1));
  EXPECT_EQ(Last().grace_ms(), 0u);
}

TEST_F(PreemptedTest, AnotherRankWasTold) {
  daemon_.SetHook([](const v1::ClientFrame& frame, FakeDaemon::Peer& peer) {
    if (!frame.has_reach_step()) {
      return false;
    }
    v1::DaemonFrame reply;
    reply.set_id(frame.id());
    reply.mutable_reach_step()->set_stopping(true);
    reply.mutable_reach_step()->set_stop(frame.reach_step().step() >= 9);
    reply.mutable_reach_step()->set_left_ms(UINT64_MAX);
    peer.Send(reply);
    return true;
  });
  EXPECT_FALSE(job_->Preempted(8));
  EXPECT_TRUE(job_->stop_left()) << "the job is to end, be it later";
  EXPECT_TRUE(job_->Preempted(9));
  EXPECT_TRUE(job_->Preempted(10)) << "whoever did not listen hears it again";
}

TEST_F(PreemptedTest, WithoutADaemonItIsWhatThisProcessWasTold) {
  daemon_.Stop();
  EXPECT_FALSE(job_->Preempted(1));
  job_->NoticeStop(seconds(30));
  EXPECT_TRUE(job_->Preempted(2));
}

TEST_F(PreemptedTest, ADaemonThatHangsHoldsTheLoopUpOnce) {
  daemon_.SetHook([](const v1::ClientFrame& frame, FakeDaemon::Peer&) {
    return frame.has_reach_step();  // never answered
  });
  EXPECT_FALSE(job_->Preempted(1));
  const int asked = daemon_.Count("reach_step");
  for (uint64_t step = 2; step < 200; ++step) {
    EXPECT_FALSE(job_->Preempted(step));
  }
  EXPECT_EQ(daemon_.Count("reach_step"), asked) << "198 times 4 s, else";
}

TEST_F(PreemptedTest, WhoComesAgainSaysWhatItHasPassed) {
  EXPECT_FALSE(job_->Preempted(0));
  EXPECT_FALSE(job_->Preempted(41));
  daemon_.Stop();
  EXPECT_FALSE(job_->Preempted(42));
  daemon_.Start();
  EXPECT_FALSE(job_->Preempted(43));
  const std::vector<v1::ClientFrame> joins = daemon_.Frames("join");
  ASSERT_EQ(joins.size(), 2u);
  EXPECT_FALSE(joins[0].join().has_passed_step());
  EXPECT_EQ(joins[1].join().passed_step(), 42u);
}

std::atomic<Job*> told_by_signal{nullptr};

TEST_F(PreemptedTest, ASignalsHandlerMaySayIt) {
  told_by_signal = job_.get();
  struct sigaction action = {};
  struct sigaction before = {};
  action.sa_handler = [](int) { told_by_signal.load()->NoticeStop(seconds(5)); };
  ASSERT_EQ(::sigaction(SIGUSR1, &action, &before), 0);
  ASSERT_EQ(::raise(SIGUSR1), 0);
  ASSERT_EQ(::sigaction(SIGUSR1, &before, nullptr), 0);
  EXPECT_TRUE(job_->Preempted(3));
}

TEST_F(PreemptedTest, AForkedChildHasNoPartInIt) {
  job_->NoticeStop(seconds(30));
  const int before = daemon_.Count("reach_step");
  const pid_t child = ::fork();
  if (child == 0) {
    ::_exit(job_->Preempted(5) ? 1 : 0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(daemon_.Count("reach_step"), before);
}

}  // namespace
}  // namespace holdfast
