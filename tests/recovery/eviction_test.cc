#include "recovery/eviction.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <vector>

namespace holdfast {
namespace {

constexpr Duration kHour = std::chrono::hours(1);
constexpr MonotonicTime kNow{std::chrono::nanoseconds(100 * kHour).count()};
constexpr uint32_t kMe = 1000;
constexpr uint32_t kOther = 2000;

JobUuid Job(uint8_t number) {
  JobUuid job;
  job.bytes[0] = number;
  return job;
}

MemoryJob Living(uint8_t number, uint32_t uid, uint64_t bytes = 10) {
  return {Job(number), uid, bytes, true};
}

MemoryJob Ended(uint8_t number, uint32_t uid, Duration ago, bool left, uint64_t bytes = 10) {
  MemoryJob job{Job(number), uid, bytes};
  job.left = left;
  job.ended = {kNow.ns - ago.count()};
  return job;
}

std::vector<EvictionAsk> Order(std::vector<MemoryJob> jobs,
                               EvictionRules rules = {1000, 24 * kHour},
                               bool own_jobs_only = false) {
  return EvictionOrder({Job(1), kMe, own_jobs_only}, jobs, rules, kNow);
}

// In the order in which last copies are asked for, but for the wishing job's own.
std::vector<JobUuid> Last(const std::vector<EvictionAsk>& order) {
  std::vector<JobUuid> last;
  for (const EvictionAsk& ask : order) {
    if (ask.stage == EvictionStage::kLast && ask.job != Job(1)) {
      last.push_back(ask.job);
    }
  }
  return last;
}

TEST(Eviction, CopiesThatLieElsewhereThenWhatIsSupersededThenLastCopiesThenOnesOwn) {
  EXPECT_EQ(Order({Living(1, kMe), Ended(2, kMe, kHour, true)}),
            (std::vector<EvictionAsk>{{Job(2), EvictionStage::kVerified},
                                      {Job(1), EvictionStage::kSpare},
                                      {Job(2), EvictionStage::kSpare},
                                      {Job(2), EvictionStage::kLast},
                                      {Job(2), EvictionStage::kDraining},
                                      {Job(1), EvictionStage::kLast}}));
}

TEST(Eviction, WhatIsOnItsWayToADurableTierIsLetFinishForAWhile) {
  const auto draining = [](Duration ago) {
    const auto order = Order({Living(1, kMe), Ended(2, kMe, ago, true)});
    return std::count(order.begin(), order.end(), EvictionAsk{Job(2), EvictionStage::kDraining});
  };
  EXPECT_EQ(draining(kDrainIsAwaited - std::chrono::seconds(1)), 0);
  EXPECT_EQ(draining(kDrainIsAwaited), 1);
}

TEST(Eviction, JobsThatLeftInOrderBeforeThoseThatDiedEachOldestFirst) {
  EXPECT_EQ(
      Last(Order({Living(1, kMe), Ended(2, kMe, 5 * kHour, false), Ended(3, kMe, 1 * kHour, true),
                  Ended(4, kMe, 9 * kHour, false), Ended(5, kMe, 2 * kHour, true)})),
      (std::vector<JobUuid>{Job(5), Job(3), Job(4), Job(2)}));
}

TEST(Eviction, AUsersOwnJobsGiveWayAtOnceThoseThatDiedAMomentAgoLast) {
  EXPECT_EQ(Last(Order({Living(1, kMe), Ended(2, kMe, {}, false), Ended(3, kMe, {}, true),
                        Ended(4, kMe, kHour, false)})),
            (std::vector<JobUuid>{Job(3), Job(4), Job(2)}));
}

TEST(Eviction, ALivingJobGivesUpWhatIsSupersededToItsOwnUserAlone) {
  const std::vector<EvictionAsk> order = Order({Living(1, kMe), Living(2, kMe), Living(3, kOther)});
  EXPECT_EQ(order, (std::vector<EvictionAsk>{{Job(1), EvictionStage::kSpare},
                                             {Job(2), EvictionStage::kSpare},
                                             {Job(1), EvictionStage::kLast}}));
}

TEST(Eviction, WhatWasBroughtHereAheadIsAskedForOfAnybody) {
  MemoryJob ahead = Living(3, kOther);
  ahead.ahead = true;
  const std::vector<EvictionAsk> order = Order({Living(1, kMe), ahead});
  EXPECT_EQ(order[1], (EvictionAsk{Job(3), EvictionStage::kSpare}));
  EXPECT_TRUE(Last(order).empty());
}

TEST(Eviction, AnotherUsersLastCopyIsSafeForTheTimeThatIsSet) {
  const MemoryJob young = Ended(2, kOther, 23 * kHour, true);
  const MemoryJob old = Ended(3, kOther, 25 * kHour, true);
  EXPECT_TRUE(Last(Order({Living(1, kMe), young})).empty());
  EXPECT_EQ(Last(Order({Living(1, kMe), old})), (std::vector<JobUuid>{Job(3)}));
  EXPECT_TRUE(Last(Order({Living(1, kMe), old}, {1000, Duration{}})).empty()) << "for ever";
  // Within its share nothing of a user goes that has one.
  EXPECT_TRUE(Last(Order({Living(1, kMe), old, young})).empty());
  EXPECT_TRUE(Last(Order({Living(1, kMe), old, Living(4, kOther)})).empty());
  // What a durable tier has is given up by anybody's ended jobs.
  EXPECT_EQ(Order({Living(1, kMe), young}).front(),
            (EvictionAsk{Job(2), EvictionStage::kVerified}));
}

TEST(Eviction, BeyondAUsersShareItsEndedJobsGiveWayToOthersOldestFirst) {
  // Two users: 50 each.
  const MemoryJob older = Ended(2, kOther, 3 * kHour, true, 30);
  const MemoryJob newer = Ended(3, kOther, 2 * kHour, true, 30);
  EXPECT_EQ(Last(Order({Living(1, kMe, 40), older, newer}, {100, 24 * kHour})),
            (std::vector<JobUuid>{Job(2), Job(3)}));
  // When one is gone the other is within the share.
  EXPECT_TRUE(Last(Order({Living(1, kMe, 70), newer}, {100, 24 * kHour})).empty());
  // A third user with a living job makes the shares smaller.
  EXPECT_TRUE(
      Last(Order({Living(1, kMe), Ended(3, kOther, 2 * kHour, true, 34)}, {100, 24 * kHour}))
          .empty());
  EXPECT_EQ(Last(Order({Living(1, kMe), Ended(3, kOther, 2 * kHour, true, 34), Living(4, 3000)},
                       {100, 24 * kHour})),
            (std::vector<JobUuid>{Job(3)}));
}

TEST(Eviction, AJobThatDiedAMomentAgoKeepsAlsoWhatADurableTierHas) {
  for (const EvictionAsk& ask : Order({Living(1, kMe), Ended(2, kMe, {}, false)})) {
    EXPECT_NE(ask.stage, EvictionStage::kVerified);
  }
}

TEST(Eviction, AJobThatDiedAMomentAgoCountsAsLivingForOtherUsers) {
  const MemoryJob died = Ended(2, kOther, std::chrono::minutes(9), false, 900);
  EXPECT_TRUE(Last(Order({Living(1, kMe), died})).empty()) << "beyond its share, and yet";
  EXPECT_EQ(Last(Order({Living(1, kMe), Ended(2, kOther, std::chrono::minutes(11), false, 900)})),
            (std::vector<JobUuid>{Job(2)}));
  EXPECT_EQ(Last(Order({Living(1, kMe), Ended(2, kOther, std::chrono::minutes(9), true, 900)})),
            (std::vector<JobUuid>{Job(2)}))
      << "it left in order";
}

TEST(Eviction, WhereTheUsersOwnLimitIsReachedOnlyItsOwnJobsAreAsked) {
  const std::vector<EvictionAsk> order =
      Order({Living(1, kMe), Ended(2, kOther, 50 * kHour, true), Ended(3, kMe, kHour, true)},
            {1000, 24 * kHour}, true);
  for (const EvictionAsk& ask : order) {
    EXPECT_NE(ask.job, Job(2));
  }
  EXPECT_EQ(Last(order), (std::vector<JobUuid>{Job(3)}));
}

// Whatever lies there: nobody is asked twice for the same, a living job is never asked for its last
// copy, and within a user's share nobody else is.
TEST(Eviction, WhatHoldsForAnyMixtureOfJobs) {
  std::mt19937 random(20261130);
  for (int round = 0; round < 2000; ++round) {
    std::vector<MemoryJob> jobs{Living(1, kMe, random() % 50)};
    const uint8_t count = 1 + random() % 12;
    for (uint8_t i = 0; i < count; ++i) {
      MemoryJob job = Ended(2 + i, 1000 * (1 + random() % 3), std::chrono::minutes(random() % 3000),
                            random() % 2, random() % 50);
      job.living = random() % 3 == 0;
      jobs.push_back(job);
    }
    const EvictionRules rules{1 + random() % 300, 24 * kHour};
    const std::vector<EvictionAsk> order = Order(jobs, rules);
    EXPECT_EQ(std::set<EvictionAsk>(order.begin(), order.end()).size(), order.size());
    std::map<uint32_t, uint64_t> bytes;
    for (const MemoryJob& job : jobs) {
      bytes[job.uid] += job.bytes;
    }
    for (const JobUuid& asked : Last(order)) {
      const MemoryJob& job = *std::find_if(jobs.begin(), jobs.end(),
                                           [&](const MemoryJob& j) { return j.job == asked; });
      EXPECT_FALSE(job.living);
      const bool young = kNow - job.ended < 24 * kHour;
      const bool lives = std::any_of(jobs.begin(), jobs.end(), [&](const MemoryJob& j) {
        return j.uid == job.uid && j.living;
      });
      if (job.uid != kMe && (young || lives)) {  // of three users a share is a third or more
        EXPECT_GT(bytes[job.uid], rules.bytes_max / 3);
      }
    }
  }
}

}  // namespace
}  // namespace holdfast
