// What a platform's people and schedulers do to a simulated cluster while it storms: nodes are
// drained, settings read again, jobs told to end.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "tests/sim/cluster_world.h"

namespace holdfast::sim::cluster {

using std::chrono::milliseconds;
using std::chrono::seconds;

namespace {

constexpr Duration kGrace = seconds(30);
constexpr Duration kLook = milliseconds(200);

}  // namespace

void World::OperatorTrouble() {
  Node* node = AnyNode(true);
  if (node == nullptr) {
    return;
  }
  switch (t.Below(4)) {
    case 0: {
      Count(Fault::kSettingsRead);
      return node->ReadOtherSettings();
    }
    case 1: {
      Job& job = jobs_[t.Below(jobs_.size())];
      RankProcess* rank = job.ranks[t.Below(job.world_size)];
      if (rank != nullptr && rank->running()) {
        Count(Fault::kToldToEnd);
        rank->TellToEnd(kGrace);
      }
      return;
    }
    default:
      return Drain(*node, draining_.count(node->index) > 0);
  }
}

// Of those that hold at once; a daemon that starts anew has its first ones again.
void Node::ReadOtherSettings() {
  v1::DaemonConfig config = config_;
  config.mutable_save()->set_commit_deadline_ms(10'000 + w_.t.Below(50'000));
  config.mutable_memory()->set_bytes_max(kMemoryBytes);
  config.mutable_memory()->set_keep_committed(static_cast<uint32_t>(w_.t.Below(3)));
  config.mutable_policy()->mutable_nvme()->set_keep_last(1 + static_cast<uint32_t>(w_.t.Below(3)));
  config.mutable_policy()->mutable_remote()->set_every_steps(1 + w_.t.Below(10));
  if (core_) {
    After(Duration(0), [this, config] { Feed(SettingsChanged{config}); });
  }
}

void World::Drain(Node& node, bool undo) {
  if (!undo && (draining_.size() + 2) * 2 > nodes_.size()) {
    return;  // somewhere there must be room
  }
  Count(Fault::kDrained);
  v1::DrainRequest request;
  request.set_node(node.name);
  request.set_undo(undo);
  undo ? void(draining_.erase(node.index)) : void(draining_.insert(node.index));
  node.Ask(request, 0, nullptr);
}

// In calm weather: all ranks end with one step, which is whole in remote although they are gone.
void World::TellJobsToEnd() {
  for (Job& job : jobs_) {
    RankProcess* first = job.ranks.front();
    const bool all_train =
        std::all_of(job.ranks.begin(), job.ranks.end(), [first](const RankProcess* rank) {
          return rank != nullptr && rank->running() && rank->training() &&
                 rank->attempt() == first->attempt();
        });
    if (!all_train) {
      counts.states["end: not told"]++;
      continue;
    }
    counts.states["end: told"]++;
    job.ranks[t.Below(job.world_size)]->TellToEnd(kGrace);
    JudgeEnd(job, first->attempt(), t.now() + kGrace.count());
  }
}

void World::StoppedAt(const Job& job, Attempt attempt, Rank rank, Step step) {
  stopped_[{job.name, attempt}][rank] = step;
}

void World::JudgeEnd(Job& job, Attempt attempt, int64_t until) {
  const std::map<Rank, Step>& stopped = stopped_[{job.name, attempt}];
  std::set<Step> steps;
  for (const auto& [rank, step] : stopped) {
    steps.insert(step);
  }
  if (steps.size() > 1) {
    return truth.Violated(absl::StrCat("job ", job.name, ": ranks of attempt ", attempt,
                                       " ended with step ", *steps.begin(), " and with step ",
                                       *steps.rbegin()));
  }
  const bool whole =
      stopped.size() == job.world_size &&
      std::any_of(remote.tier.manifests.begin(), remote.tier.manifests.end(), [&](const auto& m) {
        return truth.NameOf(m.first.ToBytes()) == job.name &&
               m.second == CheckpointId{attempt, *steps.begin()};
      });
  if (whole) {
    counts.states["end: the last step is in remote"]++;
  } else if (t.now() < until) {
    t.After(kLook, [this, &job, attempt, until] { JudgeEnd(job, attempt, until); });
  } else {
    truth.Violated(absl::StrCat(
        "job ", job.name, " was told to end in calm weather, and ", stopped.size(), " of ",
        job.world_size, " ranks have, ",
        steps.empty() ? std::string("with no step")
                      : absl::StrCat("with step ", *steps.begin(), ", which is not in remote")));
  }
}

}  // namespace holdfast::sim::cluster
