#include "server/runtime/status_page/http_answer.h"

#include <openssl/sha.h>

#include <array>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/loopback.h"
#include "base/status.h"

namespace holdfast {
namespace {

const char* ReasonOf(int status) {
  switch (status) {
    case 200:
      return "OK";
    case 400:
      return "Bad Request";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    case 421:
      return "Misdirected Request";
    case 431:
      return "Request Header Fields Too Large";
    default:
      return "Service Unavailable";
  }
}

// As a policy names what it allows to be in a page.
std::string HashSource(const std::string& text) {
  std::array<unsigned char, SHA256_DIGEST_LENGTH> digest = {};
  SHA256(reinterpret_cast<const unsigned char*>(text.data()), text.size(), digest.data());
  const absl::string_view bytes(reinterpret_cast<const char*>(digest.data()), digest.size());
  return absl::StrCat("'sha256-", absl::Base64Escape(bytes), "'");
}

}  // namespace

std::string HttpAnswer::Bytes(bool without_body) const {
  std::string out = absl::StrCat(
      "HTTP/1.1 ", status, " ", ReasonOf(status), "\r\nContent-Type: ", content_type,
      "\r\nContent-Length: ", body.size(), "\r\nConnection: close\r\nCache-Control: no-store",
      "\r\nContent-Security-Policy: ", policy,
      "\r\nX-Content-Type-Options: nosniff\r\nX-Frame-Options: DENY",
      "\r\nReferrer-Policy: no-referrer\r\nCross-Origin-Resource-Policy: same-origin",
      "\r\nCross-Origin-Opener-Policy: same-origin\r\n");
  for (const auto& [name, value] : headers) {
    absl::StrAppend(&out, name, ": ", value, "\r\n");
  }
  absl::StrAppend(&out, "\r\n", without_body ? "" : body);
  return out;
}

HttpAnswer HttpError(int status, const std::string& text) {
  HttpAnswer answer;
  answer.status = status;
  answer.body = absl::StrCat(text, "\n");
  return answer;
}

StatusSite::StatusSite(Options options) : options_(std::move(options)) {
  const StatusPageFiles& files = options_.files;
  html_ = absl::StrCat(
      "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>Holdfast</title>"
      "<meta name=\"viewport\" content=\"width=device-width\"><link rel=\"icon\" href=\"data:,\">"
      "<style>",
      files.style, "</style></head>\n<body>", files.body, "<script>", files.script,
      "</script></body></html>\n");
  policy_ = absl::StrCat("default-src 'none'; script-src ", HashSource(files.script),
                         "; style-src ", HashSource(files.style),
                         "; connect-src 'self'; img-src data:; base-uri 'none'; form-action "
                         "'none'; frame-ancestors 'none'");
}

std::optional<HttpAnswer> StatusSite::Answer(const HttpRequest& request) const {
  if (options_.loopback_only && !IsLoopbackHost(request.host)) {
    return HttpError(421,
                     "this is the status page of a ckptd on loopback: ask for it as "
                     "127.0.0.1, [::1] or localhost");
  }
  if (request.method != "GET" && request.method != "HEAD") {
    HttpAnswer answer = HttpError(405, "this page is for reading: GET or HEAD");
    answer.headers.emplace_back("Allow", "GET, HEAD");
    return answer;
  }
  if (request.path == "/") {
    HttpAnswer answer;
    answer.content_type = "text/html; charset=utf-8";
    answer.policy = policy_;
    answer.body = html_;
    return answer;
  }
  if (request.path != "/status.json") {
    return HttpError(404, "there are / and /status.json");
  }
  return std::nullopt;
}

HttpAnswer StatusSite::AnswerOfReport(const absl::StatusOr<std::string>& report) {
  if (!report.ok()) {
    return HttpError(503, absl::StrCat("status: ", Message(report.status()), "; try again"));
  }
  HttpAnswer answer;
  answer.content_type = "application/json; charset=utf-8";
  answer.body = *report;
  return answer;
}

}  // namespace holdfast
