#include "client-lib/src/restore.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/sync_point.h"
#include "client-lib/src/errors.h"
#include "client-lib/src/state_match.h"
#include "client-lib/src/state_plan.h"

namespace holdfast::client {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kProblemBytesMax = 4096;
constexpr size_t kNotesMax = 256;

}  // namespace

Status CheckWanted(const State& state, Rank rank) {
  if (state.tensors.empty()) {
    return Status();
  }
  State tensors;
  tensors.tensors = state.tensors;
  return PlanState(tensors, rank).status();
}

Result<Restored> RestoreRun::Run(Deadline deadline) {
  restored_.source = "memory";
  Result<Answer<wire::SessionOutcome>> outcome = Enter(deadline);
  while (outcome.ok() && !outcome->message.done) {
    const wire::Source offered = *outcome->message.source;
    Result<Answer<wire::SessionOutcome>> next = LoadAndReport(*outcome, deadline);
    if (!next.ok() && !connection_->alive() && next.status().code() == Code::kUnavailable &&
        mismatch_.ok() && !deadline.passed()) {
      // The daemon was restarted: it knows what was decided, or we decide again.
      next = Enter(deadline);
    }
    const bool moved_on = next.ok() && (next->message.attempt != offered.attempt ||
                                        next->message.step != offered.step);
    if (moved_on && restored_.notes.size() < kNotesMax) {
      restored_.notes.push_back(
          absl::StrCat("attempt ", offered.attempt, " step ", offered.step, " was passed over: ",
                       problem_.ok() ? "another rank could not load it" : problem_.message()));
    }
    outcome = std::move(next);
  }
  if (!mismatch_.ok()) {
    return mismatch_;
  }
  HF_TRY(outcome.status());
  if (loaded_ != CheckpointId{outcome->message.attempt, outcome->message.step}) {
    return Status(
        Code::kInternal,
        absl::StrCat("ckptd says that attempt ", outcome->message.attempt, " step ",
                     outcome->message.step, " is restored, which this rank has not loaded"));
  }
  HF_SYNC_POINT("client.restore.done");
  restored_.attempt = outcome->message.attempt;
  restored_.step = outcome->message.step;
  state_.objects = std::move(objects_);
  return std::move(restored_);
}

Result<Answer<wire::SessionOutcome>> RestoreRun::Enter(Deadline deadline) {
  wire::EnterSession enter;
  enter.choice = options_.newest ? wire::Choice::kNewest : wire::Choice::kStep;
  enter.step = options_.newest ? 0 : options_.step;
  enter.attempt = options_.newest ? 0 : options_.attempt;
  while (true) {
    HF_TRY_ASSIGN(connection_, link_.Get(deadline, Patience::kUntilDeadline));
    enter.deadline_ms = deadline.DaemonMillis();
    Result<Answer<wire::SessionOutcome>> outcome = Exchange(*connection_, enter, deadline);
    if (outcome.ok() || outcome.status().code() != Code::kUnavailable || connection_->alive() ||
        deadline.passed()) {
      return outcome;
    }
  }
}

Result<Answer<wire::SessionOutcome>> RestoreRun::Exchange(Connection& connection,
                                                          const wire::Request& request,
                                                          Deadline deadline) {
  const Clock::time_point began = Clock::now();
  Result<Answer<wire::SessionOutcome>> outcome =
      connection.Call<wire::SessionOutcome>(request, deadline);
  restored_.waited += Clock::now() - began;
  return outcome;
}

Result<Answer<wire::SessionOutcome>> RestoreRun::LoadAndReport(
    const Answer<wire::SessionOutcome>& offer, Deadline deadline) {
  const wire::Source& source = *offer.message.source;
  const Clock::time_point began = Clock::now();
  Load load = LoadSource(source, offer.descriptors, deadline);
  restored_.copied += Clock::now() - began;

  wire::ReportLoad report;
  report.session = offer.message.session;
  report.round = offer.message.round;
  report.loaded = load.status.ok();
  report.problem = ForWire(load.status.message(), kProblemBytesMax);
  report.copy_is_bad = load.status.code() == Code::kCorrupt;
  report.wants_mismatch = load.mismatch;
  report.deadline_ms = deadline.DaemonMillis();
  problem_ = load.status;
  loaded_ = load.status.ok() ? CheckpointId{source.attempt, source.step} : CheckpointId{};
  if (load.mismatch) {
    mismatch_ =
        WithContext(load.status, absl::StrCat("attempt ", source.attempt, " step ", source.step));
  }

  const Clock::time_point reported = Clock::now();
  HF_TRY_ASSIGN(const uint64_t id, connection_->Send(report, deadline));
  HF_SYNC_POINT("client.restore.reported");
  // While the others load: unmapping takes its time, and then the copy may go as soon as the
  // session lets it. A daemon that is slow to answer must not cost this rank its place in the
  // session.
  if (load.shard != nullptr && load.shard->faulted()) {
    mappings_.Drop(
        source.slot);  // if it was read through that mapping: its pages are no longer the slot's
  }
  load.shard.reset();
  static_cast<void>(
      connection_->Call<wire::Done>(wire::ReleaseRead{source.slot, source.generation}, deadline)
          .ok());
  Result<Answer<wire::SessionOutcome>> outcome =
      connection_->Receive<wire::SessionOutcome>(id, deadline);
  restored_.waited += Clock::now() - reported;
  return outcome;
}

RestoreRun::Load RestoreRun::LoadSource(const wire::Source& source,
                                        const std::vector<UniqueFd>& descriptors,
                                        Deadline deadline) {
  // 1. The copy, and what of it is wanted.
  const SealedShard::Expected expected{link_.identity().job, link_.identity().rank};
  Result<std::unique_ptr<SealedShard>> opened =
      SealedShard::Open(source, descriptors, expected,
                        mappings_.Find(source.slot, source.image_bytes, descriptors[0]));
  if (!opened.ok()) {
    return {opened.status()};
  }
  std::unique_ptr<SealedShard> shard = *std::move(opened);
  HF_SYNC_POINT("client.restore.source_mapped");
  const Result<StateMatch> match = MatchState(state_, shard->layout());
  if (!match.ok()) {
    return {match.status(), /*mismatch=*/true, std::move(shard)};
  }
  // 2. The bytes.
  std::vector<size_t> slices = match->tensors;
  slices.insert(slices.end(), match->objects.begin(), match->objects.end());
  if (Status copied = Copy(*shard, slices); !copied.ok()) {
    return {std::move(copied), /*mismatch=*/false, std::move(shard)};
  }
  // 3. Were they of this filling to the last?
  const Status confirmed =
      connection_->Call<wire::Done>(wire::ConfirmRead{source.slot, source.generation}, deadline)
          .status();
  return {confirmed, /*mismatch=*/false, std::move(shard)};
}

Status RestoreRun::Copy(const SealedShard& shard, const std::vector<size_t>& slices) {
  std::vector<CopyOutRange> ranges = {shard.HeaderRange()};
  ranges.reserve(slices.size() + 1);
  objects_.clear();
  objects_.reserve(slices.size());  // ranges point into the objects
  restored_.bytes = 0;
  for (size_t i = 0; i < slices.size(); ++i) {
    const Slice& slice = shard.layout().slices[slices[i]];
    void* to = nullptr;
    if (i < state_.tensors.size()) {
      to = state_.tensors[i].data;
    } else {
      Object& object = objects_.emplace_back(ToObject(slice));
      object.bytes.resize(slice.bytes);
      to = object.bytes.data();
    }
    ranges.push_back(shard.SliceRange(slices[i], to));
    restored_.bytes += slice.bytes;
  }
  CopyOptions options;
  options.half_point = "client.restore.half_copied";
  options.populate = !shard.populated();
  HF_TRY_ASSIGN(const std::optional<CopyMismatch> mismatch, engine_.CopyOut(ranges, options));
  if (shard.faulted()) {
    return Status(Code::kCorrupt, "the slot was cut short while it was being read");
  }
  if (mismatch.has_value()) {
    return shard.MismatchError(*mismatch, mismatch->range == 0
                                              ? std::nullopt
                                              : std::optional<size_t>(slices[mismatch->range - 1]));
  }
  return Status();
}

}  // namespace holdfast::client
