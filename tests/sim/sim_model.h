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
};
using FilePtr = std::shared_ptr<File>;

struct JobTruth {
  uint32_t world_size = 0;
  std::map<CheckpointId, std::set<Rank>> acknowledged;  // seals whose answer a client got
  std::set<CheckpointId> given_up;                      // shed or abandoned, as the daemon reported
  std::set<CheckpointId> damaged;      // flipped, or reported unreadable: may be passed over
  std::set<CheckpointId> asked_since;  // the same, since the last decision
  std::set<CheckpointId> asked_for;    // restore points and explicit choices: may be parents
  bool from_scratch_asked = false;
  std::set<Attempt> saved_unrestored;                     // a rank saved in it before any restore
  std::map<Attempt, std::set<CheckpointId>> passed_over;  // what ranks of an attempt could not load
};

class Oracle {
 public:
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
  static bool OnLine(const v1::JobState& state, CheckpointId checkpoint);
  // The newest step on the line whose seals were all acknowledged, whatever became of it since.
  std::optional<CheckpointId> NewestPromised(const v1::JobState& state) const;
  // The newest of them that is there and undamaged.
  std::optional<CheckpointId> NewestCommitted(const v1::JobState& state,
                                              const std::map<SlotId, FilePtr>& files) const;
  bool Whole(const std::string& job, CheckpointId checkpoint,
             const std::map<SlotId, FilePtr>& files, bool flipped_too = false) const;

  JobTruth& job(const std::string& name) { return jobs_[name]; }
  std::map<std::string, JobTruth>& jobs() { return jobs_; }

 private:
  std::string violation_;
  std::map<std::string, JobTruth> jobs_;
};

}  // namespace holdfast::sim
