#include "base/setting_range.h"

#include <array>
#include <cstdio>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/units.h"

namespace holdfast {
namespace {

using Unit = SettingRange::Unit;

std::string Octal(uint64_t bits) {
  char text[32];
  std::snprintf(text, sizeof(text), "0%03llo", static_cast<unsigned long long>(bits));
  return text;
}

struct Factor {
  uint64_t of;
  const char* name;
};
constexpr std::array<Factor, 6> kBytes = {{{kGiB * kGiB, " EiB"},
                                           {kGiB * kMiB, " PiB"},
                                           {kGiB * kKiB, " TiB"},
                                           {kGiB, " GiB"},
                                           {kMiB, " MiB"},
                                           {kKiB, " KiB"}}};
constexpr std::array<Factor, 4> kMillis = {
    {{86'400'000, " d"}, {3'600'000, " h"}, {60'000, " min"}, {1000, " s"}}};

// In the largest unit of which it is a whole number.
template <size_t kCount>
std::string Exactly(uint64_t value, const std::array<Factor, kCount>& units, const char* least) {
  for (const Factor& unit : units) {
    if (value % unit.of == 0) {
      return absl::StrCat(value / unit.of, unit.name);
    }
  }
  return absl::StrCat(value, least);
}

// Where units round, the number itself as well.
std::string Given(const SettingRange& range) {
  return range.unit == Unit::kBytes
             ? absl::StrCat(range.value, " bytes (", FormatBytes(range.value), ")")
         : range.unit == Unit::kMs ? absl::StrCat(range.value, " ms")
                                   : SettingText(range.value, range.unit);
}

}  // namespace

std::string SettingText(uint64_t value, Unit unit) {
  if (value == 0) {
    return "0";
  }
  switch (unit) {
    case Unit::kBytes:
      return Exactly(value, kBytes, " B");
    case Unit::kMs:
      return Exactly(value, kMillis, " ms");
    case Unit::kMode:
      return Octal(value);
    case Unit::kCount:
      break;
  }
  return absl::StrCat(value);
}

absl::Status CheckRange(const SettingRange& range) {
  const bool zero = range.or_zero && range.value == 0;
  const std::string note = range.note.empty() ? "" : absl::StrCat(": ", ToAbsl(range.note));
  // What bounds it may be known only where it is judged: no number is shown for that.
  const bool named_only = range.max == UINT64_MAX && !range.max_is.empty();
  if (!zero && (range.value < range.min || range.value > range.max)) {
    return absl::InvalidArgumentError(absl::StrCat(
        ToAbsl(range.setting), ": ", Given(range), " is not within ",
        SettingText(range.min, range.unit), " to ",
        named_only ? std::string(range.max_is) : SettingText(range.max, range.unit),
        range.or_zero ? ", nor 0" : "",
        named_only || range.max_is.empty() ? "" : absl::StrCat(" (", ToAbsl(range.max_is), ")"),
        note));
  }
  if (range.value % range.multiple_of != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(ToAbsl(range.setting), ": ", Given(range), ": a multiple of ",
                     SettingText(range.multiple_of, range.unit), " is needed", note));
  }
  return absl::OkStatus();
}

std::string RangeText(const SettingRange& range) {
  std::string text;
  const std::string min =
      !range.min_is.empty() ? std::string(range.min_is) : SettingText(range.min, range.unit);
  const std::string max =
      !range.max_is.empty() ? std::string(range.max_is) : SettingText(range.max, range.unit);
  const bool bounded = range.max != UINT64_MAX || !range.max_is.empty();
  if (bounded && range.min > 0) {
    text = absl::StrCat(min, " to ", max);
  } else if (bounded) {
    text = absl::StrCat("at most ", max);
  } else if (range.min > 0) {
    text = absl::StrCat("at least ", min);
  }
  if (range.or_zero && !text.empty()) {
    absl::StrAppend(&text, ", or 0");
  }
  if (range.multiple_of > 1) {
    absl::StrAppend(&text, text.empty() ? "" : "; ", "a multiple of ",
                    SettingText(range.multiple_of, range.unit));
  }
  return text;
}

}  // namespace holdfast
