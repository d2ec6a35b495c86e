// A committed step read as whole tensors and objects, against a real ckptd: random models, split
// among random numbers of ranks, any ranges of them in any order, compared with what a reference
// says of each element; and ckptctl's
// commands that read so.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <random>

#include "holdfast/checkpoint_reader.h"
#include "tests/integration/split_model.h"
#include "tests/integration/tier_fixture.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;

constexpr Milliseconds kDeadline{60'000};
constexpr uint64_t kWindow = 1 << 20;

class CheckpointReaderTest : public TierTest {
 protected:
  explicit CheckpointReaderTest(const NodeOptions& options = TierNode()) : TierTest(options) {}
  void SetUp() override { ASSERT_TRUE(node_.Start()); }

  void Save(const Model& model, uint32_t ranks, uint64_t step,
            const std::vector<Object>& objects = {},
            const std::vector<Stage>& until = {Stage::kCommitted}) {
    ++launch_;
    ForAllRanks(ranks, [&](uint32_t rank) {
      const SplitRank of{rank, ranks, launch_, node_.socket()};
      const std::unique_ptr<Job> job = OpenRank(of);
      ASSERT_NE(job, nullptr);
      SaveRank(*job, of, model, step, objects, until, kDeadline);
    });
  }
  CheckpointOptions Options() const {
    CheckpointOptions options;
    options.job = "elastic";
    options.socket = node_.socket();
    options.deadline = options.window_deadline = kDeadline;
    return options;
  }
  std::unique_ptr<CheckpointReader> Open() {
    auto reader = OpenCheckpoint(Options());
    EXPECT_TRUE(reader.ok()) << reader.status().message();
    return reader.ok() ? *std::move(reader) : nullptr;
  }
  // All that the ranges come to; an error is the test's failure.
  static std::string Read(const CheckpointReader& reader, const std::vector<ElementRange>& ranges,
                          uint64_t window = kWindow) {
    const auto stream = reader.Stream(ranges, window);
    EXPECT_TRUE(stream.ok()) << stream.status().message();
    std::string all;
    std::string buffer(window, '\0');
    while (stream.ok()) {
      const Result<uint64_t> got = (*stream)->Next(buffer.data());
      EXPECT_TRUE(got.ok()) << got.status().message();
      if (!got.ok() || *got == 0) {
        break;
      }
      all.append(buffer, 0, *got);
    }
    return all;
  }
  static std::string Expected(const Model& model, const CheckpointReader& reader,
                              const std::vector<ElementRange>& ranges, uint64_t step) {
    std::string all;
    for (const ElementRange& range : ranges) {
      const Whole& whole = WholeOf(model, reader.items()[range.item].name);
      for (uint64_t i = 0; i < range.count; ++i) {
        std::byte element[8] = {};
        whole.Put(range.first + i, step, element);
        all.append(reinterpret_cast<const char*>(element), TypeBytes(whole.type));
      }
    }
    return all;
  }

  int launch_ = 0;
};

TEST_F(CheckpointReaderTest, AnyRangesOfRandomModels) {
  const char* const told = std::getenv("HOLDFAST_TEST_SEED");
  const uint64_t seed = told != nullptr ? std::strtoull(told, nullptr, 10) : 20250704;
  std::mt19937_64 random(seed);
  for (uint64_t step = 1; step <= 12; ++step) {
    SCOPED_TRACE("step " + std::to_string(step) + "; HOLDFAST_TEST_SEED=" + std::to_string(seed));
    const Model model = RandomModel(random);
    const auto ranks = static_cast<uint32_t>(1 + random() % 6);
    ASSERT_NO_FATAL_FAILURE(Save(model, ranks, step));
    const auto reader = Open();
    ASSERT_NE(reader, nullptr);
    EXPECT_EQ(reader->step(), step);
    EXPECT_EQ(reader->world_size(), ranks);
    ASSERT_EQ(reader->items().size(), model.wholes.size());
    std::vector<ElementRange> ranges;
    for (int i = 0; i < 40; ++i) {
      const size_t item = random() % reader->items().size();
      const uint64_t elements = reader->items()[item].elements;
      const uint64_t first = random() % (elements + 1);
      ranges.push_back({item, first, random() % (elements - first + 1)});
    }
    EXPECT_EQ(Read(*reader, ranges), Expected(model, *reader, ranges, step));
  }
}

TEST_F(CheckpointReaderTest, WhatThereIs) {
  const std::vector<Object> objects = {{"note", "{\"a\":1}", true, ""},
                                       {"raw", std::string("\0\1", 2), false, "some.codec.1"}};
  Save(SmallModel(), 4, 3, objects, {Stage::kRemote});
  const auto reader = Open();
  ASSERT_NE(reader, nullptr);
  std::vector<std::string> names;
  for (const SavedItem& item : reader->items()) {
    names.push_back(item.name);
    EXPECT_EQ(item.problem, "");
  }
  EXPECT_THAT(names, ::testing::ElementsAre("embedding", "empty", "layers.0.bias", "layers.0.w",
                                            "optimizer.exp_avg", "scale", "note", "raw"));
  const SavedItem& w = reader->items()[3];
  EXPECT_EQ(w.type, Type::kBF16);
  EXPECT_EQ(w.shape, (std::vector<uint64_t>{16, 3, 5}));
  EXPECT_EQ(w.elements, 240U);
  EXPECT_EQ(w.bytes, 480U);
  EXPECT_TRUE(w.ranks.empty());
  EXPECT_EQ(reader->items()[6].kind, SavedItem::Kind::kJson);
  EXPECT_EQ(reader->items()[7].kind, SavedItem::Kind::kOpaque);
  EXPECT_EQ(reader->items()[7].codec, "some.codec.1");
  EXPECT_THAT(reader->items()[7].ranks, ::testing::ElementsAre(0, 1, 2, 3));
  EXPECT_EQ(Read(*reader, {{6, 0, 7}, {7, 1, 1}, {6, 2, 3}}), "{\"a\":1}\1a\":");
  // The same again, from another tier, is the same step.
  const uint64_t content = reader->content();
  PowerCut();
  ASSERT_TRUE(node_.Start());
  const auto again = Open();
  ASSERT_NE(again, nullptr);
  EXPECT_EQ(again->content(), content);
}

TEST_F(CheckpointReaderTest, LargeThingsComeInWindows) {
  const Model model{{{"columns", Type::kF32, {1500, 700}}, {"flat", Type::kI64, {300'001}}},
                    {Split::kColumns, Split::kFlat}};
  std::string text = "\"";
  while (text.size() < (3 << 20)) {
    text += std::to_string(text.size()) + ",";
  }
  text += "\"";
  Save(model, 3, 5, {{"text", text, true, ""}});
  const auto reader = Open();
  ASSERT_NE(reader, nullptr);
  ASSERT_EQ(reader->items().size(), 3U);
  const std::vector<ElementRange> tensors = {{0, 0, 1500 * 700}, {1, 0, 300'001}, {0, 77, 600'000}};
  for (const uint64_t window : {kWindow, kWindow * 3 + 123}) {
    EXPECT_EQ(Read(*reader, tensors, window), Expected(model, *reader, tensors, 5));
    EXPECT_EQ(Read(*reader, {{2, 0, text.size()}}, window), text);
    EXPECT_EQ(Read(*reader, {{2, 1'500'000, 1'200'000}}, window),
              text.substr(1'500'000, 1'200'000));
  }
}

TEST_F(CheckpointReaderTest, WhatCannotBe) {
  EXPECT_THAT(OpenCheckpoint(Options()).status().message(), HasSubstr("no such job"));
  Save(SmallModel(), 2, 3);
  CheckpointOptions options = Options();
  options.attempt = 1;
  EXPECT_EQ(OpenCheckpoint(options).status().code(), Code::kInvalidArgument);
  options.step = 4;
  EXPECT_THAT(OpenCheckpoint(options).status().message(), HasSubstr("no step 4 of attempt 1"));
  options.step = 3;
  options.attempt = 9;
  EXPECT_THAT(OpenCheckpoint(options).status().message(), HasSubstr("there is one of attempt 1"));
  options.socket = "/none";
  EXPECT_EQ(OpenCheckpoint(options).status().code(), Code::kUnavailable);
  const auto reader = Open();
  ASSERT_NE(reader, nullptr);
  EXPECT_EQ(reader->Stream({{99, 0, 0}}, kWindow).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(reader->Stream({{0, 0, 1}}, 7).status().code(), Code::kInvalidArgument);
  const auto nothing = reader->Stream({}, kWindow);
  ASSERT_TRUE(nothing.ok());
  EXPECT_EQ(*(*nothing)->Next(nullptr), 0U);
}

TEST_F(CheckpointReaderTest, AnInterruptEndsAWindow) {
  Save(SmallModel(), 2, 3);
  CheckpointOptions options = Options();
  std::atomic<bool> stop{false};
  options.interrupted = [&stop] { return stop.load(); };
  const auto reader = OpenCheckpoint(options);
  ASSERT_TRUE(reader.ok());
  const auto stream = (*reader)->Stream({{0, 0, 230}}, kWindow);
  ASSERT_TRUE(stream.ok());
  stop = true;
  std::string buffer(kWindow, '\0');
  EXPECT_EQ((*stream)->Next(buffer.data()).status().code(), Code::kDeadlineExceeded);
}

TEST_F(CheckpointReaderTest, CommandsThatRead) {
  const Model model{{{"model.w", Type::kF32, {600, 700}}, {"optim.m", Type::kI64, {40'001}}},
                    {Split::kColumns, Split::kFlat}};
  Save(model, 3, 1);
  Save(model, 2, 2);
  const TemporaryDirectory folder;
  const std::string set = folder.Path("set");
  const std::vector<std::string> to_set = {"export", "elastic", set, "--max-file-bytes", "1MB"};
  const CtlAnswer exported = Ctl(node_, to_set);
  EXPECT_EQ(exported.exit_code, 0) << exported.errors;
  EXPECT_THAT(exported.text, HasSubstr("2 tensors in 2 files"));
  EXPECT_TRUE(std::filesystem::exists(set + "/model.safetensors.index.json"));
  EXPECT_THAT(Ctl(node_, to_set).text, HasSubstr("is already in"));
  const CtlAnswer stats = Ctl(node_, {"stats", "elastic"});
  EXPECT_EQ(stats.exit_code, 0) << stats.errors;
  EXPECT_THAT(stats.text, HasSubstr("2 tensors, 460001 elements; no NaN, no Inf"));
  const CtlAnswer diff = Ctl(node_, {"diff", "elastic", "1", "2"});
  EXPECT_EQ(diff.exit_code, 0) << diff.errors;
  EXPECT_THAT(diff.text, HasSubstr("0 of 2 tensors are the same"));
}

}  // namespace
}  // namespace holdfast
