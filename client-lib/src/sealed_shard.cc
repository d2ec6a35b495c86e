#include "client-lib/src/sealed_shard.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/digest.h"
#include "base/status.h"
#include "client-lib/src/errors.h"
#include "tiers/image/layout_rules.h"

namespace holdfast::client {
namespace {

constexpr char kRemote[] = "remote";

Result<std::string> ReadRecordFile(int fd) {
  struct stat st = {};
  if (::fstat(fd, &st) != 0) {
    return SystemError(CodeOfFileError(errno), errno, "look at the record that ckptd sent");
  }
  if (!S_ISREG(st.st_mode) || st.st_size <= 0 ||
      static_cast<uint64_t>(st.st_size) > kRecordBytesMax) {
    return Status(Code::kCorrupt,
                  absl::StrCat("the record is a file of ", st.st_size, " bytes; at most ",
                               kRecordBytesMax, " are possible"));
  }
  std::string bytes(static_cast<size_t>(st.st_size), '\0');
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t got =
        ::pread(fd, bytes.data() + done, bytes.size() - done, static_cast<off_t>(done));
    if (got < 0 && errno != EINTR) {
      return SystemError(CodeOfFileError(errno), errno, "read the record");
    }
    if (got == 0) {
      return Status(Code::kCorrupt, absl::StrCat("the record was cut short after ", done, " of ",
                                                 bytes.size(), " bytes"));
    }
    done += got > 0 ? static_cast<size_t>(got) : 0;
  }
  return bytes;
}

// The record must be of the very copy that the daemon named, and that of what was asked for.
Status CheckIdentity(const ShardRecord& record, const wire::Source& source,
                     const SealedShard::Expected& expected) {
  const bool same = record.id.job.ToBytes() == source.job_uuid &&
                    record.id.attempt == source.attempt && record.id.step == source.step &&
                    record.id.rank == source.rank && record.world_size == source.world_size &&
                    record.image_bytes == source.image_bytes &&
                    record.generation == source.generation;
  if (!same) {
    return Status(Code::kCorrupt,
                  absl::StrCat("the record says ", record.id.ToString(), ", ", record.image_bytes,
                               " bytes, generation ", record.generation, "; expected was attempt ",
                               source.attempt, " step ", source.step, " rank ", source.rank, ", ",
                               source.image_bytes, " bytes, generation ", source.generation));
  }
  if (record.job_name != expected.job || record.id.rank != expected.rank) {
    return Status(
        Code::kCorrupt,
        absl::StrCat("the copy is of job '", ForWire(record.job_name, kJobNameBytesMax), "' rank ",
                     record.id.rank, ", wanted was job '", expected.job, "' rank ", expected.rank));
  }
  return Status();
}

}  // namespace

bool CopyIsBad(const Status& load) {
  return load.code() == Code::kCorrupt || load.code() == Code::kUnreadable;
}

Result<std::unique_ptr<SealedShard>> SealedShard::Open(const wire::Source& source,
                                                       const std::vector<ForkClosedFd>& descriptors,
                                                       const Expected& expected,
                                                       const SlotMapping* mine) {
  std::unique_ptr<SealedShard> shard(new SealedShard());
  // 1. The record.
  HF_TRY_ASSIGN(const std::string bytes, ReadRecordFile(descriptors[1].get()));
  absl::StatusOr<RecordAndLayout> read = DecodeRecordAndLayout(bytes);
  if (!read.ok()) {
    const bool newer = read.status().code() == absl::StatusCode::kFailedPrecondition;
    return Status(newer ? Code::kUnreadable : Code::kCorrupt, Message(read.status()));
  }
  shard->sealed_ = *std::move(read);
  const ShardRecord& record = shard->sealed_.record;
  shard->ranges_ = DigestedRanges(shard->sealed_.layout);
  shard->places_ = PlacesInFile(shard->sealed_);
  HF_TRY(CheckIdentity(record, source, expected));
  if (record.kept && (source.tier != kRemote || mine != nullptr)) {
    return Status(Code::kCorrupt,
                  "its record is of an image that leaves slices out, as only the remote tier has "
                  "them");
  }
  // 2. The image.
  if (source.parts_bytes != 0) {
    HF_TRY(shard->ReserveImage(FileBytes(record)));
  }
  const uint64_t file_bytes = shard->in_parts() ? source.parts_bytes : FileBytes(record);
  if (mine == nullptr) {
    HF_TRY_ASSIGN(shard->mapping_, SlotMapping::Map(descriptors[0].get(), file_bytes,
                                                    SlotMapping::Access::kReadOnly));
  }
  std::byte* const mapped = mine != nullptr ? mine->data() : shard->mapping_->data();
  shard->image_ = shard->in_parts() ? shard->image_ : mapped;
  shard->populated_ = mine != nullptr && mine->populated(file_bytes);
  shard->guard_ = std::make_unique<FaultGuard>(mapped, file_bytes);
  if (!shard->guard_->ok()) {
    return Status(Code::kInternal,
                  absl::StrCat("more than ", kFaultGuardsMax,
                               " slots and files of copies are mapped in this process"));
  }
  return shard;
}

SealedShard::~SealedShard() {
  if (in_parts() && !fork_owner_.forked()) {
    ::munmap(image_, reserved_bytes_);
  }
}

Status SealedShard::ReserveImage(uint64_t bytes) {
  void* const at =
      ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) {
    return SystemError(Code::kInternal, errno,
                       absl::StrCat("reserve addresses for an image of ", bytes, " bytes"));
  }
  static_cast<void>(::madvise(at, bytes, MADV_DONTFORK));  // nothing is lost if it is
  image_ = static_cast<std::byte*>(at);
  reserved_bytes_ = bytes;
  return Status();
}

Status SealedShard::AddOwner(const wire::Source& source,
                             const std::vector<ForkClosedFd>& descriptors,
                             const Expected& expected) {
  if (!together_.has_value()) {
    absl::StatusOr<WholeImage> together = WholeImage::Of(sealed_);
    if (!together.ok()) {
      const bool bad = absl::IsDataLoss(together.status());
      return Status(bad ? Code::kCorrupt : Code::kInternal, Message(together.status()));
    }
    together_.emplace(*std::move(together));
  }
  HF_TRY_ASSIGN(const std::unique_ptr<SealedShard> owner,
                Open(source, descriptors, expected, /*mine=*/nullptr));
  const Rank rank = owner->record().id.rank;
  const absl::Status added =
      together_->Add({&owner->sealed_, absl::StrCat("rank ", rank, "'s file")});
  if (!added.ok()) {
    return Status(Code::kCorrupt, Message(added));
  }
  owners_.push_back({rank, std::move(owner->mapping_), std::move(owner->guard_)});
  if (owners_.size() < together_->owners().size()) {
    return Status();
  }
  absl::StatusOr<ImageMap> whole = (*std::exchange(together_, std::nullopt)).Finish();
  if (!whole.ok()) {
    return Status(Code::kCorrupt, Message(whole.status()));
  }
  whole_ = *std::move(whole);
  return Status();
}

bool SealedShard::faulted() const {
  return guard_->faulted() || std::any_of(owners_.begin(), owners_.end(), [](const Owner& owner) {
           return owner.guard->faulted();
         });
}

// A slice's bytes are never in two runs: each was added as a whole.
const ImageRun& SealedShard::RunOf(size_t i) const {
  return whole_.runs[whole_.RunAt(sealed_.layout.slices[i].image_offset)];
}

const std::byte* SealedShard::SliceBytes(size_t i) const {
  const Slice& slice = sealed_.layout.slices[i];
  if (places_[i].has_value()) {
    return image_ + *places_[i];
  }
  if (slice.bytes == 0) {
    return image_;  // it has no bytes, and may lie behind all that have
  }
  const ImageRun& run = RunOf(i);
  const std::byte* const file = run.source == 0 ? image_ : owners_[run.source - 1].mapping->data();
  return file + run.source_offset + (slice.image_offset - run.offset);
}

CopyOutRange SealedShard::SliceRange(size_t i, void* to) const {
  const DigestedRange& range = ranges_[i + 1];
  return {to, SliceBytes(i), range.bytes, sealed_.record.digests.data() + range.first_digest,
          /*device=*/-1};
}

CopyOutRange SealedShard::SlicePart(size_t i, uint64_t begin, uint64_t bytes) const {
  CopyOutRange part = SliceRange(i, nullptr);
  part.from = SliceBytes(i) + begin;
  part.bytes = bytes;
  part.digests += begin / kDigestBlockBytes;
  part.in_slice = begin;
  return part;
}

CopyOutRange SealedShard::HeaderRange() const {
  const std::optional<KeptSlices>& kept = sealed_.record.kept;
  return {nullptr, image_, kept ? kept->header_bytes : ranges_[0].bytes,
          kept ? kept->header_digests.data() : sealed_.record.digests.data(), /*device=*/-1};
}

Status SealedShard::MismatchError(const CopyMismatch& mismatch, std::optional<size_t> slice) const {
  const DigestedRange& range = ranges_[slice.has_value() ? *slice + 1 : 0];
  const ShardRecord& record = sealed_.record;
  std::string name = slice.has_value()
                         ? image_internal::QuoteName(sealed_.layout.slices[*slice].name)
                         : "the header";
  if (slice.has_value() && !Has(*slice)) {
    absl::StrAppend(&name, ", in the file of rank ", owners_[RunOf(*slice).source - 1].rank, ",");
  }
  const uint64_t expected = slice.has_value() || !record.kept
                                ? record.digests[range.first_digest + mismatch.block]
                                : record.kept->header_digests[mismatch.block];
  return Status(
      Code::kCorrupt,
      absl::StrCat(name, " at attempt ", record.id.attempt, " step ", record.id.step, " rank ",
                   record.id.rank, ": block ", mismatch.block, " (image offset ",
                   range.image_offset + mismatch.block * kDigestBlockBytes, ") has digest ",
                   absl::Hex(mismatch.actual, absl::kZeroPad16), " instead of ",
                   absl::Hex(expected, absl::kZeroPad16)));
}

}  // namespace holdfast::client
