// What stats and diff show, compared with texts that are written here; which tensors are meant.
#include "ckptctl/tensor_views.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "ckptctl/tensor_choice.h"

namespace holdfast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

SavedItem Item(const std::string& name, Type type = Type::kF32,
               std::vector<uint64_t> shape = {2, 3}) {
  SavedItem item;
  item.name = name;
  item.type = type;
  item.shape = std::move(shape);
  item.elements = 1;
  for (const uint64_t n : item.shape) {
    item.elements *= n;
  }
  item.bytes = item.elements * TypeBytes(type);
  return item;
}

TEST(RenderStats, TheBadOnesComeFirst) {
  SavedItem own = Item("rng", Type::kU8, {4});
  own.ranks = {3};
  SavedItem torn = Item("torn");
  torn.problem = "tensor 'torn': nobody\x1b has all of it";
  const SavedItem good = Item("a.good");
  const SavedItem bad = Item("b.\x1b[2Jbad", Type::kBF16, {7});
  TensorStats of_good{6, 0, 0, 1, 0.0, 1.5, 0.25, 1.5};
  TensorStats of_own{4, 0, 0, 0, uint64_t{1}, uint64_t{9}, 3.0, uint64_t{9}};
  TensorStats of_bad{7, 6, 1, 0, {}, {}, {}, {}};
  EXPECT_EQ(RenderStats("step 9", {{&good, of_good}, {&own, of_own}, {&bad, of_bad}, {&torn, {}}}),
            "step 9: 4 tensors, 23 elements; 6 NaN and 1 Inf in 1 tensor\n"
            "  NAN  INF  ZEROS  MIN  MAX  MEAN  ABS MAX  DTYPE  SHAPE  TENSOR\n"
            "    6    1      0    -    -     -        -  BF16   [7]    b.\\x1b[2Jbad\n"
            "    0    0      1    0  1.5  0.25      1.5  F32    [2,3]  a.good\n"
            "    0    0      0    1    9     3        9  U8     [4]    rng (rank 3)\n"
            "PROBLEM: tensor 'torn': nobody\\x1b has all of it\n");
}

TEST(RenderStats, LongListsAreCut) {
  const SavedItem item = Item("w", Type::kF32, {});
  const std::vector<StatsRow> rows(201, {&item, {1, 0, 0, 0, 1.0, 1.0, 1.0, 1.0}});
  EXPECT_THAT(RenderStats("s", rows), HasSubstr("no NaN, no Inf"));
  EXPECT_THAT(RenderStats("s", rows), HasSubstr("… and 1 more; --tensor chooses"));
}

TEST(RenderDiff, EachKindOfDifference) {
  const SavedItem a = Item("w");
  const SavedItem half = Item("w", Type::kF16);
  SavedItem torn = Item("torn");
  torn.problem = "torn: a hole";
  using V = DiffVerdict;
  const TensorDifference far{6, 2, 1, 0, 0, 3, 0.5, 0.125};
  const TensorDifference none{6, 6, 6, 0, 0, 0, {}, {}};
  EXPECT_EQ(RenderDiff("step 1", "step 2",
                       {{&a, &a, V::kEqual, {}},
                        {&a, &a, V::kDifferent, far},
                        {&a, &a, V::kDifferent, none},
                        {&a, nullptr, V::kOnlyA, {}},
                        {nullptr, &a, V::kOnlyB, {}},
                        {&a, &half, V::kOtherType, {}},
                        {&a, &torn, V::kProblem, {}}}),
            "A: step 1\nB: step 2\n"
            "1 of 7 tensors are the same, bit for bit\n"
            "  MAX |A-B|  ||A-B||/||A||  DIFFERENT   NAN   INF  DTYPE, SHAPE  TENSOR\n"
            "        0.5          0.125     2 of 6  1, 0  0, 3  F32 [2,3]     w\n"
            "          -              -     6 of 6  6, 0  0, 0  F32 [2,3]     w\n"
            "only in A: w, F32 [2,3]\n"
            "only in B: w, F32 [2,3]\n"
            "w is F32 [2,3] in A and F16 [2,3] in B\n"
            "PROBLEM: torn: a hole\n");
  EXPECT_THAT(RenderDiff("a", "b", {{&a, &a, V::kEqual, {}}}),
              HasSubstr("all 1 tensor is the same, bit for bit\n"));
}

TEST(ChooseTensors, ByKeyAndByPattern) {
  SavedItem object = Item("model.text", Type::kU8, {3});
  object.kind = SavedItem::Kind::kJson;
  const std::vector<SavedItem> items = {Item("ema.w"), Item("model"), Item("model.a.w"),
                                        Item("model2.w"), object};
  EXPECT_THAT(*ChooseTensors(items, {}), ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(*ChooseTensors(items, {.only = {"model"}}), ElementsAre(1, 2));
  EXPECT_THAT(*ChooseTensors(items, {.only = {"model.a", "ema"}}), ElementsAre(0, 2));
  EXPECT_THAT(*ChooseTensors(items, {.pattern = "model*.w"}), ElementsAre(2, 3));
  EXPECT_THAT(*ChooseTensors(items, {.only = {"model"}, .pattern = "*?w"}), ElementsAre(2));
  EXPECT_TRUE(absl::IsNotFound(ChooseTensors(items, {.pattern = "w"}).status()));
  const absl::Status none = ChooseTensors(items, {.only = {"model.te"}}).status();
  EXPECT_TRUE(absl::IsNotFound(none));
  EXPECT_THAT(std::string(none.message()), HasSubstr("'model.te'; there is ema, model, model2"));
}

TEST(TensorBytes, WindowsAreCutAtTensors) {
  const std::vector<SavedItem> items = {Item("a", Type::kU8, {3}), Item("none", Type::kU8, {0}),
                                        Item("b", Type::kU8, {4}), Item("c", Type::kU8, {1})};
  const std::vector<size_t> all = {0, 1, 2, 3};
  TensorBytes tensors(items, all);
  EXPECT_EQ(tensors.Ranges().size(), 4U);
  std::vector<std::string> got(4);
  const std::string text = "aaabbbbc";
  for (const auto& [at, bytes] : {std::pair{0, 2}, {2, 3}, {5, 3}}) {
    tensors.Give(
        std::as_bytes(std::span(text).subspan(static_cast<size_t>(at), static_cast<size_t>(bytes))),
        [&](size_t n, std::span<const std::byte> some) {
          got[n].append(reinterpret_cast<const char*>(some.data()), some.size());
        });
  }
  EXPECT_THAT(got, ElementsAre("aaa", "", "bbbb", "c"));
}

}  // namespace
}  // namespace holdfast
