#include "server/runtime/memory_watch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <filesystem>
#include <fstream>

#include "tests/base/temporary_directory.h"
#include "tiers/memory/slot_files.h"

namespace holdfast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr size_t kQueueMax = 200'000;
constexpr char kTooMany[] = "fs.inotify.max_queued_events is too large to be exceeded here";
constexpr std::chrono::seconds kPatience{30};

// A directory as ckptd has it, with slots 3 and 4. The loop ends when something is told.
class MemoryWatchTest : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const std::string& name : {std::string(kLockName), ImageName(3), ImageName(4)}) {
      std::ofstream(dir_.Path(name)).put('x');
    }
    auto watch = MemoryWatch::Start(*reactor_, dir_.path(),
                                    {.image_gone =
                                         [this](SlotId slot) {
                                           gone_.push_back(slot);
                                           reactor_->Stop();
                                         },
                                     .lost =
                                         [this](const std::string& what) {
                                           lost_.push_back(what);
                                           reactor_->Stop();
                                         },
                                     .slots = [this] { return slots_; }});
    ASSERT_TRUE(watch.ok()) << watch.status();
    watch_ = *std::move(watch);
  }
  // More events than the kernel keeps while nobody reads them: equal ones in a row are one. False:
  // it keeps too many.
  bool Flood() {
    size_t kept = 0;
    std::ifstream("/proc/sys/fs/inotify/max_queued_events") >> kept;
    if (kept == 0 || kept > kQueueMax) {
      return false;
    }
    const std::array<std::string, 2> names = {dir_.Path("a"), dir_.Path("b")};
    for (size_t i = 0; i <= kept; ++i) {
      std::filesystem::create_directory(names[i % 2]);
      std::filesystem::remove(names[i % 2]);
    }
    return true;
  }
  void Remove(const std::string& name) { ASSERT_TRUE(std::filesystem::remove(dir_.Path(name))); }
  void Run() {
    const Reactor::TimerId timer = reactor_->AddTimer([this] { reactor_->Stop(); });
    reactor_->Arm(timer, reactor_->clock().Now() + kPatience);
    reactor_->Run();
  }

  const TemporaryDirectory dir_;
  const std::unique_ptr<Reactor> reactor_ = *Reactor::Create(Clock::System());
  const std::vector<SlotId> slots_ = {3, 4};
  std::vector<SlotId> gone_;
  std::vector<std::string> lost_;
  std::unique_ptr<MemoryWatch> watch_;
};

TEST_F(MemoryWatchTest, AnImageThatSomebodyRemovesIsTold) {
  Remove(ImageName(4));
  Run();
  EXPECT_THAT(gone_, ElementsAre(4));
  EXPECT_THAT(lost_, IsEmpty());
}

TEST_F(MemoryWatchTest, AnImageThatGoesWhileTheKernelLosesEventsIsTold) {
  if (!Flood()) {
    GTEST_SKIP() << kTooMany;
  }
  Remove(ImageName(4));
  Run();
  EXPECT_THAT(gone_, ElementsAre(4));
  EXPECT_THAT(lost_, IsEmpty());
}

TEST_F(MemoryWatchTest, ALockThatGoesWhileTheKernelLosesEventsIsTold) {
  if (!Flood()) {
    GTEST_SKIP() << kTooMany;
  }
  Remove(std::string(kLockName));
  Run();
  EXPECT_THAT(gone_, IsEmpty());
  EXPECT_THAT(lost_, ElementsAre(HasSubstr("the lock in '")));
}

TEST_F(MemoryWatchTest, ADirectoryThatGoesWhileTheKernelLosesEventsIsTold) {
  if (!Flood()) {
    GTEST_SKIP() << kTooMany;
  }
  std::filesystem::rename(dir_.path(), dir_.path() + ".moved");
  Run();
  std::filesystem::rename(dir_.path() + ".moved", dir_.path());
  EXPECT_THAT(gone_, IsEmpty());
  EXPECT_THAT(lost_, ElementsAre(HasSubstr("was removed or moved away")));
}

}  // namespace
}  // namespace holdfast
