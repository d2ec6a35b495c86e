// The core's actions on durable tiers become operations of the drives' and the mount's workers.
#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "server/runtime/tiers/durable_tiers_parts.h"

namespace holdfast {
namespace {

constexpr auto kVerifyLook = std::chrono::milliseconds(200);
constexpr int kPassedOverMax = 15;  // flushes that a drive that failed is spared

absl::Status StillHangs() {
  return absl::UnavailableError(
      "an earlier operation on the same files has not ended: it hangs in a call; tried again "
      "later");
}

// (Cancelled, it was answered before its last call has returned: moments, as a rule.)
absl::Status HasNotEnded() {
  return absl::AbortedError("an earlier operation on the same files has not ended; does it hang?");
}

absl::Status WasCancelled() {
  return absl::CancelledError("cancelled");
}

absl::Status StillRead(const std::string& what) {
  return absl::UnavailableError(absl::StrCat(what, " is still being read: it hangs, or is large"));
}

}  // namespace

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

// Shards are spread over the drives by rank; one that fails or hangs is left out while others do
// not, but for one flush in so many: else nobody would find that it is well again.
DurableTiers::Drive& DurableTiers::DriveFor(const FlushShard& action) {
  const size_t first = action.key.id.rank % drives_.size();
  for (size_t i = 0; i < drives_.size(); ++i) {
    Drive& drive = *drives_[(first + i) % drives_.size()];
    if (IsWell(drive)) {
      drive.passed_over = 0;
      return drive;
    }
    if (drive.group->stalled() == 0 && ++drive.passed_over > kPassedOverMax) {
      drive.passed_over = 0;
      return drive;
    }
  }
  // All of them fail: each try takes the next one, so that one that is well again is found.
  return *drives_[(first + action.drain) % drives_.size()];
}

bool DurableTiers::IsWell(Drive& drive) {
  return drive.place->health().problem.empty() && drive.group->stalled() == 0;
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
  // (Null: from memory, or on none of the drives, which is for the operation to say. What is mended
  // on a drive lies there already.)
  const bool on_a_drive = action.from == TierKind::kNvme || (nvme && action.replace);
  Drive* drive = on_a_drive ? DriveOf(action.key.id) : nvme ? &DriveFor(action) : nullptr;
  const std::optional<size_t> index = drive != nullptr ? std::optional(drive->index) : std::nullopt;
  std::shared_ptr<Operation> operation = MakeOperation(
      action.drain, key,
      [context, action, nvme, index](Operation& op) -> Event {
        return action.replace ? ReplaceCopy(context, index, action, op)
               : nvme         ? FlushToDrive(context, *index, action, op)
                              : FlushToRemote(context, index, action, op);
      },
      [answer] { return answer(WasCancelled()); });
  if (operation == nullptr) {
    return outlet_->Post(answer(StillHangs()));
  }
  if (drive == nullptr && nvme) {
    return outlet_->Post(answer(absl::UnavailableError(
        absl::StrCat(action.key.id.ToString(), " is on none of the drives"))));
  }
  // (What is mended does not hold up what is flushed there, where there are other threads.)
  const bool aside = nvme && action.replace && drive->relay != nullptr;
  WorkerGroup& group = nvme && !aside ? *drive->group : drive != nullptr ? *drive->relay : *remote_;
  Start(group, std::move(operation), false);
}

// (Only what comes from peers is ever held back.)
void DurableTiers::Perform(const HurryFetch& action) {
  if (peers_ != nullptr) {
    peers_->Hurry(action.drain);
  }
}

void DurableTiers::Perform(const CancelDrain& action) {
  if (peers_ != nullptr && peers_->Cancel(action.drain)) {
    return;
  }
  for (const std::unique_ptr<Drive>& drive : drives_) {
    if (drive->group->Cancel(action.drain) ||
        (drive->relay != nullptr && drive->relay->Cancel(action.drain)) ||
        drive->opener->Cancel(action.drain)) {
      return;
    }
  }
  if (remote_ != nullptr && !remote_->Cancel(action.drain)) {
    remote_opener_->Cancel(action.drain);
    if (remote_fetcher_ != nullptr) {
      remote_fetcher_->Cancel(action.drain);
    }
  }
}

void DurableTiers::Perform(FetchShard action) {
  const Context context = shared_->context;
  const auto answer = [action](absl::Status status, bool bad) -> Event {
    return FetchEnded{action.drain, action.slot, action.generation, std::move(status), bad, {}};
  };
  if (action.from == TierKind::kPeer) {
    if (peers_ == nullptr) {
      return outlet_->Post(answer(absl::UnavailableError("this node knows no others"), false));
    }
    auto operation = std::make_shared<Operation>(
        action.drain,
        [context, action](Operation& op) -> Event { return FetchFromPeers(context, action, op); },
        [answer] { return answer(WasCancelled(), false); });
    return Start(*peers_, std::move(operation), true);
  }
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
  WorkerGroup& remote = remote_fetcher_ != nullptr ? *remote_fetcher_ : *remote_;
  Start(nvme ? *drive->group : remote, std::move(operation), true);
}

void DurableTiers::Perform(OpenDurable action) {
  const Context context = shared_->context;
  const auto answer = [drain = action.drain](absl::Status status, bool bad) -> Event {
    return DurableOpened{drain, std::move(status), bad, {}, nullptr};
  };
  const bool nvme = action.tier == TierKind::kNvme;
  Drive* drive = nvme ? DriveOf(action.key.id) : nullptr;
  if (nvme ? drive == nullptr : remote_ == nullptr) {
    return outlet_->Post(answer(
        absl::NotFoundError(absl::StrCat(action.key.id.ToString(), " is on none of the drives")),
        true));
  }
  const std::optional<size_t> index = nvme ? std::optional(drive->index) : std::nullopt;
  const std::shared_ptr<WorkerGroup>& opener = nvme ? drive->opener : remote_opener_;
  auto operation = std::make_shared<Operation>(
      action.drain,
      [context, action, index, closer = std::weak_ptr<WorkerGroup>(opener),
       own = (*next_own_)++](Operation& op) -> Event {
        return OpenForClient(context, index, action, FilesClosedBy(closer, own), op);
      },
      [answer] { return answer(WasCancelled(), false); });
  Start(*opener, std::move(operation), false);
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

// One answer for the removals in several directories, when those that count have ended: the first
// failure of one of them, if any.
class RemovalGroup {
 public:
  // `places` that count.
  RemovalGroup(DrainId drain, size_t places, std::function<std::vector<Rank>()> left,
               std::shared_ptr<EventOutlet> outlet)
      : drain_(drain), outlet_(std::move(outlet)), ranks_left_(std::move(left)), left_(places) {}
  void End(const absl::Status& status, bool counts) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    if (!counts) {
      return;
    }
    if (!status.ok() && !absl::IsNotFound(status) && failure_.ok()) {
      failure_ = status;
    }
    if (--left_ > 0) {
      return;
    }
    CopiesRemoved removed{drain_, failure_, std::nullopt};
    if (!failure_.ok() && ranks_left_ != nullptr) {
      removed.ranks_left = ranks_left_();
    }
    outlet_->Post(std::move(removed));
  }

 private:
  const DrainId drain_;
  const std::shared_ptr<EventOutlet> outlet_;
  const std::function<std::vector<Rank>()> ranks_left_;
  Mutex mutex_;
  size_t left_ GUARDED_BY(mutex_);
  absl::Status failure_ GUARDED_BY(mutex_);
};

}  // namespace

// In each of the directories, by its own workers.
void DurableTiers::StartRemoval(Removal removal) {
  std::shared_ptr<LiveOperations::Entry> life = shared_->live->Enter(removal.key);
  if (life == nullptr) {
    return outlet_->Post(CopiesRemoved{removal.drain, HasNotEnded(), std::nullopt});
  }
  if (removal.places.empty()) {
    return outlet_->Post(CopiesRemoved{removal.drain, absl::OkStatus(), std::nullopt});
  }
  size_t counting =
      static_cast<size_t>(std::count_if(removal.places.begin(), removal.places.end(),
                                        [](const Removal::Place& place) { return place.counts; }));
  if (counting == 0) {  // then all of them do
    for (Removal::Place& place : removal.places) {
      place.counts = true;
    }
    counting = removal.places.size();
  }
  const auto group =
      std::make_shared<RemovalGroup>(removal.drain, counting, removal.ranks_left, outlet_);
  for (const Removal::Place& place : removal.places) {
    // Answered through the group; the event that a worker returns is never posted. What does not
    // count stands in nobody's way when that has been answered.
    auto operation = std::make_shared<Operation>(
        removal.drain,
        [work = removal.work, place, group,
         life = place.counts ? life : nullptr](Operation& op) mutable -> Event {
          const absl::Status status = work(place.drive, op);
          life.reset();
          group->End(status, place.counts);
          return TimerFired{};
        },
        [group, counts = place.counts]() -> Event {
          group->End(WasCancelled(), counts);
          return TimerFired{};
        });
    operation->AnswersItself();
    Start(place.drive ? *drives_[*place.drive]->group : *remote_, std::move(operation), false);
  }
}

void DurableTiers::Perform(const RemoveCopies& action) {
  const Context context = shared_->context;
  Removal removal;
  removal.drain = action.drain;
  removal.key = {action.tier, action.job, action.checkpoint, std::nullopt, true};
  removal.work = [context, action](std::optional<size_t> drive, Operation& op) {
    return RemoveFrom(context, drive, action, op);
  };
  if (action.tier == TierKind::kRemote) {
    removal.places.push_back({std::nullopt, true});
  } else {
    removal.ranks_left = [context, action] {
      return context->index.RanksOf(action.job, action.checkpoint, std::nullopt);
    };
  }
  // A drive that is not known to have any of it is asked for what else may lie there (what is
  // damaged) if it is well; one that fails for good is none of this step's business.
  for (size_t i = 0; action.tier == TierKind::kNvme && i < drives_.size(); ++i) {
    const bool has = !context->index.RanksOf(action.job, action.checkpoint, i).empty();
    if (has || IsWell(*drives_[i])) {
      removal.places.push_back({i, has});
    }
  }
  StartRemoval(std::move(removal));
}

void DurableTiers::Perform(const RemoveJobCopies& action) {
  const Context context = shared_->context;
  Removal removal;
  removal.drain = action.drain;
  removal.key = {action.tier, action.job, std::nullopt, std::nullopt, true};
  removal.work = [context, action](std::optional<size_t> drive, Operation& op) {
    return RemoveJobFrom(context, drive, action, op);
  };
  if (action.tier == TierKind::kRemote) {
    removal.places.push_back({std::nullopt, true});
  }
  for (size_t i = 0; action.tier == TierKind::kNvme && i < drives_.size(); ++i) {
    removal.places.push_back({i, true});
  }
  StartRemoval(std::move(removal));
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
    auto operation =
        std::make_shared<Operation>((*next_own_)++,
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
  for (TierScanned& absent : context->witnesses->Scanned(action)) {
    outlet_->Post(std::move(absent));
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

absl::StatusOr<std::string> DurableTiers::Verify(const ReadableShard& shard,
                                                 const std::function<bool(uint64_t)>& advance,
                                                 std::shared_ptr<Pacer> pacer) {
  const Context context = shared_->context;
  const bool nvme = shard.tier == TierKind::kNvme;
  Drive* drive = nvme ? DriveOf(shard.copy.id) : nullptr;
  if (nvme ? drive == nullptr : remote_ == nullptr) {
    return absl::NotFoundError(absl::StrCat(shard.copy.id.ToString(), " is not there any more"));
  }
  const size_t index = nvme ? drive->index : 0;
  const std::shared_ptr<TextOutcome> verdict =
      Run(nvme ? *drive->verifier : *remote_verifier_,
          [context, shard, index, pacer = std::move(pacer)](Operation& op) {
            return VerifyCopy(context, index, shard, pacer.get(), op);
          });
  return Wait(*verdict, advance);
}

absl::StatusOr<std::string> DurableTiers::ReadRecord(const ReadableShard& shard,
                                                     const std::function<bool()>& gone) {
  const Context context = shared_->context;
  Drive* const drive = DriveOf(shard.copy.id);
  if (drive == nullptr) {
    return absl::NotFoundError(absl::StrCat(shard.copy.id.ToString(), " is not there any more"));
  }
  const std::shared_ptr<TextOutcome> record =
      Run(*drive->opener, [context, shard, index = drive->index](Operation& op) {
        return ReadRecordOf(context, index, shard, op);
      });
  return Wait(*record, [&gone](uint64_t) { return !gone(); });
}

struct DurableTiers::TextOutcome {
  explicit TextOutcome(WorkerGroup& w, DrainId d) : workers(w), drain(d) {}
  WorkerGroup& workers;
  const DrainId drain;
  std::shared_ptr<TransferControl> control;
  Mutex mutex;
  CondVar cv;
  std::optional<absl::StatusOr<std::string>> result GUARDED_BY(mutex);
};

absl::Status DurableTiers::AdoptRemote(const std::string& from, const std::function<bool()>& gone) {
  if (remote_ == nullptr) {
    return absl::FailedPreconditionError(
        "adopt-remote: this node has no remote directory (remote.dir)");
  }
  const std::shared_ptr<TextOutcome> adopted =
      Run(*remote_opener_, [context = shared_->context, from](Operation& op) {
        return AdoptRemoteDirectory(context, from, op);
      });
  return Wait(*adopted, [&gone](uint64_t) { return !gone(); }).status();
}

std::shared_ptr<DurableTiers::TextOutcome> DurableTiers::Run(WorkerGroup& workers, TextWork work) {
  const auto outcome = std::make_shared<TextOutcome>(workers, (*next_own_)++);
  const auto end = [outcome](absl::StatusOr<std::string> result) -> Event {
    MutexLock lock(outcome->mutex);
    outcome->result = std::move(result);
    outcome->cv.NotifyAll();
    return TimerFired{};
  };
  auto operation = std::make_shared<Operation>(
      outcome->drain,
      [work = std::move(work), end](Operation& op) -> Event { return end(work(op)); },
      [end]() -> Event { return end(WasCancelled()); });
  operation->AnswersItself();
  outcome->control = operation->control();
  Start(workers, std::move(operation), false);
  return outcome;
}

absl::StatusOr<std::string> DurableTiers::Wait(TextOutcome& outcome,
                                               const std::function<bool(uint64_t)>& advance) {
  bool goes_on = true;
  while (goes_on) {
    {
      MutexLock lock(outcome.mutex);
      if (!outcome.result) {
        outcome.cv.WaitUntil(outcome.mutex, std::chrono::steady_clock::now() + kVerifyLook);
      }
      if (outcome.result) {
        return *std::move(outcome.result);
      }
    }
    goes_on = advance(outcome.control->bytes_done());
  }
  outcome.workers.Cancel(outcome.drain);  // if it still waits for a thread, it is gone at once
  return WasCancelled();
}

// In the threads that open files for clients: no flush is in front of it there.
std::vector<DurableTiers::PlaceText> DurableTiers::RunEverywhere(
    const std::function<TextWork(std::optional<size_t> drive)>& work,
    const std::function<bool()>& gone) {
  struct Part {
    std::string dir;
    std::shared_ptr<TextOutcome> outcome;
  };
  std::vector<Part> parts;
  for (const std::unique_ptr<Drive>& drive : drives_) {
    parts.push_back({drive->place->dir(), Run(*drive->opener, work(drive->index))});
  }
  if (remote_opener_ != nullptr) {
    parts.push_back({shared_->context->remote->dir(), Run(*remote_opener_, work(std::nullopt))});
  }
  std::vector<PlaceText> texts;
  for (const Part& part : parts) {
    texts.push_back({part.dir, Wait(*part.outcome, [&](uint64_t) { return !gone(); })});
  }
  return texts;
}

absl::StatusOr<std::vector<std::string>> DurableTiers::WriteJobFiles(
    const std::string& job_name, const JobOwner& owner, const std::function<bool()>& gone) {
  const Context context = shared_->context;
  const auto refused = [&](const absl::Status& why) {
    return absl::Status(why.code(), absl::StrCat("rebuild: the file JOB of job '", job_name,
                                                 "' was written nowhere: ", Message(why)));
  };
  // 1. Two of them are not to name two owners.
  for (const PlaceText& found : RunEverywhere(
           [&](std::optional<size_t> drive) -> TextWork {
             return [context, drive, job_name, owner](Operation& op) {
               return CheckJobFileIn(context, drive, job_name, owner, op);
             };
           },
           gone)) {
    if (absl::IsFailedPrecondition(found.text.status())) {
      return refused(found.text.status());
    }
  }
  // 2. Each where it is lost.
  std::vector<std::string> lines;
  absl::Status failure = absl::NotFoundError("nothing of it lies in this node's directories");
  bool done = false;
  for (const PlaceText& written : RunEverywhere(
           [&](std::optional<size_t> drive) -> TextWork {
             return [context, drive, job_name, owner](Operation& op) {
               return WriteJobFileIn(context, drive, job_name, owner, op);
             };
           },
           gone)) {
    const absl::Status& status = written.text.status();
    done = done || status.ok();
    if (absl::IsNotFound(status)) {
      continue;
    }
    failure = absl::IsNotFound(failure) ? status : failure;
    lines.push_back(absl::StrCat(written.dir, ": ",
                                 status.ok() ? *written.text
                                 : absl::IsCancelled(status)
                                     ? "it does not answer; try again when it does"
                                     : absl::StrCat("not written: ", Message(status))));
  }
  return done ? absl::StatusOr<std::vector<std::string>>(std::move(lines)) : refused(failure);
}

}  // namespace holdfast
