// What every command does that asks the daemon one question: connect, ask, show.
//
//   return Ask(context, arguments.job, &AdminClient::Where, request,
//              [&](const v1::WhereReply& reply) { return RenderWhere(arguments.job, reply); });
//
// With --json the reply's fields are shown, after "job" when there is one.
#pragma once

#include <nlohmann/json.hpp>
#include <ostream>
#include <string>

#include "ckptctl/commands.h"
#include "ckptctl/json.h"
#include "ckptctl/progress.h"

namespace holdfast {

inline constexpr size_t kCopiesShown = 200;  // lines of a table that a terminal still holds

template <typename Request, typename Reply>
absl::StatusOr<Reply> AskFor(const Context& context,
                             absl::Status (AdminClient::*method)(const Request&, Reply&),
                             const Request& request) {
  const auto client = ConnectAdmin(context);
  if (!client.ok()) {
    return client.status();
  }
  Reply reply;
  const WaitingLine waiting(context, "waiting for ckptd");
  const absl::Status status = ((**client).*method)(request, reply);
  if (!status.ok()) {
    return status;
  }
  return reply;
}

template <typename Reply>
void ShowJson(const Context& context, const std::string& job, const Reply& reply) {
  nlohmann::ordered_json json;
  if (!job.empty()) {
    json["job"] = job;
  }
  json.update(MessageToJson(reply));
  *context.out << DumpJson(json) << "\n";
}

template <typename Request, typename Reply, typename Render>
ExitCode Ask(const Context& context, const std::string& job,
             absl::Status (AdminClient::*method)(const Request&, Reply&), const Request& request,
             const Render& render) {
  const auto reply = AskFor(context, method, request);
  if (!reply.ok()) {
    return ReportError(context, reply.status());
  }
  if (context.json) {
    ShowJson(context, job, *reply);
  } else {
    *context.out << render(*reply);
  }
  return ExitCode::kOk;
}

}  // namespace holdfast
