#include "server/runtime/settings_change.h"

#include <gmock/gmock.h>
#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>
#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>

#include "absl/strings/str_split.h"
#include "server/runtime/daemon_config.h"

namespace holdfast {
namespace {

namespace pb = google::protobuf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

struct Place {
  pb::Message* section;
  const pb::FieldDescriptor* field;
};

Place Find(pb::Message& config, const std::string& setting) {
  const std::vector<std::string> path = absl::StrSplit(setting, '.');
  pb::Message* section = &config;
  for (size_t i = 0; i + 1 < path.size(); ++i) {
    section = section->GetReflection()->MutableMessage(
        section, section->GetDescriptor()->FindFieldByName(path[i]));
  }
  return {section, section->GetDescriptor()->FindFieldByName(path.back())};
}

// To whatever it is not.
void Alter(pb::Message& config, const std::string& setting) {
  const auto [section, field] = Find(config, setting);
  const pb::Reflection& reflection = *section->GetReflection();
  switch (field->cpp_type()) {
    case pb::FieldDescriptor::CPPTYPE_STRING:
      field->is_repeated() ? reflection.AddString(section, field, "/another")
                           : reflection.SetString(section, field, "/another");
      break;
    case pb::FieldDescriptor::CPPTYPE_UINT32:
      reflection.SetUInt32(section, field, reflection.GetUInt32(*section, field) + 1);
      break;
    case pb::FieldDescriptor::CPPTYPE_UINT64:
      reflection.SetUInt64(section, field, reflection.GetUInt64(*section, field) + 1);
      break;
    case pb::FieldDescriptor::CPPTYPE_BOOL:
      reflection.SetBool(section, field, !reflection.GetBool(*section, field));
      break;
    case pb::FieldDescriptor::CPPTYPE_ENUM:
      reflection.SetEnumValue(section, field, reflection.GetEnumValue(*section, field) + 1);
      break;
    case pb::FieldDescriptor::CPPTYPE_MESSAGE:
      ASSERT_TRUE(field->is_repeated());
      reflection.AddMessage(section, field);
      break;
    default:
      FAIL() << setting << ": of a type that no setting had";
  }
}

// Of a node with everything, so that each of its settings can differ alone.
v1::DaemonConfig Whole() {
  v1::DaemonConfig config = DefaultConfig();
  config.mutable_cluster()->mutable_etcd()->add_endpoints("etcd:2379");
  config.mutable_cluster()->mutable_tls();
  config.mutable_fabric();
  config.mutable_health();
  CompleteConfig(&config);
  return config;
}

TEST(SettingsChange, EverySettingHasAVerdict) {
  const std::vector<std::string> names = SettingNames();
  EXPECT_GT(names.size(), 80u);
  for (const std::string& name : names) {
    EXPECT_TRUE(EffectOf(name)) << name << ": kVerdicts in settings_change.cc lacks it";
  }
  EXPECT_FALSE(EffectOf("memory"));
  EXPECT_FALSE(EffectOf("memory.nothing"));
}

TEST(SettingsChange, EachSettingTakesEffectAtOnceOrWaitsForARestart) {
  const v1::DaemonConfig running = Whole();
  for (const std::string& name : SettingNames()) {
    v1::DaemonConfig wanted = running;
    Alter(wanted, name);
    const SettingsChange change = CompareSettings(running, wanted);
    const bool at_once = EffectOf(name) == SettingEffect::kAtOnce;
    if (at_once) {
      EXPECT_THAT(change.at_once, ElementsAre(name));
      EXPECT_THAT(change.restart, IsEmpty()) << name;
    } else {
      EXPECT_THAT(change.restart, ElementsAre(name));
      EXPECT_THAT(change.at_once, IsEmpty()) << name;
    }
    EXPECT_TRUE(pb::util::MessageDifferencer::Equals(change.config, at_once ? wanted : running))
        << name;
  }
}

// A door that waits for a restart to be closed, or to ask for another authority's certificates,
// lets in whom it did.
TEST(SettingsChange, WhoIsLetInChangesTogetherWithTheDoor) {
  v1::DaemonConfig running = Whole();
  running.mutable_admin()->mutable_tls()->set_address("127.0.0.1:9468");
  running.mutable_admin()->mutable_tls()->set_ca_file("/ca");
  running.mutable_admin()->mutable_tls()->add_users()->set_certificate("alice");
  v1::DaemonConfig without = running;
  without.mutable_admin()->clear_tls();
  EXPECT_THAT(CompareSettings(running, without).at_once, IsEmpty());
  v1::DaemonConfig of_others = running;
  of_others.mutable_admin()->mutable_tls()->set_ca_file("/other");
  of_others.mutable_admin()->mutable_tls()->add_users()->set_certificate("bob");
  const SettingsChange change = CompareSettings(running, of_others);
  EXPECT_THAT(change.at_once, IsEmpty());
  EXPECT_EQ(change.config.admin().tls().users_size(), 1);
}

// The budget was judged by the new place's file system.
TEST(SettingsChange, WhatIsJudgedByAPlaceWaitsForIt) {
  v1::DaemonConfig running = Whole();
  running.mutable_memory()->set_dir("/dev/shm/holdfast");
  running.mutable_memory()->set_bytes_max(1 << 30);
  v1::DaemonConfig wanted = running;
  wanted.mutable_memory()->set_dir("/mnt/slots");
  wanted.mutable_memory()->set_bytes_max(uint64_t{1} << 40);
  wanted.mutable_memory()->set_peer_bytes_max(uint64_t{1} << 39);
  wanted.mutable_memory()->set_slots_max(running.memory().slots_max() + 1);
  const SettingsChange change = CompareSettings(running, wanted);
  EXPECT_THAT(change.at_once, ElementsAre("memory.slots_max"));
  EXPECT_THAT(change.restart,
              ElementsAre("memory.dir", "memory.bytes_max", "memory.peer_bytes_max"));
  EXPECT_EQ(change.config.memory().bytes_max(), 1u << 30);
  EXPECT_TRUE(CheckMixture(change).ok());
}

TEST(SettingsChange, WhatContradictsWhatGoesOnIsRefused) {
  v1::DaemonConfig running = Whole();
  running.mutable_memory()->set_bytes_max(1 << 30);
  running.mutable_memory()->set_slots_per_rank(100);
  running.mutable_memory()->set_slots_max(200);
  v1::DaemonConfig wanted = running;
  wanted.mutable_memory()->set_slots_per_rank(2);
  wanted.mutable_memory()->set_slots_max(50);
  const absl::Status refused = CheckMixture(CompareSettings(running, wanted));
  EXPECT_EQ(refused.code(), absl::StatusCode::kOutOfRange);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("memory.slots_max"));
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("takes effect at a restart only (memory.slots_per_rank): restart ckptd"));
}

TEST(SettingsChange, AFileWithoutTheTiersThatAreInUseIsRefused) {
  v1::DaemonConfig running = Whole();
  running.mutable_nvme()->add_dirs("/mnt/nvme0");
  running.mutable_remote()->set_dir("/mnt/remote");
  EXPECT_TRUE(CheckTiersStay(running, running).ok());
  EXPECT_TRUE(CheckTiersStay(Whole(), running).ok()) << "one more waits for a restart";
  const absl::Status refused = CheckTiersStay(running, Whole());
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("nvme.dirs and remote.dir are not there any more"));
}

TEST(SettingsChange, NothingDiffersFromItself) {
  const SettingsChange change = CompareSettings(Whole(), Whole());
  EXPECT_THAT(change.at_once, IsEmpty());
  EXPECT_THAT(change.restart, IsEmpty());
  EXPECT_EQ(RestartText(change.restart), "");
}

TEST(SettingsChange, ZeroIsNotTheSameAsNotSaid) {
  v1::DaemonConfig wanted = DefaultConfig();
  wanted.mutable_memory()->set_peer_bytes_max(0);
  const SettingsChange change = CompareSettings(DefaultConfig(), wanted);
  EXPECT_THAT(change.at_once, ElementsAre("memory.peer_bytes_max"));
  EXPECT_TRUE(change.config.memory().has_peer_bytes_max());
  EXPECT_FALSE(CompareSettings(wanted, DefaultConfig()).config.memory().has_peer_bytes_max());
}

TEST(SettingsChange, ANodeThatIsAloneJoinsNoClusterWhileItRuns) {
  v1::DaemonConfig alone = DefaultConfig();
  alone.set_node_name("a");
  v1::DaemonConfig wanted = alone;
  wanted.mutable_cluster()->mutable_etcd()->add_endpoints("etcd:2379");
  wanted.mutable_log()->set_level("debug");
  CompleteConfig(&wanted);
  const SettingsChange change = CompareSettings(alone, wanted);
  EXPECT_FALSE(change.config.has_cluster());
  EXPECT_EQ(change.config.log().level(), "debug");
  EXPECT_THAT(RestartText(change.restart), HasSubstr("cluster.etcd.endpoints"));
  EXPECT_THAT(RestartText(change.restart), HasSubstr("differ from what runs: restart ckptd"));
  EXPECT_EQ(RestartText({"memory.dir"}), "memory.dir differs from what runs: restart ckptd");
}

}  // namespace
}  // namespace holdfast
