#include "server/seats.h"

#include <algorithm>

namespace holdfast {
namespace {

const std::set<SeatId>& NoSeats() {
  static const std::set<SeatId> none;
  return none;
}

template <typename Index, typename Key>
const std::set<SeatId>& Lookup(const Index& index, const Key& key) {
  const auto found = index.find(key);
  return found == index.end() ? NoSeats() : found->second;
}

template <typename Index, typename Key>
void Remove(Index& index, const Key& key, SeatId id) {
  const auto found = index.find(key);
  found->second.erase(id);
  if (found->second.empty()) {
    index.erase(found);
  }
}

}  // namespace

SeatId SeatTable::Add(const Seat& seat) {
  const SeatId id = next_++;
  seats_.emplace(id, seat);
  by_rank_[{seat.job, seat.rank}].insert(id);
  by_process_[seat.process].insert(id);
  ++by_uid_[seat.uid];
  return id;
}

std::optional<Seat> SeatTable::Erase(SeatId id) {
  const auto it = seats_.find(id);
  if (it == seats_.end()) {
    return std::nullopt;
  }
  const Seat seat = it->second;
  seats_.erase(it);
  Remove(by_rank_, std::pair(seat.job, seat.rank), id);
  Remove(by_process_, seat.process, id);
  if (const auto count = by_uid_.find(seat.uid); --count->second == 0) {
    by_uid_.erase(count);
  }
  return seat;
}

const Seat* SeatTable::Find(SeatId id) const {
  const auto it = seats_.find(id);
  return it == seats_.end() ? nullptr : &it->second;
}

void SeatTable::Disconnect(SeatId id) {
  if (const auto it = seats_.find(id); it != seats_.end()) {
    it->second.connection = 0;
  }
}

void SeatTable::SetLastBegun(SeatId id, Step step) {
  if (const auto it = seats_.find(id); it != seats_.end()) {
    it->second.last_begun = std::max(it->second.last_begun.value_or(step), step);
  }
}

void SeatTable::SetPassed(SeatId id, Step step) {
  if (const auto it = seats_.find(id); it != seats_.end()) {
    it->second.passed = std::max(it->second.passed.value_or(step), step);
  }
}

void SeatTable::SetLine(SeatId id, std::optional<std::vector<Descent>> line) {
  if (const auto it = seats_.find(id); it != seats_.end()) {
    it->second.line = std::move(line);
  }
}

void SeatTable::Supersede(const JobUuid& job, Attempt below) {
  for (auto it = by_rank_.lower_bound({job, 0}); it != by_rank_.end() && it->first.first == job;
       ++it) {
    for (const SeatId id : it->second) {
      Seat& seat = seats_.at(id);
      seat.superseded = seat.superseded || seat.attempt < below;
    }
  }
}

const std::set<SeatId>& SeatTable::OfRank(const JobUuid& job, Rank rank) const {
  return Lookup(by_rank_, std::pair(job, rank));
}

const std::set<SeatId>& SeatTable::OfProcess(const ProcessId& process) const {
  return Lookup(by_process_, process);
}

bool SeatTable::AnyOf(const JobUuid& job) const {
  const auto first = by_rank_.lower_bound({job, 0});
  return first != by_rank_.end() && first->first.first == job;
}

bool SeatTable::AnyCurrentOf(const JobUuid& job) const {
  for (auto it = by_rank_.lower_bound({job, 0}); it != by_rank_.end() && it->first.first == job;
       ++it) {
    for (const SeatId id : it->second) {
      if (!seats_.at(id).superseded) {
        return true;
      }
    }
  }
  return false;
}

size_t SeatTable::CountOfUid(uint32_t uid) const {
  const auto found = by_uid_.find(uid);
  return found == by_uid_.end() ? 0 : found->second;
}

}  // namespace holdfast
