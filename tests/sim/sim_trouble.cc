// What goes wrong: processes and the daemon die, the node is rebooted, bits flip, files fail for
// good, and people change their minds.
#include <algorithm>
#include <array>

#include "absl/strings/str_cat.h"
#include "tests/sim/sim_client.h"
#include "tests/sim/sim_rude.h"
#include "tests/sim/sim_world.h"

namespace holdfast::sim {

using std::chrono::milliseconds;
using std::chrono::seconds;

// A step of the job of which there is something; an older one as likely as the newest.
std::optional<CheckpointId> World::PickCopy(const JobPlan& job) {
  std::vector<CheckpointId> there;
  for (const auto& [slot, file] : files_) {
    if (file->record && !file->foreign && file->record->copy.job_name == job.name) {
      there.push_back(file->record->copy.id.checkpoint());
    }
  }
  return there.empty() ? std::nullopt : std::optional(there[Below(there.size())]);
}

void World::Trouble() {
  if (!stormy_) {
    return;
  }
  After(milliseconds(200 + Below(6000)), [this] { Trouble(); });
  JobPlan& job = jobs_[Below(jobs_.size())];
  Client* client = job.ranks[Below(job.world_size)];
  switch (Below(22)) {
    case 0:
    case 1:
    case 2:
      return KillClient(client, milliseconds(Below(4000)));
    case 3:
      return RestartJob(job, true);
    case 4:
    case 5:
      KillDaemon();
      return After(milliseconds(Below(3000)), [this] { StartDaemon(); });
    case 6:
      if (client != nullptr && client->running() && client->connection() != 0) {
        const ConnectionId connection = client->connection();
        CloseSocket(connection);
        client->OnClosed(connection);
      }
      return;
    case 7: {
      // Somebody starts the job, or one rank of it, a second time.
      if (client != nullptr && client->running() && !job.launch_ids) {
        clients_.push_back(std::make_unique<Client>(this, &job, client->rank(),
                                                    ProcessId{next_pid_++, next_event_}, false));
        Client* second = clients_.back().get();
        second->Start();
        After(seconds(20 + Below(20)),
              [this, second] { KillClient(second, milliseconds(Below(2000))); });
      }
      return;
    }
    case 8:
      return FlipABit();
    case 9:
    case 10:
      return AdminSomething();
    case 11:
      return StartReader(job);
    case 12:
      tmpfs_full_ = Chance(0.3);
      return;
    case 13:
      job.slot_bytes = kSlotBytes * (roomy_ ? 1 + Below(2) : 1);
      return;
    case 14:
      if (Chance(0.1)) {
        Reboot();
      }
      return;
    case 15:
      return BreakASlot();
    case 16:
    case 17:
      return StartRude();
    case 18:
      return FlipNewest(job);
    case 19:
      return GoBack(job);
    default:
      failure_rate_ = Chance(0.5) ? 0 : 0.02 * static_cast<double>(Below(5));
  }
}

bool World::MayDamage() const {
  return true;
}

void World::FlipABit() {
  if (files_.empty() || !MayDamage()) {
    return;
  }
  auto it = files_.begin();
  std::advance(it, static_cast<ptrdiff_t>(Below(files_.size())));
  File& file = *it->second;
  if (file.record) {
    Trace(absl::StrCat("a bit flips in slot ", file.slot));
    file.token = NewToken();
    oracle_.job(file.record->copy.job_name).damaged.insert(file.record->copy.id.checkpoint());
  }
}

// The newest committed step has a bad copy, and that is noticed by those who restore it.
void World::FlipNewest(JobPlan& job) {
  const v1::JobState* state = StateOf(job.name);
  const std::optional<CheckpointId> newest =
      state == nullptr ? std::nullopt : oracle_.NewestCommitted(*state, files_, job.world_size);
  if (!newest || !MayDamage()) {
    return;
  }
  const Rank rank = static_cast<Rank>(Below(job.world_size));
  for (const auto& [slot, file] : files_) {
    if (file->record && !file->foreign && file->record->copy.job_name == job.name &&
        file->record->copy.id.checkpoint() == *newest && file->record->copy.id.rank == rank) {
      Trace(absl::StrCat("a bit flips in slot ", slot, ", the newest step of ", job.name));
      file->token = NewToken();
      oracle_.job(job.name).damaged.insert(*newest);
    }
  }
  RestartJob(job, true);
}

// A person takes the job back to some step, and starts it again.
void World::GoBack(JobPlan& job) {
  const std::optional<CheckpointId> id = PickCopy(job);
  if (!id) {
    return;
  }
  v1::SetRestorePointRequest set;
  set.set_job(job.name);
  set.set_attempt(id->attempt);
  set.set_step(id->step);
  oracle_.job(job.name).asked_since.insert(*id);
  Feed(AdminRequest{next_admin_++, Caller{{1, 1}, job.uid, job.uid}, set});
  RestartJob(job, true);
}

// From now on the same thing fails with the slot's file whenever it is tried.
void World::BreakASlot() {
  std::vector<FilePtr> ours;
  for (const auto& [slot, file] : files_) {
    if (!file->foreign && !file->left_alone) {
      ours.push_back(file);
    }
  }
  if (ours.empty()) {
    return;
  }
  File& file = *ours[Below(ours.size())];
  const auto fault = static_cast<Fault>(Below(6));
  const bool gone =
      fault != Fault::kRemoveRecord && fault != Fault::kDelete && MayDamage() && Chance(0.5);
  file.faults[fault] =
      gone ? absl::DataLossError("the file is gone") : absl::UnavailableError("EIO");
  Trace(absl::StrCat("slot ", file.slot, " fails from now on: fault ", static_cast<int>(fault),
                     gone ? ", its file is gone" : ""));
}

// One slot of one rank of each job, where there are others to go on with.
void World::BreakInCalm() {
  if (!roomy_ || config_.memory().slots_per_rank() < 3) {
    return;
  }
  for (JobPlan& job : jobs_) {
    const Client* client = job.ranks[Below(job.world_size)];
    for (const auto& [slot, file] : files_) {
      if (client != nullptr && file->mapped_by.count(client->process()) > 0 && Chance(0.5)) {
        const auto fault = std::array{Fault::kNote, Fault::kPublish, Fault::kRemoveRecord,
                                      Fault::kPopulate}[Below(4)];
        file->faults[fault] = absl::UnavailableError("EIO");
        Trace(absl::StrCat("slot ", slot, " of ", job.name, " fails from now on: fault ",
                           static_cast<int>(fault)));
        break;
      }
    }
  }
}

// What a daemon may find when it starts: a slot of another version, a copy that bears the name of a
// job and is another job's, a second copy of a shard.
void World::PlantSlots() {
  if (!stormy_ || planted_ >= 3 || !Chance(0.3)) {
    return;
  }
  auto file = std::make_shared<File>();
  file->bytes = kSlotBytes;
  file->token = NewToken();
  SlotId free = 0;
  while (files_.count(free) > 0) {
    ++free;
  }
  file->slot = files_.empty() || Chance(0.5) ? free : files_.rbegin()->first + 1;
  const JobPlan& job = jobs_[Below(jobs_.size())];
  const v1::JobState* state = StateOf(job.name);
  const uint64_t kind = Below(3);
  if (kind == 0 || state == nullptr) {
    file->left_alone = true;
  } else if (kind == 1) {
    SealedCopy copy;
    for (size_t i = 0; i < copy.id.job.bytes.size(); ++i) {
      copy.id.job.bytes[i] = static_cast<uint8_t>(1 + Below(250));
    }
    copy.id.attempt = state->highest_attempt() + Below(2);
    copy.id.step = 1'000'000;
    copy.job_name = job.name;
    copy.world_size = 1;
    copy.generation = 1;
    copy.image_bytes = kSlotBytes / 2;
    copy.descent = {{copy.id.attempt, {}}};
    file->content = copy.id;
    file->record = FileRecord{copy, file->token};
    file->note.set_generation(1);
  } else {
    const auto of = std::find_if(files_.begin(), files_.end(), [](const auto& f) {
      return f.second->record && !f.second->foreign;
    });
    if (of == files_.end()) {
      return;
    }
    file->slot = files_.rbegin()->first + 1;
    file->content = of->second->content;
    file->token = of->second->token;
    file->uid = of->second->uid;
    file->record = of->second->record;
    file->note.set_generation(of->second->note.generation());
  }
  Trace(absl::StrCat("slot ", file->slot, " appears, kind ", kind));
  ++planted_;
  bytes_max_ += file->bytes;
  files_[file->slot] = file;
}

// Which of the copies that a starting daemon finds are nobody's.
void World::MarkForeign() {
  std::set<ShardId> seen;
  for (auto it = files_.begin(); it != files_.end();) {
    File& file = *it->second;
    const bool was_foreign = std::exchange(file.foreign, false);
    if (!file.record || file.left_alone || file.record->copy.generation != file.note.generation()) {
      ++it;
      continue;
    }
    const SealedCopy& copy = file.record->copy;
    const bool known = states_.count(copy.id.job.ToBytes()) > 0;
    if (!known && was_foreign && StateOf(copy.job_name) == nullptr) {
      it = files_.erase(it);  // its name is free again: somebody has cleaned up
      continue;
    }
    file.foreign = known ? !seen.insert(copy.id).second : StateOf(copy.job_name) != nullptr;
    ++it;
  }
}

void World::Reboot() {
  Trace("the node is rebooted");
  KillDaemon();
  EndAll();
  files_.clear();
  LosePower();
  ++boots_;
  CopiesLost();
  for (auto& [name, truth] : oracle_.jobs()) {
    const v1::JobState* state = StateOf(name);
    // What was committed a moment ago and is not noted anywhere else is forgotten with the memory.
    std::erase_if(truth.acknowledged, [&](const auto& a) {
      return state == nullptr || !Oracle::AnyCommitted(*state, a.first.attempt);
    });
  }
  After(seconds(3), [this] { StartDaemon(); });
}

void World::AdminSomething() {
  JobPlan& job = jobs_[Below(jobs_.size())];
  JobTruth& truth = oracle_.job(job.name);
  AdminRequest request{next_admin_++, Caller{{1, 1}, job.uid, job.uid}, v1::GetStatusRequest()};
  switch (Below(stormy_ ? 5 : 3)) {
    case 0: {
      if (!stormy_ && !CanRestore(job)) {
        return;  // (it is about to start from scratch, as it was told to)
      }
      v1::SetRestorePointRequest set;
      set.set_job(job.name);
      set.set_clear(Chance(0.2));
      truth.cleared = truth.cleared || set.clear();
      const std::optional<CheckpointId> id = PickCopy(job);
      if (!set.clear() && id) {
        set.set_attempt(id->attempt);
        set.set_step(id->step);
        truth.asked_since.insert(*id);
      }
      request.request = set;
      break;
    }
    case 1: {
      if (!stormy_ && !roomy_) {
        return;  // a verification keeps slots from being filled
      }
      v1::VerifyRequest verify;
      verify.set_job(job.name);
      verify.set_all_steps(true);
      request.request = verify;
      break;
    }
    case 2: {
      v1::ListCheckpointsRequest list;
      list.set_job(job.name);
      request.request = list;
      break;
    }
    case 3: {
      // When nothing can be read, a person decides to begin anew.
      if (StateOf(job.name) != nullptr && !CanRestore(job)) {
        v1::SetRestorePointRequest set;
        set.set_job(job.name);
        set.set_from_scratch(true);
        truth.from_scratch_since = true;
        request.request = set;
      }
      break;
    }
    default:
      return RemoveJob(job.name, job.uid);
  }
  admin_[request.token] = absl::StrCat("request ", request.request.index(), " for ", job.name);
  Feed(request);
}

void World::ClearRestorePoint(const JobPlan& job) {
  v1::SetRestorePointRequest set;
  set.set_job(job.name);
  set.set_clear(true);
  oracle_.job(job.name).cleared = true;
  Feed(AdminRequest{next_admin_++, Caller{{1, 1}, job.uid, job.uid}, set});
}

void World::RemoveJob(const std::string& name, uint32_t uid) {
  v1::RemoveJobRequest remove;
  remove.set_job(name);
  const AdminToken token = next_admin_++;
  admin_[token] = "removal of " + name;
  Feed(AdminRequest{token, Caller{{1, 1}, uid, uid}, remove});
  if (admin_.count(token) > 0) {  // not refused: what it had committed is given up
    oracle_.job(name).acknowledged.clear();
    oracle_.job(name).being_removed = true;
  }
}

}  // namespace holdfast::sim
