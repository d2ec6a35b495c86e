// The durable tiers' part of `ckptctl status`. Pure functions.
#pragma once

#include <cstdint>
#include <string>

#include "ckptctl/render.h"

namespace holdfast {

namespace v1 {
class DaemonStatus;
class JobStatus;
class TierStatus;
}  // namespace v1

inline constexpr size_t kBudgetCells = 20;  // of a bar

std::string StepText(uint64_t attempt, uint64_t step);

// One line and more for each tier that is configured: used of the budget, what is going on,
// trouble.
std::string RenderTiers(const v1::DaemonStatus& daemon);

// Of a job: how far each tier has come, what is under way, what waits and why; the policy in force.
// Rows of a label and a text.
void AddTierLines(const v1::JobStatus& job, int64_t now_unix_ms, Table& lines);

}  // namespace holdfast
