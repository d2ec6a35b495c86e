// The memory tier on the machine's own tmpfs: what only a kernel can show.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <optional>
#include <span>
#include <vector>

#include "base/status.h"
#include "base/units.h"
#include "tests/tiers/memory/memory_harness.h"
#include "tiers/memory/slot_files.h"

namespace holdfast {
namespace {

using testing::HasSubstr;

class TmpfsTest : public testing::Test {
 protected:
  std::unique_ptr<SlotStore> Open(uint64_t bytes_max = 8 * kSlot) {
    absl::StatusOr<std::unique_ptr<SlotStore>> store =
        SlotStore::Open(StoreOptions(*Env::System(), dir(), bytes_max));
    EXPECT_TRUE(store.ok()) << ToString(store.status());
    EXPECT_TRUE((*store)->Scan().ok());
    return *std::move(store);
  }
  std::string dir() const { return directory_.path() + "/holdfast"; }

  SharedMemoryDirectory directory_;
};

// One entry per page: whether it is in memory.
std::vector<bool> Resident(int fd, uint64_t bytes) {
  const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  void* const data = ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd, 0);
  EXPECT_NE(data, MAP_FAILED);
  std::vector<unsigned char> pages(bytes / page);
  EXPECT_EQ(::mincore(data, bytes, pages.data()), 0);
  ::munmap(data, bytes);
  std::vector<bool> resident;
  for (const unsigned char one : pages) {
    resident.push_back((one & 1) != 0);
  }
  return resident;
}

size_t CountTrue(const std::vector<bool>& flags) {
  size_t count = 0;
  for (const bool flag : flags) {
    count += flag ? 1 : 0;
  }
  return count;
}

TEST_F(TmpfsTest, APopulatedSlotStaysResidentOverRefills) {
  const std::unique_ptr<SlotStore> store = Open();
  ASSERT_TRUE(store->Create(1, 4 * kSlot).ok());
  const UniqueFd fd = store->OpenImage(1, true).value();
  EXPECT_EQ(CountTrue(Resident(fd.get(), 4 * kSlot)), 0u) << "reserved, not yet populated";
  for (uint64_t at = 0; at < 4 * kSlot; at += kSlot) {
    ASSERT_TRUE(store->Populate(1, at, kSlot).ok());
  }
  const std::vector<bool> all(4 * kSlot / static_cast<size_t>(::sysconf(_SC_PAGESIZE)), true);
  EXPECT_EQ(Resident(fd.get(), 4 * kSlot), all);
  struct stat before = {};
  ASSERT_EQ(::fstat(fd.get(), &before), 0);
  for (Generation generation = 1; generation <= 3; ++generation) {
    const SlotContent content = MakeSlotContent(generation, generation, kSlot / 2);
    ASSERT_TRUE(store->WriteNote(1, NoteOf(generation, 4 * kSlot)).ok());
    ASSERT_TRUE(FillSlot(*store, 1, content).ok());
    ASSERT_TRUE(PublishSlot(*store, 1, content).ok());
    ASSERT_TRUE(store->RemoveRecord(1).ok());
    struct stat after = {};
    ASSERT_EQ(::stat(JoinPath(dir(), "slot-000001").c_str(), &after), 0);
    EXPECT_EQ(after.st_ino, before.st_ino);
    EXPECT_EQ(after.st_blocks, before.st_blocks);
    EXPECT_EQ(Resident(fd.get(), 4 * kSlot), all) << "generation " << generation;
  }
}

TEST_F(TmpfsTest, TheTierRefillsTheSlotThatFits) {
  const std::unique_ptr<SlotStore> store = Open();
  const std::unique_ptr<MemoryTier> tier = MemoryTier::Start({.store = store.get()}).value();
  const auto publish = [&](Step step, uint64_t elements) {
    const SlotContent content = MakeSlotContent(step, 1, elements);
    const std::unique_ptr<CopyWriter> writer =
        tier->Create({.id = content.expected.id, .image_bytes = content.sample.image.size()})
            .value();
    EXPECT_TRUE(
        writer->WriteAt(0, std::as_bytes(std::span<const char>(content.sample.image))).ok());
    EXPECT_TRUE(writer->Publish(content.sample.record_file).ok());
    return store->Find(content.expected.id).value();
  };
  const StoredSlot large = publish(1, kSlot);
  const StoredSlot small = publish(2, 100);
  ASSERT_TRUE(tier->Remove(small.record->id).ok());
  ASSERT_TRUE(tier->Remove(large.record->id).ok());
  EXPECT_EQ(tier->bytes_free_slots(), large.bytes + small.bytes);
  const StoredSlot again = publish(3, kSlot);
  EXPECT_EQ(again.slot, large.slot);
  EXPECT_GT(again.record->generation, small.record->generation)
      << "generations are the tier's, never used twice";
  EXPECT_EQ(store->bytes_used(), large.bytes + small.bytes);
  ASSERT_TRUE(tier->DeleteFreeSlots().ok());
  EXPECT_EQ(tier->bytes_free_slots(), 0u);
  EXPECT_EQ(store->bytes_used(), large.bytes);
}

TEST_F(TmpfsTest, OnlyTheOwnerCanOpenWhatLiesThere) {
  const std::unique_ptr<SlotStore> store = Open();
  ASSERT_TRUE(SealSlot(*store, 1, MakeSlotContent(1, 1)).ok());
  struct stat st = {};
  ASSERT_EQ(::stat(dir().c_str(), &st), 0);
  EXPECT_EQ(st.st_mode & 07777, 0700u);
  for (const char* name : {"slot-000001", "slot-000001.note", "slot-000001.record", "lock"}) {
    ASSERT_EQ(::stat(JoinPath(dir(), name).c_str(), &st), 0) << name;
    EXPECT_EQ(st.st_mode & 07777, 0600u) << name;
  }
  const UniqueFd read_only = store->OpenImage(1, false).value();
  EXPECT_LT(::pwrite(read_only.get(), "x", 1, 0), 0);
  EXPECT_EQ(::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, read_only.get(), 0),
            MAP_FAILED);
}

TEST_F(TmpfsTest, RefusesADirectoryThatOthersMayWrite) {
  ASSERT_EQ(::mkdir(dir().c_str(), 0700), 0);
  ASSERT_EQ(::chmod(dir().c_str(), 0777), 0);
  const absl::Status status = SlotStore::Open(StoreOptions(*Env::System(), dir())).status();
  EXPECT_TRUE(absl::IsPermissionDenied(status));
  EXPECT_THAT(Message(status), HasSubstr("mode 0777"));
  ASSERT_EQ(::rmdir(dir().c_str()), 0);
  ASSERT_EQ(::mkdir((directory_.path() + "/elsewhere").c_str(), 0700), 0);
  ASSERT_EQ(::symlink("elsewhere", dir().c_str()), 0);
  EXPECT_TRUE(
      absl::IsFailedPrecondition(SlotStore::Open(StoreOptions(*Env::System(), dir())).status()));
}

TEST_F(TmpfsTest, RefusesADisk) {
  char path[] = "/tmp/holdfast-test-XXXXXX";
  ASSERT_NE(::mkdtemp(path), nullptr);
  const std::string type = Env::System()->Filesystem(path).value().type;
  const absl::Status status =
      SlotStore::Open(StoreOptions(*Env::System(), std::string(path) + "/slots", kSlot)).status();
  ::rmdir((std::string(path) + "/slots").c_str());
  ::rmdir(path);
  if (type == "tmpfs") {
    GTEST_SKIP() << "/tmp is a tmpfs here";
  }
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << ToString(status);
  EXPECT_THAT(Message(status), HasSubstr("on " + type));
}

TEST_F(TmpfsTest, ASecondDaemonIsRefusedUntilTheFirstIsGone) {
  int pipes[2];
  ASSERT_EQ(::pipe2(pipes, O_CLOEXEC), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const absl::StatusOr<std::unique_ptr<SlotStore>> store =
        SlotStore::Open(StoreOptions(*Env::System(), dir()));
    const char answer = store.ok() ? 'y' : 'n';
    [[maybe_unused]] const ssize_t written = ::write(pipes[1], &answer, 1);
    for (;;) {
      ::pause();
    }
  }
  char answer = 0;
  ASSERT_EQ(::read(pipes[0], &answer, 1), 1);
  EXPECT_EQ(answer, 'y');
  const absl::Status status = SlotStore::Open(StoreOptions(*Env::System(), dir())).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << ToString(status);
  EXPECT_THAT(Message(status), HasSubstr("pid " + std::to_string(child)));
  ASSERT_EQ(::kill(child, SIGKILL), 0);
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  EXPECT_TRUE(SlotStore::Open(StoreOptions(*Env::System(), dir())).ok());
  ::close(pipes[0]);
  ::close(pipes[1]);
}

TEST_F(TmpfsTest, AClientThatCutsItsSlotHarmsOnlyItsCopy) {
  const std::unique_ptr<SlotStore> store = Open();
  ASSERT_TRUE(SealSlot(*store, 1, MakeSlotContent(1, 1)).ok());
  const UniqueFd clients = store->OpenImage(1, true).value();
  ASSERT_TRUE(SealSlot(*store, 2, MakeSlotContent(2, 1)).ok());
  const std::unique_ptr<MemoryTier> tier = MemoryTier::Start({.store = store.get()}).value();
  const std::unique_ptr<CopyReader> reader = tier->Open(MakeSlotContent(1, 1).expected.id).value();
  ASSERT_EQ(::ftruncate(clients.get(), 0), 0);
  std::byte byte{};
  EXPECT_TRUE(absl::IsDataLoss(reader->ReadAt(0, {&byte, 1})));
  EXPECT_TRUE(absl::IsDataLoss(reader->Confirm()));
  EXPECT_TRUE(absl::IsDataLoss(tier->Open(MakeSlotContent(1, 1).expected.id).status()));
  const std::unique_ptr<CopyReader> other = tier->Open(MakeSlotContent(2, 1).expected.id).value();
  EXPECT_TRUE(other->ReadAt(0, {&byte, 1}).ok());
  EXPECT_TRUE(other->Confirm().ok());
}

// A tmpfs of 8 MiB in a mount namespace of this process's own, which goes with the process.
class SmallTmpfsTest : public testing::Test {
 protected:
  static constexpr uint64_t kBytes = 4 * kSlot;

  void SetUp() override {
    char path[] = "/tmp/holdfast-test-XXXXXX";
    ASSERT_NE(::mkdtemp(path), nullptr);
    mount_ = path;
    static const bool own_namespace =
        ::unshare(CLONE_NEWNS) == 0 &&
        ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0;
    mounted_ = own_namespace &&
               ::mount("tmpfs", path, "tmpfs", MS_NOSUID | MS_NODEV, "size=8m,mode=0700") == 0;
    if (!mounted_) {
      GTEST_SKIP() << "no right to mount a tmpfs: " << std::strerror(errno)
                   << "; FaultEnv plays one in slot_store_test";
    }
    store_ = SlotStore::Open(StoreOptions(*Env::System(), dir(), kBytes)).value();
    ASSERT_TRUE(store_->Scan().ok());
  }
  void TearDown() override {
    store_.reset();
    if (mounted_) {
      ::umount2(mount_.c_str(), MNT_DETACH);
    }
    ::rmdir(mount_.c_str());
  }

  std::string dir() const { return mount_ + "/holdfast"; }
  bool Exists(const std::string& name) { return Env::System()->Info(JoinPath(dir(), name)).ok(); }
  // Takes all but `left` bytes of what is free.
  void FillUp(uint64_t left) {
    const uint64_t free = Env::System()->Filesystem(mount_).value().bytes_free;
    filler_ = Env::System()->Open(mount_ + "/filler", OpenMode::kCreateExclusive).value();
    ASSERT_TRUE(filler_->Allocate(0, free - left).ok());
  }
  // What is kept back for small files has been used up.
  void LoseTheReserve() {
    ASSERT_TRUE(
        Env::System()->Open(dir() + "/reserve", OpenMode::kReadWrite).value()->Truncate(0).ok());
  }
  void MakeRoom() { ASSERT_TRUE(filler_->Truncate(0).ok()); }

  std::string mount_;
  bool mounted_ = false;
  std::unique_ptr<SlotStore> store_;
  std::unique_ptr<File> filler_;
};

TEST_F(SmallTmpfsTest, IsTooSmallForItsBudget) {
  store_.reset();
  const absl::Status status =
      SlotStore::Open(StoreOptions(*Env::System(), dir(), 5 * kSlot)).status();
  EXPECT_TRUE(absl::IsResourceExhausted(status));
  EXPECT_THAT(Message(status), HasSubstr("holds 8 MiB"));
}

TEST_F(SmallTmpfsTest, AFullTmpfsRefusesASlotAndKeepsNothingOfIt) {
  FillUp(kSlot + kSlot / 2);
  const uint64_t free = Env::System()->Filesystem(mount_).value().bytes_free;
  const absl::Status status = store_->Create(1, 2 * kSlot);
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << ToString(status);
  EXPECT_THAT(Message(status), HasSubstr("4 MiB wanted"));
  EXPECT_FALSE(Exists("slot-000001"));
  EXPECT_EQ(Env::System()->Filesystem(mount_).value().bytes_free, free);
  EXPECT_TRUE(store_->Create(1, kSlot).ok()) << "what fits is made";
  MakeRoom();
  EXPECT_TRUE(store_->Create(2, 2 * kSlot).ok());
}

TEST_F(SmallTmpfsTest, ImagesLeaveRoomForTheirRecords) {
  FillUp(kSlot + 16 * kKiB);
  EXPECT_TRUE(absl::IsResourceExhausted(store_->Create(1, kSlot)))
      << "the image would just fit, and could never be sealed";
  MakeRoom();
  EXPECT_TRUE(SealSlot(*store_, 1, MakeSlotContent(1, 1)).ok());
}

TEST_F(SmallTmpfsTest, FilledUpByOthersItStillTakesNotesAndRecords) {
  ASSERT_TRUE(store_->Create(1, kSlot).ok());
  FillUp(0);
  for (Generation generation = 1; generation <= 20; ++generation) {
    const SlotContent content = MakeSlotContent(generation, generation);
    ASSERT_TRUE(store_->WriteNote(1, NoteOf(generation, kSlot)).ok());
    ASSERT_TRUE(FillSlot(*store_, 1, content).ok());
    ASSERT_TRUE(PublishSlot(*store_, 1, content).ok());
    ASSERT_TRUE(store_->RemoveRecord(1).ok());
  }
}

TEST_F(SmallTmpfsTest, WithoutRoomForItARecordIsRefusedAndLaterPublished) {
  const SlotContent content = MakeSlotContent(1, 1);
  ASSERT_TRUE(store_->Create(1, kSlot).ok());
  ASSERT_TRUE(store_->WriteNote(1, NoteOf(1, kSlot)).ok());
  ASSERT_TRUE(FillSlot(*store_, 1, content).ok());
  LoseTheReserve();
  FillUp(0);
  const absl::Status status = PublishSlot(*store_, 1, content).status();
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << ToString(status);
  EXPECT_FALSE(Exists("slot-000001.record"));
  EXPECT_FALSE(Exists("slot-000001.record.tmp"));
  EXPECT_TRUE(absl::IsResourceExhausted(store_->WriteNote(1, NoteOf(2, kSlot))));
  MakeRoom();
  EXPECT_TRUE(PublishSlot(*store_, 1, content).ok()) << "the note of its filling is still the one";
}

TEST_F(SmallTmpfsTest, PopulateReportsWhatTheKernelWouldKillFor) {
  ASSERT_TRUE(store_->Create(1, 2 * kSlot).ok());
  // The client gives its reserved memory back, and somebody else takes it.
  const UniqueFd clients = store_->OpenImage(1, true).value();
  ASSERT_EQ(::fallocate(clients.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 2 * kSlot),
            0);
  FillUp(0);
  const absl::Status status = store_->Populate(1, 0, kSlot);
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << ToString(status);
  MakeRoom();
  EXPECT_TRUE(store_->Populate(1, 0, kSlot).ok());
}

}  // namespace
}  // namespace holdfast
