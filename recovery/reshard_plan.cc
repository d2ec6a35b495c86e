// A plan, from what a planner has kept.
#include <algorithm>
#include <map>
#include <unordered_map>

#include "absl/strings/str_cat.h"
#include "base/digest.h"
#include "base/status.h"
#include "recovery/reshard.h"
#include "recovery/reshard_internal.h"
#include "recovery/reshard_state.h"
#include "tiers/image/layout_rules.h"

namespace holdfast {
namespace {

using reshard_internal::Candidate;
using reshard_internal::Cover;
using reshard_internal::CoverOf;
using reshard_internal::Holder;
using reshard_internal::Is;
using reshard_internal::MeetsAny;
using reshard_internal::Part;
using reshard_internal::PartKey;
using reshard_internal::SavedTensor;
using reshard_internal::ShapeText;
using reshard_internal::WantedTensor;
using reshard_internal::WantState;

constexpr size_t kProblemsNamed = 8;

bool Floating(DType dtype) {
  return dtype == DType::kF16 || dtype == DType::kBF16 || dtype == DType::kF32 ||
         dtype == DType::kF64;
}

}  // namespace

// One plan being made.
class ReshardPlanner::Planning {
 public:
  Planning(const State& state, const ReshardSources& from) : state_(state), from_(from) {}

  ReshardPlan Make();

 private:
  struct PartAndKey {
    const PartKey* key;
    const Part* part;
  };
  // A part that is of use: from whom it comes.
  struct Chosen {
    const Part* part;
    uint32_t source;
    uint64_t cost;
  };

  struct Choice {
    std::optional<Chosen> chosen;  // nothing: it cannot be read
    bool contradiction = false;
  };

  void PlanTensor(const std::string& name, const WantedTensor& tensor);
  void PlanWant(const std::string& name, const SavedTensor& saved, uint32_t want,
                std::span<const PartAndKey> parts);
  void NameGap(const std::string& name, const WantState& want, const Region& gap,
               std::span<const PartAndKey> parts);
  const Choice& Choose(const std::string& name, const SavedTensor& saved, const PartAndKey& part);
  bool SameDigests(const std::string& name, const PartAndKey& part,
                   std::span<const std::pair<Rank, const Holder*>> holders);
  uint32_t SourceOf(Rank rank, const Holder& holder, DType dtype, uint64_t bytes);
  void Problem(ReshardProblem::Kind kind, const std::string& name, std::string text) {
    plan_.problems.push_back({kind, name, std::move(text)});
  }
  void Order();

  const State& state_;
  const ReshardSources& from_;
  ReshardPlan plan_;
  std::map<std::pair<Rank, uint32_t>, uint32_t> numbers_;  // of sources
  std::unordered_map<const Part*, Choice> choices_;
};

ReshardPlan ReshardPlanner::Planning::Make() {
  std::vector<const std::pair<const std::string, WantedTensor>*> tensors;
  for (const auto& tensor : state_.tensors) {
    tensors.push_back(&tensor);
  }
  std::sort(tensors.begin(), tensors.end(),
            [](const auto* a, const auto* b) { return a->first < b->first; });
  for (const auto* tensor : tensors) {
    PlanTensor(tensor->first, tensor->second);
  }
  Order();
  return std::move(plan_);
}

void ReshardPlanner::Planning::PlanTensor(const std::string& name, const WantedTensor& tensor) {
  if (!tensor.known) {
    return Problem(ReshardProblem::Kind::kMissing, name,
                   absl::StrCat("tensor ", image_internal::QuoteName(name),
                                " is in no rank's shard of the step"));
  }
  if (tensor.contradiction) {
    plan_.problems.push_back(*tensor.contradiction);
    return;
  }
  const SavedTensor& saved = tensor.saved;
  std::vector<PartAndKey> parts;
  for (const auto& [key, part] : saved.parts) {
    parts.push_back({&key, &part});
  }
  std::sort(parts.begin(), parts.end(),
            [](const PartAndKey& a, const PartAndKey& b) { return *a.key < *b.key; });
  for (const uint32_t number : tensor.wants) {
    const WantState& want = state_.wants[number];
    const Slice& slice = want.want.slice;
    const bool dtype_fits =
        slice.dtype == saved.dtype || (want.want.convert && Convertible(saved.dtype, slice.dtype));
    if (!dtype_fits || slice.global_shape != saved.global_shape) {
      Problem(ReshardProblem::Kind::kConflict, name,
              absl::StrCat("tensor ", image_internal::QuoteName(name), " was saved as ",
                           Is(saved.dtype, saved.global_shape), " (by rank ", saved.said_by,
                           ") and is wanted as ", Is(slice.dtype, slice.global_shape),
                           slice.global_shape != saved.global_shape ? ""
                           : want.want.convert ? ", which it cannot be made into"
                                               : "; ask for it to be converted"));
      continue;
    }
    plan_.bytes += want.elements * DTypeBytes(slice.dtype);
    PlanWant(name, saved, number, parts);
  }
}

void ReshardPlanner::Planning::PlanWant(const std::string& name, const SavedTensor& saved,
                                        uint32_t number, std::span<const PartAndKey> parts) {
  const WantState& want = state_.wants[number];
  // 1. Everything readable that meets it, the cheapest first.
  std::vector<Chosen> readable;
  std::vector<Candidate> candidates;
  for (const PartAndKey& part : parts) {
    if (!MeetsAny(part.part->regions, want.regions)) {
      continue;
    }
    const Choice& choice = Choose(name, saved, part);
    if (choice.contradiction) {
      return;  // it has been named
    }
    if (!choice.chosen) {
      continue;
    }
    for (const Region& have : part.part->regions) {
      for (const Region& wanted : want.regions) {
        if (std::optional<Region> both = Intersection(have, wanted)) {
          candidates.push_back({static_cast<uint32_t>(readable.size()), std::move(*both)});
        }
      }
    }
    readable.push_back(*choice.chosen);
  }
  std::stable_sort(candidates.begin(), candidates.end(),
                   [&](const Candidate& a, const Candidate& b) {
                     return readable[a.part].cost < readable[b.part].cost;
                   });
  // 2. Each element once.
  const Cover cover = CoverOf(want.regions, candidates, kReshardPiecesMax - plan_.pieces.size());
  if (cover.too_many) {
    return Problem(ReshardProblem::Kind::kLimit, name,
                   absl::StrCat("tensor ", image_internal::QuoteName(name),
                                " was saved in too many parts that overlap"));
  }
  if (!cover.gaps.empty()) {
    return NameGap(name, want, cover.gaps.front(), parts);
  }
  // 3. As copies.
  for (const Candidate& piece : cover.pieces) {
    const Chosen& from = readable[piece.part];
    plan_.pieces.push_back(
        {from.source, number, CopyOf(piece.region, from.part->places, want.places)});
  }
  for (const Cover::Twice& twice : cover.twice) {
    const Chosen& a = readable[twice.part];
    const Chosen& b = readable[twice.other];
    plan_.overlaps.push_back(
        {a.source, b.source, CopyOf(twice.region, a.part->places, b.part->places)});
  }
}

// Of elements that nobody who can be read has: whether somebody else has them.
void ReshardPlanner::Planning::NameGap(const std::string& name, const WantState& want,
                                       const Region& gap, std::span<const PartAndKey> parts) {
  for (const PartAndKey& part : parts) {
    if (MeetsAny(part.part->regions, std::span(&gap, 1))) {
      const Holder& holder = part.part->holders.front();
      return Problem(
          ReshardProblem::Kind::kUnreadable, name,
          absl::StrCat("tensor ", image_internal::QuoteName(name), ": elements of ", ToText(gap),
                       " are in shards alone that cannot be read now (rank ",
                       state_.ranks_of[holder.layout].front(), "'s)"));
    }
  }
  Problem(ReshardProblem::Kind::kGap, name,
          absl::StrCat("tensor ", image_internal::QuoteName(name), " of ",
                       ShapeText(want.want.slice.global_shape), ": elements ", ToText(gap),
                       " are wanted, and no rank saved them"));
}

const ReshardPlanner::Planning::Choice& ReshardPlanner::Planning::Choose(const std::string& name,
                                                                         const SavedTensor& saved,
                                                                         const PartAndKey& part) {
  const auto [it, fresh] = choices_.try_emplace(part.part);
  Choice& choice = it->second;
  if (!fresh) {
    return choice;
  }
  std::vector<std::pair<Rank, const Holder*>> readable;
  std::vector<uint64_t> costs;
  uint64_t least = 0;
  for (const Holder& holder : part.part->holders) {
    for (const Rank rank : state_.ranks_of[holder.layout]) {
      if (from_.lacks && from_.lacks(rank, holder.slice)) {
        continue;
      }
      if (const std::optional<uint64_t> cost = from_.cost(rank)) {
        if (rank == from_.own) {
          choice.chosen =
              Chosen{part.part, SourceOf(rank, holder, saved.dtype, part.part->bytes), *cost};
          return choice;
        }
        least = costs.empty() ? *cost : std::min(least, *cost);
        readable.emplace_back(rank, &holder);
        costs.push_back(*cost);
      }
    }
  }
  choice.contradiction = !SameDigests(name, part, readable);
  if (readable.empty() || choice.contradiction) {
    return choice;
  }
  std::vector<std::pair<Rank, const Holder*>> nearest;
  for (size_t i = 0; i < readable.size(); ++i) {
    if (costs[i] == least) {
      nearest.push_back(readable[i]);
    }
  }
  // Each reader begins with another one, and takes the next for its next part; what is little, and
  // less than the opening of another shard, always of the same one.
  const bool little = part.part->bytes < kDigestBlockBytes;
  const size_t turn = (from_.reader + (little ? 0 : choices_.size() - 1)) % nearest.size();
  std::nth_element(nearest.begin(), nearest.begin() + static_cast<ptrdiff_t>(turn), nearest.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  const auto& [rank, holder] = nearest[turn];
  choice.chosen = Chosen{part.part, SourceOf(rank, *holder, saved.dtype, part.part->bytes), least};
  return choice;
}

// All that is known of them is the same; else it is a problem.
bool ReshardPlanner::Planning::SameDigests(
    const std::string& name, const PartAndKey& part,
    std::span<const std::pair<Rank, const Holder*>> holders) {
  if (holders.size() < 2 || !from_.digests) {
    return true;
  }
  std::optional<std::span<const uint64_t>> first;
  Rank first_rank = 0;
  for (const auto& [rank, holder] : holders) {
    const auto digests = from_.digests(rank, holder->slice);
    if (digests && first &&
        !std::equal(digests->begin(), digests->end(), first->begin(), first->end())) {
      Problem(ReshardProblem::Kind::kContradiction, name,
              absl::StrCat("tensor ", image_internal::QuoteName(name), ": ranks ",
                           std::min(rank, first_rank), " and ", std::max(rank, first_rank),
                           " both saved ", ToText(part.part->regions.front()),
                           part.part->regions.size() > 1 ? " and on" : "",
                           ", with different bytes: the replicas have diverged"));
      return false;
    }
    if (digests && !first) {
      first = digests;
      first_rank = rank;
    }
  }
  return true;
}

uint32_t ReshardPlanner::Planning::SourceOf(Rank rank, const Holder& holder, DType dtype,
                                            uint64_t bytes) {
  const auto number = static_cast<uint32_t>(plan_.sources.size());
  const auto [it, fresh] = numbers_.try_emplace({rank, holder.slice}, number);
  if (fresh) {
    plan_.sources.push_back({rank, holder.slice, dtype, bytes});
  }
  return it->second;
}

// Sources by rank and slice, those alone that are of use; and what is read from each together.
void ReshardPlanner::Planning::Order() {
  std::vector<bool> used(plan_.sources.size());
  for (const ReshardPlan::Piece& piece : plan_.pieces) {
    used[piece.source] = true;
  }
  for (const ReshardPlan::Overlap& overlap : plan_.overlaps) {
    used[overlap.source] = used[overlap.other] = true;
  }
  std::vector<ReshardPlan::Source> sources;
  std::vector<uint32_t> now(plan_.sources.size());
  for (const auto& [name, number] : numbers_) {
    if (used[number]) {
      now[number] = static_cast<uint32_t>(sources.size());
      sources.push_back(plan_.sources[number]);
    }
  }
  plan_.sources = std::move(sources);
  for (ReshardPlan::Piece& piece : plan_.pieces) {
    piece.source = now[piece.source];
  }
  for (ReshardPlan::Overlap& overlap : plan_.overlaps) {
    overlap.source = now[overlap.source];
    overlap.other = now[overlap.other];
  }
  std::stable_sort(plan_.pieces.begin(), plan_.pieces.end(),
                   [](const auto& a, const auto& b) { return a.source < b.source; });
}

bool Convertible(DType from, DType to) {
  return from == to || (Floating(from) && Floating(to));
}

absl::Status StatusOf(std::span<const ReshardProblem> problems) {
  if (problems.empty()) {
    return absl::OkStatus();
  }
  std::string text = "reshard: ";
  for (size_t i = 0; i < problems.size() && i < kProblemsNamed; ++i) {
    absl::StrAppend(&text, i == 0 ? "" : "; ", problems[i].text);
  }
  if (problems.size() > kProblemsNamed) {
    absl::StrAppend(&text, "; and ", problems.size() - kProblemsNamed, " more");
  }
  using Kind = ReshardProblem::Kind;
  const auto any = [&](Kind kind) {
    return std::any_of(problems.begin(), problems.end(),
                       [kind](const ReshardProblem& problem) { return problem.kind == kind; });
  };
  if (any(Kind::kConflict) || any(Kind::kContradiction)) {
    return absl::FailedPreconditionError(text);
  }
  if (any(Kind::kMissing) || any(Kind::kGap)) {
    return absl::NotFoundError(text);
  }
  return any(Kind::kUnreadable) ? absl::UnavailableError(text) : absl::ResourceExhaustedError(text);
}

ReshardPlan ReshardPlanner::Plan(const ReshardSources& sources) const {
  return Planning(*state_, sources).Make();
}

}  // namespace holdfast
