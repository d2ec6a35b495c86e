// Requests as the status page takes them: the head of HTTP/1.1, strictly read. Pure functions.
//
//   const absl::StatusOr<HttpRequest> request = ParseHttpRequest(head);
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace holdfast {

inline constexpr size_t kHttpHeadBytesMax = 8 << 10;
inline constexpr size_t kHttpHeadersMax = 64;
inline constexpr std::string_view kHttpHeadEnd = "\r\n\r\n";

// What a connection's first bytes are: a head with its end, the beginning of one, or neither, as
// they are too long for one, or do not begin as a method does (those of another protocol).
enum class HttpHead : uint8_t { kWhole, kBegun, kTooLong, kNone };
HttpHead HttpHeadOf(std::string_view said);

struct HttpRequest {
  std::string method;
  std::string path;  // without what follows a '?'
  std::string host;  // of the header, as it was sent
};

// `head`: all up to and with the empty line. InvalidArgument: it is none of HTTP/1.1 (or 1.0) in
// its strict form: one Host, no control character, no line that goes on in the next.
absl::StatusOr<HttpRequest> ParseHttpRequest(std::string_view head);

}  // namespace holdfast
