// Hosts, attempts, and what ranks restore.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "tests/sim/cluster_truth.h"
#include "tests/sim/cluster_world.h"
#include "tests/sim/sim_model.h"

namespace holdfast::sim::cluster {

void Truth::ElectedBy(const std::string& job, uint64_t epoch, const std::string& node) {
  w_.Trace(absl::StrCat(job, ": ", node, " is elected under epoch ", epoch));
}

// An epoch may be given twice by an etcd that was erased; nobody acts under one that another has.
void Truth::Acts(const std::string& name, uint64_t epoch, const std::string& node) {
  Job& job = Named(name);
  const auto [it, fresh] = job.acting.emplace(epoch, node);
  if (!fresh && it->second != node) {
    Violated(absl::StrCat("job ", name, ": ", node, " and ", it->second,
                          " both act as its host under epoch ", epoch));
  }
}

void Truth::Agreed(const std::string& name, uint64_t epoch, const std::string& bytes) {
  Job& job = Named(name);
  job.name = name;
  v1::JobState state;
  if (!state.ParseFromString(bytes) || state.name() != name || state.epoch() != epoch) {
    return Violated(absl::StrCat("job ", name, ": what is agreed on is no state of it"));
  }
  const v1::JobState before = std::exchange(job.state, state);
  if (before.restore_point().set()) {
    job.point_seen_at = w_.t.now();
  }
  const auto uuid = JobUuid::FromBytes(state.job_uuid());
  if (!uuid.ok()) {
    return Violated(absl::StrCat("job ", name, ": its state names no uuid"));
  }
  if (job.known && *uuid != job.uuid && job.newest) {
    Violated(absl::StrCat("job ", name, " got another uuid, and has committed steps"));
  }
  job.known = true;
  job.uuid = *uuid;
  names_[*uuid] = name;
  if (std::pair(state.epoch(), state.version()) <= std::pair(before.epoch(), before.version())) {
    Violated(absl::StrCat("job ", name, ": an older state is agreed on after a newer one"));
  }
  if (state.highest_attempt() < before.highest_attempt()) {
    Violated(absl::StrCat("job ", name, ": attempts run backwards, from ", before.highest_attempt(),
                          " to ", state.highest_attempt()));
  }
  bool line_changed = before.name().empty();
  for (const v1::AttemptState& a : state.attempts()) {
    AttemptTruth& truth = job.attempts[a.attempt()];
    if (truth.opened_at == 0) {
      truth.opened_at = w_.t.now();
      truth.opening = a.opening();
      truth.world_size = a.world_size();
      truth.restore_point = state.restore_point().SerializeAsString();
      w_.counts.states["attempt: opened"]++;
      w_.Trace(absl::StrCat(name, ": attempt ", a.attempt(), " is agreed on"));
    } else if (truth.told_at != 0 && truth.opening != a.opening()) {
      Violated(absl::StrCat("job ", name, ": attempt ", a.attempt(), " was opened twice"));
    }
    const CheckpointId parent{a.parent_attempt(), a.parent_step()};
    if (truth.decided && (!a.decided() || parent != truth.parent)) {
      Violated(
          absl::StrCat("job ", name, ": the decision of attempt ", a.attempt(), " was changed"));
    }
    if (a.decided() && !truth.decided) {
      truth.decided = line_changed = true;
      truth.parent = parent;
      truth.judged = job.restore_point || before.restore_point().set();  // a person chose
      job.restore_point = state.restore_point().set();
      JudgePoint(name, a, truth, before.restore_point());
      w_.counts.states[parent.attempt == 0 ? "attempt: from scratch" : "attempt: restored"]++;
      w_.Trace(absl::StrCat(name, ": attempt ", a.attempt(), " descends from attempt ",
                            parent.attempt, " step ", parent.step));
      if (parent.attempt == 0 && job.newest && !job.from_scratch &&
          !Oracle::OnLine(state, *job.newest)) {
        Violated(absl::StrCat("job ", name, ": attempt ", a.attempt(),
                              " begins from scratch although ", Text(job, *job.newest),
                              " is committed"));
      }
      job.from_scratch = false;
    }
  }
  if (line_changed) {
    LineChanged(job);
  }
}

// What a person set before the attempt was opened, and left alone since, is what it restores.
void Truth::JudgePoint(const std::string& name, const v1::AttemptState& a,
                       const AttemptTruth& truth, const v1::RestorePoint& point) {
  if (!point.set() || truth.restore_point != point.SerializeAsString()) {
    return;
  }
  w_.counts.states["attempt: by a restore point"]++;
  const CheckpointId wanted =
      point.from_scratch() ? CheckpointId{} : CheckpointId{point.attempt(), point.step()};
  if (truth.parent != wanted) {
    Violated(absl::StrCat("job ", name, ": attempt ", a.attempt(), " descends from attempt ",
                          truth.parent.attempt, " step ", truth.parent.step, ", although attempt ",
                          wanted.attempt, " step ", wanted.step, " was set as the restore point"));
  }
}

// ---- Ranks ----

void Truth::Joined(const std::string& name, const JobUuid& uuid, Attempt attempt, Rank rank,
                   uint32_t node, const ProcessId& process, int64_t asked) {
  Job& job = Named(name);
  if (job.known && uuid != job.uuid) {
    return Violated(absl::StrCat("job ", name, ": a rank joined another uuid of it"));
  }
  AttemptTruth& truth = job.attempts[attempt];
  if (truth.opened_at == 0) {
    return Violated(absl::StrCat("job ", name, ": rank ", rank, " is told of attempt ", attempt,
                                 ", which was not agreed on"));
  }
  for (auto newer = job.attempts.upper_bound(attempt); newer != job.attempts.end(); ++newer) {
    if (newer->second.told_at != 0 && newer->second.told_at < asked) {
      Violated(absl::StrCat("job ", name, ": rank ", rank, " asked after attempt ", newer->first,
                            " had begun, and is told that it is in attempt ", attempt));
    }
  }
  truth.told_at = truth.told_at == 0 ? w_.t.now() : truth.told_at;
  auto& seats = truth.seats[rank];
  for (const auto& [other_node, other] : seats) {
    if (std::pair(other_node, other) != std::pair(node, process) && !truth.decided &&
        w_.etcd.LeftAt(other_node) < truth.told_at) {
      Violated(absl::StrCat("job ", name, " attempt ", attempt, " rank ", rank, " is ",
                            process.ToString(), " of ", w_.node(node).name, " and ",
                            other.ToString(), " of ", w_.node(other_node).name));
    }
  }
  seats.insert({node, process});
}

void Truth::Ended(const std::string& name, uint32_t node, const ProcessId& process) {
  for (auto& [attempt, truth] : Named(name).attempts) {
    for (auto& [rank, seats] : truth.seats) {
      seats.erase({node, process});
    }
  }
}

void Truth::Entered(const std::string& name, Attempt attempt, Rank rank, uint32_t world_size,
                    uint32_t node) {
  AttemptTruth& truth = Named(name).attempts[attempt];
  truth.entered[rank] = node;
  if (truth.entered.size() == world_size) {
    std::vector<uint32_t> nodes;
    for (const auto& [r, n] : truth.entered) {
      nodes.push_back(n);
    }
    truth.newest_then = NewestReachable(name, nodes);
    // What they cannot load where they are may be passed over, and its memory needed for the
    // restore.
    Job& job = Named(name);
    if (attempt == job.state.highest_attempt() && job.newest != truth.newest_then) {
      job.newest.reset();
    }
  }
}

// It was committed, and each of its shards lies somewhere, but for what faults took.
void Truth::StepOffered(const std::string& name, Rank rank, uint32_t world_size, CheckpointId id,
                        uint32_t saved_by) {
  Job& job = Named(name);
  const std::string what = absl::StrCat(Text(job, id), " of ", saved_by,
                                        " ranks is offered to rank ", rank, " of ", world_size);
  const auto it = job.checkpoints.find(id);
  if (it == job.checkpoints.end() || it->second.world_size != saved_by || saved_by == world_size) {
    return Violated(what + ", and no step of so many ranks, or of as many as there are now");
  }
  const Checkpoint& checkpoint = it->second;
  for (Rank old = 0; old < saved_by; ++old) {
    if (checkpoint.tokens[old] == 0) {
      return Violated(absl::StrCat(what, ", and rank ", old, " never sealed it"));
    }
    if (checkpoint.good[old].empty() && checkpoint.hit[old].empty()) {
      return Violated(absl::StrCat(what, ", and the shard of rank ", old, " is nowhere"));
    }
  }
}

void Truth::NoCopyTold(const ShardId& id, const std::string& why) {
  const Job* job = Find(id.job);
  const auto it = job == nullptr ? decltype(job->checkpoints.begin()){}
                                 : job->checkpoints.find(id.checkpoint());
  if (job == nullptr || it == job->checkpoints.end()) {
    return;
  }
  // (A step that lacks a shard is none.)
  const Checkpoint& checkpoint = it->second;
  const auto there = [&](const std::vector<Place>& places) {
    return std::any_of(places.begin(), places.end(), [&](const Place& place) {
      return place.tier == TierKind::kRemote ? checkpoint.manifest : w_.node(place.node).up();
    });
  };
  if (!checkpoint.excused && std::all_of(checkpoint.good.begin(), checkpoint.good.end(), there)) {
    Violated(absl::StrCat(Text(*job, id.checkpoint()), ": a reader is told that rank ", id.rank,
                          "'s shard cannot be read, and it is there: ", why));
  }
}

void Truth::PassedOver(const std::string& name, Attempt attempt, CheckpointId id) {
  Named(name).attempts[attempt].passed_over.insert(id);
}

// All ranks of an attempt hear of one and the same step, which was agreed on before; and it is the
// newest that they could all load.
void Truth::Restored(const std::string& name, Attempt attempt, Rank rank, CheckpointId parent) {
  Job& job = Named(name);
  AttemptTruth& truth = job.attempts[attempt];
  const std::string what =
      absl::StrCat("job ", name, " attempt ", attempt, " rank ", rank, " restored attempt ",
                   parent.attempt, " step ", parent.step);
  if (!truth.decided || truth.parent != parent) {
    return Violated(what + ", which was not agreed on");
  }
  if (truth.told && *truth.told != parent) {
    return Violated(absl::StrCat(what, ", and another rank attempt ", truth.told->attempt, " step ",
                                 truth.told->step));
  }
  truth.told = parent;
  ++w_.counts.restores;
  if (std::exchange(truth.judged, true)) {
    return;
  }
  const std::optional<CheckpointId>& newest = truth.newest_then;
  if (!newest || *newest <= parent || truth.passed_over.count(*newest) > 0) {
    return;
  }
  std::vector<uint32_t> nodes;
  for (const auto& [r, n] : truth.entered) {
    nodes.push_back(n);
  }
  // (The line is the new attempt's own by now: what was newer is judged as it is there.)
  const Checkpoint& passed = job.checkpoints.at(*newest);
  if (!passed.excused && LoadableOn(passed, nodes)) {
    Violated(absl::StrCat(what, ", although all ranks could have loaded attempt ", newest->attempt,
                          " step ", newest->step));
  }
}

void Truth::FromScratchTold(const std::string& name, Attempt attempt) {
  AttemptTruth& truth = Named(name).attempts[attempt];
  if (!truth.decided || truth.parent.attempt != 0) {
    return Violated(absl::StrCat("job ", name, " attempt ", attempt,
                                 " is told to begin from scratch, which was not agreed on"));
  }
  truth.told = CheckpointId{};
}

void Truth::RestorePointAsked(const std::string& name) {
  Named(name).restore_point = true;
}

// A person's restore point is agreed on, or has been since `then`.
bool Truth::PointSince(const std::string& name, int64_t then) const {
  const auto job = jobs_.find(name);
  return job != jobs_.end() &&
         (job->second.state.restore_point().set() || job->second.point_seen_at > then);
}

void Truth::FromScratchAsked(const std::string& name) {
  Named(name).from_scratch = true;
}

}  // namespace holdfast::sim::cluster
