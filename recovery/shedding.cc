#include "recovery/shedding.h"

#include <functional>

namespace holdfast {
namespace {

using Kind = ShedChoice::Kind;

// The oldest one that `wanted` accepts and that may go at all.
std::optional<CheckpointId> Oldest(std::span<const ShedChoice> checkpoints,
                                   const std::optional<CheckpointId>& untouchable,
                                   const std::function<bool(const ShedChoice&)>& wanted) {
  std::optional<CheckpointId> oldest;
  for (const ShedChoice& choice : checkpoints) {
    if (!choice.useful || choice.held || choice.id == untouchable || !wanted(choice)) {
      continue;
    }
    if (!oldest || choice.id < *oldest) {
      oldest = choice.id;
    }
  }
  return oldest;
}

// The smallest uncommitted step after `victim`, and if there is none the one being begun: whichever
// comes next.
CheckpointId NextUncommitted(std::span<const ShedChoice> checkpoints, CheckpointId victim,
                             CheckpointId begun) {
  CheckpointId next = begun;
  for (const ShedChoice& choice : checkpoints) {
    if (choice.kind == Kind::kUncommitted && choice.id > victim && choice.id < next) {
      next = choice.id;
    }
  }
  return next;
}

}  // namespace

std::optional<CheckpointId> Untouchable(std::span<const ShedChoice> checkpoints) {
  std::optional<CheckpointId> on_line;
  std::optional<CheckpointId> any;
  for (const ShedChoice& choice : checkpoints) {
    if (choice.superseded) {
      continue;
    }
    if (choice.kind == Kind::kOnLine && (!on_line || choice.id > *on_line)) {
      on_line = choice.id;
    }
    if (choice.kind == Kind::kOffLine && (!any || choice.id > *any)) {
      any = choice.id;
    }
  }
  return on_line ? on_line : any;
}

std::optional<Victim> ChooseSpare(std::span<const ShedChoice> checkpoints) {
  const std::optional<CheckpointId> untouchable = Untouchable(checkpoints);
  const auto of_kind = [](Kind kind, ShedChoice::Drain drain) {
    return [kind, drain](const ShedChoice& c) {
      return c.kind == kind && !c.pinned && c.drain == drain;
    };
  };
  if (auto id = Oldest(checkpoints, untouchable,
                       [](const ShedChoice& c) { return c.kind == Kind::kDead && !c.pinned; })) {
    return Victim{*id, ShedRule::kDead, std::nullopt};
  }
  for (const ShedChoice::Drain drain : {ShedChoice::Drain::kNone, ShedChoice::Drain::kOther}) {
    if (auto id = Oldest(checkpoints, untouchable, of_kind(Kind::kOffLine, drain))) {
      return Victim{*id, ShedRule::kOffLine, std::nullopt};
    }
    if (auto id = Oldest(checkpoints, untouchable, of_kind(Kind::kOnLine, drain))) {
      return Victim{*id, ShedRule::kOlderCommitted, std::nullopt};
    }
  }
  return std::nullopt;
}

std::optional<CheckpointId> ChooseDurable(std::span<const ShedChoice> checkpoints) {
  return Oldest(checkpoints, std::nullopt, [](const ShedChoice& c) {
    return c.durable && c.drain == ShedChoice::Drain::kNone;
  });
}

std::optional<CheckpointId> ChooseLast(std::span<const ShedChoice> checkpoints, bool draining) {
  for (const bool committed : {false, true}) {
    const auto oldest = Oldest(checkpoints, std::nullopt, [&](const ShedChoice& c) {
      const bool whole = c.kind == Kind::kOnLine || c.kind == Kind::kOffLine;
      const bool rests = c.drain == ShedChoice::Drain::kNone;
      return whole == committed && !c.pinned && (rests || draining);
    });
    if (oldest) {
      return oldest;
    }
  }
  return std::nullopt;
}

std::optional<Victim> ChooseVictim(std::span<const ShedChoice> checkpoints, CheckpointId begun) {
  if (auto spare = ChooseSpare(checkpoints)) {
    return spare;
  }
  bool protected_one = false;
  bool uncommitted_one = false;
  for (const ShedChoice& choice : checkpoints) {
    const bool other = choice.kind == Kind::kUncommitted && choice.id != begun;
    protected_one = protected_one || (choice.kind == Kind::kUncommitted && choice.is_protected);
    uncommitted_one = uncommitted_one || (other && choice.useful);
  }
  const std::optional<CheckpointId> untouchable = Untouchable(checkpoints);
  if (auto id = Oldest(checkpoints, untouchable, [&](const ShedChoice& c) {
        return c.kind == Kind::kUncommitted && !c.is_protected && c.id != begun;
      })) {
    Victim victim{*id, ShedRule::kUncommitted, std::nullopt};
    if (!protected_one) {
      victim.protect = NextUncommitted(checkpoints, *id, begun);
    }
    return victim;
  }
  // What is let finish on its way into a durable tier, and a user's restore point, yield only when
  // the job could not save at all otherwise; while another step is on its way, refusing this one
  // costs less.
  if (!uncommitted_one) {
    if (auto id = Oldest(checkpoints, untouchable, [](const ShedChoice& c) {
          return c.drain == ShedChoice::Drain::kFirst && !c.pinned &&
                 (c.kind == Kind::kOnLine || c.kind == Kind::kOffLine);
        })) {
      return Victim{*id, ShedRule::kDraining, std::nullopt};
    }
    if (auto id = Oldest(checkpoints, untouchable, [](const ShedChoice& c) {
          return c.pinned && c.kind != Kind::kUncommitted;
        })) {
      return Victim{*id, ShedRule::kPinned, std::nullopt};
    }
  }
  return std::nullopt;
}

std::vector<CheckpointId> Surplus(std::span<const ShedChoice> checkpoints, uint32_t keep) {
  if (keep == 0) {
    return {};
  }
  const std::optional<CheckpointId> untouchable = Untouchable(checkpoints);
  size_t committed = 0;
  std::vector<CheckpointId> off_line;
  std::vector<CheckpointId> on_line;
  for (const ShedChoice& choice : checkpoints) {
    if (choice.kind != ShedChoice::Kind::kOnLine && choice.kind != ShedChoice::Kind::kOffLine) {
      continue;
    }
    ++committed;
    if (choice.held || choice.pinned || choice.id == untouchable) {
      continue;
    }
    (choice.kind == ShedChoice::Kind::kOnLine ? on_line : off_line).push_back(choice.id);
  }
  std::sort(off_line.begin(), off_line.end());
  std::sort(on_line.begin(), on_line.end());
  std::vector<CheckpointId> removable = std::move(off_line);
  removable.insert(removable.end(), on_line.begin(), on_line.end());
  const size_t surplus = committed > keep ? committed - keep : 0;
  removable.resize(std::min(removable.size(), surplus));
  return removable;
}

}  // namespace holdfast
