#include "recovery/ownership.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <string>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/hash/hash.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "tiers/image/layout_rules.h"

namespace holdfast {
namespace {

// In Ownership::slices_: not a tensor, so nobody else's.
constexpr uint32_t kObject = std::numeric_limits<uint32_t>::max();

// Identical slices are found through a table; where something lies in it decides nothing.
struct SliceHash {
  size_t operator()(const Slice* slice) const {
    size_t hash =
        absl::HashOf(slice->name, slice->dtype, slice->global_shape, slice->place.index());
    if (const auto* box = std::get_if<BoxPlace>(&slice->place)) {
      hash = absl::HashOf(hash, box->offset, box->shape);
    } else if (const auto* flat = std::get_if<FlatPlace>(&slice->place)) {
      hash = absl::HashOf(hash, flat->start, flat->length);
    }
    return hash;
  }
};
struct SameSlice {
  bool operator()(const Slice* a, const Slice* b) const {
    return a->name == b->name && a->dtype == b->dtype && a->global_shape == b->global_shape &&
           a->place == b->place;
  }
};

// The order in which slices are given out. Different slices that it holds equal are of one name and
// contradict each other: no rank has two of them, so that which comes first makes no difference.
bool GivenBefore(const Slice& a, const Slice& b) {
  return a.bytes != b.bytes ? a.bytes > b.bytes : image_internal::CompareSlices(a, b) < 0;
}

absl::Status Refuse(const LayoutHash& layout, const std::string& why) {
  return absl::InvalidArgumentError(
      absl::StrCat("ownership of slices: layout ", ToHex(layout), ": ", why));
}

// What GivenBefore and the sums rely on; who decoded the layout checked it too.
absl::Status CheckLayout(const NamedLayout& named) {
  uint64_t total = 0;
  const Slice* before = nullptr;
  for (const Slice& slice : named.layout->slices) {
    const absl::StatusOr<uint64_t> bytes = image_internal::CheckSlice(slice);
    if (!bytes.ok()) {
      return Refuse(named.hash, Message(bytes.status()));
    }
    if (*bytes != slice.bytes) {
      return Refuse(named.hash, absl::StrCat("slice ", image_internal::QuoteName(slice.name),
                                             " says that it has ", slice.bytes,
                                             " bytes, its shape and dtype make ", *bytes));
    }
    total += *bytes;  // each is at most kImageBytesMax: no overflow before the check
    if (total > kImageBytesMax) {
      return Refuse(named.hash, absl::StrCat("its slices exceed the limit of ", kImageBytesMax,
                                             " bytes for an image"));
    }
    if (before != nullptr && image_internal::CompareSlices(*before, slice) > 0) {
      return Refuse(named.hash, absl::StrCat("slice ", image_internal::QuoteName(slice.name),
                                             " is not in the order of images"));
    }
    before = &slice;
  }
  const absl::Status agree = image_internal::CheckAgreement(named.layout->slices);
  return agree.ok() ? agree : Refuse(named.hash, Message(agree));
}

}  // namespace

// Computes one Ownership; its members are what only the computation needs.
class Ownership::Builder {
 public:
  absl::StatusOr<Ownership> Build(std::span<const RankLayout> ranks,
                                  std::span<const NamedLayout> layouts) {
    HF_RETURN_IF_ERROR(TakeRanks(ranks));
    HF_RETURN_IF_ERROR(TakeLayouts(layouts));
    FindIdenticalSlices();
    GiveOut();
    return std::move(result_);
  }

 private:
  struct Loaded {
    uint64_t bytes = 0;
    uint32_t index = 0;  // into ranks_, which are ascending: of equals the lowest rank is first
    bool operator<(const Loaded& other) const {
      return bytes != other.bytes ? bytes < other.bytes : index < other.index;
    }
  };

  absl::Status TakeRanks(std::span<const RankLayout> ranks) {
    if (ranks.empty()) {
      return absl::InvalidArgumentError("ownership of slices: no ranks are given");
    }
    std::vector<RankLayout>& sorted = result_.ranks_;
    sorted.assign(ranks.begin(), ranks.end());
    std::sort(sorted.begin(), sorted.end());
    if (sorted.back().rank >= kWorldSizeMax) {
      return absl::InvalidArgumentError(absl::StrCat("ownership of slices: rank ",
                                                     sorted.back().rank,
                                                     " is not below the limit of ", kWorldSizeMax));
    }
    for (size_t i = 1; i < sorted.size(); ++i) {
      if (sorted[i].rank == sorted[i - 1].rank) {
        return absl::InvalidArgumentError(
            absl::StrCat("ownership of slices: rank ", sorted[i].rank, " is given twice"));
      }
    }
    return absl::OkStatus();
  }

  // Numbers the layouts that ranks have, checks them, and lists the ranks of each.
  absl::Status TakeLayouts(std::span<const NamedLayout> layouts) {
    // 1. By hash, each once.
    std::vector<NamedLayout> sorted(layouts.begin(), layouts.end());
    const auto by_hash = [](const NamedLayout& a, const NamedLayout& b) { return a.hash < b.hash; };
    std::sort(sorted.begin(), sorted.end(), by_hash);
    for (size_t i = 1; i < sorted.size(); ++i) {
      if (sorted[i].hash == sorted[i - 1].hash) {
        return Refuse(sorted[i].hash, "it is given twice");
      }
    }

    // 2. Each rank's.
    std::vector<uint32_t> which;  // by rank's index: in `sorted`
    std::vector<uint32_t> ranks_with(sorted.size(), 0);
    for (const RankLayout& rank : result_.ranks_) {
      const auto found =
          std::lower_bound(sorted.begin(), sorted.end(), NamedLayout{rank.layout}, by_hash);
      if (found == sorted.end() || found->hash != rank.layout || found->layout == nullptr) {
        return absl::NotFoundError(absl::StrCat(
            "ownership of slices: layout ", ToHex(rank.layout), " of rank ", rank.rank,
            " is not among the ", sorted.size(), " given: get it from a node that has it"));
      }
      which.push_back(static_cast<uint32_t>(found - sorted.begin()));
      ++ranks_with[which.back()];
    }

    // 3. The limit, before anything is looked at.
    uint64_t slices = 0;
    for (size_t i = 0; i < sorted.size(); ++i) {
      slices += ranks_with[i] > 0 ? sorted[i].layout->slices.size() : 0;
    }
    if (slices > kOwnershipSlicesMax) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "ownership of slices: the layouts have ", slices, " slices together, at most ",
          kOwnershipSlicesMax, " are compared: every rank writes its own"));
    }

    // 4. Numbers for those that some rank has.
    std::vector<uint32_t> number(sorted.size(), 0);
    result_.first_member_.push_back(0);
    result_.first_slice_.push_back(0);
    for (size_t i = 0; i < sorted.size(); ++i) {
      if (ranks_with[i] == 0) {
        continue;
      }
      HF_RETURN_IF_ERROR(CheckLayout(sorted[i]));
      number[i] = static_cast<uint32_t>(layouts_.size());
      layouts_.push_back(sorted[i]);
      result_.first_member_.push_back(result_.first_member_.back() + ranks_with[i]);
      result_.first_slice_.push_back(result_.first_slice_.back() +
                                     static_cast<uint32_t>(sorted[i].layout->slices.size()));
    }

    // 5. The ranks of each.
    result_.members_.resize(result_.ranks_.size());
    std::vector<uint32_t> next(result_.first_member_);
    for (uint32_t index = 0; index < which.size(); ++index) {
      const uint32_t layout = number[which[index]];
      result_.layout_of_.push_back(layout);
      result_.members_[next[layout]++] = index;
    }
    return absl::OkStatus();
  }

  // Numbers the slices so that identical ones have the same number, and lists where each one lies.
  void FindIdenticalSlices() {
    // 1. Numbers.
    absl::flat_hash_map<const Slice*, uint32_t, SliceHash, SameSlice> numbers;
    std::vector<uint32_t> place_count;  // by slice's number
    result_.slices_.reserve(result_.first_slice_.back());
    for (const NamedLayout& named : layouts_) {
      for (const Slice& slice : named.layout->slices) {
        if (slice.kind != SliceKind::kTensor) {
          result_.slices_.push_back(kObject);
          continue;
        }
        const auto [it, fresh] =
            numbers.try_emplace(&slice, static_cast<uint32_t>(distinct_.size()));
        if (fresh) {
          distinct_.push_back(&slice);
          place_count.push_back(0);
        }
        ++place_count[it->second];
        result_.slices_.push_back(it->second);
      }
    }

    // 2. Where each one lies.
    result_.held_.resize(distinct_.size() + 1);
    for (size_t i = 0; i < distinct_.size(); ++i) {
      result_.held_[i + 1].first_place = result_.held_[i].first_place + place_count[i];
    }
    result_.places_.resize(result_.held_.back().first_place);
    std::vector<uint32_t> filled(distinct_.size(), 0);
    for (uint32_t layout = 0; layout < layouts_.size(); ++layout) {
      const uint32_t first = result_.first_slice_[layout];
      for (uint32_t slice = 0; slice < result_.first_slice_[layout + 1] - first; ++slice) {
        if (const uint32_t held = result_.slices_[first + slice]; held != kObject) {
          result_.places_[result_.held_[held].first_place + filled[held]++] = {layout, slice};
        }
      }
    }
  }

  void GiveOut() {
    // 1. What one rank alone holds is its own, and counts before anything is given.
    std::vector<uint64_t>& owned = result_.owned_bytes_;
    owned.resize(result_.ranks_.size(), 0);
    std::vector<uint32_t> shared;
    for (uint32_t held = 0; held < distinct_.size(); ++held) {
      const std::span<const Place> places = result_.PlacesOf(held);
      const std::span<const uint32_t> ranks = result_.RanksOf(places.front().layout);
      if (places.size() == 1 && ranks.size() == 1) {
        result_.held_[held].owner = ranks.front();
        owned[ranks.front()] += distinct_[held]->bytes;
      } else {
        shared.push_back(held);
      }
    }

    // 2. One heap of its ranks per layout. Where a layout has several, none of them has anything
    // yet, so that ascending ranks are a heap.
    std::vector<Loaded> heaps;
    heaps.reserve(result_.members_.size());
    for (const uint32_t index : result_.members_) {
      heaps.push_back({owned[index], index});
    }

    // 3. Each slice, in their order, goes to the least loaded of its holders.
    std::sort(shared.begin(), shared.end(),
              [this](uint32_t a, uint32_t b) { return GivenBefore(*distinct_[a], *distinct_[b]); });
    std::vector<uint32_t> turns(result_.ranks_.size(), 0);
    for (const uint32_t held : shared) {
      uint32_t best = 0;  // where its heap begins
      uint32_t best_layout = kObject;
      for (const Place& place : result_.PlacesOf(held)) {
        const uint32_t top = result_.first_member_[place.layout];
        if (best_layout == kObject || heaps[top] < heaps[best]) {
          best = top;
          best_layout = place.layout;
        }
        ++result_.work_.compared;
      }
      const uint32_t owner = heaps[best].index;
      result_.held_[held].owner = owner;
      result_.held_[held].turn = turns[owner]++;
      owned[owner] += distinct_[held]->bytes;
      heaps[best].bytes = owned[owner];
      SiftDown(std::span(heaps).subspan(best, result_.RanksOf(best_layout).size()));
    }
  }

  // The first of a heap has grown.
  void SiftDown(std::span<Loaded> heap) {
    size_t at = 0;
    for (size_t child = 1; child < heap.size(); child = 2 * at + 1) {
      if (child + 1 < heap.size() && heap[child + 1] < heap[child]) {
        ++child;
      }
      if (!(heap[child] < heap[at])) {
        return;
      }
      std::swap(heap[at], heap[child]);
      at = child;
      ++result_.work_.sifted;
    }
  }

  Ownership result_;
  std::vector<NamedLayout> layouts_;    // by number
  std::vector<const Slice*> distinct_;  // one of the identical ones, by slice's number
};

absl::StatusOr<Ownership> Ownership::Compute(std::span<const RankLayout> ranks,
                                             std::span<const NamedLayout> layouts) {
  return Builder().Build(ranks, layouts);
}

std::optional<uint32_t> Ownership::IndexOf(Rank rank) const {
  const auto found =
      std::lower_bound(ranks_.begin(), ranks_.end(), rank,
                       [](const RankLayout& entry, Rank value) { return entry.rank < value; });
  if (found == ranks_.end() || found->rank != rank) {
    return std::nullopt;
  }
  return static_cast<uint32_t>(found - ranks_.begin());
}

std::optional<uint32_t> Ownership::HeldBy(Rank rank, uint32_t slice) const {
  if (slice >= SliceCount(rank)) {
    return std::nullopt;
  }
  return slices_[first_slice_[layout_of_[*IndexOf(rank)]] + slice];
}

std::span<const Ownership::Place> Ownership::PlacesOf(uint32_t held) const {
  const uint32_t first = held_[held].first_place;
  return std::span(places_).subspan(first, held_[held + 1].first_place - first);
}

std::span<const uint32_t> Ownership::RanksOf(uint32_t layout) const {
  const uint32_t first = first_member_[layout];
  return std::span(members_).subspan(first, first_member_[layout + 1] - first);
}

std::vector<uint32_t> Ownership::HolderIndices(uint32_t held) const {
  std::vector<uint32_t> holders;
  for (const Place& place : PlacesOf(held)) {
    const std::span<const uint32_t> ranks = RanksOf(place.layout);
    holders.insert(holders.end(), ranks.begin(), ranks.end());
  }
  std::sort(holders.begin(), holders.end());
  return holders;
}

SliceOwner Ownership::Named(uint32_t held, uint32_t index) const {
  const std::span<const Place> places = PlacesOf(held);
  const auto at =
      std::lower_bound(places.begin(), places.end(), layout_of_[index],
                       [](const Place& place, uint32_t layout) { return place.layout < layout; });
  return {ranks_[index].rank, at->slice};
}

uint32_t Ownership::SliceCount(Rank rank) const {
  const std::optional<uint32_t> index = IndexOf(rank);
  return index ? first_slice_[layout_of_[*index] + 1] - first_slice_[layout_of_[*index]] : 0;
}

uint64_t Ownership::OwnedBytes(Rank rank) const {
  const std::optional<uint32_t> index = IndexOf(rank);
  return index ? owned_bytes_[*index] : 0;
}

std::vector<Rank> Ownership::HoldersOf(Rank rank, uint32_t slice) const {
  const std::optional<uint32_t> held = HeldBy(rank, slice);
  if (!held || *held == kObject) {
    return held ? std::vector<Rank>{rank} : std::vector<Rank>{};
  }
  std::vector<Rank> holders;
  for (const uint32_t index : HolderIndices(*held)) {
    holders.push_back(ranks_[index].rank);
  }
  return holders;
}

std::optional<SliceOwner> Ownership::OwnerOf(Rank rank, uint32_t slice,
                                             std::span<const Rank> excluded) const {
  const auto may_be = [excluded](Rank candidate) {
    return !std::binary_search(excluded.begin(), excluded.end(), candidate);
  };
  const std::optional<uint32_t> held = HeldBy(rank, slice);
  if (!held) {
    return std::nullopt;
  }
  if (*held == kObject) {
    return may_be(rank) ? std::optional(SliceOwner{rank, slice}) : std::nullopt;
  }
  const Held& own = held_[*held];
  if (may_be(ranks_[own.owner].rank)) {
    return Named(*held, own.owner);
  }
  // The other holders in a ring behind the owner. Each of the owner's slices begins one further
  // than the one before, so that what it leaves behind is spread over them all.
  const std::vector<uint32_t> holders = HolderIndices(*held);
  const uint64_t others = holders.size() - 1;
  const auto owner_at = static_cast<uint64_t>(
      std::lower_bound(holders.begin(), holders.end(), own.owner) - holders.begin());
  for (uint64_t i = 0; i < others; ++i) {
    const uint32_t next = holders[(owner_at + 1 + (own.turn + i) % others) % holders.size()];
    if (may_be(ranks_[next].rank)) {
      return Named(*held, next);
    }
  }
  return std::nullopt;
}

}  // namespace holdfast
