#include "server/runtime/tiers/durable_tiers.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <set>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/log.h"
#include "base/status.h"
#include "base/units.h"
#include "server/runtime/tiers/drain_operations.h"
#include "server/runtime/tiers/node_owner.h"
#include "tiers/transfer/file_pieces.h"

namespace holdfast {
namespace {

constexpr auto kAskDrive = std::chrono::seconds(5);
constexpr auto kVerifyLook = std::chrono::milliseconds(200);
constexpr uint64_t kBudgetPercent = 80;  // of what the drives have, by default
constexpr uint64_t kRecyclePercent = 10;
constexpr size_t kScansMax = 1024;

ThreadPriority PriorityOf(uint32_t io, uint32_t nice) {
  return {static_cast<int>(io), static_cast<int>(nice)};
}

void AddNotes(const CopyStore& store, v1::TierStatus& tier) {
  const DurableCapabilities can = store.capabilities();
  if (can.one_node_only()) {
    tier.add_notes(absl::StrCat(store.dir(),
                                ": it may serve one node only: it has neither hard links nor "
                                "renameat2 (RENAME_NOREPLACE), so two nodes could replace each "
                                "other's files"));
  }
  for (const std::string& note : can.notes) {
    tier.add_notes(absl::StrCat(store.dir(), ": ", note));
  }
}

struct DriveSpace {
  FilesystemInfo filesystem;
  uint64_t device = 0;
};

// The file system of a directory that may be made later; an error when it does not answer in time.
absl::StatusOr<DriveSpace> AskFilesystem(Env& env, const std::string& dir) {
  struct Answer {
    Mutex mutex;
    CondVar cv;
    std::optional<absl::StatusOr<DriveSpace>> space GUARDED_BY(mutex);
  };
  const auto answer = std::make_shared<Answer>();
  std::thread thread;
  HF_RETURN_IF_ERROR(StartThread(
      "ask-drive",
      [answer, dir, &env] {
        std::string there = dir;
        absl::StatusOr<FileInfo> info = env.Info(JoinPath(there, "."));
        while (there != "/" && absl::IsNotFound(info.status())) {
          there = ParentDirectory(there);
          info = env.Info(there);
        }
        const absl::StatusOr<FilesystemInfo> filesystem = env.Filesystem(there);
        const uint64_t device = info.ok() ? info->device : 0;
        MutexLock lock(answer->mutex);
        answer->space = filesystem.ok()
                            ? absl::StatusOr<DriveSpace>(DriveSpace{*filesystem, device})
                            : filesystem.status();
        answer->cv.NotifyAll();
      },
      thread));
  thread.detach();
  const auto until = std::chrono::steady_clock::now() + kAskDrive;
  MutexLock lock(answer->mutex);
  while (!answer->space && answer->cv.WaitUntil(answer->mutex, until)) {
  }
  return answer->space ? *answer->space
                       : absl::StatusOr<DriveSpace>(absl::DeadlineExceededError(absl::StrCat(
                             "'", dir, "' did not answer within ", FormatDuration(kAskDrive))));
}

}  // namespace

NvmeBudget AskNvmeBudget(Env& env, const v1::NvmeConfig& config) {
  NvmeBudget budget;
  if (config.dirs().empty()) {
    return budget;
  }
  uint64_t total = config.bytes_max();
  std::set<uint64_t> devices;  // two directories may lie on one file system
  for (const std::string& dir : config.dirs()) {
    const absl::StatusOr<DriveSpace> space = config.bytes_max() == 0
                                                 ? AskFilesystem(env, dir)
                                                 : absl::StatusOr<DriveSpace>(DriveSpace());
    if (!space.ok()) {
      budget.problems.push_back(absl::StrCat("nvme.dirs: ", Message(space.status())));
    } else if (space->device == 0 || devices.insert(space->device).second) {
      total += space->filesystem.bytes_total / 100 * kBudgetPercent;
    }
  }
  const auto drives = static_cast<uint64_t>(config.dirs_size());
  budget.pool_bytes = config.has_recycle_bytes_max() ? config.recycle_bytes_max()
                                                     : total / 100 * kRecyclePercent / drives;
  // Never 0, which would say that there is no limit: a drive that did not answer adds nothing.
  budget.bytes_max = std::max<uint64_t>(1, total - std::min(total, budget.pool_bytes * drives));
  return budget;
}

struct DurableTiers::Drive {
  Drive(size_t i, std::shared_ptr<TierPlace> p, std::unique_ptr<WorkerGroup> g)
      : index(i), place(std::move(p)), group(std::move(g)) {}
  const size_t index;
  const std::shared_ptr<TierPlace> place;
  const std::unique_ptr<WorkerGroup> group;
  // What goes from here to the remote tier; null where there is none. Not in that one's threads: a
  // drive that hangs holds nobody up who writes or reads something else there.
  std::unique_ptr<WorkerGroup> relay;
};

namespace {

// The scans that have not really ended, also those that were answered because they hang.
class LiveScans : public std::enable_shared_from_this<LiveScans> {
 public:
  // Null: there is one of that already, or there are too many. Else it counts as long as what is
  // returned lives.
  std::shared_ptr<void> Enter(const std::string& what) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    if (live_.size() >= kScansMax || !live_.insert(what).second) {
      return nullptr;
    }
    return std::shared_ptr<void>(static_cast<void*>(this),
                                 [self = shared_from_this(), what](void*) {
                                   MutexLock end(self->mutex_);
                                   self->live_.erase(what);
                                 });
  }

 private:
  Mutex mutex_;
  std::set<std::string> live_ GUARDED_BY(mutex_);
};

absl::Status StillRead(const std::string& what) {
  return absl::UnavailableError(
      absl::StrCat(what, " is still being read: it hangs, or has much to tell"));
}

}  // namespace

struct DurableTiers::Shared {
  Context context = std::make_shared<DrainContext>();
  std::shared_ptr<LiveOperations> live = std::make_shared<LiveOperations>();
  // One of a drive or a job at a time: what hangs is not to be asked again and again.
  std::shared_ptr<LiveScans> scans = std::make_shared<LiveScans>();
};

absl::StatusOr<std::unique_ptr<DurableTiers>> DurableTiers::Create(Options options) {
  std::unique_ptr<DurableTiers> tiers(new DurableTiers(std::move(options)));
  HF_RETURN_IF_ERROR(tiers->Open());
  return tiers;
}

DurableTiers::DurableTiers(Options options)
    : options_(std::move(options)),
      outlet_(std::make_shared<EventOutlet>(options_.post)),
      shared_(std::make_shared<Shared>()) {}

DurableTiers::~DurableTiers() {
  Cancel();
  outlet_->Close();
  drives_.clear();
  remote_.reset();
}

absl::Status DurableTiers::Open() {
  DrainContext& context = *shared_->context;
  const v1::NvmeConfig& nvme = options_.config.nvme();
  const v1::RemoteConfig& remote = options_.config.remote();
  context.env = options_.env;
  context.slots = options_.slots;
  context.nvme = nvme;
  context.nvme_priority.Set(PriorityOf(nvme.io_priority(), nvme.nice()));
  context.nvme_pacer->SetRate(nvme.bandwidth_bytes_per_s_max());
  context.remote_pacer->SetRate(remote.bandwidth_bytes_per_s_max());
  const bool root = ::geteuid() == 0;
  const NvmeBudget budget = AskNvmeBudget(*options_.env, nvme);
  const std::string& state_dir = options_.config.state_dir();
  const std::string places = state_dir.empty() ? "" : JoinPath(state_dir, "places");
  for (const std::string& dir : nvme.dirs()) {
    CopyStore::Options store;
    store.env = options_.env;
    store.kind = DurableKind::kNvme;
    store.dir = dir;
    store.node_name = options_.config.node_name();
    store.pool_bytes_max = budget.pool_bytes;
    store.direct = true;
    store.set_owner = root;
    context.drives.push_back(std::make_shared<TierPlace>(std::move(store), places));
    WorkerGroup::Options group;
    group.name = absl::StrCat("nvme-", drives_.size());
    group.stall_timeout = std::chrono::milliseconds(nvme.stall_timeout_ms());
    group.priority = PriorityOf(nvme.io_priority(), nvme.nice());
    HF_ASSIGN_OR_RETURN(std::unique_ptr<WorkerGroup> workers,
                        WorkerGroup::Create(std::move(group), outlet_));
    drives_.push_back(
        std::make_unique<Drive>(drives_.size(), context.drives.back(), std::move(workers)));
  }
  if (!remote.dir().empty()) {
    CopyStore::Options store;
    store.env = options_.env;
    store.kind = DurableKind::kRemote;
    store.dir = remote.dir();
    store.node_name = options_.config.node_name();
    store.set_owner = root;
    store.owner = AskNodeOwner(*options_.env, state_dir);
    if (remote.stripe_count() > 0 || remote.stripe_bytes() > 0) {
      // 0: as the directory says; so Lustre itself has it.
      store.striping = Striping{static_cast<int32_t>(remote.stripe_count()),
                                static_cast<uint32_t>(remote.stripe_bytes())};
    }
    context.remote = std::make_shared<TierPlace>(std::move(store), places);
    CopyPoolOptions pool;
    pool.threads = remote.writers();
    pool.piece_bytes = remote.piece_bytes();
    pool.priority = PriorityOf(remote.io_priority(), remote.nice());
    pool.stuck_after = std::chrono::milliseconds(remote.stall_timeout_ms());
    pool.threads_max = 2 * size_t{remote.writers()};
    HF_ASSIGN_OR_RETURN(context.pool, CopyPool::Start(pool));
    WorkerGroup::Options group;
    group.name = "remote";
    group.threads = remote.writers();
    group.stall_timeout = std::chrono::milliseconds(remote.stall_timeout_ms());
    group.priority = pool.priority;
    HF_ASSIGN_OR_RETURN(remote_, WorkerGroup::Create(group, outlet_));
    if (!drives_.empty()) {
      pool.threads = (size_t{remote.writers()} + drives_.size() - 1) / drives_.size();
      pool.threads_max = 2 * pool.threads;
      group.threads = pool.threads;
    }
    for (const std::unique_ptr<Drive>& drive : drives_) {
      group.name = absl::StrCat("relay-", drive->index);
      HF_ASSIGN_OR_RETURN(drive->relay, WorkerGroup::Create(group, outlet_));
      HF_ASSIGN_OR_RETURN(std::shared_ptr<CopyPool> relay, CopyPool::Start(pool));
      context.relays.push_back(std::move(relay));
    }
  }
  return absl::OkStatus();
}

void DurableTiers::Start(WorkerGroup& group, std::shared_ptr<Operation> operation, bool urgent) {
  if (operation != nullptr) {
    group.Submit(std::move(operation), urgent);
  }
}

// Null when an earlier one on the same files still hangs somewhere: answered at once.
std::shared_ptr<Operation> DurableTiers::MakeOperation(DrainId drain, LiveOperations::Key key,
                                                       std::function<Event(Operation&)> work,
                                                       std::function<Event()> cancelled) {
  auto operation = std::make_shared<Operation>(drain, std::move(work), std::move(cancelled));
  std::shared_ptr<LiveOperations::Entry> life = shared_->live->Enter(key);
  if (life == nullptr) {
    return nullptr;
  }
  operation->WhenLeft([weak = std::weak_ptr<LiveOperations::Entry>(life)] {
    if (const std::shared_ptr<LiveOperations::Entry> entry = weak.lock()) {
      entry->Leave();
    }
  });
  operation->Hold(std::move(life));
  return operation;
}

namespace {

absl::Status StillHangs() {
  return absl::UnavailableError(
      "an earlier operation on the same files has not ended: it hangs in a call; tried again "
      "later");
}

absl::Status WasCancelled() {
  return absl::CancelledError("cancelled");
}

}  // namespace

// Shards are spread over the drives by rank; one that fails or hangs is left out while others do
// not.
DurableTiers::Drive& DurableTiers::DriveFor(const FlushShard& action) {
  const size_t first = action.key.id.rank % drives_.size();
  for (size_t i = 0; i < drives_.size(); ++i) {
    Drive& drive = *drives_[(first + i) % drives_.size()];
    if (drive.place->health().problem.empty() && drive.group->stalled() == 0) {
      return drive;
    }
  }
  // All of them fail: each try takes the next one, so that one that is well again is found.
  return *drives_[(first + action.drain) % drives_.size()];
}

DurableTiers::Drive* DurableTiers::DriveOf(const ShardId& shard) {
  const std::optional<size_t> index = shared_->context->index.Find(shard);
  return index && *index < drives_.size() ? drives_[*index].get() : nullptr;
}

void DurableTiers::Perform(FlushShard action) {
  const Context context = shared_->context;
  const auto answer = [drain = action.drain](absl::Status status) -> Event {
    return FlushEnded{drain, std::move(status), false, {}};
  };
  const LiveOperations::Key key{action.to, action.key.id.job, action.key.id.checkpoint(),
                                action.key.id.rank};
  const bool nvme = action.to == TierKind::kNvme;
  if (nvme ? drives_.empty() : remote_ == nullptr) {
    return outlet_->Post(answer(absl::FailedPreconditionError("there is no such tier")));
  }
  // (Null: from memory, or on none of the drives, which is for the operation to say.)
  Drive* drive = nvme                             ? &DriveFor(action)
                 : action.from == TierKind::kNvme ? DriveOf(action.key.id)
                                                  : nullptr;
  const std::optional<size_t> index = drive != nullptr ? std::optional(drive->index) : std::nullopt;
  std::shared_ptr<Operation> operation = MakeOperation(
      action.drain, key,
      [context, action, nvme, index](Operation& op) -> Event {
        return nvme ? FlushToDrive(context, *index, action, op)
                    : FlushToRemote(context, index, action, op);
      },
      [answer] { return answer(WasCancelled()); });
  if (operation == nullptr) {
    return outlet_->Post(answer(StillHangs()));
  }
  WorkerGroup& group = nvme ? *drive->group : drive != nullptr ? *drive->relay : *remote_;
  Start(group, std::move(operation), false);
}

void DurableTiers::Perform(const CancelDrain& action) {
  for (const std::unique_ptr<Drive>& drive : drives_) {
    if (drive->group->Cancel(action.drain) ||
        (drive->relay != nullptr && drive->relay->Cancel(action.drain))) {
      return;
    }
  }
  if (remote_ != nullptr) {
    remote_->Cancel(action.drain);
  }
}

void DurableTiers::Perform(FetchShard action) {
  const Context context = shared_->context;
  const auto answer = [action](absl::Status status, bool bad) -> Event {
    return FetchEnded{action.drain, action.slot, action.generation, std::move(status), bad, {}};
  };
  const bool nvme = action.from == TierKind::kNvme;
  Drive* drive = nvme ? DriveOf(action.key.id) : nullptr;
  if (nvme ? drive == nullptr : remote_ == nullptr) {
    return outlet_->Post(answer(
        absl::NotFoundError(absl::StrCat(action.key.id.ToString(), " is on none of the drives")),
        true));
  }
  const size_t index = nvme ? drive->index : 0;
  auto operation = std::make_shared<Operation>(
      action.drain,
      [context, action, nvme, index](Operation& op) -> Event {
        return nvme ? FetchFromDrive(context, index, action, op)
                    : FetchFromRemote(context, action, op);
      },
      [answer] { return answer(WasCancelled(), false); });
  Start(nvme ? *drive->group : *remote_, std::move(operation), true);
}

void DurableTiers::Perform(PublishManifest action) {
  const Context context = shared_->context;
  const DrainId drain = action.drain;
  if (remote_ == nullptr) {
    return outlet_->Post(
        ManifestPublished{drain, absl::FailedPreconditionError("there is no remote tier")});
  }
  std::shared_ptr<Operation> operation = MakeOperation(
      drain, {TierKind::kRemote, action.job, action.checkpoint, std::nullopt},
      [context, action](Operation& op) -> Event {
        return PublishRemoteManifest(context, action, op);
      },
      [drain]() -> Event {
        return ManifestPublished{drain, WasCancelled()};
      });
  if (operation == nullptr) {
    return outlet_->Post(ManifestPublished{drain, StillHangs()});
  }
  Start(*remote_, std::move(operation), false);
}

namespace {

// One answer for the removals on several drives: the first failure, or OK if any drive had some.
class RemovalGroup {
 public:
  RemovalGroup(DrainId drain, size_t places, std::shared_ptr<EventOutlet> outlet)
      : drain_(drain), outlet_(std::move(outlet)), left_(places) {}
  void End(const absl::Status& status) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    if (!status.ok() && !absl::IsNotFound(status) && failure_.ok()) {
      failure_ = status;
    }
    if (--left_ == 0) {
      outlet_->Post(CopiesRemoved{drain_, failure_});
    }
  }

 private:
  const DrainId drain_;
  const std::shared_ptr<EventOutlet> outlet_;
  Mutex mutex_;
  size_t left_ GUARDED_BY(mutex_);
  absl::Status failure_ GUARDED_BY(mutex_);
};

}  // namespace

void DurableTiers::Perform(const RemoveCopies& action) {
  const Context context = shared_->context;
  const LiveOperations::Key key{action.tier, action.job, action.checkpoint, std::nullopt, true};
  std::shared_ptr<LiveOperations::Entry> life = shared_->live->Enter(key);
  if (life == nullptr) {
    return outlet_->Post(CopiesRemoved{action.drain, StillHangs()});
  }
  const bool nvme = action.tier == TierKind::kNvme;
  const size_t places = nvme ? drives_.size() : 1;
  const auto group = std::make_shared<RemovalGroup>(action.drain, places, outlet_);
  for (size_t i = 0; i < places; ++i) {
    const std::shared_ptr<TierPlace> place = nvme ? context->drives[i] : context->remote;
    // Answered through the group; the event that a worker returns is never posted.
    auto operation = std::make_shared<Operation>(
        action.drain,
        [context, action, place, group, life](Operation& op) mutable -> Event {
          const absl::Status status = RemoveFrom(context, *place, action, op);
          life.reset();
          group->End(status);
          return TimerFired{};
        },
        [group]() -> Event {
          group->End(WasCancelled());
          return TimerFired{};
        });
    operation->AnswersItself();
    Start(nvme ? *drives_[i]->group : *remote_, std::move(operation), false);
  }
}

void DurableTiers::Perform(const RemoveJobCopies& action) {
  const Context context = shared_->context;
  const LiveOperations::Key key{action.tier, action.job, std::nullopt, std::nullopt, true};
  std::shared_ptr<LiveOperations::Entry> life = shared_->live->Enter(key);
  if (life == nullptr) {
    return outlet_->Post(CopiesRemoved{action.drain, StillHangs()});
  }
  const bool nvme = action.tier == TierKind::kNvme;
  const size_t places = nvme ? drives_.size() : 1;
  const auto group = std::make_shared<RemovalGroup>(action.drain, places, outlet_);
  for (size_t i = 0; i < places; ++i) {
    const std::shared_ptr<TierPlace> place = nvme ? context->drives[i] : context->remote;
    auto operation = std::make_shared<Operation>(
        action.drain,
        [context, action, place, group, life](Operation& op) mutable -> Event {
          const absl::Status status = RemoveJobFrom(context, *place, action, op);
          life.reset();
          group->End(status);
          return TimerFired{};
        },
        [group]() -> Event {
          group->End(WasCancelled());
          return TimerFired{};
        });
    operation->AnswersItself();
    Start(nvme ? *drives_[i]->group : *remote_, std::move(operation), false);
  }
}

void DurableTiers::ScanDrives(const ScanNvme& action) {
  const Context context = shared_->context;
  for (const std::unique_ptr<Drive>& drive : drives_) {
    const size_t index = drive->index;
    const std::string dir = drive->place->dir();
    if (!action.dirs.empty() &&
        std::find(action.dirs.begin(), action.dirs.end(), dir) == action.dirs.end()) {
      continue;
    }
    const auto failed = [dir, scan = action.drain](absl::Status status) -> Event {
      TierScanned scanned;
      scanned.tier = TierKind::kNvme;
      scanned.drain = scan;
      scanned.dir = dir;
      scanned.status = std::move(status);
      return scanned;
    };
    std::shared_ptr<void> life = shared_->scans->Enter(absl::StrCat("drive ", index));
    if (life == nullptr) {
      outlet_->Post(failed(StillRead(absl::StrCat("'", dir, "'"))));
      continue;
    }
    auto operation = std::make_shared<Operation>(
        next_own_++,
        [context, index, scan = action.drain](Operation& op) -> Event {
          TierScanned scanned = ScanDrive(context, index, op);
          scanned.drain = scan;
          return scanned;
        },
        [failed] { return failed(WasCancelled()); });
    operation->Hold(std::move(life));
    // What is there comes later, perhaps; until then nobody waits for it.
    operation->WhenStalled(
        [failed](const std::string& what) { return failed(absl::DeadlineExceededError(what)); });
    Start(*drive->group, std::move(operation), true);
  }
}

void DurableTiers::Perform(const ScanRemote& action) {
  const Context context = shared_->context;
  const auto answer = [action](absl::Status status) -> Event {
    TierScanned scanned;
    scanned.tier = TierKind::kRemote;
    scanned.drain = action.drain;
    scanned.job_name = action.job_name;
    scanned.status = std::move(status);
    return scanned;
  };
  if (remote_ == nullptr) {
    return outlet_->Post(answer(absl::OkStatus()));
  }
  std::shared_ptr<void> life = shared_->scans->Enter(absl::StrCat("job ", action.job_name));
  if (life == nullptr) {
    return outlet_->Post(answer(StillRead(absl::StrCat(
        "'", options_.config.remote().dir(), "'",
        action.job_name.empty() ? "" : absl::StrCat(", for job '", action.job_name, "',")))));
  }
  auto operation = std::make_shared<Operation>(
      action.drain,
      [context, action](Operation& op) -> Event {
        return ScanMount(context, action.drain, action.job_name, op);
      },
      [answer] { return answer(WasCancelled()); });
  operation->Hold(std::move(life));
  operation->WhenStalled(
      [answer](const std::string& what) { return answer(absl::DeadlineExceededError(what)); });
  Start(*remote_, std::move(operation), true);
}

void DurableTiers::Perform(const ApplyLimits& action) {
  shared_->context->nvme_pacer->SetRate(action.nvme.bandwidth_bytes_per_s_max());
  shared_->context->remote_pacer->SetRate(action.remote.bandwidth_bytes_per_s_max());
  const auto tell = [](const absl::Status& set) {
    if (!set.ok()) {
      LogWarning(absl::StrCat("set: the priority stays as it was: ", Message(set)));
    }
  };
  const ThreadPriority nvme = PriorityOf(action.nvme.io_priority(), action.nvme.nice());
  const ThreadPriority remote = PriorityOf(action.remote.io_priority(), action.remote.nice());
  shared_->context->nvme_priority.Set(nvme);
  for (const std::unique_ptr<Drive>& drive : drives_) {
    tell(drive->group->SetPriority(nvme));
    if (drive->relay != nullptr) {
      tell(drive->relay->SetPriority(remote));
      tell(shared_->context->relays[drive->index]->SetPriority(remote));
    }
  }
  if (remote_ != nullptr) {
    tell(remote_->SetPriority(remote));
    tell(shared_->context->pool->SetPriority(remote));
  }
}

absl::StatusOr<std::string> DurableTiers::Verify(const ReadableShard& shard,
                                                 const std::function<bool(uint64_t)>& advance) {
  struct Outcome {
    Mutex mutex;
    CondVar cv;
    std::optional<absl::StatusOr<std::string>> result GUARDED_BY(mutex);
  };
  const auto outcome = std::make_shared<Outcome>();
  const auto end = [outcome](absl::StatusOr<std::string> result) -> Event {
    MutexLock lock(outcome->mutex);
    outcome->result = std::move(result);
    outcome->cv.NotifyAll();
    return TimerFired{};
  };
  const Context context = shared_->context;
  const bool nvme = shard.tier == TierKind::kNvme;
  Drive* drive = nvme ? DriveOf(shard.copy.id) : nullptr;
  if (nvme ? drive == nullptr : remote_ == nullptr) {
    return absl::NotFoundError(absl::StrCat(shard.copy.id.ToString(), " is not there any more"));
  }
  const size_t index = nvme ? drive->index : 0;
  auto operation = std::make_shared<Operation>(
      next_own_++,
      [context, shard, index, end](Operation& op) -> Event {
        return end(VerifyCopy(context, index, shard, op));
      },
      [end]() -> Event { return end(WasCancelled()); });
  operation->AnswersItself();
  const std::shared_ptr<TransferControl> control = operation->control();
  Start(nvme ? *drive->group : *remote_, std::move(operation), false);
  MutexLock lock(outcome->mutex);
  while (!outcome->result) {
    outcome->cv.WaitUntil(outcome->mutex, std::chrono::steady_clock::now() + kVerifyLook);
    if (!outcome->result && !advance(control->bytes_done())) {
      control->Cancel();
      return WasCancelled();
    }
  }
  return *std::move(outcome->result);
}

void DurableTiers::CheckStalls(MonotonicTime now) {
  for (const std::unique_ptr<Drive>& drive : drives_) {
    drive->group->CheckStalls(now);
    if (drive->relay != nullptr) {
      drive->relay->CheckStalls(now);
    }
  }
  if (remote_ != nullptr) {
    remote_->CheckStalls(now);
  }
}

bool DurableTiers::idle() const {
  return (remote_ == nullptr || remote_->idle()) &&
         std::all_of(drives_.begin(), drives_.end(), [](const auto& drive) {
           return drive->group->idle() && (drive->relay == nullptr || drive->relay->idle());
         });
}

void DurableTiers::Cancel() {
  for (const std::unique_ptr<Drive>& drive : drives_) {
    drive->group->CancelAll();
    if (drive->relay != nullptr) {
      drive->relay->CancelAll();
    }
  }
  if (remote_ != nullptr) {
    remote_->CancelAll();
  }
}

void DurableTiers::FillStatus(v1::DaemonStatus& status) {
  for (v1::TierStatus& tier : *status.mutable_tiers()) {
    const bool nvme = tier.tier() == TierName(TierKind::kNvme);
    std::set<std::string> engines;
    std::set<uint64_t> devices;  // drives' directories may lie on one file system
    std::string problem;
    const auto add = [&](TierPlace& place) {
      const TierPlace::Health health = place.health();
      if (health.device == 0 || devices.insert(health.device).second) {
        tier.set_bytes_free(tier.bytes_free() + health.bytes_free);
      }
      tier.set_bytes_written(tier.bytes_written() + health.bytes_written);
      tier.set_bytes_read(tier.bytes_read() + health.bytes_read);
      if (!health.engine.empty()) {
        engines.insert(health.engine);
      }
      if (!health.problem.empty()) {
        problem = absl::StrCat(place.dir(), ": ", health.problem);
      }
      if (const std::shared_ptr<CopyStore> store = place.OpenStore()) {
        tier.set_bytes_recyclable(tier.bytes_recyclable() + store->pool_bytes());
        AddNotes(*store, tier);
        if (const std::string refusal = store->refusal(); problem.empty() && !refusal.empty()) {
          problem = refusal;
        }
      }
    };
    if (nvme) {
      for (const std::unique_ptr<Drive>& drive : drives_) {
        add(*drive->place);
      }
    } else if (shared_->context->remote != nullptr) {
      add(*shared_->context->remote);
      engines.insert("threads");
    }
    tier.set_engine(absl::StrJoin(engines, ", "));
    if (!problem.empty() && tier.healthy()) {
      tier.set_healthy(false);
      tier.set_state(problem);
    }
  }
}

}  // namespace holdfast
