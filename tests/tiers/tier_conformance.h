// What every tier must do, as one suite of parametrised tests (docs/design.md §4, §6;
// tiers/tier.h).
//
// A tier's test program includes this header in one source file, implements TierHarness, and
// instantiates:
//
//   INSTANTIATE_TEST_SUITE_P(Memory, TierConformance, testing::Values(HarnessFactory{"FaultEnv",
//   MakeFaultEnvHarness}, …)); INSTANTIATE_TEST_SUITE_P(Memory, TierCrashConformance,
//   testing::Values(HarnessFactory{"FaultEnv", …}));  // FaultEnv only
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/fault_env.h"
#include "base/status.h"
#include "tests/tiers/image/sample_image.h"
#include "tests/tiers/tier_harness.h"
#include "tiers/image/record.h"
#include "tiers/tier.h"

namespace holdfast {

// Copies to publish, numbered; the same number is always the same copy. Odd ones have images beyond
// 2 MiB.
inline const SampleImage& ConformanceSample(int number) {
  static std::map<int, SampleImage> samples;
  const auto found = samples.find(number);
  if (found != samples.end()) {
    return found->second;
  }
  ShardRecord identity = SampleRecord();
  identity.id.step = 1000 + static_cast<Step>(number);
  const uint64_t large = number % 2 == 1 ? 700'000 : 3000;
  std::vector<Slice> slices = {
      Whole("weights", DType::kF32, {large + static_cast<uint64_t>(number)}),
      Whole("bias", DType::kBF16, {7}), Json("progress", 40)};
  return samples.emplace(number, MakeSampleImage(std::move(slices), identity)).first->second;
}

// The generation is the place's own; everything else of a record must come back as it was
// published.
inline bool SameRecord(std::string_view a, std::string_view b) {
  absl::StatusOr<ShardRecord> first = DecodeRecord(a);
  absl::StatusOr<ShardRecord> second = DecodeRecord(b);
  if (!first.ok() || !second.ok()) {
    return false;
  }
  first->generation = 0;
  second->generation = 0;
  return *first == *second;
}

// What Create is asked for a sample.
inline NewCopy NewCopyOf(const SampleImage& sample) {
  return {sample.record.id,
          sample.record.job_name,
          sample.record.world_size,
          sample.image.size(),
          0,
          0};
}

inline absl::Status WriteImage(CopyWriter& writer, const SampleImage& sample,
                               size_t piece = 1 << 20) {
  for (size_t at = 0; at < sample.image.size(); at += piece) {
    const std::string_view part = std::string_view(sample.image).substr(at, piece);
    HF_RETURN_IF_ERROR(writer.WriteAt(at, std::as_bytes(std::span<const char>(part))));
  }
  return absl::OkStatus();
}

inline absl::Status PublishCopy(Tier& tier, const SampleImage& sample) {
  HF_ASSIGN_OR_RETURN(const std::unique_ptr<CopyWriter> writer, tier.Create(NewCopyOf(sample)));
  HF_RETURN_IF_ERROR(WriteImage(*writer, sample));
  return writer->Publish(sample.record_file);
}

// Everything that an open copy says, compared with what was published. Confirm's answer is the
// caller's to judge.
inline absl::Status CompareCopy(CopyReader& reader, const SampleImage& sample) {
  std::string image(sample.image.size(), '\0');
  HF_RETURN_IF_ERROR(reader.ReadAt(0, std::as_writable_bytes(std::span<char>(image))));
  if (image != sample.image) {
    return absl::DataLossError("the image differs from what was published");
  }
  HF_ASSIGN_OR_RETURN(const std::string record, reader.ReadRecord());
  if (!SameRecord(record, sample.record_file)) {
    return absl::DataLossError("the record differs from what was published");
  }
  const CopyInfo& info = reader.info();
  if (info.id != sample.record.id || info.world_size != sample.record.world_size ||
      info.image_bytes != sample.image.size() ||
      info.sealed_unix_ms != sample.record.sealed_unix_ms) {
    return absl::DataLossError("the info differs from what was published");
  }
  return absl::OkStatus();
}

inline absl::Status CheckCopy(Tier& tier, const SampleImage& sample) {
  HF_ASSIGN_OR_RETURN(const std::unique_ptr<CopyReader> reader, tier.Open(sample.record.id));
  HF_RETURN_IF_ERROR(CompareCopy(*reader, sample));
  return reader->Confirm();
}

// What was acknowledged, by sample number. A call that failed leaves the question open.
class Ledger {
 public:
  enum class Truth { kThere, kGone, kInDoubt };
  void Acknowledge(int number, const absl::Status& status, Truth when_ok) {
    truth_[number] = status.ok() ? when_ok : Truth::kInDoubt;
  }
  const std::map<int, Truth>& all() const { return truth_; }

 private:
  std::map<int, Truth> truth_;
};

class TierConformance : public testing::TestWithParam<HarnessFactory> {
 protected:
  void SetUp() override { NewPlace(); }

  void NewPlace() {
    harness_ = GetParam().make();
    const absl::Status status = harness_->Start();
    ASSERT_TRUE(status.ok()) << ToString(status);
  }
  Tier& tier() { return harness_->tier(); }
  void Reopen() {
    harness_->Stop();
    const absl::Status status = harness_->Start();
    ASSERT_TRUE(status.ok()) << ToString(status);
  }

  std::set<ShardId> Listed() {
    absl::StatusOr<Inventory> inventory = tier().Scan();
    EXPECT_TRUE(inventory.ok()) << ToString(inventory.status());
    std::set<ShardId> ids;
    for (const CopyInfo& copy : inventory.ok() ? inventory->copies : std::vector<CopyInfo>()) {
      EXPECT_TRUE(ids.insert(copy.id).second) << copy.id.ToString() << " is listed twice";
    }
    return ids;
  }

  // Puts copies in, takes some out, gives one up half written, tries one twice; goes on after
  // failures.
  void RunScript(Ledger& ledger, int first) {
    using Truth = Ledger::Truth;
    const auto publish = [&](int number) {
      ledger.Acknowledge(number, PublishCopy(tier(), ConformanceSample(number)), Truth::kThere);
    };
    const auto remove = [&](int number) {
      const absl::Status status = tier().Remove(ConformanceSample(number).record.id);
      if (!absl::IsNotFound(
              status)) {  // else: it was never published, or an earlier failure took it
        ledger.Acknowledge(number, status, Truth::kGone);
      }
    };
    publish(first);
    publish(first + 1);
    remove(first);
    publish(first + 2);  // into the room that the first one left
    if (absl::StatusOr<std::unique_ptr<CopyWriter>> writer =
            tier().Create(NewCopyOf(ConformanceSample(first + 3)));
        writer.ok()) {
      (*writer)->WriteAt(0, std::as_bytes(std::span<const char>("half"))).IgnoreError();
    }
    ledger.Acknowledge(first + 3, absl::OkStatus(), Truth::kGone);
    EXPECT_FALSE(ledger.all().at(first + 1) == Truth::kThere &&
                 PublishCopy(tier(), ConformanceSample(first + 1)).ok());
    publish(first + 4);
    remove(first + 1);
  }

  // The tier holds what the ledger says, whole, and nothing else.
  void CheckAgainst(const Ledger& ledger) {
    absl::StatusOr<Inventory> inventory = tier().Scan();
    ASSERT_TRUE(inventory.ok()) << ToString(inventory.status());
    EXPECT_TRUE(inventory->unreadable.empty())
        << inventory->unreadable[0].location << ": " << ToString(inventory->unreadable[0].why);
    const std::set<ShardId> listed = Listed();
    uint64_t expected_bytes = 0;
    size_t known = 0;
    for (const auto& [number, truth] : ledger.all()) {
      const SampleImage& sample = ConformanceSample(number);
      const bool is_listed = listed.contains(sample.record.id);
      if (truth == Ledger::Truth::kThere) {
        EXPECT_TRUE(is_listed) << "copy " << number << " was acknowledged and is not there";
      } else if (truth == Ledger::Truth::kGone) {
        EXPECT_FALSE(is_listed) << "copy " << number << " must not be there";
      }
      if (is_listed) {
        ++known;
        expected_bytes += harness_->BytesOfCopy(sample.image.size());
        const absl::Status status = CheckCopy(tier(), sample);
        EXPECT_TRUE(status.ok()) << "copy " << number << ": " << ToString(status);
      } else {
        EXPECT_TRUE(absl::IsNotFound(tier().Open(sample.record.id).status())) << "copy " << number;
      }
    }
    EXPECT_EQ(known, listed.size()) << "a copy that nobody published";
    EXPECT_EQ(harness_->BytesInUse(), expected_bytes) << "bytes leaked";
  }

  // All is well again: a whole script goes through, and everything can be removed.
  void CheckUsable(const Ledger& ledger) {
    Ledger second;
    RunScript(second, 100);
    for (const auto& [number, truth] : second.all()) {
      EXPECT_NE(truth, Ledger::Truth::kInDoubt) << "copy " << number << " failed after the crash";
    }
    for (const ShardId& id : Listed()) {
      EXPECT_TRUE(tier().Remove(id).ok()) << id.ToString();
    }
    EXPECT_EQ(harness_->BytesInUse(), 0u)
        << "bytes leaked, with " << ledger.all().size() << " copies before";
  }

  std::unique_ptr<TierHarness> harness_;
};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(TierConformance);

// Those that need a place with FaultEnv under it.
class TierCrashConformance : public TierConformance {};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(TierCrashConformance);

TEST_P(TierConformance, AFreshTierIsEmpty) {
  const absl::StatusOr<Inventory> inventory = tier().Scan();
  ASSERT_TRUE(inventory.ok()) << ToString(inventory.status());
  EXPECT_TRUE(inventory->copies.empty());
  EXPECT_TRUE(inventory->unreadable.empty());
  EXPECT_EQ(harness_->BytesInUse(), 0u);
  EXPECT_TRUE(absl::IsNotFound(tier().Open(ConformanceSample(0).record.id).status()));
  EXPECT_TRUE(absl::IsNotFound(tier().Remove(ConformanceSample(0).record.id)));
}

TEST_P(TierConformance, ReadsBackWhatWasPublishedBitForBit) {
  for (int number = 0; number < 4; ++number) {
    ASSERT_TRUE(PublishCopy(tier(), ConformanceSample(number)).ok());
  }
  for (int number = 0; number < 4; ++number) {
    const absl::Status status = CheckCopy(tier(), ConformanceSample(number));
    EXPECT_TRUE(status.ok()) << ToString(status);
  }
}

TEST_P(TierConformance, NothingIsVisibleBeforePublish) {
  const SampleImage& sample = ConformanceSample(0);
  {
    absl::StatusOr<std::unique_ptr<CopyWriter>> writer = tier().Create(NewCopyOf(sample));
    ASSERT_TRUE(writer.ok()) << ToString(writer.status());
    ASSERT_TRUE(WriteImage(**writer, sample, 1000).ok());
    EXPECT_TRUE(Listed().empty());
    EXPECT_TRUE(absl::IsNotFound(tier().Open(sample.record.id).status()));
    ASSERT_TRUE((*writer)->Publish(sample.record_file).ok());
    EXPECT_EQ(Listed(), std::set<ShardId>{sample.record.id});
    EXPECT_FALSE((*writer)->WriteAt(0, std::as_bytes(std::span<const char>("x"))).ok())
        << "a sealed image is immutable";
    EXPECT_FALSE((*writer)->Publish(sample.record_file).ok());
  }
  EXPECT_TRUE(CheckCopy(tier(), sample).ok()) << "the end of the writer takes nothing back";
}

TEST_P(TierConformance, ADestroyedWriterLeavesNothing) {
  const SampleImage& sample = ConformanceSample(1);
  {
    absl::StatusOr<std::unique_ptr<CopyWriter>> writer = tier().Create(NewCopyOf(sample));
    ASSERT_TRUE(writer.ok());
    ASSERT_TRUE(WriteImage(**writer, sample).ok());
  }
  EXPECT_TRUE(Listed().empty());
  EXPECT_EQ(harness_->BytesInUse(), 0u);
  Reopen();
  EXPECT_TRUE(Listed().empty());
  EXPECT_EQ(harness_->BytesInUse(), 0u);
  EXPECT_TRUE(PublishCopy(tier(), sample).ok());
}

TEST_P(TierConformance, OneCopyPerShard) {
  const SampleImage& sample = ConformanceSample(0);
  absl::StatusOr<std::unique_ptr<CopyWriter>> first = tier().Create(NewCopyOf(sample));
  absl::StatusOr<std::unique_ptr<CopyWriter>> second = tier().Create(NewCopyOf(sample));
  ASSERT_TRUE(first.ok());
  ASSERT_TRUE(second.ok());
  ASSERT_TRUE(WriteImage(**first, sample).ok());
  ASSERT_TRUE((*first)->Publish(sample.record_file).ok());
  EXPECT_TRUE(absl::IsAlreadyExists((*second)->Publish(sample.record_file)));
  second->reset();
  EXPECT_TRUE(absl::IsAlreadyExists(PublishCopy(tier(), sample)));
  EXPECT_TRUE(CheckCopy(tier(), sample).ok()) << "the loser must not harm the winner";
  EXPECT_EQ(harness_->BytesInUse(), harness_->BytesOfCopy(sample.image.size()));
}

TEST_P(TierConformance, RefusesWhatContradictsItself) {
  const SampleImage& sample = ConformanceSample(0);
  for (const uint64_t bytes : {uint64_t{0}, kImageBytesMax + 1}) {
    NewCopy impossible = NewCopyOf(sample);
    impossible.image_bytes = bytes;
    EXPECT_FALSE(tier().Create(impossible).ok()) << bytes;
  }
  absl::StatusOr<std::unique_ptr<CopyWriter>> writer = tier().Create(NewCopyOf(sample));
  ASSERT_TRUE(writer.ok());
  ASSERT_TRUE(WriteImage(**writer, sample).ok());
  const auto byte = std::as_bytes(std::span<const char>("x", 1));
  EXPECT_FALSE((*writer)->WriteAt(sample.image.size(), byte).ok());
  EXPECT_FALSE((*writer)->WriteAt(UINT64_MAX, byte).ok());
  EXPECT_FALSE((*writer)->Publish("").ok());
  EXPECT_FALSE(
      (*writer)
          ->Publish(std::string_view(sample.record_file).substr(0, sample.record_file.size() - 1))
          .ok());
  EXPECT_FALSE((*writer)->Publish(ConformanceSample(2).record_file).ok())
      << "the record of another shard";
  EXPECT_TRUE(Listed().empty());
  ASSERT_TRUE((*writer)->Publish(sample.record_file).ok()) << "a refused record spoils nothing";
  EXPECT_TRUE(CheckCopy(tier(), sample).ok());
}

TEST_P(TierConformance, ReadsStayWithinTheImage) {
  const SampleImage& sample = ConformanceSample(0);
  ASSERT_TRUE(PublishCopy(tier(), sample).ok());
  absl::StatusOr<std::unique_ptr<CopyReader>> reader = tier().Open(sample.record.id);
  ASSERT_TRUE(reader.ok());
  std::string out(16, '\0');
  const auto span = std::as_writable_bytes(std::span<char>(out));
  EXPECT_TRUE((*reader)->ReadAt(sample.image.size() - 16, span).ok());
  EXPECT_EQ(out, sample.image.substr(sample.image.size() - 16));
  EXPECT_FALSE((*reader)->ReadAt(sample.image.size() - 15, span).ok());
  EXPECT_FALSE((*reader)->ReadAt(UINT64_MAX - 3, span).ok());
  EXPECT_TRUE((*reader)->ReadAt(sample.image.size(), {}).ok());
}

TEST_P(TierConformance, RemovedCopiesAreGoneAndTheirBytesFree) {
  for (int number = 0; number < 3; ++number) {
    ASSERT_TRUE(PublishCopy(tier(), ConformanceSample(number)).ok());
  }
  ASSERT_TRUE(tier().Remove(ConformanceSample(1).record.id).ok());
  EXPECT_TRUE(absl::IsNotFound(tier().Remove(ConformanceSample(1).record.id)));
  EXPECT_TRUE(absl::IsNotFound(tier().Open(ConformanceSample(1).record.id).status()));
  EXPECT_EQ(Listed(),
            (std::set<ShardId>{ConformanceSample(0).record.id, ConformanceSample(2).record.id}));
  EXPECT_EQ(harness_->BytesInUse(), harness_->BytesOfCopy(ConformanceSample(0).image.size()) +
                                        harness_->BytesOfCopy(ConformanceSample(2).image.size()));
  EXPECT_TRUE(PublishCopy(tier(), ConformanceSample(1)).ok()) << "the name is free again";
  EXPECT_TRUE(CheckCopy(tier(), ConformanceSample(1)).ok());
}

// A reader never gets other bytes with a good Confirm: either the removal is refused while it
// reads, or its bytes stay, or Confirm fails.
TEST_P(TierConformance, ReadWhileRemoved) {
  const SampleImage& sample = ConformanceSample(0);
  ASSERT_TRUE(PublishCopy(tier(), sample).ok());
  absl::StatusOr<std::unique_ptr<CopyReader>> reader = tier().Open(sample.record.id);
  ASSERT_TRUE(reader.ok());
  const absl::Status removed = tier().Remove(sample.record.id);
  if (removed.ok()) {
    EXPECT_TRUE(absl::IsNotFound(tier().Open(sample.record.id).status()));
    ASSERT_TRUE(PublishCopy(tier(), ConformanceSample(2)).ok());  // which may take its place
    const absl::Status compared = CompareCopy(**reader, sample);
    EXPECT_TRUE(compared.ok() || !(*reader)->Confirm().ok());
    return;
  }
  EXPECT_TRUE(absl::IsFailedPrecondition(removed)) << ToString(removed);
  EXPECT_TRUE(CompareCopy(**reader, sample).ok());
  EXPECT_TRUE((*reader)->Confirm().ok());
  reader->reset();
  EXPECT_TRUE(tier().Remove(sample.record.id).ok());
}

TEST_P(TierConformance, ConfirmNoticesAnImageTakenAwayByForce) {
  for (const int number : {0, 1}) {
    const SampleImage& sample = ConformanceSample(number);
    ASSERT_TRUE(PublishCopy(tier(), sample).ok());
    absl::StatusOr<std::unique_ptr<CopyReader>> reader = tier().Open(sample.record.id);
    ASSERT_TRUE(reader.ok());
    ASSERT_TRUE((*reader)->Confirm().ok());
    ASSERT_TRUE((number == 0 ? harness_->CutImage(sample.record.id, 100)
                             : harness_->DeleteImage(sample.record.id))
                    .ok());
    const absl::Status compared = CompareCopy(**reader, sample);
    const absl::Status confirmed = (*reader)->Confirm();
    EXPECT_TRUE(compared.ok() || !confirmed.ok()) << "bytes that are not the copy's, confirmed";
    EXPECT_FALSE(number == 0 && confirmed.ok()) << "cut short";
  }
  Reopen();
  EXPECT_TRUE(Listed().empty()) << "a record without its bytes is no copy";
}

TEST_P(TierConformance, ScanAfterReopenFindsWhatWasPublished) {
  Ledger ledger;
  RunScript(ledger, 0);
  for (const auto& [number, truth] : ledger.all()) {
    EXPECT_NE(truth, Ledger::Truth::kInDoubt) << number;
  }
  CheckAgainst(ledger);
  Reopen();
  CheckAgainst(ledger);
  CheckUsable(ledger);
}

TEST_P(TierConformance, ReportsTornRecordsAndHarmsNoOther) {
  const SampleImage& bad = ConformanceSample(0);
  ASSERT_TRUE(PublishCopy(tier(), bad).ok());
  ASSERT_TRUE(PublishCopy(tier(), ConformanceSample(2)).ok());
  ASSERT_TRUE(harness_->FlipRecordBit(bad.record.id, bad.record_file.size() / 2).ok());
  const absl::StatusOr<Inventory> inventory = tier().Scan();
  ASSERT_TRUE(inventory.ok());
  ASSERT_EQ(inventory->unreadable.size(), 1u);
  EXPECT_FALSE(inventory->unreadable[0].location.empty());
  EXPECT_FALSE(inventory->unreadable[0].why.ok());
  EXPECT_EQ(Listed(), std::set<ShardId>{ConformanceSample(2).record.id});
  // A tier may remove such a copy, or leave it and say what is wrong with it.
  const absl::Status opened = tier().Open(bad.record.id).status();
  EXPECT_TRUE(absl::IsNotFound(opened) || absl::IsDataLoss(opened)) << ToString(opened);
  EXPECT_TRUE(CheckCopy(tier(), ConformanceSample(2)).ok());
}

TEST_P(TierConformance, LeavesRecordsOfANewerVersionAlone) {
  const SampleImage& newer = ConformanceSample(0);
  ASSERT_TRUE(PublishCopy(tier(), newer).ok());
  ASSERT_TRUE(PublishCopy(tier(), ConformanceSample(2)).ok());
  ASSERT_TRUE(harness_
                  ->ReplaceRecord(newer.record.id,
                                  FrameRecordBody("of the future", kRecordFormatVersion + 1))
                  .ok());
  const uint64_t before = harness_->BytesInUse();
  for (int round = 0; round < 2; ++round) {
    const absl::StatusOr<Inventory> inventory = tier().Scan();
    ASSERT_TRUE(inventory.ok());
    ASSERT_EQ(inventory->unreadable.size(), 1u) << "round " << round;
    EXPECT_TRUE(absl::IsFailedPrecondition(inventory->unreadable[0].why));
    EXPECT_EQ(Listed(), std::set<ShardId>{ConformanceSample(2).record.id});
    EXPECT_EQ(harness_->BytesInUse(), before) << "left alone";
    Reopen();
  }
  EXPECT_TRUE(PublishCopy(tier(), ConformanceSample(4)).ok()) << "the rest goes on";
}

TEST_P(TierCrashConformance, CrashAtEveryCall) {
  for (int n = 1, used = n; used >= n; ++n) {
    SCOPED_TRACE(absl::StrCat("crash at call ", n));
    NewPlace();
    FaultEnv* faults = harness_->faults();
    Ledger ledger;
    ledger.Acknowledge(50, PublishCopy(tier(), ConformanceSample(50)), Ledger::Truth::kThere);
    const int before = faults->calls();
    faults->CrashAtCall(n);
    RunScript(ledger, 0);
    used = faults->calls() - before;
    harness_->Stop();
    harness_->Crash();
    ASSERT_TRUE(harness_->Start().ok());
    EXPECT_TRUE(harness_->problems().empty()) << harness_->problems()[0];
    CheckAgainst(ledger);
    CheckUsable(ledger);
    if (HasFailure()) {
      return;
    }
  }
}

TEST_P(TierCrashConformance, CrashAtEveryCallOfTheRecovery) {
  int recovery_calls = 1;
  for (int n = 1, used = n; used >= n; ++n) {
    SCOPED_TRACE(absl::StrCat("crash at call ", n));
    NewPlace();
    FaultEnv* faults = harness_->faults();
    Ledger ledger;
    int before = faults->calls();
    faults->CrashAtCall(n);
    RunScript(ledger, 0);
    used = faults->calls() - before;
    harness_->Stop();
    harness_->Crash();
    // Another place of the recovery each time; over all n, every place many times.
    faults->CrashAtCall(n * 7 % recovery_calls + 1);
    before = faults->calls();
    harness_->Start().IgnoreError();
    recovery_calls = std::max(recovery_calls, faults->calls() - before);
    harness_->Stop();
    harness_->Crash();
    ASSERT_TRUE(harness_->Start().ok());
    EXPECT_TRUE(harness_->problems().empty()) << harness_->problems()[0];
    CheckAgainst(ledger);
    CheckUsable(ledger);
    if (HasFailure()) {
      return;
    }
  }
}

// One call fails, the process lives: the error is reported, and nothing else is lost or left over.
TEST_P(TierCrashConformance, FailureAtEveryCall) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  const std::vector<int> errors = {EIO, ENOSPC};  // each call fails; what with is for the plain leg
#else
  const std::vector<int> errors = {EIO, ENOSPC, EROFS, EDQUOT, ESTALE};
#endif
  for (const int error : errors) {
    for (int n = 1, used = n; used >= n; ++n) {
      SCOPED_TRACE(absl::StrCat("call ", n, " fails with error ", error));
      NewPlace();
      FaultEnv* faults = harness_->faults();
      Ledger ledger;
      ledger.Acknowledge(50, PublishCopy(tier(), ConformanceSample(50)), Ledger::Truth::kThere);
      const int before = faults->calls();
      faults->FailCall(n, error);
      RunScript(ledger, 0);
      used = faults->calls() - before;
      if (used < n) {
        break;  // the failure is still to come
      }
      CheckAgainst(ledger);
      Reopen();
      CheckAgainst(ledger);
      CheckUsable(ledger);
      if (HasFailure()) {
        return;
      }
    }
  }
}

TEST_P(TierConformance, ManyThreadsAtOnce) {
  constexpr int kThreads = 4;
  constexpr int kCopies = 6;
  for (int number = 0; number <= kThreads * 10 + kCopies; ++number) {
    ConformanceSample(number);  // the cache of samples is not for many threads
  }
  std::atomic<int> shared_published = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      shared_published += PublishCopy(tier(), ConformanceSample(0)).ok() ? 1 : 0;
      for (int i = 1; i <= kCopies; ++i) {
        const SampleImage& own = ConformanceSample(t * 10 + i);
        EXPECT_TRUE(PublishCopy(tier(), own).ok());
        EXPECT_TRUE(CheckCopy(tier(), own).ok());
        if (i % 2 == 0) {
          EXPECT_TRUE(tier().Remove(own.record.id).ok());
        } else if (i == kCopies / 2) {
          EXPECT_TRUE(tier().Scan().ok());
        }
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(shared_published, 1) << "of copies of one shard, one is published";
  EXPECT_EQ(Listed().size(), 1u + kThreads * kCopies / 2);
  EXPECT_TRUE(CheckCopy(tier(), ConformanceSample(0)).ok());
}

}  // namespace holdfast
