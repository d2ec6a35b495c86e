// What can be said of a tensor's values, and of how far two tensors are apart, piece by piece.
//
//   StatsOf stats(Type::kBF16);
//   while (…) stats.Add(bytes);                 // whole elements
//   const TensorStats told = stats.Finish();
//
// Minimum, maximum, mean and norms are of what is finite; NaN and infinity are counted. The same
// values give the same answer however they are cut. Pure; not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <variant>

#include "holdfast/state.h"

namespace holdfast {

// An element as it is: integers of 64 bits do not fit a double.
using ElementNumber = std::variant<double, int64_t, uint64_t>;

struct TensorStats {
  uint64_t elements = 0;
  uint64_t nan = 0;  // of complex ones: either part
  uint64_t inf = 0;  // likewise, and neither is NaN
  uint64_t zeros = 0;
  // Nothing: no element is finite; of complex ones but the last also always.
  std::optional<ElementNumber> min;
  std::optional<ElementNumber> max;
  std::optional<double> mean;
  std::optional<ElementNumber> abs_max;
};

class StatsOf {
 public:
  explicit StatsOf(Type type);
  ~StatsOf();
  StatsOf(StatsOf&&) noexcept;
  void Add(std::span<const std::byte> bytes);
  TensorStats Finish() const;

  class Accumulator;

 private:
  std::unique_ptr<Accumulator> accumulator_;
};

struct TensorDifference {
  uint64_t elements = 0;
  uint64_t differing = 0;  // whose bytes are others: 0.0 and -0.0 differ, a NaN and the same do not
  uint64_t nan_a = 0;
  uint64_t nan_b = 0;
  uint64_t inf_a = 0;
  uint64_t inf_b = 0;
  // Of elements that are finite in both. Nothing: there is none, or it is no finite number.
  std::optional<double> max_abs;
  std::optional<double> relative_norm;  // ||a-b|| / ||a||; 0 if both are; nothing if ||a|| alone is
};

class DifferenceOf {
 public:
  explicit DifferenceOf(Type type);
  ~DifferenceOf();
  DifferenceOf(DifferenceOf&&) noexcept;
  // As many bytes of both.
  void Add(std::span<const std::byte> a, std::span<const std::byte> b);
  TensorDifference Finish() const;

  class Accumulator;

 private:
  std::unique_ptr<Accumulator> accumulator_;
};

}  // namespace holdfast
