#include "server/peers/peer_inbox.h"

#include <iterator>
#include <utility>

namespace holdfast {
namespace {

size_t BytesOf(const auto& messages) {
  size_t bytes = 0;
  for (const std::string& message : messages) {
    bytes += message.size();
  }
  return bytes;
}

}  // namespace

PeerInbox::PeerInbox(const Limits& limits, PeerObserver observer, std::function<void()> on_room)
    : limits_(limits),
      observer_(std::move(observer)),
      on_room_(std::move(on_room)),
      thread_([this] { Run(); }) {}

PeerInbox::Pending& PeerInbox::Of(const std::string& node) {
  return pending_[node];
}

// After a change of what pends for it.
void PeerInbox::TakeTurn(const std::string& node) {
  const auto it = pending_.find(node);
  if (it->second.in_turn) {
    return;
  }
  if (it->second.empty()) {
    pending_.erase(it);
    return;
  }
  it->second.in_turn = true;
  turns_.push_back(node);
  changed_.NotifyOne();
}

void PeerInbox::Reached(const std::string& node, PeerChannel channel) {
  MutexLock lock(mutex_);
  Pending& pending = Of(node);
  pending.problem.reset();
  pending.reached = PeerReached{node, channel};
  TakeTurn(node);
}

void PeerInbox::Lost(const std::string& node, PeerChannel channel, const std::string& why) {
  MutexLock lock(mutex_);
  Pending& pending = Of(node);
  pending.problem.reset();
  if (pending.reached) {  // nobody has heard of it
    pending.reached.reset();
    pending.problem = PeerProblem{node, why};
  } else {
    pending.lost = PeerLost{node, channel, why};
  }
  TakeTurn(node);
}

void PeerInbox::Problem(const std::string& node, const std::string& why) {
  MutexLock lock(mutex_);
  Of(node).problem = PeerProblem{node, why};
  TakeTurn(node);
}

void PeerInbox::Began(const std::string& node) {
  MutexLock lock(mutex_);
  Pending& pending = Of(node);
  pending.began = true;
  messages_ -= pending.said.size();
  bytes_ -= BytesOf(pending.said);
  pending.said.clear();
  pending.silent = false;
  TakeTurn(node);
}

void PeerInbox::Silent(const std::string& node) {
  MutexLock lock(mutex_);
  Of(node).silent = true;
  TakeTurn(node);
}

void PeerInbox::Spoke(const std::string& node, std::vector<std::string> messages) {
  MutexLock lock(mutex_);
  messages_ += messages.size();
  bytes_ += BytesOf(messages);
  Pending& pending = Of(node);
  pending.said.insert(pending.said.end(), std::make_move_iterator(messages.begin()),
                      std::make_move_iterator(messages.end()));
  TakeTurn(node);
}

bool PeerInbox::HasRoom(const std::vector<std::string>& messages) {
  MutexLock lock(mutex_);
  const bool room = messages.empty() || messages_ == 0 ||
                    (messages_ + messages.size() <= limits_.messages_max &&
                     bytes_ + BytesOf(messages) <= limits_.bytes_max);
  room_wanted_ = room_wanted_ || !room;
  return room;
}

PeerEvent PeerInbox::TakeNext() {
  const std::string node = std::move(turns_.front());
  turns_.pop_front();
  Pending& pending = pending_.at(node);
  pending.in_turn = false;
  PeerEvent event;
  if (pending.lost) {
    event = *std::exchange(pending.lost, std::nullopt);
  } else if (pending.reached) {
    event = *std::exchange(pending.reached, std::nullopt);
  } else if (pending.problem) {  // newer than that: a channel that is reached ends what was before
    event = *std::exchange(pending.problem, std::nullopt);
  } else if (std::exchange(pending.began, false)) {
    event = PeerBegan{node};
  } else if (pending.said.empty()) {
    pending.silent = false;
    event = PeerSilent{node};
  } else {
    event = PeerSpoke{node, std::move(pending.said.front())};
    pending.said.pop_front();
    --messages_;
    bytes_ -= std::get<PeerSpoke>(event).message.size();
  }
  TakeTurn(node);
  return event;
}

void PeerInbox::Run() {
  while (true) {
    PeerEvent event;
    bool tell_room = false;
    {
      MutexLock lock(mutex_);
      while (!stopping_ && turns_.empty()) {
        changed_.Wait(mutex_);
      }
      if (stopping_) {
        return;
      }
      event = TakeNext();
      tell_room = std::exchange(room_wanted_, false);
    }
    if (tell_room) {
      on_room_();
    }
    observer_(std::move(event));
  }
}

void PeerInbox::Stop() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    changed_.NotifyOne();
  }
  if (thread_.joinable()) {
    thread_.join();
  }
}

}  // namespace holdfast
