// Looks at the certificates that the settings name, now and then: whether they still fit together,
// have expired, or will soon, so that this is known before nobody is let in any more.
//
//   HF_ASSIGN_OR_RETURN(auto watch, CertificateWatch::Start(std::move(options)));
//   watch.reset();   // ends its thread, which may be in the middle of a look
//
// A thread of its own, as files may lie on what hangs. What is wrong twice in a row is told: who
// replaces three files is seen in the middle of it.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "base/certificates.h"
#include "base/clock.h"
#include "base/env.h"
#include "base/mutex.h"

namespace holdfast {

inline constexpr Duration kCertificateEndsSoon = std::chrono::hours(14 * 24);

class CertificateWatch {
 public:
  struct Watched {
    std::string setting;  // "cluster.tls"
    TlsFiles files;
    bool only_soon = false;  // somebody else tells of the rest
  };
  struct Options {
    std::vector<Watched> watched;
    Env* env = nullptr;
    const Clock* clock = Clock::System();
    // Its thread: of that setting; empty: nothing is wrong any more.
    std::function<void(const std::string& setting, const std::string& problem)> changed;
    Duration every = std::chrono::minutes(1);
    Duration again = std::chrono::seconds(1);  // where something has changed
  };
  static absl::StatusOr<std::unique_ptr<CertificateWatch>> Start(Options options);
  ~CertificateWatch();
  CertificateWatch(const CertificateWatch&) = delete;
  CertificateWatch& operator=(const CertificateWatch&) = delete;

 private:
  explicit CertificateWatch(Options options) : options_(std::move(options)) {}
  void Run() EXCLUDES(mutex_);
  bool Look();  // true: all is as it was at the last look
  std::string Problem(const Watched& watched) const;

  const Options options_;
  std::map<std::string, std::string> seen_;  // its thread's; by setting, at the last look
  std::map<std::string, std::string> told_;  // likewise
  Mutex mutex_;
  CondVar wake_;
  bool stopping_ GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace holdfast
