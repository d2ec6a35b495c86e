#include "server/runtime/health_server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sys/socket.h>

#include <atomic>
#include <filesystem>
#include <thread>
#include <vector>

#include "base/tcp_socket.h"
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

// Who says nothing, and who asks and stays, keep no probe out, however many they are.
TEST(HealthServerTest, StrangersInAnyNumberKeepNoProbeOut) {
  auto health = HealthServer::Start({.address = "127.0.0.1:0"});
  ASSERT_TRUE(health.ok()) << health.status();
  const std::string address = "127.0.0.1:" + std::to_string((*health)->port());
  const MonotonicTime until = Clock::System()->Now() + std::chrono::seconds(60);
  const auto descriptors = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
  };
  const auto before = descriptors();
  std::vector<UniqueFd> strangers;
  for (int i = 0; i < 800; ++i) {
    strangers.push_back(*ConnectTcp(address, until));
    if (i % 2 == 0) {  // as a client does that will never ask
      const std::string greeting = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
      ASSERT_EQ(::send(strangers.back().get(), greeting.data(), greeting.size(), MSG_NOSIGNAL),
                static_cast<ssize_t>(greeting.size()));
    }
    if (i % 100 == 99) {
      EXPECT_EQ(HealthProbe((*health)->port()).Ask(""), kServing) << i;
    }
  }
  // Of the server's ends, which are in this process, too, it has kept what it has places for.
  EXPECT_LT(descriptors() - before, 800 + 256 + 2 * 64 + 100);
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
