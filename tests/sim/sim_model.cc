#include "tests/sim/sim_model.h"

#include <utility>

#include "absl/strings/str_cat.h"

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
    if (it->second.size() == job->second.world_size && job->second.given_up.count(it->first) == 0 &&
        OnLine(state, it->first)) {
      return it->first;
    }
  }
  return std::nullopt;
}

std::optional<CheckpointId> Oracle::NewestCommitted(const v1::JobState& state,
                                                    const std::map<SlotId, FilePtr>& files) const {
  const auto job = jobs_.find(state.name());
  if (job == jobs_.end()) {
    return std::nullopt;
  }
  for (auto it = job->second.acknowledged.rbegin(); it != job->second.acknowledged.rend(); ++it) {
    if (it->second.size() == job->second.world_size && job->second.damaged.count(it->first) == 0 &&
        OnLine(state, it->first) && Whole(state.name(), it->first, files)) {
      return it->first;
    }
  }
  return std::nullopt;
}

bool Oracle::Whole(const std::string& job, CheckpointId checkpoint,
                   const std::map<SlotId, FilePtr>& files, bool flipped_too) const {
  std::set<Rank> there;
  for (const auto& [slot, file] : files) {
    if (file->record && file->record->copy.job_name == job &&
        file->record->copy.id.checkpoint() == checkpoint &&
        (flipped_too || file->record->token == file->token)) {
      there.insert(file->record->copy.id.rank);
    }
  }
  const auto truth = jobs_.find(job);
  return truth != jobs_.end() && there.size() == truth->second.world_size;
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
    CheckpointId old_parent;
    if (!a.decided() || Decided(before, a.attempt(), old_parent)) {
      continue;
    }
    const CheckpointId parent{a.parent_attempt(), a.parent_step()};
    const std::optional<CheckpointId> newest = NewestCommitted(before, files);
    const std::set<CheckpointId>& passed = truth.passed_over[a.attempt()];
    if (parent.attempt == 0) {
      if (newest && passed.count(*newest) == 0 && !truth.from_scratch_asked &&
          truth.saved_unrestored.count(a.attempt()) == 0) {
        Violated(absl::StrCat("job ", after.name(), ": attempt ", a.attempt(),
                              " starts from scratch although ", Name(*newest), " is committed"));
      }
    } else if (truth.asked_for.count(parent) + truth.asked_since.count(parent) == 0) {
      if (!OnLine(before, parent)) {
        Violated(absl::StrCat("job ", after.name(), ": attempt ", a.attempt(), " descends from ",
                              Name(parent), ", a branch that was discarded"));
      }
      if (newest && *newest > parent && passed.count(*newest) == 0) {
        Violated(absl::StrCat("job ", after.name(), ": attempt ", a.attempt(), " descends from ",
                              Name(parent), " although ", Name(*newest), " is committed"));
      }
    }
    if (parent.attempt != 0 && truth.damaged.count(parent) == 0 &&
        !Whole(after.name(), parent, files)) {
      Violated(absl::StrCat("job ", after.name(), ": attempt ", a.attempt(), " descends from ",
                            Name(parent), ", which is not whole"));
    }
    truth.from_scratch_asked = false;
    // What was asked for before the last decision has had its chance, unless it is set still.
    truth.asked_for = std::exchange(truth.asked_since, {});
    if (after.restore_point().set()) {
      truth.asked_for.insert({after.restore_point().attempt(), after.restore_point().step()});
    }
  }
}

}  // namespace holdfast::sim
