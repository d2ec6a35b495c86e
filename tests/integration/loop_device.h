// A file system of a test's own on a loop device over a file: it fills up, is cut off, freezes, and
// nothing else on the machine notices. Root only.
//
//   LoopMount drive("xfs", 320 << 20);
//   if (!drive.mounted()) GTEST_SKIP() << drive.why();
//   drive.CutOff();      // what was not synced is lost; every call fails until Remount
//   drive.Remount();     // replays the journal
//   drive.Detach(); while (!drive.Mount()) …   // the same, where a daemon runs there
//   drive.Freeze(); drive.Thaw();
#pragma once

#include <cstdint>
#include <string>

#include "tests/base/temporary_directory.h"

namespace holdfast {

class LoopMount {
 public:
  LoopMount(const std::string& type, uint64_t bytes);
  ~LoopMount();
  LoopMount(const LoopMount&) = delete;
  LoopMount& operator=(const LoopMount&) = delete;

  bool mounted() const { return mounted_; }
  const std::string& why() const { return why_; }  // not
  std::string path() const { return directory_.Path("mount"); }
  bool CutOff();
  bool Remount();
  // While somebody has files open there: it is out of the way at once, and can be mounted again
  // when the last of them is closed.
  bool Detach();
  bool Mount();
  bool Freeze();
  bool Thaw();

 private:
  bool Run(const std::string& command);

  TemporaryDirectory directory_;
  const std::string type_;
  bool mounted_ = false;
  bool frozen_ = false;
  std::string why_;
};

}  // namespace holdfast
