#include "server/peers/peer_tls.h"

#include <grpcpp/grpcpp.h>

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

}  // namespace holdfast
