// The few calls of a device's driver that copying needs, one method each, with CUDA's meaning and
// CUDA's error codes. Behind it: the CUDA driver API (cuda_driver.cc), which is opened at run time
// and never linked, and in tests a driver that completes late and out of order.
//
//   HF_TRY_ASSIGN(std::shared_ptr<DeviceDriver> driver, LoadDeviceDriver());
//   void* context = nullptr;
//   if (const DriverError error = driver->RetainContext(0, &context); error != kDriverOk) {
//     return Status(Code::kInternal, driver->ErrorName(error));
//   }
//
// Thread-safe. Nothing here blocks on what a device does: whoever waits asks QueryEvent again and
// again. Streams and events are the driver's handles, as PyTorch and others hand them out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "holdfast/status.h"

namespace holdfast::client {

using DriverError = int;  // CUresult
inline constexpr DriverError kDriverOk = 0;
inline constexpr DriverError kDriverInvalidDevice = 101;
inline constexpr DriverError kDriverNotReady = 600;
inline constexpr DriverError kDriverCaptureImplicit = 906;  // another stream's capture would notice

// How a thread's calls get along with captures that go on elsewhere in the process
// (CUstreamCaptureMode). In the mode that threads start in, calls like RegisterHost spoil them.
inline constexpr int kCaptureModeGlobal = 0;
inline constexpr int kCaptureModeRelaxed = 2;

class DeviceDriver {
 public:
  virtual ~DeviceDriver() = default;

  // The device's primary context, which PyTorch and the CUDA runtime use as well. Each Retain has
  // its Release.
  virtual DriverError RetainContext(int32_t device, void** context) = 0;
  virtual DriverError ReleaseContext(int32_t device) = 0;
  // The calling thread's current context is a stack; all that follows needs one.
  virtual DriverError PushContext(void* context) = 0;
  virtual DriverError PopContext() = 0;
  // Of the calling thread: sets *mode, and puts what it was there.
  virtual DriverError ExchangeCaptureMode(int* mode) = 0;

  // A stream that does not wait for the legacy default stream, nor makes it wait.
  virtual DriverError CreateStream(void** stream) = 0;
  virtual DriverError DestroyStream(void* stream) = 0;
  // kDriverOk: all that was enqueued is done. kDriverNotReady: not yet.
  virtual DriverError QueryStream(void* stream) = 0;
  // Does not disturb the capture.
  virtual DriverError IsCapturing(void* stream, bool* capturing) = 0;
  // What is enqueued from now on waits for what `event` was last recorded behind.
  virtual DriverError WaitEvent(void* stream, void* event) = 0;

  virtual DriverError CreateEvent(void** event) = 0;
  // May come before the event: streams that wait for it go on waiting.
  virtual DriverError DestroyEvent(void* event) = 0;
  virtual DriverError RecordEvent(void* event, void* stream) = 0;
  virtual DriverError QueryEvent(void* event) = 0;

  // Enqueued; the host's side must be pinned until they are done.
  virtual DriverError CopyToHost(void* to, const void* from, size_t bytes, void* stream) = 0;
  virtual DriverError CopyToDevice(void* to, const void* from, size_t bytes, void* stream) = 0;

  // Host memory pinned for all contexts: what is there, and new.
  virtual DriverError RegisterHost(void* begin, size_t bytes) = 0;
  virtual DriverError UnregisterHost(void* begin) = 0;
  virtual DriverError AllocateHost(void** begin, size_t bytes) = 0;
  virtual DriverError FreeHost(void* begin) = 0;

  // "CUDA_ERROR_OUT_OF_MEMORY: out of memory".
  virtual std::string ErrorName(DriverError error) = 0;
};

// This process's driver, opened and initialised at the first call. kInternal: there is none, or it
// does not start; kForked: it belongs to the process that this one was forked from.
Result<std::shared_ptr<DeviceDriver>> LoadDeviceDriver();

// What LoadDeviceDriver gives from now on; null: this process's own again.
void SetDeviceDriverForTesting(std::shared_ptr<DeviceDriver> driver);

}  // namespace holdfast::client
