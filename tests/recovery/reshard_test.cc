// Plans against a reference that knows elements alone: whichever way tensors are split among ranks,
// what a plan copies is what it should be, once, or it says why it cannot be.
#include "recovery/reshard.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <numeric>
#include <random>
#include <set>

#include "base/digest.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;
using Kind = ReshardProblem::Kind;
using Numbers = std::vector<uint64_t>;

Slice Whole(std::string name, Numbers shape, DType dtype = DType::kF32) {
  Slice slice;
  slice.name = std::move(name);
  slice.dtype = dtype;
  slice.global_shape = std::move(shape);
  return slice;
}
Slice Box(std::string name, Numbers global, Numbers offset, Numbers shape) {
  Slice slice = Whole(std::move(name), std::move(global));
  slice.place = BoxPlace{std::move(offset), std::move(shape)};
  return slice;
}
Slice Flat(std::string name, Numbers global, uint64_t start, uint64_t length) {
  Slice slice = Whole(std::move(name), std::move(global));
  slice.place = FlatPlace{start, length};
  return slice;
}

uint64_t Count(const Numbers& shape) {
  return std::accumulate(shape.begin(), shape.end(), uint64_t{1}, std::multiplies<>());
}

// Global numbers of the slice's elements, in the order of its bytes: by trying each.
Numbers ElementsOf(const Slice& slice) {
  Numbers elements;
  Numbers at(slice.global_shape.size(), 0);
  const uint64_t count = Count(slice.global_shape);
  for (uint64_t number = 0; number < count; ++number) {
    uint64_t rest = number;
    for (size_t d = at.size(); d-- > 0;) {
      at[d] = rest % slice.global_shape[d];
      rest /= slice.global_shape[d];
    }
    bool in = true;
    if (const auto* flat = std::get_if<FlatPlace>(&slice.place)) {
      in = number >= flat->start && number - flat->start < flat->length;
    } else if (const auto* box = std::get_if<BoxPlace>(&slice.place)) {
      for (size_t d = 0; d < at.size(); ++d) {
        in = in && at[d] >= box->offset[d] && at[d] - box->offset[d] < box->shape[d];
      }
    }
    if (in) {
      elements.push_back(number);
    }
  }
  return elements;
}

struct Saved {
  std::vector<std::vector<Slice>> by_rank;  // as PlanImage takes them
  std::map<Rank, Layout> layouts;
  std::map<Rank, std::string> encoded;

  void Lay() {
    for (Rank rank = 0; rank < by_rank.size(); ++rank) {
      if (!by_rank[rank].empty()) {
        const auto image = PlanImage(by_rank[rank], rank);
        ASSERT_TRUE(image.ok()) << image.status();
        layouts[rank] = image->layout;
        encoded[rank] = image->layout_bytes;
      }
    }
  }
};

ReshardSources Everybody() {
  return {[](Rank) { return std::optional<uint64_t>(0); }, nullptr, 0};
}

ReshardPlan PlanFor(const Saved& saved, std::vector<Want> wants,
                    const ReshardSources& sources = Everybody()) {
  absl::StatusOr<ReshardPlanner> planner = ReshardPlanner::For(std::move(wants));
  EXPECT_TRUE(planner.ok()) << planner.status();
  for (const auto& [rank, layout] : saved.encoded) {
    EXPECT_TRUE(planner->Add(layout, std::span(&rank, 1)).ok());
  }
  return planner->Plan(sources);
}

std::vector<Want> Wants(std::vector<Slice> slices) {
  std::vector<Want> wants;
  for (Slice& slice : slices) {
    wants.push_back({std::move(slice), "", false});
  }
  return wants;
}

Saved SavedBy(std::vector<std::vector<Slice>> by_rank) {
  Saved saved{std::move(by_rank), {}, {}};
  saved.Lay();
  return saved;
}

// Does what the plan says, with elements' numbers for elements.
std::vector<Numbers> Follow(const ReshardPlan& plan, const Saved& saved,
                            const std::vector<Want>& wants) {
  constexpr uint64_t kNothing = ~uint64_t{0};
  std::vector<Numbers> memory;
  for (const Want& want : wants) {
    memory.emplace_back(ElementsOf(want.slice).size(), kNothing);
  }
  std::map<uint32_t, Numbers> read;
  for (uint32_t i = 0; i < plan.sources.size(); ++i) {
    const ReshardPlan::Source& source = plan.sources[i];
    const Slice& slice = saved.layouts.at(source.rank).slices[source.slice];
    EXPECT_EQ(source.slice_bytes, slice.bytes);
    read[i] = ElementsOf(slice);
  }
  for (const ReshardPlan::Piece& piece : plan.pieces) {
    piece.copy.ForEachRun([&](uint64_t from, uint64_t to, uint64_t elements) {
      for (uint64_t i = 0; i < elements; ++i) {
        uint64_t& element = memory.at(piece.want).at(to + i);
        EXPECT_EQ(element, kNothing) << "copied twice";
        element = read.at(piece.source).at(from + i);
      }
    });
  }
  for (const ReshardPlan::Overlap& overlap : plan.overlaps) {
    overlap.copy.ForEachRun([&](uint64_t from, uint64_t to, uint64_t elements) {
      for (uint64_t i = 0; i < elements; ++i) {
        EXPECT_EQ(read.at(overlap.source).at(from + i), read.at(overlap.other).at(to + i));
      }
    });
  }
  return memory;
}

// ---- Tensors split at random ----

class Splits {
 public:
  explicit Splits(uint32_t seed) : random_(seed) {}

  uint64_t Below(uint64_t n) { return std::uniform_int_distribution<uint64_t>(0, n - 1)(random_); }
  bool Chance(uint64_t one_in) { return Below(one_in) == 0; }

  Numbers Shape() {
    Numbers shape(Below(5));
    for (uint64_t& extent : shape) {
      extent = Chance(25) ? 0 : 1 + Below(7);
    }
    return shape;
  }
  // From 0 to `extent`, in pieces of any size.
  Numbers Cuts(uint64_t extent, uint64_t pieces) {
    Numbers cuts{0, extent};
    for (uint64_t i = 1; i < pieces; ++i) {
      cuts.push_back(Below(extent + 1));
    }
    std::sort(cuts.begin(), cuts.end());
    return cuts;
  }
  // All of the tensor, each element once.
  std::vector<Slice> Partition(const std::string& name, const Numbers& shape) {
    const uint64_t how = Below(3);
    std::vector<Slice> parts;
    if (how == 0) {
      return {Whole(name, shape)};
    }
    if (how == 1) {
      const Numbers cuts = Cuts(Count(shape), 1 + Below(6));
      for (size_t i = 0; i + 1 < cuts.size(); ++i) {
        parts.push_back(Flat(name, shape, cuts[i], cuts[i + 1] - cuts[i]));
      }
      return parts;
    }
    parts.push_back(Box(name, shape, Numbers(shape.size(), 0), shape));
    for (size_t d = 0; d < shape.size(); ++d) {
      std::vector<Slice> finer;
      for (const Slice& part : parts) {
        const auto& box = std::get<BoxPlace>(part.place);
        const Numbers cuts = Cuts(box.shape[d], 1 + Below(3));
        for (size_t i = 0; i + 1 < cuts.size(); ++i) {
          BoxPlace piece = box;
          piece.offset[d] += cuts[i];
          piece.shape[d] = cuts[i + 1] - cuts[i];
          finer.push_back(Box(name, shape, piece.offset, piece.shape));
        }
      }
      parts = std::move(finer);
    }
    return parts;
  }
  // Any part of it.
  Slice AnyPart(const std::string& name, const Numbers& shape) {
    const std::vector<Slice> parts = Partition(name, shape);
    return parts[Below(parts.size())];
  }

 private:
  std::mt19937 random_;
};

bool SamePlace(const Slice& a, const Slice& b) {
  return a.name == b.name && ElementsOf(a) == ElementsOf(b);
}

// To some rank that has nothing of that name and place.
void Give(Splits& splits, std::vector<std::vector<Slice>>& ranks, const Slice& slice) {
  std::vector<Slice>& its = ranks[splits.Below(ranks.size())];
  const bool there = std::any_of(its.begin(), its.end(),
                                 [&](const Slice& other) { return SamePlace(slice, other); });
  if (!there) {
    its.push_back(slice);
  }
}

struct Case {
  Saved saved;
  std::vector<Want> wants;
};

Case AnyCase(Splits& splits, bool overlaps, bool gaps) {
  Case made;
  made.saved.by_rank.resize(1 + splits.Below(6));
  const uint64_t tensors = 1 + splits.Below(4);
  for (uint64_t t = 0; t < tensors; ++t) {
    const std::string name = "layer." + std::to_string(t);
    const Numbers shape = splits.Shape();
    for (const Slice& part : splits.Partition(name, shape)) {
      const uint64_t holders = gaps && splits.Chance(4) ? 0 : 1 + splits.Below(3);
      for (uint64_t i = 0; i < holders; ++i) {
        Give(splits, made.saved.by_rank, part);
      }
    }
    for (uint64_t i = overlaps ? splits.Below(4) : 0; i > 0; --i) {
      Give(splits, made.saved.by_rank, splits.AnyPart(name, shape));
    }
    std::vector<Slice> wanted = splits.Partition(name, shape);
    for (Slice& slice : wanted) {
      const bool twice = std::any_of(made.wants.begin(), made.wants.end(), [&](const Want& other) {
        return SamePlace(other.slice, slice);
      });
      if (splits.Chance(2) && !twice) {
        made.wants.push_back({std::move(slice), "", false});
      }
    }
  }
  made.saved.Lay();
  return made;
}

// Which of the wants' elements anybody saved, and of which tensors anything was.
std::map<std::string, std::set<uint64_t>> SavedElements(const Saved& saved) {
  std::map<std::string, std::set<uint64_t>> elements;
  for (const auto& [rank, layout] : saved.layouts) {
    for (const Slice& slice : layout.slices) {
      for (const uint64_t element : ElementsOf(slice)) {
        elements[slice.name].insert(element);
      }
      elements[slice.name];
    }
  }
  return elements;
}

void ExpectRight(const Case& made, const ReshardPlan& plan) {
  const auto saved = SavedElements(made.saved);
  std::set<std::string> short_of;
  for (const Want& want : made.wants) {
    const auto there = saved.find(want.slice.name);
    for (const uint64_t element : ElementsOf(want.slice)) {
      if (there == saved.end() || there->second.count(element) == 0) {
        short_of.insert(want.slice.name);
      }
    }
    if (there == saved.end()) {
      short_of.insert(want.slice.name);
    }
  }
  std::set<std::string> named;
  for (const ReshardProblem& problem : plan.problems) {
    named.insert(problem.tensor);
    EXPECT_EQ(problem.kind, saved.count(problem.tensor) > 0 ? Kind::kGap : Kind::kMissing);
    EXPECT_THAT(problem.text, HasSubstr(problem.tensor));
  }
  EXPECT_EQ(named, short_of);
  const std::vector<Numbers> memory = Follow(plan, made.saved, made.wants);
  for (size_t i = 0; i < made.wants.size(); ++i) {
    if (short_of.count(made.wants[i].slice.name) == 0) {
      EXPECT_EQ(memory[i], ElementsOf(made.wants[i].slice));
    }
  }
}

TEST(Reshard, AnySplitIsMadeOfAnyOther) {
  for (uint32_t seed = 0; seed < 6000; ++seed) {
    SCOPED_TRACE(seed);
    Splits splits(seed);
    const Case made = AnyCase(splits, seed % 3 == 1, seed % 5 == 2);
    const ReshardPlan plan = PlanFor(made.saved, made.wants);
    ExpectRight(made, plan);
    if (seed % 3 != 1) {
      EXPECT_TRUE(plan.overlaps.empty());
    }
    if (HasFailure()) {
      return;
    }
  }
}

TEST(Reshard, WhichLayoutIsAddedFirstMakesNoDifference) {
  for (uint32_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(seed);
    Splits splits(seed);
    const Case made = AnyCase(splits, seed % 2 == 1, false);
    const ReshardPlan plan = PlanFor(made.saved, made.wants);
    auto planner = ReshardPlanner::For(made.wants);
    ASSERT_TRUE(planner.ok());
    for (auto it = made.saved.encoded.rbegin(); it != made.saved.encoded.rend(); ++it) {
      ASSERT_TRUE(planner->Add(it->second, std::span(&it->first, 1)).ok());
    }
    const ReshardPlan other = planner->Plan(Everybody());
    EXPECT_EQ(other.sources, plan.sources);
    EXPECT_EQ(other.pieces, plan.pieces);
    EXPECT_EQ(other.overlaps, plan.overlaps);
  }
}

// ---- Copies and reads in few pieces ----

TEST(Reshard, WhatLiesTogetherOnBothSidesIsOneRun) {
  const Saved saved = SavedBy(
      {{Box("w", {8, 6, 4}, {0, 0, 0}, {4, 6, 4})}, {Box("w", {8, 6, 4}, {4, 0, 0}, {4, 6, 4})}});
  const ReshardPlan rows = PlanFor(saved, Wants({Box("w", {8, 6, 4}, {2, 0, 0}, {4, 6, 4})}));
  ASSERT_EQ(rows.pieces.size(), 2u);
  EXPECT_EQ(rows.pieces[0].copy.runs(), 1u);
  EXPECT_EQ(rows.pieces[0].copy.run, 48u);
  const ReshardPlan columns = PlanFor(saved, Wants({Box("w", {8, 6, 4}, {0, 2, 0}, {8, 2, 4})}));
  ASSERT_EQ(columns.pieces.size(), 2u);
  EXPECT_EQ(columns.pieces[0].copy.run, 8u);
  EXPECT_EQ(columns.pieces[0].copy.runs(), 4u);
}

// By going through all runs.
std::vector<ByteRun> BlocksTouched(const ReshardPlan& plan, uint32_t source, uint64_t gap_bytes) {
  std::set<uint64_t> blocks;
  const uint64_t bytes = DTypeBytes(plan.sources[source].dtype);
  for (const ReshardPlan::Piece& piece : plan.pieces) {
    if (piece.source == source) {
      piece.copy.ForEachRun([&](uint64_t from, uint64_t, uint64_t elements) {
        for (uint64_t block = from * bytes / kDigestBlockBytes;
             block <= ((from + elements) * bytes - 1) / kDigestBlockBytes; ++block) {
          blocks.insert(block);
        }
      });
    }
  }
  std::vector<ByteRun> runs;
  for (const uint64_t block : blocks) {
    const uint64_t begin = block * kDigestBlockBytes;
    const uint64_t end =
        std::min<uint64_t>(begin + kDigestBlockBytes, plan.sources[source].slice_bytes);
    if (!runs.empty() && begin <= runs.back().begin + runs.back().bytes + gap_bytes) {
      runs.back().bytes = end - runs.back().begin;
    } else {
      runs.push_back({begin, end - begin});
    }
  }
  return runs;
}

TEST(Reshard, WholeBlocksAreReadAndNoOthers) {
  std::mt19937 random(7);
  const auto below = [&](uint64_t n) {
    return std::uniform_int_distribution<uint64_t>(0, n - 1)(random);
  };
  for (int round = 0; round < 60; ++round) {
    SCOPED_TRACE(round);
    // Up to some hundred MiB, of which nobody has the bytes.
    const Numbers shape{1 + below(12), 1 + below(700), 1 + below(9000)};
    const uint64_t gap = below(3) * (kDigestBlockBytes / 2) * below(5);
    Numbers offset(3);
    Numbers extent(3);
    for (size_t d = 0; d < 3; ++d) {
      offset[d] = below(shape[d]);
      extent[d] = 1 + below(shape[d] - offset[d]);
    }
    const Saved saved = SavedBy({{Whole("w", shape)}});
    const ReshardPlan plan = PlanFor(saved, Wants({Box("w", shape, offset, extent)}));
    ASSERT_EQ(plan.sources.size(), 1u);
    EXPECT_EQ(ReadsOf(plan, gap).at(0), BlocksTouched(plan, 0, gap));
  }
}

// ---- Whom it comes from ----

TEST(Reshard, TheCheapestThatCanBeReadIsTaken) {
  const Slice whole = Whole("w", {4, 4});
  const Saved saved = SavedBy({{whole}, {whole}, {whole}});
  const auto costs = [](std::vector<std::optional<uint64_t>> by_rank) {
    return ReshardSources{[by_rank](Rank rank) { return by_rank[rank]; }, nullptr, 0};
  };
  const auto from = [&](std::vector<std::optional<uint64_t>> by_rank) {
    const ReshardPlan plan = PlanFor(saved, Wants({whole}), costs(std::move(by_rank)));
    return plan.problems.empty() ? static_cast<int>(plan.sources.at(0).rank) : -1;
  };
  EXPECT_EQ(from({5, 3, 4}), 1);
  EXPECT_EQ(from({std::nullopt, std::nullopt, 9}), 2);
  EXPECT_EQ(from({std::nullopt, std::nullopt, std::nullopt}), -1);
}

TEST(Reshard, OfWhatOverlapsTheCheaperOneIsRead) {
  const Saved saved = SavedBy({{Flat("w", {10}, 0, 6)}, {Flat("w", {10}, 4, 6)}});
  for (const Rank cheap : {0, 1}) {
    const ReshardSources sources{
        [cheap](Rank rank) { return std::optional<uint64_t>(rank == cheap ? 1 : 2); }, nullptr, 0};
    const ReshardPlan plan = PlanFor(saved, Wants({Whole("w", {10})}), sources);
    std::map<Rank, uint64_t> elements;
    for (const ReshardPlan::Piece& piece : plan.pieces) {
      elements[plan.sources[piece.source].rank] += piece.copy.elements();
    }
    EXPECT_EQ(elements[cheap], 6u);
    EXPECT_EQ(elements[1 - cheap], 4u);
  }
}

TEST(Reshard, WhatNobodyCanReadNowIsToldFromWhatNobodySaved) {
  const Saved saved = SavedBy({{Flat("w", {8}, 0, 4)}, {Flat("w", {8}, 4, 4)}});
  const ReshardSources without_1{
      [](Rank rank) { return rank == 1 ? std::nullopt : std::optional<uint64_t>(0); }, nullptr, 0};
  const ReshardPlan plan = PlanFor(saved, Wants({Whole("w", {8})}), without_1);
  ASSERT_EQ(plan.problems.size(), 1u);
  EXPECT_EQ(plan.problems[0].kind, Kind::kUnreadable);
  EXPECT_THAT(plan.problems[0].text, HasSubstr("rank 1"));
  EXPECT_THAT(plan.problems[0].text, HasSubstr("[4:8]"));
  EXPECT_EQ(StatusOf(plan.problems).code(), absl::StatusCode::kUnavailable);
}

TEST(Reshard, ReadersOfTheSameSpreadOverThoseThatHaveIt) {
  constexpr Rank kHolders = 12;
  constexpr uint64_t kReaders = 48;
  std::vector<Slice> slices;
  for (int i = 0; i < 24; ++i) {
    slices.push_back(Whole("layer." + std::to_string(i), {1024, 1024}));
  }
  const Saved saved = SavedBy(std::vector(kHolders, slices));
  for (const uint64_t stride : {1, 2, 8}) {  // which of the readers want it: of a mesh, not all
    std::map<Rank, uint64_t> load;
    for (uint64_t reader = 0; reader < kReaders; ++reader) {
      ReshardSources sources = Everybody();
      sources.reader = reader * stride;
      const ReshardPlan plan = PlanFor(saved, Wants(slices), sources);
      for (const ReshardPlan::Source& source : plan.sources) {
        load[source.rank] += source.slice_bytes;
      }
    }
    uint64_t most = 0;
    uint64_t all = 0;
    for (const auto& [rank, bytes] : load) {
      most = std::max(most, bytes);
      all += bytes;
    }
    EXPECT_LE(most * kHolders * 10, all * 12) << "stride " << stride;
  }
}

TEST(Reshard, WhatIsLittleIsAllReadOfOneShard) {
  std::vector<Slice> slices;
  for (int i = 0; i < 100; ++i) {
    slices.push_back(Whole("step." + std::to_string(i), {}));
  }
  const Saved saved = SavedBy(std::vector(8, slices));
  std::set<Rank> of_all;
  for (uint64_t reader = 0; reader < 8; ++reader) {
    ReshardSources sources = Everybody();
    sources.reader = reader;
    std::set<Rank> read;
    for (const ReshardPlan::Source& source : PlanFor(saved, Wants(slices), sources).sources) {
      read.insert(source.rank);
    }
    EXPECT_EQ(read.size(), 1u);
    of_all.insert(read.begin(), read.end());
  }
  EXPECT_EQ(of_all.size(), 8u) << "each reader of another one";
}

// ---- Twice, and differently ----

TEST(Reshard, ReplicasThatDifferAreRefusedByName) {
  const Slice whole = Whole("model.w", {4, 4});
  const Saved saved = SavedBy({{whole}, {whole}, {Whole("other", {2})}});
  const std::vector<uint64_t> digests[] = {{1}, {2}, {3}};
  ReshardSources sources = Everybody();
  sources.digests = [&](Rank rank, uint32_t) -> std::optional<std::span<const uint64_t>> {
    return std::span<const uint64_t>(digests[rank]);
  };
  const ReshardPlan plan = PlanFor(saved, Wants({Box("model.w", {4, 4}, {0, 0}, {2, 4})}), sources);
  ASSERT_EQ(plan.problems.size(), 1u);
  EXPECT_EQ(plan.problems[0].kind, Kind::kContradiction);
  EXPECT_THAT(plan.problems[0].text, HasSubstr("model.w"));
  EXPECT_THAT(plan.problems[0].text, HasSubstr("ranks 0 and 1"));
  EXPECT_EQ(StatusOf(plan.problems).code(), absl::StatusCode::kFailedPrecondition);
  // Of what differs elsewhere nobody here wants anything.
  EXPECT_TRUE(PlanFor(saved, Wants({Whole("other", {2})}), sources).problems.empty());
  // What cannot be read contradicts nobody.
  sources.cost = [](Rank rank) { return rank == 1 ? std::nullopt : std::optional<uint64_t>(0); };
  EXPECT_TRUE(PlanFor(saved, Wants({whole}), sources).problems.empty());
}

TEST(Reshard, TheSameElementsInAnotherFormAreTheSamePart) {
  const Saved saved = SavedBy(
      {{Whole("w", {4, 6})}, {Box("w", {4, 6}, {0, 0}, {4, 6})}, {Flat("w", {4, 6}, 0, 24)}});
  const std::vector<uint64_t> digests[] = {{1}, {1}, {2}};
  ReshardSources sources = Everybody();
  sources.digests = [&](Rank rank, uint32_t) -> std::optional<std::span<const uint64_t>> {
    return std::span<const uint64_t>(digests[rank]);
  };
  const ReshardPlan plan = PlanFor(saved, Wants({Whole("w", {4, 6})}), sources);
  ASSERT_EQ(plan.problems.size(), 1u);
  EXPECT_THAT(plan.problems[0].text, HasSubstr("ranks 0 and 2"));
  EXPECT_TRUE(PlanFor(saved, Wants({Whole("w", {4, 6})})).overlaps.empty());
}

TEST(Reshard, ABoxIsNoRangeOfAsManyElements) {
  const Slice box = Box("w", {4, 6}, {0, 0}, {2, 3});
  const Saved saved = SavedBy({{box}, {Flat("w", {4, 6}, 0, 6)}, {Flat("w", {4, 6}, 6, 18)}});
  const std::vector<Want> wants = Wants({box});
  for (const Rank cheap : {0, 1}) {
    const ReshardSources sources{
        [cheap](Rank rank) { return std::optional<uint64_t>(rank == cheap ? 1 : 2); }, nullptr, 0};
    const ReshardPlan plan = PlanFor(saved, wants, sources);
    EXPECT_TRUE(plan.problems.empty());
    EXPECT_EQ(Follow(plan, saved, wants)[0], ElementsOf(box));
  }
}

TEST(Reshard, WhatOverlapsInPartIsToBeCompared) {
  const Saved saved = SavedBy({{Flat("w", {10}, 0, 6)}, {Flat("w", {10}, 4, 6)}});
  const ReshardPlan plan = PlanFor(saved, Wants({Whole("w", {10})}));
  EXPECT_TRUE(plan.problems.empty());
  ASSERT_EQ(plan.overlaps.size(), 1u);
  EXPECT_EQ(plan.overlaps[0].copy.elements(), 2u);
  EXPECT_EQ(plan.overlaps[0].copy.from, 4u);
  EXPECT_EQ(plan.overlaps[0].copy.to, 0u);
}

// ---- What does not fit ----

TEST(Reshard, WhatWasSavedOtherwiseIsAConflict) {
  const Saved saved = SavedBy({{Whole("w", {4, 4})}, {Whole("i", {4}, DType::kI32)}});
  const auto problem = [&](Slice slice, bool convert) {
    const ReshardPlan plan = PlanFor(saved, {{std::move(slice), "", convert}});
    return plan.problems.empty() ? "" : plan.problems[0].text;
  };
  EXPECT_THAT(problem(Whole("w", {4, 5}), true), HasSubstr("F32 of [4, 4] (by rank 0)"));
  EXPECT_THAT(problem(Whole("w", {4, 4}, DType::kBF16), false), HasSubstr("BF16 of [4, 4]"));
  EXPECT_EQ(problem(Whole("w", {4, 4}, DType::kBF16), true), "");
  EXPECT_THAT(problem(Whole("i", {4}, DType::kF32), true), HasSubstr("cannot be made into"));
}

TEST(Reshard, RanksThatContradictEachOtherAreNamed) {
  const Saved saved = SavedBy({{Flat("w", {8}, 0, 4)}, {Flat("w", {9}, 4, 5)}});
  const ReshardPlan plan = PlanFor(saved, Wants({Whole("w", {8})}));
  ASSERT_EQ(plan.problems.size(), 1u);
  EXPECT_EQ(plan.problems[0].kind, Kind::kContradiction);
  EXPECT_THAT(plan.problems[0].text, HasSubstr("rank 0"));
  EXPECT_THAT(plan.problems[0].text, HasSubstr("rank 1"));
}

TEST(Reshard, TensorsAreFoundByTheNameTheyWereSavedBy) {
  const Saved saved = SavedBy({{Whole("embed", {4, 2})}});
  const ReshardPlan plan = PlanFor(saved, {{Whole("in.weight", {4, 2}), "embed", false},
                                           {Whole("out.weight", {4, 2}), "embed", false}});
  EXPECT_TRUE(plan.problems.empty());
  EXPECT_EQ(plan.sources.size(), 1u);
  EXPECT_EQ(plan.pieces.size(), 2u);
  const ReshardPlan missing = PlanFor(saved, {{Whole("embed", {4, 2}), "in.weight", false}});
  ASSERT_EQ(missing.problems.size(), 1u);
  EXPECT_EQ(missing.problems[0].kind, Kind::kMissing);
  EXPECT_THAT(missing.problems[0].text, HasSubstr("in.weight"));
}

TEST(Reshard, BadWantsAreRefusedByName) {
  const auto refused = [](std::vector<Want> wants) {
    return std::string(ReshardPlanner::For(std::move(wants)).status().message());
  };
  EXPECT_THAT(refused(Wants({Box("w", {4, 4}, {0, 0}, {2, 4}), Box("w", {4, 4}, {1, 0}, {2, 4})})),
              HasSubstr("[0:2, 0:4] and [1:3, 0:4]"));
  EXPECT_THAT(refused(Wants({Flat("w", {4}, 0, 2), Flat("w", {5}, 2, 2)})),
              HasSubstr("F32 of [4] and as F32 of [5]"));
  EXPECT_THAT(refused(Wants({Box("w", {4, 4}, {3, 0}, {2, 4})})), HasSubstr("w"));
  Slice object = Whole("extra", {3}, DType::kU8);
  object.kind = SliceKind::kJson;
  EXPECT_THAT(refused(Wants({object})), HasSubstr("object"));
  EXPECT_EQ(refused(Wants({Flat("w", {4}, 0, 2), Flat("w", {4}, 2, 2)})), "");
}

TEST(Reshard, ManyProblemsAreToldInFew) {
  std::vector<Slice> slices;
  for (int i = 0; i < 40; ++i) {
    slices.push_back(Whole("gone." + std::to_string(i), {2}));
  }
  const ReshardPlan plan = PlanFor(SavedBy({{Whole("w", {2})}}), Wants(slices));
  EXPECT_EQ(plan.problems.size(), 40u);
  EXPECT_THAT(std::string(StatusOf(plan.problems).message()), HasSubstr("and 32 more"));
}

}  // namespace
}  // namespace holdfast
