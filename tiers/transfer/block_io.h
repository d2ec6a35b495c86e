// Moving pieces between memory and files, several at a time: by io_uring, or, where that is not
// allowed (containers often block it), by a few threads that call File::ReadAt and WriteAt.
//
//   HF_ASSIGN_OR_RETURN(auto io, CreateBlockIo({.depth = 4}));
//   HF_RETURN_IF_ERROR(io->Submit({BlockOp::kWrite, file.get(), 0, memory, 4 << 20, tag}));
//   BlockCompletion done = io->Wait();      // done.tag, done.status
//
// Made, used and destroyed by one thread (the ring belongs to the thread that made it); threads
// that stand in for a ring begin with that one's priorities. File and memory of a request stay
// until its completion was taken, or until Drain or the destructor returned: those wait until the
// kernel has let go of all of it. A drive that never answers makes them wait for ever; whoever must
// outlive that leaves the thread behind with all that it uses.
//
// A request is all or an error: short transfers are continued. Requests are independent of one
// another and complete in any order. Files that are open for direct I/O want offset, bytes and
// memory aligned as File::Alignment says; that is the caller's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "base/env.h"
#include "tiers/transfer/thread_priority.h"

namespace holdfast {

enum class BlockOp : uint8_t { kRead, kWrite };

struct BlockRequest {
  BlockOp op = BlockOp::kRead;
  File* file = nullptr;
  uint64_t offset = 0;
  std::byte* memory = nullptr;
  size_t bytes = 0;
  uint64_t tag = 0;  // given back with the completion; any value
  // Reads: so many are enough when the file ends there (the last block of a file that is read by
  // O_DIRECT). 0: all of `bytes`.
  size_t bytes_min = 0;
};

struct BlockCompletion {
  uint64_t tag = 0;
  absl::Status status;     // names operation, path and errno; a file that ends too soon: OutOfRange
  double cpu_seconds = 0;  // spent by BlockIo's own threads
};

class BlockIo {
 public:
  virtual ~BlockIo() = default;  // drains
  BlockIo(const BlockIo&) = delete;
  BlockIo& operator=(const BlockIo&) = delete;

  virtual std::string_view name() const = 0;  // "io_uring" or "threads"
  // For people: "io_uring (single issuer)", "threads (io_uring_setup: … EPERM)".
  virtual const std::string& description() const = 0;
  virtual size_t depth() const = 0;  // requests under way at most
  virtual size_t in_flight() const = 0;

  // ResourceExhausted when `depth` are under way; InvalidArgument for a request that cannot be
  // meant. After an error the request is not under way. What fails later is in its completion.
  virtual absl::Status Submit(const BlockRequest& request) = 0;
  // The next completion; waits for it. Only while something is in flight.
  virtual BlockCompletion Wait() = 0;
  // A completion that is there already.
  virtual std::optional<BlockCompletion> Poll() = 0;
  // Waits until nothing is in flight; the completions are dropped.
  void Drain();

  // Of BlockIo's own threads; a ring has none, its I/O goes by the priority of the thread that
  // submits. Any thread, also while requests are under way.
  virtual absl::Status SetPriority(const ThreadPriority& priority) = 0;

  // Tells the kernel about files and memory beforehand, which saves it work with each request.
  // Memory: page-aligned, of a writable mapping, populated. True if it did; false is no error, and
  // everything works as well. Memory that is registered is pinned: unregister it before its file is
  // removed, else its pages stay. Nothing of it may be in flight then.
  virtual bool RegisterFile(File& file) = 0;
  virtual void UnregisterFile(File& file) = 0;
  virtual bool RegisterMemory(std::byte* memory, uint64_t bytes) = 0;
  virtual void UnregisterMemory(std::byte* memory) = 0;

 protected:
  BlockIo() = default;
};

enum class BlockIoMode : uint8_t { kAuto, kIoUring, kThreads };

struct BlockIoOptions {
  BlockIoMode mode = BlockIoMode::kAuto;
  size_t depth = 4;  // 1 to kBlockIoDepthMax; as many threads where there is no ring
  // Tests: called before each io_uring_setup with its flags; not 0: that errno instead.
  std::function<int(unsigned setup_flags)> refuse_setup;
};

inline constexpr size_t kBlockIoDepthMax = 64;

// kAuto: io_uring, with fewer features on older kernels, else threads. kIoUring: an error where it
// is not allowed, which says why and what to do.
absl::StatusOr<std::unique_ptr<BlockIo>> CreateBlockIo(const BlockIoOptions& options);

}  // namespace holdfast
