// What TLS between daemons needs: the PEM files, and gRPC's credentials of them.
//
//   HF_ASSIGN_OR_RETURN(const PeerTlsText tls, ReadPeerTls(env, options.tls));
//   grpc::CreateCustomChannel(address, PeerCredentials(tls), arguments);
//
// Plain functions, any thread.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/peers/peer_tls_files.h"

namespace grpc {
class ChannelCredentials;
class ServerCredentials;
}  // namespace grpc

namespace holdfast {

class Env;

// All empty where there is no TLS.
absl::StatusOr<PeerTlsText> ReadPeerTls(Env* env, const PeerTls& tls);
// For a caller.
std::shared_ptr<grpc::ChannelCredentials> PeerCredentials(const PeerTlsText& tls);
// For who is called: callers show a certificate by the same authority. The files are looked at
// again each `reload`; what they hold now is `text`: InvalidArgument when that does not fit
// together.
absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> PeerServerCredentials(
    const PeerTls& tls, const PeerTlsText& text, Duration reload);

}  // namespace holdfast
