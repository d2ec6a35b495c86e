#include "server/runtime/settings_reload.h"

#include <system_error>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "base/program.h"
#include "base/status.h"
#include "base/units.h"

namespace holdfast {

// What a thread that is left behind may still touch.
struct SettingsReload::Mailbox {
  Mutex mutex;
  SettingsReload* reload GUARDED_BY(mutex) = nullptr;  // null: it is gone
  uint32_t threads GUARDED_BY(mutex) = 0;
};

SettingsReload::SettingsReload(Options options)
    : options_(std::move(options)),
      mailbox_(std::make_shared<Mailbox>()),
      timer_(options_.reactor.AddTimer([this] {
        End(absl::DeadlineExceededError(
            absl::StrCat("the files were not read within ", FormatDuration(options_.deadline),
                         "; does a file system that they lie on, or name, hang?")));
      })) {
  const MutexLock lock(mailbox_->mutex);
  mailbox_->reload = this;
}

SettingsReload::~SettingsReload() {
  const MutexLock lock(mailbox_->mutex);
  mailbox_->reload = nullptr;
}

void SettingsReload::Ask() {
  if (reading_ != 0) {
    again_ = true;
    return;
  }
  Begin();
}

void SettingsReload::Begin() {
  const uint64_t number = reading_ = next_++;
  {
    const MutexLock lock(mailbox_->mutex);
    if (mailbox_->threads >= kHangingMax) {
      return options_.reactor.Post([this] {
        End(absl::ResourceExhaustedError(
            absl::StrCat(kHangingMax, " threads that read them before still hang; restart ckptd")));
      });
    }
    ++mailbox_->threads;
  }
  options_.reactor.Arm(timer_, options_.reactor.clock().Now() + options_.deadline);
  try {
    std::thread([mailbox = mailbox_, read = options_.read, number] {
      absl::StatusOr<v1::DaemonConfig> settings = read();
      const MutexLock lock(mailbox->mutex);
      --mailbox->threads;
      if (SettingsReload* const reload = mailbox->reload; reload != nullptr) {
        reload->options_.reactor.Post([reload, number, settings = std::move(settings)] {
          if (reload->reading_ == number) {
            reload->End(settings);
          }
        });
      }
    }).detach();
  } catch (const std::system_error& error) {
    {
      const MutexLock lock(mailbox_->mutex);
      --mailbox_->threads;
    }
    End(ThreadError(error, "that reads the settings"));
  }
}

void SettingsReload::End(absl::StatusOr<v1::DaemonConfig> settings) {
  options_.reactor.Disarm(timer_);
  reading_ = 0;
  options_.done(std::move(settings));
  if (std::exchange(again_, false)) {
    Begin();
  }
}

}  // namespace holdfast
