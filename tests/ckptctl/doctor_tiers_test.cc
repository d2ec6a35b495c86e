// What doctor finds out about the directories of durable tiers, and what it says of them.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "base/unique_fd.h"
#include "ckptctl/doctor.h"
#include "ckptctl/tier_probe.h"

namespace holdfast {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;

constexpr uint64_t kGiB = uint64_t{1} << 30;

class Directory {
 public:
  Directory() { EXPECT_NE(::mkdtemp(path_), nullptr); }
  ~Directory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  std::string path() const { return path_; }
  std::vector<std::string> Names() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(path_)) {
      names.push_back(entry.path().filename());
    }
    return names;
  }

 private:
  char path_[32] = "/tmp/holdfast-probe-XXXXXX";
};

TEST(ProbeDirectories, TriesEverythingAndLeavesNothing) {
  const Directory good;
  const Directory other;
  std::ofstream(other.path() + "/file") << "x";
  const auto probes = ProbeDirectories(
      {good.path(), other.path() + "/none", other.path() + "/file", good.path(), "/proc/self"},
      std::chrono::seconds(30));
  ASSERT_EQ(probes.size(), 5u);
  for (const DirectoryProbe& probe : probes) {
    EXPECT_EQ(probe.start_error, 0);
    EXPECT_EQ(probe.stuck_in, "") << probe.dir;
  }
  EXPECT_EQ(probes[0].dir, good.path());
  EXPECT_TRUE(probes[0].is_directory);
  EXPECT_EQ(probes[0].look_error, 0);
  EXPECT_EQ(probes[0].write_error, 0);
  EXPECT_EQ(probes[0].link_error, 0);
  EXPECT_GT(probes[0].bytes_total, 0u);
  EXPECT_EQ(probes[1].look_error, ENOENT);
  EXPECT_FALSE(probes[2].is_directory);
  EXPECT_EQ(probes[3].write_error, 0) << "the same directory twice";
  EXPECT_NE(probes[4].write_error, 0) << "no files can be made in /proc";
  EXPECT_THAT(good.Names(), IsEmpty());
}

// A file system whose server never answers, as a hung mount is: FUSE, and nobody reads its device.
class HungMount {
 public:
  HungMount() {
    device_.reset(::open("/dev/fuse", O_RDWR | O_CLOEXEC));
    // In a mount namespace of this thread's own, which ends with the test whatever happens.
    if (!device_.valid() || ::unshare(CLONE_NEWNS) != 0 ||
        ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) {
      return;
    }
    const std::string options =
        absl::StrCat("fd=", device_.get(), ",rootmode=40000,user_id=0,group_id=0");
    mounted_ = ::mount("hung", directory_.path().c_str(), "fuse", 0, options.c_str()) == 0;
  }
  ~HungMount() {
    device_.reset();  // what waits in it fails now
    if (mounted_) {
      ::umount2(directory_.path().c_str(), MNT_DETACH);
    }
  }
  bool mounted() const { return mounted_; }
  std::string path() const { return directory_.path(); }

 private:
  Directory directory_;
  UniqueFd device_;
  bool mounted_ = false;
};

TEST(ProbeDirectories, AHungMountIsNotWaitedFor) {
  const HungMount hung;
  if (!hung.mounted()) {
    GTEST_SKIP() << "needs root and /dev/fuse";
  }
  const Directory good;
  // The hung one would take for ever; the good one may take its time on a busy machine.
  std::chrono::seconds wait(1);
  auto probes = ProbeDirectories({hung.path(), good.path()}, wait);
  for (; !probes[1].stuck_in.empty() && wait < std::chrono::seconds(60); wait *= 2) {
    probes = ProbeDirectories({hung.path(), good.path()}, wait);
  }
  EXPECT_EQ(probes[0].stuck_in, "stat");
  EXPECT_EQ(probes[1].stuck_in, "");
  EXPECT_EQ(probes[1].write_error, 0);
  // Nor by anything else that doctor looks at.
  const std::string file = good.path() + "/ckptd.yaml";
  std::ofstream(file) << "remote:\n  dir: " << hung.path() << "/inner\n";
  Context context;
  context.socket = "/nonexistent/admin.sock";
  const Facts facts = CollectFacts(context, {.config = file});
  ASSERT_EQ(facts.tier_dirs.size(), 1u);
  EXPECT_EQ(facts.tier_dirs[0].probe.stuck_in, "stat");
  EXPECT_EQ(facts.tier_dirs[0].fs_type, "fuse");
}

TierDirFacts Dir(const std::string& tier, const std::string& type) {
  TierDirFacts dir;
  dir.tier = tier;
  dir.probe.dir = "/mnt/x";
  dir.probe.is_directory = true;
  dir.probe.bytes_total = 100 * kGiB;
  dir.probe.bytes_free = 60 * kGiB;
  dir.fs_type = type;
  dir.mount_point = "/mnt/x";
  return dir;
}

Facts With(TierDirFacts dir) {
  Facts facts;
  facts.logout.user = "root";
  facts.tier_dirs.push_back(std::move(dir));
  return facts;
}

void Expect(const Facts& facts, const std::string& check, Verdict verdict, const std::string& text,
            const std::string& mend) {
  std::vector<Finding> findings;
  EvaluateTiers(facts, findings);
  const auto it = std::find_if(findings.begin(), findings.end(),
                               [&](const Finding& f) { return f.check == check; });
  ASSERT_NE(it, findings.end()) << check;
  EXPECT_EQ(VerdictText(it->verdict), VerdictText(verdict)) << it->text;
  EXPECT_EQ(it->text, text);
  EXPECT_EQ(it->mend, mend);
}

TEST(EvaluateTiers, WhatIsWell) {
  Expect(With(Dir("nvme", "xfs")), "nvme /mnt/x", Verdict::kOk,
         "xfs at /mnt/x, 60 GiB of 100 GiB free, O_DIRECT works", "");
  Expect(With(Dir("remote", "lustre")), "remote /mnt/x", Verdict::kOk,
         "lustre at /mnt/x, 60 GiB of 100 GiB free, hard links work", "");
  Expect(With(Dir("remote", "ext4")), "remote /mnt/x", Verdict::kOk,
         "ext4 at /mnt/x, 60 GiB of 100 GiB free, hard links work; a file system of this node "
         "alone: it dies with the node",
         "");
  Expect(Facts(), "tiers", Verdict::kOk,
         "memory only: a reboot loses every checkpoint (nvme.dirs and remote.dir are not set)", "");
}

TEST(EvaluateTiers, Hung) {
  TierDirFacts dir = Dir("remote", "nfs4");
  dir.probe.stuck_in = "stat";
  Expect(With(dir), "remote /mnt/x", Verdict::kBroken,
         "hangs: stat did not return, nfs4 at /mnt/x; saves and other tiers go on without it",
         "dmesg | tail   (is the file system's server up, is the network?)");
}

TEST(EvaluateTiers, NotThere) {
  TierDirFacts dir = Dir("nvme", "ext4");
  dir.mount_point = "/";
  dir.probe.look_error = ENOENT;
  Expect(With(dir), "nvme /mnt/x", Verdict::kSlow,
         "is not there: ckptd would make it, on ext4 at /",
         "mount the drive that belongs there, or: sudo mkdir -p -m 0700 /mnt/x");
  dir.tier = "remote";
  Expect(With(dir), "remote /mnt/x", Verdict::kBroken,
         "is not there; what exists above it is ext4 at /",
         "mount the file system that belongs there, or: sudo mkdir -p /mnt/x");
  dir.probe.look_error = ESTALE;
  Expect(With(dir), "remote /mnt/x", Verdict::kBroken, "cannot be looked at: Stale file handle",
         "dmesg | tail   (is the file system's server up, is the network?)");
  dir.probe.look_error = 0;
  dir.probe.is_directory = false;
  Expect(With(dir), "remote /mnt/x", Verdict::kBroken, "is not a directory",
         "set remote.dir in /etc/holdfast/ckptd.yaml to one");
}

TEST(EvaluateTiers, WhatCannotBe) {
  TierDirFacts dir = Dir("remote", "ext4");
  dir.probe.look_error = ENOTDIR;
  Facts facts = With(dir);
  facts.config_path = "/home/me/my settings.yaml";
  Expect(facts, "remote /mnt/x", Verdict::kBroken, "cannot be: a file lies on the way to it",
         "set remote.dir in '/home/me/my settings.yaml' to a directory, or move the file away");
  dir.probe.look_error = EACCES;
  Expect(With(dir), "remote /mnt/x", Verdict::kBroken, "cannot be looked at: Permission denied",
         "namei -l /mnt/x   (who may enter the directories on the way)");
  facts = With(dir);
  facts.is_daemons_user = false;
  Expect(facts, "remote /mnt/x", Verdict::kOk, "only others may look at it: Permission denied", "");
  dir.probe.look_error = ENOENT;
  dir.probe.dir = "relative";
  Expect(With(dir), "remote relative", Verdict::kBroken,
         "is not an absolute path: ckptd does not start with it",
         "set remote.dir in /etc/holdfast/ckptd.yaml to one, which begins with a slash");
  dir = Dir("nvme", "proc");
  Expect(With(dir), "nvme /mnt/x", Verdict::kBroken, "lies on proc, which takes no files",
         "set nvme.dirs in /etc/holdfast/ckptd.yaml to a directory on a drive or a shared file "
         "system");
}

// An empty mount point is a directory of the system's disk.
TEST(EvaluateTiers, ARemoteDirectoryOnTheSystemsDiskIsNotOk) {
  TierDirFacts dir = Dir("remote", "ext4");
  dir.mount_point = "/";
  Expect(With(dir), "remote /mnt/x", Verdict::kSlow,
         "ext4 at /, 60 GiB of 100 GiB free; the system's own disk: its mount is missing, or it "
         "dies with the node",
         "mount the file system that belongs there, or set remote.dir in /etc/holdfast/ckptd.yaml "
         "to a directory on one that other nodes mount");
  dir.fs_type = "nfs4";  // a node without disks
  Expect(With(dir), "remote /mnt/x", Verdict::kOk,
         "nfs4 at /, 60 GiB of 100 GiB free, hard links work", "");
}

TEST(EvaluateTiers, NotWritable) {
  TierDirFacts dir = Dir("nvme", "xfs");
  dir.probe.dir = "/mnt/my drive";
  dir.probe.write_error = EACCES;
  Facts facts = With(dir);
  Expect(facts, "nvme /mnt/my drive", Verdict::kBroken,
         "cannot be written to (Permission denied), xfs at /mnt/x",
         "sudo chown root '/mnt/my drive'");
  facts.is_daemons_user = false;
  Expect(facts, "nvme /mnt/my drive", Verdict::kOk,
         "xfs at /mnt/x; only root may write there, so writing was not tried", "");
  facts.tier_dirs[0].probe.write_error = EROFS;
  Expect(facts, "nvme /mnt/my drive", Verdict::kBroken,
         "cannot be written to (Read-only file system), xfs at /mnt/x",
         "dmesg | tail   (why it is read-only); then: sudo mount -o remount,rw /mnt/x");
  facts.tier_dirs[0].probe.write_error = ENOSPC;
  Expect(facts, "nvme /mnt/my drive", Verdict::kBroken,
         "cannot be written to (No space left on device), xfs at /mnt/x",
         "df -h '/mnt/my drive'   (free some; ckptctl gc --dry-run says what ckptd keeps and why)");
  facts.tier_dirs[0].probe.write_error = EIO;
  Expect(facts, "nvme /mnt/my drive", Verdict::kBroken,
         "cannot be written to (Input/output error), xfs at /mnt/x",
         "dmesg | tail   (what the drive or the file system's client says)");
}

TEST(EvaluateTiers, WhatAFileSystemLacks) {
  Expect(With(Dir("nvme", "tmpfs")), "nvme /mnt/x", Verdict::kBroken,
         "lies on tmpfs: what is there is gone after a reboot",
         "set nvme.dirs in /etc/holdfast/ckptd.yaml to a directory on a drive");
  TierDirFacts dir = Dir("nvme", "zfs");
  dir.probe.direct_error = EINVAL;
  Expect(With(dir), "nvme /mnt/x", Verdict::kSlow,
         "zfs at /mnt/x, 60 GiB of 100 GiB free; no O_DIRECT (Invalid argument): each byte goes "
         "through the page cache",
         "set nvme.dirs in /etc/holdfast/ckptd.yaml to directories on ext4 or xfs");
  dir = Dir("remote", "fuse.sshfs");
  dir.probe.link_error = EPERM;
  Expect(With(dir), "remote /mnt/x", Verdict::kSlow,
         "fuse.sshfs at /mnt/x, 60 GiB of 100 GiB free; no hard links (Operation not permitted): "
         "without renameat2 either it serves one node only",
         "ckptctl status   (says whether it does)");
}

TEST(EvaluateTiers, TheDaemonsWord) {
  Facts facts;
  facts.daemon.tiers = {{.tier = "nvme", .state = "ok", .healthy = true, .engine = "io_uring"}};
  Expect(facts, "tier nvme", Verdict::kOk, "ckptd says: ok; io_uring", "");
  facts.daemon.tiers[0].notes = {"/mnt/a: it may serve one node only"};
  Expect(facts, "tier nvme", Verdict::kOk, "ckptd says: ok; io_uring", "");
  const std::vector<Finding> findings = Evaluate(facts);
  EXPECT_TRUE(std::any_of(findings.begin(), findings.end(), [](const Finding& finding) {
    return finding.check == "tier nvme" && finding.verdict == Verdict::kSlow &&
           finding.text == "ckptd says: /mnt/a: it may serve one node only";
  }));
  facts.daemon.tiers[0].engine = "threads";
  facts.io_uring_error = EPERM;
  Expect(facts, "tier nvme", Verdict::kSlow, "ckptd writes with threads, not with io_uring",
         "mend io_uring (above), or set nvme.engine: auto; then start ckptd again");
  facts.daemon.tiers[0] = {.tier = "remote", .state = "read-only", .stalled = 2};
  Expect(facts, "tier remote", Verdict::kBroken, "ckptd says: read-only; 2 writes get nowhere",
         "ckptctl status   (what waits for it); it goes on by itself once the fault is gone");
}

TEST(CollectFacts, FindsTheDirectoriesOfTheSettings) {
  const Directory nvme;
  const std::string file = nvme.path() + "/ckptd.yaml";
  std::ofstream(file) << "nvme:\n  dirs: [" << nvme.path() << "]\nremote:\n  dir: /nonexistent/r\n";
  Context context;
  context.socket = "/nonexistent/admin.sock";
  const Facts facts = CollectFacts(context, {.config = file});
  ASSERT_TRUE(facts.config.ok()) << facts.config;
  ASSERT_EQ(facts.tier_dirs.size(), 2u);
  EXPECT_EQ(facts.tier_dirs[0].probe.dir, nvme.path());
  EXPECT_EQ(facts.tier_dirs[0].probe.write_error, 0);
  EXPECT_FALSE(facts.tier_dirs[0].fs_type.empty());
  EXPECT_EQ(facts.tier_dirs[1].tier, "remote");
  EXPECT_EQ(facts.tier_dirs[1].probe.look_error, ENOENT);
}

TEST(DefaultConfig, AUsersOwnComesBeforeRoots) {
  const Directory home;
  std::filesystem::create_directories(home.path() + "/holdfast");
  std::ofstream(home.path() + "/holdfast/ckptd.yaml") << "";
  const char* before = std::getenv("XDG_CONFIG_HOME");
  const std::string kept = before == nullptr ? "" : before;
  ::setenv("XDG_CONFIG_HOME", home.path().c_str(), 1);
  EXPECT_EQ(DefaultConfigPath(false), home.path() + "/holdfast/ckptd.yaml");
  EXPECT_NE(DefaultConfigPath(true), home.path() + "/holdfast/ckptd.yaml");
  std::filesystem::remove(home.path() + "/holdfast/ckptd.yaml");
  EXPECT_EQ(DefaultConfigPath(false), DefaultConfigPath(true));
  kept.empty() ? ::unsetenv("XDG_CONFIG_HOME") : ::setenv("XDG_CONFIG_HOME", kept.c_str(), 1);
}

}  // namespace
}  // namespace holdfast
