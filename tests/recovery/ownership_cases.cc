#include "tests/recovery/ownership_cases.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "tiers/image/layout_rules.h"

namespace holdfast {
namespace {

using Words = std::vector<std::string>;

template <typename T>
absl::StatusOr<T> Number(const std::string& word) {
  T value = 0;
  if (!absl::SimpleAtoi(word, &value)) {
    return absl::InvalidArgumentError(absl::StrCat("'", word, "' is no number"));
  }
  return value;
}

template <typename T>
absl::StatusOr<std::vector<T>> Numbers(const std::string& word) {
  std::vector<T> values;
  if (word != "-") {
    for (const std::string& part : Words(absl::StrSplit(word, ','))) {
      HF_ASSIGN_OR_RETURN(const T value, Number<T>(part));
      values.push_back(value);
    }
  }
  return values;
}

absl::StatusOr<LayoutHash> Hash(const std::string& word) {
  LayoutHash hash{};
  if (word.size() != 2 * hash.size()) {
    return absl::InvalidArgumentError(absl::StrCat("'", word, "' is no layout's hash"));
  }
  for (size_t i = 0; i < hash.size(); ++i) {
    hash[i] = static_cast<uint8_t>(std::stoul(word.substr(2 * i, 2), nullptr, 16));
  }
  return hash;
}

absl::StatusOr<std::optional<SliceOwner>> Owner(const std::string& word) {
  if (word == "nobody") {
    return std::optional<SliceOwner>();
  }
  const Words parts = absl::StrSplit(word, ':');
  if (parts.size() != 2) {
    return absl::InvalidArgumentError(absl::StrCat("'", word, "' is no owner"));
  }
  HF_ASSIGN_OR_RETURN(const Rank rank, Number<Rank>(parts[0]));
  HF_ASSIGN_OR_RETURN(const uint32_t slice, Number<uint32_t>(parts[1]));
  return std::optional(SliceOwner{rank, slice});
}

absl::Status ParsePlace(const std::string& word, Slice& slice) {
  const Words parts = absl::StrSplit(word, ':');
  if (parts.size() == 3 && parts[0] == "box") {
    HF_ASSIGN_OR_RETURN(std::vector<uint64_t> offset, Numbers<uint64_t>(parts[1]));
    HF_ASSIGN_OR_RETURN(std::vector<uint64_t> shape, Numbers<uint64_t>(parts[2]));
    slice.place = BoxPlace{std::move(offset), std::move(shape)};
  } else if (parts.size() == 3 && parts[0] == "flat") {
    HF_ASSIGN_OR_RETURN(const uint64_t start, Number<uint64_t>(parts[1]));
    HF_ASSIGN_OR_RETURN(const uint64_t length, Number<uint64_t>(parts[2]));
    slice.place = FlatPlace{start, length};
  } else if (word != "whole") {
    return absl::InvalidArgumentError(absl::StrCat("'", word, "' is no place"));
  }
  return absl::OkStatus();
}

absl::Status ParseSlice(const Words& words, OwnershipCase& c) {
  Slice slice;
  slice.name = words[1];
  if (words[0] == "tensor") {
    HF_ASSIGN_OR_RETURN(slice.dtype, ParseDType(words[2]));
    HF_ASSIGN_OR_RETURN(slice.global_shape, Numbers<uint64_t>(words[3]));
    HF_RETURN_IF_ERROR(ParsePlace(words[4], slice));
  } else {
    HF_ASSIGN_OR_RETURN(slice.global_shape, Numbers<uint64_t>(words[2]));
    slice.kind = SliceKind::kJson;
  }
  HF_ASSIGN_OR_RETURN(slice.bytes, image_internal::CheckSlice(slice));
  c.layouts.back().layout.slices.push_back(std::move(slice));
  return absl::OkStatus();
}

absl::Status ParseAnswer(const Words& words, OwnershipCase& c) {
  if (words[0] == "owners") {
    HF_ASSIGN_OR_RETURN(const Rank rank, Number<Rank>(words[1]));
    OwnershipCase::Owners entry{rank, {}};
    for (size_t i = 2; i < words.size(); ++i) {
      HF_ASSIGN_OR_RETURN(const std::optional<SliceOwner> owner, Owner(words[i]));
      entry.owners.push_back(owner.value_or(SliceOwner{}));
    }
    c.owners.push_back(std::move(entry));
  } else if (words[0] == "bytes" && words.size() == 3) {
    HF_ASSIGN_OR_RETURN(const Rank rank, Number<Rank>(words[1]));
    HF_ASSIGN_OR_RETURN(const uint64_t bytes, Number<uint64_t>(words[2]));
    c.bytes.push_back({rank, bytes});
  } else if (words[0] == "without" && words.size() == 5) {
    OwnershipCase::Without entry;
    HF_ASSIGN_OR_RETURN(entry.excluded, Numbers<Rank>(words[1]));
    HF_ASSIGN_OR_RETURN(entry.rank, Number<Rank>(words[2]));
    HF_ASSIGN_OR_RETURN(entry.slice, Number<uint32_t>(words[3]));
    HF_ASSIGN_OR_RETURN(entry.owner, Owner(words[4]));
    c.without.push_back(std::move(entry));
  } else {
    return absl::InvalidArgumentError("no such line");
  }
  return absl::OkStatus();
}

absl::Status ParseLine(const Words& words, OwnershipCase& c) {
  if (words[0] == "layout" && words.size() == 2) {
    HF_ASSIGN_OR_RETURN(const LayoutHash hash, Hash(words[1]));
    c.layouts.push_back({hash, {}});
    return absl::OkStatus();
  }
  if (((words[0] == "tensor" && words.size() == 5) ||
       (words[0] == "object" && words.size() == 3)) &&
      !c.layouts.empty()) {
    return ParseSlice(words, c);
  }
  if (words[0] == "ranks" && words.size() == 4) {
    HF_ASSIGN_OR_RETURN(const Rank first, Number<Rank>(words[1]));
    HF_ASSIGN_OR_RETURN(const Rank last, Number<Rank>(words[2]));
    HF_ASSIGN_OR_RETURN(const LayoutHash hash, Hash(words[3]));
    for (Rank rank = first; rank <= last; ++rank) {
      c.ranks.push_back({rank, hash});
    }
    return absl::OkStatus();
  }
  return ParseAnswer(words, c);
}

std::string List(const std::vector<uint64_t>& numbers) {
  return numbers.empty() ? "-" : absl::StrJoin(numbers, ",");
}

std::string PrintPlace(const Slice& slice) {
  if (const auto* box = std::get_if<BoxPlace>(&slice.place)) {
    return absl::StrCat("box:", List(box->offset), ":", List(box->shape));
  }
  if (const auto* flat = std::get_if<FlatPlace>(&slice.place)) {
    return absl::StrCat("flat:", flat->start, ":", flat->length);
  }
  return "whole";
}

std::string PrintOwner(const std::optional<SliceOwner>& owner) {
  return owner ? absl::StrCat(owner->rank, ":", owner->slice) : "nobody";
}

uint64_t Below(std::mt19937_64& random, uint64_t limit) {
  return random() % limit;
}

// A tensor of one of few names, lengths and dtypes, so that many are equal in some of them.
Slice RandomSlice(std::mt19937_64& random) {
  static constexpr DType kDTypes[] = {DType::kU8, DType::kF16, DType::kBF16, DType::kF32,
                                      DType::kF64};
  Slice slice;
  slice.name = absl::StrCat(Below(random, 4) == 0 ? "é" : "w", Below(random, 12));
  slice.dtype = kDTypes[Below(random, std::size(kDTypes))];
  const uint64_t rows = Below(random, 5);
  const uint64_t columns = 1 + Below(random, 4);
  slice.global_shape = {rows, columns};
  switch (Below(random, 4)) {
    case 0: {
      const uint64_t from = Below(random, rows + 1);
      const uint64_t column = Below(random, columns + 1);
      slice.place = BoxPlace{{from, column}, {Below(random, rows - from + 1), columns - column}};
      break;
    }
    case 1: {
      const uint64_t start = Below(random, rows * columns + 1);
      slice.place = FlatPlace{start, Below(random, rows * columns - start + 1)};
      break;
    }
    default:
      break;
  }
  return slice;
}

// As many as may lie in one layout: those that contradict an earlier one are left out.
std::vector<Slice> Compatible(const std::vector<Slice>& slices) {
  std::vector<Slice> kept;
  for (const Slice& slice : slices) {
    const bool fits = std::all_of(kept.begin(), kept.end(), [&slice](const Slice& other) {
      return other.name != slice.name ||
             (other.dtype == slice.dtype && other.global_shape == slice.global_shape &&
              other.place != slice.place);
    });
    if (fits) {
      kept.push_back(slice);
    }
  }
  return kept;
}

}  // namespace

std::vector<NamedLayout> OwnershipCase::Named() const {
  std::vector<NamedLayout> named;
  for (const Layouts& entry : layouts) {
    named.push_back({entry.hash, &entry.layout});
  }
  return named;
}

absl::StatusOr<std::vector<OwnershipCase>> ParseOwnershipCases(std::string_view text) {
  std::vector<OwnershipCase> cases;
  size_t number = 0;
  for (const std::string& line : Words(absl::StrSplit(ToAbsl(text), '\n'))) {
    ++number;
    if (line.empty() || line[0] == '#') {
      continue;
    }
    const Words words = absl::StrSplit(line, ' ');
    if (words[0] == "case") {
      cases.emplace_back().name = line.substr(5);
      continue;
    }
    const absl::Status parsed = cases.empty()
                                    ? absl::InvalidArgumentError("it comes before the first case")
                                    : ParseLine(words, cases.back());
    if (!parsed.ok()) {
      return Annotate(parsed, absl::StrCat("line ", number, " '", line, "'"));
    }
  }
  return cases;
}

OwnershipCase RandomOwnershipCase(std::mt19937_64& random) {
  OwnershipCase c;
  // 1. Slices, of which each layout has some.
  std::vector<Slice> slices;
  for (uint64_t i = 0, count = 1 + Below(random, 30); i < count; ++i) {
    slices.push_back(RandomSlice(random));
  }
  const uint64_t layouts = 1 + Below(random, 7);
  const uint64_t density = 1 + Below(random, 4);
  for (uint64_t i = 0; i < layouts; ++i) {
    std::vector<Slice> chosen;
    for (const Slice& slice : slices) {
      if (Below(random, 4) < density) {
        chosen.push_back(slice);
      }
    }
    std::shuffle(chosen.begin(), chosen.end(), random);
    chosen = Compatible(chosen);
    if (chosen.empty() || Below(random, 3) == 0) {
      Slice object;
      object.name = "state";
      object.global_shape = {1 + Below(random, 1000)};
      object.kind = SliceKind::kJson;
      chosen.push_back(object);
    }
    LayoutHash hash{};
    std::generate(hash.begin(), hash.end(), [&random] { return static_cast<uint8_t>(random()); });
    c.layouts.push_back({hash, PlanImage(std::move(chosen), 0).value().layout});
  }
  // 2. Ranks, with gaps and in no order.
  std::set<Rank> ranks;
  for (uint64_t i = 0, count = 1 + Below(random, 20); i < count; ++i) {
    ranks.insert(static_cast<Rank>(Below(random, 30)));
  }
  for (const Rank rank : ranks) {
    c.ranks.push_back({rank, c.layouts[Below(random, layouts)].hash});
  }
  std::shuffle(c.ranks.begin(), c.ranks.end(), random);
  return c;
}

void Answer(OwnershipCase& c, const Ownership& ownership, std::mt19937_64& random) {
  for (const RankLayout& rank : ownership.ranks()) {
    OwnershipCase::Owners entry{rank.rank, {}};
    for (uint32_t slice = 0; slice < ownership.SliceCount(rank.rank); ++slice) {
      entry.owners.push_back(ownership.OwnerOf(rank.rank, slice).value());
      OwnershipCase::Without without{{}, rank.rank, slice, {}};
      for (const RankLayout& other : ownership.ranks()) {
        if (Below(random, 3) > 0) {
          without.excluded.push_back(other.rank);
        }
      }
      if (!without.excluded.empty()) {
        without.owner = ownership.OwnerOf(rank.rank, slice, without.excluded);
        c.without.push_back(std::move(without));
      }
    }
    c.owners.push_back(std::move(entry));
    c.bytes.push_back({rank.rank, ownership.OwnedBytes(rank.rank)});
  }
}

std::string PrintOwnershipCase(const OwnershipCase& c) {
  std::string text = absl::StrCat("case ", c.name, "\n");
  for (const OwnershipCase::Layouts& entry : c.layouts) {
    absl::StrAppend(&text, "layout ", ToHex(entry.hash), "\n");
    for (const Slice& slice : entry.layout.slices) {
      if (slice.kind == SliceKind::kTensor) {
        absl::StrAppend(&text, "tensor ", slice.name, " ", ToAbsl(DTypeName(slice.dtype)), " ",
                        List(slice.global_shape), " ", PrintPlace(slice), "\n");
      } else {
        absl::StrAppend(&text, "object ", slice.name, " ", slice.bytes, "\n");
      }
    }
  }
  for (const RankLayout& rank : c.ranks) {
    absl::StrAppend(&text, "ranks ", rank.rank, " ", rank.rank, " ", ToHex(rank.layout), "\n");
  }
  for (const OwnershipCase::Owners& entry : c.owners) {
    absl::StrAppend(&text, "owners ", entry.rank);
    for (const SliceOwner& owner : entry.owners) {
      absl::StrAppend(&text, " ", PrintOwner(owner));
    }
    absl::StrAppend(&text, "\n");
  }
  for (const OwnershipCase::Bytes& entry : c.bytes) {
    absl::StrAppend(&text, "bytes ", entry.rank, " ", entry.bytes, "\n");
  }
  for (const OwnershipCase::Without& entry : c.without) {
    absl::StrAppend(&text, "without ", absl::StrJoin(entry.excluded, ","), " ", entry.rank, " ",
                    entry.slice, " ", PrintOwner(entry.owner), "\n");
  }
  return text;
}

}  // namespace holdfast
