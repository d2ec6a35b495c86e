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

#include "base/clock.h"
#include "base/metrics.h"
#include "holdfast/v1/admin.pb.h"
#include "server/events.h"
#include "server/runtime/cluster_runtime.h"

namespace holdfast {

class DaemonMetrics {
 public:
  DaemonMetrics();
  void Count(const Report& report);
  void CountHandled(Duration took) { handle_.Observe(std::chrono::duration<double>(took).count()); }
  void CountProtocolError() { protocol_errors_.Add(1); }
  void CountCatalogError() { catalog_errors_.Add(1); }
  void Set(const v1::DaemonStatus& status);
  void Set(const ClusterView& cluster);
  Metrics& registry() { return registry_; }

 private:
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
  Gauge& held_;
  struct TierCounters {
    Counter& commits;
    Counter& shed;
    Counter& troubles;
    Counter& removals;
  };
  TierCounters AddTierCounters(TierKind tier);
  TierCounters& CountersOf(TierKind tier) { return tier == TierKind::kNvme ? nvme_ : remote_; }

  TierCounters nvme_;
  TierCounters remote_;
  struct TierGauges {
    Gauge* used = nullptr;
    Gauge* max = nullptr;
    Gauge* free = nullptr;
    Gauge* flushes = nullptr;
    Gauge* stalled = nullptr;
    Gauge* healthy = nullptr;
    Gauge* written = nullptr;
    Gauge* read = nullptr;
    Gauge* shared = nullptr;
  };
  std::map<std::string, TierGauges> tiers_;  // made with the first status that has them
  struct ClusterGauges {                     // made with the first view
    Gauge* member = nullptr;
    Gauge* members = nullptr;
    Gauge* reached = nullptr;
    Gauge* problems = nullptr;
  };
  ClusterGauges cluster_;
  Histogram& handle_;
};

}  // namespace holdfast
