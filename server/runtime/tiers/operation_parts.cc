#include "server/runtime/tiers/operation_parts.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/errno_status.h"
#include "base/log.h"
#include "base/status.h"
#include "base/utf8.h"
#include "tiers/compressed/seek_table.h"

namespace holdfast {
namespace {

// Whether it says something of the drive or the mount, and not of one job's files there (another
// run's directory, a name that is taken), of a copy, or of its source.
bool IsPlacesFault(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kDeadlineExceeded:
    case absl::StatusCode::kResourceExhausted:
    case absl::StatusCode::kPermissionDenied:
    case absl::StatusCode::kInternal:
      return true;
    case absl::StatusCode::kDataLoss:
      return Message(status).find("(EIO)") != std::string::npos;
    default:
      return false;
  }
}

}  // namespace

absl::StatusOr<std::shared_ptr<CopyStore>> StoreOf(TierPlace& place, Operation& operation) {
  const TransferControl::Call call(operation.control().get(), "open", place.dir());
  std::vector<std::string> lines;
  absl::StatusOr<std::shared_ptr<CopyStore>> store = place.Store(&lines);
  for (const std::string& line : lines) {
    LogInfo(absl::StrCat(place.dir(), ": ", Utf8Text(line)));
  }
  return store;
}

BlockIoMode ModeOf(const v1::NvmeConfig& config) {
  switch (config.engine()) {
    case v1::NvmeConfig::IO_ENGINE_IO_URING:
      return BlockIoMode::kIoUring;
    case v1::NvmeConfig::IO_ENGINE_THREADS:
      return BlockIoMode::kThreads;
    default:
      return BlockIoMode::kAuto;
  }
}

absl::StatusOr<BlockIo*> ThreadIo(DrainContext& context, TierPlace& place) {
  thread_local std::unique_ptr<BlockIo> io;
  thread_local ThreadPriority has;
  const v1::NvmeConfig& config = context.nvme;
  const ThreadPriority wanted = context.nvme_priority.Get();
  if (io == nullptr) {
    BlockIoOptions options;
    options.depth = config.depth();
    options.mode = ModeOf(config);
    HF_ASSIGN_OR_RETURN(io, CreateBlockIo(options));
    place.SetEngine(io->description());
    LogInfo(absl::StrCat("nvme ", place.dir(), ": ", io->description()));
    has = wanted;  // its threads take this one's
  }
  if (!(has == wanted)) {
    if (const absl::Status set = io->SetPriority(wanted); !set.ok()) {
      LogWarning(absl::StrCat("nvme ", place.dir(), ": ", Message(set)));
    }
    has = wanted;
  }
  return io.get();
}

TierPlace& PlaceOf(DrainContext& context, std::optional<size_t> drive) {
  return drive ? *context.drives[*drive] : *context.remote;
}

Event AwayEvent(DrainContext& context, TierPlace& place, const absl::Status& why) {
  const bool remote = &place == context.remote.get();
  return TierAway{remote ? TierKind::kRemote : TierKind::kNvme, place.dir(), why};
}

TierPlace::Noted Noted(DrainContext& context, TierPlace& place, const absl::Status& status) {
  const TierPlace::Noted noted = place.Note(status);
  if (noted.went_away) {
    context.outlet->Post(AwayEvent(context, place, noted.away));
  }
  return noted;
}

absl::Status Judged(DrainContext& context, TierPlace& place, const absl::Status& status) {
  if (!status.ok() && !IsPlacesFault(status)) {
    return status;
  }
  const TierPlace::Noted noted = Noted(context, place, status);
  return status.ok() ? noted.away : status;
}

void Judge(DrainContext& context, TierPlace& place, const absl::Status& status) {
  Judged(context, place, status).IgnoreError();
}

// A drive whose sectors cannot be read says EIO; a mount says so too when it has lost its servers
// for a minute, so there only what was read is judged.
bool IsCopysFault(const absl::Status& status, TierKind tier) {
  const bool fault = absl::IsDataLoss(status) || absl::IsNotFound(status) ||
                     absl::IsInvalidArgument(status) || absl::IsOutOfRange(status);
  return fault && (tier == TierKind::kNvme || absl::IsNotFound(status) || !IsErrno(status));
}

absl::Status OfWhatLiesThere(const absl::Status& status, CopyStore::Reading& reading) {
  return !status.ok() && reading.WasReplaced()
             ? WrittenAnewMeanwhile(reading.info().location, status)
             : status;
}

absl::Status WrittenAnewMeanwhile(const std::string& location, const absl::Status& status) {
  return absl::UnavailableError(
      absl::StrCat("'", location, "' was written anew while it was read: read it again; before, ",
                   status.message()));
}

std::string OpeningText(uint64_t opening) {
  std::string bytes(sizeof(opening), '\0');
  for (size_t i = 0; i < sizeof(opening); ++i) {
    bytes[i] = static_cast<char>(opening >> (8 * i));
  }
  return bytes;
}

absl::Status NotYet() {
  return absl::InternalError("the copy was not written");
}

absl::Status Cancelled(std::string_view what) {
  return absl::CancelledError(absl::StrCat(ToAbsl(what), " was cancelled"));
}

uint32_t PieceUnitOf(const CopyStore::Reading& reading) {
  return reading.compressed() ? uint32_t{kFrameBytes} : 1;
}

}  // namespace holdfast
