// The whole control logic of one node: the agent (clients, ranks, slots) and, embedded, the
// coordinator of each of its jobs with its sessions. Pure: same events, same actions.
//
//   NodeCore core(config, "node-a", seed, geteuid());
//   for (const Action& action : core.Handle(Started{…}, now, unix_ms)) runtime.Perform(action);
//
// Not thread-safe: one owner feeds it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "holdfast/v1/config.pb.h"
#include "server/events.h"

namespace holdfast {

class NodeCore {
 public:
  // `config` complete, defaults filled in. `seed` feeds the job uuids: random in production, fixed
  // in the simulator. `daemon_uid` (geteuid) and root see and touch every job, others their own.
  NodeCore(const v1::DaemonConfig& config, std::string node_name, uint64_t seed,
           uint32_t daemon_uid);
  ~NodeCore();
  NodeCore(const NodeCore&) = delete;
  NodeCore& operator=(const NodeCore&) = delete;

  Actions Handle(const Event& event, MonotonicTime now, int64_t unix_ms);

  // Shards that processes here are writing now: a stop of the daemon would cost these saves.
  uint32_t SavesBeingWritten() const;
  // Whose job it is, if this node knows it.
  std::optional<uint32_t> OwnerOf(const std::string& job) const;

  // What the invariants are checked on, after every event (design.md §6). Empty when all hold; else
  // which and why.
  std::string CheckInvariants() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace holdfast
