#include "server/problems.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"

namespace holdfast {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

TEST(Problems, WhatASourceDoesNotSayAnyMoreIsOver) {
  Problems problems;
  problems.Add("for good");
  problems.Add("for good");
  EXPECT_THAT(problems.Now("d0", {"a", "b", "a"}), ElementsAre("a", "b"));
  EXPECT_THAT(problems.Now("d1", {"b"}), ElementsAre("b"));
  EXPECT_THAT(problems.All(), ElementsAre("for good", "a", "b"));
  EXPECT_THAT(problems.Now("d0", {"b", "c"}), ElementsAre("c"));
  EXPECT_THAT(problems.All(), ElementsAre("for good", "b", "c"));
  EXPECT_THAT(problems.Now("d0", {}), IsEmpty());
  EXPECT_THAT(problems.All(), ElementsAre("for good", "b")) << "the other one says so still";
  problems.Over("d1");
  EXPECT_THAT(problems.All(), ElementsAre("for good"));
  EXPECT_THAT(problems.Now("d0", {"a"}), ElementsAre("a")) << "it is back";
}

TEST(Problems, TheLastOneSaysThatThereAreMore) {
  Problems problems;
  for (size_t i = 0; i < kProblemsMax; ++i) {
    problems.Add(absl::StrCat(i));
  }
  EXPECT_EQ(problems.All().back(), absl::StrCat(kProblemsMax - 1));
  problems.Now("d0", {"one more"});
  EXPECT_THAT(problems.All(), SizeIs(kProblemsMax));
  EXPECT_EQ(problems.All().back(), "there are more problems than are shown");
  problems.Over("d0");
  EXPECT_EQ(problems.All().back(), absl::StrCat(kProblemsMax - 1));
  problems.Add("one more");
  EXPECT_EQ(problems.All().back(), "there are more problems than are shown");
}

}  // namespace
}  // namespace holdfast
