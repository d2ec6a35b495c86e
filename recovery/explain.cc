#include "recovery/explain.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace holdfast {
namespace {

std::string Count(uint64_t n, std::string_view one, std::string_view many) {
  return absl::StrCat(n, " ", std::string(n == 1 ? one : many));
}
std::string Ranks(uint64_t n) {
  return Count(n, "rank", "ranks");
}
std::string Shards(uint64_t n) {
  return Count(n, "shard", "shards");
}

std::string NameOf(CheckpointId id) {
  return absl::StrCat("step ", id.step, " of attempt ", id.attempt);
}

bool FitsWorld(const CheckpointView& checkpoint, uint32_t world_size) {
  return world_size == 0 || checkpoint.world_size == world_size;
}

const Unreadable* WhyUnreadable(CheckpointId id, const RestoreContext& context) {
  if (context.unreadable == nullptr) {
    return nullptr;
  }
  const auto found = context.unreadable->find(id);
  return found == context.unreadable->end() ? nullptr : &found->second;
}

// Why it is not whole, or from where it would come.
std::string Wholeness(const CheckpointView& checkpoint, const RestoreContext& context) {
  if (!checkpoint.consistent || checkpoint.world_size == 0) {
    return "cannot be restored: its shards disagree about the number of ranks";
  }
  if (checkpoint.Restorable()) {
    return absl::StrCat("whole: ", SourcesOf(checkpoint, context.configured));
  }
  if (const Unreadable* why = WhyUnreadable(checkpoint.id, context)) {
    return absl::StrCat("cannot be restored: ", why->what);
  }
  const uint32_t absent = checkpoint.world_size - checkpoint.restorable;
  return absl::StrCat("cannot be restored: no tier has a good copy of ", absent, " of ",
                      Shards(checkpoint.world_size));
}

// Which branch it is of, when not the line's.
std::string LeftBranch(CheckpointId id, std::span<const Descent> line) {
  if (line.empty()) {
    return "no attempt has decided yet what it descends from";
  }
  const std::string named = absl::StrCat("; ckptctl restore --step ", id.step, " --attempt ",
                                         id.attempt, " takes it all the same");
  for (const Descent& descent : line) {
    if (descent.parent.attempt == id.attempt && descent.parent.attempt < descent.attempt) {
      return absl::StrCat("not on the line of descent: attempt ", descent.attempt,
                          " went back to step ", descent.parent.step, " of attempt ", id.attempt,
                          named);
    }
  }
  return absl::StrCat("not on the line of descent: attempt ", line.front().attempt,
                      " does not descend from attempt ", id.attempt, named);
}

std::string TierText(const CheckpointView& checkpoint, TierKind tier) {
  const TierPresence& here = checkpoint.at(tier);
  const uint32_t world = checkpoint.world_size;
  std::string text = absl::StrCat(std::string(TierName(tier)), ": ");
  if (world > 0 && here.good == world) {
    absl::StrAppend(&text, "all of ", Shards(world));
  } else if (here.good + here.bad + here.unlisted + here.doubted == 0) {
    absl::StrAppend(&text, "nothing");
  } else {
    absl::StrAppend(&text, here.good, " of ", Shards(world), " good");
    const uint32_t found = here.good + here.bad + here.unlisted + here.doubted;
    if (here.bad > 0) {
      absl::StrAppend(&text, ", ", here.bad, " bad");
    }
    if (here.unlisted > 0) {
      absl::StrAppend(&text, ", ", here.unlisted, " that no manifest names");
    }
    if (here.doubted > 0) {
      absl::StrAppend(&text, ", ", here.doubted, " that leave out what a bad or missing one has");
    }
    if (found < world) {
      absl::StrAppend(&text, ", ", world - found, " missing");
    }
  }
  if (here.flushing) {
    absl::StrAppend(&text, "; is being written");
  } else if (here.wanted) {
    absl::StrAppend(&text, "; waits for its turn");
  }
  return text;
}

const CheckpointView* Find(std::span<const CheckpointView> checkpoints, CheckpointId id) {
  const auto found = std::find_if(checkpoints.begin(), checkpoints.end(),
                                  [&](const CheckpointView& c) { return c.id == id; });
  return found == checkpoints.end() ? nullptr : &*found;
}

// No obstacle: each rank puts together what it wants.
std::string OtherWorld(const CheckpointView& checkpoint, uint32_t world_size) {
  return absl::StrCat("it was saved by ", Ranks(checkpoint.world_size), " and the job has ",
                      world_size, " now, so each reads what it wants of all that was saved");
}

// What keeps a restore from taking it; empty: nothing.
std::string Obstacle(const CheckpointView& checkpoint, const RestoreContext& context) {
  return checkpoint.Restorable() ? "" : Wholeness(checkpoint, context);
}

// Where the ranks get it from.
std::string Ways(const CheckpointView& checkpoint, const RestoreContext& context) {
  return absl::StrCat(
      SourcesOf(checkpoint, context.configured),
      FitsWorld(checkpoint, context.world_size) ? "" : "; ",
      FitsWorld(checkpoint, context.world_size) ? "" : OtherWorld(checkpoint, context.world_size));
}

std::string ExplainRestorePoint(const CheckpointView* asked, const RestoreContext& context) {
  const std::string name = NameOf(*context.restore_point);
  const std::string obstacle =
      asked == nullptr ? "nothing of it is left" : Obstacle(*asked, context);
  if (!obstacle.empty()) {
    return absl::StrCat("none: ckptctl restore asked for ", name, ", but ", obstacle);
  }
  return absl::StrCat(name, ", as ckptctl restore asked: ", Ways(*asked, context));
}

}  // namespace

std::string SourcesOf(const CheckpointView& checkpoint, TierSet configured) {
  std::vector<std::string> sources;
  TierSet nearer = 0;
  for (TierKind tier : kAllTiers) {
    if (!Has(configured, tier)) {
      continue;
    }
    const uint32_t before = checkpoint.RanksIn(nearer);
    nearer |= SetOf(tier);
    if (const uint32_t ranks = checkpoint.RanksIn(nearer) - before; ranks > 0) {
      sources.push_back(absl::StrCat(std::string(TierName(tier)), " for ", Ranks(ranks)));
    }
  }
  return absl::StrJoin(sources, ", ");
}

StepReasons ExplainStep(const CheckpointView& checkpoint, const RestoreContext& context) {
  StepReasons result;
  result.id = checkpoint.id;
  result.restorable = checkpoint.Restorable();
  result.on_line = OnLine(context.line, checkpoint.id);
  std::vector<std::string>& reasons = result.reasons;
  reasons.push_back(Wholeness(checkpoint, context));
  if (const Unreadable* why = WhyUnreadable(checkpoint.id, context);
      why != nullptr && !result.restorable) {
    reasons.insert(reasons.end(), why->shards.begin(), why->shards.end());
  }
  if (!result.on_line) {
    reasons.push_back(LeftBranch(checkpoint.id, context.line));
  }
  if (!FitsWorld(checkpoint, context.world_size)) {
    reasons.push_back(OtherWorld(checkpoint, context.world_size));
  }
  if (!checkpoint.complete && !result.restorable) {
    reasons.push_back("not every rank has sealed it");
  }
  for (TierKind tier : kAllTiers) {
    // (Most jobs keep no replicas.)
    const TierPresence& here = checkpoint.at(tier);
    const bool silent =
        tier == TierKind::kPeer && here.good + here.bad == 0 && !here.flushing && !here.wanted;
    if (Has(context.configured, tier) && !silent) {
      reasons.push_back(TierText(checkpoint, tier));
    }
  }
  if (checkpoint.pinned) {
    reasons.push_back("pinned: no retention removes it");
  }
  if (checkpoint.held) {
    reasons.push_back("held: a restore may be using it");
  }
  return result;
}

std::string ExplainChoice(std::span<const CheckpointView> checkpoints,
                          const RestoreContext& context) {
  if (context.from_scratch) {
    return "none: ckptctl restore --from-scratch asked to begin anew";
  }
  if (context.restore_point) {
    return ExplainRestorePoint(Find(checkpoints, *context.restore_point), context);
  }
  const CheckpointView* chosen = nullptr;
  const CheckpointView* newest = nullptr;  // of the line, whether or not it can be restored
  for (const CheckpointView& checkpoint : checkpoints) {
    if (!OnLine(context.line, checkpoint.id)) {
      continue;
    }
    if (newest == nullptr || checkpoint.id > newest->id) {
      newest = &checkpoint;
    }
    if (Obstacle(checkpoint, context).empty() &&
        (chosen == nullptr || checkpoint.id > chosen->id)) {
      chosen = &checkpoint;
    }
  }
  if (chosen == nullptr) {
    return newest == nullptr
               ? "none: no step on the line of descent is known"
               : absl::StrCat("none: no step on the line of descent can be used; the newest, ",
                              NameOf(newest->id), ": ", Obstacle(*newest, context));
  }
  std::string text = absl::StrCat(NameOf(chosen->id), ": ", Ways(*chosen, context));
  if (chosen != newest) {
    absl::StrAppend(&text, "; not the newer ", NameOf(newest->id), ": ",
                    Obstacle(*newest, context));
  }
  return text;
}

}  // namespace holdfast
