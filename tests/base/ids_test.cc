#include "base/ids.h"

#include <gtest/gtest.h>

#include <unordered_set>

namespace holdfast {
namespace {

constexpr char kText[] = "1b4e28ba-2fa1-41d2-883f-0016d3cca427";

TEST(JobUuidTest, TextAndBytesRoundTrip) {
  const absl::StatusOr<JobUuid> id = JobUuid::FromString(kText);
  ASSERT_TRUE(id.ok()) << id.status();
  EXPECT_EQ(id->bytes[0], 0x1b);
  EXPECT_EQ(id->bytes[15], 0x27);
  EXPECT_EQ(id->ToString(), kText);
  EXPECT_EQ(id->ToBytes().size(), 16u);
  EXPECT_EQ(*JobUuid::FromBytes(id->ToBytes()), *id);
}

TEST(JobUuidTest, UpperCaseIsTheSameId) {
  EXPECT_EQ(*JobUuid::FromString("1B4E28BA-2FA1-41D2-883F-0016D3CCA427"),
            *JobUuid::FromString(kText));
}

TEST(JobUuidTest, ZeroIsZero) {
  EXPECT_TRUE(JobUuid().IsZero());
  EXPECT_FALSE(JobUuid::FromString(kText)->IsZero());
  EXPECT_EQ(JobUuid().ToString(), "00000000-0000-0000-0000-000000000000");
}

TEST(JobUuidTest, RefusesEverythingElse) {
  const std::string good = kText;
  for (size_t i = 0; i < good.size(); ++i) {
    std::string bad = good;
    bad[i] = bad[i] == '-' ? '0' : 'g';
    EXPECT_FALSE(JobUuid::FromString(bad).ok()) << bad;
    bad[i] = '-';
    EXPECT_EQ(JobUuid::FromString(bad).ok(), good[i] == '-') << bad;
    EXPECT_FALSE(JobUuid::FromString(good.substr(0, i)).ok());
  }
  EXPECT_FALSE(JobUuid::FromString(good + "0").ok());
  EXPECT_FALSE(JobUuid::FromString("{" + good.substr(1, 34) + "}").ok());
}

TEST(JobUuidTest, HostileTextGivesABoundedPrintableMessage) {
  const absl::Status status = JobUuid::FromString(std::string(1 << 20, '\n')).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_LT(status.message().size(), 300u);
  EXPECT_EQ(status.message().find('\n'), absl::string_view::npos);
}

TEST(JobUuidTest, BytesMustBeSixteen) {
  EXPECT_FALSE(JobUuid::FromBytes("").ok());
  EXPECT_FALSE(JobUuid::FromBytes(std::string(15, 'x')).ok());
  EXPECT_FALSE(JobUuid::FromBytes(std::string(17, 'x')).ok());
}

TEST(JobUuidTest, HashDependsOnEveryByte) {
  std::unordered_set<size_t> hashes = {std::hash<JobUuid>()(JobUuid())};
  for (size_t i = 0; i < 16; ++i) {
    JobUuid id;
    id.bytes[i] = 1;
    hashes.insert(std::hash<JobUuid>()(id));
  }
  EXPECT_EQ(hashes.size(), 17u);
}

TEST(ShardIdTest, TextNamesEverything) {
  ShardId id{*JobUuid::FromString(kText), 3, 900, 0};
  EXPECT_EQ(id.ToString(), std::string(kText) + " attempt 3 step 900 rank 0");
  EXPECT_EQ(id.checkpoint(), (CheckpointId{3, 900}));
}

TEST(CheckpointIdTest, OrderedByAttemptThenStep) {
  EXPECT_LT((CheckpointId{1, 900}), (CheckpointId{2, 1}));
  EXPECT_LT((CheckpointId{2, 1}), (CheckpointId{2, 2}));
}

TEST(ProcessIdTest, Text) {
  EXPECT_EQ((ProcessId{4711, 5}).ToString(), "pid 4711");
}

TEST(JobNameTest, Accepts) {
  for (const std::string name : {"a", "_", "0", "llama-70b.run_3", "A..b"}) {
    EXPECT_TRUE(CheckJobName(name).ok()) << name;
  }
  EXPECT_TRUE(CheckJobName(std::string(128, 'x')).ok());
}

TEST(JobNameTest, Refuses) {
  for (const std::string name : {"", ".", "..", ".hidden", "-rf", "a/b", "a b", "a\nb", "ä"}) {
    EXPECT_EQ(CheckJobName(name).code(), absl::StatusCode::kInvalidArgument) << name;
  }
  EXPECT_FALSE(CheckJobName(std::string(129, 'x')).ok());
  EXPECT_FALSE(CheckJobName(std::string_view("a\0b", 3)).ok());
  EXPECT_EQ(CheckJobName("a/b").message(),
            "job name: byte 1 (0x2f) is not allowed; use letters, digits, '.', '_' and '-'");
}

}  // namespace
}  // namespace holdfast
