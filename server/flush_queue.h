// Flushes of one checkpoint that wait for a ticket: so many images of a job are on their way into
// the remote tier at a time, whatever the number of its nodes. Asked for node by node, so that a
// step is one message a node as long as there are tickets enough.
//
//   queue.Add(node, flush);
//   while (auto next = queue.Take(tickets)) …   // (node, flush of at most so many shards)
//
// Owned by a Checkpoint's Drain; not thread-safe.
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "server/messages.h"

namespace holdfast {

class FlushQueue {
 public:
  void Add(NodeId node, FlushWanted flush);
  std::optional<std::pair<NodeId, FlushWanted>> Take(size_t shards_max);
  // It is done, or nobody will do it: nobody is asked for it any more.
  void Drop(NodeId node, Rank rank);
  // Whose flushes nobody is asked for any more.
  std::vector<Rank> Clear();
  size_t size() const { return size_; }  // shards

 private:
  std::map<NodeId, FlushWanted> flushes_;  // none is empty
  size_t size_ = 0;
};

}  // namespace holdfast
