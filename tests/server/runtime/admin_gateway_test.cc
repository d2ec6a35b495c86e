#include "server/runtime/admin_gateway.h"

#include <gtest/gtest.h>

#include <chrono>
#include <deque>
#include <future>
#include <thread>

namespace holdfast {
namespace {

using std::chrono::milliseconds;
constexpr std::chrono::seconds kPatience{30};

// Stands in for the reactor: keeps what was posted.
class Posted {
 public:
  void operator()(Event event) {
    MutexLock lock(mutex_);
    events_.push_back(std::move(event));
    changed_.NotifyAll();
  }
  Event Take() {
    MutexLock lock(mutex_);
    while (events_.empty()) {
      if (!changed_.WaitUntil(mutex_, std::chrono::steady_clock::now() + kPatience)) {
        ADD_FAILURE() << "nothing was posted";
        return TimerFired{};
      }
    }
    Event event = std::move(events_.front());
    events_.pop_front();
    return event;
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  std::deque<Event> events_ GUARDED_BY(mutex_);
};

class AdminGatewayTest : public ::testing::Test {
 protected:
  std::future<absl::StatusOr<AdminAnswer>> AskInBackground(Duration at_most) {
    return std::async(std::launch::async, [this, at_most] {
      return gateway_.Ask(v1::InspectShardRequest(), Caller{{}, 7, 8}, at_most);
    });
  }
  AdminReply Shards(AdminToken token) {
    AdminReply reply;
    reply.token = token;
    reply.reply = ReadableShards{{ReadableShard{}}};
    return reply;
  }

  Posted posted_;
  AdminGateway gateway_{[this](Event event) { posted_(std::move(event)); }};
};

TEST_F(AdminGatewayTest, AnAnswerFindsItsQuestionAndTheLeaseEndsTheHold) {
  auto asking = AskInBackground(kPatience);
  const AdminRequest request = std::get<AdminRequest>(posted_.Take());
  EXPECT_EQ(request.caller.uid, 7u);
  gateway_.Deliver(Shards(request.token));
  absl::StatusOr<AdminAnswer> answer = asking.get();
  ASSERT_TRUE(answer.ok()) << answer.status();
  ASSERT_NE(answer->lease, nullptr);
  answer->lease.reset();
  EXPECT_EQ(std::get<AdminReadDone>(posted_.Take()).token, request.token);
}

TEST_F(AdminGatewayTest, AnAnswerThatComesTooLateGivesItsHoldBack) {
  const absl::StatusOr<AdminAnswer> answer =
      gateway_.Ask(v1::InspectShardRequest(), {}, milliseconds(1));
  EXPECT_EQ(answer.status().code(), absl::StatusCode::kDeadlineExceeded);
  const AdminRequest request = std::get<AdminRequest>(posted_.Take());
  gateway_.Deliver(Shards(request.token));
  EXPECT_EQ(std::get<AdminReadDone>(posted_.Take()).token, request.token);
}

TEST_F(AdminGatewayTest, ErrorsPassThrough) {
  auto asking = AskInBackground(kPatience);
  AdminReply reply;
  reply.token = std::get<AdminRequest>(posted_.Take()).token;
  reply.status = absl::NotFoundError("no such job");
  gateway_.Deliver(std::move(reply));
  EXPECT_EQ(asking.get().status(), absl::NotFoundError("no such job"));
}

TEST_F(AdminGatewayTest, StopWakesWhoeverWaitsAndRefusesLaterQuestions) {
  auto asking = AskInBackground(kPatience);
  posted_.Take();
  gateway_.Stop();
  EXPECT_EQ(asking.get().status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(gateway_.Ask(v1::GetStatusRequest(), {}, kPatience).status().code(),
            absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace holdfast
