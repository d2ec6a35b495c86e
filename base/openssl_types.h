// OpenSSL's objects with owners, for the files that implement TLS here; nobody else includes this.
#pragma once

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>
#include <openssl/x509_vfy.h>
#include <openssl/x509v3.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "base/certificates.h"

namespace holdfast {

struct OpensslFree {
  void operator()(BIO* of) const { BIO_free_all(of); }
  void operator()(X509* of) const { X509_free(of); }
  void operator()(EVP_PKEY* of) const { EVP_PKEY_free(of); }
  void operator()(GENERAL_NAMES* of) const { GENERAL_NAMES_free(of); }
  void operator()(SSL* of) const { SSL_free(of); }
  void operator()(SSL_CTX* of) const { SSL_CTX_free(of); }
};
using OpensslBio = std::unique_ptr<BIO, OpensslFree>;
using OpensslCertificate = std::unique_ptr<X509, OpensslFree>;
using OpensslKey = std::unique_ptr<EVP_PKEY, OpensslFree>;
using OpensslNames = std::unique_ptr<GENERAL_NAMES, OpensslFree>;

// All in the text, none if there are none; `what` is the text in errors. One that cannot be read is
// an error, as whoever put it there counts on it.
absl::StatusOr<std::vector<OpensslCertificate>> CertificatesIn(std::string_view pem,
                                                               const std::string& what);
OpensslKey KeyIn(std::string_view pem);  // null: there is none, or it has a password
CertificateFacts FactsOf(const X509* certificate);
// What OpenSSL says last, and no more from then on; it keeps a list for each thread.
std::string OpensslError();
// A key with a password must not ask the terminal for it.
int NoPassword(char*, int, int, void*);

}  // namespace holdfast
