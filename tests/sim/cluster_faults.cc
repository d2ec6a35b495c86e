// What goes wrong in a simulated cluster, by kind, and how often.
#include <algorithm>
#include <array>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "tests/sim/cluster_world.h"

namespace holdfast::sim::cluster {

using std::chrono::minutes;
using std::chrono::seconds;

const char* NameOf(Fault fault) {
  static constexpr std::array<const char*, static_cast<size_t>(Fault::kCount)> kNames = {
      "process killed",
      "process hangs",
      "process lingers",
      "daemon killed",
      "daemon suspended",
      "node rebooted",
      "node lost",
      "two nodes cut off from each other",
      "cut one way",
      "node cut off from all",
      "link flaps",
      "slow link",
      "call lost",
      "answer lost",
      "call late",
      "etcd down",
      "node cut off from etcd",
      "etcd erased",
      "host removed from etcd",
      "etcd's answer lost",
      "etcd's watch late",
      "wall clock jumps",
      "bit flipped in memory",
      "bit flipped in nvme",
      "bit flipped in remote",
      "nvme copy lost",
      "nvme copy cut",
      "remote copy cut",
      "stale drive",
      "nvme fails",
      "nvme hangs",
      "remote fails",
      "remote full",
      "remote hangs",
      "remote unreadable",
      "state write fails",
      "slot operation fails",
      "restore point set",
      "step pinned",
      "step removed by hand",
      "step removed by force",
      "reader attaches",
      "another user's process joins",
      "another user's wish",
      "node drained, or not any more",
      "job told to end",
      "settings read again",
  };
  return kNames[static_cast<size_t>(fault)];
}

void Counts::Add(const Counts& other) {
  for (size_t i = 0; i < faults.size(); ++i) {
    faults[i] += other.faults[i];
  }
  for (const auto& [name, count] : other.states) {
    states[name] += count;
  }
  events += other.events;
  messages += other.messages;
  commits += other.commits;
  restores += other.restores;
  nanoseconds += other.nanoseconds;
  training += other.training;
  seeds += other.seeds;
}

uint64_t Counts::Faults() const {
  uint64_t all = 0;
  for (const uint64_t count : faults) {
    all += count;
  }
  return all;
}

std::string Counts::Report() const {
  const auto hours = [](uint64_t ns) { return static_cast<double>(ns / 1'000'000'000) / 3600; };
  std::string text = absl::StrCat(seeds, " seeds, ", hours(nanoseconds), " simulated hours, ",
                                  hours(training), " of them with all ranks of a job training, ",
                                  events, " events, ", messages, " messages between nodes, ",
                                  commits, " commits, ", restores, " ranks restored\nfaults:\n");
  for (size_t i = 0; i < faults.size(); ++i) {
    absl::StrAppend(&text, "  ", faults[i], "\t", NameOf(static_cast<Fault>(i)), "\n");
  }
  absl::StrAppend(&text, "states of the protocol:\n");
  for (const auto& [name, count] : states) {
    absl::StrAppend(&text, "  ", count, "\t", name, "\n");
  }
  return text;
}

// ---- When ----

Duration World::Between() {
  // One fault of each node in a day, of the cluster in some minutes; or one after the other.
  if (options.rates == Rates::kRealistic) {
    return t.Millis(1'000, 600'000);
  }
  return t.Millis(100, 8'000);
}

void World::Trouble() {
  if (!stormy_) {
    return;
  }
  t.After(Between(), [this] { Trouble(); });
  Inject();
}

// Half of the seeds have weather of their own, with more of some troubles and none of others: some
// mistakes show only when one kind of trouble comes again before the last one is over, and many are
// made by hosts, of which there are few.
void World::MakeWeather() {
  if (options.rates == Rates::kErasures) {
    weights_ = {3, 3, 0, 3, 0, 0};
    return;
  }
  if (options.rates == Rates::kDrives) {
    weights_ = {1, 3, 0, 3, 0, 0};
    return;
  }
  if (options.rates == Rates::kOperators) {
    weights_ = {2, 2, 1, 1, 1, 4};
    return;
  }
  if (options.rates == Rates::kReshards) {
    weights_ = {3, 3, 2, 1, 6, 1};  // what is read of many is often bad somewhere
    return;
  }
  if (options.rates == Rates::kRot) {
    weights_ = {1, 2, 1, 1, 8, 1};
    return;
  }
  if (options.rates != Rates::kAbsurd || t.Chance(0.5)) {
    return;
  }
  aims_at_hosts_ = t.Chance(0.7);
  for (uint64_t& weight : weights_) {
    weight *= std::array<uint64_t, 3>{0, 1, 4}[t.Below(3)];
  }
  if (std::accumulate(weights_.begin(), weights_.end(), uint64_t{0}) == 0) {
    weights_[t.Below(weights_.size())] = 1;
  }
}

void World::Inject() {
  uint64_t drawn = t.Below(std::accumulate(weights_.begin(), weights_.end(), uint64_t{0}));
  size_t trouble = 0;
  while (drawn >= weights_[trouble]) {
    drawn -= weights_[trouble++];
  }
  switch (trouble) {
    case 0:
      return ProcessTrouble();
    case 1:
      return NodeTrouble();
    case 2:
      return CutLinks();
    case 3:
      return EtcdTrouble();
    case 4:
      return TierTrouble();
    default:
      return PeopleTrouble();
  }
}

// A node that hosts a job, in weather that is aimed at such.
std::optional<uint32_t> World::AHost() {
  if (!aims_at_hosts_ || t.Chance(0.4)) {
    return std::nullopt;
  }
  const auto node = index_.find(etcd.HostOf(jobs_[t.Below(jobs_.size())].name));
  return node == index_.end() ? std::nullopt : std::optional(node->second);
}

Node* World::AnyNode(bool up) {
  if (const std::optional<uint32_t> host = AHost();
      host && !nodes_[*host]->lost() && (!up || nodes_[*host]->up())) {
    return nodes_[*host].get();
  }
  std::vector<Node*> found;
  for (const std::unique_ptr<Node>& each : nodes_) {
    if (!each->lost() && (!up || each->up())) {
      found.push_back(each.get());
    }
  }
  return found.empty() ? nullptr : found[t.Below(found.size())];
}

uint32_t World::OneEnd() {
  const std::optional<uint32_t> host = AHost();
  return host ? *host : static_cast<uint32_t>(t.Below(nodes_.size()));
}

// ---- Processes ----

void World::ProcessTrouble() {
  Job& job = jobs_[t.Below(jobs_.size())];
  RankProcess* process = job.ranks[t.Below(job.world_size)];
  if (process == nullptr || !process->running()) {
    return;
  }
  if (t.Chance(0.15)) {
    Count(Fault::kProcessHangs);
    return process->Hang(t.Millis(1000, 90'000));
  }
  Count(Fault::kProcessKilled);
  Kill(process, t.Chance(0.8) ? t.Millis(1, 500) : t.Millis(1000, 20'000));
}

// ---- Nodes ----

bool World::MayLoseNode() const {
  const auto lost =
      std::count_if(nodes_.begin(), nodes_.end(), [](const auto& each) { return each->lost(); });
  return static_cast<size_t>(lost + 1) * 3 <= nodes_.size();
}

void World::NodeTrouble() {
  constexpr uint64_t kReboot = 10;  // to 13
  Node* node = AnyNode(true);
  if (node == nullptr) {
    return;
  }
  const auto end_processes = [this, node] {
    for (const std::unique_ptr<RankProcess>& process : processes_) {
      if (&process->node() == node && process->alive()) {
        process->End();
      }
    }
  };
  const bool memory_alone = options.rates == Rates::kDrives && t.Chance(0.7);
  const uint64_t kind = memory_alone ? kReboot : t.Below(23);
  if (kind < kReboot) {
    Count(Fault::kDaemonKilled);
    node->KillDaemon();
    t.After(t.Chance(0.7) ? t.Millis(10, 3000) : t.Millis(5000, 40'000),
            [node] { node->StartDaemon(); });
  } else if (kind < 14) {
    Count(Fault::kNodeRebooted);
    Trace(node->name + " is rebooted");
    if (t.Chance(0.2)) {
      node->RememberDrive();  // it comes back at a later one
    }
    end_processes();
    node->PowerOff(false);
    t.After(t.Millis(3'000, 60'000), [this, node] {
      if (node->powered() || node->lost()) {
        return;
      }
      if (t.Chance(0.2) && node->RestoreOldDrive()) {
        Count(Fault::kNvmeStale);
        Trace(node->name + " has an old image of its drive");
      }
      node->PowerOn();
    });
  } else if (kind == 14 && MayLoseNode()) {
    Count(Fault::kNodeLost);
    Trace(node->name + " is lost");
    end_processes();
    node->PowerOff(true);
  } else if (kind < 17) {
    Count(Fault::kWallClockJumps);
    node->JumpWallClock(static_cast<int64_t>(t.Below(1'200'000)) - 600'000);
  } else if (kind == 17) {
    node->state_failures = 0.3;
    t.After(t.Millis(100, 10'000), [node] { node->state_failures = 0; });
  } else if (kind == 18) {
    node->slot_failures = 0.05;
    t.After(t.Millis(100, 10'000), [node] { node->slot_failures = 0; });
  } else if (kind == 19) {
    node->RememberDrive();
  } else {
    Count(Fault::kDaemonSuspended);
    node->Suspend(t.Chance(0.6) ? t.Millis(100, 8'000) : t.Millis(8'000, 25'000));
  }
}

// ---- Links ----

void World::CutLinks() {
  const uint32_t a = OneEnd();
  const auto b = static_cast<uint32_t>(t.Below(nodes_.size()));
  const Duration time = t.Chance(0.6) ? t.Millis(100, 8000) : t.Millis(8000, 60'000);
  const auto mend = [this](uint32_t from, uint32_t to, Duration after) {
    t.After(after, [this, from, to] { network.road(from, to) = {}; });
  };
  switch (t.Below(7)) {
    case 0:
      Count(Fault::kCut);
      network.road(a, b).cut = network.road(b, a).cut = true;
      mend(a, b, time);
      return mend(b, a, time);
    case 1:
      Count(Fault::kCutOneWay);
      network.road(a, b).cut = true;
      return mend(a, b, time);
    case 2:
    case 3: {
      // From all others, and perhaps from etcd, one way or both.
      Count(Fault::kCutOff);
      const uint64_t ways = t.Below(3);
      Trace(absl::StrCat(nodes_[a]->name, " is cut off from all others, ways ", ways));
      for (uint32_t other = 0; other < nodes_.size(); ++other) {
        if (other == a) {
          continue;
        }
        if (ways != 1) {
          network.road(a, other).cut = true;
          mend(a, other, time);
        }
        if (ways != 2) {
          network.road(other, a).cut = true;
          mend(other, a, time);
        }
      }
      if (t.Chance(0.4)) {
        Count(Fault::kEtcdCutOff);
        etcd.CutOff(a, true);
        t.After(time, [this, a] { etcd.CutOff(a, false); });
      }
      return;
    }
    case 4: {
      Count(Fault::kFlapping);
      Duration at{};
      for (int i = 0; i < 8; ++i) {
        t.After(at, [this, a, b] { network.road(a, b).cut = network.road(b, a).cut = stormy_; });
        at += t.Millis(100, 3000);
        mend(a, b, at);
        mend(b, a, at);
        at += t.Millis(100, 3000);
      }
      return;
    }
    case 5:
      Count(Fault::kSlowLink);
      network.road(a, b).slow_ms = network.road(b, a).slow_ms = 50 + t.Below(2500);
      mend(a, b, time);
      return mend(b, a, time);
    default:
      for (const auto& [from, to] : {std::pair(a, b), std::pair(b, a)}) {
        network.road(from, to).lost = 0.3;
        network.road(from, to).late = 0.3;
        mend(from, to, time);
      }
  }
}

// ---- etcd ----

// What was agreed on last, and under which epoch a host acts, is known to more than half of the
// nodes. Where it is not, because the host was cut off from them and etcd is erased just then, it
// is lost: no daemon could know of it.
bool World::StatesAreSpread() const {
  return std::all_of(jobs_.begin(), jobs_.end(), [this](const Job& job) {
    const v1::JobState* state = truth.StateOf(job.name);
    const auto keep = std::count_if(nodes_.begin(), nodes_.end(), [&](const auto& node) {
      return state != nullptr && !node->lost() && node->Keeps(*state) &&
             node->HasHeard(job.name, truth.HighestEpoch(job.name));
    });
    return state == nullptr || static_cast<size_t>(keep) * 2 > nodes_.size();
  });
}

void World::EtcdTrouble() {
  if (options.rates == Rates::kErasures && StatesAreSpread()) {
    Erase();
    for (const auto& node : nodes_) {
      if (t.Chance(0.5)) {
        CutOffFromEtcd(node->index);
      }
    }
    return;
  }
  if (options.rates == Rates::kDrives && t.Chance(0.7)) {
    return RemoveHost(jobs_[t.Below(jobs_.size())].name);
  }
  switch (t.Below(12)) {
    case 0:
    case 1:
      Count(Fault::kEtcdDown);
      Trace("etcd is down");
      etcd.SetDown(true);
      return t.After(t.Chance(0.5) ? t.Millis(500, 5000) : t.Millis(5000, 40'000),
                     [this] { etcd.SetDown(false); });
    case 2:
    case 3:
    case 4:
      return CutOffFromEtcd(OneEnd());
    case 5:
      return t.Chance(0.3) && StatesAreSpread() ? Erase() : void();
    case 6:
    case 7:
      etcd.SetLossy(0.2);
      return t.After(t.Millis(1000, 20'000), [this] { etcd.SetLossy(0); });
    case 8:
    case 9:
      return RemoveHost(jobs_[t.Below(jobs_.size())].name);
    default:
      etcd.SetLate(true);
      return t.After(t.Millis(1000, 30'000), [this] { etcd.SetLate(false); });
  }
}

void World::Erase() {
  Count(Fault::kEtcdWiped);
  Trace("etcd is erased");
  etcd.Wipe();
}

void World::CutOffFromEtcd(uint32_t node) {
  Count(Fault::kEtcdCutOff);
  Trace(nodes_[node]->name + " is cut off from etcd");
  etcd.CutOff(node, true);
  t.After(t.Millis(1000, 40'000), [this, node] { etcd.CutOff(node, false); });
}

// Perhaps it hears nothing of that for a while, neither from etcd nor from its successor, and all
// others go on hearing what it says.
void World::RemoveHost(const std::string& job) {
  const auto host = index_.find(etcd.HostOf(job));
  if (host == index_.end()) {
    return;
  }
  Count(Fault::kHostRemoved);
  const uint32_t node = host->second;
  const bool deaf = t.Chance(0.6);
  const Duration time = t.Millis(500, 10'000);
  for (uint32_t other = 0; deaf && other < nodes_.size(); ++other) {
    if (other != node) {
      network.road(other, node).cut = true;
      t.After(time, [this, other, node] { network.road(other, node) = {}; });
    }
  }
  etcd.RemoveHost(job, deaf ? time : t.Millis(0, 50));
}

// ---- Tiers ----

void World::TierTrouble() {
  Node* node = AnyNode(false);
  if (node == nullptr) {
    return;
  }
  SimTier& near = node->nvme();
  SimTier& far = remote.tier;
  const Duration time = t.Millis(500, 40'000);
  // (The kinds up to kHarms make copies bad.)
  constexpr uint64_t kHarms = 6;
  constexpr uint64_t kKinds = 13;
  const bool harms = options.rates == Rates::kRot && t.Chance(0.8);
  if (harms && t.Chance(0.2)) {  // many of a drive at once
    for (int i = 0; i < 8; ++i) {
      CutCopy(near, {TierKind::kNvme, node->index});
    }
    return;
  }
  switch (t.Below(harms ? kHarms : kKinds)) {
    case 0:
      return node->FlipInMemory() ? Count(Fault::kBitFlippedMemory) : void();
    case 1:
      return node->FlipInNvme() ? Count(Fault::kBitFlippedNvme) : void();
    case 2: {
      if (far.copies.empty() || t.Chance(0.5)) {
        return;
      }
      auto it = far.copies.begin();
      std::advance(it, static_cast<ptrdiff_t>(t.Below(far.copies.size())));
      Trace(absl::StrCat("a bit flips in remote, ", it->first.ToString()));
      it->second.bytes = NewToken();
      truth.DamagedUnnoticed(it->first, {TierKind::kRemote, 0});
      return Count(Fault::kBitFlippedRemote);
    }
    case 3:
      return node->LoseNvmeCopy() ? Count(Fault::kNvmeCopyLost) : void();
    case 4:
      return CutCopy(near, {TierKind::kNvme, node->index});
    case 5:
      return t.Chance(0.5) ? CutCopy(far, {TierKind::kRemote, 0}) : void();
    case 6:
      near.fails = 0.3;
      return t.After(time, [&near] { near.fails = 0; });
    case 7:
      near.hung_until = {t.now() + time.count()};
      return;
    case 8:
      far.fails = 0.3;
      return t.After(time, [&far] { far.fails = 0; });
    case 9:
      far.full = true;
      return t.After(time, [&far] { far.full = false; });
    case 10:
      far.hung_until = {t.now() + time.count()};
      return;
    case 11:
      far.unreadable = true;
      return t.After(time, [&far] { far.unreadable = false; });
    default:
      return;
  }
}

}  // namespace holdfast::sim::cluster
