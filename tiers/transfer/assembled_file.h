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

#include "base/env.h"
#include "tiers/image/kept.h"

namespace holdfast {

class AssembledFile : public File {
 public:
  // One file for each source of the map, at least one; the first one's names this.
  AssembledFile(ImageMap map, std::vector<std::shared_ptr<File>> files);

  // The file that has this byte; the first one's for the header.
  const std::string& PathAt(uint64_t offset) const;

  int fd() const override { return files_.front()->fd(); }
  const std::string& path() const override { return files_.front()->path(); }
  absl::Status ReadAt(uint64_t offset, std::span<std::byte> out) override;
  absl::Status WriteAt(uint64_t offset, std::span<const std::byte> data) override;
  absl::Status Allocate(uint64_t offset, uint64_t bytes) override;
  absl::Status Truncate(uint64_t bytes) override;
  absl::Status SyncData() override;
  absl::Status Sync() override;
  absl::StatusOr<FileInfo> Info() override;  // the first one's, as long as the image
  absl::Status SetOwner(uint32_t uid, uint32_t gid) override;
  absl::Status SetMode(uint32_t mode) override;
  absl::StatusOr<DirectAlignment> Alignment() override;
  absl::StatusOr<bool> NobodyElseHasIt() override;

 private:
  absl::Status ReadOnly() const;

  const ImageMap map_;
  const std::vector<std::shared_ptr<File>> files_;
};

}  // namespace holdfast
