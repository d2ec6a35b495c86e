#include "server/runtime/daemon_config.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <map>

#include "base/fault_env.h"
#include "base/status.h"
#include "base/unique_fd.h"
#include "server/runtime/tier_config.h"
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

// As of a user whose login has set no XDG_RUNTIME_DIR.
TEST_F(DaemonConfigTest, ASocketWithoutADefaultNamesTheVariable) {
  ASSERT_EQ(Load(), "");
  config_.mutable_socket()->clear_path();
  EXPECT_THAT(Message(CheckConfig(config_)),
              HasSubstr("socket.path: there is no default, since XDG_RUNTIME_DIR is not set"));
}

TEST_F(DaemonConfigTest, EveryRefusalNamesTheSetting) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"node_name: 'gpu 17'\nremote: {dir: /mnt/r}", "node_name: with remote.dir it names files"},
      {"node_name: 'gpu 17'\ncluster: {name: x}",
       "node_name: in a cluster the node name must be as"},
      {"cluster: {members: [{name: other, address: \"h:1\"}]}", "(node_name), is not listed"},
      {"cluster: {etcd: {endpoints: [nowhere]}}", "cluster.etcd.endpoints: 'nowhere' is not HOST"},
      {"cluster: {tls: {ca_file: /x/ca}}", "cluster.tls: ca_file, cert_file and key_file go"},
      {"status_page: {address: \"9470\"}", "status_page.address: '9470': expected HOST:PORT, such"},
      {"status_page: {address: \"0.0.0.0:9470\"}",
       "status_page.address: '0.0.0.0:9470' is no address of loopback"},
      {"status_page: {address: \"10.0.0.7:9470\"}", "choose 127.0.0.1:PORT or [::1]:PORT, or set"},
      {"status_page: {address: \"[::]:9470\"}", "status_page.address: '[::]:9470' is no address"},
      {"status_page: {address: \"localhost:9470\"}", "status_page.address: 'localhost:9470' is no"},
      {"status_page: {address: \"127.0.0.1.example:9470\"}", "is no address of loopback"},
      {"status_page: {address: \"127.0.0.1:99999\"}",
       "status_page.address: '127.0.0.1:99999': exp"},
      {"status_page: {tls: {ca_file: /x/ca}}",
       "status_page.tls: ca_file, cert_file and key_file go"},
      {"status_page: {tls: {ca_file: /a, cert_file: b, key_file: /c}}",
       "status_page.tls.cert_file: 'b' is not an absolute path"},
      {"fabric: {provider: TCP}", "fabric.provider: 'TCP': expected auto, verbs, tcp or off"},
      {"fabric: {provider: 'auto;ofi_rxm'}", "fabric.provider: 'auto;ofi_rxm': expected"},
      {"fabric: {provider: pigeons}", "fabric.provider: 'pigeons': expected"},
      {"fabric: {devices: [eth0, '']}", "fabric.devices: a device needs a name"},
      {"fabric: {devices: [\"eth0\\n\"]}", "fabric.devices: a device needs a name"},
      {"fabric: {devices: [eth0, eth1, eth0]}", "fabric.devices: 'eth0' twice"},
      {"memory: {peer_bytes_max: 1PiB}",
       "memory.peer_bytes_max: 1125899906842624 bytes (1 PiB) is not within 0 to 16 MiB "
       "(memory.bytes_max): in which they are counted"},
      {"cluster: {listen_address: here}", "cluster.listen_address: 'here' is not HOST:PORT"},
      {"remote: {dir: /mnt/r, stripe_bytes: 100KiB}",
       "remote.stripe_bytes: 102400 bytes (100 KiB): a multiple of 64 KiB is needed"},
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
      {"health: {address: \"127.0.0.1:9464\"}",
       "health.address: '127.0.0.1:9464' is taken by metrics.address, '127.0.0.1:9464'; choose "
       "another port"},
      {"metrics: {address: \"9470\"}\nstatus_page: {address: \"127.0.0.1:9470\"}",
       "status_page.address: '127.0.0.1:9470' is taken by metrics.address, '9470'"},
      {"health: {address: \"10.0.0.1:7\"}\nmetrics: {address: \"0.0.0.0:7\"}",
       "health.address: '10.0.0.1:7' is taken by metrics.address"},
      {"metrics: {address: \"localhost:7\"}\nstatus_page: {address: \"127.0.0.1:7\"}",
       "status_page.address: '127.0.0.1:7' is taken by metrics.address"},
      {"node_name: n\nhealth: {address: \"0.0.0.0:9465\"}\n"
       "cluster: {plaintext: true, etcd: {endpoints: [h:1]}}",
       "health.address: '0.0.0.0:9465' is taken by cluster.listen_address, '0.0.0.0:9465'"},
      {"metrics: {address: \"127.0.0.1:7\"}\nadmin: {tls: {address: \"127.0.0.1:7\", ca_file: /c, "
       "cert_file: /c, key_file: /c, users: [{certificate: a, uid: 1}]}}",
       "admin.tls.address: '127.0.0.1:7' is taken by metrics.address"},
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

TEST_F(DaemonConfigTest, AClusterIsCompletedAndChecked) {
  Write("node_name: gpu-17\n");
  ASSERT_EQ(Load(), "");
  EXPECT_FALSE(config_.has_cluster()) << "a node is alone unless it is told otherwise";
  Write(
      "node_name: gpu-17\n"
      "cluster:\n"
      "  labels: [{name: rack, value: r7}]\n"
      "  etcd: {endpoints: [10.0.0.1:2379], lease_ttl_ms: 20s}\n"
      "  tls: {ca_file: /x/ca.pem, cert_file: /x/cert.pem, key_file: /x/key.pem}\n");
  ASSERT_EQ(Load(), "");
  EXPECT_EQ(config_.cluster().name(), "default");
  EXPECT_EQ(config_.cluster().listen_address(), "0.0.0.0:9465");
  EXPECT_EQ(config_.cluster().advertise_address(), "gpu-17:9465");
  EXPECT_EQ(config_.cluster().etcd().lease_ttl_ms(), 20'000u);
  EXPECT_EQ(config_.cluster().etcd().request_timeout_ms(), 2'000u);
  EXPECT_EQ(config_.cluster().tls().key_file(), "/x/key.pem");
  // Whether its files can be read is asked only where somebody is told so.
  EXPECT_THAT(Message(CheckPlaces(config_)), HasSubstr("cluster.tls.ca_file: read '/x/ca.pem': "));
  Write(
      "node_name: b\n"
      "cluster: {plaintext: true, members: [{name: a, address: \"h1:9465\"}, {name: b, address: "
      "\"h2:9466\"}]}\n");
  ASSERT_EQ(Load(), "");
  EXPECT_EQ(config_.cluster().advertise_address(), "h2:9466");
  EXPECT_TRUE(CheckPlaces(config_).ok()) << CheckPlaces(config_);
}

TEST_F(DaemonConfigTest, TheAdminAddressIsOffOrSaysWhomCertificatesStandFor) {
  ASSERT_EQ(Load(), "");
  EXPECT_EQ(config_.admin().tls().address(), "");
  const std::string files = "ca_file: /x/ca, cert_file: /x/crt, key_file: /x/key";
  const auto problem = [&](const std::string& tls) {
    Write("admin: {tls: {" + tls + "}}\n");
    return Load();
  };
  EXPECT_EQ(problem("address: \"off\""), "");
  EXPECT_EQ(problem("address: \"0.0.0.0:9468\", " + files +
                    ", users: [{certificate: a, uid: 0}, {certificate: b, uid: 7}]"),
            "");
  EXPECT_EQ(config_.admin().tls().users(1).uid(), 7u);
  EXPECT_THAT(Message(CheckPlaces(config_)), HasSubstr("admin.tls.ca_file: read '/x/ca'"));
  const std::string on = "address: \"0.0.0.0:9468\", " + files + ", users: ";
  EXPECT_THAT(problem("address: \"9468\", " + files), HasSubstr("expected HOST:PORT"));
  EXPECT_THAT(problem("address: \"0.0.0.0:9468\", users: [{certificate: a, uid: 0}]"),
              HasSubstr("admin.tls: ca_file, cert_file and key_file go together"));
  EXPECT_THAT(problem("address: \"0.0.0.0:9468\", " + files), HasSubstr("nobody is listed"));
  // Nobody becomes an operator because a number was forgotten.
  EXPECT_THAT(problem(on + "[{certificate: a}]"), HasSubstr("admin.tls.users: 'a' has no uid"));
  EXPECT_THAT(problem(on + "[{uid: 7}]"), HasSubstr("each needs a certificate"));
  EXPECT_THAT(problem(on + "[{certificate: a, uid: 4294967295}]"), HasSubstr("has no uid"));
  EXPECT_THAT(problem(on + "[{certificate: a, uid: 1}, {certificate: a, uid: 2}]"),
              HasSubstr("'a' is listed twice"));
}

TEST_F(DaemonConfigTest, TheStatusPageIsOffOrOnLoopbackOrBehindCertificates) {
  ASSERT_EQ(Load(), "");
  EXPECT_EQ(config_.status_page().address(), "off");
  for (const char* address : {"off", "127.0.0.1:9470", "127.9.9.9:0", "[::1]:9470"}) {
    Write(absl::StrCat("status_page: {address: \"", address, "\"}\n"));
    EXPECT_EQ(Load(), "") << address;
  }
  Write(
      "status_page:\n"
      "  address: 0.0.0.0:9470\n"
      "  tls: {ca_file: /x/ca.pem, cert_file: /x/cert.pem, key_file: /x/key.pem}\n");
  ASSERT_EQ(Load(), "");
  EXPECT_THAT(Message(CheckPlaces(config_)),
              HasSubstr("status_page.tls.ca_file: read '/x/ca.pem': "));
}

TEST_F(DaemonConfigTest, TierSettingsThatCannotWorkAreRefusedWithTheirRange) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"nvme: {bytes_max: 1}", "nvme.bytes_max: 1 bytes (1 B) is not within 1 MiB to 1 EiB, nor 0"},
      {"nvme: {bytes_max: 2EiB}", "nvme.bytes_max: "},
      {"nvme: {high_watermark_percent: 0}",
       "nvme.high_watermark_percent: 0 is not within 1 to 100"},
      {"nvme: {high_watermark_percent: 101}", "nvme.high_watermark_percent: 101 is not within 1"},
      {"nvme: {low_watermark_percent: 95}", "nvme.low_watermark_percent: 95 is not within 1 to 90"},
      {"nvme: {recycle_bytes_max: 17PiB}", "nvme.recycle_bytes_max: "},
      {"nvme: {bandwidth_bytes_per_s_max: 1}", "nvme.bandwidth_bytes_per_s_max: 1 bytes (1 B) is"},
      {"nvme: {piece_bytes: 1}", "nvme.piece_bytes: 1 bytes (1 B) is not within 1 MiB to 4 MiB"},
      {"nvme: {piece_bytes: 1EiB}", "is not within 1 MiB to 4 MiB"},
      {"nvme: {piece_bytes: 1048577}",
       "nvme.piece_bytes: 1048577 bytes (1 MiB): a multiple of 4 KiB is needed"},
      {"nvme: {depth: 0}", "nvme.depth: 0 is not within 4 to 32"},
      {"nvme: {depth: 100000}", "nvme.depth: 100000 is not within 4 to 32"},
      {"nvme: {io_priority: 9}", "nvme.io_priority: 9 is not within 0 to 8"},
      {"nvme: {nice: 20}", "nvme.nice: 20 is not within 0 to 19"},
      {"nvme: {stall_timeout_ms: 0}", "nvme.stall_timeout_ms: 0 ms is not within 10 ms to "},
      {"nvme: {stall_timeout_ms: 25h}", "nvme.stall_timeout_ms: 90000000 ms is not within 10 ms"},
      {"remote: {bytes_max: 1023KiB}", "remote.bytes_max: 1047552 bytes (1023 KiB) is not within"},
      {"remote: {writers: 0}", "remote.writers: 0 is not within 1 to 64"},
      {"remote: {writers: 100000}", "remote.writers: 100000 is not within 1 to 64"},
      {"remote: {piece_bytes: 17MiB}", "remote.piece_bytes: 17825792 bytes (17 MiB) is not within"},
      {"remote: {bandwidth_bytes_per_s_max: 2TiB}", "is not within 1 MiB to 1 TiB, nor 0"},
      {"remote: {io_priority: 9}", "remote.io_priority: 9"},
      {"remote: {nice: 20}", "remote.nice: 20"},
      {"remote: {stall_timeout_ms: 9}", "remote.stall_timeout_ms: 9 ms"},
      {"remote: {stripe_count: 2001}", "remote.stripe_count: 2001 is not within 0 to 2000"},
      {"remote: {stripe_bytes: 2GiB}", "remote.stripe_bytes: "},
      {"nvme: {dirs: [/x/a, /x/b], bytes_max: 1GiB, recycle_bytes_max: 512MiB}",
       "nvme.recycle_bytes_max: 512 MiB on each of 2 drives leave no room for copies in the budget "
       "of 1 GiB (nvme.bytes_max); lower the one, or raise the other"},
      {"policy: {nvme: {keep_last: 0}}", "policy: nvme.keep_last: 0 is not within 1 to 1000000"},
      {"policy: {nvme: {share_replicas: false}}",
       "policy: nvme.share_replicas: only the remote tier is shared"},
      {"policy: {nvme: {compression: zstd}}",
       "policy: nvme.compression: a local drive is faster than any compression; expected "
       "remote.compression"},
      {"policy: {remote: {compression_level: 20}}",
       "policy: remote.compression_level: 20 is not within 1 to 19"},
      {"policy: {remote: {compression_threads: 65}}",
       "policy: remote.compression_threads: 65 is not within 0 to 64: 0: as many as "
       "remote.writers"},
      {"policy: {remote: {keep_last: 1000001}}", "policy: remote.keep_last: 1000001 is not within"},
      {"policy: {remote: {every_ms: 8784h}}",
       "policy: remote.every_ms: 31622400000 ms is not within 0 to 365 d: a year at most"},
  };
  for (const auto& [yaml, problem] : cases) {
    Write(yaml + "\n");
    const std::string error = Load();
    EXPECT_NE(error, "") << yaml;
    EXPECT_THAT(error, HasSubstr(problem)) << yaml;
  }
  std::string dirs;
  for (int i = 0; i < 65; ++i) {
    dirs += "/x/" + std::to_string(i) + ", ";
  }
  Write("nvme: {dirs: [" + dirs + "/x/last]}\n");
  EXPECT_THAT(Load(), HasSubstr("nvme.dirs: 66 is not within 0 to 64"));
  Write(
      "nvme: {dirs: [/x/a, /x/b], bytes_max: 1GiB, recycle_bytes_max: 511MiB, depth: 32,\n"
      "       piece_bytes: 1MiB, high_watermark_percent: 70, low_watermark_percent: 70}\n"
      "remote: {bytes_max: 1MiB, writers: 64, stripe_bytes: 64KiB, stall_timeout_ms: 10}\n");
  EXPECT_EQ(Load(), "") << "the ends of the ranges belong to them";
}

TEST_F(DaemonConfigTest, TierDirectoriesAreOfTheirOwn) {
  const std::string memory = *flags_.memory_dir;
  const std::string state = *flags_.state_dir;
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"nvme: {dirs: ['']}",
       "nvme.dirs: '' is no directory; name one by its absolute path, or "
       "leave the tier out (dirs: [])"},
      {"nvme: {dirs: [mnt/x]}",
       "nvme.dirs: 'mnt/x' is not an absolute path; begin it with a slash"},
      {"remote: {dir: ./x}", "remote.dir: './x' is not an absolute path"},
      {"nvme: {dirs: [/q, /q]}",
       "nvme.dirs: '/q' is the same directory as '/q' (nvme.dirs); each "
       "needs a directory of its own, beside the others"},
      {"nvme: {dirs: [/q, /q/]}", "'/q' is the same directory as '/q' (nvme.dirs)"},
      {"nvme: {dirs: [/q, //q/.]}", "'//q/.' is the same directory as '/q'"},
      {"nvme: {dirs: [/q, /q/../q]}", "'/q/../q' is the same directory as '/q'"},
      {"nvme: {dirs: [/q, /q/a]}", "nvme.dirs: '/q/a' lies inside '/q' (nvme.dirs)"},
      {"nvme: {dirs: [/q/a, /q]}", "nvme.dirs: '/q' has inside it '/q/a' (nvme.dirs)"},
      {"nvme: {dirs: [/q]}\nremote: {dir: /q/}", "remote.dir: '/q' is the same directory as '/q'"},
      {"nvme: {dirs: [/q/a]}\nremote: {dir: /q}", "remote.dir: '/q' has inside it '/q/a' (nvme."},
      {"nvme: {dirs: [/q]}\nremote: {dir: /q/a}", "remote.dir: '/q/a' lies inside '/q' (nvme."},
      {"nvme: {dirs: [" + memory + "]}", "is the same directory as '" + memory + "' (memory.dir)"},
      {"nvme: {dirs: [" + memory + "/a]}", "lies inside '" + memory + "' (memory.dir)"},
      {"nvme: {dirs: [" + memory_.path() + "]}", "has inside it '" + memory + "' (memory.dir)"},
      {"remote: {dir: " + state + "/}", "remote.dir: '" + state + "' is the same directory as"},
      {"remote: {dir: " + state + "/r}", "lies inside '" + state + "' (state_dir)"},
      {"nvme: {dirs: [/]}", "nvme.dirs: '/' has inside it '" + memory + "' (memory.dir)"},
  };
  for (const auto& [yaml, problem] : cases) {
    Write(yaml + "\nnode_name: node-1\n");
    EXPECT_THAT(Load(), HasSubstr(problem)) << yaml;
  }
  // Names that begin alike are no directories inside one another.
  Write("nvme: {dirs: [/q, /qa, " + memory + "2]}\nremote: {dir: /q2/q}\nnode_name: node-1\n");
  EXPECT_EQ(Load(), "");
}

TEST_F(DaemonConfigTest, WhatLiesAtTheTiersPlacesIsLookedAt) {
  const std::string a = dir_.Path("a");
  const std::string b = dir_.Path("b");
  std::filesystem::create_directories(a + "/sub");
  std::filesystem::create_directory(b);
  std::filesystem::create_directory_symlink(a, dir_.Path("link"));
  std::ofstream(dir_.Path("file")) << "x";
  std::filesystem::create_symlink(dir_.Path("file"), dir_.Path("to-file"));
  std::filesystem::create_directory(*flags_.memory_dir);
  std::filesystem::create_directory_symlink(*flags_.memory_dir, dir_.Path("to-memory"));
  const auto problem = [this](const std::string& dirs, const std::string& remote) {
    Write("node_name: node-1\nnvme: {dirs: [" + dirs + "]}\n" +
          (remote.empty() ? "" : "remote: {dir: " + remote + "}\n"));
    EXPECT_EQ(Load(), "");
    std::vector<std::string> unanswered;
    const absl::Status status =
        CheckTierPlaces(*Env::System(), config_, std::chrono::seconds(30), unanswered);
    EXPECT_THAT(unanswered, ::testing::IsEmpty());
    return status.ok() ? "" : Message(status);
  };
  const std::string link = dir_.Path("link");
  EXPECT_EQ(problem(a + ", " + b, dir_.Path("none/at/all")), "");
  EXPECT_THAT(problem(dir_.Path("file"), ""),
              HasSubstr("nvme.dirs: '" + dir_.Path("file") + "': '" + dir_.Path("file") +
                        "' is a file, not a directory; name a directory, or move the file away"));
  EXPECT_THAT(problem(dir_.Path("file/x/y"), ""), HasSubstr("'" + dir_.Path("file") + "' is a"));
  EXPECT_THAT(problem(dir_.Path("to-file"), ""), HasSubstr("is a file"));
  EXPECT_THAT(problem(a, "/proc/x"), HasSubstr("remote.dir: '/proc/x' lies on proc, which takes no "
                                               "files; name a directory on a shared file system"));
  EXPECT_THAT(problem("/sys/kernel/x", ""), HasSubstr("lies on sysfs, which takes no files"));
  // The same directory by other names, whether it exists yet or not.
  EXPECT_THAT(problem(a + ", " + link, ""),
              HasSubstr("nvme.dirs: '" + link + "' is the same directory as '" + a + "'"));
  EXPECT_THAT(problem(a, link + "/sub"),
              HasSubstr("remote.dir: '" + link + "/sub' lies inside '" + a + "' (nvme.dirs)"));
  EXPECT_THAT(problem(a + "/new", link + "/new/inner"), HasSubstr("lies inside '" + a + "/new'"));
  EXPECT_THAT(problem(a + "/new", link), HasSubstr("has inside it '" + a + "/new'"));
  EXPECT_THAT(problem(dir_.Path("to-memory/new"), ""),
              HasSubstr("lies inside '" + *flags_.memory_dir + "' (memory.dir)"));
  EXPECT_EQ(problem(a + "/new", link + "/newer"), "");
}

// Nor is it waited for. (Never destroyed: the thread that hung is still in it.)
TEST_F(DaemonConfigTest, APlaceThatDoesNotAnswerIsNoFaultOfTheSettings) {
  static FaultEnv& env = *new FaultEnv;
  ASSERT_TRUE(env.CreateDirectories("/mnt/hung", 0700).ok());
  Write("node_name: node-1\nnvme: {dirs: [/mnt/well]}\nremote: {dir: /mnt/hung}\n");
  ASSERT_EQ(Load(), "");
  env.StallMatching("/mnt/hung");
  std::vector<std::string> unanswered;
  EXPECT_EQ(CheckTierPlaces(env, config_, std::chrono::seconds(2), unanswered), absl::OkStatus());
  EXPECT_THAT(unanswered,
              ::testing::ElementsAre("remote.dir: '/mnt/hung' did not answer within 2 s"));
  env.ReleaseStalled("/mnt/hung");
}

TEST_F(DaemonConfigTest, MemoryMustLieOnATmpfsThatHoldsTheBudget) {
  flags_.memory_bytes = "1000TiB";
  EXPECT_THAT(Load(), HasSubstr("are more than the file system of"));
  flags_.memory_bytes = "1MiB";
  EXPECT_THAT(Load(), HasSubstr("a smaller budget holds no slot"));
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

TEST_F(DaemonConfigTest, AddressesOfOnePortMayStandSideBySide) {
  for (const std::string settings :
       {"metrics: {address: \"127.0.0.1:0\"}\nhealth: {address: \"127.0.0.1:0\"}",
        "metrics: {address: \"10.0.0.1:7\"}\nhealth: {address: \"127.0.0.1:7\"}",
        "metrics: {address: off}\nhealth: {address: off}"}) {
    Write(settings);
    EXPECT_EQ(Load(), "") << settings;
  }
}

TEST_F(DaemonConfigTest, ABudgetBelowTheLeastIsRefusedWithoutAnInventedMost) {
  flags_.memory_bytes = "1KiB";
  EXPECT_EQ(Load(),
            "memory.bytes_max: 1024 bytes (1 KiB) is not within 2 MiB to the size of its file "
            "system: a smaller budget holds no slot");
}

TEST_F(DaemonConfigTest, MemoryDirIsRefusedInWordsThatHelp) {
  flags_.memory_dir = "/proc/x";
  EXPECT_THAT(Load(), HasSubstr("'/proc/x' lies on proc, not on tmpfs"));
  flags_.memory_bytes.reset();
  EXPECT_THAT(Load(), HasSubstr("'/proc/x' lies on proc, not on tmpfs"));
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
  const std::string pipe = dir_.Path("pipe");
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  Write("log: {file: \"" + pipe + "\"}\n");
  EXPECT_EQ(problem(), "log.file: '" + pipe +
                           "' is a pipe that nobody reads; start its reader first, or name a file");
  const UniqueFd reader(::open(pipe.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  EXPECT_EQ(problem(), "");
  Write("events: {command: [" + dir_.path() + "]}\n");
  EXPECT_EQ(problem(), "events.command: '" + dir_.path() + "' is no file: name the program to run");
}

// A pair of lines that a certificate or key lies between.
std::string Pem(const std::string& label) {
  return "-----BEGIN " + label + "-----\nMAo=\n-----END " + label + "-----\n";
}

class ClusterFilesTest : public DaemonConfigTest {
 protected:
  ClusterFilesTest() {
    for (const std::string name : {"ca", "cert", "key", "password"}) {
      paths_[name] = dir_.Path(name);
    }
    Put("ca", "Issuer: someone\n" + Pem("CERTIFICATE") + Pem("CERTIFICATE"));
    Put("cert", Pem("TRUSTED CERTIFICATE"));
    Put("key", Pem("PRIVATE KEY"));
    Put("password", "secret\n");
  }
  void Put(const std::string& name, const std::string& text) {
    std::filesystem::remove_all(paths_[name]);
    std::ofstream(paths_[name], std::ios::trunc) << text;
  }
  std::string Problem(const std::string& section) {
    Write("node_name: n1\ncluster: {" + section + "}\n");
    EXPECT_EQ(Load(), "") << "no file is looked at";
    const absl::Status status = CheckPlaces(config_);
    return status.ok() ? "" : Message(status);
  }
  std::string OfPeers() {
    return Problem("tls: {ca_file: " + paths_["ca"] + ", cert_file: " + paths_["cert"] +
                   ", key_file: " + paths_["key"] + "}");
  }
  std::string OfEtcd() {
    return Problem("plaintext: true, etcd: {endpoints: [h:1], ca_file: " + paths_["ca"] +
                   ", cert_file: " + paths_["cert"] + ", key_file: " + paths_["key"] +
                   ", user: u, password_file: " + paths_["password"] + "}");
  }
  // Both sections refuse the file in the same words.
  void ExpectRefused(const std::string& name, const std::string& problem) {
    const std::string said = name + "_file: '" + paths_[name] + "' " + problem;
    if (name != "password") {
      EXPECT_EQ(OfPeers(), "cluster.tls." + said);
    }
    EXPECT_EQ(OfEtcd(), "cluster.etcd." + said);
  }

  std::map<std::string, std::string> paths_;
};

TEST_F(ClusterFilesTest, AreSoundWhereTheyHoldWhatTheyAreFor) {
  EXPECT_EQ(OfPeers(), "");
  EXPECT_EQ(OfEtcd(), "");
  // As secrets are mounted.
  std::filesystem::rename(paths_["key"], dir_.Path("elsewhere"));
  std::filesystem::create_symlink(dir_.Path("elsewhere"), paths_["key"]);
  for (const std::string label : {"RSA PRIVATE KEY", "EC PRIVATE KEY"}) {
    std::ofstream(dir_.Path("elsewhere"), std::ios::trunc)
        << Pem("EC PARAMETERS") + Pem(label) + Pem("CERTIFICATE");
    EXPECT_EQ(OfPeers(), "") << label;
  }
}

TEST_F(ClusterFilesTest, ThatAreNoFilesOrHaveNothingInThemAreRefused) {
  const std::map<std::string, std::string> wanted = {
      {"ca", "a PEM file with a certificate"},
      {"cert", "a PEM file with a certificate"},
      {"key", "a PEM file with a private key"},
      {"password", "a file whose first line is the password"},
  };
  for (const auto& [name, what] : wanted) {
    const std::string before = paths_[name];
    std::filesystem::create_directory(dir_.Path("directory"));
    paths_[name] = dir_.Path("directory");
    ExpectRefused(name, "is a directory; name " + what);
    paths_[name] = "/dev/null";
    ExpectRefused(name, "is no regular file; name " + what);
    paths_[name] = dir_.Path("empty");
    Put(name, "");
    ExpectRefused(name, "is empty; name " + what);
    paths_[name] = before;
  }
  EXPECT_EQ(OfEtcd(), "");
}

TEST_F(ClusterFilesTest, WithoutPemAreRefused) {
  const std::string no_certificate =
      "has no certificate in PEM (-----BEGIN CERTIFICATE----- to -----END CERTIFICATE-----); name "
      "a PEM file with a certificate";
  const std::string no_key =
      "has no private key in PEM (-----BEGIN PRIVATE KEY----- to -----END PRIVATE KEY-----); name "
      "a PEM file with a private key";
  const std::string whole = Pem("CERTIFICATE");
  for (const std::string& text :
       {std::string("text\n"), std::string("\x30\x82\x03\x00\x02", 5), Pem("PRIVATE KEY"),
        Pem("CERTIFICATE REQUEST"), whole.substr(0, whole.find("-----END")),
        whole.substr(0, whole.size() - 4), whole.substr(whole.find("MAo")),
        std::string("-----BEGIN CERTIFICATE"), std::string("-----BEGIN CERTIFICATE-----")}) {
    for (const std::string name : {"ca", "cert"}) {
      Put(name, text);
      ExpectRefused(name, no_certificate);
      Put(name, whole);
    }
  }
  for (const std::string& text : {Pem("CERTIFICATE"), Pem("PUBLIC KEY"), std::string("\n")}) {
    Put("key", text);
    ExpectRefused("key", no_key);
  }
}

TEST_F(ClusterFilesTest, ThatADaemonCannotUseAreRefused) {
  const std::string encrypted =
      "is encrypted with a password, for which a daemon has nobody to ask; name a PEM file with a "
      "private key";
  Put("key", Pem("ENCRYPTED PRIVATE KEY"));
  ExpectRefused("key", encrypted);
  Put("key",
      "-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\n\nMAo=\n"
      "-----END RSA PRIVATE KEY-----\n");
  ExpectRefused("key", encrypted);
  Put("key", "ENCRYPTED is what this one is not\n" + Pem("PRIVATE KEY"));
  EXPECT_EQ(OfPeers(), "");
  Put("password", "\nsecret\n");
  ExpectRefused("password",
                "has an empty first line; name a file whose first line is the password");
}

TEST_F(ClusterFilesTest, LargerThanIsReadAreRefused) {
  Put("ca", Pem("CERTIFICATE") + std::string(1 << 20, '\n'));
  EXPECT_THAT(OfPeers(), HasSubstr("cluster.tls.ca_file: read '" + paths_["ca"] + "': 10486"));
  Put("ca", Pem("CERTIFICATE"));
  Put("password", std::string(4097, 'x'));
  EXPECT_THAT(OfEtcd(), HasSubstr("cluster.etcd.password_file: read '" + paths_["password"] +
                                  "': 4097 bytes; at most 4096"));
}

TEST_F(DaemonConfigTest, AFileThatWasNamedMustBeThere) {
  flags_.file = dir_.Path("missing.yaml");
  EXPECT_THAT(Load(), HasSubstr("missing.yaml"));
}

}  // namespace
}  // namespace holdfast
