// Job: who may do what when. One operation at a time uses the slots and the copy engine; an
// overlapped save is one operation, on the background thread, and every other one waits for it
// first.
#include "holdfast/job.h"

#include <algorithm>
#include <atomic>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "base/status.h"
#include "client-lib/src/async_save.h"
#include "client-lib/src/background.h"
#include "client-lib/src/daemon_link.h"
#include "client-lib/src/fork_guard.h"
#include "client-lib/src/restore.h"
#include "client-lib/src/save.h"
#include "client-lib/src/slot_mapping.h"
#include "client-lib/src/socket.h"
#include "client-lib/src/state_plan.h"
#include "client-lib/src/worker_pool.h"
#include "tiers/image/layout_rules.h"

namespace holdfast {
namespace client {
namespace {

constexpr size_t kLaunchBytesMax = 256;
constexpr Milliseconds kLeaveTime{2000};
constexpr uint32_t kReservedSlotsMax = 1024;

class JobImpl : public Job {
 public:
  JobImpl(RankIdentity identity, const JobOptions& options)
      : call_deadline_(options.call_deadline),
        core_(std::make_unique<Core>(std::move(identity), options)) {}

  ~JobImpl() override {
    if (owner_.forked()) {
      static_cast<void>(
          core_.release());  // threads, locks and mappings that this process does not have
      return;
    }
    static_cast<void>(NoThrow([this]() -> Status { return Leave(); }));
  }

  Status Open(Deadline deadline) { return core_->link->Open(deadline); }

  uint64_t attempt() const override { return owner_.forked() ? 0 : core_->link->attempt(); }

  Result<ReserveReport> Reserve(const State& state, Milliseconds deadline) override {
    if (owner_.forked()) {
      return ForkedError();
    }
    return NoThrow([&]() -> Result<ReserveReport> {
      Result<ReserveReport> report = ReserveSlots(state, Deadline::In(deadline));
      return report.ok() ? std::move(report) : WithContext(report.status(), "reserve");
    });
  }

  Status Save(uint64_t step, const State& state, const SaveOptions& options) override {
    if (owner_.forked()) {
      return ForkedError();
    }
    const Status status = NoThrow([&]() -> Status {
      core_->background.WaitIdle();
      SaveRequest request;
      HF_TRY(Prepare(step, state, options, request));
      request.objects = &state.objects;
      SaveProgress progress(core_->link, step);
      return RunSave(request, progress);
    });
    return Noted(step, status);
  }

  std::unique_ptr<SaveHandle> SaveAsync(uint64_t step, const State& state,
                                        const SaveOptions& options) override {
    auto progress = std::make_shared<SaveProgress>(owner_.forked() ? nullptr : core_->link, step);
    if (owner_.forked()) {
      progress->Finished(ForkedError());
      return MakeSaveHandle(std::move(progress));
    }
    const Status status = NoThrow([&]() -> Status {
      core_->background.WaitIdle();
      auto request = std::make_shared<SaveRequest>();
      HF_TRY(Prepare(step, state, options, *request));
      request->own_objects = state.objects;
      request->objects = &request->own_objects;
      core_->background.Submit([this, request, progress] {
        const Status saved = NoThrow([&]() -> Status { return RunSave(*request, *progress); });
        progress->Finished(Noted(request->step, saved));
      });
      return Status();
    });
    if (!status.ok()) {
      progress->Finished(Noted(step, status));
    }
    return MakeSaveHandle(std::move(progress));
  }

  uint64_t failed_saves() const override { return failed_saves_.load(std::memory_order_relaxed); }
  Status last_failure() const override {
    if (owner_.forked()) {
      return ForkedError();
    }
    const MutexLock lock(core_->failure_mutex);
    return core_->last_failure;
  }

  Result<Restored> Restore(State& state, const RestoreOptions& options) override {
    if (owner_.forked()) {
      return ForkedError();
    }
    return NoThrow([&]() -> Result<Restored> {
      Result<Restored> restored = RestoreState(state, options, Deadline::In(options.deadline));
      if (restored.ok()) {
        return restored;
      }
      return WithContext(restored.status(),
                         options.newest ? "restore" : absl::StrCat("restore step ", options.step));
    });
  }

 private:
  // All that a forked child must leave alone.
  struct Core {
    Core(RankIdentity identity, const JobOptions& options)
        : plans(identity.rank),
          engine(MakeHostCopyEngine(CopyThreads(options.copy_threads))),
          link(std::make_shared<DaemonLink>(std::move(identity))) {}

    PlanCache plans;
    SlotMappings mappings;
    std::unique_ptr<CopyEngine> engine;
    std::shared_ptr<DaemonLink> link;
    std::atomic<bool> took_part{
        false};  // in the link's attempt: it restored, or was granted a save
    mutable Mutex failure_mutex;
    Status last_failure GUARDED_BY(failure_mutex);
    Background background;  // last: its thread uses the rest
  };

  // Everything of a save that happens before anybody is asked, but for reading the tensors.
  Status Prepare(uint64_t step, const State& state, const SaveOptions& options,
                 SaveRequest& request) {
    request.step = step;
    request.options = options;
    HF_TRY_ASSIGN(request.plan, core_->plans.Get(state));
    request.tensors.reserve(state.tensors.size());
    for (const Tensor& tensor : state.tensors) {
      request.tensors.push_back(tensor.data);
    }
    return Status();
  }

  Status RunSave(const SaveRequest& request, SaveProgress& progress) {
    const SaveContext context{*core_->link, core_->mappings, *core_->engine, call_deadline_};
    SaveObserver observer;
    observer.planned = [this](std::shared_ptr<const StatePlan> plan) {
      core_->plans.Keep(std::move(plan));
    };
    observer.granted = [this, &progress](uint64_t attempt) {
      core_->took_part = true;
      progress.Granted(attempt);
    };
    observer.copied = [&progress](uint64_t image_bytes) { progress.Copied(image_bytes); };
    return SaveRun(context, request, observer).Run();
  }

  // The status as the caller gets it; remembered if it is a failure.
  Status Noted(uint64_t step, const Status& status) {
    if (status.ok()) {
      return status;
    }
    Status noted = WithContext(status, absl::StrCat("save step ", step));
    failed_saves_.fetch_add(1, std::memory_order_relaxed);
    const MutexLock lock(core_->failure_mutex);
    core_->last_failure = noted;
    return noted;
  }

  Result<ReserveReport> ReserveSlots(const State& state, Deadline deadline) {
    core_->background.WaitIdle();
    HF_TRY_ASSIGN(std::shared_ptr<const StatePlan> plan, core_->plans.Get(state));
    if (!FitsObjects(*plan, state.objects)) {
      HF_TRY_ASSIGN(plan, PlanWithObjects(*plan, state.objects, core_->link->identity().rank));
      core_->plans.Keep(plan);
    }
    HF_TRY_ASSIGN(const std::shared_ptr<Connection> connection,
                  core_->link->Get(deadline, Patience::kUntilDeadline));
    ReleaseDropped(*connection, core_->mappings, deadline);
    // 1. Each answer brings at most one slot that is not mapped here yet; the last one brings none.
    std::vector<SlotMapping*> fresh;
    wire::Reserve reserve;
    reserve.slot_bytes = plan->slot_bytes;
    for (uint32_t i = 0; i < kReservedSlotsMax; ++i) {
      reserve.deadline_ms = deadline.DaemonMillis();
      HF_TRY_ASSIGN(const Answer<wire::ReserveReply> answer,
                    connection->Call<wire::ReserveReply>(reserve, deadline));
      const wire::ReserveReply& reply = answer.message;
      if (!reply.descriptor) {
        // 2. With all of them ready, what makes later mappings cheap.
        bool huge_pages = true;
        for (size_t slot = 0; slot < fresh.size() && !deadline.passed(); ++slot) {
          huge_pages = huge_pages && fresh[slot]->UseHugePages(deadline);
          fresh[slot]->Populate();
        }
        return ReserveReport{reply.ready, reply.wanted, reply.slot_bytes};
      }
      // Mapped in any case: the daemon will not send this slot's descriptor again.
      HF_TRY_ASSIGN(SlotMapping* const mapping,
                    core_->mappings.Writable(reply.slot, reply.slot_bytes, answer.descriptors));
      if (deadline.passed()) {
        return ReserveReport{reply.ready, reply.wanted, reply.slot_bytes};
      }
      mapping->Populate();
      fresh.push_back(mapping);
    }
    return Status(Code::kInternal,
                  absl::StrCat("ckptd went on to send slots after ", kReservedSlotsMax));
  }

  Result<Restored> RestoreState(State& state, const RestoreOptions& options, Deadline deadline) {
    if (!state.tensors.empty()) {
      HF_TRY(core_->plans.GetForTensors(state.tensors).status());
    }
    if (!core_->background.WaitIdleUntil(deadline)) {
      return Status(Code::kDeadlineExceeded, "a save was still under way");
    }
    if (core_->took_part) {
      HF_TRY(core_->link->NextAttempt(deadline));
      core_->took_part = false;
    }
    Result<Restored> restored =
        RestoreRun(*core_->link, core_->mappings, *core_->engine, options, state).Run(deadline);
    // "From scratch" is a decision of the attempt, too.
    core_->took_part = restored.ok() || restored.status().code() == Code::kNothingToRestore;
    return restored;
  }

  Status Leave() {
    core_->background.WaitIdle();
    if (core_->link->attempt() == 0) {
      return Status();  // never had a place to leave
    }
    core_->mappings.DropAll();
    const Deadline deadline = Deadline::In(kLeaveTime);
    Result<std::shared_ptr<Connection>> connection = core_->link->Get(deadline, Patience::kOnce);
    if (connection.ok()) {
      ReleaseDropped(**connection, core_->mappings, deadline);
      static_cast<void>((*connection)->Call<wire::Done>(wire::Leave{}, deadline).ok());
    }
    core_->link->Close();
    return Status();
  }

  const ForkOwner owner_;
  const Milliseconds call_deadline_;
  std::atomic<uint64_t> failed_saves_{0};
  std::unique_ptr<Core> core_;
};

wire::TierPolicy ToWire(const TierPolicy& policy) {
  wire::TierPolicy out;
  out.every_steps = policy.every_steps;
  if (policy.every) {
    out.every_ms = static_cast<uint64_t>(std::max<int64_t>(0, policy.every->count()));
  }
  if (policy.keep_last) {
    out.keep_last = *policy.keep_last;
  }
  out.keep_every_steps = policy.keep_every_steps;
  out.bytes_max = policy.bytes_max;
  return out;
}

Status CheckOptions(const JobOptions& options) {
  HF_TRY(FromAbslStatus(CheckJobName(options.job), "open"));
  if (options.world_size == 0 || options.world_size > kWorldSizeMax ||
      options.rank >= options.world_size) {
    return Status(Code::kInvalidArgument,
                  absl::StrCat("open job '", options.job, "': rank ", options.rank, " of ",
                               options.world_size, ": world_size must be 1 to ", kWorldSizeMax,
                               " and rank less than it"));
  }
  if (options.launch.size() > kLaunchBytesMax || !image_internal::IsValidUtf8(options.launch)) {
    return Status(Code::kInvalidArgument, absl::StrCat("open job '", options.job,
                                                       "': a launch id is UTF-8 text of at most ",
                                                       kLaunchBytesMax, " bytes"));
  }
  for (const TierPolicy* tier : {&options.policy.nvme, &options.policy.remote}) {
    if ((tier->keep_last && *tier->keep_last == 0) || (tier->every && tier->every->count() < 0)) {
      return Status(Code::kInvalidArgument,
                    absl::StrCat("open job '", options.job,
                                 "': policy: ", tier == &options.policy.nvme ? "nvme" : "remote",
                                 ": keep_last is at least 1 (the newest always stays), and no time "
                                 "is below 0"));
    }
  }
  return Status();
}

}  // namespace
}  // namespace client

Result<std::unique_ptr<Job>> Job::Open(const JobOptions& options) {
  return client::NoThrow([&]() -> Result<std::unique_ptr<Job>> {
    HF_TRY(client::CheckOptions(options));
    auto job = std::make_unique<client::JobImpl>(
        client::RankIdentity{options.job, options.rank, options.world_size, options.launch,
                             client::SocketPath(options.socket),
                             client::wire::EncodePolicy(client::ToWire(options.policy.nvme),
                                                        client::ToWire(options.policy.remote))},
        options);
    HF_TRY(job->Open(client::Deadline::In(options.open_deadline)));
    return std::unique_ptr<Job>(std::move(job));
  });
}

}  // namespace holdfast
