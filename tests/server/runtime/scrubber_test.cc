// What the scrub takes for a hang, and what it says of the copies that it could not read. The
// test's clock goes on by kLook each time that the scrub looks at it, and not between.
#include "server/runtime/scrubber.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <future>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/units.h"
#include "tests/tiers/memory/memory_harness.h"
#include "tiers/transfer/transfer_control.h"

namespace holdfast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr Duration kLook = std::chrono::seconds(20);
constexpr Duration kStallAfter = std::chrono::minutes(1);
constexpr int kLooksOfAStall = kStallAfter / kLook;
constexpr uint64_t kRate = 16 * kMiB;
constexpr uint64_t kLarge = 64 * kGiB;  // that takes it an hour
constexpr int64_t kNowMs = 1'700'000'000'000;
constexpr int64_t kPeriodMs = 7 * 24 * 3600 * int64_t{1000};
constexpr int64_t kDueMs = kNowMs - kPeriodMs / 10 * 9;  // since then: due, not overdue

// Everything that the scrub's threads do, for the test's to wait for.
class Happened {
 public:
  void Note(const std::function<void()>& change) {
    MutexLock lock(mutex_);
    change();
    changed_.NotifyAll();
  }
  bool Await(const std::function<bool()>& condition) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    MutexLock lock(mutex_);
    while (!condition()) {
      if (!changed_.WaitUntil(mutex_, until)) {
        return condition();
      }
    }
    return true;
  }

 private:
  Mutex mutex_;
  CondVar changed_;
};

class ClockOfLooks : public Clock {
 public:
  explicit ClockOfLooks(Happened& happened) : happened_(happened) {}
  MonotonicTime Now() const override {
    MonotonicTime now;
    happened_.Note([&] { now = MonotonicTime{} + kLook * ++looks_; });
    return now;
  }
  int64_t UnixMillis() const override { return kNowMs; }
  bool AwaitLooks(int more) const {
    int until = 0;
    happened_.Note([&] { until = looks_ + more; });
    return happened_.Await([&] { return looks_ >= until; });
  }

 private:
  Happened& happened_;
  mutable int looks_ = 0;
};

ReadableShard Copy(TierKind tier, Rank rank, int64_t known_unix_ms = kDueMs) {
  ReadableShard shard;
  shard.copy.id.step = 100;
  shard.copy.id.rank = rank;
  shard.copy.job_name = "llama";
  shard.copy.image_bytes = kLarge;
  shard.tier = tier;
  shard.slot = rank;
  shard.location = "/there";
  shard.known_unix_ms = known_unix_ms;
  return shard;
}

class ScrubberTest : public ::testing::Test {
 protected:
  using Reads = std::function<absl::StatusOr<std::string>(
      const ReadableShard&, const std::function<bool(uint64_t)>& advance, Pacer& pacer)>;

  void SetUp() override {
    store_ = SlotStore::Open(StoreOptions(env_, "/shm/holdfast")).value();
    context_.node_name = "node-a";
    context_.gateway = &gateway_;
    context_.store = store_.get();
    context_.request_timeout = std::chrono::seconds(30);
    context_.verify_durable = [this](const ReadableShard& shard,
                                     const std::function<bool(uint64_t)>& advance,
                                     const std::shared_ptr<Pacer>& pacer) {
      happened_.Note([&] { ++begun_; });
      return reads_(shard, advance, *pacer);
    };
  }

  void Start(uint64_t bytes_per_s_max, std::vector<ReadableShard> copies) {
    copies_ = std::move(copies);
    config_.set_period_ms(kPeriodMs);
    config_.set_bandwidth_bytes_per_s_max(bytes_per_s_max);
    Scrubber::Options options;
    options.config = config_;
    options.state_path = "/shm/scrub";
    options.env = &env_;
    options.stall_after = kStallAfter;
    options.tell = [](const std::string&) {};
    options.clock = &clock_;
    scrubber_ = std::make_unique<Scrubber>(context_, std::move(options));
    scrubber_->Start();
  }

  void NoLimitAnyMore() {
    config_.set_bandwidth_bytes_per_s_max(0);
    scrubber_->Change(config_);
  }

  // Once it has stopped.
  v1::ScrubStatus Status() {
    scrubber_->Stop();
    v1::ScrubStatus status;
    scrubber_->Fill(status);
    return status;
  }

  // As the durable tiers do it: one thread reads, another one asks whether it is to go on.
  static absl::StatusOr<std::string> ReadPaced(uint64_t bytes,
                                               const std::function<bool(uint64_t)>& advance,
                                               Pacer& pacer) {
    TransferControl control;
    auto reading = std::async(std::launch::async, [&] {
      // What is granted at once is paid for by whoever comes next.
      return pacer.Acquire(bytes, &control) && pacer.Acquire(bytes, &control);
    });
    while (reading.wait_for(std::chrono::milliseconds(1)) != std::future_status::ready) {
      if (!advance(0)) {
        control.Cancel();
      }
    }
    return reading.get() ? absl::StatusOr<std::string>("") : absl::CancelledError("not any more");
  }

  // A call that returns when nobody asks any more.
  static absl::StatusOr<std::string> Hang(const std::function<bool(uint64_t)>& advance) {
    std::promise<void> never;
    const std::future<void> returns = never.get_future();
    while (advance(0)) {
      returns.wait_for(std::chrono::milliseconds(1));
    }
    return absl::CancelledError("not any more");
  }

  void Handle(const Event& event) {
    if (const auto* judged = std::get_if<DurableCopyJudged>(&event)) {
      happened_.Note([&] { judged_.push_back(judged->tier); });
    } else if (const auto* request = std::get_if<AdminRequest>(&event)) {
      AdminReply reply;
      reply.token = request->token;
      if (std::holds_alternative<ListCopies>(request->request)) {
        happened_.Note([&] { ++lists_; });
        reply.reply = ListedShards{copies_, "", {}};
      } else if (const auto* hold = std::get_if<HoldShard>(&request->request)) {
        happened_.Note([&] { holds_.push_back(hold->id.rank); });
        reply.status = absl::NotFoundError("it has made room");
      } else {
        reply.status = absl::InternalError("not asked here");
      }
      gateway_.Deliver(std::move(reply));
    }
  }

  Happened happened_;
  ClockOfLooks clock_{happened_};
  std::vector<ReadableShard> copies_;
  Reads reads_;
  int begun_ = 0;  // in durable tiers
  int lists_ = 0;
  std::vector<SlotId> holds_;  // asked for
  std::vector<TierKind> judged_;
  v1::ScrubConfig config_;
  FaultEnv env_{FaultEnv::Durability::kNone};
  std::unique_ptr<SlotStore> store_;
  AdminGateway gateway_{[this](const Event& event) { Handle(event); }};
  AdminContext context_;
  std::unique_ptr<Scrubber> scrubber_;
};

TEST_F(ScrubberTest, WaitingForItsOwnPacerIsNoHang) {
  reads_ = [](const ReadableShard&, const auto& advance, Pacer& pacer) {
    return ReadPaced(kLarge, advance, pacer);
  };
  Start(kRate, {Copy(TierKind::kRemote, 0)});
  ASSERT_TRUE(happened_.Await([&] { return begun_ == 1; }));
  ASSERT_TRUE(clock_.AwaitLooks(kLooksOfAStall + 3));
  NoLimitAnyMore();
  EXPECT_TRUE(happened_.Await([&] { return judged_.size() == 1; }));
  const v1::ScrubStatus status = Status();
  EXPECT_EQ(status.problem(), "");
  EXPECT_EQ(status.copies_read(), 1u);
}

// The slot before it is paid for by the one that follows, be it for minutes.
TEST_F(ScrubberTest, WaitingForWhatMemoryTookIsNoHang) {
  Start(kRate, {Copy(TierKind::kMemory, 1), Copy(TierKind::kMemory, 2)});
  ASSERT_TRUE(clock_.AwaitLooks(kLooksOfAStall + 9));
  NoLimitAnyMore();
  EXPECT_TRUE(happened_.Await([&] { return holds_.size() == 2; }));
  EXPECT_EQ(Status().problem(), "");
}

TEST_F(ScrubberTest, WhatHangsIsLeftWithItsTierAndTheOthersGoOn) {
  reads_ = [](const ReadableShard& shard, const auto& advance, Pacer&) {
    return shard.tier == TierKind::kRemote ? Hang(advance) : "";
  };
  Start(kRate, {Copy(TierKind::kRemote, 0, kDueMs - 2), Copy(TierKind::kRemote, 1, kDueMs - 1),
                Copy(TierKind::kNvme, 0)});
  EXPECT_TRUE(happened_.Await([&] { return !judged_.empty(); }));
  const v1::ScrubStatus status = Status();
  EXPECT_THAT(judged_, ElementsAre(TierKind::kNvme));
  EXPECT_EQ(begun_, 2);
  EXPECT_EQ(status.copies_read(), 1u);
  EXPECT_THAT(status.problem(), HasSubstr("step 100 rank 0 in remote gets nowhere"));
}

// There is a new list in between, and what can be read is read.
TEST_F(ScrubberTest, WhatCouldNotBeReadIsToldUntilItIs) {
  reads_ = [](const ReadableShard& shard, const auto&, Pacer&) -> absl::StatusOr<std::string> {
    return shard.copy.id.rank < 2 ? absl::PermissionDeniedError("open '/there': EACCES")
                                  : absl::StatusOr<std::string>("");
  };
  Start(0, {Copy(TierKind::kRemote, 0), Copy(TierKind::kRemote, 1), Copy(TierKind::kRemote, 2)});
  ASSERT_TRUE(happened_.Await([&] { return judged_.size() == 1; }));
  int lists = 0;
  happened_.Note([&] { lists = lists_; });
  ASSERT_TRUE(happened_.Await([&] {
    scrubber_->Change(config_);  // it looks whether it is to list anew
    return lists_ > lists;
  }));
  const v1::ScrubStatus status = Status();
  EXPECT_THAT(status.problem(), HasSubstr("EACCES"));
  EXPECT_THAT(status.problem(), HasSubstr("1 more could not be read"));
  scrubber_->NoteVerified(Copy(TierKind::kRemote, 0));
  scrubber_->NoteVerified(Copy(TierKind::kRemote, 1));
  EXPECT_EQ(Status().problem(), "");
}

TEST_F(ScrubberTest, WhatWasNotReadInTimeIsToldWithWhy) {
  reads_ = [](const ReadableShard& shard, const auto&, Pacer&) -> absl::StatusOr<std::string> {
    return shard.copy.id.rank == 0
               ? absl::StatusOr<std::string>(absl::PermissionDeniedError("open '/there': EACCES"))
               : "";
  };
  Start(0, {Copy(TierKind::kRemote, 0, kNowMs - 2 * kPeriodMs), Copy(TierKind::kRemote, 1)});
  EXPECT_TRUE(happened_.Await([&] { return judged_.size() == 1; }));
  const v1::ScrubStatus status = Status();
  EXPECT_THAT(status.problem(), HasSubstr("1 copy was not read again within"));
  EXPECT_THAT(status.problem(), HasSubstr("EACCES"));
}

}  // namespace
}  // namespace holdfast
