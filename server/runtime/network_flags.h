// The pages in which training processes say that their network is busy, and the gate before
// background traffic that follows from what they say (docs/protocol.md §21).
//
//   auto flags = std::make_shared<NetworkFlags>(Clock::System());
//   UniqueFd page = flags->Make(connection);              // for its client; read from then on
//   flags->Asked(connection, frame); flags->Answered(connection, frame);  // who waits holds
//   nothing flags->Closed(connection); Pacer pacer(rate, flags);
//
// The pages are looked at only when something wants to move bytes: at rest nothing runs. Shared by
// the Daemon and the pacers. Thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>

#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "base/unique_fd.h"
#include "holdfast/v1/admin.pb.h"
#include "holdfast/v1/client.pb.h"
#include "server/events.h"
#include "server/quiet_windows.h"
#include "tiers/transfer/pacer.h"

namespace holdfast {

class NetworkFlags final : public PacerGate {
 public:
  explicit NetworkFlags(const Clock* clock);
  ~NetworkFlags() override;

  absl::StatusOr<UniqueFd> Make(ConnectionId connection) EXCLUDES(mutex_);
  // Nothing is held back while a client waits for what may depend on it.
  void Asked(ConnectionId connection, const v1::ClientFrame& frame) EXCLUDES(mutex_);
  void Answered(ConnectionId connection, const v1::DaemonFrame& frame) EXCLUDES(mutex_);
  void Closed(ConnectionId connection) EXCLUDES(mutex_);

  bool Holds() override EXCLUDES(mutex_);
  void BeginWait() override EXCLUDES(mutex_);
  void EndWait() override EXCLUDES(mutex_);

  v1::NetworkQuiet Status() EXCLUDES(mutex_);

 private:
  class Page;
  bool Look(MonotonicTime now) REQUIRES(mutex_);

  const Clock* const clock_;
  Mutex mutex_;
  std::map<ConnectionId, std::unique_ptr<Page>> pages_ GUARDED_BY(mutex_);
  std::map<ConnectionId, std::set<uint64_t>> asked_ GUARDED_BY(mutex_);  // none is empty
  size_t waits_ GUARDED_BY(mutex_) = 0;                                  // of background traffic
  QuietWindows windows_ GUARDED_BY(mutex_);
};

}  // namespace holdfast
