// A drive or a mount that goes away and comes back, in one process and across two.
#include "server/runtime/tiers/tier_place.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>

#include "base/fault_env.h"
#include "base/status.h"

namespace holdfast {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kDir[] = "/mnt/drive";
constexpr char kMemory[] = "/state/places";

class TierPlaceTest : public ::testing::TestWithParam<DurableKind> {
 protected:
  TierPlaceTest() {
    EXPECT_TRUE(env_.CreateDirectories(kDir, 0700).ok());
    EXPECT_TRUE(env_.CreateDirectories("/state", 0700).ok());
    Mount(7);
  }
  std::unique_ptr<TierPlace> NewPlace() {
    CopyStore::Options options;
    options.env = &env_;
    options.kind = GetParam();
    options.dir = kDir;
    options.node_name = "node-1";
    return std::make_unique<TierPlace>(options, kMemory);
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
};

INSTANTIATE_TEST_SUITE_P(Kinds, TierPlaceTest,
                         ::testing::Values(DurableKind::kNvme, DurableKind::kRemote),
                         [](const ::testing::TestParamInfo<DurableKind>& kind) {
                           return kind.param == DurableKind::kNvme ? "Nvme" : "Remote";
                         });

TEST_P(TierPlaceTest, AMountThatWentAwayIsNotOpenedAnewAtItsMountPoint) {
  const auto place = NewPlace();
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
  const size_t rm = text.find("rm '");
  ASSERT_NE(rm, std::string::npos) << text;
  const std::string path = text.substr(rm + 4, text.size() - rm - 5);
  EXPECT_THAT(path, ::testing::StartsWith(kMemory));
  Mount(9);
  EXPECT_TRUE(NewPlace()->Store(nullptr).ok()) << "mounted again";
  env_.SetDevice(1, kDir);
  EXPECT_TRUE(NewPlace()->Store(nullptr).ok()) << "the same, by its id";
  Mount(9);
  ASSERT_TRUE(NewPlace()->Store(nullptr).ok());
  Unmount();
  ASSERT_TRUE(env_.Unlink(path).ok());
  EXPECT_TRUE(NewPlace()->Store(nullptr).ok()) << "it is to lie on the system's disk";
}

// What docs/operations.md says of a new drive that is mounted while ckptd runs ("NVMe is gone, or
// not mounted").
TEST_P(TierPlaceTest, AnotherDriveIsNotTakenForTheOneThatWasOpen) {
  const auto place = NewPlace();
  ASSERT_TRUE(place->Store(nullptr).ok());
  ExchangeDrive(8);
  ASSERT_TRUE(env_.CreateDirectories(kDir, 0700).ok());
  place->Note(place->OpenStore()->ScanAll().status());
  for (int i = 0; i < 2; ++i) {
    const absl::Status status = place->Store(nullptr).status();
    EXPECT_THAT(Message(status), HasSubstr("is not the directory that it was"));
    place->Note(status);
  }
  EXPECT_TRUE(NewPlace()->Store(nullptr).ok()) << "the next daemon takes it";
}

TEST_P(TierPlaceTest, AnotherDriveIsTakenIfTheOldOneWasNeverOpen) {
  ASSERT_TRUE(NewPlace()->Store(nullptr).ok());
  Unmount();
  const auto place = NewPlace();
  EXPECT_TRUE(absl::IsUnavailable(place->Store(nullptr).status()));
  Mount(7);
  ExchangeDrive(8);
  ASSERT_TRUE(env_.CreateDirectories(kDir, 0700).ok());
  EXPECT_TRUE(place->Store(nullptr).ok());
}

TEST_P(TierPlaceTest, AnotherDriveWithTheSameDeviceNumberIsTakenOnceItsDirectoryCanBeMade) {
  const auto place = NewPlace();
  ASSERT_TRUE(place->Store(nullptr).ok());
  ExchangeDrive(7);
  place->Note(place->OpenStore()->ScanAll().status());
  EXPECT_EQ(place->OpenStore(), nullptr);
  if (GetParam() == DurableKind::kRemote) {
    EXPECT_THAT(Message(place->Store(nullptr).status()), HasSubstr("mount it again, or make it"));
    ASSERT_TRUE(env_.CreateDirectories(kDir, 0700).ok());
  }
  EXPECT_TRUE(place->Store(nullptr).ok());
}

TEST_P(TierPlaceTest, WhatCannotBeRememberedIsNoError) {
  env_.FailMatching(kMemory, EROFS);
  ASSERT_TRUE(NewPlace()->Store(nullptr).ok());
}

}  // namespace
}  // namespace holdfast
