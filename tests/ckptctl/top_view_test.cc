#include "ckptctl/top_view.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "ckptctl/text.h"
#include "ckptctl/top_terminal.h"

namespace holdfast {
namespace {

using testing::HasSubstr;
using testing::Not;

constexpr uint64_t kGiB = uint64_t{1} << 30;
constexpr int64_t kNow = 1'714'564'800'000;  // 2024-05-01 12:00:00 UTC

v1::Protection& AddProtection(v1::JobStatus& job, v1::Protection::FailureKind kind, uint64_t step,
                              int64_t age_ms) {
  v1::Protection& line = *job.add_protection();
  line.set_kind(kind);
  line.set_any(step > 0);
  line.set_attempt(2);
  line.set_step(step);
  line.set_age_ms(age_ms);
  return line;
}

TopSample Sample() {
  TopSample sample;
  v1::DaemonStatus& daemon = *sample.status.mutable_daemon();
  daemon.set_node_name("node-a");
  daemon.set_version("0.1.0");
  daemon.set_pid(4711);
  daemon.set_uptime_ms(60'000);
  daemon.set_unix_ms(kNow);
  daemon.set_memory_bytes_max(4 * kGiB);
  daemon.set_memory_bytes_used(1 * kGiB);
  daemon.set_connections(2);
  v1::TierStatus& nvme = *daemon.add_tiers();
  nvme.set_tier("nvme");
  nvme.add_dirs("/mnt/nvme0");
  nvme.set_state("ok");
  nvme.set_healthy(true);
  nvme.set_bytes_max(100 * kGiB);
  nvme.set_bytes_used(40 * kGiB);
  nvme.set_bytes_free(50 * kGiB);
  nvme.set_bytes_written(10'000'000);
  nvme.set_bytes_read(1'000'000);
  v1::NodeStatus& here = *sample.nodes.add_nodes();
  here.set_name("node-a");
  here.set_here(true);
  here.set_reachable(true);
  here.set_capacity_bytes(4 * kGiB);
  here.add_jobs("llama");
  v1::JobStatus& job = *sample.status.add_jobs();
  job.set_name("llama");
  job.set_uuid("u");
  job.set_attempt(2);
  job.set_phase(v1::JobStatus::ATTEMPT_PHASE_RUNNING);
  job.set_world_size(8);
  job.set_ranks_alive(7);
  AddProtection(job, v1::Protection::FAILURE_KIND_PROCESS, 912, 200);
  AddProtection(job, v1::Protection::FAILURE_KIND_REBOOT, 900, 12'000);
  AddProtection(job, v1::Protection::FAILURE_KIND_NODE, 0, 0);
  v1::TierProgress& tier = *job.add_tiers();
  tier.set_tier("nvme");
  tier.set_any(true);
  tier.set_attempt(2);
  tier.set_step(900);
  tier.set_age_ms(12'000);
  v1::FlushInFlight& flush = *tier.add_flushing();
  flush.set_attempt(2);
  flush.set_step(910);
  flush.set_ranks_done(3);
  flush.set_world_size(8);
  flush.set_since_unix_ms(kNow - 2000);
  tier.set_waiting(true);
  tier.set_waiting_attempt(2);
  tier.set_waiting_step(912);
  v1::StepInFlight& saving = *job.add_in_flight();
  saving.set_attempt(2);
  saving.set_step(913);
  saving.set_ranks_sealed(1);
  saving.set_world_size(8);
  return sample;
}

TopSample TwoSecondsLater() {
  TopSample sample = Sample();
  v1::DaemonStatus& daemon = *sample.status.mutable_daemon();
  daemon.set_uptime_ms(62'000);
  daemon.set_unix_ms(kNow + 2000);
  daemon.mutable_tiers(0)->set_bytes_written(30'000'000);
  sample.status.mutable_jobs(0)->mutable_tiers(0)->mutable_flushing(0)->set_ranks_done(6);
  return sample;
}

std::vector<std::string> LinesOf(const std::string& frame) {
  std::vector<std::string> lines = absl::StrSplit(frame, '\n');
  EXPECT_EQ(lines.back(), "");
  lines.pop_back();
  return lines;
}

TEST(Top, ShowsLossesLagsFlowsTiersAndNodesWithRatesOfTwoSamples) {
  const TopSample before = Sample();
  EXPECT_EQ(
      RenderTop(MakeTop(TwoSecondsLater(), &before), {}),
      "ckptd 0.1.0 on node-a, up 1 min 2 s, 2 connections, 2024-05-01 12:00:02 UTC\n"
      "\n"
      "JOBS, and the training that is lost if one of these dies now\n"
      "  JOB    PHASE     ALIVE  NEWEST STEP  PROCESS  REBOOT        NODE  DOMAIN  ALL NODES\n"
      "  llama  running  7 of 8          912    0.2 s    12 s  EVERYTHING       ?          ?\n"
      "\n"
      "LAG behind the newest committed step\n"
      "  JOB    TIER  NEWEST STEP   AGE  STEPS BEHIND  PROBLEM\n"
      "  llama  nvme          900  12 s            12\n"
      "\n"
      "ON THE WAY\n"
      "  JOB    STEP  WHAT         RANKS DONE  RANKS/S  FOR\n"
      "  llama   913  being saved      1 of 8      0.0    -\n"
      "  llama   910  to nvme          6 of 8      1.5  4 s\n"
      "\n"
      "TIERS of node-a\n"
      "  TIER                    USED       OF    ROOM  WRITTEN   READ  BACKLOG            "
      "     PROBLEM\n"
      "  memory  [##--------]   1 GiB    4 GiB   3 GiB        -      -  -\n"
      "  nvme    [####------]  40 GiB  100 GiB  50 GiB  10 MB/s  0 B/s  2 shards, 1 step "
      "waits\n"
      "\n"
      "NODES: 1 of 1 within reach\n"
      "  NODE    MEMORY  STATE     HOSTS\n"
      "  node-a   4 GiB  this one  1 job\n");
}

TEST(Top, HasNoRatesWithoutASampleBeforeNorOverARestart) {
  EXPECT_FALSE(MakeTop(Sample(), nullptr).tiers[1].written_bytes_per_s);
  const TopSample before = Sample();
  TopSample restarted = TwoSecondsLater();
  restarted.status.mutable_daemon()->set_pid(4712);
  EXPECT_EQ(MakeTop(restarted, &before).interval_ms, 0);
  EXPECT_FALSE(MakeTop(restarted, &before).tiers[1].written_bytes_per_s);
  // The same pid again, in another container: it began to count anew.
  TopSample younger = TwoSecondsLater();
  younger.status.mutable_daemon()->set_uptime_ms(500);
  EXPECT_FALSE(MakeTop(younger, &before).tiers[1].written_bytes_per_s);
  TopSample counts_less = TwoSecondsLater();
  counts_less.status.mutable_daemon()->mutable_tiers(0)->set_bytes_written(1);
  EXPECT_FALSE(MakeTop(counts_less, &before).tiers[1].written_bytes_per_s);
  EXPECT_TRUE(MakeTop(counts_less, &before).tiers[1].read_bytes_per_s);
}

TEST(Top, ComparesFlowsOfTheSameStepOfTheSameJobOnly) {
  const TopSample before = Sample();
  TopSample now = TwoSecondsLater();
  v1::FlushInFlight& flush = *now.status.mutable_jobs(0)->mutable_tiers(0)->mutable_flushing(0);
  flush.set_step(911);
  EXPECT_FALSE(MakeTop(now, &before).flows[1].ranks_per_s);
  flush.set_step(910);
  EXPECT_DOUBLE_EQ(MakeTop(now, &before).flows[1].ranks_per_s.value_or(-1), 1.5);
  now.status.mutable_jobs(0)->set_uuid("another job of that name");
  EXPECT_FALSE(MakeTop(now, &before).flows[1].ranks_per_s);
}

TEST(Top, LagIsNotSaidOfAnotherAttempt) {
  TopSample sample = Sample();
  sample.status.mutable_jobs(0)->mutable_tiers(0)->set_attempt(1);
  EXPECT_FALSE(MakeTop(sample, nullptr).lags[0].steps_behind);
}

TEST(Top, RestoresAndPrefetchesAreFlows) {
  TopSample sample = Sample();
  v1::JobStatus& job = *sample.status.mutable_jobs(0);
  job.clear_in_flight();
  job.clear_tiers();
  job.mutable_restore()->set_attempt(1);
  job.mutable_restore()->set_step(900);
  job.mutable_restore()->set_ranks_done(4);
  job.mutable_prefetch()->set_ranks(8);
  job.mutable_prefetch()->set_in_memory(2);
  const TopModel model = MakeTop(sample, nullptr);
  ASSERT_EQ(model.flows.size(), 2u);
  EXPECT_EQ(model.flows[0].what, "restored");
  EXPECT_EQ(model.flows[0].ranks_done, 4u);
  EXPECT_EQ(model.flows[0].ranks, 8u);
  EXPECT_EQ(model.flows[1].what, "prefetched");
  job.mutable_prefetch()->set_in_memory(8);
  EXPECT_EQ(MakeTop(sample, nullptr).flows.size(), 1u);
}

TEST(Top, SaysWhatIsWrongFirst) {
  TopSample sample = Sample();
  v1::NodeStatus& away = *sample.nodes.add_nodes();
  away.set_name("node-b");
  away.set_unreachable("refused");
  sample.nodes.set_problem("etcd does not answer");
  sample.status.mutable_daemon()->add_problems("older");
  sample.status.mutable_daemon()->add_problems("newer");
  v1::TierStatus& nvme = *sample.status.mutable_daemon()->mutable_tiers(0);
  nvme.set_healthy(false);
  nvme.set_stalled(1);
  nvme.set_state("no progress for 60 s");
  v1::TierProgress& tier = *sample.status.mutable_jobs(0)->mutable_tiers(0);
  tier.mutable_flushing(0)->set_stalled(true);
  tier.set_problem("no space left");
  const std::string frame = RenderTop(MakeTop(sample, nullptr), {});
  EXPECT_THAT(frame, HasSubstr("\nproblem: membership: etcd does not answer\n"));
  EXPECT_THAT(frame, HasSubstr("\nproblem: newer (and 1 more: ckptctl status)\n"));
  EXPECT_THAT(frame, HasSubstr("  1 write gets nowhere: no progress for 60 s\n"));
  EXPECT_THAT(frame, HasSubstr("  no space left\n"));
  EXPECT_THAT(frame, HasSubstr("NODES: 1 of 2 within reach\n"));
  EXPECT_LT(frame.find("OUT OF REACH: refused"), frame.find("this one"));
  EXPECT_LT(frame.find("STALLED"), frame.find("being saved"));
}

TEST(Top, SaysThatTheDaemonIsAwayAboveWhatItSaidLast) {
  TopModel model = MakeTop(Sample(), nullptr);
  model.away = "nobody\x1b[2J listens";
  model.away_ms = 5000;
  const std::vector<std::string> lines = LinesOf(RenderTop(model, {}));
  EXPECT_EQ(lines[1], "AWAY for 5 s, below is what it said last: nobody\\x1b[2J listens");
  EXPECT_EQ(TopToJson(model)["away"], "nobody\x1b[2J listens");
  EXPECT_EQ(TopToJson(model)["away_ms"], 5000);
}

TEST(Top, NothingOfANameReachesTheTerminalRaw) {
  const std::string evil = "a\x1b[31m\nb\xff\xe2\x80\xae";
  TopSample sample = Sample();
  sample.status.mutable_daemon()->set_node_name(evil);
  sample.status.mutable_daemon()->set_version(evil);
  sample.status.mutable_daemon()->add_problems(evil);
  sample.status.mutable_daemon()->mutable_tiers(0)->set_tier(evil);
  sample.status.mutable_daemon()->mutable_tiers(0)->set_state(evil);
  sample.nodes.mutable_nodes(0)->set_name(evil);
  sample.nodes.set_problem(evil);
  v1::NodeStatus& other = *sample.nodes.add_nodes();
  other.set_unreachable(evil);
  v1::JobStatus& job = *sample.status.mutable_jobs(0);
  job.set_name(evil);
  job.mutable_tiers(0)->set_tier(evil);
  job.mutable_tiers(0)->set_problem(evil);
  TopModel model = MakeTop(sample, nullptr);
  model.away = evil;
  const std::string frame = RenderTop(model, {});
  EXPECT_THAT(frame, Not(HasSubstr("\x1b")));
  EXPECT_THAT(frame, Not(HasSubstr("\xff")));
  EXPECT_THAT(frame, Not(HasSubstr("\xe2\x80\xae")));
  EXPECT_THAT(frame, Not(HasSubstr("\nb")));
  EXPECT_THAT(frame, HasSubstr("a\\x1b[31m\\nb\\xff\\u{202e}"));
}

TEST(Top, FitsEveryScreenAndCountsWhatIsLeftOut) {
  TopSample sample = Sample();
  for (int i = 0; i < 30; ++i) {
    v1::JobStatus& job = *sample.status.add_jobs();
    job = sample.status.jobs(0);
    job.set_name(absl::StrCat("job-", i, "-漢字"));
    v1::NodeStatus& node = *sample.nodes.add_nodes();
    node.set_name(absl::StrCat("node-", i));
  }
  const TopModel model = MakeTop(sample, nullptr);
  for (size_t rows = 1; rows < 120; ++rows) {
    for (const size_t columns : {1u, 2u, 7u, 20u, 40u, 80u, 132u}) {
      const std::vector<std::string> lines =
          LinesOf(RenderTop(model, {.columns = columns, .rows = rows}));
      EXPECT_LE(lines.size(), rows);
      for (const std::string& line : lines) {
        EXPECT_LE(DisplayWidth(line), columns) << line;
      }
    }
  }
  // 31 jobs, lags and nodes, and 62 flows: all are shown or counted.
  const std::string frame = RenderTop(model, {.columns = 200, .rows = 50});
  const std::vector<std::string> lines = LinesOf(frame);
  int shown = 0;
  int more = 0;
  for (const std::string& line : lines) {
    int number = 0;
    shown += line.rfind("  llama ", 0) == 0 || line.rfind("  job-", 0) == 0 ? 1 : 0;
    shown += line.rfind("  node-", 0) == 0 ? 1 : 0;
    if (std::sscanf(line.c_str(), "  %d more", &number) == 1) {
      more += number;
    }
  }
  EXPECT_EQ(shown + more, 31 + 31 + 62 + 31);
  EXPECT_GT(shown, 20);
  // The first line, and of five sections a gap, a title, titles of columns, and what is left out:
  // 21 lines, of which 9 are shown.
  EXPECT_EQ(LinesOf(RenderTop(model, {.columns = 200, .rows = 10})).back(), "12 more lines");
}

TEST(Top, IsAsciiWhereTheLocaleIsNot) {
  TopSample sample = Sample();
  sample.nodes.mutable_nodes(0)->set_name("n\xc3\xb6" + std::string(300, 'x'));
  const TopModel model = MakeTop(sample, nullptr);
  const std::string frame = RenderTop(model, {.columns = 60, .rows = 40, .utf8 = false});
  EXPECT_TRUE(std::all_of(frame.begin(), frame.end(), [](char c) { return c > 0; })) << frame;
  EXPECT_THAT(frame, HasSubstr("n\\u{f6}xxx"));
  EXPECT_THAT(RenderTop(model, {.columns = 60}), HasSubstr("n\xc3\xb6xxx"));
  EXPECT_THAT(RenderTop(model, {.columns = 60}), HasSubstr("…\n"));
}

TEST(Top, JsonHasNumbersAndNullWhereThereIsNothingToCompareWith) {
  const TopSample before = Sample();
  const auto first = TopToJson(MakeTop(before, nullptr));
  EXPECT_TRUE(first["tiers"][1]["written_bytes_per_s"].is_null());
  EXPECT_TRUE(first["away"].is_null());
  const auto json = TopToJson(MakeTop(TwoSecondsLater(), &before));
  EXPECT_EQ(json["tiers"][1]["written_bytes_per_s"], 10'000'000.0);
  EXPECT_EQ(json["tiers"][1]["backlog_shards"], 2);
  EXPECT_EQ(json["flows"][1]["what"], "nvme");
  EXPECT_EQ(json["flows"][1]["ranks_per_s"], 1.5);
  EXPECT_EQ(json["lags"][0]["steps_behind"], 12);
  EXPECT_EQ(json["jobs"][0]["phase"], "running");
  EXPECT_EQ(json["jobs"][0]["losses"][2]["kind"], "node");
  EXPECT_EQ(json["jobs"][0]["losses"][2]["everything"], true);
  EXPECT_EQ(json["nodes"][0]["name"], "node-a");
}

TEST(TopTerminal, DrawsOverWhatIsThereAndDoesNotScroll) {
  EXPECT_EQ(Redraw("a\nb\n"), "\x1b[Ha\x1b[K\r\nb\x1b[K\x1b[J");
}

TEST(TopTerminal, KnowsTheLocaleAndWhatCanBeDrawnOn) {
  EXPECT_TRUE(LocaleIsUtf8(nullptr, nullptr, "en_US.UTF-8"));
  EXPECT_TRUE(LocaleIsUtf8("", "C.utf8", "C"));
  EXPECT_FALSE(LocaleIsUtf8("C", nullptr, "en_US.UTF-8"));
  EXPECT_FALSE(LocaleIsUtf8(nullptr, nullptr, nullptr));
  EXPECT_TRUE(CanDraw("xterm-256color"));
  EXPECT_FALSE(CanDraw("dumb"));
  EXPECT_FALSE(CanDraw(""));
  EXPECT_FALSE(CanDraw(nullptr));
}

TEST(Text, IsCutAtItsColumns) {
  EXPECT_EQ(CutText("abc", 3, "…"), "abc");
  EXPECT_EQ(CutText("abcd", 3, "…"), "ab…");
  EXPECT_EQ(CutText("漢字漢", 4, "…"), "漢…");  // each takes two
  EXPECT_EQ(CutText("abcd", 0, "…"), "");
  EXPECT_EQ(AsciiText("aé漢\\x1b"), "a\\u{e9}\\u{6f22}\\x1b");
}

}  // namespace
}  // namespace holdfast
