#include "tests/integration/loop_device.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>

#include "base/unique_fd.h"
#include "tests/integration/harness.h"

namespace holdfast {
namespace {

// <linux/fs.h> and the XFS and ext4 ioctl of `xfs_io -x -c shutdown`, whose headers clash with
// <sys/mount.h>.
constexpr unsigned long kFreeze = _IOWR('X', 119, int);
constexpr unsigned long kThaw = _IOWR('X', 120, int);
constexpr unsigned long kGoDown = _IOR('X', 125, uint32_t);
constexpr uint32_t kNoLogFlush = 2;

bool Control(const std::string& path, unsigned long request, uint32_t argument) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  return fd.valid() && ::ioctl(fd.get(), request, &argument) == 0;
}

}  // namespace

// In HOLDFAST_BIN_DIR: a real disk, as a rule.
LoopMount::LoopMount(const std::string& type, uint64_t bytes)
    : directory_(HOLDFAST_BIN_DIR), type_(type) {
  const std::string file = directory_.Path("device");
  std::filesystem::create_directory(path());
  WriteText(file, "");
  std::filesystem::resize_file(file, bytes);
  if (::geteuid() != 0 || ::unshare(CLONE_NEWNS) != 0 ||
      ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) {
    why_ = "needs root and a mount namespace";
    return;
  }
  if (!Run("mkfs." + type + " -q " + file)) {
    why_ = "mkfs." + type + " failed (package xfsprogs or e2fsprogs)";
    return;
  }
  mounted_ = Run("mount -o loop " + file + " " + path());
  why_ = mounted_ ? "" : "mount -o loop failed";
}

LoopMount::~LoopMount() {
  if (frozen_) {
    Thaw();
  }
  if (mounted_) {
    // Not lazily: a loop device ends with its last user.
    Run("umount " + path() + " || umount -l " + path());
  }
}

bool LoopMount::Run(const std::string& command) {
  return std::system((command + " >/dev/null 2>&1").c_str()) == 0;
}

bool LoopMount::CutOff() {
  return Control(path(), kGoDown, kNoLogFlush);
}

bool LoopMount::Remount() {
  mounted_ = false;
  if (!Run("umount " + path())) {
    return false;
  }
  mounted_ = Run("mount -o loop " + directory_.Path("device") + " " + path());
  return mounted_;
}

bool LoopMount::Detach() {
  mounted_ = !Run("umount -l " + path());
  return !mounted_;
}

// Not before the loop device that it had is gone: the one that failed would come back.
bool LoopMount::Mount() {
  const std::string file = directory_.Path("device");
  mounted_ = Run("test -z \"$(losetup -n -O NAME -j " + file + ")\"") &&
             Run("mount -o loop " + file + " " + path());
  return mounted_;
}

bool LoopMount::Freeze() {
  frozen_ = Control(path(), kFreeze, 0);
  return frozen_;
}

bool LoopMount::Thaw() {
  frozen_ = !Control(path(), kThaw, 0);
  return !frozen_;
}

}  // namespace holdfast
