#include "server/runtime/settings_change.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>
#include <google/protobuf/util/message_differencer.h>

#include <algorithm>
#include <array>
#include <functional>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/setting_range.h"
#include "base/status.h"
#include "server/runtime/daemon_config.h"
#include "server/tier_limits.h"

namespace holdfast {
namespace {

namespace pb = google::protobuf;
using Chain = std::vector<const pb::FieldDescriptor*>;

struct Verdict {
  std::string_view setting;
  SettingEffect effect;
  // Judged by that one, or by all others of that section ("admin.tls."): while one of them waits
  // for a restart, this one does.
  std::string_view of = {};
};
constexpr SettingEffect kAtOnce = SettingEffect::kAtOnce;
constexpr SettingEffect kRestart = SettingEffect::kRestart;

constexpr auto kVerdicts = std::to_array<Verdict>({
    // Names of this node and of its places: others know them, and files lie there.
    {"node_name", kRestart},
    {"state_dir", kRestart},
    {"socket.path", kRestart},
    {"socket.mode", kRestart},
    {"socket.connections_max", kAtOnce},
    {"socket.connections_per_uid_max", kAtOnce},
    {"socket.requests_per_connection_max", kAtOnce},
    {"socket.reply_backlog_bytes_max", kAtOnce},
    {"socket.hello_timeout_ms", kRestart},
    {"admin.path", kRestart},
    {"admin.request_timeout_ms", kAtOnce},
    {"admin.tls.address", kRestart},
    {"admin.tls.ca_file", kRestart},  // (what the files have may change: they are read again)
    {"admin.tls.cert_file", kRestart},
    {"admin.tls.key_file", kRestart},
    {"admin.tls.users", kAtOnce, "admin.tls."},  // (who listens, and by which authority)
    {"memory.dir", kRestart},
    {"memory.bytes_max", kAtOnce, "memory.dir"},  // (of its file system)
    {"memory.slots_per_rank", kRestart},          // ranks that run have been given so many
    {"memory.slots_max", kAtOnce},
    {"memory.populate_chunk_bytes", kAtOnce},
    {"memory.populate_cpu_percent", kAtOnce},
    {"memory.keep_committed", kAtOnce},
    {"memory.peer_bytes_max", kAtOnce, "memory.dir"},
    {"memory.keep_ended_ms", kAtOnce},
    {"memory.bytes_per_uid_max", kAtOnce},
    {"save.commit_deadline_ms", kAtOnce},
    {"session.deadline_max_ms", kAtOnce},
    {"metrics.address", kRestart},
    {"log.level", kAtOnce},
    {"log.file", kRestart},
    // Drives, and the files that are kept on them, are taken over at the start.
    {"nvme.dirs", kRestart},
    {"nvme.bytes_max", kRestart},
    {"nvme.high_watermark_percent", kAtOnce},
    {"nvme.low_watermark_percent", kAtOnce},
    {"nvme.recycle_bytes_max", kRestart},
    {"nvme.bandwidth_bytes_per_s_max", kAtOnce},
    {"nvme.piece_bytes", kRestart},
    {"nvme.depth", kRestart},
    {"nvme.engine", kRestart},
    {"nvme.io_priority", kAtOnce},
    {"nvme.nice", kAtOnce},
    {"nvme.stall_timeout_ms", kRestart},
    {"remote.dir", kRestart},
    {"remote.bytes_max", kAtOnce},
    {"remote.writers", kRestart},
    {"remote.piece_bytes", kRestart},
    {"remote.bandwidth_bytes_per_s_max", kAtOnce},
    {"remote.io_priority", kAtOnce},
    {"remote.nice", kAtOnce},
    {"remote.stall_timeout_ms", kRestart},
    {"remote.stripe_count", kRestart},
    {"remote.stripe_bytes", kRestart},
    {"remote.mounted", kRestart},
    {"remote.job_writes_max", kAtOnce},
    {"policy.replicas", kAtOnce},
    {"policy.nvme.every_steps", kAtOnce},
    {"policy.nvme.every_ms", kAtOnce},
    {"policy.nvme.keep_last", kAtOnce},
    {"policy.nvme.keep_every_steps", kAtOnce},
    {"policy.nvme.bytes_max", kAtOnce},
    {"policy.nvme.verify", kAtOnce},
    // (CheckPolicy refuses these.)
    {"policy.nvme.share_replicas", kAtOnce},
    {"policy.nvme.compression", kAtOnce},
    {"policy.nvme.compression_level", kAtOnce},
    {"policy.nvme.compression_threads", kAtOnce},
    {"policy.remote.every_steps", kAtOnce},
    {"policy.remote.every_ms", kAtOnce},
    {"policy.remote.keep_last", kAtOnce},
    {"policy.remote.keep_every_steps", kAtOnce},
    {"policy.remote.bytes_max", kAtOnce},
    {"policy.remote.verify", kAtOnce},
    {"policy.remote.share_replicas", kAtOnce},
    {"policy.remote.compression", kAtOnce},
    {"policy.remote.compression_level", kAtOnce},
    {"policy.remote.compression_threads", kAtOnce},
    // What all nodes must agree on.
    {"cluster.name", kRestart},
    {"cluster.listen_address", kRestart},
    {"cluster.advertise_address", kRestart},
    {"cluster.labels", kRestart},
    {"cluster.members", kRestart},
    {"cluster.etcd.endpoints", kRestart},
    {"cluster.etcd.prefix", kRestart},
    {"cluster.etcd.ca_file", kRestart},
    {"cluster.etcd.cert_file", kRestart},
    {"cluster.etcd.key_file", kRestart},
    {"cluster.etcd.user", kRestart},
    {"cluster.etcd.password_file", kRestart},
    {"cluster.etcd.lease_ttl_ms", kRestart},
    {"cluster.etcd.request_timeout_ms", kRestart},
    {"cluster.tls.ca_file", kRestart},  // (what the files have may change: they are read again)
    {"cluster.tls.cert_file", kRestart},
    {"cluster.tls.key_file", kRestart},
    {"cluster.plaintext", kRestart},
    {"fabric.provider", kRestart},
    {"fabric.devices", kRestart},
    {"fabric.dscp", kRestart},
    {"fabric.bandwidth_bytes_per_s_max", kAtOnce},
    {"events.command", kAtOnce},
    {"events.least", kAtOnce},
    {"events.timeout_ms", kAtOnce},
    {"nvme.keep_ended_ms", kAtOnce},
    {"retention.grace_ms", kAtOnce},
    {"restore.wait_for_copies_ms", kAtOnce},
    {"restore.fall_back", kAtOnce},
    {"scrub.period_ms", kAtOnce},
    {"scrub.bandwidth_bytes_per_s_max", kAtOnce},
    {"health.address", kRestart},
    {"status_page.address", kRestart},
    {"status_page.tls.ca_file", kRestart},
    {"status_page.tls.cert_file", kRestart},
    {"status_page.tls.key_file", kRestart},
});

std::string NameOf(const Chain& chain) {
  return absl::StrJoin(chain, ".", [](std::string* out, const pb::FieldDescriptor* field) {
    absl::StrAppend(out, field->name());
  });
}

bool IsSection(const pb::FieldDescriptor& field) {
  return field.cpp_type() == pb::FieldDescriptor::CPPTYPE_MESSAGE && !field.is_repeated();
}

using Visit = std::function<void(const Chain&)>;

void ForEachSetting(const pb::Descriptor& schema, Chain& chain, const Visit& visit) {
  for (int i = 0; i < schema.field_count(); ++i) {
    chain.push_back(schema.field(i));
    if (IsSection(*schema.field(i))) {
      ForEachSetting(*schema.field(i)->message_type(), chain, visit);
    } else {
      visit(chain);
    }
    chain.pop_back();
  }
}

const pb::Message& SectionOf(const pb::Message& config, const Chain& chain) {
  const pb::Message* section = &config;
  for (size_t i = 0; i + 1 < chain.size(); ++i) {
    section = &section->GetReflection()->GetMessage(*section, chain[i]);
  }
  return *section;
}

pb::Message& SectionOf(pb::Message& config, const Chain& chain) {
  pb::Message* section = &config;
  for (size_t i = 0; i + 1 < chain.size(); ++i) {
    section = section->GetReflection()->MutableMessage(section, chain[i]);
  }
  return *section;
}

bool Same(const pb::Message& a, const pb::Message& b, const Chain& chain) {
  const pb::Message& in_a = SectionOf(a, chain);
  const pb::Message& in_b = SectionOf(b, chain);
  const pb::FieldDescriptor* const field = chain.back();
  // (0 that was said is not the same as nothing, which the comparison below would have it.)
  if (field->has_presence() &&
      in_a.GetReflection()->HasField(in_a, field) != in_b.GetReflection()->HasField(in_b, field)) {
    return false;
  }
  pb::util::MessageDifferencer differencer;
  return differencer.CompareWithFields(in_a, in_b, {field}, {field});
}

const Verdict* VerdictOf(std::string_view setting) {
  const auto found = std::find_if(kVerdicts.begin(), kVerdicts.end(),
                                  [&](const Verdict& v) { return v.setting == setting; });
  return found == kVerdicts.end() ? nullptr : &*found;
}

void Take(const pb::Message& from, const Chain& chain, pb::Message& to) {
  const pb::Message& source = SectionOf(from, chain);
  const std::unique_ptr<pb::Message> copy(source.New());
  copy->CopyFrom(source);
  pb::Message& section = SectionOf(to, chain);
  section.GetReflection()->SwapFields(copy.get(), &section, {chain.back()});
}

}  // namespace

std::optional<SettingEffect> EffectOf(std::string_view setting) {
  const Verdict* const verdict = VerdictOf(setting);
  return verdict == nullptr ? std::nullopt : std::optional(verdict->effect);
}

std::vector<std::string> SettingNames() {
  std::vector<std::string> names;
  Chain chain;
  ForEachSetting(*v1::DaemonConfig::descriptor(), chain,
                 [&](const Chain& one) { names.push_back(NameOf(one)); });
  return names;
}

SettingsChange CompareSettings(const v1::DaemonConfig& running, const v1::DaemonConfig& wanted) {
  SettingsChange change;
  change.config = running;
  std::set<std::string> differ;
  Chain chain;
  ForEachSetting(*v1::DaemonConfig::descriptor(), chain, [&](const Chain& one) {
    if (!Same(running, wanted, one)) {
      differ.insert(NameOf(one));
    }
  });
  ForEachSetting(*v1::DaemonConfig::descriptor(), chain, [&](const Chain& one) {
    const std::string name = NameOf(one);
    if (differ.count(name) == 0) {
      return;
    }
    const Verdict* const verdict = VerdictOf(name);
    const bool waits =
        verdict != nullptr && !verdict->of.empty() &&
        std::any_of(differ.begin(), differ.end(), [&](const std::string& other) {
          return other == verdict->of ||
                 (verdict->of.ends_with('.') && other.starts_with(verdict->of) && other != name);
        });
    if (verdict != nullptr && verdict->effect == kAtOnce && !waits) {
      Take(wanted, one, change.config);
      change.at_once.push_back(name);
    } else {
      change.restart.push_back(name);
    }
  });
  return change;
}

absl::Status CheckMixture(const SettingsChange& change) {
  const v1::DaemonConfig& config = change.config;
  std::vector<SettingRange> ranges = NodeRanges(config);
  const std::vector<SettingRange> tiers =
      TierRanges(config.nvme(), config.remote(), config.fabric());
  ranges.insert(ranges.end(), tiers.begin(), tiers.end());
  for (const SettingRange& range : ranges) {
    if (const absl::Status fits = CheckRange(range); !fits.ok()) {
      return absl::OutOfRangeError(
          absl::StrCat(Message(fits), "; together with what takes effect at a restart only (",
                       absl::StrJoin(change.restart, ", "), "): restart ckptd"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckTiersStay(const v1::DaemonConfig& running, const v1::DaemonConfig& wanted) {
  std::vector<std::string> gone;
  if (running.nvme().dirs_size() > 0 && wanted.nvme().dirs_size() == 0) {
    gone.push_back("nvme.dirs");
  }
  if (!running.remote().dir().empty() && wanted.remote().dir().empty()) {
    gone.push_back("remote.dir");
  }
  return gone.empty() ? absl::OkStatus()
                      : absl::FailedPreconditionError(absl::StrCat(
                            absl::StrJoin(gone, " and "), gone.size() == 1 ? " is" : " are",
                            " not there any more: was the file read while it was written? A tier "
                            "is given up "
                            "by a restart"));
}

std::string RestartText(const std::vector<std::string>& settings) {
  if (settings.empty()) {
    return "";
  }
  return absl::StrCat(absl::StrJoin(settings, ", "), settings.size() == 1 ? " differs" : " differ",
                      " from what runs: restart ckptd");
}

}  // namespace holdfast
