// How and when the last ranks of jobs on this node ended: whose memory gives way first
// (recovery/eviction.h).
//
//   ended.RankCame(job);  ended.RankWent(job, in_order, now);
//   ended.Of(job, saved, now)   // {when, whether all left in order}
//
// Of a job of which no rank was here since the daemon started it is not known: it may have died
// just before. After a while it counts from its newest copy. Owned by the Agent; not thread-safe.
#pragma once

#include <algorithm>
#include <map>

#include "base/clock.h"
#include "base/ids.h"
#include "recovery/eviction.h"

namespace holdfast {

class EndedJobs {
 public:
  struct End {
    MonotonicTime at{};
    bool in_order = false;
  };

  void Start(MonotonicTime now) { started_ = now; }
  void RankCame(const JobUuid& job) { ends_.erase(job); }
  void RankWent(const JobUuid& job, bool in_order, MonotonicTime now) {
    End& end = ends_.try_emplace(job, End{now, true}).first->second;
    end = {now, end.in_order && in_order};
  }
  void Forget(const JobUuid& job) { ends_.erase(job); }
  // `saved`: when the newest copy of it here was sealed.
  End Of(const JobUuid& job, MonotonicTime saved, MonotonicTime now) const {
    if (const auto found = ends_.find(job); found != ends_.end()) {
      return found->second;
    }
    return {now - started_ < kDiedLately ? started_ : std::min(saved, started_), false};
  }

 private:
  MonotonicTime started_{};
  std::map<JobUuid, End> ends_;
};

}  // namespace holdfast
