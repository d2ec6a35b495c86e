#include "server/runtime/tier_config.h"

#include <algorithm>
#include <functional>
#include <set>
#include <string_view>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "base/filesystem.h"
#include "base/status.h"
#include "base/units.h"
#include "server/runtime/tiers/directory_look.h"
#include "server/tier_limits.h"

namespace holdfast {

absl::Status BadSetting(std::string_view setting, const std::string& problem) {
  return absl::InvalidArgumentError(absl::StrCat(ToAbsl(setting), ": ", problem));
}

namespace {

struct Place {
  std::string_view setting;
  std::string dir;
  bool tier = false;  // it holds copies
};

// The tiers' directories, and those that they must not share. These come first: what is wrong is
// said of the tier.
std::vector<Place> PlacesOf(const v1::DaemonConfig& config) {
  std::vector<Place> places = {{"memory.dir", config.memory().dir()},
                               {"state_dir", config.state_dir()}};
  for (const std::string& dir : config.nvme().dirs()) {
    places.push_back({"nvme.dirs", dir, true});
  }
  if (!config.remote().dir().empty()) {
    places.push_back({"remote.dir", config.remote().dir(), true});
  }
  return places;
}

absl::Status CheckPath(const Place& place) {
  const std::string none =
      place.setting == "nvme.dirs" ? "dirs: []" : absl::StrCat("no ", ToAbsl(place.setting));
  if (place.dir.empty()) {
    return BadSetting(place.setting,
                      absl::StrCat("'' is no directory; name one by its absolute path, or ",
                                   "leave the tier out (", none, ")"));
  }
  if (place.dir[0] != '/') {
    return BadSetting(
        place.setting,
        absl::StrCat("'", place.dir, "' is not an absolute path; begin it ", "with a slash"));
  }
  return absl::OkStatus();
}

using Within = std::function<bool(size_t inner, size_t outer)>;

// The first tier's directory that is, holds, or lies inside another one.
absl::Status CheckApart(const std::vector<Place>& places, const Within& within) {
  for (size_t i = 0; i < places.size(); ++i) {
    for (size_t j = 0; j < i && places[i].tier; ++j) {
      const bool inside = within(i, j);
      const bool holds = within(j, i);
      if (!inside && !holds) {
        continue;
      }
      const std::string other =
          absl::StrCat("'", places[j].dir, "' (", ToAbsl(places[j].setting), ")");
      return BadSetting(
          places[i].setting,
          absl::StrCat("'", places[i].dir, "' ",
                       inside && holds ? "is the same directory as "
                       : inside        ? "lies inside "
                                       : "has inside it ",
                       other, "; each needs a directory of its own, beside the others"));
    }
  }
  return absl::OkStatus();
}

bool IsBelow(const std::string& inner, const std::string& outer) {
  return outer == "/" || inner == outer || inner.starts_with(outer + "/");
}

}  // namespace

std::string NoRoomBesideKeptFiles(uint64_t pool_bytes, uint64_t drives, uint64_t bytes_max) {
  return absl::StrCat("nvme.recycle_bytes_max: ", FormatBytes(pool_bytes), " on each of ", drives,
                      drives == 1 ? " drive leave" : " drives leave",
                      " no room for copies in the budget of ", FormatBytes(bytes_max),
                      " (nvme.bytes_max); lower the one, or raise the other");
}

// (What a device is called shows when it is opened.)
absl::Status CheckFabric(const v1::FabricConfig& fabric) {
  // (libfabric's layers on top are not used: "verbs;ofi_rxm".)
  const std::string& provider = fabric.provider();
  const std::string core = provider.substr(0, provider.find(';'));
  if (!provider.empty() && provider != "auto" && provider != "off" && core != "verbs" &&
      core != "tcp") {
    return BadSetting("fabric.provider", absl::StrCat("'", provider.substr(0, 64),
                                                      "': expected auto, verbs, tcp or off"));
  }
  std::set<std::string> seen;
  for (const std::string& device : fabric.devices()) {
    const bool plain = std::all_of(device.begin(), device.end(), [](char c) {
      return absl::ascii_isgraph(static_cast<unsigned char>(c));
    });
    if (device.empty() || device.size() > 255 || !plain) {
      return BadSetting("fabric.devices",
                        "a device needs a name of 1 to 255 characters, none of them a space");
    }
    if (!seen.insert(device).second) {
      return BadSetting("fabric.devices", absl::StrCat("'", device, "' twice"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckTierConfig(const v1::DaemonConfig& config) {
  HF_RETURN_IF_ERROR(CheckFabric(config.fabric()));
  const v1::NvmeConfig& nvme = config.nvme();
  for (const SettingRange& range : TierRanges(nvme, config.remote(), config.fabric())) {
    HF_RETURN_IF_ERROR(CheckRange(range));
  }
  const auto drives = static_cast<uint64_t>(nvme.dirs_size());
  if (drives > 0 && nvme.bytes_max() > 0 && nvme.recycle_bytes_max() * drives >= nvme.bytes_max()) {
    return absl::InvalidArgumentError(
        NoRoomBesideKeptFiles(nvme.recycle_bytes_max(), drives, nvme.bytes_max()));
  }
  const std::vector<Place> places = PlacesOf(config);
  std::vector<std::string> paths;
  for (const Place& place : places) {
    if (place.tier) {
      HF_RETURN_IF_ERROR(CheckPath(place));
    }
    paths.push_back(NormalPath(place.dir));
  }
  return CheckApart(
      places, [&](size_t inner, size_t outer) { return IsBelow(paths[inner], paths[outer]); });
}

absl::Status CheckTierPlaces(Env& env, const v1::DaemonConfig& config, Duration timeout,
                             std::vector<std::string>& unanswered) {
  const std::vector<Place> places = PlacesOf(config);
  if (std::none_of(places.begin(), places.end(), [](const Place& place) { return place.tier; })) {
    return absl::OkStatus();
  }
  std::vector<std::string> dirs;
  for (const Place& place : places) {
    dirs.push_back(place.dir);
  }
  const std::vector<absl::StatusOr<DirectoryLook>> looks = LookAtDirectories(env, dirs, timeout);
  // 1. Each by itself.
  for (size_t i = 0; i < places.size(); ++i) {
    const absl::StatusOr<DirectoryLook>& look = looks[i];
    if (!look.ok() && !absl::IsFailedPrecondition(look.status())) {
      unanswered.push_back(absl::StrCat(ToAbsl(places[i].setting), ": ", Message(look.status())));
    }
    if (!places[i].tier) {
      continue;  // looked at by those who open it
    }
    if (absl::IsFailedPrecondition(look.status())) {
      return BadSetting(places[i].setting,
                        absl::StrCat("'", dirs[i], "': ", Message(look.status()),
                                     "; name a directory, or move the file away"));
    }
    if (look.ok() && KeepsNoFiles(look->filesystem.type)) {
      return BadSetting(
          places[i].setting,
          absl::StrCat("'", dirs[i], "' lies on ", look->filesystem.type,
                       ", which takes no files; name a directory on ",
                       places[i].setting == "nvme.dirs" ? "a drive" : "a shared file system"));
    }
  }
  // 2. Beside each other.
  return CheckApart(places, [&](size_t inner, size_t outer) {
    return looks[inner].ok() && looks[outer].ok() && IsWithin(*looks[inner], *looks[outer]);
  });
}

}  // namespace holdfast
