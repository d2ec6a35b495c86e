// An image on its way into a file, compressed frame by frame: whoever writes a frame compresses it
// in its own thread, and any frames may be written at once.
//
//   CompressingFile file(std::move(created), image_bytes, /*level=*/3);
//   … several threads: file.WriteAt(i * kFrameBytes, frame) …
//   HF_RETURN_IF_ERROR(file.Finish());            // all were written: the seek table
//   file.stored_bytes(), file.ReadAt(…)           // what will be read
//
// In the file frames lie in the image's order, so that `zstd -d` gives back the image. A frame that
// comes before those in front of it is kept in memory until they are there, and is written by
// whoever brings the last of them: whoever writes does not run ahead further than it has memory
// for (BufferedCopySpec::ahead_max).
//
// Thread-safe, but for Finish, which comes after all writes.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "base/mutex.h"
#include "tiers/compressed/compressed_file.h"

namespace holdfast {

class CompressingFile : public File {
 public:
  // `file`: empty, open for writing, not for direct I/O.
  CompressingFile(std::unique_ptr<File> file, uint64_t image_bytes, int level);

  int fd() const override { return -1; }
  const std::string& path() const override { return file_->path(); }
  // Once for each frame, all of it: InvalidArgument else.
  absl::Status WriteAt(uint64_t offset, std::span<const std::byte> data) override;
  // FailedPrecondition: some frames were not written.
  absl::Status Finish();
  int stored_fd() const { return file_->fd(); }  // of what lies there
  // Of the whole file, after Finish.
  uint64_t stored_bytes() const { return stored_bytes_; }

  absl::Status ReadAt(uint64_t offset, std::span<std::byte> out) override;  // after Finish
  absl::Status SyncData() override { return file_->SyncData(); }
  absl::Status Sync() override { return file_->Sync(); }
  absl::StatusOr<FileInfo> Info() override { return file_->Info(); }  // as it is stored
  absl::Status SetOwner(uint32_t uid, uint32_t gid) override { return file_->SetOwner(uid, gid); }
  absl::Status SetMode(uint32_t mode) override { return file_->SetMode(mode); }
  absl::Status Allocate(uint64_t offset, uint64_t bytes) override;  // nobody knows how much
  absl::Status Truncate(uint64_t bytes) override;
  absl::StatusOr<DirectAlignment> Alignment() override;
  absl::StatusOr<bool> NobodyElseHasIt() override { return file_->NobodyElseHasIt(); }

 private:
  using Bytes = std::vector<std::byte>;
  struct Placed {
    uint64_t offset = 0;
    Bytes stored;
  };

  absl::Status CheckFrame(uint64_t offset, uint64_t bytes) const;
  // The frame, and those behind it that waited for it, as far as their places are known now.
  absl::StatusOr<std::vector<Placed>> Place(uint64_t index, Bytes stored) EXCLUDES(mutex_);

  const std::unique_ptr<File> file_;
  const uint64_t image_bytes_;
  const int level_;
  Mutex mutex_;
  std::map<uint64_t, Bytes> waiting_ GUARDED_BY(mutex_);  // by frame
  std::vector<uint32_t> sizes_ GUARDED_BY(mutex_);        // of those that have a place
  uint64_t end_ GUARDED_BY(mutex_) = 0;                   // of the last of them
  uint64_t stored_bytes_ = 0;
  std::optional<FrameReader> frames_;  // after Finish
};

}  // namespace holdfast
