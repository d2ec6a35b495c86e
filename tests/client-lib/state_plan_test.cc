#include "client-lib/src/state_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <list>
#include <numeric>

#include "client-lib/src/state_match.h"

namespace holdfast::client {
namespace {

State TwoTensors(float* a, float* b) {
  return {{{"a", Type::kF32, {2, 3}, a}, {"b", Type::kF32, {4}, b}}, {{"o", "[1]", true, ""}}};
}

TEST(PlanCache, TheSameStateGetsTheSamePlan) {
  float a[6] = {};
  float b[4] = {};
  PlanCache cache(0);
  const State state = TwoTensors(a, b);
  const auto first = cache.Get(state);
  ASSERT_TRUE(first.ok());
  EXPECT_EQ(cache.Get(state)->get(), first->get());

  // Other memory, other bytes of an object of the same length: still the same plan.
  float elsewhere[6] = {};
  State moved = TwoTensors(elsewhere, b);
  moved.objects[0].bytes = "[2]";
  EXPECT_EQ(cache.Get(moved)->get(), first->get());
  EXPECT_TRUE(FitsObjects(**first, moved.objects));
}

TEST(PlanCache, AnyDifferenceOfTheTensorsIsSeen) {
  float a[6] = {};
  float b[4] = {};
  const auto changes = std::vector<std::function<void(State&)>>{
      [](State& s) { s.tensors[0].name = "aa"; },
      [](State& s) { s.tensors[0].type = Type::kI32; },
      [](State& s) {
        s.tensors[0].global_shape = {3, 2};
      },
      [](State& s) { s.tensors[0].global_shape = {6}; },
      [](State& s) { s.tensors[1] = Tensor::Flat("b", Type::kF32, {8}, 4, 4, s.tensors[1].data); },
      [](State& s) {
        s.tensors[1] = Tensor::Box("b", Type::kF32, {4}, {0}, {4}, s.tensors[1].data);
      },
      [](State& s) { std::swap(s.tensors[0], s.tensors[1]); },
      [](State& s) { s.tensors.pop_back(); },
      [&](State& s) { s.tensors.emplace_back("c", Type::kF32, std::vector<uint64_t>{1}, a); },
  };
  for (size_t i = 0; i < changes.size(); ++i) {
    PlanCache cache(0);
    State state = TwoTensors(a, b);
    const auto before = cache.Get(state);
    changes[i](state);
    const auto after = cache.Get(state);
    ASSERT_TRUE(before.ok() && after.ok()) << i;
    EXPECT_NE(before->get(), after->get()) << i;
  }
}

TEST(PlanCache, ObjectsOfAnotherLengthMakeAnotherPlanOfTheSameTensors) {
  float a[6] = {};
  float b[4] = {};
  State state = TwoTensors(a, b);
  const auto plan = PlanState(state, 0);
  ASSERT_TRUE(plan.ok());
  state.objects[0].bytes = "[1, 2, 3]";
  EXPECT_FALSE(FitsObjects(**plan, state.objects));
  const auto replanned = PlanWithObjects(**plan, state.objects, 0);
  const auto fresh = PlanState(state, 0);
  ASSERT_TRUE(replanned.ok() && fresh.ok());
  EXPECT_EQ((*replanned)->image.layout, (*fresh)->image.layout);
  EXPECT_EQ((*replanned)->image.from_input, (*fresh)->image.from_input);
  EXPECT_EQ((*replanned)->image.header, (*fresh)->image.header);
  EXPECT_EQ((*replanned)->signature, (*fresh)->signature);
  EXPECT_TRUE(FitsObjects(**replanned, state.objects));

  for (const auto& change : std::vector<std::function<void(Object&)>>{
           [](Object& o) { o.name = "p"; }, [](Object& o) { o.json = false, o.codec = "c"; },
           [](Object& o) { o.bytes += " "; }}) {
    std::vector<Object> objects = state.objects;
    change(objects[0]);
    EXPECT_FALSE(FitsObjects(**replanned, objects));
  }
  EXPECT_FALSE(FitsObjects(**replanned, {}));
}

Code CodeOf(const State& state) {
  return PlanState(state, 0).status().code();
}

TEST(PlanState, RefusesWhatContradictsItself) {
  float w[8] = {};
  EXPECT_EQ(CodeOf({}), Code::kInvalidArgument);
  EXPECT_EQ(CodeOf({{{"w", Type::kF32, {8}, nullptr}}, {}}), Code::kInvalidArgument);
  EXPECT_EQ(CodeOf({{{"", Type::kF32, {8}, w}}, {}}), Code::kInvalidArgument);
  EXPECT_EQ(CodeOf({{{"\xff", Type::kF32, {8}, w}}, {}}), Code::kInvalidArgument);
  EXPECT_EQ(CodeOf({{{"w", static_cast<Type>(99), {8}, w}}, {}}), Code::kInvalidArgument);
  EXPECT_EQ(CodeOf({{{"w", Type::kF32, {8}, w}, {"w", Type::kF32, {8}, w}}, {}}),
            Code::kInvalidArgument);
  EXPECT_EQ(CodeOf({{{"w", Type::kF32, {8}, w}}, {{"w", "1", true, ""}}}), Code::kInvalidArgument);
  EXPECT_EQ(CodeOf({{{"w", Type::kF32, {1ull << 40, 1ull << 40}, w}}, {}}), Code::kInvalidArgument);
  EXPECT_EQ(CodeOf({{Tensor::Box("w", Type::kF32, {8}, {4}, {5}, w)}, {}}), Code::kInvalidArgument);
  EXPECT_EQ(CodeOf({{Tensor::Flat("w", Type::kF32, {8}, 4, UINT64_MAX, w)}, {}}),
            Code::kInvalidArgument);
  EXPECT_EQ(CodeOf({{}, {{"o", "{", true, ""}}}), Code::kInvalidArgument);
  EXPECT_EQ(CodeOf({{}, {{"o", "x", false, ""}}}), Code::kInvalidArgument);

  State wrong_size{{{"w", Type::kF32, {8}, w}}, {}};
  wrong_size.tensors[0].bytes = 31;
  const Status status = PlanState(wrong_size, 0).status();
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_NE(status.message().find("'w'"), std::string::npos);
  EXPECT_NE(status.message().find("31"), std::string::npos);
  EXPECT_NE(status.message().find("32"), std::string::npos);
  wrong_size.tensors[0].bytes = 32;
  EXPECT_EQ(CodeOf(wrong_size), Code::kOk);

  // A cached plan changes nothing about it.
  PlanCache cache(0);
  ASSERT_TRUE(cache.Get(wrong_size).ok());
  wrong_size.tensors[0].bytes = 33;
  EXPECT_EQ(cache.Get(wrong_size).status().code(), Code::kInvalidArgument);
  wrong_size.tensors[0].bytes = 0;
  wrong_size.tensors[0].data = nullptr;
  EXPECT_EQ(cache.Get(wrong_size).status().code(), Code::kInvalidArgument);
}

TEST(PlanState, RoomForImageAndTheLongestRecord) {
  float w[8] = {};
  const auto plan = PlanState({{{"w", Type::kF32, {8}, w}}, {}}, 0);
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ((*plan)->slot_bytes % (2 << 20), 0u);
  ShardRecord record;
  record.job_name = std::string(kJobNameBytesMax, 'j');
  record.layout_bytes = (*plan)->image.layout_bytes;
  record.digests.assign((*plan)->digest_count, UINT64_MAX);
  record.descent.assign(kDescentMax, Descent{UINT64_MAX, {UINT64_MAX, UINT64_MAX}});
  record.id = {{}, UINT64_MAX, UINT64_MAX, UINT32_MAX};
  EXPECT_LE(RecordOffset((*plan)->image.layout.image_bytes) + EncodeRecord(record).size(),
            (*plan)->slot_bytes);
}

// ---- Overlaps: one 4 x 6 tensor, elements numbered, cut in all ways ----

class Overlaps : public testing::Test {
 protected:
  Overlaps() : whole_(24) { std::iota(whole_.begin(), whole_.end(), 0); }

  Tensor Whole() { return {"w", Type::kI32, {4, 6}, whole_.data()}; }
  Tensor Box(uint64_t row, uint64_t column, uint64_t rows, uint64_t columns) {
    std::vector<int>& bytes = parts_.emplace_back();
    for (uint64_t r = row; r < row + rows; ++r) {
      for (uint64_t c = column; c < column + columns; ++c) {
        bytes.push_back(static_cast<int>(r * 6 + c));
      }
    }
    return Tensor::Box("w", Type::kI32, {4, 6}, {row, column}, {rows, columns}, bytes.data());
  }
  Tensor Flat(uint64_t start, uint64_t length) {
    std::vector<int>& bytes = parts_.emplace_back(length);
    std::iota(bytes.begin(), bytes.end(), static_cast<int>(start));
    return Tensor::Flat("w", Type::kI32, {4, 6}, start, length, bytes.data());
  }
  Status Compare(const std::vector<Tensor>& tensors) {
    const auto plan = PlanState({tensors, {}}, 0);
    if (!plan.ok()) {
      return plan.status();
    }
    std::vector<const void*> sources;
    for (const Tensor& tensor : tensors) {
      sources.push_back(tensor.data);
    }
    return CompareOverlaps(**plan, sources);
  }

  std::vector<int> whole_;
  std::list<std::vector<int>> parts_;
};

TEST_F(Overlaps, EveryChangeOfASharedElementIsFoundAndNoOther) {
  const std::vector<std::pair<Tensor, Tensor>> pairs = {
      {Whole(), Box(1, 2, 2, 3)},         {Whole(), Flat(5, 9)},
      {Box(0, 0, 3, 4), Box(1, 2, 3, 4)}, {Box(1, 1, 2, 4), Flat(3, 12)},
      {Flat(2, 10), Flat(8, 12)},         {Box(2, 0, 1, 6), Flat(0, 24)}};
  for (size_t p = 0; p < pairs.size(); ++p) {
    const auto& [a, b] = pairs[p];
    EXPECT_TRUE(Compare({a, b}).ok()) << p;
    const auto elements = [](const Tensor& t) -> uint64_t {
      return t.place == Tensor::Place::kBox    ? t.box_shape[0] * t.box_shape[1]
             : t.place == Tensor::Place::kFlat ? t.flat_length
                                               : 24;
    };
    const auto holds = [&](const Tensor& t, int value) {
      return std::find(static_cast<const int*>(t.data),
                       static_cast<const int*>(t.data) + elements(t),
                       value) != static_cast<const int*>(t.data) + elements(t);
    };
    for (uint64_t i = 0; i < elements(b); ++i) {
      int& element = static_cast<int*>(b.data)[i];
      const int value = element;
      const bool shared = holds(a, value);
      element = 1000;
      EXPECT_EQ(Compare({a, b}).code(), shared ? Code::kInvalidArgument : Code::kOk)
          << "pair " << p << " element " << i;
      EXPECT_EQ(Compare({b, a}).code(), shared ? Code::kInvalidArgument : Code::kOk)
          << "pair " << p << " element " << i;
      element = value;
    }
  }
}

TEST_F(Overlaps, SlicesThatShareNothingMayDiffer) {
  Tensor right = Box(0, 3, 4, 3);
  std::fill_n(static_cast<int*>(right.data), 12, -1);
  EXPECT_TRUE(Compare({Box(0, 0, 4, 3), right}).ok());
}

// ---- Matching ----

Layout LayoutOf(const State& state) {
  const auto plan = PlanState(state, 0);
  EXPECT_TRUE(plan.ok());
  return (*plan)->image.layout;
}

TEST(MatchState, FindsExactlyEqualSlicesOnly) {
  float w[8] = {};
  const State saved{{{"a", Type::kF32, {2, 4}, w},
                     Tensor::Box("b", Type::kF32, {4, 4}, {0, 0}, {2, 4}, w),
                     Tensor::Box("b", Type::kF32, {4, 4}, {2, 0}, {2, 4}, w),
                     Tensor::Flat("c", Type::kF32, {100}, 10, 8, w)},
                    {{"o", "1", true, ""}, {"p", "raw", false, "codec/1"}}};
  // Codecs have no '/' in them.
  State good = saved;
  good.objects[1].codec = "codec.1";
  const Layout layout = LayoutOf(good);

  State wanted{
      {Tensor::Box("b", Type::kF32, {4, 4}, {2, 0}, {2, 4}, w), {"a", Type::kF32, {2, 4}, w}}, {}};
  const Result<StateMatch> match = MatchState(wanted, layout);
  ASSERT_TRUE(match.ok());
  EXPECT_EQ(std::get<BoxPlace>(layout.slices[match->tensors[0]].place).offset,
            (std::vector<uint64_t>{2, 0}));
  EXPECT_EQ(layout.slices[match->tensors[1]].name, "a");
  EXPECT_EQ(match->objects.size(), 2u);  // all

  const auto refused = [&](const Tensor& tensor, const std::string& expected,
                           const std::string& found) {
    const Status status = MatchState({{tensor}, {}}, layout).status();
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_NE(status.message().find(expected), std::string::npos) << status.message();
    EXPECT_NE(status.message().find(found), std::string::npos) << status.message();
  };
  refused({"a", Type::kI32, {2, 4}, w}, "I32 [2, 4]", "F32 [2, 4]");
  refused({"a", Type::kF32, {4, 2}, w}, "F32 [4, 2]", "F32 [2, 4]");
  refused(Tensor::Box("b", Type::kF32, {4, 4}, {1, 0}, {2, 4}, w), "box at [1, 0]",
          "box at [0, 0]");
  refused(Tensor::Flat("c", Type::kF32, {100}, 11, 8, w), "elements 11 to 19", "elements 10 to 18");
  refused({"zz", Type::kF32, {2, 4}, w}, "'zz'", "'a'");
  refused({"o", Type::kU8, {1}, w}, "'o'", "object");

  EXPECT_EQ(MatchState({{}, {{"p", "", true, ""}}}, layout)->objects.size(), 1u);
  EXPECT_EQ(MatchState({{}, {{"p", "", false, "other"}}}, layout).status().code(),
            Code::kInvalidArgument);
  EXPECT_EQ(MatchState({{}, {{"a", "", true, ""}}}, layout).status().code(),
            Code::kInvalidArgument);
  EXPECT_EQ(MatchState({{}, {{"q", "", true, ""}}}, layout).status().code(),
            Code::kInvalidArgument);
}

}  // namespace
}  // namespace holdfast::client
