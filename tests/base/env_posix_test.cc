// What only the real Env has to face: other processes, special files, pages that cannot be had.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <thread>

#include "base/env.h"
#include "base/populate.h"
#include "base/status.h"
#include "base/unique_fd.h"
#include "tests/base/temporary_directory.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;

// A child that holds a lock until it is told to go.
class LockHolder {
 public:
  explicit LockHolder(const std::string& path) {
    int to_child[2];
    int from_child[2];
    EXPECT_EQ(::pipe2(to_child, O_CLOEXEC), 0);
    EXPECT_EQ(::pipe2(from_child, O_CLOEXEC), 0);
    pid_ = ::fork();
    if (pid_ == 0) {
      ::close(to_child[1]);
      const auto lock = Env::System()->Lock(path);
      char byte = lock.ok() ? 'y' : 'n';
      if (::write(from_child[1], &byte, 1) != 1 || ::read(to_child[0], &byte, 1) < 0) {
        ::_exit(1);
      }
      ::_exit(0);
    }
    ::close(to_child[0]);
    ::close(from_child[1]);
    go_.reset(to_child[1]);
    const UniqueFd ready(from_child[0]);
    char byte = 0;
    EXPECT_EQ(::read(ready.get(), &byte, 1), 1);
    EXPECT_EQ(byte, 'y');
  }
  ~LockHolder() { End(); }
  void End() {
    if (pid_ > 0) {
      go_.reset();
      ::waitpid(std::exchange(pid_, 0), nullptr, 0);
    }
  }
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_ = 0;
  UniqueFd go_;
};

TEST(PosixLockTest, AnotherProcessIsNamedAndItsDeathFreesTheLock) {
  const TemporaryDirectory dir;
  LockHolder holder(dir.Path("lock"));
  const absl::Status status = Env::System()->Lock(dir.Path("lock")).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(Message(status), HasSubstr("held by pid " + std::to_string(holder.pid()) + ";"));
  holder.End();
  EXPECT_TRUE(Env::System()->Lock(dir.Path("lock")).ok());
}

TEST(PosixLockTest, AShorterPidReplacesALongerText) {
  const TemporaryDirectory dir;
  ASSERT_TRUE(WriteFileAtomically(*Env::System(), dir.Path("lock"), "12345678901234567890\n").ok());
  const auto lock = Env::System()->Lock(dir.Path("lock"));
  ASSERT_TRUE(lock.ok());
  EXPECT_EQ(*ReadFile(*Env::System(), dir.Path("lock"), 100), std::to_string(::getpid()) + "\n");
}

TEST(PosixLockTest, GarbageInTheFileNamesNobody) {
  const TemporaryDirectory dir;
  LockHolder holder(dir.Path("lock"));
  const auto file = *Env::System()->Open(dir.Path("lock"), OpenMode::kReadWrite);
  ASSERT_TRUE(file->WriteAt(0, std::as_bytes(std::span<const char>("rm -rf /", 8))).ok());
  EXPECT_THAT(Message(Env::System()->Lock(dir.Path("lock")).status()),
              HasSubstr("held by another process;"));
}

TEST(PosixLockTest, SymbolicLinksAreNotFollowed) {
  const TemporaryDirectory dir;
  ASSERT_EQ(::symlink(dir.Path("elsewhere").c_str(), dir.Path("lock").c_str()), 0);
  EXPECT_FALSE(Env::System()->Lock(dir.Path("lock")).ok());
  EXPECT_EQ(Env::System()->Info(dir.Path("elsewhere")).status().code(),
            absl::StatusCode::kNotFound);
}

TEST(PosixEnvTest, FifosDoNotHang) {
  const TemporaryDirectory dir;
  ASSERT_EQ(::mkfifo(dir.Path("fifo").c_str(), 0600), 0);
  EXPECT_EQ(Env::System()->Open(dir.Path("fifo"), OpenMode::kRead).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST(PosixEnvTest, InfoDoesNotFollowSymbolicLinks) {
  const TemporaryDirectory dir;
  ASSERT_EQ(::symlink("/", dir.Path("link").c_str()), 0);
  EXPECT_TRUE(S_ISLNK(Env::System()->Info(dir.Path("link"))->mode));
}

TEST(PosixEnvTest, CreateDirectoriesGoesThroughSymbolicLinks) {
  const TemporaryDirectory dir;
  ASSERT_TRUE(Env::System()->CreateDirectory(dir.Path("real"), 0700).ok());
  ASSERT_EQ(::symlink(dir.Path("real").c_str(), dir.Path("link").c_str()), 0);
  ASSERT_TRUE(Env::System()->CreateDirectories(dir.Path("link/a/b"), 0700).ok());
  EXPECT_TRUE(Env::System()->Info(dir.Path("real/a/b")).ok());
}

TEST(PosixEnvTest, FilesAndDirectoriesHaveTheirModes) {
  const TemporaryDirectory dir;
  const auto file = *Env::System()->Open(dir.Path("f"), OpenMode::kCreateExclusive);
  EXPECT_EQ(file->Info()->mode & 07777u, 0600u);
  EXPECT_EQ(file->Info()->uid, ::getuid());
  ASSERT_TRUE(Env::System()->CreateDirectory(dir.Path("d"), 0700).ok());
  EXPECT_EQ(Env::System()->Info(dir.Path("d"))->mode & 07777u, 0700u);
}

TEST(PosixEnvTest, DescriptorsAreClosedOnExec) {
  const TemporaryDirectory dir;
  const auto file = *Env::System()->Open(dir.Path("f"), OpenMode::kCreateExclusive);
  EXPECT_NE(::fcntl(file->fd(), F_GETFD) & FD_CLOEXEC, 0);
}

TEST(PosixEnvTest, ReservingMoreThanThereIsIsResourceExhausted) {
  const TemporaryDirectory dir("/dev/shm");
  const auto file = *Env::System()->Open(dir.Path("f"), OpenMode::kCreateExclusive);
  const uint64_t total = Env::System()->Filesystem(dir.path())->bytes_total;
  const absl::Status status = file->Allocate(0, total + (1 << 20));
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_THAT(Message(status), HasSubstr("(ENOSPC)"));
}

// A tmpfs of the test's own, in a mount namespace that ends with the process: needs the right to
// mount, which CI's root has.
class SmallTmpfs : public ::testing::Test {
 protected:
  void SetUp() override {
    if (::unshare(CLONE_NEWNS) != 0 ||
        ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) {
      GTEST_SKIP() << "cannot make a mount namespace here: " << std::strerror(errno);
    }
    if (::mount("tmpfs", dir_.path().c_str(), "tmpfs", 0, "size=1m,huge=within_size") != 0 &&
        ::mount("tmpfs", dir_.path().c_str(), "tmpfs", 0, "size=1m") != 0) {
      GTEST_SKIP() << "cannot mount a tmpfs here: " << std::strerror(errno);
    }
    mounted_ = true;
  }
  void TearDown() override {
    if (mounted_) {
      EXPECT_EQ(::umount2(dir_.path().c_str(), MNT_DETACH), 0);
    }
  }
  TemporaryDirectory dir_;
  bool mounted_ = false;
};

TEST_F(SmallTmpfs, PopulatingMoreThanThereIsIsResourceExhausted) {
  Env& env = *Env::System();
  const auto file = *env.Open(dir_.Path("f"), OpenMode::kCreateExclusive);
  ASSERT_TRUE(file->Truncate(8 << 20).ok());  // a hole, larger than the file system
  const auto mapping = *env.Map(*file, 0, 8 << 20, true);
  const absl::Status status = env.Populate(*mapping, 0, 8 << 20);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_THAT(Message(status), HasSubstr("no room for its pages"));
  EXPECT_THAT(Message(status), HasSubstr("of 1 MiB free"));
}

TEST_F(SmallTmpfs, LockHoldsWhenThereIsNoRoomForThePid) {
  Env& env = *Env::System();
  const auto lock_file = *env.Open(dir_.Path("lock"), OpenMode::kCreateExclusive);
  const auto file = *env.Open(dir_.Path("f"), OpenMode::kCreateExclusive);
  ASSERT_TRUE(file->Allocate(0, 1 << 20).ok());
  const auto lock = env.Lock(dir_.Path("lock"));
  ASSERT_TRUE(lock.ok()) << lock.status();
  EXPECT_EQ(env.Lock(dir_.Path("lock")).status().code(), absl::StatusCode::kUnavailable);
}

TEST_F(SmallTmpfs, FilesystemSaysWhatItIs) {
  const FilesystemInfo info = *Env::System()->Filesystem(dir_.path());
  EXPECT_EQ(info.type, "tmpfs");
  EXPECT_EQ(info.bytes_total, uint64_t{1} << 20);
  const std::string mounts = *ReadKernelFile("/proc/self/mountinfo");
  const size_t at = mounts.find(dir_.path());
  ASSERT_NE(at, std::string::npos);
  const std::string line = mounts.substr(at, mounts.find('\n', at) - at);
  const std::string setting =
      ReadKernelFile("/sys/kernel/mm/transparent_hugepage/shmem_enabled").value_or("");
  const bool forced = setting.find("[force]") != std::string::npos;
  const bool denied = setting.find("[deny]") != std::string::npos;
  EXPECT_EQ(info.huge_pages,
            !denied && (forced || line.find("huge=within_size") != std::string::npos));
}

// The way that kernels without MADV_POPULATE_WRITE take.
class TouchTest : public ::testing::Test {
 protected:
  void Map(size_t bytes) {
    ASSERT_EQ(::ftruncate(fd_.get(), static_cast<off_t>(bytes)), 0);
    void* const data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0);
    ASSERT_NE(data, MAP_FAILED);
    data_ = static_cast<std::byte*>(data);
    bytes_ = bytes;
  }
  void TearDown() override { ::munmap(data_, bytes_); }

  UniqueFd fd_{::memfd_create("populate-test", MFD_CLOEXEC)};
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

TEST_F(TouchTest, AllocatesEveryPageAndKeepsTheBytes) {
  Map(1 << 20);
  data_[5000] = std::byte{7};
  EXPECT_EQ(PopulatePages(data_ + 1, bytes_ - 1, true, PopulateMethod::kTouch), 0);
  struct stat st = {};
  ASSERT_EQ(::fstat(fd_.get(), &st), 0);
  EXPECT_GE(st.st_blocks * 512, 1 << 20);
  EXPECT_EQ(data_[5000], std::byte{7});
  EXPECT_EQ(PopulatePages(data_, bytes_, false, PopulateMethod::kTouch), 0);
  EXPECT_EQ(PopulatePages(data_, 0, true, PopulateMethod::kTouch), 0);
}

TEST_F(TouchTest, BothMethodsFaultTheSameWay) {
  Map(1 << 20);
  ASSERT_EQ(::ftruncate(fd_.get(), 4096), 0);
  EXPECT_EQ(PopulatePages(data_, bytes_, true, PopulateMethod::kBest), EFAULT);
  EXPECT_EQ(PopulatePages(data_, bytes_, true, PopulateMethod::kTouch), EFAULT);
}

// A byte that another thread counts up while we touch its page must not lose a count.
TEST_F(TouchTest, WritersAreNotDisturbed) {
  Map(4096);
  constexpr int kCounts = 10'000'000;
  auto* const counter = reinterpret_cast<uint8_t*>(data_);
  std::atomic<bool> done{false};
  std::thread writer([counter, &done] {
    for (int i = 0; i < kCounts; ++i) {
      __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED);
    }
    done = true;
  });
  while (!done.load()) {
    EXPECT_EQ(PopulatePages(data_, bytes_, true, PopulateMethod::kTouch), 0);
  }
  writer.join();
  EXPECT_EQ(__atomic_load_n(counter, __ATOMIC_RELAXED), kCounts % 256);
}

}  // namespace
}  // namespace holdfast
