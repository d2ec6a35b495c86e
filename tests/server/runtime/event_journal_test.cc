#include "server/runtime/event_journal.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <thread>
#include <vector>

#include "base/utf8.h"

namespace holdfast {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr uint64_t kJournal = 77;
constexpr uint32_t kRoot = 0;
constexpr uint32_t kOwn = 500;
constexpr uint32_t kUser = 1000;
constexpr uint32_t kOther = 1001;
constexpr Duration kSoon = std::chrono::milliseconds(1);
constexpr Duration kPatience = std::chrono::seconds(60);

v1::DaemonEvent Of(const std::string& text, const std::string& job = "",
                   v1::Severity severity = v1::SEVERITY_INFO, int64_t unix_ms = 1) {
  v1::DaemonEvent event;
  event.set_text(text);
  event.set_job(job);
  event.set_severity(severity);
  event.set_unix_ms(unix_ms);
  return event;
}

std::vector<std::string> Texts(const v1::EventBatch& batch) {
  std::vector<std::string> texts;
  for (const v1::DaemonEvent& event : batch.events()) {
    texts.push_back(event.text());
  }
  return texts;
}

class EventJournalTest : public ::testing::Test {
 protected:
  std::vector<std::string> Seen(uint32_t caller, const v1::WatchEventsRequest& request = {}) {
    return Texts(journal_.Read(request, caller));
  }
  EventJournal journal_{kJournal, {kRoot, kOwn}};
};

TEST_F(EventJournalTest, WhoMaySeeWhat) {
  journal_.Add(Of("node"), std::nullopt);
  journal_.Add(Of("user's", "a"), kUser);
  journal_.Add(Of("other's", "b"), kOther);
  journal_.Add(Of("nobody's", "c"), std::nullopt);
  journal_.Add(Of("removed", "a"), std::nullopt);  // its user is not known any more
  for (const uint32_t all : {kRoot, kOwn}) {
    EXPECT_THAT(Seen(all), ElementsAre("node", "user's", "other's", "nobody's", "removed"));
  }
  EXPECT_THAT(Seen(kUser), ElementsAre("user's", "removed"));
  EXPECT_THAT(Seen(kOther), ElementsAre("other's"));
  EXPECT_THAT(Seen(42), IsEmpty());
}

TEST_F(EventJournalTest, OnlyWhatIsWanted) {
  journal_.Add(Of("early", "a", v1::SEVERITY_ERROR, 10), kUser);
  journal_.Add(Of("mild", "a", v1::SEVERITY_INFO, 20), kUser);
  journal_.Add(Of("bad", "a", v1::SEVERITY_WARNING, 20), kUser);
  journal_.Add(Of("worse", "b", v1::SEVERITY_ERROR, 30), kUser);
  v1::WatchEventsRequest request;
  request.set_least(v1::SEVERITY_WARNING);
  request.set_since_unix_ms(20);
  EXPECT_THAT(Seen(kUser, request), ElementsAre("bad", "worse"));
  request.set_job("b");
  EXPECT_THAT(Seen(kUser, request), ElementsAre("worse"));
}

TEST_F(EventJournalTest, GoesOnWhereItWas) {
  for (size_t i = 0; i < EventJournal::kBatchMax + 5; ++i) {
    journal_.Add(Of(std::to_string(i)), std::nullopt);
  }
  v1::EventBatch batch = journal_.Read({}, kRoot);
  EXPECT_EQ(batch.journal(), kJournal);
  EXPECT_EQ(batch.events_size(), static_cast<int>(EventJournal::kBatchMax));
  EXPECT_EQ(batch.next_after(), EventJournal::kBatchMax);
  v1::WatchEventsRequest request;
  request.set_journal(batch.journal());
  request.set_after(batch.next_after());
  batch = journal_.Read(request, kRoot);
  EXPECT_EQ(batch.events_size(), 5);
  EXPECT_EQ(batch.events(0).text(), std::to_string(EventJournal::kBatchMax));
  EXPECT_EQ(batch.next_after(), journal_.last());
  request.set_after(batch.next_after());
  EXPECT_EQ(journal_.Read(request, kRoot).events_size(), 0);
  // Another daemon's numbers say nothing here.
  request.set_journal(kJournal + 1);
  EXPECT_EQ(journal_.Read(request, kRoot).events(0).number(), 1u);
}

TEST_F(EventJournalTest, TheOldestGoAndThatIsSaid) {
  journal_.Add(Of("first"), std::nullopt);
  v1::WatchEventsRequest request;
  request.set_journal(kJournal);
  request.set_after(1);
  for (size_t i = 0; i < EventJournal::kEventsMax + 3; ++i) {
    journal_.Add(Of("more"), std::nullopt);
  }
  const v1::EventBatch batch = journal_.Read(request, kRoot);
  EXPECT_EQ(batch.lost(), 3u);
  EXPECT_EQ(batch.events(0).number(), 5u);
  // Who asks for the first time has lost nothing that it was promised.
  EXPECT_EQ(journal_.Read({}, kRoot).lost(), 0u);
}

// Whoever asks for many things, or has a job that does, pushes out none but its own.
TEST_F(EventJournalTest, AUserWhoMakesManyPushesNobodyElsesOut) {
  journal_.Add(Of("a drive fails"), std::nullopt);
  journal_.Add(Of("other's", "b"), kOther);
  for (size_t i = 0; i < 2 * EventJournal::kEventsMax; ++i) {
    i % 2 == 0 ? journal_.Add(Of("asks"), std::nullopt, kUser)
               : journal_.Add(Of("opens", "a"), kUser);
  }
  journal_.Add(Of("another drive fails"), std::nullopt);
  v1::WatchEventsRequest request;
  request.set_journal(kJournal);
  std::vector<std::string> others;
  uint64_t seen = 0;
  for (v1::EventBatch batch = journal_.Read(request, kRoot);;
       batch = journal_.Read(request, kRoot)) {
    seen += batch.lost();
    for (const v1::DaemonEvent& event : batch.events()) {
      ++seen;
      if (event.text() != "asks" && event.text() != "opens") {
        others.push_back(event.text());
      }
    }
    if (batch.events_size() == 0) {
      break;
    }
    request.set_after(batch.next_after());
  }
  EXPECT_THAT(others, ElementsAre("a drive fails", "other's", "another drive fails"));
  // (Of those before the first one that it was given nothing is promised.)
  EXPECT_EQ(seen, EventJournal::kEventsMax);
  request.set_after(2);
  EXPECT_EQ(journal_.Read(request, kRoot).lost(), journal_.last() - EventJournal::kEventsMax);
}

TEST_F(EventJournalTest, WhateverStandsInIt) {
  journal_.Add(Of(std::string(100'000, 'x') + "\xff", "job\xe4"), std::nullopt);
  const v1::EventBatch batch = journal_.Read({}, kRoot);
  ASSERT_EQ(batch.events_size(), 1);
  EXPECT_LE(batch.events(0).text().size(), EventJournal::kTextBytesMax);
  EXPECT_TRUE(IsUtf8(batch.events(0).job()));
  journal_.Add(Of("a\xff"), std::nullopt);
  EXPECT_EQ(Seen(kRoot).back(), "a\\xff");
  v1::WatchEventsRequest request;
  request.set_journal(kJournal);
  request.set_after(UINT64_MAX);
  EXPECT_EQ(journal_.Read(request, kRoot).events_size(), 0);
  EXPECT_EQ(journal_.Read(request, kRoot).lost(), 0u);
}

TEST_F(EventJournalTest, WhoeverWaitsHears) {
  EXPECT_FALSE(journal_.AwaitAfter(0, kSoon));
  std::thread adds([this] { journal_.Add(Of("now"), std::nullopt); });
  EXPECT_TRUE(journal_.AwaitAfter(0, kPatience));
  adds.join();
  std::thread stops([this] { journal_.Stop(); });
  EXPECT_FALSE(journal_.AwaitAfter(1, kPatience));
  stops.join();
  EXPECT_TRUE(journal_.stopped());
  EXPECT_FALSE(journal_.AwaitAfter(1, kPatience)) << "at once, from then on";
}

TEST(EventKindsTest, EachHasANameOfItsOwn) {
  std::set<std::string> names;
  for (int kind = 0; kind <= static_cast<int>(Report::Kind::kTrouble); ++kind) {
    EXPECT_TRUE(names.insert(EventKindName(static_cast<Report::Kind>(kind))).second) << kind;
  }
}

TEST(EventKindsTest, WhatEachSaveOfEachRankCausesIsNotTold) {
  Report report;
  report.job = "a";
  report.text = "t";
  for (const Report::Kind kind :
       {Report::Kind::kShardSealed, Report::Kind::kStepRetired, Report::Kind::kSlotReleased}) {
    report.kind = kind;
    EXPECT_FALSE(EventOf(report).has_value());
  }
  report.kind = Report::Kind::kCopyBad;
  const auto event = EventOf(report);
  ASSERT_TRUE(event.has_value());
  EXPECT_EQ(event->kind(), "copy_bad");
  EXPECT_EQ(event->severity(), v1::SEVERITY_ERROR);
  EXPECT_EQ(event->job(), "a");
}

TEST(EventKindsTest, SeveritiesAreReadAsTheyAreWritten) {
  for (const v1::Severity each : {v1::SEVERITY_INFO, v1::SEVERITY_WARNING, v1::SEVERITY_ERROR}) {
    EXPECT_EQ(ParseSeverity(SeverityName(each)), each);
  }
  EXPECT_EQ(ParseSeverity("Warning"), std::nullopt);
  EXPECT_EQ(ParseSeverity(""), std::nullopt);
}

}  // namespace
}  // namespace holdfast
