#include "base/certificates.h"

#include <arpa/inet.h>

#include <algorithm>
#include <array>
#include <ctime>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/env.h"
#include "base/openssl_types.h"
#include "base/status.h"
#include "base/utf8.h"

namespace holdfast {
namespace {

constexpr size_t kCertificatesMax = 256;  // in a text
constexpr size_t kNamesMax = 256;
constexpr size_t kNameBytesMax = 1024;
constexpr size_t kNamesShown = 4;
constexpr size_t kNameShownBytesMax = 100;

int64_t UnixSeconds(const ASN1_TIME* time) {
  std::tm parts = {};
  return ASN1_TIME_to_tm(time, &parts) == 1 ? ::timegm(&parts) : 0;
}

void AddName(std::vector<CertificateName>& names, CertificateName::Kind kind,
             const ASN1_STRING* string) {
  unsigned char* utf8 = nullptr;
  const int size = ASN1_STRING_to_UTF8(&utf8, string);
  if (size < 0) {
    ERR_clear_error();
    return;
  }
  const std::string text(reinterpret_cast<const char*>(utf8), static_cast<size_t>(size));
  OPENSSL_free(utf8);
  const bool readable = std::none_of(text.begin(), text.end(), [](const char c) {
    const auto byte = static_cast<unsigned char>(c);
    return byte < 0x20 || byte == 0x7f;
  });
  if (!text.empty() && text.size() <= kNameBytesMax && readable && names.size() < kNamesMax &&
      Utf8Text(text) == text) {
    names.push_back({kind, text});
  }
}

std::string AddressText(const ASN1_OCTET_STRING* address) {
  std::array<char, INET6_ADDRSTRLEN> text = {};
  const int size = ASN1_STRING_length(address);
  const int family = size == 4 ? AF_INET : AF_INET6;
  if ((size != 4 && size != 16) ||
      ::inet_ntop(family, ASN1_STRING_get0_data(address), text.data(), text.size()) == nullptr) {
    return "";
  }
  return text.data();
}

std::vector<CertificateName> NamesOf(const X509* certificate) {
  using Kind = CertificateName::Kind;
  std::vector<CertificateName> names;
  const OpensslNames alternatives(static_cast<GENERAL_NAMES*>(
      X509_get_ext_d2i(certificate, NID_subject_alt_name, nullptr, nullptr)));
  const int count = alternatives == nullptr ? 0 : sk_GENERAL_NAME_num(alternatives.get());
  for (int i = 0; i < count && names.size() < kNamesMax; ++i) {
    const GENERAL_NAME* name = sk_GENERAL_NAME_value(alternatives.get(), i);
    switch (name->type) {
      case GEN_DNS:
        AddName(names, Kind::kDns, name->d.dNSName);
        break;
      case GEN_EMAIL:
        AddName(names, Kind::kEmail, name->d.rfc822Name);
        break;
      case GEN_URI:
        AddName(names, Kind::kUri, name->d.uniformResourceIdentifier);
        break;
      case GEN_IPADD:
        if (std::string text = AddressText(name->d.iPAddress); !text.empty()) {
          names.push_back({Kind::kAddress, std::move(text)});
        }
        break;
      default:
        break;
    }
  }
  const X509_NAME* const subject = X509_get_subject_name(certificate);
  for (int i = -1; (i = X509_NAME_get_index_by_NID(subject, NID_commonName, i)) >= 0;) {
    AddName(names, Kind::kCommonName, X509_NAME_ENTRY_get_data(X509_NAME_get_entry(subject, i)));
  }
  ERR_clear_error();
  return names;
}

// One that counts, of one of the files.
struct Counted {
  std::string what;  // "the certificate of 'a' in '/etc/tls.crt'"
  int64_t from_unix_s = 0;
  int64_t until_unix_s = 0;
};

Counted CountedOf(const X509* certificate, const std::string& what, const std::string& file) {
  return {absl::StrCat("the certificate of ", what, NamesText(NamesOf(certificate)), " in '", file,
                       "'"),
          UnixSeconds(X509_get0_notBefore(certificate)),
          UnixSeconds(X509_get0_notAfter(certificate))};
}

struct Parsed {
  std::vector<OpensslCertificate> authorities;
  std::vector<OpensslCertificate> chain;

  // Ours, and those that lead from it to an authority; of the authorities, of which one is enough
  // and old ones stay for a while, the one that lasts longest.
  std::vector<Counted> Counting(const TlsFiles& files) const {
    std::vector<Counted> counting = {CountedOf(chain.front().get(), "", files.cert)};
    for (size_t i = 1; i < chain.size(); ++i) {
      if (X509_check_issued(chain[i].get(), chain[i - 1].get()) != X509_V_OK) {
        break;
      }
      counting.push_back(CountedOf(chain[i].get(), "its authority, ", files.cert));
    }
    ERR_clear_error();
    std::vector<Counted> last;
    for (const OpensslCertificate& authority : authorities) {
      Counted one = CountedOf(authority.get(), "the authority ", files.ca);
      if (last.empty() || one.until_unix_s > last.front().until_unix_s) {
        last = {std::move(one)};
      }
    }
    counting.insert(counting.end(), last.begin(), last.end());
    return counting;
  }
};

absl::StatusOr<std::vector<OpensslCertificate>> SomeIn(std::string_view pem,
                                                       const std::string& file) {
  const std::string what = absl::StrCat("'", file, "'");
  HF_ASSIGN_OR_RETURN(std::vector<OpensslCertificate> found, CertificatesIn(pem, what));
  if (found.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, " has no certificate in PEM in it (-----BEGIN CERTIFICATE-----)"));
  }
  return found;
}

absl::StatusOr<Parsed> Parse(const TlsTexts& texts, const TlsFiles& files) {
  Parsed parsed;
  HF_ASSIGN_OR_RETURN(parsed.authorities, SomeIn(texts.ca, files.ca));
  HF_ASSIGN_OR_RETURN(parsed.chain, SomeIn(texts.cert, files.cert));
  return parsed;
}

}  // namespace

absl::StatusOr<std::vector<OpensslCertificate>> CertificatesIn(std::string_view pem,
                                                               const std::string& what) {
  std::vector<OpensslCertificate> all;
  ERR_clear_error();
  const OpensslBio bio(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())));
  if (bio == nullptr) {
    return absl::ResourceExhaustedError(absl::StrCat(what, ": ", OpensslError()));
  }
  for (;;) {
    OpensslCertificate next(PEM_read_bio_X509(bio.get(), nullptr, NoPassword, nullptr));
    if (next == nullptr) {
      break;
    }
    if (all.size() == kCertificatesMax) {
      return absl::InvalidArgumentError(
          absl::StrCat(what, " has more than ", kCertificatesMax,
                       " certificates in it: leave those there that are needed"));
    }
    all.push_back(std::move(next));
  }
  const unsigned long code = ERR_peek_last_error();
  if (ERR_GET_LIB(code) != ERR_LIB_PEM || ERR_GET_REASON(code) != PEM_R_NO_START_LINE) {
    return absl::InvalidArgumentError(absl::StrCat("certificate ", all.size() + 1, " in ", what,
                                                   " cannot be read: ", OpensslError(),
                                                   ": mend it, or take it out"));
  }
  ERR_clear_error();
  return all;
}

OpensslKey KeyIn(std::string_view pem) {
  const OpensslBio bio(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())));
  OpensslKey key(bio == nullptr ? nullptr
                                : PEM_read_bio_PrivateKey(bio.get(), nullptr, NoPassword, nullptr));
  ERR_clear_error();
  return key;
}

int NoPassword(char*, int, int, void*) {
  return 0;
}

std::string OpensslError() {
  std::string text = "no reason is given";
  if (const unsigned long code = ERR_peek_last_error(); code != 0) {
    std::array<char, 256> buffer = {};
    ERR_error_string_n(code, buffer.data(), buffer.size());
    text = buffer.data();
  }
  ERR_clear_error();
  return text;
}

CertificateFacts FactsOf(const X509* certificate) {
  return {NamesOf(certificate), UnixSeconds(X509_get0_notBefore(certificate)),
          UnixSeconds(X509_get0_notAfter(certificate))};
}

absl::StatusOr<TlsTexts> ReadTlsFiles(Env& env, const TlsFiles& files) {
  TlsTexts texts;
  HF_ASSIGN_OR_RETURN(texts.ca, ReadFile(env, files.ca, kTlsFileBytesMax));
  HF_ASSIGN_OR_RETURN(texts.cert, ReadFile(env, files.cert, kTlsFileBytesMax));
  HF_ASSIGN_OR_RETURN(texts.key, ReadFile(env, files.key, kTlsFileBytesMax));
  return texts;
}

absl::StatusOr<CertificateFacts> ReadCertificate(std::string_view pem) {
  HF_ASSIGN_OR_RETURN(const std::vector<OpensslCertificate> all, CertificatesIn(pem, "the text"));
  if (all.empty()) {
    return absl::InvalidArgumentError("there is no certificate in PEM");
  }
  return FactsOf(all.front().get());
}

std::string NamesText(const std::vector<CertificateName>& names) {
  std::vector<std::string> shown;
  std::set<std::string> seen;  // (the common name is an alternative one, as a rule)
  size_t more = 0;
  for (const CertificateName& name : names) {
    if (!seen.insert(name.text).second) {
      continue;
    }
    if (shown.size() == kNamesShown) {
      ++more;
      continue;
    }
    shown.push_back(absl::StrCat("'", PrintableText(name.text.substr(0, kNameShownBytesMax)), "'"));
  }
  return shown.empty() ? "no name"
                       : absl::StrCat(absl::StrJoin(shown, ", "),
                                      more == 0 ? "" : absl::StrCat(" and ", more, " more"));
}

std::string UtcTimeText(int64_t unix_s) {
  const std::time_t seconds = unix_s;
  std::tm parts = {};
  std::array<char, 64> text = {};
  if (::gmtime_r(&seconds, &parts) == nullptr) {
    return absl::StrCat(unix_s, " s after 1970");
  }
  return {text.data(), std::strftime(text.data(), text.size(), "%Y-%m-%d %H:%M UTC", &parts)};
}

absl::Status CheckTlsTexts(const TlsTexts& texts, const TlsFiles& files, int64_t now_unix_s) {
  HF_ASSIGN_OR_RETURN(const Parsed parsed, Parse(texts, files));
  const OpensslKey key = KeyIn(texts.key);
  if (key == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", files.key,
                     "' has no private key in PEM in it, or one with a password, for which nobody "
                     "is asked"));
  }
  const bool fits = X509_check_private_key(parsed.chain.front().get(), key.get()) == 1;
  ERR_clear_error();
  if (!fits) {
    return absl::InvalidArgumentError(
        absl::StrCat("the key in '", files.key, "' is not that of the certificate of ",
                     NamesText(NamesOf(parsed.chain.front().get())), " in '", files.cert,
                     "': take both from the same place"));
  }
  return CheckTlsTimes(texts, files, now_unix_s);
}

absl::Status CheckTlsTimes(const TlsTexts& texts, const TlsFiles& files, int64_t now_unix_s) {
  HF_ASSIGN_OR_RETURN(const Parsed parsed, Parse(texts, files));
  for (const Counted& one : parsed.Counting(files)) {
    if (now_unix_s > one.until_unix_s) {
      return absl::FailedPreconditionError(absl::StrCat(one.what, " was good until ",
                                                        UtcTimeText(one.until_unix_s),
                                                        ": put a new one in its place"));
    }
    if (now_unix_s < one.from_unix_s) {
      return absl::FailedPreconditionError(
          absl::StrCat(one.what, " is good from ", UtcTimeText(one.from_unix_s), " on, and it is ",
                       UtcTimeText(now_unix_s), ": is the clock right?"));
    }
  }
  return absl::OkStatus();
}

std::string EndsSoonText(const TlsTexts& texts, const TlsFiles& files, int64_t now_unix_s,
                         int64_t within_s) {
  const absl::StatusOr<Parsed> parsed = Parse(texts, files);
  if (!parsed.ok()) {
    return "";
  }
  const std::vector<Counted> counting = parsed->Counting(files);
  const auto first = std::min_element(
      counting.begin(), counting.end(),
      [](const Counted& a, const Counted& b) { return a.until_unix_s < b.until_unix_s; });
  const int64_t left_s = first->until_unix_s - now_unix_s;
  if (left_s < 0 || left_s >= within_s) {
    return "";
  }
  constexpr int64_t kHourS = 3600;
  constexpr int64_t kDayS = 24 * kHourS;
  const std::string left = left_s >= 2 * kDayS    ? absl::StrCat(left_s / kDayS, " days")
                           : left_s >= 2 * kHourS ? absl::StrCat(left_s / kHourS, " hours")
                                                  : absl::StrCat(left_s / 60, " minutes");
  return absl::StrCat(first->what, " is good until ", UtcTimeText(first->until_unix_s), ", ", left,
                      " from now: put a new one in its place before");
}

}  // namespace holdfast
