// A text that is costly to make, for any number of readers: made when somebody asks, and no more
// often than each `at_least`. Without readers nothing runs.
//
//   OnceAWhile report(std::chrono::seconds(1), make);
//   HF_ASSIGN_OR_RETURN(const std::string text, report.Get());
//
// Thread-safe. Who asks while it is being made waits for that.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/mutex.h"

namespace holdfast {

class OnceAWhile {
 public:
  // An error is kept like a text. `make` ends in time by itself.
  using Make = std::function<absl::StatusOr<std::string>()>;
  OnceAWhile(Duration at_least, Make make, const Clock* clock = Clock::System())
      : at_least_(at_least), make_(std::move(make)), clock_(clock) {}

  absl::StatusOr<std::string> Get() EXCLUDES(mutex_);

 private:
  const Duration at_least_;
  const Make make_;
  const Clock* const clock_;
  Mutex mutex_;
  CondVar made_;
  bool making_ GUARDED_BY(mutex_) = false;
  MonotonicTime at_ GUARDED_BY(mutex_);
  std::optional<absl::StatusOr<std::string>> last_ GUARDED_BY(mutex_);
};

}  // namespace holdfast
