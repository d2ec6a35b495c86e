#include "bench/ceiling.h"

#include "bench/report.h"

namespace holdfast::bench {

void CeilingRounds::Measure(const std::vector<Piece>& pieces, int threads) {
  std::vector<double> seconds;
  for (const PlainCopy& copy : PlainCopies()) {
    seconds.push_back(TimePlainCopy(copy, pieces, threads));
  }
  Add(seconds);
}

void CeilingRounds::Add(const std::vector<double>& seconds) {
  seconds_.resize(PlainCopies().size());
  for (size_t i = 0; i < seconds_.size(); ++i) {
    seconds_[i].push_back(seconds[i]);
  }
}

size_t CeilingRounds::Best() const {
  size_t best = 0;
  for (size_t i = 1; i < seconds_.size(); ++i) {
    if (Median(seconds_[i]) < Median(seconds_[best])) {
      best = i;
    }
  }
  return best;
}

const std::vector<double>& CeilingRounds::Seconds() const {
  return seconds_[Best()];
}

const std::string& CeilingRounds::Name() const {
  return PlainCopies()[Best()].name;
}

}  // namespace holdfast::bench
