// How long the reads of a plan would take, from rates that are assumed or told: an estimate, of a
// restore that nothing else holds up (docs/elastic.md, "Before anything is moved").
//
//   PlanRates rates;
//   HF_RETURN_IF_ERROR(SetRate("nvme=3GB/s", rates));
//   const PlanNodeTime last = EstimateSlowest(reads, rates, PlanPlacement::kNear);
//   out << last.total_s() << " s, until rank " << last.first_rank << " and its neighbours are
//   ready";
//
// Pure, thread-safe.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "base/ids.h"
#include "recovery/reshard.h"

namespace holdfast {

// Bytes a second. Each is of one node, whatever number of ranks it has, but the last. They are
// meant to be rather too low than too high.
struct PlanRates {
  uint64_t memory = 10'000'000'000;      // what a node's ranks copy and verify together
  uint64_t nvme = 5'000'000'000;         // all drives of a node
  uint64_t network = 3'000'000'000;      // each way
  uint64_t remote = 1'000'000'000;       // one node's reading from the remote tier
  uint64_t remote_all = 10'000'000'000;  // all nodes' together
  std::vector<std::string> told;         // names of those that are not assumed
};

struct PlanRateName {
  std::string_view name;     // as --rate has it
  std::string_view unit_of;  // "a node", "all nodes together"
  uint64_t PlanRates::*rate;
};
std::span<const PlanRateName> PlanRateNames();

// "nvme=3GB/s" (or 3GB). InvalidArgument: no such rate, told twice, or not a number of bytes.
absl::Status SetRate(std::string_view text, PlanRates& rates);

// A saved rank's shard, where it is read.
struct PlanSource {
  enum class Tier : uint8_t { kMemory, kNvme, kRemote } tier = Tier::kMemory;
  std::string node;         // whose memory or drives
  uint64_t once_bytes = 0;  // remote: what anybody reads of it, each byte once
};

inline constexpr uint32_t kRanksPerNodeAssumed = 8;

// What a restore of all ranks of a mesh would read.
struct PlanReads {
  struct Read {
    Rank reader = 0;
    Rank of = 0;
    uint64_t bytes = 0;
  };
  uint32_t ranks = 1;  // of the mesh
  uint32_t ranks_per_node =
      kRanksPerNodeAssumed;         // neighbours share a node; the last node may have fewer
  std::vector<PlanSource> sources;  // by saved rank
  std::vector<Read> reads;
};
uint32_t NodesOf(const PlanReads& reads);

// Where the ranks run is not known before they do.
enum class PlanPlacement : uint8_t {
  kNear,  // each node's ranks on a node that has much of what they read, as far as there is one
  kFar,   // on nodes that have none of it
};

enum class PlanPart : uint8_t { kMemory, kNvme, kNetwork, kRemote };
inline constexpr size_t kPlanParts = 4;
std::string_view PlanPartName(PlanPart part);

struct PlanNodeTime {
  Rank first_rank = 0;
  Rank last_rank = 0;
  std::array<double, kPlanParts> part_s{};  // one after the other: a rank reads shard by shard
  double of(PlanPart part) const { return part_s[static_cast<size_t>(part)]; }
  double total_s() const;
  PlanPart longest() const;
};

// Of the node that is ready last. What it takes from a node, from drives or from the file system
// that others take from too it has when all of them have: nobody is served first.
PlanNodeTime EstimateSlowest(const PlanReads& reads, const PlanRates& rates,
                             PlanPlacement placement);

// Runs of one slice, ascending and apart, joined by others of it.
void JoinRuns(std::span<const ByteRun> more, std::vector<ByteRun>& runs);

}  // namespace holdfast
