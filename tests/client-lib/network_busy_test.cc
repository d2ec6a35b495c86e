// Quiet windows as the library says them: a word in a page of the daemon's, and nothing else.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <vector>

#include "base/mutex.h"
#include "base/network_flag.h"
#include "tests/client-lib/fake_daemon.h"

namespace holdfast {
namespace {

class NetworkBusyTest : public testing::Test {
 protected:
  enum class Sealed : uint8_t { kNo, kYes };

  NetworkBusyTest() : w_(1 << 16, 1), state_{{{"w", Type::kU8, {w_.size()}, w_.data()}}, {}} {}
  ~NetworkBusyTest() override {
    job_.reset();
    daemon_.Stop();  // its thread uses the pages
    for (void* const at : pages_) {
      ::munmap(at, kNetworkFlagPageBytes);
    }
  }

  // A daemon that gives pages, as ckptd does.
  void GivePages(Sealed sealed = Sealed::kYes) {
    daemon_.SetHook([this, sealed](const v1::ClientFrame& frame, FakeDaemon::Peer& peer) {
      if (!frame.has_hello() || !frame.hello().network_flag()) {
        return false;
      }
      const UniqueFd fd(::memfd_create("flag", MFD_CLOEXEC | MFD_ALLOW_SEALING));
      EXPECT_EQ(::ftruncate(fd.get(), kNetworkFlagPageBytes), 0);
      if (sealed == Sealed::kYes) {
        EXPECT_EQ(::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK), 0);
      }
      void* const at =
          ::mmap(nullptr, kNetworkFlagPageBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
      EXPECT_NE(at, MAP_FAILED);
      {
        const MutexLock lock(mutex_);
        pages_.push_back(at);
      }
      v1::DaemonFrame reply;
      reply.set_id(frame.id());
      reply.mutable_hello()->set_protocol(1);
      reply.mutable_hello()->set_network_flag(true);
      peer.Send(reply, {fd.get()});
      return true;
    });
  }
  void OpenJob() {
    Result<std::unique_ptr<Job>> job = Job::Open(daemon_.Options());
    ASSERT_TRUE(job.ok()) << job.status().ToString();
    job_ = *std::move(job);
  }
  // What the newest page says.
  NetworkFlag Said() {
    const MutexLock lock(mutex_);
    return pages_.empty() ? NetworkFlag{}
                          : NetworkFlag::Of(static_cast<NetworkFlagWord*>(pages_.back())->load());
  }
  size_t pages() {
    const MutexLock lock(mutex_);
    return pages_.size();
  }

  FakeDaemon daemon_;
  std::vector<uint8_t> w_;
  State state_;
  Mutex mutex_;
  std::vector<void*> pages_;
  std::unique_ptr<Job> job_;
};

TEST_F(NetworkBusyTest, WindowsAreCounted) {
  GivePages();
  OpenJob();
  ASSERT_EQ(pages(), 1u);
  EXPECT_EQ(Said().open, 0u);
  {
    const NetworkBusy outer(*job_);
    EXPECT_EQ(Said().open, 1u);
    EXPECT_EQ(Said().stretch, 1u);
    {
      const NetworkBusy inner(*job_);
      EXPECT_EQ(Said().open, 2u);
    }
    EXPECT_EQ(Said().open, 1u);
    EXPECT_EQ(Said().stretch, 1u);
  }
  EXPECT_EQ(Said().open, 0u);
  job_->LeaveNetworkBusy();  // one too many
  EXPECT_EQ(Said().open, 0u);
  const NetworkBusy again(*job_);
  EXPECT_EQ(Said().open, 1u);
  EXPECT_EQ(Said().stretch, 2u);
}

// No message goes with a window.
TEST_F(NetworkBusyTest, NothingIsSent) {
  GivePages();
  OpenJob();
  const size_t before = daemon_.Frames("hello").size() + daemon_.Frames("join").size();
  for (int i = 0; i < 1000; ++i) {
    const NetworkBusy busy(*job_);
  }
  ASSERT_TRUE(job_->Save(1, state_).ok());
  EXPECT_EQ(daemon_.Frames("hello").size() + daemon_.Frames("join").size(), before);
  EXPECT_EQ(daemon_.Count("begin_save"), 1);
  EXPECT_EQ(Said().stretch, 1000u);
}

TEST_F(NetworkBusyTest, TheNextDaemonHearsOfIt) {
  GivePages();
  OpenJob();
  const NetworkBusy busy(*job_);
  daemon_.Stop();
  { const NetworkBusy without_a_daemon(*job_); }
  daemon_.Start();
  EXPECT_TRUE(job_->Save(1, state_).ok());
  EXPECT_EQ(pages(), 2u);
  EXPECT_EQ(Said().open, 1u);
}

TEST_F(NetworkBusyTest, ADaemonOfBeforeIsNotTold) {
  OpenJob();
  const NetworkBusy busy(*job_);
  EXPECT_TRUE(job_->Save(1, state_).ok());
  ASSERT_EQ(daemon_.Frames("hello").size(), 1u);
  EXPECT_TRUE(daemon_.Frames("hello")[0].hello().network_flag());
}

// It would be a SIGBUS once its maker cuts it short.
TEST_F(NetworkBusyTest, APageThatIsNotSealedIsNotWritten) {
  GivePages(Sealed::kNo);
  OpenJob();
  const NetworkBusy busy(*job_);
  ASSERT_EQ(pages(), 1u);
  EXPECT_EQ(Said().open, 0u);
  EXPECT_TRUE(job_->Save(1, state_).ok());
}

TEST_F(NetworkBusyTest, AForkedChildSaysNothing) {
  GivePages();
  OpenJob();
  auto in_both = std::make_unique<NetworkBusy>(*job_);
  const pid_t child = ::fork();
  if (child == 0) {
    const NetworkBusy own(*job_);
    in_both.reset();
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT_EQ(Said().open, 1u);
  EXPECT_EQ(Said().stretch, 1u);
  in_both.reset();
  EXPECT_EQ(Said().open, 0u);
}

}  // namespace
}  // namespace holdfast
