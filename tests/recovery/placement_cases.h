// Cases of placement in the text form of tests/fixtures/placement: nodes, shards, and where their
// replicas lie. placement_reference.py says what the lines mean, and answers them by itself.
#pragma once

#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "recovery/placement.h"

namespace holdfast {

struct PlacementCase {
  struct Hash {
    Rank rank = 0;
    std::string node;
    uint64_t hash = 0;
    uint64_t draw = 0;
  };

  std::string name;
  JobUuid job;
  uint32_t replicas = 0;
  std::vector<PlacementNode> nodes;
  std::vector<PlacementShard> shards;
  // The answers.
  std::vector<Hash> hashes;
  std::map<Rank, std::vector<std::string>> targets;
  std::map<std::string, uint64_t> loads;  // units

  absl::StatusOr<Placement> Compute() const {
    return Place(PlacementSeed(job), nodes, shards, replicas);
  }
};

// All cases of a file; an error names the line. Limits are the reference's to check.
absl::StatusOr<std::vector<PlacementCase>> ParsePlacementCases(std::string_view text);

// A case without answers: some nodes in some domains that lend much, little or nothing.
PlacementCase RandomPlacementCase(std::mt19937_64& random);

// Fills in what `placement` answers, and the hashes of some pairs.
void AnswerPlacement(PlacementCase& c, const Placement& placement, std::mt19937_64& random);

std::string PrintPlacementCase(const PlacementCase& c);

}  // namespace holdfast
