// What certificates in PEM files say, and whether a certificate, its key and the authority that it
// comes from fit together: for errors that say more than that a handshake failed.
//
//   HF_ASSIGN_OR_RETURN(const TlsTexts texts, ReadTlsFiles(*env, files));
//   HF_RETURN_IF_ERROR(CheckTlsTexts(texts, files, now_unix_s));
//
// Plain functions, any thread. Texts are hostile. ReadTlsFiles waits for the disk.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace holdfast {

class Env;

inline constexpr uint64_t kTlsFileBytesMax = uint64_t{1} << 20;

struct TlsFiles {  // paths
  std::string ca;
  std::string cert;
  std::string key;
};
struct TlsTexts {    // what they hold
  std::string ca;    // one or more authorities
  std::string cert;  // the own certificate, then those between it and the authority
  std::string key;
  bool operator==(const TlsTexts&) const = default;
};
absl::StatusOr<TlsTexts> ReadTlsFiles(Env& env, const TlsFiles& files);

struct CertificateName {
  enum class Kind { kDns, kAddress, kEmail, kUri, kCommonName };
  Kind kind = Kind::kDns;
  std::string text;
  bool operator==(const CertificateName&) const = default;
};
struct CertificateFacts {
  // Its alternative names, then its common name. What no name should have in it (control
  // characters, zero bytes) makes that it is left out.
  std::vector<CertificateName> names;
  int64_t from_unix_s = 0;
  int64_t until_unix_s = 0;
};
// Of the first certificate in the text; all must be readable.
absl::StatusOr<CertificateFacts> ReadCertificate(std::string_view pem);
// "'node-1', '10.0.0.1' and 3 more"; "no name".
std::string NamesText(const std::vector<CertificateName>& names);
std::string UtcTimeText(int64_t unix_s);  // "2026-11-27 14:05 UTC"

// InvalidArgument: they are no certificates and no key, one of them cannot be read, or they are not
// those of each other.
// FailedPrecondition: one is not valid yet, or any more. Messages name the file, and what to do.
// (Whether the authority vouches for the own certificate is the other side's business, who may know
// others.)
absl::Status CheckTlsTexts(const TlsTexts& texts, const TlsFiles& files, int64_t now_unix_s);

// Of the certificates alone: nobody needs to be able to read the key.
absl::Status CheckTlsTimes(const TlsTexts& texts, const TlsFiles& files, int64_t now_unix_s);

// Which certificate ends in less than so long, and when; empty: none, or it has ended already.
std::string EndsSoonText(const TlsTexts& texts, const TlsFiles& files, int64_t now_unix_s,
                         int64_t within_s);

}  // namespace holdfast
