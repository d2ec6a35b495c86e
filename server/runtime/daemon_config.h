// ckptd's settings: defaults, then the file, then the command line; checked as a whole before
// anything is touched.
//
//   v1::DaemonConfig config;
//   HF_RETURN_IF_ERROR(LoadConfig(flags, &config));   // complete and sound
//
// Plain functions. Who reads the settings again (Daemon) calls them from a thread of its own.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/setting_range.h"
#include "holdfast/v1/config.pb.h"

namespace holdfast {

struct ConfigFlags {
  std::string file;  // empty: the default path if there is one
  std::optional<std::string> memory_dir;
  std::optional<std::string> state_dir;
  std::optional<std::string> socket;
  std::optional<std::string> admin;
  std::optional<std::string> memory_bytes;  // with a unit
};

// What the defaults depend on.
struct Surroundings {
  bool root = false;
  std::string uid;
  std::string host;
  // Of users; empty: not known.
  std::string state_dir;
  std::string runtime_dir;
};
Surroundings SurroundingsOfProcess();

// System paths for root, XDG paths for users. Fields that depend on others stay empty:
// CompleteConfig.
v1::DaemonConfig DefaultConfig(const Surroundings& surroundings);
inline v1::DaemonConfig DefaultConfig() {
  return DefaultConfig(SurroundingsOfProcess());
}

// Fills in what follows from other settings alone.
void CompleteConfig(v1::DaemonConfig* config);

// Of the settings that neither the tiers (server/tier_limits.h), the cluster nor the policy have.
std::vector<SettingRange> NodeRanges(const v1::DaemonConfig& config);

// Reads and merges, fills in what depends on the rest, checks. Every error names the setting and
// the way out.
absl::Status LoadConfig(const ConfigFlags& flags, v1::DaemonConfig* config);

// Limits and contradictions, and whether memory.dir is where it can be: on a tmpfs that holds the
// budget.
absl::Status CheckConfig(const v1::DaemonConfig& config);

// That the log's file is no pipe without a reader: it would be waited for without a word.
absl::Status CheckLogFile(const std::string& file);

// What the start would find at the places that the settings name, as far as that can be told
// without changing anything: directories that can be made and written, files (certificates, keys, a
// password) that can be read and hold what they are for.
absl::Status CheckPlaces(const v1::DaemonConfig& config);

}  // namespace holdfast
