#include "ckptctl/plan_time.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "base/units.h"

namespace holdfast {
namespace {

constexpr PlanRateName kRateNames[] = {
    {"memory", "a node", &PlanRates::memory},
    {"nvme", "a node", &PlanRates::nvme},
    {"network", "a node each way", &PlanRates::network},
    {"remote", "a node", &PlanRates::remote},
    {"remote-all", "all nodes together", &PlanRates::remote_all},
};

double Seconds(uint64_t bytes, uint64_t rate) {
  return static_cast<double>(bytes) / static_cast<double>(std::max<uint64_t>(rate, 1));
}

uint32_t PerNode(const PlanReads& reads) {
  return std::max(reads.ranks_per_node, 1u);
}

// Nodes by number: those of the readers first, then holders on which none of them runs.
class Nodes {
 public:
  Nodes(const PlanReads& reads, PlanPlacement placement) : reads_(reads), last_(NodesOf(reads)) {
    if (placement == PlanPlacement::kNear) {
      PlaceReaders();
    }
    for (const PlanSource& source : reads.sources) {
      if (source.tier != PlanSource::Tier::kRemote &&
          holders_.try_emplace(source.node, last_).second) {
        ++last_;
      }
    }
  }
  uint32_t Of(Rank reader) const { return reader / PerNode(reads_); }
  // The node whose memory or drives have that rank's shard; of a file in the remote tier the one
  // that reads it for all (docs/protocol.md §20, "In parts").
  uint32_t Holding(Rank saved) const {
    const PlanSource& source = reads_.sources[saved];
    return source.tier == PlanSource::Tier::kRemote
               ? static_cast<uint32_t>(uint64_t{saved} * NodesOf(reads_) / reads_.sources.size())
               : holders_.at(source.node);
  }

 private:
  // Who reads most of a holder runs there; one node of readers on each.
  void PlaceReaders() {
    std::map<std::pair<uint32_t, std::string>, uint64_t> bytes;
    for (const PlanReads::Read& read : reads_.reads) {
      if (reads_.sources[read.of].tier != PlanSource::Tier::kRemote) {
        bytes[{Of(read.reader), reads_.sources[read.of].node}] += read.bytes;
      }
    }
    std::vector<std::pair<uint64_t, std::pair<uint32_t, std::string>>> most;
    for (const auto& [pair, n] : bytes) {
      most.emplace_back(n, pair);
    }
    std::stable_sort(most.begin(), most.end(),
                     [](const auto& a, const auto& b) { return a.first > b.first; });
    std::set<uint32_t> placed;
    for (const auto& [n, pair] : most) {
      if (placed.count(pair.first) == 0 && holders_.try_emplace(pair.second, pair.first).second) {
        placed.insert(pair.first);
      }
    }
  }

  const PlanReads& reads_;
  uint32_t last_;
  std::map<std::string, uint32_t> holders_;
};

// What passes through each node.
struct Load {
  uint64_t memory = 0;  // copied by its ranks out of its own memory
  uint64_t drives = 0;  // read from its drives, for whomever
  uint64_t sent = 0;
  uint64_t received = 0;
  uint64_t remote = 0;  // read from the remote tier, for all
  // From which nodes' drives, over the network from whom, from whose files.
  std::set<uint32_t> of_drives;
  std::set<uint32_t> of_network;
  std::set<uint32_t> of_remote;
};

class Loads {
 public:
  Loads(const PlanReads& reads, PlanPlacement placement) {
    const Nodes nodes(reads, placement);
    for (const PlanReads::Read& read : reads.reads) {
      Add(nodes.Of(read.reader), nodes.Holding(read.of), reads.sources[read.of].tier, read.bytes);
    }
    for (Rank saved = 0; saved < reads.sources.size(); ++saved) {
      if (reads.sources[saved].tier == PlanSource::Tier::kRemote) {
        loads_[nodes.Holding(saved)].remote += reads.sources[saved].once_bytes;
        remote_ += reads.sources[saved].once_bytes;
      }
    }
  }

  std::array<double, kPlanParts> PartsOf(uint32_t node, const PlanRates& rates) const {
    const Load& load = loads_.at(node);
    const double network = std::max(Seconds(load.received, rates.network),
                                    Slowest(load.of_network, &Load::sent, rates.network));
    const double remote = load.of_remote.empty()
                              ? 0
                              : std::max(Seconds(remote_, rates.remote_all),
                                         Slowest(load.of_remote, &Load::remote, rates.remote));
    return {Seconds(load.memory, rates.memory), Slowest(load.of_drives, &Load::drives, rates.nvme),
            network, remote};
  }
  bool Reads(uint32_t node) const { return loads_.count(node) > 0; }

 private:
  void Add(uint32_t reader, uint32_t holder, PlanSource::Tier tier, uint64_t bytes) {
    Load& load = loads_[reader];
    if (tier == PlanSource::Tier::kNvme) {
      load.of_drives.insert(holder);
      loads_[holder].drives += bytes;
    } else if (tier == PlanSource::Tier::kRemote) {
      load.of_remote.insert(holder);
    }
    if (reader != holder) {
      load.of_network.insert(holder);
      load.received += bytes;
      loads_[holder].sent += bytes;
    } else if (tier == PlanSource::Tier::kMemory) {
      load.memory += bytes;
    }
  }
  double Slowest(const std::set<uint32_t>& nodes, uint64_t Load::*bytes, uint64_t rate) const {
    double most = 0;
    for (const uint32_t node : nodes) {
      most = std::max(most, Seconds(loads_.at(node).*bytes, rate));
    }
    return most;
  }

  std::map<uint32_t, Load> loads_;  // of nodes that read or are read from
  uint64_t remote_ = 0;
};

}  // namespace

std::span<const PlanRateName> PlanRateNames() {
  return kRateNames;
}

absl::Status SetRate(std::string_view text, PlanRates& rates) {
  const size_t equals = text.find('=');
  const std::string_view name = text.substr(0, equals);
  const auto* const found =
      std::find_if(std::begin(kRateNames), std::end(kRateNames),
                   [&](const PlanRateName& known) { return known.name == name; });
  if (found == std::end(kRateNames) || equals == std::string_view::npos) {
    return absl::InvalidArgumentError(absl::StrCat(
        "'", ToAbsl(text), "' is not NAME=RATE with one of the names ",
        absl::StrJoin(kRateNames, ", ", [](std::string* out, const PlanRateName& known) {
          absl::StrAppend(out, ToAbsl(known.name));
        })));
  }
  if (std::count(rates.told.begin(), rates.told.end(), name) > 0) {
    return absl::InvalidArgumentError(absl::StrCat("the rate '", ToAbsl(name), "' is told twice"));
  }
  std::string_view number = text.substr(equals + 1);
  constexpr std::string_view kPerSecond = "/s";
  if (number.size() > kPerSecond.size() &&
      number.substr(number.size() - kPerSecond.size()) == kPerSecond) {
    number.remove_suffix(kPerSecond.size());
  }
  const absl::StatusOr<uint64_t> rate = ParseBytes(number);
  if (!rate.ok() || *rate == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("the rate '", ToAbsl(text.substr(equals + 1)), "' of '", ToAbsl(name),
                     "' is not a number of bytes a second above 0 (3GB/s, 500MB/s; of a network of "
                     "25 Gbit/s 3.1GB/s)"));
  }
  rates.*found->rate = *rate;
  rates.told.emplace_back(name);
  return absl::OkStatus();
}

uint32_t NodesOf(const PlanReads& reads) {
  return (reads.ranks - 1) / PerNode(reads) + 1;
}

std::string_view PlanPartName(PlanPart part) {
  constexpr std::string_view kNames[kPlanParts] = {"memory", "nvme", "network", "remote"};
  return kNames[static_cast<size_t>(part)];
}

double PlanNodeTime::total_s() const {
  return std::accumulate(part_s.begin(), part_s.end(), 0.0);
}

PlanPart PlanNodeTime::longest() const {
  return static_cast<PlanPart>(std::max_element(part_s.begin(), part_s.end()) - part_s.begin());
}

PlanNodeTime EstimateSlowest(const PlanReads& reads, const PlanRates& rates,
                             PlanPlacement placement) {
  const Loads loads(reads, placement);
  PlanNodeTime slowest;
  for (uint32_t node = 0; node < NodesOf(reads); ++node) {
    PlanNodeTime time;
    time.first_rank = node * PerNode(reads);
    time.last_rank = std::min(time.first_rank + PerNode(reads), reads.ranks) - 1;
    if (loads.Reads(node)) {
      time.part_s = loads.PartsOf(node, rates);
    }
    if (node == 0 || time.total_s() > slowest.total_s()) {
      slowest = time;
    }
  }
  return slowest;
}

void JoinRuns(std::span<const ByteRun> more, std::vector<ByteRun>& runs) {
  std::vector<ByteRun> all;
  std::merge(runs.begin(), runs.end(), more.begin(), more.end(), std::back_inserter(all),
             [](const ByteRun& a, const ByteRun& b) { return a.begin < b.begin; });
  runs.clear();
  for (const ByteRun& run : all) {
    if (runs.empty() || run.begin > runs.back().begin + runs.back().bytes) {
      runs.push_back(run);
      continue;
    }
    runs.back().bytes = std::max(runs.back().bytes, run.begin + run.bytes - runs.back().begin);
  }
}

}  // namespace holdfast
