// How a client trains, saves and reads.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "tests/sim/sim_client.h"

namespace holdfast::sim {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using v1::Failure;

uint64_t Millis(Duration d) {
  return static_cast<uint64_t>(d / milliseconds(1));
}

}  // namespace

void Client::Train() {
  const int64_t pace = job_->pace_ms * (job_->uneven && rank_ == 0 ? 8 : 2);
  Later(milliseconds(1 + w_->Below(static_cast<uint64_t>(pace))), &Client::Begin);
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
    return LeaveOrRestoreAgain();
  }
  step_ += w_->stormy() && w_->Chance(0.03) ? 2 : 1;
  v1::ClientFrame frame;
  if (std::any_of(mapped_.begin(), mapped_.end(),
                  [&](const auto& m) { return m.second->bytes != job_->slot_bytes; })) {
    v1::ClientFrame release;
    for (const auto& [slot, file] : std::exchange(mapped_, {})) {
      file->mapped_by.erase(process());
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

// Some runs end in good order; some go back and restore again.
void Client::LeaveOrRestoreAgain() {
  saves_left_ = static_cast<int>(20 + w_->Below(200));
  v1::ClientFrame frame;
  if (w_->Chance(0.5)) {
    frame.mutable_leave();
    for (const auto& [slot, file] : std::exchange(mapped_, {})) {
      file->mapped_by.erase(process());
    }
    attempt_ = 0;
    w_->Unseated(this);
    return Call(frame, Duration(0), [this](const v1::DaemonFrame&, const FilePtr&) { Quit(); });
  }
  v1::Join& join = *frame.mutable_join();
  join.set_job(job_->name);
  join.set_rank(rank_);
  join.set_world_size(job_->world_size);
  join.set_leave_attempt(attempt_);
  join.set_deadline_ms(5000);
  Call(frame, seconds(5),
       [this](const v1::DaemonFrame& reply, const FilePtr&) { OnJoined(reply); });
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
    old->second->mapped_by.erase(process());
  }
  mapped_[slot] = file;
  file->mapped_by.insert(process());
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
  w_->Began(job_->name, {grant.attempt(), step_});
  filling_ = grant;
  filling_file_ = file;
  filling_step_ = step_;
  if (w_->stormy() && w_->Chance(0.003)) {
    // It hangs: others must not wait for it for ever.
    return w_->After(seconds(60), [this, epoch = epoch_] {
      if (running() && epoch == epoch_) {
        Write(0);
      }
    });
  }
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
      w_->oracle().Violated(absl::StrCat(process().ToString(), " wrote into slot ", file->slot,
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
    if (ranks.size() == truth.World(attempt_)) {
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
  w_->Trace(absl::StrCat(job_->name, " rank ", rank_, " ", process().ToString(), " ", what, ": ",
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
    case Failure::REASON_TOO_LARGE:
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
  if (!file || connection_ == 0 || file->read_by.count(process()) == 0) {
    return;
  }
  if (--file->read_by[process()] == 0) {
    file->read_by.erase(process());
  }
  v1::ClientFrame frame;
  frame.mutable_release_read()->set_hold(source.hold());
  released_.insert({source.slot(), source.generation()});
  stale_ = frame;
  Call(frame, Duration(0), [](const v1::DaemonFrame&, const FilePtr&) {});
}

// Says again what it said long ago: of a filling or a hold that is over.
void Client::Replay() {
  if (stale_) {
    Call(*stale_, Duration(0), [](const v1::DaemonFrame&, const FilePtr&) {});
  }
}

// What was read is confirmed while it is held.
void Client::Confirm(const v1::Source& source) {
  v1::ClientFrame frame;
  frame.mutable_confirm_read()->set_slot(source.slot());
  frame.mutable_confirm_read()->set_generation(source.generation());
  Call(frame, Duration(0), [this, source](const v1::DaemonFrame& reply, const FilePtr&) {
    if (reply.has_failure()) {
      w_->oracle().Violated(absl::StrCat(process().ToString(), " holds slot ", source.slot(),
                                         " and is told: ", reply.failure().message()));
    }
  });
}

// It holds another filling of a slot than the one that it read before: that one is gone.
void Client::ConfirmOld(const v1::Source& held) {
  for (const auto& [slot, generation] : released_) {
    if (slot != held.slot() || generation == held.generation()) {
      continue;
    }
    v1::ClientFrame frame;
    frame.mutable_confirm_read()->set_slot(slot);
    frame.mutable_confirm_read()->set_generation(generation);
    return Call(frame, Duration(0), [this, held](const v1::DaemonFrame& reply, const FilePtr&) {
      if (!reply.has_failure()) {
        w_->oracle().Violated(absl::StrCat("a read of slot ", held.slot(),
                                           " was confirmed although it was filled again since"));
      }
    });
  }
}

// Attaches, looks for a while, lets go or dies with it; several times.
void Client::Read() {
  v1::ClientFrame frame;
  frame.mutable_attach()->set_job(job_->name);
  frame.mutable_attach()->set_rank(rank_);
  // Some can read from any tier.
  const bool any_tier = process().pid % 2 == 0;
  const Duration deadline = any_tier ? Duration(seconds(20)) : Duration(0);
  frame.mutable_attach()->set_any_tier(any_tier);
  frame.mutable_attach()->set_deadline_ms(static_cast<uint64_t>(deadline / milliseconds(1)));
  Call(frame, deadline, [this](const v1::DaemonFrame& reply, const FilePtr& file) {
    if (reply.has_failure()) {
      return Quit();
    }
    const v1::Source source = reply.attach();
    if (source.hold() == 0) {  // an open file: nobody waits for its reader, and it for nobody
      if (source.tier() == "memory" || source.rank() != rank_) {
        w_->oracle().Violated(absl::StrCat("a reader of rank ", rank_, " was given rank ",
                                           source.rank(), " of ", source.tier(), " unheld"));
      }
      saves_left_ -= 40;
      return saves_left_ < 0 ? Quit() : Later(milliseconds(w_->Below(3000)), &Client::Read);
    }
    const ShardId id = file->record->copy.id;
    const uint64_t token = file->record->token;
    Later(seconds(w_->Below(10)), &Client::Replay);
    ConfirmOld(source);
    w_->After(seconds(w_->Below(20)), [this, source, file, id, token] {
      if (!running()) {
        return;
      }
      if (file->token != token &&
          w_->oracle().job(job_->name).damaged.count(id.checkpoint()) == 0) {
        w_->oracle().Violated(absl::StrCat(id.ToString(), " changed under its reader"));
      }
      Replay();
      Confirm(source);
      Release(source);
      saves_left_ -= 40;
      saves_left_ < 0 ? Quit() : Later(milliseconds(w_->Below(3000)), &Client::Read);
    });
  });
}

}  // namespace holdfast::sim
