#include "tiers/transfer/read_only_file.h"

#include "absl/strings/str_cat.h"

namespace holdfast {

absl::Status ReadOnlyFile::ReadOnly() const {
  return absl::FailedPreconditionError(absl::StrCat("'", path(), "': it is only read"));
}

absl::Status ReadOnlyFile::WriteAt(uint64_t /*offset*/, std::span<const std::byte> /*data*/) {
  return ReadOnly();
}
absl::Status ReadOnlyFile::Allocate(uint64_t /*offset*/, uint64_t /*bytes*/) {
  return ReadOnly();
}
absl::Status ReadOnlyFile::Truncate(uint64_t /*bytes*/) {
  return ReadOnly();
}
absl::Status ReadOnlyFile::SyncData() {
  return ReadOnly();
}
absl::Status ReadOnlyFile::Sync() {
  return ReadOnly();
}
absl::Status ReadOnlyFile::SetOwner(uint32_t /*uid*/, uint32_t /*gid*/) {
  return ReadOnly();
}
absl::Status ReadOnlyFile::SetMode(uint32_t /*mode*/) {
  return ReadOnly();
}
absl::StatusOr<DirectAlignment> ReadOnlyFile::Alignment() {
  return absl::UnimplementedError(absl::StrCat("'", path(), "': no direct I/O"));
}
absl::StatusOr<bool> ReadOnlyFile::NobodyElseHasIt() {
  return false;
}

}  // namespace holdfast
