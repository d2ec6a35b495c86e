// A job that is told to end, on a node where ranks of it run: who was told, who stands still until
// the last step is agreed on, and who hears that it has come (docs/protocol.md, "The last step").
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/units.h"
#include "server/agent.h"

namespace holdfast {

void Agent::OnReachStep(ConnectionId id, const Seat& seat, SeatId seat_id,
                        const v1::ClientFrame& frame) {
  const v1::ReachStep& reach = frame.reach_step();
  if (reach.has_passed_step()) {
    NotePassed(seat, seat_id, reach.passed_step());
  }
  if (reach.told_to_stop()) {
    NoteStop(seat, reach.grace_ms());
  }
  const auto found = stops_.find(seat.job);
  const bool stopping = found != stops_.end() && found->second.attempt == seat.attempt;
  if (!stopping || found->second.last || found->second.held_until <= time_.now) {
    const RequestToken token = NewPending(id, frame, std::nullopt);
    pending_.at(token).seat = seat_id;
    pending_.at(token).step = reach.step();
    return AnswerReached(token);
  }
  const RequestToken token = NewPending(id, frame, found->second.held_until);
  Pending& pending = pending_.at(token);
  pending.where = Where::kStanding;
  pending.job = seat.job;
  pending.seat = seat_id;
  pending.step = reach.step();
}

// The rank was not heard when it went on: whoever asks how far it is must hear it, be it that it
// stands from now on.
void Agent::NotePassed(const Seat& seat, SeatId seat_id, Step passed) {
  if (const auto stop = stops_.find(seat.job);
      stop != stops_.end() && stop->second.attempt == seat.attempt && stop->second.last &&
      passed >= *stop->second.last && !(seat.passed >= *stop->second.last)) {
    TellBeyond(seat, passed, *stop->second.last);
  }
  seats_.SetPassed(seat_id, passed);
}

void Agent::TellBeyond(const Seat& seat, Step passed, Step last) {
  Tell(Report::Kind::kTrouble, seat.job,
       absl::StrCat("rank ", seat.rank, " had gone on beyond step ", passed,
                    " before it heard that the job ends with step ", last,
                    ": that step lacks it if it has not been saved"));
}

// The rank goes on beyond that step, or ends with it.
void Agent::AnswerReached(RequestToken token) {
  const Pending& pending = pending_.at(token);
  const Seat* seat = FindSeat(pending.seat);
  if (seat == nullptr) {
    return Refuse(token, {absl::StatusCode::kAborted, v1::Failure::REASON_UNSPECIFIED,
                          "the rank has left, or joined again, since"});
  }
  v1::DaemonFrame frame;
  v1::StepReached& reached = *frame.mutable_reach_step();
  if (const auto stop = stops_.find(seat->job);
      stop != stops_.end() && stop->second.attempt == seat->attempt) {
    reached.set_stop(stop->second.last && pending.step >= *stop->second.last);
    reached.set_stopping(true);
    reached.set_left_ms(LeftMs(stop->second));
  }
  seats_.SetPassed(pending.seat, pending.step);
  Reply(token, std::move(frame));
}

uint32_t Agent::LeftMs(const Stop& stop) const {
  return static_cast<uint32_t>(std::max(stop.by - time_.now, Duration::zero()) /
                               std::chrono::milliseconds(1));
}

Agent::Stop& Agent::StopOf(const JobUuid& job, Attempt attempt) {
  Stop& stop = stops_[job];
  if (stop.attempt < attempt) {
    stop = Stop();
    stop.attempt = attempt;
  }
  return stop;
}

// A process was told to end. Its ranks stand until its host has heard of it, and asked all others;
// should that not come about, they go on, and it is tried again later.
void Agent::NoteStop(const Seat& seat, uint64_t grace_ms) {
  Stop& stop = StopOf(seat.job, seat.attempt);
  if (!stop.told) {
    stop.told = seat.rank;
    stop.by = time_.now + std::chrono::milliseconds(std::min<uint64_t>(grace_ms, kGraceMsMax));
  }
  if (stop.last || time_.now < stop.again_at) {
    return;
  }
  stop.held_until = time_.now + kStandMax;
  stop.again_at = time_.now + kStopAgain;
  TellStop(seat.job, stop);
}

void Agent::TellStop(const JobUuid& job, const Stop& stop) {
  if (stop.told) {
    Send(job, StopNoticed{stop.attempt, *stop.told, LeftMs(stop), stop.last});
  }
}

void Agent::TellStopAnew(const JobUuid& job) {
  if (const auto stop = stops_.find(job); stop != stops_.end()) {
    TellStop(job, stop->second);
  }
}

void Agent::TakeMessage(const JobUuid& job, const HoldSteps& m) {
  std::optional<Step> passed;
  bool any = false;
  for (const auto& [id, seat] : seats_.all()) {
    if (seat.job == job && seat.attempt == m.attempt) {
      any = true;
      passed = std::max({passed, seat.passed, seat.last_begun});
    }
  }
  if (any) {
    Stop& stop = StopOf(job, m.attempt);
    if (stop.attempt != m.attempt) {
      return;  // that one is over
    }
    stop.held_until = time_.now + kStandMax;
  }
  Send(job, StepsHeld{m.attempt, m.round, passed});
}

void Agent::TakeMessage(const JobUuid& job, const LastStepChosen& m) {
  if (!seats_.AnyOf(job)) {
    return;
  }
  Stop& stop = StopOf(job, m.attempt);
  if (stop.attempt != m.attempt || stop.last) {
    return;
  }
  stop.last = m.step;
  stop.by = time_.now + std::chrono::milliseconds(m.left_ms);
  if (!stop.told) {
    stop.told = 0;  // (so that a host that comes anew hears of it)
  }
  for (const auto& [id, seat] : seats_.all()) {
    if (seat.job == job && seat.attempt == m.attempt && seat.passed >= m.step) {
      TellBeyond(seat, *seat.passed, m.step);
    }
  }
  for (const RequestToken token : StandingOf(job)) {
    AnswerReached(token);
  }
}

std::vector<RequestToken> Agent::StandingOf(const JobUuid& job) const {
  std::vector<RequestToken> tokens;
  for (const auto& [token, pending] : pending_) {
    if (pending.where == Where::kStanding && pending.job == job) {
      tokens.push_back(token);
    }
  }
  return tokens;
}

void Agent::EndStopBelow(const JobUuid& job, Attempt attempt, const Failure& failure) {
  const auto stop = stops_.find(job);
  if (stop != stops_.end() && stop->second.attempt < attempt) {
    stops_.erase(stop);
  }
  for (const RequestToken token : StandingOf(job)) {
    const Seat* seat = FindSeat(pending_.at(token).seat);
    if (seat == nullptr || seat->superseded) {
      Refuse(token, failure);
    }
  }
}

}  // namespace holdfast
