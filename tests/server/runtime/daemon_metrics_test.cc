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
  metrics.Count({Report::Kind::kTierCommitted, "job", "", 1, TierKind::kNvme});
  metrics.Count({Report::Kind::kTierShed, "job", "", 1, TierKind::kRemote});
  metrics.Count({Report::Kind::kTierTrouble, "job", "", 1, TierKind::kRemote});
  metrics.Count({Report::Kind::kTierRemoved, "job", "", 1, TierKind::kNvme});
  EXPECT_TRUE(Has(metrics, "holdfast_tier_commits_total{tier=\"nvme\"} 1"));
  EXPECT_TRUE(Has(metrics, "holdfast_tier_commits_total{tier=\"remote\"} 0"));
  EXPECT_TRUE(Has(metrics, "holdfast_tier_shed_total{tier=\"remote\"} 1"));
  EXPECT_TRUE(Has(metrics, "holdfast_tier_troubles_total{tier=\"remote\"} 1"));
  EXPECT_TRUE(Has(metrics, "holdfast_tier_removals_total{tier=\"nvme\"} 1"));
}

TEST(DaemonMetrics, RecoveryIsNoTrouble) {
  DaemonMetrics metrics;
  metrics.Count({Report::Kind::kTierWell, "job", "", 1, TierKind::kRemote});
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

}  // namespace
}  // namespace holdfast
