#include "server/runtime/reactor.h"

#include <gtest/gtest.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <array>
#include <chrono>
#include <thread>

namespace holdfast {
namespace {

using std::chrono::milliseconds;

std::pair<UniqueFd, UniqueFd> Pair() {
  std::array<int, 2> ends = {-1, -1};
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends.data()), 0);
  return {UniqueFd(ends[0]), UniqueFd(ends[1])};
}

class ReactorTest : public ::testing::Test {
 protected:
  std::unique_ptr<Reactor> reactor_ = *Reactor::Create(Clock::System());
};

TEST_F(ReactorTest, RunsWhatOtherThreadsPostInOrder) {
  std::vector<int> order;
  std::thread poster([&] {
    for (int i = 0; i < 1000; ++i) {
      reactor_->Post([&order, i] { order.push_back(i); });
    }
    reactor_->Stop();
  });
  reactor_->Run();
  poster.join();
  ASSERT_EQ(order.size(), 1000u);
  EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
}

TEST_F(ReactorTest, TimersFireOnceAtOrAfterTheirTimeAndTheNewestArmingWins) {
  const MonotonicTime start = Clock::System()->Now();
  std::vector<std::string> fired;
  const auto late = reactor_->AddTimer([&] {
    fired.push_back("late");
    EXPECT_GE(Clock::System()->Now() - start, milliseconds(20));
    reactor_->Stop();
  });
  const auto early = reactor_->AddTimer([&] { fired.push_back("early"); });
  const auto never = reactor_->AddTimer([&] { fired.push_back("never"); });
  reactor_->Arm(late, start + milliseconds(1));
  reactor_->Arm(late, start + milliseconds(20));
  reactor_->Arm(early, start);  // already past
  reactor_->Arm(never, start + milliseconds(2));
  reactor_->Disarm(never);
  reactor_->Run();
  EXPECT_EQ(fired, (std::vector<std::string>{"early", "late"}));
}

TEST_F(ReactorTest, ACallbackMayUnwatchAnyDescriptorAndNoStaleEventArrives) {
  const auto a = Pair();
  const auto b = Pair();
  int calls = 0;
  // Both are readable in the same round; whichever comes first unwatches both.
  const auto callback = [&](uint32_t) {
    ++calls;
    reactor_->Unwatch(a.first.get());
    reactor_->Unwatch(b.first.get());
    reactor_->Stop();
  };
  ASSERT_TRUE(reactor_->Watch(a.first.get(), EPOLLIN, callback).ok());
  ASSERT_TRUE(reactor_->Watch(b.first.get(), EPOLLIN, callback).ok());
  ASSERT_EQ(::send(a.second.get(), "x", 1, 0), 1);
  ASSERT_EQ(::send(b.second.get(), "x", 1, 0), 1);
  reactor_->Run();
  EXPECT_EQ(calls, 1);
}

TEST_F(ReactorTest, ChangeTurnsEventsOffAndOn) {
  const auto a = Pair();
  bool allowed = false;
  ASSERT_TRUE(reactor_
                  ->Watch(a.first.get(), EPOLLIN,
                          [&](uint32_t) {
                            EXPECT_TRUE(allowed);
                            reactor_->Stop();
                          })
                  .ok());
  reactor_->Change(a.first.get(), 0);
  ASSERT_EQ(::send(a.second.get(), "x", 1, 0), 1);
  const auto timer = reactor_->AddTimer([&] {
    allowed = true;
    reactor_->Change(a.first.get(), EPOLLIN);
  });
  reactor_->Arm(timer, Clock::System()->Now() + milliseconds(5));
  reactor_->Run();
  EXPECT_TRUE(allowed);
}

}  // namespace
}  // namespace holdfast
