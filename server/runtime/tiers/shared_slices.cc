#include "server/runtime/tiers/shared_slices.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/status.h"
#include "server/runtime/tiers/operation_parts.h"
#include "tiers/transfer/assembled_file.h"
#include "tiers/transfer/read_only_file.h"

namespace holdfast {
namespace {

constexpr char kOwnersFault[] = "holdfast/owners-fault";

// Of what is remembered: 24 bytes a slice and 40 a rank.
constexpr size_t kKnownMax = 16;
constexpr size_t kSlicesKnownMax = size_t{1} << 20;

}  // namespace

std::shared_ptr<const Ownership> SliceOwners::Find(const LayoutHash& tensors,
                                                   const std::vector<Rank>& ranks) {
  const auto it = std::find_if(known_.begin(), known_.end(), [&](const Known& known) {
    return known.tensors == tensors && known.ranks == ranks;
  });
  if (it == known_.end()) {
    return nullptr;
  }
  known_.splice(known_.begin(), known_, it);
  return it->ownership;
}

absl::StatusOr<std::vector<Rank>> SliceOwners::Of(const RecordAndLayout& image,
                                                  const std::vector<Rank>& ranks) {
  const LayoutHash& hash = image.record.likeness.tensors;
  const Layout tensors = TensorsOf(image.layout);
  std::shared_ptr<const Ownership> ownership;
  {
    MutexLock lock(mutex_);
    ownership = Find(hash, ranks);
    if (ownership == nullptr) {
      std::vector<RankLayout> all;
      all.reserve(ranks.size());
      for (const Rank rank : ranks) {
        all.push_back({rank, hash});
      }
      const NamedLayout named[] = {{hash, &tensors}};
      HF_ASSIGN_OR_RETURN(Ownership computed, Ownership::Compute(all, named));
      ownership = std::make_shared<const Ownership>(std::move(computed));
      known_.push_front({hash, ranks, ownership, tensors.slices.size()});
      size_t slices = 0;
      for (const Known& known : known_) {
        slices += known.slices;
      }
      while (known_.size() > 1 && (known_.size() > kKnownMax || slices > kSlicesKnownMax)) {
        slices -= known_.back().slices;
        known_.pop_back();
      }
    }
  }
  std::vector<Rank> owners;
  owners.reserve(tensors.slices.size());
  for (uint32_t i = 0; i < tensors.slices.size(); ++i) {
    const std::optional<SliceOwner> owner = ownership->OwnerOf(image.record.id.rank, i);
    if (!owner) {
      return absl::InternalError(
          absl::StrCat("nobody owns slice ", i, " of ", image.record.id.ToString()));
    }
    owners.push_back(owner->rank);
  }
  return owners;
}

std::optional<PartImage> PartOf(SliceOwners& owners, const FlushShard& action,
                                const RecordAndLayout& image) {
  if (action.replicas == nullptr) {
    return std::nullopt;
  }
  const Replicas::Group& group = *action.replicas;
  if (group.content != image.record.likeness.content) {
    LogWarning(absl::StrCat("flush of ", action.key.id.ToString(),
                            ": its record is not of what its replicas hold: written whole"));
    return std::nullopt;
  }
  const absl::StatusOr<std::vector<Rank>> of = owners.Of(image, group.ranks);
  absl::StatusOr<std::optional<PartImage>> part =
      of.ok() ? PlanPart(image, *of, PlanHash(group.content, group.ranks))
              : absl::StatusOr<std::optional<PartImage>>(of.status());
  if (!part.ok()) {
    LogWarning(absl::StrCat("flush of ", action.key.id.ToString(),
                            ": written whole: ", Message(part.status())));
    return std::nullopt;
  }
  return *std::move(part);
}

// ---- Put together ----

// An owner's image: it is opened when it is read.
class OwnerFile : public ReadOnlyFile {
 public:
  OwnerFile(std::shared_ptr<OwnersFiles> all, Rank of, std::string path, uint64_t long_bytes)
      : rank(of), bytes(long_bytes), all_(std::move(all)), path_(std::move(path)) {}

  int fd() const override { return -1; }  // none that stays the same
  const std::string& path() const override { return path_; }
  absl::Status ReadAt(uint64_t offset, std::span<std::byte> out) override;
  absl::StatusOr<FileInfo> Info() override;

  const Rank rank;
  const uint64_t bytes;

 private:
  const std::shared_ptr<OwnersFiles> all_;
  const std::string path_;
};

// Those of the files of one image that are open. Thread-safe; nothing is held while it opens.
class OwnersFiles {
 public:
  OwnersFiles(std::shared_ptr<CopyStore> store, const CopyKey& key)
      : store_(std::move(store)), key_(key) {}

  CopyName NameOf(Rank rank) const {
    ShardId id = key_.id;
    id.rank = rank;
    return {id, key_.job_name, key_.world_size};
  }

  absl::StatusOr<std::shared_ptr<File>> Open(const OwnerFile& owner) EXCLUDES(mutex_) {
    {
      MutexLock lock(mutex_);
      const auto it = std::find_if(open_.begin(), open_.end(),
                                   [&](const Opened& opened) { return opened.rank == owner.rank; });
      if (it != open_.end()) {
        open_.splice(open_.begin(), open_, it);
        return it->file;
      }
    }
    HF_ASSIGN_OR_RETURN(std::unique_ptr<File> file,
                        store_->OpenImage(NameOf(owner.rank), owner.bytes));
    std::shared_ptr<File> opened = std::move(file);
    Keep(owner.rank, owner.bytes, opened);
    return opened;
  }

  void Keep(Rank rank, uint64_t bytes, std::shared_ptr<File> file) EXCLUDES(mutex_) {
    std::list<Opened> closed;  // where no lock is held: on some mounts that takes its time
    MutexLock lock(mutex_);
    open_.push_front({rank, bytes, std::move(file)});
    while (open_.size() > kOwnersOpenMax) {
      closed.splice(closed.begin(), open_, std::prev(open_.end()));
    }
  }

  absl::Status Confirm() EXCLUDES(mutex_) {
    std::list<Opened> open;
    {
      MutexLock lock(mutex_);
      open = open_;
    }
    for (const Opened& opened : open) {
      HF_ASSIGN_OR_RETURN(const FileInfo now, opened.file->Info());
      if (now.bytes != opened.bytes) {
        return absl::DataLossError(absl::StrCat("'", opened.file->path(), "': it has ", now.bytes,
                                                " bytes instead of ", opened.bytes));
      }
    }
    return absl::OkStatus();
  }

  std::string WrittenAnew() EXCLUDES(mutex_) {
    std::list<Opened> open;
    {
      MutexLock lock(mutex_);
      open = open_;
    }
    for (const Opened& opened : open) {
      const auto there = store_->OpenImage(NameOf(opened.rank), opened.bytes);
      const auto now = there.ok() ? (*there)->Info() : there.status();
      const auto then = opened.file->Info();
      if (now.ok() && then.ok() && (now->inode != then->inode || now->device != then->device)) {
        return opened.file->path();
      }
    }
    return "";
  }

 private:
  struct Opened {
    Rank rank = 0;
    uint64_t bytes = 0;
    std::shared_ptr<File> file;
  };
  const std::shared_ptr<CopyStore> store_;
  const CopyKey key_;
  Mutex mutex_;
  std::list<Opened> open_ GUARDED_BY(mutex_);  // the one that was read last comes first
};

absl::Status OwnerFile::ReadAt(uint64_t offset, std::span<std::byte> out) {
  HF_ASSIGN_OR_RETURN(const std::shared_ptr<File> file, all_->Open(*this));
  return file->ReadAt(offset, out);
}

absl::StatusOr<FileInfo> OwnerFile::Info() {
  HF_ASSIGN_OR_RETURN(const std::shared_ptr<File> file, all_->Open(*this));
  return file->Info();
}

absl::Status WholeCopy::Confirm() {
  return owners != nullptr ? owners->Confirm() : absl::OkStatus();
}

std::string WholeCopy::OwnerWrittenAnew() {
  return owners != nullptr ? owners->WrittenAnew() : "";
}

bool IsOwnersFault(const absl::Status& opening) {
  return opening.GetPayload(kOwnersFault).has_value();
}

absl::StatusOr<WholeCopy> OpenWhole(const std::shared_ptr<CopyStore>& store, const CopyKey& key,
                                    std::shared_ptr<CopyStore::Reading> reading,
                                    const RecordAndLayout& image, TransferControl& control) {
  HF_ASSIGN_OR_RETURN(WholeImage together, WholeImage::Of(image));
  WholeCopy whole;
  whole.owners = std::make_shared<OwnersFiles>(store, key);
  // 1. The manifest, read once for all.
  CopyStore::ReadOptions options;
  absl::StatusOr<Manifest> manifest =
      store->ReadManifest({key.id.job, key.job_name, key.id.checkpoint()});
  if (manifest.ok()) {
    options.manifest = std::make_shared<const Manifest>(*std::move(manifest));
  }  // else each OpenCopy finds by itself what that means
  // 2. The owners' copies, one record at a time.
  whole.own_piece_unit = PieceUnitOf(*reading);
  whole.files = {ImageOf(std::move(reading))};
  whole.ranks = together.owners();
  for (const Rank rank : whole.ranks) {
    if (control.cancelled()) {
      return Cancelled("reading what other ranks' files have");
    }
    control.Touch();
    const auto needed = [&](const absl::Status& status) {
      absl::Status failed = Annotate(
          status, absl::StrCat("rank ", rank, "'s file, which has slices of rank ", key.id.rank));
      failed.SetPayload(kOwnersFault, absl::Cord());
      return failed;
    };
    absl::StatusOr<std::unique_ptr<CopyStore::Reading>> opened =
        store->OpenCopy(whole.owners->NameOf(rank), options);
    if (!opened.ok()) {
      return needed(opened.status());
    }
    const absl::StatusOr<RecordAndLayout> read = DecodeRecordAndLayout((*opened)->record_file());
    if (!read.ok()) {
      return needed(read.status());
    }
    const std::string path = (*opened)->info().location;
    HF_RETURN_IF_ERROR(together.Add({&*read, path}));
    const uint64_t bytes = FileBytes(read->record);
    whole.files.push_back(std::make_shared<OwnerFile>(whole.owners, rank, path, bytes));
    whole.owners->Keep(rank, bytes, (*opened)->TakeImage());
  }
  // 3. What lies where.
  HF_ASSIGN_OR_RETURN(ImageMap map, std::move(together).Finish());
  whole.map = std::make_shared<const ImageMap>(map);
  const auto file = std::make_shared<AssembledFile>(std::move(map), whole.files);
  whole.path_at = [file](uint64_t offset) { return file->PathAt(offset); };
  whole.file = file;
  return whole;
}

}  // namespace holdfast
