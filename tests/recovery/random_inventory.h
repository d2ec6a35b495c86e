// Random inventories of one job, kept rank by rank, so that what recovery/ says from counts can be
// compared with what follows from the copies themselves.
#pragma once

#include <algorithm>
#include <optional>
#include <random>
#include <vector>

#include "recovery/checkpoint_view.h"
#include "recovery/lineage.h"
#include "recovery/protection.h"

namespace holdfast {

struct ModelCheckpoint {
  CheckpointView flags;       // everything but the counts
  std::vector<TierSet> good;  // by rank
  std::vector<TierSet> bad;   // by rank
  uint32_t unlisted = 0;
};

inline CheckpointView ViewOf(const ModelCheckpoint& model) {
  CheckpointView view = model.flags;
  for (size_t rank = 0; rank < model.good.size(); ++rank) {
    view.AddRank(model.good[rank]);
    for (TierKind tier : kAllTiers) {
      const bool is_bad = Has(model.bad[rank], tier);
      view.at(tier).bad += is_bad ? 1 : 0;
      view.at(tier).bytes += is_bad || Has(model.good[rank], tier) ? 100 : 0;
    }
  }
  view.at(TierKind::kRemote).unlisted = model.unlisted;
  view.at(TierKind::kRemote).bytes += 100 * model.unlisted;
  return view;
}

inline std::vector<CheckpointView> ViewsOf(const std::vector<ModelCheckpoint>& all) {
  std::vector<CheckpointView> views;
  for (const ModelCheckpoint& model : all) {
    views.push_back(ViewOf(model));
  }
  return views;
}

// Whether a rank has a copy left, whichever node or failure domain it is that the failure takes:
// its own memory and nvme are on node 0, a peer's memory is on node 1, the remote tier on none.
inline bool IsLeft(FailureKind kind, TierSet in, bool apart) {
  struct Lies {
    TierKind tier;
    int node;
    int domain;
  };
  const Lies all[] = {{TierKind::kMemory, 0, 0},
                      {TierKind::kNvme, 0, 0},
                      {TierKind::kPeer, 1, apart ? 1 : 0},
                      {TierKind::kRemote, -1, -1}};
  const auto left = [&](auto taken) {
    return std::any_of(std::begin(all), std::end(all),
                       [&](const Lies& each) { return Has(in, each.tier) && !taken(each); });
  };
  const auto left_whichever = [&](auto taken) {
    return left([&](const Lies& each) { return taken(each, 0); }) &&
           left([&](const Lies& each) { return taken(each, 1); });
  };
  switch (kind) {
    case FailureKind::kProcess:
      return left([](const Lies&) { return false; });
    case FailureKind::kReboot:
      return left_whichever([](const Lies& each, int lost) {
        return each.node == lost && each.tier != TierKind::kNvme;
      });
    case FailureKind::kNode:
      return left_whichever([](const Lies& each, int lost) { return each.node == lost; });
    case FailureKind::kDomain:
      return left_whichever([](const Lies& each, int lost) { return each.domain == lost; });
    case FailureKind::kAllNodes:
      return left([](const Lies& each) { return each.node >= 0; });
  }
  return false;
}

// The newest step of which each rank has a good copy left, of those in `configured`.
inline std::optional<CheckpointId> NewestSurviving(const std::vector<ModelCheckpoint>& all,
                                                   const std::vector<Descent>* line,
                                                   FailureKind kind,
                                                   TierSet configured = kEveryTier) {
  std::optional<CheckpointId> newest;
  for (const ModelCheckpoint& model : all) {
    const bool whole = model.flags.consistent &&
                       std::all_of(model.good.begin(), model.good.end(), [&](TierSet in) {
                         return IsLeft(kind, in & configured, model.flags.apart);
                       });
    if (whole && (line == nullptr || OnLine(*line, model.flags.id)) &&
        (!newest || model.flags.id > *newest)) {
      newest = model.flags.id;
    }
  }
  return newest;
}

struct Inventory {
  std::vector<ModelCheckpoint> checkpoints;
  std::vector<Descent> line;
};

// Attempt 2 went back to some step of attempt 1, attempt 3 began anew or goes on from attempt 2.
inline Inventory RandomInventory(std::mt19937_64& random) {
  const auto one_in = [&](uint64_t n) { return random() % n == 0; };
  Inventory inventory;
  const Step back_to = random() % 12;
  inventory.line = {{2, {1, back_to}}, {1, {}}};
  if (one_in(3)) {
    inventory.line = {{3, {}}};
  } else if (one_in(8)) {
    inventory.line.clear();
  }
  const auto ranks = static_cast<uint32_t>(1 + random() % 3);
  for (Attempt attempt = 1; attempt <= 3; ++attempt) {
    for (Step step = 0; step < 12; ++step) {
      if (one_in(2)) {
        continue;
      }
      ModelCheckpoint& model = inventory.checkpoints.emplace_back();
      model.flags.id = {attempt, step};
      model.flags.world_size = ranks;
      model.flags.consistent = !one_in(20);
      model.flags.complete = !one_in(4);
      model.flags.held = one_in(15);
      model.flags.pinned = one_in(15);
      model.flags.apart = one_in(2);
      const TierSet usual = random() % kTierSets;
      for (uint32_t rank = 0; rank < ranks; ++rank) {
        const TierSet good = one_in(3) ? random() % kTierSets : usual;
        model.good.push_back(good);
        model.bad.push_back(one_in(4) ? random() % kTierSets & ~good : 0);
      }
      if (one_in(6) && (model.good[0] & SetOf(TierKind::kRemote)) == 0) {
        model.unlisted = static_cast<uint32_t>(1 + random() % ranks);
      }
      for (TierKind tier : kAllTiers) {
        TierPresence& here = model.flags.at(tier);
        here.flushing = one_in(20);
        here.wanted = one_in(15);
        here.source = one_in(20);
      }
    }
  }
  std::shuffle(inventory.checkpoints.begin(), inventory.checkpoints.end(), random);
  return inventory;
}

}  // namespace holdfast
