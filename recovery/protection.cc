#include "recovery/protection.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace holdfast {
namespace {

constexpr TierSet kMemory = SetOf(TierKind::kMemory);
constexpr TierSet kNvme = SetOf(TierKind::kNvme);
constexpr TierSet kRemote = SetOf(TierKind::kRemote);

// Few tiers rather than near ones: what one tier has whole is read with the least trouble.
constexpr TierSet kByPreference[] = {kMemory,
                                     kNvme,
                                     kRemote,
                                     kMemory | kNvme,
                                     kMemory | kRemote,
                                     kNvme | kRemote,
                                     kMemory | kNvme | kRemote};
static_assert(std::size(kByPreference) == kTierSets - 1);

}  // namespace

TierSet SurvivingTiers(FailureKind kind) {
  switch (kind) {
    case FailureKind::kProcess:
      return kMemory | kNvme | kRemote;
    case FailureKind::kReboot:
      return kNvme | kRemote;
    case FailureKind::kNode:
    case FailureKind::kDomain:
    case FailureKind::kAllNodes:
      return kRemote;
  }
  return 0;
}

TierSet NearestWhole(const CheckpointView& checkpoint, TierSet allowed) {
  for (TierSet tiers : kByPreference) {
    if ((tiers & ~allowed) == 0 && checkpoint.WholeIn(tiers)) {
      return tiers;
    }
  }
  return 0;
}

std::string TierNames(TierSet tiers) {
  std::string names;
  for (TierKind tier : kAllTiers) {
    if (Has(tiers, tier)) {
      absl::StrAppend(&names, names.empty() ? "" : "+", std::string(TierName(tier)));
    }
  }
  return names;
}

std::vector<ProtectionLine> ProtectionTable(std::span<const CheckpointView> checkpoints,
                                            std::span<const Descent> line, TierSet configured) {
  std::vector<ProtectionLine> table;
  for (size_t i = 0; i < kFailureKinds; ++i) {
    ProtectionLine& entry = table.emplace_back();
    entry.kind = static_cast<FailureKind>(i);
    const TierSet allowed = SurvivingTiers(entry.kind) & configured;
    const CheckpointView* newest = nullptr;
    for (const CheckpointView& checkpoint : checkpoints) {
      if (checkpoint.WholeIn(allowed) && OnLine(line, checkpoint.id) &&
          (newest == nullptr || checkpoint.id > newest->id)) {
        newest = &checkpoint;
      }
    }
    if (newest != nullptr) {
      entry.survives = newest->id;
      entry.from = TierNames(NearestWhole(*newest, allowed));
    }
  }
  return table;
}

}  // namespace holdfast
