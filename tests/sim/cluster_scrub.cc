// Copies in the durable tiers that go bad, the scrub that finds them, and what is judged of their
// being written anew (docs/protocol.md §11).
#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "holdfast/v1/peer.pb.h"
#include "server/coordinator.h"
#include "tests/sim/cluster_world.h"

namespace holdfast::sim::cluster {

using std::chrono::seconds;

namespace {

constexpr size_t kSmallCluster = 16;  // a larger one reads again seldom
constexpr uint64_t kReadAtOnce = 8;   // copies, of those that are listed
constexpr int64_t kMendedWithin = Duration(seconds(45)).count();
constexpr int64_t kTriesWithin = Duration(seconds(10)).count();
constexpr size_t kTriesMax = 20;

bool IsBad(const TierCopy& copy) {
  return copy.token != copy.bytes;
}

}  // namespace

// ---- What goes wrong ----

// What a look at the tier sees: its image is cut, or its record damaged as well.
void World::CutCopy(SimTier& tier, cluster::Place place) {
  if (tier.copies.empty()) {
    return;
  }
  auto it = tier.copies.begin();
  std::advance(it, static_cast<ptrdiff_t>(t.Below(tier.copies.size())));
  const bool record = place.tier == TierKind::kNvme && t.Chance(0.4);
  it->second.torn = record ? TierCopy::Torn::kRecord : TierCopy::Torn::kImage;
  it->second.bytes = NewToken();
  Trace(absl::StrCat(std::string(TierName(place.tier)), " of ", nodes_[place.node]->name, ": ",
                     it->first.ToString(), record ? " has lost its record" : " is cut"));
  Count(place.tier == TierKind::kNvme ? Fault::kNvmeCopyCut : Fault::kRemoteCopyCut);
  truth.DamagedUnnoticed(it->first, place);
}

// ---- The scrub ----

void Node::Scrub() {
  if (w_.options.rates == Rates::kErasures) {
    return;  // it is about etcd
  }
  const bool large = w_.nodes() > kSmallCluster || w_.options.rates == Rates::kRealistic;
  After(large         ? w_.t.Millis(60'000, 120'000)
        : w_.stormy() ? w_.t.Millis(1000, 8000)
                      : w_.t.Millis(5000, 10'000),
        [this] {
          const AdminToken token = next_asked_++;
          asked_[token] = [this](const AdminReply& reply) {
            if (const auto* listed = std::get_if<ListedShards>(&reply.reply)) {
              ReadAgain(listed->shards);
            }
          };
          Feed(AdminRequest{token, Caller{{1, 1}, 0, 0}, ListCopies{}});
          Scrub();
        });
}

void Node::ReadAgain(const std::vector<ReadableShard>& shards) {
  const double chance =
      w_.settled() ? 1 : static_cast<double>(kReadAtOnce) / static_cast<double>(shards.size() + 1);
  for (const ReadableShard& shard : shards) {
    if (!w_.t.Chance(chance)) {
      continue;
    }
    if (shard.tier == TierKind::kMemory) {
      ReadSlotAgain(shard);
    } else {
      ReadCopyAgain(shard);
    }
  }
}

void Node::ReadSlotAgain(const ReadableShard& shard) {
  const FilePtr file = FindFile(shard.slot);
  if (!file || !file->record || file->record->copy.generation != shard.copy.generation) {
    return;
  }
  if (file->token != file->record->token) {
    w_.counts.states["scrub: bad in memory"]++;
    Complete(CopyFoundBad{shard.slot, shard.copy.generation, "digests differ"});
  }
}

void Node::ReadCopyAgain(const ReadableShard& shard) {
  const SimTier& tier = TierOf(shard.tier);
  const ShardId id = shard.copy.id;
  if (w_.t.now() < tier.hung_until.ns || !TierFault(shard.tier, false).ok()) {
    return;
  }
  const auto copy = tier.copies.find(id);
  if (copy == tier.copies.end() || IsBad(copy->second)) {
    w_.counts.states[copy == tier.copies.end() ? "scrub: gone" : "scrub: bad"]++;
    return Complete(DurableCopyJudged{
        shard.tier, id, copy == tier.copies.end() ? "the copy is gone" : "digests differ",
        w_.stormy() && w_.t.Chance(0.1)});
  }
  if (w_.t.Chance(0.1)) {  // (told of each, which changes nothing as a rule)
    Complete(DurableCopyJudged{shard.tier, id, "", false});
  }
}

std::string Node::AsUnderstood(std::string message) const {
  v1::PeerMessage read;
  if (knows_mending || !read.ParseFromString(message) || !read.has_flush_wanted() ||
      !read.flush_wanted().replace()) {
    return message;
  }
  w_.counts.states["repair: asked of an earlier version"]++;
  read.mutable_flush_wanted()->clear_replace();
  return read.SerializeAsString();
}

// ---- What is judged ----

// Whoever commands this node just now, as a host of the job, and under which epoch; empty: it is
// not known.
std::string Node::CommanderOf(const JobUuid& uuid) const {
  if (!heard_of_.empty()) {
    return heard_of_;
  }
  const std::string job = w_.truth.NameOf(uuid.ToBytes());
  return w_.truth.ActsFor(job) == name ? absl::StrCat(name, " ", w_.truth.HighestEpoch(job)) : "";
}

// Neither side has lost the other since: what was asked for then is under way for that host, too.
bool Node::IsUnderWayFor(const std::string& commander, int64_t then) const {
  const std::string host = commander.substr(0, commander.find(' '));
  if (host.empty() || host == name) {
    return !host.empty();
  }
  const Node& of = w_.node(w_.IndexOf(host));
  return of.up() && HasHeardSince(host, then) && of.HasHeardSince(name, then);
}

bool Node::HasHeardSince(const std::string& node, int64_t then) const {
  const auto lost = lost_at_.find(node);
  return members_at_ < then && (lost == lost_at_.end() || lost->second < then);
}

// Of these: a copy that is written anew, or a flush.
size_t World::UnderWay(const std::string& commander,
                       const std::function<bool(const Node&, const SimDrain&)>& which) const {
  size_t count = 0;
  for (const std::unique_ptr<Node>& each : nodes_) {
    for (const auto& [id, drain] : each->drains_) {
      const bool same = !drain.cancelled && !drain.commander.empty() &&
                        drain.commander == commander && each->IsUnderWayFor(commander, drain.begun);
      count += same && which(*each, drain) ? 1 : 0;
    }
  }
  return count;
}

// A repair begins. (What a flush finds bad on its way it writes anew, too, in its own turn.)
void Node::JudgeRepair(const FlushShard& a, const std::string& commander) {
  const ShardId& id = a.key.id;
  const std::string what =
      absl::StrCat(name, ": ", id.ToString(), " in ", std::string(TierName(a.to)));
  w_.counts.states[absl::StrCat("repair: from ", std::string(TierName(a.from)))]++;
  if (a.from == a.to) {
    w_.truth.Violated(what + " is to be written anew from itself");
  }
  const auto mended = [&](const SimDrain& drain) { return drain.mends && drain.id.job == id.job; };
  if (w_.UnderWay(commander, [&](const Node& at, const SimDrain& drain) {
        return &at == this && mended(drain) && drain.tier == a.to;
      }) >= kRepairsAtOnce) {
    w_.truth.Violated(absl::StrCat(what, " is to be written anew beside ", kRepairsAtOnce,
                                   " others of the tier"));
  }
  if (w_.UnderWay(commander, [&](const Node&, const SimDrain& drain) { return mended(drain); }) >=
      kRepairsOfJobAtOnce) {
    w_.truth.Violated(absl::StrCat(what, " is to be written anew beside ", kRepairsOfJobAtOnce,
                                   " others of the job"));
  }
  if (w_.UnderWay(commander, [&](const Node& at, const SimDrain& drain) {
        return drain.reads && !drain.mends && drain.tier == a.to && drain.id.job == id.job &&
               drain.id.checkpoint() == id.checkpoint() &&
               (a.to == TierKind::kRemote || &at == this);
      }) > 0) {
    w_.truth.Violated(what + " is to be mended while its step is being written there");
  }
  const auto known = known_bad_.find({id, a.from});
  if (a.from != TierKind::kMemory && known != known_bad_.end() &&
      known->second.first == commander && IsUnderWayFor(commander, known->second.second)) {
    const auto source = TierOf(a.from).copies.find(id);
    if (source != TierOf(a.from).copies.end() && IsBad(source->second)) {
      w_.truth.Violated(absl::StrCat(what, " is to be written anew from ",
                                     std::string(TierName(a.from)),
                                     ", of which this host was told that it is bad"));
    }
  }
  std::deque<int64_t>& tries = tries_[{id, a.to}];
  tries.push_back(w_.t.now());
  while (tries.front() + kTriesWithin < w_.t.now()) {
    tries.pop_front();
  }
  if (tries.size() > kTriesMax) {
    w_.truth.Violated(what + " is written anew again and again");
  }
}

// What is being mended stays where it is, and so does what it is read from.
void Node::JudgeRemoval(const RemoveCopies& a) {
  const auto there = [&](const Node& at, TierKind tier) {
    return tier == a.tier && (tier == TierKind::kRemote || &at == this);
  };
  if (w_.UnderWay(CommanderOf(a.job), [&](const Node& at, const SimDrain& drain) {
        return drain.mends && drain.id.job == a.job && drain.id.checkpoint() == a.checkpoint &&
               (there(at, drain.tier) || (drain.reads && there(at, *drain.reads)));
      }) > 0) {
    w_.truth.Violated(absl::StrCat(
        name, ": attempt ", a.checkpoint.attempt, " step ", a.checkpoint.step, " of ", a.job_name,
        " goes from ", std::string(TierName(a.tier)), " while a copy of it is written anew"));
  }
}

// Each that is told to be mended was written anew, once.
void World::ToldMended(const std::string& job, const std::string& text) {
  const size_t begin = text.find(" copy '");
  const size_t end = text.find("' was written anew");
  if (begin == std::string::npos || end == std::string::npos ||
      written_anew[text.substr(begin + 7, end - begin - 7)]-- == 0) {
    truth.Violated(
        absl::StrCat("job ", job, ": nobody has written anew what is told to be: ", text));
  }
}

// ---- In calm weather ----

bool World::IsGoodInRemote(const ShardId& id) const {
  const auto good = [this](const ShardId& shard) {
    const auto copy = remote.tier.copies.find(shard);
    return copy != remote.tier.copies.end() && !IsBad(copy->second);
  };
  const auto copy = remote.tier.copies.find(id);
  if (!good(id) || remote.tier.manifests.count({id.job, id.checkpoint()}) == 0) {
    return false;
  }
  const auto plan = remote.plans.find(copy->second.copy.plan);
  return copy->second.copy.file_bytes == 0 ||
         (plan != remote.plans.end() &&
          std::all_of(plan->second.begin(), plan->second.end(), [&](Rank rank) {
            return good({id.job, id.attempt, id.step, rank});
          }));
}

bool Node::HasGood(const ShardId& id, TierKind tier) const {
  if (!core_ || !knows_mending) {
    return false;
  }
  if (tier == TierKind::kNvme) {
    const auto copy = nvme_.copies.find(id);
    return copy != nvme_.copies.end() && !IsBad(copy->second);
  }
  return HoldsGood(id);
}

bool Node::HoldsGood(const ShardId& id) const {
  return std::any_of(files_.begin(), files_.end(), [&](const auto& each) {
    const File& file = *each.second;
    return file.record && file.record->copy.id == id && file.token == file.record->token;
  });
}

// Whether there is a good copy of it that can be read where it is to be written.
bool World::MayBeMended(const ShardId& id, cluster::Place place) const {
  if (place.tier == TierKind::kNvme) {
    const Node& at = *nodes_[place.node];
    return at.up() && at.knows_mending && (at.HasGood(id, TierKind::kMemory) || IsGoodInRemote(id));
  }
  // (What no manifest names is the flush's.)
  return remote.tier.manifests.count({id.job, id.checkpoint()}) > 0 &&
         std::any_of(nodes_.begin(), nodes_.end(), [&](const std::unique_ptr<Node>& each) {
           return each->HasGood(id, TierKind::kMemory) || each->HasGood(id, TierKind::kNvme);
         });
}

// Every bad copy is mended soon, if it can be.
void World::WatchMending(std::map<std::pair<ShardId, cluster::Place>, int64_t> since) {
  std::map<std::pair<ShardId, cluster::Place>, int64_t> still;
  const auto look = [&](const SimTier& tier, cluster::Place place) {
    for (const auto& [id, copy] : tier.copies) {
      if (!IsBad(copy) || !MayBeMended(id, place)) {
        continue;
      }
      const auto known = since.find({id, place});
      const int64_t then = known == since.end() ? t.now() : known->second;
      still[{id, place}] = then;
      if (t.now() - then > kMendedWithin) {
        truth.Violated(absl::StrCat(id.ToString(), " in ", std::string(TierName(place.tier)),
                                    " of ", nodes_[place.node]->name,
                                    " is bad, could be mended, and is not"));
      }
    }
  };
  for (const std::unique_ptr<Node>& each : nodes_) {
    look(each->nvme(), {TierKind::kNvme, each->index});
  }
  look(remote.tier, {TierKind::kRemote, 0});
  counts.states["end: bad copies that can be mended"] += still.size();
  t.After(seconds(2), [this, still] { WatchMending(still); });
}

// What a host says is being written anew some node writes, or has just written: what is under way
// after so long, and was before, and nobody writes, is so for ever.
void World::AskWhatIsMended(const std::string& name, std::set<std::string> doubted) {
  const auto node = index_.find(etcd.HostOf(name));
  if (node == index_.end() || !nodes_[node->second]->up()) {
    return;
  }
  v1::RepairRequest request;
  request.set_job(name);
  request.set_all_steps(true);
  request.set_look(true);
  nodes_[node->second]->Ask(request, 0, [this, name, doubted](const AdminReply& reply) {
    const auto* repair = std::get_if<v1::RepairReply>(&reply.reply);
    std::set<std::string> under_way;
    for (int i = 0; repair != nullptr && i < repair->copies_size(); ++i) {
      const v1::BadCopy& copy = repair->copies(i);
      const auto writes = [&](const std::unique_ptr<Node>& each) {
        return std::any_of(each->drains_.begin(), each->drains_.end(), [&](const auto& drain) {
          return drain.second.mends && drain.second.id.rank == copy.rank() &&
                 drain.second.id.checkpoint() == CheckpointId{copy.attempt(), copy.step()};
        });
      };
      if (copy.state() == v1::BadCopy::STATE_UNDER_WAY &&
          std::none_of(nodes_.begin(), nodes_.end(), writes)) {
        under_way.insert(copy.ShortDebugString());
      }
    }
    for (const std::string& copy : under_way) {
      if (doubted.count(copy) > 0) {
        return truth.Violated(
            absl::StrCat("job ", name, ": nobody writes anew what its host waits for: ", copy));
      }
    }
    counts.states[repair == nullptr ? "end: repair: not told" : "end: repair: told"]++;
    if (!under_way.empty()) {
      t.After(seconds(15), [this, name, under_way] { AskWhatIsMended(name, under_way); });
    }
  });
}

}  // namespace holdfast::sim::cluster
