// Settings that are read again while jobs run (SettingsChanged).
#include <gtest/gtest.h>

#include "tests/server/tier_world.h"

namespace holdfast::testing {
namespace {

using Steps = std::vector<Step>;

v1::SetOptionsRequest Set(const std::string& job, const std::string& name,
                          const std::string& value) {
  v1::SetOptionsRequest request;
  request.set_job(job);
  auto* option = request.add_options();
  option->set_name(name);
  option->set_value(value);
  return request;
}

// As the runtime tells it: with the budget that it has resolved.
void Change(CoreHarness& h, const std::function<void(v1::DaemonConfig&)>& adjust) {
  h.config.mutable_memory()->set_bytes_max(h.bytes_max);
  adjust(h.config);
  h.Feed(SettingsChanged{h.config});
}

TEST(Settings, ADefaultPolicyHoldsForJobsThatRun) {
  TierWorld w(2, [](v1::DaemonConfig& c) { c.mutable_policy()->mutable_nvme()->set_keep_last(5); });
  for (Step step = 1; step <= 3; ++step) {
    ASSERT_TRUE(w.Save(step));
  }
  ASSERT_EQ(w.Nvme(), (Steps{1, 2, 3}));
  Change(w.h, [](v1::DaemonConfig& c) {
    c.mutable_policy()->mutable_nvme()->set_every_steps(10);
    c.mutable_policy()->mutable_nvme()->set_keep_last(1);
  });
  EXPECT_EQ(w.Nvme(), (Steps{3})) << "what it keeps no more goes at once";
  EXPECT_EQ(w.h.Status("job").policy().nvme().every_steps(), 10u);
  ASSERT_TRUE(w.Save(4));
  EXPECT_EQ(w.Nvme(), (Steps{3}));
  ASSERT_TRUE(w.Save(10));
  EXPECT_EQ(w.Nvme(), (Steps{10}));
}

TEST(Settings, WhatWasSetStaysOnTop) {
  TierWorld w;
  ASSERT_TRUE(w.h.Admin<v1::SetOptionsReply>(Set("job", "nvme.every_steps", "5")).ok());
  ASSERT_TRUE(
      w.h.Admin<v1::SetOptionsReply>(Set("", "nvme.bandwidth_bytes_per_s_max", "500MiB"), 0).ok());
  ASSERT_TRUE(w.h.Admin<v1::SetOptionsReply>(Set("", "remote.nice", "3"), 0).ok());
  Change(w.h, [](v1::DaemonConfig& c) {
    c.mutable_policy()->mutable_nvme()->set_every_steps(2);
    c.mutable_policy()->mutable_nvme()->set_keep_last(7);
    c.mutable_nvme()->set_bandwidth_bytes_per_s_max(1 << 20);
    c.mutable_remote()->set_bandwidth_bytes_per_s_max(2 << 20);
    c.mutable_remote()->set_nice(4);
    c.mutable_fabric()->set_bandwidth_bytes_per_s_max(3 << 20);
  });
  EXPECT_EQ(w.h.Status("job").policy().nvme().every_steps(), 5u);
  EXPECT_EQ(w.h.Status("job").policy().nvme().keep_last(), 7u);
  ASSERT_TRUE(w.h.limits);
  EXPECT_EQ(w.h.limits->nvme.bandwidth_bytes_per_s_max(), 500ull << 20);
  EXPECT_EQ(w.h.limits->remote.bandwidth_bytes_per_s_max(), 2u << 20);
  EXPECT_EQ(w.h.limits->remote.nice(), 3u);
  EXPECT_EQ(w.h.limits->fabric.bandwidth_bytes_per_s_max(), 3u << 20);
  // And so it is when they are read once more, or set once more.
  ASSERT_TRUE(w.h.Admin<v1::SetOptionsReply>(Set("", "remote.nice", "5"), 0).ok());
  Change(w.h, [](v1::DaemonConfig&) {});
  EXPECT_EQ(w.h.limits->remote.nice(), 5u);
  EXPECT_EQ(w.h.limits->nvme.bandwidth_bytes_per_s_max(), 500ull << 20);
}

TEST(Settings, WhoWaitsForMemoryHasItWhenThereIsMore) {
  CoreHarness h;
  h.bytes_max = kSlot;
  h.Restart();
  TestClient a = h.Connect(100);
  ASSERT_TRUE(a.Join("job", 0, 1));
  ASSERT_TRUE(a.Begin(1));
  TestClient b = h.Connect(200);
  ASSERT_TRUE(b.Join("other", 0, 1));
  const uint64_t id = b.Send(TestClient::BeginFrame(1, kSlot, 60'000));
  EXPECT_FALSE(b.Take(id)) << "the other job writes into the only slot that there is room for";
  h.bytes_max = 2 * kSlot;
  Change(h, [](v1::DaemonConfig&) {});
  const auto answer = b.Take(id);
  ASSERT_TRUE(answer);
  EXPECT_TRUE(answer->frame.has_begin_save()) << answer->frame.ShortDebugString();
  EXPECT_EQ(h.Daemon().memory_bytes_max(), 2 * kSlot);
}

TEST(Settings, LessMemoryTakesNothingThatIsInUse) {
  CoreHarness h;
  h.bytes_max = 4 * kSlot;
  h.Restart();
  TestClient a = h.Connect(100);
  ASSERT_TRUE(a.Join("job", 0, 1));
  ASSERT_TRUE(a.Save(1));
  ASSERT_TRUE(a.Save(2));
  const size_t slots = h.files.size();
  ASSERT_GE(slots, 2u);
  h.bytes_max = kSlot;
  Change(h, [](v1::DaemonConfig&) {});
  EXPECT_EQ(h.files.size(), slots);
  EXPECT_EQ(h.Committed("job"), (std::vector<std::string>{"1:2", "1:1"}));
  // The job goes on in its own slots.
  ASSERT_TRUE(a.Save(3));
  EXPECT_EQ(h.files.size(), slots);
  // Another one gets none.
  TestClient b = h.Connect(200);
  ASSERT_TRUE(b.Join("other", 0, 1));
  EXPECT_FALSE(b.Begin(1));
}

TEST(Settings, ADeadlineHoldsForStepsUnderWay) {
  CoreHarness h([](v1::DaemonConfig& c) { c.mutable_save()->set_commit_deadline_ms(600'000); });
  TestClient a = h.Connect(100);
  TestClient b = h.Connect(101);
  const uint64_t joins = a.Send(TestClient::JoinFrame("job", 0, 2, 1000));
  ASSERT_TRUE(b.Join("job", 1, 2));
  ASSERT_TRUE(a.Take(joins));
  ASSERT_TRUE(a.Save(1));
  Change(h, [](v1::DaemonConfig& c) { c.mutable_save()->set_commit_deadline_ms(1000); });
  EXPECT_EQ(h.CountReports(Report::Kind::kStepAbandoned), 0u);
  h.Advance(std::chrono::milliseconds(1500));
  EXPECT_EQ(h.CountReports(Report::Kind::kStepAbandoned), 1u);
}

}  // namespace
}  // namespace holdfast::testing
