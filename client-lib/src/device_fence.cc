#include "client-lib/src/device_fence.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client-lib/src/errors.h"

namespace holdfast::client {
namespace {

// An event recorded on a captured stream becomes part of its graph, and a wait for an event of ours
// spoils the capture: both are to be known before anything is done.
Status CheckNotCapturing(Devices& devices, const std::vector<DeviceStream>& streams) {
  for (const DeviceStream& stream : streams) {
    if (stream.device < 0) {
      return Status(Code::kInvalidArgument,
                    absl::StrCat("a stream is said to be of device ", stream.device));
    }
    HF_TRY_ASSIGN(void* const context, devices.Context(stream.device));
    const ContextScope scope(devices.driver(), context);
    HF_TRY(devices.Check(scope.error(), "make its context current", stream.device));
    bool capturing = false;
    const DriverError error = devices.driver().IsCapturing(stream.stream, &capturing);
    if (error == kDriverCaptureImplicit || (error == kDriverOk && capturing)) {
      return Status(Code::kRefused,
                    absl::StrCat("device ", stream.device,
                                 ": a CUDA graph is being captured on a stream that was given: "
                                 "save, restore and fence before the capture begins or after it "
                                 "has ended"));
    }
    HF_TRY(devices.Check(error, "ask whether a stream is being captured", stream.device));
  }
  return Status();
}

}  // namespace

Result<std::shared_ptr<DeviceFence>> DeviceFence::After(std::shared_ptr<Devices> devices,
                                                        std::set<int32_t> used,
                                                        std::vector<DeviceStream> streams,
                                                        std::optional<Deadline> until) {
  std::erase_if(streams, [&used](const DeviceStream& stream) {
    return stream.device >= 0 && used.count(stream.device) == 0;
  });
  for (const int32_t device : used) {
    HF_TRY(devices->Context(device).status());
  }
  HF_TRY(CheckNotCapturing(*devices, streams));
  for (const int32_t device : used) {
    if (devices->Stuck(device)) {
      return Status(Code::kUnavailable,
                    absl::StrCat("device ", device,
                                 ": copies of an earlier save or restore are still under way, "
                                 "behind work that does not end"));
    }
  }
  std::shared_ptr<DeviceFence> fence(new DeviceFence(devices, std::move(used), streams, until));
  const MutexLock lock(fence->mutex_);
  for (const DeviceStream& stream : streams) {
    HF_TRY_ASSIGN(std::shared_ptr<DeviceEvent> event,
                  DeviceEvent::Record(devices, stream.device, stream.stream));
    fence->before_.push_back(std::move(event));
  }
  return fence;
}

Status DeviceFence::Order() {
  const MutexLock lock(mutex_);
  for (const int32_t device : used_) {
    HF_TRY_ASSIGN(void* const stream, devices_->Stream(device));
    for (const std::shared_ptr<DeviceEvent>& event : before_) {
      HF_TRY(event->MakeWait(device, stream));
    }
  }
  return Status();
}

void DeviceFence::FirstEnqueued(std::vector<std::shared_ptr<DeviceEvent>> first) {
  const MutexLock lock(mutex_);
  first_ = std::move(first);
}

void DeviceFence::Enqueued(std::vector<std::shared_ptr<DeviceEvent>> last) {
  const MutexLock lock(mutex_);
  if (state_ == State::kBegun) {
    state_ = State::kEnqueued;
    last_ = std::move(last);
    changed_.NotifyAll();
  }
}

void DeviceFence::Over() {
  const MutexLock lock(mutex_);
  state_ = State::kOver;
  before_.clear();
  first_.clear();
  last_.clear();
  changed_.NotifyAll();
}

Status DeviceFence::Fence(const std::vector<DeviceStream>& streams, Deadline deadline) {
  const MutexLock lock(mutex_);
  while (state_ == State::kBegun) {
    if (!changed_.WaitUntil(mutex_, deadline.NextLook()) && state_ == State::kBegun) {
      return Status(Code::kDeadlineExceeded, "the copies are not all enqueued yet");
    }
  }
  if (state_ == State::kOver) {
    return Status();
  }
  return MakeWait(streams, last_);
}

Status DeviceFence::FenceFirst() {
  const MutexLock lock(mutex_);
  if (state_ == State::kOver || first_.empty()) {
    return Status();
  }
  for (const int32_t device : used_) {
    if (std::none_of(streams_.begin(), streams_.end(),
                     [&](const DeviceStream& stream) { return stream.device == device; })) {
      return Status(Code::kRefused, absl::StrCat("no stream of device ", device, " was given"));
    }
  }
  return MakeWait(streams_, first_);
}

Status DeviceFence::MakeWait(const std::vector<DeviceStream>& streams,
                             const std::vector<std::shared_ptr<DeviceEvent>>& events) {
  HF_TRY(CheckNotCapturing(*devices_, streams));
  for (const DeviceStream& stream : streams) {
    for (const std::shared_ptr<DeviceEvent>& event : events) {
      HF_TRY(event->MakeWait(stream.device, stream.stream));
    }
  }
  return Status();
}

}  // namespace holdfast::client
