// A job on a node with both durable tiers, for the tests of what goes there, comes back and is
// removed.
//
//   TierWorld w(2);                  // two ranks
//   w.Save(10);                      // both; whatever the tiers do with it has happened
//   w.Reboot();
//   EXPECT_EQ(w.Restore().step, 10u);
#pragma once

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "tests/server/core_harness.h"

namespace holdfast::testing {

// How a restore ended, for all ranks alike (else the test fails).
struct Restored {
  bool done = false;
  Attempt attempt = 0;
  Step step = 0;
  uint32_t round = 0;
  std::vector<std::string> tiers;  // by rank: of its last source
  std::vector<std::string> whys;
  std::string passed_over;
  v1::Failure failure;
};

class TierWorld {
 public:
  explicit TierWorld(uint32_t world_size = 1,
                     const std::function<void(v1::DaemonConfig&)>& adjust = nullptr,
                     std::string job_name = "job");
  ~TierWorld();

  // New processes for all ranks; the old ones have ended.
  void Launch();
  // `finds_bad`: what a rank says of the copy that it was given.
  Restored Restore(const std::function<bool(Rank, const v1::SessionOutcome&)>& finds_bad = nullptr,
                   std::optional<CheckpointId> wanted = std::nullopt);
  void Join();
  Restored Enter(const std::function<bool(Rank, const v1::SessionOutcome&)>& finds_bad = nullptr,
                 std::optional<CheckpointId> wanted = std::nullopt);
  // Goes on with whatever has been answered meanwhile.
  Restored GoOn(const std::function<bool(Rank, const v1::SessionOutcome&)>& finds_bad = nullptr);
  ::testing::AssertionResult Save(Step step);
  void EndAll();
  void RestartDaemon() { h.Restart(); }  // the ranks live on; their connections are gone
  void Reboot();
  std::vector<Step> Nvme() const;
  std::vector<Step> Remote() const;
  std::vector<Step> Manifests() const;
  JobUuid Uuid() const;
  ShardId Shard(Step step, Rank rank = 0, Attempt attempt = 1) const;
  v1::TierProgress Tier(const std::string& tier);
  // Per kind of failure: the step that would survive it, 0 for none.
  std::vector<Step> Protection();
  bool Reported(const std::string& text) const;
  v1::Failure Await(Step step, v1::AwaitSave::Stage stage);
  bool Reached(Step step, v1::AwaitSave::Stage stage);
  template <typename Action>
  size_t Delayed(const std::function<bool(const Action&)>& which = nullptr) const {
    return static_cast<size_t>(
        std::count_if(h.delayed.begin(), h.delayed.end(), [&](const holdfast::Action& action) {
          const auto* of_kind = std::get_if<Action>(&action);
          return of_kind != nullptr && (!which || which(*of_kind));
        }));
  }
  void DelayFlushes(std::optional<TierKind> to = std::nullopt);
  void FailFlushes(TierKind to, absl::Status status);

  CoreHarness h;
  std::string name;
  uint32_t world;
  std::vector<TestClient> ranks;
  bool joined = false;
  v1::Failure join_failure;
  std::vector<uint64_t> waiting;
  Restored result;
  int32_t next_pid = 100;
  uint64_t deadline_ms = 60'000;  // of who enters

 private:
  std::vector<Step> Steps(const FakeTier& tier) const;
};

}  // namespace holdfast::testing
