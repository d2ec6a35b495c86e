#include "server/node_core.h"

#include <iterator>
#include <set>
#include <utility>

#include "server/agent.h"

namespace holdfast {

struct NodeCore::Impl {
  Impl(const v1::DaemonConfig& config, std::string node_name, uint64_t seed, uint32_t daemon_uid)
      : agent(config, std::move(node_name), seed, daemon_uid) {}

  // Delivers what agent and coordinators say to each other, until nobody has anything to say.
  void Pump(EventTime time) {
    do {
      while (!agent.messages().empty()) {
        const auto [job, message] = std::move(agent.messages().front());
        agent.messages().pop_front();
        Deliver(job, message, time);
      }
      agent.Settle(time);
    } while (!agent.messages().empty());
  }

  void Deliver(const JobUuid& job, const ToCoordinator& message, EventTime time) {
    const auto found = agent.jobs().find(job);
    if (found == agent.jobs().end()) {
      return;
    }
    std::vector<ForAgent> answers;
    found->second->Handle(message, kHere, time, answers);
    UpdateWake(job);
    agent.Take(job, answers, time);
  }

  void UpdateWake(const JobUuid& job) {
    if (const auto old = wake_of.find(job); old != wake_of.end()) {
      wakes.erase({old->second, job});
      wake_of.erase(old);
    }
    const auto found = agent.jobs().find(job);
    if (found == agent.jobs().end()) {
      return;
    }
    if (const std::optional<MonotonicTime> wake = found->second->NextWake()) {
      wake_of[job] = *wake;
      wakes.insert({*wake, job});
    }
  }

  void WakeJobs(EventTime time) {
    std::vector<JobUuid> due;
    for (auto it = wakes.begin(); it != wakes.end() && it->first <= time.now; ++it) {
      due.push_back(it->second);
    }
    for (const JobUuid& job : due) {
      Deliver(job, WakeUp{}, time);
      UpdateWake(job);  // of a job that is gone, too
    }
  }

  // One timer for everything; set again only when its time changes.
  void SetNextTimer() {
    std::optional<MonotonicTime> next = agent.NextDeadline();
    if (!wakes.empty()) {
      next = next ? std::min(*next, wakes.begin()->first) : wakes.begin()->first;
    }
    if (next && next != timer) {
      agent.actions().push_back(SetTimer{*next});
    }
    timer = next ? next : timer;
  }

  Agent agent;
  std::map<JobUuid, MonotonicTime> wake_of;
  std::set<std::pair<MonotonicTime, JobUuid>> wakes;
  std::optional<MonotonicTime> timer;
};

NodeCore::NodeCore(const v1::DaemonConfig& config, std::string node_name, uint64_t seed,
                   uint32_t daemon_uid)
    : impl_(std::make_unique<Impl>(config, std::move(node_name), seed, daemon_uid)) {}

NodeCore::~NodeCore() = default;

Actions NodeCore::Handle(const Event& event, MonotonicTime now, int64_t unix_ms) {
  const EventTime time{now, unix_ms};
  impl_->agent.Handle(event, time);
  if (std::holds_alternative<Started>(event)) {
    for (const auto& [job, coordinator] : impl_->agent.jobs()) {
      impl_->UpdateWake(job);
    }
  }
  impl_->Pump(time);
  if (std::holds_alternative<TimerFired>(event)) {
    impl_->timer.reset();
    impl_->WakeJobs(time);
    impl_->Pump(time);
  }
  // A deadline of 0 asks for what can be said now.
  if (const std::optional<MonotonicTime> next = impl_->agent.NextDeadline(); next && *next <= now) {
    impl_->agent.Expire(time);
    impl_->Pump(time);
  }
  impl_->SetNextTimer();
  std::deque<Action>& actions = impl_->agent.actions();
  Actions result(std::make_move_iterator(actions.begin()), std::make_move_iterator(actions.end()));
  actions.clear();
  return result;
}

std::string NodeCore::CheckInvariants() const {
  for (const auto& [uuid, job] : impl_->agent.jobs()) {
    if (std::string broken = job->CheckInvariants(); !broken.empty()) {
      return broken;
    }
  }
  return impl_->agent.CheckInvariants();
}

}  // namespace holdfast
