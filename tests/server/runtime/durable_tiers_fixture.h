// DurableTiers on real directories, with calls that hang or fail and mounts that go away.
#pragma once

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "base/unique_fd.h"
#include "server/runtime/daemon_config.h"
#include "server/runtime/tiers/durable_tiers.h"
#include "tests/base/temporary_directory.h"
#include "tests/tiers/memory/memory_harness.h"
#include "tiers/image/frame.h"

namespace holdfast {

inline constexpr auto kPatience = std::chrono::seconds(30);

// What becomes of calls on images below a directory.
struct Meddling {
  std::string dir;     // of what lies below it, or of that file; "": of none
  std::string call;    // "write", "allocate", "sync": fails with
  int error = 0;       // (0: goes on)
  bool flips = false;  // a bit of what is written
  std::function<void()> at_write;
  std::function<void(uint64_t offset)> at_read;
};

// The system's, but opening what lies below a directory for reading hangs while it is told to, a
// mount may be gone, and calls on files fail. Never destroyed: threads that hung may still be in
// it.
class HangingEnv : public Env {
 public:
  void Meddle(Meddling meddling) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    meddling_ = std::move(meddling);
  }
  Meddling MeddlingWith(const std::string& path) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    const bool below = !meddling_.dir.empty() && (path + "/").rfind(meddling_.dir + "/", 0) == 0;
    return below ? meddling_ : Meddling();
  }
  // Bytes of images read by whoever may write them.
  uint64_t TakeReadBack() { return read_back_.exchange(0); }
  void CountReadBack(uint64_t bytes) { read_back_ += bytes; }

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
    HF_ASSIGN_OR_RETURN(std::unique_ptr<File> file, real_.Open(path, mode, options));
    return Meddled(std::move(file), mode);
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

  std::unique_ptr<File> Meddled(std::unique_ptr<File> file, OpenMode mode);

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
  Meddling meddling_ GUARDED_BY(mutex_);
  std::atomic<uint64_t> read_back_{0};
};

// The file is the system's, and its calls are as HangingEnv was told.
class MeddledFile : public File {
 public:
  MeddledFile(HangingEnv& env, std::unique_ptr<File> file, bool written)
      : env_(env), file_(std::move(file)), written_(written) {}
  int fd() const override { return file_->fd(); }
  const std::string& path() const override { return file_->path(); }
  absl::Status ReadAt(uint64_t offset, std::span<std::byte> out) override {
    if (written_ && IsImage()) {
      env_.CountReadBack(out.size());
    }
    const Meddling meddling = env_.MeddlingWith(path());
    if (meddling.at_read != nullptr && IsImage()) {
      meddling.at_read(offset);
    }
    return file_->ReadAt(offset, out);
  }
  absl::Status WriteAt(uint64_t offset, std::span<const std::byte> data) override {
    HF_RETURN_IF_ERROR(Told("write"));
    const Meddling meddling = env_.MeddlingWith(path());
    if (meddling.at_write != nullptr && IsImage()) {
      meddling.at_write();
    }
    HF_RETURN_IF_ERROR(file_->WriteAt(offset, data));
    constexpr uint64_t kFlipped = 9000;
    if (meddling.flips && IsImage() && offset <= kFlipped && kFlipped < offset + data.size()) {
      const int plain = ::open(path().c_str(), O_RDWR | O_CLOEXEC);
      unsigned char byte = 0;
      EXPECT_EQ(::pread(plain, &byte, 1, kFlipped), 1);
      byte ^= 4;
      EXPECT_EQ(::pwrite(plain, &byte, 1, kFlipped), 1);
      ::close(plain);
    }
    return absl::OkStatus();
  }
  absl::Status Allocate(uint64_t offset, uint64_t bytes) override {
    HF_RETURN_IF_ERROR(Told("allocate"));
    return file_->Allocate(offset, bytes);
  }
  absl::Status Truncate(uint64_t bytes) override { return file_->Truncate(bytes); }
  absl::Status SyncData() override {
    HF_RETURN_IF_ERROR(Told("sync"));
    return file_->SyncData();
  }
  absl::Status Sync() override {
    HF_RETURN_IF_ERROR(Told("sync"));
    return file_->Sync();
  }
  absl::StatusOr<FileInfo> Info() override { return file_->Info(); }
  absl::Status SetOwner(uint32_t uid, uint32_t gid) override { return file_->SetOwner(uid, gid); }
  absl::Status SetMode(uint32_t mode) override { return file_->SetMode(mode); }
  absl::StatusOr<DirectAlignment> Alignment() override { return file_->Alignment(); }
  absl::StatusOr<bool> NobodyElseHasIt() override { return file_->NobodyElseHasIt(); }

 private:
  absl::Status Told(const std::string& call) {
    const Meddling meddling = env_.MeddlingWith(path());
    return meddling.error != 0 && meddling.call == call && IsImage()
               ? ErrnoStatus(meddling.error, call, path())
               : absl::OkStatus();
  }

  bool IsImage() const { return path().find(".safetensors") != std::string::npos; }

  HangingEnv& env_;
  const std::unique_ptr<File> file_;
  const bool written_;
};

inline std::unique_ptr<File> HangingEnv::Meddled(std::unique_ptr<File> file, OpenMode mode) {
  return std::make_unique<MeddledFile>(*this, std::move(file), mode != OpenMode::kRead);
}

// Pages of the file that this machine remembers.
inline size_t PagesInCache(const std::string& path) {
  const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  EXPECT_TRUE(file.valid()) << path;
  const size_t bytes = std::filesystem::file_size(path);
  void* const mapped = ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, file.get(), 0);
  EXPECT_NE(mapped, MAP_FAILED);
  std::vector<unsigned char> present((bytes + 4095) / 4096);
  EXPECT_EQ(::mincore(mapped, bytes, present.data()), 0);
  ::munmap(mapped, bytes);
  return static_cast<size_t>(
      std::count_if(present.begin(), present.end(), [](unsigned char page) { return page & 1; }));
}

class DurableTiersTest : public ::testing::Test {
 protected:
  void SetUp() override {
    config_ = DefaultConfig();
    config_.set_node_name("node");
    config_.set_state_dir(dir_.Path("state"));
    ASSERT_TRUE(std::filesystem::create_directory(config_.state_dir()));
    // Of a node that has been here before: nothing waits until its drives have been read.
    ASSERT_TRUE(WriteFileAtomically(*Env::System(), config_.state_dir() + "/witness",
                                    EncodeFrame(FrameKind::kWitness, ""))
                    .ok());
    for (const char* drive : drives_) {
      config_.mutable_nvme()->add_dirs(dir_.Path(drive));
    }
    config_.mutable_nvme()->set_bytes_max(uint64_t{1} << 30);
    config_.mutable_nvme()->set_engine(v1::NvmeConfig::IO_ENGINE_THREADS);
    config_.mutable_remote()->set_dir(dir_.Path("remote"));
    config_.mutable_remote()->set_writers(writers_);
    config_.mutable_remote()->set_piece_bytes(remote_piece_bytes_);
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
    env_.Meddle({});
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
    const SlotContent content = MakeSlotContent(step, 1, elements_);
    if (sealed_.insert(step).second) {
      const uint64_t bytes = content.record_offset + content.sample.record_file.size();
      EXPECT_EQ(SealSlot(*slots_, step, content, (bytes / kSlot + 1) * kSlot), absl::OkStatus());
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
  void AwaitIdle() {
    const auto until = std::chrono::steady_clock::now() + kPatience;
    while (!tiers_->idle() && std::chrono::steady_clock::now() < until) {
      std::this_thread::yield();
    }
    EXPECT_TRUE(tiers_->idle());
  }
  void LookAtIdlePlaces() {
    AwaitIdle();
    tiers_->LookAtPlaces();
  }
  // "" or what is wrong with it.
  std::string Verified(const FlushShard& flush, const FlushEnded& ended) {
    ReadableShard shard;
    shard.copy = ended.copy.copy;
    shard.copy.job_name = flush.key.job_name;
    shard.copy.world_size = flush.key.world_size;
    shard.tier = flush.to;
    const absl::StatusOr<std::string> verified =
        tiers_->Verify(shard, [](uint64_t) { return true; });
    return verified.ok() ? *verified : Message(verified.status());
  }
  std::string DirOf(TierKind tier) const {
    return dir_.Path(tier == TierKind::kNvme ? "nvme" : "remote");
  }
  // Files below it that are no copy, and not what is always there.
  std::vector<std::string> Leftovers(TierKind tier) const {
    std::vector<std::string> found;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(DirOf(tier))) {
      const std::string path = entry.path();
      const bool kept =
          path.find("/intents/") != std::string::npos || path.find("/pool/") != std::string::npos;
      if (entry.is_regular_file() && (kept || path.ends_with(".tmp"))) {
        found.push_back(path);
      }
    }
    return found;
  }
  static size_t OpenFiles() {
    size_t files = 0;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
      std::error_code closed;
      files += std::filesystem::read_symlink(entry.path(), closed).string().rfind("/", 0) == 0;
    }
    return files;
  }
  // No more than before are left. (A thread closes what it opened a moment after it is idle: so it
  // may be fewer, too.)
  static void AwaitOpenFiles(size_t before) {
    const auto until = std::chrono::steady_clock::now() + kPatience;
    while (OpenFiles() > before && std::chrono::steady_clock::now() < until) {
      std::this_thread::yield();
    }
    EXPECT_LE(OpenFiles(), before);
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
  uint64_t elements_ = 3000;
  uint32_t writers_ = 1;
  uint64_t remote_piece_bytes_ = uint64_t{4} << 20;
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

}  // namespace holdfast
