#include "server/runtime/catalog.h"

#include <rocksdb/cache.h>
#include <rocksdb/db.h>
#include <rocksdb/env.h>
#include <rocksdb/table.h>
#include <rocksdb/write_batch.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <map>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/log.h"
#include "base/status.h"

namespace holdfast {
namespace {

// Keys: "version", "job/<uuid>", "shard/<tier>/<uuid>/<attempt>/<step>/<rank>" with numbers as
// big-endian hex, so that a scan comes in order.
constexpr char kVersionKey[] = "version";
constexpr char kJobPrefix[] = "job/";
constexpr char kShardPrefix[] = "shard/";

std::string JobKey(std::string_view uuid_text) {
  return absl::StrCat(kJobPrefix, ToAbsl(uuid_text));
}

std::string TierPrefix(std::string_view tier) {
  return absl::StrCat(kShardPrefix, ToAbsl(tier), "/");
}

std::string PrefixOf(const CatalogRange& range) {
  std::string prefix = TierPrefix(range.tier);
  if (range.job) {
    absl::StrAppend(&prefix, range.job->ToString(), "/");
  }
  if (range.checkpoint) {
    absl::StrAppend(&prefix, absl::Hex(range.checkpoint->attempt, absl::kZeroPad16), "/",
                    absl::Hex(range.checkpoint->step, absl::kZeroPad16), "/");
  }
  return prefix;
}

std::string ShardKey(const ShardId& id, std::string_view tier) {
  return absl::StrCat(PrefixOf({std::string(tier), id.job, id.checkpoint()}),
                      absl::Hex(id.rank, absl::kZeroPad8));
}

absl::StatusOr<std::string> KeyOf(const v1::CatalogShard& shard) {
  HF_ASSIGN_OR_RETURN(const JobUuid job, JobUuid::FromBytes(shard.job_uuid()));
  return ShardKey({job, shard.attempt(), shard.step(), shard.rank()}, shard.tier());
}

absl::Status FromRocks(const rocksdb::Status& status, std::string_view operation,
                       const std::string& path) {
  if (status.ok()) {
    return absl::OkStatus();
  }
  const std::string text =
      absl::StrCat(ToAbsl(operation), " catalog '", path, "': ", status.ToString());
  // Files that it names and that are gone are damage as well.
  return status.IsCorruption() || status.IsPathNotFound() ? absl::DataLossError(text)
                                                          : absl::UnavailableError(text);
}

// Without one, RocksDB keeps a file LOG in the catalog, and a disk that is full ends the process:
// its own logger asserts that the line after a failed one was written. Every failure that counts
// comes back as a status; what RocksDB has to say besides is for whoever turns debug on.
class InfoLog : public rocksdb::Logger {
 public:
  InfoLog() : rocksdb::Logger(rocksdb::InfoLogLevel::WARN_LEVEL) {}
  using rocksdb::Logger::Logv;
  void Logv(const char* format, va_list arguments) override {
    std::array<char, 1024> line = {};
    if (std::vsnprintf(line.data(), line.size(), format, arguments) > 0) {
      LogDebug(absl::StrCat("RocksDB: ", line.data()));
    }
  }
};

// Small: the catalog holds a few thousand short entries, and the daemon at rest is to cost next to
// nothing.
rocksdb::Options SmallOptions() {
  rocksdb::Options options;
  options.create_if_missing = true;
  options.write_buffer_size = 1 << 20;
  options.max_write_buffer_number = 2;
  options.arena_block_size = 64 << 10;
  options.max_background_jobs = 1;
  options.max_subcompactions = 1;
  options.max_open_files = 64;
  options.max_total_wal_size = 4 << 20;
  options.max_manifest_file_size = 1 << 20;
  options.info_log = std::make_shared<InfoLog>();
  options.info_log_level = rocksdb::WARN_LEVEL;
  options.stats_dump_period_sec = 0;
  options.stats_persist_period_sec = 0;
  options.compression = rocksdb::kNoCompression;
  options.target_file_size_base = 2 << 20;
  options.paranoid_checks = true;
  // A flipped bit in the middle of the log is damage, not its end: what follows must not be
  // forgotten in silence.
  options.wal_recovery_mode = rocksdb::WALRecoveryMode::kTolerateCorruptedTailRecords;
  rocksdb::BlockBasedTableOptions table;
  table.block_cache = rocksdb::NewLRUCache(1 << 20, 0);
  options.table_factory.reset(rocksdb::NewBlockBasedTableFactory(table));
  return options;
}

absl::Status RemoveTree(Env& env, const std::string& path) {
  HF_ASSIGN_OR_RETURN(const std::vector<std::string> names, env.List(path));
  for (const std::string& name : names) {
    HF_RETURN_IF_ERROR(
        env.Unlink(JoinPath(path, name)));  // a catalog has no directories of its own
  }
  return env.RemoveDirectory(path);
}

}  // namespace

Catalog::Catalog(Env* env, std::string state_dir)
    : env_(env), state_dir_(std::move(state_dir)), path_(JoinPath(state_dir_, "catalog")) {}

Catalog::~Catalog() {
  Close().IgnoreError();
}

absl::StatusOr<std::unique_ptr<Catalog>> Catalog::Open(Env* env, const std::string& state_dir) {
  std::unique_ptr<Catalog> catalog(new Catalog(env, state_dir));
  MutexLock lock(catalog->mutex_);
  const absl::Status locked = catalog->LockDirectory();
  if (absl::IsUnavailable(locked)) {
    return locked;
  }
  catalog->open_status_ = locked.ok() ? catalog->OpenOrReplace() : locked;
  return catalog;
}

std::vector<std::string> Catalog::TakeProblems() {
  MutexLock lock(mutex_);
  return std::exchange(problems_, {});
}

bool Catalog::created() {
  MutexLock lock(mutex_);
  return created_;
}

absl::Status Catalog::open_status() {
  MutexLock lock(mutex_);
  return open_status_;
}

// From a dying daemon, too: until that is gone RocksDB's own lock keeps the catalog closed.
absl::Status Catalog::LockDirectory() {
  if (lock_.held()) {
    return absl::OkStatus();
  }
  const absl::Status made = env_->CreateDirectories(state_dir_, 0700);
  const std::string path = JoinPath(state_dir_, "lock");
  read_lock_.reset();  // it would keep us out as well
  absl::StatusOr<DaemonLock> locked = DaemonLock::Take(*env_, path);
  if (locked.ok()) {
    lock_ = *std::move(locked);
    return absl::OkStatus();
  }
  if (absl::IsUnavailable(locked.status())) {
    return locked.status();
  }
  // Nothing can be written there, but somebody may have been at work since before that was so.
  absl::StatusOr<std::unique_ptr<File>> file = env_->Open(path, OpenMode::kRead);
  if (file.ok()) {
    if (::flock((*file)->fd(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
      return absl::UnavailableError(absl::StrCat(
          "lock '", path, "': held by another process; stop it first, or use another directory"));
    }
    read_lock_ = *std::move(file);
  }
  return Annotate(made.ok() ? locked.status() : made, "no catalog");
}

absl::Status Catalog::OpenOrReplace() {
  const absl::StatusOr<FileInfo> there = env_->Info(path_);
  if (!there.ok() && !absl::IsNotFound(there.status())) {
    return there.status();
  }
  const bool missing = !there.ok();
  absl::Status opened =
      missing || S_ISDIR(there->mode)
          ? absl::OkStatus()
          : absl::DataLossError(absl::StrCat("open catalog '", path_, "': it is no directory"));
  if (opened.ok()) {
    opened = OpenAndCheck();
  }
  const bool newer = absl::IsFailedPrecondition(opened);
  // A disk that is full or a descriptor that is missing says nothing against the catalog.
  if (!opened.ok() && !missing && (newer || absl::IsDataLoss(opened))) {
    HF_RETURN_IF_ERROR(MoveAside(newer ? "newer" : "bad", Message(opened)));
    opened = OpenAndCheck();
    created_ = opened.ok();
    return opened;
  }
  created_ = missing && opened.ok();
  return opened;
}

absl::Status Catalog::OpenAndCheck() {
  rocksdb::DB* db = nullptr;
  rocksdb::Options options = SmallOptions();
  // Threads of RocksDB are the process's: one is enough.
  options.env->SetBackgroundThreads(1, rocksdb::Env::Priority::LOW);
  options.env->SetBackgroundThreads(1, rocksdb::Env::Priority::HIGH);
  db_.reset();  // before it is opened again: it holds the lock
  // (RocksDB would let everybody read which jobs there are, where state_dir does.)
  env_->CreateDirectories(path_, 0700).IgnoreError();
  env_->SetDirectoryAccess(path_, kKeepOwner, kKeepOwner, 0700).IgnoreError();
  HF_RETURN_IF_ERROR(FromRocks(rocksdb::DB::Open(options, path_, &db), "open", path_));
  db_.reset(db);
  failed_ = false;
  absl::Status checked = CheckVersion();
  if (checked.ok()) {
    checked = CheckReadable();
  }
  if (!checked.ok()) {
    db_.reset();
  }
  return checked;
}

absl::Status Catalog::EnsureOpen() {
  if (closed_) {
    return absl::FailedPreconditionError(absl::StrCat("write catalog '", path_, "': it is closed"));
  }
  if (db_ != nullptr && !failed_) {
    return absl::OkStatus();
  }
  open_status_ = LockDirectory();
  if (open_status_.ok()) {
    open_status_ = OpenOrReplace();
  }
  return open_status_;
}

absl::Status Catalog::NotOpen() const {
  return absl::UnavailableError(absl::StrCat("read catalog '", path_, "': it is not open"));
}

absl::Status Catalog::CheckVersion() {
  std::string text;
  const rocksdb::Status got = db_->Get(rocksdb::ReadOptions(), kVersionKey, &text);
  if (got.IsNotFound()) {
    std::unique_ptr<rocksdb::Iterator> first(db_->NewIterator(rocksdb::ReadOptions()));
    first->SeekToFirst();
    HF_RETURN_IF_ERROR(FromRocks(first->status(), "read", path_));
    if (first->Valid()) {
      return absl::DataLossError(
          absl::StrCat("open catalog '", path_, "': it has entries but no version"));
    }
    rocksdb::WriteOptions synced;
    synced.sync = true;
    return FromRocks(db_->Put(synced, kVersionKey, absl::StrCat(kCatalogVersion)),
                     "write the version of", path_);
  }
  HF_RETURN_IF_ERROR(FromRocks(got, "read the version of", path_));
  uint32_t version = 0;
  if (!absl::SimpleAtoi(text, &version) || version == 0) {
    return absl::DataLossError(
        absl::StrCat("open catalog '", path_, "': its version cannot be understood"));
  }
  if (version > kCatalogVersion) {
    return absl::FailedPreconditionError(
        absl::StrCat("open catalog '", path_, "': it is of version ", version,
                     ", this program knows versions up to ", kCatalogVersion));
  }
  return absl::OkStatus();
}

// Every block once, with its checksum: damage is to be found now, while it can be replaced.
absl::Status Catalog::CheckReadable() {
  std::unique_ptr<rocksdb::Iterator> it(db_->NewIterator(rocksdb::ReadOptions()));
  it->SeekToFirst();
  while (it->Valid()) {
    it->Next();
  }
  return FromRocks(it->status(), "read", path_);
}

absl::Status Catalog::MoveAside(std::string_view suffix, const std::string& why) {
  const std::string prefix = absl::StrCat("catalog.", ToAbsl(suffix), "-");
  HF_ASSIGN_OR_RETURN(const std::vector<std::string> names, env_->List(state_dir_));
  std::map<uint64_t, std::string> kept;
  for (const std::string& name : names) {
    uint64_t number = 0;
    absl::string_view rest = name;
    if (absl::ConsumePrefix(&rest, prefix) && absl::SimpleAtoi(rest, &number)) {
      kept[number] = name;
    }
  }
  const uint64_t next = kept.empty() ? 1 : kept.rbegin()->first + 1;
  const std::string aside = JoinPath(state_dir_, absl::StrCat(prefix, next));
  HF_RETURN_IF_ERROR(env_->Rename(path_, aside));
  HF_RETURN_IF_ERROR(env_->SyncDirectory(state_dir_));
  std::string problem =
      absl::StrCat(why, "; moved to '", aside, "' and made anew from what memory holds");
  if (suffix == "newer") {
    absl::StrAppend(
        &problem,
        "; to go back to it, stop this daemon, rename it to 'catalog' and start the newer ckptd");
  }
  problems_.push_back(std::move(problem));
  while (suffix == "bad" && kept.size() >= kBadCatalogsKept) {
    const absl::Status removed = RemoveTree(*env_, JoinPath(state_dir_, kept.begin()->second));
    if (!removed.ok()) {
      problems_.push_back(Message(removed));
    }
    kept.erase(kept.begin());
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<v1::JobState>> Catalog::JobStates(std::vector<std::string>* problems) {
  MutexLock lock(mutex_);
  if (db_ == nullptr) {
    return NotOpen();
  }
  std::vector<v1::JobState> states;
  std::unique_ptr<rocksdb::Iterator> it(db_->NewIterator(rocksdb::ReadOptions()));
  for (it->Seek(kJobPrefix); it->Valid() && it->key().starts_with(kJobPrefix); it->Next()) {
    v1::JobState state;
    const absl::StatusOr<JobUuid> uuid =
        state.ParseFromArray(it->value().data(), static_cast<int>(it->value().size()))
            ? JobUuid::FromBytes(state.job_uuid())
            : absl::StatusOr<JobUuid>(absl::DataLossError("undecodable"));
    if (!uuid.ok() || it->key() != JobKey(uuid->ToString())) {
      problems->push_back(absl::StrCat("catalog '", path_, "': entry '", it->key().ToString(),
                                       "' cannot be understood; left out"));
      continue;
    }
    states.push_back(std::move(state));
  }
  HF_RETURN_IF_ERROR(FromRocks(it->status(), "read", path_));
  return states;
}

absl::StatusOr<std::vector<v1::CatalogShard>> Catalog::Shards() {
  MutexLock lock(mutex_);
  if (db_ == nullptr) {
    return NotOpen();
  }
  std::vector<v1::CatalogShard> shards;
  std::unique_ptr<rocksdb::Iterator> it(db_->NewIterator(rocksdb::ReadOptions()));
  for (it->Seek(kShardPrefix); it->Valid() && it->key().starts_with(kShardPrefix); it->Next()) {
    v1::CatalogShard shard;
    if (shard.ParseFromArray(it->value().data(), static_cast<int>(it->value().size()))) {
      shards.push_back(std::move(shard));
    }
  }
  HF_RETURN_IF_ERROR(FromRocks(it->status(), "read", path_));
  return shards;
}

absl::Status Catalog::Write(rocksdb::WriteBatch& batch, Sync sync) {
  HF_RETURN_IF_ERROR(EnsureOpen());
  rocksdb::WriteOptions options;
  options.sync = sync == Sync::kYes;
  const rocksdb::Status written = db_->Write(options, &batch);
  failed_ = !written.ok();
  return FromRocks(written, "write", path_);
}

absl::Status Catalog::WriteJobState(const v1::JobState& state) {
  HF_ASSIGN_OR_RETURN(const JobUuid uuid, JobUuid::FromBytes(state.job_uuid()));
  rocksdb::WriteBatch batch;
  batch.Put(JobKey(uuid.ToString()), state.SerializeAsString());
  MutexLock lock(mutex_);
  return Write(batch, Sync::kYes);
}

absl::Status Catalog::RemoveJobState(const JobUuid& job) {
  rocksdb::WriteBatch batch;
  batch.Delete(JobKey(job.ToString()));
  MutexLock lock(mutex_);
  return Write(batch, Sync::kYes);
}

absl::Status Catalog::UpdateShards(std::string_view tier,
                                   const std::vector<v1::CatalogShard>& added,
                                   const std::vector<ShardId>& removed) {
  rocksdb::WriteBatch batch;
  for (const ShardId& id : removed) {
    batch.Delete(ShardKey(id, tier));
  }
  for (const v1::CatalogShard& shard : added) {
    HF_ASSIGN_OR_RETURN(const std::string key, KeyOf(shard));
    batch.Put(key, shard.SerializeAsString());
  }
  MutexLock lock(mutex_);
  return Write(batch, Sync::kNo);
}

absl::Status Catalog::RemoveShards(const CatalogRange& range) {
  MutexLock lock(mutex_);
  HF_RETURN_IF_ERROR(EnsureOpen());
  rocksdb::WriteBatch batch;
  const std::string prefix = PrefixOf(range);
  std::string end = prefix;
  end.back() = '/' + 1;  // it ends with a slash
  const rocksdb::Slice bound(end);
  rocksdb::ReadOptions only;
  only.iterate_upper_bound = &bound;
  std::unique_ptr<rocksdb::Iterator> it(db_->NewIterator(only));
  for (it->Seek(prefix); it->Valid(); it->Next()) {
    batch.Delete(it->key());
  }
  HF_RETURN_IF_ERROR(FromRocks(it->status(), "read", path_));
  it.reset();
  return batch.Count() == 0 ? absl::OkStatus() : Write(batch, Sync::kNo);
}

absl::Status Catalog::ReplaceShards(std::string_view tier,
                                    const std::vector<v1::CatalogShard>& shards) {
  std::map<std::string, std::string> wanted;
  for (const v1::CatalogShard& shard : shards) {
    HF_ASSIGN_OR_RETURN(const std::string key, KeyOf(shard));
    wanted[key] = shard.SerializeAsString();
  }
  MutexLock lock(mutex_);
  HF_RETURN_IF_ERROR(EnsureOpen());
  rocksdb::WriteBatch batch;
  const std::string prefix = TierPrefix(tier);
  std::unique_ptr<rocksdb::Iterator> it(db_->NewIterator(rocksdb::ReadOptions()));
  for (it->Seek(prefix); it->Valid() && it->key().starts_with(prefix); it->Next()) {
    const auto same = wanted.find(it->key().ToString());
    if (same == wanted.end()) {
      batch.Delete(it->key());
    } else if (it->value() == same->second) {
      wanted.erase(same);
    }
  }
  HF_RETURN_IF_ERROR(FromRocks(it->status(), "read", path_));
  it.reset();
  for (const auto& [key, value] : wanted) {
    batch.Put(key, value);
  }
  return Write(batch, Sync::kNo);
}

absl::Status Catalog::Close() {
  MutexLock lock(mutex_);
  closed_ = true;
  if (db_ == nullptr) {
    return absl::OkStatus();
  }
  if (failed_) {  // it would only fail again, in ways that RocksDB does not expect
    db_.reset();
    return absl::UnavailableError(
        absl::StrCat("close catalog '", path_, "': its last write failed"));
  }
  const rocksdb::Status synced = db_->SyncWAL();
  const rocksdb::Status closed = db_->Close();
  db_.reset();
  HF_RETURN_IF_ERROR(FromRocks(synced, "sync", path_));
  return FromRocks(closed, "close", path_);
}

}  // namespace holdfast
