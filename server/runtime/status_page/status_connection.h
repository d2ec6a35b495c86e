// One connection of a browser: bytes in and out before a deadline, in the clear or over TLS.
//
//   HF_ASSIGN_OR_RETURN(auto connection, tls->Accept(std::move(fd), until));
//   HF_ASSIGN_OR_RETURN(const size_t size, connection->Read(buffer, until));
//
// One thread uses a connection. Whoever ends it from elsewhere shuts its socket down.
#pragma once

#include <memory>
#include <span>
#include <string_view>

#include "absl/status/statusor.h"
#include "base/certificates.h"
#include "base/clock.h"
#include "base/unique_fd.h"

namespace holdfast {

// Their deadlines are of the system's clock.
class StatusConnection {
 public:
  virtual ~StatusConnection() = default;
  // 0: the other side has ended. DeadlineExceeded, or what went wrong.
  virtual absl::StatusOr<size_t> Read(std::span<char> buffer, MonotonicTime until) = 0;
  virtual absl::Status Write(std::string_view bytes, MonotonicTime until) = 0;
  // Says that nothing follows.
  virtual void End(MonotonicTime until) = 0;
};

// `fd`: a non-blocking socket.
std::unique_ptr<StatusConnection> PlainConnection(UniqueFd fd);

// What a server needs for TLS 1.2 or newer, with a certificate of the browser's. The files are
// read anew for each connection: they may be replaced at any time. Thread-safe.
class StatusTls {
 public:
  // An error when the files do not fit together now.
  static absl::StatusOr<std::unique_ptr<StatusTls>> Open(const TlsFiles& files);
  explicit StatusTls(TlsFiles files) : files_(std::move(files)) {}

  // With the handshake.
  absl::StatusOr<std::unique_ptr<StatusConnection>> Accept(UniqueFd fd, MonotonicTime until) const;

 private:
  const TlsFiles files_;
};

}  // namespace holdfast
