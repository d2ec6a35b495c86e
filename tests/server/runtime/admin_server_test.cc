// The door of the admin socket: who gets in, who is turned away, and that silence locks nobody out.
#include "server/runtime/admin_server.h"

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <future>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "base/unique_fd.h"
#include "ckptctl/admin_client.h"
#include "holdfast/v1/admin.grpc.pb.h"
#include "server/runtime/admin_service.h"
#include "tests/base/temporary_directory.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr std::chrono::seconds kPatience(30);
// The least that an HTTP/2 client says: its greeting, and settings.
const std::string kHello =
    std::string("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n") + std::string("\0\0\0\4\0\0\0\0\0", 9);

class AdminServerTest : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_EQ(::chmod(dir_.path().c_str(), 0755), 0); }

  void Start(const AdminServer::Times& times) {
    v1::AdminConfig config;
    config.set_path(dir_.Path("admin.sock"));
    auto started = AdminServer::Start(config, context_, times);
    ASSERT_TRUE(started.ok()) << started.status();
    server_ = *std::move(started);
  }

  // The kernel notes the uid that the connecting thread has at that moment.
  UniqueFd ConnectAs(uint32_t uid, const std::string& say) const {
    UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    std::thread([&] {
      if (uid != ::geteuid()) {  // the system call, as that changes this thread alone
        EXPECT_EQ(::syscall(SYS_setresuid, uid, uid, uid), 0);
      }
      sockaddr_un address = {};
      address.sun_family = AF_UNIX;
      std::strcpy(address.sun_path, dir_.Path("admin.sock").c_str());
      EXPECT_EQ(::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)),
                0);
    }).join();
    // It may have been closed already: what is left to hear says so, or why.
    const ssize_t sent = ::send(fd.get(), say.data(), say.size(), MSG_NOSIGNAL);
    EXPECT_TRUE(sent == static_cast<ssize_t>(say.size()) ||
                (sent < 0 && (errno == EPIPE || errno == ECONNRESET)))
        << sent << ", errno " << errno;
    return fd;
  }
  // As one of whom the certificate says who it is.
  UniqueFd Welcome(uint32_t uid, const std::string& certificate) const {
    int ends[2] = {-1, -1};
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends), 0);
    UniqueFd ours(ends[0]);
    EXPECT_EQ(::send(ours.get(), kHello.data(), kHello.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(kHello.size()));
    server_->Welcome(UniqueFd(ends[1]), uid, certificate);
    return ours;
  }
  // What comes next; "closed" at the end, "silence" when nothing comes.
  static std::string Hear(const UniqueFd& fd, std::chrono::milliseconds at_most = kPatience) {
    pollfd wait = {fd.get(), POLLIN, 0};
    if (::poll(&wait, 1, static_cast<int>(at_most.count())) == 0) {
      return "silence";
    }
    char bytes[4096];
    const ssize_t size = ::recv(fd.get(), bytes, sizeof(bytes), 0);
    return size <= 0 ? "closed" : std::string(bytes, size);
  }
  // Everything until the end.
  static std::string HearAll(const UniqueFd& fd) {
    std::string all;
    for (;;) {
      const std::string some = Hear(fd);
      all += some;
      if (some == "closed" || some == "silence") {
        return all;
      }
    }
  }
  absl::Status CallAsOneself() const {
    auto client = AdminClient::Connect(dir_.Path("admin.sock"), kPatience);
    return client.ok() ? (*client)->CheckHealth() : client.status();
  }
  static void NeedRoot() {
    if (::geteuid() != 0) {
      GTEST_SKIP() << "only root can be several users";
    }
  }

  TemporaryDirectory dir_;
  AdminContext context_;
  std::unique_ptr<AdminServer> server_;
};

TEST_F(AdminServerTest, AnswersItsOwnUser) {
  Start({});
  EXPECT_EQ(CallAsOneself(), absl::OkStatus());
  EXPECT_EQ(CallAsOneself(), absl::OkStatus());
}

TEST_F(AdminServerTest, ARebuildMayTakeAsLongAsItsCallerSays) {
  std::promise<AdminToken> asked;
  AdminGateway gateway([&](Event event) {
    const auto* request = std::get_if<AdminRequest>(&event);
    if (request != nullptr && std::holds_alternative<v1::RebuildRequest>(request->request)) {
      asked.set_value(request->token);
    }
  });
  context_.gateway = &gateway;
  context_.request_timeout = std::chrono::milliseconds(1);
  Start({});
  v1::RebuildReply reply;
  absl::Status rebuilt;
  std::thread caller([&] {
    auto client = AdminClient::Connect(dir_.Path("admin.sock"), kPatience);
    rebuilt = client.ok() ? (*client)->Rebuild({}, reply) : client.status();
  });
  const AdminToken token = asked.get_future().get();
  // What is asked after it has ended long before.
  auto other = AdminClient::Connect(dir_.Path("admin.sock"), kPatience);
  ASSERT_TRUE(other.ok()) << other.status();
  v1::GetStatusReply status;
  EXPECT_TRUE(absl::IsDeadlineExceeded((*other)->GetStatus({}, status)));
  v1::RebuildReply answer;
  answer.set_jobs(3);
  gateway.Deliver(AdminReply{token, absl::OkStatus(), answer});
  caller.join();
  EXPECT_EQ(rebuilt, absl::OkStatus());
  EXPECT_EQ(reply.jobs(), 3u);
  server_.reset();
}

// The service as a caller of that uid has it.
class ServiceOf {
 public:
  ServiceOf(AdminContext& context, uint32_t uid)
      : service_(MakeAdminService(context, {{}, uid, uid}, "test")) {
    grpc::ServerBuilder builder;
    builder.RegisterService(service_.get());
    server_ = builder.BuildAndStart();
    stub_ = v1::Admin::NewStub(server_->InProcessChannel({}));
  }
  grpc::Status Rebuild(const v1::RebuildRequest& request, v1::RebuildReply& reply) {
    grpc::ClientContext call;
    return stub_->Rebuild(&call, request, &reply);
  }

 private:
  std::unique_ptr<grpc::Service> service_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<v1::Admin::Stub> stub_;
};

// Answers every question alike, at once.
class Answering {
 public:
  explicit Answering(AdminContext& context) {
    context.gateway = &gateway_;
    context.request_timeout = std::chrono::seconds(30);
  }
  AdminGateway& gateway() { return gateway_; }
  void Answer(absl::Status status, decltype(AdminReply::reply) reply = std::monostate()) {
    MutexLock lock(mutex_);
    reply_.status = std::move(status);
    reply_.reply = std::move(reply);
  }

 private:
  AdminReply Reply(AdminToken token) {
    MutexLock lock(mutex_);
    AdminReply answer = reply_;
    answer.token = token;
    return answer;
  }

  Mutex mutex_;
  AdminReply reply_ GUARDED_BY(mutex_);
  AdminGateway gateway_{[this](Event event) {
    if (const auto* request = std::get_if<AdminRequest>(&event)) {
      gateway_.Deliver(Reply(request->token));
    }
  }};
};

TEST_F(AdminServerTest, TheDaemonsOwnErrorsAreTold) {
  Answering core(context_);
  Start({});
  const auto ask = [&] {
    auto client = AdminClient::Connect(dir_.Path("admin.sock"), kPatience);
    v1::WhereReply where;
    return client.ok() ? (*client)->Where({}, where) : client.status();
  };
  for (const absl::StatusCode code :
       {absl::StatusCode::kUnavailable, absl::StatusCode::kDeadlineExceeded,
        absl::StatusCode::kNotFound}) {
    const absl::Status failure(code, "remote: '/mnt/lustre' is not there");
    core.Answer(failure);
    const absl::Status told = ask();
    EXPECT_EQ(told.code(), code);
    EXPECT_EQ(told.message(), failure.message());
    EXPECT_TRUE(IsDaemonsAnswer(told));
  }
  // Nobody has answered.
  core.gateway().Stop();
  const absl::Status stopped = ask();
  EXPECT_TRUE(absl::IsUnavailable(stopped)) << stopped;
  EXPECT_THAT(std::string(stopped.message()), HasSubstr("the daemon is stopping"));
  EXPECT_FALSE(IsDaemonsAnswer(stopped));
  server_.reset();
}

TEST_F(AdminServerTest, OnlyOperatorsSayWhoseAJobIs) {
  Answering core(context_);
  core.Answer(absl::OkStatus(), v1::RebuildReply());
  std::mutex mu;  // gRPC's threads come here, too
  std::vector<std::string> jobs;
  absl::StatusOr<std::vector<std::string>> lines = std::vector<std::string>{"/d0: written \xff"};
  const auto asked = [&] {
    const std::lock_guard lock(mu);
    return jobs;
  };
  context_.write_job_files = [&](const v1::RebuildRequest::Owner& owner,
                                 const std::function<bool()>& gone) {
    EXPECT_FALSE(gone());
    const std::lock_guard lock(mu);
    jobs.push_back(owner.job());
    return lines;
  };
  v1::RebuildRequest request;
  request.mutable_owner()->set_job("demo");
  request.mutable_owner()->set_uid(1000);
  v1::RebuildReply reply;
  ServiceOf somebodys(context_, ::geteuid() + 4711);
  const grpc::Status refused = somebodys.Rebuild(request, reply);
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::PERMISSION_DENIED);
  EXPECT_THAT(refused.error_message(), HasSubstr("only root and ckptd's own user"));
  EXPECT_THAT(asked(), testing::IsEmpty());

  ServiceOf operators(context_, ::geteuid());
  EXPECT_TRUE(operators.Rebuild(request, reply).ok());
  EXPECT_THAT(asked(), testing::ElementsAre("demo"));
  EXPECT_THAT(reply.written(), testing::ElementsAre("/d0: written \\xff"));
  // What makes no sense is asked of nobody; what failed is not followed by a rebuild.
  request.mutable_owner()->set_gid(~0u);
  EXPECT_EQ(operators.Rebuild(request, reply).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  request.mutable_owner()->set_gid(0);
  request.mutable_owner()->set_job("../demo");
  EXPECT_FALSE(operators.Rebuild(request, reply).ok());
  EXPECT_THAT(asked(), testing::SizeIs(1));
  request.mutable_owner()->set_job("demo");
  {
    const std::lock_guard lock(mu);
    lines = absl::DataLossError("no record in it can be read");
  }
  core.Answer(absl::InternalError("a rebuild was asked for"));
  EXPECT_EQ(operators.Rebuild(request, reply).error_code(), grpc::StatusCode::DATA_LOSS);
}

// Names of files are bytes; who gets a message that is no UTF-8 cannot read any of it.
TEST_F(AdminServerTest, NamesThatAreNoUtf8AreShownAllTheSame) {
  Answering core(context_);
  context_.fill_daemon_status = [](v1::DaemonStatus& daemon) { daemon.set_memory_dir("/\xfe"); };
  Start({});
  auto client = AdminClient::Connect(dir_.Path("admin.sock"), kPatience);
  ASSERT_TRUE(client.ok()) << client.status();
  v1::RebuildReply rebuild;
  rebuild.add_problems("'/mnt/\xff': torn");
  rebuild.add_unknown_files("/mnt/nvme0/notes-\xe4.txt");
  rebuild.add_unknown_files("/mnt/nvme0/Prüfung");
  core.Answer(absl::OkStatus(), rebuild);
  v1::RebuildReply found;
  EXPECT_EQ((*client)->Rebuild({}, found), absl::OkStatus());
  ASSERT_EQ(found.problems_size(), 1);
  EXPECT_EQ(found.problems(0), "'/mnt/\\xff': torn");
  ASSERT_EQ(found.unknown_files_size(), 2);
  EXPECT_EQ(found.unknown_files(0), "/mnt/nvme0/notes-\\xe4.txt");
  EXPECT_EQ(found.unknown_files(1), "/mnt/nvme0/Prüfung");
  v1::WhereReply where;
  where.add_copies()->set_location("/mnt/\xc3");
  core.Answer(absl::OkStatus(), where);
  EXPECT_EQ((*client)->Where({}, where), absl::OkStatus());
  EXPECT_EQ(where.copies(0).location(), "/mnt/\\xc3");
  // Of the daemon's own part, too.
  core.Answer(absl::OkStatus(), v1::GetStatusReply());
  v1::GetStatusReply status;
  EXPECT_EQ((*client)->GetStatus({}, status), absl::OkStatus());
  EXPECT_EQ(status.daemon().memory_dir(), "/\\xfe");
  core.Answer(absl::NotFoundError("no '\xff'"));
  EXPECT_EQ((*client)->Where({}, where).message(), "no '\\xff'");
  server_.reset();
}

TEST_F(AdminServerTest, WhoSaysNothingIsClosedSoon) {
  Start({.greeting = std::chrono::milliseconds(1)});
  EXPECT_EQ(Hear(ConnectAs(::geteuid(), "")), "closed");
  EXPECT_EQ(Hear(ConnectAs(::geteuid(), "PRI *")), "closed");
}

TEST_F(AdminServerTest, WhoSpeaksSomethingElseIsClosedAtOnce) {
  Start({.greeting = std::chrono::hours(1)});
  EXPECT_EQ(Hear(ConnectAs(::geteuid(), "GET / HTTP/1.1\r\n\r\n")), "closed");
  EXPECT_EQ(Hear(ConnectAs(::geteuid(), "PRI * HTTP/2.1")), "closed");
}

TEST_F(AdminServerTest, AGreetingInPiecesIsOne) {
  Start({.greeting = std::chrono::hours(1)});
  const UniqueFd fd = ConnectAs(::geteuid(), "");
  for (const char c : kHello) {
    ASSERT_EQ(::send(fd.get(), &c, 1, MSG_NOSIGNAL), 1);
  }
  EXPECT_THAT(Hear(fd), testing::AllOf(Not("closed"), Not("silence")));
}

TEST_F(AdminServerTest, ConnectionsWithoutCallsEnd) {
  Start({.idle = std::chrono::milliseconds(1)});
  EXPECT_THAT(HearAll(ConnectAs(::geteuid(), kHello)), testing::EndsWith("closed"));
}

TEST_F(AdminServerTest, WhoIsTurnedAwayIsToldWhy) {
  Start({});
  std::vector<UniqueFd> held;
  for (size_t i = 0; i < AdminServer::kConnectionsPerUidMax; ++i) {
    held.push_back(ConnectAs(::geteuid(), kHello));
    ASSERT_THAT(Hear(held.back()), Not(HasSubstr("connections")));
  }
  EXPECT_THAT(HearAll(ConnectAs(::geteuid(), kHello)),
              HasSubstr("has 16 connections to the admin socket"));
  EXPECT_THAT(CallAsOneself().ToString(), HasSubstr("too many"));
  // Whoever leaves makes room, as soon as it is noticed.
  held.clear();
  const auto until = std::chrono::steady_clock::now() + kPatience;
  while (!CallAsOneself().ok() && std::chrono::steady_clock::now() < until) {
  }
  EXPECT_EQ(CallAsOneself(), absl::OkStatus());
}

TEST_F(AdminServerTest, TheSilentLockNobodyOut) {
  NeedRoot();
  if (IsSkipped()) {
    return;
  }
  Start({.greeting = std::chrono::hours(1), .quiet = std::chrono::hours(1)});
  std::vector<UniqueFd> held;
  for (uint32_t i = 0; i < 2 * AdminServer::kAtTheDoorMax; ++i) {
    held.push_back(ConnectAs(2000 + i % 40, ""));
  }
  EXPECT_THAT(Hear(ConnectAs(1999, kHello)), Not(HasSubstr("uids")));
  EXPECT_EQ(CallAsOneself(), absl::OkStatus());
}

TEST_F(AdminServerTest, ManyUsersDoNotLockOutTheOperators) {
  NeedRoot();
  if (IsSkipped()) {
    return;
  }
  Start({.quiet = std::chrono::hours(1)});
  std::vector<UniqueFd> held;
  for (uint32_t uid = 0; uid < AdminServer::kUidsMax; ++uid) {
    held.push_back(ConnectAs(2000 + uid, kHello));
    ASSERT_THAT(Hear(held.back()), Not(HasSubstr("uids")));
  }
  EXPECT_THAT(HearAll(ConnectAs(3000, kHello)),
              HasSubstr("users of 16 uids are connected to the admin socket"));
  EXPECT_EQ(CallAsOneself(), absl::OkStatus());
}

TEST_F(AdminServerTest, ManyWhoComeByTlsDoNotLockOutTheOperatorsAmongThem) {
  Start({.quiet = std::chrono::hours(1)});
  std::vector<UniqueFd> held;
  for (uint32_t i = 0; i < AdminServer::kUidsMax; ++i) {
    held.push_back(Welcome(2000 + i, "user-" + std::to_string(i)));
    ASSERT_THAT(Hear(held.back()), Not(HasSubstr("certificates")));
  }
  EXPECT_THAT(HearAll(Welcome(3000, "one-more")),
              HasSubstr("users of 16 certificates are connected to the admin address"));
  for (const uint32_t uid : {uint32_t{0}, static_cast<uint32_t>(::geteuid())}) {
    held.push_back(Welcome(uid, "ops-" + std::to_string(uid)));
    EXPECT_THAT(Hear(held.back()), testing::AllOf(Not(HasSubstr("certificates")), Not("closed")));
  }
  EXPECT_EQ(CallAsOneself(), absl::OkStatus());
}

TEST_F(AdminServerTest, OperatorsWhoComeByTlsTakeNoPlacesFromUsers) {
  Start({.quiet = std::chrono::hours(1)});
  std::vector<UniqueFd> held;
  for (size_t i = 0; i < 8; ++i) {
    held.push_back(Welcome(0, "ops-" + std::to_string(i)));
    ASSERT_THAT(Hear(held.back()), Not(HasSubstr("certificates")));
  }
  EXPECT_THAT(HearAll(Welcome(0, "ops-8")),
              HasSubstr("operators of 8 certificates are connected to the admin address"));
  for (uint32_t i = 0; i < AdminServer::kUidsMax; ++i) {
    held.push_back(Welcome(2000 + i, "user-" + std::to_string(i)));
    ASSERT_THAT(Hear(held.back()), Not(HasSubstr("certificates")));
  }
}

TEST_F(AdminServerTest, WhoAsksNothingMakesRoom) {
  NeedRoot();
  if (IsSkipped()) {
    return;
  }
  Start({.quiet = std::chrono::milliseconds(0)});
  std::vector<UniqueFd> held;
  for (uint32_t uid = 0; uid < 2 * AdminServer::kUidsMax; ++uid) {
    held.push_back(ConnectAs(2000 + uid, kHello));
    ASSERT_THAT(Hear(held.back()), Not(HasSubstr("uids")));
  }
  EXPECT_THAT(HearAll(held.front()), testing::EndsWith("closed"));
  EXPECT_EQ(CallAsOneself(), absl::OkStatus());
}

TEST(AdminSeats, UsersKeepNoOperatorOut) {
  FollowerSeats followers;
  VerifySeats verifiers;
  for (uint32_t i = 0; i < FollowerSeats::kMax; ++i) {
    EXPECT_TRUE(followers.Take(1000 + i / FollowerSeats::kPerUidMax).ok());
  }
  for (uint32_t uid = 1000; uid < 1000 + VerifySeats::kMax; ++uid) {
    EXPECT_TRUE(verifiers.Take(uid).ok());
  }
  EXPECT_FALSE(followers.Take(2000).ok());
  EXPECT_FALSE(verifiers.Take(2000).ok());
  EXPECT_TRUE(followers.Take(0).ok());
  EXPECT_TRUE(verifiers.Take(0).ok());
  EXPECT_FALSE(verifiers.Take(0).ok()) << "one each";
}

}  // namespace
}  // namespace holdfast
