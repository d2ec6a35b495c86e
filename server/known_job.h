// What a daemon knows of a job: whose it is, and, while this node hosts it, its coordinator. In a
// cluster a job is hosted by one node at a time, and known to all that have something of it
// (docs/protocol.md §16).
//
//   Jobs jobs;
//   jobs[uuid] = {uuid, "train", 1000, 1000};          // it is hosted elsewhere, or by nobody yet
//   if (Coordinator* hosted = jobs.at(uuid).coordinator.get()) …
//
// Owned by the Agent; not thread-safe.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "base/ids.h"
#include "holdfast/v1/state.pb.h"
#include "server/coordinator.h"

namespace holdfast {

struct KnownJob {
  JobUuid uuid;
  std::string name;
  uint32_t uid = 0;
  uint32_t gid = 0;
  std::unique_ptr<Coordinator> coordinator = nullptr;  // while this node hosts it
  // In a cluster: the newest state that this node keeps, and whether a host has told it of the job
  // in this life: until then nobody speaks of it.
  std::optional<v1::JobState> state = std::nullopt;
  bool met = false;
};

using Jobs = std::map<JobUuid, KnownJob>;

// What an agent notices that concerns the cluster; whoever carries messages between nodes acts on
// it.
struct JobNoticed {  // it is known here since now: by slots, copies, states
  std::string name;
};
struct JobWanted {  // a client wants to join a job that is not known here
  std::string name;
  uint32_t uid = 0;
  uint32_t gid = 0;
};
// A user of which clients want to join such a job, and until when they wait for it.
struct JobWanter {
  uint32_t uid = 0;
  uint32_t gid = 0;
  MonotonicTime until{};
};
// The same by user (uid, gid): of clients of other nodes.
using JobWanters = std::map<std::pair<uint32_t, uint32_t>, MonotonicTime>;
inline constexpr size_t kSoughtMax = 64;  // users that ask for one job before it is there
inline void NoteWanter(JobWanters& wanters, const JobWanter& wanter, MonotonicTime now) {
  std::erase_if(wanters, [now](const auto& each) { return each.second <= now; });
  const std::pair user(wanter.uid, wanter.gid);
  if (wanters.size() < kSoughtMax || wanters.count(user) > 0) {
    wanters[user] = std::max(wanters[user], wanter.until);
  }
}
struct JobRead {  // a client wants to read one that is not known here
  std::string name;
};
struct JobMissed {  // this node hosts the name, and no tier that it reaches knows such a job
  std::string name;
};
struct JobOpened {  // this node hosts it, and its coordinator has come to be
  std::string name;
  JobUuid uuid;
};
struct JobRemovalAgreed {  // this node hosts it: the others are to let go of it
  std::string name;
  JobUuid uuid;
};
struct JobGoing {  // all that was here of a removed job is gone, or something is in the way
  std::string name;
  JobUuid uuid;
  uint64_t bytes = 0;
  absl::Status status;
};
struct JobGone {  // nothing is known of it here any more
  std::string name;
  JobUuid uuid;
};
using AgentNotice = std::variant<JobNoticed, JobWanted, JobRead, JobMissed, JobOpened,
                                 JobRemovalAgreed, JobGoing, JobGone>;

// The host of a job says who it is, and which of its ranks it believes to run on this node.
struct MeetJob {
  std::string name;
  JobUuid uuid;
  uint32_t uid = 0;
  uint32_t gid = 0;
  Attempt attempt = 0;
  uint32_t world_size = 0;
  std::vector<std::pair<Rank, ProcessId>> ranks;
};

}  // namespace holdfast
