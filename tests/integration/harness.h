// Real processes for the integration tests: ckptd with directories and sockets of its own, and
// training ranks that do what the test tells them, line by line (rank_program.cc).
//
//   Node node;
//   ASSERT_TRUE(node.Start());
//   Rank rank(node, {.job = "a"});
//   EXPECT_EQ(rank.Do("open"), "ok attempt=1");
//
// Everything waits for events with a deadline (kPatience), nothing sleeps; every process is killed
// and every directory removed at the end. One thread per object.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "holdfast/v1/admin.pb.h"
#include "tests/base/temporary_directory.h"
#include "tests/integration/child.h"
#include "tests/integration/raw_client.h"

namespace holdfast {

struct NodeOptions {
  std::string memory_bytes = "256MiB";  // on the command line; empty: not there
  std::string config;  // YAML beside what the harness sets (metrics off, directories)
  uint64_t own_tmpfs_bytes =
      0;  // not 0: memory.dir lies on a tmpfs of this size, which only this test's processes see
  uint64_t own_state_bytes = 0;  // the same for state_dir
  // Durable tiers, with directories of this test's own beside its programs: a real disk, as a rule.
  uint32_t drives = 0;         // directories in nvme.dirs
  std::string nvme;            // YAML of section nvme, beside the directories: "bytes_max: 1GiB, "
  bool remote = false;         // a directory as remote.dir
  std::string remote_options;  // YAML of section remote, likewise
  std::vector<std::string> nvme_dirs;  // instead of directories of the harness's
  std::string remote_dir;
  std::string log_level = "debug";
};

// One ckptd, to be started, killed and started again over the same directories.
class Node {
 public:
  explicit Node(const NodeOptions& options = {});
  ~Node();

  // Waits for "ready". `sync_point` as in base/sync_point.h.
  bool Start(const std::string& sync_point = "");
  void Kill();  // SIGKILL
  // The same without waiting for the end; Start begins another one beside it.
  std::unique_ptr<Child> KillAndLeave();
  void Terminate() { child_->Signal(15); }  // SIGTERM, without waiting for the end
  // SIGTERM; the exit code, or nothing at the deadline.
  std::optional<int> Stop();
  std::optional<int> WaitExit(std::chrono::milliseconds at_most = kPatience) {
    return child_->Wait(at_most);
  }
  bool running() { return child_ != nullptr && child_->running(); }
  pid_t pid() const { return child_->pid(); }

  bool has_own_tmpfs() const { return has_own_tmpfs_; }
  bool has_own_state() const { return has_own_state_; }

  std::string socket() const { return state_.Path("ckptd.sock"); }
  std::string admin_socket() const { return state_.Path("admin.sock"); }
  std::string memory_dir() const { return memory_.Path("m"); }
  std::string nvme_dir(uint32_t drive) const;
  std::string remote_dir() const;
  size_t drives() const;
  std::string state_dir() const { return state_.Path("state"); }
  std::string config_file() const { return state_.Path("ckptd.yaml"); }  // written by Start
  std::string log_file() const { return log_.Path("log"); }
  std::string Log() const;
  std::vector<std::string> Arguments() const;  // of ckptd, program included

  // Asks the daemon; nothing when it does not answer OK (the reason is in `error`).
  std::optional<v1::GetStatusReply> Status(std::string* error = nullptr);
  std::optional<v1::JobStatus> Job(const std::string& name);
  std::vector<v1::Checkpoint> List(const std::string& job);
  struct Verified {
    bool ok = false;
    std::string error;
    uint32_t shards = 0;
    uint32_t skipped = 0;
    uint64_t bytes = 0;
    std::vector<v1::BadShard> bad;
  };
  Verified Verify(const std::string& job);
  std::string Remove(const std::string& job);  // "" or what went wrong
  std::string SetRestorePoint(const v1::SetRestorePointRequest& request);
  // Asks again, as often as the daemon can answer, until it is so.
  bool Until(const std::function<bool(const v1::GetStatusReply&)>& so,
             std::chrono::milliseconds at_most = kPatience);

 private:
  std::string TierSettings() const;

  const NodeOptions options_;
  TemporaryDirectory memory_{"/dev/shm"};
  TemporaryDirectory state_;
  TemporaryDirectory log_{"/dev/shm"};  // ckptd waits but a moment for a log on a slow disk
  std::unique_ptr<TemporaryDirectory> durable_;  // nvme-<n>, remote
  bool has_own_tmpfs_ = false;
  bool has_own_state_ = false;
  std::unique_ptr<Child> child_;
};

struct RankOptions {
  std::string job = "job";
  uint32_t rank = 0;
  uint32_t world_size = 1;
  std::string launch;
  uint64_t bytes = 1 << 20;  // of its state
  std::string sync_point;
  uid_t uid = 0;
  std::string policy;  // "nvme.every_steps=2 remote.keep_last=1"; of the job, as it opens
};

class Rank {
 public:
  Rank(const Node& node, const RankOptions& options);
  // Sends a command, and its answer: "ok …", "error CODE …"; "gone" when the process ended,
  // "timeout".
  std::string Do(const std::string& command);
  void Send(const std::string& command) { child_.WriteLine(command); }
  std::string Answer();
  void Kill();
  Child& child() { return child_; }

 private:
  Child child_;
};

// The same command to all, then all answers: for what ranks do together.
std::vector<std::string> DoAll(std::vector<std::unique_ptr<Rank>>& ranks,
                               const std::string& command);
std::vector<std::unique_ptr<Rank>> StartRanks(const Node& node, RankOptions options,
                                              uint32_t world_size);

// All that is left of a file system, taken by a file; given back at the end.
class FullDisk {
 public:
  explicit FullDisk(const std::string& directory);
  ~FullDisk();
  FullDisk(const FullDisk&) = delete;
  FullDisk& operator=(const FullDisk&) = delete;
  void TakeTheRest();  // what somebody else has freed since

 private:
  const std::string path_;
  UniqueFd file_;
  uint64_t bytes_ = 0;
};

// Whatever lies in a directory goes, the directory stays: a loss that fate would bring.
void EmptyDirectory(const std::string& directory);

std::vector<std::string> SyncPoints();  // tests/sync_points.txt

// Files of memory.dir by their beginning ("slot-").
std::vector<std::string> FilesIn(const std::string& directory, const std::string& prefix);
std::string ReadText(const std::string& path);
void WriteText(const std::string& path, const std::string& text);
bool StartsWith(const std::string& text, const std::string& prefix);
// The number after `key` ("step=") in an answer.
std::optional<uint64_t> NumberAfter(const std::string& text, const std::string& key);

}  // namespace holdfast
