// The wire to etcd: performs an EtcdSession's actions over gRPC and hands back what comes. It
// decides nothing.
//
//   EtcdClient client([&](EtcdSession::Event event) { loop.Post(…); });
//   client.Connect({"10.0.0.1:2379"}, {});
//
// Owner: EtcdMembership. One thread calls it; the callback comes from gRPC's own threads, several
// at a time, and none after the destructor has returned. What belongs to a connection that was
// replaced is not told any more.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "server/membership/etcd_endpoint.h"
#include "server/membership/etcd_session.h"

namespace holdfast {

struct TlsFiles {  // their contents, PEM
  std::string ca;
  std::string cert;
  std::string key;
};

class EtcdClient {
 public:
  using Callback = std::function<void(EtcdSession::Event event)>;

  explicit EtcdClient(Callback callback);
  ~EtcdClient();  // waits until gRPC has let go of everything
  EtcdClient(const EtcdClient&) = delete;
  EtcdClient& operator=(const EtcdClient&) = delete;

  void Connect(const EtcdEndpoint& endpoint, const TlsFiles& tls);
  void Disconnect();
  void Call(EtcdCall call);
  void OpenWatch(const EtcdOpenWatch& open);
  void WriteWatch(const EtcdWriteWatch& write);

 private:
  struct Connection;
  class WatchStream;
  class KeepAliveCall;
  class Flights;
  class Flight;

  const std::shared_ptr<Flights> flights_;
  std::vector<std::unique_ptr<Connection>>
      connections_;  // those that calls still use, and the present one
  Connection* connection_ = nullptr;
  std::shared_ptr<WatchStream> watch_;
};

}  // namespace holdfast
