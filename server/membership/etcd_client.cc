#include "server/membership/etcd_client.h"

#include <grpcpp/grpcpp.h>

#include <deque>
#include <map>
#include <set>
#include <utility>
#include <variant>

#include "base/mutex.h"
#include "etcd/rpc.grpc.pb.h"

namespace holdfast {
namespace {

// A message of the watch, or a page of a list. EtcdSession asks for less at a time when one is
// larger.
constexpr int kMessageBytesMax = 16 << 20;
// Nothing waits longer than its caller: EtcdSession gives the connection up first.
constexpr std::chrono::seconds kCallDeadline{60};

absl::Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) {
    return absl::OkStatus();
  }
  return {static_cast<absl::StatusCode>(status.error_code()), status.error_message()};
}

}  // namespace

// What gRPC still holds of ours: cancelled and waited for at the end.
class EtcdClient::Flights {
 public:
  explicit Flights(Callback callback) : callback_(std::move(callback)) {}

  void Tell(EtcdSession::Event event) { callback_(std::move(event)); }
  void CancelAll() EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    for (grpc::ClientContext* context : contexts_) {
      context->TryCancel();
    }
  }
  void AwaitAll() EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    while (!flying_.empty()) {
      landed_.Wait(mutex_);
    }
  }
  bool AnyOf(const Connection* connection) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    return flying_.contains(connection);
  }

 private:
  friend class Flight;
  const Callback callback_;
  Mutex mutex_;
  CondVar landed_;
  std::set<grpc::ClientContext*> contexts_ GUARDED_BY(mutex_);
  std::map<const Connection*, size_t> flying_ GUARDED_BY(mutex_);
};

// One call: counted from before it begins until its context is gone, which holds on to the
// connection's channel.
class EtcdClient::Flight {
 public:
  Flight(std::shared_ptr<Flights> flights, const Connection& connection, const std::string& token)
      : flights_(std::move(flights)), connection_(&connection) {
    context_ = std::make_unique<grpc::ClientContext>();
    if (!token.empty()) {
      context_->AddMetadata("token", token);
    }
    MutexLock lock(flights_->mutex_);
    flights_->contexts_.insert(context_.get());
    ++flights_->flying_[connection_];
  }
  ~Flight() {
    {
      MutexLock lock(flights_->mutex_);
      flights_->contexts_.erase(context_.get());
    }
    context_ = nullptr;
    MutexLock lock(flights_->mutex_);
    if (--flights_->flying_[connection_] == 0) {
      flights_->flying_.erase(connection_);
    }
    flights_->landed_.NotifyAll();
  }
  Flight(const Flight&) = delete;
  Flight& operator=(const Flight&) = delete;
  grpc::ClientContext& context() { return *context_; }
  void Tell(EtcdSession::Event event) { flights_->Tell(std::move(event)); }

 private:
  const std::shared_ptr<Flights> flights_;
  const Connection* const connection_;
  std::unique_ptr<grpc::ClientContext> context_;
};

struct EtcdClient::Connection {
  explicit Connection(const std::shared_ptr<grpc::Channel>& channel)
      : kv(channel), lease(channel), watch(channel), auth(channel) {}
  etcd::KV::Stub kv;
  etcd::Lease::Stub lease;
  etcd::Watch::Stub watch;
  etcd::Auth::Stub auth;
};

// Renewing is a stream in etcd's API. Here each renewal is one of its own: a message there, a
// message back.
class EtcdClient::KeepAliveCall final
    : public grpc::ClientBidiReactor<etcd::LeaseKeepAliveRequest, etcd::LeaseKeepAliveResponse> {
 public:
  static void Start(std::shared_ptr<Flights> flights, Connection& connection,
                    const EtcdCall& call) {
    auto* started =
        new KeepAliveCall(std::move(flights), connection, call);  // deletes itself in OnDone
    connection.lease.async()->LeaseKeepAlive(&started->flight_.context(), started);
    started->StartRead(&started->reply_);
    started->StartWriteLast(&started->request_, grpc::WriteOptions());
    started->StartCall();
  }
  void OnReadDone(bool ok) override {
    answered_ = ok;
    if (ok) {
      flight_.context().TryCancel();  // one answer is all that is wanted
    }
  }
  void OnDone(const grpc::Status& status) override {
    const std::unique_ptr<KeepAliveCall> self(this);
    EtcdSession::CallEnded ended{id_, FromGrpc(status), {}};
    if (answered_) {
      ended.status = absl::OkStatus();
      ended.response = std::move(reply_);
    } else if (status.ok()) {
      ended.status = absl::UnavailableError("the renewal was not answered");
    }
    flight_.Tell(std::move(ended));
  }

 private:
  KeepAliveCall(std::shared_ptr<Flights> flights, const Connection& connection,
                const EtcdCall& call)
      : flight_(std::move(flights), connection, call.token),
        id_(call.id),
        request_(std::get<etcd::LeaseKeepAliveRequest>(call.request)) {
    flight_.context().set_deadline(std::chrono::system_clock::now() + kCallDeadline);
  }
  Flight flight_;
  const uint64_t id_;
  etcd::LeaseKeepAliveRequest request_;
  etcd::LeaseKeepAliveResponse reply_;
  bool answered_ = false;
};

class EtcdClient::WatchStream final
    : public grpc::ClientBidiReactor<etcd::WatchRequest, etcd::WatchResponse> {
 public:
  // Lives until gRPC is done with it, and the client has let go.
  static std::shared_ptr<WatchStream> Start(std::shared_ptr<Flights> flights,
                                            Connection& connection, const EtcdOpenWatch& open) {
    std::shared_ptr<WatchStream> started(new WatchStream(std::move(flights), connection, open));
    started->self_ = started;
    connection.watch.async()->Watch(&started->flight_.context(), started.get());
    // Writes come from outside the reactor: it is held until the client lets go.
    started->AddHold();
    started->StartRead(&started->message_);
    started->StartCall();
    return started;
  }
  void Write(const etcd::WatchRequest& request) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    if (closed_) {
      return;
    }
    queue_.push_back(request);
    if (queue_.size() == 1) {
      StartWrite(&queue_.front());
    }
  }
  void Close() EXCLUDES(mutex_) {
    {
      MutexLock lock(mutex_);
      if (released_) {
        return;
      }
      closed_ = true;
      released_ = true;
    }
    flight_.context().TryCancel();
    RemoveHold();
  }
  void OnReadDone(bool ok) override {
    if (!ok) {
      Fail();
      return;
    }
    flight_.Tell(EtcdSession::WatchMessage{stream_, std::move(message_)});
    message_.Clear();
    StartRead(&message_);
  }
  void OnWriteDone(bool ok) override {
    if (!ok) {
      Fail();
      return;
    }
    MutexLock lock(mutex_);
    queue_.pop_front();
    if (!queue_.empty() && !closed_) {
      StartWrite(&queue_.front());
    }
  }
  void OnDone(const grpc::Status& status) override {
    const std::shared_ptr<WatchStream> self = std::move(self_);
    flight_.Tell(EtcdSession::WatchEnded{stream_, FromGrpc(status)});
  }

 private:
  WatchStream(std::shared_ptr<Flights> flights, const Connection& connection,
              const EtcdOpenWatch& open)
      : flight_(std::move(flights), connection, open.token), stream_(open.stream) {
    // An etcd that has lost its cluster says so, instead of being silent for ever.
    flight_.context().AddMetadata("hasleader", "true");
  }
  // gRPC waits for the hold before it tells how the stream ended.
  void Fail() EXCLUDES(mutex_) {
    {
      MutexLock lock(mutex_);
      closed_ = true;
      if (released_) {
        return;
      }
      released_ = true;
    }
    RemoveHold();
  }

  Flight flight_;
  const uint64_t stream_;
  etcd::WatchResponse message_;
  std::shared_ptr<WatchStream> self_;
  Mutex mutex_;
  std::deque<etcd::WatchRequest> queue_ GUARDED_BY(mutex_);  // its front is being written
  bool closed_ GUARDED_BY(mutex_) = false;
  bool released_ GUARDED_BY(mutex_) = false;
};

EtcdClient::EtcdClient(Callback callback)
    : flights_(std::make_shared<Flights>(std::move(callback))) {}

EtcdClient::~EtcdClient() {
  Disconnect();
  flights_->AwaitAll();
}

void EtcdClient::Connect(const EtcdEndpoint& endpoint, const TlsFiles& tls) {
  Disconnect();
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMessageBytesMax);
  arguments.SetMaxSendMessageSize(kMessageBytesMax);
  // A new connection is a new one, at once: when to try is EtcdSession's to say.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  std::shared_ptr<grpc::ChannelCredentials> credentials = grpc::InsecureChannelCredentials();
  if (endpoint.tls) {
    grpc::SslCredentialsOptions options;
    options.pem_root_certs = tls.ca;
    options.pem_cert_chain = tls.cert;
    options.pem_private_key = tls.key;
    credentials = grpc::SslCredentials(options);
  }
  connections_.push_back(std::make_unique<Connection>(
      grpc::CreateCustomChannel(endpoint.address, credentials, arguments)));
  connection_ = connections_.back().get();
}

void EtcdClient::Disconnect() {
  if (watch_ != nullptr) {
    watch_->Close();
    watch_ = nullptr;
  }
  flights_->CancelAll();
  connection_ = nullptr;
  // The last one to let go of a channel waits for gRPC's threads: that must be none of them, so it
  // is this one.
  std::erase_if(connections_, [&](const std::unique_ptr<Connection>& old) {
    return !flights_->AnyOf(old.get());
  });
}

void EtcdClient::Call(EtcdCall call) {
  if (connection_ == nullptr) {
    return;
  }
  if (std::holds_alternative<etcd::LeaseKeepAliveRequest>(call.request)) {
    KeepAliveCall::Start(flights_, *connection_, call);
    return;
  }
  const auto send = [&]<typename Request, typename Reply, typename Method>(Request& request, Reply,
                                                                           Method method) {
    struct Unary {
      Flight flight;
      Request request;
      Reply reply;
    };
    std::shared_ptr<Unary> unary(
        new Unary{{flights_, *connection_, call.token}, std::move(request), {}});
    unary->flight.context().set_deadline(std::chrono::system_clock::now() + kCallDeadline);
    method(&unary->flight.context(), &unary->request, &unary->reply,
           [unary, id = call.id](const grpc::Status& status) {
             EtcdSession::CallEnded ended{id, FromGrpc(status), {}};
             if (status.ok()) {
               ended.response = std::move(unary->reply);
             }
             unary->flight.Tell(std::move(ended));
           });
  };
  Connection& to = *connection_;
  if (auto* range = std::get_if<etcd::RangeRequest>(&call.request)) {
    send(*range, etcd::RangeResponse(),
         [&](auto... of) { to.kv.async()->Range(std::move(of)...); });
  } else if (auto* txn = std::get_if<etcd::TxnRequest>(&call.request)) {
    send(*txn, etcd::TxnResponse(), [&](auto... of) { to.kv.async()->Txn(std::move(of)...); });
  } else if (auto* grant = std::get_if<etcd::LeaseGrantRequest>(&call.request)) {
    send(*grant, etcd::LeaseGrantResponse(),
         [&](auto... of) { to.lease.async()->LeaseGrant(std::move(of)...); });
  } else if (auto* revoke = std::get_if<etcd::LeaseRevokeRequest>(&call.request)) {
    send(*revoke, etcd::LeaseRevokeResponse(),
         [&](auto... of) { to.lease.async()->LeaseRevoke(std::move(of)...); });
  } else if (auto* authenticate = std::get_if<etcd::AuthenticateRequest>(&call.request)) {
    send(*authenticate, etcd::AuthenticateResponse(),
         [&](auto... of) { to.auth.async()->Authenticate(std::move(of)...); });
  }
}

void EtcdClient::OpenWatch(const EtcdOpenWatch& open) {
  if (connection_ != nullptr) {
    if (watch_ != nullptr) {
      watch_->Close();
    }
    watch_ = WatchStream::Start(flights_, *connection_, open);
  }
}

void EtcdClient::WriteWatch(const EtcdWriteWatch& write) {
  if (watch_ != nullptr) {
    watch_->Write(write.request);
  }
}

}  // namespace holdfast
