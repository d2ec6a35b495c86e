// Job at the public boundary: options are checked, nothing is thrown, forked children are told that
// they have no part in it. What a job does is in job_core.cc.
#include "holdfast/job.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "client-lib/src/errors.h"
#include "client-lib/src/fork_guard.h"
#include "client-lib/src/job_core.h"
#include "client-lib/src/socket.h"
#include "client-lib/src/state_match.h"
#include "tiers/image/layout_rules.h"

namespace holdfast {
namespace client {
namespace {

constexpr size_t kLaunchBytesMax = 256;

class JobImpl : public Job {
 public:
  JobImpl(RankIdentity identity, const JobOptions& options)
      : core_(std::make_shared<JobCore>(std::move(identity), options)) {}

  ~JobImpl() override {
    if (owner_.forked()) {
      // Threads, locks and mappings that this process does not have.
      new std::shared_ptr<JobCore>(std::move(core_));
      return;
    }
    static_cast<void>(NoThrow([this]() -> Status { return core_->Leave(); }));
  }

  Status Open(Milliseconds wait) { return core_->Open(wait); }

  uint64_t attempt() const override { return owner_.forked() ? 0 : core_->attempt(); }

  Result<ReserveReport> Reserve(const State& state, Milliseconds deadline) override {
    if (owner_.forked()) {
      return ForkedError();
    }
    return NoThrow([&]() -> Result<ReserveReport> {
      Result<ReserveReport> report = core_->Reserve(state, deadline);
      return report.ok() ? std::move(report) : WithContext(report.status(), "reserve");
    });
  }

  Status Save(uint64_t step, const State& state, const SaveOptions& options) override {
    if (owner_.forked()) {
      return ForkedError();
    }
    return NoThrow([&]() -> Status { return core_->Save(step, state, options); });
  }

  std::unique_ptr<SaveHandle> SaveAsync(uint64_t step, const State& state,
                                        const SaveOptions& options) override {
    if (owner_.forked()) {
      auto progress = std::make_shared<SaveProgress>(nullptr, step);
      progress->Finished(ForkedError());
      return MakeSaveHandle(std::move(progress), {});
    }
    return core_->SaveAsync(step, state, options);
  }

  void EnterNetworkBusy() noexcept override {
    if (!owner_.forked()) {
      core_->link()->busy().Enter();
    }
  }
  void LeaveNetworkBusy() noexcept override {
    if (!owner_.forked()) {
      core_->link()->busy().Leave();
    }
  }

  bool Preempted(uint64_t step) override {
    bool last = false;
    if (!owner_.forked()) {
      static_cast<void>(NoThrow([&]() -> Status {
        last = core_->Preempted(step);
        return Status();
      }));
    }
    return last;
  }
  void NoticeStop(Milliseconds grace) noexcept override { core_->stop_notice().Notice(grace); }
  std::optional<Milliseconds> stop_left() const override { return core_->stop_notice().left(); }

  uint64_t failed_saves() const override { return owner_.forked() ? 0 : core_->failed_saves(); }
  Status last_failure() const override {
    return owner_.forked() ? ForkedError() : core_->last_failure();
  }

  Result<Restored> Restore(State& state, const RestoreOptions& options) override {
    const RestoreRun::Wants wants = [&state](const RestoreRun::WhatIsSaved&) {
      return Result<RestoreRun::Wanted>({&state, /*objects=*/true});
    };
    return RestoreWith(options, wants, &state);
  }

  Result<Restored> Restore(const Choose& choose, const RestoreOptions& options) override {
    State chosen;
    const RestoreRun::Wants wants =
        [&](const RestoreRun::WhatIsSaved& what) -> Result<RestoreRun::Wanted> {
      HF_TRY_ASSIGN(const Saved saved, what());
      HF_TRY_ASSIGN(chosen, choose(saved));
      chosen.objects.clear();
      HF_TRY(core_->CheckWanted(chosen));
      return RestoreRun::Wanted{&chosen, /*objects=*/false};
    };
    return RestoreWith(options, wants, nullptr);
  }

 private:
  // `state`: null when what is wanted is not known yet.
  Result<Restored> RestoreWith(const RestoreOptions& options, const RestoreRun::Wants& wants,
                               State* state) {
    if (owner_.forked()) {
      return ForkedError();
    }
    return NoThrow([&]() -> Result<Restored> {
      std::vector<Object> objects;
      Result<Restored> restored = core_->Restore(options, wants, state, objects);
      if (!restored.ok()) {
        return WithContext(restored.status(), options.newest
                                                  ? "restore"
                                                  : absl::StrCat("restore step ", options.step));
      }
      if (state != nullptr && !options.adopt_only) {
        state->objects = std::move(objects);
      }
      return restored;
    });
  }

  const ForkOwner owner_;
  std::shared_ptr<JobCore> core_;
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
                                                        client::ToWire(options.policy.remote),
                                                        options.policy.replicas)},
        options);
    HF_TRY(job->Open(options.open_deadline));
    return std::unique_ptr<Job>(std::move(job));
  });
}

}  // namespace holdfast
