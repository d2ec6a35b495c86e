// A simulated node: one NodeCore under a runtime that completes its actions late, out of order and
// sometimes not at all, clients that train, save, restore and die, launchers that restart them, an
// administrator, and a daemon that is killed. Everything follows from one seed.
//
//   World world(seed, WorldOptions{});
//   world.Run();
//   EXPECT_EQ(world.violation(), "");
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "tests/sim/sim_model.h"

namespace holdfast::sim {

inline constexpr uint64_t kSlotBytes = 2ull << 20;
// How late an answer may be: what the core waits for the runtime (10 s), and the runtime's own
// lateness.
inline constexpr Duration kAnswerSlack = std::chrono::seconds(25);

struct WorldOptions {
  Duration stormy = std::chrono::minutes(4);  // with faults
  Duration calm = std::chrono::minutes(2);  // without: jobs must commit again, and nothing may leak
  bool trace = false;
};

class Client;

// One job as its user runs it.
struct JobPlan {
  std::string name;
  uint32_t uid = 0;
  uint32_t world_size = 1;
  bool launch_ids = false;
  std::string launch;
  int launches = 0;
  std::optional<CheckpointId> choice;  // what its ranks ask for when they restore
  int64_t pace_ms = 200;
  uint64_t slot_bytes = kSlotBytes;
  std::vector<Client*> ranks;      // the process that the launcher takes for each rank
  std::map<Rank, uint64_t> saves;  // begun since the last commit that a client saw; per rank
  bool ended = false;
};

class World {
 public:
  World(uint64_t seed, WorldOptions options);
  ~World();
  void Run();
  const std::string& violation() const { return oracle_.violation(); }
  std::string Summary() const;

  // ---- chance and time ----
  bool Chance(double probability) {
    return std::uniform_real_distribution<>(0, 1)(random_) < probability;
  }
  uint64_t Below(uint64_t limit) { return limit == 0 ? 0 : random_() % limit; }
  Duration Latency();
  MonotonicTime now() const { return now_; }
  int64_t unix_ms() const { return 1'700'000'000'000 + now_.ns / 1'000'000; }
  void After(Duration delay, std::function<void()> what);
  void Trace(const std::string& text);
  bool stormy() const { return stormy_; }
  bool roomy() const { return roomy_; }
  uint64_t life() const { return life_; }

  // ---- for clients ----
  ConnectionId Open(Client* client);
  void CloseSocket(ConnectionId connection);
  void SendFrame(ConnectionId connection, const v1::ClientFrame& frame, Duration deadline);
  bool DaemonUp() const { return core_ != nullptr; }
  uint64_t NewToken() { return next_token_++; }
  FilePtr FindFile(SlotId slot);
  void Ended(Client* client);  // its process is gone for good
  Oracle& oracle() { return oracle_; }
  const std::map<SlotId, FilePtr>& files() const { return files_; }
  std::map<std::string, v1::JobState>& states() { return states_; }
  const v1::JobState* StateOf(const std::string& job) const;
  void CountCommit(const std::string& job);
  void ClearRestorePoint(const JobPlan& job);
  std::vector<std::unique_ptr<Client>>& clients() { return clients_; }
  void Launch(JobPlan& job, Rank rank);

 private:
  struct Request {
    MonotonicTime due;
    std::string what;
  };
  // sim_runtime.cc: the fake runtime
  void StartDaemon();
  void KillDaemon();
  void Feed(const Event& event);
  void Perform(const Actions& actions);
  void OnSlot(SlotId slot, std::function<void()> effect);
  void Complete(Event event);
  absl::Status MaybeFail(double probability);
  void Do(const SendReply& a);
  void Do(const CloseConnection& a);
  void Do(const WatchProcess& a);
  void Do(const UnwatchProcess& a);
  void Do(const CreateSlot& a);
  void Do(const PopulateSlot& a);
  void Do(const WriteNote& a);
  void Do(const PublishRecord& a);
  void Do(const RemoveRecord& a);
  void Do(const DeleteSlot& a);
  void Do(const WriteJobState& a);
  void Do(const RemoveJobState& a);
  void Do(const IndexShard&) {}
  void Do(const UnindexShard&) {}
  void Do(const SetTimer& a);
  void Do(const AdminReply& a);
  void Do(const Report& a);
  void Deliver(const SendReply& a, FilePtr file);
  void CheckGrant(const SendReply& a, Client& client, const FilePtr& file);
  void CheckDeadlines();
  bool InLife(uint64_t life) const { return core_ != nullptr && life == life_; }

  // sim_world.cc: the world around
  void Step();
  void MakeJobs();
  void Trouble();
  void RestartJob(JobPlan& job, bool all);
  void KillClient(Client* client, Duration linger);
  void FlipABit();
  void Reboot();
  void AdminSomething();
  std::optional<CheckpointId> PickCopy(const JobPlan& job);
  void RemoveJob(const JobPlan& job);
  void StartReader(JobPlan& job);
  void Calm();
  void CheckTheEnd();
  bool HasEnough() const;

  const WorldOptions options_;
  std::mt19937_64 random_;
  MonotonicTime now_{1'000'000'000};
  std::map<std::pair<int64_t, uint64_t>, std::function<void()>> queue_;
  uint64_t next_event_ = 0;
  bool stormy_ = true;
  double failure_rate_ = 0;
  bool tmpfs_full_ = false;
  bool roomy_ = false;

  v1::DaemonConfig config_;
  uint64_t bytes_max_ = 0;
  std::unique_ptr<NodeCore> core_;
  uint64_t life_ = 0;
  uint64_t timer_ = 0;
  std::map<SlotId, FilePtr> files_;
  std::map<std::string, v1::JobState> states_;
  std::set<ProcessId> watched_;
  std::map<SlotId, int64_t> slot_busy_until_;
  std::map<ConnectionId, int64_t> socket_busy_until_;
  std::map<ConnectionId, Client*> connections_;
  std::map<std::pair<ConnectionId, uint64_t>, Request> requests_;
  ConnectionId next_connection_ = 1;
  AdminToken next_admin_ = 1;
  std::map<AdminToken, std::string> admin_;
  uint64_t next_token_ = 1;
  int32_t next_pid_ = 1000;

  std::vector<JobPlan> jobs_;
  std::vector<std::unique_ptr<Client>> clients_;
  Oracle oracle_;
  uint64_t events_ = 0;
  uint64_t commits_ = 0;
  uint64_t restores_ = 0;
  uint64_t kills_ = 0;
  uint64_t restarts_ = 0;

  friend class Client;
};

}  // namespace holdfast::sim
