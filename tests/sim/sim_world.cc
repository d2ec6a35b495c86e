#include "tests/sim/sim_world.h"

#include <algorithm>
#include <cstdio>

#include "absl/strings/str_cat.h"
#include "tests/sim/sim_client.h"
#include "tests/sim/sim_rude.h"

namespace holdfast::sim {

using std::chrono::milliseconds;
using std::chrono::seconds;

World::World(uint64_t seed, WorldOptions options)
    : options_(options), random_(seed), tier_random_(seed * 0x9e3779b97f4a7c15u + 1) {
  config_.mutable_memory()->set_slots_per_rank(2 + static_cast<uint32_t>(Below(3)));
  config_.mutable_memory()->set_slots_max(1000);
  config_.mutable_memory()->set_keep_committed(Chance(0.3) ? 1 + static_cast<uint32_t>(Below(3))
                                                           : 0);
  config_.mutable_save()->set_commit_deadline_ms(5000 + Below(30'000));
  config_.mutable_session()->set_deadline_max_ms(60'000);
  // (What is older is judged as if it was waited for ever: recovery/fall_back.h has its own tests.)
  config_.mutable_restore()->set_wait_for_copies_ms(3'600'000);
  config_.mutable_socket()->set_requests_per_connection_max(64);
  config_.mutable_admin()->set_request_timeout_ms(5000);
  failure_rate_ = Chance(0.5) ? 0.03 : 0;
  MakeJobs();
  MakeTiers();
}

World::~World() = default;

void World::MakeJobs() {
  const size_t count = options_.cramped ? 1 : 1 + Below(3);
  uint64_t slots = 0;
  for (size_t i = 0; i < count; ++i) {
    JobPlan job;
    job.name = absl::StrCat("job", i);
    job.uid = 1000 + static_cast<uint32_t>(Below(2));
    job.world_size = (options_.cramped ? 3 : 1) + static_cast<uint32_t>(Below(4));
    job.launch_ids = Chance(0.4);
    job.pace_ms = static_cast<int64_t>(20 + Below(300));
    job.uneven = Chance(0.5) &&
                 80 * static_cast<uint64_t>(job.pace_ms) < config_.save().commit_deadline_ms();
    job.ranks.resize(job.world_size);
    slots += job.world_size;
    jobs_.push_back(job);
  }
  // Sometimes tight: two slots for each rank, and hardly more.
  roomy_ = !options_.cramped && Chance(0.5);
  rude_ = Chance(0.5);
  bytes_max_ =
      (2 * slots + (roomy_ ? 10 * slots + (rude_ ? kRudeSlots : 0) : Below(3))) * kSlotBytes;
}

void World::After(Duration delay, std::function<void()> what) {
  queue_[{(now_ + delay).ns, next_event_++}] = std::move(what);
}

void World::Trace(const std::string& text) {
  if (options_.trace) {
    std::fprintf(stderr, "%10.4f %s\n", static_cast<double>(now_.ns) / 1e9, text.c_str());
  }
}

const v1::JobState* World::StateOf(const std::string& job) const {
  for (const auto& [uuid, state] : states_) {
    if (state.name() == job) {
      return &state;
    }
  }
  return nullptr;
}

bool World::CanRestore(const JobPlan& job) const {
  const v1::JobState* state = StateOf(job.name);
  return state != nullptr && oracle_.NewestCommitted(*state, files_, job.world_size).has_value();
}

void World::Step() {
  const auto first = queue_.begin();
  const std::function<void()> what = std::move(first->second);
  now_ = {std::max(now_.ns, first->first.first)};
  queue_.erase(first);
  ++events_;
  what();
  CheckDeadlines();
}

void World::Run() {
  StartDaemon();
  for (JobPlan& job : jobs_) {
    RestartJob(job, true);
  }
  After(milliseconds(500), [this] { Trouble(); });
  if (tiers_) {
    After(milliseconds(500), [this] { TierTrouble(); });
  }
  const MonotonicTime storm_ends = now_ + options_.stormy;
  while (now_ < storm_ends && violation().empty()) {
    Step();
  }
  if (violation().empty()) {
    Calm();
  }
  const MonotonicTime calm_ends = now_ + options_.calm;
  while (now_ < calm_ends && violation().empty()) {
    Step();
    for (const JobPlan& job : jobs_) {
      for (const auto& [rank, saves] : job.saves) {
        if (saves > 60 && HasEnough()) {
          oracle_.Violated(absl::StrCat(job.name, " rank ", rank, " has saved ", saves,
                                        " times, and nothing was committed"));
        }
      }
    }
  }
  if (violation().empty()) {
    CheckTheEnd();
  }
}

std::string World::Summary() const {
  return absl::StrCat(jobs_.size(), " jobs, ", events_, " events, ", commits_, " commits, ",
                      restores_, " ranks restored, ", kills_, " processes killed, ", restarts_,
                      " daemon starts");
}

// A job that lives has its slots mapped, so others cannot have them: several jobs need room for all
// that they may take.
bool World::HasEnough() const {
  return roomy_ || (jobs_.size() == 1 && !rude_);
}

// A step that was begun must end: committed, or given up at its deadline at the latest.
void World::Began(const std::string& job, CheckpointId id) {
  const v1::JobState* state = StateOf(job);
  if (state == nullptr || !begun_.insert({state->job_uuid(), id, life_}).second) {
    return;
  }
  const Duration by = milliseconds(config_.save().commit_deadline_ms()) + seconds(1);
  After(by, [this, job, id, uuid = state->job_uuid(), life = life_] {
    const JobTruth& truth = oracle_.job(job);
    const auto sealed = truth.acknowledged.find(id);
    const bool over = !InLife(life) || states_.count(uuid) == 0 || truth.opened != id.attempt ||
                      truth.being_removed || truth.given_up.count(id) > 0;
    if (!over &&
        (sealed == truth.acknowledged.end() || sealed->second.size() < truth.World(id.attempt))) {
      oracle_.Violated(absl::StrCat("job ", job, " attempt ", id.attempt, " step ", id.step,
                                    " was begun and never ended"));
    }
  });
}

void World::CountCommit(const std::string& name) {
  ++commits_;
  for (JobPlan& job : jobs_) {
    if (job.name == name) {
      job.saves.clear();
    }
  }
}

// ---- processes ----

void World::Launch(JobPlan& job, Rank rank) {
  const int32_t pid =
      Chance(0.1) && next_pid_ > 1010 ? next_pid_ - 1 - static_cast<int32_t>(Below(5)) : next_pid_;
  const ProcessId process{pid, next_event_};  // pids come again; the start time tells them apart
  ++next_pid_;
  clients_.push_back(std::make_unique<Client>(this, &job, rank, process, false));
  job.ranks[rank] = clients_.back().get();
  clients_.back()->Start();
}

void World::Ended(Peer* peer) {
  ++kills_;
  for (const auto& [slot, file] : files_) {
    file->mapped_by.erase(peer->process());
    file->read_by.erase(peer->process());
  }
  if (watched_.count(peer->process()) > 0) {
    After(Latency(), [this, process = peer->process()] {
      if (watched_.count(process) > 0) {
        Feed(ProcessEnded{process});
      }
    });
  }
}

void World::RankEnded(Client* client) {
  JobPlan& job = client->job();
  if (client->reader() || job.ended || job.ranks[client->rank()] != client) {
    return;
  }
  // The launcher notices and restarts the rank, or all of them.
  const bool all = Chance(0.6);
  After(milliseconds(100 + Below(3000)), [this, &job, client, all] {
    if (!job.ended && job.ranks[client->rank()] == client) {
      all ? RestartJob(job, true) : Launch(job, client->rank());
    }
  });
}

void World::KillClient(Client* client, Duration linger) {
  if (client == nullptr || !client->running()) {
    return;
  }
  client->Kill();
  After(linger, [client] { client->End(); });
}

void World::RestartJob(JobPlan& job, bool all) {
  if (job.launch_ids) {
    job.launch = absl::StrCat(job.name, "-", ++job.launches);
  }
  job.choice.reset();
  if (stormy_ && Chance(0.25)) {
    if (const std::optional<CheckpointId> id = PickCopy(job)) {
      job.choice = CheckpointId{Chance(0.5) ? 0 : id->attempt, id->step};
    }
  }
  for (Rank rank = 0; rank < job.world_size; ++rank) {
    if (!all && job.ranks[rank] != nullptr && job.ranks[rank]->running()) {
      continue;
    }
    Client* old = std::exchange(job.ranks[rank], nullptr);
    if (old != nullptr) {
      KillClient(old, milliseconds(stormy_ ? Below(4000) : 10));
    }
    After(milliseconds(Below(stormy_ ? 3000 : 200)), [this, &job, rank, launch = job.launch] {
      if (!job.ended && job.ranks[rank] == nullptr && launch == job.launch) {
        Launch(job, rank);
      }
    });
  }
}

void World::StartReader(JobPlan& job) {
  clients_.push_back(std::make_unique<Client>(this, &job, static_cast<Rank>(Below(job.world_size)),
                                              ProcessId{next_pid_++, next_event_}, true));
  clients_.back()->Start();
}

void World::StartRude() {
  const auto running =
      std::count_if(rudes_.begin(), rudes_.end(), [](const auto& rude) { return rude->alive(); });
  if (!rude_ || running >= 2) {
    return;
  }
  rudes_.push_back(std::make_unique<Rude>(this, ProcessId{next_pid_++, next_event_},
                                          1000 + static_cast<uint32_t>(Below(2))));
  rudes_.back()->Start();
}

void World::EndAll() {
  for (size_t i = 0; i < clients_.size(); ++i) {
    clients_[i]->End();
  }
  for (const auto& rude : rudes_) {
    rude->End();
  }
}

// ---- the end ----

// No more faults: everybody starts afresh, and from now on all must go well.
void World::Calm() {
  Trace("calm");
  stormy_ = false;
  failure_rate_ = 0;
  tmpfs_full_ = false;
  CalmTiers();
  for (JobPlan& job : jobs_) {
    job.ended = true;
    job.saves.clear();
  }
  for (const auto& [slot, file] : files_) {
    file->faults.clear();
  }
  EndAll();
  StartDaemon();
  After(seconds(15), [this] {
    for (const JobPlan& job : jobs_) {  // its name was free for a moment, and another user took it
      if (const v1::JobState* state = StateOf(job.name);
          state != nullptr && state->uid() != job.uid) {
        RemoveJob(job.name, state->uid());
      }
    }
  });
  After(seconds(20), [this] {
    for (JobPlan& job : jobs_) {
      job.ended = false;
      job.slot_bytes = kSlotBytes;
      job.saves.clear();
      if (StateOf(job.name) != nullptr && !CanRestore(job)) {
        v1::SetRestorePointRequest set;
        set.set_job(job.name);
        set.set_from_scratch(true);
        oracle_.job(job.name).from_scratch_since = true;
        Feed(AdminRequest{next_admin_++, Caller{{1, 1}, job.uid, job.uid}, set});
      }
      RestartJob(job, true);
    }
    commits_ = 0;
    nvme_.committed = remote_.committed = 0;
    StartRude();
    AdminInCalm();
    After(seconds(20), [this] { BreakInCalm(); });
  });
}

void World::AdminInCalm() {
  if (over_) {
    return;
  }
  AdminSomething();
  After(seconds(3 + Below(10)), [this] { AdminInCalm(); });
}

void World::CheckTheEnd() {
  if (HasEnough() && commits_ < 3 * jobs_.size()) {
    return oracle_.Violated(
        absl::StrCat("only ", commits_, " commits of ", jobs_.size(), " healthy jobs"));
  }
  CheckTiersInCalm();
  for (JobPlan& job : jobs_) {
    job.ended = true;
  }
  over_ = true;
  EndAll();
  for (const auto& [slot, file] : files_) {
    file->faults.clear();
  }
  const auto settle = [this] {
    for (const MonotonicTime until = now_ + seconds(60);
         now_ < until && violation().empty() && !queue_.empty();) {
      Step();
    }
  };
  settle();
  const std::map<std::string, v1::JobState> states = states_;
  for (const auto& [uuid, state] : states) {
    RemoveJob(state.name(), state.uid());
  }
  settle();
  std::erase_if(files_, [](const auto& f) { return f.second->foreign || f.second->left_alone; });
  if (!files_.empty()) {
    oracle_.Violated(absl::StrCat(files_.size(), " slots leaked: slot ", files_.begin()->first,
                                  " is still there"));
  }
  CheckTiersAtTheEnd();
  if (!states_.empty()) {
    oracle_.Violated("a job's state is still there after the job was removed");
  }
}

}  // namespace holdfast::sim
