#include "server/peers/peer_calls.h"

#include <grpc/support/time.h>
#include <grpcpp/grpcpp.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "holdfast/v1/peer.grpc.pb.h"
#include "server/peers/peer_tls.h"

namespace holdfast {

class PeerCalls::Flights {
 public:
  explicit Flights(std::function<void(PeerCallEnded ended)> ended) : ended_(std::move(ended)) {}

  void Begin() EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    ++flying_;
  }
  void End(PeerCallEnded ended) EXCLUDES(mutex_) {
    ended_(std::move(ended));
    MutexLock lock(mutex_);
    --flying_;
    landed_.NotifyAll();
  }
  void AwaitAll() EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    while (flying_ > 0) {
      landed_.Wait(mutex_);
    }
  }

 private:
  const std::function<void(PeerCallEnded ended)> ended_;
  Mutex mutex_;
  CondVar landed_;
  size_t flying_ GUARDED_BY(mutex_) = 0;
};

class PeerCalls::Connection {
 public:
  explicit Connection(const std::shared_ptr<grpc::Channel>& channel) : stub(channel) {}
  v1::Peers::Stub stub;
};

template <typename Request, typename Reply>
class PeerCalls::TypedCall final : public PeerCalls::Call {
 public:
  TypedCall(std::shared_ptr<Connection> connection, Request request, Duration deadline)
      : connection_(std::move(connection)), request_(std::move(request)) {
    // By the monotonic clock: a step of the other one must not end a call, or keep one.
    context_.set_deadline(gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                                       gpr_time_from_nanos(deadline.count(), GPR_TIMESPAN)));
  }
  void Cancel() override { context_.TryCancel(); }

  void Start(const std::shared_ptr<Flights>& flights, uint64_t call) {
    flights->Begin();
    // Whoever is told may let go of this call at once. What the callback holds on to must not be
    // the call, nor the connection.
    auto ended = [this, flights, call](const grpc::Status& status) {
      PeerCallEnded told{.call = call};
      if (!status.ok()) {
        told.unreached = status.error_code() == grpc::StatusCode::UNAVAILABLE;
        told.error = absl::StrCat(
            absl::StatusCodeToString(static_cast<absl::StatusCode>(status.error_code())), ": ",
            status.error_message());
      } else {
        told.answer = reply_.answer();
        if constexpr (std::is_same_v<Reply, v1::OpenReply>) {
          told.channel = reply_.channel();
        }
      }
      flights->End(std::move(told));
    };
    if constexpr (std::is_same_v<Reply, v1::OpenReply>) {
      connection_->stub.async()->Open(&context_, &request_, &reply_, std::move(ended));
    } else {
      connection_->stub.async()->Deliver(&context_, &request_, &reply_, std::move(ended));
    }
  }

 private:
  const std::shared_ptr<Connection> connection_;
  grpc::ClientContext context_;
  const Request request_;
  Reply reply_;
};

PeerCalls::PeerCalls(Duration deadline, size_t message_bytes_max,
                     std::function<void(PeerCallEnded ended)> ended)
    : deadline_(deadline),
      message_bytes_max_(message_bytes_max),
      flights_(std::make_shared<Flights>(std::move(ended))) {}

std::shared_ptr<PeerCalls::Connection> PeerCalls::Connect(const std::string& address,
                                                          const PeerTlsText& tls) const {
  grpc::ChannelArguments arguments;
  arguments.SetMaxSendMessageSize(static_cast<int>(message_bytes_max_));
  arguments.SetMaxReceiveMessageSize(1 << 10);
  // A new connection is a new one, at once: when to try is SendLink's to say.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  // For so long gRPC keeps a connection that does not get anywhere, wanted or not.
  arguments.SetInt(
      GRPC_ARG_MIN_RECONNECT_BACKOFF_MS,
      static_cast<int>(std::chrono::duration_cast<std::chrono::milliseconds>(deadline_).count()));
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  return std::make_shared<Connection>(
      grpc::CreateCustomChannel(address, PeerCredentials(tls), arguments));
}

std::shared_ptr<PeerCalls::Call> PeerCalls::Open(std::shared_ptr<Connection> connection,
                                                 uint64_t call, v1::OpenRequest request) {
  auto started = std::make_shared<TypedCall<v1::OpenRequest, v1::OpenReply>>(
      std::move(connection), std::move(request), deadline_);
  started->Start(flights_, call);
  return started;
}

std::shared_ptr<PeerCalls::Call> PeerCalls::Deliver(std::shared_ptr<Connection> connection,
                                                    uint64_t call, v1::Batch request) {
  auto started = std::make_shared<TypedCall<v1::Batch, v1::BatchReply>>(
      std::move(connection), std::move(request), deadline_);
  started->Start(flights_, call);
  return started;
}

void PeerCalls::AwaitAll() {
  flights_->AwaitAll();
}

}  // namespace holdfast
