// TLS 1.2 and newer over a socket that does not block, with certificates of both sides.
//
//   HF_ASSIGN_OR_RETURN(auto context, TlsContext::ForServer(texts));
//   HF_ASSIGN_OR_RETURN(auto session, TlsSession::Create(*context, fd, ""));
//   HF_ASSIGN_OR_RETURN(TlsStep step, session->Handshake());   // again when the socket is ready
//   HF_ASSIGN_OR_RETURN(step, session->Read(buffer));
//
// A context: any thread. A session: one thread at a time; the socket stays its caller's, and
// outlives it. Nothing here waits. No signal comes of a socket that the other side has closed.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/statusor.h"
#include "base/certificates.h"

struct ssl_ctx_st;

namespace holdfast {

class TlsContext {
 public:
  // InvalidArgument: the texts do not fit together. (Times are the other side's business.)
  // `protocol`: what is spoken over it, "h2", by TLS's own way to agree on that; empty: not said.
  static absl::StatusOr<std::shared_ptr<const TlsContext>> ForServer(
      const TlsTexts& texts, const std::string& protocol = "");
  static absl::StatusOr<std::shared_ptr<const TlsContext>> ForClient(
      const TlsTexts& texts, const std::string& protocol = "");
  ~TlsContext();
  TlsContext(const TlsContext&) = delete;
  TlsContext& operator=(const TlsContext&) = delete;

 private:
  friend class TlsSession;
  TlsContext(ssl_ctx_st* context, std::string protocols, bool is_server)
      : context_(context), protocols_(std::move(protocols)), is_server_(is_server) {}
  ssl_ctx_st* const context_;
  const std::string protocols_;  // as on the wire
  const bool is_server_;
};

struct TlsStep {
  enum class Kind { kDone, kWantsToRead, kWantsToWrite, kEnded };  // kEnded: by the other side
  Kind kind = Kind::kDone;
  size_t bytes = 0;  // with kDone, of Read and Write: not 0
};

// Whose fault it is that there is no connection; what goes with the status of a step that failed.
enum class TlsFault {
  kNone,
  kOther,
  kClosed,         // the other side has gone
  kPlainText,      // it speaks no TLS
  kVersion,        // none that we speak
  kTheirsExpired,  // their certificate, or its authority's: no longer valid
  kTheirsTooNew,   // not yet
  kTheirsUnknown,  // of an authority that is not ours
  kTheirsNamed,    // for another name
  kTheirsMissing,
  kTheirsUnfit,  // not for this use, or else
  kOursExpired,  // they say so of ours
  kOursUnknown,
  kOursMissing,
  kOursRefused,
};

class TlsSession {
 public:
  // `name`: of a client: what the certificate must be for, a host's name or address.
  static absl::StatusOr<std::unique_ptr<TlsSession>> Create(
      const std::shared_ptr<const TlsContext>& context, int fd, const std::string& name);
  ~TlsSession();
  TlsSession(const TlsSession&) = delete;
  TlsSession& operator=(const TlsSession&) = delete;

  // Errors are Unavailable, and say what was wrong with whom; fault() likewise. After one the
  // session is good for nothing more.
  absl::StatusOr<TlsStep> Handshake();
  absl::StatusOr<TlsStep> Read(std::span<char> buffer);
  absl::StatusOr<TlsStep> Write(std::string_view bytes);
  // Says that nothing follows. False: not yet, as the socket takes nothing now.
  bool End();

  TlsFault fault() const;
  CertificateFacts peer() const;  // after the handshake

 private:
  struct Impl;
  explicit TlsSession(std::unique_ptr<Impl> impl);
  const std::unique_ptr<Impl> impl_;
};

}  // namespace holdfast
