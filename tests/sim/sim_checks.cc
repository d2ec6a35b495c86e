// What is judged as it happens: grants, seats, reports, deadlines. (What became durable:
// sim_model.h.)
#include <algorithm>
#include <cinttypes>
#include <cstdio>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/sim/sim_client.h"
#include "tests/sim/sim_world.h"

namespace holdfast::sim {

// Nobody's copies and what is left alone are never touched.
void World::CheckForeign(SlotId slot, const char* what) {
  const FilePtr file = FindFile(slot);
  if (file && (file->foreign || file->left_alone)) {
    oracle_.Violated(absl::StrCat("slot ", slot, ", which is to be left alone, is ", what));
  }
}

// What was not whole by now of the attempts before is given up without a further word; also if the
// new attempt does not become durable before the daemon dies.
void World::AttemptOpened(const Report& a) {
  JobTruth& truth = oracle_.job(a.job);
  std::sscanf(a.text.c_str(), "attempt %" SCNu64, &truth.opened);
  const v1::JobState* state = StateOf(a.job);
  for (const auto& [uuid, id, life] : begun_) {
    if (state != nullptr && uuid == state->job_uuid() && id.attempt < truth.opened &&
        truth.acknowledged[id].size() < truth.World(id.attempt)) {
      truth.given_up.insert(id);
    }
  }
}

void World::Do(const Report& a) {
  Trace(absl::StrCat("  ", a.job, ": ", a.text));
  if (a.kind == Report::Kind::kAttemptOpened) {
    AttemptOpened(a);
  }
  CheckpointId id;
  if (std::sscanf(a.text.c_str(), "step %" SCNu64 " of attempt %" SCNu64, &id.step, &id.attempt) !=
      2) {
    return;
  }
  JobTruth& truth = oracle_.job(a.job);
  if (a.kind == Report::Kind::kTierCommitted) {
    return JudgeTierCommitted(a, id);
  }
  if (a.kind == Report::Kind::kTierRemoved) {
    return RemovalGranted(a, id);
  }
  if (a.kind == Report::Kind::kStepCommitted) {
    // What the daemon calls committed is a promise, whether or not every rank has heard of its
    // seal.
    if (!oracle_.Whole(a.job, id, files_, /*flipped_too=*/true)) {
      oracle_.Violated(
          absl::StrCat("job ", a.job, ": called committed, and is not whole: ", a.text));
    }
    for (Rank rank = 0; rank < truth.World(id.attempt); ++rank) {
      truth.acknowledged[id].insert(rank);
    }
    truth.given_up.erase(id);  // (shed, and found again whole after a restart)
  }
  if (a.kind == Report::Kind::kStepShed || a.kind == Report::Kind::kStepAbandoned) {
    const auto acknowledged = truth.acknowledged.find(id);
    if (acknowledged == truth.acknowledged.end() ||
        acknowledged->second.size() < truth.World(id.attempt)) {
      truth.given_up.insert(id);  // before it was whole: that is allowed
    }
  }
  if (a.kind == Report::Kind::kStepShed && absl::StrContains(a.text, "the job has ended")) {
    JudgeEviction(a, id);
  }
}

// An ended job's newest step goes for another job: nothing of the job is promised any more but what
// is whole elsewhere.
void World::JudgeEviction(const Report& a, CheckpointId id) {
  JobTruth& truth = oracle_.job(a.job);
  for (const std::unique_ptr<Client>& client : clients_) {
    if (client->job().name == a.job && client->TrainsIn(truth.opened)) {
      oracle_.Violated(
          absl::StrCat("job ", a.job, ": its rank ", client->rank(), " trains, and yet: ", a.text));
    }
  }
  for (const auto& [step, ranks] : truth.acknowledged) {
    if (step <= id && !oracle_.Whole(a.job, step, files_, /*flipped_too=*/true)) {
      truth.given_up.insert(step);
    }
  }
  truth.given_up.insert(id);
}

// From when another attempt is opened on nobody is told that it belongs to this one or may save in
// it.
void World::CheckAttempt(const JobUuid& job, Attempt attempt) {
  const auto state = states_.find(job.ToBytes());
  if (state != states_.end() && attempt < oracle_.job(state->second.name()).opened) {
    oracle_.Violated(absl::StrCat("job ", state->second.name(), ": somebody is told that it is in ",
                                  "attempt ", attempt, ", which is over"));
  }
}

void World::CheckGrant(const SendReply& a, Peer& client, const FilePtr& file) {
  const std::string what = absl::StrCat("slot ", a.slot, " generation ", a.generation,
                                        " was granted to ", client.process().ToString());
  if (!file) {
    return oracle_.Violated(what + ", and is not there");
  }
  if (file->record) {
    oracle_.Violated(what + ", and holds a sealed copy");
  }
  if (a.frame.has_begin_save()) {
    if (a.generation <= std::max(file->granted, granted_[a.slot])) {
      oracle_.Violated(what + ", as another filling was before");
    }
    file->granted = granted_[a.slot] = a.generation;
  }
  if (!file->note.has_writer() || file->note.writer().pid() != client.process().pid ||
      file->note.generation() != a.generation) {
    oracle_.Violated(what + ", and its note does not say so");
  }
  if (file->foreign || file->left_alone) {
    oracle_.Violated(what + ", and is to be left alone");
  }
  if (file->uid.value_or(client.uid()) != client.uid()) {
    oracle_.Violated(what + ", and holds another user's bytes");
  }
  file->uid = client.uid();
  for (const ProcessId& other : file->mapped_by) {
    if (other != client.process()) {
      oracle_.Violated(absl::StrCat(what, " while ", other.ToString(), " can write into it"));
    }
  }
  for (const auto& [reader, holds] : file->read_by) {
    if (holds > 0) {
      oracle_.Violated(absl::StrCat(what, " while ", reader.ToString(), " reads it"));
    }
  }
}

void World::Seated(const Peer* peer, const std::string& job, Attempt attempt, Rank rank) {
  std::set<const Peer*>& told = seats_[{job, attempt, rank}];
  for (const Peer* other : told) {
    // (A daemon that was restarted knows its ranks by what they sealed, or when they come back.)
    if (other->alive() && other->process() != peer->process()) {
      oracle_.Violated(absl::StrCat("job ", job, " attempt ", attempt, " rank ", rank, " is ",
                                    peer->process().ToString(), " and ",
                                    other->process().ToString()));
    }
  }
  told.insert(peer);
}

void World::Unseated(const Peer* peer) {
  for (auto& [seat, told] : seats_) {
    told.erase(peer);
  }
}

void World::CheckDeadlines() {
  for (const auto& [id, request] : requests_) {
    if (request.due < now_) {
      oracle_.Violated(absl::StrCat("unanswered past its deadline: ", request.what));
    }
  }
}

}  // namespace holdfast::sim
