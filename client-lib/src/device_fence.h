// The place of one save or restore among the streams that make and use what it copies.
//
//   HF_TRY_ASSIGN(std::shared_ptr<DeviceFence> fence,
//                 DeviceFence::After(devices, {0}, options.streams));  // on the caller's thread
//   HF_TRY(fence->Order());                          // on the thread that copies, before it does
//   fence->FirstEnqueued(std::move(first_events));   // those of what may change soon are enqueued
//   fence->Enqueued(std::move(last_events));         // all are
//   fence->Over();                                   // nothing reads any more
//   HF_TRY(fence->FenceFirst());                     // meanwhile, on any thread
//   HF_TRY(fence->Fence(streams, deadline));
//
// Why this is right with a caching allocator: a block is freed to the allocator on the host while
// the device still works on it, and is given out again on the same stream. What a stream does after
// Fence comes after our reads, whichever tensor uses the block by then; and what the block held at
// the call comes before them.
//
// Thread-safe. Over is called by whoever ends the operation, at the latest; it may be called twice.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "base/mutex.h"
#include "client-lib/src/deadline.h"
#include "client-lib/src/devices.h"
#include "holdfast/job.h"

namespace holdfast::client {

class DeviceFence {
 public:
  // `used`: the devices of the tensors. Copies come after what is enqueued on `streams` now.
  // Streams of other devices are left alone: asking for such a device's context alone costs memory
  // there. kRefused: one of them is being captured; the capture is not disturbed. kUnavailable: a
  // device still has copies of an earlier operation under way that gave up waiting. `until`:
  // waiting for the copies ends then, too.
  static Result<std::shared_ptr<DeviceFence>> After(std::shared_ptr<Devices> devices,
                                                    std::set<int32_t> used,
                                                    std::vector<DeviceStream> streams,
                                                    std::optional<Deadline> until = std::nullopt);

  const std::shared_ptr<Devices>& devices() const { return devices_; }
  const std::set<int32_t>& used() const { return used_; }
  std::optional<Deadline> until() const { return until_; }

  // Our streams wait for what After has noted.
  Status Order();
  void FirstEnqueued(std::vector<std::shared_ptr<DeviceEvent>> first) EXCLUDES(mutex_);
  void Enqueued(std::vector<std::shared_ptr<DeviceEvent>> last) EXCLUDES(mutex_);
  void Over() EXCLUDES(mutex_);

  // After FirstEnqueued: what is enqueued from now on on the streams that After was given comes
  // after those reads. kRefused: a device was given no stream, or one of them is being captured.
  Status FenceFirst() EXCLUDES(mutex_);
  // What is enqueued on `streams` from now on comes after the reads. Waits until they are enqueued,
  // not until they are done. kRefused: one of the streams is being captured.
  Status Fence(const std::vector<DeviceStream>& streams, Deadline deadline) EXCLUDES(mutex_);

 private:
  DeviceFence(std::shared_ptr<Devices> devices, std::set<int32_t> used,
              std::vector<DeviceStream> streams, std::optional<Deadline> until)
      : devices_(std::move(devices)),
        used_(std::move(used)),
        streams_(std::move(streams)),
        until_(until) {}
  Status MakeWait(const std::vector<DeviceStream>& streams,
                  const std::vector<std::shared_ptr<DeviceEvent>>& events) REQUIRES(mutex_);

  enum class State { kBegun, kEnqueued, kOver };

  const std::shared_ptr<Devices> devices_;
  const std::set<int32_t> used_;
  const std::vector<DeviceStream> streams_;
  const std::optional<Deadline> until_;
  Mutex mutex_;
  CondVar changed_;
  State state_ GUARDED_BY(mutex_) = State::kBegun;
  std::vector<std::shared_ptr<DeviceEvent>> before_ GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<DeviceEvent>> first_ GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<DeviceEvent>> last_ GUARDED_BY(mutex_);
};

}  // namespace holdfast::client
