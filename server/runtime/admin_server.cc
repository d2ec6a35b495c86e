#include "server/runtime/admin_server.h"

#include <fcntl.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/impl/service_type.h>
#include <grpcpp/server_posix.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/status.h"
#include "base/unique_fd.h"
#include "server/runtime/reactor.h"
#include "server/runtime/unix_socket.h"

namespace holdfast {
namespace {

constexpr int kRequestBytesMax = 64 << 10;
constexpr int kThreadsPerUidMax = 8;
constexpr size_t kMemoryPerUidBytes = 32u << 20;
constexpr int kStreamsPerConnectionMax = 16;
constexpr int kIdleMs = 10 * 60 * 1000;
constexpr Duration kAcceptPause = std::chrono::milliseconds(100);
constexpr std::chrono::seconds kShutdownGrace{2};

struct UidServer {
  std::unique_ptr<grpc::Service> service;  // outlives the server
  std::unique_ptr<grpc::Server> server;
  size_t connections = 0;
  uint64_t last_used = 0;
};

absl::StatusOr<UidServer> BuildServer(AdminContext& context, const Caller& caller) {
  UidServer built;
  built.service = MakeAdminService(context, caller);
  grpc::ServerBuilder builder;
  builder.RegisterService(built.service.get());
  grpc::ResourceQuota quota(absl::StrCat("admin-uid-", caller.uid));
  quota.SetMaxThreads(kThreadsPerUidMax);
  quota.Resize(kMemoryPerUidBytes);
  builder.SetResourceQuota(quota);
  builder.SetMaxReceiveMessageSize(kRequestBytesMax);
  builder.SetSyncServerOption(grpc::ServerBuilder::SyncServerOption::NUM_CQS, 1);
  builder.SetSyncServerOption(grpc::ServerBuilder::SyncServerOption::MIN_POLLERS, 1);
  builder.SetSyncServerOption(grpc::ServerBuilder::SyncServerOption::MAX_POLLERS, 2);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kStreamsPerConnectionMax);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS, kIdleMs);
  built.server = builder.BuildAndStart();
  if (built.server == nullptr) {
    return absl::InternalError("gRPC could not start a server");
  }
  return built;
}

void ShutDown(UidServer& server) {
  server.server->Shutdown(std::chrono::system_clock::now() + kShutdownGrace);
  server.server->Wait();
}

}  // namespace

struct AdminServer::Impl {
  Impl(AdminContext& admin_context, ListeningSocket socket, std::unique_ptr<Reactor> loop)
      : context(admin_context),
        listening(std::move(socket)),
        reactor(std::move(loop)),
        accept_timer(reactor->AddTimer([this] { reactor->Change(listening.fd(), EPOLLIN); })) {}

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
    const absl::Status admitted =
        peer.ok() ? Admit(std::move(fd), Caller{peer->process, peer->uid, peer->gid})
                  : peer.status();
    if (!admitted.ok()) {
      LogWarning(absl::StrCat("admin connection turned away: ", Message(admitted)));
    }
  }

  absl::Status Admit(UniqueFd fd, const Caller& caller) {
    if (watched.size() >= kConnectionsMax) {
      return absl::ResourceExhaustedError(
          absl::StrCat(kConnectionsMax, " admin connections are open"));
    }
    HF_ASSIGN_OR_RETURN(UidServer * server, ServerFor(caller));
    if (server->connections >= kConnectionsPerUidMax) {
      return absl::ResourceExhaustedError(
          absl::StrCat("uid ", caller.uid, " has ", kConnectionsPerUidMax, " admin connections"));
    }
    // gRPC owns the descriptor from now on; a second one tells us when the connection ends, whoever
    // ends it.
    UniqueFd watch(::fcntl(fd.get(), F_DUPFD_CLOEXEC, 0));
    if (!watch.valid()) {
      return ErrnoStatus(errno, "dup", "admin connection");
    }
    const int number = watch.get();
    HF_RETURN_IF_ERROR(reactor->Watch(
        number, EPOLLRDHUP, [this, number, uid = caller.uid](uint32_t) { Ended(number, uid); }));
    watched.emplace(number, std::move(watch));
    ++server->connections;
    grpc::AddInsecureChannelFromFd(server->server.get(), fd.release());
    return absl::OkStatus();
  }

  absl::StatusOr<UidServer*> ServerFor(const Caller& caller) {
    auto found = servers.find(caller.uid);
    if (found == servers.end()) {
      if (servers.size() >= kUidsMax) {
        HF_RETURN_IF_ERROR(MakeRoom());
      }
      HF_ASSIGN_OR_RETURN(UidServer built, BuildServer(context, caller));
      found = servers.emplace(caller.uid, std::move(built)).first;
    }
    found->second.last_used = ++uses;
    return &found->second;
  }

  absl::Status MakeRoom() {
    auto oldest = servers.end();
    for (auto it = servers.begin(); it != servers.end(); ++it) {
      if (it->second.connections == 0 &&
          (oldest == servers.end() || it->second.last_used < oldest->second.last_used)) {
        oldest = it;
      }
    }
    if (oldest == servers.end()) {
      return absl::ResourceExhaustedError(
          absl::StrCat("users of ", kUidsMax, " uids are connected to the admin socket"));
    }
    ShutDown(oldest->second);
    servers.erase(oldest);
    return absl::OkStatus();
  }

  void Ended(int number, uint32_t uid) {
    reactor->Unwatch(number);
    watched.erase(number);
    --servers.at(uid).connections;
  }

  AdminContext& context;
  ListeningSocket listening;
  std::unique_ptr<Reactor> reactor;
  const Reactor::TimerId accept_timer;
  std::map<int, UniqueFd> watched;
  std::map<uint32_t, UidServer> servers;
  uint64_t uses = 0;
  std::thread thread;
};

absl::StatusOr<std::unique_ptr<AdminServer>> AdminServer::Start(const v1::AdminConfig& config,
                                                                AdminContext& context) {
  static std::once_flag plugins;
  std::call_once(plugins, [] {
    grpc::EnableDefaultHealthCheckService(true);
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  });
  HF_ASSIGN_OR_RETURN(std::unique_ptr<Reactor> reactor, Reactor::Create(Clock::System()));
  // Answers are filtered by the caller's uid: everybody may ask.
  HF_ASSIGN_OR_RETURN(ListeningSocket socket, ListeningSocket::Open(config.path(), 0666));
  auto impl = std::make_unique<Impl>(context, std::move(socket), std::move(reactor));
  HF_RETURN_IF_ERROR(impl->reactor->Watch(impl->listening.fd(), EPOLLIN,
                                          [i = impl.get()](uint32_t) { i->Accept(); }));
  impl->thread = std::thread([i = impl.get()] { i->reactor->Run(); });
  return std::unique_ptr<AdminServer>(new AdminServer(std::move(impl)));
}

AdminServer::AdminServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

AdminServer::~AdminServer() {
  impl_->reactor->Stop();
  impl_->thread.join();
  impl_->listening.Close();
  for (auto& [uid, server] : impl_->servers) {
    ShutDown(server);
  }
}

}  // namespace holdfast
