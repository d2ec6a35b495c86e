#include "server/runtime/unix_socket.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>

#include <filesystem>
#include <fstream>

#include "base/process.h"
#include "base/status.h"
#include "tests/base/temporary_directory.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;

UniqueFd ConnectTo(const std::string& path) {
  UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof(address.sun_path) - 1);
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    fd.reset();
  }
  return fd;
}

class UnixSocketTest : public ::testing::Test {
 protected:
  TemporaryDirectory dir_;
  const std::string path_ = dir_.Path("run/ckptd.sock");
};

TEST_F(UnixSocketTest, ListensWithItsModeAndRemovesItsFile) {
  {
    const auto socket = ListeningSocket::Open(path_, 0640);
    ASSERT_TRUE(socket.ok()) << socket.status();
    struct stat st = {};
    ASSERT_EQ(::stat(path_.c_str(), &st), 0);
    EXPECT_EQ(st.st_mode & 0777, 0640u);
    EXPECT_TRUE(ConnectTo(path_).valid());
  }
  EXPECT_TRUE(std::filesystem::is_empty(dir_.Path("run")));
}

TEST_F(UnixSocketTest, ReplacesASocketThatNobodyListensOn) {
  std::filesystem::create_directory(dir_.Path("run"));
  {
    const UniqueFd dead(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    path_.copy(address.sun_path, sizeof(address.sun_path) - 1);
    ASSERT_EQ(::bind(dead.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  }
  const auto socket = ListeningSocket::Open(path_, 0600);
  ASSERT_TRUE(socket.ok()) << socket.status();
  EXPECT_TRUE(ConnectTo(path_).valid());
}

TEST_F(UnixSocketTest, NeverTakesALivingListenersPlace) {
  const auto first = ListeningSocket::Open(path_, 0600);
  ASSERT_TRUE(first.ok());
  const auto second = ListeningSocket::Open(path_, 0600);
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(ConnectTo(path_).valid());
  // One that knows nothing of our lock.
  std::filesystem::remove(path_ + ".lock");
  const auto third = ListeningSocket::Open(path_, 0600);
  EXPECT_THAT(Message(third.status()), HasSubstr("already listens there"));
  EXPECT_TRUE(ConnectTo(path_).valid());
}

TEST_F(UnixSocketTest, LeavesOtherFilesAlone) {
  std::filesystem::create_directory(dir_.Path("run"));
  std::ofstream(path_) << "precious";
  const auto socket = ListeningSocket::Open(path_, 0600);
  EXPECT_EQ(socket.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(std::filesystem::file_size(path_), 8u);
}

TEST_F(UnixSocketTest, DoesNotRemoveAFileThatIsNoLongerItsOwn) {
  auto socket = ListeningSocket::Open(path_, 0600);
  ASSERT_TRUE(socket.ok());
  std::filesystem::remove(path_);
  std::ofstream(path_) << "somebody else's";
  socket->Close();
  EXPECT_TRUE(std::filesystem::exists(path_));
}

TEST_F(UnixSocketTest, PathsOutsideTheLimitsAreRefused) {
  EXPECT_EQ(ListeningSocket::Open("relative", 0600).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ListeningSocket::Open("/tmp/" + std::string(110, 'x'), 0600).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(UnixSocketTest, KnowsWhoConnected) {
  const auto socket = ListeningSocket::Open(path_, 0600);
  ASSERT_TRUE(socket.ok());
  const UniqueFd client = ConnectTo(path_);
  const UniqueFd accepted(::accept4(socket->fd(), nullptr, nullptr, SOCK_CLOEXEC));
  const auto peer = IdentifyPeer(accepted.get());
  ASSERT_TRUE(peer.ok()) << peer.status();
  EXPECT_EQ(peer->process, ThisProcess());
  EXPECT_EQ(peer->uid, ::geteuid());
}

TEST_F(UnixSocketTest, APeerThatHasEndedIsNobody) {
  const auto socket = ListeningSocket::Open(path_, 0600);
  ASSERT_TRUE(socket.ok());
  const pid_t child = ::fork();
  if (child == 0) {
    UniqueFd fd = ConnectTo(path_);
    ::_exit(fd.valid() ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_EQ(status, 0);
  const UniqueFd accepted(::accept4(socket->fd(), nullptr, nullptr, SOCK_CLOEXEC));
  ASSERT_TRUE(accepted.valid());
  EXPECT_EQ(IdentifyPeer(accepted.get()).status().code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace holdfast
