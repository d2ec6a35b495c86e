// What stats and diff show to people, of what they found. Pure functions; names are escaped in
// here.
//
//   out << RenderStats("step 900 (attempt 1) of job llama-7b", rows);
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ckptctl/tensor_stats.h"
#include "holdfast/checkpoint_reader.h"

namespace holdfast {

// Six digits; "-" for nothing.
std::string NumberText(const std::optional<double>& number);

struct StatsRow {
  const SavedItem* item = nullptr;
  TensorStats stats;  // of one with a problem: nothing
};
// Those with NaN, infinity or a problem come first.
std::string RenderStats(std::string_view step, std::vector<StatsRow> rows);

enum class DiffVerdict { kOnlyA, kOnlyB, kOtherType, kProblem, kEqual, kDifferent };
struct DiffRow {
  const SavedItem* a = nullptr;  // null: only in the other one
  const SavedItem* b = nullptr;
  DiffVerdict verdict = DiffVerdict::kEqual;
  TensorDifference difference;  // of kEqual and kDifferent
};
std::string RenderDiff(std::string_view a, std::string_view b, const std::vector<DiffRow>& rows);

}  // namespace holdfast
