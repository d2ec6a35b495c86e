// Calls to other daemons: performs what a SendLink wants over gRPC and hands back what comes. It
// decides nothing.
//
//   PeerCalls calls(deadline, bytes_max, [&](PeerCallEnded ended) { loop.Post(…); });
//   HF_ASSIGN_OR_RETURN(auto connection, calls.Connect("10.0.0.2:7071", tls));  // reads no network
//   auto call = calls.Open(connection, id, request);   // then PeerCallEnded{id, …}
//   call->Cancel();
//
// Connections and calls are shared pointers so that they can be handed to another thread for their
// end: the last one to let go of a gRPC channel waits for gRPC's threads, so it must be none of
// them. A call is kept until its PeerCallEnded has come.
//
// Owner: PeerNetwork. Any thread calls it; the callback comes from gRPC's own threads, and none
// after AwaitAll has returned.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "base/clock.h"
#include "base/mutex.h"
#include "holdfast/v1/peer.pb.h"
#include "server/peers/peer_tls_files.h"

namespace holdfast {

struct PeerCallEnded {
  uint64_t call = 0;
  std::string error;       // empty: it was answered
  bool unreached = false;  // nobody there answered, or in no way that is understood
  v1::PeerAnswer answer = v1::PEER_ANSWER_UNSPECIFIED;
  uint64_t channel = 0;  // of an OpenReply
};

class PeerCalls {
 public:
  class Connection;
  class Call {
   public:
    virtual ~Call() = default;
    virtual void Cancel() = 0;
  };

  PeerCalls(Duration deadline, size_t message_bytes_max,
            std::function<void(PeerCallEnded ended)> ended);

  std::shared_ptr<Connection> Connect(const std::string& address, const PeerTlsText& tls) const;
  std::shared_ptr<Call> Open(std::shared_ptr<Connection> connection, uint64_t call,
                             v1::OpenRequest request);
  std::shared_ptr<Call> Deliver(std::shared_ptr<Connection> connection, uint64_t call,
                                v1::Batch request);
  // Until every call has ended.
  void AwaitAll();

 private:
  class Flights;
  template <typename Request, typename Reply>
  class TypedCall;

  const Duration deadline_;
  const size_t message_bytes_max_;
  const std::shared_ptr<Flights> flights_;
};

}  // namespace holdfast
