// The commands that change something: restore and rm.
#include <nlohmann/json.hpp>
#include <ostream>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/units.h"
#include "ckptctl/commands.h"
#include "ckptctl/json.h"
#include "ckptctl/render.h"
#include "ckptctl/text.h"
#include "ckptctl/upkeep.h"
#include "holdfast/v1/admin.pb.h"

namespace holdfast {
namespace {

// What `rm` without --yes says instead of doing it.
absl::Status WouldRemove(AdminClient& client, const std::string& job) {
  v1::ListCheckpointsRequest request;
  request.set_job(job);
  v1::ListCheckpointsReply reply;
  HF_RETURN_IF_ERROR(client.ListCheckpoints(request, reply));
  uint64_t bytes = 0;
  for (const v1::Checkpoint& c : reply.checkpoints()) {
    bytes += c.bytes();
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "nothing was removed. It would forget job ", job, " with ",
      Count(static_cast<uint64_t>(reply.checkpoints_size()), "checkpoint", "checkpoints"), ", ",
      FormatBytes(bytes), ", for good. If that is meant: ckptctl rm ", job, " --yes"));
}

}  // namespace

ExitCode RunRestore(const Context& context, const RestoreArguments& arguments) {
  const auto client = ConnectAdmin(context);
  if (!client.ok()) {
    return ReportError(context, client.status());
  }
  v1::SetRestorePointRequest request;
  request.set_job(arguments.job);
  request.set_step(arguments.step.value_or(0));
  request.set_attempt(arguments.attempt);
  request.set_from_scratch(arguments.from_scratch);
  request.set_clear(arguments.clear);
  v1::SetRestorePointReply reply;
  if (const absl::Status status = (*client)->SetRestorePoint(request, reply); !status.ok()) {
    return ReportError(context, status);
  }
  if (context.json) {
    nlohmann::ordered_json json;
    json["job"] = arguments.job;
    json.update(MessageToJson(reply));
    *context.out << DumpJson(json) << "\n";
    return ExitCode::kOk;
  }
  *context.out << EscapeText(reply.text()) << "\n";
  if (!arguments.clear) {
    *context.out << "It takes effect when the job's ranks next restore. To take it back before: "
                    "ckptctl restore "
                 << EscapeText(arguments.job) << " --clear\n";
  }
  return ExitCode::kOk;
}

ExitCode RunRemove(const Context& context, const RemoveArguments& arguments) {
  if (arguments.step) {
    return RunRemoveStep(context, arguments);
  }
  const auto client = ConnectAdmin(context);
  if (!client.ok()) {
    return ReportError(context, client.status());
  }
  if (!arguments.yes) {
    return ReportError(context, WouldRemove(**client, arguments.job));
  }
  v1::RemoveJobRequest request;
  request.set_job(arguments.job);
  v1::RemoveJobReply reply;
  if (const absl::Status status = (*client)->RemoveJob(request, reply); !status.ok()) {
    return ReportError(context, status);
  }
  if (context.json) {
    nlohmann::ordered_json json;
    json["job"] = arguments.job;
    json.update(MessageToJson(reply));
    *context.out << DumpJson(json) << "\n";
  } else {
    *context.out << "job " << EscapeText(arguments.job) << " is forgotten; "
                 << FormatBytes(reply.bytes_freed()) << " are free again";
    for (const std::string& node : reply.nodes_away()) {
      *context.out << "; what " << EscapeText(node) << " has of it goes when it is back";
    }
    *context.out << "\n";
  }
  return ExitCode::kOk;
}

}  // namespace holdfast
