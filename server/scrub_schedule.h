// Which copy the background scrub reads next, and when: every one is read once in a period, the one
// first that was verified, or written, longest ago; evenly over the time, and not all at the end.
//
//   ScrubSchedule schedule({.period_ms = 7 * kDayMs, .bytes_per_s_max = 100 << 20});
//   schedule.SetCopies(what_there_is, now);
//   if (auto next = schedule.Next(now); next && next->start_unix_ms <= now) {
//     … read next->copy …
//     schedule.Verified(next->copy.key, now);
//   }
//
// Times are of the wall clock, in ms: they outlive the daemon (Known, Remember). Not thread-safe;
// no I/O, no clock.
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/ids.h"

namespace holdfast {

struct ScrubKey {
  TierKind tier = TierKind::kMemory;
  ShardId shard;
  auto operator<=>(const ScrubKey&) const = default;
};

struct ScrubCopy {
  ScrubKey key;
  uint64_t bytes = 0;
  int64_t written_unix_ms = 0;  // 0: not known
  // In remote, of its host: since when scrubs have it read, and when one did last; 0: not known.
  int64_t known_unix_ms = 0;
  int64_t read_unix_ms = 0;
};

class ScrubSchedule {
 public:
  struct Settings {
    int64_t period_ms = 0;         // 0: nothing is read
    uint64_t bytes_per_s_max = 0;  // 0: no limit
  };
  explicit ScrubSchedule(const Settings& settings) : settings_(settings) {}
  void Change(const Settings& settings) { settings_ = settings; }
  const Settings& settings() const { return settings_; }

  // What there is now. One that was not there before counts as read when its host says that another
  // node did, or began to have it read, else now: a node that learns of old copies does not read
  // them all at once, and one that goes from node to node with its rank is read all the same.
  void SetCopies(const std::vector<ScrubCopy>& copies, int64_t now);
  // Each copy's last time, to be remembered; and what was remembered, before SetCopies.
  std::map<ScrubKey, int64_t> Known() const;
  void Remember(std::map<ScrubKey, int64_t> known) { remembered_ = std::move(known); }

  struct Choice {
    ScrubCopy copy;
    int64_t start_unix_ms = 0;
  };
  std::optional<Choice> Next(int64_t now) const;
  // Read, be it good or bad.
  void Verified(const ScrubKey& key, int64_t now);
  void Gone(const ScrubKey& key);
  // It could not be read now: others come first.
  void Postpone(const ScrubKey& key, int64_t until);

  uint64_t copies() const { return copies_.size(); }
  uint64_t bytes() const { return bytes_; }
  std::optional<int64_t> oldest() const;
  uint64_t Overdue(int64_t now) const;  // not read within the period
  // Why the period cannot be kept, or is not; empty: it is.
  std::string Problem(int64_t now) const;

 private:
  struct Entry {
    uint64_t bytes = 0;
    int64_t written = 0;
    int64_t at = 0;          // when it was read last
    int64_t not_before = 0;  // Postpone
  };
  // Of a period, so much is meant to be used: the rest is for what is read slower than expected.
  int64_t PassMs() const { return settings_.period_ms / 5 * 4; }
  void Erase(std::map<ScrubKey, Entry>::iterator it);
  void MendTimes(std::map<ScrubKey, Entry>::iterator it, int64_t now);

  Settings settings_;
  std::map<ScrubKey, Entry> copies_;
  std::set<std::pair<int64_t, ScrubKey>> by_time_;
  uint64_t bytes_ = 0;
  std::map<ScrubKey, int64_t> remembered_;
};

}  // namespace holdfast
