// ckptd as a program: its command line, its exit codes, the example configuration.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>

#include "tests/integration/harness.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;

struct Ended {
  std::optional<int> code;
  std::string out;
  std::string err;
};

// With `limits`, a shell sets those before.
Ended RunCkptd(std::vector<std::string> arguments, const std::string& limits = "") {
  TemporaryDirectory scratch;
  arguments.insert(arguments.begin(), std::string(HOLDFAST_BIN_DIR) + "/ckptd");
  if (!limits.empty()) {
    arguments.insert(arguments.begin(), {"/bin/sh", "-c", limits + "; exec \"$0\" \"$@\""});
  }
  Child child(
      {.arguments = std::move(arguments), .error_file = scratch.Path("err"), .pipes = true});
  Ended ended;
  ended.code = child.Wait();
  for (auto line = child.ReadLine(std::chrono::milliseconds(0)); line.has_value();
       line = child.ReadLine(std::chrono::milliseconds(0))) {
    ended.out += *line + "\n";
  }
  ended.err = ReadText(scratch.Path("err"));
  return ended;
}

TEST(Ckptd, TellsItsVersionAndItsOptions) {
  const Ended version = RunCkptd({"--version"});
  EXPECT_EQ(version.code, 0);
  EXPECT_THAT(version.out, HasSubstr("ckptd 0."));
  const Ended help = RunCkptd({"--help"});
  EXPECT_EQ(help.code, 0);
  for (const std::string option :
       {"--config", "--memory-dir", "--state-dir", "--socket", "--admin", "--memory-bytes",
        "--check-config", "--print-reference", "--version"}) {
    EXPECT_THAT(help.out, HasSubstr(option));
  }
}

TEST(Ckptd, WhatItCannotPrintIsNoSuccess) {
  for (const std::string option : {"--version", "--help", "--print-reference", "--check-config"}) {
    TemporaryDirectory memory("/dev/shm");
    const Ended full = RunCkptd(
        {option, "--memory-dir", memory.Path("m"), "--memory-bytes", "16MiB"}, "exec >/dev/full");
    EXPECT_EQ(full.code, 1) << option;
    EXPECT_EQ(full.err,
              "ckptd: write 'standard output': No space left on device (ENOSPC); have it go to a "
              "file or a pipe that takes it\n")
        << option;
  }
}

// `--config "$UNSET"`: no daemon with other places than were meant.
TEST(Ckptd, EmptyPathsExitWithTwo) {
  for (const std::string option :
       {"--config", "--memory-dir", "--state-dir", "--socket", "--admin", "--memory-bytes"}) {
    const Ended empty = RunCkptd({option, "", "--check-config"});
    EXPECT_EQ(empty.code, 2) << option;
    EXPECT_THAT(empty.err, HasSubstr(option + ": is empty")) << option;
  }
}

TEST(Ckptd, TheExampleConfigurationIsSound) {
  const Ended checked = RunCkptd(
      {"--config", std::string(HOLDFAST_SOURCE_DIR) + "/deploy/ckptd.yaml", "--check-config"});
  EXPECT_EQ(checked.code, 0) << checked.err;
  EXPECT_THAT(checked.out, HasSubstr("ok: memory.dir"));
}

TEST(Ckptd, BadCommandLinesAndSettingsExitWithTwo) {
  TemporaryDirectory dir;
  const std::string config = dir.Path("ckptd.yaml");
  EXPECT_EQ(RunCkptd({"--no-such-option"}).code, 2);
  EXPECT_EQ(RunCkptd({"--memory-bytes", "plenty", "--check-config"}).code, 2);
  const Ended missing = RunCkptd({"--config", config});
  EXPECT_EQ(missing.code, 2);
  EXPECT_THAT(missing.err, HasSubstr(config));
  WriteText(config, "memory:\n  byte_max: 1GiB\n");
  const Ended unknown = RunCkptd({"--config", config});
  EXPECT_EQ(unknown.code, 2);
  EXPECT_THAT(unknown.err, HasSubstr("byte_max"));
  EXPECT_THAT(unknown.err, HasSubstr(":2"));
  WriteText(config, "memory:\n  slots_per_rank: 1\n");
  const Ended few = RunCkptd({"--config", config});
  EXPECT_EQ(few.code, 2);
  EXPECT_THAT(few.err, HasSubstr("memory.slots_per_rank"));
  const Ended disk = RunCkptd({"--memory-dir", dir.Path("m"), "--check-config"});
  if (disk.code != 0) {  // /tmp may be a tmpfs
    EXPECT_EQ(disk.code, 2);
    EXPECT_THAT(disk.err, HasSubstr("not on tmpfs"));
  }
}

TEST(Ckptd, ADirectoryThatCannotBeMadeExitsWithOne) {
  TemporaryDirectory memory("/dev/shm");
  TemporaryDirectory dir;
  WriteText(dir.Path("file"), "");
  const Ended ended =
      RunCkptd({"--config", dir.Path("file"), "--memory-dir", memory.Path("m"), "--state-dir",
                dir.Path("state"), "--socket", dir.Path("file/s"), "--memory-bytes", "16MiB"});
  EXPECT_EQ(ended.code, 1);
  EXPECT_THAT(ended.err, HasSubstr("cannot start"));
  EXPECT_THAT(ended.err, HasSubstr(dir.Path("file")));
}

// Its own directories, and all that it needs to start.
std::vector<std::string> ArgumentsIn(const TemporaryDirectory& memory,
                                     const TemporaryDirectory& dir) {
  WriteText(dir.Path("ckptd.yaml"), "metrics: {address: \"off\"}\n");
  return {"--config",    dir.Path("ckptd.yaml"), "--memory-dir",   memory.Path("m"),
          "--state-dir", dir.Path("state"),      "--memory-bytes", "16MiB",
          "--socket",    dir.Path("s")};
}

TEST(Ckptd, ThreadsThatItCannotHaveAreAnErrorAtStart) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers need more address space than there is";
#endif
  TemporaryDirectory memory("/dev/shm");
  TemporaryDirectory dir;
  const Ended ended = RunCkptd(ArgumentsIn(memory, dir), "ulimit -v 260000");
  EXPECT_EQ(ended.code, 1);
  EXPECT_THAT(ended.err, HasSubstr("cannot start: start a thread ("));
  EXPECT_THAT(ended.err, HasSubstr("ulimit -u"));
}

// A limit on file sizes (ulimit -f), or a reader of the log who leaves, is an error of that write.
TEST(Ckptd, SignalsAboutWritesDoNotEndIt) {
  Node node;
  ASSERT_TRUE(node.Start());
  const std::string status = ReadText("/proc/" + std::to_string(node.pid()) + "/status");
  const size_t ignored = status.find("SigIgn:");
  ASSERT_NE(ignored, std::string::npos);
  const uint64_t mask = std::stoull(status.substr(ignored + 7), nullptr, 16);
  for (const int signal_number : {SIGXFSZ, SIGPIPE}) {
    EXPECT_NE(mask >> (signal_number - 1) & 1, 0u) << signal_number;
  }
}

TEST(Ckptd, CheckConfigLooksAtThePlacesToo) {
  TemporaryDirectory memory("/dev/shm");
  TemporaryDirectory dir;
  std::vector<std::string> arguments = ArgumentsIn(memory, dir);
  arguments.push_back("--check-config");
  EXPECT_EQ(RunCkptd(arguments).code, 0);
  WriteText(dir.Path("ckptd.yaml"), "log: {file: \"" + dir.Path("none/log") + "\"}\n");
  const Ended ended = RunCkptd(arguments);
  EXPECT_EQ(ended.code, 2);
  EXPECT_THAT(ended.err, HasSubstr("log.file"));
}

// It would wait for one without a word.
TEST(Ckptd, APipeForTheLogNeedsAReader) {
  TemporaryDirectory memory("/dev/shm");
  TemporaryDirectory dir;
  const std::vector<std::string> arguments = ArgumentsIn(memory, dir);
  ASSERT_EQ(::mkfifo(dir.Path("pipe").c_str(), 0600), 0);
  WriteText(dir.Path("ckptd.yaml"), "log: {file: \"" + dir.Path("pipe") + "\"}\n");
  const Ended ended = RunCkptd(arguments);
  EXPECT_EQ(ended.code, 2);
  EXPECT_THAT(ended.err, HasSubstr("log.file: '" + dir.Path("pipe") + "' is a pipe that nobody"));
}

// Whatever the file holds, it is said in one whole line.
TEST(Ckptd, ControlCharactersOfTheFileAreShown) {
  TemporaryDirectory memory("/dev/shm");
  TemporaryDirectory dir;
  std::vector<std::string> arguments = ArgumentsIn(memory, dir);
  arguments.push_back("--check-config");
  const std::vector<std::pair<std::string, std::string>> cases = {
      {R"(cluster: {etcd: {endpoints: [h:1], prefix: "/a\0b/"}})",
       R"(ckptd.yaml:1: cluster.etcd.prefix: '/a\x00b/': no setting can have a NUL in it)"},
      {R"(cluster: {etcd: {endpoints: [h:1], prefix: "/a\nb/"}})",
       R"(cluster.etcd.prefix: '/a\x0ab/': printable ASCII, a slash at the end)"},
      {R"(log: {"k\0": 1})", R"(ckptd.yaml:1: log.k\x00: unknown setting)"},
      {R"(log: {file: "a\eb"})", R"(log.file: 'a\x1bb' is not an absolute path)"},
  };
  for (const auto& [settings, problem] : cases) {
    WriteText(dir.Path("ckptd.yaml"), settings + "\n");
    const Ended ended = RunCkptd(arguments);
    EXPECT_EQ(ended.code, 2) << settings;
    EXPECT_THAT(ended.err, HasSubstr(problem)) << settings;
  }
}

// The check and the start alike; what only fails, or is not there yet, keeps neither.
TEST(Ckptd, TierDirectoriesThatCannotBeExitWithTwo) {
  TemporaryDirectory memory("/dev/shm");
  TemporaryDirectory dir;
  std::vector<std::string> arguments = ArgumentsIn(memory, dir);
  std::filesystem::create_directory(dir.Path("drive"));
  std::filesystem::create_directory_symlink(dir.Path("drive"), dir.Path("link"));
  WriteText(dir.Path("file"), "");
  const std::string yaml = "metrics: {address: \"off\"}\nnode_name: node-1\n";
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"nvme: {dirs: [" + dir.Path("file") + "]}", "is a file, not a directory"},
      {"nvme: {dirs: [" + dir.Path("drive") + ", " + dir.Path("link") + "]}",
       "is the same directory as"},
      {"remote: {dir: /proc/self/x}", "remote.dir: '/proc/self/x' lies on proc"},
      {"nvme: {dirs: [" + dir.Path("state/a") + "]}", "(state_dir); each needs"},
      {"nvme: {depth: 100000}", "nvme.depth: 100000 is not within 4 to 32"},
  };
  for (const auto& [settings, problem] : cases) {
    WriteText(dir.Path("ckptd.yaml"), yaml + settings + "\n");
    for (const bool check : {true, false}) {
      std::vector<std::string> all = arguments;
      if (check) {
        all.push_back("--check-config");
      }
      const Ended ended = RunCkptd(all);
      EXPECT_EQ(ended.code, 2) << settings;
      EXPECT_THAT(ended.err, HasSubstr(problem)) << settings;
    }
  }
  WriteText(dir.Path("ckptd.yaml"), yaml + "nvme: {dirs: [" + dir.Path("drive/new") +
                                        "]}\nremote: {dir: " + dir.Path("none") + "}\n");
  arguments.push_back("--check-config");
  const Ended fine = RunCkptd(arguments);
  EXPECT_EQ(fine.code, 0) << fine.err;
  EXPECT_EQ(fine.err, "");
}

// stderr is a pipe that is full: nobody reads what the daemon says, and it serves all the same.
TEST(Ckptd, ALogThatNobodyReadsHoldsNobody) {
  Node node;
  ASSERT_EQ(::mkfifo(node.log_file().c_str(), 0600), 0);
  const UniqueFd pipe(::open(node.log_file().c_str(), O_RDWR | O_NONBLOCK | O_CLOEXEC));
  ASSERT_TRUE(pipe.valid());
  const std::string filling(4096, '\n');
  while (::write(pipe.get(), filling.data(), filling.size()) > 0) {
  }
  ASSERT_TRUE(node.Start());
  Rank rank(node, {.job = "a"});
  EXPECT_TRUE(StartsWith(rank.Do("open"), "ok"));
  rank.Do("restore");
  EXPECT_EQ(rank.Do("save 1"), "ok sealed");
  EXPECT_EQ(rank.Do("committed"), "ok committed");
  EXPECT_TRUE(node.Status().has_value());
  EXPECT_EQ(node.Stop(), 0);
}

TEST(Ckptd, SaysOnceThatItIsReadyAndStopsCleanlyOnSignals) {
  for (const int signal_number : {SIGTERM, SIGINT}) {
    Node node;
    ASSERT_TRUE(node.Start());
    // The line is written before the supervisor is told.
    const std::string log = node.Log();
    EXPECT_NE(log.find("ready version="), std::string::npos);
    EXPECT_EQ(log.find("ready version="), log.rfind("ready version="));
    ::kill(node.pid(), signal_number);
    EXPECT_EQ(node.WaitExit(), 0);
    EXPECT_THAT(node.Log(), HasSubstr("stopped"));
  }
}

TEST(Ckptd, AtRestItNeitherRunsNorGrows) {
  Node node;
  ASSERT_TRUE(node.Start());
  const std::string status = ReadText("/proc/" + std::to_string(node.pid()) + "/status");
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  EXPECT_LE(NumberAfter(status, "VmRSS:").value_or(0), 100u * 1024);
#endif
  EXPECT_LE(NumberAfter(status, "Threads:").value_or(0), 64u);
}

}  // namespace
}  // namespace holdfast
