#include "ckptctl/doctor.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>

namespace holdfast {
namespace {

constexpr uint64_t kGiB = uint64_t{1} << 30;

TmpfsFacts GoodTmpfs() {
  TmpfsFacts fs;
  fs.path = "/dev/shm";
  fs.mount_point = "/dev/shm";
  fs.type = "tmpfs";
  fs.bytes_total = 32 * kGiB;
  fs.bytes_free = 30 * kGiB;
  fs.huge = "within_size";
  return fs;
}

// A machine with nothing to mend.
Facts GoodFacts() {
  Facts facts;
  facts.kernel_release = "6.1.0-18-amd64";
  facts.copy_kernel = "avx512";
  facts.x86 = true;
  facts.ram_bytes = 64 * kGiB;
  facts.shmem_huge = "never";
  facts.fabric_providers = {"tcp", "verbs;ofi_rxm"};
  facts.rdma_devices = {"mlx5_0"};
  facts.tmpfs = {GoodTmpfs()};
  facts.sockets = {{.what = "admin socket",
                    .path = "/run/holdfast/admin.sock",
                    .exists = true,
                    .is_socket = true,
                    .may_connect = true,
                    .directory = "/run/holdfast"}};
  facts.limits = {.of = "ckptd (pid 4711)", .memlock_bytes = kUnlimited, .open_files = 65'536};
  facts.daemon.socket = "/run/holdfast/admin.sock";
  facts.daemon.version = "0.1.0";
  facts.daemon.pid = 4711;
  facts.daemon.memory_bytes_max = 16 * kGiB;
  facts.daemon.memory_bytes_used = 2 * kGiB;
  facts.daemon.memory_bytes_free_in_tmpfs = 30 * kGiB;
  return facts;
}

// The finding of that check; a made-up broken one when there is none.
Finding Find(const Facts& facts, const std::string& check) {
  const std::vector<Finding> findings = Evaluate(facts);
  const auto it = std::find_if(findings.begin(), findings.end(),
                               [&](const Finding& f) { return f.check == check; });
  return it != findings.end() ? *it
                              : Finding{check, Verdict::kBroken, "(no such finding)", "(none)"};
}

void ExpectFinding(const Facts& facts, const std::string& check, Verdict verdict,
                   const std::string& text, const std::string& mend) {
  const Finding finding = Find(facts, check);
  EXPECT_EQ(VerdictText(finding.verdict), VerdictText(verdict)) << check;
  EXPECT_EQ(finding.text, text);
  EXPECT_EQ(finding.mend, mend);
}

TEST(Evaluate, AGoodMachineHasNothingToMend) {
  for (const Finding& f : Evaluate(GoodFacts())) {
    EXPECT_EQ(f.verdict, Verdict::kOk) << f.check << ": " << f.text;
    EXPECT_EQ(f.mend, "") << f.check;
  }
}

TEST(Evaluate, Kernel) {
  const std::string newer = "sudo apt install linux-image-amd64 && sudo reboot";
  Facts facts = GoodFacts();
  for (const char* release : {"5.14.0", "5.15", "6.0.1-rc1", "10.0"}) {
    facts.kernel_release = release;
    EXPECT_EQ(Find(facts, "kernel").verdict, Verdict::kOk) << release;
  }
  facts.kernel_release = "5.10.0-28";
  ExpectFinding(facts, "kernel", Verdict::kSlow,
                "Linux 5.10.0-28 prepares memory page by page; 5.14 and newer do it in one call",
                newer);
  facts.kernel_release = "4.18.0-553.el8";
  ExpectFinding(facts, "kernel", Verdict::kBroken,
                "Linux 4.18.0-553.el8 cannot watch processes by descriptor; 5.3 or newer is needed",
                newer);
  facts.pidfd_error = ENOSYS;
  ExpectFinding(facts, "pidfd", Verdict::kBroken,
                "pidfd_open: Function not implemented: ckptd cannot tell when a process is gone",
                newer);
  facts.pidfd_error = EPERM;
  EXPECT_EQ(Find(facts, "pidfd").mend, "docker run --security-opt seccomp=unconfined …");
  facts.populate_error = EINVAL;
  ExpectFinding(facts, "populate", Verdict::kSlow,
                "MADV_POPULATE_WRITE: Invalid argument: memory is made ready page by page", newer);
}

TEST(Evaluate, IoUring) {
  Facts facts = GoodFacts();
  facts.io_uring_error = EPERM;
  ExpectFinding(
      facts, "io_uring", Verdict::kSlow,
      "io_uring_setup: Operation not permitted: drives are written by threads, which costs more of "
      "the CPU",
      "sudo sysctl -w kernel.io_uring_disabled=0   (in a container: --security-opt "
      "seccomp=unconfined)");
}

TEST(Evaluate, CopyKernel) {
  Facts facts = GoodFacts();
  facts.copy_kernel = "portable";
  EXPECT_EQ(Find(facts, "copy").verdict, Verdict::kSlow);
  EXPECT_EQ(Find(facts, "copy").mend,
            "in a virtual machine, pass the host's CPU through: qemu … -cpu host");
  facts.x86 = false;
  EXPECT_EQ(Find(facts, "copy").mend, "");
}

TEST(Evaluate, TmpfsTooSmall) {
  Facts facts = GoodFacts();
  facts.tmpfs[0].bytes_total = 64 << 20;
  facts.tmpfs[0].bytes_free = 64 << 20;
  ExpectFinding(
      facts, "tmpfs /dev/shm", Verdict::kBroken,
      "64 MiB, 64 MiB of it free: too small for checkpoints",
      "sudo mount -o remount,size=50% /dev/shm   (in a container: docker run --shm-size=…)");
}

TEST(Evaluate, TmpfsLargerThanMemory) {
  Facts facts = GoodFacts();
  facts.ram_bytes = 16 * kGiB;
  ExpectFinding(
      facts, "tmpfs /dev/shm", Verdict::kBroken,
      "32 GiB, 30 GiB of it free, but the machine has 16 GiB of memory: filling it makes the "
      "kernel kill "
      "processes",
      "sudo mount -o remount,size=50% /dev/shm   (in a container: docker run --shm-size=…)");
}

TEST(Evaluate, MemoryDirectoryOnADisk) {
  Facts facts = GoodFacts();
  TmpfsFacts disk = GoodTmpfs();
  disk.path = "/var/my slots";
  disk.mount_point = "/";
  disk.type = "ext4";
  facts.tmpfs.push_back(disk);
  ExpectFinding(facts, "tmpfs /var/my slots", Verdict::kBroken,
                "lies on ext4, not on tmpfs: each save would go to a disk",
                "set memory.dir in /etc/holdfast/ckptd.yaml to a directory below /dev/shm");
  EXPECT_EQ(Find(facts, "huge pages /var/my slots").text, "(no such finding)");
}

TEST(Evaluate, CommandsAreQuotedForAShell) {
  Facts facts = GoodFacts();
  facts.tmpfs[0].mount_point = "/mnt/it's $HOME";
  facts.tmpfs[0].huge = "never";
  EXPECT_EQ(Find(facts, "huge pages /dev/shm").mend,
            "sudo mount -o remount,huge=within_size '/mnt/it'\\''s $HOME'");
}

TEST(Evaluate, HugePages) {
  Facts facts = GoodFacts();
  facts.tmpfs[0].huge = "never";
  ExpectFinding(facts, "huge pages /dev/shm", Verdict::kSlow,
                "the mount has huge=never: making memory ready takes several times as long",
                "sudo mount -o remount,huge=within_size /dev/shm");
  facts.shmem_huge = "force";
  EXPECT_EQ(Find(facts, "huge pages /dev/shm").verdict, Verdict::kOk);
  facts.shmem_huge = "deny";
  facts.tmpfs[0].huge = "always";
  ExpectFinding(
      facts, "huge pages /dev/shm", Verdict::kSlow,
      "denied by the machine's setting: making memory ready takes several times as long",
      "echo never | sudo tee /sys/kernel/mm/transparent_hugepage/shmem_enabled && sudo mount -o "
      "remount,huge=within_size /dev/shm");
}

TEST(Evaluate, Limits) {
  Facts facts = GoodFacts();
  facts.limits.memlock_bytes = 8 << 20;
  const std::string kMend =
      "printf '* - memlock unlimited\\n' | sudo tee /etc/security/limits.d/holdfast.conf   "
      "(systemd: LimitMEMLOCK=infinity), then log in again";
  ExpectFinding(
      facts, "memlock", Verdict::kSlow,
      "ckptd (pid 4711) may lock 8 MiB of the 16 GiB that network cards pin: slots cannot be "
      "registered with network cards and drives",
      kMend);
  // Each card pins all of it for itself.
  facts.limits.memlock_bytes = facts.daemon.memory_bytes_max;
  EXPECT_EQ(Find(facts, "memlock").verdict, Verdict::kOk);
  facts.rdma_devices = {"mlx5_0", "mlx5_1"};
  EXPECT_EQ(Find(facts, "memlock").verdict, Verdict::kSlow);
  EXPECT_NE(Find(facts, "memlock").text.find("(each of 2 for itself)"), std::string::npos);
  facts.limits.memlock_bytes *= 2;
  EXPECT_EQ(Find(facts, "memlock").verdict, Verdict::kOk);
  facts.rdma_devices = {"mlx5_0"};
  facts.limits.memlock_bytes = 8 << 20;
  facts.limits.may_lock_all = true;
  EXPECT_EQ(Find(facts, "memlock").verdict, Verdict::kOk);
  facts.limits.open_files = 1024;
  ExpectFinding(facts, "open files", Verdict::kSlow,
                "ckptd (pid 4711) may open 1024: enough for a few hundred ranks only",
                "ulimit -n 65536   (systemd: LimitNOFILE=65536), then start ckptd again");
}

TEST(Evaluate, Logout) {
  Facts facts = GoodFacts();
  EXPECT_EQ(Find(facts, "logout").text, "(no such finding)");
  facts.logout = {.logind = true, .removes_ipc = true, .uid = 1000, .user = "o'neill"};
  ExpectFinding(facts, "logout", Verdict::kBroken,
                "when the last session of o'neill ends, systemd-logind removes the checkpoints "
                "(RemoveIPC=yes)",
                "loginctl enable-linger 'o'\\''neill'");
  facts.memory_dir = "/dev/shm/holdfast-1000";
  EXPECT_EQ(Find(facts, "logout").verdict, Verdict::kBroken);
  for (const char* elsewhere : {"/mnt/slots", "/dev/shmoo/slots"}) {
    facts.memory_dir = elsewhere;
    EXPECT_EQ(Find(facts, "logout").text, "(no such finding)") << elsewhere;
  }
  facts.memory_dir = "/dev/shm";
  facts.logout.lingers = true;
  ExpectFinding(facts, "logout", Verdict::kOk, "checkpoints stay when o'neill logs out (lingering)",
                "");
  facts.logout.lingers = false;
  facts.logout.removes_ipc = false;
  ExpectFinding(facts, "logout", Verdict::kOk, "checkpoints stay when you log out (RemoveIPC=no)",
                "");
  facts.logout.removes_ipc = true;
  facts.logout.uid = 999;
  EXPECT_EQ(Find(facts, "logout").text, "(no such finding)");
  facts.logout.uid = 1000;
  facts.logout.logind = false;
  EXPECT_EQ(Find(facts, "logout").text, "(no such finding)");
}

TEST(RemovesIpc, IsOnUnlessTheLastWordIsNo) {
  EXPECT_TRUE(RemovesIpc({}));
  EXPECT_TRUE(RemovesIpc({"", "[Login]\n#RemoveIPC=no\n;RemoveIPC=no\n"}));
  EXPECT_FALSE(RemovesIpc({"[Login]\nRemoveIPC=no\n"}));
  EXPECT_FALSE(RemovesIpc({"[Login]\n RemoveIPC = Off \n[Other]\nRemoveIPC=yes"}));
  EXPECT_TRUE(RemovesIpc({"[Other]\nRemoveIPC=no\n"}));
  EXPECT_TRUE(RemovesIpc({"RemoveIPC=no\n"}));
  EXPECT_TRUE(RemovesIpc({"[Login]\nRemoveIPC=no\n", "[Login]\nRemoveIPC=yes\n"}));
  EXPECT_FALSE(RemovesIpc({"[Login]\nRemoveIPC=yes\n", "[Login]\nRemoveIPC=0\n"}));
  EXPECT_TRUE(RemovesIpc({"[Login]\nRemoveIPC\nRemoveIPC=\nRemoveIPC=perhaps"}));
}

TEST(Evaluate, Fabric) {
  Facts facts = GoodFacts();
  facts.fabric_providers = {"shm", "tcp"};
  ExpectFinding(facts, "fabric", Verdict::kSlow,
                "there are RDMA devices (mlx5_0), but libfabric offers no verbs: shm, tcp",
                "sudo apt install rdma-core ibverbs-providers");
  facts.rdma_devices.clear();
  ExpectFinding(facts, "fabric", Verdict::kOk,
                "tcp (no RDMA device here); libfabric offers shm, tcp", "");
  facts.fabric_providers.clear();
  ExpectFinding(facts, "fabric", Verdict::kSlow,
                "libfabric offers nothing: one node works, copies between nodes need tcp or verbs",
                "sudo apt install libfabric1");
}

TEST(Evaluate, Config) {
  Facts facts = GoodFacts();
  facts.config_path = "/etc/holdfast/ckptd.yaml";
  EXPECT_EQ(Find(facts, "config").text, "/etc/holdfast/ckptd.yaml is understood");
  facts.config = absl::InvalidArgumentError("ckptd.yaml:4: memory.byte_max: unknown setting");
  ExpectFinding(facts, "config", Verdict::kBroken, "ckptd.yaml:4: memory.byte_max: unknown setting",
                "sudoedit /etc/holdfast/ckptd.yaml");
}

TEST(Evaluate, Sockets) {
  Facts facts = GoodFacts();
  facts.sockets[0].may_connect = false;
  ExpectFinding(facts, "admin socket", Verdict::kBroken,
                "you may not connect to /run/holdfast/admin.sock",
                "sudo chmod 0666 /run/holdfast/admin.sock   (jobs are told apart by user)");
  facts.sockets[0].is_socket = false;
  EXPECT_EQ(Find(facts, "admin socket").text, "/run/holdfast/admin.sock is not a socket");
  facts.sockets[0].directory_open_to_all = true;
  ExpectFinding(facts, "admin socket", Verdict::kBroken,
                "anybody may replace /run/holdfast/admin.sock: everyone may write to its directory",
                "sudo chmod o-w /run/holdfast");
}

TEST(Evaluate, DaemonNotReachable) {
  Facts facts = GoodFacts();
  facts.daemon = DaemonFacts();
  facts.daemon.reachable = absl::UnavailableError("nobody listens at /run/holdfast/admin.sock");
  ExpectFinding(facts, "daemon", Verdict::kBroken, "nobody listens at /run/holdfast/admin.sock",
                "ckptd   (as a service: sudo systemctl start ckptd)");
  EXPECT_EQ(Find(facts, "budget").text, "(no such finding)");
}

TEST(Evaluate, DaemonUnwell) {
  Facts facts = GoodFacts();
  facts.daemon.health = absl::FailedPreconditionError("not serving");
  EXPECT_EQ(Find(facts, "daemon").text, "answers, but is not well: not serving");
  EXPECT_EQ(Find(facts, "daemon").verdict, Verdict::kBroken);
  facts.daemon.health = absl::OkStatus();
  facts.daemon.status_call = absl::InternalError("no status");
  EXPECT_EQ(Find(facts, "daemon").text, "answers, but is not well: no status");
}

TEST(Evaluate, BudgetThatCannotBeHad) {
  Facts facts = GoodFacts();
  facts.daemon.memory_bytes_free_in_tmpfs = 4 * kGiB;
  ExpectFinding(
      facts, "budget", Verdict::kBroken,
      "memory.bytes_max is 16 GiB, but only 6 GiB can be had: saves will be refused before the "
      "budget is used",
      "free or enlarge the tmpfs (above), or lower memory.bytes_max in /etc/holdfast/ckptd.yaml");
  facts.daemon.memory_bytes_used = UINT64_MAX;  // nonsense must not wrap around
  EXPECT_EQ(Find(facts, "budget").verdict, Verdict::kOk);
}

TEST(Evaluate, QuarantineAndProblems) {
  Facts facts = GoodFacts();
  facts.daemon.slots_quarantined = 1;
  facts.daemon.problems = {"catalog was rebuilt", "another"};
  EXPECT_EQ(Find(facts, "quarantine").text,
            "1 slot waits for a process that let go of its connection but still lives");
  EXPECT_EQ(Find(facts, "problems").text,
            "the daemon reports 2 problems, first: catalog was rebuilt");
}

TEST(Evaluate, Certificates) {
  Facts facts = GoodFacts();
  facts.certificates = {{"cluster.tls", false, ""},
                        {"admin.tls", false, "it is good until soon"},
                        {"status_page.tls", true, "it was good until then"}};
  EXPECT_EQ(Find(facts, "cluster.tls").verdict, Verdict::kOk);
  EXPECT_EQ(Find(facts, "admin.tls").verdict, Verdict::kSlow);
  EXPECT_EQ(Find(facts, "admin.tls").text, "it is good until soon");
  EXPECT_EQ(Find(facts, "status_page.tls").verdict, Verdict::kBroken);
  EXPECT_NE(Find(facts, "status_page.tls").mend, "");
}

TEST(RenderFindings, OneLineEachWithTheCommandBelow) {
  EXPECT_EQ(RenderFindings({{"kernel", Verdict::kOk, "Linux 6.1", ""},
                            {"swap", Verdict::kSlow, "swap is on", "sudo swapoff -a"},
                            {"daemon", Verdict::kBroken, "no socket at /\x1b", "ckptd"}}),
            "ok             kernel  Linux 6.1\n"
            "slow           swap    swap is on\n"
            "                       mend: sudo swapoff -a\n"
            "will not work  daemon  no socket at /\\x1b\n"
            "                       mend: ckptd\n"
            "\n"
            "1 ok, 1 slow, 1 will not work\n");
}

TEST(FindMount, TakesTheDeepestAndTheLatest) {
  const std::string mountinfo =
      "22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw\n"
      "30 22 0:26 / /dev rw - devtmpfs udev rw\n"
      "31 30 0:27 / /dev/shm rw,nosuid shared:4 master:1 - tmpfs tmpfs rw,size=1k,huge=always\n"
      "32 30 0:28 / /dev/shmoo rw - tmpfs tmpfs rw,huge=advise\n"
      "garbage\n"
      "33 30 - tmpfs\n";
  EXPECT_EQ(FindMount(mountinfo, "/dev/shm/holdfast").mount_point, "/dev/shm");
  EXPECT_EQ(FindMount(mountinfo, "/dev/shm/holdfast").huge, "always");
  EXPECT_EQ(FindMount(mountinfo, "/dev/shm").huge, "always");
  EXPECT_EQ(FindMount(mountinfo, "/var/x").mount_point, "/");
  EXPECT_EQ(FindMount(mountinfo, "/var/x").huge, "never");
  EXPECT_EQ(FindMount(mountinfo + "40 30 0:40 / /dev/shm rw - tmpfs tmpfs rw\n", "/dev/shm/a").huge,
            "never");
  EXPECT_EQ(FindMount("", "/x").mount_point, "");
  const std::string special =
      "31 30 0:27 / /a rw - tmpfs tmpfs rw,mpol=bind:0,2-3,noswap,size=1k\n"
      "32 30 0:28 / /b rw - tmpfs tmpfs rw,size=1k,mpol=interleave\n"
      "33 30 0:29 / /c rw - tmpfs tmpfs rw,size=1k\n";
  EXPECT_EQ(FindMount(special, "/a").mpol, "bind:0,2-3");
  EXPECT_TRUE(FindMount(special, "/a").noswap);
  EXPECT_EQ(FindMount(special, "/b").mpol, "interleave");
  EXPECT_FALSE(FindMount(special, "/b").noswap);
  EXPECT_EQ(FindMount(special, "/c").mpol, "");
}

TEST(ChosenWord, IsTheOneInBrackets) {
  EXPECT_EQ(ChosenWord("always within_size advise [never] deny force\n"), "never");
  EXPECT_EQ(ChosenWord("[always]"), "always");
  EXPECT_EQ(ChosenWord("never"), "");
  EXPECT_EQ(ChosenWord("]["), "");
  EXPECT_EQ(ChosenWord(""), "");
}

}  // namespace
}  // namespace holdfast
