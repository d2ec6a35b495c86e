// A durable tier and the hand that meddles with its files.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "tests/tiers/durable/durable_harness.h"

namespace holdfast {

inline constexpr uint64_t kFileBytesMax = uint64_t{1} << 24;

inline JobUuid OtherUuid() {
  return JobUuid::FromString("99999999-4455-4677-8899-aabbccddeeff").value();
}

class HostileTest : public testing::Test {
 protected:
  explicit HostileTest(const DurablePlace& place) : harness_(place) {
    const absl::Status status = harness_.Start();
    EXPECT_TRUE(status.ok()) << ToString(status);
  }
  CopyStore& store() { return harness_.store(); }
  Env& env() { return harness_.env(); }
  std::string Path(const std::string& name) { return harness_.dir() + "/" + name; }

  PublishedCopy Publish(const SampleImage& sample) {
    const auto copy = PublishShard(store(), sample);
    EXPECT_TRUE(copy.ok()) << ToString(copy.status());
    return copy.ok() ? *copy : PublishedCopy();
  }
  std::string ImageOf(const SampleImage& sample) { return store().ImagePath(NameOf(sample)); }
  std::string RecordOf(const SampleImage& sample) {
    const std::string image = ImageOf(sample);
    return image.substr(0, image.rfind('.')) + ".record";
  }
  std::string Read(const std::string& path) { return ReadFile(env(), path, kFileBytesMax).value(); }
  void Write(const std::string& path, std::string_view bytes) {
    const absl::Status status = Overwrite(env(), path, bytes);
    ASSERT_TRUE(status.ok()) << ToString(status);
  }
  void CopyFile(const std::string& from, const std::string& to) { Write(to, Read(from)); }
  absl::Status Opens(const SampleImage& sample) {
    return store().OpenCopy(NameOf(sample), {}).status();
  }
  // Neither opened nor listed, and reported.
  void ExpectRefused(const SampleImage& sample, absl::StatusCode code, const std::string& what) {
    EXPECT_EQ(Opens(sample).code(), code) << what << ": " << ToString(Opens(sample));
    const auto scan = store().ScanAll();
    ASSERT_TRUE(scan.ok());
    EXPECT_GE(scan->unreadable_count, 1u) << what;
    for (const JobScan& job : scan->jobs) {
      for (const CheckpointScan& step : job.checkpoints) {
        for (const CopyEntry& copy : step.copies) {
          EXPECT_FALSE(step.id == sample.record.id.checkpoint() &&
                       copy.rank == sample.record.id.rank)
              << what << ": it is listed";
        }
      }
    }
  }

  DurableHarness harness_;
};

}  // namespace holdfast
