#include "ckptctl/way_out.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>

#include "base/status.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;

std::string WayOutOf(const absl::Status& failed) {
  return WayOutOfDirectory(failed, 3 << 20, "the same command goes on");
}

std::string WayOutOf(int error) {
  return WayOutOf(Annotate(ErrnoStatus(error, "open", "/backup/x"), "step 3"));
}

TEST(WayOut, WhatTheDirectoryCannotTakeIsToldApart) {
  for (const int full : {ENOSPC, EDQUOT}) {
    EXPECT_EQ(WayOutOf(full), "; make room for 3 MiB there, and the same command goes on") << full;
  }
  EXPECT_THAT(WayOutOf(EFBIG), HasSubstr("ulimit -f"));
  EXPECT_THAT(WayOutOf(EROFS), HasSubstr("mounted read-only"));
  for (const int in_the_way : {ENOTDIR, EISDIR, EEXIST}) {
    EXPECT_THAT(WayOutOf(in_the_way), HasSubstr("something else has that name")) << in_the_way;
  }
  EXPECT_THAT(WayOutOf(ENAMETOOLONG), HasSubstr("shorter path"));
}

TEST(WayOut, WhatIsNotTheDirectorysFaultIsLeftToOthers) {
  EXPECT_EQ(WayOutOf(EIO), "");
  EXPECT_EQ(WayOutOf(EMFILE), "");  // of the same code as ENOSPC
  EXPECT_EQ(WayOutOf(absl::AlreadyExistsError("another command writes there")), "");
  EXPECT_EQ(WayOutOf(absl::CancelledError("interrupted")), "");
}

}  // namespace
}  // namespace holdfast
