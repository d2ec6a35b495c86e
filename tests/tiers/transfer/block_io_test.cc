#include "tiers/transfer/block_io.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <map>
#include <thread>

#include "base/fault_env.h"
#include "base/unique_fd.h"
#include "base/units.h"
#include "tests/base/temporary_directory.h"
#include "tests/tiers/transfer/transfer_harness.h"
#include "tiers/transfer/file_pieces.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;

class BlockIoTest : public ::testing::TestWithParam<BlockIoMode> {
 protected:
  void SetUp() override {
    auto io = CreateBlockIo({.mode = GetParam(), .depth = 4});
    if (absl::IsPermissionDenied(io.status())) {
      GTEST_SKIP() << "io_uring is not allowed here";
    }
    ASSERT_TRUE(io.ok()) << ToString(io.status());
    io_ = *std::move(io);
    file_ = ValueOf(Env::System()->Open(dir_.Path("file"), OpenMode::kCreateExclusive));
  }

  TemporaryDirectory dir_;
  std::unique_ptr<BlockIo> io_;
  std::unique_ptr<File> file_;
};

INSTANTIATE_TEST_SUITE_P(Modes, BlockIoTest,
                         ::testing::Values(BlockIoMode::kIoUring, BlockIoMode::kThreads),
                         [](const auto& param) {
                           return param.param == BlockIoMode::kIoUring ? "ring" : "threads";
                         });

void Fill(AlignedBuffer& buffer, int value) {
  std::memset(buffer.data(), value, buffer.bytes());
}

TEST_P(BlockIoTest, EveryCompletionBelongsToItsRequest) {
  constexpr size_t kPiece = 64 * kKiB;
  constexpr uint64_t kPieces = 100;
  std::vector<AlignedBuffer> buffers;
  for (uint64_t i = 0; i < kPieces; ++i) {
    buffers.emplace_back(kPiece);
    Fill(buffers.back(), static_cast<int>(i + 1));
  }
  for (const BlockOp op : {BlockOp::kWrite, BlockOp::kRead}) {
    std::map<uint64_t, int> seen;
    uint64_t next = 0;
    while (seen.size() < kPieces) {
      while (next < kPieces && io_->in_flight() < io_->depth()) {
        ASSERT_TRUE(io_->Submit({op, file_.get(), next * kPiece, buffers[next].data(), kPiece,
                                 next * 1'000'000'007})
                        .ok());
        ++next;
      }
      const BlockCompletion done = io_->Wait();
      EXPECT_TRUE(done.status.ok()) << ToString(done.status);
      ++seen[done.tag];
    }
    for (uint64_t i = 0; i < kPieces; ++i) {
      EXPECT_EQ(seen[i * 1'000'000'007], 1);
      EXPECT_EQ(buffers[i].data()[kPiece - 1], static_cast<std::byte>(i + 1));
      if (op == BlockOp::kWrite) {
        Fill(buffers[i], 0);
      }
    }
  }
  EXPECT_EQ(io_->in_flight(), 0u);
  EXPECT_FALSE(io_->Poll().has_value());
}

TEST_P(BlockIoTest, NoMoreThanItsDepth) {
  AlignedBuffer buffer(4096);
  Fill(buffer, 1);
  for (size_t i = 0; i < io_->depth(); ++i) {
    EXPECT_TRUE(io_->Submit({BlockOp::kWrite, file_.get(), 0, buffer.data(), 4096, i}).ok());
  }
  EXPECT_TRUE(absl::IsResourceExhausted(
      io_->Submit({BlockOp::kWrite, file_.get(), 0, buffer.data(), 4096, 9})));
  EXPECT_EQ(io_->in_flight(), io_->depth());
  io_->Drain();
  EXPECT_EQ(io_->in_flight(), 0u);
}

TEST_P(BlockIoTest, WhatCannotBeMeantIsRefused) {
  AlignedBuffer buffer(4096);
  EXPECT_FALSE(io_->Submit({BlockOp::kWrite, nullptr, 0, buffer.data(), 1}).ok());
  EXPECT_FALSE(io_->Submit({BlockOp::kWrite, file_.get(), 0, nullptr, 1}).ok());
  EXPECT_FALSE(io_->Submit({BlockOp::kWrite, file_.get(), 0, buffer.data(), 0}).ok());
  EXPECT_FALSE(io_->Submit({BlockOp::kWrite, file_.get(), 0, buffer.data(), 8, 0, 4}).ok());
  EXPECT_FALSE(io_->Submit({BlockOp::kRead, file_.get(), ~uint64_t{0} - 3, buffer.data(), 8}).ok());
  EXPECT_EQ(io_->in_flight(), 0u);
}

TEST_P(BlockIoTest, FileThatEndsTooSoon) {
  AlignedBuffer buffer(8192);
  Fill(buffer, 7);
  ASSERT_TRUE(file_->WriteAt(0, {buffer.data(), 5000}).ok());
  Fill(buffer, 0);
  ASSERT_TRUE(io_->Submit({BlockOp::kRead, file_.get(), 0, buffer.data(), 8192, 1}).ok());
  EXPECT_TRUE(absl::IsOutOfRange(io_->Wait().status));
  ASSERT_TRUE(io_->Submit({BlockOp::kRead, file_.get(), 0, buffer.data(), 8192, 2, 5001}).ok());
  EXPECT_TRUE(absl::IsOutOfRange(io_->Wait().status));
  ASSERT_TRUE(io_->Submit({BlockOp::kRead, file_.get(), 0, buffer.data(), 8192, 3, 5000}).ok());
  const BlockCompletion done = io_->Wait();
  EXPECT_TRUE(done.status.ok()) << ToString(done.status);
  EXPECT_EQ(buffer.data()[4999], std::byte{7});
}

TEST_P(BlockIoTest, ErrorsNameWhatFailed) {
  const auto read_only = ValueOf(Env::System()->Open(dir_.Path("file"), OpenMode::kRead));
  AlignedBuffer buffer(4096);
  Fill(buffer, 1);
  ASSERT_TRUE(io_->Submit({BlockOp::kWrite, read_only.get(), 0, buffer.data(), 4096, 5}).ok());
  const BlockCompletion done = io_->Wait();
  EXPECT_EQ(done.tag, 5u);
  EXPECT_FALSE(done.status.ok());
  EXPECT_THAT(Message(done.status), HasSubstr("write '" + dir_.Path("file") + "'"));
  EXPECT_THAT(Message(done.status), HasSubstr("EBADF"));
}

// A pipe takes 64 KiB at a time and gives what is in it: transfers are short again and again.
class PipeFile : public ForwardingFile {
 public:
  PipeFile(std::unique_ptr<File> file, int fd) : ForwardingFile(std::move(file)), fd_(fd) {}
  int fd() const override { return fd_; }

 private:
  const int fd_;
};

TEST_P(BlockIoTest, ShortTransfersAreContinued) {
  if (GetParam() == BlockIoMode::kThreads) {
    GTEST_SKIP() << "File::WriteAt and ReadAt do that themselves";
  }
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  const UniqueFd out(ends[0]);
  UniqueFd in(ends[1]);
  PipeFile pipe(std::move(file_), in.get());
  AlignedBuffer sent(3 * kMiB);
  for (size_t i = 0; i < sent.bytes(); ++i) {
    sent.data()[i] = static_cast<std::byte>(i * 7 + i / 4096);
  }
  std::string received;
  std::thread reader([&] {
    char part[5000];
    ssize_t got = 0;
    while ((got = ::read(out.get(), part, sizeof part)) > 0) {
      received.append(part, static_cast<size_t>(got));
    }
  });
  ASSERT_EQ(::fcntl(in.get(), F_SETFL, O_NONBLOCK), 0);
  ASSERT_TRUE(io_->Submit({BlockOp::kWrite, &pipe, 0, sent.data(), sent.bytes(), 1}).ok());
  const BlockCompletion done = io_->Wait();
  EXPECT_TRUE(done.status.ok()) << ToString(done.status);
  in.reset();
  reader.join();
  EXPECT_TRUE(received ==
              std::string_view(reinterpret_cast<const char*>(sent.data()), sent.bytes()));
}

TEST_P(BlockIoTest, ShortReadsAreContinued) {
  if (GetParam() == BlockIoMode::kThreads) {
    GTEST_SKIP() << "File::WriteAt and ReadAt do that themselves";
  }
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  const UniqueFd out(ends[0]);
  UniqueFd in(ends[1]);
  PipeFile pipe(std::move(file_), out.get());
  std::string sent(kMiB + 17, '\0');
  for (size_t i = 0; i < sent.size(); ++i) {
    sent[i] = static_cast<char>(i * 13 + i / 4096);
  }
  std::thread writer([&] {
    for (size_t at = 0; at < sent.size();) {
      const ssize_t put =
          ::write(in.get(), sent.data() + at, std::min<size_t>(3000, sent.size() - at));
      ASSERT_GT(put, 0);
      at += static_cast<size_t>(put);
    }
  });
  AlignedBuffer received(sent.size());
  ASSERT_TRUE(io_->Submit({BlockOp::kRead, &pipe, 0, received.data(), sent.size(), 1}).ok());
  const BlockCompletion done = io_->Wait();
  EXPECT_TRUE(done.status.ok()) << ToString(done.status);
  writer.join();
  EXPECT_EQ(std::memcmp(received.data(), sent.data(), sent.size()), 0);
}

TEST_P(BlockIoTest, WriteThatStopsHalfwayIsAnError) {
  // A limit on the size of files: the write goes up to it, its rest fails.
  rlimit before = {};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  struct sigaction ignore = {};
  struct sigaction old = {};
  ignore.sa_handler = SIG_IGN;
  ::sigaction(SIGXFSZ, &ignore, &old);
  rlimit limit = before;
  limit.rlim_cur = kMiB + 512 * kKiB;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  AlignedBuffer buffer(2 * kMiB);
  Fill(buffer, 3);
  ASSERT_TRUE(io_->Submit({BlockOp::kWrite, file_.get(), 0, buffer.data(), 2 * kMiB, 1}).ok());
  const BlockCompletion done = io_->Wait();
  ::setrlimit(RLIMIT_FSIZE, &before);
  ::sigaction(SIGXFSZ, &old, nullptr);
  EXPECT_FALSE(done.status.ok());
  EXPECT_THAT(Message(done.status), HasSubstr("EFBIG"));
  EXPECT_EQ(ValueOf(file_->Info()).bytes, limit.rlim_cur);
}

TEST_P(BlockIoTest, DestroyedWithRequestsUnderWay) {
  constexpr size_t kPiece = 4 * kMiB;
  TestSlot slot(4 * kPiece);
  std::memset(slot.data(), 5, 4 * kPiece);
  for (uint64_t i = 0; i < 4; ++i) {
    ASSERT_TRUE(
        io_->Submit({BlockOp::kWrite, file_.get(), i * kPiece, slot.data() + i * kPiece, kPiece, i})
            .ok());
  }
  io_.reset();  // waits: what comes now does not reach the file
  std::memset(slot.data(), 6, 4 * kPiece);
  const std::string content = ContentOf(dir_.Path("file"));
  EXPECT_EQ(content.size(), 4 * kPiece);
  EXPECT_EQ(content.find_first_not_of('\5'), std::string::npos);
}

TEST_P(BlockIoTest, RegisteredFilesAndMemoryGiveTheSame) {
  TestSlot slot(4 * kMiB);
  for (size_t i = 0; i < 4 * kMiB; ++i) {
    slot.data()[i] = static_cast<std::byte>(i * 31 + i / kMiB);
  }
  const std::string expected(slot.text(4 * kMiB));
  const bool file = io_->RegisterFile(*file_);
  // Whether it must be true, uring_ring_test asks the kernel.
  const bool memory = io_->RegisterMemory(slot.data(), 4 * kMiB);
  if (GetParam() == BlockIoMode::kThreads) {
    EXPECT_FALSE(file);
    EXPECT_FALSE(memory);
  } else {
    EXPECT_TRUE(file);
    EXPECT_FALSE(io_->RegisterFile(*file_));                      // it is already
    EXPECT_FALSE(io_->RegisterMemory(slot.data() + kMiB, kMiB));  // as is this part
  }
  for (const BlockOp op : {BlockOp::kWrite, BlockOp::kRead}) {
    for (uint64_t i = 0; i < 4; ++i) {
      ASSERT_TRUE(io_->Submit({op, file_.get(), i * kMiB, slot.data() + i * kMiB, kMiB, i}).ok());
    }
    while (io_->in_flight() > 0) {
      const BlockCompletion done = io_->Wait();
      EXPECT_TRUE(done.status.ok()) << ToString(done.status);
    }
    if (op == BlockOp::kWrite) {
      EXPECT_TRUE(ContentOf(dir_.Path("file")) == expected);
      std::memset(slot.data(), 0, 4 * kMiB);
    }
  }
  EXPECT_TRUE(slot.text(4 * kMiB) == expected);
  io_->UnregisterMemory(slot.data());
  io_->UnregisterFile(*file_);
  if (GetParam() == BlockIoMode::kIoUring) {
    EXPECT_TRUE(io_->RegisterFile(*file_));  // there is room again, many times over
    for (int i = 0; i < 1000; ++i) {
      EXPECT_EQ(io_->RegisterMemory(slot.data(), 4 * kMiB), memory);
      io_->UnregisterMemory(slot.data());
    }
  }
}

TEST_P(BlockIoTest, PriorityIsForItsOwnThreads) {
  const int before = ::getpriority(PRIO_PROCESS, 0);
  EXPECT_TRUE(io_->SetPriority({.io = 7, .nice = 19}).ok());
  EXPECT_FALSE(io_->SetPriority({.io = 9}).ok());
  EXPECT_EQ(::getpriority(PRIO_PROCESS, 0), before);
  size_t nice = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    const auto id = static_cast<id_t>(std::stoul(task.path().filename()));
    nice += ::getpriority(PRIO_PROCESS, id) == 19 ? 1 : 0;
  }
  EXPECT_EQ(nice, GetParam() == BlockIoMode::kThreads ? io_->depth() : 0);
}

TEST_P(BlockIoTest, NothingLeaks) {
  const auto threads = CountThreads();
  const auto descriptors = CountDescriptors();
  // The kernel keeps a worker for a thread that had a ring, as long as that thread lives.
  std::thread([&] {
    for (int i = 0; i < 50; ++i) {
      auto io = ValueOf(CreateBlockIo({.mode = GetParam(), .depth = 8}));
      AlignedBuffer buffer(kMiB);
      Fill(buffer, i);
      ASSERT_TRUE(io->Submit({BlockOp::kWrite, file_.get(), 0, buffer.data(), kMiB, 1}).ok());
      io.reset();
    }
  }).join();
  EXPECT_TRUE(Eventually([&] { return CountThreads() <= threads; }));
  EXPECT_TRUE(Eventually([&] { return CountDescriptors() <= descriptors; }));
}

TEST(CreateBlockIoTest, FallsBackStepByStep) {
  std::vector<unsigned> asked;
  // A kernel that knows no flags.
  auto io = CreateBlockIo({.refuse_setup = [&](unsigned flags) {
    asked.push_back(flags);
    return flags != 0 ? EINVAL : 0;
  }});
  ASSERT_TRUE(io.ok());
  ASSERT_EQ(asked.size(), 2u);
  EXPECT_NE(asked[0], 0u);
  EXPECT_EQ(asked[1], 0u);
  EXPECT_EQ((*io)->description(), "io_uring");

  // One that has no rings, or forbids them.
  for (const int error : {EPERM, ENOSYS, EACCES, ENOMEM}) {
    const auto refuse = [error](unsigned /*flags*/) { return error; };
    io = CreateBlockIo({.refuse_setup = refuse});
    ASSERT_TRUE(io.ok());
    EXPECT_EQ((*io)->name(), "threads");
    EXPECT_THAT((*io)->description(), HasSubstr("io_uring_setup"));
    io = CreateBlockIo({.mode = BlockIoMode::kIoUring, .refuse_setup = refuse});
    EXPECT_FALSE(io.ok());
    EXPECT_THAT(Message(io.status()), HasSubstr("io_uring_setup"));
  }
}

TEST(CreateBlockIoTest, DepthHasLimits) {
  EXPECT_FALSE(CreateBlockIo({.depth = 0}).ok());
  EXPECT_FALSE(CreateBlockIo({.depth = kBlockIoDepthMax + 1}).ok());
}

}  // namespace
}  // namespace holdfast
