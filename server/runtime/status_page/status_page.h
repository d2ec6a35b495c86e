// The status page: one page and the report that it polls, over HTTP, for people with a browser.
//
//   HF_ASSIGN_OR_RETURN(auto page, StatusPage::Start(std::move(options)));
//   page.reset();   // ends all connections
//
// A thread takes requests, one a connection, and answers them; it waits for nobody. Who does not
// ask, or over TLS has said nothing, waits at a door (tcp_door.h). Behind it those whose handshake
// or request over TLS is not complete have kAskingMax places, and those who are being answered
// kAnswersMax: the one that has been there longest makes room. Each has a deadline. Another thread
// makes the report, when somebody asks for it; with TLS a third one looks at its files.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "base/certificates.h"
#include "base/clock.h"
#include "base/env.h"

namespace holdfast {

class StatusPage {
 public:
  static constexpr size_t kAskingMax = 64;
  static constexpr size_t kAnswersMax = 64;

  struct Options {
    std::string address;  // HOST:PORT, checked; port 0 picks one
    std::optional<TlsFiles> tls;
    Env* env = Env::System();  // those files'
    // JSON. Asked on a thread of the page's, at most once in `report_at_least`, and ends in time.
    std::function<absl::StatusOr<std::string>()> report;
    Duration report_at_least = std::chrono::seconds(1);
    Duration request_max = std::chrono::seconds(5);  // at the door, and over TLS behind it
    Duration answer_max = std::chrono::seconds(10);  // to wait for the report, and to take it
    Duration look = std::chrono::seconds(5);         // from one look at the TLS files to the next
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
