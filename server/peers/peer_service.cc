#include "server/peers/peer_service.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/wire_format_lite.h>
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/program.h"
#include "base/status.h"
#include "holdfast/v1/peer.grpc.pb.h"
#include "server/membership/membership.h"

namespace holdfast {
namespace {

using ::google::protobuf::internal::WireFormatLite;
using ::google::protobuf::io::CodedInputStream;

// What gRPC cannot do without when a server starts, and a few for its calls.
constexpr int kThreadsPerServer = 6;
// Each call of a service in `others` has one: as many as are served there, and again as many that
// have not said yet what they want. Whoever calls then is told that it is too much.
constexpr int kThreadsMax = 96;
// A link has one call under way, and perhaps one that it has given up; a node's pulls share one
// connection, and one that had to wait there would look like a source that does not answer.
constexpr int kStreamsPerConnectionMax = 8 + 64;
// Of OpenRequest::membership, which names a node and its address.
constexpr size_t kMembershipTextBytesMax = 2 * kNodeTextBytesMax + 64;
constexpr size_t kMemoryBytes = size_t{512} << 20;
constexpr int kKeepaliveMs = 20'000;

grpc::Status ToGrpc(const absl::Status& status) {
  return {static_cast<grpc::StatusCode>(status.code()), Message(status)};
}

absl::Status CheckNames(const std::string& from, const std::string& to) {
  for (const std::string* name : {&from, &to}) {
    if (name->empty() || name->size() > kNodeTextBytesMax) {
      return absl::InvalidArgumentError(absl::StrCat("a call names a node by ", name->size(),
                                                     " bytes: 1 to ", kNodeTextBytesMax,
                                                     " are taken"));
    }
  }
  return absl::OkStatus();
}

// Before it is parsed: an empty message is two bytes there, and many times that in memory.
absl::Status CheckBatch(grpc::ByteBuffer& bytes, const PeerService::Limits& limits) {
  constexpr uint32_t kMessageTag = WireFormatLite::MakeTag(
      v1::Batch::kMessagesFieldNumber, WireFormatLite::WIRETYPE_LENGTH_DELIMITED);
  grpc::ProtoBufferReader reader(&bytes);
  CodedInputStream in(&reader);
  size_t messages = 0;
  while (const uint32_t tag = in.ReadTag()) {
    if (tag != kMessageTag) {
      if (!WireFormatLite::SkipField(&in, tag)) {
        return absl::InvalidArgumentError("a batch is cut short");
      }
      continue;
    }
    uint32_t size = 0;
    if (!in.ReadVarint32(&size) || size > limits.message_bytes_max ||
        !in.Skip(static_cast<int>(size))) {
      return absl::InvalidArgumentError(
          absl::StrCat("a message of a batch is cut short, or has more than ",
                       limits.message_bytes_max, " bytes"));
    }
    if (++messages > limits.messages_max) {
      return absl::InvalidArgumentError(
          absl::StrCat("a batch has more than ", limits.messages_max, " messages"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

class PeerService::Service final
    : public v1::Peers::WithCallbackMethod_Open<
          v1::Peers::WithRawCallbackMethod_Deliver<v1::Peers::Service>> {
 public:
  Service(const Limits& limits, Callback callback, Cancelled cancelled)
      : limits_(limits), callback_(std::move(callback)), cancelled_(std::move(cancelled)) {}

  grpc::ServerUnaryReactor* Open(grpc::CallbackServerContext*, const v1::OpenRequest* request,
                                 v1::OpenReply* reply) override {
    auto* reactor = new Reactor(*this);  // deletes itself in OnDone
    absl::Status named = CheckNames(request->from(), request->to());
    if (request->cluster().size() > kNodeTextBytesMax ||
        request->membership().size() > kMembershipTextBytesMax) {
      named = absl::InvalidArgumentError(
          absl::StrCat("a call names a cluster by more than ", kNodeTextBytesMax,
                       " bytes, or its membership by more than ", kMembershipTextBytesMax));
    }
    if (!named.ok()) {
      reactor->Finish(ToGrpc(named));
      return reactor;
    }
    PeerCalling calling{.id = reactor->id,
                        .opens = true,
                        .from = request->from(),
                        .incarnation = request->incarnation(),
                        .to = request->to(),
                        .to_incarnation = request->to_incarnation(),
                        .cluster = request->cluster(),
                        .membership = request->membership()};
    calling.answer = [reactor, reply](const absl::Status& status, v1::PeerAnswer answer,
                                      uint64_t channel) {
      reply->set_answer(answer);
      reply->set_channel(channel);
      reactor->Finish(ToGrpc(status));
    };
    callback_(std::move(calling));
    return reactor;
  }

  grpc::ServerUnaryReactor* Deliver(grpc::CallbackServerContext*, const grpc::ByteBuffer* request,
                                    grpc::ByteBuffer* reply) override {
    auto* reactor = new Reactor(*this);  // deletes itself in OnDone
    grpc::ByteBuffer bytes(*request);    // the same slices
    absl::Status sound = CheckBatch(bytes, limits_);
    v1::Batch batch;
    if (sound.ok() && !grpc::SerializationTraits<v1::Batch>::Deserialize(&bytes, &batch).ok()) {
      sound = absl::InvalidArgumentError("a batch cannot be parsed");
    }
    if (sound.ok()) {
      sound = CheckNames(batch.from(), batch.to());
    }
    if (!sound.ok()) {
      reactor->Finish(ToGrpc(sound));
      return reactor;
    }
    PeerCalling calling{.id = reactor->id,
                        .from = std::move(*batch.mutable_from()),
                        .incarnation = batch.incarnation(),
                        .to = std::move(*batch.mutable_to()),
                        .channel = batch.channel(),
                        .first = batch.first()};
    calling.messages.assign(std::make_move_iterator(batch.mutable_messages()->begin()),
                            std::make_move_iterator(batch.mutable_messages()->end()));
    calling.answer = [reactor, reply](const absl::Status& status, v1::PeerAnswer answer, uint64_t) {
      v1::BatchReply message;
      message.set_answer(answer);
      bool own = false;
      const grpc::Status serialized =
          grpc::SerializationTraits<v1::BatchReply>::Serialize(message, reply, &own);
      reactor->Finish(serialized.ok() ? ToGrpc(status) : serialized);
    };
    callback_(std::move(calling));
    return reactor;
  }

 private:
  class Reactor final : public grpc::ServerUnaryReactor {
   public:
    explicit Reactor(Service& service) : id(++service.last_id_), service_(service) {}
    void OnCancel() override { service_.cancelled_(id); }
    void OnDone() override { delete this; }
    const uint64_t id;

   private:
    Service& service_;
  };

  const Limits limits_;
  const Callback callback_;
  const Cancelled cancelled_;
  std::atomic<uint64_t> last_id_{0};
};

struct PeerService::Server {
  Server(const Limits& bounds, Callback callback, Cancelled cancelled)
      : limits(bounds), service(bounds, std::move(callback), std::move(cancelled)) {}
  const Limits limits;
  Service service;  // outlives the server
  std::unique_ptr<grpc::Server> server;
};

PeerService::PeerService(const Limits& limits, Callback callback, Cancelled cancelled)
    : server_(std::make_unique<Server>(limits, std::move(callback), std::move(cancelled))) {}

PeerService::~PeerService() {
  Stop();
}

absl::Status PeerService::Listen(const std::string& address,
                                 const std::shared_ptr<grpc::ServerCredentials>& credentials,
                                 const std::vector<grpc::Service*>& others) {
  // gRPC aborts when it cannot have a thread.
  HF_RETURN_IF_ERROR(CheckThreads(kThreadsPerServer));
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort(address, credentials, &port);
  builder.RegisterService(&server_->service);
  for (grpc::Service* other : others) {
    builder.RegisterService(other);
  }
  builder.SetMaxReceiveMessageSize(static_cast<int>(server_->limits.request_bytes_max));
  grpc::ResourceQuota quota("peers");
  quota.Resize(kMemoryBytes);
  quota.SetMaxThreads(kThreadsMax);
  builder.SetResourceQuota(quota);
  builder.SetSyncServerOption(grpc::ServerBuilder::SyncServerOption::NUM_CQS, 1);
  builder.SetSyncServerOption(grpc::ServerBuilder::SyncServerOption::MIN_POLLERS, 1);
  builder.SetSyncServerOption(grpc::ServerBuilder::SyncServerOption::MAX_POLLERS, 2);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kStreamsPerConnectionMax);
  // Whoever is gone without a word holds nothing for long.
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveMs);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveMs);
  // Those that say nothing are asked, too.
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  // (One that reads by itself is told nothing for long, and is to be asked for longer than that.)
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  // Else two daemons on one port would each get some of the calls.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  server_->server = builder.BuildAndStart();
  if (server_->server == nullptr || port == 0) {
    return absl::UnavailableError(absl::StrCat(
        "listen for other nodes on '", address,
        "': the address is in use, or not one of this machine: choose another address"));
  }
  address_ = absl::StrCat(address.substr(0, address.rfind(':')), ":", port);
  return absl::OkStatus();
}

void PeerService::Stop() {
  if (server_->server != nullptr) {
    server_->server->Shutdown(std::chrono::system_clock::now());
    server_->server->Wait();
    server_->server = nullptr;
  }
}

}  // namespace holdfast
