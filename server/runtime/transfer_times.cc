#include "server/runtime/transfer_times.h"

#include <string>
#include <variant>
#include <vector>

namespace holdfast {
namespace {

const std::vector<double> kFetchBounds = {0.05, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600};

}  // namespace

TransferTimes::TransferTimes(Metrics& registry) {
  for (const TierKind tier : {TierKind::kPeer, TierKind::kNvme, TierKind::kRemote}) {
    const std::string name(TierName(tier));
    OfTier& of = tiers_[tier];
    of.flushing = &registry.AddGauge(
        "holdfast_tier_flushing_bytes",
        "Of shards on their way from this node into a tier; peer: into this node's memory, kept "
        "for others.",
        {{"tier", name}});
    const auto add_bytes = [&](const char* use) {
      return &registry.AddCounter("holdfast_fetched_bytes_total",
                                  "Bytes of shards that were brought into this node's memory, by "
                                  "where they were and what for.",
                                  {{"tier", name}, {"use", use}});
    };
    of.restored = add_bytes("restore");
    if (tier == TierKind::kPeer) {
      of.replicated = add_bytes("replica");
    }
    of.fetched = &registry.AddHistogram(
        "holdfast_fetch_seconds",
        "Time to bring a shard that somebody restores into memory, by where it was.", kFetchBounds,
        {{"tier", name}});
  }
}

void TransferTimes::Began(const FlushShard& action, MonotonicTime now) {
  Begin(action.drain, {action.to, Use::kFlush, action.image_bytes, now});
}

void TransferTimes::Began(const FetchShard& action, MonotonicTime now) {
  const bool replica = action.from == TierKind::kPeer && action.background;
  Begin(action.drain,
        {action.from, replica ? Use::kReplica : Use::kRestore, action.slot_bytes, now});
}

void TransferTimes::Begin(DrainId drain, UnderWay transfer) {
  const auto tier = tiers_.find(transfer.tier);
  if (tier == tiers_.end() || !under_way_.emplace(drain, transfer).second) {
    return;
  }
  if (transfer.use != Use::kRestore) {
    tier->second.flushing_bytes += transfer.bytes;
    tier->second.flushing->Set(static_cast<double>(tier->second.flushing_bytes));
  }
}

void TransferTimes::Ended(const Event& event, MonotonicTime now) {
  if (const auto* flush = std::get_if<FlushEnded>(&event)) {
    End(flush->drain, flush->status.ok(), flush->copy.copy.image_bytes, now);
  } else if (const auto* fetch = std::get_if<FetchEnded>(&event)) {
    End(fetch->drain, fetch->status.ok(), fetch->copy.image_bytes, now);
  }
}

void TransferTimes::FillStatus(v1::DaemonStatus& status) const {
  for (v1::TierStatus& tier : *status.mutable_tiers()) {
    if (tier.tier() == TierName(TierKind::kPeer)) {
      tier.set_bytes_written(replicated_bytes_.load(std::memory_order_relaxed));
      tier.set_bytes_read(restored_from_peers_bytes_.load(std::memory_order_relaxed));
    }
  }
}

void TransferTimes::End(DrainId drain, bool well, uint64_t bytes, MonotonicTime now) {
  const auto found = under_way_.find(drain);
  if (found == under_way_.end()) {
    return;
  }
  const UnderWay transfer = found->second;
  under_way_.erase(found);
  OfTier& tier = tiers_.at(transfer.tier);
  if (transfer.use != Use::kRestore) {
    tier.flushing_bytes -= transfer.bytes;
    tier.flushing->Set(static_cast<double>(tier.flushing_bytes));
  }
  if (!well || transfer.use == Use::kFlush) {
    return;  // what flushes wrote the drives count
  }
  (transfer.use == Use::kReplica ? tier.replicated : tier.restored)
      ->Add(static_cast<double>(bytes));
  if (transfer.tier == TierKind::kPeer) {
    (transfer.use == Use::kReplica ? replicated_bytes_ : restored_from_peers_bytes_)
        .fetch_add(bytes, std::memory_order_relaxed);
  }
  if (transfer.use == Use::kRestore) {
    tier.fetched->Observe(std::chrono::duration<double>(now - transfer.began).count());
  }
}

}  // namespace holdfast
