// What is really in memory, and what must be true of it. Bytes are modelled by a token: whoever
// fills a slot writes a number that nobody else writes, and the record carries it as its digest.
//
// The oracle shares no code with what it judges: it computes lines of descent and committed steps
// by itself, from the job states that reached the (fake) disk and from the answers that clients
// really got.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "server/node_core.h"

namespace holdfast::sim {

// What goes wrong with a slot's file from some moment on, every time that it is tried.
enum class Fault { kPopulate, kNote, kPublish, kRemoveRecord, kDelete, kOpen };

struct FileRecord {
  SealedCopy copy;
  uint64_t token = 0;
};

// One slot's file: an inode, which mappings keep after its name is gone.
struct File {
  SlotId slot = 0;
  uint64_t bytes = 0;
  v1::SlotNote note;
  std::optional<FileRecord> record;         // beside it: what makes it a sealed copy
  uint64_t token = 0;                       // what its bytes are
  ShardId content;                          // whose bytes they are
  std::optional<FileRecord> client_record;  // what a client laid into it, to be sealed
  std::set<ProcessId> mapped_by;            // living processes that can write into it
  std::map<ProcessId, int> read_by;  // living processes that were given it to read, and how often
  std::optional<uint32_t> uid;       // of the last process that could write into it
  Generation granted = 0;            // the last filling
  std::map<Fault, absl::Status> faults;
  bool replaced = false;    // bad: a good copy of its shard was fetched, its record is gone
  bool foreign = false;     // nobody's copy: another job's, a second one of a shard
  bool left_alone = false;  // of another version, say: the daemon knows its number and size only
};
using FilePtr = std::shared_ptr<File>;

struct JobTruth {
  std::map<Attempt, uint32_t> worlds;                   // sizes, as they became durable
  std::map<CheckpointId, std::set<Rank>> acknowledged;  // seals whose answer a client got
  std::set<CheckpointId> given_up;                      // shed or abandoned, as the daemon reported
  std::set<CheckpointId> damaged;      // flipped, or reported unreadable: may be passed over
  std::set<CheckpointId> asked_since;  // the same, since the last decision
  std::set<CheckpointId> asked_for;    // restore points and explicit choices: may be parents
  bool from_scratch_asked = false;
  bool from_scratch_since = false;                        // the same, since the last decision
  std::map<Attempt, std::set<CheckpointId>> passed_over;  // what ranks of an attempt could not load
  std::map<std::pair<Attempt, CheckpointId>, std::set<Rank>> loaded;  // reported so by ranks
  std::map<Attempt, std::set<Rank>> by_itself;  // ranks that asked for the step alone, to read it
  std::set<Attempt> chosen;                     // attempts whose ranks asked for a step by name
  Attempt opened = 0;                           // the newest, as the daemon reported
  bool being_removed = false;
  bool cleared = false;  // somebody took a restore point back since the last decision
  uint32_t World(Attempt attempt) const {
    const auto it = worlds.find(attempt);
    return it == worlds.end() ? 0 : it->second;
  }
};

struct SimTier;

class Oracle {
 public:
  // If there are any.
  void SetTiers(const SimTier* nvme, const SimTier* remote) {
    nvme_ = nvme;
    remote_ = remote;
  }
  // A broken promise, the first one; empty while all hold.
  const std::string& violation() const { return violation_; }
  void Violated(const std::string& what) {
    if (violation_.empty()) {
      violation_ = what;
    }
  }

  // A job state reached the disk. Judges every decision that became durable with it.
  void StateDurable(const v1::JobState& before, const v1::JobState& after,
                    const std::map<SlotId, FilePtr>& files);
  // After every change of files: the newest committed step on the line must be whole.
  void CheckNewest(const std::map<std::string, v1::JobState>& states,
                   const std::map<SlotId, FilePtr>& files);

  static bool Decided(const v1::JobState& state, Attempt attempt, CheckpointId& parent);
  static bool AnyCommitted(const v1::JobState& state, Attempt attempt);
  static bool OnLine(const v1::JobState& state, CheckpointId checkpoint);
  // The newest step on the line whose seals were all acknowledged, whatever became of it since.
  std::optional<CheckpointId> NewestPromised(const v1::JobState& state) const;
  // The newest of them that is there, undamaged, and of that world size. `heard_of`: of what lies
  // in a tier that may not be read now, only that counts of which a daemon has said so.
  std::optional<CheckpointId> NewestCommitted(const v1::JobState& state,
                                              const std::map<SlotId, FilePtr>& files,
                                              uint32_t world_size, bool heard_of = false) const;
  // Whether the line has ever held a whole step, as far as clients and reports told.
  bool EverPromised(const v1::JobState& state) const;
  bool Whole(const std::string& job, CheckpointId checkpoint,
             const std::map<SlotId, FilePtr>& files, bool flipped_too = false,
             bool heard_of = false) const;

  JobTruth& job(const std::string& name) { return jobs_[name]; }
  std::map<std::string, JobTruth>& jobs() { return jobs_; }

 private:
  void JudgeDecision(const v1::JobState& before, const v1::JobState& after,
                     const v1::AttemptState& a, const std::map<SlotId, FilePtr>& files);

  std::string violation_;
  std::map<std::string, JobTruth> jobs_;
  const SimTier* nvme_ = nullptr;
  const SimTier* remote_ = nullptr;
};

}  // namespace holdfast::sim
