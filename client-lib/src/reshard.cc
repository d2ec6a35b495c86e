#include "client-lib/src/reshard.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/digest.h"
#include "base/status.h"
#include "client-lib/src/errors.h"
#include "client-lib/src/shard_read.h"
#include "client-lib/src/side_by_side.h"
#include "client-lib/src/state_plan.h"

namespace holdfast::client {
namespace {

// What is put together in memory at once for a device; a tensor that is larger comes alone.
constexpr uint64_t kStagedBytesMax = 256 << 20;

// Between whole blocks nothing is read: a block is as much as is worth reading over.
constexpr uint64_t kGapBytes = 0;

uint64_t SizeOf(const Tensor& tensor) {
  uint64_t elements = tensor.flat_length;
  if (tensor.place != Tensor::Place::kFlat) {
    const bool box = tensor.place == Tensor::Place::kBox;
    elements = 1;
    for (const uint64_t n : box ? tensor.box_shape : tensor.global_shape) {
      elements *= n;  // (that it is not too many was checked when it was planned)
    }
  }
  return elements * TypeBytes(tensor.type);
}

uint64_t BytesOf(const std::vector<std::vector<ByteRun>>& reads) {
  uint64_t bytes = 0;
  for (const std::vector<ByteRun>& runs : reads) {
    for (const ByteRun& run : runs) {
      bytes += run.bytes;
    }
  }
  return bytes;
}

const char* const kTiers[] = {"memory", "nvme", "peer", "remote"};

}  // namespace

Status Resharding::Plan(const State& wanted) {
  wanted_ = &wanted;
  std::vector<Want> wants;
  wants.reserve(wanted.tensors.size());
  for (const Tensor& tensor : wanted.tensors) {
    wants.push_back({ToSlice(tensor), {}, options_.convert_types});
  }
  absl::StatusOr<ReshardPlanner> planner = ReshardPlanner::For(std::move(wants));
  if (!planner.ok()) {
    return Status(Code::kInvalidArgument, Message(planner.status()));
  }
  planner_.emplace(*std::move(planner));
  HF_TRY(shards_.AddTo(*planner_, options_.only));
  return Replan();
}

Status Resharding::Replan() {
  plan_ = planner_->Plan(shards_.Sources(options_.reader, options_.own, unreadable_));
  if (plan_.problems.empty()) {
    return Status();
  }
  const absl::Status told = StatusOf(plan_.problems);
  const bool diverged = std::any_of(
      plan_.problems.begin(), plan_.problems.end(),
      [](const auto& each) { return each.kind == ReshardProblem::Kind::kContradiction; });
  if (diverged) {
    return Status(
        Code::kInvalidArgument,
        absl::StrCat(Message(told), " (what belongs to single ranks is merged, or not asked for)"));
  }
  // Not what was saved: the caller's mistake.
  const bool mistake = absl::IsNotFound(told) || absl::IsFailedPrecondition(told);
  return mistake ? Status(Code::kInvalidArgument, Message(told)) : FromAbslStatus(told, "plan");
}

// What several ranks have that is to be compared is read when all else has been: what cannot be
// read then contradicts nobody, but what came from it is read again from others.
Status Resharding::Copy(DeviceFence* fence, Deadline deadline) {
  meter_.Announce(BytesOf(ReadsOf(plan_, kGapBytes)));
  while (true) {
    const std::set<Rank> without = unreadable_;
    for (const Group& group : Groups()) {
      HF_TRY(CopyGroup(group, fence, deadline));
    }
    const Status compared = CompareOverlaps(deadline);
    if (compared.ok() || unreadable_ == without || deadline.passed() || !Replan().ok()) {
      return compared;
    }
  }
}

// What cannot be read is done without from here on, and what others have in its place is compared.
Status Resharding::Compare(Deadline deadline) {
  while (true) {
    const std::set<Rank> without = unreadable_;
    const Status compared = CompareOverlaps(deadline);
    if (compared.ok()) {
      compared_without_ = unreadable_;
    }
    if (compared.ok() || unreadable_ == without || deadline.passed() || !Replan().ok()) {
      return compared;
    }
  }
}

void Resharding::Hold(Deadline deadline) {
  for (const ReshardPlan::Source& source : plan_.sources) {
    if (held_.count(source.rank) == 0 && !deadline.passed()) {
      Result<std::unique_ptr<HeldShard>> held = shards_.Open(source.rank, {}, deadline);
      if (held.ok() && !(*held)->shard().in_parts()) {
        held_[source.rank] = *std::move(held);
      }
    }
  }
}

Status Resharding::CopySome(const std::vector<void*>& to, Deadline deadline) {
  Group group;
  group.wants.reserve(to.size());
  for (void* const memory : to) {
    group.wants.push_back(memory != nullptr);
  }
  HF_TRY(CopyPlanned(group, to, deadline));
  return unreadable_ == compared_without_ ? Status() : Compare(deadline);
}

std::vector<Resharding::Group> Resharding::Groups() const {
  const std::vector<Tensor>& tensors = wanted_->tensors;
  std::vector<Group> groups = {{std::vector<bool>(tensors.size()), false}};
  uint64_t staged = kStagedBytesMax;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].device < 0) {
      groups.front().wants[i] = true;
      continue;
    }
    const uint64_t bytes = SizeOf(tensors[i]);
    if (staged + bytes > kStagedBytesMax) {
      groups.push_back({std::vector<bool>(tensors.size()), true});
      staged = 0;
    }
    groups.back().wants[i] = true;
    staged += bytes;
  }
  return groups;
}

Status Resharding::CopyGroup(const Group& group, DeviceFence* fence, Deadline deadline) {
  const std::vector<Tensor>& tensors = wanted_->tensors;
  std::vector<void*> to(tensors.size());
  std::vector<std::unique_ptr<std::byte[]>> staging;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (group.wants[i] && group.staged) {
      staging.push_back(std::make_unique_for_overwrite<std::byte[]>(SizeOf(tensors[i])));
      to[i] = staging.back().get();
    } else if (group.wants[i]) {
      to[i] = tensors[i].data;
    }
  }
  HF_TRY(CopyPlanned(group, to, deadline));
  return group.staged ? ToDevices(group, to, fence, deadline) : Status();
}

// A shard that cannot be read at all is done without, if others have the same.
Status Resharding::CopyPlanned(const Group& group, const std::vector<void*>& to,
                               Deadline deadline) {
  while (true) {
    Status failed;
    const std::map<Rank, FromRank> parts = Divide(group, to);
    // Not all readers begin with the same one; but those that want the same do, so that what is
    // read for one of them is at hand for the others.
    auto next = parts.begin();
    std::advance(next, parts.empty() ? 0 : HashOfWants() % parts.size());
    for (size_t i = 0; i < parts.size() && failed.ok(); ++i, ++next) {
      next = next == parts.end() ? parts.begin() : next;
      failed = CopyFrom(next->first, next->second, deadline);
      if (!failed.ok()) {
        unreadable_.insert(next->first);
      }
    }
    if (failed.ok() || deadline.passed() || !Replan().ok()) {
      return failed;
    }
  }
}

uint64_t Resharding::HashOfWants() const {
  uint64_t hash = 0;
  for (const Tensor& tensor : wanted_->tensors) {
    hash = Crc64(tensor.name.data(), tensor.name.size(), hash);
    for (const std::vector<uint64_t>& box : {tensor.box_offset, tensor.box_shape}) {
      hash = Crc64(box.data(), box.size() * sizeof(uint64_t), hash);
    }
    for (const uint64_t flat : {tensor.flat_start, tensor.flat_length}) {
      hash = Crc64(&flat, sizeof(flat), hash);
    }
  }
  return hash;
}

std::map<Rank, Resharding::FromRank> Resharding::Divide(const Group& group,
                                                        const std::vector<void*>& to) const {
  ReshardPlan of_group;
  of_group.sources = plan_.sources;
  for (const ReshardPlan::Piece& piece : plan_.pieces) {
    if (group.wants[piece.want]) {
      of_group.pieces.push_back(piece);
    }
  }
  std::vector<std::vector<ByteRun>> reads = ReadsOf(of_group, kGapBytes);
  std::vector<Scatter> scatters(reads.size());
  for (const ReshardPlan::Piece& piece : of_group.pieces) {
    scatters[piece.source].parts.push_back(
        {piece.copy, to[piece.want], static_cast<DType>(wanted_->tensors[piece.want].type)});
  }
  std::map<Rank, FromRank> parts;
  for (size_t i = 0; i < reads.size(); ++i) {
    if (reads[i].empty()) {
      continue;
    }
    const ReshardPlan::Source& source = plan_.sources[i];
    FromRank& part = parts[source.rank];
    scatters[i].dtype = source.dtype;
    part.scatters.push_back(std::move(scatters[i]));
    part.slices.push_back(source.slice);
    part.runs.push_back(std::move(reads[i]));
  }
  return parts;
}

Status Resharding::CopyFrom(Rank rank, const FromRank& part, Deadline deadline) {
  HF_TRY_ASSIGN(const std::shared_ptr<HeldShard> held, ReadGood(rank, part, deadline));
  read_from_[held->tier()].insert(rank);
  if (why_.empty()) {
    why_ = held->why();
  }
  return Status();
}

Result<std::shared_ptr<HeldShard>> Resharding::Opened(Rank rank, Deadline deadline) {
  const std::vector<std::string>& without = bad_tiers_[rank];
  const auto held = held_.find(rank);
  if (held != held_.end() && without.empty()) {
    return held->second;
  }
  HF_TRY_ASSIGN(std::unique_ptr<HeldShard> opened, shards_.Open(rank, without, deadline));
  return std::shared_ptr<HeldShard>(std::move(opened));
}

Result<std::shared_ptr<HeldShard>> Resharding::ReadGood(Rank rank, const FromRank& part,
                                                        Deadline deadline) {
  Status bad;
  while (true) {
    Result<std::shared_ptr<HeldShard>> held = Opened(rank, deadline);
    if (!held.ok()) {
      // That there is no other copy is not what is wrong.
      return bad.ok() || held.status().code() == Code::kUnavailable ? held.status() : bad;
    }
    const Status read = ReadFrom(rank, **held, part, deadline);
    if (read.ok()) {
      return held;
    }
    if (!PassesOver(rank, **held, read)) {
      return read;
    }
    bad = read;
  }
}

// Whether the next copy of the rank's shard is to be tried, after what came of reading this one.
bool Resharding::PassesOver(Rank rank, HeldShard& held, const Status& read) {
  if (!MayPassOver(held, read) || !PassOver(held, bad_tiers_[rank])) {
    return false;
  }
  if (found_bad_.empty()) {
    found_bad_ = absl::StrCat(held.tier(), " copy of rank ", rank,
                              CopyIsBad(read) ? " bad: " : " not readable now: ", read.message());
  }
  return true;
}

Status Resharding::ReadFrom(Rank rank, HeldShard& held, const FromRank& part, Deadline deadline) {
  HF_TRY(shards_.CheckSame(rank, held));
  const SealedShard& shard = held.shard();
  ShardRanges ranges;
  ShardSlices slices;
  for (size_t i = 0; i < part.slices.size(); ++i) {
    if (!shard.Has(part.slices[i])) {
      return Status(Code::kCorrupt, absl::StrCat("rank ", rank, "'s file in ", held.tier(),
                                                 " leaves out what other files have"));
    }
    for (const ByteRun& run : part.runs[i]) {
      ranges.push_back(shard.SlicePart(part.slices[i], run.begin, run.bytes));
      ranges.back().scatter = &part.scatters[i];
      slices.emplace_back(part.slices[i]);
    }
  }
  meter_.BeginReading(BytesOf(part.runs));
  CopyOptions options;
  options.half_point = "client.restore.half_copied";
  options.interrupt = deadline.interrupt();
  options.read = &meter_.read();
  HF_TRY(held.CopyOut(engine_, ranges, slices, options, deadline));
  return held.Confirm(deadline);
}

// Those of the same two shards one after the other, which are opened once.
Status Resharding::CompareOverlaps(Deadline deadline) {
  std::map<std::pair<Rank, Rank>, std::vector<ReshardPlan::Overlap>> by_ranks;
  for (const ReshardPlan::Overlap& overlap : plan_.overlaps) {
    by_ranks[{plan_.sources[overlap.source].rank, plan_.sources[overlap.other].rank}].push_back(
        overlap);
  }
  for (const auto& [ranks, overlaps] : by_ranks) {
    HF_TRY(CompareShards(ranks.first, ranks.second, overlaps, deadline));
  }
  return Status();
}

// Both are verified, each by its own digests, and then compared with each other where they lie.
Status Resharding::CompareShards(Rank one, Rank other,
                                 const std::vector<ReshardPlan::Overlap>& overlaps,
                                 Deadline deadline) {
  ReshardPlan compared;
  compared.sources = plan_.sources;
  compared.overlaps = overlaps;
  const std::vector<std::vector<ByteRun>> reads = ReadsOf(compared, kGapBytes);
  const auto verified = [&](Rank rank) -> Result<std::shared_ptr<HeldShard>> {
    FromRank part;
    for (size_t i = 0; i < reads.size(); ++i) {
      if (!reads[i].empty() && plan_.sources[i].rank == rank) {
        part.scatters.push_back(Scatter{plan_.sources[i].dtype, {}});
        part.slices.push_back(plan_.sources[i].slice);
        part.runs.push_back(reads[i]);
      }
    }
    Result<std::shared_ptr<HeldShard>> held = ReadGood(rank, part, deadline);
    if (!held.ok()) {
      unreadable_.insert(rank);
    }
    return held;
  };
  HF_TRY_ASSIGN(std::shared_ptr<HeldShard> first, verified(one));
  std::shared_ptr<HeldShard> another;
  if (other != one) {
    HF_TRY_ASSIGN(another, verified(other));
  }
  HeldShard& second = another != nullptr ? *another : *first;
  const HeldShard* failed = nullptr;
  const Status status = CompareOpened(overlaps, *first, second, deadline, failed);
  // What lies on another node may go, or turn out to be bad, in the middle: then from elsewhere.
  for (const auto& [rank, held] : {std::pair{one, first.get()}, {other, &second}}) {
    if (held == failed && PassesOver(rank, *held, status)) {
      another.reset();
      first.reset();
      return CompareShards(one, other, overlaps, deadline);
    }
  }
  return status;
}

Status Resharding::CompareOpened(const std::vector<ReshardPlan::Overlap>& overlaps,
                                 HeldShard& first, HeldShard& second, Deadline deadline,
                                 const HeldShard*& failed) {
  for (const ReshardPlan::Overlap& overlap : overlaps) {
    deadline.Look();
    if (deadline.passed()) {
      return Status(Code::kDeadlineExceeded, "what several ranks saved was being compared");
    }
    HF_TRY_ASSIGN(const bool same, Same(overlap, first, second, deadline, failed));
    if (first.shard().faulted() || second.shard().faulted()) {
      return Status(Code::kCorrupt, "a slot or file was cut short while it was being compared");
    }
    if (!same) {
      const ReshardPlan::Source& source = plan_.sources[overlap.source];
      return Status(
          Code::kInvalidArgument,
          absl::StrCat("tensor '", first.shard().layout().slices[source.slice].name, "': rank ",
                       source.rank, " and rank ", plan_.sources[overlap.other].rank,
                       " both saved some of its elements, with different values: which "
                       "are right nobody can say; restore an older step"));
    }
  }
  HF_TRY(first.Confirm(deadline));
  return second.Confirm(deadline);
}

Result<bool> Resharding::Same(const ReshardPlan::Overlap& overlap, HeldShard& first,
                              HeldShard& second, Deadline deadline, const HeldShard*& failed) {
  const uint32_t here = plan_.sources[overlap.source].slice;
  const uint32_t there = plan_.sources[overlap.other].slice;
  const uint64_t size = DTypeBytes(plan_.sources[overlap.source].dtype);
  if (!first.shard().in_parts() && !second.shard().in_parts()) {
    const std::byte* const one = first.shard().SliceBytes(here);
    const std::byte* const other = second.shard().SliceBytes(there);
    bool same = true;
    overlap.copy.ForEachRun([&](uint64_t from, uint64_t to, uint64_t elements) {
      same = same && std::memcmp(one + from * size, other + to * size, elements * size) == 0;
    });
    return same;
  }
  SideBySide compared({&first, here}, {&second, there}, engine_, deadline);
  overlap.copy.ForEachRun([&](uint64_t from, uint64_t to, uint64_t elements) {
    compared.Add(from * size, to * size, elements * size);
  });
  const Result<bool> same = compared.Finish();
  failed = compared.failed();
  return same;
}

Status Resharding::ToDevices(const Group& group, const std::vector<void*>& from, DeviceFence* fence,
                             Deadline deadline) {
  std::vector<CopyOutRange> ranges;
  std::vector<std::vector<uint64_t>> digests;
  const std::vector<Tensor>& tensors = wanted_->tensors;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const uint64_t bytes = SizeOf(tensors[i]);
    if (!group.wants[i] || bytes == 0) {
      continue;
    }
    std::vector<uint64_t>& own = digests.emplace_back();
    const auto* const staged = static_cast<const std::byte*>(from[i]);
    for (uint64_t at = 0; at < bytes; at += kDigestBlockBytes) {
      own.push_back(Crc64(staged + at, std::min<uint64_t>(kDigestBlockBytes, bytes - at)));
    }
    ranges.push_back({tensors[i].data, staged, bytes, own.data(), tensors[i].device});
  }
  CopyOptions options;
  options.fence = fence;
  options.interrupt = deadline.interrupt();
  HF_TRY_ASSIGN(const std::optional<CopyMismatch> mismatch, engine_.CopyOut(ranges, options));
  return mismatch.has_value()
             ? Status(Code::kInternal, "memory changed while it was copied to a device")
             : Status();
}

std::string Resharding::Told() const {
  std::string told;
  for (const char* tier : kTiers) {
    const auto from = read_from_.find(tier);
    if (from != read_from_.end()) {
      absl::StrAppend(&told, told.empty() ? "" : ", ", from->second.size(),
                      from->second.size() == 1 ? " shard from " : " shards from ", tier);
    }
  }
  if (told.empty()) {
    return "nothing of their tensors was wanted";
  }
  const std::string& why = found_bad_.empty() ? why_ : found_bad_;
  return why.empty() ? told : absl::StrCat(told, " (", why, ")");
}

std::string Resharding::farthest() const {
  std::string farthest = kTiers[0];
  for (const char* tier : kTiers) {
    farthest = read_from_.count(tier) > 0 ? tier : farthest;
  }
  return farthest;
}

}  // namespace holdfast::client
