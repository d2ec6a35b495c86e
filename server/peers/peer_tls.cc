#include "server/peers/peer_tls.h"

#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/env.h"
#include "base/status.h"
#include "server/membership/cluster_config.h"

namespace holdfast {

absl::StatusOr<PeerTlsText> ReadPeerTls(Env* env, const PeerTls& tls) {
  PeerTlsText text;
  if (tls.ca_file.empty()) {
    return text;
  }
  HF_ASSIGN_OR_RETURN(text.ca, ReadFile(*env, tls.ca_file, kPemBytesMax));
  HF_ASSIGN_OR_RETURN(text.cert, ReadFile(*env, tls.cert_file, kPemBytesMax));
  HF_ASSIGN_OR_RETURN(text.key, ReadFile(*env, tls.key_file, kPemBytesMax));
  return text;
}

std::shared_ptr<grpc::ChannelCredentials> PeerCredentials(const PeerTlsText& tls) {
  if (tls.ca.empty()) {
    return grpc::InsecureChannelCredentials();
  }
  grpc::SslCredentialsOptions options;
  options.pem_root_certs = tls.ca;
  options.pem_cert_chain = tls.cert;
  options.pem_private_key = tls.key;
  return grpc::SslCredentials(options);
}

absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> PeerServerCredentials(
    const PeerTls& tls, const PeerTlsText& text, Duration reload) {
  if (text.ca.empty()) {
    return grpc::InsecureServerCredentials();
  }
  // 1. Whether they fit together says a server that is made of them, and takes nobody in: those
  //    that follow the files would only be silent.
  grpc::SslServerCredentialsOptions fixed(
      GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  fixed.pem_root_certs = text.ca;
  fixed.pem_key_cert_pairs.push_back({text.key, text.cert});
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort("127.0.0.1:0", grpc::SslServerCredentials(fixed), &port);
  grpc::CallbackGenericService nothing;  // (gRPC wants a service)
  builder.RegisterCallbackGenericService(&nothing);
  if (const auto trial = builder.BuildAndStart(); trial == nullptr || port == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("cluster.tls: the certificates of '", tls.ca_file, "' and '", tls.cert_file,
                     "' and the key of '", tls.key_file, "' are no PEM, or do not fit together"));
  }
  // 2. And those that follow them.
  using grpc::experimental::FileWatcherCertificateProvider;
  const auto seconds = std::max<int64_t>(1, reload / std::chrono::seconds(1));
  grpc::experimental::TlsServerCredentialsOptions options(
      std::make_shared<FileWatcherCertificateProvider>(tls.key_file, tls.cert_file, tls.ca_file,
                                                       static_cast<unsigned int>(seconds)));
  options.watch_root_certs();
  options.watch_identity_key_cert_pairs();
  options.set_cert_request_type(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  return grpc::experimental::TlsServerCredentials(options);
}

}  // namespace holdfast
