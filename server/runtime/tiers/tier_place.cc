#include "server/runtime/tiers/tier_place.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/digest.h"
#include "base/log.h"
#include "base/status.h"
#include "server/runtime/tiers/remote_owner.h"

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

TierPlace::TierPlace(CopyStore::Options options, std::string memory_dir,
                     std::shared_ptr<DriveWitnesses> witnesses, std::optional<size_t> drive,
                     std::shared_ptr<RemoteOwner> owner)
    : options_(std::move(options)),
      memory_path_(MemoryPath(memory_dir, options_.dir)),
      witnesses_(std::move(witnesses)),
      drive_(drive),
      owner_(std::move(owner)) {}

std::optional<KnownDirectory> TierPlace::OfAnotherProcess() {
  if (memory_path_.empty()) {
    return std::nullopt;
  }
  const absl::StatusOr<std::string> text = ReadFile(*options_.env, memory_path_, kMemoryBytesMax);
  std::optional<KnownDirectory> known = text.ok() ? DecodeKnown(*text, options_.dir) : std::nullopt;
  if (known && witnesses_ != nullptr) {
    if (witnesses_->WasForgotten(known->id)) {
      return std::nullopt;
    }
    witnesses_->Expect(known->id, options_.dir);
  }
  return known;
}

// Trusts what lies there only if nothing better is known.
absl::StatusOr<std::shared_ptr<CopyStore>> TierPlace::Open() {
  CopyStore::Options options = options_;
  {
    MutexLock lock(mutex_);
    options.same_as = known_;
  }
  if (options.same_as && witnesses_ != nullptr && witnesses_->WasForgotten(options.same_as->id)) {
    options.same_as.reset();
  }
  bool of_another_process = false;
  if (!options.same_as) {
    options.same_as = OfAnotherProcess();
    of_another_process = options.same_as.has_value();
  }
  absl::StatusOr<std::shared_ptr<CopyStore>> store = OpenOwned(options);
  if (of_another_process && absl::IsUnavailable(store.status())) {
    return absl::UnavailableError(
        absl::StrCat(Message(store.status()),
                     ". If the drive is lost for good, or the directory is to be on the system's ",
                     "disk from now on: ckptctl forget-drive ", options.same_as->id.substr(0, 8)));
  }
  return store;
}

absl::StatusOr<std::shared_ptr<CopyStore>> TierPlace::OpenOwned(CopyStore::Options options) {
  if (owner_ != nullptr) {
    HF_ASSIGN_OR_RETURN(options.cluster, owner_->Us());
  }
  // (What the cluster has noted is newer than what this node knows.)
  const bool noted = options.cluster && !options.cluster->remote_id.empty();
  if (witnesses_ != nullptr && !drive_ && !noted) {
    if (const std::optional<KnownDirectory> must = witnesses_->RemoteMustBe()) {
      options.same_as = must;
    }
  }
  HF_ASSIGN_OR_RETURN(std::unique_ptr<CopyStore> store, CopyStore::Open(options));
  if (owner_ != nullptr) {
    HF_RETURN_IF_ERROR(owner_->Opened(*store));
  }
  return std::shared_ptr<CopyStore>(std::move(store));
}

absl::Status TierPlace::StillOurs(CopyStore& store) {
  if (owner_ == nullptr) {
    return absl::OkStatus();
  }
  HF_RETURN_IF_ERROR(owner_->StillOurs(store));
  return store.CheckCluster();
}

absl::Status TierPlace::Adopt(const std::string& from) {
  if (owner_ == nullptr) {
    return absl::FailedPreconditionError("adopt-remote: there is no remote directory");
  }
  {
    MutexLock opening(opening_);
    CopyStore::Options options = options_;
    HF_ASSIGN_OR_RETURN(options.cluster, owner_->Us());
    HF_RETURN_IF_ERROR(CopyStore::Adopt(options, from));
    options.cluster->remote_id.clear();  // it is another one now, or the same
    HF_ASSIGN_OR_RETURN(const std::unique_ptr<CopyStore> adopted, CopyStore::Open(options));
    HF_RETURN_IF_ERROR(owner_->Replaced(*adopted));
    if (witnesses_ != nullptr) {
      witnesses_->RemoteOpened(adopted->place().id);
    }
    MutexLock lock(mutex_);
    known_.reset();
    store_ = nullptr;
  }
  return Store(nullptr).status();
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

void TierPlace::TellAway() {
  if (witnesses_ != nullptr && drive_) {
    witnesses_->NotOpened(*drive_);
  } else if (witnesses_ != nullptr) {
    witnesses_->RemoteOpened("");
  }
}

std::shared_ptr<CopyStore> TierPlace::OpenStore() {
  MutexLock lock(mutex_);
  return store_;
}

absl::StatusOr<std::shared_ptr<CopyStore>> TierPlace::Store(std::vector<std::string>* told) {
  if (std::shared_ptr<CopyStore> open = OpenStore()) {
    HF_RETURN_IF_ERROR(StillOurs(*open));
    return open;
  }
  MutexLock opening(opening_);
  if (std::shared_ptr<CopyStore> open = OpenStore()) {
    return open;
  }
  absl::StatusOr<std::shared_ptr<CopyStore>> opened = Open();
  if (!opened.ok()) {
    TellAway();
  }
  HF_RETURN_IF_ERROR(opened.status());
  std::shared_ptr<CopyStore> store = *std::move(opened);
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
  if (witnesses_ != nullptr && drive_) {
    witnesses_->Opened(*drive_, *store);
  }
  {
    MutexLock lock(mutex_);
    known_ = known;
    store_ = store;
    away_ = absl::OkStatus();
  }
  if (witnesses_ != nullptr && !drive_) {
    witnesses_->RemoteOpened(known.id);
  } else if (witnesses_ != nullptr) {
    witnesses_->LookAgain();
  }
  return store;
}

TierPlace::Noted TierPlace::Note(const absl::Status& status) {
  const std::shared_ptr<CopyStore> store = OpenStore();
  absl::StatusOr<FilesystemInfo> space = absl::UnknownError("");
  if (store != nullptr) {
    const absl::Status ours = StillOurs(*store);
    space = ours.ok() ? store->Space() : ours;
  }
  bool went_away = false;
  MutexLock lock(mutex_);
  const bool cannot_ask = absl::IsResourceExhausted(space.status());  // memory, file descriptors
  if (store != nullptr && store == store_ && !space.ok() && !cannot_ask) {
    known_ = store->place();
    store_ = nullptr;  // another file system lies there now: the next operation looks anew
    away_ = absl::UnavailableError(Message(space.status()));
    went_away = true;
  }
  if (went_away) {
    TellAway();
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
