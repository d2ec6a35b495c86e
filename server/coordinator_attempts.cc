// Which attempt a joining rank belongs to (docs/protocol.md §2), and what opening one means for the
// one before.
#include <algorithm>
#include <optional>

#include "absl/strings/str_cat.h"
#include "base/attempts.h"
#include "server/coordinator.h"

namespace holdfast {
namespace {

Failure Topology(std::string message) {
  return {absl::StatusCode::kFailedPrecondition, v1::Failure::REASON_TOPOLOGY, std::move(message)};
}

}  // namespace

Failure Coordinator::SupersededFailure(Attempt old) const {
  return {absl::StatusCode::kFailedPrecondition, v1::Failure::REASON_SUPERSEDED,
          absl::StrCat("attempt ", old, " of job '", name_, "' was superseded by attempt ",
                       attempt(), "; it can change nothing any more, and this process should end")};
}

bool Coordinator::IsCurrent(Attempt asked, RequestToken token, Turn& t) {
  if (asked == attempt()) {
    return true;
  }
  Refuse(token, SupersededFailure(asked), t);
  return false;
}

bool Coordinator::IsMember(Rank rank, const ProcessId& process) const {
  const Member* member = members_.Find(rank);
  return member != nullptr && member->alive && member->process == process;
}

size_t Coordinator::RanksAlive() const {
  return members_.alive();
}

std::vector<std::pair<Rank, ProcessId>> Coordinator::LivingMembers() const {
  std::vector<std::pair<Rank, ProcessId>> living;
  for (const auto& [rank, member] : members_.all()) {
    if (member.alive) {
      living.emplace_back(rank, member.process);
    }
  }
  return living;
}

std::vector<std::pair<Rank, ProcessId>> Coordinator::LivingMembersOn(NodeId node) const {
  std::vector<std::pair<Rank, ProcessId>> living;
  for (const Rank rank : members_.OnNode(node)) {
    if (const Member* member = members_.Find(rank); member->alive) {
      living.emplace_back(rank, member->process);
    }
  }
  return living;
}

int64_t Coordinator::LastOpenedUnixMs() const {
  return attempts_.empty() ? 0 : attempts_.rbegin()->second.opened_unix_ms;
}

bool Coordinator::AnythingCommitted() const {
  return std::any_of(attempts_.begin(), attempts_.end(),
                     [](const auto& a) { return a.second.any_committed; });
}

uint32_t Coordinator::world_size() const {
  return attempts_.empty() ? 0 : attempts_.rbegin()->second.world_size;
}

// A rank that ended or left without having sealed the step. A decided attempt takes no replacement
// for it, so the step can never become whole.
std::optional<Rank> Coordinator::RankLostFor(CheckpointId id) const {
  const auto found = checkpoints_.find(id);
  for (const Rank rank : members_.gone()) {
    if (found == checkpoints_.end() || found->second.shards.count(rank) == 0) {
      return rank;
    }
  }
  return std::nullopt;
}

// For sentences: who a rank that is gone was, and what became of it.
std::string Coordinator::HowGone(Rank rank) const {
  const ProcessId& process = members_.Find(rank)->process;
  return absl::StrCat("rank ", rank, " (", settings_.nodes->Who(process),
                      absent_.count(process.node) > 0 ? ") counts as ended, that node being gone"
                                                      : ") ended or left");
}

// Another living process has the rank, or the same one through a connection that is still open.
bool Coordinator::HeldByOther(const JoinAsked& j) const {
  const Member* found = members_.Find(j.rank);
  if (found == nullptr || !found->alive) {
    return false;
  }
  const Member& member = *found;
  return member.process != j.caller.process ||
         (member.connection != 0 && member.connection != j.connection);
}

bool Coordinator::OthersAlive(const JoinAsked& j) const {
  const Member* own = members_.Find(j.rank);
  const bool self = own != nullptr && own->alive && own->process == j.caller.process;
  return members_.alive() > (self ? 1 : 0) || MayHaveRanksUnheard();
}

std::optional<NodeId> Coordinator::SilentNode() const {
  const auto node = std::find_if(unheard_.begin(), unheard_.end(), [this](NodeId unheard) {
    return unreachable_.count(unheard) > 0;
  });
  return node == unheard_.end() ? std::nullopt : std::optional(*node);
}

// The state names the members of one node; which ranks live on the others those tell. One that is
// silent may have any rank that nobody else was heard to have: of the attempts that it can know of.
std::optional<NodeId> Coordinator::MayHaveRanksUnheard() const {
  return attempt() == loaded_attempt_ ? SilentNode() : std::nullopt;
}

// Whether the rank was in the current attempt before, or may have been: whoever takes its place
// would save other bytes under names that may have been given. Of an attempt that neither restored
// nor committed anything, and so need not have had them all, the state says who joined. Should that
// have been lost, those that sealed something are known by that; and a node that never told this
// coordinator who lives there may have had any, though it is gone by now.
bool Coordinator::WasIn(const JoinAsked& j) const {
  const AttemptInfo& newest = attempts_.rbegin()->second;
  const bool had_all = newest.any_committed || (newest.decided && newest.parent.attempt != 0);
  const bool before = joined_before_.Has(attempt(), j.rank) &&
                      !joined_before_.WasUntold(attempt(), j.rank, j.caller.process);
  return WasSeen(j.rank) || had_all || before ||
         (attempt() == loaded_attempt_ && !unheard_.empty());
}

// Nodes tell the next host who lives there. Of who ended before that nobody else would.
bool Coordinator::NamesWhoJoined() const {
  if (!settings_.nodes->Several() || attempts_.empty()) {
    return false;
  }
  const AttemptInfo& newest = attempts_.rbegin()->second;
  return newest.decided && newest.parent.attempt == 0 && !newest.any_committed;
}

// It is in the attempt, and the state that was loaded does not say so.
bool Coordinator::IsToBeNamed(Rank rank) const {
  return NamesWhoJoined() && !joined_before_.Has(attempt(), rank);
}

bool Coordinator::WasSeen(Rank rank) const {
  return members_.Find(rank) != nullptr || last_begun_.count(rank) > 0;
}

std::optional<Coordinator::Verdict> Coordinator::JudgeHolder(const JoinAsked& j) const {
  if (!HeldByOther(j)) {
    const auto silent = MayHaveRanksUnheard();
    if (!silent || members_.Find(j.rank) != nullptr) {
      return std::nullopt;
    }
    return Verdict{
        Verdict::Kind::kWait,
        {absl::StatusCode::kUnavailable, v1::Failure::REASON_UNSPECIFIED,
         absl::StrCat("rank ", j.rank, " of job '", name_, "' may live on ",
                      settings_.nodes->Name(*silent),
                      ", which has not been heard of yet; try again, or start all ranks again "
                      "under a new launch id")}};
  }
  const Member& member = *members_.Find(j.rank);
  return Verdict{
      Verdict::Kind::kWait,
      {absl::StatusCode::kAlreadyExists, v1::Failure::REASON_RANK_TAKEN,
       absl::StrCat("rank ", j.rank, " of job '", name_, "' is ",
                    settings_.nodes->Who(member.process),
                    ", which is still alive; end that process first, or start this one under "
                    "another job name")}};
}

// Rule 7, for a rank that would join the newest attempt as it is.
Coordinator::Verdict Coordinator::JudgeWorld(const JoinAsked& j) const {
  const AttemptInfo& newest = attempts_.rbegin()->second;
  if (newest.world_size == j.world_size) {
    return {Verdict::Kind::kJoin, {}};
  }
  if (!OthersAlive(j)) {
    return {Verdict::Kind::kOpenNext, {}};
  }
  std::string who = "another one";  // on a node that has not been heard of yet
  for (const auto& [rank, member] : members_.all()) {
    if (member.alive) {
      who = absl::StrCat("rank ", rank, " (", settings_.nodes->Who(member.process), ")");
      break;
    }
  }
  return {Verdict::Kind::kWait,
          Topology(absl::StrCat(
              "rank ", j.rank, " says world size ", j.world_size, ", but attempt ", attempt(),
              " of job '", name_, "' was opened with ", newest.world_size, " and ", who,
              " of it is alive; end it first, or give all ranks the same world size"))};
}

// A client that lost its connection takes its place again.
Coordinator::Verdict Coordinator::JudgeReturn(const JoinAsked& j) const {
  const AttemptInfo& newest = attempts_.rbegin()->second;
  if (j.attempt < attempt()) {
    return {Verdict::Kind::kRefuse, SupersededFailure(j.attempt)};
  }
  if (j.attempt > attempt()) {
    return {Verdict::Kind::kRefuse,
            {absl::StatusCode::kFailedPrecondition, v1::Failure::REASON_UNSPECIFIED,
             absl::StrCat("this daemon knows no attempt ", j.attempt, " of job '", name_,
                          "' (the newest is ", attempt(),
                          "): its state was lost or the job was removed; start the rank anew")}};
  }
  if (newest.world_size != j.world_size) {
    return {Verdict::Kind::kRefuse,
            Topology(absl::StrCat("rank ", j.rank, " returns with world size ", j.world_size,
                                  ", attempt ", j.attempt, " has ", newest.world_size))};
  }
  if (auto verdict = JudgeHolder(j)) {
    return *verdict;
  }
  // (Of one that nothing is known of here it is taken to be that process: only what was told so
  // names the attempt.)
  const Member* member = members_.Find(j.rank);
  if (newest.decided && member != nullptr && member->process != j.caller.process) {
    return {Verdict::Kind::kRefuse,
            {absl::StatusCode::kFailedPrecondition, v1::Failure::REASON_UNSPECIFIED,
             absl::StrCat("attempt ", j.attempt, " of job '", name_, "' had rank ", j.rank, " in ",
                          settings_.nodes->Who(member->process),
                          "; another process cannot take it up again: join without an attempt")}};
  }
  return {Verdict::Kind::kJoin, {}};
}

// A running rank that wants to restore again.
Coordinator::Verdict Coordinator::JudgeLeaver(const JoinAsked& j) const {
  if (j.leave_attempt > attempt()) {
    return {Verdict::Kind::kRefuse,
            {absl::StatusCode::kFailedPrecondition, v1::Failure::REASON_UNSPECIFIED,
             absl::StrCat("this daemon knows no attempt ", j.leave_attempt, " of job '", name_,
                          "' to leave")}};
  }
  if (auto verdict = JudgeHolder(j)) {
    return *verdict;
  }
  if (j.leave_attempt == attempt()) {
    return {Verdict::Kind::kOpenNext, {}};
  }
  if (attempts_.rbegin()->second.decided) {
    return {Verdict::Kind::kRefuse, SupersededFailure(j.leave_attempt)};
  }
  return JudgeWorld(j);
}

Coordinator::Verdict Coordinator::JudgeLaunch(const JoinAsked& j) const {
  const AttemptInfo& newest = attempts_.rbegin()->second;
  if (newest.launch != j.launch) {
    // A launch that had its attempt does not come back: two launches would supersede each other for
    // ever.
    for (const auto& [number, info] : attempts_) {
      if (info.launch == j.launch) {
        return {Verdict::Kind::kRefuse, SupersededFailure(number)};
      }
    }
    return {Verdict::Kind::kOpenNext, {}};
  }
  if (auto verdict = JudgeHolder(j)) {
    return *verdict;
  }
  const Member* member = members_.Find(j.rank);
  const bool same_process = member != nullptr && member->process == j.caller.process;
  if (newest.decided && WasIn(j) && !same_process) {
    return {
        Verdict::Kind::kRefuse,
        {absl::StatusCode::kFailedPrecondition, v1::Failure::REASON_UNSPECIFIED,
         absl::StrCat(
             "rank ", j.rank, " of job '", name_, "' ",
             WasSeen(j.rank) || joined_before_.Has(attempt(), j.rank) ? "was" : "may have been",
             " in launch '", j.launch,
             WasSeen(j.rank) ? "' with another process" : "' before the job had its present host",
             ", and attempt ", attempt(),
             " has moved on; start all ranks again under a new launch id")}};
  }
  return JudgeWorld(j);
}

// No launch id: what a person at a shell, or a launcher that Holdfast does not know, does.
Coordinator::Verdict Coordinator::JudgeFresh(const JoinAsked& j) const {
  const AttemptInfo& newest = attempts_.rbegin()->second;
  if (auto verdict = JudgeHolder(j)) {
    return *verdict;
  }
  if (!newest.decided) {
    return JudgeWorld(j);
  }
  if (!OthersAlive(j)) {
    return {Verdict::Kind::kOpenNext, {}};
  }
  if (newest.world_size != j.world_size) {
    return JudgeWorld(j);
  }
  // It began from scratch by a save of a rank that came earlier: this one missed nothing.
  return {WasIn(j) && !AsksAgain(j) ? Verdict::Kind::kOpenNext : Verdict::Kind::kJoin, {}};
}

// This very request was answered, and its node asks again because it met this host anew before it
// heard that.
bool Coordinator::LetInAlready(const JoinAsked& j) const {
  const Member* member = members_.Find(j.rank);
  return member != nullptr && member->alive && member->process == j.caller.process &&
         j.opening != 0 && member->opening == j.opening;
}

// The process was let in, and never told: it has begun nothing. (An attempt that restored or
// committed something had it with it.)
bool Coordinator::AsksAgain(const JoinAsked& j) const {
  const AttemptInfo& newest = attempts_.rbegin()->second;
  const Member* member = members_.Find(j.rank);
  return member != nullptr && !member->told && member->process == j.caller.process &&
         last_begun_.count(j.rank) == 0 && !newest.any_committed && newest.parent.attempt == 0;
}

Coordinator::Verdict Coordinator::Judge(const JoinAsked& j) const {
  const Verdict verdict = JudgeByWhatIsKnown(j);
  if (verdict.kind == Verdict::Kind::kOpenNext && !history_known_ && InventoryPending()) {
    // A tier may know of attempts whose numbers would be given a second time.
    return {Verdict::Kind::kWait,
            {absl::StatusCode::kUnavailable, v1::Failure::REASON_UNSPECIFIED,
             absl::StrCat("join: the state of job '", name_,
                          "' was lost, and the durable tiers, which may know its attempts, are "
                          "still being read; try again")}};
  }
  return verdict;
}

Coordinator::Verdict Coordinator::JudgeByWhatIsKnown(const JoinAsked& j) const {
  if (j.caller.uid != uid_) {
    return {Verdict::Kind::kRefuse,
            {absl::StatusCode::kPermissionDenied, v1::Failure::REASON_OTHER_OWNER,
             absl::StrCat("job '", name_, "' belongs to uid ", uid_, ", not to uid ", j.caller.uid,
                          "; choose another job name")}};
  }
  if (attempts_.empty()) {
    if (j.attempt == 0 && j.leave_attempt == 0) {
      return {Verdict::Kind::kOpenNext, {}};
    }
    return {Verdict::Kind::kRefuse,
            {absl::StatusCode::kFailedPrecondition, v1::Failure::REASON_UNSPECIFIED,
             absl::StrCat("this daemon knows no attempt of job '", name_,
                          "': its state was lost or the job was removed; start the rank anew")}};
  }
  if (LetInAlready(j)) {
    return {Verdict::Kind::kJoin, {}};
  }
  if (j.attempt != 0) {
    return JudgeReturn(j);
  }
  if (j.leave_attempt != 0) {
    return JudgeLeaver(j);
  }
  return j.launch.empty() ? JudgeFresh(j) : JudgeLaunch(j);
}

void Coordinator::On(const JoinAsked& m, Turn& t) {
  if (removed_) {  // (a rank of another node: its own node may not have heard of that)
    return Refuse(m.token,
                  {absl::StatusCode::kUnavailable, v1::Failure::REASON_UNSPECIFIED,
                   absl::StrCat("job '", name_, "' is being removed; try again")},
                  t);
  }
  const Verdict verdict = Judge(m);
  if (verdict.kind == Verdict::Kind::kWait && !m.may_wait) {
    return Refuse(m.token, verdict.failure, t);
  }
  if (verdict.kind == Verdict::Kind::kWait && joins_.size() >= kPendingJoinsMax) {
    return Refuse(m.token,
                  {absl::StatusCode::kUnavailable, v1::Failure::REASON_UNSPECIFIED,
                   absl::StrCat(joins_.size(), " ranks already wait to join job '", name_,
                                "'; try again later")},
                  t);
  }
  const Attempt before = attempt();
  Admit(m, verdict, t);
  if (attempt() != before) {
    RetryJoins(t);
  }
}

void Coordinator::Admit(const JoinAsked& j, const Verdict& verdict, Turn& t) {
  switch (verdict.kind) {
    case Verdict::Kind::kRefuse:
      return Refuse(j.token, verdict.failure, t);
    case Verdict::Kind::kWait:
      joins_.Add(j);
      return;
    case Verdict::Kind::kOpenNext:
      if (highest_attempt_ >= kAttemptMax) {
        return Refuse(j.token,
                      {absl::StatusCode::kFailedPrecondition, v1::Failure::REASON_UNSPECIFIED,
                       absl::StrCat("job '", name_, "' is said to have had ", highest_attempt_,
                                    " attempts, and none is counted after it (somebody has made ",
                                    "files of such names): take a step to another job with ",
                                    "ckptctl export and import, and go on there")},
                      t);
      }
      OpenAttempt(j, t);
      break;
    case Verdict::Kind::kJoin:
      break;
  }
  if (session_ && !session_->Has(j.rank, j.caller.process)) {
    // A replacement: what its predecessor had loaded is gone.
    if (const Member* old = members_.Find(j.rank)) {
      DropFromSession(j.rank, ProcessId(old->process), t);
    }
  }
  const Member* before = members_.Find(j.rank);
  const bool known = before != nullptr && before->alive && before->process == j.caller.process;
  const bool was_here = before != nullptr && before->process.node == kHere;
  const bool first = before == nullptr;
  const bool new_node = members_.OnNode(j.caller.process.node).empty();
  members_.Set(j.rank, {j.caller.process, j.connection, true, known && before->told, j.opening});
  // What nobody else can tell the next coordinator: that there is this attempt, that the rank
  // lives, however silent it is, or that it lives here no more. (A rank of another node is known
  // there, and told of when that node comes again; which it waits for if the state names it.)
  const bool here = j.caller.process.node == kHere;
  // Nor who was in an attempt that has committed nothing: they are named when it decides, or when
  // they come later.
  const bool to_be_named = first && IsToBeNamed(j.rank);
  if (verdict.kind == Verdict::Kind::kOpenNext ||
      (!known &&
       (here || was_here || to_be_named || (new_node && !named_.Has(j.caller.process.node))))) {
    Persist(t);
  } else if (!known && new_node) {
    needed_version_ = std::max(needed_version_, named_version_);  // which may still be on its way
  }
  const AttemptInfo& info = attempts_.rbegin()->second;
  JoinAccepted accepted{j.token,      attempt(), j.rank,      info.world_size,
                        info.decided, {},        std::nullopt};
  if (info.decided) {
    accepted.descent = line_;
  }
  if (const auto last = last_begun_.find(j.rank); last != last_begun_.end()) {
    accepted.last_step = last->second;
  }
  AnswerWhenDurable(j.token, std::move(accepted), t);
  FetchAhead(j.rank, t);
}

void Coordinator::OpenAttempt(const JoinAsked& j, Turn& t) {
  const Attempt before = attempt();
  const Attempt number = ++highest_attempt_;
  AttemptInfo info;
  info.launch = j.launch;
  info.world_size = j.world_size;
  info.opened_unix_ms = t.time.unix_ms;
  info.opening = j.opening;
  attempts_[number] = info;
  policy_ = j.policy;

  EndAttempt(number, SupersededFailure(before), t);
  PruneAttempts();
  Tell(Report::Kind::kAttemptOpened,
       absl::StrCat("attempt ", number, " opened by rank ", j.rank, " (",
                    settings_.nodes->Who(j.caller.process), "), world size ", j.world_size,
                    j.launch.empty() ? "" : absl::StrCat(", launch ", j.launch)),
       0, t);
}

// Nothing of any attempt below `number` counts from now on, and the next one begins empty.
void Coordinator::EndAttempt(Attempt number, const Failure& superseded, Turn& t) {
  // 1. It is fenced before anything of it can be told apart from the new one.
  t.Say(Superseded{number}, kEveryNode);
  if (session_) {
    FailSession(superseded, t);
  }
  last_session_ = 0;
  last_failure_.reset();
  for (const auto& [token, waiter] : awaits_) {
    Refuse(token, superseded, t);
  }
  awaits_.clear();
  awaits_of_.clear();
  for (auto it = durable_waits_.begin(); it != durable_waits_.end();) {
    // Nobody is told that it belongs to, saves in or restored into an attempt that is over. What
    // an operator has set is of the job, and holds.
    const bool of_attempt = !std::holds_alternative<RestorePointSet>(it->message) &&
                            !std::holds_alternative<AdminAnswered>(it->message);
    if (of_attempt) {
      Refuse(it->token, superseded, t);
    }
    it = of_attempt ? durable_waits_.erase(it) : std::next(it);
  }
  std::vector<CheckpointId> incomplete;
  for (const auto& [id, checkpoint] : checkpoints_) {
    // (A durable tier that has not been read may have the rest of what nobody writes now.)
    if (checkpoint.Open() && (AllInventoriesKnown() || !checkpoint.writing.empty())) {
      incomplete.push_back(id);
    }
  }
  for (const CheckpointId& id : incomplete) {
    LetGo(id, superseded, t);
  }

  // 2. The new one begins empty.
  EndFetchAhead(t);
  members_.Clear();
  joined_before_.Clear();
  last_begun_.clear();
  fates_.clear();
  any_save_ = false;
  stop_ = {};
}

// Any change of members or attempts may let a waiting rank in; the first that waited goes first.
// With a rank: nothing has changed for the others.
void Coordinator::RetryJoins(Turn& t, std::optional<Rank> rank) {
  for (auto place = joins_.Next(0, rank); place;) {
    const Verdict verdict = Judge(joins_.At(*place));
    if (verdict.kind == Verdict::Kind::kWait) {
      place = joins_.Next(*place + 1, rank);
      continue;
    }
    const Attempt before = attempt();
    Admit(joins_.TakeAt(*place), verdict, t);
    if (attempt() != before) {
      rank.reset();
    }
    place = joins_.Next(attempt() != before ? 0 : *place, rank);
  }
}

// Others wait for their places, or (another world size) for the last that lives. Who cancels
// anything else makes no place: thousands may do so at a time.
void Coordinator::RetryJoinsFor(const std::set<Rank>& ranks, Turn& t) {
  if (ranks.empty()) {
    return;
  }
  if (members_.alive() <= 1) {
    return RetryJoins(t);
  }
  for (const Rank rank : ranks) {
    RetryJoins(t, rank);
  }
}

void Coordinator::On(const SeatLost& m, Turn& t) {
  const Member* member = members_.Find(m.rank);
  if (m.attempt != attempt() || member == nullptr || member->process != m.process) {
    return;
  }
  if (m.how == SeatLost::How::kDisconnected) {
    if (member->connection != m.connection) {
      return;
    }
    members_.SetConnection(m.rank, 0);
  } else {
    members_.SetAlive(m.rank, false);
    members_.SetConnection(m.rank, 0);
    if (m.how == SeatLost::How::kLeft) {
      Persist(t);  // its process lives on: nothing else would tell a restarted daemon
    } else {
      PersistLazily(t);
    }
    AbandonWithout(
        m.rank, std::nullopt,
        absl::StrCat("rank ", m.rank, " (", settings_.nodes->Who(m.process), ") ",
                     m.how == SeatLost::How::kLeft       ? "left"
                     : absent_.count(m.process.node) > 0 ? "counts as ended, that node being gone,"
                                                         : "ended",
                     " without having begun it"),
        t);
    if (m.how == SeatLost::How::kLeft) {
      SendEndOfRun(t);
    }
  }
  DropFromSession(m.rank, m.process, t);
  RetryJoinsFor({m.rank}, t);
  RetainDurable(t);  // it waits for those who have still to restore
}

// `restore_point_change`: which restore point the decision was made by. One that was set since is
// for the next attempt.
void Coordinator::Decide(CheckpointId parent, uint64_t restore_point_change, Turn& t) {
  AttemptInfo& info = attempts_.rbegin()->second;
  held_until_durable_ = CommittedOnLine();
  held_until_durable_.push_back(parent);                   // (so there is always one)
  history_known_ = history_known_ || parent.attempt == 0;  // of a line that begins here
  info.decided = true;
  info.parent = parent;
  if (restore_point_change == restore_point_changes_) {
    restore_point_.Clear();
    EndPrefetch(t);
  }
  EndFetchAhead(t);
  std::erase_if(replaced_, [&](const auto& r) { return members_.OnNode(r.first).empty(); });
  ComputeLine();
  Persist(t);
  decision_version_ = needed_version_;
  Tell(Report::Kind::kSessionDecided,
       parent.attempt == 0 ? absl::StrCat("attempt ", attempt(), " starts from scratch")
                           : absl::StrCat("attempt ", attempt(), " descends from step ",
                                          parent.step, " of attempt ", parent.attempt),
       0, t);
}

void Coordinator::ComputeLine() {
  std::map<Attempt, AttemptParent> parents;
  for (const auto& [number, info] : attempts_) {
    parents[number] = {info.decided, info.parent};
  }
  line_ = LineOf(parents, NewestDecided(parents), kLineMax);
}

}  // namespace holdfast
