#include "server/runtime/save_times.h"

#include <gtest/gtest.h>

#include <chrono>
#include <string>

namespace holdfast {
namespace {

using std::chrono::milliseconds;

class SaveTimesTest : public ::testing::Test {
 protected:
  bool Has(const std::string& line) const {
    return registry_.Text().find(line + "\n") != std::string::npos;
  }
  void Begin(ConnectionId connection, uint64_t id, uint64_t step) {
    v1::ClientFrame frame;
    frame.set_id(id);
    frame.mutable_begin_save()->set_step(step);
    times_.Asked(connection, frame, clock_.Now());
  }
  void Grant(ConnectionId connection, uint64_t id) {
    v1::DaemonFrame frame;
    frame.set_id(id);
    frame.mutable_begin_save();
    times_.Answered(connection, frame, clock_.Now());
  }
  void Seal(ConnectionId connection, uint64_t id, uint64_t step) {
    v1::ClientFrame frame;
    frame.set_id(id);
    frame.mutable_seal()->set_step(step);
    times_.Asked(connection, frame, clock_.Now());
  }
  void Sealed(ConnectionId connection, uint64_t id) {
    v1::DaemonFrame frame;
    frame.set_id(id);
    frame.mutable_seal();
    times_.Answered(connection, frame, clock_.Now());
  }
  void Fail(ConnectionId connection, uint64_t id) {
    v1::DaemonFrame frame;
    frame.set_id(id);
    frame.mutable_failure()->set_message("no");
    times_.Answered(connection, frame, clock_.Now());
  }
  void Enter(ConnectionId connection, uint64_t id, bool by_itself = false) {
    v1::ClientFrame frame;
    frame.set_id(id);
    frame.mutable_enter_session()->set_reads_by_itself(by_itself);
    times_.Asked(connection, frame, clock_.Now());
  }
  void Offer(ConnectionId connection, uint64_t id, const std::string& tier, uint32_t reshard = 0) {
    v1::DaemonFrame frame;
    frame.set_id(id);
    frame.mutable_enter_session()->set_reshard(reshard);
    frame.mutable_enter_session()->mutable_source()->set_tier(tier);
    times_.Answered(connection, frame, clock_.Now());
  }
  void ReportLoad(ConnectionId connection, uint64_t id, bool loaded) {
    v1::ClientFrame frame;
    frame.set_id(id);
    frame.mutable_report_load()->set_loaded(loaded);
    times_.Asked(connection, frame, clock_.Now());
  }

  Metrics registry_;
  SaveTimes times_{registry_};
  ManualClock clock_;
};

TEST_F(SaveTimesTest, ASaveIsTimedFromItsRequestToTheSeal) {
  Begin(1, 10, 5);
  clock_.Advance(milliseconds(2000));
  Grant(1, 10);
  clock_.Advance(milliseconds(1000));
  Seal(1, 11, 5);
  clock_.Advance(milliseconds(250));
  Sealed(1, 11);
  EXPECT_TRUE(Has("holdfast_save_wait_seconds_sum 2"));
  EXPECT_TRUE(Has("holdfast_save_seconds_count 1"));
  EXPECT_TRUE(Has("holdfast_save_seconds_sum 3.25"));
  EXPECT_TRUE(Has("holdfast_save_seconds_bucket{le=\"2.5\"} 0"));
  EXPECT_TRUE(Has("holdfast_save_seconds_bucket{le=\"5\"} 1"));
}

TEST_F(SaveTimesTest, RanksAndStepsAreToldApart) {
  Begin(1, 10, 5);
  clock_.Advance(milliseconds(1000));
  Begin(2, 10, 5);
  Begin(1, 11, 6);
  clock_.Advance(milliseconds(1000));
  Seal(2, 11, 5);
  Sealed(2, 11);  // 1 s
  Seal(1, 12, 5);
  Sealed(1, 12);  // 2 s
  EXPECT_TRUE(Has("holdfast_save_seconds_count 2"));
  EXPECT_TRUE(Has("holdfast_save_seconds_sum 3"));
}

TEST_F(SaveTimesTest, WhatWasRefusedOrGivenUpHasNoTime) {
  Begin(1, 10, 5);
  Fail(1, 10);
  Begin(1, 11, 6);
  Grant(1, 11);
  Seal(1, 12, 6);
  Fail(1, 12);
  Sealed(1, 12);  // (of a daemon gone mad)
  Begin(1, 13, 7);
  v1::ClientFrame abort;
  abort.set_id(14);
  abort.mutable_abort_save()->set_step(7);
  times_.Asked(1, abort, clock_.Now());
  Seal(1, 15, 7);
  Sealed(1, 15);
  Begin(1, 16, 8);
  times_.Closed(1);
  Sealed(1, 16);
  EXPECT_TRUE(Has("holdfast_save_seconds_count 0"));
  EXPECT_EQ(times_.connections(), 0u);
}

TEST_F(SaveTimesTest, AClientThatNeverEndsItsSavesTakesNoMoreRoom) {
  for (uint64_t step = 1; step <= 1000; ++step) {
    Begin(1, step, step);
  }
  Seal(1, 2000, 1);  // forgotten
  Sealed(1, 2000);
  EXPECT_TRUE(Has("holdfast_save_seconds_count 0"));
  Seal(1, 2001, 1000 - SaveTimes::kSavesOfAConnectionMax + 1);
  Sealed(1, 2001);
  EXPECT_TRUE(Has("holdfast_save_seconds_count 1"));
}

TEST_F(SaveTimesTest, NumbersThatClientsChooseConfuseNobody) {
  Begin(1, 0, 5);
  Grant(1, 0);
  Sealed(1, 7);  // not asked for
  Seal(1, 0, 5);
  Sealed(1, 0);
  EXPECT_TRUE(Has("holdfast_save_seconds_count 1"));
  Seal(2, 1, 5);
  Sealed(2, 1);  // never begun
  ReportLoad(2, 2, true);
  EXPECT_TRUE(Has("holdfast_save_seconds_count 1"));
  EXPECT_EQ(times_.connections(), 1u);
}

TEST_F(SaveTimesTest, ARestoreCountsForTheTierThatItCameFrom) {
  Enter(1, 10);
  clock_.Advance(milliseconds(500));
  Offer(1, 10, "memory");
  clock_.Advance(milliseconds(500));
  ReportLoad(1, 11, false);  // damaged: the next one
  clock_.Advance(milliseconds(500));
  Offer(1, 11, "remote");
  clock_.Advance(milliseconds(500));
  ReportLoad(1, 12, true);
  EXPECT_TRUE(Has("holdfast_restore_seconds_sum{tier=\"remote\"} 2"));
  EXPECT_TRUE(Has("holdfast_restore_seconds_count{tier=\"memory\"} 0"));
  ReportLoad(1, 13, true);  // once more
  EXPECT_TRUE(Has("holdfast_restore_seconds_count{tier=\"remote\"} 1"));
}

TEST_F(SaveTimesTest, OutOfSeveralRanksShardsIsATierOfItsOwn) {
  Enter(1, 10);
  Offer(1, 10, "", 4);
  clock_.Advance(milliseconds(1500));
  ReportLoad(1, 11, true);
  EXPECT_TRUE(Has("holdfast_restore_seconds_sum{tier=\"several\"} 1.5"));
}

TEST_F(SaveTimesTest, NothingToRestoreIsNoRestore) {
  Enter(1, 10);
  Fail(1, 10);
  ReportLoad(1, 11, true);
  Enter(2, 10, true);
  ReportLoad(2, 11, true);
  Enter(3, 10);
  ReportLoad(3, 11, true);  // of a source that it was not offered
  Enter(4, 10);
  Offer(4, 10, "attic");
  ReportLoad(4, 11, true);
  for (const char* tier : {"memory", "peer", "nvme", "remote", "several"}) {
    EXPECT_TRUE(Has(std::string("holdfast_restore_seconds_count{tier=\"") + tier + "\"} 0"));
  }
}

}  // namespace
}  // namespace holdfast
