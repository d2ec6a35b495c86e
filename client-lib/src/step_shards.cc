#include "client-lib/src/step_shards.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/digest.h"
#include "base/status.h"
#include "client-lib/src/errors.h"
#include "client-lib/src/shard_read.h"
#include "client-lib/src/state_match.h"
#include "client-lib/src/step_records.h"
#include "tiers/image/kept.h"
#include "tiers/image/layout_scan.h"

namespace holdfast::client {
namespace {

// What reading a byte costs, beside a byte of memory.
uint64_t CostOf(const std::string& tier) {
  return tier == "memory" ? 1 : tier == "nvme" ? 10 : tier == "peer" ? 20 : 100;
}

// What all objects together may have that one restore reads.
constexpr uint64_t kObjectsBytesMax = uint64_t{2} << 30;

Status AcceptAll(HeldShard&) {
  return Status();
}

}  // namespace

Result<StepShards> StepShards::Read(const ShardSource& source, const std::string& job,
                                    CheckpointId checkpoint, uint32_t saved_by, Deadline deadline) {
  StepShards shards(source, job, checkpoint);
  shards.ranks_.reserve(saved_by);
  HF_TRY_ASSIGN(const StepRecords gathered,
                StepRecords::Read(source, job, checkpoint, saved_by, deadline));
  for (Rank rank = 0; rank < saved_by; ++rank) {
    deadline.Look();
    if (deadline.passed()) {
      return Status(Code::kDeadlineExceeded,
                    absl::StrCat("the shards of ", rank, " of ", saved_by, " ranks were found"));
    }
    if (const std::optional<StepRecord> record = gathered.Of(rank)) {
      shards.Keep(record->image, record->tier);
      continue;
    }
    HF_TRY_ASSIGN(const std::unique_ptr<HeldShard> held, shards.Open(rank, {}, deadline));
    HF_TRY(WithContext(shards.CheckIdentity(*held, saved_by), absl::StrCat("rank ", rank)));
    shards.Keep({held->shard().record(), held->shard().layout()}, held->tier());
  }
  shards.object_index_.clear();
  return shards;
}

Result<std::unique_ptr<HeldShard>> StepShards::Open(Rank rank,
                                                    const std::vector<std::string>& without,
                                                    Deadline deadline) const {
  wire::Attach attach;
  attach.job = job_;
  attach.rank = rank;
  attach.choice = wire::Choice::kStep;
  attach.step = checkpoint_.step;
  attach.attempt = checkpoint_.attempt;
  attach.any_tier = true;
  attach.parts = true;
  attach.parts_of_files = true;
  attach.without = without;
  Result<std::unique_ptr<HeldShard>> held = HeldShard::Open(
      source_, std::move(attach), HeldShard::Parts::kFileAlone, deadline, AcceptAll);
  if (!held.ok()) {
    return WithContext(held.status(), absl::StrCat("the shard of rank ", rank));
  }
  return held;
}

Status StepShards::CheckIdentity(const HeldShard& held, uint32_t saved_by) const {
  const wire::Source& said = held.source();
  if (CheckpointId{said.attempt, said.step} != checkpoint_ || said.world_size != saved_by) {
    return Status(
        Code::kInternal,
        absl::StrCat("ckptd offers attempt ", said.attempt, " step ", said.step, " of ",
                     said.world_size, " ranks, asked for was attempt ", checkpoint_.attempt,
                     " step ", checkpoint_.step, ", which ", saved_by, " ranks saved"));
  }
  return Status();
}

Status StepShards::CheckSame(Rank rank, HeldShard& held) const {
  const ShardRecord& record = held.shard().record();
  const SavedRank& saved = ranks_[rank];
  const size_t of_header =
      record.digests.size() - std::min(record.digests.size(), saved.digests.size());
  if (record.layout_bytes == saved.layout->bytes &&
      std::equal(record.digests.begin() + static_cast<ptrdiff_t>(of_header), record.digests.end(),
                 saved.digests.begin(), saved.digests.end())) {
    return Status();
  }
  return Status(Code::kCorrupt, absl::StrCat("the shard of rank ", rank, ": its copy in ",
                                             held.tier(), " has another record than it had"));
}

void StepShards::Keep(const RecordAndLayout& image, const std::string& tier) {
  const auto rank = static_cast<Rank>(ranks_.size());
  const ShardRecord& record = image.record;
  const Layout& layout = image.layout;
  const std::vector<DigestedRange> ranges = DigestedRanges(layout);
  // 1. The layout, once for all that have it. (Which digests are whose does not depend on the rank:
  // they are counted from the first slice's.)
  const auto [entry, fresh] = layouts_.try_emplace(record.layout_hash);
  SavedLayout& saved = entry->second;
  const size_t of_header = ranges.size() > 1 ? ranges[1].first_digest : record.digests.size();
  if (fresh) {
    saved.bytes = record.layout_bytes;
    for (size_t i = 1; i < ranges.size(); ++i) {
      saved.first_digest.push_back(ranges[i].first_digest - of_header);
    }
    saved.first_digest.push_back(record.digests.size() - of_header);
  }
  saved.ranks.push_back(rank);
  KeepNames(layout, rank);
  // 2. Its digests.
  SavedRank& kept = ranks_.emplace_back();
  kept.layout = &saved;
  kept.digests.assign(record.digests.begin() + static_cast<ptrdiff_t>(of_header),
                      record.digests.end());
  kept.cost = CostOf(tier);
  content_ = Crc64(record.layout_hash.data(), record.layout_hash.size(), content_);
  content_ = Crc64(kept.digests.data(), kept.digests.size() * sizeof(uint64_t), content_);
  if (record.kept) {
    const std::vector<std::optional<uint64_t>> places = PlacesInFile(image);
    for (const std::optional<uint64_t>& place : places) {
      kept.left_out.push_back(!place.has_value());
    }
  }
  // 3. Its objects.
  for (uint32_t i = 0; i < layout.slices.size(); ++i) {
    const Slice& slice = layout.slices[i];
    if (slice.kind == SliceKind::kTensor) {
      continue;
    }
    const std::span<const uint64_t> digests = *Digests(rank, i);
    std::vector<uint64_t> content(digests.begin(), digests.end());
    content.push_back(slice.bytes);
    const auto [place, first] = object_index_.try_emplace(
        ObjectKey{slice.name, slice.kind, slice.codec, std::move(content)}, objects_.size());
    if (first) {
      objects_.push_back({{ToObject(slice), {}}, slice.bytes});
    }
    objects_[place->second].content.ranks.push_back(rank);
  }
}

// (Ranks that contradict each other about a tensor: the planner says so, if it is wanted.)
void StepShards::KeepNames(const Layout& layout, Rank rank) {
  for (const Slice& slice : layout.slices) {
    if (slice.kind != SliceKind::kTensor) {
      continue;
    }
    const auto [it, fresh] = tensors_.try_emplace(slice.name);
    Known& known = it->second;
    if (fresh) {
      known.dtype = slice.dtype;
      known.shape = slice.global_shape;
    }
    known.ranks += fresh || known.last != rank ? 1 : 0;
    known.last = rank;
  }
}

std::vector<Tensor> StepShards::Tensors() const {
  std::vector<Tensor> tensors;
  tensors.reserve(tensors_.size());
  for (const auto& [name, known] : tensors_) {
    tensors.emplace_back(name, static_cast<Type>(known.dtype), known.shape, nullptr);
  }
  return tensors;
}

std::vector<uint32_t> StepShards::TensorRanks() const {
  std::vector<uint32_t> ranks;
  ranks.reserve(tensors_.size());
  for (const auto& [name, known] : tensors_) {
    ranks.push_back(known.ranks);
  }
  return ranks;
}

Result<std::vector<SavedObject>> StepShards::ReadObjects(const std::vector<size_t>& which,
                                                         CopyEngine& engine,
                                                         Deadline deadline) const {
  std::vector<SavedObject> contents;
  std::set<size_t> missing;  // of `contents`
  uint64_t bytes = 0;
  for (const size_t index : which) {
    missing.insert(contents.size());
    contents.push_back(objects_[index].content);
    bytes += objects_[index].bytes;
  }
  if (bytes > kObjectsBytesMax) {
    return Status(Code::kRefused,
                  absl::StrCat("the objects that ", saved_by(), " ranks saved have ", bytes,
                               " bytes together, and at most ", kObjectsBytesMax,
                               " are read for one restore: save what is large as tensors"));
  }
  Status failed;
  std::set<Rank> unread;
  while (!missing.empty()) {
    // Of the first one that has it and can be read: all that this rank has.
    const std::vector<Rank>& ranks = contents[*missing.begin()].ranks;
    const auto rank = std::find_if(ranks.begin(), ranks.end(),
                                   [&](Rank each) { return unread.count(each) == 0; });
    if (rank == ranks.end()) {
      return failed;
    }
    unread.insert(*rank);
    Result<std::vector<Object>> objects = ObjectsOf(*rank, engine, deadline);
    if (!objects.ok()) {
      failed = objects.status();
      continue;
    }
    for (auto it = missing.begin(); it != missing.end();) {
      SavedObject& content = contents[*it];
      const bool has = std::binary_search(content.ranks.begin(), content.ranks.end(), *rank);
      const auto found = std::find_if(objects->begin(), objects->end(), [&](const Object& object) {
        return object.name == content.object.name;
      });
      if (has && found != objects->end()) {
        content.object.bytes = std::move(found->bytes);
        it = missing.erase(it);
      } else {
        ++it;
      }
    }
  }
  return contents;
}

Result<std::vector<Object>> StepShards::ObjectsOf(Rank rank, CopyEngine& engine,
                                                  Deadline deadline) const {
  std::vector<std::string> without;
  while (true) {
    HF_TRY_ASSIGN(const std::unique_ptr<HeldShard> held, Open(rank, without, deadline));
    const auto compare = [&](const ShardRanges& ranges, const ShardSlices& slices) -> Status {
      HF_TRY(CheckSame(rank, *held));
      CopyOptions options;
      options.interrupt = deadline.interrupt();
      HF_TRY(held->CopyOut(engine, ranges, slices, options, deadline));
      return held->Confirm(deadline);
    };
    Result<std::vector<Object>> objects = client::ReadObjects(held->shard(), compare);
    if (objects.ok() || !MayPassOver(*held, objects.status()) || !PassOver(*held, without)) {
      return objects;
    }
  }
}

// Each time of the first rank that has it and can be read.
Status StepShards::ReadObjectPart(size_t which, uint64_t begin, uint64_t bytes, void* to,
                                  CopyEngine& engine, Deadline deadline) const {
  const Content& wanted = objects_[which];
  CopyOutRange part;
  part.to = to;
  part.in_slice = begin;
  part.bytes = bytes;
  Status failed;
  for (const Rank rank : wanted.content.ranks) {
    failed = ReadObjectPartOf(rank, wanted, part, engine, deadline);
    if (failed.ok() || deadline.passed()) {
      break;
    }
  }
  return failed;
}

Status StepShards::ReadObjectPartOf(Rank rank, const Content& wanted, const CopyOutRange& part,
                                    CopyEngine& engine, Deadline deadline) const {
  const Object& object = wanted.content.object;
  std::vector<std::string> without;
  while (true) {
    HF_TRY_ASSIGN(const std::unique_ptr<HeldShard> held, Open(rank, without, deadline));
    const auto read = [&]() -> Status {
      HF_TRY(CheckSame(rank, *held));
      const std::vector<Slice>& slices = held->shard().layout().slices;
      const auto slice = std::find_if(slices.begin(), slices.end(), [&](const Slice& each) {
        return each.kind != SliceKind::kTensor && each.name == object.name;
      });
      if (slice == slices.end()) {
        return Status(Code::kInternal, absl::StrCat("'", object.name, "' is in no shard"));
      }
      const auto number = static_cast<size_t>(slice - slices.begin());
      CopyOutRange range = held->shard().SlicePart(number, part.in_slice, part.bytes);
      range.to = part.to;
      CopyOptions options;
      options.interrupt = deadline.interrupt();
      HF_TRY(held->CopyOut(engine, {range}, {number}, options, deadline));
      return held->Confirm(deadline);
    };
    const Status status = read();
    if (status.ok() || !MayPassOver(*held, status) || !PassOver(*held, without)) {
      return status;
    }
  }
}

bool MayPassOver(HeldShard& held, const Status& read) {
  return CopyIsBad(read) || (held.shard().in_parts() && read.code() == Code::kUnavailable);
}

bool PassOver(const HeldShard& held, std::vector<std::string>& without) {
  if (std::find(without.begin(), without.end(), held.tier()) != without.end()) {
    return false;  // a daemon that knows memory only offers it again
  }
  without.push_back(held.tier());
  return true;
}

Status StepShards::AddTo(ReshardPlanner& planner, std::optional<Rank> only) const {
  for (const auto& [hash, layout] : layouts_) {
    if (only && ranks_[*only].layout != &layout) {
      continue;
    }
    const absl::Status added =
        planner.Add(layout.bytes, only ? std::span(&*only, 1) : std::span(layout.ranks));
    if (absl::IsInvalidArgument(added)) {
      return Status(Code::kCorrupt, absl::StrCat("the layout of rank ", layout.ranks.front(), ": ",
                                                 added.message()));
    }
    HF_TRY(FromAbslStatus(added, "plan"));
  }
  return Status();
}

Result<std::vector<Tensor>> StepShards::TensorsOf(Rank rank,
                                                  const std::set<std::string>& names) const {
  std::vector<Tensor> tensors;
  std::set<std::string> seen;
  const absl::Status scanned =
      ScanLayout(ranks_[rank].layout->bytes, [&](const ScannedSlice& each) {
        const std::string name(each.name);
        if (names.count(name) == 0) {
          return absl::OkStatus();
        }
        HF_ASSIGN_OR_RETURN(const Slice slice, DecodeSlice(each.bytes));
        if (slice.kind == SliceKind::kTensor && seen.insert(name).second) {
          tensors.emplace_back(name, static_cast<Type>(slice.dtype), slice.global_shape, nullptr);
        }
        return absl::OkStatus();
      });
  HF_TRY(FromAbslStatus(scanned, absl::StrCat("the layout of rank ", rank)));
  return tensors;
}

ReshardSources StepShards::Sources(Rank reader, bool own, const std::set<Rank>& without) const {
  ReshardSources sources;
  sources.reader = reader;
  if (own) {
    sources.own = reader;
  }
  sources.lacks = [this](Rank rank, uint32_t slice) {
    const std::vector<bool>& left_out = ranks_[rank].left_out;
    return !left_out.empty() && left_out[slice];
  };
  sources.cost = [this, without](Rank rank) {
    return without.count(rank) > 0 ? std::nullopt : std::optional(ranks_[rank].cost);
  };
  sources.digests = [this](Rank rank, uint32_t slice) { return Digests(rank, slice); };
  return sources;
}

std::optional<std::span<const uint64_t>> StepShards::Digests(Rank rank, uint32_t slice) const {
  const SavedRank& saved = ranks_[rank];
  const size_t first = saved.layout->first_digest[slice];
  const size_t behind = saved.layout->first_digest[slice + 1];
  return std::span(saved.digests).subspan(first, behind - first);
}

}  // namespace holdfast::client
