#include "server/runtime/health_server.h"

#include <fcntl.h>
#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/server_posix.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <map>
#include <mutex>
#include <string_view>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/program.h"
#include "base/status.h"
#include "base/unique_fd.h"
#include "server/runtime/reactor.h"
#include "server/runtime/tcp_door.h"

namespace holdfast {
namespace {

// Of who may ask: a probe is one call on one connection.
constexpr int kThreadsMax = 4;
constexpr int kMessageBytesMax = 4096;
constexpr int kIdleMs = 60'000;
constexpr int kProbeStreamsMax = 4;
constexpr size_t kMemoryBytes = 4 << 20;
constexpr size_t kConnectionsMax = 64;
// RFC 9113: what a client sends first.
constexpr std::string_view kHttp2Greeting = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
constexpr Duration kShutdownTakes = std::chrono::milliseconds(200);

TcpDoor::Heard Http2HeardOf(std::string_view said) {
  return said == kHttp2Greeting                          ? TcpDoor::Heard::kAll
         : said == kHttp2Greeting.substr(0, said.size()) ? TcpDoor::Heard::kMore
                                                         : TcpDoor::Heard::kNonsense;
}

}  // namespace

struct HealthServer::Impl {
  Impl(const Options& wanted, std::unique_ptr<Reactor> loop)
      : options(wanted),
        reactor(std::move(loop)),
        look_timer(reactor->AddTimer([this] { Look(); })) {}

  absl::Status Open() {
    static std::once_flag plugin;
    std::call_once(plugin, [] { grpc::EnableDefaultHealthCheckService(true); });
    grpc::ResourceQuota quota("health");
    quota.SetMaxThreads(kThreadsMax);
    quota.Resize(kMemoryBytes);
    grpc::ServerBuilder builder;
    builder.SetResourceQuota(quota);
    builder.SetMaxReceiveMessageSize(kMessageBytesMax);
    builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS, kIdleMs);
    builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kProbeStreamsMax);
    builder.RegisterCallbackGenericService(&nothing_else);
    server = builder.BuildAndStart();
    if (server == nullptr) {
      return absl::InternalError("health.address: gRPC could not start a server");
    }
    absl::StatusOr<std::unique_ptr<TcpDoor>> opened =
        TcpDoor::Open(*reactor, {.address = options.address,
                                 .looked_at_max = kHttp2Greeting.size(),
                                 .heard = Http2HeardOf,
                                 .enter = [this](UniqueFd fd) { Enter(std::move(fd)); }});
    if (!opened.ok()) {
      return absl::UnavailableError(
          absl::StrCat("health.address: cannot listen on '", options.address,
                       "': another process has the port, or the address is none of this machine"));
    }
    door = *std::move(opened);
    port = door->port();
    Look();
    return absl::OkStatus();
  }

  // ---- Of the thread ----

  // A probe comes, asks and goes: who came longest ago makes room.
  void Enter(UniqueFd fd) {
    UniqueFd watch(::fcntl(fd.get(), F_DUPFD_CLOEXEC, 0));
    const uint64_t number = next++;
    if (!watch.valid() ||
        !reactor->Watch(watch.get(), EPOLLRDHUP, [this, number](uint32_t) { Ended(number); })
             .ok()) {
      return;
    }
    connections.emplace(number, std::move(watch));
    grpc::AddInsecureChannelFromFd(server.get(), fd.release());
    if (connections.size() > kConnectionsMax) {
      ::shutdown(connections.begin()->second.get(), SHUT_RDWR);
      Ended(connections.begin()->first);
    }
  }

  void Ended(uint64_t number) {
    const auto found = connections.find(number);
    reactor->Unwatch(found->second.get());
    connections.erase(found);
  }

  void Look() {
    const bool alive = Clock::System()->Now() - MonotonicTime{beat_ns} < options.silence_max;
    grpc::HealthCheckServiceInterface* const service = server->GetHealthCheckService();
    service->SetServingStatus(alive);
    service->SetServingStatus("", alive);
    service->SetServingStatus(kReadyService, alive && ready);
    reactor->Arm(look_timer, reactor->clock().Now() + options.look_every);
  }

  const Options options;
  const std::unique_ptr<Reactor> reactor;
  const Reactor::TimerId look_timer;
  int port = 0;
  // Says so to all else that is called. (And gRPC wants one that is not its own.)
  grpc::CallbackGenericService nothing_else;
  std::unique_ptr<grpc::Server> server;
  std::unique_ptr<TcpDoor> door;
  std::map<uint64_t, UniqueFd> connections;  // a second descriptor of each; the oldest first
  uint64_t next = 1;
  std::atomic<int64_t> beat_ns{Clock::System()->Now().ns};
  std::atomic<bool> ready{false};
  std::thread thread;
};

absl::StatusOr<std::unique_ptr<HealthServer>> HealthServer::Start(const Options& options) {
  HF_RETURN_IF_ERROR(CheckThreads(1 + kThreadsMax));
  HF_ASSIGN_OR_RETURN(std::unique_ptr<Reactor> reactor, Reactor::Create(Clock::System()));
  auto impl = std::make_unique<Impl>(options, std::move(reactor));
  HF_RETURN_IF_ERROR(impl->Open());
  impl->thread = std::thread([i = impl.get()] {
    ::pthread_setname_np(::pthread_self(), "health");
    i->reactor->Run();
  });
  return std::unique_ptr<HealthServer>(new HealthServer(std::move(impl)));
}

HealthServer::HealthServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

HealthServer::~HealthServer() {
  impl_->reactor->Stop();
  impl_->thread.join();
  impl_->door = nullptr;
  impl_->server->Shutdown(std::chrono::system_clock::now() + kShutdownTakes);
  impl_->server->Wait();
}

int HealthServer::port() const {
  return impl_->port;
}

void HealthServer::Beat() {
  impl_->beat_ns = Clock::System()->Now().ns;
}

void HealthServer::SetReady(bool ready) {
  impl_->ready = ready;
  impl_->reactor->Post([i = impl_.get()] { i->Look(); });
}

}  // namespace holdfast
