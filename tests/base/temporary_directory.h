// A directory of a test's own, removed with all that is in it.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <string>

namespace holdfast {

class TemporaryDirectory {
 public:
  explicit TemporaryDirectory(const std::string& parent = "/tmp")
      : path_(parent + "/holdfast-test-XXXXXX") {
    if (::mkdtemp(path_.data()) == nullptr) {
      ADD_FAILURE() << "mkdtemp " << path_;
    }
  }
  ~TemporaryDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;

  const std::string& path() const { return path_; }
  std::string Path(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

}  // namespace holdfast
