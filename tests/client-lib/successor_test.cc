// When a ckptd counts as another one that serves in place of a silent one.
#include "client-lib/src/successor.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <vector>

#include "base/unique_fd.h"

namespace holdfast::client {
namespace {

const Milliseconds kAlways(0);
const Milliseconds kLong(3'600'000);

struct sockaddr_un Address(const std::string& path) {
  struct sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
  return address;
}

class SuccessorTest : public testing::Test {
 protected:
  SuccessorTest() {
    std::string directory = "/tmp/holdfast-successor-XXXXXX";
    EXPECT_NE(::mkdtemp(directory.data()), nullptr);
    directory_ = directory;
    path_ = directory_ + "/ckptd.sock";
  }
  ~SuccessorTest() override {
    ::unlink(path_.c_str());
    ::rmdir(directory_.c_str());
  }

  // A new file at the path. Those that were there before live on, as those of a dying daemon do.
  int Bind() {
    ::unlink(path_.c_str());
    const struct sockaddr_un address = Address(path_);
    UniqueFd& made =
        sockets_.emplace_back(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    EXPECT_EQ(
        ::bind(made.get(), reinterpret_cast<const struct sockaddr*>(&address), sizeof(address)), 0);
    return made.get();
  }
  int Listen(int backlog = 4) {
    const int listener = Bind();
    EXPECT_EQ(::listen(listener, backlog), 0);
    return listener;
  }
  // Whether a connection has come.
  static bool Accepts(int listener) {
    return UniqueFd(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC)).valid();
  }
  bool Connects() {
    const struct sockaddr_un address = Address(path_);
    const UniqueFd& made =
        sockets_.emplace_back(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    return ::connect(made.get(), reinterpret_cast<const struct sockaddr*>(&address),
                     sizeof(address)) == 0;
  }

  const pid_t self_ = ::getpid();  // listens in all tests
  const pid_t other_ = self_ + 1;
  std::string directory_;
  std::string path_;
  std::vector<UniqueFd> sockets_;
};

TEST_F(SuccessorTest, IsAnotherProcessBehindANewFile) {
  Listen();
  Successor successor(kAlways);
  successor.Connecting(path_);
  Listen();
  EXPECT_TRUE(successor.Serves(path_, other_));
}

TEST_F(SuccessorTest, IsNotLookedForBehindTheSameFile) {
  const int listener = Listen();
  Successor successor(kAlways);
  successor.Connecting(path_);
  EXPECT_FALSE(successor.Serves(path_, other_));
  EXPECT_FALSE(successor.Serves(path_, 0));
  EXPECT_FALSE(Accepts(listener));
}

TEST_F(SuccessorTest, IsNotTheSameProcessWhichIsAskedOnce) {
  Listen();
  Successor successor(kAlways);
  successor.Connecting(path_);
  const int listener = Listen();
  EXPECT_FALSE(successor.Serves(path_, self_));
  EXPECT_FALSE(successor.Serves(path_, self_));
  EXPECT_TRUE(Accepts(listener));
  EXPECT_FALSE(Accepts(listener));
  Listen();
  EXPECT_TRUE(successor.Serves(path_, other_));
}

TEST_F(SuccessorTest, IsWhoeverMadeANewFileWhereProcessesAreUnknown) {
  Listen();
  Successor successor(kAlways);
  successor.Connecting(path_);
  Listen();
  EXPECT_TRUE(successor.Serves(path_, 0));
}

TEST_F(SuccessorTest, IsNoneBeforeItListens) {
  Listen();
  Successor successor(kAlways);
  successor.Connecting(path_);
  ASSERT_EQ(::unlink(path_.c_str()), 0);
  EXPECT_FALSE(successor.Serves(path_, other_));
  const int listener = Bind();
  EXPECT_FALSE(successor.Serves(path_, other_));
  ASSERT_EQ(::listen(listener, 4), 0);
  EXPECT_TRUE(successor.Serves(path_, other_));
}

TEST_F(SuccessorTest, IsNoneWhileItsQueueIsFull) {
  Listen();
  Successor successor(kAlways);
  successor.Connecting(path_);
  const int listener = Listen(/*backlog=*/0);
  while (Connects()) {
  }
  EXPECT_FALSE(successor.Serves(path_, other_));
  ASSERT_TRUE(Accepts(listener));
  EXPECT_TRUE(successor.Serves(path_, other_));
}

TEST_F(SuccessorTest, IsLookedForNowAndThen) {
  Listen();
  Successor successor(kLong);
  successor.Connecting(path_);
  EXPECT_FALSE(successor.Serves(path_, other_));
  Listen();
  EXPECT_FALSE(successor.Serves(path_, other_));
}

TEST_F(SuccessorTest, IsThePredecessorOfTheOneAfterIt) {
  Listen();
  Successor successor(kAlways);
  successor.Connecting(path_);
  Listen();
  successor.Connecting(path_);
  EXPECT_FALSE(successor.Serves(path_, other_));
  Listen();
  EXPECT_TRUE(successor.Serves(path_, other_));
}

}  // namespace
}  // namespace holdfast::client
