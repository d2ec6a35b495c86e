// Durable tiers end to end: what was saved comes back from the drives and from the remote
// directory, whatever else was lost, and what it costs stays bounded.
#include <errno.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <thread>

#include "holdfast/v1/state.pb.h"
#include "tests/integration/tier_fixture.h"
#include "tiers/image/frame.h"

namespace holdfast {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class TiersTest : public TierTest {
 protected:
  void SetUp() override { ASSERT_TRUE(node_.Start()); }
};

TEST_F(TiersTest, MemoryLostTheStepComesFromTheDrives) {
  Begin();
  for (const uint64_t step : {1, 2, 3}) {
    Save(step, "nvme");
  }
  PowerCut();
  ASSERT_TRUE(node_.Start());
  Launch();
  EXPECT_THAT(Restored(), Each(AllOf(HasSubstr("attempt=1 step=3 source=nvme why="),
                                     HasSubstr("memory copy absent"))));
  SaveEverywhere(4);  // and on it goes
  // What was fetched or saved since is in memory again.
  KillRanks();
  Launch();
  EXPECT_THAT(Restored(), Each(::testing::EndsWith("attempt=2 step=4")));
}

TEST_F(TiersTest, AnEmptyNodeTakesTheJobFromTheRemoteDirectory) {
  Begin();
  SaveEverywhere(1);
  SaveEverywhere(2);
  PowerCut();
  EmptyDrives();
  EmptyDirectory(node_.state_dir());
  ASSERT_TRUE(node_.Start());
  Launch();
  EXPECT_THAT(Restored(), Each(AllOf(HasSubstr("attempt=1 step=2 source=remote why="),
                                     HasSubstr("memory copy absent"), HasSubstr("nvme copy"))));
  SaveEverywhere(3);
  EXPECT_TRUE(std::filesystem::exists(Image("nvme", 3, 0, 2)));
  EXPECT_TRUE(std::filesystem::exists(Image("remote", 3, 1, 2)));
}

// If it is killed and hangs amid that, its threads may write on: who comes next reads here whose
// the slot is (found_state_test.cc).
TEST_F(TiersTest, WhileTheDaemonFillsASlotTheNoteNamesIt) {
  Begin();
  SaveEverywhere(1);
  PowerCut();
  EmptyDrives();
  ASSERT_TRUE(node_.Start("daemon.fetch.part_arrived:stop"));
  Launch();
  for (const auto& rank : ranks_) {
    rank->Send("restore");
  }
  siginfo_t info = {};
  ASSERT_EQ(::waitid(P_PID, static_cast<id_t>(node_.pid()), &info, WSTOPPED | WNOWAIT), 0);
  int filled = 0;
  for (const std::string& name : FilesIn(node_.memory_dir(), "")) {
    if (name.ends_with(".note")) {
      const std::string file = ReadText(node_.memory_dir() + "/" + name);
      const absl::StatusOr<std::string_view> body = DecodeFrame(FrameKind::kSlotNote, file);
      ASSERT_TRUE(body.ok()) << body.status();
      v1::SlotNote note;
      ASSERT_TRUE(note.ParseFromString(std::string(*body)));
      for (const v1::Reader& reader : note.readers()) {
        filled += reader.pid() == node_.pid() ? 1 : 0;
      }
    }
  }
  EXPECT_GE(filled, 1);
  ASSERT_EQ(::kill(node_.pid(), SIGCONT), 0);
  for (const auto& rank : ranks_) {
    EXPECT_THAT(rank->Answer(), HasSubstr("step=1 source=remote"));
  }
}

// The two ranks of a step do not wait for one drive.
TEST_F(TiersTest, ShardsAreSpreadOverTheDrives) {
  Begin();
  SaveEverywhere(1);
  SaveEverywhere(2);
  for (const uint64_t step : {1, 2}) {
    std::set<std::string> drives;
    for (const uint32_t rank : {0, 1}) {
      for (uint32_t drive = 0; drive < node_.drives(); ++drive) {
        if (Image("nvme", step, rank).rfind(node_.nvme_dir(drive) + "/", 0) == 0) {
          drives.insert(node_.nvme_dir(drive));
        }
      }
    }
    EXPECT_EQ(drives.size(), 2u) << "step " << step;
  }
}

// A mount that is away for a minute: nothing of it is taken for lost, nothing for removed.
TEST_F(TiersTest, ARemoteDirectoryThatIsAwayIsNeitherLostNorEmptied) {
  Begin("other");
  SaveEverywhere(5);
  KillRanks();
  Begin();
  SaveEverywhere(1);
  SaveEverywhere(2);
  PowerCut();
  EmptyDrives();
  ASSERT_TRUE(node_.Start());
  ASSERT_TRUE(node_.Until([](const v1::GetStatusReply& status) {
    return status.jobs_size() == 2 && status.jobs(0).tiers_size() == 2 &&
           status.jobs(0).tiers(1).any() && status.jobs(1).tiers_size() == 2 &&
           status.jobs(1).tiers(1).any();
  }));
  const std::string away = node_.remote_dir() + ".away";
  std::filesystem::rename(node_.remote_dir(), away);
  Launch();
  EXPECT_THAT(Restored(), Each(HasSubstr("error UNAVAILABLE")));
  EXPECT_THAT(Ctl(node_, {"verify", "other"}).exit_code, ::testing::Ne(0));
  const CtlAnswer removed = Ctl(node_, {"rm", "other", "--yes"});
  EXPECT_NE(removed.exit_code, 0);
  EXPECT_THAT(removed.errors + removed.text, HasSubstr("is not there"));
  EXPECT_FALSE(std::filesystem::exists(node_.remote_dir())) << "made by nobody";
  std::filesystem::rename(away, node_.remote_dir());
  ASSERT_TRUE(node_.Until([](const v1::GetStatusReply& status) {
    return status.jobs(0).tiers(1).any() && status.jobs(1).tiers(1).any();
  })) << "it is looked for again by itself";
  EXPECT_THAT(Restored(), Each(HasSubstr("attempt=1 step=2 source=remote")));
  EXPECT_EQ(Ctl(node_, {"rm", "other", "--yes"}).exit_code, 0);
  EXPECT_TRUE(
      node_.Until([this](const v1::GetStatusReply&) { return DurableFiles("/other").empty(); }));
}

// The kernel tells a daemon that has a file's lease when somebody opens the file (for real:
// tests/base/lease_test.cc). The daemon has it for too short a time to be met in it here.
TEST_F(TiersTest, AFileThatSomebodyOpensDuringItsLeaseEndsNobody) {
  Begin();
  ASSERT_EQ(::kill(node_.pid(), SIGIO), 0);
  SaveEverywhere(1);
  EXPECT_TRUE(node_.running());
}

TEST_F(TiersTest, WhatAKilledDaemonHadNotFlushedIsFlushedByTheNext) {
  Begin();
  Save(1, "remote");
  for (const uint64_t step : {2, 3, 4}) {
    Save(step, "");
  }
  node_.Kill();
  ASSERT_TRUE(node_.Start());
  EXPECT_TRUE(node_.Until([](const v1::GetStatusReply& status) {
    return status.jobs_size() == 1 && status.jobs(0).tiers_size() == 2 &&
           status.jobs(0).tiers(0).step() == 4 && status.jobs(0).tiers(1).step() == 4;
  }));
}

TEST_F(TiersTest, AJobsOwnPolicyHolds) {
  Begin("job",
        "nvme.every_steps=2 nvme.keep_last=1 remote.every_steps=4 remote.every_ms=0 "
        "remote.keep_every_steps=4 remote.keep_last=1");
  for (uint64_t step = 1; step <= 9; ++step) {
    Save(step, step % 4 == 0 ? "remote" : step % 2 == 0 ? "nvme" : "");
  }
  EXPECT_EQ(Image("nvme", 5, 0), "") << "an odd step is not the first of its two";
  EXPECT_NE(Image("nvme", 8, 0), "");
  EXPECT_TRUE(std::filesystem::exists(Image("remote", 4, 0)));
  EXPECT_TRUE(std::filesystem::exists(Image("remote", 8, 0)));
  EXPECT_FALSE(std::filesystem::exists(Image("remote", 6, 0)));
  EXPECT_TRUE(node_.Until([this](const v1::GetStatusReply&) {
    return Image("nvme", 2, 0).empty() && Image("nvme", 4, 0).empty() &&
           Image("nvme", 6, 1).empty();
  })) << "keep_last 1";
  const auto job = node_.Job("job");
  ASSERT_TRUE(job.has_value());
  EXPECT_EQ(job->policy().nvme().every_steps(), 2u);
  EXPECT_EQ(job->policy().nvme().keep_last(), 1u);
  EXPECT_EQ(job->policy().remote().keep_every_steps(), 4u);
}

TEST_F(TiersTest, RemovedJobsLeaveNothingInAnyTier) {
  Begin("other");
  SaveEverywhere(7);
  KillRanks();
  Begin();
  SaveEverywhere(1);
  SaveEverywhere(2);
  EXPECT_EQ(Ctl(node_, {"rm", "job", "--yes"}).exit_code, 4) << "its processes live";
  KillRanks();
  ASSERT_TRUE(node_.Until([](const v1::GetStatusReply& status) {
    return status.jobs(0).ranks_alive() == 0 && status.jobs(1).ranks_alive() == 0;
  }));
  const CtlAnswer removed = Ctl(node_, {"rm", "job", "--yes"});
  EXPECT_EQ(removed.exit_code, 0) << removed.errors;
  EXPECT_TRUE(node_.Until([this](const v1::GetStatusReply&) {
    return DurableFiles("/job").empty() && DurableFiles(".intent").empty();
  })) << ::testing::PrintToString(DurableFiles("/job"));
  PowerCut();
  ASSERT_TRUE(node_.Start());
  EXPECT_TRUE(node_.Until([](const v1::GetStatusReply& status) {
    return status.jobs_size() == 1 && status.jobs(0).name() == "other" &&
           status.jobs(0).tiers_size() == 2 && status.jobs(0).tiers(0).any();
  })) << "the other job is as it was";
  Begin();  // the name is free again
  SaveEverywhere(1);
}

// ---- Nothing grows ----

uint64_t ResidentKiB(pid_t pid) {
  return NumberAfter(ReadText("/proc/" + std::to_string(pid) + "/status"), "VmRSS:").value_or(0);
}

// Without the catalog's: RocksDB opens and closes its files as it likes.
size_t Descriptors(const Node& node) {
  size_t count = 0;
  const std::string directory = "/proc/" + std::to_string(node.pid()) + "/fd/";
  for (const std::string& number : FilesIn(directory, "")) {
    std::error_code gone;
    const std::string target = std::filesystem::read_symlink(directory + number, gone);
    count += StartsWith(target, node.state_dir() + "/catalog") ? 0 : 1;
  }
  return count;
}

size_t Threads(const Node& node) {
  return FilesIn("/proc/" + std::to_string(node.pid()) + "/task", "").size();
}

TEST_F(TiersTest, FiftyCyclesOfFlushAndRetentionLeaveNothingBehind) {
  Begin();
  const auto quiet = [this] {
    // Retention has caught up: three steps of two ranks in each tier, nothing under way.
    EXPECT_TRUE(node_.Until([this](const v1::GetStatusReply& status) {
      return status.jobs_size() == 1 && status.jobs(0).tiers_size() == 2 &&
             status.jobs(0).tiers(0).checkpoints() <= 3 &&
             status.jobs(0).tiers(1).checkpoints() <= 3 && DurableFiles(".intent").empty() &&
             DurableFiles(".tmp").empty() &&
             DurableFiles(".safetensors").size() + DurableFiles(".record").size() <= 24;
    })) << ::testing::PrintToString(DurableFiles("/"));
  };
  size_t descriptors = 0;
  size_t threads = 0;
  [[maybe_unused]] uint64_t resident = 0;  // (not judged under a sanitizer)
  uint64_t files = 0;
  for (uint64_t step = 1; step <= 60; ++step) {
    SaveEverywhere(step);
    if (step == 10) {
      quiet();
      descriptors = Descriptors(node_);
      threads = Threads(node_);
      resident = ResidentKiB(node_.pid());
      files = DurableFiles(".safetensors").size() + DurableFiles(".record").size();
    }
  }
  quiet();
  // One a cycle would be fifty; gRPC's own come and go.
  EXPECT_LE(Descriptors(node_), descriptors + 8);
  EXPECT_LE(Threads(node_), threads + 8);
  EXPECT_LE(DurableFiles(".safetensors").size() + DurableFiles(".record").size(), files);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  EXPECT_LE(ResidentKiB(node_.pid()), resident + 8 * 1024);
#endif
  // What is kept to be overwritten is bounded by what was ever there at a time.
  EXPECT_LE(DurableFiles("/.holdfast/pool/").size(), 16u);
}

// ---- A remote tier that is slower than the saves ----

NodeOptions SlowRemote() {
  NodeOptions options;
  options.drives = 1;
  options.remote = true;
  options.remote_options = "bandwidth_bytes_per_s_max: 1MiB, ";
  options.config =
      "policy: {nvme: {every_steps: 1, keep_last: 3}, "
      "remote: {every_steps: 1, every_ms: 0, keep_last: 100}}\n";
  return options;
}

class SlowTiersTest : public TierTest {
 protected:
  SlowTiersTest() : TierTest(SlowRemote()) {}
  void Unthrottle() {
    EXPECT_EQ(Ctl(node_, {"set", "remote.bandwidth_bytes_per_s_max=0"}).exit_code, 0);
  }
  std::set<uint64_t> InRemote() {
    std::set<uint64_t> steps;
    for (const v1::Checkpoint& checkpoint : node_.List("job")) {
      if (std::count(checkpoint.tiers().begin(), checkpoint.tiers().end(), "remote") > 0) {
        steps.insert(checkpoint.step());
      }
    }
    return steps;
  }
  // Steps of which the log says so, "step N" being before `what`.
  std::set<uint64_t> Logged(const std::string& what) {
    std::set<uint64_t> steps;
    std::istringstream log(node_.Log());
    for (std::string line; std::getline(log, line);) {
      if (line.find(what) != std::string::npos) {
        steps.insert(NumberAfter(line, "step ").value_or(0));
      }
    }
    return steps;
  }
};

TEST_F(SlowTiersTest, SavesOvertakeItNothingIsLostOrMixedAndWhatWasShedIsSaid) {
  ASSERT_TRUE(node_.Start());
  bytes_ = 2'000'000;  // seconds of that rate: no machine saves as slowly
  Begin();
  constexpr uint64_t kLast = 30;
  size_t at_once = 0;
  bool waited = false;
  bool shed_is_said = false;
  for (uint64_t step = 1; step <= kLast; ++step) {
    Save(step, "nvme");  // and on it goes
    const auto job = node_.Job("job");
    ASSERT_TRUE(job && job->tiers_size() == 2);
    at_once = std::max<size_t>(at_once, job->tiers(1).flushing_size());
    waited = waited || job->tiers(1).waiting();
    // (What is told has its place among the latest events, and gives way to others.)
    shed_is_said =
        shed_is_said || job->ShortDebugString().find("does not go to remote") != std::string::npos;
  }
  EXPECT_GE(at_once, 2u) << "flushes in flight";
  EXPECT_TRUE(waited);
  EXPECT_LT(InRemote().size(), kLast);
  EXPECT_TRUE(shed_is_said);
  // It keeps committing there, slow as it is; then as fast as it can.
  ASSERT_TRUE(node_.Until([&](const v1::GetStatusReply&) { return !InRemote().empty(); }));
  Unthrottle();
  ASSERT_TRUE(node_.Until([](const v1::GetStatusReply& status) {
    const v1::TierProgress& remote = status.jobs(0).tiers(1);
    return remote.step() == kLast && remote.flushing_size() == 0 && !remote.waiting();
  })) << Ctl(node_, {"status", "job"}).text;
  const std::set<uint64_t> there = InRemote();
  EXPECT_EQ(Logged("is whole in remote"), there);
  const std::set<uint64_t> shed = Logged("does not go to remote");
  EXPECT_FALSE(shed.empty());
  for (uint64_t step = 1; step <= kLast; ++step) {
    EXPECT_NE(there.count(step), shed.count(step)) << "step " << step << ": one or the other";
  }
  const CtlAnswer verified = Ctl(node_, {"verify", "job", "--all", "--tier", "remote", "--json"});
  EXPECT_EQ(verified.exit_code, 0) << verified.text << verified.errors;
  EXPECT_EQ(verified.parsed["jobs"][0]["shards_checked"], 2 * there.size()) << verified.text;
}

// ---- A daemon that still writes for an attempt that is over ----

std::map<std::string, std::string> FilesBelow(const std::string& directory) {
  std::map<std::string, std::string> files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(directory)) {
    if (entry.is_regular_file()) {
      files[entry.path()] = ReadText(entry.path());
    }
  }
  return files;
}

// On another node, which shares the remote directory and nothing else.
class SecondNode : public TierTest {
 public:
  SecondNode(const NodeOptions& options, uint64_t bytes) : TierTest(options) { bytes_ = bytes; }
  void TestBody() override {}
  using TierTest::EmptyDrives;
  using TierTest::Launch;
  using TierTest::node_;
  using TierTest::PowerCut;
  using TierTest::Restored;
  using TierTest::SaveEverywhere;
};

TEST_F(SlowTiersTest, WhatAnOldAttemptsDaemonStillPublishesIsOnNobodysLine) {
  ASSERT_TRUE(node_.Start());
  bytes_ = 8'000'000;
  Unthrottle();
  Begin();
  SaveEverywhere(1);
  KillRanks();
  Launch();
  ASSERT_THAT(Restored(), Each(HasSubstr("attempt=1 step=1")));
  // A step of many seconds at that rate, whose daemon falls silent on the way.
  EXPECT_EQ(Ctl(node_, {"set", "remote.bandwidth_bytes_per_s_max=1MiB"}).exit_code, 0);
  Save(2, "");
  const std::string late = node_.remote_dir() + "/job/2-a2";
  ASSERT_TRUE(node_.Until([&](const v1::GetStatusReply& status) {
    return status.jobs(0).tiers(1).flushing_size() > 0 && std::filesystem::exists(late);
  }));
  ASSERT_EQ(::kill(node_.pid(), SIGSTOP), 0);
  ASSERT_FALSE(std::filesystem::exists(late + "/MANIFEST"));
  // The job goes on elsewhere from what is whole.
  NodeOptions options = SlowRemote();
  options.remote = false;
  options.remote_options = "";
  options.remote_dir = node_.remote_dir();
  options.config += "node_name: elsewhere\n";
  SecondNode second(options, bytes_);
  ASSERT_TRUE(second.node_.Start());
  second.Launch();
  EXPECT_THAT(second.Restored(), Each(HasSubstr("attempt=1 step=1 source=remote")));
  second.SaveEverywhere(2);
  second.SaveEverywhere(3);
  const auto before = FilesBelow(node_.remote_dir() + "/job/3-a3");
  const auto before_2 = FilesBelow(node_.remote_dir() + "/job/2-a3");
  ASSERT_THAT(before, ::testing::Not(IsEmpty()));
  ASSERT_THAT(before_2, ::testing::Not(IsEmpty()));
  // The old one wakes up, and publishes what it had begun.
  ASSERT_EQ(::kill(node_.pid(), SIGCONT), 0);
  Unthrottle();
  ASSERT_TRUE(node_.Until(
      [&](const v1::GetStatusReply&) { return std::filesystem::exists(late + "/MANIFEST"); }));
  EXPECT_EQ(FilesBelow(node_.remote_dir() + "/job/3-a3"), before);
  EXPECT_EQ(FilesBelow(node_.remote_dir() + "/job/2-a3"), before_2);
  // It is there, whole, and nobody restores it: not before the line's own steps, nor after them.
  second.PowerCut();
  second.EmptyDrives();
  ASSERT_TRUE(second.node_.Start());
  second.Launch();
  EXPECT_THAT(second.Restored(), Each(HasSubstr("attempt=3 step=3 source=remote")));
  EXPECT_THAT(Ctl(second.node_, {"explain", "job"}).text,
              HasSubstr("step 2 (attempt 2), on another branch: restorable"));
  second.PowerCut();
  second.EmptyDrives();
  for (const char* step : {"3-a3", "2-a3"}) {
    std::filesystem::resize_file(
        node_.remote_dir() + "/job/" + step + "/shard-00000-of-00002.safetensors", 5000);
  }
  ASSERT_TRUE(second.node_.Start());
  second.Launch();
  EXPECT_THAT(second.Restored(), Each(HasSubstr("attempt=1 step=1 source=remote")));
}

// ---- Where io_uring is not allowed ----

// For this thread, and what it starts from now on.
bool ForbidRings() {
  sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog filter = {sizeof program / sizeof program[0], program};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

class NoRings : public TierTest {
 public:
  void TestBody() override {
    ASSERT_TRUE(ForbidRings());
    ASSERT_TRUE(node_.Start());
    Begin();
    SaveEverywhere(1);
    SaveEverywhere(2);
    EXPECT_THAT(Ctl(node_, {"status"}).text, HasSubstr("threads (io_uring_setup: "));
    EXPECT_THAT(Ctl(node_, {"doctor"}).text, AllOf(HasSubstr("io_uring"), HasSubstr("threads"),
                                                   HasSubstr("Operation not permitted")));
    PowerCut();
    ASSERT_TRUE(node_.Start());
    Launch();
    EXPECT_THAT(Restored(), Each(HasSubstr("attempt=1 step=2 source=nvme")));
    EXPECT_EQ(Ctl(node_, {"verify", "job", "--all"}).exit_code, 0);
    SaveEverywhere(3);
  }
};

TEST(NoRingsTest, FlushesAndRestoresGoByThreadsAndItIsSaid) {
  std::thread thread([] { NoRings().TestBody(); });  // a filter stays as long as its thread
  thread.join();
}

}  // namespace
}  // namespace holdfast
