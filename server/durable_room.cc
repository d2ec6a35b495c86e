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

std::vector<DurableRoom::Ask> DurableRoom::Next(TierKind tier, const JobUuid& job,
                                                const std::vector<Ended>& ended, bool going) {
  State& state = states_[static_cast<size_t>(tier)];
  const std::vector<RoomStage>& stages = StagesOf(tier);
  if (going) {
    return {};
  }
  for (size_t tries = 0; tries <= stages.size(); ++tries) {
    const RoomStage stage = stages[state.stage];
    const std::vector<JobUuid> who = Who(stage, job, ended);
    // An ended job's last copies go one job after the other, so that no more go than are needed.
    const bool one = stage == RoomStage::kEndedJobs;
    if (state.asked < (one ? who.size() : std::min<size_t>(who.size(), 1))) {
      std::vector<Ask> asks;
      for (size_t i = one ? state.asked : 0; i < (one ? state.asked + 1 : who.size()); ++i) {
        asks.push_back({who[i], stage});
      }
      ++state.asked;
      return asks;
    }
    state = {(state.stage + 1) % stages.size(), 0};
  }
  return {};
}

void DurableRoom::Found(TierKind tier) {
  states_[static_cast<size_t>(tier)] = State();
}

}  // namespace holdfast
