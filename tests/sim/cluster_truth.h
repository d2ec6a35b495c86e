// What is really there in a simulated cluster, and what must be true of it: the invariants of
// docs/design.md §6 as they apply over nodes. It shares no code with what it judges: it knows what
// was sealed, where good copies lie and where faults took them, what clients and reports were told,
// and the states that were agreed on.
//
//   truth.Sealed(id, job, world_size, token, true);  truth.Added(id, {TierKind::kMemory, node});
//   truth.Removed(id, place, Truth::Why::kCommanded);   // judges
//   truth.violation();                                  // the first broken promise; empty: none
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "holdfast/v1/state.pb.h"
#include "server/events.h"

namespace holdfast::sim::cluster {

class World;

struct Place {
  TierKind tier = TierKind::kMemory;
  uint32_t node = 0;  // remote: 0
  auto operator<=>(const Place&) const = default;
};

class Truth {
 public:
  explicit Truth(World& world) : w_(world) {}

  const std::string& violation() const { return violation_; }
  void Violated(const std::string& what);

  // ---- Copies ----
  enum class Why { kCommanded, kFault };
  // The bytes behind a record that was published; a shard has one content for ever.
  void Sealed(const ShardId& id, const std::string& job, uint32_t world_size, uint64_t token,
              bool met_host);
  std::string NameOf(const std::string& uuid_bytes) const;
  uint64_t TokenOf(const ShardId& id) const;  // 0: it was never sealed
  void Added(const ShardId& id, Place place);
  void Removed(const ShardId& id, Place place, Why why);
  // A fault took it, and nobody is told until it is read.
  void DamagedUnnoticed(const ShardId& id, Place place);
  void ManifestPublished(const JobUuid& job, CheckpointId id);
  void ManifestRemoved(const JobUuid& job, CheckpointId id, Why why);
  // A good copy lies there, or one that was damaged unnoticed.
  bool MayLie(const std::string& job, CheckpointId id, Rank rank, Place place) const;
  bool Pinned(const JobUuid& job, CheckpointId id) const;
  void Pin(const std::string& job, CheckpointId id, bool pinned);
  // A person asked for its removal: it is not missed.
  void Forced(const std::string& job, CheckpointId id);

  // ---- Hosts ----
  void ElectedBy(const std::string& job, uint64_t epoch, const std::string& node);
  void Acts(const std::string& job, uint64_t epoch, const std::string& node);
  void Agreed(const std::string& job, uint64_t epoch, const std::string& state);

  // ---- What was told ----
  void CommitReported(const std::string& job, CheckpointId id);
  void TierCommitReported(const std::string& job, CheckpointId id, TierKind tier);
  void StageTold(const JobUuid& job, CheckpointId id, v1::AwaitSave::Stage stage);
  // A rank hears which attempt it belongs to; it asked at `asked`.
  void Joined(const std::string& job, const JobUuid& uuid, Attempt attempt, Rank rank,
              uint32_t node, const ProcessId& process, int64_t asked);
  void Ended(const std::string& job, uint32_t node, const ProcessId& process);
  void Entered(const std::string& job, Attempt attempt, Rank rank, uint32_t world_size,
               uint32_t node);
  // A step of another world size, to a rank of so many.
  void StepOffered(const std::string& job, Rank rank, uint32_t world_size, CheckpointId id,
                   uint32_t saved_by);
  // In calm weather, to a rank that has tried none.
  void NoCopyTold(const ShardId& id, const std::string& why);
  void PassedOver(const std::string& job, Attempt attempt, CheckpointId id);
  void Restored(const std::string& job, Attempt attempt, Rank rank, CheckpointId parent);
  void FromScratchTold(const std::string& job, Attempt attempt);
  void ReaderTold(const std::string& job, const ShardId& id, Rank asked);
  bool PointSince(const std::string& name, int64_t then) const;
  void RestorePointAsked(const std::string& job);  // by a person, whose choice it is
  void FromScratchAsked(const std::string& job);

  // The newest step that every rank could load where it is; none: nothing.
  std::optional<CheckpointId> NewestReachable(const std::string& job,
                                              const std::vector<uint32_t>& node_of_rank) const;
  std::optional<CheckpointId> NewestPromised(const std::string& job) const;
  uint64_t CommitsOf(const std::string& job) const;
  uint64_t TierCommitsOf(const std::string& job, TierKind tier) const;
  void ClearCommits();
  const v1::JobState* StateOf(const std::string& job) const;
  // Under which anybody has acted as its host.
  Epoch HighestEpoch(const std::string& job) const;
  std::string ActsFor(const std::string& job) const;  // who has acted under that
  // The node has told a host under that epoch what it has; it has told the host that acts.
  void Met(const std::string& uuid_bytes, const std::string& node, Epoch epoch);
  bool HasMetHost(const std::string& job, const std::string& node) const;

 private:
  struct Checkpoint {
    uint32_t world_size = 0;
    std::vector<uint64_t> tokens;  // 0: not sealed
    // True time; 0: the node had not met the host that acts then. What lies there is found when it
    // does, and cannot be told from what was sealed before.
    std::vector<int64_t> sealed_at;
    std::vector<std::vector<Place>> good;
    std::vector<std::vector<Place>> hit;  // taken by faults: a daemon may count on them still
    std::set<std::pair<Rank, Place>> damaged;
    std::set<Rank> in_nvme;  // that ever had a copy there
    bool manifest = false;
    bool manifest_ever = false;
    bool promised = false;         // somebody was told that it is committed
    bool promised_remote = false;  // likewise
    bool excused = false;          // faults or people took what it needs
    bool excused_remote = false;
  };
  struct AttemptTruth {
    uint32_t world_size = 0;
    int64_t opened_at = 0;  // when it was agreed on; 0: not yet
    uint64_t opening = 0;
    std::string restore_point;  // when it was opened
    bool decided = false;
    CheckpointId parent;
    std::optional<CheckpointId> told;  // to ranks: attempt 0: from scratch
    std::set<CheckpointId> passed_over;
    std::map<Rank, uint32_t> entered;
    std::optional<CheckpointId> newest_then;  // when all had entered
    bool judged = false;
    std::map<Rank, std::set<std::pair<uint32_t, ProcessId>>> seats;
    int64_t told_at = 0;  // when somebody heard of it first
  };
  struct Job {
    std::string name;
    JobUuid uuid;
    bool known = false;
    v1::JobState state;
    std::map<Attempt, AttemptTruth> attempts;
    std::map<CheckpointId, Checkpoint> checkpoints;
    std::optional<CheckpointId> newest;         // promised, on the line, whole
    std::optional<CheckpointId> newest_remote;  // the same of the remote tier alone
    std::set<CheckpointId> unpin_asked;
    std::set<CheckpointId> pins;
    int64_t point_seen_at = 0;   // when the last state that had one was the newest
    bool restore_point = false;  // one may be set: what is restored next is a person's choice
    bool from_scratch = false;
    uint64_t commits = 0;
    std::map<TierKind, uint64_t> tier_commits;
    std::map<uint64_t, std::string> acting;  // by epoch
    std::map<std::string, Epoch> met;        // by node
  };

  Job* Find(const JobUuid& uuid);
  const Job* Find(const JobUuid& uuid) const;
  Job& Named(const std::string& name) { return jobs_[name]; }
  static bool Whole(const Checkpoint& of);
  static bool WholeRemote(const Checkpoint& of);
  static bool LoadableOn(const Checkpoint& of, const std::vector<uint32_t>& node_of_rank);
  bool NewerInRemote(const Job& job, CheckpointId than) const;
  bool OnLine(const Job& job, CheckpointId id) const;
  void LineChanged(Job& job);
  void JudgePoint(const std::string& name, const v1::AttemptState& a, const AttemptTruth& truth,
                  const v1::RestorePoint& point);
  void Promise(Job& job, CheckpointId id, const std::string& how);
  void JudgeLoss(Job& job, CheckpointId id, const ShardId& shard, Place place, Why why);
  std::string Text(const Job& job, CheckpointId id) const;

  World& w_;
  std::string violation_;
  std::map<std::string, Job> jobs_;
  std::map<JobUuid, std::string> names_;
};

}  // namespace holdfast::sim::cluster
