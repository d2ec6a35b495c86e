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

}  // namespace
}  // namespace holdfast
