// The catalog: job states (durable) and an index of shards, in RocksDB under <state_dir>/catalog.
// It is an index over what the tiers hold: when it is missing, damaged or of a newer version it is
// moved aside and made anew from them. When it cannot be opened for another reason (a full disk,
// too many open files) its files stay as they are, and each later write tries again. The daemon
// starts all the same.
//
//   const std::unique_ptr<Catalog> catalog = Catalog::Open(Env::System(), "/var/lib/holdfast");
//   for (const std::string& problem : catalog->problems()) …
//   HF_RETURN_IF_ERROR(catalog->WriteJobState(state));        // on disk when it returns
//
// Thread-safe; calls block on the disk and are made from a worker.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
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

class Catalog {
 public:
  static std::unique_ptr<Catalog> Open(Env* env, const std::string& state_dir);
  ~Catalog();
  Catalog(const Catalog&) = delete;
  Catalog& operator=(const Catalog&) = delete;

  // What was found and done about it, for log and status.
  const std::vector<std::string>& problems() const { return problems_; }
  bool created() const { return created_; }
  // False: it could not be opened so far (a problem says why). Reads fail, writes try again.
  bool is_open() EXCLUDES(mutex_);

  // Those that can be decoded; the rest are problems.
  absl::StatusOr<std::vector<v1::JobState>> JobStates(std::vector<std::string>* problems)
      EXCLUDES(mutex_);
  absl::StatusOr<std::vector<v1::CatalogShard>> Shards() EXCLUDES(mutex_);

  absl::Status WriteJobState(const v1::JobState& state) EXCLUDES(mutex_);
  absl::Status RemoveJobState(const JobUuid& job) EXCLUDES(mutex_);

  // Not synced: rebuilt at every start.
  absl::Status IndexShard(const v1::CatalogShard& shard) EXCLUDES(mutex_);
  absl::Status UnindexShard(const ShardId& id, std::string_view tier) EXCLUDES(mutex_);
  // Makes the index of `tier` say exactly this.
  absl::Status ReplaceShards(std::string_view tier, const std::vector<v1::CatalogShard>& shards)
      EXCLUDES(mutex_);

  // Everything on disk; no more calls after it.
  absl::Status Close() EXCLUDES(mutex_);

 private:
  enum class Sync : uint8_t { kNo, kYes };
  Catalog(Env* env, std::string state_dir);
  absl::Status OpenOrReplace() EXCLUDES(mutex_);
  // DataLoss: damaged. FailedPrecondition: of a newer version. Anything else says nothing about
  // what is in the files. Unless OK there is no database open afterwards.
  absl::Status OpenAndCheck() REQUIRES(mutex_);
  absl::Status CheckVersion() REQUIRES(mutex_);
  absl::Status CheckReadable() REQUIRES(mutex_);
  // Opens it (again) when it is not open, or a write failed.
  absl::Status EnsureOpen() REQUIRES(mutex_);
  absl::Status NotOpen() const;
  absl::Status MoveAside(std::string_view suffix, const std::string& why);
  absl::Status Write(rocksdb::WriteBatch& batch, Sync sync) REQUIRES(mutex_);

  Env* const env_;
  const std::string state_dir_;
  const std::string path_;
  std::vector<std::string> problems_;
  bool created_ = false;
  Mutex mutex_;
  std::unique_ptr<rocksdb::DB> db_ GUARDED_BY(mutex_);  // null: not open
  // A failed write leaves RocksDB read-only: the next one opens it again.
  bool failed_ GUARDED_BY(mutex_) = false;
  bool closed_ GUARDED_BY(mutex_) = false;
};

}  // namespace holdfast
