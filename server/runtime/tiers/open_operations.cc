// Copies of the durable tiers opened for clients, who read them by themselves.
#include <fcntl.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/errno_status.h"
#include "base/status.h"
#include "server/runtime/found_state.h"
#include "server/runtime/passed_files.h"
#include "server/runtime/tiers/operation_parts.h"
#include "server/runtime/tiers/worker_group.h"

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
