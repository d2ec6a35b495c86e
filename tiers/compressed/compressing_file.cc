#include "tiers/compressed/compressing_file.h"

#include <algorithm>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "tiers/compressed/frame_codec.h"

namespace holdfast {

CompressingFile::CompressingFile(std::unique_ptr<File> file, uint64_t image_bytes, int level)
    : file_(std::move(file)), image_bytes_(image_bytes), level_(level) {}

absl::Status CompressingFile::CheckFrame(uint64_t offset, uint64_t bytes) const {
  if (offset % kFrameBytes == 0 && offset < image_bytes_ &&
      bytes == std::min(kFrameBytes, image_bytes_ - offset)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat("write '", path(), "': ", bytes,
                                                 " bytes at offset ", offset, " of an image of ",
                                                 image_bytes_, " are no frame of it"));
}

absl::Status CompressingFile::WriteAt(uint64_t offset, std::span<const std::byte> data) {
  HF_RETURN_IF_ERROR(CheckFrame(offset, data.size()));
  Bytes stored(kStoredFrameBytesMax);
  const absl::StatusOr<size_t> bytes = CompressFrame(level_, data, stored);
  if (!bytes.ok()) {
    return Annotate(bytes.status(), absl::StrCat("write '", path(), "'"));
  }
  stored.resize(*bytes);
  stored.shrink_to_fit();
  HF_ASSIGN_OR_RETURN(const std::vector<Placed> placed,
                      Place(offset / kFrameBytes, std::move(stored)));
  for (const Placed& frame : placed) {
    HF_RETURN_IF_ERROR(file_->WriteAt(frame.offset, frame.stored));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<CompressingFile::Placed>> CompressingFile::Place(uint64_t index,
                                                                            Bytes stored) {
  std::vector<Placed> placed;
  MutexLock lock(mutex_);
  if (index < sizes_.size() || !waiting_.emplace(index, std::move(stored)).second) {
    return absl::InvalidArgumentError(
        absl::StrCat("write '", path(), "': frame ", index, " was written before"));
  }
  while (!waiting_.empty() && waiting_.begin()->first == sizes_.size()) {
    Bytes next = std::move(waiting_.extract(waiting_.begin()).mapped());
    const uint64_t bytes = next.size();
    placed.push_back({end_, std::move(next)});
    sizes_.push_back(static_cast<uint32_t>(bytes));
    end_ += bytes;
  }
  return placed;
}

absl::Status CompressingFile::Finish() {
  if (frames_) {
    return absl::OkStatus();
  }
  MutexLock lock(mutex_);
  if (sizes_.size() != FramesOf(image_bytes_)) {
    return absl::FailedPreconditionError(absl::StrCat("finish '", path(), "': ", sizes_.size(),
                                                      " of ", FramesOf(image_bytes_),
                                                      " frames were written"));
  }
  const std::string table = EncodeSeekTable(image_bytes_, sizes_);
  HF_RETURN_IF_ERROR(file_->WriteAt(end_, std::as_bytes(std::span(table))));
  stored_bytes_ = end_ + table.size();
  frames_.emplace(*file_, SeekTable(image_bytes_, sizes_));
  return absl::OkStatus();
}

absl::Status CompressingFile::ReadAt(uint64_t offset, std::span<std::byte> out) {
  if (!frames_) {
    return absl::FailedPreconditionError(
        absl::StrCat("read '", path(), "': it is still being written"));
  }
  return frames_->ReadAt(offset, out);
}

absl::Status CompressingFile::Allocate(uint64_t /*offset*/, uint64_t /*bytes*/) {
  return absl::UnimplementedError(
      absl::StrCat("'", path(), "': how long it will be shows when it is written"));
}

absl::Status CompressingFile::Truncate(uint64_t /*bytes*/) {
  return absl::UnimplementedError(
      absl::StrCat("'", path(), "': it is written once, frame by frame"));
}

absl::StatusOr<DirectAlignment> CompressingFile::Alignment() {
  return absl::UnimplementedError(absl::StrCat("'", path(), "': no direct I/O"));
}

}  // namespace holdfast
