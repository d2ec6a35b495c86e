#include "server/runtime/passed_memory.h"

#include <sys/epoll.h>
#include <sys/inotify.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/units.h"
#include "server/runtime/sealed_memory.h"

namespace holdfast {
namespace {

// A line of /proc/…/fdinfo; the number is hexadecimal.
constexpr char kWatchBegin[] = "inotify wd:";

}  // namespace

absl::StatusOr<std::unique_ptr<PassedMemory>> PassedMemory::Start(Reactor& reactor) {
  UniqueFd inotify(::inotify_init1(IN_CLOEXEC | IN_NONBLOCK));
  if (!inotify.valid()) {
    return ErrnoStatus(errno, "inotify_init1", "memory that is passed to clients");
  }
  std::unique_ptr<PassedMemory> passed(new PassedMemory(reactor, std::move(inotify)));
  HF_RETURN_IF_ERROR(
      reactor.Watch(passed->inotify_.get(), EPOLLIN, [p = passed.get()](uint32_t) { p->Read(); }));
  return passed;
}

PassedMemory::PassedMemory(Reactor& reactor, UniqueFd inotify)
    : reactor_(reactor), inotify_(std::move(inotify)) {}

PassedMemory::~PassedMemory() {
  reactor_.Unwatch(inotify_.get());
}

absl::Status PassedMemory::Charge(uint32_t uid, std::span<const UniqueFd> files) {
  for (const UniqueFd& file : files) {
    if (const uint64_t bytes = SealedBytes(file.get()); bytes > 0) {
      HF_RETURN_IF_ERROR(ChargeOne(uid, file.get(), bytes));
    }
  }
  return absl::OkStatus();
}

absl::Status PassedMemory::ChargeOne(uint32_t uid, int fd, uint64_t bytes) {
  const std::string path = absl::StrCat("/proc/self/fd/", fd);
  const Watch watch = ::inotify_add_watch(inotify_.get(), path.c_str(), IN_DELETE_SELF);
  if (watch < 0) {
    // Other programs of ckptd's user have all the watches: nobody goes without memory for that.
    if (errno == ENOSPC || errno == ENOMEM) {
      return absl::OkStatus();
    }
    return absl::UnavailableError(Message(ErrnoStatus(errno, "inotify_add_watch", path)));
  }
  File& file = files_[watch];  // (of a file that is watched already it is the same one)
  if (file.users.contains(uid)) {
    return absl::OkStatus();
  }
  User& user = users_[uid];
  if (user.files >= kFilesPerUserMax || bytes > kBytesPerUserMax - user.bytes) {
    const absl::Status refused = absl::ResourceExhaustedError(absl::StrCat(
        "pass memory to a client: processes of uid ", uid, " have ", FormatBytes(user.bytes),
        " in ", user.files, " files that ckptd passed to them, and ", FormatBytes(bytes),
        " more are wanted; one user may have ", FormatBytes(kBytesPerUserMax), " in ",
        kFilesPerUserMax, " files. Close the checkpoints that are open, or end the processes ",
        "that keep them (sudo lsof -u ", uid, " | grep memfd:holdfast)"));
    if (user.files == 0) {
      users_.erase(uid);
    }
    if (file.users.empty()) {
      files_.erase(watch);
      ::inotify_rm_watch(inotify_.get(), watch);
    }
    return refused;
  }
  file.bytes = bytes;
  file.users.insert(uid);
  user.bytes += bytes;
  ++user.files;
  return absl::OkStatus();
}

void PassedMemory::Read() {
  alignas(inotify_event) std::array<char, 16384> buffer;
  const ssize_t got = ::read(inotify_.get(), buffer.data(), buffer.size());
  for (ssize_t at = 0; at < got;) {
    const auto* event = reinterpret_cast<const inotify_event*>(buffer.data() + at);
    at += static_cast<ssize_t>(sizeof(inotify_event)) + event->len;
    if ((event->mask & IN_Q_OVERFLOW) != 0) {
      LookAtAll();
    } else if ((event->mask & IN_IGNORED) != 0) {  // follows IN_DELETE_SELF: nobody has it
      Forget(event->wd);
    }
  }
}

// The kernel has left out events. Which files are watched still it says nowhere else.
void PassedMemory::LookAtAll() {
  std::set<Watch> there;
  std::ifstream info(absl::StrCat("/proc/self/fdinfo/", inotify_.get()));
  for (std::string line; std::getline(info, line);) {
    if (line.starts_with(kWatchBegin)) {
      there.insert(
          static_cast<Watch>(std::strtol(line.c_str() + sizeof(kWatchBegin) - 1, nullptr, 16)));
    }
  }
  if (!info.eof()) {
    return;  // it could not be read: what is gone counts on
  }
  std::vector<Watch> gone;
  for (const auto& [watch, file] : files_) {
    if (!there.contains(watch)) {
      gone.push_back(watch);
    }
  }
  for (const Watch watch : gone) {
    Forget(watch);
  }
}

void PassedMemory::Forget(Watch watch) {
  const auto found = files_.find(watch);
  if (found == files_.end()) {
    return;
  }
  for (const uint32_t uid : found->second.users) {
    User& user = users_[uid];
    user.bytes -= found->second.bytes;
    if (--user.files == 0) {
      users_.erase(uid);
    }
  }
  files_.erase(found);
}

}  // namespace holdfast
