// Who hosts which job, as the fake etcd has it: campaigns with epochs, and states that the host
// alone can store.
#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tests/sim/cluster_etcd.h"
#include "tests/sim/cluster_world.h"

namespace holdfast::sim::cluster {

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
        w_.counts.states[*fenced ? "state: fenced" : "state: agreed on"]++;
        if (*fenced) {  // all that it has given, and it is host no more
          for (const StoreAgreedState& each : std::exchange(job.storing, {})) {
            Tell(client, kOwn, MembershipTold{StateFenced{name, each.epoch, each.version}});
          }
          return EndHosting(client, name, job);
        }
        job.storing.pop_front();
        job.storing_asked = false;
        Tell(client, kOwn, MembershipTold{StateStored{name, store.epoch, store.version}});
        PumpJob(client, name);
      });
}
}  // namespace holdfast::sim::cluster
