// CopyStore behind the contract that all tiers share: whole buffered copies, found by their job's
// uuid alone.
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "tiers/durable/copy_store_impl.h"

namespace holdfast {
namespace {

absl::Status CheckWithin(absl::string_view what, const ShardId& id, uint64_t offset, uint64_t bytes,
                         uint64_t image_bytes) {
  if (offset > image_bytes || bytes > image_bytes - offset) {
    return absl::OutOfRangeError(absl::StrCat(what, " ", id.ToString(), ": ", bytes,
                                              " bytes at offset ", offset, " of an image of ",
                                              image_bytes));
  }
  return absl::OkStatus();
}

class Writer : public CopyWriter {
 public:
  explicit Writer(std::unique_ptr<CopyStore::Writing> writing) : writing_(std::move(writing)) {}

  absl::Status WriteAt(uint64_t offset, std::span<const std::byte> data) override {
    const NewCopy& copy = writing_->copy();
    if (published_) {
      return absl::FailedPreconditionError(
          absl::StrCat("write ", copy.id.ToString(), ": it is published"));
    }
    HF_RETURN_IF_ERROR(CheckWithin("write", copy.id, offset, data.size(), copy.image_bytes));
    return writing_->image().WriteAt(offset, data);
  }

  absl::Status Publish(std::string_view record_bytes) override {
    const absl::Status status = writing_->Publish(record_bytes).status();
    published_ = published_ || !absl::IsInvalidArgument(status);
    return status;
  }

 private:
  const std::unique_ptr<CopyStore::Writing> writing_;
  bool published_ = false;  // or failed for good
};

class Reader : public CopyReader {
 public:
  explicit Reader(std::unique_ptr<CopyStore::Reading> reading) : reading_(std::move(reading)) {}

  const CopyInfo& info() const override { return reading_->info(); }
  absl::StatusOr<std::string> ReadRecord() override { return reading_->record_file(); }
  absl::Status ReadAt(uint64_t offset, std::span<std::byte> out) override {
    const CopyInfo& copy = info();
    HF_RETURN_IF_ERROR(CheckWithin("read", copy.id, offset, out.size(), copy.image_bytes));
    const absl::Status status = reading_->image().ReadAt(offset, out);
    return absl::IsOutOfRange(status) ? absl::DataLossError(status.message()) : status;
  }
  absl::Status Confirm() override { return reading_->Confirm(); }

 private:
  const std::unique_ptr<CopyStore::Reading> reading_;
};

}  // namespace

std::string_view CopyStore::kind() const {
  return impl_->remote() ? "remote" : "nvme";
}

absl::StatusOr<std::unique_ptr<CopyWriter>> CopyStore::Create(const NewCopy& copy) {
  HF_ASSIGN_OR_RETURN(std::unique_ptr<Writing> writing, impl_->Begin(copy, false, std::nullopt));
  return std::make_unique<Writer>(std::move(writing));
}

absl::StatusOr<std::unique_ptr<CopyReader>> CopyStore::Open(const ShardId& id) {
  HF_ASSIGN_OR_RETURN(const std::string name, impl_->NameOf(id.job));
  HF_ASSIGN_OR_RETURN(std::unique_ptr<Reading> reading, impl_->OpenCopy({id, name, 0}, {}));
  return std::make_unique<Reader>(std::move(reading));
}

absl::Status CopyStore::Remove(const ShardId& id) {
  HF_ASSIGN_OR_RETURN(const std::string name, impl_->NameOf(id.job));
  return RemoveCopy({id, name, 0}).status();
}

absl::StatusOr<Inventory> CopyStore::Scan() {
  impl_->SweepIfNeeded();
  HF_ASSIGN_OR_RETURN(DurableScan scan, ScanAll());
  Inventory inventory;
  for (const JobScan& job : scan.jobs) {
    for (const CheckpointScan& checkpoint : job.checkpoints) {
      for (const CopyEntry& copy : checkpoint.copies) {
        const ShardId id{job.job.job, checkpoint.id.attempt, checkpoint.id.step, copy.rank};
        inventory.copies.push_back(
            {id, checkpoint.world_size, copy.image_bytes, copy.sealed_unix_ms,
             ImagePath({id, job.job.name, checkpoint.world_size}, copy.form)});
      }
    }
  }
  inventory.unreadable = std::move(scan.unreadable);
  return inventory;
}

}  // namespace holdfast
