// Jobs that come back on another number of ranks where their shards lie in other nodes' memory, or
// on their drives: several ckptds, real libfabric, compared with a reference element by element.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "tests/integration/peers_world.h"

namespace holdfast {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::SizeIs;

class PeersReshardTest : public PeersTest {};

constexpr Milliseconds kDeadline = kPeersDeadline;

// By system calls, of files and pipes; sockets do not count.
uint64_t BytesReadBy(const Node& node) {
  std::ifstream io("/proc/" + std::to_string(node.pid()) + "/io");
  std::string word;
  uint64_t bytes = 0;
  while (io >> word && word != "rchar:") {
  }
  io >> bytes;
  return bytes;
}
uint64_t BytesOf(const Model& model) {
  uint64_t bytes = 0;
  for (const Whole& whole : model.wholes) {
    bytes += whole.elements() * TypeBytes(whole.type);
  }
  return bytes;
}
size_t ThreadsOf(const Node& node) {
  const auto tasks =
      std::filesystem::directory_iterator("/proc/" + std::to_string(node.pid()) + "/task");
  return static_cast<size_t>(std::distance(begin(tasks), end(tasks)));
}
size_t DescriptorsOf(const Node& node) {
  const auto open =
      std::filesystem::directory_iterator("/proc/" + std::to_string(node.pid()) + "/fd");
  return static_cast<size_t>(std::distance(begin(open), end(open)));
}

TEST_F(PeersReshardTest, FromOtherNodesMemory) {
  ASSERT_NO_FATAL_FAILURE(StartNodes());
  const Model model = SmallModel();
  Save(model, 4, 10);
  for (const uint32_t ranks : {3U, 1U, 5U, 2U}) {
    const auto all = Load(model, ranks, 10);
    ExpectAllOk(all, 4);
    EXPECT_TRUE(std::any_of(all.begin(), all.end(), [](const Outcome& each) {
      return each->source == "peer" && each->why.find(" from peer") != std::string::npos;
    })) << all[0]->why;
  }
}

TEST_F(PeersReshardTest, WhateverTheLayoutsAre) {
  ASSERT_NO_FATAL_FAILURE(StartNodes());
  std::mt19937_64 random(20261126);
  const auto below = [&](uint64_t n) { return random() % n; };
  for (uint64_t round = 1; round <= 10; ++round) {
    Model model = RandomModel(random);
    Save(model, static_cast<uint32_t>(1 + below(4)), round);
    for (Split& split : model.splits) {
      split = below(2) == 0 ? split : static_cast<Split>(below(4));
    }
    for (const auto& restored : Load(model, static_cast<uint32_t>(1 + below(5)), round)) {
      ASSERT_TRUE(restored.ok()) << "round " << round << ": " << restored.status().message();
    }
  }
}

// Shards that are larger than the memory that parts of them come through.
Model LargeModel() {
  return {{{"w", Type::kF32, {4099, 3001}}, {"m", Type::kBF16, {9'000'001}}, {"s", Type::kI64, {}}},
          {Split::kColumns, Split::kFlat, Split::kReplicated}};
}

TEST_F(PeersReshardTest, ShardsOfManyBlocks) {
  ASSERT_NO_FATAL_FAILURE(StartNodes());
  Model model = LargeModel();
  Save(model, 2, 1);
  ExpectAllOk(Load(model, 3, 1), 2);
  model.splits = {Split::kRows, Split::kReplicated, Split::kReplicated};
  ExpectAllOk(Load(model, 3, 1), 2);
}

TEST_F(PeersReshardTest, WithoutAFabric) {
  ASSERT_NO_FATAL_FAILURE(StartNodes({.fabric = "off"}));
  const Model model = LargeModel();
  Save(model, 2, 1);
  ExpectAllOk(Load(model, 3, 1), 2);
}

// As many ranks that find in their own shards not what they want go on by themselves.
TEST_F(PeersReshardTest, AsManyRanksInAnotherLayout) {
  ASSERT_NO_FATAL_FAILURE(StartNodes());
  Model model = SmallModel();
  Save(model, 2, 7);
  model.splits = {Split::kFlat,    Split::kReplicated, Split::kRows,
                  Split::kColumns, Split::kReplicated, Split::kReplicated};
  ExpectAllOk(Load(model, 2, 7), 2);
}

TEST_F(PeersReshardTest, ObjectsThatLieElsewhere) {
  ASSERT_NO_FATAL_FAILURE(StartNodes());
  const Model model = SmallModel();
  std::string large(20 << 20, '\0');  // more than the memory for parts
  for (size_t i = 0; i < large.size(); ++i) {
    large[i] = static_cast<char>(i * 31 >> 3);
  }
  Save(model, 2, 1,
       {{.name = "of_rank", .json = false, .codec = "text"},
        {.name = "large", .bytes = large, .json = false, .codec = "x"}});
  ++launch_;
  const std::unique_ptr<Job> job = OpenRank(Of(0, 1));
  State state = StateOf({});
  state.objects = {{.name = "of_rank", .json = false, .codec = "text"},
                   {.name = "large", .json = false, .codec = "x"}};
  RestoreOptions options{.deadline = kDeadline};
  options.merge = [](const std::string&, const std::vector<SavedObject>& saved) {
    std::string all;
    for (const SavedObject& each : saved) {
      all += each.object.bytes + ";";
    }
    return Result<std::string>(all);
  };
  const auto restored = job->Restore(state, options);
  ASSERT_TRUE(restored.ok()) << restored.status().message();
  EXPECT_EQ(state.objects[0].bytes, "0;1;");
  EXPECT_TRUE(state.objects[1].bytes == large);
}

TEST_F(PeersReshardTest, FromOtherNodesDrives) {
  ASSERT_NO_FATAL_FAILURE(StartNodes({.drives = 1}));
  const Model model = LargeModel();
  Save(model, 2, 3, {}, {Stage::kNvme});
  ASSERT_NO_FATAL_FAILURE(PowerCut());
  const auto all = Load(model, 3, 3);
  ExpectAllOk(all, 2);
  EXPECT_TRUE(std::any_of(all.begin(), all.end(), [](const Outcome& each) {
    return each->why.find(" from nvme") != std::string::npos &&
           each->why.find(" from peer") != std::string::npos;
  })) << all[1]->why;
}

TEST_F(PeersReshardTest, ANodeIsGoneInTheMiddle) {
  places_ = {0, 1, 2};
  ASSERT_NO_FATAL_FAILURE(StartNodes({.nodes = 3, .replicas = 1}));
  const Model model = LargeModel();
  Save(model, 3, 1, {}, {Stage::kPeer});
  places_ = {0, 1};
  ExpectAllOk(Load(model, 2, 1, [&] { nodes_[2]->Kill(); }), 3);
}

// Three ranks have saved step 1 on the first three of four nodes; rank 2's shard, on n3, lies in
// the memory of others, too.
class DamagedReplicasTest : public PeersReshardTest {
 protected:
  void SaveWith(uint32_t replicas) {
    places_ = {0, 1, 2};
    ASSERT_NO_FATAL_FAILURE(StartNodes({.nodes = 4, .replicas = replicas}));
    Save(model_, 3, 1, {}, {Stage::kPeer});
    const CtlAnswer where = Ctl(*nodes_[0], {"where", "elastic", "--step", "1", "--json"});
    ASSERT_EQ(where.exit_code, 0) << where.errors;
    std::set<size_t> without = {0, 1, 3};
    for (const auto& copy : where.parsed["copies"]) {
      const std::string node = copy["node"];
      if (copy["rank"] == 2 && node != "n3") {
        replicas_.push_back(static_cast<size_t>(node[1] - '1'));
        without.erase(replicas_.back());
      }
    }
    ASSERT_THAT(replicas_, SizeIs(replicas)) << where.text;
    places_ = {*without.begin()};  // of the reader's own node nothing is asked
  }
  // (Its directory may be changing while it is looked through.)
  bool IsDamaged(size_t node) {
    return nodes_[0]->Until([&](const v1::GetStatusReply&) { return Damage(node, 2, 1).empty(); });
  }
  const Model model_{{{"w", Type::kF32, {2003, 3001}}}, {Split::kColumns}};
  std::vector<size_t> replicas_;  // nodes that have one of rank 2's
};

TEST_F(DamagedReplicasTest, ArePassedOverForAnotherNodesCopy) {
  ASSERT_NO_FATAL_FAILURE(SaveWith(2));
  for (const size_t replica : replicas_) {  // those are asked first
    ASSERT_TRUE(IsDamaged(replica));
  }
  ExpectAllOk(Load(model_, 1, 1), 3);
}

// It may as well be the reader that is wrong: nothing is given up for good until somebody has
// looked.
TEST_F(DamagedReplicasTest, WhereAllAreDamagedTheReaderDoubtsItself) {
  ASSERT_NO_FATAL_FAILURE(SaveWith(1));
  ASSERT_TRUE(IsDamaged(replicas_[0]));
  ASSERT_TRUE(IsDamaged(2));
  for (const auto& restored : Load(model_, 1, 1)) {
    EXPECT_EQ(restored.status().code(), Code::kUnavailable) << restored.status().message();
  }
  for (const auto& node : nodes_) {
    static_cast<void>(node->Verify("elastic"));
  }
  for (const auto& restored : Load(model_, 1, 1)) {
    EXPECT_EQ(restored.status().code(), Code::kUnreadable) << restored.status().message();
  }
}

TEST_F(PeersReshardTest, WhatNoNodeHasWholeMakesAllFallBack) {
  ASSERT_NO_FATAL_FAILURE(StartNodes());
  const Model model{{{"w", Type::kF32, {64, 1000}}}, {Split::kRows}};
  Save(model, 2, 1);
  Save(model, 2, 2);
  ASSERT_EQ(Damage(1, 1, 2), "");
  ExpectAllOk(Load(model, 3, 1), 2);
}

// Parts that overlap without being the same, each on another node.
TEST_F(PeersReshardTest, OverlapsAreComparedAcrossNodes) {
  ASSERT_NO_FATAL_FAILURE(StartNodes({.nodes = 3}));
  const Whole whole{"w", Type::kF32, {3000, 1000}};  // 12 MB
  const Model model{{whole}, {Split::kRows}};
  for (const bool differently : {false, true}) {
    ++launch_;
    if (differently) {
      ASSERT_NO_FATAL_FAILURE(RemoveJob());
    }
    places_ = {0, 1};
    ForAllRanks(2, [&](uint32_t rank) {
      Parts parts;
      AddBox(parts, whole, {rank == 0 ? 0U : 1000U, 0}, {2000, 1000});
      Fill(model, parts, 1);
      if (differently && rank == 1) {
        parts[0]->bytes[3'999'999] ^= std::byte{1};  // of row 1999
      }
      const std::unique_ptr<Job> job = OpenRank(Of(rank, 2));
      const Status saved = job->Save(1, StateOf(parts));
      ASSERT_TRUE(saved.ok()) << saved.message();
    });
    places_ = {2};  // both shards lie elsewhere
    const auto all = Load(model, 1, 1);
    if (!differently) {
      ExpectAllOk(all, 2);
      continue;
    }
    EXPECT_EQ(all[0].status().code(), Code::kInvalidArgument);
    EXPECT_THAT(all[0].status().message(), AllOf(HasSubstr("'w'"), HasSubstr("different values")));
  }
}

// Its shard is in remote, too: what was compared by then is compared with that.
TEST_F(PeersReshardTest, ASourceIsGoneWhileWhatOverlapsIsCompared) {
  const TemporaryDirectory remote;
  ASSERT_NO_FATAL_FAILURE(StartNodes({.nodes = 3, .remote_dir = remote.path()}));
  places_ = {2};
  ++launch_;
  OpenRank(Of(0, 1)).reset();  // so the third node hosts the job
  const Whole whole{"w", Type::kF32, {3000, 1000}};
  const Model model{{whole}, {Split::kRows}};
  places_ = {0, 1};
  ++launch_;
  ForAllRanks(2, [&](uint32_t rank) {
    Parts parts;
    AddBox(parts, whole, {rank == 0 ? 0U : 1000U, 0}, {2000, 1000});
    Fill(model, parts, 1);
    const std::unique_ptr<Job> job = OpenRank(Of(rank, 2));
    const Status saved = job->SaveAsync(1, StateOf(parts))->Wait(Stage::kRemote, kDeadline);
    ASSERT_TRUE(saved.ok()) << saved.message();
  });
  places_ = {2};
  ++launch_;
  const std::unique_ptr<Job> job = OpenRank(Of(0, 1));
  Parts parts = PartsOf(model, 0, 1);
  State state = StateOf(parts);
  int seen = 0;
  RestoreOptions options{.deadline = kDeadline};
  options.progress = [&](const RestoreProgress& now) {
    // All has been read: as the one is read to be compared, then the other, then side by side.
    if (now.loading && now.bytes_of > 0 && now.bytes == now.bytes_of && ++seen == 3) {
      nodes_[1]->Kill();
    }
    return true;
  };
  const Outcome restored = job->Restore(state, options);
  ASSERT_TRUE(restored.ok()) << restored.status().message();
  EXPECT_GE(seen, 3);
  EXPECT_EQ(Differs(model, parts, 1), "");
  EXPECT_THAT(restored->why, HasSubstr("peer copy of rank 1 not readable now: "));
}

// ---- From the remote tier ----

TEST_F(PeersReshardTest, EachByteInRemoteIsReadOnceForAll) {
  const TemporaryDirectory remote;
  places_ = {0, 1, 2};
  ASSERT_NO_FATAL_FAILURE(StartNodes({.nodes = 3, .remote_dir = remote.path()}));
  Model model{{{"w", Type::kF32, {4099, 3001}}, {"unwanted", Type::kF32, {5'000'000}}},
              {Split::kRows, Split::kFlat}};
  Save(model, 4, 1, {}, {Stage::kRemote});
  ASSERT_NO_FATAL_FAILURE(PowerCut());
  // Data parallel: all of them want all of it, but for one tensor that nobody wants.
  model.wholes.pop_back();
  model.splits = {Split::kReplicated};
  uint64_t before = 0;
  for (const auto& node : nodes_) {
    before += BytesReadBy(*node);
  }
  const auto all = Load(model, 6, 1);
  ExpectAllOk(all, 4);
  EXPECT_EQ(all[0]->source, "remote");
  uint64_t read = 0;
  for (const auto& node : nodes_) {
    read += BytesReadBy(*node);
  }
  const double ratio = static_cast<double>(read - before) / static_cast<double>(BytesOf(model));
  EXPECT_LT(ratio, 1.1);
  EXPECT_GE(ratio, 1.0) << "they were read in a way that is not counted";
}

TEST_F(PeersReshardTest, WhoReadsForAllIsGoneInTheMiddle) {
  const TemporaryDirectory remote;
  places_ = {0, 1, 2};
  ASSERT_NO_FATAL_FAILURE(StartNodes({.nodes = 3, .remote_dir = remote.path()}));
  Model model = LargeModel();
  Save(model, 3, 1, {}, {Stage::kRemote});
  ASSERT_NO_FATAL_FAILURE(PowerCut());
  model.splits = {Split::kReplicated, Split::kReplicated, Split::kReplicated};
  places_ = {0, 1};  // of three nodes two have ranks, each reads for both
  ExpectAllOk(Load(model, 2, 1), 3);
  // It dies when it is asked for the first bytes: the files are read by those who want them.
  nodes_[1]->Kill();
  ASSERT_TRUE(nodes_[1]->Start("daemon.pull.remote_parts:kill"));
  ASSERT_NO_FATAL_FAILURE(AwaitMembers(*nodes_[0], 3));
  places_ = {0, 2};
  ExpectAllOk(Load(model, 2, 1), 3);
}

TEST_F(PeersReshardTest, ADamagedFileInRemoteIsFound) {
  const TemporaryDirectory remote;
  ASSERT_NO_FATAL_FAILURE(StartNodes({.remote_dir = remote.path()}));
  const Model model{{{"w", Type::kF32, {2003, 1001}}}, {Split::kRows}};
  Save(model, 2, 1, {}, {Stage::kRemote});
  Save(model, 2, 2, {}, {Stage::kRemote});
  ASSERT_NO_FATAL_FAILURE(PowerCut());
  for (const auto& entry : std::filesystem::recursive_directory_iterator(remote.path())) {
    if (entry.path().filename() == "shard-00001-of-00002.safetensors" &&
        entry.path().parent_path().filename().string().starts_with("2-")) {
      std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
      file.seekp(-5, std::ios::end);
      file.put('x');
    }
  }
  ExpectAllOk(Load(model, 3, 1), 2);
}

TEST_F(PeersReshardTest, NothingIsLeftBehind) {
  ASSERT_NO_FATAL_FAILURE(StartNodes());
  const Model model = SmallModel();
  Save(model, 4, 10);
  ExpectAllOk(Load(model, 3, 10), 4);
  const size_t threads = ThreadsOf(*nodes_[0]);
  const size_t descriptors = DescriptorsOf(*nodes_[0]);
  for (int i = 0; i < 4; ++i) {
    ExpectAllOk(Load(model, 3, 10), 4);
  }
  // (Each of these loads opens more than that; gRPC keeps some threads.)
  EXPECT_TRUE(nodes_[0]->Until([&](const v1::GetStatusReply&) {
    return ThreadsOf(*nodes_[0]) <= threads + 16 && DescriptorsOf(*nodes_[0]) <= descriptors + 16;
  })) << threads
      << " threads, " << descriptors << " descriptors; now " << ThreadsOf(*nodes_[0]) << ", "
      << DescriptorsOf(*nodes_[0]);
  ASSERT_NO_FATAL_FAILURE(RemoveJob());
  for (const auto& node : nodes_) {
    EXPECT_TRUE(node->Until([&](const v1::GetStatusReply&) {
      return FilesIn(node->memory_dir(), "slot-").empty();
    })) << "somebody still reads them";
  }
}

}  // namespace
}  // namespace holdfast
