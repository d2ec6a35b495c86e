#include "tiers/compressed/frame_codec.h"

#include <zstd.h>
#include <zstd_errors.h>

#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/mutex.h"

namespace holdfast {
namespace {

constexpr size_t kIdleMax = 8;

struct Free {
  void operator()(ZSTD_CCtx* context) const { ZSTD_freeCCtx(context); }
  void operator()(ZSTD_DCtx* context) const { ZSTD_freeDCtx(context); }
};

// Contexts that nobody uses at the moment; making one takes longer than compressing a frame.
template <typename Context>
class Idle {
 public:
  using Held = std::unique_ptr<Context, Free>;

  Held Take(Context* (*make)()) EXCLUDES(mutex_) {
    {
      MutexLock lock(mutex_);
      if (!idle_.empty()) {
        Held context = std::move(idle_.back());
        idle_.pop_back();
        return context;
      }
    }
    return Held(make());
  }
  void Give(Held context) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    if (idle_.size() < kIdleMax) {
      idle_.push_back(std::move(context));
    }
  }

 private:
  Mutex mutex_;
  std::vector<Held> idle_ GUARDED_BY(mutex_);
};

// (Never destroyed: threads that hang in a mount may come back while the process ends.)
template <typename Context>
Idle<Context>& IdleOnes() {
  static Idle<Context>& idle = *new Idle<Context>();
  return idle;
}

absl::Status NoMemory() {
  return absl::ResourceExhaustedError("zstd: no memory to work in");
}

bool IsNoMemory(size_t result) {
  return ZSTD_getErrorCode(result) == ZSTD_error_memory_allocation;
}

absl::Status Wrong(const char* what) {
  return absl::DataLossError(absl::StrCat("a compressed frame is damaged: ", what));
}

}  // namespace

absl::StatusOr<size_t> CompressFrame(int level, std::span<const std::byte> part,
                                     std::span<std::byte> out) {
  Idle<ZSTD_CCtx>& idle = IdleOnes<ZSTD_CCtx>();
  auto context = idle.Take(ZSTD_createCCtx);
  if (context == nullptr) {
    return NoMemory();
  }
  size_t result = ZSTD_CCtx_setParameter(context.get(), ZSTD_c_compressionLevel, level);
  if (ZSTD_isError(result) == 0) {
    result = ZSTD_CCtx_setParameter(context.get(), ZSTD_c_checksumFlag, 1);
  }
  if (ZSTD_isError(result) == 0) {
    result = ZSTD_compress2(context.get(), out.data(), out.size(), part.data(), part.size());
  }
  if (ZSTD_isError(result) != 0) {
    return IsNoMemory(result) ? NoMemory()
                              : absl::InternalError(absl::StrCat("zstd: compress ", part.size(),
                                                                 " bytes at level ", level, ": ",
                                                                 ZSTD_getErrorName(result)));
  }
  idle.Give(std::move(context));
  return result;
}

absl::Status DecompressFrame(std::span<const std::byte> stored, std::span<std::byte> out) {
  // What it claims is looked at first: a frame of another length is none of this image.
  const unsigned long long claimed = ZSTD_getFrameContentSize(stored.data(), stored.size());
  if (claimed == ZSTD_CONTENTSIZE_ERROR) {
    return Wrong("it does not begin as a Zstandard frame does");
  }
  if (claimed != out.size()) {
    return Wrong("it does not hold as many bytes of the image as it should");
  }
  const size_t whole = ZSTD_findFrameCompressedSize(stored.data(), stored.size());
  if (ZSTD_isError(whole) != 0) {
    return Wrong(ZSTD_getErrorName(whole));
  }
  if (whole != stored.size()) {
    return Wrong("it is shorter than the seek table says");
  }
  Idle<ZSTD_DCtx>& idle = IdleOnes<ZSTD_DCtx>();
  auto context = idle.Take(ZSTD_createDCtx);
  if (context == nullptr) {
    return NoMemory();
  }
  const size_t result =
      ZSTD_decompressDCtx(context.get(), out.data(), out.size(), stored.data(), stored.size());
  if (ZSTD_isError(result) != 0) {
    return IsNoMemory(result) ? NoMemory() : Wrong(ZSTD_getErrorName(result));
  }
  idle.Give(std::move(context));
  return result == out.size() ? absl::OkStatus() : Wrong("it holds less than it claims");
}

}  // namespace holdfast
