#include "tiers/peer/pull.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <system_error>
#include <thread>

#include "absl/strings/str_cat.h"
#include "base/digest.h"
#include "base/mutex.h"
#include "base/status.h"
#include "tiers/peer/remote_range.h"
#include "tiers/transfer/digest_blocks.h"
#include "tiers/transfer/file_pieces.h"

namespace holdfast {
namespace {

absl::Status CheckOptions(const PullOptions& options) {
  if (options.piece_bytes < kPullPieceBytesMin || options.piece_bytes > kPullPieceBytesMax ||
      options.window == 0 || options.window > kPullWindowMax ||
      options.stall_timeout <= Duration(0)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "pull: pieces of ", options.piece_bytes, " bytes, ", options.window,
        " at a time, a stall of ", options.stall_timeout.count(), " ns: not to be had"));
  }
  return absl::OkStatus();
}

// Smaller ones are verified by the thread that reads.
constexpr uint64_t kVerifiedAlongsideMin = uint64_t{8} << 20;

// How far it is: told by the one who reads, waited for by the one who verifies.
class Progress {
 public:
  // False: the other one has ended.
  bool Tell(uint64_t arrived) EXCLUDES(mutex_) {
    {
      MutexLock lock(mutex_);
      arrived_ = arrived;
    }
    changed_.NotifyOne();
    return !verifier_ended_.load(std::memory_order_relaxed);
  }
  void EndReading() EXCLUDES(mutex_) {
    {
      MutexLock lock(mutex_);
      reading_ended_ = true;
    }
    changed_.NotifyOne();
  }
  // More than `seen`; the same when there will be no more.
  uint64_t Await(uint64_t seen) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    while (arrived_ == seen && !reading_ended_) {
      changed_.Wait(mutex_);
    }
    return arrived_;
  }
  void EndVerifying() { verifier_ended_.store(true, std::memory_order_relaxed); }

 private:
  Mutex mutex_;
  CondVar changed_;
  uint64_t arrived_ GUARDED_BY(mutex_) = 0;
  bool reading_ended_ GUARDED_BY(mutex_) = false;
  std::atomic<bool> verifier_ended_{false};
};

// One image on its way. Run once.
class Pull {
 public:
  Pull(Fabric& fabric, const PullSource& source, std::span<std::byte> into,
       const ShardRecord& record, const Layout& layout, const PullOptions& options)
      : source_(source),
        image_(into),
        record_(record),
        to_verify_(layout),
        range_(fabric, source, 0, into, options) {}

  TransferResult Run() {
    const double cpu_before = ThreadCpuSeconds();
    result_.status = Move();
    if (!result_.ok() && result_.faulty == FaultySide::kNone) {
      result_.faulty = range_.faulty();
    }
    result_.cpu_seconds = ThreadCpuSeconds() + verifier_cpu_seconds_ - cpu_before;
    return std::move(result_);
  }

 private:
  absl::Status Move() {
    HF_RETURN_IF_ERROR(range_.Begin());
    if (image_.size() >= kVerifiedAlongsideMin) {
      // Reading is work, too, where the provider is software: bytes are moved by the calls that ask
      // whether they are there.
      Progress progress;
      absl::Status verified;
      std::thread verifier;
      try {
        verifier = std::thread([&] { verified = VerifyAlongside(progress); });
      } catch (const std::system_error&) {  // no thread is to be had
        return MoveAlone();
      }
      const absl::Status read = Read(progress);
      progress.EndReading();
      verifier.join();
      if (verified.ok() && read.ok() && !to_verify_.done()) {
        return absl::InternalError("pull: all has arrived, and not all was verified");
      }
      return verified.ok() ? read : verified;
    }
    return MoveAlone();
  }

  absl::Status Read(Progress& progress) {
    for (uint64_t told = 0; !range_.done();) {
      HF_RETURN_IF_ERROR(range_.Advance());
      if (range_.arrived() == told) {
        HF_RETURN_IF_ERROR(range_.Wait());
      } else if (told = range_.arrived(); !progress.Tell(told)) {
        break;
      }
    }
    return absl::OkStatus();
  }

  absl::Status VerifyAlongside(Progress& progress) {
    ::pthread_setname_np(::pthread_self(), "verify");
    absl::Status status;
    for (uint64_t arrived = 0; status.ok() && !to_verify_.done();) {
      const uint64_t more = progress.Await(arrived);
      if (more == arrived) {
        break;  // what is missing the one who reads knows
      }
      arrived = more;
      absl::StatusOr<bool> verified = true;
      while (verified.ok() && *verified) {
        verified = VerifyNext(arrived);
      }
      status = verified.status();
    }
    progress.EndVerifying();
    verifier_cpu_seconds_ = ThreadCpuSeconds();
    return status;
  }

  absl::Status MoveAlone() {
    while (!to_verify_.done()) {
      HF_RETURN_IF_ERROR(range_.Advance());
      HF_ASSIGN_OR_RETURN(const bool verified, VerifyNext(range_.arrived()));
      if (!verified) {
        HF_RETURN_IF_ERROR(range_.Wait());
      }
    }
    return absl::OkStatus();
  }

  // (Of one thread at a time.) Digests what has arrived, about one MiB of it; the rest of a block
  // when that is there too. False when nothing is.
  absl::StatusOr<bool> VerifyNext(uint64_t arrived) {
    uint64_t left = kDigestBlockBytes;
    while (left > 0 && !to_verify_.done()) {
      const uint64_t begin = to_verify_.offset() + digested_;
      const uint64_t there = std::min(to_verify_.end(), arrived);
      if (there <= begin && digested_ < to_verify_.bytes()) {
        break;
      }
      const uint64_t bytes = there - begin;
      digest_ = Crc64(image_.data() + begin, bytes, digest_);
      digested_ += bytes;
      left -= std::min(left, bytes);
      if (range_.faulted()) {
        result_.faulty = FaultySide::kDestination;
        return range_.CutShort();
      }
      if (digested_ == to_verify_.bytes()) {
        HF_RETURN_IF_ERROR(EndBlock());
      }
    }
    return left < kDigestBlockBytes;
  }

  absl::Status EndBlock() {
    if (std::optional<BadBlock> bad = CompareBlock(record_, to_verify_, digest_)) {
      result_.faulty = FaultySide::kSource;
      result_.bad_block = *bad;
      return BadBlockError(record_, *bad, absl::StrCat("the memory of '", source_.name, "'"));
    }
    result_.bytes = to_verify_.end();
    to_verify_.Next();
    digest_ = 0;
    digested_ = 0;
    return absl::OkStatus();
  }

  const PullSource& source_;
  const std::span<std::byte> image_;
  const ShardRecord& record_;
  DigestBlocks to_verify_;
  uint64_t digest_ = 0;  // of the first digested_ bytes of that block
  uint64_t digested_ = 0;
  TransferResult result_;
  double verifier_cpu_seconds_ = 0;
  RemoteRange range_;  // gone first
};

}  // namespace

TransferResult PullImage(Fabric& fabric, const PullSource& source, std::span<std::byte> into,
                         const ShardRecord& record, const Layout& layout,
                         const PullOptions& options) {
  TransferResult refused;
  refused.status = CheckIsLayoutOf(record, layout);
  if (refused.ok()) {
    refused.status = CheckOptions(options);
  }
  if (refused.ok() && into.size() < record.image_bytes) {
    refused.status = absl::InvalidArgumentError(
        absl::StrCat("pull of ", record.id.ToString(), ": ", into.size(),
                     " bytes of memory cannot hold ", record.image_bytes));
  }
  if (!refused.ok()) {
    return refused;
  }
  const TransferControl::Call call(options.control, "read from", source.name);
  return Pull(fabric, source, into.first(record.image_bytes), record, layout, options).Run();
}

absl::Status ReadRemote(Fabric& fabric, const PullSource& source, uint64_t offset,
                        std::span<std::byte> into, const PullOptions& options) {
  HF_RETURN_IF_ERROR(CheckOptions(options));
  if (into.empty()) {
    return absl::OkStatus();
  }
  const TransferControl::Call call(options.control, "read from", source.name);
  RemoteRange range(fabric, source, offset, into, options);
  HF_RETURN_IF_ERROR(range.Begin());
  while (true) {
    HF_RETURN_IF_ERROR(range.Advance());
    if (range.done()) {
      return range.faulted() ? range.CutShort() : absl::OkStatus();
    }
    HF_RETURN_IF_ERROR(range.Wait());
  }
}

}  // namespace holdfast
