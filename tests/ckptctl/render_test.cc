#include "ckptctl/render.h"

#include <gtest/gtest.h>

namespace holdfast {
namespace {

constexpr int64_t kSecond = 1000;
constexpr int64_t kMinute = 60 * kSecond;
constexpr int64_t kHour = 60 * kMinute;
constexpr int64_t kDay = 24 * kHour;

TEST(FormatAge, TakesTheTwoLargestUnits) {
  EXPECT_EQ(FormatAge(-5), "0 s");
  EXPECT_EQ(FormatAge(0), "0 s");
  EXPECT_EQ(FormatAge(3), "0.1 s");
  EXPECT_EQ(FormatAge(999), "0.9 s");
  EXPECT_EQ(FormatAge(1000), "1 s");
  EXPECT_EQ(FormatAge(59'999), "59 s");
  EXPECT_EQ(FormatAge(kMinute), "1 min");
  EXPECT_EQ(FormatAge(3 * kMinute + 5 * kSecond), "3 min 5 s");
  EXPECT_EQ(FormatAge(3 * kHour + 12 * kMinute + 59 * kSecond), "3 h 12 min");
  EXPECT_EQ(FormatAge(5 * kDay + 2 * kHour), "5 d 2 h");
  EXPECT_EQ(FormatAge(INT64_MIN), "0 s");
  EXPECT_EQ(FormatAge(INT64_MAX), "106751991167 d 7 h");
}

TEST(FormatAgo, KnowsNoTimeAndTheFuture) {
  EXPECT_EQ(FormatAgo(0, 1'000'000), "");
  EXPECT_EQ(FormatAgo(-1, 1'000'000), "");
  EXPECT_EQ(FormatAgo(1'000'001, 1'000'000), "just now");
  EXPECT_EQ(FormatAgo(999'500, 1'000'000), "just now");
  EXPECT_EQ(FormatAgo(940'000, 1'000'000), "1 min ago");
}

TEST(FormatTime, IsUtc) {
  EXPECT_EQ(FormatTime(1'714'564'800'000), "2024-05-01 12:00:00 UTC");
  EXPECT_EQ(FormatTime(0), "unknown time");
  EXPECT_EQ(FormatTime(INT64_MAX), "unknown time");
  EXPECT_EQ(FormatTime(INT64_MIN), "unknown time");
}

TEST(Bar, IsFullOnlyWhenAllIsDone) {
  EXPECT_EQ(Bar(0, 10, 4), "[----]");
  EXPECT_EQ(Bar(5, 10, 4), "[##--]");
  EXPECT_EQ(Bar(9'999, 10'000, 4), "[###-]");
  EXPECT_EQ(Bar(10, 10, 4), "[####]");
  EXPECT_EQ(Bar(11, 10, 4), "[####]");
  EXPECT_EQ(Bar(0, 0, 4), "[----]");
  EXPECT_EQ(Bar(UINT64_MAX - 1, UINT64_MAX, 4), "[###-]");
  EXPECT_EQ(Bar(UINT64_MAX / 2, UINT64_MAX, 4), "[#---]");
}

TEST(Percent, RoundsDown) {
  EXPECT_EQ(Percent(0, 0), 100u);
  EXPECT_EQ(Percent(1, 3), 33u);
  EXPECT_EQ(Percent(999, 1000), 99u);
  EXPECT_EQ(Percent(7, 7), 100u);
  EXPECT_EQ(Percent(UINT64_MAX, 1), 100u);
}

TEST(Count, KnowsOne) {
  EXPECT_EQ(Count(1, "rank", "ranks"), "1 rank");
  EXPECT_EQ(Count(0, "rank", "ranks"), "0 ranks");
  EXPECT_EQ(Count(2, "rank", "ranks"), "2 ranks");
}

TEST(Table, AlignsByDisplayWidth) {
  Table table({{"STEP", Align::kRight}, {"STATE", Align::kLeft}, {"IN", Align::kLeft}});
  EXPECT_TRUE(table.empty());
  table.AddRow({"900", "committed", "memory"});
  table.AddRow({"12345", "重み", ""});
  EXPECT_EQ(table.Render("  "),
            "   STEP  STATE      IN\n"
            "    900  committed  memory\n"
            "  12345  重み\n");
  EXPECT_EQ(table.RenderWithoutTitles(""),
            "  900  committed  memory\n"
            "12345  重み\n");
}

TEST(Table, TakesShortRows) {
  Table table({{"A", Align::kLeft}, {"B", Align::kLeft}});
  table.AddRow({"x"});
  EXPECT_EQ(table.Render(""), "A  B\nx\n");
}

}  // namespace
}  // namespace holdfast
