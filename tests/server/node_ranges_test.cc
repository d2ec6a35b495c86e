#include "server/node_ranges.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;
using ::testing::UnorderedElementsAreArray;

NodeRanges Of(const std::vector<std::string>& names) {
  NodeRanges ranges;
  SetNodeRanges(names, &ranges);
  return ranges;
}

v1::NodeRange Range(const std::string& prefix, uint64_t first, uint32_t count, uint32_t digits,
                    const std::string& suffix = "") {
  v1::NodeRange range;
  range.set_prefix(prefix);
  range.set_first(first);
  range.set_count(count);
  range.set_digits(digits);
  range.set_suffix(suffix);
  return range;
}

absl::Status Check(const std::vector<v1::NodeRange>& all) {
  return CheckNodeRanges(NodeRanges(all.begin(), all.end()));
}

TEST(NodeRangesTest, EveryNameComesBackOnce) {
  const std::vector<std::string> names = {"a",
                                          "n",
                                          "n0",
                                          "n1",
                                          "n2",
                                          "n9",
                                          "n10",
                                          "n11",
                                          "n01",
                                          "n02",
                                          "n002",
                                          "x7y",
                                          "x8y",
                                          "x9z",
                                          "7",
                                          "8",
                                          "08",
                                          "gpu-07.pod2.example",
                                          "gpu-08.pod2.example",
                                          "ip-10-0-0-9.ec2.internal",
                                          "ip-10-0-0-10.ec2.internal",
                                          "login.rack3",
                                          "login.rack4",
                                          std::string(40, '9'),
                                          "a999999999999999999",
                                          "a1000000000000000000",
                                          "a18446744073709551615"};
  const NodeRanges ranges = Of(names);
  EXPECT_TRUE(CheckNodeRanges(ranges).ok()) << CheckNodeRanges(ranges);
  EXPECT_THAT(NodesIn(ranges), UnorderedElementsAreArray(names));
  std::vector<std::string> twice = names;
  twice.insert(twice.end(), names.begin(), names.end());
  EXPECT_THAT(NodesIn(Of(twice)), UnorderedElementsAreArray(names));
  EXPECT_TRUE(NodesIn(Of({})).empty());
}

TEST(NodeRangesTest, WhateverTheNamesAre) {
  std::mt19937 random(7);
  const std::string_view bytes = "ab.019";
  for (int round = 0; round < 300; ++round) {
    std::set<std::string> names;
    for (int i = 0; i < 60; ++i) {
      std::string name = "n";
      for (size_t length = random() % 5; length > 0; --length) {
        name += bytes[random() % bytes.size()];
      }
      names.insert(name);
    }
    const NodeRanges ranges = Of({names.begin(), names.end()});
    ASSERT_TRUE(CheckNodeRanges(ranges).ok());
    ASSERT_THAT(NodesIn(ranges), UnorderedElementsAreArray(names)) << "round " << round;
  }
}

// What a job's state says of a large cluster does not grow with it.
TEST(NodeRangesTest, NumberedNodesAreOneRange) {
  std::vector<std::string> names;
  for (int i = 1; i <= 1536; ++i) {
    names.push_back(absl::StrCat("node-", absl::Dec(i, absl::kZeroPad4), ".example"));
  }
  std::shuffle(names.begin(), names.end(), std::mt19937(1));
  EXPECT_EQ(Of(names).size(), 1);
  for (std::string& name : names) {
    name = absl::StrCat("n", std::stoi(name.substr(5, 4)));
  }
  EXPECT_EQ(Of(names).size(), 1) << "n9 is followed by n10";
  names.erase(std::find(names.begin(), names.end(), "n700"));
  EXPECT_EQ(Of(names).size(), 2);
}

TEST(NodeRangesTest, WhatContradictsItselfIsRefused) {
  EXPECT_TRUE(Check({}).ok());
  EXPECT_TRUE(Check({Range("n", 1, 10, 1), Range("login", 0, 1, 0)}).ok());
  for (const v1::NodeRange& range :
       {Range("n", 1, 0, 1), Range("login", 0, 2, 0), Range("login", 0, 1, 0, "x"),
        Range("n", 1, 1, 19), Range("n", std::numeric_limits<uint64_t>::max(), 1, 1)}) {
    EXPECT_THAT(std::string(Check({range}).message()), HasSubstr("contradicts itself"))
        << range.ShortDebugString();
  }
}

TEST(NodeRangesTest, NamesThatNoNodeCanHaveAreRefused) {
  EXPECT_THAT(std::string(Check({Range("", 0, 1, 0)}).message()), HasSubstr("empty"));
  EXPECT_THAT(std::string(Check({Range("a/", 1, 1, 1)}).message()), HasSubstr("not allowed"));
  EXPECT_THAT(std::string(Check({Range("a", 1, 1, 1, "\n")}).message()), HasSubstr("not allowed"));
  EXPECT_FALSE(Check({Range(std::string(500, 'a'), 1, 1, 1)}).ok());
}

TEST(NodeRangesTest, FewBytesCannotNameMoreNodesThanThereMayBe) {
  EXPECT_TRUE(Check({Range("n", 1, kStateNodesMax, 1)}).ok());
  EXPECT_THAT(std::string(Check({Range("n", 1, kStateNodesMax + 1, 1)}).message()),
              HasSubstr("more nodes than"));
  EXPECT_FALSE(Check({Range("n", 1, kStateNodesMax, 1), Range("m", 1, 1, 1)}).ok());
  EXPECT_FALSE(Check({Range("n", 1, std::numeric_limits<uint32_t>::max(), 1),
                      Range("n", 1, std::numeric_limits<uint32_t>::max(), 1)})
                   .ok());
}

}  // namespace
}  // namespace holdfast
