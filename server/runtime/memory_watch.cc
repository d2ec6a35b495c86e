#include "server/runtime/memory_watch.h"

#include <sys/epoll.h>
#include <sys/inotify.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/env.h"
#include "base/status.h"
#include "tiers/memory/slot_files.h"

namespace holdfast {
namespace {

constexpr uint32_t kWatched =
    IN_DELETE | IN_MOVED_FROM | IN_DELETE_SELF | IN_MOVE_SELF | IN_ONLYDIR;
constexpr uint32_t kDirectoryGone = IN_DELETE_SELF | IN_MOVE_SELF | IN_UNMOUNT | IN_IGNORED;

}  // namespace

absl::StatusOr<std::unique_ptr<MemoryWatch>> MemoryWatch::Start(Reactor& reactor,
                                                                const std::string& directory,
                                                                Callbacks callbacks) {
  UniqueFd inotify(::inotify_init1(IN_CLOEXEC | IN_NONBLOCK));
  if (!inotify.valid() || ::inotify_add_watch(inotify.get(), directory.c_str(), kWatched) < 0) {
    return ErrnoStatus(errno, "watch", directory);
  }
  std::unique_ptr<MemoryWatch> watch(
      new MemoryWatch(reactor, directory, std::move(callbacks), std::move(inotify)));
  HF_RETURN_IF_ERROR(
      reactor.Watch(watch->inotify_.get(), EPOLLIN, [w = watch.get()](uint32_t) { w->Read(); }));
  return watch;
}

MemoryWatch::MemoryWatch(Reactor& reactor, std::string directory, Callbacks callbacks,
                         UniqueFd inotify)
    : reactor_(reactor),
      directory_(std::move(directory)),
      callbacks_(std::move(callbacks)),
      inotify_(std::move(inotify)) {}

MemoryWatch::~MemoryWatch() {
  reactor_.Unwatch(inotify_.get());
}

void MemoryWatch::Read() {
  alignas(inotify_event) std::array<char, 16384> buffer;
  const ssize_t got = ::read(inotify_.get(), buffer.data(), buffer.size());
  for (ssize_t at = 0; at < got;) {
    const auto* event = reinterpret_cast<const inotify_event*>(buffer.data() + at);
    at += static_cast<ssize_t>(sizeof(inotify_event)) + event->len;
    if ((event->mask & IN_Q_OVERFLOW) != 0) {
      LookAtAll();
      continue;
    }
    if ((event->mask & kDirectoryGone) != 0) {
      return callbacks_.lost(absl::StrCat("'", directory_, "' was removed or moved away"));
    }
    const std::string name = event->len > 0 ? event->name : "";
    const ParsedName file = ParseFileName(name);
    // What is there again was replaced, or made anew under the same number.
    if ((file.role != FileRole::kImage && file.role != FileRole::kLock) ||
        !IsGone(JoinPath(directory_, name))) {
      continue;
    }
    if (file.role == FileRole::kLock) {
      return callbacks_.lost(absl::StrCat("the lock in '", directory_, "' was removed"));
    }
    callbacks_.image_gone(file.slot);
  }
}

// The kernel has left out events: any file may be gone.
void MemoryWatch::LookAtAll() {
  if (IsGone(directory_)) {
    return callbacks_.lost(absl::StrCat("'", directory_, "' was removed or moved away"));
  }
  if (IsGone(JoinPath(directory_, kLockName))) {
    return callbacks_.lost(absl::StrCat("the lock in '", directory_, "' was removed"));
  }
  for (const SlotId slot : callbacks_.slots()) {
    if (IsGone(JoinPath(directory_, ImageName(slot)))) {
      callbacks_.image_gone(slot);
    }
  }
}

bool MemoryWatch::IsGone(const std::string& path) const {
  return absl::IsNotFound(Env::System()->Info(path).status());
}

}  // namespace holdfast
