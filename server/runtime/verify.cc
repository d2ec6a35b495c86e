#include "server/runtime/verify.h"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

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
constexpr size_t kBadBlocksMax = 8;

std::string Describe(const std::vector<BadBlock>& blocks) {
  const BadBlock& first = blocks.front();
  return absl::StrCat(
      "slice '", first.slice, "': the block at image offset ", first.image_offset, " (",
      first.bytes, " bytes) has digest ", absl::Hex(first.actual, absl::kZeroPad16),
      ", the record says ", absl::Hex(first.expected, absl::kZeroPad16),
      blocks.size() > 1 ? absl::StrCat("; ", blocks.size() - 1, " more such blocks") : "");
}

}  // namespace

VerifyRun::VerifyRun(SlotStore& store, std::vector<ReadableShard> shards, BadCopy bad)
    : store_(store), shards_(std::move(shards)), bad_copy_(std::move(bad)) {
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

bool VerifyRun::Advance(uint64_t bytes_done) {
  MutexLock lock(mutex_);
  progress_.set_bytes_done(bytes_done);
  return !cancelled_;
}

std::string VerifyRun::Check(const ReadableShard& shard, uint64_t bytes_before) {
  const absl::StatusOr<std::string> bytes = store_.ReadRecord(shard.slot);
  if (!bytes.ok()) {
    return Message(bytes.status());
  }
  const absl::StatusOr<ShardRecord> record = DecodeRecord(*bytes);
  if (!record.ok()) {
    return Message(record.status());
  }
  if (record->id != shard.copy.id || record->generation != shard.copy.generation) {
    return absl::StrCat("its record is that of ", record->id.ToString());
  }
  const absl::StatusOr<Layout> layout =
      DecodeLayout(record->layout_bytes, record->header_bytes, record->image_bytes);
  if (!layout.ok()) {
    return Message(layout.status());
  }
  const absl::StatusOr<std::vector<BadBlock>> blocks = VerifyImage(
      *record, *layout,
      [&](uint64_t offset, std::span<std::byte> out) {
        return store_.ReadAt(shard.slot, offset, out);
      },
      kBadBlocksMax, [&](uint64_t done) { return Advance(bytes_before + done); });
  if (absl::IsCancelled(blocks.status())) {
    return "";
  }
  if (!blocks.ok()) {
    return Message(blocks.status());
  }
  return blocks->empty() ? "" : Describe(*blocks);
}

void VerifyRun::Run() {
  ::setpriority(PRIO_PROCESS, static_cast<id_t>(::syscall(SYS_gettid)),
                kNice);  // of this thread alone
  uint64_t bytes_done = 0;
  for (const ReadableShard& shard : shards_) {
    const std::string what = Check(shard, bytes_done);
    bytes_done += shard.copy.image_bytes;
    if (!what.empty()) {
      bad_copy_(shard, what);
    }
    MutexLock lock(mutex_);
    if (cancelled_) {
      break;
    }
    progress_.set_bytes_done(bytes_done);
    progress_.set_shards_checked(progress_.shards_checked() + 1);
    if (!what.empty()) {
      v1::BadShard* bad = progress_.add_bad();
      bad->set_attempt(shard.copy.id.attempt);
      bad->set_step(shard.copy.id.step);
      bad->set_rank(shard.copy.id.rank);
      bad->set_location(SlotLocation(shard.slot));
      bad->set_what(what);
    }
  }
  MutexLock lock(mutex_);
  progress_.set_done(true);
  changed_.NotifyAll();
}

}  // namespace holdfast
