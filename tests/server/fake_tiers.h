// Durable tiers as plain values, for tests that drive a NodeCore: what a flush has published is
// there at once and outlives the daemon, until a test wipes it.
#pragma once

#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "server/events.h"

namespace holdfast::testing {

struct FakeTier {
  struct Job {
    std::string name;
    uint32_t uid = 0;
    uint32_t gid = 0;
  };
  std::map<ShardId, DurableCopy> copies;
  std::set<std::pair<JobUuid, CheckpointId>> manifests;
  std::set<CheckpointId> marks;  // remote: of steps that are being written, of any job
  std::map<JobUuid, Job> jobs;
  Attempt claimed = 0;           // somebody opened the attempts up to this one
  absl::Status scan;             // what a scan ends with
  std::set<ShardId> damaged;     // digests disagree: found by whoever reads them
  std::set<ShardId> unreadable;  // reading fails, and may go well later
  // A scan finds them to be cut or damaged; true: only its names tell of it.
  std::map<ShardId, bool> cut;

  void Wipe() {
    copies.clear();
    manifests.clear();
    jobs.clear();
  }
  std::vector<FoundJob> Find(const std::string& only_job) const {
    std::vector<FoundJob> found;
    for (const auto& [uuid, job] : jobs) {
      if (!only_job.empty() && job.name != only_job) {
        continue;
      }
      FoundJob one{uuid, job.name, job.uid, job.gid, {}, {}};
      one.highest_claim = claimed;
      for (const auto& [id, copy] : copies) {
        if (id.job != uuid) {
          continue;
        }
        if (const auto bad = cut.find(id); bad == cut.end()) {
          one.copies.push_back(copy);
        } else {
          one.bad.push_back({bad->second ? Named(copy) : copy, "the image was cut"});
        }
      }
      for (const auto& [owner, checkpoint] : manifests) {
        if (owner == uuid) {
          one.manifests.push_back(checkpoint);
        }
      }
      for (const CheckpointId& mark : marks) {
        if (!manifests.contains({uuid, mark})) {
          one.begun.push_back(mark);
        }
      }
      found.push_back(std::move(one));
    }
    return found;
  }
  static DurableCopy Named(const DurableCopy& copy) {
    DurableCopy named;
    named.copy.id = copy.copy.id;
    named.copy.job_name = copy.copy.job_name;
    named.copy.image_bytes = 17;  // what is left of the file
    named.location = copy.location;
    return named;
  }
  // Steps of which there is a copy of every rank.
  std::vector<Step> Whole(uint32_t world_size) const {
    std::map<CheckpointId, uint32_t> counts;
    for (const auto& [id, copy] : copies) {
      ++counts[id.checkpoint()];
    }
    std::vector<Step> steps;
    for (const auto& [id, count] : counts) {
      if (count == world_size) {
        steps.push_back(id.step);
      }
    }
    return steps;
  }
};

}  // namespace holdfast::testing
