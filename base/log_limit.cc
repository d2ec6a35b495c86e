#include "base/log_limit.h"

#include <algorithm>
#include <chrono>
#include <vector>

#include "absl/strings/str_cat.h"

namespace holdfast {
namespace {

constexpr Duration kTellEvery = std::chrono::seconds(1);
constexpr size_t kSourceBytesMax = 128;
constexpr size_t kNamedMax = 4;

}  // namespace

LogLimiter::LogLimiter(const Clock* clock, const Limits& limits)
    : clock_(clock), limits_(limits), told_at_(clock->Now()) {
  all_ = {limits.all_burst, clock->Now(), 0};
}

bool LogLimiter::Admit(std::string_view source, LogLevel level) {
  const bool is_error = level == LogLevel::kError;
  Bucket& bucket = BucketOf({std::string(source.substr(0, kSourceBytesMax)), is_error});
  Fill(bucket, limits_.per_second, limits_.burst);
  Fill(all_, limits_.all_per_second, limits_.all_burst);
  if (bucket.lines < 1 || (!is_error && all_.lines < 1)) {
    ++bucket.left_out;
    ++left_out_;
    return false;
  }
  bucket.lines -= 1;
  if (!is_error) {
    all_.lines -= 1;
  }
  return true;
}

// When there are too many sources, those that have been quiet are forgotten; if none has, the new
// ones share a bucket.
LogLimiter::Bucket& LogLimiter::BucketOf(Key key) {
  const auto found = buckets_.find(key);
  if (found != buckets_.end()) {
    return found->second;
  }
  if (buckets_.size() >= limits_.sources_max) {
    for (auto& [known, bucket] : buckets_) {
      Fill(bucket, limits_.per_second, limits_.burst);
    }
    std::erase_if(buckets_, [this](const auto& entry) {
      return entry.second.left_out == 0 && entry.second.lines >= limits_.burst;
    });
  }
  if (buckets_.size() >= limits_.sources_max) {
    key.first = "others";
  }
  return buckets_.try_emplace(std::move(key), Bucket{limits_.burst, clock_->Now(), 0})
      .first->second;
}

void LogLimiter::Fill(Bucket& bucket, double per_second, double burst) const {
  const MonotonicTime now = clock_->Now();
  const double seconds = std::chrono::duration<double>(now - bucket.filled_at).count();
  bucket.lines = std::min(burst, bucket.lines + seconds * per_second);
  bucket.filled_at = now;
}

std::string LogLimiter::TakeLeftOut(bool now) {
  const MonotonicTime time = clock_->Now();
  if (left_out_ == 0 || (!now && time - told_at_ < kTellEvery)) {
    return "";
  }
  std::vector<std::pair<uint64_t, std::string>> sources;
  for (auto& [key, bucket] : buckets_) {
    if (bucket.left_out > 0) {
      sources.emplace_back(bucket.left_out, key.first);
      bucket.left_out = 0;
    }
  }
  std::sort(sources.rbegin(), sources.rend());
  std::string line = absl::StrCat("log: left out ", left_out_, " lines, as they came too fast:");
  for (size_t i = 0; i < std::min(sources.size(), kNamedMax); ++i) {
    absl::StrAppend(&line, i == 0 ? " " : ", ", sources[i].first, " of ", sources[i].second);
  }
  if (sources.size() > kNamedMax) {
    absl::StrAppend(&line, ", and of ", sources.size() - kNamedMax, " others");
  }
  left_out_ = 0;
  told_at_ = time;
  return line;
}

}  // namespace holdfast
