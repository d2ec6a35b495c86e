// Layouts of real models at their true shapes, as a training framework with tensor, pipeline and
// data parallelism and a distributed optimizer saves them. Nothing has bytes.
//
//   const Mesh saved{.tensor = 8, .data = 96, .pipeline = 16};
//   const std::string layout = PlanImage(SlicesOf(Llama405B(), saved, rank), rank)->layout_bytes;
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/ids.h"
#include "tiers/image/layout.h"

namespace holdfast::bench {

// Ranks in the order of Megatron's: tensor parallel ones are neighbours, pipeline stages the
// farthest apart.
struct Mesh {
  uint32_t tensor = 1;
  uint32_t data = 1;
  uint32_t pipeline = 1;
  uint32_t ranks() const { return tensor * data * pipeline; }
};

struct Parameter {
  std::string name;
  std::vector<uint64_t> shape;
  int split = -1;      // the axis that tensor parallelism splits; -1: each has all of it
  uint32_t layer = 0;  // which pipeline stage has it follows from that
};

struct Model {
  uint32_t layers = 0;
  std::vector<Parameter> parameters;
};

// 126 layers; embedding with the first, norm and head with the last one.
Model Llama405B();

// Of one rank: its parameters in BF16, which all its data-parallel peers have, too, and its part of
// the optimizer's state in F32 (a master copy and two moments): the parameters of its stage laid
// end to end are cut into as many ranges as there are data-parallel ranks, wherever that falls.
std::vector<Slice> SlicesOf(const Model& model, const Mesh& mesh, Rank rank);

}  // namespace holdfast::bench
