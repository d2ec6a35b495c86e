#include "client-lib/src/devices.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "client-lib/src/errors.h"

namespace holdfast::client {
namespace {

constexpr std::chrono::microseconds kPauseMin{10};
constexpr std::chrono::microseconds kPauseMax{500};
// A stream that answers so often with an error and never otherwise belongs to a context that is
// lost: nothing runs there any more.
constexpr int kErrorsOfALostContext = 3;

}  // namespace

Devices::Devices(std::shared_ptr<DeviceDriver> driver, Milliseconds stall)
    : driver_(std::move(driver)), stall_(stall) {}

Devices::~Devices() {
  if (AnyStuck()) {
    return;  // copies may yet run: what they use stays until the process ends
  }
  const MutexLock lock(mutex_);
  if (!bounce_.empty()) {
    const ContextScope scope(*driver_, devices_.begin()->second.context);
    for (std::byte* const buffer : bounce_) {
      static_cast<void>(driver_->FreeHost(buffer));
    }
  }
  for (auto& [ordinal, device] : devices_) {
    if (device.stream != nullptr) {
      const ContextScope scope(*driver_, device.context);
      static_cast<void>(driver_->DestroyStream(device.stream));
    }
    static_cast<void>(driver_->ReleaseContext(ordinal));
  }
}

Status Devices::Check(DriverError error, std::string_view what, int32_t device) const {
  if (error == kDriverOk) {
    return Status();
  }
  const Code code = error == kDriverInvalidDevice ? Code::kInvalidArgument : Code::kInternal;
  return Status(
      code, absl::StrCat("device ", device, ": ", ToAbsl(what), ": ", driver_->ErrorName(error)));
}

Result<void*> Devices::Context(int32_t device) {
  const MutexLock lock(mutex_);
  const auto known = devices_.find(device);
  if (known != devices_.end()) {
    return known->second.context;
  }
  Device fresh;
  HF_TRY(Check(driver_->RetainContext(device, &fresh.context), "take its primary context", device));
  devices_[device] = fresh;
  return fresh.context;
}

Result<void*> Devices::Stream(int32_t device) {
  HF_TRY(Context(device).status());
  const MutexLock lock(mutex_);
  Device& known = devices_[device];
  if (known.stream == nullptr) {
    const ContextScope scope(*driver_, known.context);
    HF_TRY(Check(scope.error(), "make its context current", device));
    HF_TRY(Check(driver_->CreateStream(&known.stream), "make a stream", device));
  }
  return known.stream;
}

DriverError Devices::QueryStream(void* context, void* stream) const {
  const ContextScope scope(*driver_, context);
  return scope.error() != kDriverOk ? scope.error() : driver_->QueryStream(stream);
}

Status Devices::Drain(int32_t device, Deadline deadline) {
  Device known;
  {
    const MutexLock lock(mutex_);
    const auto found = devices_.find(device);
    if (found == devices_.end() || found->second.stream == nullptr) {
      return Status();
    }
    known = found->second;
  }
  int errors = 0;
  for (BackOff back_off;; back_off.Sleep()) {
    const DriverError error = QueryStream(known.context, known.stream);
    errors = error == kDriverNotReady ? 0 : errors + 1;
    const bool lost = errors == kErrorsOfALostContext;
    if (error == kDriverOk || lost || deadline.passed()) {
      const bool done = error == kDriverOk || lost;
      const MutexLock lock(mutex_);
      devices_[device].stuck = !done;
      return done ? Status()
                  : Status(Code::kDeadlineExceeded,
                           absl::StrCat("device ", device, ": copies are still under way"));
    }
  }
}

bool Devices::Stuck(int32_t device) {
  {
    const MutexLock lock(mutex_);
    const auto known = devices_.find(device);
    if (known == devices_.end() || !known->second.stuck) {
      return false;
    }
  }
  return !Drain(device, Deadline::In(Milliseconds(0))).ok();
}

bool Devices::AnyStuck() {
  std::vector<int32_t> ordinals;
  {
    const MutexLock lock(mutex_);
    for (const auto& [ordinal, device] : devices_) {
      ordinals.push_back(ordinal);
    }
  }
  return std::any_of(ordinals.begin(), ordinals.end(),
                     [this](int32_t ordinal) { return Stuck(ordinal); });
}

void* Devices::AnyContext() {
  const MutexLock lock(mutex_);
  return devices_.empty() ? nullptr : devices_.begin()->second.context;
}

bool Devices::Register(void* begin, size_t bytes) {
  const ContextScope scope(*driver_, AnyContext());
  return scope.error() == kDriverOk && driver_->RegisterHost(begin, bytes) == kDriverOk;
}

bool Devices::Unregister(void* begin) {
  const ContextScope scope(*driver_, AnyContext());
  return scope.error() == kDriverOk && driver_->UnregisterHost(begin) == kDriverOk;
}

Result<std::byte* const*> Devices::BounceBuffers() {
  int32_t device = 0;
  void* context = nullptr;
  {
    const MutexLock lock(mutex_);
    device = devices_.begin()->first;
    context = devices_.begin()->second.context;
  }
  bounce_.reserve(kBounceBuffers);
  while (bounce_.size() < kBounceBuffers) {
    const ContextScope scope(*driver_, context);
    HF_TRY(Check(scope.error(), "make its context current", device));
    void* buffer = nullptr;
    HF_TRY(
        Check(driver_->AllocateHost(&buffer, kBounceBytes), "allocate pinned host memory", device));
    bounce_.push_back(static_cast<std::byte*>(buffer));
  }
  return bounce_.data();
}

ContextScope::ContextScope(DeviceDriver& driver, void* context)
    : driver_(driver), capture_mode_(kCaptureModeRelaxed) {
  error_ = driver_.PushContext(context);
  if (error_ != kDriverOk) {
    return;
  }
  error_ = driver_.ExchangeCaptureMode(&capture_mode_);
  if (error_ != kDriverOk) {
    static_cast<void>(driver_.PopContext());
  }
}

ContextScope::~ContextScope() {
  if (error_ == kDriverOk) {
    static_cast<void>(driver_.ExchangeCaptureMode(&capture_mode_));
    static_cast<void>(driver_.PopContext());
  }
}

DeviceEvent::DeviceEvent(std::shared_ptr<Devices> devices, void* context, void* event)
    : devices_(std::move(devices)), context_(context), event_(event) {}

Result<std::shared_ptr<DeviceEvent>> DeviceEvent::Record(std::shared_ptr<Devices> devices,
                                                         int32_t device, void* stream) {
  HF_TRY_ASSIGN(void* const context, devices->Context(device));
  DeviceDriver& driver = devices->driver();
  const ContextScope scope(driver, context);
  HF_TRY(devices->Check(scope.error(), "make its context current", device));
  void* event = nullptr;
  HF_TRY(devices->Check(driver.CreateEvent(&event), "make an event", device));
  const std::shared_ptr<DeviceEvent> made(new DeviceEvent(devices, context, event));
  HF_TRY(devices->Check(driver.RecordEvent(event, stream), "record an event", device));
  return made;
}

DeviceEvent::~DeviceEvent() {
  const ContextScope scope(devices_->driver(), context_);
  static_cast<void>(devices_->driver().DestroyEvent(event_));
}

DriverError DeviceEvent::Query() const {
  const ContextScope scope(devices_->driver(), context_);
  return scope.error() != kDriverOk ? scope.error() : devices_->driver().QueryEvent(event_);
}

Status DeviceEvent::MakeWait(int32_t device, void* stream) const {
  HF_TRY_ASSIGN(void* const context, devices_->Context(device));
  const ContextScope scope(devices_->driver(), context);
  HF_TRY(devices_->Check(scope.error(), "make its context current", device));
  return devices_->Check(devices_->driver().WaitEvent(stream, event_),
                         "make a stream wait for an event", device);
}

void BackOff::Moved() {
  moved_ = Deadline::Clock::now();
  pause_ = std::chrono::microseconds(0);
}

void BackOff::Sleep() {
  pause_ = std::clamp(pause_ * 2, kPauseMin, kPauseMax);
  std::this_thread::sleep_for(pause_);
}

bool BackOff::stalled(Milliseconds longest) const {
  return Deadline::Clock::now() - moved_ >= longest;
}

}  // namespace holdfast::client
