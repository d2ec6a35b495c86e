#include "tests/sim/sim_model.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tests/sim/sim_tiers.h"

namespace holdfast::sim {
namespace {

std::string Name(CheckpointId id) {
  return absl::StrCat("attempt ", id.attempt, " step ", id.step);
}

const v1::AttemptState* FindAttempt(const v1::JobState& state, Attempt attempt) {
  for (const v1::AttemptState& a : state.attempts()) {
    if (a.attempt() == attempt) {
      return &a;
    }
  }
  return nullptr;
}

Attempt NewestDecidedAttempt(const v1::JobState& state) {
  Attempt newest = 0;
  for (const v1::AttemptState& a : state.attempts()) {
    newest = a.decided() && a.attempt() > newest ? a.attempt() : newest;
  }
  return newest;
}

}  // namespace

bool Oracle::Decided(const v1::JobState& state, Attempt attempt, CheckpointId& parent) {
  const v1::AttemptState* a = FindAttempt(state, attempt);
  if (a == nullptr || !a->decided()) {
    return false;
  }
  parent = {a->parent_attempt(), a->parent_step()};
  return true;
}

bool Oracle::AnyCommitted(const v1::JobState& state, Attempt attempt) {
  const v1::AttemptState* a = FindAttempt(state, attempt);
  return a != nullptr && a->any_committed();
}

bool Oracle::OnLine(const v1::JobState& state, CheckpointId checkpoint) {
  Attempt attempt = NewestDecidedAttempt(state);
  Step limit = UINT64_MAX;
  for (int depth = 0; depth < 10'000 && attempt != 0; ++depth) {
    if (checkpoint.attempt == attempt) {
      return checkpoint.step <= limit;
    }
    const v1::AttemptState* a = FindAttempt(state, attempt);
    if (a == nullptr) {
      return false;
    }
    attempt = a->parent_attempt();
    limit = a->parent_step();
  }
  return false;
}

std::optional<CheckpointId> Oracle::NewestPromised(const v1::JobState& state) const {
  const auto job = jobs_.find(state.name());
  if (job == jobs_.end()) {
    return std::nullopt;
  }
  for (auto it = job->second.acknowledged.rbegin(); it != job->second.acknowledged.rend(); ++it) {
    if (it->second.size() == job->second.World(it->first.attempt) &&
        job->second.given_up.count(it->first) == 0 && OnLine(state, it->first)) {
      return it->first;
    }
  }
  return std::nullopt;
}

std::optional<CheckpointId> Oracle::NewestCommitted(const v1::JobState& state,
                                                    const std::map<SlotId, FilePtr>& files,
                                                    uint32_t world_size, bool heard_of) const {
  const auto job = jobs_.find(state.name());
  if (job == jobs_.end()) {
    return std::nullopt;
  }
  for (auto it = job->second.acknowledged.rbegin(); it != job->second.acknowledged.rend(); ++it) {
    if (job->second.World(it->first.attempt) == world_size && it->second.size() == world_size &&
        job->second.damaged.count(it->first) == 0 && OnLine(state, it->first) &&
        Whole(state.name(), it->first, files, false, heard_of)) {
      return it->first;
    }
  }
  return std::nullopt;
}

bool Oracle::Whole(const std::string& job, CheckpointId checkpoint,
                   const std::map<SlotId, FilePtr>& files, bool flipped_too, bool heard_of) const {
  std::set<Rank> there;
  for (const auto& [slot, file] : files) {
    if (file->record && !file->foreign && file->record->copy.job_name == job &&
        file->record->copy.id.checkpoint() == checkpoint &&
        (flipped_too || file->record->token == file->token)) {
      there.insert(file->record->copy.id.rank);
    }
  }
  for (const auto& [tier, copies] :
       {std::pair(TierKind::kNvme, nvme_), std::pair(TierKind::kRemote, remote_)}) {
    if (copies == nullptr) {
      continue;
    }
    for (const auto& [id, copy] : copies->copies) {
      if (copy.copy.copy.job_name == job && id.checkpoint() == checkpoint &&
          copies->Has(tier, id, flipped_too) &&
          !(heard_of && copies->MayBeUnheardOf(id.job, checkpoint))) {
        there.insert(id.rank);
      }
    }
  }
  const auto truth = jobs_.find(job);
  return truth != jobs_.end() && there.size() == truth->second.World(checkpoint.attempt);
}

bool Oracle::EverPromised(const v1::JobState& state) const {
  const auto job = jobs_.find(state.name());
  return job != jobs_.end() &&
         std::any_of(job->second.acknowledged.begin(), job->second.acknowledged.end(),
                     [&](const auto& a) {
                       return a.second.size() == job->second.World(a.first.attempt) &&
                              job->second.given_up.count(a.first) == 0 && OnLine(state, a.first);
                     });
}

void Oracle::CheckNewest(const std::map<std::string, v1::JobState>& states,
                         const std::map<SlotId, FilePtr>& files) {
  for (const auto& [uuid, state] : states) {
    const std::optional<CheckpointId> newest = NewestPromised(state);
    if (!newest || jobs_[state.name()].damaged.count(*newest) > 0 ||
        Whole(state.name(), *newest, files)) {
      continue;
    }
    Violated(absl::StrCat("job ", state.name(), ": the newest committed step of its line, ",
                          Name(*newest), ", is not whole any more"));
  }
}

void Oracle::StateDurable(const v1::JobState& before, const v1::JobState& after,
                          const std::map<SlotId, FilePtr>& files) {
  JobTruth& truth = jobs_[after.name()];
  for (const v1::AttemptState& a : before.attempts()) {
    CheckpointId parent;
    if (a.decided() && FindAttempt(after, a.attempt()) != nullptr &&
        (!Decided(after, a.attempt(), parent) ||
         parent != CheckpointId{a.parent_attempt(), a.parent_step()})) {
      Violated(absl::StrCat("job ", after.name(), ": the decision of attempt ", a.attempt(),
                            " was changed"));
    }
  }
  if (after.highest_attempt() < before.highest_attempt()) {
    Violated(absl::StrCat("job ", after.name(), ": attempts run backwards"));
  }
  for (const v1::AttemptState& a : after.attempts()) {
    truth.worlds[a.attempt()] = a.world_size();
    CheckpointId old_parent;
    if (!a.decided() || Decided(before, a.attempt(), old_parent)) {
      continue;
    }
    JudgeDecision(before, after, a, files);
    truth.from_scratch_asked =
        std::exchange(truth.from_scratch_since, false) || after.restore_point().from_scratch();
    truth.cleared = false;
    // What was asked for before the last decision has had its chance, unless it is set still.
    truth.asked_for = std::exchange(truth.asked_since, {});
    if (after.restore_point().set()) {
      truth.asked_for.insert({after.restore_point().attempt(), after.restore_point().step()});
    }
  }
}

// An attempt has just become durable as decided.
void Oracle::JudgeDecision(const v1::JobState& before, const v1::JobState& after,
                           const v1::AttemptState& a, const std::map<SlotId, FilePtr>& files) {
  JobTruth& truth = jobs_[after.name()];
  const CheckpointId parent{a.parent_attempt(), a.parent_step()};
  const std::string what = absl::StrCat("job ", after.name(), ": attempt ", a.attempt());
  if (parent.attempt == 0) {
    if (!truth.from_scratch_asked && !truth.from_scratch_since && EverPromised(before)) {
      Violated(what + " starts from scratch although something was committed on its line");
    }
    return;
  }
  const bool asked = truth.asked_for.count(parent) + truth.asked_since.count(parent) > 0;
  const std::set<CheckpointId>& passed = truth.passed_over[a.attempt()];
  if (!asked) {
    if (!OnLine(before, parent)) {
      Violated(
          absl::StrCat(what, " descends from ", Name(parent), ", a branch that was discarded"));
    }
    const std::optional<CheckpointId> newest = NewestCommitted(before, files, a.world_size(), true);
    if (newest && *newest > parent && passed.count(*newest) == 0) {
      Violated(absl::StrCat(what, " descends from ", Name(parent), " although ", Name(*newest),
                            " is committed"));
    }
    if (before.restore_point().set() && !after.restore_point().set() && !truth.cleared &&
        truth.chosen.count(a.attempt()) == 0) {
      Violated(absl::StrCat(what, " descends from ", Name(parent),
                            ", which is not the restore point that was set"));
    }
  }
  if (truth.damaged.count(parent) == 0 && !Whole(after.name(), parent, files)) {
    Violated(absl::StrCat(what, " descends from ", Name(parent), ", which is not whole"));
  }
  const bool by_itself = truth.by_itself[a.attempt()].size() == a.world_size();
  if (!by_itself && truth.loaded[{a.attempt(), parent}].size() != a.world_size()) {
    Violated(absl::StrCat(what, " descends from ", Name(parent), ", which only ",
                          truth.loaded[{a.attempt(), parent}].size(), " of ", a.world_size(),
                          " ranks have loaded"));
  }
}

}  // namespace holdfast::sim
