// What the one who moves an image and the one who watches share: how far it is, since when it has
// got nowhere, and that it should end.
//
//   auto control = std::make_shared<TransferControl>();
//   … a thread: WriteImage(io, …, {.control = control.get()});
//   control->Cancel();                                    // ends soon, with CancelledError
//   if (now - control->last_progress() > stall_timeout) … control->doing() …
//
// Thread-safe. Whoever may be left behind by its owner (a thread in a call that never returns)
// holds it by shared_ptr.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <string>

#include "base/clock.h"
#include "base/mutex.h"

namespace holdfast {

class TransferControl {
 public:
  TransferControl();
  TransferControl(const TransferControl&) = delete;
  TransferControl& operator=(const TransferControl&) = delete;

  void Cancel() { cancelled_.store(true, std::memory_order_release); }
  bool cancelled() const { return cancelled_.load(std::memory_order_acquire); }

  // Somebody waits for it: no pacer holds it back from now on.
  void Hurry() { hurried_.store(true, std::memory_order_release); }
  bool hurried() const { return hurried_.load(std::memory_order_acquire); }

  // Bytes that have arrived; counts a transfer's second pass (reading back) too.
  uint64_t bytes_done() const { return bytes_done_.load(std::memory_order_relaxed); }
  // When bytes_done last grew, or, before that, when this object was made or Touch was called.
  MonotonicTime last_progress() const {
    return {last_progress_ns_.load(std::memory_order_relaxed)};
  }
  // The call under way that began first, for people: "write '/mnt/…'"; empty when none is.
  std::string doing() const EXCLUDES(mutex_);

  // For those that move the bytes.
  void Advance(uint64_t bytes);
  void Touch();  // it gets on, though no bytes arrived (a call that syncs or renames returned)

  // A call that may hang, for as long as this object lives.
  class Call {
   public:
    // `control` may be null.
    Call(TransferControl* control, const char* operation, const std::string& path);
    ~Call();
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

   private:
    TransferControl* const control_;
    uint64_t number_ = 0;
  };

 private:
  std::atomic<bool> cancelled_{false};
  std::atomic<bool> hurried_{false};
  std::atomic<uint64_t> bytes_done_{0};
  std::atomic<int64_t> last_progress_ns_;
  mutable Mutex mutex_;
  uint64_t calls_begun_ GUARDED_BY(mutex_) = 0;
  std::map<uint64_t, std::string> calls_ GUARDED_BY(mutex_);  // under way, by number
};

}  // namespace holdfast
