#include "base/units.h"

#include <array>
#include <cmath>
#include <cstdio>
#include <optional>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace holdfast {
namespace {

struct Unit {
  std::string_view name;
  uint64_t factor;
};

constexpr std::array<Unit, 14> kByteUnits = {{
    {"", 1},
    {"B", 1},
    {"KiB", kKiB},
    {"MiB", kMiB},
    {"GiB", kGiB},
    {"TiB", 1024 * kGiB},
    {"PiB", 1024 * 1024 * kGiB},
    {"kB", 1'000},
    {"KB", 1'000},
    {"MB", 1'000'000},
    {"GB", 1'000'000'000},
    {"TB", 1'000'000'000'000},
    {"PB", 1'000'000'000'000'000},
    {"EiB", 1024 * 1024 * 1024 * kGiB},
}};

constexpr std::array<Unit, 8> kDurationUnits = {{
    {"ns", 1},
    {"us", 1'000},
    {"µs", 1'000},
    {"ms", 1'000'000},
    {"s", 1'000'000'000},
    {"min", 60'000'000'000},
    {"h", 3'600'000'000'000},
    {"d", 86'400'000'000'000},
}};

constexpr size_t kTextBytesMax =
    64;  // longer than any number with its unit; bounds the error messages too

// Wide enough for any 64-bit value times any unit. The typedef is how a compiler is told that we
// mean the extension.
__extension__ typedef unsigned __int128 Wide;

// digits[.digits][e[+-]digits] as an exact decimal: mantissa × 10^exponent.
struct Decimal {
  Wide mantissa = 0;
  int exponent = 0;
};

bool IsDigit(char c) {
  return c >= '0' && c <= '9';
}

// Takes a number from the front of `text`. Exact, so that "0.1GB" is 100000000 and not one less.
std::optional<Decimal> TakeDecimal(std::string_view& text) {
  Decimal d;
  size_t i = 0;
  size_t digits = 0;
  bool after_point = false;
  constexpr Wide kMantissaMax = ~Wide{0} / 100;
  for (; i < text.size(); ++i) {
    if (text[i] == '.' && !after_point) {
      after_point = true;
      continue;
    }
    if (!IsDigit(text[i])) {
      break;
    }
    if (d.mantissa > kMantissaMax) {
      return std::nullopt;
    }
    d.mantissa = d.mantissa * 10 + static_cast<unsigned>(text[i] - '0');
    d.exponent -= after_point ? 1 : 0;
    ++digits;
  }
  if (digits == 0 || (after_point && text[i - 1] == '.')) {
    return std::nullopt;
  }
  // "1e9", but not the "E" of "1EiB": an exponent needs a digit.
  size_t e = i;
  if (e < text.size() && (text[e] == 'e' || text[e] == 'E')) {
    ++e;
    const bool negative = e < text.size() && text[e] == '-';
    if (e < text.size() && (text[e] == '-' || text[e] == '+')) {
      ++e;
    }
    if (e < text.size() && IsDigit(text[e])) {
      int exponent = 0;
      for (; e < text.size() && IsDigit(text[e]); ++e) {
        if (exponent > 100) {
          return std::nullopt;
        }
        exponent = exponent * 10 + (text[e] - '0');
      }
      d.exponent += negative ? -exponent : exponent;
      i = e;
    }
  }
  text.remove_prefix(i);
  return d;
}

// number × factor when that is a whole number that fits.
std::optional<uint64_t> Scale(Decimal d, uint64_t factor) {
  if (d.mantissa == 0) {
    return 0;
  }
  Wide value = d.mantissa;
  // Divide before multiplying while it is exact, so that the product cannot overflow for a result
  // that fits.
  Wide rest = factor;
  for (; d.exponent < 0; ++d.exponent) {
    if (rest % 10 == 0) {
      rest /= 10;
    } else if (value % 10 == 0) {
      value /= 10;
    } else if (rest % 2 == 0 && value % 5 == 0) {
      rest /= 2;
      value /= 5;
    } else if (rest % 5 == 0 && value % 2 == 0) {
      rest /= 5;
      value /= 2;
    } else {
      return std::nullopt;
    }
  }
  for (; d.exponent > 0; --d.exponent) {
    if (value > UINT64_MAX) {
      return std::nullopt;
    }
    value *= 10;
  }
  if (value > UINT64_MAX) {
    return std::nullopt;
  }
  value *= rest;
  if (value > UINT64_MAX) {
    return std::nullopt;
  }
  return static_cast<uint64_t>(value);
}

std::string_view Trim(std::string_view s) {
  while (!s.empty() && s.front() == ' ')
    s.remove_prefix(1);
  while (!s.empty() && s.back() == ' ')
    s.remove_suffix(1);
  return s;
}

template <size_t kCount>
std::optional<uint64_t> ParseWithUnit(std::string_view text,
                                      const std::array<Unit, kCount>& units) {
  if (text.size() > kTextBytesMax) {
    return std::nullopt;
  }
  text = Trim(text);
  const std::optional<Decimal> number = TakeDecimal(text);
  if (!number.has_value()) {
    return std::nullopt;
  }
  text = Trim(text);
  for (const Unit& unit : units) {
    if (unit.name == text) {
      return Scale(*number, unit.factor);
    }
  }
  return std::nullopt;
}

std::string Shown(std::string_view text) {
  std::string out(text.substr(0, kTextBytesMax));
  if (text.size() > kTextBytesMax) {
    out += "…";
  }
  return out;
}

// One digit after the point, dropped when it is 0.
std::string OneDecimal(double value) {
  char buffer[48];
  std::snprintf(buffer, sizeof(buffer), "%.1f", value);
  std::string text(buffer);
  if (text.size() > 2 && text.ends_with(".0")) {
    text.resize(text.size() - 2);
  }
  return text;
}

// The largest unit in which the value, as it will be printed, is at least 1 and below `step`.
std::string FormatScaled(double value, double step, const char* const* names, size_t count) {
  size_t i = 0;
  while (i + 1 < count && std::round(value * 10) / 10 >= step) {
    value /= step;
    ++i;
  }
  return absl::StrCat(i == 0 ? absl::StrCat(static_cast<uint64_t>(value)) : OneDecimal(value), " ",
                      names[i]);
}

}  // namespace

std::string FormatBytes(uint64_t bytes) {
  static constexpr const char* kNames[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  return FormatScaled(static_cast<double>(bytes), 1024, kNames, std::size(kNames));
}

std::string FormatRate(uint64_t bytes, Duration took) {
  static constexpr const char* kNames[] = {"B/s", "kB/s", "MB/s", "GB/s", "TB/s"};
  if (took.count() <= 0) {
    return "no time";
  }
  const double rate = static_cast<double>(bytes) * 1e9 / static_cast<double>(took.count());
  return FormatScaled(rate, 1000, kNames, std::size(kNames));
}

std::string FormatDuration(Duration d) {
  const bool negative = d.count() < 0;
  // Negating the most negative value would overflow; unsigned arithmetic does not.
  const uint64_t ns =
      negative ? 0 - static_cast<uint64_t>(d.count()) : static_cast<uint64_t>(d.count());
  const char* sign = negative ? "-" : "";
  constexpr uint64_t kSecond = 1'000'000'000;
  if (ns < 59'950'000'000) {
    static constexpr const char* kNames[] = {"ns", "us", "ms", "s"};
    return absl::StrCat(sign,
                        FormatScaled(static_cast<double>(ns), 1000, kNames, std::size(kNames)));
  }
  const uint64_t seconds = (ns + kSecond / 2) / kSecond;
  if (seconds < 3600) {
    return absl::StrCat(sign, seconds / 60, " min ", seconds % 60, " s");
  }
  const uint64_t minutes = (ns + 30 * kSecond) / (60 * kSecond);
  if (minutes < 24 * 60) {
    return absl::StrCat(sign, minutes / 60, " h ", minutes % 60, " min");
  }
  const uint64_t hours = (minutes + 30) / 60;
  return absl::StrCat(sign, hours / 24, " d ", hours % 24, " h");
}

absl::StatusOr<uint64_t> ParseBytes(std::string_view text) {
  const std::optional<uint64_t> bytes = ParseWithUnit(text, kByteUnits);
  if (!bytes.has_value()) {
    return absl::InvalidArgumentError(
        absl::StrCat("size '", Shown(text),
                     "': expected a number of whole bytes below 16 EiB, with or without a unit (B, "
                     "KiB, MiB, GiB, TiB, PiB, EiB, "
                     "kB, MB, GB, TB, PB), as in 512MiB"));
  }
  return *bytes;
}

absl::StatusOr<Duration> ParseDuration(std::string_view text) {
  std::optional<uint64_t> ns = ParseWithUnit(text, kDurationUnits);
  if (!ns.has_value() && Trim(text) == "0") {
    ns = 0;
  }
  if (!ns.has_value() || *ns > static_cast<uint64_t>(INT64_MAX)) {
    return absl::InvalidArgumentError(
        absl::StrCat("duration '", Shown(text),
                     "': expected a number with a unit (ns, us, ms, s, min, h, d), at most 292 "
                     "years, as in 250ms"));
  }
  return Duration(static_cast<int64_t>(*ns));
}

}  // namespace holdfast
