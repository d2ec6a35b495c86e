// ckptctl at another machine's ckptd: what it says when it is not let in, who sees and does what by
// a certificate, certificates that are replaced while ckptd runs, and those who mean harm.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>

#include <filesystem>
#include <fstream>

#include "base/tcp_socket.h"
#include "tests/base/test_certificates.h"
#include "tests/integration/ctl.h"
#include "tests/integration/harness.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr uid_t kAlice = 12345;

class AdminTlsCtl : public ::testing::Test {
 protected:
  void SetUp() override {
    authority_.Issue("node", {.names = "IP:127.0.0.1,DNS:localhost"});
    authority_.Issue("ops", {.names = "DNS:ops.example"});
    authority_.Issue("alice", {.names = "email:alice@example.com"});
    authority_.Issue("bob", {.names = "URI:spiffe://c/bob"});
    authority_.Issue("dave", {.names = "DNS:dave.example"});
    const std::string at = authority_.Directory("node");
    settings_ =
        "node_name: node-1\nadmin:\n  tls:\n    address: \"127.0.0.1:0\"\n    ca_file: " + at +
        "/ca.crt\n    cert_file: " + at + "/tls.crt\n    key_file: " + at + "/tls.key\n";
    node_ = std::make_unique<Node>(NodeOptions{.config = settings_ + Users(kAlice)});
    ASSERT_TRUE(node_->Start()) << node_->Log();
    const auto port = NumberAfter(node_->Log(), "admin_tls_port=");
    ASSERT_TRUE(port && *port != 0) << node_->Log();
    address_ = "127.0.0.1:" + std::to_string(*port);
  }
  static std::string Users(uid_t alice) {
    return "    users:\n      - {certificate: ops.example, uid: 0}\n"
           "      - {certificate: alice@example.com, uid: " +
           std::to_string(alice) +
           "}\n"
           "      - {certificate: \"spiffe://c/bob\", uid: 65534}\n";
  }

  static CtlAnswer Run(std::vector<std::string> arguments,
                       const std::vector<std::string>& environment = {}) {
    arguments.insert(arguments.begin(), HOLDFAST_BIN_DIR "/ckptctl");
    const TemporaryDirectory directory;
    Child child({.arguments = std::move(arguments),
                 .environment = environment,
                 .error_file = directory.Path("errors"),
                 .pipes = true});
    CtlAnswer answer;
    while (const auto line = child.ReadLine()) {
      answer.text += *line + "\n";
    }
    answer.exit_code = child.Wait().value_or(-1000);
    answer.errors = ReadText(directory.Path("errors"));
    answer.parsed = nlohmann::json::parse(answer.text, nullptr, false);
    return answer;
  }
  CtlAnswer At(const std::string& address, const std::string& tls,
               std::vector<std::string> arguments) const {
    arguments.insert(arguments.end(), {"--address", address, "--tls", tls});
    return Run(std::move(arguments));
  }
  CtlAnswer As(const std::string& who, std::vector<std::string> arguments) const {
    return At(address_, authority_.Directory(who), std::move(arguments));
  }
  // It is told on stderr, with --json as the daemon's being away, and never as anything else.
  static void ExpectUnreachable(const CtlAnswer& answer, const std::string& text) {
    EXPECT_EQ(answer.exit_code, 3) << answer.errors;
    EXPECT_THAT(answer.errors, HasSubstr(text));
    ASSERT_TRUE(answer.parsed.is_object()) << answer.text;
    EXPECT_EQ(answer.parsed["error"]["exit_code"], 3);
  }
  template <typename So>
  static bool Until(So so) {
    const auto until = std::chrono::steady_clock::now() + kPatience;
    while (std::chrono::steady_clock::now() < until) {
      if (so()) {
        return true;
      }
    }
    return false;
  }

  const TestAuthority authority_{"test-ca"};
  std::string settings_;
  std::unique_ptr<Node> node_;
  std::string address_;
};

TEST_F(AdminTlsCtl, WhoIsKnownIsAnsweredByFlagsAndByTheEnvironment) {
  const CtlAnswer ops = As("ops", {"status", "--json"});
  EXPECT_EQ(ops.exit_code, 0) << ops.errors;
  EXPECT_EQ(ops.parsed["daemon"]["node_name"], "node-1");
  EXPECT_EQ(At("localhost" + address_.substr(9), authority_.Directory("bob"), {"jobs"}).exit_code,
            0);
  const std::vector<std::string> environment = {
      "HOLDFAST_ADMIN_ADDRESS=" + address_, "HOLDFAST_ADMIN_TLS=" + authority_.Directory("alice"),
      "HOLDFAST_ADMIN_SOCKET=/nonexistent/admin.sock"};
  const CtlAnswer alice = Run({"status", "--json"}, environment);
  EXPECT_EQ(alice.exit_code, 0) << alice.errors;
  // A socket that is said goes before.
  EXPECT_EQ(Run({"status", "--socket", node_->admin_socket()}, environment).exit_code, 0);
  // What takes long, and what streams.
  EXPECT_EQ(As("ops", {"events"}).exit_code, 0);
  EXPECT_EQ(As("ops", {"verify"}).exit_code, 0);
}

TEST_F(AdminTlsCtl, WrongArgumentsAreNamed) {
  for (const auto& [arguments, text] :
       std::vector<std::pair<std::vector<std::string>, std::string>>{
           {{"status", "--address", address_}, "say with --tls DIR"},
           {{"status", "--address", "gpu-17", "--tls", "/x"}, "'gpu-17' is not HOST:PORT"},
           {{"status", "--tls", "/x"}, "--tls is for --address"},
           {{"status", "--socket", "/x", "--address", address_, "--tls", "/x"}, "name two places"},
           {{"doctor", "--address", address_, "--tls", "/x"}, "looks at the machine"}}) {
    const CtlAnswer answer = Run(arguments);
    EXPECT_EQ(answer.exit_code, 2) << answer.errors;
    EXPECT_THAT(answer.errors, HasSubstr(text));
  }
}

TEST_F(AdminTlsCtl, WhatIsWrongWithOurOwnFilesIsNamed) {
  const std::vector<std::string> ask = {"status", "--json"};
  ExpectUnreachable(At(address_, "/nonexistent", ask), "/nonexistent/ca.crt': No such file");
  namespace fs = std::filesystem;
  const auto spoiled = [&](const std::string& file, const std::string& from) {
    const std::string at = authority_.Directory("spoiled");
    fs::remove_all(at);
    fs::copy(authority_.Directory("alice"), at);
    fs::copy_file(from, at + "/" + file, fs::copy_options::overwrite_existing);
    return at;
  };
  ExpectUnreachable(At(address_, spoiled("tls.crt", "/etc/hostname"), ask),
                    "spoiled/tls.crt' has no certificate in PEM");
  ExpectUnreachable(At(address_, spoiled("tls.key", "/etc/hostname"), ask),
                    "spoiled/tls.key' has no private key in PEM");
  ExpectUnreachable(At(address_, spoiled("tls.key", authority_.Directory("bob") + "/tls.key"), ask),
                    "is not that of the certificate of 'alice@example.com', 'alice'");
  authority_.Issue("old", {.from = "-9 days", .until = "2020-02-03 04:05"});
  ExpectUnreachable(As("old", ask), "the certificate of 'old' in '");
  ExpectUnreachable(As("old", ask), "was good until 2020-02-03 04:05 UTC");
  authority_.Issue("early", {.from = "+2 days", .until = "+9 days"});
  ExpectUnreachable(As("early", ask), "is the clock right?");
}

TEST_F(AdminTlsCtl, WhatIsWrongWithTheOtherSideIsNamed) {
  const std::vector<std::string> ask = {"status", "--json"};
  // Who does not know each other.
  const TestAuthority other("other-ca");
  other.Issue("alice", {.names = "email:alice@example.com"});
  ExpectUnreachable(At(address_, other.Directory("alice"), ask),
                    "comes from an authority that is not ours");
  std::filesystem::copy_file(authority_.ca(), other.Directory("alice") + "/ca.crt",
                             std::filesystem::copy_options::overwrite_existing);
  ExpectUnreachable(At(address_, other.Directory("alice"), ask),
                    "the other side does not know the authority that vouches for our certificate");
  authority_.Issue("web", {.names = "email:alice@example.com", .usage = "serverAuth"});
  ExpectUnreachable(As("web", ask), "no TLS with ckptd at " + address_);
  const auto any = ListenTcp("127.0.0.1:0", 1);
  ASSERT_TRUE(any.ok());
  // Nobody stands behind this certificate.
  ExpectUnreachable(
      As("dave", ask),
      "nobody has said for whom the certificate of 'dave.example', 'dave' stands: add "
      "{certificate: NAME, uid: UID}");
  EXPECT_THAT(node_->Log(), HasSubstr("admin connection turned away: 127.0.0.1:"));
  // Nobody listens; no such host.
  const std::string gone = "127.0.0.1:" + std::to_string(LocalPort(any->get()));
  ExpectUnreachable(At("127.0.0.1:1", authority_.Directory("alice"), ask), "(ECONNREFUSED)");
  ExpectUnreachable(At("no-such-host.invalid:9468", authority_.Directory("alice"), ask),
                    "look up the host 'no-such-host.invalid'");
  // Somebody who listens, and says nothing.
  const CtlAnswer silent =
      At(gone, authority_.Directory("alice"), {"status", "--json", "--timeout", "300ms"});
  ExpectUnreachable(silent, "the handshake of TLS did not end within 0.3 s");
  EXPECT_EQ(silent.parsed["error"]["code"], "DEADLINE_EXCEEDED");
  // A certificate with another name.
  authority_.Issue("node", {.names = "DNS:gpu-17"});
  CtlAnswer misnamed;
  EXPECT_TRUE(Until([&] { return (misnamed = As("alice", ask)).exit_code != 0; }));
  ExpectUnreachable(misnamed,
                    "the other side's certificate ('gpu-17', 'node') is not for "
                    "'127.0.0.1'; say one of its names in --address");
}

TEST_F(AdminTlsCtl, PlainTextAtTheOtherEndIsNamed) {
  auto listening = ListenTcp("127.0.0.1:0", 1);
  ASSERT_TRUE(listening.ok());
  const std::string at = "127.0.0.1:" + std::to_string(LocalPort(listening->get()));
  const TemporaryDirectory directory;
  Child child({.arguments = {HOLDFAST_BIN_DIR "/ckptctl", "status", "--address", at, "--tls",
                             authority_.Directory("alice")},
               .error_file = directory.Path("errors"),
               .pipes = true});
  ASSERT_TRUE(AwaitReady(listening->get(), POLLIN, Clock::System()->Now() + kPatience));
  const UniqueFd fd(::accept4(listening->get(), nullptr, nullptr, SOCK_CLOEXEC));
  const std::string http = "HTTP/1.1 400 Bad Request\r\n\r\n";
  ASSERT_EQ(::send(fd.get(), http.data(), http.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(http.size()));
  EXPECT_EQ(child.Wait(), 3);
  EXPECT_THAT(ReadText(directory.Path("errors")), HasSubstr("is it spoken in plain text there?"));
}

TEST_F(AdminTlsCtl, ThePortOfMetricsIsNoneOfOurs) {
  Node node(
      NodeOptions{.config = "metrics: {address: \"127.0.0.1:0\"}\n" + settings_ + Users(kAlice)});
  ASSERT_TRUE(node.Start()) << node.Log();
  const auto port = NumberAfter(node.Log(), "metrics_port=");
  ASSERT_TRUE(port && *port != 0) << node.Log();
  const auto begun = std::chrono::steady_clock::now();
  ExpectUnreachable(
      At("127.0.0.1:" + std::to_string(*port), authority_.Directory("alice"), {"status", "--json"}),
      "what comes is no TLS: is it spoken in plain text there?");
  EXPECT_LT(std::chrono::steady_clock::now() - begun, std::chrono::seconds(4));
}

TEST_F(AdminTlsCtl, AUserSeesAndChangesWhatThatUidWould) {
  if (::geteuid() != 0) {
    GTEST_SKIP() << "needs root to become other users";
  }
  Rank hers(*node_, {.job = "hers", .uid = kAlice});
  Rank roots(*node_, {.job = "roots"});
  for (Rank* rank : {&hers, &roots}) {
    ASSERT_EQ(rank->Do("open"), "ok attempt=1");
    ASSERT_THAT(rank->Do("restore"), HasSubstr("NOTHING_TO_RESTORE"));
    ASSERT_EQ(rank->Do("save 1"), "ok sealed");
    ASSERT_EQ(rank->Do("committed"), "ok committed");
    rank->Kill();
  }
  const auto jobs = [&](const std::string& who) {
    const CtlAnswer answer = As(who, {"jobs", "--json"});
    EXPECT_EQ(answer.exit_code, 0) << answer.errors;
    std::vector<std::string> names;
    for (const auto& job : answer.parsed["jobs"]) {
      names.push_back(job["name"]);
    }
    return names;
  };
  EXPECT_EQ(jobs("ops"), (std::vector<std::string>{"hers", "roots"}));
  EXPECT_EQ(jobs("alice"), (std::vector<std::string>{"hers"}));
  EXPECT_EQ(jobs("bob"), (std::vector<std::string>{}));
  // What is another's is not there, and what is an operator's is refused, by the daemon.
  EXPECT_EQ(As("alice", {"list", "roots"}).exit_code, 4);
  EXPECT_EQ(As("alice", {"rm", "roots", "--yes"}).exit_code, 4);
  EXPECT_EQ(As("bob", {"rm", "hers", "--yes"}).exit_code, 4);
  for (const std::vector<std::string>& operators :
       {std::vector<std::string>{"rebuild"}, {"set", "remote.nice=3"}, {"drain", "--undo"}}) {
    const CtlAnswer refused = As("alice", operators);
    EXPECT_EQ(refused.exit_code, 4) << operators[0] << refused.text;
  }
  EXPECT_EQ(As("ops", {"set", "remote.nice=3"}).exit_code, 0);
  // What is her own she changes, and the audit says by which certificate.
  const CtlAnswer removed = As("alice", {"rm", "hers", "--yes"});
  EXPECT_EQ(removed.exit_code, 0) << removed.errors;
  EXPECT_EQ(jobs("ops"), (std::vector<std::string>{"roots"}));
  EXPECT_THAT(node_->Log(),
              HasSubstr("uid 12345 (certificate \\'alice@example.com\\'): RemoveJobRequest {job: "
                        "\\\"hers\\\""));
  const CtlAnswer events = As("ops", {"events"});
  EXPECT_THAT(events.text, HasSubstr("uid 12345 (certificate 'alice@example.com'): "));
}

TEST_F(AdminTlsCtl, CertificatesAreReplacedWhileItRuns) {
  EXPECT_EQ(As("alice", {"jobs"}).exit_code, 0);
  // 1. By one that has expired, and by one whose key is another's: what was there goes on, and the
  //    status says so.
  authority_.Issue("node", {.names = "IP:127.0.0.1", .from = "-9 days", .until = "-1 day"});
  EXPECT_TRUE(node_->Until([](const v1::GetStatusReply& s) {
    return s.daemon().problems_size() == 1 &&
           s.daemon().problems(0).find("admin.tls: the certificate of '127.0.0.1', 'node' in ") ==
               0;
  })) << node_->Log();
  EXPECT_EQ(As("alice", {"jobs"}).exit_code, 0);
  // 2. By one of another authority, with that one in ca.crt.
  const TestAuthority next("next-ca");
  next.Issue("node", {.names = "IP:127.0.0.1"});
  next.Issue("alice", {.names = "email:alice@example.com"});
  std::filesystem::copy(
      next.Directory("node"), authority_.Directory("node"),
      std::filesystem::copy_options::overwrite_existing | std::filesystem::copy_options::recursive);
  EXPECT_TRUE(
      Until([&] { return At(address_, next.Directory("alice"), {"jobs"}).exit_code == 0; }));
  EXPECT_EQ(As("alice", {"jobs"}).exit_code, 3);
  EXPECT_TRUE(
      node_->Until([](const v1::GetStatusReply& s) { return s.daemon().problems_size() == 0; }));
}

TEST_F(AdminTlsCtl, OneThatEndsSoonIsToldByTheStatusAndByDoctor) {
  const auto doctor = [&] {
    const CtlAnswer answer = Run(
        {"doctor", "--json", "--socket", node_->admin_socket(), "--config", node_->config_file()});
    for (const auto& finding : answer.parsed["findings"]) {
      if (finding["check"] == "admin.tls") {
        return finding["verdict"].get<std::string>() + ": " + finding["text"].get<std::string>();
      }
    }
    return answer.text + answer.errors;
  };
  EXPECT_THAT(doctor(), HasSubstr("ok: its certificates are valid"));
  ASSERT_EQ(node_->Stop(), 0);
  authority_.Issue("node", {.names = "IP:127.0.0.1", .until = "+3 days 12 hours"});
  ASSERT_TRUE(node_->Start());
  EXPECT_TRUE(node_->Until([](const v1::GetStatusReply& s) {
    return s.daemon().problems_size() == 1 &&
           s.daemon().problems(0).find(", 3 days from now") != std::string::npos;
  })) << node_->Log();
  EXPECT_THAT(doctor(), HasSubstr("slow: the certificate of '127.0.0.1', 'node' in "));
  authority_.Issue("node", {.from = "-9 days", .until = "-1 day"});
  EXPECT_THAT(doctor(), HasSubstr("will_not_work: the certificate of 'node' in "));
}

TEST_F(AdminTlsCtl, WhomACertificateStandsForIsReadAgain) {
  EXPECT_EQ(As("dave", {"jobs"}).exit_code, 3);
  WriteText(node_->config_file(), "metrics: {address: \"off\"}\nlog: {level: debug}\n" + settings_ +
                                      "    users: [{certificate: dave, uid: 1005}]\n");
  ASSERT_EQ(::kill(node_->pid(), SIGHUP), 0);
  EXPECT_TRUE(Until([&] { return As("dave", {"jobs"}).exit_code == 0; })) << node_->Log();
  EXPECT_EQ(As("alice", {"jobs"}).exit_code, 3);
}

TEST_F(AdminTlsCtl, WhoFollowsAndIsTakenOutHearsWhy) {
  const TemporaryDirectory directory;
  Child follow({.arguments = {HOLDFAST_BIN_DIR "/ckptctl", "events", "--follow", "--address",
                              address_, "--tls", authority_.Directory("ops")},
                .error_file = directory.Path("errors"),
                .pipes = true});
  ASSERT_TRUE(follow.ReadLine());
  WriteText(node_->config_file(), "metrics: {address: \"off\"}\nlog: {level: debug}\n" + settings_ +
                                      "    users: [{certificate: alice@example.com, uid: 1005}]\n");
  ASSERT_EQ(::kill(node_->pid(), SIGHUP), 0);
  EXPECT_EQ(follow.Wait(), 3);
  EXPECT_THAT(
      ReadText(directory.Path("errors")),
      HasSubstr("lets us not in: nobody has said for whom the certificate of 'ops.example'"));
}

size_t CountIn(pid_t pid, const std::string& what) {
  return FilesIn("/proc/" + std::to_string(pid) + "/" + what, "").size();
}

TEST_F(AdminTlsCtl, ThoseWhoMeanHarmKeepNobodyOutAndLeaveNothingBehind) {
  for (const char* who : {"ops", "alice", "dave"}) {
    As(who, {"jobs"});  // (a user's server stays)
  }
  ASSERT_TRUE(Until([&] { return Ctl(*node_, {"status"}).exit_code == 0; }));
  const size_t descriptors = CountIn(node_->pid(), "fd");
  const size_t threads = CountIn(node_->pid(), "task");
  std::vector<UniqueFd> held;
  const std::vector<std::string> words = {
      "",
      "GET / HTTP/1.1\r\nHost: x\r\n\r\n",
      std::string("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0", 33),
      std::string("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 11),  // and then nothing
      std::string("\x16\x03\x01\xff\xff", 5) + std::string(70'000, 'x'),
      std::string(100'000, '\0')};
  for (int i = 0; i < 300; ++i) {
    auto fd = ConnectTcp(address_, Clock::System()->Now() + kPatience);
    if (!fd.ok()) {
      continue;
    }
    const std::string& say = words[static_cast<size_t>(i) % words.size()];
    static_cast<void>(::send(fd->get(), say.data(), say.size(), MSG_NOSIGNAL | MSG_DONTWAIT));
    held.push_back(*std::move(fd));
  }
  const CtlAnswer here = Ctl(*node_, {"status"});
  EXPECT_EQ(here.exit_code, 0) << here.errors;
  const CtlAnswer there = As("alice", {"status"});
  EXPECT_EQ(there.exit_code, 0) << there.errors;
  // All that was not in earnest is closed without our doing.
  EXPECT_TRUE(Until([&] { return CountIn(node_->pid(), "fd") <= descriptors; }))
      << CountIn(node_->pid(), "fd") << " of " << descriptors;
  held.clear();
  EXPECT_TRUE(Until([&] { return CountIn(node_->pid(), "task") <= threads; }))
      << CountIn(node_->pid(), "task") << " of " << threads;
  EXPECT_EQ(As("alice", {"status"}).exit_code, 0);
  EXPECT_EQ(node_->Stop(), 0);
}

}  // namespace
}  // namespace holdfast
