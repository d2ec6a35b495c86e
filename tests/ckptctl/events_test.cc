// What `ckptctl events` says of events, and of those that went before they could be shown.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <sstream>

#include "ckptctl/commands.h"
#include "holdfast/v1/admin.pb.h"
#include "tests/ckptctl/console.h"

namespace holdfast {
namespace {

using testing::HasSubstr;

FakeAdmin::Answers OneEventAndThreeLost() {
  FakeAdmin::Answers answers;
  answers.events = [](const v1::WatchEventsRequest&) {
    v1::EventBatch batch;
    batch.set_node("n3");
    batch.set_journal(42);
    batch.set_lost(3);
    batch.set_next_after(7);
    v1::DaemonEvent& event = *batch.add_events();
    event.set_number(7);
    event.set_severity(v1::SEVERITY_WARNING);
    event.set_kind("tier_lags");
    event.set_text("remote lags");
    return batch;
  };
  return answers;
}

TEST(Events, ThoseThatWentAreAnEventOfTheirOwnForPrograms) {
  FakeAdmin admin(OneEventAndThreeLost());
  Console console(admin.socket());
  static_cast<void>(RunEvents(console.Json(), {.follow = true}));
  std::istringstream lines(console.out());
  std::string line;
  ASSERT_TRUE(std::getline(lines, line));
  const nlohmann::json lost = nlohmann::json::parse(line);
  EXPECT_EQ(lost["kind"], "events_lost");
  EXPECT_EQ(lost["severity"], "warning");
  EXPECT_EQ(lost["node"], "n3");
  EXPECT_EQ(lost["journal"], "42") << "numbers are of that journal";
  EXPECT_THAT(lost["text"].get<std::string>(), HasSubstr("3 events went"));
  ASSERT_TRUE(std::getline(lines, line));
  const nlohmann::json told = nlohmann::json::parse(line);
  EXPECT_EQ(told["kind"], "tier_lags");
  EXPECT_EQ(told["journal"], "42");
  EXPECT_EQ(told["number"], 7);
}

TEST(Events, ThoseThatWentAreSaidToPeople) {
  FakeAdmin admin(OneEventAndThreeLost());
  Console console(admin.socket());
  static_cast<void>(RunEvents(console.context(), {}));
  EXPECT_THAT(console.err(), HasSubstr("3 events went before they could be shown"));
  EXPECT_THAT(console.out(), HasSubstr("tier_lags"));
}

TEST(Events, AnAnswerAsAWholeSaysHowManyWent) {
  FakeAdmin admin(OneEventAndThreeLost());
  Console console(admin.socket());
  EXPECT_EQ(RunEvents(console.Json(), {}), ExitCode::kOk);
  const nlohmann::json told = console.Parsed();
  EXPECT_EQ(told["lost"], 3);
  EXPECT_EQ(told["events"].size(), 1u);
}

}  // namespace
}  // namespace holdfast
