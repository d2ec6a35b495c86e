// Streams of pulls to other nodes: the control of one shard's way out of a peer's memory
// (docs/protocol.md §19).
//
//   PullClient client({.self = "a", …});
//   client.ChangePeers(change);                       // whenever membership has changed
//   HF_ASSIGN_OR_RETURN(auto stream, client.Open("b", open, control));
//   HF_RETURN_IF_ERROR(stream->Ask(read));  HF_ASSIGN_OR_RETURN(v1::PullTold told, stream->Next());
//
// A stream belongs to one thread, which waits in its calls: until the other end has answered,
// nothing has come for kPullStall, the stream's deadline has passed, the node has left the cluster,
// or `control` was cancelled.
// Ending a stream lets go of the slot at the other end. The client is thread-safe, and outlived by
// no stream.
//
// With TLS each Open reads the certificates' files. When they hold others, the stream goes over a
// new connection; streams that are under way keep theirs. While a file cannot be read, or the key
// is not that of the certificate (as in the middle of a renewal), those of before are used.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "holdfast/v1/peer.pb.h"
#include "server/peers/peer_events.h"
#include "server/peers/peer_network.h"
#include "tiers/transfer/transfer_control.h"

namespace holdfast {

inline constexpr Duration kPullStall = std::chrono::seconds(10);

class PullStream {
 public:
  virtual ~PullStream() = default;
  // Unavailable: the node is gone, or silent, or calls its own copy bad (DataLoss it never is: the
  // copy is bad when what comes of it contradicts its digests). Else what it refused with. When it
  // has ended the stream, both say so, however often they are called.
  virtual absl::Status Ask(const v1::PullAsked& asked) = 0;
  virtual absl::StatusOr<v1::PullTold> Next() = 0;
  // Membership has said since that the node, or the start of it that was meant, is gone: the calls
  // above end at once, and nothing is to be expected of its fabric. Any thread may ask.
  virtual bool node_gone() const { return false; }
};

class PullClient {
 public:
  struct Options {
    std::string self;
    uint64_t incarnation = 0;
    std::string cluster;
    std::string membership;
    PeerTls tls = {};
    Env* env = nullptr;
  };
  explicit PullClient(Options options);
  ~PullClient();
  PullClient(const PullClient&) = delete;
  PullClient& operator=(const PullClient&) = delete;

  void ChangePeers(const holdfast::ChangePeers& change) EXCLUDES(mutex_);
  // `open` but for who asks. The stream ends after `at_most`.
  absl::StatusOr<std::unique_ptr<PullStream>> Open(const std::string& node, v1::PullOpen open,
                                                   Duration at_most,
                                                   std::shared_ptr<TransferControl> control)
      EXCLUDES(mutex_);

 private:
  struct Peer;
  absl::StatusOr<std::shared_ptr<Peer>> Find(const std::string& node) EXCLUDES(mutex_);
  absl::Status TakeCertificates(const absl::StatusOr<PeerTlsText>& read) REQUIRES(mutex_);

  const Options options_;
  Mutex mutex_;
  std::shared_ptr<const PeerTlsText> tls_ GUARDED_BY(mutex_);  // null: not read yet
  std::map<std::string, std::shared_ptr<Peer>> peers_ GUARDED_BY(mutex_);
};

}  // namespace holdfast
