#include "server/runtime/admin_server.h"

#include <fcntl.h>
#include <grpc/support/log.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/impl/service_type.h>
#include <grpcpp/server_posix.h>
#include <grpcpp/support/server_interceptor.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/program.h"
#include "base/status.h"
#include "base/unique_fd.h"
#include "server/runtime/fabric_service.h"
#include "server/runtime/http2_farewell.h"
#include "server/runtime/reactor.h"
#include "server/runtime/unix_socket.h"

namespace holdfast {
namespace {

constexpr int kRequestBytesMax = 64 << 10;
constexpr int kThreadsPerUidMax = 12;  // some of them with who follows events
// What gRPC cannot do without when a server starts, and a few for its calls.
constexpr int kThreadsPerServer = 4;
constexpr uint32_t kNoGroup = 65534;
constexpr size_t kMemoryPerUidBytes = 32u << 20;
constexpr int kStreamsPerConnectionMax = 16;
constexpr std::chrono::seconds kShutdownGrace{2};

// RFC 9113: what a client sends first.
constexpr std::string_view kGreeting = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

// The calls of one user under way, and when the last one ended.
struct Calls {
  std::atomic<int> running{0};
  std::atomic<int64_t> ended_at_ns{Clock::System()->Now().ns};
};

class CallCounter final : public grpc::experimental::Interceptor {
 public:
  explicit CallCounter(std::shared_ptr<Calls> calls) : calls_(std::move(calls)) {
    ++calls_->running;
  }
  ~CallCounter() override {
    calls_->ended_at_ns = Clock::System()->Now().ns;
    --calls_->running;
  }
  CallCounter(const CallCounter&) = delete;
  CallCounter& operator=(const CallCounter&) = delete;
  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
    methods->Proceed();
  }

 private:
  const std::shared_ptr<Calls> calls_;
};

class CallCounterFactory final : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  explicit CallCounterFactory(std::shared_ptr<Calls> calls) : calls_(std::move(calls)) {}
  grpc::experimental::Interceptor* CreateServerInterceptor(
      grpc::experimental::ServerRpcInfo*) override {
    return new CallCounter(calls_);
  }

 private:
  const std::shared_ptr<Calls> calls_;
};

struct UidServer {
  std::unique_ptr<grpc::Service> service;  // these outlive the server
  std::unique_ptr<grpc::Service> fabric;
  std::unique_ptr<grpc::Server> server;
  std::shared_ptr<Calls> calls = std::make_shared<Calls>();
  std::map<int, UniqueFd> connections;  // a second descriptor of each, by its number
  uint64_t last_used = 0;
};

// Who asks: a user of this node, or one whom a certificate stands for. Those are told apart by it,
// whatever their uid: so the audit knows it.
struct Identity {
  uint32_t uid = 0;
  std::string certificate;  // empty: at the socket
  auto operator<=>(const Identity&) const = default;

  bool is_local() const { return certificate.empty(); }
  std::string Text() const {
    return is_local() ? absl::StrCat("uid ", uid)
                      : absl::StrCat("uid ", uid, " (certificate '", certificate, "')");
  }
};

absl::StatusOr<UidServer> BuildServer(AdminContext& context, const Caller& caller,
                                      const Identity& identity, Duration idle) {
  // gRPC aborts when it cannot have a thread.
  HF_RETURN_IF_ERROR(CheckThreads(kThreadsPerServer));
  UidServer built;
  built.service = MakeAdminService(context, caller, identity.Text());
  built.fabric = MakeFabricService(context, caller);
  grpc::ServerBuilder builder;
  builder.RegisterService(built.service.get());
  builder.RegisterService(built.fabric.get());
  grpc::ResourceQuota quota(absl::StrCat("admin-", identity.Text()));
  quota.SetMaxThreads(kThreadsPerUidMax);
  quota.Resize(kMemoryPerUidBytes);
  builder.SetResourceQuota(quota);
  builder.SetMaxReceiveMessageSize(kRequestBytesMax);
  builder.SetSyncServerOption(grpc::ServerBuilder::SyncServerOption::NUM_CQS, 1);
  builder.SetSyncServerOption(grpc::ServerBuilder::SyncServerOption::MIN_POLLERS, 1);
  builder.SetSyncServerOption(grpc::ServerBuilder::SyncServerOption::MAX_POLLERS, 2);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kStreamsPerConnectionMax);
  builder.AddChannelArgument(
      GRPC_ARG_MAX_CONNECTION_IDLE_MS,
      static_cast<int>(std::chrono::duration_cast<std::chrono::milliseconds>(idle).count()));
  std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>> interceptors;
  interceptors.push_back(std::make_unique<CallCounterFactory>(built.calls));
  builder.experimental().SetInterceptorCreators(std::move(interceptors));
  built.server = builder.BuildAndStart();
  if (built.server == nullptr) {
    return absl::InternalError("gRPC could not start a server");
  }
  return built;
}

void ShutDown(UidServer& server, std::chrono::seconds grace) {
  server.server->Shutdown(std::chrono::system_clock::now() + grace);
  server.server->Wait();
}

// Who takes places from each other: users of this node and those who come by the network do not,
// nor do users and operators. (Operators here all have theirs from the start.)
struct Row {
  bool local = false;
  bool operators = false;
  bool operator==(const Row&) const = default;

  size_t places() const {
    return operators && !local ? AdminServer::kOperatorsByTlsMax : AdminServer::kUidsMax;
  }
  std::string FullText() const {
    return absl::StrCat(operators ? "operators of " : "users of ", places(),
                        local ? " uids are connected to the admin socket"
                              : " certificates are connected to the admin address");
  }
};

Row RowOf(const Identity& identity) {
  return {identity.is_local(), IsOperator(identity.uid)};
}

// Best effort, as all of HTTP/2's farewells; closes the connection.
void TurnAway(UniqueFd fd, std::string_view why) {
  const std::string frames = Http2Farewell(why);
  static_cast<void>(::send(fd.get(), frames.data(), frames.size(), MSG_DONTWAIT | MSG_NOSIGNAL));
}

// gRPC's own lines: to stderr they would wait for whoever reads it.
void LogForGrpc(gpr_log_func_args* args) {
  LogFrom(args->severity == GPR_LOG_SEVERITY_ERROR ? LogLevel::kWarning : LogLevel::kDebug, "gRPC",
          absl::StrCat("gRPC: ", args->message));
}

}  // namespace

struct AdminServer::Impl {
  Impl(AdminContext& admin_context, const Times& limits, ListeningSocket socket,
       std::unique_ptr<Reactor> loop)
      : context(admin_context),
        times(limits),
        listening(std::move(socket)),
        reactor(std::move(loop)),
        accept_timer(reactor->AddTimer([this] { reactor->Change(listening.fd(), EPOLLIN); })),
        door_timer(reactor->AddTimer([this] { CloseTheSilent(); })) {}

  // ---- At the door ----

  struct Visitor {
    UniqueFd fd;
    Caller caller;
    std::string certificate;
    MonotonicTime until;

    Identity identity() const { return {caller.uid, certificate}; }
    std::string Text() const {
      return certificate.empty() ? absl::StrCat(caller.process.ToString(), " of uid ", caller.uid)
                                 : identity().Text();
    }
  };
  using Visit = uint64_t;  // increasing: the first has waited longest

  void Accept() {
    UniqueFd fd(::accept4(listening.fd(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!fd.valid()) {
      if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
        reactor->Change(listening.fd(), 0);
        reactor->Arm(accept_timer, reactor->clock().Now() + kAcceptPause);
      }
      return;
    }
    const absl::StatusOr<Peer> peer = IdentifyPeer(fd.get());
    if (!peer.ok()) {  // it is gone already
      return LogFrom(LogLevel::kDebug, "admin connections",
                     absl::StrCat("admin connection lost: ", Message(peer.status())));
    }
    Enter({std::move(fd), Caller{peer->process, peer->uid, peer->gid}, "", {}});
  }

  void Enter(Visitor visitor) {
    const Visit visit = next_visit++;
    // Edge-triggered: what lies there unread must not wake us again and again.
    const absl::Status watched = reactor->Watch(visitor.fd.get(), EPOLLIN | EPOLLRDHUP | EPOLLET,
                                                [this, visit](uint32_t) { Listen(visit); });
    if (!watched.ok()) {
      return Refuse(std::move(visitor), watched);
    }
    visitor.until = reactor->clock().Now() + times.greeting;
    door.emplace(visit, std::move(visitor));
    if (door.size() == 1) {
      reactor->Arm(door_timer, door.begin()->second.until);
    }
    if (door.size() > kAtTheDoorMax) {
      // Whoever is in earnest speaks at once: the one that has been silent longest leaves.
      Refuse(LeaveDoor(door.begin()), absl::ResourceExhaustedError("too many silent connections"));
    }
  }

  Visitor LeaveDoor(std::map<Visit, Visitor>::iterator it) {
    Visitor visitor = std::move(it->second);
    door.erase(it);
    reactor->Unwatch(visitor.fd.get());
    return visitor;
  }

  void Listen(Visit visit) {
    const auto found = door.find(visit);
    if (found == door.end()) {
      return;
    }
    std::array<char, kGreeting.size()> said = {};
    const ssize_t size =
        ::recv(found->second.fd.get(), said.data(), said.size(), MSG_PEEK | MSG_DONTWAIT);
    if (size < 0 && (errno == EAGAIN || errno == EINTR)) {
      return;
    }
    const std::string_view heard(said.data(), std::max<ssize_t>(size, 0));
    if (size <= 0 || heard != kGreeting.substr(0, heard.size())) {
      LeaveDoor(found);  // has gone, or speaks something else
      return;
    }
    if (heard.size() < kGreeting.size()) {
      return;
    }
    Visitor visitor = LeaveDoor(found);
    if (const absl::Status admitted = Admit(visitor); !admitted.ok()) {
      Refuse(std::move(visitor), admitted);
    }
  }

  void CloseTheSilent() {
    const MonotonicTime now = reactor->clock().Now();
    while (!door.empty() && door.begin()->second.until <= now) {
      const Visitor visitor = LeaveDoor(door.begin());
      LogFrom(LogLevel::kDebug, absl::StrCat("admin connections of uid ", visitor.caller.uid),
              absl::StrCat("admin connection closed: ", visitor.Text(), " said nothing"));
    }
    if (!door.empty()) {
      reactor->Arm(door_timer, door.begin()->second.until);
    }
  }

  static void Refuse(Visitor visitor, const absl::Status& why) {
    LogFrom(LogLevel::kWarning, absl::StrCat("admin connections of ", visitor.identity().Text()),
            absl::StrCat("admin connection turned away: ", visitor.Text(), ": ", Message(why)));
    TurnAway(std::move(visitor.fd), Message(why));
  }

  // ---- Inside ----

  absl::Status Admit(Visitor& visitor) {
    const Identity identity = visitor.identity();
    HF_ASSIGN_OR_RETURN(UidServer * server, ServerFor(visitor.caller, identity));
    if (server->connections.size() >= kConnectionsPerUidMax) {
      return absl::ResourceExhaustedError(
          absl::StrCat(identity.Text(), " has ", kConnectionsPerUidMax,
                       " connections to the admin ", identity.is_local() ? "socket" : "address"));
    }
    // gRPC owns the descriptor from now on; a second one tells us when the connection ends, whoever
    // ends it.
    UniqueFd watch(::fcntl(visitor.fd.get(), F_DUPFD_CLOEXEC, 0));
    if (!watch.valid()) {
      return ErrnoStatus(errno, "dup", "admin connection");
    }
    const int number = watch.get();
    HF_RETURN_IF_ERROR(reactor->Watch(
        number, EPOLLRDHUP, [this, number, identity](uint32_t) { Ended(number, identity); }));
    server->connections.emplace(number, std::move(watch));
    grpc::AddInsecureChannelFromFd(server->server.get(), visitor.fd.release());
    return absl::OkStatus();
  }

  absl::StatusOr<UidServer*> ServerFor(const Caller& caller, const Identity& identity) {
    auto found = servers.find(identity);
    if (found == servers.end()) {
      const Row row = RowOf(identity);
      const auto alike = std::count_if(servers.begin(), servers.end(),
                                       [&](const auto& one) { return RowOf(one.first) == row; });
      if (static_cast<size_t>(alike) >= row.places()) {
        HF_RETURN_IF_ERROR(MakeRoom(row));
      }
      HF_ASSIGN_OR_RETURN(UidServer built, BuildServer(context, caller, identity, times.idle));
      found = servers.emplace(identity, std::move(built)).first;
    }
    found->second.last_used = ++uses;
    return &found->second;
  }

  // Of the users who ask nothing, the one who came longest ago leaves.
  absl::Status MakeRoom(const Row& row) {
    const MonotonicTime now = reactor->clock().Now();
    auto oldest = servers.end();
    for (auto it = servers.begin(); it != servers.end(); ++it) {
      const UidServer& server = it->second;
      const MonotonicTime ended{server.calls->ended_at_ns};
      const bool quiet =
          server.calls->running == 0 && (server.connections.empty() || ended + times.quiet <= now);
      if (RowOf(it->first) == row && quiet &&
          (oldest == servers.end() || server.last_used < oldest->second.last_used)) {
        oldest = it;
      }
    }
    if (oldest == servers.end()) {
      return absl::ResourceExhaustedError(row.FullText());
    }
    for (const auto& [number, fd] : oldest->second.connections) {
      reactor->Unwatch(number);
    }
    ShutDown(oldest->second, std::chrono::seconds(0));
    servers.erase(oldest);
    return absl::OkStatus();
  }

  void Ended(int number, const Identity& identity) {
    reactor->Unwatch(number);
    servers.at(identity).connections.erase(number);
  }

  // With their threads, which may not be there to be had later.
  absl::Status AddOperators() {
    for (const uint32_t uid : {uint32_t{0}, static_cast<uint32_t>(::geteuid())}) {
      HF_RETURN_IF_ERROR(ServerFor(Caller{{}, uid, 0}, {uid, ""}).status());
    }
    return absl::OkStatus();
  }

  AdminContext& context;
  const Times times;
  ListeningSocket listening;
  std::unique_ptr<Reactor> reactor;
  const Reactor::TimerId accept_timer;
  const Reactor::TimerId door_timer;
  std::map<Visit, Visitor> door;
  Visit next_visit = 1;
  std::map<Identity, UidServer> servers;
  uint64_t uses = 0;
  std::thread thread;
};

absl::StatusOr<std::unique_ptr<AdminServer>> AdminServer::Start(const v1::AdminConfig& config,
                                                                AdminContext& context,
                                                                const Times& times) {
  static std::once_flag plugins;
  std::call_once(plugins, [] {
    gpr_set_log_function(LogForGrpc);
    grpc::EnableDefaultHealthCheckService(true);
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  });
  HF_ASSIGN_OR_RETURN(std::unique_ptr<Reactor> reactor, Reactor::Create(Clock::System()));
  // Answers are filtered by the caller's uid: everybody may ask.
  HF_ASSIGN_OR_RETURN(ListeningSocket socket, ListeningSocket::Open(config.path(), 0666));
  auto impl = std::make_unique<Impl>(context, times, std::move(socket), std::move(reactor));
  HF_RETURN_IF_ERROR(impl->AddOperators());
  HF_RETURN_IF_ERROR(impl->reactor->Watch(impl->listening.fd(), EPOLLIN,
                                          [i = impl.get()](uint32_t) { i->Accept(); }));
  impl->thread = std::thread([i = impl.get()] { i->reactor->Run(); });
  return std::unique_ptr<AdminServer>(new AdminServer(std::move(impl)));
}

AdminServer::AdminServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

void AdminServer::Welcome(UniqueFd fd, uint32_t uid, const std::string& certificate) {
  // (A certificate says nothing of groups, and no question depends on one.)
  auto visitor = std::make_shared<Impl::Visitor>(
      Impl::Visitor{std::move(fd), Caller{{}, uid, kNoGroup}, certificate, {}});
  impl_->reactor->Post([i = impl_.get(), visitor] { i->Enter(std::move(*visitor)); });
}

AdminServer::~AdminServer() {
  impl_->reactor->Stop();
  impl_->thread.join();
  impl_->listening.Close();
  for (auto& [identity, server] : impl_->servers) {
    ShutDown(server, kShutdownGrace);
  }
}

}  // namespace holdfast
