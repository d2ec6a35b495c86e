#include "server/runtime/local_records.h"

#include <algorithm>
#include <set>

#include "base/clock.h"
#include "base/status.h"
#include "server/runtime/admin_service.h"
#include "server/runtime/copy_reading.h"
#include "server/runtime/remote_parts.h"
#include "tiers/memory/slot_store.h"

namespace holdfast {
namespace {

// Files that are opened side by side.
constexpr size_t kOpenedTogether = 64;
// For one of them; then it is left out, and read by those who want it.
constexpr Duration kOpenedWithin = std::chrono::seconds(8);

bool Has(const RecordsWanted& wanted, Rank rank) {
  return std::any_of(wanted.ranks.begin(), wanted.ranks.end(), [rank](const auto& run) {
    return rank >= run.first && rank - run.first < run.second;
  });
}

}  // namespace

absl::Status LocalRecords::Read(const RecordsWanted& wanted,
                                const std::function<bool(FoundRecord)>& tell,
                                const Gone& gone) const {
  return wanted.remote ? ReadRemote(wanted, tell, gone) : ReadOwn(wanted, tell, gone);
}

absl::Status LocalRecords::ReadOwn(const RecordsWanted& wanted,
                                   const std::function<bool(FoundRecord)>& tell,
                                   const Gone& gone) const {
  v1::VerifyRequest step;
  step.set_job(wanted.job_name);
  step.set_attempt(wanted.checkpoint.attempt);
  step.set_step(wanted.checkpoint.step);
  HF_ASSIGN_OR_RETURN(ListedShards listed, ListHere(*options_.context, Caller{}, step));
  // Memory before drives.
  std::stable_sort(listed.shards.begin(), listed.shards.end(),
                   [](const auto& a, const auto& b) { return a.tier < b.tier; });
  std::set<Rank> told;
  for (const ReadableShard& shard : listed.shards) {
    const Rank rank = shard.copy.id.rank;
    if (shard.copy.id.job != wanted.job || shard.tier == TierKind::kRemote || !Has(wanted, rank) ||
        told.count(rank) > 0) {
      continue;
    }
    if (gone()) {
      return absl::CancelledError("nobody waits for it any more");
    }
    absl::StatusOr<std::string> record = shard.tier == TierKind::kNvme
                                             ? options_.read_from_drive(shard, gone)
                                             : options_.context->store->ReadRecord(shard.slot);
    if (!record.ok()) {
      continue;  // it went, or is bad: whoever attaches it finds out which
    }
    told.insert(rank);
    if (!tell({rank, shard.tier, *std::move(record)})) {
      break;
    }
  }
  return absl::OkStatus();
}

absl::Status LocalRecords::ReadRemote(const RecordsWanted& wanted,
                                      const std::function<bool(FoundRecord)>& tell,
                                      const Gone& gone) const {
  if (options_.remote_parts == nullptr) {
    return absl::FailedPreconditionError("this node has no remote tier (remote.dir)");
  }
  std::vector<Rank> ranks;
  for (const auto& [first, count] : wanted.ranks) {
    for (uint32_t i = 0; i < count; ++i) {
      ranks.push_back(first + i);
    }
  }
  const auto key = [&](Rank rank) {
    const ShardId id{wanted.job, wanted.checkpoint.attempt, wanted.checkpoint.step, rank};
    return CopyKey{id, wanted.job_name, wanted.world_size};
  };
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (i % kOpenedTogether == 0) {  // begins with the next ones, and waits for none of them
      for (size_t k = i; k < std::min(ranks.size(), i + kOpenedTogether); ++k) {
        static_cast<void>(
            options_.remote_parts->Open(key(ranks[k]), /*whole=*/false, MonotonicTime{}, gone));
      }
    }
    const auto file = options_.remote_parts->Open(key(ranks[i]), /*whole=*/false,
                                                  Clock::System()->Now() + kOpenedWithin, gone);
    if (absl::IsCancelled(file.status())) {
      return file.status();
    }
    if (file.ok() && !tell({ranks[i], TierKind::kRemote, (*file)->record()})) {
      break;
    }
  }
  return absl::OkStatus();
}

}  // namespace holdfast
