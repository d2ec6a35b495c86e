// Certificates for tests, made by the program openssl.
//
//   const TestAuthority authority("test-ca");
//   const TlsFiles files = authority.Issue("alice", {.names = "email:alice@example.com"});
//   authority.Directory("alice")   // with ca.crt, tls.crt, tls.key, for ckptctl --tls
//
// Everything lies in a directory that goes with the authority. One thread.
#pragma once

#include <string>

#include "base/certificates.h"
#include "tests/base/temporary_directory.h"

namespace holdfast {

struct TestCertificate {
  std::string names;        // "DNS:a,IP:127.0.0.1,URI:spiffe://x"; empty: none
  std::string common_name;  // empty: the certificate's own name
  std::string usage = "serverAuth,clientAuth";
  // As openssl takes them (20260101000000Z, or relative: "-2 days", "+10 days").
  std::string from = "-1 day";
  std::string until = "+20 days";
};

class TestAuthority {
 public:
  explicit TestAuthority(const std::string& name);
  // Again under the same name: in its place.
  TlsFiles Issue(const std::string& name, const TestCertificate& certificate = {}) const;
  std::string Directory(const std::string& name) const { return directory_.Path(name); }
  std::string ca() const { return directory_.Path("ca.pem"); }

 private:
  TemporaryDirectory directory_;
};

}  // namespace holdfast
