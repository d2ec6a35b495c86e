// A compressed image, read as if it were not: only the frames are read and decompressed that have
// bytes of what is asked for.
//
//   HF_ASSIGN_OR_RETURN(auto file, CompressedFile::Open(std::move(stored), image_bytes));
//   file->ReadAt(offset, out);    // of the image
//
// Thread-safe as the file below; each reader decompresses in its own thread. Whole frames go
// straight to where they are wanted; of the last few that were wanted in part all is kept at hand,
// kFramesAtHand of them at most. A frame that is damaged stays so: it is not read again, as long as
// its reader knows of no more than kBadFramesMax.
// Nobody's descriptor: who wants to map the image cannot have this.
//
// Errors: DataLoss where the file is cut, or a frame damaged; else the file's own.
#pragma once

#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "tiers/compressed/seek_table.h"
#include "tiers/transfer/read_only_file.h"

namespace holdfast {

// As many as threads read one file, whose parts begin amid frames.
inline constexpr size_t kFramesAtHand = 4;
inline constexpr size_t kBadFramesMax = 1024;

// Frames of an open file, decompressed. Its users keep the file.
class FrameReader {
 public:
  FrameReader(File& file, SeekTable table) : file_(file), table_(std::move(table)) {}

  absl::Status ReadAt(uint64_t offset, std::span<std::byte> out) EXCLUDES(mutex_);
  const SeekTable& table() const { return table_; }

 private:
  using Bytes = std::vector<std::byte>;

  absl::Status ReadFrame(uint64_t index, std::span<std::byte> out) EXCLUDES(mutex_);
  absl::Status ReadAndDecompress(uint64_t index, std::span<std::byte> out);
  absl::Status ReadPart(uint64_t index, uint64_t within, std::span<std::byte> out) EXCLUDES(mutex_);
  std::shared_ptr<const Bytes> FindAtHand(uint64_t index) EXCLUDES(mutex_);

  File& file_;
  const SeekTable table_;
  Mutex mutex_;
  struct AtHand {
    uint64_t index = 0;
    std::shared_ptr<const Bytes> bytes;
  };
  std::list<AtHand> at_hand_ GUARDED_BY(mutex_);  // the one that was wanted last comes first
  std::map<uint64_t, absl::Status> bad_ GUARDED_BY(mutex_);  // what is wrong with them
};

class CompressedFile : public ReadOnlyFile {
 public:
  // `file` is not open for direct I/O. DataLoss: it is no such file, of an image of so many bytes.
  static absl::StatusOr<std::unique_ptr<CompressedFile>> Open(std::unique_ptr<File> file,
                                                              uint64_t image_bytes);

  int fd() const override { return -1; }
  const std::string& path() const override { return file_->path(); }
  absl::Status ReadAt(uint64_t offset, std::span<std::byte> out) override;
  // As long as the image. DataLoss: the file was cut or extended since it was opened.
  absl::StatusOr<FileInfo> Info() override;
  uint64_t stored_bytes() const { return stored_bytes_; }

 private:
  CompressedFile(std::unique_ptr<File> file, SeekTable table, uint64_t stored_bytes);

  const std::unique_ptr<File> file_;
  const uint64_t stored_bytes_;
  FrameReader frames_;
};

}  // namespace holdfast
