// The counts that a checkpoint keeps, against what one gets by going through all copies.
#include "server/checkpoint.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>
#include <tuple>

namespace holdfast {
namespace {

using Kind = CopyState::Kind;

constexpr uint32_t kWorld = 5;
constexpr NodeId kNodes = 3;
constexpr uint64_t kRankBytes = 100;
constexpr uint64_t kPartBytes = 40;  // of a file that leaves slices out

// What is known of it, as plainly as can be.
struct Model {
  std::map<Rank, int> shards;  // and what they hold; 0: not known
  std::set<Rank> parts;        // whose copy in remote leaves slices out
  std::map<std::tuple<TierKind, NodeId, Rank>, Kind> copies;
  bool manifest = false;

  bool Any(TierKind tier, Rank rank, Kind kind) const {
    for (NodeId node = 0; node < kNodes; ++node) {
      const auto it = copies.find({tier, node, rank});
      if (it != copies.end() && it->second == kind) {
        return true;
      }
    }
    return false;
  }
  // It leaves out what another one has, or may have, that is not good.
  bool Doubted(Rank rank) const {
    const auto lacks = [&](const auto& other) {
      const bool alike = shards.at(rank) == 0 || shards.at(rank) == other.second;
      return alike && !Any(TierKind::kRemote, other.first, Kind::kGood);
    };
    return Any(TierKind::kRemote, rank, Kind::kGood) && parts.count(rank) > 0 &&
           std::any_of(shards.begin(), shards.end(), lacks);
  }
  bool Good(TierKind tier, NodeId node, Rank rank) const {
    const auto it = copies.find({tier, node, rank});
    return it != copies.end() && it->second == Kind::kGood;
  }
  // On a node that would not lose the rank's own copy with it.
  bool KeptByAPeer(Rank rank) const {
    for (NodeId node = 0; node < kNodes; ++node) {
      if (Good(TierKind::kPeer, node, rank) && !Good(TierKind::kMemory, node, rank) &&
          !Good(TierKind::kNvme, node, rank)) {
        return true;
      }
    }
    return false;
  }
  bool Readable(TierKind tier, Rank rank) const {
    return tier == TierKind::kPeer ? KeptByAPeer(rank)
                                   : Any(tier, rank, Kind::kGood) && (tier != TierKind::kRemote ||
                                                                      (manifest && !Doubted(rank)));
  }
  uint64_t Bytes(TierKind tier, Rank rank) const {
    return tier == TierKind::kRemote && parts.count(rank) > 0 ? kPartBytes : kRankBytes;
  }
};

void Compare(const Checkpoint& checkpoint, const Model& model) {
  ASSERT_EQ(checkpoint.CheckCounts(), "");
  CheckpointView expected;
  uint32_t good = 0;
  bool all_or_away = model.shards.size() == kWorld;
  for (const auto& [rank, holds] : model.shards) {
    TierSet in = 0;
    bool away = false;
    for (const TierKind tier : kAllTiers) {
      in |= model.Readable(tier, rank) ? SetOf(tier) : TierSet{0};
      away = away || model.Any(tier, rank, Kind::kAway);
    }
    expected.AddRank(in);
    good += in != 0 ? 1 : 0;
    all_or_away = all_or_away && (in != 0 || away);
  }
  const CheckpointView view = checkpoint.View({1, 1});
  uint32_t doubted = 0;
  for (const auto& [rank, holds] : model.shards) {
    doubted += model.manifest && model.Doubted(rank) ? 1 : 0;
    ASSERT_EQ(checkpoint.Doubted(rank), model.Doubted(rank));
    const std::optional<Rank> other = checkpoint.DoubtedFor(rank);
    ASSERT_EQ(other.has_value(), model.Doubted(rank));
    ASSERT_TRUE(!other || !model.Any(TierKind::kRemote, *other, Kind::kGood));
    ASSERT_TRUE(!other || holds == 0 || model.shards.at(*other) == holds);
  }
  EXPECT_EQ(view.at(TierKind::kRemote).doubted, doubted);
  EXPECT_EQ(checkpoint.good, good);
  EXPECT_EQ(checkpoint.Whole(), good == kWorld);
  EXPECT_EQ(checkpoint.WholeWithAway(), all_or_away);
  EXPECT_EQ(view.restorable, expected.restorable);
  EXPECT_EQ(view.ranks_in, expected.ranks_in);
  bool any_away = false;
  for (const TierKind tier : kAllTiers) {
    uint32_t good_there = 0;
    uint32_t bad = 0;
    uint64_t bytes = 0;
    std::set<NodeId> nodes;
    for (const auto& [rank, holds] : model.shards) {
      const bool is_good =
          tier == TierKind::kPeer ? model.KeptByAPeer(rank) : model.Any(tier, rank, Kind::kGood);
      good_there += is_good ? 1 : 0;
      bad += !is_good && model.Any(tier, rank, Kind::kBad) ? 1 : 0;
    }
    for (const auto& [where, kind] : model.copies) {
      any_away = any_away || kind == Kind::kAway;
      if (std::get<0>(where) == tier && kind != Kind::kAway) {
        bytes += model.Bytes(tier, std::get<2>(where));
        nodes.insert(std::get<1>(where));
      }
    }
    EXPECT_EQ(view.at(tier).good, expected.at(tier).good);
    EXPECT_EQ(view.at(tier).bad, bad);
    EXPECT_EQ(view.at(tier).bytes, bytes);
    EXPECT_EQ(checkpoint.GoodAt(tier), good_there);
    EXPECT_EQ(checkpoint.NodesWith(tier), nodes);
  }
  EXPECT_EQ(checkpoint.AnyAway(), any_away);
  for (NodeId node = 0; node < kNodes; ++node) {
    std::set<Rank> on;
    for (const auto& [where, kind] : model.copies) {
      if (std::get<0>(where) != TierKind::kRemote && std::get<1>(where) == node) {
        on.insert(std::get<2>(where));
      }
    }
    const std::vector<Rank>& ranks = checkpoint.RanksOn(node);
    EXPECT_EQ(ranks, std::vector<Rank>(on.begin(), on.end()));
  }
}

TEST(CheckpointTest, CountsAreThoseOfItsCopiesWhateverHappensToThem) {
  for (uint32_t seed = 1; seed <= 40; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const auto below = [&](uint32_t n) { return static_cast<uint32_t>(random() % n); };
    Checkpoint checkpoint;
    checkpoint.world_size = kWorld;
    Model model;
    for (int i = 0; i < 300 && !::testing::Test::HasFailure(); ++i) {
      const Rank rank = below(kWorld);
      const TierKind tier = kAllTiers[below(kTierKinds)];
      const CopyPlace place = PlaceOf(tier, below(kNodes));
      const auto copy = model.copies.find({tier, place.node, rank});
      switch (below(12)) {
        case 0:
        case 1:
        case 2:
        case 3:
        case 4: {
          const int holds = static_cast<int>(below(3));
          const bool part = tier == TierKind::kRemote && below(3) > 0;
          Likeness likeness;
          likeness.tensors.fill(static_cast<uint8_t>(holds));
          likeness.content.fill(static_cast<uint8_t>(holds));
          checkpoint.AddShard(rank, kRankBytes, 1, true, likeness);
          CopyDetail detail;
          detail.file_bytes = part ? kPartBytes : 0;
          checkpoint.SetGood(rank, place, detail);
          int& known = model.shards[rank];
          known = known == 0 ? holds : known;
          if (part) {
            model.parts.insert(rank);
          } else if (tier == TierKind::kRemote) {
            model.parts.erase(rank);
          }
          model.copies[{tier, place.node, rank}] = Kind::kGood;
          break;
        }
        case 5:
        case 6: {
          const bool was_good = copy != model.copies.end() && copy->second == Kind::kGood;
          EXPECT_EQ(checkpoint.SetBad(rank, place, "bad"), was_good);
          if (was_good) {
            copy->second = Kind::kBad;
          }
          break;
        }
        case 7:
          checkpoint.SetNone(rank, place);
          model.copies.erase({tier, place.node, rank});
          break;
        case 8:
        case 9: {
          bool any = false;
          for (auto& [where, kind] : model.copies) {
            if (std::get<0>(where) != TierKind::kRemote && std::get<1>(where) == place.node &&
                kind == Kind::kGood) {
              kind = Kind::kAway;
              any = true;
            }
          }
          EXPECT_EQ(checkpoint.SetAway(place.node), any);
          break;
        }
        case 10:
          model.manifest = below(2) == 0;
          checkpoint.SetManifest(model.manifest);
          break;
        default:
          if (below(4) == 0) {
            checkpoint.Clear(tier);
            std::erase_if(model.copies,
                          [&](const auto& c) { return std::get<0>(c.first) == tier; });
            model.manifest = model.manifest && tier != TierKind::kRemote;
          }
      }
      Compare(checkpoint, model);
    }
  }
}

}  // namespace
}  // namespace holdfast
