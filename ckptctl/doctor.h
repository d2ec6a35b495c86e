// `ckptctl doctor` in two halves: facts about this machine, and what they mean for Holdfast. The
// second half is a pure function, so that every machine that we do not have is a test.
//
//   const std::vector<Finding> findings = Evaluate(CollectFacts(context, arguments));
//   out << RenderFindings(findings);
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "ckptctl/commands.h"
#include "ckptctl/tier_probe.h"

namespace holdfast {

inline constexpr uint64_t kUnlimited = UINT64_MAX;
inline constexpr char kSharedMemory[] = "/dev/shm";

struct TmpfsFacts {
  std::string path;         // as configured; what exists of it was looked at
  std::string mount_point;  // what a remount must name
  absl::Status status;      // of looking
  std::string type;         // "tmpfs"
  uint64_t bytes_total = 0;
  uint64_t bytes_free = 0;
  std::string huge;  // the mount's huge= option: "never" when it has none
};

struct SocketFacts {
  std::string what;  // "admin socket", "client socket"
  std::string path;
  bool exists = false;
  bool is_socket = false;
  bool may_connect = false;  // as far as permissions go
  std::string directory;
  bool directory_open_to_all =
      false;  // writable by everybody, not sticky: anyone can put another socket there
};

struct LimitFacts {
  std::string of;  // "ckptd (pid 4711)", or "this shell"
  uint64_t memlock_bytes = 0;
  uint64_t open_files = 0;
  bool may_lock_all = false;  // CAP_IPC_LOCK
};

// The tightest on the way from a process's control group up to the root.
struct GroupLimit {
  std::string group;
  std::optional<uint64_t> bytes;  // none: there is none
};

struct NumaNode {
  uint32_t id = 0;
  uint64_t bytes_total = 0;
  uint64_t shared_bytes = 0;  // of all shared memory, the slots among it
};

// Of the memory that slots are made of, as ckptd may have it, or whoever asks.
struct MemoryFacts {
  GroupLimit limit;
  GroupLimit high;  // from here on it is held up (version 2)
  bool group_never_swaps = false;
  uint64_t swap_bytes = 0;
  std::optional<uint32_t> swappiness;
  bool mount_noswap = false;    // of memory.dir
  std::string mpol;             // likewise; empty: none
  std::vector<NumaNode> nodes;  // that have memory, and may be used
};

// systemd-logind removes a user's files below /dev/shm when the last session ends, unless told
// otherwise.
struct LogoutFacts {
  bool logind = false;       // this machine was started by systemd
  bool removes_ipc = false;  // logind's RemoveIPC=
  uint32_t uid = 0;          // whom the daemon runs as, or would if started now
  std::string user;
  bool lingers = false;
};

// A directory of a durable tier.
struct TierDirFacts {
  std::string tier;  // "nvme", "remote"
  DirectoryProbe probe;
  std::string fs_type;      // as mounted; what exists of it was looked at
  std::string mount_point;  // likewise
};

// What the daemon says of a durable tier.
struct TierWord {
  std::string tier;
  std::string state;
  bool healthy = false;
  std::string engine;
  uint32_t stalled = 0;
  std::vector<std::string> notes;  // what its file system cannot do
};

struct DaemonFacts {
  std::string socket;
  absl::Status reachable;
  absl::Status health;
  absl::Status status_call;
  std::string version;
  int32_t pid = 0;
  uint64_t memory_bytes_max = 0;
  uint64_t memory_bytes_used = 0;
  uint64_t memory_bytes_free_in_tmpfs = 0;
  uint32_t slots_quarantined = 0;
  std::vector<std::string> problems;
  std::vector<TierWord> tiers;
};

// Of the certificates that the settings name.
struct TlsWord {
  std::string setting;  // "cluster.tls"
  bool bad = false;     // expired, or unreadable; else it only ends soon
  std::string text;     // empty: they are good
};

struct Facts {
  std::string kernel_release;  // "6.1.0-18-amd64"
  int io_uring_error = 0;      // errno of a real io_uring_setup; 0: works
  int pidfd_error = 0;
  int populate_error = 0;  // of MADV_POPULATE_WRITE
  std::string copy_kernel;
  bool x86 = false;
  uint64_t ram_bytes = 0;
  bool noswap_known = false;  // the kernel has the mount option
  MemoryFacts memory;
  std::string
      shmem_huge;  // the machine's setting: "never", "advise", "deny", "force", …; empty: not known
  std::vector<std::string> fabric_providers;
  std::vector<std::string> rdma_devices;
  std::string config_path;  // empty: there is none
  absl::Status config;
  std::vector<TmpfsFacts> tmpfs;  // /dev/shm, and memory.dir when that is elsewhere
  std::vector<SocketFacts> sockets;
  std::string memory_dir;  // empty: ckptd's default
  LimitFacts limits;
  LogoutFacts logout;
  DaemonFacts daemon;
  std::vector<TierDirFacts> tier_dirs;
  std::vector<TlsWord> certificates;
  bool is_daemons_user = true;  // whoever asks may do what the daemon may
};

enum class Verdict { kOk, kSlow, kBroken };
std::string_view VerdictText(Verdict verdict);  // "ok", "slow", "will not work"
std::string_view VerdictId(Verdict verdict);    // for --json: "ok", "slow", "will_not_work"

struct Finding {
  std::string check;  // "kernel", "io_uring", …: stable
  Verdict verdict = Verdict::kOk;
  std::string text;
  std::string mend;  // the command; empty when there is nothing to mend
};

Facts CollectFacts(const Context& context, const DoctorArguments& arguments);

// The file that ckptd reads when it is not told which, whoever starts it: a user's own if there is
// one, else root's; empty if there is neither.
std::string DefaultConfigPath(bool root);

// The parts of collecting that ask the kernel by trying.
int TryIoUring();
int TryPidfd();
int TryPopulate();
std::vector<std::string> FabricProviders();

std::vector<Finding> Evaluate(const Facts& facts);
void EvaluateTiers(const Facts& facts, std::vector<Finding>& findings);   // part of it
void EvaluateMemory(const Facts& facts, std::vector<Finding>& findings);  // likewise
// In single quotes for a shell, when it holds anything that a shell would take.
std::string QuoteForShell(const std::string& word);
std::string RenderFindings(const std::vector<Finding>& findings);

// Of two mountinfo texts' lines the one that holds `path` (the longest mount point that is a
// prefix).
struct MountFacts {
  std::string mount_point;
  std::string huge;  // value of huge=, "never" if there is none
  std::string type;  // "ext4", "lustre", "fuse.ceph-fuse", …
  bool noswap = false;
  std::string mpol;  // "interleave", "bind:0-1"
};
MountFacts FindMount(std::string_view mountinfo, const std::string& path);

// Under `root`, which is empty but in tests, lie /proc and /sys. `pid`: ckptd's; 0: whoever asks.
MemoryFacts CollectMemory(const std::string& root, int32_t pid, const std::string& memory_dir);

// "0-1,3", as the kernel lists nodes.
std::vector<uint32_t> ParseNumberList(std::string_view text);

// The chosen word of "always within_size [never] deny": "never"; empty if there is none.
std::string ChosenWord(std::string_view text);

// RemoveIPC= as logind takes it from its settings' texts, of which the later wins; it is on unless
// they say no.
bool RemovesIpc(const std::vector<std::string>& settings);

}  // namespace holdfast
