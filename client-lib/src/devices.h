// The devices that a job copies from and to: for each its primary context and a stream of our own;
// host memory pinned for them; waiting without ever blocking in the driver.
//
//   auto devices = std::make_shared<Devices>(driver, stall_deadline);
//   HF_TRY_ASSIGN(void* const stream, devices->Stream(0));
//   {
//     ContextScope scope(*devices, 0);            // the caller's current context is back after it
//     HF_TRY(scope.status());
//     HF_TRY(devices->Check(devices->driver().CopyToHost(to, from, bytes, stream), "copy"));
//   }
//   HF_TRY(devices->Drain(0));
//
// Contexts are retained at first use and released by the destructor. Thread-safe, but for bounce
// buffers, which belong to the one thread that copies. Not used in forked children: their owners
// see to that.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string_view>
#include <vector>

#include "base/mutex.h"
#include "client-lib/src/deadline.h"
#include "client-lib/src/device_driver.h"
#include "holdfast/status.h"

namespace holdfast::client {

inline constexpr int32_t kHostMemory = -1;  // Tensor::device of what is not on a device

class Devices {
 public:
  // `stall`: how long a copy may wait for what comes before it without anything moving.
  Devices(std::shared_ptr<DeviceDriver> driver, Milliseconds stall);
  ~Devices();
  Devices(const Devices&) = delete;
  Devices& operator=(const Devices&) = delete;

  DeviceDriver& driver() const { return *driver_; }
  Milliseconds stall() const { return stall_; }
  // OK, or kInternal with what failed, on which device, and the driver's name for the error.
  Status Check(DriverError error, std::string_view what, int32_t device) const;

  // kInvalidArgument: there is no such device.
  Result<void*> Context(int32_t device) EXCLUDES(mutex_);
  Result<void*> Stream(int32_t device) EXCLUDES(mutex_);

  // Waits until nothing that we enqueued on the device is under way. A device that has failed for
  // good has nothing under way. kDeadlineExceeded: something still is, and the device is stuck.
  Status Drain(int32_t device, Deadline deadline) EXCLUDES(mutex_);
  // Whether copies of an earlier operation that gave up are still under way; asks again.
  bool Stuck(int32_t device) EXCLUDES(mutex_);
  bool AnyStuck() EXCLUDES(mutex_);

  // Pins memory for all devices. False: it cannot be pinned (a limit, a read-only mapping), and
  // copies take a way round. Some context must have been asked for.
  bool Register(void* begin, size_t bytes) EXCLUDES(mutex_);
  // False: the driver may still think of these addresses as pinned.
  bool Unregister(void* begin) EXCLUDES(mutex_);

  // A few pinned buffers for what cannot be pinned where it lies; made at the first call, kept.
  static constexpr size_t kBounceBytes = 8 << 20;
  static constexpr size_t kBounceBuffers = 4;
  Result<std::byte* const*> BounceBuffers() EXCLUDES(mutex_);

 private:
  struct Device {
    void* context = nullptr;
    void* stream = nullptr;
    bool stuck = false;
  };
  void* AnyContext() EXCLUDES(mutex_);
  DriverError QueryStream(void* context, void* stream) const;

  const std::shared_ptr<DeviceDriver> driver_;
  const Milliseconds stall_;
  Mutex mutex_;
  std::map<int32_t, Device> devices_ GUARDED_BY(mutex_);
  std::vector<std::byte*> bounce_;  // the copying thread's
};

// Makes a device's context the current one and lets captures elsewhere in the process be, as long
// as it lives. Of one thread.
class ContextScope {
 public:
  ContextScope(DeviceDriver& driver, void* context);
  ~ContextScope();
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;
  DriverError error() const { return error_; }

 private:
  DeviceDriver& driver_;
  DriverError error_ = kDriverOk;
  int capture_mode_;
};

// An event recorded behind what was enqueued on a stream.
class DeviceEvent {
 public:
  static Result<std::shared_ptr<DeviceEvent>> Record(std::shared_ptr<Devices> devices,
                                                     int32_t device, void* stream);
  ~DeviceEvent();
  DeviceEvent(const DeviceEvent&) = delete;
  DeviceEvent& operator=(const DeviceEvent&) = delete;

  // kDriverOk: reached. kDriverNotReady: not yet.
  DriverError Query() const;
  // What is enqueued on `stream` (of `device`) from now on comes after it.
  Status MakeWait(int32_t device, void* stream) const;

 private:
  DeviceEvent(std::shared_ptr<Devices> devices, void* context, void* event);

  const std::shared_ptr<Devices> devices_;
  void* const context_;
  void* const event_;
};

// Waits between two looks, longer and longer, until something moved.
class BackOff {
 public:
  void Moved();
  void Sleep();
  // Since the last move.
  bool stalled(Milliseconds longest) const;

 private:
  Deadline::Clock::time_point moved_ = Deadline::Clock::now();
  std::chrono::microseconds pause_{0};
};

}  // namespace holdfast::client
