// One training process: joins, restores, saves in a loop, and does what processes do: dies,
// lingers, loses its connection, goes on writing when it should not. Or (`reader`) one that only
// attaches.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>

#include "tests/sim/sim_world.h"

namespace holdfast::sim {

class Client : public Peer {
 public:
  Client(World* world, JobPlan* job, Rank rank, ProcessId process, bool reader);

  void Start();
  // The first half of dying: its sockets close, its threads may write on until End.
  void Kill();
  void End();
  // From the world.
  void OnReply(const SendReply& reply, const FilePtr& file) override;
  void OnClosed(ConnectionId connection) override;

  bool reader() const { return reader_; }
  Rank rank() const { return rank_; }
  JobPlan& job() { return *job_; }
  ConnectionId connection() const { return connection_; }
  // As far as it knows itself.
  bool TrainsIn(Attempt attempt) const {
    return running() && training_ && connection_ != 0 && attempt_ == attempt;
  }

 private:
  using Handler = std::function<void(const v1::DaemonFrame&, const FilePtr&)>;
  void Call(v1::ClientFrame frame, Duration deadline, Handler handler);
  void Later(Duration delay, void (Client::*what)());
  void Connect();
  void Join();
  void OnJoined(const v1::DaemonFrame& frame);
  void Enter();
  void OnOutcome(const v1::DaemonFrame& frame, const FilePtr& file);
  void Load(v1::SessionOutcome outcome, FilePtr file);
  void OnDone(const v1::SessionOutcome& outcome);
  // The ranks of some attempts want to hear the step, and no more.
  bool ReadsByItself() const { return attempt_ % 5 == 3; }
  void Train();
  void TryToSaveInstead();
  void LeaveOrRestoreAgain();
  void Begin();
  void Reserve();
  void Map(SlotId slot, const FilePtr& file);
  void OnGrant(const v1::DaemonFrame& frame, const FilePtr& file);
  void Write(int part);
  void Seal();
  void Refused(const v1::Failure& failure, const char* what);
  void Release(const v1::Source& source);
  void Read();
  void Replay();
  void Confirm(const v1::Source& source);
  void ConfirmOld(const v1::Source& held);
  void Quit();

  World* w_;
  JobPlan* job_;
  const Rank rank_;
  const bool reader_;
  bool zombie_ = false;  // was told to stop, and writes on
  bool training_ = false;
  ConnectionId connection_ = 0;
  uint64_t next_id_ = 1;
  std::map<uint64_t, Handler> handlers_;
  Attempt attempt_ = 0;
  uint64_t epoch_ = 0;  // grows when what was planned is void
  Step step_ = 0;
  std::optional<CheckpointId> loaded_from_;
  std::optional<CheckpointId> asked_;                 // for its restore
  std::set<std::pair<SlotId, Generation>> released_;  // what it read once
  std::map<SlotId, FilePtr> mapped_;
  std::optional<v1::Grant> filling_;
  FilePtr filling_file_;
  Step filling_step_ = 0;
  int join_failures_ = 0;
  int saves_left_ = 0;
  std::map<uint64_t, uint64_t> unanswered_holds_;  // by request
  std::vector<uint64_t> doubtful_holds_;           // of connections that broke
  std::optional<v1::ClientFrame>
      stale_;  // a frame of an earlier filling or hold, that may be sent again
};

}  // namespace holdfast::sim
