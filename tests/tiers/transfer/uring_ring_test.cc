// That the ring is the one that was asked for, as the kernel itself shows it. Where this machine's
// kernel would not give such a ring, or register memory, to anybody, the test says so and is
// skipped.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <liburing.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <thread>

#include "base/units.h"
#include "tests/base/temporary_directory.h"
#include "tests/tiers/transfer/transfer_harness.h"
#include "tiers/transfer/file_pieces.h"

namespace {

// How many of the queue the kernel takes at a time, as one that is short of memory does; 0: all.
std::atomic<unsigned> taken_at_most{0};

}  // namespace

// In place of liburing's, for this program.
extern "C" int io_uring_submit(io_uring* ring) {
  io_uring_sq& queue = ring->sq;
  if (queue.sqe_head != queue.sqe_tail) {
    queue.sqe_head = queue.sqe_tail;
    io_uring_smp_store_release(queue.ktail, queue.sqe_tail);
  }
  unsigned count = queue.sqe_tail - *queue.khead;
  if (taken_at_most != 0) {
    count = std::min(count, taken_at_most.load());
  }
  const long taken = ::syscall(SYS_io_uring_enter, ring->ring_fd, count, 0, 0, nullptr, 0);
  return taken < 0 ? -errno : static_cast<int>(taken);
}

namespace holdfast {
namespace {

using ::testing::HasSubstr;

// linux/io_uring.h; older headers lack some of them.
constexpr unsigned kSqPoll = 1U << 1;
constexpr unsigned kTaskrunFlag = 1U << 9;
constexpr unsigned kSingleIssuer = 1U << 12;
constexpr unsigned kDeferTaskrun = 1U << 13;

// Whether the kernel makes such a ring, and registers this memory with it, when asked directly.
struct KernelSays {
  bool ring = false;
  bool memory = false;
};
KernelSays AskTheKernel(std::byte* memory, size_t bytes) {
  KernelSays says;
  io_uring ring = {};
  if (::io_uring_queue_init(4, &ring, kSingleIssuer | kDeferTaskrun | kTaskrunFlag) != 0) {
    return says;
  }
  says.ring = true;
  const iovec buffer = {memory, bytes};
  says.memory = ::io_uring_register_buffers(&ring, &buffer, 1) == 0;
  ::io_uring_queue_exit(&ring);
  return says;
}

// What /proc tells of this process's only ring.
std::string RingInfo() {
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code error;
    const std::string target = std::filesystem::read_symlink(entry.path(), error);
    if (!error && target == "anon_inode:[io_uring]") {
      return ReadKernelFile("/proc/self/fdinfo/" + entry.path().filename().string()).value_or("");
    }
  }
  return "";
}

// Its descriptor is exchanged for one that is good for nothing.
class SwitchedFile : public ForwardingFile {
 public:
  SwitchedFile(std::unique_ptr<File> file, std::unique_ptr<File> useless)
      : ForwardingFile(std::move(file)), useless_(std::move(useless)) {}
  int fd() const override { return switched_ ? useless_->fd() : ForwardingFile::fd(); }
  void Switch() { switched_ = true; }

 private:
  std::unique_ptr<File> useless_;
  bool switched_ = false;
};

class UringRingTest : public ::testing::Test {
 protected:
  void SetUp() override {
    kernel_ = AskTheKernel(slot_.data(), 4 * kMiB);
    if (!kernel_.ring) {
      GTEST_SKIP() << "this kernel gives no ring of a single issuer with deferred task work";
    }
    io_ = ValueOf(CreateBlockIo({.depth = 4, .refuse_setup = [this](unsigned flags) {
                                   asked_.push_back(flags);
                                   return 0;
                                 }}));
  }

  TemporaryDirectory dir_;
  TestSlot slot_{4 * kMiB, std::string(4 * kMiB, 'x')};
  KernelSays kernel_;
  std::vector<unsigned> asked_;
  std::unique_ptr<BlockIo> io_;
};

TEST_F(UringRingTest, IsOfASingleIssuerWithDeferredTaskWorkAndNoPollingThread) {
  ASSERT_EQ(asked_.size(), 1u) << "the first choice was given";
  EXPECT_EQ(asked_[0] & (kSingleIssuer | kDeferTaskrun), kSingleIssuer | kDeferTaskrun);
  EXPECT_EQ(asked_[0] & kSqPoll, 0u);
  EXPECT_EQ(io_->name(), "io_uring");
  EXPECT_EQ(io_->description(), "io_uring (single issuer, deferred task work)");
  const std::string info = RingInfo();
  if (!info.empty()) {  // the kernel's build may leave it out
    EXPECT_THAT(info, HasSubstr("SqThread:\t-1\n"));
  }
  // A single issuer's ring refuses every other thread.
  const auto file = ValueOf(Env::System()->Open(dir_.Path("file"), OpenMode::kCreateExclusive));
  const BlockRequest request{BlockOp::kWrite, file.get(), 0, slot_.data(), 4096, 1};
  ASSERT_TRUE(io_->Submit(request).ok());
  EXPECT_TRUE(io_->Wait().status.ok());
  std::thread([&] {
    const absl::Status refused = io_->Submit(request);
    EXPECT_THAT(Message(refused), HasSubstr("EEXIST"));
  }).join();
}

// Each leaves an entry in the queue, which has four places: they go with what is submitted next.
TEST_F(UringRingTest, RequestsThatTheKernelRefusedTakeNoPlaceInTheQueue) {
  const auto file = ValueOf(Env::System()->Open(dir_.Path("file"), OpenMode::kCreateExclusive));
  const BlockRequest request{BlockOp::kWrite, file.get(), 0, slot_.data(), 4096, 1};
  std::thread([&] {
    for (int i = 0; i < 9; ++i) {
      EXPECT_THAT(Message(io_->Submit(request)), HasSubstr("EEXIST")) << i;
    }
  }).join();
  for (uint64_t i = 0; i < 9; ++i) {
    const BlockRequest next{BlockOp::kWrite, file.get(), i * 4096, slot_.data(), 4096, i};
    const absl::Status submitted = io_->Submit(next);
    ASSERT_TRUE(submitted.ok()) << i << ": " << ToString(submitted);
    const BlockCompletion done = io_->Wait();
    EXPECT_TRUE(done.status.ok()) << ToString(done.status);
    EXPECT_EQ(done.tag, i);
  }
  EXPECT_TRUE(ContentOf(dir_.Path("file")) == std::string(9 * 4096, 'x'));
}

// The rest of the queue would be waited for for ever.
TEST_F(UringRingTest, WhatTheKernelDoesNotTakeAtOnceIsSubmittedAgain) {
  const auto file = ValueOf(Env::System()->Open(dir_.Path("file"), OpenMode::kCreateExclusive));
  const BlockRequest request{BlockOp::kWrite, file.get(), 0, slot_.data(), 4096, 1};
  std::thread([&] {
    EXPECT_THAT(Message(io_->Submit(request)), HasSubstr("EEXIST"));  // it stays in the queue
  }).join();
  taken_at_most = 1;
  const absl::Status submitted = io_->Submit(request);
  taken_at_most = 0;
  ASSERT_TRUE(submitted.ok()) << ToString(submitted);
  BlockCompletion done = {};
  bool came = false;
  for (const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(10);
       !came && std::chrono::steady_clock::now() < until;) {
    if (const auto polled = io_->Poll()) {
      done = *polled;
      came = true;
    }
  }
  EXPECT_TRUE(came) << "it was left in the queue";
  EXPECT_EQ(done.tag, 1u);
  EXPECT_TRUE(done.status.ok()) << ToString(done.status);
  if (!came) {  // goes with the next one, else the end would wait for it
    EXPECT_TRUE(io_->Submit({BlockOp::kWrite, file.get(), 4096, slot_.data(), 4096, 2}).ok());
  }
}

// The kernel works on the memory that it pinned and the file that it holds, whatever became of the
// mapping's access and the descriptor since: so it looks neither up with each request.
TEST_F(UringRingTest, MovesPiecesByWhatIsRegistered) {
  if (!kernel_.memory) {
    GTEST_SKIP() << "this kernel registers no memory for this process";
  }
  auto created = ValueOf(Env::System()->Open(dir_.Path("file"), OpenMode::kCreateExclusive));
  SwitchedFile file(std::move(created),
                    ValueOf(Env::System()->Open(dir_.Path("file"), OpenMode::kRead)));
  ASSERT_TRUE(io_->RegisterFile(file));
  ASSERT_TRUE(io_->RegisterMemory(slot_.data(), 4 * kMiB));
  file.Switch();
  ASSERT_EQ(::mprotect(slot_.data(), 4 * kMiB, PROT_NONE), 0);
  for (uint64_t i = 0; i < 4; ++i) {
    ASSERT_TRUE(
        io_->Submit({BlockOp::kWrite, &file, i * kMiB, slot_.data() + i * kMiB, kMiB, i}).ok());
  }
  while (io_->in_flight() > 0) {
    const BlockCompletion done = io_->Wait();
    EXPECT_TRUE(done.status.ok()) << ToString(done.status);
  }
  ASSERT_EQ(::mprotect(slot_.data(), 4 * kMiB, PROT_READ | PROT_WRITE), 0);
  EXPECT_TRUE(ContentOf(dir_.Path("file")) == std::string(4 * kMiB, 'x'));
  io_->UnregisterMemory(slot_.data());
  io_->UnregisterFile(file);
  // From here on it goes by the descriptor again, which cannot be written to.
  ASSERT_TRUE(io_->Submit({BlockOp::kWrite, &file, 0, slot_.data(), 4096, 9}).ok());
  EXPECT_THAT(Message(io_->Wait().status), HasSubstr("EBADF"));
}

}  // namespace
}  // namespace holdfast
