#include "tiers/transfer/file_pieces.h"

#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <time.h>

#include <new>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/units.h"

namespace holdfast {
namespace {

constexpr size_t kBufferAlignment = 4096;
// Of one huge page, where the kernel grants them. A drive takes a request in as many segments as
// there are pieces of memory, and only so many: out of pages of 4 KiB a read of 4 MiB becomes
// several, which on some drives has a third of the throughput.
constexpr size_t kHugePageBytes = size_t{2} << 20;

size_t AlignmentOf(size_t bytes) {
  return bytes < kHugePageBytes ? kBufferAlignment : kHugePageBytes;
}

}  // namespace

absl::Status ReadAtLeast(File& file, uint64_t offset, std::span<std::byte> out, size_t bytes_min) {
  const absl::Status all = file.ReadAt(offset, out);
  if (!absl::IsOutOfRange(all) || bytes_min == 0 || bytes_min == out.size()) {
    return all;
  }
  // The file ends within the range. Exactly what is wanted, then; direct I/O does not take that
  // length (InvalidArgument), but has read what there is before it found the end.
  const absl::Status exactly = file.ReadAt(offset, out.first(bytes_min));
  if (!absl::IsInvalidArgument(exactly)) {
    return exactly;
  }
  HF_ASSIGN_OR_RETURN(const FileInfo info, file.Info());
  return info.bytes >= offset + bytes_min ? absl::OkStatus() : all;
}

AlignedBuffer::AlignedBuffer(size_t bytes)
    : bytes_(RoundUp(bytes, kBufferAlignment)),
      data_(static_cast<std::byte*>(::operator new(bytes_, std::align_val_t(AlignmentOf(bytes_)))),
            Free{AlignmentOf(bytes_)}) {
  if (bytes_ >= kHugePageBytes) {
    // Without them it is a buffer all the same.
    (void)::madvise(data_.get(), bytes_ / kHugePageBytes * kHugePageBytes, MADV_HUGEPAGE);
  }
}

void AlignedBuffer::Free::operator()(std::byte* data) const {
  ::operator delete(data, std::align_val_t(alignment));
}

double ThreadCpuSeconds() {
  timespec now = {};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

absl::Status StartThread(const char* name, std::function<void()> run, std::thread& thread) {
  // Signals are for the program's other threads, but those that this one causes itself: a blocked
  // SIGBUS would never reach FaultGuard, and end the process.
  sigset_t others;
  sigset_t before;
  sigfillset(&others);
  for (const int own : {SIGBUS, SIGSEGV, SIGFPE, SIGILL}) {
    sigdelset(&others, own);
  }
  ::pthread_sigmask(SIG_SETMASK, &others, &before);
  absl::Status status;
  try {
    thread = std::thread([name, run = std::move(run)] {
      ::pthread_setname_np(::pthread_self(), name);
      run();
    });
  } catch (const std::system_error& error) {
    status = absl::ResourceExhaustedError(
        absl::StrCat("start a thread (", name, "): ", error.what(),
                     "; raise the limit of processes (ulimit -u, the service's TasksMax)"));
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return status;
}

}  // namespace holdfast
