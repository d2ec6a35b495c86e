// The main function of the test programs, of which one has the tests of many files.
//
//   build/test/tests/tests_base                                          all of them
//   build/test/tests/tests_base --files=tests/base/ids_test.cc,…         those of these files
//   build/test/tests/tests_base --gtest_filter='Ids.*'                   as anywhere
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <iostream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace {

// A filter for GoogleTest that lets the tests of these files through.
std::string FilterFor(const std::vector<std::string>& files) {
  const ::testing::UnitTest& all = *::testing::UnitTest::GetInstance();
  std::vector<std::string> names;
  for (int i = 0; i < all.total_test_suite_count(); ++i) {
    const ::testing::TestSuite& suite = *all.GetTestSuite(i);
    for (int j = 0; j < suite.total_test_count(); ++j) {
      const ::testing::TestInfo& test = *suite.GetTestInfo(j);
      for (const std::string& file : files) {
        if (absl::EndsWith(test.file(), file)) {
          names.push_back(absl::StrCat(suite.name(), ".", test.name()));
        }
      }
    }
  }
  return absl::StrJoin(names, ":");
}

}  // namespace

int main(int argc, char** argv) {
  ::testing::InitGoogleMock(&argc, argv);
  std::string_view files;
  for (int i = 1; i < argc; ++i) {
    std::string_view argument = argv[i];
    if (absl::ConsumePrefix(&argument, "--files=")) {
      files = argument;
    }
  }
  // (A filter that is given goes first: a death test runs its program again with one.)
  if (!files.empty() && GTEST_FLAG_GET(filter) == "*") {
    const std::string filter = FilterFor(absl::StrSplit(files, ','));
    if (filter.empty()) {
      std::cerr << "no tests are in " << files << "\n";
      return 1;
    }
    GTEST_FLAG_SET(filter, filter);
  }
  return RUN_ALL_TESTS();
}
