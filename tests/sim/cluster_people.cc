// What people do with the jobs of a simulated cluster while it storms: restore points, pins,
// removals, readers; and other users, who may do nothing.
#include <array>
#include <memory>

#include "absl/strings/str_cat.h"
#include "tests/sim/cluster_world.h"

namespace holdfast::sim::cluster {

using std::chrono::seconds;

void World::PeopleTrouble() {
  if (options.rates == Rates::kOperators && t.Chance(0.8)) {
    return OperatorTrouble();
  }
  Node* node = AnyNode(true);
  Job& job = jobs_[t.Below(jobs_.size())];
  if (node == nullptr) {
    return;
  }
  const uint64_t kind = t.Below(12);
  if (kind < 2) {
    return Visit(job, *node, RankProcess::Role::kReader);
  }
  if (kind == 2) {
    return Visit(job, *node, RankProcess::Role::kStranger);
  }
  std::vector<CheckpointId> there;
  for (const auto& [uuid, checkpoint] : remote.tier.manifests) {
    if (truth.NameOf(uuid.ToBytes()) == job.name) {
      there.push_back(checkpoint);
    }
  }
  if (kind < 5 || there.empty()) {
    v1::GetStatusRequest request;
    request.set_job(kind == 3 ? "" : job.name);
    return node->Ask(request, job.uid, nullptr);
  }
  const CheckpointId id = there[t.Below(there.size())];
  switch (kind) {
    case 5:
      return AskForRestorePoint(*node, job, id);
    case 6:
    case 7:
      return AskForPin(*node, job, id);
    case 8:
      return AskToRead(*node, job, id);
    case 9:
      return AskAsStranger(*node, job, id);
    default:
      return AskForRemoval(*node, job, id);
  }
}

// A process that is none of the job's ranks.
void World::Visit(Job& job, Node& node, RankProcess::Role role) {
  const bool reads = role == RankProcess::Role::kReader;
  if (!reads && truth.StateOf(job.name) == nullptr) {
    return;  // the name is nobody's yet
  }
  Count(reads ? Fault::kReader : Fault::kStranger);
  const auto rank = static_cast<Rank>(t.Below(job.world_size));
  processes_.push_back(std::make_unique<RankProcess>(*this, node, job, rank, "", role));
  processes_.back()->Start();
}

void World::AskForRestorePoint(Node& node, const Job& job, CheckpointId id) {
  Count(Fault::kRestorePoint);
  v1::SetRestorePointRequest request;
  request.set_job(job.name);
  request.set_clear(t.Chance(0.5));
  if (!request.clear()) {
    request.set_attempt(id.attempt);
    request.set_step(id.step);
  }
  truth.RestorePointAsked(job.name);
  node.Ask(request, job.uid, nullptr);
}

void World::AskForPin(Node& node, const Job& job, CheckpointId id) {
  Count(Fault::kPin);
  v1::PinRequest request;
  request.set_job(job.name);
  request.set_attempt(id.attempt);
  request.set_step(id.step);
  request.set_unpin(t.Chance(0.4));
  if (request.unpin()) {
    truth.Pin(job.name, id, false);
  }
  // (A removal that had begun before may end meanwhile, or, where a node is away, much later.)
  node.Ask(request, job.uid, [this, name = job.name, id](const AdminReply& reply) {
    const auto* pinned = std::get_if<v1::PinReply>(&reply.reply);
    if (pinned != nullptr && pinned->text().find("being removed already") != std::string::npos) {
      return;
    }
    t.After(seconds(30), [this, name, id] {
      const v1::JobState* state = truth.StateOf(name);
      for (int i = 0; state != nullptr && i < state->pins_size(); ++i) {
        if (CheckpointId{state->pins(i).attempt(), state->pins(i).step()} == id) {
          truth.Pin(name, id, true);
        }
      }
    });
  });
}

// Of some node, which may be any.
void World::AskToRead(Node& node, const Job& job, CheckpointId id) {
  v1::ReadShardRequest request;
  request.set_node(nodes_[t.Below(nodes_.size())]->name);
  request.set_job(job.name);
  request.set_attempt(id.attempt);
  request.set_step(id.step);
  request.set_rank(static_cast<uint32_t>(t.Below(job.world_size)));
  node.Ask(request, job.uid, nullptr);
}

// What a host says of where copies lie is so: good ones are there, or a fault took them that nobody
// has noticed, and none is out of reach on a node that is up.
// (Something may be on its way just then: what is wrong twice is wrong.)
void World::AskWhereAllLies(const std::string& name, std::set<std::string> doubted) {
  const auto node = index_.find(etcd.HostOf(name));
  if (node == index_.end() || !nodes_[node->second]->up()) {
    return;
  }
  v1::WhereRequest request;
  request.set_job(name);
  request.set_all_steps(true);
  const uint32_t uid = std::find_if(jobs_.begin(), jobs_.end(), [&](const Job& job) {
                         return job.name == name;
                       })->uid;
  nodes_[node->second]->Ask(request, uid, [this, name, doubted](const AdminReply& reply) {
    const auto* where = std::get_if<v1::WhereReply>(&reply.reply);
    std::set<std::string> wrong;
    for (int i = 0; where != nullptr && i < where->copies_size(); ++i) {
      const v1::ShardCopy& copy = where->copies(i);
      const bool far = copy.tier() == TierName(TierKind::kRemote);
      const TierKind tier = far                                        ? TierKind::kRemote
                            : copy.tier() == TierName(TierKind::kNvme) ? TierKind::kNvme
                                                                       : TierKind::kMemory;
      const cluster::Place place{tier, far ? 0 : index_.at(copy.node())};
      const bool away = copy.state().rfind("out of reach", 0) == 0;
      if (away && nodes_[place.node]->up()) {
        wrong.insert(copy.ShortDebugString());
      }
      if (copy.state() == "good" &&
          !truth.MayLie(name, {copy.attempt(), copy.step()}, copy.rank(), place)) {
        wrong.insert(copy.ShortDebugString());
      }
    }
    for (const std::string& copy : wrong) {
      if (doubted.count(copy) > 0) {
        return truth.Violated(
            absl::StrCat("job ", name, ": its host says of a copy what is not so: ", copy));
      }
    }
    counts.states[where == nullptr ? "end: where: not told" : "end: where: told"]++;
    if (!wrong.empty()) {
      t.After(seconds(2), [this, name, wrong] { AskWhereAllLies(name, wrong); });
    }
  });
}

// Nothing that another user wants of the job may happen.
void World::AskAsStranger(Node& node, const Job& job, CheckpointId id) {
  Count(Fault::kStrangersWish);
  const auto judge = [this, name = job.name](const AdminReply& reply) {
    if (reply.status.ok()) {
      truth.Violated(absl::StrCat("job ", name, ": what another user wanted of it was done"));
    }
  };
  const auto ask = [&](auto request) {
    request.set_job(job.name);
    request.set_attempt(id.attempt);
    request.set_step(id.step);
    node.Ask(request, job.uid + 1, judge);
  };
  switch (t.Below(3)) {
    case 0:
      return ask(v1::SetRestorePointRequest());
    case 1:
      return ask(v1::PinRequest());
    default:
      return ask(v1::RemoveCheckpointRequest());
  }
}

void World::AskForRemoval(Node& node, const Job& job, CheckpointId id) {
  const bool force = t.Chance(0.3);
  Count(force ? Fault::kForcedRemoval : Fault::kRemoval);
  v1::RemoveCheckpointRequest request;
  request.set_job(job.name);
  request.set_attempt(id.attempt);
  request.set_step(id.step);
  request.set_tier(std::array{"", "nvme", "remote"}[t.Below(3)]);
  request.set_force(force);
  if (force) {
    truth.Forced(job.name, id);
  }
  node.Ask(request, job.uid, nullptr);
}

}  // namespace holdfast::sim::cluster
