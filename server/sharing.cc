#include "server/sharing.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tiers/image/kept.h"

namespace holdfast {
namespace {

constexpr size_t kRanksNamedMax = 8;
constexpr size_t kDivergencesNamedMax = 4;

}  // namespace

Sharing::Sharing(const Checkpoint& checkpoint) {
  if (checkpoint.contradictory || checkpoint.shards.size() != checkpoint.world_size) {
    return;
  }
  std::vector<RankLikeness> ranks;
  ranks.reserve(checkpoint.shards.size());
  for (const auto& [rank, shard] : checkpoint.shards) {
    if (!shard.likeness.any()) {
      return;
    }
    ranks.push_back({rank, shard.likeness});
  }
  Replicas found = FindReplicas(std::move(ranks));
  divergence_ = std::move(found.divergence);
  for (Replicas::Group& group : found.groups) {
    std::optional<std::vector<RankRun>> runs = RunsOf(group.ranks);
    if (!runs) {
      continue;  // no mesh: its ranks write everything
    }
    for (const Rank rank : group.ranks) {
      group_of_[rank] = groups_.size();
    }
    groups_.push_back({{group.content, *std::move(runs)}, std::move(group.ranks)});
  }
}

const Sharing::Group* Sharing::GroupOf(Rank rank) const {
  const auto group = group_of_.find(rank);
  return group == group_of_.end() ? nullptr : &groups_[group->second];
}

void Sharing::AddGroup(FlushWanted& flush) const {
  FlushWanted::Shard& shard = flush.shards.back();
  const Group* group = GroupOf(shard.rank);
  if (group == nullptr) {
    return;
  }
  const auto told = std::find_if(
      flush.groups.begin(), flush.groups.end(),
      [&](const FlushWanted::Group& there) { return there.content == group->told.content; });
  shard.group = static_cast<uint32_t>(told - flush.groups.begin()) + 1;
  if (told == flush.groups.end()) {
    flush.groups.push_back(group->told);
  }
}

LayoutHash Sharing::PlanOf(Rank rank) const {
  const Group* group = GroupOf(rank);
  return group == nullptr ? LayoutHash{} : PlanHash(group->told.content, group->ranks);
}

std::string Sharing::OthersOf(Rank rank) const {
  const Group* group = GroupOf(rank);
  if (group == nullptr) {
    return "";
  }
  std::vector<Rank> others = group->ranks;
  std::erase(others, rank);
  return RanksText(others);
}

std::string Sharing::DivergenceText() const {
  std::string text;
  size_t named = 0;
  for (const Divergence& divergence : divergence_) {
    if (named++ == kDivergencesNamedMax) {
      break;
    }
    std::vector<Rank> others;
    for (size_t i = 1; i < divergence.contents.size(); ++i) {
      others.insert(others.end(), divergence.contents[i].begin(), divergence.contents[i].end());
    }
    std::sort(others.begin(), others.end());
    absl::StrAppend(&text, text.empty() ? "" : "; ", RanksText(others),
                    others.size() == 1 ? " holds" : " hold", " the same tensors as ",
                    RanksText(divergence.contents.front()), " with other bytes");
  }
  if (divergence_.size() > kDivergencesNamedMax) {
    absl::StrAppend(&text, "; and so do ranks of ", divergence_.size() - kDivergencesNamedMax,
                    " more such groups");
  }
  return text;
}

std::string RanksText(const std::vector<Rank>& ranks) {
  if (ranks.empty()) {
    return "no rank";
  }
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < std::min(ranks.size(), kRanksNamedMax); ++i) {
    absl::StrAppend(&text, i == 0 ? "" : ", ", ranks[i]);
  }
  if (ranks.size() > kRanksNamedMax) {
    absl::StrAppend(&text, " and ", ranks.size() - kRanksNamedMax, " more");
  }
  return text;
}

std::string WhyNotTogether(const Checkpoint& checkpoint) {
  std::optional<Sharing> sharing;
  for (const auto& [rank, shard] : checkpoint.shards) {
    const CopyDetail& detail = shard.at(TierKind::kRemote).detail;
    if (detail.file_bytes == 0) {
      continue;
    }
    if (!sharing) {
      sharing.emplace(checkpoint);
    }
    if (sharing->PlanOf(rank) != detail.plan || detail.plan == LayoutHash{}) {
      return absl::StrCat("rank ", rank, "'s file (", detail.location,
                          ") leaves slices out that the others may not have");
    }
  }
  return "";
}

}  // namespace holdfast
