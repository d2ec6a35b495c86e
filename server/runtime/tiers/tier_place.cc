#include "server/runtime/tiers/tier_place.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/digest.h"
#include "base/log.h"
#include "base/status.h"

namespace holdfast {
namespace {

constexpr uint64_t kMemoryBytesMax = 8192;

std::string MemoryPath(const std::string& memory_dir, const std::string& dir) {
  return memory_dir.empty()
             ? ""
             : JoinPath(memory_dir,
                        absl::StrCat(absl::Hex(Crc64(dir.data(), dir.size()), absl::kZeroPad16)));
}

// "<id>\nmount\n<dir>\n": for people, too.
std::string EncodeKnown(const KnownDirectory& known, const std::string& dir) {
  return absl::StrCat(known.id, known.own_mount ? "\nmount\n" : "\nsystem disk\n", dir, "\n");
}

std::optional<KnownDirectory> DecodeKnown(const std::string& text, const std::string& dir) {
  KnownDirectory known;
  known.id = text.substr(0, text.find('\n'));
  known.own_mount = true;
  if (!known.id.empty() && text == EncodeKnown(known, dir)) {
    return known;
  }
  return std::nullopt;  // of the system's disk, where anything goes; or not ours
}

void CountMoved(TierPlace::Traffic& traffic, uint64_t bytes, Duration took) {
  traffic.bytes += bytes;
  traffic.operations += 1;
  traffic.took += took;
}

}  // namespace

TierPlace::TierPlace(CopyStore::Options options, std::string memory_dir)
    : options_(std::move(options)), memory_path_(MemoryPath(memory_dir, options_.dir)) {}

// Trusts what lies there only if nothing better is known.
absl::StatusOr<std::shared_ptr<CopyStore>> TierPlace::Open() {
  CopyStore::Options options = options_;
  {
    MutexLock lock(mutex_);
    options.same_as = known_;
  }
  bool of_another_process = false;
  if (!options.same_as && !memory_path_.empty()) {
    const absl::StatusOr<std::string> text = ReadFile(*options_.env, memory_path_, kMemoryBytesMax);
    options.same_as = text.ok() ? DecodeKnown(*text, options_.dir) : std::nullopt;
    of_another_process = options.same_as.has_value();
  }
  absl::StatusOr<std::unique_ptr<CopyStore>> store = CopyStore::Open(options);
  if (of_another_process && absl::IsUnavailable(store.status())) {
    return absl::UnavailableError(
        absl::StrCat(Message(store.status()),
                     ". If it is to be on the system's disk from now on, rm '", memory_path_, "'"));
  }
  HF_RETURN_IF_ERROR(store.status());
  return std::shared_ptr<CopyStore>(*std::move(store));
}

void TierPlace::Remember(const KnownDirectory& known) {
  if (memory_path_.empty() || known.id.empty()) {
    return;
  }
  const std::string text = EncodeKnown(known, options_.dir);
  const absl::StatusOr<std::string> there = ReadFile(*options_.env, memory_path_, kMemoryBytesMax);
  if (there.ok() && *there == text) {
    return;
  }
  absl::Status kept = options_.env->CreateDirectories(ParentDirectory(memory_path_), 0700);
  if (kept.ok()) {
    kept = WriteFileAtomically(*options_.env, memory_path_, text);
  }
  if (!kept.ok()) {
    LogWarning(absl::StrCat("what ", options_.dir,
                            " is will not be known at the next start: ", Message(kept)));
  }
}

std::shared_ptr<CopyStore> TierPlace::OpenStore() {
  MutexLock lock(mutex_);
  return store_;
}

absl::StatusOr<std::shared_ptr<CopyStore>> TierPlace::Store(std::vector<std::string>* told) {
  if (std::shared_ptr<CopyStore> open = OpenStore()) {
    return open;
  }
  MutexLock opening(opening_);
  if (std::shared_ptr<CopyStore> open = OpenStore()) {
    return open;
  }
  HF_ASSIGN_OR_RETURN(std::shared_ptr<CopyStore> store, Open());
  absl::StatusOr<SweepReport> swept = store->Sweep();
  if (told != nullptr && swept.ok()) {
    told->insert(told->end(), swept->done.begin(), swept->done.end());
    for (const UnknownFile& left : swept->left_alone) {
      told->push_back(absl::StrCat(left.path, " was left alone: ", left.why));
    }
  } else if (told != nullptr) {
    told->push_back(absl::StrCat("what an earlier daemon left half done in ", options_.dir,
                                 " could not be looked at: ", Message(swept.status())));
  }
  const KnownDirectory known = store->place();
  Remember(known);
  MutexLock lock(mutex_);
  known_ = known;
  store_ = store;
  away_ = absl::OkStatus();
  return store;
}

TierPlace::Noted TierPlace::Note(const absl::Status& status) {
  const std::shared_ptr<CopyStore> store = OpenStore();
  const absl::StatusOr<FilesystemInfo> space =
      store != nullptr ? store->Space() : absl::StatusOr<FilesystemInfo>(absl::UnknownError(""));
  bool went_away = false;
  MutexLock lock(mutex_);
  const bool cannot_ask = absl::IsResourceExhausted(space.status());  // memory, file descriptors
  if (store != nullptr && store == store_ && !space.ok() && !cannot_ask) {
    known_ = store->place();
    store_ = nullptr;  // another file system lies there now: the next operation looks anew
    away_ = absl::UnavailableError(Message(space.status()));
    went_away = true;
  }
  const absl::Status& outcome = status.ok() ? away_ : status;
  health_.problem = outcome.ok() || absl::IsCancelled(outcome) ? "" : Message(outcome);
  if (space.ok()) {
    health_.bytes_free = space->bytes_free;
    health_.device = store->place().device;
    health_.filesystem = space->type;
  }
  return {away_, went_away};
}

void TierPlace::CountWritten(uint64_t bytes, Duration took) {
  MutexLock lock(mutex_);
  CountMoved(health_.written, bytes, took);
}

void TierPlace::CountRead(uint64_t bytes, Duration took) {
  MutexLock lock(mutex_);
  CountMoved(health_.read, bytes, took);
}

void TierPlace::CountShared(uint64_t bytes) {
  MutexLock lock(mutex_);
  health_.bytes_shared += bytes;
}

void TierPlace::CountCompressedAway(uint64_t bytes) {
  MutexLock lock(mutex_);
  health_.bytes_compressed_away += bytes;
}

void TierPlace::SetEngine(std::string engine) {
  MutexLock lock(mutex_);
  health_.engine = std::move(engine);
}

TierPlace::Health TierPlace::health() {
  MutexLock lock(mutex_);
  return health_;
}

}  // namespace holdfast
