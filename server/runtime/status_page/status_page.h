// The status page: one page and the report that it polls, over HTTP, for people with a browser.
//
//   HF_ASSIGN_OR_RETURN(auto page, StatusPage::Start(std::move(options)));
//   page.reset();   // ends all connections
//
// A thread accepts, kThreads answer, each one connection after another; kWaitingMax more may wait,
// the next are refused. A connection has one request, and a deadline for it, from when it was
// accepted; another one for the answer. All threads wait without a clock while nobody asks.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "base/clock.h"
#include "server/runtime/status_page/status_connection.h"

namespace holdfast {

class StatusPage {
 public:
  static constexpr int kThreads = 4;
  static constexpr size_t kWaitingMax = 8;

  struct Options {
    std::string address;  // HOST:PORT, checked; port 0 picks one
    std::optional<TlsFiles> tls;
    // JSON. Asked on the page's threads, at most once in `report_at_least`, and ends in time.
    std::function<absl::StatusOr<std::string>()> report;
    Duration report_at_least = std::chrono::seconds(1);
    Duration request_max = std::chrono::seconds(5);
    Duration answer_max = std::chrono::seconds(10);
  };
  static absl::StatusOr<std::unique_ptr<StatusPage>> Start(Options options);
  ~StatusPage();
  StatusPage(const StatusPage&) = delete;
  StatusPage& operator=(const StatusPage&) = delete;

  int port() const;

 private:
  struct Impl;
  explicit StatusPage(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace holdfast
