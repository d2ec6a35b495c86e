#include "ckptctl/text.h"

#include <gtest/gtest.h>

namespace holdfast {
namespace {

TEST(EscapeText, LeavesPrintableTextAlone) {
  EXPECT_EQ(EscapeText("model.layers.0/weight [fp8]"), "model.layers.0/weight [fp8]");
  EXPECT_EQ(EscapeText("größe 重み 𝛼"), "größe 重み 𝛼");
  EXPECT_EQ(EscapeText(""), "");
}

TEST(EscapeText, TakesTerminalSequencesApart) {
  EXPECT_EQ(EscapeText("lm\x1b[2Jhead"), "lm\\x1b[2Jhead");
  EXPECT_EQ(EscapeText("a\nb\tc\rd"), "a\\nb\\tc\\rd");
  EXPECT_EQ(EscapeText(std::string_view("a\0b", 3)), "a\\x00b");
  EXPECT_EQ(EscapeText("\x7f"), "\\x7f");
  EXPECT_EQ(EscapeText("\xc2\x9b"
                       "31m"),
            "\\u{9b}31m");  // CSI as one character
  EXPECT_EQ(EscapeText("\x9b"
                       "31m"),
            "\\x9b31m");  // and as a raw byte
}

TEST(EscapeText, IsUnambiguous) {
  EXPECT_EQ(EscapeText("a\\nb"), "a\\\\nb");
}

TEST(EscapeText, ShowsWhatIsInvisibleOrTurnsTextAround) {
  EXPECT_EQ(EscapeText("a\u202eb"), "a\\u{202e}b");
  EXPECT_EQ(EscapeText("a\u200bb"), "a\\u{200b}b");
  EXPECT_EQ(EscapeText("\ufeffx"), "\\u{feff}x");
  EXPECT_EQ(EscapeText("\U000e0041"), "\\u{e0041}");
  EXPECT_EQ(EscapeText("\U00100000"), "\\u{100000}");
}

TEST(EscapeText, TellsBytesThatAreNotUtf8) {
  EXPECT_EQ(EscapeText("\xff"), "\\xff");
  EXPECT_EQ(EscapeText("\xc0\xaf"), "\\xc0\\xaf");                    // overlong '/'
  EXPECT_EQ(EscapeText("\xe0\x80\xaf"), "\\xe0\\x80\\xaf");           // overlong in three
  EXPECT_EQ(EscapeText("\xed\xa0\x80"), "\\xed\\xa0\\x80");           // surrogate
  EXPECT_EQ(EscapeText("\xf4\x90\x80\x80"), "\\xf4\\x90\\x80\\x80");  // above U+10FFFF
  EXPECT_EQ(EscapeText("\xe2\x82"), "\\xe2\\x82");                    // cut short
  EXPECT_EQ(EscapeText("\xe2(a"), "\\xe2(a");
}

TEST(EscapeText, CutsWhatIsTooWide) {
  EXPECT_EQ(EscapeText("abcdef", 6), "abcdef");
  EXPECT_EQ(EscapeText("abcdefg", 6), "abcdef…(7 bytes)");
  EXPECT_EQ(EscapeText(std::string(10'000, 'x'), 3), "xxx…(10000 bytes)");
  EXPECT_EQ(EscapeText("abc\x1b", 6), "abc…(4 bytes)");  // never half an escape
  EXPECT_EQ(EscapeText("重み", 3), "重…(6 bytes)");
  // A letter below a tower of marks is cut too.
  std::string tower = "a";
  for (int i = 0; i < 100; ++i) {
    tower += "\u0301";
  }
  EXPECT_EQ(EscapeText(tower, 2), "a\u0301…(201 bytes)");
}

TEST(DisplayWidth, CountsColumns) {
  EXPECT_EQ(DisplayWidth("abc"), 3u);
  EXPECT_EQ(DisplayWidth("重み"), 4u);
  EXPECT_EQ(DisplayWidth("e\u0301"), 1u);
  EXPECT_EQ(DisplayWidth("…"), 1u);
  EXPECT_EQ(DisplayWidth(""), 0u);
}

}  // namespace
}  // namespace holdfast
