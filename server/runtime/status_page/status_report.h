// What the status page shows, as JSON: out of the same answers as `ckptctl` gets, as root would see
// them. Bounded, however many nodes, jobs, steps and ranks there are.
//
//   HF_ASSIGN_OR_RETURN(const std::string json, StatusReport(source, Clock::System()));
//
// The source is asked one question after the other, each with a part of the time that is left.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/clock.h"
#include "holdfast/v1/admin.pb.h"

namespace holdfast {

// Of what the report has. What is left out is counted in it.
struct StatusReportLimits {
  int nodes_max = 512;
  int jobs_max = 32;
  int steps_max = 16;            // newest ones of a job
  int saves_max = 24;            // of its timeline
  int texts_max = 16;            // problems, flushes, steps under way
  size_t cells_max = 64;         // of a map: with more ranks each stands for several
  uint64_t copies_max = 16'384;  // that the maps are made of; beyond it steps have none
  Duration time_max = std::chrono::seconds(8);
};

class StatusSource {
 public:
  virtual ~StatusSource() = default;
  virtual absl::StatusOr<v1::GetStatusReply> Status(Duration at_most) = 0;
  virtual absl::StatusOr<v1::GetNodesReply> Nodes(Duration at_most) = 0;
  virtual absl::StatusOr<v1::ListCheckpointsReply> List(const v1::ListCheckpointsRequest& request,
                                                        Duration at_most) = 0;
  virtual absl::StatusOr<v1::WhereReply> Where(const v1::WhereRequest& request,
                                               Duration at_most) = 0;
  virtual absl::StatusOr<v1::TimelineReply> Timeline(const v1::TimelineRequest& request,
                                                     Duration at_most) = 0;
};

// An error only where there is no status at all: what one job lacks is told in its place.
absl::StatusOr<std::string> StatusReport(StatusSource& source, const Clock& clock,
                                         const StatusReportLimits& limits = {});

// A row of the map of a step: of each rank, or of several, what lies in one tier: '.' nothing,
// 'g' good, 'p' some of them good, 'w' being written, 'a' out of reach, 'b' bad; the worst one
// shows. `copies` are of one step and one tier.
std::string MapRow(const std::vector<const v1::ShardCopy*>& copies, uint32_t world_size,
                   size_t cells_max);

}  // namespace holdfast
