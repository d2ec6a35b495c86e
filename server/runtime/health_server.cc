#include "server/runtime/health_server.h"

#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>

#include <mutex>
#include <thread>

#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "base/status.h"

namespace holdfast {
namespace {

// Of who may ask: a probe is one call on one connection.
constexpr int kThreadsMax = 4;
constexpr int kMessageBytesMax = 4096;
constexpr int kIdleMs = 60'000;
constexpr Duration kShutdownTakes = std::chrono::milliseconds(200);

}  // namespace

struct HealthServer::Impl {
  explicit Impl(const Options& options) : options(options) {}

  absl::Status Listen() {
    static std::once_flag plugin;
    std::call_once(plugin, [] { grpc::EnableDefaultHealthCheckService(true); });
    grpc::ResourceQuota quota("health");
    quota.SetMaxThreads(kThreadsMax);
    grpc::ServerBuilder builder;
    builder.SetResourceQuota(quota);
    builder.SetMaxReceiveMessageSize(kMessageBytesMax);
    builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS, kIdleMs);
    builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
    builder.AddListeningPort(options.address, grpc::InsecureServerCredentials(), &port);
    builder.RegisterCallbackGenericService(&nothing_else);
    server = builder.BuildAndStart();
    if (server == nullptr || port == 0) {
      return absl::UnavailableError(
          absl::StrCat("health.address: cannot listen on '", options.address,
                       "': another process has the port, or the address is none of this machine"));
    }
    Tell();
    return absl::OkStatus();
  }

  void Watch() {
    const MutexLock lock(mutex);
    while (!stopping) {
      changed.WaitUntil(mutex, std::chrono::steady_clock::now() + options.look_every);
      Tell();
    }
  }

  void Tell() {
    const bool alive = Clock::System()->Now() - MonotonicTime{beat_ns} < options.silence_max;
    grpc::HealthCheckServiceInterface* const service = server->GetHealthCheckService();
    service->SetServingStatus(alive);
    service->SetServingStatus("", alive);
    service->SetServingStatus(kReadyService, alive && ready);
  }

  const Options options;
  int port = 0;
  // Says so to all else that is called. (And gRPC wants one that is not its own.)
  grpc::CallbackGenericService nothing_else;
  std::unique_ptr<grpc::Server> server;
  std::atomic<int64_t> beat_ns{Clock::System()->Now().ns};
  std::atomic<bool> ready{false};
  Mutex mutex;
  CondVar changed;
  bool stopping GUARDED_BY(mutex) = false;
  std::thread thread;
};

absl::StatusOr<std::unique_ptr<HealthServer>> HealthServer::Start(const Options& options) {
  auto impl = std::make_unique<Impl>(options);
  HF_RETURN_IF_ERROR(impl->Listen());
  impl->thread = std::thread([i = impl.get()] { i->Watch(); });
  return std::unique_ptr<HealthServer>(new HealthServer(std::move(impl)));
}

HealthServer::HealthServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

HealthServer::~HealthServer() {
  {
    const MutexLock lock(impl_->mutex);
    impl_->stopping = true;
    impl_->changed.NotifyAll();
  }
  impl_->thread.join();
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
  const MutexLock lock(impl_->mutex);
  impl_->changed.NotifyAll();
}

}  // namespace holdfast
