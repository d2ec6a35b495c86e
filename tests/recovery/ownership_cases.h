// Cases of ownership in the text form of tests/fixtures/ownership: layouts, who has them, and who
// owns what. ownership_reference.py says what the lines mean, and answers them by itself.
#pragma once

#include <cstdint>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "recovery/ownership.h"

namespace holdfast {

struct OwnershipCase {
  struct Layouts {
    LayoutHash hash{};
    Layout layout;
  };
  struct Owners {
    Rank rank = 0;
    std::vector<SliceOwner> owners;  // by slice
  };
  struct Bytes {
    Rank rank = 0;
    uint64_t bytes = 0;
  };
  struct Without {
    std::vector<Rank> excluded;
    Rank rank = 0;
    uint32_t slice = 0;
    std::optional<SliceOwner> owner;
  };

  std::string name;
  std::vector<Layouts> layouts;
  std::vector<RankLayout> ranks;
  // The answers.
  std::vector<Owners> owners;
  std::vector<Bytes> bytes;
  std::vector<Without> without;

  std::vector<NamedLayout> Named() const;  // points into this
};

// All cases of a file; an error names the line.
absl::StatusOr<std::vector<OwnershipCase>> ParseOwnershipCases(std::string_view text);

// A case without answers: some layouts that share some slices, ranks with gaps in their numbers.
OwnershipCase RandomOwnershipCase(std::mt19937_64& random);

// Fills in what `ownership` answers: every rank's owners and bytes, and some slices without some
// ranks.
void Answer(OwnershipCase& c, const Ownership& ownership, std::mt19937_64& random);

std::string PrintOwnershipCase(const OwnershipCase& c);

}  // namespace holdfast
