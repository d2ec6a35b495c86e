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
    if (!Reaches(*client) || client->node.suspended()) {
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
    client->node.After(w_.t.Millis(0, 3), [this, client, life, answer] {
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
  const int64_t at = client->node.TrueOf(client->node.Local() + every);
  client->node.After(Duration(at - w_.t.now()), [this, client, life = client->life,
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
      client->node.After(w_.t.Millis(0, 3), [this, client, life, lease, sent] {
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

void Etcd::RemoveHost(const std::string& name, Duration told_after) {
  const auto found = hosts_.find(name);
  if (found == hosts_.end()) {
    return;
  }
  const Host host = found->second;
  w_.Trace(absl::StrCat(name, ": its host ", host.host.node, " is removed from etcd"));
  DropHost(name);
  for (const ClientPtr& client : clients_) {
    if (client == nullptr || !client->running || client->lease != host.lease) {
      continue;
    }
    w_.t.After(told_after, [this, client, life = client->life, name, epoch = host.host.epoch] {
      JobClient& job = client->jobs[name];
      if (Lives(client, life) && job.hosting == epoch) {
        EndHosting(client, name, job);
      }
    });
  }
}

void Etcd::Calm() {
  SetDown(false);
  cut_off_.clear();
  late_ = false;
  lost_ = 0;
}

}  // namespace holdfast::sim::cluster
