#include "server/runtime/passed_memory.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <array>
#include <chrono>
#include <fstream>
#include <functional>
#include <string>
#include <string_view>

#include "base/status.h"
#include "server/runtime/sealed_memory.h"
#include "tests/base/temporary_directory.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kShare = PassedMemory::kBytesPerUserMax;
constexpr uint32_t kAnn = 1001;
constexpr uint32_t kBob = 1002;
constexpr size_t kQueueMax = 200'000;
constexpr std::chrono::seconds kPatience{30};

// (Memory of which nothing was written takes none.)
UniqueFd Memory(uint64_t bytes) {
  absl::StatusOr<UniqueFd> file = SealedMemory("holdfast-test", bytes, {});
  EXPECT_TRUE(file.ok()) << file.status();
  return *std::move(file);
}

UniqueFd Reopened(const UniqueFd& fd, int flags) {
  return UniqueFd(::open(("/proc/self/fd/" + std::to_string(fd.get())).c_str(), flags | O_CLOEXEC));
}

class PassedMemoryTest : public ::testing::Test {
 protected:
  absl::Status Charge(uint32_t uid, const UniqueFd& file) {
    return passed_->Charge(uid, {&file, 1});
  }
  // Charged, and kept by nobody.
  void ChargeAndClose(uint32_t uid, uint64_t bytes) {
    const UniqueFd file = Memory(bytes);
    ASSERT_TRUE(Charge(uid, file).ok());
  }
  // Runs the loop, once a test, until the user may have so much.
  void AwaitRoom(uint32_t uid, uint64_t bytes) {
    const MonotonicTime until = reactor_->clock().Now() + kPatience;
    const UniqueFd file = Memory(bytes);
    absl::Status charged;
    const std::function<void()> look = [&] {
      charged = Charge(uid, file);
      if (charged.ok() || reactor_->clock().Now() > until) {
        reactor_->Stop();
      } else {
        reactor_->Post(look);
      }
    };
    reactor_->Post(look);
    reactor_->Run();
    EXPECT_TRUE(charged.ok()) << charged;
  }

  const std::unique_ptr<Reactor> reactor_ = *Reactor::Create(Clock::System());
  const std::unique_ptr<PassedMemory> passed_ = *PassedMemory::Start(*reactor_);
};

TEST_F(PassedMemoryTest, AUserHasAShareAndOthersHaveTheirs) {
  const UniqueFd most = Memory(kShare - 1);
  const UniqueFd one = Memory(1);
  const UniqueFd more = Memory(1);
  EXPECT_TRUE(Charge(kAnn, most).ok());
  EXPECT_TRUE(Charge(kAnn, one).ok());
  const absl::Status refused = Charge(kAnn, more);
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_THAT(Message(refused), HasSubstr("processes of uid 1001 have "));
  EXPECT_THAT(Message(refused), HasSubstr(" in 2 files"));
  EXPECT_THAT(Message(refused), HasSubstr("lsof -u 1001"));
  EXPECT_TRUE(Charge(kBob, more).ok());
}

TEST_F(PassedMemoryTest, AFileCountsOnceForEachUserWhoWasGivenIt) {
  const UniqueFd file = Memory(kShare);
  const UniqueFd same = Reopened(file, O_RDONLY);
  const UniqueFd more = Memory(1);
  EXPECT_TRUE(Charge(kAnn, file).ok());
  EXPECT_TRUE(Charge(kAnn, same).ok());
  EXPECT_FALSE(Charge(kAnn, more).ok());
  EXPECT_TRUE(Charge(kBob, same).ok());
  EXPECT_FALSE(Charge(kBob, more).ok());
}

TEST_F(PassedMemoryTest, WhatIsNoSealedMemoryDoesNotCount) {
  const TemporaryDirectory on_tmpfs("/dev/shm");
  const UniqueFd slot(::open(on_tmpfs.Path("slot").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  ASSERT_EQ(::ftruncate(slot.get(), static_cast<off_t>(2 * kShare)), 0);
  EXPECT_TRUE(Charge(kAnn, slot).ok());
  const UniqueFd all = Memory(kShare);
  EXPECT_TRUE(Charge(kAnn, all).ok());
}

TEST_F(PassedMemoryTest, SoManyFilesAndNoMore) {
  // (Each is kept by a mapping: descriptors may be fewer.)
  std::vector<void*> kept;
  for (uint32_t i = 0; i < PassedMemory::kFilesPerUserMax; ++i) {
    const UniqueFd file = Memory(1);
    const absl::Status charged = Charge(kAnn, file);
    ASSERT_TRUE(charged.ok()) << charged;
    kept.push_back(::mmap(nullptr, 1, PROT_READ, MAP_SHARED, file.get(), 0));
    ASSERT_NE(kept.back(), MAP_FAILED);
  }
  const UniqueFd more = Memory(1);
  EXPECT_THAT(Message(Charge(kAnn, more)), HasSubstr(" in 4096 files"));
  for (void* const at : kept) {
    ::munmap(at, 1);
  }
  AwaitRoom(kAnn, 1);
}

TEST_F(PassedMemoryTest, WhatNobodyHasAnyMoreCountsNoMore) {
  ChargeAndClose(kAnn, kShare);
  AwaitRoom(kAnn, kShare);
}

TEST_F(PassedMemoryTest, ItCountsAsLongAsAnybodyHasItInWhateverWay) {
  const auto open_by = [](const UniqueFd& file) { return Reopened(file, O_RDONLY); };
  const auto named_by = [](const UniqueFd& file) { return Reopened(file, O_PATH); };
  constexpr uint32_t kMapsIt = 2001;
  constexpr uint32_t kHasItOpen = 2002;
  constexpr uint32_t kHasItByPath = 2003;  // which a lease does not see
  UniqueFd mapped = Memory(kShare);
  UniqueFd opened = Memory(kShare);
  UniqueFd named = Memory(kShare);
  ASSERT_TRUE(Charge(kMapsIt, mapped).ok());
  ASSERT_TRUE(Charge(kHasItOpen, opened).ok());
  ASSERT_TRUE(Charge(kHasItByPath, named).ok());
  void* const at = ::mmap(nullptr, 4096, PROT_READ, MAP_SHARED, mapped.get(), 0);
  ASSERT_NE(at, MAP_FAILED);
  const UniqueFd open_still = open_by(opened);
  const UniqueFd named_still = named_by(named);
  ASSERT_TRUE(open_still.valid());
  ASSERT_TRUE(named_still.valid());
  mapped.reset();
  opened.reset();
  named.reset();
  ChargeAndClose(kAnn, kShare);  // later: when this is heard of, so is what came before
  AwaitRoom(kAnn, kShare);
  const UniqueFd more = Memory(1);
  EXPECT_FALSE(Charge(kMapsIt, more).ok());
  EXPECT_FALSE(Charge(kHasItOpen, more).ok());
  EXPECT_FALSE(Charge(kHasItByPath, more).ok());
  ::munmap(at, 4096);
}

TEST_F(PassedMemoryTest, WhatGoesWhileTheKernelLosesEventsCountsNoMore) {
  size_t kept = 0;  // by the kernel, while nobody reads them; there are two for each file
  std::ifstream("/proc/sys/fs/inotify/max_queued_events") >> kept;
  if (kept == 0 || kept > kQueueMax) {
    GTEST_SKIP() << "fs.inotify.max_queued_events is too large to be exceeded here";
  }
  const UniqueFd bobs = Memory(kShare);
  ASSERT_TRUE(Charge(kBob, bobs).ok());
  for (size_t i = 0; i <= kept / 2; ++i) {
    ChargeAndClose(static_cast<uint32_t>(10'000 + i / 1000), 1);
  }
  ChargeAndClose(kAnn, kShare);
  AwaitRoom(kAnn, kShare);
  const UniqueFd more = Memory(1);
  EXPECT_FALSE(Charge(kBob, more).ok()) << "what is kept was forgotten";
}

TEST_F(PassedMemoryTest, SealedContentIsChargedByItsSize) {
  absl::StatusOr<UniqueFd> record =
      SealedMemory("holdfast-record", 6, std::array<std::string_view, 2>{"abc", "def"});
  ASSERT_TRUE(record.ok());
  EXPECT_EQ(SealedBytes(record->get()), 6u);
  const UniqueFd other(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  EXPECT_EQ(SealedBytes(other.get()), 0u);
}

}  // namespace
}  // namespace holdfast
