// What must always hold between slots, seats, requests and jobs (design.md §6).
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "server/agent.h"

namespace holdfast {

std::string Agent::CheckInvariants() const {
  uint64_t bytes = 0;
  std::map<ProcessId, uint32_t> references;
  for (const auto& [job, stop] : stops_) {
    if (!seats_.AnyOf(job)) {
      return "a job without ranks here is told to end";
    }
  }
  for (const auto& [token, pending] : pending_) {
    if (pending.where == Where::kStanding && !pending.deadline) {
      return absl::StrCat("request ", token, ": a rank stands still for ever");
    }
  }
  for (const auto& [id, slot] : slots_) {
    const std::string where = absl::StrCat("slot ", id, ": ");
    bytes += slot.bytes + slot.beside;
    if (slot.writer) {
      ++references[*slot.writer];
    }
    for (const ReadHold& hold : slot.readers) {
      ++references[hold.process];
    }
    if (slot.lent && (!slot.extra || slot.writer)) {
      return where + "is kept for other nodes, and is a rank's";
    }
    if (slot.loaded && slot.state == SlotState::kSealed && (!slot.lent || !HeldByAnybody(slot))) {
      return where + "was loaded for others, who read it no more";
    }
    const bool filling = Filling(slot.state);
    if (slot.state == SlotState::kWriting && !slot.writer) {
      return where + "is being written by nobody";
    }
    if (slot.state == SlotState::kFree && HeldByAnybody(slot)) {
      return where + "is free and somebody reads it";
    }
    if (slot.state == SlotState::kUnpublishing && !slot.removing && !HeldByAnybody(slot)) {
      return where + "waits for nothing";
    }
    const auto indexed = shards_.find(slot.shard);
    const bool is_indexed = indexed != shards_.end() && indexed->second == id;
    if (((filling && !slot.lost && !slot.fetch) || slot.state == SlotState::kSealed) !=
        is_indexed) {
      return where +
             (is_indexed ? "is indexed and holds nothing" : "holds a shard that is not indexed");
    }
    if (slot.state == SlotState::kFree && slot.extra && !slot.lent) {
      return where + "is free and nobody's to fill";
    }
    if (slot.state == SlotState::kSealed) {
      const auto job = jobs_.find(slot.shard.job);
      if (job == jobs_.end()) {
        return where + "holds a copy of no job";
      }
      if (slot.copy.id != slot.shard || slot.copy.generation != slot.generation) {
        return where + "holds another copy than it says";
      }
    }
    if (slot.token != 0 && slot.state != SlotState::kCreating && slot.state != SlotState::kNoting &&
        slot.state != SlotState::kHanding && slot.state != SlotState::kPublishing) {
      return where + "somebody waits for it that it does not know of";
    }
  }
  for (const auto& [shard, id] : shards_) {
    const auto slot = slots_.find(id);
    if (slot == slots_.end() || slot->second.shard != shard) {
      return absl::StrCat(shard.ToString(), " is indexed in slot ", id, ", which does not hold it");
    }
  }
  if (bytes != bytes_used_) {
    return absl::StrCat("slots have ", bytes, " bytes, ", bytes_used_, " are counted");
  }
  // Every committed checkpoint has a sealed copy of every rank.
  for (const auto& [uuid, job] : jobs_) {
    if (job.coordinator == nullptr) {
      continue;
    }
    // Whatever the coordinator believes to be good in this node's nvme lies there. (Not the other
    // way round: there may also be what it does not count, which is a save of the same name whose
    // state was lost, what came to lie there when the step had been given up, and what it has
    // decided to remove and not said yet. What is bad it may remember when it is gone.)
    for (const ShardId& shard : job.coordinator->GoodAt(TierKind::kNvme, kHere)) {
      const DriveCopies::Copy* there = drive_copies_.Find(shard);
      if (removals_.count(uuid) == 0 &&
          (there == nullptr || there->state != DriveCopies::State::kThere)) {
        return absl::StrCat(shard.ToString(), " is believed to be in nvme, and does not lie there");
      }
    }
    if (clustered()) {
      continue;  // ranks, and their copies, may be on other nodes
    }
    std::map<CheckpointId, uint32_t> sealed;
    std::map<CheckpointId, uint32_t> world;
    for (auto it = shards_.lower_bound({uuid, 0, 0, 0});
         it != shards_.end() && it->first.job == uuid; ++it) {
      const Slot& slot = slots_.at(it->second);
      sealed[it->first.checkpoint()] += slot.state == SlotState::kSealed ? 1 : 0;
      world[it->first.checkpoint()] = slot.world_size;
    }
    for (const CheckpointId& id : job.coordinator->AllCheckpoints()) {
      if (job.coordinator->IsCommittedIn(TierKind::kMemory, id) && sealed[id] != world[id]) {
        return absl::StrCat("job '", job.name, "' attempt ", id.attempt, " step ", id.step,
                            " is committed with ", sealed[id], " of ", world[id], " sealed copies");
      }
    }
  }
  for (const auto& [id, op] : drains_) {
    if (op.slot && (slots_.count(*op.slot) == 0 || slots_.at(*op.slot).drains.count(id) == 0)) {
      return absl::StrCat("drain ", id, " reads slot ", *op.slot, ", which does not know of it");
    }
  }
  for (const auto& [shard, fetch] : fetches_) {
    const auto slot = slots_.find(fetch.slot);
    if (slot == slots_.end() || !slot->second.fetch || slot->second.shard != shard) {
      return absl::StrCat(shard.ToString(), " is being fetched into slot ", fetch.slot,
                          ", which does not know of it");
    }
  }
  size_t ahead = 0;
  for (const auto& [shard, prefetch] : prefetches_) {
    if (prefetch.slot && (slots_.count(*prefetch.slot) == 0 || !slots_.at(*prefetch.slot).ahead)) {
      return absl::StrCat(shard.ToString(), " is brought ahead into slot ", *prefetch.slot,
                          ", which does not know of it");
    }
    ahead += prefetch.slot ? 1 : 0;
  }
  if (ahead > kPrefetchesAtOnce) {
    return absl::StrCat(ahead, " shards are brought into memory ahead at a time");
  }
  for (const auto& [shard, load] : loads_) {
    if (load.waiting.empty()) {
      return absl::StrCat(shard.ToString(), " is loaded for nobody");
    }
    if (load.slot && (slots_.count(*load.slot) == 0 || !slots_.at(*load.slot).lent)) {
      return absl::StrCat(shard.ToString(), " is to be loaded into slot ", *load.slot,
                          ", which is not lent");
    }
    if (load.slot && !ComesInto(shard, slots_.at(*load.slot))) {
      return absl::StrCat(shard.ToString(), " waits for slot ", *load.slot,
                          ", which gets something else");
    }
  }
  for (const auto& [shard, replica] : replicas_) {
    if (replica.slot && (slots_.count(*replica.slot) == 0 || !slots_.at(*replica.slot).lent)) {
      return absl::StrCat(shard.ToString(), " is to be kept in slot ", *replica.slot,
                          ", which is not lent");
    }
    if (replica.slot && !ComesInto(shard, slots_.at(*replica.slot))) {
      return absl::StrCat(shard.ToString(), " waits for slot ", *replica.slot,
                          ", which gets something else");
    }
  }
  for (const auto& [id, connection] : connections_) {
    ++references[connection.caller.process];
    if (connection.seat != 0 && FindSeat(connection.seat) == nullptr) {
      return absl::StrCat("connection ", id, " has a seat that is not there");
    }
    for (const RequestToken token : connection.pending) {
      if (pending_.count(token) == 0) {
        return absl::StrCat("connection ", id, " waits for a request that is not there");
      }
    }
  }
  for (const auto& [id, seat] : seats_.all()) {
    ++references[seat.process];
  }
  for (const auto& [process, known] : processes_) {
    if (known.references != references[process] || known.references == 0) {
      return absl::StrCat(process.ToString(), " is referred to ", references[process], " times, ",
                          known.references, " are counted");
    }
  }
  for (const auto& [process, count] : references) {
    if (count > 0 && processes_.count(process) == 0) {
      return absl::StrCat(process.ToString(), " is not watched");
    }
  }
  for (const auto& [token, pending] : pending_) {
    const auto connection = connections_.find(pending.connection);
    if (connection == connections_.end() || connection->second.pending.count(token) == 0) {
      return absl::StrCat("request ", token, " belongs to no connection");
    }
    if (pending.deadline && deadlines_.count({*pending.deadline, token}) == 0) {
      return absl::StrCat("request ", token, " has a deadline that nobody watches");
    }
    if (!pending.deadline && pending.kind != v1::ClientFrame::kSeal) {
      return absl::StrCat("request ", token, " has no deadline");
    }
  }
  std::string broken = CheckParts();
  return broken.empty() ? CheckGatherings() : broken;
}

// Each is being opened, or its reader's connection is there; what is read is asked for.
std::string Agent::CheckParts() const {
  std::map<ConnectionId, size_t> of_reader;
  std::map<uint32_t, size_t> of_user;
  std::set<std::pair<ConnectionId, uint64_t>> named;
  std::set<RequestToken> reading;
  for (const auto& [opened, parts] : parts_) {
    const std::string where = absl::StrCat("parts ", opened, ": ");
    const auto drain = drains_.find(opened);
    const bool opening = drain != drains_.end() && drain->second.kind == DrainOp::Kind::kOpen &&
                         drain->second.in_parts;
    if (parts.open == opening) {
      return where + (opening ? "are open, and being opened" : "nobody opens them");
    }
    const auto connection = connections_.find(parts.connection);
    if (connection != connections_.end()) {
      of_reader[parts.connection] += parts.hold != 0 ? 1 : 0;
      ++of_user[connection->second.caller.uid];
    }
    if (parts.open && (connection == connections_.end() || parts.hold == 0 || parts.bytes == 0)) {
      return where + "are open for nobody";
    }
    if (parts.hold != 0 && !named.emplace(parts.connection, parts.hold).second) {
      return where + "have another one's name";
    }
    if (parts.reading == 0) {
      continue;
    }
    const auto pending = pending_.find(parts.reading);
    if (!parts.open || pending == pending_.end() || pending->second.where != Where::kParts ||
        pending->second.connection != parts.connection || !reading.insert(parts.reading).second) {
      return where + "are read for nobody";
    }
  }
  for (const auto& [token, pending] : pending_) {
    if (pending.where == Where::kParts && reading.count(token) == 0) {
      return absl::StrCat("request ", token, " waits for parts that nobody reads");
    }
  }
  for (const auto& [opened, op] : drains_) {
    if (op.kind == DrainOp::Kind::kOpen && op.in_parts && parts_.count(opened) == 0) {
      return absl::StrCat("drain ", opened, " opens parts that are not there");
    }
  }
  const auto over = [](const auto& counts, size_t limit) {
    return std::any_of(counts.begin(), counts.end(),
                       [limit](const auto& count) { return count.second > limit; });
  };
  if (parts_.size() > kPartsMax || over(of_reader, kPartsPerReaderMax) ||
      over(of_user, kPartsPerUserMax)) {
    return absl::StrCat(parts_.size(), " shards are read in parts, more than somebody may");
  }
  return "";
}

// A step's records are gathered once at a time; who waits for them has not been answered.
std::string Agent::CheckGatherings() const {
  std::set<std::pair<JobUuid, CheckpointId>> steps;
  std::set<RequestToken> waiting;
  for (const auto& [gather, gathering] : gatherings_) {
    const std::string where = absl::StrCat("gathering ", gather, ": ");
    if (!steps.emplace(gathering.job, gathering.checkpoint).second) {
      return where + "its step's records are being gathered already";
    }
    for (const RequestToken token : gathering.waiting) {
      const auto pending = pending_.find(token);
      if (pending == pending_.end() || pending->second.where != Where::kRecords ||
          pending->second.job != gathering.job || !waiting.insert(token).second) {
        return where + "somebody waits for it who is not there, or for another one";
      }
    }
  }
  for (const auto& [token, pending] : pending_) {
    if (pending.where == Where::kRecords && waiting.count(token) == 0) {
      return absl::StrCat("request ", token, " waits for records that nobody gathers");
    }
  }
  return "";
}

}  // namespace holdfast
