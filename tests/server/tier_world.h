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
  v1::Failure failure;
};

class TierWorld {
 public:
  explicit TierWorld(uint32_t world_size = 1,
                     const std::function<void(v1::DaemonConfig&)>& adjust = nullptr,
                     std::string job_name = "job")
      : h([&](v1::DaemonConfig& config) {
          config.mutable_nvme()->add_dirs("/nvme0");
          config.mutable_remote()->set_dir("/remote");
          if (adjust) {
            adjust(config);
          }
        }),
        name(std::move(job_name)),
        world(world_size) {
    Restore();
  }

  // New processes for all ranks; the old ones have ended.
  void Launch() {
    for (const TestClient& rank : ranks) {
      if (h.living.count(rank.process()) > 0) {
        h.Kill(rank);
      }
    }
    ranks.clear();
    for (Rank rank = 0; rank < world; ++rank) {
      ranks.push_back(h.Connect(next_pid++));
    }
  }
  // `finds_bad`: what a rank says of the copy that it was given.
  Restored Restore(const std::function<bool(Rank, const v1::SessionOutcome&)>& finds_bad = nullptr,
                   std::optional<CheckpointId> wanted = std::nullopt) {
    Launch();
    Join();
    return Enter(finds_bad, wanted);
  }
  void Join() {
    std::vector<uint64_t> ids;
    for (Rank rank = 0; rank < world; ++rank) {
      ids.push_back(ranks[rank].Send(TestClient::JoinFrame(name, rank, world, 1000)));
    }
    joined = true;
    join_failure.Clear();
    for (Rank rank = 0; rank < world; ++rank) {
      const auto answer = ranks[rank].Take(ids[rank]);
      joined = joined && answer && !answer->frame.has_failure();
      if (answer && answer->frame.has_failure()) {
        join_failure = answer->frame.failure();
      }
    }
  }
  Restored Enter(const std::function<bool(Rank, const v1::SessionOutcome&)>& finds_bad = nullptr,
                 std::optional<CheckpointId> wanted = std::nullopt) {
    waiting.assign(world, 0);
    for (Rank rank = 0; rank < world; ++rank) {
      waiting[rank] = ranks[rank].Send(TestClient::EnterFrame(60'000, wanted));
    }
    result = {};
    result.tiers.resize(world);
    result.whys.resize(world);
    return GoOn(finds_bad);
  }
  // Goes on with whatever has been answered meanwhile.
  Restored GoOn(const std::function<bool(Rank, const v1::SessionOutcome&)>& finds_bad = nullptr) {
    uint32_t ended = 0;
    for (bool more = true; more;) {
      more = false;
      for (Rank rank = 0; rank < world; ++rank) {
        const auto answer = ranks[rank].Take(waiting[rank]);
        if (!answer) {
          continue;
        }
        more = true;
        if (answer->frame.has_failure()) {
          result.failure = answer->frame.failure();
          continue;
        }
        const v1::SessionOutcome outcome = answer->frame.enter_session();
        result.round = std::max(result.round, outcome.round());
        if (outcome.done()) {
          EXPECT_TRUE(ended == 0 || result.step == outcome.step());
          result.attempt = outcome.attempt();
          result.step = outcome.step();
          ++ended;
          continue;
        }
        const auto& record = h.files.at(answer->slot).record;
        EXPECT_TRUE(record && record->id.step == outcome.step() && record->id.rank == rank &&
                    record->id.attempt == outcome.attempt());
        result.tiers[rank] = outcome.source().tier();
        result.whys[rank] = outcome.source().why();
        const bool bad = finds_bad && finds_bad(rank, outcome);
        waiting[rank] = ranks[rank].Send(TestClient::ReportFrame(outcome, !bad, bad, 60'000));
        ranks[rank].Release(outcome.source());
      }
    }
    result.done = ended == world;
    return result;
  }
  ::testing::AssertionResult Save(Step step) {
    for (TestClient& rank : ranks) {
      if (::testing::AssertionResult saved = rank.Save(step); !saved) {
        return saved << " (rank of " << rank.process().ToString() << ", step " << step << ")";
      }
    }
    return ::testing::AssertionSuccess();
  }
  void EndAll() {
    for (const TestClient& rank : ranks) {
      h.living.erase(rank.process());
    }
    ranks.clear();
  }
  void RestartDaemon() { h.Restart(); }  // the ranks live on; their connections are gone
  void Reboot() {
    EndAll();
    h.Restart(true);
  }
  std::vector<Step> Nvme() const { return Steps(h.nvme); }
  std::vector<Step> Remote() const { return Steps(h.remote); }
  std::vector<Step> Manifests() const {
    std::vector<Step> steps;
    for (const auto& [job, id] : h.remote.manifests) {
      steps.push_back(id.step);
    }
    return steps;
  }
  JobUuid Uuid() const {
    for (const auto& [uuid, state] : h.states) {
      if (state.name() == name) {
        return JobUuid::FromBytes(uuid).value();
      }
    }
    return {};
  }
  ShardId Shard(Step step, Rank rank = 0, Attempt attempt = 1) const {
    return {Uuid(), attempt, step, rank};
  }
  v1::TierProgress Tier(const std::string& tier) {
    const v1::JobStatus status = h.Status(name);
    for (const v1::TierProgress& progress : status.tiers()) {
      if (progress.tier() == tier) {
        return progress;
      }
    }
    return {};
  }
  // Per kind of failure: the step that would survive it, 0 for none.
  std::vector<Step> Protection() {
    std::vector<Step> steps;
    const v1::JobStatus status = h.Status(name);
    for (const v1::Protection& line : status.protection()) {
      steps.push_back(line.any() ? line.step() : 0);
    }
    return steps;
  }
  bool Reported(const std::string& text) const {
    return std::any_of(h.reports.begin(), h.reports.end(), [&](const Report& report) {
      return report.text.find(text) != std::string::npos;
    });
  }
  v1::Failure Await(Step step, v1::AwaitSave::Stage stage) {
    const v1::DaemonFrame frame = ranks[0].Call(TestClient::AwaitFrame(step, stage));
    return frame.failure();
  }
  bool Reached(Step step, v1::AwaitSave::Stage stage) {
    return ranks[0].Call(TestClient::AwaitFrame(step, stage)).await_save().stage() == stage;
  }
  template <typename Action>
  size_t Delayed(const std::function<bool(const Action&)>& which = nullptr) const {
    return static_cast<size_t>(
        std::count_if(h.delayed.begin(), h.delayed.end(), [&](const holdfast::Action& action) {
          const auto* of_kind = std::get_if<Action>(&action);
          return of_kind != nullptr && (!which || which(*of_kind));
        }));
  }
  void DelayFlushes(std::optional<TierKind> to = std::nullopt) {
    h.delay = [to](const holdfast::Action& action) {
      const auto* flush = std::get_if<FlushShard>(&action);
      return flush != nullptr && (!to || flush->to == *to);
    };
  }
  void FailFlushes(TierKind to, absl::Status status) {
    h.fail = [to, status](const holdfast::Action& action) {
      const auto* flush = std::get_if<FlushShard>(&action);
      return flush != nullptr && flush->to == to ? status : absl::OkStatus();
    };
  }

  CoreHarness h;
  std::string name;
  uint32_t world;
  std::vector<TestClient> ranks;
  bool joined = false;
  v1::Failure join_failure;
  std::vector<uint64_t> waiting;
  Restored result;
  int32_t next_pid = 100;

 private:
  std::vector<Step> Steps(const FakeTier& tier) const { return tier.Whole(world); }
};

}  // namespace holdfast::testing
