// How long saves and restores of single ranks take, from the daemon's side of the socket: out of
// the requests and replies that pass there, which it only looks at.
//
//   SaveTimes times(registry);
//   times.Asked(connection, frame, now);     // each request
//   times.Answered(connection, frame, now);  // each reply, once it is sent
//   times.Closed(connection);
//
// Owner: DaemonMetrics; the reactor's thread only. What is kept is bounded for each connection, and
// connections are bounded by socket.connections_max: a client that begins and never ends loses the
// times of its oldest saves, nothing else.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>

#include "base/clock.h"
#include "base/metrics.h"
#include "holdfast/v1/client.pb.h"
#include "server/events.h"

namespace holdfast {

class SaveTimes {
 public:
  static constexpr size_t kSavesOfAConnectionMax = 8;

  explicit SaveTimes(Metrics& registry);
  void Asked(ConnectionId connection, const v1::ClientFrame& frame, MonotonicTime now);
  void Answered(ConnectionId connection, const v1::DaemonFrame& frame, MonotonicTime now);
  void Closed(ConnectionId connection) { connections_.erase(connection); }
  size_t connections() const { return connections_.size(); }

 private:
  struct Save {
    uint64_t step = 0;
    MonotonicTime began;
    uint64_t begin_request = 0;
    std::optional<uint64_t> seal_request = std::nullopt;
  };
  struct Restore {
    MonotonicTime began;
    std::optional<uint64_t> request;  // the last one, until it is answered
    std::string tier = "";  // where the source lies that was offered last; empty: none was
  };
  struct Connection {
    std::deque<Save> saves;  // oldest first
    std::optional<Restore> restore;
  };

  void Begin(Connection& connection, uint64_t request, uint64_t step, MonotonicTime now);
  void EndRestore(Connection& connection, MonotonicTime now);

  std::map<ConnectionId, Connection> connections_;
  Histogram& waited_;
  Histogram& saved_;
  std::map<std::string, Histogram*> restored_;  // by tier; all there are
};

}  // namespace holdfast
