// Where TLS between daemons has its keys and certificates.
#pragma once

#include <chrono>
#include <string>

#include "base/clock.h"

namespace holdfast {

// Paths of PEM files, all or none. They may be replaced at any time, as those who rotate them do:
// they are read again for each connection that this node opens and for each pull that it begins,
// and at least each kTlsReload for those that it takes. What was opened before goes on.
struct PeerTls {
  std::string ca_file;
  std::string cert_file;
  std::string key_file;
};
inline constexpr Duration kTlsReload = std::chrono::seconds(10);  // whole seconds

// What they hold; all empty: no TLS.
struct PeerTlsText {
  std::string ca;
  std::string cert;
  std::string key;
  bool operator==(const PeerTlsText&) const = default;
};

}  // namespace holdfast
