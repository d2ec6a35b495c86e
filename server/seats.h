// The ranks of this node: who sits where, found by rank and by process, and counted by user. A seat
// stays when its connection closes; it goes when its process ends, leaves, or joins again.
//
//   const SeatId id = seats.Add({job, attempt, rank, world_size, process, uid, connection});
//   for (const SeatId other : seats.OfRank(job, rank)) …
//
// Owned by the Agent; not thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "base/ids.h"
#include "server/events.h"

namespace holdfast {

using SeatId = uint64_t;  // 0: none; never reused within one daemon's life

struct Seat {
  JobUuid job;
  Attempt attempt = 0;
  Rank rank = 0;
  uint32_t world_size = 0;
  ProcessId process;
  uint32_t uid = 0;
  ConnectionId connection = 0;  // 0: its connection has gone, its process lives
  bool superseded = false;
  std::optional<Step> last_begun = std::nullopt;  // of its attempt
  std::optional<Step> passed = std::nullopt;      // that it has gone on beyond, as far as it tells
  // What its saves descend from, once a coordinator has said so: it does not change any more.
  std::optional<std::vector<Descent>> line = std::nullopt;
};

class SeatTable {
 public:
  SeatId Add(const Seat& seat);
  std::optional<Seat> Erase(SeatId id);
  const Seat* Find(SeatId id) const;
  void Disconnect(SeatId id);
  void SetLastBegun(SeatId id, Step step);
  void SetPassed(SeatId id, Step step);
  void SetLine(SeatId id, std::optional<std::vector<Descent>> line);
  // Of all seats of attempts of the job below this one.
  void Supersede(const JobUuid& job, Attempt below);

  const std::set<SeatId>& OfRank(const JobUuid& job, Rank rank) const;
  const std::set<SeatId>& OfProcess(const ProcessId& process) const;
  bool AnyOf(const JobUuid& job) const;
  bool AnyCurrentOf(const JobUuid& job) const;  // that is not superseded
  size_t CountOfUid(uint32_t uid) const;
  size_t size() const { return seats_.size(); }
  const std::map<SeatId, Seat>& all() const { return seats_; }

 private:
  std::map<SeatId, Seat> seats_;
  std::map<std::pair<JobUuid, Rank>, std::set<SeatId>> by_rank_;
  std::map<ProcessId, std::set<SeatId>> by_process_;
  std::map<uint32_t, size_t> by_uid_;
  SeatId next_ = 1;
};

}  // namespace holdfast
