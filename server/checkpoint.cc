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

// What the copy takes where it lies.
uint64_t BytesOf(const ShardState& shard, const CopyState& copy) {
  return copy.detail.file_bytes != 0 ? copy.detail.file_bytes : shard.bytes;
}

}  // namespace

bool Checkpoint::Usable(const ShardState& shard) const {
  return std::any_of(kAllTiers.begin(), kAllTiers.end(),
                     [&](TierKind tier) { return Readable(shard, shard.at(tier), tier); });
}

bool Checkpoint::Readable(const ShardState& shard, const CopyState& copy, TierKind tier) const {
  return copy.kind == CopyState::Kind::kGood &&
         (tier != TierKind::kRemote || (manifest && !Doubted(shard)));
}

bool Checkpoint::Doubted(const ShardState& shard) const {
  const CopyState& copy = shard.at(TierKind::kRemote);
  return copy.kind == CopyState::Kind::kGood && copy.detail.file_bytes != 0 && Lacks(shard.sharers);
}

// Whether any copy in remote is not good that one of these may need.
bool Checkpoint::Lacks(uint32_t sharers) const {
  return sharers == 0 ? shards.size() > GoodAt(TierKind::kRemote) : sharers_[sharers].lacking > 0;
}

bool Checkpoint::Doubted(Rank rank) const {
  const auto shard = shards.find(rank);
  return shard != shards.end() && Doubted(shard->second);
}

// A copy that a node keeps for others counts as a peer's only while that node has none of the
// rank's own: it would be lost with that one.
bool Checkpoint::CountsAsPeers(const ShardState& shard, const ShardState::Copy& copy) {
  return copy.place.tier == TierKind::kPeer && copy.state.kind == CopyState::Kind::kGood &&
         std::none_of(shard.copies.begin(), shard.copies.end(), [&](const ShardState::Copy& other) {
           return other.state.kind == CopyState::Kind::kGood &&
                  other.place.node == copy.place.node &&
                  (other.place.tier == TierKind::kMemory || other.place.tier == TierKind::kNvme);
         });
}

// The tiers that have good copies of it.
TierSet Checkpoint::GoodIn(const ShardState& shard) {
  TierSet good_in = 0;
  for (const ShardState::Copy& copy : shard.copies) {
    const bool counts = copy.place.tier == TierKind::kPeer
                            ? CountsAsPeers(shard, copy)
                            : copy.state.kind == CopyState::Kind::kGood;
    good_in |= counts ? SetOf(copy.place.tier) : TierSet{0};
  }
  return good_in;
}

const std::vector<Rank>& Checkpoint::SharersOf(Rank rank) const {
  const auto shard = shards.find(rank);
  return sharers_[shard == shards.end() ? 0 : shard->second.sharers].ranks;
}

std::optional<Rank> Checkpoint::DoubtedFor(Rank rank) const {
  if (!Doubted(rank)) {
    return std::nullopt;
  }
  const uint32_t sharers = shards.at(rank).sharers;
  const auto lacks = [&](const ShardState& other) {
    return (sharers == 0 || other.sharers == sharers) &&
           other.at(TierKind::kRemote).kind != CopyState::Kind::kGood;
  };
  const auto bad =
      std::find_if(bad_.begin(), bad_.end(), [&](Rank other) { return lacks(shards.at(other)); });
  return bad != bad_.end() ? *bad : std::find_if(shards.begin(), shards.end(), [&](const auto& s) {
                                      return lacks(s.second);
                                    })->first;
}

const CopyState& ShardState::at(CopyPlace place) const {
  static const CopyState none;
  const auto it = std::find_if(copies.begin(), copies.end(),
                               [&](const Copy& copy) { return copy.place == place; });
  return it == copies.end() ? none : it->state;
}

const CopyState& ShardState::at(TierKind tier) const {
  static const CopyState none;
  const CopyState* best = &none;
  const auto worth = [](CopyState::Kind kind) {
    return kind == CopyState::Kind::kGood   ? 3
           : kind == CopyState::Kind::kBad  ? 2
           : kind == CopyState::Kind::kAway ? 1
                                            : 0;
  };
  for (const Copy& copy : copies) {
    if (copy.place.tier == tier && worth(copy.state.kind) > worth(best->kind)) {
      best = &copy.state;
    }
  }
  return *best;
}

void Checkpoint::AddShard(Rank rank, uint64_t shard_bytes, int64_t sealed_unix_ms, bool time_sure,
                          const Likeness& likeness) {
  const auto [it, fresh] =
      shards.try_emplace(rank, ShardState{shard_bytes, sealed_unix_ms, time_sure, {}, {}});
  if (fresh) {
    bytes += shard_bytes;
    Count(it->second, 1);
    CountGood();
  } else if (time_sure && !it->second.time_sure) {
    it->second.unix_ms = sealed_unix_ms;
    it->second.time_sure = true;
  }
  unix_ms = std::max(unix_ms, sealed_unix_ms);
  NoteLikeness(rank, likeness);
}

void Checkpoint::NoteLikeness(Rank rank, const Likeness& likeness) {
  const auto shard = shards.find(rank);
  if (shard == shards.end() || shard->second.likeness.any() || !likeness.any()) {
    return;
  }
  const auto fresh = static_cast<uint32_t>(sharers_.size());
  const uint32_t sharers = sharers_of_.try_emplace(likeness.content, fresh).first->second;
  if (sharers == fresh) {
    sharers_.emplace_back();
  }
  Count(shard->second, -1);
  shard->second.likeness = likeness;
  shard->second.sharers = sharers;
  Count(shard->second, 1);
  std::vector<Rank>& ranks = sharers_[sharers].ranks;
  ranks.insert(std::lower_bound(ranks.begin(), ranks.end(), rank), rank);
  CountGood();
}

void Checkpoint::Set(Rank rank, CopyPlace place, CopyState state) {
  ShardState& shard = shards.at(rank);
  apart_.reset();
  Count(shard, -1);
  const auto it = std::find_if(shard.copies.begin(), shard.copies.end(),
                               [&](const ShardState::Copy& copy) { return !(copy.place < place); });
  const bool there = it != shard.copies.end() && it->place == place;
  if (state.kind == CopyState::Kind::kNone) {
    if (there) {
      shard.copies.erase(it);
    }
  } else if (there) {
    it->state = std::move(state);
  } else {
    const auto at = it - shard.copies.begin();
    shard.copies.reserve(kTierKinds);
    shard.copies.insert(shard.copies.begin() + at, {place, std::move(state)});
  }
  Count(shard, 1);
  if (place.tier != TierKind::kRemote) {
    NoteOn(place.node, rank,
           std::any_of(shard.copies.begin(), shard.copies.end(), [&](const auto& copy) {
             return copy.place.tier != TierKind::kRemote && copy.place.node == place.node;
           }));
  }
  if (std::any_of(shard.copies.begin(), shard.copies.end(),
                  [](const auto& copy) { return copy.state.kind == CopyState::Kind::kBad; })) {
    bad_.insert(rank);
  } else {
    bad_.erase(rank);
  }
  CountGood();
}

// What the shard adds to all that is counted.
void Checkpoint::Count(const ShardState& shard, int by) {
  const auto add = [by](auto& counter, uint64_t amount) {
    counter +=
        static_cast<std::remove_reference_t<decltype(counter)>>(by < 0 ? 0 - amount : amount);
  };
  const TierSet good_in = GoodIn(shard);
  TierSet bad_in = 0;
  for (const ShardState::Copy& copy : shard.copies) {
    const CopyState::Kind kind = copy.state.kind;
    bad_in |= kind == CopyState::Kind::kBad ? SetOf(copy.place.tier) : TierSet{0};
    const bool away = kind == CopyState::Kind::kAway;
    add(away_, away ? 1 : 0);
    add(bytes_at_[Index(copy.place.tier)], away ? 0 : BytesOf(shard, copy.state));
  }
  for (const TierKind tier : kAllTiers) {
    add(good_at_[Index(tier)], Has(good_in, tier) ? 1 : 0);
    add(bad_at_[Index(tier)], Has(bad_in, tier) && !Has(good_in, tier) ? 1 : 0);
  }
  add(ranks_in_[good_in], 1);
  CountSharers(shard, good_in, by);
}

// What a shard's copy in remote is to those that hold the same.
void Checkpoint::CountSharers(const ShardState& shard, TierSet good_in, int by) {
  Sharers& sharers = sharers_[shard.sharers];
  const auto count_doubted = [&](bool more) {
    if (shard.sharers != 0 && sharers.lacking > 0) {
      for (TierSet in = 0; in < kTierSets; ++in) {
        doubted_in_[in] += more ? sharers.relying[in] : 0 - sharers.relying[in];
      }
    }
  };
  count_doubted(false);
  const uint32_t amount = by < 0 ? 0u - 1 : 1;
  if (!Has(good_in, TierKind::kRemote)) {
    sharers.lacking += amount;
  } else if (shard.at(TierKind::kRemote).detail.file_bytes != 0) {
    sharers.relying[good_in] += amount;
  }
  count_doubted(true);
}

uint32_t Checkpoint::DoubtedIn(TierSet in) const {
  return doubted_in_[in] + (Lacks(0) ? sharers_[0].relying[in] : 0);
}

// Ranks by the set of tiers from which they can be read.
std::array<uint32_t, kTierSets> Checkpoint::UsableIn() const {
  std::array<uint32_t, kTierSets> usable{};
  for (TierSet in = 0; in < kTierSets; ++in) {
    const uint32_t not_there = !Has(in, TierKind::kRemote) ? 0
                               : manifest                  ? DoubtedIn(in)
                                                           : ranks_in_[in];
    usable[in] += ranks_in_[in] - not_there;
    usable[in & ~SetOf(TierKind::kRemote)] += not_there;
  }
  return usable;
}

void Checkpoint::CountGood() {
  const TierSet remote_alone = SetOf(TierKind::kRemote);
  const uint32_t nowhere =
      ranks_in_[0] + (manifest ? DoubtedIn(remote_alone) : ranks_in_[remote_alone]);
  good = static_cast<uint32_t>(shards.size()) - nowhere;
}

void Checkpoint::NoteOn(NodeId node, Rank rank, bool there) {
  std::vector<Rank>& ranks = ranks_on_[node];
  const auto it = std::lower_bound(ranks.begin(), ranks.end(), rank);
  const bool known = it != ranks.end() && *it == rank;
  if (there && !known) {
    ranks.insert(it, rank);
  } else if (!there && known) {
    ranks.erase(it);
  }
  if (ranks.empty()) {
    ranks_on_.erase(node);
  }
}

bool Checkpoint::InMemoryOf(NodeId node) const {
  const std::vector<Rank>& ranks = RanksOn(node);
  return std::any_of(ranks.begin(), ranks.end(), [&](Rank rank) {
    const CopyState::Kind kind = shards.at(rank).at({TierKind::kMemory, node}).kind;
    return kind == CopyState::Kind::kGood || kind == CopyState::Kind::kBad;
  });
}

bool Checkpoint::BadInMemoryOf(NodeId node) const {
  const std::vector<Rank>& ranks = RanksOn(node);
  return std::any_of(ranks.begin(), ranks.end(), [&](Rank rank) {
    return shards.at(rank).at({TierKind::kMemory, node}).kind == CopyState::Kind::kBad;
  });
}

const std::vector<Rank>& Checkpoint::RanksOn(NodeId node) const {
  static const std::vector<Rank> none;
  const auto on = ranks_on_.find(node);
  return on == ranks_on_.end() ? none : on->second;
}

void Checkpoint::SetGood(Rank rank, CopyPlace place, CopyDetail detail) {
  Set(rank, place, {CopyState::Kind::kGood, std::move(detail), ""});
}

bool Checkpoint::SetBad(Rank rank, CopyPlace place, std::string why) {
  const auto shard = shards.find(rank);
  if (shard == shards.end() || shard->second.at(place).kind != CopyState::Kind::kGood) {
    return false;
  }
  CopyDetail detail = shard->second.at(place).detail;
  Set(rank, place, {CopyState::Kind::kBad, std::move(detail), std::move(why)});
  return true;
}

void Checkpoint::SetFoundBad(Rank rank, CopyPlace place, CopyDetail detail, std::string why) {
  Set(rank, place, {CopyState::Kind::kBad, std::move(detail), std::move(why)});
}

void Checkpoint::SetNone(Rank rank, CopyPlace place) {
  if (shards.count(rank) > 0) {
    Set(rank, place, {});
  }
}

bool Checkpoint::SetAway(NodeId node) {
  bool any = false;
  const std::vector<Rank> ranks = RanksOn(node);
  for (const Rank rank : ranks) {
    for (const TierKind tier : {TierKind::kMemory, TierKind::kNvme, TierKind::kPeer}) {
      const CopyState& copy = shards.at(rank).at(CopyPlace{tier, node});
      if (copy.kind == CopyState::Kind::kGood) {
        CopyDetail detail = copy.detail;
        Set(rank, {tier, node}, {CopyState::Kind::kAway, std::move(detail), ""});
        any = true;
      }
    }
  }
  return any;
}

void Checkpoint::SetManifest(bool there) {
  manifest = there;
  CountGood();
}

void Checkpoint::Clear(TierKind tier) {
  for (auto& [rank, shard] : shards) {
    while (shard.at(tier).kind != CopyState::Kind::kNone) {
      const auto it = std::find_if(shard.copies.begin(), shard.copies.end(),
                                   [&](const auto& copy) { return copy.place.tier == tier; });
      const CopyPlace place = it->place;
      Set(rank, place, {});
    }
  }
  if (tier == TierKind::kRemote) {
    SetManifest(false);
  }
}

bool Checkpoint::WholeWithAway() const {
  if (uint64_t{good} + away_ < world_size) {  // (of a rank several copies may be away)
    return false;
  }
  return !contradictory && world_size > 0 && shards.size() == world_size &&
         std::all_of(shards.begin(), shards.end(), [&](const auto& s) {
           return Usable(s.second) ||
                  std::any_of(s.second.copies.begin(), s.second.copies.end(),
                              [](const auto& c) { return c.state.kind == CopyState::Kind::kAway; });
         });
}

bool Checkpoint::CommittedAt(TierKind tier) const {
  return !contradictory && world_size > 0 && GoodAt(tier) == world_size &&
         (tier != TierKind::kRemote || manifest);
}

bool Checkpoint::AnythingDurable() const {
  return removing || std::any_of(kAllTiers.begin(), kAllTiers.end(), [&](TierKind tier) {
           return tier != TierKind::kMemory && (AnyAt(tier) || drain(tier).Busy());
         });
}

bool Checkpoint::Readable(Rank rank, TierKind tier) const {
  const auto shard = shards.find(rank);
  return shard != shards.end() && Readable(shard->second, shard->second.at(tier), tier);
}

bool Checkpoint::ReadableOn(NodeId node, Rank rank, TierKind tier) const {
  const auto shard = shards.find(rank);
  if (tier == TierKind::kPeer) {
    return shard != shards.end() &&
           std::any_of(shard->second.copies.begin(), shard->second.copies.end(),
                       [node](const ShardState::Copy& copy) {
                         return copy.state.kind == CopyState::Kind::kGood &&
                                copy.place.tier != TierKind::kRemote &&
                                (copy.place.tier == TierKind::kPeer || copy.place.node != node);
                       });
  }
  return shard != shards.end() &&
         Readable(shard->second, shard->second.at(PlaceOf(tier, node)), tier);
}

std::vector<NodeId> Checkpoint::PeersWith(Rank rank, NodeId node) const {
  const auto shard = shards.find(rank);
  std::vector<NodeId> nodes;
  if (shard == shards.end()) {
    return nodes;
  }
  for (const TierKind tier : {TierKind::kPeer, TierKind::kMemory}) {
    for (const ShardState::Copy& copy : shard->second.copies) {
      const bool there = copy.place.tier == tier && copy.state.kind == CopyState::Kind::kGood;
      if (there && (tier == TierKind::kPeer || copy.place.node != node)) {
        const bool first = copy.place.node == node;
        nodes.insert(first ? nodes.begin() : nodes.end(), copy.place.node);
      }
    }
  }
  return nodes;
}

std::vector<NodeId> Checkpoint::DrivesWith(Rank rank, NodeId node) const {
  const auto shard = shards.find(rank);
  std::vector<NodeId> nodes;
  if (shard == shards.end()) {
    return nodes;
  }
  const std::vector<NodeId> in_memory = PeersWith(rank, node);
  for (const ShardState::Copy& copy : shard->second.copies) {
    const bool there =
        copy.place.tier == TierKind::kNvme && copy.state.kind == CopyState::Kind::kGood;
    if (there && copy.place.node != node &&
        std::find(in_memory.begin(), in_memory.end(), copy.place.node) == in_memory.end()) {
      nodes.push_back(copy.place.node);
    }
  }
  return nodes;
}

bool Checkpoint::InMemory(Rank rank) const {
  return Readable(rank, TierKind::kMemory) || Readable(rank, TierKind::kPeer);
}

uint32_t Checkpoint::PeerCopies(Rank rank, const std::set<NodeId>& but_on) const {
  const auto shard = shards.find(rank);
  return shard == shards.end()
             ? 0
             : static_cast<uint32_t>(std::count_if(
                   shard->second.copies.begin(), shard->second.copies.end(), [&](const auto& copy) {
                     return CountsAsPeers(shard->second, copy) &&
                            but_on.count(copy.place.node) == 0;
                   }));
}

std::vector<NodeId> Checkpoint::OwnNodes(Rank rank) const {
  std::vector<NodeId> nodes;
  const auto shard = shards.find(rank);
  if (shard == shards.end()) {
    return nodes;
  }
  for (const ShardState::Copy& copy : shard->second.copies) {
    const bool own = copy.place.tier == TierKind::kMemory || copy.place.tier == TierKind::kNvme;
    if (own && copy.state.kind == CopyState::Kind::kGood &&
        std::find(nodes.begin(), nodes.end(), copy.place.node) == nodes.end()) {
      nodes.push_back(copy.place.node);
    }
  }
  return nodes;
}

bool Checkpoint::PeersApart(const std::function<NodeId(NodeId)>& domain) const {
  if (apart_) {
    return *apart_;
  }
  apart_ = std::all_of(shards.begin(), shards.end(), [&](const auto& s) {
    const std::vector<ShardState::Copy>& copies = s.second.copies;
    const auto own = [](const ShardState::Copy& copy) {
      return copy.place.tier == TierKind::kMemory || copy.place.tier == TierKind::kNvme;
    };
    const auto apart = [&](const ShardState::Copy& copy) {
      return copy.place.tier == TierKind::kPeer && copy.state.kind == CopyState::Kind::kGood &&
             std::none_of(copies.begin(), copies.end(), [&](const ShardState::Copy& other) {
               return own(other) && other.state.kind == CopyState::Kind::kGood &&
                      domain(other.place.node) == domain(copy.place.node);
             });
    };
    return !Has(GoodIn(s.second), TierKind::kPeer) ||
           std::any_of(copies.begin(), copies.end(), apart);
  });
  return *apart_;
}

std::optional<TierKind> Checkpoint::Nearest(Rank rank, NodeId node,
                                            const std::set<TierKind>& without) const {
  for (const TierKind tier : kAllTiers) {
    if (without.count(tier) == 0 && ReadableOn(node, rank, tier)) {
      return tier;
    }
  }
  return std::nullopt;
}

std::optional<CopyPlace> Checkpoint::GoodPlace(Rank rank, TierKind tier) const {
  if (!Readable(rank, tier)) {
    return std::nullopt;
  }
  const std::vector<ShardState::Copy>& copies = shards.at(rank).copies;
  return std::find_if(copies.begin(), copies.end(),
                      [&](const ShardState::Copy& copy) {
                        return copy.place.tier == tier && copy.state.kind == CopyState::Kind::kGood;
                      })
      ->place;
}

std::set<NodeId> Checkpoint::NodesWith(TierKind tier) const {
  std::set<NodeId> nodes;
  for (const auto& [rank, shard] : shards) {
    for (const ShardState::Copy& copy : shard.copies) {
      if (copy.place.tier == tier && copy.state.kind != CopyState::Kind::kAway) {
        nodes.insert(copy.place.node);
      }
    }
  }
  for (const auto& [rank, from] : drain(tier).waiting) {
    nodes.insert(PlaceOf(tier, from.node).node);
  }
  return nodes;
}

CheckpointView Checkpoint::View(CheckpointId id) const {
  CheckpointView view;
  view.id = id;
  view.world_size = world_size;
  view.unix_ms = unix_ms;
  view.consistent = !contradictory;
  view.complete = Complete();
  view.ranks_in = UsableIn();
  view.restorable = good;
  for (TierSet in = 0; in < kTierSets; ++in) {
    for (const TierKind tier : kAllTiers) {
      view.at(tier).good += Has(in, tier) ? view.ranks_in[in] : 0;
    }
    view.at(TierKind::kRemote).doubted += manifest ? DoubtedIn(in) : 0;
  }
  for (const TierKind tier : kAllTiers) {
    TierPresence& there = view.at(tier);
    there.unlisted = tier == TierKind::kRemote && !manifest ? GoodAt(tier) : 0;
    there.promised = tier == TierKind::kRemote && (manifest || promised_there);
    there.bad = BadAt(tier);
    there.bytes = BytesAt(tier);
    there.flushing = drain(tier).Busy();
    there.wanted = drain(tier).phase == Drain::Phase::kWanted;
  }
  for (const Drain& drain : drains) {
    for (const TierKind tier : kAllTiers) {
      view.at(tier).source = view.at(tier).source || drain.waiting.ReadFrom(tier);
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
  uint32_t away = 0;
  std::array<uint64_t, kTierKinds> bytes_there{};
  std::array<uint32_t, kTierSets> in_there{};
  std::vector<Sharers> sharers_there(sharers_.size());
  for (const auto& [rank, shard] : shards) {
    bool bad = false;
    const TierSet in = GoodIn(shard);
    for (const TierKind tier : kAllTiers) {
      good_there[Index(tier)] += Has(in, tier) ? 1 : 0;
      const bool any_bad =
          std::any_of(shard.copies.begin(), shard.copies.end(), [&](const auto& copy) {
            return copy.place.tier == tier && copy.state.kind == CopyState::Kind::kBad;
          });
      bad_there[Index(tier)] += any_bad && !Has(in, tier) ? 1 : 0;
    }
    usable += Usable(shard) ? 1 : 0;
    for (const ShardState::Copy& copy : shard.copies) {
      away += copy.state.kind == CopyState::Kind::kAway ? 1 : 0;
      bad = bad || copy.state.kind == CopyState::Kind::kBad;
      bytes_there[Index(copy.place.tier)] +=
          copy.state.kind == CopyState::Kind::kAway ? 0 : BytesOf(shard, copy.state);
      const auto on = ranks_on_.find(copy.place.node);
      if (copy.place.tier != TierKind::kRemote &&
          (on == ranks_on_.end() ||
           !std::binary_search(on->second.begin(), on->second.end(), rank))) {
        return absl::StrCat("rank ", rank, " has a copy on a node that is not known for it");
      }
    }
    ++in_there[in];
    Sharers& sharers = sharers_there[shard.sharers];
    if (shard.sharers != 0) {
      sharers.ranks.push_back(rank);
    }
    if (!Has(in, TierKind::kRemote)) {
      ++sharers.lacking;
    } else if (shard.at(TierKind::kRemote).detail.file_bytes != 0) {
      ++sharers.relying[in];
    }
    if (bad != (bad_.count(rank) > 0)) {
      return absl::StrCat("rank ", rank, " has bad copies, or has none, against what is noted");
    }
    if (writing.count(rank) > 0) {
      return absl::StrCat("rank ", rank, " writes what it has sealed");
    }
  }
  if (good_there != good_at_ || bad_there != bad_at_ || away != away_ || bytes_there != bytes_at_ ||
      in_there != ranks_in_) {
    return "its copies in a tier are miscounted";
  }
  std::array<uint32_t, kTierSets> doubted_there{};
  for (size_t i = 1; i < sharers_there.size(); ++i) {
    for (TierSet in = 0; in < kTierSets; ++in) {
      doubted_there[in] += sharers_there[i].lacking > 0 ? sharers_there[i].relying[in] : 0;
    }
  }
  if (sharers_there != sharers_ || doubted_there != doubted_in_) {
    return "it is miscounted whose copies leave out what others have";
  }
  if (usable != good) {
    return absl::StrCat("counts ", good, " ranks with a good copy, has ", usable);
  }
  return "";
}

}  // namespace holdfast
