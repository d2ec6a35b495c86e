// Serves the metrics: GET /metrics over HTTP, for Prometheus, in the clear.
//
//   HF_ASSIGN_OR_RETURN(auto server, MetricsServer::Start({.address = "127.0.0.1:9464",
//                                                          .text = [&] { return registry.Text();
//                                                          }}));
//
// A thread of its own takes requests, one a connection, and answers them; it waits for nobody: who
// does not ask, or does not take the answer, has a place in a bounded row (tcp_door.h) and a
// deadline. At an address of the loopback it answers by the loopback's names only, so that no page
// that a browser shows reads it under a name of its own.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "base/clock.h"

namespace holdfast {

class MetricsServer {
 public:
  static constexpr size_t kAnswersMax = 64;  // on their way; beyond that the oldest is cut off

  struct Options {
    std::string address;  // HOST:PORT, or the port alone (everywhere); port 0 picks one
    std::function<std::string()> text;  // the exposition format; any thread
    Duration request_max = std::chrono::seconds(5);
    Duration answer_max = std::chrono::seconds(10);
  };
  static absl::StatusOr<std::unique_ptr<MetricsServer>> Start(Options options);
  ~MetricsServer();
  MetricsServer(const MetricsServer&) = delete;
  MetricsServer& operator=(const MetricsServer&) = delete;

  int port() const;

 private:
  struct Impl;
  explicit MetricsServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace holdfast
