#include "client-lib/src/json_check.h"

#include <gtest/gtest.h>

#include <string>

namespace holdfast::client {
namespace {

TEST(JsonCheck, AcceptsWhatIsJson) {
  for (const char* text : {"0", "-0.5e+10", "\"\"", "true", " null ", "[]", "{}", "[[],{}]",
                           R"({"a":[1,2,{"b":null}],"c":"\u00e9\n\\\""})", "[1 , 2\n,\t3]",
                           "{\"\":{\"\":[]}}", "\"\xc3\xa9\"", "1E5"}) {
    EXPECT_TRUE(CheckJson(text).ok()) << text << ": " << CheckJson(text).ToString();
  }
}

TEST(JsonCheck, RefusesWhatIsNot) {
  for (const char* text :
       {"",       " ",    "nul",   "01",       "1.",       ".5",    "+1",         "1e",
        "-",      "[1,]", "[1 2]", "{\"a\"}",  "{\"a\":}", "{a:1}", "{\"a\":1,}", "[",
        "{",      "]",    "[}",    "{]",       "[1]]",     "\"",    "\"\\x\"",    "\"\\u12g4\"",
        "\"\n\"", "'a'",  "NaN",   "Infinity", "\"\xff\"", "1 1"}) {
    const Status status = CheckJson(text);
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << text;
  }
}

TEST(JsonCheck, NestingHasALimitAndNeedsNoStack) {
  const auto nested = [](size_t depth) {
    return std::string(depth, '[') + std::string(depth, ']');
  };
  EXPECT_TRUE(CheckJson(nested(kJsonDepthMax)).ok());
  EXPECT_FALSE(CheckJson(nested(kJsonDepthMax + 2)).ok());
  EXPECT_FALSE(CheckJson(std::string(10'000'000, '[')).ok());
}

TEST(JsonCheck, SaysWhere) {
  EXPECT_NE(CheckJson("[1,\n2 3]").message().find("byte 6"), std::string::npos);
}

}  // namespace
}  // namespace holdfast::client
