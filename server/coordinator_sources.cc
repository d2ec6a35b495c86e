// Where the ranks of a restore get their shards from: the nearest tier that has a good copy, the
// next one when that fails (docs/protocol.md §6 and §10).
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "server/coordinator.h"

namespace holdfast {
namespace {

// For those that read from remote: where most do not, some are not found, and read for themselves.
constexpr size_t kNodesLookedAtMax = 4 * kRemoteReadersMax;

}  // namespace

// From the nearest tier that has it; the caller has made sure that there is one, or the rank hears
// that its copy is gone.
void Coordinator::OfferSource(RequestToken token, Rank rank, uint64_t session, uint32_t round,
                              CheckpointId id, Turn& t) {
  const auto it = checkpoints_.find(id);
  if (it != checkpoints_.end() && OfAnotherWorld(it->second)) {
    return t.Say(StepOffered{token, attempt(), rank, session, round, id, it->second.world_size});
  }
  SourceOffered offer{token, attempt(), rank, session, round, id};
  if (it != checkpoints_.end() && it->second.shards.count(rank) > 0) {
    std::set<TierKind> without;
    for (const auto& [tier, why] : failed_sources_[rank]) {
      without.insert(tier);
    }
    offer.from = NearestFor(it->second, rank, SeatOf(rank), without).value_or(TierKind::kMemory);
    if (offer.from == TierKind::kPeer) {
      offer.peers = PeerNames(it->second, rank, SeatOf(rank));
    }
    if (offer.from == TierKind::kRemote) {
      offer.readers = RemoteReaders(id, rank);
    }
    offer.why = WhyNotNearer(it->second, rank, SeatOf(rank), offer.from);
    offer.bytes = it->second.shards.at(rank).bytes;
  }
  offered_from_[rank] = offer.from;
  t.Say(std::move(offer));
}

// From where a rank on that node gets its shard.
std::optional<TierKind> Coordinator::NearestFor(const Checkpoint& checkpoint, Rank rank,
                                                NodeId node, std::set<TierKind> without) const {
  if (!Configured(TierKind::kPeer)) {
    without.insert(TierKind::kPeer);
  }
  return checkpoint.Nearest(rank, node, without);
}

std::vector<std::string> Coordinator::PeerNames(const Checkpoint& checkpoint, Rank rank,
                                                NodeId node) const {
  std::vector<NodeId> peers = checkpoint.PeersWith(rank, node);
  const std::vector<NodeId> drives = checkpoint.DrivesWith(rank, node);
  peers.insert(peers.end(), drives.begin(), drives.end());
  std::vector<std::string> names;
  for (size_t i = 0; i < std::min(peers.size(), kPeersNamedMax); ++i) {
    names.push_back(settings_.nodes->Name(peers[i]));
  }
  return names;
}

// Who is brought back from there at the same time: the nodes of those that hold the same as the
// rank, its own first, then those that follow it; of as many others as may be named each byte is
// read once. Where it is not known who holds the same: the nodes that follow its own.
std::vector<RemoteReader> Coordinator::RemoteReaders(CheckpointId id, Rank rank) {
  std::vector<RemoteReader> readers;
  std::set<NodeId> seen;
  const auto name = [&](NodeId node) {
    if (seen.insert(node).second) {
      if (const std::vector<RankRun>& runs = RunsReadOn(id, node); !runs.empty()) {
        readers.push_back({settings_.nodes->Name(node), runs});
      }
    }
    return readers.size() < kRemoteReadersMax && seen.size() < kNodesLookedAtMax;
  };
  name(SeatOf(rank));
  const std::vector<Rank>& alike = checkpoints_.at(id).SharersOf(rank);
  const auto own = std::lower_bound(alike.begin(), alike.end(), rank) - alike.begin();
  for (size_t i = 0; i < alike.size(); ++i) {
    const Rank next = alike[(static_cast<size_t>(own) + i) % alike.size()];
    if (members_.Find(next) != nullptr && !name(SeatOf(next))) {
      break;
    }
  }
  const std::map<NodeId, std::set<Rank>>& nodes = members_.by_node();
  auto next = nodes.lower_bound(SeatOf(rank));
  for (size_t i = 0; alike.empty() && i < nodes.size(); ++i, ++next) {
    next = next == nodes.end() ? nodes.begin() : next;
    if (!name(next->first)) {
      break;
    }
  }
  return readers;
}

// Of those that run there the ones that are brought back from remote; empty, too, where they make
// no mesh.
const std::vector<RankRun>& Coordinator::RunsReadOn(CheckpointId id, NodeId node) {
  const auto [known, is_new] = runs_read_on_.try_emplace({id, node});
  const auto there = members_.by_node().find(node);
  if (!is_new || there == members_.by_node().end()) {
    return known->second;
  }
  const Checkpoint& checkpoint = checkpoints_.at(id);
  std::vector<Rank> ranks;
  std::copy_if(there->second.begin(), there->second.end(), std::back_inserter(ranks),
               [&](Rank rank) {
                 const auto offered = offered_from_.find(rank);
                 return (offered != offered_from_.end() && offered->second == TierKind::kRemote) ||
                        NearestFor(checkpoint, rank, node, {}) == TierKind::kRemote;
               });
  if (std::optional<std::vector<RankRun>> runs = RunsOf(ranks)) {
    known->second = *std::move(runs);
  }
  return known->second;
}

// The node that the rank runs on.
NodeId Coordinator::SeatOf(Rank rank) const {
  const Member* member = members_.Find(rank);
  return member == nullptr ? kHere : member->process.node;
}

// "memory copy absent (node rebooted), nvme copy bad: …"
std::string Coordinator::WhyNotNearer(const Checkpoint& checkpoint, Rank rank, NodeId node,
                                      TierKind chosen) const {
  std::string text;
  const auto failed = failed_sources_.find(rank);
  for (const TierKind tier : kAllTiers) {
    if (tier == chosen) {
      break;
    }
    if (Configured(tier)) {
      const bool tried = failed != failed_sources_.end() && failed->second.count(tier) > 0;
      absl::StrAppend(&text, text.empty() ? "" : ", ",
                      WhyNot(checkpoint, rank, node, tier, tried ? failed->second.at(tier) : ""));
    }
  }
  return text;
}

// Why one tier's copy is not the source; `failure`: what became of it when it was tried.
std::string Coordinator::WhyNot(const Checkpoint& checkpoint, Rank rank, NodeId node, TierKind tier,
                                const std::string& failure) const {
  const CopyState& copy = tier == TierKind::kPeer
                              ? checkpoint.shards.at(rank).at(tier)
                              : checkpoint.shards.at(rank).at(PlaceOf(tier, node));
  const std::string name = absl::StrCat(ToAbsl(TierName(tier)), " copy ");
  if (copy.kind == CopyState::Kind::kBad) {
    return absl::StrCat(name, "bad: ", copy.why);
  }
  if (!failure.empty()) {
    return absl::StrCat(name, "not readable now: ", failure);
  }
  if (const auto elsewhere = checkpoint.GoodPlace(rank, tier);
      elsewhere && elsewhere->node != node && tier != TierKind::kRemote &&
      tier != TierKind::kPeer) {
    return absl::StrCat(name, "on ", settings_.nodes->Name(elsewhere->node), ", not on ",
                        settings_.nodes->Name(node));
  }
  if (tier == TierKind::kPeer) {
    return absl::StrCat(name, "absent (no other node has it in memory)");
  }
  if (tier == TierKind::kMemory) {
    return absl::StrCat(name, rebooted_ && node == kHere
                                  ? "absent (node rebooted)"
                                  : "absent (given up, or the memory was emptied)");
  }
  if (Inventory(tier).kind != InventoryState::Kind::kKnown) {
    return absl::StrCat(
        name, "not known: ",
        Inventory(tier).why.empty() ? "the tier is still being read" : Inventory(tier).why);
  }
  if (const std::optional<Rank> other = tier == TierKind::kRemote && checkpoint.manifest
                                            ? checkpoint.DoubtedFor(rank)
                                            : std::nullopt) {
    return absl::StrCat(name, "leaves out what rank ", *other, "'s may have, which is ",
                        BadOrGone(checkpoint, *other));
  }
  return absl::StrCat(
      name, copy.kind == CopyState::Kind::kGood ? "not named by a manifest yet" : "absent");
}

void Coordinator::On(const FetchFailed& m, Turn& t) {
  const bool replaced = m.attempt == attempt() && SeatedElsewhere(m.rank, t.from);
  const bool stale = replaced || (session_ && session_->loading() &&
                                  (session_->id() != m.session || session_->round() != m.round));
  // (Which of the peers has none, or a bad one, its node says for itself.)
  if (m.from != TierKind::kPeer && (m.source_bad || absl::IsNotFound(m.status))) {
    On(ShardBad{m.checkpoint, m.rank, Message(m.status), m.from}, t);
  } else if (!stale) {  // not what an earlier round heard late
    failed_sources_[m.rank][m.from] = Message(m.status);
  }
  if (m.token == 0 || !IsCurrent(m.attempt, m.token, t)) {
    return;
  }
  if (replaced) {
    return Refuse(m.token, TakenElsewhere(m.rank), t);
  }
  NextSource(m, t);
}

// A rank says that what it was offered is bad. If that was brought from another tier, where it
// verified clean, this rank does not get it from there again: it would go round for ever.
std::set<TierKind> Coordinator::SourcesSpent(Rank rank, const std::string& problem) {
  if (const auto offered = offered_from_.find(rank);
      offered != offered_from_.end() && offered->second != TierKind::kMemory) {
    failed_sources_[rank][offered->second] = problem;
  }
  std::set<TierKind> spent;
  for (const auto& [tier, why] : failed_sources_[rank]) {
    spent.insert(tier);
  }
  return spent;
}

// Another source of the same step; else the session falls back, or ends, for all ranks.
void Coordinator::NextSource(const FetchFailed& m, Turn& t) {
  const std::string what =
      absl::StrCat(ToAbsl(TierName(m.from)), " copy of rank ", m.rank, ": ", Message(m.status));
  std::set<TierKind> without;
  for (const auto& [tier, why] : failed_sources_[m.rank]) {
    without.insert(tier);
  }
  const auto it = checkpoints_.find(m.checkpoint);
  const bool more = it != checkpoints_.end() &&
                    NearestFor(it->second, m.rank, SeatOf(m.rank), without).has_value();
  const Member* member = members_.Find(m.rank);
  const bool takes_part = session_ && member != nullptr && session_->id() == m.session &&
                          session_->loading() && session_->Has(m.rank, member->process);
  if (takes_part && (m.round != session_->round() || session_->checkpoint() != m.checkpoint)) {
    return OfferSource(m.token, m.rank, session_->id(), session_->round(), session_->checkpoint(),
                       t);
  }
  if (session_ && session_->loading() &&
      (session_->id() != m.session || session_->round() != m.round)) {
    return Refuse(m.token,
                  {absl::StatusCode::kUnavailable, v1::Failure::REASON_UNSPECIFIED,
                   absl::StrCat(what, "; the restore went on without this rank: enter it again")},
                  t);
  }
  if (more) {
    Tell(Report::Kind::kSessionFellBack,
         absl::StrCat("step ", m.checkpoint.step, ": ", what, "; its next copy is used"), 0, t);
    return OfferSource(m.token, m.rank, m.session, m.round, m.checkpoint, t);
  }
  // (What a peer has is bad, and so is, or is not there, what all others had.)
  const bool all_bad = absl::IsDataLoss(m.status) && it != checkpoints_.end() &&
                       !NearestFor(it->second, m.rank, SeatOf(m.rank), {});
  const bool readable_later = !without.empty() && !all_bad;
  if (readable_later && takes_part && WaitsForSource(m, t)) {
    return;
  }
  if (readable_later) {
    const Failure failure{
        absl::StatusCode::kUnavailable, v1::Failure::REASON_UNSPECIFIED,
        absl::StrCat("restore of job '", name_, "': step ", m.checkpoint.step, " of attempt ",
                     m.checkpoint.attempt, " cannot be read now: ", what,
                     "; restore again, or choose another step: ckptctl restore ", name_,
                     " --step N")};
    failed_sources_.erase(m.rank);
    return takes_part ? FailSession(failure, t, m.token) : Refuse(m.token, failure, t);
  }
  const LoadReported report{m.token, m.attempt, m.rank, m.session, m.round,
                            false,   true,      false,  what};
  if (takes_part) {
    return FallBack(report, t);
  }
  return ReportDecided(report, t);
}

}  // namespace holdfast
