// Copies, promises, and what takes them away. (Attempts and restores: cluster_truth_attempts.cc.)
#include "tests/sim/cluster_truth.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "tests/sim/cluster_world.h"
#include "tests/sim/sim_model.h"

namespace holdfast::sim::cluster {

void Truth::Violated(const std::string& what) {
  if (violation_.empty()) {
    violation_ = absl::StrCat(what, " (at ", w_.t.now() / 1'000'000, " ms)");
    w_.Trace("VIOLATION: " + violation_);
  }
}

Truth::Job* Truth::Find(const JobUuid& uuid) {
  const auto name = names_.find(uuid);
  return name == names_.end() ? nullptr : &jobs_.at(name->second);
}

const Truth::Job* Truth::Find(const JobUuid& uuid) const {
  const auto name = names_.find(uuid);
  return name == names_.end() ? nullptr : &jobs_.at(name->second);
}

std::string Truth::Text(const Job& job, CheckpointId id) const {
  return absl::StrCat("job ", job.name, " attempt ", id.attempt, " step ", id.step);
}

// ---- Copies ----

void Truth::Sealed(const ShardId& id, const std::string& job, uint32_t world_size, uint64_t token,
                   bool met_host) {
  names_[id.job] = job;
  Job& of = Named(job);
  of.name = job;
  Checkpoint& checkpoint = of.checkpoints[id.checkpoint()];
  if (checkpoint.world_size == 0) {
    checkpoint.world_size = world_size;
    checkpoint.tokens.resize(world_size);
    checkpoint.sealed_at.resize(world_size);
    checkpoint.good.resize(world_size);
    checkpoint.hit.resize(world_size);
  }
  if (id.rank >= checkpoint.world_size || world_size != checkpoint.world_size) {
    return Violated(absl::StrCat(id.ToString(), " of ", world_size, " ranks was sealed, of ",
                                 checkpoint.world_size));
  }
  const auto attempt = of.attempts.find(id.attempt);
  if (attempt != of.attempts.end() && attempt->second.world_size != 0 &&
      attempt->second.world_size != world_size) {
    Violated(absl::StrCat(id.ToString(), " was sealed as one of ", world_size,
                          " ranks, and its attempt has ", attempt->second.world_size));
  }
  uint64_t& known = checkpoint.tokens[id.rank];
  if (known != 0 && known != token) {
    Violated(absl::StrCat(id.ToString(), " was sealed twice, with other bytes"));
  }
  if (known == 0) {
    known = token;
    checkpoint.sealed_at[id.rank] = met_host ? w_.t.now() : 0;
  }
}

std::string Truth::NameOf(const std::string& uuid_bytes) const {
  const auto uuid = JobUuid::FromBytes(uuid_bytes);
  const auto name = uuid.ok() ? names_.find(*uuid) : names_.end();
  return name == names_.end() ? "" : name->second;
}

uint64_t Truth::TokenOf(const ShardId& id) const {
  const Job* job = Find(id.job);
  if (job == nullptr) {
    return 0;
  }
  const auto it = job->checkpoints.find(id.checkpoint());
  return it == job->checkpoints.end() || id.rank >= it->second.tokens.size()
             ? 0
             : it->second.tokens[id.rank];
}

void Truth::Added(const ShardId& id, Place place) {
  Job* job = Find(id.job);
  if (job == nullptr) {
    return;
  }
  Checkpoint& checkpoint = job->checkpoints.at(id.checkpoint());
  std::vector<Place>& good = checkpoint.good.at(id.rank);
  if (std::find(good.begin(), good.end(), place) == good.end()) {
    good.push_back(place);
  }
  checkpoint.damaged.erase({id.rank, place});
  if (place.tier == TierKind::kNvme) {
    checkpoint.in_nvme.insert(id.rank);
  }
}

void Truth::Removed(const ShardId& id, Place place, Why why) {
  Job* job = Find(id.job);
  const auto it = job == nullptr ? decltype(job->checkpoints.begin()){}
                                 : job->checkpoints.find(id.checkpoint());
  if (job == nullptr || it == job->checkpoints.end() || id.rank >= it->second.good.size()) {
    return;
  }
  std::vector<Place>& good = it->second.good[id.rank];
  const auto there = std::find(good.begin(), good.end(), place);
  if (there == good.end()) {
    return;
  }
  good.erase(there);
  JudgeLoss(*job, id.checkpoint(), id, place, why);
}

void Truth::DamagedUnnoticed(const ShardId& id, Place place) {
  Removed(id, place, Why::kFault);
  if (Job* job = Find(id.job); job != nullptr) {
    if (const auto it = job->checkpoints.find(id.checkpoint()); it != job->checkpoints.end()) {
      it->second.damaged.insert({id.rank, place});
    }
  }
}

// The newest committed step of the line stays whole, and so does the newest in the remote tier,
// whatever the daemons do; only faults take them away.
void Truth::JudgeLoss(Job& job, CheckpointId id, const ShardId& shard, Place place, Why why) {
  Checkpoint& checkpoint = job.checkpoints.at(id);
  if (why == Why::kFault && place.tier == TierKind::kRemote) {
    checkpoint.excused_remote = true;
    job.newest_remote = job.newest_remote == id ? std::nullopt : job.newest_remote;
    // It may have what others leave out, or will when they are written: what those have there may
    // count for nothing.
    if (!w_.remote.plans.empty()) {
      checkpoint.excused = true;
      job.newest = job.newest == id ? std::nullopt : job.newest;
    }
  }
  const bool left = std::any_of(
      checkpoint.good[shard.rank].begin(), checkpoint.good[shard.rank].end(),
      [&](const Place& p) { return p.tier != TierKind::kRemote || checkpoint.manifest; });
  if (why == Why::kFault) {
    checkpoint.hit[shard.rank].push_back(place);
    if (!left) {
      checkpoint.excused = true;
      job.newest = job.newest == id ? std::nullopt : job.newest;
    }
    return;
  }
  const std::string what =
      absl::StrCat(Text(job, id), ": rank ", shard.rank, "'s copy in ",
                   std::string(TierName(place.tier)), " of ", w_.node(place.node).name, " goes");
  if (job.newest == id && !left && checkpoint.hit[shard.rank].empty()) {
    Violated(what + ", and the newest committed step of the line is not whole any more");
  }
  if (job.newest_remote == id && place.tier == TierKind::kRemote && !NewerInRemote(job, id)) {
    Violated(what + ", and it was the newest one in the remote tier");
  }
  if (place.tier != TierKind::kMemory && job.pins.count(id) > 0) {
    Violated(what + ", and is pinned");
  }
}

void Truth::ManifestPublished(const JobUuid& uuid, CheckpointId id) {
  Job* job = Find(uuid);
  if (job == nullptr) {
    return;
  }
  Checkpoint& checkpoint = job->checkpoints[id];
  checkpoint.manifest = checkpoint.manifest_ever = true;
}

void Truth::ManifestRemoved(const JobUuid& uuid, CheckpointId id, Why why) {
  Job* job = Find(uuid);
  if (job == nullptr) {
    return;
  }
  Checkpoint& checkpoint = job->checkpoints[id];
  if (!std::exchange(checkpoint.manifest, false)) {
    return;
  }
  if (why == Why::kCommanded && job->newest_remote == id && !NewerInRemote(*job, id)) {
    Violated(Text(*job, id) + ": its manifest goes, and it was the newest in the remote tier");
  }
  const bool hit = std::any_of(checkpoint.hit.begin(), checkpoint.hit.end(),
                               [](const auto& places) { return !places.empty(); });
  if (why == Why::kCommanded && job->newest == id && !Whole(checkpoint) && !hit) {
    Violated(
        Text(*job, id) +
        ": its manifest goes, and the newest committed step of the line is not whole any more");
  }
}

bool Truth::Whole(const Checkpoint& of) {
  return of.world_size > 0 &&
         std::all_of(of.good.begin(), of.good.end(), [&](const std::vector<Place>& places) {
           return std::any_of(places.begin(), places.end(), [&](const Place& place) {
             return place.tier != TierKind::kRemote || of.manifest;
           });
         });
}

bool Truth::WholeRemote(const Checkpoint& of) {
  return of.world_size > 0 && of.manifest &&
         std::all_of(of.good.begin(), of.good.end(), [&](const std::vector<Place>& places) {
           return std::any_of(places.begin(), places.end(),
                              [](const Place& place) { return place.tier == TierKind::kRemote; });
         });
}

// Its manifest may be there without anybody having been told: a scan finds it. And what was damaged
// unnoticed counts for whoever must go by what it knows.
bool Truth::NewerInRemote(const Job& job, CheckpointId than) const {
  const auto seems_whole = [](const Checkpoint& of) {
    bool whole = of.world_size > 0 && of.manifest;
    for (Rank rank = 0; whole && rank < of.good.size(); ++rank) {
      const std::vector<Place>& good = of.good[rank];
      const Place there{TierKind::kRemote, 0};
      whole = std::find(good.begin(), good.end(), there) != good.end() ||
              of.damaged.count({rank, there}) > 0;
    }
    return whole;
  };
  return std::any_of(job.checkpoints.upper_bound(than), job.checkpoints.end(),
                     [&](const auto& c) { return OnLine(job, c.first) && seems_whole(c.second); });
}

bool Truth::MayLie(const std::string& name, CheckpointId id, Rank rank, Place place) const {
  const auto job = jobs_.find(name);
  if (job == jobs_.end()) {
    return false;
  }
  const auto it = job->second.checkpoints.find(id);
  if (it == job->second.checkpoints.end() || rank >= it->second.good.size()) {
    return false;
  }
  const std::vector<Place>& good = it->second.good[rank];
  return std::find(good.begin(), good.end(), place) != good.end() ||
         it->second.damaged.count({rank, place}) > 0;
}

bool Truth::Pinned(const JobUuid& uuid, CheckpointId id) const {
  const Job* job = Find(uuid);
  return job != nullptr && job->pins.count(id) > 0;
}

void Truth::Pin(const std::string& name, CheckpointId id, bool pinned) {
  Job& job = Named(name);
  if (!pinned) {
    job.unpin_asked.insert(id);
    job.pins.erase(id);
  } else if (job.unpin_asked.count(id) == 0) {  // which may be done later than it was asked
    job.pins.insert(id);
  }
}

void Truth::Forced(const std::string& name, CheckpointId id) {
  Job& job = Named(name);
  if (const auto it = job.checkpoints.find(id); it != job.checkpoints.end()) {
    it->second.excused = it->second.excused_remote = true;
  }
  job.newest = job.newest == id ? std::nullopt : job.newest;
  job.newest_remote = job.newest_remote == id ? std::nullopt : job.newest_remote;
}

// ---- Promises ----

// Whoever is told that a step is committed can rely on it from now on.
void Truth::Promise(Job& job, CheckpointId id, const std::string& how) {
  const auto it = job.checkpoints.find(id);
  if (it == job.checkpoints.end()) {
    return Violated(Text(job, id) + how + ", and nothing of it was ever sealed");
  }
  Checkpoint& checkpoint = it->second;
  for (Rank rank = 0; rank < checkpoint.world_size; ++rank) {
    if (checkpoint.tokens[rank] == 0) {
      return Violated(absl::StrCat(Text(job, id), how, ", and rank ", rank, " never sealed it"));
    }
    // What an attempt seals after another one was opened does not count.
    for (auto newer = job.attempts.upper_bound(id.attempt); newer != job.attempts.end(); ++newer) {
      const int64_t opened = newer->second.opened_at;
      if (opened != 0 && checkpoint.sealed_at[rank] > opened && !checkpoint.promised) {
        return Violated(absl::StrCat(Text(job, id), how, ", and rank ", rank,
                                     " sealed it after attempt ", newer->first, " was opened"));
      }
    }
  }
  if (!std::exchange(checkpoint.promised, true)) {
    ++job.commits;
    ++w_.counts.commits;
  }
  // (Another host counts them all again, also those that had been followed by newer ones.)
  const bool followed =
      std::any_of(job.checkpoints.upper_bound(id), job.checkpoints.end(),
                  [&](const auto& c) { return c.second.promised && OnLine(job, c.first); });
  if (followed || !OnLine(job, id) || (job.newest && id < *job.newest)) {
    return;
  }
  // (What a fault took before it was committed the daemons may count on, and give up older ones.)
  job.newest = Whole(checkpoint) && !checkpoint.excused ? std::optional(id) : std::nullopt;
}

// It is counted from what is there.
void Truth::CommitReported(const std::string& name, CheckpointId id) {
  Job& job = Named(name);
  Promise(job, id, " is called committed");
  const Checkpoint& checkpoint = job.checkpoints[id];
  for (Rank rank = 0; rank < checkpoint.world_size; ++rank) {
    if (checkpoint.good[rank].empty() && checkpoint.hit[rank].empty()) {
      Violated(absl::StrCat(Text(job, id), " is called committed, and rank ", rank,
                            "'s shard is nowhere"));
    }
  }
}

void Truth::TierCommitReported(const std::string& name, CheckpointId id, TierKind tier) {
  Job& job = Named(name);
  const auto it = job.checkpoints.find(id);
  const std::string what = absl::StrCat(" is called whole in ", std::string(TierName(tier)));
  if (it == job.checkpoints.end()) {
    return Violated(Text(job, id) + what + ", and nothing of it was ever sealed");
  }
  Checkpoint& checkpoint = it->second;
  if (tier == TierKind::kNvme && checkpoint.in_nvme.size() < checkpoint.world_size) {
    return Violated(absl::StrCat(Text(job, id), what, ", where only ", checkpoint.in_nvme.size(),
                                 " of ", checkpoint.world_size, " ranks ever were"));
  }
  if (tier == TierKind::kRemote && !checkpoint.manifest_ever) {
    return Violated(Text(job, id) + what + ", and has no manifest");
  }
  ++job.tier_commits[tier];
  if (tier == TierKind::kRemote) {
    checkpoint.promised_remote = true;
    const bool followed = std::any_of(
        job.checkpoints.upper_bound(id), job.checkpoints.end(),
        [&](const auto& c) { return c.second.promised_remote && OnLine(job, c.first); });
    if (followed || !OnLine(job, id) || (job.newest_remote && id < *job.newest_remote)) {
      return;
    }
    if (checkpoint.excused_remote) {  // (as in Promise)
      job.newest_remote.reset();
    } else if (WholeRemote(checkpoint)) {
      job.newest_remote = id;
    }
  }
}

void Truth::StageTold(const JobUuid& uuid, CheckpointId id, v1::AwaitSave::Stage stage) {
  Job* job = Find(uuid);
  if (job == nullptr) {
    return;
  }
  switch (stage) {
    case v1::AwaitSave::STAGE_COMMITTED:
      return Promise(*job, id, " was told to be committed");
    case v1::AwaitSave::STAGE_NVME:
    case v1::AwaitSave::STAGE_REMOTE: {
      const auto it = job->checkpoints.find(id);
      const bool nvme = stage == v1::AwaitSave::STAGE_NVME;
      if (it == job->checkpoints.end() ||
          (nvme ? it->second.in_nvme.size() < it->second.world_size : !it->second.manifest_ever)) {
        Violated(Text(*job, id) + (nvme ? " was told to be whole in nvme, and is not"
                                        : " was told to be in the remote tier, and is not"));
      }
      return;
    }
    default:
      return;
  }
}

// Readers get what is committed: every rank has sealed it.
void Truth::ReaderTold(const std::string& name, const ShardId& id, Rank asked) {
  Job& job = Named(name);
  const std::string what = absl::StrCat(Text(job, id.checkpoint()), " rank ", id.rank,
                                        " is given to a reader of rank ", asked);
  const auto it = job.checkpoints.find(id.checkpoint());
  if (!job.known || id.job != job.uuid || id.rank != asked) {
    return Violated(what + ", and is something else");
  }
  if (it == job.checkpoints.end() ||
      std::count(it->second.tokens.begin(), it->second.tokens.end(), 0u) > 0) {
    return Violated(what + ", and was never sealed by all ranks");
  }
}

bool Truth::OnLine(const Job& job, CheckpointId id) const {
  return Oracle::OnLine(job.state, id) ||
         // (Saved from scratch, and the state that says so is on its way.)
         (job.state.attempts_size() == 0);
}

// Another line: what was promised on the one before may go.
void Truth::LineChanged(Job& job) {
  job.newest.reset();
  job.newest_remote.reset();
  bool found = false;
  bool found_remote = false;
  for (auto it = job.checkpoints.rbegin(); it != job.checkpoints.rend(); ++it) {
    const auto& [id, checkpoint] = *it;
    if (!OnLine(job, id)) {
      continue;
    }
    // (One that a fault has broken the daemons may count on still, and give up older ones.)
    if (!found && checkpoint.promised && (checkpoint.excused || Whole(checkpoint))) {
      found = true;
      job.newest = checkpoint.excused ? std::nullopt : std::optional(id);
    }
    if (!found_remote && checkpoint.promised_remote &&
        (checkpoint.excused_remote || WholeRemote(checkpoint))) {
      found_remote = true;
      job.newest_remote = checkpoint.excused_remote ? std::nullopt : std::optional(id);
    }
    if (found && found_remote) {
      return;
    }
  }
}

std::optional<CheckpointId> Truth::NewestPromised(const std::string& name) const {
  const auto job = jobs_.find(name);
  return job == jobs_.end() ? std::nullopt : job->second.newest;
}

std::optional<CheckpointId> Truth::NewestReachable(
    const std::string& name, const std::vector<uint32_t>& node_of_rank) const {
  const auto found = jobs_.find(name);
  if (found == jobs_.end()) {
    return std::nullopt;
  }
  const Job& job = found->second;
  for (auto it = job.checkpoints.rbegin(); it != job.checkpoints.rend(); ++it) {
    const auto& [id, checkpoint] = *it;
    if (!checkpoint.promised || !OnLine(job, id)) {
      continue;
    }
    if (LoadableOn(checkpoint, node_of_rank)) {
      return id;
    }
  }
  return std::nullopt;
}

// Each rank gets its own shard where it runs; of a step of another world size any of them reads
// what one of them has.
bool Truth::LoadableOn(const Checkpoint& of, const std::vector<uint32_t>& node_of_rank) {
  const auto runs_on = [&](Rank rank, uint32_t node) {
    return of.world_size == node_of_rank.size()
               ? node == node_of_rank[rank]
               : std::find(node_of_rank.begin(), node_of_rank.end(), node) != node_of_rank.end();
  };
  bool all = of.world_size > 0;
  for (Rank rank = 0; all && rank < of.world_size; ++rank) {
    all = std::any_of(of.good[rank].begin(), of.good[rank].end(), [&](const Place& place) {
      return place.tier == TierKind::kRemote ? of.manifest : runs_on(rank, place.node);
    });
  }
  return all;
}

uint64_t Truth::CommitsOf(const std::string& name) const {
  const auto job = jobs_.find(name);
  return job == jobs_.end() ? 0 : job->second.commits;
}

uint64_t Truth::TierCommitsOf(const std::string& name, TierKind tier) const {
  const auto job = jobs_.find(name);
  const auto count = job == jobs_.end() ? decltype(job->second.tier_commits.begin()){}
                                        : job->second.tier_commits.find(tier);
  return job == jobs_.end() || count == job->second.tier_commits.end() ? 0 : count->second;
}

void Truth::ClearCommits() {
  for (auto& [name, job] : jobs_) {
    job.commits = 0;
    job.tier_commits.clear();
  }
}

Epoch Truth::HighestEpoch(const std::string& name) const {
  const auto job = jobs_.find(name);
  return job == jobs_.end() || job->second.acting.empty() ? 0 : job->second.acting.rbegin()->first;
}

std::string Truth::ActsFor(const std::string& name) const {
  const auto job = jobs_.find(name);
  return job == jobs_.end() || job->second.acting.empty() ? ""
                                                          : job->second.acting.rbegin()->second;
}

void Truth::Met(const std::string& uuid_bytes, const std::string& node, Epoch epoch) {
  if (const std::string name = NameOf(uuid_bytes); !name.empty()) {
    Epoch& met = Named(name).met[node];
    met = std::max(met, epoch);
  }
}

bool Truth::HasMetHost(const std::string& name, const std::string& node) const {
  const auto found = jobs_.find(name);
  if (found == jobs_.end() || found->second.acting.empty()) {
    return true;
  }
  const auto& [epoch, host] = *found->second.acting.rbegin();
  const auto met = found->second.met.find(node);
  return host == node || (met != found->second.met.end() && met->second >= epoch);
}

const v1::JobState* Truth::StateOf(const std::string& name) const {
  const auto job = jobs_.find(name);
  return job == jobs_.end() || job->second.state.name().empty() ? nullptr : &job->second.state;
}

}  // namespace holdfast::sim::cluster
