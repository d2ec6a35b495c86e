// A file that an operation reads from: each read says to the operation that it is under way, so
// that a source which hangs is told from a destination that does.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/env.h"
#include "server/runtime/tiers/operation.h"

namespace holdfast {

class SourceFile : public File {
 public:
  // Keeps both: a thread that hangs in it may outlive everything else.
  SourceFile(std::shared_ptr<File> file, std::shared_ptr<Operation> operation)
      : file_(std::move(file)), operation_(std::move(operation)) {}

  int fd() const override { return file_->fd(); }
  const std::string& path() const override { return file_->path(); }
  absl::Status ReadAt(uint64_t offset, std::span<std::byte> out) override {
    const Operation::SourceCall call(*operation_, absl::StrCat("read '", path(), "'"));
    return file_->ReadAt(offset, out);
  }
  absl::Status WriteAt(uint64_t offset, std::span<const std::byte> data) override {
    return file_->WriteAt(offset, data);
  }
  absl::Status Allocate(uint64_t offset, uint64_t bytes) override {
    return file_->Allocate(offset, bytes);
  }
  absl::Status Truncate(uint64_t bytes) override { return file_->Truncate(bytes); }
  absl::Status SyncData() override { return file_->SyncData(); }
  absl::Status Sync() override { return file_->Sync(); }
  absl::StatusOr<FileInfo> Info() override { return file_->Info(); }
  absl::Status SetOwner(uint32_t uid, uint32_t gid) override { return file_->SetOwner(uid, gid); }
  absl::Status SetMode(uint32_t mode) override { return file_->SetMode(mode); }
  absl::StatusOr<DirectAlignment> Alignment() override { return file_->Alignment(); }
  absl::StatusOr<bool> NobodyElseHasIt() override { return file_->NobodyElseHasIt(); }

 private:
  const std::shared_ptr<File> file_;
  const std::shared_ptr<Operation> operation_;
};

}  // namespace holdfast
