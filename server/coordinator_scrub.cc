// Which node's scrub reads which copy in the remote tier: each the copies of the ranks that it has,
// and the host what nobody else reads. A node takes part by asking for its part again and again.
#include <chrono>
#include <utility>

#include "server/coordinator.h"

namespace holdfast {
namespace {

// One that has not asked for so long does not read: its scrub is off, or of a version that knows
// nothing of this. (Reading one large copy at a low bandwidth takes its time.)
constexpr Duration kScrubReaderFor = std::chrono::hours(2);

CheckpointId IdOf(const v1::ScrubCopy& copy) {
  return {copy.attempt(), copy.step()};
}

}  // namespace

NodeId Coordinator::ScrubReaderOf(Rank rank, MonotonicTime now) const {
  const NodeId seat = SeatOf(rank);
  const auto asked = scrub_readers_.find(seat);
  const bool reads = asked != scrub_readers_.end() && now < asked->second + kScrubReaderFor &&
                     absent_.count(seat) == 0;
  return reads ? seat : kHere;
}

void Coordinator::FillScrub(NodeId reader, const v1::PlanScrubRequest& request, size_t copies_max,
                            EventTime time, v1::PlanScrubReply& reply) {
  reply.set_job_uuid(uuid_.ToBytes());
  if (request.has_only()) {
    const auto it = checkpoints_.find(IdOf(request.only()));
    if (it != checkpoints_.end()) {
      FillScrubCopy(*it, request.only().rank(), time, reply);
    }
    return;
  }
  if (reader != kHere) {
    scrub_readers_[reader] = time.now;
  }
  const std::set<Rank>& own = members_.OnNode(reader);
  for (auto it = checkpoints_.lower_bound(IdOf(request.after())); it != checkpoints_.end(); ++it) {
    const bool begun = request.has_after() && it->first == IdOf(request.after());
    if (reader != kHere) {  // its own are few: the others are not gone through for them
      auto rank = begun ? own.upper_bound(request.after().rank()) : own.begin();
      for (; rank != own.end(); ++rank) {
        if (static_cast<size_t>(reply.copies_size()) == copies_max) {
          return reply.set_more(true);
        }
        FillScrubCopy(*it, *rank, time, reply);
      }
      continue;
    }
    const auto& shards = it->second.shards;
    auto shard = begun ? shards.upper_bound(request.after().rank()) : shards.begin();
    for (; shard != shards.end(); ++shard) {
      if (static_cast<size_t>(reply.copies_size()) == copies_max) {
        return reply.set_more(true);
      }
      if (ScrubReaderOf(shard->first, time.now) == kHere) {
        FillScrubCopy(*it, shard->first, time, reply);
      }
    }
  }
}

void Coordinator::FillScrubCopy(std::pair<const CheckpointId, Checkpoint>& of, Rank rank,
                                EventTime time, v1::PlanScrubReply& reply) {
  const auto shard = of.second.shards.find(rank);
  if (shard == of.second.shards.end()) {
    return;
  }
  const CopyState& copy = shard->second.at(TierKind::kRemote);
  if (copy.kind == CopyState::Kind::kNone) {
    return;
  }
  if (shard->second.scrub_known_unix_ms == 0) {
    shard->second.scrub_known_unix_ms = time.unix_ms;
  }
  v1::ScrubCopy& out = *reply.add_copies();
  out.set_attempt(of.first.attempt);
  out.set_step(of.first.step);
  out.set_rank(rank);
  out.set_world_size(of.second.world_size);
  out.set_location(copy.detail.location);
  out.set_bytes(copy.detail.file_bytes != 0 ? copy.detail.file_bytes : shard->second.bytes);
  out.set_known_unix_ms(shard->second.scrub_known_unix_ms);
  out.set_read_unix_ms(shard->second.scrub_read_unix_ms);
}

}  // namespace holdfast
