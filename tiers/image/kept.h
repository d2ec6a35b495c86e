// Images in the remote tier that leave slices out, since other ranks' files have the same bytes
// (docs/formats.md, "Images that leave slices out"): what stays in such a file, and how the whole
// image is put together again.
//
//   HF_ASSIGN_OR_RETURN(auto part, PlanPart(image, owners, plan));   // none: nothing is left out
//   // write part->file.record.image_bytes bytes: part->from_whole says what lies where
//   …
//   HF_ASSIGN_OR_RETURN(WholeImage whole, WholeImage::Of(image));
//   for (const Rank rank : whole.owners()) {
//     // read that rank's record
//     HF_RETURN_IF_ERROR(whole.Add({&its_image, its_path}));
//   }
//   HF_ASSIGN_OR_RETURN(ImageMap map, std::move(whole).Finish());
//   // read byte by byte through `map`: own file, owners' files, and the header made anew
//
// Pure functions, thread-safe; a WholeImage is for one thread. The caller owns what it gets.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "tiers/image/record.h"

namespace holdfast {

// What decoding a record says of it, too (ShardRecord::likeness).
Likeness LikenessOf(const ShardRecord& record, const Layout& layout);

// The tensor slices alone, with no place in any image: what replicas have in common, and what
// Ownership is computed of.
Layout TensorsOf(const Layout& layout);

// Names who gave the slices out among whom: shards of this content, on these ranks, ascending.
LayoutHash PlanHash(const LayoutHash& content, std::span<const Rank> ranks);

// Length of the image's file.
uint64_t FileBytes(const ShardRecord& record);

// A run of an image's bytes, and where they are read from.
struct ImageRun {
  uint64_t offset = 0;
  uint64_t bytes = 0;
  uint32_t source = 0;  // which of several
  uint64_t source_offset = 0;
  bool operator==(const ImageRun&) const = default;
};
// An image that is put together: its header, then the runs, in order and without gaps.
struct ImageMap {
  std::string header;
  std::vector<ImageRun> runs;
  uint64_t image_bytes = 0;

  // Calls part(at, bytes, source or none: the header, source offset) for each piece of
  // [offset, offset + bytes), which lies in the image, until one returns false.
  template <typename Part>
  bool ForEach(uint64_t offset, uint64_t bytes, Part part) const {
    const uint64_t end = offset + bytes;
    if (offset < header.size() && offset < end) {
      const uint64_t now = std::min<uint64_t>(end, header.size()) - offset;
      if (!part(offset, now, std::optional<uint32_t>(), offset)) {
        return false;
      }
      offset += now;
    }
    for (size_t i = RunAt(offset); offset < end; ++i) {
      const ImageRun& run = runs[i];
      const uint64_t now = std::min(end, run.offset + run.bytes) - offset;
      if (!part(offset, now, std::optional<uint32_t>(run.source),
                run.source_offset + (offset - run.offset))) {
        return false;
      }
      offset += now;
    }
    return true;
  }
  // The run that has this byte.
  size_t RunAt(uint64_t offset) const;
};

// Of a file that leaves slices out: where its bytes lie in the whole image (source 0), its header
// apart. Of one that does not: the whole image as it is.
ImageMap PlacesInImage(const RecordAndLayout& image);

// Where each slice lies in the file; nothing: it is left out.
std::vector<std::optional<uint64_t>> PlacesInFile(const RecordAndLayout& image);

// What a file holds: itself, where nothing is left out; else the slices that are kept, with their
// places and digests in the file. For those who read or write the file alone.
RecordAndLayout FileImage(const RecordAndLayout& image);

// Of the files that one image is put together of, beside its own: each costs whoever reads it an
// open file or a mapping, and each writer keeps to it.
inline constexpr size_t kOwnersMax = 16'384;

// A file that leaves slices out, planned.
struct PartImage {
  ShardRecord record;    // what lies beside it: the shard's own, with `kept`
  RecordAndLayout file;  // FileImage of that
  ImageMap from_whole;   // of the file; source 0 is the whole image
};
// `image` is of a whole image. `owners`: of each of its tensor slices, in order, the rank that
// keeps it; what the rank itself owns, its objects and what has no bytes stay. So does what more
// than kOwnersMax other ranks have: what the first of them have, in the image's order, is left out.
// Nothing: all of it stays.
absl::StatusOr<std::optional<PartImage>> PlanPart(const RecordAndLayout& image,
                                                  std::span<const Rank> owners,
                                                  const LayoutHash& plan);

// The ranks that own what this file leaves out, ascending, each once.
std::vector<Rank> OwnersOf(const ShardRecord& record);

// Another rank's copy of the same checkpoint. `name` is what errors call it by: a path.
struct OwnerImage {
  const RecordAndLayout* image = nullptr;
  std::string name;
};
// The whole image of a shard whose file leaves slices out, put together of one owner's record after
// the other: nothing of a record is kept but where the slices lie. Nothing that one says is
// believed.
class WholeImage {
 public:
  // `image` outlives it. ResourceExhausted: more than kOwnersMax ranks have what is left out.
  static absl::StatusOr<WholeImage> Of(const RecordAndLayout& image);

  // Whose records are wanted, as OwnersOf has them.
  const std::vector<Rank>& owners() const { return owners_; }
  // The next one's. DataLoss, naming the owner's file, when that does not have what it should.
  absl::Status Add(const OwnerImage& owner);
  // All were added. Source 0 is the shard's own file, source i + 1 that of owners()[i].
  absl::StatusOr<ImageMap> Finish() &&;

 private:
  explicit WholeImage(const RecordAndLayout& image);

  const RecordAndLayout* image_;
  std::vector<Rank> owners_;
  std::vector<DigestedRange> ranges_;
  std::vector<uint64_t> places_;  // of what is left out, in order: where it lies in its file
  size_t added_ = 0;
};

namespace image_internal {

// InvalidArgument if what the record says of its file contradicts itself or the layout.
absl::Status CheckKept(const ShardRecord& record, const Layout& layout);

}  // namespace image_internal
}  // namespace holdfast
