// The identities of docs/design.md §1 as types, so that a step is never passed where an attempt is
// meant.
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace holdfast {

// 16 random bytes (RFC 4122 version 4), printed in the usual 8-4-4-4-12 form.
struct JobUuid {
  std::array<uint8_t, 16> bytes{};
  auto operator<=>(const JobUuid&) const = default;
  bool IsZero() const;
  std::string ToString() const;
  std::string ToBytes() const;
  static absl::StatusOr<JobUuid> FromString(std::string_view text);
  static absl::StatusOr<JobUuid> FromBytes(std::string_view bytes);  // exactly 16
};

using Attempt = uint64_t;  // first is 1; 0 means none
using Step = uint64_t;     // any value, 0 included, is a step
using Rank = uint32_t;
using Generation = uint64_t;  // of a slot's filling; 0 means never filled
using SlotId = uint32_t;

// The kinds of places where copies lie, nearest first.
// kMemory and kNvme: of the node where a rank runs; kPeer: memory of other nodes.
enum class TierKind : uint8_t { kMemory, kNvme, kPeer, kRemote };
inline constexpr size_t kTierKinds = 4;
inline constexpr std::array<TierKind, kTierKinds> kAllTiers = {TierKind::kMemory, TierKind::kNvme,
                                                               TierKind::kPeer, TierKind::kRemote};
std::string_view TierName(TierKind tier);  // "memory", "nvme", "peer", "remote"

// One checkpoint within a job: what a line of descent is made of. Ordered by attempt, then step.
struct CheckpointId {
  Attempt attempt = 0;
  Step step = 0;
  auto operator<=>(const CheckpointId&) const = default;
};

// One shard, anywhere: the key of design invariant 11.
struct ShardId {
  JobUuid job;
  Attempt attempt = 0;
  Step step = 0;
  Rank rank = 0;
  auto operator<=>(const ShardId&) const = default;
  CheckpointId checkpoint() const { return {attempt, step}; }
  std::string ToString() const;  // "1b4e28ba-… attempt 3 step 900 rank 0"
};

// A node, as the daemon that uses the number calls it (server/node_names.h): no two daemons need to
// agree, so it is neither stored nor sent.
using NodeId = uint32_t;
inline constexpr NodeId kHere = 0;  // the node that this runs on

// One process, not confused with a later one that got its pid: start time in clock ticks since boot
// (field 22 of /proc/<pid>/stat). Compare only within one boot of its node.
struct ProcessId {
  int32_t pid = 0;
  uint64_t start_ticks = 0;
  NodeId node = kHere;
  auto operator<=>(const ProcessId&) const = default;
  std::string ToString() const;  // "pid 4711"
};

// One hold of a sealed copy by a reader. The id is the reader's own choice, unique among its
// process's, so that it can let go also of what it never heard that it got.
struct ReadHold {
  ProcessId process;
  uint64_t id = 0;
  auto operator<=>(const ReadHold&) const = default;
};

// A job's name: 1 to 128 bytes of [A-Za-z0-9._-], not starting with '.' or '-'. It becomes a
// directory name.
absl::Status CheckJobName(std::string_view name);

// Limits that every parser and every public call enforces.
inline constexpr uint32_t kWorldSizeMax = 1u << 20;
inline constexpr size_t kJobNameBytesMax = 128;

}  // namespace holdfast

template <>
struct std::hash<holdfast::JobUuid> {
  size_t operator()(const holdfast::JobUuid& id) const noexcept;
};
