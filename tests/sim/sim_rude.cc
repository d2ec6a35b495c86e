#include "tests/sim/sim_rude.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace holdfast::sim {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr char kOwnJob[] = "rude";

bool WantsSource(const v1::ClientFrame& frame) {
  return frame.has_attach() || frame.has_enter_session() || frame.has_report_load();
}

}  // namespace

Rude::Rude(World* world, ProcessId process, uint32_t uid) : Peer(process, uid), w_(world) {}

void Rude::Start() {
  Act();
  if (w_->stormy()) {
    w_->After(seconds(5 + w_->Below(60)), [this] { End(); });
  }
}

void Rude::End() {
  if (!alive_) {
    return;
  }
  alive_ = false;
  const std::map<ConnectionId, Connection> open = std::move(connections_);
  connections_.clear();
  for (const auto& [id, connection] : open) {
    w_->CloseSocket(id);
  }
  w_->Ended(this);
}

void Rude::OnClosed(ConnectionId id) {
  if (const auto it = connections_.find(id); it != connections_.end()) {
    // (With a join under way it has promised already that it writes no more.)
    const bool promised = std::any_of(asked_.begin(), asked_.end(), [id](const auto& a) {
      return a.first.first != id && a.second.frame.has_join();
    });
    if (it->second.filling && !promised) {
      lost_.push_back(*it->second.filling);
    }
    connections_.erase(it);
  }
  std::erase_if(asked_, [id](const auto& a) { return a.first.first == id; });
}

bool Rude::Forsook(const SendReply& reply) const {
  const auto asked = asked_.find({reply.connection, reply.frame.id()});
  return asked != asked_.end() && asked->second.promises != promises_;
}

// ---- what it does ----

void Rude::Act() {
  if (!running()) {
    return;
  }
  w_->After(milliseconds(1 + w_->Below(w_->Chance(0.1) ? 3000 : 150)), [this] { Act(); });
  if (!w_->DaemonUp()) {
    return;
  }
  Scribble();
  if (connections_.empty() || (connections_.size() < 3 && w_->Chance(0.05))) {
    connections_[w_->Open(this)] = {};
  }
  auto it = connections_.begin();
  std::advance(it, static_cast<ptrdiff_t>(w_->Below(connections_.size())));
  const ConnectionId id = it->first;
  if (w_->Chance(0.03)) {
    w_->CloseSocket(id);
    return OnClosed(id);
  }
  // Mostly one request, sometimes as many as are allowed and more.
  for (uint64_t left = w_->Chance(0.005) ? 80 : 1 + w_->Below(2);
       left > 0 && connections_.count(id) > 0; --left) {
    Send(id, AnyFrame(connections_.at(id)));
  }
}

void Rude::Send(ConnectionId id, v1::ClientFrame frame) {
  frame.set_id(next_id_++);
  NameHold(frame, w_->NextHold());
  Note(connections_.at(id), frame);
  asked_[{id, frame.id()}] = {frame, promises_};
  w_->SendFrame(id, frame, milliseconds(60'000));
}

v1::ClientFrame Rude::AnyFrame(Connection& connection) {
  v1::ClientFrame frame;
  const bool seated = connection.seat.has_value();
  switch (!seated && w_->Chance(0.6) ? 0 : w_->Below(16)) {
    case 0:
      JoinFrame(*frame.mutable_join());
      break;
    case 1:
      frame.mutable_reserve()->set_slot_bytes(w_->Chance(0.1) ? w_->Below(100) * kSlotBytes
                                                              : kSlotBytes);
      frame.mutable_reserve()->set_slots(static_cast<uint32_t>(w_->Below(6)));
      frame.mutable_reserve()->set_deadline_ms(AnyDeadline());
      break;
    case 2:
    case 3:
    case 4:
      frame.mutable_begin_save()->set_step(AnyStep(connection));
      frame.mutable_begin_save()->set_slot_bytes(w_->Chance(0.05) ? w_->Below(100) * kSlotBytes
                                                                  : kSlotBytes);
      frame.mutable_begin_save()->set_deadline_ms(AnyDeadline());
      break;
    case 5:
    case 6:
    case 7:
      SealFrame(connection, *frame.mutable_seal());
      break;
    case 8: {
      v1::AbortSave& abort = *frame.mutable_abort_save();
      v1::Seal like;
      SealFrame(connection, like);
      abort.set_step(like.step());
      abort.set_slot(like.slot());
      abort.set_generation(like.generation());
      break;
    }
    case 9:
      frame.mutable_await_save()->set_step(AnyStep(connection));
      frame.mutable_await_save()->set_stage(static_cast<v1::AwaitSave::Stage>(w_->Below(5)));
      frame.mutable_await_save()->set_deadline_ms(AnyDeadline());
      break;
    case 10:
      EnterFrame(connection, *frame.mutable_enter_session());
      break;
    case 11:
      ReportFrame(connection, *frame.mutable_report_load());
      break;
    case 12:
      frame.mutable_attach()->set_job(AnyJob());
      frame.mutable_attach()->set_rank(static_cast<uint32_t>(w_->Below(4)));
      break;
    case 13:
      ReleaseFrame(*frame.mutable_release_read());
      break;
    case 14:
      if (w_->Chance(0.5)) {
        frame.mutable_confirm_read()->set_slot(static_cast<uint32_t>(w_->Below(20)));
        frame.mutable_confirm_read()->set_generation(w_->Below(100));
      } else {
        for (uint64_t left = w_->Below(4); left > 0; --left) {
          frame.mutable_release_slots()->add_slots(static_cast<uint32_t>(w_->Below(20)));
        }
        frame.mutable_release_slots();
      }
      break;
    default:
      if (w_->Chance(0.2)) {
        frame.mutable_leave();
      } else {
        frame.mutable_attach()->set_job(kOwnJob);
      }
  }
  return frame;
}

uint64_t Rude::AnyDeadline() {
  return w_->Chance(0.4) ? 0 : w_->Chance(0.7) ? 1 + w_->Below(60) : w_->Below(10'000);
}

// While the others must get on, only what they cannot be hurt by: their own user may do anything to
// them.
std::string Rude::AnyJob() {
  const JobPlan& job = w_->jobs()[w_->Below(w_->jobs().size())];
  const v1::JobState* state = w_->StateOf(job.name);  // (a name that is free would become its own)
  if (state != nullptr && state->uid() == job.uid &&
      (job.uid != uid() ? w_->Chance(0.3) : w_->stormy() && w_->Chance(0.1))) {
    return job.name;
  }
  return w_->stormy() || w_->roomy() ? kOwnJob : "";
}

void Rude::JoinFrame(v1::Join& join) {
  join.set_job(AnyJob());
  join.set_rank(static_cast<uint32_t>(w_->Below(w_->Chance(0.05) ? 5 : 2)));
  join.set_world_size(w_->Chance(0.8) ? 2 : static_cast<uint32_t>(w_->Below(4)));
  if (!w_->stormy()) {
    join.set_world_size(std::min<uint32_t>(join.world_size(), 2));
  }
  join.set_deadline_ms(AnyDeadline());
  const v1::JobState* state = w_->StateOf(join.job());
  const Attempt newest = state == nullptr ? 0 : state->highest_attempt();
  switch (w_->Below(10)) {
    case 0:
    case 1:
      join.set_attempt(newest + w_->Below(2));
      break;
    case 2:
      join.set_leave_attempt(newest + w_->Below(2));
      break;
    case 3:
      join.set_launch(absl::StrCat("launch", w_->Below(5)));
      break;
    default:
      break;
  }
}

Step Rude::AnyStep(const Connection& connection) {
  Step newest = 0;
  for (const auto& [slot, file] : w_->files()) {
    if (file->record && connection.seat && file->record->copy.job_name == connection.seat->job &&
        file->record->copy.id.attempt == connection.seat->attempt) {
      newest = std::max(newest, file->record->copy.id.step);
    }
  }
  return w_->Chance(0.02) ? w_->Below(UINT64_MAX) % 1'000'000 : newest + w_->Below(4);
}

// Of its own filling, with a good record or a torn one; or of what it was never given.
void Rude::SealFrame(Connection& connection, v1::Seal& seal) {
  seal.set_record_bytes(w_->Chance(0.95) ? 100 : w_->Below(2 * kSlotBytes));
  seal.set_record_offset(w_->Chance(0.95) ? kSlotBytes / 2 : w_->Below(UINT64_MAX));
  if (!connection.filling || w_->Chance(0.2)) {
    seal.set_slot(static_cast<uint32_t>(w_->Below(20)));
    const FilePtr file = w_->FindFile(seal.slot());
    seal.set_generation(file && w_->Chance(0.8) ? file->note.generation() : w_->Below(100));
    seal.set_step(file && file->record ? file->record->copy.id.step : AnyStep(connection));
    return;
  }
  const Filling& filling = *connection.filling;
  seal.set_slot(filling.slot);
  seal.set_generation(w_->Chance(0.9) ? filling.generation : filling.generation - 1);
  seal.set_step(w_->Chance(0.9) ? filling.shard.step : filling.shard.step + 1);
}

void Rude::EnterFrame(const Connection& connection, v1::EnterSession& enter) {
  enter.set_deadline_ms(AnyDeadline());
  if (w_->Chance(0.7) || !connection.seat) {
    return;
  }
  enter.set_choice(v1::EnterSession::CHOICE_STEP);
  enter.set_step(AnyStep(connection));
  enter.set_attempt(w_->Chance(0.5) ? 0 : connection.seat->attempt - w_->Below(2));
}

void Rude::ReportFrame(const Connection& connection, v1::ReportLoad& report) {
  report.set_session(connection.session && w_->Chance(0.9) ? connection.session->id
                                                           : w_->Below(1000));
  report.set_round(connection.session && w_->Chance(0.9) ? connection.session->round
                                                         : static_cast<uint32_t>(w_->Below(4)));
  report.set_loaded(w_->Chance(0.7));
  report.set_copy_is_bad(!report.loaded() && w_->Chance(0.3));
  report.set_wants_mismatch(!report.loaded() && w_->Chance(0.3));
  report.set_problem("so it says");
  report.set_deadline_ms(AnyDeadline());
}

// Its own holds, and others'. (While an answer with a hold may be under way it keeps its hands off:
// it might let go of what it is about to get.)
void Rude::ReleaseFrame(v1::ReleaseRead& release) {
  const bool coming = std::any_of(asked_.begin(), asked_.end(),
                                  [](const auto& a) { return WantsSource(a.second.frame); });
  if (!holds_.empty() && w_->Chance(0.7)) {
    return release.set_hold(holds_.back().id);
  }
  release.set_hold(coming ? UINT64_MAX : w_->Below(w_->NextHold()));
}

// ---- what that means for what is true ----

void Rude::Note(Connection& connection, const v1::ClientFrame& frame) {
  JobTruth* truth = connection.seat ? &w_->oracle().job(connection.seat->job) : nullptr;
  if (frame.has_join() || frame.has_leave()) {
    Promise();
  }
  if (frame.has_leave()) {
    for (const auto& [slot, file] : std::exchange(mapped_, {})) {
      file->mapped_by.erase(process());
    }
    w_->Unseated(this);
  }
  if (frame.has_release_slots()) {
    Promise();
    for (const uint32_t slot : frame.release_slots().slots()) {
      if (const auto mine = mapped_.find(slot); mine != mapped_.end()) {
        mine->second->mapped_by.erase(process());
        mapped_.erase(mine);
      }
    }
  }
  if (frame.has_release_read()) {
    const auto mine = std::find_if(holds_.begin(), holds_.end(), [&](const Hold& hold) {
      return hold.id == frame.release_read().hold();
    });
    if (mine != holds_.end()) {
      const FilePtr file = w_->FindFile(mine->slot);
      holds_.erase(mine);
      if (file && --file->read_by[process()] <= 0) {
        file->read_by.erase(process());
      }
    }
  }
  const std::optional<Filling>& filling = connection.filling;
  const auto is_filling = [&](const auto& f) {
    return filling && f.slot() == filling->slot && f.generation() == filling->generation &&
           f.step() == filling->shard.step;
  };
  if (frame.has_seal() && is_filling(frame.seal())) {
    FillAndForget(connection);
  } else if (frame.has_abort_save() && is_filling(frame.abort_save())) {
    connection.filling.reset();
  }
  if (truth == nullptr) {
    return;
  }
  if (frame.has_enter_session() &&
      frame.enter_session().choice() == v1::EnterSession::CHOICE_STEP) {
    truth->chosen.insert(connection.seat->attempt);
    for (Attempt a = 1; a <= connection.seat->attempt; ++a) {
      truth->asked_since.insert({a, frame.enter_session().step()});
    }
  }
  if (frame.has_report_load() && connection.session) {
    const CheckpointId id = connection.session->checkpoint;
    if (frame.report_load().loaded()) {
      truth->loaded[{connection.seat->attempt, id}].insert(connection.seat->rank);
    } else {
      truth->passed_over[connection.seat->attempt].insert(id);
      if (frame.report_load().copy_is_bad()) {
        truth->damaged.insert(id);
      }
    }
  }
}

void Rude::FillAndForget(Connection& connection) {
  const Filling filling = *std::exchange(connection.filling, std::nullopt);
  if (filling.file->record) {
    w_->oracle().Violated(absl::StrCat(process().ToString(), " wrote into slot ", filling.slot,
                                       ", which holds a sealed copy"));
  }
  filling.file->token = w_->NewToken();
  filling.file->content = filling.shard;
  SealedCopy copy;
  copy.id = filling.shard;
  copy.id.step += w_->Chance(0.1) ? 1 : 0;  // torn
  copy.generation = filling.generation;
  filling.file->client_record = FileRecord{copy, filling.file->token};
}

void Rude::Promise() {
  ++promises_;
  lost_.clear();
  for (auto& [id, connection] : connections_) {
    connection.filling.reset();
  }
}

// It writes on into what it was given over a connection that it has closed.
void Rude::Scribble() {
  for (const Filling& filling : lost_) {
    if (filling.file->record) {
      w_->oracle().Violated(absl::StrCat(process().ToString(), " wrote into slot ", filling.slot,
                                         ", which holds a sealed copy"));
    }
    filling.file->token = w_->NewToken();
    filling.file->content = {};
  }
}

// ---- what it hears ----

void Rude::OnReply(const SendReply& reply, const FilePtr& file) {
  const auto it = asked_.find({reply.connection, reply.frame.id()});
  if (it == asked_.end()) {
    return w_->oracle().Violated(
        absl::StrCat("a second or unasked answer: ", reply.frame.ShortDebugString()));
  }
  const Asked asked = std::move(it->second);
  asked_.erase(it);
  const auto found = connections_.find(reply.connection);
  if (found == connections_.end()) {
    return;
  }
  Connection& connection = found->second;
  const v1::DaemonFrame& frame = reply.frame;
  if (frame.has_failure()) {
    return;
  }
  if (frame.has_join()) {
    OnJoined(connection, asked, frame.join());
  } else if (frame.has_begin_save() || frame.has_reserve()) {
    OnGranted(connection, asked, reply, file);
  } else if (frame.has_attach() || frame.has_enter_session()) {
    OnSource(connection, reply);
  } else if (frame.has_leave()) {
    connection = {};
  } else if (frame.has_seal() && connection.seat) {
    w_->oracle()
        .job(connection.seat->job)
        .acknowledged[{connection.seat->attempt, asked.frame.seal().step()}]
        .insert(connection.seat->rank);
  }
}

void Rude::OnJoined(Connection& connection, const Asked& asked, const v1::JoinReply& reply) {
  const v1::Join& join = asked.frame.join();
  const std::string& job = join.job();
  if (const v1::JobState* state = w_->StateOf(job); state != nullptr && state->uid() != uid()) {
    w_->oracle().Violated(
        absl::StrCat("a process of uid ", uid(), " joined job ", job, " of uid ", state->uid()));
  }
  connection.seat = Seat{job, reply.attempt(), join.rank()};
  connection.session.reset();
  if (asked.promises == promises_) {  // else it has left, or joined elsewhere, meanwhile
    w_->Seated(this, job, reply.attempt(), join.rank());
  }
}

void Rude::OnGranted(Connection& connection, const Asked& asked, const SendReply& reply,
                     const FilePtr& file) {
  if (asked.promises != promises_) {
    return;  // it has said meanwhile that it lets go: it closes what it gets
  }
  if (reply.descriptors == Descriptors::kWritableImage) {
    if (const auto old = mapped_.find(reply.slot); old != mapped_.end()) {
      old->second->mapped_by.erase(process());
    }
    mapped_[reply.slot] = file;
    file->mapped_by.insert(process());
  }
  if (!reply.frame.has_begin_save() || !connection.seat) {
    return;
  }
  const v1::Grant& grant = reply.frame.begin_save();
  if (const auto mine = mapped_.find(grant.slot()); mine != mapped_.end() && mine->second == file) {
    connection.filling = Filling{grant.slot(),
                                 grant.generation(),
                                 {JobUuid::FromBytes(grant.job_uuid()).value(), grant.attempt(),
                                  asked.frame.begin_save().step(), connection.seat->rank},
                                 file};
  }
}

void Rude::OnSource(Connection& connection, const SendReply& reply) {
  if (reply.frame.has_enter_session()) {
    const v1::SessionOutcome& outcome = reply.frame.enter_session();
    connection.session =
        Session{outcome.session(), outcome.round(), {outcome.attempt(), outcome.step()}};
  }
  if (reply.descriptors == Descriptors::kReadOnlyImageAndRecord) {
    const v1::Source& source =
        reply.frame.has_attach() ? reply.frame.attach() : reply.frame.enter_session().source();
    holds_.push_back({source.slot(), source.hold()});
  }
}

}  // namespace holdfast::sim
