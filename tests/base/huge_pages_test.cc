// Huge pages: what the kernel is asked for, when it is not asked, and that no byte changes.
#include "base/huge_pages.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/env.h"
#include "base/unique_fd.h"
#include "tests/base/temporary_directory.h"

namespace {

constexpr int kMadvCollapse = 25;

// Answers in the kernel's place when huge pages are asked for, with an errno or 0.
std::function<int(size_t bytes)>* on_collapse = nullptr;

}  // namespace

// In place of libc's, for this program.
extern "C" int madvise(void* at, size_t bytes, int advice) noexcept {
  if (advice == kMadvCollapse && on_collapse != nullptr) {
    const int error = (*on_collapse)(bytes);
    errno = error;
    return error == 0 ? 0 : -1;
  }
  return static_cast<int>(::syscall(SYS_madvise, at, bytes, advice));
}

namespace holdfast {
namespace {

constexpr size_t kMiBytes = size_t{1} << 20;

TEST(ReserveAligned, BeginsWhereAHugePageCan) {
  for (const size_t bytes : {size_t{1}, size_t{5000}, kHugePageBytes, 2 * kHugePageBytes}) {
    std::byte* const at = ReserveAligned(bytes);
    ASSERT_NE(at, nullptr);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(at) % kHugePageBytes, 0u) << bytes;
    void* const mapped =
        ::mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    ASSERT_EQ(mapped, at);
    at[bytes - 1] = std::byte{1};
    EXPECT_EQ(::munmap(at, bytes), 0);
  }
  for (const size_t bytes : {SIZE_MAX, SIZE_MAX / 2}) {
    EXPECT_EQ(ReserveAligned(bytes), nullptr);
    EXPECT_EQ(errno, ENOMEM);
  }
}

class HugePagesTest : public testing::Test {
 protected:
  static constexpr size_t kBytes = 40 * kMiBytes;

  HugePagesTest() {
    EXPECT_EQ(::ftruncate(fd_.get(), kBytes), 0);
    EXPECT_NE(data_, nullptr);
    EXPECT_EQ(::mmap(data_, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd_.get(), 0),
              data_);
  }
  ~HugePagesTest() override {
    on_collapse = nullptr;
    ::munmap(data_, kBytes);
  }
  // From now on the kernel answers this, and what it was asked for is noted.
  void Answer(int error, Duration takes = Duration(0)) {
    answer_ = [this, error, takes](size_t bytes) {
      asked_.push_back(bytes);
      clock_.Advance(takes);
      return error;
    };
    on_collapse = &answer_;
  }
  size_t AskedBytes() const {
    size_t sum = 0;
    for (const size_t bytes : asked_) {
      sum += bytes;
    }
    return sum;
  }

  UniqueFd fd_{::memfd_create("huge-pages-test", MFD_CLOEXEC)};
  std::byte* const data_ = ReserveAligned(kBytes);
  ManualClock clock_;
  HugePages huge_pages_{clock_};
  std::function<int(size_t)> answer_;
  std::vector<size_t> asked_;
};

TEST_F(HugePagesTest, ChangeNoByte) {
  std::string bytes(6 * kMiBytes, '\0');
  for (size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<char>(i * 2654435761 >> 13);
  }
  ASSERT_EQ(::pwrite(fd_.get(), bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
  huge_pages_.Use(data_, bytes.size());
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(data_), bytes.size()), bytes);
  data_[3 * kMiBytes] = std::byte{'!'};
  char byte = 0;
  EXPECT_EQ(::pread(fd_.get(), &byte, 1, 3 * kMiBytes), 1);
  EXPECT_EQ(byte, '!');
  ASSERT_EQ(::ftruncate(fd_.get(), 4096), 0);
  huge_pages_.Use(data_, bytes.size());  // cut short: no crash
}

TEST_F(HugePagesTest, AreAskedForOverAllWholeOnes) {
  Answer(0);
  huge_pages_.Use(data_, kBytes - 1);
  EXPECT_EQ(AskedBytes(), kBytes - kHugePageBytes);
  asked_.clear();
  huge_pages_.Use(data_ + 4096, kHugePageBytes);
  huge_pages_.Use(data_, kHugePageBytes - 1);
  EXPECT_EQ(AskedBytes(), 0u);
}

// EBUSY: the control group is at its limit.
TEST_F(HugePagesTest, WhereThereAreNoneNobodyAsksForAMinute) {
  for (const int error : {EBUSY, ENOMEM, EINVAL}) {
    asked_.clear();
    Answer(error);
    huge_pages_.Use(data_, kBytes);
    EXPECT_EQ(asked_.size(), 1u) << error;
    huge_pages_.Use(data_, kBytes);
    EXPECT_EQ(asked_.size(), 1u) << error;
    clock_.Advance(std::chrono::seconds(61));
    Answer(0);
    huge_pages_.Use(data_, kBytes);
    EXPECT_EQ(AskedBytes() - asked_[0], kBytes) << error;
  }
}

TEST_F(HugePagesTest, SlowOnesAreGivenUp) {
  Answer(0, std::chrono::seconds(1));
  huge_pages_.Use(data_, kBytes);
  huge_pages_.Use(data_, kBytes);
  EXPECT_EQ(asked_.size(), 1u);
}

TEST_F(HugePagesTest, PagesThatAreInUseArePassedOver) {
  Answer(EAGAIN);
  huge_pages_.Use(data_, kBytes);
  EXPECT_EQ(AskedBytes(), kBytes);
}

// The daemon populates its slots so.
TEST_F(HugePagesTest, ThePopulatedPagesOfAWritableMappingAreSuch) {
  Answer(0);
  Env& env = *Env::System();
  const TemporaryDirectory dir;
  const auto file = env.Open(dir.Path("slot"), OpenMode::kCreateExclusive).value();
  ASSERT_TRUE(file->Allocate(0, 2 * kHugePageBytes).ok());
  const auto readable = env.Map(*file, 0, 2 * kHugePageBytes, false).value();
  EXPECT_TRUE(env.Populate(*readable, 0, 2 * kHugePageBytes).ok());
  EXPECT_EQ(AskedBytes(), 0u);
  const auto writable = env.Map(*file, kHugePageBytes, kHugePageBytes, true).value();
  EXPECT_TRUE(env.Populate(*writable, 0, kHugePageBytes).ok());
  EXPECT_EQ(AskedBytes(), kHugePageBytes);
}

}  // namespace
}  // namespace holdfast
