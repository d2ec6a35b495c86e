// A simulated cluster: nodes with the real control logic, the network and etcd between them, jobs
// whose ranks train, save and restore, people who start them again, and all that goes wrong.
// Everything follows from one seed.
//
//   World world(options);
//   world.Run();
//   EXPECT_EQ(world.violation(), "");
#pragma once

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "tests/sim/cluster_etcd.h"
#include "tests/sim/cluster_network.h"
#include "tests/sim/cluster_node.h"
#include "tests/sim/cluster_options.h"
#include "tests/sim/cluster_rank.h"
#include "tests/sim/cluster_timeline.h"
#include "tests/sim/cluster_truth.h"

namespace holdfast::sim::cluster {

inline constexpr size_t kLargeJob = 64;  // ranks: what has more is a large one

// One job as its user runs it, with a launcher that starts its ranks again when one is gone.
struct Job {
  std::string name;
  uint32_t uid = 1000;
  uint32_t world_size = 1;  // of this run
  uint32_t usual_size = 1;  // which it comes back to
  bool launch_ids = false;
  std::string launch;
  int launches = 0;
  uint64_t pace_ms = 1000;  // between two saves
  bool together = true;     // when one rank ends all are started again
  bool ended = false;
  bool restarting = false;
  uint64_t from_scratch_wishes = 0;  // sessions that found nothing readable
  std::vector<RankProcess*> ranks;   // the launcher's own
  std::vector<uint32_t> node_of_rank;

  // One of the launcher's own; else one of an earlier run, or none of the ranks.
  bool Runs(const RankProcess* process) const;
  // The least step of the ranks that train in that attempt; of a large job as it was a moment ago.
  Step SlowestStep(Attempt attempt, int64_t now);

 private:
  Step slowest_ = 0;
  Attempt slowest_of_ = 0;
  int64_t slowest_at_ = 0;
};

class World {
 public:
  explicit World(const Options& options);
  ~World();
  void Run();
  const std::string& violation() const { return truth.violation(); }
  std::string Summary() const;
  // The command that repeats it.
  std::string Command() const;

  const Options options;
  Timeline t;
  Counts counts;
  Truth truth;
  Etcd etcd;
  Network network;
  Remote remote;

  Node& node(uint32_t index) { return *nodes_[index]; }
  const Node& node(uint32_t index) const { return *nodes_[index]; }
  uint32_t IndexOf(const std::string& name) const { return index_.at(name); }
  size_t nodes() const { return nodes_.size(); }
  bool stormy() const { return stormy_; }
  // And all that may be back has been back for a while.
  bool settled() const { return settled_; }
  // Jobs come back with other numbers of ranks.
  bool reshards() const { return reshards_; }
  // They are told to end.
  bool operated() const { return options.rates == Rates::kOperators; }
  void Trace(const std::string& text) const;
  bool tracing() const { return options.trace; }
  void Count(Fault fault) { ++counts.faults[static_cast<size_t>(fault)]; }
  uint64_t NewToken() { return next_token_++; }
  uint64_t NewHold() { return next_hold_++; }

  // ---- for the judge of repairs ----
  std::map<std::string, uint64_t> written_anew;  // bad copies, by location, and not told yet
  void ToldMended(const std::string& job, const std::string& text);
  // What nodes write for that host just now, and it knows of.
  size_t UnderWay(const std::string& commander,
                  const std::function<bool(const Node&, const SimDrain&)>& which) const;

  // ---- for ranks ----
  void RankEnded(RankProcess* process);
  std::vector<Job>& jobs() { return jobs_; }
  // It has sealed the step with which it was to end, and ends.
  void StoppedAt(const Job& job, Attempt attempt, Rank rank, Step step);
  // Nothing that it could load is there, it says. After a while a person lets it begin anew.
  void Unreadable(Job& job, Attempt attempt, int64_t entered_at, const std::string& why);

 private:
  // cluster_world.cc
  void MakeNodes();
  void MakeJobs();
  void Launch(Job& job, Rank rank);
  void Restart(Job& job);
  bool Place(Job& job);
  void Resize(Job& job);
  void GiveOtherPlaces(Job& job, const std::map<uint32_t, uint32_t>& load);
  bool Reachable(uint32_t node) const;
  void Kill(RankProcess* process, Duration linger);
  void SayHowFar();
  void Calm();
  void CheckTheEnd();
  void AskWhereAllLies(const std::string& job, std::set<std::string> doubted);
  void Sweep();
  void Sample();
  void AskForNoPoint(const Job& job);
  // cluster_faults.cc
  void MakeWeather();
  Duration Between();
  void Trouble();
  void Inject();
  Node* AnyNode(bool up);
  std::optional<uint32_t> AHost();
  uint32_t OneEnd();
  void CutLinks();
  void ProcessTrouble();
  void TierTrouble();
  void EtcdTrouble();
  void Erase();
  void CutOffFromEtcd(uint32_t node);
  void RemoveHost(const std::string& job);
  bool StatesAreSpread() const;
  void NodeTrouble();
  bool MayLoseNode() const;
  // cluster_scrub.cc
  void CutCopy(SimTier& tier, cluster::Place place);
  bool IsGoodInRemote(const ShardId& id) const;
  bool MayBeMended(const ShardId& id, cluster::Place place) const;
  void AskWhatIsMended(const std::string& job, std::set<std::string> doubted);
  void WatchMending(std::map<std::pair<ShardId, cluster::Place>, int64_t> since);
  // cluster_people.cc
  void PeopleTrouble();
  void Visit(Job& job, Node& node, RankProcess::Role role);
  void AskForRestorePoint(Node& node, const Job& job, CheckpointId id);
  void AskForPin(Node& node, const Job& job, CheckpointId id);
  void AskToRead(Node& node, const Job& job, CheckpointId id);
  void AskAsStranger(Node& node, const Job& job, CheckpointId id);
  void AskForRemoval(Node& node, const Job& job, CheckpointId id);
  // cluster_operators.cc
  void OperatorTrouble();
  void Drain(Node& node, bool undo);
  void TellJobsToEnd();
  void JudgeEnd(Job& job, Attempt attempt, int64_t until);

  std::vector<std::unique_ptr<Node>> nodes_;
  std::map<std::string, uint32_t> index_;
  std::vector<Job> jobs_;
  std::vector<std::unique_ptr<RankProcess>> processes_;
  bool stormy_ = true;
  int64_t calm_since_ = INT64_MAX;
  bool settled_ = false;
  uint32_t replicas_ = 0;  // of each shard
  uint32_t slots_per_rank_ = 0;
  std::array<uint64_t, 6> weights_ = {3, 3, 2, 1, 2, 1};  // of the troubles, as Inject has them
  bool aims_at_hosts_ = false;
  bool reshards_ = false;
  std::set<uint32_t> draining_;  // as was asked last
  std::map<std::pair<std::string, Attempt>, std::map<Rank, Step>> stopped_;
  uint64_t next_token_ = 1;
  uint64_t next_hold_ = 1;
};

}  // namespace holdfast::sim::cluster
