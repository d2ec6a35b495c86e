// TLS between two ends in one process: who is let in, and what each is told who is not.
#include "base/tls.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/env.h"
#include "base/status.h"
#include "base/tcp_socket.h"
#include "base/tls_relay.h"
#include "tests/base/test_certificates.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;

struct Pair {
  UniqueFd a;
  UniqueFd b;
};

Pair Sockets() {
  int ends[2] = {-1, -1};
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends), 0);
  return {UniqueFd(ends[0]), UniqueFd(ends[1])};
}

TlsTexts Read(const TlsFiles& files) {
  const absl::StatusOr<TlsTexts> texts = ReadTlsFiles(*Env::System(), files);
  EXPECT_TRUE(texts.ok()) << texts.status();
  return texts.ok() ? *texts : TlsTexts();
}

struct End {
  absl::Status status;
  TlsFault fault = TlsFault::kNone;
};

class TlsTest : public ::testing::Test {
 protected:
  // Both do what they can until nothing moves. Whoever is done reads, as some things are told only
  // then.
  void Meet(const TlsFiles& server, const TlsFiles& client, const std::string& name) {
    const auto server_context = TlsContext::ForServer(Read(server), "h2");
    const auto client_context = TlsContext::ForClient(Read(client), "h2");
    ASSERT_TRUE(server_context.ok()) << server_context.status();
    ASSERT_TRUE(client_context.ok()) << client_context.status();
    sockets_ = Sockets();
    server_ = *TlsSession::Create(*server_context, sockets_.a.get(), "");
    client_ = *TlsSession::Create(*client_context, sockets_.b.get(), name);
    bool server_done = false;
    bool client_done = false;
    for (int i = 0; i < 10; ++i) {
      Do(*client_, client_done, of_client_);
      Do(*server_, server_done, of_server_);
    }
    EXPECT_EQ(of_client_.fault, client_->fault());
    EXPECT_EQ(of_server_.fault, server_->fault());
  }
  static void Do(TlsSession& session, bool& done, End& end) {
    if (!end.status.ok()) {
      return;
    }
    std::array<char, 16> buffer = {};
    const absl::StatusOr<TlsStep> step = done ? session.Read(buffer) : session.Handshake();
    if (!step.ok()) {
      end = {step.status(), session.fault()};
    } else if (step->kind == TlsStep::Kind::kDone) {
      done = true;
    }
  }
  // The words with which the first of both is told.
  static std::string Said(const End& end) { return Message(end.status); }

  const TestAuthority authority_{"test-ca"};
  const TlsFiles node_ = authority_.Issue("node", {.names = "DNS:node-1,IP:127.0.0.1"});
  const TlsFiles alice_ = authority_.Issue("alice", {.names = "email:alice@example.com"});
  Pair sockets_;
  std::unique_ptr<TlsSession> server_;
  std::unique_ptr<TlsSession> client_;
  End of_server_;
  End of_client_;
};

TEST_F(TlsTest, BothKnowEachOther) {
  Meet(node_, alice_, "node-1");
  EXPECT_EQ(of_server_.status, absl::OkStatus());
  EXPECT_EQ(of_client_.status, absl::OkStatus());
  ASSERT_EQ(server_->peer().names.size(), 2u);
  EXPECT_EQ(server_->peer().names[0].text, "alice@example.com");
  EXPECT_EQ(NamesText(client_->peer().names), "'node-1', '127.0.0.1', 'node'");
}

TEST_F(TlsTest, AnAddressIsANameToo) {
  Meet(node_, alice_, "127.0.0.1");
  EXPECT_EQ(of_client_.status, absl::OkStatus());
}

TEST_F(TlsTest, AnotherNameIsRefused) {
  for (const char* name : {"node-2", "127.0.0.2", "node"}) {  // (a common name is none of a host)
    of_client_ = of_server_ = {};
    Meet(node_, alice_, name);
    EXPECT_EQ(of_client_.fault, TlsFault::kTheirsNamed) << of_client_.status;
    EXPECT_EQ(Said(of_client_), absl::StrCat("the other side's certificate ('node-1', '127.0.0.1', "
                                             "'node') is not for '",
                                             name, "'"));
  }
}

TEST_F(TlsTest, AnAuthorityThatIsNotOursIsRefusedAndToldSo) {
  const TestAuthority other("other-ca");
  Meet(node_, other.Issue("mallory"), "node-1");
  EXPECT_EQ(of_client_.fault, TlsFault::kTheirsUnknown) << of_client_.status;
  EXPECT_EQ(of_server_.fault, TlsFault::kOursUnknown) << of_server_.status;
  // One who takes any server is refused himself.
  TlsFiles mallory = other.Issue("mallory");
  mallory.ca = node_.ca;
  of_client_ = of_server_ = {};
  Meet(node_, mallory, "node-1");
  EXPECT_EQ(of_server_.fault, TlsFault::kTheirsUnknown) << of_server_.status;
  EXPECT_THAT(Said(of_server_), HasSubstr("('mallory') comes from an authority that is not ours"));
  EXPECT_EQ(of_client_.fault, TlsFault::kOursUnknown) << of_client_.status;
}

TEST_F(TlsTest, ExpiredOnesAreRefusedWithTheirTimes) {
  Meet(authority_.Issue("old",
                        {.names = "DNS:node-1", .from = "-9 days", .until = "2020-02-03 04:05"}),
       alice_, "node-1");
  EXPECT_EQ(of_client_.fault, TlsFault::kTheirsExpired) << of_client_.status;
  EXPECT_EQ(Said(of_client_),
            "the other side's certificate ('node-1', 'old') was good until 2020-02-03 04:05 UTC");
  EXPECT_EQ(of_server_.fault, TlsFault::kOursExpired) << of_server_.status;
  of_client_ = of_server_ = {};
  Meet(node_, authority_.Issue("eve", {.from = "-9 days", .until = "-1 day"}), "node-1");
  EXPECT_EQ(of_server_.fault, TlsFault::kTheirsExpired) << of_server_.status;
  EXPECT_EQ(of_client_.fault, TlsFault::kOursExpired) << of_client_.status;
}

TEST_F(TlsTest, OnesThatAreNotYetValidAreRefused) {
  Meet(node_, authority_.Issue("early", {.from = "+1 day", .until = "+9 days"}), "node-1");
  EXPECT_EQ(of_server_.fault, TlsFault::kTheirsTooNew) << of_server_.status;
  EXPECT_FALSE(of_client_.status.ok());
}

TEST_F(TlsTest, OnesForAnotherUseAreRefused) {
  Meet(node_, authority_.Issue("web", {.usage = "serverAuth"}), "node-1");
  EXPECT_EQ(of_server_.fault, TlsFault::kTheirsUnfit) << of_server_.status;
  of_client_ = of_server_ = {};
  Meet(authority_.Issue("person", {.names = "DNS:node-1", .usage = "clientAuth"}), alice_,
       "node-1");
  EXPECT_EQ(of_client_.fault, TlsFault::kTheirsUnfit) << of_client_.status;
}

TEST_F(TlsTest, PlainTextIsNamed) {
  for (const std::string& text :
       {std::string("GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
        std::string("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), std::string("\0\0\0\4\0\0\0\0\0", 9),
        std::string("garbage of all kinds")}) {
    Pair pair = Sockets();
    const auto context = TlsContext::ForServer(Read(node_));
    const auto session = TlsSession::Create(*context, pair.a.get(), "");
    ASSERT_EQ(::send(pair.b.get(), text.data(), text.size(), 0), static_cast<ssize_t>(text.size()));
    EXPECT_FALSE((*session)->Handshake().ok());
    EXPECT_EQ((*session)->fault(), TlsFault::kPlainText);
    // And of a server that speaks it.
    const auto to_plain = TlsContext::ForClient(Read(alice_));
    pair = Sockets();
    const auto client = TlsSession::Create(*to_plain, pair.a.get(), "node-1");
    EXPECT_EQ((*client)->Handshake()->kind, TlsStep::Kind::kWantsToRead);
    ASSERT_EQ(::send(pair.b.get(), text.data(), text.size(), 0), static_cast<ssize_t>(text.size()));
    EXPECT_FALSE((*client)->Handshake().ok());
    EXPECT_EQ((*client)->fault(), TlsFault::kPlainText);
  }
}

TEST_F(TlsTest, WhoGoesIsGoneWithoutASignal) {
  Pair pair = Sockets();
  const auto context = TlsContext::ForClient(Read(alice_));
  const auto session = TlsSession::Create(*context, pair.a.get(), "node-1");
  pair.b.reset();
  EXPECT_FALSE((*session)->Handshake().ok());
  EXPECT_EQ((*session)->fault(), TlsFault::kClosed);
  EXPECT_FALSE((*session)->Handshake().ok()) << "and stays so";
}

TEST_F(TlsTest, TextsThatDoNotFitMakeNoContext) {
  TlsTexts texts = Read(node_);
  texts.key = Read(alice_).key;
  EXPECT_TRUE(absl::IsInvalidArgument(TlsContext::ForServer(texts).status()));
  texts.key = "";
  EXPECT_TRUE(absl::IsInvalidArgument(TlsContext::ForServer(texts).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(TlsContext::ForClient({}).status()));
  texts = Read(node_);
  texts.ca += texts.ca.substr(0, texts.ca.size() / 2);
  EXPECT_THAT(Message(TlsContext::ForServer(texts).status()),
              HasSubstr("certificate 2 in the authority's file cannot be read"));
}

// ---- What is carried ----

class TlsRelayTest : public TlsTest {
 protected:
  void SetUp() override {
    Meet(node_, alice_, "node-1");
    ASSERT_TRUE(of_server_.status.ok() && of_client_.status.ok());
    Pair plain = Sockets();
    plain_ = std::move(plain.b);
    relay_.emplace(std::move(sockets_.a), std::move(server_), std::move(plain.a));
  }
  TlsRelay::Outcome Carry() {
    for (;;) {
      const TlsRelay::Outcome outcome = relay_->Step();
      if (outcome != TlsRelay::Outcome::kMore) {
        return outcome;
      }
    }
  }
  std::string FromPlain() {
    std::array<char, 64> bytes = {};
    const ssize_t size = ::recv(plain_.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
    return size > 0 ? std::string(bytes.data(), static_cast<size_t>(size)) : "";
  }
  UniqueFd plain_;
  std::optional<TlsRelay> relay_;
};

TEST_F(TlsRelayTest, BytesGoBothWays) {
  EXPECT_EQ(Carry(), TlsRelay::Outcome::kWaits);
  EXPECT_EQ(relay_->socket_events(), POLLIN);
  EXPECT_EQ(relay_->plain_events(), POLLIN);
  EXPECT_EQ(client_->Write("question")->bytes, 8u);
  EXPECT_EQ(Carry(), TlsRelay::Outcome::kWaits);
  EXPECT_EQ(FromPlain(), "question");
  EXPECT_EQ(relay_->first_bytes(), "question");
  ASSERT_EQ(::send(plain_.get(), "answer", 6, 0), 6);
  EXPECT_EQ(Carry(), TlsRelay::Outcome::kWaits);
  std::array<char, 64> bytes = {};
  const auto read = client_->Read(bytes);
  ASSERT_TRUE(read.ok());
  EXPECT_EQ(std::string(bytes.data(), read->bytes), "answer");
}

TEST_F(TlsRelayTest, WhoDoesNotReadHoldsALimitedAmount) {
  const std::string much(1 << 20, 'x');
  size_t sent = 0;
  for (;;) {
    const ssize_t some = ::send(plain_.get(), much.data(), much.size(), MSG_DONTWAIT);
    const uint64_t before = relay_->sent();
    EXPECT_EQ(Carry(), TlsRelay::Outcome::kWaits);
    sent += some > 0 ? static_cast<size_t>(some) : 0;
    if (some < 0 && relay_->sent() == before) {
      break;
    }
    ASSERT_LT(sent, size_t{8} << 20);
  }
  EXPECT_TRUE(relay_->owes());
  EXPECT_NE(relay_->socket_events() & POLLOUT, 0);
  // All of it arrives, also when the plain side ends before.
  plain_.reset();
  EXPECT_EQ(Carry(), TlsRelay::Outcome::kWaits);
  EXPECT_FALSE(relay_->parting());
  size_t got = 0;
  for (bool ended = false; !ended;) {
    std::array<char, 16 << 10> bytes = {};
    const auto read = client_->Read(bytes);
    ASSERT_TRUE(read.ok()) << read.status();
    got += read->bytes;
    ended = read->kind == TlsStep::Kind::kEnded;
    Carry();
  }
  EXPECT_EQ(got, sent);
}

TEST_F(TlsRelayTest, WhatWasSaidBeforeTheEndArrives) {
  ASSERT_EQ(::send(plain_.get(), "farewell", 8, 0), 8);
  plain_.reset();
  EXPECT_EQ(client_->Write("still talking")->bytes, 13u);
  EXPECT_EQ(Carry(), TlsRelay::Outcome::kWaits);
  EXPECT_TRUE(relay_->parting());
  std::array<char, 64> bytes = {};
  const auto read = client_->Read(bytes);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(std::string(bytes.data(), read->bytes), "farewell");
  EXPECT_EQ(client_->Read(bytes)->kind, TlsStep::Kind::kEnded);
  sockets_.b.reset();
  EXPECT_EQ(Carry(), TlsRelay::Outcome::kEnded);
  EXPECT_EQ(relay_->status(), absl::OkStatus());
}

TEST_F(TlsRelayTest, TheEndOfTheOtherSideIsThePlainOnes) {
  EXPECT_TRUE(client_->Write("last words").ok());
  client_->End();
  EXPECT_EQ(Carry(), TlsRelay::Outcome::kEnded);
  EXPECT_EQ(relay_->status(), absl::OkStatus());
  EXPECT_EQ(FromPlain(), "last words");
  relay_.reset();
  char byte = 0;
  EXPECT_EQ(::recv(plain_.get(), &byte, 1, MSG_DONTWAIT), 0);
}

TEST_F(TlsRelayTest, BytesThatAreNoTlsEndIt) {
  ASSERT_EQ(::send(sockets_.b.get(), "no TLS at all", 13, 0), 13);
  EXPECT_EQ(Carry(), TlsRelay::Outcome::kEnded);
  EXPECT_FALSE(relay_->status().ok());
}

// ---- Addresses ----

TEST(TcpSocket, AddressesAreSplit) {
  EXPECT_EQ(SplitAddress("gpu-17:9466")->host, "gpu-17");
  EXPECT_EQ(SplitAddress("[::1]:9466")->host, "::1");
  EXPECT_EQ(SplitAddress("[::1]:9466")->port, "9466");
  for (const std::string& bad :
       {std::string(), std::string("gpu-17"), std::string(":1"), std::string("a:"),
        std::string("a:x"), std::string("a:65536"), std::string("a:123456"),
        std::string("::1:9466"), std::string("https://a:1"), std::string("a b:1"),
        std::string("[]:1"), std::string("a\0b:1", 5)}) {
    EXPECT_TRUE(absl::IsInvalidArgument(SplitAddress(bad).status())) << bad;
  }
}

TEST(TcpSocket, WhoListensIsReachedAndWhoDoesNotIsNamed) {
  absl::StatusOr<UniqueFd> listening = ListenTcp("127.0.0.1:0", 1);
  ASSERT_TRUE(listening.ok()) << listening.status();
  const std::string address = absl::StrCat("127.0.0.1:", LocalPort(listening->get()));
  const MonotonicTime until = Clock::System()->Now() + std::chrono::seconds(30);
  const absl::StatusOr<UniqueFd> fd = ConnectTcp(address, until);
  ASSERT_TRUE(fd.ok()) << fd.status();
  EXPECT_EQ(RemoteAddress(fd->get()), address);
  listening->reset();
  EXPECT_TRUE(absl::IsUnavailable(ConnectTcp(address, until).status()));
}

}  // namespace
}  // namespace holdfast
