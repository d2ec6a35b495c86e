#include "base/utf8.h"

#include <gtest/gtest.h>

namespace holdfast {
namespace {

TEST(Utf8Text, WhatIsUtf8Stays) {
  for (const std::string_view text :
       {"", "plain", "a\nb\x1b[2J\\", "Prüfung", "検証", "\U0001F600", "\xf4\x8f\xbf\xbf"}) {
    EXPECT_TRUE(IsUtf8(text)) << text;
    EXPECT_EQ(Utf8Text(text), text);
  }
  const std::string zero("a\0b", 3);
  EXPECT_EQ(Utf8Text(zero), zero);
}

TEST(Utf8Text, EveryOtherByteIsShown) {
  const std::pair<std::string_view, std::string_view> texts[] = {
      {"\xff", "\\xff"},
      {"notes-\xe4.txt", "notes-\\xe4.txt"},         // Latin-1
      {"\xc3", "\\xc3"},                             // cut short
      {"\xe6\xa4", "\\xe6\\xa4"},                    //
      {"\xe6\xa4x", "\\xe6\\xa4x"},                  //
      {"\x80ok", "\\x80ok"},                         // a continuation of nothing
      {"\xc0\xaf", "\\xc0\\xaf"},                    // overlong
      {"\xe0\x80\xaf", "\\xe0\\x80\\xaf"},           //
      {"\xf0\x80\x80\xaf", "\\xf0\\x80\\x80\\xaf"},  //
      {"\xed\xa0\x80", "\\xed\\xa0\\x80"},           // a surrogate
      {"\xf4\x90\x80\x80", "\\xf4\\x90\\x80\\x80"},  // above U+10FFFF
      {"\xf8\x88\x80\x80\x80", "\\xf8\\x88\\x80\\x80\\x80"},
      {"ü\xfcü", "ü\\xfcü"},
  };
  for (const auto& [text, shown] : texts) {
    EXPECT_FALSE(IsUtf8(text)) << shown;
    EXPECT_EQ(Utf8Text(text), shown);
    EXPECT_TRUE(IsUtf8(Utf8Text(text)));
  }
}

TEST(PrintableText, LeavesNothingThatEndsALineOrAString) {
  EXPECT_EQ(PrintableText("plain 'Prüfung' \\x41"), "plain 'Prüfung' \\x41");
  EXPECT_EQ(PrintableText(std::string_view("a\0b", 3)), "a\\x00b");
  EXPECT_EQ(PrintableText("\n\x1b[2J\x7f\xff"), "\\x0a\\x1b[2J\\x7f\\xff");
}

}  // namespace
}  // namespace holdfast
