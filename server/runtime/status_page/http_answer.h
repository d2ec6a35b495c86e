// What the status page answers to a request: pure.
//
//   const StatusSite site({.loopback_only = true});
//   const std::optional<HttpAnswer> answer = site.Answer(request);   // none: it wants the report
//   … answer.value_or(StatusSite::AnswerOfReport(report)).Bytes(request.method == "HEAD")
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "server/runtime/status_page/http_request.h"

namespace holdfast {

struct HttpAnswer {
  int status = 200;
  std::string content_type = "text/plain; charset=utf-8";
  std::string policy = "default-src 'none'; frame-ancestors 'none'";  // Content-Security-Policy
  std::vector<std::pair<std::string, std::string>> headers;           // further ones
  std::string body;

  // As it goes over the wire; each connection has one.
  std::string Bytes(bool without_body) const;
};

// An error in a line of text, which names what there is to do.
HttpAnswer HttpError(int status, const std::string& text);

// A page of one style, one script and its body: nothing else runs, and nothing is loaded.
struct StatusPageFiles {
  std::string body;
  std::string style;
  std::string script;
};
// Those that are built in.
StatusPageFiles BuiltInStatusPage();

class StatusSite {
 public:
  struct Options {
    StatusPageFiles files = BuiltInStatusPage();
    bool loopback_only = true;  // then so must be what the browser calls it by
  };
  explicit StatusSite(Options options);

  // None: the report is asked for, as it may be.
  std::optional<HttpAnswer> Answer(const HttpRequest& request) const;
  static HttpAnswer AnswerOfReport(const absl::StatusOr<std::string>& report);  // JSON

 private:
  const Options options_;
  std::string html_;
  std::string policy_;
};

}  // namespace holdfast
