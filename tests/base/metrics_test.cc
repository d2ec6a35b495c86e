#include "base/metrics.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <thread>

#include "base/unique_fd.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(MetricsTest, TextShowsWhatWasCounted) {
  Metrics metrics;
  metrics.AddCounter("holdfast_saves_total", "Saves by outcome.", {{"outcome", "sealed"}}).Add(2);
  metrics.AddCounter("holdfast_saves_total", "Saves by outcome.", {{"outcome", "shed"}}).Add(1);
  metrics.AddGauge("holdfast_slots", "Slots.").Set(7);
  metrics.AddHistogram("holdfast_seal_seconds", "Time to seal.", {0.1, 1}).Observe(0.5);
  const std::string text = metrics.Text();
  EXPECT_THAT(text, HasSubstr("# HELP holdfast_saves_total Saves by outcome.\n"));
  EXPECT_THAT(text, HasSubstr("holdfast_saves_total{outcome=\"sealed\"} 2\n"));
  EXPECT_THAT(text, HasSubstr("holdfast_saves_total{outcome=\"shed\"} 1\n"));
  EXPECT_THAT(text, HasSubstr("holdfast_slots 7\n"));
  EXPECT_THAT(text, HasSubstr("holdfast_seal_seconds_bucket{le=\"0.1\"} 0\n"));
  EXPECT_THAT(text, HasSubstr("holdfast_seal_seconds_bucket{le=\"1\"} 1\n"));
}

TEST(MetricsTest, SameNameAndLabelsAreTheSameObject) {
  Metrics metrics;
  EXPECT_EQ(&metrics.AddCounter("a_total", "A.", {{"x", "1"}}),
            &metrics.AddCounter("a_total", "A.", {{"x", "1"}}));
  EXPECT_NE(&metrics.AddCounter("a_total", "A.", {{"x", "1"}}),
            &metrics.AddCounter("a_total", "A.", {{"x", "2"}}));
  EXPECT_EQ(&metrics.AddGauge("b", "B."), &metrics.AddGauge("b", "B."));
  EXPECT_EQ(&metrics.AddHistogram("c", "C.", {1}), &metrics.AddHistogram("c", "C.", {1}));
}

TEST(MetricsTest, RemovedGaugesVanishAndMayComeBack) {
  Metrics metrics;
  metrics.AddGauge("holdfast_step", "Step.", {{"job", "a"}}).Set(1);
  metrics.AddGauge("holdfast_step", "Step.", {{"job", "b"}}).Set(2);
  metrics.RemoveGauge("holdfast_step", {{"job", "a"}});
  metrics.RemoveGauge("holdfast_step", {{"job", "never there"}});
  EXPECT_THAT(metrics.Text(), Not(HasSubstr("job=\"a\"")));
  EXPECT_THAT(metrics.Text(), HasSubstr("holdfast_step{job=\"b\"} 2\n"));
  metrics.AddGauge("holdfast_step", "Step.", {{"job", "a"}}).Set(3);
  EXPECT_THAT(metrics.Text(), HasSubstr("holdfast_step{job=\"a\"} 3\n"));
}

TEST(MetricsTest, ThreadsCountTogether) {
  Metrics metrics;
  const auto count = [&metrics] {
    for (int i = 0; i < 1000; ++i) {
      metrics.AddCounter("n_total", "N.").Add(1);
    }
  };
  std::thread other(count);
  count();
  other.join();
  EXPECT_THAT(metrics.Text(), HasSubstr("n_total 2000\n"));
}

UniqueFd Connect(int port) {
  UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (::connect(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) {
    socket.reset();
  }
  return socket;
}

std::string Get(int port) {
  const UniqueFd socket = Connect(port);
  const timeval patience = {60, 0};
  if (!socket.valid() ||
      ::setsockopt(socket.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience)) != 0) {
    return "cannot connect";
  }
  const std::string request = "GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n";
  if (::send(socket.get(), request.data(), request.size(), 0) !=
      static_cast<ssize_t>(request.size())) {
    return "cannot send";
  }
  std::string answer;
  char buffer[4096];
  for (ssize_t got = 0; (got = ::recv(socket.get(), buffer, sizeof(buffer), 0)) > 0;) {
    answer.append(buffer, static_cast<size_t>(got));
  }
  return answer;
}

TEST(MetricsTest, ServesOnAPortOfItsChoice) {
  Metrics metrics;
  metrics.AddGauge("holdfast_slots", "Slots.").Set(7);
  ASSERT_TRUE(metrics.Serve("127.0.0.1:0").ok());
  ASSERT_GT(metrics.port(), 0);
  EXPECT_THAT(Get(metrics.port()), HasSubstr("holdfast_slots 7\n"));
  EXPECT_EQ(metrics.Serve("127.0.0.1:0").code(), absl::StatusCode::kFailedPrecondition);
}

TEST(MetricsTest, RequestsThatAreNeverFinishedDoNotBlindIt) {
  Metrics metrics;
  metrics.AddGauge("holdfast_slots", "Slots.").Set(7);
  ASSERT_TRUE(metrics.Serve("127.0.0.1:0").ok());
  std::vector<UniqueFd> half_open;
  for (int i = 0; i < 12; ++i) {
    half_open.push_back(Connect(metrics.port()));
    ASSERT_EQ(::send(half_open.back().get(), "GET /met", 8, 0), 8);
  }
  EXPECT_THAT(Get(metrics.port()), HasSubstr("holdfast_slots 7\n"));
}

TEST(MetricsTest, ATakenPortAndNonsenseAreStatuses) {
  Metrics first;
  ASSERT_TRUE(first.Serve("127.0.0.1:0").ok());
  Metrics second;
  const absl::Status status = second.Serve("127.0.0.1:" + std::to_string(first.port()));
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_EQ(second.port(), 0);
  EXPECT_FALSE(second.Serve("nonsense:port").ok());
}

}  // namespace
}  // namespace holdfast
