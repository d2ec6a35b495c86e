// The commands that change something: restore and rm.
#include <string>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/units.h"
#include "ckptctl/ask.h"
#include "ckptctl/commands.h"
#include "ckptctl/render.h"
#include "ckptctl/text.h"
#include "ckptctl/upkeep.h"
#include "holdfast/v1/admin.pb.h"

namespace holdfast {
namespace {

// What `rm` without --yes says instead of doing it.
absl::Status WouldRemove(const Context& context, const std::string& job) {
  v1::ListCheckpointsRequest request;
  request.set_job(job);
  HF_ASSIGN_OR_RETURN(const v1::ListCheckpointsReply reply,
                      AskFor(context, &AdminClient::ListCheckpoints, request));
  uint64_t bytes = 0;
  for (const v1::Checkpoint& c : reply.checkpoints()) {
    bytes += c.bytes();
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "nothing was removed. It would forget job ", job, " with ",
      Count(static_cast<uint64_t>(reply.checkpoints_size()), "checkpoint", "checkpoints"), ", ",
      FormatBytes(bytes), ", for good. If that is meant: ckptctl rm ", job, " --yes"));
}

// What `restore --from-scratch` without --yes says instead of doing it.
absl::Status WouldStartOver(const Context& context, const std::string& job) {
  v1::ListCheckpointsRequest request;
  request.set_job(job);
  HF_ASSIGN_OR_RETURN(const v1::ListCheckpointsReply reply,
                      AskFor(context, &AdminClient::ListCheckpoints, request));
  return absl::FailedPreconditionError(absl::StrCat(
      "nothing was changed. Job ", job, " would begin from nothing, and what it has saved so far (",
      Count(static_cast<uint64_t>(reply.checkpoints_size()), "checkpoint", "checkpoints"),
      ") would go when its grace time is over. If that is meant: ckptctl restore ", job,
      " --from-scratch --yes"));
}

}  // namespace

ExitCode RunRestore(const Context& context, const RestoreArguments& arguments) {
  if (arguments.from_scratch && !arguments.yes) {
    return ReportError(context, WouldStartOver(context, arguments.job));
  }
  v1::SetRestorePointRequest request;
  request.set_job(arguments.job);
  request.set_step(arguments.step.value_or(0));
  request.set_attempt(arguments.attempt);
  request.set_from_scratch(arguments.from_scratch);
  request.set_clear(arguments.clear);
  return Ask(context, arguments.job, &AdminClient::SetRestorePoint, request,
             [&](const v1::SetRestorePointReply& reply) {
               return EscapeText(reply.text()) + "\n" +
                      (arguments.clear ? ""
                                       : absl::StrCat("It takes effect when the job's ranks next "
                                                      "restore. To take it back before: ckptctl "
                                                      "restore ",
                                                      EscapeText(arguments.job), " --clear\n"));
             });
}

ExitCode RunRemove(const Context& context, const RemoveArguments& arguments) {
  if (arguments.step) {
    return RunRemoveStep(context, arguments);
  }
  if (!arguments.yes) {
    return ReportError(context, WouldRemove(context, arguments.job));
  }
  v1::RemoveJobRequest request;
  request.set_job(arguments.job);
  return Ask(context, arguments.job, &AdminClient::RemoveJob, request,
             [&](const v1::RemoveJobReply& reply) {
               std::string out = absl::StrCat("job ", EscapeText(arguments.job), " is forgotten; ",
                                              FormatBytes(reply.bytes_freed()), " are free again");
               for (const std::string& node : reply.nodes_away()) {
                 absl::StrAppend(&out, "; what ", EscapeText(node),
                                 " has of it goes when it is back");
               }
               return out + "\n";
             });
}

}  // namespace holdfast
