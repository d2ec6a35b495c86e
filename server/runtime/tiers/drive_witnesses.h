// Which drives this node expects, and which remote directory: read from the state directory and the
// drives, kept there, and told to the core where one is absent (recovery/witnesses.h;
// docs/formats.md, "witness"). One for DurableTiers, shared with its operations.
//
//   auto witnesses = std::make_shared<DriveWitnesses>(options, told, spread);
//   witnesses->Opened(0, *store);                         // the drive's store has been opened
//   HF_RETURN_IF_ERROR(witnesses->Note(0, *store, job, *control));   // before its first shard
//   there
//
// Thread-safe. `spread` has Write called in a thread of the witness's own, so that one that hangs
// or fails delays no other; what it cannot write is tried again by each LookAgain.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/env.h"
#include "base/mutex.h"
#include "recovery/witnesses.h"
#include "server/events.h"
#include "tiers/durable/copy_store.h"
#include "tiers/transfer/transfer_control.h"

namespace holdfast {

class DriveWitnesses {
 public:
  struct Options {
    Env* env = nullptr;
    std::string state_dir;  // empty: it is no witness
    std::vector<std::string> dirs;
    std::string remote_dir;
    bool remote_mounted = false;  // RemoteConfig.mounted
  };
  using Told = std::function<void(TierScanned)>;
  // Has Write called, or Dropped. `drive` none: for the state directory.
  using Spread = std::function<void(std::optional<size_t> drive)>;

  DriveWitnesses(Options options, Told told, Spread spread);

  // ---- Drives, by their place in Options::dirs ----

  // Before others can use the store. What follows for the witnesses' files LookAgain has written.
  void Opened(size_t drive, CopyStore& store) EXCLUDES(mutex_);
  // It could not be, or went away.
  void NotOpened(size_t drive) EXCLUDES(mutex_);
  // An older version, which had no witnesses, noted that this drive was there.
  void Expect(const std::string& id, const std::string& dir) EXCLUDES(mutex_);
  bool WasForgotten(const std::string& id) EXCLUDES(mutex_);
  // OK once more than half of the witnesses know that the job may lie on the drive. Waits for them
  // a while. Unavailable: they do not. Or why the drive itself cannot be told.
  absl::Status Note(size_t drive, CopyStore& store, const JobIdentity& job,
                    TransferControl& control) EXCLUDES(mutex_);
  // Nothing of the job lies there any more.
  void JobGone(size_t drive, const std::string& job) EXCLUDES(mutex_);

  // ---- The remote directory ----

  // What it has to be; nothing: nothing is known of it.
  std::optional<KnownDirectory> RemoteMustBe() EXCLUDES(mutex_);
  void RemoteOpened(const std::string& id) EXCLUDES(mutex_);  // empty: it went away

  // ---- The witnesses' files ----

  // `store` of the drive; null: it is not open.
  absl::Status Write(std::optional<size_t> drive, CopyStore* store) EXCLUDES(mutex_);
  void Dropped(std::optional<size_t> drive) EXCLUDES(mutex_);  // it never ran
  void LookAgain() EXCLUDES(mutex_);                           // now and then

  // ---- For people, and the core ----

  // What is known of drives that are absent, for a scan that was asked for.
  std::vector<TierScanned> Scanned(const ScanNvme& scan) EXCLUDES(mutex_);
  std::vector<std::string> Notes() EXCLUDES(mutex_);  // one for each of them
  // `ckptctl forget-drive`: what came of it. Waits a while for it to be noted.
  absl::StatusOr<std::string> Forget(const std::string& id) EXCLUDES(mutex_);

 private:
  struct Place {
    std::string id;       // of the drive that is there; empty: not known
    bool looked = false;  // it was opened, or could not be
    bool fails = false;   // its own problem says more
    Mutex writing;        // held while its witness file is written
  };
  // Of a witness: Write was asked for and has not begun; so many are under way.
  struct Writes {
    bool queued = false;
    int running = 0;
    std::string failure;  // of the last one
  };
  using Wanted = std::vector<std::optional<size_t>>;

  std::string StatePath() const;
  void ReadState() REQUIRES(mutex_);
  std::string WitnessOf(std::optional<size_t> drive) REQUIRES(mutex_);
  Wanted Stale() REQUIRES(mutex_);
  void SpreadTo(const Wanted& wanted);
  bool AnyUnderWay() REQUIRES(mutex_);
  bool AllLooked() REQUIRES(mutex_);
  bool IsStillOpening(const std::string& dir) REQUIRES(mutex_);
  void AwaitOpened() REQUIRES(mutex_);
  void TellAbsent() REQUIRES(mutex_);
  TierScanned ScanOf(const AbsentDrive& drive) const;
  std::string RemoteId() REQUIRES(mutex_);
  std::vector<AbsentDrive> Missing() REQUIRES(mutex_);
  absl::StatusOr<std::string> FindForgotten(const std::string& id) REQUIRES(mutex_);

  const Options options_;
  const Told told_;
  const Spread spread_;
  Mutex state_writing_;
  std::vector<std::unique_ptr<Place>> places_;  // what they have is guarded by mutex_
  Mutex mutex_;
  CondVar changed_;
  Witnesses known_ GUARDED_BY(mutex_);
  std::map<std::optional<size_t>, Writes> writes_ GUARDED_BY(mutex_);
  std::map<std::string, TierScanned> absent_told_ GUARDED_BY(mutex_);  // by TierScanned::dir
  bool state_read_ GUARDED_BY(mutex_) = false;  // the state directory had a witness file
  DrainId last_scan_ GUARDED_BY(mutex_) = 0;
  std::string remote_open_ GUARDED_BY(mutex_);
  bool remote_looked_ GUARDED_BY(mutex_) = false;
};

}  // namespace holdfast
