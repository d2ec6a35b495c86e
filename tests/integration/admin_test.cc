// The admin socket and /metrics of the real daemon.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/impl/client_unary_call.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <atomic>
#include <optional>
#include <string>
#include <thread>

#include "holdfast/v1/admin.grpc.pb.h"
#include "tests/integration/harness.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;

UniqueFd ConnectAdmin(const std::string& path) {
  UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof(address.sun_path) - 1);
  EXPECT_EQ(::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  return fd;
}

std::string Fetch(uint16_t port, const std::string& path) {
  const UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return "cannot connect";
  }
  const std::string request =
      "GET " + path + " HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
  EXPECT_EQ(::send(fd.get(), request.data(), request.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(request.size()));
  std::string answer;
  char buffer[4096];
  for (ssize_t got = 0; (got = ::recv(fd.get(), buffer, sizeof(buffer), 0)) > 0;) {
    answer.append(buffer, static_cast<size_t>(got));
  }
  return answer;
}

// As the log says it, in a whole line.
std::optional<uint64_t> MetricsPort(Node& node) {
  std::optional<uint64_t> port;
  node.Until([&](const v1::GetStatusReply&) {
    const std::string log = node.Log();
    const size_t at = log.find("metrics_port=");
    if (at != std::string::npos && log.find('\n', at) != std::string::npos) {
      port = NumberAfter(log, "metrics_port=");
    }
    return port.has_value();
  });
  return port;
}

TEST(Admin, StatusTellsWhatTheDaemonIs) {
  Node node;
  ASSERT_TRUE(node.Start());
  const auto status = node.Status();
  ASSERT_TRUE(status.has_value());
  const v1::DaemonStatus& daemon = status->daemon();
  EXPECT_EQ(daemon.pid(), node.pid());
  EXPECT_EQ(daemon.memory_bytes_max(), 256u << 20);
  EXPECT_EQ(daemon.memory_bytes_used(), 0u);
  EXPECT_GT(daemon.memory_bytes_free_in_tmpfs(), 0u);
  EXPECT_EQ(daemon.memory_dir(), node.memory_dir());
  EXPECT_FALSE(daemon.node_name().empty());
  EXPECT_FALSE(daemon.version().empty());
  EXPECT_EQ(daemon.problems_size(), 0);
  EXPECT_EQ(status->jobs_size(), 0);
}

TEST(Admin, TheHealthServiceAnswers) {
  Node node;
  ASSERT_TRUE(node.Start());
  const auto channel =
      grpc::CreateChannel("unix:" + node.admin_socket(), grpc::InsecureChannelCredentials());
  // By its wire form, so that no generated code is needed: an empty HealthCheckRequest, and SERVING
  // as the answer.
  const grpc::Slice empty;
  const grpc::ByteBuffer request(&empty, 1);
  grpc::ByteBuffer reply;
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kPatience);
  const grpc::internal::RpcMethod method("/grpc.health.v1.Health/Check",
                                         grpc::internal::RpcMethod::NORMAL_RPC);
  const grpc::Status status = grpc::internal::BlockingUnaryCall<grpc::ByteBuffer, grpc::ByteBuffer>(
      channel.get(), method, &context, request, &reply);
  EXPECT_TRUE(status.ok()) << status.error_message();
  grpc::Slice bytes;
  ASSERT_TRUE(reply.DumpToSingleSlice(&bytes).ok());
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(bytes.begin()), bytes.size()),
            std::string("\x08\x01", 2));
}

TEST(Admin, UnknownJobsAndShardsAreNamed) {
  Node node;
  ASSERT_TRUE(node.Start());
  const Node::Verified verified = node.Verify("nothing-here");
  EXPECT_FALSE(verified.ok);
  EXPECT_THAT(verified.error, HasSubstr("nothing-here"));
  EXPECT_THAT(node.Remove("nothing-here"), HasSubstr("nothing-here"));
}

TEST(Admin, ConnectionsThatSayNothingOrGarbageHurtNobody) {
  Node node;
  ASSERT_TRUE(node.Start());
  std::vector<UniqueFd> silent;
  for (int i = 0; i < 100; ++i) {  // more than one user may have
    silent.push_back(ConnectAdmin(node.admin_socket()));
    ::send(silent.back().get(), "garbage garbage garbage\r\n\r\n", 27, MSG_NOSIGNAL);
  }
  silent.clear();
  EXPECT_TRUE(node.Until([](const v1::GetStatusReply&) { return true; }));
  Rank rank(node, {});
  EXPECT_EQ(rank.Do("open"), "ok attempt=1");
}

TEST(Admin, InspectGivesTheRecordsBytes) {
  Node node;
  ASSERT_TRUE(node.Start());
  Rank rank(node, {});
  ASSERT_EQ(rank.Do("open"), "ok attempt=1");
  ASSERT_THAT(rank.Do("restore"), HasSubstr("NOTHING_TO_RESTORE"));
  ASSERT_EQ(rank.Do("save 7"), "ok sealed");
  ASSERT_EQ(rank.Do("committed"), "ok committed");
  const auto stub = v1::Admin::NewStub(
      grpc::CreateChannel("unix:" + node.admin_socket(), grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kPatience);
  v1::InspectShardRequest request;
  request.set_job("job");
  request.set_newest(true);
  v1::InspectShardReply reply;
  const grpc::Status status = stub->InspectShard(&context, request, &reply);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(reply.record(), ReadText(node.memory_dir() + "/" + reply.location() + ".record"));
}

TEST(Admin, SavesGoOnWhileEverythingIsVerifiedAgainAndAgain) {
  Node node({.memory_bytes = "30MiB"});  // three slots, and no room to spare
  ASSERT_TRUE(node.Start());
  Rank rank(node, {.bytes = 9 << 20});
  ASSERT_EQ(rank.Do("open"), "ok attempt=1");
  ASSERT_THAT(rank.Do("restore"), HasSubstr("NOTHING_TO_RESTORE"));
  uint64_t step = 0;
  const auto save = [&] {
    ASSERT_EQ(rank.Do("save " + std::to_string(++step)), "ok sealed");
    ASSERT_EQ(rank.Do("committed"), "ok committed");
  };
  save();
  std::atomic<bool> enough{false};
  uint64_t runs = 0;
  uint64_t shards = 0;
  std::string problems;
  std::thread verifying([&] {
    while (!enough) {
      const Node::Verified verified = node.Verify("job");
      ++runs;
      shards += verified.shards;
      if (!verified.ok || !verified.bad.empty()) {
        problems += verified.error + "; ";
      }
    }
  });
  for (int i = 0; i < 40 && !::testing::Test::HasFailure(); ++i) {
    save();
  }
  enough = true;
  verifying.join();
  EXPECT_EQ(problems, "");
  EXPECT_GT(shards, 0u) << "in " << runs << " runs";
}

TEST(Metrics, CountWhatHappened) {
  Node node({.config = "metrics: {address: \"127.0.0.1:0\"}\n"});
  ASSERT_TRUE(node.Start());
  const auto port = MetricsPort(node);
  ASSERT_TRUE(port.has_value());
  Rank rank(node, {});
  ASSERT_EQ(rank.Do("open"), "ok attempt=1");
  ASSERT_THAT(rank.Do("restore"), HasSubstr("NOTHING_TO_RESTORE"));
  ASSERT_EQ(rank.Do("save 1"), "ok sealed");
  ASSERT_EQ(rank.Do("committed"), "ok committed");
  RawClient::Connect(node.socket())->SendBytes("garbage");
  const std::string text = Fetch(static_cast<uint16_t>(*port), "/metrics");
  EXPECT_THAT(text, HasSubstr("holdfast_saves_total{outcome=\"sealed\"} 1"));
  EXPECT_THAT(text, HasSubstr("holdfast_steps_total{outcome=\"committed\"} 1"));
  EXPECT_THAT(text, HasSubstr("holdfast_build_info"));
  EXPECT_THAT(text, HasSubstr("holdfast_core_handle_seconds_count"));
  EXPECT_THAT(text, HasSubstr("holdfast_memory_max_bytes 268435456"));
}

TEST(Metrics, APortThatIsTakenIsAProblemInTheStatusAndNoMore) {
  Node first({.config = "metrics: {address: \"127.0.0.1:0\"}\n"});
  ASSERT_TRUE(first.Start());
  const auto port = MetricsPort(first);
  ASSERT_TRUE(port.has_value());
  Node second({.config = "metrics: {address: \"127.0.0.1:" + std::to_string(*port) + "\"}\n"});
  ASSERT_TRUE(second.Start());
  const auto status = second.Status();
  ASSERT_TRUE(status.has_value());
  ASSERT_EQ(status->daemon().problems_size(), 1);
  EXPECT_THAT(status->daemon().problems(0), HasSubstr("metrics.address"));
}

}  // namespace
}  // namespace holdfast
