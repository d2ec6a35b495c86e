// What moves between memory and the other tiers on this node: how much is under way, how much
// came, and how long it took. Out of the core's actions and the events that end them.
//
//   TransferTimes times(registry);
//   times.Began(action, now);        // FlushShard, FetchShard
//   times.Ended(event, now);         // FlushEnded, FetchEnded
//
// Owner: DaemonMetrics; the reactor's thread only, but for what FillStatus reads. The core bounds
// what is under way.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>

#include "base/clock.h"
#include "base/metrics.h"
#include "holdfast/v1/admin.pb.h"
#include "server/events.h"

namespace holdfast {

class TransferTimes {
 public:
  explicit TransferTimes(Metrics& registry);
  void Began(const FlushShard& action, MonotonicTime now);
  void Began(const FetchShard& action, MonotonicTime now);
  void Ended(const Event& event, MonotonicTime now);
  // Any thread: what came out of other nodes' memory since the daemon started: replicas, which are
  // written into this one's, and what was restored, which was read.
  void FillStatus(v1::DaemonStatus& status) const;

 private:
  // kReplica: of another node's shard, which this one keeps for it.
  enum class Use : uint8_t { kFlush, kReplica, kRestore };
  struct UnderWay {
    TierKind tier = TierKind::kNvme;
    Use use = Use::kFlush;
    uint64_t bytes = 0;
    MonotonicTime began;
  };
  struct OfTier {
    Gauge* flushing = nullptr;  // bytes on their way into it
    uint64_t flushing_bytes = 0;
    Counter* restored = nullptr;    // bytes that came from it
    Counter* replicated = nullptr;  // peer alone
    Histogram* fetched = nullptr;
  };

  void Begin(DrainId drain, UnderWay transfer);
  void End(DrainId drain, bool well, uint64_t bytes, MonotonicTime now);

  std::map<DrainId, UnderWay> under_way_;
  std::map<TierKind, OfTier> tiers_;
  std::atomic<uint64_t> replicated_bytes_{0};
  std::atomic<uint64_t> restored_from_peers_bytes_{0};
};

}  // namespace holdfast
