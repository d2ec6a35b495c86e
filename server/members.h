// The ranks of an attempt: which process on which node each one is, and whether it still lives.
//
//   members.Set(rank, {process, connection, true, false});
//   members.SetAlive(rank, false);
//   members.gone();              // those that have ended, without going through the others
//   members.OnNode(node);
//
// Owned by a Coordinator; not thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <set>

#include "base/ids.h"
#include "server/events.h"

namespace holdfast {

struct Member {
  ProcessId process;
  ConnectionId connection = 0;  // 0: its connection has gone
  bool alive = false;
  bool told = false;     // it knows that it is a member: only its end makes it none
  uint64_t opening = 0;  // of the join by which it was let in (JoinAsked); 0: not known
};

class Members {
 public:
  const Member* Find(Rank rank) const {
    const auto it = all_.find(rank);
    return it == all_.end() ? nullptr : &it->second;
  }
  const std::map<Rank, Member>& all() const { return all_; }
  bool empty() const { return all_.empty(); }
  size_t alive() const { return all_.size() - gone_.size(); }
  const std::set<Rank>& gone() const { return gone_; }
  // Those that are on this node, alive or not.
  const std::set<Rank>& OnNode(NodeId node) const {
    static const std::set<Rank> none;
    const auto it = on_node_.find(node);
    return it == on_node_.end() ? none : it->second;
  }
  const std::map<NodeId, std::set<Rank>>& by_node() const { return on_node_; }

  void Set(Rank rank, const Member& member) {
    if (const auto old = all_.find(rank); old != all_.end()) {
      Leave(rank, old->second.process.node);
    }
    all_[rank] = member;
    on_node_[member.process.node].insert(rank);
    member.alive ? gone_.erase(rank) : gone_.insert(rank).second;
  }
  void SetAlive(Rank rank, bool alive) {
    all_.at(rank).alive = alive;
    alive ? gone_.erase(rank) : gone_.insert(rank).second;
  }
  void SetConnection(Rank rank, ConnectionId connection) { all_.at(rank).connection = connection; }
  void SetTold(Rank rank) { all_.at(rank).told = true; }
  void Clear() {
    all_.clear();
    gone_.clear();
    on_node_.clear();
  }

 private:
  void Leave(Rank rank, NodeId node) {
    const auto there = on_node_.find(node);
    there->second.erase(rank);
    if (there->second.empty()) {
      on_node_.erase(there);
    }
  }

  std::map<Rank, Member> all_;
  std::set<Rank> gone_;
  std::map<NodeId, std::set<Rank>> on_node_;
};

}  // namespace holdfast
