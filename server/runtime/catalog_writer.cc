#include "server/runtime/catalog_writer.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/status.h"
#include "base/sync_point.h"
#include "base/units.h"
#include "server/runtime/found_state.h"
#include "server/state_order.h"

namespace holdfast {
namespace {

MonotonicTime Now() {
  return Clock::System()->Now();
}

CatalogRange RangeOf(const std::pair<std::string, ShardId>& key) {
  return {key.first, key.second.job, key.second.checkpoint()};
}

}  // namespace

CatalogWriter::CatalogWriter(Catalog& catalog, SlotStore& store, Options options)
    : catalog_(catalog), store_(store), options_(std::move(options)) {
  waiting_.resync = true;
  behind_since_ = Now();
  if (const absl::Status opened = catalog_.open_status(); !opened.ok()) {
    After(opened);
  }
  thread_ = std::thread([this] { Run(); });
}

CatalogWriter::~CatalogWriter() {
  {
    MutexLock lock(mutex_);
    if (!ending_) {
      waiting_ = {};
    }
    ending_ = true;
    changed_.NotifyAll();
  }
  thread_.join();
}

// ---- What is asked ----

void CatalogWriter::WriteJobState(v1::JobState state, Done done) {
  const absl::StatusOr<JobUuid> job = JobUuid::FromBytes(state.job_uuid());
  if (job.ok()) {
    Change(*job, std::move(state), std::move(done));
  } else if (done != nullptr) {
    done(job.status());
  }
}

void CatalogWriter::RemoveJobState(const JobUuid& job, Done done) {
  Change(job, std::nullopt, std::move(done));
}

void CatalogWriter::Change(const JobUuid& job, std::optional<v1::JobState> state, Done done) {
  MutexLock lock(mutex_);
  JobChange& change = waiting_.jobs[job];
  change.state = std::move(state);
  if (done != nullptr) {
    change.done.push_back(std::move(done));
    urgent_ = true;
  }
  Added();
}

void CatalogWriter::IndexShard(v1::CatalogShard shard) {
  const absl::StatusOr<JobUuid> job = JobUuid::FromBytes(shard.job_uuid());
  if (!job.ok()) {
    return;  // it has no name to be found by
  }
  const ShardId id{*job, shard.attempt(), shard.step(), shard.rank()};
  const std::pair<std::string, ShardId> key{shard.tier(), id};
  MutexLock lock(mutex_);
  if (key.first == kMemoryTier) {
    waiting_.shards[id] = std::move(shard);
  } else if (waiting_.durable.count(key) > 0 || RoomForDurable()) {
    waiting_.durable[key] = std::move(shard);
  }
  Added();
}

void CatalogWriter::UnindexShard(const ShardId& id) {
  MutexLock lock(mutex_);
  waiting_.shards[id] = std::nullopt;
  Added();
}

void CatalogWriter::UnindexCopies(CatalogRange range) {
  const CheckpointId first = range.checkpoint.value_or(CheckpointId{});
  MutexLock lock(mutex_);
  auto& durable = waiting_.durable;
  const ShardId lowest{range.job.value_or(JobUuid{}), first.attempt, first.step, 0};
  for (auto it = durable.lower_bound({range.tier, lowest});
       it != durable.end() && range.Covers(RangeOf(it->first));) {
    it = durable.erase(it);
  }
  if (!waiting_.Unindexes(range)) {
    auto& ranges = waiting_.unindexed;
    for (auto it = ranges.lower_bound(range); it != ranges.end() && range.Covers(*it);) {
      it = ranges.erase(it);
    }
    if (!range.job || RoomForDurable()) {  // (of whole tiers there are few)
      ranges.insert(std::move(range));
    }
  }
  Added();
}

bool CatalogWriter::Changes::Unindexes(const CatalogRange& range) const {
  return unindexed.count({range.tier, std::nullopt, std::nullopt}) > 0 ||
         unindexed.count({range.tier, range.job, std::nullopt}) > 0 || unindexed.count(range) > 0;
}

bool CatalogWriter::RoomForDurable() {
  if (waiting_.durable.size() + waiting_.unindexed.size() < kDurableChangesMax) {
    return true;
  }
  if (!std::exchange(forgot_durable_, true)) {
    LogWarning(
        absl::StrCat("more than ", kDurableChangesMax, " changes of nvme and remote wait ",
                     "for the catalog; it does not take in more of them: when it is written "
                     "again, `ckptctl rebuild` adds what is missing and drops what is gone"));
  }
  return false;
}

void CatalogWriter::Added() {
  if (waiting_.jobs.size() + waiting_.shards.size() > kChangesMax) {
    waiting_.resync = true;
    waiting_.shards.clear();
    // Those whom somebody waits for are nowhere else; the core has one of them for a job.
    std::erase_if(waiting_.jobs, [](const auto& job) { return job.second.done.empty(); });
  }
  if (!behind_since_.has_value()) {
    behind_since_ = Now();
  }
  changed_.NotifyAll();
}

std::string CatalogWriter::problem() {
  MutexLock lock(mutex_);
  if (!problem_.empty()) {
    return problem_;
  }
  const Duration behind = behind_since_.has_value() ? Now() - *behind_since_ : Duration(0);
  return behind < kHangsAfter
             ? ""
             : absl::StrCat("the catalog has not been written for ", FormatDuration(behind),
                            ": the disk under state_dir is slow, or hangs; jobs go on without it");
}

void CatalogWriter::Stop(Done done) {
  MutexLock lock(mutex_);
  ending_ = true;
  stopped_ = std::move(done);
  changed_.NotifyAll();
}

// ---- The writer's thread ----

void CatalogWriter::Run() {
  ::pthread_setname_np(::pthread_self(), "catalog");
  absl::Status last;
  while (std::optional<Changes> changes = Take()) {
    last = Write(*changes);
    if (!last.ok()) {
      PutBack(*changes);
    }
    After(last);
  }
  Done stopped;
  {
    MutexLock lock(mutex_);
    stopped = std::move(stopped_);
  }
  const absl::Status closed = catalog_.Close();
  if (stopped != nullptr) {
    stopped(last.ok() ? closed : last);
  }
}

std::optional<CatalogWriter::Changes> CatalogWriter::Take() {
  MutexLock lock(mutex_);
  while (!ending_ && !urgent_ && (waiting_.empty() || Now() < retry_at_)) {
    if (waiting_.empty()) {
      changed_.Wait(mutex_);
    } else {
      changed_.WaitUntil(mutex_, std::chrono::steady_clock::now() + (retry_at_ - Now()));
    }
  }
  if (waiting_.empty() || (last_try_ && failures_ > 0)) {
    return std::nullopt;  // ending
  }
  last_try_ = ending_;
  Changes taken;
  if (ending_ || Now() >= retry_at_) {
    taken = std::exchange(waiting_, {});
  } else {  // only those who wait to be told
    for (auto it = waiting_.jobs.begin(); it != waiting_.jobs.end();) {
      it = it->second.done.empty() ? std::next(it)
                                   : (taken.jobs.insert(std::move(*it)), waiting_.jobs.erase(it));
    }
  }
  urgent_ = false;
  return taken;
}

absl::Status CatalogWriter::Write(Changes& changes) {
  absl::Status all;
  // 1. Jobs. Whoever waits is told how it went with its own.
  for (auto& [job, change] : changes.jobs) {
    const absl::Status status =
        all.ok() || !change.done.empty() ? WriteJob(job, change) : absl::OkStatus();
    all.Update(status);
    for (const Done& done : change.done) {
      done(status);
    }
  }
  HF_RETURN_IF_ERROR(all);
  // 2. All that memory.dir holds, when something was lost on the way.
  if (changes.resync) {
    HF_RETURN_IF_ERROR(Resync());
  }
  // 3. Shards.
  HF_RETURN_IF_ERROR(WriteMemory(changes));
  return WriteDurable(changes);
}

absl::Status CatalogWriter::WriteMemory(const Changes& changes) {
  std::vector<v1::CatalogShard> added;
  std::vector<ShardId> removed;
  for (const auto& [id, shard] : changes.shards) {
    if (shard.has_value()) {
      added.push_back(*shard);
    } else {
      removed.push_back(id);
    }
  }
  return added.empty() && removed.empty() ? absl::OkStatus()
                                          : catalog_.UpdateShards(kMemoryTier, added, removed);
}

absl::Status CatalogWriter::WriteDurable(const Changes& changes) {
  for (const CatalogRange& range : changes.unindexed) {
    HF_RETURN_IF_ERROR(catalog_.RemoveShards(range));
  }
  std::map<std::string, std::vector<v1::CatalogShard>> added;
  for (const auto& [key, shard] : changes.durable) {
    added[key.first].push_back(shard);
  }
  for (const auto& [tier, shards] : added) {
    HF_RETURN_IF_ERROR(catalog_.UpdateShards(tier, shards, {}));
  }
  return absl::OkStatus();
}

// What lies in memory is written anew from memory.dir; of the other tiers nothing else remembers
// what changed.
void CatalogWriter::PutBack(const Changes& changes) {
  MutexLock lock(mutex_);
  for (const auto& [key, shard] : changes.durable) {
    if (waiting_.durable.count(key) == 0 && !waiting_.Unindexes(RangeOf(key)) && RoomForDurable()) {
      waiting_.durable.emplace(key, shard);
    }
  }
  // (These were before what was put back just now, and before what came meanwhile.)
  for (const CatalogRange& range : changes.unindexed) {
    if (!waiting_.Unindexes(range) && (!range.job || RoomForDurable())) {
      waiting_.unindexed.insert(range);
    }
  }
}

absl::Status CatalogWriter::WriteJob(const JobUuid& job, const JobChange& change) {
  if (change.state.has_value()) {
    HF_SYNC_POINT("daemon.catalog.job_taken");
    return catalog_.WriteJobState(*change.state);
  }
  // The catalog first: what is left after a crash in between is found in memory.dir and comes back
  // whole.
  HF_RETURN_IF_ERROR(catalog_.RemoveJobState(job));
  const absl::Status removed = store_.RemoveJobState(job);
  return absl::IsNotFound(removed) ? absl::OkStatus() : removed;
}

absl::Status CatalogWriter::Resync() {
  std::vector<v1::CatalogShard> shards;
  for (const StoredSlot& stored : store_.Sealed()) {
    shards.push_back(ToCatalogShard(ToSealedCopy(*stored.record), stored.slot));
  }
  HF_RETURN_IF_ERROR(catalog_.ReplaceShards(kMemoryTier, shards));
  std::vector<std::string> ignored;  // what cannot be understood was told at the start
  HF_ASSIGN_OR_RETURN(const std::vector<v1::JobState> known, catalog_.JobStates(&ignored));
  std::map<std::string, const v1::JobState*> by_job;
  for (const v1::JobState& state : known) {
    by_job[state.job_uuid()] = &state;
  }
  HF_ASSIGN_OR_RETURN(const std::vector<std::string> held, store_.JobStates());
  for (const std::string& encoded : held) {
    v1::JobState state;
    if (!state.ParseFromString(encoded)) {
      continue;
    }
    const auto there = by_job.find(state.job_uuid());
    if (there == by_job.end() || IsNewerState(state, *there->second)) {
      HF_RETURN_IF_ERROR(catalog_.WriteJobState(state));
    }
  }
  return absl::OkStatus();
}

void CatalogWriter::After(const absl::Status& status) {
  for (const std::string& problem : catalog_.TakeProblems()) {
    LogWarning(problem);
  }
  if (!status.ok()) {
    options_.failed();
  }
  MutexLock lock(mutex_);
  const MonotonicTime now = Now();
  if (status.ok()) {
    // (Between retries only those who wait are written: then there is more to do.)
    if (failures_ > 0 && !waiting_.resync) {
      LogInfo(absl::StrCat("the catalog is written again, after ", failures_, " failures"));
      failures_ = 0;
      forgot_durable_ = false;
      problem_.clear();
    }
    retry_at_ = {};
    behind_since_ = waiting_.empty() ? std::nullopt : std::optional<MonotonicTime>(now);
    return;
  }
  waiting_.resync = true;
  problem_ =
      absl::StrCat(Message(status), "; jobs go on without the catalog, which is tried again");
  ++unlogged_;
  if (failures_++ == 0 || now - logged_at_ >= kLogEvery) {
    LogWarning(unlogged_ > 1
                   ? absl::StrCat(problem_, " (", unlogged_, " failures since the last such line)")
                   : problem_);
    unlogged_ = 0;
    logged_at_ = now;
  }
  const uint64_t doublings = std::min<uint64_t>(failures_ - 1, 16);
  retry_at_ =
      now + std::min(options_.retry_after * (int64_t{1} << doublings), options_.retry_after_max);
}

}  // namespace holdfast
