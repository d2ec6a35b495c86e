// Restore sessions as the coordinator runs them (docs/protocol.md §6).
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "server/coordinator.h"
#include "server/tier_lists.h"

namespace holdfast {
namespace {

constexpr uint64_t kDeadlineMsMax = uint64_t{7} * 24 * 3600 * 1000;
constexpr char kEnteredAgain[] = "this rank has entered the session again since";

Failure ReportedAgain() {
  return {absl::StatusCode::kAborted, v1::Failure::REASON_UNSPECIFIED,
          "this rank has reported again since"};
}

SessionSkills SkillsOf(const SessionAsked& m, MonotonicTime now) {
  SessionSkills skills{m.may_reshard, m.reads_parts};
  if (m.deadline_ms > 0 || !m.may_wait) {
    skills.whole = std::chrono::milliseconds(std::min(m.deadline_ms, kDeadlineMsMax));
    skills.until = now + skills.whole;
  }
  return skills;
}

}  // namespace

void Coordinator::On(const SessionAsked& m, Turn& t) {
  if (!IsCurrent(m.attempt, m.token, t)) {
    return;
  }
  if (SeatedElsewhere(m.rank, t.from)) {
    return Refuse(m.token, TakenElsewhere(m.rank), t);
  }
  if (attempts_.rbegin()->second.decided) {
    return EnterDecided(m, t);
  }
  const SessionWish wish{m.wanted, m.reads_by_itself, m.label};
  if (session_ && session_->AsksAnew(m.rank, wish)) {
    FailSession(
        {absl::StatusCode::kAborted, v1::Failure::REASON_UNSPECIFIED,
         absl::StrCat("restore of job '", name_, "', attempt ", attempt(), ": rank ", m.rank,
                      " began another restore while step ", session_->checkpoint().step,
                      " was being loaded (asked for: ", session_->WantedText(),
                      "); enter again, all ranks with the same request")},
        t);
  }
  if (!session_) {
    session_ = std::make_unique<Session>(next_session_++, attempt(),
                                         attempts_.rbegin()->second.world_size);
  }
  if (const auto conflict = session_->Conflict(m.rank, wish)) {
    const Failure failure{
        absl::StatusCode::kInvalidArgument, v1::Failure::REASON_UNSPECIFIED,
        absl::StrCat("restore of job '", name_, "', attempt ", attempt(), ": ", *conflict)};
    return FailSession(failure, t, m.token);
  }
  if (session_->loading() && !m.may_reshard && !m.reads_by_itself) {
    const auto round_of = checkpoints_.find(session_->checkpoint());
    if (round_of != checkpoints_.end() && OfAnotherWorld(round_of->second)) {
      return Refuse(m.token, OtherWorld(round_of->first, round_of->second.world_size), t);
    }
  }
  const RequestToken before =
      session_->Enter(m.rank, m.process, wish, m.token, SkillsOf(m, t.time.now));
  Refuse(before, {absl::StatusCode::kAborted, v1::Failure::REASON_UNSPECIFIED, kEnteredAgain}, t);
  if (session_->loading()) {  // a replacement, or a rank that begins again: this round's source
    session_->StopWaiting(m.token);
    EndSourceWait(m.rank,
                  {absl::StatusCode::kAborted, v1::Failure::REASON_UNSPECIFIED, kEnteredAgain}, t);
    failed_sources_.erase(m.rank);
    return OfferSource(m.token, m.rank, session_->id(), session_->round(), session_->checkpoint(),
                       t);
  }
  if (session_->AllEntered()) {
    return BeginSession(t);
  }
  if (!m.may_wait) {
    FailSession({absl::StatusCode::kDeadlineExceeded, v1::Failure::REASON_UNSPECIFIED,
                 absl::StrCat("restore of job '", name_, "', attempt ", attempt(), ": ",
                              session_->MissingRanks(), " has not entered, and rank ", m.rank,
                              " does not wait (its deadline is 0)")},
                t);
  }
}

// The attempt has decided: its decision is all that it can restore.
void Coordinator::EnterDecided(const SessionAsked& m, Turn& t) {
  const AttemptInfo& info = attempts_.rbegin()->second;
  const auto precondition = [&](std::string why) {
    Refuse(m.token,
           {absl::StatusCode::kFailedPrecondition, v1::Failure::REASON_UNSPECIFIED,
            absl::StrCat("attempt ", m.attempt, " of job '", name_, "' ", why)},
           t);
  };
  if (info.parent.attempt == 0 ? last_begun_.count(m.rank) > 0 : any_save_) {
    return precondition(
        "has saved since it began; to restore again, leave it for the next attempt");
  }
  if (info.parent.attempt == 0) {
    AnswerWhenDurable(
        m.token,
        Refused{m.token,
                {absl::StatusCode::kNotFound, v1::Failure::REASON_NOTHING_TO_RESTORE,
                 absl::StrCat("attempt ", m.attempt, " of job '", name_, "' starts from scratch")}},
        t);
    return;
  }
  if (m.wanted && (m.wanted->step != info.parent.step ||
                   (m.wanted->attempt != 0 && m.wanted->attempt != info.parent.attempt))) {
    return precondition(absl::StrCat("has restored step ", info.parent.step, " of attempt ",
                                     info.parent.attempt, ", not step ", m.wanted->step,
                                     "; to restore another one, leave it for the next attempt"));
  }
  const uint64_t session = last_session_ != 0 ? last_session_ : (last_session_ = next_session_++);
  if (m.reads_by_itself) {  // whether it can be read, whoever reads it finds out
    return AnswerWhenDurable(
        m.token, SessionEnded{m.token, session, 1, info.parent, line_, info.passed_over}, t);
  }
  // What this rank needs is enough: that the step was whole was agreed on, and what other ranks
  // need of it may lie on nodes that have not been heard of yet.
  const auto known = checkpoints_.find(info.parent);
  const bool has_its_own = known != checkpoints_.end() && !known->second.contradictory &&
                           !OfAnotherWorld(known->second) &&
                           NearestFor(known->second, m.rank, SeatOf(m.rank), {});
  if (!has_its_own && !IsCommitted(info.parent)) {
    const std::optional<Failure> away = OutOfReach(info.parent);
    return Refuse(m.token, away ? *away : Unreadable(), t);
  }
  const Checkpoint& parent = known->second;
  if (OfAnotherWorld(parent)) {
    if (!m.may_reshard) {
      return Refuse(m.token, OtherWorld(info.parent, parent.world_size), t);
    }
    return AnswerWhenDurable(
        m.token,
        StepOffered{m.token, attempt(), m.rank, session, 1, info.parent, parent.world_size}, t);
  }
  SourceOffered offer{m.token, attempt(), m.rank, session, 1, info.parent};
  failed_sources_.erase(m.rank);
  if (const auto shard = parent.shards.find(m.rank); shard != parent.shards.end()) {
    offer.from = NearestFor(parent, m.rank, SeatOf(m.rank), {}).value_or(TierKind::kMemory);
    if (offer.from == TierKind::kPeer) {
      offer.peers = PeerNames(parent, m.rank, SeatOf(m.rank));
    }
    if (offer.from == TierKind::kRemote) {
      offer.readers = RemoteReaders(info.parent, m.rank);
    }
    offer.why = WhyNotNearer(parent, m.rank, SeatOf(m.rank), offer.from);
    offer.bytes = shard->second.bytes;
  }
  AnswerWhenDurable(m.token, std::move(offer), t);
}

void Coordinator::On(const LoadReported& m, Turn& t) {
  if (!IsCurrent(m.attempt, m.token, t)) {
    return;
  }
  if (SeatedElsewhere(m.rank, t.from)) {
    return Refuse(m.token, TakenElsewhere(m.rank), t);
  }
  const Member* member = members_.Find(m.rank);
  const bool takes_part = session_ && member != nullptr && session_->id() == m.session &&
                          session_->loading() && session_->Has(m.rank, member->process);
  if (!takes_part) {
    return ReportDecided(m, t);
  }
  if (m.round != session_->round()) {
    return OfferSource(m.token, m.rank, session_->id(), session_->round(), session_->checkpoint(),
                       t);
  }
  if (m.wants_mismatch && !m.loaded) {
    const Failure failure{
        absl::StatusCode::kInvalidArgument, v1::Failure::REASON_UNSPECIFIED,
        absl::StrCat("restore of job '", name_, "', step ", session_->checkpoint().step, ": rank ",
                     m.rank, " wants something else than was saved: ", m.problem)};
    return FailSession(failure, t, m.token);
  }
  if (!m.loaded && m.of_another_run) {
    return EndRound(m, Session::Found::kAnotherRun, t);
  }
  if (!m.loaded && m.shards_are_bad) {
    return FallBack(m, t);  // it has tried every copy of what it wants
  }
  if (!m.loaded && !m.copy_is_bad) {
    // The copy is good: something else failed, here and now. To fall back would discard the newer
    // steps for good, for what may be gone at the next try.
    const CheckpointId of = session_->checkpoint();
    const Failure failure{
        absl::StatusCode::kUnavailable, v1::Failure::REASON_UNSPECIFIED,
        absl::StrCat("restore of job '", name_, "': rank ", m.rank, " could not load step ",
                     of.step, " of attempt ", of.attempt,
                     ", whose copy is not known to be bad: ", m.problem, "; restore again")};
    return FailSession(failure, t, m.token);
  }
  if (!m.loaded) {
    const CheckpointId of = session_->checkpoint();
    const auto it = checkpoints_.find(of);
    if (it != checkpoints_.end() && OfAnotherWorld(it->second)) {
      return FallBack(m, t);  // no shard of it is the rank's own
    }
    Doubt(m, of, t);
    const std::set<TierKind> spent = SourcesSpent(m.rank, m.problem);
    if (it != checkpoints_.end() && it->second.committed &&
        NearestFor(it->second, m.rank, SeatOf(m.rank), spent)) {
      Tell(Report::Kind::kSessionFellBack,
           absl::StrCat("step ", of.step, ": the memory copy of rank ", m.rank,
                        " is bad: ", m.problem, "; its next copy is used"),
           0, t);
      return OfferSource(m.token, m.rank, session_->id(), session_->round(), of, t);
    }
    return FallBack(m, t);
  }
  EndRound(m, Session::Found::kItsOwn, t);
}

void Coordinator::EndRound(const LoadReported& m, Session::Found found, Turn& t) {
  Refuse(session_->Report(m.rank, m.token, found), ReportedAgain(), t);
  if (!session_->AllReported() || TurnToNewer(t)) {
    return;
  }
  if (session_->AnyThatFound(Session::Found::kAnotherRun)) {
    StartOver(t);
  } else {
    FinishSession(t);
  }
}

// While the ranks were loading a newer step has become whole: a tier has answered, a manifest has
// been published. To decide for the older one now would discard it.
bool Coordinator::TurnToNewer(Turn& t) {
  if (session_->only_these()) {
    return false;
  }
  std::vector<CheckpointId> candidates = Loadable();
  std::erase_if(candidates, [&](const CheckpointId& id) {
    return session_->checkpoint() < id && session_->Tried(id);
  });
  if (candidates.empty() || !(session_->checkpoint() < candidates.front())) {
    return false;
  }
  Tell(Report::Kind::kSessionFellBack,
       absl::StrCat("step ", candidates.front().step, " has become whole while step ",
                    session_->checkpoint().step, " was being loaded; all ranks go on with it"),
       0, t);
  NextRound(std::move(candidates), t);
  return true;
}

// Some of them: of thousands of names what stands behind them would not be read.
std::string Coordinator::NamesOf(const std::set<NodeId>& nodes) const {
  constexpr size_t kNamed = 8;
  std::string text;
  size_t named = 0;
  for (const NodeId node : nodes) {
    if (named++ == kNamed) {
      absl::StrAppend(&text, " and ", nodes.size() - kNamed, " more");
      break;
    }
    absl::StrAppend(&text, text.empty() ? "" : ", ", settings_.nodes->Name(node));
  }
  return text;
}

std::string Coordinator::WhatTheSessionWaitsFor() const {
  const std::string nodes = NamesOf(unreachable_);
  return nodes.empty()
             ? "the durable tiers to be read"
             : absl::StrCat("nodes that are out of reach and may have a newer step: ", nodes);
}

std::string Coordinator::HowNotToWait() const {
  return absl::StrCat(
      "; restore again when they can be read",
      CommittedOnLine().empty()
          ? absl::StrCat("; what there is: ckptctl explain ", name_)
          : absl::StrCat(", or choose what there is: ckptctl restore ", name_, " --step N"));
}

void Coordinator::NextRound(std::vector<CheckpointId> candidates, Turn& t) {
  session_->NextRound(std::move(candidates));
  std::erase_if(source_waits_, [](const auto& wait) { return !wait.second.failed; });
  waits_for_inventory_ = false;
  failed_sources_.clear();
  for (const auto& [rank, token] : session_->TakeWaiting()) {
    OfferSource(token, rank, session_->id(), session_->round(), session_->checkpoint(), t);
  }
}

void Coordinator::Doubt(const LoadReported& m, CheckpointId checkpoint, Turn& t) {
  const auto it = checkpoints_.find(checkpoint);
  const bool own = it == checkpoints_.end() || !OfAnotherWorld(it->second);
  if (m.copy_is_bad && own) {
    t.Say(CopyDoubted{checkpoint, m.rank}, t.from);
    On(ShardBad{checkpoint, m.rank, m.problem}, t);
  }
}

// A report for a session that is not under way: it ended, or this daemon never had it.
void Coordinator::ReportDecided(const LoadReported& m, Turn& t) {
  const AttemptInfo& info = attempts_.rbegin()->second;
  if (last_session_ == 0 || m.session != last_session_) {
    return Refuse(m.token,
                  {absl::StatusCode::kFailedPrecondition, v1::Failure::REASON_UNKNOWN_SESSION,
                   absl::StrCat("session ", m.session,
                                " is not known here: enter the attempt's session again")},
                  t);
  }
  if (last_failure_ || !info.decided || info.parent.attempt == 0) {
    return Refuse(m.token,
                  last_failure_.value_or(Failure{absl::StatusCode::kFailedPrecondition,
                                                 v1::Failure::REASON_UNKNOWN_SESSION,
                                                 "the session is over: enter it again"}),
                  t);
  }
  if (!m.loaded && m.of_another_run) {
    return Refuse(
        m.token,
        {absl::StatusCode::kFailedPrecondition, v1::Failure::REASON_UNSPECIFIED,
         absl::StrCat("attempt ", attempt(), " of job '", name_, "' goes on from step ",
                      info.parent.step, ", and rank ", m.rank,
                      " cannot start over alone: ", m.problem, "; start all ranks again")},
        t);
  }
  if (!m.loaded) {
    Doubt(m, info.parent, t);
    if (const auto it = checkpoints_.find(info.parent);
        m.copy_is_bad && it != checkpoints_.end() && !OfAnotherWorld(it->second) &&
        NearestFor(it->second, m.rank, SeatOf(m.rank), SourcesSpent(m.rank, m.problem))) {
      return OfferSource(m.token, m.rank, m.session, m.round, info.parent, t);
    }
    if (const std::optional<Failure> away = OutOfReach(info.parent);
        away && !IsCommitted(info.parent)) {
      return Refuse(m.token, *away, t);
    }
    Failure failure = Unreadable();
    failure.message =
        absl::StrCat("step ", info.parent.step, " of attempt ", info.parent.attempt,
                     " was restored by the attempt and could not be loaded again by rank ", m.rank,
                     ": ", m.problem, "; start all ranks again to restore an older step");
    return Refuse(m.token, failure, t);
  }
  AnswerWhenDurable(
      m.token, SessionEnded{m.token, m.session, m.round, info.parent, line_, info.passed_over}, t);
}

// All ranks have entered: what can they all load?
void Coordinator::BeginSession(Turn& t) {
  std::vector<CheckpointId> candidates;
  waits_for_inventory_ = false;
  std::optional<Failure> failure = ChooseCandidates(candidates);
  // What was asked for and found is what it is.
  const bool chosen = (!failure && (session_->wanted() || restore_point_.set())) ||
                      (!session_->wanted() && restore_point_.from_scratch());
  if (!chosen && !candidates.empty() && !MayUse(candidates.front(), t)) {
    return;
  }
  EndWaitForCopies(t);
  if (!chosen && candidates.empty() && WaitsForAnyStep(failure)) {
    waits_for_inventory_ = true;
    return;
  }
  if (failure && failure->reason == v1::Failure::REASON_NOTHING_TO_RESTORE) {
    return BeginFromScratch(*failure, restore_point_changes_, t);
  }
  if (failure) {
    return FailSession(*failure, t);
  }
  failed_sources_.clear();
  session_->BeginLoading(std::move(candidates), chosen, restore_point_changes_);
  if (session_->reads_by_itself()) {
    return FinishSession(t);
  }
  for (const auto& [rank, token] : session_->TakeWaiting()) {
    OfferSource(token, rank, session_->id(), session_->round(), session_->checkpoint(), t);
  }
}

// There is none that could be used. Whether one may come; else `failure` says what cannot be read.
bool Coordinator::WaitsForAnyStep(std::optional<Failure>& failure) const {
  if (const std::optional<Failure> wait = WaitForInventory({})) {
    if (InventoryPending()) {
      return true;
    }
    failure = wait;
  }
  return ManifestComing({}) || MayComeBack({});
}

std::optional<Failure> Coordinator::ChooseCandidates(std::vector<CheckpointId>& candidates) const {
  const uint32_t world_size = attempts_.rbegin()->second.world_size;
  std::optional<CheckpointId> wanted = session_->wanted();
  const bool by_restore_point = !wanted && restore_point_.set();
  if (by_restore_point && restore_point_.from_scratch()) {
    return Failure{
        absl::StatusCode::kNotFound, v1::Failure::REASON_NOTHING_TO_RESTORE,
        absl::StrCat("job '", name_,
                     "' was told to start from scratch (ckptctl restore --from-scratch)")};
  }
  if (by_restore_point) {
    wanted = CheckpointId{restore_point_.attempt(), restore_point_.step()};
  }
  if (wanted) {
    const absl::StatusOr<CheckpointId> found = FindCommitted(wanted);
    if (!found.ok()) {
      Failure failure{absl::StatusCode::kNotFound, v1::Failure::REASON_UNSPECIFIED,
                      std::string(found.status().message())};
      if (by_restore_point) {
        failure = {
            absl::StatusCode::kDataLoss, v1::Failure::REASON_UNREADABLE,
            absl::StrCat("the restore point that was set cannot be read: ", failure.message,
                         "; set another one, or clear it (ckptctl restore ", name_, " --clear)")};
      }
      return failure;
    }
    const uint32_t saved_by = checkpoints_.at(*found).world_size;
    if (saved_by != world_size && !session_->reads_by_itself() && !session_->may_reshard()) {
      return OtherWorld(*found, saved_by);
    }
    const Checkpoint& checkpoint = checkpoints_.at(*found);
    if (const std::optional<Rank> rank = RankWithout(checkpoint)) {
      return Failure{absl::StatusCode::kDataLoss, v1::Failure::REASON_UNREADABLE,
                     WhyOutOfReach(*found, checkpoint, *rank)};
    }
    candidates = {*found};
    return std::nullopt;
  }
  candidates = Loadable();
  if (!candidates.empty()) {
    return std::nullopt;
  }
  if (!EverCommitted() && !AnythingSaved()) {
    return Failure{
        absl::StatusCode::kNotFound, v1::Failure::REASON_NOTHING_TO_RESTORE,
        absl::StrCat("job '", name_,
                     "' has never committed a step on this line of descent: start from scratch")};
  }
  return Unreadable();
}

Failure Coordinator::OtherWorld(CheckpointId id, uint32_t saved_by) const {
  return {absl::StatusCode::kFailedPrecondition, v1::Failure::REASON_TOPOLOGY,
          absl::StrCat("step ", id.step, " of attempt ", id.attempt, " was saved by ", saved_by,
                       " ranks, and attempt ", attempt(), " has ", world_size(), "; start it with ",
                       saved_by)};
}

void Coordinator::FallBack(const LoadReported& m, Turn& t) {
  Refuse(session_->Fail(m.rank, m.token, m.problem), ReportedAgain(), t);
  GoOnWithFallBack(false, t);
}

// All ranks together, to the newest step that can be read: an older one, the same if a tier that
// was `read_since` has it too, or a newer one that has become whole since. The rank that failed
// waits with the others.
void Coordinator::GoOnWithFallBack(bool read_since, Turn& t) {
  const CheckpointId from = session_->checkpoint();
  const std::string what = absl::StrCat("step ", from.step, " of attempt ", from.attempt,
                                        " could not be loaded by rank ", session_->failed()->rank,
                                        ": ", session_->failed()->problem);
  std::vector<CheckpointId> left;  // what was asked for, and nothing else, has no next
  if (!session_->only_these()) {
    left = Loadable();
    std::erase_if(left, [&](const CheckpointId& id) {
      return (from < id && session_->Tried(id)) || (id == from && !read_since);
    });
    // A durable tier may have something in between.
    if (!left.empty() && !MayUse(left.front(), t)) {
      return;
    }
    std::optional<Failure> failure;
    if (left.empty() && WaitsForAnyStep(failure)) {
      waits_for_inventory_ = true;
      return;
    }
    if (failure) {
      failure->message = absl::StrCat(what, "; ", failure->message);
      return FailSession(*failure, t);
    }
  }
  if (left.empty()) {
    Failure failure = session_->only_these() ? ChosenUnreadable()
                      : IsCommitted(from)    ? ReadInVain()
                                             : Unreadable();
    failure.message = absl::StrCat(what, "; ", failure.message);
    return FailSession(failure, t);
  }
  Tell(Report::Kind::kSessionFellBack,
       absl::StrCat(what, "; all ranks go on with step ", left.front().step), 0, t);
  NextRound(std::move(left), t);
}

// Of a step that nobody has marked, since a rank wanted it of several shards.
Failure Coordinator::ReadInVain() const {
  return {
      absl::StatusCode::kDataLoss, v1::Failure::REASON_UNREADABLE,
      absl::StrCat("no other step of the line of job '", name_, "' can be loaded; ckptctl verify ",
                   name_,
                   " --all reads every copy and marks those that are bad; to continue from another "
                   "branch: ckptctl restore ",
                   name_, " --step N; what there is: ckptctl explain ", name_)};
}

// Every rank has the step, or has come to hear which one it reads by itself. It becomes the
// attempt's parent, and only then do they hear of it.
void Coordinator::FinishSession(Turn& t) {
  const std::unique_ptr<Session> session = std::move(session_);
  waits_for_inventory_ = false;
  const CheckpointId parent = session->checkpoint();
  last_session_ = session->id();
  last_failure_.reset();
  const std::string passed_over = session->only_these() ? "" : WhatIsPassedOver(parent);
  attempts_.rbegin()->second.passed_over = passed_over;
  if (!passed_over.empty()) {
    Tell(Report::Kind::kSessionFellBack,
         absl::StrCat("step ", parent.step, " is restored: ", passed_over), 0, t);
  }
  Decide(parent, session->restore_point_change(), t);
  Tell(Report::Kind::kSessionDone,
       session->reads_by_itself()
           ? absl::StrCat("all ranks of attempt ", attempt(), " go on from step ", parent.step,
                          ", which they read by themselves")
           : absl::StrCat("all ranks of attempt ", attempt(), " have loaded step ", parent.step),
       0, t);
  for (const auto& [rank, token] : session->TakeWaiting()) {
    AnswerWhenDurable(
        token, SessionEnded{token, session->id(), session->round(), parent, line_, passed_over}, t);
  }
}

// Every rank hears why, when that is durable.
void Coordinator::BeginFromScratch(const Failure& why, uint64_t restore_point_change, Turn& t) {
  const auto waiting = session_->TakeWaiting();
  last_session_ = session_->id();
  last_failure_ = why;
  session_.reset();
  waits_for_inventory_ = false;
  Decide({}, restore_point_change, t);
  for (const auto& [rank, token] : waiting) {
    AnswerWhenDurable(token, Refused{token, why}, t);
  }
}

// The ranks have looked at the newest step of the line, and it has another label than theirs. What
// is on the line is left, as by a person who says so (`ckptctl restore --from-scratch`): so nothing
// of this run may be where it cannot be read now.
void Coordinator::StartOver(Turn& t) {
  const CheckpointId at = session_->checkpoint();
  const std::string of = absl::StrCat("job '", name_, "', fresh='", session_->label(), "': step ",
                                      at.step, " of attempt ", at.attempt);
  if (const auto own = session_->AnyThatFound(Session::Found::kItsOwn)) {
    return FailSession({absl::StatusCode::kInvalidArgument, v1::Failure::REASON_UNSPECIFIED,
                        absl::StrCat(of, " has the label of rank ", *own, " and not that of rank ",
                                     *session_->AnyThatFound(Session::Found::kAnotherRun),
                                     "; all ranks must say the same")},
                       t);
  }
  if (session_->only_these()) {
    return FailSession(
        {absl::StatusCode::kFailedPrecondition, v1::Failure::REASON_UNSPECIFIED,
         absl::StrCat(of,
                      " was asked for, and was not saved under this label. Say the label that "
                      "it has, or none; to start over instead: ckptctl restore ",
                      name_, " --clear")},
        t);
  }
  if (!AllInventoriesKnown()) {
    std::string unread;
    for (const TierKind tier : kDurable) {
      const std::string why = WhyUnread(tier);
      absl::StrAppend(&unread, unread.empty() || why.empty() ? "" : "; ", why);
    }
    return FailSession(
        {absl::StatusCode::kUnavailable, v1::Failure::REASON_UNSPECIFIED,
         absl::StrCat(of,
                      " is of another run, and steps of this one may lie where nothing can be "
                      "read: ",
                      unread,
                      "; restore again when that can be read, or start over without it: "
                      "ckptctl restore ",
                      name_, " --from-scratch --yes")},
        t);
  }
  Tell(Report::Kind::kSessionDone,
       absl::StrCat("all ranks of attempt ", attempt(), " start over: ", of, " is of another run"),
       0, t);
  const uint64_t restore_point_change = session_->restore_point_change();
  BeginFromScratch({absl::StatusCode::kNotFound, v1::Failure::REASON_NOTHING_TO_RESTORE,
                    absl::StrCat(of, " is of another run: start from scratch")},
                   restore_point_change, t);
}

void Coordinator::FailSession(const Failure& failure, Turn& t, RequestToken asker) {
  const std::unique_ptr<Session> session = std::move(session_);
  waits_for_inventory_ = false;
  EndWaitForCopies(t);
  last_session_ = session->id();
  last_failure_ = failure;
  Tell(Report::Kind::kSessionFailed, failure.message, 0, t);
  std::vector<RequestToken> waiting;
  for (const auto& [rank, token] : session->TakeWaiting()) {
    waiting.push_back(token);
  }
  if (asker != 0) {
    waiting.push_back(asker);
  }
  for (const RequestToken token : waiting) {
    Refuse(token, failure, t);
  }
}

void Coordinator::DropFromSession(Rank rank, ProcessId process, Turn& t) {
  if (!session_) {
    return;
  }
  session_->Drop(rank, process);
  if (!session_->loading() || session_->empty()) {
    EndWaitForCopies(t);  // all of them wait for that rank first
  }
  if (session_->empty()) {
    session_.reset();
    waits_for_inventory_ = false;
  }
}

std::vector<CheckpointSummary> Coordinator::Summaries() const {
  std::vector<CheckpointSummary> summaries;
  for (const auto& [id, checkpoint] : checkpoints_) {
    summaries.push_back({id, checkpoint.world_size, checkpoint.good,
                         static_cast<uint32_t>(checkpoint.shards.size()) - checkpoint.good,
                         !checkpoint.contradictory});
  }
  return summaries;
}

bool Coordinator::OfAnotherWorld(const Checkpoint& checkpoint) const {
  return checkpoint.world_size != attempts_.rbegin()->second.world_size;
}

bool Coordinator::ReadsOfAll(const Checkpoint& checkpoint) const {
  return session_ && (session_->reads_by_itself() || OfAnotherWorld(checkpoint));
}

// A rank whose shard somebody of the session may want and cannot get where it runs; none: all can.
// Ranks that read by themselves, or reshard, may want any shard.
std::optional<Rank> Coordinator::RankWithout(const Checkpoint& checkpoint) const {
  if (checkpoint.CommittedAt(TierKind::kRemote)) {
    return std::nullopt;
  }
  if (!ReadsOfAll(checkpoint)) {
    for (const auto& [rank, shard] : checkpoint.shards) {
      if (!NearestFor(checkpoint, rank, SeatOf(rank), {})) {
        return rank;
      }
    }
    return std::nullopt;
  }
  // What some node has any other can read, in parts, if the rank's library can.
  const bool parts = Configured(TierKind::kPeer) && session_->reads_parts();
  const std::set<TierKind> without = parts ? std::set<TierKind>{} : std::set{TierKind::kPeer};
  for (const auto& [rank, shard] : checkpoint.shards) {
    for (const auto& [node, readers] : members_.by_node()) {
      if (!NearestFor(checkpoint, rank, node, without)) {
        return rank;
      }
      if (parts) {
        break;  // it is the same for all
      }
    }
  }
  return std::nullopt;
}

// "step 12 of attempt 1 cannot be loaded: the shard of rank 3 lies on node-a only (memory), and …"
std::string Coordinator::WhyOutOfReach(CheckpointId id, const Checkpoint& checkpoint,
                                       Rank rank) const {
  std::string where;
  for (const ShardState::Copy& copy : checkpoint.shards.at(rank).copies) {
    if (copy.state.kind == CopyState::Kind::kGood) {
      absl::StrAppend(&where, where.empty() ? "" : ", ", ToAbsl(TierName(copy.place.tier)),
                      copy.place.tier == TierKind::kRemote
                          ? (checkpoint.manifest ? ", in a file that leaves out what is bad or gone"
                                                 : " without a manifest")
                          : absl::StrCat(" of ", settings_.nodes->Name(copy.place.node)));
    }
  }
  return absl::StrCat("step ", id.step, " of attempt ", id.attempt, ": the shard of rank ", rank,
                      " lies in ", where.empty() ? "no tier that can be read" : where, ", and ",
                      ReadsOfAll(checkpoint)
                          ? "not every node of this attempt can read that"
                          : absl::StrCat("the rank runs on ", settings_.nodes->Name(SeatOf(rank))));
}

// What the ranks of the session can load where they run, newest first.
std::vector<CheckpointId> Coordinator::Loadable() const {
  std::vector<CheckpointId> candidates =
      Candidates(Summaries(), line_,
                 session_->reads_by_itself() || session_->may_reshard()
                     ? std::nullopt
                     : std::optional(attempts_.rbegin()->second.world_size));
  std::erase_if(candidates, [&](const CheckpointId& id) {
    return RankWithout(checkpoints_.at(id)).has_value();
  });
  return candidates;
}

std::vector<CheckpointId> Coordinator::CommittedOnLine() const {
  std::vector<CheckpointId> result;
  for (auto it = checkpoints_.rbegin(); it != checkpoints_.rend(); ++it) {
    if (it->second.committed && OnLine(line_, it->first)) {
      result.push_back(it->first);
    }
  }
  return result;
}

bool Coordinator::EverCommitted() const {
  if (line_.empty()) {
    return false;
  }
  const auto newest = attempts_.find(line_.front().attempt);
  return LineRestoredAnything(line_) || (newest != attempts_.end() && newest->second.any_committed);
}

// Whether a durable tier has anything that was saved on the line, however damaged: a step is
// flushed when it is committed, not before. It tells so also when the job's state was lost. (What a
// crash interrupted before remote had a manifest was never promised there.)
bool Coordinator::AnythingSaved() const {
  const auto counts = [this](CheckpointId id) {
    return line_.empty() || id.attempt > line_.front().attempt || OnLine(line_, id);
  };
  return std::any_of(named_bad_.begin(), named_bad_.end(),
                     [&](const auto& bad) { return counts(bad.first.id); }) ||
         std::any_of(checkpoints_.begin(), checkpoints_.end(), [&](const auto& c) {
           const bool begun = c.second.begun_there && !c.second.manifest;
           return counts(c.first) && (c.second.AnyAt(TierKind::kNvme) ||
                                      (c.second.AnyAt(TierKind::kRemote) && !begun));
         });
}

// What a tier or a node may have of it that cannot be read, or heard, now.
std::optional<Failure> Coordinator::OutOfReach(CheckpointId id) const {
  for (const TierKind tier : {TierKind::kNvme, TierKind::kRemote}) {
    if (const std::string why = WhyUnread(tier); !why.empty() && NewestIn(tier) >= id) {
      return Failure{
          absl::StatusCode::kUnavailable, v1::Failure::REASON_UNSPECIFIED,
          absl::StrCat("restore of job '", name_, "': step ", id.step, " of attempt ", id.attempt,
                       " is out of reach: ", why, "; restore again when it can be")};
    }
  }
  if (!unreachable_.empty() && CommittedOnce(id)) {
    return Failure{absl::StatusCode::kUnavailable, v1::Failure::REASON_UNSPECIFIED,
                   absl::StrCat("restore of job '", name_, "': step ", id.step, " of attempt ",
                                id.attempt, " is out of reach: ", WhatTheSessionWaitsFor(),
                                "; restore again when they are back")};
  }
  return std::nullopt;
}

Failure Coordinator::Unreadable() const {
  CheckpointId newest;
  if (!line_.empty()) {
    const auto info = attempts_.find(line_.front().attempt);
    newest = info != attempts_.end() && info->second.any_committed
                 ? CheckpointId{info->first, info->second.last_committed_step}
                 : line_.front().parent;
  }
  std::optional<CheckpointId> named;
  const std::string why = WhyNothingOfTheLine(newest, named);
  return {
      absl::StatusCode::kDataLoss, v1::Failure::REASON_UNREADABLE,
      absl::StrCat(
          "job '", name_, "' had committed ",
          newest.attempt == 0 ? std::string("a checkpoint")
                              : absl::StrCat("step ", newest.step, " of attempt ", newest.attempt),
          ", and nothing of its line can be read now: ", why, DoubtedText(), OtherBranchText(),
          "; what there is: ckptctl explain ", name_,
          named ? absl::StrCat(" --step ", named->step, " --attempt ", named->attempt) : "")};
}

// Somebody chose it: nothing else is taken for it, and what else there is is for them to say.
Failure Coordinator::ChosenUnreadable() const {
  return {
      absl::StatusCode::kDataLoss, v1::Failure::REASON_UNREADABLE,
      absl::StrCat("it was asked for ", session_->wanted() ? "by the ranks" : "by a restore point",
                   ", so no other step is taken instead; on the line there are: ", CommittedText(),
                   DoubtedText(),
                   session_->wanted() ? "; to go on from another one, ask for that, or for none"
                                      : absl::StrCat("; to go on from another one: ckptctl "
                                                     "restore ",
                                                     name_,
                                                     " --step N, or, from the newest: "
                                                     "ckptctl restore ",
                                                     name_, " --clear"))};
}

// Of the newest step of the line that is known; if none is, of the newest one that there was.
std::string Coordinator::WhyNothingOfTheLine(CheckpointId newest,
                                             std::optional<CheckpointId>& named) const {
  for (auto it = checkpoints_.rbegin(); it != checkpoints_.rend(); ++it) {
    const auto& [id, checkpoint] = *it;
    if (!OnLine(line_, id)) {
      continue;
    }
    named = id;
    if (checkpoint.dead || checkpoint.cut_off) {
      return WhyNotWhole(id, checkpoint);
    }
    const bool reshards = session_ && (session_->reads_by_itself() || session_->may_reshard());
    if (checkpoint.committed && OfAnotherWorld(checkpoint) && !reshards) {
      return absl::StrCat("step ", id.step, " was saved by ", checkpoint.world_size,
                          " ranks, this attempt has ", attempts_.rbegin()->second.world_size,
                          ", and not all of them can read that (their library is older)");
    }
    if (const std::optional<Rank> rank =
            checkpoint.committed ? RankWithout(checkpoint) : std::nullopt) {
      return WhyOutOfReach(id, checkpoint, *rank);
    }
  }
  named.reset();
  if (!named_bad_.empty()) {
    const auto& [key, bad] = *named_bad_.rbegin();
    return absl::StrCat("step ", key.id.step, " of attempt ", key.id.attempt, ": rank ", key.rank,
                        "'s ", Name(key.place.tier), " copy (", bad.location,
                        ") is corrupt: ", bad.what);
  }
  const auto times = times_.find(newest);
  if (times != times_.end() && !times->second.fate.empty()) {
    return absl::StrCat("none of its copies is left: ", times->second.fate);
  }
  for (const TierKind tier : kDurable) {
    if (Configured(tier) && NewestIn(tier) == newest) {
      return absl::StrCat("it was whole in ", Name(tier),
                          ", and nothing of it is there now: put back what was moved or removed");
    }
  }
  return "its copies are gone with this node's memory (a reboot, or the memory directory was "
         "emptied)";
}

// "step 1 of attempt 1: rank 3's remote copy ('/…') is bad: …"
std::string Coordinator::WhyNotWhole(CheckpointId id, const Checkpoint& checkpoint) const {
  constexpr uint32_t kNamed = 3;
  std::string text;
  uint32_t named = 0;
  for (const Rank rank : checkpoint.Bad()) {
    const bool readable = std::any_of(kAllTiers.begin(), kAllTiers.end(), [&](TierKind tier) {
      return checkpoint.Readable(rank, tier);
    });
    if (readable) {
      continue;
    }
    if (named++ == kNamed) {
      break;
    }
    for (const auto& [place, copy] : checkpoint.shards.at(rank).copies) {
      if (copy.kind != CopyState::Kind::kBad) {
        continue;
      }
      const std::string& location = copy.detail.location;
      const bool told = location.empty() || copy.why.find(location) != std::string::npos;
      absl::StrAppend(&text, text.empty() ? "" : "; ", "rank ", rank, "'s ", Name(place.tier),
                      " copy",
                      place.tier != TierKind::kRemote && settings_.nodes->Several()
                          ? absl::StrCat(" on ", settings_.nodes->Name(place.node))
                          : "",
                      told ? "" : absl::StrCat(" (", location, ")"), " is bad: ", copy.why);
    }
  }
  named = std::min(named, kNamed);
  const std::string name = absl::StrCat("step ", id.step, " of attempt ", id.attempt);
  const uint32_t others =
      checkpoint.world_size - std::min(checkpoint.world_size, checkpoint.good + named);
  if (!text.empty()) {
    return absl::StrCat(
        name, ": ", text,
        others == 0
            ? ""
            : absl::StrCat("; and ", others, others == 1 ? " more rank has" : " more ranks have",
                           " no copy that can be read"));
  }
  const std::string away = NamesOf(missing_);
  return absl::StrCat("not all copies of ", name, " are there",
                      checkpoint.cut_off && !away.empty()
                          ? absl::StrCat("; nodes that had some are not, either: ", away)
                          : "");
}

// What could be restored, and is not on the line.
std::string Coordinator::OtherBranchText() const {
  for (auto it = checkpoints_.rbegin(); it != checkpoints_.rend(); ++it) {
    if (it->second.committed && !OnLine(line_, it->first)) {
      return absl::StrCat("; on a branch that was left there is step ", it->first.step,
                          " of attempt ", it->first.attempt, ": ckptctl restore ", name_,
                          " --step ", it->first.step, " --attempt ", it->first.attempt);
    }
  }
  return "";
}

// Copies that were called bad are still there: the way back to them.
std::string Coordinator::DoubtedText() const {
  const bool any = std::any_of(checkpoints_.begin(), checkpoints_.end(), [](const auto& c) {
    return !c.second.committed && !c.second.contradictory && !c.second.Bad().empty();
  });
  return any ? absl::StrCat("; to read the bad copies again, and use them if their digests prove ",
                            "right: ckptctl verify ", name_, " --all")
             : "";
}

std::string Coordinator::CommittedText() const {
  constexpr size_t kNamed = 20;
  std::string text;
  size_t count = 0;
  for (const CheckpointId& id : CommittedOnLine()) {
    if (++count <= kNamed) {
      absl::StrAppend(&text, text.empty() ? "" : ", ", id.step);
    }
  }
  return text.empty()     ? "none"
         : count > kNamed ? absl::StrCat(text, " and ", count - kNamed, " older")
                          : text;
}

absl::StatusOr<CheckpointId> Coordinator::FindCommitted(std::optional<CheckpointId> wanted) const {
  if (!wanted) {
    const std::vector<CheckpointId> all = CommittedOnLine();
    if (!all.empty()) {
      return all.front();
    }
    return absl::NotFoundError(NothingCommitted().message);
  }
  std::string why;
  for (auto it = checkpoints_.rbegin(); it != checkpoints_.rend(); ++it) {
    const CheckpointId& id = it->first;
    const bool named = wanted->attempt == 0 ? OnLine(line_, id) : id.attempt == wanted->attempt;
    if (named && id.step == wanted->step && it->second.committed) {
      return id;
    }
    if (named && id.step == wanted->step && why.empty() &&
        (it->second.dead || it->second.cut_off)) {
      why = absl::StrCat("; ", WhyNotWhole(id, it->second));
    }
  }
  return absl::NotFoundError(
      absl::StrCat("job '", name_, "' has no committed step ", wanted->step,
                   wanted->attempt == 0 ? std::string(" on its line of descent")
                                        : absl::StrCat(" of attempt ", wanted->attempt),
                   why, "; on the line there are: ", CommittedText(), DoubtedText()));
}

}  // namespace holdfast
