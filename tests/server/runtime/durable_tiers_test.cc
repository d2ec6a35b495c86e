// What operations on durable tiers do to each other: a drive or a mount that hangs, jobs that are
// not what they say, what was answered before its end.
#include <fcntl.h>
#include <unistd.h>

#include <future>

#include "base/unique_fd.h"
#include "server/runtime/passed_files.h"
#include "tests/server/runtime/durable_tiers_fixture.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;

class TwoDrivesTest : public DurableTiersTest {
 protected:
  TwoDrivesTest() { drives_ = {"one", "other"}; }
  // Flushes a step; which of them has it.
  std::string FillOne(const FlushShard& flush) {
    const FlushEnded ended = Do(flush);
    EXPECT_EQ(ended.status, absl::OkStatus());
    return ended.copy.location.rfind(dir_.Path("other") + "/", 0) == 0 ? "other" : "one";
  }
  CopiesRemoved Remove(DrainId drain, const FlushShard& flush) {
    tiers_->Perform(RemoveCopies{drain, TierKind::kNvme, flush.key.id.job, flush.key.job_name,
                                 flush.key.id.checkpoint(), flush.key.world_size});
    return Await<CopiesRemoved>([drain](const CopiesRemoved& e) { return e.drain == drain; });
  }
};

TEST_F(TwoDrivesTest, OneThatIsGoneHoldsUpTheRemovalOfWhatItHasAndOfNothingElse) {
  const FlushShard first = Flush(1, 1, TierKind::kMemory, TierKind::kNvme);
  const std::string gone = FillOne(first);
  env_.Unmount(dir_.Path(gone));
  const FlushShard second = Flush(2, 2, TierKind::kMemory, TierKind::kNvme);
  EXPECT_TRUE(absl::IsUnavailable(Do(second).status)) << "it notices";
  EXPECT_EQ(Await<TierAway>().dir, dir_.Path(gone));
  EXPECT_NE(FillOne(second), gone);
  EXPECT_EQ(Remove(101, second).status, absl::OkStatus());
  const CopiesRemoved left = Remove(102, first);
  EXPECT_TRUE(absl::IsUnavailable(left.status)) << left.status;
  EXPECT_THAT(left.ranks_left, ::testing::Optional(::testing::ElementsAre(first.key.id.rank)));
  env_.Unmount("");
  EXPECT_EQ(Remove(103, first).status, absl::OkStatus());
  EXPECT_EQ(Remove(104, first).status, absl::OkStatus()) << "nothing is left of it";
}

// It failed once, and nothing but flushes would go there: one of them finds that it is well again.
TEST_F(TwoDrivesTest, OneThatFailedIsNotPassedOverForEver) {
  const std::string failing = FillOne(Flush(1, 1, TierKind::kMemory, TierKind::kNvme));
  env_.Meddle({.dir = dir_.Path(failing), .call = "write", .error = ENOSPC});
  EXPECT_FALSE(Do(Flush(2, 2, TierKind::kMemory, TierKind::kNvme)).status.ok());
  env_.Meddle({});
  std::vector<std::string> went;
  DrainId next = 3;
  for (; next < 40 && (went.empty() || went.back() != failing); ++next) {
    went.push_back(FillOne(Flush(next, next, TierKind::kMemory, TierKind::kNvme)));
  }
  EXPECT_GT(went.size(), 5u) << "it is spared meanwhile";
  EXPECT_EQ(went.back(), failing);
  EXPECT_EQ(FillOne(Flush(next, next, TierKind::kMemory, TierKind::kNvme)), failing);
}

TEST_F(TwoDrivesTest, WhatNobodyUsesIsLookedAtAllTheSame) {
  const std::string gone = FillOne(Flush(1, 1, TierKind::kMemory, TierKind::kNvme));
  ASSERT_EQ(Do(Flush(50, 50, TierKind::kMemory, TierKind::kRemote)).status, absl::OkStatus());
  for (const auto& [tier, dir] : {std::pair(TierKind::kNvme, dir_.Path(gone)),
                                  std::pair(TierKind::kRemote, dir_.Path("remote"))}) {
    env_.Unmount(dir);
    LookAtIdlePlaces();
    const auto away = Await<TierAway>();
    EXPECT_EQ(away.tier, tier);
    EXPECT_EQ(away.dir, dir);
    EXPECT_THAT(Message(away.status), HasSubstr("is on another file system"));
    EXPECT_FALSE(Tier(tier).healthy());
  }
}

TEST_F(DurableTiersTest, AMountThatIsMissingFromTheBeginningIsSaidBeforeAnybodyNeedsIt) {
  std::filesystem::remove(dir_.Path("remote"));
  LookAtIdlePlaces();
  const auto until = std::chrono::steady_clock::now() + kPatience;
  while (Tier(TierKind::kRemote).healthy() && std::chrono::steady_clock::now() < until) {
    std::this_thread::yield();
  }
  EXPECT_THAT(Tier(TierKind::kRemote).state(), HasSubstr("is not there"));
}

TEST_F(DurableTiersTest, ADriveThatHangsHoldsNobodyUpInRemote) {
  ASSERT_EQ(Do(Flush(1, 1, TierKind::kMemory, TierKind::kNvme)).status, absl::OkStatus());
  env_.Hang(dir_.Path("nvme"));
  tiers_->Perform(Flush(2, 1, TierKind::kNvme, TierKind::kRemote));
  ASSERT_TRUE(env_.AwaitHanging(1));
  EXPECT_EQ(Do(Flush(3, 2, TierKind::kMemory, TierKind::kRemote)).status, absl::OkStatus());
  // It says where it hangs, and what goes there from memory instead does not wait for its end.
  tiers_->CheckStalls(Later());
  const auto stalled = Await<DrainStalled>();
  EXPECT_EQ(stalled.drain, 2u);
  EXPECT_TRUE(stalled.source);
  EXPECT_THAT(stalled.what, HasSubstr(dir_.Path("nvme")));
  tiers_->Perform(CancelDrain{2});
  EXPECT_TRUE(absl::IsCancelled(AwaitFlush(2).status));
  const FlushShard again = Flush(4, 1, TierKind::kMemory, TierKind::kRemote);
  EXPECT_EQ(Do(again).status, absl::OkStatus());
  // A removal does: its end takes away what it has begun there.
  tiers_->Perform(RemoveCopies{5, TierKind::kRemote, again.key.id.job, again.key.job_name,
                               again.key.id.checkpoint(), again.key.world_size});
  EXPECT_TRUE(absl::IsAborted(Await<CopiesRemoved>().status));
}

// It reads whole images, slowly where it was told to, and may hang: nothing that is written waits
// behind it, and no other verification.
TEST_F(DurableTiersTest, AVerificationHoldsNothingElseUp) {
  DrainId drain = 0;
  for (const TierKind tier : {TierKind::kNvme, TierKind::kRemote}) {
    const FlushShard flush = Flush(++drain, 1, TierKind::kMemory, tier);
    const FlushEnded flushed = Do(flush);
    ASSERT_EQ(flushed.status, absl::OkStatus());
    const auto readable = [&](const FlushEnded& copy) {
      ReadableShard shard;
      shard.copy = copy.copy.copy;
      shard.copy.job_name = flush.key.job_name;
      shard.copy.world_size = flush.key.world_size;
      shard.tier = tier;
      return shard;
    };
    const ReadableShard shard = readable(flushed);
    env_.Hang(std::filesystem::path(flushed.copy.location).parent_path());
    std::atomic<bool> asked{true};
    absl::StatusOr<std::string> verified = "";
    std::thread verification(
        [&] { verified = tiers_->Verify(shard, [&](uint64_t) { return asked.load(); }); });
    EXPECT_TRUE(env_.AwaitHanging(1));
    const FlushEnded other = Do(Flush(++drain, 2, TierKind::kMemory, tier));
    EXPECT_EQ(other.status, absl::OkStatus());
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    const absl::StatusOr<std::string> second = tiers_->Verify(
        readable(other), [&](uint64_t) { return std::chrono::steady_clock::now() < deadline; });
    EXPECT_EQ(second.status(), absl::OkStatus());
    EXPECT_EQ(second.value_or("?"), "");
    env_.Hang("");
    verification.join();
    EXPECT_EQ(verified.status(), absl::OkStatus());
    EXPECT_EQ(verified.value_or("?"), "");
    // Nor does whoever has gone wait for what hangs.
    env_.Hang(std::filesystem::path(flushed.copy.location).parent_path());
    asked = false;
    EXPECT_TRUE(
        absl::IsCancelled(tiers_->Verify(shard, [&](uint64_t) { return asked.load(); }).status()));
    env_.Hang("");
  }
}

// What lies in the tier is verified, not what this machine remembers of it, and what others have
// in the page cache stays there.
TEST_F(DurableTiersTest, AVerificationReadsPastThePageCache) {
  DrainId drain = 0;
  for (const TierKind tier : {TierKind::kNvme, TierKind::kRemote}) {
    const FlushShard flush = Flush(++drain, 1, TierKind::kMemory, tier);
    const FlushEnded flushed = Do(flush);
    ASSERT_EQ(flushed.status, absl::OkStatus());
    const UniqueFd direct(::open(flushed.copy.location.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT));
    if (!direct.valid()) {
      GTEST_SKIP() << "no O_DIRECT where temporary files lie";
    }
    const UniqueFd file(::open(flushed.copy.location.c_str(), O_RDONLY | O_CLOEXEC));
    ASSERT_EQ(::fsync(file.get()), 0);
    ASSERT_EQ(::posix_fadvise(file.get(), 0, 0, POSIX_FADV_DONTNEED), 0);
    ASSERT_EQ(PagesInCache(flushed.copy.location), 0u);
    EXPECT_EQ(Verified(flush, flushed), "");
    EXPECT_EQ(PagesInCache(flushed.copy.location), 0u);
  }
}

// What clients have opened waits for no flush, and holds none up.
TEST_F(DurableTiersTest, OpeningForAClientHoldsNobodyUpAndClosesWhereItOpened) {
  DrainId drain = 0;
  for (const TierKind tier : {TierKind::kNvme, TierKind::kRemote}) {
    const FlushShard flush = Flush(++drain, 1, TierKind::kMemory, tier);
    const FlushEnded flushed = Do(flush);
    ASSERT_EQ(flushed.status, absl::OkStatus());
    AwaitIdle();
    const size_t open_files = OpenFiles();
    tiers_->Perform(OpenDurable{++drain, tier, flush.key});
    {
      const auto opened = Await<DurableOpened>();
      ASSERT_EQ(opened.status, absl::OkStatus());
      EXPECT_EQ(opened.drain, drain);
      EXPECT_EQ(opened.copy.id, flush.key.id);
      EXPECT_EQ(opened.copy.image_bytes, flushed.copy.copy.image_bytes);
      ASSERT_NE(opened.files, nullptr);
      ASSERT_EQ(opened.files->descriptors.size(), 2u);
      for (const UniqueFd& fd : opened.files->descriptors) {
        EXPECT_EQ(::fcntl(fd.get(), F_GETFL) & O_ACCMODE, O_RDONLY);
      }
    }
    AwaitIdle();
    AwaitOpenFiles(open_files);  // closed with the last who had them
    // One that hangs.
    env_.Hang(std::filesystem::path(flushed.copy.location).parent_path());
    tiers_->Perform(OpenDurable{++drain, tier, flush.key});
    ASSERT_TRUE(env_.AwaitHanging(1));
    EXPECT_EQ(Do(Flush(drain + 1, 2, TierKind::kMemory, tier)).status, absl::OkStatus());
    tiers_->Perform(CancelDrain{drain});
    EXPECT_TRUE(absl::IsCancelled(
        Await<DurableOpened>([drain](const DurableOpened& e) { return e.drain == drain; }).status));
    env_.Hang("");
    AwaitIdle();
    AwaitOpenFiles(open_files);  // nobody has what was opened late
    ++drain;
  }
}

TEST_F(DurableTiersTest, ACopyThatIsCutGoneOrUnreadableIsNotOpened) {
  DrainId drain = 0;
  for (const TierKind tier : {TierKind::kNvme, TierKind::kRemote}) {
    const FlushShard flush = Flush(++drain, 1, TierKind::kMemory, tier);
    const FlushEnded flushed = Do(flush);
    ASSERT_EQ(flushed.status, absl::OkStatus());
    std::filesystem::resize_file(flushed.copy.location, 5000);
    tiers_->Perform(OpenDurable{++drain, tier, flush.key});
    DurableOpened opened = Await<DurableOpened>();
    EXPECT_TRUE(opened.bad);
    EXPECT_THAT(Message(opened.status), HasSubstr("cut"));
    EXPECT_EQ(opened.files, nullptr);
    std::filesystem::remove(flushed.copy.location);
    tiers_->Perform(OpenDurable{++drain, tier, flush.key});
    opened = Await<DurableOpened>();
    EXPECT_TRUE(opened.bad);
    env_.Unmount(DirOf(tier));
    tiers_->Perform(OpenDurable{++drain, tier, flush.key});
    opened = Await<DurableOpened>();
    EXPECT_FALSE(opened.bad) << opened.status;
    EXPECT_TRUE(absl::IsUnavailable(opened.status)) << opened.status;
    env_.Unmount("");
    FlushShard unknown = flush;
    unknown.key.id.step = 999;
    tiers_->Perform(OpenDurable{++drain, tier, unknown.key});
    EXPECT_TRUE(absl::IsNotFound(Await<DurableOpened>().status));
  }
}

TEST_F(DurableTiersTest, WhatHangsInRemoteIsNotTheDrivesDoing) {
  ASSERT_EQ(Do(Flush(1, 1, TierKind::kMemory, TierKind::kNvme)).status, absl::OkStatus());
  ASSERT_EQ(Do(Flush(2, 2, TierKind::kMemory, TierKind::kRemote)).status, absl::OkStatus());
  env_.Hang(dir_.Path("remote"));
  tiers_->Perform(ScanRemote{3, "demo"});
  ASSERT_TRUE(env_.AwaitHanging(1));
  tiers_->CheckStalls(Later());
  EXPECT_FALSE(Await<DrainStalled>().source);
}

// Nobody has saved or restored anything yet: the look that is taken by itself notices it.
TEST_F(DurableTiersTest, AMountThatHangsIsNamedOnANodeWithoutJobs) {
  env_.Hang(dir_.Path("remote"));
  tiers_->LookAtPlaces();
  ASSERT_TRUE(env_.AwaitHanging(1));
  EXPECT_TRUE(Tier(TierKind::kRemote).healthy()) << Tier(TierKind::kRemote).state();
  tiers_->CheckStalls(Later());
  EXPECT_FALSE(Tier(TierKind::kRemote).healthy());
  EXPECT_THAT(Tier(TierKind::kRemote).state(),
              HasSubstr(dir_.Path("remote") + " hangs: no progress for "));
  env_.Hang("");
  AwaitIdle();
  EXPECT_TRUE(Tier(TierKind::kRemote).healthy()) << Tier(TierKind::kRemote).state();
}

TEST_F(DurableTiersTest, ScansThatHangDoNotPileUp) {
  ASSERT_EQ(Do(Flush(1, 1, TierKind::kMemory, TierKind::kRemote)).status, absl::OkStatus());
  env_.Hang(dir_.Path("remote"));
  tiers_->Perform(ScanRemote{10, "demo"});
  ASSERT_TRUE(env_.AwaitHanging(1));
  const auto answered = [](DrainId drain) {
    return [drain](const TierScanned& e) { return e.drain == drain; };
  };
  // The same once more: answered at once.
  tiers_->Perform(ScanRemote{11, "demo"});
  EXPECT_TRUE(absl::IsUnavailable(Await<TierScanned>(answered(11)).status));
  // Another one: it waits, is answered when that gets nowhere, and is not kept.
  tiers_->Perform(ScanRemote{12, "other"});
  tiers_->CheckStalls(Later());
  EXPECT_TRUE(absl::IsDeadlineExceeded(Await<TierScanned>(answered(10)).status));
  EXPECT_TRUE(absl::IsDeadlineExceeded(Await<TierScanned>(answered(12)).status));
  tiers_->Perform(ScanRemote{13, "other"});
  tiers_->CheckStalls(Later());
  EXPECT_TRUE(absl::IsDeadlineExceeded(Await<TierScanned>(answered(13)).status));
  // What was begun tells when it can after all; nothing else was kept.
  env_.Hang("");
  EXPECT_EQ(Await<TierScanned>(answered(10)).status, absl::OkStatus());
  EXPECT_EQ(Do(Flush(14, 2, TierKind::kMemory, TierKind::kRemote)).status, absl::OkStatus());
  MutexLock lock(mutex_);
  for (const Event& event : events_) {
    EXPECT_FALSE(std::holds_alternative<TierScanned>(event));
  }
}

TEST_F(DurableTiersTest, AnotherRunsDirectoryIsNotTheTiersFault) {
  const FlushShard flush = Flush(1, 1, TierKind::kMemory, TierKind::kRemote);
  ASSERT_EQ(Do(flush).status, absl::OkStatus());
  PublishManifest manifest;
  manifest.drain = 2;
  manifest.job = JobUuid::FromString("99999999-4455-4677-8899-aabbccddeeff").value();
  manifest.job_name = flush.key.job_name;
  manifest.uid = flush.uid;
  manifest.gid = flush.gid;
  manifest.checkpoint = flush.key.id.checkpoint();
  manifest.world_size = flush.key.world_size;
  tiers_->Perform(manifest);
  EXPECT_FALSE(Await<ManifestPublished>().status.ok());
  EXPECT_TRUE(Tier(TierKind::kRemote).healthy()) << Tier(TierKind::kRemote).state();
}

TEST_F(DurableTiersTest, ThePriorityReachesTheThreadsThatWrite) {
  // (Threads of earlier tests may still be on their way out.)
  const auto become = [](const std::set<int>& wanted) {
    std::set<int> found;
    const auto until = std::chrono::steady_clock::now() + kPatience;
    do {
      found.clear();
      for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
        std::string name;
        std::ifstream comm(task.path() / "comm");
        std::getline(comm, name);
        if (name == "block-io") {
          found.insert(::getpriority(PRIO_PROCESS, std::stoi(task.path().filename())));
        }
      }
    } while (found != wanted && std::chrono::steady_clock::now() < until);
    return found;
  };
  ASSERT_EQ(Do(Flush(1, 1, TierKind::kMemory, TierKind::kNvme)).status, absl::OkStatus());
  EXPECT_EQ(become({10}), std::set<int>{10});
  ApplyLimits limits{config_.nvme(), config_.remote()};
  limits.nvme.set_nice(15);
  tiers_->Perform(limits);
  ASSERT_EQ(Do(Flush(2, 2, TierKind::kMemory, TierKind::kNvme)).status, absl::OkStatus());
  EXPECT_EQ(become({15}), std::set<int>{15});
}

// ---- Faults in the middle of a flush ----

// ---- A group of workers by itself ----

class WorkerGroupTest : public ::testing::Test {
 protected:
  std::unique_ptr<WorkerGroup> Group() {
    return WorkerGroup::Create({.name = "test"}, outlet_).value();
  }
  // Ends when it is let go.
  std::shared_ptr<Operation> Stuck(DrainId drain) {
    return std::make_shared<Operation>(
        drain,
        [this, drain](Operation&) -> Event {
          MutexLock lock(mutex_);
          running_ = true;
          changed_.NotifyAll();
          while (!released_) {
            changed_.Wait(mutex_);
          }
          return FlushEnded{drain, absl::OkStatus(), false, {}};
        },
        [drain]() -> Event {
          return FlushEnded{drain, absl::CancelledError("cancelled"), false, {}};
        });
  }
  void AwaitRunning() {
    const auto until = std::chrono::steady_clock::now() + kPatience;
    MutexLock lock(mutex_);
    while (!running_ && changed_.WaitUntil(mutex_, until)) {
    }
    EXPECT_TRUE(running_) << "it does not run";
  }
  void Release() {
    MutexLock lock(mutex_);
    released_ = true;
    changed_.NotifyAll();
  }
  std::vector<absl::StatusCode> AwaitFlushes(size_t count) {
    const auto until = std::chrono::steady_clock::now() + kPatience;
    MutexLock lock(mutex_);
    while (flushes_.size() < count && changed_.WaitUntil(mutex_, until)) {
    }
    return flushes_;
  }

  Mutex mutex_;
  CondVar changed_;
  bool running_ GUARDED_BY(mutex_) = false;
  bool released_ GUARDED_BY(mutex_) = false;
  std::vector<absl::StatusCode> flushes_ GUARDED_BY(mutex_);
  std::shared_ptr<EventOutlet> outlet_ = std::make_shared<EventOutlet>([this](Event event) {
    MutexLock lock(mutex_);
    if (const auto* flush = std::get_if<FlushEnded>(&event)) {
      flushes_.push_back(flush->status.code());
      changed_.NotifyAll();
    }
  });
};

TEST_F(WorkerGroupTest, WhatAnswersItselfIsToldThatItWillNotRun) {
  const auto group = Group();
  group->Submit(Stuck(1), false);
  AwaitRunning();
  bool told = false;
  const auto queued = std::make_shared<Operation>(
      2, [](Operation&) -> Event { return TimerFired{}; },
      [&told]() -> Event {
        told = true;
        return TimerFired{};
      });
  queued->AnswersItself();
  group->Submit(queued, false);
  EXPECT_TRUE(group->Cancel(2));
  EXPECT_TRUE(told);
  Release();
}

TEST_F(WorkerGroupTest, WhatEndsWellAfterItWasAnsweredIsStillTold) {
  const auto group = Group();
  group->Submit(Stuck(1), false);
  AwaitRunning();
  EXPECT_TRUE(group->Cancel(1));
  Release();
  EXPECT_THAT(AwaitFlushes(2),
              ::testing::ElementsAre(absl::StatusCode::kCancelled, absl::StatusCode::kOk));
}

// To let go of what an operation had may be work, too.
TEST_F(WorkerGroupTest, IsIdleWhenNothingIsLeftToBeLetGoOf) {
  const auto group = Group();
  const auto idle_when_let_go = std::make_shared<std::promise<bool>>();
  std::future<bool> told = idle_when_let_go->get_future();
  std::shared_ptr<void> had(nullptr, [group = group.get(), idle_when_let_go](void*) {
    idle_when_let_go->set_value(group->idle());
  });
  group->Submit(std::make_shared<Operation>(
                    1, [had = std::move(had)](Operation&) -> Event { return TimerFired{}; },
                    []() -> Event { return TimerFired{}; }),
                false);
  ASSERT_EQ(told.wait_for(kPatience), std::future_status::ready);
  EXPECT_FALSE(told.get());
}

TEST(WorkerGroupThreadsTest, WithoutThreadsItSaysSo) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers need more address space than there is";
#endif
  const auto try_it = [] {
    const rlimit limit = {256u << 20, 256u << 20};  // a thread's stack takes 8 MiB of it
    ::setrlimit(RLIMIT_AS, &limit);
    const auto group = WorkerGroup::Create({.name = "test", .threads = 200},
                                           std::make_shared<EventOutlet>([](Event) {}));
    std::fprintf(stderr, "%s\n", Message(group.status()).c_str());
    ::_exit(absl::IsResourceExhausted(group.status()) ? 0 : 1);
  };
  EXPECT_EXIT(try_it(), ::testing::ExitedWithCode(0), "start a thread");
}

}  // namespace
}  // namespace holdfast
