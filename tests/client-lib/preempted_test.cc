// What the library says of a process that was told to end, and how little it waits for a daemon.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "tests/client-lib/fake_daemon.h"

namespace holdfast {
namespace {

using std::chrono::hours;
using std::chrono::seconds;
using ::testing::HasSubstr;

// The daemon never answers how far a rank is; all else it does.
bool LeavesRanksStanding(const v1::ClientFrame& frame, FakeDaemon::Peer& /*peer*/) {
  return frame.has_reach_step();
}

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

  Status Save(uint64_t step) {
    return job_->Save(step, State{{{"w", Type::kF32, {4}, values_.data()}}, {}});
  }

  std::array<float, 4> values_{1, 2, 3, 4};
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
  daemon_.SetHook(LeavesRanksStanding);
  EXPECT_FALSE(job_->Preempted(1));
  const auto began = std::chrono::steady_clock::now();
  for (uint64_t step = 2; step < 200; ++step) {
    EXPECT_FALSE(job_->Preempted(step));
  }
  EXPECT_LT(std::chrono::steady_clock::now() - began, seconds(2)) << "198 times that, else";
}

TEST_F(PreemptedTest, ADaemonThatHangsWillHearHowFarTheRankIs) {
  daemon_.SetHook(LeavesRanksStanding);
  EXPECT_FALSE(job_->Preempted(1));
  EXPECT_FALSE(job_->Preempted(2));
  EXPECT_TRUE(daemon_.WaitForCount("reach_step", 2));
  EXPECT_EQ(Last().passed_step(), 2u);
  for (uint64_t step = 3; step < 10'000; ++step) {
    EXPECT_FALSE(job_->Preempted(step));
  }
  EXPECT_LT(daemon_.Count("reach_step"), 40) << "it has to read them all";
}

// Answers how far a rank is only when it is told to.
class StallingTest : public PreemptedTest {
 protected:
  void SetUp() override {
    PreemptedTest::SetUp();
    daemon_.SetHook([this](const v1::ClientFrame& frame, FakeDaemon::Peer& peer) {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!frame.has_reach_step() || !stalls_) {
        return false;
      }
      kept_.emplace_back(frame, peer);
      return true;
    });
  }
  void TearDown() override {
    job_.reset();
    daemon_.Stop();
  }
  void StallNoMore() {
    const std::lock_guard<std::mutex> lock(mutex_);
    stalls_ = false;
  }
  void AnswerLate() {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [frame, peer] : kept_) {
      daemon_.AnswerLate(frame, peer);
    }
    kept_.clear();
  }

 private:
  std::mutex mutex_;
  bool stalls_ = true;
  std::vector<std::pair<v1::ClientFrame, FakeDaemon::Peer>> kept_;
};

TEST_F(StallingTest, ADaemonThatAnswersAgainIsAskedAgain) {
  EXPECT_FALSE(job_->Preempted(1));
  StallNoMore();
  AnswerLate();
  EXPECT_FALSE(job_->Preempted(2));
  EXPECT_EQ(daemon_.Count("reach_step"), 2);
  EXPECT_EQ(Last().step(), 2u);
  EXPECT_EQ(Last().passed_step(), 1u) << "which it has not heard in time";
  EXPECT_FALSE(job_->Preempted(3));
  EXPECT_EQ(daemon_.Count("reach_step"), 3);
}

TEST_F(StallingTest, OneThatStallsAgainAndAgainHoldsTheLoopUpTwiceInTenSeconds) {
  const auto began = std::chrono::steady_clock::now();
  for (uint64_t step = 1; step < 10; ++step) {
    EXPECT_FALSE(job_->Preempted(step));
    AnswerLate();
  }
  EXPECT_LT(std::chrono::steady_clock::now() - began, seconds(6));
}

TEST_F(StallingTest, ADaemonThatIsStartedAnewIsAskedAtOnce) {
  EXPECT_FALSE(job_->Preempted(1));
  daemon_.Stop();
  daemon_.Start();
  StallNoMore();
  EXPECT_FALSE(job_->Preempted(2));
  EXPECT_EQ(daemon_.Count("join"), 2);
  EXPECT_EQ(Last().step(), 2u);
}

TEST_F(PreemptedTest, ADaemonThatWasSlowIsToldAllTheSame) {
  struct Kept {
    std::mutex mutex;
    std::optional<std::pair<v1::ClientFrame, FakeDaemon::Peer>> first;
  };
  const auto kept = std::make_shared<Kept>();  // the hook's, too, which outlives this function
  daemon_.SetHook([kept](const v1::ClientFrame& frame, FakeDaemon::Peer& peer) {
    const std::lock_guard<std::mutex> lock(kept->mutex);
    if (!frame.has_reach_step() || kept->first) {
      return false;
    }
    kept->first.emplace(frame, peer);
    return true;
  });
  EXPECT_FALSE(job_->Preempted(1));
  job_->NoticeStop(seconds(60));
  std::future<bool> last = std::async(std::launch::async, [this] { return job_->Preempted(2); });
  {
    const std::lock_guard<std::mutex> lock(kept->mutex);
    ASSERT_TRUE(kept->first.has_value());
    daemon_.AnswerLate(kept->first->first, kept->first->second);
  }
  EXPECT_TRUE(last.get());
  EXPECT_TRUE(Last().told_to_stop()) << "or the other ranks hear nothing of it";
}

TEST_F(PreemptedTest, ADaemonThatHangsHoldsTheLoopUpForTwoSeconds) {
  daemon_.SetHook(LeavesRanksStanding);
  job_->NoticeStop(seconds(30));
  EXPECT_TRUE(job_->Preempted(1));
  EXPECT_GT(*job_->stop_left(), seconds(26));
}

TEST_F(PreemptedTest, OfAShortGraceNoMoreThanHalfIsSpentOnADaemonThatHangs) {
  daemon_.SetHook(LeavesRanksStanding);
  job_->NoticeStop(Milliseconds(1500));
  EXPECT_TRUE(job_->Preempted(1));
  EXPECT_GT(*job_->stop_left(), Milliseconds(0));
}

TEST_F(PreemptedTest, ARankThatStoodForLongerThanThereIsTimeSavesAllTheSame) {
  daemon_.SetHook(LeavesRanksStanding);
  job_->NoticeStop(seconds(3));
  EXPECT_TRUE(job_->Preempted(1));
  EXPECT_EQ(Save(1).ToString(), Status().ToString());
}

TEST_F(PreemptedTest, WhoWasToldWaitsForADaemonThatIsBeingRestarted) {
  std::atomic<int> asked{0};
  daemon_.SetHook([&asked](const v1::ClientFrame& frame, FakeDaemon::Peer& peer) {
    if (!frame.has_reach_step() || ++asked > 1) {
      return false;
    }
    peer.Close();
    return true;
  });
  job_->NoticeStop(seconds(60));
  EXPECT_TRUE(job_->Preempted(1));
  EXPECT_EQ(asked, 2);
}

TEST_F(PreemptedTest, TheLastStepIsBegunAgainWhereTheDaemonWentAway) {
  std::atomic<int> begun{0};
  daemon_.SetHook([&begun](const v1::ClientFrame& frame, FakeDaemon::Peer& peer) {
    if (!frame.has_begin_save() || ++begun > 1) {
      return false;
    }
    peer.Close();
    return true;
  });
  job_->NoticeStop(seconds(60));
  EXPECT_TRUE(job_->Preempted(1));
  EXPECT_EQ(Save(1).ToString(), Status().ToString());
  EXPECT_EQ(begun, 2);
}

TEST_F(PreemptedTest, TheLastStepWaitsForADaemonThatIsBeingStarted) {
  job_->NoticeStop(seconds(60));
  EXPECT_TRUE(job_->Preempted(1));
  daemon_.Stop();
  std::future<Status> saved = std::async(std::launch::async, [this] { return Save(1); });
  EXPECT_EQ(saved.wait_for(Milliseconds(100)), std::future_status::timeout);
  daemon_.Start();
  EXPECT_EQ(saved.get().ToString(), Status().ToString());
}

TEST_F(PreemptedTest, TheLastStepWaitsForASlot) {
  const auto waits_ms = [this] {
    return daemon_.Frames("begin_save").back().begin_save().deadline_ms();
  };
  ASSERT_TRUE(Save(1).ok());
  EXPECT_EQ(waits_ms(), 0u);
  job_->NoticeStop(seconds(60));
  ASSERT_TRUE(Save(2).ok());
  EXPECT_EQ(waits_ms(), 0u) << "nobody has called it the last one";
  ASSERT_TRUE(job_->Preempted(3));
  ASSERT_TRUE(Save(3).ok());
  EXPECT_GT(waits_ms(), 0u);
  EXPECT_LE(waits_ms(), 60'000u);
}

TEST_F(PreemptedTest, AStepThatIsNotTheLastOneWaitsForNobody) {
  EXPECT_FALSE(job_->Preempted(1));
  daemon_.SetHook([](const v1::ClientFrame& frame, FakeDaemon::Peer& peer) {
    if (frame.has_begin_save()) {
      peer.Close();
    }
    return frame.has_begin_save();
  });
  EXPECT_EQ(Save(1).code(), Code::kUnavailable);
  EXPECT_EQ(daemon_.Count("begin_save"), 1);
}

TEST_F(PreemptedTest, TheLastStepWaitsNoLongerThanThereIsTime) {
  job_->NoticeStop(seconds(2));
  EXPECT_TRUE(job_->Preempted(1));
  daemon_.Stop();
  const Status saved = Save(1);
  EXPECT_EQ(saved.code(), Code::kUnavailable);
  EXPECT_THAT(saved.message(), HasSubstr("the grace"));
  EXPECT_GT(*job_->stop_left(), Milliseconds(0));
}

TEST_F(PreemptedTest, ALastStepThatHasNoTimeToWaitForADaemonSaysSo) {
  job_->NoticeStop(seconds(0));
  EXPECT_TRUE(job_->Preempted(1));
  daemon_.Stop();
  const Status saved = Save(1);
  EXPECT_EQ(saved.code(), Code::kUnavailable);
  EXPECT_THAT(saved.message(), HasSubstr("is ckptd running?"));
  EXPECT_THAT(saved.message(), HasSubstr("the grace"));
}

// The grace is what was assumed; who lives on saves on.
TEST_F(PreemptedTest, WhoLivesOnWhenTheGraceIsOverSavesOn) {
  job_->NoticeStop(seconds(0));
  for (uint64_t step = 1; step < 4; ++step) {
    EXPECT_TRUE(job_->Preempted(step));
    EXPECT_EQ(Save(step).ToString(), Status().ToString());
  }
}

TEST_F(PreemptedTest, ADaemonThatIsThereIsNotCutShortByTheGrace) {
  daemon_.SetHook([](const v1::ClientFrame& frame, FakeDaemon::Peer&) {
    if (frame.has_begin_save()) {
      std::this_thread::sleep_for(Milliseconds(700));
    }
    return false;
  });
  job_->NoticeStop(seconds(1));
  EXPECT_TRUE(job_->Preempted(1));
  EXPECT_EQ(Save(1).ToString(), Status().ToString());
}

TEST_F(PreemptedTest, ALastStepThatIsCopiedWhenTheGraceEndsIsSealedAllTheSame) {
  job_->NoticeStop(Milliseconds(300));
  EXPECT_TRUE(job_->Preempted(1));
  State state{{{"w", Type::kF32, {4}, values_.data()}}, {}};
  const std::unique_ptr<SaveHandle> save = job_->SaveAsync(1, state, {.hold = true});
  ASSERT_TRUE(save->WaitSnapshot(seconds(60)).ok());
  while (*job_->stop_left() > Milliseconds(0)) {
    std::this_thread::sleep_for(Milliseconds(10));
  }
  ASSERT_TRUE(save->Seal(seconds(60)).ok());
  EXPECT_EQ(save->Wait(Stage::kSealed, seconds(60)).ToString(), Status().ToString());
}

// The daemon had published the copy before it went, and found it when it came again.
class SealedUnheardTest : public PreemptedTest, public testing::WithParamInterface<seconds> {};

TEST_P(SealedUnheardTest, TheLastStepIsSealedThoughNobodySaidSo) {
  daemon_.SetHook([](const v1::ClientFrame& frame, FakeDaemon::Peer& peer) {
    if (frame.has_seal()) {
      peer.Close();
      return true;
    }
    if (frame.has_await_save()) {
      v1::DaemonFrame reply;
      reply.set_id(frame.id());
      reply.mutable_await_save()->set_stage(v1::AwaitSave::STAGE_SEALED);
      peer.Send(reply);
      return true;
    }
    return false;
  });
  job_->NoticeStop(GetParam());
  EXPECT_TRUE(job_->Preempted(1));
  EXPECT_EQ(Save(1).ToString(), Status().ToString());
  ASSERT_EQ(daemon_.Count("await_save"), 1);
  EXPECT_EQ(daemon_.Frames("await_save").front().await_save().step(), 1u);
}

INSTANTIATE_TEST_SUITE_P(Graces, SealedUnheardTest, testing::Values(seconds(60), seconds(0)));

v1::DaemonFrame NeverBegun(const v1::ClientFrame& frame) {
  v1::DaemonFrame reply;
  reply.set_id(frame.id());
  reply.mutable_failure()->set_code(3);
  reply.mutable_failure()->set_message("rank 0 has not begun step 1");
  return reply;
}

// Behind the copy the daemon is started anew, and knows nothing of the step.
class LostSlotTest : public PreemptedTest, public testing::WithParamInterface<bool> {};

TEST_P(LostSlotTest, TheLastStepGoesIntoAnotherSlot) {
  daemon_.SetHook(
      [this, lost = false](const v1::ClientFrame& frame, FakeDaemon::Peer& peer) mutable {
        if (frame.has_seal() && !lost) {
          lost = true;
          values_ = {5, 6, 7, 8};  // as the program may, from the snapshot on
          if (GetParam()) {
            daemon_.LoseMemory();
          }
          daemon_.ForgetSteps();
          peer.Close();
          return true;
        }
        if (frame.has_await_save()) {
          peer.Send(NeverBegun(frame));
          return true;
        }
        return false;
      });
  job_->NoticeStop(seconds(60));
  EXPECT_TRUE(job_->Preempted(1));
  EXPECT_EQ(Save(1).ToString(), Status().ToString());
  EXPECT_EQ(daemon_.Count("begin_save"), 2);
  EXPECT_EQ(daemon_.Count("abort_save"), 0);
  State state{{{"w", Type::kF32, {4}, values_.data()}}, {}};
  const Result<Restored> restored = job_->Restore(state);
  ASSERT_TRUE(restored.ok()) << restored.status().ToString();
  EXPECT_EQ(restored->step, 1u);
  EXPECT_EQ(values_, (std::array<float, 4>{1, 2, 3, 4}));
}

INSTANTIATE_TEST_SUITE_P(Files, LostSlotTest, testing::Bool());

TEST_F(PreemptedTest, ALastStepThatIsAbandonedIsNotBegunAgain) {
  daemon_.SetHook([](const v1::ClientFrame& frame, FakeDaemon::Peer& peer) {
    if (frame.has_await_save()) {
      v1::DaemonFrame reply = NeverBegun(frame);
      reply.mutable_failure()->set_code(10);
      reply.mutable_failure()->set_reason(v1::Failure::REASON_ABANDONED);
      peer.Send(reply);
      return true;
    }
    if (frame.has_seal()) {
      peer.Close();
    }
    return frame.has_seal();
  });
  job_->NoticeStop(seconds(60));
  EXPECT_TRUE(job_->Preempted(1));
  EXPECT_EQ(Save(1).code(), Code::kUnavailable);
  EXPECT_EQ(daemon_.Count("begin_save"), 1);
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
