// An image that lies in several files, as one that is read: its header is made anew, the rest comes
// from wherever the map says (tiers/image/kept.h).
//
//   auto file = std::make_shared<AssembledFile>(std::move(map), std::move(files));
//   spec.from_file = file;
//   spec.source_name = [file](uint64_t offset) { return file->PathAt(offset); };
//
// As thread-safe as the files. Never written; read without regard to any alignment, so the files
// must not be open for direct I/O.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tiers/image/kept.h"
#include "tiers/transfer/read_only_file.h"

namespace holdfast {

class AssembledFile : public ReadOnlyFile {
 public:
  // One file for each source of the map, at least one; the first one's names this.
  AssembledFile(ImageMap map, std::vector<std::shared_ptr<File>> files);

  // The file that has this byte; the first one's for the header.
  const std::string& PathAt(uint64_t offset) const;

  int fd() const override { return files_.front()->fd(); }
  const std::string& path() const override { return files_.front()->path(); }
  absl::Status ReadAt(uint64_t offset, std::span<std::byte> out) override;
  absl::StatusOr<FileInfo> Info() override;  // the first one's, as long as the image

 private:
  const ImageMap map_;
  const std::vector<std::shared_ptr<File>> files_;
};

}  // namespace holdfast
