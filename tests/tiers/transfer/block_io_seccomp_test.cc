// Where a container's seccomp profile forbids io_uring: in a process of its own, for a filter
// stays.
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>

#include "tests/base/temporary_directory.h"
#include "tests/tiers/transfer/transfer_harness.h"

namespace holdfast {
namespace {

bool Forbid(uint32_t system_call, uint32_t error) {
  sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, system_call, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | error),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog filter = {sizeof program / sizeof program[0], program};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

bool ImageGoesToAFileAndBack(BlockIo& io) {
  const TemporaryDirectory dir;
  const SampleImage sample = MakeTransferImage();
  const auto file = ValueOf(Env::System()->Open(dir.Path("image"), OpenMode::kCreateExclusive));
  TestSlot slot(sample.image.size(), sample.image);
  TestSlot back(sample.image.size());
  return WriteImage(io, slot.span(), *file, sample.record, sample.layout, {}).ok() &&
         ReadImage(io, *file, back.span(), sample.record, sample.layout, {}).ok() &&
         back.text(sample.image.size()) == sample.image;
}

// Exits with 0 when an image went to a file and back by threads.
[[noreturn]] void FlushWithoutRings(uint32_t error) {
  if (!Forbid(SYS_io_uring_setup, error)) {
    std::fprintf(stderr, "no seccomp\n");
    std::_Exit(2);
  }
  const auto forced = CreateBlockIo({.mode = BlockIoMode::kIoUring});
  const auto io = CreateBlockIo({});
  if (forced.ok() || !io.ok() || (*io)->name() != "threads") {
    std::_Exit(3);
  }
  std::fprintf(stderr, "%s\n", (*io)->description().c_str());
  std::_Exit(ImageGoesToAFileAndBack(**io) ? 0 : 4);
}

TEST(BlockIoSeccompTest, ThreadsDoTheSame) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(FlushWithoutRings(EPERM), ::testing::ExitedWithCode(0),
              "threads .io_uring_setup: Operation not permitted.*seccomp");
  EXPECT_EXIT(FlushWithoutRings(ENOSYS), ::testing::ExitedWithCode(0), "threads .io_uring_setup");
}

}  // namespace
}  // namespace holdfast
