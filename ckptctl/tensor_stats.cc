#include "ckptctl/tensor_stats.h"

#include <algorithm>
#include <cmath>
#include <complex>
#include <cstring>
#include <limits>
#include <type_traits>

#include "ckptctl/element_values.h"

namespace holdfast {
namespace {

__extension__ typedef __int128 WideInt;

template <typename Value>
constexpr bool kIsComplex = std::is_same_v<Value, std::complex<float>>;

template <typename Value>
bool IsNan(const Value& value) {
  if constexpr (kIsComplex<Value>) {
    return std::isnan(value.real()) || std::isnan(value.imag());
  } else if constexpr (std::is_floating_point_v<Value>) {
    return std::isnan(value);
  } else {
    return false;
  }
}

// Of one that is no NaN.
template <typename Value>
bool IsInf(const Value& value) {
  if constexpr (kIsComplex<Value>) {
    return std::isinf(value.real()) || std::isinf(value.imag());
  } else if constexpr (std::is_floating_point_v<Value>) {
    return std::isinf(value);
  } else {
    return false;
  }
}

template <typename Value>
ElementNumber NumberOf(Value value) {
  if constexpr (std::is_floating_point_v<Value>) {
    return static_cast<double>(value);
  } else if constexpr (std::is_signed_v<Value>) {
    return static_cast<int64_t>(value);
  } else {
    return static_cast<uint64_t>(value);
  }
}

// Sums of integers are exact; those of floats are of a wider type, in which none overflows.
template <typename Value>
using WideFloat = std::conditional_t<std::is_same_v<Value, float>, double, long double>;
template <typename Value>
using SumOf = std::conditional_t<std::is_integral_v<Value>, WideInt, WideFloat<Value>>;

std::optional<double> Finite(long double value) {
  const auto as_double = static_cast<double>(value);
  return std::isfinite(as_double) ? std::optional(as_double) : std::nullopt;
}

}  // namespace

class StatsOf::Accumulator {
 public:
  virtual ~Accumulator() = default;
  virtual void Add(std::span<const std::byte> bytes) = 0;
  virtual TensorStats Finish() const = 0;
};

namespace {

template <typename Elements>
class RealStats : public StatsOf::Accumulator {
 public:
  using Value = typename Elements::Value;

  void Add(std::span<const std::byte> bytes) override {
    for (size_t at = 0; at + Elements::kBytes <= bytes.size(); at += Elements::kBytes) {
      const Value value = Elements::At(bytes.data() + at);
      ++told_.elements;
      if (IsNan(value)) {
        ++told_.nan;
      } else if (IsInf(value)) {
        ++told_.inf;
      } else {
        told_.zeros += value == Value{0} ? 1 : 0;
        min_ = std::min(min_, value);
        max_ = std::max(max_, value);
        sum_ += value;
      }
    }
  }

  TensorStats Finish() const override {
    TensorStats told = told_;
    const uint64_t finite = told.elements - told.nan - told.inf;
    if (finite == 0) {
      return told;
    }
    told.min = NumberOf(min_);
    told.max = NumberOf(max_);
    told.mean =
        static_cast<double>(static_cast<long double>(sum_) / static_cast<long double>(finite));
    if constexpr (std::is_floating_point_v<Value>) {
      told.abs_max = NumberOf(std::max(std::abs(min_), std::abs(max_)));
    } else {
      // (The least of 64 bits has no positive one of its type.)
      const WideInt most = std::max<WideInt>(max_, -static_cast<WideInt>(min_));
      told.abs_max = static_cast<uint64_t>(most);
    }
    return told;
  }

 private:
  TensorStats told_;
  Value min_ = std::numeric_limits<Value>::max();
  Value max_ = std::numeric_limits<Value>::lowest();
  SumOf<Value> sum_ = 0;
};

class ComplexStats : public StatsOf::Accumulator {
 public:
  void Add(std::span<const std::byte> bytes) override {
    using Elements = ComplexElements;
    for (size_t at = 0; at + Elements::kBytes <= bytes.size(); at += Elements::kBytes) {
      const Elements::Value value = Elements::At(bytes.data() + at);
      ++told_.elements;
      if (IsNan(value)) {
        ++told_.nan;
      } else if (IsInf(value)) {
        ++told_.inf;
      } else {
        told_.zeros += value == Elements::Value{} ? 1 : 0;
        // (In double: the absolute value of what is finite may be none of float.)
        most_ = std::max(most_.value_or(0), std::abs(std::complex<double>(value)));
      }
    }
  }
  TensorStats Finish() const override {
    TensorStats told = told_;
    if (most_) {
      told.abs_max = *most_;
    }
    return told;
  }

 private:
  TensorStats told_;
  std::optional<double> most_;
};

}  // namespace

StatsOf::StatsOf(Type type) {
  VisitElements(type, [&](auto elements) {
    using Elements = decltype(elements);
    if constexpr (kIsComplex<typename Elements::Value>) {
      accumulator_ = std::make_unique<ComplexStats>();
    } else {
      accumulator_ = std::make_unique<RealStats<Elements>>();
    }
  });
}
StatsOf::~StatsOf() = default;
StatsOf::StatsOf(StatsOf&&) noexcept = default;
void StatsOf::Add(std::span<const std::byte> bytes) {
  accumulator_->Add(bytes);
}
TensorStats StatsOf::Finish() const {
  return accumulator_->Finish();
}

class DifferenceOf::Accumulator {
 public:
  virtual ~Accumulator() = default;
  virtual void Add(std::span<const std::byte> a, std::span<const std::byte> b) = 0;
  virtual TensorDifference Finish() const = 0;
};

namespace {

// How far two elements are apart, and the square of one, in the type that they are summed in.
template <typename Value>
WideFloat<Value> Apart(const Value& a, const Value& b) {
  using Wide = WideFloat<Value>;
  if constexpr (kIsComplex<Value>) {
    return std::abs(std::complex<Wide>(a) - std::complex<Wide>(b));
  } else if constexpr (std::is_integral_v<Value>) {
    return static_cast<Wide>(a > b ? static_cast<WideInt>(a) - b : static_cast<WideInt>(b) - a);
  } else {
    return std::abs(static_cast<Wide>(a) - static_cast<Wide>(b));
  }
}

template <typename Value>
WideFloat<Value> Squared(const Value& value) {
  using Wide = WideFloat<Value>;
  if constexpr (kIsComplex<Value>) {
    return std::norm(std::complex<Wide>(value));
  } else {
    return static_cast<Wide>(value) * static_cast<Wide>(value);
  }
}

template <typename Elements>
class TypedDifference : public DifferenceOf::Accumulator {
 public:
  using Value = typename Elements::Value;

  void Add(std::span<const std::byte> a, std::span<const std::byte> b) override {
    const size_t bytes = std::min(a.size(), b.size());
    for (size_t at = 0; at + Elements::kBytes <= bytes; at += Elements::kBytes) {
      ++told_.elements;
      told_.differing += std::memcmp(a.data() + at, b.data() + at, Elements::kBytes) != 0 ? 1 : 0;
      const Value one = Elements::At(a.data() + at);
      const Value other = Elements::At(b.data() + at);
      const bool one_finite = Count(one, told_.nan_a, told_.inf_a);
      const bool other_finite = Count(other, told_.nan_b, told_.inf_b);
      if (one_finite && other_finite) {
        ++both_finite_;
        const WideFloat<Value> apart = Apart(one, other);
        most_ = std::max(most_, apart);
        apart_ += apart * apart;
        norm_ += Squared(one);
      }
    }
  }

  TensorDifference Finish() const override {
    TensorDifference told = told_;
    if (both_finite_ == 0) {
      return told;
    }
    told.max_abs = Finite(most_);
    if (apart_ == 0) {
      told.relative_norm = 0;
    } else if (norm_ > 0) {
      told.relative_norm = Finite(std::sqrt(apart_ / norm_));
    }
    return told;
  }

 private:
  static bool Count(const Value& value, uint64_t& nan, uint64_t& inf) {
    if (IsNan(value)) {
      ++nan;
      return false;
    }
    if (IsInf(value)) {
      ++inf;
      return false;
    }
    return true;
  }

  TensorDifference told_;
  uint64_t both_finite_ = 0;
  WideFloat<Value> most_ = 0;
  WideFloat<Value> apart_ = 0;  // squared, as the norm is
  WideFloat<Value> norm_ = 0;
};

}  // namespace

DifferenceOf::DifferenceOf(Type type) {
  VisitElements(type, [&](auto elements) {
    accumulator_ = std::make_unique<TypedDifference<decltype(elements)>>();
  });
}
DifferenceOf::~DifferenceOf() = default;
DifferenceOf::DifferenceOf(DifferenceOf&&) noexcept = default;
void DifferenceOf::Add(std::span<const std::byte> a, std::span<const std::byte> b) {
  accumulator_->Add(a, b);
}
TensorDifference DifferenceOf::Finish() const {
  return accumulator_->Finish();
}

}  // namespace holdfast
