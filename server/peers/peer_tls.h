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
#include "server/peers/peer_calls.h"
#include "server/peers/peer_network.h"

namespace grpc {
class ChannelCredentials;
}  // namespace grpc

namespace holdfast {

// All empty where there is no TLS.
absl::StatusOr<PeerTlsText> ReadPeerTls(Env* env, const PeerTls& tls);
// For a caller.
std::shared_ptr<grpc::ChannelCredentials> PeerCredentials(const PeerTlsText& tls);

}  // namespace holdfast
