#include "tiers/compressed/compressed_file.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/errno_status.h"
#include "base/status.h"
#include "tiers/compressed/frame_codec.h"

namespace holdfast {

absl::Status FrameReader::ReadFrame(uint64_t index, std::span<std::byte> out) {
  {
    MutexLock lock(mutex_);
    if (const auto bad = bad_.find(index); bad != bad_.end()) {
      return bad->second;
    }
  }
  absl::Status read = ReadAndDecompress(index, out);
  if (absl::IsDataLoss(read) && !IsErrno(read)) {
    MutexLock lock(mutex_);
    if (bad_.size() < kBadFramesMax) {
      bad_.emplace(index, read);
    }
  }
  return read;
}

absl::Status FrameReader::ReadAndDecompress(uint64_t index, std::span<std::byte> out) {
  const StoredFrame frame = table_.frame(index);
  const auto stored_bytes = static_cast<size_t>(frame.stored_bytes);
  // (Not cleared: all of it is read.)
  const std::unique_ptr<std::byte[]> stored(new std::byte[stored_bytes]);
  const absl::Status read = file_.ReadAt(frame.offset, {stored.get(), stored_bytes});
  if (absl::IsOutOfRange(read)) {
    return absl::DataLossError(absl::StrCat(read.message(), ": the file was cut"));
  }
  HF_RETURN_IF_ERROR(read);
  return Annotate(DecompressFrame({stored.get(), stored_bytes}, out),
                  absl::StrCat("read '", file_.path(), "', frame ", index));
}

std::shared_ptr<const FrameReader::Bytes> FrameReader::FindAtHand(uint64_t index) {
  MutexLock lock(mutex_);
  const auto it = std::find_if(at_hand_.begin(), at_hand_.end(),
                               [index](const AtHand& frame) { return frame.index == index; });
  if (it == at_hand_.end()) {
    return nullptr;
  }
  at_hand_.splice(at_hand_.begin(), at_hand_, it);
  return it->bytes;
}

absl::Status FrameReader::ReadPart(uint64_t index, uint64_t within, std::span<std::byte> out) {
  std::shared_ptr<const Bytes> whole = FindAtHand(index);
  if (whole == nullptr) {
    auto fresh = std::make_shared<Bytes>(static_cast<size_t>(table_.frame(index).bytes));
    HF_RETURN_IF_ERROR(ReadFrame(index, *fresh));
    whole = fresh;
    MutexLock lock(mutex_);
    at_hand_.push_front({index, std::move(fresh)});
    if (at_hand_.size() > kFramesAtHand) {
      at_hand_.pop_back();
    }
  }
  std::memcpy(out.data(), whole->data() + within, out.size());
  return absl::OkStatus();
}

absl::Status FrameReader::ReadAt(uint64_t offset, std::span<std::byte> out) {
  if (offset > table_.image_bytes() || out.size() > table_.image_bytes() - offset) {
    return absl::OutOfRangeError(absl::StrCat("read '", file_.path(), "': ", out.size(),
                                              " bytes at offset ", offset, " of an image of ",
                                              table_.image_bytes()));
  }
  while (!out.empty()) {
    const uint64_t index = offset / kFrameBytes;
    const uint64_t within = offset % kFrameBytes;
    const uint64_t frame_bytes = table_.frame(index).bytes;
    const auto now = static_cast<size_t>(std::min<uint64_t>(out.size(), frame_bytes - within));
    HF_RETURN_IF_ERROR(now == frame_bytes ? ReadFrame(index, out.first(now))
                                          : ReadPart(index, within, out.first(now)));
    out = out.subspan(now);
    offset += now;
  }
  return absl::OkStatus();
}

CompressedFile::CompressedFile(std::unique_ptr<File> file, SeekTable table, uint64_t stored_bytes)
    : file_(std::move(file)), stored_bytes_(stored_bytes), frames_(*file_, std::move(table)) {}

absl::StatusOr<std::unique_ptr<CompressedFile>> CompressedFile::Open(std::unique_ptr<File> file,
                                                                     uint64_t image_bytes) {
  HF_ASSIGN_OR_RETURN(const FileInfo info, file->Info());
  HF_ASSIGN_OR_RETURN(SeekTable table, ReadSeekTable(*file, info.bytes, image_bytes));
  return std::unique_ptr<CompressedFile>(
      new CompressedFile(std::move(file), std::move(table), info.bytes));
}

absl::Status CompressedFile::ReadAt(uint64_t offset, std::span<std::byte> out) {
  return frames_.ReadAt(offset, out);
}

absl::StatusOr<FileInfo> CompressedFile::Info() {
  HF_ASSIGN_OR_RETURN(FileInfo info, file_->Info());
  if (info.bytes != stored_bytes_) {
    return absl::DataLossError(absl::StrCat("'", file_->path(), "': the compressed image was ",
                                            info.bytes < stored_bytes_ ? "cut" : "extended", " to ",
                                            info.bytes, " bytes, it had ", stored_bytes_));
  }
  info.bytes = frames_.table().image_bytes();
  return info;
}

}  // namespace holdfast
