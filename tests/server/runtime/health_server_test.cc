#include "server/runtime/health_server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "tests/server/runtime/health_probe.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;

TEST(HealthServerTest, LivesAndIsReadyWhenItSaysSo) {
  auto health = HealthServer::Start({.address = "127.0.0.1:0"});
  ASSERT_TRUE(health.ok()) << health.status();
  HealthProbe probe((*health)->port());
  EXPECT_EQ(probe.Ask(""), kServing);
  EXPECT_EQ(probe.Ask("ready"), kNotServing);
  (*health)->SetReady(true);
  EXPECT_TRUE(probe.Becomes("ready", kServing));
  (*health)->SetReady(false);
  EXPECT_TRUE(probe.Becomes("ready", kNotServing));
  EXPECT_EQ(probe.Ask(""), kServing);
  EXPECT_EQ(probe.Ask("another"), 1000u + grpc::StatusCode::NOT_FOUND);
}

TEST(HealthServerTest, ALoopThatStandsStillIsNotServing) {
  auto health = HealthServer::Start({.address = "127.0.0.1:0",
                                     .silence_max = std::chrono::milliseconds(200),
                                     .look_every = std::chrono::milliseconds(5)});
  ASSERT_TRUE(health.ok()) << health.status();
  (*health)->SetReady(true);
  HealthProbe probe((*health)->port());
  EXPECT_TRUE(probe.Becomes("", kNotServing));
  EXPECT_EQ(probe.Ask("ready"), kNotServing);
  std::atomic<bool> stop{false};
  std::thread beats([&] {
    while (!stop) {
      (*health)->Beat();
    }
  });
  EXPECT_TRUE(probe.Becomes("", kServing));
  EXPECT_TRUE(probe.Becomes("ready", kServing));
  stop = true;
  beats.join();
}

TEST(HealthServerTest, NothingElseIsServedThere) {
  auto health = HealthServer::Start({.address = "127.0.0.1:0"});
  ASSERT_TRUE(health.ok()) << health.status();
  HealthProbe probe((*health)->port());
  for (const char* method : {"/holdfast.v1.Admin/GetStatus", "/holdfast.v1.Admin/RemoveJob"}) {
    EXPECT_EQ(probe.Call(method, ""), 1000u + grpc::StatusCode::UNIMPLEMENTED) << method;
  }
}

TEST(HealthServerTest, APortThatIsTakenIsSaidSo) {
  auto first = HealthServer::Start({.address = "127.0.0.1:0"});
  ASSERT_TRUE(first.ok());
  const auto second =
      HealthServer::Start({.address = "127.0.0.1:" + std::to_string((*first)->port())});
  ASSERT_FALSE(second.ok());
  EXPECT_THAT(std::string(second.status().message()), HasSubstr("another process has the port"));
  EXPECT_FALSE(HealthServer::Start({.address = "203.0.113.1:1"}).ok());
}

}  // namespace
}  // namespace holdfast
