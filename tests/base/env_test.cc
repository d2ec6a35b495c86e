// What every Env must do, run against the real one and the one of the tests.
#include "base/env.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>

#include "base/fault_env.h"
#include "base/status.h"
#include "tests/base/temporary_directory.h"

namespace holdfast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::span<const std::byte> Bytes(std::string_view text) {
  return std::as_bytes(std::span<const char>(text));
}

enum class Which { kDisk, kTmpfs, kFault };

std::string NameOf(Which which) {
  return which == Which::kDisk ? "Disk" : which == Which::kTmpfs ? "Tmpfs" : "Fault";
}

class EnvTest : public ::testing::TestWithParam<Which> {
 protected:
  EnvTest() : directory_(GetParam() == Which::kTmpfs ? "/dev/shm" : "/tmp") {
    if (GetParam() == Which::kFault) {
      env_ = &fault_env_;
      root_ = "/root-of-test";
      EXPECT_TRUE(env_->CreateDirectory(root_, 0700).ok());
    } else {
      env_ = Env::System();
      root_ = directory_.path();
    }
  }

  std::string Path(const std::string& name) const { return JoinPath(root_, name); }

  std::unique_ptr<File> Create(const std::string& name, std::string_view data = "") {
    absl::StatusOr<std::unique_ptr<File>> file = env_->Open(Path(name), OpenMode::kCreateExclusive);
    EXPECT_TRUE(file.ok()) << file.status();
    EXPECT_TRUE((*file)->WriteAt(0, Bytes(data)).ok());
    return *std::move(file);
  }

  std::string Read(const std::string& name) {
    const absl::StatusOr<std::string> data = ReadFile(*env_, Path(name), 1 << 20);
    return data.ok() ? *data : ToString(data.status());
  }

  TemporaryDirectory directory_;
  FaultEnv fault_env_;
  Env* env_ = nullptr;
  std::string root_;
};

INSTANTIATE_TEST_SUITE_P(All, EnvTest,
                         ::testing::Values(Which::kDisk, Which::kTmpfs, Which::kFault),
                         [](const auto& test) { return NameOf(test.param); });

TEST_P(EnvTest, WritesAndReadsAtOffsets) {
  const auto file = Create("f", "hello");
  ASSERT_TRUE(file->WriteAt(8, Bytes("world")).ok());
  EXPECT_EQ(file->path(), Path("f"));
  EXPECT_EQ(file->Info()->bytes, 13u);
  EXPECT_EQ(Read("f"), std::string("hello\0\0\0world", 13));
  std::byte out[5];
  ASSERT_TRUE(file->ReadAt(8, out).ok());
  EXPECT_EQ(std::memcmp(out, "world", 5), 0);
  EXPECT_TRUE(file->ReadAt(999, {}).ok());
}

TEST_P(EnvTest, ShortFilesAreOutOfRange) {
  const auto file = Create("f", "hello");
  std::byte out[6];
  const absl::Status status = file->ReadAt(0, out);
  EXPECT_EQ(status.code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(Message(status),
            "read '" + Path("f") + "': wanted 6 bytes at offset 0, the file ends after 5");
  EXPECT_EQ(file->ReadAt(100, out).code(), absl::StatusCode::kOutOfRange);
}

TEST_P(EnvTest, ImpossibleRangesAreRefused) {
  const auto file = Create("f");
  std::byte byte{};
  for (const uint64_t offset : {UINT64_MAX, uint64_t{1} << 63, uint64_t{INT64_MAX}}) {
    EXPECT_EQ(file->ReadAt(offset, {&byte, 1}).code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(file->WriteAt(offset, {&byte, 1}).code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(file->Allocate(offset, 1).code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(env_->Map(*file, offset, 1, false).status().code(),
              absl::StatusCode::kInvalidArgument);
  }
  EXPECT_EQ(file->Truncate(UINT64_MAX).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(file->Allocate(1, UINT64_MAX).code(), absl::StatusCode::kInvalidArgument);
}

TEST_P(EnvTest, OpenModes) {
  EXPECT_EQ(env_->Open(Path("f"), OpenMode::kRead).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(env_->Open(Path("f"), OpenMode::kReadWrite).status().code(),
            absl::StatusCode::kNotFound);
  Create("f", "x");
  EXPECT_EQ(env_->Open(Path("f"), OpenMode::kCreateExclusive).status().code(),
            absl::StatusCode::kAlreadyExists);
  const auto reader = *env_->Open(Path("f"), OpenMode::kRead);
  EXPECT_FALSE(reader->WriteAt(0, Bytes("y")).ok());
  const auto writer = *env_->Open(Path("f"), OpenMode::kReadWrite);
  EXPECT_TRUE(writer->WriteAt(0, Bytes("y")).ok());
  EXPECT_EQ(Read("f"), "y");
}

TEST_P(EnvTest, ErrorsNameOperationAndPath) {
  EXPECT_EQ(Message(env_->Open(Path("none"), OpenMode::kRead).status()),
            "open '" + Path("none") + "': No such file or directory (ENOENT)");
  EXPECT_EQ(Message(env_->Rename(Path("none"), Path("other"))),
            "rename '" + Path("none") + "' to '" + Path("other") +
                "': No such file or directory (ENOENT)");
}

TEST_P(EnvTest, PathsMustBeAbsoluteAndSane) {
  for (const std::string& path : {std::string(""), std::string("relative/x"),
                                  std::string("/a\0b", 4), "/" + std::string(5000, 'x')}) {
    EXPECT_EQ(env_->Open(path, OpenMode::kRead).status().code(),
              absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(env_->Rename(path, Path("x")).code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(env_->Rename(Path("x"), path).code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(env_->CreateDirectories(path, 0700).code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(env_->Info(path).status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(env_->Lock(path).status().code(), absl::StatusCode::kInvalidArgument);
  }
}

TEST_P(EnvTest, DirectoriesAreNoFiles) {
  ASSERT_TRUE(env_->CreateDirectory(Path("d"), 0700).ok());
  EXPECT_EQ(env_->Open(Path("d"), OpenMode::kRead).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_FALSE(env_->Unlink(Path("d")).ok());
  EXPECT_TRUE(S_ISDIR(env_->Info(Path("d"))->mode));
}

TEST_P(EnvTest, AllocateAndTruncateSetTheSize) {
  const auto file = Create("f", "abc");
  ASSERT_TRUE(file->Allocate(0, 5000).ok());
  EXPECT_EQ(file->Info()->bytes, 5000u);
  ASSERT_TRUE(file->Allocate(0, 100).ok());  // never shrinks
  EXPECT_EQ(file->Info()->bytes, 5000u);
  EXPECT_TRUE(file->Allocate(0, 0).ok());
  ASSERT_TRUE(file->Truncate(2).ok());
  EXPECT_EQ(Read("f"), "ab");
  ASSERT_TRUE(file->Truncate(4).ok());
  EXPECT_EQ(Read("f"), std::string("ab\0\0", 4));
}

TEST_P(EnvTest, MappingsAndFilesShareTheirBytes) {
  const auto file = Create("f", std::string(8192, 'a'));
  const auto writable = *env_->Map(*file, 0, 8192, true);
  const auto readable = *env_->Map(*file, 4096, 4096, false);
  EXPECT_EQ(writable->bytes(), 8192u);
  EXPECT_EQ(readable->bytes(), 4096u);
  writable->data()[4096] = std::byte{'b'};
  EXPECT_EQ(readable->data()[0], std::byte{'b'});
  std::byte out{};
  ASSERT_TRUE(file->ReadAt(4096, {&out, 1}).ok());
  EXPECT_EQ(out, std::byte{'b'});
  ASSERT_TRUE(file->WriteAt(4096, Bytes("c")).ok());
  EXPECT_EQ(readable->data()[0], std::byte{'c'});
  EXPECT_GE(file->fd(), 0);
}

TEST_P(EnvTest, MappingsOutliveFileAndName) {
  auto file = Create("f", "abc");
  const auto mapping = *env_->Map(*file, 0, 3, true);
  file.reset();
  ASSERT_TRUE(env_->Unlink(Path("f")).ok());
  EXPECT_EQ(std::memcmp(mapping->data(), "abc", 3), 0);
}

TEST_P(EnvTest, MappingsBeyondTheFileAreRefused) {
  const auto file = Create("f", std::string(4096, 'a'));
  EXPECT_EQ(env_->Map(*file, 0, 4097, true).status().code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(env_->Map(*file, 4096, 1, true).status().code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(env_->Map(*file, 8192, 1, true).status().code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(env_->Map(*file, 0, 0, true).status().code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(env_->Map(*file, 100, 1, true).status().code(),
            absl::StatusCode::kInvalidArgument);  // not a page's start
}

TEST_P(EnvTest, PopulateKeepsTheBytes) {
  const auto file = Create("f", "abc");
  ASSERT_TRUE(file->Allocate(0, 1 << 20).ok());
  const auto mapping = *env_->Map(*file, 0, 1 << 20, true);
  EXPECT_TRUE(env_->Populate(*mapping, 0, 1 << 20).ok());
  EXPECT_TRUE(env_->Populate(*mapping, 5000, 100).ok());
  EXPECT_TRUE(env_->Populate(*mapping, 1 << 20, 0).ok());
  EXPECT_EQ(env_->Populate(*mapping, 1, 1 << 20).code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(env_->Populate(*mapping, UINT64_MAX, 2).code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(std::memcmp(mapping->data(), "abc\0", 4), 0);
  const auto readable = *env_->Map(*file, 0, 1 << 20, false);
  EXPECT_TRUE(env_->Populate(*readable, 0, 1 << 20).ok());
}

TEST_P(EnvTest, PopulateOfAFileCutShortIsDataLoss) {
  const auto file = Create("f");
  ASSERT_TRUE(file->Allocate(0, 65536).ok());
  const auto mapping = *env_->Map(*file, 0, 65536, true);
  ASSERT_TRUE(file->Truncate(4096).ok());
  const absl::Status status = env_->Populate(*mapping, 0, 65536);
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
  EXPECT_THAT(Message(status), HasSubstr("cut short"));
}

TEST_P(EnvTest, RenameReplaces) {
  Create("a", "A");
  Create("b", "B");
  ASSERT_TRUE(env_->Rename(Path("a"), Path("b")).ok());
  EXPECT_EQ(Read("b"), "A");
  EXPECT_EQ(env_->Info(Path("a")).status().code(), absl::StatusCode::kNotFound);
}

TEST_P(EnvTest, RenameNoReplaceDoesNot) {
  Create("a", "A");
  Create("b", "B");
  EXPECT_EQ(env_->RenameNoReplace(Path("a"), Path("b")).code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(Read("a"), "A");
  EXPECT_EQ(Read("b"), "B");
  ASSERT_TRUE(env_->RenameNoReplace(Path("a"), Path("c")).ok());
  EXPECT_EQ(Read("c"), "A");
  EXPECT_EQ(env_->RenameNoReplace(Path("a"), Path("d")).code(), absl::StatusCode::kNotFound);
}

TEST_P(EnvTest, HardLinksShareOneFile) {
  const auto file = Create("a", "A");
  ASSERT_TRUE(env_->Link(Path("a"), Path("b")).ok());
  EXPECT_EQ(env_->Link(Path("a"), Path("b")).code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(env_->Link(Path("none"), Path("c")).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(env_->Info(Path("a"))->links, 2u);
  EXPECT_EQ(env_->Info(Path("a"))->inode, env_->Info(Path("b"))->inode);
  ASSERT_TRUE(file->WriteAt(0, Bytes("X")).ok());
  EXPECT_EQ(Read("b"), "X");
  // Two names of one file: renaming one over the other does nothing, and both stay.
  ASSERT_TRUE(env_->Rename(Path("a"), Path("b")).ok());
  EXPECT_THAT(*env_->List(root_), ElementsAre("a", "b"));
  ASSERT_TRUE(env_->Unlink(Path("a")).ok());
  EXPECT_EQ(file->Info()->links, 1u);
  EXPECT_EQ(Read("b"), "X");
}

TEST_P(EnvTest, UnlinkedFilesLiveWhileOpen) {
  const auto file = Create("f", "abc");
  ASSERT_TRUE(env_->Unlink(Path("f")).ok());
  EXPECT_EQ(env_->Unlink(Path("f")).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(file->Info()->links, 0u);
  std::byte out[3];
  EXPECT_TRUE(file->ReadAt(0, out).ok());
}

TEST_P(EnvTest, Directories) {
  ASSERT_TRUE(env_->CreateDirectories(Path("x/y//z/"), 0700).ok());
  ASSERT_TRUE(env_->CreateDirectories(Path("x/y/z"), 0700).ok());
  EXPECT_EQ(env_->CreateDirectory(Path("x"), 0700).code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(env_->CreateDirectory(Path("no/such"), 0700).code(), absl::StatusCode::kNotFound);
  EXPECT_FALSE(env_->RemoveDirectory(Path("x")).ok());
  EXPECT_TRUE(env_->SyncDirectory(Path("x/y")).ok());
  EXPECT_EQ(env_->SyncDirectory(Path("none")).code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(env_->RemoveDirectory(Path("x/y/z")).ok());
  EXPECT_TRUE(env_->RemoveDirectory(Path("x/y")).ok());
  Create("f");
  EXPECT_FALSE(env_->CreateDirectories(Path("f/sub"), 0700).ok());
  EXPECT_FALSE(env_->CreateDirectories(Path("f"), 0700).ok());
  EXPECT_TRUE(env_->CreateDirectories("/", 0700).ok());
}

TEST_P(EnvTest, DirectoriesMove) {
  ASSERT_TRUE(env_->CreateDirectories(Path("a/b"), 0700).ok());
  Create("a/b/f", "x");
  EXPECT_FALSE(env_->Rename(Path("a"), Path("a/b/c")).ok());
  ASSERT_TRUE(env_->Rename(Path("a/b"), Path("c")).ok());
  EXPECT_EQ(Read("c/f"), "x");
  EXPECT_FALSE(env_->Rename(Path("c/f"), Path("a")).ok());  // a file never replaces a directory
  EXPECT_FALSE(env_->Rename(Path("a"), Path("c")).ok());    // nor a directory one that is not empty
}

TEST_P(EnvTest, ListsSorted) {
  for (const char* name : {"b", "a", "c", ".hidden"}) {
    Create(name);
  }
  EXPECT_THAT(*env_->List(root_), ElementsAre(".hidden", "a", "b", "c"));
  EXPECT_EQ(env_->List(Path("none")).status().code(), absl::StatusCode::kNotFound);
  EXPECT_FALSE(env_->List(Path("a")).ok());
}

TEST_P(EnvTest, LocksExclude) {
  auto lock = env_->Lock(Path("lock"));
  ASSERT_TRUE(lock.ok()) << lock.status();
  const absl::Status status = env_->Lock(Path("lock")).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(Message(status), HasSubstr("lock '" + Path("lock") + "': held by this process"));
  EXPECT_EQ(Read("lock"), std::to_string(::getpid()) + "\n");
  lock = absl::UnknownError("dropped");
  EXPECT_TRUE(env_->Lock(Path("lock")).ok());
}

TEST_P(EnvTest, FilesystemHasRoom) {
  const absl::StatusOr<FilesystemInfo> info = env_->Filesystem(root_);
  ASSERT_TRUE(info.ok()) << info.status();
  EXPECT_GT(info->bytes_total, 0u);
  EXPECT_LE(info->bytes_free, info->bytes_total);
  EXPECT_GT(info->block_bytes, 0u);
  if (GetParam() == Which::kTmpfs) {
    EXPECT_EQ(info->type, "tmpfs");
  }
  EXPECT_EQ(env_->Filesystem(Path("none")).status().code(), absl::StatusCode::kNotFound);
}

TEST_P(EnvTest, WriteFileAtomicallyReplacesAndCleansUp) {
  ASSERT_TRUE(WriteFileAtomically(*env_, Path("f"), "one").ok());
  Create("f.tmp", "left by a crash, and longer than what comes");
  ASSERT_TRUE(WriteFileAtomically(*env_, Path("f"), "two").ok());
  EXPECT_EQ(Read("f"), "two");
  EXPECT_THAT(*env_->List(root_), ElementsAre("f"));
  ASSERT_TRUE(WriteFileAtomically(*env_, Path("f"), "").ok());
  EXPECT_EQ(Read("f"), "");
  EXPECT_EQ(WriteFileAtomically(*env_, Path("none/f"), "x").code(), absl::StatusCode::kNotFound);
}

TEST_P(EnvTest, ReadFileRefusesWhatIsTooLarge) {
  Create("f", "12345");
  EXPECT_EQ(*ReadFile(*env_, Path("f"), 5), "12345");
  const absl::Status status = ReadFile(*env_, Path("f"), 4).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(Message(status), "read '" + Path("f") + "': 5 bytes; at most 4 are accepted here");
}

TEST(PathTest, JoinAndParent) {
  EXPECT_EQ(JoinPath("/a", "b"), "/a/b");
  EXPECT_EQ(JoinPath("/a/", "b"), "/a/b");
  EXPECT_EQ(JoinPath("/", "b"), "/b");
  EXPECT_EQ(JoinPath("", "b"), "b");
  EXPECT_EQ(ParentDirectory("/a/b"), "/a");
  EXPECT_EQ(ParentDirectory("/a/b/"), "/a");
  EXPECT_EQ(ParentDirectory("/a//b"), "/a");
  EXPECT_EQ(ParentDirectory("/a"), "/");
  EXPECT_EQ(ParentDirectory("/"), "/");
  EXPECT_EQ(ParentDirectory("a"), ".");
  EXPECT_EQ(ParentDirectory(""), ".");
}

TEST(KernelFileTest, ReadsWhatHasNoSize) {
  EXPECT_THAT(*ReadKernelFile("/proc/self/stat"), HasSubstr("("));
  EXPECT_EQ(ReadKernelFile("/proc/no-such-file").status().code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace holdfast
