#include "server/checkpoint.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace holdfast {
namespace {

size_t Index(TierKind tier) {
  return static_cast<size_t>(tier);
}

}  // namespace

bool Checkpoint::Usable(const ShardState& shard) const {
  return std::any_of(kAllTiers.begin(), kAllTiers.end(), [&](TierKind tier) {
    return shard.at(tier).kind == CopyState::Kind::kGood && (tier != TierKind::kRemote || manifest);
  });
}

void Checkpoint::AddShard(Rank rank, uint64_t shard_bytes, int64_t sealed_unix_ms, bool time_sure) {
  const auto [it, fresh] =
      shards.try_emplace(rank, ShardState{shard_bytes, sealed_unix_ms, time_sure, {}});
  if (fresh) {
    bytes += shard_bytes;
  } else if (time_sure && !it->second.time_sure) {
    it->second.unix_ms = sealed_unix_ms;
    it->second.time_sure = true;
  }
  unix_ms = std::max(unix_ms, sealed_unix_ms);
}

void Checkpoint::Set(Rank rank, TierKind tier, CopyState state) {
  ShardState& shard = shards.at(rank);
  const bool usable_before = Usable(shard);
  CopyState& copy = shard.copies[Index(tier)];
  const auto count = [&](CopyState::Kind kind, int by) {
    if (kind == CopyState::Kind::kGood) {
      good_at_[Index(tier)] += static_cast<uint32_t>(by);
    } else if (kind == CopyState::Kind::kBad) {
      bad_at_[Index(tier)] += static_cast<uint32_t>(by);
    }
  };
  count(copy.kind, -1);
  copy = std::move(state);
  count(copy.kind, 1);
  good += static_cast<uint32_t>(Usable(shard)) - static_cast<uint32_t>(usable_before);
}

void Checkpoint::SetGood(Rank rank, TierKind tier, CopyDetail detail) {
  Set(rank, tier, {CopyState::Kind::kGood, std::move(detail), ""});
}

bool Checkpoint::SetBad(Rank rank, TierKind tier, std::string why) {
  const auto shard = shards.find(rank);
  if (shard == shards.end() || shard->second.at(tier).kind != CopyState::Kind::kGood) {
    return false;
  }
  CopyDetail detail = shard->second.at(tier).detail;
  Set(rank, tier, {CopyState::Kind::kBad, std::move(detail), std::move(why)});
  return true;
}

void Checkpoint::SetNone(Rank rank, TierKind tier) {
  if (shards.count(rank) > 0) {
    Set(rank, tier, {});
  }
}

void Checkpoint::SetManifest(bool there) {
  manifest = there;
  good = static_cast<uint32_t>(
      std::count_if(shards.begin(), shards.end(), [&](const auto& s) { return Usable(s.second); }));
}

void Checkpoint::Clear(TierKind tier) {
  for (const auto& [rank, shard] : shards) {
    Set(rank, tier, {});
  }
  if (tier == TierKind::kRemote) {
    SetManifest(false);
  }
}

bool Checkpoint::CommittedAt(TierKind tier) const {
  return !contradictory && world_size > 0 && GoodAt(tier) == world_size &&
         (tier != TierKind::kRemote || manifest);
}

uint64_t Checkpoint::BytesAt(TierKind tier) const {
  uint64_t sum = 0;
  for (const auto& [rank, shard] : shards) {
    sum += shard.at(tier).kind == CopyState::Kind::kNone ? 0 : shard.bytes;
  }
  return sum;
}

bool Checkpoint::AnythingDurable() const {
  return removing || std::any_of(kAllTiers.begin(), kAllTiers.end(), [&](TierKind tier) {
           return tier != TierKind::kMemory && (AnyAt(tier) || drain(tier).Busy());
         });
}

bool Checkpoint::Readable(Rank rank, TierKind tier) const {
  const auto shard = shards.find(rank);
  return shard != shards.end() && shard->second.at(tier).kind == CopyState::Kind::kGood &&
         (tier != TierKind::kRemote || manifest);
}

std::optional<TierKind> Checkpoint::Nearest(Rank rank, const std::set<TierKind>& without) const {
  for (const TierKind tier : kAllTiers) {
    if (without.count(tier) == 0 && Readable(rank, tier)) {
      return tier;
    }
  }
  return std::nullopt;
}

CheckpointView Checkpoint::View(CheckpointId id) const {
  CheckpointView view;
  view.id = id;
  view.world_size = world_size;
  view.unix_ms = unix_ms;
  view.consistent = !contradictory && !given_up;
  view.given_up = given_up;
  view.complete = Complete();
  for (const auto& [rank, shard] : shards) {
    TierSet in = 0;
    for (const TierKind tier : kAllTiers) {
      in |= Readable(rank, tier) ? SetOf(tier) : TierSet{0};
    }
    view.AddRank(in);
  }
  for (const TierKind tier : kAllTiers) {
    TierPresence& there = view.at(tier);
    there.unlisted = tier == TierKind::kRemote && !manifest ? GoodAt(tier) : 0;
    there.bad = BadAt(tier);
    there.bytes = BytesAt(tier);
    there.flushing = drain(tier).Busy();
    there.wanted = drain(tier).phase == Drain::Phase::kWanted;
  }
  for (const Drain& drain : drains) {
    for (const auto& [rank, from] : drain.waiting) {
      view.at(from).source = true;
    }
  }
  // What waits to be copied on from nvme must not go before that: its memory may be given up.
  if (view.at(TierKind::kRemote).wanted && AnyAt(TierKind::kNvme)) {
    view.at(TierKind::kNvme).source = true;
  }
  return view;
}

std::string Checkpoint::CheckCounts() const {
  std::array<uint32_t, kTierKinds> good_there{};
  std::array<uint32_t, kTierKinds> bad_there{};
  uint32_t usable = 0;
  for (const auto& [rank, shard] : shards) {
    for (const TierKind tier : kAllTiers) {
      good_there[Index(tier)] += shard.at(tier).kind == CopyState::Kind::kGood ? 1 : 0;
      bad_there[Index(tier)] += shard.at(tier).kind == CopyState::Kind::kBad ? 1 : 0;
    }
    usable += Usable(shard) ? 1 : 0;
    if (writing.count(rank) > 0) {
      return absl::StrCat("rank ", rank, " writes what it has sealed");
    }
  }
  if (good_there != good_at_ || bad_there != bad_at_) {
    return "its copies in a tier are miscounted";
  }
  if (usable != good) {
    return absl::StrCat("counts ", good, " ranks with a good copy, has ", usable);
  }
  return "";
}

}  // namespace holdfast
