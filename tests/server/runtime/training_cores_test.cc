#include "server/runtime/tiers/training_cores.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "base/status.h"

namespace holdfast {
namespace {

// A process that does nothing, where it is told to.
class Trainer {
 public:
  explicit Trainer(const Cores& cores) : pid_(::fork()) {
    if (pid_ == 0) {
      for (;;) {
        ::pause();
      }
    }
    EXPECT_TRUE(SetThreadCores(pid_, cores).ok());
  }
  ~Trainer() {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  pid_t pid() const { return pid_; }

 private:
  const pid_t pid_;
};

class TrainingCoresTest : public testing::Test {
 protected:
  void SetUp() override {
    all_ = CoresOf(0).value();
    if (all_.size() < 2) {
      GTEST_SKIP() << "there is one core only";
    }
    first_ = {*all_.begin()};
    rest_ = all_;
    rest_.erase(*all_.begin());
  }

  Cores all_;
  Cores first_;
  Cores rest_;
  TrainingCores cores_;
};

TEST_F(TrainingCoresTest, WhatATrainerIsConfinedToIsLeftToIt) {
  EXPECT_EQ(cores_.All(), all_);
  EXPECT_EQ(cores_.Beside(), all_);
  const Trainer confined(first_);
  const Trainer anywhere(all_);
  cores_.Add(confined.pid());
  cores_.Add(confined.pid());
  cores_.Add(anywhere.pid());
  EXPECT_EQ(cores_.Beside(), rest_);
  EXPECT_TRUE(SetThreadCores(confined.pid(), all_).ok());
  EXPECT_EQ(cores_.Beside(), all_) << "asked when it matters";
  EXPECT_TRUE(SetThreadCores(confined.pid(), first_).ok());
  cores_.Remove(confined.pid());
  EXPECT_EQ(cores_.Beside(), all_);
}

TEST_F(TrainingCoresTest, WhoHasEndedHasNone) {
  pid_t ended = 0;
  {
    const Trainer trainer(first_);
    ended = trainer.pid();
    cores_.Add(ended);
  }
  EXPECT_EQ(cores_.Beside(), all_);
}

TEST_F(TrainingCoresTest, AThreadRunsBesideThemForAWhile) {
  const Trainer confined(first_);
  cores_.Add(confined.pid());
  {
    const RunsBesideTraining beside(cores_, true);
    EXPECT_EQ(CoresOf(0).value(), rest_);
    std::thread([&] { EXPECT_EQ(CoresOf(0).value(), rest_); }).join();
  }
  EXPECT_EQ(CoresOf(0).value(), all_);
  const RunsBesideTraining not_at_all(cores_, false);
  EXPECT_EQ(CoresOf(0).value(), all_);
}

}  // namespace
}  // namespace holdfast
