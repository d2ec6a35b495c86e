#include "ckptctl/admin_client.h"

#include <google/protobuf/empty.pb.h>
#include <google/protobuf/unknown_field_set.h>
#include <grpc/support/log.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/unique_fd.h"
#include "holdfast/v1/admin.grpc.pb.h"
#include "tiers/image/record.h"

namespace holdfast {
namespace {

constexpr std::chrono::milliseconds kCancelPoll(100);
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

// Both libraries number the codes alike.
absl::Status FromGrpc(const grpc::Status& status, const std::string& socket,
                      std::string_view silence) {
  switch (status.error_code()) {
    case grpc::StatusCode::OK:
      return absl::OkStatus();
    case grpc::StatusCode::DEADLINE_EXCEEDED:
      return absl::DeadlineExceededError(
          absl::StrCat("the daemon at ", socket, " did not answer within ", ToAbsl(silence),
                       ": it is busy or stuck; give it longer with --timeout"));
    case grpc::StatusCode::CANCELLED:  // not by us: the daemon is stopping
    case grpc::StatusCode::UNAVAILABLE:
      return absl::UnavailableError(
          absl::StrCat("the daemon at ", socket, " went away: ", status.error_message()));
    default:
      return absl::Status(static_cast<absl::StatusCode>(status.error_code()),
                          status.error_message());
  }
}

// gRPC reads the path as part of a URI.
std::string SocketUri(const std::string& path) {
  std::string uri = "unix:";
  for (const char c : path) {
    if (absl::ascii_isalnum(static_cast<unsigned char>(c)) || std::strchr("/._-", c) != nullptr) {
      uri += c;
    } else {
      absl::StrAppend(&uri, "%", absl::Hex(static_cast<uint8_t>(c), absl::kZeroPad2));
    }
  }
  return uri;
}

void Silent(gpr_log_func_args*) {}

}  // namespace

std::string FindAdminSocket(const std::string& flag) {
  if (!flag.empty()) {
    return flag;
  }
  if (const char* set = std::getenv("HOLDFAST_ADMIN_SOCKET"); set != nullptr && *set != '\0') {
    return set;
  }
  if (const char* runtime = std::getenv("XDG_RUNTIME_DIR"); runtime != nullptr && *runtime == '/') {
    std::string path = absl::StrCat(runtime, "/holdfast/admin.sock");
    struct stat info;
    if (::stat(path.c_str(), &info) == 0) {
      return path;
    }
  }
  return "/run/holdfast/admin.sock";
}

absl::Status ProbeSocket(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof(address.sun_path)) {
    return absl::InvalidArgumentError(absl::StrCat("socket path of ", path.size(), " bytes: 1 to ",
                                                   sizeof(address.sun_path) - 1,
                                                   " are possible: ", path));
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  // Not blocking: a daemon whose backlog is full must not hold us.
  UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) {
    return ErrnoStatus(errno, "socket", path);
  }
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) {
    return absl::OkStatus();
  }
  const int error = errno;
  struct stat info;
  if (error == ECONNREFUSED && ::stat(path.c_str(), &info) == 0 && !S_ISSOCK(info.st_mode)) {
    return absl::UnavailableError(
        absl::StrCat(path, " is not a socket: is it the right --socket?"));
  }
  switch (error) {
    case ENOENT:
      return absl::UnavailableError(absl::StrCat(
          "no socket at ", path,
          ": ckptd is not running, or listens elsewhere (--socket PATH). Start it: ckptd"));
    case ECONNREFUSED:
      return absl::UnavailableError(
          absl::StrCat("nobody listens at ", path,
                       ": ckptd has ended. Start it again: ckptd (what was sealed is kept)"));
    case EACCES:
      return absl::UnavailableError(
          absl::StrCat("no permission to connect to ", path, ". Grant it: sudo chmod 0666 ", path));
    case EAGAIN:
      return absl::UnavailableError(
          absl::StrCat("ckptd at ", path, " accepts no connections: it is stuck. Restart it"));
    default:
      return absl::UnavailableError(Message(ErrnoStatus(error, "connect", path)));
  }
}

struct AdminClient::Impl {
  Impl(std::string path, Duration wait) : socket(std::move(path)), timeout(wait) {
    gpr_set_log_function(
        Silent);  // what went wrong is in the status; gRPC's own lines only hide it
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(kReplyBytesMax);
    arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
    channel =
        grpc::CreateCustomChannel(SocketUri(socket), grpc::InsecureChannelCredentials(), arguments);
    stub = v1::Admin::NewStub(channel);
  }

  template <typename Method, typename Request, typename Reply>
  absl::Status Call(Method method, const Request& request, Reply& reply) {
    grpc::ClientContext context;
    context.set_deadline(DeadlineAfter(timeout));
    return FromGrpc((stub.get()->*method)(&context, request, &reply), socket, TimeoutText());
  }
  std::string TimeoutText() const {
    return absl::StrCat(std::chrono::duration<double>(timeout).count(), " s");
  }

  const std::string socket;
  const Duration timeout;
  std::shared_ptr<grpc::Channel> channel;
  std::unique_ptr<v1::Admin::Stub> stub;
};

AdminClient::AdminClient(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
AdminClient::~AdminClient() = default;

absl::StatusOr<std::unique_ptr<AdminClient>> AdminClient::Connect(const std::string& socket,
                                                                  Duration timeout) {
  HF_RETURN_IF_ERROR(ProbeSocket(socket));
  return std::unique_ptr<AdminClient>(new AdminClient(std::make_unique<Impl>(socket, timeout)));
}

absl::Status AdminClient::GetStatus(const v1::GetStatusRequest& request,
                                    v1::GetStatusReply& reply) {
  return impl_->Call(&v1::Admin::Stub::GetStatus, request, reply);
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

absl::Status AdminClient::Verify(
    const v1::VerifyRequest& request, const std::atomic<bool>& cancel,
    const std::function<void(const v1::VerifyProgress&)>& on_progress) {
  grpc::ClientContext context;
  grpc::CompletionQueue queue;
  grpc::Status status;
  bool silent = false;
  // One operation is under way at a time, so any completion is its completion. Returns whether it
  // succeeded; whoever cancels or falls silent makes it fail soon, and its completion is waited for
  // all the same.
  const auto wait = [&] {
    const auto silence_ends = DeadlineAfter(impl_->timeout);
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
  const auto reader = impl_->stub->AsyncVerify(&context, request, &queue, nullptr);
  bool more = wait();
  while (more && !cancel) {
    v1::VerifyProgress progress;
    reader->Read(&progress, nullptr);
    more = wait();
    if (more && !cancel) {
      on_progress(progress);
    }
  }
  if (cancel) {
    context.TryCancel();  // a daemon that never stops talking gives wait() no occasion
  }
  reader->Finish(&status, nullptr);
  wait();
  if (silent) {
    status = grpc::Status(grpc::StatusCode::DEADLINE_EXCEEDED, "");
  } else if (cancel) {
    return absl::CancelledError("stopped");
  }
  return FromGrpc(status, impl_->socket, impl_->TimeoutText());
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
  queue.Next(&tag, &ok);  // bounded by the call's deadline
  HF_RETURN_IF_ERROR(FromGrpc(status, impl_->socket, impl_->TimeoutText()));
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
