// What is wrong with TLS between here and another daemon, in words. gRPC says "Socket closed" when
// the other side does not take our certificate, and little when we do not take theirs.
//
//   probe.why = WhyNoTls(files, texts, "gpu-17:9465", clock.Now() + std::chrono::seconds(2));
//
// Waits until then; any thread.
#pragma once

#include <string>

#include "base/certificates.h"
#include "base/clock.h"

namespace holdfast {

// Whose certificate is not taken, why, and which setting mends it. Empty: nothing is wrong with it,
// or nobody listens there. `until` is of the system's clock.
std::string WhyNoTls(const TlsFiles& files, const TlsTexts& texts, const std::string& address,
                     MonotonicTime until);

}  // namespace holdfast
