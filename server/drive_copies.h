// The copies that lie on this node's drives: of which jobs, where, how large. The agent's own
// index: what the tier's budget counts, and what another node's coordinator is told when it asks.
//
//   DriveCopies copies;
//   copies.Written(copy, now);                    // a flush has ended
//   copies.Seen(copy, began);                     // a scan that began then has found it
//   copies.Remove(job, step);                     // nobody reads it any more; it takes its room
//   copies.Removed(job, step, std::nullopt, now); // until its bytes have gone
//
// What counts is what lies there, whether or not anybody wants it: a copy that is bad, and one on a
// drive that is out of reach for a while, take their room, too.
//
// Owned by the Agent; not thread-safe.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "server/events.h"

namespace holdfast {

class DriveCopies {
 public:
  enum class State { kThere, kGoing, kAway };
  struct Copy {
    DurableCopy copy;
    State state = State::kThere;
    bool bad = false;
    std::string unread;     // not empty: bad, and no scan can read it: why
    MonotonicTime since{};  // when it was written, by this daemon; else 0
  };

  void Written(const DurableCopy& copy, MonotonicTime now);
  // What a scan that began then says of it is past: it is on its way out, or was removed or written
  // since.
  bool IsPast(const ShardId& id, MonotonicTime began) const;
  // False: that is so.
  bool Seen(const DurableCopy& copy, MonotonicTime began);
  // The same of one that it found, and could not read. (World size 0: what was known of it stays.)
  bool SeenBad(const BadDurableCopy& bad, MonotonicTime began);
  // Of the job, what was there before `as_of` and is not among these is not there.
  void DropUnseen(const JobUuid& job, MonotonicTime as_of, const std::set<ShardId>& seen);
  void SetBad(const ShardId& shard, bool bad);

  void Remove(const JobUuid& job, CheckpointId checkpoint);
  // `left`: of these ranks something is left, the removal has failed.
  void Removed(const JobUuid& job, CheckpointId checkpoint,
               const std::optional<std::vector<Rank>>& left, MonotonicTime now);
  // It goes no more: what is left of it is there.
  void Keep(const JobUuid& job, CheckpointId checkpoint);
  // Of all that is not away.
  void Forget(const JobUuid& job);

  // A directory that is out of reach, and one that has been read again: what is still away there is
  // gone.
  void SetAway(const std::string& dir);
  void DropAway(const std::string& dir);

  uint64_t Bytes() const { return bytes_; }
  uint64_t Bytes(const JobUuid& job) const;
  bool Any(const JobUuid& job) const { return Bytes(job) > 0 || jobs_.count(job) > 0; }
  const Copy* Find(const ShardId& shard) const;
  std::vector<Copy> Of(const JobUuid& job) const;

 private:
  using Copies = std::map<ShardId, Copy>;
  void Put(const DurableCopy& copy, MonotonicTime since);
  Copies::iterator Drop(Copies& copies, Copies::iterator it);
  template <typename Which>
  void DropIf(const JobUuid& job, const Which& which);

  std::map<JobUuid, Copies> jobs_;
  uint64_t bytes_ = 0;
  // Removals that have ended, the newest ones of each job: a scan may still have seen the copies.
  std::map<JobUuid, std::map<CheckpointId, MonotonicTime>> ended_;
};

}  // namespace holdfast
