// Metrics over HTTP, whoever else is at the door.
#include "server/runtime/metrics_server.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <string>
#include <vector>

#include "base/unique_fd.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

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

std::string Get(int port, const std::string& path = "/metrics",
                const std::string& host = "localhost", const std::string& method = "GET") {
  const UniqueFd socket = Connect(port);
  const timeval patience = {60, 0};
  if (!socket.valid() ||
      ::setsockopt(socket.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience)) != 0) {
    return "cannot connect";
  }
  const std::string request = method + " " + path + " HTTP/1.1\r\nHost: " + host + "\r\n\r\n";
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

class MetricsServerTest : public ::testing::Test {
 protected:
  void Start(MetricsServer::Options options = {}) {
    options.address = "127.0.0.1:0";
    if (options.text == nullptr) {
      options.text = [] { return std::string("holdfast_slots 7\n"); };
    }
    auto server = MetricsServer::Start(std::move(options));
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    ASSERT_GT(server_->port(), 0);
  }
  std::unique_ptr<MetricsServer> server_;
};

TEST_F(MetricsServerTest, ServesThemAndNothingElse) {
  Start();
  const int port = server_->port();
  const std::string answer = Get(port);
  EXPECT_THAT(answer, StartsWith("HTTP/1.1 200 "));
  EXPECT_THAT(answer, HasSubstr("Content-Type: text/plain; version=0.0.4"));
  EXPECT_THAT(answer, HasSubstr("\r\n\r\nholdfast_slots 7\n"));
  EXPECT_THAT(Get(port, "/metrics", "localhost", "HEAD"), Not(HasSubstr("holdfast_slots")));
  EXPECT_THAT(Get(port, "/"), StartsWith("HTTP/1.1 404 "));
  EXPECT_THAT(Get(port, "/metrics", "localhost", "POST"), StartsWith("HTTP/1.1 405 "));
  EXPECT_THAT(Get(port, "/metrics\x01"), StartsWith("HTTP/1.1 400 "));
  EXPECT_THAT(Get(port, "/" + std::string(20'000, 'x')), StartsWith("HTTP/1.1 400 "));
}

TEST_F(MetricsServerTest, WhatIsNoHttpIsAnsweredAtOnce) {
  MetricsServer::Options options;
  options.request_max = std::chrono::hours(1);
  Start(std::move(options));
  for (const std::string& said : {std::string("\x16\x03\x01\x02\x00\x01", 6), std::string(1, '\0'),
                                  std::string("\r\n"), std::string("GET\x01")}) {
    const UniqueFd socket = Connect(server_->port());
    ASSERT_EQ(::send(socket.get(), said.data(), said.size(), 0), static_cast<ssize_t>(said.size()));
    const timeval patience = {20, 0};
    ASSERT_EQ(::setsockopt(socket.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience)), 0);
    char buffer[4096];
    const ssize_t got = ::recv(socket.get(), buffer, sizeof(buffer), 0);
    ASSERT_GT(got, 0);
    EXPECT_THAT(std::string(buffer, static_cast<size_t>(got)), StartsWith("HTTP/1.1 400 "));
  }
}

// As a page does under whose name a browser was made to come here.
TEST_F(MetricsServerTest, TheLoopbackAnswersByItsOwnNames) {
  Start();
  for (const std::string host : {"localhost", "127.0.0.1:9464", "[::1]:9464"}) {
    EXPECT_THAT(Get(server_->port(), "/metrics", host), StartsWith("HTTP/1.1 200 ")) << host;
  }
  EXPECT_THAT(Get(server_->port(), "/metrics", "evil.example"), StartsWith("HTTP/1.1 421 "));
}

TEST_F(MetricsServerTest, WhoDoesNotAskKeepsOutNobodyWhoDoes) {
  Start();
  std::vector<UniqueFd> half_open;
  for (int i = 0; i < 600; ++i) {
    half_open.push_back(Connect(server_->port()));
    ASSERT_TRUE(half_open.back().valid());
    if (i % 2 == 0) {
      ASSERT_EQ(::send(half_open.back().get(), "GET /met", 8, MSG_NOSIGNAL), 8);
    }
    if (i % 50 == 0) {
      EXPECT_THAT(Get(server_->port()), HasSubstr("holdfast_slots 7\n")) << i;
    }
  }
}

TEST_F(MetricsServerTest, WhoDoesNotTakeTheAnswerKeepsOutNobodyWhoDoes) {
  MetricsServer::Options options;
  options.text = [] { return std::string(8 << 20, 'x') + "\nend\n"; };
  Start(std::move(options));
  std::vector<UniqueFd> slow;
  const std::string request = "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n";
  for (size_t i = 0; i < MetricsServer::kAnswersMax + 8; ++i) {
    slow.push_back(Connect(server_->port()));
    ASSERT_EQ(::send(slow.back().get(), request.data(), request.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(request.size()));
  }
  EXPECT_THAT(Get(server_->port()), HasSubstr("\nend\n"));
}

TEST_F(MetricsServerTest, WhoIsSilentLeavesInTime) {
  MetricsServer::Options options;
  options.request_max = std::chrono::milliseconds(50);
  Start(std::move(options));
  const UniqueFd silent = Connect(server_->port());
  char byte = 0;
  EXPECT_EQ(::recv(silent.get(), &byte, 1, 0), 0) << "it was closed";
}

TEST_F(MetricsServerTest, ATakenPortAndNonsenseAreStatuses) {
  Start();
  const auto second = MetricsServer::Start(
      {"127.0.0.1:" + std::to_string(server_->port()), [] { return std::string(); }});
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable) << second.status();
  EXPECT_THAT(std::string(second.status().message()), HasSubstr("serve metrics on '127.0.0.1:"));
  EXPECT_FALSE(MetricsServer::Start({"nonsense:port", [] { return std::string(); }}).ok());
}

}  // namespace
}  // namespace holdfast
