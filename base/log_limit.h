// How many lines of the log somebody else may cause: a bucket of lines for each source, filled at
// a steady rate, and one for all sources together. Errors have buckets of their own: who fills the
// log with chatter does not hide them.
//
//   LogLimiter limiter(Clock::System(), {});
//   if (limiter.Admit("job=a", LogLevel::kInfo)) { … }
//   std::string line = limiter.TakeLeftOut();   // to be logged, unless empty
//
// Not thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>

#include "base/clock.h"
#include "base/log.h"

namespace holdfast {

class LogLimiter {
 public:
  struct Limits {
    // Every rank of a node's job may say something of each step.
    double per_second = 100;
    double burst = 500;
    double all_per_second = 500;
    double all_burst = 2000;
    size_t sources_max = 1024;
  };
  LogLimiter(const Clock* clock, const Limits& limits);

  bool Admit(std::string_view source, LogLevel level);
  // What was left out since the last time: at most once a second, unless `now`.
  std::string TakeLeftOut(bool now = false);

 private:
  struct Bucket {
    double lines = 0;
    MonotonicTime filled_at;
    uint64_t left_out = 0;
  };
  using Key = std::pair<std::string, bool>;  // source, and whether its errors

  Bucket& BucketOf(Key key);
  void Fill(Bucket& bucket, double per_second, double burst) const;

  const Clock* const clock_;
  const Limits limits_;
  std::map<Key, Bucket> buckets_;
  Bucket all_;
  uint64_t left_out_ = 0;
  MonotonicTime told_at_;
};

}  // namespace holdfast
