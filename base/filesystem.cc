#include "base/filesystem.h"

#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/sysinfo.h>
#include <sys/sysmacros.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/status.h"

namespace holdfast {
namespace {

std::string FilesystemType(uint64_t magic) {
  switch (magic) {
    case TMPFS_MAGIC:
      return "tmpfs";
    case RAMFS_MAGIC:
      return "ramfs";
    case HUGETLBFS_MAGIC:
      return "hugetlbfs";
    case EXT4_SUPER_MAGIC:
      return "ext4";
    case XFS_SUPER_MAGIC:
      return "xfs";
    case BTRFS_SUPER_MAGIC:
      return "btrfs";
    case OVERLAYFS_SUPER_MAGIC:
      return "overlay";
    case NFS_SUPER_MAGIC:
      return "nfs";
    case FUSE_SUPER_MAGIC:
      return "fuse";
    case V9FS_MAGIC:
      return "9p";
    case EFIVARFS_MAGIC:
      return "efivarfs";
    case PROC_SUPER_MAGIC:
      return "proc";
    case SYSFS_MAGIC:
      return "sysfs";
    case CGROUP_SUPER_MAGIC:
    case CGROUP2_SUPER_MAGIC:
      return "cgroup";
    case DEVPTS_SUPER_MAGIC:
      return "devpts";
    case DEBUGFS_MAGIC:
      return "debugfs";
    case TRACEFS_MAGIC:
      return "tracefs";
    case SECURITYFS_MAGIC:
      return "securityfs";
    case BPF_FS_MAGIC:
      return "bpf";
    case SQUASHFS_MAGIC:
      return "squashfs";
    case MSDOS_SUPER_MAGIC:
      return "vfat";
    case F2FS_SUPER_MAGIC:
      return "f2fs";
    case CEPH_SUPER_MAGIC:
      return "ceph";
    case 0x0BD00BD0:
      return "lustre";
    case 0x47504653:
      return "gpfs";
    case 0x2FC12FC1:
      return "zfs";
    default:
      return absl::StrCat("0x", absl::Hex(magic));
  }
}

// Whether the tmpfs with this device number gives huge pages: by its mount option, unless the
// machine's setting forces or forbids them. mountinfo: "id parent major:minor root mountpoint
// options … - type source superoptions".
bool TmpfsGivesHugePages(dev_t device) {
  const std::string setting =
      ReadKernelFile("/sys/kernel/mm/transparent_hugepage/shmem_enabled").value_or("");
  if (setting.find("[deny]") != std::string::npos) {
    return false;
  }
  if (setting.find("[force]") != std::string::npos) {
    return true;
  }
  const std::string number = absl::StrCat(major(device), ":", minor(device));
  const std::string mounts = ReadKernelFile("/proc/self/mountinfo").value_or("");
  for (const absl::string_view line : absl::StrSplit(mounts, '\n')) {
    const std::vector<absl::string_view> fields = absl::StrSplit(line, ' ');
    if (fields.size() < 3 || fields[2] != number) {
      continue;
    }
    for (const absl::string_view option : absl::StrSplit(fields.back(), ',')) {
      if (option == "huge=always" || option == "huge=within_size" || option == "huge=advise") {
        return true;
      }
    }
    return false;
  }
  return false;
}

}  // namespace

absl::StatusOr<FilesystemInfo> AskFilesystem(const std::string& path) {
  struct statfs fs = {};
  struct stat st = {};
  int result = 0;
  do {
    result = ::statfs(path.c_str(), &fs);
  } while (result != 0 && errno == EINTR);
  if (result != 0 || ::stat(path.c_str(), &st) != 0) {
    return ErrnoStatus(errno, "statfs", path);
  }
  FilesystemInfo info;
  const auto magic = static_cast<uint64_t>(static_cast<uint32_t>(fs.f_type));
  info.type = FilesystemType(magic);
  info.block_bytes = static_cast<uint64_t>(fs.f_bsize);
  info.bytes_total = static_cast<uint64_t>(fs.f_blocks) * info.block_bytes;
  info.bytes_free = static_cast<uint64_t>(fs.f_bavail) * info.block_bytes;
  if (magic == TMPFS_MAGIC &&
      fs.f_blocks == 0) {  // mounted without a limit: the machine's memory is the limit
    struct sysinfo machine = {};
    if (::sysinfo(&machine) == 0) {
      info.bytes_total = static_cast<uint64_t>(machine.totalram) * machine.mem_unit;
      info.bytes_free = static_cast<uint64_t>(machine.freeram) * machine.mem_unit;
    }
  }
  info.huge_pages = magic == TMPFS_MAGIC && TmpfsGivesHugePages(st.st_dev);
  return info;
}

bool KeepsNoFiles(std::string_view type) {
  constexpr std::array<std::string_view, 12> kPseudo = {
      "proc",    "sysfs",      "cgroup", "cgroup2",  "devpts",   "debugfs",
      "tracefs", "securityfs", "bpf",    "efivarfs", "configfs", "mqueue",
  };
  return std::find(kPseudo.begin(), kPseudo.end(), type) != kPseudo.end();
}

}  // namespace holdfast
