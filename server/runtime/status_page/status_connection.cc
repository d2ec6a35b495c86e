#include "server/runtime/status_page/status_connection.h"

#include <openssl/err.h>
#include <openssl/ssl.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace holdfast {
namespace {

absl::Status AwaitSocket(int fd, int16_t events, MonotonicTime until) {
  for (;;) {
    const Duration left = until - Clock::System()->Now();
    if (left <= Duration(0)) {
      return absl::DeadlineExceededError("the browser is too slow");
    }
    pollfd one = {fd, events, 0};
    // Rounded up: not to turn round and round in the last millisecond.
    const auto ms = std::chrono::ceil<std::chrono::milliseconds>(left).count();
    const int ready = ::poll(&one, 1, static_cast<int>(std::min<int64_t>(ms, INT_MAX)));
    if (ready > 0) {
      return absl::OkStatus();
    }
    if (ready < 0 && errno != EINTR) {
      return ErrnoStatus(errno, "poll", "a browser's connection");
    }
  }
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

struct Free {
  void operator()(SSL* ssl) const { SSL_free(ssl); }
  void operator()(SSL_CTX* context) const { SSL_CTX_free(context); }
};

// What OpenSSL says last; it keeps a list for each thread.
std::string TlsError() {
  std::string text = "no reason is given";
  if (const unsigned long code = ERR_peek_last_error(); code != 0) {
    char buffer[256] = {};
    ERR_error_string_n(code, buffer, sizeof(buffer));
    text = buffer;
  }
  ERR_clear_error();
  return text;
}

class Encrypted final : public StatusConnection {
 public:
  Encrypted(UniqueFd fd, std::unique_ptr<SSL, Free> ssl)
      : fd_(std::move(fd)), ssl_(std::move(ssl)) {}

  absl::Status Handshake(MonotonicTime until) {
    return Until(until, [this] { return SSL_accept(ssl_.get()); });
  }

  absl::StatusOr<size_t> Read(std::span<char> buffer, MonotonicTime until) override {
    int size = 0;
    const absl::Status status = Until(until, [&] {
      size = SSL_read(ssl_.get(), buffer.data(),
                      static_cast<int>(std::min<size_t>(buffer.size(), INT_MAX)));
      return size;
    });
    if (absl::IsOutOfRange(status)) {
      return size_t{0};
    }
    HF_RETURN_IF_ERROR(status);
    return static_cast<size_t>(size);
  }

  absl::Status Write(std::string_view bytes, MonotonicTime until) override {
    while (!bytes.empty()) {
      int size = 0;
      HF_RETURN_IF_ERROR(Until(until, [&] {
        size = SSL_write(ssl_.get(), bytes.data(),
                         static_cast<int>(std::min<size_t>(bytes.size(), 16 << 10)));
        return size;
      }));
      bytes.remove_prefix(static_cast<size_t>(size));
    }
    return absl::OkStatus();
  }

  void End(MonotonicTime) override {
    SSL_shutdown(ssl_.get());
    ERR_clear_error();
    ::shutdown(fd_.get(), SHUT_WR);
  }

 private:
  // OutOfRange: the other side has ended.
  template <typename Step>
  absl::Status Until(MonotonicTime until, Step step) {
    for (;;) {
      ERR_clear_error();
      const int result = step();
      if (result > 0) {
        return absl::OkStatus();
      }
      switch (SSL_get_error(ssl_.get(), result)) {
        case SSL_ERROR_WANT_READ:
          HF_RETURN_IF_ERROR(AwaitSocket(fd_.get(), POLLIN, until));
          break;
        case SSL_ERROR_WANT_WRITE:
          HF_RETURN_IF_ERROR(AwaitSocket(fd_.get(), POLLOUT, until));
          break;
        case SSL_ERROR_ZERO_RETURN:
          return absl::OutOfRangeError("the browser has ended the connection");
        default:
          return absl::UnavailableError(absl::StrCat("TLS with a browser: ", TlsError()));
      }
    }
  }

  const UniqueFd fd_;
  const std::unique_ptr<SSL, Free> ssl_;
};

absl::StatusOr<std::unique_ptr<SSL_CTX, Free>> MakeContext(const StatusTls::Files& files) {
  std::unique_ptr<SSL_CTX, Free> context(SSL_CTX_new(TLS_server_method()));
  if (context == nullptr) {
    return absl::ResourceExhaustedError(absl::StrCat("TLS: ", TlsError()));
  }
  SSL_CTX_set_min_proto_version(context.get(), TLS1_2_VERSION);
  // Each connection is judged by the authority that counts now.
  SSL_CTX_set_session_cache_mode(context.get(), SSL_SESS_CACHE_OFF);
  SSL_CTX_set_options(context.get(), SSL_OP_NO_TICKET | SSL_OP_NO_RENEGOTIATION);
  SSL_CTX_set_mode(context.get(),
                   SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
  SSL_CTX_set_verify(context.get(), SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, nullptr);
  const auto bad = [](const std::string& what) {
    return absl::FailedPreconditionError(absl::StrCat(what, ": ", TlsError()));
  };
  if (SSL_CTX_load_verify_locations(context.get(), files.ca.c_str(), nullptr) != 1) {
    return bad(absl::StrCat("read certificates of authorities from '", files.ca, "'"));
  }
  SSL_CTX_set_client_CA_list(context.get(), SSL_load_client_CA_file(files.ca.c_str()));
  if (SSL_CTX_use_certificate_chain_file(context.get(), files.cert.c_str()) != 1) {
    return bad(absl::StrCat("read a certificate from '", files.cert, "'"));
  }
  // (A key with a password must not ask the terminal for it.)
  SSL_CTX_set_default_passwd_cb(context.get(), [](char*, int, int, void*) { return 0; });
  if (SSL_CTX_use_PrivateKey_file(context.get(), files.key.c_str(), SSL_FILETYPE_PEM) != 1 ||
      SSL_CTX_check_private_key(context.get()) != 1) {
    return bad(absl::StrCat("read the key of '", files.cert, "' from '", files.key, "'"));
  }
  return context;
}

}  // namespace

std::unique_ptr<StatusConnection> PlainConnection(UniqueFd fd) {
  return std::make_unique<Plain>(std::move(fd));
}

absl::StatusOr<std::unique_ptr<StatusTls>> StatusTls::Open(const Files& files) {
  HF_RETURN_IF_ERROR(MakeContext(files).status());
  return std::make_unique<StatusTls>(files);
}

absl::StatusOr<std::unique_ptr<StatusConnection>> StatusTls::Accept(UniqueFd fd,
                                                                    MonotonicTime until) const {
  HF_ASSIGN_OR_RETURN(const auto context, MakeContext(files_));
  std::unique_ptr<SSL, Free> ssl(SSL_new(context.get()));
  if (ssl == nullptr || SSL_set_fd(ssl.get(), fd.get()) != 1) {
    return absl::ResourceExhaustedError(absl::StrCat("TLS: ", TlsError()));
  }
  auto connection = std::make_unique<Encrypted>(std::move(fd), std::move(ssl));
  HF_RETURN_IF_ERROR(connection->Handshake(until));
  return connection;
}

}  // namespace holdfast
