// What the cases share: opening a job or giving up with a message, timing, sizes.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "bench/cases.h"
#include "bench/daemon.h"
#include "holdfast/holdfast.h"

namespace holdfast::bench {

inline constexpr size_t kMiB = size_t{1} << 20;
inline constexpr size_t kGiB = size_t{1} << 30;
inline constexpr Milliseconds kCallDeadline{120'000};

inline void MustSucceed(const Status& status, const char* doing) {
  if (!status.ok()) {
    std::fprintf(stderr, "holdfast_bench: %s: %s\n", doing, status.ToString().c_str());
    std::exit(1);
  }
}

template <typename T>
T MustSucceed(Result<T> result, const char* doing) {
  MustSucceed(result.status(), doing);
  return std::move(result).value();
}

inline std::unique_ptr<Job> OpenJob(const Daemon& daemon, const std::string& name, int threads) {
  JobOptions options;
  options.job = name;
  options.socket = daemon.socket();
  options.copy_threads = static_cast<uint32_t>(threads);
  return MustSucceed(Job::Open(options), "open the job");
}

class Stopwatch {
 public:
  double Seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - began_).count();
  }

 private:
  std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
};

struct Size {
  std::string name;
  size_t bytes;
  size_t tensor_bytes;
};
// 64 MiB to 4 GiB in tensors of 16 MiB, and 10,000 small tensors.
inline std::vector<Size> Sizes(const CaseOptions& options) {
  std::vector<Size> sizes;
  for (size_t bytes : {64 * kMiB, 256 * kMiB, kGiB, 4 * kGiB}) {
    if (bytes <= options.bytes_max) {
      const std::string name = bytes < kGiB ? std::to_string(bytes / kMiB) + " MiB"
                                            : std::to_string(bytes / kGiB) + " GiB";
      sizes.push_back({name, bytes, 16 * kMiB});
    }
  }
  sizes.push_back({"10,000 tensors of 48 KiB", 10'000 * size_t{48} * 1024, size_t{48} * 1024});
  return sizes;
}

inline double Rate(size_t bytes, double seconds) {
  return static_cast<double>(bytes) / seconds / 1e9;
}

// A row whose value and ceiling are rates, from the seconds of each round.
inline Row RateRow(const std::string& name, size_t bytes, const std::vector<double>& seconds,
                   const std::vector<double>& ceiling_seconds, double bar, double goal) {
  std::vector<double> ratios;
  for (size_t i = 0; i < seconds.size(); ++i) {
    ratios.push_back(ceiling_seconds[i] / seconds[i]);
  }
  Row row{name, "GB/s"};
  row.value = Rate(bytes, Median(seconds));
  row.ceiling = Rate(bytes, Median(ceiling_seconds));
  row.ratio = Median(ratios);
  row.ratio_low = *std::min_element(ratios.begin(), ratios.end());
  row.ratio_high = *std::max_element(ratios.begin(), ratios.end());
  row.bar = bar;
  row.goal = goal;
  return row;
}

}  // namespace holdfast::bench
