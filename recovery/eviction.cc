#include "recovery/eviction.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

namespace holdfast {
namespace {

// Users of more than their share. Who has neither a living job nor a copy that is kept has none.
std::set<uint32_t> BeyondTheirShare(const EvictionWish& wish, std::span<const MemoryJob> jobs,
                                    const EvictionRules& rules, MonotonicTime now) {
  std::set<uint32_t> users{wish.uid};
  std::map<uint32_t, uint64_t> bytes;
  for (const MemoryJob& job : jobs) {
    bytes[job.uid] += job.bytes;
    const bool kept = rules.keep_ended == Duration{} || now - job.ended < rules.keep_ended;
    if (job.living || DiedLately(job, now) || kept) {
      users.insert(job.uid);
    }
  }
  std::set<uint32_t> beyond;
  for (const auto& [uid, held] : bytes) {
    if (users.count(uid) == 0 || held > rules.bytes_max / users.size()) {
      beyond.insert(uid);
    }
  }
  return beyond;
}

}  // namespace

// It may be started again at any moment.
bool DiedLately(const MemoryJob& job, MonotonicTime now) {
  return !job.living && !job.left && now - job.ended < kDiedLately;
}

std::vector<EvictionAsk> EvictionOrder(const EvictionWish& wish, std::span<const MemoryJob> jobs,
                                       const EvictionRules& rules, MonotonicTime now) {
  std::vector<const MemoryJob*> others;
  for (const MemoryJob& job : jobs) {
    const bool own = job.uid == wish.uid;
    const bool may = own || (!wish.own_jobs_only && (!job.living || job.ahead));
    if (may && job.job != wish.job) {
      others.push_back(&job);
    }
  }
  std::vector<EvictionAsk> order;
  // What is easily had again: the largest job first, so that few are asked.
  std::sort(others.begin(), others.end(), [](const MemoryJob* a, const MemoryJob* b) {
    return std::tuple(b->bytes, b->job) < std::tuple(a->bytes, a->job);
  });
  for (const MemoryJob* job : others) {
    if (!job->living && !DiedLately(*job, now)) {
      order.push_back({job->job, EvictionStage::kVerified});
    }
  }
  order.push_back({wish.job, EvictionStage::kSpare});
  for (const MemoryJob* job : others) {
    order.push_back({job->job, EvictionStage::kSpare});
  }
  std::erase_if(others, [](const MemoryJob* job) { return job->living; });
  std::sort(others.begin(), others.end(), [&](const MemoryJob* a, const MemoryJob* b) {
    return std::tuple(DiedLately(*a, now), !a->left, a->ended, a->job) <
           std::tuple(DiedLately(*b, now), !b->left, b->ended, b->job);
  });
  const std::set<uint32_t> beyond = BeyondTheirShare(wish, jobs, rules, now);
  std::erase_if(others, [&](const MemoryJob* job) {
    return job->uid != wish.uid && (beyond.count(job->uid) == 0 || DiedLately(*job, now));
  });
  for (const MemoryJob* job : others) {
    order.push_back({job->job, EvictionStage::kLast});
  }
  for (const MemoryJob* job : others) {
    if (now - job->ended >= kDrainIsAwaited) {
      order.push_back({job->job, EvictionStage::kDraining});
    }
  }
  order.push_back({wish.job, EvictionStage::kLast});
  return order;
}

}  // namespace holdfast
