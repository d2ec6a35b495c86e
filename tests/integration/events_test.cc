// What ckptd tells of: `ckptctl events`, events.command, and the health port.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <set>
#include <sstream>

#include "holdfast/v1/admin.grpc.pb.h"
#include "tests/integration/ctl.h"
#include "tests/integration/harness.h"
#include "tests/server/runtime/health_probe.h"

namespace holdfast {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

std::set<std::string> KindsOf(const json& events) {
  std::set<std::string> kinds;
  for (const json& event : events) {
    kinds.insert(event["kind"].get<std::string>());
  }
  return kinds;
}

class EventsTest : public ::testing::Test {
 protected:
  void Start(const NodeOptions& options = {}) {
    node_ = std::make_unique<Node>(options);
    ASSERT_TRUE(node_->Start()) << node_->Log();
  }
  // A step of two ranks that is committed.
  void Save(const std::string& job, const std::string& step, uint32_t uid = ::geteuid()) {
    auto ranks = StartRanks(*node_, {.job = job, .uid = uid}, 2);
    DoAll(ranks, "open");
    DoAll(ranks, "restore");
    ASSERT_THAT(DoAll(ranks, "save " + step), Each("ok sealed"));
    ASSERT_THAT(DoAll(ranks, "committed"), Each("ok committed"));
    for (const auto& rank : ranks) {
      rank->Kill();
    }
  }
  std::unique_ptr<Node> node_;
};

TEST_F(EventsTest, AreShownWithTheirJob) {
  Start();
  Save("llama", "10");
  Save("other", "20");
  const CtlAnswer all = Ctl(*node_, {"events", "--json"});
  ASSERT_EQ(all.exit_code, 0) << all.errors;
  EXPECT_THAT(KindsOf(all.parsed["events"]),
              AllOf(Contains("daemon_started"), Contains("attempt_opened"),
                    Contains("step_committed"), Not(Contains("shard_sealed"))));
  const CtlAnswer one = Ctl(*node_, {"events", "llama", "--json"});
  ASSERT_EQ(one.exit_code, 0) << one.errors;
  ASSERT_FALSE(one.parsed["events"].empty());
  for (const json& event : one.parsed["events"]) {
    EXPECT_EQ(event["job"], "llama") << event;
    EXPECT_EQ(event["node"], one.parsed["node"]);
    EXPECT_GT(event["unix_ms"], 0);
  }
  const CtlAnswer text = Ctl(*node_, {"events", "llama"});
  EXPECT_EQ(text.exit_code, 0) << text.errors;
  EXPECT_THAT(text.text,
              AllOf(HasSubstr("step_committed"), HasSubstr("step 10"), Not(HasSubstr("other"))));
  EXPECT_EQ(Ctl(*node_, {"events", "--since", "soon"}).exit_code, 2);
  EXPECT_EQ(Ctl(*node_, {"events", "--least", "loud"}).exit_code, 2);
}

TEST_F(EventsTest, OnlyOnesOwnAreShown) {
  if (::geteuid() != 0) {
    GTEST_SKIP() << "needs root to become other users";
  }
  Start();
  Save("mine", "1", 12345);
  Save("theirs", "1", 54321);
  for (const auto& [uid, job] : {std::pair<uid_t, std::string>{12345, "mine"}, {54321, "theirs"}}) {
    const CtlAnswer seen = Ctl(*node_, {"events", "--json"}, uid);
    ASSERT_EQ(seen.exit_code, 0) << seen.errors;
    ASSERT_FALSE(seen.parsed["events"].empty());
    for (const json& event : seen.parsed["events"]) {
      EXPECT_EQ(event["job"], job) << event;
    }
  }
  EXPECT_THAT(Ctl(*node_, {"events", "--json"}, 777).parsed["events"], IsEmpty());
}

TEST_F(EventsTest, AreFollowedOverARestart) {
  Start();
  const TemporaryDirectory directory;
  const auto follow = StartCtl(*node_, {"events", "--follow", "--json"}, directory.Path("errors"));
  const auto next = [&](const std::string& kind) {
    while (const auto line = follow->ReadLine()) {
      if (const json event = json::parse(*line); event["kind"] == kind) {
        return event;
      }
    }
    return json();
  };
  EXPECT_EQ(next("daemon_started")["number"], 1);
  Save("llama", "10");
  EXPECT_EQ(next("step_committed")["job"], "llama");
  ASSERT_EQ(node_->Stop(), 0);
  EXPECT_EQ(next("daemon_stopping")["severity"], "info");
  ASSERT_TRUE(node_->Start());
  EXPECT_FALSE(next("daemon_started").is_null()) << ReadText(directory.Path("errors"));
  follow->Signal(SIGINT);
  EXPECT_EQ(follow->Wait(), 0);
  EXPECT_THAT(ReadText(directory.Path("errors")), HasSubstr("ckptd is away (the daemon at "));
}

TEST_F(EventsTest, WhoChangedWhatIsTold) {
  Start();
  Save("llama", "10");
  ASSERT_EQ(Ctl(*node_, {"pin", "llama", "--step", "10"}).exit_code, 0);
  ASSERT_NE(Ctl(*node_, {"rm", "llama", "--step", "99"}).exit_code, 0);
  ASSERT_EQ(Ctl(*node_, {"gc", "--dry-run"}).exit_code, 0);  // changes nothing
  std::vector<std::string> told;
  const CtlAnswer events = Ctl(*node_, {"events", "llama", "--json"});
  for (const json& event : events.parsed["events"]) {
    if (event["kind"] == "command") {
      told.push_back(event["text"]);
    }
  }
  const std::string who = "uid " + std::to_string(::geteuid()) + ": ";
  ASSERT_EQ(told.size(), 2u) << events.text;
  EXPECT_THAT(told[0],
              AllOf(HasSubstr(who + "PinRequest"), HasSubstr("step: 10"), HasSubstr("}: done")));
  EXPECT_THAT(told[1], AllOf(HasSubstr(who + "RemoveCheckpointRequest"), HasSubstr("step: 99"),
                             HasSubstr("}: not done: ")));
  EXPECT_THAT(node_->Log(), HasSubstr("command: " + who + "PinRequest"));
}

// However often somebody asks for what is refused, and however little is logged: what was done is
// in the log.
TEST_F(EventsTest, WhatWasDoneStaysInTheLog) {
  Start({.log_level = "error"});
  Save("llama", "10");
  const auto admin = v1::Admin::NewStub(
      grpc::CreateChannel("unix:" + node_->admin_socket(), grpc::InsecureChannelCredentials()));
  for (int i = 0; i < 1000; ++i) {
    v1::PinRequest request;
    request.set_job("nobody's");
    grpc::ClientContext context;
    v1::PinReply reply;
    EXPECT_FALSE(admin->Pin(&context, request, &reply).ok());
  }
  ASSERT_EQ(Ctl(*node_, {"rm", "llama", "--yes"}).exit_code, 0);
  ASSERT_EQ(node_->Stop(), 0);  // what was logged is out
  EXPECT_THAT(node_->Log(), HasSubstr("RemoveJobRequest"));
  EXPECT_THAT(node_->Log(), HasSubstr("PinRequest"));
}

// It quotes what the operator's own program has printed.
TEST_F(EventsTest, WhatIsWrongWithTheNodeOnlyItsOperatorsSee) {
  if (::geteuid() != 0) {
    GTEST_SKIP() << "needs root to become other users";
  }
  Start({.config =
             "events: {command: [/bin/sh, -c, \"echo https://secret; false\"], least: info}\n"});
  ASSERT_TRUE(node_->Until([&](const v1::GetStatusReply& status) {
    return status.daemon().problems_size() == 1 &&
           status.daemon().problems(0).find("secret") != std::string::npos;
  })) << node_->Log();
  EXPECT_THAT(Ctl(*node_, {"status", "--json"}).text, HasSubstr("secret"));
  const CtlAnswer other = Ctl(*node_, {"status", "--json"}, 12345);
  EXPECT_THAT(other.text, Not(HasSubstr("secret")));
  EXPECT_EQ(other.parsed["daemon"]["problems"],
            json::array({"1 problem of this node: root and ckptd's own user see what they are"}));
}

TEST_F(EventsTest, WhoIsRefusedLearnsNothingByTrying) {
  if (::geteuid() != 0) {
    GTEST_SKIP() << "needs root to become other users";
  }
  Start();
  Save("mine", "1", 12345);
  ASSERT_NE(Ctl(*node_, {"rm", "mine", "--yes"}, 54321).exit_code, 0);
  ASSERT_EQ(Ctl(*node_, {"rm", "mine", "--yes"}, 12345).exit_code, 0);
  EXPECT_THAT(Ctl(*node_, {"events", "--json"}, 54321).parsed["events"], IsEmpty());
  const CtlAnswer seen = Ctl(*node_, {"events", "--json"}, 12345);
  EXPECT_THAT(KindsOf(seen.parsed["events"]), AllOf(Contains("job_removed"), Contains("command")));
}

// They have a thread each of the daemon's.
TEST_F(EventsTest, SoManyMayFollow) {
  Start();
  const TemporaryDirectory directory;
  std::vector<std::unique_ptr<Child>> all;
  for (size_t i = 0; i < 4; ++i) {
    all.push_back(StartCtl(*node_, {"events", "-f", "--json"}, directory.Path("errors")));
    ASSERT_TRUE(all.back()->ReadLine().has_value());
  }
  const CtlAnswer more = Ctl(*node_, {"events", "--follow"});
  EXPECT_EQ(more.exit_code, 4);
  EXPECT_THAT(more.errors, HasSubstr("followed already"));
  EXPECT_EQ(Ctl(*node_, {"events"}).exit_code, 0);
  EXPECT_EQ(Ctl(*node_, {"status"}).exit_code, 0);
  all.back()->Signal(SIGINT);
  EXPECT_EQ(all.back()->Wait(), 0);
  // (The daemon notices a moment later.)
  EXPECT_TRUE(node_->Until([&](const v1::GetStatusReply&) {
    const auto again = StartCtl(*node_, {"events", "-f", "--json"}, directory.Path("again"));
    return again->ReadLine().has_value();
  }));
  EXPECT_EQ(node_->Stop(), 0) << "nobody who follows keeps it from stopping";
}

TEST_F(EventsTest, AreToldToACommand) {
  const TemporaryDirectory directory;
  const std::string told = directory.Path("told");
  Start({.config = "events: {command: [/bin/sh, -c, \"cat >> " + told + "\"], least: info}\n"});
  Save("llama", "10");
  EXPECT_TRUE(node_->Until([&](const v1::GetStatusReply&) {
    return ReadText(told).find("step_committed") != std::string::npos;
  })) << ReadText(told);
  std::istringstream lines(ReadText(told));
  for (std::string line; std::getline(lines, line);) {
    EXPECT_EQ(json::parse(line)["node"], Ctl(*node_, {"events", "--json"}).parsed["node"]);
  }
}

TEST_F(EventsTest, ACommandThatFailsIsAProblemOfTheNode) {
  Start({.config = "events: {command: [/bin/false], least: info}\n"});
  EXPECT_TRUE(node_->Until([&](const v1::GetStatusReply& status) {
    return std::any_of(status.daemon().problems().begin(), status.daemon().problems().end(),
                       [](const std::string& problem) {
                         return problem.find("events.command: /bin/false: exit code 1") == 0;
                       });
  }));
}

TEST_F(EventsTest, SupervisorsHearWhetherItServes) {
  Start({.config = "health: {address: \"127.0.0.1:0\"}\n"});
  const std::string log = node_->Log();
  const size_t at = log.find("health_port=");
  ASSERT_NE(at, std::string::npos) << log;
  HealthProbe probe(std::stoi(log.substr(at + 12)));
  EXPECT_TRUE(probe.Becomes("ready", kServing));
  EXPECT_EQ(probe.Ask(""), kServing);
  EXPECT_EQ(probe.Call("/holdfast.v1.Admin/GetStatus", ""),
            1000u + grpc::StatusCode::UNIMPLEMENTED);
}

}  // namespace
}  // namespace holdfast
