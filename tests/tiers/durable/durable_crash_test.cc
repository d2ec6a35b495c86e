// A crash (power loss, and the death of the process) at every call of every path that changes a
// durable tier, and at every call of putting right what such a crash left; and a failure of each of
// those calls, which the process survives. Afterwards nothing
// acknowledged is missing, nothing partial is visible, nothing leaks.
#include <gtest/gtest.h>

#include <cerrno>
#include <cstring>
#include <functional>
#include <set>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/errno_status.h"
#include "base/status.h"
#include "tests/tiers/durable/durable_harness.h"
#include "tiers/durable/names.h"

namespace holdfast {
namespace {

struct Paths {
  const char* name;
  DurablePlace place;
  std::vector<int> errors = {};  // with which calls fail, one at a time; none: they crash
};
void PrintTo(const Paths& paths, std::ostream* out) {
  *out << paths.name;
}

// One story: what is there before, what is done, what may be there afterwards.
class DurableCrashTest : public testing::TestWithParam<Paths> {
 protected:
  using Check = std::function<void(bool acknowledged)>;

  bool remote() const { return GetParam().place.kind == DurableKind::kRemote; }
  CopyStore& store() { return harness_->store(); }
  Env& env() { return harness_->env(); }

  void Fresh() {
    harness_ = std::make_unique<DurableHarness>(GetParam().place);
    ASSERT_TRUE(harness_->Start().ok());
  }
  absl::StatusOr<PublishedCopy> Publish(const SampleImage& sample) {
    return PublishShard(store(), sample,
                        GetParam().place.compressed ? std::optional(1) : std::nullopt);
  }
  bool StepIsThere(Step step) {
    return env().Info(absl::StrCat(harness_->dir(), "/demo/", step, "-a3")).ok();
  }
  // Of remote steps: shards have a manifest or the mark beside them. `swept`: and nothing else has.
  void CheckMarks(bool swept) {
    const std::string job = harness_->dir() + "/demo";
    const std::vector<std::string> steps = env().List(job).value_or(std::vector<std::string>());
    for (const std::string& step : steps) {
      if (!remote() || !ParseStepDirectoryName(step)) {
        continue;
      }
      std::set<StepFileRole> roles;
      const std::vector<std::string> names = env().List(JoinPath(job, step)).value();
      for (const std::string& name : names) {
        roles.insert(ParseStepFileName(DurableKind::kRemote, name).role);
      }
      const bool shards =
          roles.contains(StepFileRole::kImage) || roles.contains(StepFileRole::kRecord);
      const bool manifest = roles.contains(StepFileRole::kManifest);
      const bool mark = roles.contains(StepFileRole::kMark);
      EXPECT_TRUE(!shards || manifest || mark) << step << ": nothing says that it was only begun";
      if (swept) {
        EXPECT_FALSE(mark && (manifest || !shards)) << step << ": it is marked for nothing";
      }
    }
  }
  void CheckTidy() {
    CheckMarks(true);
    for (const std::string& problem : harness_->problems()) {
      ADD_FAILURE() << problem;
    }
    for (const std::string& leftover : harness_->Leftovers()) {
      ADD_FAILURE() << "left over: " << leftover;
    }
    const auto scan = store().ScanAll();
    ASSERT_TRUE(scan.ok());
    EXPECT_LE(scan->unreadable_count, bad_copies_);
    EXPECT_EQ(scan->unknown_count, 0u);
    if (!remote()) {  // what is in the pool is accounted for, and nowhere else
      uint64_t bytes = 0;
      const std::string pool = harness_->dir() + "/.holdfast/pool";
      const std::vector<std::string> names = env().List(pool).value();
      for (const std::string& name : names) {
        bytes += env().Info(JoinPath(pool, name))->bytes;
      }
      EXPECT_EQ(store().pool_bytes(), bytes);
      EXPECT_LE(bytes, harness_->options().pool_bytes_max);
    }
  }

  // Crashes at call 1, 2, … of `act` until it has no more calls; then puts right, with a crash amid
  // that as well.
  void CrashEverywhere(const std::function<void()>& prepare,
                       const std::function<absl::Status()>& act, const Check& check) {
    int sweep_calls = 1;
    bool reached = true;
    for (int n = 1; reached; ++n) {
      for (const bool twice : {false, true}) {
        SCOPED_TRACE(absl::StrCat("crash at call ", n, twice ? ", and when putting it right" : ""));
        Fresh();
        prepare();
        FaultEnv& faults = *harness_->faults();
        int before = faults.calls();
        faults.CrashAtCall(n);
        const bool acknowledged = act().ok();
        reached = faults.calls() - before >= n;
        harness_->Stop();
        harness_->Crash();
        if (only_begun_) {
          CheckMarks(false);  // another node may look before this one has put right what it left
        }
        if (twice) {
          before = faults.calls();
          faults.CrashAtCall(n * 7 % sweep_calls + 1);
          harness_->Start().IgnoreError();
          sweep_calls = std::max(sweep_calls, faults.calls() - before);
          harness_->Stop();
          harness_->Crash();
        }
        const absl::Status started = harness_->Start();
        ASSERT_TRUE(started.ok()) << ToString(started);
        CheckTidy();
        check(acknowledged);
        if (HasFailure()) {
          return;
        }
        ++crashes_;
      }
    }
    EXPECT_GT(crashes_, 2) << "a story of no calls";
  }

  // The same with one call failing and the process living on: the error is told, and what it left
  // is put right by the next sweep, or, when power is lost at once, by the next start. What was
  // acknowledged in spite of it is there after that, too.
  void FailEverywhere(const std::function<void()>& prepare,
                      const std::function<absl::Status()>& act, const Check& check) {
    for (const int error : GetParam().errors) {
      bool reached = true;
      for (int n = 1; reached; ++n) {
        for (const bool lives_on : {true, false}) {
          if (!lives_on && error != EIO) {
            continue;  // what is durable by then does not depend on the error
          }
          SCOPED_TRACE(absl::StrCat("call ", n, " fails with ", ::strerrorname_np(error),
                                    lives_on ? "" : ", then power is lost"));
          Fresh();
          prepare();
          FaultEnv& faults = *harness_->faults();
          const int before = faults.calls();
          faults.FailCall(n, error);
          const absl::Status status = act();
          reached = faults.calls() - before >= n;
          if (!reached) {
            EXPECT_TRUE(status.ok()) << ToString(status);
            break;  // the failure is still to come
          }
          if (!status.ok()) {
            EXPECT_TRUE(absl::StrContains(status.message(), ::strerrorname_np(error)) ||
                        (drive_is_full_ && IsNoSpace(status)))
                << ToString(status);
            ++failures_;
          }
          if (lives_on) {
            ASSERT_TRUE(store().Sweep().ok());
            CheckTidy();
            check(status.ok());
          }
          harness_->Stop();
          harness_->Crash();
          ASSERT_TRUE(harness_->Start().ok());
          CheckTidy();
          check(status.ok());
          if (HasFailure()) {
            return;
          }
        }
      }
    }
    EXPECT_GT(failures_, 2) << "a story of no failures";
  }
  void Everywhere(const std::function<void()>& prepare, const std::function<absl::Status()>& act,
                  const Check& check) {
    if (GetParam().errors.empty()) {
      CrashEverywhere(prepare, act, check);
    } else {
      FailEverywhere(prepare, act, check);
    }
  }

  std::vector<SampleImage> Shards(Step step) {
    return {SampleShard(step, 0, 3), SampleShard(step, 1, 3), SampleShard(step, 2, 3)};
  }
  void PublishAll(Step step, bool with_manifest) {
    std::vector<PublishedCopy> copies;
    for (const SampleImage& sample : Shards(step)) {
      const auto copy = Publish(sample);
      ASSERT_TRUE(copy.ok()) << ToString(copy.status());
      copies.push_back(*copy);
    }
    manifest_ = ManifestOf(Shards(step), copies);
    if (with_manifest && remote()) {
      const absl::Status status = store().PublishManifest(manifest_);
      ASSERT_TRUE(status.ok()) << ToString(status);
    }
  }
  // Makes files of removed copies, `count` of `elements` each.
  void FillPool(int count, uint64_t elements) {
    for (int i = 0; i < count; ++i) {
      const SampleImage sample = ShardOf(100 + static_cast<Step>(i), elements);
      ASSERT_TRUE(Publish(sample).ok());
    }
    for (int i = 0; i < count; ++i) {
      const auto removed =
          store().RemoveCopy(NameOf(ShardOf(100 + static_cast<Step>(i), elements)));
      ASSERT_TRUE(removed.ok()) << ToString(removed.status());
      ASSERT_GT(removed->bytes_recycled, 0u);
    }
  }
  // A shard of another size than SampleShard's.
  static SampleImage ShardOf(Step step, uint64_t elements) {
    ShardRecord identity = SampleShard(step, 0, 3).record;
    identity.digests.clear();
    return MakeSampleImage({Whole("w", DType::kF32, {elements})}, identity);
  }
  void MendEverywhere(
      const std::function<void(const std::string& image, const std::string& record)>& damage);
  int GoodCopies(Step step) {
    int good = 0;
    for (const SampleImage& sample : Shards(step)) {
      const absl::Status status = CheckShard(store(), sample);
      EXPECT_TRUE(status.ok() || absl::IsNotFound(status)) << ToString(status);
      good += status.ok() ? 1 : 0;
    }
    return good;
  }

  std::unique_ptr<DurableHarness> harness_;
  int crashes_ = 0;
  int failures_ = 0;
  uint64_t bad_copies_ = 0;     // that were there before
  bool only_begun_ = false;     // no manifest goes in this story
  bool drive_is_full_ = false;  // so that what fails may end in ENOSPC, too
  Manifest manifest_;
};

constexpr DurablePlace kNvme = {.kind = DurableKind::kNvme, .direct = true};
constexpr DurablePlace kNvmeKilled = {
    .kind = DurableKind::kNvme, .direct = true, .power_loss = false};
constexpr DurablePlace kRemote = {.kind = DurableKind::kRemote};
constexpr DurablePlace kRemoteKilled = {.kind = DurableKind::kRemote, .power_loss = false};
constexpr DurablePlace kCompressed = {.kind = DurableKind::kRemote, .compressed = true};
constexpr DurablePlace kCompressedKilled = {
    .kind = DurableKind::kRemote, .power_loss = false, .compressed = true};
constexpr DurablePlace kLinksOnly = {.kind = DurableKind::kRemote, .rename_no_replace = false};
constexpr DurablePlace kRenameOnly = {.kind = DurableKind::kRemote, .hard_links = false};
constexpr DurablePlace kNeither = {
    .kind = DurableKind::kRemote, .hard_links = false, .rename_no_replace = false};
constexpr DurablePlace kNoRoomAhead = {
    .kind = DurableKind::kNvme, .allocate = false, .direct = true};

std::string NameOfPaths(const testing::TestParamInfo<Paths>& paths) {
  return paths.param.name;
}

INSTANTIATE_TEST_SUITE_P(Crashing, DurableCrashTest,
                         testing::Values(Paths{"Nvme", kNvme}, Paths{"NvmeKilled", kNvmeKilled},
                                         Paths{"NvmeThatCannotReserve", kNoRoomAhead},
                                         Paths{"Remote", kRemote},
                                         Paths{"RemoteKilled", kRemoteKilled},
                                         Paths{"Compressed", kCompressed},
                                         Paths{"CompressedKilled", kCompressedKilled},
                                         Paths{"RemoteWithLinksOnly", kLinksOnly},
                                         Paths{"RemoteWithRenameOnly", kRenameOnly},
                                         Paths{"RemoteWithNeither", kNeither}),
                         NameOfPaths);
// ENOSPC and EIO are what most is made of: room is sought elsewhere after the one, the other says
// nothing about what was done. The rest, where names are published otherwise, is the same code; and
// a sanitizer, under which these take minutes, sees nothing more in it.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
const std::vector<int> kErrors = {ENOSPC, EIO};
#else
const std::vector<int> kErrors = {ENOSPC, EIO, EROFS, EDQUOT, ESTALE};
#endif
INSTANTIATE_TEST_SUITE_P(Failing, DurableCrashTest,
                         testing::Values(Paths{"Nvme", kNvme, kErrors},
                                         Paths{"Remote", kRemote, kErrors},
                                         Paths{"Compressed", kCompressed, {ENOSPC, EIO}},
                                         Paths{"RemoteWithLinksOnly", kLinksOnly, {ENOSPC, EIO}},
                                         Paths{"RemoteWithRenameOnly", kRenameOnly, {ENOSPC, EIO}},
                                         Paths{"RemoteWithNeither", kNeither, {ENOSPC, EIO}}),
                         NameOfPaths);

TEST_P(DurableCrashTest, Publishing) {
  only_begun_ = true;
  Everywhere([&] { PublishAll(1, true); }, [&] { return Publish(SampleShard(2, 0, 3)).status(); },
             [&](bool acknowledged) {
               EXPECT_EQ(GoodCopies(1), 3);
               EXPECT_TRUE(!acknowledged || GoodCopies(2) == 1);
               if (GoodCopies(2) == 0) {
                 EXPECT_FALSE(StepIsThere(2));
                 EXPECT_TRUE(Publish(SampleShard(2, 0, 3)).ok()) << "it can be again";
               }
             });
}

// What a process that was killed made visible is not durable; whoever builds on it must see to
// that.
TEST_P(DurableCrashTest, WhatFollowsAKillSurvivesAPowerLoss) {
  if (!GetParam().errors.empty()) {
    return;  // nothing fails in it
  }
  bool reached = true;
  for (int n = 1; reached; ++n) {
    SCOPED_TRACE(absl::StrCat("killed at call ", n));
    Fresh();
    FaultEnv& faults = *harness_->faults();
    if (remote()) {
      ASSERT_TRUE(store().RemoveJob(SampleJob().job, "demo").ok());
    }
    const auto publish = [&](Rank rank) -> absl::Status {
      HF_RETURN_IF_ERROR(store().ClaimAttempt(SampleJob(), 3, "opening 1"));
      return Publish(SampleShard(1, rank, 3)).status();
    };
    const int before = faults.calls();
    faults.CrashAtCall(n);
    publish(0).IgnoreError();
    reached = faults.calls() - before >= n;
    harness_->Stop();
    faults.KillProcess();
    ASSERT_TRUE(harness_->Start().ok());
    const absl::Status acknowledged = publish(1);
    ASSERT_TRUE(acknowledged.ok()) << ToString(acknowledged);
    harness_->Stop();
    faults.Crash();
    ASSERT_TRUE(harness_->Start().ok());
    CheckTidy();
    const absl::Status found = CheckShard(store(), SampleShard(1, 1, 3));
    ASSERT_TRUE(found.ok()) << ToString(found);
  }
}

TEST_P(DurableCrashTest, PublishingOverARecycledFile) {
  if (remote()) {
    return;
  }
  Everywhere(
      [&] {
        PublishAll(7, false);
        PublishAll(14, false);
        ASSERT_TRUE(store().RemoveCheckpoint(CheckpointOf(SampleShard(7, 0, 3))).ok());
        ASSERT_GT(store().pool_bytes(), 0u);
      },
      [&]() -> absl::Status {
        HF_ASSIGN_OR_RETURN(const auto writing,
                            store().Begin(NewCopyOfShard(SampleShard(21, 1, 3))));
        EXPECT_TRUE(writing->recycled());
        HF_RETURN_IF_ERROR(WriteShard(*writing, SampleShard(21, 1, 3)));
        return writing->Publish(SampleShard(21, 1, 3).record_file).status();
      },
      [&](bool acknowledged) {
        EXPECT_EQ(GoodCopies(7), 0);
        EXPECT_EQ(GoodCopies(14), 3);
        EXPECT_TRUE(!acknowledged || GoodCopies(21) == 1);
      });
}

// ---- A good copy in the place of a bad one ----

// Rank 1's of step 1, of which `damage` makes a bad one. Whatever happens: the others are good,
// that one is good or as bad as it was, and it can be mended afterwards.
void DurableCrashTest::MendEverywhere(
    const std::function<void(const std::string& image, const std::string& record)>& damage) {
  const SampleImage sample = SampleShard(1, 1, 3);
  const auto mend = [&]() -> absl::Status {
    HF_ASSIGN_OR_RETURN(const auto writing, store().BeginReplacement(NewCopyOfShard(sample)));
    HF_RETURN_IF_ERROR(WriteShard(*writing, sample));
    return writing->Publish(sample.record_file).status();
  };
  bad_copies_ = 1;
  const auto read = [&](const std::string& path) {
    return ReadFile(env(), path, 1 << 20).value_or("nothing");
  };
  std::string image;  // that is bad
  std::string plain;  // where the new one comes
  std::string record;
  std::pair<std::string, std::string> bad;
  Everywhere(
      [&] {
        PublishAll(1, true);
        const bool compressed = GetParam().place.compressed;
        image = store().ImagePath(NameOf(sample),
                                  compressed ? ImageForm::kCompressed : ImageForm::kPlain);
        plain = store().ImagePath(NameOf(sample));
        record = image.substr(0, image.rfind(".safetensors")) + ".record";
        damage(image, record);
        for (const std::string& path : {image, record}) {  // it outlives what is to come
          ASSERT_TRUE(env().Open(path, OpenMode::kReadWrite).value()->Sync().ok());
        }
        ASSERT_TRUE(env().SyncDirectory(ParentDirectory(image)).ok());
        bad = {read(image), read(record)};
        ASSERT_FALSE(CheckShard(store(), sample).ok());
      },
      mend,
      [&](bool acknowledged) {
        for (const Rank rank : {Rank{0}, Rank{2}}) {
          const absl::Status other = CheckShard(store(), SampleShard(1, rank, 3));
          EXPECT_TRUE(other.ok()) << ToString(other);
        }
        EXPECT_TRUE(store().ReadManifest(CheckpointOf(sample)).ok() == remote());
        const bool is_new = read(plain) == sample.image;
        EXPECT_TRUE(read(image) == bad.first || is_new) << "less than before";
        const bool old_record = read(record) == bad.second;
        EXPECT_TRUE(old_record || is_new) << "the image comes first";
        absl::Status found = CheckShard(store(), sample);
        EXPECT_TRUE(found.ok() || !acknowledged) << ToString(found);
        if (!found.ok()) {
          const absl::Status again = mend();
          EXPECT_TRUE(again.ok()) << ToString(again);
          found = CheckShard(store(), sample);
          EXPECT_TRUE(found.ok()) << ToString(found);
        }
      });
}

TEST_P(DurableCrashTest, ReplacingABadImage) {
  MendEverywhere([&](const std::string& image, const std::string&) {
    std::string bytes = ReadFile(env(), image, 1 << 20).value();
    bytes[bytes.size() - 9] ^= 0x10;
    ASSERT_TRUE(Overwrite(env(), image, bytes).ok());
  });
}

TEST_P(DurableCrashTest, ReplacingABadRecordAndItsImage) {
  MendEverywhere([&](const std::string& image, const std::string& record) {
    std::string bytes = ReadFile(env(), record, 1 << 20).value();
    bytes[bytes.size() / 2] ^= 0x10;
    ASSERT_TRUE(Overwrite(env(), record, bytes).ok());
    ASSERT_TRUE(Overwrite(env(), image, "short").ok());
  });
}

// ---- The pool gives room away ----

TEST_P(DurableCrashTest, TrimmingThePool) {
  if (remote()) {
    return;
  }
  const uint64_t bytes = ShardOf(100, 1000).image.size();
  Everywhere(
      [&] {
        PublishAll(1, false);
        FillPool(4, 1000);
        ASSERT_EQ(store().pool_bytes(), 4 * bytes);
      },
      [&] { return store().TrimPool(bytes); },
      [&](bool acknowledged) {
        EXPECT_EQ(GoodCopies(1), 3);
        EXPECT_LE(store().pool_bytes(), acknowledged ? bytes : 4 * bytes);
        EXPECT_GE(store().pool_bytes(), bytes) << "no more went than had to";
      });
}

// Files that fit nobody any more give way to those of a copy that is removed.
TEST_P(DurableCrashTest, MakingRoomInThePool) {
  if (remote()) {
    return;
  }
  const uint64_t small = ShardOf(100, 300).image.size();
  const uint64_t large = SampleShard(1, 2, 3).image.size();
  Everywhere(
      [&] {
        harness_->Stop();
        harness_->options().pool_bytes_max = 2 * large + small;
        ASSERT_TRUE(harness_->Start().ok());
        FillPool(4, 300);
        ASSERT_EQ(store().pool_bytes(), 4 * small);
        PublishAll(1, false);
        PublishAll(2, false);
      },
      [&]() -> absl::Status {
        HF_ASSIGN_OR_RETURN(const RemovalReport removed,
                            store().RemoveCheckpoint(CheckpointOf(SampleShard(1, 0, 3))));
        // A file that could not be made room for is deleted instead.
        EXPECT_EQ(removed.copies, 3u);
        EXPECT_GT(removed.bytes_recycled + removed.bytes_freed, 2 * large);
        return absl::OkStatus();
      },
      [&](bool acknowledged) {
        EXPECT_EQ(GoodCopies(2), 3);
        EXPECT_TRUE(!acknowledged || GoodCopies(1) == 0);
      });
}

// A drive without a byte left: an intent takes room from the pool, and so does the image.
TEST_P(DurableCrashTest, PublishingIntoRoomOfThePool) {
  if (remote() || !GetParam().place.allocate) {
    return;  // it asks for room beforehand
  }
  const SampleImage next =
      ShardOf(21, 10'000);  // longer than half of the pool, and none of it fits
  drive_is_full_ = true;
  Everywhere(
      [&] {
        PublishAll(1, false);
        FillPool(8, 1000);
        uint64_t used = store().pool_bytes();
        for (const std::string& file : harness_->Files()) {
          used += env().Info(JoinPath(harness_->dir(), file))->bytes;
        }
        harness_->faults()->SetBytesTotal(used);
      },
      [&]() -> absl::Status {
        const uint64_t before = store().pool_bytes();
        HF_ASSIGN_OR_RETURN(const auto writing, store().Begin(NewCopyOfShard(next)));
        EXPECT_FALSE(writing->recycled());
        EXPECT_LT(store().pool_bytes(), before);
        HF_RETURN_IF_ERROR(WriteShard(*writing, next));
        return writing->Publish(next.record_file).status();
      },
      [&](bool acknowledged) {
        EXPECT_EQ(GoodCopies(1), 3);
        absl::Status found = CheckShard(store(), next);
        EXPECT_TRUE(found.ok() || (!acknowledged && absl::IsNotFound(found))) << ToString(found);
        if (!found.ok()) {
          // The kernel's own doing, after some seconds: what was deleted gives its room back only
          // when that is durable, and the sync for it may be the call that failed.
          ASSERT_TRUE(env().SyncDirectory(harness_->dir() + "/.holdfast/pool").ok());
          const auto again = Publish(next);
          EXPECT_TRUE(again.ok()) << ToString(again.status());
        }
      });
}

// With a lower limit than the last time.
TEST_P(DurableCrashTest, StartingWithALowerLimit) {
  if (remote() || !GetParam().errors.empty()) {
    return;  // a start that fails leaves no process that lives on
  }
  const uint64_t bytes = ShardOf(100, 1000).image.size();
  CrashEverywhere(
      [&] {
        PublishAll(1, false);
        FillPool(4, 1000);
      },
      [&]() -> absl::Status {
        harness_->Stop();
        harness_->options().pool_bytes_max = bytes;
        return harness_->Start();
      },
      [&](bool) {
        EXPECT_EQ(GoodCopies(1), 3);
        EXPECT_EQ(store().pool_bytes(), bytes);
      });
}

TEST_P(DurableCrashTest, GivingUpHalfWay) {
  only_begun_ = true;
  Everywhere([&] { PublishAll(1, true); },
             [&]() -> absl::Status {
               HF_ASSIGN_OR_RETURN(
                   const auto writing,
                   store().Begin(NewCopyOfShard(SampleShard(2, 0, 3)),
                                 GetParam().place.compressed ? std::optional(1) : std::nullopt));
               return absl::OkStatus();
             },
             [&](bool) {
               EXPECT_EQ(GoodCopies(1), 3);
               EXPECT_FALSE(StepIsThere(2));
             });
}

TEST_P(DurableCrashTest, RemovingACopy) {
  only_begun_ = true;
  Everywhere([&] { PublishAll(1, false); },
             [&] { return store().RemoveCopy(NameOf(SampleShard(1, 1, 3))).status(); },
             [&](bool acknowledged) {
               const int good = GoodCopies(1);
               EXPECT_TRUE(good == 2 || (good == 3 && !acknowledged)) << good;
             });
}

TEST_P(DurableCrashTest, RemovingAndPublishingAgain) {
  bool removed = false;
  bool published = false;
  Everywhere([&] { PublishAll(1, false); },
             [&]() -> absl::Status {
               removed = published = false;
               HF_RETURN_IF_ERROR(store().RemoveCopy(NameOf(SampleShard(1, 1, 3))).status());
               removed = true;
               HF_RETURN_IF_ERROR(Publish(SampleShard(1, 1, 3)).status());
               published = true;
               return absl::OkStatus();
             },
             [&](bool) {
               const int good = GoodCopies(1);
               EXPECT_TRUE(good == 3 || (good == 2 && !published)) << good;
               EXPECT_GE(good, 2);
             });
}

TEST_P(DurableCrashTest, RemovingACommittedStep) {
  Everywhere(
      [&] {
        PublishAll(1, true);
        PublishAll(2, true);
      },
      [&] { return store().RemoveCheckpoint(CheckpointOf(SampleShard(1, 0, 3))).status(); },
      [&](bool acknowledged) {
        EXPECT_EQ(GoodCopies(2), 3);
        const int good = GoodCopies(1);
        if (acknowledged) {
          EXPECT_EQ(good, 0);
        }
        if (remote()) {
          const auto manifest = store().ReadManifest(CheckpointOf(SampleShard(1, 0, 3)));
          EXPECT_EQ(manifest.ok(), good == 3) << "all, or nothing: " << good;
          EXPECT_TRUE(good == 0 || good == 3) << good;
        }
        EXPECT_EQ(StepIsThere(1), good != 0) << "no empty directory stays";
      });
}

TEST_P(DurableCrashTest, RemovingAnUncommittedStep) {
  only_begun_ = true;
  Everywhere([&] { PublishAll(1, false); },
             [&] { return store().RemoveCheckpoint(CheckpointOf(SampleShard(1, 0, 3))).status(); },
             [&](bool acknowledged) {
               const int good = GoodCopies(1);
               EXPECT_TRUE(!acknowledged || good == 0);
               EXPECT_EQ(StepIsThere(1), good != 0);
               if (good > 0) {
                 EXPECT_TRUE(store().RemoveCheckpoint(CheckpointOf(SampleShard(1, 0, 3))).ok());
                 EXPECT_EQ(GoodCopies(1), 0);
               }
             });
}

TEST_P(DurableCrashTest, OpeningAndRemovingAJob) {
  JobIdentity other = SampleJob();
  other.name = "other";
  other.job.bytes[0] = 0x77;
  Everywhere([&] { PublishAll(1, true); },
             [&]() -> absl::Status {
               HF_RETURN_IF_ERROR(store().OpenJob(other));
               HF_RETURN_IF_ERROR(store().ClaimAttempt(other, 1, "mine"));
               return store().RemoveJob(other.job, "other").status();
             },
             [&](bool acknowledged) {
               EXPECT_EQ(GoodCopies(1), 3);
               const absl::StatusOr<JobIdentity> there = store().FindJob("other");
               EXPECT_TRUE(absl::IsNotFound(there.status()) || (!acknowledged && *there == other));
               EXPECT_EQ(env().Info(harness_->dir() + "/other").ok(), there.ok())
                   << "no empty directory";
               if (there.ok()) {
                 EXPECT_TRUE(store().RemoveJob(other.job, "other").ok());
               }
             });
}

TEST_P(DurableCrashTest, RemovingAJobWithItsSteps) {
  Everywhere(
      [&] {
        PublishAll(1, true);
        PublishAll(2, false);
      },
      [&] { return store().RemoveJob(SampleJob().job, "demo").status(); },
      [&](bool acknowledged) {
        const int good = GoodCopies(1) + GoodCopies(2);
        EXPECT_TRUE(!acknowledged || good == 0);
        if (store().FindJob("demo").ok()) {
          EXPECT_TRUE(store().RemoveJob(SampleJob().job, "demo").ok());
        }
        EXPECT_FALSE(env().Info(harness_->dir() + "/demo").ok());
      });
}

TEST_P(DurableCrashTest, ClaimingAnAttempt) {
  if (!remote()) {
    return;
  }
  Everywhere([&] { PublishAll(1, true); },
             [&] { return store().ClaimAttempt(SampleJob(), 4, "opening 4"); },
             [&](bool acknowledged) {
               const absl::Status other = store().ClaimAttempt(SampleJob(), 4, "another one");
               if (acknowledged) {
                 EXPECT_TRUE(absl::IsFailedPrecondition(other)) << ToString(other);
               }
               EXPECT_EQ(GoodCopies(1), 3);
             });
}

TEST_P(DurableCrashTest, Committing) {
  if (!remote()) {
    return;
  }
  only_begun_ = true;
  Everywhere([&] { PublishAll(1, false); }, [&] { return store().PublishManifest(manifest_); },
             [&](bool acknowledged) {
               EXPECT_EQ(GoodCopies(1), 3);
               const auto there = store().ReadManifest(CheckpointOf(SampleShard(1, 0, 3)));
               if (there.ok()) {
                 EXPECT_EQ(*there, manifest_);
               } else {
                 EXPECT_FALSE(acknowledged);
                 EXPECT_TRUE(absl::IsNotFound(there.status())) << ToString(there.status());
               }
               bool adopted = false;
               EXPECT_TRUE(store().PublishManifest(manifest_, &adopted).ok());
               EXPECT_EQ(adopted, there.ok());
             });
}

}  // namespace
}  // namespace holdfast
