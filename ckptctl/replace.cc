// `replace`: a spare gets what the ranks of a node need to start there. Each job has a host of its
// own, and is asked for itself.
#include <nlohmann/json.hpp>
#include <ostream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ckptctl/ask.h"
#include "ckptctl/commands.h"
#include "ckptctl/text.h"
#include "holdfast/v1/admin.pb.h"

namespace holdfast {
namespace {

absl::StatusOr<std::vector<std::string>> Jobs(const Context& context, const std::string& only) {
  if (!only.empty()) {
    return std::vector<std::string>{only};
  }
  const auto status = AskFor(context, &AdminClient::GetStatus, v1::GetStatusRequest());
  if (!status.ok()) {
    return status.status();
  }
  std::vector<std::string> names;
  for (const v1::JobStatus& job : status->jobs()) {
    names.push_back(job.name());
  }
  return names;
}

}  // namespace

ExitCode RunReplace(const Context& context, const ReplaceArguments& arguments) {
  const absl::StatusOr<std::vector<std::string>> jobs = Jobs(context, arguments.job);
  if (!jobs.ok()) {
    return ReportError(context, jobs.status());
  }
  nlohmann::ordered_json shown = nlohmann::ordered_json::array();
  for (const std::string& job : *jobs) {
    v1::ReplaceRequest request;
    request.set_job(job);
    request.set_node(arguments.node);
    request.set_with(arguments.with);
    const auto reply = AskFor(context, &AdminClient::Replace, request);
    if (!reply.ok()) {  // (the jobs before it have been told, and can be told again)
      return ReportError(context, reply.status());
    }
    if (context.json) {
      nlohmann::ordered_json each = MessageToJson(*reply);
      each["job"] = job;
      shown.push_back(std::move(each));
    } else {
      *context.out << EscapeText(reply->text()) << "\n";
    }
  }
  if (context.json) {
    *context.out << DumpJson({{"jobs", std::move(shown)}}) << "\n";
  } else if (jobs->empty()) {
    *context.out << "no jobs: nothing to do\n";
  }
  return ExitCode::kOk;
}

}  // namespace holdfast
