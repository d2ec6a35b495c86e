#include "client-lib/src/restore.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/sync_point.h"
#include "client-lib/src/errors.h"
#include "client-lib/src/shard_read.h"
#include "client-lib/src/state_match.h"

namespace holdfast::client {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kProblemBytesMax = 4096;
constexpr size_t kLabelBytesMax = 256;
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
    const CheckpointId offered{outcome->message.attempt, outcome->message.step};
    Result<Answer<wire::SessionOutcome>> next = outcome->message.reshard > 0
                                                    ? ReshardAndReport(outcome->message, deadline)
                                                    : LoadAndReport(*outcome, deadline);
    if (!next.ok() && !connection_->alive() && next.status().code() == Code::kUnavailable &&
        mismatch_.ok() && !deadline.passed()) {
      // The daemon was restarted: it knows what was decided, or we decide again.
      next = Enter(deadline);
    }
    const bool moved_on =
        next.ok() && CheckpointId{next->message.attempt, next->message.step} != offered;
    saw_itself_ = saw_itself_ || (moved_on && !problem_.ok());
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
  NotePassedOver(outcome->message);
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
  NotePassedOver(outcome.message);
  restored_.attempt = outcome.message.attempt;
  restored_.step = outcome.message.step;
  return std::move(restored_);
}

// What this rank saw itself says more; that another one could not load it says less.
void RestoreRun::NotePassedOver(const wire::SessionOutcome& outcome) {
  if (!outcome.passed_over.empty() && !saw_itself_) {
    restored_.notes = {outcome.passed_over};
  }
}

Result<Answer<wire::SessionOutcome>> RestoreRun::Enter(Deadline deadline) {
  wire::EnterSession enter;
  enter.choice = options_.newest ? wire::Choice::kNewest : wire::Choice::kStep;
  enter.step = options_.newest ? 0 : options_.step;
  enter.attempt = options_.newest ? 0 : options_.attempt;
  enter.reads_by_itself = options_.adopt_only;
  enter.may_reshard = !options_.adopt_only;
  enter.reads_parts = true;
  enter.label = ForWire(options_.label, kLabelBytesMax);
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
  static_cast<void>(ReportAndRelease(report, std::nullopt, nullptr, deadline).ok());
}

Result<Answer<wire::SessionOutcome>> RestoreRun::LoadAndReport(
    const Answer<wire::SessionOutcome>& offer, Deadline deadline) {
  const wire::Source& source = *offer.message.source;
  restored_.source = source.tier.empty() ? "memory" : source.tier;
  restored_.why = source.why;
  restored_.resharded_from = 0;
  meter_.Begin({source.attempt, source.step});
  const Clock::time_point began = Clock::now();
  const std::chrono::nanoseconds waited_before = restored_.waited;
  // Also when memory runs out in between the session must hear of it, and the copy be let go.
  Load load = NoThrow([&] { return LoadSource(source, offer.descriptors, deadline); });
  if (load.mismatch && load.elsewhere) {
    // It may be in the others' shards: as many ranks in another parallel layout.
    Load of_all = NoThrow([&] {
      return Reshard({source.attempt, source.step}, source.world_size, deadline);
    });
    const std::string both = absl::StrCat(load.status.message(), "; of all ", source.world_size,
                                          " ranks' shards: ", of_all.status.message());
    if (of_all.mismatch) {
      of_all.status = Status(Code::kInvalidArgument, both);
    }
    of_all.shard = std::move(load.shard);
    load = std::move(of_all);
  }
  restored_.copied += Clock::now() - began - (restored_.waited - waited_before);
  if (!load.status.ok() && deadline.interrupted()) {
    // Nothing is wrong with the copy: the others are not to go on to an older step for it. This
    // rank leaves the session (JobCore::Restore).
    return load.status;
  }

  const wire::ReportLoad report = ReportOf(offer.message, load, deadline);
  return ReportAndRelease(report, source.slot, std::move(load.shard), deadline);
}

wire::ReportLoad RestoreRun::ReportOf(const wire::SessionOutcome& offer, const Load& load,
                                      Deadline deadline) {
  wire::ReportLoad report;
  report.session = offer.session;
  report.round = offer.round;
  report.loaded = load.status.ok();
  report.problem = ForWire(load.status.message(), kProblemBytesMax);
  // (A daemon that does not know of several ranks' shards is not to take it for this rank's own.)
  const bool bad = !load.mismatch && CopyIsBad(load.status);
  report.copy_is_bad = bad && !load.resharded;
  report.shards_are_bad = bad && load.resharded;
  report.wants_mismatch = load.mismatch && !load.of_another_run;
  report.of_another_run = load.of_another_run;
  report.deadline_ms = deadline.DaemonMillis();
  problem_ = load.status;
  loaded_ = load.status.ok() ? CheckpointId{offer.attempt, offer.step} : CheckpointId{};
  if (report.wants_mismatch) {
    mismatch_ =
        WithContext(load.status, absl::StrCat("attempt ", offer.attempt, " step ", offer.step));
  }
  return report;
}

bool RestoreRun::IsOfAnotherRun(const Status& wanted) const {
  return !options_.label.empty() && wanted.code() == Code::kNothingToRestore;
}

Result<Answer<wire::SessionOutcome>> RestoreRun::ReportAndRelease(
    wire::ReportLoad report, std::optional<uint32_t> slot, std::unique_ptr<SealedShard> shard,
    Deadline deadline) {
  const std::unique_ptr<ReadTicket> held = std::move(held_);  // null: nothing was offered to hold
  auto next = std::make_unique<ReadTicket>(link_.identity().socket);
  report.hold = next->id();
  meter_.Wait();
  deadline.Look();  // so whoever is told how far it is hears that, however soon the others are done
  const Clock::time_point reported = Clock::now();
  const Result<uint64_t> id = connection_->Send(report, deadline);
  if (!id.ok()) {
    if (held != nullptr) {
      connection_->ReleaseLater(held->id());
    }
    return id.status();
  }
  HF_SYNC_POINT("client.restore.reported");
  // While the others load: unmapping takes its time, and then the copy may go as soon as the
  // session lets it.
  if (shard != nullptr && shard->faulted()) {
    mappings_.Drop(
        *slot);  // if it was read through that mapping: its pages are no longer the slot's
  }
  shard.reset();
  const std::optional<Result<uint64_t>> release =
      held == nullptr ? std::nullopt
                      : std::optional(connection_->Send(wire::ReleaseRead{held->id()}, deadline));
  Result<Answer<wire::SessionOutcome>> outcome =
      connection_->Receive<wire::SessionOutcome>(*id, deadline);
  Keep(std::move(next), outcome);
  // Mostly it is answered by now. Nothing depends on it, so a slow daemon keeps nobody.
  if (release.has_value() && release->ok()) {
    const Result<Answer<wire::Done>> released =
        connection_->Receive<wire::Done>(**release, deadline.Earlier(Deadline::In(kReleaseTime)));
    if (released.ok()) {
      held->Settle();
    } else if (released.status().code() == Code::kDeadlineExceeded) {
      connection_->Forget(**release);
    }
  } else if (release.has_value()) {
    connection_->ReleaseLater(held->id());
  }
  restored_.waited += Clock::now() - reported;
  return outcome;
}

RestoreRun::Load RestoreRun::LoadSource(const wire::Source& source,
                                        const std::vector<ForkClosedFd>& descriptors,
                                        Deadline deadline) {
  // 1. The copy, and what of it is wanted.
  const SealedShard::Expected expected{link_.identity().job, link_.identity().rank};
  Result<std::unique_ptr<SealedShard>> opened =
      SealedShard::Open(source, descriptors, expected,
                        mappings_.Find(source.slot, source.image_bytes, descriptors[0].get()));
  if (!opened.ok()) {
    return opened.status();
  }
  std::unique_ptr<SealedShard> shard = *std::move(opened);
  HF_SYNC_POINT("client.restore.source_mapped");
  Result<std::vector<Object>> objects =
      ReadObjects(*shard, [&](const ShardRanges& ranges, const ShardSlices& slices) {
        CopyOptions options;
        options.interrupt = deadline.interrupt();
        return CopyOutOf(*shard, engine_, ranges, slices, options);
      });
  if (!objects.ok()) {
    return {objects.status(), /*mismatch=*/false, std::move(shard)};
  }
  restored_.bytes = 0;
  for (const Object& object : *objects) {
    restored_.bytes += object.bytes.size();
  }
  const Result<Wanted> wanted = wants_([&]() -> Result<Saved> {
    Saved saved;
    saved.attempt = source.attempt;
    saved.step = source.step;
    saved.objects = *objects;
    for (const Slice& slice : shard->layout().slices) {
      if (slice.kind == SliceKind::kTensor) {
        saved.tensors.push_back(ToTensor(slice));
      }
    }
    return saved;
  });
  if (!wanted.ok()) {
    Load load(wanted.status(), /*mismatch=*/true, std::move(shard));
    load.elsewhere = wanted.status().code() == Code::kNotFound;
    load.of_another_run = IsOfAnotherRun(wanted.status());
    return load;
  }
  const Result<StateMatch> match = MatchState(*wanted->state, shard->layout());
  if (!match.ok()) {
    Load load(match.status(), /*mismatch=*/true, nullptr);
    load.elsewhere = MayBeElsewhere(*wanted->state, shard->layout(), options_.convert_types);
    load.shard = std::move(shard);
    return load;
  }
  // 2. The bytes.
  if (Status copied = CopyTensors(*shard, *wanted->state, match->tensors, deadline.interrupt());
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

Status RestoreRun::CopyTensors(const SealedShard& shard, const State& wanted,
                               const std::vector<size_t>& slices, Interrupt* interrupt) {
  std::vector<CopyOutRange> ranges;
  ranges.reserve(slices.size());
  uint64_t bytes = 0;
  for (size_t i = 0; i < slices.size(); ++i) {
    ranges.push_back(shard.SliceRange(slices[i], wanted.tensors[i].data));
    ranges.back().device = wanted.tensors[i].device;
    bytes += shard.layout().slices[slices[i]].bytes;
  }
  restored_.bytes += bytes;
  meter_.BeginReading(bytes);
  HF_TRY_ASSIGN(const std::shared_ptr<DeviceFence> fence, fences_(wanted));
  CopyOptions options;
  options.half_point = "client.restore.half_copied";
  options.fence = fence.get();
  options.interrupt = interrupt;
  options.read = &meter_.read();
  return CopyOutOf(shard, engine_, ranges, {slices.begin(), slices.end()}, options);
}

}  // namespace holdfast::client
