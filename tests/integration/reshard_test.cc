// Jobs that come back on another number of ranks or in another layout, against a real ckptd:
// compared element by element with what a reference says of the whole tensors.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <map>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>

#include "base/unique_fd.h"
#include "holdfast/holdfast.h"
#include "tests/client-lib/fake_driver.h"
#include "tests/integration/split_model.h"
#include "tests/integration/tier_fixture.h"

namespace holdfast {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

constexpr Milliseconds kDeadline{60'000};

class ReshardTest : public TierTest {
 protected:
  explicit ReshardTest(const NodeOptions& options = TierNode()) : TierTest(options) {}
  void SetUp() override { ASSERT_TRUE(node_.Start()); }

  SplitRank Of(uint32_t rank, uint32_t ranks) const {
    return {rank, ranks, launch_, node_.socket()};
  }
  std::unique_ptr<Job> Open(uint32_t rank, uint32_t ranks) { return OpenRank(Of(rank, ranks)); }
  void Save(const Model& model, uint32_t ranks, uint64_t step,
            const std::vector<Object>& objects = {},
            const std::vector<Stage>& until = {Stage::kCommitted}) {
    ++launch_;
    ForAllRanks(ranks, [&](uint32_t rank) {
      const std::unique_ptr<Job> job = Open(rank, ranks);
      ASSERT_NE(job, nullptr);
      SaveRank(*job, Of(rank, ranks), model, step, objects, until, kDeadline);
    });
  }
  // What each of so many ranks got; and that it is what was saved.
  std::vector<Outcome> Load(const Model& model, uint32_t ranks, uint64_t step,
                            const RestoreOptions& options = {}) {
    ++launch_;
    std::vector<Outcome> all(ranks, Outcome(Status(Code::kInternal, "")));
    objects_.assign(ranks, {});
    ForAllRanks(ranks, [&](uint32_t rank) {
      const std::unique_ptr<Job> job = Open(rank, ranks);
      ASSERT_NE(job, nullptr);
      Parts parts = PartsOf(model, rank, ranks);
      State state = StateOf(parts);
      state.objects = wanted_objects_;
      RestoreOptions with = options;
      with.deadline = kDeadline;
      all[rank] = job->Restore(state, with);
      if (all[rank].ok()) {
        EXPECT_EQ(Differs(model, parts, step), "") << "rank " << rank << " of " << ranks;
        EXPECT_EQ(all[rank]->step, step);
        objects_[rank] = state.objects;
      }
    });
    return all;
  }

  // Flips a bit of the first tensor, where it lies in memory.
  void DamageMemoryCopy(uint32_t rank, uint64_t step) {
    const CtlAnswer shard = Ctl(node_, {"inspect", "elastic", "--step", std::to_string(step),
                                        "--rank", std::to_string(rank), "--json"});
    ASSERT_EQ(shard.exit_code, 0) << shard.errors;
    const std::string image =
        node_.memory_dir() + "/" + shard.parsed["location"].get<std::string>();
    const auto offset =
        static_cast<off_t>(shard.parsed["slices"][0]["image_offset"].get<uint64_t>());
    const UniqueFd fd(::open(image.c_str(), O_RDWR | O_CLOEXEC));
    ASSERT_TRUE(fd.valid()) << image;
    char byte = 0;
    ASSERT_EQ(::pread(fd.get(), &byte, 1, offset), 1);
    byte = static_cast<char>(byte ^ 1);
    ASSERT_EQ(::pwrite(fd.get(), &byte, 1, offset), 1);
  }

  int launch_ = 0;
  std::vector<Object> wanted_objects_;
  std::vector<std::vector<Object>> objects_;
};

// Of which no drive and no remote directory has a copy.
class MemoryAloneReshardTest : public ReshardTest {
 protected:
  MemoryAloneReshardTest() : ReshardTest(NodeOptions{}) {}
};

TEST_F(ReshardTest, AnotherNumberOfRanksFromMemory) {
  const Model model = SmallModel();
  Save(model, 4, 10);
  for (const uint32_t ranks : {3U, 1U, 5U, 2U}) {
    const auto all = Load(model, ranks, 10);
    ExpectAllOk(all, 4);
    EXPECT_EQ(all[0]->source, "memory");
    EXPECT_THAT(all[0]->why, StartsWith("resharded from 4 ranks: "));
  }
  ExpectAllOk(Load(model, 4, 10), 0);  // each its own
}

TEST_F(ReshardTest, ThereAndBackWithSavesInBetween) {
  const Model model = SmallModel();
  Save(model, 2, 1);
  Save(model, 3, 2);
  Save(model, 1, 3);
  Save(model, 4, 4);
  ExpectAllOk(Load(model, 2, 4), 4);
}

TEST_F(ReshardTest, AsManyRanksInAnotherLayout) {
  Model model = SmallModel();
  Save(model, 3, 7);
  model.splits = {Split::kFlat,    Split::kReplicated, Split::kRows,
                  Split::kColumns, Split::kReplicated, Split::kReplicated};
  ExpectAllOk(Load(model, 3, 7), 3);
}

TEST_F(ReshardTest, FromTheDrivesAndFromRemote) {
  const Model model = SmallModel();
  Save(model, 4, 6, {}, {Stage::kNvme, Stage::kRemote});
  ASSERT_NO_FATAL_FAILURE(PowerCut());
  ASSERT_TRUE(node_.Start());
  auto all = Load(model, 3, 6);
  ExpectAllOk(all, 4);
  EXPECT_EQ(all[0]->source, "nvme");
  EXPECT_THAT(all[0]->why, HasSubstr("memory copy absent"));
  EmptyDrives();
  node_.Kill();
  ASSERT_TRUE(node_.Start());
  all = Load(model, 3, 6);
  ExpectAllOk(all, 4);
  EXPECT_EQ(all[0]->source, "remote");
}

TEST_F(ReshardTest, WhateverTheLayoutsAre) {
  std::mt19937_64 random(20261126);
  const auto below = [&](uint64_t n) { return random() % n; };
  for (uint64_t round = 1; round <= 25; ++round) {
    Model model = RandomModel(random);
    // (A scalar that is split flat is one rank's.)
    Save(model, static_cast<uint32_t>(1 + below(4)), round);
    for (Split& split : model.splits) {
      split = below(2) == 0 ? split : static_cast<Split>(below(4));
    }
    for (const auto& restored : Load(model, static_cast<uint32_t>(1 + below(5)), round)) {
      ASSERT_TRUE(restored.ok()) << "round " << round << ": " << restored.status().message();
    }
  }
}

// Blocks that are larger than one, cut anywhere.
TEST_F(ReshardTest, TensorsOfManyBlocks) {
  const Model model{{{"w", Type::kF32, {1537, 1023}}, {"m", Type::kBF16, {6'000'001}}},
                    {Split::kColumns, Split::kFlat}};
  Save(model, 3, 1);
  ExpectAllOk(Load(model, 2, 1), 3);
}

TEST_F(ReshardTest, WhatWasNotSavedIsRefusedForAllAndNothingIsDecided) {
  Model model = SmallModel();
  Save(model, 4, 10);
  Model more = model;
  more.wholes.push_back({"head", Type::kF32, {3, 3}});
  more.splits.push_back(Split::kReplicated);
  for (const auto& restored : Load(more, 3, 10)) {
    EXPECT_EQ(restored.status().code(), Code::kInvalidArgument);
    EXPECT_THAT(restored.status().message(), HasSubstr("head"));
  }
  Model other = model;
  other.wholes[0].shape = {23, 11};
  for (const auto& restored : Load(other, 3, 10)) {
    EXPECT_EQ(restored.status().code(), Code::kInvalidArgument);
    EXPECT_THAT(restored.status().message(),
                AllOf(HasSubstr("embedding"), HasSubstr("[23, 10]"), HasSubstr("[23, 11]")));
  }
  ExpectAllOk(Load(model, 3, 10), 4);
}

TEST_F(ReshardTest, AnotherTypeIsConvertedOnlyWhenAskedFor) {
  Model model{{{"w", Type::kF32, {40, 6}}}, {Split::kRows}};
  Save(model, 4, 1);
  model.wholes[0].type = Type::kBF16;
  for (const auto& restored : Load(model, 3, 1)) {
    EXPECT_EQ(restored.status().code(), Code::kInvalidArgument);
    EXPECT_THAT(restored.status().message(), AllOf(HasSubstr("F32"), HasSubstr("BF16")));
  }
  for (const uint32_t ranks : {3U, 4U}) {
    ++launch_;
    ForAllRanks(ranks, [&](uint32_t rank) {
      const std::unique_ptr<Job> job = Open(rank, ranks);
      Parts parts = PartsOf(model, rank, ranks);
      State state = StateOf(parts);
      const auto restored = job->Restore(state, {.deadline = kDeadline, .convert_types = true});
      ASSERT_TRUE(restored.ok()) << restored.status().message();
      for (size_t i = 0; i < parts[0]->elements.size(); ++i) {
        float saved = 0;
        Whole{"w", Type::kF32, {40, 6}}.Put(parts[0]->elements[i], 1,
                                            reinterpret_cast<std::byte*>(&saved));
        uint16_t bits = 0;
        std::memcpy(&bits, parts[0]->bytes.data() + 2 * i, sizeof(bits));
        const auto wide = static_cast<uint32_t>(bits) << 16;
        float got = 0;
        std::memcpy(&got, &wide, sizeof(got));
        EXPECT_LE(std::abs(got - saved), std::abs(saved) / 256) << i;
      }
    });
  }
}

TEST_F(ReshardTest, ObjectsThatAreTheSameEverywhereAndThoseThatAreNot) {
  const Model model = SmallModel();
  Save(model, 4, 10, {{.name = "epoch", .bytes = "3"}, {.name = "of_rank", .bytes = ""}});
  for (const auto& restored : Load(model, 3, 10)) {
    EXPECT_EQ(restored.status().code(), Code::kInvalidArgument);
    EXPECT_THAT(restored.status().message(), AllOf(HasSubstr("of_rank"), HasSubstr("merge")));
  }
  wanted_objects_ = {{.name = "epoch"}};
  ExpectAllOk(Load(model, 3, 10), 4);
  EXPECT_THAT(objects_,
              Each(::testing::ElementsAre(::testing::Field(&Object::bytes, std::string("3")))));
  // All of them, to a function that makes one.
  wanted_objects_ = {};
  RestoreOptions options;
  options.merge = [](const std::string& name, const std::vector<SavedObject>& saved) {
    EXPECT_EQ(name, "of_rank");
    int sum = 0;
    for (const SavedObject& each : saved) {
      EXPECT_THAT(each.ranks, ::testing::ElementsAre(std::stoi(each.object.bytes)));
      sum += std::stoi(each.object.bytes);
    }
    return Result<std::string>(std::to_string(sum));
  };
  ExpectAllOk(Load(model, 3, 10, options), 4);
  for (const std::vector<Object>& objects : objects_) {
    EXPECT_THAT(objects, ::testing::UnorderedElementsAre(
                             ::testing::Field(&Object::bytes, std::string("3")),
                             ::testing::Field(&Object::bytes, std::string("6"))));
  }
}

// Rank 1's copy in memory has a flipped bit: its file on a drive has the same shard.
TEST_F(ReshardTest, ADamagedCopyIsPassedOverForTheNextTier) {
  const Model model{{{"w", Type::kF32, {64, 1000}}}, {Split::kRows}};
  Save(model, 4, 10, {}, {Stage::kNvme});
  ASSERT_NO_FATAL_FAILURE(DamageMemoryCopy(1, 10));
  const auto all = Load(model, 3, 10);
  ExpectAllOk(all, 4);
  EXPECT_TRUE(
      std::any_of(all.begin(), all.end(), [](const auto& each) { return each->source == "nvme"; }));
}

// What all copies of have gone bad, another rank has too.
TEST_F(MemoryAloneReshardTest, ADamagedReplicaIsReadFromAnotherRank) {
  const Model model{{{"w", Type::kF32, {64, 1000}}}, {Split::kReplicated}};
  Save(model, 2, 10);
  ASSERT_NO_FATAL_FAILURE(DamageMemoryCopy(0, 10));
  ExpectAllOk(Load(model, 3, 10), 2);
}

TEST_F(MemoryAloneReshardTest, WhatNoCopyHasWholeMakesAllFallBack) {
  const Model model{{{"w", Type::kF32, {64, 1000}}}, {Split::kRows}};
  Save(model, 4, 10);
  Save(model, 4, 11);
  ASSERT_NO_FATAL_FAILURE(DamageMemoryCopy(1, 11));
  const auto all = Load(model, 3, 10);
  ExpectAllOk(all, 4);
  for (const auto& restored : all) {
    EXPECT_THAT(restored->notes, Each(AllOf(HasSubstr("step 11"), HasSubstr("passed over"))));
  }
}

// Nobody has marked it: what there is to do is to look.
TEST_F(MemoryAloneReshardTest, WhereNothingElseIsLeftItSaysHowToFindWhatIsBad) {
  const Model model{{{"w", Type::kF32, {64, 1000}}}, {Split::kRows}};
  Save(model, 4, 10);
  ASSERT_NO_FATAL_FAILURE(DamageMemoryCopy(1, 10));
  for (const auto& restored : Load(model, 3, 10)) {
    EXPECT_EQ(restored.status().code(), Code::kUnreadable);
    EXPECT_THAT(restored.status().message(),
                AllOf(HasSubstr("'w'"), HasSubstr("ckptctl verify elastic --all"),
                      Not(HasSubstr("reboot"))));
  }
  EXPECT_EQ(Ctl(node_, {"verify", "elastic", "--all"}).exit_code, 1);
  for (const auto& restored : Load(model, 3, 10)) {  // as it is after that
    EXPECT_THAT(restored.status().message(), HasSubstr("rank 1's memory copy is bad"));
  }
}

// Two ranks saved the same elements with different values.
TEST_F(ReshardTest, ReplicasThatDifferAreRefusedByName) {
  const Model model{{{"w", Type::kF32, {64, 1000}}}, {Split::kReplicated}};
  ++launch_;
  ForAllRanks(2, [&](uint32_t rank) {
    const std::unique_ptr<Job> job = Open(rank, 2);
    Parts parts = PartsOf(model, rank, 2);
    Fill(model, parts, 1);
    parts[0]->bytes[1000] ^= static_cast<std::byte>(rank);
    ASSERT_TRUE(job->Save(1, StateOf(parts)).ok());
  });
  for (const auto& restored : Load(model, 3, 1)) {
    EXPECT_EQ(restored.status().code(), Code::kInvalidArgument);
    EXPECT_THAT(restored.status().message(),
                AllOf(HasSubstr("'w'"), HasSubstr("ranks 0 and 1"), HasSubstr("diverged")));
  }
}

// ---- What is saved twice, in different parts ----

// Rank 0 has elements 0 to 39 of a matrix of 8 rows of 10, rank 1 its rows 2 to 7: rows 2 and 3 are
// in both.
void SaveOverlapping(const std::function<std::unique_ptr<Job>(uint32_t)>& open, const Whole& whole,
                     bool differently) {
  for (const uint32_t rank : {0U, 1U}) {
    Parts parts;
    if (rank == 0) {
      AddFlat(parts, whole, 0, 40);
    } else {
      AddBox(parts, whole, {2, 0}, {6, 10});
    }
    const Model model{{whole}, {Split::kRows}};
    Fill(model, parts, 1);
    if (differently && rank == 1) {
      parts[0]->bytes[4] ^= std::byte{1};  // of row 2
    }
    const std::unique_ptr<Job> job = open(rank);
    const Status saved = job->Save(1, StateOf(parts));
    ASSERT_TRUE(saved.ok()) << saved.message();
  }
}

TEST_F(MemoryAloneReshardTest, PartsThatOverlapAreComparedByteByByte) {
  const Whole whole{"w", Type::kF32, {8, 10}};
  const Model model{{whole}, {Split::kRows}};
  for (const bool differently : {false, true}) {
    ++launch_;
    if (differently) {
      ASSERT_EQ(node_.Remove("elastic"), "");
    }
    SaveOverlapping([&](uint32_t rank) { return Open(rank, 2); }, whole, differently);
    const auto all = Load(model, 1, 1);
    if (!differently) {
      ExpectAllOk(all, 2);
      continue;
    }
    EXPECT_EQ(all[0].status().code(), Code::kInvalidArgument);
    EXPECT_THAT(all[0].status().message(), AllOf(HasSubstr("'w'"), HasSubstr("different values")));
  }
}

// ---- As many ranks ----

// One tensor is cut otherwise than it was; another is each rank's own, and stays that.
TEST_F(ReshardTest, AsManyRanksKeepWhatIsTheirOwn) {
  const Whole cut{"w", Type::kF32, {30, 4}};
  const Whole own{"rng", Type::kI64, {5}};
  const Model saved{{cut, own}, {Split::kRows, Split::kReplicated}};
  const Model wanted{{cut, own}, {Split::kColumns, Split::kReplicated}};
  ++launch_;
  ForAllRanks(3, [&](uint32_t rank) {
    const std::unique_ptr<Job> job = Open(rank, 3);
    Parts parts = PartsOf(saved, rank, 3);
    Fill(saved, parts, 1);
    std::memset(parts[1]->bytes.data(), static_cast<int>(rank), 40);
    State state = StateOf(parts);
    state.objects = {{.name = "position", .bytes = std::to_string(100 * rank)}};
    ASSERT_TRUE(job->Save(1, state).ok());
  });
  ++launch_;
  ForAllRanks(3, [&](uint32_t rank) {
    const std::unique_ptr<Job> job = Open(rank, 3);
    Parts parts = PartsOf(wanted, rank, 3);
    State state = StateOf(parts);
    const auto restored = job->Restore(state, {.deadline = kDeadline});
    ASSERT_TRUE(restored.ok()) << restored.status().message();
    EXPECT_EQ(restored->resharded_from, 3u);
    EXPECT_THAT(std::vector(parts[1]->bytes.begin(), parts[1]->bytes.begin() + 40),
                Each(static_cast<std::byte>(rank)));
    ASSERT_EQ(state.objects.size(), 1u);
    EXPECT_EQ(state.objects[0].bytes, std::to_string(100 * rank));
    parts.pop_back();
    EXPECT_EQ(Differs(wanted, parts, 1), "");
  });
}

// All fall back from a step that one of them had put together: what they say is of the step that
// they have in the end.
TEST_F(MemoryAloneReshardTest, WhatWasPutTogetherInAnEarlierRoundIsNotToldOfTheLast) {
  const Model model{{{"w", Type::kF32, {64, 1000}}}, {Split::kRows}};
  Save(model, 3, 1);
  Save(model, 2, 2);
  ASSERT_NO_FATAL_FAILURE(DamageMemoryCopy(1, 2));
  ExpectAllOk(Load(model, 3, 1), 0);
}

// ---- The daemon ----

TEST_F(ReshardTest, TheDaemonIsStartedAnewInTheMiddle) {
  const Model model = SmallModel();
  Save(model, 2, 4);
  ++launch_;
  const std::unique_ptr<Job> job = Open(0, 1);
  Parts parts = PartsOf(model, 0, 1);
  int asked = 0;
  const auto restored = job->Restore(
      [&](const Saved& saved) -> Result<State> {
        EXPECT_EQ(saved.saved_by, 2u);
        if (++asked == 1) {
          node_.Kill();
          EXPECT_TRUE(node_.Start());
        }
        return StateOf(parts);
      },
      {.deadline = kDeadline});
  ASSERT_TRUE(restored.ok()) << restored.status().message();
  EXPECT_EQ(asked, 2);
  EXPECT_EQ(Differs(model, parts, 4), "");
}

// It is told by the thread that restores, and says what is so.
TEST_F(ReshardTest, HowFarItIsIsTold) {
  const Model model{{{"w", Type::kF32, {4000, 2000}}}, {Split::kRows}};
  const uint64_t bytes = model.wholes[0].elements() * 4;
  Save(model, 2, 7);
  for (const uint32_t ranks : {2U, 1U}) {  // each its own, and put together
    std::mutex mutex;
    std::map<std::thread::id, std::vector<RestoreProgress>> told;
    RestoreOptions options;
    options.progress = [&](const RestoreProgress& now) {
      const std::lock_guard lock(mutex);
      told[std::this_thread::get_id()].push_back(now);
      return true;
    };
    ExpectAllOk(Load(model, ranks, 7, options), ranks == 1 ? 2 : 0);
    ASSERT_EQ(told.size(), ranks);
    for (const auto& [thread, all] : told) {
      EXPECT_TRUE(std::any_of(all.begin(), all.end(),
                              [&](const RestoreProgress& now) {
                                return now.step == 7 && now.attempt == 1 &&
                                       now.bytes_of >= bytes / ranks && now.bytes == now.bytes_of;
                              }))
          << all.back().bytes << " of " << all.back().bytes_of;
      for (size_t i = 1; i < all.size(); ++i) {
        EXPECT_LE(all[i - 1].bytes, all[i].bytes);
        EXPECT_LE(all[i].bytes, all[i].bytes_of);
      }
    }
  }
}

TEST_F(ReshardTest, WhoIsToldHowFarItIsMayEndIt) {
  const Model model = SmallModel();
  Save(model, 2, 7);
  RestoreOptions options;
  std::atomic<bool> goes_on = false;
  options.progress = [&](const RestoreProgress&) { return goes_on.load(); };
  ++launch_;
  const std::unique_ptr<Job> job = Open(0, 1);
  Parts parts = PartsOf(model, 0, 1);
  State state = StateOf(parts);
  const Outcome ended = job->Restore(state, options);
  EXPECT_EQ(ended.status().code(), Code::kDeadlineExceeded) << ended.status().message();
  goes_on = true;
  const Outcome restored = job->Restore(state, options);
  ASSERT_TRUE(restored.ok()) << restored.status().message();
  EXPECT_EQ(restored->step, 7u);
  EXPECT_EQ(Differs(model, parts, 7), "");
}

// For longer than it is waited for when a shard is let go of.
TEST_F(MemoryAloneReshardTest, ADaemonThatStandsStillForAWhileIsWaitedFor) {
  const Model model{{{"w", Type::kF32, {4000, 1000}}}, {Split::kRows}};
  Save(model, 4, 1);
  ++launch_;
  const std::unique_ptr<Job> job = Open(0, 1);
  Parts parts = PartsOf(model, 0, 1);
  State state = StateOf(parts);
  constexpr int kLooksOfTwoSeconds = 40;
  int looks = 0;
  RestoreOptions options{.deadline = kDeadline};
  options.progress = [&](const RestoreProgress& now) {
    const bool amid = now.loading && now.bytes > 0 && now.bytes < now.bytes_of;
    if (looks == 0 && amid) {
      ::kill(node_.pid(), SIGSTOP);
    }
    looks += looks > 0 || amid ? 1 : 0;
    if (looks == kLooksOfTwoSeconds) {
      ::kill(node_.pid(), SIGCONT);
    }
    return true;
  };
  const Outcome restored = job->Restore(state, options);
  ::kill(node_.pid(), SIGCONT);
  EXPECT_GE(looks, kLooksOfTwoSeconds);
  ASSERT_TRUE(restored.ok()) << restored.status().message();
  EXPECT_EQ(Differs(model, parts, 1), "");
}

TEST_F(MemoryAloneReshardTest, NothingIsHeldAfterwards) {
  const Model model = SmallModel();
  Save(model, 4, 10);
  for (int i = 0; i < 3; ++i) {
    ExpectAllOk(Load(model, 3, 10), 4);
  }
  ASSERT_EQ(node_.Remove("elastic"), "");
  EXPECT_TRUE(node_.Until([&](const v1::GetStatusReply&) {
    return FilesIn(node_.memory_dir(), "slot-").empty();
  })) << "somebody still reads them";
}

// ---- ckptctl plan ----

TEST_F(ReshardTest, APlanSaysWhatWouldBeReadOfWhom) {
  const Model model = SmallModel();
  Save(model, 4, 10, {}, {Stage::kRemote});
  const TemporaryDirectory dir;
  const auto plan = [&](const std::string& text) {
    WriteText(dir.Path("new.yaml"), text);
    return Ctl(node_, {"plan", "elastic", "--layout", dir.Path("new.yaml"), "--json"});
  };
  const CtlAnswer three = plan(
      "mesh: [{name: dp, ranks: 3}]\n"
      "rules:\n"
      "  - {tensors: embedding, splits: [{axis: dp, dimension: 0}]}\n"
      "  - {tensors: \"optimizer.*\", flat: dp}\n"
      "  - {tensors: \"layers.0.w\", left_out: true}\n"
      "  - {tensors: nothing}\n");
  ASSERT_EQ(three.exit_code, 0) << three.text << three.errors;
  EXPECT_EQ(three.parsed["step"], 10);
  EXPECT_EQ(three.parsed["saved_by"], 4);
  EXPECT_EQ(three.parsed["ranks"], 3);
  // embedding and optimizer once, the bias and the scale by each rank.
  EXPECT_EQ(three.parsed["wanted_bytes"], 2 * 230 * 4 + 3 * (7 * 4 + 8));
  EXPECT_GE(three.parsed["read_bytes"], three.parsed["wanted_bytes"]);
  EXPECT_EQ(three.parsed["read_bytes_by_tier"].size(), 1u);
  EXPECT_EQ(three.parsed["read_bytes_by_tier"]["memory"], three.parsed["read_bytes"]);
  EXPECT_EQ(three.parsed["not_wanted"], nlohmann::json({"layers.0.w"}));
  EXPECT_EQ(three.parsed["unused_rules"], nlohmann::json({"nothing"}));
  EXPECT_TRUE(three.parsed["problems"].empty());
  const auto timed = [&](const char* rate) {
    return Ctl(node_, {"plan", "elastic", "--layout", dir.Path("new.yaml"), "--json",
                       "--ranks-per-node", "1", "--rate", "memory=1MB/s", "--rate", rate})
        .parsed["estimate"];
  };
  // At worst all of it leaves this node, at 1000 bytes a second: a byte a millisecond.
  EXPECT_EQ(timed("network=1kB/s")["far"]["total_ms"], three.parsed["read_bytes"]);
  EXPECT_EQ(timed("network=1kB/s")["nodes"], 3);
  // What cannot be, by name.
  const CtlAnswer other = plan("rules: [{tensors: scale, dtype: F32}]\n");
  EXPECT_EQ(other.exit_code, 1) << other.text << other.errors;
  EXPECT_EQ(other.parsed["problems"][0]["tensor"], "scale");
  EXPECT_THAT(plan("mesh: [{name: a}]\n").errors, HasSubstr("new.yaml"));
  // Without memory it is the drives', or remote's.
  ASSERT_NO_FATAL_FAILURE(PowerCut());
  EmptyDrives();
  ASSERT_TRUE(node_.Start());
  const CtlAnswer far = plan("");
  ASSERT_EQ(far.exit_code, 0) << far.text << far.errors;
  EXPECT_EQ(far.parsed["read_bytes_by_tier"]["remote"], far.parsed["read_bytes"]);
  EXPECT_EQ(timed("remote=1kB/s")["near"]["remote_ms"], far.parsed["read_bytes"]);
  const CtlAnswer text =
      Ctl(node_, {"plan", "elastic", "--layout", dir.Path("new.yaml"), "--step", "10"});
  EXPECT_THAT(text.text, AllOf(HasSubstr("saved by 4 ranks"), HasSubstr("read from"),
                               HasSubstr("may take"), HasSubstr("assumed")));
}

// ---- Devices ----

TEST_F(ReshardTest, IntoTensorsOnDevices) {
  const auto driver = std::make_shared<FakeDriver>(7);
  client::SetDeviceDriverForTesting(driver);
  // Of several staging groups, one of them larger than a group may be.
  const Model model{{{"large", Type::kF32, {1537, 1023}}, {"small", Type::kBF16, {77}}},
                    {Split::kColumns, Split::kFlat}};
  Save(model, 3, 1);
  ++launch_;
  {
    const std::unique_ptr<Job> job = Open(0, 1);
    Parts parts = PartsOf(model, 0, 1);
    State state = StateOf(parts);
    driver->Run();
    for (size_t i = 0; i < parts.size(); ++i) {
      const size_t bytes = parts[i]->elements.size() * TypeBytes(parts[i]->tensor.type);
      state.tensors[i].device = static_cast<int32_t>(i);
      state.tensors[i].data = driver->Allocate(static_cast<int32_t>(i), bytes);
    }
    const auto restored = job->Restore(state, {.deadline = kDeadline});
    ASSERT_TRUE(restored.ok()) << restored.status().message();
    for (size_t i = 0; i < parts.size(); ++i) {
      std::memcpy(parts[i]->bytes.data(), state.tensors[i].data, parts[i]->bytes.size() - 1);
      driver->Free(static_cast<uint8_t*>(state.tensors[i].data));
    }
    EXPECT_EQ(Differs(model, parts, 1), "");
  }
  EXPECT_EQ(driver->Misuse(), "");
  client::SetDeviceDriverForTesting(nullptr);
  EXPECT_EQ(driver->Leaks(), "");
}

}  // namespace
}  // namespace holdfast
