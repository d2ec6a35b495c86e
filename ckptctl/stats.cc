#include <algorithm>
#include <nlohmann/json.hpp>
#include <ostream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status.h"
#include "base/units.h"
#include "ckptctl/ask.h"
#include "ckptctl/commands.h"
#include "ckptctl/json.h"
#include "ckptctl/open_step.h"
#include "ckptctl/progress.h"
#include "ckptctl/render.h"
#include "ckptctl/tensor_choice.h"
#include "ckptctl/tensor_stats.h"
#include "ckptctl/tensor_views.h"
#include "ckptctl/text.h"

namespace holdfast {
namespace {

bool IsBad(const StatsRow& row) {
  return !row.item->problem.empty() || row.stats.nan > 0 || row.stats.inf > 0;
}

std::string Shown(const std::optional<ElementNumber>& number) {
  if (!number) {
    return "-";
  }
  return std::visit(
      [](auto value) -> std::string {
        if constexpr (std::is_same_v<decltype(value), double>) {
          return absl::StrFormat("%.6g", value);
        } else {
          return absl::StrCat(value);
        }
      },
      *number);
}

nlohmann::ordered_json ToJson(const std::optional<ElementNumber>& number) {
  return number ? std::visit([](auto value) { return nlohmann::ordered_json(value); }, *number)
                : nlohmann::ordered_json(nullptr);
}

nlohmann::ordered_json RowToJson(const StatsRow& row) {
  const SavedItem& item = *row.item;
  nlohmann::ordered_json json;
  json["name"] = item.name;
  json["rank"] = item.ranks.empty() ? nlohmann::ordered_json(nullptr)
                                    : nlohmann::ordered_json(item.ranks.front());
  json["dtype"] = TypeName(item.type);
  json["shape"] = item.shape;
  json["problem"] = item.problem;
  json["elements"] = item.elements;
  json["nan"] = row.stats.nan;
  json["inf"] = row.stats.inf;
  json["zeros"] = row.stats.zeros;
  json["min"] = ToJson(row.stats.min);
  json["max"] = ToJson(row.stats.max);
  json["mean"] = row.stats.mean ? nlohmann::ordered_json(*row.stats.mean) : nullptr;
  json["abs_max"] = ToJson(row.stats.abs_max);
  return json;
}

// Each chosen tensor, read and looked at.
absl::StatusOr<std::vector<StatsRow>> LookAt(const Context& context,
                                             const StatsArguments& arguments,
                                             const OpenedStep& step) {
  const std::vector<SavedItem>& items = step.items();
  absl::StatusOr<std::vector<size_t>> chosen =
      ChooseTensors(items, {arguments.only, arguments.tensor});
  if (!chosen.ok()) {
    return Annotate(chosen.status(), NameOfStep(step.reader(), arguments.step.job));
  }
  std::vector<StatsRow> rows;
  std::vector<size_t> readable;
  std::vector<size_t> row_of;
  std::vector<StatsOf> stats;
  uint64_t total = 0;
  for (const size_t i : *chosen) {
    rows.push_back({&items[i], {}});
    if (items[i].problem.empty()) {
      readable.push_back(i);
      row_of.push_back(rows.size() - 1);
      stats.emplace_back(items[i].type);
      total += items[i].bytes;
    }
  }
  TensorBytes tensors(items, readable);
  HF_ASSIGN_OR_RETURN(WindowReader windows, step.Read(tensors.Ranges()));
  ProgressLine line(context, Duration(0));
  const MonotonicTime begin = context.clock->Now();
  uint64_t done = 0;
  while (true) {
    HF_ASSIGN_OR_RETURN(const std::span<const std::byte> window, windows.Next());
    if (window.empty()) {
      break;
    }
    tensors.Give(window, [&](size_t n, std::span<const std::byte> some) { stats[n].Add(some); });
    done += window.size();
    line.Draw([&] {
      return absl::StrCat(
          "stats ", EscapeText(arguments.step.job), " ",
          ByteProgress(done, total, (context.clock->Now() - begin) / std::chrono::milliseconds(1)));
    });
  }
  for (size_t n = 0; n < stats.size(); ++n) {
    rows[row_of[n]].stats = stats[n].Finish();
  }
  return rows;
}

}  // namespace

std::string NumberText(const std::optional<double>& number) {
  return number ? absl::StrFormat("%.6g", *number) : "-";
}

std::string RenderStats(std::string_view step, std::vector<StatsRow> rows) {
  uint64_t elements = 0;
  uint64_t nan = 0;
  uint64_t inf = 0;
  for (const StatsRow& row : rows) {
    elements += row.item->elements;
    nan += row.stats.nan;
    inf += row.stats.inf;
  }
  const auto bad = static_cast<size_t>(std::count_if(rows.begin(), rows.end(), [](const auto& row) {
    return row.stats.nan > 0 || row.stats.inf > 0;
  }));
  std::string out = absl::StrCat(
      std::string(step), ": ", Count(rows.size(), "tensor", "tensors"), ", ",
      Count(elements, "element", "elements"), "; ",
      bad == 0 ? "no NaN, no Inf"
               : absl::StrCat(nan, " NaN and ", inf, " Inf in ", Count(bad, "tensor", "tensors")),
      "\n");
  std::stable_sort(rows.begin(), rows.end(),
                   [](const StatsRow& a, const StatsRow& b) { return IsBad(a) && !IsBad(b); });
  Table table({{"NAN", Align::kRight},
               {"INF", Align::kRight},
               {"ZEROS", Align::kRight},
               {"MIN", Align::kRight},
               {"MAX", Align::kRight},
               {"MEAN", Align::kRight},
               {"ABS MAX", Align::kRight},
               {"DTYPE", Align::kLeft},
               {"SHAPE", Align::kLeft},
               {"TENSOR", Align::kLeft}});
  std::string problems;
  for (size_t i = 0; i < rows.size() && i < kCopiesShown; ++i) {
    const auto& [item, stats] = rows[i];
    if (!item->problem.empty()) {
      absl::StrAppend(&problems, "PROBLEM: ", EscapeText(item->problem), "\n");
      continue;
    }
    table.AddRow({absl::StrCat(stats.nan), absl::StrCat(stats.inf), absl::StrCat(stats.zeros),
                  Shown(stats.min), Shown(stats.max), NumberText(stats.mean), Shown(stats.abs_max),
                  TypeName(item->type), ShapeText(item->shape), ShownName(*item)});
  }
  absl::StrAppend(&out, table.empty() ? "" : table.Render("  "), problems);
  if (rows.size() > kCopiesShown) {
    absl::StrAppend(&out, "… and ", rows.size() - kCopiesShown,
                    " more; --tensor chooses, --json has all\n");
  }
  return out;
}

ExitCode RunStats(const Context& context, const StatsArguments& arguments) {
  const absl::StatusOr<OpenedStep> step = OpenStep(context, arguments.step);
  if (!step.ok()) {
    return ReportError(context, step.status());
  }
  const absl::StatusOr<std::vector<StatsRow>> rows = LookAt(context, arguments, *step);
  if (!rows.ok()) {
    return ReportError(context, rows.status());
  }
  const std::string& job = arguments.step.job;
  if (!context.json) {
    *context.out << RenderStats(EscapeText(NameOfStep(step->reader(), job)), *rows);
    return ExitCode::kOk;
  }
  nlohmann::ordered_json json;
  json["job"] = job;
  json["step"] = step->reader().step();
  json["attempt"] = step->reader().attempt();
  uint64_t nan = 0;
  uint64_t inf = 0;
  nlohmann::ordered_json tensors = nlohmann::ordered_json::array();
  for (const StatsRow& row : *rows) {
    nan += row.stats.nan;
    inf += row.stats.inf;
    tensors.push_back(RowToJson(row));
  }
  json["nan"] = nan;
  json["inf"] = inf;
  json["tensors"] = std::move(tensors);
  *context.out << DumpJson(json) << "\n";
  return ExitCode::kOk;
}

}  // namespace holdfast
