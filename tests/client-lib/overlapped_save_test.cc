// Saves that go on beside the caller: what is copied before SaveAsync returns, and what is held
// until the caller says that it counts.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <future>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "tests/client-lib/fake_daemon.h"

namespace holdfast {
namespace {

const Milliseconds kLong(60'000);
const Milliseconds kNothing(0);

std::unique_ptr<Job> Open(const FakeDaemon& daemon) {
  Result<std::unique_ptr<Job>> job = Job::Open(daemon.Options());
  EXPECT_TRUE(job.ok()) << job.status().ToString();
  return *std::move(job);
}

// Keeps requests of one kind until it is told to let them through.
class Gate {
 public:
  // (What the daemon's thread uses lives as long as that: requests may come when the gate is gone.)
  Gate(FakeDaemon& daemon, const std::string& request) {
    daemon.SetHook([opened = opened_, request](const v1::ClientFrame& frame, FakeDaemon::Peer&) {
      if (RequestName(frame) == request) {
        opened->get_future().wait_for(kLong);
      }
      return false;
    });
  }
  void Open() { opened_->set_value(); }

 private:
  const std::shared_ptr<std::promise<void>> opened_ = std::make_shared<std::promise<void>>();
};

std::string Bytes(FakeDaemon& daemon, const std::vector<uint8_t>& tensor) {
  // One tensor of bytes: it is the image's end.
  const std::string image = daemon.LastImage();
  return image.substr(image.size() - tensor.size());
}

TEST(CopyFirst, ALittleIsSetAsideWithoutAskingTheDaemon) {
  FakeDaemon daemon;
  const auto job = Open(daemon);
  Gate gate(daemon, "begin_save");
  std::vector<uint8_t> w(1 << 20, 7);
  const State state{{{"w", Type::kU8, {w.size()}, w.data()}}, {}};
  auto handle = job->SaveAsync(1, state, {.copy_first = {0}});
  // The daemon has not answered yet, and the tensor changes.
  EXPECT_EQ(handle->Wait(Stage::kSnapshot, kNothing).code(), Code::kDeadlineExceeded);
  std::fill(w.begin(), w.end(), 0xee);
  gate.Open();
  ASSERT_TRUE(handle->Wait(Stage::kSealed, kLong).ok());
  EXPECT_EQ(Bytes(daemon, w), std::string(w.size(), 7));
}

TEST(CopyFirst, MuchIsInTheSlotWhenSaveAsyncReturns) {
  FakeDaemon daemon;
  const auto job = Open(daemon);
  std::vector<uint8_t> before(24 << 20, 7);
  std::vector<uint8_t> after(4 << 20, 9);
  for (uint64_t step = 1; step <= 5; ++step) {
    std::fill(before.begin(), before.end(), static_cast<uint8_t>(step));
    const State state{{{"after", Type::kU8, {after.size()}, after.data()},
                       {"before", Type::kU8, {before.size()}, before.data()}},
                      {}};
    auto handle = job->SaveAsync(step, state, {.copy_first = {1}});
    std::fill(before.begin(), before.end(), 0xee);
    ASSERT_TRUE(handle->Wait(Stage::kSealed, kLong).ok());
    EXPECT_EQ(Bytes(daemon, before), std::string(before.size(), static_cast<char>(step)));
  }
}

TEST(CopyFirst, TensorsThatAreNotThereAreRefused) {
  FakeDaemon daemon;
  const auto job = Open(daemon);
  float w = 1;
  auto handle = job->SaveAsync(1, {{{"w", Type::kF32, {1}, &w}}, {}}, {.copy_first = {1}});
  EXPECT_EQ(handle->Wait(Stage::kSealed, kLong).code(), Code::kInvalidArgument);
  EXPECT_EQ(daemon.Count("begin_save"), 0);
}

TEST(CopyFirst, AFailureEndsTheWaitForIt) {
  FakeDaemon daemon;
  const auto job = Open(daemon);
  daemon.SetHook([](const v1::ClientFrame& frame, FakeDaemon::Peer& peer) {
    if (frame.has_begin_save()) {
      peer.Close();
    }
    return frame.has_begin_save();
  });
  std::vector<uint8_t> w(24 << 20, 7);
  auto handle =
      job->SaveAsync(1, {{{"w", Type::kU8, {w.size()}, w.data()}}, {}}, {.copy_first = {0}});
  EXPECT_EQ(handle->Wait(Stage::kSealed, kLong).code(), Code::kUnavailable);
  EXPECT_EQ(job->failed_saves(), 1u);
}

class Held : public testing::Test {
 protected:
  Held() : w_(3 << 20, 5), job_(Open(daemon_)) {}
  State MakeState() { return {{{"w", Type::kU8, {w_.size()}, w_.data()}}, {}}; }
  std::unique_ptr<SaveHandle> Hold(uint64_t step) {
    auto handle = job_->SaveAsync(step, MakeState(), {.hold = true});
    EXPECT_TRUE(handle->Wait(Stage::kSnapshot, kLong).ok());
    return handle;
  }

  FakeDaemon daemon_;
  std::vector<uint8_t> w_;
  std::unique_ptr<Job> job_;
};

TEST_F(Held, IsSealedWhenTheCallerSaysSo) {
  auto handle = Hold(1);
  std::fill(w_.begin(), w_.end(), 0xee);
  EXPECT_EQ(handle->Wait(Stage::kSealed, kNothing).code(), Code::kDeadlineExceeded);
  EXPECT_EQ(daemon_.Count("seal"), 0);
  ASSERT_TRUE(handle->Seal(kLong).ok());
  ASSERT_TRUE(handle->Wait(Stage::kCommitted, kLong).ok());
  EXPECT_EQ(Bytes(daemon_, w_), std::string(w_.size(), 5));
  EXPECT_EQ(handle->Seal(kLong).code(), Code::kRefused);
}

TEST_F(Held, ItsCopiesCanBeLookedAt) {
  auto handle = Hold(1);
  std::fill(w_.begin(), w_.end(), 0xee);
  auto staged = handle->Staged();
  ASSERT_TRUE(staged.ok()) << staged.status().ToString();
  ASSERT_EQ((*staged)->bytes().size(), 1u);
  const auto copy = (*staged)->bytes()[0];
  ASSERT_EQ(copy.size(), w_.size());
  EXPECT_TRUE(std::all_of(copy.begin(), copy.end(), [](std::byte b) { return b == std::byte{5}; }));
  EXPECT_TRUE(handle->Seal(kLong).ok());
  EXPECT_EQ(handle->Staged().status().code(), Code::kRefused);
  // The memory stays as long as somebody looks at it, whatever becomes of the job.
  handle.reset();
  job_.reset();
  EXPECT_EQ(copy[0], std::byte{5});
}

// Whoever looks at the copies reads zeros, lives on, and learns of it by the seal.
TEST_F(Held, ItsCopiesMayBeCutShortWhileTheyAreLookedAt) {
  auto handle = Hold(1);
  auto staged = handle->Staged();
  ASSERT_TRUE(staged.ok()) << staged.status().ToString();
  daemon_.TruncateAll(0);
  const auto* const copy = static_cast<const volatile std::byte*>((*staged)->bytes()[0].data());
  const std::byte last = copy[w_.size() - 1];
  EXPECT_EQ(last, std::byte{0});
  EXPECT_EQ(handle->Seal(kLong).code(), Code::kCorrupt);
}

TEST_F(Held, IsGivenUpWithItsHandleAndByDiscard) {
  Hold(1);  // goes at once
  EXPECT_EQ(daemon_.Count("abort_save"), 1);
  auto handle = Hold(2);
  handle->Discard();
  EXPECT_EQ(daemon_.Count("abort_save"), 2);
  EXPECT_EQ(handle->Wait(Stage::kSealed, kLong).code(), Code::kAbandoned);
  EXPECT_EQ(handle->Seal(kLong).code(), Code::kRefused);
  EXPECT_EQ(daemon_.Count("seal"), 0);
  EXPECT_TRUE(job_->Save(3, MakeState()).ok());
}

TEST_F(Held, IsGivenUpByWhateverBeginsInBetween) {
  auto first = Hold(1);
  EXPECT_TRUE(job_->Save(2, MakeState()).ok());
  EXPECT_EQ(first->Wait(Stage::kSealed, kLong).code(), Code::kAbandoned);
  auto second = Hold(3);
  auto third = Hold(4);
  EXPECT_EQ(second->Seal(kLong).code(), Code::kRefused);
  State wanted = MakeState();
  EXPECT_TRUE(job_->Restore(wanted).ok());
  EXPECT_EQ(third->Wait(Stage::kSealed, kLong).code(), Code::kAbandoned);
  auto last = Hold(5);
  job_.reset();
  EXPECT_EQ(last->Wait(Stage::kSealed, kLong).code(), Code::kAbandoned);
  EXPECT_EQ(last->Seal(kLong).code(), Code::kRefused);
}

TEST_F(Held, ADaemonThatDiesInBetweenCostsThatSaveOnly) {
  auto handle = Hold(1);
  daemon_.Stop();
  EXPECT_EQ(handle->Seal(kLong).code(), Code::kUnavailable);
  daemon_.Start();
  EXPECT_TRUE(job_->Save(2, MakeState()).ok());
}

TEST_F(Held, ASaveThatWasNotHeldCannotBeSealedTwice) {
  auto handle = job_->SaveAsync(1, MakeState());
  EXPECT_EQ(handle->Seal(kLong).code(), Code::kRefused);
  EXPECT_EQ(handle->Staged().status().code(), Code::kRefused);
  handle->Discard();
  EXPECT_TRUE(handle->Wait(Stage::kSealed, kLong).ok());
}

TEST_F(Held, ASealThatTakesItsTimeGoesOnBesideTheCaller) {
  Gate gate(daemon_, "seal");
  auto handle = Hold(1);
  EXPECT_EQ(handle->Seal(Milliseconds(20)).code(), Code::kDeadlineExceeded);
  handle->Discard();  // comes too late
  EXPECT_EQ(handle->Seal(kNothing).code(), Code::kDeadlineExceeded);
  gate.Open();
  EXPECT_TRUE(handle->Seal(kLong).ok());
  EXPECT_EQ(handle->Seal(kLong).code(), Code::kRefused);
  EXPECT_EQ(daemon_.Count("abort_save"), 0);
}

TEST_F(Held, ItsEndWaitsForNoSlot) {
  daemon_.SetHook(
      [](const v1::ClientFrame& frame, FakeDaemon::Peer&) { return frame.has_begin_save(); });
  job_.reset();
  JobOptions options = daemon_.Options();
  options.call_deadline = std::chrono::hours(1);
  Result<std::unique_ptr<Job>> job = Job::Open(options);
  ASSERT_TRUE(job.ok()) << job.status().ToString();
  auto handle = (*job)->SaveAsync(1, MakeState(), {.hold = true});
  ASSERT_TRUE(daemon_.WaitForCount("begin_save", 1));
  handle->Discard();
  EXPECT_EQ(handle->Wait(Stage::kSealed, kLong).code(), Code::kAbandoned);
  (*job)->SaveAsync(2, MakeState(), {.hold = true});  // and its handle goes
}

TEST(Turns, CallsFromManyThreadsAreServedOneAfterTheOther) {
  FakeDaemon daemon;
  const auto job = Open(daemon);
  std::atomic<uint64_t> step{0};
  std::vector<std::thread> threads;
  std::atomic<int> good{0};
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      std::vector<uint8_t> w(1 << 20, 1);
      const State state{{{"w", Type::kU8, {w.size()}, w.data()}}, {}};
      for (int k = 0; k < 10; ++k) {
        // Steps must grow; two threads may get theirs in the wrong order.
        good += job->Save(++step, state).ok() ? 1 : 0;
        job->SaveAsync(++step, state);
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_GT(good.load(), 0);
  EXPECT_EQ(daemon.Count("join"), 1);
}

// Answers each stage with its time, and those that are not named with a refusal.
void AnswerStages(FakeDaemon& daemon, std::map<v1::AwaitSave::Stage, int64_t> times) {
  daemon.SetHook([times](const v1::ClientFrame& frame, FakeDaemon::Peer& peer) {
    if (!frame.has_await_save()) {
      return false;
    }
    v1::DaemonFrame reply;
    reply.set_id(frame.id());
    const auto time = times.find(frame.await_save().stage());
    if (time != times.end()) {
      reply.mutable_await_save()->set_stage(time->first);
      reply.mutable_await_save()->set_unix_ms(time->second);
    } else {
      reply.mutable_failure()->set_code(9);
      reply.mutable_failure()->set_message("the job's policy sends no step there");
    }
    peer.Send(reply);
    return true;
  });
}

TEST(StageTimesOf, AStageThatIsReachedTellsThoseBeforeIt) {
  FakeDaemon daemon;
  const auto job = Open(daemon);
  float w = 1;
  auto handle = job->SaveAsync(1, {{{"w", Type::kF32, {1}, &w}}, {}});
  ASSERT_TRUE(handle->Wait(Stage::kSealed, kLong).ok());
  const int64_t now = Clock::System()->UnixMillis();
  AnswerStages(daemon, {{v1::AwaitSave::STAGE_COMMITTED, now + 1'000'000},
                        {v1::AwaitSave::STAGE_NVME, now + 2'000'000},
                        {v1::AwaitSave::STAGE_REMOTE, now + 3'000'000}});
  ASSERT_TRUE(handle->Wait(Stage::kRemote, kLong).ok());
  const StageTimes times = handle->times();
  EXPECT_EQ(times.nvme - times.committed, Milliseconds(1'000'000));
  EXPECT_EQ(times.remote - times.nvme, Milliseconds(1'000'000));
  EXPECT_EQ(daemon.Count("await_save"), 3);
  ASSERT_TRUE(handle->Wait(Stage::kRemote, kLong).ok());
  EXPECT_EQ(daemon.Count("await_save"), 4) << "what is known is not asked for again";
}

TEST(StageTimesOf, WhatNobodyKnowsIsLeftOut) {
  FakeDaemon daemon;
  const auto job = Open(daemon);
  float w = 1;
  auto handle = job->SaveAsync(1, {{{"w", Type::kF32, {1}, &w}}, {}});
  ASSERT_TRUE(handle->Wait(Stage::kSealed, kLong).ok());
  const int64_t now = Clock::System()->UnixMillis();
  // Not by the policy; and a daemon that was started since.
  AnswerStages(daemon, {{v1::AwaitSave::STAGE_COMMITTED, now + 1'000'000},
                        {v1::AwaitSave::STAGE_REMOTE, 0}});
  ASSERT_TRUE(handle->Wait(Stage::kRemote, kLong).ok());
  const StageTimes times = handle->times();
  EXPECT_GT(times.committed.count(), 0);
  EXPECT_LT(times.nvme.count(), 0);
  EXPECT_LT(times.remote.count(), 0);
}

TEST(Interrupted, OpenEndsAsIfItsDeadlineHadPassed) {
  FakeDaemon daemon;
  daemon.SetHook([](const v1::ClientFrame& frame, FakeDaemon::Peer&) { return frame.has_join(); });
  JobOptions options = daemon.Options();
  options.open_deadline = std::chrono::hours(1);
  int asked = 0;
  options.interrupted = [&asked] { return ++asked == 3; };
  EXPECT_EQ(Job::Open(options).status().code(), Code::kDeadlineExceeded);
  EXPECT_EQ(asked, 3);
}

TEST(Interrupted, ARestoreEndsAndTheJobGoesOn) {
  FakeDaemon daemon;
  bool stop = false;
  JobOptions options = daemon.Options();
  options.interrupted = [&stop] { return stop; };
  auto job = Job::Open(options);
  ASSERT_TRUE(job.ok());
  float w = 1;
  State state{{{"w", Type::kF32, {1}, &w}}, {}};
  ASSERT_TRUE((*job)->Save(1, state).ok());
  daemon.SetHook(
      [](const v1::ClientFrame& frame, FakeDaemon::Peer&) { return frame.has_enter_session(); });
  stop = true;
  EXPECT_EQ((*job)->Restore(state, {.deadline = std::chrono::hours(1)}).status().code(),
            Code::kDeadlineExceeded);
  stop = false;
  daemon.SetHook(nullptr);
  EXPECT_TRUE((*job)->Restore(state).ok());
}

TEST(Interrupted, ARestoreThatCopiesIsNoFailedLoad) {
  FakeDaemon daemon;
  std::atomic<bool> stop{false};
  JobOptions options = daemon.Options();
  options.interrupted = [&stop] { return stop.load(); };
  auto job = Job::Open(options);
  ASSERT_TRUE(job.ok());
  std::vector<uint8_t> w(1 << 20, 1);
  State state{{{"w", Type::kU8, {w.size()}, w.data()}}, {}};
  ASSERT_TRUE((*job)->Save(1, state).ok());
  daemon.SetHook([&stop](const v1::ClientFrame& frame, FakeDaemon::Peer&) {
    stop = stop || frame.has_enter_session();
    return false;
  });
  EXPECT_EQ((*job)->Restore(state).status().code(), Code::kDeadlineExceeded);
  EXPECT_EQ(daemon.Count("report_load"), 0);  // the others would go back to an older step for it
  daemon.SetHook(nullptr);
  stop = false;
  EXPECT_TRUE((*job)->Restore(state).ok());
}

TEST(Interrupted, TheEndOfAHandleAndOfAJobWaitsForNoSlot) {
  FakeDaemon daemon;
  daemon.SetHook(
      [](const v1::ClientFrame& frame, FakeDaemon::Peer&) { return frame.has_begin_save(); });
  bool stop = false;
  JobOptions options = daemon.Options();
  options.call_deadline = std::chrono::hours(1);
  options.interrupted = [&stop] { return stop; };
  auto job = Job::Open(options);
  ASSERT_TRUE(job.ok());
  float w = 1;
  const State state{{{"w", Type::kF32, {1}, &w}}, {}};
  auto handle = (*job)->SaveAsync(1, state);
  stop = true;
  handle.reset();
  stop = false;
  handle = (*job)->SaveAsync(2, state);
  stop = true;
  job = Status();
  EXPECT_EQ(handle->Wait(Stage::kSealed, kLong).code(), Code::kAbandoned);
}

TEST(Interrupted, ACallInTheMiddleOfAnotherIsRefusedNotHung) {
  FakeDaemon daemon;
  Job* job = nullptr;
  Status inner;
  float w = 1;
  State state{{{"w", Type::kF32, {1}, &w}}, {}};
  JobOptions options = daemon.Options();
  options.interrupted = [&] {
    if (job != nullptr) {
      inner = job->Save(2, state);
      return true;
    }
    return false;
  };
  auto opened = Job::Open(options);
  ASSERT_TRUE(opened.ok());
  ASSERT_TRUE((*opened)->Save(1, state).ok());
  daemon.SetHook(
      [](const v1::ClientFrame& frame, FakeDaemon::Peer&) { return frame.has_enter_session(); });
  job = opened->get();
  EXPECT_FALSE((*opened)->Restore(state).ok());
  EXPECT_EQ(inner.code(), Code::kRefused) << inner.ToString();
}

TEST(Chosen, WhatWasSavedIsShownBeforeItIsWanted) {
  FakeDaemon daemon;
  const auto job = Open(daemon);
  std::vector<float> w(1000, 3.5f);
  int64_t n = 4;
  ASSERT_TRUE(job->Save(7, {{{"w", Type::kF32, {10, 100}, w.data()},
                             Tensor::Box("n", Type::kI64, {8}, {3}, {1}, &n)},
                            {{"tree", "[1, 2]", true, ""}}})
                  .ok());
  std::vector<float> into;
  auto restored = job->Restore([&](const Saved& saved) -> Result<State> {
    EXPECT_EQ(saved.tensors.size(), 2u);
    EXPECT_EQ(saved.objects.at(0).bytes, "[1, 2]");
    State wanted;
    for (Tensor tensor : saved.tensors) {
      if (tensor.name == "w") {
        EXPECT_EQ(tensor.global_shape, (std::vector<uint64_t>{10, 100}));
        EXPECT_EQ(tensor.bytes, 4000u);
        into.resize(tensor.bytes / 4);
        tensor.data = into.data();
        wanted.tensors.push_back(tensor);
      }
    }
    return wanted;
  });
  ASSERT_TRUE(restored.ok()) << restored.status().ToString();
  EXPECT_EQ(restored->step, 7u);
  EXPECT_EQ(into, w);
}

TEST(Chosen, AFailureToChooseEndsTheSession) {
  FakeDaemon daemon;
  const auto job = Open(daemon);
  float w = 1;
  ASSERT_TRUE(job->Save(7, {{{"w", Type::kF32, {1}, &w}}, {}}).ok());
  const Status status = job->Restore([](const Saved&) -> Result<State> {
                             return Status(Code::kInvalidArgument, "the model has no 'w'");
                           })
                            .status();
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_NE(status.message().find("the model has no 'w'"), std::string::npos) << status.message();
  ASSERT_EQ(daemon.Frames("report_load").size(), 1u);
  EXPECT_TRUE(daemon.Frames("report_load")[0].report_load().wants_mismatch());
}

TEST(Chosen, WhatIsWantedIsCheckedBeforeItIsLookedFor) {
  FakeDaemon daemon;
  const auto job = Open(daemon);
  float w = 1;
  ASSERT_TRUE(job->Save(7, {{{"w", Type::kF32, {1}, &w}}, {}}).ok());
  const Status status = job->Restore([&](const Saved&) -> Result<State> {
                             return State{{{"w", Type::kF32, {1}, nullptr}}, {}};
                           })
                            .status();
  EXPECT_EQ(status.code(), Code::kInvalidArgument) << status.ToString();
}

}  // namespace
}  // namespace holdfast
