#include "server/runtime/save_times.h"

#include <algorithm>
#include <vector>

namespace holdfast {
namespace {

// A slot is there at once, or another step must make room first.
const std::vector<double> kWaitBounds = {0.001, 0.005, 0.025, 0.1, 0.5, 2.5, 10, 60};
// From a few megabytes copied to a shard that waits for the device, or is read from far away.
const std::vector<double> kSaveBounds = {0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300};
const std::vector<double> kRestoreBounds = {0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800};

// Of ranks that make what they want out of several ranks' shards: these come from wherever.
constexpr char kSeveral[] = "several";

double Seconds(Duration duration) {
  return std::chrono::duration<double>(duration).count();
}

}  // namespace

SaveTimes::SaveTimes(Metrics& registry)
    : waited_(registry.AddHistogram(
          "holdfast_save_wait_seconds",
          "Time from a rank's request to save until it had memory to write into.", kWaitBounds)),
      saved_(registry.AddHistogram(
          "holdfast_save_seconds",
          "Time from a rank's request to save until its shard was sealed and it was told so.",
          kSaveBounds)) {
  const std::vector<std::string> tiers = {
      std::string(TierName(TierKind::kMemory)), std::string(TierName(TierKind::kPeer)),
      std::string(TierName(TierKind::kNvme)), std::string(TierName(TierKind::kRemote)), kSeveral};
  for (const std::string& tier : tiers) {
    restored_[tier] = &registry.AddHistogram(
        "holdfast_restore_seconds",
        "Time from a rank's request to restore until it had loaded its state, by the tier that it "
        "came from; several: out of several ranks' shards.",
        kRestoreBounds, {{"tier", tier}});
  }
}

void SaveTimes::Begin(Connection& connection, uint64_t request, uint64_t step, MonotonicTime now) {
  std::erase_if(connection.saves, [step](const Save& save) { return save.step == step; });
  connection.saves.push_back({step, now, request});
  if (connection.saves.size() > kSavesOfAConnectionMax) {
    connection.saves.pop_front();
  }
}

void SaveTimes::Asked(ConnectionId connection, const v1::ClientFrame& frame, MonotonicTime now) {
  switch (frame.request_case()) {
    case v1::ClientFrame::kBeginSave:
      return Begin(connections_[connection], frame.id(), frame.begin_save().step(), now);
    case v1::ClientFrame::kEnterSession:
      if (!frame.enter_session().reads_by_itself()) {
        connections_[connection].restore = Restore{now, frame.id(), ""};
      }
      return;
    default:
      break;
  }
  const auto known = connections_.find(connection);
  if (known == connections_.end()) {
    return;
  }
  if (frame.has_seal()) {
    for (Save& save : known->second.saves) {
      if (save.step == frame.seal().step()) {
        save.seal_request = frame.id();
      }
    }
  } else if (frame.has_abort_save()) {
    std::erase_if(known->second.saves,
                  [&frame](const Save& save) { return save.step == frame.abort_save().step(); });
  } else if (frame.has_report_load() && known->second.restore) {
    if (frame.report_load().loaded()) {
      EndRestore(known->second, now);
    } else {
      known->second.restore->request = frame.id();
    }
  }
}

void SaveTimes::EndRestore(Connection& connection, MonotonicTime now) {
  const auto times = restored_.find(connection.restore->tier);
  if (times != restored_.end()) {
    times->second->Observe(Seconds(now - connection.restore->began));
  }
  connection.restore.reset();
}

void SaveTimes::Answered(ConnectionId connection, const v1::DaemonFrame& frame, MonotonicTime now) {
  const auto known = connections_.find(connection);
  if (known == connections_.end()) {
    return;
  }
  std::deque<Save>& saves = known->second.saves;
  const auto save = std::find_if(saves.begin(), saves.end(), [&frame](const Save& one) {
    return one.begin_request == frame.id() || one.seal_request == frame.id();
  });
  if (save != saves.end()) {
    if (frame.has_begin_save()) {
      waited_.Observe(Seconds(now - save->began));
      return;
    }
    if (frame.has_seal()) {
      saved_.Observe(Seconds(now - save->began));
    }
    saves.erase(save);  // sealed, or refused
    return;
  }
  std::optional<Restore>& restore = known->second.restore;
  if (!restore || restore->request != frame.id()) {
    return;
  }
  if (!frame.has_enter_session() || frame.enter_session().done()) {
    restore.reset();  // it failed, or there is nothing to load
    return;
  }
  restore->request.reset();
  restore->tier =
      frame.enter_session().reshard() > 0 ? kSeveral : frame.enter_session().source().tier();
}

}  // namespace holdfast
