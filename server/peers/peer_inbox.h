// What has come and is not told yet, and the thread that tells it: one event at a time, the nodes
// in turn. Bounded: of messages by what HasRoom says, of everything else by what it means together
// (a channel that was lost before anybody heard of it was none).
//
//   PeerInbox inbox({.messages_max = 1000, .bytes_max = 1 << 20}, observer, [&] { Retry(); });
//   if (inbox.HasRoom(messages)) { inbox.Spoke("b", std::move(messages)); }
//
// Owner: PeerNetwork. One thread calls it; observer and `on_room` are called on the inbox's own.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "server/peers/peer_events.h"

namespace holdfast {

class PeerInbox {
 public:
  struct Limits {
    size_t messages_max = 0;
    size_t bytes_max = 0;
  };
  PeerInbox(const Limits& limits, PeerObserver observer, std::function<void()> on_room);
  ~PeerInbox() { Stop(); }
  PeerInbox(const PeerInbox&) = delete;
  PeerInbox& operator=(const PeerInbox&) = delete;

  void Reached(const std::string& node, PeerChannel channel) EXCLUDES(mutex_);
  void Lost(const std::string& node, PeerChannel channel, const std::string& why) EXCLUDES(mutex_);
  void Problem(const std::string& node, const std::string& why) EXCLUDES(mutex_);
  // Drops what it said before and nobody has heard.
  void Began(const std::string& node) EXCLUDES(mutex_);
  void Spoke(const std::string& node, std::vector<std::string> messages) EXCLUDES(mutex_);
  // After what it said before.
  void Silent(const std::string& node) EXCLUDES(mutex_);

  // An empty inbox has room for anything. If there is none, on_room is called once when
  // something has been taken out; there may be too little still.
  bool HasRoom(const std::vector<std::string>& messages) EXCLUDES(mutex_);

  // Waits for the observer's call that is running; there is none after it.
  void Stop() EXCLUDES(mutex_);

 private:
  struct Pending {
    std::optional<PeerLost> lost;
    std::optional<PeerProblem> problem;
    std::optional<PeerReached> reached;
    bool began = false;
    std::deque<std::string> said;
    bool silent = false;
    bool in_turn = false;
    bool empty() const {
      return !lost && !problem && !reached && !began && said.empty() && !silent;
    }
  };

  Pending& Of(const std::string& node) REQUIRES(mutex_);
  void TakeTurn(const std::string& node) REQUIRES(mutex_);
  PeerEvent TakeNext() REQUIRES(mutex_);
  void Run() EXCLUDES(mutex_);

  const Limits limits_;
  const PeerObserver observer_;
  const std::function<void()> on_room_;
  Mutex mutex_;
  CondVar changed_;
  std::map<std::string, Pending> pending_ GUARDED_BY(mutex_);
  std::deque<std::string> turns_ GUARDED_BY(mutex_);
  size_t messages_ GUARDED_BY(mutex_) = 0;
  size_t bytes_ GUARDED_BY(mutex_) = 0;
  bool room_wanted_ GUARDED_BY(mutex_) = false;
  bool stopping_ GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace holdfast
