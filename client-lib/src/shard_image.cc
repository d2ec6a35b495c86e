#include "client-lib/src/shard_image.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/digest.h"
#include "client-lib/src/errors.h"
#include "client-lib/src/step_shards.h"

namespace holdfast::client {
namespace {

// How much of a run goes into a window: all that is left of it, or whole digest blocks.
uint64_t FittingBytes(uint64_t left, uint64_t room) {
  return left <= room ? left : room / kDigestBlockBytes * kDigestBlockBytes;
}

}  // namespace

ShardImage::ShardImage(ShardSource source, const ShardImageOptions& options)
    : source_(std::move(source)),
      options_(options),
      interrupt_(source_.interrupted),
      engine_(MakeHostCopyEngine(options.threads)) {}

Result<std::unique_ptr<ShardImage>> ShardImage::Open(const ShardSource& source,
                                                     const ShardImageOptions& options) {
  std::unique_ptr<ShardImage> image(new ShardImage(source, options));
  HF_TRY(image->OpenCopy(Deadline::In(options.deadline).Or(image->interrupt_)));
  return image;
}

// Of a copy that is opened later: that it is of the same bytes.
Status ShardImage::CheckCopy(HeldShard& held) {
  const wire::Source& said = held.source();
  if (CheckpointId{said.attempt, said.step} != options_.checkpoint ||
      said.world_size != options_.world_size) {
    return Status(Code::kInternal,
                  absl::StrCat("ckptd offers attempt ", said.attempt, " step ", said.step, " of ",
                               said.world_size, " ranks, asked for was attempt ",
                               options_.checkpoint.attempt, " step ", options_.checkpoint.step,
                               ", which ", options_.world_size, " ranks saved"));
  }
  ShardRecord record = held.shard().record();
  record.generation = 0;
  record.kept.reset();
  if (!opened_) {
    image_ = {std::move(record), held.shard().layout()};
    opened_ = true;
    return Status();
  }
  return record == image_.record
             ? Status()
             : Status(Code::kCorrupt, "it has another record than the copy that was begun with");
}

Status ShardImage::OpenCopy(Deadline deadline) {
  wire::Attach attach;
  attach.job = options_.job;
  attach.rank = options_.rank;
  attach.choice = wire::Choice::kStep;
  attach.step = options_.checkpoint.step;
  attach.attempt = options_.checkpoint.attempt;
  attach.any_tier = true;
  attach.parts = true;
  attach.without = without_;
  Result<std::unique_ptr<HeldShard>> held =
      HeldShard::Open(source_, std::move(attach), HeldShard::Parts::kWhole, deadline,
                      [this](HeldShard& each) { return CheckCopy(each); });
  if (held.ok()) {
    held_ = *std::move(held);
    return Status();
  }
  const std::string what = absl::StrCat("the shard of rank ", options_.rank);
  const Status& last = held.status();
  const bool later =  // another one may be had then
      last.code() == Code::kUnavailable || last.code() == Code::kDeadlineExceeded;
  return bad_.ok() ? WithContext(last, what)
                   : WithContext(Status(later ? last.code() : bad_.code(),
                                        absl::StrCat(why_, "; ", last.message())),
                                 what);
}

// Of a file that leaves slices out the whole image's header was made anew; no file has it.
Status ShardImage::CopyHeader(std::span<std::byte> to, uint64_t begin, Deadline deadline) {
  const std::string& header = held_->shard().WholeHeader();
  if (header.size() != image_.record.header_bytes) {
    return Status(Code::kCorrupt, "its slices make another header than its record says");
  }
  CopyOutRange range;
  range.to = to.data();
  range.from = header.data() + begin;
  range.bytes = to.size();
  range.digests = image_.record.digests.data() + begin / kDigestBlockBytes;
  CopyOptions options;
  options.interrupt = deadline.interrupt();
  HF_TRY_ASSIGN(const std::optional<CopyMismatch> mismatch,
                engine_->CopyOut(std::span(&range, 1), options));
  return mismatch.has_value()
             ? Status(Code::kCorrupt,
                      "its slices make a header with another digest than its record")
             : Status();
}

Result<ShardImage::Place> ShardImage::Read(std::span<std::byte> window, Deadline deadline,
                                           uint64_t& bytes) {
  const SealedShard& shard = held_->shard();
  const uint64_t header_bytes = image_.record.header_bytes;
  const std::vector<Slice>& slices = image_.layout.slices;
  ShardRanges ranges;
  ShardSlices of_slices;
  Place place = done_;
  bytes = 0;
  // 1. What is left of the header.
  if (place.in_header < header_bytes) {
    const uint64_t some = FittingBytes(header_bytes - place.in_header, window.size());
    if (shard.record().kept) {
      HF_TRY(CopyHeader(window.first(some), place.in_header, deadline));
    } else {
      CopyOutRange& range = ranges.emplace_back(shard.HeaderRange());
      range.to = window.data();
      range.from = static_cast<const std::byte*>(range.from) + place.in_header;
      range.bytes = some;
      range.digests += place.in_header / kDigestBlockBytes;
      range.in_slice = place.in_header;
      of_slices.emplace_back(std::nullopt);
    }
    place.in_header += some;
    bytes += some;
  }
  // 2. Slices, as many as there is room for.
  while (place.in_header == header_bytes && place.slice < slices.size()) {
    const uint64_t left = slices[place.slice].bytes - place.in_slice;
    const uint64_t some = FittingBytes(left, window.size() - bytes);
    if (some > 0) {
      CopyOutRange& range = ranges.emplace_back(shard.SlicePart(place.slice, place.in_slice, some));
      range.to = window.data() + bytes;
      of_slices.emplace_back(place.slice);
      bytes += some;
      place.in_slice += some;
    }
    if (some < left) {
      break;
    }
    ++place.slice;
    place.in_slice = 0;
  }
  CopyOptions options;
  options.interrupt = deadline.interrupt();
  HF_TRY(held_->CopyOut(*engine_, ranges, of_slices, options, deadline));
  HF_TRY(held_->Confirm(deadline));
  return place;
}

Result<uint64_t> ShardImage::Next(std::span<std::byte> window) {
  if (window.size() < kWindowBytesMin) {
    return Status(Code::kInvalidArgument,
                  absl::StrCat("a window of ", window.size(), " bytes: at least ", kWindowBytesMin,
                               " are needed"));
  }
  if (done_.in_header == image_.record.header_bytes && done_.slice == image_.layout.slices.size()) {
    held_.reset();
    return uint64_t{0};
  }
  const Deadline deadline = Deadline::In(options_.deadline).Or(interrupt_);
  while (true) {
    if (held_ == nullptr) {
      HF_TRY(OpenCopy(deadline));
    }
    uint64_t bytes = 0;
    const Result<Place> read = Read(window, deadline, bytes);
    if (read.ok()) {
      done_ = *read;
      if (held_->source().hold != 0) {
        held_.reset();
      }
      return bytes;
    }
    const Status& status = read.status();
    if (!MayPassOver(*held_, status) || !PassOver(*held_, without_)) {
      return WithContext(status, absl::StrCat("the shard of rank ", options_.rank));
    }
    bad_ = status;
    absl::StrAppend(&why_, why_.empty() ? "" : ", ", "copy in ", held_->tier(), ": ",
                    status.message());
    held_.reset();
  }
}

}  // namespace holdfast::client
