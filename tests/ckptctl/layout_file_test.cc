#include "ckptctl/layout_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>

namespace holdfast {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

Slice Whole(const std::string& name, std::vector<uint64_t> shape) {
  Slice slice;
  slice.name = name;
  slice.dtype = DType::kF32;
  slice.global_shape = std::move(shape);
  return slice;
}

TEST(FitsPattern, StarsAndQuestionMarks) {
  EXPECT_TRUE(FitsPattern("*", ""));
  EXPECT_TRUE(FitsPattern("a*c", "abbbc"));
  EXPECT_TRUE(FitsPattern("a*c*", "axcxcx"));
  EXPECT_TRUE(FitsPattern("*.weight", "layers.0.weight"));
  EXPECT_TRUE(FitsPattern("layer?", "layer7"));
  EXPECT_FALSE(FitsPattern("layer?", "layer"));
  EXPECT_FALSE(FitsPattern("*.weight", "layers.0.weights"));
  EXPECT_FALSE(FitsPattern("", "a"));
  EXPECT_TRUE(FitsPattern("", ""));
  EXPECT_FALSE(FitsPattern("a*b*c", "acb"));
}

uint64_t ElementsOf(const Slice& slice) {
  if (const auto* flat = std::get_if<FlatPlace>(&slice.place)) {
    return flat->length;
  }
  const auto* box = std::get_if<BoxPlace>(&slice.place);
  uint64_t elements = 1;
  for (const uint64_t n : box != nullptr ? box->shape : slice.global_shape) {
    elements *= n;
  }
  return elements;
}

constexpr char kFile[] =
    "mesh: [{name: tp, ranks: 2}, {name: dp, ranks: 3}, {name: pp, ranks: 2}]\n"
    "rules:\n"
    "  - {tensors: \"late.*\", only: pp, only_rank: 1}\n"
    "  - {tensors: \"*.flat\", flat: dp}\n"
    "  - {tensors: \"*.both\", splits: [{axis: tp, dimension: 0}, {axis: dp, dimension: 0}]}\n"
    "  - {tensors: \"*.last\", splits: [{axis: tp, dimension: -1}], dtype: BF16}\n"
    "  - {tensors: \"optim*\", left_out: true}\n";

TEST(MeshLayout, EveryElementIsWantedByWhoShouldHaveIt) {
  const auto layout = MeshLayout::Parse(kFile, "new.yaml");
  ASSERT_TRUE(layout.ok()) << layout.status();
  ASSERT_EQ(layout->ranks(), 12u);
  const std::vector<Slice> tensors = {Whole("a.flat", {5, 4}), Whole("a.both", {11, 2}),
                                      Whole("a.last", {3, 7}), Whole("late.w", {2}),
                                      Whole("optim.step", {}), Whole("plain", {4})};
  std::map<std::string, uint64_t> elements;  // wanted by all ranks
  for (Rank rank = 0; rank < layout->ranks(); ++rank) {
    const auto wants = layout->WantsOf(rank, tensors);
    ASSERT_TRUE(wants.ok()) << wants.status();
    std::set<std::string> names;
    for (const Want& want : *wants) {
      names.insert(want.slice.name);
      elements[want.slice.name] += ElementsOf(want.slice);
      EXPECT_EQ(want.convert, want.slice.name == "a.last");
    }
    EXPECT_EQ(names.count("late.w"), rank / 6);
    EXPECT_EQ(names.count("optim.step"), 0u);
  }
  EXPECT_EQ(elements["a.flat"], 20u * 2 * 2);  // once for each of tp and pp
  EXPECT_EQ(elements["a.both"], 22u * 2);      // once for each of pp
  EXPECT_EQ(elements["a.last"], 21u * 3 * 2);  // once for each of dp and pp
  EXPECT_EQ(elements["late.w"], 2u * 6);
  EXPECT_EQ(elements["plain"], 4u * 12);
}

TEST(MeshLayout, TheFirstAxisIsTheFastest) {
  const auto layout = MeshLayout::Parse(kFile, "new.yaml");
  ASSERT_TRUE(layout.ok());
  const std::vector<Slice> tensors = {Whole("a.last", {3, 8})};
  for (const auto& [rank, begin] : std::map<Rank, uint64_t>{{0, 0}, {1, 4}, {2, 0}, {7, 4}}) {
    const auto wants = layout->WantsOf(rank, tensors);
    ASSERT_TRUE(wants.ok());
    EXPECT_THAT(std::get<BoxPlace>((*wants)[0].slice.place).offset, ElementsAre(0, begin));
    EXPECT_THAT(std::get<BoxPlace>((*wants)[0].slice.place).shape, ElementsAre(3, 4));
  }
}

TEST(MeshLayout, MistakesAreNamed) {
  const auto said = [](const std::string& text) {
    return std::string(MeshLayout::Parse(text, "new.yaml").status().message());
  };
  EXPECT_THAT(said("mesh: [{name: tp, rank: 2}]\n"),
              AllOf(HasSubstr("new.yaml:1"), HasSubstr("rank")));
  EXPECT_THAT(said("mesh: [{name: tp}]\n"), HasSubstr("'tp' has 0 ranks"));
  EXPECT_THAT(said("mesh: [{name: a, ranks: 2}, {name: a, ranks: 2}]\n"),
              HasSubstr("two axes 'a'"));
  EXPECT_THAT(said("mesh: [{name: a, ranks: 2000000}]\n"), HasSubstr("ranks"));
  EXPECT_THAT(said("rules: [{tensors: w, splits: [{axis: tp}]}]\n"),
              AllOf(HasSubstr("'w'"), HasSubstr("no axis 'tp'")));
  EXPECT_THAT(said("rules: [{flat: tp}]\n"), HasSubstr("without `tensors`"));
  EXPECT_THAT(
      said("mesh: [{name: a, ranks: 2}]\nrules: [{tensors: w, flat: a, splits: [{axis: a}]}]\n"),
      HasSubstr("not both"));
  EXPECT_THAT(said("mesh: [{name: a, ranks: 2}]\nrules: [{tensors: w, only: a, only_rank: 2}]\n"),
              HasSubstr("no rank 2"));
  EXPECT_THAT(said("rules: [{tensors: w, dtype: F33}]\n"), HasSubstr("F33"));
  const auto layout = MeshLayout::Parse(
      "mesh: [{name: a, ranks: 2}]\nrules: [{tensors: w, splits: [{axis: a, dimension: 1}]}, "
      "{tensors: x}]\n",
      "new.yaml");
  ASSERT_TRUE(layout.ok()) << layout.status();
  const std::vector<Slice> tensors = {Whole("w", {4})};
  EXPECT_THAT(std::string(layout->WantsOf(0, tensors).status().message()),
              AllOf(HasSubstr("'w'"), HasSubstr("1 dimensions")));
  EXPECT_THAT(layout->Unused(tensors), ElementsAre("x"));
}

}  // namespace
}  // namespace holdfast
