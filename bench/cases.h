// The rows of docs/design.md, "What it must cost", that one node in memory has. Each case measures
// its ceiling interleaved with what it judges, several rounds, and reports medians.
#pragma once

#include "bench/report.h"

namespace holdfast::bench {

struct CaseOptions {
  int rounds = 7;
  int threads = 2;
  size_t bytes_max = size_t{4} << 30;
};

Report RunSnapshot(const CaseOptions& options);
Report RunFirstSave(const CaseOptions& options);
Report RunOverlap(const CaseOptions& options);
Report RunAttach(const CaseOptions& options);
Report RunRestore(const CaseOptions& options);
Report RunIdle(const CaseOptions& options);

}  // namespace holdfast::bench
