#include "server/runtime/process_watcher.h"

#include <sys/epoll.h>

#include <chrono>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/process.h"
#include "base/status.h"

namespace holdfast {
namespace {

constexpr Duration kRetryAfter = std::chrono::seconds(1);

}  // namespace

ProcessWatcher::ProcessWatcher(Reactor& reactor, EndedCallback ended)
    : reactor_(reactor),
      ended_(std::move(ended)),
      retry_timer_(reactor.AddTimer([this] { RetryUnwatchable(); })) {}

ProcessWatcher::~ProcessWatcher() {
  for (const auto& [process, fd] : watched_) {
    reactor_.Unwatch(fd.get());
  }
  reactor_.Disarm(retry_timer_);
}

void ProcessWatcher::Watch(const ProcessId& process) {
  if (watched_.contains(process) || unwatchable_.contains(process)) {
    return;
  }
  Try(process);
}

void ProcessWatcher::Try(const ProcessId& process) {
  absl::StatusOr<UniqueFd> fd = OpenPidfd(process);
  absl::Status status = fd.status();
  if (status.ok()) {
    status = reactor_.Watch(fd->get(), EPOLLIN, [this, process](uint32_t) { Ended(process); });
  }
  if (status.ok()) {
    unwatchable_.erase(process);
    watched_.emplace(process, *std::move(fd));
    return;
  }
  const bool known = !unwatchable_.insert(process).second;
  if (absl::IsNotFound(status)) {
    reactor_.Post([this, process, alive = std::weak_ptr<bool>(alive_)] {
      if (!alive.expired() && unwatchable_.contains(process)) {
        Ended(process);
      }
    });
    return;
  }
  if (!known) {
    LogWarning(absl::StrCat("cannot watch a process, trying again: ", Message(status)));
  }
  reactor_.Arm(retry_timer_, reactor_.clock().Now() + kRetryAfter);
}

void ProcessWatcher::Ended(const ProcessId& process) {
  Unwatch(process);
  ended_(process);
}

void ProcessWatcher::Unwatch(const ProcessId& process) {
  unwatchable_.erase(process);
  const auto found = watched_.find(process);
  if (found != watched_.end()) {
    reactor_.Unwatch(found->second.get());
    watched_.erase(found);
  }
}

void ProcessWatcher::RetryUnwatchable() {
  const std::vector<ProcessId> again(unwatchable_.begin(), unwatchable_.end());
  for (const ProcessId& process : again) {
    Try(process);
  }
}

bool MayBeAlive(const ProcessId& process) {
  return !absl::IsNotFound(OpenPidfd(process).status());
}

std::string CurrentBoot() {
  return BootId();
}

}  // namespace holdfast
