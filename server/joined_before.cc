#include "server/joined_before.h"

#include <algorithm>
#include <string>
#include <utility>

namespace holdfast {
namespace {

constexpr size_t kBits = 8;  // of a byte

}  // namespace

absl::Status JoinedBefore::Load(const v1::AttemptState& state, NodeNames& nodes) {
  Clear();
  attempt_ = state.attempt();
  const std::string& joined = state.joined();
  for (size_t rank = 0; rank < joined.size() * kBits; ++rank) {
    if ((static_cast<unsigned char>(joined[rank / kBits]) >> (rank % kBits) & 1) == 0) {
      continue;
    }
    if (rank >= state.world_size()) {
      return absl::DataLossError("a rank joined that is none of its ranks");
    }
    ranks_.insert(static_cast<Rank>(rank));
  }
  const bool too_many = static_cast<size_t>(state.untold_size()) > kUntoldMax;
  for (const v1::Newcomer& each : state.untold()) {
    if (too_many || ranks_.count(each.rank()) == 0 || !CheckJobName(each.node()).ok()) {
      return absl::DataLossError("who was not told that it joined has not, or they are too many");
    }
    untold_[each.rank()] = {each.process().pid(), each.process().start_ticks(),
                            nodes.Number(each.node())};
  }
  return absl::OkStatus();
}

void JoinedBefore::Save(Attempt attempt, const Members& members, const NodeNames& nodes,
                        v1::AttemptState& state) const {
  std::string joined;
  const auto add = [&](Rank rank) {
    joined.resize(std::max<size_t>(joined.size(), rank / kBits + 1));
    joined[rank / kBits] = static_cast<char>(joined[rank / kBits] | (1 << (rank % kBits)));
  };
  const auto add_untold = [&](Rank rank, const ProcessId& process) {
    if (static_cast<size_t>(state.untold_size()) < kUntoldMax) {
      v1::Newcomer& newcomer = *state.add_untold();
      newcomer.set_rank(rank);
      newcomer.mutable_process()->set_pid(process.pid);
      newcomer.mutable_process()->set_start_ticks(process.start_ticks);
      newcomer.set_node(nodes.Name(process.node));
    }
  };
  for (const auto& [rank, member] : members.all()) {
    if (rank >= state.world_size()) {
      continue;  // (Found shards may say so, of a state that was lost: no host could load this
                 // one.)
    }
    add(rank);
    if (!member.told) {
      add_untold(rank, member.process);
    }
  }
  for (Rank rank = 0; attempt == attempt_ && rank < state.world_size(); ++rank) {
    if (ranks_.count(rank) > 0) {
      add(rank);
    }
  }
  // Who did not hear of it from that host, and has not asked this one, may ask the next.
  for (const auto& [rank, process] : untold_) {
    if (attempt == attempt_ && members.Find(rank) == nullptr) {
      add_untold(rank, process);
    }
  }
  state.set_joined(std::move(joined));
}

}  // namespace holdfast
