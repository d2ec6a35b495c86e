#include "server/session.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "server/sharing.h"

namespace holdfast {
namespace {

std::string WantedName(const SessionWish& wish) {
  const std::string step =
      !wish.wanted ? "the newest step"
      : wish.wanted->attempt == 0
          ? absl::StrCat("step ", wish.wanted->step)
          : absl::StrCat("step ", wish.wanted->step, " of attempt ", wish.wanted->attempt);
  return absl::StrCat(step, wish.reads_by_itself ? ", to read it by itself" : "",
                      wish.label.empty() ? "" : absl::StrCat(", for fresh='", wish.label, "'"));
}

}  // namespace

bool Session::Holds(CheckpointId checkpoint) const {
  return std::find(candidates_.begin(), candidates_.end(), checkpoint) != candidates_.end();
}

std::optional<std::string> Session::Conflict(Rank rank, const SessionWish& wish) const {
  if (wish == wish_) {
    return std::nullopt;
  }
  for (const auto& [other, entry] : entries_) {
    if (other != rank) {
      return absl::StrCat("rank ", other, " asks for ", WantedName(wish_), " and rank ", rank,
                          " for ", WantedName(wish), "; all ranks must ask for the same");
    }
  }
  return std::nullopt;
}

bool Session::AsksAnew(Rank rank, const SessionWish& wish) const {
  return loading() && entries_.count(rank) > 0 && wish != wish_;
}

RequestToken Session::Enter(Rank rank, ProcessId process, const SessionWish& wish,
                            RequestToken token, SessionSkills skills) {
  wish_ = wish;
  Entry& entry = entries_[rank];
  loaded_ -= entry.loaded ? 1 : 0;
  Uncount(entry.skills);
  may_reshard_ += skills.may_reshard ? 1 : 0;
  reads_parts_ += skills.reads_parts ? 1 : 0;
  entry.skills = skills;
  entry.process = process;
  entry.loaded = false;
  return SetWaiting(rank, entry, token);
}

void Session::Uncount(const SessionSkills& skills) {
  may_reshard_ -= skills.may_reshard ? 1 : 0;
  reads_parts_ -= skills.reads_parts ? 1 : 0;
}

RequestToken Session::SetWaiting(Rank rank, Entry& entry, RequestToken token) {
  const RequestToken before = std::exchange(entry.waiting, token);
  waiting_.erase(before);
  if (token != 0) {
    waiting_[token] = rank;
  }
  return before;
}

std::optional<MonotonicTime> Session::Deadline() const {
  std::optional<MonotonicTime> earliest;
  for (const auto& [rank, entry] : entries_) {
    if (entry.skills.until) {
      earliest = std::min(earliest.value_or(*entry.skills.until), *entry.skills.until);
    }
  }
  return earliest;
}

bool Session::AllWithin(Duration time) const {
  return std::all_of(entries_.begin(), entries_.end(), [time](const auto& entry) {
    return !entry.second.skills.until || entry.second.skills.whole <= time;
  });
}

bool Session::Has(Rank rank, ProcessId process) const {
  const auto it = entries_.find(rank);
  return it != entries_.end() && it->second.process == process;
}

void Session::Drop(Rank rank, ProcessId process) {
  if (Has(rank, process)) {
    Entry& entry = entries_.at(rank);
    loaded_ -= entry.loaded ? 1 : 0;
    Uncount(entry.skills);
    SetWaiting(rank, entry, 0);
    entries_.erase(rank);
  }
}

void Session::BeginLoading(std::vector<CheckpointId> candidates, bool only_these,
                           uint64_t restore_point_change) {
  candidates_ = std::move(candidates);
  only_these_ = only_these;
  restore_point_change_ = restore_point_change;
  round_ = 1;
}

RequestToken Session::Report(Rank rank, RequestToken token, Found found) {
  Entry& entry = entries_[rank];
  loaded_ += entry.loaded ? 0 : 1;
  entry.loaded = true;
  entry.found = found;
  return SetWaiting(rank, entry, token);
}

bool Session::AllReported() const {
  return AllEntered() && loaded_ == entries_.size();
}

std::optional<Rank> Session::AnyThatFound(Found found) const {
  const auto it = std::find_if(entries_.begin(), entries_.end(), [found](const auto& entry) {
    return entry.second.loaded && entry.second.found == found;
  });
  return it == entries_.end() ? std::nullopt : std::optional(it->first);
}

RequestToken Session::Fail(Rank rank, RequestToken token, std::string problem) {
  Entry& entry = entries_[rank];
  loaded_ -= entry.loaded ? 1 : 0;
  entry.loaded = false;
  const RequestToken before = SetWaiting(rank, entry, token);
  failed_ = {rank, std::move(problem)};
  return before == token ? 0 : before;
}

void Session::NextRound(std::vector<CheckpointId> candidates) {
  tried_.insert(candidates_.front());
  candidates_ = std::move(candidates);
  ++round_;
  failed_.reset();
  for (auto& [rank, entry] : entries_) {
    entry.loaded = false;
  }
  loaded_ = 0;
}

std::vector<std::pair<Rank, RequestToken>> Session::TakeWaiting() {
  std::vector<std::pair<Rank, RequestToken>> waiting;
  for (auto& [rank, entry] : entries_) {
    if (entry.waiting != 0) {
      waiting.emplace_back(rank, SetWaiting(rank, entry, 0));
    }
  }
  return waiting;
}

bool Session::StopWaiting(RequestToken token) {
  const auto found = waiting_.find(token);
  if (found == waiting_.end()) {
    return false;
  }
  const Rank rank = found->second;
  SetWaiting(rank, entries_.at(rank), 0);
  return true;
}

bool Session::IsWaiting(RequestToken token) const {
  return waiting_.count(token) > 0;
}

std::string Session::MissingRanks() const {
  std::vector<Rank> missing;
  for (Rank rank = 0; rank < world_size_; ++rank) {
    const auto it = entries_.find(rank);
    if (it == entries_.end() || (loading() && !it->second.loaded)) {
      missing.push_back(rank);
    }
  }
  return RanksText(missing);
}

std::string Session::WantedText() const {
  return WantedName(wish_);
}

}  // namespace holdfast
