// Who is asked to give up copies when a flush finds no room in a durable tier, and how far that may
// go: one stage after the other (recovery/deletion.h, RoomStage), the next one only when nothing is
// on its way out any more and there still is no room (docs/deletion.md, "When room is short").
//
//   DurableRoom room;
//   if (const auto ask = room.Next(tier, job, ended, going, now)) …   // DurableRoomAsked
//   room.Found(tier, job);                                   // a flush of the job has ended well
//
// Owned by the Agent; pure, not thread-safe.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/ids.h"
#include "recovery/deletion.h"

namespace holdfast {

// Whoever is asked has so long to begin: what another node is asked for is not seen from here.
inline constexpr Duration kRoomPatience = std::chrono::seconds(2);

class DurableRoom {
 public:
  struct Ended {  // a job without processes here, other than the one that needs room
    JobUuid job;
    bool same_user = false;
    uint64_t bytes = 0;  // that it has in the tier
  };
  struct Ask {
    JobUuid job;
    RoomStage stage = RoomStage::kUsual;
  };

  // One job after the other is asked, so that no more goes than is needed. Nobody, while something
  // is on its way out of the tier (`going`), or somebody was asked a moment ago.
  std::optional<Ask> Next(TierKind tier, const JobUuid& job, const std::vector<Ended>& ended,
                          bool going, MonotonicTime now);
  void Found(TierKind tier, const JobUuid& job) { states_.erase({tier, job}); }

 private:
  struct State {
    size_t stage = 0;  // of those that the tier has
    size_t asked = 0;  // jobs in this stage
  };

  std::map<std::pair<TierKind, JobUuid>, State> states_;  // of who needs room
  std::map<TierKind, MonotonicTime> asked_at_;
};

}  // namespace holdfast
