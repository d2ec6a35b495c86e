#include "server/runtime/daemon_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "base/status.h"
#include "tests/base/temporary_directory.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;

class DaemonConfigTest : public ::testing::Test {
 protected:
  DaemonConfigTest() {
    flags_.memory_dir = memory_.Path("m");
    flags_.state_dir = dir_.Path("state");
    flags_.socket = dir_.Path("ckptd.sock");
    flags_.memory_bytes = "16MiB";
    flags_.file = dir_.Path("ckptd.yaml");
    Write("");
  }
  void Write(const std::string& yaml) { std::ofstream(flags_.file, std::ios::trunc) << yaml; }
  std::string Load() {
    const absl::Status status = LoadConfig(flags_, &config_);
    return status.ok() ? "" : Message(status);
  }

  TemporaryDirectory memory_{"/dev/shm"};
  TemporaryDirectory dir_;
  ConfigFlags flags_;
  v1::DaemonConfig config_;
};

TEST_F(DaemonConfigTest, DefaultsAreFilledInAndFlagsWinOverTheFile) {
  Write("memory: {slots_per_rank: 4, bytes_max: 1GiB}\nsave: {commit_deadline_ms: 5min}\n");
  ASSERT_EQ(Load(), "");
  EXPECT_EQ(config_.memory().slots_per_rank(), 4u);
  EXPECT_EQ(config_.memory().bytes_max(), 16u << 20);
  EXPECT_EQ(config_.save().commit_deadline_ms(), 300'000u);
  EXPECT_EQ(config_.admin().path(), dir_.Path("admin.sock"));
  EXPECT_EQ(config_.socket().mode(), 0666u);
  EXPECT_FALSE(config_.node_name().empty());
}

TEST_F(DaemonConfigTest, ThePoolOfRecycledFilesCanBeSwitchedOff) {
  Write("nvme: {recycle_bytes_max: 0}");
  ASSERT_EQ(Load(), "");
  EXPECT_TRUE(config_.nvme().has_recycle_bytes_max());
  EXPECT_EQ(config_.nvme().recycle_bytes_max(), 0u);
  Write("node_name: 'gpu 17'\nnvme: {bytes_max: 1GiB}\nremote: {stripe_bytes: 128KiB}");
  ASSERT_EQ(Load(), "") << "nothing is named after the node without a remote directory";
  EXPECT_FALSE(config_.nvme().has_recycle_bytes_max());
}

TEST_F(DaemonConfigTest, WithoutABudgetHalfOfTheFileSystemIsTaken) {
  flags_.memory_bytes.reset();
  ASSERT_EQ(Load(), "");
  EXPECT_GT(config_.memory().bytes_max(), 0u);
  EXPECT_EQ(config_.memory().bytes_max() % (2u << 20), 0u);
}

TEST_F(DaemonConfigTest, EveryRefusalNamesTheSetting) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"node_name: 'gpu 17'\nremote: {dir: /mnt/r}", "node_name: with remote.dir it names files"},
      {"remote: {dir: /mnt/r, stripe_bytes: 100KiB}",
       "remote.stripe_bytes: a multiple of 64KiB is needed"},
      {"memory: {slots_per_rank: 1}", "memory.slots_per_rank: 1 is not within 2"},
      {"memory: {populate_cpu_percent: 0}", "memory.populate_cpu_percent"},
      {"memory: {populate_cpu_percent: 101}", "memory.populate_cpu_percent"},
      {"memory: {populate_chunk_bytes: 1KiB}", "memory.populate_chunk_bytes"},
      {"socket: {connections_max: 0}", "socket.connections_max"},
      {"socket: {reply_backlog_bytes_max: 1}", "socket.reply_backlog_bytes_max"},
      {"socket: {hello_timeout_ms: 0}", "socket.hello_timeout_ms"},
      {"admin: {path: relative.sock}", "admin.path: 'relative.sock' is not an absolute path"},
      {"admin: {path: \"" + dir_.Path("ckptd.sock") + "\"}", "is the clients' socket"},
      {"admin: {path: \"/tmp/" + std::string(120, 'x') + "\"}", "a unix socket's path has at most"},
      {"log: {level: loud}", "log.level"},
      {"log: {file: x.log}", "log.file"},
      {"session: {deadline_max_ms: 0}", "session.deadline_max_ms"},
      {"save: {commit_deadline_ms: 0}", "save.commit_deadline_ms"},
      {"memory: {byte_max: 1}", "memory.byte_max"},
      {"metrics: foo", "metrics"},
      {"metrics: {address: foo}", "metrics.address: 'foo': expected HOST:PORT"},
      {"metrics: {address: \"127.0.0.1:99999\"}", "metrics.address: '127.0.0.1:99999': expected"},
      {"metrics: {address: \"127.0.0.1:\"}", "metrics.address"},
      {"metrics: {address: \"no where:1\"}", "metrics.address: 'no where:1': the host is neither"},
  };
  for (const auto& [yaml, problem] : cases) {
    Write(yaml + "\n");
    EXPECT_THAT(Load(), HasSubstr(problem)) << yaml;
  }
}

TEST_F(DaemonConfigTest, MemoryMustLieOnATmpfsThatHoldsTheBudget) {
  flags_.memory_bytes = "1000TiB";
  EXPECT_THAT(Load(), HasSubstr("are more than the file system of"));
  flags_.memory_bytes = "1MiB";
  EXPECT_THAT(Load(), HasSubstr("hold no slot"));
  flags_.memory_bytes = "lots";
  EXPECT_THAT(Load(), HasSubstr("--memory-bytes"));
  flags_.memory_bytes = "16MiB";
  flags_.memory_dir = "/proc/self";
  EXPECT_THAT(Load(), HasSubstr("not on tmpfs"));
}

TEST_F(DaemonConfigTest, MetricsAddressesOfEveryKind) {
  for (const std::string address :
       {"off", "127.0.0.1:0", "0.0.0.0:9464", "[::1]:65535", "localhost:1", "9464"}) {
    Write("metrics: {address: \"" + address + "\"}\n");
    EXPECT_EQ(Load(), "") << address;
  }
}

TEST_F(DaemonConfigTest, MemoryDirIsRefusedInWordsThatHelp) {
  flags_.memory_dir = "/proc/x";
  EXPECT_THAT(Load(), HasSubstr("'/proc/x' lies on proc, not on tmpfs"));
  flags_.memory_bytes.reset();
  flags_.memory_dir = "x";
  EXPECT_EQ(Load(), "memory.dir: 'x' is not an absolute path");
}

TEST_F(DaemonConfigTest, PlacesAreLookedAtWithoutTouchingThem) {
  const auto problem = [this] {
    EXPECT_EQ(Load(), "");
    const absl::Status status = CheckPlaces(config_);
    return status.ok() ? "" : Message(status);
  };
  flags_.state_dir = dir_.Path("a/b/c");
  EXPECT_EQ(problem(), "");
  EXPECT_FALSE(std::ifstream(dir_.Path("a")).good());
  std::ofstream(dir_.Path("file")) << "x";
  flags_.state_dir = dir_.Path("file/state");
  EXPECT_THAT(problem(), HasSubstr("state_dir: "));
  flags_.state_dir = "/proc/state";
  EXPECT_THAT(problem(), HasSubstr("state_dir: "));
  flags_.state_dir = dir_.Path("state");
  flags_.admin = dir_.Path("file/admin.sock");
  EXPECT_THAT(problem(), HasSubstr("admin.path: "));
  flags_.admin.reset();
  Write("log: {file: \"" + dir_.Path("none/log") + "\"}\n");
  EXPECT_THAT(problem(), HasSubstr("log.file: "));
  Write("log: {file: \"" + dir_.path() + "\"}\n");
  EXPECT_THAT(problem(), HasSubstr("log.file: "));
  Write("log: {file: \"" + dir_.Path("log") + "\"}\n");
  EXPECT_EQ(problem(), "");
}

TEST_F(DaemonConfigTest, AFileThatWasNamedMustBeThere) {
  flags_.file = dir_.Path("missing.yaml");
  EXPECT_THAT(Load(), HasSubstr("missing.yaml"));
}

}  // namespace
}  // namespace holdfast
