// Prints random cases with the answers of recovery/ownership.h, for ownership_reference.py to
// judge: print_ownership_cases <seed> <count>.
#include <cstdio>
#include <cstdlib>
#include <string>

#include "base/status.h"
#include "tests/recovery/ownership_cases.h"

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: print_ownership_cases <seed> <count>\n");
    return 2;
  }
  const uint64_t seed = std::strtoull(argv[1], nullptr, 10);
  const uint64_t count = std::strtoull(argv[2], nullptr, 10);
  std::mt19937_64 random(seed);
  for (uint64_t i = 0; i < count; ++i) {
    holdfast::OwnershipCase c = holdfast::RandomOwnershipCase(random);
    c.name = "seed " + std::to_string(seed) + ", number " + std::to_string(i);
    const auto ownership = holdfast::Ownership::Compute(c.ranks, c.Named());
    if (!ownership.ok()) {
      std::fprintf(stderr, "print_ownership_cases: %s: %s\n", c.name.c_str(),
                   holdfast::Message(ownership.status()).c_str());
      return 1;
    }
    holdfast::Answer(c, *ownership, random);
    std::fputs(holdfast::PrintOwnershipCase(c).c_str(), stdout);
  }
  return 0;
}
