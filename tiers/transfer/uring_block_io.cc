// BlockIo on an io_uring of its own. One thread submits and reaps, so the kernel needs no locks of
// its own and runs completions when that thread asks for them, instead of interrupting it.
#include <liburing.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "tiers/transfer/block_io_impl.h"
#include "tiers/transfer/uring_parts.h"

namespace holdfast {
namespace {

// As the kernel has them since 6.0 and 6.1; older headers lack some of the names.
constexpr unsigned kSingleIssuer = 1U << 12;
constexpr unsigned kDeferTaskrun = 1U << 13;
constexpr unsigned kTaskrunFlag = 1U
                                  << 9;  // peeking enters the kernel only when there is something

constexpr unsigned kRegisteredFilesMax = 16;
constexpr unsigned kRegisteredBuffersMax = 256;
constexpr int kTriesMax = 1000;  // of what the kernel wants to be asked again

struct SetupChoice {
  unsigned flags;
  const char* description;
};
constexpr SetupChoice kSetups[] = {
    {kSingleIssuer | kDeferTaskrun | kTaskrunFlag, "io_uring (single issuer, deferred task work)"},
    {0, "io_uring"},
};

absl::Status SetupRefused(int error) {
  const absl::Status status = ErrnoStatus(error, "io_uring_setup", "ring");
  return absl::Status(
      status.code(),
      absl::StrCat("io_uring_setup: ", std::strerror(error),
                   error == EPERM || error == ENOSYS || error == EACCES
                       ? "; a container's seccomp profile or kernel.io_uring_disabled forbids it: "
                         "allow it there, or use threads"
                       : ""));
}

// liburing maps a ring's memory, and unmaps it, out of sight of whoever watches the threads
// (ThreadSanitizer): this says that one which lies where another one did comes after that.
std::atomic<uint64_t> rings_ended{0};

class UringBlockIo : public BlockIo {
 public:
  UringBlockIo(size_t depth, const char* description)
      : depth_(depth), description_(description), requests_(depth), tags_(depth) {
    for (uint32_t i = 0; i < depth; ++i) {
      free_.push_back(static_cast<uint32_t>(depth) - 1 - i);
    }
  }

  ~UringBlockIo() override {
    if (!open_) {
      return;
    }
    Drain();
    rings_ended.fetch_add(1, std::memory_order_release);
    ::io_uring_queue_exit(&ring_);
  }

  // 0 or an errno.
  int Open(unsigned flags) {
    const int result = ::io_uring_queue_init(static_cast<unsigned>(depth_), &ring_, flags);
    if (result < 0) {
      return -result;
    }
    open_ = true;
    static_cast<void>(rings_ended.load(std::memory_order_acquire));
    // A process may not have room for the tables (RLIMIT_MEMLOCK on older kernels): then without.
    can_register_files_ = ::io_uring_register_files_sparse(&ring_, kRegisteredFilesMax) == 0;
    can_register_memory_ = ::io_uring_register_buffers_sparse(&ring_, kRegisteredBuffersMax) == 0;
    return 0;
  }

  std::string_view name() const override { return "io_uring"; }
  const std::string& description() const override { return description_; }
  size_t depth() const override { return depth_; }
  size_t in_flight() const override { return depth_ - free_.size(); }

  absl::Status Submit(const BlockRequest& request) override {
    HF_RETURN_IF_ERROR(CheckBlockRequest(request));
    if (request.file->fd() < 0) {
      return ErrnoStatus(EBADF, BlockOpName(request.op), request.file->path());
    }
    if (free_.empty()) {
      return absl::ResourceExhaustedError(
          absl::StrCat("block I/O: ", depth_, " requests are under way already"));
    }
    const uint32_t index = free_.back();
    requests_[index].request = request;
    requests_[index].done = 0;
    requests_[index].tries = 0;
    const int error = Start(index);
    if (error != 0) {
      return ErrnoStatus(error, BlockOpName(request.op), request.file->path());
    }
    free_.pop_back();
    return absl::OkStatus();
  }

  BlockCompletion Wait() override {
    for (;;) {
      if (std::optional<BlockCompletion> done = Reap(true); done.has_value()) {
        return *std::move(done);
      }
    }
  }

  std::optional<BlockCompletion> Poll() override {
    return in_flight() == 0 ? std::nullopt : Reap(false);
  }

  absl::Status SetPriority(const ThreadPriority& priority) override {
    return CheckThreadPriority(priority);
  }

  bool RegisterFile(File& file) override {
    const int fd = file.fd();
    if (!can_register_files_ || fd < 0 || FileSlot(file) >= 0) {
      return false;
    }
    const auto free = std::find(files_.begin(), files_.end(), nullptr);
    if (free == files_.end() && files_.size() == kRegisteredFilesMax) {
      return false;
    }
    const size_t slot = static_cast<size_t>(free - files_.begin());
    if (::io_uring_register_files_update(&ring_, static_cast<unsigned>(slot), &fd, 1) != 1) {
      return false;
    }
    if (slot == files_.size()) {
      files_.push_back(&file);
    } else {
      files_[slot] = &file;
    }
    return true;
  }

  void UnregisterFile(File& file) override {
    const int slot = FileSlot(file);
    if (slot >= 0) {
      const int none = -1;
      ::io_uring_register_files_update(&ring_, static_cast<unsigned>(slot), &none, 1);
      files_[static_cast<size_t>(slot)] = nullptr;
    }
  }

  bool RegisterMemory(std::byte* memory, uint64_t bytes) override {
    if (!can_register_memory_ || bytes == 0 || OverlapsRegistered(memory, bytes)) {
      return false;
    }
    for (const MemorySlice& slice : RegisteredSlices(bytes)) {
      const int slot = TakeBufferSlot(memory + slice.offset, slice.bytes);
      if (slot < 0) {
        UnregisterMemory(memory);
        return false;
      }
      buffers_[memory + slice.offset] = {memory, slice.bytes, static_cast<unsigned>(slot)};
    }
    return true;
  }

  void UnregisterMemory(std::byte* memory) override {
    for (auto it = buffers_.begin(); it != buffers_.end();) {
      if (it->second.whole != memory) {
        ++it;
        continue;
      }
      const iovec none = {};
      const __u64 tag = 0;
      ::io_uring_register_buffers_update_tag(&ring_, it->second.slot, &none, &tag, 1);
      buffer_slots_taken_[it->second.slot] = false;
      it = buffers_.erase(it);
    }
  }

 private:
  struct Request {
    BlockRequest request;
    size_t done = 0;
    int tries = 0;
  };
  struct Buffer {
    std::byte* whole;  // what it is a slice of
    uint64_t bytes;
    unsigned slot;
  };

  int FileSlot(const File& file) const {
    const auto found = std::find(files_.begin(), files_.end(), &file);
    return found == files_.end() ? -1 : static_cast<int>(found - files_.begin());
  }

  bool OverlapsRegistered(std::byte* memory, uint64_t bytes) const {
    const auto after = buffers_.lower_bound(memory + bytes);
    return after != buffers_.begin() &&
           std::prev(after)->first + std::prev(after)->second.bytes > memory;
  }

  int TakeBufferSlot(std::byte* memory, uint64_t bytes) {
    const auto free = std::find(buffer_slots_taken_.begin(), buffer_slots_taken_.end(), false);
    if (free == buffer_slots_taken_.end()) {
      return -1;
    }
    const auto slot = static_cast<unsigned>(free - buffer_slots_taken_.begin());
    const iovec buffer = {memory, static_cast<size_t>(bytes)};
    const __u64 tag = 0;
    if (::io_uring_register_buffers_update_tag(&ring_, slot, &buffer, &tag, 1) != 1) {
      return -1;
    }
    *free = true;
    return static_cast<int>(slot);
  }

  // The registered buffer that holds all of the range; -1: none.
  int BufferSlot(const std::byte* memory, size_t bytes) const {
    auto after = buffers_.upper_bound(const_cast<std::byte*>(memory));
    if (after == buffers_.begin()) {
      return -1;
    }
    const auto& [begin, buffer] = *std::prev(after);
    return memory + bytes <= begin + buffer.bytes ? static_cast<int>(buffer.slot) : -1;
  }

  // Hands what is left of a request to the kernel; 0, or the errno with which it would not have it.
  int Start(uint32_t index) {
    Request& request = requests_[index];
    const BlockRequest& r = request.request;
    io_uring_sqe* sqe = ::io_uring_get_sqe(&ring_);
    if (sqe == nullptr) {
      // The queue has a place for each request. It is full of entries that the kernel refused.
      if (const int error = SubmitAll(); error != 0) {
        return error;
      }
      sqe = ::io_uring_get_sqe(&ring_);
    }
    if (sqe == nullptr) {
      return EBUSY;  // cannot be: the queue is empty
    }
    std::byte* const memory = r.memory + request.done;
    const auto bytes = static_cast<unsigned>(r.bytes - request.done);
    const int file_slot = FileSlot(*r.file);
    const int buffer_slot = BufferSlot(memory, bytes);
    const int fd = file_slot >= 0 ? file_slot : r.file->fd();
    const uint64_t offset = r.offset + request.done;
    if (r.op == BlockOp::kWrite) {
      buffer_slot >= 0 ? ::io_uring_prep_write_fixed(sqe, fd, memory, bytes, offset, buffer_slot)
                       : ::io_uring_prep_write(sqe, fd, memory, bytes, offset);
    } else {
      buffer_slot >= 0 ? ::io_uring_prep_read_fixed(sqe, fd, memory, bytes, offset, buffer_slot)
                       : ::io_uring_prep_read(sqe, fd, memory, bytes, offset);
    }
    if (file_slot >= 0) {
      sqe->flags |= IOSQE_FIXED_FILE;
    }
    ::io_uring_sqe_set_data64(sqe, tags_.Issue(index));
    const int error = SubmitAll();
    if (error != 0) {
      // The entry stays in the queue and goes with the next submission: make it harmless.
      ::io_uring_prep_nop(sqe);
      ::io_uring_sqe_set_data64(sqe, RequestTags::kNobody);
    }
    return error;
  }

  int SubmitAll() {
    return SubmitQueued([this] { return ::io_uring_submit(&ring_); },
                        [this] { return ::io_uring_sq_ready(&ring_); });
  }

  // Takes one entry of the completion queue. Empty when there is none, or when it was not the end
  // of a request.
  std::optional<BlockCompletion> Reap(bool wait) {
    io_uring_cqe* cqe = nullptr;
    const int result = wait ? ::io_uring_wait_cqe(&ring_, &cqe) : ::io_uring_peek_cqe(&ring_, &cqe);
    if (result != 0 || cqe == nullptr) {
      // EEXIST: another thread than the ring's own. Going on would wait for ever.
      if (result == -EEXIST) {
        std::fprintf(stderr, "BlockIo: used by two threads\n");
        std::abort();
      }
      return std::nullopt;
    }
    const uint64_t data = ::io_uring_cqe_get_data64(cqe);
    const int moved = cqe->res;
    ::io_uring_cqe_seen(&ring_, cqe);
    const std::optional<uint32_t> index = tags_.PlaceOf(data);
    return index.has_value() ? Advance(*index, moved) : std::nullopt;
  }

  std::optional<BlockCompletion> Advance(uint32_t index, int moved) {
    Request& request = requests_[index];
    const BlockRequest& r = request.request;
    absl::Status status;
    if (moved > 0) {
      request.done += std::min(static_cast<size_t>(moved), r.bytes - request.done);
    }
    const bool enough =
        request.done == r.bytes || (r.bytes_min != 0 && request.done >= r.bytes_min);
    const bool again = (moved == -EINTR || moved == -EAGAIN) && ++request.tries < kTriesMax;
    if (moved == -EINVAL && r.op == BlockOp::kRead && request.done > 0) {
      // Direct I/O went up to the file's end, and does not go on from there.
      status = FileEndsTooSoon(r, request.done);
    } else if (moved < 0 && !again) {
      status = ErrnoStatus(-moved, BlockOpName(r.op), r.file->path());
    } else if (moved == 0) {
      status = r.op == BlockOp::kRead ? FileEndsTooSoon(r, request.done)
                                      : ErrnoStatus(EIO, "write", r.file->path());
    } else if (!enough) {
      const int error = Start(index);
      if (error == 0) {
        return std::nullopt;
      }
      status = ErrnoStatus(error, BlockOpName(r.op), r.file->path());
    }
    tags_.Retire(index);
    free_.push_back(index);
    return BlockCompletion{r.tag, status, 0};
  }

  const size_t depth_;
  const std::string description_;
  io_uring ring_ = {};
  bool open_ = false;
  bool can_register_files_ = false;
  bool can_register_memory_ = false;
  std::vector<Request> requests_;
  RequestTags tags_;
  std::vector<uint32_t> free_;  // places in requests_
  std::vector<File*> files_;    // by their place in the kernel's table; null: free
  std::map<std::byte*, Buffer> buffers_;
  std::vector<bool> buffer_slots_taken_ = std::vector<bool>(kRegisteredBuffersMax);
};

}  // namespace

absl::StatusOr<std::unique_ptr<BlockIo>> CreateUringBlockIo(const BlockIoOptions& options) {
  int error = 0;
  for (const SetupChoice& setup : kSetups) {
    error = options.refuse_setup ? options.refuse_setup(setup.flags) : 0;
    if (error == 0) {
      auto io = std::make_unique<UringBlockIo>(options.depth, setup.description);
      error = io->Open(setup.flags);
      if (error == 0) {
        return io;
      }
    }
  }
  return SetupRefused(error);
}

}  // namespace holdfast
