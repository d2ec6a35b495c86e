#include "ckptctl/each_job.h"

#include <ostream>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "ckptctl/ask.h"
#include "ckptctl/json.h"

namespace holdfast {

ExitCode ForEachJob(const Context& context, const char* what, const std::string& only,
                    const OfJob& of_job) {
  const auto client = ConnectAdmin(context);
  if (!client.ok()) {
    return ReportError(context, client.status());
  }
  const auto jobs = JobsOf(**client, only);
  if (!jobs.ok()) {
    return ReportError(context, jobs.status());
  }
  nlohmann::ordered_json results = nlohmann::ordered_json::array();
  uint64_t bad = 0;
  for (const std::string& job : *jobs) {
    absl::StatusOr<JobDone> done = of_job(**client, job, bad);
    if (!done.ok()) {
      return ReportError(context, Annotate(done.status(), absl::StrCat(what, " ", job)));
    }
    bad += done->bad;
    results.push_back(std::move(done->json));
    if (done->interrupted) {
      return ExitCode::kInterrupted;
    }
    if (done->ends) {
      break;
    }
  }
  if (context.json) {
    nlohmann::ordered_json json;
    json["ok"] = bad == 0;
    json["jobs"] = std::move(results);
    *context.out << DumpJson(json) << "\n";
  } else if (jobs->empty()) {
    *context.out << "no jobs of yours: nothing to " << what << "\n";
  }
  return bad == 0 ? ExitCode::kOk : ExitCode::kDamaged;
}

}  // namespace holdfast
