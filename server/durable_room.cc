#include "server/durable_room.h"

#include <algorithm>
#include <iterator>

namespace holdfast {
namespace {

// In the order in which they are taken.
const std::vector<RoomStage>& StagesOf(TierKind tier) {
  static const std::vector<RoomStage> nvme{RoomStage::kIncomplete, RoomStage::kEndedInRemote,
                                           RoomStage::kLeftBranches, RoomStage::kEndedJobs};
  static const std::vector<RoomStage> remote{RoomStage::kIncomplete, RoomStage::kLeftBranches};
  return tier == TierKind::kNvme ? nvme : remote;
}

// Largest first.
std::vector<JobUuid> Who(RoomStage stage, const JobUuid& job,
                         std::vector<DurableRoom::Ended> ended) {
  const bool any_user = stage == RoomStage::kEndedInRemote || stage == RoomStage::kEndedJobs;
  std::erase_if(ended, [&](const DurableRoom::Ended& e) {
    return e.bytes == 0 || (!any_user && !e.same_user);
  });
  std::stable_sort(ended.begin(), ended.end(),
                   [](const auto& a, const auto& b) { return a.bytes > b.bytes; });
  std::vector<JobUuid> who;
  if (!any_user) {
    who.push_back(job);
  }
  std::transform(ended.begin(), ended.end(), std::back_inserter(who),
                 [](const DurableRoom::Ended& e) { return e.job; });
  return who;
}

}  // namespace

std::optional<DurableRoom::Ask> DurableRoom::Next(TierKind tier, const JobUuid& job,
                                                  const std::vector<Ended>& ended, bool going,
                                                  MonotonicTime now) {
  const auto before = asked_at_.find(tier);
  if (going || (before != asked_at_.end() && now - before->second < kRoomPatience)) {
    return std::nullopt;
  }
  State& state = states_[{tier, job}];
  const std::vector<RoomStage>& stages = StagesOf(tier);
  for (size_t tries = 0; tries <= stages.size(); ++tries) {
    const RoomStage stage = stages[state.stage];
    const std::vector<JobUuid> who = Who(stage, job, ended);
    if (state.asked < who.size()) {
      asked_at_[tier] = now;
      return Ask{who[state.asked++], stage};
    }
    state = {(state.stage + 1) % stages.size(), 0};
  }
  return std::nullopt;
}

}  // namespace holdfast
