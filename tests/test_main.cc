// The main function of the test programs, of which one has the tests of many files.
//
//   build/test/tests/tests_base                                          all of them
//   build/test/tests/tests_base --files=tests/base/ids_test.cc,…         those of these files
//   build/test/tests/tests_base --gtest_filter='Ids.*'                   as anywhere
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <iostream>
#include <sstream>
#include <string>
#include <string_view>

namespace {

// A filter for GoogleTest that lets the tests of a file through: whole suites by their names, since
// it shows the filter.
std::string FilterFor(std::string_view file) {
  const ::testing::UnitTest& all = *::testing::UnitTest::GetInstance();
  std::string filter;
  for (int i = 0; i < all.total_test_suite_count(); ++i) {
    const ::testing::TestSuite& suite = *all.GetTestSuite(i);
    std::string tests;
    int count = 0;
    for (int j = 0; j < suite.total_test_count(); ++j) {
      const ::testing::TestInfo& test = *suite.GetTestInfo(j);
      if (std::string_view(test.file()).ends_with(file)) {
        tests += std::string(suite.name()) + "." + test.name() + ":";
        ++count;
      }
    }
    filter += count == suite.total_test_count() ? std::string(suite.name()) + ".*:" : tests;
  }
  return filter;
}

}  // namespace

int main(int argc, char** argv) {
  ::testing::InitGoogleMock(&argc, argv);
  constexpr std::string_view kFiles = "--files=";
  std::string filter;
  for (int i = 1; i < argc; ++i) {
    if (std::string_view(argv[i]).substr(0, kFiles.size()) != kFiles) {
      std::cerr << "unknown argument " << argv[i] << "\n";
      return 2;
    }
    std::istringstream files(argv[i] + kFiles.size());
    for (std::string file; std::getline(files, file, ',');) {
      const std::string tests = FilterFor(file);
      if (tests.empty()) {
        std::cerr << "no tests are in " << file << "\n";
        return 1;
      }
      filter += tests;
    }
  }
  // (A filter that is given goes first: a death test runs its program again with one.)
  if (!filter.empty() && GTEST_FLAG_GET(filter) == "*") {
    GTEST_FLAG_SET(filter, filter);
  }
  return RUN_ALL_TESTS();
}
