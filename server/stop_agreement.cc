#include "server/stop_agreement.h"

#include <limits>
#include <utility>

namespace holdfast {

void StopAgreement::Notice(Rank rank, MonotonicTime by) {
  if (!noticed_) {
    rank_ = rank;
  }
  by_ = noticed_ ? std::min(by_, by) : by;
  noticed_ = true;
}

uint64_t StopAgreement::BeginRound(std::set<NodeId> nodes, MonotonicTime now) {
  waiting_ = std::move(nodes);
  passed_.reset();
  until_ = now + kRoundMax;
  return ++round_;
}

void StopAgreement::Held(NodeId node, uint64_t round, std::optional<Step> passed) {
  if (!until_ || round != round_) {
    return;
  }
  waiting_.erase(node);
  passed_ = std::max(passed_, passed);
}

void StopAgreement::Choose(std::optional<Step> begun) {
  const std::optional<Step> beyond = std::max(passed_, begun);
  constexpr Step kHighest = std::numeric_limits<Step>::max();
  Adopt(!beyond ? 0 : *beyond == kHighest ? kHighest : *beyond + 1);
}

bool StopAgreement::Adopt(Step last) {
  if (last_) {
    return false;
  }
  last_ = last;
  until_.reset();
  waiting_.clear();
  return true;
}

}  // namespace holdfast
