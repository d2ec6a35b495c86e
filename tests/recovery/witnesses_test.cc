#include "recovery/witnesses.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <random>

#include "absl/strings/str_cat.h"

namespace holdfast {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

std::string Id(int n) {
  return absl::StrCat(absl::Hex(n, absl::kZeroPad16), absl::Hex(n, absl::kZeroPad16));
}
std::string Dir(int n) {
  return absl::StrCat("/mnt/nvme", n);
}

// What lies on the disks of a node, from one life of its daemon to the next.
struct Disks {
  std::map<std::string, v1::Witness> files;                // by witness
  std::map<std::string, std::set<std::string>> truly_has;  // by drive, jobs with shards there
  uint64_t starts = 0;
};

// A daemon that starts: drive n is at Dir(n) if its id is in `here`.
Witnesses Start(Disks& disks, const std::map<int, std::string>& here) {
  Witnesses known(true, 1000 * ++disks.starts);
  const auto read = [&](const std::string& witness) {
    if (const auto file = disks.files.find(witness); file != disks.files.end()) {
      known.Read(witness, file->second);
    }
  };
  read(kStateWitness);
  for (const auto& [n, id] : here) {
    read(id);
    const auto has = disks.truly_has.find(id);
    known.Present(id, Dir(n), has != disks.truly_has.end() ? has->second : std::set<std::string>());
  }
  return known;
}

void Write(Witnesses& known, const std::string& witness, Disks& disks) {
  const v1::Witness text = known.TextFor(witness);
  disks.files[witness] = text;
  known.Written(witness, text);
}
// Twice: what the drives say of themselves the others can say only then.
void WriteAll(Witnesses& known, const std::map<int, std::string>& here, Disks& disks) {
  for (int i = 0; i < 2; ++i) {
    for (const auto& [n, id] : here) {
      Write(known, id, disks);
    }
    Write(known, kStateWitness, disks);
  }
}
void Save(Witnesses& known, const std::string& drive, const std::string& job, Disks& disks) {
  EXPECT_TRUE(known.MayWrite(drive, job));
  disks.truly_has[drive].insert(job);
}

// Two drives and a state directory, "demo" on drive 1, "other" on drive 0, all of it noted.
class WitnessesTest : public ::testing::Test {
 protected:
  WitnessesTest() {
    Witnesses known = Start(disks_, both_);
    known.Add(Id(0), "", "other");
    known.Add(Id(1), "", "demo");
    WriteAll(known, both_, disks_);
    Save(known, Id(0), "other", disks_);
    Save(known, Id(1), "demo", disks_);
  }
  const std::map<int, std::string> both_ = {{0, Id(0)}, {1, Id(1)}};
  Disks disks_;
};

TEST_F(WitnessesTest, AJobIsNotedByMoreThanHalfBeforeItsFirstShardTheDriveItselfFirst) {
  Witnesses known = Start(disks_, both_);
  EXPECT_TRUE(known.MayWrite(Id(1), "demo")) << "that was noted before";
  EXPECT_FALSE(known.MayWrite(Id(1), "new"));
  known.Add(Id(1), "", "new");
  Write(known, kStateWitness, disks_);
  Write(known, Id(0), disks_);
  EXPECT_FALSE(known.MayWrite(Id(1), "new")) << "others say nothing of a drive that it does not";
  Write(known, Id(1), disks_);
  EXPECT_FALSE(known.MayWrite(Id(1), "new")) << "one of three";
  Write(known, kStateWitness, disks_);
  EXPECT_TRUE(known.MayWrite(Id(1), "new"));
  EXPECT_FALSE(known.MayWrite(Id(0), "new")) << "on that drive nobody knows it";
}

TEST_F(WitnessesTest, OneDriveAloneNeedsTheStateDirectory) {
  Disks disks;
  Witnesses known = Start(disks, {{0, Id(0)}});
  known.Add(Id(0), "", "demo");
  Write(known, Id(0), disks);
  EXPECT_FALSE(known.MayWrite(Id(0), "demo"));
  Write(known, kStateWitness, disks);
  EXPECT_TRUE(known.MayWrite(Id(0), "demo"));
}

TEST_F(WitnessesTest, MoreThanHalfProveWhatAnAbsentDriveHas) {
  const Witnesses known = Start(disks_, {{0, Id(0)}});
  ASSERT_EQ(known.Absent().size(), 1u);
  const AbsentDrive absent = known.Absent().front();
  EXPECT_EQ(absent.id, Id(1));
  EXPECT_EQ(absent.dir, Dir(1));
  EXPECT_TRUE(absent.proven);
  EXPECT_THAT(absent.jobs, ElementsAre("demo"));
}

TEST_F(WitnessesTest, FewerProveNothingAndGoOnProvingNothing) {
  disks_.files.erase(kStateWitness);  // the state directory is lost
  for (int start = 0; start < 3; ++start) {
    Witnesses known = Start(disks_, {{0, Id(0)}});
    ASSERT_EQ(known.Absent().size(), 1u);
    EXPECT_FALSE(known.Absent().front().proven) << start;
    WriteAll(known, {{0, Id(0)}}, disks_);  // a fresh state directory has heard of it from one
    EXPECT_FALSE(known.Absent().front().proven) << start;
  }
  // And if that one is lost, too, it is still known that there are others.
  const Witnesses alone = Start(disks_, {});
  EXPECT_EQ(alone.Absent().size(), 2u);
}

TEST_F(WitnessesTest, ANewDriveInTheOldOnesPlaceDoesNotCountUntilItKnows) {
  const std::map<int, std::string> here = {{0, Id(0)}, {1, Id(7)}};
  for (int start = 0; start < 3; ++start) {
    Witnesses known = Start(disks_, here);
    ASSERT_EQ(known.Absent().size(), 1u);
    EXPECT_TRUE(known.Absent().front().proven) << start;
    EXPECT_THAT(known.Absent().front().jobs, ElementsAre("demo"));
    known.Add(Id(7), "", "demo");
    WriteAll(known, here, disks_);
    Save(known, Id(7), "demo", disks_);
  }
}

// Nothing was mounted at a start, and the daemon made a directory. Then the drive is back.
TEST_F(WitnessesTest, WhatWasOnlyInADrivesPlaceIsNotMissed) {
  for (const bool state_lost : {false, true}) {
    Disks disks = disks_;
    if (state_lost) {
      disks.files.erase(kStateWitness);
    }
    const std::map<int, std::string> instead = {{0, Id(0)}, {1, Id(7)}};
    Witnesses known = Start(disks, instead);
    WriteAll(known, instead, disks);
    EXPECT_THAT(Start(disks, both_).Absent(), IsEmpty()) << state_lost;
    // If something was saved there, it is, and for that job alone.
    Witnesses next = Start(disks, instead);
    next.Add(Id(7), "", "new");
    WriteAll(next, instead, disks);
    Save(next, Id(7), "new", disks);
    const std::vector<AbsentDrive> absent = Start(disks, both_).Absent();
    ASSERT_EQ(absent.size(), 1u);
    EXPECT_TRUE(absent.front().proven) << state_lost;
    EXPECT_THAT(absent.front().jobs, ElementsAre("new"));
  }
}

TEST_F(WitnessesTest, ADriveThatComesBackIsAbsentNoMoreAndSaysItselfWhatItHas) {
  {
    Witnesses known = Start(disks_, {{0, Id(0)}});
    WriteAll(known, {{0, Id(0)}}, disks_);
  }
  Witnesses known = Start(disks_, both_);
  EXPECT_THAT(known.Absent(), IsEmpty());
  EXPECT_TRUE(known.IsPresent(Id(1)));
}

TEST_F(WitnessesTest, AForgottenDriveIsNotWaitedForUntilItComesBack) {
  Witnesses known = Start(disks_, {{0, Id(0)}});
  known.Forget(Id(1));
  EXPECT_THAT(known.Absent(), IsEmpty());
  WriteAll(known, {{0, Id(0)}}, disks_);
  EXPECT_EQ(known.count(), 2u) << "all that is left knows it: it is no witness any more";
  EXPECT_THAT(Start(disks_, {{0, Id(0)}}).Absent(), IsEmpty());
  Witnesses back = Start(disks_, both_);
  EXPECT_TRUE(back.IsPresent(Id(1)));
  WriteAll(back, both_, disks_);
  EXPECT_EQ(Start(disks_, {{0, Id(0)}}).Absent().size(), 1u) << "and is expected again";
}

TEST_F(WitnessesTest, ForgettingSomeProvesNothingOfOthers) {
  Disks disks;
  const std::map<int, std::string> four = {{0, Id(0)}, {1, Id(1)}, {2, Id(2)}, {3, Id(3)}};
  Witnesses first = Start(disks, four);
  for (const auto& [n, id] : four) {
    first.Add(id, "", "other");
  }
  WriteAll(first, four, disks);
  first.Add(Id(3), "", "demo");  // known by three of five
  for (const int n : {3, 2, 1}) {
    Write(first, Id(n), disks);
  }
  Save(first, Id(3), "demo", disks);
  Witnesses known = Start(disks, {{0, Id(0)}});
  known.Forget(Id(1));
  known.Forget(Id(2));
  WriteAll(known, {{0, Id(0)}}, disks);
  ASSERT_EQ(known.Absent().size(), 1u);
  EXPECT_FALSE(known.Absent().front().proven);
}

TEST_F(WitnessesTest, CopiesOfBeforeWithoutAWitnessFileProveNothing) {
  Disks disks;
  disks.truly_has[Id(0)] = {"old"};
  disks.truly_has[Id(1)] = {"old"};
  Witnesses known = Start(disks, {{0, Id(0)}});
  known.Expect(Id(1), Dir(1));  // that much an older version noted
  ASSERT_EQ(known.Absent().size(), 1u);
  EXPECT_FALSE(known.Absent().front().proven);
  WriteAll(known, {{0, Id(0)}}, disks);
  // What lies on a drive is noted at the first start.
  const Witnesses without = Start(disks, {});
  ASSERT_EQ(without.Absent().size(), 2u);
  EXPECT_THAT(without.Absent().front().jobs, ElementsAre("old"));
  // And of the other when it is back.
  Witnesses back = Start(disks, both_);
  WriteAll(back, both_, disks);
  EXPECT_TRUE(Start(disks, {{0, Id(0)}}).Absent().front().proven);
}

TEST_F(WitnessesTest, AJobThatWasRemovedIsNotExpected) {
  Witnesses known = Start(disks_, both_);
  disks_.truly_has[Id(1)].erase("demo");
  known.Remove(Id(1), "demo");
  WriteAll(known, both_, disks_);
  EXPECT_THAT(Start(disks_, {{0, Id(0)}}).Absent().front().jobs, IsEmpty());
}

TEST_F(WitnessesTest, WhatWasLeftOutOfAnOldFileIsNotBelieved) {
  const v1::Witness old = disks_.files[kStateWitness];
  Witnesses known = Start(disks_, both_);
  known.Add(Id(1), "", "new");
  Write(known, Id(1), disks_);
  Write(known, Id(0), disks_);
  Save(known, Id(1), "new", disks_);
  ASSERT_EQ(disks_.files[kStateWitness].SerializeAsString(), old.SerializeAsString());
  EXPECT_THAT(Start(disks_, {{0, Id(0)}}).Absent().front().jobs, ElementsAre("demo", "new"));
}

TEST_F(WitnessesTest, TheRemoteDirectoryIsNotedByAllAndIsNoWitness) {
  Witnesses known = Start(disks_, both_);
  known.SetRemote(Id(9), "/mnt/remote");
  WriteAll(known, both_, disks_);
  EXPECT_EQ(known.count(), 3u);
  disks_.files.erase(kStateWitness);
  Witnesses next = Start(disks_, {{0, Id(0)}});
  EXPECT_EQ(next.remote_id(), Id(9));
  EXPECT_EQ(next.remote_dir(), "/mnt/remote");
  next.Forget(Id(9));
  EXPECT_EQ(next.remote_id(), "");
  EXPECT_EQ(next.Absent().size(), 1u) << "the drive, still";
  WriteAll(next, {{0, Id(0)}}, disks_);
  EXPECT_EQ(Start(disks_, both_).remote_id(), "");
  Witnesses again = Start(disks_, both_);
  again.SetRemote(Id(9), "/mnt/remote");
  WriteAll(again, both_, disks_);
  EXPECT_EQ(Start(disks_, both_).remote_id(), Id(9)) << "it came back";
}

TEST_F(WitnessesTest, WhatOthersWroteIntoAFileIsNotBelievedBlindly) {
  v1::Witness hostile;
  for (const char* id : {"", "short", "zz000000000000000000000000000000"}) {
    hostile.add_drives()->set_id(id);
  }
  v1::Witness::Drive& sound = *hostile.add_drives();
  sound.set_id(Id(5));
  sound.set_version(1);
  sound.add_jobs()->set_name("../../etc");
  hostile.add_drives()->set_id(Id(6));
  hostile.mutable_drives(4)->set_version(~uint64_t{0});
  hostile.set_remote_id("no id");
  Witnesses known(true, 1);
  known.Read(kStateWitness, hostile);
  ASSERT_EQ(known.Absent().size(), 1u);
  EXPECT_EQ(known.Absent().front().id, Id(5));
  EXPECT_THAT(known.Absent().front().jobs, IsEmpty());
  EXPECT_EQ(known.remote_id(), "");
}

// ---- Drives that come and go, files that are lost, writes that fail ----

class RandomLife {
 public:
  explicit RandomLife(uint32_t seed) : random_(seed) {}
  void Run() {
    const int places = 1 + Below(5);
    std::vector<std::string> drives;  // all that ever were
    for (int n = 0; n < places; ++n) {
      drives.push_back(Id(next_id_++));
    }
    for (int life = 0; life < 12; ++life) {
      // 1. What is there of it.
      if (Below(6) == 0) {
        disks_.files.erase(kStateWitness);
        // (Nobody else knows it of several that a person called lost for good. They stay lost.)
        std::erase_if(drives, [this](const std::string& id) { return forgotten_.contains(id); });
      }
      if (drives.empty()) {
        drives.push_back(Id(next_id_++));
      }
      if (Below(8) == 0) {
        disks_.files.erase(drives[static_cast<size_t>(Below(static_cast<int>(drives.size())))]);
      }
      if (Below(5) == 0) {
        drives.push_back(Id(next_id_++));
      }
      here_.clear();
      std::shuffle(drives.begin(), drives.end(), random_);
      for (int n = 0; n < places && n < static_cast<int>(drives.size()); ++n) {
        if (Below(4) != 0) {
          here_[n] = drives[static_cast<size_t>(n)];
        }
      }
      writable_ = {Below(4) != 0 ? kStateWitness : "none"};
      for (const auto& [n, id] : here_) {
        if (Below(5) != 0) {
          writable_.insert(id);
        }
      }
      // 2. A daemon's life.
      Witnesses known = Start(disks_, here_);
      Judge(known);
      for (int i = 0; i < 20; ++i) {
        Do(known);
        Judge(known);
      }
    }
  }
  int proven() const { return proven_; }
  int saves() const { return saves_; }

 private:
  int Below(int n) { return static_cast<int>(random_() % static_cast<uint32_t>(n)); }
  void Judge(const Witnesses& known) {
    for (const AbsentDrive& absent : known.Absent()) {
      proven_ += absent.proven ? 1 : 0;
      for (const std::string& job : disks_.truly_has[absent.id]) {
        ASSERT_TRUE(!absent.proven || absent.jobs.contains(job))
            << job << " lies on " << absent.id << ", and that is said to be proven wrong";
      }
    }
  }
  void TryWrite(Witnesses& known, const std::string& witness) {
    if (writable_.contains(witness)) {
      Write(known, witness, disks_);
    }
  }
  void Do(Witnesses& known) {
    const std::vector<AbsentDrive> absent = known.Absent();
    if (Below(12) == 0 && !absent.empty()) {
      known.Forget(absent.front().id);
      forgotten_.insert(absent.front().id);
    }
    if (here_.empty()) {
      return TryWrite(known, kStateWitness);
    }
    const std::string drive =
        std::next(here_.begin(), Below(static_cast<int>(here_.size())))->second;
    const std::string job = absl::StrCat("job", Below(6));
    switch (Below(4)) {
      case 0:
        disks_.truly_has[drive].erase(job);
        return known.Remove(drive, job);
      case 1:
        TryWrite(known, drive);
        return TryWrite(known, kStateWitness);
      default:
        known.Add(drive, "", job);
        TryWrite(known, drive);
        for (const std::string& other : std::set<std::string>(writable_)) {
          if (Below(2) == 0) {
            TryWrite(known, other);
          }
        }
        if (known.MayWrite(drive, job)) {
          ++saves_;
          disks_.truly_has[drive].insert(job);
        }
    }
  }

  std::mt19937 random_;
  Disks disks_;
  int next_id_ = 1;
  std::map<int, std::string> here_;
  std::set<std::string> writable_;
  std::set<std::string> forgotten_;
  int proven_ = 0;
  int saves_ = 0;
};

TEST(WitnessesRandomTest, NothingIsEverWronglyProvenNotToBeThere) {
  int proven = 0;
  int saves = 0;
  for (uint32_t seed = 1; seed <= 500 && !::testing::Test::HasFatalFailure(); ++seed) {
    SCOPED_TRACE(seed);
    RandomLife life(seed);
    life.Run();
    proven += life.proven();
    saves += life.saves();
  }
  EXPECT_GT(proven, 1000) << "else it proves nothing itself";
  EXPECT_GT(saves, 1000);
}

}  // namespace
}  // namespace holdfast
