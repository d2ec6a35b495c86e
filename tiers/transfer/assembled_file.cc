#include "tiers/transfer/assembled_file.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace holdfast {

AssembledFile::AssembledFile(ImageMap map, std::vector<std::shared_ptr<File>> files)
    : map_(std::move(map)), files_(std::move(files)) {}

const std::string& AssembledFile::PathAt(uint64_t offset) const {
  if (offset < map_.header.size() || map_.runs.empty()) {
    return path();
  }
  return files_[map_.runs[map_.RunAt(offset)].source]->path();
}

absl::Status AssembledFile::ReadAt(uint64_t offset, std::span<std::byte> out) {
  if (offset > map_.image_bytes || out.size() > map_.image_bytes - offset) {
    return absl::OutOfRangeError(absl::StrCat("read '", path(), "' and others: ", out.size(),
                                              " bytes at offset ", offset, " of an image of ",
                                              map_.image_bytes));
  }
  absl::Status status;
  map_.ForEach(offset, out.size(),
               [&](uint64_t at, uint64_t bytes, std::optional<uint32_t> source, uint64_t from) {
                 const std::span<std::byte> to =
                     out.subspan(static_cast<size_t>(at - offset), static_cast<size_t>(bytes));
                 if (source) {
                   status = files_[*source]->ReadAt(from, to);
                 } else {
                   std::memcpy(to.data(), map_.header.data() + from, to.size());
                 }
                 return status.ok();
               });
  return status;
}

absl::StatusOr<FileInfo> AssembledFile::Info() {
  HF_ASSIGN_OR_RETURN(FileInfo info, files_.front()->Info());
  info.bytes = map_.image_bytes;
  return info;
}

}  // namespace holdfast
