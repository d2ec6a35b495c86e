#include "server/runtime/cluster_files.h"

#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <string>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "server/membership/cluster_config.h"
#include "server/runtime/tier_config.h"

namespace holdfast {
namespace {

struct Kind {
  const char* wanted;     // a file of that kind
  std::string_view pem;   // the label of what is in it; empty: no PEM
  const char* pem_holds;  // in words
  uint64_t bytes_max;
};

constexpr Kind kCertificate = {"a PEM file with a certificate", "CERTIFICATE", "certificate",
                               kPemBytesMax};
constexpr Kind kKey = {"a PEM file with a private key", "PRIVATE KEY", "private key", kPemBytesMax};
constexpr Kind kPassword = {"a file whose first line is the password", "", "", kPasswordBytesMax};

// A label may say more: RSA PRIVATE KEY, TRUSTED CERTIFICATE.
bool IsLabel(std::string_view label, std::string_view wanted) {
  return label.ends_with(wanted) &&
         (label.size() == wanted.size() || label[label.size() - wanted.size() - 1] == ' ');
}

// What lies between its two lines is not decoded.
bool HoldsPem(std::string_view text, std::string_view wanted) {
  constexpr std::string_view kBegin = "-----BEGIN ";
  constexpr std::string_view kDashes = "-----";
  size_t begin = text.find(kBegin);
  while (begin != std::string_view::npos) {
    const size_t next = text.find(kBegin, begin + kBegin.size());
    const std::string_view block = text.substr(begin, next - begin).substr(kBegin.size());
    const std::string_view label = block.substr(0, block.find(kDashes));
    const std::string end = absl::StrCat("-----END ", ToAbsl(label), "-----");
    if (IsLabel(label, wanted) && block.find(end) != std::string_view::npos) {
      return true;
    }
    begin = next;
  }
  return false;
}

// In either form that there is.
bool IsEncrypted(std::string_view key) {
  return key.find("-----BEGIN ENCRYPTED PRIVATE KEY-----") != std::string_view::npos ||
         key.find("Proc-Type: 4,ENCRYPTED") != std::string_view::npos;
}

absl::Status CheckFile(Env& env, std::string_view setting, const std::string& file,
                       const Kind& kind) {
  if (file.empty()) {
    return absl::OkStatus();
  }
  const auto bad = [&](const std::string& problem) {
    return BadSetting(setting, absl::StrCat("'", file, "' ", problem, "; name ", kind.wanted));
  };
  // 1. What lies there. (Secrets are often links.)
  struct stat info = {};
  if (::access(file.c_str(), R_OK) != 0 || ::stat(file.c_str(), &info) != 0) {
    return BadSetting(setting, Message(ErrnoStatus(errno, "read", file)));
  }
  if (!S_ISREG(info.st_mode)) {
    return bad(S_ISDIR(info.st_mode) ? "is a directory" : "is no regular file");
  }
  // 2. What is in it, read as it will be.
  const absl::StatusOr<std::string> text = ReadFile(env, file, kind.bytes_max);
  if (!text.ok()) {
    return BadSetting(setting, Message(text.status()));
  }
  if (text->empty()) {
    return bad("is empty");
  }
  if (kind.pem.empty() && text->front() == '\n') {
    return bad("has an empty first line");
  }
  if (kind.pem == kKey.pem && IsEncrypted(*text)) {
    return bad("is encrypted with a password, for which a daemon has nobody to ask");
  }
  if (!kind.pem.empty() && !HoldsPem(*text, kind.pem)) {
    const std::string label = std::string(kind.pem);
    return bad(absl::StrCat("has no ", kind.pem_holds, " in PEM (-----BEGIN ", label,
                            "----- to -----END ", label, "-----)"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckTlsFiles(Env& env, const std::string& setting, const v1::ClusterTlsConfig& tls) {
  HF_RETURN_IF_ERROR(CheckFile(env, setting + ".ca_file", tls.ca_file(), kCertificate));
  HF_RETURN_IF_ERROR(CheckFile(env, setting + ".cert_file", tls.cert_file(), kCertificate));
  return CheckFile(env, setting + ".key_file", tls.key_file(), kKey);
}

absl::Status CheckClusterFiles(Env& env, const v1::ClusterConfig& cluster) {
  HF_RETURN_IF_ERROR(CheckTlsFiles(env, "cluster.tls", cluster.tls()));
  const v1::EtcdConfig& etcd = cluster.etcd();
  struct Named {
    std::string_view setting;
    const std::string* file;
    const Kind* kind;
  };
  const std::array<Named, 4> files = {{
      {"cluster.etcd.ca_file", &etcd.ca_file(), &kCertificate},
      {"cluster.etcd.cert_file", &etcd.cert_file(), &kCertificate},
      {"cluster.etcd.key_file", &etcd.key_file(), &kKey},
      {"cluster.etcd.password_file", &etcd.password_file(), &kPassword},
  }};
  for (const Named& named : files) {
    HF_RETURN_IF_ERROR(CheckFile(env, named.setting, *named.file, *named.kind));
  }
  return absl::OkStatus();
}

}  // namespace holdfast
