#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "base/units.h"
#include "ckptctl/doctor.h"
#include "ckptctl/doctor_findings.h"
#include "ckptctl/render.h"

namespace holdfast {
namespace {

constexpr uint64_t kTmpfsUsefulMin = 256 * kMiB;  // containers get 64 MiB unless told otherwise
constexpr uint64_t kOpenFilesMin = 8192;          // connections_max and as many again for slots
constexpr uint32_t kFirstUserUid = 1000;          // those below are the system's

std::string Limit(uint64_t bytes) {
  return bytes == kUnlimited ? "unlimited" : FormatBytes(bytes);
}

bool AtLeast(const std::string& release, int major, int minor) {
  int has_major = 0;
  int has_minor = 0;
  if (std::sscanf(release.c_str(), "%d.%d", &has_major, &has_minor) != 2) {
    return true;  // what matters of it is probed anyway
  }
  return has_major > major || (has_major == major && has_minor >= minor);
}

void Kernel(const Facts& facts, Findings& findings) {
  const std::string newer = "sudo apt install linux-image-amd64 && sudo reboot";
  if (AtLeast(facts.kernel_release, 5, 14)) {
    Add(findings, "kernel", Verdict::kOk, absl::StrCat("Linux ", facts.kernel_release));
  } else if (AtLeast(facts.kernel_release, 5, 3)) {
    Add(findings, "kernel", Verdict::kSlow,
        absl::StrCat("Linux ", facts.kernel_release,
                     " prepares memory page by page; 5.14 and newer do it in one call"),
        newer);
  } else {
    Add(findings, "kernel", Verdict::kBroken,
        absl::StrCat("Linux ", facts.kernel_release,
                     " cannot watch processes by descriptor; 5.3 or newer is needed"),
        newer);
  }
  if (facts.pidfd_error == 0) {
    Add(findings, "pidfd", Verdict::kOk, "ckptd can tell when a training process is gone");
  } else {
    Add(findings, "pidfd", Verdict::kBroken,
        absl::StrCat("pidfd_open: ", std::strerror(facts.pidfd_error),
                     ": ckptd cannot tell when a process is gone"),
        facts.pidfd_error == EPERM ? "docker run --security-opt seccomp=unconfined …" : newer);
  }
  if (facts.populate_error == 0) {
    Add(findings, "populate", Verdict::kOk,
        "memory is made ready ahead in one call (MADV_POPULATE_WRITE)");
  } else {
    Add(findings, "populate", Verdict::kSlow,
        absl::StrCat("MADV_POPULATE_WRITE: ", std::strerror(facts.populate_error),
                     ": memory is made ready page by page"),
        newer);
  }
}

void IoUring(const Facts& facts, Findings& findings) {
  if (facts.io_uring_error == 0) {
    Add(findings, "io_uring", Verdict::kOk, "available");
    return;
  }
  // EPERM: the sysctl of kernels since 6.6, or a container's filter. ENOSYS: older kernel, or such
  // a filter.
  const std::string mend = facts.io_uring_error == EPERM
                               ? "sudo sysctl -w kernel.io_uring_disabled=0   (in a container: "
                                 "--security-opt seccomp=unconfined)"
                               : "sudo apt install linux-image-amd64 && sudo reboot";
  Add(findings, "io_uring", Verdict::kSlow,
      absl::StrCat("io_uring_setup: ", std::strerror(facts.io_uring_error),
                   ": drives are written by threads, which costs more of the CPU"),
      mend);
}

void Copy(const Facts& facts, Findings& findings) {
  if (facts.copy_kernel != "portable") {
    Add(findings, "copy", Verdict::kOk,
        absl::StrCat("copies and digests with the ", facts.copy_kernel, " kernel"));
    return;
  }
  Add(findings, "copy", Verdict::kSlow,
      facts.x86 ? "the CPU shows no AVX2 with carry-less multiplication: saves copy and digest in "
                  "two passes"
                : "no kernel of its own for this CPU: saves copy and digest in two passes",
      facts.x86 ? "in a virtual machine, pass the host's CPU through: qemu … -cpu host" : "");
}

void TmpfsSize(const TmpfsFacts& fs, const Facts& facts, Findings& findings) {
  const std::string check = absl::StrCat("tmpfs ", fs.path);
  const std::string remount =
      absl::StrCat("sudo mount -o remount,size=50% ", QuoteForShell(fs.mount_point),
                   "   (in a container: docker run --shm-size=…)");
  if (!fs.status.ok()) {
    Add(findings, check, Verdict::kBroken, Message(fs.status),
        "sudo mount -t tmpfs tmpfs /dev/shm");
    return;
  }
  if (fs.type != "tmpfs") {
    Add(findings, check, Verdict::kBroken,
        absl::StrCat("lies on ", fs.type, ", not on tmpfs: each save would go to a disk"),
        "set memory.dir in /etc/holdfast/ckptd.yaml to a directory below /dev/shm");
    return;
  }
  const std::string size =
      absl::StrCat(FormatBytes(fs.bytes_total), ", ", FormatBytes(fs.bytes_free), " of it free");
  if (fs.bytes_total < kTmpfsUsefulMin) {
    Add(findings, check, Verdict::kBroken, absl::StrCat(size, ": too small for checkpoints"),
        remount);
  } else if (facts.ram_bytes != 0 && fs.bytes_total > facts.ram_bytes) {
    Add(findings, check, Verdict::kBroken,
        absl::StrCat(size, ", but the machine has ", FormatBytes(facts.ram_bytes),
                     " of memory: filling it makes the kernel kill processes"),
        remount);
  } else {
    Add(findings, check, Verdict::kOk, size);
  }
}

void HugePages(const TmpfsFacts& fs, const Facts& facts, Findings& findings) {
  if (!fs.status.ok() || fs.type != "tmpfs") {
    return;
  }
  const std::string check = absl::StrCat("huge pages ", fs.path);
  const bool denied = facts.shmem_huge == "deny";
  const bool on = facts.shmem_huge == "force" || fs.huge == "always" || fs.huge == "within_size" ||
                  fs.huge == "advise";
  if (on && !denied) {
    Add(findings, check, Verdict::kOk,
        facts.shmem_huge == "force" ? "forced by the machine's setting"
                                    : absl::StrCat("the mount has huge=", fs.huge));
    return;
  }
  std::string mend =
      absl::StrCat("sudo mount -o remount,huge=within_size ", QuoteForShell(fs.mount_point));
  if (denied) {
    mend = "echo never | sudo tee /sys/kernel/mm/transparent_hugepage/shmem_enabled && " + mend;
  }
  Add(findings, check, Verdict::kSlow,
      absl::StrCat(
          denied ? "denied by the machine's setting" : absl::StrCat("the mount has huge=", fs.huge),
          ": making memory ready takes several times as long"),
      mend);
}

void Limits(const Facts& facts, Findings& findings) {
  const LimitFacts& limits = facts.limits;
  // Each network card pins slots for itself, and the kernel counts each time.
  const uint64_t wanted = std::max<uint64_t>(facts.daemon.memory_bytes_max, kGiB) *
                          std::max<size_t>(facts.rdma_devices.size(), 1);
  if (limits.may_lock_all || limits.memlock_bytes >= wanted) {
    Add(findings, "memlock", Verdict::kOk,
        limits.may_lock_all ? absl::StrCat(limits.of, " may lock any amount (CAP_IPC_LOCK)")
                            : absl::StrCat(limits.of, " may lock ", Limit(limits.memlock_bytes)));
  } else {
    Add(findings, "memlock", Verdict::kSlow,
        absl::StrCat(limits.of, " may lock ", Limit(limits.memlock_bytes), " of the ",
                     FormatBytes(wanted), " that network cards pin",
                     facts.rdma_devices.size() > 1
                         ? absl::StrCat(" (each of ", facts.rdma_devices.size(), " for itself)")
                         : "",
                     ": slots cannot be registered with network cards and drives"),
        "printf '* - memlock unlimited\\n' | sudo tee /etc/security/limits.d/holdfast.conf   "
        "(systemd: "
        "LimitMEMLOCK=infinity), then log in again");
  }
  if (limits.open_files >= kOpenFilesMin) {
    Add(findings, "open files", Verdict::kOk,
        absl::StrCat(
            limits.of, " may open ",
            limits.open_files == kUnlimited ? "any number" : absl::StrCat(limits.open_files)));
  } else {
    Add(findings, "open files", Verdict::kSlow,
        absl::StrCat(limits.of, " may open ", limits.open_files,
                     ": enough for a few hundred ranks only"),
        absl::StrCat("ulimit -n ", kOpenFilesMin * 8,
                     "   (systemd: LimitNOFILE=", kOpenFilesMin * 8, "), then start ckptd again"));
  }
}

void Logout(const Facts& facts, Findings& findings) {
  const LogoutFacts& logout = facts.logout;
  const bool shared = facts.memory_dir.empty() || facts.memory_dir == kSharedMemory ||
                      absl::StartsWith(facts.memory_dir, absl::StrCat(kSharedMemory, "/"));
  if (!logout.logind || !shared || logout.uid < kFirstUserUid) {
    return;  // system users keep their files
  }
  if (logout.removes_ipc && !logout.lingers) {
    Add(findings, "logout", Verdict::kBroken,
        absl::StrCat("when the last session of ", logout.user,
                     " ends, systemd-logind removes the checkpoints (RemoveIPC=yes)"),
        absl::StrCat("loginctl enable-linger ", QuoteForShell(logout.user)));
  } else {
    Add(findings, "logout", Verdict::kOk,
        logout.lingers
            ? absl::StrCat("checkpoints stay when ", logout.user, " logs out (lingering)")
            : "checkpoints stay when you log out (RemoveIPC=no)");
  }
}

void Fabric(const Facts& facts, Findings& findings) {
  const auto has = [&](std::string_view part) {
    return std::any_of(
        facts.fabric_providers.begin(), facts.fabric_providers.end(),
        [&](const std::string& name) { return name.find(part) != std::string::npos; });
  };
  const std::string all = absl::StrJoin(facts.fabric_providers, ", ");
  const std::string verbs = "sudo apt install rdma-core ibverbs-providers";
  if (has("verbs")) {
    Add(findings, "fabric", Verdict::kOk, absl::StrCat("RDMA by verbs; libfabric offers ", all));
  } else if (!facts.rdma_devices.empty()) {
    Add(findings, "fabric", Verdict::kSlow,
        absl::StrCat(
            "there are RDMA devices (", absl::StrJoin(facts.rdma_devices, ", "),
            "), but libfabric offers no verbs: ", facts.fabric_providers.empty() ? "nothing" : all),
        verbs);
  } else if (has("tcp")) {
    Add(findings, "fabric", Verdict::kOk,
        absl::StrCat("tcp (no RDMA device here); libfabric offers ", all));
  } else {
    Add(findings, "fabric", Verdict::kSlow,
        absl::StrCat("libfabric offers ", facts.fabric_providers.empty() ? "nothing" : all,
                     ": one node works, copies between nodes need tcp or verbs"),
        "sudo apt install libfabric1");
  }
}

void Config(const Facts& facts, Findings& findings) {
  if (facts.config_path.empty()) {
    Add(findings, "config", Verdict::kOk, "no file: ckptd's defaults");
  } else if (facts.config.ok()) {
    Add(findings, "config", Verdict::kOk, absl::StrCat(facts.config_path, " is understood"));
  } else {
    Add(findings, "config", Verdict::kBroken, Message(facts.config),
        absl::StrCat("sudoedit ", QuoteForShell(facts.config_path)));
  }
}

void Sockets(const Facts& facts, Findings& findings) {
  for (const SocketFacts& s : facts.sockets) {
    if (!s.exists) {
      continue;  // the daemon's line says what that means
    }
    if (s.directory_open_to_all) {
      Add(findings, s.what, Verdict::kBroken,
          absl::StrCat("anybody may replace ", s.path, ": everyone may write to its directory"),
          absl::StrCat("sudo chmod o-w ", QuoteForShell(s.directory)));
    } else if (!s.is_socket) {
      Add(findings, s.what, Verdict::kBroken, absl::StrCat(s.path, " is not a socket"),
          absl::StrCat("sudo rm ", QuoteForShell(s.path), ", then start ckptd again"));
    } else if (!s.may_connect) {
      Add(findings, s.what, Verdict::kBroken, absl::StrCat("you may not connect to ", s.path),
          absl::StrCat("sudo chmod 0666 ", QuoteForShell(s.path),
                       "   (jobs are told apart by user)"));
    } else {
      Add(findings, s.what, Verdict::kOk, s.path);
    }
  }
}

void Certificates(const Facts& facts, Findings& findings) {
  for (const TlsWord& word : facts.certificates) {
    if (word.text.empty()) {
      Add(findings, word.setting, Verdict::kOk,
          "its certificates are valid, and for longer than two weeks");
    } else {
      Add(findings, word.setting, word.bad ? Verdict::kBroken : Verdict::kSlow, word.text,
          "put new files in place of the old ones; ckptd reads them without a restart");
    }
  }
}

void Daemon(const Facts& facts, Findings& findings) {
  const DaemonFacts& d = facts.daemon;
  if (!d.reachable.ok()) {
    Add(findings, "daemon", Verdict::kBroken, Message(d.reachable),
        "ckptd   (as a service: sudo systemctl start ckptd)");
    return;
  }
  for (const absl::Status& status : {d.health, d.status_call}) {
    if (!status.ok()) {
      Add(findings, "daemon", Verdict::kBroken,
          absl::StrCat("answers, but is not well: ", Message(status)),
          "look into its log; then: sudo systemctl restart ckptd   (what was sealed is kept)");
      return;
    }
  }
  Add(findings, "daemon", Verdict::kOk,
      absl::StrCat("ckptd ", d.version, ", pid ", d.pid, ", is serving at ", d.socket));
  const uint64_t reachable_bytes = d.memory_bytes_free_in_tmpfs > UINT64_MAX - d.memory_bytes_used
                                       ? UINT64_MAX
                                       : d.memory_bytes_used + d.memory_bytes_free_in_tmpfs;
  if (d.memory_bytes_max > reachable_bytes) {
    Add(findings, "budget", Verdict::kBroken,
        absl::StrCat("memory.bytes_max is ", FormatBytes(d.memory_bytes_max), ", but only ",
                     FormatBytes(reachable_bytes),
                     " can be had: saves will be refused before the budget is used"),
        "free or enlarge the tmpfs (above), or lower memory.bytes_max in /etc/holdfast/ckptd.yaml");
  } else {
    Add(findings, "budget", Verdict::kOk,
        absl::StrCat(FormatBytes(d.memory_bytes_max), " for checkpoints, ",
                     FormatBytes(d.memory_bytes_used), " in use"));
  }
  if (d.slots_quarantined != 0) {
    Add(findings, "quarantine", Verdict::kSlow,
        absl::StrCat(Count(d.slots_quarantined, "slot waits", "slots wait"),
                     " for a process that let go of its connection but still lives"),
        "ckptctl status   (then end the job's left-over processes)");
  }
  if (!d.problems.empty()) {
    Add(findings, "problems", Verdict::kSlow,
        absl::StrCat("the daemon reports ", Count(d.problems.size(), "problem", "problems"),
                     ", first: ", d.problems.front()),
        "ckptctl status");
  }
}

}  // namespace

std::string_view VerdictText(Verdict verdict) {
  return verdict == Verdict::kOk ? "ok" : verdict == Verdict::kSlow ? "slow" : "will not work";
}

std::string_view VerdictId(Verdict verdict) {
  return verdict == Verdict::kOk ? "ok" : verdict == Verdict::kSlow ? "slow" : "will_not_work";
}

std::string QuoteForShell(const std::string& word) {
  const bool plain = !word.empty() && word.find_first_not_of(
                                          "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                                          "0123456789/._-+:=@") == std::string::npos;
  return plain ? word : absl::StrCat("'", absl::StrJoin(absl::StrSplit(word, '\''), "'\\''"), "'");
}

std::vector<Finding> Evaluate(const Facts& facts) {
  Findings findings;
  Kernel(facts, findings);
  IoUring(facts, findings);
  Copy(facts, findings);
  for (const TmpfsFacts& fs : facts.tmpfs) {
    TmpfsSize(fs, facts, findings);
    HugePages(fs, facts, findings);
  }
  EvaluateTiers(facts, findings);
  EvaluateMemory(facts, findings);
  Limits(facts, findings);
  Logout(facts, findings);
  Fabric(facts, findings);
  Config(facts, findings);
  Certificates(facts, findings);
  Sockets(facts, findings);
  Daemon(facts, findings);
  return findings;
}

}  // namespace holdfast
