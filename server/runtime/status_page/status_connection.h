// One connection of a browser: bytes in and out, in the clear or over TLS. Nothing here waits, but
// the begin and the end of a StatusTls.
//
//   HF_ASSIGN_OR_RETURN(auto tls, StatusTls::Open(env, files, look));
//   HF_ASSIGN_OR_RETURN(auto connection, tls->Accept(std::move(fd)));
//   HF_ASSIGN_OR_RETURN(const TlsStep step, connection->Read(buffer));   // again when it is ready
//
// One thread.
#pragma once

#include <memory>
#include <span>
#include <string_view>
#include <thread>

#include "absl/status/statusor.h"
#include "base/certificates.h"
#include "base/clock.h"
#include "base/env.h"
#include "base/mutex.h"
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

// What a server needs for TLS 1.2 or newer, with a certificate of the browser's. The files may be
// replaced at any time: a thread of its own, as they may lie on what hangs, reads them each `look`.
// What fits together counts from the next connection on; else what was there before stays.
class StatusTls {
 public:
  // An error when the files do not fit together now.
  static absl::StatusOr<std::unique_ptr<StatusTls>> Open(Env& env, const TlsFiles& files,
                                                         Duration look);
  ~StatusTls();  // waits for a look that is under way
  StatusTls(const StatusTls&) = delete;
  StatusTls& operator=(const StatusTls&) = delete;

  absl::StatusOr<std::unique_ptr<StatusConnection>> Accept(UniqueFd fd) EXCLUDES(mutex_);

 private:
  StatusTls(Env& env, TlsFiles files, Duration look, TlsTexts texts,
            std::shared_ptr<const TlsContext> context);
  void Run() EXCLUDES(mutex_);
  absl::Status Look() EXCLUDES(mutex_);

  Env& env_;
  const TlsFiles files_;
  const Duration look_;
  TlsTexts texts_;  // its thread's: of context_
  Mutex mutex_;
  CondVar wake_;
  std::shared_ptr<const TlsContext> context_ GUARDED_BY(mutex_);
  bool stopping_ GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace holdfast
