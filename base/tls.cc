#include "base/tls.h"

#include <arpa/inet.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/openssl_types.h"
#include "base/status.h"

namespace holdfast {
namespace {

// The types of TLS's records: what a first byte can be.
constexpr int kRecordTypeMin = 20;
constexpr int kRecordTypeMax = 23;

// ---- A socket, as OpenSSL reads and writes it ----
// (Its own would have the process killed by SIGPIPE.)

struct Wire {
  int fd = -1;
  bool ended = false;
  int first_byte = -1;
};

int WriteWire(BIO* bio, const char* bytes, int size) {
  const auto* wire = static_cast<const Wire*>(BIO_get_data(bio));
  BIO_clear_retry_flags(bio);
  const ssize_t sent =
      ::send(wire->fd, bytes, static_cast<size_t>(size), MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent < 0 && (errno == EAGAIN || errno == EINTR)) {
    BIO_set_retry_write(bio);
  }
  return static_cast<int>(sent);
}

int ReadWire(BIO* bio, char* bytes, int size) {
  auto* const wire = static_cast<Wire*>(BIO_get_data(bio));
  BIO_clear_retry_flags(bio);
  const ssize_t got = ::recv(wire->fd, bytes, static_cast<size_t>(size), MSG_DONTWAIT);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) {
    BIO_set_retry_read(bio);
  }
  wire->ended = wire->ended || got == 0;
  if (got > 0 && wire->first_byte < 0) {
    wire->first_byte = static_cast<unsigned char>(bytes[0]);
  }
  return static_cast<int>(got);
}

long ControlWire(BIO* bio, int command, long, void*) {
  switch (command) {
    case BIO_CTRL_FLUSH:
      return 1;
    case BIO_CTRL_EOF:
      return static_cast<const Wire*>(BIO_get_data(bio))->ended ? 1 : 0;
    default:
      return 0;
  }
}

BIO_METHOD* WireMethod() {
  static BIO_METHOD* const method = [] {
    BIO_METHOD* made = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "holdfast socket");
    BIO_meth_set_write(made, WriteWire);
    BIO_meth_set_read(made, ReadWire);
    BIO_meth_set_ctrl(made, ControlWire);
    BIO_meth_set_create(made, [](BIO* bio) {
      BIO_set_init(bio, 1);
      return 1;
    });
    return made;
  }();
  return method;
}

// ---- Contexts ----

const unsigned char* Bytes(const std::string& text) {
  return reinterpret_cast<const unsigned char*>(text.data());
}

std::string OnTheWire(const std::string& protocol) {
  return protocol.empty() ? "" : static_cast<char>(protocol.size()) + protocol;
}

// Of those that are offered ours; else none is said, and the client may go on or not.
int TakeProtocol(SSL*, const unsigned char** chosen, unsigned char* size,
                 const unsigned char* offered, unsigned int offered_size, void* ours) {
  const auto& protocols = *static_cast<const std::string*>(ours);
  unsigned char* found = nullptr;
  if (SSL_select_next_proto(&found, size, Bytes(protocols),
                            static_cast<unsigned int>(protocols.size()), offered,
                            offered_size) != OPENSSL_NPN_NEGOTIATED) {
    return SSL_TLSEXT_ERR_NOACK;
  }
  *chosen = found;
  return SSL_TLSEXT_ERR_OK;
}

absl::StatusOr<std::vector<OpensslCertificate>> Certificates(const std::string& pem,
                                                             const std::string& what) {
  absl::StatusOr<std::vector<OpensslCertificate>> found = CertificatesIn(pem, what);
  if (!found.ok()) {
    return Annotate(found.status(), "TLS");
  }
  return found;
}

absl::StatusOr<std::unique_ptr<SSL_CTX, OpensslFree>> MakeContext(const SSL_METHOD* method,
                                                                  const TlsTexts& texts) {
  // Whoever runs when the process ends is not to find OpenSSL taken down.
  OPENSSL_init_ssl(OPENSSL_INIT_NO_ATEXIT, nullptr);
  const auto bad = [](const std::string& what) {
    return absl::InvalidArgumentError(absl::StrCat("TLS: ", what, ": ", OpensslError()));
  };
  ERR_clear_error();
  std::unique_ptr<SSL_CTX, OpensslFree> context(SSL_CTX_new(method));
  if (context == nullptr) {
    return absl::ResourceExhaustedError(absl::StrCat("TLS: ", OpensslError()));
  }
  SSL_CTX_set_min_proto_version(context.get(), TLS1_2_VERSION);
  // Each connection is judged by the authority that counts now.
  SSL_CTX_set_session_cache_mode(context.get(), SSL_SESS_CACHE_OFF);
  SSL_CTX_set_options(context.get(), SSL_OP_NO_TICKET | SSL_OP_NO_RENEGOTIATION);
  SSL_CTX_set_mode(context.get(),
                   SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
  SSL_CTX_set_default_passwd_cb(context.get(), NoPassword);
  X509_STORE* const store = SSL_CTX_get_cert_store(context.get());
  X509_STORE_set_flags(store, X509_V_FLAG_PARTIAL_CHAIN);
  HF_ASSIGN_OR_RETURN(const auto authorities, Certificates(texts.ca, "the authority's file"));
  if (authorities.empty()) {
    return absl::InvalidArgumentError("TLS: the authority's file has no certificate in PEM in it");
  }
  for (const OpensslCertificate& authority : authorities) {
    X509_STORE_add_cert(store, authority.get());
    SSL_CTX_add_client_CA(context.get(), authority.get());
  }
  HF_ASSIGN_OR_RETURN(const auto chain, Certificates(texts.cert, "the certificate's file"));
  if (chain.empty()) {
    return absl::InvalidArgumentError("TLS: the certificate's file has none in PEM in it");
  }
  if (SSL_CTX_use_certificate(context.get(), chain.front().get()) != 1) {
    return bad("the certificate cannot be used");
  }
  for (size_t i = 1; i < chain.size(); ++i) {
    if (SSL_CTX_add1_chain_cert(context.get(), chain[i].get()) != 1) {
      return bad("a certificate between ours and its authority cannot be used");
    }
  }
  const OpensslKey key = KeyIn(texts.key);
  if (key == nullptr) {
    return absl::InvalidArgumentError(
        "TLS: the key's file has no private key in PEM in it, or one with a password");
  }
  if (SSL_CTX_use_PrivateKey(context.get(), key.get()) != 1 ||
      SSL_CTX_check_private_key(context.get()) != 1) {
    return bad("the key is not the certificate's");
  }
  return context;
}

bool IsAddress(const std::string& name) {
  std::array<unsigned char, sizeof(in6_addr)> parsed = {};
  return ::inet_pton(AF_INET, name.c_str(), parsed.data()) == 1 ||
         ::inet_pton(AF_INET6, name.c_str(), parsed.data()) == 1;
}

}  // namespace

absl::StatusOr<std::shared_ptr<const TlsContext>> TlsContext::ForServer(
    const TlsTexts& texts, const std::string& protocol) {
  HF_ASSIGN_OR_RETURN(auto made, MakeContext(TLS_server_method(), texts));
  std::shared_ptr<const TlsContext> context(
      new TlsContext(made.release(), OnTheWire(protocol), true));
  if (!protocol.empty()) {
    SSL_CTX_set_alpn_select_cb(context->context_, TakeProtocol,
                               const_cast<std::string*>(&context->protocols_));
  }
  return context;
}

absl::StatusOr<std::shared_ptr<const TlsContext>> TlsContext::ForClient(
    const TlsTexts& texts, const std::string& protocol) {
  HF_ASSIGN_OR_RETURN(auto made, MakeContext(TLS_client_method(), texts));
  std::shared_ptr<const TlsContext> context(
      new TlsContext(made.release(), OnTheWire(protocol), false));
  if (!protocol.empty() &&
      SSL_CTX_set_alpn_protos(context->context_, Bytes(context->protocols_),
                              static_cast<unsigned int>(context->protocols_.size())) != 0) {
    return absl::ResourceExhaustedError(absl::StrCat("TLS: ", OpensslError()));
  }
  return context;
}

TlsContext::~TlsContext() {
  SSL_CTX_free(context_);
}

// ---- Sessions ----

struct TlsSession::Impl {
  // Of the first certificate that was refused here.
  struct Refused {
    int error = X509_V_OK;
    int depth = 0;
    CertificateFacts facts;
  };

  static int Verify(int good, X509_STORE_CTX* store) {
    auto* const ssl =
        static_cast<SSL*>(X509_STORE_CTX_get_ex_data(store, SSL_get_ex_data_X509_STORE_CTX_idx()));
    auto* const impl = static_cast<Impl*>(SSL_get_app_data(ssl));
    if (good != 1 && impl->refused.error == X509_V_OK) {
      impl->refused.error = X509_STORE_CTX_get_error(store);
      impl->refused.depth = X509_STORE_CTX_get_error_depth(store);
      if (const X509* current = X509_STORE_CTX_get_current_cert(store); current != nullptr) {
        impl->refused.facts = FactsOf(current);
      }
    }
    return good;
  }

  // What step() came to, which returns as SSL_read does.
  template <typename Step>
  absl::StatusOr<TlsStep> Do(Step step) {
    if (fault != TlsFault::kNone) {
      return absl::UnavailableError("TLS: the connection has failed");
    }
    ERR_clear_error();
    errno = 0;
    const int result = step();
    const int error_number = errno;
    if (result > 0) {
      return TlsStep{TlsStep::Kind::kDone, static_cast<size_t>(result)};
    }
    switch (SSL_get_error(ssl.get(), result)) {
      case SSL_ERROR_WANT_READ:
        return TlsStep{TlsStep::Kind::kWantsToRead, 0};
      case SSL_ERROR_WANT_WRITE:
        return TlsStep{TlsStep::Kind::kWantsToWrite, 0};
      case SSL_ERROR_ZERO_RETURN:
        return TlsStep{TlsStep::Kind::kEnded, 0};
      default:
        return Failed(error_number);
    }
  }

  absl::Status Failed(int error_number) {
    const int reason = ERR_GET_REASON(ERR_peek_last_error());
    const std::string text = OpensslError();
    const auto fail = [this](TlsFault whose, const std::string& what) {
      fault = whose;
      return absl::UnavailableError(what);
    };
    if (refused.error != X509_V_OK) {
      return TheirCertificate(fail);
    }
    if (wire.first_byte >= 0 &&
        (wire.first_byte < kRecordTypeMin || wire.first_byte > kRecordTypeMax)) {
      return fail(TlsFault::kPlainText, "what comes is no TLS: is it spoken in plain text there?");
    }
    switch (reason) {
      case SSL_R_PEER_DID_NOT_RETURN_A_CERTIFICATE:
        return fail(TlsFault::kTheirsMissing, "the other side shows no certificate");
      case SSL_R_TLSV1_ALERT_UNKNOWN_CA:
        return fail(TlsFault::kOursUnknown,
                    "the other side does not know the authority that vouches for our certificate");
      case SSL_R_SSLV3_ALERT_CERTIFICATE_EXPIRED:
        return fail(TlsFault::kOursExpired,
                    "the other side says that our certificate is not valid at this time");
      case SSL_R_TLSV13_ALERT_CERTIFICATE_REQUIRED:
        return fail(TlsFault::kOursMissing, "the other side wants a certificate of ours");
      case SSL_R_SSLV3_ALERT_BAD_CERTIFICATE:
      case SSL_R_SSLV3_ALERT_CERTIFICATE_UNKNOWN:
      case SSL_R_SSLV3_ALERT_CERTIFICATE_REVOKED:
      case SSL_R_SSLV3_ALERT_UNSUPPORTED_CERTIFICATE:
      case SSL_R_TLSV1_ALERT_ACCESS_DENIED:
        return fail(TlsFault::kOursRefused,
                    absl::StrCat("the other side refuses our certificate: ", text));
      case SSL_R_TLSV1_ALERT_PROTOCOL_VERSION:
      case SSL_R_UNSUPPORTED_PROTOCOL:
      case SSL_R_NO_PROTOCOLS_AVAILABLE:
        return fail(TlsFault::kVersion, "the other side speaks no version of TLS from 1.2 on");
      case SSL_R_HTTP_REQUEST:
      case SSL_R_HTTPS_PROXY_REQUEST:
        return fail(TlsFault::kPlainText, "what comes is no TLS but HTTP in plain text");
      default:
        break;
    }
    if (wire.ended || error_number == ECONNRESET || error_number == EPIPE) {
      return fail(TlsFault::kClosed, "the other side has closed the connection");
    }
    if (error_number != 0 && reason == 0) {
      return fail(TlsFault::kClosed, Message(ErrnoStatus(error_number, "TLS", "the connection")));
    }
    return fail(TlsFault::kOther, absl::StrCat("TLS: ", text));
  }

  template <typename Fail>
  absl::Status TheirCertificate(Fail fail) const {
    const std::string who =
        absl::StrCat(refused.depth == 0 ? "the other side's certificate ("
                                        : "the certificate of the other side's authority (",
                     NamesText(refused.facts.names), ")");
    switch (refused.error) {
      case X509_V_ERR_CERT_HAS_EXPIRED:
        return fail(TlsFault::kTheirsExpired,
                    absl::StrCat(who, " was good until ", UtcTimeText(refused.facts.until_unix_s)));
      case X509_V_ERR_CERT_NOT_YET_VALID:
        return fail(TlsFault::kTheirsTooNew,
                    absl::StrCat(who, " is good from ", UtcTimeText(refused.facts.from_unix_s),
                                 " on: is the clock right?"));
      case X509_V_ERR_HOSTNAME_MISMATCH:
      case X509_V_ERR_IP_ADDRESS_MISMATCH:
        return fail(TlsFault::kTheirsNamed, absl::StrCat(who, " is not for '", name, "'"));
      case X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT:
      case X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT_LOCALLY:
      case X509_V_ERR_DEPTH_ZERO_SELF_SIGNED_CERT:
      case X509_V_ERR_SELF_SIGNED_CERT_IN_CHAIN:
      case X509_V_ERR_UNABLE_TO_VERIFY_LEAF_SIGNATURE:
      case X509_V_ERR_CERT_SIGNATURE_FAILURE:
        return fail(TlsFault::kTheirsUnknown,
                    absl::StrCat(who, " comes from an authority that is not ours"));
      default:
        return fail(
            TlsFault::kTheirsUnfit,
            absl::StrCat(who, " is refused: ", X509_verify_cert_error_string(refused.error)));
    }
  }

  std::shared_ptr<const TlsContext> context;
  std::string name;
  Wire wire;
  std::unique_ptr<SSL, OpensslFree> ssl;
  Refused refused;
  TlsFault fault = TlsFault::kNone;
};

absl::StatusOr<std::unique_ptr<TlsSession>> TlsSession::Create(
    const std::shared_ptr<const TlsContext>& context, int fd, const std::string& name) {
  auto impl = std::make_unique<Impl>();
  impl->context = context;
  impl->name = name;
  impl->wire.fd = fd;
  ERR_clear_error();
  impl->ssl.reset(SSL_new(context->context_));
  BIO* const bio = impl->ssl == nullptr ? nullptr : BIO_new(WireMethod());
  if (bio == nullptr) {
    return absl::ResourceExhaustedError(absl::StrCat("TLS: ", OpensslError()));
  }
  SSL* const ssl = impl->ssl.get();
  BIO_set_data(bio, &impl->wire);
  SSL_set_bio(ssl, bio, bio);
  SSL_set_app_data(ssl, impl.get());
  SSL_set_verify(ssl, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, Impl::Verify);
  if (context->is_server_) {
    SSL_set_accept_state(ssl);
  } else {
    X509_VERIFY_PARAM* const how = SSL_get0_param(ssl);
    const bool address = IsAddress(name);
    if ((address ? X509_VERIFY_PARAM_set1_ip_asc(how, name.c_str())
                 : X509_VERIFY_PARAM_set1_host(how, name.c_str(), name.size())) != 1 ||
        (!address && SSL_set_tlsext_host_name(ssl, name.c_str()) != 1)) {
      return absl::InvalidArgumentError(
          absl::StrCat("TLS: '", name, "' is no name of a host: ", OpensslError()));
    }
    SSL_set_connect_state(ssl);
  }
  return std::unique_ptr<TlsSession>(new TlsSession(std::move(impl)));
}

TlsSession::TlsSession(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
TlsSession::~TlsSession() = default;

absl::StatusOr<TlsStep> TlsSession::Handshake() {
  return impl_->Do([this] { return SSL_do_handshake(impl_->ssl.get()); });
}

absl::StatusOr<TlsStep> TlsSession::Read(std::span<char> buffer) {
  return impl_->Do([&] {
    return SSL_read(impl_->ssl.get(), buffer.data(),
                    static_cast<int>(std::min<size_t>(buffer.size(), INT_MAX)));
  });
}

absl::StatusOr<TlsStep> TlsSession::Write(std::string_view bytes) {
  return impl_->Do([&] {
    return SSL_write(impl_->ssl.get(), bytes.data(),
                     static_cast<int>(std::min<size_t>(bytes.size(), 16 << 10)));
  });
}

bool TlsSession::End() {
  if (impl_->fault != TlsFault::kNone) {
    return true;
  }
  ERR_clear_error();
  const int result = SSL_shutdown(impl_->ssl.get());
  const bool again = result < 0 && SSL_get_error(impl_->ssl.get(), result) == SSL_ERROR_WANT_WRITE;
  ERR_clear_error();
  return !again;
}

TlsFault TlsSession::fault() const {
  return impl_->fault;
}

CertificateFacts TlsSession::peer() const {
  const OpensslCertificate certificate(SSL_get1_peer_certificate(impl_->ssl.get()));
  return certificate == nullptr ? CertificateFacts() : FactsOf(certificate.get());
}

}  // namespace holdfast
