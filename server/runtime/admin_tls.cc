#include "server/runtime/admin_tls.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/program.h"
#include "base/status.h"
#include "base/tcp_socket.h"
#include "base/tls.h"
#include "base/tls_relay.h"
#include "server/runtime/admin_server.h"
#include "server/runtime/admin_service.h"
#include "server/runtime/http2_farewell.h"
#include "server/runtime/reactor.h"
#include "server/runtime/unix_socket.h"

namespace holdfast {
namespace {

constexpr int kTlsBacklog = 64;
constexpr int kDeadPeerMs = 30'000;  // what was sent, and nobody has acknowledged
constexpr char kLogSource[] = "admin connections by TLS";
constexpr uint32_t kEdge = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;

void SetOptions(int fd) {
  const int yes = 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));
  ::setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &yes, sizeof(yes));
  ::setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &kDeadPeerMs, sizeof(kDeadPeerMs));
}

void LogRefused(const std::string& from, const std::string& why) {
  LogFrom(LogLevel::kWarning, kLogSource,
          absl::StrCat("admin connection turned away: ", from, ": ", why));
}

}  // namespace

std::vector<AdminTlsUser> AdminTlsUsers(const v1::AdminTlsConfig& config) {
  std::vector<AdminTlsUser> users;
  for (const v1::AdminTlsUser& user : config.users()) {
    users.push_back({user.certificate(), user.uid()});
  }
  return users;
}

absl::StatusOr<AdminTlsUser> UserOfCertificate(const std::vector<CertificateName>& names,
                                               const std::vector<AdminTlsUser>& users) {
  std::optional<AdminTlsUser> found;
  for (const AdminTlsUser& user : users) {
    const bool named = std::any_of(names.begin(), names.end(), [&](const CertificateName& name) {
      return name.kind != CertificateName::Kind::kAddress && name.text == user.certificate;
    });
    if (named && found && found->uid != user.uid) {
      return absl::PermissionDeniedError(
          absl::StrCat("the certificate of ", NamesText(names), " stands for uid ", found->uid,
                       " ('", found->certificate, "') and for uid ", user.uid, " ('",
                       user.certificate, "'): let admin.tls.users of ckptd name one of them"));
    }
    if (named && !found) {
      found = user;
    }
  }
  if (!found) {
    return absl::PermissionDeniedError(absl::StrCat(
        "nobody has said for whom the certificate of ", NamesText(names),
        " stands: add {certificate: NAME, uid: UID}, with one of these names, to admin.tls.users "
        "in ckptd's settings, and reload them"));
  }
  return *found;
}

struct AdminTls::Impl {
  Impl(Options given, std::unique_ptr<Reactor> loop)
      : options(std::move(given)),
        reactor(std::move(loop)),
        users(options.users),
        accept_timer(reactor->AddTimer([this] { reactor->Change(listening.get(), EPOLLIN); })),
        sweep_timer(reactor->AddTimer([this] { Sweep(); })),
        look_timer(reactor->AddTimer([this] { LookAgain(); })) {}

  using Number = uint64_t;  // increasing: the first has been there longest
  struct Handshake {
    UniqueFd fd;
    std::unique_ptr<TlsSession> session;
    std::string from;
    MonotonicTime until;
  };
  struct Connection {
    std::unique_ptr<TlsRelay> relay;
    std::optional<AdminTlsUser> user;  // none: it is only told why it is not let in
    std::vector<CertificateName> names;
    std::string from;
    int plain = -1;            // as it is watched
    int64_t until_unix_s = 0;  // its certificate's end
    uint64_t sent = 0;
    MonotonicTime sent_at;
    std::optional<MonotonicTime> parting_since;
  };

  // ---- Files ----

  int64_t NowUnixS() const { return reactor->clock().UnixMillis() / 1000; }

  // Takes what is there if it is good; why not.
  absl::Status Look() {
    HF_ASSIGN_OR_RETURN(TlsTexts read, ReadTlsFiles(*options.env, options.files));
    if (context != nullptr && read == texts) {
      return CheckTlsTexts(texts, options.files, NowUnixS());
    }
    const absl::Status fits = CheckTlsTexts(read, options.files, NowUnixS());
    // One that is not valid now is better than none, and not better than the one before.
    if (!fits.ok() && !(absl::IsFailedPrecondition(fits) && context == nullptr)) {
      return fits;
    }
    HF_ASSIGN_OR_RETURN(auto made, TlsContext::ForServer(read, "h2"));
    const bool rotated = context != nullptr;
    const bool other_authority = rotated && read.ca != texts.ca;
    context = std::move(made);
    texts = std::move(read);
    if (rotated) {
      LogInfo("admin.tls: the files have changed, and count from now on");
    }
    if (other_authority) {
      EndIf("the authority of certificates has changed", [](const Connection&) { return true; });
      while (!handshakes.empty()) {
        Leave(handshakes.begin());
      }
    }
    return fits;
  }

  // Whoever replaces three files is seen in the middle of it, now and then: what is wrong with them
  // twice in a row is wrong.
  void LookAgain() {
    const absl::Status status = Look();
    const std::string now = status.ok() ? "" : TlsProblem(status);
    if (now == seen) {
      SetProblem(now);
    }
    seen = now;
    reactor->Arm(look_timer, reactor->clock().Now() + options.times.look);
  }

  std::string TlsProblem(const absl::Status& status) const {
    return absl::StrCat("admin.tls: ", Message(status),
                        context == nullptr ? "; nobody is let in by TLS until it is mended"
                                           : "; the certificates of before go on");
  }

  void SetProblem(const std::string& now) {
    {
      MutexLock lock(mutex);
      if (problem == now) {
        return;
      }
      problem = now;
    }
    options.problem_changed(now);
  }

  // ---- Who comes ----

  void Accept() {
    UniqueFd fd(::accept4(listening.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!fd.valid()) {
      if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
        reactor->Change(listening.get(), 0);
        reactor->Arm(accept_timer, reactor->clock().Now() + kAcceptPause);
      }
      return;
    }
    std::string from = RemoteAddress(fd.get());
    if (context == nullptr) {
      return LogRefused(from, "there are no certificates to show (admin.tls)");
    }
    SetOptions(fd.get());
    absl::StatusOr<std::unique_ptr<TlsSession>> session = TlsSession::Create(context, fd.get(), "");
    const Number number = next++;
    const absl::Status watched =
        session.ok() ? reactor->Watch(fd.get(), kEdge, [this, number](uint32_t) { Shake(number); })
                     : session.status();
    if (!watched.ok()) {
      return LogRefused(from, Message(watched));
    }
    handshakes.emplace(number, Handshake{std::move(fd), *std::move(session), std::move(from),
                                         reactor->clock().Now() + options.times.handshake});
    if (handshakes.size() > kHandshakesMax) {
      // Whoever is in earnest is done soon.
      const Handshake slowest = Leave(handshakes.begin());
      LogRefused(slowest.from, "too many handshakes that do not end");
    }
    ArmSweep();
    Shake(number);
  }

  Handshake Leave(std::map<Number, Handshake>::iterator it) {
    Handshake one = std::move(it->second);
    handshakes.erase(it);
    reactor->Unwatch(one.fd.get());
    return one;
  }

  void Shake(Number number) {
    const auto found = handshakes.find(number);
    if (found == handshakes.end()) {
      return;
    }
    const absl::StatusOr<TlsStep> step = found->second.session->Handshake();
    if (!step.ok()) {
      const Handshake failed = Leave(found);
      return LogRefused(failed.from, Message(step.status()));
    }
    if (step->kind == TlsStep::Kind::kEnded) {
      Leave(found);
    } else if (step->kind == TlsStep::Kind::kDone) {
      Admit(number, Leave(found));
    }
  }

  absl::StatusOr<AdminTlsUser> MayComeIn(const std::vector<CertificateName>& names) const {
    HF_ASSIGN_OR_RETURN(AdminTlsUser user, UserOfCertificate(names, users));
    const size_t of_certificate = Count(
        [&](const Connection& c) { return c.user && c.user->certificate == user.certificate; });
    if (of_certificate >= AdminServer::kConnectionsPerUidMax) {
      return absl::ResourceExhaustedError(absl::StrCat("certificate '", user.certificate, "' has ",
                                                       AdminServer::kConnectionsPerUidMax,
                                                       " connections to the admin address"));
    }
    const bool is_operator = IsOperator(user.uid);
    const size_t places = is_operator ? kOperatorConnectionsMax : kConnectionsMax;
    const size_t alike = Count(
        [&](const Connection& c) { return c.user && IsOperator(c.user->uid) == is_operator; });
    if (alike >= places) {
      return absl::ResourceExhaustedError(absl::StrCat(is_operator ? "operators" : "users",
                                                       " have ", places,
                                                       " connections to the admin address"));
    }
    return user;
  }

  // With a socket of which gRPC gets the other end; or, to be told why not, one in which that lies
  // ready.
  void Admit(Number number, Handshake done) {
    int ends[2] = {-1, -1};
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) != 0) {
      return LogRefused(done.from, Message(ErrnoStatus(errno, "socketpair", "admin.tls")));
    }
    UniqueFd ours(ends[0]);
    UniqueFd theirs(ends[1]);
    Connection connection;
    const CertificateFacts facts = done.session->peer();
    connection.names = facts.names;
    connection.until_unix_s = facts.until_unix_s;
    connection.from = done.from;
    connection.plain = ours.get();
    connection.sent_at = reactor->clock().Now();
    const int socket = done.fd.get();
    connection.relay =
        std::make_unique<TlsRelay>(std::move(done.fd), std::move(done.session), std::move(ours));
    const auto carry = [this, number](uint32_t) { Carry(number); };
    absl::Status watched = reactor->Watch(socket, kEdge, carry);
    if (watched.ok()) {
      watched = reactor->Watch(connection.plain, kEdge, carry);
      if (!watched.ok()) {
        reactor->Unwatch(socket);
      }
    }
    if (!watched.ok()) {
      return LogRefused(connection.from, Message(watched));
    }
    const absl::StatusOr<AdminTlsUser> user = MayComeIn(connection.names);
    if (user.ok()) {
      connection.user = *user;
      LogFrom(LogLevel::kDebug, kLogSource,
              absl::StrCat("admin connection of ", connection.from, ": certificate '",
                           user->certificate, "', uid ", user->uid));
      options.welcome(std::move(theirs), *user);
    } else {
      LogRefused(connection.from, Message(user.status()));
      const std::string farewell = Http2Farewell(Message(user.status()));
      static_cast<void>(::send(theirs.get(), farewell.data(), farewell.size(), MSG_NOSIGNAL));
      theirs.reset();
      MakeRoomForOneTurnedAway();
    }
    connections.emplace(number, std::move(connection));
    Carry(number);
  }

  // They hear it at once, or not at all.
  void MakeRoomForOneTurnedAway() {
    const auto is_turned_away = [](const Connection& c) { return !c.user; };
    if (Count(is_turned_away) >= kTurnedAwayMax) {
      End(std::find_if(connections.begin(), connections.end(),
                       [&](const auto& one) { return is_turned_away(one.second); }),
          "others are told why they are not let in");
    }
  }

  // ---- What is carried ----

  void Carry(Number number) {
    const auto found = connections.find(number);
    if (found == connections.end()) {
      return;
    }
    Connection& connection = found->second;
    TlsRelay& relay = *connection.relay;
    // (Its number is another's as soon as it is closed: it is watched no longer than that.)
    const TlsRelay::Outcome outcome = relay.Step();
    if (connection.plain >= 0 && relay.plain() < 0) {
      reactor->Unwatch(std::exchange(connection.plain, -1));
    }
    if (outcome == TlsRelay::Outcome::kEnded) {
      return End(found, relay.status().ok() ? "" : Message(relay.status()));
    }
    if (outcome == TlsRelay::Outcome::kMore) {
      reactor->Post([this, number] { Carry(number); });  // others have their turn
    }
  }

  void End(std::map<Number, Connection>::iterator it, const std::string& why) {
    const Connection& connection = it->second;
    if (!why.empty()) {
      LogFrom(LogLevel::kDebug, kLogSource,
              absl::StrCat("admin connection of ", connection.from, " ended: ", why));
    }
    if (connection.plain >= 0) {
      reactor->Unwatch(connection.plain);
    }
    reactor->Unwatch(connection.relay->socket());
    connections.erase(it);
  }

  template <typename Matches>
  size_t Count(Matches matches) const {
    return static_cast<size_t>(std::count_if(connections.begin(), connections.end(),
                                             [&](const auto& one) { return matches(one.second); }));
  }

  template <typename Matches>
  void EndIf(const std::string& why, Matches matches) {
    for (auto it = connections.begin(); it != connections.end();) {
      const auto one = it++;
      if (matches(one->second)) {
        End(one, why);
      }
    }
  }

  void TakeUsers(std::vector<AdminTlsUser> wanted) {
    users = std::move(wanted);
    EndIf("what its certificate stands for has changed", [this](const Connection& connection) {
      if (!connection.user) {
        return false;
      }
      const absl::StatusOr<AdminTlsUser> now = UserOfCertificate(connection.names, users);
      return !now.ok() || !(*now == *connection.user);
    });
  }

  // ---- Deadlines ----

  void ArmSweep() {
    if (!sweeping) {
      sweeping = true;
      reactor->Arm(sweep_timer, reactor->clock().Now() + options.times.sweep);
    }
  }

  void Sweep() {
    const MonotonicTime now = reactor->clock().Now();
    while (!handshakes.empty() && handshakes.begin()->second.until <= now) {
      const Handshake slow = Leave(handshakes.begin());
      LogRefused(slow.from, "its handshake did not end in time");
    }
    for (auto& [number, connection] : connections) {
      const TlsRelay& relay = *connection.relay;
      if (relay.sent() != connection.sent || !relay.owes()) {
        connection.sent = relay.sent();
        connection.sent_at = now;
      }
      if (relay.parting() && !connection.parting_since) {
        connection.parting_since = now;
      }
    }
    EndIf("it does not take its answers", [&](const Connection& connection) {
      return connection.sent_at + options.times.stalled <= now;
    });
    EndIf("its certificate has expired", [unix_s = NowUnixS()](const Connection& connection) {
      return connection.until_unix_s < unix_s;
    });
    EndIf("it does not go", [&](const Connection& connection) {
      return connection.parting_since && *connection.parting_since + options.times.parting <= now;
    });
    sweeping = false;
    if (!handshakes.empty() || !connections.empty()) {
      ArmSweep();
    }
  }

  const Options options;
  const std::unique_ptr<Reactor> reactor;
  UniqueFd listening;
  int port = 0;
  std::vector<AdminTlsUser> users;
  TlsTexts texts;
  std::shared_ptr<const TlsContext> context;  // null: there were no good files yet
  std::string seen;                           // what was wrong at the last look
  const Reactor::TimerId accept_timer;
  const Reactor::TimerId sweep_timer;
  const Reactor::TimerId look_timer;
  bool sweeping = false;
  Number next = 1;
  std::map<Number, Handshake> handshakes;
  std::map<Number, Connection> connections;
  mutable Mutex mutex;
  std::string problem GUARDED_BY(mutex);
  std::thread thread;
};

absl::StatusOr<std::unique_ptr<AdminTls>> AdminTls::Start(Options options) {
  HF_RETURN_IF_ERROR(CheckThreads(1));
  HF_ASSIGN_OR_RETURN(std::unique_ptr<Reactor> reactor, Reactor::Create(Clock::System()));
  auto impl = std::make_unique<Impl>(std::move(options), std::move(reactor));
  absl::StatusOr<UniqueFd> listening = ListenTcp(impl->options.address, kTlsBacklog);
  if (!listening.ok()) {
    return absl::UnavailableError(absl::StrCat(
        "no admin service on '", impl->options.address, "' (admin.tls.address): ",
        Message(listening.status()), "; is the port taken? (port 0 picks a free one)"));
  }
  impl->listening = *std::move(listening);
  impl->port = LocalPort(impl->listening.get());
  if (const absl::Status status = impl->Look(); !status.ok()) {
    impl->seen = impl->TlsProblem(status);
    impl->SetProblem(impl->seen);
  }
  HF_RETURN_IF_ERROR(impl->reactor->Watch(impl->listening.get(), EPOLLIN,
                                          [i = impl.get()](uint32_t) { i->Accept(); }));
  impl->reactor->Arm(impl->look_timer, impl->reactor->clock().Now() + impl->options.times.look);
  impl->thread = std::thread([i = impl.get()] { i->reactor->Run(); });
  return std::unique_ptr<AdminTls>(new AdminTls(std::move(impl)));
}

AdminTls::AdminTls(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

AdminTls::~AdminTls() {
  impl_->reactor->Stop();
  impl_->thread.join();
}

int AdminTls::port() const {
  return impl_->port;
}

std::string AdminTls::problem() const {
  MutexLock lock(impl_->mutex);
  return impl_->problem;
}

void AdminTls::Change(std::vector<AdminTlsUser> users) {
  impl_->reactor->Post(
      [i = impl_.get(), users = std::move(users)]() mutable { i->TakeUsers(std::move(users)); });
}

}  // namespace holdfast
