#include "tests/recovery/placement_cases.h"

#include <algorithm>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/status.h"

namespace holdfast {
namespace {

using Words = std::vector<std::string>;

template <typename T>
absl::StatusOr<T> Number(const std::string& word) {
  T value = 0;
  if (!absl::SimpleAtoi(word, &value)) {
    return absl::InvalidArgumentError(absl::StrCat("'", word, "' is no number"));
  }
  return value;
}

absl::StatusOr<uint32_t> Home(const std::string& word, const PlacementCase& c) {
  if (word == "-") {
    return kNoNode;
  }
  for (uint32_t i = 0; i < c.nodes.size(); ++i) {
    if (c.nodes[i].name == word) {
      return i;
    }
  }
  return absl::InvalidArgumentError(absl::StrCat("'", word, "' is no node"));
}

absl::Status ParseInput(const Words& words, PlacementCase& c) {
  if (words[0] == "job" && words.size() == 2) {
    HF_ASSIGN_OR_RETURN(c.job, JobUuid::FromString(words[1]));
  } else if (words[0] == "replicas" && words.size() == 2) {
    HF_ASSIGN_OR_RETURN(c.replicas, Number<uint32_t>(words[1]));
  } else if (words[0] == "node" && words.size() >= 3) {
    PlacementNode node{words[1], {}, 0};
    HF_ASSIGN_OR_RETURN(node.capacity_bytes, Number<uint64_t>(words[2]));
    for (size_t i = 3; i < words.size(); ++i) {
      node.domains.push_back(words[i] == "-" ? "" : words[i]);
    }
    c.nodes.push_back(std::move(node));
  } else if (words[0] == "shards" && words.size() == 5) {
    HF_ASSIGN_OR_RETURN(const Rank first, Number<Rank>(words[1]));
    HF_ASSIGN_OR_RETURN(const Rank last, Number<Rank>(words[2]));
    HF_ASSIGN_OR_RETURN(const uint32_t home, Home(words[3], c));
    HF_ASSIGN_OR_RETURN(const uint64_t bytes, Number<uint64_t>(words[4]));
    for (Rank rank = first; rank <= last; ++rank) {
      c.shards.push_back({rank, home, bytes});
    }
  } else {
    return absl::InvalidArgumentError("no such line");
  }
  return absl::OkStatus();
}

absl::Status ParsePlacementLine(const Words& words, PlacementCase& c) {
  if (words[0] == "hash" && words.size() == 5) {
    PlacementCase::Hash entry{0, words[2], std::stoull(words[3], nullptr, 16), 0};
    HF_ASSIGN_OR_RETURN(entry.rank, Number<Rank>(words[1]));
    HF_ASSIGN_OR_RETURN(entry.draw, Number<uint64_t>(words[4]));
    c.hashes.push_back(std::move(entry));
  } else if (words[0] == "targets" && words.size() >= 2) {
    HF_ASSIGN_OR_RETURN(const Rank rank, Number<Rank>(words[1]));
    c.targets[rank] = Words(words.begin() + 2, words.end());
  } else if (words[0] == "load" && words.size() == 3) {
    HF_ASSIGN_OR_RETURN(c.loads[words[1]], Number<uint64_t>(words[2]));
  } else if (words[0] != "limit") {
    return ParseInput(words, c);
  }
  return absl::OkStatus();
}

uint64_t Below(std::mt19937_64& random, uint64_t limit) {
  return random() % limit;
}

}  // namespace

absl::StatusOr<std::vector<PlacementCase>> ParsePlacementCases(std::string_view text) {
  std::vector<PlacementCase> cases;
  size_t number = 0;
  for (const std::string& line : Words(absl::StrSplit(ToAbsl(text), '\n'))) {
    ++number;
    if (line.empty() || line[0] == '#') {
      continue;
    }
    const Words words = absl::StrSplit(line, ' ');
    if (words[0] == "case") {
      cases.emplace_back().name = line.substr(5);
      continue;
    }
    const absl::Status parsed = cases.empty()
                                    ? absl::InvalidArgumentError("it comes before the first case")
                                    : ParsePlacementLine(words, cases.back());
    if (!parsed.ok()) {
      return Annotate(parsed, absl::StrCat("line ", number, " '", line, "'"));
    }
  }
  return cases;
}

PlacementCase RandomPlacementCase(std::mt19937_64& random) {
  constexpr uint64_t kUnit = kPlacementUnitBytes;
  PlacementCase c;
  std::generate(c.job.bytes.begin(), c.job.bytes.end(), [&] { return uint8_t(random()); });
  c.replicas = static_cast<uint32_t>(Below(random, 5));

  // 1. Sizes: all alike, or not.
  const bool many = Below(random, 10) == 0;  // on few nodes that lend just enough
  const bool alike = many || Below(random, 2) == 0;
  const uint64_t size = 1 + Below(random, 5);
  const uint64_t shards = many ? 250 : Below(random, 40);
  const uint64_t nodes = 1 + Below(random, many ? 5 : 14);
  const uint64_t fair = size * shards * c.replicas / nodes;

  // 2. Nodes in domains of which some are missing; what they lend fits, is plenty, or is too
  // little.
  const uint64_t levels = Below(random, 4);
  const uint64_t values = 1 + Below(random, 5);
  const uint64_t kind = many ? 1 : Below(random, 4);
  for (uint64_t i = 0; i < nodes; ++i) {
    PlacementNode node{absl::StrCat(Below(random, 2) == 0 ? "n" : "é", i), {}, 0};
    for (uint64_t level = 0; level < levels; ++level) {
      const uint64_t value = Below(random, values * (level + 1));
      node.domains.push_back(Below(random, 8) == 0 ? "" : absl::StrCat("v", value));
    }
    const uint64_t units = kind == 0   ? fair + size
                           : kind == 1 ? fair
                           : kind == 2 ? Below(random, 3 * fair + 2)
                                       : (fair + size) * (1 + Below(random, 4));
    node.capacity_bytes = Below(random, 8) == 0 ? 0 : units * kUnit + Below(random, kUnit);
    c.nodes.push_back(std::move(node));
  }
  std::shuffle(c.nodes.begin(), c.nodes.end(), random);

  // 3. Shards by the node, with gaps in their ranks.
  Rank rank = 0;
  const uint64_t per_node = 1 + Below(random, 6);
  for (uint64_t i = 0; i < shards; ++i) {
    rank += 1 + (Below(random, 4) == 0 ? 1 : 0);
    const auto home = static_cast<uint32_t>(i / per_node % nodes);
    const uint64_t units = alike ? size : 1 + Below(random, 2 * size);
    c.shards.push_back(
        {rank, Below(random, 20) == 0 ? kNoNode : home, units * kUnit - Below(random, kUnit)});
  }
  std::shuffle(c.shards.begin(), c.shards.end(), random);
  return c;
}

void AnswerPlacement(PlacementCase& c, const Placement& placement, std::mt19937_64& random) {
  const uint64_t seed = PlacementSeed(c.job);
  for (size_t i = 0; i < c.shards.size(); ++i) {
    const Rank rank = c.shards[i].rank;
    std::vector<std::string>& names = c.targets[rank];
    for (const uint32_t target : placement.TargetsOf(i)) {
      names.push_back(c.nodes[target].name);
    }
    const std::string& node = c.nodes[Below(random, c.nodes.size())].name;
    const uint64_t hash = placement_internal::PairHash(placement_internal::ShardHash(seed, rank),
                                                       placement_internal::NodeHash(node));
    c.hashes.push_back({rank, node, hash, placement_internal::DrawOf(hash)});
  }
  for (size_t i = 0; i < c.nodes.size(); ++i) {
    c.loads[c.nodes[i].name] = placement.LoadBytes(i) / kPlacementUnitBytes;
  }
}

std::string PrintPlacementCase(const PlacementCase& c) {
  std::string text =
      absl::StrCat("case ", c.name, "\njob ", c.job.ToString(), "\nreplicas ", c.replicas, "\n");
  for (const PlacementNode& node : c.nodes) {
    absl::StrAppend(&text, "node ", node.name, " ", node.capacity_bytes);
    for (const std::string& domain : node.domains) {
      absl::StrAppend(&text, " ", domain.empty() ? "-" : domain);
    }
    absl::StrAppend(&text, "\n");
  }
  for (const PlacementShard& shard : c.shards) {
    absl::StrAppend(&text, "shards ", shard.rank, " ", shard.rank, " ",
                    shard.home == kNoNode ? "-" : c.nodes[shard.home].name, " ", shard.bytes, "\n");
  }
  for (const PlacementCase::Hash& entry : c.hashes) {
    absl::StrAppend(&text, "hash ", entry.rank, " ", entry.node, " ",
                    absl::StrFormat("%016x", entry.hash), " ", entry.draw, "\n");
  }
  for (const auto& [rank, names] : c.targets) {
    absl::StrAppend(&text, "targets ", rank, names.empty() ? "" : " ", absl::StrJoin(names, " "),
                    "\n");
  }
  for (const auto& [node, load] : c.loads) {
    absl::StrAppend(&text, "load ", node, " ", load, "\n");
  }
  return text;
}

}  // namespace holdfast
