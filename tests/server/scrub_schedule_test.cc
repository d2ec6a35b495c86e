#include "server/scrub_schedule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

namespace holdfast {
namespace {

constexpr int64_t kDay = 24 * 60 * 60 * 1000;
constexpr int64_t kPeriod = 7 * kDay;
constexpr int64_t kStart = 1'700'000'000'000;

ScrubKey Key(Step step, TierKind tier = TierKind::kNvme) {
  return {tier, {JobUuid::FromString("99999999-4455-4677-8899-aabbccddeeff").value(), 1, step, 0}};
}

std::vector<ScrubCopy> Copies(Step first, Step last, uint64_t bytes) {
  std::vector<ScrubCopy> copies;
  for (Step step = first; step <= last; ++step) {
    copies.push_back({Key(step), bytes, 0});
  }
  return copies;
}

// Reads as it is told, each copy in no time; when each was read.
std::vector<std::pair<Step, int64_t>> RunUntil(ScrubSchedule& schedule, int64_t& now, int64_t end) {
  std::vector<std::pair<Step, int64_t>> reads;
  for (;;) {
    const auto next = schedule.Next(now);
    if (!next || std::max(next->start_unix_ms, now) >= end) {
      return reads;
    }
    now = std::max(next->start_unix_ms, now);
    reads.emplace_back(next->copy.key.shard.step, now);
    schedule.Verified(next->copy.key, now);
    if (reads.size() > 100'000) {
      ADD_FAILURE() << "it reads all the time";
      return reads;
    }
  }
}

// In remote: the ranks, and with them who reads their copies, go from node to node.
TEST(ScrubSchedule, WhenAnotherNodeReadItCounts) {
  const int64_t now = kStart + 100 * kDay;
  ScrubSchedule schedule({kPeriod, 0});
  schedule.Remember({{Key(3), kStart + 99 * kDay}, {Key(4), kStart + 95 * kDay}});
  const std::vector<ScrubCopy> copies = {
      {Key(1), 100, 0, kStart, kStart + 96 * kDay},              // read by another
      {Key(2), 100, 0, kStart + 97 * kDay, 0},                   // never, known for so long
      {Key(3), 100, 0, kStart, kStart + 96 * kDay},              // here, later
      {Key(4), 100, 0, kStart + 98 * kDay, kStart + 97 * kDay},  // there, later
      {Key(5), 100, 0, now + kDay, now + kDay},                  // its host's clock is ahead
      {Key(6), 100, 0},
  };
  schedule.SetCopies(copies, now);
  const std::map<ScrubKey, int64_t> expected = {{Key(1), kStart + 96 * kDay},
                                                {Key(2), kStart + 97 * kDay},
                                                {Key(3), kStart + 99 * kDay},
                                                {Key(4), kStart + 97 * kDay},
                                                {Key(5), now},
                                                {Key(6), now}};
  EXPECT_EQ(schedule.Known(), expected);
}

TEST(ScrubSchedule, NothingIsReadWithoutAPeriodOrCopies) {
  ScrubSchedule off({0, 0});
  off.SetCopies(Copies(1, 3, 100), kStart);
  EXPECT_FALSE(off.Next(kStart).has_value());
  EXPECT_EQ(off.Problem(kStart + 100 * kPeriod), "");
  const ScrubSchedule empty({kPeriod, 0});
  EXPECT_FALSE(empty.Next(kStart).has_value());
  EXPECT_FALSE(empty.oldest().has_value());
}

TEST(ScrubSchedule, EveryCopyIsReadOnceAPeriodAndEvenly) {
  ScrubSchedule schedule({kPeriod, 0});
  schedule.SetCopies(Copies(1, 100, 1 << 30), kStart);
  int64_t now = kStart;
  const auto reads = RunUntil(schedule, now, kStart + 5 * kPeriod);
  std::map<Step, int64_t> last;
  int64_t before = kStart;
  for (const auto& [step, at] : reads) {
    const int64_t since = at - (last.count(step) > 0 ? last[step] : kStart);
    EXPECT_LE(since, kPeriod) << "step " << step;
    EXPECT_LT(at - before, kPeriod / 20) << "they are spread, not read in one go";
    before = at;
    last[step] = at;
  }
  EXPECT_EQ(last.size(), 100u);
  EXPECT_LT(reads.size(), 100u * 8) << "nothing is read for nothing";
  EXPECT_EQ(schedule.Overdue(now), 0u);
}

TEST(ScrubSchedule, TheOneReadLongestAgoComesFirst) {
  ScrubSchedule schedule({kPeriod, 0});
  schedule.Remember({{Key(1), kStart - 2 * kDay}, {Key(2), kStart - 5 * kDay}});
  schedule.SetCopies(Copies(1, 3, 100), kStart);
  EXPECT_EQ(schedule.Next(kStart)->copy.key, Key(2));
  schedule.Verified(Key(2), kStart);
  EXPECT_EQ(schedule.Next(kStart)->copy.key, Key(1));
  EXPECT_EQ(schedule.oldest(), kStart - 2 * kDay);
  EXPECT_EQ(schedule.Known().at(Key(2)), kStart);
}

// What lives for minutes is not read, and does not push what lives for weeks aside.
TEST(ScrubSchedule, WhatComesAndGoesIsNotRead) {
  ScrubSchedule schedule({kPeriod, 0});
  int64_t now = kStart;
  std::set<Step> read;
  for (Step step = 10; step < 10 + 24 * 20; ++step) {  // one an hour, of which two stay
    std::vector<ScrubCopy> there = Copies(1, 4, 100);
    there.push_back({Key(step, TierKind::kMemory), 100, now});
    there.push_back({Key(step + 1, TierKind::kMemory), 100, now});
    schedule.SetCopies(there, now);
    for (const auto& [one, at] : RunUntil(schedule, now, now + kDay / 24)) {
      read.insert(one);
    }
    now = kStart + static_cast<int64_t>(step - 9) * kDay / 24;
  }
  EXPECT_THAT(read, testing::ElementsAre(1, 2, 3, 4));
}

TEST(ScrubSchedule, ACopyThatWasWrittenAnewCountsFromThen) {
  ScrubSchedule schedule({kPeriod, 0});
  schedule.SetCopies({{Key(1), 100, kStart}}, kStart);
  schedule.SetCopies({{Key(1), 300, kStart + kDay}}, kStart + kDay);
  EXPECT_EQ(schedule.oldest(), kStart + kDay);
  EXPECT_EQ(schedule.bytes(), 300u);
  schedule.SetCopies({}, kStart + 2 * kDay);
  EXPECT_EQ(schedule.bytes(), 0u);
  EXPECT_EQ(schedule.copies(), 0u);
}

TEST(ScrubSchedule, WhatCannotBeReadNowLetsOthersPass) {
  ScrubSchedule schedule({kPeriod, 0});
  schedule.Remember({{Key(1), kStart - 6 * kDay}, {Key(2), kStart - 5 * kDay}});
  schedule.SetCopies(Copies(1, 2, 100), kStart);
  schedule.Postpone(Key(1), kStart + 1000);
  EXPECT_EQ(schedule.Next(kStart)->copy.key, Key(2));
  schedule.Postpone(Key(2), kStart + 500);
  EXPECT_EQ(schedule.Next(kStart)->start_unix_ms, kStart + 500);
  EXPECT_EQ(schedule.Next(kStart + 2000)->copy.key, Key(1));
}

TEST(ScrubSchedule, APeriodThatCannotBeKeptIsTold) {
  ScrubSchedule schedule({kPeriod, 1 << 20});
  schedule.SetCopies(Copies(1, 100, uint64_t{100} << 30), kStart);
  EXPECT_THAT(schedule.Problem(kStart), testing::HasSubstr("scrub.bandwidth_bytes_per_s_max"));
  schedule.Change({kPeriod, 1 << 30});
  EXPECT_EQ(schedule.Problem(kStart), "");
  EXPECT_EQ(schedule.Overdue(kStart + kPeriod + 1), 100u);
  EXPECT_THAT(schedule.Problem(kStart + kPeriod + 1),
              testing::HasSubstr("100 copies were not read again"));
}

// A clock that is turned back makes nothing wait for years.
TEST(ScrubSchedule, TimesOfTheFutureCountAsNow) {
  ScrubSchedule schedule({kPeriod, 0});
  schedule.Remember({{Key(1), kStart + 1000 * kDay}});
  schedule.SetCopies(Copies(1, 1, 100), kStart);
  EXPECT_LE(schedule.Next(kStart)->start_unix_ms, kStart + kPeriod);
}

// The clock of the wall was far ahead, and is right again.
TEST(ScrubSchedule, TimesThatTurnOutToBeOfTheFutureAreNow) {
  ScrubSchedule schedule({kPeriod, 0});
  schedule.SetCopies(Copies(1, 2, 100), kStart);
  schedule.Verified(Key(1), kStart + 1000 * kDay);
  schedule.Verified(Key(2), kStart + 1000 * kDay);
  schedule.Postpone(Key(2), kStart + 1000 * kDay);
  schedule.SetCopies(Copies(1, 2, 100), kStart + kDay);
  EXPECT_EQ(schedule.oldest(), kStart + kDay);
  int64_t now = kStart + kDay;
  EXPECT_GE(RunUntil(schedule, now, kStart + 3 * kPeriod).size(), 4u);
}

TEST(ScrubSchedule, WhatIsRememberedAsReadNeverIsOneCopy) {
  ScrubSchedule schedule({kPeriod, 0});
  schedule.Remember({{Key(1), 0}});
  for (int i = 0; i < 3; ++i) {
    schedule.SetCopies(Copies(1, 1, 100), kStart);
  }
  EXPECT_EQ(schedule.bytes(), 100u);
  EXPECT_EQ(schedule.copies(), 1u);
  schedule.Gone(Key(1));
  EXPECT_FALSE(schedule.Next(kStart).has_value());
}

// A drive that is away for a minute has not been read in that.
TEST(ScrubSchedule, WhatIsNotListedForAWhileHasStillNotBeenRead) {
  ScrubSchedule schedule({kPeriod, 0});
  schedule.SetCopies(Copies(1, 3, 100), kStart);
  schedule.SetCopies({}, kStart + 5 * kDay);
  EXPECT_EQ(schedule.copies(), 0u);
  schedule.SetCopies(Copies(1, 3, 100), kStart + 5 * kDay + 60'000);
  EXPECT_EQ(schedule.oldest(), kStart);
}

}  // namespace
}  // namespace holdfast
