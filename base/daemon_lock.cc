#include "base/daemon_lock.h"

#include <poll.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/process.h"
#include "base/status.h"
#include "base/unique_fd.h"

namespace holdfast {
namespace {

constexpr uint64_t kPidBytesMax = 64;

std::string NameOf(const std::string& path, int index) {
  return index == 0 ? path : absl::StrCat(path, ".", index);
}

// By the pid in the file (Env::Lock).
std::optional<ProcessId> DyingHolder(Env& env, const std::string& path,
                                     const DaemonLock::Judge& judge) {
  const absl::StatusOr<FileInfo> info = env.Info(path);
  const absl::StatusOr<std::string> text = ReadFile(env, path, kPidBytesMax);
  int32_t pid = 0;
  if (!info.ok() || !text.ok() || !absl::SimpleAtoi(*text, &pid) || pid <= 0) {
    return std::nullopt;
  }
  return judge(pid, info->inode);
}

void Insert(std::vector<ProcessId>& processes, const ProcessId& process) {
  const auto at = std::lower_bound(processes.begin(), processes.end(), process);
  if (at == processes.end() || *at != process) {
    processes.insert(at, process);
  }
}

}  // namespace

absl::StatusOr<DaemonLock> DaemonLock::Take(Env& env, const std::string& path, const Judge& judge) {
  DaemonLock taken;
  std::vector<std::string> others;
  // 1. The first that is to be had, a new one if none of them is. The others are looked at: they
  // are free, or dying processes hold them.
  for (int index = 0; index < kDaemonLocksMax; ++index) {
    const std::string name = NameOf(path, index);
    if (taken.held()) {
      const absl::StatusOr<FileInfo> info = env.Info(name);
      if (absl::IsNotFound(info.status())) {
        break;
      }
      HF_RETURN_IF_ERROR(info.status());
    }
    absl::StatusOr<std::unique_ptr<FileLock>> lock = env.Lock(name);
    if (lock.ok() && !taken.held()) {
      taken.path_ = name;
      taken.lock_ = *std::move(lock);
    } else if (absl::IsUnavailable(lock.status()) && DyingHolder(env, name, judge)) {
      others.push_back(name);
    } else if (!lock.ok()) {
      return lock.status();
    }
  }
  if (!taken.held()) {
    return absl::UnavailableError(
        absl::StrCat("lock '", path, "': ", kDaemonLocksMax,
                     " daemons were killed there and hang in calls; restart the machine"));
  }
  // 2. The others once more, now that ours names us: a daemon that got one of them meanwhile sees
  // ours, or we see its.
  for (const std::string& name : others) {
    const absl::StatusOr<std::unique_ptr<FileLock>> lock = env.Lock(name);
    if (lock.ok()) {
      continue;
    }
    const std::optional<ProcessId> dying =
        absl::IsUnavailable(lock.status()) ? DyingHolder(env, name, judge) : std::nullopt;
    if (!dying) {
      return lock.status();
    }
    Insert(taken.dying_, *dying);
  }
  return taken;
}

void DaemonLock::Remove(Env& env) {
  if (held()) {
    env.Unlink(path_).IgnoreError();
    lock_ = nullptr;
  }
}

std::vector<ProcessId> AwaitDying(Env& env, const std::vector<std::string>& locks, Duration at_most,
                                  const DaemonLock::Judge& judge) {
  std::vector<ProcessId> dying;
  for (const std::string& path : locks) {
    for (int index = 0; index < kDaemonLocksMax; ++index) {
      if (const auto process = DyingHolder(env, NameOf(path, index), judge)) {
        Insert(dying, *process);
      }
    }
  }
  const MonotonicTime until = Clock::System()->Now() + at_most;
  std::erase_if(dying, [&](const ProcessId& process) {
    const absl::StatusOr<UniqueFd> pidfd = OpenPidfd(process);
    if (!pidfd.ok()) {
      return absl::IsNotFound(pidfd.status());
    }
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::System()->Now());
    pollfd gone = {pidfd->get(), POLLIN, 0};
    return ::poll(&gone, 1, static_cast<int>(std::max<int64_t>(left.count(), 0))) > 0;
  });
  return dying;
}

}  // namespace holdfast
