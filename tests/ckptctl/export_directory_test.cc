// An export's directory on a file system that misbehaves: the machine or the process dies, or a
// call fails, at every call there is; what has its name is whole, an index means that all is, and
// the next run goes on.
#include "ckptctl/export_directory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/fault_env.h"
#include "base/status.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;

constexpr char kFolder[] = "/out/set";

class ExportDirectoryTest : public ::testing::Test {
 protected:
  ExportDirectoryTest() {
    for (const uint64_t bytes : {3000, 5000, 2000}) {
      SavedItem item;
      item.name = absl::StrCat("t", items_.size());
      item.shape = {bytes};
      item.elements = item.bytes = bytes;
      items_.push_back(item);
    }
    plan_ = *PlanExport({"job", 9, 2, 77, &items_, {}}, {.file_bytes_max = 1});
  }

  std::string Content(size_t file) const {
    return plan_.files[file].header +
           std::string(items_[file].bytes, static_cast<char>('a' + file));
  }
  std::string PathOf(size_t file) const { return JoinPath(kFolder, plan_.files[file].name); }
  static std::string IndexPath() { return JoinPath(kFolder, kExportIndexName); }

  // As ckptctl export has it; `kept`: how many files were complete.
  absl::Status Run(Env& env, size_t* kept = nullptr) {
    HF_ASSIGN_OR_RETURN(const auto directory,
                        ExportDirectory::Open(env, kFolder, plan_, {"job", 9, 2}));
    for (size_t i = 0; i < plan_.files.size(); ++i) {
      HF_ASSIGN_OR_RETURN(const bool complete,
                          directory->IsComplete(i, [](uint64_t) { return true; }));
      if (complete) {
        if (kept != nullptr) {
          ++*kept;
        }
        continue;
      }
      HF_RETURN_IF_ERROR(directory->Begin(i));
      const std::string content = Content(i);
      const auto bytes = std::as_bytes(std::span(content)).subspan(plan_.files[i].header.size());
      HF_RETURN_IF_ERROR(directory->Append(bytes.first(1000)));
      HF_RETURN_IF_ERROR(directory->Append(bytes.subspan(1000)));
      HF_RETURN_IF_ERROR(directory->Publish());
    }
    return directory->Finish().status();
  }

  // Of what a reader of the directory may believe.
  void CheckWhatIsThere(Env& env, bool all) {
    const bool index = env.Info(IndexPath()).ok();
    EXPECT_TRUE(index || !all);
    if (index) {
      EXPECT_EQ(*ReadFile(env, IndexPath(), 1 << 20), plan_.index);
    }
    for (size_t i = 0; i < plan_.files.size(); ++i) {
      const bool there = env.Info(PathOf(i)).ok();
      EXPECT_TRUE(there || !index) << "an index of files that are not there";
      if (there) {
        EXPECT_EQ(*ReadFile(env, PathOf(i), 1 << 20), Content(i)) << plan_.files[i].name;
      }
    }
  }
  void CheckTidy(Env& env) {
    const auto names = env.List(kFolder);
    ASSERT_TRUE(names.ok());
    EXPECT_EQ(names->size(), plan_.files.size() + 2) << ::testing::PrintToString(*names);
  }

  std::vector<SavedItem> items_;
  ExportPlan plan_;
};

TEST_F(ExportDirectoryTest, IndexLastAndEachFileUnderItsNameWhenItIsWhole) {
  FaultEnv env;
  env.RecordCalls();
  ASSERT_TRUE(Run(env).ok());
  std::vector<std::string> order;
  for (const std::string& call : env.TakeCalls()) {
    if (absl::StrContains(call, "sync ") || absl::StartsWith(call, "rename ")) {
      order.push_back(call);
    }
  }
  std::vector<std::string> expected = {"sync directory /out"};
  const auto published = [&](const std::string& temporary, const std::string& name) {
    expected.push_back("fsync " + temporary);
    expected.push_back(absl::StrCat("rename ", temporary, " ", name));
    expected.push_back(absl::StrCat("sync directory ", kFolder));
  };
  const std::string state = JoinPath(kFolder, kExportStateName);
  expected.insert(expected.begin(), "sync directory /");
  published(state + ".tmp", state);
  for (size_t i = 0; i < plan_.files.size(); ++i) {
    published(PathOf(i) + ".part", PathOf(i));
    published(state + ".tmp", state);
  }
  published(IndexPath() + ".tmp", IndexPath());
  EXPECT_EQ(order, expected);
  CheckWhatIsThere(env, /*all=*/true);
  CheckTidy(env);
}

TEST_F(ExportDirectoryTest, ACrashAtEveryCall) {
  int crashes = 0;
  for (const bool power : {true, false}) {
    bool reached = true;
    for (int n = 1; reached; ++n) {
      SCOPED_TRACE(absl::StrCat(power ? "power is lost" : "the process dies", " at call ", n));
      FaultEnv env;
      const int before = env.calls();
      env.CrashAtCall(n);
      const bool acknowledged = Run(env).ok();
      reached = env.calls() - before >= n;
      power ? env.Crash() : env.KillProcess();
      if (env.Info(kFolder).ok()) {
        CheckWhatIsThere(env, acknowledged);
      } else {
        EXPECT_FALSE(acknowledged);
      }
      const absl::Status again = Run(env);
      ASSERT_TRUE(again.ok()) << ToString(again);
      CheckWhatIsThere(env, /*all=*/true);
      CheckTidy(env);
      if (HasFailure()) {
        return;
      }
      ++crashes;
    }
  }
  EXPECT_GT(crashes, 60) << "a story of no calls";
}

TEST_F(ExportDirectoryTest, AFailureOfEveryCall) {
  for (const int error : {EIO, ENOSPC, EACCES}) {
    bool reached = true;
    for (int n = 1; reached; ++n) {
      SCOPED_TRACE(absl::StrCat("call ", n, " fails with ", ::strerrorname_np(error)));
      FaultEnv env;
      const int before = env.calls();
      env.FailCall(n, error);
      const bool acknowledged = Run(env).ok();
      reached = env.calls() - before >= n;
      env.Crash();
      if (env.Info(kFolder).ok()) {
        CheckWhatIsThere(env, acknowledged);
      }
      const absl::Status again = Run(env);
      ASSERT_TRUE(again.ok()) << ToString(again);
      CheckWhatIsThere(env, /*all=*/true);
      CheckTidy(env);
      if (HasFailure()) {
        return;
      }
    }
  }
}

TEST_F(ExportDirectoryTest, WhatIsCompleteIsComparedAndKept) {
  FaultEnv env;
  ASSERT_TRUE(Run(env).ok());
  size_t kept = 0;
  ASSERT_TRUE(Run(env, &kept).ok());
  EXPECT_EQ(kept, 3U);
  ASSERT_TRUE(env.FlipBit(PathOf(1), 10, 3).ok());                     // in its header
  ASSERT_TRUE(env.FlipBit(PathOf(2), Content(2).size() - 1, 0).ok());  // its last byte
  kept = 0;
  ASSERT_TRUE(Run(env, &kept).ok());
  EXPECT_EQ(kept, 1U);
  CheckWhatIsThere(env, /*all=*/true);
}

TEST_F(ExportDirectoryTest, ADiskThatIsTooSmallIsFoundBeforeAFileIsWritten) {
  FaultEnv env;
  env.SetBytesTotal(14'000);  // the second one does not fit
  const absl::Status full = Run(env);
  EXPECT_TRUE(absl::IsResourceExhausted(full)) << full;
  EXPECT_TRUE(env.Info(PathOf(0)).ok());
  EXPECT_FALSE(env.Info(PathOf(1) + ".part").ok()) << "nothing half takes the room";
  env.SetBytesTotal(1 << 20);
  size_t kept = 0;
  ASSERT_TRUE(Run(env, &kept).ok());
  EXPECT_EQ(kept, 1U);
}

TEST_F(ExportDirectoryTest, WithoutRoomReservedBeforehand) {
  FaultEnv env;
  env.SetAllocate(false);
  ASSERT_TRUE(Run(env).ok());
  CheckWhatIsThere(env, /*all=*/true);
}

TEST_F(ExportDirectoryTest, AFileOfAnotherLengthIsNotPublished) {
  FaultEnv env;
  const auto directory = ExportDirectory::Open(env, kFolder, plan_, {"job", 9, 2});
  ASSERT_TRUE(directory.ok());
  ASSERT_TRUE((*directory)->Begin(0).ok());
  const std::string some(2999, 'a');
  ASSERT_TRUE((*directory)->Append(std::as_bytes(std::span(some))).ok());
  EXPECT_TRUE(absl::IsInternal((*directory)->Publish()));
  EXPECT_FALSE(env.Info(PathOf(0)).ok());
}

}  // namespace
}  // namespace holdfast
