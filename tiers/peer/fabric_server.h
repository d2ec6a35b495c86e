// The door at which peers that want to read ask, and the thread that lets them in and keeps them
// going. Internal to tiers/peer/.
//
//   HF_ASSIGN_OR_RETURN(auto server, FabricServer::Start(device, token, age_max));
//
// One-sided reads need nothing of this program where the device answers them itself; where the
// provider is software, its work is done in the calls of this thread. It sleeps on the provider's
// descriptors, if it has any, and else looks every few milliseconds. Owned by Fabric.
#pragma once

#include <rdma/fi_cm.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <set>
#include <string>
#include <thread>

#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "base/unique_fd.h"
#include "tiers/peer/fabric_device.h"

namespace holdfast {

// Beyond that the oldest connection is closed: who reads on it connects again.
inline constexpr size_t kFabricConnectionsMax = 4096;

class FabricServer {
 public:
  // Only those are let in who say `token`, and only for so long.
  static absl::StatusOr<std::unique_ptr<FabricServer>> Start(std::shared_ptr<FabricDevice> device,
                                                             std::string token,
                                                             Duration connection_age_max);
  ~FabricServer();  // ends the reads that are under way
  FabricServer(const FabricServer&) = delete;
  FabricServer& operator=(const FabricServer&) = delete;

  const std::string& address() const { return address_; }
  bool sleeps() const { return queues_.can_sleep(); }
  // Its connections are closed, soon: it is gone. Any thread.
  void LetGoOf(uint64_t reader_id) EXCLUDES(mutex_);

 private:
  struct Connection {
    FabricObject<fid_ep> endpoint;
    MonotonicTime until;
    uint64_t reader_id;
  };

  FabricServer(FabricQueues queues, std::string token, Duration connection_age_max)
      : token_(std::move(token)),
        connection_age_max_(connection_age_max),
        queues_(std::move(queues)) {}
  absl::Status Listen();
  void Run();
  // Sleeps; false when it is to stop.
  bool Wait(int timeout_ms) EXCLUDES(mutex_);
  void TakeCompletions();
  bool TakeEvent();
  void Accept(fi_info* info, std::string_view said);
  void Close(const fid* connection);
  void CloseOld();
  bool TakeOrders() EXCLUDES(mutex_);

  const std::string token_;
  const Duration connection_age_max_;
  std::string address_;
  FabricQueues queues_;
  FabricObject<fid_pep> door_;
  std::deque<Connection> connections_;  // of the thread; the oldest first
  Mutex mutex_;
  std::set<uint64_t> gone_ GUARDED_BY(mutex_);  // readers that the thread has not let go of yet
  bool stopping_ GUARDED_BY(mutex_) = false;
  UniqueFd wake_;
  std::thread thread_;
};

}  // namespace holdfast
