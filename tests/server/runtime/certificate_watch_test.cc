#include "server/runtime/certificate_watch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ctime>
#include <filesystem>
#include <fstream>
#include <map>

#include "tests/base/test_certificates.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

class CertificateWatchTest : public ::testing::Test {
 protected:
  void Watch(std::vector<CertificateWatch::Watched> watched) {
    CertificateWatch::Options options;
    options.watched = std::move(watched);
    options.env = Env::System();
    options.every = std::chrono::milliseconds(20);
    options.again = std::chrono::milliseconds(5);
    options.changed = [this](const std::string& setting, const std::string& problem) {
      MutexLock lock(mutex_);
      told_[setting] = problem;
      ++times_;
      changed_.NotifyAll();
    };
    auto watch = CertificateWatch::Start(std::move(options));
    ASSERT_TRUE(watch.ok()) << watch.status();
    watch_ = *std::move(watch);
  }
  // What is told of it, the next time that something is.
  std::string Next(const std::string& setting) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    MutexLock lock(mutex_);
    while (told_.count(setting) == 0 && changed_.WaitUntil(mutex_, until)) {
    }
    const std::string problem = told_.count(setting) == 0 ? "nothing was told" : told_[setting];
    told_.erase(setting);
    return problem;
  }

  const TestAuthority authority_{"test-ca"};
  Mutex mutex_;
  CondVar changed_;
  std::map<std::string, std::string> told_ GUARDED_BY(mutex_);
  int times_ GUARDED_BY(mutex_) = 0;
  std::unique_ptr<CertificateWatch> watch_;
};

TEST_F(CertificateWatchTest, OneThatEndsSoonIsToldUntilThereIsANewOne) {
  const TlsFiles soon = authority_.Issue("soon", {.until = "+13 days 6 hours"});
  const TlsFiles good = authority_.Issue("good", {.until = "+15 days"});
  Watch({{"status_page.tls", good}, {"cluster.tls", soon}});
  EXPECT_THAT(Next("cluster.tls"), StartsWith("cluster.tls: the certificate of 'soon' in '" +
                                              soon.cert + "' is good until "));
  authority_.Issue("soon", {.until = "+20 days"});
  EXPECT_EQ(Next("cluster.tls"), "");
  MutexLock lock(mutex_);
  EXPECT_EQ(told_.count("status_page.tls"), 0u) << "of a good one nothing is told";
}

TEST_F(CertificateWatchTest, ExpiredAndMissingOnesAreTold) {
  const TlsFiles old = authority_.Issue("old", {.from = "-9 days", .until = "-1 day"});
  const TlsFiles gone = authority_.Issue("gone");
  std::filesystem::remove(gone.key);
  const TlsFiles told_elsewhere = authority_.Issue("other", {.from = "-9 days", .until = "-1 day"});
  Watch({{"admin.tls", told_elsewhere, true}, {"cluster.tls", old}, {"status_page.tls", gone}});
  EXPECT_THAT(Next("cluster.tls"), HasSubstr("' was good until "));
  EXPECT_THAT(Next("status_page.tls"), HasSubstr("ENOENT"));
  MutexLock lock(mutex_);
  EXPECT_EQ(told_.count("admin.tls"), 0u);
}

TEST_F(CertificateWatchTest, ASecondAuthorityThatCannotBeReadIsTold) {
  const TlsFiles good = authority_.Issue("good");
  Watch({{"cluster.tls", good}});
  std::ofstream(good.ca, std::ios::app)
      << "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n";
  EXPECT_THAT(Next("cluster.tls"),
              StartsWith("cluster.tls: certificate 2 in '" + good.ca + "' cannot be read: "));
  authority_.Issue("good");
  EXPECT_EQ(Next("cluster.tls"), "");
}

// (The hours: so many days are left in each of the looks.)
TEST_F(CertificateWatchTest, WhatIsAsBeforeIsToldOnce) {
  Watch({{"cluster.tls", authority_.Issue("soon", {.until = "+13 days 6 hours"})},
         {"status_page.tls", authority_.Issue("later", {.until = "+13 days 6 hours"})}});
  EXPECT_NE(Next("cluster.tls"), "");
  EXPECT_NE(Next("status_page.tls"), "");
  // (Looks of which the last is seen by what it finds.)
  authority_.Issue("soon", {.until = "+30 days"});
  EXPECT_EQ(Next("cluster.tls"), "");
  MutexLock lock(mutex_);
  EXPECT_EQ(times_, 3);
}

}  // namespace
}  // namespace holdfast
