#include "server/runtime/status_page/status_page.h"

#include <pthread.h>
#include <sys/epoll.h>

#include <algorithm>
#include <array>
#include <map>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/program.h"
#include "base/status.h"
#include "server/runtime/reactor.h"
#include "server/runtime/status_page/http_answer.h"
#include "server/runtime/status_page/http_request.h"
#include "server/runtime/status_page/once_a_while.h"
#include "server/runtime/status_page/status_connection.h"
#include "server/runtime/tcp_door.h"

namespace holdfast {
namespace {

// What a browser still sends is read, so that the answer is not lost with it: so much, so long.
constexpr size_t kRestBytesMax = 64 << 10;
constexpr Duration kRestMax = std::chrono::seconds(1);
constexpr int kStepsPerTurn = 16;  // then others have theirs
constexpr char kHandshakeRecord = 0x16;
constexpr uint32_t kEdge = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;

// (What is no HTTP is answered, too: so it is told what is spoken here.)
TcpDoor::Heard HttpHeardOf(std::string_view said) {
  return HttpHeadOf(said) == HttpHead::kBegun ? TcpDoor::Heard::kMore : TcpDoor::Heard::kAll;
}

TcpDoor::Heard TlsHeardOf(std::string_view said) {
  return said.front() == kHandshakeRecord ? TcpDoor::Heard::kAll : TcpDoor::Heard::kNonsense;
}

}  // namespace

struct StatusPage::Impl {
  Impl(Options given, std::unique_ptr<Reactor> loop)
      : options(std::move(given)),
        site({.loopback_only = !options.tls}),
        report(options.report_at_least, options.report),
        reactor(std::move(loop)),
        timer(reactor->AddTimer([this] { CutOffTheSlow(); })) {}

  absl::Status Begin() {
    if (options.tls) {
      absl::StatusOr<std::unique_ptr<StatusTls>> opened =
          StatusTls::Open(*options.env, *options.tls, options.look);
      if (!opened.ok()) {
        return Annotate(opened.status(), "no status page: status_page.tls");
      }
      tls = *std::move(opened);
    }
    absl::StatusOr<std::unique_ptr<TcpDoor>> opened =
        TcpDoor::Open(*reactor, {.address = options.address,
                                 .silence_max = options.request_max,
                                 .looked_at_max = tls == nullptr ? kHttpHeadBytesMax + 1 : 1,
                                 .heard = tls == nullptr ? HttpHeardOf : TlsHeardOf,
                                 .enter = [this](UniqueFd fd) { Enter(std::move(fd)); }});
    if (!opened.ok()) {
      return absl::UnavailableError(
          absl::StrCat("no status page on '", options.address, "' (status_page.address): ",
                       Message(opened.status()), "; is the port taken? (port 0 picks a free one)"));
    }
    door = *std::move(opened);
    port = door->port();
    return absl::OkStatus();
  }

  // ---- Of the thread that serves ----

  struct Visit {
    enum class Phase : uint8_t { kAsks, kWaits, kTakes, kParts };
    std::unique_ptr<StatusConnection> connection;
    MonotonicTime until;
    Phase phase = Phase::kAsks;
    std::string head;        // kAsks: what has come of it
    bool head_only = false;  // of the answer
    std::string answer;
    size_t sent = 0;
    size_t rest = 0;  // kParts: bytes that came all the same
  };
  using Phase = Visit::Phase;
  using Number = uint64_t;  // increasing: the first has been here longest
  enum class Outcome : uint8_t { kMore, kWaits, kEnded };

  MonotonicTime Now() const { return reactor->clock().Now(); }

  void Enter(UniqueFd fd) {
    absl::StatusOr<std::unique_ptr<StatusConnection>> connection =
        tls == nullptr ? PlainConnection(std::move(fd)) : tls->Accept(std::move(fd));
    const Number number = next++;
    const absl::Status watched = connection.ok()
                                     ? reactor->Watch((*connection)->socket(), kEdge,
                                                      [this, number](uint32_t) { Go(number); })
                                     : connection.status();
    if (!watched.ok()) {
      return LogFailed(watched);
    }
    Visit& visit = visits[number];
    visit.connection = *std::move(connection);
    visit.until = Now() + options.request_max;
    Go(number);
  }

  void Go(Number number) {
    const auto found = visits.find(number);
    if (found == visits.end()) {
      return;
    }
    Outcome outcome = Outcome::kMore;
    for (int i = 0; i < kStepsPerTurn && outcome == Outcome::kMore; ++i) {
      outcome = Step(found->second);
    }
    if (outcome == Outcome::kEnded) {
      End(found);
    } else if (outcome == Outcome::kMore) {
      reactor->Post([this, number] { Go(number); });
    }
    const auto asks = [](const Visit& visit) { return visit.phase == Phase::kAsks; };
    KeepAtMost(kAskingMax, asks);
    KeepAtMost(kAnswersMax, [&](const Visit& visit) { return !asks(visit); });
    ArmTimer();
  }

  Outcome Step(Visit& visit) {
    std::array<char, 2048> buffer;
    if (visit.phase == Phase::kWaits) {
      return Outcome::kWaits;
    }
    const absl::StatusOr<TlsStep> step =
        visit.phase == Phase::kTakes
            ? visit.connection->Write(std::string_view(visit.answer).substr(visit.sent))
            : visit.connection->Read(buffer);
    if (!step.ok()) {
      LogFailed(step.status());
      return Outcome::kEnded;
    }
    if (step->kind != TlsStep::Kind::kDone) {
      return step->kind == TlsStep::Kind::kEnded ? Outcome::kEnded : Outcome::kWaits;
    }
    switch (visit.phase) {
      case Phase::kAsks:
        visit.head.append(buffer.data(), step->bytes);
        if (HttpHeadOf(visit.head) != HttpHead::kBegun) {
          Hear(visit);
        }
        break;
      case Phase::kTakes:
        visit.sent += step->bytes;
        if (visit.sent == visit.answer.size()) {
          visit.connection->End();
          visit.phase = Phase::kParts;
          visit.until = Now() + kRestMax;
        }
        break;
      default:
        visit.rest += step->bytes;
        break;
    }
    return visit.rest > kRestBytesMax ? Outcome::kEnded : Outcome::kMore;
  }

  void Hear(Visit& visit) {
    const HttpHead head = HttpHeadOf(visit.head);
    if (head == HttpHead::kTooLong) {
      return Answer(visit, HttpError(431, absl::StrCat("more than ", kHttpHeadBytesMax,
                                                       " bytes of headers")));
    }
    if (head == HttpHead::kNone) {
      return Answer(visit, HttpError(400, "this is no HTTP"));
    }
    const std::string_view text = visit.head;
    const absl::StatusOr<HttpRequest> request =
        ParseHttpRequest(text.substr(0, text.find(kHttpHeadEnd) + kHttpHeadEnd.size()));
    if (!request.ok()) {
      return Answer(visit, HttpError(400, Message(request.status())));
    }
    visit.head_only = request->method == "HEAD";
    if (const std::optional<HttpAnswer> answer = site.Answer(*request)) {
      return Answer(visit, *answer);
    }
    visit.phase = Phase::kWaits;
    visit.until = Now() + options.answer_max;
    if (!making) {
      making = true;
      MutexLock lock(mutex);
      wanted = true;
      work.NotifyOne();
    }
  }

  void Answer(Visit& visit, const HttpAnswer& answer) {
    visit.answer = answer.Bytes(visit.head_only);
    visit.phase = Phase::kTakes;
    visit.until = Now() + options.answer_max;
  }

  void Deliver(const absl::StatusOr<std::string>& made) {
    making = false;
    const HttpAnswer answer = StatusSite::AnswerOfReport(made);
    std::vector<Number> answered;
    for (auto& [number, visit] : visits) {
      if (visit.phase == Phase::kWaits) {
        Answer(visit, answer);
        answered.push_back(number);
      }
    }
    for (const Number number : answered) {
      Go(number);
    }
  }

  using Visits = std::map<Number, Visit>;
  Visits::iterator End(Visits::iterator it) {
    reactor->Unwatch(it->second.connection->socket());
    return visits.erase(it);
  }

  template <typename Alike>
  void KeepAtMost(size_t most, Alike alike) {
    const auto is_one = [&](const auto& one) { return alike(one.second); };
    if (static_cast<size_t>(std::count_if(visits.begin(), visits.end(), is_one)) > most) {
      End(std::find_if(visits.begin(), visits.end(), is_one));
    }
  }

  void CutOffTheSlow() {
    const MonotonicTime now = Now();
    for (auto it = visits.begin(); it != visits.end();) {
      it = it->second.until <= now ? End(it) : std::next(it);
    }
    ArmTimer();
  }

  void ArmTimer() {
    const auto first = std::min_element(
        visits.begin(), visits.end(),
        [](const auto& a, const auto& b) { return a.second.until < b.second.until; });
    if (first == visits.end()) {
      reactor->Disarm(timer);
    } else {
      reactor->Arm(timer, first->second.until);
    }
  }

  static void LogFailed(const absl::Status& status) {
    LogFrom(LogLevel::kDebug, "status page",
            absl::StrCat("a connection to the status page failed: ", Message(status)));
  }

  // ---- The thread that makes the report ----

  void MakeReports() {
    for (;;) {
      {
        MutexLock lock(mutex);
        while (!wanted && !stopping) {
          work.Wait(mutex);
        }
        if (stopping) {
          return;
        }
        wanted = false;
      }
      reactor->Post([this, made = report.Get()] { Deliver(made); });
    }
  }

  const Options options;
  const StatusSite site;
  OnceAWhile report;
  const std::unique_ptr<Reactor> reactor;
  const Reactor::TimerId timer;
  std::unique_ptr<StatusTls> tls;
  std::unique_ptr<TcpDoor> door;
  int port = 0;
  Visits visits;
  Number next = 1;
  bool making = false;
  Mutex mutex;
  CondVar work;
  bool wanted GUARDED_BY(mutex) = false;
  bool stopping GUARDED_BY(mutex) = false;
  std::thread serving;
  std::thread reporting;
};

absl::StatusOr<std::unique_ptr<StatusPage>> StatusPage::Start(Options options) {
  HF_RETURN_IF_ERROR(CheckThreads(2));
  HF_ASSIGN_OR_RETURN(std::unique_ptr<Reactor> reactor, Reactor::Create(Clock::System()));
  auto impl = std::make_unique<Impl>(std::move(options), std::move(reactor));
  HF_RETURN_IF_ERROR(impl->Begin());
  impl->serving = std::thread([i = impl.get()] {
    ::pthread_setname_np(::pthread_self(), "status-page");
    i->reactor->Run();
  });
  impl->reporting = std::thread([i = impl.get()] {
    ::pthread_setname_np(::pthread_self(), "status-report");
    i->MakeReports();
  });
  return std::unique_ptr<StatusPage>(new StatusPage(std::move(impl)));
}

StatusPage::StatusPage(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

StatusPage::~StatusPage() {
  impl_->reactor->Stop();
  {
    MutexLock lock(impl_->mutex);
    impl_->stopping = true;
    impl_->work.NotifyOne();
  }
  impl_->serving.join();
  impl_->reporting.join();
  impl_->door = nullptr;
}

int StatusPage::port() const {
  return impl_->port;
}

}  // namespace holdfast
