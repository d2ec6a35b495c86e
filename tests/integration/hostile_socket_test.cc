// Clients that break the protocol, against the real daemon: each loses its own connection, and
// nobody else notices.
#include <dirent.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>

#include "server/runtime/passed_memory.h"
#include "tests/integration/harness.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;

size_t OpenDescriptors(pid_t pid) {
  return FilesIn("/proc/" + std::to_string(pid) + "/fd", "").size();
}

class HostileSocketTest : public ::testing::Test {
 protected:
  void StartNode(const std::string& socket_settings = "") {
    node_ = std::make_unique<Node>(NodeOptions{
        .config = socket_settings.empty() ? "" : "socket: {" + socket_settings + "}\n"});
    ASSERT_TRUE(node_->Start());
  }
  // A well-behaved job still works.
  void ExpectHealthy() {
    Rank rank(*node_, {.job = "healthy"});
    EXPECT_EQ(rank.Do("open").substr(0, 2), "ok");
    const std::string restored = rank.Do("restore");
    EXPECT_TRUE(StartsWith(restored, "ok") || StartsWith(restored, "error NOTHING_TO_RESTORE"))
        << restored;
    EXPECT_EQ(rank.Do("save " + std::to_string(++step_)), "ok sealed");
    EXPECT_EQ(rank.Do("committed"), "ok committed");
  }

  std::unique_ptr<Node> node_;
  uint64_t step_ = 0;
};

TEST_F(HostileSocketTest, GarbageInEveryFormCostsItsSenderTheConnection) {
  StartNode();
  std::string random;
  for (uint32_t i = 0, x = 1; i < 100'000; ++i) {
    x = x * 1664525 + 1013904223;
    random.push_back(static_cast<char>(x >> 24));
  }
  v1::ClientFrame begin;
  begin.set_id(100);
  begin.mutable_begin_save()->set_step(1);
  const std::vector<std::pair<std::string, std::string>> attacks = {
      {"random bytes", random},
      {"a frame of 4 GiB", std::string("\xff\xff\xff\xff", 4)},
      {"one byte too long", std::string("\x01\x00\x01\x00", 4) + std::string(65'537, 'x')},
      {"an empty frame", std::string(4, '\0')},
      {"a frame of garbage", Framed(random.substr(0, 60'000))},
      {"deep nesting", Framed(std::string(30'000, '\x0b'))},
      {"an HTTP request", "GET / HTTP/1.1\r\nHost: x\r\n\r\n"},
  };
  for (const auto& [what, bytes] : attacks) {
    auto before_hello = RawClient::Connect(node_->socket());
    ASSERT_NE(before_hello, nullptr);
    before_hello->SendBytes(bytes);
    EXPECT_TRUE(before_hello->WaitClosed()) << what;
    auto after_hello = RawClient::Greet(node_->socket());
    ASSERT_NE(after_hello, nullptr);
    after_hello->SendBytes(bytes);
    EXPECT_TRUE(after_hello->WaitClosed()) << what << ", after Hello";
  }
  ExpectHealthy();
  EXPECT_THAT(node_->Log(), HasSubstr("client connection closed"));
}

TEST_F(HostileSocketTest, RequestsThatMakeNoSenseAreAnsweredOrRefused) {
  StartNode();
  auto client = RawClient::Greet(node_->socket());
  ASSERT_NE(client, nullptr);
  // Everything that needs a rank, without one; then with hostile values.
  for (const int with_rank : {0, 1}) {
    if (with_rank == 1) {
      const auto joined = client->Join("hostile", 0, 1);
      ASSERT_TRUE(joined.has_value());
      ASSERT_TRUE(joined->frame.has_join()) << joined->frame.failure().message();
    }
    std::vector<v1::ClientFrame> frames(7);
    frames[0].mutable_begin_save()->set_slot_bytes(UINT64_MAX);
    frames[1].mutable_begin_save();
    frames[2].mutable_seal()->set_slot(UINT32_MAX);
    frames[3].mutable_reserve()->set_slots(UINT32_MAX);
    frames[3].mutable_reserve()->set_slot_bytes(UINT64_MAX);
    frames[4].mutable_report_load()->set_session(UINT64_MAX);
    frames[5].mutable_confirm_read()->set_slot(77);
    frames[6].mutable_await_save()->set_stage(static_cast<v1::AwaitSave::Stage>(99));
    for (v1::ClientFrame& frame : frames) {
      const int kind = frame.request_case();
      const auto reply = client->Call(frame);
      ASSERT_TRUE(reply.has_value()) << "request " << kind << ", with rank: " << with_rank;
      EXPECT_TRUE(reply->frame.has_failure()) << reply->frame.ShortDebugString();
      EXPECT_FALSE(reply->frame.failure().message().empty()) << kind;
    }
  }
  for (const std::string name : {"", "../../etc", "a/b", ".hidden", "-x", "new\nline"}) {
    const auto refused = RawClient::Greet(node_->socket())->Join(name, 0, 1);
    ASSERT_TRUE(refused.has_value());
    EXPECT_TRUE(refused->frame.has_failure()) << name;
  }
  ExpectHealthy();
}

TEST_F(HostileSocketTest, DescriptorsAreClosedWithTheConnection) {
  StartNode();
  ExpectHealthy();
  const size_t before = OpenDescriptors(node_->pid());
  for (int i = 0; i < 20; ++i) {
    auto client = RawClient::Greet(node_->socket());
    ASSERT_NE(client, nullptr);
    EXPECT_TRUE(client->SendDescriptors(std::vector<int>(250, client->fd())));
    EXPECT_TRUE(client->WaitClosed());
  }
  EXPECT_LE(OpenDescriptors(node_->pid()), before + 2);
}

// Protobuf says of such what it thinks: not by itself, and not as often as they come.
TEST_F(HostileSocketTest, TextsThatAreNoUtf8DoNotFillTheLog) {
  StartNode();
  v1::ClientFrame hello;
  hello.set_id(1);
  hello.mutable_hello()->set_protocol(1);
  hello.mutable_hello()->set_client("abc");
  std::string bytes = hello.SerializeAsString();
  bytes.replace(bytes.find("abc"), 3, "\xff\xfe\xfd");
  for (int i = 0; i < 2000; ++i) {
    auto client = RawClient::Connect(node_->socket());
    ASSERT_NE(client, nullptr);
    client->SendBytes(Framed(bytes));
    ASSERT_TRUE(client->WaitClosed());
  }
  ExpectHealthy();
  ASSERT_EQ(node_->Stop(), 0);  // what was logged is out
  const std::string log = node_->Log();
  EXPECT_EQ(log.find("[libprotobuf"), std::string::npos);
  EXPECT_NE(log.find("warning Protobuf: "), std::string::npos);
  EXPECT_LT(log.size(), 1u << 20);
}

TEST_F(HostileSocketTest, ClientsThatSayNothingOrHalfAFrameAreClosed) {
  StartNode("hello_timeout_ms: 1000");
  auto silent = RawClient::Connect(node_->socket());
  auto half = RawClient::Connect(node_->socket());
  v1::ClientFrame hello;
  hello.set_id(1);
  hello.mutable_hello()->set_protocol(1);
  const std::string bytes = Framed(hello.SerializeAsString());
  half->SendBytes(bytes.substr(0, bytes.size() - 1));
  auto whole = RawClient::Greet(node_->socket());
  ASSERT_NE(whole, nullptr);
  EXPECT_TRUE(silent->WaitClosed());
  EXPECT_TRUE(half->WaitClosed());
  const auto reply = whole->Join("patient", 0, 1);
  ASSERT_TRUE(reply.has_value()) << "whoever said hello stays";
  EXPECT_TRUE(reply->frame.has_join());
}

TEST_F(HostileSocketTest, AClientThatStopsReadingIsClosedAndOthersGoOn) {
  StartNode("reply_backlog_bytes_max: 64KiB, requests_per_connection_max: 64");
  auto client = RawClient::Greet(node_->socket());
  ASSERT_NE(client, nullptr);
  v1::ClientFrame attach;
  attach.mutable_attach()->set_job("there-is-no-such-job");
  // Every answer is a failure of a hundred bytes or so: sent until the daemon has had enough.
  bool closed = false;
  for (int i = 0; i < 200'000 && !closed; ++i) {
    attach.set_id(static_cast<uint64_t>(i) + 10);
    closed = !client->SendBytes(Framed(attach.SerializeAsString()));
  }
  EXPECT_TRUE(closed);
  ExpectHealthy();
}

// Memory that ckptd passed is charged to ckptd for as long as somebody has it. Here a user keeps
// the page of each connection that was.
TEST_F(HostileSocketTest, AUserKeepsSoMuchPassedMemoryAndNoMore) {
  StartNode();
  v1::ClientFrame hello;
  hello.mutable_hello()->set_protocol(1);
  hello.mutable_hello()->set_network_flag(true);
  std::vector<void*> kept;
  const auto connect = [&](bool keep) {
    auto client = RawClient::Connect(node_->socket());
    const auto reply = client == nullptr ? std::nullopt : client->Call(hello);
    const bool has_page = reply && reply->frame.hello().network_flag();
    if (has_page && keep) {
      const int page = reply->descriptors.at(0).get();
      kept.push_back(::mmap(nullptr, 4096, PROT_READ, MAP_SHARED, page, 0));
    }
    return has_page;
  };
  while (kept.size() <= PassedMemory::kFilesPerUserMax && connect(true)) {
  }
  EXPECT_EQ(kept.size(), PassedMemory::kFilesPerUserMax);
  ExpectHealthy();  // that user's training, too
  for (void* const page : kept) {
    ::munmap(page, 4096);
  }
  bool has_page = false;
  for (const auto until = std::chrono::steady_clock::now() + kPatience;
       !has_page && std::chrono::steady_clock::now() < until;) {
    has_page = connect(false);
  }
  EXPECT_TRUE(has_page) << "it has nothing any more";
  ASSERT_EQ(node_->Stop(), 0);  // what was logged is out
  EXPECT_THAT(node_->Log(), HasSubstr("files that ckptd passed to them"));
}

TEST_F(HostileSocketTest, AStoppedClientDelaysNobody) {
  StartNode();
  Rank stopped(*node_, {.job = "stopped"});
  ASSERT_EQ(stopped.Do("open").substr(0, 2), "ok");
  stopped.child().Signal(SIGSTOP);
  ExpectHealthy();
  stopped.child().Signal(SIGCONT);
  EXPECT_THAT(stopped.Do("restore"), HasSubstr("NOTHING_TO_RESTORE"));
}

}  // namespace
}  // namespace holdfast
