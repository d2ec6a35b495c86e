// A forked child (a data loader, say) has no part in the job: clear errors, no socket, no slot, and
// nothing that it does or destroys touches the parent's.
#include <dirent.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>

#include "tests/client-lib/fake_daemon.h"

namespace holdfast {
namespace {

const Milliseconds kLong(60'000);

// Runs `check` in a child; true when it returned true.
template <typename Check>
bool InChild(const Check& check) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::_exit(check() ? 0 : 1);
  }
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

int ConnectedSockets() {
  int count = 0;
  for (int fd = 0; fd < 1024; ++fd) {
    struct sockaddr_storage peer = {};
    socklen_t bytes = sizeof(peer);
    count += ::getpeername(fd, reinterpret_cast<struct sockaddr*>(&peer), &bytes) == 0 ? 1 : 0;
  }
  return count;
}

int MappedSlots() {
  std::ifstream maps("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(maps, line);) {
    count += line.find("memfd:slot") != std::string::npos ? 1 : 0;
  }
  return count;
}

class ForkTest : public testing::Test {
 protected:
  ForkTest() : w_(1 << 20, 1), state_{{{"w", Type::kU8, {w_.size()}, w_.data()}}, {}} {
    Result<std::unique_ptr<Job>> job = Job::Open(daemon_.Options());
    EXPECT_TRUE(job.ok());
    job_ = *std::move(job);
  }

  FakeDaemon daemon_;
  std::vector<uint8_t> w_;
  State state_;
  std::unique_ptr<Job> job_;
};

TEST_F(ForkTest, EveryCallAnswersForkedAndTheParentGoesOn) {
  ASSERT_TRUE(job_->Save(1, state_).ok());
  auto handle = job_->SaveAsync(2, state_);
  ASSERT_TRUE(handle->Wait(Stage::kSealed, kLong).ok());
  const int joins = daemon_.Count("join");
  EXPECT_TRUE(InChild([&] {
    State target = state_;
    return job_->Save(3, state_).code() == Code::kForked &&
           job_->SaveAsync(3, state_)->WaitSnapshot(kLong).code() == Code::kForked &&
           job_->Restore(target).status().code() == Code::kForked &&
           job_->Reserve(state_, kLong).status().code() == Code::kForked &&
           handle->Wait(Stage::kCommitted, kLong).code() == Code::kForked &&
           job_->last_failure().code() == Code::kForked && job_->attempt() == 0 &&
           handle->times().bytes == 0;
  }));
  EXPECT_TRUE(handle->Wait(Stage::kCommitted, kLong).ok());
  EXPECT_TRUE(job_->Save(4, state_).ok());
  EXPECT_EQ(daemon_.Count("join"), joins);  // the connection was never lost
}

TEST_F(ForkTest, NoSocketAndNoSlotIsInherited) {
  ASSERT_TRUE(job_->Save(1, state_).ok());
  const int sockets = ConnectedSockets();
  ASSERT_GT(MappedSlots(), 0);
  // The fake daemon's own end of the connection lives in this process, too.
  EXPECT_TRUE(InChild([&] { return MappedSlots() == 0 && ConnectedSockets() == sockets - 1; }));
}

TEST_F(ForkTest, StagedCopiesAreNotInherited) {
  auto handle = job_->SaveAsync(1, state_, {.hold = true});
  ASSERT_TRUE(handle->Wait(Stage::kSnapshot, kLong).ok());
  const Result<std::shared_ptr<const StagedTensors>> staged = handle->Staged();
  ASSERT_TRUE(staged.ok()) << staged.status().ToString();
  ASSERT_EQ(MappedSlots(), 2);
  EXPECT_TRUE(InChild([] { return MappedSlots() == 0; }));
  EXPECT_EQ((*staged)->bytes()[0][0], std::byte{1});
}

TEST_F(ForkTest, DestroyingItInTheChildTouchesNothingOfTheParents) {
  AttachOptions attach;
  attach.job = "test";
  attach.socket = daemon_.socket();
  ASSERT_TRUE(job_->Save(1, state_).ok());
  Result<std::unique_ptr<View>> view = Attach(attach);
  ASSERT_TRUE(view.ok());
  auto handle = job_->SaveAsync(2, state_);
  EXPECT_TRUE(InChild([&] {
    const bool forked = (*view)->Verify().code() == Code::kForked;
    handle.reset();
    view = Status();
    job_.reset();
    return forked;
  }));
  EXPECT_TRUE(handle->Wait(Stage::kSealed, kLong).ok());
  EXPECT_TRUE((*view)->Verify().ok());
  EXPECT_EQ(daemon_.Count("leave"), 0);
  EXPECT_EQ(daemon_.Count("release_read"), 0);
  EXPECT_TRUE(job_->Save(3, state_).ok());
}

TEST_F(ForkTest, ForkingWhileCopyingIsSafe) {
  std::vector<uint8_t> big(64 << 20, 5);
  const State state{{{"big", Type::kU8, {big.size()}, big.data()}}, {}};
  for (uint64_t step = 1; step <= 5; ++step) {
    auto handle = job_->SaveAsync(step, state);
    EXPECT_TRUE(InChild([&] { return job_->Save(100, state).code() == Code::kForked; }));
    EXPECT_TRUE(handle->Wait(Stage::kSealed, kLong).ok());
  }
}

// The threads and locks of a save under way do not exist in the child, whatever it does with what
// it inherited.
TEST_F(ForkTest, AHandleOfASaveUnderWayIsRefusedInTheChild) {
  daemon_.SetHook([held = false](const v1::ClientFrame& frame, FakeDaemon::Peer&) mutable {
    const bool hold = frame.has_seal() && !held;  // never answered: the save is under way
    held = held || hold;
    return hold;
  });
  auto handle = job_->SaveAsync(1, state_);
  ASSERT_TRUE(daemon_.WaitForCount("seal", 1));
  EXPECT_TRUE(InChild([&] {
    ::alarm(60);  // a lock of the parent's would never be let go
    const bool refused = handle->WaitSnapshot(kLong).code() == Code::kForked &&
                         handle->Wait(Stage::kSealed, kLong).code() == Code::kForked &&
                         handle->times().bytes == 0 &&
                         job_->Save(2, state_).code() == Code::kForked && job_->failed_saves() == 0;
    handle.reset();
    job_.reset();
    return refused;
  }));
  EXPECT_EQ(daemon_.Count("begin_save"), 1);
  EXPECT_EQ(daemon_.Count("leave"), 0);
  daemon_.SetHook(nullptr);
  daemon_.Stop();  // ends the seal's wait
  EXPECT_EQ(handle->Wait(Stage::kSealed, kLong).code(), Code::kUnavailable);
  daemon_.Start();
  EXPECT_TRUE(job_->Save(3, state_).ok());
}

TEST_F(ForkTest, AChildOfACopyUnderWayMayDestroyEverything) {
  std::vector<uint8_t> big(64 << 20, 5);
  const State state{{{"big", Type::kU8, {big.size()}, big.data()}}, {}};
  for (uint64_t step = 1; step <= 5; ++step) {
    auto handle = job_->SaveAsync(step, state);
    EXPECT_TRUE(InChild([&] {
      ::alarm(60);
      const bool refused = handle->WaitSnapshot(kLong).code() == Code::kForked;
      handle.reset();
      job_.reset();
      return refused;
    }));
    EXPECT_TRUE(handle->Wait(Stage::kSealed, kLong).ok());
  }
}

TEST_F(ForkTest, AChildMayOpenAJobOfItsOwn) {
  ASSERT_TRUE(job_->Save(1, state_).ok());
  EXPECT_TRUE(InChild([&] {
    AttachOptions attach;
    attach.job = "test";
    attach.socket = daemon_.socket();
    Result<std::unique_ptr<View>> view = Attach(attach);
    return view.ok() && (*view)->Verify().ok();
  }));
}

}  // namespace
}  // namespace holdfast
