#include "tests/sim/sim_world.h"

#include <algorithm>
#include <cstdio>

#include "absl/strings/str_cat.h"
#include "tests/sim/sim_client.h"

namespace holdfast::sim {

using std::chrono::milliseconds;
using std::chrono::seconds;

World::World(uint64_t seed, WorldOptions options) : options_(options), random_(seed) {
  config_.mutable_memory()->set_slots_per_rank(2 + static_cast<uint32_t>(Below(3)));
  config_.mutable_memory()->set_slots_max(1000);
  config_.mutable_memory()->set_keep_committed(Chance(0.3) ? 1 + static_cast<uint32_t>(Below(3))
                                                           : 0);
  config_.mutable_save()->set_commit_deadline_ms(5000 + Below(30'000));
  config_.mutable_session()->set_deadline_max_ms(60'000);
  config_.mutable_socket()->set_requests_per_connection_max(64);
  config_.mutable_admin()->set_request_timeout_ms(5000);
  failure_rate_ = Chance(0.5) ? 0.03 : 0;
  MakeJobs();
}

World::~World() = default;

void World::MakeJobs() {
  const size_t count = 1 + Below(3);
  uint64_t slots = 0;
  for (size_t i = 0; i < count; ++i) {
    JobPlan job;
    job.name = absl::StrCat("job", i);
    job.uid = 1000 + static_cast<uint32_t>(Below(2));
    job.world_size = 1 + static_cast<uint32_t>(Below(4));
    job.launch_ids = Chance(0.4);
    job.pace_ms = static_cast<int64_t>(20 + Below(300));
    job.ranks.resize(job.world_size);
    slots += job.world_size;
    jobs_.push_back(job);
  }
  // Sometimes tight: two slots for each rank, and hardly more.
  roomy_ = Chance(0.5);
  bytes_max_ = (2 * slots + (roomy_ ? 10 * slots : Below(3))) * kSlotBytes;
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
  return roomy_ || jobs_.size() == 1;
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

void World::Ended(Client* client) {
  ++kills_;
  for (const auto& [slot, file] : files_) {
    file->mapped_by.erase(client->process());
    file->read_by.erase(client->process());
  }
  if (watched_.count(client->process()) > 0) {
    After(Latency(), [this, process = client->process()] {
      if (watched_.count(process) > 0) {
        Feed(ProcessEnded{process});
      }
    });
  }
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

// A step of the job of which there is something; an older one as likely as the newest.
std::optional<CheckpointId> World::PickCopy(const JobPlan& job) {
  std::vector<CheckpointId> there;
  for (const auto& [slot, file] : files_) {
    if (file->record && file->record->copy.job_name == job.name) {
      there.push_back(file->record->copy.id.checkpoint());
    }
  }
  return there.empty() ? std::nullopt : std::optional(there[Below(there.size())]);
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

// ---- trouble ----

void World::Trouble() {
  if (!stormy_) {
    return;
  }
  After(milliseconds(200 + Below(6000)), [this] { Trouble(); });
  JobPlan& job = jobs_[Below(jobs_.size())];
  Client* client = job.ranks[Below(job.world_size)];
  switch (Below(16)) {
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
        CloseSocket(client->connection());
        client->OnClosed();
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
    default:
      failure_rate_ = Chance(0.5) ? 0 : 0.02 * static_cast<double>(Below(5));
  }
}

void World::FlipABit() {
  if (files_.empty()) {
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

void World::Reboot() {
  Trace("the node is rebooted");
  KillDaemon();
  for (size_t i = 0; i < clients_.size(); ++i) {
    clients_[i]->End();
  }
  files_.clear();
  for (auto& [name, truth] : oracle_.jobs()) {
    for (const auto& [id, ranks] : truth.acknowledged) {
      truth.damaged.insert(id);
    }
  }
  After(seconds(3), [this] { StartDaemon(); });
}

void World::AdminSomething() {
  JobPlan& job = jobs_[Below(jobs_.size())];
  JobTruth& truth = oracle_.job(job.name);
  AdminRequest request{next_admin_++, Caller{{1, 1}, job.uid, job.uid}, v1::GetStatusRequest()};
  switch (Below(5)) {
    case 0: {
      v1::SetRestorePointRequest set;
      set.set_job(job.name);
      set.set_clear(Chance(0.2));
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
      const v1::JobState* state = StateOf(job.name);
      if (state != nullptr && !oracle_.NewestCommitted(*state, files_)) {
        v1::SetRestorePointRequest set;
        set.set_job(job.name);
        set.set_from_scratch(true);
        truth.from_scratch_asked = true;
        request.request = set;
      }
      break;
    }
    default:
      return RemoveJob(job);
  }
  admin_[request.token] = absl::StrCat("request ", request.request.index(), " for ", job.name);
  Feed(request);
}

void World::ClearRestorePoint(const JobPlan& job) {
  v1::SetRestorePointRequest set;
  set.set_job(job.name);
  set.set_clear(true);
  Feed(AdminRequest{next_admin_++, Caller{{1, 1}, job.uid, job.uid}, set});
}

void World::RemoveJob(const JobPlan& job) {
  v1::RemoveJobRequest remove;
  remove.set_job(job.name);
  const AdminToken token = next_admin_++;
  admin_[token] = "removal of " + job.name;
  Feed(AdminRequest{token, Caller{{1, 1}, job.uid, job.uid}, remove});
  if (admin_.count(token) > 0) {  // not refused: what it had committed is given up
    oracle_.job(job.name).acknowledged.clear();
  }
}

// ---- the end ----

// No more faults: everybody starts afresh, and from now on all must go well.
void World::Calm() {
  Trace("calm");
  stormy_ = false;
  failure_rate_ = 0;
  tmpfs_full_ = false;
  for (JobPlan& job : jobs_) {
    job.ended = true;
    job.saves.clear();
  }
  for (size_t i = 0; i < clients_.size(); ++i) {
    clients_[i]->End();
  }
  StartDaemon();
  After(seconds(20), [this] {
    for (JobPlan& job : jobs_) {
      job.ended = false;
      job.slot_bytes = kSlotBytes;
      job.saves.clear();
      const v1::JobState* state = StateOf(job.name);
      if (state != nullptr && !oracle_.NewestCommitted(*state, files_)) {
        v1::SetRestorePointRequest set;
        set.set_job(job.name);
        set.set_from_scratch(true);
        oracle_.job(job.name).from_scratch_asked = true;
        Feed(AdminRequest{next_admin_++, Caller{{1, 1}, job.uid, job.uid}, set});
      }
      RestartJob(job, true);
    }
    commits_ = 0;
  });
}

void World::CheckTheEnd() {
  if (HasEnough() && commits_ < 3 * jobs_.size()) {
    return oracle_.Violated(
        absl::StrCat("only ", commits_, " commits of ", jobs_.size(), " healthy jobs"));
  }
  for (JobPlan& job : jobs_) {
    job.ended = true;
  }
  for (size_t i = 0; i < clients_.size(); ++i) {
    clients_[i]->End();
  }
  const auto settle = [this] {
    for (const MonotonicTime until = now_ + seconds(60);
         now_ < until && violation().empty() && !queue_.empty();) {
      Step();
    }
  };
  settle();
  uint64_t bytes = 0;
  for (const auto& [slot, file] : files_) {
    bytes += file->bytes;
  }
  for (const JobPlan& job : jobs_) {
    RemoveJob(job);
  }
  settle();
  if (!files_.empty()) {
    oracle_.Violated(absl::StrCat(files_.size(), " slots of ", bytes, " bytes leaked: slot ",
                                  files_.begin()->first, " is still there"));
  }
  if (!states_.empty()) {
    oracle_.Violated("a job's state is still there after the job was removed");
  }
}

}  // namespace holdfast::sim
