// Copies of the durable tiers opened for clients, who read them by themselves.
#include <fcntl.h>

#include <algorithm>
#include <atomic>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/errno_status.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/status.h"
#include "base/utf8.h"
#include "server/runtime/found_state.h"
#include "server/runtime/passed_files.h"
#include "server/runtime/tiers/operation_parts.h"
#include "server/runtime/tiers/shared_slices.h"
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

namespace {

// An image of the remote tier, and whatever it is read from.
struct PartSource {
  std::shared_ptr<CopyStore> store;  // first: it ends last
  std::shared_ptr<CopyStore::Reading> reading;
  WholeCopy whole;  // where it was put together
  std::string job;
  std::atomic<bool> told_damaged{false};
  File& file() const { return whole.file != nullptr ? *whole.file : reading->image(); }
};

// Closing it may hang, and nobody is there any more to wait for that: it is left to the end of the
// process, where whoever looks for what was lost finds it.
void LeaveOpen(PartSource* source) {
  struct Left {
    Mutex mutex;
    std::vector<PartSource*> sources GUARDED_BY(mutex);
  };
  static Left* const left = new Left();
  MutexLock lock(left->mutex);
  left->sources.push_back(source);
}

// What of a file is damaged so that it cannot be read at all (compressed frames) is handed out as
// zeros: the reader's digests tell it, as they tell any damaged byte, and its step is passed over.
absl::Status ReadPart(PartSource& source, uint64_t offset, std::span<std::byte> into) {
  const absl::Status all = source.file().ReadAt(offset, into);
  if (!absl::IsDataLoss(all) || IsErrno(all)) {
    return all;
  }
  // Once: whoever owns the file may read it, and open it, as often as he likes.
  if (!source.told_damaged.exchange(true)) {
    LogFrom(LogLevel::kWarning, absl::StrCat("job=", source.job),
            absl::StrCat("read parts: ", Utf8Text(Message(all)),
                         "; zeros are handed out for it (said once, as long as the file is "
                         "open)"));
  }
  for (size_t at = 0; at < into.size(); at += RemoteParts::kPageBytes) {
    const std::span<std::byte> page =
        into.subspan(at, std::min<size_t>(RemoteParts::kPageBytes, into.size() - at));
    const absl::Status read = source.file().ReadAt(offset + at, page);
    if (absl::IsDataLoss(read) && !IsErrno(read)) {
      std::fill(page.begin(), page.end(), std::byte{0});
    } else if (!read.ok()) {
      return read;
    }
  }
  return absl::OkStatus();
}

// Of an image that leaves slices out: with the files that have them, and as if it did not.
absl::Status PutTogether(const CopyKey& key, PartSource& source, RemoteParts::Copy& copy) {
  TransferControl control;
  HF_ASSIGN_OR_RETURN(source.whole,
                      OpenWhole(source.store, key, source.reading, copy.image, control));
  copy.image.record.kept.reset();
  copy.record = EncodeRecord(copy.image.record);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::shared_ptr<const RemoteParts::Copy>> OpenForParts(
    const Context& context, const CopyKey& key, bool whole,
    const std::function<void(RemoteParts::Work)>& run) {
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
  // Closing may hang, too.
  const std::shared_ptr<PartSource> source(new PartSource(), [run](PartSource* last) {
    run([last](bool may) { may ? delete last : LeaveOpen(last); });
  });
  auto copy = std::make_shared<RemoteParts::Copy>();
  const auto open = [&]() -> absl::Status {
    source->job = key.job_name;
    source->store = *store;
    HF_ASSIGN_OR_RETURN(source->reading,
                        source->store->OpenCopy({key.id, key.job_name, key.world_size}, {}));
    copy->record = source->reading->record_file();
    HF_ASSIGN_OR_RETURN(copy->image, DecodeRecordAndLayout(copy->record));
    return whole && copy->image.record.kept ? PutTogether(key, *source, *copy) : absl::OkStatus();
  };
  const absl::Status opened = open();
  Judge(*context, place, opened);
  if (!opened.ok()) {
    return IsCopysFault(opened, TierKind::kRemote) ? absl::DataLossError(Message(opened)) : opened;
  }
  copy->bytes = FileBytes(copy->image.record);
  copy->read = [source, place = context->remote](uint64_t offset, std::span<std::byte> into) {
    const MonotonicTime began = Clock::System()->Now();
    const absl::Status read = ReadPart(*source, offset, into);
    if (read.ok()) {
      place->CountRead(into.size(), Clock::System()->Now() - began);
    }
    return read;
  };
  return std::shared_ptr<const RemoteParts::Copy>(std::move(copy));
}

namespace {

// Whether no descriptor shows the image, or that of a rank's file which has what it leaves out.
absl::StatusOr<bool> InPartsOnly(CopyStore& store, const CopyKey& key,
                                 const CopyStore::Reading& reading) {
  if (reading.compressed() || !reading.record().kept) {
    return reading.compressed();
  }
  return store.HasCompressed({key.id.job, key.job_name, key.id.checkpoint()});
}

}  // namespace

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
  const absl::StatusOr<bool> parts_only = InPartsOnly(**store, action.key, **reading);
  if (!parts_only.ok()) {
    return failed(parts_only.status());
  }
  if (*parts_only) {
    DurableOpened opened{action.drain, absl::OkStatus(), false, ToSealedCopy((*reading)->record()),
                         nullptr};
    opened.parts_only = true;
    return opened;
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
