// Drives that are absent when a daemon starts, on the file system of a node.
#include "server/runtime/tiers/drive_witnesses.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>

#include "base/fault_env.h"
#include "base/status.h"
#include "tests/server/runtime/drive_process.h"

namespace holdfast {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Key;
using ::testing::Not;

constexpr char kState[] = "/state";

class DriveWitnessesTest : public ::testing::Test {
 protected:
  DriveWitnessesTest() {
    EXPECT_TRUE(env_.CreateDirectories(kState, 0700).ok());
    EXPECT_TRUE(env_.CreateDirectories("/mnt", 0700).ok());
  }
  void Start(std::optional<size_t> hung = std::nullopt) {
    process_.reset();
    process_ = std::make_unique<DriveProcess>(env_, kState, dirs_, "", false, hung);
  }
  // "demo" is on drive 1, and all know it. Returns that drive's id.
  std::string SaveOnDrive1() {
    Start();
    process_->OpenAll();
    EXPECT_EQ(process_->Note(1, "demo"), absl::OkStatus());
    EXPECT_TRUE(env_.CreateDirectories(dirs_[1] + "/demo", 0700).ok());
    EXPECT_THAT(process_->told, IsEmpty());
    const std::string id = process_->drives[1]->OpenStore()->place().id;
    process_.reset();
    return id;
  }
  void TakeAway() { EXPECT_TRUE(env_.Rename(dirs_[1], "/away").ok()); }
  void PutBack() {
    process_.reset();
    EXPECT_TRUE(env_.Rename(dirs_[1], "/mnt/other").ok());
    EXPECT_TRUE(env_.Rename("/away", dirs_[1]).ok());
  }
  void LoseState() { EXPECT_TRUE(env_.Unlink(std::string(kState) + "/witness").ok()); }

  FaultEnv env_;
  const std::vector<std::string> dirs_ = {"/mnt/d0", "/mnt/d1"};
  std::unique_ptr<DriveProcess> process_;
};

TEST_F(DriveWitnessesTest, AnAbsentDriveHidesTheJobsThatItMayHaveAndNoOthers) {
  const std::string id = SaveOnDrive1();
  TakeAway();
  Start();
  EXPECT_TRUE(process_->drives[0]->Store(nullptr).ok());
  EXPECT_THAT(process_->told, IsEmpty()) << "the other directory has not been looked at";
  process_->OpenAll();
  ASSERT_EQ(process_->told.size(), 1u);
  const TierScanned told = process_->told.front();
  EXPECT_EQ(told.tier, TierKind::kNvme);
  EXPECT_TRUE(told.status.ok());
  EXPECT_THAT(told.dir, AllOf(HasSubstr("/mnt/d1"), HasSubstr(id.substr(0, 8))));
  EXPECT_THAT(told.hidden, ElementsAre(Key("demo")));
  EXPECT_THAT(told.hidden.at("demo"), HasSubstr("ckptctl forget-drive " + id.substr(0, 8)));
  EXPECT_THAT(process_->witnesses->Notes(), ElementsAre(HasSubstr("forget-drive")));
  EXPECT_EQ(process_->Note(1, "demo"), absl::OkStatus()) << "saves go on in its place";
  // Who asks again is told the same.
  EXPECT_THAT(process_->witnesses->Scanned({7, {"/mnt/d0"}}), IsEmpty());
  for (const std::vector<std::string>& dirs : {std::vector<std::string>{}, {told.dir}}) {
    const std::vector<TierScanned> again = process_->witnesses->Scanned({7, dirs});
    ASSERT_EQ(again.size(), 1u);
    EXPECT_EQ(again.front().drain, 7u);
    EXPECT_THAT(again.front().hidden, ElementsAre(Key("demo")));
  }
}

TEST_F(DriveWitnessesTest, WithoutTheStateDirectoryItHidesEveryJob) {
  SaveOnDrive1();
  TakeAway();
  LoseState();
  for (int start = 0; start < 3; ++start) {
    Start();
    process_->OpenAll();
    ASSERT_FALSE(process_->told.empty());
    EXPECT_TRUE(absl::IsUnavailable(process_->told.back().status));
    EXPECT_THAT(Message(process_->told.back().status), HasSubstr("ckptctl forget-drive"));
  }
}

TEST_F(DriveWitnessesTest, OnceItIsBackNothingIsHidden) {
  SaveOnDrive1();
  TakeAway();
  Start();
  process_->OpenAll();
  PutBack();
  Start();
  process_->OpenAll();
  // What was made in its place is absent now, and nothing was ever written there.
  for (const TierScanned& told : process_->told) {
    EXPECT_TRUE(told.status.ok());
    EXPECT_THAT(told.hidden, IsEmpty());
  }
}

TEST_F(DriveWitnessesTest, AForgottenDriveIsTakenBackWhereItWasTold) {
  const std::string id = SaveOnDrive1();
  TakeAway();
  Start();
  process_->OpenAll();
  const std::string dir = process_->told.front().dir;
  const absl::StatusOr<std::string> text = process_->witnesses->Forget(id.substr(0, 8));
  ASSERT_TRUE(text.ok()) << text.status();
  EXPECT_THAT(*text, AllOf(HasSubstr(id), HasSubstr("demo")));
  ASSERT_EQ(process_->told.size(), 2u);
  EXPECT_EQ(process_->told.back().dir, dir);
  EXPECT_TRUE(process_->told.back().status.ok());
  EXPECT_THAT(process_->told.back().hidden, IsEmpty());
  EXPECT_THAT(process_->witnesses->Notes(), IsEmpty());
  Start();
  process_->OpenAll();
  EXPECT_THAT(process_->told, IsEmpty());
  // It comes back, is read like any other, and is expected again.
  PutBack();
  Start();
  process_->OpenAll();
  process_.reset();
  TakeAway();
  Start();
  process_->OpenAll();
  EXPECT_THAT(process_->witnesses->Notes(), Contains(HasSubstr(id.substr(0, 8))));
}

TEST_F(DriveWitnessesTest, OnlyWhatIsAbsentCanBeForgotten) {
  const std::string id = SaveOnDrive1();
  Start();
  process_->OpenAll();
  EXPECT_THAT(Message(process_->witnesses->Forget(id).status()), HasSubstr("is here"));
  EXPECT_THAT(Message(process_->witnesses->Forget("0123abcd").status()),
              HasSubstr("no drive is absent"));
  TakeAway();
  Start();
  process_->OpenAll();
  const absl::Status unknown = process_->witnesses->Forget("0123abcd").status();
  EXPECT_TRUE(absl::IsNotFound(unknown));
  EXPECT_THAT(Message(unknown), HasSubstr("absent are: " + id.substr(0, 8)));
  EXPECT_TRUE(absl::IsNotFound(process_->witnesses->Forget(id.substr(0, 7)).status()));
  EXPECT_TRUE(absl::IsNotFound(process_->witnesses->Forget("").status()));
}

TEST_F(DriveWitnessesTest, ADriveThatWentAwayWhileItWasUsedCanBeForgotten) {
  const std::string id = SaveOnDrive1();
  Start();
  process_->OpenAll();
  env_.SetDevice(7, dirs_[1]);
  EXPECT_TRUE(process_->drives[1]->Note(absl::OkStatus()).went_away);
  EXPECT_TRUE(process_->witnesses->Forget(id).ok());
}

TEST_F(DriveWitnessesTest, AHungDriveDelaysNoOther) {
  Start(1);  // no write of drive 1's witness ever begins
  process_->OpenAll();
  EXPECT_EQ(process_->Note(0, "demo"), absl::OkStatus());
}

TEST_F(DriveWitnessesTest, AFullStateDirectoryDelaysNobodyWhereThereAreTwoDrives) {
  Start();
  process_->OpenAll();
  env_.FailMatching("/state/witness", ENOSPC);
  EXPECT_EQ(process_->Note(0, "demo"), absl::OkStatus());
  // It learns it when it can be written.
  env_.FailMatching("/state/witness", 0);
  process_->witnesses->LookAgain();
  process_.reset();
  EXPECT_TRUE(env_.Rename(dirs_[0], "/away").ok());
  Start();
  process_->OpenAll();
  ASSERT_EQ(process_->told.size(), 1u);
  EXPECT_THAT(process_->told.front().hidden, ElementsAre(Key("demo")));
}

TEST_F(DriveWitnessesTest, WithoutAMajorityNothingIsWritten) {
  process_ = std::make_unique<DriveProcess>(env_, kState, std::vector<std::string>{dirs_[0]});
  env_.FailMatching("/state/witness", ENOSPC);
  process_->OpenAll();
  const absl::Status refused = process_->Note(0, "demo");
  EXPECT_TRUE(absl::IsUnavailable(refused)) << ToString(refused);
  EXPECT_THAT(Message(refused), AllOf(HasSubstr("demo"), HasSubstr("ENOSPC"), HasSubstr("/state")));
  env_.FailMatching("/state/witness", 0);
  EXPECT_EQ(process_->Note(0, "demo"), absl::OkStatus()) << "tried again";
}

TEST_F(DriveWitnessesTest, AFullDriveSaysThatItIsFull) {
  Start();
  process_->OpenAll();
  env_.FailMatching("/mnt/d0/.holdfast/probe-", ENOSPC);
  EXPECT_TRUE(absl::IsResourceExhausted(process_->Note(0, "demo"))) << "so that room is made";
}

TEST_F(DriveWitnessesTest, AJobThatWasRemovedIsNotExpectedAnyMore) {
  SaveOnDrive1();
  Start();
  process_->OpenAll();
  EXPECT_TRUE(env_.RemoveDirectory(dirs_[1] + "/demo").ok());
  process_->witnesses->JobGone(1, "demo");
  process_.reset();
  TakeAway();
  Start();
  process_->OpenAll();
  for (const TierScanned& told : process_->told) {
    EXPECT_THAT(told.hidden, Not(Contains(Key("demo"))));
  }
}

TEST_F(DriveWitnessesTest, ADamagedWitnessFileDoesNotCount) {
  SaveOnDrive1();
  TakeAway();
  ASSERT_TRUE(env_.FlipBit(std::string(kState) + "/witness", 40, 1).ok());
  Start();
  process_->OpenAll();
  ASSERT_FALSE(process_->told.empty());
  EXPECT_TRUE(absl::IsUnavailable(process_->told.back().status));
}

TEST_F(DriveWitnessesTest, ADriveThatOnlyAnOlderVersionKnewProvesNothing) {
  SaveOnDrive1();
  LoseState();
  ASSERT_TRUE(env_.Unlink(dirs_[0] + "/.holdfast/witness").ok());
  TakeAway();
  Start();
  process_->witnesses->Expect(std::string(32, 'a'), dirs_[1]);
  process_->OpenAll();
  ASSERT_EQ(process_->told.size(), 1u);
  EXPECT_TRUE(absl::IsUnavailable(process_->told.front().status));
}

TEST_F(DriveWitnessesTest, WhatLayOnADriveBeforeThereWereWitnessesIsNotedAtTheFirstStart) {
  SaveOnDrive1();
  LoseState();
  for (const std::string& dir : dirs_) {
    ASSERT_TRUE(env_.Unlink(dir + "/.holdfast/witness").ok());
  }
  Start();
  process_->OpenAll();
  process_.reset();
  TakeAway();
  Start();
  process_->OpenAll();
  ASSERT_EQ(process_->told.size(), 1u);
  EXPECT_THAT(process_->told.front().hidden, ElementsAre(Key("demo")));
}

}  // namespace
}  // namespace holdfast
