#include "ckptctl/render.h"

#include <algorithm>
#include <chrono>
#include <ctime>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/units.h"
#include "ckptctl/text.h"

namespace holdfast {
namespace {

constexpr int64_t kSecond = 1000;
constexpr int64_t kMinute = 60 * kSecond;
constexpr int64_t kHour = 60 * kMinute;
constexpr int64_t kDay = 24 * kHour;

std::string TwoUnits(int64_t ms, int64_t large, const char* large_name, int64_t small,
                     const char* small_name) {
  const int64_t rest = ms % large / small;
  std::string text = absl::StrCat(ms / large, " ", large_name);
  return rest == 0 ? text : absl::StrCat(text, " ", rest, " ", small_name);
}

// part/whole in `units`, without the product overflowing.
uint64_t Share(uint64_t part, uint64_t whole, uint64_t units) {
  if (part >= whole) {
    return units;
  }
  // Dropping low bits of both may round up to the whole: then one unit less.
  uint64_t small_part = part;
  uint64_t small_whole = whole;
  while (small_part > UINT64_MAX / units) {
    small_part >>= 1;
    small_whole >>= 1;
  }
  return std::min(small_part * units / small_whole, units - 1);
}

}  // namespace

std::string FormatAge(int64_t ms) {
  if (ms <= 0) {
    return "0 s";
  }
  if (ms < kSecond) {
    return absl::StrCat("0.", std::max<int64_t>(ms / 100, 1), " s");
  }
  if (ms < kMinute) {
    return absl::StrCat(ms / kSecond, " s");
  }
  if (ms < kHour) {
    return TwoUnits(ms, kMinute, "min", kSecond, "s");
  }
  if (ms < kDay) {
    return TwoUnits(ms, kHour, "h", kMinute, "min");
  }
  return TwoUnits(ms, kDay, "d", kHour, "h");
}

std::string FormatAgo(int64_t unix_ms, int64_t now_unix_ms) {
  if (unix_ms <= 0) {
    return "";
  }
  if (unix_ms >= now_unix_ms || now_unix_ms - unix_ms < kSecond) {
    return "just now";
  }
  return absl::StrCat(FormatAge(now_unix_ms - unix_ms), " ago");
}

std::string FormatTime(int64_t unix_ms) {
  const std::time_t seconds = unix_ms / kSecond;
  std::tm parts{};
  constexpr int kLastYear = 9999 - 1900;
  if (unix_ms <= 0 || gmtime_r(&seconds, &parts) == nullptr || parts.tm_year > kLastYear) {
    return "unknown time";
  }
  return absl::StrFormat("%04d-%02d-%02d %02d:%02d:%02d UTC", parts.tm_year + 1900,
                         parts.tm_mon + 1, parts.tm_mday, parts.tm_hour, parts.tm_min,
                         parts.tm_sec);
}

std::string Bar(uint64_t part, uint64_t whole, size_t cells) {
  const size_t full = whole == 0 ? 0 : static_cast<size_t>(Share(part, whole, cells));
  return absl::StrCat("[", std::string(full, '#'), std::string(cells - full, '-'), "]");
}

uint32_t Percent(uint64_t part, uint64_t whole) {
  return static_cast<uint32_t>(whole == 0 ? 100 : Share(part, whole, 100));
}

std::string ByteProgress(uint64_t done, uint64_t total, int64_t elapsed_ms) {
  constexpr size_t kCells = 24;
  std::string line = absl::StrCat(Bar(done, total, kCells), " ", Percent(done, total), "%  ",
                                  FormatBytes(done), " of ", FormatBytes(total));
  if (elapsed_ms <= 0 || done == 0 || done > total) {
    return line;
  }
  const double left_ms = static_cast<double>(total - done) / static_cast<double>(done) *
                         static_cast<double>(elapsed_ms);
  constexpr double kLeftMsMax = 100.0 * 86'400'000;  // more than 100 days is no estimate
  absl::StrAppend(&line, "  ", FormatRate(done, std::chrono::milliseconds(elapsed_ms)));
  if (left_ms < kLeftMsMax) {
    absl::StrAppend(&line, "  ", FormatAge(static_cast<int64_t>(left_ms)), " left");
  }
  return line;
}

std::string Count(uint64_t n, std::string_view one, std::string_view many) {
  return absl::StrCat(n, " ", std::string(n == 1 ? one : many));
}

void Table::AddRow(std::vector<std::string> cells) {
  cells.resize(columns_.size());
  rows_.push_back(std::move(cells));
}

std::string Table::Render(std::string_view indent) const {
  return Lines(indent, true);
}
std::string Table::RenderWithoutTitles(std::string_view indent) const {
  return Lines(indent, false);
}

std::string Table::Lines(std::string_view indent, bool titles) const {
  std::vector<size_t> widths(columns_.size(), 0);
  for (size_t i = 0; i < columns_.size(); ++i) {
    widths[i] = titles ? DisplayWidth(columns_[i].title) : 0;
    for (const auto& row : rows_) {
      widths[i] = std::max(widths[i], DisplayWidth(row[i]));
    }
  }
  std::string out;
  const auto add_line = [&](const auto& cell_at) {
    std::string line(indent);
    for (size_t i = 0; i < columns_.size(); ++i) {
      const std::string& cell = cell_at(i);
      const std::string gap(widths[i] - DisplayWidth(cell), ' ');
      absl::StrAppend(&line, i == 0 ? "" : "  ", columns_[i].align == Align::kRight ? gap : "",
                      cell, columns_[i].align == Align::kLeft ? gap : "");
    }
    line.erase(line.find_last_not_of(' ') + 1);
    absl::StrAppend(&out, line, "\n");
  };
  if (titles) {
    add_line([&](size_t i) -> const std::string& { return columns_[i].title; });
  }
  for (const auto& row : rows_) {
    add_line([&](size_t i) -> const std::string& { return row[i]; });
  }
  return out;
}

}  // namespace holdfast
