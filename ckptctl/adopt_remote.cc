// adopt-remote: a remote directory whose cluster is gone for good gets another one.
#include "absl/strings/str_cat.h"
#include "ckptctl/ask.h"
#include "ckptctl/commands.h"
#include "ckptctl/text.h"
#include "holdfast/v1/admin.pb.h"

namespace holdfast {

ExitCode RunAdoptRemote(const Context& context, const AdoptRemoteArguments& arguments) {
  if (!arguments.yes) {
    return ReportError(
        context,
        absl::FailedPreconditionError(absl::StrCat(
            "adopt-remote: nothing was changed. This cluster would take over the remote directory ",
            "and everything in it, and the cluster that has it now would lose its use; that one ",
            "must be gone for good. If that is meant: ckptctl adopt-remote ", arguments.id,
            " --yes")));
  }
  v1::AdoptRemoteRequest request;
  request.set_from(arguments.id);
  return Ask(context, "", &AdminClient::AdoptRemote, request,
             [](const v1::AdoptRemoteReply& reply) { return EscapeText(reply.text()) + "\n"; });
}

}  // namespace holdfast
