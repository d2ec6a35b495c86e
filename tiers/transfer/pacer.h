// Limits what transfers take: a bucket of bytes that fills at so many a second, for all who share
// it.
//
//   Pacer pacer(500 * kMiB);                       // 0: no limit
//   if (!pacer.Acquire(piece.size(), control)) …   // cancelled
//   pacer.SetRate(0);                              // at any time; whoever waits goes on
//
// Served in the order of arrival, so that users who ask for one piece after the other get equal
// shares, whatever the sizes. A piece may be larger than the bucket (a tenth of a
// second's bytes): it goes when there is anything in it and is paid for afterwards. A gate, where
// there is one, can hold everything back for a while, whatever the rate. Thread-safe; outlives its
// users.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>

#include "base/mutex.h"

namespace holdfast {

class TransferControl;

// Says when bytes may not go at all. Thread-safe; none of it blocks.
class PacerGate {
 public:
  virtual ~PacerGate() = default;
  // Asked every kGateLook by whoever it holds back.
  virtual bool Holds() = 0;
  // Around the wait of one for whom Holds was true: so that it is known how long anything waited.
  virtual void BeginWait() = 0;
  virtual void EndWait() = 0;
};
inline constexpr std::chrono::milliseconds kGateLook{2};

class Pacer {
 public:
  explicit Pacer(uint64_t bytes_per_second = 0, std::shared_ptr<PacerGate> gate = nullptr);
  Pacer(const Pacer&) = delete;
  Pacer& operator=(const Pacer&) = delete;

  // Waits until `bytes` may be moved. False, and nothing is taken, when `control` (may be null) is
  // cancelled, at the latest 20 ms after that. Waiting for one's turn is no stall: it touches
  // `control`. Whoever is hurried does not wait, and takes nothing from the others.
  bool Acquire(uint64_t bytes, TransferControl* control) EXCLUDES(mutex_);

  void SetRate(uint64_t bytes_per_second) EXCLUDES(mutex_);
  uint64_t rate() const EXCLUDES(mutex_);
  // How many are in Acquire at the moment: held back.
  size_t waiting() const EXCLUDES(mutex_);

 private:
  using TimePoint = std::chrono::steady_clock::time_point;

  void Fill(TimePoint now) REQUIRES(mutex_);

  const std::shared_ptr<PacerGate> gate_;  // may be null
  mutable Mutex mutex_;
  CondVar changed_cv_;
  uint64_t bytes_per_second_ GUARDED_BY(mutex_);
  double bytes_ GUARDED_BY(mutex_) = 0;  // in the bucket; below zero while a piece is paid for
  TimePoint filled_at_ GUARDED_BY(mutex_);
  uint64_t next_ticket_ GUARDED_BY(mutex_) = 0;
  std::set<uint64_t> waiting_ GUARDED_BY(mutex_);  // tickets: the first is served next
};

}  // namespace holdfast
