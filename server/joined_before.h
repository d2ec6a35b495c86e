// Who was in the newest attempt of a job, as the state says that this host took over: of those who
// ended before it came nobody else tells it.
//
//   joined_before.Load(state, nodes);        // → why that is no state
//   joined_before.Has(attempt, rank);        // another process gets it in no attempt of that
//   number joined_before.WasUntold(attempt, rank, process);  // this very process: it may ask again
//   joined_before.Save(attempt, members, nodes, state);  // and those of now, for the next host
//
// Owned by a Coordinator; not thread-safe.
#pragma once

#include <cstddef>
#include <map>

#include "absl/status/status.h"
#include "base/ids.h"
#include "holdfast/v1/state.pb.h"
#include "server/members.h"
#include "server/node_names.h"
#include "server/rank_set.h"

namespace holdfast {

// Those that had not been told that they are in, in one state. (Of any others it is not known: they
// start again.)
inline constexpr size_t kUntoldMax = 4096;

class JoinedBefore {
 public:
  absl::Status Load(const v1::AttemptState& state, NodeNames& nodes);
  void Save(Attempt attempt, const Members& members, const NodeNames& nodes,
            v1::AttemptState& state) const;
  void Clear() { *this = JoinedBefore(); }

  bool Has(Attempt attempt, Rank rank) const {
    return attempt == attempt_ && ranks_.count(rank) > 0;
  }
  bool WasUntold(Attempt attempt, Rank rank, const ProcessId& process) const {
    const auto it = untold_.find(rank);
    return attempt == attempt_ && it != untold_.end() && it->second == process;
  }

 private:
  Attempt attempt_ = 0;
  RankSet ranks_;
  std::map<Rank, ProcessId> untold_;
};

}  // namespace holdfast
