// What knows of directories in one life of a daemon: its witnesses, and the places, on a file
// system that the test makes. Witnesses' files are written at once, in the thread that asks.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/env.h"
#include "server/runtime/tiers/drive_witnesses.h"
#include "server/runtime/tiers/tier_place.h"

namespace holdfast {

struct DriveProcess {
  // `hung`: of a witness whose writes never begin.
  DriveProcess(Env& env, const std::string& state_dir, const std::vector<std::string>& dirs,
               const std::string& remote_dir = "", bool mounted = false,
               std::optional<size_t> hung = std::nullopt) {
    DriveWitnesses::Options options;
    options.env = &env;
    options.state_dir = state_dir;
    options.dirs = dirs;
    options.remote_dir = remote_dir;
    options.remote_mounted = mounted;
    witnesses = std::make_shared<DriveWitnesses>(
        options, [this](const TierScanned& scanned) { told.push_back(scanned); },
        [this, hung](std::optional<size_t> drive) {
          if (!drive) {
            witnesses->Write(drive, nullptr).IgnoreError();
          } else if (drive != hung) {
            const std::shared_ptr<CopyStore> store = drives[*drive]->OpenStore();
            witnesses->Write(drive, store.get()).IgnoreError();
          }
        });
    for (size_t i = 0; i < dirs.size(); ++i) {
      CopyStore::Options store;
      store.env = &env;
      store.kind = DurableKind::kNvme;
      store.dir = dirs[i];
      drives.push_back(std::make_unique<TierPlace>(
          store, state_dir.empty() ? "" : state_dir + "/places", witnesses, i));
    }
    if (!remote_dir.empty()) {
      CopyStore::Options store;
      store.env = &env;
      store.kind = DurableKind::kRemote;
      store.dir = remote_dir;
      store.node_name = "node-1";
      remote = std::make_unique<TierPlace>(store, "", witnesses);
    }
  }
  // As a scan of each does.
  void OpenAll() {
    for (const auto& drive : drives) {
      drive->Store(nullptr).status().IgnoreError();
    }
  }
  absl::Status Note(size_t drive, const std::string& job) {
    absl::StatusOr<std::shared_ptr<CopyStore>> store = drives[drive]->Store(nullptr);
    if (!store.ok()) {
      return store.status();
    }
    TransferControl control;
    return witnesses->Note(drive, **store, {JobUuid{}, job, 0, 0}, control);
  }

  std::vector<TierScanned> told;
  std::shared_ptr<DriveWitnesses> witnesses;
  std::vector<std::unique_ptr<TierPlace>> drives;
  std::unique_ptr<TierPlace> remote;
};

}  // namespace holdfast
