// A process that keeps to no rule of the protocol: it sends any frame at any time, with ids that
// are made up or another's. It does what it likes with a job of its own name; at jobs of another
// user it only gets refusals; of its own user's jobs it may be a second run, while the storm lasts.
//
// What it must leave alone even so is memory that it said that it had let go of: no daemon can
// defend that.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tests/sim/sim_world.h"

namespace holdfast::sim {

class Rude : public Peer {
 public:
  Rude(World* world, ProcessId process, uint32_t uid);

  void Start();
  void End();
  void OnReply(const SendReply& reply, const FilePtr& file) override;
  void OnClosed(ConnectionId connection) override;
  bool Forsook(const SendReply& reply) const override;

 private:
  struct Seat {
    std::string job;
    Attempt attempt = 0;
    Rank rank = 0;
  };
  struct Session {
    uint64_t id = 0;
    uint32_t round = 0;
    CheckpointId checkpoint;
  };
  struct Filling {
    SlotId slot = 0;
    Generation generation = 0;
    ShardId shard;
    FilePtr file;
  };
  struct Hold {
    SlotId slot = 0;
    uint64_t id = 0;
  };
  struct Connection {
    std::optional<Seat> seat;
    std::optional<Session> session;
    std::optional<Filling> filling;
  };
  struct Asked {
    v1::ClientFrame frame;
    uint64_t promises = 0;  // that it had made when it asked
  };

  void Act();
  void Send(ConnectionId connection, v1::ClientFrame frame);
  v1::ClientFrame AnyFrame(Connection& connection);
  void JoinFrame(v1::Join& join);
  void SealFrame(Connection& connection, v1::Seal& seal);
  void ReportFrame(const Connection& connection, v1::ReportLoad& report);
  void EnterFrame(const Connection& connection, v1::EnterSession& enter);
  void ReleaseFrame(v1::ReleaseRead& release);
  void Note(Connection& connection, const v1::ClientFrame& frame);
  void FillAndForget(Connection& connection);
  void Promise();  // from now on nothing of it writes into what it was given before
  void Scribble();
  uint64_t AnyDeadline();
  Step AnyStep(const Connection& connection);
  std::string AnyJob();
  void OnJoined(Connection& connection, const Asked& asked, const v1::JoinReply& reply);
  void OnGranted(Connection& connection, const Asked& asked, const SendReply& reply,
                 const FilePtr& file);
  void OnSource(Connection& connection, const SendReply& reply);

  World* w_;
  std::map<ConnectionId, Connection> connections_;
  std::map<std::pair<ConnectionId, uint64_t>, Asked> asked_;
  std::vector<Filling> lost_;  // what it was writing over connections that are closed
  std::vector<Hold> holds_;
  std::map<SlotId, FilePtr> mapped_;
  uint64_t promises_ = 0;
  uint64_t next_id_ = 1;
};

}  // namespace holdfast::sim
