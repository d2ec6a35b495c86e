#include "server/drive_copies.h"

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace holdfast {
namespace {

constexpr size_t kEndedMax = 256;  // of each job

bool Below(const DriveCopies::Copy& copy, const std::string& dir) {
  return absl::StartsWith(copy.copy.location, absl::StrCat(dir, "/"));
}

}  // namespace

void DriveCopies::Put(const DurableCopy& copy, MonotonicTime since) {
  Copy& here = jobs_[copy.copy.id.job][copy.copy.id];
  bytes_ += copy.copy.image_bytes - here.copy.copy.image_bytes;
  here.copy = copy;
  here.state = State::kThere;
  here.since = since;
}

DriveCopies::Copies::iterator DriveCopies::Drop(Copies& copies, Copies::iterator it) {
  bytes_ -= it->second.copy.copy.image_bytes;
  return copies.erase(it);
}

template <typename Which>
void DriveCopies::DropIf(const JobUuid& job, const Which& which) {
  const auto found = jobs_.find(job);
  if (found == jobs_.end()) {
    return;
  }
  Copies& copies = found->second;
  for (auto it = copies.begin(); it != copies.end();) {
    it = which(it->first, it->second) ? Drop(copies, it) : std::next(it);
  }
  if (copies.empty()) {
    jobs_.erase(found);
  }
}

void DriveCopies::Written(const DurableCopy& copy, MonotonicTime now) {
  Put(copy, now);
  Copy& here = jobs_.at(copy.copy.id.job).at(copy.copy.id);
  here.bad = false;
  here.unread.clear();
}

bool DriveCopies::IsPast(const ShardId& id, MonotonicTime began) const {
  if (const Copy* known = Find(id);
      known != nullptr &&
      (known->state == State::kGoing || (known->state == State::kThere && began < known->since))) {
    return true;
  }
  const auto job = ended_.find(id.job);
  if (job == ended_.end()) {
    return false;
  }
  const auto ended = job->second.find(id.checkpoint());
  return ended != job->second.end() && !(ended->second < began);
}

bool DriveCopies::Seen(const DurableCopy& copy, MonotonicTime began) {
  if (IsPast(copy.copy.id, began)) {
    return false;
  }
  Put(copy, {});
  Copy& here = jobs_.at(copy.copy.id.job).at(copy.copy.id);
  here.bad = here.bad && here.unread.empty();
  here.unread.clear();
  return true;
}

bool DriveCopies::SeenBad(const BadDurableCopy& bad, MonotonicTime began) {
  const ShardId& id = bad.copy.copy.id;
  const Copy* known = Find(id);
  const bool elsewhere = known != nullptr && known->state == State::kThere && !known->bad &&
                         known->copy.location != bad.copy.location;
  if (IsPast(id, began) || elsewhere) {  // (another drive has a good one)
    return false;
  }
  Put(known != nullptr && bad.copy.copy.world_size == 0 ? DurableCopy(known->copy) : bad.copy, {});
  Copy& here = jobs_.at(id.job).at(id);
  here.bad = true;
  here.unread = bad.what;
  return true;
}

void DriveCopies::DropUnseen(const JobUuid& job, MonotonicTime as_of,
                             const std::set<ShardId>& seen) {
  DropIf(job, [&](const ShardId& id, const Copy& copy) {
    return copy.state == State::kThere && copy.since < as_of && seen.count(id) == 0;
  });
}

void DriveCopies::SetBad(const ShardId& shard, bool bad) {
  if (const auto job = jobs_.find(shard.job); job != jobs_.end()) {
    if (const auto copy = job->second.find(shard); copy != job->second.end()) {
      copy->second.bad = bad;
      if (!bad) {
        copy->second.unread.clear();
      }
    }
  }
}

void DriveCopies::Remove(const JobUuid& job, CheckpointId checkpoint) {
  if (const auto found = jobs_.find(job); found != jobs_.end()) {
    for (auto& [id, copy] : found->second) {
      if (id.checkpoint() == checkpoint && copy.state == State::kThere) {
        copy.state = State::kGoing;
      }
    }
  }
}

void DriveCopies::Removed(const JobUuid& job, CheckpointId checkpoint,
                          const std::optional<std::vector<Rank>>& left, MonotonicTime now) {
  DropIf(job, [&](const ShardId& id, const Copy& copy) {
    const bool stays = left && std::find(left->begin(), left->end(), id.rank) != left->end();
    return id.checkpoint() == checkpoint && copy.state == State::kGoing && !stays;
  });
  if (left) {
    return;
  }
  auto& ended = ended_[job];
  ended[checkpoint] = now;
  if (ended.size() > kEndedMax) {
    ended.erase(std::min_element(ended.begin(), ended.end(),
                                 [](const auto& a, const auto& b) { return a.second < b.second; }));
  }
}

void DriveCopies::Keep(const JobUuid& job, CheckpointId checkpoint) {
  if (const auto found = jobs_.find(job); found != jobs_.end()) {
    for (auto& [id, copy] : found->second) {
      if (id.checkpoint() == checkpoint && copy.state == State::kGoing) {
        copy.state = State::kThere;
      }
    }
  }
}

void DriveCopies::Forget(const JobUuid& job) {
  DropIf(job, [](const ShardId&, const Copy& copy) { return copy.state != State::kAway; });
  ended_.erase(job);
}

void DriveCopies::SetAway(const std::string& dir) {
  for (auto& [job, copies] : jobs_) {
    for (auto& [id, copy] : copies) {
      if (copy.state == State::kThere && Below(copy, dir)) {
        copy.state = State::kAway;
      }
    }
  }
}

void DriveCopies::DropAway(const std::string& dir) {
  std::vector<JobUuid> all;
  for (const auto& [job, copies] : jobs_) {
    all.push_back(job);
  }
  for (const JobUuid& job : all) {
    DropIf(job, [&](const ShardId&, const Copy& copy) {
      return copy.state == State::kAway && Below(copy, dir);
    });
  }
}

uint64_t DriveCopies::Bytes(const JobUuid& job) const {
  uint64_t bytes = 0;
  if (const auto found = jobs_.find(job); found != jobs_.end()) {
    for (const auto& [id, copy] : found->second) {
      bytes += copy.copy.copy.image_bytes;
    }
  }
  return bytes;
}

const DriveCopies::Copy* DriveCopies::Find(const ShardId& shard) const {
  const auto job = jobs_.find(shard.job);
  if (job == jobs_.end()) {
    return nullptr;
  }
  const auto copy = job->second.find(shard);
  return copy == job->second.end() ? nullptr : &copy->second;
}

std::vector<DriveCopies::Copy> DriveCopies::Of(const JobUuid& job) const {
  std::vector<Copy> all;
  if (const auto found = jobs_.find(job); found != jobs_.end()) {
    for (const auto& [id, copy] : found->second) {
      all.push_back(copy);
    }
  }
  return all;
}

}  // namespace holdfast
