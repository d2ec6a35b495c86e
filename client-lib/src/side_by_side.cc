#include "client-lib/src/side_by_side.h"

#include <algorithm>
#include <cstring>

#include "base/digest.h"

namespace holdfast::client {
namespace {

// Of each: so both fit into the memory for parts of one shard.
constexpr size_t kBlocksMax = 6;

}  // namespace

// (Of a run of a block's length two may be wanted.)
bool SideBySide::Blocks::full() const {
  return wanted.size() + 2 > kBlocksMax;
}

// True: they are wanted already, or were.
bool SideBySide::Blocks::Want(uint64_t begin, uint64_t bytes, bool only_look) {
  bool all = true;
  for (uint64_t i = begin / kDigestBlockBytes; i * kDigestBlockBytes < begin + bytes; ++i) {
    if (std::find(wanted.begin(), wanted.end(), i) == wanted.end()) {
      all = false;
      if (!only_look) {
        wanted.push_back(i);
      }
    }
  }
  return all;
}

void SideBySide::Blocks::AddTo(ShardRanges& ranges, ShardSlices& slices) const {
  const SealedShard& shard = side.held->shard();
  const uint64_t all = shard.SliceRange(side.slice, nullptr).bytes;
  for (const uint64_t block : wanted) {
    const uint64_t begin = block * kDigestBlockBytes;
    ranges.push_back(
        shard.SlicePart(side.slice, begin, std::min<uint64_t>(kDigestBlockBytes, all - begin)));
    slices.emplace_back(side.slice);
  }
}

const std::byte* SideBySide::Blocks::At(uint64_t at) const {
  return shown.at(at / kDigestBlockBytes) + at % kDigestBlockBytes;
}

void SideBySide::Add(uint64_t one, uint64_t other, uint64_t bytes) {
  while (bytes > 0 && same_.ok() && *same_) {
    const uint64_t now = std::min<uint64_t>(bytes, kDigestBlockBytes);
    const bool wanted = one_.Want(one, now, true) && other_.Want(other, now, true);
    if (!wanted && (one_.full() || other_.full())) {
      Compare();
    }
    one_.Want(one, now, false);
    other_.Want(other, now, false);
    runs_.push_back({one, other, now});
    one += now;
    other += now;
    bytes -= now;
  }
}

Result<bool> SideBySide::Finish() {
  Compare();
  return same_;
}

void SideBySide::Compare() {
  if (runs_.empty() || !same_.ok() || !*same_) {
    return;
  }
  const Status shown = ShowAll();
  if (!shown.ok()) {
    same_ = shown;
  }
  for (const Run& run : runs_) {
    if (!same_.ok() || !*same_) {
      break;
    }
    same_ = Equal(run);
  }
  runs_.clear();
  one_.wanted.clear();
  other_.wanted.clear();
}

bool SideBySide::Equal(const Run& run) const {
  for (uint64_t at = 0; at < run.bytes;) {
    const uint64_t here = run.one + at;
    const uint64_t there = run.other + at;
    const uint64_t now = std::min({run.bytes - at, kDigestBlockBytes - here % kDigestBlockBytes,
                                   kDigestBlockBytes - there % kDigestBlockBytes});
    if (std::memcmp(one_.At(here), other_.At(there), now) != 0) {
      return false;
    }
    at += now;
  }
  return true;
}

Status SideBySide::ShowAll() {
  deadline_.Look();
  if (deadline_.passed()) {
    return Status(Code::kDeadlineExceeded, "what several ranks saved was being compared");
  }
  if (one_.side.held == other_.side.held) {
    return Show({&one_, &other_});
  }
  HF_TRY(Show({&one_}));
  return Show({&other_});
}

Status SideBySide::Show(const std::vector<Blocks*>& both) {
  HeldShard& held = *both.front()->side.held;
  ShardRanges ranges;
  ShardSlices slices;
  for (const Blocks* blocks : both) {
    blocks->AddTo(ranges, slices);
  }
  std::vector<const std::byte*> at;
  if (held.shard().in_parts()) {
    Result<std::vector<const std::byte*>> shown = held.Show(engine_, ranges, slices, deadline_);
    if (!shown.ok()) {
      failed_ = &held;
      return shown.status();
    }
    at = *std::move(shown);
  } else {
    CopyOptions options;
    options.interrupt = deadline_.interrupt();
    HF_TRY(held.CopyOut(engine_, ranges, slices, options, deadline_));
    for (const CopyOutRange& range : ranges) {
      at.push_back(static_cast<const std::byte*>(range.from));
    }
  }
  size_t next = 0;
  for (Blocks* blocks : both) {
    blocks->shown.clear();
    for (const uint64_t block : blocks->wanted) {
      blocks->shown[block] = at[next++];
    }
  }
  return Status();
}

}  // namespace holdfast::client
