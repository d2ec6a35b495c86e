#include "client-lib/src/sealed_shard.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "base/digest.h"
#include "base/status.h"
#include "client-lib/src/errors.h"
#include "tiers/image/layout_rules.h"

namespace holdfast::client {
namespace {

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
                                                       const std::vector<UniqueFd>& descriptors,
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
  shard->record_ = std::move(read->record);
  shard->layout_ = std::move(read->layout);
  shard->ranges_ = DigestedRanges(shard->layout_);
  HF_TRY(CheckIdentity(shard->record_, source, expected));
  // 2. The image.
  if (mine == nullptr) {
    HF_TRY_ASSIGN(shard->mapping_, SlotMapping::Map(descriptors[0], source.image_bytes,
                                                    SlotMapping::Access::kReadOnly));
  }
  shard->image_ = mine != nullptr ? mine->data() : shard->mapping_->data();
  shard->populated_ = mine != nullptr && mine->populated(source.image_bytes);
  shard->guard_ = std::make_unique<FaultGuard>(shard->image_, source.image_bytes);
  if (!shard->guard_->ok()) {
    return Status(Code::kInternal,
                  absl::StrCat("more than ", kFaultGuardsMax, " slots are mapped in this process"));
  }
  return shard;
}

CopyOutRange SealedShard::SliceRange(size_t i, void* to) const {
  const DigestedRange& range = ranges_[i + 1];
  return {to, image() + range.image_offset, range.bytes,
          record_.digests.data() + range.first_digest, /*device=*/-1};
}

CopyOutRange SealedShard::HeaderRange() const {
  return {nullptr, image(), ranges_[0].bytes, record_.digests.data(), /*device=*/-1};
}

Status SealedShard::MismatchError(const CopyMismatch& mismatch, std::optional<size_t> slice) const {
  const DigestedRange& range = ranges_[slice.has_value() ? *slice + 1 : 0];
  const std::string name =
      slice.has_value() ? image_internal::QuoteName(layout_.slices[*slice].name) : "the header";
  return Status(
      Code::kCorrupt,
      absl::StrCat(
          name, " at attempt ", record_.id.attempt, " step ", record_.id.step, " rank ",
          record_.id.rank, ": block ", mismatch.block, " (image offset ",
          range.image_offset + mismatch.block * kDigestBlockBytes, ") has digest ",
          absl::Hex(mismatch.actual, absl::kZeroPad16), " instead of ",
          absl::Hex(record_.digests[range.first_digest + mismatch.block], absl::kZeroPad16)));
}

}  // namespace holdfast::client
