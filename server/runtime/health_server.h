// What supervisors that ask over the network are told (Kubernetes' grpc probes): the standard
// health service on a port of its own, in the clear, and nothing else there (but gRPC's reflection,
// which names it).
//
//   HF_ASSIGN_OR_RETURN(auto health, HealthServer::Start("0.0.0.0:9466"));
//   health->SetReady(true);
//   health->Beat();        // each kBeatEvery, from the loop whose life it is
//
// Service "" serves as long as the loop turns, "ready" while clients are served, too. A thread of
// its own looks at the beats; gRPC's answer.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "base/clock.h"

namespace holdfast {

class HealthServer {
 public:
  static constexpr Duration kBeatEvery = std::chrono::seconds(1);
  static constexpr char kReadyService[] = "ready";

  struct Options {
    std::string address;                              // HOST:PORT; port 0 picks one
    Duration silence_max = std::chrono::seconds(15);  // then the loop is called dead
    Duration look_every = std::chrono::seconds(1);
  };
  static absl::StatusOr<std::unique_ptr<HealthServer>> Start(const Options& options);
  ~HealthServer();
  HealthServer(const HealthServer&) = delete;
  HealthServer& operator=(const HealthServer&) = delete;

  int port() const;
  // Any thread.
  void Beat();
  void SetReady(bool ready);

 private:
  struct Impl;
  explicit HealthServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace holdfast
