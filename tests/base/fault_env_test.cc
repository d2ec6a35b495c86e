#include "base/fault_env.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <cstring>

#include "base/status.h"

namespace holdfast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::span<const std::byte> Bytes(std::string_view text) {
  return std::as_bytes(std::span<const char>(text));
}

class FaultEnvTest : public ::testing::Test {
 protected:
  FaultEnvTest() { EXPECT_TRUE(env_.CreateDirectories("/d", 0700).ok()); }

  std::unique_ptr<File> Create(const std::string& path, std::string_view data) {
    auto file = *env_.Open(path, OpenMode::kCreateExclusive);
    EXPECT_TRUE(file->WriteAt(0, Bytes(data)).ok());
    return file;
  }
  std::unique_ptr<File> CreateDurable(const std::string& path, std::string_view data) {
    auto file = Create(path, data);
    EXPECT_TRUE(file->Sync().ok());
    EXPECT_TRUE(env_.SyncDirectory(ParentDirectory(path)).ok());
    return file;
  }
  std::string Read(const std::string& path) {
    const absl::StatusOr<std::string> data = ReadFile(env_, path, 1 << 20);
    return data.ok() ? *data : "no file";
  }

  FaultEnv env_;
};

TEST_F(FaultEnvTest, PowerLossKeepsWhatWasSyncedAndNothingElse) {
  CreateDurable("/d/synced", "1");
  Create("/d/unsynced", "2");
  env_.Crash();
  EXPECT_EQ(Read("/d/synced"), "1");
  EXPECT_THAT(*env_.List("/d"), ElementsAre("synced"));
}

TEST_F(FaultEnvTest, ADurableNameOfUnsyncedDataIsAnEmptyFile) {
  Create("/d/f.tmp", "data");
  ASSERT_TRUE(env_.Rename("/d/f.tmp", "/d/f").ok());
  ASSERT_TRUE(env_.SyncDirectory("/d").ok());
  env_.Crash();
  EXPECT_EQ(Read("/d/f"), "");
}

TEST_F(FaultEnvTest, SyncedDataWithoutADurableNameIsGone) {
  ASSERT_TRUE(Create("/d/f", "data")->Sync().ok());
  env_.Crash();
  EXPECT_EQ(Read("/d/f"), "no file");
}

TEST_F(FaultEnvTest, WritesSinceTheLastSyncAreLost) {
  const auto file = CreateDurable("/d/f", "old!");
  ASSERT_TRUE(file->WriteAt(0, Bytes("new and longer")).ok());
  EXPECT_EQ(Read("/d/f"), "new and longer");
  env_.Crash();
  EXPECT_EQ(Read("/d/f"), "old!");
}

TEST_F(FaultEnvTest, WritesThroughMappingsAreUnsyncedToo) {
  const auto file = CreateDurable("/d/f", "old!");
  const auto mapping = *env_.Map(*file, 0, 4, true);
  std::memcpy(mapping->data(), "new!", 4);
  EXPECT_EQ(Read("/d/f"), "new!");
  env_.Crash();
  EXPECT_EQ(Read("/d/f"), "old!");
  std::memcpy(mapping->data(), "gone", 4);  // came loose
  EXPECT_EQ(Read("/d/f"), "old!");
}

TEST_F(FaultEnvTest, SyncingAFileSyncsItsMappings) {
  const auto file = CreateDurable("/d/f", "old!");
  const auto mapping = *env_.Map(*file, 0, 4, true);
  std::memcpy(mapping->data(), "new!", 4);
  ASSERT_TRUE(file->SyncData().ok());
  env_.Crash();
  EXPECT_EQ(Read("/d/f"), "new!");
}

TEST_F(FaultEnvTest, RenameIsDurableOnlyAfterTheDirectorysSync) {
  CreateDurable("/d/old", "old");
  CreateDurable("/d/new", "new");
  ASSERT_TRUE(env_.Rename("/d/new", "/d/old").ok());
  EXPECT_EQ(Read("/d/old"), "new");
  env_.Crash();
  EXPECT_EQ(Read("/d/old"), "old");
  EXPECT_EQ(Read("/d/new"), "new");
  ASSERT_TRUE(env_.Rename("/d/new", "/d/old").ok());
  ASSERT_TRUE(env_.SyncDirectory("/d").ok());
  env_.Crash();
  EXPECT_THAT(*env_.List("/d"), ElementsAre("old"));
  EXPECT_EQ(Read("/d/old"), "new");
}

TEST_F(FaultEnvTest, UnlinkIsDurableOnlyAfterTheDirectorysSync) {
  CreateDurable("/d/f", "x");
  ASSERT_TRUE(env_.Unlink("/d/f").ok());
  env_.Crash();
  EXPECT_EQ(Read("/d/f"), "x");
  ASSERT_TRUE(env_.Unlink("/d/f").ok());
  ASSERT_TRUE(env_.SyncDirectory("/d").ok());
  env_.Crash();
  EXPECT_EQ(Read("/d/f"), "no file");
}

TEST_F(FaultEnvTest, HardLinksAreEntriesOfTheirOwn) {
  const auto file = CreateDurable("/d/a", "x");
  ASSERT_TRUE(env_.CreateDirectories("/e", 0700).ok());
  ASSERT_TRUE(env_.Link("/d/a", "/e/b").ok());
  ASSERT_TRUE(env_.SyncDirectory("/e").ok());
  ASSERT_TRUE(env_.Link("/d/a", "/e/c").ok());
  env_.Crash();
  EXPECT_THAT(*env_.List("/e"), ElementsAre("b"));
  EXPECT_EQ(env_.Info("/d/a")->links, 2u);
  EXPECT_EQ(env_.Info("/d/a")->inode, env_.Info("/e/b")->inode);
}

TEST_F(FaultEnvTest, MovingBetweenDirectoriesNeedsBothSyncs) {
  ASSERT_TRUE(env_.CreateDirectories("/e", 0700).ok());
  CreateDurable("/d/f", "x");
  ASSERT_TRUE(env_.Rename("/d/f", "/e/f").ok());
  ASSERT_TRUE(env_.SyncDirectory("/e").ok());
  env_.Crash();
  EXPECT_EQ(Read("/d/f"), "x");
  EXPECT_EQ(Read("/e/f"), "x");
}

TEST_F(FaultEnvTest, ADirectoryMovedWithHalfTheSyncsIsInOnePlace) {
  ASSERT_TRUE(env_.CreateDirectories("/a/b", 0700).ok());
  ASSERT_TRUE(env_.Rename("/a/b", "/b").ok());
  ASSERT_TRUE(env_.SyncDirectory("/").ok());
  ASSERT_TRUE(env_.Rename("/a", "/b/a").ok());
  ASSERT_TRUE(env_.SyncDirectory("/b").ok());
  env_.Crash();
  EXPECT_TRUE(env_.List("/").ok());
  EXPECT_TRUE(env_.Info("/b").ok() || env_.Info("/a/b").ok());
}

TEST_F(FaultEnvTest, NewDirectoriesVanishWithAllThatIsInThemUntilTheirParentIsSynced) {
  ASSERT_TRUE(env_.CreateDirectory("/d/sub", 0700).ok());
  CreateDurable("/d/sub/f", "x");
  env_.Crash();
  EXPECT_EQ(env_.Info("/d/sub").status().code(), absl::StatusCode::kNotFound);
}

TEST_F(FaultEnvTest, CreateDirectoriesIsDurable) {
  ASSERT_TRUE(env_.CreateDirectories("/x/y/z", 0700).ok());
  env_.Crash();
  EXPECT_TRUE(env_.Info("/x/y/z").ok());
}

TEST_F(FaultEnvTest, RemovedDirectoriesComeBackUntilTheirParentIsSynced) {
  ASSERT_TRUE(env_.CreateDirectories("/d/sub", 0700).ok());
  ASSERT_TRUE(env_.RemoveDirectory("/d/sub").ok());
  env_.Crash();
  EXPECT_TRUE(env_.Info("/d/sub").ok());
}

TEST_F(FaultEnvTest, AfterACrashOpenFilesAreStaleAndLocksFree) {
  const auto file = CreateDurable("/d/f", "x");
  const auto lock = env_.Lock("/d/lock");
  ASSERT_TRUE(lock.ok());
  ASSERT_TRUE(env_.SyncDirectory("/d").ok());
  EXPECT_FALSE(env_.Lock("/d/lock").ok());
  env_.KillProcess();
  std::byte out{};
  EXPECT_FALSE(file->ReadAt(0, {&out, 1}).ok());
  EXPECT_FALSE(file->WriteAt(0, {&out, 1}).ok());
  EXPECT_FALSE(file->Sync().ok());
  EXPECT_FALSE(env_.Map(*file, 0, 1, false).ok());
  EXPECT_EQ(file->fd(), -1);
  {
    const auto again = env_.Lock("/d/lock");
    EXPECT_TRUE(again.ok());
    EXPECT_FALSE(env_.Lock("/d/lock").ok());
  }
  EXPECT_TRUE(env_.Lock("/d/lock").ok());
}

TEST_F(FaultEnvTest, AStaleLockDoesNotFreeALaterOne) {
  auto stale = *env_.Lock("/d/lock");
  env_.KillProcess();
  const auto held = env_.Lock("/d/lock");
  ASSERT_TRUE(held.ok());
  stale.reset();
  EXPECT_FALSE(env_.Lock("/d/lock").ok());
}

TEST_F(FaultEnvTest, KillProcessKeepsWhatWasWritten) {
  Create("/d/f", "unsynced");
  const auto file = *env_.Open("/d/f", OpenMode::kReadWrite);
  const auto mapping = *env_.Map(*file, 0, 8, true);
  std::memcpy(mapping->data(), "by map..", 8);
  env_.KillProcess();
  EXPECT_EQ(Read("/d/f"), "by map..");
}

TEST_F(FaultEnvTest, MemoryLosesAllAtACrashAndNothingAtADeath) {
  FaultEnv env(FaultEnv::Durability::kNone);
  ASSERT_TRUE(env.CreateDirectories("/shm", 0700).ok());
  ASSERT_TRUE(WriteFileAtomically(env, "/shm/f", "x").ok());
  env.KillProcess();
  EXPECT_EQ(*ReadFile(env, "/shm/f", 10), "x");
  env.Crash();
  EXPECT_THAT(*env.List("/"), IsEmpty());
  EXPECT_EQ(env.Filesystem("/")->type, "tmpfs");
}

TEST_F(FaultEnvTest, FailCallFailsThatCallOnly) {
  env_.FailCall(2, ENOSPC);
  EXPECT_TRUE(env_.Info("/d").ok());
  const absl::Status status = env_.Info("/d").status();
  EXPECT_EQ(Message(status), "stat '/d': No space left on device (ENOSPC)");
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(env_.Info("/d").ok());
}

TEST_F(FaultEnvTest, FailMatchingFailsUntilCleared) {
  env_.FailMatching("rename /d/a", EIO);
  Create("/d/a", "x");
  Create("/d/b", "x");
  EXPECT_EQ(env_.Rename("/d/a", "/d/c").code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(env_.RenameNoReplace("/d/a", "/d/c").code(), absl::StatusCode::kDataLoss);
  EXPECT_TRUE(env_.Rename("/d/b", "/d/c").ok());
  env_.FailMatching("rename /d/a", 0);
  EXPECT_TRUE(env_.Rename("/d/a", "/d/c").ok());
}

TEST_F(FaultEnvTest, AFailedWriteIsTorn) {
  const auto file = Create("/d/f", "........");
  env_.FailCall(1, EIO);
  EXPECT_FALSE(file->WriteAt(0, Bytes("12345678")).ok());
  EXPECT_EQ(Read("/d/f"), "1234....");
}

TEST_F(FaultEnvTest, AfterAFailedSyncNothingMoreBecomesDurable) {
  const auto file = CreateDurable("/d/f", "old");
  ASSERT_TRUE(file->WriteAt(0, Bytes("new")).ok());
  env_.FailMatching("fdatasync /d/f", EIO);
  EXPECT_EQ(file->SyncData().code(), absl::StatusCode::kDataLoss);
  env_.FailMatching("fdatasync /d/f", 0);
  EXPECT_TRUE(file->SyncData().ok());
  env_.Crash();
  EXPECT_EQ(Read("/d/f"), "old");
}

TEST_F(FaultEnvTest, FromTheCrashPointOnEverythingFails) {
  env_.CrashAtCall(2);
  EXPECT_TRUE(env_.Info("/d").ok());
  EXPECT_EQ(env_.Info("/d").status().code(), absl::StatusCode::kDataLoss);
  EXPECT_FALSE(env_.List("/d").ok());
  EXPECT_FALSE(env_.SyncDirectory("/d").ok());
  env_.Crash();
  EXPECT_TRUE(env_.Info("/d").ok());
}

TEST_F(FaultEnvTest, EveryCallCounts) {
  int before = env_.calls();
  const auto next = [&] {
    const int made = env_.calls() - before;
    before = env_.calls();
    return made;
  };
  const auto file = *env_.Open("/d/f", OpenMode::kCreateExclusive);
  EXPECT_EQ(next(), 1);
  ASSERT_TRUE(file->WriteAt(0, Bytes("x")).ok());
  EXPECT_EQ(next(), 1);
  ASSERT_TRUE(env_.Map(*file, 0, 1, true).ok());
  EXPECT_EQ(next(), 1);
  ASSERT_TRUE(env_.CreateDirectories("/d/x", 0700).ok());
  EXPECT_EQ(next(), 4);  // "/d": create, stat; "/d/x": create, sync "/d"
}

TEST_F(FaultEnvTest, FlippedBitsStay) {
  CreateDurable("/d/f", "abc");
  ASSERT_TRUE(env_.FlipBit("/d/f", 1, 0).ok());
  EXPECT_EQ(Read("/d/f"), "acc");
  env_.Crash();
  EXPECT_EQ(Read("/d/f"), "acc");
  EXPECT_EQ(env_.FlipBit("/d/f", 3, 0).code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(env_.FlipBit("/d/f", 0, 8).code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(env_.FlipBit("/d/none", 0, 0).code(), absl::StatusCode::kNotFound);
  EXPECT_FALSE(env_.FlipBit("/d", 0, 0).ok());
}

TEST_F(FaultEnvTest, FlippedBitsShowInMappings) {
  const auto file = CreateDurable("/d/f", "abc");
  const auto mapping = *env_.Map(*file, 0, 3, false);
  ASSERT_TRUE(env_.FlipBit("/d/f", 0, 1).ok());
  EXPECT_EQ(mapping->data()[0], std::byte{'c'});
}

TEST_F(FaultEnvTest, TheFileSystemHasASize) {
  env_.SetBytesTotal(100);
  auto file = Create("/d/f", std::string(60, 'x'));
  EXPECT_EQ(env_.Filesystem("/d")->bytes_free, 40u);
  EXPECT_TRUE(file->WriteAt(60, Bytes(std::string(40, 'x'))).ok());
  EXPECT_EQ(file->WriteAt(100, Bytes("y")).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(file->Allocate(0, 101).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(file->WriteAt(0, Bytes("overwriting takes no room")).ok());
  ASSERT_TRUE(env_.Unlink("/d/f").ok());
  EXPECT_EQ(env_.Filesystem("/d")->bytes_free, 0u);  // open still
  file.reset();
  EXPECT_EQ(env_.Filesystem("/d")->bytes_free, 100u);
}

TEST_F(FaultEnvTest, HolesTakeNoRoomUntilPopulated) {
  env_.SetBytesTotal(8192);
  const auto file = Create("/d/f", "");
  ASSERT_TRUE(file->Truncate(16384).ok());
  const auto mapping = *env_.Map(*file, 0, 16384, true);
  EXPECT_EQ(env_.Populate(*mapping, 0, 16384).code(), absl::StatusCode::kResourceExhausted);
}

TEST_F(FaultEnvTest, FilesAndMappingsOfAnotherEnvAreRefused) {
  FaultEnv other;
  const auto file = Create("/d/f", "abc");
  const auto mapping = *env_.Map(*file, 0, 3, true);
  EXPECT_EQ(Env::System()->Populate(*mapping, 0, 3).code(), absl::StatusCode::kInvalidArgument);
}

// The pattern that the tests of every commit path follow: one run per crash point, with power loss
// and with death.
TEST_F(FaultEnvTest, WriteFileAtomicallyLeavesTheOldOrTheNewAtEveryCrashPoint) {
  int runs = 0;
  for (const bool power_loss : {true, false}) {
    for (int n = 1;; ++n, ++runs) {
      FaultEnv env;
      ASSERT_TRUE(env.CreateDirectories("/d", 0700).ok());
      ASSERT_TRUE(WriteFileAtomically(env, "/d/f", "old").ok());
      const int before = env.calls();
      env.CrashAtCall(n);
      const absl::Status status = WriteFileAtomically(env, "/d/f", "new");
      const bool reached = env.calls() - before >= n;
      power_loss ? env.Crash() : env.KillProcess();
      const std::string after = *ReadFile(env, "/d/f", 10);
      EXPECT_TRUE(after == "old" || after == "new")
          << "crash at call " << n << ": '" << after << "'";
      if (status.ok()) {
        EXPECT_EQ(after, "new") << n;
      }
      // Whatever was left, the next one succeeds.
      EXPECT_TRUE(WriteFileAtomically(env, "/d/f", "next").ok()) << n;
      if (!reached) {
        break;
      }
    }
  }
  EXPECT_GE(runs, 10);
}

// The model has teeth: the same loop finds a writer that leaves out the sync.
TEST_F(FaultEnvTest, TheCrashLoopFindsAMissingSync) {
  int lost = 0;
  for (int n = 1; n <= 5; ++n) {
    FaultEnv env;
    ASSERT_TRUE(env.CreateDirectories("/d", 0700).ok());
    ASSERT_TRUE(WriteFileAtomically(env, "/d/f", "old").ok());
    env.CrashAtCall(n);
    if (auto file = env.Open("/d/f.tmp", OpenMode::kCreateExclusive); file.ok()) {
      const bool done = (*file)->WriteAt(0, Bytes("new")).ok() &&
                        env.Rename("/d/f.tmp", "/d/f").ok() && env.SyncDirectory("/d").ok();
      env.Crash();
      lost += done && *ReadFile(env, "/d/f", 10) != "new" ? 1 : 0;
    }
  }
  EXPECT_GE(lost, 1);
}

}  // namespace
}  // namespace holdfast
