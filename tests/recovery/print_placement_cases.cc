// Prints random cases with the answers of recovery/placement.h, for placement_reference.py to
// judge: print_placement_cases <seed> <count>.
#include <cstdio>
#include <cstdlib>
#include <string>

#include "base/status.h"
#include "tests/recovery/placement_cases.h"

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: print_placement_cases <seed> <count>\n");
    return 2;
  }
  const uint64_t seed = std::strtoull(argv[1], nullptr, 10);
  const uint64_t count = std::strtoull(argv[2], nullptr, 10);
  std::mt19937_64 random(seed);
  for (uint64_t i = 0; i < count; ++i) {
    holdfast::PlacementCase c = holdfast::RandomPlacementCase(random);
    c.name = "seed " + std::to_string(seed) + ", number " + std::to_string(i);
    const auto placement = c.Compute();
    if (!placement.ok()) {
      std::fprintf(stderr, "print_placement_cases: %s: %s\n", c.name.c_str(),
                   holdfast::Message(placement.status()).c_str());
      return 1;
    }
    holdfast::AnswerPlacement(c, *placement, random);
    std::fputs(holdfast::PrintPlacementCase(c).c_str(), stdout);
  }
  return 0;
}
