#include "tests/sim/cluster_rank.h"

#include <algorithm>
#include <array>

#include "absl/strings/str_cat.h"
#include "tests/sim/cluster_world.h"

namespace holdfast::sim::cluster {

using std::chrono::milliseconds;
using std::chrono::minutes;
using std::chrono::seconds;
using v1::Failure;

namespace {

constexpr Duration kDrain = std::chrono::seconds(20);

uint64_t ToMillis(Duration d) {
  return static_cast<uint64_t>(d / milliseconds(1));
}

ProcessId NewProcess(Node& node) {
  const int32_t pid = node.NewPid();
  return {pid, static_cast<uint64_t>(pid)};  // two nodes may have processes that look the same
}

}  // namespace

RankProcess::RankProcess(World& world, Node& node, Job& job, Rank rank, std::string launch,
                         Role role)
    : w_(world),
      node_(node),
      job_(job),
      rank_(rank),
      world_size_(job.world_size),
      launch_(std::move(launch)),
      role_(role),
      process_(NewProcess(node)) {}

uint32_t RankProcess::uid() const {
  return job_.uid + (role_ == Role::kStranger ? 1 : 0);
}

void RankProcess::Start() {
  node_.Began(process_);
  Connect();
}

void RankProcess::Later(Duration delay, std::function<void()> what) {
  const int64_t at = std::max(w_.t.now() + delay.count(), hangs_until_);
  w_.t.At(at, [this, what = std::move(what), epoch = epoch_] {
    if (running() && epoch == epoch_) {
      if (hangs_until_ > w_.t.now()) {
        return Later(Duration(0), what);
      }
      what();
    }
  });
}

void RankProcess::Later(Duration delay, void (RankProcess::*what)()) {
  Later(delay, [this, what] { (this->*what)(); });
}

void RankProcess::Call(v1::ClientFrame frame, Duration deadline, Handler handler) {
  if (connection_ == 0) {
    return;
  }
  frame.set_id(next_id_++);
  if (frame.has_enter_session()) {
    frame.mutable_enter_session()->set_hold(w_.NewHold());
  } else if (frame.has_report_load()) {
    frame.mutable_report_load()->set_hold(w_.NewHold());
  } else if (frame.has_attach() && frame.attach().hold() == 0) {
    frame.mutable_attach()->set_hold(w_.NewHold());
  }
  handlers_[frame.id()] = std::move(handler);
  node_.Send(connection_, frame, deadline);
}

void RankProcess::OnReply(const SendReply& reply, const FilePtr& file) {
  const auto it = handlers_.find(reply.frame.id());
  if (it == handlers_.end()) {
    return w_.truth.Violated(
        absl::StrCat(node_.name, ": a second or unasked answer: ", reply.frame.ShortDebugString()));
  }
  const Handler handler = std::move(it->second);
  handlers_.erase(it);
  handler(reply.frame, file);
}

void RankProcess::OnClosed() {
  connection_ = 0;
  handlers_.clear();
  awaited_.clear();
  unsettled_.merge(held_);
  held_.clear();
  ++epoch_;
  filling_.reset();
  filling_file_ = nullptr;
  if (running()) {
    Later(w_.t.Millis(10, 500), &RankProcess::Connect);
  }
}

void RankProcess::Kill() {
  if (!running()) {
    return;
  }
  dying_ = true;
  ++epoch_;
  if (connection_ != 0) {
    node_.CloseSocket(std::exchange(connection_, 0));
  }
}

void RankProcess::End() {
  if (!alive_) {
    return;
  }
  Kill();
  alive_ = false;
  ended_at_ = w_.t.now();
  node_.Ended(process_);
  w_.truth.Ended(job_.name, node_.index, process_);
  mapped_.clear();
  filling_file_ = nullptr;
  w_.RankEnded(this);
}

void RankProcess::Hang(Duration time) {
  hangs_until_ = w_.t.now() + time.count();
}

void RankProcess::TellToEnd(Duration grace) {
  if (killed_at_ == 0) {
    killed_at_ = w_.t.now() + grace.count();
    w_.t.After(grace, [this] { End(); });
  }
}

void RankProcess::Connect() {
  if (!node_.up()) {
    return Later(milliseconds(300), &RankProcess::Connect);
  }
  connection_ = node_.Open(this);
  SettleHolds();
  switch (role_) {
    case Role::kRank:
      return Join();
    case Role::kReader:
      return Read();
    case Role::kStranger:
      return JoinAsStranger();
  }
}

// ---- The attempt ----

void RankProcess::Join() {
  // Whoever joins promises that nothing of it writes any more.
  filling_.reset();
  filling_file_ = nullptr;
  v1::ClientFrame frame;
  v1::Join& join = *frame.mutable_join();
  join.set_job(job_.name);
  join.set_rank(rank_);
  join.set_world_size(world_size_);
  const Duration deadline = w_.t.Millis(2000, 20'000);
  join.set_deadline_ms(ToMillis(deadline));
  if (attempt_ != 0) {
    join.set_attempt(attempt_);
    if (passed_) {
      join.set_passed_step(*passed_);
    }
  } else {
    join.set_launch(launch_);
  }
  Call(frame, deadline, [this, asked = w_.t.now()](const v1::DaemonFrame& reply, const FilePtr&) {
    OnJoined(reply, asked);
  });
}

void RankProcess::OnJoined(const v1::DaemonFrame& frame, int64_t asked) {
  if (frame.has_failure()) {
    const auto code = static_cast<absl::StatusCode>(frame.failure().code());
    w_.counts.states[absl::StrCat("join: ", frame.failure().reason() != Failure::REASON_UNSPECIFIED
                                                ? Failure::Reason_Name(frame.failure().reason())
                                                : absl::StatusCodeToString(code))]++;
    if (code == absl::StatusCode::kUnavailable || code == absl::StatusCode::kDeadlineExceeded ||
        code == absl::StatusCode::kAborted) {
      return Later(milliseconds(500), &RankProcess::Join);
    }
    return Refused(frame.failure(), "join");
  }
  const bool back = attempt_ != 0 && attempt_ == frame.join().attempt();
  w_.counts.states[back ? "join: back again" : "join: accepted"]++;
  uuid_ = JobUuid::FromBytes(frame.join().job_uuid()).value();
  attempt_ = frame.join().attempt();
  // (Who returns may be told so by its own daemon before any host is heard: it can fill slots there
  // and nothing else.)
  w_.truth.Joined(job_.name, uuid_, attempt_, rank_, node_.index, process_, back ? 0 : asked);
  if (frame.join().any_step()) {
    step_ = std::max(step_, frame.join().last_step());
  }
  if (back && training_) {
    return Train();
  }
  training_ = false;
  Enter();
}

void RankProcess::Enter() {
  training_ = false;
  entered_at_ = w_.t.now();
  v1::ClientFrame frame;
  // (Others may have been told late that the last one failed: they were reading.)
  const Duration deadline = w_.reshards() ? w_.t.Millis(15'000, 50'000) : w_.t.Millis(5000, 30'000);
  frame.mutable_enter_session()->set_deadline_ms(ToMillis(deadline));
  frame.mutable_enter_session()->set_may_reshard(true);
  frame.mutable_enter_session()->set_reads_parts(true);
  w_.truth.Entered(job_.name, attempt_, rank_, world_size_, node_.index);
  Call(frame, deadline,
       [this](const v1::DaemonFrame& reply, const FilePtr& file) { OnOutcome(reply, file); });
}

void RankProcess::OnOutcome(const v1::DaemonFrame& frame, const FilePtr& file) {
  if (!frame.has_failure()) {
    const v1::SessionOutcome& outcome = frame.enter_session();
    w_.counts.states[outcome.done() ? "session: done"
                     : outcome.reshard() > 0
                         ? "session: reads of all"
                         : absl::StrCat("session: loads from ", outcome.source().tier())]++;
    if (!outcome.done() && outcome.reshard() > 0) {
      JudgeOffer(outcome);
      return Reshard(outcome, outcome.reshard(), nullptr);
    }
    return outcome.done() ? OnDone(outcome) : Load(outcome, file);
  }
  const Failure& failure = frame.failure();
  const auto code = static_cast<absl::StatusCode>(failure.code());
  w_.counts.states[absl::StrCat("session: ", failure.reason() != Failure::REASON_UNSPECIFIED
                                                 ? Failure::Reason_Name(failure.reason())
                                                 : absl::StatusCodeToString(code))]++;
  if (failure.reason() == Failure::REASON_NOTHING_TO_RESTORE) {
    w_.truth.FromScratchTold(job_.name, attempt_);
    training_ = true;
    return Train();
  }
  if (failure.reason() == Failure::REASON_UNREADABLE) {
    w_.Unreadable(job_, attempt_, entered_at_, failure.message());
  }
  if (failure.reason() == Failure::REASON_UNKNOWN_SESSION) {
    return Later(milliseconds(100), &RankProcess::Join);
  }
  if (failure.reason() == Failure::REASON_SUPERSEDED) {
    return Refused(failure, "restore");
  }
  if (code == absl::StatusCode::kFailedPrecondition && ++refusals_ > 5) {
    return End();
  }
  w_.Trace(absl::StrCat(job_.name, " rank ", rank_, " restore: ", failure.message()));
  Later(milliseconds(500), &RankProcess::Enter);
}

void RankProcess::Load(const v1::SessionOutcome& outcome, const FilePtr& file) {
  const FileRecord record = *file->record;
  if (record.copy.world_size != world_size_) {
    return w_.truth.Violated(absl::StrCat("job ", job_.name, " rank ", rank_, " of ", world_size_,
                                          " was given ", record.copy.id.ToString(), ", which ",
                                          record.copy.world_size, " ranks saved"));
  }
  if (w_.reshards() && w_.t.Chance(0.1)) {  // it has another layout, and wants of the others', too
    return Reshard(outcome, world_size_, file);
  }
  w_.t.After(
      w_.t.Millis(1, w_.stormy() ? 1500 : 50), [this, outcome, file, record, epoch = epoch_] {
        if (!running() || epoch != epoch_) {
          return;
        }
        const ShardId& id = record.copy.id;
        const std::string what = absl::StrCat("job ", job_.name, " rank ", rank_, " was given ",
                                              id.ToString(), " for step ", outcome.step());
        v1::ClientFrame frame;
        v1::ReportLoad& report = *frame.mutable_report_load();
        report.set_session(outcome.session());
        report.set_round(outcome.round());
        report.set_loaded(true);
        if (file->token != record.token) {
          report.set_loaded(false);
          report.set_copy_is_bad(true);
          report.set_problem("digests differ");
        } else if (file->content != id || id.rank != rank_ || id.step != outcome.step() ||
                   id.attempt != outcome.attempt() || id.job != uuid_) {
          w_.truth.Violated(what + ", which is something else");
        } else if (w_.truth.TokenOf(id) != record.token) {
          w_.truth.Violated(what + ", whose bytes are not those that were sealed");
        } else if (w_.stormy() && w_.t.Chance(0.01 * PerRank())) {
          report.set_loaded(false);
          report.set_problem("cannot map it");
        }
        if (!report.loaded()) {
          w_.truth.PassedOver(job_.name, attempt_, id.checkpoint());
        }
        loaded_ = report.loaded() ? std::optional(id.checkpoint()) : std::nullopt;
        const Duration deadline = w_.t.Millis(5000, 30'000);
        report.set_deadline_ms(ToMillis(deadline));
        Call(frame, deadline,
             [this](const v1::DaemonFrame& reply, const FilePtr& next) { OnOutcome(reply, next); });
        Release(outcome.source(), file);
      });
}

void RankProcess::OnDone(const v1::SessionOutcome& outcome) {
  const CheckpointId parent{outcome.attempt(), outcome.step()};
  w_.truth.Restored(job_.name, attempt_, rank_, parent);
  if (loaded_ != parent) {
    w_.truth.Violated(absl::StrCat("job ", job_.name, " rank ", rank_, " trains on from step ",
                                   parent.step, ", and has loaded another"));
  }
  step_ = std::max(step_, parent.step);
  training_ = true;
  Train();
}

void RankProcess::Release(const v1::Source& source, const FilePtr& file) {
  if (connection_ == 0 || file->read_by.count(process_) == 0) {
    return;
  }
  if (--file->read_by[process_] == 0) {
    file->read_by.erase(process_);
  }
  v1::ClientFrame frame;
  frame.mutable_release_read()->set_hold(source.hold());
  Call(frame, Duration(0), [](const v1::DaemonFrame&, const FilePtr&) {});
}

// ---- Training ----

// What one rank does to a step it does to all: in a large job each does it as much more rarely, so
// that of ten steps one is spoiled by somebody.
double RankProcess::PerRank() const {
  return job_.world_size <= kLargeJob ? 1.0 : 0.1 / job_.world_size;
}

// How many steps the first rank of a run may be ahead of the last. The slowest of thousands is
// always slow: of these none goes on before all that train have come as far, as their collectives
// have it.
Step RankProcess::AheadAtMost() const {
  return job_.world_size <= kLargeJob ? 2 : 0;
}

void RankProcess::Train() {
  const uint64_t pace = job_.pace_ms;
  Later(w_.t.Millis(pace - pace / 10, pace), &RankProcess::Begin);
}

void RankProcess::Begin() {
  // Ranks of one run wait for each other.
  const Step slowest = job_.SlowestStep(attempt_, w_.t.now());
  if (!stubborn_ && slowest < step_ && step_ - slowest > AheadAtMost()) {
    return Later(milliseconds(std::max<uint64_t>(job_.pace_ms / 4, 5)), &RankProcess::Begin);
  }
  ++step_;
  w_.operated() ? Reach() : Save();
}

// Whether it is the last step.
void RankProcess::Reach() {
  v1::ClientFrame frame;
  v1::ReachStep& reach = *frame.mutable_reach_step();
  reach.set_step(step_);
  if (killed_at_ != 0) {
    reach.set_told_to_stop(true);
    reach.set_grace_ms(ToMillis(Duration(std::max<int64_t>(killed_at_ - w_.t.now(), 0))));
  }
  Call(frame, seconds(10), [this](const v1::DaemonFrame& reply, const FilePtr&) {
    if (reply.has_failure()) {
      return Refused(reply.failure(), "reach");
    }
    ends_ = reply.reach_step().stop();
    w_.counts.states[ends_ ? "reach: the last one" : "reach: go on"]++;
    if (!ends_) {
      passed_ = step_;
    }
    Save();
  });
}

void RankProcess::Save() {
  const bool hurried = PerRank() == 1 || w_.t.Chance(PerRank());
  const Duration deadline = !hurried || ends_  ? seconds(30)
                            : w_.t.Chance(0.7) ? Duration(0)
                                               : w_.t.Millis(0, 4000);
  v1::ClientFrame frame;
  frame.mutable_begin_save()->set_step(step_);
  frame.mutable_begin_save()->set_slot_bytes(kSlotBytes);
  frame.mutable_begin_save()->set_deadline_ms(ToMillis(deadline));
  Call(frame, deadline,
       [this](const v1::DaemonFrame& reply, const FilePtr& file) { OnGrant(reply, file); });
}

void RankProcess::OnGrant(const v1::DaemonFrame& frame, const FilePtr& file) {
  if (frame.has_failure()) {
    return Refused(frame.failure(), "save");
  }
  const v1::Grant& grant = frame.begin_save();
  if (grant.with_descriptor()) {
    if (const auto old = mapped_.find(grant.slot()); old != mapped_.end()) {
      old->second->mapped_by.erase(process_);
    }
    mapped_[grant.slot()] = file;
    file->mapped_by.insert(process_);
  } else if (mapped_[grant.slot()] != file) {
    return w_.truth.Violated(absl::StrCat(node_.name, ": slot ", grant.slot(),
                                          " was granted without a descriptor to a process that "
                                          "has another file mapped"));
  }
  if (grant.attempt() != attempt_) {
    w_.truth.Violated(absl::StrCat("job ", job_.name, " rank ", rank_, " of attempt ", attempt_,
                                   " was granted a save in attempt ", grant.attempt()));
  }
  filling_ = grant;
  filling_file_ = file;
  Write();
}

// Threads of a dying or superseded process may go on writing for as long as it exists.
void RankProcess::Write() {
  w_.t.After(w_.t.Millis(1, std::max<uint64_t>(job_.pace_ms / 8, 2)),
             [this, file = filling_file_, grant = *filling_, step = step_, epoch = epoch_] {
               if (!alive_ || !filling_ || filling_->generation() != grant.generation() ||
                   filling_file_ != file) {
                 return;
               }
               if (file->record) {
                 return w_.truth.Violated(absl::StrCat(
                     node_.name, ": ", process_.ToString(), " wrote into slot ", file->slot,
                     ", which holds the sealed ", file->record->copy.id.ToString()));
               }
               file->token = w_.NewToken();
               const ShardId id{uuid_, grant.attempt(), step, rank_};
               file->content = id;
               SealedCopy copy;
               copy.id = id;
               copy.generation = grant.generation();
               file->client_record = FileRecord{copy, file->token};
               if (running() && epoch == epoch_) {
                 Seal();
               }
             });
}

void RankProcess::Seal() {
  const v1::Grant grant = *std::exchange(filling_, std::nullopt);
  filling_file_ = nullptr;
  const Step step = step_;
  v1::ClientFrame frame;
  if (w_.stormy() && w_.t.Chance(0.01 * PerRank())) {
    frame.mutable_abort_save()->set_step(step);
    frame.mutable_abort_save()->set_slot(grant.slot());
    frame.mutable_abort_save()->set_generation(grant.generation());
    return Call(frame, Duration(0), [this](const v1::DaemonFrame&, const FilePtr&) { Train(); });
  }
  frame.mutable_seal()->set_step(step);
  frame.mutable_seal()->set_slot(grant.slot());
  frame.mutable_seal()->set_generation(grant.generation());
  frame.mutable_seal()->set_record_offset(kSlotBytes / 2);
  frame.mutable_seal()->set_record_bytes(100);
  Call(frame, seconds(10), [this, step](const v1::DaemonFrame& reply, const FilePtr&) {
    if (reply.has_failure()) {
      return Refused(reply.failure(), "seal");
    }
    w_.counts.states["save: sealed"]++;
    if (ends_) {
      return Drain(step);
    }
    JudgeAwaits();
    if (w_.t.Chance(0.2)) {
      Await(step);
    }
    Train();
  });
}

// Until all have sealed the last step: a launcher may end those that are left when one has gone.
void RankProcess::Drain(Step step) {
  v1::ClientFrame frame;
  frame.mutable_await_save()->set_step(step);
  frame.mutable_await_save()->set_stage(v1::AwaitSave::STAGE_COMMITTED);
  frame.mutable_await_save()->set_deadline_ms(ToMillis(kDrain));
  Call(frame, kDrain, [this, step](const v1::DaemonFrame&, const FilePtr&) {
    w_.StoppedAt(job_, attempt_, rank_, step);
    End();
  });
}

void RankProcess::Await(Step step) {
  v1::ClientFrame frame;
  const v1::AwaitSave::Stage stage =
      std::array{v1::AwaitSave::STAGE_COMMITTED, v1::AwaitSave::STAGE_NVME,
                 v1::AwaitSave::STAGE_REMOTE}[w_.t.Below(3)];
  const Duration deadline = w_.t.Chance(0.3) ? minutes(10) : w_.t.Millis(0, 20'000);
  if (stage == v1::AwaitSave::STAGE_COMMITTED && deadline == minutes(10)) {
    awaited_.insert(step);
  }
  frame.mutable_await_save()->set_step(step);
  frame.mutable_await_save()->set_stage(stage);
  frame.mutable_await_save()->set_deadline_ms(ToMillis(deadline));
  Call(frame, deadline, [this, step, stage](const v1::DaemonFrame& reply, const FilePtr&) {
    if (stage == v1::AwaitSave::STAGE_COMMITTED) {
      awaited_.erase(step);
    }
    if (!reply.has_failure() && reply.await_save().stage() == stage) {
      w_.counts.states[absl::StrCat("await: ", v1::AwaitSave::Stage_Name(stage))]++;
      w_.truth.StageTold(uuid_, {attempt_, step}, stage);
    } else if (reply.has_failure()) {
      w_.counts.states[absl::StrCat("await: ", Failure::Reason_Name(reply.failure().reason()))]++;
    }
  });
}

// A node without a host soon has no slot left. So where all ranks could save that many steps more,
// hosts have settled what became of the step. (One that hangs may seal it still.)
void RankProcess::JudgeAwaits() {
  constexpr Step kSettledSince = 20;
  const bool all_went_on =
      !awaited_.empty() &&
      std::all_of(job_.ranks.begin(), job_.ranks.end(), [&](const RankProcess* rank) {
        return rank != nullptr && rank->attempt_ == attempt_ &&
               *awaited_.begin() + kSettledSince < rank->step_;
      });
  if (all_went_on) {
    w_.truth.Violated(absl::StrCat("job ", job_.name, " rank ", rank_, " on ", node_.name,
                                   " has not heard what became of step ", *awaited_.begin(),
                                   ", and has sealed step ", step_));
  }
}

void RankProcess::Refused(const v1::Failure& failure, const char* what) {
  if (w_.tracing()) {
    w_.Trace(absl::StrCat(node_.name, ": ", job_.name, " rank ", rank_, " ", process_.ToString(),
                          " ", what, ": ", failure.message()));
  }
  const auto code = static_cast<absl::StatusCode>(failure.code());
  if (std::string(what) != "join") {
    w_.counts.states[absl::StrCat(what, ": ",
                                  failure.reason() != Failure::REASON_UNSPECIFIED
                                      ? Failure::Reason_Name(failure.reason())
                                      : absl::StatusCodeToString(code))]++;
  }
  switch (failure.reason()) {
    case Failure::REASON_SUPERSEDED:
      if (w_.stormy() && training_ && (stubborn_ || w_.t.Chance(0.3))) {
        if (!std::exchange(stubborn_, true)) {
          w_.Count(Fault::kProcessLingers);
          w_.t.After(w_.t.Millis(1000, 60'000), [this] { End(); });
        }
        return Train();
      }
      return End();
    case Failure::REASON_UNKNOWN_SESSION:
      return Later(milliseconds(100), &RankProcess::Join);
    case Failure::REASON_SHED:
    case Failure::REASON_ABANDONED:
    case Failure::REASON_NO_ROOM:
    case Failure::REASON_TOO_LARGE:
      return Train();
    default:
      break;
  }
  if (std::string(what) == "join") {
    return End();
  }
  if (code == absl::StatusCode::kFailedPrecondition) {
    return ++refusals_ > 5 ? End() : Later(milliseconds(500), &RankProcess::Enter);
  }
  Train();
}

}  // namespace holdfast::sim::cluster
