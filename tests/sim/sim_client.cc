#include "tests/sim/sim_client.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace holdfast::sim {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using v1::Failure;

uint64_t Millis(Duration d) {
  return static_cast<uint64_t>(d / milliseconds(1));
}

}  // namespace

Client::Client(World* world, JobPlan* job, Rank rank, ProcessId process, bool reader)
    : Peer(process, job->uid),
      w_(world),
      job_(job),
      rank_(rank),
      reader_(reader),
      saves_left_(static_cast<int>(20 + world->Below(200))) {}

void Client::Start() {
  Connect();
}

void Client::Call(v1::ClientFrame frame, Duration deadline, Handler handler) {
  if (connection_ == 0) {
    return;
  }
  frame.set_id(next_id_++);
  if (const uint64_t hold = NameHold(frame, w_->NextHold()); hold != 0) {
    unanswered_holds_[frame.id()] = hold;
  }
  handlers_[frame.id()] = std::move(handler);
  w_->SendFrame(connection_, frame, deadline);
}

// Plans something; void if the process is killed or its connection breaks before.
void Client::Later(Duration delay, void (Client::*what)()) {
  w_->After(delay, [this, what, epoch = epoch_] {
    if (running() && epoch == epoch_) {
      (this->*what)();
    }
  });
}

void Client::OnReply(const SendReply& reply, const FilePtr& file) {
  unanswered_holds_.erase(reply.frame.id());
  const auto it = handlers_.find(reply.frame.id());
  if (it == handlers_.end()) {
    w_->oracle().Violated(
        absl::StrCat("a second or unasked answer: ", reply.frame.ShortDebugString()));
    return;
  }
  const Handler handler = std::move(it->second);
  handlers_.erase(it);
  handler(reply.frame, file);
}

void Client::OnClosed(ConnectionId) {
  connection_ = 0;
  for (const auto& [id, hold] : std::exchange(unanswered_holds_, {})) {
    doubtful_holds_.push_back(hold);
  }
  handlers_.clear();
  ++epoch_;
  if (!running() || zombie_) {
    return;
  }
  Later(milliseconds(10 + w_->Below(500)), &Client::Connect);
}

void Client::Kill() {
  if (!running()) {
    return;
  }
  dying_ = true;
  ++epoch_;
  if (connection_ != 0) {
    w_->CloseSocket(std::exchange(connection_, 0));
  }
}

void Client::End() {
  if (!alive_) {
    return;
  }
  Kill();
  alive_ = false;
  w_->Ended(this);
  w_->RankEnded(this);
}

void Client::Quit() {
  End();
}

void Client::Connect() {
  if (!w_->DaemonUp()) {
    return Later(milliseconds(300), &Client::Connect);
  }
  connection_ = w_->Open(this);
  // What it may hold without ever having heard of it.
  for (const uint64_t hold : std::exchange(doubtful_holds_, {})) {
    v1::ClientFrame frame;
    frame.mutable_release_read()->set_hold(hold);
    Call(frame, Duration(0), [](const v1::DaemonFrame&, const FilePtr&) {});
  }
  reader_ ? Read() : Join();
}

void Client::Join() {
  // Whoever joins promises that nothing of it writes any more.
  filling_.reset();
  filling_file_ = nullptr;
  v1::ClientFrame frame;
  v1::Join& join = *frame.mutable_join();
  join.set_job(job_->name);
  join.set_rank(rank_);
  join.set_world_size(job_->world_size);
  const Duration deadline = w_->Chance(0.3) ? Duration(0) : milliseconds(1000 + w_->Below(15'000));
  join.set_deadline_ms(Millis(deadline));
  if (attempt_ != 0) {
    join.set_attempt(attempt_);
  } else {
    join.set_launch(job_->launch);
  }
  Call(frame, deadline, [this](const v1::DaemonFrame& reply, const FilePtr&) { OnJoined(reply); });
}

void Client::OnJoined(const v1::DaemonFrame& frame) {
  if (frame.has_failure()) {
    const auto code = static_cast<absl::StatusCode>(frame.failure().code());
    if (code == absl::StatusCode::kUnavailable || code == absl::StatusCode::kDeadlineExceeded) {
      return Later(milliseconds(500), &Client::Join);
    }
    return Refused(frame.failure(), "join");
  }
  const bool back = attempt_ != 0 && attempt_ == frame.join().attempt();
  attempt_ = frame.join().attempt();
  w_->Seated(this, job_->name, attempt_, rank_);
  JobTruth& truth = w_->oracle().job(job_->name);
  if (frame.join().any_step()) {
    step_ = std::max(step_, frame.join().last_step());
  }
  if (back && training_) {
    return Train();
  }
  training_ = false;
  if (!frame.join().decided() && truth.acknowledged.empty() && w_->Chance(0.2)) {
    training_ = true;
    return Train();
  }
  Enter();
}

void Client::Enter() {
  training_ = false;
  v1::ClientFrame frame;
  v1::EnterSession& enter = *frame.mutable_enter_session();
  JobTruth& truth = w_->oracle().job(job_->name);
  asked_ = job_->choice;
  if (job_->choice) {
    truth.chosen.insert(attempt_);
    enter.set_choice(v1::EnterSession::CHOICE_STEP);
    enter.set_attempt(job_->choice->attempt);
    enter.set_step(job_->choice->step);
    for (Attempt a = 1; a <= attempt_; ++a) {
      if (job_->choice->attempt == 0 || job_->choice->attempt == a) {
        truth.asked_since.insert({a, job_->choice->step});
      }
    }
  }
  if (ReadsByItself()) {
    enter.set_reads_by_itself(true);
    truth.by_itself[attempt_].insert(rank_);
  }
  const Duration deadline = milliseconds(2000 + w_->Below(20'000));
  enter.set_deadline_ms(Millis(deadline));
  Call(frame, deadline,
       [this](const v1::DaemonFrame& reply, const FilePtr& file) { OnOutcome(reply, file); });
}

void Client::OnOutcome(const v1::DaemonFrame& frame, const FilePtr& file) {
  if (!frame.has_failure() && ReadsByItself()) {
    const v1::SessionOutcome& outcome = frame.enter_session();
    if (!outcome.done() || outcome.has_source()) {
      return w_->oracle().Violated(absl::StrCat("job ", job_->name, " rank ", rank_,
                                                " reads by itself and was given a source"));
    }
    if (asked_ && (asked_->step != outcome.step() ||
                   (asked_->attempt != 0 && asked_->attempt != outcome.attempt()))) {
      w_->oracle().Violated(absl::StrCat("job ", job_->name, " rank ", rank_, " asked for step ",
                                         asked_->step, " and was told step ", outcome.step()));
    }
    loaded_from_ = CheckpointId{outcome.attempt(), outcome.step()};
    return OnDone(outcome);
  }
  if (!frame.has_failure()) {
    return frame.enter_session().done() ? OnDone(frame.enter_session())
                                        : Load(frame.enter_session(), file);
  }
  const Failure& failure = frame.failure();
  if (failure.reason() == Failure::REASON_NOTHING_TO_RESTORE) {
    CheckpointId parent;
    const v1::JobState* now = w_->StateOf(job_->name);
    if (now == nullptr || !Oracle::Decided(*now, attempt_, parent) || parent.attempt != 0) {
      w_->oracle().Violated(
          absl::StrCat("job ", job_->name, " rank ", rank_,
                       " starts from scratch before that was decided: ", failure.message()));
    }
    training_ = true;
    return Train();
  }
  if (static_cast<absl::StatusCode>(failure.code()) == absl::StatusCode::kNotFound) {
    job_->choice.reset();
  }
  if (failure.reason() == Failure::REASON_UNREADABLE &&
      failure.message().find("the restore point that was set") != std::string::npos) {
    w_->ClearRestorePoint(*job_);  // what a person set is gone; a person takes it back
  } else if (failure.reason() == Failure::REASON_UNREADABLE && !w_->stormy() &&
             !w_->StateOf(job_->name)->restore_point().set() && w_->CanRestore(*job_)) {
    w_->oracle().Violated(absl::StrCat("job ", job_->name, ": ", failure.message(),
                                       ", although a committed step is there"));
  }
  if (failure.reason() == Failure::REASON_SUPERSEDED ||
      static_cast<absl::StatusCode>(failure.code()) == absl::StatusCode::kFailedPrecondition) {
    return Refused(failure, "restore");
  }
  Later(milliseconds(500),
        w_->stormy() && w_->Chance(0.1) ? &Client::TryToSaveInstead : &Client::Enter);
}

// Its restore failed, and it saves all the same. What it saves must not push aside what there was.
void Client::TryToSaveInstead() {
  v1::ClientFrame frame;
  frame.mutable_begin_save()->set_step(++step_);
  frame.mutable_begin_save()->set_slot_bytes(job_->slot_bytes);
  Call(frame, Duration(0), [this](const v1::DaemonFrame& reply, const FilePtr& file) {
    if (reply.has_failure()) {
      return Refused(reply.failure(), "save");
    }
    training_ = true;
    OnGrant(reply, file);
  });
}

void Client::Load(v1::SessionOutcome outcome, FilePtr file) {
  const FileRecord record = *file->record;
  w_->After(milliseconds(w_->Below(3000)), [this, outcome, file, record, epoch = epoch_] {
    if (!running() || epoch != epoch_) {
      return;
    }
    JobTruth& truth = w_->oracle().job(job_->name);
    const CheckpointId id = record.copy.id.checkpoint();
    v1::ClientFrame frame;
    v1::ReportLoad& report = *frame.mutable_report_load();
    report.set_session(outcome.session());
    report.set_round(outcome.round());
    report.set_loaded(true);
    if (file->token != record.token) {
      report.set_loaded(false);
      report.set_copy_is_bad(true);
      report.set_problem("digests differ");
      if (truth.damaged.insert(id).second && file->content != ShardId{}) {
        w_->oracle().Violated(
            absl::StrCat(record.copy.id.ToString(), " changed after it was sealed"));
      }
    } else if (file->content != record.copy.id || record.copy.id.rank != rank_ ||
               record.copy.id.step != outcome.step() ||
               record.copy.id.attempt != outcome.attempt() || record.copy.job_name != job_->name) {
      w_->oracle().Violated(absl::StrCat("job ", job_->name, " rank ", rank_, " was given ",
                                         file->content.ToString(), " for step ", outcome.step()));
    } else if (asked_ && (asked_->step != id.step ||
                          (asked_->attempt != 0 && asked_->attempt != id.attempt))) {
      w_->oracle().Violated(absl::StrCat("job ", job_->name, " rank ", rank_, " asked for step ",
                                         asked_->step, " and was given step ", id.step));
    } else if (w_->stormy() && w_->Chance(0.02)) {
      report.set_loaded(false);
      report.set_problem("cannot map it");
      report.set_wants_mismatch(w_->Chance(0.5));
    }
    if (!report.loaded()) {
      truth.passed_over[attempt_].insert(id);
    }
    if (report.loaded()) {
      truth.loaded[{attempt_, id}].insert(rank_);
    }
    loaded_from_ = report.loaded() ? std::optional(id) : std::nullopt;
    const Duration deadline = milliseconds(2000 + w_->Below(20'000));
    report.set_deadline_ms(Millis(deadline));
    Call(frame, deadline,
         [this](const v1::DaemonFrame& reply, const FilePtr& next) { OnOutcome(reply, next); });
    Confirm(outcome.source());
    // Views may be kept for a while, where there is a slot to spare for it; most callers copy out
    // and let go.
    if (w_->Chance(0.8) || !(w_->stormy() || w_->roomy())) {
      Release(outcome.source());
    } else {
      w_->After(seconds(w_->Below(20)), [this, source = outcome.source()] { Release(source); });
    }
  });
}

void Client::OnDone(const v1::SessionOutcome& outcome) {
  const CheckpointId parent{outcome.attempt(), outcome.step()};
  CheckpointId durable;
  const v1::JobState* state = w_->StateOf(job_->name);
  if (state == nullptr || !Oracle::Decided(*state, attempt_, durable) || durable != parent) {
    w_->oracle().Violated(absl::StrCat("job ", job_->name, " attempt ", attempt_, " rank ", rank_,
                                       " was told that it restored step ", parent.step,
                                       ", which is not what was decided durably"));
  }
  if (loaded_from_ != parent) {
    w_->oracle().Violated(absl::StrCat("job ", job_->name, " rank ", rank_,
                                       " trains on with another step than was agreed"));
  }
  ++w_->restores_;
  step_ = parent.step;
  training_ = true;
  job_->choice.reset();
  Train();
}

}  // namespace holdfast::sim
