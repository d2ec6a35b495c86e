#include "ckptctl/admin_client.h"

#include <fcntl.h>
#include <google/protobuf/empty.pb.h>
#include <google/protobuf/unknown_field_set.h>
#include <grpc/support/log.h>
#include <grpcpp/create_channel_posix.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "base/admin_mark.h"
#include "base/env.h"
#include "base/mutex.h"
#include "base/program.h"
#include "base/status.h"
#include "base/unique_fd.h"
#include "ckptctl/sockets.h"
#include "ckptctl/tls_channel.h"
#include "ckptctl/watchdog.h"
#include "holdfast/v1/admin.grpc.pb.h"
#include "holdfast/v1/fabric.grpc.pb.h"
#include "tiers/image/record.h"

namespace holdfast {
namespace {

constexpr char kAnswered[] = "holdfast/answered";  // a status's payload
constexpr std::chrono::milliseconds kCancelPoll(100);
constexpr std::chrono::seconds kClientSocketWait(1);
constexpr std::chrono::seconds kTlsEndWait(1);
constexpr int kThreadsNeeded = 8;
constexpr rlim_t kFilesNeeded = 32;
// A record is the largest thing that the daemon sends; the rest of its message is small.
constexpr int kReplyBytesMax = static_cast<int>(kRecordBytesMax + 1'000'000);
// From the health protocol that gRPC documents: HealthCheckResponse.status is field 1, SERVING
// is 1.
constexpr char kHealthMethod[] = "/grpc.health.v1.Health/Check";
constexpr int kHealthStatusField = 1;
constexpr uint64_t kHealthServing = 1;

std::chrono::system_clock::time_point DeadlineAfter(Duration timeout) {
  return std::chrono::system_clock::now() +
         std::chrono::duration_cast<std::chrono::microseconds>(timeout);
}

void Silent(gpr_log_func_args*) {}

// What a connection that ended before its time may mean.
absl::Status WhyGone(const std::string& socket, const std::string& what) {
  const absl::Status there = ConnectSocket(socket).status();
  if (!there.ok()) {
    return absl::UnavailableError(
        absl::StrCat("the daemon at ", socket, " went away: ", Message(there)));
  }
  if (IsClientSocket(socket, kClientSocketWait)) {
    return absl::UnavailableError(absl::StrCat(
        socket,
        " is the socket of the training processes (socket.path); ckptctl needs the admin "
        "socket (admin.path), usually --socket ",
        JoinPath(ParentDirectory(socket), "admin.sock")));
  }
  return absl::UnavailableError(absl::StrCat(
      "the daemon at ", socket, " closed the connection: ", what,
      ". It still listens; if it was not restarted just now, there may be too many users or "
      "connections at the admin socket: the daemon's log says so (\"admin connection turned "
      "away\")"));
}

// What gRPC needs, beside what everybody has: threads (it waits for ever without them) and
// descriptors.
absl::Status CheckLimits() {
  HF_RETURN_IF_ERROR(CheckThreads(kThreadsNeeded));
  rlimit files = {};
  if (::getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_cur < kFilesNeeded) {
    files.rlim_cur = std::min<rlim_t>(kFilesNeeded, files.rlim_max);
    ::setrlimit(RLIMIT_NOFILE, &files);
    if (files.rlim_cur < kFilesNeeded) {
      return absl::ResourceExhaustedError(
          absl::StrCat("only ", files.rlim_cur, " files may be open, ", kFilesNeeded,
                       " are needed; raise the limit: ulimit -n ", kFilesNeeded));
    }
  }
  return absl::OkStatus();
}

// While it lives, cancels a call soon after `cancel` (null: never) turned true: the thread that
// waits for the answer looks at nothing, and a signal handler may do no more than set a flag.
class CallWatch {
 public:
  CallWatch(grpc::ClientContext& call, const std::atomic<bool>* cancel) {
    if (cancel != nullptr) {
      thread_ = std::thread([this, &call, cancel] { Watch(call, *cancel); });
    }
  }
  ~CallWatch() {
    {
      MutexLock lock(mutex_);
      ended_ = true;
      end_.NotifyAll();
    }
    if (thread_.joinable()) {
      thread_.join();
    }
  }
  CallWatch(const CallWatch&) = delete;
  CallWatch& operator=(const CallWatch&) = delete;

 private:
  void Watch(grpc::ClientContext& call, const std::atomic<bool>& cancel) {
    MutexLock lock(mutex_);
    while (!ended_ && !cancel) {
      end_.WaitUntil(mutex_, std::chrono::steady_clock::now() + kCancelPoll);
    }
    if (!ended_) {
      call.TryCancel();
    }
  }

  Mutex mutex_;
  CondVar end_;
  bool ended_ GUARDED_BY(mutex_) = false;
  std::thread thread_;  // last: it uses the others
};

}  // namespace

bool IsDaemonsAnswer(const absl::Status& status) {
  return status.GetPayload(kAnswered).has_value();
}

bool IsNotLetIn(const absl::Status& status) {
  return status.GetPayload(kNotLetIn).has_value();
}

struct AdminClient::Impl {
  // On a connection of our own: gRPC would try again and again where the daemon turns us away.
  // `by_tls`: whose plain end that connection is; null: none.
  Impl(std::string path, Duration wait, UniqueFd fd, std::unique_ptr<TlsChannel> by_tls)
      : socket(std::move(path)),
        timeout(wait),
        tls(std::move(by_tls)),
        connection(::fcntl(fd.get(), F_DUPFD_CLOEXEC, 0)) {
    gpr_set_log_function(
        Silent);  // what went wrong is in the status; gRPC's own lines only hide it
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(kReplyBytesMax);
    channel = grpc::CreateCustomInsecureChannelFromFd("localhost", fd.release(), arguments);
    stub = v1::Admin::NewStub(channel);
    fabric = v1::FabricAdmin::NewStub(channel);
  }

  // The daemon has so many places for one user, and who asks again and again, as `drain` does,
  // comes anew each time.
  void Hangup() {
    ::shutdown(connection.get(), SHUT_RDWR);
    tls.reset();
  }

  // Both libraries number the codes alike.
  absl::Status Convert(const grpc::ClientContext& context, const grpc::Status& status) const {
    if (!status.ok() && context.GetServerTrailingMetadata().count(kAnswerMark) > 0) {
      absl::Status answer(static_cast<absl::StatusCode>(status.error_code()),
                          status.error_message());
      answer.SetPayload(kAnswered, absl::Cord());
      return answer;
    }
    return Unmarked(status);
  }

  // gRPC's own, or one of a daemon that marks nothing.
  absl::Status Unmarked(const grpc::Status& status) const {
    switch (status.error_code()) {
      case grpc::StatusCode::OK:
        return absl::OkStatus();
      case grpc::StatusCode::DEADLINE_EXCEEDED:
        return absl::DeadlineExceededError(
            absl::StrCat("the daemon at ", socket, " did not answer within ",
                         std::chrono::duration<double>(timeout).count(),
                         " s: it, or another node that it asked, is busy or stuck (ckptctl nodes "
                         "shows which can be reached); give it longer with --timeout"));
      case grpc::StatusCode::CANCELLED:  // not by us: the daemon is stopping
      case grpc::StatusCode::UNAVAILABLE:
        return tls == nullptr ? WhyGone(socket, status.error_message())
                              : WhyGoneByTls(status.error_message());
      default:
        return absl::Status(static_cast<absl::StatusCode>(status.error_code()),
                            status.error_message());
    }
  }

  absl::Status WhyGoneByTls(const std::string& what) const {
    HF_RETURN_IF_ERROR(tls->WhyEnded(kTlsEndWait));
    return absl::UnavailableError(
        absl::StrCat("the daemon at ", socket, " closed the connection: ", what,
                     ". Was it restarted, or its certificates or admin.tls.users changed? Ask "
                     "again"));
  }

  template <typename Method, typename Request, typename Reply>
  absl::Status Call(Method method, const Request& request, Reply& reply) {
    return Call(*stub, method, request, reply);
  }
  template <typename Stub, typename Method, typename Request, typename Reply>
  absl::Status Call(Stub& of, Method method, const Request& request, Reply& reply) {
    grpc::ClientContext context;
    context.set_deadline(DeadlineAfter(timeout));
    const Watchdog watchdog(timeout, socket);
    const grpc::Status status = [&] {
      const CallWatch watch(context, cancel_calls);
      return (of.*method)(&context, request, &reply);
    }();
    if (status.error_code() == grpc::StatusCode::CANCELLED && cancel_calls != nullptr &&
        *cancel_calls) {
      return absl::CancelledError(
          absl::StrCat("interrupted before the daemon at ", socket, " had answered"));
    }
    return Convert(context, status);
  }

  // Until the daemon is done, is silent for too long, or `cancel` turned true.
  template <typename Request, typename Message>
  absl::Status Stream(std::unique_ptr<grpc::ClientAsyncReader<Message>> (v1::Admin::Stub::*begin)(
                          grpc::ClientContext*, const Request&, grpc::CompletionQueue*, void*),
                      const Request& request, const std::atomic<bool>& cancel,
                      const std::function<void(const Message&)>& on_message) {
    grpc::ClientContext context;
    grpc::CompletionQueue queue;
    grpc::Status status;
    bool silent = false;
    // One operation is under way at a time, so any completion is its completion. Returns whether it
    // succeeded; whoever cancels or falls silent makes it fail soon, and its completion is waited
    // for all the same.
    const auto wait = [&] {
      const Watchdog watchdog(timeout, socket);
      const auto silence_ends = DeadlineAfter(timeout);
      void* tag = nullptr;
      bool ok = false;
      while (queue.AsyncNext(&tag, &ok, std::chrono::system_clock::now() + kCancelPoll) ==
             grpc::CompletionQueue::TIMEOUT) {
        silent = silent || std::chrono::system_clock::now() >= silence_ends;
        if (cancel || silent) {
          context.TryCancel();
        }
      }
      return ok;
    };
    const auto reader = (stub.get()->*begin)(&context, request, &queue, nullptr);
    bool more = wait();
    while (more && !cancel) {
      Message message;
      reader->Read(&message, nullptr);
      more = wait();
      if (more && !cancel) {
        on_message(message);
      }
    }
    if (cancel) {
      context.TryCancel();  // a daemon that never stops talking gives wait() no occasion
    }
    reader->Finish(&status, nullptr);
    wait();
    if (silent) {
      return Unmarked({grpc::StatusCode::DEADLINE_EXCEEDED, ""});
    }
    if (cancel) {
      return absl::CancelledError("stopped");
    }
    return Convert(context, status);
  }

  const std::string socket;
  const Duration timeout;
  std::unique_ptr<TlsChannel> tls;
  const UniqueFd connection;  // a second descriptor of it
  const std::atomic<bool>* cancel_calls = nullptr;
  std::shared_ptr<grpc::Channel> channel;
  std::unique_ptr<v1::Admin::Stub> stub;
  std::unique_ptr<v1::FabricAdmin::Stub> fabric;
};

AdminClient::AdminClient(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

// The end of gRPC's last channel ends its threads, and waits for ever for those that it could not
// start. The program ends right after, and the kernel does the rest.
AdminClient::~AdminClient() {
  impl_->Hangup();
  if (WatchdogEnabled()) {
    static auto* const kept = new std::vector<std::unique_ptr<Impl>>;
    kept->push_back(std::move(impl_));
  }
}

absl::StatusOr<std::unique_ptr<AdminClient>> AdminClient::Connect(const AdminPlace& place,
                                                                  Duration timeout) {
  HF_RETURN_IF_ERROR(CheckLimits());
  const Watchdog watchdog(timeout, place.text());
  UniqueFd fd;
  std::unique_ptr<TlsChannel> tls;
  if (place.address.empty()) {
    HF_ASSIGN_OR_RETURN(fd, ConnectSocket(place.socket));
  } else {
    HF_ASSIGN_OR_RETURN(tls, TlsChannel::Connect(place.address, place.tls, timeout));
    fd = tls->TakePlain();
  }
  return std::unique_ptr<AdminClient>(new AdminClient(
      std::make_unique<Impl>(place.text(), timeout, std::move(fd), std::move(tls))));
}

absl::StatusOr<std::unique_ptr<AdminClient>> AdminClient::Connect(const std::string& socket,
                                                                  Duration timeout) {
  return Connect(AdminPlace{socket, "", ""}, timeout);
}

void AdminClient::CancelWhen(const std::atomic<bool>* cancel) {
  impl_->cancel_calls = cancel;
}

absl::Status AdminClient::GetStatus(const v1::GetStatusRequest& request,
                                    v1::GetStatusReply& reply) {
  return impl_->Call(&v1::Admin::Stub::GetStatus, request, reply);
}
absl::Status AdminClient::GetNodes(const v1::GetNodesRequest& request, v1::GetNodesReply& reply) {
  return impl_->Call(&v1::Admin::Stub::GetNodes, request, reply);
}

absl::Status AdminClient::ListCheckpoints(const v1::ListCheckpointsRequest& request,
                                          v1::ListCheckpointsReply& reply) {
  return impl_->Call(&v1::Admin::Stub::ListCheckpoints, request, reply);
}
absl::Status AdminClient::InspectShard(const v1::InspectShardRequest& request,
                                       v1::InspectShardReply& reply) {
  return impl_->Call(&v1::Admin::Stub::InspectShard, request, reply);
}
absl::Status AdminClient::SetRestorePoint(const v1::SetRestorePointRequest& request,
                                          v1::SetRestorePointReply& reply) {
  return impl_->Call(&v1::Admin::Stub::SetRestorePoint, request, reply);
}
absl::Status AdminClient::RemoveJob(const v1::RemoveJobRequest& request,
                                    v1::RemoveJobReply& reply) {
  return impl_->Call(&v1::Admin::Stub::RemoveJob, request, reply);
}
absl::Status AdminClient::Where(const v1::WhereRequest& request, v1::WhereReply& reply) {
  return impl_->Call(&v1::Admin::Stub::Where, request, reply);
}
absl::Status AdminClient::Explain(const v1::ExplainRequest& request, v1::ExplainReply& reply) {
  return impl_->Call(&v1::Admin::Stub::Explain, request, reply);
}
absl::Status AdminClient::Timeline(const v1::TimelineRequest& request, v1::TimelineReply& reply) {
  return impl_->Call(&v1::Admin::Stub::Timeline, request, reply);
}
absl::Status AdminClient::CollectGarbage(const v1::CollectGarbageRequest& request,
                                         v1::CollectGarbageReply& reply) {
  return impl_->Call(&v1::Admin::Stub::CollectGarbage, request, reply);
}
absl::Status AdminClient::Pin(const v1::PinRequest& request, v1::PinReply& reply) {
  return impl_->Call(&v1::Admin::Stub::Pin, request, reply);
}
absl::Status AdminClient::ShowFabric(const v1::ShowFabricRequest& request,
                                     v1::ShowFabricReply& reply) {
  return impl_->Call(*impl_->fabric, &v1::FabricAdmin::Stub::ShowFabric, request, reply);
}
absl::Status AdminClient::MeasureFabric(const v1::MeasureFabricRequest& request,
                                        v1::MeasureFabricReply& reply) {
  return impl_->Call(*impl_->fabric, &v1::FabricAdmin::Stub::MeasureFabric, request, reply);
}
absl::Status AdminClient::Repair(const v1::RepairRequest& request, v1::RepairReply& reply) {
  return impl_->Call(&v1::Admin::Stub::Repair, request, reply);
}
absl::Status AdminClient::Replace(const v1::ReplaceRequest& request, v1::ReplaceReply& reply) {
  return impl_->Call(&v1::Admin::Stub::Replace, request, reply);
}
absl::Status AdminClient::Drain(const v1::DrainRequest& request, v1::DrainReply& reply) {
  return impl_->Call(&v1::Admin::Stub::Drain, request, reply);
}
absl::Status AdminClient::RemoveCheckpoint(const v1::RemoveCheckpointRequest& request,
                                           v1::RemoveCheckpointReply& reply) {
  return impl_->Call(&v1::Admin::Stub::RemoveCheckpoint, request, reply);
}
absl::Status AdminClient::ForgetDrive(const v1::ForgetDriveRequest& request,
                                      v1::ForgetDriveReply& reply) {
  return impl_->Call(&v1::Admin::Stub::ForgetDrive, request, reply);
}
absl::Status AdminClient::AdoptRemote(const v1::AdoptRemoteRequest& request,
                                      v1::AdoptRemoteReply& reply) {
  return impl_->Call(&v1::Admin::Stub::AdoptRemote, request, reply);
}
absl::Status AdminClient::Rebuild(const v1::RebuildRequest& request, v1::RebuildReply& reply) {
  return impl_->Call(&v1::Admin::Stub::Rebuild, request, reply);
}
absl::Status AdminClient::SetOptions(const v1::SetOptionsRequest& request,
                                     v1::SetOptionsReply& reply) {
  return impl_->Call(&v1::Admin::Stub::SetOptions, request, reply);
}

absl::Status AdminClient::Verify(
    const v1::VerifyRequest& request, const std::atomic<bool>& cancel,
    const std::function<void(const v1::VerifyProgress&)>& on_progress) {
  return impl_->Stream(&v1::Admin::Stub::AsyncVerify, request, cancel, on_progress);
}

absl::Status AdminClient::WatchEvents(const v1::WatchEventsRequest& request,
                                      const std::atomic<bool>& cancel,
                                      const std::function<void(const v1::EventBatch&)>& on_batch) {
  return impl_->Stream(&v1::Admin::Stub::AsyncWatchEvents, request, cancel, on_batch);
}

absl::Status AdminClient::CheckHealth() {
  using google::protobuf::Empty;
  // Request and reply are so small that the protocol's own file is not worth compiling: an empty
  // request asks for the whole server, and Empty keeps the reply's field among those that it does
  // not know.
  grpc::TemplatedGenericStub<Empty, Empty> stub(impl_->channel);
  grpc::ClientContext context;
  context.set_deadline(DeadlineAfter(impl_->timeout));
  grpc::CompletionQueue queue;
  Empty reply;
  grpc::Status status;
  const auto call = stub.PrepareUnaryCall(&context, kHealthMethod, Empty(), &queue);
  call->StartCall();
  call->Finish(&reply, &status, nullptr);
  void* tag = nullptr;
  bool ok = false;
  const Watchdog watchdog(impl_->timeout, impl_->socket);
  queue.Next(&tag, &ok);  // bounded by the call's deadline
  HF_RETURN_IF_ERROR(impl_->Convert(context, status));
  const auto& fields = Empty::GetReflection()->GetUnknownFields(reply);
  for (int i = 0; i < fields.field_count(); ++i) {
    const auto& field = fields.field(i);
    if (field.number() == kHealthStatusField &&
        field.type() == google::protobuf::UnknownField::TYPE_VARINT &&
        field.varint() == kHealthServing) {
      return absl::OkStatus();
    }
  }
  return absl::FailedPreconditionError(
      "the daemon says that it is not serving: it is starting or stopping");
}

}  // namespace holdfast
