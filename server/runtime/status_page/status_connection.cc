#include "server/runtime/status_page/status_connection.h"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <utility>

#include "base/env.h"
#include "base/status.h"
#include "base/tcp_socket.h"
#include "base/tls.h"

namespace holdfast {
namespace {

absl::Status AwaitSocket(int fd, int16_t events, MonotonicTime until) {
  return AwaitReady(fd, events, until) ? absl::OkStatus()
                                       : absl::DeadlineExceededError("the browser is too slow");
}

class Plain final : public StatusConnection {
 public:
  explicit Plain(UniqueFd fd) : fd_(std::move(fd)) {}

  absl::StatusOr<size_t> Read(std::span<char> buffer, MonotonicTime until) override {
    for (;;) {
      const ssize_t size = ::recv(fd_.get(), buffer.data(), buffer.size(), 0);
      if (size >= 0) {
        return static_cast<size_t>(size);
      }
      if (errno == EAGAIN) {
        HF_RETURN_IF_ERROR(AwaitSocket(fd_.get(), POLLIN, until));
      } else if (errno != EINTR) {
        return ErrnoStatus(errno, "recv", "a browser's connection");
      }
    }
  }

  absl::Status Write(std::string_view bytes, MonotonicTime until) override {
    while (!bytes.empty()) {
      const ssize_t size = ::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (size >= 0) {
        bytes.remove_prefix(static_cast<size_t>(size));
      } else if (errno == EAGAIN) {
        HF_RETURN_IF_ERROR(AwaitSocket(fd_.get(), POLLOUT, until));
      } else if (errno != EINTR) {
        return ErrnoStatus(errno, "send", "a browser's connection");
      }
    }
    return absl::OkStatus();
  }

  void End(MonotonicTime) override { ::shutdown(fd_.get(), SHUT_WR); }

 private:
  const UniqueFd fd_;
};

class Encrypted final : public StatusConnection {
 public:
  Encrypted(UniqueFd fd, std::unique_ptr<TlsSession> session)
      : fd_(std::move(fd)), session_(std::move(session)) {}

  absl::Status Handshake(MonotonicTime until) {
    return Until(until, [this] { return session_->Handshake(); }).status();
  }

  absl::StatusOr<size_t> Read(std::span<char> buffer, MonotonicTime until) override {
    return Until(until, [&] { return session_->Read(buffer); });
  }

  absl::Status Write(std::string_view bytes, MonotonicTime until) override {
    while (!bytes.empty()) {
      HF_ASSIGN_OR_RETURN(const size_t size, Until(until, [&] { return session_->Write(bytes); }));
      if (size == 0) {
        return absl::UnavailableError("the browser has ended the connection");
      }
      bytes.remove_prefix(size);
    }
    return absl::OkStatus();
  }

  void End(MonotonicTime) override {
    session_->End();
    ::shutdown(fd_.get(), SHUT_WR);
  }

 private:
  // 0: the other side has ended.
  template <typename Step>
  absl::StatusOr<size_t> Until(MonotonicTime until, Step step) {
    for (;;) {
      const absl::StatusOr<TlsStep> result = step();
      if (!result.ok()) {
        return Annotate(result.status(), "TLS with a browser");
      }
      switch (result->kind) {
        case TlsStep::Kind::kDone:
          return result->bytes;
        case TlsStep::Kind::kEnded:
          return size_t{0};
        case TlsStep::Kind::kWantsToRead:
          HF_RETURN_IF_ERROR(AwaitSocket(fd_.get(), POLLIN, until));
          break;
        case TlsStep::Kind::kWantsToWrite:
          HF_RETURN_IF_ERROR(AwaitSocket(fd_.get(), POLLOUT, until));
          break;
      }
    }
  }

  const UniqueFd fd_;
  const std::unique_ptr<TlsSession> session_;
};

absl::StatusOr<std::shared_ptr<const TlsContext>> ReadContext(const TlsFiles& files) {
  HF_ASSIGN_OR_RETURN(const TlsTexts texts, ReadTlsFiles(*Env::System(), files));
  return TlsContext::ForServer(texts);
}

}  // namespace

std::unique_ptr<StatusConnection> PlainConnection(UniqueFd fd) {
  return std::make_unique<Plain>(std::move(fd));
}

absl::StatusOr<std::unique_ptr<StatusTls>> StatusTls::Open(const TlsFiles& files) {
  HF_ASSIGN_OR_RETURN(const TlsTexts texts, ReadTlsFiles(*Env::System(), files));
  // (One that is not valid now may be replaced at any time.)
  if (const absl::Status fits = CheckTlsTexts(texts, files, Clock::System()->UnixMillis() / 1000);
      absl::IsInvalidArgument(fits)) {
    return fits;
  }
  HF_RETURN_IF_ERROR(TlsContext::ForServer(texts).status());
  return std::make_unique<StatusTls>(files);
}

absl::StatusOr<std::unique_ptr<StatusConnection>> StatusTls::Accept(UniqueFd fd,
                                                                    MonotonicTime until) const {
  HF_ASSIGN_OR_RETURN(const auto context, ReadContext(files_));
  HF_ASSIGN_OR_RETURN(auto session, TlsSession::Create(context, fd.get(), ""));
  auto connection = std::make_unique<Encrypted>(std::move(fd), std::move(session));
  HF_RETURN_IF_ERROR(connection->Handshake(until));
  return connection;
}

}  // namespace holdfast
