// Readers, which take no part in an attempt: which checkpoint they get, where their node can read
// it, and which checkpoints there are (docs/protocol.md §10, "Readers").
#include <iterator>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "server/coordinator.h"

namespace holdfast {
namespace {

constexpr size_t kUnreadBytesMax = 4096;  // of a listing's frame

Failure WithoutReason(absl::StatusCode code, std::string message) {
  return {code, v1::Failure::REASON_UNSPECIFIED, std::move(message)};
}

}  // namespace

void Coordinator::On(const AttachAsked& m, Turn& t) {
  if (!TryAnswer(m, t.from, t)) {
    KeepWaiting(m.token, m, t);
  }
}

void Coordinator::On(const RecordsAsked& m, Turn& t) {
  const auto known = checkpoints_.find(m.checkpoint);
  if (removed_ || known == checkpoints_.end() || !known->second.committed) {
    return Refuse(
        m.token,
        WithoutReason(absl::StatusCode::kAborted,
                      absl::StrCat("step ", m.checkpoint.step, " of attempt ", m.checkpoint.attempt,
                                   " is not there (any more); ask again")),
        t);
  }
  RecordsLocated located = LocateRecords(m.checkpoint, known->second, t.from);
  located.token = m.token;
  t.Say(std::move(located));
}

void Coordinator::On(const ListAsked& m, Turn& t) {
  if (!TryAnswer(m, t.from, t)) {
    KeepWaiting(m.token, m, t);
  }
}

void Coordinator::KeepWaiting(RequestToken token, Reader reader, Turn& t) {
  if (readers_.size() >= kReadersMax) {
    return Refuse(token,
                  WithoutReason(absl::StatusCode::kResourceExhausted,
                                absl::StrCat(kReadersMax, " readers of job '", name_,
                                             "' wait for its tiers already; try again")),
                  t);
  }
  readers_[token] = {std::move(reader), t.from};
}

// A tier has told what it has. (Thousands of readers may wait, for a step or two.)
void Coordinator::RetryReaders(Turn& t) {
  std::map<std::optional<CheckpointId>, bool> waits_on;
  const auto still = [&](const AttachAsked& m) {
    const auto [it, fresh] = waits_on.try_emplace(m.wanted);
    if (fresh) {
      it->second = MustWait(m);
    }
    return it->second;
  };
  std::erase_if(readers_, [&](const auto& waiting) {
    const auto& [reader, node] = waiting.second;
    if (const auto* attach = std::get_if<AttachAsked>(&reader); attach != nullptr) {
      return !still(*attach) && TryAnswer(*attach, node, t);
    }
    return TryAnswer(std::get<ListAsked>(reader), node, t);
  });
}

// What is still being read may have the checkpoint, or a newer one. (That goes for whoever waits
// for the same one.)
bool Coordinator::MustWait(const AttachAsked& m) const {
  if (removed_ || m.again || !m.any_tier) {
    return false;
  }
  const absl::StatusOr<CheckpointId> found = FindCommitted(m.wanted);
  return MayBeRead(m.wanted, found.ok() ? std::optional(*found) : std::nullopt);
}

// False: it must wait.
bool Coordinator::TryAnswer(const AttachAsked& m, NodeId node, Turn& t) {
  const auto refuse = [&](Failure failure) {
    Refuse(m.token, std::move(failure), t);
    return true;
  };
  const auto tell = [&](ShardLocated located) {
    located.token = m.token;
    t.Say(std::move(located));
    return true;
  };
  if (removed_) {
    return refuse(WithoutReason(absl::StatusCode::kAborted,
                                absl::StrCat("attach: job '", name_, "' is being removed")));
  }
  if (m.again) {  // it may not be whole any more for that very copy: what else there is tells why
    const auto known = m.wanted ? checkpoints_.find(*m.wanted) : checkpoints_.end();
    if (known == checkpoints_.end()) {
      return refuse(WithoutReason(absl::StatusCode::kAborted,
                                  "attach: the checkpoint was given up just now; ask again"));
    }
    return tell(Locate(*m.wanted, m.rank, node, m.parts));
  }
  if (MustWait(m)) {
    return false;
  }
  const absl::StatusOr<CheckpointId> found = FindCommitted(m.wanted);
  if (!found.ok()) {
    return refuse(m.wanted ? WithoutReason(absl::StatusCode::kNotFound, Message(found.status()))
                           : NothingCommitted());
  }
  const uint32_t world_size = WorldSizeOf(*found);
  if (m.any_tier && m.rank >= world_size) {
    return refuse({absl::StatusCode::kNotFound, v1::Failure::REASON_TOPOLOGY,
                   absl::StrCat("attach: step ", found->step, " of attempt ", found->attempt,
                                " was saved by ", world_size, " ranks; it has no rank ", m.rank)});
  }
  return tell(Locate(*found, m.rank, node, m.parts));
}

bool Coordinator::TryAnswer(const ListAsked& m, NodeId, Turn& t) {
  if (m.may_wait && InventoryPending() && !removed_) {
    return false;
  }
  Listed listed{m.token, {}};
  FillListing(m.before, listed.listing);
  t.Say(std::move(listed));
  return true;
}

// What a reader on that node can open: its own memory and nvme, and the remote tier; where parts
// will do, what other nodes have, too.
ShardLocated Coordinator::Locate(CheckpointId id, Rank rank, NodeId node, bool parts) const {
  const Checkpoint& checkpoint = checkpoints_.at(id);
  ShardLocated located;
  located.checkpoint = id;
  located.world_size = checkpoint.world_size;
  if (checkpoint.shards.count(rank) == 0) {
    return located;  // (who asks for memory alone may name any rank)
  }
  for (const TierKind tier : kAllTiers) {
    if (!Configured(tier) || (tier == TierKind::kPeer && !parts)) {
      continue;
    }
    located.places.push_back({tier, checkpoint.ReadableOn(node, rank, tier)
                                        ? ""
                                        : WhyNot(checkpoint, rank, node, tier, "")});
    if (tier == TierKind::kPeer) {
      located.peers = PeerNames(checkpoint, rank, node);
      continue;
    }
    if (tier == TierKind::kRemote && parts && Configured(TierKind::kPeer)) {
      located.remote_reader = RemoteReaderOf(RemoteReaders(), checkpoint, rank);
    }
    const std::optional<CopyPlace> good = checkpoint.GoodPlace(rank, tier);
    if (!parts && located.elsewhere.empty() && tier != TierKind::kRemote && good &&
        good->node != node) {
      located.elsewhere =
          absl::StrCat(ToAbsl(TierName(tier)), " of ", settings_.nodes->Name(good->node));
    }
  }
  return located;
}

// Each record from where the shard is at hand; of the remote tier from the node that reads it for
// all.
RecordsLocated Coordinator::LocateRecords(CheckpointId id, const Checkpoint& checkpoint,
                                          NodeId node) const {
  RecordsLocated located;
  located.checkpoint = id;
  located.world_size = checkpoint.world_size;
  std::map<std::pair<std::string, bool>, uint32_t> known;
  const auto holder = [&](const std::string& name, bool remote) {
    const auto [at, fresh] = known.try_emplace({name, remote}, located.holders.size());
    if (fresh) {
      located.holders.push_back({name, remote});
    }
    return at->second;
  };
  const std::vector<NodeId> readers = RemoteReaders();
  std::vector<std::optional<uint32_t>> of_rank(checkpoint.world_size);
  for (const auto& [rank, shard] : checkpoint.shards) {
    const bool here = checkpoint.ReadableOn(node, rank, TierKind::kMemory) ||
                      checkpoint.ReadableOn(node, rank, TierKind::kNvme) ||
                      checkpoint.PeersWith(rank, node) == std::vector{node};
    if (here) {
      of_rank[rank] = holder(settings_.nodes->Name(node), false);
    }
    for (const TierKind tier : {TierKind::kMemory, TierKind::kPeer, TierKind::kNvme}) {
      if (const auto good = checkpoint.GoodPlace(rank, tier); good && !of_rank[rank]) {
        of_rank[rank] = holder(settings_.nodes->Name(good->node), false);
      }
    }
    if (!of_rank[rank] && checkpoint.ReadableOn(node, rank, TierKind::kRemote)) {
      const std::string reader = RemoteReaderOf(readers, checkpoint, rank);
      of_rank[rank] = holder(reader.empty() ? settings_.nodes->Name(node) : reader, true);
    }
  }
  for (const std::optional<uint32_t>& each : of_rank) {
    const uint32_t at = each.value_or(static_cast<uint32_t>(located.holders.size()));
    if (located.runs.empty() || located.runs.back().holder != at) {
      located.runs.push_back({at, 0});
    }
    ++located.runs.back().count;
  }
  return located;
}

// Where the ranks run on several nodes: those of them that have the remote tier read it for all,
// each its share of the files, so that no byte is read by two. (None: whoever wants a file reads
// it.)
std::vector<NodeId> Coordinator::RemoteReaders() const {
  std::vector<NodeId> readers;
  if (members_.by_node().size() < 2) {
    return readers;
  }
  for (const auto& [node, ranks] : members_.by_node()) {
    const auto there = lenders_.find(node);
    if (there != lenders_.end() && there->second.reads_remote) {
      readers.push_back(node);
    }
  }
  return readers;
}

// Files of ranks that follow each other are read by the same node.
std::string Coordinator::RemoteReaderOf(const std::vector<NodeId>& readers,
                                        const Checkpoint& checkpoint, Rank rank) const {
  return readers.empty() ? ""
                         : settings_.nodes->Name(
                               readers[uint64_t{rank} * readers.size() / checkpoint.world_size]);
}

// Whether a tier that is still being read may change what a reader gets.
bool Coordinator::MayBeRead(const std::optional<CheckpointId>& wanted,
                            const std::optional<CheckpointId>& found) const {
  if (!InventoryPending() || (wanted && found)) {
    return false;
  }
  return !found || WaitForInventory({*found}).has_value();
}

Failure Coordinator::NothingCommitted() const {
  if (EverCommitted()) {
    return Unreadable();
  }
  return {absl::StatusCode::kNotFound, v1::Failure::REASON_NOTHING_TO_RESTORE,
          absl::StrCat("job '", name_, "' has no committed step on its line of descent")};
}

// Those that can be read, newest first.
void Coordinator::FillListing(std::optional<CheckpointId> before, v1::Listing& listing) const {
  auto it = before ? std::make_reverse_iterator(checkpoints_.lower_bound(*before))
                   : checkpoints_.rbegin();
  for (; it != checkpoints_.rend(); ++it) {
    const auto& [id, checkpoint] = *it;
    if (!checkpoint.committed) {
      continue;
    }
    if (static_cast<size_t>(listing.checkpoints_size()) == kListedMax) {
      listing.set_more(true);
      break;
    }
    v1::ListedCheckpoint& out = *listing.add_checkpoints();
    out.set_attempt(id.attempt);
    out.set_step(id.step);
    out.set_world_size(checkpoint.world_size);
    out.set_on_line(OnLine(line_, id));
    for (const TierKind tier : kAllTiers) {
      if (checkpoint.CommittedAt(tier)) {
        out.add_tiers(std::string(TierName(tier)));
      }
    }
    out.set_bytes(checkpoint.bytes);
    out.set_unix_ms(checkpoint.unix_ms);
  }
  for (const TierKind tier : kAllTiers) {
    if (const std::string why = WhyUnread(tier); !why.empty() && Configured(tier)) {
      listing.set_unread(absl::StrCat(listing.unread(), listing.unread().empty() ? "" : "; ", why)
                             .substr(0, kUnreadBytesMax));
    }
  }
}

}  // namespace holdfast
