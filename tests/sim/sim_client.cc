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
    : w_(world),
      job_(job),
      rank_(rank),
      process_(process),
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

void Client::OnClosed() {
  connection_ = 0;
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
}

void Client::Quit() {
  End();
}

void Client::Connect() {
  if (!w_->DaemonUp()) {
    return Later(milliseconds(300), &Client::Connect);
  }
  connection_ = w_->Open(this);
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
  joined_in_life_ = w_->life();
  // (A daemon that was restarted knows its ranks by what they sealed, or when they come back.)
  for (const auto& other : w_->clients()) {
    if (other.get() != this && other->alive() && !other->reader() && other->job_ == job_ &&
        other->rank_ == rank_ && other->attempt_ == attempt_ &&
        other->joined_in_life_ == joined_in_life_) {
      w_->oracle().Violated(absl::StrCat("job ", job_->name, " attempt ", attempt_, " rank ", rank_,
                                         " is ", process_.ToString(), " and ",
                                         other->process_.ToString()));
    }
  }
  JobTruth& truth = w_->oracle().job(job_->name);
  truth.world_size = job_->world_size;
  if (frame.join().any_step()) {
    step_ = std::max(step_, frame.join().last_step());
  }
  if (back && training_) {
    return Train();
  }
  training_ = false;
  if (!frame.join().decided() && truth.acknowledged.empty() && w_->Chance(0.2)) {
    truth.saved_unrestored.insert(attempt_);
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
  if (job_->choice) {
    enter.set_choice(v1::EnterSession::CHOICE_STEP);
    enter.set_attempt(job_->choice->attempt);
    enter.set_step(job_->choice->step);
    for (Attempt a = 1; a <= attempt_; ++a) {
      if (job_->choice->attempt == 0 || job_->choice->attempt == a) {
        truth.asked_since.insert({a, job_->choice->step});
      }
    }
  }
  const Duration deadline = milliseconds(2000 + w_->Below(20'000));
  enter.set_deadline_ms(Millis(deadline));
  Call(frame, deadline,
       [this](const v1::DaemonFrame& reply, const FilePtr& file) { OnOutcome(reply, file); });
}

void Client::OnOutcome(const v1::DaemonFrame& frame, const FilePtr& file) {
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
  } else if (failure.reason() == Failure::REASON_UNREADABLE &&
             w_->oracle().NewestCommitted(*w_->StateOf(job_->name), w_->files()) && !w_->stormy()) {
    w_->oracle().Violated(absl::StrCat("job ", job_->name, ": ", failure.message(),
                                       ", although a committed step is there"));
  }
  if (failure.reason() == Failure::REASON_SUPERSEDED ||
      static_cast<absl::StatusCode>(failure.code()) == absl::StatusCode::kFailedPrecondition) {
    return Refused(failure, "restore");
  }
  Later(milliseconds(500), &Client::Enter);
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
    } else if (w_->stormy() && w_->Chance(0.02)) {
      report.set_loaded(false);
      report.set_problem("cannot map it");
      report.set_wants_mismatch(w_->Chance(0.5));
    }
    if (!report.loaded()) {
      truth.passed_over[attempt_].insert(id);
    }
    loaded_from_ = report.loaded() ? std::optional(id) : std::nullopt;
    const Duration deadline = milliseconds(2000 + w_->Below(20'000));
    report.set_deadline_ms(Millis(deadline));
    Call(frame, deadline,
         [this](const v1::DaemonFrame& reply, const FilePtr& next) { OnOutcome(reply, next); });
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

void Client::Train() {
  Later(milliseconds(1 + w_->Below(static_cast<uint64_t>(2 * job_->pace_ms))), &Client::Begin);
}

void Client::Begin() {
  // Ranks of a training run wait for each other now and then.
  for (const Client* other : job_->ranks) {
    if (other != nullptr && other->running() && other->training_ && other->attempt_ == attempt_ &&
        other->step_ + 6 < step_) {
      return Train();
    }
  }
  if (w_->stormy() && --saves_left_ < 0) {
    // Some runs end in good order; some go back and restore again.
    saves_left_ = static_cast<int>(20 + w_->Below(200));
    v1::ClientFrame frame;
    if (w_->Chance(0.5)) {
      frame.mutable_leave();
      for (const auto& [slot, file] : std::exchange(mapped_, {})) {
        file->mapped_by.erase(process_);
      }
      attempt_ = 0;
      return Call(frame, Duration(0), [this](const v1::DaemonFrame&, const FilePtr&) { Quit(); });
    }
    v1::Join& join = *frame.mutable_join();
    join.set_job(job_->name);
    join.set_rank(rank_);
    join.set_world_size(job_->world_size);
    join.set_leave_attempt(attempt_);
    join.set_deadline_ms(5000);
    return Call(frame, seconds(5),
                [this](const v1::DaemonFrame& reply, const FilePtr&) { OnJoined(reply); });
  }
  step_ += w_->stormy() && w_->Chance(0.03) ? 2 : 1;
  v1::ClientFrame frame;
  if (std::any_of(mapped_.begin(), mapped_.end(),
                  [&](const auto& m) { return m.second->bytes != job_->slot_bytes; })) {
    v1::ClientFrame release;
    for (const auto& [slot, file] : std::exchange(mapped_, {})) {
      file->mapped_by.erase(process_);
      release.mutable_release_slots()->add_slots(slot);
    }
    Call(release, Duration(0), [](const v1::DaemonFrame&, const FilePtr&) {});
  }
  if (w_->Chance(0.02)) {
    --step_;
    return Reserve();
  }
  const Duration deadline = w_->Chance(0.7) ? Duration(0) : milliseconds(w_->Below(4000));
  frame.mutable_begin_save()->set_step(step_);
  frame.mutable_begin_save()->set_slot_bytes(job_->slot_bytes);
  frame.mutable_begin_save()->set_deadline_ms(Millis(deadline));
  ++job_->saves[rank_];
  if (w_->Chance(0.05)) {
    Later(milliseconds(w_->Below(500)), &Client::Replay);
  }
  Call(frame, deadline,
       [this](const v1::DaemonFrame& reply, const FilePtr& file) { OnGrant(reply, file); });
}

// Asks again until no descriptor comes.
void Client::Reserve() {
  v1::ClientFrame frame;
  frame.mutable_reserve()->set_slot_bytes(job_->slot_bytes);
  frame.mutable_reserve()->set_deadline_ms(w_->Chance(0.3) ? 0 : 3000);
  Call(frame, seconds(3), [this](const v1::DaemonFrame& reply, const FilePtr& file) {
    if (reply.has_failure()) {
      return Refused(reply.failure(), "reserve");
    }
    if (!reply.reserve().with_descriptor()) {
      return Train();
    }
    Map(reply.reserve().slot(), file);
    Reserve();
  });
}

void Client::Map(SlotId slot, const FilePtr& file) {
  if (const auto old = mapped_.find(slot); old != mapped_.end()) {
    old->second->mapped_by.erase(process_);
  }
  mapped_[slot] = file;
  file->mapped_by.insert(process_);
}

void Client::OnGrant(const v1::DaemonFrame& frame, const FilePtr& file) {
  if (frame.has_failure()) {
    return Refused(frame.failure(), "save");
  }
  const v1::Grant& grant = frame.begin_save();
  if (grant.with_descriptor()) {
    Map(grant.slot(), file);
  } else if (mapped_[grant.slot()] != file) {
    w_->oracle().Violated(absl::StrCat(
        "slot ", grant.slot(),
        " was granted without a descriptor to a process that has another file mapped"));
    return;
  }
  filling_ = grant;
  filling_file_ = file;
  filling_step_ = step_;
  Write(0);
}

// Threads of a dying or superseded process may go on writing for as long as it exists.
void Client::Write(int part) {
  const FilePtr file = filling_file_;
  const v1::Grant grant = *filling_;
  const Step step = filling_step_;
  w_->After(milliseconds(1 + w_->Below(static_cast<uint64_t>(job_->pace_ms))), [this, file, grant,
                                                                                step, part,
                                                                                epoch = epoch_] {
    if (!alive_ || filling_file_ != file || !filling_ ||
        filling_->generation() != grant.generation()) {
      return;
    }
    if (file->record) {
      w_->oracle().Violated(absl::StrCat(process_.ToString(), " wrote into slot ", file->slot,
                                         ", which holds the sealed ",
                                         file->record->copy.id.ToString()));
      return;
    }
    file->token = w_->NewToken();
    file->content = {};
    if (part < 2) {
      return Write(part + 1);
    }
    const ShardId id{JobUuid::FromBytes(grant.job_uuid()).value(), grant.attempt(), step, rank_};
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

void Client::Seal() {
  v1::ClientFrame frame;
  const v1::Grant grant = *std::exchange(filling_, std::nullopt);
  filling_file_ = nullptr;
  const Step step = filling_step_;
  if (w_->stormy() && w_->Chance(0.03)) {
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
  stale_ = frame;
  const v1::JobState* state = w_->StateOf(job_->name);
  const bool over = state != nullptr && state->highest_attempt() > attempt_;
  Call(frame, seconds(10), [this, step, over](const v1::DaemonFrame& reply, const FilePtr&) {
    if (reply.has_failure()) {
      return Refused(reply.failure(), "seal");
    }
    if (over) {
      w_->oracle().Violated(absl::StrCat("job ", job_->name, " attempt ", attempt_, " sealed step ",
                                         step, " after it was superseded"));
    }
    JobTruth& truth = w_->oracle().job(job_->name);
    std::set<Rank>& ranks = truth.acknowledged[{attempt_, step}];
    ranks.insert(rank_);
    if (ranks.size() == job_->world_size) {
      w_->CountCommit(job_->name);
    }
    if (w_->Chance(0.2)) {
      v1::ClientFrame await;
      await.mutable_await_save()->set_step(step);
      await.mutable_await_save()->set_stage(v1::AwaitSave::STAGE_COMMITTED);
      await.mutable_await_save()->set_deadline_ms(w_->Below(5000));
      Call(await, seconds(5), [](const v1::DaemonFrame&, const FilePtr&) {});
    }
    Train();
  });
}

void Client::Refused(const v1::Failure& failure, const char* what) {
  w_->Trace(absl::StrCat(job_->name, " rank ", rank_, " ", process_.ToString(), " ", what, ": ",
                         failure.message()));
  switch (failure.reason()) {
    case Failure::REASON_SUPERSEDED:
      if (w_->stormy() && w_->Chance(0.3)) {
        // It does not listen: it lingers, with whatever it has mapped, until somebody ends it.
        zombie_ = true;
        w_->After(seconds(w_->Below(30)), [this] { Quit(); });
        return Train();
      }
      return Quit();
    case Failure::REASON_UNKNOWN_SESSION:
      return Later(milliseconds(100), &Client::Join);
    case Failure::REASON_SHED:
    case Failure::REASON_ABANDONED:
    case Failure::REASON_NO_ROOM:
      return Train();
    default:
      break;
  }
  if (std::string(what) == "join") {
    return Quit();
  }
  const auto code = static_cast<absl::StatusCode>(failure.code());
  if (code == absl::StatusCode::kFailedPrecondition) {
    // A session is open or failed, or the attempt has moved on without this rank.
    return ++join_failures_ > 5 ? Quit() : Later(milliseconds(500), &Client::Enter);
  }
  if (code == absl::StatusCode::kInvalidArgument && std::string(what) == "save") {
    return Train();  // its last step was counted although the answer was lost
  }
  Train();
}

void Client::Release(const v1::Source& source) {
  if (!running()) {
    return;
  }
  const FilePtr file = w_->FindFile(source.slot());
  if (!file || connection_ == 0 || file->read_by.count(process_) == 0) {
    return;
  }
  if (--file->read_by[process_] == 0) {
    file->read_by.erase(process_);
  }
  v1::ClientFrame frame;
  frame.mutable_release_read()->set_slot(source.slot());
  frame.mutable_release_read()->set_generation(source.generation());
  stale_ = frame;
  Call(frame, Duration(0), [](const v1::DaemonFrame&, const FilePtr&) {});
}

// Says again what it said long ago: of a filling or a hold that is over.
void Client::Replay() {
  const FilePtr file =
      stale_ && stale_->has_release_read() ? w_->FindFile(stale_->release_read().slot()) : nullptr;
  const bool still_true = file && file->note.generation() == stale_->release_read().generation();
  if (stale_ && !still_true) {
    Call(*stale_, Duration(0), [](const v1::DaemonFrame&, const FilePtr&) {});
  }
}

// Attaches, looks for a while, lets go or dies with it; several times.
void Client::Read() {
  v1::ClientFrame frame;
  frame.mutable_attach()->set_job(job_->name);
  frame.mutable_attach()->set_rank(rank_);
  Call(frame, Duration(0), [this](const v1::DaemonFrame& reply, const FilePtr& file) {
    if (reply.has_failure()) {
      return Quit();
    }
    const v1::Source source = reply.attach();
    const ShardId id = file->record->copy.id;
    const uint64_t token = file->record->token;
    Later(seconds(w_->Below(10)), &Client::Replay);
    w_->After(seconds(w_->Below(20)), [this, source, file, id, token] {
      if (!running()) {
        return;
      }
      if (file->token != token &&
          w_->oracle().job(job_->name).damaged.count(id.checkpoint()) == 0) {
        w_->oracle().Violated(absl::StrCat(id.ToString(), " changed under its reader"));
      }
      Replay();
      Release(source);
      saves_left_ -= 40;
      saves_left_ < 0 ? Quit() : Later(milliseconds(w_->Below(3000)), &Client::Read);
    });
  });
}

}  // namespace holdfast::sim
