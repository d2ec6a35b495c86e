// Which parts of which saved shards make up what one rank wants, when a job comes back on another
// number of ranks or in another parallel layout (docs/elastic.md). Geometry alone: nothing is read.
//
//   HF_ASSIGN_OR_RETURN(ReshardPlanner planner, ReshardPlanner::For(std::move(wants)));
//   for (const auto& [layout, ranks] : saved) planner.Add(layout, ranks);  // each layout once
//   const ReshardPlan plan = planner.Plan(sources);
//   HF_RETURN_IF_ERROR(StatusOf(plan.problems));
//   for (const ReshardPlan::Piece& piece : plan.pieces) …  // copy it
//
// Every wanted element comes from exactly one saved slice. What is missing, or saved in two ways
// that contradict each other, is a problem with the tensor's name in it, and never guessed at.
// Planned where it is wanted: a planner keeps only what meets its own wants.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/ids.h"
#include "tiers/image/layout.h"
#include "tiers/image/region.h"

namespace holdfast {

// A part of a tensor that has memory at the reader. `slice`: its own name, dtype, global shape and
// place; a tensor, not an object.
struct Want {
  Slice slice;
  std::string saved_as;  // the tensor's name in what was saved; empty: its own
  bool convert = false;  // saved with another dtype it will do, too (Convertible)
};

// Whether elements of `from` can be made into those of `to`: between floating-point types of two
// bytes and more, rounding to the nearest.
bool Convertible(DType from, DType to);

// Elements that are wanted and slices that meet them: what one plan takes at most.
inline constexpr size_t kReshardWantsMax = kSlicesMax;
inline constexpr size_t kReshardPartsMax = 4'000'000;
inline constexpr size_t kReshardPiecesMax = 4'000'000;

struct ReshardProblem {
  enum class Kind : uint8_t {
    kMissing,        // no rank saved a tensor of that name
    kGap,            // some of its elements are in no shard
    kUnreadable,     // some are only in shards that cannot be read
    kConflict,       // saved and wanted dtype or global shape differ
    kContradiction,  // saved twice, in ways that cannot both be right
    kLimit,          // more than a plan may have
  } kind;
  std::string tensor;  // as it was saved
  std::string text;    // a sentence: the tensor, the two sides, where
};
// OK if there is none; else NotFound, FailedPrecondition or ResourceExhausted, of which the first
// few are told.
absl::Status StatusOf(std::span<const ReshardProblem> problems);

// Whom a plan may read from.
struct ReshardSources {
  // What reading a byte of that rank's shard costs, in any unit; nothing: it cannot be read.
  std::function<std::optional<uint64_t>(Rank)> cost;
  // The digests of the rank's slice (by its number in its layout), in the order of its blocks;
  // nothing: they are not known. Slices that are held twice must have the same.
  std::function<std::optional<std::span<const uint64_t>>(Rank, uint32_t)> digests;
  // Of shards that cost the same each reader starts with another one.
  uint64_t reader = 0;
  // As many ranks read as saved: what this one saved itself is right for it, whatever others have.
  std::optional<Rank> own = std::nullopt;
  // Whether what can be read of that rank's shard leaves the slice out, since another rank's has
  // it; null: no.
  std::function<bool(Rank, uint32_t)> lacks = nullptr;
};

struct ReshardPlan {
  struct Source {
    Rank rank = 0;
    uint32_t slice = 0;  // which of its layout
    DType dtype = DType::kU8;
    uint64_t slice_bytes = 0;
    bool operator==(const Source&) const = default;
  };
  struct Piece {
    uint32_t source = 0;  // of `sources`
    uint32_t want = 0;    // of those given to For
    StridedCopy copy;     // in elements: of the source's slice, into the want's memory
    bool operator==(const Piece&) const = default;
  };
  // Elements that two slices have which no digest compares, since their blocks are others: whoever
  // reads both must find the same bytes.
  struct Overlap {
    uint32_t source = 0;
    uint32_t other = 0;
    StridedCopy copy;
    bool operator==(const Overlap&) const = default;
  };
  std::vector<Source> sources;  // by rank, then slice; each once
  std::vector<Piece> pieces;    // by source, then as the want's elements come
  std::vector<Overlap> overlaps;
  std::vector<ReshardProblem> problems;  // not empty: pieces are not to be used
  uint64_t bytes = 0;                    // wanted, in the wants' dtypes
};

// Bytes of one slice, from its first one.
struct ByteRun {
  uint64_t begin = 0;
  uint64_t bytes = 0;
  bool operator==(const ByteRun&) const = default;
};
// What must be read of each source's slice so that all that is copied or compared of it can be
// verified: whole digest blocks, ascending; runs with at most `gap_bytes` between them are one.
std::vector<std::vector<ByteRun>> ReadsOf(const ReshardPlan& plan, uint64_t gap_bytes);

// Not thread-safe while layouts are added; Plan may be called again, with other sources, from any
// thread.
class ReshardPlanner {
 public:
  // InvalidArgument: a want that breaks the rules of slices, an object, two wants of one name that
  // share elements. ResourceExhausted: more than kReshardWantsMax.
  static absl::StatusOr<ReshardPlanner> For(std::vector<Want> wants);
  ReshardPlanner(ReshardPlanner&&) noexcept;
  ReshardPlanner& operator=(ReshardPlanner&&) noexcept;
  ~ReshardPlanner();

  // Each distinct layout of the saved ranks once, encoded, with all that have it, in any order: it
  // is not kept. Its hash has been checked. ResourceExhausted: more than kReshardPartsMax slices
  // meet the wants; InvalidArgument: it is malformed.
  absl::Status Add(std::string_view layout_bytes, std::span<const Rank> ranks);

  // What it comes to, problems included. Depends on what was added, not on its order.
  ReshardPlan Plan(const ReshardSources& sources) const;

 private:
  struct State;
  class Planning;
  explicit ReshardPlanner(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace holdfast
