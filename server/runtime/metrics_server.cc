#include "server/runtime/metrics_server.h"

#include <pthread.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/loopback.h"
#include "base/program.h"
#include "base/status.h"
#include "server/runtime/reactor.h"
#include "server/runtime/status_page/http_answer.h"
#include "server/runtime/status_page/http_request.h"
#include "server/runtime/tcp_door.h"

namespace holdfast {
namespace {

constexpr char kMetricsPath[] = "/metrics";
constexpr char kMetricsType[] = "text/plain; version=0.0.4; charset=utf-8";

// Who says something else than a request is answered as well: so it is told what is spoken here.
TcpDoor::Heard HttpHeardOf(std::string_view said) {
  return HttpHeadOf(said) == HttpHead::kBegun ? TcpDoor::Heard::kMore : TcpDoor::Heard::kAll;
}

absl::StatusOr<HttpRequest> RequestIn(std::string_view said) {
  switch (HttpHeadOf(said)) {
    case HttpHead::kWhole:
      return ParseHttpRequest(said.substr(0, said.find(kHttpHeadEnd) + kHttpHeadEnd.size()));
    case HttpHead::kTooLong:
      return absl::InvalidArgumentError("the request's head is too long");
    default:
      return absl::InvalidArgumentError(
          "this is no HTTP, which is what is spoken here, in the clear");
  }
}

}  // namespace

struct MetricsServer::Impl {
  Impl(Options wanted, std::unique_ptr<Reactor> loop)
      : options(std::move(wanted)),
        reactor(std::move(loop)),
        answer_timer(reactor->AddTimer([this] { CutOffTheSlow(); })) {}

  absl::Status Open() {
    loopback = IsLoopbackHost(options.address);
    const bool port_alone = options.address.find(':') == std::string::npos;
    absl::StatusOr<std::unique_ptr<TcpDoor>> opened = TcpDoor::Open(
        *reactor,
        {.address = port_alone ? absl::StrCat("0.0.0.0:", options.address) : options.address,
         .silence_max = options.request_max,
         .looked_at_max = kHttpHeadBytesMax + 1,
         .heard = HttpHeardOf,
         .enter = [this](UniqueFd fd) { Enter(std::move(fd)); }});
    if (!opened.ok()) {
      return absl::UnavailableError(absl::StrCat("serve metrics on '", options.address,
                                                 "': ", Message(opened.status()),
                                                 "; is the port taken? (port 0 picks a free one)"));
    }
    door = *std::move(opened);
    port = door->port();
    return absl::OkStatus();
  }

  // ---- Of the thread ----

  struct Answer {
    UniqueFd fd;
    std::string bytes;
    size_t sent = 0;
    MonotonicTime until;
  };
  using Number = uint64_t;  // increasing: the first has taken longest

  HttpAnswer AnswerTo(const absl::StatusOr<HttpRequest>& request) const {
    if (!request.ok()) {
      return HttpError(400, Message(request.status()));
    }
    if (loopback && !IsLoopbackHost(request->host)) {
      return HttpError(
          421,
          "metrics.address is of loopback, and is asked for as 127.0.0.1, [::1] or localhost "
          "only; for others name an address that they reach");
    }
    if (request->method != "GET" && request->method != "HEAD") {
      return HttpError(405, "metrics are read: GET /metrics");
    }
    if (request->path != kMetricsPath) {
      return HttpError(404, "there is nothing but /metrics");
    }
    HttpAnswer answer;
    answer.content_type = kMetricsType;
    answer.body = options.text();
    return answer;
  }

  void Enter(UniqueFd fd) {
    std::string head(kHttpHeadBytesMax + 1, '\0');
    const ssize_t size = ::recv(fd.get(), head.data(), head.size(), MSG_DONTWAIT);
    head.resize(static_cast<size_t>(std::max<ssize_t>(size, 0)));
    const absl::StatusOr<HttpRequest> request = RequestIn(head);
    const bool without_body = request.ok() && request->method == "HEAD";
    const Number number = next++;
    const auto [it, added] =
        answers.emplace(number, Answer{std::move(fd), AnswerTo(request).Bytes(without_body), 0,
                                       reactor->clock().Now() + options.answer_max});
    const int watched = it->second.fd.get();
    if (!reactor->Watch(watched, EPOLLOUT, [this, number](uint32_t) { Send(number); }).ok()) {
      answers.erase(it);
      return;
    }
    if (answers.size() == 1) {
      reactor->Arm(answer_timer, it->second.until);
    }
    if (answers.size() > kAnswersMax) {
      End(answers.begin());
    }
  }

  void Send(Number number) {
    const auto it = answers.find(number);
    if (it == answers.end()) {
      return;
    }
    Answer& answer = it->second;
    const ssize_t sent = ::send(answer.fd.get(), answer.bytes.data() + answer.sent,
                                answer.bytes.size() - answer.sent, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0 && (errno == EAGAIN || errno == EINTR)) {
      return;
    }
    answer.sent += static_cast<size_t>(std::max<ssize_t>(sent, 0));
    if (sent < 0 || answer.sent == answer.bytes.size()) {
      End(it);
    }
  }

  void End(std::map<Number, Answer>::iterator it) {
    reactor->Unwatch(it->second.fd.get());
    ::shutdown(it->second.fd.get(), SHUT_WR);
    answers.erase(it);
  }

  void CutOffTheSlow() {
    const MonotonicTime now = reactor->clock().Now();
    while (!answers.empty() && answers.begin()->second.until <= now) {
      End(answers.begin());
    }
    if (!answers.empty()) {
      reactor->Arm(answer_timer, answers.begin()->second.until);
    }
  }

  const Options options;
  const std::unique_ptr<Reactor> reactor;
  const Reactor::TimerId answer_timer;
  bool loopback = true;
  int port = 0;
  std::unique_ptr<TcpDoor> door;
  std::map<Number, Answer> answers;
  Number next = 1;
  std::thread thread;
};

absl::StatusOr<std::unique_ptr<MetricsServer>> MetricsServer::Start(Options options) {
  HF_RETURN_IF_ERROR(CheckThreads(1));
  HF_ASSIGN_OR_RETURN(std::unique_ptr<Reactor> reactor, Reactor::Create(Clock::System()));
  auto impl = std::make_unique<Impl>(std::move(options), std::move(reactor));
  HF_RETURN_IF_ERROR(impl->Open());
  impl->thread = std::thread([i = impl.get()] {
    ::pthread_setname_np(::pthread_self(), "metrics");
    i->reactor->Run();
  });
  return std::unique_ptr<MetricsServer>(new MetricsServer(std::move(impl)));
}

MetricsServer::MetricsServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

MetricsServer::~MetricsServer() {
  impl_->reactor->Stop();
  impl_->thread.join();
  impl_->door = nullptr;
}

int MetricsServer::port() const {
  return impl_->port;
}

}  // namespace holdfast
