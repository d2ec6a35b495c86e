// Whether the memory of checkpoints stays where it is: judged of made-up machines.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "ckptctl/doctor.h"
#include "tests/base/temporary_directory.h"

namespace holdfast {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr uint64_t kGiB = uint64_t{1} << 30;

Facts Node(uint64_t bytes_max = 100 * kGiB) {
  Facts facts;
  facts.limits.of = "ckptd (pid 4711)";
  facts.daemon.memory_bytes_max = bytes_max;
  facts.tmpfs = {{.path = "/dev/shm", .mount_point = "/dev/shm"}};
  facts.memory.nodes = {{.id = 0, .bytes_total = 256 * kGiB, .shared_bytes = kGiB}};
  return facts;
}

Finding Find(const Facts& facts, const std::string& check) {
  std::vector<Finding> findings;
  EvaluateMemory(facts, findings);
  const auto it = std::find_if(findings.begin(), findings.end(),
                               [&](const Finding& f) { return f.check == check; });
  return it != findings.end() ? *it : Finding{check, Verdict::kBroken, "(no such finding)", ""};
}

TEST(EvaluateMemory, TheGroupsLimitHoldsTheSlotsAndTheDaemonItself) {
  Facts facts = Node();
  EXPECT_EQ(Find(facts, "memory limit").verdict, Verdict::kOk);
  facts.memory.limit = {"/system.slice/ckptd.service (cgroup v2)", 100 * kGiB - 1};
  const Finding broken = Find(facts, "memory limit");
  EXPECT_EQ(broken.verdict, Verdict::kBroken);
  EXPECT_THAT(broken.text, AllOf(HasSubstr("/system.slice/ckptd.service (cgroup v2)"),
                                 HasSubstr("it would be killed")));
  EXPECT_THAT(broken.mend, HasSubstr("MemoryMax=infinity"));
  facts.memory.limit.bytes = 102 * kGiB - 1;
  EXPECT_EQ(Find(facts, "memory limit").verdict, Verdict::kSlow);
  facts.memory.limit.bytes = 102 * kGiB;
  EXPECT_EQ(Find(facts, "memory limit").verdict, Verdict::kOk);
  EXPECT_EQ(Find(facts, "memory limit").mend, "");
  EXPECT_EQ(Find(facts, "memory throttle").text, "(no such finding)");
  facts.memory.high = {"/system.slice (cgroup v2)", 100 * kGiB - 1};
  EXPECT_EQ(Find(facts, "memory throttle").verdict, Verdict::kSlow);
  facts.memory.high.bytes = 100 * kGiB;
  EXPECT_EQ(Find(facts, "memory throttle").text, "(no such finding)");
  // Of no daemon nothing can be said.
  facts.daemon.memory_bytes_max = 0;
  EXPECT_EQ(Find(facts, "memory limit").text, "(no such finding)");
}

TEST(EvaluateMemory, SwapConcernsNobodyWhereItCannotTakeSlots) {
  Facts facts = Node();
  EXPECT_EQ(Find(facts, "swap").verdict, Verdict::kOk);
  facts.memory.swap_bytes = 8 * kGiB;
  facts.memory.swappiness = 60;
  const Finding slow = Find(facts, "swap");
  EXPECT_EQ(slow.verdict, Verdict::kSlow);
  EXPECT_THAT(slow.text, HasSubstr("swap is on (8 GiB, vm.swappiness 60)"));
  EXPECT_THAT(slow.mend, AllOf(HasSubstr("MemorySwapMax=0"), Not(HasSubstr("noswap"))));
  facts.noswap_known = true;
  EXPECT_THAT(Find(facts, "swap").mend, HasSubstr("mounted with noswap"));
  facts.memory.mount_noswap = true;
  EXPECT_EQ(Find(facts, "swap").verdict, Verdict::kOk);
  facts.memory.mount_noswap = false;
  facts.memory.group_never_swaps = true;
  EXPECT_EQ(Find(facts, "swap").verdict, Verdict::kOk);
  EXPECT_EQ(Find(facts, "swap").mend, "");
}

TEST(EvaluateMemory, SlotsOnSeveralNodesAreToBePlaced) {
  Facts facts = Node();
  EXPECT_EQ(Find(facts, "numa").text, "one node: all memory is as near");
  facts.memory.nodes = {{.id = 0, .bytes_total = 128 * kGiB, .shared_bytes = 40 * kGiB},
                        {.id = 1, .bytes_total = 64 * kGiB, .shared_bytes = 0}};
  const Finding slow = Find(facts, "numa");
  EXPECT_EQ(slow.verdict, Verdict::kSlow);
  EXPECT_THAT(slow.text, AllOf(HasSubstr("node 0: 40 GiB of 128 GiB, node 1: 0 B of 64 GiB"),
                               HasSubstr("node 1 is smaller (64 GiB) than memory.bytes_max")));
  EXPECT_THAT(slow.mend, HasSubstr("sudo mount -o remount,mpol=interleave /dev/shm"));
  facts.daemon.memory_bytes_max = 64 * kGiB;
  EXPECT_THAT(Find(facts, "numa").text, Not(HasSubstr("is smaller")));
  facts.memory.mpol = "prefer:1";
  EXPECT_EQ(Find(facts, "numa").verdict, Verdict::kSlow);
  facts.memory.mpol = "interleave:0-1";
  EXPECT_EQ(Find(facts, "numa").verdict, Verdict::kOk);
  facts.memory.mpol = "bind=static:1";
  EXPECT_EQ(Find(facts, "numa").verdict, Verdict::kOk);
  facts.daemon.memory_bytes_max = 64 * kGiB + 1;
  EXPECT_EQ(Find(facts, "numa").verdict, Verdict::kBroken);
  facts.memory.mpol = "bind:0,1";
  EXPECT_EQ(Find(facts, "numa").verdict, Verdict::kOk);
  facts.memory.nodes.clear();  // a kernel without NUMA
  EXPECT_EQ(Find(facts, "numa").text, "(no such finding)");
}

// A machine's /proc and /sys, as files.
class MadeUp {
 public:
  void Write(const std::string& path, const std::string& text) {
    const std::filesystem::path file = dir_.path() + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  MemoryFacts Collect(int32_t pid = 42, const std::string& dir = "/dev/shm/holdfast") {
    return CollectMemory(dir_.path(), pid, dir);
  }

 private:
  TemporaryDirectory dir_;
};

TEST(CollectMemory, TheTightestLimitOfVersion2Counts) {
  MadeUp m;
  m.Write("/proc/42/cgroup", "0::/a.slice/b.service\n");
  const std::string fs = "/sys/fs/cgroup";
  m.Write(fs + "/a.slice/b.service/memory.max", "max\n");
  m.Write(fs + "/a.slice/b.service/memory.high", "9000\n");
  m.Write(fs + "/a.slice/b.service/memory.swap.max", "max\n");
  m.Write(fs + "/a.slice/memory.max", "4096\n");
  MemoryFacts facts = m.Collect();
  EXPECT_EQ(facts.limit.bytes, 4096u);
  EXPECT_EQ(facts.limit.group, "/a.slice (cgroup v2)");
  EXPECT_EQ(facts.high.bytes, 9000u);
  EXPECT_FALSE(facts.group_never_swaps);
  m.Write(fs + "/a.slice/memory.swap.max", "0\n");
  EXPECT_TRUE(m.Collect().group_never_swaps);
}

TEST(CollectMemory, Version1HasAHierarchyOfItsOwn) {
  MadeUp m;
  m.Write("/proc/42/cgroup", "5:cpu,cpuacct:/x\n4:memory:/docker/abc\n1:name=systemd:/\n");
  const std::string fs = "/sys/fs/cgroup/memory";
  m.Write(fs + "/memory.limit_in_bytes", "9223372036854771712\n");
  m.Write(fs + "/docker/memory.limit_in_bytes", "8192\n");
  m.Write(fs + "/docker/abc/memory.limit_in_bytes", "16384\n");
  EXPECT_EQ(m.Collect().limit.bytes, 8192u);
  EXPECT_EQ(m.Collect().limit.group, "/docker (cgroup v1)");
  // No such process (any more): of whoever asks.
  m.Write("/proc/self/cgroup", "4:memory:/\n");
  EXPECT_EQ(m.Collect(43).limit.bytes, std::nullopt);
}

TEST(CollectMemory, SwapAndHowTheTmpfsIsMounted) {
  MadeUp m;
  EXPECT_EQ(m.Collect().swap_bytes, 0u);
  m.Write("/proc/swaps",
          "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n"
          "/dev/sda2  partition\t1024\t\t0\t\t-2\n/swap file 2048 0 -3\n");
  m.Write("/proc/sys/vm/swappiness", "10\n");
  m.Write("/proc/self/mountinfo",
          "31 30 0:27 / /dev/shm rw - tmpfs tmpfs rw,noswap,mpol=interleave:0-1\n"
          "32 30 0:28 / /mnt rw - tmpfs tmpfs rw\n");
  const MemoryFacts facts = m.Collect();
  EXPECT_EQ(facts.swap_bytes, 3u << 20);
  EXPECT_EQ(facts.swappiness, 10u);
  EXPECT_TRUE(facts.mount_noswap);
  EXPECT_EQ(facts.mpol, "interleave:0-1");
  EXPECT_FALSE(m.Collect(42, "/mnt/slots").mount_noswap);
  EXPECT_TRUE(m.Collect(42, "").mount_noswap) << "ckptd's default is in /dev/shm";
}

TEST(CollectMemory, NodesWithMemoryThatTheDaemonMayUse) {
  MadeUp m;
  EXPECT_THAT(m.Collect().nodes, IsEmpty());
  const std::string base = "/sys/devices/system/node";
  m.Write(base + "/has_memory", "0-1,3\n");
  for (const int id : {0, 1, 3}) {
    m.Write(base + "/node" + std::to_string(id) + "/meminfo",
            "\nNode " + std::to_string(id) + " MemTotal:       1024 kB\nNode " +
                std::to_string(id) + " ShmemHugePages:   9 kB\nNode " + std::to_string(id) +
                " Shmem:             " + std::to_string(id) + " kB\n");
  }
  ASSERT_EQ(m.Collect().nodes.size(), 3u);
  EXPECT_EQ(m.Collect().nodes[2].id, 3u);
  EXPECT_EQ(m.Collect().nodes[2].bytes_total, 1u << 20);
  EXPECT_EQ(m.Collect().nodes[2].shared_bytes, 3u << 10);
  m.Write("/proc/42/status", "Name:\tckptd\nMems_allowed:\t2\nMems_allowed_list:\t1\n");
  m.Write("/proc/42/cgroup", "0::/\n");
  ASSERT_EQ(m.Collect().nodes.size(), 1u);
  EXPECT_EQ(m.Collect().nodes[0].id, 1u);
}

TEST(ParseNumberList, IsBounded) {
  EXPECT_THAT(ParseNumberList("0-2,5\n"), ElementsAre(0, 1, 2, 5));
  EXPECT_THAT(ParseNumberList(""), IsEmpty());
  EXPECT_THAT(ParseNumberList("x,-,7"), ElementsAre(7));
  EXPECT_EQ(ParseNumberList("0-4294967295").size(), 1024u);
}

}  // namespace
}  // namespace holdfast
