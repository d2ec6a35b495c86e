#include "server/runtime/verify.h"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "server/runtime/found_state.h"
#include "tiers/image/layout.h"
#include "tiers/image/record.h"

namespace holdfast {
namespace {

constexpr int kNice = 10;
constexpr uint64_t kPieceBytes = uint64_t{4} << 20;  // paid for at once
constexpr size_t kBadBlocksMax = 65'536;             // counted
constexpr int kUnreadMax = 16;  // copies that could not be read: then it is no one copy's trouble
constexpr char kGone[] = "the copy is gone: somebody else removed it";

std::string Describe(const std::vector<BadBlock>& blocks) {
  const BadBlock& first = blocks.front();
  return absl::StrCat(
      "slice '", first.slice, "': the block at image offset ", first.image_offset, " (",
      first.bytes, " bytes) has digest ", absl::Hex(first.actual, absl::kZeroPad16),
      ", the record says ", absl::Hex(first.expected, absl::kZeroPad16),
      blocks.size() > 1 ? absl::StrCat("; ", blocks.size() - 1, " more such blocks") : "");
}

std::string LocationOf(const ReadableShard& shard) {
  return shard.tier == TierKind::kMemory ? SlotLocation(shard.slot) : shard.location;
}

// Of an error of reading: what is wrong with the copy, or why it cannot be known.
absl::StatusOr<std::string> AfterReading(const absl::Status& status) {
  return IsBadCopy(status) ? absl::StatusOr<std::string>(Message(status)) : status;
}

// Of an error of decoding: a record of a newer version is not damaged.
absl::StatusOr<std::string> AfterDecoding(const absl::Status& status) {
  return IsBadCopy(status) || absl::IsInvalidArgument(status)
             ? absl::StatusOr<std::string>(Message(status))
             : status;
}

}  // namespace

bool IsBadCopy(const absl::Status& read) {
  return absl::IsDataLoss(read) || absl::IsNotFound(read) || absl::IsOutOfRange(read);
}

VerifyRun::VerifyRun(SlotStore& store, std::vector<ReadableShard> shards, Callbacks callbacks,
                     std::shared_ptr<Pacer> pacer)
    : store_(store),
      shards_(std::move(shards)),
      callbacks_(std::move(callbacks)),
      pacer_(std::move(pacer)) {
  uint64_t total = 0;
  for (const ReadableShard& shard : shards_) {
    total += shard.copy.image_bytes;
  }
  progress_.set_bytes_total(total);
  thread_ = std::thread([this] { Run(); });
}

VerifyRun::~VerifyRun() {
  Cancel();
  thread_.join();
}

void VerifyRun::Cancel() {
  control_.Cancel();
  MutexLock lock(mutex_);
  cancelled_ = true;
}

bool VerifyRun::WaitFor(Duration at_most, v1::VerifyProgress* progress) {
  const auto until = std::chrono::steady_clock::now() + at_most;
  MutexLock lock(mutex_);
  while (!progress_.done()) {
    if (!changed_.WaitUntil(mutex_, until)) {
      break;
    }
  }
  *progress = progress_;
  progress_.clear_bad();
  return progress->done();
}

absl::Status VerifyRun::result() {
  MutexLock lock(mutex_);
  return result_;
}

bool VerifyRun::Advance(uint64_t bytes_of_shard) {
  MutexLock lock(mutex_);
  progress_.set_bytes_done(bytes_before_ + bytes_of_shard);
  return !cancelled_;
}

bool VerifyRun::cancelled() {
  MutexLock lock(mutex_);
  return cancelled_;
}

absl::StatusOr<std::string> VerifyRun::Check(const ReadableShard& shard) {
  if (shard.tier != TierKind::kMemory) {
    return callbacks_.durable(
        shard, [this](uint64_t done) { return Advance(done); }, pacer_);
  }
  const absl::StatusOr<std::string> bytes = store_.ReadRecord(shard.slot);
  if (!bytes.ok()) {
    return AfterReading(bytes.status());
  }
  const absl::StatusOr<ShardRecord> record = DecodeRecord(*bytes);
  if (!record.ok()) {
    return AfterDecoding(record.status());
  }
  if (record->id != shard.copy.id || record->generation != shard.copy.generation) {
    return absl::StrCat("its record is that of ", record->id.ToString());
  }
  const absl::StatusOr<Layout> layout =
      DecodeLayout(record->layout_bytes, record->header_bytes, record->image_bytes);
  if (!layout.ok()) {
    return AfterDecoding(layout.status());
  }
  absl::Status read;
  const absl::StatusOr<std::vector<BadBlock>> blocks = VerifyImage(
      *record, *layout,
      [&](uint64_t offset, std::span<std::byte> out) {
        read = store_.ReadAt(shard.slot, offset, out);
        return read;
      },
      kBadBlocksMax, [&](uint64_t done) { return Advance(done); });
  if (absl::IsCancelled(blocks.status())) {
    return "";
  }
  if (!blocks.ok()) {
    return read.ok() ? AfterDecoding(blocks.status()) : AfterReading(read);
  }
  return blocks->empty() ? "" : Describe(*blocks);
}

void VerifyRun::Count(const ReadableShard& shard, uint64_t bytes, const std::string& what) {
  MutexLock lock(mutex_);
  progress_.set_bytes_total(progress_.bytes_total() - shard.copy.image_bytes + bytes);
  bytes_before_ += bytes;
  progress_.set_bytes_done(bytes_before_);
  progress_.set_shards_checked(progress_.shards_checked() + 1);
  if (!what.empty()) {
    v1::BadShard* bad = progress_.add_bad();
    bad->set_attempt(shard.copy.id.attempt);
    bad->set_step(shard.copy.id.step);
    bad->set_rank(shard.copy.id.rank);
    bad->set_location(LocationOf(shard));
    bad->set_what(what);
  }
}

void VerifyRun::Skip(const ReadableShard& shard) {
  MutexLock lock(mutex_);
  progress_.set_bytes_total(progress_.bytes_total() - shard.copy.image_bytes);
  progress_.set_bytes_done(bytes_before_);
  progress_.set_shards_skipped(progress_.shards_skipped() + 1);
}

// Files are not held: one that is gone, or holds something else, may be retention's doing. That
// gives a copy up before its files go, so the core knows.
absl::Status VerifyRun::Judge(const ReadableShard& shard, uint64_t bytes, const std::string& what) {
  if (what.empty()) {
    callbacks_.good(shard);
  } else if (shard.tier == TierKind::kMemory) {
    callbacks_.bad(shard, what);
  } else {
    HF_ASSIGN_OR_RETURN(const bool listed, callbacks_.listed(shard));
    if (!listed) {
      Skip(shard);
      return absl::OkStatus();
    }
    callbacks_.bad(shard, what);
  }
  Count(shard, bytes, what);
  return absl::OkStatus();
}

// In pieces: what is granted at once is waited for by whoever comes next.
bool VerifyRun::Pay(uint64_t bytes) {
  while (pacer_ != nullptr && bytes > 0) {
    const uint64_t piece = std::min(bytes, kPieceBytes);
    if (!pacer_->Acquire(piece, &control_)) {
      return false;
    }
    bytes -= piece;
  }
  return true;
}

absl::Status VerifyRun::VerifyAll() {
  absl::Status first;  // of those that could not be read: what others are is looked at all the same
  int unread = 0;
  for (const ReadableShard& shard : shards_) {
    std::unique_ptr<ReadLease> held;
    if (shard.tier == TierKind::kMemory) {
      // Paid for before it is held, and read at once: a save may need the slot.
      if (!Pay(shard.copy.image_bytes) || cancelled()) {
        return absl::OkStatus();
      }
      absl::StatusOr<std::unique_ptr<ReadLease>> hold = callbacks_.hold(shard);
      if (absl::IsNotFound(hold.status())) {
        Skip(shard);
        continue;
      }
      HF_RETURN_IF_ERROR(hold.status());
      held = *std::move(hold);
    }
    const absl::StatusOr<std::string> what = Check(shard);
    if (cancelled()) {
      return absl::OkStatus();  // nobody asks any more
    }
    absl::Status judged = what.status();
    if (what.ok()) {
      judged = Judge(shard, shard.copy.image_bytes, *what);
    } else if (shard.tier != TierKind::kMemory && absl::IsNotFound(judged)) {
      judged = Judge(shard, 0, kGone);
    }
    if (!judged.ok()) {
      first.Update(Annotate(judged, absl::StrCat("verify ", shard.copy.id.ToString(), " in ",
                                                 LocationOf(shard), ": it could not be read")));
      if (absl::IsUnavailable(judged)) {
        return first;  // the tier's directory is away, or the daemon stops: so are the others
      }
      if (++unread == kUnreadMax) {
        return Annotate(first, absl::StrCat("given up after ", kUnreadMax, " such copies"));
      }
    }
  }
  return unread > 1 ? Annotate(first, absl::StrCat(unread, " copies could not be read")) : first;
}

void VerifyRun::Run() {
  ::setpriority(PRIO_PROCESS, static_cast<id_t>(::syscall(SYS_gettid)),
                kNice);  // of this thread alone
  const absl::Status result = VerifyAll();
  MutexLock lock(mutex_);
  result_ = result;
  progress_.set_done(true);
  changed_.NotifyAll();
}

}  // namespace holdfast
