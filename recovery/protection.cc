#include "recovery/protection.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace holdfast {
namespace {

constexpr TierSet kMemory = SetOf(TierKind::kMemory);
constexpr TierSet kNvme = SetOf(TierKind::kNvme);
constexpr TierSet kPeer = SetOf(TierKind::kPeer);
constexpr TierSet kRemote = SetOf(TierKind::kRemote);

// Near tiers before remote, and few rather than many: what one tier has whole is read with the
// least trouble.
constexpr TierSet kByPreference[] = {kMemory,
                                     kNvme,
                                     kPeer,
                                     kMemory | kPeer,
                                     kNvme | kPeer,
                                     kRemote,
                                     kMemory | kNvme,
                                     kMemory | kNvme | kPeer,
                                     kMemory | kRemote,
                                     kNvme | kRemote,
                                     kPeer | kRemote,
                                     kMemory | kNvme | kRemote,
                                     kMemory | kPeer | kRemote,
                                     kNvme | kPeer | kRemote,
                                     kMemory | kNvme | kPeer | kRemote};
static_assert(std::size(kByPreference) == kTierSets - 1);

}  // namespace

bool Survives(FailureKind kind, TierSet good_in, bool apart) {
  const bool on_peer = Has(good_in, TierKind::kPeer);
  switch (kind) {
    case FailureKind::kProcess:
      return good_in != 0;
    case FailureKind::kReboot:  // of the rank's own node, or of the peer
      return (good_in & (kNvme | kRemote)) != 0 || (on_peer && Has(good_in, TierKind::kMemory));
    case FailureKind::kNode:
      return Has(good_in, TierKind::kRemote) || (on_peer && (good_in & (kMemory | kNvme)) != 0);
    case FailureKind::kDomain:
      return Has(good_in, TierKind::kRemote) ||
             (on_peer && apart && (good_in & (kMemory | kNvme)) != 0);
    case FailureKind::kAllNodes:
      return Has(good_in, TierKind::kRemote);
  }
  return false;
}

bool WholeAfter(const CheckpointView& checkpoint, FailureKind kind, TierSet allowed) {
  if (!checkpoint.consistent || checkpoint.world_size == 0) {
    return false;
  }
  uint32_t ranks = 0;
  for (TierSet in = 0; in < kTierSets; ++in) {
    ranks += Survives(kind, in & allowed, checkpoint.apart) ? checkpoint.ranks_in[in] : 0;
  }
  return ranks == checkpoint.world_size;
}

TierSet NearestWhole(const CheckpointView& checkpoint, TierSet allowed) {
  return NearestWholeAfter(checkpoint, FailureKind::kProcess, allowed);
}

TierSet NearestWholeAfter(const CheckpointView& checkpoint, FailureKind kind, TierSet allowed) {
  for (TierSet tiers : kByPreference) {
    if ((tiers & ~allowed) == 0 && WholeAfter(checkpoint, kind, tiers)) {
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
    const CheckpointView* newest = nullptr;
    for (const CheckpointView& checkpoint : checkpoints) {
      if (WholeAfter(checkpoint, entry.kind, configured) && OnLine(line, checkpoint.id) &&
          (newest == nullptr || checkpoint.id > newest->id)) {
        newest = &checkpoint;
      }
    }
    if (newest != nullptr) {
      entry.survives = newest->id;
      entry.from = TierNames(NearestWholeAfter(*newest, entry.kind, configured));
    }
  }
  return table;
}

}  // namespace holdfast
