// A connection to a daemon's admin address by TLS (admin.tls), for gRPC, which gets the plain end
// of it; and what exactly was wrong when there is none, or it has ended.
//
//   HF_ASSIGN_OR_RETURN(auto tls, TlsChannel::Connect("gpu-17:9466", "/etc/holdfast/tls",
//   timeout)); grpc::CreateCustomInsecureChannelFromFd("localhost", tls->TakePlain().release(), …);
//   … a call failed: tls->WhyEnded(std::chrono::seconds(1))
//
// A thread of its own carries the bytes. One thread uses an object.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <string_view>
#include <thread>

#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "base/tls_relay.h"
#include "base/unique_fd.h"

namespace holdfast {

// A payload of statuses below: it is nothing that passes by itself, such as a daemon that is being
// restarted. Somebody has to see to it that we are let in.
inline constexpr char kNotLetIn[] = "holdfast/not_let_in";

class TlsChannel {
 public:
  // `directory`: with ca.crt, tls.crt and tls.key. Unavailable: what was wrong, and the way out
  // (kNotLetIn: with those files, or a certificate); DeadlineExceeded: nobody answered in time.
  static absl::StatusOr<std::unique_ptr<TlsChannel>> Connect(const std::string& address,
                                                             const std::string& directory,
                                                             Duration timeout);
  ~TlsChannel();
  TlsChannel(const TlsChannel&) = delete;
  TlsChannel& operator=(const TlsChannel&) = delete;

  UniqueFd TakePlain() { return std::move(plain_); }
  // OK: it has not, or one side said properly that it is done.
  absl::Status WhyEnded(Duration at_most) EXCLUDES(mutex_);

 private:
  TlsChannel(std::string address, std::string directory);
  absl::Status Begin(Duration timeout);
  void Carry() EXCLUDES(mutex_);
  absl::Status Explain(const absl::Status& status, TlsFault fault) const;

  const std::string address_;
  const std::string directory_;
  UniqueFd plain_;
  UniqueFd stop_;
  std::unique_ptr<TlsRelay> relay_;
  Mutex mutex_;
  CondVar ended_;
  bool has_ended_ GUARDED_BY(mutex_) = false;
  absl::Status why_ GUARDED_BY(mutex_);
  std::thread thread_;
};

// With which words a daemon that lets nobody in has said so, of the first bytes that came; empty:
// it has not.
std::string FarewellIn(std::string_view bytes);

}  // namespace holdfast
