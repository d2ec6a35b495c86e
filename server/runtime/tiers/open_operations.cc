// Copies of the durable tiers opened for clients, who read them by themselves.
#include <fcntl.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/errno_status.h"
#include "base/log.h"
#include "base/status.h"
#include "base/utf8.h"
#include "server/runtime/found_state.h"
#include "server/runtime/passed_files.h"
#include "server/runtime/tiers/operation_parts.h"
#include "server/runtime/tiers/worker_group.h"
#include "tiers/image/kept.h"

namespace holdfast {
namespace {

void LeaveOpen(PassedFiles& files) {
  for (UniqueFd& fd : files.descriptors) {
    static_cast<void>(fd.release());
  }
}

// A descriptor of its own: the File goes with the operation.
absl::Status Add(const File& file, PassedFiles& files) {
  UniqueFd fd(::fcntl(file.fd(), F_DUPFD_CLOEXEC, 0));
  if (!fd.valid()) {
    return ErrnoStatus(errno, "pass", file.path());
  }
  files.descriptors.push_back(std::move(fd));
  return absl::OkStatus();
}

}  // namespace

std::shared_ptr<PassedFiles> FilesClosedBy(std::weak_ptr<WorkerGroup> closer, DrainId own) {
  return {new PassedFiles(), [closer = std::move(closer), own](PassedFiles* last) {
            // (In two steps: whichever of the two ends of the operation comes, it frees them.)
            const std::shared_ptr<PassedFiles> files(last);
            const std::shared_ptr<WorkerGroup> group = closer.lock();
            if (files->descriptors.empty()) {
              return;
            }
            if (group == nullptr) {
              return LeaveOpen(*files);
            }
            auto operation = std::make_shared<Operation>(
                own,
                [files](Operation& op) -> Event {
                  const TransferControl::Call call(op.control().get(), "close", "a copy");
                  files->descriptors.clear();
                  return TimerFired{};
                },
                [files]() -> Event {
                  LeaveOpen(*files);  // the daemon stops
                  return TimerFired{};
                });
            operation->AnswersItself();
            group->Submit(std::move(operation), false);
          }};
}

absl::StatusOr<std::string> ReadRecordOf(const Context& context, size_t drive,
                                         const ReadableShard& shard, Operation& operation) {
  TierPlace& place = PlaceOf(*context, drive);
  HF_ASSIGN_OR_RETURN(const std::shared_ptr<CopyStore> store, StoreOf(place, operation));
  const TransferControl::Call call(operation.control().get(), "open a copy in", place.dir());
  HF_ASSIGN_OR_RETURN(
      const std::unique_ptr<CopyStore::Reading> reading,
      store->OpenCopy({shard.copy.id, shard.copy.job_name, shard.copy.world_size}, {}));
  return reading->record_file();
}

absl::StatusOr<std::shared_ptr<const RemoteParts::Copy>> OpenForParts(
    const Context& context, const CopyKey& key, const std::function<void(RemoteParts::Work)>& run) {
  TierPlace& place = PlaceOf(*context, std::nullopt);
  std::vector<std::string> lines;
  absl::StatusOr<std::shared_ptr<CopyStore>> store = place.Store(&lines);
  for (const std::string& line : lines) {
    LogInfo(absl::StrCat(place.dir(), ": ", Utf8Text(line)));
  }
  if (!store.ok()) {
    Judge(*context, place, store.status());
    return absl::UnavailableError(Message(store.status()));
  }
  absl::StatusOr<std::unique_ptr<CopyStore::Reading>> opened =
      (*store)->OpenCopy({key.id, key.job_name, key.world_size}, {});
  absl::StatusOr<RecordAndLayout> image =
      opened.ok() ? DecodeRecordAndLayout((*opened)->record_file()) : opened.status();
  Judge(*context, place, image.status());
  if (!image.ok()) {
    return IsCopysFault(image.status(), TierKind::kRemote)
               ? absl::DataLossError(Message(image.status()))
               : image.status();
  }
  // Closing may hang, too.
  const std::shared_ptr<CopyStore::Reading> reading((*opened).release(),
                                                    [run](CopyStore::Reading* last) {
                                                      run([last](bool may) {
                                                        if (may) {
                                                          delete last;
                                                        }  // else left to the end of the process
                                                      });
                                                    });
  auto copy = std::make_shared<RemoteParts::Copy>();
  copy->record = reading->record_file();
  copy->image = *std::move(image);
  copy->bytes = FileBytes(copy->image.record);
  copy->read = [reading, place = context->remote](uint64_t offset, std::span<std::byte> into) {
    const MonotonicTime began = Clock::System()->Now();
    const absl::Status read = reading->image().ReadAt(offset, into);
    if (read.ok()) {
      place->CountRead(into.size(), Clock::System()->Now() - began);
    }
    return read;
  };
  return std::shared_ptr<const RemoteParts::Copy>(std::move(copy));
}

DurableOpened OpenForClient(const Context& context, std::optional<size_t> drive,
                            const OpenDurable& action, std::shared_ptr<PassedFiles> files,
                            Operation& operation) {
  TierPlace& place = PlaceOf(*context, drive);
  const auto failed = [&](absl::Status status) {
    Judge(*context, place, status);
    const bool bad = IsCopysFault(status, action.tier);
    return DurableOpened{action.drain, std::move(status), bad, {}, nullptr};
  };
  const absl::StatusOr<std::shared_ptr<CopyStore>> store = StoreOf(place, operation);
  if (!store.ok()) {
    Judge(*context, place, store.status());
    return {action.drain, store.status(), false, {}, nullptr};
  }
  const TransferControl::Call call(operation.control().get(), "open a copy in", place.dir());
  // (Not past the page cache: it is mapped.)
  absl::StatusOr<std::unique_ptr<CopyStore::Reading>> reading =
      (*store)->OpenCopy({action.key.id, action.key.job_name, action.key.world_size}, {});
  if (!reading.ok()) {
    return failed(reading.status());
  }
  absl::StatusOr<std::unique_ptr<File>> record = (*reading)->OpenRecord();
  if (!record.ok()) {
    return failed(record.status());
  }
  for (const File* file : {&(*reading)->image(), record->get()}) {
    if (const absl::Status added = Add(*file, *files); !added.ok()) {
      return {action.drain, absl::UnavailableError(added.message()), false, {}, nullptr};
    }
  }
  Judge(*context, place, absl::OkStatus());
  return {action.drain, absl::OkStatus(), false, ToSealedCopy((*reading)->record()),
          std::move(files)};
}

}  // namespace holdfast
