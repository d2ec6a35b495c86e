// The admin service for other machines: accepts TCP, speaks TLS with a certificate of whoever asks,
// finds the uid that it stands for, and hands a plain socket to the AdminServer, where all is as at
// the unix socket.
//
//   HF_ASSIGN_OR_RETURN(auto tls, AdminTls::Start(std::move(options)));
//   tls->Change(users);     // from now on these may, and connections of others end
//   tls.reset();            // ends all connections; before the AdminServer
//
// The files are looked at each `look`. What fits together counts from the next handshake on; what
// does not is problem(), and what was there before goes on. When the authority changes, or what a
// certificate stands for, connections of before end.
//
// One thread does it all: handshakes and what is carried wait for nobody. Limits: kHandshakesMax
// that have not ended (the one that has taken longest makes room), kConnectionsMax of users and
// kOperatorConnectionsMax of operators, of one certificate as many as of a uid at the socket. Those
// who are told why they are not let in have kTurnedAwayMax places apart, of which the oldest makes
// room. Deadlines: of a handshake, of a client that does not take its answers, and of one that does
// not go when it is told to.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/certificates.h"
#include "base/clock.h"
#include "base/env.h"
#include "base/unique_fd.h"
#include "holdfast/v1/config.pb.h"

namespace holdfast {

struct AdminTlsUser {
  std::string certificate;
  uint32_t uid = 0;
  bool operator==(const AdminTlsUser&) const = default;
};
std::vector<AdminTlsUser> AdminTlsUsers(const v1::AdminTlsConfig& config);

// Whom a certificate with these names stands for. PermissionDenied: for nobody, or for more than
// one; the message says how to change that.
absl::StatusOr<AdminTlsUser> UserOfCertificate(const std::vector<CertificateName>& names,
                                               const std::vector<AdminTlsUser>& users);

class AdminTls {
 public:
  static constexpr size_t kHandshakesMax = 64;
  static constexpr size_t kConnectionsMax = 128;
  static constexpr size_t kOperatorConnectionsMax = 64;
  static constexpr size_t kTurnedAwayMax = 32;

  struct Times {
    Duration handshake = std::chrono::seconds(5);
    Duration stalled = std::chrono::seconds(30);  // of who does not read
    Duration parting = std::chrono::seconds(2);   // of who was told that all is said
    Duration look = std::chrono::seconds(5);      // from one look at the files to the next
    Duration sweep = std::chrono::seconds(1);     // how exactly the others are kept
  };
  struct Options {
    std::string address;  // HOST:PORT; port 0 picks one
    TlsFiles files;
    std::vector<AdminTlsUser> users;
    Env* env = nullptr;
    // The thread of this: whoever has come in, at the other end of a socket.
    std::function<void(UniqueFd, const AdminTlsUser&)> welcome;
    // Likewise: what is wrong with the files has changed; empty: nothing is.
    std::function<void(const std::string&)> problem_changed = [](const std::string&) {};
    Times times = {};
  };
  // An error when nobody can listen there. Files that are no good are a problem only.
  static absl::StatusOr<std::unique_ptr<AdminTls>> Start(Options options);
  ~AdminTls();
  AdminTls(const AdminTls&) = delete;
  AdminTls& operator=(const AdminTls&) = delete;

  int port() const;
  std::string problem() const;                   // any thread
  void Change(std::vector<AdminTlsUser> users);  // any thread

 private:
  struct Impl;
  explicit AdminTls(std::unique_ptr<Impl> impl);
  const std::unique_ptr<Impl> impl_;
};

}  // namespace holdfast
