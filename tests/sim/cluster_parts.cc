// What processes of a simulated node read in parts, from other nodes' memory and drives and from
// the remote tier through the node that reads it for all (server/runtime/part_reader.h): the other
// nodes' real cores hold it. And the records of a step, gathered (record_gatherer.h).
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "tests/sim/cluster_world.h"

namespace holdfast::sim::cluster {

using std::chrono::seconds;

namespace {

constexpr uint64_t kPartsBytes = uint64_t{16} << 20;
constexpr Duration kSilence = seconds(10);      // from a node that was asked
constexpr Duration kIdleLongest = seconds(10);  // then the source is left
constexpr size_t kBadNodesBelieved = 1;

}  // namespace

bool Node::Hears(const Node& other) const {
  return other.up() && !other.suspended() && w_.network.Reaches(index, other.index);
}

Node::Parts* Node::FindParts(DrainId opened, uint64_t turn) {
  const auto found = parts_.find(opened);
  return found != parts_.end() && found->second.turn == turn ? &found->second : nullptr;
}

// ---- To open it ----

void Node::OpenParts(const OpenDurable& a) {
  Parts parts;
  parts.action = a;
  parts.files = std::make_shared<SimFiles>();
  parts.files->file = std::make_shared<File>();
  for (const std::string& peer : a.peers) {
    if (peer != name) {
      parts.places.push_back(peer);
    }
  }
  if (a.tier == TierKind::kRemote) {
    parts.places.emplace_back();
  }
  parts.status = absl::UnavailableError("no node was named");
  if (!parts_.emplace(a.drain, std::move(parts)).second) {
    return w_.truth.Violated(absl::StrCat(name, ": ", a.key.id.ToString(), " is opened twice"));
  }
  const bool slow = w_.stormy() && w_.t.Chance(0.02);
  After(slow ? w_.t.Millis(1000, 20'000) : w_.t.Millis(1, 20), [this, drain = a.drain] {
    if (parts_.count(drain) > 0 && !parts_.at(drain).cancelled) {
      FindSource(drain);
    }
  });
}

bool Node::Doubted(const Parts& parts, const std::string& place) {
  return parts.contradicted.size() > kBadNodesBelieved && parts.contradicted.count(place) > 0;
}

// The first that serves it, from `place` on; each once.
void Node::FindSource(DrainId opened) {
  Parts& parts = parts_.at(opened);
  const uint64_t turn = ++parts.turn;
  if (parts.tried++ == parts.places.size()) {
    if (parts.reading) {
      return EndReading(parts, parts.status);
    }
    parts.told = true;
    DurableOpened failed{opened, parts.status, false, {}};
    const bool here = !parts.places.empty() && parts.places.back().empty();
    failed.bad = here && absl::IsDataLoss(parts.status);
    if (!here) {
      failed.status = absl::UnavailableError(parts.status.message());
    }
    w_.counts.states["parts: not opened"]++;
    return Complete(failed);
  }
  const std::string& place = parts.places[parts.place];
  if (Doubted(parts, place)) {
    return SourceFailed(opened, turn, absl::UnavailableError("all copies contradict the digests"));
  }
  if (place.empty()) {
    return After(TierLatency(TierKind::kRemote),
                 [this, opened, turn] { ReadRemoteParts(opened, turn); });
  }
  Node& other = w_.node(w_.IndexOf(place));
  if (!Hears(other) || !MaybeFail(w_.stormy() ? 0.05 : 0).ok()) {
    return SourceFailed(opened, turn, absl::UnavailableError(place + " is not reached"));
  }
  if (parts.action.tier == TierKind::kRemote) {  // it reads the file for all
    return After(TierLatency(TierKind::kRemote), [this, opened, turn, &other] {
      Hears(other) ? ReadRemoteParts(opened, turn)
                   : SourceFailed(opened, turn, absl::UnavailableError("it went meanwhile"));
    });
  }
  AskForSource(opened, other);
}

// Its core holds the shard, and brings it into memory first where it lies on a drive.
void Node::AskForSource(DrainId opened, Node& other) {
  const Parts& parts = parts_.at(opened);
  const uint64_t turn = parts.turn;
  const CopyKey& key = parts.action.key;
  w_.t.After(w_.t.Millis(0, 5), [=, this, life = life_, &other, others_life = other.life_] {
    other.InLife(others_life, [=, this, &other] {
      other.Ask(HoldShard{key.job_name, key.id, 0, true}, 0, [=, this, &other](const auto& reply) {
        const Hold hold{&other, others_life, reply.token};
        w_.t.After(w_.t.Millis(0, 5), [=, this, &other] {
          Parts* const asks = life == life_ ? FindParts(opened, turn) : nullptr;
          if (asks == nullptr || asks->cancelled) {
            return reply.status.ok() ? LetGo(hold) : void();
          }
          if (!reply.status.ok()) {
            return SourceFailed(opened, turn, reply.status);
          }
          const ReadableShard& shard = std::get<ReadableShards>(reply.reply).shards.at(0);
          asks->hold = hold;
          asks->copy = shard.copy;
          asks->source = other.FindFile(shard.slot);
          SourceFound(opened);
        });
      });
    });
  });
  HearFrom(opened, turn, other, other.life_);
}

// A node that brings it into memory first says so as long as that takes.
void Node::HearFrom(DrainId opened, uint64_t turn, Node& other, uint64_t others_life) {
  After(kSilence, [=, this, &other] {
    const Parts* const waits = FindParts(opened, turn);
    if (waits == nullptr || waits->served || waits->cancelled) {
      return;
    }
    other.life_ == others_life&& Hears(other)
        ? HearFrom(opened, turn, other, others_life)
        : SourceFailed(opened, turn, absl::DeadlineExceededError("it says nothing"));
  });
}

// By this node or for it by another one.
void Node::ReadRemoteParts(DrainId opened, uint64_t turn) {
  Parts* const parts = FindParts(opened, turn);
  if (parts == nullptr || parts->cancelled) {
    return;
  }
  const absl::Status status = TierFault(TierKind::kRemote, false);
  const auto copy = w_.remote.tier.copies.find(parts->action.key.id);
  if (!status.ok() || copy == w_.remote.tier.copies.end()) {
    return SourceFailed(opened, turn, status.ok() ? absl::NotFoundError("no such copy") : status);
  }
  parts->copy = copy->second.copy.copy;
  parts->source = OpenedFile(copy->second);
  SourceFound(opened);
}

void Node::SourceFailed(DrainId opened, uint64_t turn, absl::Status status) {
  if (Parts* const parts = FindParts(opened, turn); parts != nullptr && !parts->cancelled) {
    parts->status = std::move(status);
    parts->place = (parts->place + 1) % parts->places.size();
    FindSource(opened);
  }
}

void Node::SourceFound(DrainId opened) {
  Parts& parts = parts_.at(opened);
  const ShardId& wanted = parts.action.key.id;
  if (parts.copy.id != wanted || parts.copy.world_size != parts.action.key.world_size) {
    w_.truth.Violated(absl::StrCat(name, ": gets ", parts.copy.id.ToString(), " of ",
                                   parts.copy.world_size, " ranks for ", wanted.ToString(), " of ",
                                   parts.action.key.world_size));
  }
  parts.served = true;
  if (parts.reading) {
    return ReadPartsNow(opened, parts.turn);
  }
  w_.counts.states[absl::StrCat("parts: opened, ", std::string(TierName(parts.action.tier)))]++;
  parts.told = true;
  DurableOpened told{opened, absl::OkStatus(), false, parts.copy, parts.files, kPartsBytes};
  Complete(told);
  LeaveWhenIdle(opened, parts.turn);
}

// ---- To read it ----

void Node::Do(const ReadParts& a) {
  const auto found = parts_.find(a.opened);
  if (found == parts_.end() || found->second.reading || !found->second.told) {
    return w_.truth.Violated(
        absl::StrCat(name, ": parts are to be read of what is not open, or is being read already"));
  }
  Parts& parts = found->second;
  parts.reading = a;
  parts.tried = 0;
  parts.status = absl::OkStatus();
  const std::string& place = parts.places[parts.place];
  if (a.contradicted && !place.empty()) {
    parts.contradicted.insert(place);
    LeaveSource(parts);
    parts.place = (parts.place + 1) % parts.places.size();
  }
  const uint64_t turn = parts.turn;
  After(w_.t.Millis(1, w_.stormy() ? 300 : 20), [this, opened = a.opened, turn] {
    Parts* const reads = FindParts(opened, turn);
    if (reads != nullptr && reads->reading) {
      reads->served ? ReadPartsNow(opened, turn) : FindSource(opened);
    }
  });
}

void Node::ReadPartsNow(DrainId opened, uint64_t turn) {
  Parts& parts = *FindParts(opened, turn);
  const absl::Status status = ReadFromSource(parts);
  if (status.ok()) {
    return EndReading(parts, status);
  }
  w_.counts.states["parts: the next node is asked"]++;
  LeaveSource(parts);
  SourceFailed(opened, parts.turn, status);
}

absl::Status Node::ReadFromSource(Parts& parts) {
  const std::string& place = parts.places[parts.place];
  if (!place.empty() && !Hears(w_.node(w_.IndexOf(place)))) {
    return absl::UnavailableError("the connection broke");
  }
  if (parts.hold) {
    const Node& other = *parts.hold->at;
    if (other.life_ != parts.hold->life) {
      return absl::UnavailableError("the connection broke");
    }
    if (parts.source == nullptr || parts.source->note.generation() != parts.copy.generation) {
      w_.truth.Violated(absl::StrCat(other.name, ": ", parts.copy.id.ToString(),
                                     " is held for parts, and its slot has another filling"));
    }
    if (!parts.source->record) {  // so it is not confirmed
      return absl::NotFoundError("it was removed while it was being read");
    }
  }
  File& memory = *parts.files->file;
  memory.record = parts.source->record;
  memory.token = parts.source->token;
  memory.content = parts.source->content;
  return absl::OkStatus();
}

void Node::EndReading(Parts& parts, absl::Status status) {
  const DrainId opened = parts.action.drain;
  const uint64_t turn = ++parts.turn;
  w_.counts.states[status.ok() ? "parts: read" : "parts: not read"]++;
  Complete(PartsRead{opened, std::exchange(parts.reading, std::nullopt)->token, std::move(status)});
  LeaveWhenIdle(opened, turn);
}

// What nothing is read of for long is let go of at the other node.
void Node::LeaveWhenIdle(DrainId opened, uint64_t turn) {
  After(kIdleLongest, [this, opened, turn] {
    Parts* const idle = FindParts(opened, turn);
    if (idle != nullptr && !idle->reading && idle->served) {
      w_.counts.states["parts: let go while nothing is read"]++;
      LeaveSource(*idle);
    }
  });
}

void Node::LeaveSource(Parts& parts) {
  ++parts.turn;
  parts.served = false;
  parts.source = nullptr;
  if (parts.hold) {
    LetGo(*std::exchange(parts.hold, std::nullopt));
  }
}

// ---- Its end ----

void Node::Do(const EndParts& a) {
  const auto found = parts_.find(a.opened);
  if (found == parts_.end()) {
    return w_.truth.Violated(name + ": parts end that are not open");
  }
  LeaveSource(found->second);
  parts_.erase(found);
}

// Of one that is being opened; it is ended then.
void Node::CancelParts(DrainId opened) {
  const auto found = parts_.find(opened);
  if (found != parts_.end() && !found->second.told) {
    Parts& parts = found->second;
    parts.told = parts.cancelled = true;
    LeaveSource(parts);
    w_.counts.states["parts: called off"]++;
    Complete(DurableOpened{opened, absl::CancelledError("as asked"), false, {}},
             w_.t.Millis(0, 500));
  }
}

// This daemon is over: its streams break.
void Node::ForgetParts() {
  for (auto& [opened, parts] : parts_) {
    LeaveSource(parts);
  }
  parts_.clear();
}

void Node::NoteReader(const SendReply& a) {
  if (!a.frame.has_attach() || a.frame.attach().parts_bytes() == 0) {
    return;
  }
  for (auto& [opened, parts] : parts_) {
    if (parts.files == a.files) {
      parts.connection = a.connection;
    }
  }
}

void Node::CheckPartsOf(ConnectionId connection) {
  for (const auto& [opened, parts] : parts_) {
    if (parts.connection == connection) {
      w_.truth.Violated(absl::StrCat(name, ": parts of ", parts.action.key.id.ToString(),
                                     " are kept for a connection that has gone"));
    }
  }
}

// ---- Records ----

// From whoever is said to have them; what is not there any more, or not reached, is left out.
void Node::Do(const GatherRecords& a) {
  std::set<Rank> named;
  for (const GatherRecords::Holder& holder : a.holders) {
    for (const auto& [first, count] : holder.ranks) {
      for (Rank rank = first; rank < first + count; ++rank) {
        if (rank >= a.world_size || !named.insert(rank).second) {
          w_.truth.Violated(absl::StrCat(name, ": rank ", rank, "'s record is to come from ",
                                         holder.node, ", and from another one, or there are ",
                                         a.world_size, " ranks"));
        }
      }
    }
  }
  After(w_.t.Millis(1, w_.stormy() ? 3000 : 50), [this, a] {
    RecordsGathered gathered{a.gather, MaybeFail(w_.stormy() ? 0.1 : 0), 0, nullptr};
    auto files = std::make_shared<SimFiles>();
    std::set<Rank> left_out;
    for (Rank rank = 0; rank < a.world_size; ++rank) {
      left_out.insert(rank);
    }
    for (const GatherRecords::Holder& holder : a.holders) {
      const Node& other = w_.node(w_.IndexOf(holder.node));
      if (&other != this && !Hears(other)) {
        continue;
      }
      for (const auto& [first, count] : holder.ranks) {
        for (Rank rank = first; rank < first + count; ++rank) {
          const ShardId id{a.job, a.checkpoint.attempt, a.checkpoint.step, rank};
          const SimTier& tier = holder.remote ? w_.remote.tier : other.nvme_;
          const FilePtr slot = holder.remote ? nullptr : other.FindSealed(id);
          const auto copy = tier.copies.find(id);
          if (slot != nullptr) {
            files->records.push_back(slot->record->copy);
          } else if (copy != tier.copies.end()) {
            files->records.push_back(copy->second.copy.copy);
          } else if (!w_.truth.MayLie(a.job_name, id.checkpoint(), rank,
                                      {holder.remote ? TierKind::kRemote : TierKind::kNvme,
                                       holder.remote ? 0 : other.index})) {
            continue;
          }  // (else a fault took it, and nobody has noticed)
          left_out.erase(rank);
        }
      }
    }
    w_.counts.states[!gathered.status.ok()                   ? "records: not gathered"
                     : files->records.size() == a.world_size ? "records: of all ranks"
                                                             : "records: some are left out"]++;
    if (w_.settled() && !left_out.empty()) {
      w_.truth.NoCopyTold({a.job, a.checkpoint.attempt, a.checkpoint.step, *left_out.begin()},
                          "its record is not among those that were gathered");
    }
    if (gathered.status.ok()) {
      gathered.bytes = 100 * files->records.size();
      gathered.files = files;
    }
    Complete(gathered);
  });
}

void Node::CheckRecords(const SendReply& a) const {
  if (!a.frame.has_read_records()) {
    return;
  }
  for (const SealedCopy& copy : static_cast<const SimFiles&>(*a.files).records) {
    if (copy.world_size != a.frame.read_records().world_size()) {
      w_.truth.Violated(absl::StrCat(name, ": the record of ", copy.id.ToString(),
                                     " is given out as that of a step of ",
                                     a.frame.read_records().world_size(), " ranks"));
    }
  }
}

}  // namespace holdfast::sim::cluster
