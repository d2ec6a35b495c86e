#include "server/runtime/status_page/status_page.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <deque>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/program.h"
#include "base/status.h"
#include "base/tcp_socket.h"
#include "server/runtime/status_page/http_answer.h"
#include "server/runtime/status_page/http_request.h"
#include "server/runtime/status_page/once_a_while.h"

namespace holdfast {
namespace {

constexpr int kBacklog = 16;
constexpr std::chrono::milliseconds kAcceptPauseMs(100);  // where there was no descriptor for one
// What a browser still sends is read, so that the answer is not lost with it: so much, so long.
constexpr size_t kRestBytesMax = 64 << 10;
constexpr Duration kRestMax = std::chrono::seconds(1);

absl::StatusOr<UniqueFd> Listen(const std::string& address) {
  absl::StatusOr<UniqueFd> fd = ListenTcp(address, kBacklog);
  if (!fd.ok()) {
    return absl::UnavailableError(absl::StrCat("no status page on '", address,
                                               "' (status_page.address): ", Message(fd.status()),
                                               "; is the port taken? (port 0 picks a free one)"));
  }
  return fd;
}

}  // namespace

struct StatusPage::Impl {
  explicit Impl(Options given)
      : options(std::move(given)),
        report(options.report_at_least, options.report),
        site({.loopback_only = !options.tls, .report = [this] { return report.Get(); }}) {}

  struct Waiting {
    UniqueFd fd;
    MonotonicTime until;  // its request is to be there
  };

  // ---- The thread that accepts ----

  void AcceptAll() {
    std::array<pollfd, 2> ready = {{{listening.get(), POLLIN, 0}, {stop.get(), POLLIN, 0}}};
    for (;;) {
      if (::poll(ready.data(), ready.size(), -1) < 0 && errno != EINTR) {
        return LogWarning(Message(ErrnoStatus(errno, "poll", "the status page's socket")));
      }
      if ((ready[1].revents & POLLIN) != 0) {
        return;
      }
      if (!AcceptOne()) {
        ::poll(&ready[1], 1, static_cast<int>(kAcceptPauseMs.count()));
      }
    }
  }

  // False: there is nothing to accept one with.
  bool AcceptOne() {
    UniqueFd fd(::accept4(listening.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!fd.valid()) {
      return errno != EMFILE && errno != ENFILE && errno != ENOMEM && errno != ENOBUFS;
    }
    {
      MutexLock lock(mutex);
      if (waiting.size() < kWaitingMax) {
        waiting.push_back({std::move(fd), Clock::System()->Now() + options.request_max});
        work.NotifyOne();
        return true;
      }
    }
    LogFrom(LogLevel::kWarning, "status page",
            "a browser was turned away from the status page: too many connections");
    if (tls == nullptr) {  // best effort
      const std::string busy = HttpError(503, "too many connections; try again").Bytes(false);
      static_cast<void>(::send(fd.get(), busy.data(), busy.size(), MSG_DONTWAIT | MSG_NOSIGNAL));
    }
    return true;
  }

  // ---- Those that answer ----

  void Work() {
    for (;;) {
      Waiting next;
      {
        MutexLock lock(mutex);
        while (waiting.empty() && !stopping) {
          work.Wait(mutex);
        }
        if (stopping) {
          return;
        }
        next = std::move(waiting.front());
        waiting.pop_front();
      }
      Serve(std::move(next));
    }
  }

  void Serve(Waiting one) {
    // By a second descriptor: the first one's number is another's as soon as it is closed.
    const UniqueFd held(::fcntl(one.fd.get(), F_DUPFD_CLOEXEC, 0));
    if (!held.valid()) {
      return;
    }
    {
      MutexLock lock(mutex);
      if (stopping) {
        return;
      }
      serving.insert(held.get());
    }
    const absl::Status status = Talk(std::move(one));
    if (!status.ok()) {
      LogFrom(LogLevel::kDebug, "status page",
              absl::StrCat("a connection to the status page failed: ", Message(status)));
    }
    MutexLock lock(mutex);
    serving.erase(held.get());
  }

  absl::Status Talk(Waiting one) {
    std::unique_ptr<StatusConnection> connection;
    if (tls == nullptr) {
      connection = PlainConnection(std::move(one.fd));
    } else {
      HF_ASSIGN_OR_RETURN(connection, tls->Accept(std::move(one.fd), one.until));
    }
    bool head_only = false;
    const HttpAnswer answer = AnswerOf(*connection, one.until, head_only);
    const MonotonicTime until = Clock::System()->Now() + options.answer_max;
    HF_RETURN_IF_ERROR(connection->Write(answer.Bytes(head_only), until));
    connection->End(until);
    return ReadRest(*connection);
  }

  HttpAnswer AnswerOf(StatusConnection& connection, MonotonicTime until, bool& head_only) const {
    std::string head;
    std::array<char, 2048> buffer;
    while (head.find(kHttpHeadEnd) == std::string::npos) {
      if (head.size() > kHttpHeadBytesMax) {
        return HttpError(431, absl::StrCat("more than ", kHttpHeadBytesMax, " bytes of headers"));
      }
      const absl::StatusOr<size_t> size = connection.Read(buffer, until);
      if (!size.ok()) {
        return HttpError(408, Message(size.status()));
      }
      if (*size == 0) {
        return HttpError(400, "the request has no end");
      }
      head.append(buffer.data(), *size);
    }
    head.resize(head.find(kHttpHeadEnd) + kHttpHeadEnd.size());
    const absl::StatusOr<HttpRequest> request = ParseHttpRequest(head);
    if (!request.ok()) {
      return HttpError(400, Message(request.status()));
    }
    head_only = request->method == "HEAD";
    return site.Answer(*request);
  }

  static absl::Status ReadRest(StatusConnection& connection) {
    const MonotonicTime until = Clock::System()->Now() + kRestMax;
    std::array<char, 2048> buffer;
    for (size_t read = 0; read < kRestBytesMax;) {
      HF_ASSIGN_OR_RETURN(const size_t size, connection.Read(buffer, until));
      if (size == 0) {
        break;
      }
      read += size;
    }
    return absl::OkStatus();
  }

  absl::Status Begin() {
    HF_ASSIGN_OR_RETURN(listening, Listen(options.address));
    port = LocalPort(listening.get());
    stop = UniqueFd(::eventfd(0, EFD_CLOEXEC));
    if (!stop.valid()) {
      return ErrnoStatus(errno, "eventfd", "the status page");
    }
    if (options.tls) {
      absl::StatusOr<std::unique_ptr<StatusTls>> opened = StatusTls::Open(*options.tls);
      if (!opened.ok()) {
        return Annotate(opened.status(), "no status page: status_page.tls");
      }
      tls = *std::move(opened);
    }
    HF_RETURN_IF_ERROR(CheckThreads(kThreads + 1));
    threads.emplace_back([this] { AcceptAll(); });
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([this] { Work(); });
    }
    return absl::OkStatus();
  }

  void Stop() {
    const uint64_t one = 1;
    static_cast<void>(!::write(stop.get(), &one, sizeof(one)));
    {
      MutexLock lock(mutex);
      stopping = true;
      for (const int fd : serving) {
        ::shutdown(fd, SHUT_RDWR);
      }
      work.NotifyAll();
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
  }

  const Options options;
  OnceAWhile report;
  const StatusSite site;
  std::unique_ptr<StatusTls> tls;
  UniqueFd listening;
  UniqueFd stop;
  int port = 0;
  Mutex mutex;
  CondVar work;
  std::deque<Waiting> waiting GUARDED_BY(mutex);
  std::set<int> serving GUARDED_BY(mutex);  // descriptors that are shut down to end at once
  bool stopping GUARDED_BY(mutex) = false;
  std::vector<std::thread> threads;
};

absl::StatusOr<std::unique_ptr<StatusPage>> StatusPage::Start(Options options) {
  auto impl = std::make_unique<Impl>(std::move(options));
  HF_RETURN_IF_ERROR(impl->Begin());
  return std::unique_ptr<StatusPage>(new StatusPage(std::move(impl)));
}

StatusPage::StatusPage(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

StatusPage::~StatusPage() {
  impl_->Stop();
}

int StatusPage::port() const {
  return impl_->port;
}

}  // namespace holdfast
