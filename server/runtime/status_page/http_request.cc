#include "server/runtime/status_page/http_request.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "base/status.h"

namespace holdfast {
namespace {

constexpr size_t kMethodBytesMax = 16;

absl::Status Bad(const char* what) {
  return absl::InvalidArgumentError(what);
}

// RFC 9110, 5.6.2.
bool IsToken(std::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](const char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) ||
           std::string_view("!#$%&'*+-.^_`|~").find(c) != std::string_view::npos;
  });
}

bool IsVisible(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](const char c) { return c > ' ' && c < 0x7f; });
}

// Of a header: bytes beyond ASCII are allowed, controls but tabs are not.
bool IsFieldValue(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](const char c) {
    const auto byte = static_cast<unsigned char>(c);
    return c == '\t' || (byte >= ' ' && byte != 0x7f);
  });
}

std::string_view Trimmed(std::string_view text) {
  const size_t begin = text.find_first_not_of(" \t");
  return begin == std::string_view::npos
             ? std::string_view()
             : text.substr(begin, text.find_last_not_of(" \t") - begin + 1);
}

// The line at the front, without its end, which goes too.
std::string_view TakeLine(std::string_view& text) {
  const size_t end = text.find("\r\n");
  const std::string_view line = text.substr(0, end);
  text.remove_prefix(end + 2);
  return line;
}

absl::StatusOr<HttpRequest> ParseRequestLine(std::string_view line, bool& needs_host) {
  const size_t first = line.find(' ');
  const size_t last = line.rfind(' ');
  if (first == std::string_view::npos || first == last) {
    return Bad("the request line is no METHOD PATH HTTP/1.1");
  }
  const std::string_view method = line.substr(0, first);
  const std::string_view target = line.substr(first + 1, last - first - 1);
  const std::string_view version = line.substr(last + 1);
  if (!IsToken(method) || method.size() > kMethodBytesMax) {
    return Bad("the method is none");
  }
  if (target.empty() || target.front() != '/' || !IsVisible(target)) {
    return Bad("the path is none");
  }
  if (version != "HTTP/1.1" && version != "HTTP/1.0") {
    return Bad("HTTP/1.1 is expected");
  }
  needs_host = version == "HTTP/1.1";
  HttpRequest request;
  request.method = method;
  request.path = target.substr(0, target.find('?'));
  return request;
}

}  // namespace

HttpHead HttpHeadOf(std::string_view said) {
  const std::string_view method = said.substr(0, said.find(' '));
  if (!said.empty() && !IsToken(method)) {
    return HttpHead::kNone;
  }
  const size_t end = said.find(kHttpHeadEnd);
  if (end != std::string_view::npos && end + kHttpHeadEnd.size() <= kHttpHeadBytesMax) {
    return HttpHead::kWhole;
  }
  return said.size() > kHttpHeadBytesMax ? HttpHead::kTooLong : HttpHead::kBegun;
}

absl::StatusOr<HttpRequest> ParseHttpRequest(std::string_view head) {
  if (head.size() > kHttpHeadBytesMax || !head.ends_with(kHttpHeadEnd)) {
    return Bad("the head has no end");
  }
  bool needs_host = false;
  HF_ASSIGN_OR_RETURN(HttpRequest request, ParseRequestLine(TakeLine(head), needs_host));
  bool any_host = false;
  for (size_t headers = 0; head != "\r\n"; ++headers) {
    if (headers >= kHttpHeadersMax) {
      return Bad("there are too many headers");
    }
    const std::string_view line = TakeLine(head);
    const size_t colon = line.find(':');
    if (colon == std::string_view::npos || !IsToken(line.substr(0, colon)) ||
        !IsFieldValue(line.substr(colon + 1))) {
      return Bad("a header is none");
    }
    if (absl::EqualsIgnoreCase(ToAbsl(line.substr(0, colon)), "Host")) {
      if (any_host) {
        return Bad("there is more than one Host");
      }
      any_host = true;
      request.host = Trimmed(line.substr(colon + 1));
    }
  }
  if (needs_host && !any_host) {
    return Bad("there is no Host");
  }
  return request;
}

}  // namespace holdfast
