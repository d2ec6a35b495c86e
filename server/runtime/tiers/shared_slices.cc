#include "server/runtime/tiers/shared_slices.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/status.h"
#include "server/runtime/tiers/operation_parts.h"
#include "tiers/transfer/assembled_file.h"

namespace holdfast {
namespace {

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

absl::Status WholeCopy::Confirm() {
  for (const std::shared_ptr<CopyStore::Reading>& owner : owners) {
    HF_RETURN_IF_ERROR(owner->Confirm());
  }
  return absl::OkStatus();
}

absl::StatusOr<WholeCopy> OpenWhole(CopyStore& store, const CopyKey& key,
                                    std::shared_ptr<CopyStore::Reading> reading,
                                    const RecordAndLayout& image) {
  WholeCopy whole;
  // 1. The manifest, read once for all.
  CopyStore::ReadOptions options;
  absl::StatusOr<Manifest> manifest =
      store.ReadManifest({key.id.job, key.job_name, key.id.checkpoint()});
  if (manifest.ok()) {
    options.manifest = std::make_shared<const Manifest>(*std::move(manifest));
  }  // else each OpenCopy finds by itself what that means
  // 2. The owners' copies.
  std::vector<std::shared_ptr<File>> files = {ImageOf(std::move(reading))};
  std::vector<RecordAndLayout> images;
  const std::vector<Rank> ranks = OwnersOf(image.record);
  images.reserve(ranks.size());
  std::vector<OwnerImage> owners;
  for (const Rank rank : ranks) {
    ShardId id = key.id;
    id.rank = rank;
    const auto needed = [&](const absl::Status& status) {
      return Annotate(
          status, absl::StrCat("rank ", rank, "'s file, which has slices of rank ", key.id.rank));
    };
    absl::StatusOr<std::unique_ptr<CopyStore::Reading>> opened =
        store.OpenCopy({id, key.job_name, key.world_size}, options);
    if (!opened.ok()) {
      return needed(opened.status());
    }
    whole.owners.push_back(*std::move(opened));
    absl::StatusOr<RecordAndLayout> read =
        DecodeRecordAndLayout(whole.owners.back()->record_file());
    if (!read.ok()) {
      return needed(read.status());
    }
    images.push_back(*std::move(read));
    owners.push_back({&images.back(), whole.owners.back()->info().location});
    files.push_back(ImageOf(whole.owners.back()));
  }
  // 3. What lies where.
  HF_ASSIGN_OR_RETURN(ImageMap map, WholeMap(image, owners));
  const auto file = std::make_shared<AssembledFile>(std::move(map), std::move(files));
  whole.path_at = [file](uint64_t offset) { return file->PathAt(offset); };
  whole.file = file;
  return whole;
}

}  // namespace holdfast
