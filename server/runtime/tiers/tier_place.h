// One drive or the remote mount: its store, opened by the first operation that needs it and again
// when that failed, and how it fares. Shared by the operations that use it, which may outlive the
// daemon's own objects. What lies at that path is taken for the drive or the mount once: when the
// store is opened again, in this process or the next, it must be the same, or one that may well
// have been put there on purpose (CopyStore::Options::same_as). The witnesses hear of what is there
// (drive_witnesses.h), and say which remote directory it has to be.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "server/runtime/tiers/drive_witnesses.h"
#include "tiers/durable/copy_store.h"
#include "tiers/transfer/pacer.h"

namespace holdfast {

class RemoteOwner;

class TierPlace {
 public:
  // `memory_dir`, of a drive: whether it was a mount is kept there across restarts; "": nowhere.
  // `drive`: which of the witnesses' it is; none: the remote directory.
  // `owner`: of the remote directory, which cluster's it is to be; null: that is not asked.
  explicit TierPlace(CopyStore::Options options, std::string memory_dir = "",
                     std::shared_ptr<DriveWitnesses> witnesses = nullptr,
                     std::optional<size_t> drive = std::nullopt,
                     std::shared_ptr<RemoteOwner> owner = nullptr);

  const std::string& dir() const { return options_.dir; }
  // Blocks on I/O. What the sweep of its first opening had to tell comes with `told`.
  absl::StatusOr<std::shared_ptr<CopyStore>> Store(std::vector<std::string>* told)
      EXCLUDES(mutex_, opening_);
  // By a person's order, takes the remote directory over from that cluster, and opens it. Blocks on
  // I/O.
  absl::Status Adopt(const std::string& from) EXCLUDES(mutex_, opening_);
  // The one that is open, if one is; no I/O.
  std::shared_ptr<CopyStore> OpenStore() EXCLUDES(mutex_);

  // What was moved since the daemon started, in how many operations, and how long these took
  // together: what ceilings and quiet windows held back is in it, waiting for a worker is not.
  struct Traffic {
    uint64_t bytes = 0;
    uint64_t operations = 0;
    Duration took{0};
  };
  // How it fares, for the status; no I/O but in Note.
  struct Health {
    std::string problem;  // of the last operation
    uint64_t bytes_free = 0;
    uint64_t device = 0;     // of the file system that has them; 0: not known
    std::string filesystem;  // its type: "ext4", "tmpfs"; empty: not known
    Traffic written;
    uint64_t bytes_shared = 0;           // not written, since other ranks' files have them
    uint64_t bytes_compressed_away = 0;  // not written, since what was is compressed
    Traffic read;
    std::string engine;
  };
  // How an operation on the store ended; asks the directory whether it is what it was.
  struct Noted {
    absl::Status away;       // Unavailable: it is not
    bool went_away = false;  // and this is the first to notice
  };
  Noted Note(const absl::Status& status) EXCLUDES(mutex_);
  void CountWritten(uint64_t bytes, Duration took) EXCLUDES(mutex_);
  void CountRead(uint64_t bytes, Duration took) EXCLUDES(mutex_);
  void CountShared(uint64_t bytes) EXCLUDES(mutex_);
  void CountCompressedAway(uint64_t bytes) EXCLUDES(mutex_);
  void SetEngine(std::string engine) EXCLUDES(mutex_);
  Health health() EXCLUDES(mutex_);

 private:
  absl::StatusOr<std::shared_ptr<CopyStore>> Open() REQUIRES(opening_) EXCLUDES(mutex_);
  absl::StatusOr<std::shared_ptr<CopyStore>> OpenOwned(CopyStore::Options options)
      REQUIRES(opening_);
  absl::Status StillOurs(CopyStore& store);
  void Remember(const KnownDirectory& known) REQUIRES(opening_);
  std::optional<KnownDirectory> OfAnotherProcess();
  void TellAway();

  const CopyStore::Options options_;
  const std::string memory_path_;
  const std::shared_ptr<DriveWitnesses> witnesses_;  // may be null
  const std::optional<size_t> drive_;
  const std::shared_ptr<RemoteOwner> owner_;
  Mutex opening_;  // held while the store is being opened, and nothing else
  Mutex mutex_;
  std::shared_ptr<CopyStore> store_ GUARDED_BY(mutex_);
  std::optional<KnownDirectory> known_ GUARDED_BY(mutex_);  // what the last store had
  absl::Status away_ GUARDED_BY(mutex_);                    // why there is none any more
  Health health_ GUARDED_BY(mutex_);
};

}  // namespace holdfast
