// Who is asked to give up copies when a flush finds no room in a durable tier, and how far that may
// go: one stage after the other (recovery/deletion.h, RoomStage), the next one only when nothing is
// on its way out any more and there still is no room (docs/deletion.md, "When room is short").
//
//   DurableRoom room;
//   for (const DurableRoom::Ask& ask : room.Next(tier, job, ended, going)) …   // DurableRoomAsked
//   room.Found(tier);                                           // a flush has ended well
//
// Owned by the Agent; pure, not thread-safe.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <vector>

#include "base/ids.h"
#include "recovery/deletion.h"

namespace holdfast {

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

  // `going`: something is on its way out of the tier already; then nothing more is asked for.
  std::vector<Ask> Next(TierKind tier, const JobUuid& job, const std::vector<Ended>& ended,
                        bool going);
  void Found(TierKind tier);

 private:
  struct State {
    size_t stage = 0;  // of those that the tier has
    size_t asked = 0;  // times in this stage
  };

  std::array<State, kTierKinds> states_;
};

}  // namespace holdfast
