#include "tests/sim/cluster_etcd.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "tests/sim/cluster_world.h"

namespace holdfast::sim::cluster {

using std::chrono::milliseconds;
using std::chrono::seconds;

// ---- Talking to it ----

bool Etcd::Reaches(const Client& client) const {
  return !down_ && cut_off_.count(client.node.index) == 0;
}

bool Etcd::Lives(const ClientPtr& client, uint64_t life) const {
  return client->running && client->life == life;
}

// Asked again until it is answered: what is done there must stand being done twice.
void Etcd::Ask(const ClientPtr& client, std::function<void()> at_etcd,
               std::function<void()> answer) {
  w_.t.After(w_.t.Millis(0, 3), [this, client, life = client->life, at_etcd = std::move(at_etcd),
                                 answer = std::move(answer)] {
    if (!Lives(client, life)) {
      return;
    }
    const auto again = [&](Duration after) {
      w_.t.After(after, [this, client, life, at_etcd, answer] {
        if (Lives(client, life)) {
          Ask(client, at_etcd, answer);
        }
      });
    };
    if (!Reaches(*client)) {
      return again(w_.t.Millis(300, 1500));
    }
    if (client->data != data_) {
      Greet(client);
    }
    at_etcd();
    if (w_.t.Chance(lost_)) {
      w_.Count(Fault::kEtcdAnswerLost);
      return again(w_.t.Millis(500, 3000));
    }
    w_.t.After(w_.t.Millis(0, 3), [this, client, life, answer] {
      if (Lives(client, life)) {
        answer();
      }
    });
  });
}

// In the order of its stream; streams overtake each other.
void Etcd::Tell(const ClientPtr& client, Stream stream, Event event) {
  client->told[stream].push_back(std::move(event));
  if (!client->pumping[stream]) {
    Pump(client, stream);
  }
}

void Etcd::Pump(const ClientPtr& client, Stream stream) {
  client->pumping[stream] = true;
  const bool late = late_ && stream != kOwn && w_.t.Chance(0.2);
  if (late) {
    w_.Count(Fault::kEtcdLate);
  }
  w_.t.After(late ? w_.t.Millis(500, 8000) : w_.t.Millis(0, 5),
             [this, client, stream, late, life = client->life] {
               if (!Lives(client, life)) {
                 return;
               }
               std::deque<Event>& told = client->told[stream];
               client->pumping[stream] = false;
               if (told.empty()) {
                 return;
               }
               if (stream != kOwn && !Reaches(*client)) {
                 return Pump(client, stream);
               }
               // A watch that was broken may be begun anew: then it tells how things are now.
               if (stream == kMembers && told.size() > 1 && late && w_.t.Chance(0.5)) {
                 told.clear();
                 told.emplace_back(MembershipTold{Members()});
               }
               client->node.Post(std::move(told.front()));
               told.pop_front();
               if (!told.empty()) {
                 Pump(client, stream);
               }
             });
}

void Etcd::TellAll(Stream stream, const Event& event, const std::string& job) {
  for (const ClientPtr& client : clients_) {
    if (client != nullptr && client->running && (job.empty() || client->watched.count(job) > 0)) {
      Tell(client, stream, event);
    }
  }
}

MembersAre Etcd::Members() const {
  MembersAre members;
  for (const auto& [name, member] : members_) {
    members.members.push_back(member.info);
  }
  return members;
}

Event Etcd::HostEvent(const std::string& job) const {
  const auto host = hosts_.find(job);
  return host == hosts_.end() ? Event(MembershipTold{NoHost{job}})
                              : Event(MembershipTold{HostIs{job, host->second.host}});
}

std::string Etcd::HostOf(const std::string& job) const {
  const auto host = hosts_.find(job);
  return host == hosts_.end() ? "" : host->second.host.node;
}

// ---- Leases ----

void Etcd::Register(Node& node) {
  const uint64_t lease = next_lease_++;
  leases_[lease] = {node.index, w_.t.now() + kLeaseTtl.count()};
  members_[node.name] = {node.Info(), lease};
}

void Etcd::Start(Node& node) {
  if (clients_.size() <= node.index) {
    clients_.resize(node.index + 1);
  }
  const int64_t left_at = clients_[node.index] ? clients_[node.index]->left_at : 0;
  auto client = clients_[node.index] = std::make_shared<Client>(node);
  client->left_at = left_at;
  client->life = node.life();
  client->running = true;
  if (const auto member = members_.find(node.name);
      member != members_.end() && member->second.info.incarnation == node.incarnation()) {
    client->data = data_;  // registered
    client->lease = member->second.lease;
    client->until = node.Local() + (kLeaseTtl - kLeaseTtl / 10);
    Watch(client->lease);
    Tell(client, kMembers, MembershipTold{Members()});
    Tell(client, kOwn, MembershipTold{LeaseHolds{client->until}});
    return KeepAlive(client);
  }
  GetLease(client);
}

void Etcd::Stop(Node& node) {
  if (clients_.size() > node.index && clients_[node.index] != nullptr) {
    clients_[node.index]->running = false;
  }
}

// Every new connection reads first whose data this is.
void Etcd::Greet(const ClientPtr& client) {
  const bool wiped = client->data != 0;
  client->data = data_;
  client->told[kMembers].clear();
  if (wiped) {
    w_.counts.states["membership: erased data noticed"]++;
    Tell(client, kMembers, MembershipTold{ClusterWiped{"its id is another one"}});
    for (auto& [name, job] : client->jobs) {
      EndHosting(client, name, job);
      if (job.campaigning) {
        job.campaigning = false;
        ++job.round;
        Tell(client, kOwn, MembershipTold{CampaignLost{name, {}, "what etcd knew was erased"}});
      }
    }
  }
  Tell(client, kMembers, MembershipTold{Members()});
  for (const std::string& job : client->watched) {
    Tell(client, kHosts, HostEvent(job));
  }
}

void Etcd::GetLease(const ClientPtr& client) {
  if (std::exchange(client->asking, true)) {
    return;
  }
  client->lease = next_lease_++;
  const MonotonicTime sent = client->node.Local();
  Ask(
      client,
      [this, client, lease = client->lease] {
        // Those of before are ended first, then the name is put if nobody has it.
        std::vector<uint64_t> ended;
        for (const auto& [id, old] : leases_) {
          if (old.node == client->node.index && id != lease) {
            ended.push_back(id);
          }
        }
        for (const uint64_t id : ended) {
          EndLease(id);
        }
        leases_[lease] = {client->node.index, w_.t.now() + kLeaseTtl.count()};
        Watch(lease);
        const NodeInfo info = client->node.Info();
        Member& member = members_[client->node.name];
        if (member.lease != lease || !(member.info == info)) {
          member = {info, lease};
          TellAll(kMembers, MembershipTold{MemberUp{info}}, "");
        }
      },
      [this, client, sent, lease = client->lease] {
        client->asking = false;
        if (client->lease != lease) {
          return GetLease(client);
        }
        // (It may have been answered at the second try: the first is what counts.)
        const MonotonicTime until = sent + (kLeaseTtl - kLeaseTtl / 10);
        if (until <= client->node.Local()) {
          return GetLease(client);
        }
        client->until = until;
        w_.counts.states["membership: lease"]++;
        w_.Trace(client->node.name + " has a lease");
        Tell(client, kOwn, MembershipTold{LeaseHolds{until}});
        for (const auto& [name, job] : client->jobs) {
          PumpJob(client, name);
        }
        KeepAlive(client);
      });
}

void Etcd::KeepAlive(const ClientPtr& client) {
  const Duration every = kLeaseTtl / 3;
  w_.t.At(client->node.TrueOf(client->node.Local() + every), [this, client, life = client->life,
                                                              lease = client->lease] {
    if (!Lives(client, life) || client->lease != lease) {
      return;
    }
    if (client->until <= client->node.Local()) {
      return LoseLease(client, "it could not be renewed in time");
    }
    KeepAlive(client);
    if (!Reaches(*client)) {
      return;
    }
    const MonotonicTime sent = client->node.Local();
    w_.t.After(w_.t.Millis(0, 3), [this, client, life, lease, sent] {
      if (!Lives(client, life) || client->lease != lease || !Reaches(*client)) {
        return;
      }
      if (client->data != data_) {
        Greet(client);
      }
      const auto there = leases_.find(lease);
      if (there == leases_.end()) {
        return LoseLease(client, "etcd does not know it any more");
      }
      there->second.ends = w_.t.now() + kLeaseTtl.count();
      if (w_.t.Chance(lost_)) {
        return;
      }
      w_.t.After(w_.t.Millis(0, 3), [this, client, life, lease, sent] {
        const MonotonicTime until = sent + (kLeaseTtl - kLeaseTtl / 10);
        if (Lives(client, life) && client->lease == lease && client->node.Local() < client->until) {
          client->until = std::max(client->until, until);
          Tell(client, kOwn, MembershipTold{LeaseHolds{client->until}});
        }
      });
    });
  });
}

void Etcd::LoseLease(const ClientPtr& client, const std::string& why) {
  w_.counts.states["membership: lease lost"]++;
  w_.Trace(absl::StrCat(client->node.name, " has lost its lease: ", why));
  client->lease = 0;
  client->until = {};
  client->left_at = w_.t.now();
  Tell(client, kOwn, MembershipTold{LeaseLost{why}});
  for (auto& [name, job] : client->jobs) {
    EndHosting(client, name, job);
    ++job.round;  // a campaign is tried again with the next lease
    job.campaign_asked = job.resigning = false;
  }
  GetLease(client);
}

void Etcd::EndHosting(const ClientPtr& client, const std::string& job, JobClient& of) {
  for (const StoreAgreedState& store : std::exchange(of.storing, {})) {
    Tell(client, kOwn,
         MembershipTold{StateFailed{job, store.epoch, store.version, "the lease was lost"}});
  }
  of.storing_asked = false;
  if (of.hosting != 0) {
    ++of.round;
    Tell(client, kOwn, MembershipTold{Deposed{job, std::exchange(of.hosting, 0)}});
  }
}

void Etcd::Watch(uint64_t lease) {
  const auto it = leases_.find(lease);
  if (it == leases_.end()) {
    return;
  }
  w_.t.At(it->second.ends, [this, lease] {
    const auto there = leases_.find(lease);
    if (there == leases_.end()) {
      return;
    }
    if (there->second.ends > w_.t.now() || down_) {
      // (An etcd that comes back gives all leases their time anew.)
      there->second.ends = std::max(there->second.ends, w_.t.now() + (down_ ? 1'000'000'000 : 0));
      return Watch(lease);
    }
    w_.counts.states["membership: lease ended"]++;
    EndLease(lease);
  });
}

void Etcd::EndLease(uint64_t lease) {
  const auto it = leases_.find(lease);
  const uint32_t node = it->second.node;
  leases_.erase(it);
  if (clients_.size() > node && clients_[node] != nullptr) {
    clients_[node]->left_at = w_.t.now();
  }
  std::vector<std::string> gone;
  for (const auto& [job, host] : hosts_) {
    if (host.lease == lease) {
      gone.push_back(job);
    }
  }
  for (const std::string& job : gone) {
    DropHost(job);
  }
  const std::string name = w_.node(node).name;
  if (const auto member = members_.find(name);
      member != members_.end() && member->second.lease == lease) {
    members_.erase(member);
    TellAll(kMembers, MembershipTold{MemberGone{name}}, "");
  }
}

void Etcd::DropHost(const std::string& job) {
  hosts_.erase(job);
  TellAll(kHosts, MembershipTold{NoHost{job}}, job);
}

bool Etcd::IsMember(uint32_t node) const {
  return members_.count(w_.node(node).name) > 0;
}

int64_t Etcd::LeftAt(uint32_t node) const {
  return clients_.size() > node && clients_[node] != nullptr ? clients_[node]->left_at : 0;
}

// ---- Hosts ----

void Etcd::Do(Node& node, const WatchHost& a) {
  const ClientPtr client = clients_[node.index];
  client->watched.insert(a.job);
  Ask(
      client, [] {},
      [this, client, job = a.job] {
        if (client->watched.count(job) > 0) {
          Tell(client, kHosts, HostEvent(job));
        }
      });
}

void Etcd::Do(Node& node, const UnwatchHost& a) {
  clients_[node.index]->watched.erase(a.job);
}

void Etcd::Do(Node& node, const CampaignFor& a) {
  const ClientPtr client = clients_[node.index];
  JobClient& job = client->jobs[a.job];
  w_.counts.states["router: campaigns"]++;
  if (w_.tracing()) {
    w_.Trace(absl::StrCat(a.job, ": ", node.name, " campaigns above ", a.floor));
  }
  job.floor = std::max(job.floor, a.floor);
  if (job.hosting != 0 && !job.resigning) {
    return;
  }
  job.campaigning = true;
  PumpJob(client, a.job);
}

void Etcd::Do(Node& node, const ResignFrom& a) {
  const ClientPtr client = clients_[node.index];
  JobClient& job = client->jobs[a.job];
  w_.counts.states["router: resigns"]++;
  w_.Trace(absl::StrCat(a.job, ": ", node.name, " resigns"));
  job.campaigning = job.campaign_asked = false;
  job.hosting = 0;
  job.storing.clear();
  job.storing_asked = false;
  ++job.round;
  if (std::exchange(job.resigning, true)) {
    return;
  }
  Ask(
      client,
      [this, name = a.job, lease = client->lease] {  // not what a later lease was elected to
        const auto host = hosts_.find(name);
        if (host != hosts_.end() && host->second.lease == lease) {
          DropHost(name);
        }
      },
      [this, client, name = a.job] {
        client->jobs[name].resigning = false;
        PumpJob(client, name);
      });
}

void Etcd::Do(Node& node, const StoreAgreedState& a) {
  const ClientPtr client = clients_[node.index];
  JobClient& job = client->jobs[a.job];
  if (job.hosting != a.epoch) {
    return Tell(client, kOwn, MembershipTold{StateFenced{a.job, a.epoch, a.version}});
  }
  job.storing.push_back(a);
  PumpJob(client, a.job);
}

void Etcd::PumpJob(const ClientPtr& client, const std::string& name) {
  JobClient& job = client->jobs[name];
  if (job.resigning) {
    return;
  }
  if (job.campaigning && !job.campaign_asked && client->lease != 0 &&
      client->node.Local() < client->until) {
    job.campaign_asked = true;
    AskElection(client, name);
  }
  if (!job.storing.empty() && !job.storing_asked) {
    job.storing_asked = true;
    AskStore(client, name);
  }
}

void Etcd::AskElection(const ClientPtr& client, const std::string& name) {
  const auto result = std::make_shared<Event>();
  const uint64_t round = client->jobs[name].round;
  Ask(
      client,
      [this, client, name, result, round] {
        const JobClient& job = client->jobs[name];
        if (round != job.round || !job.campaigning || leases_.count(client->lease) == 0) {
          return;  // given up; or it needs another lease first
        }
        const auto host = hosts_.find(name);
        if (host != hosts_.end() && host->second.lease != client->lease) {
          *result = MembershipTold{CampaignLost{name, host->second.host, ""}};
          return;
        }
        const State& state = states_[name];
        if (host == hosts_.end()) {
          const Epoch epoch = std::max({epochs_[name], state.epoch, job.floor}) + 1;
          epochs_[name] = epoch;
          hosts_[name] = {{client->node.name, client->node.incarnation(), epoch}, client->lease};
          w_.truth.ElectedBy(name, epoch, client->node.name);
          TellAll(kHosts, HostEvent(name), name);
        }
        *result = MembershipTold{
            Elected{name, hosts_[name].host.epoch, state.epoch, state.version, state.bytes}};
      },
      [this, client, name, result, round] {
        JobClient& job = client->jobs[name];
        if (round != job.round || !job.campaigning) {
          return;
        }
        job.campaign_asked = false;
        const auto* told = std::get_if<MembershipTold>(result.get());
        if (told == nullptr || client->node.Local() >= client->until) {
          return;  // with the next lease
        }
        job.campaigning = false;
        if (const auto* elected = std::get_if<Elected>(&told->event)) {
          job.hosting = elected->epoch;
          w_.counts.states["router: elected"]++;
        } else {
          w_.counts.states["router: campaign lost"]++;
        }
        Tell(client, kOwn, *result);
      });
}

void Etcd::AskStore(const ClientPtr& client, const std::string& name) {
  const StoreAgreedState store = client->jobs[name].storing.front();
  const uint64_t round = client->jobs[name].round;
  const auto fenced = std::make_shared<bool>(true);
  Ask(
      client,
      [this, client, name, store, fenced, round] {
        const auto host = hosts_.find(name);
        const bool is_host = host != hosts_.end() && host->second.lease == client->lease &&
                             host->second.host.epoch == store.epoch &&
                             round == client->jobs[name].round;
        State& state = states_[name];
        *fenced = !is_host;
        if (is_host &&
            std::pair(state.epoch, state.version) < std::pair(store.epoch, store.version)) {
          state = {store.epoch, store.version, store.state};
          w_.truth.Agreed(name, store.epoch, store.state);
        }
      },
      [this, client, name, store, fenced, round] {
        JobClient& job = client->jobs[name];
        if (round != job.round || job.storing.empty()) {
          return;
        }
        job.storing.pop_front();
        job.storing_asked = false;
        w_.counts.states[*fenced ? "state: fenced" : "state: agreed on"]++;
        if (*fenced) {
          Tell(client, kOwn, MembershipTold{StateFenced{name, store.epoch, store.version}});
        } else {
          Tell(client, kOwn, MembershipTold{StateStored{name, store.epoch, store.version}});
        }
        PumpJob(client, name);
      });
}

// ---- Trouble ----

void Etcd::SetDown(bool down) {
  if (down_ && !down) {
    for (auto& [id, lease] : leases_) {
      lease.ends = w_.t.now() + kLeaseTtl.count();
    }
  }
  down_ = down;
}

void Etcd::CutOff(uint32_t node, bool cut) {
  cut ? void(cut_off_.insert(node)) : void(cut_off_.erase(node));
}

void Etcd::Wipe() {
  ++data_;
  wiped_at_ = w_.t.now();
  leases_.clear();
  members_.clear();
  hosts_.clear();
  epochs_.clear();
  states_.clear();
  for (const ClientPtr& client : clients_) {
    if (client != nullptr) {
      client->left_at = w_.t.now();
    }
  }
}

void Etcd::Calm() {
  SetDown(false);
  cut_off_.clear();
  late_ = false;
  lost_ = 0;
}

}  // namespace holdfast::sim::cluster
