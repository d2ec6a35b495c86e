#include "tests/sim/cluster_world.h"

#include <algorithm>
#include <array>
#include <cinttypes>
#include <cstdio>

#include "absl/strings/str_cat.h"

namespace holdfast::sim::cluster {

using std::chrono::milliseconds;
using std::chrono::seconds;

namespace {

// How long healthy jobs may take until they have committed again.
constexpr uint64_t kCalmCommits = 3;
constexpr int64_t kMoment = 20'000'000;  // ns
// After the calm begins: leases that were lost, hosts that were cut off, drains that hung.
constexpr Duration kAllAreBack = std::chrono::seconds(30);

}  // namespace

bool Job::Runs(const RankProcess* process) const {
  return process->rank() < ranks.size() && ranks[process->rank()] == process;
}

Step Job::SlowestStep(Attempt attempt, int64_t now) {
  if (ranks.size() > kLargeJob && slowest_of_ == attempt && now - slowest_at_ < kMoment) {
    return slowest_;
  }
  slowest_ = UINT64_MAX;
  slowest_of_ = attempt;
  slowest_at_ = now;
  for (const RankProcess* rank : ranks) {
    if (rank != nullptr && rank->running() && rank->training() && rank->attempt() == attempt) {
      slowest_ = std::min(slowest_, rank->step());
    }
  }
  return slowest_;
}

World::World(const Options& o) : options(o), t(o.seed), truth(*this), etcd(*this), network(*this) {
  MakeNodes();
  MakeJobs();
  MakeWeather();
}

World::~World() = default;

void World::Trace(const std::string& text) const {
  if (options.trace) {
    std::fprintf(stderr, "%12.4f %s\n", static_cast<double>(t.now()) / 1e9, text.c_str());
  }
}

std::string World::Command() const {
  std::string command = absl::StrCat("bin/cluster_sim --seed ", options.seed, " --rates ",
                                     kRatesNames.at(static_cast<size_t>(options.rates)));
  const auto add = [&command](const char* name, uint64_t value) {
    if (value != 0) {
      absl::StrAppend(&command, " --", name, " ", value);
    }
  };
  add("nodes", options.nodes);
  add("spares", options.nodes != 0 ? options.spares : 0);
  add("ranks", options.ranks);
  add("jobs", options.jobs);
  add("pace-ms", options.pace_ms);
  add("steps", options.steps);
  add("minutes", static_cast<uint64_t>(options.stormy / std::chrono::minutes(1)));
  return command;
}

std::string World::Summary() const {
  return absl::StrCat(nodes_.size(), " nodes, ", jobs_.size(), " jobs, ", counts.events,
                      " events, ", counts.messages, " messages, ", counts.commits, " commits, ",
                      counts.restores, " ranks restored, ", counts.Faults(), " faults, ",
                      t.now() / 1'000'000'000, " s");
}

// ---- What there is ----

void World::MakeNodes() {
  const uint32_t count = options.nodes != 0 ? options.nodes : 3 + static_cast<uint32_t>(t.Below(6));
  v1::DaemonConfig config;
  config.mutable_cluster()->set_name("sim");
  slots_per_rank_ = 2 + static_cast<uint32_t>(t.Below(3));
  config.mutable_memory()->set_slots_per_rank(slots_per_rank_);
  config.mutable_memory()->set_slots_max(4096);
  config.mutable_save()->set_commit_deadline_ms(10'000 + t.Below(50'000));
  config.mutable_session()->set_deadline_max_ms(60'000);
  // (Longer than anything is away that comes back: nothing newer may be passed over for that.)
  config.mutable_restore()->set_wait_for_copies_ms(90'000);
  config.mutable_socket()->set_requests_per_connection_max(64);
  config.mutable_admin()->set_request_timeout_ms(10'000);
  config.mutable_nvme()->add_dirs("/nvme0");
  config.mutable_nvme()->set_high_watermark_percent(90);
  config.mutable_nvme()->set_low_watermark_percent(70);
  config.mutable_remote()->set_dir("/remote");
  uint64_t every = 1;
  for (v1::TierPolicy* policy :
       {config.mutable_policy()->mutable_nvme(), config.mutable_policy()->mutable_remote()}) {
    every *= 1 + t.Below(5);
    policy->set_every_steps(every);
    policy->set_every_ms(0);
    policy->set_keep_last(1 + static_cast<uint32_t>(t.Below(3)));
    policy->set_keep_every_steps(0);
    policy->set_bytes_max(0);
    policy->set_verify(v1::TierPolicy::VERIFY_SAMPLE);
  }
  config.mutable_policy()->mutable_remote()->set_share_replicas(true);
  replicas_ = options.seed % 3;
  config.mutable_policy()->set_replicas(replicas_);
  for (uint32_t i = 0; i < count; ++i) {
    const std::string name = absl::StrCat("n", i);
    index_[name] = i;
    config.mutable_cluster()->clear_labels();
    if (options.seed / 3 % 2 == 1) {
      v1::Label& zone = *config.mutable_cluster()->add_labels();
      zone.set_name("zone");
      zone.set_value(absl::StrCat("z", i / 2));
    }
    nodes_.push_back(std::make_unique<Node>(*this, i, name, config));
  }
}

void World::MakeJobs() {
  const uint64_t count = options.jobs != 0 ? options.jobs : 1 + t.Below(2);
  reshards_ = options.rates == Rates::kReshards || (options.ranks == 0 && options.seed % 7 > 4);
  for (uint64_t i = 0; i < count; ++i) {
    Job job;
    job.name = absl::StrCat("job", i);
    job.world_size = options.ranks != 0 ? options.ranks : 2 + static_cast<uint32_t>(t.Below(15));
    job.usual_size = job.world_size;
    job.launch_ids = t.Chance(0.5);
    job.together = t.Chance(0.8);
    job.pace_ms = options.pace_ms != 0 ? options.pace_ms
                  : t.Chance(0.5)      ? 100 + t.Below(900)
                                       : 1000 + t.Below(9000);
    job.ranks.resize(job.world_size);
    // Blocks of ranks; the last nodes are spares.
    const auto used =
        static_cast<uint32_t>(nodes_.size() > options.spares ? nodes_.size() - options.spares : 1);
    for (Rank rank = 0; rank < job.world_size; ++rank) {
      job.node_of_rank.push_back(static_cast<uint32_t>(uint64_t{rank} * used / job.world_size));
    }
    jobs_.push_back(std::move(job));
  }
}

// ---- The launchers ----

bool World::Reachable(uint32_t index) const {
  const Node& of = *nodes_[index];
  return of.powered() && !of.lost() && draining_.count(index) == 0;
}

// Ranks stay where they were as long as their node is well.
bool World::Place(Job& job) {
  std::map<uint32_t, uint32_t> load;
  for (uint32_t i = 0; i < nodes_.size(); ++i) {
    if (Reachable(i) && (nodes_[i]->up() || t.Chance(0.2))) {
      load[i] = 0;
    }
  }
  if (load.empty()) {
    return false;
  }
  for (const uint32_t node : job.node_of_rank) {
    if (load.count(node) > 0) {
      ++load[node];
    }
  }
  std::map<uint32_t, uint32_t> moved;  // a node's ranks go together
  for (uint32_t& node : job.node_of_rank) {
    if (load.count(node) > 0) {
      continue;
    }
    const auto [to, fresh] = moved.try_emplace(node, 0);
    if (fresh) {
      to->second = std::min_element(load.begin(), load.end(), [](const auto& a, const auto& b) {
                     return a.second < b.second;
                   })->first;
    }
    node = to->second;
    ++load[node];
  }
  if (options.seed % 5 == 4 && t.Chance(0.3)) {
    GiveOtherPlaces(job, load);
  }
  return true;
}

// As schedulers do that remember nothing: each node's ranks come up on the next one.
void World::GiveOtherPlaces(Job& job, const std::map<uint32_t, uint32_t>& load) {
  counts.states["placed elsewhere"]++;
  for (uint32_t& node : job.node_of_rank) {
    const auto next = load.upper_bound(node);
    node = next == load.end() ? load.begin()->first : next->first;
  }
}

// It comes back with more ranks or fewer, and later with as many as it had, on the same nodes.
void World::Resize(Job& job) {
  if (!reshards_ || !t.Chance(options.rates == Rates::kReshards ? 0.6 : 0.3)) {
    return;
  }
  const uint32_t usual = job.usual_size;
  const std::array<uint32_t, 6> sizes = {usual,     usual,     usual + 1,
                                         usual - 1, 2 * usual, (usual + 1) / 2};
  const uint32_t size = sizes[t.Below(sizes.size())];
  if (size == job.world_size) {
    return;
  }
  counts.states[size > job.world_size ? "job: comes back with more ranks"
                                      : "job: comes back with fewer ranks"]++;
  Trace(absl::StrCat(job.name, " comes back with ", size, " ranks, not ", job.world_size));
  const std::vector<uint32_t> before = job.node_of_rank;
  job.node_of_rank.clear();
  for (Rank rank = 0; rank < size; ++rank) {
    job.node_of_rank.push_back(before[uint64_t{rank} * before.size() / size]);
  }
  job.world_size = size;
  job.ranks.assign(size, nullptr);
}

void World::Launch(Job& job, Rank rank) {
  Node& on = *nodes_[job.node_of_rank[rank]];
  if (!on.powered()) {
    return Restart(job);
  }
  processes_.push_back(std::make_unique<RankProcess>(*this, on, job, rank, job.launch));
  job.ranks[rank] = processes_.back().get();
  job.ranks[rank]->Start();
}

void World::Kill(RankProcess* process, Duration linger) {
  if (process == nullptr || !process->alive()) {
    return;
  }
  if (linger > seconds(1)) {
    Count(Fault::kProcessLingers);
  }
  process->Kill();
  t.After(linger, [process] { process->End(); });
}

// All ranks anew.
void World::Restart(Job& job) {
  if (job.ended || std::exchange(job.restarting, true)) {
    return;
  }
  for (RankProcess*& rank : job.ranks) {
    RankProcess* old = std::exchange(rank, nullptr);
    if (old == nullptr || !old->alive()) {
      continue;
    }
    // Sometimes the launcher does not get through to a process, which goes on for a while.
    if (stormy_ && t.Chance(0.1)) {
      Count(Fault::kProcessLingers);
      t.After(t.Millis(5'000, 120'000), [old] { old->End(); });
    } else {
      Kill(old, stormy_ ? t.Millis(1, 2000) : Duration(milliseconds(10)));
    }
  }
  t.After(t.Millis(stormy_ ? 100 : 10, stormy_ ? 4000 : 500), [this, &job] {
    job.restarting = false;
    if (job.ended) {
      return;
    }
    Resize(job);
    if (!Place(job)) {
      return t.After(seconds(3), [this, &job] { Restart(job); });
    }
    ++job.launches;
    job.launch = job.launch_ids ? absl::StrCat(job.name, "-", job.launches) : "";
    for (Rank rank = 0; rank < job.world_size; ++rank) {
      t.After(t.Millis(0, stormy_ ? 2000 : 100), [this, &job, rank, launches = job.launches] {
        if (!job.ended && !job.restarting && job.launches == launches &&
            job.ranks[rank] == nullptr) {
          Launch(job, rank);
        }
      });
    }
  });
}

void World::RankEnded(RankProcess* process) {
  Job& job = process->job();
  if (job.ended || !job.Runs(process)) {
    return;
  }
  // (Those of a job that ends go one after the other.)
  t.After(operated() ? t.Millis(3000, 6000) : t.Millis(50, 2000), [this, &job, process] {
    if (job.ended || job.restarting || !job.Runs(process)) {
      return;
    }
    if (job.together || !stormy_ || t.Chance(0.3)) {
      return Restart(job);
    }
    job.ranks[process->rank()] = nullptr;
    Place(job);
    Launch(job, process->rank());
  });
}

// What nothing can be done about a person decides, after a while.
void World::Unreadable(Job& job, Attempt attempt, int64_t entered_at, const std::string& why) {
  Trace(absl::StrCat(job.name, " attempt ", attempt, ": ", why));
  std::vector<uint32_t> nodes;
  for (const RankProcess* rank : job.ranks) {
    if (rank == nullptr) {
      return;
    }
    nodes.push_back(rank->node().index);
  }
  if (!stormy_ && truth.PointSince(job.name, entered_at)) {
    return AskForNoPoint(job);  // what a person wants cannot be had: the person gives in
  }
  // (What a session that began before came to was the weather's.)
  const bool judged = entered_at > calm_since_;
  const auto there = judged ? truth.NewestReachable(job.name, nodes) : std::nullopt;
  if (there) {
    return truth.Violated(absl::StrCat("job ", job.name, ": ", why, ", although attempt ",
                                       there->attempt, " step ", there->step, " is there"));
  }
  if (++job.from_scratch_wishes % (4 * job.world_size) != 0) {
    return;
  }
  v1::SetRestorePointRequest request;
  request.set_job(job.name);
  request.set_from_scratch(true);
  truth.FromScratchAsked(job.name);
  for (const std::unique_ptr<Node>& each : nodes_) {
    if (each->up()) {
      return each->Ask(request, job.uid, nullptr);
    }
  }
}

void World::AskForNoPoint(const Job& job) {
  v1::SetRestorePointRequest request;
  request.set_job(job.name);
  request.set_clear(true);
  truth.RestorePointAsked(job.name);
  for (const std::unique_ptr<Node>& each : nodes_) {
    if (each->up()) {
      return each->Ask(request, job.uid, nullptr);
    }
  }
}

// ---- The run ----

// What is over is forgotten, but for what lives.
void World::Sweep() {
  std::erase_if(processes_, [&](const std::unique_ptr<RankProcess>& process) {
    return !process->alive() && !process->job().Runs(process.get()) && process->Forgotten(t.now());
  });
  t.After(seconds(60), [this] { Sweep(); });
}

// How much of the time is spent on what it is about.
void World::Sample() {
  const Duration every = seconds(nodes_.size() > 16 ? 10 : 1);
  const bool trains = std::any_of(jobs_.begin(), jobs_.end(), [](const Job& job) {
    return std::all_of(job.ranks.begin(), job.ranks.end(), [](const RankProcess* rank) {
      return rank != nullptr && rank->running() && rank->training();
    });
  });
  counts.training += trains ? static_cast<uint64_t>(every.count()) : 0;
  t.After(every, [this] { Sample(); });
}

void World::Run() {
  for (const std::unique_ptr<Node>& each : nodes_) {
    each->Boot();
  }
  const bool at_once = nodes_.size() > 16;
  for (const std::unique_ptr<Node>& each : nodes_) {
    each->NewIncarnation();
    if (at_once) {
      etcd.Register(*each);
    }
  }
  for (const std::unique_ptr<Node>& each : nodes_) {
    each->StartDaemon();
  }
  for (Job& job : jobs_) {
    Restart(job);
  }
  if (options.rates != Rates::kNone) {
    t.After(Between(), [this] { Trouble(); });
  }
  Sweep();
  Sample();
  if (options.steps != 0) {
    SayHowFar();
  }
  const int64_t begun = t.now();
  const int64_t storm_ends = begun + options.stormy.count();
  while (violation().empty() && (options.steps != 0 ? counts.commits < options.steps * jobs_.size()
                                                    : t.now() < storm_ends)) {
    t.Step();
  }
  if (violation().empty()) {
    Calm();
  }
  const int64_t calm_ends = t.now() + options.calm.count();
  if (violation().empty()) {
    const auto ask_where = [this] {
      for (const Job& job : jobs_) {
        AskWhereAllLies(job.name, {});
      }
    };
    t.At(t.now() + (kAllAreBack - seconds(5)).count(), ask_where);
    t.At(t.now() + (kAllAreBack - seconds(10)).count(), [this] {
      for (const Job& job : jobs_) {
        AskWhatIsMended(job.name, {});
      }
    });
    t.At(calm_ends - Duration(seconds(10)).count(), ask_where);
    if (operated()) {
      t.At(calm_ends - Duration(seconds(60)).count(), [this] { TellJobsToEnd(); });
    }
  }
  while (t.now() < calm_ends && violation().empty()) {
    t.Step();
  }
  if (violation().empty()) {
    CheckTheEnd();
  }
  counts.nanoseconds = static_cast<uint64_t>(t.now() - begun);
  counts.seeds = 1;
}

// A run until so many steps were committed may take hours.
void World::SayHowFar() {
  std::fprintf(stderr,
               "%" PRId64 " s: %" PRIu64 " of %" PRIu64 " steps, %" PRIu64 " events, %" PRIu64
               " faults\n",
               t.now() / 1'000'000'000, counts.commits, options.steps * jobs_.size(), counts.events,
               counts.Faults());
  t.After(std::chrono::minutes(1), [this] { SayHowFar(); });
}

// No more faults: all nodes but those that are lost come back, all jobs are started anew, and from
// now on all must go well.
void World::Calm() {
  Trace("calm");
  stormy_ = false;
  calm_since_ = t.now();
  etcd.Calm();
  network.ClearRoads();
  SimTier& far = remote.tier;
  far.fails = 0;
  far.full = far.unreadable = false;
  far.hung_until = {t.now()};
  for (const std::unique_ptr<Node>& each : nodes_) {
    each->state_failures = each->slot_failures = 0;
    each->nvme().fails = 0;
    each->nvme().hung_until = {t.now()};
    if (!each->powered() && !each->lost()) {
      each->PowerOn();
    } else {
      each->StartDaemon();
    }
  }
  for (const std::unique_ptr<RankProcess>& process : processes_) {
    process->Hang(Duration(0));
    if (process->alive() && !process->job().Runs(process.get())) {
      process->End();
    }
  }
  t.After(kAllAreBack, [this] {
    settled_ = true;
    for (const uint32_t index : std::set<uint32_t>(draining_)) {
      Drain(*nodes_[index], true);
    }
    for (Job& job : jobs_) {
      job.pace_ms = std::min<uint64_t>(job.pace_ms, 1000);
      Restart(job);
    }
    truth.ClearCommits();
    WatchMending({});
  });
}

void World::CheckTheEnd() {
  for (const Job& job : jobs_) {
    if (truth.CommitsOf(job.name) < kCalmCommits) {
      truth.Violated(absl::StrCat("job ", job.name, " committed ", truth.CommitsOf(job.name),
                                  " steps in calm weather; it is hosted by '",
                                  etcd.HostOf(job.name), "'"));
    }
    const auto there =
        std::count_if(nodes_.begin(), nodes_.end(), [](const auto& node) { return !node->lost(); });
    // (With two slots a job that saves all the time does not wait for replicas; nor with three, if
    // it has come back with so many ranks on a node that remote is always the tier that it waits
    // for.)
    const bool peers = replicas_ > 0 && there > 1 && slots_per_rank_ > (reshards_ ? 3 : 2);
    for (const TierKind tier : {TierKind::kNvme, TierKind::kRemote, TierKind::kPeer}) {
      if ((tier != TierKind::kPeer || peers) && truth.TierCommitsOf(job.name, tier) == 0) {
        truth.Violated(absl::StrCat("job ", job.name, " committed nothing in ",
                                    std::string(TierName(tier)), " in calm weather"));
      }
    }
  }
  for (const std::unique_ptr<Node>& each : nodes_) {
    if (each->parts() > 0) {
      truth.Violated(absl::StrCat(each->name, ": ", each->parts(),
                                  " shards are open in parts, and all ranks train"));
    }
  }
}

}  // namespace holdfast::sim::cluster
