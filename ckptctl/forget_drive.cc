// forget-drive: a drive, or a remote directory, that is lost for good is waited for no longer.
#include "absl/strings/str_cat.h"
#include "ckptctl/ask.h"
#include "ckptctl/commands.h"
#include "ckptctl/text.h"
#include "holdfast/v1/admin.pb.h"

namespace holdfast {
namespace {

// What the daemon says of the drive, where that is absent: that names the jobs.
std::string WhatIsKnown(const Context& context, const std::string& id) {
  const auto status = AskFor(context, &AdminClient::GetStatus, v1::GetStatusRequest());
  if (!status.ok()) {
    return "";
  }
  for (const v1::TierStatus& tier : status->daemon().tiers()) {
    for (const std::string& note : tier.notes()) {
      if (note.find(absl::StrCat("drive ", id.substr(0, 8), ",")) != std::string::npos) {
        return absl::StrCat(" ckptd says: ", note);
      }
    }
  }
  return "";
}

}  // namespace

ExitCode RunForgetDrive(const Context& context, const ForgetDriveArguments& arguments) {
  if (!arguments.yes) {
    return ReportError(
        context,
        absl::FailedPreconditionError(absl::StrCat(
            "forget-drive ", arguments.id,
            ": nothing was changed. Restores would no longer wait for this drive, "
            "and use what is left without it.",
            WhatIsKnown(context, arguments.id),
            " If the drive is lost for good: ckptctl forget-drive ", arguments.id, " --yes")));
  }
  v1::ForgetDriveRequest request;
  request.set_id(arguments.id);
  return Ask(context, "", &AdminClient::ForgetDrive, request,
             [](const v1::ForgetDriveReply& reply) { return EscapeText(reply.text()) + "\n"; });
}

}  // namespace holdfast
