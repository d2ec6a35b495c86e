// What a browser, or whoever reaches the status page, may send: a head that is taken is one request
// without anything in it that another reader could take for more.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "base/loopback.h"
#include "server/runtime/status_page/http_request.h"

namespace {

void Require(bool condition) {
  if (!condition) {
    std::abort();
  }
}

bool HasControl(std::string_view text) {
  for (const char c : text) {
    if ((static_cast<unsigned char>(c) < ' ' && c != '\t') || c == 0x7f) {
      return true;
    }
  }
  return false;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  // As the server hands it over: up to and with the first empty line.
  const size_t end = text.find(holdfast::kHttpHeadEnd);
  const std::string_view head =
      end == std::string_view::npos ? text : text.substr(0, end + holdfast::kHttpHeadEnd.size());
  const auto request = holdfast::ParseHttpRequest(head);
  if (request.ok()) {
    Require(end != std::string_view::npos && head.size() <= holdfast::kHttpHeadBytesMax);
    Require(holdfast::HttpHeadOf(head) == holdfast::HttpHead::kWhole);
    Require(!request->method.empty() && request->path.starts_with('/'));
    Require(!HasControl(request->method) && !HasControl(request->path));
    Require(!HasControl(request->host));
    // A Host of loopback has no more than an address or localhost, and a port.
    Require(!holdfast::IsLoopbackHost(request->host) ||
            request->host.find_first_of("/@ ") == std::string::npos);
  }
  holdfast::IsLoopbackHost(text);
  holdfast::HttpHeadOf(text);
  return 0;
}
