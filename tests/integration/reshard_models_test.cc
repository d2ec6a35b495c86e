// Jobs of two real models that come back on other meshes, against a real ckptd: their structure and
// their parallel splits as they are, their sizes divided until all ranks fit into one process.
// Compared element by element with what a reference says of the whole tensors.
//
//                      as it is                              here
//   Llama-3 405B       126 layers, first and last stage      14 layers over 4 stages:
//                      of 16 have one less than the others   3, 4, 4, 3
//   718B of experts    61 layers over 16 stages, the last    15 layers over 4 stages:
//                      with 1; 3 of them dense; 256 routed   4, 4, 4, 3; 1 dense;
//                      experts, 1 shared                     24 routed experts, 1 shared
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "holdfast/holdfast.h"
#include "tests/integration/split_model.h"
#include "tests/integration/tier_fixture.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;

constexpr Milliseconds kDeadline{60'000};

// ---- How ranks are laid out ----

// Tensor-parallel ranks are neighbours, pipeline stages the farthest apart, as Megatron has them.
// Data-parallel ranks share the experts among them, in groups of `expert`.
struct Mesh {
  uint32_t tensor = 1;
  uint32_t pipeline = 1;
  uint32_t data = 1;
  uint32_t expert = 1;
  uint32_t ranks() const { return tensor * pipeline * data; }
};

struct Place {
  uint32_t tensor = 0;
  uint32_t data = 0;
  uint32_t stage = 0;
};
Place PlaceOf(const Mesh& mesh, uint32_t rank) {
  return {rank % mesh.tensor, rank / mesh.tensor % mesh.data, rank / mesh.tensor / mesh.data};
}

// ---- What models are made of ----

constexpr int kReplicated = -1;  // every tensor-parallel rank has all of it
constexpr int kColumn = 0;       // outputs are split, or the vocabulary
constexpr int kRow = 1;          // inputs are split

struct Parameter {
  Whole whole;
  int split = kReplicated;
  uint32_t layer = 0;     // which pipeline stage has it follows from that
  int expert = -1;        // which expert-parallel rank has it; -1: it is no expert's
  uint64_t matrices = 1;  // lie one behind the other, and each is split (gate and up in one tensor)
  bool trained = true;    // the optimizer has states of it
};

struct RealModel {
  uint32_t layers = 0;
  uint32_t lighter = 0;  // how many layers the first and the last stage have less than the others
  uint32_t experts = 0;
  std::vector<Parameter> parameters;

  uint32_t StageOf(uint32_t layer, uint32_t stages) const {
    const uint32_t each = (layers + 2 * lighter + stages - 1) / stages;
    return (layer + lighter) / each;
  }
  void Add(const std::string& name, std::vector<uint64_t> shape, int split, uint32_t layer) {
    parameters.push_back({{name, Type::kBF16, std::move(shape)}, split, layer});
  }
  // The two matrices of a gated unit in one tensor, and the one behind them.
  void AddGated(const std::string& prefix, uint64_t inner, uint64_t hidden, uint32_t layer,
                int expert = -1) {
    parameters.push_back({{prefix + "linear_fc1.weight", Type::kBF16, {2 * inner, hidden}},
                          kColumn,
                          layer,
                          expert,
                          2});
    parameters.push_back(
        {{prefix + "linear_fc2.weight", Type::kBF16, {hidden, inner}}, kRow, layer, expert});
  }
};

std::string LayerPrefix(uint32_t layer) {
  return "decoder.layers." + std::to_string(layer) + ".";
}

// The vocabulary does not come out even on any mesh.
void AddEnds(RealModel& model, uint64_t words, uint64_t hidden) {
  const uint32_t last = model.layers - 1;
  model.Add("embedding.word_embeddings.weight", {words, hidden}, kColumn, 0);
  model.Add("decoder.final_layernorm.weight", {hidden}, kReplicated, last);
  model.Add("output_layer.weight", {words, hidden}, kColumn, last);
}

// 24 heads of 3 in 8 groups of queries; the gated weight as two tensors, as holdfast.layouts has
// it.
RealModel LlamaLike() {
  constexpr uint64_t kHidden = 72;
  constexpr uint64_t kFeedForward = 232;
  constexpr uint64_t kQueriesKeysValues = (24 + 8 + 8) * 3;
  RealModel model{.layers = 14, .lighter = 1};
  for (uint32_t layer = 0; layer < model.layers; ++layer) {
    const std::string prefix = LayerPrefix(layer);
    const auto add = [&](const char* name, std::vector<uint64_t> shape, int split) {
      model.Add(prefix + name, std::move(shape), split, layer);
    };
    add("input_layernorm.weight", {kHidden}, kReplicated);
    add("self_attention.linear_qkv.weight", {kQueriesKeysValues, kHidden}, kColumn);
    add("self_attention.linear_proj.weight", {kHidden, kHidden}, kRow);
    add("pre_mlp_layernorm.weight", {kHidden}, kReplicated);
    add("mlp.linear_fc1.weight.0", {kFeedForward, kHidden}, kColumn);
    add("mlp.linear_fc1.weight.1", {kFeedForward, kHidden}, kColumn);
    add("mlp.linear_fc2.weight", {kHidden, kFeedForward}, kRow);
  }
  AddEnds(model, 501, kHidden);
  return model;
}

constexpr uint64_t kMoeHidden = 60;
constexpr uint64_t kExpertInner = 14;

// Attention with latent queries, keys and values: what makes them is the same in all
// tensor-parallel ranks, what comes after is split by heads.
void AddLatentAttention(RealModel& model, uint32_t layer) {
  constexpr uint64_t kHeads = 8;
  constexpr uint64_t kLatentQueries = 24;
  constexpr uint64_t kLatentKeys = 9;
  constexpr uint64_t kRotated = 2;
  const auto add = [&](const char* name, std::vector<uint64_t> shape, int split) {
    model.Add(LayerPrefix(layer) + "self_attention." + name, std::move(shape), split, layer);
  };
  add("linear_q_down_proj.weight", {kLatentQueries, kMoeHidden}, kReplicated);
  add("q_layernorm.weight", {kLatentQueries}, kReplicated);
  add("linear_q_up_proj.weight", {kHeads * (5 + kRotated), kLatentQueries}, kColumn);
  add("linear_kv_down_proj.weight", {kLatentKeys + kRotated, kMoeHidden}, kReplicated);
  add("kv_layernorm.weight", {kLatentKeys}, kReplicated);
  add("linear_kv_up_proj.weight", {kHeads * (5 + 5), kLatentKeys}, kColumn);
  add("linear_proj.weight", {kMoeHidden, kHeads * 5}, kRow);
}

void AddExperts(RealModel& model, uint32_t layer) {
  const std::string prefix = LayerPrefix(layer) + "mlp.";
  // Routers are kept in F32; the bias balances the load, and no optimizer knows of it.
  model.parameters.push_back(
      {{prefix + "router.weight", Type::kF32, {model.experts, kMoeHidden}}, kReplicated, layer});
  model.parameters.push_back({.whole = {prefix + "router.expert_bias", Type::kF32, {model.experts}},
                              .layer = layer,
                              .trained = false});
  model.AddGated(prefix + "shared_experts.", kExpertInner, kMoeHidden, layer);
  for (uint32_t expert = 0; expert < model.experts; ++expert) {
    model.AddGated(prefix + "experts." + std::to_string(expert) + ".", kExpertInner, kMoeHidden,
                   layer, static_cast<int>(expert));
  }
}

RealModel MoeLike() {
  constexpr uint32_t kDense = 1;
  RealModel model{.layers = 15, .experts = 24};
  for (uint32_t layer = 0; layer < model.layers; ++layer) {
    model.Add(LayerPrefix(layer) + "input_layernorm.weight", {kMoeHidden}, kReplicated, layer);
    AddLatentAttention(model, layer);
    model.Add(LayerPrefix(layer) + "pre_mlp_layernorm.weight", {kMoeHidden}, kReplicated, layer);
    if (layer < kDense) {
      model.AddGated(LayerPrefix(layer) + "mlp.", 144, kMoeHidden, layer);
    } else {
      AddExperts(model, layer);
    }
  }
  AddEnds(model, 307, kMoeHidden);
  return model;
}

// ---- What one rank has of a model ----

struct BoxAt {
  std::vector<uint64_t> offset;
  std::vector<uint64_t> extent;
  uint64_t elements() const {
    return std::accumulate(extent.begin(), extent.end(), uint64_t{1}, std::multiplies<>());
  }
};

// Of the tensor-parallel rank, in the order in which they lie in its memory.
std::vector<BoxAt> LocalBoxes(const Parameter& parameter, uint32_t rank, uint32_t ranks) {
  const std::vector<uint64_t>& shape = parameter.whole.shape;
  const BoxAt all{std::vector<uint64_t>(shape.size(), 0), shape};
  if (parameter.split == kReplicated) {
    return {all};
  }
  const auto axis = static_cast<size_t>(parameter.split);
  const uint64_t matrix = shape[axis] / parameter.matrices;
  const auto [begin, end] = Share(matrix, rank, ranks);
  std::vector<BoxAt> boxes(parameter.matrices, all);
  for (uint64_t i = 0; i < parameter.matrices; ++i) {
    boxes[i].offset[axis] = i * matrix + begin;
    boxes[i].extent[axis] = end - begin;
  }
  return boxes;
}

// What a rank saves or wants, and the whole tensors of which that is part.
struct Own {
  Model model;
  Parts parts;

  const Whole& Knows(const Whole& whole) {
    model.wholes.push_back(whole);
    return model.wholes.back();
  }
};

// Elements of a box, numbered in it row by row: a range of the whole tensor where whole rows are
// split, else up to three boxes.
void AddRangeOfBox(Parts& parts, const Whole& whole, const BoxAt& box, uint64_t first,
                   uint64_t last) {
  const uint64_t columns = box.extent.back();
  const bool whole_rows = box.extent.size() == 1 || columns == whole.shape.back();
  if (whole_rows) {
    const uint64_t before = box.offset[0] * (box.extent.size() == 1 ? 1 : columns);
    AddFlat(parts, whole, before + first, last - first);
    return;
  }
  while (first < last) {
    const uint64_t column = first % columns;
    const uint64_t rows = column == 0 ? std::max<uint64_t>((last - first) / columns, 1) : 1;
    const uint64_t width = std::min(columns - column, last - first);
    AddBox(parts, whole, {box.offset[0] + first / columns, box.offset[1] + column}, {rows, width});
    first += rows * width;
  }
}

constexpr const char* kStates[] = {"param", "exp_avg", "exp_avg_sq"};

Whole OptimizerState(const Whole& of, const std::string& state) {
  return {"optimizer." + state + "." + of.name, Type::kF32, of.shape};
}

// The distributed optimizer: what tensor-parallel ranks have of these parameters is laid end to end
// and cut into as many ranges as there are ranks that have it, wherever that falls.
void AddOptimizer(Own& own, const std::vector<const Parameter*>& parameters, const Mesh& mesh,
                  uint32_t tensor, uint32_t rank, uint32_t ranks) {
  std::vector<std::pair<const Parameter*, BoxAt>> laid;
  uint64_t elements = 0;
  for (const Parameter* parameter : parameters) {
    for (BoxAt& box : LocalBoxes(*parameter, tensor, mesh.tensor)) {
      elements += box.elements();
      laid.emplace_back(parameter, std::move(box));
    }
  }
  const auto [begin, end] = Share(elements, rank, ranks);
  for (const char* state : kStates) {
    uint64_t at = 0;
    for (const auto& [parameter, box] : laid) {
      const uint64_t behind = at + box.elements();
      if (std::max(at, begin) < std::min(behind, end)) {
        const Whole& whole = own.Knows(OptimizerState(parameter->whole, state));
        AddRangeOfBox(own.parts, whole, box, std::max(at, begin) - at, std::min(behind, end) - at);
      }
      at = behind;
    }
  }
}

enum class Wanted { kAll, kWeights };

bool Has(const RealModel& model, const Mesh& mesh, const Place& place, const Parameter& parameter) {
  if (model.StageOf(parameter.layer, mesh.pipeline) != place.stage) {
    return false;
  }
  return parameter.expert < 0 ||
         static_cast<uint32_t>(parameter.expert) * mesh.expert / model.experts ==
             place.data % mesh.expert;
}

Own OwnOf(const RealModel& model, const Mesh& mesh, uint32_t rank, Wanted wanted = Wanted::kAll) {
  const Place place = PlaceOf(mesh, rank);
  Own own;
  std::vector<const Parameter*> dense;
  std::vector<const Parameter*> experts;
  for (const Parameter& parameter : model.parameters) {
    if (!Has(model, mesh, place, parameter)) {
      continue;
    }
    const Whole& whole = own.Knows(parameter.whole);
    for (const BoxAt& box : LocalBoxes(parameter, place.tensor, mesh.tensor)) {
      AddBox(own.parts, whole, box.offset, box.extent);
    }
    if (parameter.trained) {
      (parameter.expert < 0 ? dense : experts).push_back(&parameter);
    }
  }
  if (wanted == Wanted::kAll) {
    AddOptimizer(own, dense, mesh, place.tensor, place.data, mesh.data);
    AddOptimizer(own, experts, mesh, place.tensor, place.data / mesh.expert,
                 mesh.data / mesh.expert);
  }
  return own;
}

// All of it as whole tensors, whatever the meshes above make of it.
Own WholeModel(const RealModel& model) {
  Own own;
  for (const Parameter& parameter : model.parameters) {
    AddWhole(own.parts, own.Knows(parameter.whole));
    for (const char* state : kStates) {
      if (parameter.trained) {
        AddWhole(own.parts, own.Knows(OptimizerState(parameter.whole, state)));
      }
    }
  }
  return own;
}

uint64_t BytesOf(const Parts& parts) {
  uint64_t bytes = 0;
  for (const auto& held : parts) {
    bytes += held->elements.size() * TypeBytes(held->tensor.type);
  }
  return bytes;
}

// ---- Against a ckptd ----

class ReshardModelsTest : public TierTest {
 protected:
  using OwnOfRank = std::function<Own(uint32_t rank)>;

  void SetUp() override { ASSERT_TRUE(node_.Start()); }
  std::unique_ptr<Job> Open(uint32_t rank, uint32_t ranks) {
    return OpenRank({rank, ranks, launch_, node_.socket()});
  }

  // The first start of a job, which saves a step.
  void Begin(const RealModel& model, const Mesh& mesh, uint64_t step,
             Stage until = Stage::kCommitted) {
    Restart(model, mesh, 0, step, until);
  }
  // Ranks that restore what the last ones have saved (0: nothing is there), compare it, and save
  // another step of it.
  void Restart(const RealModel& model, const Mesh& mesh, uint64_t before, uint64_t step,
               Stage until = Stage::kCommitted) {
    ++launch_;
    ForAllRanks(mesh.ranks(), [&](uint32_t rank) {
      const std::unique_ptr<Job> job = Open(rank, mesh.ranks());
      ASSERT_NE(job, nullptr);
      Own own = OwnOf(model, mesh, rank);
      State state = StateOf(own.parts);
      const Outcome restored = job->Restore(state, {.deadline = kDeadline});
      if (before == 0) {
        ASSERT_EQ(restored.status().code(), Code::kNothingToRestore);
      } else {
        ASSERT_TRUE(restored.ok()) << restored.status().message();
        EXPECT_EQ(restored->step, before);
        EXPECT_EQ(restored->resharded_from, saved_by_);
        ASSERT_EQ(Differs(own.model, own.parts, before), "") << "rank " << rank;
      }
      Fill(own.model, own.parts, step);
      const auto saved = job->SaveAsync(step, state)->Wait(until, kDeadline);
      ASSERT_TRUE(saved.ok()) << saved.message();
    });
    saved_by_ = mesh.ranks();
  }
  // What each of so many ranks got; and that it is what was saved.
  std::vector<Outcome> Load(uint32_t ranks, uint64_t step, const OwnOfRank& wanted) {
    ++launch_;
    std::vector<Outcome> all(ranks, Outcome(Status(Code::kInternal, "")));
    ForAllRanks(ranks, [&](uint32_t rank) {
      const std::unique_ptr<Job> job = Open(rank, ranks);
      ASSERT_NE(job, nullptr);
      Own own = wanted(rank);
      State state = StateOf(own.parts);
      all[rank] = job->Restore(state, {.deadline = kDeadline});
      if (all[rank].ok()) {
        EXPECT_EQ(Differs(own.model, own.parts, step), "") << "rank " << rank << " of " << ranks;
        EXPECT_EQ(all[rank]->step, step);
      }
    });
    return all;
  }
  // As for inference: nothing but weights is wanted.
  void ExpectWeights(const RealModel& model, const Mesh& mesh, uint64_t step,
                     const std::string& source) {
    const auto weights = [&](uint32_t rank) { return OwnOf(model, mesh, rank, Wanted::kWeights); };
    const auto all = Load(mesh.ranks(), step, weights);
    ExpectAllOk(all, saved_by_);
    for (uint32_t rank = 0; rank < mesh.ranks(); ++rank) {
      EXPECT_EQ(all[rank]->bytes, BytesOf(weights(rank).parts));
      EXPECT_EQ(all[rank]->source, source);
    }
  }
  // One that wants all of it: what no mesh's rank had would be missing.
  void ExpectWhole(const RealModel& model, uint64_t step) {
    ExpectAllOk(Load(1, step, [&](uint32_t) { return WholeModel(model); }), saved_by_);
  }
  // The last rank wants one tensor more, which nobody saved: all are refused, and nothing is
  // decided, so that the next start gets the same step.
  void ExpectRefused(const RealModel& model, const Mesh& mesh, uint64_t step,
                     const std::string& like, const std::string& name) {
    const auto good = [&](uint32_t rank) { return OwnOf(model, mesh, rank); };
    const auto all = Load(mesh.ranks(), step, [&](uint32_t rank) {
      Own own = good(rank);
      if (rank == mesh.ranks() - 1) {
        Whole bad = WholeOf(own.model, like);
        bad.name = name;
        AddWhole(own.parts, own.Knows(bad));
      }
      return own;
    });
    for (const Outcome& restored : all) {
      EXPECT_EQ(restored.status().code(), Code::kInvalidArgument);
      EXPECT_THAT(restored.status().message(), HasSubstr("'" + name + "'"));
    }
    ExpectAllOk(Load(mesh.ranks(), step, good), saved_by_);
  }

  int launch_ = 0;
  uint32_t saved_by_ = 0;
};

// How many layers each stage has.
std::vector<uint32_t> Stages(const RealModel& model, uint32_t stages) {
  std::vector<uint32_t> layers(stages, 0);
  for (uint32_t layer = 0; layer < model.layers; ++layer) {
    ++layers.at(model.StageOf(layer, stages));
  }
  return layers;
}

TEST(ReshardModels, StagesAreAsUnevenAsThoseOfTheRealModels) {
  std::vector<uint32_t> llama(16, 8);
  llama.front() = llama.back() = 7;
  EXPECT_EQ(Stages({.layers = 126, .lighter = 1}, 16), llama);
  EXPECT_EQ(Stages(LlamaLike(), 4), (std::vector<uint32_t>{3, 4, 4, 3}));
  EXPECT_EQ(Stages(LlamaLike(), 2), (std::vector<uint32_t>{7, 7}));
  std::vector<uint32_t> experts(16, 4);
  experts.back() = 1;
  EXPECT_EQ(Stages({.layers = 61}, 16), experts);
  EXPECT_EQ(Stages(MoeLike(), 4), (std::vector<uint32_t>{4, 4, 4, 3}));
  EXPECT_EQ(Stages(MoeLike(), 2), (std::vector<uint32_t>{8, 7}));
}

constexpr Mesh kLlamaMesh{.tensor = 4, .pipeline = 4, .data = 2};

TEST_F(ReshardModelsTest, LlamaIsTrainedOnOneMeshAfterTheOther) {
  const RealModel model = LlamaLike();
  Begin(model, kLlamaMesh, 1);
  Restart(model, {.tensor = 2, .pipeline = 2, .data = 3}, 1, 2);
  Restart(model, {.tensor = 8}, 2, 3);
  Restart(model, kLlamaMesh, 3, 4);
  ExpectWhole(model, 4);
}

TEST_F(ReshardModelsTest, ALayerThatLlamaDoesNotHaveIsRefusedByName) {
  const RealModel model = LlamaLike();
  Begin(model, kLlamaMesh, 1);
  ExpectRefused(model, {.tensor = 2, .pipeline = 2, .data = 3}, 1,
                "decoder.layers.13.mlp.linear_fc2.weight",
                "decoder.layers.14.mlp.linear_fc2.weight");
}

constexpr Mesh kMoeMesh{.tensor = 2, .pipeline = 4, .data = 4, .expert = 4};
constexpr Mesh kExpertsMesh{.data = 8, .expert = 8};

// In between on a mesh where several ranks have the same experts, and share their optimizer.
TEST_F(ReshardModelsTest, ExpertsAreTrainedOnOneMeshAfterTheOther) {
  const RealModel model = MoeLike();
  Begin(model, kMoeMesh, 1);
  Restart(model, {.pipeline = 2, .data = 6, .expert = 3}, 1, 2);
  Restart(model, kExpertsMesh, 2, 3);
  Restart(model, kMoeMesh, 3, 4);
  ExpectWhole(model, 4);
}

TEST_F(ReshardModelsTest, ExpertsAreServedWithoutTheOptimizer) {
  const RealModel model = MoeLike();
  Begin(model, kMoeMesh, 1);
  ExpectWeights(model, kExpertsMesh, 1, "memory");
}

// When the memory of the node that trained them is gone.
TEST_F(ReshardModelsTest, ExpertsAreServedFromTheDrives) {
  const RealModel model = MoeLike();
  Begin(model, kMoeMesh, 1, Stage::kNvme);
  ASSERT_NO_FATAL_FAILURE(PowerCut());
  ASSERT_TRUE(node_.Start());
  ExpectWeights(model, kExpertsMesh, 1, "nvme");
}

TEST_F(ReshardModelsTest, AnExpertThatThereIsNotIsRefusedByName) {
  const RealModel model = MoeLike();
  Begin(model, kMoeMesh, 1);
  ExpectRefused(model, kExpertsMesh, 1, "decoder.layers.14.mlp.experts.23.linear_fc2.weight",
                "decoder.layers.14.mlp.experts.24.linear_fc2.weight");
}

}  // namespace
}  // namespace holdfast
