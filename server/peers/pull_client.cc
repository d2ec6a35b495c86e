#include "server/peers/pull_client.h"

#include <grpc/support/time.h>
#include <grpcpp/grpcpp.h>

#include <atomic>
#include <chrono>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/certificates.h"
#include "base/status.h"
#include "base/units.h"
#include "holdfast/v1/peer.grpc.pb.h"
#include "server/peers/peer_tls.h"

namespace holdfast {
namespace {

constexpr size_t kMessageBytesMax = size_t{4} << 20;
constexpr auto kLook = std::chrono::milliseconds(100);  // between looks whether it was cancelled
constexpr int kReconnectMs = 1000;

absl::Status FromGrpc(const grpc::Status& status) {
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()),
                      absl::string_view(status.error_message()));
}

}  // namespace

struct PullClient::Peer {
  PeerAddress at;
  std::shared_ptr<grpc::Channel> channel;  // null: not used yet
  std::shared_ptr<const PeerTlsText> tls;  // of the channel
  // Whose streams end: set when it is down, or up under another start.
  std::shared_ptr<std::atomic<bool>> gone = std::make_shared<std::atomic<bool>>(false);
};

namespace {

class GrpcPullStream final : public PullStream {
 public:
  GrpcPullStream(std::string node, std::shared_ptr<grpc::Channel> channel,
                 std::shared_ptr<const std::atomic<bool>> gone, Duration at_most,
                 std::shared_ptr<TransferControl> control)
      : node_(std::move(node)),
        gone_(std::move(gone)),
        at_most_(at_most),
        control_(std::move(control)),
        stub_(std::move(channel)) {
    context_.set_deadline(gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                                       gpr_time_from_nanos(at_most.count(), GPR_TIMESPAN)));
    stream_ = stub_.AsyncPull(&context_, &queue_, this);
  }
  ~GrpcPullStream() override {
    context_.TryCancel();
    queue_.Shutdown();
    void* tag = nullptr;
    bool ok = false;
    while (queue_.Next(&tag, &ok)) {
    }
  }

  absl::Status Start() { return Await(); }
  absl::Status Ask(const v1::PullAsked& asked) override {
    HF_RETURN_IF_ERROR(CheckIsOpen());
    stream_->Write(asked, this);
    return Await();
  }
  absl::StatusOr<v1::PullTold> Next() override {
    HF_RETURN_IF_ERROR(CheckIsOpen());
    v1::PullTold told;
    stream_->Read(&told, this);
    HF_RETURN_IF_ERROR(Await());
    return told;
  }
  bool node_gone() const override { return gone_->load(); }

 private:
  absl::Status CheckIsMember() const {
    return node_gone()
               ? absl::UnavailableError(absl::StrCat("node '", node_, "' has left the cluster"))
               : absl::OkStatus();
  }
  absl::Status CheckIsOpen() const {
    HF_RETURN_IF_ERROR(ended_);
    return CheckIsMember();
  }

  // The one call under way.
  absl::Status Await() {
    absl::Status waited = AwaitTag();
    if (absl::IsAborted(waited)) {
      ended_ = waited = WhyItEnded();
    }
    return waited;
  }

  // The other end has ended the stream: it says why. Asked once only, gRPC aborts the process
  // otherwise.
  absl::Status WhyItEnded() {
    grpc::Status why;
    stream_->Finish(&why, this);
    const absl::Status finished = AwaitTag();
    if (!finished.ok() && !absl::IsAborted(finished)) {
      return finished;
    }
    if (why.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED &&
        std::chrono::steady_clock::now() - opened_ >= at_most_) {
      return absl::DeadlineExceededError(
          absl::StrCat("node '", node_, "' was not done within ", FormatDuration(at_most_)));
    }
    if (why.ok()) {
      return absl::UnavailableError(
          absl::StrCat("node '", node_, "' ended the pull without a word"));
    }
    // (That a copy is bad is for this end to find: only what was compared with digests is.)
    const absl::Status its = FromGrpc(why);
    return Annotate(absl::IsDataLoss(its) ? absl::UnavailableError(Message(its)) : its,
                    absl::StrCat("node '", node_, "'"));
  }

  // Aborted: the call came to nothing.
  absl::Status AwaitTag() {
    const auto begun = std::chrono::steady_clock::now();
    absl::Status gave_up;
    for (;;) {
      void* tag = nullptr;
      bool ok = false;
      const auto next = queue_.AsyncNext(&tag, &ok, std::chrono::system_clock::now() + kLook);
      if (next == grpc::CompletionQueue::GOT_EVENT) {
        return !gave_up.ok() ? gave_up : ok ? absl::OkStatus() : absl::AbortedError("");
      }
      if (next == grpc::CompletionQueue::SHUTDOWN) {
        return absl::CancelledError("the stream has ended");
      }
      if (!gave_up.ok()) {
        continue;  // it ends soon
      }
      if (control_ != nullptr && control_->cancelled()) {
        gave_up = absl::CancelledError("as asked");
      } else if (node_gone()) {
        gave_up = CheckIsMember();
      } else if (std::chrono::steady_clock::now() - begun > kPullStall) {
        gave_up = absl::UnavailableError(absl::StrCat("node '", node_, "' does not answer"));
      } else {
        continue;
      }
      context_.TryCancel();
    }
  }

  const std::string node_;
  const std::shared_ptr<const std::atomic<bool>> gone_;
  const Duration at_most_;
  const std::chrono::steady_clock::time_point opened_ = std::chrono::steady_clock::now();
  const std::shared_ptr<TransferControl> control_;
  v1::Pulls::Stub stub_;
  grpc::ClientContext context_;
  grpc::CompletionQueue queue_;
  std::unique_ptr<grpc::ClientAsyncReaderWriter<v1::PullAsked, v1::PullTold>> stream_;
  absl::Status ended_;  // not OK: nothing more can be asked or heard
};

std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address, const PeerTlsText& tls) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(static_cast<int>(kMessageBytesMax));
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, kReconnectMs);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, kReconnectMs);
  return grpc::CreateCustomChannel(address, PeerCredentials(tls), arguments);
}

}  // namespace

PullClient::PullClient(Options options) : options_(std::move(options)) {}

PullClient::~PullClient() = default;

void PullClient::ChangePeers(const holdfast::ChangePeers& change) {
  MutexLock lock(mutex_);
  std::set<std::string> over = change.down;
  for (const auto& [node, at] : change.up) {
    over.insert(node);
  }
  for (const std::string& node : over) {
    if (const auto known = peers_.find(node); known != peers_.end()) {
      known->second->gone->store(true);
      peers_.erase(known);
    }
  }
  for (const auto& [node, at] : change.up) {
    peers_[node] = std::make_shared<Peer>(Peer{at, nullptr, nullptr});
  }
}

// Those of before are kept when the new ones cannot be used; no error as long as there are some.
absl::Status PullClient::TakeCertificates(const absl::StatusOr<PeerTlsText>& read) {
  if (!read.ok()) {
    return tls_ == nullptr ? read.status() : absl::OkStatus();
  }
  if (tls_ != nullptr) {
    const PeerTls& files = options_.tls;
    if (*read == *tls_ ||
        absl::IsInvalidArgument(CheckTlsTexts({read->ca, read->cert, read->key},
                                              {files.ca_file, files.cert_file, files.key_file},
                                              Clock::System()->UnixMillis() / 1000))) {
      return absl::OkStatus();
    }
  }
  tls_ = std::make_shared<const PeerTlsText>(*read);
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<PullClient::Peer>> PullClient::Find(const std::string& node) {
  {
    MutexLock lock(mutex_);
    if (peers_.count(node) == 0) {
      return absl::UnavailableError(
          absl::StrCat("node '", node, "' is no member of the cluster now"));
    }
  }
  // (That may take a while.)
  const absl::StatusOr<PeerTlsText> read = ReadPeerTls(options_.env, options_.tls);
  std::shared_ptr<Peer> replaced;  // its channel may end here, after the lock
  MutexLock lock(mutex_);
  const auto known = peers_.find(node);
  if (known == peers_.end()) {
    return absl::UnavailableError(absl::StrCat("node '", node, "' has left the cluster"));
  }
  HF_RETURN_IF_ERROR(TakeCertificates(read));
  std::shared_ptr<Peer>& peer = known->second;
  if (peer->channel == nullptr || peer->tls != tls_) {
    auto renewed = std::make_shared<Peer>(
        Peer{peer->at, MakeChannel(peer->at.address, *tls_), tls_, peer->gone});
    replaced = std::exchange(peer, std::move(renewed));
  }
  return peer;
}

absl::StatusOr<std::unique_ptr<PullStream>> PullClient::Open(
    const std::string& node, v1::PullOpen open, Duration at_most,
    std::shared_ptr<TransferControl> control) {
  HF_ASSIGN_OR_RETURN(const std::shared_ptr<Peer> peer, Find(node));
  v1::OpenRequest& who = *open.mutable_who();
  who.set_from(options_.self);
  who.set_incarnation(options_.incarnation);
  who.set_to(node);
  who.set_to_incarnation(peer->at.incarnation);
  who.set_cluster(options_.cluster);
  who.set_membership(options_.membership);
  auto stream = std::make_unique<GrpcPullStream>(node, peer->channel, peer->gone, at_most,
                                                 std::move(control));
  HF_RETURN_IF_ERROR(stream->Start());
  v1::PullAsked asked;
  *asked.mutable_open() = std::move(open);
  HF_RETURN_IF_ERROR(stream->Ask(asked));
  return std::unique_ptr<PullStream>(std::move(stream));
}

}  // namespace holdfast
