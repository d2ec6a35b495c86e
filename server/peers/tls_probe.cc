#include "server/peers/tls_probe.h"

#include <poll.h>

#include <array>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/tcp_socket.h"
#include "base/tls.h"

namespace holdfast {
namespace {

const char* WayOut(TlsFault fault) {
  switch (fault) {
    case TlsFault::kPlainText:
      return "; is cluster.tls set there, too?";
    case TlsFault::kTheirsExpired:
    case TlsFault::kTheirsTooNew:
      return "; it is in cluster.tls.cert_file there, and a new one is read without a restart";
    case TlsFault::kTheirsUnknown:
      return "; the authority of cluster.tls.cert_file there belongs into cluster.tls.ca_file here";
    case TlsFault::kTheirsNamed:
      return "; cluster.tls.cert_file there has to name the host of its cluster.advertise_address";
    case TlsFault::kOursExpired:
      return "; it is in cluster.tls.cert_file here, and a new one is read without a restart";
    case TlsFault::kOursUnknown:
      return "; the authority of cluster.tls.cert_file here belongs into cluster.tls.ca_file there";
    default:
      return "";
  }
}

// A server of gRPC hangs up when it does not take our certificate, and does not say so.
std::string HungUp(const TlsFiles& files, const TlsTexts& texts) {
  const absl::Status fits = CheckTlsTexts(texts, files, Clock::System()->UnixMillis() / 1000);
  return absl::StrCat("TLS: it hung up when it had seen our certificate: ",
                      fits.ok()
                          ? absl::StrCat("it does not take that", WayOut(TlsFault::kOursUnknown),
                                         ", and its clock has to be right")
                          : Message(fits));
}

}  // namespace

std::string WhyNoTls(const TlsFiles& files, const TlsTexts& texts, const std::string& address,
                     MonotonicTime until) {
  const absl::StatusOr<std::shared_ptr<const TlsContext>> context =
      TlsContext::ForClient(texts, "h2");
  if (!context.ok()) {
    return absl::StrCat("the files of cluster.tls: ", Message(context.status()));
  }
  const absl::StatusOr<HostAndPort> parts = SplitAddress(address);
  const absl::StatusOr<UniqueFd> fd = ConnectTcp(address, until);
  if (!parts.ok() || !fd.ok()) {
    return "";
  }
  const absl::StatusOr<std::unique_ptr<TlsSession>> session =
      TlsSession::Create(*context, fd->get(), parts->host);
  if (!session.ok()) {
    return "";
  }
  // Whether it takes our certificate it tells with its first words, or instead of them.
  std::array<char, 1024> words = {};
  for (bool greeted = false;;) {
    const absl::StatusOr<TlsStep> step =
        greeted ? (*session)->Read(words) : (*session)->Handshake();
    const bool ended =
        step.ok() ? step->kind == TlsStep::Kind::kEnded : (*session)->fault() == TlsFault::kClosed;
    if (ended && greeted) {
      return HungUp(files, texts);
    }
    if (!step.ok()) {
      return absl::StrCat("TLS: ", Message(step.status()), WayOut((*session)->fault()));
    }
    switch (step->kind) {
      case TlsStep::Kind::kDone:
        if (greeted) {
          return "";
        }
        greeted = true;
        break;
      case TlsStep::Kind::kEnded:
        return "TLS: it hung up before the handshake had ended";
      case TlsStep::Kind::kWantsToRead:
      case TlsStep::Kind::kWantsToWrite:
        if (!AwaitReady(fd->get(), step->kind == TlsStep::Kind::kWantsToRead ? POLLIN : POLLOUT,
                        until)) {
          return greeted ? "" : "TLS: it listens, and the handshake did not end in time";
        }
        break;
    }
  }
}

}  // namespace holdfast
