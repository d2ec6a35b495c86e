#include "server/scrub_schedule.h"

#include <algorithm>
#include <chrono>

#include "absl/strings/str_cat.h"
#include "base/units.h"

namespace holdfast {
namespace {

constexpr int64_t kRememberedPeriods = 4;
constexpr size_t kRememberedMax = 1'000'000;
constexpr int64_t kPostponedMsMax = 24 * 3600 * 1000;

std::string PeriodText(int64_t ms) {
  return FormatDuration(std::chrono::milliseconds(ms));
}

}  // namespace

void ScrubSchedule::SetCopies(const std::vector<ScrubCopy>& copies, int64_t now) {
  std::set<ScrubKey> there;
  for (const ScrubCopy& copy : copies) {
    there.insert(copy.key);
    const auto [it, fresh] = copies_.try_emplace(copy.key);
    Entry& entry = it->second;
    if (!fresh && entry.written == copy.written_unix_ms) {
      bytes_ += copy.bytes - entry.bytes;  // (unsigned, and right all the same)
      entry.bytes = copy.bytes;
      MendTimes(it, now);
      continue;
    } else if (!fresh) {  // written anew since
      by_time_.erase({entry.at, copy.key});
      bytes_ -= entry.bytes;
    }
    const auto remembered = remembered_.find(copy.key);
    entry.at = copy.known_unix_ms != 0 ? copy.known_unix_ms : now;
    if (remembered != remembered_.end()) {
      entry.at = remembered->second;
      remembered_.erase(remembered);
    }
    entry.at = std::min(std::max(entry.at, copy.read_unix_ms), now);
    entry.written = copy.written_unix_ms;
    entry.bytes = copy.bytes;
    entry.not_before = 0;
    bytes_ += copy.bytes;
    by_time_.insert({entry.at, copy.key});
  }
  for (auto it = copies_.begin(); it != copies_.end();) {
    const auto next = std::next(it);
    if (there.count(it->first) == 0) {
      // (A tier that is away now may be back, with what has not been read for long.)
      if (now - it->second.at > settings_.period_ms / 10 && remembered_.size() < kRememberedMax) {
        remembered_[it->first] = it->second.at;
      }
      Erase(it);
    }
    it = next;
  }
  // What is read no more is forgotten one day.
  std::erase_if(remembered_, [&](const auto& known) {
    return known.second + kRememberedPeriods * settings_.period_ms < now;
  });
}

// The clock of the wall may have been set back since.
void ScrubSchedule::MendTimes(std::map<ScrubKey, Entry>::iterator it, int64_t now) {
  Entry& entry = it->second;
  if (entry.at > now) {
    by_time_.erase({entry.at, it->first});
    entry.at = now;
    by_time_.insert({now, it->first});
  }
  entry.not_before = std::min(entry.not_before, now + kPostponedMsMax);
}

std::map<ScrubKey, int64_t> ScrubSchedule::Known() const {
  std::map<ScrubKey, int64_t> known = remembered_;
  for (const auto& [key, entry] : copies_) {
    known[key] = entry.at;
  }
  return known;
}

// Late enough that it is not read for nothing, and so early that each of the others still comes in
// time when all are read at the even rate, one after the other.
std::optional<ScrubSchedule::Choice> ScrubSchedule::Next(int64_t now) const {
  if (settings_.period_ms == 0 || by_time_.empty()) {
    return std::nullopt;
  }
  const double rate = std::max(static_cast<double>(bytes_) / static_cast<double>(PassMs()), 1e-9);
  std::optional<Choice> first;
  std::optional<int64_t> waits_for;  // of those that are postponed
  double before = 0;                 // bytes
  int64_t start = 0;
  for (const auto& [at, key] : by_time_) {
    const Entry& entry = copies_.at(key);
    if (entry.not_before > now) {
      waits_for = std::min(waits_for.value_or(entry.not_before), entry.not_before);
      continue;
    }
    const int64_t latest = at + PassMs() - static_cast<int64_t>(before / rate);
    start = first ? std::min(start, latest) : latest;
    before += static_cast<double>(entry.bytes);
    if (!first) {
      first = Choice{{key, entry.bytes, entry.written}, 0};
    }
  }
  if (!first) {
    const ScrubKey& key = by_time_.begin()->second;
    return Choice{{key, copies_.at(key).bytes, copies_.at(key).written}, *waits_for};
  }
  first->start_unix_ms = start;
  return first;
}

void ScrubSchedule::Verified(const ScrubKey& key, int64_t now) {
  const auto it = copies_.find(key);
  if (it == copies_.end()) {
    return;
  }
  by_time_.erase({it->second.at, key});
  it->second.at = now;
  it->second.not_before = 0;
  by_time_.insert({now, key});
}

void ScrubSchedule::Gone(const ScrubKey& key) {
  if (const auto it = copies_.find(key); it != copies_.end()) {
    Erase(it);
  }
}

void ScrubSchedule::Postpone(const ScrubKey& key, int64_t until) {
  if (const auto it = copies_.find(key); it != copies_.end()) {
    it->second.not_before = until;
  }
}

void ScrubSchedule::Erase(std::map<ScrubKey, Entry>::iterator it) {
  by_time_.erase({it->second.at, it->first});
  bytes_ -= it->second.bytes;
  copies_.erase(it);
}

std::optional<int64_t> ScrubSchedule::oldest() const {
  return by_time_.empty() ? std::nullopt : std::optional(by_time_.begin()->first);
}

uint64_t ScrubSchedule::Overdue(int64_t now) const {
  if (settings_.period_ms == 0) {
    return 0;
  }
  uint64_t count = 0;
  for (const auto& [at, key] : by_time_) {
    if (at + settings_.period_ms >= now) {
      break;
    }
    ++count;
  }
  return count;
}

std::string ScrubSchedule::Problem(int64_t now) const {
  if (settings_.period_ms == 0) {
    return "";
  }
  if (const uint64_t rate = settings_.bytes_per_s_max; rate > 0) {
    const double takes_ms = static_cast<double>(bytes_) / static_cast<double>(rate) * 1000;
    if (takes_ms > static_cast<double>(settings_.period_ms)) {
      return absl::StrCat("the copies of this node (", FormatBytes(bytes_),
                          ") cannot be read within ", PeriodText(settings_.period_ms),
                          " (scrub.period_ms) at ", FormatBytes(rate),
                          "/s (scrub.bandwidth_bytes_per_s_max): that takes ",
                          PeriodText(static_cast<int64_t>(takes_ms)), "; raise one of the two");
    }
  }
  const uint64_t overdue = Overdue(now);
  return overdue == 0
             ? ""
             : absl::StrCat(overdue, overdue == 1 ? " copy was" : " copies were",
                            " not read again within ", PeriodText(settings_.period_ms),
                            " (scrub.period_ms), the oldest for ", PeriodText(now - *oldest()));
}

}  // namespace holdfast
