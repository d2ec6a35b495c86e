#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <set>

#include "base/status.h"
#include "tests/tiers/image/sample_image.h"
#include "tiers/image/layout.h"

namespace holdfast {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

using Pairs = std::vector<std::pair<uint32_t, uint32_t>>;

Layout LayoutOf(std::vector<Slice> slices) {
  auto plan = PlanImage(std::move(slices), 0);
  EXPECT_TRUE(plan.ok()) << ToString(plan.status());
  return plan.ok() ? plan->layout : Layout{};
}

bool Holds(const Slice& slice, const std::vector<uint64_t>& position, uint64_t linear) {
  if (const auto* box = std::get_if<BoxPlace>(&slice.place)) {
    for (size_t d = 0; d < position.size(); ++d) {
      if (position[d] < box->offset[d] || position[d] >= box->offset[d] + box->shape[d]) {
        return false;
      }
    }
    return true;
  }
  if (const auto* flat = std::get_if<FlatPlace>(&slice.place)) {
    return linear >= flat->start && linear < flat->start + flat->length;
  }
  return true;
}

// Element by element: slow and plain.
Pairs ByBruteForce(const Layout& layout) {
  std::set<std::pair<uint32_t, uint32_t>> pairs;
  for (uint32_t a = 0; a < layout.slices.size(); ++a) {
    const Slice& slice = layout.slices[a];
    uint64_t count = 1;
    for (const uint64_t dimension : slice.global_shape) {
      count *= dimension;
    }
    for (uint64_t linear = 0; linear < count; ++linear) {
      std::vector<uint64_t> position(slice.global_shape.size());
      uint64_t rest = linear;
      for (size_t d = position.size(); d-- > 0;) {
        position[d] = rest % slice.global_shape[d];
        rest /= slice.global_shape[d];
      }
      for (uint32_t b = a + 1; b < layout.slices.size(); ++b) {
        if (layout.slices[b].name == slice.name && Holds(slice, position, linear) &&
            Holds(layout.slices[b], position, linear)) {
          pairs.emplace(a, b);
        }
      }
    }
  }
  return {pairs.begin(), pairs.end()};
}

TEST(FindOverlapsTest, NoneAmongDifferentTensorsOrNeighbours) {
  EXPECT_THAT(FindOverlaps(LayoutOf({Whole("a", DType::kF32, {4}), Whole("b", DType::kF32, {4})})),
              IsEmpty());
  EXPECT_THAT(FindOverlaps(LayoutOf({Part("a", DType::kF32, {4, 2}, {{0, 0}, {2, 2}}),
                                     Part("a", DType::kF32, {4, 2}, {{2, 0}, {2, 2}})})),
              IsEmpty());
  EXPECT_THAT(FindOverlaps(LayoutOf(
                  {Range("a", DType::kF32, {8}, {0, 4}), Range("a", DType::kF32, {8}, {4, 4})})),
              IsEmpty());
}

TEST(FindOverlapsTest, BoxWithBoxFlatWithFlatBoxWithFlat) {
  EXPECT_THAT(FindOverlaps(LayoutOf({Part("a", DType::kF32, {4, 4}, {{0, 0}, {3, 3}}),
                                     Part("a", DType::kF32, {4, 4}, {{2, 2}, {2, 2}})})),
              ElementsAre(std::pair(0u, 1u)));
  EXPECT_THAT(FindOverlaps(LayoutOf(
                  {Range("a", DType::kF32, {8}, {0, 5}), Range("a", DType::kF32, {8}, {4, 4})})),
              ElementsAre(std::pair(0u, 1u)));
  // The left column of a 4 × 4 tensor: elements 0, 4, 8, 12.
  const Slice column = Part("a", DType::kF32, {4, 4}, {{0, 0}, {4, 1}});
  EXPECT_THAT(FindOverlaps(LayoutOf({column, Range("a", DType::kF32, {4, 4}, {5, 3})})), IsEmpty());
  EXPECT_THAT(FindOverlaps(LayoutOf({column, Range("a", DType::kF32, {4, 4}, {5, 4})})),
              ElementsAre(std::pair(0u, 1u)));
  EXPECT_THAT(FindOverlaps(LayoutOf({column, Range("a", DType::kF32, {4, 4}, {13, 3})})),
              IsEmpty());
}

TEST(FindOverlapsTest, WholeScalarAndEmpty) {
  EXPECT_THAT(
      FindOverlaps(LayoutOf({Whole("a", DType::kF32, {4}), Range("a", DType::kF32, {4}, {3, 1}),
                             Part("a", DType::kF32, {4}, {{1}, {1}})})),
      ElementsAre(std::pair(0u, 1u), std::pair(0u, 2u)));
  EXPECT_THAT(
      FindOverlaps(LayoutOf({Whole("s", DType::kF32, {}), Range("s", DType::kF32, {}, {0, 1}),
                             Part("s", DType::kF32, {}, {{}, {}})})),
      ElementsAre(std::pair(0u, 1u), std::pair(0u, 2u), std::pair(1u, 2u)));
  EXPECT_THAT(FindOverlaps(LayoutOf(
                  {Whole("z", DType::kF32, {0, 4}), Range("z", DType::kF32, {0, 4}, {0, 0})})),
              IsEmpty());
  EXPECT_THAT(
      FindOverlaps(LayoutOf({Whole("z", DType::kF32, {4}), Range("z", DType::kF32, {4}, {2, 0}),
                             Part("z", DType::kF32, {4}, {{2}, {0}})})),
      IsEmpty());
}

TEST(FindOverlapsTest, AgreesWithBruteForce) {
  std::mt19937 random(20240501);
  const auto below = [&random](uint64_t n) {
    return std::uniform_int_distribution<uint64_t>(0, n - 1)(random);
  };
  size_t found = 0;
  for (int round = 0; round < 400; ++round) {
    std::vector<Slice> slices;
    std::set<std::string> distinct;  // the same slice twice is refused
    for (int tensor = 0; tensor < 2; ++tensor) {
      const std::string name(1, static_cast<char>('a' + tensor));
      std::vector<uint64_t> shape(below(4));
      for (uint64_t& dimension : shape) {
        dimension = 1 + below(5);
      }
      const uint64_t count = ElementCount(Whole(name, DType::kU8, shape));
      for (uint64_t i = 0, n = 2 + below(8); i < n; ++i) {
        Slice slice;
        if (below(3) == 0) {
          const uint64_t start = below(count + 1);
          slice = Range(name, DType::kU8, shape, {start, below(count - start + 1)});
        } else {
          BoxPlace box;
          for (const uint64_t dimension : shape) {
            box.offset.push_back(below(dimension + 1));
            box.shape.push_back(below(dimension - box.offset.back() + 1));
          }
          slice = Part(name, DType::kU8, shape, box);
        }
        if (distinct.insert(EncodeLayout({{slice}, 0, 0})).second) {
          slices.push_back(slice);
        }
      }
    }
    const Layout layout = LayoutOf(slices);
    const Pairs expected = ByBruteForce(layout);
    EXPECT_EQ(FindOverlaps(layout), expected) << "round " << round;
    found += expected.size();
  }
  EXPECT_GT(found, 400u) << "the cases have become too tame";
}

// A grid over the last dimension only: a sweep over the first would look at every pair.
TEST(FindOverlapsTest, ManyColumnsAndManyRanges) {
  std::vector<Slice> slices;
  constexpr uint64_t kColumns = 50'000;
  for (uint64_t i = 0; i < kColumns; ++i) {
    slices.push_back(Part("a", DType::kF32, {4, kColumns}, {{0, i}, {4, 1}}));
    slices.push_back(Range("b", DType::kF32, {kColumns * 3}, {i * 3, 3}));
  }
  slices.push_back(Part("a", DType::kF32, {4, kColumns}, {{1, 7}, {1, 2}}));
  EXPECT_EQ(FindOverlaps(LayoutOf(std::move(slices))).size(), 2u);
}

}  // namespace
}  // namespace holdfast
