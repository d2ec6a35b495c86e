#include "server/node_ranges.h"

#include <algorithm>
#include <limits>
#include <string_view>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/ids.h"
#include "base/status.h"

namespace holdfast {
namespace {

constexpr size_t kDigitsMax = 18;  // what surely fits into 64 bits

bool IsDigit(char c) {
  return c >= '0' && c <= '9';
}

// A name, taken apart at the number that tells it from its neighbours: the last one of its first
// label ("gpu-07.pod2.example"), without one the last of all.
struct Parts {
  std::string_view prefix;
  std::string_view number;  // empty: there is none, and prefix is all
  std::string_view suffix;
  uint64_t value = 0;
};

size_t EndOfNumber(std::string_view name) {
  const auto end_within = [&](size_t end) {
    while (end > 0 && !IsDigit(name[end - 1])) {
      --end;
    }
    return end;
  };
  const size_t in_label = end_within(std::min(name.find('.'), name.size()));
  return in_label > 0 ? in_label : end_within(name.size());
}

Parts TakeApart(std::string_view name) {
  const size_t end = EndOfNumber(name);
  size_t begin = end;
  while (begin > 0 && IsDigit(name[begin - 1])) {
    --begin;
  }
  if (begin == end || end - begin > kDigitsMax) {
    return {name, {}, {}, 0};
  }
  Parts parts{name.substr(0, begin), name.substr(begin, end - begin), name.substr(end), 0};
  for (const char digit : parts.number) {
    parts.value = parts.value * 10 + static_cast<uint64_t>(digit - '0');
  }
  return parts;
}

std::string NumberText(uint64_t value, uint32_t digits) {
  const std::string text = absl::StrCat(value);
  return text.size() < digits ? std::string(digits - text.size(), '0') + text : text;
}

std::string NameIn(const v1::NodeRange& range, uint64_t i) {
  return range.digits() == 0
             ? range.prefix()
             : absl::StrCat(range.prefix(), NumberText(range.first() + i, range.digits()),
                            range.suffix());
}

bool Continues(const v1::NodeRange& range, const Parts& next) {
  return !next.number.empty() && range.digits() > 0 && range.prefix() == next.prefix &&
         range.suffix() == next.suffix && range.first() + range.count() == next.value &&
         NumberText(next.value, range.digits()) == next.number;
}

}  // namespace

void SetNodeRanges(std::vector<std::string> names, NodeRanges* ranges) {
  std::vector<Parts> all;
  all.reserve(names.size());
  for (const std::string& name : names) {
    all.push_back(TakeApart(name));
  }
  const auto order = [](const Parts& p) {
    return std::tuple(p.prefix, p.suffix, p.value, p.number);
  };
  std::sort(all.begin(), all.end(),
            [&](const Parts& a, const Parts& b) { return order(a) < order(b); });
  ranges->Clear();
  const Parts* before = nullptr;
  for (const Parts& parts : all) {
    if (before != nullptr && order(*before) == order(parts)) {
      continue;
    }
    before = &parts;
    if (!ranges->empty() && Continues(*ranges->rbegin(), parts)) {
      v1::NodeRange& range = *ranges->rbegin();
      range.set_count(range.count() + 1);
      continue;
    }
    v1::NodeRange& range = *ranges->Add();
    range.set_prefix(std::string(parts.prefix));
    range.set_suffix(std::string(parts.suffix));
    range.set_first(parts.value);
    range.set_count(1);
    range.set_digits(static_cast<uint32_t>(parts.number.size()));
  }
}

absl::Status CheckNodeRanges(const NodeRanges& ranges) {
  size_t names = 0;
  for (const v1::NodeRange& range : ranges) {
    const bool one = range.digits() == 0;
    if (range.count() == 0 || (one && (range.count() != 1 || !range.suffix().empty())) ||
        range.digits() > kDigitsMax ||
        range.first() > std::numeric_limits<uint64_t>::max() - range.count()) {
      return absl::InvalidArgumentError("a range of nodes contradicts itself");
    }
    names += range.count();
    if (names > kStateNodesMax) {
      return absl::InvalidArgumentError(absl::StrCat("it names more nodes than ", kStateNodesMax));
    }
    HF_RETURN_IF_ERROR(CheckJobName(NameIn(range, range.count() - 1)));
  }
  return absl::OkStatus();
}

std::vector<std::string> NodesIn(const NodeRanges& ranges) {
  std::vector<std::string> names;
  for (const v1::NodeRange& range : ranges) {
    for (uint64_t i = 0; i < range.count(); ++i) {
      names.push_back(NameIn(range, i));
    }
  }
  return names;
}

}  // namespace holdfast
