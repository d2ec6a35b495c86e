// What doctor says of the durable tiers.
#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/filesystem.h"
#include "base/status.h"
#include "base/units.h"
#include "ckptctl/doctor.h"
#include "ckptctl/render.h"

namespace holdfast {
namespace {

using Findings = std::vector<Finding>;

// Of the node itself, however the directory is called.
bool DiesWithTheNode(const std::string& type) {
  constexpr std::array<const char*, 5> kLocal = {"ext4", "xfs", "btrfs", "overlay", "zfs"};
  return std::any_of(kLocal.begin(), kLocal.end(),
                     [&](const char* local) { return type == local; });
}

bool InMemory(const std::string& type) {
  return type == "tmpfs" || type == "ramfs";
}

std::string Lies(const TierDirFacts& dir) {
  return absl::StrCat(dir.fs_type.empty() ? "an unknown file system" : dir.fs_type, " at ",
                      dir.mount_point);
}

std::string SettingOf(const TierDirFacts& dir) {
  return dir.tier == "nvme" ? "nvme.dirs" : "remote.dir";
}

// "set remote.dir in /etc/holdfast/ckptd.yaml to …".
std::string SetTo(const TierDirFacts& dir, const Facts& facts, std::string_view what) {
  return absl::StrCat(
      "set ", SettingOf(dir), " in ",
      facts.config_path.empty() ? "/etc/holdfast/ckptd.yaml" : QuoteForShell(facts.config_path),
      " to ", ToAbsl(what));
}

Finding NotThere(const TierDirFacts& dir, std::string check) {
  const std::string quoted = QuoteForShell(dir.probe.dir);
  if (dir.tier == "nvme") {
    return {std::move(check), Verdict::kSlow,
            absl::StrCat("is not there: ckptd would make it, on ", Lies(dir)),
            absl::StrCat("mount the drive that belongs there, or: sudo mkdir -p -m 0700 ", quoted)};
  }
  // ckptd does not make it: it could not tell an empty file system from one that is not mounted.
  return {std::move(check), Verdict::kBroken,
          absl::StrCat("is not there; what exists above it is ", Lies(dir)),
          absl::StrCat("mount the file system that belongs there, or: sudo mkdir -p ", quoted)};
}

// A file could not be made there.
Finding NotWritable(const TierDirFacts& dir, const Facts& facts, std::string check) {
  const int error = dir.probe.write_error;
  const std::string quoted = QuoteForShell(dir.probe.dir);
  const std::string mount = QuoteForShell(dir.mount_point);
  const bool denied = error == EACCES || error == EPERM;
  if (denied && !facts.is_daemons_user) {
    return {std::move(check), Verdict::kOk,
            absl::StrCat(Lies(dir), "; only ", facts.logout.user,
                         " may write there, so writing was not tried"),
            ""};
  }
  const std::string mend =
      denied ? absl::StrCat("sudo chown ", QuoteForShell(facts.logout.user), " ", quoted)
      : error == EROFS
          ? absl::StrCat("dmesg | tail   (why it is read-only); then: sudo mount -o remount,rw ",
                         mount)
      : error == ENOSPC || error == EDQUOT
          ? absl::StrCat("df -h ", quoted, "   (free some; ckptctl gc --dry-run says what ckptd ",
                         "keeps and why)")
          : absl::StrCat("dmesg | tail   (what the drive or the file system's client says)");
  return {std::move(check), Verdict::kBroken,
          absl::StrCat("cannot be written to (", std::strerror(error), "), ", Lies(dir)), mend};
}

Finding Judge(const TierDirFacts& dir, const Facts& facts) {
  const DirectoryProbe& probe = dir.probe;
  const std::string check = absl::StrCat(dir.tier, " ", probe.dir);
  if (probe.dir.empty() || probe.dir[0] != '/') {
    return {check, Verdict::kBroken, "is not an absolute path: ckptd does not start with it",
            SetTo(dir, facts, "one, which begins with a slash")};
  }
  if (KeepsNoFiles(dir.fs_type)) {
    return {check, Verdict::kBroken,
            absl::StrCat("lies on ", dir.fs_type, ", which takes no files"),
            SetTo(dir, facts, "a directory on a drive or a shared file system")};
  }
  if (probe.start_error != 0) {
    return {check, Verdict::kSlow,
            absl::StrCat("not looked at: fork: ", std::strerror(probe.start_error)),
            "ulimit -u unlimited"};
  }
  if (!probe.stuck_in.empty()) {
    return {check, Verdict::kBroken,
            absl::StrCat("hangs: ", probe.stuck_in, " did not return, ", Lies(dir),
                         "; saves and other tiers go on without it"),
            "dmesg | tail   (is the file system's server up, is the network?)"};
  }
  if (probe.look_error == ENOENT) {
    return NotThere(dir, check);
  }
  if (probe.look_error == ENOTDIR) {
    return {check, Verdict::kBroken, "cannot be: a file lies on the way to it",
            SetTo(dir, facts, "a directory, or move the file away")};
  }
  if (probe.look_error == EACCES && facts.is_daemons_user) {
    return {check, Verdict::kBroken, "cannot be looked at: Permission denied",
            absl::StrCat("namei -l ", QuoteForShell(probe.dir),
                         "   (who may enter the directories on the way)")};
  }
  if (probe.look_error != 0) {
    const bool may = facts.is_daemons_user || probe.look_error != EACCES;
    return {check, may ? Verdict::kBroken : Verdict::kOk,
            absl::StrCat(may ? "cannot be looked at: " : "only others may look at it: ",
                         std::strerror(probe.look_error)),
            may ? "dmesg | tail   (is the file system's server up, is the network?)" : ""};
  }
  if (!probe.is_directory) {
    return {check, Verdict::kBroken, "is not a directory", SetTo(dir, facts, "one")};
  }
  if (InMemory(dir.fs_type)) {
    return {check, Verdict::kBroken,
            absl::StrCat("lies on ", dir.fs_type, ": what is there is gone after a reboot"),
            SetTo(dir, facts, "a directory on a drive")};
  }
  if (probe.write_error != 0) {
    return NotWritable(dir, facts, check);
  }
  const std::string space = absl::StrCat(Lies(dir), ", ", FormatBytes(probe.bytes_free), " of ",
                                         FormatBytes(probe.bytes_total), " free");
  if (dir.tier == "nvme" && probe.direct_error != 0) {
    return {check, Verdict::kSlow,
            absl::StrCat(space, "; no O_DIRECT (", std::strerror(probe.direct_error),
                         "): each byte goes through the page cache"),
            SetTo(dir, facts, "directories on ext4 or xfs")};
  }
  if (dir.tier == "remote" && probe.link_error != 0) {
    return {check, Verdict::kSlow,
            absl::StrCat(space, "; no hard links (", std::strerror(probe.link_error),
                         "): without renameat2 either it serves one node only"),
            "ckptctl status   (says whether it does)"};
  }
  if (dir.tier == "remote" && dir.mount_point == "/" && DiesWithTheNode(dir.fs_type)) {
    // As its empty mount point looks, too.
    return {check, Verdict::kSlow,
            absl::StrCat(space, "; the system's own disk: its mount is missing, or it dies with ",
                         "the node"),
            absl::StrCat("mount the file system that belongs there, or ",
                         SetTo(dir, facts, "a directory on one that other nodes mount"))};
  }
  return {check, Verdict::kOk,
          absl::StrCat(space, dir.tier == "nvme" ? ", O_DIRECT works" : ", hard links work",
                       dir.tier == "remote" && DiesWithTheNode(dir.fs_type)
                           ? "; a file system of this node alone: it dies with the node"
                           : ""),
          ""};
}

// What the daemon says of it, which uses it all the time.
void DaemonsWord(const TierWord& tier, const Facts& facts, Findings& findings) {
  const std::string check = absl::StrCat("tier ", tier.tier);
  if (!tier.healthy || tier.stalled > 0) {
    findings.push_back(
        {check, Verdict::kBroken,
         absl::StrCat(
             "ckptd says: ", tier.state.empty() ? "not well" : tier.state,
             tier.stalled > 0
                 ? absl::StrCat("; ", Count(tier.stalled, "write gets", "writes get"), " nowhere")
                 : ""),
         "ckptctl status   (what waits for it); it goes on by itself once the fault is gone"});
  } else if (tier.engine.starts_with("threads") && tier.tier == "nvme") {
    findings.push_back(
        {check, Verdict::kSlow,
         absl::StrCat("ckptd writes with threads, not with io_uring",
                      facts.io_uring_error == 0 ? ": nvme.engine, or its own limits" : ""),
         "mend io_uring (above), or set nvme.engine: auto; then start ckptd again"});
  } else {
    findings.push_back({check, Verdict::kOk,
                        absl::StrCat("ckptd says: ", tier.state.empty() ? "ok" : tier.state,
                                     tier.engine.empty() ? "" : absl::StrCat("; ", tier.engine)),
                        ""});
  }
  for (const std::string& note : tier.notes) {
    findings.push_back({check, Verdict::kSlow, absl::StrCat("ckptd says: ", note),
                        "docs/operations.md, \"What a tier's file system cannot do\""});
  }
}

}  // namespace

void EvaluateTiers(const Facts& facts, Findings& findings) {
  if (facts.tier_dirs.empty() && facts.daemon.tiers.empty()) {
    findings.push_back({"tiers", Verdict::kOk,
                        "memory only: a reboot loses every checkpoint (nvme.dirs and remote.dir "
                        "are not set)",
                        ""});
    return;
  }
  for (const TierDirFacts& dir : facts.tier_dirs) {
    findings.push_back(Judge(dir, facts));
  }
  for (const TierWord& tier : facts.daemon.tiers) {
    DaemonsWord(tier, facts, findings);
  }
}

}  // namespace holdfast
