// The kernel charges a huge page to the control group of the process that asks for it. A trainer
// asks for none: its group has no room for slots (docs/kubernetes.md).
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <vector>

#include "tests/client-lib/fake_daemon.h"

namespace {

constexpr int kMadvCollapse = 25;
std::atomic<int> asked_for_huge_pages{0};

}  // namespace

// In place of libc's, for this program.
extern "C" int madvise(void* at, size_t bytes, int advice) noexcept {
  asked_for_huge_pages += advice == MADV_HUGEPAGE || advice == kMadvCollapse ? 1 : 0;
  return static_cast<int>(::syscall(SYS_madvise, at, bytes, advice));
}

namespace holdfast {
namespace {

TEST(HugePages, ATrainerMakesNone) {
  FakeDaemon daemon;
  Result<std::unique_ptr<Job>> job = Job::Open(daemon.Options());
  ASSERT_TRUE(job.ok()) << job.status().ToString();
  std::vector<uint8_t> w(8 << 20, 1);
  State state{{{"w", Type::kU8, {w.size()}, w.data()}}, {}};
  const Result<ReserveReport> reserved = (*job)->Reserve(state, Milliseconds(60'000));
  ASSERT_TRUE(reserved.ok()) << reserved.status().ToString();
  EXPECT_EQ(reserved->slots_ready, 3u);
  EXPECT_TRUE((*job)->Save(1, state).ok());
  EXPECT_TRUE((*job)->Restore(state).ok());
  EXPECT_EQ(asked_for_huge_pages, 0);
}

}  // namespace
}  // namespace holdfast
