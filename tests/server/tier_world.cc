#include "tests/server/tier_world.h"

namespace holdfast::testing {

TierWorld::TierWorld(uint32_t world_size, const std::function<void(v1::DaemonConfig&)>& adjust,
                     std::string job_name)
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

TierWorld::~TierWorld() = default;

void TierWorld::Launch() {
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

Restored TierWorld::Restore(const std::function<bool(Rank, const v1::SessionOutcome&)>& finds_bad,
                            std::optional<CheckpointId> wanted) {
  Launch();
  Join();
  return Enter(finds_bad, wanted);
}

void TierWorld::Join() {
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

Restored TierWorld::Enter(const std::function<bool(Rank, const v1::SessionOutcome&)>& finds_bad,
                          std::optional<CheckpointId> wanted) {
  waiting.assign(world, 0);
  for (Rank rank = 0; rank < world; ++rank) {
    waiting[rank] = ranks[rank].Send(TestClient::EnterFrame(deadline_ms, wanted));
  }
  result = {};
  result.tiers.resize(world);
  result.whys.resize(world);
  return GoOn(finds_bad);
}

Restored TierWorld::GoOn(const std::function<bool(Rank, const v1::SessionOutcome&)>& finds_bad) {
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
        EXPECT_TRUE(ended == 0 || result.passed_over == outcome.passed_over());
        result.passed_over = outcome.passed_over();
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

::testing::AssertionResult TierWorld::Save(Step step) {
  for (TestClient& rank : ranks) {
    if (::testing::AssertionResult saved = rank.Save(step); !saved) {
      return saved << " (rank of " << rank.process().ToString() << ", step " << step << ")";
    }
  }
  return ::testing::AssertionSuccess();
}

void TierWorld::EndAll() {
  for (const TestClient& rank : ranks) {
    h.living.erase(rank.process());
  }
  ranks.clear();
}

void TierWorld::Reboot() {
  EndAll();
  h.Restart(true);
}

std::vector<Step> TierWorld::Nvme() const {
  return Steps(h.nvme);
}
std::vector<Step> TierWorld::Remote() const {
  return Steps(h.remote);
}
std::vector<Step> TierWorld::Manifests() const {
  std::vector<Step> steps;
  for (const auto& [job, id] : h.remote.manifests) {
    steps.push_back(id.step);
  }
  return steps;
}

JobUuid TierWorld::Uuid() const {
  for (const auto& [uuid, state] : h.states) {
    if (state.name() == name) {
      return JobUuid::FromBytes(uuid).value();
    }
  }
  return {};
}

ShardId TierWorld::Shard(Step step, Rank rank, Attempt attempt) const {
  return {Uuid(), attempt, step, rank};
}

v1::TierProgress TierWorld::Tier(const std::string& tier) {
  const v1::JobStatus status = h.Status(name);
  for (const v1::TierProgress& progress : status.tiers()) {
    if (progress.tier() == tier) {
      return progress;
    }
  }
  return {};
}

std::vector<Step> TierWorld::Protection() {
  std::vector<Step> steps;
  const v1::JobStatus status = h.Status(name);
  for (const v1::Protection& line : status.protection()) {
    steps.push_back(line.any() ? line.step() : 0);
  }
  return steps;
}

bool TierWorld::Reported(const std::string& text) const {
  return std::any_of(h.reports.begin(), h.reports.end(), [&](const Report& report) {
    return report.text.find(text) != std::string::npos;
  });
}

v1::Failure TierWorld::Await(Step step, v1::AwaitSave::Stage stage) {
  const v1::DaemonFrame frame = ranks[0].Call(TestClient::AwaitFrame(step, stage));
  return frame.failure();
}

bool TierWorld::Reached(Step step, v1::AwaitSave::Stage stage) {
  return ranks[0].Call(TestClient::AwaitFrame(step, stage)).await_save().stage() == stage;
}

void TierWorld::DelayFlushes(std::optional<TierKind> to) {
  h.delay = [to](const holdfast::Action& action) {
    const auto* flush = std::get_if<FlushShard>(&action);
    return flush != nullptr && (!to || flush->to == *to);
  };
}

void TierWorld::FailFlushes(TierKind to, absl::Status status) {
  h.fail = [to, status](const holdfast::Action& action) {
    const auto* flush = std::get_if<FlushShard>(&action);
    return flush != nullptr && flush->to == to ? status : absl::OkStatus();
  };
}

std::vector<Step> TierWorld::Steps(const FakeTier& tier) const {
  return tier.Whole(world);
}

}  // namespace holdfast::testing
