#include "server/node_core.h"

#include <iterator>
#include <set>
#include <utility>

#include "server/agent.h"
#include "server/router.h"

namespace holdfast {

struct NodeCore::Impl final : RouterOwner {
  Impl(const v1::DaemonConfig& config, std::string node_name, uint64_t seed, uint32_t daemon_uid)
      : agent(config, std::move(node_name), seed, daemon_uid) {
    if (config.has_cluster()) {
      router.emplace(*this, agent.nodes(), config.cluster().members_size() > 0);
      agent.AskWhyNotHeard([this](const std::string& name) { return router->WhyNotHeard(name); });
    }
  }

  // Delivers what agent, coordinators and other nodes say to each other, until nobody has anything
  // to say.
  void Pump() {
    do {
      while (!agent.messages().empty() || !agent.notices().empty()) {
        if (!agent.notices().empty()) {
          const AgentNotice notice = std::move(agent.notices().front());
          agent.notices().pop_front();
          if (router) {
            router->Handle(notice, time);
          }
          continue;
        }
        auto [job, message] = std::move(agent.messages().front());
        agent.messages().pop_front();
        if (router && !std::holds_alternative<JobRemoved>(message)) {
          router->FromAgent(job, std::move(message), time);
        } else {
          TellCoordinator(job, kHere, message);
        }
      }
      agent.Settle(time);
      if (router) {
        router->Settle(time);
      }
    } while (!agent.messages().empty() || !agent.notices().empty());
  }

  void UpdateWake(const JobUuid& job) {
    if (const auto old = wake_of.find(job); old != wake_of.end()) {
      wakes.erase({old->second, job});
      wake_of.erase(old);
    }
    const Coordinator* coordinator = agent.Hosted(job);
    if (coordinator == nullptr) {
      return;
    }
    if (const std::optional<MonotonicTime> wake = coordinator->NextWake()) {
      wake_of[job] = *wake;
      wakes.insert({*wake, job});
    }
  }

  // Of a job that was told a thousand things in one event, once.
  void UpdateWakes() {
    for (const JobUuid& job : std::exchange(wakes_to_update, {})) {
      UpdateWake(job);
    }
  }

  void WakeJobs() {
    UpdateWakes();
    std::vector<JobUuid> due;
    for (auto it = wakes.begin(); it != wakes.end() && it->first <= time.now; ++it) {
      due.push_back(it->second);
    }
    for (const JobUuid& job : due) {
      TellCoordinator(job, kHere, WakeUp{});
      wakes_to_update.insert(job);  // of a job that is gone, too
    }
  }

  // One timer for everything; set again only when its time changes.
  void SetNextTimer() {
    UpdateWakes();
    std::optional<MonotonicTime> next = agent.NextDeadline();
    const auto at = [&next](MonotonicTime when) { next = next ? std::min(*next, when) : when; };
    if (!wakes.empty()) {
      at(wakes.begin()->first);
    }
    if (const auto due = router ? router->NextDeadline() : std::nullopt) {
      at(*due);
    }
    if (next && next != timer) {
      agent.actions().push_back(SetTimer{*next});
    }
    timer = next ? next : timer;
  }

  // ---- For the router ----
  void Act(Action action) override { agent.actions().push_back(std::move(action)); }
  bool BeginHosting(const std::string& name, const v1::JobState* state) override {
    return agent.BeginHosting(name, state, time);
  }
  void EndHosting(const std::string& name) override { agent.EndHosting(name); }
  void Want(const std::string& name, const JobWanter& wanter) override {
    agent.Want(name, wanter, time);
  }
  void WantHere(const std::string& name) override { agent.WantHere(name, time); }
  void Meet(const std::string& name, const JobUuid& job, const JobHosted& hosted) override {
    MeetJob meet{name, job, hosted.uid, hosted.gid, hosted.attempt, hosted.world_size, {}};
    for (const JobHosted::LocalRank& each : hosted.ranks) {
      meet.ranks.emplace_back(each.rank, ProcessId{each.pid, each.start_ticks});
    }
    agent.Meet(meet, time);
  }
  std::optional<v1::JobState> KeptState(const std::string& name) override {
    return agent.KeptState(name);
  }
  void KeepState(const v1::JobState& state) override { agent.KeepState(state, time); }
  absl::Status CheckState(const std::string& name, const v1::JobState& state) override {
    return agent.CheckState(name, state);
  }
  bool Waits(RequestToken token) override { return agent.Waits(token); }
  std::string JobName(const JobUuid& job) override { return agent.JobName(job); }
  void AskAgent(const AdminRequest& request) override { agent.Handle(request, time); }
  v1::DaemonStatus DescribeDaemon(const Caller& caller) override {
    return agent.DescribeDaemon(caller, time);
  }
  bool IsAbsent(const std::string& name) override { return agent.IsAbsent(name); }
  uint64_t RanksHere(const JobUuid& job) override { return agent.RanksHere(job); }
  bool JoinsWait(const std::string& name) override { return agent.AnyWaitsForHost(name, true); }
  bool ReadersWait(const std::string& name) override { return agent.AnyWaitsForHost(name, false); }
  std::optional<JobWanter> WhoJoins(const std::string& name) override {
    return agent.WhoJoins(name);
  }
  void SayAbsent(const std::string& name) override { agent.SayAbsent(name, time); }
  void LetGo(const std::string& name, const std::vector<JobUuid>& jobs) override {
    agent.LetGo(name, jobs, time);
  }
  void OthersLetGo(const JobUuid& job, uint64_t bytes) override {
    agent.OthersLetGo(job, bytes, time);
  }
  void OthersAreLate(const JobUuid& job, const absl::Status& why) override {
    agent.OthersAreLate(job, why, time);
  }
  std::vector<JobUuid> RemovedBefore(const std::string& name) override {
    return agent.RemovedBefore(name);
  }
  bool MayTouch(const std::string& name, const Caller& caller) override {
    return agent.MayTouch(name, caller);
  }
  void TellAgent(const JobUuid& job, const ToAgent& message) override {
    agent.Take(job, message, time);
  }
  void TellCoordinator(const JobUuid& job, NodeId from, const ToCoordinator& message) override {
    Coordinator* coordinator = agent.Hosted(job);
    if (coordinator == nullptr) {
      return;
    }
    std::vector<ForAgent> answers;
    coordinator->Handle(message, from, time, answers);
    agent.Overhear(job, message, time);
    Deliver(job, answers);
  }
  // Of the jobs that this node hosts.
  void ChangeSettings() {
    const CoordinatorSettings settings = agent.Settings();
    std::vector<JobUuid> jobs;
    for (const auto& [job, known] : agent.jobs()) {
      jobs.push_back(job);
    }
    for (const JobUuid& job : jobs) {
      if (Coordinator* coordinator = agent.Hosted(job); coordinator != nullptr) {
        std::vector<ForAgent> answers;
        coordinator->ChangeSettings(settings, time, answers);
        Deliver(job, answers);
      }
    }
  }
  void Deliver(const JobUuid& job, std::vector<ForAgent>& answers) {
    wakes_to_update.insert(job);
    if (router) {
      router->FromCoordinator(job, answers, time);
    } else {
      agent.Take(job, answers, time);
    }
  }
  std::optional<JobHosted> Describe(const JobUuid& job, NodeId to) override {
    if (agent.Hosted(job) == nullptr) {
      return std::nullopt;
    }
    const Coordinator& coordinator = *agent.Hosted(job);
    JobHosted hosted{
        coordinator.uid(), coordinator.gid(), coordinator.attempt(), coordinator.world_size(), {}};
    for (const auto& [rank, process] : coordinator.LivingMembersOn(to)) {
      hosted.ranks.push_back({rank, process.pid, process.start_ticks});
    }
    return hosted;
  }

  EventTime time;
  Agent agent;
  std::optional<Router> router;  // in a cluster
  std::map<JobUuid, MonotonicTime> wake_of;
  std::set<std::pair<MonotonicTime, JobUuid>> wakes;
  std::set<JobUuid> wakes_to_update;
  std::optional<MonotonicTime> timer;
};

NodeCore::NodeCore(const v1::DaemonConfig& config, std::string node_name, uint64_t seed,
                   uint32_t daemon_uid)
    : impl_(std::make_unique<Impl>(config, std::move(node_name), seed, daemon_uid)) {}

NodeCore::~NodeCore() = default;

Actions NodeCore::Handle(const Event& event, MonotonicTime now, int64_t unix_ms) {
  const EventTime time = impl_->time = {now, unix_ms};
  if (impl_->router) {
    impl_->router->Expire(time);  // a lease that has ended ends all that it allowed, first of all
    impl_->Pump();
  }
  if (const auto* told = std::get_if<MembershipTold>(&event)) {
    impl_->router->Handle(told->event, time);
  } else if (const auto* peer = std::get_if<PeerTold>(&event)) {
    impl_->router->Handle(peer->event, time);
  } else if (const auto* read = std::get_if<ReadForPeer>(&event)) {
    impl_->router->Handle(*read, time);
  } else if (const auto* asked = std::get_if<AdminRequest>(&event);
             asked == nullptr || !impl_->router || !impl_->router->TakesOver(*asked, time)) {
    impl_->agent.Handle(event, time);
  }
  if (std::holds_alternative<SettingsChanged>(event)) {
    impl_->ChangeSettings();
  }
  if (std::holds_alternative<Started>(event)) {
    for (const auto& [job, known] : impl_->agent.jobs()) {
      impl_->UpdateWake(job);
    }
  }
  impl_->Pump();
  if (std::holds_alternative<TimerFired>(event)) {
    impl_->timer.reset();
    impl_->WakeJobs();
    impl_->Pump();
  }
  // A deadline of 0 asks for what can be said now.
  if (const std::optional<MonotonicTime> next = impl_->agent.NextDeadline(); next && *next <= now) {
    impl_->agent.Expire(time);
    impl_->Pump();
  }
  if (impl_->router) {
    impl_->router->Flush(time);
  }
  impl_->SetNextTimer();
  Actions result;
  std::deque<Action>& actions = impl_->agent.actions();
  while (!actions.empty()) {  // (what goes to another node makes another action)
    Action action = std::move(actions.front());
    actions.pop_front();
    const auto* reply = std::get_if<AdminReply>(&action);
    if (reply == nullptr || !impl_->router || !impl_->router->TakesReply(*reply)) {
      result.push_back(std::move(action));
    }
  }
  return result;
}

uint32_t NodeCore::SavesBeingWritten() const {
  return impl_->agent.SavesBeingWritten();
}

std::optional<uint32_t> NodeCore::OwnerOf(const std::string& job) const {
  return impl_->agent.OwnerOf(job);
}

std::string NodeCore::CheckInvariants() const {
  for (const auto& [uuid, job] : impl_->agent.jobs()) {
    if (job.coordinator == nullptr) {
      continue;
    }
    if (std::string broken = job.coordinator->CheckInvariants(); !broken.empty()) {
      return broken;
    }
  }
  if (std::string broken = impl_->router ? impl_->router->CheckInvariants() : ""; !broken.empty()) {
    return broken;
  }
  return impl_->agent.CheckInvariants();
}

}  // namespace holdfast
