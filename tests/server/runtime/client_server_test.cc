#include "server/runtime/client_server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "server/runtime/daemon_config.h"
#include "tests/base/temporary_directory.h"
#include "tests/integration/raw_client.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;

// A server on a thread of its own; its "core" answers Leave at once, keeps Reserve waiting, and
// answers Attach with a pile of text.
class ClientServerTest : public ::testing::Test {
 protected:
  void Serve(const std::function<void(v1::SocketConfig&)>& change = [](v1::SocketConfig&) {}) {
    v1::SocketConfig config = DefaultConfig().socket();
    config.set_path(dir_.Path("s"));
    change(config);
    v1::HelloReply hello;
    hello.set_protocol(kClientProtocol);
    hello.set_daemon_version("0.0.1-test");
    server_ = std::make_unique<ClientServer>(
        *reactor_, config, hello,
        ClientServer::Callbacks{
            .opened = [this](ConnectionId, const Caller&) { ++opened_; },
            .request = [this](ConnectionId id, v1::ClientFrame frame) { Answer(id, frame); },
            .closed = [this](ConnectionId) { ++closed_; },
            .protocol_error = [this] { ++errors_; },
            .sent = [](ConnectionId, const v1::DaemonFrame&) {},
        });
    ASSERT_TRUE(server_->Listen().ok());
    thread_ = std::thread([this] { reactor_->Run(); });
  }
  void TearDown() override {
    if (thread_.joinable()) {
      reactor_->Stop();
      thread_.join();
    }
    server_.reset();
  }
  void Answer(ConnectionId id, const v1::ClientFrame& frame) {
    v1::DaemonFrame reply;
    reply.set_id(frame.id());
    if (frame.has_leave()) {
      reply.mutable_leave();
      server_->Send(id, reply);
      server_->Close(id, "left");
    } else if (frame.has_attach()) {
      reply.mutable_failure()->set_message(std::string(20'000, 'x'));
      server_->Send(id, reply);
    } else if (frame.has_confirm_read()) {  // two replies, the first completed last
      reply.mutable_confirm_read();
      const uint64_t first = server_->Reserve(id);
      const uint64_t second = server_->Reserve(id);
      v1::DaemonFrame later = reply;
      later.set_id(1000);
      server_->Complete(id, second, later, std::vector<UniqueFd>());
      std::vector<UniqueFd> descriptors;
      descriptors.emplace_back(::dup(0));
      descriptors.emplace_back(::dup(0));
      server_->Complete(id, first, reply, std::move(descriptors));
    }
  }
  std::unique_ptr<RawClient> Greet() { return RawClient::Greet(dir_.Path("s")); }
  v1::ClientFrame Leave() {
    v1::ClientFrame frame;
    frame.mutable_leave();
    return frame;
  }

  TemporaryDirectory dir_;
  std::unique_ptr<Reactor> reactor_ = *Reactor::Create(Clock::System());
  std::unique_ptr<ClientServer> server_;
  std::thread thread_;
  std::atomic<int> opened_{0};
  std::atomic<int> closed_{0};
  std::atomic<int> errors_{0};
};

TEST_F(ClientServerTest, AnswersHelloAndPassesRequestsOn) {
  Serve();
  auto client = Greet();
  ASSERT_NE(client, nullptr);
  const auto reply = client->Call(Leave());
  ASSERT_TRUE(reply.has_value());
  EXPECT_TRUE(reply->frame.has_leave());
  EXPECT_TRUE(client->WaitClosed()) << "closed after the reply was sent";
  EXPECT_EQ(opened_, 1);
  EXPECT_EQ(errors_, 0);
}

TEST_F(ClientServerTest, AnotherProtocolIsRefusedNamingBoth) {
  Serve();
  auto client = RawClient::Connect(dir_.Path("s"));
  v1::ClientFrame frame;
  frame.mutable_hello()->set_protocol(9);
  const auto reply = client->Call(frame);
  ASSERT_TRUE(reply.has_value());
  EXPECT_EQ(reply->frame.failure().code(), static_cast<int>(absl::StatusCode::kFailedPrecondition));
  EXPECT_THAT(reply->frame.failure().message(), HasSubstr("speaks protocol 9"));
  EXPECT_THAT(reply->frame.failure().message(), HasSubstr("speaks protocol 1"));
  EXPECT_TRUE(client->WaitClosed());
  EXPECT_EQ(opened_, 0);
}

TEST_F(ClientServerTest, WhateverBreaksTheProtocolClosesTheConnection) {
  Serve();
  v1::ClientFrame hello;
  hello.set_id(2);
  hello.mutable_hello()->set_protocol(1);
  v1::ClientFrame nothing;
  nothing.set_id(3);
  v1::ClientFrame old = Leave();
  old.set_id(1);
  const std::vector<std::pair<std::string, std::string>> after_hello = {
      {"garbage", Framed("\xff\xff\xff garbage")},
      {"an empty frame", Framed("")},
      {"a huge length", std::string("\xff\xff\xff\x7f", 4)},
      {"a second hello", Framed(hello.SerializeAsString())},
      {"no request", Framed(nothing.SerializeAsString())},
      {"an id that does not grow", Framed(old.SerializeAsString())},
  };
  int expected = 0;
  for (const auto& [what, bytes] : after_hello) {
    auto client = Greet();
    ASSERT_NE(client, nullptr);
    EXPECT_TRUE(client->SendBytes(bytes));
    EXPECT_TRUE(client->WaitClosed()) << what;
    EXPECT_EQ(errors_, ++expected) << what;
  }
  auto silent = RawClient::Connect(dir_.Path("s"));
  silent->Send(Leave());
  EXPECT_TRUE(silent->WaitClosed()) << "a request before Hello";
  auto generous = Greet();
  EXPECT_TRUE(generous->SendDescriptors(std::vector<int>(100, generous->fd())));
  EXPECT_TRUE(generous->WaitClosed()) << "descriptors";
  EXPECT_EQ(errors_, expected + 2);
}

TEST_F(ClientServerTest, NoHelloInTime) {
  Serve([](v1::SocketConfig& config) { config.set_hello_timeout_ms(20); });
  auto silent = RawClient::Connect(dir_.Path("s"));
  silent->SendBytes(std::string_view("\x05\0\0", 3));  // not even a length, if it is taken at all
  EXPECT_TRUE(silent->WaitClosed());
  EXPECT_EQ(errors_, 1);
}

TEST_F(ClientServerTest, RepliesKeepTheirOrderAndCarryTheirDescriptors) {
  Serve();
  auto client = Greet();
  v1::ClientFrame frame;
  frame.mutable_confirm_read();
  const uint64_t id = client->Send(frame);
  const auto first = client->Receive();
  const auto second = client->Receive();
  ASSERT_TRUE(first.has_value() && second.has_value());
  EXPECT_EQ(first->frame.id(), id);
  EXPECT_EQ(first->descriptors.size(), 2u);
  EXPECT_EQ(second->frame.id(), 1000u);
  EXPECT_EQ(second->descriptors.size(), 0u);
}

TEST_F(ClientServerTest, TooManyUnansweredRequestsAreRefusedOneByOne) {
  Serve([](v1::SocketConfig& config) { config.set_requests_per_connection_max(4); });
  auto client = Greet();
  v1::ClientFrame waiting;
  waiting.mutable_reserve();
  for (int i = 0; i < 4; ++i) {
    client->Send(waiting);
  }
  const auto refused = client->Call(waiting);
  ASSERT_TRUE(refused.has_value());
  EXPECT_EQ(refused->frame.failure().code(),
            static_cast<int>(absl::StatusCode::kResourceExhausted));
  EXPECT_THAT(refused->frame.failure().message(), HasSubstr("socket.requests_per_connection_max"));
}

TEST_F(ClientServerTest, AClientThatDoesNotReadIsClosed) {
  Serve([](v1::SocketConfig& config) {
    config.set_requests_per_connection_max(1000);
    config.set_reply_backlog_bytes_max(64 << 10);
  });
  auto client = Greet();
  v1::ClientFrame attach;
  attach.mutable_attach();
  for (int i = 0; i < 500; ++i) {
    client->Send(attach);
  }
  EXPECT_TRUE(client->WaitClosed());
  EXPECT_GE(errors_, 1);
  EXPECT_NE(Greet(), nullptr) << "others go on";
}

TEST_F(ClientServerTest, LimitsOfConnectionsAreToldToTheClient) {
  Serve([](v1::SocketConfig& config) { config.set_connections_per_uid_max(2); });
  auto first = Greet();
  auto second = Greet();
  auto third = RawClient::Connect(dir_.Path("s"));
  const auto refused = third->Receive();
  ASSERT_TRUE(refused.has_value());
  EXPECT_THAT(refused->frame.failure().message(), HasSubstr("socket.connections_per_uid_max"));
  EXPECT_TRUE(third->WaitClosed());
  ASSERT_TRUE(second->Call(Leave()).has_value());
  ASSERT_TRUE(second->WaitClosed());
  EXPECT_NE(Greet(), nullptr) << "there is room again";
}

}  // namespace
}  // namespace holdfast
