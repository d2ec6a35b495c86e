// What the scrub of a node reads of a job in the remote tier, as the job's host tells it
// (Coordinator::FillScrub; PlanScrubRequest of admin.proto).
#pragma once

#include <cstddef>
#include <string>

#include "base/ids.h"
#include "holdfast/v1/admin.pb.h"
#include "server/events.h"

namespace holdfast {

inline constexpr size_t kScrubCopiesMax = 1024;  // of one PlanScrubReply to another node

ReadableShard InRemote(const std::string& job, const JobUuid& uuid, const v1::ScrubCopy& copy);

}  // namespace holdfast
