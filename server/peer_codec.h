// What agents and coordinators of different nodes say to each other (server/messages.h), as bytes
// for a channel (server/links.h): a serialized v1::PeerMessage each (proto/holdfast/v1/peer.proto;
// docs/protocol.md §15).
//
//   const PeerHeader header{"train", uuid, epoch};
//   HF_ASSIGN_OR_RETURN(std::vector<std::string> said, EncodePeer(header, messages, now));
//   … the other daemon:
//   HF_ASSIGN_OR_RETURN(PeerSaid said, DecodePeer(bytes, {.from = node, .now = now, .slack = …}));
//
// Everything that comes is hostile: numbers, names, counts and lengths are within their limits, all
// enums known, and nothing large is allocated before it is known how much there is. Both ends check
// by the same code, so what one encodes the other takes; fields of later versions are skipped.
// Texts for people are cut to kPeerTextBytesMax bytes and made UTF-8.
//
// Pure functions, thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/ids.h"
#include "server/messages.h"
#include "server/node_messages.h"

namespace holdfast {

// Limits of one message, at both ends.
inline constexpr size_t kPeerMessageBytesMax = size_t{16} << 20;
inline constexpr size_t kPeerPartsMax = size_t{1} << 18;     // messages within it, strings of lists
inline constexpr size_t kPeerTextBytesMax = 4096;            // of one text for people
inline constexpr size_t kPeerPathBytesMax = 4096;            // of a directory or location
inline constexpr size_t kPeerCopiesMax = size_t{1} << 18;    // of shards
inline constexpr size_t kPeerDescentsMax = size_t{1} << 22;  // of all its copies together
inline constexpr size_t kPeerCheckpointsMax = size_t{1} << 16;  // named in one list
inline constexpr size_t kPeerOpenStepsMax = 4096;               // that one seat is writing
inline constexpr Duration kPeerAgeMax = std::chrono::hours(24 * 365 * 10);

// Whom it is about.
struct PeerHeader {
  // Sent with messages that need it: where the other side may not know a job of that uuid (a join,
  // a node that arrives, what an agent is to write), copies, and if there is no uuid. So it may be
  // empty where it comes.
  std::string job_name;
  JobUuid job;         // zero: the sender knows only the name
  uint64_t epoch = 0;  // of the coordinator
  bool operator==(const PeerHeader&) const = default;
};

// Of messages that stay on their node (StateWritten, WakeUp, JobRemoved, NodeLeft): Internal.
// Otherwise an error says which field of which message no other daemon would take. `now`: times of
// a node's clock are told by how long ago they were.
absl::StatusOr<std::string> EncodePeer(const PeerHeader& header, const ToCoordinator& message,
                                       EventTime now);
absl::StatusOr<std::string> EncodePeer(const PeerHeader& header, const ToAgent& message);
absl::StatusOr<std::string> EncodePeer(const PeerHeader& header, const NodeMessage& message);
// In order; shards that were sealed of one step, one after the other, are one message.
absl::StatusOr<std::vector<std::string>> EncodePeer(const PeerHeader& header,
                                                    const std::vector<ToCoordinator>& messages,
                                                    EventTime now);

struct PeerSaid {
  PeerHeader header;
  // To the coordinator of the job: at least one. To this node's agent, or to the node: one.
  std::variant<std::vector<ToCoordinator>, ToAgent, NodeMessage> messages;
};
struct PeerContext {
  NodeId from = kHere;  // the sender: its processes are that node's
  EventTime now;
  // How old it may be: a time is taken to be that much earlier than it seems, so that none becomes
  // later than it was on its way.
  Duration slack{};
};
// InvalidArgument, naming message and field.
absl::StatusOr<PeerSaid> DecodePeer(std::string_view bytes, const PeerContext& context);

}  // namespace holdfast
