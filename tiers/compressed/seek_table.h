// Where the frames of a compressed image lie in its file (docs/formats.md, "Compressed images"):
// the seek table of Zstandard's seekable format, a skippable frame at the file's end.
//
//   std::string table = EncodeSeekTable(sizes);                  // behind the last frame
//   HF_ASSIGN_OR_RETURN(SeekTable table, ReadSeekTable(file, stored_bytes, image_bytes));
//   table.frame(i).offset, .stored_bytes, .bytes
//
// Every frame but the last holds kFrameBytes of the image: which one has a byte needs no search.
// What a table says is believed only so far as it fits the lengths of file and image; that the
// bytes are right is for the image's digests to tell. Nor are those lengths believed, which may be
// of a file that is all holes: what is read of a table, and the memory for it, grow with what of it
// has been right so far.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/env.h"

namespace holdfast {

inline constexpr uint64_t kFrameBytes = uint64_t{1} << 20;
// No frame of so many bytes is longer, however little they can be compressed.
inline constexpr uint64_t kStoredFrameBytesMax = kFrameBytes + (kFrameBytes >> 8) + 512;

struct StoredFrame {
  uint64_t offset = 0;  // in the file
  uint64_t stored_bytes = 0;
  uint64_t bytes = 0;  // of the image
};

class SeekTable {
 public:
  // Of frames that lie one behind the other, by their lengths in the file.
  SeekTable(uint64_t image_bytes, const std::vector<uint32_t>& stored);

  uint64_t image_bytes() const { return image_bytes_; }
  uint64_t frames() const { return offsets_.size() - 1; }
  uint64_t frames_end() const { return offsets_.back(); }  // where the table itself begins
  StoredFrame frame(uint64_t i) const;

 private:
  uint64_t image_bytes_;
  std::vector<uint64_t> offsets_;  // of the frames, and of what follows the last
};

// How many frames an image of so many bytes has.
uint64_t FramesOf(uint64_t image_bytes);
// How long the table of so many frames is.
uint64_t SeekTableBytes(uint64_t frames);

std::string EncodeSeekTable(uint64_t image_bytes, const std::vector<uint32_t>& stored);
// `stored_bytes`: the file's length. DataLoss, naming the file: there is no table at its end, or it
// contradicts the lengths of file and image.
absl::StatusOr<SeekTable> ReadSeekTable(File& file, uint64_t stored_bytes, uint64_t image_bytes);
// The same of the table's bytes; what is wrong with them, without the file's name.
absl::StatusOr<SeekTable> DecodeSeekTable(std::string_view table, uint64_t stored_bytes,
                                          uint64_t image_bytes);

}  // namespace holdfast
