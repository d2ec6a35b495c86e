#include "base/private_place.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "tests/base/temporary_directory.h"

namespace holdfast {
namespace {

class PrivatePlaceTest : public testing::Test {
 protected:
  PrivatePlaceTest() {
    std::filesystem::create_directory(place_);
    ::chmod(place_.c_str(), 0700);
    std::ofstream(place_ + "/ckptd.sock") << "x";
    ::setenv("HOLDFAST_PRIVATE_DIR", place_.c_str(), 1);
  }
  ~PrivatePlaceTest() override { ::unsetenv("HOLDFAST_PRIVATE_DIR"); }

  TemporaryDirectory directory_;
  const std::string place_ = directory_.Path("place");
};

TEST_F(PrivatePlaceTest, IsNamedAfterTheUser) {
  EXPECT_EQ(PrivatePlace(), place_);
  for (const char* unset : {"", "unset"}) {
    *unset == '\0' ? ::setenv("HOLDFAST_PRIVATE_DIR", "", 1) : ::unsetenv("HOLDFAST_PRIVATE_DIR");
    EXPECT_EQ(PrivatePlace(), "/dev/shm/holdfast-private-" + std::to_string(::geteuid()));
  }
}

TEST_F(PrivatePlaceTest, GivesSocketsThatAreThere) {
  EXPECT_EQ(PrivateSocket("ckptd.sock"), place_ + "/ckptd.sock");
  EXPECT_EQ(PrivateSocket("admin.sock"), "");
}

TEST_F(PrivatePlaceTest, IsNotBelievedWhenOthersCanWriteThere) {
  for (const mode_t mode : {0720, 0702, 0777, 01777}) {
    ASSERT_EQ(::chmod(place_.c_str(), mode), 0);
    EXPECT_EQ(PrivateSocket("ckptd.sock"), "") << std::oct << mode;
  }
  ASSERT_EQ(::chmod(place_.c_str(), 0755), 0);
  EXPECT_NE(PrivateSocket("ckptd.sock"), "");
}

TEST_F(PrivatePlaceTest, IsNotBelievedWhenItIsALink) {
  const std::string link = directory_.Path("link");
  std::filesystem::create_directory_symlink(place_, link);
  ::setenv("HOLDFAST_PRIVATE_DIR", link.c_str(), 1);
  EXPECT_EQ(PrivateSocket("ckptd.sock"), "");
}

TEST_F(PrivatePlaceTest, IsNotBelievedWhenItIsSomebodyElses) {
  if (::geteuid() != 0) {
    GTEST_SKIP() << "only root can give a directory away";
  }
  ASSERT_EQ(::chown(place_.c_str(), 12'345, 12'345), 0);
  EXPECT_EQ(PrivateSocket("ckptd.sock"), "");
}

}  // namespace
}  // namespace holdfast
