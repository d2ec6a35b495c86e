// What an export writes, and under which names: headers are read by the strict parser of tiers/
// image and by json, compared with what docs/formats.md says.
#include "ckptctl/export_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tiers/image/safetensors.h"

namespace holdfast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

SavedItem Item(const std::string& name, Type type, uint64_t elements) {
  SavedItem item;
  item.name = name;
  item.type = type;
  item.shape = {elements};
  item.elements = elements;
  item.bytes = elements * TypeBytes(type);
  return item;
}

SavedItem Own(const std::string& name, uint32_t rank) {
  SavedItem item = Item(name, Type::kU8, 4);
  item.ranks = {rank};
  return item;
}

SavedItem Json(const std::string& name, std::vector<uint32_t> ranks) {
  SavedItem item = Item(name, Type::kU8, 11);
  item.kind = SavedItem::Kind::kJson;
  item.ranks = std::move(ranks);
  return item;
}

class ExportPlanTest : public ::testing::Test {
 protected:
  absl::StatusOr<ExportPlan> Plan(ExportOptions options = {}) {
    source_ = {"job", 9, 2, 0x1234, &items_, tied_};
    if (options.file_bytes_max == 0) {
      options.file_bytes_max = 1'000'000;
    }
    return PlanExport(source_, options);
  }
  static std::vector<std::string> Names(const ExportFile& file) {
    std::vector<std::string> names;
    for (const ExportEntry& entry : file.entries) {
      names.push_back(entry.name);
    }
    return names;
  }
  static SafetensorsHeader Header(const ExportFile& file) {
    const auto header = ParseSafetensors(file.header, file.bytes());
    EXPECT_TRUE(header.ok()) << header.status();
    EXPECT_EQ(header->header_bytes, file.header.size());
    EXPECT_EQ(file.header.size() % 4096, 0U);
    return *header;
  }

  std::vector<SavedItem> items_;
  std::vector<TiedName> tied_;
  ExportSource source_;
};

TEST_F(ExportPlanTest, OneFileByElementSize) {
  items_ = {Item("a", Type::kBF16, 3), Item("b", Type::kF64, 2), Item("c", Type::kU8, 5),
            Item("d", Type::kF64, 0)};
  const auto plan = Plan();
  ASSERT_TRUE(plan.ok()) << plan.status();
  ASSERT_EQ(plan->files.size(), 1U);
  EXPECT_EQ(plan->files[0].name, "model.safetensors");
  EXPECT_EQ(plan->index, "");
  EXPECT_THAT(Names(plan->files[0]), ElementsAre("b", "d", "a", "c"));
  const SafetensorsHeader header = Header(plan->files[0]);
  ASSERT_EQ(header.entries.size(), 4U);
  EXPECT_EQ(header.entries[3].key, "c");
  EXPECT_EQ(header.entries[3].begin, 22U);
  EXPECT_EQ(header.entries[3].end, 27U);
  EXPECT_EQ(header.metadata.at("format"), "pt");
  EXPECT_EQ(header.metadata.at("holdfast_job"), "job");
  EXPECT_EQ(header.metadata.at("holdfast_step"), "9");
  EXPECT_EQ(header.metadata.at("holdfast_attempt"), "2");
  EXPECT_EQ(plan->tensors, 4U);
  EXPECT_EQ(plan->data_bytes, 27U);
  EXPECT_EQ(plan->bytes, plan->files[0].bytes());
}

TEST_F(ExportPlanTest, FilesAreFilledInTheOrderOfNames) {
  items_ = {Item("a", Type::kU8, 60),  Item("b", Type::kU8, 40), Item("c", Type::kU8, 1),
            Item("d", Type::kU8, 500), Item("e", Type::kU8, 0),  Item("f", Type::kU8, 10)};
  const auto plan = Plan({.file_bytes_max = 100});
  ASSERT_TRUE(plan.ok()) << plan.status();
  ASSERT_EQ(plan->files.size(), 4U);
  EXPECT_EQ(plan->files[1].name, "model-00002-of-00004.safetensors");
  EXPECT_THAT(Names(plan->files[0]), ElementsAre("a", "b"));
  EXPECT_THAT(Names(plan->files[1]), ElementsAre("c"));
  EXPECT_THAT(Names(plan->files[2]), ElementsAre("d"));
  EXPECT_THAT(Names(plan->files[3]), ElementsAre("e", "f"));
  const auto index = nlohmann::json::parse(plan->index);
  EXPECT_EQ(index["metadata"]["total_size"], 611);
  EXPECT_EQ(index["weight_map"].size(), 6U);
  EXPECT_EQ(index["weight_map"]["d"], "model-00003-of-00004.safetensors");
}

TEST_F(ExportPlanTest, NamesAreWhateverTheyAre) {
  const std::string odd = "../\"\\\n\x01\xc3\xb6/model.safetensors";
  items_ = {Item(odd, Type::kU8, 1), Item("x", Type::kU8, 1)};
  const auto plan = Plan({.file_bytes_max = 1});
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(Header(plan->files[0]).entries[0].key, odd);
  EXPECT_EQ(plan->files[0].name, "model-00001-of-00002.safetensors");
  EXPECT_EQ(nlohmann::json::parse(plan->index)["weight_map"][odd], plan->files[0].name);
}

TEST_F(ExportPlanTest, WhatRanksHaveOfTheirOwnAndObjects) {
  items_ = {Own("rng", 0), Own("rng", 1), Item("w", Type::kF32, 1),
            Json("holdfast.state", {0, 1, 2, 5}), Json("other", {1})};
  SavedItem opaque = Json("z", {1, 3});
  opaque.kind = SavedItem::Kind::kOpaque;
  opaque.codec = "python.pickle.1";
  items_.push_back(opaque);
  const auto plan = Plan();
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_THAT(Names(plan->files[0]),
              ElementsAre("w", "holdfast:0000000:own:rng", "holdfast:0000001:own:rng",
                          "holdfast:0000000:json:holdfast.state", "holdfast:0000001:json:other",
                          "holdfast:0000001:opaque:python.pickle.1:z"));
  const auto metadata = Header(plan->files[0]).metadata;
  EXPECT_EQ(metadata.at("holdfast_ranks holdfast:0000000:json:holdfast.state"), "0 to 2, 5");
  EXPECT_EQ(metadata.at("holdfast_ranks holdfast:0000001:opaque:python.pickle.1:z"), "1, 3");
  EXPECT_EQ(plan->tensors, 3U);
  EXPECT_EQ(plan->objects, 3U);

  const auto of_one = Plan({.rank = 1});
  ASSERT_TRUE(of_one.ok()) << of_one.status();
  EXPECT_THAT(
      Names(of_one->files[0]),
      ElementsAre("w", "rng", "holdfast:0000001:json:holdfast.state", "holdfast:0000001:json:other",
                  "holdfast:0000001:opaque:python.pickle.1:z"));
  EXPECT_NE(of_one->digest, plan->digest);

  const absl::Status refused = Plan({.only = {"rng"}}).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(refused));
  EXPECT_THAT(std::string(refused.message()), HasSubstr("rng; say whose are wanted: --rank R"));
  EXPECT_THAT(Names(Plan({.only = {"rng"}, .rank = 0})->files[0]), ElementsAre("rng"));
  EXPECT_TRUE(absl::IsNotFound(Plan({.only = {"rng"}, .rank = 2}).status()));
}

TEST_F(ExportPlanTest, KeysAndTheirNames) {
  items_ = {Item("ema.w", Type::kU8, 1), Item("model", Type::kU8, 1),
            Item("model.a.w", Type::kU8, 1), Item("models.w", Type::kU8, 1),
            Json("holdfast.state", {0})};
  EXPECT_THAT(Names(Plan({.only = {"model"}})->files[0]), ElementsAre("a.w", "model"));
  EXPECT_THAT(Names(Plan({.only = {"model.a"}})->files[0]), ElementsAre("w"));
  EXPECT_THAT(Names(Plan({.only = {"model.a", "ema"}})->files[0]),
              ElementsAre("ema.w", "model.a.w"));
  EXPECT_TRUE(absl::IsNotFound(Plan({.only = {"mode"}}).status()));
  EXPECT_TRUE(absl::IsNotFound(Plan({.only = {"ema", "gone"}}).status()));
}

TEST_F(ExportPlanTest, NamesThatCannotBeAreRefused) {
  items_ = {Item("a.__metadata__", Type::kU8, 1), Item("b.holdfast:0000000:json:x", Type::kU8, 1),
            Item("c.", Type::kU8, 1), Item("d", Type::kU8, 1), Item("d.d", Type::kU8, 1)};
  for (const std::string key : {"a", "b", "c", "d"}) {
    const absl::Status refused = Plan({.only = {key}}).status();
    EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << key;
    EXPECT_THAT(std::string(refused.message()), HasSubstr("would be called '")) << key;
  }
  EXPECT_TRUE(Plan().ok());
}

TEST_F(ExportPlanTest, WhatIsNotWholeIsRefusedUnlessItIsNotWanted) {
  items_ = {Item("a.w", Type::kU8, 1), Item("b.w", Type::kU8, 1)};
  items_[1].problem = "tensor 'b.w': a hole";
  EXPECT_THAT(std::string(Plan().status().message()), HasSubstr("tensor 'b.w': a hole"));
  EXPECT_TRUE(Plan({.only = {"a"}}).ok());
}

TEST_F(ExportPlanTest, TiedNames) {
  items_ = {Item("m.in", Type::kU8, 1), Item("m.norm", Type::kU8, 1)};
  tied_ = {{"m.out", "m.in"},   {"h.out", "m.in"},      {"h.again", "m.in"},
           {"m.out", "m.norm"}, {"m.lost", "m.nosuch"}, {"m.norm", "m.in"}};
  const auto all = Plan();
  EXPECT_THAT(Names(all->files[0]), ElementsAre("m.in", "m.norm"));
  EXPECT_THAT(all->left_out, ElementsAre(TiedName{"m.out", "m.in"}, TiedName{"h.out", "m.in"},
                                         TiedName{"h.again", "m.in"}));
  EXPECT_EQ(Header(all->files[0]).metadata.at("h.again"), "m.in");
  const auto model = Plan({.only = {"m"}});
  EXPECT_THAT(model->left_out, ElementsAre(TiedName{"out", "in"}));
  // Under that key it has further names alone: the first of them has it.
  const auto head = Plan({.only = {"h"}});
  ASSERT_TRUE(head.ok()) << head.status();
  EXPECT_THAT(Names(head->files[0]), ElementsAre("out"));
  EXPECT_EQ(head->files[0].entries[0].item, 0U);
  EXPECT_THAT(head->left_out, ElementsAre(TiedName{"again", "out"}));
}

TEST_F(ExportPlanTest, TheSameAgainIsTheSameAndOtherContentIsNot) {
  items_ = {Item("a", Type::kU8, 1), Item("b", Type::kU8, 1)};
  const uint64_t digest = Plan()->digest;
  EXPECT_EQ(Plan()->digest, digest);
  EXPECT_NE(Plan({.file_bytes_max = 1})->digest, digest);
  EXPECT_NE(Plan({.only = {"a"}})->digest, digest);
  source_.content = 1;
  EXPECT_NE(PlanExport(source_, {.file_bytes_max = 1'000'000})->digest, digest);
  items_[0].type = Type::kI8;
  EXPECT_NE(Plan()->digest, digest);
}

TEST(TiedNames, OfEachKindOfNode) {
  const std::string tree = R"({"dict":[
    ["m",{"module":{"out":{"tensor":"m.in"},"x":{"value":3}}}],
    ["same",{"tensor":"same"}],["twin",{"tensor":"same"}],
    ["list",{"list":[{"value":1},{"array":"same"}]}],
    ["s",{"stateful":{"dict":[[7,{"tensor":"same"}],[{"$tuple":[1]},{"tensor":"hidden"}]]}}]]})";
  EXPECT_THAT(TiedNames(tree), ElementsAre(TiedName{"m.out", "m.in"}, TiedName{"twin", "same"},
                                           TiedName{"list.1", "same"}, TiedName{"s.7", "same"}));
}

TEST(TiedNames, OfWhatIsNoTreeNothing) {
  for (const std::string text :
       {"", "{", "[]", "3", R"({"dict":3})", R"({"dict":[3,[],["a"],["a","b"]]})",
        R"({"module":[1]})", R"({"tensor":{}})", R"({"list":{"a":1}})", "\xff"}) {
    EXPECT_TRUE(TiedNames(text).empty()) << text;
  }
  std::string deep;
  for (int i = 0; i < 100'000; ++i) {
    deep += R"({"list":[)";
  }
  EXPECT_TRUE(TiedNames(deep).empty());
  std::string closed = deep + R"({"tensor":"t"})";
  for (int i = 0; i < 100'000; ++i) {
    closed += "]}";
  }
  EXPECT_TRUE(TiedNames(closed).empty()) << "deeper than any tree is";
}

}  // namespace
}  // namespace holdfast
