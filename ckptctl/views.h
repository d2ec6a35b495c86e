// What the commands show to people, as text: pure functions of what the daemon said, so that tests
// compare them with texts written by hand. Every name and text from elsewhere is escaped in here.
//
//   out << RenderStatus(reply);
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "tiers/image/record.h"

namespace holdfast {

namespace v1 {
class BadShard;
class ScrubStatus;
class CollectGarbageReply;
class DaemonStatus;
class ExplainReply;
class GetNodesReply;
class MeasureFabricReply;
class ShowFabricReply;
class GetStatusReply;
class ListCheckpointsReply;
class RebuildReply;
class TimelineReply;
class DaemonEvent;
class Leaving;
class VerifyProgress;
class WhereReply;
}  // namespace v1

// Ages are told by the daemon's clock, as the reply gives it.
std::string RenderStatus(const v1::GetStatusReply& reply);

// One line a job.
std::string RenderJobs(const v1::GetStatusReply& reply);
// A line, where there are none to show: another node's may be missing for a problem.
std::string NoJobs(const v1::DaemonStatus& daemon);

std::string RenderFabric(const v1::ShowFabricReply& reply);
std::string RenderMeasured(const v1::MeasureFabricReply& reply);

std::string RenderNodes(const v1::GetNodesReply& reply);

std::string RenderList(std::string_view job, const v1::ListCheckpointsReply& reply,
                       int64_t now_unix_ms);

// `layout` is the record's, decoded; at most `slices_max` slices are listed.
struct InspectedShard {
  ShardRecord record;
  Layout layout;
  std::string location;
};
std::string RenderShard(const InspectedShard& shard, size_t slices_max, int64_t now_unix_ms);

std::string RenderWhere(std::string_view job, const v1::WhereReply& reply);
std::string RenderExplain(std::string_view job, const v1::ExplainReply& reply);
std::string RenderTimeline(std::string_view job, const v1::TimelineReply& reply);
std::string RenderEvent(const v1::DaemonEvent& event);
std::string RenderLeft(const std::string& job, const v1::Leaving& leaving);
std::string RenderGarbage(const v1::CollectGarbageReply& reply, bool dry_run);
std::string RenderRebuild(const v1::RebuildReply& reply);

// The timeline in the format that chrome://tracing and ui.perfetto.dev open: a process for each
// stage, in it a track for each rank (a further one where a rank's times overlap), true times in
// microseconds since 1970.
std::string TimelineTrace(std::string_view job, const v1::TimelineReply& reply);

// "step 900 (attempt 3) rank 1, /dev/shm/holdfast/slot-000002: <what>".
std::string RenderBadShard(const v1::BadShard& bad);

// One line for a terminal, without its line end: bar, share, bytes, rate and what is left at this
// rate.
std::string RenderScrub(const v1::ScrubStatus& scrub, int64_t unix_ms);
std::string RenderVerifyProgress(const v1::VerifyProgress& progress, int64_t elapsed_ms);

}  // namespace holdfast
