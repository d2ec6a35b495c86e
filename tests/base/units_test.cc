#include "base/units.h"

#include <gtest/gtest.h>

namespace holdfast {
namespace {

using std::chrono::hours;
using std::chrono::milliseconds;
using std::chrono::minutes;
using std::chrono::seconds;

TEST(UnitsTest, RoundUp) {
  EXPECT_EQ(RoundUp(0, 8), 0u);
  EXPECT_EQ(RoundUp(1, 8), 8u);
  EXPECT_EQ(RoundUp(8, 8), 8u);
}

TEST(UnitsTest, FormatBytes) {
  EXPECT_EQ(FormatBytes(0), "0 B");
  EXPECT_EQ(FormatBytes(1), "1 B");
  EXPECT_EQ(FormatBytes(1023), "1023 B");
  EXPECT_EQ(FormatBytes(1024), "1 KiB");
  EXPECT_EQ(FormatBytes(1536), "1.5 KiB");
  EXPECT_EQ(FormatBytes(kMiB - 1), "1 MiB");  // never "1024 KiB"
  EXPECT_EQ(FormatBytes(3 * kGiB / 2), "1.5 GiB");
  EXPECT_EQ(FormatBytes(UINT64_MAX), "16 EiB");
}

TEST(UnitsTest, FormatRate) {
  EXPECT_EQ(FormatRate(9'800'000'000, seconds(1)), "9.8 GB/s");
  EXPECT_EQ(FormatRate(500, seconds(1)), "500 B/s");
  EXPECT_EQ(FormatRate(0, seconds(1)), "0 B/s");
  EXPECT_EQ(FormatRate(1000, milliseconds(500)), "2 kB/s");
  EXPECT_EQ(FormatRate(1000, Duration(0)), "no time");
  EXPECT_EQ(FormatRate(1000, Duration(-5)), "no time");
}

TEST(UnitsTest, FormatDuration) {
  EXPECT_EQ(FormatDuration(Duration(0)), "0 ns");
  EXPECT_EQ(FormatDuration(Duration(850)), "850 ns");
  EXPECT_EQ(FormatDuration(Duration(999'999)), "1 ms");
  EXPECT_EQ(FormatDuration(Duration(12'300'000)), "12.3 ms");
  EXPECT_EQ(FormatDuration(milliseconds(4200)), "4.2 s");
  EXPECT_EQ(FormatDuration(milliseconds(59'900)), "59.9 s");
  EXPECT_EQ(FormatDuration(milliseconds(59'990)), "1 min 0 s");
  EXPECT_EQ(FormatDuration(seconds(185)), "3 min 5 s");
  EXPECT_EQ(FormatDuration(minutes(125)), "2 h 5 min");
  EXPECT_EQ(FormatDuration(hours(51)), "2 d 3 h");
  EXPECT_EQ(FormatDuration(milliseconds(-250)), "-250 ms");
  EXPECT_EQ(FormatDuration(Duration::min()), "-106752 d 0 h");
}

TEST(UnitsTest, ParseBytesAccepts) {
  const std::pair<const char*, uint64_t> cases[] = {
      {"0", 0},
      {"4096", 4096},
      {"4096B", 4096},
      {" 4096 B ", 4096},
      {"2GiB", 2 * kGiB},
      {"512 MiB", 512 * kMiB},
      {"1.5GiB", 3 * kGiB / 2},
      {"0.5KiB", 512},
      {"10GB", 10'000'000'000},
      {"0.1GB", 100'000'000},
      {"1e9", 1'000'000'000},
      {"1E9", 1'000'000'000},
      {"1.5e3", 1500},
      {"15e-1kB", 1500},
      {"1EiB", uint64_t{1} << 60},
      {"18446744073709551615", UINT64_MAX},
      {"0.00000000000000000001e20", 1},
      {"16777215.99999904632568359375TiB", UINT64_MAX - 1048575},
      {"0e99", 0},
  };
  for (const auto& [text, bytes] : cases) {
    const absl::StatusOr<uint64_t> parsed = ParseBytes(text);
    ASSERT_TRUE(parsed.ok()) << text << ": " << parsed.status();
    EXPECT_EQ(*parsed, bytes) << text;
  }
}

TEST(UnitsTest, ParseBytesRefuses) {
  for (const char* text : {"",
                           " ",
                           "GiB",
                           "-1",
                           "+1",
                           "1.",
                           ".",
                           "1..2",
                           "1.5",
                           "0.3KiB",
                           "1e",
                           "1e400",
                           "1e-1",
                           "2 gib",
                           "2G",
                           "16EiB",
                           "18446744073709551616",
                           "1e20",
                           "1 2",
                           "0x10",
                           "1,5GiB",
                           "nan",
                           "inf",
                           "99999999999999999999999999999999999999999999999999999999"}) {
    const absl::StatusOr<uint64_t> parsed = ParseBytes(text);
    EXPECT_EQ(parsed.status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
  EXPECT_LT(ParseBytes(std::string(1 << 20, '1')).status().message().size(), 400u);
}

TEST(UnitsTest, ParseBytesReadsWhatFormatBytesWrites) {
  for (const uint64_t bytes : {uint64_t{0}, uint64_t{1023}, kKiB, 3 * kMiB / 2, 7 * kGiB}) {
    EXPECT_EQ(*ParseBytes(FormatBytes(bytes)), bytes);
  }
}

TEST(UnitsTest, ParseDuration) {
  EXPECT_EQ(*ParseDuration("250ms"), milliseconds(250));
  EXPECT_EQ(*ParseDuration("10s"), seconds(10));
  EXPECT_EQ(*ParseDuration("1.5 s"), milliseconds(1500));
  EXPECT_EQ(*ParseDuration("5min"), minutes(5));
  EXPECT_EQ(*ParseDuration("1h"), hours(1));
  EXPECT_EQ(*ParseDuration("2d"), hours(48));
  EXPECT_EQ(*ParseDuration("7us"), Duration(7000));
  EXPECT_EQ(*ParseDuration("0"), Duration(0));
  EXPECT_EQ(*ParseDuration("9223372036854775807ns"), Duration::max());
}

TEST(UnitsTest, ParseDurationRefuses) {
  for (const char* text :
       {"", "10", "-1s", "1.5ns", "9223372036854775808ns", "1e300s", "5 minutes", "ms"}) {
    EXPECT_EQ(ParseDuration(text).status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
}

}  // namespace
}  // namespace holdfast
