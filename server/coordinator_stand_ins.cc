// Spares: which node gets what the ranks of another one need, before they come up there
// (docs/protocol.md §19).
#include <algorithm>
#include <set>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/units.h"
#include "server/coordinator.h"

namespace holdfast {

// The nodes on which ranks of others are expected to come up: as somebody said, else of a node that
// is gone one that has none of the job's, of those the one that lends most, each for the one that
// has been gone longest.
std::map<NodeId, NodeId> Coordinator::StandIns() const {
  std::map<NodeId, NodeId> stand_ins;
  std::set<NodeId> taken;
  for (const auto& [node, with] : replaced_) {
    if (!members_.OnNode(node).empty() && lenders_.count(with) > 0) {
      stand_ins[node] = with;
      taken.insert(with);
    }
  }
  std::vector<std::pair<MonotonicTime, NodeId>> gone;
  for (const auto& [node, absence] : absent_) {
    if (absence.ended && !members_.OnNode(node).empty() && stand_ins.count(node) == 0) {
      gone.push_back({absence.since, node});
    }
  }
  if (gone.empty()) {
    return stand_ins;
  }
  std::vector<std::tuple<uint64_t, std::string, NodeId>> spares;  // the largest first
  for (const auto& [node, lender] : lenders_) {
    if (lender.lends_bytes > 0 && members_.OnNode(node).empty() && taken.count(node) == 0) {
      spares.push_back({UINT64_MAX - lender.lends_bytes, settings_.nodes->Name(node), node});
    }
  }
  std::sort(gone.begin(), gone.end());
  std::sort(spares.begin(), spares.end());
  for (size_t i = 0; i < std::min(gone.size(), spares.size()); ++i) {
    stand_ins[gone[i].second] = std::get<NodeId>(spares[i]);
  }
  return stand_ins;
}

// What the newest committed step of its ranks takes in slots.
uint64_t Coordinator::BytesOfRanksOn(NodeId node) const {
  for (auto it = checkpoints_.rbegin(); it != checkpoints_.rend(); ++it) {
    const auto& [id, checkpoint] = *it;
    if (!checkpoint.committed || !OnLine(line_, id)) {
      continue;
    }
    uint64_t bytes = 0;
    for (const Rank rank : members_.OnNode(node)) {
      const auto shard = checkpoint.shards.find(rank);
      bytes += shard == checkpoint.shards.end()
                   ? 0
                   : std::max(RoundUp(shard->second.bytes, kSlotBytesUnit), kSlotBytesUnit);
    }
    return bytes;
  }
  return 0;
}

// What keeps one node from standing in for another.
absl::Status Coordinator::CheckReplace(const v1::ReplaceRequest& request) const {
  const std::optional<NodeId> node = settings_.nodes->Find(request.node());
  if (!node) {
    return absl::NotFoundError(
        absl::StrCat("no node is called '", request.node(), "' (ckptctl nodes lists them)"));
  }
  if (request.with().empty()) {
    return absl::OkStatus();
  }
  const std::optional<NodeId> with = settings_.nodes->Find(request.with());
  const auto lender = with ? lenders_.find(*with) : lenders_.end();
  if (with == node) {
    return absl::InvalidArgumentError(absl::StrCat(
        request.node(), " cannot stand in for itself: name another node after --with"));
  }
  if (lender == lenders_.end()) {
    return absl::NotFoundError(absl::StrCat("no node is called '", request.with(),
                                            "', or it is out of reach (ckptctl nodes lists them)"));
  }
  if (lender->second.lends_bytes == 0) {
    return absl::FailedPreconditionError(
        absl::StrCat(request.with(), " lends no memory (memory.peer_bytes_max)"));
  }
  if (const uint64_t needs = BytesOfRanksOn(*node); needs > lender->second.lends_bytes) {
    return absl::FailedPreconditionError(absl::StrCat(
        request.with(), " lends ", FormatBytes(lender->second.lends_bytes),
        " (memory.peer_bytes_max), and a step of ", request.node(), "'s ranks takes ",
        FormatBytes(needs), ": raise it there, or name another node (ckptctl nodes lists them)"));
  }
  if (ReplicasWanted() == 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("job '", name_, "' keeps nothing in other nodes' memory: ckptctl set ", name_,
                     " replicas=1"));
  }
  return absl::OkStatus();
}

void Coordinator::On(const ReplaceAsked& m, Turn& t) {
  if (const absl::Status status = CheckReplace(m.request); !status.ok()) {
    return Refuse(m.token, {status.code(), v1::Failure::REASON_UNSPECIFIED, Message(status)}, t);
  }
  const NodeId node = *settings_.nodes->Find(m.request.node());
  const size_t ranks = members_.OnNode(node).size();
  AdminAnswered answer{m.token, v1::ReplaceReply()};
  v1::ReplaceReply& reply = std::get<v1::ReplaceReply>(answer.reply);
  reply.set_ranks(static_cast<uint32_t>(ranks));
  if (m.request.with().empty()) {
    reply.set_text(absl::StrCat(
        "job '", name_, "': ",
        replaced_.erase(node) > 0
            ? absl::StrCat("nothing is expected instead of ", m.request.node(), " any more")
            : absl::StrCat("nothing was expected instead of ", m.request.node())));
  } else if (ranks == 0) {
    reply.set_text(
        absl::StrCat("job '", name_, "' has no ranks on ", m.request.node(), ": nothing to do"));
  } else {
    replaced_[node] = *settings_.nodes->Find(m.request.with());
    reply.set_text(absl::StrCat("job '", name_, "': ", m.request.with(), " gets what ", ranks,
                                ranks == 1 ? " rank of " : " ranks of ", m.request.node(),
                                ranks == 1 ? " needs" : " need", " to start there"));
  }
  t.Say(std::move(answer));
  ReplicateAgain(t);
  GoOnWithSession(t);  // nobody waits any more for what that node had
}

}  // namespace holdfast
