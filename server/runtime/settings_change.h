// What becomes of settings that are read again while ckptd runs: which take effect at once, and
// which need a restart.
//
//   const SettingsChange change = CompareSettings(running, wanted);
//   Apply(change.config);                       // as it runs from now on
//   Tell(RestartText(change.restart));          // "memory.dir differs from what runs: …"
//
// Pure functions, thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "holdfast/v1/config.pb.h"

namespace holdfast {

enum class SettingEffect : uint8_t { kAtOnce, kRestart };

// By its name, as in "memory.dir"; none: nobody has decided, which a test does not let pass.
std::optional<SettingEffect> EffectOf(std::string_view setting);

// All of the schema. A list is one setting, whatever its elements are.
std::vector<std::string> SettingNames();

struct SettingsChange {
  v1::DaemonConfig config;           // what runs, with what takes effect at once
  std::vector<std::string> at_once;  // those that do
  std::vector<std::string> restart;  // those that differ from what runs, and go on doing so
};
// Both complete and sound.
SettingsChange CompareSettings(const v1::DaemonConfig& running, const v1::DaemonConfig& wanted);

// What runs with the new ones is not what was checked as a whole. OutOfRange: they contradict what
// goes on until a restart.
absl::Status CheckMixture(const SettingsChange& change);

// FailedPrecondition: a tier that is in use has vanished, as in a file that is empty, or written in
// part. (What the rest of such a file says of policies would have copies removed.)
absl::Status CheckTiersStay(const v1::DaemonConfig& running, const v1::DaemonConfig& wanted);

// For people; empty: none does.
std::string RestartText(const std::vector<std::string>& settings);

}  // namespace holdfast
