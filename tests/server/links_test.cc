// Channels between daemons over a network that loses, repeats, delays and reorders calls and
// answers, with receivers that are started anew.
#include "server/links.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace holdfast {
namespace {

using Change = SendLink::Change;

MonotonicTime At(int64_t ms) {
  return {ms * 1'000'000};
}

template <typename T>
T Only(SendLink& link) {
  std::vector<LinkRequest> requests = link.TakeRequests();
  EXPECT_EQ(requests.size(), 1u);
  return requests.empty() ? T() : std::get<T>(requests.front());
}

// A link whose channel 1 is open.
SendLink Opened(const LinkLimits& limits = {}) {
  SendLink link(limits);
  link.Connect(At(1000));
  link.OnOpened(Only<OpenChannel>(link).request, 1, At(1000));
  EXPECT_EQ(link.TakeChanges(), std::vector<Change>{Change::kReached});
  return link;
}

TEST(LinksTest, WhatIsSaidWhileABatchIsUnderWayGoesWithTheNextOne) {
  SendLink link = Opened();
  link.Say("a", At(1000));
  const SendBatch first = Only<SendBatch>(link);
  EXPECT_EQ(first.messages, std::vector<std::string>{"a"});
  link.Say("b", At(1000));
  link.Say("c", At(1000));
  EXPECT_TRUE(link.TakeRequests().empty());
  link.OnBatchAnswered(first.request, BatchAnswer::kTaken, At(1001));
  const SendBatch second = Only<SendBatch>(link);
  EXPECT_EQ(second.first, 2u);
  EXPECT_EQ(second.messages, (std::vector<std::string>{"b", "c"}));
}

TEST(LinksTest, ABatchThatWasNotAnsweredIsSentAgainAndTakenOnce) {
  SendLink link = Opened();
  ReceiveLink in(0);
  ASSERT_EQ(in.Open(), 1u);
  link.Say("a", At(1000));
  const SendBatch batch = Only<SendBatch>(link);
  std::vector<std::string> messages;
  EXPECT_EQ(in.Take(batch, messages), BatchAnswer::kTaken);
  link.OnFailed(batch.request, "no answer", At(1001));
  ASSERT_TRUE(link.NextTime().has_value());
  EXPECT_TRUE(link.TakeRequests().empty());  // not at once
  link.OnTime(*link.NextTime());
  const SendBatch again = Only<SendBatch>(link);
  EXPECT_EQ(again.first, batch.first);
  EXPECT_EQ(again.messages, batch.messages);
  EXPECT_EQ(in.Take(again, messages), BatchAnswer::kTaken);
  EXPECT_EQ(messages, std::vector<std::string>{"a"});
  EXPECT_TRUE(link.TakeChanges().empty());
}

TEST(LinksTest, AChannelThatIsRefusedIsGivenUpAtOnceAndAnOpeningIsTriedAgain) {
  SendLink link = Opened();
  link.Say("a", At(1000));
  link.OnRefused(Only<SendBatch>(link).request, "another node", At(1001));
  EXPECT_EQ(link.TakeChanges(), std::vector<Change>{Change::kLost});
  EXPECT_EQ(link.problem(), "another node");
  ASSERT_TRUE(link.NextTime().has_value());
  link.OnTime(*link.NextTime());
  link.OnRefused(Only<OpenChannel>(link).request, "still another", At(1100));
  EXPECT_TRUE(link.TakeChanges().empty());
  EXPECT_EQ(link.problem(), "still another");
  EXPECT_GT(*link.NextTime(), At(1100));
}

TEST(LinksTest, AChannelThatIsNotAnsweredForTheDeadlineIsGivenUpAndAnotherOpened) {
  SendLink link = Opened();
  link.Say("a", At(1000));
  link.OnFailed(Only<SendBatch>(link).request, "connection refused", At(1001));
  link.OnTime(At(11'001));
  link.OnFailed(Only<SendBatch>(link).request, "connection refused", At(11'001));
  EXPECT_EQ(link.TakeChanges(), std::vector<Change>{Change::kLost});
  EXPECT_FALSE(link.reached());
  EXPECT_EQ(link.problem(), "connection refused");
  link.Say("lost, too", At(11'002));
  link.OnTime(*link.NextTime());
  link.OnOpened(Only<OpenChannel>(link).request, 2, At(12'000));
  EXPECT_EQ(link.TakeChanges(), std::vector<Change>{Change::kReached});
  EXPECT_TRUE(link.TakeRequests().empty());  // what was said before is not sent
  link.Say("b", At(12'000));
  const SendBatch batch = Only<SendBatch>(link);
  EXPECT_EQ(batch.channel, 2u);
  EXPECT_EQ(batch.first, 1u);
  EXPECT_EQ(batch.messages, std::vector<std::string>{"b"});
}

// It may have failed for long before; that answer is its first sign of life.
TEST(LinksTest, WhoDoesNotKnowTheChannelIsAskedForAnotherSoon) {
  SendLink link = Opened();
  link.Say("a", At(1000));
  int64_t now = 1001;
  for (int failures = 0; failures < 8; ++failures) {
    link.OnFailed(Only<SendBatch>(link).request, "connection refused", At(now));
    now = link.NextTime()->ns / 1'000'000;
    link.OnTime(*link.NextTime());
  }
  link.OnBatchAnswered(Only<SendBatch>(link).request, BatchAnswer::kUnknownChannel, At(now));
  EXPECT_EQ(link.TakeChanges(), std::vector<Change>{Change::kLost});
  EXPECT_LE(*link.NextTime(), At(now) + LinkLimits().retry_min);
}

TEST(LinksTest, WhoIsWantedIsTriedForSoonHoweverOftenThatHasFailed) {
  SendLink link{LinkLimits()};
  link.Connect(At(0));
  int64_t now = 1;
  for (int failures = 0; failures < 8; ++failures) {
    link.OnFailed(Only<OpenChannel>(link).request, "connection refused", At(now));
    now = link.NextTime()->ns / 1'000'000;
    link.OnTime(*link.NextTime());
  }
  link.OnFailed(Only<OpenChannel>(link).request, "connection refused", At(now));
  EXPECT_GT(*link.NextTime(), At(now) + LinkLimits().retry_min);
  link.Connect(At(now));
  EXPECT_TRUE(link.TakeRequests().empty()) << "not at once: it may be asked for all the time";
  EXPECT_EQ(*link.NextTime(), At(now) + LinkLimits().retry_min);
}

TEST(LinksTest, AReceiverThatWasStartedAnewTakesNothingOfAnOldChannel) {
  ReceiveLink before(100);
  const uint64_t channel = before.Open();
  ReceiveLink after(5000);
  std::vector<std::string> messages;
  EXPECT_EQ(after.Take({1, channel, 1, {"a"}}, messages), BatchAnswer::kUnknownChannel);
  after.Open();
  EXPECT_EQ(after.Take({1, channel, 1, {"a"}}, messages), BatchAnswer::kUnknownChannel);
  EXPECT_TRUE(messages.empty());
}

TEST(LinksTest, AGapIsNotTaken) {
  ReceiveLink in(0);
  const uint64_t channel = in.Open();
  std::vector<std::string> messages;
  EXPECT_EQ(in.Take({1, channel, 2, {"b"}}, messages), BatchAnswer::kUnknownChannel);
  EXPECT_EQ(in.Take({1, channel, 0, {"b"}}, messages), BatchAnswer::kUnknownChannel);
  EXPECT_EQ(in.Take({1, channel, UINT64_MAX, {"b"}}, messages), BatchAnswer::kUnknownChannel);
  EXPECT_TRUE(messages.empty());
}

TEST(LinksTest, ReceiversThatDoNotTakeAnythingDoNotFillTheMemory) {
  LinkLimits limits;
  limits.queue_messages_max = 10;
  SendLink link = Opened(limits);
  for (int i = 0; i < 11; ++i) {
    link.Say("x", At(1000));
    EXPECT_TRUE(link.reached());
  }
  link.Say("x", At(1000));  // the first is under way, ten wait
  EXPECT_FALSE(link.reached());
  EXPECT_EQ(link.TakeChanges(), std::vector<Change>{Change::kLost});

  limits.queue_messages_max = 1000;
  limits.queue_bytes_max = 100;
  SendLink big = Opened(limits);
  big.Say("x", At(1000));
  big.Say(std::string(101, 'x'), At(1000));
  EXPECT_FALSE(big.reached());
}

TEST(LinksTest, ABatchHasItsLimits) {
  LinkLimits limits;
  limits.batch_messages_max = 2;
  limits.batch_bytes_max = 10;
  SendLink link = Opened(limits);
  link.Say("first", At(1000));
  SendBatch batch = Only<SendBatch>(link);
  for (const char* each : {"1", "2", "3", "ten bytes!", "4"}) {
    link.Say(each, At(1000));
  }
  std::vector<size_t> sizes;
  while (batch.request != 0) {
    link.OnBatchAnswered(batch.request, BatchAnswer::kTaken, At(1000));
    const std::vector<LinkRequest> requests = link.TakeRequests();
    batch = requests.empty() ? SendBatch() : std::get<SendBatch>(requests.front());
    sizes.push_back(batch.messages.size());
  }
  EXPECT_EQ(sizes, (std::vector<size_t>{2, 1, 1, 1, 0}));
}

TEST(LinksTest, WhoHasNothingToSayFindsOutThatItsChannelIsUnknown) {
  SendLink link = Opened();
  ReceiveLink in(0);
  ASSERT_EQ(in.Open(), 1u);
  in.Open();  // an old call has come late
  EXPECT_EQ(link.NextTime(), At(3000));
  link.OnTime(At(2999));
  EXPECT_TRUE(link.TakeRequests().empty());
  link.OnTime(At(3000));
  const SendBatch batch = Only<SendBatch>(link);
  EXPECT_TRUE(batch.messages.empty());
  std::vector<std::string> messages;
  link.OnBatchAnswered(batch.request, in.Take(batch, messages), At(3001));
  EXPECT_EQ(link.TakeChanges(), std::vector<Change>{Change::kLost});
}

TEST(LinksTest, AnIdleChannelThatIsNotAnsweredIsGivenUp) {
  SendLink link = Opened();
  link.OnTime(At(3000));
  link.OnFailed(Only<SendBatch>(link).request, "no answer", At(6000));
  EXPECT_TRUE(link.TakeChanges().empty());
  link.OnTime(At(12'000));
  link.OnFailed(Only<SendBatch>(link).request, "no answer", At(15'000));
  EXPECT_EQ(link.TakeChanges(), std::vector<Change>{Change::kLost});
}

TEST(LinksTest, WhoIsClosedSaysNothing) {
  SendLink link = Opened();
  link.Say("a", At(1000));
  link.Close();
  EXPECT_TRUE(link.TakeRequests().empty());
  EXPECT_FALSE(link.NextTime().has_value());
}

// One sender, one receiver that is started anew now and then, and a network without manners. In
// every channel the receiver takes a prefix of what was said since the sender heard that it was
// open, in order, each once; and as long as the sender believes in it nothing is left out for ever.
class RudeNetwork {
 public:
  explicit RudeNetwork(uint64_t seed) : random_(seed), link_(Limits()) {}

  void Run() {
    link_.Connect(At(now_));
    for (int i = 0; i < 3000; ++i) {
      Step(true);
    }
    for (int i = 0; i < 3000 && (!link_.reached() || taken_.size() < said_.size()); ++i) {
      Step(false);
    }
    EXPECT_TRUE(link_.reached());
    EXPECT_EQ(taken_, said_);
  }

 private:
  struct Call {
    LinkRequest request;
    int copies = 1;
  };
  struct Reply {
    uint64_t request = 0;
    uint64_t channel = 0;  // of an open
    BatchAnswer answer = BatchAnswer::kTaken;
  };

  static LinkLimits Limits() {
    LinkLimits limits;
    limits.batch_messages_max = 3;
    limits.queue_messages_max = 20;
    return limits;
  }
  bool Chance(int percent) { return static_cast<int>(random_() % 100) < percent; }

  void Collect() {
    for (const Change change : link_.TakeChanges()) {
      if (change == Change::kReached) {
        said_.clear();
        reached_channel_ = opened_;
      }
    }
    for (LinkRequest& request : link_.TakeRequests()) {
      calls_.push_back({std::move(request), 1});
    }
  }

  void Step(bool trouble) {
    now_ += static_cast<int64_t>(random_() % 400);
    if (trouble && Chance(30)) {
      const bool reached = link_.reached();
      const std::string text = std::to_string(++next_);
      link_.Say(text, At(now_));
      if (reached) {
        said_.push_back(text);
      }
    }
    if (trouble && Chance(1)) {
      in_ = std::make_unique<ReceiveLink>(random_());
      taken_.clear();
    }
    link_.OnTime(At(now_));
    Collect();
    if (!calls_.empty() && Chance(60)) {
      Deliver(random_() % calls_.size(), trouble);
    }
    if (!replies_.empty() && Chance(60)) {
      Answer(random_() % replies_.size(), trouble);
    }
    Collect();
  }

  static uint64_t RequestOf(const LinkRequest& request) {
    return std::visit([](const auto& r) { return r.request; }, request);
  }

  void Deliver(size_t index, bool trouble) {
    const LinkRequest request = calls_[index].request;
    if (!trouble || Chance(80)) {  // else it comes once more
      calls_.erase(calls_.begin() + static_cast<ptrdiff_t>(index));
    }
    if (trouble && Chance(15)) {
      link_.OnFailed(RequestOf(request), "lost on the way", At(now_));
      return Collect();
    }
    if (std::holds_alternative<OpenChannel>(request)) {
      taken_.clear();
      replies_.push_back({RequestOf(request), in_->Open(), {}});
      return;
    }
    SendBatch batch = std::get<SendBatch>(request);
    const size_t before = taken_.size();
    const uint64_t channel = batch.channel;
    const BatchAnswer answer = in_->Take(std::move(batch), taken_);
    if (taken_.size() > before && channel == reached_channel_) {
      ASSERT_LE(taken_.size(), said_.size());
      ASSERT_TRUE(std::equal(taken_.begin(), taken_.end(), said_.begin()));
    }
    replies_.push_back({RequestOf(request), 0, answer});
  }

  void Answer(size_t index, bool trouble) {
    const Reply reply = replies_[index];
    replies_.erase(replies_.begin() + static_cast<ptrdiff_t>(index));
    if (trouble && Chance(15)) {
      link_.OnFailed(reply.request, "its answer was lost", At(now_));
    } else if (reply.channel != 0) {
      opened_ = reply.channel;
      link_.OnOpened(reply.request, reply.channel, At(now_));
    } else {
      link_.OnBatchAnswered(reply.request, reply.answer, At(now_));
    }
    Collect();
  }

  std::mt19937_64 random_;
  SendLink link_;
  std::unique_ptr<ReceiveLink> in_ = std::make_unique<ReceiveLink>(77);
  int64_t now_ = 1000;
  uint64_t next_ = 0;
  uint64_t opened_ = 0;
  uint64_t reached_channel_ = 0;
  std::vector<std::string> said_;   // since the channel was reached
  std::vector<std::string> taken_;  // of the receiver's channel
  std::vector<Call> calls_;
  std::vector<Reply> replies_;
};

TEST(LinksTest, NothingIsTakenTwiceOrOutOfOrderOrLeftOut) {
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    SCOPED_TRACE(seed);
    RudeNetwork(seed).Run();
    if (::testing::Test::HasFailure()) {
      return;
    }
  }
}

// Nothing comes, not even empty batches: its sender cannot speak to this node any more.
TEST(LinksTest, AChannelThatIsSilentIsOver) {
  ReceiveLink in(0);
  std::vector<std::string> messages;
  EXPECT_FALSE(in.OnTick()) << "nobody has opened one yet";
  const uint64_t channel = in.Open();
  for (int i = 0; i < 10; ++i) {  // an empty batch now and then
    for (int tick = 0; tick + 1 < kSilentTicks; ++tick) {
      EXPECT_FALSE(in.OnTick());
    }
    EXPECT_EQ(in.Take({1, channel, 1, {}}, messages), BatchAnswer::kTaken);
  }
  for (int tick = 0; tick + 1 < kSilentTicks; ++tick) {
    EXPECT_FALSE(in.OnTick());
  }
  in.Hear();  // one that waits for room
  for (int tick = 0; tick + 1 < kSilentTicks; ++tick) {
    EXPECT_FALSE(in.OnTick());
  }
  EXPECT_TRUE(in.OnTick());
  EXPECT_FALSE(in.open());
  EXPECT_FALSE(in.OnTick()) << "that is said once";
  // Who speaks in it all the same, later, hears that it is over, and begins anew.
  EXPECT_EQ(in.Take({2, channel, 1, {"late"}}, messages), BatchAnswer::kUnknownChannel);
  EXPECT_TRUE(messages.empty());
  const uint64_t fresh = in.Open();
  EXPECT_NE(fresh, channel);
  EXPECT_EQ(in.Take({3, fresh, 1, {"said"}}, messages), BatchAnswer::kTaken);
  EXPECT_EQ(messages, std::vector<std::string>{"said"});
}

TEST(LinksTest, AChannelAfterAClosedOneHasItsWholeDeadline) {
  const LinkLimits limits;
  SendLink link = Opened(limits);
  link.Say("a", At(1000));
  link.OnFailed(Only<SendBatch>(link).request, "no answer", At(1001));
  link.Close();
  const MonotonicTime later = At(1000) + limits.deadline + limits.deadline;
  link.Connect(later);
  link.OnOpened(Only<OpenChannel>(link).request, 2, later);
  link.TakeChanges();
  link.Say("b", later);
  link.OnFailed(Only<SendBatch>(link).request, "no answer", later);
  EXPECT_TRUE(link.TakeChanges().empty());
  EXPECT_TRUE(link.reached());
}

TEST(LinksTest, AnAnswerThatNamesNoChannelIsAFailureLikeAnother) {
  SendLink link{LinkLimits{}};
  link.Connect(At(1000));
  link.OnOpened(Only<OpenChannel>(link).request, 0, At(1000));
  EXPECT_FALSE(link.reached());
  EXPECT_FALSE(link.problem().empty());
  ASSERT_TRUE(link.NextTime().has_value());
  link.OnTime(*link.NextTime());
  link.OnOpened(Only<OpenChannel>(link).request, 1, At(2000));
  EXPECT_TRUE(link.reached());
}

}  // namespace
}  // namespace holdfast
