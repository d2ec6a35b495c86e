#include "server/runtime/transfer_times.h"

#include <gtest/gtest.h>

#include <chrono>
#include <string>

namespace holdfast {
namespace {

using std::chrono::milliseconds;

class TransferTimesTest : public ::testing::Test {
 protected:
  bool Has(const std::string& line) const {
    return registry_.Text().find(line + "\n") != std::string::npos;
  }
  void Flush(DrainId drain, TierKind to, uint64_t bytes) {
    FlushShard action;
    action.drain = drain;
    action.to = to;
    action.image_bytes = bytes;
    times_.Began(action, clock_.Now());
  }
  void Fetch(DrainId drain, TierKind from, uint64_t slot_bytes, bool background = false) {
    FetchShard action;
    action.drain = drain;
    action.from = from;
    action.slot_bytes = slot_bytes;
    action.background = background;
    times_.Began(action, clock_.Now());
  }
  void EndFlush(DrainId drain, absl::Status status = absl::OkStatus()) {
    FlushEnded end;
    end.drain = drain;
    end.status = std::move(status);
    times_.Ended(end, clock_.Now());
  }
  void EndFetch(DrainId drain, uint64_t bytes, absl::Status status = absl::OkStatus()) {
    FetchEnded end;
    end.drain = drain;
    end.status = std::move(status);
    end.copy.image_bytes = bytes;
    times_.Ended(end, clock_.Now());
  }

  Metrics registry_;
  TransferTimes times_{registry_};
  ManualClock clock_;
};

TEST_F(TransferTimesTest, WhatIsOnItsWayIntoATierIsShownUntilItEnds) {
  Flush(1, TierKind::kNvme, 100);
  Flush(2, TierKind::kNvme, 50);
  Flush(3, TierKind::kRemote, 7);
  EXPECT_TRUE(Has("holdfast_tier_flushing_bytes{tier=\"nvme\"} 150"));
  EXPECT_TRUE(Has("holdfast_tier_flushing_bytes{tier=\"remote\"} 7"));
  EndFlush(1);
  EndFlush(1);  // once
  EXPECT_TRUE(Has("holdfast_tier_flushing_bytes{tier=\"nvme\"} 50"));
  EndFlush(2, absl::UnavailableError("gone"));
  EndFlush(99);
  EXPECT_TRUE(Has("holdfast_tier_flushing_bytes{tier=\"nvme\"} 0"));
}

TEST_F(TransferTimesTest, WhatIsRestoredIsTimedByWhereItWas) {
  Fetch(1, TierKind::kRemote, 4096);
  EXPECT_TRUE(Has("holdfast_tier_flushing_bytes{tier=\"remote\"} 0"));
  clock_.Advance(milliseconds(2500));
  EndFetch(1, 4000);
  Fetch(2, TierKind::kNvme, 4096);
  EndFetch(2, 0, absl::DataLossError("damaged"));
  EXPECT_TRUE(Has("holdfast_fetch_seconds_sum{tier=\"remote\"} 2.5"));
  EXPECT_TRUE(Has("holdfast_fetched_bytes_total{tier=\"remote\",use=\"restore\"} 4000"));
  EXPECT_TRUE(Has("holdfast_fetch_seconds_count{tier=\"nvme\"} 0"));
}

TEST_F(TransferTimesTest, ReplicasAreNoRestores) {
  Fetch(1, TierKind::kPeer, 4096, true);
  EXPECT_TRUE(Has("holdfast_tier_flushing_bytes{tier=\"peer\"} 4096"));
  EndFetch(1, 4000);
  Fetch(2, TierKind::kPeer, 4096);
  EndFetch(2, 3000);
  EXPECT_TRUE(Has("holdfast_tier_flushing_bytes{tier=\"peer\"} 0"));
  EXPECT_TRUE(Has("holdfast_fetched_bytes_total{tier=\"peer\",use=\"replica\"} 4000"));
  EXPECT_TRUE(Has("holdfast_fetched_bytes_total{tier=\"peer\",use=\"restore\"} 3000"));
  EXPECT_TRUE(Has("holdfast_fetch_seconds_count{tier=\"peer\"} 1"));
}

TEST_F(TransferTimesTest, TheStatusHasWhatCameFromPeersAndLeavesOtherTiersAlone) {
  Fetch(1, TierKind::kPeer, 4096, true);
  EndFetch(1, 4000);
  Fetch(2, TierKind::kPeer, 4096);
  EndFetch(2, 3000);
  Fetch(3, TierKind::kPeer, 4096);
  EndFetch(3, 0, absl::UnavailableError("gone"));
  Fetch(4, TierKind::kNvme, 4096);
  EndFetch(4, 500);
  v1::DaemonStatus status;
  status.add_tiers()->set_tier("nvme");
  status.mutable_tiers(0)->set_bytes_read(7);
  status.add_tiers()->set_tier("peer");
  times_.FillStatus(status);
  EXPECT_EQ(status.tiers(0).bytes_read(), 7u);
  EXPECT_EQ(status.tiers(1).bytes_written(), 4000u);
  EXPECT_EQ(status.tiers(1).bytes_read(), 3000u);
}

}  // namespace
}  // namespace holdfast
