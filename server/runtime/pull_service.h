// Serves the shards in this node's memory to other nodes (docs/protocol.md §19): holds the slot for
// as long as the stream of a pull is open, tells where one-sided reads find it, and sends the bytes
// itself where no fabric does.
//
//   PullServer pulls({.context = &admin_context, .slots = …});
//   options.services.push_back(pulls.service());   // of PeerNetworkOptions
//
// Owner: the Daemon. Calls come on gRPC's threads, one for each stream (PeerService says how many
// there may be), of which kPullsServedMax are served. The server that it is registered with ends
// before it does.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "holdfast/v1/peer.pb.h"
#include "server/runtime/admin_service.h"

namespace grpc {
class Service;
}  // namespace grpc

namespace holdfast {

class FabricPort;
class LocalRecords;
class PassedOn;
class RemoteParts;

inline constexpr size_t kPullsServedMax = 32;
// Records of steps, and parts of files in the remote tier, which hold no slot.
inline constexpr size_t kPartsServedMax = 128;
// Of the pulls, those that take parts: some room is left for those that take all and go.
inline constexpr size_t kPullsInPartsMax = 24;
inline constexpr size_t kProbesServedMax = 4;  // kProbeBytesMax each
inline constexpr size_t kPullChunkBytes = size_t{1} << 20;
// What is read here for others is waited for: shorter than the reader's patience (kPullStall).
inline constexpr Duration kPassedOnWait = std::chrono::seconds(8);
// A pull that may take longer is refused.
inline constexpr Duration kPullLongest = std::chrono::hours(12);

class PullServer {
 public:
  struct Options {
    AdminContext* context = nullptr;
    FabricPort* fabric = nullptr;  // null: none
    std::shared_ptr<PassedOn> passed_on;
    // Whether who asks may: its cluster and its membership are this node's, and this is the node,
    // and the start of it, that it means.
    std::function<absl::Status(const v1::OpenRequest&)> check;
    // For the core's answer; while a shard is brought into memory first, the reader hears of it so
    // often. (It waits for a word for longer: kPullStall.)
    Duration hold_wait = std::chrono::seconds(5);
    // A reader that has not said what it wants, does not go on, or does not take what it is sent,
    // for so long is sent away; one that may be reading by one-sided reads has longer to go on.
    Duration open_wait = std::chrono::seconds(10);
    Duration silence_max = std::chrono::seconds(60);
    // Whether a node is a member now. A reader that was one and is none any more holds nothing;
    // null: nobody looks.
    std::function<bool(const std::string&)> is_member = nullptr;
    // Null: there is no remote tier.
    std::shared_ptr<RemoteParts> remote_parts = nullptr;
    std::shared_ptr<const LocalRecords> records = nullptr;
  };
  explicit PullServer(Options options);
  ~PullServer();
  PullServer(const PullServer&) = delete;
  PullServer& operator=(const PullServer&) = delete;

  grpc::Service* service();

 private:
  class Service;
  const std::unique_ptr<Service> service_;
};

}  // namespace holdfast
