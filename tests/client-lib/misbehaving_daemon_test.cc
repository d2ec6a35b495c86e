// A daemon that dies, hangs or sends nonsense costs the training process one failed, reported save,
// never more: no crash, no hang, no leaked descriptor, and everything works again with the next
// daemon.
#include <dirent.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "client-lib/src/connection.h"
#include "tests/client-lib/fake_daemon.h"

namespace holdfast {
namespace {

const Milliseconds kLong(60'000);

int OpenDescriptors() {
  int count = 0;
  DIR* directory = ::opendir("/proc/self/fd");
  while (::readdir(directory) != nullptr) {
    ++count;
  }
  ::closedir(directory);
  return count;
}

class MisbehavingDaemon : public testing::Test {
 protected:
  MisbehavingDaemon()
      : w_(3 << 20, 1),
        state_{{{"w", Type::kU8, {w_.size()}, w_.data()}}, {{"o", "1", true, ""}}} {}

  void Open(Milliseconds call_deadline = Milliseconds(20'000)) {
    JobOptions options = daemon_.Options();
    options.call_deadline = call_deadline;
    Result<std::unique_ptr<Job>> job = Job::Open(options);
    ASSERT_TRUE(job.ok()) << job.status().ToString();
    job_ = *std::move(job);
  }
  // The first request of that name is answered by `answer`.
  void Once(const std::string& request,
            std::function<void(const v1::ClientFrame&, FakeDaemon::Peer&)> answer) {
    daemon_.SetHook([request, answer, done = false](const v1::ClientFrame& frame,
                                                    FakeDaemon::Peer& peer) mutable {
      if (done || RequestName(frame) != request) {
        return false;
      }
      done = true;
      answer(frame, peer);
      return true;
    });
  }
  Status Save() { return job_->Save(++step_, state_); }

  FakeDaemon daemon_;
  std::unique_ptr<Job> job_;
  std::vector<uint8_t> w_;
  State state_;
  uint64_t step_ = 0;
};

TEST_F(MisbehavingDaemon, ClosingAtAnyPointCostsOneSave) {
  Open();
  for (const std::string at : {"begin_save", "seal"}) {
    ASSERT_TRUE(Save().ok());
    const int joins = daemon_.Count("join");
    Once(at, [](const v1::ClientFrame&, FakeDaemon::Peer& peer) { peer.Close(); });
    EXPECT_EQ(Save().code(), Code::kUnavailable) << at;
    EXPECT_EQ(daemon_.Count("join"), joins);
    const Status next = Save();  // reconnects
    EXPECT_TRUE(next.ok()) << next.ToString();
    EXPECT_EQ(daemon_.Count("join"), joins + 1);
    EXPECT_EQ(daemon_.Frames("join").back().join().attempt(), 1u);  // takes its place again
  }
  EXPECT_EQ(job_->failed_saves(), 2u);
}

TEST_F(MisbehavingDaemon, ASlotThatWasBeingWrittenIsReleasedAfterReconnecting) {
  Open();
  ASSERT_TRUE(Save().ok());
  Once("seal", [](const v1::ClientFrame&, FakeDaemon::Peer& peer) { peer.Close(); });
  EXPECT_EQ(Save().code(), Code::kUnavailable);
  const uint32_t slot = daemon_.Frames("seal").back().seal().slot();
  ASSERT_TRUE(Save().ok());
  ASSERT_EQ(daemon_.Count("release_slots"), 1);
  ASSERT_EQ(daemon_.Frames("release_slots")[0].release_slots().slots_size(), 1);
  EXPECT_EQ(daemon_.Frames("release_slots")[0].release_slots().slots(0), slot);
}

TEST_F(MisbehavingDaemon, NoDaemonAtAllFailsAtOnceAndComesBack) {
  Open();
  ASSERT_TRUE(Save().ok());
  daemon_.Stop();
  for (int i = 0; i < 3; ++i) {
    const Status status = Save();
    EXPECT_EQ(status.code(), Code::kUnavailable);
    EXPECT_NE(status.message().find(daemon_.socket()), std::string::npos) << status.message();
  }
  daemon_.Start();
  EXPECT_TRUE(Save().ok());
}

// Nobody waits on the socket between two saves, so nobody is told: the save looks before it sends.
TEST_F(MisbehavingDaemon, ARestartBetweenTwoSavesCostsNone) {
  Open();
  ASSERT_TRUE(Save().ok());
  for (int restarts = 1; restarts <= 3; ++restarts) {
    const int begun = daemon_.Count("begin_save");
    daemon_.Stop();
    daemon_.Start();
    const Status status =
        restarts == 2 ? job_->SaveAsync(++step_, state_)->Wait(Stage::kSealed, kLong) : Save();
    EXPECT_TRUE(status.ok()) << status.ToString();
    EXPECT_EQ(daemon_.Count("begin_save"), begun + 1);  // never sent twice
    EXPECT_EQ(daemon_.Count("join"), 1 + restarts);
    EXPECT_EQ(daemon_.Frames("join").back().join().attempt(), 1u);
  }
  EXPECT_EQ(job_->failed_saves(), 0u);
}

// It might have begun: only the caller can say whether that step is still wanted.
TEST_F(MisbehavingDaemon, ASaveThatMayHaveBegunIsNotSentAgain) {
  Open();
  ASSERT_TRUE(Save().ok());
  const int begun = daemon_.Count("begin_save");
  Once("begin_save", [](const v1::ClientFrame&, FakeDaemon::Peer& peer) { peer.Close(); });
  EXPECT_EQ(Save().code(), Code::kUnavailable);
  EXPECT_EQ(daemon_.Count("begin_save"), begun + 1);
}

// Whenever the answer comes, before the deadline, at it or after: the slot that it brought is
// either mapped or given back, as the daemon will not send its descriptor again.
TEST_F(MisbehavingDaemon, AReserveAtItsDeadlineLosesNoSlot) {
  Open();
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(Save().ok());  // all slots are there, and this process is the daemon, too
  }
  job_.reset();
  daemon_.Stop();  // which closes its connections' ends
  const int descriptors = OpenDescriptors();
  daemon_.Start();
  constexpr int kRounds = 120;
  for (int round = 0; round < kRounds; ++round) {
    Open();
    const auto wait = std::chrono::milliseconds(4);
    // The answer is sent at about the deadline: a little later in every round.
    daemon_.SetHook([&](const v1::ClientFrame& frame, FakeDaemon::Peer&) {
      if (frame.has_reserve()) {
        const auto until = std::chrono::steady_clock::now() + wait +
                           std::chrono::microseconds((round - kRounds / 2) * 10);
        while (std::chrono::steady_clock::now() < until) {
        }
      }
      return false;
    });
    const Result<ReserveReport> report = job_->Reserve(state_, wait);
    EXPECT_TRUE(report.ok() || report.status().code() == Code::kDeadlineExceeded ||
                report.status().code() == Code::kUnavailable)
        << report.status().ToString();
    daemon_.SetHook(nullptr);
    for (int i = 0; i < 3; ++i) {
      const client::Deadline later = client::Deadline::In(kLong);
      Status status = Save();
      // (The answer may be later than a save waits for it.)
      while (!status.ok() && status.message().find("hangs") != std::string::npos &&
             !later.passed()) {
        status = Save();
      }
      EXPECT_TRUE(status.ok()) << round << ": " << status.ToString();
    }
    job_.reset();
  }
  daemon_.Stop();
  EXPECT_EQ(OpenDescriptors(), descriptors);
}

TEST_F(MisbehavingDaemon, AReserveThatIsAnsweredTooLateGivesTheSlotBack) {
  Open();
  std::mutex mutex;
  std::optional<std::pair<v1::ClientFrame, FakeDaemon::Peer>> kept;
  daemon_.SetHook([&](const v1::ClientFrame& frame, FakeDaemon::Peer& peer) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (!frame.has_reserve() || kept.has_value()) {
      return false;
    }
    kept.emplace(frame, peer);
    return true;
  });
  EXPECT_EQ(job_->Reserve(state_, Milliseconds(20)).status().code(), Code::kDeadlineExceeded);
  ASSERT_TRUE(daemon_.WaitForCount("reserve", 1));
  const int descriptors = OpenDescriptors();
  {
    // (It is counted a moment before it is kept.)
    const client::Deadline soon = client::Deadline::In(kLong);
    std::unique_lock<std::mutex> lock(mutex);
    while (!kept.has_value() && !soon.passed()) {
      lock.unlock();
      std::this_thread::yield();
      lock.lock();
    }
    ASSERT_TRUE(kept.has_value());
    daemon_.AnswerLate(kept->first, kept->second);
  }
  for (int i = 0; i < 3; ++i) {
    const Status status = Save();
    EXPECT_TRUE(status.ok()) << status.ToString();
  }
  ASSERT_EQ(daemon_.Count("release_slots"), 1);
  EXPECT_EQ(daemon_.Frames("release_slots")[0].release_slots().slots_size(), 1);
  daemon_.SetHook(nullptr);
  EXPECT_LE(OpenDescriptors(), descriptors + 3);  // this process is the daemon, too: its slots
}

TEST_F(MisbehavingDaemon, AWaitForACommitSurvivesARestart) {
  Open();
  std::atomic<bool> closed{false};
  daemon_.SetHook([&](const v1::ClientFrame& frame, FakeDaemon::Peer& peer) {
    if (frame.has_await_save() && !closed.exchange(true)) {
      peer.Close();
      return true;
    }
    return false;
  });
  auto handle = job_->SaveAsync(++step_, state_);
  EXPECT_TRUE(handle->Wait(Stage::kCommitted, kLong).ok());
  EXPECT_TRUE(closed.load());
}

TEST_F(MisbehavingDaemon, ThatAStepHasNotComeThatFarIsToldWithItsReason) {
  Open();
  daemon_.SetHook([](const v1::ClientFrame& frame, FakeDaemon::Peer& peer) {
    if (!frame.has_await_save()) {
      return false;
    }
    v1::DaemonFrame reply;
    reply.set_id(frame.id());
    reply.mutable_failure()->set_code(4);
    reply.mutable_failure()->set_reason(v1::Failure::REASON_NOT_YET);
    reply.mutable_failure()->set_message("because");
    peer.Send(reply);
    return true;
  });
  auto handle = job_->SaveAsync(++step_, state_);
  ASSERT_TRUE(handle->Wait(Stage::kSealed, kLong).ok());
  const Status status = handle->Wait(Stage::kCommitted, kLong);
  EXPECT_EQ(status.code(), Code::kDeadlineExceeded);
  EXPECT_EQ(status.reason(), Reason::kNotYet);
  EXPECT_NE(status.message().find("because"), std::string::npos);
}

std::string Framed(const std::string& message) {
  std::string frame(4, '\0');
  for (size_t i = 0; i < 4; ++i) {
    frame[i] = static_cast<char>(message.size() >> (8 * i));
  }
  return frame + message;
}

TEST_F(MisbehavingDaemon, NonsenseOnTheSocketCostsOneSaveEach) {
  Open();
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(Save().ok());  // all slots are there, and this process is the daemon, too
  }
  const int descriptors = OpenDescriptors();
  v1::DaemonFrame stranger;
  stranger.set_id(999'999);
  stranger.mutable_seal()->set_sealed_unix_ms(1);
  const auto with_id = [](const v1::ClientFrame& frame,
                          const std::function<void(v1::DaemonFrame&)>& fill) {
    v1::DaemonFrame reply;
    reply.set_id(frame.id());
    fill(reply);
    return reply;
  };
  const std::vector<std::function<void(const v1::ClientFrame&, FakeDaemon::Peer&)>> nonsense = {
      [](const auto&, auto& peer) {
        peer.SendRaw(std::string("\xff\xff\xff\xff", 4) + std::string(100, 'x'));
      },  // 4 GiB
      [](const auto&, auto& peer) {
        peer.SendRaw(std::string("\x01\x00\x01\x00", 4));
      },                                                                    // one byte over
      [](const auto&, auto& peer) { peer.SendRaw(std::string(4, '\0')); },  // nothing
      [](const auto&, auto& peer) { peer.SendRaw(Framed(std::string(1000, '\xff'))); },
      [](const auto&, auto& peer) { peer.SendRaw(Framed(std::string(65'536, '\0'))); },
      [&](const auto&, auto& peer) { peer.Send(stranger); },
      [&](const auto& frame, auto& peer) {
        peer.Send(with_id(frame, [](auto& r) { r.mutable_seal(); }));
      },                                    // the wrong kind
      [&](const auto& frame, auto& peer) {  // its descriptor is missing
        peer.Send(
            with_id(frame, [](auto& r) { r.mutable_begin_save()->set_with_descriptor(true); }));
      },
      [&](const auto& frame, auto& peer) {  // a descriptor that nobody announced
        peer.Send(with_id(frame, [](auto& r) { r.mutable_failure()->set_code(8); }), {0});
      },
      [&](const auto& frame, auto& peer) {  // many
        peer.Send(
            with_id(frame, [](auto& r) { r.mutable_begin_save()->set_with_descriptor(true); }),
            std::vector<int>(200, 0));
      },
      [&](const auto& frame, auto& peer) {  // answered twice
        const auto reply = with_id(frame, [](auto& r) { r.mutable_failure()->set_code(8); });
        peer.Send(reply);
        peer.Send(reply);
        peer.Close();
      },
  };
  for (size_t i = 0; i < nonsense.size(); ++i) {
    Once("begin_save", nonsense[i]);
    const Status status = Save();
    EXPECT_FALSE(status.ok()) << i;
    daemon_.SetHook(nullptr);
    for (int tries = 0; tries < 2 && !Save().ok();
         ++tries) {  // the last kind breaks the connection only when it is read next
    }
    const Status next = Save();
    EXPECT_TRUE(next.ok()) << i << ": " << next.ToString();
  }
  EXPECT_EQ(OpenDescriptors(), descriptors);
}

TEST_F(MisbehavingDaemon, SlotsThatAreNotWhatTheyShouldBe) {
  Open();
  ASSERT_TRUE(Save().ok());
  UniqueFd small(::memfd_create("small", 0));
  const auto grant = [](const v1::ClientFrame& frame, uint64_t slot_bytes, bool with_descriptor) {
    v1::DaemonFrame reply;
    reply.set_id(frame.id());
    v1::Grant* made = reply.mutable_begin_save();
    made->set_slot(77);
    made->set_generation(1);
    made->set_slot_bytes(slot_bytes);
    made->set_with_descriptor(with_descriptor);
    made->set_attempt(1);
    made->set_job_uuid("0123456789abcdef");
    return reply;
  };
  // 1. Too small by its own word. 2. A file that is shorter than it says. 3. No file. 4. No
  // descriptor and no mapping from before.
  // 5. A length that no address space has.
  UniqueFd pipe_ends[2];
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  pipe_ends[0] = UniqueFd(ends[0]);
  pipe_ends[1] = UniqueFd(ends[1]);
  const std::vector<std::function<void(const v1::ClientFrame&, FakeDaemon::Peer&)>> bad = {
      [&](const auto& frame, auto& peer) { peer.Send(grant(frame, 4096, true), {small.get()}); },
      [&](const auto& frame, auto& peer) {
        peer.Send(grant(frame, 64 << 20, true), {small.get()});
      },
      [&](const auto& frame, auto& peer) { peer.Send(grant(frame, 64 << 20, true), {ends[0]}); },
      [&](const auto& frame, auto& peer) { peer.Send(grant(frame, 64 << 20, false)); },
      [&](const auto& frame, auto& peer) {
        peer.Send(grant(frame, UINT64_MAX, true), {small.get()});
      },
  };
  for (size_t i = 0; i < bad.size(); ++i) {
    Once("begin_save", bad[i]);
    const int aborts = daemon_.Count("abort_save");
    const Status status = Save();
    EXPECT_TRUE(status.code() == Code::kInternal || status.code() == Code::kCorrupt)
        << i << ": " << status.ToString();
    EXPECT_EQ(daemon_.Count("abort_save"), aborts + 1) << i;
    EXPECT_FALSE(daemon_.Frames("abort_save").back().abort_save().why().empty());
    EXPECT_TRUE(Save().ok()) << i;
  }
}

TEST_F(MisbehavingDaemon, ASlotTruncatedUnderTheCopyFailsThatSaveOnly) {
  Open();
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(Save().ok());  // all three slots are mapped
  }
  daemon_.TruncateAll(8192);
  const Status status = Save();
  EXPECT_EQ(status.code(), Code::kCorrupt) << status.ToString();
  EXPECT_NE(status.message().find("cut short"), std::string::npos);
  EXPECT_EQ(daemon_.Count("abort_save"), 1);
  EXPECT_EQ(daemon_.Count("release_slots"), 1);
}

TEST_F(MisbehavingDaemon, SilenceEndsAtTheDeadlineAndIsNotWaitedForTwice) {
  Open(Milliseconds(50));
  daemon_.SetHook(
      [](const v1::ClientFrame& frame, FakeDaemon::Peer&) { return frame.has_begin_save(); });
  EXPECT_EQ(Save().code(), Code::kUnavailable);
  const Status second = Save();
  EXPECT_EQ(second.code(), Code::kUnavailable);
  EXPECT_NE(second.message().find("hangs"), std::string::npos) << second.message();
  ASSERT_TRUE(daemon_.WaitForCount("begin_save", 1));
  EXPECT_EQ(daemon_.Count("begin_save"), 1);  // not asked again while the first answer is overdue
}

TEST_F(MisbehavingDaemon, TheSameDaemonIsUsedAgainOnceItsLateAnswerHasCome) {
  const Result<std::shared_ptr<client::Connection>> dialled =
      client::Connection::Dial(daemon_.socket(), client::Deadline::In(kLong));
  ASSERT_TRUE(dialled.ok());
  client::Connection& connection = **dialled;
  const auto later = client::Deadline::In(kLong);
  // The answers to both come when the second is asked: the first one's too late for whoever asked.
  std::optional<v1::ClientFrame> first;
  daemon_.SetHook([&](const v1::ClientFrame& frame, FakeDaemon::Peer& peer) {
    if (frame.has_begin_save()) {
      first = frame;
      return true;
    }
    if (frame.has_leave()) {
      v1::DaemonFrame late;
      late.set_id(first->id());
      late.mutable_begin_save()->set_slot(9);
      late.mutable_begin_save()->set_generation(4);
      peer.Send(late);
    }
    return false;
  });
  const Result<uint64_t> begin = connection.Send(client::wire::BeginSave{.step = 12}, later);
  const Result<uint64_t> leave = connection.Send(client::wire::Leave{}, later);
  ASSERT_TRUE(begin.ok() && leave.ok());
  EXPECT_EQ(connection.Receive<client::wire::Grant>(*begin, client::Deadline::In(Milliseconds(0)))
                .status()
                .code(),
            Code::kDeadlineExceeded);
  ASSERT_TRUE(connection.Receive<client::wire::Done>(*leave, later).ok());
  ASSERT_TRUE(connection.Call<client::wire::Done>(client::wire::ConfirmRead{1, 1}, later).ok());
  ASSERT_EQ(daemon_.Count("abort_save"), 1);
  const v1::AbortSave abort = daemon_.Frames("abort_save")[0].abort_save();
  EXPECT_EQ(abort.step(), 12u);
  EXPECT_EQ(abort.slot(), 9u);
  EXPECT_EQ(abort.generation(), 4u);
}

TEST_F(MisbehavingDaemon, AnswersInAnyOrderReachThoseWhoAsked) {
  const Result<std::shared_ptr<client::Connection>> dialled =
      client::Connection::Dial(daemon_.socket(), client::Deadline::In(kLong));
  ASSERT_TRUE(dialled.ok());
  // Answers are kept until eight have come, and sent in the opposite order.
  std::vector<v1::DaemonFrame> kept;
  daemon_.SetHook([&](const v1::ClientFrame& frame, FakeDaemon::Peer& peer) {
    if (!frame.has_await_save()) {
      return false;
    }
    v1::DaemonFrame reply;
    reply.set_id(frame.id());
    reply.mutable_await_save()->set_unix_ms(static_cast<int64_t>(frame.await_save().step()));
    kept.push_back(reply);
    if (kept.size() == 8) {
      for (auto it = kept.rbegin(); it != kept.rend(); ++it) {
        peer.Send(*it);
      }
      kept.clear();
    }
    return true;
  });
  for (int round = 0; round < 50; ++round) {
    std::vector<std::thread> threads;
    for (uint64_t i = 0; i < 8; ++i) {
      threads.emplace_back([&, i] {
        const auto answer = (*dialled)->Call<client::wire::SaveProgress>(
            client::wire::AwaitSave{.step = i}, client::Deadline::In(kLong));
        EXPECT_TRUE(answer.ok() && answer->message.unix_ms == static_cast<int64_t>(i));
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
  }
  daemon_.Stop();  // the hook uses `kept`
}

TEST_F(MisbehavingDaemon, AVersionThatDoesNotFitIsRefused) {
  Once("hello", [](const v1::ClientFrame& frame, FakeDaemon::Peer& peer) {
    v1::DaemonFrame reply;
    reply.set_id(frame.id());
    reply.mutable_hello()->set_protocol(2);
    reply.mutable_hello()->set_daemon_version("9.9");
    peer.Send(reply);
  });
  const Status status = Job::Open(daemon_.Options()).status();
  EXPECT_EQ(status.code(), Code::kRefused);
  EXPECT_NE(status.message().find("9.9"), std::string::npos);
}

TEST_F(MisbehavingDaemon, ReasonsBecomeCodes) {
  Open();
  struct Row {
    v1::Failure::Reason reason;
    Code code;
    Reason told = Reason::kNone;
  };
  const std::vector<Row> rows = {
      {v1::Failure::REASON_SUPERSEDED, Code::kSuperseded},
      {v1::Failure::REASON_SHED, Code::kShed},
      {v1::Failure::REASON_ABANDONED, Code::kAbandoned},
      {v1::Failure::REASON_NO_ROOM, Code::kNoRoom},
      {v1::Failure::REASON_TOO_LARGE, Code::kNoRoom, Reason::kTooLarge},
      {v1::Failure::REASON_NOT_RESTORED, Code::kRefused, Reason::kNotRestored},
      {v1::Failure::REASON_OTHER_OWNER, Code::kRefused, Reason::kOtherOwner},
      {v1::Failure::REASON_RANK_TAKEN, Code::kRefused},
      {v1::Failure::REASON_TOPOLOGY, Code::kTopology},
      {v1::Failure::REASON_UNREADABLE, Code::kUnreadable},
      {v1::Failure::REASON_UNSPECIFIED, Code::kRefused}};
  for (const auto& [reason, code, told] : rows) {
    Once("begin_save", [reason = reason](const v1::ClientFrame& frame, FakeDaemon::Peer& peer) {
      v1::DaemonFrame reply;
      reply.set_id(frame.id());
      reply.mutable_failure()->set_code(9);
      reply.mutable_failure()->set_reason(reason);
      reply.mutable_failure()->set_message("because");
      peer.Send(reply);
    });
    const Status status = Save();
    EXPECT_EQ(status.code(), code);
    EXPECT_EQ(status.reason(), told);
    EXPECT_NE(status.message().find("because"), std::string::npos);
  }
  EXPECT_EQ(daemon_.Count("join"), 1);  // none of these breaks the connection
  Once("begin_save", [](const v1::ClientFrame& frame, FakeDaemon::Peer& peer) {
    v1::DaemonFrame reply;
    reply.set_id(frame.id());
    reply.mutable_failure()->set_code(9);
    reply.mutable_failure()->set_reason(v1::Failure::REASON_UNKNOWN_SESSION);
    peer.Send(reply);
  });
  EXPECT_EQ(Save().code(), Code::kUnavailable);
  EXPECT_TRUE(Save().ok());
  EXPECT_EQ(daemon_.Count("join"), 2);  // but this one means: join again
}

}  // namespace
}  // namespace holdfast
