// One restore of one attempt (docs/protocol.md §6): which ranks have entered, what they ask for,
// which step they are loading now, who has it. It decides nothing about slots, and tells nobody
// anything: its coordinator asks it what comes next and sends the messages.
//
//   session.Enter(rank, process, wish, token);
//   if (session.AllEntered()) session.BeginLoading(candidates);
//   … session.Report(rank, token); if (session.AllReported()) → decide on session.checkpoint()
//
// Owned by a Coordinator; not thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "server/messages.h"

namespace holdfast {

// What a rank asks of a session; all of them must ask for the same.
struct SessionWish {
  std::optional<CheckpointId> wanted;  // absent: newest; attempt 0: on the line
  bool reads_by_itself = false;        // it needs no source, and reports nothing
  std::string label{};                 // of its run; empty: none
  bool operator==(const SessionWish&) const = default;
};

// What the rank's library can do, and how long it waits.
struct SessionSkills {
  bool may_reshard = false;  // what another world size has saved will do
  bool reads_parts = false;  // what lies on other nodes will do, where it reads others' shards
  std::optional<MonotonicTime> until = std::nullopt;  // it waits no longer than that
  Duration whole{};                                   // how long that was when it asked
};

class Session {
 public:
  Session(uint64_t id, Attempt attempt, uint32_t world_size)
      : id_(id), attempt_(attempt), world_size_(world_size) {}

  uint64_t id() const { return id_; }
  Attempt attempt() const { return attempt_; }
  uint32_t round() const { return round_; }
  bool loading() const { return round_ > 0; }
  bool empty() const { return entries_.empty(); }
  const std::optional<CheckpointId>& wanted() const { return wish_.wanted; }
  const std::string& label() const { return wish_.label; }
  bool reads_by_itself() const { return wish_.reads_by_itself; }
  // The step of this round. Only while loading.
  CheckpointId checkpoint() const { return candidates_.front(); }
  // What must not be given up while the session lasts: this round's step and what it may fall back
  // to.
  bool Holds(CheckpointId checkpoint) const;

  // Why this rank cannot take part, if another one asked for something else; names both.
  std::optional<std::string> Conflict(Rank rank, const SessionWish& wish) const;
  // Whether this rank is in the session, its step is chosen, and the rank now asks for something
  // else: what it asks for cannot be answered from here.
  bool AsksAnew(Rank rank, const SessionWish& wish) const;
  // The rank's earlier entry, if any, is replaced; whoever waited in it is returned, so that it is
  // answered.
  RequestToken Enter(Rank rank, ProcessId process, const SessionWish& wish, RequestToken token,
                     SessionSkills skills);
  // Whether all that have entered can do that.
  bool may_reshard() const { return may_reshard_ == entries_.size(); }
  bool reads_parts() const { return reads_parts_ == entries_.size(); }
  bool Has(Rank rank, ProcessId process) const;
  // The earliest one of those that have entered; none: it is not known. (Goes through the ranks.)
  std::optional<MonotonicTime> Deadline() const;
  // No rank that tells its deadline has asked for more than that.
  bool AllWithin(Duration time) const;
  bool AllEntered() const { return entries_.size() == world_size_; }
  size_t entered() const { return entries_.size(); }
  size_t loaded() const { return loaded_; }
  // Removes the rank's entry (its process or connection ended), if that process holds it.
  void Drop(Rank rank, ProcessId process);

  // `candidates` newest first, not empty; `only_these` if somebody chose them and nothing else will
  // do; chosen under the job's restore point as of this change.
  void BeginLoading(std::vector<CheckpointId> candidates, bool only_these,
                    uint64_t restore_point_change);
  bool only_these() const { return only_these_; }
  uint64_t restore_point_change() const { return restore_point_change_; }
  // What a rank made of the round's step.
  enum class Found { kItsOwn, kAnotherRun };
  // The rank is done with the round's step and waits; whoever waited for it before is returned.
  RequestToken Report(Rank rank, RequestToken token, Found found = Found::kItsOwn);
  bool AllReported() const;
  // A rank that has reported that; none: no rank has. (Goes through the ranks.)
  std::optional<Rank> AnyThatFound(Found found) const;
  // No copy of the rank's shard can be read: it waits for the next round. Whoever waited for it
  // before is returned.
  RequestToken Fail(Rank rank, RequestToken token, std::string problem);
  // Who keeps this round from ending, and why, until the next one begins.
  struct Failed {
    Rank rank = 0;
    std::string problem;
  };
  const std::optional<Failed>& failed() const { return failed_; }
  // All ranks load again: the first of these (newest first, not empty).
  void NextRound(std::vector<CheckpointId> candidates);
  // Whether an earlier round was about it.
  bool Tried(CheckpointId checkpoint) const { return tried_.count(checkpoint) > 0; }

  // Every rank that waits for an answer; they wait no more.
  std::vector<std::pair<Rank, RequestToken>> TakeWaiting();
  // The rank that waits by this token stops waiting; false if none does.
  bool StopWaiting(RequestToken token);
  bool IsWaiting(RequestToken token) const;
  // "ranks 3, 7 and 12 more", of those that have not done what the session waits for.
  std::string MissingRanks() const;
  std::string WantedText() const;

 private:
  struct Entry {
    ProcessId process;
    RequestToken waiting = 0;
    bool loaded = false;  // or it has found that there is nothing for it to load
    Found found = Found::kItsOwn;
    SessionSkills skills;
  };
  void Uncount(const SessionSkills& skills);
  // Whoever waited before is returned.
  RequestToken SetWaiting(Rank rank, Entry& entry, RequestToken token);

  uint64_t id_;
  Attempt attempt_;
  uint32_t world_size_;
  uint32_t round_ = 0;
  SessionWish wish_;
  std::map<Rank, Entry> entries_;
  std::map<RequestToken, Rank> waiting_;  // whose entries wait
  size_t loaded_ = 0;                     // of them
  size_t may_reshard_ = 0;                // of them
  size_t reads_parts_ = 0;                // of them
  std::vector<CheckpointId> candidates_;
  bool only_these_ = false;
  std::optional<Failed> failed_;
  std::set<CheckpointId> tried_;
  uint64_t restore_point_change_ = 0;
};

}  // namespace holdfast
