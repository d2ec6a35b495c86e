#include "server/runtime/daemon_metrics.h"

#include <gtest/gtest.h>

#include <string>

namespace holdfast {
namespace {

bool Has(DaemonMetrics& metrics, const std::string& line) {
  return metrics.registry().Text().find(line + "\n") != std::string::npos;
}

TEST(DaemonMetrics, WhatBefallsATierIsCountedForThatTier) {
  DaemonMetrics metrics;
  metrics.Count({Report::Kind::kTierCommitted, "job", "", 1, TierKind::kNvme}, 0);
  metrics.Count({Report::Kind::kTierShed, "job", "", 1, TierKind::kRemote}, 0);
  metrics.Count({Report::Kind::kTierTrouble, "job", "", 1, TierKind::kRemote}, 0);
  metrics.Count({Report::Kind::kTierRemoved, "job", "", 1, TierKind::kNvme}, 0);
  EXPECT_TRUE(Has(metrics, "holdfast_tier_commits_total{tier=\"nvme\"} 1"));
  EXPECT_TRUE(Has(metrics, "holdfast_tier_commits_total{tier=\"remote\"} 0"));
  EXPECT_TRUE(Has(metrics, "holdfast_tier_shed_total{tier=\"remote\"} 1"));
  EXPECT_TRUE(Has(metrics, "holdfast_tier_troubles_total{tier=\"remote\"} 1"));
  EXPECT_TRUE(Has(metrics, "holdfast_tier_removals_total{tier=\"nvme\"} 1"));
}

TEST(DaemonMetrics, RecoveryIsNoTrouble) {
  DaemonMetrics metrics;
  metrics.Count({Report::Kind::kTierWell, "job", "", 1, TierKind::kRemote}, 0);
  EXPECT_TRUE(Has(metrics, "holdfast_tier_troubles_total{tier=\"remote\"} 0"));
}

TEST(DaemonMetrics, ANodeAloneHasNoCluster) {
  DaemonMetrics metrics;
  EXPECT_EQ(metrics.registry().Text().find("holdfast_cluster"), std::string::npos);
  metrics.Set(ClusterView{.member = true, .members = 3, .reached = 1, .problems = {"x"}});
  metrics.Set(ClusterView{.member = false, .members = 2, .reached = 1, .problems = {"x", "y"}});
  EXPECT_TRUE(Has(metrics, "holdfast_cluster_member 0"));
  EXPECT_TRUE(Has(metrics, "holdfast_cluster_members 2"));
  EXPECT_TRUE(Has(metrics, "holdfast_cluster_nodes_reached 1"));
  EXPECT_TRUE(Has(metrics, "holdfast_cluster_problems 2"));
}

TEST(DaemonMetrics, ReplicasAreATierOfTheirOwn) {
  DaemonMetrics metrics;
  metrics.Count({Report::Kind::kTierCommitted, "job", "", 1, TierKind::kPeer}, 0);
  metrics.Count({Report::Kind::kTierTrouble, "job", "", 1, TierKind::kPeer}, 0);
  EXPECT_TRUE(Has(metrics, "holdfast_tier_commits_total{tier=\"peer\"} 1"));
  EXPECT_TRUE(Has(metrics, "holdfast_tier_troubles_total{tier=\"peer\"} 1"));
  EXPECT_TRUE(Has(metrics, "holdfast_tier_commits_total{tier=\"remote\"} 0"));
}

TEST(DaemonMetrics, EachDriveIsShownByItself) {
  DaemonMetrics metrics;
  DurableTiers::PlaceState drive{TierKind::kNvme, "/mnt/0", {}};
  drive.health.written = {1000, 2, std::chrono::milliseconds(1500)};
  drive.health.read = {10, 1, std::chrono::milliseconds(250)};
  drive.health.bytes_free = 77;
  DurableTiers::PlaceState other{TierKind::kNvme, "/mnt/1", {}};
  other.health.problem = "EIO";
  metrics.Set({drive, other});
  drive.health.written = {3000, 4, std::chrono::milliseconds(2500)};
  metrics.Set({drive, other});
  const std::string first = "{directory=\"/mnt/0\",tier=\"nvme\"} ";
  EXPECT_TRUE(Has(metrics, "holdfast_drive_written_bytes_total" + first + "3000"));
  EXPECT_TRUE(Has(metrics, "holdfast_drive_write_seconds_total" + first + "2.5"));
  EXPECT_TRUE(Has(metrics, "holdfast_drive_writes_total" + first + "4"));
  EXPECT_TRUE(Has(metrics, "holdfast_drive_read_seconds_total" + first + "0.25"));
  EXPECT_TRUE(Has(metrics, "holdfast_drive_free_bytes" + first + "77"));
  EXPECT_TRUE(Has(metrics, "holdfast_drive_healthy" + first + "1"));
  EXPECT_TRUE(Has(metrics, "holdfast_drive_healthy{directory=\"/mnt/1\",tier=\"nvme\"} 0"));
}

TEST(DaemonMetrics, WhatIsAddedUpElsewhereIsACounter) {
  DaemonMetrics metrics(1'700'000'000'500);
  v1::DaemonStatus status;
  status.add_problems("one");
  v1::TierStatus& tier = *status.add_tiers();
  tier.set_tier("remote");
  for (const uint64_t bytes : {100, 100, 250}) {
    tier.set_bytes_written(bytes);
    status.mutable_quiet()->set_held_ms(10 * bytes);
    metrics.Set(status);
  }
  EXPECT_TRUE(Has(metrics, "# TYPE holdfast_tier_written_bytes_total counter"));
  EXPECT_TRUE(Has(metrics, "holdfast_tier_written_bytes_total{tier=\"remote\"} 250"));
  EXPECT_TRUE(Has(metrics, "holdfast_background_held_seconds_total 2.5"));
  EXPECT_TRUE(Has(metrics, "holdfast_start_time_seconds 1700000000.5"));
  EXPECT_TRUE(Has(metrics, "holdfast_problems 1"));
}

}  // namespace
}  // namespace holdfast
