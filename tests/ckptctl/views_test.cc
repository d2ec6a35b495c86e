#include "ckptctl/views.h"

#include <gtest/gtest.h>

#include "holdfast/v1/admin.pb.h"

namespace holdfast {
namespace {

constexpr uint64_t kGiB = uint64_t{1} << 30;
constexpr int64_t kNow = 1'714'564'800'000;  // 2024-05-01 12:00:00 UTC
constexpr int64_t kMinute = 60'000;

v1::DaemonStatus SomeDaemon() {
  v1::DaemonStatus d;
  d.set_node_name("node-a");
  d.set_version("0.1.0");
  d.set_pid(4711);
  d.set_uptime_ms(192 * kMinute);
  d.set_unix_ms(kNow);
  d.set_memory_bytes_max(24 * kGiB);
  d.set_memory_bytes_used(12 * kGiB);
  d.set_memory_bytes_free_in_tmpfs(30 * kGiB);
  d.set_slots(6);
  d.set_slots_free(1);
  d.set_slots_quarantined(2);
  d.set_connections(2);
  d.set_memory_dir("/dev/shm/holdfast");
  return d;
}

void AddProtection(v1::JobStatus& job, v1::Protection::FailureKind kind, uint64_t step) {
  v1::Protection& p = *job.add_protection();
  p.set_kind(kind);
  p.set_any(step != 0);
  p.set_attempt(3);
  p.set_step(step);
  p.set_age_ms(12'400);
  p.set_from("memory");
}

TEST(RenderNodes, ShowsWhereTheyAreWhatTheyHostAndWhoIsOutOfReach) {
  v1::GetNodesReply reply;
  v1::NodeStatus& a = *reply.add_nodes();
  a.set_name("node-a");
  a.set_address("10.0.0.1:9465");
  a.set_capacity_bytes(24 * kGiB);
  a.set_version("0.1.0");
  a.set_here(true);
  a.set_reachable(true);
  a.add_jobs("llama-7b");
  a.add_jobs("gpt\nPROBLEM: none");
  v1::NodeStatus::Label& rack = *a.add_labels();
  rack.set_name("rack");
  rack.set_value("r1");
  v1::NodeStatus& b = *reply.add_nodes();
  b.set_name("node-b");
  b.set_address("10.0.0.2:9465");
  b.set_unreachable("refused");
  reply.set_problem("etcd does not answer");
  EXPECT_EQ(
      RenderNodes(reply),
      "NODE    ADDRESS        MEMORY  VERSION  LABELS   HOSTS                         STATE\n"
      "node-a  10.0.0.1:9465  24 GiB  0.1.0    rack=r1  llama-7b, gpt\\nPROBLEM: none  this one\n"
      "node-b  10.0.0.2:9465       ?                                                  "
      "OUT OF REACH: refused\n"
      "\nPROBLEM: etcd does not answer\n");
}

TEST(RenderJobs, ShowsOneLineForEachJobAndWhatIsWrong) {
  v1::GetStatusReply reply;
  *reply.mutable_daemon() = SomeDaemon();
  reply.mutable_daemon()->add_problems("the jobs of node-c are not shown: it did not answer");
  v1::JobStatus& well = *reply.add_jobs();
  well.set_name("gpt");
  well.set_host("node-b");
  well.set_attempt(3);
  well.set_phase(v1::JobStatus::ATTEMPT_PHASE_RUNNING);
  well.set_world_size(8);
  well.set_ranks_alive(8);
  well.set_nodes(2);
  well.add_node_names("node-a");
  well.add_node_names("node-b");
  AddProtection(well, v1::Protection::FAILURE_KIND_PROCESS, 900);
  v1::TierProgress& remote = *well.add_tiers();
  remote.set_tier("remote");
  remote.set_any(true);
  remote.set_step(800);
  remote.set_age_ms(5 * kMinute + 20'000);
  v1::JobStatus& ill = *reply.add_jobs();
  ill.set_name("llama\x1b[2J");
  ill.set_host("node-a");
  ill.set_attempt(12);
  ill.set_phase(v1::JobStatus::ATTEMPT_PHASE_RUNNING);
  ill.set_world_size(4096);
  ill.set_ranks_alive(4095);
  ill.set_nodes(512);
  ill.add_node_names("node-a");
  v1::StepLoss& loss = *ill.add_losses();
  loss.set_step(41);
  loss.set_unix_ms(kNow - 6'000);
  v1::TierProgress& full = *ill.add_tiers();
  full.set_tier("nvme");
  full.set_problem("no space left");
  v1::JobStatus& done = *reply.add_jobs();
  done.set_name("old");
  done.set_host("node-a");
  done.set_attempt(1);
  done.set_phase(v1::JobStatus::ATTEMPT_PHASE_ENDED);
  done.set_world_size(1);
  done.set_nodes(1);
  done.add_node_names("node-a");
  EXPECT_EQ(
      RenderJobs(reply),
      "JOB           HOST    ATTEMPT  PHASE           ALIVE  ON              NEWEST STEP  IN "
      "REMOTE        LAST LOST    PROBLEM\n"
      "gpt           node-b        3  running        8 of 8  node-a, node-b  900, 12 s    800, 5 "
      "min 20 s\n"
      "llama\\x1b[2J  node-a       12  running  4095 of 4096  512 nodes       none         none    "
      "         41, 6 s ago  1 rank is gone (and 1 more)\n"
      "old           node-a        1  ended          0 of 1  node-a          none         none\n"
      "\n"
      "3 jobs: 2 running, 1 ended; 1 with a problem (ckptctl status JOB)\n"
      "problem: the jobs of node-c are not shown: it did not answer\n");
}

TEST(RenderJobs, SaysThatThereAreNoneAndCutsTheProblemsOfADaemon) {
  v1::GetStatusReply reply;
  EXPECT_EQ(RenderJobs(reply),
            "no jobs of yours: none has joined since their copies were last removed\n");
  for (int i = 0; i < 10; ++i) {
    reply.mutable_daemon()->add_problems("p" + std::to_string(i));
  }
  EXPECT_EQ(RenderJobs(reply),
            "no jobs of yours are shown, which may be for the problems that are named\n"
            "problem: p2\nproblem: p3\nproblem: p4\nproblem: p5\nproblem: p6\nproblem: p7\n"
            "problem: p8\nproblem: p9\nand 2 more: ckptctl status\n");
}

TEST(RenderStatus, ShowsWhatSurvivesWhatWasGivenUpAndWhatHappened) {
  v1::GetStatusReply reply;
  *reply.mutable_daemon() = SomeDaemon();
  reply.mutable_daemon()->add_problems("slot-000003.record is torn: left alone");
  v1::JobStatus& job = *reply.add_jobs();
  job.set_name("llama-7b");
  job.set_attempt(3);
  job.set_phase(v1::JobStatus::ATTEMPT_PHASE_RUNNING);
  job.set_world_size(2);
  job.set_ranks_alive(2);
  job.set_bytes_held(9 * kGiB);
  AddProtection(job, v1::Protection::FAILURE_KIND_PROCESS, 900);
  AddProtection(job, v1::Protection::FAILURE_KIND_NODE, 0);
  AddProtection(job, v1::Protection::FAILURE_KIND_DOMAIN, 0);
  AddProtection(job, v1::Protection::FAILURE_KIND_ALL_NODES, 0);
  job.set_restore_point("attempt 2 step 800");
  job.mutable_prefetch()->set_text("all ranks have it in memory");
  job.mutable_restore()->set_text("step 7 of attempt 1: 1 of 2 ranks have loaded it");
  v1::StepInFlight& saving = *job.add_in_flight();
  saving.set_attempt(3);
  saving.set_step(901);
  saving.set_ranks_sealed(1);
  saving.set_world_size(2);
  v1::StepLoss& loss = *job.add_losses();
  loss.set_attempt(3);
  loss.set_step(899);
  loss.set_why("shed: rank 1 needed a slot for step 900");
  loss.set_unix_ms(kNow - 61'000);
  v1::Event& event = *job.add_events();
  event.set_unix_ms(kNow - 12'000);
  event.set_text("step 900 committed");
  v1::Event& newest = *job.add_events();
  newest.set_unix_ms(kNow);
  newest.set_text("restore point set");
  v1::StepLoss& older = *job.add_losses();
  older.set_attempt(3);
  older.set_step(898);
  older.set_why("step 898 of attempt 3 abandoned: rank 0 (pid 4711) ended");
  EXPECT_EQ(
      RenderStatus(reply),
      "ckptd 0.1.0 on node-a: pid 4711, up 3 h 12 min, 2 connections\n"
      "memory [##########----------] 12 GiB of 24 GiB in 6 slots (1 free, 2 quarantined); "
      "/dev/shm/holdfast has 30 "
      "GiB left\n"
      "problem: slot-000003.record is torn: left alone\n"
      "\n"
      "job llama-7b: attempt 3, running; 2 of 2 ranks alive; holds 9 GiB\n"
      "  if a process dies           you are back at step 900 (attempt 3), 12 s old, from memory\n"
      "  if the node dies            nothing would survive: no copy is kept outside this node\n"
      "  if its failure domain dies  nothing would survive: no copy is kept outside this failure "
      "domain\n"
      "  if all nodes die            nothing would survive: no copy is kept on storage that "
      "outlives the nodes\n"
      "  next restore                attempt 2 step 800 (set by hand; --clear of ckptctl restore "
      "takes it back)\n"
      "                              all ranks have it in memory\n"
      "  restores                    step 7 of attempt 1: 1 of 2 ranks have loaded it\n"
      "  being saved                 step 901 (attempt 3): 1 of 2 ranks sealed\n"
      "  given up                    step 899 (attempt 3), shed: rank 1 needed a slot for step "
      "900, 1 min 1 s ago\n"
      "                              step 898 of attempt 3 abandoned: rank 0 (pid 4711) ended\n"
      "  recently                    step 900 committed, 12 s ago\n"
      "                              restore point set, just now\n");
}

TEST(RenderStatus, KnowsADaemonWithoutJobs) {
  v1::GetStatusReply reply;
  EXPECT_EQ(
      RenderStatus(reply),
      "ckptd  on : pid 0, up 0 s, 0 connections\n"
      "memory [--------------------] 0 B of 0 B in 0 slots (0 free, 0 quarantined);  has 0 B left\n"
      "\n"
      "no jobs of yours: none has joined since their copies were last removed\n");
}

TEST(RenderStatus, CutsLongListsAndSaysSo) {
  v1::GetStatusReply reply;
  v1::JobStatus& job = *reply.add_jobs();
  for (uint64_t i = 0; i < 1000; ++i) {
    job.add_losses()->set_step(i);
    job.add_in_flight()->set_step(i);
    job.add_events()->set_text("event " + std::to_string(i));
  }
  const std::string text = RenderStatus(reply);
  EXPECT_NE(text.find("and 995 older: --json has them all"), std::string::npos) << text;
  EXPECT_NE(text.find("and 992 more: --json has them all"), std::string::npos) << text;
  // The newest losses come first, the newest events last.
  EXPECT_NE(text.find("given up    step 0 (attempt 0)\n"), std::string::npos) << text;
  EXPECT_EQ(text.find("event 991\n"), std::string::npos) << text;
  EXPECT_NE(text.find("event 999\n"), std::string::npos) << text;
}

TEST(RenderStatus, EscapesWhateverOthersNamed) {
  v1::GetStatusReply reply;
  reply.mutable_daemon()->set_node_name("\x1b[31mnode");
  reply.mutable_daemon()->set_version("\x1b[31m1");
  reply.mutable_daemon()->set_memory_dir("/dev/\x1b[31mshm");
  reply.mutable_daemon()->add_problems("p\x1b[31m");
  v1::JobStatus& job = *reply.add_jobs();
  job.set_name("j\x1b[31m");
  job.set_restore_point("r\x1b[31m");
  job.add_losses()->set_why("w\x1b[31m");
  job.add_events()->set_text("t\x1b[31m\nsecond line");
  v1::Protection& p = *job.add_protection();
  p.set_any(true);
  p.set_from("f\x1b[31m");
  const std::string text = RenderStatus(reply);
  EXPECT_EQ(text.find('\x1b'), std::string::npos) << text;
  EXPECT_NE(text.find("t\\x1b[31m\\nsecond line"), std::string::npos) << text;
}

TEST(RenderStatus, OfSeveralNodesTheOneIsNamedThatHoldsSoMuch) {
  v1::GetStatusReply reply;
  v1::JobStatus& job = *reply.add_jobs();
  job.set_bytes_held(9 * kGiB);
  job.set_host("gpu-1");
  job.set_nodes(2);
  EXPECT_NE(RenderStatus(reply).find("; holds 9 GiB on gpu-1\n"), std::string::npos);
  job.set_nodes(1);
  job.add_node_names("gpu-2");
  EXPECT_NE(RenderStatus(reply).find("; holds 9 GiB on gpu-1\n"), std::string::npos);
  job.set_node_names(0, "gpu-1");
  EXPECT_NE(RenderStatus(reply).find("; holds 9 GiB\n"), std::string::npos);
}

TEST(RenderStatus, NamesEveryPhase) {
  for (const auto& [phase, word] :
       {std::pair{v1::JobStatus::ATTEMPT_PHASE_GATHERING, "gathering: ranks are joining;"},
        std::pair{v1::JobStatus::ATTEMPT_PHASE_RESTORING, "restoring;"},
        std::pair{v1::JobStatus::ATTEMPT_PHASE_RUNNING, "running;"},
        std::pair{v1::JobStatus::ATTEMPT_PHASE_ENDED, "ended: none of its processes is alive;"},
        std::pair{v1::JobStatus::ATTEMPT_PHASE_UNSPECIFIED, "not begun: no process has joined;"},
        std::pair{static_cast<v1::JobStatus::AttemptPhase>(9), "phase 9;"}}) {
    v1::GetStatusReply reply;
    reply.add_jobs()->set_phase(phase);
    EXPECT_NE(RenderStatus(reply).find(word), std::string::npos) << word;
  }
}

void AddCheckpoint(v1::ListCheckpointsReply& reply, uint64_t attempt, uint64_t step,
                   v1::Checkpoint::State state, bool on_line) {
  v1::Checkpoint& c = *reply.add_checkpoints();
  c.set_attempt(attempt);
  c.set_step(step);
  c.set_state(state);
  c.set_on_line(on_line);
  c.set_shards(state == v1::Checkpoint::STATE_INCOMPLETE ? 1 : 2);
  c.set_world_size(2);
  c.set_bytes(3 * kGiB);
  c.set_unix_ms(kNow - static_cast<int64_t>(step) * 1000);
  c.add_tiers("memory");
}

TEST(RenderList, LineOfDescentFirst) {
  v1::ListCheckpointsReply reply;
  AddCheckpoint(reply, 3, 12, v1::Checkpoint::STATE_COMMITTED, true);
  AddCheckpoint(reply, 3, 11, v1::Checkpoint::STATE_INCOMPLETE, true);
  AddCheckpoint(reply, 2, 10, v1::Checkpoint::STATE_BAD, false);
  EXPECT_EQ(RenderList("llama", reply, kNow),
            "job llama, line of descent (the next restore takes the newest committed)\n"
            "  STEP  ATTEMPT  STATE       SHARDS   SIZE   AGE  IN\n"
            "    12        3  committed   2 of 2  3 GiB  12 s  memory\n"
            "    11        3  incomplete  1 of 2  3 GiB  11 s  memory\n"
            "\n"
            "other branches (never restored unless you name step and --attempt)\n"
            "  STEP  ATTEMPT  STATE  SHARDS   SIZE   AGE  IN\n"
            "    10        2  BAD    2 of 2  3 GiB  10 s  memory\n");
}

TEST(RenderList, OnlyOtherBranches) {
  v1::ListCheckpointsReply reply;
  AddCheckpoint(reply, 2, 10, v1::Checkpoint::STATE_COMMITTED, false);
  EXPECT_NE(RenderList("llama", reply, kNow).find("committed)\n  nothing\n\nother branches"),
            std::string::npos);
}

TEST(RenderList, Nothing) {
  EXPECT_EQ(RenderList("llama", v1::ListCheckpointsReply(), kNow),
            "job llama has no checkpoints\n");
}

TEST(RenderList, EscapesTiersAndKnowsNoTime) {
  v1::ListCheckpointsReply reply;
  v1::Checkpoint& c = *reply.add_checkpoints();
  c.set_on_line(true);
  c.add_tiers("\x1b[2J");
  const std::string text = RenderList("llama", reply, kNow);
  EXPECT_EQ(text.find('\x1b'), std::string::npos) << text;
  EXPECT_NE(text.find("  ?  \\x1b[2J\n"), std::string::npos) << text;
}

Slice Tensor(std::string name, DType dtype, std::vector<uint64_t> shape) {
  Slice slice;
  slice.name = std::move(name);
  slice.dtype = dtype;
  slice.global_shape = std::move(shape);
  return slice;
}

InspectedShard SomeShard() {
  Slice flat = Tensor("opt", DType::kF32, {10});
  flat.place = FlatPlace{.start = 4, .length = 4};
  Slice box = Tensor("wei\x1bght\n", DType::kBF16, {4, 4});
  box.place = BoxPlace{.offset = {2, 0}, .shape = {2, 4}};
  Slice json = Tensor("state", DType::kU8, {2});
  json.kind = SliceKind::kJson;
  Slice opaque = Tensor("rng", DType::kU8, {3});
  opaque.kind = SliceKind::kOpaque;
  opaque.codec = "torch";
  auto plan = PlanImage({flat, box, json, opaque, Tensor("empty", DType::kF32, {0})}, 1);
  InspectedShard shard;
  EXPECT_TRUE(plan.ok()) << plan.status();
  shard.layout = plan->layout;
  shard.location = "/dev/shm/holdfast/slot-000001";
  ShardRecord& r = shard.record;
  r.id.job = *JobUuid::FromString("1b4e28ba-2fa1-41d2-883f-0016d3cca427");
  r.id.attempt = 3;
  r.id.step = 900;
  r.id.rank = 1;
  r.job_name = "llama-7b";
  r.world_size = 2;
  r.generation = 7;
  r.image_bytes = plan->layout.image_bytes;
  r.header_bytes = plan->layout.header_bytes;
  r.layout_hash = LayoutHash{0xab};
  r.digests = {0x11, 0x22, 0x33, 0x44, 0x55};
  r.descent = {{3, {2, 800}}, {2, {1, 500}}, {1, {0, 0}}};
  r.sealed_unix_ms = kNow - 5 * kMinute;
  return shard;
}

TEST(RenderShard, ShowsPlacesAndDigests) {
  EXPECT_EQ(
      RenderShard(SomeShard(), 20, kNow),
      "job llama-7b, step 900 (attempt 3), rank 1 of 2\n"
      "  sealed    2024-05-01 11:55:00 UTC, 5 min ago\n"
      "  lies in   /dev/shm/holdfast/slot-000001, generation 7\n"
      "  image     4 KiB (4133 bytes, of which 4096 are header)\n"
      "  layout    5 slices of 3 tensors and 2 objects, hash ab000000000000000000000000000000\n"
      "  digests   CRC-64/XZ of 5 blocks, the header's first 0000000000000011\n"
      "  descent   attempt 3 <- attempt 2 at step 800 <- attempt 1 at step 500 <- from scratch\n"
      "  job uuid  1b4e28ba-2fa1-41d2-883f-0016d3cca427\n"
      "\n"
      "    AT  BYTES  DTYPE         SHAPE  PLACE      FIRST DIGEST      NAME\n"
      "  4096      0  F32           [0]    whole      (empty)           empty\n"
      "  4096     16  F32           [10]   flat 4:8   0000000000000022  opt\n"
      "  4112     16  BF16          [4,4]  [2:4,0:4]  0000000000000033  wei\\x1bght\\n\n"
      "  4128      3  opaque:torch  [3]    whole      0000000000000044  rng\n"
      "  4131      2  json          [2]    whole      0000000000000055  state\n");
}

TEST(RenderShard, CutsTheListWithAHint) {
  const std::string text = RenderShard(SomeShard(), 2, kNow);
  EXPECT_NE(text.find("  … and 3 more: --all-slices shows them\n"), std::string::npos) << text;
  EXPECT_EQ(text.find("BF16"), std::string::npos) << text;
}

TEST(RenderShard, SurvivesARecordWithoutDigests) {
  InspectedShard shard = SomeShard();
  shard.record.digests.clear();
  EXPECT_NE(RenderShard(shard, 20, kNow).find("the header's first (none)"), std::string::npos);
}

TEST(RenderShard, CutsLongDescents) {
  InspectedShard shard = SomeShard();
  shard.record.descent.assign(100, Descent{2, {1, 5}});
  EXPECT_NE(RenderShard(shard, 20, kNow).find(" <- … (92 more: --json has them all)\n"),
            std::string::npos);
}

TEST(RenderBadShard, NamesPlaceAndCause) {
  v1::BadShard bad;
  bad.set_attempt(3);
  bad.set_step(900);
  bad.set_rank(1);
  bad.set_location("/dev/shm/\x1bslot");
  bad.set_what("slice 'w': block at 4096");
  EXPECT_EQ(RenderBadShard(bad),
            "step 900 (attempt 3) rank 1, /dev/shm/\\x1bslot: slice 'w': block at 4096");
}

TEST(RenderVerifyProgress, TellsRateAndRest) {
  v1::VerifyProgress p;
  p.set_bytes_total(4'000'000'000);
  EXPECT_EQ(RenderVerifyProgress(p, 0), "[------------------------] 0%  0 B of 3.7 GiB");
  p.set_bytes_done(1'000'000'000);
  EXPECT_EQ(RenderVerifyProgress(p, 2000),
            "[######------------------] 25%  953.7 MiB of 3.7 GiB  500 MB/s  6 s left");
  p.set_bytes_done(UINT64_MAX);  // nonsense is shown without arithmetic on it
  EXPECT_EQ(RenderVerifyProgress(p, 2000), "[########################] 100%  16 EiB of 3.7 GiB");
  p.set_bytes_done(1);
  p.set_bytes_total(UINT64_MAX);
  EXPECT_EQ(RenderVerifyProgress(p, 1000), "[------------------------] 0%  1 B of 16 EiB  1 B/s");
}

}  // namespace
}  // namespace holdfast
