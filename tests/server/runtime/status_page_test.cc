// The status page over real sockets: what it serves, to whom, and what it does with those who do
// not speak as they should.
#include "server/runtime/status_page/status_page.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <openssl/evp.h>
#include <openssl/sha.h>
#include <openssl/ssl.h>
#include <signal.h>
#include <sys/socket.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <filesystem>
#include <thread>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/certificates.h"
#include "base/env.h"
#include "base/fault_env.h"
#include "base/loopback.h"
#include "base/mutex.h"
#include "base/status.h"
#include "base/unique_fd.h"
#include "server/runtime/status_page/http_answer.h"
#include "server/runtime/status_page/http_request.h"
#include "server/runtime/status_page/once_a_while.h"
#include "tests/base/temporary_directory.h"

namespace holdfast {
namespace {

using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

constexpr std::chrono::seconds kDeadline(20);

// ---- Requests, as text ----

absl::StatusOr<HttpRequest> Parse(const std::string& head) {
  return ParseHttpRequest(head);
}

TEST(HttpRequest, IsReadAsItIs) {
  const absl::StatusOr<HttpRequest> request =
      Parse("GET /status.json?x=1 HTTP/1.1\r\nhOST: \t127.0.0.1:9470 \r\nAccept: a, b\r\n\r\n");
  ASSERT_TRUE(request.ok()) << request.status();
  EXPECT_EQ(request->method, "GET");
  EXPECT_EQ(request->path, "/status.json");
  EXPECT_EQ(request->host, "127.0.0.1:9470");
  EXPECT_TRUE(Parse("HEAD / HTTP/1.0\r\n\r\n").ok());
}

TEST(HttpRequest, WhatIsNoneIsRefused) {
  const std::string host = "Host: a\r\n";
  std::string many;
  for (size_t i = 0; i <= kHttpHeadersMax; ++i) {
    absl::StrAppend(&many, "a: b\r\n");
  }
  for (const std::string& head :
       {std::string(),
        std::string("\r\n\r\n"),
        std::string("GET /\r\n\r\n"),
        "GET / HTTP/1.1\r\n" + host,
        "GET / HTTP/2\r\n" + host + "\r\n",
        "GET / HTTP/1.1 \r\n" + host + "\r\n",
        "GET  / HTTP/1.1\r\n" + host + "\r\n",
        "GET http://a/ HTTP/1.1\r\n" + host + "\r\n",
        "GET * HTTP/1.1\r\n" + host + "\r\n",
        "G(T / HTTP/1.1\r\n" + host + "\r\n",
        "GET /\x01 HTTP/1.1\r\n" + host + "\r\n",
        "GET /\xff HTTP/1.1\r\n" + host + "\r\n",
        "AAAAAAAAAAAAAAAAA / HTTP/1.1\r\n" + host + "\r\n",
        std::string("GET / HTTP/1.1\r\n\r\n"),  // no Host
        "GET / HTTP/1.1\r\n" + host + host + "\r\n",
        "GET / HTTP/1.1\r\n" + host + " folded\r\n\r\n",
        "GET / HTTP/1.1\r\n" + host + "a b: c\r\n\r\n",
        "GET / HTTP/1.1\r\n" + host + "a\r\n\r\n",
        "GET / HTTP/1.1\r\n" + host + ": c\r\n\r\n",
        "GET / HTTP/1.1\r\n" + host + "a: b\nHost: c\r\n\r\n",
        "GET / HTTP/1.1\r\n" + host + "a: " + std::string(1, '\0') + "\r\n\r\n",
        "GET / HTTP/1.1\r\n" + host + many + "\r\n",
        "GET / HTTP/1.1\r\n" + host + "a: " + std::string(kHttpHeadBytesMax, 'x') + "\r\n\r\n"}) {
    EXPECT_FALSE(Parse(head).ok()) << absl::CEscape(head);
  }
}

TEST(HttpRequest, FirstBytesAreAHeadOrItsBeginningOrNone) {
  for (const char* said : {"", "G", "GET", "GET ", "GET / HTTP/1.1\r\nHost: a\r\n", "GET \x01"}) {
    EXPECT_EQ(HttpHeadOf(said), HttpHead::kBegun) << said;
  }
  EXPECT_EQ(HttpHeadOf("GET / HTTP/1.1\r\n\r\nand more"), HttpHead::kWhole);
  EXPECT_EQ(HttpHeadOf("garbage /\r\n\r\n"), HttpHead::kWhole) << "which the parser refuses";
  for (const std::string& said :
       {std::string("\x16\x03\x01"), std::string(1, '\0'), std::string("\r\n"), std::string(" /"),
        std::string("G(T"), std::string("GET\r\n\r\n"), std::string("\xff")}) {
    EXPECT_EQ(HttpHeadOf(said), HttpHead::kNone) << absl::CEscape(said);
  }
  EXPECT_EQ(HttpHeadOf(std::string(kHttpHeadBytesMax, 'x')), HttpHead::kBegun);
  EXPECT_EQ(HttpHeadOf(std::string(kHttpHeadBytesMax + 1, 'x')), HttpHead::kTooLong);
  EXPECT_EQ(HttpHeadOf("GET /" + std::string(kHttpHeadBytesMax, 'x') + "\r\n\r\n"),
            HttpHead::kTooLong);
}

TEST(HttpRequest, OnlyNamesOfLoopbackAreTaken) {
  for (const char* host : {"127.0.0.1", "127.0.0.1:9470", "127.8.8.8:1", "localhost",
                           "LocalHost:80", "[::1]", "[::1]:9470"}) {
    EXPECT_TRUE(IsLoopbackHost(host)) << host;
  }
  for (const char* host :
       {"", "evil.example", "localhost.evil.example", "127.0.0.1.evil.example",
        "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:1:2", "10.0.0.1", "128.0.0.1", "[::2]", "::1",
        "127.1", "localhost:123456", "0x7f.0.0.1", "2130706433", " 127.0.0.1", "evil@127.0.0.1"}) {
    EXPECT_FALSE(IsLoopbackHost(host)) << host;
  }
}

// ---- A text for many ----

TEST(OnceAWhile, IsMadeAtMostOnceInItsTimeAndOnlyWhenAsked) {
  ManualClock clock;
  int made = 0;
  OnceAWhile text(
      std::chrono::seconds(1), [&] { return absl::StatusOr<std::string>(absl::StrCat(++made)); },
      &clock);
  clock.Advance(std::chrono::hours(1));
  EXPECT_EQ(made, 0);
  EXPECT_EQ(*text.Get(), "1");
  clock.Advance(std::chrono::milliseconds(999));
  EXPECT_EQ(*text.Get(), "1");
  clock.Advance(std::chrono::milliseconds(1));
  EXPECT_EQ(*text.Get(), "2");
  EXPECT_EQ(made, 2);
}

TEST(OnceAWhile, AnErrorIsKeptLikeAText) {
  ManualClock clock;
  int made = 0;
  OnceAWhile text(
      std::chrono::seconds(1),
      [&]() -> absl::StatusOr<std::string> {
        ++made;
        return absl::UnavailableError("not now");
      },
      &clock);
  EXPECT_FALSE(text.Get().ok());
  EXPECT_FALSE(text.Get().ok());
  EXPECT_EQ(made, 1);
}

TEST(OnceAWhile, WhoAsksMeanwhileWaitsForTheSame) {
  ManualClock clock;
  Mutex mutex;
  CondVar changed;
  bool open = false;
  std::atomic<int> made{0};
  OnceAWhile text(
      std::chrono::seconds(1),
      [&] {
        MutexLock lock(mutex);
        ++made;
        while (!open) {
          changed.Wait(mutex);
        }
        return absl::StatusOr<std::string>("text");
      },
      &clock);
  std::vector<std::thread> readers;
  std::atomic<int> begun{0};
  for (int i = 0; i < 4; ++i) {
    readers.emplace_back([&] {
      ++begun;
      EXPECT_EQ(*text.Get(), "text");
    });
  }
  while (begun < 4 || made == 0) {
    std::this_thread::yield();
  }
  {
    MutexLock lock(mutex);
    open = true;
    changed.NotifyAll();
  }
  for (std::thread& reader : readers) {
    reader.join();
  }
  EXPECT_EQ(made, 1);
}

// ---- Over sockets ----

class Client {
 public:
  explicit Client(int port) : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const timeval limit = {kDeadline.count(), 0};
    ::setsockopt(fd_.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    connected_ =
        ::connect(fd_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
  }
  bool connected() const { return connected_; }
  int fd() const { return fd_.get(); }
  void Send(const std::string& bytes) {
    static_cast<void>(::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL));
  }
  void EndSending() { ::shutdown(fd_.get(), SHUT_WR); }
  // It was ended by the server, who has said nothing.
  bool IsClosed() {
    char byte = 0;
    const ssize_t size = ::recv(fd_.get(), &byte, 1, 0);
    return size == 0 || (size < 0 && errno == ECONNRESET);
  }
  // Until the server ends.
  std::string ReadAll() {
    std::string all;
    std::array<char, 4096> buffer;
    ssize_t size = 0;
    while ((size = ::recv(fd_.get(), buffer.data(), buffer.size(), 0)) > 0) {
      all.append(buffer.data(), static_cast<size_t>(size));
    }
    EXPECT_EQ(size, 0) << "after " << all.size() << " bytes";
    return all;
  }

 private:
  UniqueFd fd_;
  bool connected_ = false;
};

std::string RequestFor(const std::string& path, const std::string& method = "GET",
                       const std::string& host = "127.0.0.1") {
  return absl::StrCat(method, " ", path, " HTTP/1.1\r\nHost: ", host, "\r\n\r\n");
}

class StatusPageTest : public ::testing::Test {
 protected:
  void SetUp() override { ::signal(SIGPIPE, SIG_IGN); }  // as the daemon does

  StatusPage::Options Options() {
    StatusPage::Options options;
    options.address = "127.0.0.1:0";
    options.report = [this]() -> absl::StatusOr<std::string> {
      ++reports_;
      return report_error_.ok() ? absl::StatusOr<std::string>("{\"n\":1}") : report_error_;
    };
    return options;
  }
  void Serve(StatusPage::Options options) {
    absl::StatusOr<std::unique_ptr<StatusPage>> page = StatusPage::Start(std::move(options));
    ASSERT_TRUE(page.ok()) << page.status();
    page_ = *std::move(page);
    ASSERT_GT(page_->port(), 0);
  }
  // With the certificates that CopyCertificates put there.
  void ServeOverTls() {
    StatusPage::Options options = Options();
    options.tls = {"/tls/ca.pem", "/tls/server.pem", "/tls/server.key"};
    options.env = &env_;
    options.look = std::chrono::milliseconds(5);
    Serve(std::move(options));
  }
  std::string Ask(const std::string& bytes) {
    Client client(page_->port());
    client.Send(bytes);
    return client.ReadAll();
  }

  std::atomic<int> reports_{0};
  absl::Status report_error_;
  FaultEnv env_;
  std::unique_ptr<StatusPage> page_;
};

std::string BodyOf(const std::string& answer) {
  return answer.substr(std::min(answer.size(), answer.find("\r\n\r\n") + 4));
}
std::string HeaderOf(const std::string& answer, const std::string& name) {
  const size_t begin = answer.find("\r\n" + name + ": ");
  if (begin == std::string::npos || begin > answer.find("\r\n\r\n")) {
    return "";
  }
  const size_t value = begin + name.size() + 4;
  return answer.substr(value, answer.find("\r\n", value) - value);
}

TEST_F(StatusPageTest, ServesThePageAndTheReportWithAllHeadersThatProtectThem) {
  Serve(Options());
  const std::string page = Ask(RequestFor("/"));
  EXPECT_THAT(page, StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_EQ(HeaderOf(page, "Content-Type"), "text/html; charset=utf-8");
  const std::string report = Ask(RequestFor("/status.json"));
  EXPECT_THAT(report, StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_EQ(HeaderOf(report, "Content-Type"), "application/json; charset=utf-8");
  EXPECT_EQ(BodyOf(report), "{\"n\":1}");
  for (const std::string& answer :
       {page, report, Ask(RequestFor("/x")), Ask(RequestFor("/", "POST"))}) {
    EXPECT_EQ(HeaderOf(answer, "Cache-Control"), "no-store");
    EXPECT_EQ(HeaderOf(answer, "X-Content-Type-Options"), "nosniff");
    EXPECT_EQ(HeaderOf(answer, "X-Frame-Options"), "DENY");
    EXPECT_EQ(HeaderOf(answer, "Referrer-Policy"), "no-referrer");
    EXPECT_EQ(HeaderOf(answer, "Cross-Origin-Resource-Policy"), "same-origin");
    EXPECT_EQ(HeaderOf(answer, "Connection"), "close");
    EXPECT_EQ(HeaderOf(answer, "Content-Length"), absl::StrCat(BodyOf(answer).size()));
    EXPECT_EQ(HeaderOf(answer, "Access-Control-Allow-Origin"), "");
    EXPECT_THAT(HeaderOf(answer, "Content-Security-Policy"), StartsWith("default-src 'none'; "));
    EXPECT_THAT(HeaderOf(answer, "Content-Security-Policy"), HasSubstr("frame-ancestors 'none'"));
    EXPECT_THAT(HeaderOf(answer, "Content-Security-Policy"), Not(HasSubstr("unsafe")));
  }
}

// What lies between two marks.
std::string Between(const std::string& text, const std::string& begin, const std::string& end) {
  const size_t from = text.find(begin) + begin.size();
  return text.substr(from, text.find(end, from) - from);
}

TEST_F(StatusPageTest, ThePolicyNamesThePagesOwnScriptAndStyleAndThereIsNothingElse) {
  Serve(Options());
  const std::string answer = Ask(RequestFor("/"));
  const std::string page = BodyOf(answer);
  const std::string policy = HeaderOf(answer, "Content-Security-Policy");
  for (const std::string element : {"script", "style"}) {
    const std::string text =
        Between(page, absl::StrCat("<", element, ">"), absl::StrCat("</", element, ">"));
    ASSERT_GT(text.size(), 100u);
    std::array<unsigned char, SHA256_DIGEST_LENGTH> digest = {};
    unsigned int size = 0;
    ASSERT_EQ(EVP_Digest(text.data(), text.size(), digest.data(), &size, EVP_sha256(), nullptr), 1);
    const std::string hash =
        absl::Base64Escape(absl::string_view(reinterpret_cast<const char*>(digest.data()), size));
    EXPECT_THAT(policy, HasSubstr(absl::StrCat(element, "-src 'sha256-", hash, "';")));
  }
  EXPECT_THAT(policy, HasSubstr("connect-src 'self';"));
  EXPECT_THAT(policy, HasSubstr("base-uri 'none'; form-action 'none'"));
  // Nothing is loaded from elsewhere, and no text is ever read as markup.
  for (const char* never : {"src=", "http://", "https://", "@import", "url(", "innerHTML",
                            "outerHTML", "insertAdjacent", "document.write", "eval(",
                            " on"
                            "click="}) {
    EXPECT_THAT(Between(page, "<head>", "<script>"), Not(HasSubstr(never)));
    if (std::string(never) != "http://") {  // (the name of SVG)
      EXPECT_THAT(Between(page, "<script>", "</script>"), Not(HasSubstr(never)));
    }
  }
}

TEST_F(StatusPageTest, HeadHasTheHeadersOfGetAndNoBody) {
  Serve(Options());
  for (const char* path : {"/", "/status.json", "/nothing"}) {
    const std::string get = Ask(RequestFor(path));
    const std::string head = Ask(RequestFor(path, "HEAD"));
    EXPECT_EQ(head, get.substr(0, get.find("\r\n\r\n") + 4)) << path;
  }
}

TEST_F(StatusPageTest, OtherMethodsAndPathsAreRefused) {
  Serve(Options());
  for (const char* method :
       {"POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "CONNECT", "PROPFIND", "get"}) {
    for (const char* path : {"/", "/status.json", "/x"}) {
      const std::string answer = Ask(RequestFor(path, method));
      EXPECT_THAT(answer, StartsWith("HTTP/1.1 405 Method Not Allowed\r\n")) << method;
      EXPECT_EQ(HeaderOf(answer, "Allow"), "GET, HEAD");
    }
  }
  for (const char* path : {"/x", "//", "/status.json/", "/Status.json", "/../etc/passwd",
                           "/%2e%2e/etc/passwd", "/index.html", "/.", "/%00"}) {
    EXPECT_THAT(Ask(RequestFor(path)), StartsWith("HTTP/1.1 404 Not Found\r\n")) << path;
  }
  EXPECT_EQ(reports_, 0);
}

TEST_F(StatusPageTest, AnotherHostIsRefusedForItMayBeOnesThatSomebodyMadePointHere) {
  Serve(Options());
  for (const char* path : {"/", "/status.json", "/x"}) {
    EXPECT_THAT(Ask(RequestFor(path, "GET", "evil.example:9470")),
                StartsWith("HTTP/1.1 421 Misdirected Request\r\n"));
  }
  EXPECT_EQ(reports_, 0);
  EXPECT_THAT(Ask("GET / HTTP/1.0\r\n\r\n"), StartsWith("HTTP/1.1 421 "));
  EXPECT_THAT(Ask(RequestFor("/status.json", "GET", "localhost:8000")),
              StartsWith("HTTP/1.1 200 "));
}

TEST_F(StatusPageTest, GarbageIsRefusedAndTheNextRequestIsServed) {
  Serve(Options());
  EXPECT_THAT(Ask("garbage\r\n\r\n"), StartsWith("HTTP/1.1 400 Bad Request\r\n"));
  for (const std::string& said : {std::string("\0\xff\x16\x03\x01\r\n\r\n", 9),
                                  std::string("\x16\x03\x01\x02"), std::string("\n")}) {
    EXPECT_THAT(Ask(said), StartsWith("HTTP/1.1 400 "));
  }
  EXPECT_THAT(Ask("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), StartsWith("HTTP/1.1 400 "));
  EXPECT_THAT(Ask(absl::StrCat("GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil\r\n\r\n")),
              StartsWith("HTTP/1.1 400 "));
  EXPECT_THAT(Ask(std::string(20'000, 'x')),
              StartsWith("HTTP/1.1 431 Request Header Fields Too Large\r\n"));
  {
    Client ends(page_->port());
    ends.Send("GET / HT");
    ends.EndSending();
    EXPECT_TRUE(ends.IsClosed());
  }
  {
    Client gone(page_->port());
    gone.Send("GET / HT");
  }
  // A body is not read, and the answer arrives all the same.
  EXPECT_THAT(
      Ask(absl::StrCat("POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 30000\r\n\r\n",
                       std::string(30'000, 'x'))),
      StartsWith("HTTP/1.1 405 "));
  EXPECT_THAT(Ask(RequestFor("/")), StartsWith("HTTP/1.1 200 "));
}

TEST_F(StatusPageTest, OneRequestAConnection) {
  Serve(Options());
  const std::string answers = Ask(RequestFor("/status.json") + RequestFor("/status.json"));
  EXPECT_EQ(answers.find("HTTP/1.1 "), answers.rfind("HTTP/1.1 "));
}

TEST_F(StatusPageTest, TheReportIsMadeOnceForAllWhoAskWithinItsTime) {
  StatusPage::Options options = Options();
  options.report_at_least = std::chrono::hours(1);
  Serve(std::move(options));
  EXPECT_EQ(reports_, 0);
  for (int i = 0; i < 5; ++i) {
    EXPECT_THAT(Ask(RequestFor("/status.json")), StartsWith("HTTP/1.1 200 "));
    EXPECT_THAT(Ask(RequestFor("/")), StartsWith("HTTP/1.1 200 "));
  }
  EXPECT_EQ(reports_, 1);
}

TEST_F(StatusPageTest, AReportThatFailsIsUnavailable) {
  report_error_ = absl::DeadlineExceededError("the daemon did not answer within 5000 ms");
  Serve(Options());
  const std::string answer = Ask(RequestFor("/status.json"));
  EXPECT_THAT(answer, StartsWith("HTTP/1.1 503 Service Unavailable\r\n"));
  EXPECT_EQ(BodyOf(answer), "status: the daemon did not answer within 5000 ms; try again\n");
}

TEST_F(StatusPageTest, WhoIsSlowIsGivenUpAndMeanwhileOthersAreServed) {
  StatusPage::Options options = Options();
  options.request_max = std::chrono::milliseconds(300);
  Serve(std::move(options));
  Client slow(page_->port());
  slow.Send("GET / HTTP/1.1\r\n");
  EXPECT_THAT(Ask(RequestFor("/")), StartsWith("HTTP/1.1 200 "));
  EXPECT_TRUE(slow.IsClosed());
  EXPECT_THAT(Ask(RequestFor("/")), StartsWith("HTTP/1.1 200 "));
}

TEST_F(StatusPageTest, WhoDoesNotAskKeepsOutNobodyWhoDoes) {
  StatusPage::Options options = Options();
  options.request_max = std::chrono::hours(1);
  Serve(std::move(options));
  std::vector<std::unique_ptr<Client>> silent;
  for (int i = 0; i < 600; ++i) {
    silent.push_back(std::make_unique<Client>(page_->port()));
    ASSERT_TRUE(silent.back()->connected());
    if (i % 2 == 0) {
      silent.back()->Send("GET /sta");
    }
    if (i % 50 == 49) {
      ASSERT_THAT(Ask(RequestFor("/")), StartsWith("HTTP/1.1 200 ")) << i;
      ASSERT_THAT(Ask(RequestFor("/status.json")), StartsWith("HTTP/1.1 200 ")) << i;
    }
  }
  page_.reset();  // does not wait for those who say nothing
}

TEST_F(StatusPageTest, WhoDoesNotTakeTheAnswerKeepsOutNobodyWhoDoes) {
  StatusPage::Options options = Options();
  options.answer_max = std::chrono::hours(1);
  options.report = [] { return absl::StatusOr<std::string>(std::string(8 << 20, 'x')); };
  Serve(std::move(options));
  std::vector<std::unique_ptr<Client>> deaf;
  for (int i = 0; i < 100; ++i) {
    deaf.push_back(std::make_unique<Client>(page_->port()));
    deaf.back()->Send(RequestFor("/status.json"));
  }
  EXPECT_THAT(Ask(RequestFor("/")), StartsWith("HTTP/1.1 200 "));
  EXPECT_EQ(BodyOf(Ask(RequestFor("/status.json"))).size(), size_t{8} << 20);
  EXPECT_LT(deaf.front()->ReadAll().size(), size_t{8} << 20) << "the oldest made room";
}

TEST_F(StatusPageTest, WhoDoesNotReadIsGivenUp) {
  StatusPage::Options options = Options();
  options.answer_max = std::chrono::milliseconds(200);
  options.report = [] { return absl::StatusOr<std::string>(std::string(64 << 20, 'x')); };
  Serve(std::move(options));
  Client deaf(page_->port());
  deaf.Send(RequestFor("/status.json"));
  std::this_thread::sleep_for(std::chrono::milliseconds(600));
  EXPECT_LT(deaf.ReadAll().size(), size_t{64} << 20);
}

TEST_F(StatusPageTest, WhoWaitsForAReportKeepsOutNobodyWhoWantsNone) {
  Mutex mutex;
  CondVar changed;
  bool open = false;
  StatusPage::Options options = Options();
  options.answer_max = std::chrono::hours(1);
  options.report = [&]() -> absl::StatusOr<std::string> {
    MutexLock lock(mutex);
    ++reports_;
    while (!open) {
      changed.Wait(mutex);
    }
    return std::string("{}");
  };
  Serve(std::move(options));
  std::vector<std::unique_ptr<Client>> waiting;
  for (int i = 0; i < 20; ++i) {
    waiting.push_back(std::make_unique<Client>(page_->port()));
    waiting.back()->Send(RequestFor("/status.json"));
  }
  EXPECT_THAT(Ask(RequestFor("/")), StartsWith("HTTP/1.1 200 "));
  {
    MutexLock lock(mutex);
    open = true;
    changed.NotifyAll();
  }
  for (const auto& client : waiting) {
    EXPECT_THAT(client->ReadAll(), StartsWith("HTTP/1.1 200 "));
  }
  EXPECT_EQ(reports_, 1);
}

TEST_F(StatusPageTest, EndsAtOnceWhileSomebodyIsConnected) {
  StatusPage::Options options = Options();
  options.request_max = std::chrono::hours(1);
  Serve(std::move(options));
  Client silent(page_->port());
  EXPECT_THAT(Ask(RequestFor("/")), StartsWith("HTTP/1.1 200 "));  // it has been accepted
  page_.reset();
  std::array<char, 1> byte;
  EXPECT_LE(::recv(silent.fd(), byte.data(), byte.size(), 0), 0);
}

TEST_F(StatusPageTest, APortThatIsTakenIsAnErrorThatNamesTheSetting) {
  Serve(Options());
  StatusPage::Options options = Options();
  options.address = absl::StrCat("127.0.0.1:", page_->port());
  const absl::Status second = StatusPage::Start(std::move(options)).status();
  EXPECT_TRUE(absl::IsUnavailable(second)) << second;
  EXPECT_THAT(Message(second), HasSubstr("(status_page.address): "));
}

// ---- TLS ----

// An authority, and certificates by it for 127.0.0.1 and for a browser.
void MakeCertificates(const std::string& directory) {
  const std::string script = absl::StrCat("set -e; cd '", directory, R"('; exec >openssl.log 2>&1
ec="-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"
printf 'subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n' >ext
openssl req -x509 $ec -days 2 -subj /CN=test-ca -keyout ca.key -out ca.pem
for name in server browser; do
  openssl req $ec -subj /CN=$name -keyout $name.key -out $name.csr
  openssl x509 -req -days 2 -in $name.csr -CA ca.pem -CAkey ca.key -CAcreateserial -extfile ext -out $name.pem
done
)");
  EXPECT_EQ(std::system(script.c_str()), 0);
}

// Those of the server, as /tls of `env`.
void CopyCertificates(const TemporaryDirectory& from, FaultEnv& env) {
  ASSERT_TRUE(env.CreateDirectory("/tls", 0755).ok());
  for (const char* name : {"ca.pem", "server.pem", "server.key"}) {
    const absl::StatusOr<std::string> text =
        ReadFile(*Env::System(), from.Path(name), kTlsFileBytesMax);
    ASSERT_TRUE(text.ok()) << text.status();
    ASSERT_TRUE(WriteFileAtomically(env, JoinPath("/tls", name), *text).ok());
  }
}
// More calls than a look that was under way and the next one make.
void AwaitLooks(const FaultEnv& env) {
  constexpr int kCallsOfTwoLooks = 100;
  const int before = env.calls();
  const auto until = std::chrono::steady_clock::now() + kDeadline;
  while (env.calls() < before + kCallsOfTwoLooks && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_GE(env.calls(), before + kCallsOfTwoLooks) << "nobody looks at the files";
}

// What a browser with that certificate gets; empty: it is refused.
std::string AskOverTls(int port, const std::string& ca, const std::string& cert,
                       const std::string& key) {
  Client client(port);
  std::unique_ptr<SSL_CTX, void (*)(SSL_CTX*)> context(SSL_CTX_new(TLS_client_method()),
                                                       SSL_CTX_free);
  SSL_CTX_set_verify(context.get(), SSL_VERIFY_PEER, nullptr);
  EXPECT_EQ(SSL_CTX_load_verify_locations(context.get(), ca.c_str(), nullptr), 1);
  if (!cert.empty()) {
    EXPECT_EQ(SSL_CTX_use_certificate_chain_file(context.get(), cert.c_str()), 1);
    EXPECT_EQ(SSL_CTX_use_PrivateKey_file(context.get(), key.c_str(), SSL_FILETYPE_PEM), 1);
  }
  std::unique_ptr<SSL, void (*)(SSL*)> ssl(SSL_new(context.get()), SSL_free);
  SSL_set_fd(ssl.get(), client.fd());
  if (SSL_connect(ssl.get()) != 1) {
    return "";
  }
  // (Names are not of loopback alone here.)
  const std::string request = RequestFor("/status.json", "GET", "gpu-17.example:9470");
  SSL_write(ssl.get(), request.data(), static_cast<int>(request.size()));
  std::string all;
  std::array<char, 4096> buffer;
  int size = 0;
  while ((size = SSL_read(ssl.get(), buffer.data(), static_cast<int>(buffer.size()))) > 0) {
    all.append(buffer.data(), static_cast<size_t>(size));
  }
  return all;
}

TEST_F(StatusPageTest, OverTlsABrowserMustShowACertificateOfTheAuthority) {
  const TemporaryDirectory own;
  const TemporaryDirectory foreign;
  MakeCertificates(own.path());
  MakeCertificates(foreign.path());
  StatusPage::Options options = Options();
  options.tls = {own.Path("ca.pem"), own.Path("server.pem"), own.Path("server.key")};
  Serve(std::move(options));
  const int port = page_->port();
  EXPECT_THAT(
      AskOverTls(port, own.Path("ca.pem"), own.Path("browser.pem"), own.Path("browser.key")),
      StartsWith("HTTP/1.1 200 "));
  EXPECT_EQ(AskOverTls(port, own.Path("ca.pem"), "", ""), "");
  EXPECT_EQ(AskOverTls(port, own.Path("ca.pem"), foreign.Path("browser.pem"),
                       foreign.Path("browser.key")),
            "");
  EXPECT_EQ(reports_, 1);
  // In the clear nothing is said.
  Client plain(port);
  plain.Send(RequestFor("/status.json"));
  plain.EndSending();
  std::string said;
  std::array<char, 256> buffer;
  for (ssize_t size = 0; (size = ::recv(plain.fd(), buffer.data(), buffer.size(), 0)) > 0;) {
    said.append(buffer.data(), static_cast<size_t>(size));
  }
  EXPECT_THAT(said, Not(HasSubstr("HTTP/1.1")));
}

TEST_F(StatusPageTest, CertificatesThatAreReplacedCountForNewConnectionsSoon) {
  const TemporaryDirectory own;
  const TemporaryDirectory next;
  MakeCertificates(own.path());
  MakeCertificates(next.path());
  StatusPage::Options options = Options();
  options.tls = {own.Path("ca.pem"), own.Path("server.pem"), own.Path("server.key")};
  options.look = std::chrono::milliseconds(5);
  Serve(std::move(options));
  const auto ask = [&](const TemporaryDirectory& by, const std::string& ca) {
    return AskOverTls(page_->port(), ca, by.Path("browser.pem"), by.Path("browser.key"));
  };
  EXPECT_EQ(ask(next, own.Path("ca.pem")), "");
  for (const char* name : {"server.pem", "server.key"}) {
    std::filesystem::copy_file(next.Path(name), own.Path(name),
                               std::filesystem::copy_options::overwrite_existing);
  }
  std::filesystem::rename(own.Path("ca.pem"), own.Path("old.pem"));
  std::filesystem::copy_file(next.Path("ca.pem"), own.Path("ca.pem"));
  std::string answer;
  for (const auto until = std::chrono::steady_clock::now() + kDeadline;
       answer.empty() && std::chrono::steady_clock::now() < until;) {
    answer = ask(next, next.Path("ca.pem"));
  }
  EXPECT_THAT(answer, StartsWith("HTTP/1.1 200 "));
  EXPECT_EQ(ask(own, next.Path("ca.pem")), "");
}

// As on a mount that hangs.
TEST_F(StatusPageTest, FilesThatCannotBeReadNowHoldUpNobody) {
  const TemporaryDirectory own;
  MakeCertificates(own.path());
  CopyCertificates(own, env_);
  ServeOverTls();
  env_.StallMatching("/tls/ca.pem");
  const auto ask = [&] {
    return AskOverTls(page_->port(), own.Path("ca.pem"), own.Path("browser.pem"),
                      own.Path("browser.key"));
  };
  ASSERT_TRUE(env_.WaitForStalled(1, kDeadline)) << "nobody looks at the files";
  EXPECT_THAT(ask(), StartsWith("HTTP/1.1 200 "));
  EXPECT_THAT(ask(), StartsWith("HTTP/1.1 200 "));
  env_.ReleaseStalled("/tls/ca.pem");
}

TEST_F(StatusPageTest, FilesThatDoNotFitTogetherAreAnErrorAtTheStart) {
  const TemporaryDirectory own;
  MakeCertificates(own.path());
  StatusPage::Options options = Options();
  options.tls = {own.Path("ca.pem"), own.Path("server.pem"), own.Path("browser.key")};
  const absl::Status status = StatusPage::Start(std::move(options)).status();
  EXPECT_THAT(Message(status), StartsWith("no status page: status_page.tls: the key in '"));
  EXPECT_THAT(Message(status), HasSubstr(own.Path("browser.key")));
}

TEST_F(StatusPageTest, FilesThatAreNoGoodLaterLeaveThoseOfBefore) {
  const TemporaryDirectory own;
  MakeCertificates(own.path());
  CopyCertificates(own, env_);
  ServeOverTls();
  const auto ask = [&] {
    return AskOverTls(page_->port(), own.Path("ca.pem"), own.Path("browser.pem"),
                      own.Path("browser.key"));
  };
  const std::string ca = *ReadFile(env_, "/tls/ca.pem", kTlsFileBytesMax);
  ASSERT_TRUE(
      WriteFileAtomically(env_, "/tls/ca.pem",
                          ca + "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n")
          .ok());
  AwaitLooks(env_);
  EXPECT_THAT(ask(), StartsWith("HTTP/1.1 200 "));
  ASSERT_TRUE(env_.Unlink("/tls/server.key").ok());
  AwaitLooks(env_);
  EXPECT_THAT(ask(), StartsWith("HTTP/1.1 200 "));
}

TEST_F(StatusPageTest, WhoIsSilentOverTlsKeepsOutNobodyWhoAsks) {
  const TemporaryDirectory own;
  MakeCertificates(own.path());
  StatusPage::Options options = Options();
  options.tls = {own.Path("ca.pem"), own.Path("server.pem"), own.Path("server.key")};
  options.request_max = std::chrono::hours(1);
  Serve(std::move(options));
  const std::string begun("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 11);
  std::vector<std::unique_ptr<Client>> silent;
  for (int i = 0; i < 400; ++i) {
    silent.push_back(std::make_unique<Client>(page_->port()));
    ASSERT_TRUE(silent.back()->connected());
    if (i % 2 == 0) {
      silent.back()->Send(begun);
    }
    if (i % 50 == 49) {
      ASSERT_THAT(AskOverTls(page_->port(), own.Path("ca.pem"), own.Path("browser.pem"),
                             own.Path("browser.key")),
                  StartsWith("HTTP/1.1 200 "))
          << i;
    }
  }
  page_.reset();
}

TEST_F(StatusPageTest, WhoIsSlowWithItsHandshakeIsGivenUp) {
  const TemporaryDirectory own;
  MakeCertificates(own.path());
  StatusPage::Options options = Options();
  options.tls = {own.Path("ca.pem"), own.Path("server.pem"), own.Path("server.key")};
  options.request_max = std::chrono::milliseconds(200);
  Serve(std::move(options));
  Client silent(page_->port());
  EXPECT_TRUE(silent.IsClosed());
  Client begins(page_->port());
  begins.Send(std::string("\x16\x03\x01\x02\x00\x01", 6));
  EXPECT_TRUE(begins.IsClosed());
}

}  // namespace
}  // namespace holdfast
