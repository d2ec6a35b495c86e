#include "base/loopback.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <string>

#include "absl/strings/match.h"
#include "base/status.h"

namespace holdfast {

bool IsLoopbackHost(std::string_view host) {
  std::string_view name = host;
  std::string_view port;
  // (A colon within brackets is of the address.)
  if (const size_t colon = host.rfind(':');
      colon != std::string_view::npos && host.find(']', colon) == std::string_view::npos) {
    name = host.substr(0, colon);
    port = host.substr(colon + 1);
    if (port.empty() || port.size() > 5 ||
        port.find_first_not_of("0123456789") != std::string_view::npos) {
      return false;
    }
  }
  if (absl::EqualsIgnoreCase(ToAbsl(name), "localhost") || name == "[::1]") {
    return true;
  }
  in_addr v4 = {};
  return ::inet_pton(AF_INET, std::string(name).c_str(), &v4) == 1 &&
         (ntohl(v4.s_addr) >> 24) == IN_LOOPBACKNET;
}

}  // namespace holdfast
