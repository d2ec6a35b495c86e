#include "recovery/ownership.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <malloc.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <new>
#include <set>
#include <sstream>
#include <stdexcept>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "tests/recovery/ownership_cases.h"

namespace {
// What the program has allocated, for the test of memory. One thread.
uint64_t live_bytes = 0;
uint64_t peak_bytes = 0;
}  // namespace

void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  void* const p = std::malloc(bytes);
  if (p != nullptr) {
    live_bytes += malloc_usable_size(p);
    peak_bytes = std::max(peak_bytes, live_bytes);
  }
  return p;
}
void* operator new(size_t bytes) {
  void* const p = operator new(bytes, std::nothrow);
  if (p == nullptr) {
    throw std::bad_alloc();
  }
  return p;
}
void operator delete(void* p) noexcept {
  live_bytes -= malloc_usable_size(p);
  std::free(p);
}
void operator delete(void* p, size_t) noexcept {
  operator delete(p);
}

namespace holdfast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

LayoutHash HashOf(uint8_t number) {
  LayoutHash hash{};
  hash.back() = number;
  return hash;
}

Slice Bytes(std::string name, uint64_t bytes) {
  Slice slice;
  slice.name = std::move(name);
  slice.global_shape = {bytes};
  slice.bytes = bytes;
  return slice;
}

Layout LayoutOf(std::vector<Slice> slices) {
  return {std::move(slices), 0, 0};
}

Ownership MustCompute(std::span<const RankLayout> ranks, std::span<const NamedLayout> layouts) {
  return Ownership::Compute(ranks, layouts).value();
}

absl::Status WhyNot(std::vector<RankLayout> ranks, std::vector<NamedLayout> layouts) {
  return Ownership::Compute(ranks, layouts).status();
}

// The slices of one rank, by its layout in the case.
const std::vector<Slice>& SlicesOf(const OwnershipCase& c, Rank rank) {
  for (const RankLayout& entry : c.ranks) {
    for (const OwnershipCase::Layouts& layout : c.layouts) {
      if (entry.rank == rank && entry.layout == layout.hash) {
        return layout.layout.slices;
      }
    }
  }
  throw std::logic_error(absl::StrCat("rank ", rank, " has no layout"));
}

using Identity = std::tuple<std::string, DType, std::vector<uint64_t>, size_t,
                            std::vector<uint64_t>, std::vector<uint64_t>>;
Identity IdentityOf(const Slice& slice) {
  Identity identity{slice.name, slice.dtype, slice.global_shape, slice.place.index(), {}, {}};
  if (const auto* box = std::get_if<BoxPlace>(&slice.place)) {
    std::get<4>(identity) = box->offset;
    std::get<5>(identity) = box->shape;
  } else if (const auto* flat = std::get_if<FlatPlace>(&slice.place)) {
    std::get<4>(identity) = {flat->start, flat->length};
  }
  return identity;
}

// Who holds each tensor slice, found the plain way.
std::map<Identity, std::set<Rank>> HoldersIn(const OwnershipCase& c) {
  std::map<Identity, std::set<Rank>> holders;
  for (const RankLayout& entry : c.ranks) {
    for (const Slice& slice : SlicesOf(c, entry.rank)) {
      if (slice.kind == SliceKind::kTensor) {
        holders[IdentityOf(slice)].insert(entry.rank);
      }
    }
  }
  return holders;
}

void ForRandomCases(int count, const std::function<void(OwnershipCase&, std::mt19937_64&)>& check) {
  std::mt19937_64 random(5);
  for (int i = 0; i < count && !testing::Test::HasFailure(); ++i) {
    SCOPED_TRACE(absl::StrCat("random case ", i));
    OwnershipCase c = RandomOwnershipCase(random);
    check(c, random);
  }
}

std::vector<std::vector<SliceOwner>> AllOwners(const Ownership& ownership) {
  std::vector<std::vector<SliceOwner>> all;
  for (const RankLayout& entry : ownership.ranks()) {
    auto& owners = all.emplace_back();
    for (uint32_t slice = 0; slice < ownership.SliceCount(entry.rank); ++slice) {
      owners.push_back(ownership.OwnerOf(entry.rank, slice).value());
    }
  }
  return all;
}

// --- Golden vectors.

class OwnershipVectors : public testing::TestWithParam<const char*> {};

TEST_P(OwnershipVectors, AreAnsweredAsWritten) {
  const std::string path =
      absl::StrCat(HOLDFAST_SOURCE_DIR, "/tests/fixtures/ownership/", GetParam());
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  const absl::StatusOr<std::vector<OwnershipCase>> cases = ParseOwnershipCases(text.str());
  ASSERT_TRUE(cases.ok()) << path << ": " << cases.status();
  ASSERT_FALSE(cases->empty()) << path;
  for (const OwnershipCase& c : *cases) {
    SCOPED_TRACE(c.name);
    const Ownership ownership = MustCompute(c.ranks, c.Named());
    EXPECT_FALSE(c.owners.empty());
    for (const OwnershipCase::Owners& entry : c.owners) {
      ASSERT_EQ(ownership.SliceCount(entry.rank), entry.owners.size()) << "rank " << entry.rank;
      for (uint32_t slice = 0; slice < entry.owners.size(); ++slice) {
        const std::optional<SliceOwner> owner = ownership.OwnerOf(entry.rank, slice);
        ASSERT_TRUE(owner);
        EXPECT_EQ(owner->rank, entry.owners[slice].rank)
            << "rank " << entry.rank << " slice " << slice;
        EXPECT_EQ(owner->slice, entry.owners[slice].slice)
            << "rank " << entry.rank << " slice " << slice;
      }
    }
    for (const OwnershipCase::Bytes& entry : c.bytes) {
      EXPECT_EQ(ownership.OwnedBytes(entry.rank), entry.bytes) << "rank " << entry.rank;
    }
    for (const OwnershipCase::Without& entry : c.without) {
      EXPECT_EQ(ownership.OwnerOf(entry.rank, entry.slice, entry.excluded), entry.owner)
          << "rank " << entry.rank << " slice " << entry.slice;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Files, OwnershipVectors,
                         testing::Values("example.txt", "small.txt", "larger.txt"),
                         [](const auto& file) {
                           const std::string name = file.param;
                           return name.substr(0, name.find('.'));
                         });

// --- What holds for every input.

TEST(Ownership, EverySliceHasOneOwnerThatHoldsIt) {
  ForRandomCases(400, [](OwnershipCase& c, std::mt19937_64&) {
    const Ownership ownership = MustCompute(c.ranks, c.Named());
    std::map<Identity, Rank> owners;
    std::map<Rank, uint64_t> bytes;
    const std::map<Identity, std::set<Rank>> holders = HoldersIn(c);
    for (const RankLayout& entry : c.ranks) {
      const std::vector<Slice>& slices = SlicesOf(c, entry.rank);
      ASSERT_EQ(ownership.SliceCount(entry.rank), slices.size());
      for (uint32_t i = 0; i < slices.size(); ++i) {
        const SliceOwner owner = ownership.OwnerOf(entry.rank, i).value();
        if (slices[i].kind != SliceKind::kTensor) {
          EXPECT_EQ(owner, (SliceOwner{entry.rank, i}));
          EXPECT_THAT(ownership.HoldersOf(entry.rank, i), ElementsAre(entry.rank));
          continue;
        }
        const std::set<Rank>& held_by = holders.at(IdentityOf(slices[i]));
        EXPECT_EQ(ownership.HoldersOf(entry.rank, i),
                  std::vector<Rank>(held_by.begin(), held_by.end()));
        ASSERT_TRUE(held_by.contains(owner.rank));
        EXPECT_EQ(IdentityOf(SlicesOf(c, owner.rank)[owner.slice]), IdentityOf(slices[i]));
        const auto [known, fresh] = owners.try_emplace(IdentityOf(slices[i]), owner.rank);
        EXPECT_EQ(known->second, owner.rank) << "two ranks are told two owners";
        bytes[owner.rank] += fresh ? slices[i].bytes : 0;
      }
    }
    for (const RankLayout& entry : c.ranks) {
      EXPECT_EQ(ownership.OwnedBytes(entry.rank), bytes[entry.rank]);
    }
  });
}

TEST(Ownership, IsBalancedWithinTheSmallestSliceThatWasGiven) {
  int compared = 0;
  ForRandomCases(400, [&compared](OwnershipCase& c, std::mt19937_64&) {
    const Ownership ownership = MustCompute(c.ranks, c.Named());
    // 1. What each rank was given: shared slices, and who else holds all of them.
    struct Given {
      uint64_t smallest = std::numeric_limits<uint64_t>::max();
      uint64_t largest = 0;
      std::set<Rank> fellows;
    };
    std::map<Rank, Given> given;
    for (const RankLayout& entry : c.ranks) {
      const std::vector<Slice>& slices = SlicesOf(c, entry.rank);
      for (uint32_t i = 0; i < slices.size(); ++i) {
        const std::vector<Rank> holders = ownership.HoldersOf(entry.rank, i);
        if (holders.size() < 2 || ownership.OwnerOf(entry.rank, i)->rank != entry.rank) {
          continue;
        }
        const std::set<Rank> these(holders.begin(), holders.end());
        const auto [it, first] = given.try_emplace(entry.rank);
        Given& mine = it->second;
        if (first) {
          mine.fellows = these;
        } else {
          std::erase_if(mine.fellows, [&these](Rank r) { return !these.contains(r); });
        }
        mine.smallest = std::min(mine.smallest, slices[i].bytes);
        mine.largest = std::max(mine.largest, slices[i].bytes);
      }
    }
    // 2. None of these has less by more than the smallest of them.
    for (const auto& [rank, mine] : given) {
      for (const Rank fellow : mine.fellows) {
        EXPECT_LE(ownership.OwnedBytes(rank), ownership.OwnedBytes(fellow) + mine.smallest)
            << "ranks " << rank << " and " << fellow;
        compared += rank != fellow ? 1 : 0;
      }
    }
    // 3. So the ranks of one layout are within one slice of their mean.
    std::map<LayoutHash, std::vector<Rank>> by_layout;
    for (const RankLayout& entry : c.ranks) {
      by_layout[entry.layout].push_back(entry.rank);
    }
    for (const auto& [layout, ranks] : by_layout) {
      uint64_t total = 0;
      for (const Rank rank : ranks) {
        total += ownership.OwnedBytes(rank);
      }
      for (const Rank rank : ranks) {
        EXPECT_LE(ownership.OwnedBytes(rank), total / ranks.size() + given[rank].largest);
      }
    }
  });
  EXPECT_GT(compared, 1000) << "the random cases have too little that is shared";
}

TEST(Ownership, DoesNotDependOnTheOrderOfTheInputNorOnHashes) {
  ForRandomCases(400, [](OwnershipCase& c, std::mt19937_64& random) {
    const auto before = AllOwners(MustCompute(c.ranks, c.Named()));
    std::map<LayoutHash, LayoutHash> renamed;
    for (OwnershipCase::Layouts& entry : c.layouts) {
      LayoutHash hash{};
      std::generate(hash.begin(), hash.end(), [&random] { return uint8_t(random()); });
      renamed[entry.hash] = hash;
      entry.hash = hash;
    }
    for (RankLayout& entry : c.ranks) {
      entry.layout = renamed.at(entry.layout);
    }
    std::shuffle(c.ranks.begin(), c.ranks.end(), random);
    std::shuffle(c.layouts.begin(), c.layouts.end(), random);
    EXPECT_EQ(AllOwners(MustCompute(c.ranks, c.Named())), before);
  });
}

TEST(Ownership, RanksThatAreNotLinkedMayBeLeftOut) {
  int left_out = 0;
  ForRandomCases(400, [&left_out](OwnershipCase& c, std::mt19937_64&) {
    const Ownership all = MustCompute(c.ranks, c.Named());
    // 1. The ranks that are linked with the first one.
    std::set<Rank> linked{c.ranks.front().rank};
    const std::map<Identity, std::set<Rank>> holders = HoldersIn(c);
    for (size_t before = 0; before != linked.size();) {
      before = linked.size();
      for (const auto& [identity, ranks] : holders) {
        if (std::any_of(ranks.begin(), ranks.end(), [&](Rank r) { return linked.contains(r); })) {
          linked.insert(ranks.begin(), ranks.end());
        }
      }
    }
    left_out += linked.size() < c.ranks.size() ? 1 : 0;
    // 2. They alone.
    std::erase_if(c.ranks, [&linked](const RankLayout& r) { return !linked.contains(r.rank); });
    std::erase_if(c.layouts, [&c](const OwnershipCase::Layouts& layout) {
      return std::none_of(c.ranks.begin(), c.ranks.end(),
                          [&layout](const RankLayout& r) { return r.layout == layout.hash; });
    });
    const Ownership part = MustCompute(c.ranks, c.Named());
    for (const Rank rank : linked) {
      EXPECT_EQ(part.OwnedBytes(rank), all.OwnedBytes(rank));
      for (uint32_t slice = 0; slice < all.SliceCount(rank); ++slice) {
        EXPECT_EQ(part.OwnerOf(rank, slice), all.OwnerOf(rank, slice));
        const std::vector<Rank> gone = {all.OwnerOf(rank, slice)->rank};
        EXPECT_EQ(part.OwnerOf(rank, slice, gone), all.OwnerOf(rank, slice, gone));
      }
    }
  });
  EXPECT_GT(left_out, 20) << "the random cases hang together too much";
}

TEST(Ownership, LengthsOfObjectsMoveNothing) {
  ForRandomCases(400, [](OwnershipCase& c, std::mt19937_64& random) {
    const auto before = AllOwners(MustCompute(c.ranks, c.Named()));
    for (OwnershipCase::Layouts& entry : c.layouts) {
      for (Slice& slice : entry.layout.slices) {
        if (slice.kind != SliceKind::kTensor) {
          slice.bytes = random() % 1'000'000;
          slice.global_shape = {slice.bytes};
        }
      }
    }
    EXPECT_EQ(AllOwners(MustCompute(c.ranks, c.Named())), before);
  });
}

// --- Owners that died or differ.

TEST(Ownership, SuccessionMovesOnlyWhatMustMove) {
  ForRandomCases(100, [](OwnershipCase& c, std::mt19937_64& random) {
    const Ownership ownership = MustCompute(c.ranks, c.Named());
    for (const RankLayout& entry : ownership.ranks()) {
      for (uint32_t slice = 0; slice < ownership.SliceCount(entry.rank); ++slice) {
        std::vector<Rank> alive = ownership.HoldersOf(entry.rank, slice);
        std::vector<Rank> excluded;
        SliceOwner owner = ownership.OwnerOf(entry.rank, slice).value();
        while (!alive.empty()) {
          // Any holder is gone next; only if it was the owner is there another.
          const Rank gone = alive[random() % alive.size()];
          std::erase(alive, gone);
          excluded.insert(std::lower_bound(excluded.begin(), excluded.end(), gone), gone);
          const std::optional<SliceOwner> next = ownership.OwnerOf(entry.rank, slice, excluded);
          ASSERT_EQ(next.has_value(), !alive.empty());
          if (!next) {
            break;
          }
          EXPECT_TRUE(std::binary_search(alive.begin(), alive.end(), next->rank));
          if (owner.rank != gone) {
            EXPECT_EQ(*next, owner);
          }
          // It calls the slice by its own number, and gets the same answer under that.
          EXPECT_EQ(ownership.OwnerOf(next->rank, next->slice, excluded), next);
          owner = *next;
        }
      }
    }
  });
}

TEST(Ownership, WhatADeadOwnerLeavesIsSpreadOverItsFellows) {
  constexpr uint32_t kRanks = 9;
  std::vector<Slice> slices;
  for (int i = 0; i < 400; ++i) {
    slices.push_back(Bytes(absl::StrCat("w", 1000 + i), 1000 + 37 * i % 500));
  }
  const Layout layout = LayoutOf(slices);
  std::vector<RankLayout> ranks;
  for (Rank rank = 0; rank < kRanks; ++rank) {
    ranks.push_back({rank, HashOf(1)});
  }
  const Ownership ownership = MustCompute(ranks, std::vector<NamedLayout>{{HashOf(1), &layout}});
  const std::vector<Rank> dead = {4};
  std::vector<uint64_t> more(kRanks, 0);
  uint64_t largest = 0;
  for (uint32_t i = 0; i < slices.size(); ++i) {
    const Rank before = ownership.OwnerOf(0, i)->rank;
    const Rank after = ownership.OwnerOf(0, i, dead)->rank;
    if (before != 4) {
      EXPECT_EQ(after, before);
      continue;
    }
    more[after] += slices[i].bytes;
    largest = std::max(largest, slices[i].bytes);
  }
  EXPECT_EQ(more[4], 0u);
  more.erase(more.begin() + 4);
  const auto [least, most] = std::minmax_element(more.begin(), more.end());
  EXPECT_GT(*least, 0u);
  EXPECT_LE(*most - *least, largest);
}

// --- How it grows.

// The layouts of a large job: each shares an embedding and a norm with all others, all else with
// its own ranks only.
class LargeJob {
 public:
  static constexpr uint32_t kLayouts = 256;
  static constexpr uint32_t kSlices = 500;

  LargeJob() : layouts_(kLayouts) {
    for (uint32_t l = 0; l < kLayouts; ++l) {
      std::vector<Slice>& slices = layouts_[l].slices;
      slices.push_back(Bytes("a.embedding", 1 << 30));
      slices.push_back(Bytes("a.norm", 4096));
      for (uint32_t s = 2; s < kSlices; ++s) {
        slices.push_back(
            Bytes(absl::StrCat("stage", l, ".tensor", 10'000 + s), 1'000'000 + 1000 * (s % 7)));
      }
      named_.push_back({HashOf(uint8_t(l)), &layouts_[l]});
    }
  }

  Ownership Compute(uint32_t world_size) const {
    std::vector<RankLayout> ranks;
    for (Rank rank = 0; rank < world_size; ++rank) {
      ranks.push_back({rank, HashOf(uint8_t(rank % kLayouts))});
    }
    return MustCompute(ranks, named_);
  }

 private:
  std::vector<Layout> layouts_;
  std::vector<NamedLayout> named_;
};

TEST(Ownership, TakesTimeByLayoutsNotByRanks) {
  constexpr uint32_t kRanks = 12'288;
  const Ownership ownership = LargeJob().Compute(kRanks);

  // Each slice of each layout is looked at once, and moves one rank in a heap of 48.
  const uint64_t given = uint64_t{LargeJob::kLayouts} * (LargeJob::kSlices - 2) + 2;
  EXPECT_EQ(ownership.work().compared, uint64_t{LargeJob::kLayouts} * LargeJob::kSlices);
  EXPECT_LE(ownership.work().sifted, given * std::bit_width(kRanks / LargeJob::kLayouts));
  EXPECT_GT(ownership.work().sifted, given) << "what moves is not counted";

  // The embedding went to rank 0, which got nothing else; all others are in balance.
  EXPECT_EQ(ownership.OwnedBytes(0), uint64_t{1} << 30);
  for (Rank rank = LargeJob::kLayouts; rank < kRanks; ++rank) {
    const Rank fellow =
        rank % LargeJob::kLayouts == 0 ? LargeJob::kLayouts : rank % LargeJob::kLayouts;
    const uint64_t mine = ownership.OwnedBytes(rank);
    const uint64_t its = ownership.OwnedBytes(fellow);
    EXPECT_LE(std::max(mine, its) - std::min(mine, its), 1'006'000u) << "rank " << rank;
  }
}

TEST(Ownership, TakesMemoryByRanksAndByLayoutsNotByBoth) {
  const LargeJob job;
  const auto peak_of = [&job](uint32_t world_size) {
    const uint64_t before = live_bytes;
    peak_bytes = before;
    const Ownership ownership = job.Compute(world_size);
    EXPECT_EQ(ownership.ranks().size(), world_size);
    return peak_bytes - before;
  };
  const uint64_t once = peak_of(12'288);
  const uint64_t four_times = peak_of(49'152);
  EXPECT_LE(once, 150 * uint64_t{LargeJob::kLayouts} * LargeJob::kSlices);
  EXPECT_GT(four_times, once) << "allocations are not counted";
  EXPECT_LE(four_times - once, 150 * (49'152 - 12'288));
}

// --- Bad input.

TEST(Ownership, RefusesWhatCannotBeAnswered) {
  const Layout good = LayoutOf({Bytes("w", 4)});
  const std::vector<NamedLayout> layouts = {{HashOf(1), &good}};

  EXPECT_TRUE(absl::IsInvalidArgument(WhyNot({}, layouts)));
  EXPECT_THAT(Message(WhyNot({{0, HashOf(1)}, {3, HashOf(1)}, {0, HashOf(1)}}, layouts)),
              HasSubstr("rank 0 is given twice"));
  EXPECT_THAT(Message(WhyNot({{kWorldSizeMax, HashOf(1)}}, layouts)),
              HasSubstr("rank 1048576 is not below the limit of 1048576"));

  const absl::Status missing = WhyNot({{0, HashOf(1)}, {7, HashOf(2)}}, layouts);
  EXPECT_TRUE(absl::IsNotFound(missing));
  EXPECT_THAT(Message(missing),
              HasSubstr("layout 00000000000000000000000000000002 of rank 7 is not among the 1"));
  EXPECT_TRUE(absl::IsNotFound(WhyNot({{0, HashOf(0)}, {7, HashOf(1)}}, layouts)));
  EXPECT_TRUE(absl::IsNotFound(WhyNot({{0, HashOf(1)}}, {})));
  EXPECT_TRUE(absl::IsNotFound(WhyNot({{0, HashOf(1)}}, {{HashOf(1), nullptr}})));
  const absl::Status twice = WhyNot({{0, HashOf(1)}}, {layouts[0], layouts[0]});
  EXPECT_TRUE(absl::IsInvalidArgument(twice));
  EXPECT_THAT(Message(twice), HasSubstr("given twice"));
}

TEST(Ownership, RefusesMoreSlicesThanItsLimitBeforeItLooksAtThem) {
  // One layout under many hashes; that its slices are wrong must not be found out any more.
  constexpr uint32_t kLayouts = 129;
  const Layout layout = LayoutOf(std::vector<Slice>(kOwnershipSlicesMax / (kLayouts - 1)));
  std::vector<RankLayout> ranks;
  std::vector<NamedLayout> layouts;
  for (Rank rank = 0; rank < kLayouts; ++rank) {
    ranks.push_back({rank, HashOf(uint8_t(rank))});
    layouts.push_back({HashOf(uint8_t(rank)), &layout});
  }
  const absl::Status status = WhyNot(ranks, layouts);
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_THAT(Message(status), HasSubstr("33816576 slices together, at most 33554432"));
  ranks.pop_back();
  EXPECT_TRUE(absl::IsInvalidArgument(WhyNot(ranks, layouts)));
}

TEST(Ownership, RefusesLayoutsThatBreakTheRules) {
  const auto why_not = [](std::vector<Slice> slices) {
    const Layout layout = LayoutOf(std::move(slices));
    const absl::Status status = WhyNot({{0, HashOf(1)}}, {{HashOf(1), &layout}});
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(Message(status), HasSubstr("layout 00000000000000000000000000000001"));
    return Message(status);
  };
  EXPECT_THAT(why_not({Bytes("w", 4), Bytes("w", 4)}), HasSubstr("the same slice is given twice"));
  EXPECT_THAT(why_not({Bytes("w", 4), Bytes("w", 5)}), HasSubstr("different global shapes"));
  EXPECT_THAT(why_not({Bytes("w", 4), Bytes("v", 4)}), HasSubstr("order of images"));

  Slice lies = Bytes("w", 4);
  lies.bytes = 5;
  EXPECT_THAT(why_not({lies}),
              HasSubstr("'w' says that it has 5 bytes, its shape and dtype make 4"));

  Slice overflows = Bytes("w", 4);
  overflows.global_shape = {uint64_t{1} << 33, uint64_t{1} << 33};
  EXPECT_THAT(why_not({overflows}), HasSubstr("more than 2^63 - 1 elements"));
  EXPECT_THAT(why_not({Bytes("w", uint64_t{1} << 62)}), HasSubstr("exceed the limit"));
  EXPECT_THAT(why_not({Bytes("v", kImageBytesMax), Bytes("w", 1)}), HasSubstr("exceed the limit"));

  Slice outside = Bytes("w", 4);
  outside.place = FlatPlace{3, 4};
  EXPECT_THAT(why_not({outside}), HasSubstr("leaves the tensor's 4 elements"));
  Slice strange = Bytes("w", 4);
  strange.dtype = static_cast<DType>(77);
  EXPECT_THAT(why_not({strange}), HasSubstr("unknown dtype"));

  // Layouts that nobody has are nobody's trouble.
  const Layout good = LayoutOf({Bytes("w", 4)});
  const Layout bad = LayoutOf({lies});
  EXPECT_TRUE(WhyNot({{0, HashOf(1)}}, {{HashOf(1), &good}, {HashOf(2), &bad}}).ok());
}

TEST(Ownership, KnowsWhatItWasNotAskedFor) {
  const Layout layout = LayoutOf({Bytes("w", 4)});
  const Ownership ownership = MustCompute(std::vector<RankLayout>{{2, HashOf(1)}},
                                          std::vector<NamedLayout>{{HashOf(1), &layout}});
  EXPECT_EQ(ownership.OwnerOf(2, 0), (SliceOwner{2, 0}));
  EXPECT_EQ(ownership.OwnerOf(2, 1), std::nullopt);
  EXPECT_EQ(ownership.OwnerOf(1, 0), std::nullopt);
  EXPECT_EQ(ownership.OwnerOf(3, 0), std::nullopt);
  EXPECT_THAT(ownership.HoldersOf(2, 1), IsEmpty());
  EXPECT_THAT(ownership.HoldersOf(1, 0), IsEmpty());
  EXPECT_EQ(ownership.SliceCount(3), 0u);
  EXPECT_EQ(ownership.OwnedBytes(3), 0u);
}

}  // namespace
}  // namespace holdfast
