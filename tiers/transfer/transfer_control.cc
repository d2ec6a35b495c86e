#include "tiers/transfer/transfer_control.h"

#include "absl/strings/str_cat.h"

namespace holdfast {

TransferControl::TransferControl() : last_progress_ns_(Clock::System()->Now().ns) {}

std::string TransferControl::doing() const {
  MutexLock lock(mutex_);
  return calls_.empty() ? "" : calls_.begin()->second;
}

void TransferControl::Advance(uint64_t bytes) {
  bytes_done_.fetch_add(bytes, std::memory_order_relaxed);
  Touch();
}

void TransferControl::Touch() {
  last_progress_ns_.store(Clock::System()->Now().ns, std::memory_order_relaxed);
}

TransferControl::Call::Call(TransferControl* control, const char* operation,
                            const std::string& path)
    : control_(control) {
  if (control_ != nullptr) {
    MutexLock lock(control_->mutex_);
    number_ = ++control_->calls_begun_;
    control_->calls_[number_] = absl::StrCat(operation, " '", path, "'");
  }
}

TransferControl::Call::~Call() {
  if (control_ != nullptr) {
    MutexLock lock(control_->mutex_);
    control_->calls_.erase(number_);
  }
}

}  // namespace holdfast
