// With which certificate a node comes to another one to read a shard, while its own are renewed.
#include "server/peers/pull_client.h"

#include <gmock/gmock.h>
#include <grpc/grpc_security_constants.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/env.h"
#include "base/mutex.h"
#include "holdfast/v1/peer.grpc.pb.h"
#include "tests/base/temporary_directory.h"
#include "tests/base/test_certificates.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;

constexpr std::chrono::seconds kPatience(30);

std::string Text(const std::string& file) {
  const absl::StatusOr<std::string> text = ReadFile(*Env::System(), file, kTlsFileBytesMax);
  EXPECT_TRUE(text.ok()) << text.status();
  return text.value_or("");
}

// Answers everything, and notes whose certificate the newest stream came with.
class NotingPulls final : public v1::Pulls::Service {
 public:
  grpc::Status Pull(grpc::ServerContext* context,
                    grpc::ServerReaderWriter<v1::PullTold, v1::PullAsked>* stream) override {
    for (const grpc::string_ref& name :
         context->auth_context()->FindPropertyValues(GRPC_X509_CN_PROPERTY_NAME)) {
      MutexLock lock(mutex_);
      newest_ = std::string(name.data(), name.size());
    }
    v1::PullTold told;
    told.mutable_confirmed();
    for (v1::PullAsked asked; stream->Read(&asked) && stream->Write(told);) {
    }
    return grpc::Status::OK;
  }
  std::string newest() {
    MutexLock lock(mutex_);
    return newest_;
  }

 private:
  Mutex mutex_;
  std::string newest_ GUARDED_BY(mutex_);
};

// Node b, which node a reads from.
class PullClientTest : public ::testing::Test {
 protected:
  PullClientTest() {
    const TlsFiles own = authority_.Issue("b", {.names = "IP:127.0.0.1"});
    grpc::SslServerCredentialsOptions tls(
        GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
    tls.pem_root_certs = Text(authority_.ca());
    tls.pem_key_cert_pairs.push_back({Text(own.key), Text(own.cert)});
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::SslServerCredentials(tls), &port);
    builder.RegisterService(&pulls_);
    server_ = builder.BuildAndStart();
    EXPECT_NE(server_, nullptr);
    PullClient::Options options;
    options.self = "a";
    options.tls = {files_.ca, files_.cert, files_.key};
    options.env = Env::System();
    client_ = std::make_unique<PullClient>(std::move(options));
    client_->ChangePeers({{{"b", {absl::StrCat("127.0.0.1:", port), 1}}}, {}});
  }
  ~PullClientTest() override { server_->Shutdown(std::chrono::system_clock::now()); }

  static void Copy(const std::string& from, const std::string& to) {
    std::filesystem::copy_file(from, to, std::filesystem::copy_options::overwrite_existing);
  }
  void Take(const TlsFiles& from) const {
    Copy(from.ca, files_.ca);
    Copy(from.cert, files_.cert);
    Copy(from.key, files_.key);
  }
  absl::StatusOr<std::unique_ptr<PullStream>> Open() {
    return client_->Open("b", {}, kPatience, nullptr);
  }
  // By whose certificate b knows a stream that is opened now.
  std::string Caller() {
    const auto stream = Open();
    EXPECT_TRUE(stream.ok()) << stream.status();
    if (!stream.ok()) {
      return "";
    }
    EXPECT_EQ((*stream)->Next().status(), absl::OkStatus());
    return pulls_.newest();
  }

  const TestAuthority authority_{"cluster"};
  const TlsFiles before_ = authority_.Issue("before");
  const TlsFiles after_ = authority_.Issue("after");
  const TemporaryDirectory directory_;
  const TlsFiles files_{directory_.Path("ca"), directory_.Path("cert"), directory_.Path("key")};
  NotingPulls pulls_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<PullClient> client_;
};

TEST_F(PullClientTest, EachPullComesWithTheCertificateThatIsThereWhenItBegins) {
  Take(before_);
  const auto stands = Open();
  ASSERT_TRUE(stands.ok()) << stands.status();
  ASSERT_EQ((*stands)->Next().status(), absl::OkStatus());
  EXPECT_EQ(pulls_.newest(), "before");
  EXPECT_EQ(Caller(), "before");
  Take(after_);
  EXPECT_EQ(Caller(), "after");
  // What was opened before goes on.
  EXPECT_EQ((*stands)->Ask({}), absl::OkStatus());
  EXPECT_EQ((*stands)->Next().status(), absl::OkStatus());
}

TEST_F(PullClientTest, InTheMiddleOfARenewalTheCertificateOfBeforeIsUsed) {
  Take(before_);
  EXPECT_EQ(Caller(), "before");
  std::filesystem::remove(files_.key);
  EXPECT_EQ(Caller(), "before");
  Copy(before_.key, files_.key);
  Copy(after_.cert, files_.cert);  // another one's key
  EXPECT_EQ(Caller(), "before");
  Copy(after_.key, files_.key);
  EXPECT_EQ(Caller(), "after");
}

TEST_F(PullClientTest, WhichFileCannotBeReadIsSaid) {
  Take(before_);
  std::filesystem::remove(files_.cert);
  EXPECT_THAT(std::string(Open().status().message()), HasSubstr(files_.cert));
  Take(before_);
  EXPECT_EQ(Caller(), "before");
}

}  // namespace
}  // namespace holdfast
