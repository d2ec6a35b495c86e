#include "server/runtime/settings_reference.h"

#include <gmock/gmock.h>
#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>
#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>

#include <fstream>
#include <set>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "base/config.h"
#include "base/status.h"
#include "recovery/policy.h"
#include "server/runtime/daemon_config.h"
#include "server/runtime/settings_change.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;

TEST(SettingsReference, DocsHaveWhatTheProgramPrints) {
  const absl::StatusOr<std::string> reference = SettingsReference();
  ASSERT_TRUE(reference.ok()) << reference.status();
  std::stringstream page;
  page << std::ifstream(std::string(HOLDFAST_SOURCE_DIR) + "/docs/configuration.md").rdbuf();
  EXPECT_TRUE(page.str() == *reference)
      << "make it anew: ckptd --print-reference > docs/configuration.md\n"
      << *reference;
}

TEST(SettingsReference, EverySettingIsDescribed) {
  const auto rows = SettingRows();
  ASSERT_TRUE(rows.ok()) << rows.status();
  std::set<std::string> described;
  for (const SettingRow& row : *rows) {
    EXPECT_TRUE(described.insert(row.name).second) << row.name;
    for (const std::string& text : {row.type, row.fallback, row.effect, row.meaning}) {
      EXPECT_FALSE(text.empty()) << row.name;
      EXPECT_EQ(text.find('\n'), std::string::npos) << row.name;
    }
  }
  for (const std::string& name : SettingNames()) {
    // Of both tiers in the schema, refused for this one.
    const bool is_none =
        name == "policy.nvme.share_replicas" || absl::StartsWith(name, "policy.nvme.compression");
    EXPECT_EQ(described.count(name), is_none ? 0u : 1u) << name;
  }
  v1::Policy shared;
  shared.mutable_nvme()->set_share_replicas(true);
  EXPECT_FALSE(CheckPolicy(shared).ok());
  v1::Policy compressed;
  compressed.mutable_nvme()->set_compression(v1::TierPolicy::COMPRESSION_NONE);
  EXPECT_FALSE(CheckPolicy(compressed).ok());
  v1::Policy level;
  level.mutable_nvme()->set_compression_level(3);
  EXPECT_FALSE(CheckPolicy(level).ok());
  v1::Policy threads;
  threads.mutable_nvme()->set_compression_threads(1);
  EXPECT_FALSE(CheckPolicy(threads).ok());
}

// What stands in the column can stand in the file, and is what holds without it.
TEST(SettingsReference, DefaultsAreThoseOfTheCode) {
  const auto rows = SettingRows();
  ASSERT_TRUE(rows.ok()) << rows.status();
  v1::DaemonConfig defaults = DefaultConfig(Surroundings{.root = true, .host = "h"});
  defaults.mutable_cluster()->mutable_etcd();
  CompleteConfig(&defaults);
  size_t compared = 0;
  for (const SettingRow& row : *rows) {
    // (Those that depend on the machine are no values.)
    if (row.fallback.empty() || row.fallback.front() != '`' ||
        row.fallback.find('<') != std::string::npos) {
      continue;
    }
    const std::string value = row.fallback.substr(1, row.fallback.find('`', 1) - 1);
    const std::vector<std::string> path = absl::StrSplit(row.name, '.');
    std::string yaml;
    for (size_t i = 0; i < path.size(); ++i) {
      absl::StrAppend(&yaml, std::string(2 * i, ' '), path[i], ":",
                      i + 1 < path.size() ? "\n" : " ");
    }
    v1::DaemonConfig parsed = defaults;
    const absl::Status read = ParseConfig(absl::StrCat(yaml, value, "\n"), "test", parsed);
    ASSERT_TRUE(read.ok()) << read;
    EXPECT_TRUE(google::protobuf::util::MessageDifferencer::Equals(parsed, defaults))
        << row.name << ": " << value;
    ++compared;
  }
  EXPECT_GT(compared, 45u);
}

TEST(SettingsReference, LimitsAreThoseOfTheCheck) {
  const auto rows = SettingRows();
  ASSERT_TRUE(rows.ok()) << rows.status();
  const auto limits = [&](const std::string& name) {
    for (const SettingRow& row : *rows) {
      if (row.name == name) {
        return row.limits;
      }
    }
    return std::string("no row");
  };
  // One of each table, and of each way to say it.
  EXPECT_EQ(limits("nvme.depth"), "4 to 32");
  EXPECT_EQ(limits("nvme.dirs"), "at most 64 of them");
  EXPECT_EQ(limits("nvme.bytes_max"), "1 MiB to 1 EiB, or 0");
  EXPECT_EQ(limits("nvme.low_watermark_percent"), "1 to nvme.high_watermark_percent");
  EXPECT_EQ(limits("socket.mode"), "0001 to 0777");
  EXPECT_EQ(limits("memory.slots_max"), "memory.slots_per_rank to 16777216");
  EXPECT_EQ(limits("memory.bytes_max"), "2 MiB to the size of its file system");
  EXPECT_EQ(limits("memory.keep_committed"), "");
  EXPECT_EQ(limits("policy.remote.keep_last"), "1 to 1000000");
  EXPECT_EQ(limits("cluster.etcd.request_timeout_ms"),
            "100 ms to half of cluster.etcd.lease_ttl_ms");
}

// ---- What the program refuses to print ----

const google::protobuf::FieldDescriptor& Field(const google::protobuf::Message& section,
                                               const std::string& name) {
  return *section.GetDescriptor()->FindFieldByName(name);
}

TEST(SettingsReference, ASettingNeedsOneDefault) {
  const v1::DaemonConfig config = DefaultConfig();
  const v1::NvmeConfig& nvme = config.nvme();
  EXPECT_EQ(*DefaultText(Field(nvme, "depth"), {"pieces", ""}, nvme), "`4`");
  const auto both = DefaultText(Field(nvme, "depth"), {"pieces", "5"}, nvme);
  EXPECT_THAT(Message(both.status()), HasSubstr("in its comment ('5') and in the code ('4')"));
  const auto none = DefaultText(Field(nvme, "bytes_max"), {"budget", ""}, nvme);
  EXPECT_THAT(Message(none.status()), HasSubstr("it has no default"));
  EXPECT_EQ(*DefaultText(Field(nvme, "bytes_max"), {"budget", "80 %"}, nvme), "80 %");
  const v1::TierPolicy& policy = config.policy().nvme();
  EXPECT_EQ(*DefaultText(Field(policy, "every_ms"), {"time", ""}, policy), "`0`")
      << "0 that was set is a default";
  const v1::LogConfig& log = config.log();
  EXPECT_FALSE(DefaultText(Field(log, "file"), {"besides stderr", ""}, log).ok());
}

TEST(SettingsReference, ACommentHasItsDefaultAtTheEnd) {
  const SettingComment read = ReadSettingComment("kept, per drive; 0: none; default: 10 % of it");
  EXPECT_EQ(read.meaning, "kept, per drive; 0: none");
  EXPECT_EQ(read.fallback, "10 % of it");
  EXPECT_EQ(ReadSettingComment("of one run").meaning, "of one run");
  EXPECT_EQ(ReadSettingComment("of one run").fallback, "");
  EXPECT_EQ(ReadSettingComment("default: none").meaning, "");
}

}  // namespace
}  // namespace holdfast
