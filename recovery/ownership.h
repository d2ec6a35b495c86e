// Who writes a slice that several ranks hold alike, as data-parallel replicas do (docs/formats.md,
// "Ownership of identical slices").
//
//   HF_ASSIGN_OR_RETURN(const Ownership ownership, Ownership::Compute(ranks, layouts));
//   if (ownership.OwnerOf(rank, i)->rank == rank) …  // writes slice i of its layout
//
// Every node computes it by itself from the same input, and gets the same answer: no message is
// needed, and nothing in it depends on the order of the input, on what hashes are, or on a map's.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "base/ids.h"
#include "tiers/image/layout.h"

namespace holdfast {

// Slices of all layouts together, each layout counted once: what one computation takes at most.
inline constexpr uint64_t kOwnershipSlicesMax = uint64_t{1} << 25;

struct RankLayout {
  Rank rank = 0;
  LayoutHash layout{};
  auto operator<=>(const RankLayout&) const = default;
};

// A layout under the name that ranks call it by; it must live while Compute runs, no longer.
struct NamedLayout {
  LayoutHash hash{};
  const Layout* layout = nullptr;
};

struct SliceOwner {
  Rank rank = 0;
  uint32_t slice = 0;  // which of the owner's own slices it is, in its layout
  bool operator==(const SliceOwner&) const = default;
};

// A value that never changes once computed: at most 24 bytes per slice of each distinct
// layout, and 40 per rank; never anything per rank and slice. Any thread may read it.
class Ownership {
 public:
  // `ranks`: each rank once, in any order. `layouts`: each distinct one of theirs once; those that
  // no rank has are not looked at. A node that only asks for its own ranks may leave out every rank
  // whose layout is not linked with theirs, directly or through others, by a tensor slice that both
  // hold: the answer is the same.
  //
  // NotFound: a rank's layout is not among `layouts`. ResourceExhausted: above
  // kOwnershipSlicesMax. InvalidArgument: no ranks, a rank or a layout given twice, a layout that
  // breaks the rules of layouts (a slice twice, lengths that contradict its shapes or overflow).
  static absl::StatusOr<Ownership> Compute(std::span<const RankLayout> ranks,
                                           std::span<const NamedLayout> layouts);

  // Who writes slice `slice` of `rank`'s layout: `rank` itself or another holder. Objects are
  // always their own rank's. `excluded`, ascending, are ranks that cannot be it, since they died
  // before their copy was committed or since their bytes differ: then the next in the slice's order
  // of succession, while all other slices stay with their owners. Nothing: there is no such rank or
  // slice, or no holder is left.
  //
  // O(layouts that hold the slice); O(ranks that hold it) when the owner is excluded.
  std::optional<SliceOwner> OwnerOf(Rank rank, uint32_t slice,
                                    std::span<const Rank> excluded = {}) const;

  // All ranks that hold the slice, ascending; `rank` alone for an object. Empty: no such rank or
  // slice.
  std::vector<Rank> HoldersOf(Rank rank, uint32_t slice) const;

  // Slices of the rank's layout, objects included; 0: no such rank.
  uint32_t SliceCount(Rank rank) const;

  // Bytes of the tensor slices that the rank owns, unshared ones included. Of two ranks with the
  // same layout neither has more than the other by more than the smallest slice that it was given.
  uint64_t OwnedBytes(Rank rank) const;

  std::span<const RankLayout> ranks() const { return ranks_; }  // ascending

  // What the computation took, for tests of how it grows.
  struct Work {
    uint64_t compared = 0;  // (shared slice, layout) pairs of which the least loaded rank was asked
    uint64_t sifted = 0;    // places by which ranks moved in their layout's heap
  };
  const Work& work() const { return work_; }

 private:
  // One slice in one layout.
  struct Place {
    uint32_t layout = 0;
    uint32_t slice = 0;
  };
  // One slice, whoever holds it.
  struct Held {
    uint32_t first_place = 0;  // in places_, up to the next one's
    uint32_t owner = 0;        // index into ranks_
    uint32_t turn = 0;         // shared slices that the owner was given before this one
  };
  class Builder;

  Ownership() = default;
  std::optional<uint32_t> IndexOf(Rank rank) const;
  std::optional<uint32_t> HeldBy(Rank rank, uint32_t slice) const;
  std::span<const Place> PlacesOf(uint32_t held) const;
  std::span<const uint32_t> RanksOf(uint32_t layout) const;
  std::vector<uint32_t> HolderIndices(uint32_t held) const;
  SliceOwner Named(uint32_t held, uint32_t index) const;

  std::vector<RankLayout> ranks_;
  std::vector<uint32_t> layout_of_;     // by rank's index: which layout, by its number
  std::vector<uint64_t> owned_bytes_;   // by rank's index
  std::vector<uint32_t> members_;       // indices of ranks, layout by layout, ascending in each
  std::vector<uint32_t> first_member_;  // by layout's number; one more at the end
  std::vector<uint32_t> slices_;        // layout by layout: index into held_, or kObject
  std::vector<uint32_t> first_slice_;   // by layout's number; one more at the end
  std::vector<Held> held_;              // one more at the end
  std::vector<Place> places_;           // of each held slice, by layout's number
  Work work_;
};

}  // namespace holdfast
