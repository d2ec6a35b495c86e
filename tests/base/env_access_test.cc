// What durable tiers ask of an Env beyond reading and writing: links that are not followed, direct
// I/O, owners and modes, leases, long directories, striping. On the system and on FaultEnv; then
// the ways in which FaultEnv can do less, or hang.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <thread>

#include "absl/strings/escaping.h"
#include "base/env.h"
#include "base/env_checks.h"
#include "base/fault_env.h"
#include "base/status.h"
#include "tests/base/temporary_directory.h"

namespace holdfast {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Not;

std::span<const std::byte> Bytes(std::string_view text) {
  return std::as_bytes(std::span<const char>(text));
}

class EnvAccessTest : public testing::TestWithParam<bool> {
 protected:
  EnvAccessTest() {
    if (GetParam()) {
      directory_ = std::make_unique<TemporaryDirectory>();
      env_ = Env::System();
      dir_ = directory_->path();
    } else {
      faults_ = std::make_unique<FaultEnv>();
      env_ = faults_.get();
      dir_ = "/d";
      EXPECT_TRUE(env_->CreateDirectories(dir_, 0700).ok());
    }
  }
  std::unique_ptr<File> Create(const std::string& name, std::string_view data) {
    auto file = env_->Open(dir_ + "/" + name, OpenMode::kCreateExclusive).value();
    EXPECT_TRUE(file->WriteAt(0, Bytes(data)).ok());
    return file;
  }

  std::unique_ptr<TemporaryDirectory> directory_;
  std::unique_ptr<FaultEnv> faults_;
  Env* env_ = nullptr;
  std::string dir_;
};

INSTANTIATE_TEST_SUITE_P(Envs, EnvAccessTest, testing::Values(false, true),
                         [](const testing::TestParamInfo<bool>& real) {
                           return real.param ? "System" : "FaultEnv";
                         });

TEST_P(EnvAccessTest, ModesAreSet) {
  const auto file = Create("f", "x");
  EXPECT_EQ(file->Info()->mode & 07777, 0600u);
  ASSERT_TRUE(file->SetMode(0640).ok());
  EXPECT_EQ(env_->Info(dir_ + "/f")->mode & 07777, 0640u);
  ASSERT_TRUE(file->SetOwner(kKeepOwner, kKeepOwner).ok());
  EXPECT_EQ(file->Info()->uid, ::geteuid());
  ASSERT_TRUE(env_->CreateDirectory(dir_ + "/sub", 0700).ok());
  ASSERT_TRUE(env_->SetDirectoryAccess(dir_ + "/sub", kKeepOwner, kKeepOwner, 0750).ok());
  EXPECT_EQ(env_->Info(dir_ + "/sub")->mode & 07777, 0750u);
  EXPECT_EQ(env_->Info(dir_ + "/sub")->uid, ::geteuid());
  EXPECT_FALSE(env_->SetDirectoryAccess(dir_ + "/f", kKeepOwner, kKeepOwner, 0750).ok());
  EXPECT_TRUE(
      absl::IsNotFound(env_->SetDirectoryAccess(dir_ + "/none", kKeepOwner, kKeepOwner, 0750)));
}

TEST_P(EnvAccessTest, OwnersAreSet) {
  if (GetParam() && ::geteuid() != 0) {
    GTEST_SKIP() << "only root gives files away";
  }
  const auto file = Create("f", "x");
  ASSERT_TRUE(file->SetOwner(1234, 567).ok());
  ASSERT_TRUE(env_->SetDirectoryAccess(dir_, kKeepOwner, 567, 0750).ok());
  EXPECT_EQ(env_->Info(dir_ + "/f")->uid, 1234u);
  EXPECT_EQ(env_->Info(dir_ + "/f")->gid, 567u);
  EXPECT_EQ(env_->Info(dir_)->gid, 567u);
}

TEST_P(EnvAccessTest, AListHasALimit) {
  Create("a", "");
  Create("b", "");
  EXPECT_THAT(*env_->List(dir_, 2), ElementsAre("a", "b"));
  EXPECT_TRUE(absl::IsResourceExhausted(env_->List(dir_, 1).status()));
  EXPECT_THAT(*env_->List(dir_), ElementsAre("a", "b"));
}

TEST_P(EnvAccessTest, ADirectoryThatIsNotEmptyIsAFailedPrecondition) {
  Create("a", "");
  EXPECT_TRUE(absl::IsFailedPrecondition(env_->RemoveDirectory(dir_)));
}

TEST_P(EnvAccessTest, WhoElseHasAFile) {
  auto file = Create("f", "data");
  EXPECT_EQ(*file->NobodyElseHasIt(), true);
  {
    const auto second = env_->Open(dir_ + "/f", OpenMode::kRead);
    EXPECT_EQ(*file->NobodyElseHasIt(), false);
  }
  EXPECT_EQ(*file->NobodyElseHasIt(), true);
  std::unique_ptr<Mapping> mapping;
  {
    const auto second = env_->Open(dir_ + "/f", OpenMode::kRead).value();
    mapping = env_->Map(*second, 0, 4, false).value();
  }
  EXPECT_EQ(*file->NobodyElseHasIt(), false) << "mapped, though closed";
  mapping.reset();
  EXPECT_EQ(*file->NobodyElseHasIt(), true);
}

TEST_P(EnvAccessTest, DirectFilesTellTheirAlignment) {
  EXPECT_TRUE(absl::IsUnimplemented(Create("buffered", "x")->Alignment().status()));
  const auto file = env_->Open(dir_ + "/f", OpenMode::kCreateExclusive, {.direct = true});
  if (absl::IsUnimplemented(file.status())) {
    GTEST_SKIP() << "no direct I/O under /tmp";
  }
  ASSERT_TRUE(file.ok()) << ToString(file.status());
  const absl::StatusOr<DirectAlignment> alignment = (*file)->Alignment();
  ASSERT_TRUE(alignment.ok()) << ToString(alignment.status());
  EXPECT_GT(alignment->memory_bytes, 0u);
  EXPECT_GT(alignment->offset_bytes, 0u);
  constexpr size_t kBytes = 8192;
  ASSERT_LE(std::max(alignment->memory_bytes, alignment->offset_bytes), kBytes);
  const std::unique_ptr<void, decltype(&std::free)> buffer(std::aligned_alloc(kBytes, 2 * kBytes),
                                                           &std::free);
  auto* const data = static_cast<std::byte*>(buffer.get());
  std::fill(data, data + 2 * kBytes, std::byte{7});
  EXPECT_TRUE((*file)->WriteAt(0, {data, kBytes}).ok());
  EXPECT_TRUE((*file)->ReadAt(0, {data + kBytes, kBytes}).ok());
  EXPECT_TRUE(absl::IsInvalidArgument((*file)->WriteAt(1, {data, kBytes})));
  EXPECT_TRUE(absl::IsInvalidArgument((*file)->WriteAt(0, {data, 100})));
}

TEST_P(EnvAccessTest, OnlyLustreHasStriping) {
  const absl::Status status = env_->SetStriping(dir_, {-1, 1u << 20});
  EXPECT_TRUE(absl::IsUnimplemented(status)) << ToString(status);
}

TEST(EnvSymlinkTest, AreNotFollowedWhenAskedNotTo) {
  const TemporaryDirectory directory;
  Env* const env = Env::System();
  ASSERT_TRUE(env->Open(directory.Path("f"), OpenMode::kCreateExclusive).ok());
  ASSERT_EQ(::symlink(directory.Path("f").c_str(), directory.Path("link").c_str()), 0);
  EXPECT_TRUE(env->Open(directory.Path("link"), OpenMode::kRead).ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(
      env->Open(directory.Path("link"), OpenMode::kRead, {.no_symlink = true}).status()));
  EXPECT_TRUE(absl::IsFailedPrecondition(
      ReadFile(*env, directory.Path("link"), 10, {.no_symlink = true}).status()));
  ASSERT_EQ(::symlink(directory.path().c_str(), directory.Path("dir").c_str()), 0);
  EXPECT_FALSE(env->SetDirectoryAccess(directory.Path("dir"), kKeepOwner, kKeepOwner, 0700).ok());
}

// lov_user_md_v1 of lustre_user.h, field by field.
TEST(StripingTest, IsEncodedAsLustreReadsIt) {
  EXPECT_EQ(absl::BytesToHexString(EncodeLustreStriping({-1, 4u << 20})),
            "d00bd10b"                          // magic
            "01000000"                          // RAID 0
            "00000000000000000000000000000000"  // object id
            "00004000"                          // stripe size
            "ffff"                              // all servers
            "ffff");                            // any first
  EXPECT_EQ(absl::BytesToHexString(EncodeLustreStriping({8, 1u << 20})).substr(48),
            "000010000800ffff");
}

// ---- What FaultEnv can be told ----

class FaultRulesTest : public testing::Test {
 protected:
  FaultRulesTest() {
    EXPECT_TRUE(env_.CreateDirectories("/d", 0700).ok());
    EXPECT_TRUE(env_.Open("/d/f", OpenMode::kCreateExclusive).ok());
  }
  FaultEnv env_;
};

TEST_F(FaultRulesTest, FileSystemsThatCanDoLess) {
  env_.SetHardLinks(false);
  EXPECT_TRUE(absl::IsPermissionDenied(env_.Link("/d/f", "/d/g")));
  env_.SetRenameNoReplace(false);
  EXPECT_TRUE(absl::IsUnimplemented(env_.RenameNoReplace("/d/f", "/d/g")));
  EXPECT_TRUE(env_.Rename("/d/f", "/d/g").ok());
  env_.SetDirectAlignment(0);
  EXPECT_TRUE(absl::IsUnimplemented(env_.Open("/d/g", OpenMode::kRead, {.direct = true}).status()));
  EXPECT_TRUE(absl::IsUnimplemented(
      env_.Open("/d/new", OpenMode::kCreateExclusive, {.direct = true}).status()));
  EXPECT_TRUE(absl::IsNotFound(env_.Info("/d/new").status()));
  env_.SetAllocate(false);
  const auto file = env_.Open("/d/g", OpenMode::kReadWrite);
  EXPECT_TRUE(absl::IsUnimplemented((*file)->Allocate(0, 100)));
  EXPECT_EQ((*file)->Info()->bytes, 0u);
  env_.SetLeases(false);
  EXPECT_EQ(*(*env_.Open("/d/g", OpenMode::kRead))->NobodyElseHasIt(), false);
}

TEST_F(FaultRulesTest, LustreRecordsItsStriping) {
  env_.SetFilesystemType("lustre");
  EXPECT_EQ(env_.Filesystem("/d")->type, "lustre");
  ASSERT_TRUE(env_.SetStriping("/d", {8, 65536}).ok());
  ASSERT_EQ(env_.stripings().size(), 1u);
  EXPECT_EQ(env_.stripings()[0].first, "/d");
  EXPECT_EQ(env_.stripings()[0].second.count, 8);
}

TEST_F(FaultRulesTest, AnotherDevice) {
  EXPECT_EQ(env_.Info("/d")->device, 1u);
  env_.SetDevice(9);
  EXPECT_EQ(env_.Info("/d")->device, 9u);
}

TEST_F(FaultRulesTest, WhoeverDiedHasNothingOpen) {
  const auto before = env_.Open("/d/f", OpenMode::kRead).value();
  env_.KillProcess();
  EXPECT_EQ(*(*env_.Open("/d/f", OpenMode::kRead))->NobodyElseHasIt(), true);
}

TEST_F(FaultRulesTest, RecordsCallsInOrder) {
  env_.RecordCalls();
  ASSERT_TRUE(env_.Rename("/d/f", "/d/g").ok());
  env_.Unlink("/d/none").IgnoreError();
  EXPECT_THAT(env_.TakeCalls(), ElementsAre("rename /d/f /d/g", "unlink /d/none"));
  ASSERT_TRUE(env_.Unlink("/d/g").ok());
  EXPECT_THAT(env_.TakeCalls(), IsEmpty());
}

TEST_F(FaultRulesTest, StalledCallsWaitAndOthersGoOn) {
  env_.StallMatching("unlink /d/f");
  absl::Status status = absl::UnknownError("");
  std::thread caller([&] { status = env_.Unlink("/d/f"); });
  ASSERT_TRUE(env_.WaitForStalled(1, std::chrono::seconds(60)));
  EXPECT_TRUE(env_.Info("/d/f").ok());
  EXPECT_FALSE(env_.WaitForStalled(2, std::chrono::milliseconds(1)));
  env_.ReleaseStalled("unlink /d/f");
  caller.join();
  EXPECT_TRUE(status.ok());
  EXPECT_TRUE(absl::IsNotFound(env_.Info("/d/f").status()));
}

TEST_F(FaultRulesTest, ACrashEndsStalledCallsWithoutTheirEffect) {
  ASSERT_TRUE(env_.SyncDirectory("/d").ok());
  env_.StallMatching("unlink");
  absl::Status status;
  std::thread caller([&] { status = env_.Unlink("/d/f"); });
  ASSERT_TRUE(env_.WaitForStalled(1, std::chrono::seconds(60)));
  env_.Crash();
  caller.join();
  EXPECT_FALSE(status.ok());
  EXPECT_TRUE(env_.Info("/d/f").ok());
  EXPECT_TRUE(env_.Unlink("/d/f").ok()) << "the rule went with the crash";
}

}  // namespace
}  // namespace holdfast
