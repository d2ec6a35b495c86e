// What `ckptctl top` shows, out of two answers of a daemon: pure functions, so that tests compare
// frames with texts written by hand.
//
//   const TopModel model = MakeTop(sample, previous ? &*previous : nullptr);
//   out << RenderTop(model, {.columns = 80, .rows = 24});
//
// Names and texts of others stay raw in the model; RenderTop escapes them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "holdfast/v1/admin.pb.h"

namespace holdfast {

// What a daemon said at one time.
struct TopSample {
  v1::GetStatusReply status;
  v1::GetNodesReply nodes;
};

struct TopTier {
  std::string name;
  uint64_t bytes_used = 0;
  uint64_t bytes_max = 0;  // 0: no limit of ours
  uint64_t bytes_room = 0;
  uint64_t backlog_shards = 0;  // of the steps on their way there
  uint32_t steps_waiting = 0;   // for their turn
  // None: nothing to compare with.
  std::optional<double> written_bytes_per_s;
  std::optional<double> read_bytes_per_s;
  std::string problem;  // empty: it is well
};

// A step on its way.
struct TopFlow {
  std::string job;
  uint64_t attempt = 0;
  uint64_t step = 0;
  std::string what;  // saved, peer, nvme, remote (where it goes), restored, prefetched
  uint32_t ranks_done = 0;
  uint32_t ranks = 0;
  int64_t for_ms = 0;  // 0: not known
  bool stalled = false;
  std::optional<double> ranks_per_s;
};

struct TopLag {
  std::string job;
  std::string tier;
  bool any = false;  // a step of the line is whole there
  uint64_t attempt = 0;
  uint64_t step = 0;
  int64_t age_ms = 0;
  std::optional<uint64_t> steps_behind;  // none: the newest is of another attempt, or there is none
  std::string problem;
};

// What would be lost of a job if a failure happened now.
struct TopLoss {
  v1::Protection::FailureKind kind = v1::Protection::FAILURE_KIND_UNSPECIFIED;
  bool everything = true;
  uint64_t attempt = 0;
  uint64_t step = 0;  // where one is back
  int64_t age_ms = 0;
};

struct TopJob {
  std::string name;
  std::string host;
  v1::JobStatus::AttemptPhase phase = v1::JobStatus::ATTEMPT_PHASE_UNSPECIFIED;
  uint32_t ranks_alive = 0;
  uint32_t ranks = 0;
  bool any = false;  // a step is committed
  uint64_t step = 0;
  int64_t age_ms = 0;
  std::vector<TopLoss> losses;
};

struct TopModel {
  v1::DaemonStatus daemon;
  v1::GetNodesReply nodes;
  int64_t interval_ms = 0;  // that rates are of; 0: there are none
  std::vector<TopTier> tiers;
  std::vector<TopFlow> flows;
  std::vector<TopLag> lags;
  std::vector<TopJob> jobs;
  // Set while the daemon is away: the rest is what it said last.
  std::string away;
  int64_t away_ms = 0;
};

// Rates are differences of counters: none without `before`, and none over a restart of the daemon.
TopModel MakeTop(const TopSample& now, const TopSample* before);

struct TopScreen {
  size_t columns = 0;  // 0: as wide as it is
  size_t rows = 0;     // 0: as high as it is
  bool utf8 = true;
};

// Lines with their ends. Not more than the screen has; where that leaves something out it says how
// much.
std::string RenderTop(const TopModel& model, const TopScreen& screen);

nlohmann::ordered_json TopToJson(const TopModel& model);

}  // namespace holdfast
