#include "base/certificates.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ctime>
#include <fstream>

#include "base/env.h"
#include "base/status.h"
#include "tests/base/test_certificates.h"

namespace holdfast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using Kind = CertificateName::Kind;

constexpr int64_t kDayS = 24 * 3600;

class CertificatesTest : public ::testing::Test {
 protected:
  static int64_t Now() { return ::time(nullptr); }
  static TlsTexts Read(const TlsFiles& files) {
    const absl::StatusOr<TlsTexts> texts = ReadTlsFiles(*Env::System(), files);
    EXPECT_TRUE(texts.ok()) << texts.status();
    return texts.ok() ? *texts : TlsTexts();
  }
  static absl::Status Check(const TlsFiles& files) {
    return CheckTlsTexts(Read(files), files, Now());
  }
  static std::string Soon(const TlsFiles& files, int64_t days) {
    return EndsSoonText(Read(files), files, Now(), days * kDayS);
  }

  const TestAuthority authority_{"test-ca"};
};

TEST_F(CertificatesTest, WhatFitsTogetherIsGood) {
  const TlsFiles files = authority_.Issue("node");
  EXPECT_EQ(Check(files), absl::OkStatus());
}

TEST_F(CertificatesTest, NamesOfEveryKindAreRead) {
  const TlsFiles files = authority_.Issue(
      "node", {.names = "DNS:node-1.example,IP:127.0.0.1,IP:::1,email:a@example.com,"
                        "URI:spiffe://cluster/ns/train/sa/alice,otherName:1.2.3.4;UTF8:none",
               .common_name = "Alice Übermut"});
  const absl::StatusOr<CertificateFacts> facts = ReadCertificate(Read(files).cert);
  ASSERT_TRUE(facts.ok()) << facts.status();
  EXPECT_THAT(facts->names,
              ElementsAre(CertificateName{Kind::kDns, "node-1.example"},
                          CertificateName{Kind::kAddress, "127.0.0.1"},
                          CertificateName{Kind::kAddress, "::1"},
                          CertificateName{Kind::kEmail, "a@example.com"},
                          CertificateName{Kind::kUri, "spiffe://cluster/ns/train/sa/alice"},
                          CertificateName{Kind::kCommonName, "Alice Übermut"}));
  EXPECT_LT(facts->from_unix_s, Now());
  EXPECT_GT(facts->until_unix_s, Now());
  EXPECT_EQ(NamesText(facts->names),
            "'node-1.example', '127.0.0.1', '::1', 'a@example.com' and 2 more");
  EXPECT_EQ(NamesText({}), "no name");
}

TEST_F(CertificatesTest, ANameWithControlCharactersIsNone) {
  const TlsFiles files = authority_.Issue("node", {.common_name = "root\tor so"});
  const absl::StatusOr<CertificateFacts> facts = ReadCertificate(Read(files).cert);
  ASSERT_TRUE(facts.ok()) << facts.status();
  EXPECT_THAT(facts->names, ElementsAre());
}

TEST_F(CertificatesTest, OneThatHasExpiredIsNamedWithItsEnd) {
  const TlsFiles files = authority_.Issue("node", {.from = "-9 days", .until = "2020-02-03 04:05"});
  const absl::Status status = Check(files);
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_EQ(Message(status),
            "the certificate of 'node' in '" + files.cert +
                "' was good until 2020-02-03 04:05 UTC: put a new one in its place");
}

TEST_F(CertificatesTest, OneThatIsNotYetValidIsNamedWithItsBeginning) {
  const TlsFiles files = authority_.Issue("node", {.from = "+3 days", .until = "+9 days"});
  const absl::Status status = Check(files);
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(Message(status),
              StartsWith("the certificate of 'node' in '" + files.cert + "' is good from "));
  EXPECT_THAT(Message(status), HasSubstr("is the clock right?"));
}

TEST_F(CertificatesTest, AKeyOfAnotherIsNamed) {
  TlsFiles files = authority_.Issue("node");
  files.key = authority_.Issue("other").key;
  const absl::Status status = Check(files);
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(Message(status), StartsWith("the key in '" + files.key + "' is not that of the "));
}

TEST_F(CertificatesTest, WhatIsNoPemIsNamed) {
  const TlsFiles good = authority_.Issue("node");
  const std::string text = authority_.Directory("text");
  std::ofstream(text) << "certificates are elsewhere\n";
  for (const TlsFiles& files : {TlsFiles{text, good.cert, good.key},
                                {good.ca, text, good.key},
                                {good.ca, good.cert, text}}) {
    const absl::Status status = Check(files);
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(Message(status), StartsWith("'" + text + "' has no "));
  }
  TlsFiles none = good;
  none.cert += ".none";
  EXPECT_THAT(Message(ReadTlsFiles(*Env::System(), none).status()), HasSubstr(none.cert));
}

// Where authorities change, the new one would be missing with nobody being told.
TEST_F(CertificatesTest, OneAmongOthersThatCannotBeReadIsNamed) {
  const TlsFiles good = authority_.Issue("node");
  const TlsTexts texts = Read(good);
  const std::string begin = "-----BEGIN CERTIFICATE-----\n";
  const std::string end = "-----END CERTIFICATE-----\n";
  for (const std::string& broken : {begin + "MIIB\n" + end, begin + "not base64 !\n" + end,
                                    texts.ca.substr(0, texts.ca.size() / 2)}) {
    TlsTexts both = texts;
    both.ca += broken;
    absl::Status status = CheckTlsTexts(both, good, Now());
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(Message(status), StartsWith("certificate 2 in '" + good.ca + "' cannot be read: "));
    both.ca = broken + texts.ca;
    status = CheckTlsTimes(both, good, Now());
    EXPECT_THAT(Message(status), StartsWith("certificate 1 in '" + good.ca + "' cannot be read: "));
    both = texts;
    both.cert += broken;
    status = CheckTlsTexts(both, good, Now());
    EXPECT_THAT(Message(status),
                StartsWith("certificate 2 in '" + good.cert + "' cannot be read: "));
  }
  // What is between them, and of another kind, is not looked at.
  TlsTexts mixed = texts;
  mixed.ca = "# the old one\n" + texts.ca + "\n# a key\n" + texts.key + texts.ca + "\n\n";
  EXPECT_EQ(CheckTlsTexts(mixed, good, Now()), absl::OkStatus());
}

TEST_F(CertificatesTest, MoreThanAreLookedAtIsSaid) {
  const TlsFiles good = authority_.Issue("node");
  const TlsTexts one = Read(good);
  TlsTexts many = one;
  while (many.ca.size() + one.ca.size() < kTlsFileBytesMax) {
    many.ca += one.ca;
  }
  EXPECT_THAT(Message(CheckTlsTexts(many, good, Now())),
              StartsWith("'" + good.ca + "' has more than 256 certificates in it"));
}

TEST_F(CertificatesTest, AKeyWithAPasswordAsksNobody) {
  const TlsFiles files = authority_.Issue("node");
  ASSERT_EQ(std::system(("openssl pkcs8 -topk8 -passout pass:secret -in " + files.key + " -out " +
                         files.key + ".new && mv " + files.key + ".new " + files.key)
                            .c_str()),
            0);
  EXPECT_THAT(Message(Check(files)), HasSubstr("with a password"));
}

TEST_F(CertificatesTest, OneThatEndsSoonIsNamed) {
  const TlsFiles files = authority_.Issue("node", {.until = "+5 days 12 hours"});
  EXPECT_EQ(Soon(files, 4), "");
  EXPECT_THAT(Soon(files, 14),
              StartsWith("the certificate of 'node' in '" + files.cert + "' is good until "));
  EXPECT_THAT(Soon(files, 14), HasSubstr(", 5 days from now"));
  const TlsFiles expired = authority_.Issue("old", {.from = "-9 days", .until = "-1 day"});
  EXPECT_EQ(Soon(expired, 14), "") << "CheckTlsTexts says so";
}

TEST_F(CertificatesTest, AnAuthorityThatEndsSoonIsNamedUnlessThereIsANewOne) {
  const TlsFiles files = authority_.Issue("node", {.until = "+60 days"});
  EXPECT_THAT(Soon(files, 40),
              StartsWith("the certificate of the authority 'test-ca' in '" + files.ca + "'"));
  TlsTexts both = Read(files);
  const TestAuthority another("next-ca");
  both.ca += Read(another.Issue("x")).ca;
  both.ca = Read(authority_.Issue("y", {.until = "+60 days"})).cert + both.ca;  // (lasts longest)
  EXPECT_EQ(EndsSoonText(both, files, Now(), 40 * kDayS), "");
}

TEST(CertificateTexts, GarbageIsRefused) {
  for (const std::string& text :
       {std::string(), std::string("\0\0", 2), std::string(100'000, '-'),
        std::string("-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"),
        std::string("-----BEGIN CERTIFICATE-----\n") + std::string(70'000, 'A')}) {
    EXPECT_FALSE(ReadCertificate(text).ok());
    EXPECT_TRUE(absl::IsInvalidArgument(CheckTlsTexts({text, text, text}, {"a", "b", "c"}, 0)));
    EXPECT_EQ(EndsSoonText({text, text, text}, {"a", "b", "c"}, 0, 10), "");
  }
}

}  // namespace
}  // namespace holdfast
