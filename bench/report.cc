#include "bench/report.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>

namespace holdfast::bench {
namespace {

nlohmann::json ToJson(const Report& report, const Row& row) {
  return {{"name", row.name},
          {"unit", row.unit},
          {"value", row.value},
          {"ceiling", row.ceiling},
          {"ratio", row.ratio},
          {"ratio_low", row.ratio_low},
          {"ratio_high", row.ratio_high},
          {"bar", row.bar},
          {"goal", row.goal},
          {"pass", report.Passes(row)},
          {"note", row.note}};
}

// How far a row is from its bar; more is better.
double Margin(const Report& report, const Row& row) {
  return row.better.value_or(report.better) == Better::kHigher
             ? row.ratio / row.bar
             : row.bar / std::max(row.ratio, 1e-12);
}

}  // namespace

bool Report::Passes(const Row& row) const {
  if (row.bar == 0) {
    return true;
  }
  return row.better.value_or(better) == Better::kHigher ? row.ratio >= row.bar
                                                        : row.ratio <= row.bar;
}

bool Report::Passes() const {
  return std::all_of(rows.begin(), rows.end(), [this](const Row& row) { return Passes(row); });
}

double Median(std::vector<double> values) {
  if (values.empty()) {
    return 0;
  }
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

void Print(const Report& report, bool json) {
  std::printf("%-40s %12s %12s %8s %8s %8s %17s  %s\n", report.name.c_str(), "value", "ceiling",
              "ratio", "bar", "goal", "spread", "");
  for (const Row& row : report.rows) {
    char ceiling[32] = "-";
    char spread[40] = "-";
    char bar[16] = "-";
    char goal[16] = "-";
    if (row.ceiling > 0) {
      std::snprintf(ceiling, sizeof ceiling, "%.2f", row.ceiling);
    }
    if (row.ratio_high > 0) {
      std::snprintf(spread, sizeof spread, "%.3f..%.3f", row.ratio_low, row.ratio_high);
    }
    if (row.bar > 0) {
      std::snprintf(bar, sizeof bar, "%.2f", row.bar);
      std::snprintf(goal, sizeof goal, "%.2f", row.goal);
    }
    const char* verdict = row.bar == 0 ? "reported" : report.Passes(row) ? "pass" : "FAIL";
    std::printf("%-40s %12.3f %12s %8.3f %8s %8s %17s  %s [%s] %s\n", row.name.c_str(), row.value,
                ceiling, row.ratio, bar, goal, spread, verdict, row.unit.c_str(), row.note.c_str());
  }
  if (!json) {
    return;
  }
  const Row* worst = nullptr;
  for (const Row& row : report.rows) {
    if (row.bar > 0 && (worst == nullptr || Margin(report, row) < Margin(report, *worst))) {
      worst = &row;
    }
  }
  if (worst == nullptr && !report.rows.empty()) {
    worst = &report.rows.front();
  }
  nlohmann::json object = worst != nullptr ? ToJson(report, *worst) : nlohmann::json::object();
  object["row"] = worst != nullptr ? worst->name : "";
  object["name"] = report.name;
  object["pass"] = report.Passes();
  for (const Row& row : report.rows) {
    object["rows"].push_back(ToJson(report, row));
  }
  std::printf("%s\n", object.dump().c_str());
}

void Progress::Advance(const std::string& doing) {
  doing_ = doing;
  ++done_;
  Draw();
}

void Progress::Draw() const {
  if (isatty(STDERR_FILENO) == 0 || total_ <= 0) {
    return;
  }
  constexpr int kWidth = 30;
  const int filled = std::min(kWidth, done_ * kWidth / total_);
  std::fprintf(stderr, "\r%s [%.*s%*s] %d/%d %-30.30s", what_.c_str(), filled,
               "##############################", kWidth - filled, "", done_, total_,
               doing_.c_str());
}

Progress::~Progress() {
  if (isatty(STDERR_FILENO) != 0) {
    std::fprintf(stderr, "\r%100s\r", "");
  }
}

}  // namespace holdfast::bench
