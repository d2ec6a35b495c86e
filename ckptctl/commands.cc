#include "ckptctl/commands.h"

#include <nlohmann/json.hpp>
#include <ostream>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "ckptctl/json.h"
#include "ckptctl/sockets.h"
#include "ckptctl/text.h"

namespace holdfast {
namespace {

// What the daemon itself answers is no lost connection, and no interrupt; what it calls invalid was
// asked for in that way.
ExitCode ExitCodeOf(const absl::Status& status) {
  const bool answered = IsDaemonsAnswer(status);
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return ExitCode::kOk;
    case absl::StatusCode::kDataLoss:
      return ExitCode::kDamaged;
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kDeadlineExceeded:
      return answered ? ExitCode::kRefused : ExitCode::kUnreachable;
    case absl::StatusCode::kInvalidArgument:
      return answered ? ExitCode::kUsage : ExitCode::kRefused;
    case absl::StatusCode::kCancelled:
      return answered ? ExitCode::kRefused : ExitCode::kInterrupted;
    default:
      return ExitCode::kRefused;
  }
}

ExitCode ShowError(const Context& context, const absl::Status& status, ExitCode exit_code,
                   const std::string& hint) {
  *context.err << "ckptctl: " << EscapeText(Message(status)) << "\n" << hint;
  if (context.json) {
    nlohmann::ordered_json json;
    json["error"] = {{"code", absl::StatusCodeToString(status.code())},
                     {"message", Message(status)},
                     {"exit_code", static_cast<int>(exit_code)}};
    *context.out << DumpJson(json) << "\n";
  }
  return exit_code;
}

}  // namespace

ExitCode ReportError(const Context& context, const absl::Status& status) {
  return ShowError(context, status, ExitCodeOf(status), "");
}

ExitCode ReportUsage(const Context& context, const absl::Status& status,
                     const std::string& command) {
  return ShowError(context, status, ExitCode::kUsage,
                   absl::StrCat("See: ckptctl ", command.empty() ? "" : command + " ", "--help\n"));
}

absl::StatusOr<std::unique_ptr<AdminClient>> ConnectAdmin(const Context& context) {
  const absl::StatusOr<AdminPlace> place =
      FindAdminPlace(context.socket, context.address, context.tls);
  if (!place.ok()) {
    return place.status();
  }
  HF_ASSIGN_OR_RETURN(auto client, AdminClient::Connect(*place, context.timeout));
  client->CancelWhen(context.interrupted);
  return client;
}

}  // namespace holdfast
