// A drive or a mount that goes away and comes back, in one process and across two.
#include "server/runtime/tiers/tier_place.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>

#include "base/fault_env.h"
#include "base/status.h"
#include "tests/server/runtime/drive_process.h"

namespace holdfast {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kDir[] = "/mnt/drive";
constexpr char kState[] = "/state";

class TierPlaceTest : public ::testing::TestWithParam<DurableKind> {
 protected:
  TierPlaceTest() {
    EXPECT_TRUE(env_.CreateDirectories(kDir, 0700).ok());
    EXPECT_TRUE(env_.CreateDirectories(kState, 0700).ok());
    Mount(7);
  }
  bool remote() const { return GetParam() == DurableKind::kRemote; }
  // The next daemon's.
  TierPlace* NewPlace(bool mounted = false) {
    process_.reset();
    process_ = std::make_unique<DriveProcess>(
        env_, kState, remote() ? std::vector<std::string>() : std::vector<std::string>{kDir},
        remote() ? kDir : "", mounted);
    return remote() ? process_->remote.get() : process_->drives.front().get();
  }
  void Mount(uint64_t device) {
    env_.SetDevice(device, kDir);
    env_.FailMatching(std::string(kDir) + "/.holdfast", 0);
  }
  // Its mount point, an empty directory of the system's disk, is left.
  void Unmount() {
    env_.SetDevice(1, kDir);
    env_.FailMatching(std::string(kDir) + "/.holdfast", ENOENT);
  }

  // A new file system lies there, without the directory.
  void ExchangeDrive(uint64_t device) {
    EXPECT_TRUE(env_.Rename(kDir, "/old").ok());
    env_.SetDevice(device, "/mnt");
  }

  FaultEnv env_;
  std::unique_ptr<DriveProcess> process_;
};

INSTANTIATE_TEST_SUITE_P(Kinds, TierPlaceTest,
                         ::testing::Values(DurableKind::kNvme, DurableKind::kRemote),
                         [](const ::testing::TestParamInfo<DurableKind>& kind) {
                           return kind.param == DurableKind::kNvme ? "Nvme" : "Remote";
                         });

TEST_P(TierPlaceTest, AMountThatWentAwayIsNotOpenedAnewAtItsMountPoint) {
  TierPlace* const place = NewPlace();
  ASSERT_TRUE(place->Store(nullptr).ok());
  Unmount();
  // The first operation notices, as every operation afterwards.
  const absl::Status noticed = place->OpenStore()->ScanAll().status();
  EXPECT_TRUE(absl::IsUnavailable(noticed));
  EXPECT_TRUE(place->Note(noticed).went_away);
  EXPECT_EQ(place->OpenStore(), nullptr);
  // What ended well a moment ago, on the same store, lies there no more.
  const TierPlace::Noted noted = place->Note(absl::OkStatus());
  EXPECT_FALSE(noted.went_away) << "that has been said";
  EXPECT_TRUE(absl::IsUnavailable(noted.away));
  env_.RecordCalls();
  for (int i = 0; i < 3; ++i) {
    const absl::Status status = place->Store(nullptr).status();
    EXPECT_TRUE(absl::IsUnavailable(status)) << ToString(status);
    place->Note(status);
    EXPECT_THAT(place->health().problem, HasSubstr("mount it again"));
  }
  EXPECT_THAT(
      env_.TakeCalls(),
      Not(Contains(::testing::AnyOf(HasSubstr("create"), HasSubstr("write"), HasSubstr("lock")))));
  // A network file system is back with another number.
  Mount(8);
  EXPECT_TRUE(place->Store(nullptr).ok());
  EXPECT_TRUE(place->OpenStore()->Space().ok());
  EXPECT_TRUE(place->Note(absl::OkStatus()).away.ok());
  EXPECT_EQ(place->health().problem, "");
}

TEST_P(TierPlaceTest, TheNextDaemonKnowsThatThereWasAMount) {
  ASSERT_TRUE(NewPlace()->Store(nullptr).ok());
  Unmount();
  const absl::Status missing = NewPlace()->Store(nullptr).status();
  EXPECT_TRUE(absl::IsUnavailable(missing)) << ToString(missing);
  // The way out is in the message.
  const std::string text = Message(missing);
  const std::string command = "ckptctl forget-drive ";
  const size_t way_out = text.find(command);
  ASSERT_NE(way_out, std::string::npos) << text;
  const std::string id = text.substr(way_out + command.size(), 8);
  Mount(9);
  EXPECT_TRUE(NewPlace()->Store(nullptr).ok()) << "mounted again";
  env_.SetDevice(1, kDir);
  EXPECT_TRUE(NewPlace()->Store(nullptr).ok()) << "the same, by its id";
  Mount(9);
  ASSERT_TRUE(NewPlace()->Store(nullptr).ok());
  Unmount();
  TierPlace* const place = NewPlace();
  EXPECT_FALSE(place->Store(nullptr).ok());
  EXPECT_TRUE(process_->witnesses->Forget(id).ok());
  EXPECT_TRUE(place->Store(nullptr).ok()) << "it is to lie on the system's disk";
}

// What docs/operations.md says of a new drive that is mounted while ckptd runs ("NVMe is gone, or
// not mounted").
TEST_P(TierPlaceTest, AnotherDriveIsNotTakenForTheOneThatWasOpen) {
  TierPlace* const place = NewPlace();
  ASSERT_TRUE(place->Store(nullptr).ok());
  ExchangeDrive(8);
  ASSERT_TRUE(env_.CreateDirectories(kDir, 0700).ok());
  place->Note(place->OpenStore()->ScanAll().status());
  for (int i = 0; i < 2; ++i) {
    const absl::Status status = place->Store(nullptr).status();
    EXPECT_THAT(Message(status), HasSubstr("is not the directory that "));
    place->Note(status);
  }
  const absl::Status next = NewPlace()->Store(nullptr).status();
  EXPECT_EQ(next.ok(), !remote()) << "the next daemon takes a new drive";
  EXPECT_TRUE(!remote() || Message(next).find("ckptctl forget-drive") != std::string::npos);
}

TEST_P(TierPlaceTest, AnotherDriveIsTakenIfTheOldOneWasNeverOpen) {
  ASSERT_TRUE(NewPlace()->Store(nullptr).ok());
  Unmount();
  TierPlace* const place = NewPlace();
  EXPECT_TRUE(absl::IsUnavailable(place->Store(nullptr).status()));
  Mount(7);
  ExchangeDrive(8);
  ASSERT_TRUE(env_.CreateDirectories(kDir, 0700).ok());
  EXPECT_EQ(place->Store(nullptr).ok(), !remote());
}

TEST_P(TierPlaceTest, AnotherDriveWithTheSameDeviceNumberIsTakenOnceItsDirectoryCanBeMade) {
  TierPlace* const place = NewPlace();
  ASSERT_TRUE(place->Store(nullptr).ok());
  ExchangeDrive(7);
  place->Note(place->OpenStore()->ScanAll().status());
  EXPECT_EQ(place->OpenStore(), nullptr);
  if (remote()) {
    EXPECT_THAT(Message(place->Store(nullptr).status()), HasSubstr("mount it again, or make it"));
    ASSERT_TRUE(env_.CreateDirectories(kDir, 0700).ok());
  }
  EXPECT_EQ(place->Store(nullptr).ok(), !remote());
}

TEST_P(TierPlaceTest, ARemoteDirectoryIsKnownByItsId) {
  if (!remote()) {
    GTEST_SKIP() << "a drive with another id is another drive";
  }
  ASSERT_TRUE(NewPlace()->Store(nullptr).ok());
  ExchangeDrive(7);
  ASSERT_TRUE(env_.CreateDirectories(kDir, 0700).ok());
  TierPlace* const place = NewPlace();
  const absl::Status other = place->Store(nullptr).status();
  EXPECT_TRUE(absl::IsUnavailable(other)) << ToString(other);
  EXPECT_THAT(env_.List(kDir, 10).value(), ::testing::IsEmpty()) << "nothing is made there";
  const std::string text = Message(other);
  const std::string id = text.substr(text.find("(id ") + 4, 32);
  const absl::StatusOr<std::string> forgotten = process_->witnesses->Forget(id);
  EXPECT_TRUE(forgotten.ok()) << forgotten.status();
  EXPECT_TRUE(place->Store(nullptr).ok());
  EXPECT_TRUE(NewPlace()->Store(nullptr).ok()) << "that is the one from now on";
}

TEST_P(TierPlaceTest, AMountThatWasNeverSeenIsNotTakenForEmpty) {
  if (!remote()) {
    GTEST_SKIP() << "a drive may lie on the system's disk";
  }
  Unmount();
  const absl::Status empty = NewPlace(true)->Store(nullptr).status();
  EXPECT_TRUE(absl::IsUnavailable(empty)) << ToString(empty);
  EXPECT_THAT(Message(empty), HasSubstr("is an empty mount point"));
  EXPECT_TRUE(NewPlace(false)->Store(nullptr).ok()) << "where nobody says that it is one";
  Mount(7);
  EXPECT_TRUE(NewPlace(true)->Store(nullptr).ok());
}

TEST_P(TierPlaceTest, WhatCannotBeRememberedIsNoError) {
  env_.FailMatching(kState, EROFS);
  ASSERT_TRUE(NewPlace()->Store(nullptr).ok());
}

}  // namespace
}  // namespace holdfast
