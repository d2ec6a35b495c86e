// The catalog: job states (durable) and an index of shards, in RocksDB under <state_dir>/catalog.
// It is an index over what the tiers hold: when it is missing, damaged or of a newer version it is
// moved aside and made anew from them. When it cannot be opened for another reason (a full disk,
// a state_dir that cannot be written) its files stay as they are, and each later write tries again.
// The daemon starts all the same; only another daemon at work in state_dir is an error.
//
//   HF_ASSIGN_OR_RETURN(auto catalog, Catalog::Open(Env::System(), "/var/lib/holdfast"));
//   for (const std::string& problem : catalog->TakeProblems()) …
//   HF_RETURN_IF_ERROR(catalog->WriteJobState(state));        // on disk when it returns
//
// Thread-safe; calls block on the disk, which may hang: CatalogWriter makes them from a thread of
// its own.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "base/daemon_lock.h"
#include "base/env.h"
#include "base/ids.h"
#include "base/mutex.h"
#include "holdfast/v1/state.pb.h"

namespace rocksdb {
class DB;
class WriteBatch;
}  // namespace rocksdb

namespace holdfast {

inline constexpr uint32_t kCatalogVersion = 1;
// How many catalogs that could not be read are kept for a look: catalog.bad-<n>, the newest. Those
// of newer versions (catalog.newer-<n>) are never removed: the newer program can use them.
inline constexpr size_t kBadCatalogsKept = 3;

// What the index says of a tier, of a job in it, or of one checkpoint of that.
struct CatalogRange {
  std::string tier;
  std::optional<JobUuid> job;
  std::optional<CheckpointId> checkpoint;  // only with a job
  bool Covers(const CatalogRange& other) const {
    return tier == other.tier && (!job || job == other.job) &&
           (!checkpoint || checkpoint == other.checkpoint);
  }
  auto operator<=>(const CatalogRange&) const = default;  // before all that it covers
};

class Catalog {
 public:
  // Unavailable: another process that lives has <state_dir>/lock. No other failure is an error.
  static absl::StatusOr<std::unique_ptr<Catalog>> Open(Env* env, const std::string& state_dir);
  ~Catalog();
  Catalog(const Catalog&) = delete;
  Catalog& operator=(const Catalog&) = delete;

  // What was found and done about it since the last call, for log and status.
  std::vector<std::string> TakeProblems() EXCLUDES(mutex_);
  bool created() EXCLUDES(mutex_);
  // Why it is not open; then reads fail, writes try again. OK: it is.
  absl::Status open_status() EXCLUDES(mutex_);

  // Those that can be decoded; the rest are problems.
  absl::StatusOr<std::vector<v1::JobState>> JobStates(std::vector<std::string>* problems)
      EXCLUDES(mutex_);
  absl::StatusOr<std::vector<v1::CatalogShard>> Shards() EXCLUDES(mutex_);

  absl::Status WriteJobState(const v1::JobState& state) EXCLUDES(mutex_);
  absl::Status RemoveJobState(const JobUuid& job) EXCLUDES(mutex_);

  // Not synced: rebuilt at every start.
  absl::Status UpdateShards(std::string_view tier, const std::vector<v1::CatalogShard>& added,
                            const std::vector<ShardId>& removed) EXCLUDES(mutex_);
  // Costs what is there, and not what could be.
  absl::Status RemoveShards(const CatalogRange& range) EXCLUDES(mutex_);
  // Makes the index of `tier` say exactly this.
  absl::Status ReplaceShards(std::string_view tier, const std::vector<v1::CatalogShard>& shards)
      EXCLUDES(mutex_);

  // Everything on disk; no more calls after it.
  absl::Status Close() EXCLUDES(mutex_);

 private:
  enum class Sync : uint8_t { kNo, kYes };
  Catalog(Env* env, std::string state_dir);
  // Takes <state_dir>/lock unless it is ours already.
  absl::Status LockDirectory() REQUIRES(mutex_);
  absl::Status OpenOrReplace() REQUIRES(mutex_);
  // DataLoss: damaged. FailedPrecondition: of a newer version. Anything else says nothing about
  // what is in the files. Unless OK there is no database open afterwards.
  absl::Status OpenAndCheck() REQUIRES(mutex_);
  absl::Status CheckVersion() REQUIRES(mutex_);
  absl::Status CheckReadable() REQUIRES(mutex_);
  // Opens it (again) when it is not open, or a write failed.
  absl::Status EnsureOpen() REQUIRES(mutex_);
  absl::Status NotOpen() const;
  absl::Status MoveAside(std::string_view suffix, const std::string& why) REQUIRES(mutex_);
  absl::Status Write(rocksdb::WriteBatch& batch, Sync sync) REQUIRES(mutex_);

  Env* const env_;
  const std::string state_dir_;
  const std::string path_;
  Mutex mutex_;
  DaemonLock lock_ GUARDED_BY(mutex_);
  // Where no lock file can be written: the one that is there, opened for reading.
  std::unique_ptr<File> read_lock_ GUARDED_BY(mutex_);
  std::vector<std::string> problems_ GUARDED_BY(mutex_);
  absl::Status open_status_ GUARDED_BY(mutex_);
  bool created_ GUARDED_BY(mutex_) = false;
  std::unique_ptr<rocksdb::DB> db_ GUARDED_BY(mutex_);  // null: not open
  // A failed write leaves RocksDB read-only: the next one opens it again.
  bool failed_ GUARDED_BY(mutex_) = false;
  bool closed_ GUARDED_BY(mutex_) = false;
};

}  // namespace holdfast
