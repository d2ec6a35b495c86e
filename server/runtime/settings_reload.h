// Reads the settings again when somebody asks (SIGHUP), on a thread of its own: the files may lie
// on a file system that hangs.
//
//   SettingsReload reload({read, *reactor, [this](auto settings) { TakeSettings(settings); }});
//   reload.Ask();   // → done, on the reactor's thread, or DeadlineExceeded
//
// Who asks while they are being read has them read once more, after that. Owner: the Daemon; its
// reactor's thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "base/clock.h"
#include "holdfast/v1/config.pb.h"
#include "server/runtime/reactor.h"

namespace holdfast {

class SettingsReload {
 public:
  // Threads that hang in the kernel, at most; then nothing is read any more.
  static constexpr uint32_t kHangingMax = 4;

  struct Options {
    std::function<absl::StatusOr<v1::DaemonConfig>()> read;  // any thread
    Reactor& reactor;
    std::function<void(absl::StatusOr<v1::DaemonConfig>)> done;
    Duration deadline = std::chrono::seconds(20);
  };
  explicit SettingsReload(Options options);
  // What is still being read is of no interest any more.
  ~SettingsReload();
  SettingsReload(const SettingsReload&) = delete;
  SettingsReload& operator=(const SettingsReload&) = delete;

  void Ask();

 private:
  struct Mailbox;

  void Begin();
  void End(absl::StatusOr<v1::DaemonConfig> settings);

  const Options options_;
  const std::shared_ptr<Mailbox> mailbox_;
  const Reactor::TimerId timer_;
  uint64_t reading_ = 0;  // which read is awaited; 0: none
  uint64_t next_ = 1;
  bool again_ = false;
};

}  // namespace holdfast
