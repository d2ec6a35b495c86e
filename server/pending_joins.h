// Ranks that wait to be let in, in the order in which they came, found by rank and by request as
// well: thousands may wait while thousands of seats are lost one by one.
//
//   joins.Add(asked);
//   for (auto place = joins.Next(0, rank); place; place = joins.Next(*place + 1, rank)) {
//     const JoinAsked& waits = joins.At(*place); …
//
// Owned by a Coordinator; not thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "server/messages.h"

namespace holdfast {

class PendingJoins {
 public:
  using Place = uint64_t;  // among the others

  size_t size() const { return all_.size(); }
  bool empty() const { return all_.empty(); }
  const JoinAsked& At(Place place) const { return all_.at(place); }

  // Who says a token twice is answered for the last one.
  void Add(JoinAsked join) {
    Take(join.token);
    const Place place = next_++;
    by_token_.emplace(join.token, place);
    of_rank_.emplace(join.rank, place);
    all_.emplace(place, std::move(join));
  }
  std::optional<JoinAsked> Take(RequestToken token) {
    const auto found = by_token_.find(token);
    return found == by_token_.end() ? std::nullopt : std::optional(TakeAt(found->second));
  }
  JoinAsked TakeAt(Place place) {
    auto node = all_.extract(place);
    JoinAsked join = std::move(node.mapped());
    by_token_.erase(join.token);
    of_rank_.erase({join.rank, place});
    return join;
  }
  // The first that waits, at that place or behind it; of one rank, or of all.
  std::optional<Place> Next(Place from, std::optional<Rank> rank) const {
    if (!rank) {
      const auto next = all_.lower_bound(from);
      return next == all_.end() ? std::nullopt : std::optional(next->first);
    }
    const Rank wanted = rank.value_or(0);  // (GCC 12 takes *rank for uninitialized)
    const auto next = of_rank_.lower_bound({wanted, from});
    return next == of_rank_.end() || next->first != wanted ? std::nullopt
                                                           : std::optional(next->second);
  }

 private:
  Place next_ = 0;
  std::map<Place, JoinAsked> all_;
  std::map<RequestToken, Place> by_token_;
  std::set<std::pair<Rank, Place>> of_rank_;
};

}  // namespace holdfast
