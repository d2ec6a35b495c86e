// One training process of a simulated cluster: joins, restores, saves in a loop, is killed,
// lingers, hangs, is superseded and does not listen.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "server/events.h"
#include "tests/sim/sim_model.h"

namespace holdfast::sim::cluster {

class World;
class Node;
struct Job;

class RankProcess {
 public:
  // A reader attaches a few times and takes part in nothing; a stranger, another user's, joins.
  enum class Role { kRank, kReader, kStranger };

  RankProcess(World& world, Node& node, Job& job, Rank rank, std::string launch,
              Role role = Role::kRank);

  void Start();
  void Kill();  // its sockets close, its threads may write on
  void End();   // it is gone
  void Hang(Duration time);
  // It gets a signal; whoever sent it kills it so much later.
  void TellToEnd(Duration grace);
  void OnReply(const SendReply& reply, const FilePtr& file);
  void OnClosed();

  // Nothing that was planned for it is outstanding any more.
  bool Forgotten(int64_t now) const { return ended_at_ + 600'000'000'000 < now; }

  bool alive() const { return alive_; }
  bool running() const { return alive_ && !dying_; }
  const ProcessId& process() const { return process_; }
  Rank rank() const { return rank_; }
  uint32_t world_size() const { return world_size_; }
  Job& job() { return job_; }
  Node& node() const { return node_; }
  uint32_t uid() const;
  bool training() const { return training_; }
  Attempt attempt() const { return attempt_; }
  Step step() const { return step_; }

 private:
  using Handler = std::function<void(const v1::DaemonFrame&, const FilePtr&)>;
  void Call(v1::ClientFrame frame, Duration deadline, Handler handler);
  void Later(Duration delay, std::function<void()> what);
  void Later(Duration delay, void (RankProcess::*what)());
  void Connect();
  void Join();
  void OnJoined(const v1::DaemonFrame& frame, int64_t asked);
  void Enter();
  void OnOutcome(const v1::DaemonFrame& frame, const FilePtr& file);
  void Load(const v1::SessionOutcome& outcome, const FilePtr& file);
  void OnDone(const v1::SessionOutcome& outcome);
  double PerRank() const;
  Step AheadAtMost() const;
  void Train();
  void Begin();
  void Reach();
  void Save();
  void OnGrant(const v1::DaemonFrame& frame, const FilePtr& file);
  void Write();
  void Seal();
  void Drain(Step step);
  void Await(Step step);
  void JudgeAwaits();
  void Release(const v1::Source& source, const FilePtr& file);
  void Refused(const v1::Failure& failure, const char* what);
  // cluster_visitors.cc
  void JoinAsStranger();
  void Read();
  void OnAttached(const v1::Source& source, const FilePtr& file);

  // cluster_reshard.cc: a step is read out of the shards of all who saved it.
  struct OldShard;
  struct Resharding;
  using ReshardingPtr = std::shared_ptr<Resharding>;
  using OldShardPtr = std::shared_ptr<OldShard>;
  void Reshard(const v1::SessionOutcome& offer, uint32_t saved_by, const FilePtr& own);
  void JudgeOffer(const v1::SessionOutcome& offer);
  void ReadShards(const ReshardingPtr& run);
  void AttachOld(const ReshardingPtr& run, const OldShardPtr& shard);
  void OnOldAttached(const ReshardingPtr& run, const OldShardPtr& shard, const v1::Source& source,
                     const FilePtr& file);
  void OnOldRefused(const ReshardingPtr& run, const OldShardPtr& shard, const v1::Failure& failure);
  void ReadOld(const ReshardingPtr& run, const OldShardPtr& shard);
  void OnPartsRead(const ReshardingPtr& run, const OldShardPtr& shard,
                   const v1::DaemonFrame& reply);
  bool IsGood(const OldShard& shard);
  void PassOver(const ReshardingPtr& run, const OldShardPtr& shard, bool bad);
  void EndOld(const ReshardingPtr& run, const OldShardPtr& shard);
  void LetGo(OldShard& shard);
  void ReportReshard(const ReshardingPtr& run);
  bool Falters();
  void SettleHolds();

  World& w_;
  Node& node_;
  Job& job_;
  const Rank rank_;
  const uint32_t world_size_;  // of its run
  const std::string launch_;
  const Role role_;
  const ProcessId process_;
  int tries_left_ = 4;  // of a reader or a stranger
  bool alive_ = true;
  bool dying_ = false;
  bool stubborn_ = false;  // was told to end, and goes on
  int64_t entered_at_ = 0;
  bool training_ = false;
  int64_t killed_at_ = 0;  // not 0: it was told to end
  bool ends_ = false;      // with the step that it saves
  std::optional<Step> passed_;
  int64_t hangs_until_ = 0;
  int64_t ended_at_ = 0;
  ConnectionId connection_ = 0;
  uint64_t next_id_ = 1;
  std::map<uint64_t, Handler> handlers_;
  uint64_t epoch_ = 0;  // grows when what was planned is void
  JobUuid uuid_;
  Attempt attempt_ = 0;
  Step step_ = 0;
  int refusals_ = 0;
  std::set<Step> awaited_;  // without a near deadline, and not answered yet
  std::optional<CheckpointId> loaded_;
  std::map<uint64_t, FilePtr> held_;       // holds that an Attach may bring, or has brought
  std::map<uint64_t, FilePtr> unsettled_;  // the same, of connections that are lost
  // Of which session it has called steps bad, and how often.
  std::pair<uint64_t, std::map<CheckpointId, int>> called_bad_;
  std::map<SlotId, FilePtr> mapped_;
  std::optional<v1::Grant> filling_;
  FilePtr filling_file_;
};

}  // namespace holdfast::sim::cluster
