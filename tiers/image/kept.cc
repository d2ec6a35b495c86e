#include "tiers/image/kept.h"

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/digest.h"
#include "base/status.h"
#include "tiers/image/image_header.h"
#include "tiers/image/layout_rules.h"

namespace holdfast {
namespace {

void AppendLittleEndian(uint64_t value, size_t bytes, std::string& out) {
  for (size_t i = 0; i < bytes; ++i) {
    out.push_back(static_cast<char>(value >> (8 * i)));
  }
}

void AppendHash(const LayoutHash& hash, std::string& out) {
  out.append(reinterpret_cast<const char*>(hash.data()), hash.size());
}

// Calls each(slice's index, kept, its place among those that are left out).
template <typename Each>
void ForEachSlice(const KeptSlices& kept, Each each) {
  size_t slice = 0;
  size_t left_out = 0;
  for (size_t run = 0; run < kept.runs.size(); ++run) {
    const bool stays = run % 2 == 0;
    for (uint64_t i = 0; i < kept.runs[run]; ++i, ++slice) {
      each(slice, stays, left_out);
      left_out += stays ? 0 : 1;
    }
  }
}

// Appends a run, or makes the last one longer.
void AddRun(uint64_t offset, uint64_t bytes, uint32_t source, uint64_t source_offset,
            std::vector<ImageRun>& runs) {
  if (bytes == 0) {
    return;
  }
  if (!runs.empty()) {
    ImageRun& last = runs.back();
    if (last.source == source && last.offset + last.bytes == offset &&
        last.source_offset + last.bytes == source_offset) {
      last.bytes += bytes;
      return;
    }
  }
  runs.push_back({offset, bytes, source, source_offset});
}

bool SameTensor(const Slice& a, const Slice& b) {
  return a.kind == SliceKind::kTensor && b.kind == SliceKind::kTensor && a.name == b.name &&
         a.dtype == b.dtype && a.global_shape == b.global_shape && a.place == b.place &&
         a.bytes == b.bytes;
}

// An owner's file, slice by slice of its tensors: where each lies in the file, if it does.
class OwnersFile {
 public:
  explicit OwnersFile(const OwnerImage& owner) : owner_(owner) {
    const RecordAndLayout& image = *owner.image;
    const std::vector<DigestedRange> ranges = DigestedRanges(image.layout);
    const std::optional<KeptSlices>& kept = image.record.kept;
    uint64_t next = kept ? kept->header_bytes : image.layout.header_bytes;
    const auto add = [&](size_t i, bool stays) {
      const Slice& slice = image.layout.slices[i];
      if (slice.kind == SliceKind::kTensor) {
        tensors_.push_back(
            {i, stays ? std::optional(next) : std::nullopt, ranges[i + 1].first_digest});
      }
      next += stays ? slice.bytes : 0;
    };
    if (kept) {
      ForEachSlice(*kept, [&](size_t i, bool stays, size_t) { add(i, stays); });
    } else {
      for (size_t i = 0; i < image.layout.slices.size(); ++i) {
        add(i, true);
      }
    }
  }

  // Where the bytes of that tensor slice lie; `digests` are what they must have.
  absl::StatusOr<uint64_t> Find(size_t tensor, const Slice& wanted,
                                std::span<const uint64_t> digests) const {
    const auto bad = [&](absl::string_view why) {
      return absl::DataLossError(absl::StrCat("'", owner_.name, "' should have ",
                                              image_internal::QuoteName(wanted.name), ": ", why));
    };
    if (tensor >= tensors_.size()) {
      return bad("its record has fewer tensors");
    }
    const Tensor& there = tensors_[tensor];
    const RecordAndLayout& image = *owner_.image;
    if (!SameTensor(wanted, image.layout.slices[there.slice])) {
      return bad("its record has another slice in its place");
    }
    if (!there.offset) {
      return bad("its record says that it leaves it out, too");
    }
    const auto first =
        image.record.digests.begin() + static_cast<std::ptrdiff_t>(there.first_digest);
    if (!std::equal(digests.begin(), digests.end(), first)) {
      return bad("its record has other digests of it");
    }
    return *there.offset;
  }

 private:
  struct Tensor {
    size_t slice = 0;
    std::optional<uint64_t> offset;
    size_t first_digest = 0;
  };
  const OwnerImage& owner_;
  std::vector<Tensor> tensors_;
};

absl::Status CheckIsOwners(const ShardRecord& record, Rank rank, const OwnerImage& owner) {
  const ShardRecord& there = owner.image->record;
  if (there.id.checkpoint() != record.id.checkpoint() || there.id.job != record.id.job ||
      there.world_size != record.world_size || there.id.rank != rank) {
    return absl::DataLossError(absl::StrCat(
        "'", owner.name, "': its record is of ", there.id.ToString(), " of ", there.world_size,
        ", wanted was rank ", rank, " of ", record.id.ToString(), " of ", record.world_size));
  }
  return absl::OkStatus();
}

}  // namespace

size_t ImageMap::RunAt(uint64_t offset) const {
  const auto after =
      std::upper_bound(runs.begin(), runs.end(), offset,
                       [](uint64_t at, const ImageRun& run) { return at < run.offset; });
  return after == runs.begin() ? 0 : static_cast<size_t>(after - runs.begin()) - 1;
}

Layout TensorsOf(const Layout& layout) {
  Layout tensors;
  for (const Slice& slice : layout.slices) {
    if (slice.kind == SliceKind::kTensor) {
      tensors.slices.push_back(slice);
      tensors.slices.back().image_offset = 0;
    }
  }
  return tensors;
}

Likeness LikenessOf(const ShardRecord& record, const Layout& layout) {
  const Layout tensors = TensorsOf(layout);
  Likeness likeness;
  likeness.tensors = HashLayout(EncodeLayout(tensors));
  std::string content;
  AppendHash(likeness.tensors, content);
  size_t digest = DigestBlockCount(layout.header_bytes);
  for (const Slice& slice : layout.slices) {
    const size_t blocks = DigestBlockCount(slice.bytes);
    for (size_t i = 0; slice.kind == SliceKind::kTensor && i < blocks; ++i) {
      AppendLittleEndian(record.digests[digest + i], sizeof(uint64_t), content);
    }
    digest += blocks;
  }
  likeness.content = HashLayout(content);
  return likeness;
}

LayoutHash PlanHash(const LayoutHash& content, std::span<const Rank> ranks) {
  std::string bytes;
  AppendHash(content, bytes);
  for (const Rank rank : ranks) {
    AppendLittleEndian(rank, 4, bytes);
  }
  return HashLayout(bytes);
}

uint64_t FileBytes(const ShardRecord& record) {
  return record.kept ? record.kept->image_bytes : record.image_bytes;
}

RecordAndLayout FileImage(const RecordAndLayout& image) {
  if (!image.record.kept) {
    return image;
  }
  const KeptSlices& kept = *image.record.kept;
  RecordAndLayout file;
  file.record = image.record;
  file.record.kept.reset();
  file.record.image_bytes = file.layout.image_bytes = kept.image_bytes;
  file.record.header_bytes = file.layout.header_bytes = kept.header_bytes;
  file.record.digests = kept.header_digests;
  const std::vector<DigestedRange> ranges = DigestedRanges(image.layout);
  uint64_t next = kept.header_bytes;
  ForEachSlice(kept, [&](size_t i, bool stays, size_t) {
    if (!stays) {
      return;
    }
    Slice& slice = file.layout.slices.emplace_back(image.layout.slices[i]);
    slice.image_offset = next;
    next += slice.bytes;
    const auto first =
        image.record.digests.begin() + static_cast<std::ptrdiff_t>(ranges[i + 1].first_digest);
    file.record.digests.insert(file.record.digests.end(), first,
                               first + static_cast<std::ptrdiff_t>(DigestBlockCount(slice.bytes)));
  });
  return file;
}

ImageMap PlacesInImage(const RecordAndLayout& image) {
  ImageMap places;
  if (!image.record.kept) {
    places.image_bytes = image.record.image_bytes;
    AddRun(0, places.image_bytes, 0, 0, places.runs);
    return places;
  }
  const KeptSlices& kept = *image.record.kept;
  places.image_bytes = kept.image_bytes;
  places.header.resize(kept.header_bytes);
  uint64_t next = kept.header_bytes;
  ForEachSlice(kept, [&](size_t i, bool stays, size_t) {
    if (stays) {
      const Slice& slice = image.layout.slices[i];
      AddRun(next, slice.bytes, 0, slice.image_offset, places.runs);
      next += slice.bytes;
    }
  });
  return places;
}

std::vector<std::optional<uint64_t>> PlacesInFile(const RecordAndLayout& image) {
  std::vector<std::optional<uint64_t>> places(image.layout.slices.size());
  if (!image.record.kept) {
    for (size_t i = 0; i < places.size(); ++i) {
      places[i] = image.layout.slices[i].image_offset;
    }
    return places;
  }
  uint64_t next = image.record.kept->header_bytes;
  ForEachSlice(*image.record.kept, [&](size_t i, bool stays, size_t) {
    if (stays) {
      places[i] = next;
      next += image.layout.slices[i].bytes;
    }
  });
  return places;
}

absl::StatusOr<std::optional<PartImage>> PlanPart(const RecordAndLayout& image,
                                                  std::span<const Rank> owners,
                                                  const LayoutHash& plan) {
  const ShardRecord& record = image.record;
  PartImage part;
  KeptSlices kept;
  kept.plan = plan;
  // 1. Which stay.
  std::vector<Slice> stay;
  std::unordered_set<Rank> others;
  size_t tensor = 0;
  uint64_t data_bytes = 0;
  for (size_t i = 0; i < image.layout.slices.size(); ++i) {
    const Slice& slice = image.layout.slices[i];
    Rank owner = record.id.rank;
    if (slice.kind == SliceKind::kTensor) {
      if (tensor == owners.size()) {
        return absl::InvalidArgumentError("plan a part of an image: too few owners");
      }
      owner = owners[tensor++];
    }
    const bool stays = owner == record.id.rank || slice.bytes == 0 ||
                       (others.size() == kOwnersMax && !others.contains(owner));
    if (kept.runs.empty() && !stays) {
      kept.runs.push_back(0);
    }
    if (kept.runs.empty() || (kept.runs.size() % 2 == 1) != stays) {
      kept.runs.push_back(0);
    }
    ++kept.runs.back();
    if (stays) {
      stay.push_back(slice);
      data_bytes += slice.bytes;
    } else {
      kept.owners.push_back(owner);
      others.insert(owner);
    }
  }
  if (tensor != owners.size() || record.kept) {
    return absl::InvalidArgumentError(
        "plan a part of an image: owners of other slices, or of a part");
  }
  if (kept.owners.empty()) {
    return std::optional<PartImage>();
  }
  // 2. The header of those: it is never longer than that of all.
  kept.header_bytes = image_internal::ImageHeaderBytes(stay, record.id.rank);
  kept.image_bytes = kept.header_bytes + data_bytes;
  part.from_whole.header =
      image_internal::BuildImageHeader(stay, record.id.rank, kept.header_bytes);
  AppendBlockDigests(std::as_bytes(std::span(part.from_whole.header)), kept.header_digests);
  // 3. Where the rest comes from.
  part.from_whole.image_bytes = kept.image_bytes;
  uint64_t next = kept.header_bytes;
  for (const Slice& slice : stay) {
    AddRun(next, slice.bytes, 0, slice.image_offset, part.from_whole.runs);
    next += slice.bytes;
  }
  part.record = record;
  part.record.kept = std::move(kept);
  HF_RETURN_IF_ERROR(image_internal::CheckKept(part.record, image.layout));
  part.file = FileImage({part.record, image.layout});
  return std::optional<PartImage>(std::move(part));
}

std::vector<Rank> OwnersOf(const ShardRecord& record) {
  std::vector<Rank> owners = record.kept ? record.kept->owners : std::vector<Rank>();
  std::sort(owners.begin(), owners.end());
  owners.erase(std::unique(owners.begin(), owners.end()), owners.end());
  return owners;
}

WholeImage::WholeImage(const RecordAndLayout& image)
    : image_(&image),
      owners_(OwnersOf(image.record)),
      ranges_(DigestedRanges(image.layout)),
      places_(image.record.kept->owners.size()) {}

absl::StatusOr<WholeImage> WholeImage::Of(const RecordAndLayout& image) {
  const ShardRecord& record = image.record;
  if (!record.kept) {
    return absl::InvalidArgumentError("put an image together: nothing of it is left out");
  }
  WholeImage whole(image);
  if (whole.owners_.size() > kOwnersMax) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "put the image of ", record.id.ToString(), " together: it lies in the files of ",
        whole.owners_.size(), " other ranks, at most ", kOwnersMax,
        " are read for one; whoever wrote it kept to another limit"));
  }
  // No file has its header: the length is the record's, the bytes are its digests' to judge.
  if (image_internal::ImageHeaderBytes(image.layout.slices, record.id.rank) !=
      record.header_bytes) {
    return absl::DataLossError(absl::StrCat("the record of ", record.id.ToString(),
                                            " has a header of ", record.header_bytes,
                                            " bytes, its slices make another"));
  }
  return whole;
}

absl::Status WholeImage::Add(const OwnerImage& owner) {
  const ShardRecord& record = image_->record;
  if (added_ == owners_.size()) {
    return absl::InvalidArgumentError("put an image together: more owners than it names");
  }
  const Rank rank = owners_[added_];
  HF_RETURN_IF_ERROR(CheckIsOwners(record, rank, owner));
  const OwnersFile file(owner);
  size_t tensor = 0;
  absl::Status status;
  ForEachSlice(*record.kept, [&](size_t i, bool stays, size_t left_out) {
    const Slice& slice = image_->layout.slices[i];
    const size_t place = tensor;
    tensor += slice.kind == SliceKind::kTensor ? 1 : 0;
    if (stays || record.kept->owners[left_out] != rank || !status.ok()) {
      return;
    }
    const std::span<const uint64_t> digests(record.digests.data() + ranges_[i + 1].first_digest,
                                            DigestBlockCount(slice.bytes));
    const absl::StatusOr<uint64_t> there = file.Find(place, slice, digests);
    status = there.status();
    places_[left_out] = there.ok() ? *there : 0;
  });
  HF_RETURN_IF_ERROR(status);
  ++added_;
  return absl::OkStatus();
}

absl::StatusOr<ImageMap> WholeImage::Finish() && {
  const ShardRecord& record = image_->record;
  const Layout& layout = image_->layout;
  if (added_ != owners_.size()) {
    return absl::InvalidArgumentError("put an image together: fewer owners than it names");
  }
  ImageMap whole;
  whole.image_bytes = record.image_bytes;
  whole.header =
      image_internal::BuildImageHeader(layout.slices, record.id.rank, record.header_bytes);
  uint64_t own = record.kept->header_bytes;
  ForEachSlice(*record.kept, [&](size_t i, bool stays, size_t left_out) {
    const Slice& slice = layout.slices[i];
    if (stays) {
      AddRun(slice.image_offset, slice.bytes, 0, own, whole.runs);
      own += slice.bytes;
      return;
    }
    const auto owner =
        std::lower_bound(owners_.begin(), owners_.end(), record.kept->owners[left_out]);
    AddRun(slice.image_offset, slice.bytes, static_cast<uint32_t>(owner - owners_.begin() + 1),
           places_[left_out], whole.runs);
  });
  return whole;
}

namespace image_internal {
namespace {

absl::Status Contradicts(const std::string& why) {
  return absl::InvalidArgumentError(absl::StrCat("what its file keeps: ", why));
}

absl::Status CheckRuns(const KeptSlices& kept, const Layout& layout) {
  uint64_t slices = 0;
  uint64_t left_out = 0;
  for (size_t i = 0; i < kept.runs.size(); ++i) {
    if ((kept.runs[i] == 0 && i > 0) || kept.runs[i] > layout.slices.size() - slices) {
      return Contradicts(absl::StrCat("run ", i, " of ", kept.runs[i], " slices, behind ", slices,
                                      " of ", layout.slices.size()));
    }
    slices += kept.runs[i];
    left_out += i % 2 == 1 ? kept.runs[i] : 0;
  }
  if (slices != layout.slices.size() || left_out == 0 || left_out != kept.owners.size()) {
    return Contradicts(absl::StrCat("its runs are of ", slices, " slices, ", left_out,
                                    " of them left out, ", kept.owners.size(),
                                    " with an owner; the layout has ", layout.slices.size()));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckKept(const ShardRecord& record, const Layout& layout) {
  if (!record.kept) {
    return absl::OkStatus();
  }
  const KeptSlices& kept = *record.kept;
  // 1. Runs and owners.
  HF_RETURN_IF_ERROR(CheckRuns(kept, layout));
  for (const Rank owner : kept.owners) {
    if (owner >= record.world_size || owner == record.id.rank) {
      return Contradicts(absl::StrCat("rank ", owner, " of ", record.world_size,
                                      " is to have what rank ", record.id.rank, " leaves out"));
    }
  }
  // 2. Objects are always their own rank's, and nothing is saved by what has no bytes: so a file
  // that leaves slices out is shorter than the image.
  std::vector<Slice> stay;
  uint64_t data_bytes = 0;
  const Slice* never = nullptr;
  ForEachSlice(kept, [&](size_t i, bool stays, size_t) {
    const Slice& slice = layout.slices[i];
    if (stays) {
      stay.push_back(slice);
      data_bytes += slice.bytes;
    } else if (slice.kind != SliceKind::kTensor || slice.bytes == 0) {
      never = &slice;
    }
  });
  if (never != nullptr) {
    return Contradicts(
        absl::StrCat("it leaves out ", QuoteName(never->name), ", ",
                     never->kind == SliceKind::kTensor ? "which has no bytes" : "an object"));
  }
  // 3. Lengths: they follow from the slices that stay.
  const uint64_t header_bytes = ImageHeaderBytes(stay, record.id.rank);
  if (kept.header_bytes != header_bytes || kept.image_bytes != header_bytes + data_bytes ||
      kept.header_digests.size() != DigestBlockCount(header_bytes)) {
    return Contradicts(absl::StrCat("a header of ", kept.header_bytes, " and a file of ",
                                    kept.image_bytes, " bytes with ", kept.header_digests.size(),
                                    " digests of the header; its slices make ", header_bytes,
                                    " and ", header_bytes + data_bytes));
  }
  return absl::OkStatus();
}

}  // namespace image_internal
}  // namespace holdfast
