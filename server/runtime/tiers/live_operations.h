// Which operations have not really ended, also those that were answered because they hang: what
// they may still do to a directory must not meet its removal, or another operation on the same
// copy.
//
// Thread-safe.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>

#include "base/ids.h"
#include "base/mutex.h"

namespace holdfast {

class LiveOperations : public std::enable_shared_from_this<LiveOperations> {
 public:
  // `rank` absent: on the checkpoint as a whole; `checkpoint` absent: on the job.
  struct Key {
    TierKind tier = TierKind::kNvme;
    JobUuid job;
    std::optional<CheckpointId> checkpoint;
    std::optional<Rank> rank;
    bool removes = false;
    // It was answered, hangs where it reads from, and publishes nothing that another does not: only
    // a removal has to wait for it.
    bool left = false;
    auto operator<=>(const Key&) const = default;
  };
  // Lives as long as the operation.
  class Entry {
   public:
    Entry(std::shared_ptr<LiveOperations> of, Key key) : of_(std::move(of)), key_(key) {}
    ~Entry() { of_->Erase(key_); }
    Entry(const Entry&) = delete;
    Entry& operator=(const Entry&) = delete;
    void Leave() { of_->Leave(key_); }

   private:
    friend class LiveOperations;
    const std::shared_ptr<LiveOperations> of_;
    Key key_;
  };

  // Null when an operation that touches the same files is alive: the same shard, the same
  // checkpoint as a whole or one of its shards, the job as a whole or anything of it.
  std::shared_ptr<Entry> Enter(const Key& key) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    for (const auto& [other, count] : live_) {
      if (Clash(key, other)) {
        return nullptr;
      }
    }
    ++live_[key];
    return std::make_shared<Entry>(shared_from_this(), key);
  }

 private:
  static bool Clash(const Key& a, const Key& b) {
    if (a.tier != b.tier || a.job != b.job || (a.left && !b.removes) || (b.left && !a.removes)) {
      return false;
    }
    if (!a.checkpoint || !b.checkpoint) {
      return true;
    }
    return *a.checkpoint == *b.checkpoint && (!a.rank || !b.rank || *a.rank == *b.rank);
  }
  void Erase(const Key& key) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    if (--live_[key] == 0) {
      live_.erase(key);
    }
  }
  void Leave(Key& key) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    if (--live_[key] == 0) {
      live_.erase(key);
    }
    key.left = true;
    ++live_[key];
  }

  Mutex mutex_;
  std::map<Key, size_t> live_ GUARDED_BY(mutex_);
};

}  // namespace holdfast
