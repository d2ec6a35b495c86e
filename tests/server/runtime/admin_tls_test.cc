// The admin service by TLS: whom a certificate stands for, who is let in, and that those who are
// not in earnest keep nobody out.
#include "server/runtime/admin_tls.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <array>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "base/status.h"
#include "base/tcp_socket.h"
#include "base/tls.h"
#include "ckptctl/admin_client.h"
#include "ckptctl/sockets.h"
#include "ckptctl/tls_channel.h"
#include "server/runtime/admin_server.h"
#include "server/runtime/http2_farewell.h"
#include "tests/base/temporary_directory.h"
#include "tests/base/test_certificates.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using Kind = CertificateName::Kind;

constexpr std::chrono::seconds kPatience(30);
const std::string kHello =
    std::string("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n") + std::string("\0\0\0\4\0\0\0\0\0", 9);

// ---- Whom a certificate stands for ----

const std::vector<AdminTlsUser> kUsers = {{"ops.example", 0},
                                          {"alice@example.com", 1001},
                                          {"spiffe://c/bob", 1002},
                                          {"Carol", 1003},
                                          {"10.0.0.1", 0}};

std::string UserOf(const std::vector<CertificateName>& names) {
  const absl::StatusOr<AdminTlsUser> user = UserOfCertificate(names, kUsers);
  return user.ok() ? absl::StrCat(user->uid, " ", user->certificate) : Message(user.status());
}

TEST(UserOfCertificate, NamesOfEachKindStandForTheirUser) {
  EXPECT_EQ(UserOf({{Kind::kDns, "ops.example"}}), "0 ops.example");
  EXPECT_EQ(UserOf({{Kind::kEmail, "alice@example.com"}, {Kind::kCommonName, "x"}}),
            "1001 alice@example.com");
  EXPECT_EQ(UserOf({{Kind::kUri, "spiffe://c/bob"}}), "1002 spiffe://c/bob");
  EXPECT_EQ(UserOf({{Kind::kDns, "x"}, {Kind::kCommonName, "Carol"}}), "1003 Carol");
}

TEST(UserOfCertificate, OneThatNobodyNamesIsRefusedWithWhatToAdd) {
  for (const std::vector<CertificateName>& names : std::vector<std::vector<CertificateName>>{
           {},
           {{Kind::kCommonName, "carol"}},  // exactly so
           {{Kind::kDns, "a.ops.example"}},
           {{Kind::kDns, "*.example"}},
           {{Kind::kEmail, "alice@example.com "}},
           {{Kind::kAddress, "10.0.0.1"}}}) {  // an address is nobody
    EXPECT_TRUE(absl::IsPermissionDenied(UserOfCertificate(names, kUsers).status()));
  }
  EXPECT_EQ(UserOf({{Kind::kDns, "dave.example"}, {Kind::kCommonName, "dave"}}),
            "nobody has said for whom the certificate of 'dave.example', 'dave' stands: add "
            "{certificate: NAME, uid: UID}, with one of these names, to admin.tls.users in ckptd's "
            "settings, and reload them");
}

TEST(UserOfCertificate, OneThatStandsForTwoIsRefused) {
  EXPECT_THAT(UserOf({{Kind::kEmail, "alice@example.com"}, {Kind::kCommonName, "Carol"}}),
              HasSubstr("stands for uid 1001 ('alice@example.com') and for uid 1003 ('Carol')"));
}

// ---- What those are told who are not let in ----

TEST(Farewell, IsFoundInWhatComesFirst) {
  EXPECT_EQ(FarewellIn(Http2Farewell("too many connections")), "too many connections");
  EXPECT_EQ(FarewellIn(Http2Farewell(std::string(5000, 'x'))), std::string(kFarewellTextMax, 'x'));
  EXPECT_EQ(FarewellIn(Http2Farewell("")), "");
  EXPECT_EQ(FarewellIn(""), "");
  // As gRPC says goodbye it is none of these; nor is what is cut, or no frame at all.
  std::string other = Http2Farewell("graceful");
  other[9 + 9 + 7] = 0;
  EXPECT_EQ(FarewellIn(other), "");
  const std::string whole = Http2Farewell("too many connections");
  for (size_t size = 0; size < whole.size(); ++size) {
    EXPECT_EQ(FarewellIn(whole.substr(0, size)), "");
  }
  EXPECT_EQ(FarewellIn(std::string(4096, '\xff')), "");
}

// ---- Served ----

class AdminTlsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(::chmod(dir_.path().c_str(), 0755), 0);
    files_ = authority_.Issue("node", {.names = "IP:127.0.0.1"});
    authority_.Issue("alice", {.names = "email:alice@example.com"});
    authority_.Issue("bob");
    authority_.Issue("stranger", {.names = "DNS:stranger.example"});
  }
  void TearDown() override { tls_.reset(); }

  void Start(const AdminServer::Times& door = {}) {
    v1::AdminConfig config;
    config.set_path(dir_.Path("admin.sock"));
    auto server = AdminServer::Start(config, context_, door);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    AdminTls::Options options;
    options.address = "127.0.0.1:0";
    options.files = files_;
    options.users = users_;
    options.env = Env::System();
    options.times = times_;
    options.welcome = [this](UniqueFd fd, const AdminTlsUser& user) {
      server_->Welcome(std::move(fd), user.uid, user.certificate);
    };
    auto tls = AdminTls::Start(std::move(options));
    ASSERT_TRUE(tls.ok()) << tls.status();
    tls_ = *std::move(tls);
  }
  std::string address() const { return absl::StrCat("127.0.0.1:", tls_->port()); }
  absl::Status CallAs(const std::string& who) const {
    const auto client =
        AdminClient::Connect(AdminPlace{"", address(), authority_.Directory(who)}, kPatience);
    return client.ok() ? (*client)->CheckHealth() : client.status();
  }
  // Asks again, as often as there is an answer, until it is so.
  template <typename So>
  static bool Until(So so) {
    const MonotonicTime until = Clock::System()->Now() + kPatience;
    while (Clock::System()->Now() < until) {
      if (so()) {
        return true;
      }
    }
    return false;
  }

  struct Raw {
    UniqueFd fd;
    std::unique_ptr<TlsSession> session;
  };
  UniqueFd Tcp() const {
    auto fd = ConnectTcp(address(), Clock::System()->Now() + kPatience);
    EXPECT_TRUE(fd.ok()) << fd.status();
    return fd.ok() ? *std::move(fd) : UniqueFd();
  }
  // With its handshake done, and these words said.
  Raw Connect(const std::string& who, const std::string& say = kHello) const {
    const std::string at = authority_.Directory(who);
    const auto texts =
        ReadTlsFiles(*Env::System(), {at + "/ca.crt", at + "/tls.crt", at + "/tls.key"});
    EXPECT_TRUE(texts.ok()) << texts.status();
    Raw raw{Tcp(), nullptr};
    raw.session =
        *TlsSession::Create(*TlsContext::ForClient(*texts, "h2"), raw.fd.get(), "127.0.0.1");
    EXPECT_EQ(Step(raw, [&] { return raw.session->Handshake(); }), "");
    if (!say.empty()) {
      EXPECT_TRUE(raw.session->Write(say).ok());
    }
    return raw;
  }
  template <typename Do>
  static std::string Step(const Raw& raw, Do step) {
    for (;;) {
      const absl::StatusOr<TlsStep> done = step();
      if (!done.ok()) {
        return "closed";
      }
      if (done->kind == TlsStep::Kind::kDone) {
        return "";
      }
      if (done->kind == TlsStep::Kind::kEnded) {
        return "closed";
      }
      if (!AwaitReady(raw.fd.get(), done->kind == TlsStep::Kind::kWantsToRead ? POLLIN : POLLOUT,
                      Clock::System()->Now() + kPatience)) {
        return "silence";
      }
    }
  }
  // What comes next.
  static std::string Hear(Raw& raw) {
    std::array<char, 4096> bytes = {};
    size_t size = 0;
    const std::string ended = Step(raw, [&]() -> absl::StatusOr<TlsStep> {
      HF_ASSIGN_OR_RETURN(const TlsStep step, raw.session->Read(bytes));
      size = step.bytes;
      return step;
    });
    return ended.empty() ? std::string(bytes.data(), size) : ended;
  }
  static std::string HearAll(Raw& raw) {
    std::string all;
    while (!all.ends_with("closed") && !all.ends_with("silence")) {
      all += Hear(raw);
    }
    return all;
  }
  static bool IsClosed(const UniqueFd& fd) {
    std::array<char, 4096> bytes = {};
    ssize_t size = 1;
    while (size > 0) {
      if (!AwaitReady(fd.get(), POLLIN, Clock::System()->Now() + kPatience)) {
        return false;
      }
      size = ::recv(fd.get(), bytes.data(), bytes.size(), 0);
    }
    return true;
  }

  const TestAuthority authority_{"test-ca"};
  TemporaryDirectory dir_;
  TlsFiles files_;
  std::vector<AdminTlsUser> users_ = {{"alice@example.com", 1001}, {"bob", 0}};
  AdminTls::Times times_{.look = std::chrono::milliseconds(50),
                         .sweep = std::chrono::milliseconds(50)};
  AdminContext context_;
  std::unique_ptr<AdminServer> server_;
  std::unique_ptr<AdminTls> tls_;
};

TEST_F(AdminTlsTest, AnswersThoseWhomItKnows) {
  Start();
  EXPECT_EQ(CallAs("alice"), absl::OkStatus());
  EXPECT_EQ(CallAs("bob"), absl::OkStatus());
  EXPECT_EQ(CallAs("alice"), absl::OkStatus());
  const absl::Status stranger = CallAs("stranger");
  EXPECT_TRUE(absl::IsUnavailable(stranger));
  EXPECT_THAT(Message(stranger), HasSubstr("nobody has said for whom the certificate of "
                                           "'stranger.example', 'stranger' stands"));
  EXPECT_THAT(Message(stranger), HasSubstr("admin.tls.users"));
}

TEST_F(AdminTlsTest, WhoHasTooManyConnectionsIsToldAndOthersGetIn) {
  Start();
  std::vector<Raw> held;
  for (size_t i = 0; i < AdminServer::kConnectionsPerUidMax; ++i) {
    held.push_back(Connect("alice"));
    ASSERT_THAT(Hear(held.back()), Not(HasSubstr("connections")));
  }
  Raw more = Connect("alice");
  EXPECT_THAT(HearAll(more), HasSubstr("certificate 'alice@example.com' has 16 connections"));
  EXPECT_THAT(Message(CallAs("alice")), HasSubstr("has 16 connections to the admin address"));
  EXPECT_EQ(CallAs("bob"), absl::OkStatus());
  held.clear();
  EXPECT_TRUE(Until([&] { return CallAs("alice").ok(); }));
}

TEST_F(AdminTlsTest, ThoseWhomNobodyListsKeepOutNobodyWhoIs) {
  times_.parting = std::chrono::hours(1);
  Start();
  std::vector<Raw> held;
  for (size_t i = 0; i < AdminTls::kConnectionsMax; ++i) {
    held.push_back(Connect("stranger"));
    ASSERT_THAT(Hear(held.back()), HasSubstr("nobody has said for whom")) << i;
  }
  EXPECT_EQ(CallAs("alice"), absl::OkStatus());
  EXPECT_EQ(CallAs("bob"), absl::OkStatus());
  EXPECT_TRUE(IsClosed(held.front().fd)) << "who was told first makes room";
  Raw last = Connect("stranger");
  EXPECT_THAT(Hear(last), HasSubstr("nobody has said for whom")) << "and who comes last is told";
}

TEST_F(AdminTlsTest, UsersWithAllTheirConnectionsKeepNoOperatorOut) {
  constexpr size_t kFull = AdminTls::kConnectionsMax / AdminServer::kConnectionsPerUidMax;
  for (size_t i = 0; i < kFull; ++i) {
    users_.push_back({absl::StrCat("user-", i), static_cast<uint32_t>(2000 + i)});
    authority_.Issue(users_.back().certificate);
  }
  Start();
  std::vector<Raw> held;
  for (size_t i = 0; i < AdminTls::kConnectionsMax; ++i) {
    held.push_back(Connect(absl::StrCat("user-", i % kFull)));
    ASSERT_THAT(Hear(held.back()), Not(HasSubstr("connections")));
  }
  EXPECT_EQ(CallAs("bob"), absl::OkStatus());
  EXPECT_THAT(Message(CallAs("alice")), HasSubstr("users have 128 connections to the admin addr"));
}

TEST_F(AdminTlsTest, WhoIsSilentIsClosed) {
  times_.handshake = std::chrono::milliseconds(200);
  Start({.greeting = std::chrono::milliseconds(200)});
  // Nothing at all; half a handshake; all of it, and then nothing.
  EXPECT_TRUE(IsClosed(Tcp()));
  const UniqueFd half = Tcp();
  const char hello[] = {0x16, 0x03, 0x01, 0x02, 0x00, 0x01};
  ASSERT_EQ(::send(half.get(), hello, sizeof(hello), 0), static_cast<ssize_t>(sizeof(hello)));
  EXPECT_TRUE(IsClosed(half));
  Raw silent = Connect("alice", "");
  EXPECT_EQ(Hear(silent), "closed");
  EXPECT_EQ(CallAs("alice"), absl::OkStatus());
}

TEST_F(AdminTlsTest, WhoSpeaksNoTlsIsClosed) {
  Start();
  for (const std::string& text : {std::string("GET / HTTP/1.1\r\nHost: x\r\n\r\n"), kHello,
                                  std::string(100'000, 'x'), std::string("\x16\x03\x01\xff\xff")}) {
    const UniqueFd fd = Tcp();
    static_cast<void>(::send(fd.get(), text.data(), text.size(), MSG_NOSIGNAL));
    ::shutdown(fd.get(), SHUT_WR);
    EXPECT_TRUE(IsClosed(fd));
  }
  // Nor does it help to speak something else behind it.
  Raw raw = Connect("alice", "GET / HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_EQ(Hear(raw), "closed");
  EXPECT_EQ(CallAs("alice"), absl::OkStatus());
}

TEST_F(AdminTlsTest, HandshakesThatDoNotEndKeepNobodyOut) {
  times_.handshake = std::chrono::hours(1);
  Start();
  std::vector<UniqueFd> held;
  for (size_t i = 0; i < AdminTls::kHandshakesMax; ++i) {
    held.push_back(Tcp());
  }
  EXPECT_EQ(CallAs("alice"), absl::OkStatus());
  EXPECT_TRUE(IsClosed(held.front())) << "who has taken longest makes room";
}

TEST_F(AdminTlsTest, WithoutAnAuthorityOfOursNobodyGetsIn) {
  Start();
  const TestAuthority other("other-ca");
  other.Issue("alice", {.names = "email:alice@example.com"});
  std::filesystem::copy_file(files_.ca, other.Directory("alice") + "/ca.crt",
                             std::filesystem::copy_options::overwrite_existing);
  const auto client =
      AdminClient::Connect(AdminPlace{"", address(), other.Directory("alice")}, kPatience);
  const absl::Status refused = client.ok() ? (*client)->CheckHealth() : client.status();
  EXPECT_TRUE(absl::IsUnavailable(refused));
  EXPECT_THAT(Message(refused), HasSubstr("does not know the authority that vouches for our"));
}

// ---- Files that change ----

TEST_F(AdminTlsTest, ANewCertificateCountsAndABadOneIsAProblem) {
  Start();
  EXPECT_EQ(tls_->problem(), "");
  const auto shown = [&] {
    Raw raw = Connect("alice");
    return NamesText(raw.session->peer().names);
  };
  EXPECT_EQ(shown(), "'127.0.0.1', 'node'");
  authority_.Issue("node", {.names = "IP:127.0.0.1,DNS:renewed"});
  EXPECT_TRUE(Until([&] { return shown() == "'127.0.0.1', 'renewed', 'node'"; }));
  EXPECT_EQ(tls_->problem(), "");
  // A key of another; one that has expired; nothing.
  std::filesystem::copy_file(authority_.Directory("bob") + "/tls.key", files_.key,
                             std::filesystem::copy_options::overwrite_existing);
  // (A file that is copied is empty for a moment, which is a problem as well.)
  const std::string another = "admin.tls: the key in '" + files_.key + "' is not that";
  EXPECT_TRUE(Until([&] { return tls_->problem().find(another) != std::string::npos; }));
  EXPECT_THAT(tls_->problem(), HasSubstr("the certificates of before go on"));
  EXPECT_EQ(CallAs("alice"), absl::OkStatus());
  authority_.Issue("node", {.names = "IP:127.0.0.1", .from = "-9 days", .until = "-1 day"});
  EXPECT_TRUE(Until([&] { return tls_->problem().find("was good until") != std::string::npos; }));
  EXPECT_EQ(CallAs("alice"), absl::OkStatus());
  std::filesystem::remove(files_.cert);
  EXPECT_TRUE(Until([&] { return tls_->problem().find("ENOENT") != std::string::npos; }));
  EXPECT_EQ(CallAs("alice"), absl::OkStatus());
  authority_.Issue("node", {.names = "IP:127.0.0.1,DNS:mended"});
  EXPECT_TRUE(Until([&] { return tls_->problem().empty(); }));
  EXPECT_EQ(shown(), "'127.0.0.1', 'mended', 'node'");
}

TEST_F(AdminTlsTest, ASecondAuthorityThatCannotBeReadIsAProblem) {
  Start();
  std::ofstream(files_.ca, std::ios::app)
      << "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n";
  EXPECT_TRUE(Until([&] { return !tls_->problem().empty(); }));
  EXPECT_THAT(tls_->problem(),
              HasSubstr("admin.tls: certificate 2 in '" + files_.ca + "' cannot be read: "));
  EXPECT_THAT(tls_->problem(), HasSubstr("the certificates of before go on"));
  EXPECT_EQ(CallAs("alice"), absl::OkStatus());
}

TEST_F(AdminTlsTest, FilesThatAreBadAtTheStartAreMendedLater) {
  const std::string key = files_.key;
  std::filesystem::rename(key, key + ".away");
  Start();
  EXPECT_THAT(tls_->problem(), HasSubstr("nobody is let in by TLS until it is mended"));
  const absl::Status refused = CallAs("alice");
  EXPECT_TRUE(absl::IsUnavailable(refused));
  EXPECT_THAT(Message(refused), HasSubstr("closed the connection; it may have"));
  std::filesystem::rename(key + ".away", key);
  EXPECT_TRUE(Until([&] { return tls_->problem().empty(); }));
  EXPECT_EQ(CallAs("alice"), absl::OkStatus());
}

TEST_F(AdminTlsTest, WhenTheAuthorityChangesItsConnectionsEnd) {
  Start();
  Raw before = Connect("alice");
  EXPECT_THAT(Hear(before), Not(HasSubstr("closed")));
  const TestAuthority next("next-ca");
  std::ifstream from(next.ca());
  const std::string text((std::istreambuf_iterator<char>(from)), {});
  std::ofstream(files_.ca, std::ios::app) << text;
  EXPECT_THAT(HearAll(before), HasSubstr("closed"));
  EXPECT_EQ(CallAs("alice"), absl::OkStatus()) << "the old one is still there";
}

TEST_F(AdminTlsTest, WhoIsListedNoMoreIsOutAtOnce) {
  Start();
  Raw alice = Connect("alice");
  Raw bob = Connect("bob");
  EXPECT_THAT(Hear(alice), Not(HasSubstr("closed")));
  EXPECT_THAT(Hear(bob), Not(HasSubstr("closed")));
  tls_->Change({{"bob", 0}, {"stranger.example", 1004}});
  EXPECT_THAT(HearAll(alice), HasSubstr("closed"));
  EXPECT_THAT(Message(CallAs("alice")), HasSubstr("nobody has said for whom"));
  EXPECT_EQ(CallAs("stranger"), absl::OkStatus());
  // Whose rights have changed as well; who is as before goes on.
  EXPECT_TRUE(bob.session->Write(std::string("\0\0\x8\x6\0\0\0\0\0pingpong", 17)).ok());
  EXPECT_THAT(Hear(bob), Not(HasSubstr("closed")));
  tls_->Change({{"bob", 1005}});
  EXPECT_THAT(HearAll(bob), HasSubstr("closed"));
}

TEST_F(AdminTlsTest, APortThatIsTakenIsAnError) {
  const auto taken = ListenTcp("127.0.0.1:0", 1);
  ASSERT_TRUE(taken.ok());
  AdminTls::Options options;
  options.address = absl::StrCat("127.0.0.1:", LocalPort(taken->get()));
  options.files = files_;
  options.env = Env::System();
  const auto tls = AdminTls::Start(std::move(options));
  EXPECT_THAT(Message(tls.status()), HasSubstr("(admin.tls.address)"));
}

}  // namespace
}  // namespace holdfast
