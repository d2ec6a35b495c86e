#include "server/runtime/status_page/once_a_while.h"

#include <utility>

namespace holdfast {

absl::StatusOr<std::string> OnceAWhile::Get() {
  {
    MutexLock lock(mutex_);
    while (making_) {
      made_.Wait(mutex_);  // it ends in time by itself
    }
    if (last_ && clock_->Now() - at_ < at_least_) {
      return *last_;
    }
    making_ = true;
  }
  absl::StatusOr<std::string> text = make_();
  MutexLock lock(mutex_);
  making_ = false;
  at_ = clock_->Now();
  last_ = std::move(text);
  made_.NotifyAll();
  return *last_;
}

}  // namespace holdfast
