// A command over one job, or over all of the caller's: one after the other, with one answer of all.
//
//   return ForEachJob(context, "verify", arguments.job,
//                     [&](AdminClient& client, const std::string& job, uint64_t bad_before)
//                         -> absl::StatusOr<JobDone> { … });
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/statusor.h"
#include "ckptctl/commands.h"

namespace holdfast {

// What came of one job. Without --json it has been shown.
struct JobDone {
  nlohmann::ordered_json json = {};
  uint64_t bad = 0;  // copies that are bad still
  bool interrupted = false;
  bool ends = false;  // the jobs behind it are left
};

// `bad_before`: of the jobs before it. An error ends the command.
using OfJob = std::function<absl::StatusOr<JobDone>(AdminClient& client, const std::string& job,
                                                    uint64_t bad_before)>;

// `only`: that job alone; empty: all.
ExitCode ForEachJob(const Context& context, const char* what, const std::string& only,
                    const OfJob& of_job);

}  // namespace holdfast
