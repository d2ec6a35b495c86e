// A daemon that says nothing costs the training loop a second once, whatever it calls from then on
// and from whichever thread; and whatever keeps a caller for a second says so.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "client-lib/src/connection.h"
#include "client-lib/src/daemon_process.h"
#include "client-lib/src/read_ticket.h"
#include "client-lib/src/socket.h"
#include "client-lib/src/wait_notice.h"
#include "holdfast/view.h"
#include "tests/client-lib/fake_daemon.h"

namespace holdfast {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;
using ::testing::Not;

const Milliseconds kLong(60'000);
// Of one exchange; and what a loop may lose at most to a daemon that hangs, on a slow machine.
const Milliseconds kExchange(120'000);
const Milliseconds kLittle(30'000);

class Lines {
 public:
  void Add(const std::string& line) {
    const MutexLock lock(mutex_);
    lines_.push_back(line);
    changed_.NotifyAll();
  }
  // The first one with that in it. "": none has come.
  std::string First(const std::string& words = "") {
    const client::Deadline deadline = client::Deadline::In(kLong);
    const MutexLock lock(mutex_);
    while (true) {
      for (const std::string& line : lines_) {
        if (line.find(words) != std::string::npos) {
          return line;
        }
      }
      if (!changed_.WaitUntil(mutex_, deadline.NextLook())) {
        return "";
      }
    }
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  std::vector<std::string> lines_ GUARDED_BY(mutex_);
};

class HangingDaemon : public testing::Test {
 protected:
  HangingDaemon() : w_(3 << 20, 1), state_{{{"w", Type::kU8, {w_.size()}, w_.data()}}, {}} {}
  void TearDown() override {
    GoOn();
    job_.reset();
    daemon_.Stop();
    successor_.reset();
  }

  JobOptions Options() {
    JobOptions options = daemon_.Options();
    options.call_deadline = kExchange;
    options.warn = [lines = lines_](const std::string& line) { lines->Add(line); };
    return options;
  }
  void Open() { Open(Options()); }
  void Open(const JobOptions& options) {
    Result<std::unique_ptr<Job>> job = Job::Open(options);
    ASSERT_TRUE(job.ok()) << job.status().ToString();
    job_ = *std::move(job);
    ASSERT_TRUE(Save().ok());
  }
  // The daemon stands still in the middle of the next request, until it goes on with that.
  void Hang() {
    go_on_ = std::make_shared<std::promise<void>>();
    daemon_.SetHook(
        [goes_on = go_on_->get_future().share()](const v1::ClientFrame&, FakeDaemon::Peer&) {
          goes_on.wait();
          return false;
        });
  }
  void GoOn() {
    if (go_on_ != nullptr) {
      go_on_->set_value();
      go_on_ = nullptr;
    }
  }
  // While the daemon hangs.
  void StartSuccessor(FakeDaemon::Listens listens) {
    successor_ = std::make_unique<FakeDaemon>(listens);
    successor_->TakePathOf(daemon_);
  }
  void ExpectOneJoinAtTheSuccessor() {
    EXPECT_EQ(successor_->Count("hello"), 1);
    const std::vector<v1::ClientFrame> joins = successor_->Frames("join");
    ASSERT_EQ(joins.size(), 1u);
    EXPECT_EQ(joins[0].join().attempt(), 1u);
  }
  Status Save(const SaveOptions& options = {}) { return job_->Save(++step_, state_, options); }
  // Whether one of the next saves goes through.
  bool SavesAgain() {
    const client::Deadline deadline = client::Deadline::In(kLong);
    while (!deadline.passed()) {
      if (Save().ok()) {
        return true;
      }
    }
    return false;
  }
  void ExpectSkipped(int saves) {
    const client::Deadline soon = client::Deadline::In(kLittle);
    for (int i = 0; i < saves; ++i) {
      const Status status = Save();
      EXPECT_EQ(status.code(), Code::kUnavailable) << status.ToString();
    }
    EXPECT_FALSE(soon.passed()) << "an exchange's deadline was waited for";
  }

  FakeDaemon daemon_;
  std::unique_ptr<FakeDaemon> successor_;
  std::shared_ptr<Lines> lines_ = std::make_shared<Lines>();
  std::shared_ptr<std::promise<void>> go_on_;
  std::unique_ptr<Job> job_;
  std::vector<uint8_t> w_;
  State state_;
  uint64_t step_ = 0;
};

TEST_F(HangingDaemon, IsWaitedForOnceAndNotBySavesThatFollow) {
  Open();
  Hang();
  ExpectSkipped(50);  // a second each would be too much
  EXPECT_THAT(job_->last_failure().message(), HasSubstr("ckptd hangs"));
  EXPECT_EQ(job_->failed_saves(), 50u);
  EXPECT_TRUE(daemon_.WaitForCount("begin_save", 2));
  EXPECT_EQ(daemon_.Count("begin_save"), 2);  // asked once, by the first
  GoOn();
  EXPECT_TRUE(SavesAgain());
  EXPECT_EQ(daemon_.Count("join"), 1);  // over the same connection
}

TEST_F(HangingDaemon, ThatHangsBehindTheCopyIsWaitedForOnce) {
  Open();
  go_on_ = std::make_shared<std::promise<void>>();
  daemon_.SetHook(
      [goes_on = go_on_->get_future().share()](const v1::ClientFrame& frame, FakeDaemon::Peer&) {
        if (frame.has_seal()) {
          goes_on.wait();
        }
        return false;
      });
  ExpectSkipped(50);
  GoOn();
  EXPECT_TRUE(SavesAgain());
}

// It takes connections, as the kernel does that, and not a hello.
TEST_F(HangingDaemon, ThatWasRestartedIsWaitedForOnce) {
  Open();
  daemon_.Stop();
  Hang();
  daemon_.Start();
  ExpectSkipped(50);
  GoOn();
  EXPECT_TRUE(SavesAgain());
  EXPECT_EQ(daemon_.Count("hello"), 2);  // what was asked for is taken up when it is answered
  EXPECT_EQ(daemon_.Count("join"), 2);
}

// ---- A ckptd that was killed and hangs: its connections stay open, and another one serves ----

TEST_F(HangingDaemon, IsLeftForAnotherProcessThatServesInItsPlace) {
  Open();
  Hang();
  ExpectSkipped(3);
  StartSuccessor(FakeDaemon::Listens::kAnother);
  EXPECT_TRUE(SavesAgain());
  ExpectOneJoinAtTheSuccessor();
}

TEST_F(HangingDaemon, IsLeftThoughItsHelloIsStillAskedFor) {
  Open();
  daemon_.Stop();
  Hang();
  daemon_.Start();
  ExpectSkipped(3);
  StartSuccessor(FakeDaemon::Listens::kAnother);
  EXPECT_TRUE(SavesAgain());
  ExpectOneJoinAtTheSuccessor();
}

TEST_F(HangingDaemon, IsLeftByTheOneWhoWaitsForIt) {
  Open();
  const std::unique_ptr<SaveHandle> handle = job_->SaveAsync(++step_, state_);
  ASSERT_TRUE(handle->Wait(Stage::kSealed, kLong).ok());
  Hang();
  StartSuccessor(FakeDaemon::Listens::kAnother);
  EXPECT_EQ(handle->Wait(Stage::kCommitted, kExchange).ToString(), Status().ToString());
  ExpectOneJoinAtTheSuccessor();
}

TEST_F(HangingDaemon, IsKeptWhileTheSameProcessServes) {
  Open();
  Hang();
  ExpectSkipped(3);
  StartSuccessor(FakeDaemon::Listens::kThisProcess);
  const client::Deadline deadline = client::Deadline::In(kLong);
  while (successor_->Accepted() == 0 && !deadline.passed()) {
    ExpectSkipped(1);
  }
  ExpectSkipped(3);
  GoOn();
  EXPECT_TRUE(SavesAgain());
  EXPECT_EQ(daemon_.Count("join"), 1);  // no second seat
  EXPECT_EQ(successor_->Accepted(), 1);
  EXPECT_EQ(successor_->Count("hello"), 0);
}

TEST_F(HangingDaemon, IsNotAskedWhetherAStepIsTheLastOne) {
  Open();
  Hang();
  ExpectSkipped(1);
  const client::Deadline soon = client::Deadline::In(kLittle);
  for (uint64_t step = 1; step <= 50; ++step) {
    EXPECT_FALSE(job_->Preempted(step));
  }
  EXPECT_FALSE(soon.passed());
}

// One that answers other requests works on this one: making a large slot takes its time.
TEST_F(HangingDaemon, IsNoneThatAnswersAnythingElse) {
  struct Kept {
    std::mutex mutex;
    std::optional<std::pair<v1::ClientFrame, FakeDaemon::Peer>> begin;
  };
  JobOptions options = Options();
  options.silence_deadline = seconds(2);
  Open(options);
  const auto kept = std::make_shared<Kept>();
  daemon_.SetHook([kept](const v1::ClientFrame& frame, FakeDaemon::Peer& peer) {
    const std::lock_guard<std::mutex> lock(kept->mutex);
    if (!frame.has_begin_save() || kept->begin) {
      return false;
    }
    kept->begin.emplace(frame, peer);
    return true;
  });
  std::future<Status> saved = std::async(std::launch::async, [this] { return Save(); });
  // It is asked a second after it was heard last: by the fourth question more than two have passed.
  EXPECT_TRUE(daemon_.WaitForCount("ask", 4));
  EXPECT_EQ(saved.wait_for(seconds(0)), std::future_status::timeout);
  {
    const std::lock_guard<std::mutex> lock(kept->mutex);
    ASSERT_TRUE(kept->begin.has_value());
    daemon_.AnswerLate(kept->begin->first, kept->begin->second);
  }
  EXPECT_EQ(saved.get().ToString(), Status().ToString());
}

TEST_F(HangingDaemon, IsWaitedForBySavesThatWaitForASlot) {
  Open();
  Hang();
  std::future<Status> saved =
      std::async(std::launch::async, [this] { return Save({.wait_for_room = kLong}); });
  const std::string line = lines_->First();
  EXPECT_THAT(line, HasSubstr("job 'test': the save of step 2 has waited for"));
  EXPECT_THAT(line, HasSubstr("ckptd hangs"));
  EXPECT_THAT(line, HasSubstr(daemon_.socket()));
  EXPECT_EQ(saved.wait_for(seconds(0)), std::future_status::timeout);
  GoOn();
  EXPECT_EQ(saved.get().ToString(), Status().ToString());
}

TEST_F(HangingDaemon, IsWaitedForAlsoWhileAnEarlierRequestIsUnanswered) {
  Open();
  Hang();
  ExpectSkipped(1);
  std::future<Status> saved =
      std::async(std::launch::async, [this] { return Save({.wait_for_room = kLong}); });
  EXPECT_THAT(lines_->First("the save of step 3 has waited for"), HasSubstr("ckptd hangs"));
  EXPECT_EQ(saved.wait_for(seconds(0)), std::future_status::timeout);
  GoOn();
  EXPECT_EQ(saved.get().ToString(), Status().ToString());
}

TEST_F(HangingDaemon, IsWaitedForNoLongerThanTheCallerSaid) {
  Open();
  Hang();
  const client::Deadline soon = client::Deadline::In(kLittle);
  for (int i = 0; i < 2; ++i) {
    const Status saved = Save({.wait_for_room = Milliseconds(1500)});
    EXPECT_EQ(saved.code(), Code::kUnavailable) << saved.ToString();
    EXPECT_THAT(saved.message(), HasSubstr("ckptd hangs: process " + std::to_string(::getpid())));
  }
  EXPECT_FALSE(soon.passed()) << "an exchange's deadline was waited for";
  ExpectSkipped(10);
}

TEST_F(HangingDaemon, IsNamedToAReservationThatFindsAnEarlierRequestUnanswered) {
  Open();
  Hang();
  ExpectSkipped(1);
  const Status reserved = job_->Reserve(state_, Milliseconds(300)).status();
  EXPECT_EQ(reserved.code(), Code::kUnavailable) << reserved.ToString();
  EXPECT_THAT(reserved.message(), HasSubstr("process " + std::to_string(::getpid())));
}

TEST_F(HangingDaemon, ThatIsAwayIsWaitedForBySavesThatWait) {
  Open();
  daemon_.Stop();
  std::future<Status> saved =
      std::async(std::launch::async, [this] { return Save({.wait_for_room = kLong}); });
  EXPECT_THAT(lines_->First("the save of step 2 has waited for"), HasSubstr("is ckptd running?"));
  daemon_.Start();
  EXPECT_EQ(saved.get().ToString(), Status().ToString());
}

TEST_F(HangingDaemon, ThatIsAwayIsWaitedForNoLongerThanTheCallerSaid) {
  Open();
  daemon_.Stop();
  const client::Deadline soon = client::Deadline::In(kLittle);
  const Status saved = Save({.wait_for_room = Milliseconds(300)});
  EXPECT_EQ(saved.code(), Code::kUnavailable) << saved.ToString();
  EXPECT_THAT(saved.message(), HasSubstr("is ckptd running?"));
  EXPECT_FALSE(soon.passed());
}

TEST_F(HangingDaemon, ThatGoesAwayBeforeItGrantsASlotIsAskedAgainBySavesThatWait) {
  Open();
  daemon_.SetHook([closed = false](const v1::ClientFrame& frame, FakeDaemon::Peer& peer) mutable {
    if (!frame.has_begin_save() || std::exchange(closed, true)) {
      return false;
    }
    peer.Close();
    return true;
  });
  EXPECT_EQ(Save({.wait_for_room = kLong}).ToString(), Status().ToString());
  EXPECT_EQ(daemon_.Count("begin_save"), 3);  // the first one is Open's
}

TEST_F(HangingDaemon, KeepsARestoreWhichSaysSo) {
  Open();
  Hang();
  std::future<Status> restored =
      std::async(std::launch::async, [this] { return job_->Restore(state_).status(); });
  const std::string line = lines_->First();
  EXPECT_THAT(line, HasSubstr("a restore has waited for"));
  EXPECT_THAT(line, HasSubstr("ckptd hangs"));
  GoOn();
  EXPECT_EQ(restored.get().ToString(), Status().ToString());
}

TEST_F(HangingDaemon, KeepsTheOneWhoWaitsInShortCallsAndSaysSo) {
  Open();
  Hang();
  const std::unique_ptr<SaveHandle> handle =
      job_->SaveAsync(++step_, state_, {.wait_for_room = kLong});
  std::atomic<bool> told{false};
  std::thread waits([&] {
    while (!told) {
      static_cast<void>(handle->Wait(Stage::kSealed, Milliseconds(20)).ok());
    }
  });
  const std::string line = lines_->First();
  told = true;
  waits.join();
  EXPECT_THAT(line, HasSubstr("the save of step 2 has waited for"));
  GoOn();
  EXPECT_EQ(handle->Wait(Stage::kSealed, kLong).ToString(), Status().ToString());
}

TEST_F(HangingDaemon, AnOpenThatWaitsForADaemonSaysSo) {
  const auto interrupted = std::make_shared<std::atomic<bool>>(false);
  JobOptions options = Options();
  options.socket = daemon_.socket() + "-none";
  options.open_deadline = kExchange;
  options.interrupted = [interrupted] { return interrupted->load(); };
  std::future<Status> opened =
      std::async(std::launch::async, [options] { return Job::Open(options).status(); });
  const std::string line = lines_->First();
  EXPECT_THAT(line, HasSubstr("joining as rank 0 has waited for"));
  EXPECT_THAT(line, HasSubstr(options.socket));
  EXPECT_THAT(line, HasSubstr("is ckptd running?"));
  *interrupted = true;
  EXPECT_FALSE(opened.get().ok());
}

// `ckptctl status JOB` would say that there is no such job.
TEST_F(HangingDaemon, AJoinThatIsNotAnsweredNamesACommandThatNeedsNoJob) {
  daemon_.SetHook([](const v1::ClientFrame& frame, FakeDaemon::Peer&) { return frame.has_join(); });
  const auto interrupted = std::make_shared<std::atomic<bool>>(false);
  JobOptions options = Options();
  options.open_deadline = kExchange;
  options.interrupted = [interrupted] { return interrupted->load(); };
  std::future<Status> opened =
      std::async(std::launch::async, [options] { return Job::Open(options).status(); });
  EXPECT_THAT(lines_->First("see `ckptctl status` and"), HasSubstr("joining as rank 0"));
  *interrupted = true;
  EXPECT_FALSE(opened.get().ok());
}

TEST_F(HangingDaemon, IsNamedByTheErrorOfAJoinThatItDoesNotAnswer) {
  Hang();
  JobOptions options = Options();
  options.open_deadline = seconds(3);
  const Status opened = Job::Open(options).status();
  EXPECT_EQ(opened.code(), Code::kDeadlineExceeded) << opened.ToString();
  EXPECT_THAT(opened.message(), HasSubstr("ckptd hangs: process " + std::to_string(::getpid())));
}

TEST_F(HangingDaemon, ACallerThatWaitsForADaemonKeepsNoOther) {
  Open();
  const std::unique_ptr<SaveHandle> handle = job_->SaveAsync(++step_, state_);
  ASSERT_TRUE(handle->Wait(Stage::kSealed, kLong).ok());
  daemon_.Stop();
  std::future<Status> committed =
      std::async(std::launch::async, [&] { return handle->Wait(Stage::kCommitted, kExchange); });
  EXPECT_THAT(lines_->First(), HasSubstr("is ckptd running?"));  // so it tries again and again
  ExpectSkipped(3);
  EXPECT_EQ(committed.wait_for(seconds(0)), std::future_status::timeout);
  daemon_.Start();
  EXPECT_EQ(committed.get().ToString(), Status().ToString());
  EXPECT_TRUE(SavesAgain());
}

// ---- Readers, which have no job ----

class WaitingReader : public HangingDaemon {
 protected:
  WaitingReader() {
    client::SetDefaultWarn([lines = lines_](const std::string& line) { lines->Add(line); });
  }
  ~WaitingReader() override { client::SetDefaultWarn(nullptr); }
  ListOptions Listing(Milliseconds deadline) {
    ListOptions options;
    options.job = "test";
    options.socket = daemon_.socket();
    options.deadline = deadline;
    return options;
  }
  const std::string hangs_ = "ckptd hangs: process " + std::to_string(::getpid());
};

TEST_F(WaitingReader, IsToldWhoKeepsIt) {
  Open();
  Hang();
  auto listed = std::async(std::launch::async, ListCheckpoints, Listing(kExchange));
  const std::string line = lines_->First("reading checkpoints has waited for");
  EXPECT_THAT(line, HasSubstr(hangs_));
  EXPECT_THAT(line, HasSubstr(daemon_.socket()));
  EXPECT_EQ(listed.wait_for(seconds(0)), std::future_status::timeout);
  GoOn();
  EXPECT_EQ(listed.get().status().ToString(), Status().ToString());
}

TEST_F(WaitingReader, IsToldSoByItsErrorToo) {
  Hang();
  const Status listed = ListCheckpoints(Listing(seconds(3))).status();
  EXPECT_EQ(listed.code(), Code::kDeadlineExceeded) << listed.ToString();
  EXPECT_THAT(listed.message(), HasSubstr(hangs_));
}

TEST_F(WaitingReader, IsToldSoWhileAnEarlierRequestIsUnanswered) {
  const auto connection =
      client::Connection::Dial(daemon_.socket(), client::Deadline::In(kExchange));
  ASSERT_TRUE(connection.ok()) << connection.status().ToString();
  const auto asks = [&](Milliseconds deadline) {
    return (*connection)
        ->Call<client::wire::Done>(client::wire::ConfirmRead{1, 1}, client::Deadline::In(deadline))
        .status();
  };
  Hang();
  EXPECT_EQ(asks(Milliseconds(0)).code(), Code::kDeadlineExceeded);
  auto answered = std::async(std::launch::async, asks, kExchange);
  EXPECT_THAT(lines_->First("reading checkpoints has waited for"), HasSubstr(hangs_));
  GoOn();
  EXPECT_EQ(answered.get().ToString(), Status().ToString());
}

TEST_F(WaitingReader, OfADaemonThatWorksIsToldSo) {
  daemon_.SetHook([](const v1::ClientFrame& frame, FakeDaemon::Peer&) { return frame.has_list(); });
  const auto interrupted = std::make_shared<std::atomic<bool>>(false);
  ListOptions options = Listing(kExchange);
  options.interrupted = [interrupted] { return interrupted->load(); };
  auto listed = std::async(std::launch::async, ListCheckpoints, options);
  EXPECT_THAT(lines_->First(), HasSubstr("ckptd still works on it"));
  *interrupted = true;
  EXPECT_EQ(listed.get().status().code(), Code::kDeadlineExceeded);
}

// ---- What earlier connections left ----

class AbandonedHold : public testing::Test {
 protected:
  Status Connects() {
    return client::Connection::Dial(daemon_.socket(), client::Deadline::In(kExchange)).status();
  }
  void Abandon() { client::ReadTicket ticket(daemon_.socket()); }

  FakeDaemon daemon_;
};

TEST_F(AbandonedHold, ThatIsNotReleasedKeepsNobodyFromConnecting) {
  Abandon();
  Abandon();
  daemon_.SetHook([refused = false](const v1::ClientFrame& frame, FakeDaemon::Peer& peer) mutable {
    if (!frame.has_release_read() || std::exchange(refused, true)) {
      return false;
    }
    v1::DaemonFrame reply;
    reply.set_id(frame.id());
    reply.mutable_failure()->set_code(13);
    reply.mutable_failure()->set_message("its record cannot be written");
    peer.Send(reply);
    return true;
  });
  EXPECT_EQ(Connects().ToString(), Status().ToString());
  EXPECT_EQ(daemon_.Count("release_read"), 2);  // nor the others from being released
  EXPECT_EQ(Connects().ToString(), Status().ToString());
  EXPECT_EQ(daemon_.Count("release_read"), 3);
  EXPECT_EQ(Connects().ToString(), Status().ToString());
  EXPECT_EQ(daemon_.Count("release_read"), 3);
}

TEST_F(AbandonedHold, WhoseReleaseIsNotAnsweredKeepsNobodyFromWhatComesNext) {
  Abandon();
  daemon_.SetHook(
      [](const v1::ClientFrame& frame, FakeDaemon::Peer&) { return frame.has_release_read(); });
  const client::Deadline soon = client::Deadline::In(kLittle);
  const auto connection =
      client::Connection::Dial(daemon_.socket(), client::Deadline::In(kExchange));
  ASSERT_TRUE(connection.ok()) << connection.status().ToString();
  EXPECT_TRUE(
      (*connection)
          ->Call<client::wire::Done>(client::wire::ConfirmRead{1, 1}, client::Deadline::In(kLong))
          .ok());
  EXPECT_FALSE(soon.passed());
  daemon_.SetHook(nullptr);
  EXPECT_EQ(Connects().ToString(), Status().ToString());  // which releases it
}

// ---- What is said ----

TEST(WaitNotice, SaysSoAfterASecondAndThenEveryTen) {
  using Next = client::WaitNotice::Next;
  client::WaitNotice notice;
  std::vector<std::pair<int64_t, Next>> told;
  for (Milliseconds kept(0); kept <= seconds(32); kept += Milliseconds(50)) {
    if (const Next next = notice.Look(kept); next != Next::kNothing) {
      told.emplace_back(kept.count(), next);
    }
  }
  EXPECT_THAT(told,
              ::testing::ElementsAre(std::pair(450, Next::kAsk), std::pair(900, Next::kSay),
                                     std::pair(10'450, Next::kAsk), std::pair(10'900, Next::kSay),
                                     std::pair(20'450, Next::kAsk), std::pair(20'900, Next::kSay),
                                     std::pair(30'450, Next::kAsk), std::pair(30'900, Next::kSay)));
}

// A process that listens at that path, and is stopped.
pid_t StoppedListener(const std::string& path) {
  struct sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
  const pid_t child = ::fork();
  if (child == 0) {
    const int listener = ::socket(AF_UNIX, SOCK_STREAM, 0);
    if (::bind(listener, reinterpret_cast<struct sockaddr*>(&address), sizeof(address)) != 0 ||
        ::listen(listener, 4) != 0 || ::raise(SIGSTOP) != 0) {
      ::_exit(1);
    }
    ::pause();
    ::_exit(0);
  }
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, WUNTRACED), child);
  EXPECT_TRUE(WIFSTOPPED(status));
  return child;
}

TEST(HangText, NamesCommandsThatThisUserMayRun) {
  client::DaemonProcess daemon{.path = "/run/holdfast/ckptd.sock",
                               .process = 4711,
                               .user = 0,
                               .state = 'T',
                               .is_own = false,
                               .is_private = false};
  EXPECT_THAT(client::HangText(daemon), HasSubstr("continue: sudo kill -CONT 4711"));
  daemon.state = 'Z';
  EXPECT_THAT(client::HangText(daemon), HasSubstr(": sudo systemctl restart ckptd"));
  daemon.state = 'S';
  EXPECT_THAT(client::HangText(daemon), HasSubstr(": sudo systemctl restart ckptd"));
  daemon.is_own = true;  // by root itself
  EXPECT_THAT(client::HangText(daemon), HasSubstr(": systemctl restart ckptd"));
  daemon.user = 1000;
  EXPECT_THAT(client::HangText(daemon), HasSubstr(": kill -KILL 4711, and start ckptd again"));
  daemon.is_private = true;  // no unit of systemd's
  for (const char state : {'S', 'Z'}) {
    daemon.state = state;
    EXPECT_THAT(client::HangText(daemon), HasSubstr("holdfast.Checkpointer"));
    EXPECT_THAT(client::HangText(daemon), Not(HasSubstr("systemctl")));
  }
}

// What connecting to that path in vain says.
std::string NotThere(const std::string& path) {
  const Status status = client::ConnectUnix(path, client::Deadline::In(kLong)).status();
  EXPECT_EQ(status.code(), Code::kUnavailable);
  return status.message();
}

TEST(AbsentDaemon, ThatIsThePrivateOneIsStartedByTheNextProgram) {
  ::setenv("HOLDFAST_PRIVATE_DIR", "/tmp/holdfast-private-none", 1);
  ::unsetenv("HOLDFAST_START_DAEMON");
  const std::string text = NotThere("/tmp/holdfast-private-none/ckptd.sock");
  ::unsetenv("HOLDFAST_PRIVATE_DIR");
  EXPECT_THAT(text, HasSubstr("the private ckptd has ended"));
  EXPECT_THAT(text, HasSubstr("/tmp/holdfast-private-none/ckptd.log"));
  EXPECT_THAT(text, HasSubstr("holdfast.Checkpointer"));
}

TEST(AbsentDaemon, ThatTheEnvironmentForbidsToStartNamesTheVariable) {
  ::setenv("HOLDFAST_START_DAEMON", "0", 1);
  ::setenv("HOLDFAST_PRIVATE_DIR", "/tmp/holdfast-private-none", 1);
  const std::string text = NotThere("/tmp/holdfast-private-none/ckptd.sock");
  const std::string of_named = NotThere("/tmp/holdfast-named-none/ckptd.sock");
  ::unsetenv("HOLDFAST_PRIVATE_DIR");
  ::unsetenv("HOLDFAST_START_DAEMON");
  EXPECT_THAT(text, HasSubstr("is ckptd running?"));
  EXPECT_THAT(text, HasSubstr("unset HOLDFAST_START_DAEMON (it is '0')"));
  EXPECT_THAT(of_named, HasSubstr("is ckptd running?"));
  EXPECT_THAT(of_named, Not(HasSubstr("HOLDFAST_START_DAEMON")));  // no other would be used
}

TEST(HangText, NamesTheProcessThatIsStoppedAndTheWayOut) {
  std::string directory = "/tmp/holdfast-hang-XXXXXX";
  ASSERT_NE(::mkdtemp(directory.data()), nullptr);
  const std::string path = directory + "/ckptd.sock";
  const pid_t child = StoppedListener(path);
  const auto connection = client::Connection::Connect(path, client::Deadline::In(kLong));
  ASSERT_TRUE(connection.ok()) << connection.status().ToString();
  const auto hello =
      (*connection)->SayHello(false, client::Deadline::In(kLong).OrSilence(Milliseconds(100)));
  ASSERT_TRUE(hello.ok());
  const Status status =
      (*connection)->WaitFor(*hello, client::Deadline::In(kLong).OrSilence(Milliseconds(100)));
  EXPECT_EQ(status.code(), Code::kUnavailable);
  EXPECT_THAT(status.message(), HasSubstr("process " + std::to_string(child)));
  EXPECT_THAT(status.message(), HasSubstr("'" + path + "' is stopped"));
  EXPECT_THAT(status.message(), HasSubstr("kill -CONT " + std::to_string(child)));
  EXPECT_EQ(::kill(child, SIGKILL), 0);
  EXPECT_EQ(::waitpid(child, nullptr, 0), child);
  ::unlink(path.c_str());
  ::rmdir(directory.c_str());
}

}  // namespace
}  // namespace holdfast
