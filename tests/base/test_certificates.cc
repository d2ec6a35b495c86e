#include "tests/base/test_certificates.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "absl/strings/str_cat.h"

namespace holdfast {
namespace {

constexpr char kSettings[] = R"(cat >ca.cnf <<END
[ca]
default_ca = d
[d]
dir = .
database = index.txt
new_certs_dir = .
default_md = sha256
policy = p
unique_subject = no
rand_serial = yes
copy_extensions = none
[p]
commonName = optional
END
)";

void Run(const std::string& directory, const std::string& script) {
  const std::string all =
      absl::StrCat("set -e; cd '", directory, "'; exec >>openssl.log 2>&1\n",
                   "ec='-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes'\n", script);
  EXPECT_EQ(std::system(all.c_str()), 0) << "see " << directory << "/openssl.log";
}

}  // namespace

TestAuthority::TestAuthority(const std::string& name) {
  Run(directory_.path(),
      absl::StrCat(kSettings, "touch index.txt\nopenssl req -x509 $ec -days 30 -subj '/CN=", name,
                   "' -keyout ca.key -out ca.pem\n"));
}

TlsFiles TestAuthority::Issue(const std::string& name, const TestCertificate& certificate) const {
  const std::string cn = certificate.common_name.empty() ? name : certificate.common_name;
  const std::string names =
      certificate.names.empty() ? "" : absl::StrCat("subjectAltName=", certificate.names, "\\n");
  Run(directory_.path(),
      absl::StrCat(
          "mkdir -p ", name, "\nprintf '", names, "extendedKeyUsage=", certificate.usage,
          "\\n' >ext\nopenssl req -new -utf8 $ec -subj '/CN=", cn, "' -keyout ", name,
          "/new.key -out csr\n",
          "openssl ca -batch -notext -config ca.cnf -cert ca.pem -keyfile ca.key -in csr -out ",
          name, "/new.crt -extfile ext -startdate $(date -u -d '", certificate.from,
          "' +%Y%m%d%H%M%SZ) -enddate $(date -u -d '", certificate.until, "' +%Y%m%d%H%M%SZ)\n",
          "cp ca.pem ", name, "/ca.crt\nmv ", name, "/new.key ", name, "/tls.key\nmv ", name,
          "/new.crt ", name, "/tls.crt\n"));
  const std::string at = Directory(name);
  return {at + "/ca.crt", at + "/tls.crt", at + "/tls.key"};
}

}  // namespace holdfast
