// The ceiling of what copies: the best of the plain copies in the same rounds.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "bench/plain_copy.h"

namespace holdfast::bench {

// Times every plain copy once a round; the ceiling is the one with the best median over all rounds.
class CeilingRounds {
 public:
  void Measure(const std::vector<Piece>& pieces, int threads);
  // A round that was measured elsewhere: the seconds of each of PlainCopies.
  void Add(const std::vector<double>& seconds);
  const std::vector<double>& Seconds() const;  // one per round, of the best copy
  const std::string& Name() const;

 private:
  size_t Best() const;
  std::vector<std::vector<double>> seconds_;  // by copy, by round
};

}  // namespace holdfast::bench
