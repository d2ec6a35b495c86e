// One connection of a browser: bytes in and out, in the clear or over TLS. Nothing here waits.
//
//   HF_ASSIGN_OR_RETURN(auto connection, tls->Accept(std::move(fd)));
//   HF_ASSIGN_OR_RETURN(const TlsStep step, connection->Read(buffer));   // again when it is ready
//
// One thread.
#pragma once

#include <memory>
#include <span>
#include <string_view>

#include "absl/status/statusor.h"
#include "base/certificates.h"
#include "base/tls.h"
#include "base/unique_fd.h"

namespace holdfast {

class StatusConnection {
 public:
  virtual ~StatusConnection() = default;
  virtual int socket() const = 0;
  // Over TLS with what is still to do of the handshake.
  virtual absl::StatusOr<TlsStep> Read(std::span<char> buffer) = 0;
  virtual absl::StatusOr<TlsStep> Write(std::string_view bytes) = 0;
  // Says that nothing follows.
  virtual void End() = 0;
};

// `fd`: a non-blocking socket.
std::unique_ptr<StatusConnection> PlainConnection(UniqueFd fd);

// What a server needs for TLS 1.2 or newer, with a certificate of the browser's. The files are
// read anew for each connection: they may be replaced at any time, and what was there before goes
// on where they are no good.
class StatusTls {
 public:
  // An error when the files do not fit together now.
  static absl::StatusOr<std::unique_ptr<StatusTls>> Open(const TlsFiles& files);

  absl::StatusOr<std::unique_ptr<StatusConnection>> Accept(UniqueFd fd);

 private:
  explicit StatusTls(TlsFiles files) : files_(std::move(files)) {}
  absl::Status Read();

  const TlsFiles files_;
  TlsTexts texts_;
  std::shared_ptr<const TlsContext> context_;
};

}  // namespace holdfast
