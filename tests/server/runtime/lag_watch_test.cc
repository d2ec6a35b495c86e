#include "server/runtime/lag_watch.h"

#include <gmock/gmock.h>

namespace holdfast {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(LagWatchTest, ItIsToldOnceAndWhenItIsOver) {
  LagWatch watch;
  const auto look = [&](double seconds) { return watch.Look({{{"a", "nvme"}, seconds}}); };
  EXPECT_THAT(look(900), IsEmpty());
  const auto behind = look(960);
  ASSERT_EQ(behind.size(), 1u);
  EXPECT_EQ(behind[0].job, "a");
  EXPECT_TRUE(behind[0].behind);
  EXPECT_THAT(behind[0].text, HasSubstr("its newest step in nvme is 16"));
  EXPECT_THAT(look(2000), IsEmpty()) << "told";
  EXPECT_THAT(look(500), IsEmpty()) << "not yet";
  const auto well = look(450);
  ASSERT_EQ(well.size(), 1u);
  EXPECT_FALSE(well[0].behind);
  EXPECT_THAT(well[0].text, HasSubstr("nvme has caught up"));
  EXPECT_THAT(look(0), IsEmpty());
  EXPECT_EQ(look(901).size(), 1u) << "again";
}

TEST(LagWatchTest, EachTierHasItsOwnBound) {
  LagWatch watch;
  EXPECT_THAT(watch.Look({{{"a", "remote"}, 7200}, {{"a", "peer"}, 600}}), IsEmpty());
  EXPECT_EQ(watch.Look({{{"a", "remote"}, 7201}, {{"a", "peer"}, 601}}).size(), 2u);
}

TEST(LagWatchTest, WhatIsNotThereAnyMoreIsForgotten) {
  LagWatch watch;
  EXPECT_EQ(watch.Look({{{"a", "nvme"}, 1000}}).size(), 1u);
  EXPECT_THAT(watch.Look({}), IsEmpty()) << "that it ended is no catching up";
  EXPECT_EQ(watch.Look({{{"a", "nvme"}, 1000}}).size(), 1u);
}

}  // namespace
}  // namespace holdfast
