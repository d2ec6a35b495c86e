#include "tiers/image/region.h"

#include <gtest/gtest.h>

#include <random>
#include <set>

namespace holdfast {
namespace {

using Elements = std::set<std::vector<uint64_t>>;

Elements ElementsOf(const Region& region) {
  Elements elements;
  std::vector<uint64_t> at(region.offset.begin(), region.offset.end());
  for (uint64_t left = region.elements(); left > 0; --left) {
    elements.insert(at);
    for (size_t d = at.size(); d-- > 0;) {
      if (++at[d] < region.offset[d] + region.shape[d]) {
        break;
      }
      at[d] = region.offset[d];
    }
  }
  return elements;
}

class RegionsTest : public ::testing::Test {
 protected:
  uint64_t Below(uint64_t n) { return std::uniform_int_distribution<uint64_t>(0, n - 1)(random_); }
  Region Any(size_t dimensions) {
    Region region;
    for (size_t d = 0; d < dimensions; ++d) {
      region.offset.push_back(Below(5));
      region.shape.push_back(Below(6));
    }
    return region;
  }

 private:
  std::mt19937 random_{11};
};

TEST_F(RegionsTest, IntersectionsAndRemaindersHaveTheElementsTheyShould) {
  for (int round = 0; round < 3000; ++round) {
    const size_t dimensions = Below(4);
    const Region a = Any(dimensions);
    const Region b = Any(dimensions);
    const Elements in_a = ElementsOf(a);
    const Elements in_b = ElementsOf(b);
    Elements both;
    Elements only_a;
    for (const auto& element : in_a) {
      (in_b.count(element) > 0 ? both : only_a).insert(element);
    }
    EXPECT_EQ(Meets(a, b), !both.empty());
    const std::optional<Region> meeting = Intersection(a, b);
    EXPECT_EQ(meeting ? ElementsOf(*meeting) : Elements(), both);
    Elements left;
    for (const Region& part : Without(a, b)) {
      for (const auto& element : ElementsOf(part)) {
        EXPECT_TRUE(left.insert(element).second) << "twice";
      }
    }
    EXPECT_EQ(left, only_a);
    EXPECT_LE(Without(a, b).size(), std::max<size_t>(1, 2 * dimensions));
  }
}

TEST_F(RegionsTest, EachPairThatMeetsIsToldOnce) {
  for (int round = 0; round < 300; ++round) {
    const size_t dimensions = Below(4);
    std::vector<Region> regions;
    for (uint64_t i = Below(20); i > 0; --i) {
      regions.push_back(Any(dimensions));
    }
    std::set<std::pair<uint32_t, uint32_t>> should;
    for (uint32_t a = 0; a < regions.size(); ++a) {
      for (uint32_t b = a + 1; b < regions.size(); ++b) {
        if (Meets(regions[a], regions[b])) {
          should.emplace(a, b);
        }
      }
    }
    std::set<std::pair<uint32_t, uint32_t>> told;
    ForEachMeeting(regions, [&](uint32_t a, uint32_t b) {
      EXPECT_TRUE(told.emplace(a, b).second);
      return true;
    });
    EXPECT_EQ(told, should);
  }
}

TEST_F(RegionsTest, ItStopsWhenItIsToldSo) {
  const std::vector<Region> regions(10, Region{{0}, {1}});
  int told = 0;
  ForEachMeeting(regions, [&](uint32_t, uint32_t) { return ++told < 3; });
  EXPECT_EQ(told, 3);
}

TEST_F(RegionsTest, AFlatRangeIsFewBoxesInItsOrder) {
  for (int round = 0; round < 2000; ++round) {
    Slice slice;
    slice.name = "w";
    uint64_t elements = 1;
    for (uint64_t d = Below(5); d > 0; --d) {
      slice.global_shape.push_back(1 + Below(5));
      elements *= slice.global_shape.back();
    }
    const uint64_t start = Below(elements + 1);
    const uint64_t length = Below(elements - start + 1);
    slice.place = FlatPlace{start, length};
    const std::vector<Region> regions = RegionsOf(slice);
    EXPECT_LE(regions.size(), std::max<size_t>(1, 2 * slice.global_shape.size()));
    const ElementPlaces places = PlacesIn(slice);
    uint64_t next = 0;
    for (const Region& region : regions) {
      for (const auto& element :
           ElementsOf(region)) {  // (sets of positions are in row-major order)
        EXPECT_EQ(places.Of(DimsOf(element)), next++);
      }
    }
    EXPECT_EQ(next, length);
  }
}

// In pieces of any size, as they come off a disk, the same is copied as at once.
TEST_F(RegionsTest, WhatIsWithinAPieceIsFoundWithoutTheRest) {
  using Pairs = std::vector<std::pair<uint64_t, uint64_t>>;
  for (int round = 0; round < 2000; ++round) {
    Slice from;
    from.name = "w";
    Region region;
    for (uint64_t d = Below(4); d > 0; --d) {
      from.global_shape.push_back(1 + Below(6));
      region.offset.push_back(Below(from.global_shape.back()));
      region.shape.push_back(1 + Below(from.global_shape.back() - region.offset.back()));
    }
    Slice to = from;
    to.place = BoxPlace{{region.offset.begin(), region.offset.end()},
                        {region.shape.begin(), region.shape.end()}};
    const StridedCopy copy = CopyOf(region, PlacesIn(from), PlacesIn(to));
    Pairs all;
    const auto add_to = [](Pairs& pairs) {
      return [&pairs](uint64_t at, uint64_t into, uint64_t elements) {
        for (uint64_t i = 0; i < elements; ++i) {
          pairs.emplace_back(at + i, into + i);
        }
      };
    };
    copy.ForEachRun(add_to(all));
    Pairs in_pieces;
    uint64_t runs = 0;
    const uint64_t piece = 1 + Below(40);
    for (uint64_t begin = 0; begin < ElementCount(from); begin += piece) {
      const auto add = add_to(in_pieces);
      copy.ForEachRunWithin(begin, begin + piece, [&](uint64_t at, uint64_t into, uint64_t count) {
        EXPECT_GE(at, begin);
        EXPECT_LE(at + count, begin + piece);
        ++runs;
        add(at, into, count);
      });
    }
    EXPECT_EQ(in_pieces, all);
    EXPECT_LE(runs, copy.runs() + ElementCount(from) / piece + 1);
  }
}

TEST_F(RegionsTest, BigTensorsDoNotOverflow) {
  Slice slice;
  slice.name = "w";
  slice.global_shape = {uint64_t{1} << 31, uint64_t{1} << 31};
  slice.place = FlatPlace{(uint64_t{1} << 62) - 5, 5};
  const std::vector<Region> regions = RegionsOf(slice);
  ASSERT_EQ(regions.size(), 1u);
  EXPECT_EQ(regions[0].elements(), 5u);
  EXPECT_EQ(PlacesIn(slice).Of(regions[0].offset), 0u);
  EXPECT_EQ(ToText(regions[0]), "[2147483647:2147483648, 2147483643:2147483648]");
}

}  // namespace
}  // namespace holdfast
