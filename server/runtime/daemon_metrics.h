// What /metrics says of the daemon: names, units and help in one place, fed from the core's reports
// and the runtime.
//
//   DaemonMetrics metrics;
//   metrics.Count(report);
//   HF_RETURN_IF_ERROR(metrics.registry().Serve("127.0.0.1:9464"));
//
// Owner: the Daemon. Counting is thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/metrics.h"
#include "holdfast/v1/admin.pb.h"
#include "server/events.h"
#include "server/runtime/cluster_runtime.h"
#include "server/runtime/job_gauges.h"
#include "server/runtime/save_times.h"
#include "server/runtime/step_times.h"
#include "server/runtime/tiers/durable_tiers.h"
#include "server/runtime/transfer_times.h"

namespace holdfast {

class DaemonMetrics {
 public:
  // `unix_ms`: when the daemon started.
  explicit DaemonMetrics(int64_t unix_ms = 0);
  void Count(const Report& report, int64_t unix_ms);
  void CountHandled(Duration took) { handle_.Observe(std::chrono::duration<double>(took).count()); }
  void CountProtocolError() { protocol_errors_.Add(1); }
  void CountCatalogError() { catalog_errors_.Add(1); }
  void Set(const v1::DaemonStatus& status);
  void Set(const ClusterView& cluster);
  void Set(const std::vector<DurableTiers::PlaceState>& places);
  // All jobs that the core knows, at that time.
  void SetJobs(const v1::GetStatusReply& status, int64_t unix_ms);
  // As they were set last.
  const TierLags& lags() const { return jobs_.lags(); }
  SaveTimes& saves() { return saves_; }
  StepTimes& steps() { return steps_; }
  TransferTimes& transfers() { return transfers_; }
  Metrics& registry() { return registry_; }

 private:
  // A counter of what somebody else adds up.
  struct Running {
    Counter* counter = nullptr;
    double last = 0;
    void AdvanceTo(double value);
  };
  void SetTier(const v1::TierStatus& tier);

  Metrics registry_;
  Counter& saves_sealed_;
  Counter& saves_refused_;
  Counter& sealed_bytes_;
  Counter& steps_committed_;
  Counter& steps_shed_;
  Counter& steps_retired_;
  Counter& steps_abandoned_;
  Counter& attempts_;
  Counter& sessions_done_;
  Counter& sessions_failed_;
  Counter& sessions_fell_back_;
  Counter& bad_copies_;
  Counter& mended_copies_;
  Counter& unmended_copies_;
  Counter& diverged_;
  Counter& lost_slots_;
  Counter& protocol_errors_;
  Counter& troubles_;
  Counter& catalog_errors_;
  Gauge& slots_;
  Gauge& slots_free_;
  Gauge& slots_quarantined_;
  Gauge& memory_used_;
  Gauge& memory_max_;
  Gauge& memory_free_in_tmpfs_;
  Gauge& connections_;
  Running held_;
  Gauge& problems_;
  Running scrub_bytes_;
  Running scrub_copies_;
  Running scrub_bad_;
  Gauge& scrub_oldest_;
  Gauge& scrub_overdue_;
  struct TierCounters {
    Counter& commits;
    Counter& shed;
    Counter& troubles;
    Counter& removals;
  };
  TierCounters AddTierCounters(TierKind tier);
  TierCounters& CountersOf(TierKind tier);

  TierCounters peer_;
  TierCounters nvme_;
  TierCounters remote_;
  struct TierGauges {
    Gauge* used = nullptr;
    Gauge* max = nullptr;
    Gauge* free = nullptr;
    Gauge* flushes = nullptr;
    Gauge* stalled = nullptr;
    Gauge* healthy = nullptr;
    Running written;
    Running read;
    Running shared;
    Running compressed_away;
  };
  struct PlaceMetrics {  // of a drive, or the remote mount
    Gauge* healthy = nullptr;
    Gauge* free = nullptr;
    Running written_bytes;
    Running write_seconds;
    Running writes;
    Running read_bytes;
    Running read_seconds;
    Running reads;
  };
  PlaceMetrics& MetricsOf(const DurableTiers::PlaceState& place);
  std::map<std::string, TierGauges> tiers_;  // made with the first status that has them
  std::map<std::pair<TierKind, std::string>, PlaceMetrics> places_;  // likewise; by directory
  struct ClusterGauges {                                             // made with the first view
    Gauge* member = nullptr;
    Gauge* members = nullptr;
    Gauge* reached = nullptr;
    Gauge* problems = nullptr;
  };
  ClusterGauges cluster_;
  Histogram& handle_;
  SaveTimes saves_;
  StepTimes steps_;
  TransferTimes transfers_;
  JobGauges jobs_;
};

}  // namespace holdfast
