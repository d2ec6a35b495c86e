#include "server/runtime/client_server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/capability.h>
#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <future>
#include <thread>

#include "server/runtime/daemon_config.h"
#include "tests/base/temporary_directory.h"
#include "tests/integration/raw_client.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;

// The calling thread may have no more descriptors in flight than other users' threads.
void ActAsNoRoot() {
  __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
  std::array<__user_cap_data_struct, 2> data = {};
  ASSERT_EQ(::syscall(SYS_capget, &header, data.data()), 0);
  data[0].effective &= ~((1u << CAP_SYS_RESOURCE) | (1u << CAP_SYS_ADMIN));
  ASSERT_EQ(::syscall(SYS_capset, &header, data.data()), 0);
}

// As many descriptors in flight as the kernel allows, which are then fewer, until it goes.
class NoRoomInFlight {
 public:
  NoRoomInFlight() {
    EXPECT_EQ(::getrlimit(RLIMIT_NOFILE, &before_), 0);
    const rlimit few = {kDescriptorsMax, before_.rlim_max};
    EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
    std::array<int, 2> fds = {};
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds.data()), 0);
    from_ = UniqueFd(fds[0]);
    to_ = UniqueFd(fds[1]);
    const std::array<int, kDescriptorsMax + 1> many = {};  // standard input, so many times
    char byte = 1;
    iovec data = {&byte, 1};
    alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(many))> control = {};
    msghdr message = {};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(many));
    std::memcpy(CMSG_DATA(header), many.data(), sizeof(many));
    EXPECT_EQ(::sendmsg(from_.get(), &message, MSG_NOSIGNAL), 1);
  }
  ~NoRoomInFlight() { ::setrlimit(RLIMIT_NOFILE, &before_); }

 private:
  static constexpr size_t kDescriptorsMax = 200;  // more than this process has open
  rlimit before_ = {};
  UniqueFd from_;
  UniqueFd to_;
};

// Bytes that the client has not read yet.
int UnreadBytes(const RawClient& client) {
  int bytes = -1;
  EXPECT_EQ(::ioctl(client.fd(), FIONREAD, &bytes), 0);
  return bytes;
}

// A server on a thread of its own; its "core" answers Leave at once, ReleaseRead with two
// descriptors, keeps Reserve waiting, and answers Attach with a pile of text.
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
    } else if (frame.has_release_read()) {
      reply.mutable_release_read();
      std::vector<UniqueFd> descriptors;
      descriptors.emplace_back(::dup(0));
      descriptors.emplace_back(::dup(0));
      server_->Complete(id, server_->Reserve(id), reply, std::move(descriptors));
    }
  }
  // Until the server has taken what this client sent, and has done all that comes of it at once.
  void AwaitServed(const RawClient& client) {
    int unsent = 1;
    for (const auto until = std::chrono::steady_clock::now() + kPatience;
         unsent > 0 && std::chrono::steady_clock::now() < until;) {
      ASSERT_EQ(::ioctl(client.fd(), SIOCOUTQ, &unsent), 0);
      std::this_thread::yield();
    }
    ASSERT_EQ(unsent, 0) << "the server does not read";
    AwaitLoop();
  }
  // Until what the loop does now is done.
  void AwaitLoop() {
    std::promise<void> done;
    reactor_->Post([&done] { done.set_value(); });
    ASSERT_EQ(done.get_future().wait_for(kPatience), std::future_status::ready);
  }
  std::unique_ptr<RawClient> Greet() { return RawClient::Greet(dir_.Path("s")); }
  v1::ClientFrame AskForDescriptors() {
    v1::ClientFrame frame;
    frame.mutable_release_read();
    return frame;
  }
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

// What is unread in a socket is in flight for the kernel, which lets so many descriptors be.
TEST_F(ClientServerTest, OfAClientThatDoesNotReadFewDescriptorsAreInFlight) {
  constexpr int kRequests = 100;
  constexpr int kUnreadMax = 16;      // replies
  constexpr int kReplyBytesMax = 16;  // of these
  Serve([](v1::SocketConfig& config) { config.set_requests_per_connection_max(kRequests); });
  auto client = Greet();
  ASSERT_NE(client, nullptr);
  for (int i = 0; i < kRequests; ++i) {
    client->Send(AskForDescriptors());
  }
  AwaitServed(*client);
  EXPECT_GT(UnreadBytes(*client), 0);
  EXPECT_LE(UnreadBytes(*client), kUnreadMax * kReplyBytesMax);
  for (int i = 0; i < kRequests; ++i) {
    const auto reply = client->Receive();
    ASSERT_TRUE(reply.has_value()) << i;
    EXPECT_TRUE(reply->frame.has_release_read());
    EXPECT_EQ(reply->descriptors.size(), 2u);
  }
}

TEST_F(ClientServerTest, WhereTooManyDescriptorsAreInFlightTheReplyWaits) {
  Serve();
  auto client = Greet();
  ASSERT_NE(client, nullptr);
  reactor_->Post([] { ActAsNoRoot(); });
  AwaitLoop();
  {
    const NoRoomInFlight others;
    client->Send(AskForDescriptors());
    AwaitServed(*client);
    char byte = 0;
    const ssize_t got = ::recv(client->fd(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    const int error = errno;
    EXPECT_EQ(got, -1) << "it was answered, or closed";
    EXPECT_EQ(error, EAGAIN);
    EXPECT_EQ(closed_, 0);
  }
  const auto reply = client->Receive();
  ASSERT_TRUE(reply.has_value());
  EXPECT_TRUE(reply->frame.has_release_read());
  EXPECT_EQ(reply->descriptors.size(), 2u);
}

// Else who connects again and again, and reads nothing, has any number of descriptors in flight.
TEST_F(ClientServerTest, AConnectionThatEndedCountsUntilItsClientHasReadOrGone) {
  Serve([](v1::SocketConfig& config) { config.set_connections_per_uid_max(2); });
  auto reads_later = Greet();
  auto goes_later = Greet();
  for (RawClient* const client : {reads_later.get(), goes_later.get()}) {
    ASSERT_NE(client, nullptr);
    client->Send(AskForDescriptors());
    client->SendBytes(Framed(""));  // which ends the connection
    AwaitServed(*client);
  }
  ASSERT_EQ(closed_, 2);
  EXPECT_EQ(Greet(), nullptr) << "neither has read its answer";
  const auto reply = reads_later->Receive();
  ASSERT_TRUE(reply.has_value());
  EXPECT_EQ(reply->descriptors.size(), 2u);
  EXPECT_TRUE(reads_later->WaitClosed());
  auto next = Greet();
  EXPECT_NE(next, nullptr);
  EXPECT_EQ(Greet(), nullptr);
  goes_later.reset();
  EXPECT_NE(Greet(), nullptr);
}

}  // namespace
}  // namespace holdfast
