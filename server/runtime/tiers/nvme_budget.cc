#include "server/runtime/tiers/nvme_budget.h"

#include <algorithm>
#include <set>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "server/runtime/tier_config.h"

namespace holdfast {
namespace {

constexpr uint64_t kBudgetPercent = 80;  // of what the drives have, by default
constexpr uint64_t kRecyclePercent = 10;

}  // namespace

NvmeBudget AskNvmeBudget(Env& env, const v1::NvmeConfig& config, Duration timeout) {
  NvmeBudget budget;
  if (config.dirs().empty()) {
    return budget;
  }
  uint64_t total = config.bytes_max();
  if (total == 0) {
    std::set<uint64_t> devices;  // two directories may lie on one file system
    for (const absl::StatusOr<DirectoryLook>& look :
         LookAtDirectories(env, {config.dirs().begin(), config.dirs().end()}, timeout)) {
      if (!look.ok()) {
        budget.problems.push_back(absl::StrCat("nvme.dirs: ", Message(look.status())));
      } else if (devices.insert(look->device).second) {
        total += look->filesystem.bytes_total / 100 * kBudgetPercent;
      }
    }
  }
  const auto drives = static_cast<uint64_t>(config.dirs_size());
  budget.pool_bytes = config.has_recycle_bytes_max() ? config.recycle_bytes_max()
                                                     : total / 100 * kRecyclePercent / drives;
  if (total > 0 && budget.pool_bytes * drives >= total) {
    budget.problems.push_back(NoRoomBesideKeptFiles(budget.pool_bytes, drives, total));
  }
  // Never 0, which would say that there is no limit: a drive that did not answer adds nothing.
  budget.bytes_max = std::max<uint64_t>(1, total - std::min(total, budget.pool_bytes * drives));
  return budget;
}

}  // namespace holdfast
