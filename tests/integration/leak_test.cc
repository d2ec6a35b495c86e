// Ten thousand saves and restores leave no memory, descriptor, slot or byte of tmpfs behind.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "tests/integration/harness.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;

uint64_t ResidentKiB(pid_t pid) {
  const std::string status = ReadText("/proc/" + std::to_string(pid) + "/status");
  return NumberAfter(status, "VmRSS:").value_or(0);
}

struct Usage {
  uint64_t daemon_kib = 0;
  size_t daemon_fds = 0;
  uint64_t rank_kib = 0;
  size_t rank_fds = 0;
  uint64_t slots = 0;
  uint64_t memory_bytes = 0;
  size_t files = 0;
};

// Without the catalog's: RocksDB opens and closes its files as it likes, up to a limit of its own.
size_t OpenDescriptors(pid_t pid, const std::string& catalog) {
  size_t count = 0;
  const std::string directory = "/proc/" + std::to_string(pid) + "/fd/";
  for (const std::string& number : FilesIn(directory, "")) {
    std::error_code gone;
    const std::string target = std::filesystem::read_symlink(directory + number, gone);
    count += StartsWith(target, catalog) ? 0 : 1;
  }
  return count;
}

Usage Measure(Node& node, Rank& rank) {
  const auto fds = [&](pid_t pid) { return OpenDescriptors(pid, node.state_dir() + "/catalog"); };
  Usage usage;
  usage.daemon_kib = ResidentKiB(node.pid());
  usage.daemon_fds = fds(node.pid());
  usage.rank_kib = ResidentKiB(rank.child().pid());
  usage.rank_fds = fds(rank.child().pid());
  usage.files = FilesIn(node.memory_dir(), "").size();
  // Last: it comes over a connection that is still closing when the call returns.
  const auto status = node.Status();
  usage.slots = status->daemon().slots();
  usage.memory_bytes = status->daemon().memory_bytes_used();
  return usage;
}

TEST(Leak, TenThousandSavesAndRestoresLeaveNothingBehind) {
  constexpr int kCycles = 10'000;
  constexpr int kWarmUp = 1'000;
  Node node(NodeOptions{.config = ""});
  ASSERT_TRUE(node.Start());
  ASSERT_TRUE(node.Status().has_value());  // the first question makes what serves this user
  Rank rank(node, {.bytes = 64 << 10});
  ASSERT_EQ(rank.Do("open"), "ok attempt=1");
  ASSERT_THAT(rank.Do("restore"), HasSubstr("NOTHING_TO_RESTORE"));
  Usage before;
  for (int cycle = 1; cycle <= kCycles; ++cycle) {
    ASSERT_EQ(rank.Do("save " + std::to_string(cycle)), "ok sealed") << cycle;
    ASSERT_EQ(rank.Do("attach"), "ok step=" + std::to_string(cycle)) << cycle;
    ASSERT_EQ(rank.Do("detach"), "ok");
    const std::string restored = rank.Do("restore");
    ASSERT_EQ(NumberAfter(restored, "step="), static_cast<uint64_t>(cycle)) << restored;
    if (cycle == kWarmUp) {
      before = Measure(node, rank);
    }
  }
  const Usage after = Measure(node, rank);
#if !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)  // they keep freed memory for a while
  EXPECT_LE(after.daemon_kib, before.daemon_kib + 8 * 1024);
  EXPECT_LE(after.rank_kib, before.rank_kib + 4 * 1024);
  EXPECT_LE(after.daemon_kib, 100u * 1024) << "design.md, section 8";
#endif
  EXPECT_EQ(after.daemon_fds, before.daemon_fds);
  EXPECT_EQ(after.rank_fds, before.rank_fds);
  EXPECT_EQ(after.slots, before.slots);
  EXPECT_EQ(after.memory_bytes, before.memory_bytes);
  EXPECT_EQ(after.files, before.files);
  RecordProperty("daemon_kib", static_cast<int>(after.daemon_kib));
}

}  // namespace
}  // namespace holdfast
