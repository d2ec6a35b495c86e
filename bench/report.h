// How a benchmark tells its figures: a progress bar while it runs, a table, and with --json one
// object on the last line.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace holdfast::bench {

enum class Better { kHigher, kLower };

struct Row {
  std::string name;
  std::string unit;
  double value = 0;
  double ceiling = 0;  // 0: none; the value itself is compared with bar and goal
  double ratio = 0;    // value against ceiling, or the value
  double bar = 0;      // 0: reported only
  double goal = 0;
  double ratio_low = 0;  // the worst and best round's ratio: the spread
  double ratio_high = 0;
  std::string note{};
  std::optional<Better> better{};  // unless it is the report's
};

struct Report {
  std::string name;
  Better better = Better::kHigher;
  std::vector<Row> rows;

  bool Passes(const Row& row) const;
  bool Passes() const;
};

double Median(std::vector<double> values);

// Prints the table; with `json`, the object as the last line (of the worst row that has a bar; all
// rows inside).
void Print(const Report& report, bool json);

// A line on stderr that is redrawn, when stderr is a terminal.
class Progress {
 public:
  Progress(std::string what, int total) : what_(std::move(what)), total_(total) { Draw(); }
  ~Progress();
  void Advance(const std::string& doing);

 private:
  void Draw() const;
  std::string what_;
  std::string doing_;
  int total_;
  int done_ = 0;
};

}  // namespace holdfast::bench
