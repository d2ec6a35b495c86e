#include "tiers/transfer/pacer.h"

#include <algorithm>
#include <utility>

#include "tiers/transfer/transfer_control.h"

namespace holdfast {
namespace {

// What the bucket holds: enough to keep a drive busy between two looks, little enough that a limit
// is one within a second.
constexpr double kBucketSeconds = 0.1;
// Who waits looks again so often: for a cancellation, which nobody signals here.
constexpr std::chrono::milliseconds kLook{20};

}  // namespace

Pacer::Pacer(uint64_t bytes_per_second, std::shared_ptr<PacerGate> gate)
    : gate_(std::move(gate)),
      bytes_per_second_(bytes_per_second),
      filled_at_(std::chrono::steady_clock::now()) {}

bool Pacer::Acquire(uint64_t bytes, TransferControl* control) {
  MutexLock lock(mutex_);
  if (control != nullptr && control->cancelled()) {
    return false;
  }
  const uint64_t ticket = next_ticket_++;
  waiting_.insert(ticket);
  bool granted = false;
  bool hurried = false;
  bool gated = false;  // the gate has held it back
  for (;;) {
    const TimePoint now = std::chrono::steady_clock::now();
    Fill(now);
    const bool first = *waiting_.begin() == ticket;
    const bool held = gate_ != nullptr && gate_->Holds();
    if (!held && (bytes_per_second_ == 0 || (first && bytes_ > 0))) {
      granted = true;
      break;
    }
    if (control != nullptr && control->hurried()) {
      granted = hurried = true;
      break;
    }
    if (held && !gated) {
      gate_->BeginWait();
      gated = true;
    }
    if (control != nullptr && control->cancelled()) {
      break;
    }
    // (The first one looks for all: they are woken when it goes.)
    TimePoint until = now + (held && first ? kGateLook : kLook);
    if (first && !held) {
      const std::chrono::duration<double> missing(-bytes_ / static_cast<double>(bytes_per_second_));
      until = std::min(until, now + std::chrono::duration_cast<std::chrono::nanoseconds>(missing) +
                                  std::chrono::microseconds(50));
    }
    changed_cv_.WaitUntil(mutex_, until);
    if (control != nullptr) {
      control->Touch();
    }
  }
  if (gated) {
    gate_->EndWait();
  }
  waiting_.erase(ticket);
  if (granted && !hurried && bytes_per_second_ != 0) {
    bytes_ -= static_cast<double>(bytes);
  }
  changed_cv_.NotifyAll();
  return granted;
}

void Pacer::SetRate(uint64_t bytes_per_second) {
  MutexLock lock(mutex_);
  Fill(std::chrono::steady_clock::now());
  bytes_per_second_ = bytes_per_second;
  // What an earlier, lower rate still owes is not waited for at the new one for ever.
  bytes_ = std::max(bytes_, -static_cast<double>(bytes_per_second));
  changed_cv_.NotifyAll();
}

uint64_t Pacer::rate() const {
  MutexLock lock(mutex_);
  return bytes_per_second_;
}

size_t Pacer::waiting() const {
  MutexLock lock(mutex_);
  return waiting_.size();
}

void Pacer::Fill(TimePoint now) {
  const double seconds = std::chrono::duration<double>(now - filled_at_).count();
  filled_at_ = now;
  const auto rate = static_cast<double>(bytes_per_second_);
  bytes_ = std::min(bytes_ + seconds * rate, rate * kBucketSeconds);
}

}  // namespace holdfast
