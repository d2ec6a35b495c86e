#include "client-lib/src/restore.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/sync_point.h"
#include "client-lib/src/errors.h"
#include "client-lib/src/state_match.h"

namespace holdfast::client {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kProblemBytesMax = 4096;
constexpr size_t kNotesMax = 256;
constexpr Milliseconds kReleaseTime{100};

// Of all objects, in the layout's order, those that are these slices.
std::vector<Object> Pick(const Layout& layout, const std::vector<size_t>& slices,
                         std::vector<Object> all) {
  std::vector<size_t> place(layout.slices.size());
  size_t objects = 0;
  for (size_t i = 0; i < layout.slices.size(); ++i) {
    place[i] = layout.slices[i].kind == SliceKind::kTensor ? 0 : objects++;
  }
  std::vector<Object> picked;
  picked.reserve(slices.size());
  for (const size_t slice : slices) {
    picked.push_back(all[place[slice]]);
  }
  return picked;
}

}  // namespace

Result<Restored> RestoreRun::Run(Deadline deadline) {
  if (options_.adopt_only) {
    return Adopt(deadline);
  }
  restored_.source = "memory";
  Result<Answer<wire::SessionOutcome>> outcome = Enter(deadline);
  while (outcome.ok() && !outcome->message.done) {
    if (const Status chosen = CheckChoice(outcome->message); !chosen.ok()) {
      Decline(outcome->message, chosen, deadline);
      return chosen;
    }
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
  HF_TRY(CheckChoice(outcome->message));
  if (loaded_ != CheckpointId{outcome->message.attempt, outcome->message.step}) {
    return Status(
        Code::kInternal,
        absl::StrCat("ckptd says that attempt ", outcome->message.attempt, " step ",
                     outcome->message.step, " is restored, which this rank has not loaded"));
  }
  HF_SYNC_POINT("client.restore.done");
  restored_.attempt = outcome->message.attempt;
  restored_.step = outcome->message.step;
  return std::move(restored_);
}

// The session chooses, and this rank hears what.
Result<Restored> RestoreRun::Adopt(Deadline deadline) {
  HF_TRY_ASSIGN(const Answer<wire::SessionOutcome> outcome, Enter(deadline));
  Status chosen = CheckChoice(outcome.message);
  if (chosen.ok() && !outcome.message.done) {
    chosen = Status(Code::kRefused,
                    "ckptd is older than this library: it wants every rank to load its shard, and "
                    "cannot only decide the step; use a daemon of the library's version");
  }
  if (!chosen.ok()) {
    if (!outcome.message.done) {
      Decline(outcome.message, chosen, deadline);
    }
    return chosen;
  }
  restored_.attempt = outcome.message.attempt;
  restored_.step = outcome.message.step;
  return std::move(restored_);
}

Result<Answer<wire::SessionOutcome>> RestoreRun::Enter(Deadline deadline) {
  wire::EnterSession enter;
  enter.choice = options_.newest ? wire::Choice::kNewest : wire::Choice::kStep;
  enter.step = options_.newest ? 0 : options_.step;
  enter.attempt = options_.newest ? 0 : options_.attempt;
  enter.reads_by_itself = options_.adopt_only;
  while (true) {
    HF_TRY_ASSIGN(connection_, link_.Get(deadline, Patience::kUntilDeadline));
    enter.deadline_ms = deadline.DaemonMillis();
    auto ticket = std::make_unique<ReadTicket>(link_.identity().socket);
    enter.hold = ticket->id();
    const Clock::time_point began = Clock::now();
    Result<Answer<wire::SessionOutcome>> outcome =
        connection_->Call<wire::SessionOutcome>(enter, deadline);
    restored_.waited += Clock::now() - began;
    Keep(std::move(ticket), outcome);
    if (outcome.ok() || outcome.status().code() != Code::kUnavailable || connection_->alive() ||
        deadline.passed()) {
      return outcome;
    }
  }
}

void RestoreRun::Keep(std::unique_ptr<ReadTicket> ticket,
                      const Result<Answer<wire::SessionOutcome>>& answer) {
  if (answer.ok() && answer->message.source.has_value()) {
    held_ = std::move(ticket);
    return;
  }
  // Without an answer the ticket goes unsettled: there may be a hold, or come one.
  const bool answered =
      answer.ok() || (connection_->alive() && answer.status().code() != Code::kDeadlineExceeded);
  if (answered) {
    ticket->Settle();
  }
}

Status RestoreRun::CheckChoice(const wire::SessionOutcome& outcome) const {
  const auto other = [this](uint64_t attempt, uint64_t step) {
    return step != options_.step || (options_.attempt != 0 && attempt != options_.attempt);
  };
  const bool refused =
      !options_.newest &&
      (other(outcome.attempt, outcome.step) ||
       (outcome.source.has_value() && other(outcome.source->attempt, outcome.source->step)));
  if (!refused) {
    return Status();
  }
  return Status(
      Code::kInternal,
      absl::StrCat("ckptd offers attempt ", outcome.attempt, " step ", outcome.step,
                   ", asked for was step ", options_.step,
                   options_.attempt == 0 ? "" : absl::StrCat(" of attempt ", options_.attempt),
                   "; nothing was loaded"));
}

// The session ends for the other ranks too, instead of waiting for this one until its deadline.
void RestoreRun::Decline(const wire::SessionOutcome& offer, const Status& why, Deadline deadline) {
  wire::ReportLoad report;
  report.session = offer.session;
  report.round = offer.round;
  report.problem = ForWire(why.message(), kProblemBytesMax);
  report.deadline_ms = deadline.DaemonMillis();
  static_cast<void>(ReportAndRelease(report, *offer.source, nullptr, deadline).ok());
}

Result<Answer<wire::SessionOutcome>> RestoreRun::LoadAndReport(
    const Answer<wire::SessionOutcome>& offer, Deadline deadline) {
  const wire::Source& source = *offer.message.source;
  restored_.source = source.tier.empty() ? "memory" : source.tier;
  restored_.why = source.why;
  const Clock::time_point began = Clock::now();
  const std::chrono::nanoseconds waited_before = restored_.waited;
  // Also when memory runs out in between the session must hear of it, and the copy be let go.
  Load load = NoThrow([&] { return LoadSource(source, offer.descriptors, deadline); });
  restored_.copied += Clock::now() - began - (restored_.waited - waited_before);
  if (!load.status.ok() && deadline.interrupted()) {
    // Nothing is wrong with the copy: the others are not to go on to an older step for it. This
    // rank leaves the session (JobCore::Restore).
    return load.status;
  }

  wire::ReportLoad report;
  report.session = offer.message.session;
  report.round = offer.message.round;
  report.loaded = load.status.ok();
  report.problem = ForWire(load.status.message(), kProblemBytesMax);
  report.copy_is_bad = !load.mismatch && CopyIsBad(load.status);
  report.wants_mismatch = load.mismatch;
  report.deadline_ms = deadline.DaemonMillis();
  problem_ = load.status;
  loaded_ = load.status.ok() ? CheckpointId{source.attempt, source.step} : CheckpointId{};
  if (load.mismatch) {
    mismatch_ =
        WithContext(load.status, absl::StrCat("attempt ", source.attempt, " step ", source.step));
  }

  return ReportAndRelease(report, source, std::move(load.shard), deadline);
}

Result<Answer<wire::SessionOutcome>> RestoreRun::ReportAndRelease(
    wire::ReportLoad report, const wire::Source& source, std::unique_ptr<SealedShard> shard,
    Deadline deadline) {
  const std::unique_ptr<ReadTicket> held = std::move(held_);
  auto next = std::make_unique<ReadTicket>(link_.identity().socket);
  report.hold = next->id();
  const Clock::time_point reported = Clock::now();
  const Result<uint64_t> id = connection_->Send(report, deadline);
  if (!id.ok()) {
    connection_->ReleaseLater(held->id());
    return id.status();
  }
  HF_SYNC_POINT("client.restore.reported");
  // While the others load: unmapping takes its time, and then the copy may go as soon as the
  // session lets it.
  if (shard != nullptr && shard->faulted()) {
    mappings_.Drop(
        source.slot);  // if it was read through that mapping: its pages are no longer the slot's
  }
  shard.reset();
  const Result<uint64_t> release = connection_->Send(wire::ReleaseRead{held->id()}, deadline);
  Result<Answer<wire::SessionOutcome>> outcome =
      connection_->Receive<wire::SessionOutcome>(*id, deadline);
  Keep(std::move(next), outcome);
  // Mostly it is answered by now. Nothing depends on it, so a slow daemon keeps nobody.
  if (release.ok()) {
    const Result<Answer<wire::Done>> released =
        connection_->Receive<wire::Done>(*release, deadline.Earlier(Deadline::In(kReleaseTime)));
    if (released.ok()) {
      held->Settle();
    } else if (released.status().code() == Code::kDeadlineExceeded) {
      connection_->Forget(*release);
    }
  } else {
    connection_->ReleaseLater(held->id());
  }
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
    return opened.status();
  }
  std::unique_ptr<SealedShard> shard = *std::move(opened);
  HF_SYNC_POINT("client.restore.source_mapped");
  Result<std::vector<Object>> objects = ReadObjects(*shard, deadline.interrupt());
  if (!objects.ok()) {
    return {objects.status(), /*mismatch=*/false, std::move(shard)};
  }
  const Result<const State*> wanted = wants_(shard->layout(), *objects);
  if (!wanted.ok()) {
    return {wanted.status(), /*mismatch=*/true, std::move(shard)};
  }
  const Result<StateMatch> match = MatchState(**wanted, shard->layout());
  if (!match.ok()) {
    return {match.status(), /*mismatch=*/true, std::move(shard)};
  }
  // 2. The bytes.
  if (Status copied = CopyTensors(*shard, **wanted, match->tensors, deadline.interrupt());
      !copied.ok()) {
    return {std::move(copied), /*mismatch=*/false, std::move(shard)};
  }
  objects_ = Pick(shard->layout(), match->objects, *std::move(objects));
  // 3. Were they of this filling to the last?
  const Clock::time_point asked = Clock::now();
  const Status confirmed =
      connection_->Call<wire::Done>(wire::ConfirmRead{source.slot, source.generation}, deadline)
          .status();
  restored_.waited += Clock::now() - asked;
  return {confirmed, /*mismatch=*/false, std::move(shard)};
}

Result<std::vector<Object>> RestoreRun::ReadObjects(const SealedShard& shard,
                                                    Interrupt* interrupt) {
  std::vector<CopyOutRange> ranges = {shard.HeaderRange()};
  std::vector<std::optional<size_t>> slices = {std::nullopt};
  restored_.bytes = 0;
  const std::vector<Slice>& all = shard.layout().slices;
  for (size_t i = 0; i < all.size(); ++i) {
    if (all[i].kind != SliceKind::kTensor) {
      slices.emplace_back(i);
    }
  }
  std::vector<Object> objects;
  objects.reserve(slices.size());  // ranges point into the objects
  for (size_t i = 1; i < slices.size(); ++i) {
    const Slice& slice = all[*slices[i]];
    Object& object = objects.emplace_back(ToObject(slice));
    object.bytes.resize(slice.bytes);
    ranges.push_back(shard.SliceRange(*slices[i], object.bytes.data()));
    restored_.bytes += slice.bytes;
  }
  CopyOptions options;
  options.interrupt = interrupt;
  HF_TRY(CopyOut(shard, ranges, slices, options));
  return objects;
}

Status RestoreRun::CopyTensors(const SealedShard& shard, const State& wanted,
                               const std::vector<size_t>& slices, Interrupt* interrupt) {
  std::vector<CopyOutRange> ranges;
  ranges.reserve(slices.size());
  for (size_t i = 0; i < slices.size(); ++i) {
    ranges.push_back(shard.SliceRange(slices[i], wanted.tensors[i].data));
    ranges.back().device = wanted.tensors[i].device;
    restored_.bytes += shard.layout().slices[slices[i]].bytes;
  }
  HF_TRY_ASSIGN(const std::shared_ptr<DeviceFence> fence, fences_(wanted));
  CopyOptions options;
  options.half_point = "client.restore.half_copied";
  options.fence = fence.get();
  options.interrupt = interrupt;
  return CopyOut(shard, ranges, {slices.begin(), slices.end()}, options);
}

Status RestoreRun::CopyOut(const SealedShard& shard, const std::vector<CopyOutRange>& ranges,
                           const std::vector<std::optional<size_t>>& slices, CopyOptions options) {
  options.populate = !shard.populated();
  HF_TRY_ASSIGN(const std::optional<CopyMismatch> mismatch, engine_.CopyOut(ranges, options));
  if (shard.faulted()) {
    return Status(Code::kCorrupt, "the slot was cut short while it was being read");
  }
  if (mismatch.has_value()) {
    return shard.MismatchError(*mismatch, slices[mismatch->range]);
  }
  return Status();
}

}  // namespace holdfast::client
