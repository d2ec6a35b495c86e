#include "bench/model_layouts.h"

#include <algorithm>
#include <numeric>

#include "tiers/image/region.h"

namespace holdfast::bench {
namespace {

constexpr const char* kOptimizerStates[] = {"param", "exp_avg", "exp_avg_sq"};

uint64_t Elements(const std::vector<uint64_t>& shape) {
  return std::accumulate(shape.begin(), shape.end(), uint64_t{1}, std::multiplies<>());
}

// What the tensor-parallel rank has of it.
BoxPlace Local(const Parameter& parameter, uint32_t rank, uint32_t ranks) {
  BoxPlace box{std::vector<uint64_t>(parameter.shape.size(), 0), parameter.shape};
  if (parameter.split >= 0) {
    const auto axis = static_cast<size_t>(parameter.split);
    box.shape[axis] /= ranks;
    box.offset[axis] = box.shape[axis] * rank;
  }
  return box;
}

// A range of the local tensor's flattening: boxes of the global one.
void AddStates(const Parameter& parameter, const BoxPlace& local, uint64_t begin, uint64_t end,
               std::vector<Slice>& slices) {
  Slice range;
  range.global_shape = local.shape;
  range.place = FlatPlace{begin, end - begin};
  for (const Region& region : RegionsOf(range)) {
    BoxPlace box;
    for (size_t d = 0; d < region.offset.size(); ++d) {
      box.offset.push_back(local.offset[d] + region.offset[d]);
      box.shape.push_back(region.shape[d]);
    }
    for (const char* state : kOptimizerStates) {
      Slice slice;
      slice.name = std::string("optimizer.") + state + "." + parameter.name;
      slice.dtype = DType::kF32;
      slice.global_shape = parameter.shape;
      slice.place = box;
      slices.push_back(std::move(slice));
    }
  }
}

}  // namespace

Model Llama405B() {
  constexpr uint64_t kHidden = 16384;
  constexpr uint64_t kFeedForward = 53248;
  constexpr uint64_t kKeys = 1024;
  constexpr uint64_t kWords = 128256;
  Model model{126, {}};
  model.parameters.push_back({"model.embed_tokens.weight", {kWords, kHidden}, 0, 0});
  for (uint32_t layer = 0; layer < model.layers; ++layer) {
    const std::string prefix = "model.layers." + std::to_string(layer) + ".";
    const auto add = [&](const char* name, std::vector<uint64_t> shape, int split) {
      model.parameters.push_back({prefix + name, std::move(shape), split, layer});
    };
    add("self_attn.q_proj.weight", {kHidden, kHidden}, 0);
    add("self_attn.k_proj.weight", {kKeys, kHidden}, 0);
    add("self_attn.v_proj.weight", {kKeys, kHidden}, 0);
    add("self_attn.o_proj.weight", {kHidden, kHidden}, 1);
    add("mlp.gate_proj.weight", {kFeedForward, kHidden}, 0);
    add("mlp.up_proj.weight", {kFeedForward, kHidden}, 0);
    add("mlp.down_proj.weight", {kHidden, kFeedForward}, 1);
    add("input_layernorm.weight", {kHidden}, -1);
    add("post_attention_layernorm.weight", {kHidden}, -1);
  }
  model.parameters.push_back({"model.norm.weight", {kHidden}, -1, model.layers - 1});
  model.parameters.push_back({"lm_head.weight", {kWords, kHidden}, 0, model.layers - 1});
  return model;
}

std::vector<Slice> SlicesOf(const Model& model, const Mesh& mesh, Rank rank) {
  const uint32_t tensor = rank % mesh.tensor;
  const uint32_t data = rank / mesh.tensor % mesh.data;
  const uint32_t stage = rank / mesh.tensor / mesh.data;
  std::vector<const Parameter*> own;
  uint64_t elements = 0;
  for (const Parameter& parameter : model.parameters) {
    if (uint64_t{parameter.layer} * mesh.pipeline / model.layers == stage) {
      own.push_back(&parameter);
      elements += Elements(Local(parameter, tensor, mesh.tensor).shape);
    }
  }
  const uint64_t begin = elements * data / mesh.data;
  const uint64_t end = elements * (data + 1) / mesh.data;
  std::vector<Slice> slices;
  uint64_t at = 0;
  for (const Parameter* parameter : own) {
    const BoxPlace local = Local(*parameter, tensor, mesh.tensor);
    Slice slice;
    slice.name = parameter->name;
    slice.dtype = DType::kBF16;
    slice.global_shape = parameter->shape;
    slice.place = local;
    slices.push_back(std::move(slice));
    const uint64_t behind = at + Elements(local.shape);
    if (at < end && begin < behind) {
      AddStates(*parameter, local, std::max(begin, at) - at, std::min(end, behind) - at, slices);
    }
    at = behind;
  }
  return slices;
}

}  // namespace holdfast::bench
