// The rows of docs/design.md, "What it must cost". Each case measures
// its ceiling interleaved with what it judges, several rounds, and reports medians.
#pragma once

#include <string>

#include "bench/report.h"

namespace holdfast::bench {

struct CaseOptions {
  int rounds = 7;
  int threads = 2;
  size_t bytes_max = size_t{4} << 30;
  // Of the cases about durable tiers: size of the shard, where its files go, how they are moved.
  size_t bytes = size_t{2} << 30;
  std::string dir = "/var/tmp";
  size_t piece_bytes = size_t{4} << 20;
  size_t depth = 4;
};

Report RunSnapshot(const CaseOptions& options);
Report RunFirstSave(const CaseOptions& options);
Report RunOverlap(const CaseOptions& options);
Report RunAttach(const CaseOptions& options);
Report RunRestore(const CaseOptions& options);
Report RunIdle(const CaseOptions& options);
Report RunFlush(const CaseOptions& options);
Report RunLoad(const CaseOptions& options);
Report RunScrub(const CaseOptions& options);
Report RunRemote(const CaseOptions& options);
Report RunExport(const CaseOptions& options);
Report RunCompress(const CaseOptions& options);
Report RunDrainCost(const CaseOptions& options);
Report RunCoordinator(const CaseOptions& options);
Report RunPeer(const CaseOptions& options);
Report RunReshard(const CaseOptions& options);
Report RunReshardMemory(const CaseOptions& options);

}  // namespace holdfast::bench
