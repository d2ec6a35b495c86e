// Keeps the catalog up with what the daemon does, on a thread of its own: nobody waits for the disk
// under state_dir but those who ask to be told (`done`). One write is under way at a time. What
// waits is coalesced (of a job its newest state, of a shard its last change) and bounded; when more
// than kChangesMax wait, or a write failed, they are forgotten, and once it works again the catalog
// is made to say what memory.dir holds (Resync). A failed write is tried again after a delay.
//
//   CatalogWriter writer(*catalog, *store, {});
//   writer.WriteJobState(state);                          // as soon as it can
//   writer.WriteJobState(state, [&](absl::Status s) { … });  // the same, and says when it is on
//   disk std::string problem = writer.problem();               // "" when all is well
//   writer.Stop([&](absl::Status last) { … });            // writes what waits, closes the catalog
//
// Owner: the Daemon. Thread-safe; nothing but the destructor blocks. `done` is called on the
// writer's thread.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "base/clock.h"
#include "base/ids.h"
#include "base/mutex.h"
#include "holdfast/v1/state.pb.h"
#include "server/runtime/catalog.h"
#include "tiers/memory/slot_store.h"

namespace holdfast {

class CatalogWriter {
 public:
  static constexpr size_t kChangesMax = 1024;  // shards in memory and jobs that wait
  // Shards of the other tiers: nothing else here remembers them, and a scan tells of many at once.
  static constexpr size_t kDurableChangesMax = 65'536;
  // What waits for longer is a problem in the status: the disk hangs.
  static constexpr Duration kHangsAfter = std::chrono::seconds(5);
  // Between two lines in the log about the same trouble.
  static constexpr Duration kLogEvery = std::chrono::minutes(1);

  using Done = std::function<void(absl::Status)>;
  struct Options {
    Duration retry_after = std::chrono::seconds(1);  // doubles with each failure
    Duration retry_after_max = std::chrono::seconds(10);
    std::function<void()> failed = [] {};  // a write has failed; the writer's thread
  };

  // Begins with a resync. `catalog` may be closed so far: then it is opened as soon as it can be.
  CatalogWriter(Catalog& catalog, SlotStore& store, Options options);
  // Waits for the write under way; what waits is lost unless Stop came before.
  ~CatalogWriter();
  CatalogWriter(const CatalogWriter&) = delete;
  CatalogWriter& operator=(const CatalogWriter&) = delete;

  // With `done` the state is written at once, even while other writes wait for a retry, and `done`
  // hears of a failure. A state that is also in memory.dir is written again after a failure.
  void WriteJobState(v1::JobState state, Done done = nullptr) EXCLUDES(mutex_);
  // From the catalog, and when that is done from memory.dir. A failure is told and not repeated.
  void RemoveJobState(const JobUuid& job, Done done) EXCLUDES(mutex_);
  void IndexShard(v1::CatalogShard shard) EXCLUDES(mutex_);
  void UnindexShard(const ShardId& id) EXCLUDES(mutex_);  // of memory
  // Of a durable tier; what is indexed later is not meant.
  void UnindexCopies(CatalogRange range) EXCLUDES(mutex_);

  // What keeps the catalog from being written, for people; empty when nothing does.
  std::string problem() EXCLUDES(mutex_);
  // What waits is written, without repeats, the catalog closed, and `done` told how that went.
  void Stop(Done done) EXCLUDES(mutex_);

 private:
  struct JobChange {
    std::optional<v1::JobState> state;  // none: to be removed
    std::vector<Done> done;
  };
  struct Changes {
    bool resync = false;
    std::map<JobUuid, JobChange> jobs;
    std::map<ShardId, std::optional<v1::CatalogShard>> shards;  // in memory; none: removed
    // In the other tiers: what these cover goes, and then these come, by tier and shard.
    std::set<CatalogRange> unindexed;
    std::map<std::pair<std::string, ShardId>, v1::CatalogShard> durable;
    bool empty() const {
      return !resync && jobs.empty() && shards.empty() && durable.empty() && unindexed.empty();
    }
    bool Unindexes(const CatalogRange& range) const;  // all of it
  };

  void Run() EXCLUDES(mutex_);
  // Waits until something is to be done, and takes it. Nothing: it is time to end.
  std::optional<Changes> Take() EXCLUDES(mutex_);
  absl::Status Write(Changes& changes);
  absl::Status WriteMemory(const Changes& changes);
  absl::Status WriteDurable(const Changes& changes);
  void PutBack(const Changes& changes) EXCLUDES(mutex_);
  absl::Status WriteJob(const JobUuid& job, const JobChange& change);
  absl::Status Resync();
  void After(const absl::Status& status) EXCLUDES(mutex_);
  void Change(const JobUuid& job, std::optional<v1::JobState> state, Done done) EXCLUDES(mutex_);
  void Added() REQUIRES(mutex_);
  // False: no more can wait, and it is said (once) that some are forgotten.
  bool RoomForDurable() REQUIRES(mutex_);

  Catalog& catalog_;
  SlotStore& store_;
  const Options options_;
  Mutex mutex_;
  CondVar changed_;
  Changes waiting_ GUARDED_BY(mutex_);
  bool urgent_ GUARDED_BY(mutex_) = false;  // somebody is to be told: no waiting for a retry's time
  bool ending_ GUARDED_BY(mutex_) = false;
  bool last_try_ GUARDED_BY(mutex_) = false;  // since the end began, something was tried
  Done stopped_ GUARDED_BY(mutex_);
  // Since when something is to be written and is not.
  std::optional<MonotonicTime> behind_since_ GUARDED_BY(mutex_);
  std::string problem_ GUARDED_BY(mutex_);
  uint64_t failures_ GUARDED_BY(mutex_) = 0;        // in a row
  bool forgot_durable_ GUARDED_BY(mutex_) = false;  // said once
  uint64_t unlogged_ GUARDED_BY(mutex_) = 0;        // failures since the last line in the log
  MonotonicTime logged_at_ GUARDED_BY(mutex_);
  MonotonicTime retry_at_ GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace holdfast
