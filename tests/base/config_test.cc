#include "base/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/status.h"
#include "config_test.pb.h"

namespace holdfast {
namespace {

using config_test::Config;
using ::testing::ElementsAre;

Config Parsed(std::string_view text) {
  Config config;
  const absl::Status status = ParseConfig(text, "ckptd.yaml", config);
  EXPECT_TRUE(status.ok()) << status;
  return config;
}

std::string ErrorOf(std::string_view text) {
  Config config;
  config.set_name("untouched");
  const absl::Status status = ParseConfig(text, "ckptd.yaml", config);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
  Config untouched;
  untouched.set_name("untouched");
  EXPECT_EQ(config.DebugString(), untouched.DebugString());
  return Message(status);
}

TEST(ConfigTest, ReadsEveryKindOfField) {
  const Config config = Parsed(R"(
# a comment
memory:
  dir: /dev/shm/holdfast
  bytes_max: 64 GiB
  slots_min: 3
peers:
  - address: 10.0.0.1
    port: 7000
  - {address: "10.0.0.2", port: 7001}
names: [a, "b c", 'null']
numbers: [-5, 0, 9223372036854775807]
tier: nvme_local
tiers: [MEMORY, Tier_Kind_Nvme_Local, nvme-local]
enabled: true
ratio: 0.25
small_ratio: 1e-3
offset: -2147483648
long_offset: -9223372036854775808
count: 4294967295
total: 18446744073709551615
name: 5
deadline_ms: 10min
save_deadline_ms_max: 1500
flush_bytes_max: 1MiB
etcd: "http://[::1]:2379"
socket_mode: 0660
)");
  EXPECT_EQ(config.memory().dir(), "/dev/shm/holdfast");
  EXPECT_EQ(config.memory().bytes_max(), uint64_t{64} << 30);
  EXPECT_EQ(config.memory().slots_min(), 3u);
  ASSERT_EQ(config.peers_size(), 2);
  EXPECT_EQ(config.peers(0).address(), "10.0.0.1");
  EXPECT_EQ(config.peers(1).port(), 7001u);
  EXPECT_THAT(config.names(), ElementsAre("a", "b c", "null"));
  EXPECT_THAT(config.numbers(), ElementsAre(-5, 0, INT64_MAX));
  EXPECT_EQ(config.tier(), config_test::TIER_KIND_NVME_LOCAL);
  EXPECT_THAT(config.tiers(),
              ElementsAre(config_test::TIER_KIND_MEMORY, config_test::TIER_KIND_NVME_LOCAL,
                          config_test::TIER_KIND_NVME_LOCAL));
  EXPECT_TRUE(config.enabled());
  EXPECT_EQ(config.ratio(), 0.25);
  EXPECT_EQ(config.small_ratio(), 1e-3f);
  EXPECT_EQ(config.offset(), INT32_MIN);
  EXPECT_EQ(config.long_offset(), INT64_MIN);
  EXPECT_EQ(config.count(), UINT32_MAX);
  EXPECT_EQ(config.total(), UINT64_MAX);
  EXPECT_EQ(config.name(), "5");
  EXPECT_EQ(config.deadline_ms(), 600'000u);
  EXPECT_EQ(config.save_deadline_ms_max(), 1500u);
  EXPECT_EQ(config.flush_bytes_max(), 1 << 20);
  EXPECT_EQ(config.etcd(), "http://[::1]:2379");
  EXPECT_EQ(config.socket_mode(), 0660u);
}

TEST(ConfigTest, EmptyTextsChangeNothing) {
  Config config;
  config.set_name("default");
  config.mutable_memory()->set_dir("/d");
  const std::string before = config.DebugString();
  for (const char* text :
       {"", "\n", "# only a comment\n", "---\n", "{}", "memory:\n", "memory: {}"}) {
    EXPECT_TRUE(ParseConfig(text, "f", config).ok()) << text;
    EXPECT_EQ(config.DebugString(), before) << text;
  }
}

TEST(ConfigTest, DefaultsStayWhereTheTextIsSilentAndListsAreReplaced) {
  Config config;
  config.mutable_memory()->set_dir("/default");
  config.mutable_memory()->set_slots_min(2);
  config.add_names("default");
  ASSERT_TRUE(ParseConfig("memory: {slots_min: 5}\nnames: [x, y]", "f", config).ok());
  EXPECT_EQ(config.memory().dir(), "/default");
  EXPECT_EQ(config.memory().slots_min(), 5u);
  EXPECT_THAT(config.names(), ElementsAre("x", "y"));
  ASSERT_TRUE(ParseConfig("names: []", "f", config).ok());
  EXPECT_EQ(config.names_size(), 0);
}

TEST(ConfigTest, UnknownKeysNameLineAndNeighbour) {
  EXPECT_EQ(ErrorOf("name: x\n\nmemory:\n  byte_max: 5\n"),
            "ckptd.yaml:4: memory.byte_max: unknown setting; did you mean memory.bytes_max?");
  EXPECT_EQ(ErrorOf("memroy: {}"), "ckptd.yaml:1: memroy: unknown setting; did you mean memory?");
  EXPECT_EQ(ErrorOf("peers:\n- address: x\n- adress: y"),
            "ckptd.yaml:3: peers[1].adress: unknown setting; did you mean peers[1].address?");
  EXPECT_EQ(ErrorOf("memory: {quite_another_thing: 1}"),
            "ckptd.yaml:1: memory.quite_another_thing: unknown setting; known here: dir, "
            "bytes_max, slots_min, slot_bytes");
}

TEST(ConfigTest, DuplicateKeys) {
  EXPECT_EQ(ErrorOf("name: a\ncount: 1\nname: a\n"),
            "ckptd.yaml:3: name: given twice (first in line 1)");
  EXPECT_EQ(ErrorOf("memory: {dir: x, dir: y}"),
            "ckptd.yaml:1: dir: given twice (first in line 1)");
}

TEST(ConfigTest, OneofMembersExcludeEachOther) {
  EXPECT_EQ(ErrorOf("etcd: a\nmembers: b"),
            "ckptd.yaml:2: members: only one setting of the group membership may be given");
}

TEST(ConfigTest, NoTextHasANulInIt) {
  EXPECT_EQ(ErrorOf("count: 1\nname: \"a\\0b\"\n"),
            "ckptd.yaml:2: name: 'a\\x00b': no setting can have a NUL in it; take it out");
  EXPECT_EQ(ErrorOf("names: [x, \"\\0\"]"),
            "ckptd.yaml:1: names[1]: '\\x00': no setting can have a NUL in it; take it out");
}

TEST(ConfigTest, WrongTypes) {
  EXPECT_EQ(ErrorOf("count: many"), "ckptd.yaml:1: count: expected a whole number, not 'many'");
  EXPECT_EQ(ErrorOf("count: \"5\""), "ckptd.yaml:1: count: expected a whole number, not '5'");
  EXPECT_EQ(ErrorOf("count: 1.5"), "ckptd.yaml:1: count: expected a whole number, not '1.5'");
  EXPECT_EQ(ErrorOf("count: 007"), "ckptd.yaml:1: count: expected a whole number, not '007'");
  EXPECT_EQ(ErrorOf("count: [1]"), "ckptd.yaml:1: count: expected a single value");
  EXPECT_EQ(ErrorOf("count:"), "ckptd.yaml:1: count: has no value");
  EXPECT_EQ(ErrorOf("name: ~"), "ckptd.yaml:1: name: has no value");
  EXPECT_EQ(ErrorOf("memory: 5"), "ckptd.yaml:1: memory: expected settings (key: value)");
  EXPECT_EQ(ErrorOf("memory: [a]"), "ckptd.yaml:1: memory: expected settings (key: value)");
  EXPECT_EQ(ErrorOf("names: x"), "ckptd.yaml:1: names: expected a list ([] for an empty one)");
  EXPECT_EQ(ErrorOf("names: {a: b}"), "ckptd.yaml:1: names: expected a list ([] for an empty one)");
  EXPECT_EQ(ErrorOf("enabled: yes"), "ckptd.yaml:1: enabled: expected true or false, not 'yes'");
  EXPECT_EQ(ErrorOf("ratio: fast"), "ckptd.yaml:1: ratio: expected a number, not 'fast'");
  EXPECT_EQ(ErrorOf("ratio: nan"), "ckptd.yaml:1: ratio: expected a number, not 'nan'");
  EXPECT_EQ(ErrorOf("small_ratio: 1e300"),
            "ckptd.yaml:1: small_ratio: expected a number, not '1e300'");
  EXPECT_EQ(ErrorOf("tier: disk"), "ckptd.yaml:1: tier: 'disk' is not one of: memory, nvme_local");
  EXPECT_EQ(ErrorOf("tier: unspecified"),
            "ckptd.yaml:1: tier: 'unspecified' is not one of: memory, nvme_local");
  EXPECT_EQ(ErrorOf("socket_mode: 0888"),
            "ckptd.yaml:1: socket_mode: expected permission bits in octal, as in 0660, not '0888'");
  EXPECT_EQ(ErrorOf("- a\n- b"), "ckptd.yaml:1: expected settings (key: value)");
  EXPECT_EQ(ErrorOf("just words"), "ckptd.yaml:1: expected settings (key: value)");
}

TEST(ConfigTest, Ranges) {
  EXPECT_EQ(ErrorOf("count: 4294967296"),
            "ckptd.yaml:1: count: '4294967296' is out of range; from 0 to 4294967295");
  EXPECT_EQ(ErrorOf("count: -1"),
            "ckptd.yaml:1: count: '-1' is out of range; from 0 to 4294967295");
  EXPECT_EQ(ErrorOf("offset: 2147483648"),
            "ckptd.yaml:1: offset: '2147483648' is out of range; from -2147483648 to 2147483647");
  EXPECT_EQ(
      ErrorOf("flush_bytes_max: 2GiB"),
      "ckptd.yaml:1: flush_bytes_max: '2GiB' is out of range; from -2147483648 to 2147483647");
  ErrorOf("total: 18446744073709551616");
  ErrorOf("save_deadline_ms_max: 100d");
}

TEST(ConfigTest, UnitsGoByTheFieldsName) {
  EXPECT_EQ(Parsed("memory: {slot_bytes: \"2 MiB\"}").memory().slot_bytes(), uint64_t{2} << 20);
  EXPECT_EQ(Parsed("deadline_ms: 2s").deadline_ms(), 2000u);
  EXPECT_THAT(ErrorOf("deadline_ms: 2GiB"),
              ::testing::StartsWith("ckptd.yaml:1: deadline_ms: duration '2GiB'"));
  EXPECT_EQ(ErrorOf("deadline_ms: 1500us"),
            "ckptd.yaml:1: deadline_ms: duration '1500us': must be whole milliseconds");
  EXPECT_THAT(ErrorOf("memory: {bytes_max: 5 bananas}"),
              ::testing::StartsWith("ckptd.yaml:1: memory.bytes_max: size '5 bananas'"));
  EXPECT_EQ(ErrorOf("total: 2GiB"), "ckptd.yaml:1: total: expected a whole number, not '2GiB'");
  EXPECT_EQ(ErrorOf("ms_total: 2s"), "ckptd.yaml:1: ms_total: expected a whole number, not '2s'");
}

TEST(ConfigTest, SyntaxErrorsNameTheLine) {
  EXPECT_THAT(ErrorOf("name: x\nmemory: [1, 2\n"), ::testing::StartsWith("ckptd.yaml:"));
  EXPECT_THAT(ErrorOf("name: \"open"), ::testing::StartsWith("ckptd.yaml:1"));
  EXPECT_THAT(ErrorOf("a: b: c"), ::testing::StartsWith("ckptd.yaml:1"));
  EXPECT_THAT(ErrorOf("name: a\n---\nname: b\n"), ::testing::HasSubstr("second document"));
  EXPECT_THAT(ErrorOf("? {a: b}\n: c"), ::testing::HasSubstr("a key must be a text"));
  EXPECT_EQ(ErrorOf("count: 1\nname: &x a"), "ckptd.yaml:2: anchors (&name) are not supported");
  EXPECT_EQ(ErrorOf("name: !!str a"), "ckptd.yaml:1: tags (!name) are not supported");
  ErrorOf("name: *x");
}

TEST(ConfigTest, HostileTexts) {
  EXPECT_EQ(ErrorOf(std::string((1 << 20) + 1, '#')),
            "ckptd.yaml: 1048577 bytes; a configuration has at most 1048576");
  EXPECT_EQ(ErrorOf("count: 1\nname: \xff"), "ckptd.yaml:2: not UTF-8 text");
  EXPECT_EQ(ErrorOf("name: \xed\xa0\x80"), "ckptd.yaml:1: not UTF-8 text");  // a surrogate
  EXPECT_EQ(ErrorOf("name: \xc0\xaf"), "ckptd.yaml:1: not UTF-8 text");      // overlong
  EXPECT_EQ(ErrorOf(std::string_view("name: a\0b", 9)), "ckptd.yaml:1: not UTF-8 text");
  EXPECT_EQ(ErrorOf(std::string_view("\xff\xfe"
                                     "a\0",
                                     4)),
            "ckptd.yaml:1: not UTF-8 text");  // UTF-16
  const std::string long_key(100'000, 'k');
  EXPECT_LT(ErrorOf(long_key + ": 1").size(), 1000u);
  EXPECT_LT(ErrorOf("count: " + long_key).size(), 1000u);
  EXPECT_EQ(Parsed("name: \"\xf0\x9f\x92\xbe\"").name(), "\xf0\x9f\x92\xbe");
}

std::string Nested(int levels) {
  std::string text;
  for (int i = 0; i < levels; ++i) {
    text += i == 0 ? "{deep: " : "{deeper: ";
  }
  return text + "{value: 1}" + std::string(static_cast<size_t>(levels), '}');
}

TEST(ConfigTest, DepthIsLimited) {
  EXPECT_EQ(ErrorOf(Nested(32)), "ckptd.yaml:1: nested deeper than 32 levels");
  EXPECT_TRUE(Parsed(Nested(31)).has_deep());
  ErrorOf(std::string(500'000, '['));
  ErrorOf("deep: " + std::string(100'000, '{'));
}

}  // namespace
}  // namespace holdfast
