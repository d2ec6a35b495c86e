// What operations on durable tiers do to each other: a drive or a mount that hangs, jobs that are
// not what they say, what was answered before its end.
#include "server/runtime/tiers/durable_tiers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <thread>

#include "base/clock.h"
#include "base/errno_status.h"
#include "base/status.h"
#include "server/runtime/daemon_config.h"
#include "tests/base/temporary_directory.h"
#include "tests/tiers/memory/memory_harness.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;

constexpr auto kPatience = std::chrono::seconds(30);

// The system's, but opening what lies below a directory for reading hangs while it is told to, and
// a mount may be gone. Never destroyed: threads that hung may still be in it.
class HangingEnv : public Env {
 public:
  // What lies below is not there, and `dir` itself is another file system's; "": all is back.
  void Unmount(const std::string& dir) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    gone_ = dir;
  }
  void Hang(const std::string& dir) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    dir_ = dir;
    changed_.NotifyAll();
  }
  bool AwaitHanging(int calls) EXCLUDES(mutex_) {
    const auto until = std::chrono::steady_clock::now() + kPatience;
    MutexLock lock(mutex_);
    while (hanging_ < calls && changed_.WaitUntil(mutex_, until)) {
    }
    return hanging_ >= calls;
  }

  absl::StatusOr<std::unique_ptr<File>> Open(const std::string& path, OpenMode mode,
                                             OpenOptions options) override {
    if (mode == OpenMode::kRead) {
      Wait(path);
    }
    HF_RETURN_IF_ERROR(Missing(path));
    return real_.Open(path, mode, options);
  }
  absl::StatusOr<std::unique_ptr<Mapping>> Map(File& file, uint64_t offset, uint64_t bytes,
                                               bool writable) override {
    return real_.Map(file, offset, bytes, writable);
  }
  absl::Status Populate(Mapping& mapping, uint64_t offset, uint64_t bytes) override {
    return real_.Populate(mapping, offset, bytes);
  }
  absl::Status Rename(const std::string& from, const std::string& to) override {
    return real_.Rename(from, to);
  }
  absl::Status RenameNoReplace(const std::string& from, const std::string& to) override {
    return real_.RenameNoReplace(from, to);
  }
  absl::Status Link(const std::string& from, const std::string& to) override {
    return real_.Link(from, to);
  }
  absl::Status Unlink(const std::string& path) override {
    HF_RETURN_IF_ERROR(Missing(path));
    return real_.Unlink(path);
  }
  absl::Status SyncDirectory(const std::string& path) override { return real_.SyncDirectory(path); }
  absl::Status CreateDirectory(const std::string& path, uint32_t mode) override {
    HF_RETURN_IF_ERROR(Missing(path));
    return real_.CreateDirectory(path, mode);
  }
  absl::Status CreateDirectories(const std::string& path, uint32_t mode) override {
    HF_RETURN_IF_ERROR(Missing(path));
    return real_.CreateDirectories(path, mode);
  }
  absl::Status RemoveDirectory(const std::string& path) override {
    return real_.RemoveDirectory(path);
  }
  absl::Status SetDirectoryAccess(const std::string& path, uint32_t uid, uint32_t gid,
                                  uint32_t mode) override {
    return real_.SetDirectoryAccess(path, uid, gid, mode);
  }
  absl::Status SetStriping(const std::string& directory, const Striping& striping) override {
    return real_.SetStriping(directory, striping);
  }
  absl::StatusOr<std::vector<std::string>> List(const std::string& directory,
                                                size_t names_max) override {
    Wait(directory);
    HF_RETURN_IF_ERROR(Missing(directory));
    return real_.List(directory, names_max);
  }
  absl::StatusOr<FileInfo> Info(const std::string& path) override {
    const std::string gone = Gone();
    if (!gone.empty() && (path == gone || path == gone + "/.")) {
      HF_ASSIGN_OR_RETURN(FileInfo info, real_.Info(path));
      ++info.device;
      return info;
    }
    HF_RETURN_IF_ERROR(Missing(path));
    return real_.Info(path);
  }
  absl::StatusOr<FilesystemInfo> Filesystem(const std::string& path) override {
    return real_.Filesystem(path);
  }
  absl::StatusOr<std::unique_ptr<FileLock>> Lock(const std::string& path) override {
    return real_.Lock(path);
  }

 private:
  void Wait(const std::string& path) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    ++hanging_;
    while (!dir_.empty() && path.compare(0, dir_.size(), dir_) == 0) {
      changed_.NotifyAll();
      changed_.Wait(mutex_);
    }
    --hanging_;
  }

  std::string Gone() EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    return gone_;
  }
  absl::Status Missing(const std::string& path) {
    const std::string gone = Gone();
    return !gone.empty() && path.rfind(gone + "/", 0) == 0 ? ErrnoStatus(ENOENT, "open", path)
                                                           : absl::OkStatus();
  }

  Env& real_ = *Env::System();
  Mutex mutex_;
  std::string gone_ GUARDED_BY(mutex_);
  CondVar changed_;
  std::string dir_ GUARDED_BY(mutex_);
  int hanging_ GUARDED_BY(mutex_) = 0;
};

class DurableTiersTest : public ::testing::Test {
 protected:
  void SetUp() override {
    config_ = DefaultConfig();
    config_.set_node_name("node");
    for (const char* drive : drives_) {
      config_.mutable_nvme()->add_dirs(dir_.Path(drive));
    }
    config_.mutable_nvme()->set_bytes_max(uint64_t{1} << 30);
    config_.mutable_nvme()->set_engine(v1::NvmeConfig::IO_ENGINE_THREADS);
    config_.mutable_remote()->set_dir(dir_.Path("remote"));
    config_.mutable_remote()->set_writers(1);
    ASSERT_TRUE(std::filesystem::create_directory(dir_.Path("remote")));
    slots_ = SlotStore::Open(StoreOptions(*Env::System(), memory_.path())).value();
    ASSERT_TRUE(slots_->Scan().ok());
    DurableTiers::Options options;
    options.config = config_;
    options.env = &env_;
    options.slots = slots_;
    options.post = [this](Event event) {
      MutexLock lock(mutex_);
      events_.push_back(std::move(event));
      changed_.NotifyAll();
    };
    auto tiers = DurableTiers::Create(std::move(options));
    ASSERT_TRUE(tiers.ok()) << tiers.status();
    tiers_ = *std::move(tiers);
  }
  void TearDown() override {
    env_.Hang("");
    env_.Unmount("");
    tiers_.reset();
  }

  // The next event of that kind; fails the test if there is none in time.
  template <typename Wanted>
  Wanted Await(const std::function<bool(const Wanted&)>& which = nullptr) {
    const auto until = std::chrono::steady_clock::now() + kPatience;
    MutexLock lock(mutex_);
    for (;;) {
      for (auto it = events_.begin(); it != events_.end(); ++it) {
        const auto* event = std::get_if<Wanted>(&*it);
        if (event != nullptr && (which == nullptr || which(*event))) {
          Wanted found = *event;
          events_.erase(it);
          return found;
        }
      }
      if (!changed_.WaitUntil(mutex_, until)) {
        ADD_FAILURE() << "there is no such event";
        return Wanted();
      }
    }
  }
  FlushEnded AwaitFlush(DrainId drain) {
    return Await<FlushEnded>([drain](const FlushEnded& e) { return e.drain == drain; });
  }
  FlushShard Flush(DrainId drain, Step step, TierKind from, TierKind to) {
    const SlotContent content = MakeSlotContent(step, 1);
    if (sealed_.insert(step).second) {
      EXPECT_EQ(SealSlot(*slots_, step, content), absl::OkStatus());
    }
    const ShardRecord& record = content.sample.record;
    FlushShard flush;
    flush.drain = drain;
    flush.to = to;
    flush.key = {record.id, record.job_name, record.world_size};
    flush.uid = ::geteuid();
    flush.gid = ::getegid();
    flush.image_bytes = record.image_bytes;
    flush.from = from;
    flush.slot = step;
    flush.generation = 1;
    flush.opening = 7;
    return flush;
  }
  FlushEnded Do(const FlushShard& flush) {
    tiers_->Perform(flush);
    return AwaitFlush(flush.drain);
  }
  // (An operation is told a moment before its worker is free.)
  void LookAtIdlePlaces() {
    const auto until = std::chrono::steady_clock::now() + kPatience;
    while (!tiers_->idle() && std::chrono::steady_clock::now() < until) {
      std::this_thread::yield();
    }
    tiers_->LookAtPlaces();
  }
  // Long after everything that has begun.
  static MonotonicTime Later() { return Clock::System()->Now() + std::chrono::hours(1); }
  v1::TierStatus Tier(TierKind kind) {
    v1::DaemonStatus status;
    v1::TierStatus& tier = *status.add_tiers();
    tier.set_tier(std::string(TierName(kind)));
    tier.set_healthy(true);
    tiers_->FillStatus(status);
    return status.tiers(0);
  }

  std::vector<const char*> drives_ = {"nvme"};
  static inline HangingEnv& env_ = *new HangingEnv();
  TemporaryDirectory dir_;
  SharedMemoryDirectory memory_;
  v1::DaemonConfig config_;
  std::shared_ptr<SlotStore> slots_;
  std::set<Step> sealed_;
  Mutex mutex_;
  CondVar changed_;
  std::vector<Event> events_ GUARDED_BY(mutex_);
  std::unique_ptr<DurableTiers> tiers_;
};

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
  EXPECT_TRUE(absl::IsUnavailable(Await<CopiesRemoved>().status));
}

// It reads whole images, and may hang: nothing that is written waits behind it.
TEST_F(DurableTiersTest, AVerificationHoldsNoFlushUp) {
  DrainId drain = 0;
  for (const TierKind tier : {TierKind::kNvme, TierKind::kRemote}) {
    const FlushShard flush = Flush(++drain, 1, TierKind::kMemory, tier);
    const FlushEnded flushed = Do(flush);
    ASSERT_EQ(flushed.status, absl::OkStatus());
    ReadableShard shard;
    shard.copy = flushed.copy.copy;
    shard.copy.job_name = flush.key.job_name;
    shard.copy.world_size = flush.key.world_size;
    shard.tier = tier;
    env_.Hang(std::filesystem::path(flushed.copy.location).parent_path());
    std::atomic<bool> asked{true};
    absl::StatusOr<std::string> verified = "";
    std::thread verification(
        [&] { verified = tiers_->Verify(shard, [&](uint64_t) { return asked.load(); }); });
    EXPECT_TRUE(env_.AwaitHanging(1));
    EXPECT_EQ(Do(Flush(++drain, 2, TierKind::kMemory, tier)).status, absl::OkStatus());
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

TEST_F(DurableTiersTest, WhatHangsInRemoteIsNotTheDrivesDoing) {
  ASSERT_EQ(Do(Flush(1, 1, TierKind::kMemory, TierKind::kNvme)).status, absl::OkStatus());
  ASSERT_EQ(Do(Flush(2, 2, TierKind::kMemory, TierKind::kRemote)).status, absl::OkStatus());
  env_.Hang(dir_.Path("remote"));
  tiers_->Perform(ScanRemote{3, "demo"});
  ASSERT_TRUE(env_.AwaitHanging(1));
  tiers_->CheckStalls(Later());
  EXPECT_FALSE(Await<DrainStalled>().source);
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
    MutexLock lock(mutex_);
    while (!running_) {
      changed_.Wait(mutex_);
    }
  }
  void Release() {
    MutexLock lock(mutex_);
    released_ = true;
    changed_.NotifyAll();
  }
  std::vector<absl::StatusCode> AwaitFlushes(size_t count) {
    MutexLock lock(mutex_);
    while (flushes_.size() < count) {
      changed_.Wait(mutex_);
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
