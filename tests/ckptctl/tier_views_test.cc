// What people see of the tiers.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "ckptctl/views.h"
#include "holdfast/v1/admin.pb.h"

namespace holdfast {
namespace {

constexpr uint64_t kGiB = uint64_t{1} << 30;
constexpr int64_t kNow = 1'714'564'800'000;  // 2024-05-01 12:00:00 UTC

void AddProtection(v1::JobStatus& job, v1::Protection::FailureKind kind, uint64_t step,
                   const std::string& from) {
  v1::Protection& p = *job.add_protection();
  p.set_kind(kind);
  p.set_any(step != 0);
  p.set_attempt(3);
  p.set_step(step);
  p.set_age_ms(12'400);
  p.set_from(from);
}

v1::GetStatusReply StatusWithTiers() {
  v1::GetStatusReply reply;
  reply.mutable_daemon()->set_unix_ms(kNow);
  v1::TierStatus& nvme = *reply.mutable_daemon()->add_tiers();
  nvme.set_tier("nvme");
  nvme.add_dirs("/mnt/nvme0");
  nvme.add_dirs("/mnt/nvme1");
  nvme.set_state("ok");
  nvme.set_healthy(true);
  nvme.set_bytes_max(100 * kGiB);
  nvme.set_bytes_used(40 * kGiB);
  nvme.set_bytes_recyclable(4 * kGiB);
  nvme.set_bytes_free(60 * kGiB);
  nvme.set_engine("io_uring");
  nvme.set_flushes(2);
  nvme.add_notes("/mnt/nvme0: files cannot be given to their jobs' users here: not permitted");
  nvme.add_notes("/mnt/nv\x1bme1: it lies on a tmpfs");
  v1::TierStatus& remote = *reply.mutable_daemon()->add_tiers();
  remote.set_tier("remote");
  remote.add_dirs("/mnt/lustre");
  remote.set_state("does not answer since 11:58");
  remote.set_bytes_used(7 * kGiB);
  remote.set_bytes_free(1024 * kGiB);
  remote.set_flushes(1);
  remote.set_stalled(1);
  remote.set_bandwidth_bytes_per_s_max(kGiB);
  v1::JobStatus& job = *reply.add_jobs();
  job.set_name("llama");
  AddProtection(job, v1::Protection::FAILURE_KIND_PROCESS, 912, "memory+nvme");
  AddProtection(job, v1::Protection::FAILURE_KIND_REBOOT, 900, "nvme");
  v1::TierProgress& in_nvme = *job.add_tiers();
  in_nvme.set_tier("nvme");
  in_nvme.set_any(true);
  in_nvme.set_attempt(3);
  in_nvme.set_step(900);
  in_nvme.set_age_ms(5'000);
  in_nvme.set_checkpoints(2);
  in_nvme.set_bytes(3 * kGiB);
  v1::FlushInFlight& flush = *in_nvme.add_flushing();
  flush.set_attempt(3);
  flush.set_step(910);
  flush.set_ranks_done(1);
  flush.set_world_size(2);
  flush.set_since_unix_ms(kNow - 2'000);
  in_nvme.set_waiting(true);
  in_nvme.set_waiting_attempt(3);
  in_nvme.set_waiting_step(912);
  v1::TierProgress& in_remote = *job.add_tiers();
  in_remote.set_tier("remote");
  v1::FlushInFlight& stalled = *in_remote.add_flushing();
  stalled.set_attempt(3);
  stalled.set_step(900);
  stalled.set_world_size(2);
  stalled.set_stalled(true);
  in_remote.set_problem("no progress for 60 s: write '/mnt/lustre/…'\x1b[2J");
  v1::TierPolicy& policy = *job.mutable_policy()->mutable_nvme();
  policy.set_every_steps(10);
  policy.set_keep_last(2);
  v1::TierPolicy& remote_policy = *job.mutable_policy()->mutable_remote();
  remote_policy.set_every_steps(100);
  remote_policy.set_every_ms(600'000);
  remote_policy.set_keep_last(3);
  remote_policy.set_keep_every_steps(1000);
  remote_policy.set_bytes_max(10 * kGiB);
  return reply;
}

TEST(RenderStatus, NothingLentIsNotEverything) {
  v1::GetStatusReply reply;
  v1::TierStatus& lent = *reply.mutable_daemon()->add_tiers();
  lent.set_tier("peer");
  EXPECT_NE(RenderStatus(reply).find("peer   lends nothing to other nodes"), std::string::npos)
      << RenderStatus(reply);
  EXPECT_EQ(RenderStatus(reply).find("no budget"), std::string::npos);
  lent.set_bytes_max(kGiB);
  EXPECT_NE(RenderStatus(reply).find("0 B of 1 GiB lent to other"), std::string::npos)
      << RenderStatus(reply);
}

TEST(RenderStatus, ShowsTheTiers) {
  const std::string text = RenderStatus(StatusWithTiers());
  const size_t tiers = text.find("nvme   [");
  const size_t job = text.find("\njob llama");
  ASSERT_NE(tiers, std::string::npos) << text;
  EXPECT_EQ(
      text.substr(tiers, job - tiers),
      "nvme   [########------------] 40 GiB of 100 GiB (4 GiB to be recycled); /mnt/nvme0, "
      "/mnt/nvme1 have 60 GiB left; io_uring; 2 writes under way\n"
      "nvme   note: /mnt/nvme0: files cannot be given to their jobs' users here: not permitted\n"
      "nvme   note: /mnt/nv\\x1bme1: it lies on a tmpfs\n"
      "remote 7 GiB, no budget; /mnt/lustre has 1 TiB left; 1 write under way; at most 1 "
      "GiB/s\n"
      "problem: remote: 1 of its writes gets nowhere (does not answer since 11:58); saves and "
      "other tiers go on\n");
  const size_t lines = text.find("  if a process dies");
  ASSERT_NE(lines, std::string::npos) << text;
  EXPECT_EQ(
      text.substr(lines),
      "  if a process dies    you are back at step 912 (attempt 3), 12 s old, from "
      "memory+nvme\n"
      "  if the node reboots  you are back at step 900 (attempt 3), 12 s old, from nvme\n"
      "  in nvme              step 900 (attempt 3), 5 s old, 12 steps behind the newest; holds "
      "2 checkpoints, 3 GiB\n"
      "                       being written: step 910 (attempt 3), 1 of 2 ranks done, for 2 s\n"
      "                       next: step 912 (attempt 3) waits for its turn\n"
      "  in remote            no step of the line yet\n"
      "                       STALLED: step 900 (attempt 3), 0 of 2 ranks done\n"
      "                       PROBLEM: no progress for 60 s: write "
      "'/mnt/lustre/…'\\x1b[2J\n"
      "  policy               nvme every 10 steps, keeps the last 2; remote every 100 steps or "
      "every 10 min, keeps the last 3 and for ever those that 1000 divides, at most 10 GiB\n");
}

TEST(RenderStatus, SaysWhyNothingSurvivesAReboot) {
  v1::GetStatusReply reply;
  AddProtection(*reply.add_jobs(), v1::Protection::FAILURE_KIND_REBOOT, 0, "");
  EXPECT_NE(RenderStatus(reply).find("if the node reboots  nothing would survive: no copy is kept "
                                     "on its drives, nor outside this node\n"),
            std::string::npos);
}

TEST(RenderStatus, ATierThatIsNotWellSaysWhy) {
  v1::GetStatusReply reply;
  v1::TierStatus& tier = *reply.mutable_daemon()->add_tiers();
  tier.set_tier("nvme");
  tier.set_state("read-only\x1b");
  EXPECT_NE(RenderStatus(reply).find("problem: nvme: read-only\\x1b\n"), std::string::npos);
}

TEST(RenderStatus, TiersThatAreOffOrBusySayNoMore) {
  v1::GetStatusReply reply;
  v1::TierStatus& tier = *reply.mutable_daemon()->add_tiers();
  tier.set_tier("nvme");
  tier.set_state("scanning");
  tier.set_healthy(true);
  v1::JobStatus& job = *reply.add_jobs();
  job.add_tiers()->set_tier("nvme");
  job.mutable_policy();
  const std::string text = RenderStatus(reply);
  EXPECT_NE(text.find("nvme   scanning\n"), std::string::npos) << text;
  EXPECT_NE(text.find("  policy   nvme never\n"), std::string::npos) << text;
}

TEST(RenderTiers, SayWhatIsLent) {
  v1::GetStatusReply reply;
  v1::TierStatus& tier = *reply.mutable_daemon()->add_tiers();
  tier.set_tier("peer");
  tier.set_healthy(true);
  tier.set_bytes_used(20 << 20);
  tier.set_bytes_max(200 << 20);
  tier.set_bytes_free(uint64_t{70} << 30);
  tier.set_engine("threads");
  const std::string text = RenderStatus(reply);
  EXPECT_NE(text.find("20 MiB of 200 MiB lent to other nodes' replicas\n"), std::string::npos)
      << text;
}

TEST(RenderTiers, SayWhatReplicasSave) {
  v1::GetStatusReply reply;
  v1::TierStatus& tier = *reply.mutable_daemon()->add_tiers();
  tier.set_tier("remote");
  tier.set_healthy(true);
  v1::JobStatus& job = *reply.add_jobs();
  job.add_tiers()->set_tier("remote");
  job.mutable_policy()->mutable_remote()->set_every_steps(1);
  job.mutable_policy()->mutable_remote()->set_keep_last(3);
  job.mutable_policy()->mutable_remote()->set_share_replicas(true);
  std::string text = RenderStatus(reply);
  EXPECT_EQ(text.find("replicas"), std::string::npos) << text;
  EXPECT_EQ(text.find("file whole"), std::string::npos) << text;
  tier.set_bytes_shared(3 * kGiB);
  job.mutable_policy()->mutable_remote()->set_share_replicas(false);
  text = RenderStatus(reply);
  EXPECT_NE(text.find("(3 GiB not written, as replicas have them)"), std::string::npos) << text;
  EXPECT_NE(text.find("keeps the last 3, each rank's file whole"), std::string::npos) << text;
}

TEST(RenderTiers, SayWhatCompressionSaves) {
  v1::GetStatusReply reply;
  v1::TierStatus& tier = *reply.mutable_daemon()->add_tiers();
  tier.set_tier("remote");
  tier.set_healthy(true);
  v1::JobStatus& job = *reply.add_jobs();
  job.add_tiers()->set_tier("remote");
  v1::TierPolicy& policy = *job.mutable_policy()->mutable_remote();
  policy.set_every_steps(1);
  policy.set_keep_last(3);
  policy.set_compression(v1::TierPolicy::COMPRESSION_NONE);
  policy.set_compression_level(5);
  std::string text = RenderStatus(reply);
  EXPECT_EQ(text.find("compress"), std::string::npos) << text;
  tier.set_bytes_compressed_away(3 * kGiB);
  policy.set_compression(v1::TierPolicy::COMPRESSION_ZSTD);
  text = RenderStatus(reply);
  EXPECT_NE(text.find("(3 GiB saved by compression)"), std::string::npos) << text;
  EXPECT_NE(text.find("keeps the last 3, compressed (zstd, level 5)"), std::string::npos) << text;
}

void AddCopy(v1::WhereReply& reply, uint64_t step, uint32_t rank, const std::string& tier,
             const std::string& state, const std::string& location) {
  v1::ShardCopy& copy = *reply.add_copies();
  copy.set_attempt(1);
  copy.set_step(step);
  copy.set_rank(rank);
  copy.set_world_size(2);
  copy.set_tier(tier);
  copy.set_state(state);
  copy.set_location(location);
  copy.set_bytes(kGiB);
  copy.set_node(tier == "remote" ? "" : "node-a");
}

TEST(RenderWhere, CopiesByStep) {
  v1::WhereReply reply;
  AddCopy(reply, 9, 0, "nvme", "good", "/mnt/nvme0/llama/9-a1/0.safetensors");
  AddCopy(reply, 10, 0, "memory", "good", "slot-000001");
  AddCopy(reply, 10, 1, "memory", "bad: block at 4096\x1b", "slot-000002");
  AddCopy(reply, 10, 1, "remote", "good", "/mnt/lustre/x");
  EXPECT_EQ(RenderWhere("llama", reply),
            "job llama\n"
            "\n"
            "step 9 (attempt 1): good copies in nvme 1 of 2\n"
            "  RANK  TIER  STATE   SIZE  NODE    LIES IN\n"
            "     0  nvme  good   1 GiB  node-a  /mnt/nvme0/llama/9-a1/0.safetensors\n"
            "\n"
            "step 10 (attempt 1): good copies in memory 1 of 2, remote 1 of 2\n"
            "  RANK  TIER    STATE   SIZE  NODE    LIES IN\n"
            "     0  memory  good   1 GiB  node-a  slot-000001\n"
            "     1  memory  bad    1 GiB  node-a  slot-000002\n"
            "     1  remote  good   1 GiB  any     /mnt/lustre/x\n"
            "  rank 1, memory: bad: block at 4096\\x1b\n");
  EXPECT_EQ(RenderWhere("llama", {}), "job llama has no copies of it anywhere\n");
}

TEST(RenderWhere, AFileThatLeavesSlicesOutSaysWhereTheyAre) {
  v1::WhereReply reply;
  AddCopy(reply, 9, 0, "remote", "good", "/mnt/lustre/a");
  AddCopy(reply, 9, 1, "remote", "good", "/mnt/lustre/b");
  reply.mutable_copies(1)->set_bytes(kGiB / 4);
  reply.mutable_copies(1)->set_shard_bytes(kGiB);
  reply.mutable_copies(1)->set_rest_in("ranks 0, 2\x1b");
  EXPECT_EQ(RenderWhere("llama", reply),
            "job llama\n"
            "\n"
            "step 9 (attempt 1): good copies in remote 2 of 2\n"
            "  RANK  TIER    STATE              SIZE  NODE  LIES IN\n"
            "     0  remote  good              1 GiB  any   /mnt/lustre/a\n"
            "     1  remote  good   256 MiB of 1 GiB  any   /mnt/lustre/b\n"
            "  rank 1, remote: the rest is in the files of ranks 0, 2\\x1b\n");
}

TEST(RenderWhere, CutsLongListsButCountsAll) {
  v1::WhereReply reply;
  for (uint32_t rank = 0; rank < 300; ++rank) {
    AddCopy(reply, 10, rank, "nvme", "good", "x");
    reply.mutable_copies(static_cast<int>(rank))->set_world_size(300);
  }
  const std::string text = RenderWhere("llama", reply);
  EXPECT_NE(text.find("good copies in nvme 300 of 300"), std::string::npos) << text;
  EXPECT_NE(text.find("… and 100 more copies: --json has them all\n"), std::string::npos) << text;
}

TEST(RenderExplain, TheChoiceFirst) {
  v1::ExplainReply reply;
  reply.set_next_restore("step 10 of attempt 2: memory for 2 ranks");
  v1::StepExplanation& good = *reply.add_steps();
  good.set_attempt(2);
  good.set_step(10);
  good.set_restorable(true);
  good.set_on_line(true);
  good.add_reasons("whole: memory for 2 ranks");
  v1::StepExplanation& bad = *reply.add_steps();
  bad.set_attempt(1);
  bad.set_step(12);
  bad.add_reasons("cannot be restored: \x1b");
  EXPECT_EQ(RenderExplain("llama", reply),
            "the next restore of job llama: step 10 of attempt 2: memory for 2 ranks\n"
            "\n"
            "step 10 (attempt 2): restorable\n"
            "  whole: memory for 2 ranks\n"
            "\n"
            "step 12 (attempt 1), on another branch: NOT restorable\n"
            "  cannot be restored: \\x1b\n");
  EXPECT_EQ(RenderExplain("llama", {}), "job llama has no checkpoints\n");
  for (int i = 0; i < 30; ++i) {
    reply.add_steps()->set_step(i);
  }
  EXPECT_NE(RenderExplain("llama", reply).find("… and 12 older: --step N explains one"),
            std::string::npos);
}

TEST(RenderGarbage, SaysWhatGoesAndWhyTheRestStays) {
  v1::CollectGarbageReply reply;
  const auto add = [&](uint64_t step, bool goes, const std::string& why) {
    v1::RetentionVerdict& v = *reply.add_verdicts();
    v.set_job("llama");
    v.set_tier("nvme");
    v.set_attempt(1);
    v.set_step(step);
    v.set_goes(goes);
    v.set_why(why);
    v.set_bytes(kGiB);
  };
  add(12, false, "newest step on the line in nvme");
  add(10, true, "older than the 1 that keep_last keeps");
  reply.set_bytes_to_free(kGiB);
  reply.add_unknown_files("/mnt/nvme0/core.\x1b");
  EXPECT_EQ(RenderGarbage(reply, true),
            "JOB    TIER  STEP  ATTEMPT   SIZE         WHY\n"
            "llama  nvme    12        1  1 GiB  stays  newest step on the line in nvme\n"
            "llama  nvme    10        1  1 GiB  GOES   older than the 1 that keep_last keeps\n"
            "\n"
            "1 checkpoint would go: 1 GiB less in use (nothing was removed: --dry-run)\n"
            "\n"
            "files that are not Holdfast's, left alone:\n"
            "  /mnt/nvme0/core.\\x1b\n");
  EXPECT_NE(RenderGarbage(reply, false).find("\n1 checkpoint goes: 1 GiB less in use\n"),
            std::string::npos);
  EXPECT_EQ(RenderGarbage({}, false), "nothing goes\n");
}

TEST(RenderRebuild, CountsAndProblems) {
  v1::RebuildReply reply;
  reply.set_jobs(1);
  reply.set_checkpoints(2);
  reply.set_shards(4);
  EXPECT_EQ(RenderRebuild(reply),
            "found 4 copies of 2 checkpoints of 1 job; the catalog is written anew\n");
  for (int i = 0; i < 25; ++i) {
    reply.add_problems("torn record");
  }
  EXPECT_NE(RenderRebuild(reply).find("\nproblems:\n  torn record\n"), std::string::npos);
  EXPECT_NE(RenderRebuild(reply).find("… and 5 more: --json has them all"), std::string::npos);
}

void AddStage(v1::StepTimeline& step, const std::string& stage, int64_t rank, int64_t begin_ms,
              int64_t end_ms, const std::string& outcome = "done") {
  v1::StageTime& time = *step.add_stages();
  time.set_stage(stage);
  time.set_rank(rank);
  time.set_begin_unix_us((kNow + begin_ms) * 1000);
  time.set_end_unix_us(end_ms < 0 ? 0 : (kNow + end_ms) * 1000);
  time.set_outcome(end_ms < 0 ? "" : outcome);
  time.set_bytes(1000);
}

v1::TimelineReply SomeTimeline() {
  v1::TimelineReply reply;
  v1::StepTimeline& first = *reply.add_steps();
  first.set_attempt(1);
  first.set_step(900);
  first.set_bytes(kGiB);
  first.set_world_size(2);
  first.set_fate("committed");
  AddStage(first, "write", -1, 0, 250);
  AddStage(first, "commit", -1, 260, 260);
  AddStage(first, "nvme", 0, 300, 1300);
  AddStage(first, "nvme", 1, 300, 2300);
  AddStage(first, "remote", 0, 2300, 2400, "failed: no space left");
  v1::StepTimeline& second = *reply.add_steps();
  second.set_attempt(1);
  second.set_step(901);
  second.set_fate("in flight");
  AddStage(second, "write", -1, 1000, 1200);
  AddStage(second, "nvme", 1, 1250, -1);
  AddStage(second, "nvme", 0, 1300, 1400);
  return reply;
}

TEST(RenderTimeline, OneLineAStepAndWhatFailed) {
  EXPECT_EQ(
      RenderTimeline("llama", SomeTimeline()),
      "job llama, oldest first; a stage's time is from its first rank's begin to its last "
      "rank's end, +: after the step began\n"
      "  STEP  ATTEMPT   SIZE  BEGAN                     write   commit  nvme   remote  FATE\n"
      "   900        1  1 GiB  2024-05-01 12:00:00 UTC  250 ms  +260 ms   2 s  100 ms!  "
      "committed\n"
      "   901        1    0 B  2024-05-01 12:00:01 UTC  200 ms        -  open        -  in "
      "flight\n"
      "\n"
      "  ! step 900 (attempt 1) remote, rank 0: failed: no space left\n");
  EXPECT_EQ(RenderTimeline("llama", {}), "job llama: no save is remembered\n");
}

// What a viewer makes of it: for each named track what lies on it.
struct Track {
  std::string stage;
  std::string name;
  std::vector<nlohmann::json> events;
};
std::vector<Track> TracksOf(const nlohmann::json& trace) {
  std::map<int, std::string> stages;
  std::map<std::pair<int, int>, Track> tracks;
  for (const auto& event : trace["traceEvents"]) {
    const std::pair<int, int> id{event["pid"], event["tid"]};
    if (event["ph"] != "M") {
      tracks[id].events.push_back(event);
    } else if (event["name"] == "process_name") {
      stages[id.first] = event["args"]["name"];
    } else {
      EXPECT_EQ(event["name"], "thread_name");
      tracks[id].name = event["args"]["name"];
    }
  }
  std::vector<Track> all;
  for (auto& [id, track] : tracks) {
    track.stage = stages[id.first];
    all.push_back(std::move(track));
  }
  return all;
}

TEST(TimelineTrace, IsWhatAViewerReads) {
  const auto trace = nlohmann::json::parse(TimelineTrace("llama", SomeTimeline()), nullptr, false);
  ASSERT_FALSE(trace.is_discarded());
  EXPECT_EQ(trace["displayTimeUnit"], "ms");
  EXPECT_EQ(trace["otherData"]["job"], "llama");
  size_t durations = 0;
  std::vector<std::string> names;
  for (const Track& track : TracksOf(trace)) {
    names.push_back(track.stage + "/" + track.name);
    int64_t until = 0;
    for (const auto& event : track.events) {
      // Nothing on a track may overlap: a viewer would show it wrong.
      const int64_t begin = event["ts"];
      EXPECT_GE(begin, until) << names.back();
      EXPECT_EQ(event["cat"], track.stage);
      if (event["ph"] == "X") {
        ++durations;
        until = begin + event["dur"].get<int64_t>();
      } else if (event["ph"] == "B") {
        until = INT64_MAX;
      } else {
        EXPECT_EQ(event["ph"], "i");
      }
    }
  }
  const std::vector<std::string> expected{"write/all ranks", "commit/all ranks", "nvme/rank 0",
                                          "nvme/rank 1",     "nvme/rank 1 (2)",  "remote/rank 0"};
  EXPECT_EQ(names, expected) << trace.dump(1);
  EXPECT_EQ(durations, 6u);
  // Real times.
  const auto& events = trace["traceEvents"];
  const auto flush = std::find_if(events.begin(), events.end(), [](const auto& e) {
    return e["ph"] == "X" && e["cat"] == "nvme" && e["dur"] == 2'000'000;
  });
  ASSERT_NE(flush, events.end());
  EXPECT_EQ((*flush)["ts"], (kNow + 300) * 1000);
  EXPECT_EQ((*flush)["name"], "step 900");
  EXPECT_EQ((*flush)["args"]["step"], 900);
  EXPECT_EQ((*flush)["args"]["bytes"], 1000);
  EXPECT_EQ((*flush)["args"]["fate"], "committed");
}

TEST(TimelineTrace, NothingIsATraceToo) {
  const auto trace = nlohmann::json::parse(TimelineTrace("llama", {}), nullptr, false);
  EXPECT_TRUE(trace["traceEvents"].is_array());
}

}  // namespace
}  // namespace holdfast
