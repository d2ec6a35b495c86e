// What people read: ages, times, bars and tables. Pure and thread-safe; texts that come from
// elsewhere go through EscapeText (ckptctl/text.h) before they come here.
//
//   Table table({{"STEP", Align::kRight}, {"STATE", Align::kLeft}});
//   table.AddRow({"900", "committed"});
//   out << table.Render("  ");
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace holdfast {

// "0.4 s", "12 s", "3 min 5 s", "3 h 12 min", "5 d 2 h". A negative age (a clock was set back) is
// "0 s".
std::string FormatAge(int64_t ms);

// "12 s ago"; "just now" below one second; "" when there is no time (unix_ms 0).
std::string FormatAgo(int64_t unix_ms, int64_t now_unix_ms);

// "2024-05-01 12:00:00 UTC"; "unknown time" outside the years 1970 to 9999.
std::string FormatTime(int64_t unix_ms);

// "[#####-----]", `cells` wide inside. Rounds down: full only when it is. A part above the whole is
// full.
std::string Bar(uint64_t part, uint64_t whole, size_t cells);
uint32_t Percent(uint64_t part, uint64_t whole);  // 0 to 100, rounded down; of nothing: 100

// "[####----] 50%  1 GiB of 2 GiB  1 GB/s  1 s left": how far a command is that reads or writes so
// many bytes.
std::string ByteProgress(uint64_t done, uint64_t total, int64_t elapsed_ms);

// "1 rank", "2 ranks".
std::string Count(uint64_t n, std::string_view one, std::string_view many);

enum class Align { kLeft, kRight };
struct TableColumn {
  std::string title;
  Align align = Align::kLeft;
};

// Rows of equal length; columns as wide as their widest cell, two blanks between, no blanks at the
// end of a line.
class Table {
 public:
  explicit Table(std::vector<TableColumn> columns) : columns_(std::move(columns)) {}
  void AddRow(std::vector<std::string> cells);
  bool empty() const { return rows_.empty(); }
  std::string Render(std::string_view indent) const;  // with the titles
  std::string RenderWithoutTitles(std::string_view indent) const;

 private:
  std::string Lines(std::string_view indent, bool titles) const;

  std::vector<TableColumn> columns_;
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace holdfast
